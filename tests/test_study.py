"""run.sh, scripts/study.sh and scripts/tune.sh with a stand-in for the interpreter: every command's flags are parsed by
its stage, every input is there before it is used, and nothing is made twice."""
import ast
import importlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from conftest import checkout_with_forks, ROOT, stage

# A study starts hundreds of commands: json and pathlib would take twice as long as all else of the stand-in.
STAND_IN = f'#!{sys.executable} -IS\n' + '''
import fcntl, os, sys
words = sys.argv[4:] if sys.argv[1] == "--standalone" else sys.argv[1:]        # torchrun's own flags
if words[0] == "-":                                                            # tune.sh writes its CSV
    sys.exit()
if os.environ.get("FAIL") in words:
    sys.exit("failed as the test wants")
if words[0] == "-m":                                                           # a fork of 04, "examples.grpo"
    words = words[1:]
values = dict(zip(words, words[1:]))
flags = "--trajectories", "--tasks", "--critic", "--candidates", "--agent", "--model", "--returns", "--gates"
inputs = [values.get(name) for name in flags]
if words[0].startswith(("05", "scripts/critics")):
    inputs += [path for word in words if "=" in word for path in word.split("=")[1].split(",")]
no_files = None, "oracle", "oracle-patient", "untrained", "script", "script-informed", "smollm2"
missing = [path for path in inputs if path not in no_files and not os.path.exists(path.removeprefix("judge:"))]
out = values["--out"]
with open("commands", "a") as log:
    fcntl.flock(log, fcntl.LOCK_EX)
    log.write(ascii({"words": words, "missing": missing, "there": os.path.exists(out)}) + "\\n")
os.makedirs(os.path.dirname(out), exist_ok=True)
if words[0].startswith(("03", "04", "05", "scripts/critics", "examples")):
    os.makedirs(out, exist_ok=True)
    for name in ("candidates.jsonl", "COMPLETED"):
        open(f"{out}/{name}", "a").close()
else:
    open(out, "a").close()
print("success 0.500 |")
'''


POLICY = "04", "examples."                                           # how the names of 04 and of its forks begin


def program_of(script):
    """The module of a stage, of a fork ("examples.grpo"), or of scripts/critics.py."""
    if script == "scripts/critics.py":
        return importlib.import_module("scripts.critics")
    if script.startswith("examples."):
        return importlib.import_module(script)
    return stage(int(script[:2]))


@pytest.fixture
def call(tmp_path):
    """Calls a script of ours in a copy of the checkout; see calls_in."""
    return calls_in(tmp_path)


def calls_in(tmp_path):
    """Makes a copy of the checkout whose interpreter is the stand-in. Returns a function that calls a script of ours in
    it and returns what the script started."""
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    for name in ("python", "torchrun"):
        (tmp_path / ".venv" / "bin" / name).write_text(STAND_IN)
        (tmp_path / ".venv" / "bin" / name).chmod(0o755)
    for name in ("tiny", "tiny_pages", "tiny_sql"):
        (tmp_path / "models" / name).mkdir(parents=True)
    (tmp_path / "scripts").mkdir()
    for name in ("run.sh", "scripts/chain.sh", "scripts/study.sh", "scripts/tune.sh", "scripts/real.sh",
                 "scripts/rounds.sh", "scripts/efficiency.sh", "scripts/entry.sh"):
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    (tmp_path / "scripts" / "setup.sh").write_text(
        (ROOT / "scripts" / "setup.sh").read_text() + "\nsetup_environment() { :; }\nsetup_browser() { :; }\n")

    def start(*command, **environment):
        (tmp_path / "commands").unlink(missing_ok=True)
        process = subprocess.run(["bash", *command], cwd=tmp_path, text=True, capture_output=True, timeout=120,
                                 env={"PATH": os.environ["PATH"], **environment})
        assert process.returncode == 0, process.stdout + process.stderr
        commands = [ast.literal_eval(line) for line in (tmp_path / "commands").read_text().splitlines()]
        for command in commands:
            assert not command["missing"], command
            program_of(command["words"][0]).parse_args(command["words"][1:])
        return commands
    return start


def outputs(commands):
    return [command["words"][command["words"].index("--out") + 1] for command in commands]


def comparisons(commands):
    """{folder of an evaluation: the words of its command}"""
    return {command["words"][command["words"].index("--out") + 1].removeprefix("out/study/"): command["words"]
            for command in commands if command["words"][0].startswith(("05", "scripts/critics"))}


