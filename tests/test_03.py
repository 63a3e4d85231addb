"""03_train_critic.py: golden losses, step-0 invariants, learning, ranks, what the reference of eq. 3 reads; critics
without training. (A killed run goes on: test_elastic.py.)"""
import collections
import copy
import functools
import json
import math
import re
import shutil

import pytest
import torch

import common
from colbench import backend, Domain, frontend
from compare import assert_same_steps, greatest_difference, token_logps_after
from conftest import (
    BASE,
    call,
    critic_note,
    FUNCTION,
    load_critic,
    load_untrained,
    loaded,
    read,
    refused,
    stage,
    succeed,
    write,
)
from lib import training
from lib.data import read_trajectories
from lib.load import load_model
from lib.logps import action_lengths, ActionModel, collate, HeadModel, Sequence
from lib.runtime import InputError
from lib.tokens import agent_turns

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
    items = [[Sequence([5, 6, 6, 6, 6, 7], [-1, 0, 0, 0, 0, 1])], [Sequence([5, 6], [-1, 0])]]
    assert action_lengths(items).tolist() == [[4, 1], [1, 0]]


@pytest.mark.parametrize("normalize, scores", [("turn", [0.5, -3]), ("trajectory", [0.5, -3]), ("none", [2, -3])])
def test_scores_of_actions_by_hand(tiny, monkeypatch, normalize, scores):
    """Also with --normalize trajectory a mean over the action's own tokens."""
    critic = common.LogRatioCritic("x", "y", tiny[1], normalize=normalize)
    outputs = iter([[torch.tensor([-2.0, -6.0])], [torch.tensor([-4.0, -3.0])]])     # of the critic, of its reference
    monkeypatch.setattr(common, "action_outputs", lambda *_: next(outputs))
    critic.model = critic.ref_model = ActionModel(tiny[0])
    critic.max_tokens = 4096
    state = common.State("?", FUNCTION, [], [[5, 5, 5, 5], [6], [5, 5, 5, 5]], [])
    assert critic.score_actions([state]) == [[*scores, scores[0]]]


def test_bradley_terry_losses_by_hand_in_float64():
    """Of two pairs of trajectories: scores 0 and 0, 2 + 1 and -1; the chosen ones' NLL is 6 / 4 and 4 / 8."""
    value = lambda *rows: torch.tensor(rows, dtype=torch.float64)
    advantages, lengths = value([0, 0], [0, 0], [2, 1], [-1, 0]), value([1, 3], [3, 0], [4, 4], [5, 0])
    logps = value([-2, -4], [-9, 0], [-1, -3], [-9, 0])
    losses, numbers = critic_stage.bradley_terry_losses(advantages, logps, lengths, beta=0.5, nll_coef=0.1)
    expected = [math.log(2) + 0.1 * 1.5, math.log(1 + math.exp(-2)) + 0.1 * 0.5]
    assert losses.tolist() == pytest.approx(expected, abs=1e-12)
    assert {name: numbers[name].tolist() for name in numbers} == {
        "chosen": [0.0, 1.5], "rejected": [0.0, -0.5], "nll": [1.5, 0.5]}


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
    return out, call(3, *flags(workspace, out, "--nll-coef", 0.1))


def state_of(row, *actions):
    """The first turn of a trajectory with further actions."""
    turn = row["dialogue_history"][1]
    return common.State(turn["input"], row["task"], [], [turn["output_ids"], *actions], [])


def test_it_begins_at_log_2_and_its_folder_is_a_model_with_a_description(critic):
    out, printed = critic
    first = read(out / "metrics.jsonl")[0]
    assert first["step"] == 1 and first["loss"] == pytest.approx(math.log(2) + 0.1 * first["nll"], abs=1e-5)
    assert first["nll"] > 0.01 and first["margin"] == pytest.approx(0, abs=1e-5)
    assert json.loads((out / "critic.json").read_text())["reference"] == str(BASE)
    assert (out / "COMPLETED").exists() and (out / "chat_template.jinja").exists() and not (out / "states").exists()
    load_model(str(out), "cpu")
    assert 1e-4 < greatest_difference(out, BASE) < 0.1
    assert "held-out pair accuracy" in printed and "The function that this person needs" in printed


