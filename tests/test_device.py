"""Faults of devices that show without a card: FakeTensorMode with cuda tensors, and stages on a pretended card
(card.py), which also says where they wait for the device."""
import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM

import common
from conftest import read, ROOT, stage
from lib.models import load_tokenizer

CONFIG = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
          "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 64}
ROWS = [[common.Row([5, 6, 7, 8, 9], [-1, 0, 0, -1, 1])], [common.Row([5, 6, 7], [-1, -1, 0])]]
TREES = [[common.Row([5, 6, 7, 8, 9], [-1, -1, 0, 0, 1], 2)], [common.Row([5, 6, 7], [-1, 0, 1], 1)]]


# ---------------------------------------------------------------------------------------------------------------------
# forward passes under FakeTensorMode, which refuses tensors of two devices; the engine, whose tokens are values, below

@pytest.fixture
def fake_cuda():
    with FakeTensorMode(shape_env=ShapeEnv()) as mode, torch.device("cuda"):
        yield mode


def fake_model():
    return LlamaForCausalLM(LlamaConfig(**CONFIG)).eval()


def fake_batch(mode, items, monkeypatch):
    """A Batch on fake cuda. Its action tokens are given: where they are depends on values, which fake tensors lack."""
    with torch.device("cpu"), torch.utils._python_dispatch._disable_current_modes():
        batch = common.collate(items)
        places = common.action_tokens(batch)
    places = [mode.from_tensor(place).to("cuda") for place in places]
    monkeypatch.setattr(common, "action_tokens", lambda batch: tuple(places))
    tensors = {}
    for name, value in batch._asdict().items():
        if isinstance(value, torch.Tensor):
            tensors[name] = mode.from_tensor(value).to("cuda")
    return batch._replace(**tensors)


@pytest.mark.parametrize("items", [ROWS, TREES], ids=["rows", "trees"])
@pytest.mark.parametrize("has_head", [False, True], ids=["lm", "head"])
def test_a_scorer_on_fake_cuda_mixes_no_devices(fake_cuda, monkeypatch, items, has_head):
    """peft cannot be made of fake tensors: LoRA is tried on the pretended card below."""
    scorer = common.Scorer(fake_model(), has_head)
    with torch.no_grad():
        values = scorer(fake_batch(fake_cuda, items, monkeypatch))
    assert values.device.type == "cuda" and values.shape == (2, 2)


@pytest.mark.parametrize("name", ["ids", "positions", "lengths", "mask"])
def test_a_part_of_a_batch_that_stays_on_the_cpu_is_refused(fake_cuda, monkeypatch, name):
    """Of action_numbers, previous and owners FakeTensorMode does not say so, as they are indices. See below."""
    scorer = common.Scorer(fake_model(), has_head=True)
    batch = fake_batch(fake_cuda, TREES, monkeypatch)
    batch = batch._replace(**{name: getattr(batch, name).to("cpu")})
    with torch.no_grad(), pytest.raises(RuntimeError, match="same device|expected device"):
        scorer(batch)


# ---------------------------------------------------------------------------------------------------------------------
# whole stages on a pretended card

# Where stages wait for the device, beside loading and writing. A wait in a loop over tokens, rows or examples is a
# fault; a new line here needs a reason.
SCORING = {
    "common.py:collate to the device",                  # a batch's tensors
    "common.py:action_tokens nonzero",                  # twice a pass
    "common.py:action_outputs cpu"}                     # a batch's scores
PACKED = {"common.py:hidden_states item"}               # of rows, not of trees: transformers asks for packed rows
STEP = SCORING | {
    "lib/training.py:rank_batches to the device",
    "lib/training.py:num_tokens tolist",                # once a micro-batch
    "lib/training.py:preference_numbers tolist",
    "lib/training.py:optimizer_step item",              # the norm of the gradient
    "lib/runtime.py:reduce_sums to the device",
    "lib/runtime.py:reduce_sums tolist"}
ENGINE = {
    "lib/engine.py:forward to the device",              # four tensors a step
    "lib/engine.py:copy_rows to the device",            # two a prefill, whatever the number of layers
    "lib/engine.py:decode to the device",
    "lib/engine.py:sample to the device",
    "lib/engine.py:sample tolist"}                      # the new tokens
