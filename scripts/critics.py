"""Measures critics (03) and base models on dialogues of held-out tasks: which is better, and does it read c?

Reads   trajectories (02) with their rewards; --returns: dialogues that 02 --branch played on from them.
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
from lib import statistics  # noqa: E402
from lib.flags import add_overwrite, add_reference, argument_parser, named_path, text_flag  # noqa: E402
from lib.models import encode, end_of_turn, load_model, load_tokenizer, tokenizer_name  # noqa: E402
from lib.runtime import begin_output, InputError, is_done, run_stage, say, start, write_json  # noqa: E402

MAX_TOKENS = 16384               # of a batch
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
    system = common.system_prompt(trajectory)
    max_rounds = trajectory.get("max_rounds", 10)
    prompt = common.prompt_text(tokenizer, probe.history, max_rounds, domain.AGENT_SYSTEM, system)
    action = encode(tokenizer, probe.text) + [end_of_turn(tokenizer)]
    hidden_info = None
    if with_c:
        hidden_info = common.hidden_info(trajectory["task"])
    return common.rows_of_trajectory(tokenizer, [(prompt, action)], hidden_info)


def measure_gates(trajectories, domain, model_name, device):
    """{kind of turn: {"n", "without_c", "with_c": mean log-probabilities}} under a model."""
    model, tokenizer = load_model(model_name, device)
    if len(trajectories) > MAX_DIALOGUES:
        say(f"the gates ask about the first {MAX_DIALOGUES} of {len(trajectories):,} dialogues")
    probes = gate_probes(trajectories, domain)
    scorer = common.Scorer(model)
    logps = {}                                                       # {with_c: the log-probability of each Probe}
    for with_c in (False, True):
        items = [probe_rows(probe, tokenizer, domain, with_c) for probe in probes]
        outputs = common.action_outputs(scorer, items, MAX_TOKENS, device)                   # (1,) each
        logps[with_c] = [output.item() for output in outputs]
    gates = {}
    for kind in sorted({probe.kind for probe in probes}):
        places = [place for place, probe in enumerate(probes) if probe.kind == kind]
        gates[kind] = {
            "n": len(places),
            "without_c": statistics.mean([logps[False][place] for place in places]),
            "with_c": statistics.mean([logps[True][place] for place in places]),
        }
    return gates


def gate_lines(gates, model_name):
    """The table of --gates."""
    rows = []
    for kind, gate in gates.items():
        rows.append([kind, str(gate["n"]), f"{gate['without_c']:.2f}", f"{gate['with_c']:.2f}"])
    table = statistics.aligned(["", "n", "without c", "with c"], rows)
    return [f"{model_name}: log-probability of a turn", *table]


def check_gates(trajectories, domain, path):
    """InputError where a task does not say what a turn is worth."""
    for trajectory in trajectories:
        if domain.turn_kind(trajectory["task"], [], "") is None:
            raise InputError(f"{path}: --gates needs template tasks (01), which say what a turn is worth, and task "
                             f"{trajectory['task_id']} does not; leave --gates out")


# ---------------------------------------------------------------------------------------------------------------------
# critics: held-out pair accuracy, and rank correlation with Monte-Carlo returns

def read_critics(arguments, domain, reference):
    """{name: critic (common.read_critic)} of NAME=DIR arguments; InputError for one that sees images."""
    critics = {}
    for argument in arguments:
        name, _, folder = argument.partition("=")
        critics[name] = common.read_critic(folder, None, domain, reference)
        if critics[name].get("visual"):
            raise InputError(f"{folder}: --critics takes critics that read text, and this one sees images")
    return critics


def read_branches(path, domain, critics):
    """[(DecisionPoint, the mean return of each of its actions)] of the dialogues that 02 --branch played and scored.

    States whose actions have equal returns are left out. InputError unless the file has the tokens of all critics."""
    trajectories = common.read_trajectories(path)
    tokenizers = {critic["folder"]: tokenizer_name(load_tokenizer(critic["folder"])) for critic in critics.values()}
    states = {}                                        # {(task_id, sample, turn): {ids of an action: its dialogues}}
    for trajectory in trajectories:
        check_branch(trajectory, tokenizers, path)
        branch = trajectory["branch"]
        actions = states.setdefault((trajectory["task_id"], branch["sample"], branch["turn"]), {})
        turn = trajectory["dialogue_history"][branch["turn"]]
        actions.setdefault(tuple(turn["output_ids"]), []).append(trajectory)
    branches = []
    for (_, _, number), actions in states.items():
        returns = [mean_return(dialogues, domain) for dialogues in actions.values()]
        if len(set(returns)) > 1:
            branches.append((decision_point(actions, number), returns))
    if not branches:
        raise InputError(f"{path}: no state whose candidates differ in return; raise --branch or --samples of 02")
    return branches


def check_branch(trajectory, tokenizers, path):
    """InputError for a dialogue that 02 --branch has not played and scored, or not with these tokenizers."""
    if "branch" not in trajectory or trajectory.get("reward") is None:
        raise InputError(f"{path}: no dialogues of 02_rollout.py --branch")
    for folder, name in tokenizers.items():
        if trajectory.get("tokenizer") != name:
            raise InputError(f"{folder}: its tokenizer is not that of the agent in {path}")
    number = trajectory["branch"]["turn"]
    turns = trajectory["dialogue_history"][number:number + 1]
    if not turns or not {"input", "output", "output_ids"} <= turns[0].keys():
        raise InputError(f"{path}: task {trajectory['task_id']}, sample {trajectory['sample']}: turn {number}, of "
                         'which its "branch" speaks, is no turn that the agent sampled')


def mean_return(trajectories, domain):
    return statistics.mean([float(domain.outcome(trajectory)) for trajectory in trajectories])


def decision_point(actions, number):
    """The DecisionPoint of a state, which is before the turn of this number; actions: {ids: dialogues with it}."""
    firsts = [dialogues[0] for dialogues in actions.values()]
    turns = [dialogue["dialogue_history"][number] for dialogue in firsts]
    return common.DecisionPoint(
        prompt=turns[0]["input"],
        task=firsts[0]["task"],
        history=firsts[0]["dialogue_history"][:number],
        actions=[turn["output_ids"] for turn in turns],
        texts=[turn["content"] for turn in turns])


def pair_accuracy(critic, trajectories, pairs, device):
    """The share of pairs whose better trajectory has the higher score by a critic (common.load_critic)."""
    tokenizer = load_tokenizer(critic["folder"])
    examples = common.trajectory_examples(trajectories, pairs, tokenizer, critic["privileged"])
    ref_examples = common.reference_examples(critic, examples, trajectories, pairs, tokenizer)
    ref_values = common.example_outputs(critic["ref_scorer"], ref_examples, MAX_TOKENS, device)
    return common.pair_accuracy(critic["scorer"], examples, ref_values, critic, MAX_TOKENS, device)


def return_correlation(critic, branches, device):
    """{"rank_correlation", "ci95", "num_states"} of a critic's scores of actions and their returns (read_branches)."""
    tokenizer = load_tokenizer(critic["folder"])
    points = [point for point, _ in branches]
    scores = common.score_actions(critic, tokenizer, points, MAX_TOKENS, device)
    correlations = {}                                                # {task_id: those of its states}
    for (point, returns), point_scores in zip(branches, scores):
        correlation = statistics.rank_correlation(point_scores, returns)
        correlations.setdefault(task_id(point.task), []).append(correlation)
    mean, interval = statistics.mean_of_groups(correlations)
    return {"rank_correlation": mean, "ci95": interval, "num_states": len(points)}