@pytest.mark.parametrize("script", [["scripts/study.sh"], ["run.sh", "--study"]])
def test_the_study_makes_every_row_of_every_seed(call, script):
    commands = call(*script, "3", "4")
    made = outputs(commands)
    assert len(set(made)) == len(made) and not any(command["there"] for command in commands)
    for seed in (3, 4):
        for name in ("base", "rft", "mtdpo", "mtdpo-tokens", "sweet", "sweet-no-c", "sweet-no-norm", "sweet-regression",
                     "sweet-oracle", "sweet-oracle-patient", "sweet-value", "mtdpo-n200", "sweet-n800"):
            assert f"out/study/seed{seed}/{name}.jsonl" in made
    compared = {}                                                              # {folder: {name: its files}}
    for folder, words in comparisons(commands).items():
        files = dict(word.split("=") for word in words if "=" in word)
        assert "--baseline" not in words or words[words.index("--baseline") + 1] in files
        compared[folder] = files
    assert compared["rankings-3-4"].keys() == {"sweet", *(f"sweet-{name}" for name in (
        "oracle", "oracle-patient", "no-c", "no-norm", "regression", "value"))}
    assert compared["tokens-3-4"].keys() == {"mtdpo", "mtdpo-tokens", "sweet"}
    assert compared["chain-3-4"]["sweet"] == "out/study/seed3/sweet.jsonl,out/study/seed4/sweet.jsonl"
    assert compared["n200-3-4"].keys() == {"mtdpo-n200", "sweet-n200"}
    seeds = {command["words"][command["words"].index("--seed") + 1] for command in commands
             if "--seed" in command["words"]}
    assert seeds == {"3", "4", "1000"}                                         # 1000: the test tasks, the same for all


def test_the_study_compares_the_critics_of_its_first_seed(call):
    commands = call("scripts/study.sh", "3", "4")
    words = comparisons(commands)["seed3/critics"]
    assert [word for word in words if "=" in word] == [
        "critic=out/study/seed3/critic",
        *(f"critic-{name}=out/study/seed3/critic-{name}" for name in ("no-c", "no-norm", "regression", "value"))]
    assert words[words.index("--trajectories") + 1] == "out/study/seed3/few/base.jsonl"
    [branches] = [command["words"] for command in commands if "--branch" in command["words"]]
    flags = dict(zip(branches, branches[1:]))
    assert flags["--tasks"] == "out/study/seed3/few/base.jsonl" and flags["--agent"] == "models/tiny"
    assert flags["--out"] == words[words.index("--returns") + 1]
    points = {word.split("=")[0] for word in comparisons(commands)["seed3/curves"] if "@" in word and "=" in word}
    assert points == {f"{name}@{n}" for n in (1, 4, 16) for name in (
        "critic", "critic-no-c", "critic-no-norm", "critic-regression", "critic-value", "oracle")} | {
            "judge@1", "judge@4"}


def test_a_study_of_the_chain_alone(call):
    commands = call("scripts/study.sh", "3", ROWS="")
    assert list(comparisons(commands)) == ["chain-3"]
    assert not any("oracle" in name or "few" in name for name in outputs(commands))


def test_rows_of_a_chain_that_failed_are_not_waited_for(call, tmp_path):
    environment = {"PATH": os.environ["PATH"], "ROWS": "oracle", "FAIL": "mtdpo"}
    process = subprocess.run(["bash", "scripts/study.sh", "3"], cwd=tmp_path, text=True, capture_output=True,
                             timeout=60, env=environment)
    assert process.returncode and "failed: mtdpo" in process.stderr
    assert "not played: oracle of seed 3, whose chain failed" in process.stderr
    words = comparisons(call("scripts/study.sh", "3", ROWS="oracle"))          # a second call plays it
    assert "rankings-3" in words


def test_the_chain_of_queries_and_its_study(call):
    commands = [command["words"] for command in call("run.sh", "--domain", "sql")]
    assert {command[command.index("--domain") + 1] for command in commands if "--domain" in command} == {"sql"}
    assert any("models/tiny_sql" in command for command in commands) and "--gates" in commands[-2]
    assert commands[-1][0] == "05_evaluate.py"
    assert not any("models/tiny" in command for command in commands)
    commands = call("run.sh", "--study", "--domain", "sql", "3", ROWS="oracle-patient no-c")
    assert {f"out/sql/study/seed3/{name}.jsonl" for name in ("base", "rft", "mtdpo", "sweet", "sweet-no-c",
                                                             "sweet-oracle-patient")} <= set(outputs(commands))


