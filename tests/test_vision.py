"""lib/vision.py and what uses it: the rows of a visual critic, its training and use, the human who sees pages."""
import asyncio
import copy
import json
import math
import shutil
import types
from unittest import mock

import peft
import pytest
import torch
import transformers
from PIL import Image

import common
from colbench import frontend
from colbench.browser import Browser, Render
from compare import assert_same_steps
from conftest import BASE, call, load_critic, read, refused, run, stage, succeed, turns, write
from lib.data import show_documents
from lib.load import load_tokenizer
from lib.logps import action_outputs
from lib.runtime import InputError, Output
from lib.servers import visible_text
from lib.vision import load_processor, load_vision, read_images, vision_reply, VisualCritic, VisualHeadModel

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
TEMPLATE = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
            "{% for part in m.content %}{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
            "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")


def page(colour):
    return f'<html><body style="background:#{colour}"></body></html>'


REFERENCE, WHITE, BLACK, RED = map(page, ("3366cc", "ffffff", "101010", "cc2222"))
TASK = {"problem_description": "A shop.", "ground_truth": REFERENCE}
IDEA = turns("A shop.")


def turn_row(critic, history, sent, sees_c=True):
    """The VisualSequence of the turn after `history` that says `sent`, a page perhaps."""
    view = critic.view(TASK, [*history, {"role": "assistant", "content": sent}], sees_c)
    return critic.view_sequences([[view]])[view]


@pytest.fixture(scope="module")
def vlm(tmp_path_factory):
    """The folder of an untrained Qwen2-VL with two layers of each kind, for pictures of at most 12 tokens."""
    folder, tokenizer = tmp_path_factory.mktemp("vlm"), load_tokenizer(str(BASE))
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL, "eos_token": "<|im_end|>"})
    tokenizer.chat_template = TEMPLATE
    ids = tokenizer.convert_tokens_to_ids(SPECIAL)
    torch.manual_seed(0)
    model = transformers.Qwen2VLForConditionalGeneration(transformers.Qwen2VLConfig(
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
    transformers.Qwen2VLImageProcessorPil(max_pixels=12 * 28 * 28).save_pretrained(folder)
    return folder


def test_pictures_have_a_limit_of_pixels(vlm, tmp_path):
    """The published preprocessor_config.json allows pictures of 16,384 tokens."""
    path = shutil.copytree(vlm, tmp_path / "vlm") / "preprocessor_config.json"
    config = json.loads(path.read_text())
    del config["size"]
    path.write_text(json.dumps({**config, "min_pixels": 3136, "max_pixels": 12845056}))
    for folder, limit in ((path.parent, 1280 * 28 * 28), (vlm, 12 * 28 * 28)):
        assert load_processor(str(folder)).image_processor.size["longest_edge"] == limit


def test_an_adapter_of_a_model_that_sees_is_applied(vlm, tmp_path):
    base, _ = load_vision(str(vlm), "cpu")
    name = "model.language_model.layers.0.self_attn.q_proj.weight"
    before = base.get_parameter(name).clone()
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], base_model_name_or_path=str(vlm), init_lora_weights=False)
    peft.get_peft_model(base, config).save_pretrained(tmp_path)
    model, _ = load_vision(str(tmp_path), "cpu")
    delta = base.get_submodule(name.removesuffix(".weight")).get_delta_weight("default")
    assert delta.abs().max() > 0.01
    torch.testing.assert_close(model.get_parameter(name), before + delta)


@pytest.fixture(scope="module")
def seeing(vlm, tmp_path_factory):
    """A critic with a head that is not 0. Each page is rendered once."""
    output, files = Output(tmp_path_factory.mktemp("images") / "x", {}, []), {}

    def show(documents):
        if not files.keys() >= set(documents):
            files.update(show_documents(frontend, output, documents))
        return files
    critic = VisualCritic(str(vlm), "regression", frontend, show)
    critic.model = VisualHeadModel(load_vision(str(vlm), "cpu")[0])
    critic.tokenizer = critic.model.processor
    critic.max_tokens = 4096
    torch.nn.init.normal_(critic.model.head.weight, generator=torch.Generator().manual_seed(1))
    return critic


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


