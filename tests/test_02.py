"""02_rollout.py: the protocol, resume after a kill, ranks, both humans, bad input."""
import http.server
import json
import os
import signal
import threading
import time

import pytest

import common
from conftest import begin, read, refused, stage, succeed, wait

rollout = stage(2)


def flags(workspace, out, *more):
    return ["--tasks", workspace / "tasks.jsonl", "--agent", workspace / "model", "--max-rounds", 4, "--max-new-tokens", 24,
            "--concurrency", 8, "--out", out, *more]


def test_trajectories_follow_the_protocol(workspace):
    rows = read(workspace / "offline.jsonl")
    assert [(r["task_id"], r["sample"]) for r in rows] == [(t["task_id"], s) for t in read(workspace / "tasks.jsonl")
                                                          for s in range(3)]
    for row in rows:
        history = row["dialogue_history"]
        assert [turn["role"] for turn in history] == ["user", "assistant"] * row["num_rounds"]
        assert history[0]["content"] == row["task"]["problem_description"]
        agent = history[1::2]
        assert all(common.MARKER not in turn["content"] for turn in agent[:-1])
        assert common.MARKER in agent[-1]["content"] or row["num_rounds"] == row["max_rounds"] == 8
        if common.MARKER in agent[-1]["content"]:
            assert row["answer"] == agent[-1]["content"].split(common.MARKER, 1)[1].strip("\n")
        else:
            assert row["answer"] == agent[-1]["content"]
        assert row["reward"] == sum(row["tests"]) / 10
    assert {row["reward"] == 1 for row in rows} == {True, False}


def test_an_agents_turn_keeps_prompt_text_and_ids(workspace, tiny):
    _, tokenizer = tiny
    for row in read(workspace / "offline.jsonl")[:10]:
        for index, turn in enumerate(row["dialogue_history"]):
            if turn["role"] == "assistant":
                assert turn["input"] == common.prompt_text(tokenizer, row["dialogue_history"][:index], 8)
                assert tokenizer.decode(turn["output_ids"], skip_special_tokens=True) == turn["output"]
                assert turn["content"] == turn["output"].strip()


def test_c_never_reaches_a_policy_prompt(workspace):
    for row in read(workspace / "offline.jsonl"):
        body = row["task"]["ground_truth"].split("\n", 1)[1]
        for turn in row["dialogue_history"]:
            assert body not in turn.get("input", "")


def test_long_replies_are_cut_and_the_last_turn_is_the_answer(monkeypatch):
    args = rollout.parse_args(["--tasks", "t", "--agent", "script", "--max-rounds", "3", "--out", "o"])
    monkeypatch.setattr(rollout, "script_turns", lambda active, args: [{"role": "assistant", "content": "hm?"} for _ in active])
    monkeypatch.setattr(rollout, "human_replies", lambda active, simulator, args: ["y" * 500 for _ in active])
    dialogue = {"task": {}, "sample": 0, "answer": None, "history": [{"role": "user", "content": "?"}]}
    rollout.run_block([dialogue], None, None, None, args)
    assert [turn["content"] for turn in dialogue["history"]] == ["?", "hm?", "y" * 400, "hm?", "y" * 400, "hm?"]
    assert dialogue["answer"] == "hm?"


def test_the_rule_based_human_knows_what_it_is_asked(workspace):
    import random
    task = read(workspace / "tasks.jsonl")[0]
    for fact in task["facts"]:
        history = [{"role": "user", "content": ""}, {"role": "assistant", "content": fact["questions"][0]}]
        assert rollout.rules_reply(task, history, random.Random(0)) in fact["replies"]
    history[-1]["content"] = "Hello!"
    assert rollout.rules_reply(task, history, random.Random(0)) in rollout.UNCLEAR


