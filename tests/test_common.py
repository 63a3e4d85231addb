"""common.py: dialogue tokens as literal arrays, log-probabilities, what is read of trajectories, pairs, devices."""
import hashlib
import json
import os
import re
import shutil
import subprocess

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from transformers import LlamaConfig, LlamaForCausalLM

import common
from colbench import backend, Domain
from compare import token_logps_after
from conftest import BASE, ROOT, turns, write
from lib import data, tokens
from lib.data import read_tasks, read_trajectories
from lib.engine import Engine
from lib.fast import WIDTH_STEP
from lib.load import load_tokenizer
from lib.logps import action_outputs, ActionModel, collate, HeadModel, Sequence
from lib.runtime import InputError

U, A, E = "<|user|>", "<|assistant|>", "<|end|>"
PROMPT = backend.agent_system
TASK = {"problem_description": "f", "ground_truth": "def f(): pass", "test_cases": {"1": "f()"}}
HISTORY = turns("a", "b")
PAGE = {"problem_description": "a page", "ground_truth": "<p>"}


def ids_of(tokenizer, *tokens):
    return tokenizer.convert_tokens_to_ids(list(tokens))


def test_a_system_prompt_may_be_empty(tiny, tmp_path, capsys):
    """A model's folder keeps the one that most trajectories have (and with what arguments: test_prompts.py)."""
    rows = [{"task": TASK, "dialogue_history": HISTORY, **more} for more in ({"system_prompt": ""}, {})]
    assert tokens.shown_system(rows[0]) == "" and tokens.shown_system(rows[1]) == tokens.our_system(rows[1]) != ""
    tokens.note_prompt(tmp_path, [rows[1], rows[0], rows[0]])
    assert common.read_json(tmp_path / "agent.json", tokens.AGENT) == {"system_prompt": "", "chat_template_args": {}}
    tokens.check_prompt(str(tmp_path), tiny[1], "Other", {})       # this template shows none, so nothing differs
    assert "was trained" not in capsys.readouterr().out


@pytest.mark.parametrize("template", [
    "{{ messages }}\r\n?\r!\n", {"tool_use": "{{ tools }}\r\n", "default": "?", "a": ""}, {"default": "\r\n?"}],
    ids=["line ends", "named", "one name"])
def test_a_saved_tokenizer_keeps_its_name(tmp_path, template):
    """Also where names come in another order. A single text, with plain line ends, is hashed as it is."""
    tokenizer, names = load_tokenizer(str(BASE)), set()
    content = json.dumps([sorted(tokenizer.get_vocab().items()), tokenizer.chat_template])
    assert tokens.tokenizer_name(tokenizer) == hashlib.sha256(content.encode()).hexdigest()[:16]
    plain = tokens.tokenizer_name(tokenizer)
    orders = [template]
    if isinstance(template, dict):
        orders.append(dict(reversed(template.items())))
    for number, order in enumerate(orders):
        tokenizer = load_tokenizer(str(BASE))
        tokenizer.chat_template = order
        tokenizer.save_pretrained(tmp_path / str(number))
        names |= {tokens.tokenizer_name(tokenizer), tokens.tokenizer_name(load_tokenizer(str(tmp_path / str(number))))}
    assert len(names) == 1 and plain not in names


def test_every_text_survives_the_tiny_tokenizer(tiny):
    """A word is one token, in a reply and in code."""
    _, tokenizer = tiny
    for text in ("Please use 12 for the fee.\ndef f(x):\n    return x[:3] + \"-\"", "Zwölf  façades, 99.5 % ▲ 漢字!",
                 "a b  c\n\n d",
                 "it's 3x_4 __init__(self)", " leading and trailing "):
        assert tokenizer.decode(tokens.encode(tokenizer, text)) == text
    for text in ("Please use 12 for the basic fee.", "    return 12\n"):
        assert ids_of(tokenizer, "▁12▁")[0] in tokens.encode(tokenizer, text)


