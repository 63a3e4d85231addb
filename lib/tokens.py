"""Tokens of a dialogue: chat templates, and the prompt and ids of a turn, be it sampled, logged or rendered."""
import collections
import functools
import hashlib
import json
import pathlib
import re

from colbench import domain_of
from colbench.extract_code import QUOTES, without_thoughts
from colbench.schema import record
from lib.runtime import InputError, is_main, one_line, read_json, say, write_json

# ---------------------------------------------------------------------------------------------------------------------
# ids and texts

def encode(tokenizer, text):
    """The ids of `text`; a lone surrogate, which tokenizers refuse, is read as "?"."""
    return tokenizer(text.encode(errors="replace").decode(), add_special_tokens=False)["input_ids"]


def decode(tokenizer, ids):
    """The text of ids as they were sampled, without special tokens but with the marks of thoughts (THOUGHTS)."""
    seen = [number for number in ids if number not in unseen_ids(tokenizer)]
    return tokenizer.decode(seen, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def continuation(tokenizer, prompt, text):
    """The ids of `text` where it follows a prompt (text), as far as no token reaches over the border."""
    read, whole = encode(tokenizer, prompt), encode(tokenizer, prompt + text)
    if whole[:len(read)] == read:
        return whole[len(read):]
    return encode(tokenizer, text)


@functools.lru_cache
def special_tokens(tokenizer):
    """A pattern for the first character of every text that becomes a control token."""
    texts = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    return re.compile("|".join(f"{re.escape(text[0])}(?={re.escape(text[1:])})" for text in texts) or "(?!)")


def plain(tokenizer, text):
    """The text, in which the name of a control token stays text: a zero-width space follows its first character."""
    return special_tokens(tokenizer).sub(lambda match: match[0] + "\u200b", text)


@functools.lru_cache
def tokenizer_name(tokenizer):
    """A hash of what decides the ids of a dialogue: vocabulary and chat template, or several by their names. Saving a
    tokenizer can change the order of these, and line ends, which a template reads alike."""
    templates = tokenizer.chat_template
    if not isinstance(templates, dict):
        templates = {"default": str(templates)}
    templates = {name: re.sub(r"\r\n?", "\n", templates[name]) for name in sorted(templates)}
    if list(templates) == ["default"]:                              # is saved without its name
        templates = templates["default"]
    content = json.dumps([sorted(tokenizer.get_vocab().items()), templates])
    return hashlib.sha256(content.encode()).hexdigest()[:16]


# ---------------------------------------------------------------------------------------------------------------------
# thoughts, which open a turn and are not shown

# The marks between which a model's thoughts stand
THOUGHTS = (("<think>", "</think>"), ("<thinking>", "</thinking>"), ("[THINK]", "[/THINK]"))


@functools.lru_cache
def unseen_ids(tokenizer):
    """The ids of special tokens but for the marks of thoughts, which may be special, too (Mistral's)."""
    marks = {mark for kind in THOUGHTS for mark in kind}
    return {number for number, token in tokenizer.added_tokens_decoder.items()
            if token.special and token.content not in marks}


def strip_thoughts(text, prompt=None):
    """What the other side sees of what a model said after a prompt: all but the thoughts (THOUGHTS) that open its turn,
    of which the last may have no end. The prompt may have opened the first. Marks that stand later are text, an
    answer's string, say.
    "<think>a</think> b" -> "b", "a<think>b</think>" stays; after the prompt "?<think>": "a</think>b" -> "b".

    prompt: None where it is not known (a server's): it has then opened a thought whose end alone is there."""
    text = text.strip()
    if prompt is None and not any(begin in text for begin, _ in THOUGHTS):
        return without_thoughts(text).strip()
    for begin, _ in THOUGHTS:
        if prompt and prompt.rstrip().endswith(begin):
            text = begin + text
    while marks := [marks for marks in THOUGHTS if text.startswith(marks[0])]:
        [(_, end)] = marks
        text = text[end_of_thought(text, end):].strip()
    return text


def end_of_thought(text, end):
    """Where what follows the thought at the beginning of a text stands: behind the first mark `end` that is not between
    quotation marks, as a thought about thoughts names it, else behind the first."""
    ends = list(re.finditer(re.escape(end), text))
    for match in ends:
        before, behind = text[match.start() - 1], text[match.end():match.end() + 1]
        if before != behind or before not in QUOTES:
            return match.end()
    return ends[0].end() if ends else len(text)


# ---------------------------------------------------------------------------------------------------------------------
# chat templates

def plain_chat(tokenizer, chat):
    """Messages whose contents (texts, or lists of texts and images) name no control token."""
    messages = []
    for message in chat:
        content = message["content"]
        if isinstance(content, str):
            content = plain(tokenizer, content)
        else:
            content = [{**part, "text": plain(tokenizer, part["text"])} if "text" in part else part for part in content]
        messages.append({**message, "content": content})
    return messages


def render_chat(tokenizer, chat, **options):
    """The text of a chat (messages) by the template of a tokenizer or processor; InputError where the template fails.
    Where it raises an error at a system message (Gemma 2's, Mistral's), the system prompt opens the first message of
    the user, as in Gemma 3's. Contents are text alone (plain_chat)."""
    text_tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
    try:
        return tokenizer.apply_chat_template(plain_chat(text_tokenizer, chat), tokenize=False, **options)
    except Exception as error:                                      # a template can raise anything
        if chat[0]["role"] == "system":
            system, request, *rest = chat
            opening = {**request, "content": f"{system['content']}\n\n{request['content']}"}
            return render_chat(tokenizer, [opening, *rest], **options)
        raise InputError(f"{text_tokenizer.name_or_path}: its chat template fails ({type(error).__name__}: "
                         f"{one_line(error)})") from None


@functools.lru_cache
def generation_cue(tokenizer):
    """The text with which the template opens an agent's turn."""
    chat = [{"role": "user", "content": "?"}]
    plain = render_chat(tokenizer, chat, add_generation_prompt=False)
    return render_chat(tokenizer, chat, add_generation_prompt=True).removeprefix(plain)


@functools.lru_cache
def end_of_turn(tokenizer):
    """The id with which the template ends an agent's turn (of Gemma and Phi-3 it is not the tokenizer's eos_token); the
    eos_token's where the template ends it with no such token."""
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "Nothing"}]
    _, message, ending = render_chat(tokenizer, chat).rpartition("Nothing")
    ids = encode(tokenizer, ending.lstrip())
    if message and ids and ids[0] in tokenizer.added_tokens_decoder:
        return ids[0]
    return tokenizer.eos_token_id