def test_same_seed_same_file_and_another_seed_another(workspace, tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        succeed("02_rollout.py", *flags(workspace, tmp_path / name, "--seed", seed))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes() != (tmp_path / "c").read_bytes()
    assert "done already" in succeed("02_rollout.py", *flags(workspace, tmp_path / "a", "--seed", 0))


def test_killed_and_resumed_equals_uninterrupted(workspace, tmp_path):
    arguments = flags(workspace, tmp_path / "killed", "--samples", 4)
    succeed("02_rollout.py", *flags(workspace, tmp_path / "whole", "--samples", 4))
    pid = begin("02_rollout.py", *arguments, folder=tmp_path)
    partial = tmp_path / "killed.0of1.partial"
    deadline = time.time() + 60
    while not (partial.exists() and partial.stat().st_size) and time.time() < deadline:
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    assert wait(pid) == -signal.SIGKILL
    assert partial.exists() and not (tmp_path / "killed").exists()
    succeed("02_rollout.py", *arguments)
    assert (tmp_path / "killed").read_bytes() == (tmp_path / "whole").read_bytes()


def test_best_of_n_sends_what_the_critic_prefers(workspace, tmp_path, tiny, monkeypatch):
    """With a critic that prefers long messages, the messages get longer with N; candidates are nested in N."""
    model, tokenizer = tiny
    args = rollout.parse_args(["--tasks", "t", "--agent", "a", "--out", "o", "--best-of", "4", "--critic", "c",
                               "--max-new-tokens", "40"])
    dialogues = [{"task": task, "sample": 0, "answer": None, "history": [{"role": "user", "content": task["problem_description"]}]}
                 for task in read(workspace / "tasks.jsonl")[:6]]
    seen = []

    def longest(dialogues, prompts, actions):
        seen.append(actions)
        return [max(range(4), key=lambda i: len(own[i])) for own in actions]
    best = rollout.model_turns(dialogues, tiny, longest, args)
    assert [len(turn["output_ids"]) for turn in best] == [max(map(len, own)) for own in seen[0]]
    args.best_of = 1
    plain = rollout.model_turns(dialogues, tiny, None, args)
    assert [turn["output_ids"] for turn in plain] == [own[0] for own in seen[0]]
    assert len({len(own) == 4 for own in seen[0]}) == 1


def test_best_of_n_with_a_critic_folder(workspace, tmp_path):
    succeed("03_train_critic.py", "--trajectories", workspace / "offline.jsonl", "--model", "tests/tiny", "--lr", 1e-3, "--max-steps",
            2, "--out", tmp_path / "critic")
    small = ["--tasks", workspace / "tasks.jsonl", "--agent", "tests/tiny", "--max-rounds", 3, "--max-new-tokens", 40]
    succeed("02_rollout.py", *small, "--best-of", 3, "--critic", tmp_path / "critic", "--out", tmp_path / "a.jsonl")
    rows = read(tmp_path / "a.jsonl")
    assert all((row["best_of"], row["critic"]) == (3, str(tmp_path / "critic")) for row in rows)
    line = refused(2, *small, "--best-of", 3, "--critic", workspace / "model", "--out", tmp_path / "b.jsonl")
    assert "no critic.json" in line
    with pytest.raises(SystemExit):
        rollout.parse_args(["--tasks", "t", "--agent", "a", "--out", "o", "--best-of", "2"])


@pytest.mark.parametrize("replies, chosen, counted", [
    ({"ab": "A", "ba": "B"}, 0, "decided"), ({"ab": "B", "ba": "A"}, 1, "decided"), ({"ab": "A", "ba": "A"}, 0, "tie"),
    ({"ab": "A or B", "ba": "B"}, 0, "unreadable"), ({"ab": "", "ba": "B"}, 0, "unreadable")])
def test_the_judge_compares_in_both_orders(tiny, monkeypatch, replies, chosen, counted):
    _, tokenizer = tiny
    held, challenger = (common.encode(tokenizer, text) for text in ("price", "weight"))

    def judged(judge, chats, *_):
        prompts = [chat[0]["content"] for chat in chats]
        assert all("def secret" in prompt for prompt in prompts)
        return [replies["ab" if prompt.index("price") < prompt.index("weight") else "ba"] for prompt in prompts]
    monkeypatch.setattr(rollout, "reply_texts", judged)
    dialogue = {"task": {"ground_truth": "def secret(): pass"}, "history": [{"role": "user", "content": "?"}]}
    args = rollout.parse_args(["--tasks", "t", "--agent", "a", "--out", "o", "--best-of", "2", "--critic", "judge:x"])
    counts = {"decided": 0, "tie": 0, "unreadable": 0}
    assert rollout.judge_choices([dialogue], None, [[held, challenger]], tokenizer, None, counts, args) == [chosen]
    assert counts == {**dict.fromkeys(counts, 0), counted: 1}


@pytest.fixture
def server(monkeypatch):
    """A small server of OpenAI's protocol: the agent asks twice, then answers; the person says the size of its chat."""
    requests, failures = [], []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            requests.append({**request, "key": self.headers["Authorization"]})
            status, content = 200, f"I see {len(request['messages'])} messages."
            if failures:
                status, content = failures.pop(), "busy"
            elif request["model"] == "agent":
                content = "What is it?" if len(request["messages"]) < 6 else f"{common.MARKER}\ndef f(): return 1"
            body = {"id": "1", "object": "chat.completion", "created": 0, "model": request["model"], "choices": [
                {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": content}}]}
            data = json.dumps(body if status == 200 else {"error": {"message": content}}).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_):
            pass
    listener = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=listener.serve_forever, daemon=True).start()
    monkeypatch.setenv("OPENAI_API_KEY", "the key")
    yield f"http://127.0.0.1:{listener.server_port}/v1", requests, failures
    listener.shutdown()
    listener.server_close()


def test_agent_and_person_can_be_servers(workspace, tmp_path, server):
    address, requests, failures = server
    failures += [500, 429]                                                     # are tried again
    common.write_jsonl(tmp_path / "t.jsonl", read(workspace / "tasks.jsonl")[:5])
    arguments = ["--tasks", tmp_path / "t.jsonl", "--agent", f"{address}#agent", "--simulator", f"{address}#person", "--out",
                 tmp_path / "out.jsonl"]
    succeed("02_rollout.py", *arguments)
    rows = read(tmp_path / "out.jsonl")
    assert len(rows) == 5
    for row in rows:
        assert [turn["content"] for turn in row["dialogue_history"][1:]] == [
            "What is it?", "I see 2 messages.", "What is it?", "I see 4 messages.", f"{common.MARKER}\ndef f(): return 1"]
        assert row["answer"] == "def f(): return 1" and not any("output_ids" in turn for turn in row["dialogue_history"])
    assert len(requests) == 5 * 5 + 2 and {r["key"] for r in requests} == {"Bearer the key"}
    assert {(r["model"], r["temperature"], r["max_tokens"]) for r in requests} == {("agent", 1.0, 1024), ("person", 0.0, 128)}
    c = rows[0]["task"]["ground_truth"].split("\n", 1)[1]
    assert not any(c in json.dumps(r["messages"]) for r in requests if r["model"] == "agent")


def test_servers_that_fail_are_one_line(workspace, tmp_path, server):
    address, _, failures = server
    common.write_jsonl(tmp_path / "t.jsonl", read(workspace / "tasks.jsonl")[:1])
    tasks = ["--tasks", tmp_path / "t.jsonl", "--out", tmp_path / "out.jsonl", "--simulator", "rules", "--agent"]
    assert "goes after #" in refused(2, *tasks, address)
    failures += [404] * 9
    assert "no reply" in refused(2, *tasks, f"{address}#agent")
    assert not (tmp_path / "out.jsonl").exists()
    with pytest.raises(common.InputError, match="--best-of needs"):
        rollout.main([str(x) for x in [*tasks, f"{address}#agent", "--best-of", 2, "--critic", "x", "--overwrite"]])


def test_two_ranks_write_the_same_file_as_one(workspace, tmp_path):
    succeed("02_rollout.py", *flags(workspace, tmp_path / "one"))
    succeed("02_rollout.py", *flags(workspace, tmp_path / "two"), ranks=2)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_a_model_can_play_the_human_and_tasks_need_no_facts(workspace, tmp_path):
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


def test_simulator_prompt_swaps_the_roles():
    task = {"problem_description": "P", "ground_truth": "G"}
    history = [{"role": "user", "content": "P"}, {"role": "assistant", "content": "q"}, {"role": "user", "content": "r"},
               {"role": "assistant", "content": "q2"}]
    messages = rollout.simulator_messages(task, history)
    assert [(m["role"], m["content"]) for m in messages[1:]] == [("user", "q"), ("assistant", "r"), ("user", "q2")]
    assert "G" in messages[0]["content"]


@pytest.mark.parametrize("change, message", [
    (dict(tasks="missing.jsonl"), "missing.jsonl: no such file"),
    (dict(tasks="broken.jsonl"), "broken.jsonl:2: not JSON"),
    (dict(tasks="keyless.jsonl"), 'keyless.jsonl:1: missing "ground_truth"'),
    (dict(tasks="empty.jsonl"), "empty.jsonl: no rows in it"),
    (dict(agent="nobody/such-model"), "nobody/such-model: no model of this name"),
    (dict(agent="./nowhere"), "./nowhere: no such folder"),
    (dict(agent="tests"), "tests: no config.json"),
    (dict(agent="tiny"), "tiny: fresh parameters"),
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
    assert message in refused(2, *(x for k, v in options.items() for x in (f"--{k}", v)), "--out", tmp_path / "out.jsonl")
    assert not list(tmp_path.glob("out*"))
