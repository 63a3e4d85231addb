"""lib/sampling.py and lib/servers.py: models here and behind OpenAI's protocol, against real server processes
(server.py): requests, replies, failures and their mending, rows of a file, resuming, bad input; 04 --sampler, and 02
--best-of with an agent behind http://."""
import asyncio
import collections
import gc
import json
import pathlib
import signal
import time
import types

import pytest

import common
import lib.servers
from colbench import backend, task_id
from conftest import BASE, begin, call, critic_note, killed, Partial, read, refused, run, serving, stage, write
from lib.models import encode, load_tokenizer, stop_ids
from lib.runtime import InputError, Rows, start
from lib.sampling import add_rows, finish_rows, open_sampler, Sampler
from lib.seeds import server_seed
from lib.servers import NoRoom, read_reply, Reply, ReplyError, Server, strip_thoughts

rollout = stage(2)
RULES = ["--simulator", "rules"]
CHAT = [{"role": "user", "content": "?"}]
PROMPTS = ["A price", "The sum of", "Can you tell me", "Is it"]


def log_of(server):
    path = pathlib.Path(server["log"])
    return read(path) if path.exists() else []


@pytest.fixture(autouse=True)
def few_retries(monkeypatch):
    monkeypatch.setattr(lib.servers, "RETRIES", 1)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    path = tmp_path_factory.mktemp("tasks") / "tasks.jsonl"
    stage(1).main(["--num-tasks", "8", "--out", str(path)])
    return path


def play(tasks, agent, out, *more):
    rollout.main([str(x) for x in ("--tasks", tasks, "--agent", agent, "--out", out, "--max-new-tokens", 60, *more)])
    return read(out)


async def ask(server, chat=CHAT, seed=0, **fields):
    return await server.reply(server.request(chat, 1.0, 8, fields), seed, lambda reply: None)


# --- the protocol

def test_agent_and_simulator_behind_servers_follow_the_protocol(tasks, tmp_path, serve, monkeypatch, capsys):
    """The agent's two servers take turns. All get every parameter, and seeds that differ."""
    monkeypatch.setenv("OPENAI_API_KEY", "the key")
    servers, simulator = [serve("--key", "the key", "--delay-s", 0.05) for _ in range(2)], serve()
    agent = ",".join(server["url"] for server in servers) + "#asker"
    rows = play(tasks, agent, tmp_path / "out", "--simulator", f"{simulator['url']}#counter")
    assert [row["task_id"] for row in rows] == [task_id(task) for task in read(tasks)]
    for row in rows:
        assert [turn["content"] for turn in row["dialogue_history"][1:]] == [
            "What is it?", "I see 2 messages.", "What is it?", "I see 4 messages.",
            f"{backend.MARKER}\ndef f(): return 1"]
        assert row["answer"] == "def f(): return 1" and row["tokenizer"] is None
        assert not any(key in turn for turn in row["dialogue_history"] for key in ("output_ids", "input", "leak"))
    costs, printed = json.loads((tmp_path / "out.args.json").read_text())["costs"], capsys.readouterr().out
    assert costs["generated_tokens"] == 5 * (24 + 16) and costs["seconds"] > 0
    assert "8 dialogues in " in printed and ", 200 tokens generated" in printed
    logs = [log_of(server) for server in servers]
    assert list(map(len, logs)) == [12, 12]
    to_agent, to_simulator = logs[0] + logs[1], log_of(simulator)
    shared = {"top_p": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0, "top_k": -1, "min_p": 0.0,
              "repetition_penalty": 1.0}
    for requests, wanted in ((to_agent, {"temperature": 1.0, "max_tokens": 60, "key": "Bearer the key"}),
                             (to_simulator, {"temperature": 0.0, "max_tokens": 128})):
        assert all((shared | wanted).items() <= request.items() for request in requests)
        assert len({request["seed"] for request in requests}) == len(requests)
    for task in read(tasks):                                        # c reaches the simulator's server alone
        for line in task["ground_truth"].split("\n")[1:]:
            line = json.dumps(line.strip())[1:-1]                   # as it would stand in a request
            assert line not in json.dumps(to_agent) and line in json.dumps(to_simulator)


@pytest.mark.parametrize("model, reasons", [
    ("gpt-4o", False), ("AIDC-AI/Marco-o1", False), ("openai/o3-mini", True), ("gpt-5.1", True)])
