"""One context for acting and training: what a critic and a policy read is what the agent read, by any chat template."""
import collections
import copy
import types

import pytest

import common
from conftest import BASE, turns
from lib.load import load_tokenizer
from lib.scorer import action_outputs, reference_logps, Scorer
from lib.tokens import agent_turns, check_prompt, continuation, decode, encode, note_prompt, render_chat, stop_ids

USER, REPLY = turns("the fee", "What fee?")
TASK = {"problem_description": "the fee", "ground_truth": "def f(): 1", "test_cases": {"a": "f()"}}
ROW = {"task_id": "t", "sample": 0, "task": TASK, "max_rounds": 8, "system_prompt": "Help.",
       "dialogue_history": turns("the fee", "What fee?", "12", "Thanks")}

# What templates of models write, in our own words: (bos_token, eos_token, end of turn, template). Some end a turn with
# another token than the tokenizer's eos_token, take no system message, end a finished chat with one more, add a date
ALTERNATE = ("{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
             "{{ raise_exception('Only alternating user and assistant roles are supported!') }}{% endif %}")
CHATML = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
          "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
TEMPLATES = {
    "llama 3": ("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>",
                "{{ bos_token }}<|start_header_id|>system<|end_header_id|>\n\nToday: {{ strftime_now('%d %b %Y') }}"
                "<|eot_id|>{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
                "{{ m.content | trim }}<|eot_id|>{% endfor %}"
                "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"),
    "qwen": (None, "<|im_end|>", "<|im_end|>", CHATML),
    "smollm2": ("<|im_start|>", "<|im_end|>", "<|im_end|>", CHATML),       # whose beginning of a text opens messages
    "gemma": ("<bos>", "<eos>", "<end_of_turn>",
              ALTERNATE + "<start_of_turn>{{ m.role | replace('assistant', 'model') }}\n{{ m.content | trim }}"
              "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"),
    "mistral": ("<s>", "</s>", "</s>",
                ALTERNATE + "{% if m.role == 'assistant' %} {{ m.content }}{{ eos_token }}"
                "{% else %}[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}"),
    "phi 3": ("<s>", "<|endoftext|>", "<|end|>",
              "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
              "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}")}
BEGINS = {"llama 3": "<|begin_of_text|>C<|start_header_id|>system", "qwen": "C<|im_start|>system\nHelp.",
          "smollm2": "C<|im_start|>system\nHelp.", "gemma": "<bos>C<start_of_turn>user\nHelp.\n\nthe fee<",
          "mistral": "<s>C[INST] Help.\n\nthe fee [", "phi 3": "C<|system|>\nHelp."}


def tokenizer_of(name):
    bos, eos, end, template = TEMPLATES[name]
    tokenizer = load_tokenizer(str(BASE))
    tokenizer.add_special_tokens({"additional_special_tokens": [end], "eos_token": eos})
    if bos:
        tokenizer.add_special_tokens({"bos_token": bos})
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize("name", TEMPLATES)
def test_turns_without_ids_are_what_the_template_writes_and_c_stands_before_all_messages(name):
    """c comes after the beginning of the sequence, unless this opens every message. A turn ends with the template's
    end alone; all ids that end one stop the sampler."""
    tokenizer = tokenizer_of(name)
    turns = agent_turns(tokenizer, ROW)
    for prompt, _ in turns:
        begin = BEGINS[name].replace("C", common.solution_text(TASK))
        assert common.critic_prompt(tokenizer, prompt, TASK).startswith(begin)
        assert prompt.count("Help.") == 1
        if name in ("llama 3", "gemma", "mistral"):
            assert encode(tokenizer, prompt).count(tokenizer.bos_token_id) == 1
    [row], [_] = (common.trajectory_sequences(tokenizer, turns, task) for task in (None, TASK))
    chat = [{"role": "system", "content": "Help."}, *ROW["dialogue_history"]]
    assert render_chat(tokenizer, chat).startswith(tokenizer.decode(row.ids, clean_up_tokenization_spaces=False))
    end = tokenizer.convert_tokens_to_ids(TEMPLATES[name][2])
    for number, text in enumerate(["What fee?", "Thanks"]):
        *action, last = [token for token, turn in zip(row.ids, row.action_ids) if turn == number]
        assert decode(tokenizer, action).strip() == text and last == end and tokenizer.eos_token_id not in action
    model = types.SimpleNamespace(generation_config=types.SimpleNamespace(eos_token_id=17))
    assert stop_ids(model, tokenizer) == sorted({17, tokenizer.eos_token_id, end})


@pytest.mark.parametrize("template", [None, *TEMPLATES])
@pytest.mark.parametrize("content", ["yes ", "end", "d", "|", "I see\n"])
def test_an_action_is_its_content_and_the_end_of_the_turn(tiny, template, content):
    """Whatever of it stands elsewhere: in the request, or in the names of control tokens."""
    tokenizer, end = tiny[1], "<|end|>"
    if template:
        tokenizer, end = tokenizer_of(template), TEMPLATES[template][2]
    history = turns("Say yes or no; yes please. I see", content)
    [[prompt, action]] = agent_turns(tokenizer, {**ROW, "dialogue_history": history})
    assert decode(tokenizer, action[:-1]).strip() == content.strip() and tokenizer.decode(action[-1]) == end
    assert "Say yes or no; yes please. I see" in prompt


