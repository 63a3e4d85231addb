"""Sampling from a local model: continuous batching with a key-value cache per dialogue."""
import asyncio
import collections
import dataclasses
import functools
import os

import torch
import torch.nn.functional as F
from torch.nn.attention import sdpa_kernel, SDPBackend
from torch.nn.utils.rnn import pad_sequence

from lib.fast import few_sizes, Graph, has_fast_bfloat16, width_padding
from lib.load import decoder_mask, most_positions, projection_of, sliding_window, takes_masks
from lib.runtime import InputError, say

MAX_PADDING = 1.5               # most computed tokens of a prefill pass, relative to the missing tokens of its prompts
MIN_ACTIVE_FRAC = 0.75          # least share of active rows in a decoding step
# All kernels except cuDNN's, which needs .05 s to plan for each new shape: most prefill passes have a new one
UNPLANNED = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def next_tokens(logits, uniforms, temperatures):
    """A token for each row of logits (n, V) float32: sampled by inverse CDF with its number in uniforms (n,), or the
    likeliest if its temperature in temperatures (n,) is 0."""
    is_greedy = temperatures == 0
    temperatures = temperatures.masked_fill(is_greedy, 1)
    cdf = torch.softmax(logits / temperatures[:, None], -1).cumsum(-1)                                # (n, V)
    places = uniforms[:, None] * cdf[:, -1:]                                                          # (n, 1)
    tokens = torch.searchsorted(cdf, places, right=True).squeeze(1)                                   # (n,)
    tokens = tokens.clamp(max=logits.shape[1] - 1)
    return torch.where(is_greedy, logits.argmax(-1), tokens)


@dataclasses.dataclass(eq=False)
class Request:
    """The samples requested by a call of generate()."""

    prompt: list                # ids
    uniforms: list              # a list for each sample
    temperature: float
    key: object                 # the dialogue; the cache may hold tokens of its earlier requests
    outputs: list               # the new ids of each sample
    future: asyncio.Future      # gets the outputs


@dataclasses.dataclass(eq=False)
class Slot:
    """A row of the cache and its sample; without a request it is idle."""

    row: int
    ids: list                   # tokens whose keys and values are in the row
    key: object = None          # the dialogue that they belong to
    kept_since: int = -1        # the decoding step at which a request got it; 0: its tokens need not be kept
    request: Request | None = None
    output: list | None = None  # new ids
    uniforms: list | None = None

    def num_shared(self, request):
        """Length of the common prefix of its ids and a request's prompt; 0 if they are another dialogue's."""
        if self.key != request.key:
            return 0
        return len(os.path.commonprefix([self.ids, request.prompt[:-1]]))

    def num_missing(self):
        """Number of prompt tokens that the row lacks, except the last one, which decoding reads."""
        return len(self.request.prompt) - len(self.ids) - 1

    def step_input(self):
        """A row of the inputs of Engine.step(). An idle slot's token is written after its kept tokens."""
        if not self.request:
            return 0, len(self.ids), 0.0, 0.0
        last_token = (self.output or self.request.prompt)[-1]        # it is not in the row yet
        return last_token, len(self.ids), self.uniforms[len(self.output)], self.request.temperature


