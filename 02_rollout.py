"""Stage 2: let an agent work with a simulated human on every task, and score the answers.

Reads   tasks.jsonl (01).
Writes  trajectories.jsonl in the published format, {"task", "dialogue_history", "answer", "reward"}, with "task_id",
        "sample", "num_rounds", "max_rounds" and what the scorer says ("tests", a verdict a test, and "faults"; of pages
        "similarity", "image", "reference_image" in the folder FILE.images). An agent's turn has "input" (the rendered
        prompt), "output" (the raw text) and "output_ids" (the sampled ids); a human's turn that shows code "leak".
        FILE.failed.jsonl where dialogues failed: the same command again plays these alone.

The protocol (ColBench): the human opens with the request. In each of `--max-rounds` rounds the agent sends a message
and the human answers it. When a message is the answer, and what a return is, the task's domain says (colbench/): of
functions what follows "I WANT TO ANSWER:", or the whole last turn, and the share of hidden tests that it passes; of
pages the last page, and the similarity of its screenshot to the reference's (--similarity).

--best-of N: at each turn the agent samples N messages and a critic says which one is sent; it may see the reference, so
this measures a critic and is no way to use an agent. `--critic DIR` takes a critic of 03, `--critic judge:MODEL` a
model that compares two messages at a time, in both orders: where the orders disagree, or a verdict cannot be read, the
earlier message stays. The first message of each turn is the one that would be sent with N = 1.

--branch N: --tasks is a trajectories file; at N random agent turns of it the agent samples --branch-candidates
messages, and each is played on to the end --samples times. Rows have "branch": {"sample", "turn", "candidate"}. The
mean return of a candidate is its Monte-Carlo return, which 05 --critics --returns compares critics with.

Every dialogue goes its own way, `--concurrency` of them at a time. A model on this machine takes what waits for it in
batches; a server (http://HOST:PORT/v1#NAME, or http://A/v1,http://B/v1#NAME; for agents, simulators and judges) is
asked at once. What a server's agent says has no token ids, so that 03 and 04 tokenise it anew, but for vLLM's with
--agent-tokenizer. Agents: a model (see README), or `script`, a noisy scripted agent for template tasks whose dialogues
a base model is taught by (`script-informed`: one that knows the reference; queries have a `script-asker`, too).
Simulators: `rules` (template tasks), or a model with a prompt. <think> blocks are kept in "output", and the other side
does not see them.

Differs from the paper: the agent is told when the last round begins. The prompts are ours.

    python 02_rollout.py --tasks out/test.jsonl --agent out/policy --simulator rules --out out/trajectories.jsonl
    torchrun --nproc-per-node 8 02_rollout.py --tasks tasks.jsonl --agent meta-llama/Llama-3.1-8B-Instruct \\
        --simulator http://localhost:8000/v1#meta-llama/Llama-3.1-70B-Instruct --out trajectories.jsonl
"""
import argparse
import asyncio
import collections
import functools
import json
import pathlib
import random
import re
import sys
import time

import common
from colbench import ColBenchError, domain_of, task_id
from lib.arguments import add_overwrite, add_world, argument_parser, non_negative_int, positive_int, set_preset
from lib.costs import Costs
from lib.models import encode, is_server, load_tokenizer, work_of
from lib.report import heading_of
from lib.runtime import (
    barrier,
    begin_output,
    gather,
    InputError,
    is_done,
    read_text,
    Rows,
    run_stage,
    start,
    write_jsonl,
)
from lib.servers import ReplyError, strip_thoughts
from lib.speakers import ask, open_speaker, speed_lines

# ---------------------------------------------------------------------------------------------------------------------
# one turn of a dialogue. A dialogue is {"number", "task", "sample", "history", "system", "answer", "waited_s"}; who
# speaks is a Speaker (lib/speakers.py), or None for the scripted agent and the rule-based human.

def new_dialogue(task, sample, number=0, history=None, system=None):
    """history: the turns so far (None: the request alone); system: the agent's system prompt (None: ours)."""
    history = list(history or [{"role": "user", "content": task["problem_description"]}])
    return {"number": number, "task": task, "sample": sample, "history": history, "system": system, "answer": None,
            "waited_s": 0.0}


