"""Sampling from a local model: one batch that dialogues enter and leave at every token, with their caches."""
import asyncio
import itertools
import os
import time
import types

import torch
import torch.nn.functional as F

from lib.models import add_work
from lib.runtime import InputError


def next_tokens(logits, points, temperature):
    """The token (n,) of each row of logits (n, V) float32 that its uniform number in points (n,) falls on (inverse
    CDF); the likeliest at temperature 0."""
    if temperature == 0:
        return logits.argmax(-1)
    cdf = torch.softmax(logits / temperature, -1).cumsum(-1)                                          # (n, V)
    points = points[:, None] * cdf[:, -1:]
    return torch.searchsorted(cdf, points, right=True).squeeze(1).clamp(max=logits.shape[1] - 1)


def generate(model, prompts, randoms, temperature, stops, slots=256, max_tokens=16384):
    """Continue each prompt (P lists of ids) by an Engine, `slots` samples at a time, at most `max_tokens` of prompts
    (or one of them) in a pass. randoms (N, max_new_tokens): uniform in [0, 1), one for each token that may be sampled,
    where N is a multiple of P: N / P samples of each prompt, one after the other. Temperature 0 takes the likeliest
    token. Returns N lists of new ids, the stop id included; a list without it was ended by the length."""
    samples, longest = len(randoms) // len(prompts), max(map(len, prompts)) + randoms.shape[1]
    engine = Engine(model, stops, max(samples, min(slots, len(randoms))), max(max_tokens, longest))
    order = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))    # what shares a batch is of a length

    async def in_order():
        return await asyncio.gather(*(engine.generate(prompts[i], randoms[i * samples:(i + 1) * samples], temperature)
                                      for i in order))
    found = dict(zip(order, asyncio.run(in_order())))
    return [ids for number in range(len(prompts)) for ids in found[number]]


