"""lib/sampling.py and lib/servers.py: models here and behind OpenAI's protocol, against real server processes
(server.py), and rows of a file; 04 --sampler, and 02 --best-of with an agent behind http://."""
import asyncio
import collections
import gc
import importlib
import json
import pathlib
import shutil
import signal
import sys
import time
import types

import pytest

import common
import lib.servers
from colbench import backend, task_id
from conftest import BASE, begin, call, critic_note, killed, Partial, policy_flags, read, refused, run, turns, write
from lib.load import load_tokenizer
from lib.runtime import InputError, RowFile, start
from lib.sampling import add_rows, finish_rows, open_sampler, Sampler
from lib.seeds import server_seed
from lib.servers import NoRoom, read_reply, Reply, ReplyError, Server
from lib.tokens import agent_turns, decode, encode, stop_ids, strip_thoughts

PROMPTS = ["A price", "The sum of", "Can you tell me", "Is it"]


@pytest.fixture(autouse=True)
def few_retries(monkeypatch):
    monkeypatch.setattr(lib.servers, "RETRIES", 1)


@pytest.fixture
def tasks(data, tmp_path):
    return write(tmp_path / "tasks", read(data / "tasks.jsonl")[:8])


def play(tasks, agent, out, *more):
    play.printed = call(2, "--tasks", tasks, "--agent", agent, "--out", out, "--max-new-tokens", 60, *more)
    return read(out)


def costs_of(out):
    return json.loads(pathlib.Path(f"{out}.args.json").read_text())["costs"]


async def ask(server, text="?"):
    return await server.reply(server.request(turns(text), 1.0, 8, {}), 0, lambda reply: None)


# --- the protocol

def test_agent_and_simulator_behind_servers_follow_the_protocol(tasks, tmp_path, serve, monkeypatch):
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
    costs = costs_of(tmp_path / "out")
    assert costs["generated_tokens"] == 5 * (24 + 16) and costs["seconds"] > 0
    assert "8 dialogues in " in play.printed and ", 200 tokens generated" in play.printed
    logs = [read(server["log"]) for server in servers]
    assert list(map(len, logs)) == [12, 12]
    to_agent, to_simulator = logs[0] + logs[1], read(simulator["log"])
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


@pytest.mark.parametrize("model, keys", [
    *((model, ["frequency_penalty", "max_tokens", "presence_penalty", "temperature", "top_p"])
      for model in ("gpt-4o", "AIDC-AI/Marco-o1")),
    *((model, ["max_completion_tokens"]) for model in ("openai/o3-mini", "gpt-5.1"))])
def test_parameters_of_reasoning_models(model, keys):
    server = Server(f"http://nowhere/v1#{model}", 1)
    request = server.request(turns("?"), 0.5, 10, {"a": 1})
    assert sorted(request.keys() - {"model", "messages", "extra_body"}) == keys and request["extra_body"] == {"a": 1}
    assert (server.sampling == {}) == (len(keys) == 1)


def test_thoughts_stay_with_who_thinks(tasks, tmp_path, serve):
    server = serve()
    rows = play(tasks, f"{server['url']}#thinker", tmp_path / "out", "--simulator", f"{server['url']}#thinker",
                "--max-rounds", 3, "--temperature", 0.5, "--chat-template-args",
                '{"agent": {"enable_thinking": true}}')
    for turn in [turn for row in rows for turn in row["dialogue_history"][1:]]:
        assert turn["content"] == "What should the lowest heat be?" and "secret" in turn["output"]
    assert {row["answer"] for row in rows} == {"What should the lowest heat be?"}
    assert not any("secret" in json.dumps(request["messages"]) for request in read(server["log"]))
    kinds = {(request["temperature"], str(request.get("chat_template_kwargs"))) for request in read(server["log"])}
    assert kinds == {(0.5, "{'enable_thinking': True}"), (0.0, "None")}


@pytest.mark.parametrize("sampled, text, visible", [
    ("plan</think>Which?", "<think>plan</think>Which?", "Which?"), ("</think>Which?", "Which?", "Which?"),
    ("plan</think>Which?", "plan</think>Which?", "Which?"), ("plan", "plan", ""), ("plan", "<think>plan</think>", "")])