FILES = {
    "lib/models.py:load_model to the device", "lib/models.py:load_sharded to the device",
    "lib/models.py:restore_buffers to the device",
    "lib/models.py:restore_buffers item", "lib/models.py:check_logits to the device", "lib/models.py:check_logits item",
    "lib/models.py:save_model cpu", "lib/models.py:save_adapter cpu", "lib/training.py:check_weights item",
    "lib/adapters.py:set_adapter to the device", "lib/training.py:save_head cpu"}
PINNED = {
    "critic": STEP | PACKED | {"03_train_critic.py:train item", "common.py:padded_outputs to the device"},
    "value critic": (STEP | PACKED) - {"lib/training.py:preference_numbers tolist"} | {
        "03_train_critic.py:train to the device", "03_train_critic.py:train item",
        "03_train_critic.py:value_batch_loss item"},
    "sweet": STEP | ENGINE | {
        "04_train_policy.py:train item", "common.py:padded_outputs to the device",
        "04_train_policy.py:batch_loss to the device", "04_train_policy.py:batch_loss repeat_interleave"},
    "mtdpo, LoRA": STEP | PACKED | {
        "04_train_policy.py:train item", "common.py:padded_outputs to the device",
        "04_train_policy.py:batch_loss to the device", "04_train_policy.py:batch_loss repeat_interleave"},
    "rollout": SCORING | ENGINE | {"lib/runtime.py:reduce_sums to the device", "lib/runtime.py:reduce_sums tolist"}}
# Gemma 2: a layer with a sliding window, whose masks are our own, and one without
PINNED |= {"critic, windows": PINNED["critic"], "rollout, windows": PINNED["rollout"]}

# What a run on the pretended card must refuse: a line without its way to the device
MUTANTS = {
    "critic": [
        ("common.py", "Batch(ids.to(device)", "Batch(ids"),
        ("common.py", "previous.to(device)", "previous"),
        ("common.py", "owners.to(device)", "owners"),
        ("common.py", "batch_first=True).to(device)", "batch_first=True)"),
        ("lib/training.py", "torch.tensor(weights[first:last], device=run.device)",
         "torch.tensor(weights[first:last])")],
    "sweet": [
        ("common.py", "mask = mask.to(device)", "mask = mask"),
        ("lib/engine.py", "points = torch.tensor(points, device=self.device)", "points = torch.tensor(points)")]}


def write_trajectories(path, num_tasks):
    """Dialogues of template tasks: in each task a right answer and a wrong one."""
    tasks = path.with_name("tasks.jsonl")
    stage(1).main(["--num-tasks", str(num_tasks), "--split", "train", "--out", str(tasks)])
    rows = []
    for task in read(tasks):
        for sample, code in enumerate((task["ground_truth"], "def wrong():\n    return 0")):
            answer = f"I WANT TO ANSWER:\n{code}"
            turns = [("user", task["problem_description"]), ("assistant", "Is there a limit?"), ("user", "No."),
                     ("assistant", answer)]
            history = [{"role": role, "content": content} for role, content in turns]
            rows.append({"task": task, "task_id": task["task_id"], "sample": sample, "dialogue_history": history,
                         "answer": code, "reward": float(sample == 0), "max_rounds": 8})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_model_with_windows(folder):
    tokenizer = load_tokenizer(str(ROOT / "models" / "tiny"))
    config = Gemma2Config(**{**CONFIG, "vocab_size": len(tokenizer), "max_position_embeddings": 2048}, head_dim=8,
                          sliding_window=8)
    Gemma2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="module")