def test_rows_of_a_trajectory_as_literal_arrays(tiny):
    """Two agent turns, the second prompt an extension of the first; c stands in front, and is no action."""
    _, tokenizer = tiny
    first, actions = f"{U}the fee{E}{A}", [ids_of(tokenizer, "▁What▁", "?", E), ids_of(tokenizer, "▁Thanks▁", E)]
    turns = list(zip((first, f"{first}{tokenizer.decode(actions[0])}{U}the price{E}{A}"), actions))
    (row,) = common.trajectory_sequences(tokenizer, turns)
    assert row.ids == ids_of(tokenizer, U, "▁the▁", "▁fee▁", E, A, "▁What▁", "?", E, U, "▁the▁", "▁price▁", E, A,
                             "▁Thanks▁", E)
    assert row.action_ids == [-1, -1, -1, -1, -1, 0, 0, 0, -1, -1, -1, -1, -1, 1, 1]
    assert row.prompt_length is None
    (with_c,) = common.trajectory_sequences(tokenizer, turns, {**TASK, "ground_truth": "def f(x):\n    return {}"})
    num_new = len(with_c.ids) - len(row.ids)
    assert "def f(x):\n    return {}" in tokenizer.decode(with_c.ids[:num_new])
    assert with_c.ids[num_new:] == row.ids and with_c.action_ids == [-1] * num_new + row.action_ids
    turns[1] = f"{U}the price{E}{A}", actions[1]                   # a template that does not append: a row a turn
    rows = common.trajectory_sequences(tokenizer, turns)
    assert [row.action_ids for row in rows] == [[-1, -1, -1, -1, -1, 0, 0, 0], [-1, -1, -1, -1, -1, 1, 1]]


def test_candidate_tree_as_literal_arrays(tiny):
    _, tokenizer = tiny
    what, thanks = ids_of(tokenizer, "▁What▁", "?", E), ids_of(tokenizer, "▁Thanks▁", E)
    (row,) = common.actions_item(tokenizer, f"{U}the{A}", [what, thanks])
    assert row == Sequence(ids_of(tokenizer, U, "▁the▁", A) + what + thanks, [-1, -1, -1, 0, 0, 0, 1, 1], 3)
    batch = collate([[row]])
    assert batch.positions.tolist() == [[0, 1, 2, 3, 4, 5, 3, 4]]
    assert batch.previous.tolist() == [[-1, 0, 1, 2, 3, 4, 2, 6]]
    assert batch.lengths.tolist() == [[3, 2]]
    assert batch.mask[0, 0].int().tolist() == [[1, 0, 0, 0, 0, 0, 0, 0],
                                               [1, 1, 0, 0, 0, 0, 0, 0],
                                               [1, 1, 1, 0, 0, 0, 0, 0],
                                               [1, 1, 1, 1, 0, 0, 0, 0],
                                               [1, 1, 1, 1, 1, 0, 0, 0],
                                               [1, 1, 1, 1, 1, 1, 0, 0],
                                               [1, 1, 1, 0, 0, 0, 1, 0],
                                               [1, 1, 1, 0, 0, 0, 1, 1]]


def test_collate_pads_on_the_right():
    batch = collate([[Sequence([5, 6, 7], [-1, 0, 0])], [Sequence([8, 9], [-1, 0]), Sequence([4], [1])]])
    assert batch.ids.tolist() == [[5, 6, 7], [8, 9, 0], [4, 0, 0]]
    assert batch.mask is None
    assert batch.action_ids.tolist() == [[-1, 0, 0], [-1, 0, -1], [1, -1, -1]]
    assert batch.item_index.tolist() == [0, 1, 1]
    assert batch.lengths.tolist() == [[2, 0], [1, 1]]


def test_widths_of_a_gpu_are_of_few_lengths_and_change_nothing(monkeypatch, tiny):
    items = [[Sequence([5, 6, 7, 8, 9], [-1, -1, 0, 0, 1], 2)], [Sequence([5, 6, 7], [-1, 0, 0])]]
    expected = ActionModel(tiny[0])(collate(items))
    monkeypatch.setitem(WIDTH_STEP, "cpu", 8)
    batch = collate(items)
    assert batch.ids.shape == batch.action_ids.shape == (2, 8) and batch.mask.shape == (2, 1, 8, 8)
    assert batch.positions[0].tolist() == [0, 1, 2, 3, 2, 0, 0, 0]   # no model needs positions for padding
    torch.testing.assert_close(ActionModel(tiny[0])(batch), expected)


