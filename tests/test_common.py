"""common.py: dialogue tokens as literal arrays, log-probabilities, generation, the human's understanding, JSONL."""
import json
import math

import pytest
import torch

import common
from conftest import ROOT, read

U, A, E = "<|user|>", "<|assistant|>", "<|end|>"


def ids_of(tokenizer, *tokens):
    return tokenizer.convert_tokens_to_ids(list(tokens))


# --- tokens

def test_every_text_survives_the_tiny_tokenizer(tiny):
    _, tokenizer = tiny
    for text in ("Please use 12 for the fee.\ndef f(x):\n    return x[:3] + \"-\"", "Zwölf  façades, 99.5 % ▲ 漢字!", "a b  c\n\n d",
                 "it's 3x_4 __init__(self)", " leading and trailing "):
        assert tokenizer.decode(common.encode(tokenizer, text)) == text


def test_a_word_is_one_token_in_reply_and_in_code(tiny):
    _, tokenizer = tiny
    reply, code = (common.encode(tokenizer, text) for text in ("Please use 12 for the basic fee.", "    return 12\n"))
    assert ids_of(tokenizer, "▁12▁")[0] in reply and ids_of(tokenizer, "▁12▁")[0] in code


def turns_of_two(tokenizer):
    """Two agent turns with literal prompts, the second prompt an extension of the first."""
    first = f"{U}the fee{E}{A}"
    actions = [ids_of(tokenizer, "▁What▁", "?", E), ids_of(tokenizer, "▁Thanks▁", E)]
    second = f"{first}{tokenizer.decode(actions[0])}{U}the price{E}{A}"
    return [(first, actions[0]), (second, actions[1])]


def test_rows_of_a_trajectory_as_literal_arrays(tiny):
    _, tokenizer = tiny
    (row,) = common.trajectory_rows(tokenizer, turns_of_two(tokenizer))
    assert row.ids == ids_of(tokenizer, U, "▁the▁", "▁fee▁", E, A, "▁What▁", "?", E, U, "▁the▁", "▁price▁", E, A,
                             "▁Thanks▁", E)
    assert row.turns == [-1, -1, -1, -1, -1, 0, 0, 0, -1, -1, -1, -1, -1, 1, 1]
    assert row.shared is None


def test_a_template_that_does_not_append_gives_a_row_a_turn(tiny):
    _, tokenizer = tiny
    (first, a), (_, b) = turns_of_two(tokenizer)
    rows = common.trajectory_rows(tokenizer, [(first, a), (f"{U}the price{E}{A}", b)])
    assert [row.turns for row in rows] == [[-1, -1, -1, -1, -1, 0, 0, 0], [-1, -1, -1, -1, -1, 1, 1]]


def test_hidden_info_comes_after_the_one_bos(tiny):
    class WithBos:
        bos_token = "<s>"
    text = common.with_hidden_info(WithBos, "<s>hello", "def f(): {}")
    assert text.startswith("<s>The function") and text.count("<s>") == 1 and text.endswith("hello")
    assert "def f(): {}" in text
    _, tokenizer = tiny
    (row,) = common.trajectory_rows(tokenizer, turns_of_two(tokenizer), "def f(x):\n    return x")
    (plain,) = common.trajectory_rows(tokenizer, turns_of_two(tokenizer))
    assert row.ids[-len(plain.ids):] == plain.ids and row.turns[-len(plain.ids):] == plain.turns
    assert set(row.turns[:-len(plain.ids)]) == {-1}


