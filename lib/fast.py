"""Optimisations. Without them, only the speed and the last digits change."""
import gc
import math

import torch
import torch.nn.functional as F


def has_fast_bfloat16(*tensors):
    """True if a GPU can multiply these bfloat16 tensors into float32 sums. The meta device (--dry-run) counts as a GPU.
    """
    return all(tensor.device.type in ("cuda", "meta") and tensor.dtype == torch.bfloat16 for tensor in tensors)


def float_sums(hidden, weight):
    """The product (n, V) float32 of states (n, H) and weights (V, H) of any type. A GPU computes it from bfloat16 ten
    times as fast as from float32, with an error of at most 2e-5 nats, but without a gradient."""
    if has_fast_bfloat16(hidden, weight):
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    return F.linear(hidden.float(), weight.float())


class RowValues(torch.autograd.Function):
    """function(sums, *tensors) (N,), computed in `num_parts` parts. Each result depends only on its own row of
    float_sums(hidden, weight) and of the tensors. Its derivative by that row is computed at once and kept in the type
    of the weights, so the backward pass does not recompute logits.

    bias: None, or (V,), which `function` adds to the sums"""

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
        if ctx.needs_input_grad[1]:                                 # not if the model is frozen
            of_inputs[1] = slopes.t() @ (hidden * gradient[:, None])                              # (V, H)
        if ctx.needs_input_grad[2]:
            of_inputs[2] = gradient @ slopes                                                      # (V,)
        return tuple(of_inputs)


MAX_GROUPED = 128               # the largest head size that grouped_attention takes


def grouped_attention(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **options):
    """Same as transformers' "sdpa" with a mask that hides all later tokens. "sdpa" repeats the keys and values of
    grouped queries and also computes masked scores; an H100's kernel for bfloat16 does neither."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    takes_heads = query.shape[3] <= MAX_GROUPED and query.shape[3] % 8 == 0 and not dropout
    takes_mask = attention_mask is not None and attention_mask.dtype == query.dtype     # bools: a sliding window's
    if not takes_heads or not takes_mask or query.shape[2] == 1:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **options)
    attend = torch.ops.aten._scaled_dot_product_cudnn_attention     # unchecked; F's takes no mask with is_causal
    output = attend(query, key, value, attention_mask, True, dropout, True, scale=scaling)[0]
    return output.transpose(1, 2).contiguous(), None


def takes_grouped_queries():
    """True if grouped_attention may call cuDNN's kernel on this GPU: where torch also prefers it, from cuDNN 9.15.1
    (check_prefer_cudnn_attention in torch's sdp_utils.cpp)."""
    return torch.cuda.get_device_capability()[0] in (9, 10) and (torch.backends.cudnn.version() or 0) > 91500


def use_grouped_attention(model):
    """Make a model use grouped_attention instead of "sdpa". Families without "sdpa" are unchanged."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
    AttentionInterface.register("grouped", grouped_attention)
    AttentionMaskInterface.register("grouped", sdpa_mask)
    if model.config._attn_implementation == "sdpa":
        model.set_attn_implementation("grouped")


# On a GPU widths are multiples of this: attention kernels need a tenth of a second to plan for each new shape.
WIDTH_STEP = {"cuda": 32}


def width_padding(width, device):
    """Number of padding tokens for rows of `width` tokens on a device."""
    return -width % WIDTH_STEP.get(torch.device(device).type, 1)


def few_sizes(number):
    """The next of a few sizes, all multiples of 64: at most 63 or a quarter above `number`, whichever is more."""
    eighth = 2 ** (number - 1).bit_length() // 8
    step = max(64, eighth)
    return math.ceil(number / step) * step


class Graph:
    """The kernels of work() as a CUDA graph. work() must read and write the same memory each time.
    others: Graphs with which it may share memory for temporary tensors."""

    def __init__(self, work, others):
        stream = torch.cuda.current_stream()
        self.graph = torch.cuda.CUDAGraph()
        pool = others[0].graph.pool() if others else None
        gc.disable()                                            # freeing another engine's graphs would end the capture
        try:
            # thread_local: other threads (e.g. CLIP's) may allocate memory meanwhile
            with torch.cuda.graph(self.graph, pool=pool, capture_error_mode="thread_local"):
                self.result = work()
        except RuntimeError:
            torch.cuda.set_stream(stream)
            raise
        finally:
            gc.enable()

    def replay(self):
        """Run the graph. Returns the result of work(), which is valid until the next replay."""
        self.graph.replay()
        return self.result


def compile_layers(model, layers):
    """Compile the layers of a model when they are first called: one compilation for all layers and lengths."""
    torch._dynamo.config.specialize_int = True                      # or head sizes of FSDP2's layers become dynamic
    torch._dynamo.config.specialize_float = True                    # or a scaling by 1 is kept
    torch._dynamo.config.recompile_limit = 32                       # one row, or no gradients: another graph each
    model.get_input_embeddings().register_forward_hook(ask_gradients)
    for layer in layers:
        layer.compile(dynamic=True)


def ask_gradients(_, ids, states):
    """Hook that gives the first layer's input gradients, as in all other layers; else LoRA would compile it separately.
    """
    return states.requires_grad_(torch.is_grad_enabled())