class Engine:
    """Samples from a local model for many dialogues at once.

    Requests are coroutines. Rows enter and leave the batch at every token. Cached tokens of a dialogue's earlier turns
    are not recomputed.

        engine = Engine(model, stop_ids(model, tokenizer), slots=16, max_tokens=8192)
        [ids] = await engine.generate(prompt, uniforms, 1.0, key=dialogue)           # in each dialogue's coroutine

    slots       samples in flight; the cache has a row for each, all as long as the longest dialogue needs
    max_tokens  most tokens of a prompt with its reply, and of a prefill pass
    num_ids     sample only ids below this: the tokenizer's, if the model has logits for more

    stats: prompt tokens that were computed (prefill_tokens) or found in the cache (reused_tokens); tokens and steps of
    decoding (decode_tokens, decode_steps)."""

    def __init__(self, model, stops, slots, max_tokens, num_ids=None):
        from transformers import Cache
        if not takes_masks(model):
            raise InputError(f"{model.name_or_path}: cannot sample from a {model.config.model_type} model here, as its "
                             "layers do not take our masks and positions; run it as a server (http://…, --sampler of "
                             "04)")
        self.model = model
        self.projection = projection_of(model)
        if not has_fast_bfloat16(self.projection.weight):       # once, not in every step
            self.projection = self.projection._replace(weight=self.projection.weight.float())
        self.window = sliding_window(model)
        self.stops = set(stops)
        self.num_ids = num_ids
        self.device = next(model.parameters()).device
        self.max_tokens = min(max_tokens, most_positions(model.config))
        self.slots = [Slot(row, ids=[]) for row in range(slots)]
        self.waiting = []
        self.task = None                                        # run(), while there are requests
        self.layers = []                                        # [keys, values] of each, (slots, heads, L, D)
        self.row_numbers = torch.arange(slots, device=self.device)
        self.cache = Cache(layers=[])
        self.cache.update = self.update
        self.has_few_shapes = self.device.type == "cuda"        # decoding steps become CUDA graphs, one per shape
        self.inputs = torch.zeros(slots, 4, dtype=torch.float64, device=self.device)        # of a step, see step()
        self.graphs = {}                                        # {shape of a step: None at first, then its Graph}
        self.stats = collections.Counter()

    async def generate(self, prompt, uniforms, temperature, key=None):
        """Continuations of `prompt` (ids): N lists of new ids, the stop id included.

        uniforms (N, max_new_tokens): for each sample a number in [0, 1) for each possible token.
        temperature: 0 takes the likeliest token.
        key: e.g. a dialogue's agent; cached tokens of its earlier requests are reused."""
        num_samples, max_new_tokens = uniforms.shape
        assert num_samples <= len(self.slots)
        assert len(prompt) + max_new_tokens <= self.max_tokens
        outputs = [[] for _ in range(num_samples)]
        request = Request(list(prompt), uniforms.tolist(), temperature, key, outputs, asyncio.Future())
        self.waiting.append(request)
        if self.task is None or self.task.done():
            self.task = asyncio.create_task(self.run())
        return await request.future

    async def run(self):
        """Work until no request is left. Between two forward passes the dialogues continue."""
        try:
            while self.waiting or any(slot.request for slot in self.slots):
                for batch in self.batches(self.admit()):
                    self.prefill(batch)
                    await asyncio.sleep(0)
                self.decode()
                await asyncio.sleep(0)
        except Exception as error:                              # e.g. out of memory: raised in all waiting requests
            active = [slot.request for slot in self.slots if slot.request]
            for request in [*self.waiting, *active]:
                if not request.future.done():
                    request.future.set_exception(error)

    def admit(self):
        """Give idle slots to waiting requests: first to those whose dialogue is cached, else in order of arrival.
        Returns a list of slots for each."""
        idle = [slot for slot in self.slots if not slot.request]
        cached_keys = {slot.key for slot in idle}
        self.waiting.sort(key=lambda request: request.key not in cached_keys)
        admitted = []
        while self.waiting and len(self.waiting[0].outputs) <= len(idle):
            request = self.waiting.pop(0)
            idle.sort(key=lambda slot: (-slot.num_shared(request), slot.kept_since, slot.row))
            slots = idle[:len(request.outputs)]
            idle = idle[len(request.outputs):]
            for slot, output, uniforms in zip(slots, request.outputs, request.uniforms):
                slot.ids = slot.ids[:slot.num_shared(request)]
                slot.key = request.key
                slot.kept_since = 0
                slot.request = request
                slot.output = output
                slot.uniforms = uniforms
            slots[0].kept_since = 1 + self.stats["decode_steps"]        # keep only one copy of the prompt
            admitted.append(slots)
        return admitted

    def batches(self, admitted):
        """Batches to prefill, [[slots of a request, …], …], whose prompts lack similar numbers of tokens."""
        batches, lengths = [], []
        by_length = sorted(admitted, key=lambda slots: slots[0].num_missing())
        for slots in by_length:
            length = slots[0].num_missing()
            lengths.append(length)
            num_padded = length * len(lengths)                                      # it is the longest so far
            limit = min(self.max_tokens, MAX_PADDING * sum(lengths))
            if not batches or num_padded > limit:
                batches.append([])
                lengths = [length]
            batches[-1].append(slots)
        return batches

    @torch.no_grad()
    def prefill(self, batch):
        """Compute the prompt tokens that the first slot of each request lacks, and copy them to its other slots.
        decode() computes the prompt's last token. Padding is written after a slot's last token, where its next one will
        be."""
        firsts = [slots[0] for slots in batch]
        missing = [slot.request.prompt[len(slot.ids):-1] for slot in firsts]
        if any(missing):
            ids = pad_sequence([torch.tensor(new, dtype=torch.long) for new in missing], batch_first=True)    # (R, T)
            ids = F.pad(ids, (0, width_padding(ids.shape[1], self.device)))
            starts = torch.tensor([[len(slot.ids)] for slot in firsts])                                       # (R, 1)
            lengths = torch.tensor([[len(new)] for new in missing])                                           # (R, 1)
            positions = starts + torch.arange(ids.shape[1]).minimum(lengths)                                  # (R, T)
            rows = torch.tensor([slot.row for slot in firsts], device=self.device)                            # (R,)
            with sdpa_kernel(UNPLANNED):
                self.forward(rows, ids.to(self.device), positions.to(self.device), self.read_width(positions.max()))
        for slots, ids in zip(batch, missing):
            first, *copies = slots
            self.stats["prefill_tokens"] += len(ids)
            self.stats["reused_tokens"] += len(first.ids)
            self.copy_rows([first] * len(copies), copies, len(first.ids) + len(ids))
            for slot in slots:
                slot.ids = slot.request.prompt[:-1]

    @torch.no_grad()
    def decode(self):
        """Sample a token in every active slot. Slots of finished samples become idle."""
        active = self.compact()
        if not active:
            return
        num_rows = 1 + active[-1].row                           # includes idle rows, whose results are not used
        if self.has_few_shapes:
            num_rows = min(2 ** (num_rows - 1).bit_length(), len(self.slots))
        rows = [slot.step_input() for slot in self.slots[:num_rows]]
        inputs = torch.tensor(rows, dtype=torch.float64)                                              # (R, 4)
        tokens = self.step(inputs, self.read_width(inputs[:, 1].max())).tolist()
        for slot in active:
            last_token, *_ = rows[slot.row]
            slot.ids.append(last_token)
            slot.output.append(tokens[slot.row])
            if tokens[slot.row] in self.stops or len(slot.output) == len(slot.uniforms):
                self.finish(slot)
        self.stats["decode_tokens"] += len(active)
        self.stats["decode_steps"] += 1

    def read_width(self, last):
        """Number of cache positions that are read for positions up to `last`."""
        width = 1 + int(last)
        return few_sizes(width) if self.has_few_shapes else width

    def step(self, inputs, width):
        """The next tokens (R,) of the first R rows of the cache, reading its first `width` positions.

        inputs: (R, 4), for each row its last token, which is not cached yet; the position of this token; the uniform
        number and the temperature of the next one.

        On a GPU the first step of a shape runs normally. The second one captures its kernels as a CUDA graph, which
        launches them all at once from then on. If a model cannot be captured, all steps run normally."""
        on_device = self.inputs[:len(inputs)]
        on_device.copy_(inputs)
        work = functools.partial(self.sample, on_device, width)
        shape = len(inputs), width
        if not self.has_few_shapes or shape not in self.graphs:
            tokens = work()
            self.graphs[shape] = None
            return tokens
        if self.graphs[shape] is None:
            captured = [graph for graph in self.graphs.values() if graph]
            try:
                self.graphs[shape] = Graph(work, captured)
            except RuntimeError as error:                       # this family syncs with the GPU in its forward pass
                say(f"slow decoding: this model cannot be captured as a CUDA graph: {str(error).splitlines()[0]}")
                self.has_few_shapes = False
                return work()
        return self.graphs[shape].replay()

    def sample(self, inputs, width):
        """The work of step(), on the device, without a sync."""
        ids, positions, uniforms, temperatures = inputs.unbind(1)                                     # (R,) each
        ids, positions = ids.long()[:, None], positions.long()[:, None]                               # (R, 1) each
        states = self.forward(slice(len(inputs)), ids, positions, width)                              # (R, 1, H)
        logits = self.projection.logits(states[:, 0])                                                 # (R, V)
        return next_tokens(logits[:, :self.num_ids], uniforms.float(), temperatures.float())

    def finish(self, slot):
        """Make a slot idle. Its request gets its outputs when all are finished."""
        request, slot.request = slot.request, None
        is_unfinished = any(other.request is request for other in self.slots)
        if not is_unfinished and not request.future.done():
            request.future.set_result(request.outputs)

    def compact(self):
        """The active slots by row. The last ones are first swapped with idle ones, so that at most a quarter of the
        rows up to the last active one are idle."""
        active = [slot for slot in self.slots if slot.request]
        idle = [slot for slot in self.slots if not slot.request]
        while active and len(active) < MIN_ACTIVE_FRAC * (1 + active[-1].row):
            low, high = idle.pop(0), active[-1]
            self.copy_rows([low, high], [high, low], max(len(low.ids), len(high.ids)))
            low.row, high.row = high.row, low.row
            active.sort(key=lambda slot: slot.row)
        self.slots.sort(key=lambda slot: slot.row)
        return active

    def copy_rows(self, sources, targets, length):
        """Copy the first `length` tokens in the cache from slots to others, all at once."""
        if not targets:
            return
        # As tensors: a list would be copied to the device again for each layer.
        source_rows = torch.tensor([slot.row for slot in sources], device=self.device)
        target_rows = torch.tensor([slot.row for slot in targets], device=self.device)
        for keys_and_values in self.layers:
            for cached in keys_and_values:
                copies = cached[source_rows, :, :length]
                cached[target_rows, :, :length] = copies

    def forward(self, rows, ids, positions, width):
        """The last hidden states (R, T, H) of new ids (R, T) at `positions` (R, T) in R rows of the cache, reading its
        first `width` positions. rows: their numbers (R,), or the slice of the first R, which avoids a copy."""
        self.rows, self.positions, self.width = rows, positions, width                                # for update()
        places = torch.arange(width, device=self.device)[None]                                        # (1, width)
        is_seen = places[:, None, None, :] <= positions[:, None, :, None]                             # (R, 1, T, width)
        mask = decoder_mask(self.model, self.window, is_seen, positions, places)
        output = self.model.get_decoder()(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True,
                                          cache=self.cache)
        return output.last_hidden_state

    def update(self, keys, values, layer, *_, **__):
        """Called by each layer (Cache.update): store its new keys and values (R, heads, T, D) at their rows and
        positions. Returns these rows' keys and values up to `width`."""
        if layer == len(self.layers):
            sizes = [(new.shape[1], 0, new.shape[3]) for new in (keys, values)]                       # no tokens yet
            self.layers.append([keys.new_zeros(len(self.slots), *size) for size in sizes])
        row_numbers = self.row_numbers[self.rows][:, None]                                            # (R, 1)
        selected = []
        for kind, new in enumerate((keys, values)):
            cached = self.lengthened(self.layers[layer][kind])
            cached[row_numbers, :, self.positions] = new.transpose(1, 2)                              # (R, T, heads, D)
            self.layers[layer][kind] = cached
            selected.append(cached[self.rows, :, :self.width])
        return selected

    def lengthened(self, cached):
        """Keys or values (slots, heads, L, D), enlarged by half if the highest position does not fit."""
        length = cached.shape[2]
        if length >= self.width:
            return cached
        self.graphs.clear()                                     # they read the old cache
        new_length = min(length * 3 // 2, self.max_tokens)
        missing = max(self.width, new_length) - length
        return F.pad(cached, (0, 0, 0, missing))
