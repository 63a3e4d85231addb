"""02_rollout.py: the protocol, resume after a kill, ranks, both simulators, bad input."""
import asyncio
import copy
import json
import random
import re
import shutil
import signal
import time

import pytest

from colbench import backend
from colbench.dialogue import UNCLEAR
from conftest import BASE, begin, call, killed, Partial, read, refused, stage, succeed, turns, write
from lib import statistics
from lib.data import read_trajectories
from lib.engine import Engine
from lib.flags import pick
from lib.load import load_tokenizer
from lib.sampling import Sampler
from lib.servers import Reply, ReplyError
from lib.tokens import agent_turns, prompt_text, stop_ids

rollout = stage(2)


def test_trajectories_follow_the_protocol(workspace, tiny):
    """Prompts hold no line of c but its signature, which is in the request (a server's agent: test_servers)."""
    rows = read(workspace / "offline.jsonl")
    assert [(r["task_id"], r["sample"]) for r in rows] == [(t["task_id"], s) for t in read(workspace / "tasks.jsonl")
                                                          for s in range(3)]
    for row in rows:
        history, secret = row["dialogue_history"], row["task"]["ground_truth"].split("\n")[1:]
        assert [turn["role"] for turn in history] == ["user", "assistant"] * row["num_rounds"]
        assert history[0]["content"] == row["task"]["problem_description"]
        agent = history[1::2]
        assert all(backend.MARKER not in turn["content"] for turn in agent[:-1])
        assert backend.MARKER in agent[-1]["content"] or row["num_rounds"] == row["max_rounds"] == 8
        after = agent[-1]["content"].partition(backend.MARKER)[2].strip("\n")
        assert row["answer"] == (after if after.strip() else agent[-1]["content"])
        assert row["reward"] == sum(row["tests"]) / 10
        for index, turn in enumerate(agent):
            prompt = prompt_text(tiny[1], row, history[:2 * index + 1])
            assert turn["input"] == prompt and turn["content"] == turn["output"].strip()
            assert tiny[1].decode(turn["output_ids"], skip_special_tokens=True) == turn["output"]
            assert not any(line.strip() in prompt.split(backend.MARKER)[0] for line in secret)
    assert {row["reward"] == 1 for row in rows} == {True, False}


def players(*flags, **samplers):
    args = vars(rollout.parse_args(["--tasks", "t", "--agent", "a", "--out", "o", *map(str, flags)]))
    return rollout.Players(pick(rollout.Settings, args), backend.Environment(), **samplers)


def says(say, prompt=None):
    """A sampler whose replies have the texts that `say(chat, n)` gives."""
    async def sample(chat, n, *_):
        return [Reply(text, True, [number], 0, 0, prompt) for number, text in enumerate(say(chat, n))]
    sampler = Sampler()
    sampler.sample = sample
    return sampler


def first_dialogue(task):
    [dialogue] = rollout.new_dialogues([task], None, 1)
    return dialogue


TASK = {"problem_description": "?", "ground_truth": "def secret(): pass", "test_cases": {}}


def test_a_simulator_that_thinks_to_the_end_is_no_silent_one():
    simulator = says(lambda *_: [])

    async def thinks(*_):
        return [Reply("<think>They ask", False, [1], 0, 0, None)]
    simulator.sample = thinks
    both = players("--simulator-max-new-tokens", 9, agent=says(lambda *_: ["hm?"]), simulator=simulator)
    with pytest.raises(ReplyError, match="still thinking at --simulator-max-new-tokens"):
        asyncio.run(rollout.roll_out(first_dialogue(TASK), both))


def test_long_replies_are_cut_leaks_are_noted_and_the_last_turn_is_the_answer():
    dialogue, reply = first_dialogue(TASK), "def secret(): " + "y" * 500
    both = players("--max-rounds", 3, "--simulator-max-new-tokens", 9, agent=says(lambda *_: ["hm?"]),
                   simulator=says(lambda *_: [reply]))
    asyncio.run(rollout.roll_out(dialogue, both))
    assert [turn["content"] for turn in dialogue.history] == ["?", "hm?", reply[:400], "hm?", reply[:400], "hm?"]
    assert dialogue.answer == "hm?" and dialogue.history[2]["output"] == reply
    assert dialogue.history[2]["leak"] == "signature"


