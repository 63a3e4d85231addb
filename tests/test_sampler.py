"""Servers as samplers, against real server processes (server.py): 04 --sampler and 02 --best-of with an agent behind
http://: the same candidates as sampled here, failures and their mending, resuming, bad input."""
import argparse
import asyncio
import contextlib
import functools
import io
import json
import os
import pathlib
import signal
import time
import types

import pytest

import common
from conftest import begin, Partial, read, refused, ROOT, run, serving, stage, succeed, wait
from lib import servers
from lib.models import encode, stop_ids
from lib.runtime import InputError
from lib.servers import open_server, Reply
from lib.speakers import ids_fault, Speaker

policy, rollout = stage(4), stage(2)
BASE = ROOT / "models" / "tiny"


@pytest.fixture(scope="module")
def few(workspace, tmp_path_factory):
    """A file of two dialogues."""
    path = tmp_path_factory.mktemp("few") / "few.jsonl"
    path.write_text("".join((workspace / "offline.jsonl").read_text().splitlines(True)[:2]))
    return path


def flags(few, out, *more):
    return [str(x) for x in ("--method", "sweet", "--critic", "oracle", "--trajectories", few, "--model", BASE,
                             "--data-frac", 1, "--num-candidates", 3, "--max-new-tokens", 40, "--max-steps", 1,
                             "--out", out, *more)]


@pytest.fixture(scope="module")
def greedy(few, tmp_path_factory):
    """candidates.jsonl at temperature 0, sampled here."""
    out = tmp_path_factory.mktemp("greedy") / "out"
    assert "two equal actions" in refused(4, *flags(few, out, "--temperature", 0))
    return out / "candidates.jsonl"


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    """A server of the base model without faults, for all tests: the log grows."""
    for serve in serving(tmp_path_factory):
        yield serve("--model", BASE)


def log_of(server):
    path = pathlib.Path(server["log"])
    return read(path) if path.exists() else []


# --- 04 --sampler

@pytest.fixture(scope="module")
def sampled(few, clean, tmp_path_factory):
    """SWEET with candidates from two servers, in which the policy cannot be loaded to sample: its folder, what it
    printed, its rows, their candidates, the servers' addresses and the requests that each got."""
    out, printed = tmp_path_factory.mktemp("sampled") / "out", io.StringIO()
    serving_another = serving(tmp_path_factory)
    served = next(serving_another)("--model", BASE)
    before = len(log_of(clean))
    both = f"{served['url']},{clean['url']}#model"
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(policy, "load_model", None)
        policy.main(flags(few, out, "--sampler", both))
    logs = [log_of(served), log_of(clean)[before:]]
    serving_another.close()
    rows = read(out / "candidates.jsonl")
    return types.SimpleNamespace(out=out, printed=printed.getvalue(), rows=rows, both=both, logs=logs,
                                 requests=logs[0] + logs[1],
                                 candidates=[candidate for row in rows for candidate in row["candidates"]])


def test_two_servers_share_the_requests_of_all_states(sampled, greedy):
    requests, rows = sampled.requests, sampled.rows
    assert len(requests) == 3 * len(rows) and min(map(len, sampled.logs)) > len(requests) / 4
    keys = "task_id", "sample", "turn", "task", "prompt", "history"
    assert [[row[key] for key in keys] for row in rows] == [[row[key] for key in keys] for row in read(greedy)]


def test_servers_get_prompts_by_their_ids_every_parameter_and_seeds_that_differ(sampled, tiny):
    requests = sampled.requests
    assert sorted(request["prompt"] for request in requests) == sorted(
        encode(tiny[1], row["prompt"]) for row in sampled.rows for _ in range(3))
    wanted = {"temperature": 1.0, "max_tokens": 40, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "return_token_ids": True}
    assert all(wanted.items() <= request.items() for request in requests)
    assert len({request["seed"] for request in requests}) == len(requests)