def test_a_row_by_hand(seeing):
    """Text and number of tokens; ids and pixels are those of transformers' own processor."""
    processor, files = seeing.tokenizer, seeing.show([REFERENCE, WHITE])
    ids, numbers, _, images = turn_row(seeing, turns("A shop.", WHITE, "It is<|image_pad|> blue."), WHITE)
    count = ids.count(processor.image_token_id)
    picture = f"<|vision_start|>{'<|image_pad|>' * (count // 2)}<|vision_end|>"
    assert 2 <= count <= 24 and processor.decode(ids) == (
        "<|im_start|>user\nA person wants a web page: A shop.\nLast they said: It is<\u200b|image_pad|> blue."
        f"\nThe page that they need:{picture}\nThe page that they get:{picture}<|im_end|>\n")
    assert images == (files[REFERENCE], files[WHITE]) and numbers == [0] * len(ids)
    ids, _, _, images = turn_row(seeing, IDEA, "Which colour?", sees_c=False)
    assert images == (None,) and processor.decode(ids) == (
        "<|im_start|>user\nA person wants a web page: A shop.\nThey get no page yet:<|vision_start|>"
        + "<|image_pad|>" * 4 + "<|vision_end|><|im_end|>\n")                              # 56 x 56 pixels
    parts = [{"type": "text", "text": "A person wants a web page: A shop.\nThe page that they need:"},
             {"type": "image", "path": files[REFERENCE]}, {"type": "text", "text": "\nThe page that they get:"},
             {"type": "image", "path": files[WHITE]}]
    theirs = processor.apply_chat_template([{"role": "user", "content": parts}], tokenize=True, return_dict=True,
                                           return_tensors="pt")
    ids, _, _, images = turn_row(seeing, IDEA, WHITE)
    assert ids == theirs["input_ids"][0].tolist()
    pixels = read_images(processor, images)
    assert all(torch.equal(pixels[name], theirs[name]) for name in pixels)


def test_the_head_sees_the_mean_over_all_tokens_and_padding_changes_nothing(seeing):
    action_model = seeing.model
    long = turns("A shop.", RED, "No, make it white, please.", WHITE)
    items = [*seeing.trajectory_items([{"task": TASK, "dialogue_history": long}], sees_c=True),
             *seeing.trajectory_items([{"task": TASK, "dialogue_history": turns("A shop.", "Which colour?")}], False)]
    assert [row.action_ids for row in items[0]] == [[n] * len(row.ids) for n, row in enumerate(items[0])]
    with torch.no_grad():
        batch = action_model.collate(items, "cpu")
        values = action_model(batch)                                                      # (2, 2)
        for item, turn in ((0, 0), (0, 1), (1, 0)):
            row = items[item][turn]
            inputs = {"input_ids": torch.tensor([row.ids]), **read_images(seeing.tokenizer, row.images)}
            inputs["mm_token_type_ids"] = (inputs["input_ids"] == seeing.tokenizer.image_token_id).int()
            by_hand = action_model.model(**inputs, output_hidden_states=True).hidden_states[-1][0].mean(0)
            torch.testing.assert_close(values[item, turn], action_model.head(by_hand)[0], atol=1e-5, rtol=1e-5)
        assert batch.lengths.tolist() == [[len(row.ids) for row in items[0]], [len(items[1][0].ids), 0]]
        assert values[1, 1] == 0
        for item, row in zip(items, values):
            alone = action_outputs(action_model, [item], 1)[0]
            torch.testing.assert_close(alone, row[:len(item)], atol=1e-5, rtol=1e-5)


