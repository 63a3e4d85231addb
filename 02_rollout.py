"""Stage 2: let an agent work with a simulated human on every task, and score the answers.

Reads   tasks.jsonl (01).
Writes  trajectories.jsonl in the published format, {"task", "dialogue_history", "answer", "reward"}, with "task_id",
        "sample", "num_rounds", "max_rounds", what the domain's scorer says (screenshots in the folder FILE.images), and
        how it was played: "agent", "simulator", "tokenizer", "best_of", "critic", "informed"; where they apply
        "temperature", "system_prompt", "no_room" (no further turn would fit into a model), "branch", "continuation".
        A turn that a model has sampled has "output" (the raw text) and, where they are known, "input" (the rendered
        prompt) and "output_ids" (the sampled ids); "truncated" where --max-new-tokens has cut it. A turn of the
        environment has "tool". One of a model that plays the human has "leak" where it shows code, and "resampled".
        FILE.failed.jsonl where dialogues failed: the same command again plays these alone.

The human opens with the request. In each of --max-rounds rounds the agent sends a message and the human replies.
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
import dataclasses
import functools
import json
import pathlib
import random
import re
import time

import torch

import common
from colbench import ColBenchError, domain_of, task_id
from lib.costs import Costs
from lib.flags import (
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
from lib.models import load_tokenizer, tokenizer_name, work_of
from lib.runtime import begin_output, gather, InputError, is_done, read_text, Rows, run_stage, say, start
from lib.servers import is_server, ReplyError, said, strip_thoughts
from lib.speakers import (
    ask,
    Failures,
    NoRoom,
    open_speakers,
    rollout_lines,
    run_concurrently,
    Sampling,
    Speaker,
    SpeakerOptions,
)
from lib.statistics import heading_of, mean_over_tasks, measure_turns
from lib.tracking import check_track, Track
from lib.vision import documents_of

ROLES = "agent", "simulator", "judge"


@dataclasses.dataclass
class Dialogue:
    """A dialogue that is being played."""

    number: int                                 # of its row in the output
    task: dict
    sample: int                                 # which of the task's dialogues; of --branch which of all
    history: list                               # the turns so far, {"role", "content", …} each
    system: str | None = None                   # the agent's system prompt; None: ours
    branch: dict | None = None                  # --branch: where it begins, "branch" and "continuation" of its row
    random_name: int | str = 0                  # what its random numbers depend on
    answer: str | None = None
    no_room: bool = False                       # ended because no further turn would fit into a model
    waited_s: float = 0.0                       # for the human


@dataclasses.dataclass(frozen=True)
class Players:
    """Who takes part in all dialogues of this rank."""

    agent: Speaker | None                       # None: a scripted agent
    human: Speaker | None                       # None: the rule-based human
    world: object                               # the domain's World: rules of the human, what tools reply, scores
    judge: Speaker | None = None                # of --best-of with --critic judge:MODEL
    critic: dict | str | None = None            # of --best-of: a critic of 03, or the name of an oracle
    device: torch.device = torch.device("cpu")
    verdicts: dict = dataclasses.field(default_factory=lambda: {"decided": 0, "tie": 0, "unreadable": 0})
    # --branch: {(task id, candidate): its first turn, or what samples it (asyncio.Task)}
    first_turns: dict = dataclasses.field(default_factory=dict)


# ---------------------------------------------------------------------------------------------------------------------
# one turn of a dialogue

def dialogue_key(dialogue, seed, who):
    """What the random numbers of a turn depend on."""
    return seed, task_id(dialogue.task), dialogue.random_name, len(dialogue.history), who


def prompt_before_thoughts(speaker, prompt):
    """What strip_thoughts needs of the prompt, which a template may end with <think>. None of a server, which may have
    put the thoughts apart."""
    if speaker.server:
        return None
    return prompt


def without_empty(turn, always):
    """A turn without the keys that say nothing, but for those that it always has."""
    return {key: value for key, value in turn.items() if value or key in always}


def scripted_message(dialogue, args):
    """What a scripted agent says next."""
    domain = domain_of(dialogue.task)
    rng = random.Random(repr(dialogue_key(dialogue, args.seed, "agent")))
    play_turn = domain.PLAYERS[args.agent]
    return domain.shown(play_turn(dialogue.task, dialogue.history, args.max_rounds, rng))


async def agent_turn(dialogue, players, args):
    """The agent's next turn. A model sees the dialogue alone.

    With --best-of it is the one of several that a critic or a judge prefers.
    A server's turn has the prompt and the sampled ids only with --agent-tokenizer."""
    domain, agent = domain_of(dialogue.task), players.agent
    if agent is None:
        return {"role": "assistant", "content": scripted_message(dialogue, args)}
    chat = common.agent_messages(dialogue.history, args.max_rounds, domain.AGENT_SYSTEM, dialogue.system)
    key = dialogue_key(dialogue, args.seed, "agent")
    cache = "agent", dialogue.number
    prompt, replies = await ask(agent, chat, Sampling(key, args.temperature, args.max_new_tokens, args.best_of, cache))
    messages = [said(domain, reply.text, prompt_before_thoughts(agent, prompt)) for reply in replies]
    choice = 0
    if args.best_of > 1:
        candidates = [reply._replace(text=message) for reply, message in zip(replies, messages)]
        choice = await best_candidate(dialogue, prompt, candidates, players, args)
    reply = replies[choice]
    turn = {
        "role": "assistant",
        "content": messages[choice],
        "input": prompt,
        "output": reply.text,
        "output_ids": reply.ids,
        "truncated": not reply.ended}
    return without_empty(turn, always=("role", "content", "output"))


