"""Models behind OpenAI's protocol, against real server processes (server.py): requests, failures and their mending,
resuming, leaks, what is kept of ids, bad input."""
import asyncio
import contextlib
import io
import json
import os
import pathlib
import signal
import socket
import time
import types

import pytest

import common
import lib.servers
from colbench import backend, task_id
from conftest import begin, critic_note, Partial, read, refused, serving, stage, succeed, wait
from lib.models import load_tokenizer
from lib.runtime import InputError
from lib.servers import (
    open_server,
    read_reply,
    Reply,
    ReplyError,
    server_reply,
    server_request,
    strip_thoughts,
)

rollout = stage(2)
RULES = ["--simulator", "rules"]


def log_of(server):
    path = pathlib.Path(server["log"])
    return read(path) if path.exists() else []


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    path = tmp_path_factory.mktemp("tasks") / "tasks.jsonl"
    stage(1).main(["--num-tasks", "8", "--out", str(path)])
    return path


def play(tasks, agent, out, *more):
    rollout.main([str(x) for x in ("--tasks", tasks, "--agent", agent, "--out", out, "--max-new-tokens", 60, *more)])
    return read(out)


def reply_of(server, messages=({"role": "user", "content": "?"},), seed=0, **options):
    return asyncio.run(server_reply(open_server(server, **options), list(messages), 1.0, 8, seed))


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@pytest.fixture(scope="module")
def served(tasks, tmp_path_factory):
    """Dialogues of an agent behind two servers with a person behind a third: their file, their rows, what was printed,
    and the requests that each of the agent's servers got, and that the person's got."""
    path, printed = tmp_path_factory.mktemp("served") / "out.jsonl", io.StringIO()
    running = serving(tmp_path_factory)
    serve = next(running)
    servers, human = [serve("--key", "the key", "--delay-s", 0.05) for _ in range(2)], serve()
    agent = ",".join(server["url"] for server in servers) + "#asker"
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setenv("OPENAI_API_KEY", "the key")
        rows = play(tasks, agent, path, "--simulator", f"{human['url']}#counter")
    logs = [log_of(server) for server in servers]
    asked_of_human = log_of(human)
    next(running, None)                                             # it ends the servers
    return types.SimpleNamespace(path=path, rows=rows, printed=printed.getvalue(), logs=logs, agent=logs[0] + logs[1],
                                 human=asked_of_human)


def test_agent_and_person_behind_servers_follow_the_protocol(served, tasks):
    assert [row["task_id"] for row in served.rows] == [task_id(task) for task in read(tasks)]
    for row in served.rows:
        assert [turn["content"] for turn in row["dialogue_history"][1:]] == [
            "What is it?", "I see 2 messages.", "What is it?", "I see 4 messages.",
            f"{backend.MARKER}\ndef f(): return 1"]
        assert row["answer"] == "def f(): return 1" and row["tokenizer"] is None
        assert not any(key in turn for turn in row["dialogue_history"] for key in ("output_ids", "input", "leak"))


def test_two_addresses_are_in_balance(served):
    assert sum(map(len, served.logs)) == 24 and min(map(len, served.logs)) >= 8


def test_servers_get_every_parameter_and_seeds_that_differ(served):
    shared = {"top_p": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0, "top_k": -1, "min_p": 0.0,
              "repetition_penalty": 1.0}
    for requests, wanted in ((served.agent, {"temperature": 1.0, "max_tokens": 60, "key": "Bearer the key"}),
                             (served.human, {"temperature": 0.0, "max_tokens": 128})):
        assert all((shared | wanted).items() <= request.items() for request in requests)
        assert len({request["seed"] for request in requests}) == len(requests)


def test_c_reaches_the_person_s_server_and_never_the_agent_s(served, tasks):
    to_agent = json.dumps([request["messages"] for request in served.agent])
    to_human = json.dumps([request["messages"] for request in served.human])
    for task in read(tasks):
        for line in task["ground_truth"].split("\n")[1:]:
            line = json.dumps(line.strip())[1:-1]                   # as it would stand in a request
            assert line not in to_agent and line in to_human