@pytest.mark.parametrize("content, answer", [
    ("I WANT TO ANSWER:\ndef f(): return 1\n", "def f(): return 1"),
    ("Good.\nI WANT TO ANSWER: def f(): return 1", " def f(): return 1"),
    ("def f(): return 1\nI WANT TO ANSWER:", "def f(): return 1\nI WANT TO ANSWER:"),             # nothing follows
    ("def f(): return 1\nI WANT TO ANSWER: \n\n", "def f(): return 1\nI WANT TO ANSWER: \n\n"),
    ("def f():\n    # I WANT TO ANSWER: so\n    return 1", "def f():\n    # I WANT TO ANSWER: so\n    return 1"),
    ("import math\n#I WANT TO ANSWER:\ndef f(): return 1", "import math\n#I WANT TO ANSWER:\ndef f(): return 1"),
    ("# My plan\nI WANT TO ANSWER:\ndef f(): return 1", "def f(): return 1"),                # a heading, no comment
    ("My plan ##\nI WANT TO ANSWER:\ndef f(): return 1", "def f(): return 1"),
    ("Issue #1: I WANT TO ANSWER:\ndef f(): return 1", "def f(): return 1"),
    ("I WANT TO ANSWER:\ndef f(): return 'I WANT TO ANSWER:'", "def f(): return 'I WANT TO ANSWER:'"),
    ("def f(): return 1\nI WANT TO ANSWER: this.", "def f(): return 1\nI WANT TO ANSWER: this."),          # a remark
    ("def g(): return 1\nI WANT TO ANSWER:\nf = lambda: g()", "f = lambda: g()"),
    ("I WANT TO ANSWER:", "I WANT TO ANSWER:"), ("hm?", "hm?")])
def test_an_answer_follows_the_marker_or_is_the_whole_turn(content, answer):
    """A turn without the marker is an answer in the last round alone."""
    history = turns("I WANT TO ANSWER: x", content)
    assert backend.answer_of(history, True) == answer
    assert backend.answer_of(history, False) == (answer if backend.MARKER in content else None)


def test_a_long_row_of_signs_before_the_marker_takes_no_time():
    begin_s = time.process_time()
    assert backend.answer_of(turns("?", f"{'#' * 30_000}a I WANT TO ANSWER: 1"), False) == " 1"
    assert time.process_time() - begin_s < 1


def test_the_rule_based_human_knows_what_it_is_asked_and_a_model_s_prompt_swaps_the_roles(workspace):
    task, human = read(workspace / "tasks.jsonl")[0], backend.Environment()

    def reply_to(question):
        return asyncio.run(human.rule_reply(task, turns("", question), random.Random(0)))
    assert all(reply_to(fact["questions"][0]) in fact["replies"] for fact in task["facts"])
    assert reply_to("Hello!") in UNCLEAR
    first, second, third = ([fact["replies"], fact["questions"][0]] for fact in task["facts"][:3])
    replies = reply_to(f"{first[1]} {second[1]} {third[1]}")         # of at most two facts
    assert replies in [f"{one} {two}" for one in first[0] for two in second[0]]
    messages = asyncio.run(human.simulator_chat(task, turns("P", "q", "r", "q2")))
    assert [(m["role"], m["content"]) for m in messages[1:]] == [("user", "q"), ("assistant", "r"), ("user", "q2")]
    assert task["ground_truth"] in messages[0]["content"]