def test_the_chain_of_pages(call):
    commands = [command["words"] for command in call("run.sh", "--domain", "frontend")]
    assert {command[command.index("--domain") + 1] for command in commands if "--domain" in command} == {"frontend"}
    assert {"out/frontend/sweet", "out/frontend/mtdpo", "out/frontend/rft", "out/frontend/critic"} <= {
        command[command.index("--out") + 1] for command in commands}
    assert all("pixels" in command for command in commands if command[0][:2] in ("02", "05"))
    assert any("models/tiny_pages" in command for command in commands)
    assert not any("models/tiny" in command for command in commands)


@pytest.mark.parametrize("script", ["run.sh", "scripts/tune.sh", "scripts/make_tiny.sh"])
@pytest.mark.parametrize("flags", [["--domain"], ["--domain", "frontends"]])
def test_an_unknown_domain_is_refused(script, flags):
    process = subprocess.run(["bash", script, *flags], cwd=ROOT, text=True, capture_output=True, timeout=20)
    assert process.returncode == 2 and "must be backend, frontend or sql" in process.stderr and not process.stdout


def test_a_seed_is_a_number():
    process = subprocess.run(["bash", "run.sh", "--seed"], cwd=ROOT, text=True, capture_output=True, timeout=20)
    assert process.returncode == 2 and "seed '--seed': must be a number" in process.stderr and not process.stdout


@pytest.mark.parametrize("flags, number, test_tasks", [
    ([], 8, "out/test.jsonl"), (["--domain", "frontend"], 3, "out/frontend/test.jsonl"),
    (["--domain", "sql"], 3, "out/sql/test.jsonl")])
def test_every_method_is_searched_over_as_many_settings(call, flags, number, test_tasks):
    call("run.sh", *flags)
    commands = call("scripts/tune.sh", *flags)
    tried = [command["words"] for command in commands if command["words"][0].startswith("04") and "--max-steps" not in
             command["words"]]
    counts = {method: sum(method == words[words.index("--method") + 1] for words in tried)
              for method in ("rft", "mtdpo", "sweet")}
    assert set(counts.values()) == {number} and len(set(map(tuple, tried))) == 3 * number
    assert not any(test_tasks in command["words"] for command in commands)


FILES = "out", "critic", "candidates", "trajectories", "num_trajectories", "seed"


@pytest.mark.parametrize("flags", [[], ["--domain", "frontend"], ["--domain", "sql"]])
def test_the_search_tries_what_the_scripts_use(call, flags):
    """For each method one of the settings is that of the script, with all that is not searched. run.sh has 320
    dialogues of functions and queries, as the search of efficiency.sh, study.sh those of tune.sh."""
    def trained(commands):
        for command in commands:
            words = command["words"]
            if words[0].startswith("04") and "--max-steps" not in words:
                args = vars(stage(4).parse_args(words[1:]))
                yield {key: value for key, value in args.items() if key not in FILES}
    few = list(trained(call("scripts/efficiency.sh", *flags, SEARCH="1"))) if "frontend" not in flags else []
    of_run_sh = list(trained(call("run.sh", *flags)))                # tune.sh reads its dialogues
    many = list(trained(call("scripts/tune.sh", *flags)))
    of_study = list(trained(call("scripts/study.sh", *flags, "0", ROWS=""))) if few else []
    for used, tried in ((of_run_sh, few or many), (of_study, many)):
        assert {args["method"] for args in used} == ({"sweet", "mtdpo", "rft"} if used else set())
        assert [args for args in used if args not in tried] == []


def test_other_critics_are_searched_over_as_many_settings(call):
    call("run.sh")
    commands = [command["words"] for command in call("scripts/tune.sh", KINDS="no-c regression")]
    critics = [words for words in commands if words[0].startswith("03")]
    for flag in ("--no-privileged", "regression"):
        assert sorted(flag in words for words in critics) == [False, False, True, True]
    tried = [words[words.index("--critic") + 1] for words in commands
             if words[0].startswith("04") and "--max-steps" not in words]
    assert {critic: tried.count(critic) for critic in tried} == {
        f"out/tune/critic-{kind}-{beta}": 4 for kind in ("no-c", "regression") for beta in ("0.1", "1")}


def rounds_of(commands, stage, name):
    """{round: the flags of a stage's command, by seed 3}"""
    found = {}
    for words in commands:
        out = words[words.index("--out") + 1]
        if words[0].startswith(stage) and f"out/rounds/seed3/{name}/" in out:
            found[int(out.split("/")[4])] = dict(zip(words, words[1:]))
    return found


def words_of(commands):
    return [command["words"] for command in commands]


@pytest.fixture(scope="module")
def three_rounds(tmp_path_factory):
    """The commands of three rounds of SWEET by two seeds."""
    return words_of(calls_in(tmp_path_factory.mktemp("rounds"))("scripts/rounds.sh", "sweet", "3", "3", "4"))