def test_parameters_of_reasoning_models(model, reasons):
    server = Server(f"http://nowhere/v1#{model}", 1)
    request = server.request(CHAT, 0.5, 10, {"a": 1})
    keys = {"max_tokens", "temperature", "top_p", "frequency_penalty", "presence_penalty"}
    if reasons:
        keys = {"max_completion_tokens"}
    assert request.keys() - {"model", "messages", "extra_body"} == keys and request["extra_body"] == {"a": 1}
    assert (server.sampling == {}) == reasons


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


# --- what is a reply

def answer(finish_reason="stop", usage=(10, 5), text=None, **message):
    """What the openai client gives, with a text or a message."""
    choice = types.SimpleNamespace(finish_reason=finish_reason)
    if text is None:
        choice.message = types.SimpleNamespace(**message)
    else:
        choice.text, choice.token_ids = text, [1, 2]
    usage = usage and types.SimpleNamespace(prompt_tokens=usage[0], completion_tokens=usage[1])
    return types.SimpleNamespace(choices=[choice], usage=usage)


@pytest.mark.parametrize("given, reply", [
    (dict(content="a"), Reply("a", True, None, 10, 5)),
    (dict(content="a", usage=None), Reply("a", True, None, 0, 0)),
    (dict(content="a", usage=(None, None)), Reply("a", True, None, 0, 0)),
    (dict(content=None), Reply("", True, None, 10, 5)),
    (dict(content="a", reasoning_content="b"), Reply("<think>b</think>a", True, None, 10, 5)),
    (dict(content="a", reasoning="b"), Reply("<think>b</think>a", True, None, 10, 5)),
    (dict(text="a", finish_reason="end_turn"), Reply("a", True, [1, 2], 10, 5)),
    (dict(text="a", finish_reason="length"), Reply("a", False, [1, 2], 10, 5))])
def test_what_is_a_reply(given, reply):
    assert read_reply(answer(**given)) == reply
    assert strip_thoughts(reply.text) in ("a", "")


def test_a_reply_that_says_not_that_it_ended_is_none():
    for finish_reason in ("abort", "content_filter", "error", "tool_calls", "", None):
        with pytest.raises(ValueError, match="finish_reason"):
            read_reply(answer(finish_reason, content="a"))


# --- failures

def test_a_request_that_is_refused_for_another_reason_takes_no_parameter_from_the_others(serve):
    """The first request is refused with top_k, and without: top_k was not the reason."""
    server = serve("--refuse", "bad words")
    opened = Server(f"{server['url']}#asker", 1)

    async def two():
        with pytest.raises(ReplyError, match="400.*This text is not allowed"):
            await ask(opened, [{"role": "user", "content": "bad words"}])
        return await ask(opened)
    assert asyncio.run(two()).text == "What is it?"
    assert [("top_k" in request, request["status"]) for request in log_of(server)] == [
        (True, 400), (False, 400), (True, 200)]


@pytest.mark.parametrize("status, body, is_full", [
    (400, {"error": {"message": "This model's maximum context length is 8192 tokens. You requested 9000."}}, True),
    (400, {"error": {"message": "", "code": "context_length_exceeded"}}, True),
    (400, {"message": "The input (9000 tokens) is longer than the model's context length (8192 tokens)."}, True),
    (400, {"error": {"message": "the request exceeds the available context size"}}, True),
    (422, {"error": "`inputs` tokens + `max_new_tokens` must be <= 4096"}, True),
    (400, {"error": "The decoder prompt (length 9) is longer than the maximum model length of 8."}, True),
    (400, {"error": {"message": "This text is not allowed"}}, False),
    (503, {"error": {"message": "context length of the queue"}}, False)])
def test_which_refusals_say_that_a_prompt_is_too_long(status, body, is_full):
    import httpx
    import openai
    response = httpx.Response(status, json=body, request=httpx.Request("POST", "http://a/v1"))
    error = openai.AsyncOpenAI(api_key="none")._make_status_error_from_response(response)
    assert isinstance(error, openai.APIStatusError) and lib.servers.is_too_long(error) == is_full


