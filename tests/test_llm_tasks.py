"""01_generate_tasks.py --source llm: what a prepared model says becomes tasks, or reasons why not. The one real model
here is the shipped models/tiny, whose replies are all rejected; SmolLM2-135M writes no valid task either."""
import asyncio
import gzip
import json
import types

import pytest

from colbench import written
from conftest import call, read, refused, run, stage
from lib.runtime import InputError
from lib.tokens import strip_thoughts

generate_tasks = stage(1)

CAKE = """def cake_price(layers, guests):
    \"\"\"What a cake costs.\"\"\"
    price = 12 + 7 * layers
    if guests > 20:
        price = cake_price(layers, 20) + 3 * (guests - 20)
    return price"""
CAKE_WANTED = "Our bakery needs the price of a cake.\ndef cake_price(layers, guests):"
CAKE_TESTS = [f"cake_price({layers}, {guests})" for layers in (1, 2) for guests in (4, 20, 21, 30, 50)]
OPERA = "The seats of an opera house in winter, for which a rule is wanted: `cake_price(layers, guests)`"
TIDE = """def tide_words(hours):
    return ["low" if hour % 12 < 5 else "high" for hour in hours if hour >= 0]"""
TIDE_WANTED = "Tell me the state of the tide at several hours.\n\n    def tide_words(hours: list) -> list:"
TIDE_TESTS = [f"tide_words([{hour}, {hour + 3}])" for hour in range(-1, 9)]


def wrote(code=CAKE, description=CAKE_WANTED, tests=CAKE_TESTS):
    return json.dumps({"code": code, "description": description, "tests": tests})


def named(code, name):
    """A reply whose function takes one number, with ten calls of it."""
    return wrote(code, f"A number for {name}.\n{code.splitlines()[-2]}", [f"{name}({i})" for i in range(10)])


ATTEMPTS = [                                                   # (reply, what becomes of it)
    (wrote(), "kept"),
    ("I would rather talk about cakes.", "no JSON object"),
    ("```json\n" + wrote(CAKE.replace("12", "13"), OPERA, CAKE_TESTS + ["cake_price(9, 9)"]) + "\n```", "kept"),
    ('{"code": "def f(x):\\n    return x", "descr', "no JSON object"),
    (wrote(tests=CAKE_TESTS[:9] + ["cake_price( 1,4 )"]), "too few tests: 9"),
    (named("import random\ndef lucky(n):\n    return random.random() + n", "lucky"), "random: test1: "),
    (named("def constant(n):\n    return n * 0", "constant"), "vacuous: every test gives 0"),
    (named("def crash(n):\n    return 1 // n", "crash"), "reference fails: test1: ZeroDivisionError"),
    (named("def order(n):\n    return list({'a%d' % n, 'b', 'c', 'd'})", "order"), "order of a set: other results"),
    (wrote(CAKE.replace("12", "14")), "near duplicate: 0.83 of the word triples of a kept task and its own"),
    (wrote(CAKE.replace("layers", "layers: int", 1).replace("What", "How much"), "A sum: `cake_price(layers, guests)`")
     .replace("cake_price", "f"), "the body of a kept task"),
    (wrote(description="price = 12 + 7*layers, more for many.\n" + CAKE_WANTED),
     "code in the description: price=12+7*layers"),
    (wrote(TIDE, TIDE_WANTED, {f"test{i}": call for i, call in enumerate(TIDE_TESTS)}), "kept")]
REPLIES = [reply for reply, _ in ATTEMPTS]


@pytest.fixture
def sampler(monkeypatch):
    """A model whose replies are taken from a list that a test fills, in their order; `chats` are kept."""
    sampler = types.SimpleNamespace(replies=[], chats=[])

    async def sample(prompt, n, temperature, max_new_tokens, key):
        await asyncio.sleep(0)
        sampler.chats.append((prompt[0]["content"], temperature, key))
        reply = sampler.replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        return [types.SimpleNamespace(text=reply, ended=True, completion_tokens=10, prompt=None)]

    sampler.sample = sample
    monkeypatch.setattr(generate_tasks, "open_sampler", lambda *options: sampler)
    return sampler


def arguments(out, *more):
    return ["--source", "llm", "--model", "http://localhost:1/v1#fake", "--concurrency", 4, "--out", out, *more]