def test_candidate_tree_as_literal_arrays(tiny):
    _, tokenizer = tiny
    what, thanks = ids_of(tokenizer, "▁What▁", "?", E), ids_of(tokenizer, "▁Thanks▁", E)
    (row,) = common.candidate_rows(tokenizer, f"{U}the{A}", [what, thanks])
    assert row == common.Row(ids_of(tokenizer, U, "▁the▁", A) + what + thanks, [-1, -1, -1, 0, 0, 0, 1, 1], 3)
    batch = common.collate([[row]])
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
    batch = common.collate([[common.Row([5, 6, 7], [-1, 0, 0])], [common.Row([8, 9], [-1, 0]), common.Row([4], [1])]])
    assert batch.ids.tolist() == [[5, 6, 7], [8, 9, 0], [4, 0, 0]]
    assert batch.mask.tolist() == [[1, 1, 1], [1, 1, 0], [1, 0, 0]]
    assert batch.turns.tolist() == [[-1, 0, 0], [-1, 0, -1], [1, -1, -1]]
    assert batch.owners.tolist() == [0, 1, 1]
    assert batch.lengths.tolist() == [[2, 0], [1, 1]]


@pytest.mark.parametrize("template", [
    # the shapes of three families of templates, in our own words: Llama-3, Qwen, SmolLM2
    "<s>{% for m in messages %}<h>{{ m.role }}</h>\n\n{{ m.content | trim }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<h>assistant</h>\n\n{% endif %}",
    "{% for m in messages %}<i>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<i>assistant\n{% endif %}",
    "{% for m in messages %}<i>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<i>assistant\n{% endif %}"])
def test_sampled_ids_come_out_as_they_went_in(tiny, template):
    _, tokenizer = tiny
    history = [{"role": "user", "content": "the fee"}]
    turns, sampled = [], []
    # ids that a tokenizer would not have chosen for their text, a thought, a trailing space
    for text in ("w h y?", "<think>hm</think>who?", "me? "):
        prompt = tokenizer.apply_chat_template(history, chat_template=template, tokenize=False, add_generation_prompt=True)
        ids = [i for c in text for i in common.encode(tokenizer, c)] + [tokenizer.eos_token_id]
        turns.append((prompt, ids))
        sampled.append(ids)
        history += [{"role": "assistant", "content": text}, {"role": "user", "content": "me"}]
    rows = common.trajectory_rows(tokenizer, turns)
    for number, ids in enumerate(sampled):
        assert [i for row in rows for i, turn in zip(row.ids, row.turns) if turn == number] == ids


# --- log-probabilities

def some_items(tokenizer, count=3):
    words = ["▁the▁", "▁fee▁", "▁price▁", "▁What▁", "?", "▁12▁", "▁8▁"]
    items = []
    for n in range(count):
        prompt = ids_of(tokenizer, U, *(words[(n * 3 + k) % 7] for k in range(4 + 3 * n)), E, A)
        action = ids_of(tokenizer, *(words[(n + k) % 7] for k in range(2 + n)), E)
        items.append([common.Row(prompt + action, [-1] * len(prompt) + [0] * len(action))])
    return items


def test_turn_logps_against_a_plain_softmax_in_float64(tiny):
    model, tokenizer = tiny
    (item,) = some_items(tokenizer, 1)
    (row,) = item
    with torch.no_grad():
        logits = model(torch.tensor([row.ids])).logits[0].double()
        expected = sum(torch.log_softmax(logits[i - 1], -1)[row.ids[i]].item()
                       for i in range(len(row.ids)) if row.turns[i] == 0)
        assert common.turn_logps(model, common.collate([item])).item() == pytest.approx(expected, abs=1e-4)


def test_batching_and_padding_change_nothing(tiny):
    model, tokenizer = tiny
    items = some_items(tokenizer)
    with torch.no_grad():
        together = common.turn_logps(model, common.collate(items))
        alone = torch.cat([common.turn_logps(model, common.collate([item])) for item in items])
    torch.testing.assert_close(together, alone, atol=1e-4, rtol=0)
    listed = common.values_of(model, items, 20, "cpu")
    torch.testing.assert_close(torch.stack(listed), alone, atol=1e-4, rtol=0)


