"""LoRA in 03 and 04: what is trained, the model without its adapter, adapter folders, whole models, bad flags."""
import functools
import json
import math
import re
import shutil
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

import common
from colbench import backend
from conftest import assert_same_steps, call, furthest, read, refused, ROOT, stage, succeed
from lib import models
from lib.models import adapter_parameters, load_model, load_tokenizer, lora_config, Sharding
from lib.runtime import InputError, start, write_jsonl
from lib.training import Checkpoints

BASE = ROOT / "models" / "tiny"
LORA = ["--lora", 4]
AN_ITEM = [[common.Row([5, 6, 7, 8, 9, 10, 11], [-1, -1, 0, 0, 1, 1, 1], 2)]]


def flags(workspace, out, *more):
    own = ["--trajectories", workspace / "offline.jsonl", "--model", BASE, "--lr", 1e-2, "--max-steps", 4,
           "--save-every", 2, "--nll-coef", 0, "--beta", 1, *LORA, "--out", out, *more]
    return [str(flag) for flag in own]


def policy_flags(workspace, out, *more):
    return ["--method", "mtdpo", *flags(workspace, out, *more)]


def points_of(workspace):
    row = read(workspace / "offline.jsonl")[0]
    turn = row["dialogue_history"][1]
    return [common.DecisionPoint(turn["input"], row["task"], [], [turn["output_ids"], [7, 8], [9, 10, 11]], [])]


def values_of(model):
    """What a transformers model says of AN_ITEM's turns."""
    with torch.no_grad():
        return common.Scorer(model)(common.collate(AN_ITEM))


@pytest.fixture(scope="module")
def critic(workspace, tmp_path_factory):
    out = tmp_path_factory.mktemp("lora") / "critic"
    succeed("03_train_critic.py", *flags(workspace, out))
    return out


@pytest.fixture(scope="module")
def policy(workspace, tmp_path_factory):
    out = tmp_path_factory.mktemp("lora") / "policy"
    succeed("04_train_policy.py", *policy_flags(workspace, out))
    return out


def adapter(folder):
    return load_file(folder / "adapter_model.safetensors")


# --- training

def test_the_first_loss_is_log_2_and_it_falls(critic, policy):
    for folder in (critic, policy):
        steps = read(folder / "metrics.jsonl")
        assert steps[0]["loss"] == pytest.approx(math.log(2), abs=1e-5) and steps[-1]["loss"] < 0.67


def test_the_adapter_alone_is_trained_and_kept_in_states(workspace, tmp_path, monkeypatch):
    """In bfloat16: base weights in bfloat16, adapters and the optimiser's state in float32, two numbers for each."""
    kept = {}
    original = Checkpoints.save

    def look(checkpoints, step):
        kept.update(checkpoints.state(), parameters=dict(checkpoints.model.named_parameters()))
        original(checkpoints, step)
    monkeypatch.setattr(Checkpoints, "save", look)
    stage(3).main(flags(workspace, tmp_path / "c", "--dtype", "bfloat16", "--max-steps", 1, "--save-every", 1, "--head",
                        "regression"))
    trained = {name for name, parameter in kept["parameters"].items() if parameter.requires_grad}
    assert trained == set(kept["model"]) and all(".lora_" in name or name.startswith("head.") for name in trained)
    assert len(trained) == 3 * 7 * 2 + 2
    for name, parameter in kept["parameters"].items():
        assert parameter.dtype == (torch.float32 if name in trained else torch.bfloat16), name
    assert set(kept["optimizer"]["state"]) == trained
    assert all(state["exp_avg"].dtype == torch.float32 for state in kept["optimizer"]["state"].values())


def killed_and_resumed(arguments, monkeypatch, capsys):
    """03 with these arguments, which dies at its first saved state, after two steps, and goes on from there."""
    original = Checkpoints.save

    def save_and_die(checkpoints, step):
        original(checkpoints, step)
        raise KeyboardInterrupt
    monkeypatch.setattr(Checkpoints, "save", save_and_die)
    with pytest.raises(KeyboardInterrupt):
        stage(3).main(arguments)
    monkeypatch.undo()
    with pytest.raises(InputError, match="its training is not finished"):
        load_tokenizer(arguments[arguments.index("--out") + 1])
    assert "continues at step" not in capsys.readouterr().out
    stage(3).main(arguments)
    assert "continues at step 2\n" in capsys.readouterr().out


