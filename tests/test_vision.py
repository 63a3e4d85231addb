"""lib/vision.py and what uses it: the rows of a visual critic, its training and use, the human who sees pages."""
import asyncio
import json
import math
import shutil
import types

import pytest
import torch

import common
from colbench import frontend
from colbench.browser import Browser, Render
from compare import assert_same_steps
from conftest import BASE, call, read, refused, stage, succeed, turns, write
from lib.data import sight_of
from lib.runtime import InputError
from lib.servers import visible_text
from lib.vision import image_row, load_processor, load_vision, read_images, vision_reply

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
TEMPLATE = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
            "{% for part in m.content %}{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
            "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")


def page(colour):
    return f'<html><body style="background:#{colour}"></body></html>'


def sight_in(folder, processor=None):
    """The Sight of a visual critic, as 03 and 04 make it: its screenshots go to a folder beside folder/x."""
    return sight_of(processor, frontend, {"out": folder / "x"})


def turn_row(processor, task, history, sent, files, privileged):
    """(ids, image files) of the turn after `history` that sends a page (None: only words)."""
    view = frontend.views(task, [*history, {"role": "assistant", "content": sent or "Which colour?"}], privileged)
    return image_row(processor, view, files)


REFERENCE, WHITE, BLACK, RED = map(page, ("3366cc", "ffffff", "101010", "cc2222"))
TASK = {"problem_description": "A shop.", "ground_truth": REFERENCE}
IDEA = turns("A shop.")


