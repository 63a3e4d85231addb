"""Measures critics (03) and base models on dialogues of held-out tasks: which is better, and does it read c?

Reads   trajectories (02) with their rewards; --returns: dialogues that 02 --branch that go on from them.
Writes  critics.json (--critics), gates.json (--gates).

--critics  pair accuracy: share of the pairs of trajectories, made as 03 makes them, whose better one has the higher
           score. With --returns also the rank correlation (Spearman) of a critic's scores of actions with the mean
           return of the dialogues that go on from them: the mean of a task's states, then the mean over tasks.
--gates    mean summed log-probability of a turn under a model, without c and with c in front of the dialogue: of the
           logged questions by their kind, and of the right answer and another task's answer as a first turn.

[..]       95 % interval by bootstrap over tasks.

    python scripts/critics.py --trajectories out/base.jsonl --gates models/tiny --out out/gates
    python scripts/critics.py --trajectories out/base.jsonl --critics lm=out/critic yours=out/critic-yours \\
        --returns out/branches.jsonl --out out/critics
"""
import pathlib
import sys
from collections import namedtuple

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import common  # noqa: E402  the repository's modules, wherever this is started
from colbench import ColBenchError, domain_of, task_id  # noqa: E402
from lib import data, statistics  # noqa: E402
from lib.flags import add_overwrite, add_reference, argument_parser, named_path, text_flag  # noqa: E402
from lib.models import encode, end_of_turn, load_model, load_tokenizer, tokenizer_name  # noqa: E402
from lib.runtime import begin_output, InputError, is_done, run_stage, say, start, write_json  # noqa: E402

MAX_TOKENS = 16384               # of a batch, and of a dialogue
MAX_DIALOGUES = 200              # whose turns the gates ask about

# A turn whose log-probability is asked: what kind it is, the turns before it, its text, and its trajectory
Probe = namedtuple("Probe", "kind history text trajectory")


# ---------------------------------------------------------------------------------------------------------------------
# gates: does a model read c?

def gate_probes(trajectories, domain):
    """The Probes of the gates: logged turns that ask, the right answer at once, and another task's answer at once."""
    probes = []
    first_of_family = {}
    for trajectory in trajectories[:MAX_DIALOGUES]:
        task = trajectory["task"]
        history = trajectory["dialogue_history"]
        places = [place for place, turn in enumerate(history) if turn["role"] == "assistant"]
        for place, kind in zip(places, statistics.turn_kinds(task, history, domain)):
            if "answer" not in kind:
                probes.append(Probe(kind, history[:place], history[place]["content"], trajectory))
        right_answer = domain.answer_message(task)
        probes.append(Probe("right answer at once", history[:1], right_answer, trajectory))
        other_task = first_of_family.setdefault(task.get("family"), task)
        if other_task["ground_truth"] != task["ground_truth"]:
            wrong_answer = domain.answer_message(other_task)
            probes.append(Probe("wrong answer at once", history[:1], wrong_answer, trajectory))
    return probes


def probe_rows(probe, tokenizer, domain, with_c):
    """The rows (common.rows_of_trajectory) of a dialogue of which the Probe's turn is the only one of the agent."""
    trajectory = probe.trajectory
    prompt = common.prompt_text(tokenizer, trajectory, probe.history)
    action = encode(tokenizer, probe.text) + [end_of_turn(tokenizer)]
    return common.rows_of_trajectory(tokenizer, [(prompt, action)], trajectory["task"] if with_c else None)