def test_requests_and_tokens_of_both_servers_are_counted(served):
    costs = json.loads(pathlib.Path(f"{served.path}.costs.json").read_text())
    assert (costs["server_prompt_tokens"], costs["server_completion_tokens"]) == (400, 200)
    assert "24 requests, 240 prompt and 120 completion tokens; retried: none" in served.printed


def test_what_fails_for_a_moment_is_tried_again(tasks, tmp_path, serve, capsys):
    """Rate limits, busy, empty and broken replies, a reply that never comes: counted; dialogues are as without."""
    flaky = serve("--limit", 4, "--busy", 9, "--empty", 7, "--broken", 11, "--hang-at", 6, "--strict")
    rows = play(tasks, f"{flaky['url']}#asker", tmp_path / "a", *RULES, "--timeout", 1)
    printed = capsys.readouterr().out
    for kind in ("status 429", "status 503", "empty reply", "unreadable reply", "no reply within 1 s"):
        assert f" {kind}" in printed.split("retried: ")[1], kind
    assert "asked without top_k, min_p, repetition_penalty (status 400: Unrecognized request" in printed
    clean = serve()
    assert [{**row, "agent": 0} for row in play(tasks, f"{clean['url']}#asker", tmp_path / "b", *RULES)] == [
        {**row, "agent": 0} for row in rows]


def test_a_request_that_is_refused_for_another_reason_takes_no_parameter_from_the_others(serve):
    """The first request is refused with top_k, and without: top_k was not the reason."""
    server = serve("--refuse", "far too long")
    opened = open_server(f"{server['url']}#asker")

    async def two():
        with pytest.raises(InputError, match="maximum context length"):
            await server_reply(opened, [{"role": "user", "content": "far too long"}], 1.0, 8, 0)
        return await server_reply(opened, [{"role": "user", "content": "?"}], 1.0, 8, 1)
    assert asyncio.run(two()).text == "What is it?"
    assert [("top_k" in request, request["status"]) for request in log_of(server)] == [
        (True, 400), (False, 400), (True, 200)]


def test_a_server_that_refuses_parameters_is_asked_without_them_though_no_retries_are_left(serve, capsys):
    server = serve("--strict")
    opened = open_server(f"{server['url']}#asker", retries=0)

    async def two():
        for seed in range(2):
            await server_reply(opened, [{"role": "user", "content": "?"}], 1.0, 8, seed)
    asyncio.run(two())
    assert ["top_k" in request for request in log_of(server)] == [True, False, False]
    assert capsys.readouterr().out.count("asked without top_k") == 1


@pytest.mark.parametrize("header, pause_s", [("2.5", 2.5), ("0", None), ("soon", None)])
def test_a_server_that_asks_for_no_wait_gets_growing_pauses(header, pause_s):
    opened = open_server("http://127.0.0.1:1/v1#m")
    response = types.SimpleNamespace(status_code=503, headers={"retry-after": header}, reason_phrase="")
    _, _, wait_s = lib.servers.refused(opened, opened.addresses[0], {"extra_body": {}}, response, b"Loading model")
    assert wait_s == pause_s


def test_the_time_that_a_server_asks_for_is_waited(serve):
    server = serve("--limit", 2)
    opened = open_server(f"{server['url']}#asker")

    async def three():
        for seed in range(3):
            await server_reply(opened, [{"role": "user", "content": "?"}], 1.0, 8, seed)
    asyncio.run(three())
    times = [request["time"] for request in log_of(server)]
    assert [request["status"] for request in log_of(server)] == [200, 429, 200, 429, 200]
    assert all(0.2 <= times[i + 1] - times[i] < 1 for i in (1, 3))


def test_a_slow_reply_holds_back_no_other_dialogue(tasks, tmp_path, serve):
    server = serve("--hang-at", 1, "--hang-s", 3)
    play(tasks, f"{server['url']}#asker", tmp_path / "out", *RULES, "--concurrency", 2)
    requests = log_of(server)
    first = requests[0]["messages"][1]["content"]
    assert [i for i, request in enumerate(requests) if request["messages"][1]["content"] == first] == [0, 22, 23]


