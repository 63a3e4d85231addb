"""02_rollout.py: the protocol, resume after a kill, ranks, both simulators, bad input."""
import argparse
import asyncio
import copy
import json
import os
import signal
import time

import pytest

import common
from colbench import backend
from colbench.dialogue import is_forced, UNCLEAR
from conftest import begin, Partial, rank_environments, read, refused, stage, succeed, wait
from lib.engine import Engine
from lib.models import load_tokenizer, stop_ids
from lib.runtime import write_jsonl
from lib.sampling import Sampler
from lib.servers import Reply

rollout = stage(2)


def flags(workspace, out, *more):
    return ["--tasks", workspace / "tasks.jsonl", "--agent", workspace / "model", "--max-rounds", 4,
            "--max-new-tokens", 24, "--concurrency", 8, "--out", out, *more]


def test_trajectories_follow_the_protocol(workspace):
    rows = read(workspace / "offline.jsonl")
    assert [(r["task_id"], r["sample"]) for r in rows] == [(t["task_id"], s) for t in read(workspace / "tasks.jsonl")
                                                          for s in range(3)]
    for row in rows:
        history = row["dialogue_history"]
        assert [turn["role"] for turn in history] == ["user", "assistant"] * row["num_rounds"]
        assert history[0]["content"] == row["task"]["problem_description"]
        agent = history[1::2]
        assert all(backend.MARKER not in turn["content"] for turn in agent[:-1])
        assert backend.MARKER in agent[-1]["content"] or row["num_rounds"] == row["max_rounds"] == 8
        after = agent[-1]["content"].partition(backend.MARKER)[2].strip("\n")
        assert row["answer"] == (after if after.strip() else agent[-1]["content"])
        assert row["reward"] == sum(row["tests"]) / 10
    assert {row["reward"] == 1 for row in rows} == {True, False}


def test_an_agents_turn_keeps_prompt_text_and_ids(workspace, tiny):
    _, tokenizer = tiny
    for row in read(workspace / "offline.jsonl")[:10]:
        for index, turn in enumerate(row["dialogue_history"]):
            if turn["role"] == "assistant":
                assert turn["input"] == common.prompt_text(tokenizer, row, row["dialogue_history"][:index])
                assert tokenizer.decode(turn["output_ids"], skip_special_tokens=True) == turn["output"]
                assert turn["content"] == turn["output"].strip()


def test_c_never_reaches_a_policy_prompt(workspace):
    """Not a line of the reference but its signature, which is in the request (a server's agent: test_servers)."""
    prompts = 0
    for row in read(workspace / "offline.jsonl"):
        lines = [line.strip() for line in row["task"]["ground_truth"].split("\n")[1:]]
        for turn in row["dialogue_history"]:
            if turn["role"] == "assistant":
                prompts += 1
                assert not any(line in turn["input"].split(backend.MARKER)[0] for line in lines)
    assert prompts > 200


def parsed(*more):
    return rollout.parse_args(["--tasks", "t", "--agent", "a", "--out", "o", *map(str, more)])


def players(**samplers):
    return rollout.Players(backend.Environment(), "cpu", **samplers)


class Says(Sampler):
    """A sampler whose replies have the texts that `say(chat, n)` gives."""

    def __init__(self, say, prompt=None):
        super().__init__()
        self.say, self.prompt = say, prompt

    async def sample(self, chat, n, *_):
        return [Reply(text, True, [number], 0, 0, self.prompt) for number, text in enumerate(self.say(chat, n))]


def local(model, tokenizer, **more):
    return Sampler(model, tokenizer, Engine(model, stop_ids(model, tokenizer), 64, 10 ** 5), **more)


def first_dialogue(task):
    [dialogue] = rollout.new_dialogues([task], None, 1)
    return dialogue


TASK = {"problem_description": "?", "ground_truth": "def secret(): pass", "test_cases": {}}