def test_action_logps_in_batches_against_a_plain_softmax(tiny):
    tokenizer = tiny[1]
    turns = [(f"{U}the fee{E}{A}", ids_of(tokenizer, "▁What▁", "?", E)), (f"{U}12{E}{A}", ids_of(tokenizer, "▁8▁", E)),
             (f"{U}the price of the fee{E}{A}", ids_of(tokenizer, "▁Thanks▁", "▁the▁", "▁fee▁", E))]
    items = [common.trajectory_sequences(tokenizer, [turn]) for turn in turns]
    expected = torch.stack([token_logps_after(tiny, *turn).sum() for turn in turns])
    action_model, modes = ActionModel(tiny[0]).train(), []
    action_model.register_forward_pre_hook(lambda module, _: modes.append(module.training))
    found = torch.cat(action_outputs(action_model, items, 20))
    assert set(modes) == {False} and action_model.training          # without dropout
    tiny[0].eval()
    torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("text, prompt, seen", [
    ("<think>a</think> b", None, "b"), ("a</think>b", None, "b"), ("<think>only", None, ""),
    ("<think>a</think> <think>b</think>c", "x", "c"), ("thought", "<a><think>\n", ""),
    *((code, prompt, code) for prompt in (None, "x") for code in (
        "a<think>b", 's.split("</think>")[-1]', "re.sub('<think>.*?</think>', '', s)", "s[s.find('[/THINK]') + 8:]",
        'def f(s):\n    """Cut\n    at </think> marks.\n    """', "# behind </think>,\nx = 1")),
    ("<think>a</think>b<think>c</think>d", None, "b<think>c</think>d"), ("a</think>b", "x", "a</think>b"),
    ("a</think>s.split('</think>')", "<think>", "s.split('</think>')"),
    ("thought</think>b", "<think>", "b"), ("<think>I split at '</think>' then.\n</think>\nWhat?", "x", "What?"),
    ("I split at `</think>`.\n</think>\nWhat?", "<think>", "What?"), ("Its name is `x`</think>\nWhat?", None, "What?"),
    ("I split at '</think>' then.\n</think>\nWhat?", None, "What?"),
    ('A """docstring.\n</think>\nWhat?', None, "What?"),
    *((code, None, code) for code in (
        f"{backend.MARKER}\ndef f(t):\n    # behind </think>\n    return t",
        f"{backend.MARKER}\ndef f(t):\n    '''Cut at\n    </think>\n    '''\n    return t",
        f"{backend.MARKER}\ndef f():\n    return 'a</think> b'")),
    ("<thinking>a</thinking>b", None, "b"), ("[THINK]a[/THINK]b", None, "b"),
    ("a[/THINK]b", "[INST]x[/INST][THINK]", "b"),
    (f"[THINK]{backend.MARKER} x[/THINK]What?", None, "What?"), ("thought", "<thinking>\n", ""),
    (" plain \n", "x", "plain"), (f"<think>{backend.MARKER} x</think>What?", None, "What?")])
def test_thoughts_are_not_seen(text, prompt, seen):
    assert tokens.strip_thoughts(text, prompt) == seen


def test_agent_messages_name_the_last_round_and_never_hold_c():
    history = turns("a", "b", "c")
    chats = [tokens.agent_messages(history, rounds, PROMPT(rounds)) for rounds in (3, 2)]
    contents = [[m["content"] for m in chat[1:]] for chat in chats]
    assert contents == [["a", "b", "c"], ["a", "b", "c\n(last round)"]]
    assert "3 rounds" in chats[0][0]["content"] and history[-1]["content"] == "c"
    other = tokens.agent_messages(history, 2, PROMPT(2), "As {it} is, {max_rounds} {}")   # literal; no note of ours
    assert [m["content"] for m in other] == ["As {it} is, {max_rounds} {}", "a", "b", "c"]


