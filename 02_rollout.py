"""Stage 2: let an agent work with a user simulator on every task, and score the answers.

Reads   tasks.jsonl (01).
Writes  trajectories.jsonl in the published format, {"task", "dialogue_history", "answer", "reward"}, with "task_id",
        "sample", "num_rounds", "max_rounds", "ending" ("answered", "answered in the last round", "asked in the last
        round"), the domain scorer's results (screenshots in the folder FILE.images), and how it was made: "agent",
        "simulator", "tokenizer", "best_of", "critic", "informed"; if they apply "temperature", "system_prompt",
        "chat_template_args", "no_room" (no further turn would fit into a model), "branch", "continuation". A turn by an
        agent model has "output" (the raw text); if known, "input" (the rendered prompt) and "output_ids" (as sampled);
        "truncated" if --max-new-tokens cut it. A turn by a simulator model has "output" if its raw text differs, and
        "leak" if it reveals the solution. A turn by the environment has "tool".

The simulator opens with the request. In each of --max-rounds rounds the agent sends a message and the simulator
replies. The task's domain (colbench/) decides which message is the answer, and scores it.
--best-of N: at each turn the agent samples N messages and --critic, which may see c, selects the one that is sent.
--branch N: at N random turns of a trajectories file, samples several messages and rolls each out: Monte-Carlo returns.
A dialogue that fails is counted and the others are kept; repeat the command to roll out the missing ones.
docs/scale.md describes --best-of, --branch and models behind http://.
Differs from the paper: the agent is told when the last round starts. The prompts are ours.

    python 02_rollout.py --tasks out/test.jsonl --agent out/policy --simulator rules --out out/trajectories.jsonl
    torchrun --nproc-per-node 8 02_rollout.py --tasks tasks.jsonl --agent meta-llama/Llama-3.1-8B-Instruct \\
        --simulator http://localhost:8000/v1#meta-llama/Llama-3.1-70B-Instruct --out trajectories.jsonl
"""
import json

from colbench.schema import table_of
from lib import flags
from lib.flags import is_server, UNTRAINED

# ---------------------------------------------------------------------------------------------------------------------
# arguments

ROLES = "agent", "simulator", "judge"


PAPER = {"dtype": "bfloat16", "max_rounds": 10, "temperature": 1.0}
PRESETS = {"paper-backend": PAPER, "paper-frontend": PAPER, "published-backend": PAPER}