def test_long_replies_are_cut_and_the_last_turn_is_the_answer():
    dialogue = first_dialogue(TASK)
    both = players(agent=Says(lambda *_: ["hm?"]), simulator=Says(lambda *_: ["y" * 500]))
    args = parsed("--max-rounds", 3, "--simulator-max-new-tokens", 9)
    asyncio.run(rollout.roll_out(dialogue, both, args))
    assert [turn["content"] for turn in dialogue.history] == ["?", "hm?", "y" * 400, "hm?", "y" * 400, "hm?"]
    assert dialogue.answer == "hm?" and "y" * 500 == dialogue.history[2]["output"]


@pytest.mark.parametrize("content, answer", [
    ("I WANT TO ANSWER:\ndef f(): return 1\n", "def f(): return 1"),
    ("Good.\nI WANT TO ANSWER: def f(): return 1", " def f(): return 1"),
    ("def f(): return 1\nI WANT TO ANSWER:", "def f(): return 1\nI WANT TO ANSWER:"),             # nothing follows
    ("def f(): return 1\nI WANT TO ANSWER: \n\n", "def f(): return 1\nI WANT TO ANSWER: \n\n"),
    ("def f():\n    # I WANT TO ANSWER: so\n    return 1", "def f():\n    # I WANT TO ANSWER: so\n    return 1"),
    ("import math\n#I WANT TO ANSWER:\ndef f(): return 1", "import math\n#I WANT TO ANSWER:\ndef f(): return 1"),
    ("# My plan\nI WANT TO ANSWER:\ndef f(): return 1", "def f(): return 1"),                # a heading, no comment
    ("Issue #1: I WANT TO ANSWER:\ndef f(): return 1", "def f(): return 1"),
    ("I WANT TO ANSWER:\ndef f(): return 'I WANT TO ANSWER:'", "def f(): return 'I WANT TO ANSWER:'"),
    ("def f(): return 1\nI WANT TO ANSWER: this.", "def f(): return 1\nI WANT TO ANSWER: this."),          # a remark
    ("def g(): return 1\nI WANT TO ANSWER:\nf = lambda: g()", "f = lambda: g()"),
    ("I WANT TO ANSWER:", "I WANT TO ANSWER:")])
@pytest.mark.parametrize("is_last", [False, True])
def test_an_answer_follows_the_marker_or_is_the_whole_turn(content, answer, is_last):
    history = [{"role": "user", "content": "?"}, {"role": "assistant", "content": content}]
    assert backend.answer_of(history, is_last) == answer


def test_a_turn_without_the_marker_is_an_answer_in_the_last_round_alone():
    history = [{"role": "user", "content": "I WANT TO ANSWER: x"}, {"role": "assistant", "content": "hm?"}]
    assert backend.answer_of(history, False) is None and backend.answer_of(history, True) == "hm?"


def test_the_rule_based_human_knows_what_it_is_asked(workspace):
    import random
    task = read(workspace / "tasks.jsonl")[0]
    for fact in task["facts"]:
        history = [{"role": "user", "content": ""}, {"role": "assistant", "content": fact["questions"][0]}]
        assert asyncio.run(backend.Environment().rule_reply(task, history, random.Random(0))) in fact["replies"]
    history[-1]["content"] = "Hello!"
    assert asyncio.run(backend.Environment().rule_reply(task, history, random.Random(0))) in UNCLEAR


def test_same_seed_same_file_and_another_seed_another(workspace, tmp_path):
    write_jsonl(tmp_path / "tasks", read(workspace / "tasks.jsonl")[:6])
    few = ["--tasks", tmp_path / "tasks"]
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        succeed("02_rollout.py", *flags(workspace, tmp_path / name, *few, "--seed", seed))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes() != (tmp_path / "c").read_bytes()
    assert "done already" in succeed("02_rollout.py", *flags(workspace, tmp_path / "a", *few, "--seed", 0))


def assert_same(path, other):
    """The same dialogues, in order. The batches differ, so that a token may differ where a random number falls on the
    border of two: once in a great many for a model that is sure of what it says."""
    rows, others = read(path), read(other)
    assert [(row["task_id"], row["sample"]) for row in rows] == [(row["task_id"], row["sample"]) for row in others]
    assert sum(row == other for row, other in zip(rows, others)) >= 0.97 * len(rows)