def dialogue_key(dialogue, args, who):
    """What the random numbers of a turn depend on."""
    return args.seed, task_id(dialogue["task"]), dialogue["sample"], len(dialogue["history"]), who


def visible(speaker, prompt, reply):
    """What the other side sees of a reply. A server may already have put apart the thoughts that its prompt opened."""
    return strip_thoughts(reply.text, None if speaker.server else prompt)


async def agent_turn(dialogue, agent, chooser, args):
    """The agent's next turn. A model sees the dialogue alone; with --best-of it is the one of several that `chooser`
    prefers. A server's turn has the prompt and the sampled ids only with --agent-tokenizer."""
    task, history, key = dialogue["task"], dialogue["history"], dialogue_key(dialogue, args, "agent")
    domain = domain_of(task)
    if agent is None:
        player = getattr(domain, "PLAYERS", {}).get(args.agent, domain.scripted_turn)
        text = player(task, history, args.max_rounds, args.agent == "script-informed", random.Random(repr(key)))
        return {"role": "assistant", "content": domain.shown(text)}
    chat = common.agent_messages(history, args.max_rounds, domain.AGENT_SYSTEM, dialogue["system"])
    prompt, replies = await ask(agent, chat, key, args.temperature, args.max_new_tokens, args.best_of,
                                ("agent", dialogue["number"]),
                                **({"return_token_ids": True} if args.agent_tokenizer else {}))
    reply = replies[await chooser(dialogue, prompt, replies) if args.best_of > 1 else 0]
    if args.agent_tokenizer and (not reply.ids or reply.prompt_tokens != len(encode(agent.tokenizer, prompt))):
        raise InputError(f"{args.agent}: --agent-tokenizer needs a server that gives token ids, as vLLM does, and "
                         "reads prompts as this tokenizer and template make them; this one does not")
    turn = {"role": "assistant", "content": domain.shown(visible(agent, prompt, reply)), "input": prompt,
            "output": reply.text, "output_ids": reply.ids, "truncated": not reply.ended}
    return {key: value for key, value in turn.items() if value or key in ("content", "output")}


async def human_turn(dialogue, human, world, args):
    """The answer to the agent's turn that ends the history: the environment's own, or the human's. Where it shows code,
    "leak" says how; with --reject-leaks it is sampled anew, at temperature 1, as temperature 0 would repeat it."""
    task, history, key = dialogue["task"], dialogue["history"], dialogue_key(dialogue, args, "human")
    domain = domain_of(task)
    if (answer := await world.tool_reply(task, history)) is not None:
        return {"role": "user", "content": answer, "tool": True}
    if human is None:
        return {"role": "user", "content": await world.rule_reply(task, history, random.Random(repr(key)))}
    chat = await world.person_chat(task, history)
    for attempt in range(args.reject_leaks + 1):
        temperature, attempt_key = (1.0, (*key, attempt)) if attempt else (0.0, key)
        prompt, [reply] = await ask(human, chat, attempt_key, temperature, args.simulator_max_new_tokens,
                                    cache=("human", dialogue["number"]))
        content = visible(human, prompt, reply)[:domain.REPLY_CHARS]
        leak = domain.leak_of(task, content)
        if leak is None:
            break
    turn = {"role": "user", "content": content, "output": reply.text if reply.text.strip() != content else None,
            "leak": leak, "resampled": attempt}
    return {key: value for key, value in turn.items() if value or key == "content"}


# ---------------------------------------------------------------------------------------------------------------------
# --best-of: which of several replies is sent

async def critic_choice(dialogue, prompt, replies, critic, tokenizer, device, world):
    """The number of the reply with the highest score of a critic (03), or of the oracle."""
    points = [common.DecisionPoint(prompt, dialogue["task"], dialogue["history"], [reply.ids for reply in replies],
                                   [reply.text for reply in replies])]
    if not isinstance(critic, str) and critic.get("visual"):
        shown = await world.show(common.documents_needed(critic, points))
        critic = {**critic, "show": lambda _: shown}
    [scores] = common.score_actions(critic, tokenizer, points, 16384, device)
    return max(range(len(scores)), key=scores.__getitem__)