def test_what_becomes_of_replies(sampler, tmp_path):
    (tmp_path / "seeds").write_text("About bees.\nIn two lines.\n\nAbout trees.\n")
    sampler.replies = REPLIES + [wrote(TIDE.replace("12", "6"))] * 3             # the last block is not needed whole
    printed = call(1, *arguments(tmp_path / "t.jsonl", "--num-tasks", 3, "--seeds", tmp_path / "seeds", "--temperature",
                                 0.5))
    tasks, rejected = read(tmp_path / "t.jsonl"), read(tmp_path / "t.rejected.jsonl")
    assert [(task["attempt"], task["ground_truth"], task["problem_description"]) for task in tasks] == [
        (0, CAKE, CAKE_WANTED), (2, CAKE.replace("12", "13"), OPERA), (12, TIDE, TIDE_WANTED)]
    assert [list(task["test_cases"].values()) for task in tasks] == [CAKE_TESTS, CAKE_TESTS, TIDE_TESTS]
    assert list(tasks[0]["test_cases"]) == [f"test{i}" for i in range(1, 11)]
    outcomes = {row["attempt"]: row["reply"] for row in rejected}
    assert outcomes == {i: reply for i, (reply, reason) in enumerate(ATTEMPTS) if reason != "kept"}
    assert all(row["reason"].startswith(ATTEMPTS[row["attempt"]][1]) for row in rejected)
    assert {path.name for path in tmp_path.iterdir()} == {"t.jsonl", "t.jsonl.args.json", "t.rejected.jsonl", "seeds"}
    assert ("13 attempts: 3 kept, 2 no JSON object, 1 too few tests, 1 random, 1 vacuous, 1 reference fails, 1 order "
            "of a set, 1 near duplicate, 1 the body of a kept task, 1 code in the description\n") in printed
    assert json.loads((tmp_path / "t.jsonl.args.json").read_text())["costs"]["generated_tokens"] == 130
    texts, temperatures, seeds = zip(*sampler.chats)
    assert sum("About bees.\nIn two lines.\n\n" in text for text in texts) == 8 and len(texts) == 16
    assert {row["seed_text"] for row in rejected} == {"About bees.\nIn two lines.", "About trees."}
    assert len(set(seeds)) == 16 and set(temperatures) == {0.5}
    assert "3 tasks, 30 tests: no finding" in call(1, "--check", tmp_path / "t.jsonl")


def test_other_splits_are_counted_apart(sampler, tmp_path):
    sampler.replies = [REPLIES[i] for i in (0, 1, 2, 12)]
    line = refused(1, *arguments(tmp_path / "t.jsonl", "--num-tasks", 1, "--split", "test", "--max-attempts", 4))
    assert "0 of 1 tasks kept (3 of another split, 1 no JSON object; see " in line
    assert [row["attempt"] for row in read(tmp_path / "t.rejected.jsonl")] == [1]


FEW = [REPLIES[i] for i in (0, 1, 3, 4, 2, 11, 12)]                              # of which 0, 4 and 6 are kept


def test_neither_batches_nor_a_server_that_dies_nor_too_few_attempts_change_the_file(sampler, tmp_path):
    sampler.replies = list(FEW)
    call(1, *arguments(tmp_path / "whole.jsonl", "--num-tasks", 3, "--concurrency", 7))
    asked = [seed for _, _, seed in sampler.chats]
    command = arguments(tmp_path / "t.jsonl", "--num-tasks", 3, "--max-attempts")
    sampler.replies, sampler.chats[:] = FEW[:5] + [InputError("the server died")], []
    assert refused(1, *command, 6) == "the server died"
    assert not (tmp_path / "t.jsonl").exists() and not (tmp_path / "t.rejected.jsonl").exists()
    sampler.replies, sampler.chats[:] = FEW[5:], []
    assert refused(1, *command, 6) == (
        "--max-attempts 6: 2 of 3 tasks kept (2 kept, 2 no JSON object, 1 too few tests, 1 code in the description; "
        f"see {tmp_path / 't.rejected.jsonl'}); the same command with a higher value continues from here")
    assert len(read(tmp_path / "t.rejected.jsonl")) == 4 and not (tmp_path / "t.jsonl").exists()
    call(1, *command, 7)
    assert [seed for _, _, seed in sampler.chats] == asked[5:]
    assert [task["attempt"] for task in read(tmp_path / "t.jsonl")] == [0, 4, 6]
    for ending in ("jsonl", "rejected.jsonl"):
        assert (tmp_path / f"t.{ending}").read_bytes() == (tmp_path / f"whole.{ending}").read_bytes()
    call(1, *command, 7)                                                                           # done: asks nothing


def test_a_local_model_on_one_rank_or_two(tmp_path):
    flags = ["--source", "llm", "--model", "models/tiny", "--num-tasks", 1, "--max-attempts", 3, "--concurrency", 2,
             "--max-new-tokens", 30, "--out"]
    line = refused(1, *flags, tmp_path / "1.jsonl")
    assert "--max-attempts 3: 0 of 1 tasks kept (" in line
    process = run("01_generate_tasks.py", *flags, tmp_path / "2.jsonl", ranks=2)
    assert process.returncode == 2 and "Traceback" not in process.stderr, process.stderr
    assert process.stderr.splitlines()[-1] == f"error: {line}".replace("1.rejected", "2.rejected")
    rejected = read(tmp_path / "1.rejected.jsonl")
    assert rejected == read(tmp_path / "2.rejected.jsonl") and len({row["reply"] for row in rejected}) == 3


WRITTEN = {"code": "def f(x):\n    return {x: [1]}", "description": "Say \"hi\".\ndef f(x):",
           "tests": ["f(1)", "f('a')"]}