def test_rounds_make_nothing_twice(three_rounds):
    made = [words[words.index("--out") + 1] for words in three_rounds]
    assert len(set(made)) == len(made)


def test_each_round_trains_the_agent_of_the_one_before(three_rounds):
    policies, critics = rounds_of(three_rounds, POLICY, "sweet"), rounds_of(three_rounds, "03", "sweet")
    assert [policies[n]["--model"] for n in (1, 2, 3)] == [critics[n]["--model"] for n in (1, 2, 3)] == [
        "models/tiny", "out/rounds/seed3/sweet/1/agent", "out/rounds/seed3/sweet/2/agent"]
    assert [policies[n]["--seed"] for n in (1, 2, 3)] == [critics[n]["--seed"] for n in (1, 2, 3)] == [
        "3", "1003", "2003"]                                                   # or 04 draws the same dialogues again
    assert all(policies[n]["--critic"] == f"out/rounds/seed3/sweet/{n}/critic" for n in policies)


def test_critics_of_rounds_read_all_dialogues_and_policies_those_of_their_round(three_rounds):
    policies, critics = rounds_of(three_rounds, POLICY, "sweet"), rounds_of(three_rounds, "03", "sweet")
    assert all(policies[n]["--trajectories"] == f"out/rounds/seed3/sweet/{n}/offline.jsonl" for n in policies)
    assert all(critics[n]["--trajectories"] == f"out/rounds/seed3/sweet/{n}/all.jsonl" for n in critics)


def test_rounds_of_sweet_take_all_turns_and_rank_as_the_published_code(three_rounds):
    policies, critics = rounds_of(three_rounds, POLICY, "sweet"), rounds_of(three_rounds, "03", "sweet")
    assert [policies[n]["--data-frac"] for n in (1, 2, 3)] == ["1", "1", "1"]
    assert [policies[n]["--reference"] for n in (1, 2, 3)] == ["blind", "blind", "blind"]
    assert [policies[n]["--lr"] for n in (1, 2, 3)] == ["3e-5", "1e-5", "1e-5"]
    assert not any("--reference" in critics[n] for n in critics)


def test_rounds_with_other_references(call):
    commands = words_of(call("scripts/rounds.sh", "printed,blind", "2", "3"))
    for name, ranked, trained in (("printed", "informed", None), ("blind", "blind", "blind")):
        policies, critics = rounds_of(commands, POLICY, name), rounds_of(commands, "03", name)
        assert [policies[n]["--reference"] for n in (1, 2)] == [ranked] * 2      # the last one counts
        assert [critics[n].get("--reference") for n in (1, 2)] == [trained] * 2
        assert [policies[n]["--lr"] for n in (1, 2)] == ["3e-5", "1e-5"]


def test_each_round_plays_its_own_tasks_by_the_agent_of_the_one_before(three_rounds):
    played = [dict(zip(words, words[1:])) for words in three_rounds if words[0].startswith("02")]
    offline = {flags["--seed"]: flags["--agent"] for flags in played if "--samples" in flags
               and flags["--samples"] == "4" and "seed3" in flags["--out"]}
    assert offline == {"3": "models/tiny", "1003": "out/rounds/seed3/sweet/1/agent",
                       "2003": "out/rounds/seed3/sweet/2/agent"}
    assert {flags["--tasks"] for flags in played if "seed3" in flags["--out"] and "offline" in flags["--out"]} == {
        f"out/rounds/seed3/train-{n}.jsonl" for n in (1, 2, 3)}


def test_the_report_of_rounds_compares_all_of_them(three_rounds):
    assert {word.split("=")[0] for word in three_rounds[-1] if "=" in word} == {"sweet@1", "sweet@2", "sweet@3"}


def test_a_second_call_of_rounds_shares_dialogues_and_report_with_the_first(call):
    call("scripts/rounds.sh", "sweet", "2", "3")
    flags = "--beta 0.5 --model models/tiny"                                 # the last --model counts
    commands = words_of(call("scripts/rounds.sh", "grpo-critic", "2", "3", NAME="credit", CRITIC_DATA="new",
                             CRITIC_FLAGS=flags))
    policies, critics = rounds_of(commands, POLICY, "credit"), rounds_of(commands, "03", "credit")
    assert critics[2]["--trajectories"] == "out/rounds/seed3/credit/2/offline.jsonl"
    assert [words for words in commands if words[0].startswith("03")][-1].count("--model") == 2
    assert critics[2]["--beta"] == "0.5" and policies[2].get("--beta") != "0.5"
    assert policies[2]["--method"] == "grpo" and critics[2]["--model"] == "models/tiny"
    assert {words[0] for words in commands if words[0].startswith(POLICY)} == {"examples.grpo"}
    # the dialogues of round 1 are shared (02 sees that they are there); what an earlier call played is in the report
    [shared] = [words for words in commands if words[-1] == "out/rounds/seed3/offline.jsonl"]
    assert after(shared, "--tasks") == "out/rounds/seed3/train-1.jsonl"
    names = {word.split("=")[0] for word in commands[-1] if "=" in word}
    assert names == {"credit@1", "credit@2", "sweet@1", "sweet@2"}


