"""Stage 2: let an agent work with a simulated human on every task, and score the answers.

Reads   tasks.jsonl (01).
Writes  trajectories.jsonl in the published format, {"task", "dialogue_history", "answer", "reward"}, with "task_id",
        "sample", "num_rounds", "max_rounds" and what the domain's scorer says (screenshots in the folder FILE.images);
        "best_of", and "temperature" where it is not 1.
        An agent's turn has "input" (the rendered prompt), "output" (the raw text) and "output_ids" (the sampled ids);
        a human's turn that shows code has "leak".
        FILE.failed.jsonl where dialogues failed: the same command again plays these alone.

The human opens with the request. In each of --max-rounds rounds the agent sends a message and the human answers it.
The task's domain (colbench/) says which message is the answer, and scores it.
--best-of N: at each turn the agent samples N messages and --critic says which one is sent. It may see c.
--branch N: from N random turns of a trajectories file, several messages are played on: their Monte-Carlo returns.
docs/scale.md describes both, docs/servers.md models behind http://.
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
import time

import common
from colbench import ColBenchError, domain_of, task_id
from lib.arguments import (
    add_overwrite,
    add_reference,
    add_world,
    argument_parser,
    json_flag,
    non_negative_int,
    num_samples_flag,
    num_tokens_flag,
    number_flag,
    positive_int,
    seed_flag,
    set_preset,
    temperature_flag,
    text_flag,
)
from lib.costs import Costs
from lib.credit import measure_turns
from lib.models import load_tokenizer, tokenizer_name, work_of
from lib.runtime import begin_output, gather, InputError, is_done, read_text, Rows, run_stage, say, start
from lib.servers import is_server, ReplyError, said, strip_thoughts
from lib.speakers import ask, Failures, open_speakers, rollout_lines, run_concurrently
from lib.statistics import mean_over_tasks
from lib.tables import heading_of
from lib.tracking import check_track, Track

# ---------------------------------------------------------------------------------------------------------------------
# one turn of a dialogue. A dialogue is {"number", "task", "sample", "history", "system", "more", "answer", "waited_s"};
# who speaks is a Speaker (lib/speakers.py), or None for the scripted agent and the rule-based human.

def new_dialogue(task, sample, number=0, history=None, system=None, more=None):
    """history: the turns so far (None: the request alone); system: the agent's system prompt (None: ours); more: what
    else stands in its row, a dict."""
    history = list(history or [{"role": "user", "content": task["problem_description"]}])
    return {"number": number, "task": task, "sample": sample, "history": history, "system": system,
            "more": more or {}, "answer": None, "waited_s": 0.0}


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
        text = domain.PLAYERS[args.agent](task, history, args.max_rounds, random.Random(repr(key)))
        return {"role": "assistant", "content": domain.shown(text)}
    chat = common.agent_messages(history, args.max_rounds, domain.AGENT_SYSTEM, dialogue["system"])
    prompt, replies = await ask(agent, chat, key, args.temperature, args.max_new_tokens, args.best_of,
                                ("agent", dialogue["number"]))
    messages = [said(domain, reply.text, None if agent.server else prompt) for reply in replies]
    number = 0
    if args.best_of > 1:
        choices = [reply._replace(text=message) for reply, message in zip(replies, messages)]
        number = await chooser(dialogue, prompt, choices)
    reply = replies[number]
    turn = {"role": "assistant", "content": messages[number], "input": prompt, "output": reply.text,
            "output_ids": reply.ids, "truncated": not reply.ended}
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
# --best-of: which of several replies is sent; "text" of these is what the other side would see

async def critic_choice(dialogue, prompt, replies, critic, tokenizer, device, world, max_tokens=16384):
    """The number of the reply with the highest score of a critic (03), or of the oracle."""
    points = [common.DecisionPoint(prompt, dialogue["task"], dialogue["history"], [reply.ids for reply in replies],
                                   [reply.text for reply in replies])]
    if not isinstance(critic, str) and critic.get("visual"):
        shown = await world.show(common.documents_needed(critic, points))
        critic = {**critic, "show": lambda _: shown}
    [scores] = common.score_actions(critic, tokenizer, points, max_tokens, device)
    return max(range(len(scores)), key=scores.__getitem__)


async def judge_choice(dialogue, _, replies, judge, counts, args):
    """The number of the reply that is left after comparing the best so far with the next, N - 1 times; `counts` counts
    verdicts "decided", "tie" (the two orders disagree) and "unreadable"."""
    texts = [reply.text.strip() for reply in replies]
    so_far = "\n".join(f"{'Assistant' if turn['role'] == 'assistant' else 'Person'}: {turn['content']}"
                       for turn in dialogue["history"])
    question = domain_of(dialogue["task"]).JUDGE

    async def letters(a, b):
        c = dialogue["task"]["ground_truth"]
        content = question.format(ground_truth=c, dialogue=so_far, a=texts[a], b=texts[b])
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


def new_dialogues(rows, system, args):
    """All that are to be played: --samples of each task or, with --branch, of each candidate in each state."""
    if not args.branch:
        pairs = [(task, sample) for task in rows for sample in range(args.samples)]
        return [new_dialogue(*pair, number, system=system) for number, pair in enumerate(pairs)]
    states = [(t, i) for t in rows for i, turn in enumerate(t["dialogue_history"]) if turn["role"] == "assistant"]
    states = random.Random(args.seed).sample(states, min(args.branch, len(states)))
    dialogues = []
    for trajectory, i in states:
        if trajectory.get("max_rounds", args.max_rounds) != args.max_rounds:
            raise InputError(f"{args.tasks}: task {trajectory['task_id']} was played with --max-rounds "
                             f"{trajectory['max_rounds']}; --branch needs the same")
        history = [{"role": turn["role"], "content": turn["content"]} for turn in trajectory["dialogue_history"][:i]]
        for candidate in range(args.branch_candidates):
            branch = {"sample": trajectory["sample"], "turn": i, "candidate": candidate}
            for n in range(args.samples):
                dialogues.append(new_dialogue(
                    trajectory["task"], f"{trajectory['sample']}/{i}/{candidate}", len(dialogues), history,
                    system or common.system_prompt(trajectory),
                    {"sample": len(dialogues), "branch": branch, "continuation": n}))
    return dialogues


def to_trajectory(dialogue, verdicts, tokenizer, args):
    """The finished dialogue in the published format, with what World.score says of it."""
    history, sampled = dialogue["history"], {}
    if args.temperature != 1 and not args.agent.startswith("script"):
        sampled["temperature"] = args.temperature
    return {"task_id": task_id(dialogue["task"]), "sample": dialogue["sample"], "task": dialogue["task"],
            "dialogue_history": history, "answer": dialogue["answer"], **verdicts,
            "num_rounds": sum(turn["role"] == "assistant" for turn in history), "max_rounds": args.max_rounds,
            "agent": args.agent, "simulator": args.simulator, "tokenizer": tokenizer, "best_of": args.best_of,
            "critic": args.critic, **sampled, "informed": args.agent == "script-informed",
            **({} if dialogue["system"] is None else {"system_prompt": dialogue["system"]}), **dialogue["more"]}


class Curve:
    """What --track shows of a rollout, on rank 0: by the number of dialogues their mean return so far and, of this
    start, tokens a second."""

    def __init__(self, args, stats):
        """stats: what counts the tokens of each model, as rollout_lines() takes it."""
        self.track, self.stats = Track(args.track, args.out, vars(args)), stats
        self.number, self.sum, self.begin = 0, 0.0, time.perf_counter()

    def add(self, value, log=True):
        """One more dialogue, of this return."""
        self.number += 1
        self.sum += value
        if log:
            tokens = sum(count.get("server_completion_tokens", 0) + count.get("decode_tokens", 0)
                         for count in self.stats.values())
            self.track.log(self.number, mean_return=self.sum / self.number,
                           tokens_per_s=tokens / (time.perf_counter() - self.begin))


async def play_and_save(dialogue, speakers, world, rows, progress, tally, failed, candidates, curve, tokenizer, args):
    """Play a dialogue; returns what scores it and adds its row. One that a server does not answer goes to `failed`, and
    many of these in a row end the run. `candidates` keeps the first turns of --branch."""
    begin = time.perf_counter()
    try:
        if args.branch:                                              # one candidate, then several ways to go on
            name = task_id(dialogue["task"]), dialogue["sample"]
            if name not in candidates:
                candidates[name] = asyncio.ensure_future(agent_turn(dialogue, speakers[0], None, args))
            dialogue["history"].append(await candidates[name])
            dialogue["sample"] += f"/{dialogue['more']['continuation']}"
        await play(dialogue, *speakers, world, args)
    except ReplyError as error:
        progress.set_postfix_str(f"{len(failed) + 1:,} failed")
        return failed.add(error, number=dialogue["number"], task_id=task_id(dialogue["task"]),
                          sample=dialogue["sample"], dialogue_history=dialogue["history"])
    tally["played_s"] += time.perf_counter() - begin
    tally["waited_s"] += dialogue["waited_s"]
    failed.in_a_row = 0

    async def score():
        [verdicts] = await world.score([(dialogue["task"], dialogue["answer"])])
        row = to_trajectory(dialogue, verdicts, tokenizer, args)
        rows.add(dialogue["number"], row)
        tally["played"] += 1
        progress.update()
        curve.add(domain_of(row["task"]).outcome(row))
        dialogue.clear()                                             # memory is for what is in flight
    return score()


def without_samples(trajectory):
    """The trajectory without what takes most memory: prompts, raw texts and ids of its turns."""
    kept = [{key: value for key, value in turn.items() if key not in ("input", "output", "output_ids")}
            for turn in trajectory["dialogue_history"]]
    return {**trajectory, "dialogue_history": kept}


def summary(path):
    """One line: the mean return (over tasks, as 05 has it), the domain's columns, rounds, what was cut, and the
    human's replies that show code."""
    with open(path, encoding="utf-8") as file:
        trajectories = [without_samples(json.loads(line)) for line in file]
    task, opening = trajectories[0]["task"], trajectories[0]["dialogue_history"][0]
    domain = domain_of(task)
    agent = [turn for t in trajectories for turn in t["dialogue_history"] if turn["role"] == "assistant"]
    human = [turn for t in trajectories for turn in t["dialogue_history"][1:] if turn["role"] == "user"]
    leaks = collections.Counter(turn["leak"] for turn in human if "leak" in turn)
    found = domain.measure(trajectories) | measure_turns(trajectories, domain)
    mean = mean_over_tasks(trajectories, domain.outcome)
    parts = [f"{heading_of(domain.metric(trajectories))} {mean:.3f}",
             *(f"{heading} {found[key]:{form}}" for key, heading, form in domain.COLUMNS if key in found),
             f"rounds {len(agent) / len(trajectories):.2f}"]
    answer = {"role": "assistant", "content": domain.answer_message(task)}
    if domain.answer_of([opening, answer], False) is not None:       # else every dialogue takes all rounds
        forced = sum(domain.answer_of(t["dialogue_history"], False) is None for t in trajectories)
        parts += [f"{forced / len(trajectories):.1%} ended by --max-rounds"]
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(leaks.items()))
    rejected = sum(turn.get("resampled", 0) for turn in human)
    say(*found.get("notes", []))
    return " | ".join([
        *parts, f"{sum('truncated' in turn for turn in agent)} turns stopped by --max-new-tokens",
        f"{leaks.total() / max(1, len(human)):.1%} of the human's replies leak code" + f" ({kinds})" * bool(kinds) +
        f", {rejected} rejected" * bool(rejected)])