def test_a_server_that_dies_in_the_middle_and_comes_back(tasks, tmp_path, serve):
    """The run ends with one line; the same command again plays what is missing and asks for nothing else."""
    port = free_port()
    dying, agent = serve("--die-at", 16, port=port), f"http://127.0.0.1:{port}/v1#asker"
    arguments = ["--tasks", tasks, "--agent", agent, *RULES, "--concurrency", 2, "--retries", 1, "--out",
                 tmp_path / "out"]
    line = refused(2, *arguments)
    assert "no connection" in line and "run the same command again" in line and not (tmp_path / "out").exists()
    finished = [int(row.split(" ")[0]) for row in Partial(tmp_path / "out").read_text().splitlines()]
    assert 2 <= len(finished) <= 5
    paid = json.loads((tmp_path / "out.costs.json").read_text())["server_prompt_tokens"]
    assert 10 * 13 <= paid <= 10 * 15                              # a reply may have been under way
    serve.end(dying["pid"])
    alive = serve(port=port)
    rollout.main([str(argument) for argument in arguments])
    rows = read(tmp_path / "out")
    assert len(rows) == 8 and len(log_of(alive)) == 3 * (8 - len(finished))
    asked = {request["messages"][1]["content"] for request in log_of(alive)}
    assert asked == {row["task"]["problem_description"] for i, row in enumerate(rows) if i not in finished}
    costs = json.loads((tmp_path / "out.costs.json").read_text())
    assert costs["server_prompt_tokens"] == paid + 10 * len(log_of(alive))


def test_one_of_two_servers_that_dies_is_left_alone(tasks, tmp_path, serve):
    dying, steady = serve("--die-at", 5), serve()
    rows = play(tasks, f"{dying['url']},{steady['url']}#asker", tmp_path / "out", *RULES, "--retries", 3)
    assert len(rows) == 8 and len(log_of(steady)) >= 20


def test_killed_in_the_middle_repeats_nothing(tasks, tmp_path, serve):
    server = serve("--delay-s", 0.05)
    arguments = ["--tasks", tasks, "--agent", f"{server['url']}#asker", *RULES, "--samples", 3, "--concurrency", 3,
                 "--out",
                 tmp_path / "out"]
    partial = Partial(tmp_path / "out")
    pid = begin("02_rollout.py", *arguments, folder=tmp_path)
    while not (partial.exists() and len(partial.read_bytes().splitlines()) > 4):
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    assert wait(pid) == -signal.SIGKILL
    finished = [int(row.split(" ")[0]) for row in partial.read_text().split("\n")[:-1]]
    time.sleep(0.2)                                                 # what was in flight has arrived
    before = len(log_of(server))
    succeed("02_rollout.py", *arguments, ranks=2)
    assert len(log_of(server)) - before == 3 * (24 - len(finished))
    assert [(row["task_id"], row["sample"]) for row in read(tmp_path / "out")] == [
        (task_id(task), sample) for task in read(tasks) for sample in range(3)]


def test_a_dialogue_without_a_reply_is_no_answer(tasks, tmp_path, serve):
    """It is named in OUT.failed.jsonl, the run ends with status 2, and the same command again plays it alone."""
    port, task = free_port(), read(tasks)[3]
    server = serve("--refuse", task["problem_description"].split("\n")[0], port=port)
    arguments = ["--tasks", tasks, "--agent", f"http://127.0.0.1:{port}/v1#asker", *RULES, "--concurrency", 1, "--out",
                 tmp_path / "out"]
    line = refused(2, *arguments)
    assert "out: 1 of 8 dialogues failed" in line and "status 400" in line and not (tmp_path / "out").exists()
    [failed] = read(tmp_path / "out.failed.jsonl")
    assert failed["task_id"] == task_id(task) and "maximum context length" in failed["failed"]
    serve.end(server["pid"])
    server = serve(port=port)
    rollout.main([str(argument) for argument in arguments])
    assert len(log_of(server)) == 3 and len(read(tmp_path / "out")) == 8
    assert not (tmp_path / "out.failed.jsonl").exists()