def stop_ids(model, tokenizer):
    """All ids that end a turn: the model's eos list, the tokenizer's and the template's."""
    ids = model.generation_config.eos_token_id
    if not isinstance(ids, list):
        ids = [ids]
    return sorted({*ids, tokenizer.eos_token_id, end_of_turn(tokenizer)} - {None})


# ---------------------------------------------------------------------------------------------------------------------
# what the agent sees

AGENT = record({"system_prompt": str}, {"chat_template_args": dict})
LAST_ROUND = "\n(last round)"
# The beginning of a logged prompt: the system prompt in Llama 3's template (which puts two dates in front) or ChatML
LOGGED_SYSTEM = re.compile(
    r"(?:<\|begin_of_text\|>)*<\|start_header_id\|>system<\|end_header_id\|>\n\n"
    r"(?:Cutting Knowledge Date: [^\n]*\n)?(?:Today Date: [^\n]*\n)?\n?(.*?)<\|eot_id\|>|"
    r"<\|im_start\|>system\n(.*?)<\|im_end\|>", re.DOTALL)


def agent_chat(trajectory, history):
    """The chat that a trajectory's agent sees after `history` (agent_messages)."""
    max_rounds = trajectory.get("max_rounds", 10)
    return agent_messages(history, max_rounds, our_system(trajectory), system_prompt(trajectory))


def agent_messages(history, max_rounds, our_prompt, system=None):
    """The chat that an agent sees before its next turn: a system prompt and the dialogue.

    The prompt is the domain's, our_prompt; the user's message that opens the last round then ends with a note.
    system: a text that replaces this prompt and the note.
    `c` is not an argument: no model that plays the agent can see it."""
    prompt = our_prompt if system is None else system
    messages = [{"role": "system", "content": prompt}] if prompt or system is not None else []
    for turn in history:
        messages.append({"role": turn["role"], "content": turn["content"]})
    if system is None and len(history) == 2 * max_rounds - 1:
        messages[-1]["content"] += LAST_ROUND
    return messages


def template_args(trajectory):
    """The arguments of the chat template that the agent of a trajectory had (02 --chat-template-args)."""
    return trajectory.get("chat_template_args", {})


def our_system(trajectory):
    """The system prompt that our agent had in a trajectory."""
    return domain_of(trajectory["task"]).agent_system(trajectory.get("max_rounds", 10))


def system_prompt(trajectory):
    """The system prompt that the agent of a trajectory had: its "system_prompt" (of 02 --system-prompt), or the one in
    the logged prompt of its first turn (published files). None: ours, or one that cannot be read."""
    text = trajectory.get("system_prompt")
    if text is None:
        first = next(turn for turn in trajectory["dialogue_history"] if turn["role"] == "assistant")
        if match := LOGGED_SYSTEM.match(first.get("input", "")):
            text = match[1] if match[2] is None else match[2]
    return None if text == our_system(trajectory) else text


def shown_system(trajectory):
    """The system prompt that the agent of a trajectory had, also where it is ours; it may be empty."""
    text = system_prompt(trajectory)
    return our_system(trajectory) if text is None else text