def parse_args(argv=None):
    parser = flags.argument_parser(__doc__)
    parser.add_argument("--tasks", type=flags.text_flag, required=True, help="tasks (01); --branch: trajectories")
    parser.add_argument("--agent", type=flags.text_flag, required=True, help="a model (folder, hub id, smollm2, a "
                        "server), or a scripted agent of the domain: script, script-informed (knows c), …")
    parser.add_argument("--simulator", type=flags.text_flag, default="rules", help="the user: rules, or a model")
    parser.add_argument("--out", type=flags.text_flag, required=True, help="trajectories file to write (JSONL)")
    parser.add_argument("--samples", type=flags.positive_int, default=1, help="dialogues per task")
    parser.add_argument("--max-rounds", type=flags.positive_int, default=10, help="agent turns in a dialogue")
    parser.add_argument("--single-turn", action="store_true", help="the agent answers at once (--max-rounds 1)")
    parser.add_argument("--temperature", type=flags.temperature_flag, default=1.0, help="of the agent")
    parser.add_argument("--max-new-tokens", type=flags.num_tokens_flag, default=1024, help="most tokens in a turn")
    parser.add_argument("--simulator-max-new-tokens", type=flags.num_tokens_flag,
                        help="most tokens in a simulator model's reply (None: the domain's REPLY_TOKENS)")
    parser.add_argument("--seed", type=flags.seed_flag, default=0, help="seed of the samples")
    group = parser.add_argument_group("critics")
    group.add_argument("--best-of", type=flags.num_samples_flag, default=1, help="messages sampled at each turn")
    group.add_argument("--critic", type=flags.text_flag, help="selects one of --best-of: a critic folder (03); "
                       "judge:MODEL; untrained (the agent itself, with a reference model that does not see c)")
    flags.add_reference(group)
    group.add_argument("--branch", type=flags.positive_int, metavar="N", help="continue from N turns of trajectories")
    group.add_argument("--branch-candidates", type=flags.num_samples_flag, default=8, help="messages per such turn")
    group = parser.add_argument_group("models and servers")
    group.add_argument("--concurrency", type=flags.num_samples_flag, default=64, help="dialogues in flight")
    group.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="arithmetic of the models")
    group.add_argument("--max-length", type=flags.positive_int, default=16384, help="most tokens in a prompt and reply")
    group.add_argument("--max-tokens", type=flags.positive_int, default=16384, help="tokens per pass of --critic")
    group.add_argument("--system-prompt", type=flags.text_flag, metavar="FILE", help="used verbatim as the agent's "
                       "system prompt; also drops the \"(last round)\" note")
    group.add_argument("--chat-template-args", type=json.loads, default={}, metavar="JSON", help="arguments of chat "
                       "templates by role: {\"agent\": {\"enable_thinking\": false}, \"simulator\": …, …}")
    group.add_argument("--agent-tokenizer", type=flags.text_flag, metavar="MODEL", help="tokenizer of an agent behind "
                       "vLLM: keeps the sampled ids and the prompt, so that 03 and 04 train on exactly these; "
                       "--best-of needs it for a critic that reads tokens")
    parser.add_argument("--track", type=flags.project_flag, metavar="PROJECT", help="log the number of dialogues "
                        "and their mean return to this project of trackio (pip install trackio)")
    flags.add_world(parser)
    flags.set_preset(parser, PRESETS, argv)
    args = parser.parse_args(argv)
    if args.single_turn:
        args.max_rounds = 1
    if args.best_of > 1 and (args.critic is None or is_scripted(args.agent)):
        parser.error("--best-of needs an agent that is a model, and --critic DIR, judge:MODEL or untrained")
    if args.reference_sees_c is not None and args.best_of == 1:
        parser.error("--reference-sees-c goes with --best-of")
    if args.critic == UNTRAINED and is_server(args.agent):
        parser.error(f"--critic {UNTRAINED}: needs the agent's weights, which a server does not provide")
    if args.branch and (is_scripted(args.agent) or args.best_of > 1):
        parser.error("--branch needs an agent that is a model, and cannot be used with --best-of")
    if args.system_prompt and is_scripted(args.agent):
        parser.error("--system-prompt is for an agent that is a model")
    if table_of(dict)(args.chat_template_args) or not args.chat_template_args.keys() <= set(ROLES):
        parser.error("--chat-template-args: an object with an object for agent, simulator or judge")
    if args.agent_tokenizer and not is_server(args.agent):
        parser.error("--agent-tokenizer is for an agent behind http://; others have their own")
    return args


def is_scripted(agent):
    return agent.startswith("script")


if __name__ == "__main__":
    parse_args()                    # answers --help and wrong flags before the imports below, which take seconds

import asyncio
import collections
import dataclasses
import functools
import random
import re
import time
from typing import Callable, NamedTuple

import common
from colbench import domain_of, task_id
from lib import data, runtime
from lib.load import load_tokenizer
from lib.logps import load_whole, TooLong
from lib.runtime import gather, InputError, Output, read_text, RowFile, run_stage, say, start
from lib.sampling import add_rows, finish_rows, open_sampler, Sampler
from lib.servers import NoRoom, ReplyError
from lib.statistics import agent_places, ending_of, heading_of, mean_over_tasks, measure_endings, measure_turns
from lib.tokens import agent_messages, check_prompt, system_prompt, tokenizer_name
from lib.vision import load_vision


@dataclasses.dataclass
class Dialogue:
    """A dialogue that is being rolled out."""

    task: dict
    sample: int                                 # number among the task's dialogues; with --branch among all dialogues
    history: list                               # the turns so far, {"role", "content", …} each
    system: str | None                          # the agent's system prompt; None: ours
    random_name: int | str                      # seeds its random numbers, with the seed, task and turn (random_key)
    branch: dict = dataclasses.field(default_factory=dict)      # --branch: "branch" and "continuation" of its row
    answer: str | None = None
    no_room: bool = False                       # ended because no further turn would fit into a model


