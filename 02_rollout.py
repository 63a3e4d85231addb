"""Stage 2: let an agent work with a simulated human on every task, and score the answers.

Reads   tasks.jsonl (01).
Writes  trajectories.jsonl in the published format, {"task", "dialogue_history", "answer", "reward"}, with "task_id",
        "sample", "tests" (a verdict a test), "num_rounds", "max_rounds"; an agent's turn has "input" (the rendered
        prompt), "output" (the raw text) and "output_ids" (the sampled ids).

The protocol (ColBench, backend): the person opens with the request. In each of `--max-rounds` rounds the agent sends a
message and the person answers it in at most 400 characters. What follows "I WANT TO ANSWER:" is the answer and ends the
episode; in the last round the whole turn is the answer if the marker is not in it. `reward` is the fraction of hidden
tests that the answer passes.

--best-of N: at each turn the agent samples N messages and a critic says which one is sent; it may see the reference, so
this measures a critic and is no way to use an agent. `--critic DIR` takes a critic of 03, `--critic judge:MODEL` a
model that compares two messages at a time, in both orders: where the orders disagree, or a verdict cannot be read, the
earlier message stays. The first message of each turn is the one that would be sent with N = 1.

Agents, humans and judges can be servers (http://HOST:PORT/v1#NAME); what a server's agent says has no token ids, so 03
and 04 tokenise it anew. Agents: a model (see README), or `script`, a noisy scripted agent for template tasks whose
dialogues a base model is taught by (`script-informed`: one that knows the reference). Humans: `rules` (template tasks),
or a model with a prompt.

Differs from the paper: the agent is told when the last round begins. The prompts are ours.

    python 02_rollout.py --tasks out/test.jsonl --agent out/policy --simulator rules --out out/trajectories.jsonl
    torchrun --nproc-per-node 8 02_rollout.py --tasks tasks.jsonl --agent meta-llama/Llama-3.1-8B-Instruct \\
        --simulator meta-llama/Llama-3.1-8B-Instruct --out trajectories.jsonl
"""
import concurrent.futures
import functools
import os
import random
import re
from collections import namedtuple

import torch

import common

SIMULATOR_SYSTEM = (
    "You are a person who asked an assistant for a Python function, in these words:\n{problem_description}\n\n"
    "Only you know what you need: the function below. Answer the assistant's last message in one or two short "
    "sentences of plain English. Say only what was asked about. If the function does not settle it, say that you do "
    "not know. Never write or quote code.\n\n{ground_truth}")
JUDGE = (
    "An assistant writes a Python function for a person. It cannot see what the person needs; you can:\n"
    "{ground_truth}\n\nThe dialogue so far:\n{dialogue}\n\nTwo ways for the assistant to go on:\n[A] {a}\n[B] {b}\n\n"
    "Which one brings the assistant nearer to the function that the person needs? Reply with the letter A or B alone.")
UNCLEAR = ("Could you ask about something specific?", "I am not sure what you mean.", "Please ask me about one thing.")
VAGUE = ("Can you tell me more?", "What else should I know?", "Could you describe the function?")
OPENERS = ("", "", "", "Thanks. ", "Okay. ", "One more question. ")


# ---------------------------------------------------------------------------------------------------------------------
# humans

def rules_reply(task, history, rng):
    """The rule-based human: says what it knows of the (at most two) facts that the last message asks about."""
    asked = common.topics_asked(task["facts"], history[-1]["content"])
    if not asked:
        return rng.choice(UNCLEAR)
    return " ".join(rng.choice(task["facts"][index]["replies"]) for index in asked)


def simulator_messages(task, history):
    """The chat that a model sees which plays the human: the roles swapped, its own request in the system prompt."""
    swapped = {"assistant": "user", "user": "assistant"}
    return [{"role": "system", "content": SIMULATOR_SYSTEM.format(**task)}] + [
        {"role": swapped[turn["role"]], "content": turn["content"]} for turn in history[1:]]


# ---------------------------------------------------------------------------------------------------------------------
# the scripted agent