@pytest.fixture(scope="module")
def vlm(tmp_path_factory):
    """The folder of an untrained Qwen2-VL: a byte tokenizer, two layers of each kind, pictures of at most 12 tokens."""
    from tokenizers import decoders, models, pre_tokenizers, Tokenizer
    from transformers import (
        PreTrainedTokenizerFast,
        Qwen2VLConfig,
        Qwen2VLForConditionalGeneration,
        Qwen2VLImageProcessorPil,
    )
    folder = tmp_path_factory.mktemp("vlm")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    words.add_special_tokens(SPECIAL)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<|im_end|>", pad_token="<|im_end|>",
                                        chat_template=TEMPLATE)
    ids = tokenizer.convert_tokens_to_ids(SPECIAL)
    torch.manual_seed(0)
    model = Qwen2VLForConditionalGeneration(Qwen2VLConfig(
        text_config={"vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
                     "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2, "bos_token_id": None,
                     "eos_token_id": ids[1],
                     "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}},
        vision_config={"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2,
                       "initializer_range": 0.2},
        vision_start_token_id=ids[2], vision_end_token_id=ids[3], image_token_id=ids[4], video_token_id=ids[5]))
    model.generation_config.update(eos_token_id=ids[1], do_sample=True, temperature=2.0, repetition_penalty=3.0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    Qwen2VLImageProcessorPil(max_pixels=12 * 28 * 28).save_pretrained(folder)
    return folder


def test_pictures_have_a_limit_of_pixels(vlm, tmp_path):
    """The published preprocessor_config.json allows pictures of 16,384 tokens."""
    path = shutil.copytree(vlm, tmp_path / "vlm") / "preprocessor_config.json"
    config = json.loads(path.read_text())
    del config["size"]
    path.write_text(json.dumps({**config, "min_pixels": 3136, "max_pixels": 12845056}))
    for folder, limit in ((path.parent, 1280 * 28 * 28), (vlm, 12 * 28 * 28)):
        assert load_processor(str(folder)).image_processor.size["longest_edge"] == limit


@pytest.fixture(scope="module")
def seeing(vlm, tmp_path_factory):
    """(scorer, Sight) with a head that is not 0. Each page is rendered once."""
    model, processor = load_vision(str(vlm), "cpu")
    scorer = common.Scorer(model, True, processor)
    torch.nn.init.normal_(scorer.head.weight, generator=torch.Generator().manual_seed(1))
    sight, files = sight_in(tmp_path_factory.mktemp("images"), processor), {}

    def show(documents):
        if not files.keys() >= set(documents):
            files.update(sight.show(documents))
        return files
    return scorer, sight._replace(show=show)


@pytest.fixture(scope="module")
def dialogues(tmp_path_factory):
    """Trajectories of four tasks: a white page is near the reference (0.9), a black one is not (0.2)."""
    rows = []
    for number in range(4):
        task = {"problem_description": f"Page {number}.", "ground_truth": page(f"3366{number}0")}
        for sample, (own, reward) in enumerate(((WHITE, 0.9), (BLACK, 0.2))):
            first, last = (f"OUTPUT: {RED}", f"OUTPUT: {own}") if number % 2 else ("Which colour?", own)
            rows.append({"task_id": str(number), "sample": sample, "task": task, "answer": own, "reward": reward,
                         "dialogue_history": turns(task["problem_description"], first, "Another colour.", last),
                         "max_rounds": 2})
    return write(tmp_path_factory.mktemp("dialogues") / "pages.jsonl", rows)


# --- rows

def test_a_row_by_hand(seeing):
    """Text and number of tokens; ids and pixels are those of transformers' own processor."""
    processor = seeing[1].processor
    files = seeing[1].show([REFERENCE, WHITE])
    history = turns("A shop.", WHITE, "It is<|image_pad|> blue.")
    ids, images = turn_row(processor, TASK, history, WHITE, files, True)
    count = ids.count(processor.image_token_id)
    picture = f"<|vision_start|>{'<|image_pad|>' * (count // 2)}<|vision_end|>"
    assert 2 <= count <= 24 and processor.decode(ids) == (
        "<|im_start|>user\nA person wants a web page: A shop.\nLast they said: It is<\u200b|image_pad|> blue."
        f"\nThe page that they need:{picture}\nThe page that they get:{picture}<|im_end|>\n")
    assert images == (files[REFERENCE], files[WHITE])
    first, second = common.visual_item([(ids, images), (ids[:9], (None,))])
    assert first == common.Row(ids, [0] * len(ids), None, images)
    assert second == common.Row(ids[:9], [1] * 9, None, (None,))
    ids, images = turn_row(processor, TASK, IDEA, None, {}, False)
    assert images == (None,) and processor.decode(ids) == (
        "<|im_start|>user\nA person wants a web page: A shop.\nThey get no page yet:<|vision_start|>"
        + "<|image_pad|>" * 4 + "<|vision_end|><|im_end|>\n")                              # 56 x 56 pixels
    parts = [{"type": "text", "text": "A person wants a web page: A shop.\nThe page that they need:"},
             {"type": "image", "path": files[REFERENCE]}, {"type": "text", "text": "\nThe page that they get:"},
             {"type": "image", "path": files[WHITE]}]
    theirs = processor.apply_chat_template([{"role": "user", "content": parts}], tokenize=True, return_dict=True,
                                           return_tensors="pt")
    ids, images = turn_row(processor, TASK, IDEA, WHITE, files, True)
    assert ids == theirs["input_ids"][0].tolist()
    pixels = read_images(processor, images)
    assert all(torch.equal(pixels[name], theirs[name]) for name in pixels)


def test_the_head_sees_the_mean_over_all_tokens_and_padding_changes_nothing(seeing):
    scorer, sight = seeing
    processor, files = sight.processor, sight.show([REFERENCE, WHITE, RED])
    long = turns("A shop.", RED, "No, make it white, please.")
    items = [common.visual_item([turn_row(processor, TASK, IDEA, RED, files, True),
                                 turn_row(processor, TASK, long, WHITE, files, True)]),
             common.visual_item([turn_row(processor, TASK, IDEA, None, files, False)])]
    with torch.no_grad():
        batch = common.collate(items)
        values = scorer(batch)                                                            # (2, 2)
        for item, turn in ((0, 0), (0, 1), (1, 0)):
            row = items[item][turn]
            inputs = {"input_ids": torch.tensor([row.ids]), **read_images(processor, row.images)}
            inputs["mm_token_type_ids"] = (inputs["input_ids"] == processor.image_token_id).int()
            by_hand = scorer.model(**inputs, output_hidden_states=True).hidden_states[-1][0].mean(0)
            torch.testing.assert_close(values[item, turn], scorer.head(by_hand)[0], atol=1e-5, rtol=1e-5)
        assert batch.lengths.tolist() == [[len(row.ids) for row in items[0]], [len(items[1][0].ids), 0]]
        assert values[1, 1] == 0
        for item, row in zip(items, values):
            alone = common.action_outputs(scorer, [item], 1, "cpu")[0]
            torch.testing.assert_close(alone, row[:len(item)], atol=1e-5, rtol=1e-5)


def state(*texts, task=TASK, history=IDEA):
    return common.DecisionPoint("", task, history, None, list(texts))


def test_scores_follow_the_pictures_and_c_only_where_it_is_seen(seeing):
    scorer, sight = seeing
    other = {**TASK, "ground_truth": RED}

    def scores(privileged, *states):
        critic = common.Critic("", "", "regression", sees_c=privileged, is_visual=True, sight=sight, scorer=scorer)
        return common.score_actions(critic, None, states, 4096, "cpu")
    thoughts = visible_text(frontend, f"<think>{RED}</think>OUTPUT: {WHITE}")  # as 02 and 04 make a state
    states = [state(WHITE, thoughts, BLACK, "no page"), state(WHITE, task=other),
              state(WHITE, "no page", history=turns("A shop.", WHITE, "Nice."))]
    (white, thought, black, none), (with_other,), (again, last) = scores(True, *states)
    assert white == thought and len({round(value, 4) for value in (white, black, none)}) == 3
    assert again == last != white and abs(with_other - white) > 1e-4
    (white, *_), (with_other,), _ = scores(False, *states)
    assert white == with_other
    weight = scorer.head.weight.data.clone()
    scorer.head.weight.data.zero_()
    assert scores(True, *states) == [[0.0] * 4, [0.0], [0.0] * 2]                                     # untrained
    scorer.head.weight.data.copy_(weight)


def test_a_page_that_cannot_be_rendered_is_black_and_counted(seeing, monkeypatch, tmp_path, capsys):
    async def fail(browser, html):
        return Render(None, None, "fault")
    monkeypatch.setattr(Browser, "render", fail)
    assert sight_in(tmp_path).show([WHITE, WHITE, RED]) == {WHITE: None, RED: None}
    assert "2 of 2 pages cannot be rendered: shown as black images" in capsys.readouterr().out
    pixels = read_images(seeing[1].processor, [None])["pixel_values"]
    assert pixels.shape[0] == 16 and pixels.reshape(16, 3, -1).std(-1).max() == 0


# --- 03, 04, 02

def flags(dialogues, vlm, out, *more):
    return ["--trajectories", dialogues, "--model", vlm, "--head", "regression", "--lr", 1e-2, "--beta", 1,
            "--held-out-frac", 0, "--batch-size", 2, "--epochs", 5, "--out", out, *more]


@pytest.fixture(scope="module")
def critic(dialogues, vlm, tmp_path_factory):
    out = tmp_path_factory.mktemp("critic") / "critic"
    return out, call(3, *flags(dialogues, vlm, out))


def load(out, sight):
    critic = common.load_critic(common.read_critic(out, None, frontend), common.load_whole("cpu"))
    critic.sight = sight
    return critic


def test_it_begins_at_log_2_learns_and_loads(critic, seeing):
    out, printed = critic
    losses = [row["loss"] for row in read(out / "metrics.jsonl")]
    assert losses[0] == pytest.approx(math.log(2), abs=1e-6) and losses[-1] < 0.6
    assert json.loads((out / "critic.json").read_text())["visual"] is True
    assert "images are scaled to at most 9,408 pixels" in printed and "<|image_pad|> …" in printed
    assert (out / "processor_config.json").exists() and list(out.with_name("critic.images").glob("*.png"))
    [scores] = common.score_actions(load(out, seeing[1]), None, [state(BLACK, WHITE)], 4096, "cpu")
    assert scores[1] > scores[0]


def test_two_ranks_equal_one_and_values_can_be_trained(dialogues, vlm, seeing, tmp_path, monkeypatch):
    monkeypatch.setattr("lib.data.show_documents", lambda domain, arguments, documents: seeing[1].show(documents))
    call(3, *flags(dialogues, vlm, tmp_path / "one", "--epochs", 1))
    succeed("03_train_critic.py", *flags(dialogues, vlm, tmp_path / "two", "--epochs", 1), ranks=2)
    assert_same_steps(tmp_path / "two", tmp_path / "one")
    call(3, *flags(dialogues, vlm, tmp_path / "v", "--head", "value", "--no-privileged", "--max-steps", 1, "--dtype",
                   "bfloat16", "--activation-checkpointing"))
    [step] = read(tmp_path / "v" / "metrics.jsonl")
    assert step["loss"] == pytest.approx(math.log(2), abs=1e-6) and step["gnorm"] > 0


def test_the_policy_stage_ranks_a_text_policys_pages(critic, dialogues, tmp_path, seeing):
    succeed("04_train_policy.py", "--method", "sweet", "--trajectories", dialogues, "--model", BASE,
            "--critic", critic[0], "--data-frac", 0.13, "--num-candidates", 4, "--max-new-tokens", 60, "--max-steps", 1,
            "--out", tmp_path / "p", ranks=2)
    rows, loaded = read(tmp_path / "p" / "scored.jsonl"), load(critic[0], seeing[1])
    for row in rows:
        point = stage(4).decision_point(row)
        [scores] = common.score_actions(loaded, None, [point], 4096, "cpu")
        assert row["advantages"] == pytest.approx(scores, abs=1e-4)
    assert rows


def test_best_of_n_sends_the_page_that_the_critic_prefers(critic, seeing, tmp_path):
    async def choose(*texts):
        with frontend.Environment(tmp_path) as environment:
            reply, agent = types.SimpleNamespace(prompt="", ids=None), types.SimpleNamespace(tokenizer=None)
            players = stage(2).Players(environment, "cpu", agent, critic=load(critic[0], seeing[1]))
            dialogue = stage(2).Dialogue(TASK, 0, IDEA, None, 0)
            return await stage(2).critic_choice(dialogue, [reply] * len(texts), texts, players, 16384)
    assert asyncio.run(choose(BLACK, WHITE, BLACK)) == 1 and asyncio.run(choose(f"OUTPUT: {WHITE}", BLACK)) == 0


# --- the user simulator who sees

def test_a_reply_to_pictures_is_the_likeliest(vlm, tmp_path):
    """The model's own generation_config, which samples and penalises, changes nothing."""
    from PIL import Image
    model, processor = load_vision(str(vlm), "cpu")
    Image.new("RGB", (60, 90), (200, 30, 30)).save(tmp_path / "a.png")
    messages = [{"role": "system", "content": [{"type": "text", "text": "Look."}]},
                {"role": "user", "content": [{"type": "image", "path": str(tmp_path / "a.png")},
                                             {"type": "image", "image": Image.new("RGB", (56, 56))},
                                             {"type": "text", "text": "What differs?"}]}]
    reply = vision_reply(model, processor, messages, 5)
    inputs = processor.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=True,
                                           return_tensors="pt")
    ids = inputs["input_ids"]
    with torch.no_grad():
        while ids.shape[1] < inputs["input_ids"].shape[1] + 5 and ids[0, -1] != model.generation_config.eos_token_id:
            types_of = (ids == processor.image_token_id).int()
            logits = model(**{**inputs, "input_ids": ids, "attention_mask": torch.ones_like(ids),
                              "mm_token_type_ids": types_of}).logits
            ids = torch.cat([ids, logits[:, -1:].argmax(-1)], 1)
    assert reply.ids == ids[0, inputs["input_ids"].shape[1]:].tolist() and reply.text == processor.decode(reply.ids)
    assert (reply.prompt_tokens, reply.completion_tokens) == (inputs["input_ids"].shape[1], len(reply.ids))


# --- bad input

def test_bad_input_is_one_line(dialogues, vlm, critic, data, tmp_path):
    """Before anything is played or trained."""
    functions, out = data / "demos.jsonl", tmp_path / "out"
    policy = ["--out", out, "--trajectories", functions, "--method"]
    for message, number, arguments in [
            ("needs --head regression", 3, flags(dialogues, vlm, out, "--head", "lm")),
            ("can be no critic of functions", 3, flags(functions, vlm, out)),
            ("models of text alone", 3, flags(dialogues, vlm, out, "--dry-run", 1)),
            ("policies read and write text alone", 4, [*policy, "sft", "--model", vlm]),
            ("sees cannot rank functions", 4, [*policy, "sweet", "--model", BASE, "--critic", critic[0]])]:
        assert message in refused(number, *arguments)
    assert not out.exists()
    with pytest.raises(InputError, match="sees no images"):
        load_vision(str(BASE), "cpu")


def test_an_adapter_s_critic_that_sees_begins_at_log_2_and_loads(dialogues, vlm, seeing, tmp_path, monkeypatch):
    monkeypatch.setattr("lib.data.show_documents", lambda domain, arguments, documents: seeing[1].show(documents))
    out = tmp_path / "critic"
    call(3, *flags(dialogues, vlm, out, "--lora", 4, "--max-steps", 1))
    assert read(out / "metrics.jsonl")[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    critic = load(out, None)
    assert critic.is_visual and critic.scorer.head.weight.abs().max() > 0
    assert (out / "adapter_model.safetensors").exists() and not (out / "model.safetensors").exists()