class Settings(NamedTuple):
    """Flags that a dialogue needs."""

    agent: str
    simulator: str
    best_of: int
    critic: str | None
    max_rounds: int
    temperature: float
    max_new_tokens: int
    simulator_max_new_tokens: int
    chat_template_args: dict
    samples: int                                # dialogues of a task; --branch: continuations of a message
    branch: int | None                          # --branch: states; and messages sampled in each
    branch_candidates: int
    concurrency: int
    dtype: str
    max_length: int
    seed: int


@dataclasses.dataclass
class Players:
    """Models, environment and counters shared by this rank's dialogues."""

    settings: Settings
    environment: object                         # the domain's: rule-based simulator, tools, scorer
    agent: Sampler | None = None                # None: a scripted agent
    simulator: Sampler | None = None            # None: the rule-based one
    judge: Sampler | None = None                # --best-of with --critic judge:MODEL
    critic: object = None                       # --best-of with a critic of 03: common.TextCritic or VisualCritic
    track: Callable | None = None               # --track: runtime.open_track
    returns: list = dataclasses.field(default_factory=list)                 # of the finished dialogues
    verdicts: collections.Counter = dataclasses.field(default_factory=collections.Counter)      # the judge's
    # --branch: {(task id, candidate): its first turn, or the asyncio.Task that samples it}
    first_turns: dict = dataclasses.field(default_factory=dict)


# ---------------------------------------------------------------------------------------------------------------------
# one turn of a dialogue

def random_key(dialogue, seed, who):
    """RNG key of a turn."""
    return seed, task_id(dialogue.task), dialogue.random_name, len(dialogue.history), who


def without_empty(turn, always):
    """Drop a turn's empty fields, except those in `always`."""
    return {key: value for key, value in turn.items() if value or key in always}


async def agent_turn(dialogue, players):
    """The agent's next turn. An agent model sees only the dialogue.

    With --best-of, a critic or a judge selects it from several.
    A server's turn has the prompt and the sampled ids only with --agent-tokenizer."""
    domain, agent, settings = domain_of(dialogue.task), players.agent, players.settings
    key = random_key(dialogue, settings.seed, "agent")
    if agent is None:
        scripted_turn = domain.PLAYERS[settings.agent]
        message = scripted_turn(dialogue.task, dialogue.history, settings.max_rounds, random.Random(repr(key)))
        return {"role": "assistant", "content": domain.shown(message)}
    prompt = domain.agent_system(settings.max_rounds)
    chat = agent_messages(dialogue.history, settings.max_rounds, prompt, dialogue.system)
    replies = await agent.sample(chat, settings.best_of, settings.temperature, settings.max_new_tokens, key)
    messages = [domain.shown(agent.visible(reply)) for reply in replies]
    choice = 0
    if settings.best_of > 1 and players.judge:
        choice = await judge_choice(dialogue, messages, players)
    elif settings.best_of > 1:
        choice = await critic_choice(dialogue, replies, messages, players)
    reply = replies[choice]
    turn = {"role": "assistant", "content": messages[choice], "input": reply.prompt, "output": reply.text,
            "output_ids": reply.ids, "truncated": not reply.ended}
    return without_empty(turn, always=("role", "content", "output"))


async def simulator_turn(dialogue, players):
    """Reply to the agent's turn at the end of the history, by the environment itself or by the simulator.

    If it reveals the solution, "leak" says how."""
    task, history, simulator = dialogue.task, dialogue.history, players.simulator
    domain = domain_of(task)
    key = random_key(dialogue, players.settings.seed, "human")
    tool_reply = await players.environment.tool_reply(task, history)
    if tool_reply is not None:
        return {"role": "user", "content": tool_reply, "tool": True}
    if simulator is None:
        rng = random.Random(repr(key))
        return {"role": "user", "content": await players.environment.rule_reply(task, history, rng)}
    chat = await players.environment.simulator_chat(task, history)
    [reply] = await simulator.sample(chat, 1, 0.0, players.settings.simulator_max_new_tokens, key)
    turn = {"role": "user", "content": simulator.visible(reply)[:domain.REPLY_CHARS]}
    if not turn["content"] and not reply.ended:
        raise ReplyError("the simulator was still thinking at --simulator-max-new-tokens; raise the limit or disable "
                         "thinking (--chat-template-args)")
    if reply.text.strip() != turn["content"]:
        turn["output"] = reply.text
    if domain.leak_of:
        turn["leak"] = domain.leak_of(task, turn["content"])
    return without_empty(turn, always=("role", "content"))