def test_an_untrained_critic_scores_every_candidate_0(workspace, tiny):
    state = state_of(read(workspace / "offline.jsonl")[0], [7, 8])
    same = loaded(common.LogRatioCritic(str(BASE), str(BASE), tiny[1]))
    assert same.score_actions([state]) == [[0.0, 0.0]]
    broken = load_untrained()
    broken.model.model.model.norm.weight.data[0] = float("nan")
    with pytest.raises(InputError, match="tiny: its scores are not finite; train this critic again"):
        broken.score_actions([state])


@pytest.mark.parametrize("score", ["regression", "value"])
def test_heads_begin_at_log_2_and_learn(workspace, tmp_path, score, tiny):
    out = tmp_path / score
    printed = call(3, *flags(workspace, out, "--score", score, "--held-out-frac", 0, "--max-steps", 10, "--epochs", 16,
                             "--beta", 1, "--lr", 3e-3))
    what = {"regression": "trajectory pairs", "value": "trajectories"}[score]
    number = re.search(rf"^([\d,]+) {what} to train on, 0 pairs of other tasks held out$", printed, re.MULTILINE)[1]
    assert f"\n{number} examples, " in printed
    steps = read(out / "metrics.jsonl")
    assert steps[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert "nll" not in steps[0] and "acc" in steps[0]                            # a head gives no probability
    assert sum(s["loss"] for s in steps[-3:]) / 3 < 0.67
    assert json.loads((out / "args.json").read_text())["args"]["normalize"] == "none"
    # 04 and 02 are not told its kind
    critic = load_critic(out)
    states = [state_of(read(workspace / "offline.jsonl")[0], [7, 8], [7, 8])]
    (a, b, c), = critic.score_actions(states)
    critic.model.takes_trees = False
    (plain, *_), = critic.score_actions(states)
    assert b == c != a and a == pytest.approx(plain, abs=1e-5)


@pytest.mark.parametrize("score", ["logratio", "value"])
def test_what_is_longer_than_the_model_takes_is_refused_before_training(workspace, data, tmp_path, score):
    """Its 2,048 positions, below --max-length 8,192; a head has no reference that would have read the rows first."""
    rows = read(data / "demos.jsonl")
    for row in rows:
        row["dialogue_history"][0]["content"] += " and" * 1000
    line = refused(3, *flags(workspace, tmp_path / "out", "--score", score, "--trajectories",
                             write(tmp_path / "long.jsonl", rows)))
    assert re.search(r"takes 2,048 tokens, and a prompt with its action has up to \d,\d+ ", line)
    assert not (tmp_path / "out" / "metrics.jsonl").exists()


def test_a_heads_values_by_hand(tiny):
    """The head's input: the mean of the model's own hidden states at the action's tokens."""
    model, tokenizer = tiny
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    hidden = model.get_decoder()(input_ids=ids).last_hidden_state[0]
    batch = collate([[Sequence([5, 6, 7, 8, 9], [-1, 0, 0, -1, 1])], [Sequence([5, 6, 7], [-1, 0, 0])]])
    action_model = HeadModel(model)
    assert action_model(batch).abs().max() == 0                      # untrained
    torch.nn.init.normal_(action_model.head.weight, generator=torch.Generator().manual_seed(0))
    torch.nn.init.constant_(action_model.head.bias, 0.5)
    values = action_model(batch)
    assert torch.allclose(values[0, 0], action_model.head(hidden[1:3].mean(0)), atol=1e-4)
    assert torch.allclose(values[0, 1], action_model.head(hidden[4]), atol=1e-4)
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
    own, logged, again, mixed = map(agent_turns, [tiny[1]] * 4, (row, published, other, branched), counts)
    n = len(own)
    assert counts == [{"as sampled": n}, {"as logged": n}, {"rendered again": n},
                      {"rendered again": 1, "as sampled": n - 1}]
    assert logged == own
    for turns in (again, mixed):
        assert [ids for _, ids in turns] == [ids for _, ids in own]


def test_presets_set_table_5_and_explicit_flags_win(capsys):
    for preset, more, epochs, score, nll_coef, normalize in (
            ("paper-backend", [], 4, "logratio", 0.01, "turn"), ("paper-frontend", [], 8, "regression", 0, "none"),
            ("paper-frontend", ["--epochs", "2"], 2, "regression", 0, "none"),
            ("published-backend", [], 4, "logratio", 0, "trajectory")):
        args = critic_stage.parse_args([*REQUIRED, "--preset", preset, *more])
        assert (args.epochs, args.score, args.nll_coef, args.normalize) == (epochs, score, nll_coef, normalize)
        assert (args.lr, args.beta, args.batch_size) == (2e-7, 0.1, 8)
    assert (training.WARMUP_FRAC, training.FINAL_LR_FRAC, training.ADAM_BETAS) == (0.03, 0.1, (0.9, 0.95))
    assert (training.WEIGHT_DECAY, training.MAX_GRAD_NORM) == (0.0, 1.0)
    for words, preset, expected in (
            (["sweet", "--critic", "c"], "paper-frontend", (1, 8)), (["mtdpo"], "paper-frontend", (8, 8)),
            (["rft"], "paper-frontend", (8, 32)), (["mtdpo"], "paper-backend", (4, 8)),
            (["rft", "--epochs", "2"], "paper-backend", (2, 32))):
        args = stage(4).parse_args([*REQUIRED, "--preset", preset, "--method", *words])
        assert (args.epochs, args.batch_size) == expected and (args.lr, args.beta) == (2e-7, 0.1)
    assert (backend.MIN_RETURN_GAP, frontend.MIN_RETURN_GAP) == (None, 0.1)       # table 5's gap of pages
    with pytest.raises(SystemExit):
        critic_stage.parse_args(["--preset", "paper-frontend", "--help"])
    assert "(default: 8)" in capsys.readouterr().out.split("--epochs")[-1].split("--batch-size")[0]


@pytest.mark.parametrize("fraction, held_out", [
    (0, ""), (0.01, ""), (0.02, "b"), (0.44, "b"), (0.45, "ab"), (0.57, "abc"), (1, "abc")])
def test_whether_a_task_is_held_out_by_hand(fraction, held_out):
    """By the first 32 bits of its hash: .4471 of 2 ** 32 for "a", .0125 for "b", .5613 for "c"."""
    assert [task for task in "abc" if critic_stage.is_held_out(task, fraction)] == list(held_out)


@pytest.mark.parametrize("score", ["logratio", "value"])
def test_held_out_pairs_share_no_task_with_the_others(workspace, score):
    trajectories = read(workspace / "offline.jsonl")
    split = functools.partial(critic_stage.split_groups, needs_pairs=score != "value", min_gap=None, held_out_frac=0.3,
                              path="t")
    groups, held_out_pairs = split(trajectories)
    trained = {trajectories[number]["task_id"] for group in groups for number in group}
    held_out = {trajectories[number]["task_id"] for pair in held_out_pairs for number in pair}
    for tasks, is_held_out in ((trained, False), (held_out, True)):
        assert {critic_stage.is_held_out(task, 0.3) for task in tasks} == {is_held_out}
    pairs = common.trajectory_pairs(trajectories, "offline.jsonl")
    first = [row for row in trajectories if row["sample"] == 0]      # one dialogue a task: no pair
    if score == "value":                                              # every dialogue of the other tasks, one by one
        assert groups == [(number,) for number, trajectory in enumerate(trajectories)
                          if not critic_stage.is_held_out(trajectory["task_id"], 0.3)]
        assert set(held_out_pairs) < set(pairs) and split(first)[1] == []
    else:
        assert sorted(groups + held_out_pairs) == sorted(pairs)      # no pair is lost


@pytest.mark.parametrize("score, more", [
    ("logratio", ["--critic-sees-c", "no"]), ("logratio", ["--reference-sees-c", "no"]), ("value", [])])
def test_what_is_trained_and_measured_where_some_is_too_long(workspace, tmp_path, tiny, monkeypatch, score, more):
    """Held-out tasks are measured alone; references and returns are those of their examples; who reads c. (Training and
    passes of the reference have stand-ins.)"""
    seen, sees_c = {}, "--critic-sees-c" not in more
    monkeypatch.setattr(critic_stage, "reference_logps", lambda path, action_model, examples, _: examples)
    monkeypatch.setattr(critic_stage, "gaps_of_c", lambda logps, *_: torch.zeros(len(logps)))
    monkeypatch.setattr(critic_stage, "train", lambda _, *found: seen.update(trained=found))
    monkeypatch.setattr(critic_stage, "pair_accuracy", lambda _, *found: seen.update(measured=found) or 0.5)
    printed = call(3, *flags(workspace, tmp_path, "--score", score, "--held-out-frac", 0.4, "--max-length", 252, *more))
    (trained, refs, returns, *_), (held_out, held_out_refs, *_) = seen["trained"], seen["measured"]
    assert ("longer than --max-length" in printed) == sees_c         # c makes them longer
    for examples, is_held_out in ((trained, False), (held_out, True)):
        assert {critic_stage.is_held_out(example.task_id, 0.4) for example in examples} == {is_held_out}
    if score == "value":                                             # it has no reference
        assert {*refs, *held_out_refs} == {None}
        refs, held_out_refs = trained + held_out, held_out
    for examples, has_c in ((trained + held_out, sees_c), (refs, not more)):
        texts = [tiny[1].decode(example.items[0][0].ids) for example in examples]
        assert {"The function that this person needs" in text for text in texts} == {has_c}

    def said(examples):
        return [[[token for row in item for token, turn in zip(row.ids, row.action_ids) if turn >= 0]
                 for item in example.items] for example in examples]
    assert said(refs) == said(trained + held_out) and said(held_out_refs) == said(held_out)
    wins = {}
    for row in read_trajectories(workspace / "offline.jsonl", 36):
        wins[repr(sum((turn["output_ids"] for turn in row["dialogue_history"][1::2]), []))] = float(row["reward"] == 1)
    assert returns == [wins[repr(first)] for first, *_ in said(trained + held_out)]
    assert json.loads((tmp_path / "critic.json").read_text())["critic_sees_c"] == sees_c


def test_one_batch_of_four_is_four_batches_of_one_and_two_ranks(workspace, critic, tmp_path):
    call(3, *flags(workspace, tmp_path / "micro", "--nll-coef", 0.1, "--micro-batch-size", 1))
    succeed("03_train_critic.py", *flags(workspace, tmp_path / "ranks", "--nll-coef", 0.1), ranks=2)
    for name in ("micro", "ranks"):
        assert_same_steps(tmp_path / name, critic[0])


# --- the reference, which reads c or the dialogue alone

@pytest.fixture(scope="module")
def blind(workspace, tmp_path_factory):
    """A critic trained with --reference-sees-c no: one step on all pairs, so that its loss is the initial model's."""
    out = tmp_path_factory.mktemp("blind") / "critic"
    call(3, *flags(workspace, out, "--reference-sees-c", "no", "--batch-size", 10_000, "--max-steps", 1,
                   "--held-out-frac", 0, "--nll-coef", 0, "--beta", 0.7))
    return out


def gain(tiny, trajectory, prompt, action):
    """How much likelier c makes an action: log p(a|o, c) - log p(a|o), means over its tokens, by hand."""
    informed = common.critic_prompt(tiny[1], prompt, trajectory["task"])
    logps, blind_logps = (token_logps_after(tiny, text, action) for text in (informed, prompt))
    return (logps - blind_logps).mean().item()


def turn_gains(tiny, trajectory):
    turns = trajectory["dialogue_history"][1::2]
    return [gain(tiny, trajectory, turn["input"], turn["output_ids"]) for turn in turns]


def test_the_first_loss_of_a_blind_critic_is_that_of_the_gains_by_hand(workspace, blind, tiny):
    trajectories = read_trajectories(workspace / "offline.jsonl", 36)
    pairs = common.trajectory_pairs(trajectories, "offline.jsonl")
    scores = {i: sum(turn_gains(tiny, trajectories[i])) for i in {i for pair in pairs for i in pair}}
    margins = [0.7 * (scores[chosen] - scores[rejected]) for chosen, rejected in pairs]
    losses = [math.log1p(math.exp(-margin)) for margin in margins]
    [step] = read(blind / "metrics.jsonl")
    assert step["loss"] == pytest.approx(sum(losses) / len(losses), abs=2e-5)
    assert abs(step["loss"] - math.log(2)) > 0.01                   # with an informed reference it is log 2
    assert step["margin"] == pytest.approx(sum(margins) / len(margins), abs=2e-4)


def test_a_critic_s_folder_says_what_its_reference_reads_and_a_flag_has_it_otherwise(blind, critic, tmp_path, capsys):
    """But for a critic with a head, which has no reference."""
    for folder, sees_c in ((blind, False), (critic[0], True)):
        assert json.loads((folder / "critic.json").read_text())["reference_sees_c"] is sees_c
        found = [common.read_critic(folder, backend, flag).reference_sees_c for flag in (None, True, False)]
        assert found == [sees_c, True, False]
    folder = shutil.copytree(BASE, tmp_path / "value")
    (folder / "critic.json").write_text(json.dumps(critic_note("value")))
    assert common.read_critic(folder, backend, False).reference_sees_c
    assert "--reference-sees-c no has no effect" in capsys.readouterr().out


def test_a_critic_is_refused_where_its_prompt_is_made_otherwise(workspace, critic, tmp_path, tiny, monkeypatch):
    """By 02, 04 and 05; a critic of an older version, whose folder does not say how, is taken."""
    stages = {2: ["--tasks", workspace / "tasks.jsonl", "--agent", BASE, "--best-of", 2],
              4: ["--method", "sweet", "--trajectories", workspace / "offline.jsonl", "--model", BASE],
              5: [f"a={workspace / 'offline.jsonl'}"]}
    sentence = "They need this {noun}.\n{c}\n"
    line = f"{critic[0]}: was trained with another SOLUTION_TEXT of its domain; "
    assert common.read_critic(critic[0], backend)
    with monkeypatch.context() as patch:
        patch.setattr(Domain, "SOLUTION_TEXT", sentence)
        for number, words in stages.items():
            assert refused(number, *words, "--critic", critic[0], "--out", tmp_path / "out").startswith(line)
        assert not (tmp_path / "out").exists()
        shutil.copytree(critic[0], tmp_path / "old")
        note = json.loads((tmp_path / "old" / "critic.json").read_text())
        del note["solution_text"]
        (tmp_path / "old" / "critic.json").write_text(json.dumps(note))
        assert common.read_critic(tmp_path / "old", backend)


def test_scores_with_a_blind_reference(workspace, critic, tiny):
    """An untrained critic's is the gain by hand, of actions and of turns; a trained one's is eq. 3 as printed plus the
    gain."""
    trajectories, states = read(workspace / "offline.jsonl")[:3], []
    for trajectory in trajectories:
        first, *_, last = trajectory["dialogue_history"][1::2]
        actions = [first["output_ids"], [7, 8], last["output_ids"]]
        states.append(common.State(first["input"], trajectory["task"], [], actions, []))
    untrained = load_untrained()
    gains = untrained.score_actions(states)
    turn_scores = untrained.score_turns(trajectories)
    for trajectory, state, state_gains, advantages in zip(trajectories, states, gains, turn_scores):
        expected = [gain(tiny, trajectory, state.prompt, action) for action in state.actions]
        assert state_gains == pytest.approx(expected, abs=1e-4) and max(map(abs, state_gains)) > 0.01
        assert advantages == pytest.approx(turn_gains(tiny, trajectory), abs=1e-4)
    printed, released = (
        load_critic(critic[0], reference_sees_c=sees_c).score_actions(states) for sees_c in (True, False))
    for printed_scores, released_scores, state_gains in zip(printed, released, gains):
        assert released_scores == pytest.approx([a + b for a, b in zip(printed_scores, state_gains)], abs=1e-4)
        assert released_scores != pytest.approx(printed_scores, abs=1e-3)