def measure_gates(trajectories, domain, model_name, device):
    """{kind of turn: {"n", "without_c", "with_c": mean log-probabilities}} under a model."""
    model, tokenizer = load_model(model_name, device)
    probes = gate_probes(trajectories, domain)
    scorer = common.Scorer(model)
    logps = []                                                       # of each Probe: without c, with c
    for with_c in (False, True):
        items = [probe_rows(probe, tokenizer, domain, with_c) for probe in probes]
        outputs = common.action_outputs(scorer, items, MAX_TOKENS, device)                   # (1,) each
        logps.append([output.item() for output in outputs])
    by_kind = {}
    for probe, without_c, with_c in zip(probes, *logps):
        by_kind.setdefault(probe.kind, []).append((without_c, with_c))
    gates = {}
    for kind in sorted(by_kind):
        without_c, with_c = zip(*by_kind[kind])
        gates[kind] = {"n": len(with_c), "without_c": statistics.mean(without_c), "with_c": statistics.mean(with_c)}
    return gates


def gate_lines(gates, model_name):
    rows = []
    for kind, gate in gates.items():
        rows.append([kind, str(gate["n"]), f"{gate['without_c']:.2f}", f"{gate['with_c']:.2f}"])
    table = statistics.aligned(["", "n", "without c", "with c"], rows)
    return [f"{model_name}: log-probability of a turn, of at most {MAX_DIALOGUES} dialogues", *table]


# ---------------------------------------------------------------------------------------------------------------------
# critics: held-out pair accuracy, and rank correlation with Monte-Carlo returns

def read_branches(path, domain, tokenizer):
    """(DecisionPoints, for each of them the mean return of each of its actions) of dialogues of 02 --branch.

    States whose actions have equal returns are left out. tokenizer: the name of the critics' one."""
    states = {}                                        # {(task_id, sample, turn): {ids of an action: its dialogues}}
    for trajectory in data.read_trajectories(path):
        if "branch" not in trajectory:
            raise InputError(f"{path}: no dialogues of 02_rollout.py --branch")
        if trajectory.get("tokenizer") != tokenizer:
            raise InputError(f"{path}: the agent's tokenizer is not that of the critics")
        branch = trajectory["branch"]
        actions = states.setdefault((trajectory["task_id"], branch["sample"], branch["turn"]), {})
        turn = trajectory["dialogue_history"][branch["turn"]]
        actions.setdefault(tuple(turn["output_ids"]), []).append(trajectory)
    points, returns = [], []
    for (_, _, number), actions in states.items():
        action_returns = []
        for dialogues in actions.values():
            action_returns.append(statistics.mean([float(domain.eval_score(dialogue)) for dialogue in dialogues]))
        if len(set(action_returns)) > 1:
            firsts = [dialogues[0] for dialogues in actions.values()]
            turns = [dialogue["dialogue_history"][number] for dialogue in firsts]
            task, history = firsts[0]["task"], firsts[0]["dialogue_history"][:number]
            texts = [turn["content"] for turn in turns]
            points.append(common.DecisionPoint(turns[0]["input"], task, history, list(actions), texts))
            returns.append(action_returns)
    if not points:
        raise InputError(f"{path}: no state whose candidates differ in return; raise --branch or --samples of 02")
    return points, returns


def return_correlation(points, returns, scores):
    """{"rank_correlation", "ci95", "num_states"} of scores of actions with their returns, a list for each state."""
    correlations = {}                                                # {task_id: those of its states}
    for point, point_returns, point_scores in zip(points, returns, scores):
        correlation = statistics.rank_correlation(point_scores, point_returns)
        correlations.setdefault(task_id(point.task), []).append(correlation)
    mean, interval = statistics.mean_of_groups(correlations)
    return {"rank_correlation": mean, "ci95": interval, "num_states": len(points)}


def measure_critic(folder, critic, trajectories, pairs, branches, device):
    """The measures of a critic (common.read_critic); branches: those of read_branches, or None."""
    tokenizer = load_tokenizer(folder)
    critic = common.load_critic(critic, common.load_whole(device))
    advantages = common.score_turns(critic, tokenizer, trajectories, MAX_TOKENS, device)
    is_right = []
    for chosen, rejected in pairs:
        if None not in (advantages[chosen], advantages[rejected]):   # None: too long
            gap = sum(advantages[chosen]) - sum(advantages[rejected])
            is_right.append((gap > 0) + 0.5 * (gap == 0))            # a tie is half right
    if not is_right:
        raise InputError(f"{folder}: no pair of dialogues of at most {MAX_TOKENS:,} tokens")
    measures = {"pair_accuracy": statistics.mean(is_right), "num_pairs": len(is_right)}
    if branches:
        points, returns = branches
        scores = common.score_actions(critic, tokenizer, points, MAX_TOKENS, device)
        measures |= return_correlation(points, returns, scores)
    return measures