def test_candidates_of_servers_have_their_ids_and_whether_they_ended(sampled, tiny):
    stops = stop_ids(*tiny)
    for candidate in sampled.candidates:
        assert candidate["text"] == tiny[1].decode(candidate["ids"], skip_special_tokens=True)
        assert candidate["ended"] == (candidate["ids"][-1] in stops)
    assert len({candidate["text"] for candidate in sampled.candidates}) > len(sampled.rows)


def test_requests_and_tokens_of_servers_are_counted(sampled):
    costs = json.loads((sampled.out / "costs.json").read_text())
    assert f"{sampled.both}: {len(sampled.requests)} requests, " in sampled.printed
    assert "retried: none" in sampled.printed
    assert costs["server_prompt_tokens"] == sum(len(request["prompt"]) for request in sampled.requests)
    assert costs["server_completion_tokens"] == sum(len(candidate["ids"]) for candidate in sampled.candidates)


def test_a_policy_is_trained_on_candidates_of_servers(sampled):
    assert (sampled.out / "COMPLETED").exists() and read(sampled.out / "pairs.jsonl")


def test_a_misbehaving_server_changes_no_candidate(few, greedy, tmp_path, serve, monkeypatch, capsys):
    """At temperature 0 they are those that are sampled here, byte for byte: errors, rate limits, empty, half and cut
    replies, wrong ids, a reply that never comes."""
    monkeypatch.setattr(policy, "open_server", functools.partial(open_server, timeout_s=2, retries=20))
    monkeypatch.setattr(servers, "MAX_PAUSE_S", 0.2)
    server = serve("--model", BASE, "--limit", 11, "--busy", 13, "--empty", 17, "--broken", 10, "--cut", 7,
                   "--wrong-ids", 12, "--hang-at", 6, "--strict")
    more = ["--temperature", 0, "--sampler", f"{server['url']}#model", "--concurrency", 2]
    assert "two equal actions" in refused(4, *flags(few, tmp_path / "out", *more))
    retried = capsys.readouterr().out.split("retried: ")[1]
    for kind in ("status 429", "status 503", "unreadable reply", "no connection", "wrong ids", "no reply within 2 s"):
        assert f" {kind}" in retried, kind
    assert (tmp_path / "out" / "candidates.jsonl").read_bytes() == greedy.read_bytes()


def test_killed_it_goes_on_by_states(few, greedy, tmp_path, clean, serve):
    """On two ranks then, with a server at another address, which is asked for what is missing alone."""
    first, out = serve("--model", BASE, "--delay-s", 0.1), tmp_path / "out"
    arguments = flags(few, out, "--temperature", 0, "--concurrency", 3, "--sampler")
    pid = begin("04_train_policy.py", *arguments, f"{first['url']}#model", folder=tmp_path)
    partial = Partial(out / "candidates.jsonl")
    while not (partial.exists() and len(partial.read_bytes().splitlines()) > 3):
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    assert wait(pid) == -signal.SIGKILL
    done = [int(line.split(" ")[0]) for line in partial.read_text().split("\n")[:-1]]
    num_states = len(read(greedy))
    assert 3 < len(done) < num_states and not (out / "candidates.jsonl").exists()
    serve.end(first["pid"])
    before = len(log_of(clean))
    process = run("04_train_policy.py", *arguments, f"{clean['url']}#model", ranks=2)
    assert process.returncode == 2 and "two equal actions" in process.stderr
    assert f"{first['url']}#model; {clean['url']}#model is taken for the same model" in process.stdout
    assert len(log_of(clean)) - before == 3 * (num_states - len(done))
    assert (out / "candidates.jsonl").read_bytes() == greedy.read_bytes() and not list(out.glob("*.partial"))
    assert "made with --sampler" in refused(4, *arguments, f"{clean['url']}#other")