def test_killed_and_resumed_equals_uninterrupted(workspace, tmp_path):
    """Killed on one rank and on two, the last line cut in half by hand; what was finished is not played again."""
    small = ["--tasks", workspace / "tasks.jsonl", "--agent", "models/tiny", "--max-rounds", 5, "--samples", 2, "--out"]
    succeed("02_rollout.py", *small, tmp_path / "whole", "--concurrency", 20)
    for ranks in (1, 2):
        partial = Partial(tmp_path / "killed", 0, ranks)
        pids = [begin("02_rollout.py", *small, tmp_path / "killed", "--concurrency", 4, folder=tmp_path, rank=rank,
                      environment=environment)
                for rank, environment in enumerate(rank_environments(ranks) if ranks > 1 else [{}])]
        deadline = time.time() + 60
        while not (partial.exists() and partial.stat().st_size) and time.time() < deadline:
            time.sleep(0.01)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        assert {wait(pid) for pid in pids} == {-signal.SIGKILL}
        assert partial.exists() and not (tmp_path / "killed").exists()
    with open(partial, "a") as file:
        file.write('7 {"task_id": "cut')
    lines = [line for path in tmp_path.glob("killed.*of*.partial") for line in path.read_text().split("\n")[:-1]]
    rows = {int(line.split(" ")[0]): json.loads(line.split(" ", 1)[1]) for line in lines}
    assert 1 < len(rows) == len(lines) < 48
    printed = succeed("02_rollout.py", *small, tmp_path / "killed", "--concurrency", 9)        # it is no other command
    assert f"{len(rows)} of 48 dialogues are there already" in printed
    assert_same(tmp_path / "killed", tmp_path / "whole")
    whole = read(tmp_path / "killed")
    assert all(whole[number] == row for number, row in rows.items())
    assert not list(tmp_path.glob("killed*partial"))


def test_best_of_n_sends_what_the_critic_prefers(workspace, tiny, monkeypatch):
    """With a critic that prefers long messages, the messages get longer with N; candidates are nested in N."""
    agent, seen = players(agent=local(*tiny)), {}

    async def longest(dialogue, replies, *_):
        seen[dialogue.task["task_id"]] = [reply.ids for reply in replies]
        return max(range(4), key=lambda i: len(replies[i].ids))
    monkeypatch.setattr(rollout, "critic_choice", longest)
    tasks = read(workspace / "tasks.jsonl")[:6]

    async def turns(args):
        return await asyncio.gather(*(rollout.agent_turn(first_dialogue(task), agent, args) for task in tasks))
    best = asyncio.run(turns(parsed("--best-of", 4, "--critic", "c", "--max-new-tokens", 40)))
    names = [task["task_id"] for task in tasks]
    assert [len(turn["output_ids"]) for turn in best] == [max(map(len, seen[name])) for name in names]
    plain = asyncio.run(turns(parsed("--max-new-tokens", 40)))
    assert [turn["output_ids"] for turn in plain] == [seen[name][0] for name in names]
    assert [len(own) for own in seen.values()] == [4] * 6


def test_template_arguments_and_thoughts_that_the_prompt_opens(workspace, tiny):
    tokenizer = copy.deepcopy(tiny[1])
    tokenizer.chat_template += "{% if enable_thinking %}<think>{% endif %}"
    for thinking in (False, True):
        agent = players(agent=local(tiny[0], tokenizer, template_args={"enable_thinking": thinking}))
        dialogue = first_dialogue(read(workspace / "tasks.jsonl")[0])
        turn = asyncio.run(rollout.agent_turn(dialogue, agent, parsed("--max-new-tokens", 20)))
        assert turn["input"].endswith("<think>") == thinking and turn["output"]
        assert turn["content"] == ("" if thinking else turn["output"].strip())