async def human_turn(dialogue, players, args):
    """The reply to the agent's turn that ends the history: the environment's own, or the human's.

    Where it shows code, "leak" says how.
    With --reject-leaks it is sampled anew, at temperature 1, as temperature 0 would repeat it."""
    task, history, world = dialogue.task, dialogue.history, players.world
    domain = domain_of(task)
    key = dialogue_key(dialogue, args.seed, "human")
    tool_reply = await world.tool_reply(task, history)
    if tool_reply is not None:
        return {"role": "user", "content": tool_reply, "tool": True}
    if players.human is None:
        return {"role": "user", "content": await world.rule_reply(task, history, random.Random(repr(key)))}
    chat = await world.person_chat(task, history)
    sampling = Sampling(key, 0.0, args.simulator_max_new_tokens, cache=("human", dialogue.number))
    for attempt in range(args.reject_leaks + 1):
        if attempt > 0:
            sampling = dataclasses.replace(sampling, key=(*key, attempt), temperature=1.0)
        prompt, [reply] = await ask(players.human, chat, sampling)
        message = strip_thoughts(reply.text, prompt_before_thoughts(players.human, prompt))[:domain.REPLY_CHARS]
        leak = domain.leak_of(task, message)
        if leak is None:
            break
    turn = {"role": "user", "content": message}
    if reply.text.strip() != message:
        turn["output"] = reply.text
    turn["leak"] = leak
    turn["resampled"] = attempt
    return without_empty(turn, always=("role", "content"))


# ---------------------------------------------------------------------------------------------------------------------
# --best-of: which of several replies is sent; "text" of these is what the other side would see

async def best_candidate(dialogue, prompt, replies, players, args):
    """The number of the reply that is sent."""
    if players.judge:
        return await judge_choice(dialogue, replies, players, args.seed)
    return await critic_choice(dialogue, prompt, replies, players, args.max_tokens)