def script_turn(task, history, max_rounds, informed, rng):
    """What the noisy scripted agent says next. It asks for facts that matter less often than it should, repeats itself,
    asks about things that do not matter, and sometimes answers too early, guessing what it does not know."""
    facts, known = task["facts"], common.known_facts(task, history)
    needed = [i for i, fact in enumerate(facts) if fact["matters"] and i not in known]
    idle = [i for i, fact in enumerate(facts) if not fact["matters"] and i not in known]
    num_turns = sum(turn["role"] == "assistant" for turn in history)
    early, vague, repeat, useless = (0.01, 0.03, 0.04, 0.10) if informed else (0.03, 0.06, 0.14, 0.37)
    luck = rng.random()
    if num_turns + 1 == max_rounds or luck < (early if needed else 0.85):
        values = {fact["slot"]: fact["code"] if informed or i in known else rng.choice(fact["guesses"])
                  for i, fact in enumerate(facts) if fact["matters"]}
        return f"{common.MARKER}\n{task['template'].format(**values)}"
    luck = rng.random()
    if luck < vague:
        return rng.choice(VAGUE)
    if luck < vague + repeat and known:
        ask = rng.choice(sorted(known))
    elif luck < vague + repeat + useless or not needed:
        ask = rng.choice(idle or sorted(known))
    else:
        ask = rng.choice(needed)
    return (rng.choice(OPENERS) if len(history) > 1 else "") + rng.choice(facts[ask]["questions"])


# ---------------------------------------------------------------------------------------------------------------------
# one turn of many dialogues. A dialogue is {"task", "sample", "history", "answer"}.

def script_turns(dialogues, args):
    turns = []
    for dialogue in dialogues:
        rng = dialogue_rng(dialogue, args, "agent")
        informed = args.agent == "script-informed"
        content = script_turn(dialogue["task"], dialogue["history"], args.max_rounds, informed, rng)
        turns.append({"role": "assistant", "content": content})
    return turns


def model_turns(dialogues, agent, chooser, args):
    """The next turn of each dialogue, sampled from the agent, which sees the dialogue alone; with --best-of the one of
    several that `chooser` prefers. A server's turns have no token ids and no rendered prompt."""
    if isinstance(agent, Server):
        chats = [common.agent_messages(d["history"], args.max_rounds) for d in dialogues]
        replies = ask_server(agent, chats, dialogues, args.temperature, args.max_new_tokens, args, "agent")
        return [{"role": "assistant", "content": text.strip(), "output": text, **({} if ended else {"truncated": True})}
                for text, ended in replies]
    model, tokenizer = agent
    prompts = [common.prompt_text(tokenizer, d["history"], args.max_rounds) for d in dialogues]
    outputs = sample(agent, prompts, dialogues, args.temperature, args.max_new_tokens, args, "agent", args.best_of)
    if args.best_of > 1:
        actions = [outputs[i:i + args.best_of] for i in range(0, len(outputs), args.best_of)]
        outputs = [own[best] for own, best in zip(actions, chooser(dialogues, prompts, actions))]
    turns = []
    for prompt, ids in zip(prompts, outputs):
        text = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        ended = ids[-1] in common.stop_ids(model, tokenizer)
        turns.append({"role": "assistant", "content": text.strip(), "input": prompt, "output": text, "output_ids": ids,
                      **({} if ended else {"truncated": True})})
    return turns


def critic_choices(dialogues, prompts, actions, critic, tokenizer, device):
    """The number of the action with the highest score of a critic (03), or of the oracle, for each dialogue."""
    if critic == "oracle":
        scores = [common.oracle_scores(d["task"], d["history"], [tokenizer.decode(ids, skip_special_tokens=True)
                                                                 for ids in own]) for d, own in zip(dialogues, actions)]
    else:
        states = [(prompt, d["task"]["ground_truth"], own) for prompt, d, own in zip(prompts, dialogues, actions)]
        scores = common.score_actions(critic, tokenizer, states, 16384, device)
    return [max(range(len(own)), key=lambda i: own[i]) for own in scores]