def test_thoughts_that_the_prompt_opens_are_told_by_the_ids(sampled, text, visible):
    """Whether the server puts them apart or not. One that is cut in the middle of them says nothing."""
    tokenizer, prompt = load_tokenizer(str(BASE)), "<|user|>Hello<|end|><|assistant|><think>\n"
    sampler, ids = Sampler(tokenizer=tokenizer, server=types.SimpleNamespace(name="a")), encode(tokenizer, sampled)
    reply = Reply(text, False, ids, len(encode(tokenizer, prompt)), len(ids), prompt)
    assert sampler.visible(reply) == visible
    fault = sampler.fault_of(reply._replace(prompt=None), prompt, may_be_empty=False)
    assert fault is None if visible else "only thoughts" in fault


MISTRAL = "[THINK]plan[/THINK]Which?"


@pytest.mark.parametrize("said", [MISTRAL, "<think>plan</think>Which?", "plan Which?", "Which?", "another"])
def test_thoughts_between_special_tokens_are_told_by_the_ids(said):
    """Of a model on this machine; and of a server, which may put thoughts apart or drop their marks."""
    tokenizer, prompt = load_tokenizer(str(BASE)), "<|user|>Hello<|end|><|assistant|>"
    tokenizer.add_special_tokens({"additional_special_tokens": ["[THINK]", "[/THINK]"]})
    ids = [*encode(tokenizer, MISTRAL), tokenizer.eos_token_id]
    assert len(tokenizer) - 2 in ids and decode(tokenizer, ids) == MISTRAL
    reply = Reply(said, True, ids, len(encode(tokenizer, prompt)), len(ids), prompt)
    assert Sampler(tokenizer=tokenizer).visible(reply._replace(text=decode(tokenizer, ids))) == "Which?"
    sampler = Sampler(tokenizer=tokenizer, server=types.SimpleNamespace(name="a"))
    assert sampler.visible(reply) == "Which?"
    fault = sampler.fault_of(reply, prompt, may_be_empty=False)
    assert fault == ("token ids of another text ('Which?', not 'another')" if said == "another" else None)


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
    (dict(text="a", finish_reason="length"), Reply("a", False, [1, 2], 10, 5)),
    *((dict(content="a", finish_reason=reason), None)
      for reason in ("abort", "content_filter", "error", "tool_calls", "", None))])
def test_what_is_a_reply(given, reply):
    if reply is None:
        with pytest.raises(ValueError, match="finish_reason"):
            read_reply(answer(**given))
    else:
        assert read_reply(answer(**given)) == reply
        assert strip_thoughts(reply.text) in ("a", "")


# --- failures

def test_a_request_that_is_refused_for_another_reason_takes_no_parameter_from_the_others(serve):
    """The first request is refused with top_k, and without: top_k was not the reason."""
    server = serve("--refuse", "bad words", "--full", "long words")
    opened = Server(f"{server['url']}#asker", 1)

    async def ask_three():
        with pytest.raises(ReplyError, match="400.*This text is not allowed"):
            await ask(opened, "bad words")
        with pytest.raises(NoRoom, match="maximum context length"):
            await ask(opened, "long words")
        return await ask(opened)
    assert asyncio.run(ask_three()).text == "What is it?"
    assert [("top_k" in request, request["status"]) for request in read(server["log"])] == [
        (True, 400), (False, 400), (True, 400), (True, 200)]


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
    import openai
    client = openai.AsyncOpenAI(api_key="none")
    httpx = importlib.import_module(type(client.base_url).__module__.partition(".")[0])      # openai 3 has httpx2
    response = httpx.Response(status, json=body, request=httpx.Request("POST", "http://a/v1"))
    error = client._make_status_error_from_response(response)
    assert isinstance(error, openai.APIStatusError) and lib.servers.is_too_long(error) == is_full


def test_a_prompt_that_a_server_has_no_room_for_ends_the_dialogue(tasks, tmp_path, serve):
    """As with a local model: the agent's last turn counts as in the last round. A lone surrogate is sent as "?"."""
    write(tasks, [{**read(tasks)[0], "problem_description": "a \ud800 b ü"}])
    server = serve("--full", "I see 4 messages")
    [row] = play(tasks, f"{server['url']}#asker", tmp_path / "out", "--simulator", f"{server['url']}#counter")
    assert [turn["content"] for turn in row["dialogue_history"][1:]] == [
        "What is it?", "I see 2 messages.", "What is it?"]
    assert row["no_room"] and row["answer"] == "What is it?"
    assert read(server["log"])[0]["messages"][1]["content"] == "a ? b ü"


