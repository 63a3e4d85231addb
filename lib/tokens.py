"""Tokens of a dialogue: chat templates, and the prompt and ids of a turn, whether sampled, logged or rendered."""
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
    """The ids of `text`. A lone surrogate, which tokenizers refuse, becomes "?"."""
    return tokenizer(text.encode(errors="replace").decode(), add_special_tokens=False)["input_ids"]


def decode(tokenizer, ids):
    """The text of sampled ids, without special tokens except the marks of thoughts (THOUGHTS)."""
    seen = [number for number in ids if number not in unseen_ids(tokenizer)]
    return tokenizer.decode(seen, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def continuation(tokenizer, prompt, text):
    """The ids of `text` after a prompt (text), tokenized together unless a token crosses the border."""
    read, whole = encode(tokenizer, prompt), encode(tokenizer, prompt + text)
    if whole[:len(read)] == read:
        return whole[len(read):]
    return encode(tokenizer, text)


@functools.lru_cache
def special_tokens(tokenizer):
    """A pattern that matches the first character of every text that becomes a control token."""
    texts = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    return re.compile("|".join(f"{re.escape(text[0])}(?={re.escape(text[1:])})" for text in texts) or "(?!)")


def plain(tokenizer, text):
    """The text with control tokens defused: a zero-width space follows their first character."""
    return special_tokens(tokenizer).sub(lambda match: match[0] + "\u200b", text)


@functools.lru_cache
def tokenizer_name(tokenizer):
    """Hash of a tokenizer: vocabulary and chat template (or several named ones), which determine the ids of a dialogue.
    It ignores the order of templates and line ends, which saving a tokenizer can change."""
    templates = tokenizer.chat_template
    if not isinstance(templates, dict):
        templates = {"default": str(templates)}
    templates = {name: re.sub(r"\r\n?", "\n", templates[name]) for name in sorted(templates)}
    if list(templates) == ["default"]:                              # saving drops this name
        templates = templates["default"]
    content = json.dumps([sorted(tokenizer.get_vocab().items()), templates])
    return hashlib.sha256(content.encode()).hexdigest()[:16]


# ---------------------------------------------------------------------------------------------------------------------
# thoughts, which open a turn and are not shown

# Start and end marks of a model's thoughts
THOUGHTS = (("<think>", "</think>"), ("<thinking>", "</thinking>"), ("[THINK]", "[/THINK]"))


@functools.lru_cache
def unseen_ids(tokenizer):
    """The ids of special tokens, except marks of thoughts, which may be special too (Mistral)."""
    marks = {mark for kind in THOUGHTS for mark in kind}
    return {number for number, token in tokenizer.added_tokens_decoder.items()
            if token.special and token.content not in marks}


def strip_thoughts(text, prompt=None):
    """A model's turn without the thoughts (THOUGHTS) that open it, as the other side sees it. The prompt may have
    opened the first thought, and the last may have no end. Later marks are text, e.g. a string in an answer.
    "<think>a</think> b" -> "b", "a<think>b</think>" stays; after the prompt "?<think>": "a</think>b" -> "b".

    prompt: None if unknown (a server's). A thought with only an end was then opened by the prompt."""
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
    """Index after the thought at the start of a text: after the first mark `end` that is not in quotation marks (a
    thought may mention it), else after the first one."""
    ends = list(re.finditer(re.escape(end), text))
    for match in ends:
        before, behind = text[match.start() - 1], text[match.end():match.end() + 1]
        if before != behind or before not in QUOTES:
            return match.end()
    return ends[0].end() if ends else len(text)


# ---------------------------------------------------------------------------------------------------------------------
# chat templates

def plain_chat(tokenizer, chat):
    """Messages with control tokens defused in their contents (texts, or lists of texts and images)."""
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
    """Text of a chat (messages), rendered by the template of a tokenizer or processor. Control tokens in contents are
    defused (plain_chat). If the template rejects a system message (Gemma 2, Mistral), the system prompt is put at the
    start of the first user message, as Gemma 3's template does. Raises InputError if the template fails."""
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
    """The text that opens an agent's turn in the template."""
    chat = [{"role": "user", "content": "?"}]
    without_cue = render_chat(tokenizer, chat, add_generation_prompt=False)
    return render_chat(tokenizer, chat, add_generation_prompt=True).removeprefix(without_cue)


@functools.lru_cache
def end_of_turn(tokenizer):
    """The id that ends an agent's turn in the template (for Gemma and Phi-3 not the tokenizer's eos_token); the
    eos_token's id if the template has none."""
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
# the agent's view of a dialogue

AGENT = record({"system_prompt": str}, {"chat_template_args": dict})
LAST_ROUND = "\n(last round)"
# The start of a logged prompt: the system prompt in Llama 3's template (after two dates) or in ChatML
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

    our_prompt: the domain's prompt; the user message that opens the last round then ends with a note.
    system: replaces this prompt and drops the note.
    `c` is not an argument: no agent model can see it."""
    prompt = our_prompt if system is None else system
    messages = [{"role": "system", "content": prompt}] if prompt or system is not None else []
    for turn in history:
        messages.append({"role": turn["role"], "content": turn["content"]})
    if system is None and len(history) == 2 * max_rounds - 1:
        messages[-1]["content"] += LAST_ROUND
    return messages


def our_system(trajectory):
    """Our own system prompt for the agent of a trajectory."""
    return domain_of(trajectory["task"]).agent_system(trajectory.get("max_rounds", 10))


def system_prompt(trajectory):
    """The agent's system prompt in a trajectory: its "system_prompt" (02 --system-prompt), or the one in the logged
    prompt of its first turn (published files). None: ours, or one that cannot be read."""
    text = trajectory.get("system_prompt")
    if text is None:
        first = next(turn for turn in trajectory["dialogue_history"] if turn["role"] == "assistant")
        if match := LOGGED_SYSTEM.match(first.get("input", "")):
            text = match[1] if match[2] is None else match[2]
    return None if text == our_system(trajectory) else text


def shown_system(trajectory):
    """The agent's system prompt in a trajectory, even if it is ours; it may be empty."""
    text = system_prompt(trajectory)
    return our_system(trajectory) if text is None else text


def note_prompt(folder, trajectories):
    """Write agent.json into an agent's `folder`: its system prompt and template arguments in training (check_prompt).
    """
    notes = collections.Counter()
    for trajectory in trajectories:
        note = {"system_prompt": shown_system(trajectory),
                "chat_template_args": trajectory.get("chat_template_args", {})}
        notes[json.dumps(note, sort_keys=True)] += 1
    [(note, count)] = notes.most_common(1)
    if len(notes) > 1:
        say(f"{len(trajectories) - count:,} of {len(trajectories):,} trajectories have another system prompt, or other "
            "chat template arguments, than most")
    if is_main():
        write_json(pathlib.Path(folder) / "agent.json", json.loads(note))


def check_prompt(agent, tokenizer, system, arguments):
    """Warn if an agent (a folder of 04) was trained with another system prompt, or other chat template arguments, than
    it has now, unless the template renders both alike."""
    path = pathlib.Path(agent) / "agent.json"
    if not path.is_file():
        return
    note = read_json(path, AGENT)

    def prompt_with(system, arguments):
        chat = [{"role": "system", "content": system}, {"role": "user", "content": "?"}]
        return render_chat(tokenizer, chat, add_generation_prompt=True, **arguments)
    trained_prompt = prompt_with(note["system_prompt"], note.get("chat_template_args", {}))
    if trained_prompt != prompt_with(system, arguments):
        say(f"{agent}: was trained with another system prompt, or other chat template arguments, than it has here; "
            f"{path} has them (--system-prompt FILE, --max-rounds, --chat-template-args)")


# ---------------------------------------------------------------------------------------------------------------------
# the prompt and ids of a turn

def prompt_text(tokenizer, trajectory, history):
    """The prompt of a trajectory's agent after `history`, ending with the cue of its turn."""
    chat = agent_chat(trajectory, history)
    return render_chat(tokenizer, chat, add_generation_prompt=True, **trajectory.get("chat_template_args", {}))


def agent_turns(tokenizer, trajectory, counts=None):
    """[(prompt text, action ids)] of a trajectory's agent turns, as close to the sampled ones as the file allows.
    The ids end with the end-of-turn token, except in sampled turns cut by --max-new-tokens.

    A turn is of one of three kinds, which are counted in `counts` (a Counter):
    "as sampled"      this tokenizer sampled it: the ids are in the file
    "as logged"       its logged prompt ends with this template's cue (published files): ids come from the raw output
    "rendered again"  else: the template renders prompt and ids from the turns"""
    history = trajectory["dialogue_history"]
    is_sampled = trajectory.get("tokenizer") == tokenizer_name(tokenizer)
    cue = generation_cue(tokenizer)                                  # "" if the template has none
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
            if trajectory.get("system_prompt", "").strip() not in prompt:       # models/tiny's template omits it
                kind += " without their system prompt, which the template leaves out"
        turns.append((prompt, action))
        if counts is not None:
            counts[kind] += 1
    return turns


def rendered_turn(tokenizer, trajectory, index):
    """(prompt, action), the texts of an agent's turn, rendered by the template in a dialogue that ends with this turn.
    The prompt ends with the cue or, if the template opens a finished turn in another way (e.g. the cue starts a
    thought), just before the content."""
    history = trajectory["dialogue_history"]
    content = history[index]["content"]
    prompt = prompt_text(tokenizer, trajectory, history[:index])
    chat = [*agent_chat(trajectory, history[:index]), {"role": "assistant", "content": content}]
    rendered = render_chat(tokenizer, chat, **trajectory.get("chat_template_args", {}))
    whole, _, _ = rendered.rpartition(tokenizer.decode(end_of_turn(tokenizer)))
    if content.strip() and whole.startswith(prompt):
        return prompt, whole[len(prompt):]
    content = plain(tokenizer, content)
    for text in (content, content.strip()):                          # many templates trim
        if text.strip() and whole.endswith(text):
            return whole.removesuffix(text), text
    return prompt, content


def say_kinds(what, kinds):
    """Report how many turns are of each kind (agent_turns), if there are any."""
    if kinds:
        say(f"{what}: {', '.join(f'{count:,} {kind}' for kind, count in kinds.items())}")