async def judge_choice(dialogue, _, replies, judge, counts, args):
    """The number of the reply that is left after comparing the best so far with the next, N - 1 times; `counts` counts
    verdicts "decided", "tie" (the two orders disagree) and "unreadable"."""
    texts = [reply.text.strip() for reply in replies]
    said = "\n".join(f"{'Assistant' if turn['role'] == 'assistant' else 'Person'}: {turn['content']}"
                     for turn in dialogue["history"])
    question = domain_of(dialogue["task"]).JUDGE

    async def letters(a, b):
        content = question.format(ground_truth=dialogue["task"]["ground_truth"], dialogue=said, a=texts[a], b=texts[b])
        key = dialogue_key(dialogue, args, "judge")
        prompt, [reply] = await ask(judge, [{"role": "user", "content": content}], key, 0.0, 8)
        return set(re.findall(r"\b[AB]\b", visible(judge, prompt, reply)))

    best = 0
    for challenger in range(1, len(texts)):
        if texts[best] == texts[challenger]:
            continue
        first, second = await asyncio.gather(letters(best, challenger), letters(challenger, best))
        verdict = "unreadable" if len(first) != 1 or len(second) != 1 else "tie" if first == second else "decided"
        counts[verdict] += 1
        if verdict == "decided" and first == {"B"}:
            best = challenger
    return best


# ---------------------------------------------------------------------------------------------------------------------
# dialogues

async def play(dialogue, agent, human, chooser, world, args):
    """Play one dialogue from where it stands to its answer."""
    history, domain = dialogue["history"], domain_of(dialogue["task"])
    while dialogue["answer"] is None:
        if history[-1]["role"] == "user":
            history.append(await agent_turn(dialogue, agent, chooser, args))
        dialogue["answer"] = domain.answer_of(history, len(history) == 2 * args.max_rounds)
        if dialogue["answer"] is None:
            begin = time.perf_counter()
            history.append(await human_turn(dialogue, human, world, args))
            dialogue["waited_s"] += time.perf_counter() - begin


async def run_concurrently(work, items, concurrency):
    """work(item) for all items, `concurrency` of them in flight: one that has ended makes place for the next at once.
    If `work` returns a coroutine (scoring), it runs in the background, so that it cannot change which requests share a
    batch."""
    waiting, background = iter(items), []

    async def worker():
        for item in waiting:
            if (rest := await work(item)) is not None:
                background.append(asyncio.create_task(rest))
    await asyncio.gather(*(worker() for _ in range(concurrency)))
    await asyncio.gather(*background)


def dialogue_items(rows, system, args):
    """[(arguments of new_dialogue, more keys of the row)] of what is to be played: --samples of each task or, with
    --branch, of each candidate in each state."""
    if not args.branch:
        return [((task, sample, number, None, system), {}) for number, (task, sample) in
                enumerate((task, sample) for task in rows for sample in range(args.samples))]
    states = [(t, i) for t in rows for i, turn in enumerate(t["dialogue_history"]) if turn["role"] == "assistant"]
    states = random.Random(args.seed).sample(states, min(args.branch, len(states)))
    items = []
    for trajectory, i in states:
        if trajectory.get("max_rounds", args.max_rounds) != args.max_rounds:
            raise InputError(f"{args.tasks}: task {trajectory['task_id']} was played with --max-rounds "
                             f"{trajectory['max_rounds']}; --branch needs the same")
        history = [{"role": turn["role"], "content": turn["content"]} for turn in trajectory["dialogue_history"][:i]]
        for candidate in range(args.branch_candidates):
            branch = {"sample": trajectory["sample"], "turn": i, "candidate": candidate}
            for n in range(args.samples):
                items.append(((trajectory["task"], f"{trajectory['sample']}/{i}/{candidate}", len(items), history,
                               system or common.system_prompt(trajectory)),
                              {"sample": len(items), "branch": branch, "continuation": n}))
    return items