def note_prompt(folder, trajectories):
    """Write agent.json into an agent's `folder`: what its prompts were made with in training (check_prompt)."""
    notes = collections.Counter()
    for trajectory in trajectories:
        note = {"system_prompt": shown_system(trajectory), "chat_template_args": template_args(trajectory)}
        notes[json.dumps(note, sort_keys=True)] += 1
    [(note, count)] = notes.most_common(1)
    if len(notes) > 1:
        say(f"{len(trajectories) - count:,} of {len(trajectories):,} trajectories have another system prompt, or other "
            "arguments of the chat template, than most")
    if is_main():
        write_json(pathlib.Path(folder) / "agent.json", json.loads(note))


def check_prompt(agent, tokenizer, system, arguments):
    """Say if an agent (a folder of 04) was trained with another system prompt, or other arguments of the chat template,
    than it has now, unless the template renders both alike."""
    path = pathlib.Path(agent) / "agent.json"
    if not path.is_file():
        return
    note = read_json(path, AGENT)

    def prompt_with(system, arguments):
        chat = [{"role": "system", "content": system}, {"role": "user", "content": "?"}]
        return render_chat(tokenizer, chat, add_generation_prompt=True, **arguments)
    trained_prompt = prompt_with(note["system_prompt"], note.get("chat_template_args", {}))
    if trained_prompt != prompt_with(system, arguments):
        say(f"{agent}: was trained with another system prompt, or other arguments of the chat template, than it has "
            f"here; {path} has them (--system-prompt FILE, --max-rounds, --chat-template-args)")


# ---------------------------------------------------------------------------------------------------------------------
# the prompt and ids of a turn

def prompt_text(tokenizer, trajectory, history):
    """The text that the agent of a trajectory continues after `history`, with the cue of its turn."""
    chat = agent_chat(trajectory, history)
    return render_chat(tokenizer, chat, add_generation_prompt=True, **template_args(trajectory))


def agent_turns(tokenizer, trajectory, counts=None):
    """[(prompt text, action ids)] of a trajectory's agent turns, as near to what was sampled as the file allows.
    The ids end with the end-of-turn token, but for sampled turns that --max-new-tokens has cut.

    A turn is of one of three kinds, which `counts` (a Counter) counts:
    "as sampled"      this tokenizer sampled it: the ids are in the file
    "as logged"       its logged prompt ends with this template's cue (published files): ids come from the raw output
    "rendered again"  else: prompt and ids are what the template makes of the turns"""
    history = trajectory["dialogue_history"]
    is_sampled = trajectory.get("tokenizer") == tokenizer_name(tokenizer)
    cue = generation_cue(tokenizer)                                  # "" of a template that has none
    end = end_of_turn(tokenizer)
    turns = []
    for index, turn in enumerate(history):
        if turn["role"] != "assistant":
            continue
        if is_sampled and "input" in turn and "output_ids" in turn:            # not the kept texts of 02 --branch
            kind = "as sampled"
            prompt, action = turn["input"], turn["output_ids"]
        elif "output" in turn and cue and turn.get("input", "").endswith(cue):
            kind = "as logged"
            output = turn["output"].removesuffix(tokenizer.decode(end))
            prompt, action = turn["input"], [*continuation(tokenizer, turn["input"], output), end]
        else:
            kind = "rendered again"
            prompt, text = rendered_turn(tokenizer, trajectory, index)
            action = [*continuation(tokenizer, prompt, text), end]
            if trajectory.get("system_prompt", "").strip() not in prompt:       # that of models/tiny shows none
                kind += " without their system prompt, which the template leaves out"
        turns.append((prompt, action))
        if counts is not None:
            counts[kind] += 1
    return turns


def rendered_turn(tokenizer, trajectory, index):
    """(prompt, action), texts of an agent's turn as the template writes them in a dialogue that ends with it. The
    prompt ends with the cue or, where the template opens a finished turn in another way (a cue that begins a thought,
    say), just before the content."""
    history = trajectory["dialogue_history"]
    content = history[index]["content"]
    prompt = prompt_text(tokenizer, trajectory, history[:index])
    chat = [*agent_chat(trajectory, history[:index]), {"role": "assistant", "content": content}]
    whole, _, _ = render_chat(tokenizer, chat, **template_args(trajectory)).rpartition(
        tokenizer.decode(end_of_turn(tokenizer)))
    if content.strip() and whole.startswith(prompt):
        return prompt, whole[len(prompt):]
    content = plain(tokenizer, content)
    for text in (content, content.strip()):                          # many templates trim
        if text.strip() and whole.endswith(text):
            return whole.removesuffix(text), text
    return prompt, content


def say_kinds(what, kinds):
    """Say how many turns are of which kind (agent_turns), if there are any."""
    if kinds:
        say(f"{what}: {', '.join(f'{count:,} {kind}' for kind, count in kinds.items())}")