# ---------------------------------------------------------------------------------------------------------------------
# --best-of: select one of several messages

async def critic_choice(dialogue, replies, messages, players):
    """Index of the reply that a critic (03) scores highest. Raises NoRoom if one is too long for the critic."""
    ids = [reply.ids for reply in replies]
    state = common.State(replies[0].prompt, dialogue.task, dialogue.history, ids, messages)
    critic = await players.critic.seeing([state], players.environment)
    try:
        [advantages] = critic.score_actions([state])
    except TooLong as error:
        raise NoRoom(str(error)) from None
    return max(range(len(advantages)), key=advantages.__getitem__)


async def judge_choice(dialogue, messages, players):
    """Index of the best message: the best so far is compared with the next, N - 1 times.

    players.verdicts counts "decided", "tie" (the two orders disagree) and "unreadable"."""
    texts = [message.strip() for message in messages]
    best = 0
    for challenger in range(1, len(texts)):
        if texts[best] == texts[challenger]:
            continue
        best_first, best_second = await asyncio.gather(
            judge_letters(dialogue, texts[best], texts[challenger], players),
            judge_letters(dialogue, texts[challenger], texts[best], players))
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


async def judge_letters(dialogue, first, second, players):
    """The set of letters A (the first message) and B in the judge's reply; it sees c. A clear reply has one of them."""
    lines = []
    for turn in dialogue.history:
        name = "Assistant" if turn["role"] == "assistant" else "Person"
        lines.append(f"{name}: {turn['content']}")
    question = domain_of(dialogue.task).JUDGE.format(
        ground_truth=dialogue.task["ground_truth"], dialogue="\n".join(lines), a=first, b=second)
    key = random_key(dialogue, players.settings.seed, "judge")
    [reply] = await players.judge.sample([{"role": "user", "content": question}], 1, 0.0, 8, key)
    return set(re.findall(r"\b[AB]\b", players.judge.visible(reply)))


# ---------------------------------------------------------------------------------------------------------------------
# dialogues

def new_dialogues(tasks, system, samples):
    """`samples` dialogues of each task, opened with the request. system: the agent's system prompt; None: ours."""
    dialogues = []
    num_samples = collections.Counter()                              # per task_id, which two tasks may share
    for task in tasks:
        for _ in range(samples):
            sample = num_samples[task_id(task)]
            num_samples[task_id(task)] += 1
            request = {"role": "user", "content": task["problem_description"]}
            dialogues.append(Dialogue(task, sample, [request], system, random_name=sample))
    return dialogues


def branched_dialogues(trajectories, system, settings, path):
    """The dialogues of --branch: in each state --branch-candidates messages, each continued --samples times. A state is
    an agent turn of a trajectory; only the turns before it are kept.
    path: of the trajectories, for errors."""
    states = []
    for trajectory in trajectories:
        for position in agent_places(trajectory["dialogue_history"]):
            states.append((trajectory, position))
    if len(states) < settings.branch:
        say(f"{path}: has only {len(states):,} agent turns; --branch {settings.branch:,} will use them all")
    states = random.Random(settings.seed).sample(states, min(settings.branch, len(states)))
    dialogues = []
    for trajectory, position in states:
        max_rounds = trajectory.get("max_rounds", settings.max_rounds)
        if max_rounds != settings.max_rounds:
            raise InputError(f"{path}: task {trajectory['task_id']} was rolled out with --max-rounds "
                             f"{max_rounds}; --branch needs the same")
        for candidate in range(settings.branch_candidates):
            for continuation in range(settings.samples):
                dialogue = branched_dialogue(len(dialogues), trajectory, position, candidate, continuation)
                dialogue.system = system_prompt(trajectory) if system is None else system
                dialogues.append(dialogue)
    return dialogues