def test_a_prompt_that_a_server_has_no_room_for_ends_the_dialogue(tasks, tmp_path, serve, capsys):
    """As with a local model: the agent's last turn counts as in the last round."""
    server = serve("--full", "I see 4 messages")
    url = server["url"]
    with pytest.raises(NoRoom, match="maximum context length"):
        asyncio.run(ask(Server(f"{url}#asker", 1), [{"role": "user", "content": "I see 4 messages"}]))
    for row in play(tasks, f"{url}#asker", tmp_path / "out", "--simulator", f"{url}#counter"):
        assert [turn["content"] for turn in row["dialogue_history"][1:]] == [
            "What is it?", "I see 2 messages.", "What is it?"]
        assert row["no_room"] and row["answer"] == "What is it?"
    assert "8 ended because no further turn fits" in capsys.readouterr().out


def test_a_server_that_dies_in_the_middle_and_comes_back(tasks, tmp_path, serve):
    """The run ends with one line; the same command again rolls out what is missing and asks for nothing else. Of two
    servers one may die."""
    dying = serve("--die-at", 16)
    arguments = ["--tasks", tasks, "--agent", f"{dying['url']}#asker", *RULES, "--concurrency", 2, "--out",
                 tmp_path / "out"]
    line = refused(2, *arguments)
    assert "rows are missing, the first failed with" in line and "Connection error" in line
    assert not (tmp_path / "out").exists()
    finished = [int(row.split(" ")[0]) for row in Partial(tmp_path / "out").read_text().splitlines()]
    assert 2 <= len(finished) <= 5
    costs = json.loads((tmp_path / "out.args.json").read_text())["costs"]
    assert 5 * 13 <= costs["generated_tokens"] <= 5 * 15           # a reply may have been under way
    killed(dying["process"])
    alive = serve(port=dying["port"])
    rollout.main([str(argument) for argument in arguments])
    rows = read(tmp_path / "out")
    assert len(rows) == 8 and len(log_of(alive)) == 3 * (8 - len(finished))
    asked = {request["messages"][1]["content"] for request in log_of(alive)}
    assert asked == {row["task"]["problem_description"] for i, row in enumerate(rows) if i not in finished}
    paid = json.loads((tmp_path / "out.args.json").read_text())["costs"]["generated_tokens"]
    num_asked = len(log_of(alive))
    assert paid == costs["generated_tokens"] + 5 * num_asked
    rows = play(tasks, f"{serve('--die-at', 5)['url']},{alive['url']}#asker", tmp_path / "two", *RULES)
    assert len(rows) == 8 and len(log_of(alive)) - num_asked >= 20


def test_replies_that_stay_empty_are_no_answers_and_many_of_them_end_the_run(tasks, tmp_path, serve):
    server = serve("--empty", 1)
    line = refused(2, "--tasks", tasks, "--agent", f"{server['url']}#asker", *RULES, "--samples", 4, "--concurrency", 2,
                   "--out", tmp_path / "out")
    assert "32 of 32 rows are missing, the first failed with" in line and "empty reply" in line
    seeds = [request["seed"] for request in log_of(server)]
    assert len(seeds) == len(set(seeds)) and 20 * lib.servers.TRIES <= len(seeds) <= 22 * lib.servers.TRIES


def test_bad_servers_are_one_line(tasks, tmp_path, serve, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "right\n")
    url, out = serve("--key", "right")["url"], tmp_path / "out"
    write(tmp_path / "critic.json", [critic_note("value")])
    play_alone = ["--tasks", tasks, *RULES, "--out", out, "--overwrite", "--agent"]
    for agent, message, *more in (
            (url, "written http://A/v1#NAME"), ("http://a/v1,b/v1#m", "several of one model http://A/v1,http"),
            ("http://[::1/v1#m", "no address of a server"), ("http://127.0.0.1:1/v1#m", "nobody answers"),
            (f"{url}#m", "The model `m` does not exist.'}}: no model of this name there"),
            (f"{url}#asker", f"a critic that reads tokens: {url}#asker needs --agent-tokenizer MODEL", "--best-of", 2,
             "--critic", tmp_path)):
        assert message in refused(2, *play_alone, agent, *more)
    monkeypatch.setenv("OPENAI_API_KEY", "wrong")
    assert "the key in OPENAI_API_KEY" in refused(2, *play_alone, f"{url}#asker")
    assert not out.exists()