def state(*texts, task=TASK, history=IDEA):
    return common.State("", task, history, None, list(texts))


def test_scores_follow_the_pictures_and_c_only_where_it_is_seen(seeing):
    other, blind = {**TASK, "ground_truth": RED}, copy.copy(seeing)
    blind.critic_sees_c = False
    thoughts = visible_text(frontend, f"<think>{RED}</think>OUTPUT: {WHITE}")  # as 02 and 04 make a state
    states = [state(WHITE, thoughts, BLACK, "no page"), state(WHITE, task=other),
              state(WHITE, "no page", history=turns("A shop.", WHITE, "Nice."))]
    (white, thought, black, none), (with_other,), (again, last) = seeing.score_actions(states)
    assert white == thought and len({round(value, 4) for value in (white, black, none)}) == 3
    assert again == last != white and abs(with_other - white) > 1e-4
    (white, *_), (with_other,), _ = blind.score_actions(states)
    assert white == with_other


def test_a_page_that_cannot_be_rendered_is_black_and_counted(seeing, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(Browser, "render", mock.AsyncMock(return_value=Render(None, None, "fault")))
    assert show_documents(frontend, Output(tmp_path / "x", {}, []), [WHITE, WHITE, RED]) == {WHITE: None, RED: None}
    assert "2 of 2 pages cannot be rendered: shown as black images" in capsys.readouterr().out
    pixels = read_images(seeing.tokenizer, [None])["pixel_values"]
    assert pixels.shape[0] == 16 and pixels.reshape(16, 3, -1).std(-1).max() == 0


def flags(dialogues, vlm, out, *more):
    return ["--trajectories", dialogues, "--model", vlm, "--score", "regression", "--lr", 1e-2, "--beta", 1,
            "--held-out-frac", 0, "--batch-size", 2, "--epochs", 5, "--out", out, *more]


@pytest.fixture(scope="module")
def critic(dialogues, vlm, seeing, tmp_path_factory):
    """(Its folder, what 03 has printed, the loaded critic.)"""
    out = tmp_path_factory.mktemp("critic") / "critic"
    printed, loaded = call(3, *flags(dialogues, vlm, out)), load_critic(out, "frontend")
    loaded.show = seeing.show
    return out, printed, loaded


def test_it_begins_at_log_2_learns_and_loads(critic):
    out, printed, loaded = critic
    losses = [row["loss"] for row in read(out / "metrics.jsonl")]
    assert losses[0] == pytest.approx(math.log(2), abs=1e-6) and losses[-1] < 0.6
    assert json.loads((out / "critic.json").read_text())["visual"] is True
    assert "images are scaled to at most 9,408 pixels" in printed and "<|image_pad|> …" in printed
    assert (out / "processor_config.json").exists() and list(out.with_name("critic.images").glob("*.png"))
    [scores] = loaded.score_actions([state(BLACK, WHITE)])
    assert scores[1] > scores[0]


def test_two_ranks_equal_one_and_values_and_adapters_can_be_trained(dialogues, vlm, seeing, tmp_path, monkeypatch):
    monkeypatch.setattr("lib.data.show_documents", lambda domain, output, documents: seeing.show(documents))
    call(3, *flags(dialogues, vlm, tmp_path / "one", "--epochs", 1))
    succeed("03_train_critic.py", *flags(dialogues, vlm, tmp_path / "two", "--epochs", 1), ranks=2)
    assert_same_steps(tmp_path / "two", tmp_path / "one")
    value = ["--score", "value", "--critic-sees-c", "no", "--dtype", "bfloat16", "--activation-checkpointing"]
    for name, more in (("value", value), ("adapter", ["--lora", 4])):
        call(3, *flags(dialogues, vlm, tmp_path / name, "--max-steps", 1, *more))
        [step] = read(tmp_path / name / "metrics.jsonl")
        assert step["loss"] == pytest.approx(math.log(2), abs=1e-6) and step["gnorm"] > 0
    files = {path.name for path in (tmp_path / "adapter").iterdir()}
    assert "adapter_model.safetensors" in files and "model.safetensors" not in files
    adapted = load_critic(tmp_path / "adapter", "frontend")
    assert adapted.model.head.weight.abs().max() > 0


def test_the_policy_stage_ranks_a_text_policys_pages(critic, dialogues, tmp_path):
    """Which here are no pages, so that all have equal advantages and no pair can be made."""
    out, _, loaded = critic
    process = run("04_train_policy.py", "--method", "sweet", "--trajectories", dialogues, "--model", BASE,
                  "--critic", out, "--data-frac", 0.13, "--num-candidates", 4, "--max-new-tokens", 60, "--max-steps", 1,
                  "--out", tmp_path / "p", ranks=2)
    assert process.returncode == 2 and "have equal advantages" in process.stderr
    rows = read(tmp_path / "p" / "scored.jsonl")
    expected = loaded.score_actions(list(map(stage(4).as_state, rows)))
    advantages = sum([row["advantages"] for row in rows], [])
    assert len(rows) > 0 and advantages == pytest.approx(sum(expected, []), abs=1e-4)


def test_best_of_n_sends_the_page_that_the_critic_prefers(critic, tmp_path):
    async def choose(*texts):
        with frontend.Environment(tmp_path) as environment:
            reply, agent = types.SimpleNamespace(prompt="", ids=None), types.SimpleNamespace(tokenizer=None)
            players = stage(2).Players(None, environment, agent, critic=critic[2])
            dialogue = stage(2).Dialogue(TASK, 0, IDEA, None, 0)
            return await stage(2).critic_choice(dialogue, [reply] * len(texts), texts, players)
    assert asyncio.run(choose(BLACK, WHITE, BLACK)) == 1 and asyncio.run(choose(f"OUTPUT: {WHITE}", BLACK)) == 0


def test_a_reply_to_pictures_is_the_likeliest(vlm, tmp_path):
    """The model's own generation_config, which samples and penalises, changes nothing."""
    model, processor = load_vision(str(vlm), "cpu")
    Image.new("RGB", (60, 90), (200, 30, 30)).save(tmp_path / "a.png")
    messages = [{"role": "system", "content": [{"type": "text", "text": "Look."}]},
                {"role": "user", "content": [{"type": "image", "path": str(tmp_path / "a.png")},
                                             {"type": "image", "image": Image.new("RGB", (56, 56))},
                                             {"type": "text", "text": "What differs?"}]}]
    reply = vision_reply(model, processor, messages, 5)
    model.generation_config = transformers.GenerationConfig(eos_token_id=model.generation_config.eos_token_id)
    inputs = processor.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=True,
                                           return_tensors="pt")
    num_read = inputs["input_ids"].shape[1]
    assert reply.ids == model.generate(**inputs, max_new_tokens=5)[0, num_read:].tolist()
    assert reply.text == processor.decode(reply.ids)
    assert (reply.prompt_tokens, reply.completion_tokens) == (num_read, len(reply.ids))


def test_bad_input_is_one_line(dialogues, vlm, data, tmp_path):
    functions, out = data / "demos.jsonl", tmp_path / "out"
    for message, number, arguments in [
            ("needs --score regression", 3, flags(dialogues, vlm, out, "--score", "logratio")),
            ("cannot be the critic of a function", 3, flags(functions, vlm, out)),
            ("--dry-run supports only text models", 3, flags(dialogues, vlm, out, "--dry-run", 1)),
            ("a policy must be text-only", 4,
             ["--method", "sft", "--trajectories", functions, "--model", vlm, "--out", out])]:
        assert message in refused(number, *arguments)
    assert not out.exists()
    with pytest.raises(InputError, match="sees no images"):
        load_vision(str(BASE), "cpu")