def test_a_server_that_dies_in_the_middle_and_comes_back(tasks, tmp_path, serve):
    """The run ends with one line; the same command again rolls out what is missing and asks for nothing else. Of two
    servers one may die."""
    dying = serve("--die-at", 16)
    arguments = ["--tasks", tasks, "--agent", f"{dying['url']}#asker", "--concurrency", 2, "--out", tmp_path / "out"]
    line = refused(2, *arguments)
    assert "rows are missing, the first failed with" in line and "Connection error" in line
    assert not (tmp_path / "out").exists()
    finished = [int(row.split(" ")[0]) for row in Partial(tmp_path / "out").read_text().splitlines()]
    assert 2 <= len(finished) <= 5
    paid = costs_of(tmp_path / "out")["generated_tokens"]
    assert 5 * 13 <= paid <= 5 * 15                                # a reply may have been under way
    killed(dying["process"])
    alive = serve(port=dying["port"])
    call(2, *arguments)
    rows, requests = read(tmp_path / "out"), read(alive["log"])
    assert len(rows) == 8 and len(requests) == 3 * (8 - len(finished))
    assert {request["messages"][1]["content"] for request in requests} == {
        row["task"]["problem_description"] for i, row in enumerate(rows) if i not in finished}
    assert costs_of(tmp_path / "out")["generated_tokens"] == paid + 5 * len(requests)
    rows = play(tasks, f"{serve('--die-at', 5)['url']},{alive['url']}#asker", tmp_path / "two")
    assert len(rows) == 8 and len(read(alive["log"])) - len(requests) >= 20


def test_replies_that_stay_empty_are_no_answers_and_many_of_them_end_the_run(tasks, tmp_path, serve):
    server = serve("--empty", 1)
    words = ["--tasks", tasks, "--agent", f"{server['url']}#asker", "--samples", 4, "--concurrency", 2]
    line = refused(2, *words, "--out", tmp_path / "out")
    assert "32 of 32 rows are missing, the first failed with" in line and "empty reply" in line
    seeds = [request["seed"] for request in read(server["log"])]
    assert len(seeds) == len(set(seeds)) and 20 * lib.servers.TRIES <= len(seeds) <= 22 * lib.servers.TRIES


def test_bad_servers_are_one_line(tasks, tmp_path, serve, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "right\n")
    url, out = serve("--key", "right")["url"], tmp_path / "out"
    critic = shutil.copytree(BASE, tmp_path / "critic")
    write(critic / "critic.json", [critic_note("value")])
    play_alone = ["--tasks", tasks, "--out", out, "--overwrite", "--agent"]
    for agent, message, *more in (
            (url, "write a server as http://A/v1#NAME"), ("http://a/v1,b/v1#m", "several of one model as http://A/v1,"),
            ("http://[::1/v1#m", "not a server address"), ("http://127.0.0.1:1/v1#m", "does not answer"),
            (f"{url}#m", "The model `m` does not exist.'}: the server has no model of this name"),
            (f"{url}#asker", f"a critic that reads tokens: {url}#asker needs --agent-tokenizer MODEL", "--best-of", 2,
             "--critic", critic)):
        assert message in refused(2, *play_alone, agent, *more)
    monkeypatch.setenv("OPENAI_API_KEY", "wrong")
    assert "the key in OPENAI_API_KEY" in refused(2, *play_alone, f"{url}#asker")
    monkeypatch.setitem(sys.modules, "openai", None)
    assert "servers need openai: pip install openai" in refused(2, *play_alone, f"{url}#asker")
    assert not out.exists()


# --- a model here and behind a server

@pytest.fixture(scope="module")
def local():
    return open_sampler(str(BASE), "cpu", "float32", 16, 1000)


def samples(sampler, temperature=0.0):
    """Replies to all PROMPTS, in flight together."""
    async def sample_all():
        requests = []
        for number, prompt in enumerate(PROMPTS):
            requests.append(sampler.sample(prompt, 3, temperature, 20, (0, "candidates", number, 0)))
        return await asyncio.gather(*requests)
    return asyncio.run(sample_all())