def test_an_agent_of_rounds_is_played_with_other_budgets_of_rounds(call):
    commands = words_of(call("scripts/rounds.sh", "mtdpo", "1", "3", NAME="longer", POLICY_FLAGS="--epochs 3",
                             BUDGETS="4 6"))
    assert [dict(zip(words, words[1:]))["--agent"] for words in commands if words[0].startswith("02")
            and words[-1].endswith(("in-4.jsonl", "in-6.jsonl"))] == ["out/rounds/seed3/longer/1/agent"] * 2
    assert {"longer-in-4@1", "longer-in-6@1"} < {word.split("=")[0] for word in commands[-1]}
    assert rounds_of(commands, POLICY, "longer")[1]["--epochs"] == "3" and not rounds_of(commands, "03", "longer")


def test_a_second_call_of_rounds_gives_every_size_to_its_stages(call):
    """They refuse what an earlier call made with other sizes."""
    call("scripts/rounds.sh", "mtdpo", "1", "3")
    commands = words_of(call("scripts/rounds.sh", "mtdpo", "1", "3", TEST_TASKS="20", TRAIN_TASKS="7"))
    numbers = {after(words, "--split"): after(words, "--num-tasks") for words in commands if words[0].startswith("01")}
    assert numbers == {"test": "20", "train": "7"}


def test_rows_of_a_table_have_the_columns_of_its_head(tmp_path):
    numbers = {"success_rate": 0.5, "ci95": [0.4, 0.6], "costs": {"trained_tokens": 1, "generated_tokens": 2,
                                                                  "wall_s": 60}}
    names = "mtdpo@2", "mtdpo_1e-4@2", "mtdpo-in-4@2", "rft_1e-3_-_-_2"
    (tmp_path / "metrics.json").write_text(json.dumps(dict.fromkeys(names, numbers)))
    tables = []
    for first in ("method,lr,round", "method,lr,beta,nll_coef,epochs"):
        table = subprocess.run(["bash", "-c", f". scripts/chain.sh; py={sys.executable}; "
                                f"grid_table {tmp_path}/metrics.json {first}"], cwd=ROOT, text=True,
                               capture_output=True)
        tables.append(table.stdout.splitlines())
    rest = "0.500,0.400,0.600,1,2,1.0"
    assert tables[0][:4] == ["method,lr,round,success,low,high,trained_tokens,generated_tokens,minutes",
                             f"mtdpo,,2,{rest}", f"mtdpo,1e-4,2,{rest}", f"mtdpo-in-4,,2,{rest}"]
    assert tables[1][4] == f"rft,1e-3,,,2,{rest}"


def test_rounds_of_multi_turn_dpo_have_its_rates_and_are_their_own_baseline(call):
    commands = words_of(call("scripts/rounds.sh", "mtdpo", "2", "3"))
    assert [rounds_of(commands, POLICY, "mtdpo")[n]["--lr"] for n in (1, 2)] == ["3e-4", "1e-4"]
    assert commands[-1][commands[-1].index("--baseline") + 1] == "mtdpo@2"


def test_rounds_with_several_methods_and_rates(call):
    commands = [command["words"] for command in call("scripts/rounds.sh", "grpo,grpo-critic", "2", "3",
                                                     SPLIT="validation", RATES="1e-4 1e-3", LATER_FLAGS="")]
    tried = [(words[words.index("--out") + 1], words[-1]) for words in commands if words[0].startswith(POLICY)]
    assert sorted(tried) == sorted(
        (f"out/rounds-validation/seed3/{method}_{rate}/{n}/agent", rate)
        for method in ("grpo", "grpo-critic") for rate in ("1e-4", "1e-3") for n in (1, 2))
    assert not any("test" in word for words in commands if words[0].startswith("01") for word in words)
    assert {word.split("=")[0] for word in commands[-1] if "=" in word} == {
        f"{method}_{rate}@{n}" for method in ("grpo", "grpo-critic") for rate in ("1e-4", "1e-3") for n in (1, 2)}


