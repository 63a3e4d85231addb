"""03_train_critic.py: golden losses, step-0 invariants, learning, resume, ranks, bad input."""
import json
import math

import pytest
import torch

import common
from conftest import ROOT, read, refused, stage, succeed

critic_stage = stage(3)
BASE = ROOT / "tests" / "tiny"


def flags(workspace, out, *more):
    return ["--trajectories", workspace / "offline.jsonl", "--model", BASE, "--lr", 1e-3, "--max-steps", 4, "--save-every", 2,
            "--log-every", 1, "--out", out, *more]


# --- losses by hand

def test_turn_advantages_by_hand():
    logps = torch.tensor([[-2.0, -6.0, 0.0]])
    ref_logps = torch.tensor([[-4.0, -3.0, 0.0]])
    lengths = torch.tensor([[4.0, 1.0, 0.0]])                      # two turns of 4 tokens and of 1; no third
    assert critic_stage.turn_advantages(logps, ref_logps, lengths, "turn").tolist() == [[0.5, -3.0, 0.0]]
    assert critic_stage.turn_advantages(logps, ref_logps, lengths, "trajectory").sum().item() == pytest.approx(-0.2)
    assert critic_stage.turn_advantages(logps, ref_logps, lengths, "none").sum().item() == -1.0


def test_bradley_terry_loss_by_hand_in_float64():
    losses, chosen, rejected = critic_stage.bradley_terry_loss(torch.tensor([0.0, 3.0], dtype=torch.float64),
                                                              torch.tensor([0.0, -1.0], dtype=torch.float64), beta=0.5)
    assert losses.tolist() == pytest.approx([math.log(2), math.log(1 + math.exp(-2))], abs=1e-12)
    assert (chosen.tolist(), rejected.tolist()) == ([0.0, 1.5], [0.0, -0.5])


# --- training

@pytest.fixture(scope="module")
def critic(workspace, tmp_path_factory):
    out = tmp_path_factory.mktemp("critic") / "critic"
    return out, succeed("03_train_critic.py", *flags(workspace, out, "--nll-coef", 0))