async def critic_choice(dialogue, prompt, replies, players, max_tokens):
    """The number of the reply with the highest score of a critic (03), or of the oracle."""
    critic, tokenizer = players.critic, None
    if players.agent:
        tokenizer = players.agent.tokenizer
    actions = [reply.ids for reply in replies]
    texts = [reply.text for reply in replies]
    point = common.DecisionPoint(prompt, dialogue.task, dialogue.history, actions, texts)
    if not isinstance(critic, str) and critic.get("visual"):
        views = await players.world.show(documents_of([common.views_after(critic, point)]))
        critic = {**critic, "show": lambda _: views}
    [scores] = common.score_actions(critic, tokenizer, [point], max_tokens, players.device)
    return max(range(len(scores)), key=scores.__getitem__)


async def judge_choice(dialogue, replies, players, seed):
    """The number of the reply that is left after comparing the best so far with the next, N - 1 times.

    players.verdicts counts: "decided", "tie" (the two orders disagree), "unreadable"."""
    texts = [reply.text.strip() for reply in replies]
    best = 0
    for challenger in range(1, len(texts)):
        if texts[best] == texts[challenger]:
            continue
        best_first, best_second = await asyncio.gather(
            judge_letters(dialogue, texts[best], texts[challenger], players.judge, seed),
            judge_letters(dialogue, texts[challenger], texts[best], players.judge, seed))
        if len(best_first) != 1 or len(best_second) != 1:
            verdict = "unreadable"
        elif best_first == best_second:
            verdict = "tie"
        else:
            verdict = "decided"
        players.verdicts[verdict] += 1
        if verdict == "decided" and best_first == {"B"}:
            best = challenger
    return best


async def judge_letters(dialogue, first, second, judge, seed):
    """Which of the letters A (the first message) and B a judge says; it knows c. A clear reply has one of them."""
    lines = []
    for turn in dialogue.history:
        name = "Assistant" if turn["role"] == "assistant" else "Person"
        lines.append(f"{name}: {turn['content']}")
    question = domain_of(dialogue.task).JUDGE.format(
        ground_truth=dialogue.task["ground_truth"], dialogue="\n".join(lines), a=first, b=second)
    sampling = Sampling(dialogue_key(dialogue, seed, "judge"), 0.0, max_new_tokens=8)
    prompt, [reply] = await ask(judge, [{"role": "user", "content": question}], sampling)
    return set(re.findall(r"\b[AB]\b", strip_thoughts(reply.text, prompt_before_thoughts(judge, prompt))))


# ---------------------------------------------------------------------------------------------------------------------
# dialogues

def new_dialogue(number, task, sample, system=None):
    """A dialogue that the human has opened with the request."""
    request = {"role": "user", "content": task["problem_description"]}
    return Dialogue(number, task, sample, [request], system, random_name=sample)


def new_dialogues(tasks, system, samples):
    """`samples` dialogues of each task. system: the agent's system prompt; None: ours."""
    dialogues = []
    num_samples = collections.Counter()                              # of each task_id, which two tasks may have
    for task in tasks:
        for _ in range(samples):
            name = task_id(task)
            dialogues.append(new_dialogue(len(dialogues), task, num_samples[name], system))
            num_samples[name] += 1
    return dialogues


def branched_dialogues(trajectories, system, args):
    """--branch: --samples continuations of each of --branch-candidates messages in each of N states.

    A state is an agent's turn of a trajectory, of which the turns before it are kept."""
    common.check_names(trajectories, args.tasks)
    states = []
    for trajectory in trajectories:
        for position, turn in enumerate(trajectory["dialogue_history"]):
            if turn["role"] == "assistant":
                states.append((trajectory, position))
    if len(states) < args.branch:
        say(f"{args.tasks}: has only {len(states):,} turns of the agent for --branch {args.branch:,}")
    states = random.Random(args.seed).sample(states, min(args.branch, len(states)))
    dialogues = []
    for trajectory, position in states:
        num_rounds = count_agent_turns(trajectory["dialogue_history"])
        max_rounds = trajectory.get("max_rounds", max(args.max_rounds, num_rounds))
        if max_rounds != args.max_rounds:
            raise InputError(f"{args.tasks}: task {trajectory['task_id']} was played with --max-rounds {max_rounds}; "
                             "--branch needs the same")
        for candidate in range(args.branch_candidates):
            for continuation in range(args.samples):
                dialogue = branched_dialogue(len(dialogues), trajectory, position, candidate, continuation)
                dialogue.system = common.system_prompt(trajectory) if system is None else system
                dialogues.append(dialogue)
    return dialogues


