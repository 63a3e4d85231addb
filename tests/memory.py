"""The highest memory of a real FSDP2 training step against lib.memory.memory_plan, on a CPU.

    python tests/memory.py WORLD_SIZE DTYPE CHECKPOINTING(0|1) ROWS TOKENS MICRO_BATCHES TREE(0|1) [LORA_RANK]

Measured is the sum of what torch's CPU allocator holds (the profiler's memory events), for one rank of a group whose
other ranks are not there (their collectives do nothing). Prints {"plan", "measured"} in bytes."""
import json
import pathlib
import sys

import torch
import torch.distributed as dist
from torch.profiler import profile, ProfilerActivity
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import common  # noqa: E402
from lib.memory import memory_plan, planned_model, PlannedStep  # noqa: E402
from lib.models import add_adapter, import_peft, Sharding  # noqa: E402
from lib.runtime import Runtime  # noqa: E402
from lib.training import adamw  # noqa: E402


def main():
    world_size, dtype, *numbers = sys.argv[1:]
    common.models.has_fast_bfloat16 = lambda *tensors: False                 # what is measured is on the CPU
    world_size = int(world_size)
    checkpointing, rows, tokens, micro_batches, tree, *rank = map(int, numbers)
    lora = import_peft().LoraConfig(r=rank[0], target_modules="all-linear") if rank else None
    config = LlamaConfig(hidden_size=256, intermediate_size=704, num_hidden_layers=3, num_attention_heads=8,
                         num_key_value_heads=4, vocab_size=8192, max_position_embeddings=2048)
    sharding = Sharding(dtype, bool(checkpointing))
    planned = PlannedStep(world_size, sharding, rows, tokens, micro_batches > 1, bool(tree), lora)
    plan = memory_plan(planned_model(config, planned), planned, common.token_logps)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)

    def step(width):
        half = width // 2
        row = common.Row(list(range(width)), [-1] * half + [0] * (width - half), half if tree else None)
        for _ in range(micro_batches):
            scorer(common.collate([[row]] * rows)).sum().backward()
        torch.nn.utils.clip_grad_norm_(scorer.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        model = LlamaForCausalLM(config)
        if lora:
            add_adapter(model.to(getattr(torch, dtype)), lora)
        scorer = common.shard_scorer(model, Runtime(0, world_size, torch.device("cpu")),
                                     sharding)
        optimizer = adamw(scorer.train(), 1e-4)
        step(8)                                                     # makes the optimiser's state
        step(tokens)
    events = sorted((event.start_ns(), event.nbytes()) for event in prof.profiler.kineto_results.events()
                    if event.name() == "[memory]")
    now = peak = 0
    for _, size in events:
        now += size
        peak = max(peak, now)
    print(json.dumps({"plan": plan["total"], "measured": peak}))


if __name__ == "__main__":
    main()
