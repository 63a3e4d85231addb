"""03_train_critic.py: golden losses, step-0 invariants, learning, resume, ranks, bad input."""
import collections
import copy
import json
import math
import re
import shutil

import pytest
import torch

import common
from colbench import backend, frontend
from compare import assert_same_steps, greatest_difference, set_weights, weights
from conftest import BASE, call, dies, policy_flags, read, refused, stage, succeed, write
from lib import training
from lib.data import read_trajectories
from lib.models import load_model, weights_fingerprint
from lib.runtime import InputError

critic_stage = stage(3)
REQUIRED = ["--trajectories", "t", "--model", "m", "--out", "o"]


def flags(workspace, out, *more):
    return ["--trajectories", workspace / "offline.jsonl", "--num-trajectories", 36, "--model", BASE, "--lr", 1e-3,
            "--batch-size", 4, "--max-steps", 4, "--save-every", 2, "--out", out, *more]


# --- losses by hand

def test_action_advantages_by_hand():
    logps = torch.tensor([[-2.0, -6.0, 0.0]])
    ref_logps = torch.tensor([[-4.0, -3.0, 0.0]])
    lengths = torch.tensor([[4.0, 1.0, 0.0]])                      # two turns of 4 tokens and of 1; no third
    assert common.action_advantages(logps, ref_logps, lengths, "turn").tolist() == [[0.5, -3.0, 0.0]]
    assert common.action_advantages(logps, ref_logps, lengths, "trajectory").sum().item() == pytest.approx(-0.2)
    assert common.action_advantages(logps, ref_logps, lengths, "none").sum().item() == -1.0


def test_bradley_terry_losses_by_hand_in_float64():
    """Of two pairs of trajectories: scores 0 and 0, 2 + 1 and -1; the chosen ones' NLL is 6 / 3 and 4 / 8."""
    value = lambda *rows: torch.tensor(rows, dtype=torch.float64)
    advantages, lengths = value([0, 0], [0, 0], [2, 1], [-1, 0]), value([1, 2], [3, 0], [4, 4], [5, 0])
    logps = value([-2, -4], [-9, 0], [-1, -3], [-9, 0])
    losses, numbers = critic_stage.bradley_terry_losses(advantages, logps, lengths, beta=0.5, nll_coef=0.1)
    expected = [math.log(2) + 0.1 * 2, math.log(1 + math.exp(-2)) + 0.1 * 0.5]
    assert losses.tolist() == pytest.approx(expected, abs=1e-12)
    assert {name: numbers[name].tolist() for name in numbers} == {
        "chosen": [0.0, 1.5], "rejected": [0.0, -0.5], "nll": [2.0, 0.5]}


def test_value_losses_by_hand():
    values = torch.tensor([[0.0, 2.0], [-1.0, 0.0]], dtype=torch.float64)
    lengths = torch.tensor([[3.0, 1.0], [2.0, 0.0]])                              # two turns, one turn
    losses = critic_stage.value_losses(values, torch.tensor([1.0, 0.0], dtype=torch.float64), lengths)
    assert losses["loss"].tolist() == pytest.approx([(math.log(2) + math.log(1 + math.exp(-2))) / 2,
                                                     math.log(1 + math.exp(-1))])
    assert losses["acc"].tolist() == [True, True]                    # by the last values, 2 and -1


# --- training

@pytest.fixture(scope="module")
def critic(workspace, tmp_path_factory):
    out = tmp_path_factory.mktemp("critic") / "critic"
    return out, call(3, *flags(workspace, out, "--nll-coef", 0))


def point_of(row, *actions):
    """The first turn of a trajectory with further actions."""
    turn = row["dialogue_history"][1]
    return common.DecisionPoint(turn["input"], row["task"], [], [turn["output_ids"], *actions], [])