def test_a_system_prompt_of_a_file_replaces_ours(workspace, tmp_path, capsys):
    """Literal, braces too, kept in the rows, so that 03 and 04 render it again; another than in training is said."""
    import shutil
    shutil.copytree("models/tiny", tmp_path / "agent")
    template = tmp_path / "agent" / "chat_template.jinja"
    template.write_text(template.read_text().replace("message.role != 'system'", "true"))  # shows it
    (tmp_path / "agent" / "agent.json").write_text(json.dumps({"system_prompt": "Ask {x} {max_rounds}."}))
    (tmp_path / "mine.txt").write_text("Ask {x} {max_rounds}.\n")
    (tmp_path / "tasks").write_text("".join((workspace / "tasks.jsonl").read_text().splitlines(True)[:2]))
    flags = ["--tasks", tmp_path / "tasks", "--agent", tmp_path / "agent", "--max-rounds", 2, "--max-new-tokens", 5]
    said = f"{tmp_path / 'agent'}: was trained with another system prompt, or other "
    printed = succeed("02_rollout.py", *flags, "--system-prompt", tmp_path / "mine.txt", "--out", tmp_path / "a")
    assert said not in printed
    rows = read(tmp_path / "a")
    for row in rows:
        assert row["system_prompt"] == "Ask {x} {max_rounds}."
        assert all(turn["input"].startswith("<|system|>Ask {x} {max_rounds}.<|end|><|user|>") and
                   "(last round)" not in turn["input"] for turn in row["dialogue_history"][1::2])
    tokenizer = load_tokenizer(str(tmp_path / "agent"))
    again = json.loads(json.dumps(rows[0]))
    for turn in again["dialogue_history"][1::2]:
        del turn["input"], turn["output_ids"]
    again["tokenizer"] = None
    assert [prompt for prompt, _ in common.agent_turns(tokenizer, again)] == [
        turn["input"] for turn in rows[0]["dialogue_history"][1::2]]
    printed = succeed("02_rollout.py", *flags, "--out", tmp_path / "b")
    assert printed.count(said) == 1
    assert all("system_prompt" not in row and "2 rounds" in row["dialogue_history"][1]["input"]
               for row in read(tmp_path / "b"))
    line = refused(2, *flags, "--system-prompt", tmp_path / "none.txt", "--out", tmp_path / "c")
    assert line.startswith(f"{tmp_path / 'none.txt'}: cannot be read as UTF-8 text")
    with pytest.raises(SystemExit):
        rollout.parse_args(["--tasks", "t", "--agent", "script", "--out", "o", "--system-prompt", "f"])


def test_a_template_that_shows_no_system_prompt_has_no_other(workspace, tiny, tmp_path, capsys):
    (tmp_path / "agent.json").write_text(json.dumps({"system_prompt": "Mine"}))
    common.check_prompt(str(tmp_path), tiny[1], "Other", {})
    assert capsys.readouterr().out == ""


def test_best_of_n_with_a_critic_folder(workspace, critic, tmp_path):
    small = ["--tasks", workspace / "tasks.jsonl", "--agent", "models/tiny", "--max-rounds", 3, "--max-new-tokens", 40]
    succeed("02_rollout.py", *small, "--best-of", 3, "--critic", critic, "--out", tmp_path / "a.jsonl")
    rows = read(tmp_path / "a.jsonl")
    assert all((row["best_of"], row["critic"]) == (3, str(critic)) for row in rows)
    line = refused(2, *small, "--best-of", 3, "--critic", workspace / "model", "--out", tmp_path / "b.jsonl")
    assert "no critic.json" in line
    with pytest.raises(SystemExit):
        rollout.parse_args(["--tasks", "t", "--agent", "a", "--out", "o", "--best-of", "2"])


@pytest.mark.parametrize("replies, chosen, counted", [
    ({"ab": "A", "ba": "B"}, 0, "decided"), ({"ab": "B", "ba": "A"}, 1, "decided"), ({"ab": "A", "ba": "A"}, 0, "tie"),
    ({"ab": "A or B", "ba": "B"}, 0, "unreadable"), ({"ab": "", "ba": "B"}, 0, "unreadable")])