def count_agent_turns(history):
    """How many turns of a dialogue are the agent's."""
    return sum(turn["role"] == "assistant" for turn in history)


def branched_dialogue(number, trajectory, position, candidate, continuation):
    """A dialogue that goes on where an agent's turn stands in a trajectory."""
    history = []
    for turn in trajectory["dialogue_history"][:position]:
        history.append({key: turn[key] for key in ("role", "content", "tool") if key in turn})
    task = trajectory["task"]
    if task_id(task) != trajectory["task_id"]:                       # the row's name counts, of tasks that have none
        task = {**task, "task_id": trajectory["task_id"]}
    branch = {
        "branch": {"sample": trajectory["sample"], "turn": position, "candidate": candidate},
        "continuation": continuation}
    return Dialogue(number, task, number, history, branch=branch,
                    random_name=branch_name(branch["branch"]))


def branch_name(branch):
    """What names a candidate of --branch in a task, and its random numbers."""
    return f"{branch['sample']}/{branch['turn']}/{branch['candidate']}"


def kept_first_turns(rows):
    """Players.first_turns of the dialogues that a run before this one has played."""
    turns = {}
    for row in rows:
        branch = row["branch"]
        turns[row["task_id"], branch_name(branch)] = row["dialogue_history"][branch["turn"]]
    return turns