def judge_choices(dialogues, _, actions, tokenizer, judge, counts, args):
    """The number of the action that is left of each dialogue's after comparing the best so far with the next, N - 1
    times; `counts` counts verdicts "decided", "tie" (the two orders disagree) and "unreadable"."""
    texts = [[tokenizer.decode(ids, skip_special_tokens=True).strip() for ids in own] for own in actions]
    best = [0] * len(actions)
    for challenger in range(1, args.best_of):
        chats, askers = [], []
        for dialogue, own, held in zip(dialogues, texts, best):
            said = "\n".join(f"{'Assistant' if turn['role'] == 'assistant' else 'Person'}: {turn['content']}"
                             for turn in dialogue["history"])
            for a, b in ((held, challenger), (challenger, held)):
                content = JUDGE.format(ground_truth=dialogue["task"]["ground_truth"], dialogue=said, a=own[a], b=own[b])
                chats.append([{"role": "user", "content": content}])
                askers.append(dialogue)
        letters = [re.findall(r"\b[AB]\b", text) for text in reply_texts(judge, chats, askers, 8, args, "judge")]
        for i, own in enumerate(texts):
            first, second = (found[0] if len(set(found)) == 1 else None for found in letters[2 * i:2 * i + 2])
            if own[best[i]] == own[challenger]:
                continue
            verdict = "unreadable" if None in (first, second) else "tie" if first == second else "decided"
            counts[verdict] += 1
            if verdict == "decided" and first == "B":
                best[i] = challenger
    return best


def human_replies(dialogues, simulator, args):
    """The person's answers; a dialogue's history ends with the agent's turn."""
    if args.simulator == "rules":
        return [rules_reply(d["task"], d["history"], dialogue_rng(d, args, "human")) for d in dialogues]
    chats = [simulator_messages(d["task"], d["history"]) for d in dialogues]
    return reply_texts(simulator, chats, dialogues, 128, args, "human")


def reply_texts(speaker, chats, dialogues, max_new_tokens, args, who):
    """What a model, or a server, says next in each chat (messages), at temperature 0."""
    if isinstance(speaker, Server):
        return [text.strip() for text, _ in ask_server(speaker, chats, dialogues, 0.0, max_new_tokens, args, who)]
    tokenizer = speaker[1]
    prompts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    return [tokenizer.decode(ids, skip_special_tokens=True).strip()
            for ids in sample(speaker, prompts, dialogues, 0.0, max_new_tokens, args, who)]


Server = namedtuple("Server", "client model address")


def open_server(name):
    """The server behind http://HOST:PORT/v1#NAME (OpenAI's protocol), key from OPENAI_API_KEY."""
    address, _, model = name.partition("#")
    if not model:
        raise common.InputError(f"{name}: a server's model goes after #: {address}#NAME")
    try:
        import openai
    except ImportError:
        raise common.InputError(f"{name}: servers need the package openai: pip install openai") from None
    key = os.environ.get("OPENAI_API_KEY", "none")
    return Server(openai.OpenAI(base_url=address, api_key=key, max_retries=5, timeout=600), model, address)