def test_the_judge_compares_in_both_orders(replies, chosen, counted):
    def judged(chat, _):
        assert "def secret" in chat[0]["content"]
        return [replies["ab" if chat[0]["content"].index("price") < chat[0]["content"].index("weight") else "ba"]]
    judge = players(judge=Says(judged))
    assert asyncio.run(rollout.judge_choice(first_dialogue(TASK), ["price", "weight"], judge, 0)) == chosen
    assert judge.verdicts == {counted: 1}


def test_the_critic_of_best_of_n_has_passes_of_max_tokens(workspace, critic, tmp_path, monkeypatch):
    limits, score = [], rollout.common.score_actions

    def scored(critic, tokenizer, points, max_tokens, device):
        limits.append(max_tokens)
        return score(critic, tokenizer, points, max_tokens, device)
    monkeypatch.setattr(rollout.common, "score_actions", scored)
    (tmp_path / "task.jsonl").write_text(json.dumps(read(workspace / "tasks.jsonl")[0]) + "\n")
    rollout.main([str(word) for word in (
        "--tasks", tmp_path / "task.jsonl", "--agent", "models/tiny", "--max-rounds", 1, "--max-new-tokens", 20,
        "--best-of", 2, "--critic", critic, "--max-tokens", 1234, "--out", tmp_path / "out.jsonl")])
    assert limits == [1234]


def test_who_picks_one_of_several_messages_is_not_shown_their_thoughts(monkeypatch):
    picked_from = []

    async def second(dialogue, messages, *_):
        picked_from.extend(messages)
        return 1
    monkeypatch.setattr(rollout, "judge_choice", second)
    agent = Says(lambda _, n: [f"plan {number}</think>What {number}?" for number in range(n)], "prompt<think>")
    turn = asyncio.run(rollout.agent_turn(first_dialogue(TASK), players(agent=agent, judge=Sampler()),
                                          parsed("--best-of", 2, "--critic", "judge:x")))
    assert picked_from == ["What 0?", "What 1?"]
    assert (turn["content"], turn["output"], turn["output_ids"]) == ("What 1?", "plan 1</think>What 1?", [1])


def test_two_ranks_write_the_same_file_as_one(workspace, tmp_path):
    tasks = ["--tasks", workspace / "tasks.jsonl"]
    succeed("02_rollout.py", *tasks, "--agent", "script", "--max-rounds", 8, "--out", tmp_path / "script", ranks=2)
    assert (tmp_path / "script").read_bytes() == (workspace / "demos.jsonl").read_bytes()
    for name, ranks in (("one", 1), ("two", 2)):
        succeed("02_rollout.py", *tasks, "--agent", "models/tiny", "--max-rounds", 4, "--out", tmp_path / name,
                ranks=ranks)
    assert_same(tmp_path / "one", tmp_path / "two")


def test_a_model_can_simulate_the_user_and_tasks_need_no_facts(workspace, tmp_path):
    tasks = [{k: task[k] for k in ("problem_description", "ground_truth", "test_cases")}
             for task in read(workspace / "tasks.jsonl")[:4]]
    (tmp_path / "plain.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    succeed("02_rollout.py", "--tasks", tmp_path / "plain.jsonl", "--agent", workspace / "model", "--simulator",
            workspace / "model", "--max-rounds", 3, "--max-new-tokens", 12, "--out", tmp_path / "out.jsonl")
    rows = read(tmp_path / "out.jsonl")
    assert len(rows) == 4 and all(row["simulator"] == str(workspace / "model") for row in rows)
    line = refused(2, "--tasks", tmp_path / "plain.jsonl", "--agent", workspace / "model", "--out", tmp_path / "x")
    assert "plain.jsonl:1" in line and '"facts"' in line


def test_single_turn(workspace, tmp_path):
    succeed("02_rollout.py", *flags(workspace, tmp_path / "s", "--single-turn"))
    assert {row["num_rounds"] for row in read(tmp_path / "s")} == {1}