def test_replies_that_stay_empty_are_no_answers(tasks, tmp_path, serve):
    server = serve("--empty", 1)
    line = refused(2, "--tasks", tasks, "--agent", f"{server['url']}#asker", *RULES, "--retries", 2, "--out",
                   tmp_path / "a")
    assert "8 of 8 dialogues failed" in line and "empty reply" in line
    assert len(log_of(server)) == 3 * 8 and len({request["seed"] for request in log_of(server)}) == 3 * 8
    line = refused(2, "--tasks", tasks, "--agent", f"{server['url']}#asker", *RULES, "--retries", 0, "--samples", 4,
                   "--concurrency", 2, "--out", tmp_path / "b")
    assert "20 dialogues in a row failed" in line and "run the same command again" in line


def test_a_person_that_shows_code_is_noticed(tasks, tmp_path, serve, capsys):
    server = serve()
    url = server["url"]
    leaky = play(tasks, f"{url}#asker", tmp_path / "leaky", "--simulator", f"{url}#leaky")
    assert all(turn["leak"] == "signature" for row in leaky for turn in row["dialogue_history"][2::2])
    assert "100.0% of the human's replies leak code (16 signature)" in capsys.readouterr().out
    shy = play(tasks, f"{url}#asker", tmp_path / "shy", "--simulator", f"{url}#leaky", "--reject-leaks", 2)
    person = [turn for row in shy for turn in row["dialogue_history"][2::2]]
    assert {(turn["content"], turn["resampled"], "leak" in turn) for turn in person} == {("It is what you think.", 1,
                                                                                          False)}
    assert "0.0% of the human's replies leak code, 16 rejected" in capsys.readouterr().out
    asked = [request for request in log_of(server) if request["model"] == "leaky"][16:]
    assert sorted(request["temperature"] for request in asked) == [0.0] * 16 + [1.0] * 16
    assert len({request["seed"] for request in asked}) == 32
    succeed("05_evaluate.py", f"leaky={tmp_path / 'leaky'}", f"shy={tmp_path / 'shy'}", "--out", tmp_path / "report")
    metrics = json.loads((tmp_path / "report" / "metrics.json").read_text())
    assert [metrics[name]["leaks"] for name in ("leaky", "shy")] == [1.0, 0.0]
    assert metrics["leaky"]["leaks_by_kind"] == {"signature": 16}


def test_thoughts_stay_with_who_thinks(tasks, tmp_path, serve):
    server = serve()
    rows = play(tasks, f"{server['url']}#thinker", tmp_path / "out", "--simulator", f"{server['url']}#thinker",
                "--max-rounds", 3, "--chat-template-args", '{"agent": {"enable_thinking": true}}')
    for turn in [turn for row in rows for turn in row["dialogue_history"][1:]]:
        assert turn["content"] == "What should the lowest heat be?" and "secret" in turn["output"]
    assert {row["answer"] for row in rows} == {"What should the lowest heat be?"}
    assert not any("secret" in json.dumps(request["messages"]) for request in log_of(server))
    kinds = {(request["temperature"], str(request.get("chat_template_kwargs"))) for request in log_of(server)}
    assert kinds == {(1.0, "{'enable_thinking': True}"), (0.0, "None")}


def test_ids_are_kept_where_the_server_gives_them(tasks, tmp_path, serve):
    tokenizer = load_tokenizer("models/tiny")
    server = serve("--model", "models/tiny")
    agent, more = f"{server['url']}#model", [*RULES, "--max-rounds", 3]
    rows = play(tasks, agent, tmp_path / "out", *more, "--agent-tokenizer", "models/tiny")
    counts = {}
    for row in rows:
        turns = [turn for turn in row["dialogue_history"] if turn["role"] == "assistant"]
        assert common.agent_turns(tokenizer, row, counts) == [(turn["input"], turn["output_ids"]) for turn in turns]
        for turn in turns:
            assert turn["output_ids"]
            assert tokenizer.decode(turn["output_ids"], skip_special_tokens=True) == turn["output"]
    assert list(counts) == ["as sampled"]
    plain = play(tasks, agent, tmp_path / "plain", *more)                        # same seeds, no ids
    assert [[turn["content"] for turn in row["dialogue_history"]] for row in plain] == [
        [turn["content"] for turn in row["dialogue_history"]] for row in rows]
    assert "#asker: gives no token ids; --agent-tokenizer and --sampler need a server" in refused(
        2, "--tasks", tasks, "--agent", f"{server['url']}#asker", *RULES, "--agent-tokenizer", "models/tiny", "--out",
        tmp_path / "none")