def critic_lines(measures):
    headings = {"pair_accuracy": "pair accuracy", "num_pairs": "pairs", "rank_correlation": "rank correlation",
                "ci95": "95 %", "num_states": "states"}
    keys = [key for key in headings if statistics.has_any(measures, key)]
    rows = []
    for name, measure in measures.items():
        cells = [statistics.cell_of(measure, key, "d" if key.startswith("num_") else ".3f") for key in keys]
        rows.append([name, *cells])
    return [*statistics.aligned(["critic", *(headings[key] for key in keys)], rows),
            "one training run of each critic: the intervals leave other seeds out"]


# ---------------------------------------------------------------------------------------------------------------------

def parse_args(argv=None):
    parser = argument_parser(__doc__)
    parser.add_argument("--trajectories", type=text_flag, required=True, help="trajectories of held-out tasks (02)")
    parser.add_argument("--out", type=text_flag, required=True, help="folder to write")
    parser.add_argument("--critics", type=named_path, nargs="+", default=[], metavar="NAME=DIR",
                        help="critics (03) to compare")
    parser.add_argument("--returns", type=text_flag, metavar="FILE",
                        help="--critics: dialogues of 02 --branch on the trajectories")
    parser.add_argument("--gates", type=text_flag, metavar="MODEL", help="the model whose gates are measured")
    add_reference(parser)
    add_overwrite(parser)
    args = parser.parse_args(argv)
    if not args.critics and not args.gates:
        parser.error("nothing to measure: give --critics or --gates")
    if not args.critics and (args.returns or args.reference_sees_c is not None):
        parser.error("--returns and --reference-sees-c go with --critics")
    return args


def main(argv=None):
    args = parse_args(argv)
    start(0)
    trajectories = data.read_trajectories(args.trajectories)
    domain = domain_of(trajectories[0]["task"])
    if args.gates and any(domain.turn_kind(row["task"], [], "") is None for row in trajectories):
        raise InputError(f"{args.trajectories}: --gates needs template tasks (01), which say what a turn is worth")
    folders = dict(argument.split("=", 1) for argument in args.critics)
    critics = {}
    for name, folder in folders.items():
        critics[name] = common.read_critic(folder, None, domain, args.reference_sees_c)
        if critics[name].is_visual:
            raise InputError(f"--critics {name}: sees images, and --critics takes critics that read text")
    pairs, branches = [], None
    if critics:
        data.fill_rewards(trajectories, vars(args))
        pairs = common.trajectory_pairs(trajectories, args.trajectories)
    if args.returns:
        tokenizer = load_tokenizer(next(iter(folders.values())))
        branches = read_branches(args.returns, domain, tokenizer_name(tokenizer))
    out = pathlib.Path(args.out)
    inputs = [args.trajectories, args.returns, args.gates, *folders.values()]
    if is_done(vars(args), out, inputs, folder=True):
        return
    begin_output(vars(args), out, inputs, folder=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    if args.gates:
        gates = measure_gates(trajectories, domain, args.gates, device)
        write_json(out / "gates.json", gates)
        say(*gate_lines(gates, args.gates))
    if critics:
        measures = {}
        for name, critic in critics.items():
            measures[name] = measure_critic(folders[name], critic, trajectories, pairs, branches, device)
        write_json(out / "critics.json", measures)
        say(*critic_lines(measures))
    (out / "COMPLETED").touch()
    say(f"writes {out}")


if __name__ == "__main__":
    run_stage(main, ColBenchError)