class Engine:
    """Samples from a local model for many dialogues at once: requests come and go as coroutines, rows leave and enter
    the batch at every token, and what a dialogue's earlier turns left in the cache is not computed again.

        engine = Engine(model, stop_ids(model, tokenizer), slots=16, max_tokens=8192)
        [ids] = await engine.generate(prompt, randoms, 1.0, key=dialogue)           # in each dialogue's coroutine

    ended(new ids): whether a sample ends here, beside the ids `stops`. slots: samples in flight; the
    cache has a row for each, all as long as the longest dialogue needs. max_tokens: the most that a prompt with its
    reply may have, and that a prefill pass computes.

    stats: tokens of prompts that were computed (prefill_tokens) or found in the cache (reused_tokens), tokens that
    decoding computed and its steps (decode_tokens, decode_steps), seconds of both (prefill_s, decode_s), and the mean
    share of the slots that a step served (occupancy)."""

    def __init__(self, model, stops, slots, max_tokens, ended=None):
        from transformers import Cache, DynamicCache
        from transformers.cache_utils import DynamicLayer
        config = model.config.get_text_config()
        if any(type(layer) is not DynamicLayer for layer in DynamicCache(config=config).layers):
            raise InputError(f"{model.name_or_path}: a {config.model_type} model, some of whose layers do not see all "
                             "earlier tokens, cannot be sampled from here; run it as a server")
        self.model, self.stops, self.device = model, set(stops), next(model.parameters()).device
        self.ended = ended or (lambda ids: False)
        self.max_tokens = min(max_tokens, config.max_position_embeddings)
        # A slot: the cache's `row` holds `ids`, left by the dialogue `key`, which took it at step `used` (0 if it need
        # not be kept). An active one works for `request`, on the sample `output` with the random numbers `points`.
        self.slots = [types.SimpleNamespace(row=row, ids=[], key=None, used=-1, request=None) for row in range(slots)]
        self.waiting, self.task = [], None
        self.held = []                                          # [keys, values] of each layer, (slots, heads, L, D)
        self.cache = Cache(layers=[])
        self.cache.update = self.update
        self.stats = dict.fromkeys(("prefill_tokens", "reused_tokens", "prefill_s", "decode_tokens", "decode_steps",
                                    "decode_s", "occupancy"), 0)

    async def generate(self, prompt, randoms, temperature, key=None):
        """Continuations of `prompt` (ids): randoms (N, max_new_tokens) uniform numbers, a row for each of N samples,
        used as in generate(). Returns N lists of new ids, the stop id included. What earlier requests of the same `key`
        (the agent's side of a dialogue, say) left in the cache is used. InputError if the request is too large."""
        samples, max_new_tokens = randoms.shape
        if samples > len(self.slots):
            raise InputError(f"{samples} samples of a prompt do not fit in {len(self.slots)} slots")
        if len(prompt) + max_new_tokens > self.max_tokens:
            raise InputError(f"a prompt of {len(prompt):,} tokens and {max_new_tokens:,} new ones are more than the "
                             f"{self.max_tokens:,} that there is room for")
        request = types.SimpleNamespace(prompt=list(prompt), points=randoms.tolist(), temperature=temperature, key=key,
                                  outputs=[[] for _ in range(samples)], unfinished=samples, future=asyncio.Future())
        self.waiting.append(request)
        if self.task is None or self.task.done():
            self.task = asyncio.create_task(self.run())
        return await request.future

    async def run(self):
        """Work until no request is left. Between two passes through the model the dialogues go on."""
        try:
            while self.waiting or any(slot.request for slot in self.slots):
                for batch in self.admit():
                    self.prefill(batch)
                    await asyncio.sleep(0)
                self.decode()
                await asyncio.sleep(0)
        except Exception as error:                              # out of memory, say: all who wait hear of it
            for request in self.waiting + [slot.request for slot in self.slots if slot.request]:
                if not request.future.done():
                    request.future.set_exception(error)

    def admit(self):
        """Give idle slots to waiting requests, first to those whose dialogue is in the cache, else as they came.
        Returns batches to prefill, [[slots of a request, …], …], each of prompts that lack about as many tokens."""
        for slot in self.slots:
            if slot.request and slot.request.future.done():                         # given up, or ended by an error
                slot.request = None
        self.waiting = [request for request in self.waiting if not request.future.done()]
        idle = [slot for slot in self.slots if not slot.request]
        keys = {slot.key for slot in idle}
        self.waiting.sort(key=lambda request: request.key not in keys)
        admitted = []
        while self.waiting and len(self.waiting[0].outputs) <= len(idle):
            request = self.waiting.pop(0)
            for slot in idle:
                own = slot.key == request.key
                slot.shared = len(os.path.commonprefix([slot.ids, request.prompt[:-1]])) if own else -1
            idle.sort(key=lambda slot: (-slot.shared, slot.used, slot.row))
            slots, idle = idle[:len(request.outputs)], idle[len(request.outputs):]
            for slot, output, points in zip(slots, request.outputs, request.points):
                slot.ids, slot.key, slot.used = slot.ids[:max(0, slot.shared)], request.key, 0
                slot.request, slot.output, slot.points = request, output, points
            slots[0].used = 1 + self.stats["decode_steps"]                          # one of several samples' is enough
            admitted.append((len(request.prompt) - len(slots[0].ids) - 1, slots))
        batches, lengths = [], []
        for length, slots in sorted(admitted, key=lambda pair: pair[0]):
            lengths.append(length)
            if not batches or length * len(lengths) > min(self.max_tokens, 1.5 * sum(lengths)):     # with the padding
                batches.append([])
                lengths = [length]
            batches[-1].append(slots)
        return batches

    @torch.no_grad()
    def prefill(self, batch):
        """Compute what the first slot of each request lacks of the prompt, but for the last token, which decode()
        reads, and copy it to the other slots."""
        begin = time.perf_counter()
        firsts = [slots[0] for slots in batch]
        new = [slot.request.prompt[len(slot.ids):-1] for slot in firsts]
        if any(new):
            self.forward(firsts, new)
        for first, slots, ids in zip(firsts, batch, new):
            add_work(self.model, [len(ids) + 1], cached=len(first.ids))
            self.stats["prefill_tokens"] += len(ids)
            self.stats["reused_tokens"] += len(first.ids)
            self.copy_rows([first] * (len(slots) - 1), slots[1:], len(first.ids) + len(ids))
            for slot in slots:
                slot.ids = slot.request.prompt[:-1]
        self.stats["prefill_s"] += time.perf_counter() - begin

    @torch.no_grad()
    def decode(self):
        """Sample a token in every active slot; those of samples that have ended become idle. Idle rows among the active
        ones are computed too, for nothing."""
        begin = time.perf_counter()
        if not (active := self.compact()):
            return
        rows = self.slots[:1 + active[-1].row]
        ids = [(slot.output or slot.request.prompt)[-1] if slot.request else 0 for slot in rows]
        hidden = self.forward(rows, [[token] for token in ids])[[slot.row for slot in active], 0]           # (n, H)
        logits = self.model.get_output_embeddings()(hidden).float()                                         # (n, V)
        points = torch.tensor([slot.points[len(slot.output)] for slot in active], device=self.device)       # (n,)
        for temperature in {slot.request.temperature for slot in active}:
            group = [n for n, slot in enumerate(active) if slot.request.temperature == temperature]
            for n, token in zip(group, next_tokens(logits[group], points[group], temperature).tolist()):
                active[n].output.append(token)
        for slot in active:
            slot.ids.append(ids[slot.row])
            last, full = slot.output[-1], len(slot.output) == len(slot.points)
            if last in self.stops or full or self.ended(slot.output):
                request, slot.request = slot.request, None
                add_work(self.model, [len(slot.output)], cached=len(request.prompt), generated=True)
                request.unfinished -= 1
                if not (request.unfinished or request.future.done()):
                    request.future.set_result(request.outputs)
        self.stats["decode_tokens"] += len(active)
        self.stats["decode_steps"] += 1
        self.stats["occupancy"] = self.stats["decode_tokens"] / self.stats["decode_steps"] / len(self.slots)
        self.stats["decode_s"] += time.perf_counter() - begin

    def compact(self):
        """The active slots by row, after the last ones have changed places with idle ones, so that at most a quarter of
        the rows up to the last active one are idle."""
        active, idle = ([slot for slot in self.slots if bool(slot.request) == kind] for kind in (True, False))
        while active and len(active) < 0.75 * (1 + active[-1].row):
            low, high = idle.pop(0), active[-1]
            self.copy_rows([low, high], [high, low], max(len(low.ids), len(high.ids)))
            low.row, high.row = high.row, low.row
            active.sort(key=lambda slot: slot.row)
        self.slots.sort(key=lambda slot: slot.row)
        return active

    def copy_rows(self, sources, targets, length):
        """Copy the first `length` tokens in the cache of some slots to others, all at once."""
        sources, targets = [slot.row for slot in sources], [slot.row for slot in targets]
        for held in itertools.chain(*self.held) if targets else ():
            held[targets, :, :length] = held[sources, :, :length]

    def forward(self, slots, new):
        """The last hidden states (R, T, H) of new ids (R lists of at most T), which follow what is in the cache of R
        slots. Padding is written behind a slot's last token, where its next one will be."""
        span = range(max(map(len, new)))
        ids = torch.tensor([own + [0] * (len(span) - len(own)) for own in new], device=self.device)         # (R, T)
        positions = [[len(slot.ids) + min(t, len(own)) for t in span] for slot, own in zip(slots, new)]
        self.positions = torch.tensor(positions, device=self.device)                                        # (R, T)
        self.width = 1 + max(map(max, positions))
        rows = [slot.row for slot in slots]
        self.rows = torch.tensor(rows, device=self.device)                                                  # (R,)
        # The first rows of the cache are read where they lie, others are copied.
        self.selection = slice(len(rows)) if rows == list(range(len(rows))) else self.rows
        mask = torch.arange(self.width, device=self.device) <= self.positions[:, None, :, None]       # (R, 1, T, width)
        return self.model.get_decoder()(input_ids=ids, attention_mask=mask, position_ids=self.positions,
                                        past_key_values=self.cache, use_cache=True).last_hidden_state

    def update(self, keys, values, layer, *_, **__):
        """What each layer calls (Cache.update): keeps its new keys and values (R, heads, T, D) at their rows and
        positions; returns all keys and values of these rows up to the highest position."""
        if layer == len(self.held):
            self.held.append([new.new_zeros(len(self.slots), new.shape[1], 0, new.shape[3]) for new in (keys, values)])
        for kind, new in enumerate((keys, values)):
            length = self.held[layer][kind].shape[2]
            if length < self.width:                                                 # grows by doubling
                more = max(self.width, min(2 * length, self.max_tokens)) - length
                self.held[layer][kind] = F.pad(self.held[layer][kind], (0, 0, 0, more))
            self.held[layer][kind][self.rows[:, None], :, self.positions] = new.transpose(1, 2)
        return [held[self.selection, :, :self.width] for held in self.held[layer]]
