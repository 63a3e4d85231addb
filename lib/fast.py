"""What only makes it faster: without it nothing changes but time and the last digits."""
import gc
import math

import torch
import torch.nn.functional as F


def has_fast_bfloat16(*tensors):
    """Whether a GPU multiplies bfloat16 like this into float32 sums. The meta device (--dry-run) stands for a GPU."""
    return all(tensor.device.type in ("cuda", "meta") and tensor.dtype == torch.bfloat16 for tensor in tensors)


def float_sums(hidden, weight):
    """The product (n, V) float32 of states (n, H) and weights (V, H), whatever type they are in. Of bfloat16 a GPU
    makes it ten times as fast as of float32, and as exact but for 2e-5 nats; it has no gradient then."""
    if has_fast_bfloat16(hidden, weight):
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    return F.linear(hidden.float(), weight.float())


class RowValues(torch.autograd.Function):
    """function(sums, *tensors) (N,), of which each number depends on its own row of float_sums(hidden, weight) and of
    the tensors, made in `num_parts` parts. Its slope by that row is made at once and kept in the type of the weights:
    the backward pass computes no logits again.

    bias: None, or one (V,) that `function` adds to the sums"""

    @staticmethod
    def forward(ctx, hidden, weight, bias, function, num_parts, *tensors):
        assert not any(tensor.requires_grad for tensor in tensors)
        slopes = torch.empty(len(hidden), len(weight), dtype=weight.dtype, device=weight.device)
        results = []
        for part, states, *others in zip(*(tensor.chunk(num_parts) for tensor in (slopes, hidden, *tensors))):
            sums = float_sums(states, weight).requires_grad_()                                    # (n, V)
            with torch.enable_grad():
                values = function(sums, *others)                                                  # (n,)
                [slope] = torch.autograd.grad(values.sum(), sums)                                 # (n, V)
            part.copy_(slope)
            results.append(values.detach())
        ctx.save_for_backward(hidden, weight, slopes)
        ctx.num_inputs = 5 + len(tensors)
        return torch.cat(results)

    @staticmethod
    def backward(ctx, gradient):
        hidden, weight, slopes = ctx.saved_tensors
        gradient = gradient.to(weight.dtype)                                                      # (N,)
        of_inputs = [None] * ctx.num_inputs
        of_inputs[0] = (slopes @ weight) * gradient[:, None]                                      # (N, H)
        if ctx.needs_input_grad[1]:                                 # not of a frozen model
            of_inputs[1] = slopes.t() @ (hidden * gradient[:, None])                              # (V, H)
        if ctx.needs_input_grad[2]:
            of_inputs[2] = gradient @ slopes                                                      # (V,)
        return tuple(of_inputs)


MAX_GROUPED = 128               # numbers of a head that grouped_attention takes


def grouped_attention(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **options):
    """As transformers' "sdpa" with a mask that hides all later tokens. "sdpa" repeats the keys and values of grouped
    queries and computes hidden scores, too; the kernel of an H100 for bfloat16 need not."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    takes_heads = query.shape[3] <= MAX_GROUPED and query.shape[3] % 8 == 0 and not dropout
    takes_mask = attention_mask is not None and attention_mask.dtype == query.dtype     # bools: a sliding window's
    if not takes_heads or not takes_mask or query.shape[2] == 1:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **options)
    attend = torch.ops.aten._scaled_dot_product_cudnn_attention     # checks nothing; F's takes no mask that is causal
    output = attend(query, key, value, attention_mask, True, dropout, True, scale=scaling)[0]
    return output.transpose(1, 2).contiguous(), None


def takes_grouped_queries():
    """Whether grouped_attention may call cuDNN's kernel on this GPU: where torch prefers it, too, not before cuDNN
    9.15.1 (check_prefer_cudnn_attention in torch's sdp_utils.cpp)."""
    return torch.cuda.get_device_capability()[0] in (9, 10) and (torch.backends.cudnn.version() or 0) > 91500


def use_grouped_attention(model):
    """Have a model compute with grouped_attention in the place of "sdpa"; families that lack this stay as they are."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
    AttentionInterface.register("grouped", grouped_attention)
    AttentionMaskInterface.register("grouped", sdpa_mask)
    if model.config._attn_implementation == "sdpa":
        model.set_attn_implementation("grouped")


# On a GPU widths are multiples of this: kernels of attention take a tenth of a second to plan for each new shape.
WIDTH_STEP = {"cuda": 32}


def width_padding(width, device):
    """How many tokens of padding rows of `width` tokens get on a device."""
    return -width % WIDTH_STEP.get(torch.device(device).type, 1)


def few_sizes(number):
    """The next of a few sizes, all multiples of 64: at most 63 or a quarter above `number`, whichever is more."""
    eighth = 2 ** (number - 1).bit_length() // 8
    step = max(64, eighth)
    return math.ceil(number / step) * step


class Graph:
    """The kernels of work(), which reads and writes the same memory each time, as a CUDA graph.
    others: Graphs whose memory for what lives during a pass it may use, too."""

    def __init__(self, work, others):
        stream = torch.cuda.current_stream()
        self.graph = torch.cuda.CUDAGraph()
        pool = others[0].graph.pool() if others else None
        gc.disable()                                            # to free another engine's graphs would end the capture
        try:
            # thread_local: other threads (that of CLIP, say) may take memory meanwhile
            with torch.cuda.graph(self.graph, pool=pool, capture_error_mode="thread_local"):
                self.result = work()
        except RuntimeError:
            torch.cuda.set_stream(stream)
            raise
        finally:
            gc.enable()

    def replay(self):
        """What work() returns, until the next replay."""
        self.graph.replay()
        return self.result


def compile_layers(model, layers):
    """Have the layers of a model compiled when they are first called: one compilation for all layers and lengths."""
    torch._dynamo.config.specialize_int = True                      # or the heads of FSDP2's layers vary in size
    torch._dynamo.config.specialize_float = True                    # or a scaling by 1 stays
    torch._dynamo.config.recompile_limit = 32                       # one row, or no gradients: a graph each
    model.get_input_embeddings().register_forward_hook(ask_gradients)
    for layer in layers:
        layer.compile(dynamic=True)


def ask_gradients(_, ids, states):
    """A hook: the first layer's input has gradients like that of others, or it would be compiled apart with LoRA."""
    return states.requires_grad_(torch.is_grad_enabled())