def share_of_rank(dialogues, runtime, args):
    """The dialogues that this rank plays; of --branch all continuations of a candidate, whose first turn they share."""
    if not args.branch:
        return dialogues[runtime.rank::runtime.world_size]
    return [dialogue for dialogue in dialogues
            if dialogue.number // args.samples % runtime.world_size == runtime.rank]


async def add_first_turn(dialogue, players, args):
    """--branch: add the candidate, which is sampled once for all of its continuations."""
    candidate = task_id(dialogue.task), dialogue.random_name
    if candidate not in players.first_turns:
        players.first_turns[candidate] = asyncio.ensure_future(agent_turn(dialogue, players, args))
    turn = players.first_turns[candidate]
    dialogue.history.append(turn if isinstance(turn, dict) else await turn)
    dialogue.random_name += f"/{dialogue.branch['continuation']}"    # from here on with random numbers of its own


async def play(dialogue, players, args):
    """Play one dialogue from where it stands to its answer.

    If the next turn does not fit into a model, the dialogue ends: the agent's last turn counts as in the last round,
    and the human's reply to it, which nobody has read, is left out. (--branch: a first turn that does not fit is a
    failure.)"""
    history, domain = dialogue.history, domain_of(dialogue.task)
    try:
        while dialogue.answer is None:
            if history[-1]["role"] == "user":
                history.append(await agent_turn(dialogue, players, args))
            is_last_round = len(history) >= 2 * args.max_rounds
            dialogue.answer = domain.answer_of(history, is_last_round)
            if dialogue.answer is None:
                begin = time.perf_counter()
                history.append(await human_turn(dialogue, players, args))
                dialogue.waited_s += time.perf_counter() - begin
    except NoRoom:
        if count_agent_turns(history) == 0:                          # the task alone is too long: nothing to score
            raise
        if history[-1]["role"] == "user":
            history.pop()
        dialogue.no_room = True
        dialogue.answer = domain.answer_of(history, True)


def to_trajectory(dialogue, verdicts, tokenizer, args):
    """The finished dialogue in the published format, with what World.score says of it.

    tokenizer: the name (tokenizer_name) of the agent's, or None."""
    trajectory = {
        "task_id": task_id(dialogue.task),
        "sample": dialogue.sample,
        "task": dialogue.task,
        "dialogue_history": dialogue.history,
        "answer": dialogue.answer,
        **verdicts,
        "num_rounds": count_agent_turns(dialogue.history),
        "max_rounds": args.max_rounds,
        "agent": args.agent,
        "simulator": args.simulator,
        "tokenizer": tokenizer,
        "best_of": args.best_of,
        "critic": args.critic}
    if args.temperature != 1 and not is_scripted(args):
        trajectory["temperature"] = args.temperature
    if dialogue.no_room:
        trajectory["no_room"] = True
    trajectory["informed"] = args.agent == "script-informed"
    if dialogue.system is not None:
        trajectory["system_prompt"] = dialogue.system
    if dialogue.branch:
        trajectory.update(dialogue.branch)
    return trajectory


# ---------------------------------------------------------------------------------------------------------------------
# playing many of them, and what is kept

class Curve:
    """What --track shows of a rollout, on rank 0: by the number of dialogues their mean return so far and, of this
    start, tokens a second."""

    def __init__(self, args, stats):
        """stats: what counts the tokens of each model, as rollout_lines() takes it."""
        self.track, self.stats = Track(args.track, args.out, vars(args)), stats
        self.number, self.sum, self.begin = 0, 0.0, time.perf_counter()

    def resume(self, values):
        """Returns of the dialogues that are there already."""
        for value in values:
            self.number += 1
            self.sum += value

    def add(self, value):
        """One more dialogue, of this return."""
        self.resume([value])
        tokens = 0
        for counts in self.stats.values():
            tokens += counts.get("server_completion_tokens", 0) + counts.get("decode_tokens", 0)
        self.track.log(self.number, mean_return=self.sum / self.number,
                       tokens_per_s=tokens / (time.perf_counter() - self.begin))


@dataclasses.dataclass(frozen=True)
class Results:
    """Where the dialogues of this rank go."""

    rows: Rows                                  # the output
    failures: Failures                          # dialogues that could not go on (ReplyError)
    tally: collections.Counter                  # "played", and seconds: "played_s", of these "waited_s" for the human
    curve: Curve
    progress: object                            # tqdm's bar
    tokenizer: str | None                       # the name of the agent's


async def play_and_save(dialogue, players, results, args):
    """Play a dialogue; returns what scores it and adds its row, or None where it could not go on (ReplyError)."""
    begin = time.perf_counter()
    try:
        if args.branch:
            await add_first_turn(dialogue, players, args)
        await play(dialogue, players, args)
    except ReplyError as error:
        results.progress.set_postfix_str(f"{len(results.failures) + 1:,} failed")
        results.failures.add(error, number=dialogue.number, task_id=task_id(dialogue.task), sample=dialogue.sample,
                             dialogue_history=dialogue.history)
        return None
    results.tally["played_s"] += time.perf_counter() - begin
    results.tally["waited_s"] += dialogue.waited_s
    results.failures.in_a_row = 0
    return score_and_save(dialogue, players.world, results, args)


async def score_and_save(dialogue, world, results, args):
    [verdicts] = await world.score([(dialogue.task, dialogue.answer)])
    trajectory = to_trajectory(dialogue, verdicts, results.tokenizer, args)
    results.rows.add(dialogue.number, trajectory)
    results.tally["played"] += 1
    results.progress.update()
    results.curve.add(domain_of(dialogue.task).outcome(trajectory))
    dialogue.history = dialogue.answer = None                        # memory is for what is in flight


def without_samples(trajectory):
    """The trajectory without what takes most memory: prompts, raw texts and ids of its turns."""
    history = []
    for turn in trajectory["dialogue_history"]:
        history.append({key: value for key, value in turn.items() if key not in ("input", "output", "output_ids")})
    return {**trajectory, "dialogue_history": history}


def summary(path):
    """One line: the mean return (over tasks, as 05 has it), the domain's columns, rounds, what was cut, and the
    human's replies that show code."""
    with open(path, encoding="utf-8") as file:
        trajectories = [without_samples(json.loads(line)) for line in file]
    domain = domain_of(trajectories[0]["task"])
    agent_turns, human_turns = [], []
    for trajectory in trajectories:
        request, *turns = trajectory["dialogue_history"]
        agent_turns += [turn for turn in turns if turn["role"] == "assistant"]
        human_turns += [turn for turn in turns if turn["role"] == "user" and not turn.get("tool")]
    numbers = domain.measure(trajectories) | measure_turns(trajectories, domain)
    say(*numbers.get("notes", []))
    mean_return = mean_over_tasks(trajectories, domain.outcome)
    parts = [f"{heading_of(domain.metric(trajectories))} {mean_return:.3f}"]
    for key, heading, form in domain.COLUMNS:
        if key in numbers:
            parts.append(f"{heading} {numbers[key]:{form}}")
    parts.append(f"rounds {len(agent_turns) / len(trajectories):.2f}")
    if "forced_answers" in numbers:
        parts.append(f"{numbers['forced_answers']:.1%} ended by --max-rounds")
    num_full = sum("no_room" in trajectory for trajectory in trajectories)
    if num_full:
        parts.append(f"{num_full} ended because no further turn fits (--max-tokens, --max-new-tokens)")
    num_cut = sum("truncated" in turn for turn in agent_turns)
    parts.append(f"{num_cut} turns stopped by --max-new-tokens")
    parts.append(leak_summary(human_turns))
    return " | ".join(parts)


def leak_summary(human_turns):
    """How many replies of the human show code, by kind, and how many were rejected for it."""
    leaks = collections.Counter(turn["leak"] for turn in human_turns if "leak" in turn)
    text = f"{leaks.total() / max(1, len(human_turns)):.1%} of the human's replies leak code"
    if leaks:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(leaks.items()))
        text += f" ({kinds})"
    rejected = sum(turn.get("resampled", 0) for turn in human_turns)
    if rejected:
        text += f", {rejected} rejected"
    return text