def test_the_first_loss_is_log_2(critic):
    first = read(critic[0] / "metrics.jsonl")[0]
    assert first["step"] == 1 and first["loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert first["margin"] == pytest.approx(0, abs=1e-5)


def test_an_untrained_critic_scores_every_candidate_0(workspace, tmp_path, tiny):
    model, tokenizer = tiny
    row = read(workspace / "offline.jsonl")[0]
    turn = row["dialogue_history"][1]
    rows = [{"prompt": turn["input"], "task": row["task"], "candidates": [{"ids": turn["output_ids"]}, {"ids": [7, 8]}]}]
    args = stage(4).parse_args(["--method", "sweet", "--critic", "x", "--trajectories", "x", "--model", "x", "--out", "x"])
    same = {"model": model, "reference": model, "privileged": True, "normalize": "turn"}
    assert stage(4).score_candidates(rows, same, tokenizer, args, "cpu")[0]["advantages"] == [0.0, 0.0]


def test_the_folder_is_a_model_with_a_description(critic):
    out, printed = critic
    assert json.loads((out / "critic.json").read_text())["reference"] == str(BASE)
    assert (out / "COMPLETED").exists() and (out / "chat_template.jinja").exists() and not (out / "state.pt").exists()
    model, tokenizer = common.load_model(str(out), "cpu")
    base, _ = common.load_model(str(BASE), "cpu")
    moved = max((a - b).abs().max().item() for a, b in zip(model.parameters(), base.parameters()))
    assert 1e-4 < moved < 0.1
    assert "held-out pair accuracy" in printed and "The function that this person needs" in printed


def test_held_out_pairs_share_no_task_with_the_others(workspace):
    tasks = [row["task_id"] for row in read(workspace / "tasks.jsonl")]
    held = {task for task in tasks if critic_stage.is_held_out(task, 0.3)}
    assert 0 < len(held) < len(tasks) and held == {task for task in tasks if critic_stage.is_held_out(task, 0.3)}


def test_it_learns_its_training_pairs(workspace, tmp_path):
    succeed("03_train_critic.py", *flags(workspace, tmp_path / "c", "--held-out-frac", 0, "--max-steps", 20, "--epochs", 20,
                                         "--batch-size", 16))
    steps = read(tmp_path / "c" / "metrics.jsonl")
    assert sum(s["acc"] for s in steps[-5:]) / 5 > 0.9 and steps[-1]["loss"] < 0.6


def weights(folder):
    from safetensors.torch import load_file
    return load_file(folder / "model.safetensors")


def test_killed_and_resumed_equals_uninterrupted_bit_for_bit(workspace, tmp_path, monkeypatch):
    arguments = [str(x) for x in flags(workspace, tmp_path / "killed", "--nll-coef", 0)]
    original = common.save_state

    def save_and_die(folder, step, model, optimizer):
        original(folder, step, model, optimizer)
        raise KeyboardInterrupt
    monkeypatch.setattr(common, "save_state", save_and_die)
    with pytest.raises(KeyboardInterrupt):
        critic_stage.main(arguments)
    assert "not finished" in refused(2, "--tasks", workspace / "tasks.jsonl", "--agent", tmp_path / "killed", "--out",
                                     tmp_path / "x")
    monkeypatch.undo()
    critic_stage.main(arguments)
    critic_stage.main([str(x) for x in flags(workspace, tmp_path / "whole", "--nll-coef", 0)])
    killed, whole = weights(tmp_path / "killed"), weights(tmp_path / "whole")
    assert all(torch.equal(killed[name], whole[name]) for name in whole)
    assert [row["step"] for row in read(tmp_path / "killed" / "metrics.jsonl")] == [1, 2, 3, 4]


def test_one_batch_of_eight_is_eight_batches_of_one_and_two_ranks(workspace, critic, tmp_path):
    succeed("03_train_critic.py", *flags(workspace, tmp_path / "micro", "--nll-coef", 0, "--micro-batch-size", 1))
    succeed("03_train_critic.py", *flags(workspace, tmp_path / "ranks", "--nll-coef", 0), ranks=2)
    whole = read(critic[0] / "metrics.jsonl")
    for name in ("micro", "ranks"):
        for ours, theirs in zip(read(tmp_path / name / "metrics.jsonl"), whole, strict=True):
            for key in ("loss", "margin", "gnorm"):
                assert ours[key] == pytest.approx(theirs[key], rel=2e-3, abs=1e-4), (name, key)


# --- bad input

def test_bad_input_is_one_line(workspace, tmp_path):
    rows = read(workspace / "offline.jsonl")
    files = {"empty": "", "broken": json.dumps(rows[0]) + "\nx\n", "keyless": json.dumps({"task": rows[0]["task"]}) + "\n",
             "losses": "".join(json.dumps({**row, "reward": 0.0}) + "\n" for row in rows),
             "unscored": json.dumps({k: v for k, v in rows[0].items() if k != "reward"}) + "\n"}
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    for name, message in (("missing", "no such file"), ("empty", "no rows in it"), ("broken", "broken:2: not JSON"),
                          ("keyless", 'keyless:1: missing "dialogue_history"'), ("losses", "no trajectory pairs"),
                          ("unscored", 'unscored:1: missing "reward"')):
        line = refused(3, "--trajectories", tmp_path / name, "--model", BASE, "--out", tmp_path / "out")
        assert message in line and str(tmp_path / name) in line
    assert "nobody/model" in refused(3, "--trajectories", workspace / "offline.jsonl", "--model", "nobody/model", "--out",
                                     tmp_path / "out")
    assert "--max-length 20" in refused(3, *flags(workspace, tmp_path / "long", "--max-length", 20))
    assert not (tmp_path / "out").exists()