def to_trajectory(dialogue, verdicts, tokenizer, more, args):
    """The finished dialogue in the published format, with what World.score says of it."""
    history = dialogue["history"]
    return {"task_id": task_id(dialogue["task"]), "sample": dialogue["sample"], "task": dialogue["task"],
            "dialogue_history": history, "answer": dialogue["answer"], **verdicts,
            "num_rounds": sum(turn["role"] == "assistant" for turn in history), "max_rounds": args.max_rounds,
            "agent": args.agent, "simulator": args.simulator, "tokenizer": tokenizer, "best_of": args.best_of,
            "critic": args.critic, "informed": args.agent == "script-informed",
            **({} if dialogue["system"] is None else {"system_prompt": dialogue["system"]}), **more}


async def play_and_save(item, speakers, world, rows, progress, tally, failed, candidates, tokenizer, args):
    """Play an item of dialogue_items; returns what scores it and adds its row. A dialogue that a server does not answer
    goes to `failed`; many of these in a row end the run. `candidates` keeps the first turns of --branch."""
    (dialogue, more), begin = (new_dialogue(*item[0]), item[1]), time.perf_counter()
    try:
        if "branch" in more:                                         # one candidate, then several ways to go on
            name = task_id(dialogue["task"]), dialogue["sample"]
            if name not in candidates:
                candidates[name] = asyncio.ensure_future(agent_turn(dialogue, speakers[0], None, args))
            dialogue["history"].append(await candidates[name])
            dialogue["sample"] += f"/{more['continuation']}"
        await play(dialogue, *speakers, world, args)
    except ReplyError as error:
        failed.append({"number": dialogue["number"], "task_id": task_id(dialogue["task"]), "sample": dialogue["sample"],
                       "failed": str(error), "dialogue_history": dialogue["history"]})
        progress.set_postfix_str(f"{len(failed):,} failed")
        tally["failed in a row"] += 1
        if tally["failed in a row"] >= max(20, args.concurrency):
            raise InputError(f"{args.out}: {tally['failed in a row']} dialogues in a row failed, the last with "
                             f"{error}; run the same command again to go on") from None
        return None
    tally["played_s"] += time.perf_counter() - begin
    tally["waited_s"] += dialogue["waited_s"]
    tally["failed in a row"] = 0
    return score_and_append(dialogue, more, world, rows, progress, tally, tokenizer, args)


async def score_and_append(dialogue, more, world, rows, progress, tally, tokenizer, args):
    [verdicts] = await world.score([(dialogue["task"], dialogue["answer"])])
    rows.add(dialogue["number"], to_trajectory(dialogue, verdicts, tokenizer, more, args))
    tally["played"] += 1
    progress.update()


# ---------------------------------------------------------------------------------------------------------------------
# what is printed at the end

def report(opened, ranks, wall_s):
    """How fast it went, all ranks together; ranks: the "tally", "stats" and "verdicts" of each."""
    def total(dicts):
        return functools.reduce(lambda a, b: {key: a.get(key, 0) + b.get(key, 0) for key in {**a, **b}}, dicts)

    tally, verdicts = (total([rank[kind] for rank in ranks]) for kind in ("tally", "verdicts"))
    stats = {name: total([rank["stats"][name] for rank in ranks]) for name in ranks[0]["stats"]}
    print(f"{tally['played']:,} dialogues in {wall_s:,.0f} s, {60 * tally['played'] / wall_s:,.1f} a minute; they "
          f"waited {tally['waited_s']:,.1f} s of {tally['played_s']:,.1f} s for the human")
    print(*speed_lines(opened, stats, len(ranks)), sep="\n")
    if any(verdicts.values()):
        print("judge's comparisons: " + ", ".join(f"{count:,} {verdict}" for verdict, count in verdicts.items()))