# ---------------------------------------------------------------------------------------------------------------------

PRESETS = {"paper-backend": {"dtype": "bfloat16"}, "paper-frontend": {"dtype": "bfloat16"}}     # the rest are defaults


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
                       help="who picks one of --best-of: a critic folder (03); judge:MODEL; oracle or oracle-patient "
                       "(what the template task says of a turn); untrained (the agent itself, with --reference blind)")
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
                       help="tokens of a prompt with its reply (local models), of the prompts of a pass, and of the "
                       "messages of a pass of --critic")
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
    check_flags(parser, args)
    return args


def check_flags(parser, args):
    """End with an error where flags do not go together."""
    if args.best_of > 1 and (args.critic is None or is_scripted(args)):
        parser.error("--best-of needs an agent that is a model, and --critic DIR or judge:MODEL")
    if args.reference and args.best_of == 1:
        parser.error("--reference goes with --best-of")
    if args.critic == common.UNTRAINED and is_server(args.agent):
        parser.error(f"--critic {common.UNTRAINED}: its scores need the agent's weights, which a server does not give")
    if args.branch and (is_scripted(args) or args.best_of > 1):
        parser.error("--branch needs an agent that is a model, and goes without --best-of")
    if args.system_prompt and is_scripted(args):
        parser.error("--system-prompt is for an agent that is a model")
    if not is_by_role(args.chat_template_args):
        parser.error("--chat-template-args: an object with an object for agent, simulator or judge")
    if args.agent_tokenizer and not is_server(args.agent):
        parser.error("--agent-tokenizer is for an agent behind http://; others bring their own")