def test_killed_and_resumed_equals_uninterrupted_bit_for_bit(workspace, tmp_path, critic, monkeypatch, capsys):
    killed_and_resumed(flags(workspace, tmp_path / "killed"), monkeypatch, capsys)
    killed, whole = adapter(tmp_path / "killed"), adapter(critic)
    assert len(whole) == 42 and all(torch.equal(killed[name], whole[name]) for name in whole)
    assert (tmp_path / "killed" / "adapter_config.json").read_text() == (critic / "adapter_config.json").read_text()


def test_ranks_and_checkpointing_change_nothing_but_the_last_digits(workspace, tmp_path, policy):
    for name, ranks, more in (("two", 2, []), ("checkpointing", 1, ["--activation-checkpointing"])):
        succeed("04_train_policy.py", *policy_flags(workspace, tmp_path / name, *more), ranks=ranks)
        assert_same_steps(tmp_path / name, policy)
        assert furthest(adapter(tmp_path / name), adapter(policy)) < 1e-3
    assert max(tensor.abs().max().item() for key, tensor in adapter(policy).items() if "lora_B" in key) > 1e-2


# --- the model without its adapter

def check_reference_is_the_base(critic, expected):
    """With the adapter it is another model, and one copy of it is in memory."""
    reference, scorer = critic.ref_scorer, critic.scorer
    assert reference.scorer is scorer
    for _ in range(2):                                              # on again, and off again
        values = common.action_outputs(scorer, AN_ITEM, 4096, "cpu")[0]
        ref_values = common.action_outputs(reference, AN_ITEM, 4096, "cpu")[0]
        assert torch.equal(ref_values, expected) and (values - expected).abs().max() > 1e-3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_without_its_adapter_a_critic_is_its_base_bit_for_bit(critic, tiny, dtype):
    """Whole, and as it is loaded for training: in bfloat16 by FSDP2."""
    sharding = Sharding(dtype)
    load_split = functools.partial(common.load_scorer, run=start(0), sharding=sharding)
    for load in (common.load_whole("cpu", dtype), load_split):
        expected = common.action_outputs(load(str(BASE)), AN_ITEM, 4096, "cpu")[0]
        if dtype == "float32":
            assert torch.equal(expected, common.action_outputs(common.Scorer(tiny[0]), AN_ITEM, 4096, "cpu")[0])
        loaded = common.load_critic(common.read_critic(critic, tiny[1], backend), load)
        check_reference_is_the_base(loaded, expected)


def test_an_untrained_adapter_scores_every_candidate_0(workspace, tiny):
    config = lora_config(str(BASE), 4, None, False)
    scorer = common.load_scorer(str(BASE), start(0), Sharding(), config)
    critic = common.Critic("", "", scorer=scorer, ref_scorer=models.without_adapter(scorer))
    assert common.score_actions(critic, tiny[1], points_of(workspace), 4096, "cpu") == [[0.0, 0.0, 0.0]]
    started = adapter_parameters(scorer.model)
    assert {".lora_A." in name for name, tensor in started.items() if tensor.abs().max() > 0} == {True}


# --- folders