# ---------------------------------------------------------------------------------------------------------------------

PRESETS = {f"paper-{domain}": {"dtype": "bfloat16"} for domain in ("backend", "frontend")}      # the rest are defaults


def parse_args(argv=None):
    parser = argument_parser(__doc__)
    parser.add_argument("--tasks", type=text_flag, required=True,
                        help="tasks file (01); with --branch a trajectories file")
    parser.add_argument("--agent", type=text_flag, required=True,
                        help="a model (folder, hub id, smollm2, server), or a scripted agent "
                        "of template tasks: script, script-informed (knows c), or a further one of the domain")
    parser.add_argument("--simulator", type=text_flag, default="rules", help="who plays the human: rules, or a model")
    parser.add_argument("--out", type=text_flag, required=True, help="trajectories file to write (JSONL)")
    parser.add_argument("--samples", type=positive_int, default=1, help="dialogues a task")
    parser.add_argument("--max-rounds", type=positive_int, default=10, help="agent turns in a dialogue")
    parser.add_argument("--single-turn", action="store_true", help="the agent answers at once (--max-rounds 1)")
    parser.add_argument("--temperature", type=temperature_flag, default=1.0, help="of the agent; the human's is 0")
    parser.add_argument("--max-new-tokens", type=num_tokens_flag, default=1024, help="tokens a turn of the agent")
    parser.add_argument("--seed", type=seed_flag, default=0, help="seed of the samples")
    group = parser.add_argument_group("critics")
    group.add_argument("--best-of", type=num_samples_flag, default=1, help="messages sampled at each turn")
    group.add_argument("--critic", type=text_flag,
                       help="who picks one of --best-of: a critic folder (03), judge:MODEL, or oracle "
                       "(-patient): what the template task says of a turn; untrained: the agent itself, with "
                       "--reference blind")
    add_reference(group)
    group.add_argument("--branch", type=positive_int, metavar="N", help="play on from N turns of a trajectories file")
    group.add_argument("--branch-candidates", type=num_samples_flag, default=8, help="--branch: messages in each state")
    group = parser.add_argument_group("the human")
    group.add_argument("--simulator-max-new-tokens", type=num_tokens_flag,
                       help="tokens a reply of a model that plays the human (None: the domain's REPLY_TOKENS)")
    group.add_argument("--reject-leaks", type=non_negative_int, default=0, metavar="N",
                       help="sample a reply of the human that shows code again, up to N times")
    group = parser.add_argument_group("models and servers")
    group.add_argument("--concurrency", type=num_samples_flag, default=64, help="dialogues in flight")
    group.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="arithmetic of the models")
    group.add_argument("--max-tokens", type=positive_int, default=16384,
                       help="of a dialogue, and of a pass of a local model over prompts, or of --critic over messages")
    group.add_argument("--system-prompt", type=text_flag, metavar="FILE",
                       help="its text, taken as it is, is the agent's system prompt in place of ours and of our note "
                       "on the last round; 01 --trajectories writes that of published ones")
    group.add_argument("--stop", type=text_flag, action="append", default=[], metavar="TEXT",
                       help="ends a turn, beside the model's own end tokens; can be given more than once")
    group.add_argument("--chat-template-args", type=json_flag, default={}, metavar="JSON", help="arguments of chat "
                       "templates by role: {\"agent\": {\"enable_thinking\": false}, \"simulator\": …, …}")
    group.add_argument("--agent-tokenizer", type=text_flag, metavar="MODEL",
                       help="the tokenizer of a vLLM server's agent: keeps the "
                       "sampled ids and the prompt, so that 03 and 04 train on just these; --best-of needs it for a "
                       "critic that reads tokens")
    group.add_argument("--timeout", type=number_flag(0, 10 ** 6, above=True), default=600,
                       help="seconds that a request to a server may take")
    group.add_argument("--retries", type=non_negative_int, default=8, help="times that a failed request is tried again")
    parser.add_argument("--track", type=text_flag, metavar="PROJECT",
                        help="log how many dialogues are there, their mean return and "
                        "tokens a second to this project of trackio (pip install trackio)")
    add_world(parser)
    add_overwrite(parser)
    set_preset(parser, PRESETS, argv)
    args = parser.parse_args(argv)
    if args.single_turn:
        args.max_rounds = 1
    scripted = args.agent.startswith("script")
    if args.best_of > 1 and (args.critic is None or scripted):
        parser.error("--best-of needs an agent that is a model, and --critic DIR or judge:MODEL")
    if args.reference and args.best_of == 1:
        parser.error("--reference goes with --best-of")
    if args.critic == common.UNTRAINED and is_server(args.agent):
        parser.error(f"--critic {common.UNTRAINED}: its scores need the agent's weights, which a server does not give")
    if args.branch and (scripted or args.best_of > 1):
        parser.error("--branch needs an agent that is a model, and goes without --best-of")
    if args.system_prompt and scripted:
        parser.error("--system-prompt is for an agent that is a model")
    by_role = args.chat_template_args
    if not (isinstance(by_role, dict) and by_role.keys() <= {"agent", "simulator", "judge"} and
            all(isinstance(own, dict) for own in by_role.values())):
        parser.error("--chat-template-args: an object with an object for agent, simulator or judge")
    if args.agent_tokenizer and not is_server(args.agent):
        parser.error("--agent-tokenizer is for an agent behind http://; others bring their own")
    return args