def is_by_role(value):
    """Whether a JSON value is an object that has objects for roles."""
    if not isinstance(value, dict) or not value.keys() <= set(ROLES):
        return False
    return all(isinstance(arguments, dict) for arguments in value.values())


def is_scripted(args):
    return args.agent.startswith("script")


def judge_model(args):
    """The model that compares messages (--critic judge:MODEL), or None."""
    if args.critic and args.critic.startswith("judge:"):
        return args.critic.removeprefix("judge:")
    return None


def check_players(tasks, domain, args):
    """InputError where a task states not what the rules, the scripted agent or the oracle need."""
    if is_scripted(args) and args.agent not in domain.PLAYERS:
        names = ", ".join(domain.PLAYERS) or "(none)"
        raise InputError(f"--agent {args.agent}: {domain.NOUN}s have the scripted agents {names}")
    players = []
    if args.simulator == "rules":
        players.append("rules")
    if is_scripted(args):
        players.append("script")
    if args.critic in domain.ORACLES:
        players.append(args.critic)
    for number, task in enumerate(tasks, 1):
        for player in players:
            lacking = domain.lacks(task, player)
            if lacking:
                raise InputError(f'{args.tasks}:{number}: missing "{lacking}", which the rules of template tasks need; '
                                 "use --agent MODEL --simulator MODEL, and a critic that is no oracle")
    if judge_model(args) is not None and domain.JUDGE is None:
        raise InputError(f"--critic judge: cannot compare messages about {domain.NOUN}s; they need a critic of 03")


def input_files(domain, args):
    """What the output is made from: files, model folders and names."""
    critic = judge_model(args) or args.critic
    if critic == common.UNTRAINED or critic in domain.ORACLES:
        critic = None
    return [args.tasks, args.agent, args.simulator, critic, args.agent_tokenizer, args.system_prompt]


def model_names(args):
    """{role: the model that plays it, or None}."""
    names = dict.fromkeys(ROLES)
    if not is_scripted(args):
        names["agent"] = args.agent
    if args.simulator != "rules":
        names["simulator"] = args.simulator
    if args.best_of > 1:
        names["judge"] = judge_model(args)
    return names


def open_players(domain, system, device, args):
    """The Players by the arguments. system: the agent's system prompt, or None."""
    names = model_names(args)
    slots = args.concurrency * args.best_of
    if names["agent"] == names["simulator"]:
        slots *= 2                                                   # each side has its own cache
    options = SpeakerOptions(device, args.dtype, slots, args.max_tokens, args.timeout, args.retries, tuple(args.stop))
    agent, human, judge = open_speakers(names, options, args.chat_template_args, domain.PERSON_SEES)
    if args.agent_tokenizer:
        agent = agent._replace(tokenizer=load_tokenizer(args.agent_tokenizer))
    if agent and agent.tokenizer:
        common.check_system_prompt(args.agent, agent.tokenizer, domain, system, args.max_rounds)
    if human and human.vision_lock and args.reject_leaks:
        raise InputError("--reject-leaks: a local model that sees always says the same; use a server")
    out = pathlib.Path(args.out)
    world = common.world(domain, f"{out}.images", out.parent, common.world_flags(args), device)
    critic = None
    if args.best_of > 1 and not judge:
        critic = open_critic(domain, agent.tokenizer, device, args)
    return Players(agent, human, world, judge, critic, device)


def open_critic(domain, tokenizer, device, args):
    """What scores messages for --best-of: a critic of 03, or the name of an oracle."""
    if args.critic in domain.ORACLES:
        return args.critic
    if args.critic == common.UNTRAINED:
        critic = common.untrained_critic(args.agent, args.reference)
    else:
        critic = common.read_critic(args.critic, tokenizer, domain, args.reference)
    line = common.reference_line(critic)
    if line:
        say(line)
    if not critic.get("visual") and not tokenizer:
        raise InputError(f"--best-of with {args.critic}, a critic that reads tokens: {args.agent} needs "
                         "--agent-tokenizer MODEL")
    return common.load_critic(critic, common.load_whole(device, args.dtype))