def test_a_lone_surrogate_is_sent_as_a_question_mark(serve):
    server = serve()
    sampler = open_sampler(f"{server['url']}#asker", "cpu", "float32", 1, None)
    asyncio.run(sampler.sample([{"role": "user", "content": "a \ud800 b ü"}], 1, 1.0, 8, (0, "a", "b")))
    assert log_of(server)[0]["messages"][0]["content"] == "a ? b ü" and sampler.generated_tokens == 5


def test_the_client_is_optional(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "openai", None)
    with pytest.raises(InputError, match="servers need openai: pip install openai"):
        Server("http://a/v1#m", 1)


# --- a model here and behind a server

@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    """A server of the base model without faults, for all tests: the log grows."""
    for serve in serving(tmp_path_factory):
        yield serve("--model", BASE)


@pytest.fixture(scope="module")
def local():
    return open_sampler(str(BASE), "cpu", "float32", 16, 1000)


def samples(sampler, n=3, temperature=0.0):
    """Replies to all PROMPTS, in flight together."""
    async def sample_all():
        requests = []
        for number, prompt in enumerate(PROMPTS):
            requests.append(sampler.sample(prompt, n, temperature, 20, (0, "candidates", number, 0)))
        return await asyncio.gather(*requests)
    return asyncio.run(sample_all())


def test_replies_of_a_local_model(local):
    """By the uniforms of their key, nested in n; ids, text and end belong together; tokens are counted."""
    before, stops = local.generated_tokens, stop_ids(local.model, local.tokenizer)
    replies = samples(local, 3, 1.0)
    for prompt, own in zip(PROMPTS, replies):
        for reply in own:
            assert reply.prompt == prompt and reply.text == local.tokenizer.decode(reply.ids, skip_special_tokens=True)
            assert reply.ended == (reply.ids[-1] in stops) and reply.completion_tokens == len(reply.ids) <= 20
            assert reply.prompt_tokens == len(encode(local.tokenizer, prompt))
    assert local.generated_tokens - before == sum(len(reply.ids) for own in replies for reply in own)
    assert [own[0] for own in replies] == [own[0] for own in samples(local, 1, 1.0)]
    assert len({reply.text for own in replies for reply in own}) > len(PROMPTS)
    with pytest.raises(NoRoom, match="a prompt of .* tokens and 990 new ones are more than the 1,000"):
        asyncio.run(local.sample("A price " * 10, 1, 1.0, 990, (0, "a", "b")))


def test_a_misbehaving_server_changes_no_reply(local, serve, monkeypatch, capsys):
    """Rate limits, busy, empty, aborted, broken and cut replies, ids without an end, a reply that never comes. At
    temperature 0 replies are those that are sampled here. Each request has its prompt's ids, and its key's seed."""
    monkeypatch.setattr(lib.servers, "TIMEOUT_S", 3)
    monkeypatch.setattr(lib.servers, "RETRIES", 9)
    monkeypatch.setattr(lib.servers, "TRIES", 12)
    server = serve("--model", BASE, "--limit", 11, "--busy", 13, "--empty", 9, "--abort", 15, "--broken", 10,
                   "--cut", 7, "--no-end", 5, "--hang-at", 6, "--strict")
    sampler = open_sampler(f"{server['url']}#model", "cpu", "float32", 4, None, load_tokenizer(str(BASE)))
    replies = samples(sampler)
    assert replies == samples(local)
    assert sampler.generated_tokens == sum(len(reply.ids) for own in replies for reply in own)
    requests = log_of(server)
    assert {429, 503, 400, 200} == {request["status"] for request in requests}
    assert {tuple(request["prompt"]) for request in requests} == {
        tuple(encode(local.tokenizer, prompt)) for prompt in PROMPTS}
    assert all(request["return_token_ids"] and request["temperature"] == 0 for request in requests)
    seeds = {server_seed(0, "candidates", number, 0, *more) for number in range(4) for more in ((), (1,), (2,))}
    assert {request["seed"] for request in requests} >= seeds
    printed = capsys.readouterr().out
    assert printed.count("asked without top_k, min_p, repetition_penalty (Error code: 400 - ") == 1