LLAMA = "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n"


@pytest.mark.parametrize("change, system", [
    ({"input": f"{LLAMA}Help {{x}}.\n\nBe short.<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n"},
     "Help {x}.\n\nBe short."),
    ({"input": f"{LLAMA}Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\nHelp.<|eot_id|>"}, "Help."),
    ({"input": "<|im_start|>system\nHelp.<|im_end|>\n<|im_start|>user\n"}, "Help."),
    ({"input": f"<|user|>{LLAMA}Help.<|eot_id|>"}, None),                         # in what the person says
    ({"input": f"{LLAMA}{PROMPT(10)}<|eot_id|>"}, None),                                        # ours
    ({"input": f"{LLAMA}{PROMPT(4)}<|eot_id|>"}, PROMPT(4)),
    ({}, None)])
def test_the_system_prompt_is_read_from_the_logged_prompt(change, system):
    trajectory = {"task": TASK, "dialogue_history": [
        {"role": "user", "content": "a"}, {"role": "assistant", "content": "b", **change}]}
    assert tokens.system_prompt(trajectory) == system
    assert tokens.system_prompt({**trajectory, "system_prompt": "Mine"}) == "Mine"


def rewarded(task, **rewards):
    """Dialogues of tasks by name, whose rewards are given."""
    return [{"task_id": name, "task": task, "reward": reward} for name, own in rewards.items() for reward in own]


def test_trajectory_pairs_by_hand(monkeypatch):
    functions = rewarded(TASK, t1=[1, 0, 0.5], t2=[0, 0.9], t3=[1, 1], t4=[0.2, 1, 1, 0.4, 0.6])
    assert common.trajectory_pairs(functions, "x") == [(0, 1), (0, 2), (8, 7), (9, 10), (8, 11)]
    pages, near = rewarded(PAGE, a=[0.5, 0.58, 0.65], b=[0.1]), rewarded(PAGE, a=[.2, .2999, .2])
    assert common.trajectory_pairs(pages, "x") == [(2, 0)]
    for high, low in ((.3, .2), (.7, .6), (.8, .7), (.9, .8), (.95, .85), (1., .9)):           # .3 - .2 < .1 as floats
        assert common.trajectory_pairs(rewarded(PAGE, a=[low, high]), "x") == [(1, 0)]
    with pytest.raises(InputError, match="x: no trajectory pairs.* differ by 0.1"):
        common.trajectory_pairs(near, "x")
    assert common.trajectory_pairs(near, "x", needed=False) == []
    monkeypatch.setattr("colbench.frontend.MIN_RETURN_GAP", 0.05)
    assert common.trajectory_pairs(pages, "x") == [(1, 0), (2, 0), (2, 1)]
    monkeypatch.setattr("colbench.frontend.MIN_RETURN_GAP", 0.0)
    assert common.trajectory_pairs(near, "x") == [(1, 0), (1, 2)]                   # nothing is better than its equal


def test_dialogues_of_a_task_without_numbers_are_numbered(tmp_path):
    """As in the published file: blocks one after the other."""
    rows = [{"task": {**TASK, "problem_description": name}, "dialogue_history": HISTORY, "answer": ""}
            for name in "xyxyx"]
    for some, samples in ((rows, [0, 0, 1, 1, 2]), ([{**row, "sample": n} for n, row in enumerate(rows)], range(5))):
        path = write(tmp_path / "t.jsonl", some)
        assert [t["sample"] for t in read_trajectories(path)] == list(samples)
    write(path, [{**row, "sample": 0} for row in rows])
    with pytest.raises(InputError, match=f'{path}: two dialogues of task .* have "sample" 0; '):
        read_trajectories(path)