def card(tmp_path_factory):
    """(folder, {name of a run: its log}) of stages on the pretended card, and of the same with a line changed."""
    folder = tmp_path_factory.mktemp("card")
    write_trajectories(folder / "offline.jsonl", 6)
    write_model_with_windows(folder / "windows")
    tiny = str(ROOT / "models" / "tiny")
    common_flags = ["--trajectories", str(folder / "offline.jsonl"), "--lr", "1e-3", "--max-steps", "2"]
    small = ["--batch-size", "2"]
    short = ["--tasks", str(folder / "tasks.jsonl"), "--best-of", "2", "--max-rounds", "2", "--max-new-tokens", "12"]
    sampling = ["--num-candidates", "3", "--max-new-tokens", "12", "--data-frac", "0.3", "--pairs-together", "--critic",
                str(folder / "critic")]
    stages = {
        "critic": (3, [*common_flags, *small, "--model", tiny]),
        "value critic": (3, [*common_flags, *small, "--model", tiny, "--head", "value"]),
        "sweet": (4, ["--method", "sweet", *common_flags, *sampling, "--model", tiny]),
        "mtdpo, LoRA": (4, ["--method", "mtdpo", *common_flags, *small, "--model", tiny, "--lora", "2"]),
        "rollout": (2, [*short, "--agent", tiny, "--critic", str(folder / "critic")]),
        "critic, windows": (3, [*common_flags, *small, "--model", str(folder / "windows")]),
        "rollout, windows": (2, [*short, "--agent", str(folder / "windows"), "--critic",
                                 str(folder / "critic, windows")])}
    runs = []

    def add(name, kind, mutant=None):
        number, flags = stages[kind]
        out = folder / name
        if number == 2:
            out = folder / f"{name}.jsonl"
        runs.append({"stage": number, "argv": [*flags, "--out", str(out)], "log": str(folder / f"{len(runs)}.log"),
                     "mutant": mutant})
        names.append(name)
    names = []
    for kind in stages:
        add(kind, kind)
    for kind, mutants in MUTANTS.items():
        for mutant in mutants:
            add(f"{kind}, {mutant[1]}".replace("/", " "), kind, mutant)
    line = "    shape = batch.lengths.shape + values.shape[1:]\n"
    add("critic, a new wait", "critic", ("common.py", line, f"{line}    values.sum().item()\n"))
    (folder / "runs.json").write_text(json.dumps(runs))
    subprocess.run([sys.executable, str(ROOT / "tests" / "card.py"), str(folder / "runs.json")], check=True,
                   cwd=ROOT, capture_output=True)
    logs = {}
    for name, options in zip(names, runs):
        logs[name] = json.loads(open(options["log"]).read())
    return folder, logs


@pytest.mark.parametrize("kind", PINNED)
def test_a_stage_on_a_pretended_card_mixes_no_devices_and_waits_where_it_is_known_to(card, kind):
    _, logs = card
    assert logs[kind]["error"] is None
    assert logs[kind]["waits"].keys() - FILES == PINNED[kind]


@pytest.mark.parametrize("name", [f"{kind}, {mutant[1]}" for kind in MUTANTS for mutant in MUTANTS[kind]])
def test_a_tensor_that_is_not_brought_to_the_device_is_refused(card, name):
    _, logs = card
    assert "two devices, card:0 and cpu" in logs[name.replace("/", " ")]["error"]


def test_a_new_wait_is_noticed(card):
    _, logs = card
    new = logs["critic, a new wait"]["waits"].keys() - logs["critic"]["waits"].keys()
    assert new == {"common.py:action_sums item"}


def test_waits_do_not_grow_with_layers_or_examples(card):
    """models/tiny has three layers; a micro-batch has two examples."""
    _, logs = card
    waits = logs["critic"]["waits"]
    num_micro_batches = waits["03_train_critic.py:train item"]
    assert waits["lib/training.py:num_tokens tolist"] == num_micro_batches
    assert waits["common.py:padded_outputs to the device"] == num_micro_batches
    waits = logs["sweet"]["waits"]
    assert waits["lib/engine.py:sample tolist"] == waits["lib/engine.py:decode to the device"]
    assert waits["lib/engine.py:copy_rows to the device"] < 4 * waits["lib/engine.py:sample tolist"]


def test_training_on_the_pretended_card_gives_the_weights_of_the_cpu(card):
    folder, _ = card
    flags = ["--trajectories", str(folder / "offline.jsonl"), "--model", str(ROOT / "models" / "tiny"), "--lr", "1e-3",
             "--max-steps", "2", "--batch-size", "2", "--out", str(folder / "cpu")]
    stage(3).main(flags)
    weights, initial = load_file(folder / "critic" / "model.safetensors"), load_file(
        ROOT / "models" / "tiny" / "model.safetensors")
    distance = change = 0.0
    for name, tensor in load_file(folder / "cpu" / "model.safetensors").items():
        distance += (weights[name] - tensor).square().sum().item()
        change += (tensor - initial[name]).square().sum().item()
    assert change > 0 and distance < 1e-4 * change