def test_a_tree_scores_like_rows_of_their_own(tiny):
    model, tokenizer = tiny
    prompts = [f"{U}the fee of the price{E}{A}", f"{U}the{E}{A}"]
    actions = [ids_of(tokenizer, "▁What▁", "?", E), ids_of(tokenizer, E), ids_of(tokenizer, "▁Thanks▁", "▁the▁", "▁fee▁", E)]
    results = {}
    for no_tree in (False, True):
        model.zero_grad()
        items = [common.candidate_rows(tokenizer, prompt, actions[n:], no_tree) for n, prompt in enumerate(prompts)]
        logps = common.turn_logps(model, common.collate(items))
        (logps ** 2).sum().backward()
        results[no_tree] = logps.detach(), [p.grad.clone() for p in model.parameters()]
    torch.testing.assert_close(results[False][0], results[True][0], atol=1e-4, rtol=0)
    assert results[True][0][1, 2] == 0                                      # the second has two actions alone
    for ours, plain in zip(results[False][1], results[True][1]):
        torch.testing.assert_close(ours, plain, atol=1e-3, rtol=1e-3)


# --- generation

def test_batched_samples_are_single_samples(tiny):
    model, tokenizer = tiny
    prompts = [common.encode(tokenizer, f"{U}{text}{E}{A}") for text in
               ("Can you write a function that works out the price of a ticket?\ndef ticket_price(age):", "hm")]
    randoms = torch.stack([common.uniforms(30, "test", n) for n in range(4)])
    stops = common.stop_ids(model, tokenizer)
    together = common.generate(model, prompts, randoms, 1.0, stops)
    alone = [common.generate(model, [prompts[n // 2]], randoms[n:n + 1], 1.0, stops)[0] for n in range(4)]
    assert together == alone
    assert together[0] != together[1]
    for ids in together:
        assert ids[-1] in stops or len(ids) == 30
        assert not set(ids[:-1]) & set(stops)


def test_sampling_follows_the_softmax(tiny):
    model, tokenizer = tiny
    prompt = common.encode(tokenizer, f"{U}Can you write a function that works out the price of a ticket?{E}{A}")
    with torch.no_grad():
        probabilities = torch.softmax(model(torch.tensor([prompt])).logits[0, -1].float(), -1)
    grid = torch.linspace(0, 1, 4001)[:-1, None] + 0.5 / 4000                # evenly spaced points: no sampling noise
    first = torch.tensor([ids[0] for ids in common.generate(model, [prompt], grid, 1.0, [])])
    shares = torch.bincount(first, minlength=len(probabilities)) / 4000
    torch.testing.assert_close(shares, probabilities, atol=1e-3, rtol=0)
    likeliest = common.generate(model, [prompt], grid[:1], 0.0, [])
    assert likeliest == [[probabilities.argmax().item()]]


# --- what the human understands

def test_topics_asked_is_tolerant_and_tells_topics_apart():
    facts = [{"topic": topic, "questions": list(questions)} for topic, questions in (
        ("the mark to pass", ["What should the mark to pass be?"]),
        ("a value of exactly the mark to pass", ["What happens at exactly the mark to pass?"]),
        ("the separator of the names", ["What should stand between the names?"]),
        ("the order of the names", ["In which order should the names be?"]),
        ("the country of the parcel", ["What about the country of the parcel?"]))]
    for message, asked in (("What mark do students need to pass?", [0]), ("What happens exactly at the pass mark?", [1]),
                           ("What stands between two names?", [2]), ("Which order should they have?", [3]),
                           ("Which separator and which order?", [2, 3]), ("Does the country matter?", [4]),
                           ("Hello there!", []), ("Can you tell me more?", [])):
        assert common.topics_asked(facts, message) == asked, message


def test_kinds_of_turns():
    facts = [{"topic": "the fee", "questions": ["What should the fee be?"], "matters": True, "told": False},
             {"topic": "the price", "questions": ["What should the price be?"], "matters": True, "told": True},
             {"topic": "the weather", "questions": ["What about the weather?"], "matters": False, "told": False}]
    task = {"facts": facts, "ground_truth": "def f(): return 1"}
    start = [{"role": "user", "content": "?"}]
    asked = start + [{"role": "assistant", "content": "What should the fee be?"}, {"role": "user", "content": "3"}]
    right, wrong = common.MARKER + "\ndef f(): return 1", common.MARKER + "\ndef f(): return 2"
    for history, action, kind in ((start, "What should the fee be?", "needed"), (asked, "What is the fee?", "repeat"),
                                  (start, "And the price?", "repeat"), (start, "How is the weather?", "idle"),
                                  (start, "Well?", "vague"), (start, right, "right answer"), (start, wrong, "early answer"),
                                  (asked, wrong, "wrong answer")):
        assert common.action_kind(task, history, action) == kind, action


@pytest.mark.parametrize("text, prompt, seen", [
    ("<think>a</think> b", None, "b"), ("a</think>b", "x", "b"), ("a<think>b", "", "a"), ("<think>only", None, ""),
    ("<think>a</think>b<think>c</think>d", None, "bd"), ("thought", "<a><think>\n", ""), ("thought</think>b", "<think>", "b"),
    (" plain \n", "x", "plain"), (f"<think>{common.MARKER} x</think>What?", None, "What?")])
def test_thoughts_are_not_seen(text, prompt, seen):
    assert common.visible_text(text, prompt) == seen


REFERENCE = '''def price(weight, zone):
    """The price of a parcel: heavy parcels that go far away cost more."""
    rate = {"near": 2, "far": 5}[zone]  # euros, for each kilogram that it weighs when packed
    if weight > 20 and zone == "far":
        return rate * weight + 7
    return rate * weight'''


@pytest.mark.parametrize("reply, kind", [
    ("Here it is:\n```python\nx\n```", "fence"), ("It is def price(weight, zone): and so on", "signature"),
    ("Then, if weight > 20 and zone == 'far': add seven", "code"), ("it does return rate*weight+7 return rate there", "code"),
    ("rate = {'near': 2,\n 'far': 5}[zone] is it", "code"), ("If weight > 20 it costs 7 more.", None),
    ("The price of a parcel: heavy parcels that go far away cost more.", None), ("You define price(weight, zone).", None),
    ("euros, for each kilogram that it weighs when packed", None), ("It's 'near' or 'far', don't you think?", None), ("", None)])
def test_leaks_are_code_and_not_what_it_says(reply, kind):
    assert common.leak_of({"ground_truth": REFERENCE}, reply) == kind


def test_the_rule_based_human_leaks_nothing(workspace):
    for task in read(workspace / "tasks.jsonl"):
        for reply in [reply for fact in task["facts"] for reply in fact["replies"]]:
            assert common.leak_of(task, reply) is None


def test_agent_messages_name_the_last_round_and_never_hold_c():
    history = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    contents = [[m["content"] for m in common.agent_messages(history, rounds)[1:]] for rounds in (3, 2)]
    assert contents == [["a", "b", "c"], ["a", "b", "c\n(last round)"]]
    assert "3 rounds" in common.agent_messages(history, 3)[0]["content"] and history[-1]["content"] == "c"
    other = common.agent_messages(history, 2, system="As {it} is, {max_rounds} {}")           # literal; no note of ours
    assert [m["content"] for m in other] == ["As {it} is, {max_rounds} {}", "a", "b", "c"]


LLAMA = "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n"


@pytest.mark.parametrize("change, system", [
    ({"input": f"{LLAMA}Help {{x}}.\n\nBe short.<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n"}, "Help {x}.\n\nBe short."),
    ({"input": f"{LLAMA}Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\nHelp.<|eot_id|>"}, "Help."),
    ({"input": "<|im_start|>system\nHelp.<|im_end|>\n<|im_start|>user\n"}, "Help."),
    ({"input": f"<|user|>{LLAMA}Help.<|eot_id|>"}, None),                         # in what the person says
    ({"input": f"{LLAMA}{common.our_system(10)}<|eot_id|>"}, None),                                        # ours
    ({"input": f"{LLAMA}{common.our_system(4)}<|eot_id|>"}, common.our_system(4)),
    ({}, None)])
def test_the_system_prompt_is_read_from_the_logged_prompt(change, system):
    trajectory = {"task": {"ground_truth": "def f(): pass"}, "dialogue_history": [
        {"role": "user", "content": "a"}, {"role": "assistant", "content": "b", **change}]}
    assert common.system_prompt(trajectory) == system
    assert common.system_prompt({**trajectory, "system_prompt": "Mine"}) == "Mine"


# --- pairs, batches, schedule

def test_trajectory_pairs_by_hand():
    rewards = {"t1": [1, 0, 0.5], "t2": [0, 0.9], "t3": [1, 1], "t4": [0.2, 1, 1, 0.4, 0.6]}
    task = {"test_cases": {"a": "f()"}}
    trajectories = [{"task_id": name, "task": task, "reward": reward} for name, own in rewards.items() for reward in own]
    assert common.trajectory_pairs(trajectories, "x") == [(0, 1), (0, 2), (8, 7), (9, 10), (8, 11)]
    page = {"ground_truth": "<p>"}
    frontend = [{"task_id": name, "task": page, "reward": r} for name, r in zip("aaab", (0.5, 0.58, 0.65, 0.1))]
    assert common.trajectory_pairs(frontend, "x") == common.trajectory_pairs(frontend, "x", 0.1) == [(2, 0)]
    assert common.trajectory_pairs(frontend, "x", min_gap=0.05) == [(1, 0), (2, 0), (2, 1)]


def test_gaps_are_compared_but_for_rounding():
    page = {"ground_truth": "<p>"}
    for high, low in ((.3, .2), (.7, .6), (.8, .7), (.9, .8), (.95, .85), (1., .9)):
        assert common.trajectory_pairs([{"task_id": "a", "task": page, "reward": r} for r in (low, high)], "x", 0.1) == [(1, 0)]
    assert .3 - .2 < .1 and .7 - .6 < .1                            # as floats: what is compared is not these
    near = [{"task_id": "a", "task": page, "reward": r} for r in (.2, .2999, .2)]
    with pytest.raises(common.InputError, match="differ by 0.1"):
        common.trajectory_pairs(near, "x", 0.1)
    assert common.trajectory_pairs(near, "x", 0) == [(1, 0), (1, 2)]                # nothing is better than its equal


def test_epoch_batches_cover_every_item_once_an_epoch():
    batches = common.epoch_batches(10, 4, 2, seed=1)
    assert [len(b) for b in batches] == [4, 4, 2, 4, 4, 2]
    assert sorted(sum(batches[:3], [])) == sorted(sum(batches[3:], [])) == list(range(10))
    assert batches == common.epoch_batches(10, 4, 2, seed=1) != common.epoch_batches(10, 4, 2, seed=2)


def test_learning_rate_by_hand():
    rates = [common.learning_rate(step, 100, 1.0) for step in range(100)]
    assert rates[:3] == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert rates[3] == pytest.approx(1.0)
    assert rates[51] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 48 / 97)))
    assert 0.1 < rates[-1] < 0.11


# --- jsonl

def test_map_blocks_resumes_to_the_same_file(tmp_path):
    common.start(0)
    runtime = common.Runtime(0, 1, torch.device("cpu"))
    blocks = [[1, 2], [3, 4], [5]]
    calls = []

    def work(block, _):
        calls.append(block)
        if block == [5] and len(calls) == 3:
            raise KeyboardInterrupt
        return [{"x": x} for x in block]
    out = tmp_path / "rows.jsonl"
    with pytest.raises(KeyboardInterrupt):
        common.map_blocks(out, blocks, work, runtime, "row")
    partial = tmp_path / "rows.jsonl.0of1.partial"
    partial.write_bytes(partial.read_bytes()[:-3])                          # the last line was cut by the kill
    assert not out.exists()
    assert common.map_blocks(out, blocks, work, runtime, "row") == [{"x": x} for x in (1, 2, 3, 4, 5)]
    assert calls == [[1, 2], [3, 4], [5], [3, 4], [5]]
    assert read(out) == [{"x": x} for x in (1, 2, 3, 4, 5)] and not partial.exists()


def test_dialogues_of_a_task_without_numbers_are_numbered(tmp_path):
    """As in the published file: blocks one after the other."""
    history = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows = [{"task": {"problem_description": p, "ground_truth": "def f(): 1", "test_cases": {}}, "dialogue_history": history,
             "answer": ""} for p in "xyxyx"]
    path = tmp_path / "t.jsonl"
    common.write_jsonl(path, rows)
    assert [t["sample"] for t in common.read_trajectories(path)] == [0, 0, 1, 1, 2]
    common.write_jsonl(path, [{**row, "sample": n} for n, row in enumerate(rows)])
    assert [t["sample"] for t in common.read_trajectories(path)] == [0, 1, 2, 3, 4]
    common.write_jsonl(path, [rows[0], {**rows[1], "sample": "1"}])
    with pytest.raises(common.InputError, match='t.jsonl:2: "sample" is a str, not a int'):
        common.read_trajectories(path)


# --- fingerprints

def test_a_fingerprint_is_of_what_a_model_says(tmp_path):
    import shutil
    from safetensors.torch import load_file, save_file
    def both(folder=tmp_path / "tiny"):
        return common.fingerprint(folder), common.weights_fingerprint(str(folder))
    first, folder = both(ROOT / "tests" / "tiny"), tmp_path / "tiny"
    shutil.copytree(ROOT / "tests" / "tiny", folder)
    (folder / "args.json").write_text("{}")
    (folder / "metrics.jsonl").write_text("{}")
    assert both() == first                                          # whatever the path, and what a training notes
    (folder / "generation_config.json").write_text("{}")
    assert both()[0] != first[0] and both()[1] == first[1]
    weights = folder / "model.safetensors"
    tensors, size = load_file(weights), weights.stat().st_size
    name = sorted(tensors)[0]
    tensors[name][-1, -1] += 1e-3                                                       # one number, the same size
    save_file(tensors, weights, metadata={"format": "pt"})
    assert weights.stat().st_size == size and both()[1] != first[1]
    assert common.weights_fingerprint("nobody/model") is None and common.weights_fingerprint("no/such/folder") is None


def test_a_large_file_is_sampled(tmp_path):
    path, size = tmp_path / "model.safetensors", 2 ** 28
    with open(path, "wb") as file:
        file.truncate(size)
    seen = {common.file_digest(path)}
    for place in (5, size // 1024, size // 2 + 4000, size - 1):                    # header, two blocks, the end
        with open(path, "r+b") as file:
            file.seek(place)
            file.write(b"x")
        seen.add(common.file_digest(path))
    assert len(seen) == 5


@pytest.mark.parametrize("content, message", [
    ("", "no rows in it"), ('{"a": 1}\n{"a"', "2: not JSON"), ('{"b": 1}\n', '1: missing "a"'), ("[1]\n", "1: a list"),
    ('{"a": "x"}\n', '1: "a" is a str, not a int'), (b"\xff\xfe", "not UTF-8")])
def test_broken_jsonl_is_named_by_line(tmp_path, content, message):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(common.InputError, match="rows.jsonl") as error:
        common.read_jsonl(path, {"a": int})
    assert message in str(error.value)


def test_readme_names_existing_files():
    text = (ROOT / "README.md").read_text()
    for name in ("run.sh", "tests/run.sh", "tests/make_tiny.sh"):
        assert name in text and (ROOT / name).exists()