def branched_dialogue(number, trajectory, position, candidate, continuation):
    """A dialogue that continues a trajectory from one of its agent turns."""
    history = []
    for turn in trajectory["dialogue_history"][:position]:
        history.append({key: turn[key] for key in ("role", "content", "tool") if key in turn})
    task = {**trajectory["task"], "task_id": trajectory["task_id"]}  # the task itself may have no task_id
    run = {"run": trajectory["run"]} if "run" in trajectory else {}  # if 05 has joined several runs
    branch = {**run, "sample": trajectory["sample"], "turn": position, "candidate": candidate}
    keys = {"branch": branch, "continuation": continuation}
    return Dialogue(task, number, history, system=None, random_name=branch_name(branch), branch=keys)


def branch_name(branch):
    """Name of a --branch candidate within its task; it also seeds the random numbers."""
    return "/".join(map(str, branch.values()))


async def add_first_turn(dialogue, players):
    """--branch: add the candidate turn, which is sampled once for all of its continuations."""
    candidate = task_id(dialogue.task), dialogue.random_name
    if candidate not in players.first_turns:
        players.first_turns[candidate] = asyncio.ensure_future(agent_turn(dialogue, players))
    turn = players.first_turns[candidate]
    dialogue.history.append(turn if isinstance(turn, dict) else await turn)
    dialogue.random_name += f"/{dialogue.branch['continuation']}"    # from here on, its own random numbers


async def roll_out(dialogue, players):
    """Roll out one dialogue to its answer. Returns an async function that scores it and returns its row (add_rows).

    If the next turn does not fit into a model, the dialogue ends: treat the agent's last turn as a final-round turn and
    drop the simulator's unread reply. (--branch: a first turn that does not fit is a failure.)"""
    history, domain = dialogue.history, domain_of(dialogue.task)
    if dialogue.branch:
        await add_first_turn(dialogue, players)
    try:
        while dialogue.answer is None:
            if history[-1]["role"] == "user":
                history.append(await agent_turn(dialogue, players))
            is_last_round = len(history) >= 2 * players.settings.max_rounds
            dialogue.answer = domain.answer_of(history, is_last_round)
            if dialogue.answer is None:
                history.append(await simulator_turn(dialogue, players))
    except NoRoom:
        if not agent_places(history):                                # the task itself is too long: nothing to score
            raise
        if history[-1]["role"] == "user":
            history.pop()
        dialogue.no_room = True
        dialogue.answer = domain.answer_of(history, True)
    return functools.partial(scored_row, dialogue, players)


def to_trajectory(dialogue, verdicts, players):
    """The finished dialogue in the published format, with the environment's `verdicts`."""
    settings = players.settings
    trajectory = {"task_id": task_id(dialogue.task), "sample": dialogue.sample, "task": dialogue.task,
                  "dialogue_history": dialogue.history, "answer": dialogue.answer, **verdicts,
                  "num_rounds": len(agent_places(dialogue.history)), "max_rounds": settings.max_rounds,
                  "agent": settings.agent, "simulator": settings.simulator, "tokenizer": None,
                  "best_of": settings.best_of, "critic": settings.critic}
    if players.agent and players.agent.tokenizer:
        trajectory["tokenizer"] = tokenizer_name(players.agent.tokenizer)
    if settings.temperature != 1 and players.agent:
        trajectory["temperature"] = settings.temperature
    if dialogue.no_room:
        trajectory["no_room"] = True
    trajectory["ending"] = ending_of(trajectory, domain_of(dialogue.task))
    trajectory["informed"] = settings.agent == "script-informed"
    if dialogue.system is not None:
        trajectory["system_prompt"] = dialogue.system
    if "agent" in settings.chat_template_args:
        trajectory["chat_template_args"] = settings.chat_template_args["agent"]
    return {**trajectory, **dialogue.branch}