def test_peft_reads_the_folder_and_finds_the_same_values(policy, tiny):
    from peft import AutoPeftModelForCausalLM
    config = json.loads((policy / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (4, 8, str(BASE))
    assert config["target_modules"] == sorted(config["target_modules"]) and len(config["target_modules"]) == 7
    theirs = AutoPeftModelForCausalLM.from_pretrained(policy).base_model.model.eval()
    values = values_of(load_model(str(policy), "cpu")[0])
    torch.testing.assert_close(values, values_of(theirs), atol=1e-4, rtol=1e-5)
    assert (values - values_of(tiny[0])).abs().max() > 1e-2
    assert not (policy / "model.safetensors").exists() and (policy / "chat_template.jinja").exists()


def scaled(folder, share, out):
    """A copy of an adapter folder that adds only a share of what it added."""
    shutil.copytree(folder, out)
    tensors = {name: tensor * share if "lora_B" in name else tensor for name, tensor in adapter(folder).items()}
    save_file(tensors, out / "adapter_model.safetensors", metadata={"format": "pt"})
    return tensors


def test_bfloat16_keeps_small_adapters(policy, tmp_path):
    """What an adapter adds to each weight of a model that computes in bfloat16, against float32: rounded once."""
    small, checked = scaled(policy, 0.1, tmp_path / "small"), 0
    model = load_model(str(tmp_path / "small"), "cpu", "bfloat16")[0]
    for key, b in small.items():
        if "lora_B" in key:
            name = key.removeprefix("base_model.model.").removesuffix(".lora_B.weight")
            expected = 8 / 4 * (b @ small[key.replace("lora_B", "lora_A")])
            found = model.get_submodule(name).get_delta_weight("default").float()
            assert (found - expected).norm() < 0.01 * expected.norm(), name
            checked += 1
    assert checked == 21 and {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    expected = values_of(load_model(str(tmp_path / "small"), "cpu")[0])
    torch.testing.assert_close(values_of(model), expected, atol=0.3, rtol=0.02)


@pytest.mark.parametrize("ranks, dtype", [(1, "bfloat16"), (2, "float32")])
def test_merged_is_the_float32_base_and_the_adapter(workspace, tmp_path, tiny, ranks, dtype):
    """Bit for bit what the base's files hold where there is no adapter; the sum in float32 where there is."""
    for name, more in (("merged", ["--merge"]), ("apart", [])):
        succeed("04_train_policy.py", *policy_flags(workspace, tmp_path / name, "--dtype", dtype, *more), ranks=ranks)
    merged, base, added = load_file(tmp_path / "merged" / "model.safetensors"), dict(tiny[0].named_parameters()), 0
    apart = adapter(tmp_path / "apart")
    for name, tensor in merged.items():
        key = "base_model.model." + name.removesuffix(".weight")
        if f"{key}.lora_B.weight" in apart:
            delta = 2 * (apart[f"{key}.lora_B.weight"] @ apart[f"{key}.lora_A.weight"])
            torch.testing.assert_close(tensor - base[name], delta, atol=1e-6 if ranks == 1 else 1e-5, rtol=0)
            added += 1
        else:
            assert torch.equal(tensor, base[name]), name
    assert added == 21 and json.loads((tmp_path / "merged" / "config.json").read_text())["dtype"] == "float32"
    assert not (tmp_path / "merged" / "adapter_config.json").exists()


def ids_sampled(workspace, out, agent, *more):
    """The ids that an agent samples in dialogues of two tasks with the same random numbers, a list a turn."""
    tasks = out.with_suffix(".tasks")
    write_jsonl(tasks, read(workspace / "tasks.jsonl")[:2])
    call(2, "--tasks", tasks, "--agent", agent, "--max-rounds", 3, "--max-new-tokens", 40, "--out", out, *more)
    rows, ids = read(out), []
    assert len(rows) == 2
    for row in rows:
        ids += [turn["output_ids"] for turn in row["dialogue_history"] if turn["role"] == "assistant"]
    return ids


def test_in_02_adapters_play_and_choose(workspace, critic, policy, tmp_path):
    """The agent's adapter plays, too: it says something else than its base. The critic prefers another message than the
    first one, which a critic without its adapter, whose scores are all 0, sends as an agent without a critic does."""
    first = ids_sampled(workspace, tmp_path / "first.jsonl", policy)
    assert first != ids_sampled(workspace, tmp_path / "base.jsonl", BASE)
    chosen = ids_sampled(workspace, tmp_path / "chosen.jsonl", policy, "--best-of", 2, "--critic", critic)
    assert chosen != first
    folder = tmp_path / "critic"
    scaled(critic, 0, folder)
    without = ids_sampled(workspace, tmp_path / "without.jsonl", policy, "--best-of", 2, "--critic", folder)
    assert without == first


def test_04_takes_adapter_folders(workspace, critic, policy, tmp_path):
    """04 scores by the critic on two ranks, trains from the adapter as a whole model, and says the same scores as one
    rank does."""
    sweet = ["--method", "sweet", "--critic", critic, "--trajectories", workspace / "offline.jsonl", "--data-frac",
             0.03, "--num-candidates", 4, "--max-new-tokens", 60, "--max-steps", 1]
    for name, ranks in (("one", 1), ("two", 2)):
        succeed("04_train_policy.py", *sweet, "--model", policy, "--out", tmp_path / name, ranks=ranks)
    one, two = ([value for row in read(tmp_path / name / "scored.jsonl") for value in row["advantages"]]
                for name in ("one", "two"))
    assert one == pytest.approx(two, abs=1e-4) and max(map(abs, one)) > 1e-3
    assert (tmp_path / "one" / "model.safetensors").exists() and not (tmp_path / "one" / "initial").exists()


@pytest.mark.parametrize("head", ["regression", "value"])
def test_a_head_is_trained_beside_the_adapter(workspace, tmp_path, tiny, head):
    out = tmp_path / head
    succeed("03_train_critic.py", *flags(workspace, out, "--head", head))
    assert read(out / "metrics.jsonl")[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)
    loaded = common.load_critic(common.read_critic(out, tiny[1], backend), common.load_whole("cpu"))
    assert loaded.ref_scorer is None and loaded.scorer.head.weight.abs().max() > 1e-3
    assert max(tensor.abs().max().item() for key, tensor in adapter(out).items() if "lora_B" in key) > 1e-3
    scores, = common.score_actions(loaded, tiny[1], points_of(workspace), 4096, "cpu")
    assert len(set(scores)) == 3


def test_a_base_that_moved_or_changed_is_one_line(workspace, critic, policy, tiny, tmp_path):
    shutil.copytree(policy, tmp_path / "policy")
    shutil.copytree(critic, tmp_path / "critic")

    def set_base(name):
        for folder in (tmp_path / "policy", tmp_path / "critic"):
            config = json.loads((folder / "adapter_config.json").read_text())
            (folder / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": name}))
    shutil.copytree(BASE, tmp_path / "moved")
    set_base(str(tmp_path / "moved"))
    assert load_model(str(tmp_path / "policy"), "cpu")[0] and common.read_critic(tmp_path / "critic", tiny[1], backend)
    path = tmp_path / "moved" / "model.safetensors"
    save_file({name: tensor * 1.01 for name, tensor in load_file(path).items()}, path, metadata={"format": "pt"})
    play = ["--tasks", workspace / "tasks.jsonl", "--out", tmp_path / "x", "--agent"]
    assert "other weights than when the adapter was trained" in refused(2, *play, tmp_path / "policy")
    line = refused(2, *play, BASE, "--best-of", 2, "--critic", tmp_path / "critic")
    assert f"its reference {tmp_path / 'moved'} has other weights" in line
    for name in ("models/nowhere", str(tmp_path / "nowhere"), str(tmp_path / "critic"), None):
        set_base(name)
        for line in (refused(2, *play, tmp_path / "policy"),
                     refused(2, *play, BASE, "--best-of", 2, "--critic", tmp_path / "critic")):
            assert re.search(rf"its base model {name} cannot be used .*; write where it is into .*adapter_config", line)
    assert not (tmp_path / "x").exists()


def test_bad_flags_are_one_line(workspace, policy, tmp_path, monkeypatch):
    out, method = tmp_path / "x", ["--method", "sft", "--trajectories", workspace / "demos.jsonl"]
    for flag in (["--lora-targets", "q_proj"], ["--merge"]):
        assert refused(4, *method, "--model", BASE, "--out", out, *flag) == f"{flag[0]} goes with --lora RANK"
    assert refused(4, *method, "--model", "tiny", "--out", out, *LORA).startswith("tiny: no model of this name")
    assert "--merge" in refused(4, *method, "--model", policy, "--out", out, *LORA)
    for targets, wanted in ((["nothing"], "nothing"), (["q_proj", "nothing"], "nothing: names no linear layer"),
                            (["lm_head"], "lm_head"), (["embed_tokens"], "embed_tokens")):
        line = refused(3, *flags(workspace, out, "--lora-targets", *targets))
        assert line.startswith("--lora-targets") and wanted in line
    monkeypatch.setitem(sys.modules, "peft", None)
    assert refused(3, *flags(workspace, out)) == "LoRA adapters need peft: pip install peft"
    with pytest.raises(InputError, match="pip install peft"):
        load_model(str(policy), "cpu")
    assert not out.exists()