@pytest.mark.parametrize("reply", [
    json.dumps(WRITTEN),
    f"Here is {{my}} idea:\n```json\n{json.dumps(WRITTEN, indent=2)}\n```\nI hope {{it}} helps.",
    f"<think>{{\"code\": \"wrong\"}}</think>{json.dumps(WRITTEN)}",
    f"{{\"code\": \"a draft\"}}</think>{json.dumps(WRITTEN)}",
    json.dumps(WRITTEN).removesuffix("]}") + ",\n ] ,}",                                              # commas too many
    json.dumps(WRITTEN).replace("\\n", "\n"),                                                  # line breaks in strings
    repr(WRITTEN),                                                                                     # single quotes
    '{"code": """def f(x):\n'
    '    return {x: [1]}""", "description": \'Say "hi".\\ndef f(x):\', "tests": ("f(1)", "f(\'a\')")}'],
    ids=["plain", "fence", "thought", "half a thought", "commas", "line breaks", "python", "triple quotes"])
def test_replies_are_read_tolerantly(reply):
    read_reply = written.parse_reply(strip_thoughts(reply))
    assert {**read_reply, "tests": list(read_reply["tests"])} == WRITTEN


@pytest.mark.parametrize("reply", [
    "", "{}", '{"a": 1}', '["code"]', '{"code": "def f(x):', "{'code': open('x')}", "{" * 9999, '{"code": ' * 3000,
    "<think>" + json.dumps(WRITTEN)], ids=range(9))
def test_replies_without_an_object(reply):
    reply = strip_thoughts(reply)                                   # as 01 does before it reads them
    assert written.parse_reply(reply) is None
    assert written.written_task(reply, True) == "no JSON object"
    assert written.written_task(reply, False) == "cut by --max-new-tokens"


@pytest.mark.parametrize("changed, reason", [
    ({"description": " "}, "no description"), ({"description": ["a"]}, "no description"), ({"code": None}, "no code"),
    ({"code": "def f(x) return x"}, "code is no Python: expected ':' (<unknown>, line 1)"),
    ({"code": CAKE + "\n" * 44 + "    # end"}, None),
    ({"code": CAKE + "\n" * 45 + "    # end"}, "too many lines: 51"),
    ({"code": f"```python\n{CAKE}\n```"}, None), ({"code": CAKE + "\ndef f(x):\n    return x"}, None),
    *(({"description": text}, "no signature in the description") for text in (
        "The price of a cake, please.", "A price.\ndef cake_price(guests, layers):",
        "A price.\ndef price(layers, guests):")),
    ({"description": "A price: cake_price(layers: int = max(1, 2), guests=(3)) -> int"}, None),
    ({"description": "A price, if guests > 20 higher.\n" + CAKE_WANTED}, "code in the description: ifguests>20"),
    ({"description": "What a cake costs. Return price.\n" + CAKE_WANTED}, None),                     # its docstring
    ({"tests": None}, "too few tests: 0"), ({"tests": 10}, "too few tests: 0"),
    ({"tests": CAKE_TESTS[:9]}, "too few tests: 9"),
    ({"tests": CAKE_TESTS + [" cake_price(9,9) "]}, None),
    *(({"tests": CAKE_TESTS + [test]}, f"a test is no call of the function: {test}") for test in (
        "cake_price(1, 4) == 19", "print(cake_price(1, 4))", 7))])
def test_reasons_before_anything_runs(changed, reason):
    task = written.written_task(wrote(**changed), True)
    assert (task if isinstance(task, str) else None) == reason
    assert reason or list(task["test_cases"].values()) == CAKE_TESTS


@pytest.mark.parametrize("name, content, expected", [
    ("a.txt", b"one\nand more\n\n \ntwo", ["one\nand more", "two"]), ("a.txt", b"x" * 3000, ["x" * 2000]),
    ("a.jsonl", b'{"text": "one\\n\\ntwo", "id": 3}\n{"text": " "}\n{"text": "three"}\n', ["one\n\ntwo", "three"]),
    ("packed", gzip.compress(b'{"text": "one"}', mtime=0), ["one"]),
    ("a.jsonl", b'{"text": "one"}\n{"words": 3}\n', ':2: missing "text"'), ("a.txt", b" \n\n", ": contains no text"),
    ("a.txt", b"\xff", ": not UTF-8 text (")])
def test_seed_texts_or_the_line_that_says_why_there_are_none(name, content, expected, tmp_path):
    (tmp_path / name).write_bytes(content)
    if isinstance(expected, list):
        assert generate_tasks.read_seed_texts(tmp_path / name) == expected
    else:
        line = refused(1, *arguments(tmp_path / "out" / "t.jsonl", "--seeds", tmp_path / name))
        assert line.startswith(f"{tmp_path / name}{expected}") and not (tmp_path / "out").exists()


@pytest.mark.parametrize("split, attempts", [("all", 200), ("train", 250), ("test", 2000)])
def test_default_of_max_attempts(split, attempts):
    flags = ["--source", "llm", "--model", "m", "--num-tasks", "10", "--split", split, "--out", "t"]
    assert generate_tasks.parse_args(flags).max_attempts == attempts