def test_what_ids_must_be():
    tokenizer = load_tokenizer(str(BASE))
    sampler = Sampler(tokenizer=tokenizer, server=Server("http://a/v1#m", 1))
    ids = encode(tokenizer, "What is it?")
    whole = Reply("What is it?", True, [*ids, tokenizer.eos_token_id], len(encode(tokenizer, "A price")), 5)

    def fault_of(**changes):
        return sampler.fault_of(whole._replace(**changes), "A price", may_be_empty=True)
    assert fault_of() is None and fault_of(ended=False, ids=ids) is None
    assert fault_of(ids=ids) == "token ids without the end of the turn"
    with pytest.raises(InputError, match="http://a/v1#m: gives no token ids"):
        fault_of(ids=None)
    with pytest.raises(InputError, match=f"read 99 tokens, where this tokenizer and template make {whole[3]};"):
        fault_of(prompt_tokens=99)


def test_only_a_chat_needs_more_than_thoughts():
    sampler = Sampler(server=Server("http://a/v1#m", 1))
    thought = Reply("<think>A plan</think>", True, None, 1, 1)
    assert sampler.fault_of(thought, None, may_be_empty=True) is None
    assert sampler.fault_of(thought, None, may_be_empty=False) == "empty reply"
    assert "raise the limit of new tokens" in sampler.fault_of(thought._replace(ended=False), None, may_be_empty=False)


# --- rows of a file

def write_rows(out, items, make_row, concurrency=3):
    runtime = start(0)
    rows = Rows(out, runtime)
    failures = add_rows(rows, items, make_row, concurrency, runtime)
    finish_rows(rows, len(items), failures, runtime)
    return read(out)


def test_rows_are_made_on_their_own(tmp_path):
    """A slow one holds back nobody, no more than `concurrency` are in the making; the file is in order."""
    order, flying = [], []

    async def make_row(item):
        flying.append(item)
        assert len(flying) <= 3
        for _ in range(50 if item == 0 else 2):
            await asyncio.sleep(0)
        order.append(item)
        flying.remove(item)
        return {"item": item}
    assert write_rows(tmp_path / "out", range(12), make_row) == [{"item": item} for item in range(12)]
    assert order[-1] == 0 and sorted(order) == list(range(12))


def test_at_most_twice_as_many_wait_to_be_scored_as_are_in_flight(tmp_path):
    waiting, most = 0, 0

    async def make_row(item):
        nonlocal waiting, most
        await asyncio.sleep(0)
        waiting += 1
        most = max(most, waiting)

        async def score():
            nonlocal waiting
            await asyncio.sleep(0.03 if item % 6 else 0.002)
            waiting -= 1
            return {"item": item}
        return score
    assert len(write_rows(tmp_path / "out", range(60), make_row, 4)) == 60 and waiting == 0 and 4 <= most <= 8


def test_an_error_of_the_scorer_ends_the_run_at_once(tmp_path, caplog):
    started = []

    async def score():
        raise ValueError("no sandbox")

    async def make_row(item):
        started.append(item)
        await asyncio.sleep(0.001)
        return score
    with pytest.raises(ValueError, match="no sandbox"):
        write_rows(tmp_path / "out", range(1000), make_row, 2)
    assert len(started) < 20
    gc.collect()
    assert not caplog.records                                       # the error is raised once, and not also printed


def test_after_many_failures_in_a_row_no_further_row_is_begun(tmp_path):
    begun = []

    async def make_row(item):
        begun.append(item)
        if item != 7:
            raise ReplyError("no reply")
        return {}
    with pytest.raises(InputError, match="99 of 100 rows are missing"):
        write_rows(tmp_path / "out", range(100), make_row, 2)
    assert 28 <= len(begun) <= 29


# --- 04 --sampler

@pytest.fixture(scope="module")
def few(workspace, tmp_path_factory):
    """A file of two dialogues."""
    return write(tmp_path_factory.mktemp("few") / "few.jsonl", read(workspace / "offline.jsonl")[:2])


def policy_flags(few, out, *more):
    return ["--method", "sweet", "--critic", "untrained", "--trajectories", few, "--model", BASE, "--data-frac", 1,
            "--num-candidates", 3, "--max-new-tokens", 40, "--max-steps", 1, "--temperature", 0, "--out", out, *more]


@pytest.fixture(scope="module")
def greedy(few, tmp_path_factory):
    """candidates.jsonl, sampled here."""
    out = tmp_path_factory.mktemp("greedy") / "out"
    assert "two equal actions" in refused(4, *policy_flags(few, out))
    return out / "candidates.jsonl"