def test_the_summary_says_how_many_dialogues_ended_without_the_marker(workspace, tmp_path):
    """One of four: the second ends with the marker, for the third no further turn fits, the fourth does both. As
    metrics.json has it under "forced_answers"."""
    rows = read(workspace / "offline.jsonl")[:4]
    for row, last in zip(rows, ("hm?", f"So:\n{backend.MARKER}\nx", "hm?", f"{backend.MARKER}\nx")):
        row["dialogue_history"][-1]["content"] = last
    rows[2]["no_room"] = rows[3]["no_room"] = True
    write_jsonl(tmp_path / "rows", rows)
    assert [is_forced(row) for row in rows] == [True, False, False, False]
    assert backend.measure(rows)["forced_answers"] == 0.25
    line = rollout.summary(tmp_path / "rows")
    assert " | 25.0% ended by --max-rounds | 2 ended because no further turn fits" in line


def test_simulator_prompt_swaps_the_roles():
    task = {"problem_description": "P", "ground_truth": "G"}
    history = [{"role": "user", "content": "P"}, {"role": "assistant", "content": "q"},
               {"role": "user", "content": "r"},
               {"role": "assistant", "content": "q2"}]
    messages = asyncio.run(backend.Environment().simulator_chat(task, history))
    assert [(m["role"], m["content"]) for m in messages[1:]] == [("user", "q"), ("assistant", "r"), ("user", "q2")]
    assert "G" in messages[0]["content"]


@pytest.mark.parametrize("change, message", [
    (dict(tasks="missing.jsonl"), "missing.jsonl: no such file"),
    (dict(tasks="broken.jsonl"), "broken.jsonl:2: not JSON"),
    (dict(tasks="keyless.jsonl"), 'keyless.jsonl:1: missing "ground_truth"'),
    (dict(tasks="empty.jsonl"), "empty.jsonl: no rows in it"),
    (dict(agent="nobody/such-model"), "nobody/such-model: no model of this name"),
    (dict(agent="./nowhere"), "./nowhere: no such folder"),
    (dict(agent="tests"), "tests: no model of this name"),
    (dict(simulator="nobody/such-model"), "nobody/such-model: no model of this name"),
])
def test_bad_input_is_one_line(workspace, tmp_path, change, message):
    good = json.dumps(read(workspace / "tasks.jsonl")[0])
    (tmp_path / "broken.jsonl").write_text(good + "\n{\n")
    (tmp_path / "keyless.jsonl").write_text('{"problem_description": "x"}\n')
    (tmp_path / "empty.jsonl").write_text("")
    options = {"tasks": workspace / "tasks.jsonl", "agent": str(workspace / "model"), "simulator": "rules", **change}
    if "tasks" in change:
        options["tasks"] = tmp_path / change["tasks"]
    assert message in refused(2, *(x for k, v in options.items() for x in (f"--{k}", v)), "--out",
                              tmp_path / "out.jsonl")
    assert not list(tmp_path.glob("out*"))


# ---------------------------------------------------------------------------------------------------------------------
# dialogues that outgrow the model

def test_a_dialogue_that_a_model_has_no_room_for_ends_as_in_its_last_round(workspace, tmp_path, capsys):
    """Another dialogue is as without the limit; a request that alone is too long fails, and the others are played."""
    tasks = read(workspace / "tasks.jsonl")[:6]
    tasks[3]["problem_description"] += " and so on" * 200
    write_jsonl(tmp_path / "tasks", tasks)
    arguments = ["--tasks", tmp_path / "tasks", "--agent", "models/tiny", "--max-rounds", 8, "--max-new-tokens", 60]
    line = refused(2, *arguments, "--max-length", 200, "--out", tmp_path / "out")
    assert "1 of 6 rows are missing" in line and "the 200 that the model or --max-tokens has room for" in line
    write_jsonl(tmp_path / "tasks", tasks[:3] + tasks[4:])
    rollout.main([str(x) for x in (*arguments, "--max-length", 200, "--out", tmp_path / "short")])
    printed = capsys.readouterr().out
    rollout.main([str(x) for x in (*arguments, "--out", tmp_path / "long")])
    ended = 0
    for short, long in zip(read(tmp_path / "short"), read(tmp_path / "long")):
        history = short["dialogue_history"]
        assert history == long["dialogue_history"][:len(history)] and history[-1]["role"] == "assistant"
        assert short["num_rounds"] == len(history) // 2
        if "no_room" in short:
            ended += 1
            assert len(history) < len(long["dialogue_history"]) and short["answer"] == history[-1]["content"]
            assert short["reward"] == 0
    assert 0 < ended < 5
    assert f"{ended} ended because no further turn fits" in printed and "no further turn" not in capsys.readouterr().out