def critic_lines(measures):
    """The table of --critics."""
    headings = ["critic", "pair accuracy", "pairs"]
    if statistics.has_any(measures, "rank_correlation"):
        headings += ["rank correlation", "95 %", "states"]
    rows = []
    for name, measure in measures.items():
        row = [name, f"{measure['pair_accuracy']:.3f}", str(measure["num_pairs"])]
        if "rank_correlation" in measure:
            row.append(f"{measure['rank_correlation']:.3f}")
            row.append(statistics.interval(measure["ci95"], "+"))
            row.append(str(measure["num_states"]))
        rows.append(row)
    return [*statistics.aligned(headings, rows),
            "one training run of each critic: the intervals leave other seeds out"]


def reward_pairs(trajectories, path):
    """common.trajectory_pairs by the rewards that the file has; InputError where one is missing."""
    for trajectory in trajectories:
        if trajectory.get("reward") is None:
            raise InputError(f'{path}: task {trajectory["task_id"]}: no "reward"; score the file with 05_evaluate.py, '
                             "and take its scored/NAME.jsonl")
    return common.trajectory_pairs(trajectories, path)


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
    if args.returns and not args.critics:
        parser.error("--returns needs --critics")
    if args.reference and not args.critics:
        parser.error("--reference goes with --critics")
    return args


def main(argv=None):
    args = parse_args(argv)
    start(0)
    trajectories = common.read_trajectories(args.trajectories)
    domain = domain_of(trajectories[0]["task"])
    if args.gates:
        check_gates(trajectories, domain, args.trajectories)
    critics = read_critics(args.critics, domain, args.reference)
    pairs, branches = [], []
    if critics:
        pairs = reward_pairs(trajectories, args.trajectories)
    if args.returns:
        branches = read_branches(args.returns, domain, critics)
    out = pathlib.Path(args.out)
    folders = [critic["folder"] for critic in critics.values()]
    inputs = [args.trajectories, args.returns, args.gates, *folders]
    if is_done(vars(args), out, inputs, folder=True):
        return
    begin_output(vars(args), out, inputs, folder=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    if args.gates:
        gates = measure_gates(trajectories, domain, args.gates, device)
        write_json(out / "gates.json", gates)
        say(*gate_lines(gates, args.gates))
    measures = {}
    for name, critic in critics.items():
        if line := common.reference_line(critic):
            say(line)
        critic = common.load_critic(critic, common.load_whole(device))
        measures[name] = {"pair_accuracy": pair_accuracy(critic, trajectories, pairs, device), "num_pairs": len(pairs)}
        if branches:
            measures[name] |= return_correlation(critic, branches, device)
    if critics:
        write_json(out / "critics.json", measures)
        say(*critic_lines(measures))
    (out / "COMPLETED").touch()
    say(f"writes {out}")


if __name__ == "__main__":
    run_stage(main, ColBenchError)