def test_rounds_of_methods_that_are_forks_start_the_forks(call):
    commands = [command["words"] for command in call("scripts/rounds.sh", "sweet,mtdpo,rft,grpo,grpo-critic,distill",
                                                     "1", "3")]
    programs = {words[words.index("--out") + 1].split("/")[3]: (words[0], words[words.index("--method") + 1])
                for words in commands if words[0].startswith(POLICY)}
    assert programs == {
        "sweet": ("04_train_policy.py", "sweet"), "mtdpo": ("04_train_policy.py", "mtdpo"),
        "rft": ("04_train_policy.py", "rft"), "grpo": ("examples.grpo", "grpo"),
        "grpo-critic": ("examples.grpo", "grpo"), "distill": ("examples.distill", "distill")}


def test_rounds_of_queries(call):
    commands = [command["words"] for command in call("scripts/rounds.sh", "--domain", "sql", "sweet", "2", "3")]
    made = [dict(zip(words, words[1:])) for words in commands]
    assert all(flags["--out"].startswith("out/sql/rounds/") for flags in made)
    tasks = [flags for words, flags in zip(commands, made) if words[0].startswith("01")]
    assert [(flags["--domain"], flags["--split"], flags["--num-tasks"], flags["--seed"]) for flags in tasks] == [
        ("sql", "test", "300", "1000"), ("sql", "train", "80", "3"), ("sql", "train", "80", "1003")]
    assert [flags["--model"] for words, flags in zip(commands, made) if words[0].startswith("04")] == [
        "models/tiny_sql", "out/sql/rounds/seed3/sweet/1/agent"]


def test_rounds_need_a_method_and_a_number():
    for words in ([], ["sweet"], ["sweets", "2"], ["sweet", "0"], ["sweet,", "2"], ["--domain", "sql", "sweet"]):
        process = subprocess.run(["bash", "scripts/rounds.sh", *words], cwd=ROOT, text=True, capture_output=True,
                                 timeout=60)
        assert process.returncode == 2 and process.stderr.startswith("error: bash scripts/rounds.sh METHOD[,METHOD…] R")
    process = subprocess.run(["bash", "scripts/rounds.sh", "--domain", "frontend", "sweet", "2"], cwd=ROOT, text=True,
                             capture_output=True, timeout=60)
    assert process.returncode == 2 and process.stderr.startswith("error: --domain frontend: ")
    for name, value, methods in (("CRITIC_DATA", "ALL", "sweet"), ("SPLIT", "train", "sweet"), ("NAME", "a_b", "sweet"),
                                 ("NAME", "longer", "sweet,mtdpo")):
        process = subprocess.run(["bash", "scripts/rounds.sh", methods, "2"], cwd=ROOT, text=True, capture_output=True,
                                 timeout=60, env={"PATH": os.environ["PATH"], name: value})
        assert process.returncode == 2 and process.stderr.startswith("error:") and name in process.stderr


def test_the_chain_of_real_weights(call, tmp_path):
    commands = [command["words"] for command in call("scripts/real.sh", "0", "1")]
    made = [words[words.index("--out") + 1] for words in commands if "--overwrite" not in words]
    assert len(set(made)) == len(made)
    tried = [words[words.index("--out") + 1] for words in commands if words[0].startswith("04")]
    for method, later in (("rft", 1), ("mtdpo", 1), ("sweet", 1), ("sweet-untrained", 1), ("sweet-oracle", 0)):
        counts = [sum(f"seed{seed}/{method}_" in path for path in tried) for seed in (0, 1)]
        assert counts == [3, later]                                            # seed 1 takes what seed 0 found
    for words in commands:
        if words[0].startswith("04") and "--candidates" in words:
            out, critic = after(words, "--out"), after(words, "--critic")
            assert ("untrained" in out) == (critic == "untrained") and ("oracle" in out) == (critic == "oracle")
            assert ("--reference" in words) == (critic != "oracle") and after(words, "--data-frac") == "0.2"
    test = [words for words in commands if words[0].startswith("02") and any("/test.jsonl" in word for word in words)]
    assert {words[words.index("--agent") + 1] for words in test} >= {"out/real/base/model"}
    searched = [words for words in commands if words[words.index("--out") + 1].endswith("validation.jsonl")]
    assert len(searched) == 1
    (tmp_path / "out" / "real" / "seed0" / "validation").rename(tmp_path / "elsewhere")
    process = subprocess.run(["bash", "scripts/real.sh", "1"], cwd=tmp_path, text=True, capture_output=True, timeout=60)
    assert process.returncode == 2 and process.stderr.startswith("error: ") and "seed 0" in process.stderr
    last = commands[-1]                                                        # both seeds in one table
    assert all(len(word.split(",")) == 2 for word in last if "=" in word) and last[-1] == "out/real/report"