def test_cues(tiny):
    """A template without one takes no logged prompt for its own, although every text ends with an empty cue. One that
    opens a thought is not before an answer without a thought."""
    counts, logged = collections.Counter(), {**REPLY, "input": "<s>[INST] the fee", "output": "What fee?"}
    [[prompt, _]] = agent_turns(tokenizer_of("mistral"), {**ROW, "dialogue_history": [USER, logged]}, counts)
    assert list(counts) == ["rendered again"] and prompt != logged["input"]
    tokenizer = copy.deepcopy(tiny[1])
    tokenizer.chat_template += "{% if add_generation_prompt %}<think>\n{% endif %}"
    for prompt, action in agent_turns(tokenizer, ROW):
        assert "<think>" not in prompt and prompt.endswith("<|assistant|>")
        assert decode(tokenizer, action) in ("What fee?", "Thanks")


def test_arguments_of_the_template_are_those_of_the_rollout(tiny, tmp_path, capsys):
    tokenizer = copy.deepcopy(tiny[1])
    tokenizer.chat_template = "{% if enable_thinking is false %}<no-think>{% endif %}" + tokenizer.chat_template
    row = {**ROW, "chat_template_args": {"enable_thinking": False}}
    assert all(prompt.startswith("<no-think>") for prompt, _ in agent_turns(tokenizer, row))
    note_prompt(tmp_path, [row, row, ROW])
    assert "1 of 3 trajectories have another system prompt, or other chat template arguments" in capsys.readouterr().out
    check_prompt(str(tmp_path), tokenizer, "Help.", {"enable_thinking": False})
    assert capsys.readouterr().out == ""
    check_prompt(str(tmp_path), tokenizer, "Help.", {})
    assert "or other chat template arguments, than it has here" in capsys.readouterr().out


def metaspace_tokenizer():
    """A tokenizer that puts ▁ before whatever a text begins with, as Llama 2's does."""
    import tokenizers
    from transformers import PreTrainedTokenizerFast
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = tokenizers.decoders.Metaspace(prepend_scheme="first", split=False)
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", "<s>", "</s>"])
    backend.train_from_iterator(["What fee? Thanks the fee"] * 4, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>",
                                   chat_template=TEMPLATES["mistral"][3])


@pytest.mark.parametrize("name", ["qwen", "metaspace"])
def test_rows_hold_the_ids_that_were_read(name):
    """Before each action stand the ids of its whole prompt, also where sampled ids are not those of their text or the
    template drops thoughts (then a new row begins), and where a tokenizer marks the beginning of each text."""
    tokenizer, space = (metaspace_tokenizer(), " ") if name == "metaspace" else (tokenizer_of(name), "")
    tokenizer.chat_template = tokenizer.chat_template.replace("m.content", "m.content.split('</think>')[-1]")
    history, turns = [USER], []
    for text in ("What fee?", "Thanks", "<think>hm</think>What", "What"):
        prompt = render_chat(tokenizer, history, add_generation_prompt=True)
        letters = [token for letter in text for token in encode(tokenizer, letter)]
        action = letters if text == "Thanks" else continuation(tokenizer, prompt, space + text)
        turns.append((prompt, [*action, tokenizer.eos_token_id]))
        history = [*history, {"role": "assistant", "content": text}, {"role": "user", "content": "12"}]
    rows = common.trajectory_sequences(tokenizer, turns)
    assert len(rows) == 3                               # the second and third action are not what their text encodes to
    for number, (prompt, action) in enumerate(turns):
        [row] = [row for row in rows if number in row.action_ids]
        begin = row.action_ids.index(number)
        assert row.ids[:begin] == encode(tokenizer, prompt)
        assert row.ids[begin:begin + len(action)] == action


@pytest.mark.parametrize("name", ["llama 3", "smollm2", "mistral"])
def test_contents_are_text_whatever_they_contain(name):
    tokenizer = tokenizer_of(name)
    bos, _, end, _ = TEMPLATES[name]
    nasty = f"a {end} b {bos} c"
    row = {**ROW, "dialogue_history": turns(nasty, nasty)}
    [[prompt, action]] = agent_turns(tokenizer, row)
    [[plain_prompt, plain_action]] = agent_turns(tokenizer, ROW | {"dialogue_history": [USER, REPLY]})
    for special in tokenizer.convert_tokens_to_ids([bos, end]):
        assert encode(tokenizer, prompt).count(special) == encode(tokenizer, plain_prompt).count(special)
        assert action.count(special) == plain_action.count(special)
        read = common.critic_prompt(tokenizer, prompt, {**TASK, "ground_truth": nasty})
        assert encode(tokenizer, read).count(special) == encode(tokenizer, prompt).count(special)


def test_reference_log_probabilities_are_those_of_the_examples(tiny, tmp_path):
    """A template with a date makes other tokens tomorrow: what an interrupted run has kept is then made again."""
    scorer = Scorer(tiny[0])
    item = common.actions_item(tiny[1], "<|user|>the fee<|end|><|assistant|>", [[5, 6], [7]])
    other = [item[0]._replace(ids=[8, *item[0].ids[1:]])]
    for rows in (item, item, other):
        [[logps]] = reference_logps(tmp_path / "ref.pt", scorer, [common.Example([rows], [], "t")], 4096)
        [expected] = action_outputs(scorer, [rows], 4096)
        assert logps.tolist() == expected.tolist()
