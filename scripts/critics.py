"""Measures, on dialogues of held-out tasks, whether a base model reads c, or how well a critic (03) ranks turns.

--gates   reads dialogues (02), writes gates.json: the mean summed log-probability of a turn under a model, without c
          and with c in front of the dialogue. The turns are the logged questions by kind and, as a first turn, the
          right answer and that of another task of the family.
--critic  reads dialogues of 02 --branch, writes ranks.json: the rank correlation (Spearman) of the critic's scores of
          actions with the mean return of the dialogues that continue from them. It is a mean over a task's states, then
          over tasks, with its 95 % interval by bootstrap over tasks.

    python scripts/critics.py --trajectories out/base.jsonl --gates models/tiny --out out/gates
    python scripts/critics.py --trajectories out/branches.jsonl --critic out/critic --out out/ranks
"""
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import common  # noqa: E402  from the repository, whatever the working directory
from colbench import domain_of, task_id  # noqa: E402
from lib import data, statistics  # noqa: E402
from lib.flags import add_reference, argument_parser, text_flag  # noqa: E402
from lib.load import load_model  # noqa: E402
from lib.logps import action_outputs, ActionModel, load_whole
from lib.runtime import InputError, run_stage, say, start, write_json  # noqa: E402
from lib.tokens import encode, end_of_turn, prompt_text, tokenizer_name  # noqa: E402

MAX_TOKENS = 16384               # of a batch, and of a dialogue
MAX_DIALOGUES = 200              # used for the gates


# ---------------------------------------------------------------------------------------------------------------------
# gates: does a model read c?

def probes_of(trajectory, other_task, domain):
    """Yield (kind, the turns before it, its text) of the turns to measure: the logged questions, the right answer at
    once, and another task's answer at once."""
    task, history = trajectory["task"], trajectory["dialogue_history"]
    for place, kind in zip(statistics.agent_places(history), statistics.turn_kinds(task, history, domain)):
        if "answer" not in kind:
            yield kind, history[:place], history[place]["content"]
    yield "right answer at once", history[:1], domain.answer_message(task)
    if other_task["ground_truth"] != task["ground_truth"]:
        yield "wrong answer at once", history[:1], domain.answer_message(other_task)


def measure_gates(trajectories, domain, model_name, device):
    """{kind of turn: {"n", "without_c", "with_c": mean log-probabilities}} under a model."""
    model, tokenizer = load_model(model_name, device)
    kinds, items, items_with_c = [], [], []                          # each of a dialogue with one agent turn
    first_of_family = {}
    for trajectory in trajectories[:MAX_DIALOGUES]:
        task = trajectory["task"]
        other_task = first_of_family.setdefault(task.get("family"), task)
        for kind, history, text in probes_of(trajectory, other_task, domain):
            prompt = prompt_text(tokenizer, trajectory, history)
            turn = prompt, encode(tokenizer, text) + [end_of_turn(tokenizer)]
            kinds.append(kind)
            items.append(common.trajectory_sequences(tokenizer, [turn]))
            items_with_c.append(common.trajectory_sequences(tokenizer, [turn], task))
    action_model = ActionModel(model)
    logps = action_outputs(action_model, items, MAX_TOKENS)                                  # (1,) each
    logps_with_c = action_outputs(action_model, items_with_c, MAX_TOKENS)
    by_kind = {}
    for kind, without_c, with_c in zip(kinds, logps, logps_with_c):
        by_kind.setdefault(kind, []).append((without_c.item(), with_c.item()))
    gates = {}
    for kind, pairs in sorted(by_kind.items()):
        without_c, with_c = map(statistics.mean, zip(*pairs))
        gates[kind] = {"n": len(pairs), "without_c": without_c, "with_c": with_c}
    return gates


# ---------------------------------------------------------------------------------------------------------------------
# a critic: rank correlation with Monte-Carlo returns