def summary(path):
    """One line: the mean return, the domain's columns, rounds, what was cut, and the human's replies that show code."""
    with open(path, encoding="utf-8") as file:
        trajectories = [json.loads(line) for line in file]
    domain = domain_of(trajectories[0]["task"])
    agent = [turn for t in trajectories for turn in t["dialogue_history"] if turn["role"] == "assistant"]
    human = [turn for t in trajectories for turn in t["dialogue_history"][1:] if turn["role"] == "user"]
    leaks, found = collections.Counter(turn["leak"] for turn in human if "leak" in turn), domain.measure(trajectories)
    mean = sum(map(domain.outcome, trajectories)) / len(trajectories)
    parts = [f"{heading_of(domain.metric(trajectories))} {mean:.3f}"]
    parts += [f"{heading} {found[key]:{form}}" for key, heading, form in domain.COLUMNS if key in found]
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(leaks.items()))
    rejected = sum(turn.get("resampled", 0) for turn in human)
    print(*found.get("notes", []), sep="\n", end="\n" * bool(found.get("notes")))
    return " | ".join([
        *parts, f"rounds {len(agent) / len(trajectories):.2f}",
        f"{sum('truncated' in turn for turn in agent)} turns stopped by --max-new-tokens",
        f"{leaks.total() / max(1, len(human)):.1%} of the human's replies leak code" + f" ({kinds})" * bool(kinds) +
        f", {rejected} rejected" * bool(rejected)])


# ---------------------------------------------------------------------------------------------------------------------

PRESETS = {f"paper-{domain}": {"dtype": "bfloat16"} for domain in ("backend", "frontend")}      # the rest are defaults


def parse_args(argv=None):
    parser = argument_parser(__doc__)
    parser.add_argument("--tasks", required=True, help="tasks file (01); with --branch a trajectories file")
    parser.add_argument("--agent", required=True, help="a model (folder, hub id, smollm2), script, script-informed, or "
                        "a further scripted player of the domain (queries: script-asker)")
    parser.add_argument("--simulator", default="rules", help="who plays the human: rules, or a model")
    parser.add_argument("--out", required=True, help="trajectories file to write (JSONL)")
    parser.add_argument("--samples", type=positive_int, default=1, help="dialogues a task")
    parser.add_argument("--max-rounds", type=positive_int, default=10, help="agent turns in a dialogue")
    parser.add_argument("--single-turn", action="store_true", help="the agent answers at once (--max-rounds 1)")
    parser.add_argument("--temperature", type=float, default=1.0, help="of the agent; the human's is 0")
    parser.add_argument("--max-new-tokens", type=positive_int, default=1024, help="tokens a turn of the agent")
    parser.add_argument("--seed", type=int, default=0, help="seed of the samples")
    group = parser.add_argument_group("critics")
    group.add_argument("--best-of", type=positive_int, default=1, help="messages sampled at each turn")
    group.add_argument("--critic", help="who picks one of --best-of: a critic folder (03), judge:MODEL, or oracle "
                       "(-patient): what the template task says of a turn")
    group.add_argument("--branch", type=positive_int, metavar="N", help="play on from N turns of a trajectories file")
    group.add_argument("--branch-candidates", type=positive_int, default=8, help="--branch: messages in each state")
    group = parser.add_argument_group("the human")
    group.add_argument("--simulator-max-new-tokens", type=positive_int, help="tokens a reply of a model that plays the "
                       "human (None: 128, on pages 320), of which 400 characters are shown, 1,000 on pages")
    group.add_argument("--reject-leaks", type=non_negative_int, default=0, metavar="N",
                       help="sample a reply of the human that shows code again, up to N times")
    group = parser.add_argument_group("models and servers")
    group.add_argument("--concurrency", type=positive_int, default=64, help="dialogues in flight")
    group.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="arithmetic of the models")
    group.add_argument("--max-tokens", type=positive_int, default=16384,
                       help="of a dialogue, and of a pass of a local model over prompts")
    group.add_argument("--system-prompt", metavar="FILE",
                       help="its text, taken as it is, is the agent's system prompt in place of ours and of our note "
                       "on the last round; 01 --trajectories writes that of published ones")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT",
                       help="ends a turn, beside the model's own end tokens; can be given more than once")
    group.add_argument("--chat-template-args", type=json.loads, default={}, metavar="JSON", help="arguments of chat "
                       "templates by role: {\"agent\": {\"enable_thinking\": false}, \"simulator\": …, …}")
    group.add_argument("--agent-tokenizer", metavar="MODEL", help="the tokenizer of a vLLM server's agent: keeps the "
                       "sampled ids and the prompt, so that 03 and 04 train on just these")
    group.add_argument("--timeout", type=float, default=600, help="seconds that a request to a server may take")
    group.add_argument("--retries", type=non_negative_int, default=8, help="times that a failed request is tried again")
    add_world(parser)
    add_overwrite(parser)
    set_preset(parser, PRESETS, argv)
    args = parser.parse_args(argv)
    if args.single_turn:
        args.max_rounds = 1
    scripted = args.agent.startswith("script")
    if args.best_of > 1 and (args.critic is None or scripted):
        parser.error("--best-of needs an agent that is a model, and --critic DIR or judge:MODEL")
    if args.branch and (scripted or args.best_of > 1):
        parser.error("--branch needs an agent that is a model, and goes without --best-of")
    if args.system_prompt and scripted:
        parser.error("--system-prompt is for an agent that is a model")
    by_role = args.chat_template_args
    if not (isinstance(by_role, dict) and by_role.keys() <= {"agent", "simulator", "judge"} and
            all(isinstance(own, dict) for own in by_role.values())):
        parser.error("--chat-template-args: an object with an object for agent, simulator or judge")
    if args.timeout <= 0:
        parser.error("--timeout must be positive")
    if args.agent_tokenizer and not is_server(args.agent):
        parser.error("--agent-tokenizer is for an agent behind http://; others bring their own")
    return args