def test_replies_of_a_local_model(local):
    """Ids, text and end belong together; tokens are counted. (What is sampled, nested in n: test_02.py.)"""
    before, stops = local.generated_tokens, stop_ids(local.model, local.tokenizer)
    replies = samples(local, 1.0)
    for prompt, own in zip(PROMPTS, replies):
        for reply in own:
            assert reply.prompt == prompt and reply.text == local.tokenizer.decode(reply.ids, skip_special_tokens=True)
            assert reply.ended == (reply.ids[-1] in stops) and reply.completion_tokens == len(reply.ids) <= 20
            assert reply.prompt_tokens == len(encode(local.tokenizer, prompt))
    assert local.generated_tokens - before == sum(len(reply.ids) for own in replies for reply in own)
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
    requests = read(server["log"])
    assert {429, 503, 400, 200} == {request["status"] for request in requests}
    assert {tuple(request["prompt"]) for request in requests} == {
        tuple(encode(local.tokenizer, prompt)) for prompt in PROMPTS}
    assert all(request["return_token_ids"] and request["temperature"] == 0 for request in requests)
    seeds = {server_seed(0, "candidates", number, 0, *more) for number in range(4) for more in ((), (1,), (2,))}
    assert {request["seed"] for request in requests} >= seeds
    printed = capsys.readouterr().out
    assert printed.count("requests omit top_k, min_p, repetition_penalty ({'message': ") == 1


def test_what_ids_must_be():
    tokenizer = load_tokenizer(str(BASE))
    sampler = Sampler(tokenizer=tokenizer, server=Server("http://a/v1#m", 1))
    ids = encode(tokenizer, "What is it?")
    whole = Reply("What is it?", True, [*ids, tokenizer.eos_token_id], len(encode(tokenizer, "A price")), 5)

    def fault_of(may_be_empty=True, **changes):
        return sampler.fault_of(whole._replace(**changes), "A price", may_be_empty)
    assert fault_of() is None and fault_of(ended=False, ids=ids) is None
    assert fault_of(ids=ids) == "token ids without the end of the turn"
    with pytest.raises(InputError, match="http://a/v1#m: returns no token ids"):
        fault_of(ids=None)
    with pytest.raises(InputError, match=f"read 99 prompt tokens, but this tokenizer and template give {whole[3]};"):
        fault_of(prompt_tokens=99)
    sampler.tokenizer, thought = None, "<think>A plan</think>"         # only a chat needs more than thoughts
    assert fault_of(text=thought) is None and fault_of(False, text=thought) == "empty reply"
    assert "raise the limit of new tokens" in fault_of(False, text=thought, ended=False)


# --- rows of a file

def write_rows(out, items, make_row, concurrency):
    runtime = start(0)
    rows = RowFile(out, runtime)
    failures = add_rows(rows, items, make_row, concurrency)
    finish_rows(rows, len(items), failures)
    return read(out)