def test_it_begins_at_log_2_and_its_folder_is_a_model_with_a_description(critic):
    out, printed = critic
    first = read(out / "metrics.jsonl")[0]
    assert first["step"] == 1 and first["loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert first["margin"] == pytest.approx(0, abs=1e-5)
    assert json.loads((out / "critic.json").read_text())["reference"] == str(BASE)
    assert (out / "COMPLETED").exists() and (out / "chat_template.jinja").exists() and not (out / "states").exists()
    load_model(str(out), "cpu")
    assert 1e-4 < greatest_difference(out, BASE) < 0.1
    assert "held-out pair accuracy" in printed and "The function that this person needs" in printed


def test_an_untrained_critic_scores_every_candidate_0(workspace, tiny):
    model, tokenizer = tiny
    scorer = common.Scorer(model)
    same = common.Critic("x", "x", scorer=scorer, ref_scorer=scorer)
    point = point_of(read(workspace / "offline.jsonl")[0], [7, 8])
    assert common.score_actions(same, tokenizer, [point], 4096, "cpu") == [[0.0, 0.0]]
    broken = common.Critic("broken", "x", scorer=copy.deepcopy(scorer), ref_scorer=scorer)
    broken.scorer.model.model.norm.weight.data[0] = float("nan")
    with pytest.raises(InputError, match="broken: gives scores that are not finite; train this critic again"):
        common.score_actions(broken, tokenizer, [point], 4096, "cpu")


@pytest.mark.parametrize("head", ["regression", "value"])
def test_heads_begin_at_log_2_and_learn(workspace, tmp_path, head, tiny):
    out = tmp_path / head
    printed = call(3, *flags(workspace, out, "--head", head, "--held-out-frac", 0, "--max-steps", 10, "--epochs", 16,
                             "--beta", 1, "--lr", 3e-3))
    what = {"regression": "trajectory pairs", "value": "trajectories"}[head]
    number = re.search(rf"^([\d,]+) {what} to train on, 0 pairs of other tasks held out$", printed, re.MULTILINE)[1]
    assert f"\n{number} examples, " in printed
    steps = read(out / "metrics.jsonl")
    assert steps[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert "nll" not in steps[0] and "acc" in steps[0]                            # a head gives no probability
    assert sum(s["loss"] for s in steps[-3:]) / 3 < 0.67
    assert json.loads((out / "args.json").read_text())["args"]["normalize"] == "none"
    # 04 and 02 are not told its kind
    critic = common.load_critic(common.read_critic(out, tiny[1], backend), common.load_whole("cpu"))
    points = [point_of(read(workspace / "offline.jsonl")[0], [7, 8], [7, 8])]
    (a, b, c), = common.score_actions(critic, tiny[1], points, 4096, "cpu")
    critic.scorer.takes_trees = False
    (plain, *_), = common.score_actions(critic, tiny[1], points, 4096, "cpu")
    assert b == c != a and a == pytest.approx(plain, abs=1e-5)


@pytest.mark.parametrize("head", ["lm", "value"])
def test_what_is_longer_than_the_model_takes_is_refused_before_training(workspace, tmp_path, head):
    """Its 2,048 positions, below --max-length 8,192; a head has no reference that would have read the rows first."""
    rows = read(workspace / "offline.jsonl")
    for row in rows:
        row["dialogue_history"][0]["content"] += " and" * 500
        row["tokenizer"] = None                                                   # so that prompts are rendered again
        for turn in row["dialogue_history"]:
            turn.pop("input", None)
    line = refused(3, *flags(workspace, tmp_path / "out", "--head", head, "--trajectories",
                             write(tmp_path / "long.jsonl", rows)))
    assert re.search(r"takes 2,048 tokens, and a prompt with its action has up to \d,\d+ ", line)
    assert not (tmp_path / "out" / "metrics.jsonl").exists()


def test_a_heads_values_by_hand(tiny):
    """The head's input: the mean of the model's own hidden states at the action's tokens."""
    model, tokenizer = tiny
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    hidden = model.get_decoder()(input_ids=ids).last_hidden_state[0]
    batch = common.collate([[common.Row([5, 6, 7, 8, 9], [-1, 0, 0, -1, 1])], [common.Row([5, 6, 7], [-1, 0, 0])]])
    scorer = common.Scorer(model, has_head=True)
    assert scorer(batch).abs().max() == 0                            # untrained
    torch.nn.init.normal_(scorer.head.weight, generator=torch.Generator().manual_seed(0))
    torch.nn.init.constant_(scorer.head.bias, 0.5)
    values = scorer(batch)
    assert torch.allclose(values[0, 0], scorer.head(hidden[1:3].mean(0)), atol=1e-4)
    assert torch.allclose(values[0, 1], scorer.head(hidden[4]), atol=1e-4)
    assert torch.allclose(values[1, 0], values[0, 0], atol=1e-4) and values[1, 1] == 0


def test_subsets_are_nested_and_hold_whole_tasks(workspace):
    path = workspace / "offline.jsonl"
    small, large = (read_trajectories(path, n, seed=1) for n in (30, 60))
    assert [len(small), len(large)] == [30, 60] and small == large[:30]
    assert {t["task_id"] for t in small} != {t["task_id"] for t in read_trajectories(path, 30, seed=2)}
    for task in {t["task_id"] for t in small}:
        assert sum(t["task_id"] == task for t in small) == 3
    with pytest.raises(InputError, match="only 72"):
        read_trajectories(path, 73)


def test_turns_are_taken_as_sampled_as_logged_or_rendered_again(workspace, tiny):
    """In rows of this tokenizer; of a published file; of one with another template's prompts and no ids."""
    row = read(workspace / "offline.jsonl")[0]
    published = {key: value for key, value in row.items() if key not in ("tokenizer", "max_rounds")}
    other, branched = copy.deepcopy(published), copy.deepcopy(row)
    for turn in other["dialogue_history"][1::2]:
        del turn["output_ids"]
        turn["input"] = "<|start_header_id|>assistant<|end_header_id|>\n\n"
    for key in ("input", "output", "output_ids"):                    # as 02 --branch keeps the turns before its own
        del branched["dialogue_history"][1][key]
    counts = [collections.Counter() for _ in range(4)]
    own, logged, again, mixed = map(common.agent_turns, [tiny[1]] * 4, (row, published, other, branched), counts)
    n = len(own)
    assert counts == [{"as sampled": n}, {"as logged": n}, {"rendered again": n},
                      {"rendered again": 1, "as sampled": n - 1}]
    assert logged == own
    for turns in (again, mixed):
        assert [ids for _, ids in turns] == [ids for _, ids in own]


def test_presets_set_table_5_and_explicit_flags_win(capsys):
    for preset, more, epochs, head, nll_coef, normalize in (
            ("paper-backend", [], 4, "lm", 0.01, "turn"), ("paper-frontend", [], 8, "regression", 0, "none"),
            ("paper-frontend", ["--epochs", "2"], 2, "regression", 0, "none"),
            ("released-backend", [], 4, "lm", 0, "trajectory")):
        args = critic_stage.parse_args([*REQUIRED, "--preset", preset, *more])
        assert (args.epochs, args.head, args.nll_coef, args.normalize) == (epochs, head, nll_coef, normalize)
        assert (args.lr, args.beta, args.batch_size) == (2e-7, 0.1, 8)
    assert (training.WARMUP_FRAC, training.FINAL_LR_FRAC, training.ADAM_BETAS) == (0.03, 0.1, (0.9, 0.95))
    assert (training.WEIGHT_DECAY, training.MAX_GRAD_NORM) == (0.0, 1.0)
    for words, epochs, of_method in ((["sweet", "--critic", "c"], None, (1, 8)), (["mtdpo"], 8, (4, 8)),
                                     (["rft"], 8, (4, 32))):
        args = stage(4).parse_args([*REQUIRED, "--preset", "paper-frontend", "--method", *words])
        assert (args.epochs, args.batch_size, args.lr, args.beta) == (epochs, None, 2e-7, 0.1)
        assert stage(4).METHODS[args.method][-2:] == of_method       # which count where the flags are not given
    assert (backend.MIN_RETURN_GAP, frontend.MIN_RETURN_GAP) == (None, 0.1)       # table 5's gap of pages
    with pytest.raises(SystemExit):
        critic_stage.parse_args(["--preset", "paper-frontend", "--help"])
    assert "(default: 8)" in capsys.readouterr().out.split("--epochs")[-1].split("--batch-size")[0]


@pytest.mark.parametrize("fraction, held_out", [
    (0, ""), (0.01, ""), (0.02, "b"), (0.44, "b"), (0.45, "ab"), (0.57, "abc"), (1, "abc")])
def test_whether_a_task_is_held_out_by_hand(fraction, held_out):
    """By the first 32 bits of its hash: .4471 of 2 ** 32 for "a", .0125 for "b", .5613 for "c"."""
    assert [task for task in "abc" if critic_stage.is_held_out(task, fraction)] == list(held_out)


@pytest.mark.parametrize("head", ["lm", "value"])
def test_held_out_pairs_share_no_task_with_the_others(workspace, head):
    trajectories = read(workspace / "offline.jsonl")
    args = critic_stage.parse_args([*REQUIRED, "--held-out-frac", "0.3", "--head", head])
    groups, held_out_pairs = critic_stage.split_groups(trajectories, args)
    trained = {trajectories[number]["task_id"] for group in groups for number in group}
    held_out = {trajectories[number]["task_id"] for pair in held_out_pairs for number in pair}
    assert trained and held_out and not trained & held_out
    assert not any(critic_stage.is_held_out(task, 0.3) for task in trained)
    assert all(critic_stage.is_held_out(task, 0.3) for task in held_out)
    pairs = common.trajectory_pairs(trajectories, "offline.jsonl")
    first = [row for row in trajectories if row["sample"] == 0]      # one dialogue a task: no pair
    if head == "value":                                              # every dialogue of the other tasks, one by one
        assert groups == [(number,) for number, trajectory in enumerate(trajectories)
                          if not critic_stage.is_held_out(trajectory["task_id"], 0.3)]
        assert set(held_out_pairs) < set(pairs) and critic_stage.split_groups(first, args)[1] == []
    else:
        assert sorted(groups + held_out_pairs) == sorted(pairs)      # no pair is lost


def test_killed_and_resumed_equals_uninterrupted_bit_for_bit(workspace, critic, tmp_path):
    arguments = flags(workspace, tmp_path / "killed", "--nll-coef", 0)
    with dies(training.Checkpoints, "save", calls=1):                     # at the end
        call(3, *arguments)
    assert "continues at step 2\n" in call(3, *arguments)
    assert greatest_difference(tmp_path / "killed", critic[0]) == 0
    rows = read(tmp_path / "killed" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert all(one["seconds"] < two["seconds"] for one, two in zip(rows, rows[1:]))


def test_one_batch_of_four_is_four_batches_of_one_and_two_ranks(workspace, critic, tmp_path):
    call(3, *flags(workspace, tmp_path / "micro", "--nll-coef", 0, "--micro-batch-size", 1))
    succeed("03_train_critic.py", *flags(workspace, tmp_path / "ranks", "--nll-coef", 0), ranks=2)
    for name in ("micro", "ranks"):
        assert_same_steps(tmp_path / name, critic[0])


# --- the reference

def test_another_reference_is_refused(critic, workspace, tmp_path):
    """A copy of a critic, whose reference has other weights by now."""
    base, copied = tmp_path / "base", tmp_path / "critic"
    shutil.copytree(BASE, base)
    shutil.copytree(critic[0], copied)
    note = json.loads((copied / "critic.json").read_text())
    assert note["reference_fingerprint"] == weights_fingerprint(str(base))
    (copied / "critic.json").write_text(json.dumps({**note, "reference": str(base)}))
    set_weights(base, {name: tensor * 1.01 for name, tensor in weights(base).items()})
    assert refused(4, *policy_flags(workspace, "sweet", tmp_path / "x", "--critic", copied)) == (
        f"{copied}: its reference {base} has other weights than when the critic was trained from it; put them back, "
        "or train the critic again")
    assert not (tmp_path / "x").exists()