async def scored_row(dialogue, players):
    """Score a finished dialogue and return its row."""
    [verdicts] = await players.environment.score([(dialogue.task, dialogue.answer)])
    trajectory = to_trajectory(dialogue, verdicts, players)
    dialogue.history = dialogue.answer = None                        # free the memory
    players.returns.append(domain_of(dialogue.task).eval_score(trajectory))
    players.track(len(players.returns), mean_return=sum(players.returns) / len(players.returns))
    return trajectory


# ---------------------------------------------------------------------------------------------------------------------
# the summary of a rollout

def summary(path):
    """One line: the mean return (over tasks) and the domain's columns as in 05, rounds, how dialogues and turns ended,
    and the share of a simulator model's replies that leak the solution."""
    trajectories = runtime.read_rows(path)
    data.say_graded(trajectories)
    domain = domain_of(trajectories[0]["task"])
    turns = [turn for trajectory in trajectories for turn in trajectory["dialogue_history"][1:]]
    num_full = sum("no_room" in trajectory for trajectory in trajectories)
    num_truncated = sum("truncated" in turn for turn in turns)
    mean_return = mean_over_tasks(trajectories, domain.eval_score)
    measured = {**domain.measure(trajectories), **measure_turns(trajectories, domain),
                **measure_endings(trajectories, domain)}
    parts = [f"{heading_of(domain.metric(trajectories))} {mean_return:.3f}"]
    for key, heading, form in domain.COLUMNS:
        if key in measured:
            parts.append(f"{heading} {measured[key]:{form}}")
    parts.append(f"rounds {len(agent_places(turns)) / len(trajectories):.2f}")
    if domain.ANSWERS_EARLY:
        parts.append("{answered_early:.1%} answered before the last round, {answered_last:.1%} in it, {asked_last:.1%} "
                     "still asked in it".format(**measured))
    parts += [f"{num_full} ended because no further turn fits (--max-length, --max-new-tokens)",
              f"{num_truncated} turns stopped by --max-new-tokens"]
    if domain.leak_of and trajectories[0].get("simulator") != "rules":          # rule-based replies are not measured
        replies = [turn for turn in turns if turn["role"] == "user" and "tool" not in turn]
        leak_frac = sum("leak" in reply for reply in replies) / max(1, len(replies))
        parts.append(f"{leak_frac:.1%} of the simulator's replies leak the solution")
    return " | ".join(parts)


# ---------------------------------------------------------------------------------------------------------------------

def model_names(settings):
    """{role: the model that plays it}."""
    names = {}
    if not is_scripted(settings.agent):
        names["agent"] = settings.agent
    if settings.simulator != "rules":
        names["simulator"] = settings.simulator
    if settings.best_of > 1 and settings.critic.startswith("judge:"):
        names["judge"] = settings.critic.removeprefix("judge:")
    return names


def check_players(tasks, domain, settings, path):
    """Raises InputError if a task of the file `path` lacks a field that the simulator or scripted agent needs."""
    scripted = is_scripted(settings.agent)
    if scripted and settings.agent not in domain.PLAYERS:
        names = ", ".join(domain.PLAYERS) or "(none)"
        raise InputError(f"--agent {settings.agent}: the scripted agents for a {domain.NOUN} are {names}")
    for number, task in enumerate(tasks, 1):
        lacking = None
        if settings.simulator == "rules":
            lacking = domain.lacks(task, "rules")
        if scripted:
            lacking = lacking or domain.lacks(task, "script")
        if lacking:
            raise InputError(f'{path}:{number}: missing "{lacking}", which the rule-based simulator or scripted agent '
                             "needs; use --agent MODEL --simulator MODEL")
    if "judge" in model_names(settings) and domain.JUDGE is None:
        raise InputError(f"--critic judge: cannot compare messages about a {domain.NOUN}; use a critic of 03")