def speakers_by_name(players, args):
    """{model name: its Speaker}, each model once."""
    speakers = {}
    for name, speaker in zip(model_names(args).values(), (players.agent, players.human, players.judge)):
        if speaker:
            speakers[name] = speaker
    return speakers


def token_counts(speakers):
    """{model name: what counts its tokens} of Speakers by name."""
    stats = {}
    for name, speaker in speakers.items():
        if speaker.server:
            stats[name] = speaker.server.counts
        elif speaker.engine:
            stats[name] = speaker.engine.stats
    return stats


def works(speakers, critic):
    """What has been done by local models (work_of) and servers (their counts), for the costs."""
    counts = [work_of(speaker.model) for speaker in speakers.values() if speaker.model]
    if isinstance(critic, dict):
        counts += common.works_of(critic)
    for speaker in speakers.values():
        if speaker.server:
            counts.append(speaker.server.counts)
    return counts


def main(argv=None):
    args = parse_args(argv)
    from tqdm import tqdm
    runtime, out = start(args.seed), pathlib.Path(args.out)
    if args.branch:
        trajectories = common.read_trajectories(args.tasks)
        tasks = [trajectory["task"] for trajectory in trajectories]
    else:
        tasks = common.read_tasks(args.tasks)
    domain = domain_of(tasks[0])
    check_players(tasks, domain, args)
    args.simulator_max_new_tokens = args.simulator_max_new_tokens or domain.REPLY_TOKENS
    inputs = input_files(domain, args)
    system = read_text(args.system_prompt) if args.system_prompt else None
    record = argparse.Namespace(**vars(args))
    del record.concurrency                                           # it changes no row
    if is_done(vars(record), out, inputs):
        return

    check_track(args.track)
    players = open_players(domain, system, runtime.device, args)
    if args.branch:
        dialogues = branched_dialogues(trajectories, system, args)
    else:
        dialogues = new_dialogues(tasks, system, args.samples)
    begin_output(vars(record), out, inputs)

    costs = Costs(out, runtime.device)
    speakers = speakers_by_name(players, args)
    costs.works = works(speakers, players.critic)
    stats = token_counts(speakers)
    agent_tokenizer = None
    if players.agent and players.agent.tokenizer:
        agent_tokenizer = tokenizer_name(players.agent.tokenizer)
    tally, curve = collections.Counter(), Curve(args, stats)
    failures = Failures(out, "dialogue", args.concurrency)
    with Rows(out, runtime) as rows, players.world:
        missing = [dialogue for dialogue in dialogues if dialogue.number not in rows.done]
        mine = share_of_rank(missing, runtime, args)
        if args.branch:
            players.first_turns.update(kept_first_turns(rows.rows()))
        if rows.done and runtime.rank == 0:
            say(f"{len(rows.done):,} of {len(dialogues):,} dialogues are there already")
            if args.track:
                curve.resume(domain.outcome(row) for row in rows.rows())
        with tqdm(total=len(mine), unit="dialogue", desc=out.name, mininterval=5, disable=runtime.rank > 0) as progress:
            results = Results(rows, failures, tally, curve, progress, agent_tokenizer)
            play_one = functools.partial(play_and_save, players=players, results=results, args=args)
            try:
                asyncio.run(run_concurrently(play_one, mine, args.concurrency))
            except (InputError, ColBenchError):
                if runtime.world_size == 1:                          # the tokens are paid for (ranks need each other)
                    costs.record()
                raise
    ranks = gather({"tally": tally, "stats": stats, "verdicts": players.verdicts})
    costs.record()
    say(*rollout_lines(ranks, time.perf_counter() - costs.begin))
    failures.finish(rows, len(dialogues), runtime)
    if runtime.rank == 0:
        say(summary(out))


if __name__ == "__main__":
    run_stage(main, ColBenchError)