def check_players(tasks, domain, args):
    """InputError where a task states not what the rules, the scripted agent or the oracle need."""
    if args.agent.startswith("script") and args.agent not in domain.PLAYERS:
        names = ", ".join(domain.PLAYERS) or "(none)"
        raise InputError(f"--agent {args.agent}: {domain.NOUN}s have the scripted agents {names}")
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
    untrained = args.critic == common.UNTRAINED
    check_players(tasks, domain, args)
    args.simulator_max_new_tokens = args.simulator_max_new_tokens or domain.REPLY_TOKENS
    inputs = [args.tasks, args.agent, args.simulator,
              None if oracle or untrained else (args.critic or "").removeprefix("judge:"),
              args.agent_tokenizer, args.system_prompt]
    system = read_text(args.system_prompt) if args.system_prompt else None
    record = argparse.Namespace(**{k: v for k, v in vars(args).items() if k != "concurrency"})     # it changes no row
    if is_done(record, out, inputs):
        return

    check_track(args.track)
    judged = args.best_of > 1 and args.critic.startswith("judge:")
    roles = {"agent": None if args.agent.startswith("script") else args.agent,
             "simulator": None if args.simulator == "rules" else args.simulator,
             "judge": args.critic.removeprefix("judge:") if judged else None}
    agent, human, judge = open_speakers(roles, runtime.device, domain.PERSON_SEES, args)
    if args.agent_tokenizer:
        agent = agent._replace(tokenizer=load_tokenizer(args.agent_tokenizer))
    if agent and agent.tokenizer:
        common.check_system_prompt(args.agent, agent.tokenizer, domain, system, args.max_rounds)
    if human and human.sees and args.reject_leaks:
        raise InputError("--reject-leaks: a local model that sees always says the same; use a server")
    world = common.world(domain, args, f"{out}.images", out.parent, device=runtime.device)
    chooser, critic, verdicts = None, None, dict.fromkeys(("decided", "tie", "unreadable"), 0)
    if judge:
        chooser = functools.partial(judge_choice, judge=judge, counts=verdicts, args=args)
    elif args.best_of > 1:
        if oracle:
            critic = args.critic
        elif untrained:
            critic = common.untrained_critic(args.agent, args.reference)
        else:
            critic = common.read_critic(args.critic, agent.tokenizer, domain, args.reference)
        if not oracle and (line := common.reference_line(critic)):
            say(line)
        if not (oracle or critic.get("visual") or agent.tokenizer):
            raise InputError(f"--best-of with {args.critic}, a critic that reads tokens: {args.agent} needs "
                             "--agent-tokenizer MODEL")
        if not oracle:
            critic = common.load_critic(critic, common.load_whole(runtime.device, args.dtype))
        chooser = functools.partial(critic_choice, critic=critic, tokenizer=agent.tokenizer, device=runtime.device,
                                    world=world, max_tokens=args.max_tokens)
    dialogues = new_dialogues(rows, system, args)
    runtime = runtime._replace(run=begin_output(record, out, inputs))

    costs = Costs(out, runtime.device)
    name = tokenizer_name(agent.tokenizer) if agent and agent.tokenizer else None
    opened = {name: speaker for name, speaker in zip(roles.values(), (agent, human, judge)) if speaker}
    models = [*(speaker.model for speaker in opened.values()),
              *((critic["model"], critic["reference"]) if critic and not oracle else ())]
    works = [*(work_of(model) for model in models if model),
             *(speaker.server.counts for speaker in opened.values() if speaker.server)]
    tally, failed = collections.Counter(), Failures(out, "dialogue", args.concurrency)
    stats = {key: speaker.server.counts if speaker.server else speaker.engine.stats for key, speaker in opened.items()
             if not speaker.sees}
    curve = Curve(args, stats)
    with Rows(out, runtime) as lines, world:
        mine = [one for one in dialogues if one["number"] not in lines.done][runtime.rank::runtime.world_size]
        if lines.done and runtime.rank == 0:
            say(f"{len(lines.done):,} of {len(dialogues):,} dialogues are there already")
            if args.track:
                for row in lines.rows():
                    curve.add(domain.outcome(row), log=False)
        with tqdm(total=len(mine), unit="dialogue", desc=out.name, mininterval=5, disable=runtime.rank > 0) as progress:
            try:
                asyncio.run(run_concurrently(functools.partial(
                    play_and_save, speakers=(agent, human, chooser), world=world, rows=lines, progress=progress,
                    tally=tally, failed=failed, candidates={}, curve=curve, tokenizer=name, args=args), mine,
                    args.concurrency))
            except (InputError, ColBenchError):
                if runtime.world_size == 1:                          # the tokens are paid for (ranks need each other)
                    costs.record(works)
                raise
    ranks = gather({"tally": tally, "stats": stats, "verdicts": verdicts})
    costs.record(works)
    say(*rollout_lines(ranks, time.perf_counter() - costs.begin))
    failed.finish(lines, len(dialogues), runtime)
    if runtime.rank == 0:
        say(summary(out))


if __name__ == "__main__":
    run_stage(main, ColBenchError)