def branched_states(path, dialogues, domain):
    """(States, and for each state the mean return of each action) from a file of 02 --branch.

    States whose actions have equal returns are dropped."""
    states = {}                                        # {(task_id, run, sample, turn): (a dialogue, {ids: returns})}
    for dialogue in dialogues:
        if "branch" not in dialogue:
            raise InputError(f"{path}: not made by 02_rollout.py --branch")
        place = dialogue["branch"]["turn"]
        state = dialogue["task_id"], dialogue["branch"].get("run"), dialogue["branch"]["sample"], place
        ids = tuple(dialogue["dialogue_history"][place]["output_ids"])
        _, returns_of = states.setdefault(state, (dialogue, {}))
        returns_of.setdefault(ids, []).append(float(domain.eval_score(dialogue)))
    points, returns = [], []
    for (*_, place), (dialogue, returns_of) in states.items():
        action_returns = list(map(statistics.mean, returns_of.values()))
        if len(set(action_returns)) > 1:
            history = dialogue["dialogue_history"]
            prompt = history[place]["input"]
            points.append(common.State(prompt, dialogue["task"], history[:place], list(returns_of), []))
            returns.append(action_returns)
    if not points:
        raise InputError(f"{path}: no state whose candidates differ in return; raise --branch or --samples of 02")
    return points, returns


def return_correlation(points, returns, scores):
    """{"rank_correlation", "num_states", and "ci95" unless all tasks have the same mean} of actions' scores with their
    returns, each a list for each state."""
    correlations = {}                                                # {task_id: correlations of its states}
    for point, point_returns, point_scores in zip(points, returns, scores):
        correlation = statistics.rank_correlation(point_scores, point_returns)
        correlations.setdefault(task_id(point.task), []).append(correlation)
    means = [statistics.mean(values) for values in correlations.values()]
    measured = {"rank_correlation": statistics.mean(means), "num_states": len(points)}
    if max(means) - min(means) > 1e-9:                               # else the interval has no width
        measured["ci95"] = statistics.bootstrap_interval(means)
    return measured


def measure_ranks(args, trajectories, domain, device):
    """return_correlation of a critic on dialogues of 02 --branch."""
    critic = common.read_critic(args.critic, domain, args.reference_sees_c)
    common.must_read_text(critic)
    if tokenizer_name(critic.tokenizer) != trajectories[0].get("tokenizer"):
        raise InputError(f"{args.trajectories}: the agent's tokenizer is not the one of {args.critic}")
    points, returns = branched_states(args.trajectories, trajectories, domain)
    say(critic.describe())
    critic.load(load_whole(device), MAX_TOKENS)
    scores = critic.score_actions(points)
    return return_correlation(points, returns, scores)


# ---------------------------------------------------------------------------------------------------------------------

def gate_lines(gates, model_name):
    lines = [f"{model_name}: log-probability of a turn, in at most {MAX_DIALOGUES} dialogues",
             "                            n  without c     with c"]
    for kind, gate in gates.items():
        lines.append("{:22} {n:6,} {without_c:10.2f} {with_c:10.2f}".format(kind, **gate))
    if "wrong answer at once" not in gates:
        lines.append("no wrong answer at once: no family of these tasks has two different solutions")
    return lines


def parse_args(argv=None):
    parser = argument_parser(__doc__)
    parser.add_argument("--trajectories", type=text_flag, required=True,
                        help="dialogues of held-out tasks (02); --critic: of 02 --branch")
    parser.add_argument("--out", type=text_flag, required=True, help="folder to write into")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--gates", type=text_flag, metavar="MODEL", help="the model whose gates are measured")
    what.add_argument("--critic", type=text_flag, metavar="DIR", help="the critic (03) whose ranks are measured")
    add_reference(parser)
    return parser.parse_args(argv)


def main(argv=None):
    args = parse_args(argv)
    device = start(0).device
    out = pathlib.Path(args.out)
    trajectories = data.read_trajectories(args.trajectories)
    domain = domain_of(trajectories[0]["task"])
    if args.gates and any(domain.turn_kind(row["task"], [], "") is None for row in trajectories):
        raise InputError(f"{args.trajectories}: --gates needs tasks whose domain knows kinds of turns (turn_kind), as "
                         "those of 01")
    if args.gates:
        name, measured = "gates.json", measure_gates(trajectories, domain, args.gates, device)
        lines = gate_lines(measured, args.gates)
    else:
        name, measured = "ranks.json", measure_ranks(args, trajectories, domain, device)
        correlation, interval = measured["rank_correlation"], statistics.cell_of(measured, "ci95")
        lines = [f"{args.critic}: rank correlation {correlation:.3f} {interval}, {measured['num_states']} states"]
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / name, measured)
    say(*lines, f"writes {out / name}")


if __name__ == "__main__":
    run_stage(main)