# ---- scripts/efficiency.sh

def flags_of(commands, ending):
    """The words of the command whose output ends so."""
    [words] = [command["words"] for command in commands
               if command["words"][command["words"].index("--out") + 1].endswith(ending)]
    return words


def after(words, flag):
    return words[words.index(flag) + 1] if flag in words else None


def test_efficiency_gives_every_arm_the_same_dialogues(call):
    commands = call("scripts/efficiency.sh", "10", "11", SIZES="320 80")
    arms = ("rft", "mtdpo", "tenth", "untrained", "printed", "released", "blind", "answers")
    for seed in (10, 11):
        for size in ("80", "320"):
            words = {arm: flags_of(commands, f"seed{seed}/{arm}@{size}") for arm in arms}
            assert {after(own, "--num-trajectories") for own in words.values()} == {size}
            assert {after(own, "--trajectories") for own in words.values()} == {
                f"out/efficiency/seed{seed}/offline.jsonl"}
            # the arms with all turns choose from the same candidates
            of_all_turns = [words[arm] for arm in arms[3:]]
            assert {after(own, "--data-frac") for own in of_all_turns} == {"1"}
            assert len({after(own, "--candidates") for own in of_all_turns}) == 1
            assert after(words["tenth"], "--candidates") is None and after(words["tenth"], "--data-frac") is None
            assert [after(words[arm], "--reference") for arm in arms[2:]] == [
                None, "blind", None, "blind", None, "blind"]
            assert [pathlib.Path(after(words[arm], "--critic")).name for arm in arms[2:]] == [
                f"critic@{size}", "untrained", f"critic@{size}", f"critic@{size}", f"critic-blind@{size}",
                f"critic@{size}"]
            assert [after(words[arm], "--answer-coef") for arm in arms[2:]] == [None] * 5 + ["1"]
            assert after(flags_of(commands, f"seed{seed}/critic-blind@{size}"), "--reference") == "blind"
    report = flags_of(commands, "report-10-11")
    assert after(report, "--baseline") == "mtdpo@320" and "--costs" in report         # the most dialogues, in any order
    assert sum("=" in word for word in report) == 2 * len(arms)


def test_the_search_of_efficiency_plays_validation_tasks_of_a_seed_that_is_not_used_after(call):
    commands = call("scripts/efficiency.sh", SEARCH="1", SIZES="320", ARMS="rft mtdpo released", RATES="1e-5 1e-4",
                    EPOCHS="2 8")
    splits = {after(command["words"], "--split") for command in commands if command["words"][0].startswith("01")}
    assert splits == {"train", "validation"}
    assert all("/seed9/" in output or "report-9" in output for output in outputs(commands))
    names = sorted(output.rpartition("/")[2] for output in outputs(commands) if output.endswith("@320"))
    assert names == sorted(["candidates@320", "critic@320", "released_1e-4_-@320", "released_1e-5_-@320",
                            "rft_1e-4_-@320", "rft_1e-5_-@320", *(f"mtdpo_{rate}_{epochs}@320"
                                                                  for rate in ("1e-5", "1e-4") for epochs in (2, 8))])
    assert after(flags_of(commands, "mtdpo_1e-5_8@320"), "--epochs") == "2"      # the first; the last one given counts


def test_efficiency_takes_a_fork_by_the_name_of_its_file(call):
    commands = call("scripts/efficiency.sh", "10", METHODS="grpo signed gain sweet mtdpo", SIZES="320",
                    grpo_settings="--critic {critic} --lr 2e-5", grpo_method="sweet")
    arms = "grpo", "signed", "gain", "sweet", "mtdpo"
    words = {arm: flags_of(commands, f"seed10/{arm}@320") for arm in arms}
    assert [words[arm][0] for arm in arms] == ["examples.grpo", "examples.signed", "examples.gain",
                                               *["04_train_policy.py"] * 2]
    folder = "out/efficiency/seed10"
    assert after(words["grpo"], "--critic") == after(words["signed"], "--critic") == f"{folder}/critic@320"
    assert after(words["gain"], "--candidates") == f"{folder}/candidates@320/candidates.jsonl"
    assert after(words["grpo"], "--lr") == "2e-5"
    assert after(words["grpo"], "--method") == "sweet" and after(words["signed"], "--method") == "signed"
    assert after(words["sweet"], "--reference") == "blind"           # the best form of functions