def open_samplers(domain, settings, device):
    """{role: its Sampler} for the roles that models play."""
    names, opened, samplers = model_names(settings), {}, {}
    num_sides = 2 if names.get("agent") == names.get("simulator") else 1         # each side has its own cache
    slots = num_sides * max(settings.concurrency, settings.best_of)
    for role, name in names.items():
        if role == "simulator" and domain.SIMULATOR_SEES and not is_server(name):
            sampler = Sampler(*load_vision(name, device, settings.dtype))        # greedy, one chat at a time
        else:
            if name not in opened:                                   # a model with two roles is loaded once
                opened[name] = open_sampler(name, device, settings.dtype, slots, settings.max_length)
            sampler = opened[name]
        samplers[role] = dataclasses.replace(sampler, template_args=settings.chat_template_args.get(role, {}))
    return samplers


def say_totals(num_dialogues, players, begin_s):
    """Print the elapsed time and tokens generated on all ranks; return the tokens."""
    samplers = [sampler for sampler in (players.agent, players.simulator, players.judge) if sampler]
    tokens = sum(gather(sum(sampler.generated_tokens for sampler in samplers)))
    seconds = time.perf_counter() - begin_s
    say(f"{num_dialogues:,} dialogues in {seconds:,.0f} s, {tokens:,} tokens generated")
    verdicts = sum(gather(players.verdicts), collections.Counter())
    if verdicts:
        say("judge's comparisons: " + ", ".join(f"{count:,} {verdict}" for verdict, count in verdicts.items()))
    return tokens


def main(argv=None):
    args = parse_args(argv)
    begin_s = time.perf_counter()
    run = start(args.seed)
    if args.branch:
        trajectories = data.read_trajectories(args.tasks)
        tasks = [trajectory["task"] for trajectory in trajectories]
    else:
        tasks = data.read_tasks(args.tasks)
    domain = domain_of(tasks[0])
    args.simulator_max_new_tokens = args.simulator_max_new_tokens or domain.REPLY_TOKENS
    settings = flags.pick(Settings, vars(args))
    check_players(tasks, domain, settings, args.tasks)
    system = read_text(args.system_prompt) if args.system_prompt else None
    inputs = [args.tasks, *model_names(settings).values(), args.critic, args.agent_tokenizer, args.system_prompt]
    output = Output(args.out, vars(args), inputs)
    if output.is_done():
        return

    # agent, simulator, judge or critic
    environment = data.environment(domain, f"{args.out}.images", output.path.parent, vars(args), run.device)
    players = Players(settings, environment, **open_samplers(domain, settings, run.device))
    if args.agent_tokenizer:
        players.agent.tokenizer = load_tokenizer(args.agent_tokenizer)
    tokenizer = players.agent.tokenizer if players.agent else None
    if tokenizer:
        shown_system = domain.agent_system(args.max_rounds) if system is None else system
        check_prompt(args.agent, tokenizer, shown_system, players.agent.template_args)
    if args.best_of > 1 and not players.judge:
        players.critic = common.open_critic(args.critic, args.agent, domain, args.reference_sees_c)
        players.critic.check_tokenizer(tokenizer, args.agent)
        say(players.critic.describe())
        players.critic.load(load_whole(run.device, args.dtype), args.max_tokens)

    # their dialogues
    group = 1
    if args.branch:
        dialogues = branched_dialogues(trajectories, system, settings, args.tasks)
        group = args.samples                                         # continuations share their first turn
    else:
        dialogues = new_dialogues(tasks, system, args.samples)
    output.begin()
    players.track = runtime.open_track(output)
    rows = RowFile(args.out, run)
    if rows.done:
        say(f"{len(rows.done):,} of {len(dialogues):,} dialogues are there already")
    texts = rows.find()
    for number in sorted(rows.done):
        row = json.loads(texts[number])
        players.returns.append(domain.eval_score(row))
        if args.branch:
            name = row["task_id"], branch_name(row["branch"])
            players.first_turns[name] = row["dialogue_history"][row["branch"]["turn"]]
    with players.environment:
        failures = add_rows(rows, dialogues, functools.partial(roll_out, players=players), args.concurrency, group)
    tokens = say_totals(len(dialogues) - len(rows.done), players, begin_s)
    output.add_costs(generated_tokens=tokens)
    finish_rows(rows, len(dialogues), failures)
    if run.rank == 0:
        say(summary(args.out))


if __name__ == "__main__":
    run_stage(main)