def test_what_is_missing_is_shared_out_evenly_in_groups(tmp_path):
    made = []

    async def make_row(item):
        return made.append(item)
    for rank in range(2):
        runtime = start(0)._replace(rank=rank, world_size=2)
        rows = RowFile(tmp_path / "out", runtime)
        rows.done = {number for number in range(24) if number // 3 % 2}        # all of what was rank 1's
        add_rows(rows, range(24), make_row, 1, group=3)
    assert made == [0, 1, 2, 12, 13, 14, 6, 7, 8, 18, 19, 20]


def test_rows_are_made_and_scored_on_their_own(tmp_path):
    """A slow one holds back nobody, and the file is in order. At most `concurrency` of them are in the making, and
    twice as many wait to be scored."""
    made, waiting, num_making, num_waiting, others_made = [], set(), [0], [0], asyncio.Event()

    async def make_row(item):
        num_making.append(num_making[-1] + 1)
        await (asyncio.wait_for(others_made.wait(), 60) if item == 0 else asyncio.sleep(0))
        num_making.append(num_making[-1] - 1)
        made.append(item)
        if len(made) == 59:
            others_made.set()
        waiting.add(item)
        num_waiting.append(len(waiting))

        async def score():
            await asyncio.sleep(0.03 if item % 6 else 0.002)
            waiting.remove(item)
            return {"item": item}
        return score
    assert write_rows(tmp_path / "out", range(60), make_row, 4) == [{"item": item} for item in range(60)]
    assert made[-1] == 0 and sorted(made) == list(range(60)) and not waiting
    assert max(num_making) == 4 and 4 <= max(num_waiting) <= 8


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

def test_candidates_of_a_server_are_those_of_this_machine_after_a_kill(workspace, tmp_path, serve):
    """It goes on by states, on two ranks then and with two servers at other addresses, which share what is missing."""
    write(tmp_path / "offline.jsonl", read(workspace / "offline.jsonl")[:2])

    def flags(name, *more):
        return policy_flags(tmp_path, "sweet", tmp_path / name, "--critic", "untrained", "--data-frac", 1,
                            "--num-candidates", 3, "--max-new-tokens", 40, "--temperature", 0, *more)
    assert "have equal advantages" in refused(4, *flags("here"))
    here, out = tmp_path / "here" / "candidates.jsonl", tmp_path / "out"
    first, arguments = serve("--model", BASE, "--delay-s", 0.1), flags("out", "--concurrency", 3, "--sampler")
    process = begin("04_train_policy.py", *arguments, f"{first['url']}#model", folder=tmp_path)
    partial = Partial(out / "candidates.jsonl")
    while not (partial.exists() and partial.read_bytes().count(b"\n") > 3):
        time.sleep(0.01)
    assert killed(process) == -signal.SIGKILL
    num_done, num_states = len(partial.read_text().split("\n")) - 1, len(read(here))
    assert 3 < num_done < num_states and not (out / "candidates.jsonl").exists()
    killed(first["process"])
    servers = [serve("--model", BASE) for _ in range(2)]
    urls = [server["url"] for server in servers]
    process = run("04_train_policy.py", *arguments, f"{','.join(urls)}#model", ranks=2)
    assert process.returncode == 2 and "have equal advantages" in process.stderr
    numbers = [len(read(server["log"])) for server in servers]
    assert sum(numbers) == 3 * (num_states - num_done) and min(numbers) > 0
    assert (out / "candidates.jsonl").read_bytes() == here.read_bytes() and not list(out.glob("*.partial*"))
    assert "made with another sampler" in run("04_train_policy.py", *arguments, f"{urls[0]}#other").stderr
    line = refused(4, *flags("b", "--sampler", f"{urls[0]}#nobody"))
    assert "404" in line and "the server has no model of this name, or cannot continue a prompt" in line
    assert "does not answer" in run("04_train_policy.py", *arguments, f"{first['url']}#model", "--overwrite").stderr
    assert (out / "candidates.jsonl").exists()                       # nothing is lost


# --- 02 --best-of

def test_ids_of_a_server_are_kept_and_read_by_a_critic_and_a_judge_needs_none(
        tasks, critic, tmp_path, serve, monkeypatch):
    monkeypatch.setattr(lib.servers, "RETRIES", 3)                   # a request may be cut twice
    limits, score = [], common.TextCritic.score_actions
    monkeypatch.setattr(common.TextCritic, "score_actions",
                        lambda critic, states: (limits.append(critic.max_tokens), score(critic, states))[1])
    write(tasks, read(tasks)[:3])
    server, clean = serve("--model", BASE, "--cut", 9, "--no-end", 10), serve("--model", BASE)
    words = ["--tasks", tasks, "--max-rounds", 2, "--max-new-tokens", 30, "--concurrency", 2]
    printed = call(2, *words, "--agent", f"{server['url']}#model", "--agent-tokenizer", BASE, "--best-of", 3,
                   "--critic", critic, "--reference-sees-c", "no", "--max-tokens", 1234, "--out", tmp_path / "out")
    assert f"{critic}: scores are log p(a|o, c) - log p_ref(a|o), a mean" in printed
    rows, counts = read(tmp_path / "out"), collections.Counter()
    assert len(rows) == 3 and len(read(server["log"])) >= 3 * sum(row["num_rounds"] for row in rows)
    assert {(row["best_of"], row["critic"]) for row in rows} == {(3, str(critic))}
    tokenizer = load_tokenizer(str(BASE))
    for row in rows:
        row_turns = row["dialogue_history"][1::2]
        sampled = [(turn["input"], turn["output_ids"]) for turn in row_turns]
        assert agent_turns(tokenizer, row, counts) == sampled
        assert all(tokenizer.decode(turn["output_ids"], skip_special_tokens=True) == turn["output"]
                   for turn in row_turns)
    assert list(counts) == ["as sampled"] and set(limits) == {1234}
    call(2, *words, "--agent", f"{clean['url']}#model", "--best-of", 2, "--critic", f"judge:{clean['url']}#counter",
         "--out", tmp_path / "best")
    requests = read(clean["log"])
    assert all("prompt" not in request and "return_token_ids" not in request for request in requests)
    assert {request["model"] for request in requests} == {"model", "counter"}