def test_candidates_of_a_server_are_those_of_this_machine_after_a_kill(few, greedy, tmp_path, clean, serve):
    """It goes on by states, on two ranks then and with two servers at other addresses, which share what is missing."""
    first, out = serve("--model", BASE, "--delay-s", 0.1), tmp_path / "out"
    arguments = policy_flags(few, out, "--concurrency", 3, "--sampler")
    process = begin("04_train_policy.py", *arguments, f"{first['url']}#model", folder=tmp_path)
    partial = Partial(out / "candidates.jsonl")
    while not (partial.exists() and len(partial.read_bytes().splitlines()) > 3):
        time.sleep(0.01)
    assert killed(process) == -signal.SIGKILL
    done = [int(line.split(" ")[0]) for line in partial.read_text().split("\n")[:-1]]
    num_states = len(read(greedy))
    assert 3 < len(done) < num_states and not (out / "candidates.jsonl").exists()
    killed(first["process"])
    before, another = len(log_of(clean)), serve("--model", BASE)
    process = run("04_train_policy.py", *arguments, f"{clean['url']},{another['url']}#model", ranks=2)
    assert process.returncode == 2 and "two equal actions" in process.stderr
    numbers = len(log_of(clean)) - before, len(log_of(another))
    assert sum(numbers) == 3 * (num_states - len(done)) and min(numbers) > 0
    assert (out / "candidates.jsonl").read_bytes() == greedy.read_bytes() and not list(out.glob("*.partial*"))
    assert "made with another sampler" in run("04_train_policy.py", *arguments, f"{clean['url']}#other").stderr


def test_samplers_that_cannot_sample_are_one_line(few, tmp_path, clean):
    line = refused(4, *policy_flags(few, tmp_path / "b", "--sampler", f"{clean['url']}#nobody"))
    assert "404" in line and "no model of this name there, or nothing that continues a prompt" in line
    assert "takes http" in refused(4, *policy_flags(few, tmp_path / "c", "--sampler", BASE))


# --- 02 --best-of

def test_ids_of_a_server_are_kept_and_read_by_a_critic(workspace, critic, tmp_path, serve, monkeypatch):
    """In passes of --max-tokens."""
    limits, score = [], common.score_actions
    monkeypatch.setattr(common, "score_actions", lambda *arguments: (limits.append(arguments[3]), score(*arguments))[1])
    write(tmp_path / "tasks", read(workspace / "tasks.jsonl")[:3])
    server = serve("--model", BASE, "--cut", 9, "--no-end", 10)
    call(2, "--tasks", tmp_path / "tasks", "--agent", f"{server['url']}#model", "--agent-tokenizer", BASE,
         "--max-rounds", 2, "--max-new-tokens", 30, "--best-of", 3, "--critic", critic, "--concurrency", 2,
         "--max-tokens", 1234, "--out", tmp_path / "out")
    rows, counts = read(tmp_path / "out"), collections.Counter()
    assert len(rows) == 3 and len(log_of(server)) >= 3 * sum(row["num_rounds"] for row in rows)
    assert {(row["best_of"], row["critic"]) for row in rows} == {(3, str(critic))}
    tokenizer = load_tokenizer(str(BASE))
    for row in rows:
        turns = [turn for turn in row["dialogue_history"] if turn["role"] == "assistant"]
        assert common.agent_turns(tokenizer, row, counts) == [(turn["input"], turn["output_ids"]) for turn in turns]
        assert all(tokenizer.decode(turn["output_ids"], skip_special_tokens=True) == turn["output"] for turn in turns)
    assert list(counts) == ["as sampled"] and set(limits) == {1234}


def test_a_judge_needs_no_ids(workspace, tmp_path, serve):
    server, tasks = serve("--model", BASE), write(tmp_path / "tasks", read(workspace / "tasks.jsonl")[:2])
    call(2, "--tasks", tasks, "--agent", f"{server['url']}#model", "--max-rounds", 2, "--max-new-tokens", 20,
         "--best-of", 2, "--critic", f"judge:{server['url']}#counter", "--out", tmp_path / "best")
    assert all("prompt" not in request and "return_token_ids" not in request for request in log_of(server))
    assert {request["model"] for request in log_of(server)} == {"model", "counter"}
