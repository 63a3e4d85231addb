"""The layout: who may import whom, how plain a stage is; a domain that is only defined here goes through all five
stages; a copied and changed stage needs no registration."""
import ast
import json
import re

import pytest

import colbench
import toy_domain
from conftest import BASE, call, read, refused, ROOT, stage, succeed

STAGES = sorted(ROOT.glob("0*.py"))
FORKS = [ROOT / "examples" / f"{name}.py" for name in ("answers", "distill", "gain", "grpo")]
# Tasks and trajectories, and what their agents read, of all domains
KNOW_DOMAINS = [ROOT / "lib" / name for name in ("data.py", "tokens.py")]
COMPREHENSIONS = ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp


def arrows(path):
    """Which rooms of the house a file imports: "colbench", "lib", "common", "stage", or a domain of colbench."""
    names, rooms = [], set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            names += [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
    for name in names:
        first, second = f"{name}.".split(".")[:2]
        if first == "colbench" and second in colbench.DOMAINS:
            rooms.add("domain")
        elif first in ("colbench", "lib", "common") and second != "schema":            # lib may import this one, too
            rooms.add(first)
        elif first[:1] == "0" or (ROOT / f"{first}.py").exists():
            rooms.add("stage")
    return rooms


@pytest.mark.parametrize("files, allowed", [
    (STAGES, {"common", "colbench", "lib"}),
    (FORKS, {"common", "colbench", "lib", "stage"}),
    ([ROOT / "common.py"], {"colbench", "lib"}),
    (sorted(set((ROOT / "lib").rglob("*.py")) - set(KNOW_DOMAINS)), {"lib"}),
    (KNOW_DOMAINS, {"colbench", "lib"}),
    (sorted((ROOT / "colbench").glob("*.py")), {"colbench", "domain"})])
def test_who_imports_whom(files, allowed):
    assert len(files) >= 1
    assert {path.name: arrows(path) - allowed for path in files if arrows(path) - allowed} == {}


def nested_comprehensions(text):
    """The lines of comprehensions that hold another one."""
    return [node.lineno for node in ast.walk(ast.parse(text)) if isinstance(node, COMPREHENSIONS)
            and sum(isinstance(inner, COMPREHENSIONS) for inner in ast.walk(node)) > 1]


def test_stages_nest_no_comprehensions():
    for path in [*STAGES, ROOT / "common.py", *FORKS]:
        assert nested_comprehensions(path.read_text()) == [], path


def test_what_is_not_allowed_is_seen(tmp_path):
    (tmp_path / "a.py").write_text("def f():\n    from colbench import backend\n    import common\n"
                                   "    importlib.import_module('02_rollout')\n")
    assert arrows(tmp_path / "a.py") == {"domain", "common", "stage"}
    assert nested_comprehensions("def f(a):\n    return [[x for x in y] for y in a]\n") == [2]


def test_the_training_loops_of_03_and_04_differ_by_the_method():
    critic_loop, policy_loop = ([line.strip() for line in lines_of(path, "train")] for path in STAGES[2:4])
    assert [line for line in critic_loop if line and line in policy_loop][1:] == [
        "for step, batch_numbers in loop.steps():",
        "for micro, weights in training.rank_batches(batch_numbers, examples, job):",
        "micro_examples = [examples[i] for i in micro]",
        "batch = action_model.collate(items_of(micro_examples), job.run.device)",
        "loop.backward(terms, weights / num_terms)", "loop.update(step)"]
    for path in STAGES[2:4]:                                         # from the flags to the loop: a screen
        assert len(lines_of(path, "main")) <= 65 and len(lines_of(path, "train")) <= 50


def lines_of(path, name):
    """The lines of a function of a file."""
    text = path.read_text()
    [function] = [node for node in ast.parse(text).body if getattr(node, "name", None) == name]
    return text.splitlines()[function.lineno - 1:function.end_lineno]


def test_a_toy_domain_goes_through_all_stages(tmp_path, monkeypatch):
    monkeypatch.setitem(colbench.DOMAINS, "toy", toy_domain.Toy())
    tasks, demos, off, played = (tmp_path / f"{name}.jsonl" for name in ("tasks", "demos", "off", "played"))
    model, critic, sweet, report = (tmp_path / name for name in ("model", "critic", "sweet", "report"))
    train = ["--lr", 1e-3, "--epochs", 1, "--micro-batch-size", 16]
    call(1, "--domain", "toy", "--num-tasks", 20, "--out", tasks)
    for seed, out in ((0, demos), (1, off)):
        call(2, "--tasks", tasks, "--agent", "script", "--samples", 4, "--max-rounds", 3, "--out", out, "--seed", seed)
    assert len(rows := read(demos)) == 80 and {row["reward"] for row in rows} == {0.0, 0.5, 1.0}
    call(4, "--method", "sft", "--model", "tiny", "--trajectories", demos, "--out", model, *train)
    call(3, "--trajectories", off, "--model", model, "--held-out-frac", 0.3, "--out", critic, *train)
    for method, more in (("rft", []), ("mtdpo", []),
                         ("sweet", ["--critic", critic, "--num-candidates", 4, "--max-new-tokens", 8])):
        call(4, "--method", method, "--model", model, "--trajectories", off, "--out", tmp_path / method, *train, *more)
    call(2, "--tasks", tasks, "--agent", sweet, "--best-of", 2, "--critic", critic, "--max-rounds", 3,
         "--max-new-tokens", 8, "--out", played)
    printed = call(5, f"script={off}", f"sweet={played}", "--baseline", "script", "--critic", critic, "--out", report)
    metrics = json.loads((report / "metrics.json").read_text())
    assert metrics["script"]["n"] == 80 and metrics["sweet"]["n"] == 20 and metrics["sweet"]["judge"] == "equality"
    assert metrics["script"]["mean_reward"] == sum(row["reward"] for row in read(off)) / 80
    assert re.search(r"\nsweet +[\d,]+ pairs of turns +\d+ +-\n", printed)
    assert re.search(r"\ncritic +[\d,]+ pairs of dialogues +\d+ +[01]\.\d+ \(\d+ pairs\)\n", printed)
    assert "script: the critic was trained on these dialogues" in printed
    assert "sweet: the critic was trained" not in printed
    page = (report / "report.html").read_text()
    assert "Guess what I like" in page and "share of the answers whose colour is right" in page
    assert "The colour that this person needs" in stage(3).common.solution_text(rows[0]["task"])
    assert toy_domain.Toy().agent_system(3).endswith('in 3 rounds. Do not answer in JSON, such as {"colour": "red"}.')


class Unfinished(colbench.Domain):
    NOUN, FAMILIES, AGENT_SYSTEM, Environment = "thing", (), "", colbench.Environment

    def owns(self, task):
        return False


@pytest.mark.parametrize("domain, line", [
    (Unfinished(), "the domain Unfinished must define check_task, make_task, answer_of (colbench/domain.py)"),
    (type("Numbered", (toy_domain.Toy,), {"make_task": lambda self, rng, family, told, accept: accept("car 1")})(),
     "\"task_id\" 'car 1' is not hexadecimal; colbench.task_id makes one")])
def test_a_mistake_in_a_domain_is_one_line(domain, line, tmp_path, monkeypatch):
    monkeypatch.setitem(colbench.DOMAINS, "toy", domain)
    assert refused(1, "--domain", "toy", "--num-tasks", 2, "--out", tmp_path / "tasks.jsonl") == line
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("reward", [2, -1.5, float("nan"), None, "1"])
def test_a_wrong_reward_is_one_line(reward, tmp_path, monkeypatch):
    async def verdicts(self, pairs, explain):
        return [{"reward": reward} for _ in pairs]

    monkeypatch.setitem(colbench.DOMAINS, "toy", toy_domain.Toy())
    monkeypatch.setattr(toy_domain.ToyEnvironment, "verdicts", verdicts)
    call(1, "--domain", "toy", "--num-tasks", 2, "--out", tmp_path / "tasks.jsonl")
    line = refused(2, "--tasks", tmp_path / "tasks.jsonl", "--agent", "script", "--out", tmp_path / "out.jsonl")
    assert line.startswith('ToyEnvironment.verdicts: "reward" is ')


def test_a_copied_stage_with_another_loss_begins_with_that_loss(tmp_path, data):
    """Where all scores are 0; 04's own is log 2 there (test_training.py)."""
    source, old = (ROOT / "04_train_policy.py").read_text(), "-F.logsigmoid(chosen - rejected)"
    assert source.count(old) == 1
    fork = ROOT / "hinge_policy_of_a_test.py"                        # beside common.py, as a user's copy
    fork.write_text(source.replace(old, "F.relu(1 - (chosen - rejected))"))
    try:
        succeed(fork.name, "--method", "mtdpo", "--model", BASE, "--trajectories", data / "demos.jsonl", "--lr", 1e-3,
                "--num-trajectories", 12, "--max-steps", 2, "--nll-coef", 0, "--out", tmp_path)
    finally:
        fork.unlink()
    losses = [row["loss"] for row in read(tmp_path / "metrics.jsonl")]
    assert losses[0] == pytest.approx(1, abs=1e-5) != losses[1]