def test_same_seed_same_file_and_another_seed_another(workspace, tmp_path):
    """Simulated by a model, for which tasks need no facts."""
    keys = "problem_description", "ground_truth", "test_cases"
    task = {key: read(workspace / "tasks.jsonl")[0][key] for key in keys}
    words = ["--tasks", write(tmp_path / "tasks", [task]), "--agent", BASE, "--simulator", BASE, "--max-rounds", 2,
             "--max-new-tokens", 12]
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        call(2, *words, "--seed", seed, "--out", tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes() != (tmp_path / "c").read_bytes()
    assert "done already" in call(2, *words, "--seed", 0, "--out", tmp_path / "a")
    assert [row["simulator"] for row in read(tmp_path / "a")] == [str(BASE)]
    assert ':1: missing "facts"' in refused(2, *words, "--simulator", "rules", "--out", tmp_path / "d")


def test_killed_on_one_rank_and_resumed_on_two_equals_uninterrupted_on_one(workspace, tmp_path):
    """The last line is cut in half by hand; what was finished is not played again. The batches differ, so that a token
    may differ where a random number falls on the border of two: once in a great many for a model that is sure."""
    tasks = write(tmp_path / "tasks", read(workspace / "tasks.jsonl")[:12])
    words = ["--tasks", tasks, "--agent", BASE, "--max-rounds", 3, "--samples", 2, "--max-new-tokens", 60, "--out"]
    call(2, *words, tmp_path / "whole", "--concurrency", 20)
    out, partial = tmp_path / "killed", Partial(tmp_path / "killed")
    process = begin("02_rollout.py", *words, out, "--concurrency", 4, folder=tmp_path)
    while not (partial.exists() and b"\n" in partial.read_bytes()):
        time.sleep(0.01)
    assert killed(process) == -signal.SIGKILL and not out.exists()
    lines = partial.read_text().split("\n")[:-1]
    assert 0 < len(lines) < 24
    partial.write_text("\n".join([*lines, '7 {"task_id": "cut']))
    printed = succeed("02_rollout.py", *words, out, "--concurrency", 9, ranks=2)           # it is no other command
    assert f"{len(lines)} of 24 dialogues are there already" in printed and not list(tmp_path.glob("killed.partial*"))
    rows, whole = read(out), read(tmp_path / "whole")
    assert all(rows[int(number)] == json.loads(row) for number, row in (line.split(" ", 1) for line in lines))
    assert [(row["task_id"], row["sample"]) for row in rows] == [(row["task_id"], row["sample"]) for row in whole]
    assert sum(row == other for row, other in zip(rows, whole)) >= 23


def test_best_of_n_sends_what_the_critic_prefers(workspace, tiny, monkeypatch):
    """With a critic that prefers long messages, the messages get longer with N; candidates are nested in N."""
    engine = Engine(tiny[0], stop_ids(*tiny), 64, 10 ** 5)
    tasks, seen = read(workspace / "tasks.jsonl")[:6], {}

    async def longest(dialogue, replies, *_):
        seen[dialogue.task["task_id"]] = [reply.ids for reply in replies]
        return max(range(4), key=lambda i: len(replies[i].ids))
    monkeypatch.setattr(rollout, "critic_choice", longest)

    async def next_turns(*flags):
        agent = players("--max-new-tokens", 40, *flags, agent=Sampler(*tiny, engine))
        return await asyncio.gather(*(rollout.agent_turn(first_dialogue(task), agent) for task in tasks))
    best = asyncio.run(next_turns("--best-of", 4, "--critic", "c"))
    names = [task["task_id"] for task in tasks]
    assert [len(turn["output_ids"]) for turn in best] == [max(map(len, seen[name])) for name in names]
    plain = asyncio.run(next_turns())
    assert [turn["output_ids"] for turn in plain] == [seen[name][0] for name in names]
    assert [len(own) for own in seen.values()] == [4] * 6


def test_template_arguments_reach_the_prompt(tiny):
    tokenizer = copy.deepcopy(tiny[1])
    tokenizer.chat_template += "{% if enable_thinking %}<think>{% endif %}"
    for thinking in (False, True):
        sampler = Sampler(tokenizer=tokenizer, template_args={"enable_thinking": thinking})
        assert sampler.render(turns("?")).endswith("<think>") == thinking


def test_a_system_prompt_of_a_file_replaces_ours(workspace, tmp_path):
    """Literal, braces too, kept in the rows, so that 03 and 04 render it again; another than in training is said."""
    shutil.copytree(BASE, tmp_path / "agent")
    template = tmp_path / "agent" / "chat_template.jinja"
    template.write_text(template.read_text().replace("message.role != 'system'", "true"))  # shows it
    (tmp_path / "agent" / "agent.json").write_text(json.dumps({"system_prompt": "Ask {x} {max_rounds}."}))
    (tmp_path / "mine.txt").write_text("Ask {x} {max_rounds}.\n")
    words = ["--tasks", write(tmp_path / "tasks", read(workspace / "tasks.jsonl")[:2]), "--agent", tmp_path / "agent",
             "--max-rounds", 2, "--max-new-tokens", 5, "--out"]
    said = f"{tmp_path / 'agent'}: was trained with another system prompt, or other "
    assert said not in call(2, *words, tmp_path / "a", "--system-prompt", tmp_path / "mine.txt")
    tokenizer = load_tokenizer(str(tmp_path / "agent"))
    for row in read(tmp_path / "a"):
        contents, prompts = zip(*((turn["content"], turn.get("input")) for turn in row["dialogue_history"]))
        assert row["system_prompt"] == "Ask {x} {max_rounds}."
        for prompt in prompts[1::2]:
            assert prompt.startswith("<|system|>Ask {x} {max_rounds}.<|end|><|user|>") and "(last round)" not in prompt
        plain = {**row, "tokenizer": None, "dialogue_history": turns(*contents)}
        assert tuple(prompt for prompt, _ in agent_turns(tokenizer, plain)) == prompts[1::2]
    assert call(2, *words, tmp_path / "b").count(said) == 1
    assert all("system_prompt" not in row and "2 rounds" in row["dialogue_history"][1]["input"]
               for row in read(tmp_path / "b"))


@pytest.mark.parametrize("replies, chosen, counted", [
    ("AB", 0, "decided"), ("BA", 1, "decided"), ("AA", 0, "tie"), (["A or B", "B"], 0, "unreadable"),
    (["", "B"], 0, "unreadable")])
def test_the_judge_compares_in_both_orders_and_is_not_shown_thoughts(replies, chosen, counted):
    def judged(chat, _):
        text = chat[0]["content"]
        assert "def secret" in text and not re.search("plan [01]", text)
        return [replies[text.index("What 0?") > text.index("What 1?")]]
    agent = says(lambda _, n: [f"plan {number}</think>What {number}?" for number in range(n)], "prompt<think>")
    both = players("--best-of", 2, "--critic", "judge:x", agent=agent, judge=says(judged))
    turn = asyncio.run(rollout.agent_turn(first_dialogue(TASK), both))
    said = f"plan {chosen}</think>What {chosen}?"
    assert (turn["content"], turn["output"], turn["output_ids"]) == (f"What {chosen}?", said, [chosen])
    assert both.verdicts == {counted: 1}


def test_dialogues_of_one_task_id_are_numbered_through():
    dialogues = rollout.new_dialogues([{**TASK, "task_id": name} for name in "aba"], None, 2)
    assert [(dialogue.task["task_id"], dialogue.sample) for dialogue in dialogues] == [
        ("a", 0), ("a", 1), ("b", 0), ("b", 1), ("a", 2), ("a", 3)]
    assert rollout.random_key(dialogues[4], 7, "agent") == (7, "a", 2, 1, "agent")
    assert players("--single-turn").settings.max_rounds == 1


def test_the_summary_says_how_dialogues_ended_and_the_domain_s_columns(workspace, tmp_path, monkeypatch):
    """One of four lacks the marker: the second ends with it, for the third no further turn fits, the fourth does both.
    A tool is no simulator whose replies could leak."""
    rows = read(workspace / "offline.jsonl")[:4]
    for row, last in zip(rows, ("hm?", f"So:\n{backend.MARKER}\nx", "hm?", f"{backend.MARKER}\nx")):
        row["dialogue_history"][-1]["content"] = last
    rows[2]["no_room"] = rows[3]["no_room"] = True
    assert [statistics.ending_of(row, backend) for row in rows] == [
        "asked in the last round", "answered in the last round", None, None]
    assert statistics.ending_of({**rows[1], "max_rounds": 9}, backend) == "answered"
    assert rows[0]["ending"] == "answered in the last round"         # as 02 wrote it, before this test's messages
    line = rollout.summary(write(tmp_path / "rows", rows))
    assert " | 0.0% answered before the last round, 25.0% in it, 25.0% still asked in it | 2 ended because no " in line
    numbers_as_x = re.sub(r"\d+\.\d+", "x", line)
    assert numbers_as_x.startswith("success x | tests x | all known x | rounds x | ")
    signature = rows[0]["task"]["ground_truth"].split("\n")[0]
    history = rows[0]["dialogue_history"] = turns("Do it.", "?", signature, "?", signature, "?", "No.", "pass")
    history[2]["tool"], history[4]["leak"] = True, "signature"
    assert "leak" not in rollout.summary(write(tmp_path / "rows", rows[:1]))       # the rule-based simulator
    rows[0]["simulator"] = "a model"
    assert "50.0% of the simulator's replies leak the solution" in rollout.summary(write(tmp_path / "rows", rows[:1]))
    assert stage(5).measure_leaks(rows[:1], backend) == {"leaks": 0.5, "leaks_by_kind": {"signature": 1}}
    monkeypatch.setattr(backend, "leak_of", None)                            # as in a domain that cannot tell one
    assert "leak" not in rollout.summary(tmp_path / "rows")


def test_a_dialogue_that_a_model_has_no_room_for_ends_as_in_its_last_round(workspace, tmp_path):
    """Another dialogue is as without the limit; a request that alone is too long fails, and the others are played."""
    tasks = read(workspace / "tasks.jsonl")[:6]
    request = {**tasks[3], "problem_description": tasks[3]["problem_description"] + " and so on" * 200}
    words = ["--agent", "models/tiny", "--max-rounds", 8, "--max-new-tokens", 120, "--max-length", 260, "--tasks"]
    line = refused(2, *words, write(tmp_path / "with_long", [tasks[0], request]), "--out", tmp_path / "out")
    assert "1 of 2 rows are missing" in line and "the 260 of the model or --max-length" in line
    printed = call(2, *words, write(tmp_path / "tasks", tasks), "--out", tmp_path / "short")
    short, long = read(tmp_path / "short"), read(workspace / "offline.jsonl")[::3]
    ended = [row for row in short if "no_room" in row]
    assert 0 < len(ended) < 6 and f"{len(ended)} ended because no further turn fits" in printed
    for row, whole in zip(short, long):
        history = row["dialogue_history"]
        assert history == whole["dialogue_history"][:len(history)] and row["num_rounds"] == len(history) // 2
        assert history[-1]["role"] == "assistant"
        if row in ended:
            assert len(history) < len(whole["dialogue_history"]) and row["answer"] == history[-1]["content"]
            assert row["reward"] == 0


def test_a_message_that_is_too_long_for_the_critic_fails_alone(workspace, tmp_path):
    tasks = read(workspace / "tasks.jsonl")[:2]
    tasks[1]["ground_truth"] += "\n# and so on" * 700
    line = refused(2, "--agent", BASE, "--max-rounds", 2, "--best-of", 2, "--critic", "untrained", "--tasks",
                   write(tmp_path / "tasks", tasks), "--out", tmp_path / "out")
    assert "1 of 2 rows are missing" in line and "takes 2,048 tokens" in line


def test_a_branch_keeps_which_turns_are_of_the_environment():
    history = turns("Do it.", "LOOK", "3 rows", "done")
    history[2]["tool"] = True
    trajectory = {"task": TASK, "task_id": "row's", "sample": 2,
                  "dialogue_history": [history[0], {**history[1], "output_ids": [1]}, *history[2:]]}
    branched = rollout.branched_dialogue(7, trajectory, 3, 1, 0)
    assert branched.history == history[:3] and (branched.sample, branched.random_name) == (7, "2/3/1")
    assert branched.branch == {"branch": {"sample": 2, "turn": 3, "candidate": 1}, "continuation": 0}
    assert branched.task["task_id"] == "row's"                       # which tells the candidates of two tasks apart
    joined = rollout.branched_dialogue(7, {**trajectory, "run": 1}, 3, 1, 0)        # by 05, with another of sample 2
    assert joined.random_name == rollout.branch_name(joined.branch["branch"]) == "1/2/3/1"


def test_a_candidate_of_a_branch_is_one_message_after_a_kill(workspace):
    """A server would say something else each time."""
    both, trajectories = players("--max-rounds", 8), read_trajectories(workspace / "offline.jsonl")[:3]
    settings = both.settings._replace(branch=2, branch_candidates=3, samples=4)
    dialogues = rollout.branched_dialogues(trajectories, None, settings, "t")
    names = [(dialogue.task["task_id"], dialogue.random_name) for dialogue in dialogues]
    assert names[::4] == names[1::4] == names[3::4] and len(set(names)) == 6     # a group of continuations each
    dialogue, said = dialogues[5], {"role": "assistant", "content": "said before the kill"}
    both.first_turns[names[5]] = said
    asyncio.run(rollout.add_first_turn(dialogue, both))
    assert dialogue.history[-1] == said and len(dialogue.history) == dialogue.branch["branch"]["turn"] + 1