def ask_server(server, chats, dialogues, temperature, max_new_tokens, args, who):
    """[(text, whether it ended by itself)] of the chats, all in flight together. Failed requests are tried again with
    growing pauses (by the client); what fails for good is an InputError, never an empty reply."""
    import openai

    def ask(chat, dialogue):
        try:
            seed = int(common.uniforms(1, *dialogue_key(dialogue, args, who)).item() * 2 ** 31)
            choice = server.client.chat.completions.create(
                model=server.model, messages=chat, temperature=temperature, top_p=1.0, max_tokens=max_new_tokens,
                seed=seed).choices[0]
        except (openai.OpenAIError, ValueError, IndexError, AttributeError, TypeError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
            raise common.InputError(f"{server.address}#{server.model}: no reply ({type(error).__name__}: {reason}); "
                                    "run the same command again to go on") from None
        return choice.message.content or "", choice.finish_reason != "length"

    with concurrent.futures.ThreadPoolExecutor(args.concurrency) as pool:
        return list(pool.map(ask, chats, dialogues))


def sample(model_and_tokenizer, prompts, dialogues, temperature, max_new_tokens, args, who, count=1):
    """`count` continuations of each prompt, one prompt's after the other's."""
    model, tokenizer = model_and_tokenizer
    randoms = torch.cat([common.uniforms((count, max_new_tokens), *dialogue_key(d, args, who)) for d in dialogues])
    return common.generate(model, [common.encode(tokenizer, prompt) for prompt in prompts], randoms, temperature,
                           common.stop_ids(model, tokenizer))


def dialogue_key(dialogue, args, who):
    return args.seed, common.task_id(dialogue["task"]), dialogue["sample"], len(dialogue["history"]), who


def dialogue_rng(dialogue, args, who):
    return random.Random(repr(dialogue_key(dialogue, args, who)))


# ---------------------------------------------------------------------------------------------------------------------
# episodes

def run_block(dialogues, agent, simulator, chooser, args):
    """Play a block of dialogues to their ends, one round of all at a time."""
    while active := [d for d in dialogues if d["answer"] is None]:
        turns = script_turns(active, args) if agent is None else model_turns(active, agent, chooser, args)
        take_turns(active, turns, simulator, args)


def take_turns(dialogues, turns, simulator, args):
    """One round: the agent's turns, which may be answers, and the person's replies to the others."""
    for dialogue, turn in zip(dialogues, turns):
        dialogue["history"].append(turn)
        if common.MARKER in turn["content"]:
            dialogue["answer"] = turn["content"].split(common.MARKER, 1)[1].strip("\n")
        elif len(dialogue["history"]) == 2 * args.max_rounds:
            dialogue["answer"] = turn["content"]
    active = [d for d in dialogues if d["answer"] is None]
    for dialogue, reply in zip(active, human_replies(active, simulator, args) if active else []):
        dialogue["history"].append({"role": "user", "content": reply[:common.MAX_REPLY_CHARS]})


def to_trajectory(dialogue, verdicts, tokenizer, args):
    """The finished and scored dialogue in the published format."""
    task, history = dialogue["task"], dialogue["history"]
    return {"task_id": common.task_id(task), "sample": dialogue["sample"], "task": task, "dialogue_history": history,
            "answer": dialogue["answer"], "reward": common.reward_of(verdicts), "tests": verdicts,
            "num_rounds": sum(turn["role"] == "assistant" for turn in history), "max_rounds": args.max_rounds,
            "agent": args.agent, "simulator": args.simulator, "tokenizer": tokenizer,
            "best_of": args.best_of, "critic": args.critic,
            "informed": args.agent == "script-informed"}


def summary(trajectories):
    """One line: success, tests passed, rounds, and what was cut or forced."""
    n = len(trajectories)
    last = [[turn for turn in t["dialogue_history"] if turn["role"] == "assistant"][-1] for t in trajectories]
    forced = sum(common.MARKER not in turn["content"] for turn in last)
    cut = sum(turn.get("truncated", False) for t in trajectories for turn in t["dialogue_history"])
    return (f"success {sum(t['reward'] == 1 for t in trajectories) / n:.3f} | tests passed "
            f"{sum(t['reward'] for t in trajectories) / n:.3f} | rounds "
            f"{sum(t['num_rounds'] for t in trajectories) / n:.2f} | {forced / n:.1%} ended without the marker | "
            f"{cut} turns stopped by --max-new-tokens")


# ---------------------------------------------------------------------------------------------------------------------

PRESETS = {f"paper-{domain}": {"max_rounds": 10, "temperature": 1.0, "max_new_tokens": 1024, "dtype": "bfloat16"}
           for domain in ("backend", "frontend")}


def parse_args(argv=None):
    parser = common.argument_parser(__doc__)
    parser.add_argument("--tasks", required=True, help="tasks file (01)")
    parser.add_argument("--agent", required=True, help="a model (folder, hub id, smollm2), script or script-informed")
    parser.add_argument("--simulator", default="rules", help="who plays the human: rules, or a model")
    parser.add_argument("--samples", type=common.positive_int, default=1, help="dialogues a task")
    parser.add_argument("--max-rounds", type=common.positive_int, default=10, help="agent turns in a dialogue")
    parser.add_argument("--single-turn", action="store_true", help="the agent answers at once (--max-rounds 1)")
    parser.add_argument("--temperature", type=float, default=1.0, help="of the agent; the human's is 0")
    parser.add_argument("--max-new-tokens", type=common.positive_int, default=1024, help="tokens a turn of the agent")
    parser.add_argument("--best-of", type=common.positive_int, default=1, help="messages sampled at each turn")
    parser.add_argument("--critic", help="who picks one of --best-of: a critic folder (03), judge:MODEL, or oracle: "
                        "what the template task says of a turn")
    parser.add_argument("--concurrency", type=common.positive_int, default=64, help="dialogues in flight")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="arithmetic of the models")
    parser.add_argument("--seed", type=int, default=0, help="seed of the samples")
    common.add_scorer(parser)
    parser.add_argument("--out", required=True, help="trajectories file to write (JSONL)")
    common.add_overwrite(parser)
    common.set_preset(parser, PRESETS, argv)
    args = parser.parse_args(argv)
    if args.best_of > 1 and (args.critic is None or args.agent.startswith("script")):
        parser.error("--best-of needs an agent that is a model, and --critic DIR or judge:MODEL")
    return args


