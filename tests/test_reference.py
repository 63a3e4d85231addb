"""--reference-sees-c yes|no: the reference of eq. 3 reads c, too, or the dialogue alone; critics without training."""
import json
import math

import pytest

import common
from colbench import backend
from compare import token_logps_after
from conftest import BASE, call, critic_note, policy_flags, read, succeed, write
from lib.data import read_trajectories


@pytest.fixture(scope="module")
def few(workspace, tmp_path_factory):
    """A file with the dialogues of three tasks, all of which make pairs."""
    rows = read(workspace / "offline.jsonl")
    won, lost = ({row["task_id"] for row in rows if (row["reward"] == 1) == outcome} for outcome in (True, False))
    mixed = sorted(won & lost)[:3]
    return write(tmp_path_factory.mktemp("few") / "few.jsonl", [row for row in rows if row["task_id"] in mixed])


@pytest.fixture(scope="module")
def blind(few):
    """A critic trained with --reference-sees-c no: one step on all pairs, so that its loss is the initial model's."""
    out = few.parent / "critic"
    call(3, "--trajectories", few, "--model", BASE, "--lr", 1e-3, "--reference-sees-c", "no", "--batch-size", 10_000,
         "--epochs", 1, "--held-out-frac", 0, "--nll-coef", 0, "--beta", 0.7, "--out", out)
    return out


@pytest.fixture(scope="module")
def untrained():
    return common.load_critic(common.Critic(str(BASE), str(BASE), ref_sees_c=False), common.load_whole("cpu"))


def gain(tiny, trajectory, prompt, action):
    """How much likelier c makes an action: log p(a|o, c) - log p(a|o), means over its tokens, by hand."""
    informed = common.critic_prompt(tiny[1], prompt, trajectory["task"])
    logps, blind_logps = (token_logps_after(tiny, text, action) for text in (informed, prompt))
    return (logps - blind_logps).mean().item()


def turn_gains(tiny, trajectory):
    turns = trajectory["dialogue_history"][1::2]
    return [gain(tiny, trajectory, turn["input"], turn["output_ids"]) for turn in turns]


def test_the_first_loss_of_a_blind_critic_is_that_of_the_gains_by_hand(few, blind, tiny):
    trajectories = read_trajectories(few)
    pairs = common.trajectory_pairs(trajectories, "few.jsonl")
    scores = {i: sum(turn_gains(tiny, trajectories[i])) for i in {i for pair in pairs for i in pair}}
    margins = [0.7 * (scores[chosen] - scores[rejected]) for chosen, rejected in pairs]
    losses = [math.log1p(math.exp(-margin)) for margin in margins]
    [step] = read(blind / "metrics.jsonl")
    assert step["loss"] == pytest.approx(sum(losses) / len(losses), abs=2e-5)
    assert abs(step["loss"] - math.log(2)) > 0.01                   # with an informed reference it is log 2
    assert step["margin"] == pytest.approx(sum(margins) / len(margins), abs=2e-4)


@pytest.mark.parametrize("name, sees_c", [("blind", False), ("critic", True)])
def test_a_critic_s_folder_says_what_its_reference_reads_and_a_flag_has_it_otherwise(request, name, sees_c, tiny):
    folder = request.getfixturevalue(name)
    assert json.loads((folder / "critic.json").read_text())["reference_sees_c"] is sees_c
    assert common.read_critic(folder, tiny[1], backend).ref_sees_c is sees_c
    assert common.read_critic(folder, tiny[1], backend, True).ref_sees_c


def test_scores_with_a_blind_reference(few, critic, tiny, untrained):
    """An untrained critic's is the gain by hand, of actions and of turns; a trained one's is eq. 3 as printed plus the
    gain."""
    tokenizer, trajectories = tiny[1], read_trajectories(few)[:3]
    points = []
    for trajectory in trajectories:
        first, *_, last = trajectory["dialogue_history"][1::2]
        actions = [first["output_ids"], [7, 8], last["output_ids"]]
        points.append(common.DecisionPoint(first["input"], trajectory["task"], [], actions, []))
    gains = common.score_actions(untrained, tokenizer, points, 4096, "cpu")
    for trajectory, point, point_gains in zip(trajectories, points, gains):
        expected = [gain(tiny, trajectory, point.prompt, action) for action in point.actions]
        assert point_gains == pytest.approx(expected, abs=1e-4) and max(map(abs, point_gains)) > 0.01
    scored = common.score_turns(untrained, tokenizer, trajectories, 4096, "cpu")
    for trajectory, advantages in zip(trajectories, scored):
        assert advantages == pytest.approx(turn_gains(tiny, trajectory), abs=1e-4)
    scores = {}
    for reference in (True, False):
        loaded = common.load_critic(common.read_critic(critic, tokenizer, backend, reference), common.load_whole("cpu"))
        scores[reference] = common.score_actions(loaded, tokenizer, points, 4096, "cpu")
    for printed, released, point_gains in zip(scores[True], scores[False], gains):
        assert released == pytest.approx([a + b for a, b in zip(printed, point_gains)], abs=1e-4)
        assert released != pytest.approx(printed, abs=1e-3)


def test_ranks_rank_alike(few, tmp_path, critic):
    """Both ranks score every block together, with a blind reference (with an informed one: test_lora.py)."""
    flags = policy_flags(few.parent, "sweet", tmp_path / "one", "--critic", critic, "--reference-sees-c", "no",
                         "--data-frac", 0.05, "--num-candidates", 4, "--max-new-tokens", 30, "--max-steps", 1,
                         "--trajectories", few)
    call(4, *flags)
    succeed("04_train_policy.py", *flags, "--out", tmp_path / "two", ranks=2)
    for one, two in zip(*(read(tmp_path / name / "scored.jsonl") for name in ("one", "two")), strict=True):
        assert one["candidates"] == two["candidates"]
        assert one["advantages"] == pytest.approx(two["advantages"], abs=1e-5)


def test_02_picks_by_an_untrained_critic(workspace, tmp_path):
    tasks = write(tmp_path / "tasks.jsonl", read(workspace / "tasks.jsonl")[:1])
    printed = call(2, "--tasks", tasks, "--agent", BASE, "--max-rounds", 1, "--max-new-tokens", 60, "--best-of", 2,
                   "--critic", "untrained", "--reference-sees-c", "no", "--out", tmp_path / "best.jsonl")
    assert "scores are log p_ref(a|o, c) - log p_ref(a|o), a mean over the tokens of a" in printed


def test_a_critic_with_a_head_has_no_reference_that_could_not_see_c(tmp_path, capsys):
    (tmp_path / "critic.json").write_text(json.dumps(critic_note("value")))
    assert common.read_critic(tmp_path, None, backend, False).ref_sees_c
    assert "--reference-sees-c no does nothing" in capsys.readouterr().out