def test_a_state_without_a_reply_is_asked_for_again(few, greedy, tmp_path, clean, serve):
    rows, out = read(greedy), tmp_path / "out"
    longest = max(range(len(rows)), key=lambda i: len(rows[i]["prompt"]))
    server = serve("--model", BASE, "--refuse", rows[longest]["prompt"][-40:])
    arguments = flags(few, out, "--temperature", 0, "--concurrency", 1, "--sampler")
    line = refused(4, *arguments, f"{server['url']}#model")
    assert f"candidates.jsonl: 1 of {len(rows)} states failed, the first with " in line and "status 400" in line
    [failed] = read(out / "candidates.jsonl.failed.jsonl")
    assert failed["number"] == longest and not (out / "candidates.jsonl").exists()
    before = len(log_of(clean))
    assert "two equal actions" in refused(4, *arguments, f"{clean['url']}#model")
    assert len(log_of(clean)) - before == 3 and (out / "candidates.jsonl").read_bytes() == greedy.read_bytes()
    assert not (out / "candidates.jsonl.failed.jsonl").exists()


def test_servers_that_cannot_sample_are_one_line(few, tmp_path, clean, serve, monkeypatch):
    monkeypatch.setattr(policy, "open_server", functools.partial(open_server, retries=1))
    server = serve("--model", BASE, "--wrong-ids", 1)
    line = refused(4, *flags(few, tmp_path / "a", "--sampler", f"{server['url']}#model"))
    assert f"{server['url']}#model: wrong ids (they say " in line and "candidates.jsonl: " in line
    line = refused(4, *flags(few, tmp_path / "d", "--sampler", f"{clean['url']}#nobody"))
    assert "#nobody: no model of this name there, or nothing that continues a prompt (/completions) (status 404" in line
    process = run("04_train_policy.py", *flags(few, tmp_path / "b", "--sampler", "http://127.0.0.1:9/v1#model"))
    assert process.returncode == 2 and "no connection" in process.stderr
    for more in (["--sampler", BASE], ["--sampler", "http://a/v1#m", "--candidates", "c"]):
        with pytest.raises(SystemExit):
            policy.parse_args(flags(few, tmp_path / "c", *more))


def test_what_ids_must_be(tiny):
    """Those of the text, with the end of the turn, after a prompt that the server has read alike."""
    tokenizer = tiny[1]
    ids = encode(tokenizer, "What is it?")
    end = [tokenizer.eos_token_id]
    speaker = Speaker(tokenizer=tokenizer, server=argparse.Namespace(name="http://a/v1#m"))
    fault = lambda *reply, speaker=speaker: ids_fault(Reply(*reply, 5), speaker, 9)
    assert fault("What is it?", True, ids + end, 9) is None and fault("What is it?", False, ids, 9) is None
    assert fault("", True, end, 9) is None
    thoughts = encode(tokenizer, "<think>A plan</think>")
    for text in ("<think>A plan.</think>What is it?", "What is it?"):               # thoughts that it puts apart
        assert fault(text, True, thoughts + ids + end, 9) is None
    assert fault("What is it?\ufffd", False, ids, 9) is None
    assert "they say 'What is it?' and the text says 'When?'" in fault("When?", True, ids + end, 9)
    assert "they say 'What is it?' and the text says ''" in fault("", True, ids + end, 9)
    assert "no end of the turn" in fault("What is it?", True, ids, 9)
    for bad in ([len(tokenizer)], [-1], ["a"], [1.5]):
        assert "not of this vocabulary" in fault("?", True, bad, 9)
    stopping = speaker._replace(stop=("is",))
    assert fault("What", True, encode(tokenizer, "What is"), 9, speaker=stopping) is None
    with pytest.raises(InputError, match="http://a/v1#m: gives no token ids"):
        fault("What is it?", True, None, 9)
    with pytest.raises(InputError, match="says that it has read 8 tokens, where this tokenizer and template make 9"):
        fault("What is it?", True, ids + end, 8)


# --- 02 --best-of