def check_players(tasks, domain, args):
    """InputError where a task states not what the rules, the scripted agent or the oracle need."""
    scripts = "script", "script-informed", *getattr(domain, "PLAYERS", ())
    if args.agent.startswith("script") and args.agent not in scripts:
        raise InputError(f"--agent {args.agent}: {domain.NOUN}s have the scripted agents {', '.join(scripts)}")
    players = {"rules": args.simulator == "rules", "script": args.agent.startswith("script"),
               args.critic: args.critic in domain.ORACLES}
    for number, task in enumerate(tasks, 1):
        for player in (player for player, asked in players.items() if asked):
            if lacking := domain.lacks(task, player):
                raise InputError(f'{args.tasks}:{number}: missing "{lacking}", which the rules of template tasks need; '
                                 "use --agent MODEL --simulator MODEL, and a critic that is no oracle")
    if (args.critic or "").startswith("judge:") and domain.JUDGE is None:
        raise InputError(f"--critic judge: cannot compare messages about {domain.NOUN}s; they need a critic of 03")


def main(argv=None):
    args = parse_args(argv)
    from tqdm import tqdm
    runtime, out = start(args.seed), pathlib.Path(args.out)
    rows = common.read_trajectories(args.tasks) if args.branch else common.read_tasks(args.tasks)
    tasks = [row["task"] for row in rows] if args.branch else rows
    domain, oracle = domain_of(tasks[0]), args.critic in domain_of(tasks[0]).ORACLES
    check_players(tasks, domain, args)
    args.simulator_max_new_tokens = args.simulator_max_new_tokens or domain.REPLY_TOKENS
    inputs = [args.tasks, args.agent, args.simulator, None if oracle else (args.critic or "").removeprefix("judge:"),
              args.agent_tokenizer, args.system_prompt]
    system = read_text(args.system_prompt) if args.system_prompt else None
    record = argparse.Namespace(**{k: v for k, v in vars(args).items() if k != "concurrency"})     # it changes no row
    if is_done(record, out, inputs):
        return

    opened, verdicts, critic = {}, dict.fromkeys(("decided", "tie", "unreadable"), 0), None

    def load(name, role, sees=False):
        if name not in opened:                                       # once for all of its roles
            roles = 2 if args.agent == args.simulator else 1        # each side of a dialogue has its own cache
            opened[name] = open_speaker(name, runtime.device, args.dtype, roles * args.concurrency * args.best_of,
                                        args.max_tokens, args.timeout, args.retries, args.stop, sees)
        if sees and not (opened[name].sees or opened[name].server):
            raise InputError(f"{name}: cannot be the agent and a simulator that sees; put it behind a server")
        return opened[name]._replace(template_args=args.chat_template_args.get(role, {}))

    agent = None if args.agent.startswith("script") else load(args.agent, "agent")
    if agent and agent.server and (args.best_of > 1 or args.branch):
        raise InputError("--best-of and --branch need an agent whose tokens are at hand: a folder or hub id, no server")
    if args.agent_tokenizer:
        agent = agent._replace(tokenizer=load_tokenizer(args.agent_tokenizer))
    if agent and agent.tokenizer:
        common.check_system_prompt(args.agent, agent.tokenizer, domain, system, args.max_rounds)
    human = None if args.simulator == "rules" else load(args.simulator, "simulator", sees=domain.PERSON_SEES)
    if human and human.sees and args.reject_leaks:
        raise InputError("--reject-leaks: a local model that sees always says the same; use a server")
    world = common.world(domain, args, f"{out}.images", out.parent, device=runtime.device)
    chooser = None
    if args.best_of > 1 and args.critic.startswith("judge:"):
        judge = load(args.critic.removeprefix("judge:"), "judge")
        chooser = functools.partial(judge_choice, judge=judge, counts=verdicts, args=args)
    elif args.best_of > 1:
        critic = args.critic if oracle else common.load_critic(
            common.read_critic(args.critic, agent.tokenizer, domain), common.load_whole(runtime.device, args.dtype))
        chooser = functools.partial(critic_choice, critic=critic, tokenizer=agent.tokenizer, device=runtime.device,
                                    world=world)
    items = dialogue_items(rows, system, args)
    begin_output(record, out, inputs)

    costs = Costs(out, runtime.device)
    name = common.tokenizer_name(agent.tokenizer) if agent and agent.tokenizer else None
    models = [speaker.model for speaker in opened.values() if speaker.model]
    models += [critic["model"], *filter(None, [critic["reference"]])] if critic and not oracle else []
    counts = [speaker.server.counts for speaker in opened.values() if speaker.server]
    tally, failed = {"played": 0, "played_s": 0.0, "waited_s": 0.0, "failed in a row": 0}, []
    with Rows(out, runtime) as lines, world:
        mine = [item for item in items if item[0][2] not in lines.done][runtime.rank::runtime.world_size]
        if lines.done and runtime.rank == 0:
            print(f"{len(lines.done):,} of {len(items):,} dialogues are there already", flush=True)
        with tqdm(total=len(mine), unit="dialogue", desc=out.name, mininterval=5, disable=runtime.rank > 0) as progress:
            try:
                asyncio.run(run_concurrently(functools.partial(
                    play_and_save, speakers=(agent, human, chooser), world=world, rows=lines, progress=progress,
                    tally=tally, failed=failed, candidates={}, tokenizer=name, args=args), mine, args.concurrency))
            except (InputError, ColBenchError):
                if runtime.world_size == 1:                          # the tokens are paid for (ranks need each other)
                    costs.record([work_of(model) for model in models], servers=counts)
                raise
    stats = {key: speaker.server.counts if speaker.server else speaker.engine.stats for key, speaker in opened.items()
             if not speaker.sees}
    ranks = gather({"tally": tally, "failed": failed, "stats": stats, "verdicts": verdicts})
    costs.record([work_of(model) for model in models], servers=counts)
    failed = sorted((row for rank in ranks for row in rank["failed"]), key=lambda row: row["number"])
    if runtime.rank == 0:
        report(opened, ranks, time.perf_counter() - costs.begin)
        if failed:
            write_jsonl(f"{out}.failed.jsonl", failed)
        else:
            lines.finish(len(items))
            pathlib.Path(f"{out}.failed.jsonl").unlink(missing_ok=True)
            print(summary(out), flush=True)
    barrier()                                                        # a rank that leaves early would end the others
    if failed and runtime.rank == 0:
        raise InputError(f"{out}: {len(failed):,} of {len(items):,} dialogues failed, the first with "
                         f"{failed[0]['failed']}; run the same command again to play these")
    if failed:
        sys.exit(2)


if __name__ == "__main__":
    run_stage(main, ColBenchError)