def test_thoughts_that_a_server_puts_apart_are_kept_as_a_block():
    message = {"content": "What is it?", "reasoning_content": "Ask first."}
    body = json.dumps({"choices": [{"finish_reason": "length", "logprobs": None, "message": message}], "usage": None})
    reply = read_reply(body.encode())
    assert reply == Reply("<think>Ask first.</think>What is it?", False, None, 0, 0)
    assert strip_thoughts(reply.text) == "What is it?"


@pytest.mark.parametrize("model, roles, keys", [
    ("gpt-4o", ["system", "user"], {"max_tokens", "temperature", "top_p", "frequency_penalty", "presence_penalty"}),
    ("o1-mini", ["user", "user"], {"max_completion_tokens"}),
    ("openai/o3-mini", ["system", "user"], {"max_completion_tokens"}),
    ("gpt-5.1", ["system", "user"], {"max_completion_tokens"}),
    ("AIDC-AI/Marco-o1", ["system", "user"], {"max_tokens", "temperature", "top_p", "frequency_penalty",
                                              "presence_penalty"})])
def test_parameters_of_reasoning_models(model, roles, keys):
    server = open_server(f"http://nowhere/v1#{model}")
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    request = server_request(server, chat, 0.5, 10, 3, {"a": 1})
    assert [message["role"] for message in request["messages"]] == roles and request["extra_body"]["a"] == 1
    assert request.keys() - {"model", "messages", "seed", "extra_body"} == keys


def test_bad_servers_are_one_line(tasks, tmp_path, serve, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "wrong")
    server = serve("--key", "right")
    base = ["--tasks", tasks, "--simulator", "rules", "--out"]
    begin_s = time.monotonic()
    for number, (agent, message) in enumerate([
            (server["url"], "a server's model goes after #"), ("http://a/v1,b/v1#m", "several addresses of one model"),
            (f"http://127.0.0.1:{free_port()}/v1#m", "no connection"),
            (f"{server['url']}#asker", "the key in OPENAI_API_KEY")]):
        assert message in refused(2, *base, tmp_path / f"{number}", "--agent", agent)
    monkeypatch.setenv("OPENAI_API_KEY", "right")
    assert "no model of this name there (status 404: The model `m`" in refused(
        2, *base, tmp_path / "5", "--agent", f"{server['url']}#m")
    (tmp_path / "critic").mkdir()
    (tmp_path / "critic" / "critic.json").write_text(json.dumps(critic_note("value")))
    assert f"a critic that reads tokens: {server['url']}#asker needs --agent-tokenizer MODEL" in refused(
        2, *base, tmp_path / "6", "--agent", f"{server['url']}#asker", "--best-of", 2, "--critic", tmp_path / "critic")
    assert not any((tmp_path / str(number)).exists() for number in range(7)) and time.monotonic() - begin_s < 20
    with pytest.raises(SystemExit):
        rollout.parse_args(["--tasks", "t", "--agent", "a", "--out", "o", "--chat-template-args", '{"person": {}}'])


def test_a_server_that_refuses_at_first_ends_the_run_and_later_the_dialogue(serve):
    server = serve("--refuse", "too long")
    with pytest.raises(InputError, match="refuses the request"):
        reply_of(f"{server['url']}#asker", [{"role": "user", "content": "too long"}])
    opened = open_server(f"{server['url']}#asker")

    async def ask(text):
        return await server_reply(opened, [{"role": "user", "content": text}], 1.0, 8, 0)

    async def both():
        assert (await ask("short"))[:2] == ("What is it?", True)
        with pytest.raises(ReplyError, match="maximum context length"):
            await ask("too long")
    asyncio.run(both())