def test_best_of_n_of_a_server_sends_what_is_preferred(workspace, clean, tiny, monkeypatch):
    """The candidates are nested in N, the first is that of N = 1; each is sampled with a seed of its own."""
    agent, seen = Speaker(tokenizer=tiny[1], server=open_server(f"{clean['url']}#model")), []
    before = len(log_of(clean))

    async def longest(dialogue, prompt, replies, *_):
        seen.extend(reply.ids for reply in replies)
        return max(range(4), key=lambda i: len(replies[i].ids))
    monkeypatch.setattr(rollout, "critic_choice", longest)

    def turn(*more):
        args = rollout.parse_args(["--tasks", "t", "--agent", "a", "--out", "o", "--max-new-tokens", "40", *more])
        dialogue = rollout.new_dialogue(0, read(workspace / "tasks.jsonl")[0], 0)
        return asyncio.run(rollout.agent_turn(dialogue, rollout.Players(agent, None, None), args))
    best = turn("--best-of", "4", "--critic", "c")
    assert len(best["output_ids"]) == max(map(len, seen)) and best["input"] and len(set(map(tuple, seen))) > 1
    assert turn()["output_ids"] == seen[0]
    assert len({request["seed"] for request in log_of(clean)[before:]}) == 4


def test_best_of_n_of_a_server_goes_on_after_a_kill(workspace, critic, tmp_path, serve, tiny):
    (tmp_path / "tasks").write_text("".join((workspace / "tasks.jsonl").read_text().splitlines(True)[:6]))
    server = serve("--model", BASE, "--cut", 9, "--wrong-ids", 10, "--delay-s", 0.05)
    arguments = ["--tasks", tmp_path / "tasks", "--agent", f"{server['url']}#model", "--agent-tokenizer", BASE,
                 "--max-rounds", 2, "--max-new-tokens", 30, "--best-of", 3, "--critic", critic, "--concurrency", 2,
                 "--out", tmp_path / "out"]
    pid = begin("02_rollout.py", *arguments, folder=tmp_path)
    partial = Partial(tmp_path / "out")
    while not (partial.exists() and partial.read_bytes().count(b"\n") > 1):
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    assert wait(pid) == -signal.SIGKILL
    done = dict(line.split(" ", 1) for line in partial.read_text().split("\n")[:-1])
    time.sleep(0.3)                                                 # what was in flight has arrived
    before = len(log_of(server))
    printed = succeed("02_rollout.py", *arguments)
    rows = read(tmp_path / "out")
    assert len(rows) == 6 and all(rows[int(number)] == json.loads(row) for number, row in done.items())
    asked, counts = log_of(server)[before:], {}
    assert len(asked) >= 3 * sum(row["num_rounds"] for i, row in enumerate(rows) if str(i) not in done)
    assert f"{len(done)} of 6 dialogues are there already" in printed and " wrong ids" in printed
    assert {(row["best_of"], row["critic"]) for row in rows} == {(3, str(critic))}
    for row in rows:
        assert common.agent_turns(tiny[1], row, counts)
    assert list(counts) == ["as sampled"]


def test_an_oracle_and_branches_need_no_ids(workspace, tmp_path, serve):
    server = serve()
    (tmp_path / "tasks").write_text("".join((workspace / "tasks.jsonl").read_text().splitlines(True)[:2]))
    agent = ["--agent", f"{server['url']}#asker", "--max-rounds", 3]
    succeed("02_rollout.py", "--tasks", tmp_path / "tasks", *agent, "--best-of", 2, "--critic", "oracle", "--out",
            tmp_path / "best")
    assert len(log_of(server)) == 2 * 3 * 2 and all("prompt" not in request for request in log_of(server))
    assert {row["answer"] for row in read(tmp_path / "best")} == {"def f(): return 1"}
    succeed("02_rollout.py", "--tasks", tmp_path / "best", "--branch", 2, "--branch-candidates", 2, "--samples", 2,
            *agent, "--out", tmp_path / "branches")
    assert len(read(tmp_path / "branches")) == 2 * 2 * 2