def test_an_arm_that_is_no_fork_is_refused():
    process = subprocess.run(["bash", ROOT / "scripts" / "efficiency.sh"], cwd=ROOT, text=True, capture_output=True,
                             env={**os.environ, "METHODS": "mine"})
    assert process.returncode == 2 and "no arm mine, and no examples/mine.py" in process.stderr


@pytest.mark.parametrize("method, number", [("mtdpo", 2), ("sweet", 3), ("printed", 3)])
def test_an_entry_leaves_its_agent_and_all_of_its_dialogues_in_its_folder(call, tmp_path, method, number):
    (tmp_path / "train.jsonl").write_text("task\n" * 9)
    (tmp_path / "o").mkdir()
    commands = call("scripts/entry.sh", method, "4", SEED="20", TRAIN="train.jsonl", BASE="models/tiny", OUT="o")
    assert (tmp_path / "o" / "tasks.jsonl").read_text() == "task\n" * 4
    assert len(commands) == number and all(output.startswith("o/") for output in outputs(commands))
    assert outputs(commands)[-1] == "o/agent"
    assert [word for word in commands[-1]["words"] if word in ("blind", "informed")][-1:] == {
        "mtdpo": [], "sweet": ["blind"], "printed": ["informed"]}[method]


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    """What scripts/record.sh prints of two seeds, whose command plays two dialogues and takes the base as it is."""
    folder = tmp_path_factory.mktemp("record")
    (folder / "checkout").mkdir()
    command = (".venv/bin/python 02_rollout.py --simulator rules --max-rounds 8 --max-new-tokens 20 --agent script "
               '--tasks "$TRAIN" --out "$OUT/played.jsonl" && cp -r "$BASE" "$OUT/agent"')
    environment = {**os.environ, "OUT": str(folder), "SEEDS": "20 21", "TEST_TASKS": "4", "NUM_TRAIN": "2"}
    process = subprocess.run(["bash", "scripts/record.sh", "plain", "bash", "-c", command], text=True,
                             cwd=checkout_with_forks(folder / "checkout"), capture_output=True, timeout=600,
                             env=environment)
    assert process.returncode == 0, process.stdout + process.stderr
    return folder, process.stdout


def test_a_record_counts_dialogues_and_says_that_a_small_one_does_not_count(record):
    folder, printed = record
    assert "fixed: tasks, dialogues, base are as in the rules" in printed
    assert re.search(r"\n\| plain \| 2 \| 0\.\d \| [01]\.\d{3} \[[01]\.\d{3}, [01]\.\d{3}\] \| [01]\.\d{3} \|", printed)
    assert "not an entry: 2 seeds and 4 test tasks; an entry has 5 and 300" in printed
    assert [len((folder / "record" / "backend" / "plain" / f"seed{seed}" / "test.jsonl").read_text().splitlines())
            for seed in (20, 21)] == [8, 8]


def test_a_record_of_another_command_is_refused(record):
    folder = record[0]
    process = subprocess.run(["bash", "scripts/record.sh", "plain", "true"], cwd=folder / "checkout", text=True,
                             capture_output=True, env={**os.environ, "OUT": str(folder)})
    assert process.returncode == 2 and "/plain: made by bash -c " in process.stderr and not process.stdout


def test_the_minutes_of_a_record_are_those_of_all_calls(record):
    folder = record[0]
    seed = folder / "record" / "backend" / "halves" / "seed20"
    command = (f'if [ -e {seed}/again ]; then cp -r "$BASE" "$OUT/agent"; else sleep 2; touch {seed}/again; false; fi')
    for status in (1, 0):
        process = subprocess.run(["bash", "scripts/record.sh", "halves", "bash", "-c", command], text=True,
                                 cwd=folder / "checkout", capture_output=True, timeout=600,
                                 env={**os.environ, "OUT": str(folder), "SEEDS": "20", "TEST_TASKS": "2",
                                      "NUM_TRAIN": "2"})
        assert process.returncode == status, process.stdout + process.stderr
    assert int((seed / "seconds").read_text()) >= 2


def test_a_record_with_other_tasks_is_refused(record):
    folder = record[0] / "record" / "backend" / "plain"
    path = folder / "other.jsonl"
    path.write_text("".join((folder / "test.jsonl").read_text().splitlines(keepends=True)[1:]))
    process = subprocess.run([sys.executable, "scripts/record.py", "check", "--domain", "backend", "--tasks", path,
                              "--dialogues", folder / "script.jsonl", "--base", "models/tiny"], cwd=ROOT, text=True,
                             capture_output=True)
    assert process.returncode == 2 and "error: tasks: " in process.stderr and "are fixed" in process.stderr