def main(argv=None):
    args = parse_args(argv)
    if args.single_turn:
        args.max_rounds = 1
    runtime = common.start(args.seed)
    tasks = common.read_jsonl(args.tasks, common.TASK_KEYS)
    scripted = args.agent.startswith("script")
    oracle = args.critic == "oracle"
    if args.simulator == "rules" or scripted or oracle:
        for number, task in enumerate(tasks, 1):
            if "facts" not in task:
                raise common.InputError(f'{args.tasks}:{number}: missing "facts", which the rules of template tasks '
                                        "need; use --agent MODEL --simulator MODEL, and a critic that is no oracle")
    inputs = [args.tasks, args.agent, args.simulator, None if oracle else (args.critic or "").removeprefix("judge:")]
    if common.claim_output(args, args.out, inputs, begin=False):
        return

    def load(name):
        return open_server(name) if name.startswith("http") else common.load_model(name, runtime.device, args.dtype)

    agent = None if scripted else load(args.agent)
    if args.best_of > 1 and isinstance(agent, Server):
        raise common.InputError("--best-of needs an agent whose tokens are at hand: a folder or hub id, no server")
    simulator = None if args.simulator == "rules" else agent if args.simulator == args.agent else load(args.simulator)
    judge = critic = chooser = None
    verdicts = dict.fromkeys(("decided", "tie", "unreadable"), 0)
    if args.best_of > 1 and args.critic.startswith("judge:"):
        name = args.critic.removeprefix("judge:")
        judge = agent if name == args.agent else load(name)
        chooser = functools.partial(judge_choices, tokenizer=agent[1], judge=judge, counts=verdicts, args=args)
    elif args.best_of > 1:
        critic = args.critic
        if not oracle:
            critic = common.load_critic(common.read_critic(args.critic, agent[1]),
                                        common.load_whole(runtime.device, args.dtype))
        chooser = functools.partial(critic_choices, critic=critic, tokenizer=agent[1], device=runtime.device)
    local = [speaker for speaker in (agent, simulator, judge) if speaker and not isinstance(speaker, Server)]
    for model, _ in local:
        model.eval()
    if common.claim_output(args, args.out, inputs):
        return

    costs = common.Costs(args.out, runtime.device)
    # Blocks of `concurrency` dialogues are played to their ends one after the other; a resumed run plays the same ones.
    todo = [{"task": task, "sample": sample, "answer": None,
             "history": [{"role": "user", "content": task["problem_description"]}]}
            for task in tasks for sample in range(args.samples)]
    blocks = [todo[i:i + args.concurrency] for i in range(0, len(todo), args.concurrency)]
    name = common.tokenizer_name(agent[1]) if agent and not isinstance(agent, Server) else None
    num_tokens = 0

    def play(block, progress):
        nonlocal num_tokens
        run_block(block, agent, simulator, chooser, args)
        num_tokens += sum(len(turn.get("output_ids", ())) for d in block for turn in d["history"])
        progress.set_postfix_str(f"{num_tokens / max(1e-9, progress.format_dict['elapsed']):,.0f} tok/s")
        scores = scorer.score([(dialogue["task"], dialogue["answer"]) for dialogue in block])
        return [to_trajectory(dialogue, score.tests, name, args) for dialogue, score in zip(block, scores)]

    with common.Scorer(args.unsafe_scorer) as scorer:
        trajectories = common.map_blocks(args.out, blocks, play, runtime, "dialogue")
    models = [model for model, _ in local] + ([critic["model"], critic["reference"]] if critic and not oracle else [])
    costs.record([common.work_of(model) for model in {id(m): m for m in models if m}.values()])
    common.say(summary(trajectories))
    if judge:
        sums = common.reduce_sums(list(verdicts.values()), runtime.device)
        common.say("judge's comparisons: " + ", ".join(f"{count:,.0f} {name}" for name, count in zip(verdicts, sums)))


if __name__ == "__main__":
    common.run_stage(main)
