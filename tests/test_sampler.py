"""lib/sampling.py: the same replies from a model here and from servers (server.py), rows of a file, bad input; 04
--sampler and 02 --best-of with an agent behind http://."""
import asyncio
import collections
import gc
import signal
import time

import pytest
from test_servers import few_retries, log_of  # noqa: F401

import common
import lib.servers
from conftest import begin, call, killed, Partial, read, refused, ROOT, run, serving, stage, write
from lib.models import encode, load_tokenizer, stop_ids
from lib.runtime import InputError, Rows, start
from lib.sampling import add_rows, finish_rows, open_sampler, Sampler
from lib.seeds import server_seed
from lib.servers import NoRoom, Reply, ReplyError

rollout = stage(2)
BASE = ROOT / "models" / "tiny"
PROMPTS = ["A price", "The sum of", "Can you tell me", "Is it"]


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


# --- replies

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
    sampler = Sampler(tokenizer=tokenizer, server=lib.servers.Server("http://a/v1#m", 1))
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
    sampler = Sampler(server=lib.servers.Server("http://a/v1#m", 1))
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
    return [str(x) for x in ("--method", "sweet", "--critic", "untrained", "--trajectories", few, "--model", BASE,
                             "--data-frac", 1, "--num-candidates", 3, "--max-new-tokens", 40, "--max-steps", 1,
                             "--temperature", 0, "--out", out, *more)]


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