def test_make_tiny_joins_the_dialogues_of_three_agents_and_copies_a_model(tmp_path):
    for name in ("clear", "script", "informed"):
        write(tmp_path / f"{name}.jsonl", [{"sample": 0, "task": TASK, "dialogue_history": HISTORY, "answer": name}])
    shutil.copytree(BASE, tmp_path / "model")
    (tmp_path / "model" / "args.json").write_text("{}")              # of a training
    paths = {name: str(tmp_path / path) for name, path in (("work", "."), ("model", "model"), ("folder", "base"))}
    for line in re.findall("^(?:cat|mkdir|cp) .*", (ROOT / "scripts" / "make_tiny.sh").read_text(), re.MULTILINE):
        subprocess.run(["bash", "-c", line], env={**os.environ, **paths}, check=True)
    assert sorted(os.listdir(paths["folder"])) == sorted({*os.listdir(BASE)} - {"README.md"})
    joined = read_trajectories(tmp_path / "demonstrations.jsonl")
    assert [(t["answer"], t["sample"]) for t in joined] == [("clear", 0), ("script", 1), ("informed", 2)]


def test_a_name_of_two_references_is_refused(tmp_path):
    """Two wordings of one reference are one task."""
    tasks = [{"task_id": "0", "problem_description": what, "ground_truth": code, "test_cases": {}}
             for what, code in (("add", "def f(): 1"), ("sum", "def f(): 1"), ("sort", "def f(): 2"))]
    rows = [{"task": task, "dialogue_history": HISTORY, "answer": ""} for task in tasks]
    for reader, content in ((read_tasks, tasks), (read_trajectories, rows)):
        assert len(reader(write(tmp_path / "two", content[:2]))) == 2
        with pytest.raises(InputError, match='three: two tasks with different solutions have the "task_id" 0'):
            reader(write(tmp_path / "three", content))


# FakeTensorMode shows faults without a GPU, as it refuses tensors of two devices
needs_cuda_build = pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="a build of torch without CUDA")


def fake_model():
    return LlamaForCausalLM(LlamaConfig.from_pretrained(BASE, num_hidden_layers=1)).eval()


@needs_cuda_build
@pytest.mark.parametrize("prompt_length", [None, 2], ids=["rows", "trees"])
@pytest.mark.parametrize("kind", [ActionModel, HeadModel])
def test_an_action_model_on_fake_cuda_mixes_no_devices(kind, prompt_length):
    batch = collate([[Sequence([5, 6, 7, 8, 9], [-1, -1, 0, 0, 1], prompt_length)],
                            [Sequence([5, 6, 7], [-1, -1, 0], prompt_length)]])
    tensors = {name: value for name, value in batch._asdict().items() if isinstance(value, torch.Tensor)}
    with FakeTensorMode(shape_env=ShapeEnv()) as mode, torch.device("cuda"), torch.no_grad():
        tensors = {name: mode.from_tensor(value).to("cuda") for name, value in tensors.items()}
        values = kind(fake_model())(batch._replace(**tensors))
    assert values.device.type == "cuda" and values.shape == (2, 2)


@needs_cuda_build
def test_a_decoding_step_on_fake_cuda_mixes_no_devices():
    """It waits for no values either, which fake tensors lack: CUDA graphs need this."""
    with FakeTensorMode(), torch.no_grad():
        with torch.device("cuda"):
            model = fake_model()
        engine = Engine(model, [], slots=4, max_tokens=60)
        assert engine.has_few_shapes
        for _ in range(2):                                          # the second finds its cache
            tokens = engine.sample(engine.inputs[:3], 40)
            assert tokens.device.type == "cuda" and tokens.shape == (3,)


@pytest.mark.parametrize("gap, own, is_said", [(None, False, True), (0.1, False, False), (None, True, False)])
def test_graded_rewards_are_reported_unless_the_domain_says_what_success_is(monkeypatch, capsys, gap, own, is_said):
    class Graded(Domain):
        MIN_RETURN_GAP = gap
        eval_score = (lambda self, trajectory: trajectory["reward"] == 1) if own else Domain.eval_score
    monkeypatch.setattr(data, "domain_of", lambda task: Graded())
    data.say_graded([{"task": {}, "reward": reward} for reward in (0.0, 0.5, 1.0)])
    assert ("1 of 3 rewards are between 0 and 1 and count as failures" in capsys.readouterr().out) == is_said
    data.say_graded([{"task": {}, "reward": 1.0}])
    assert capsys.readouterr().out == ""