def test_dialogues_of_one_task_id_are_numbered_through():
    tasks = [{"task_id": name, "problem_description": "f", "ground_truth": "c"} for name in "aba"]
    dialogues = rollout.new_dialogues(tasks, None, 2)
    assert [(dialogue.task["task_id"], dialogue.sample) for dialogue in dialogues] == [
        ("a", 0), ("a", 1), ("b", 0), ("b", 1), ("a", 2), ("a", 3)]


def test_a_branch_keeps_which_turns_are_of_the_environment():
    turns = [{"role": "user", "content": "Do it."}, {"role": "assistant", "content": "LOOK", "output_ids": [1]},
             {"role": "user", "content": "3 rows", "tool": True}, {"role": "assistant", "content": "done"}]
    task = {"problem_description": "Do it.", "ground_truth": "c"}
    trajectory = {"task": task, "task_id": "row's", "sample": 2, "dialogue_history": turns}
    branched = rollout.branched_dialogue(7, trajectory, 3, 1, 0)
    assert branched.history == [turns[0], {"role": "assistant", "content": "LOOK"}, turns[2]]
    assert branched.branch == {"branch": {"sample": 2, "turn": 3, "candidate": 1}, "continuation": 0}
    assert (branched.sample, branched.random_name) == (7, "2/3/1")
    assert branched.task["task_id"] == "row's"                       # which tells the candidates of two tasks apart


def test_a_candidate_of_a_branch_is_one_message_after_a_kill(workspace):
    """A server would say something else each time."""
    trajectories = common.read_trajectories(workspace / "offline.jsonl")[:3]
    args = argparse.Namespace(seed=0, branch=2, branch_candidates=3, samples=4, max_rounds=8, tasks="t")
    dialogues = rollout.branched_dialogues(trajectories, None, args)
    names = [(dialogue.task["task_id"], dialogue.random_name) for dialogue in dialogues]
    assert names[::4] == names[1::4] == names[3::4] and len(set(names)) == 6     # a group of continuations each
    dialogue = dialogues[5]
    branch = dialogue.branch["branch"]
    said = {"role": "assistant", "content": "said before the kill"}
    both = players()
    both.first_turns[dialogue.task["task_id"], rollout.branch_name(branch)] = said
    asyncio.run(rollout.add_first_turn(dialogue, both, args))
    assert dialogue.history[-1] == said and len(dialogue.history) == branch["turn"] + 1


def test_a_tool_is_no_simulator_whose_replies_could_leak(workspace, tmp_path):
    row = read(workspace / "offline.jsonl")[0]
    signature = row["task"]["ground_truth"].split("\n")[0]
    turns = [{"role": "user", "content": "Do it."}]
    for reply in ({"content": "3 rows", "tool": True}, {"content": signature, "tool": True},
                  {"content": signature, "leak": "signature"}):
        turns += [{"role": "assistant", "content": "?"}, {"role": "user", **reply}]
    row["dialogue_history"] = [*turns, {"role": "assistant", "content": "pass"}]
    write_jsonl(tmp_path / "rows", [row])
    assert "100.0% of the simulator's replies leak code (1 signature)" in rollout.summary(tmp_path / "rows")
    assert stage(5).measure_leaks([row], backend) == {"leaks": 1.0, "leaks_by_kind": {"signature": 1}}
