"""01_generate_tasks.py --source colbench: files in the published format (tests/colbench, written by us) become ours."""
import collections
import json
import random
import shutil

import pytest
from transformers import AutoTokenizer

import common
from colbench import task_id
from conftest import BASE, call, read, refused, ROOT, stage, write
from lib.data import read_trajectories

COPY = ROOT / "tests" / "colbench"
TRAIN, TEST = COPY / "backend_tasks" / "train.jsonl", COPY / "backend_tasks" / "test.jsonl"
OFFLINE = COPY / "colbench_code_offline_15k_llama8b.jsonl"
TRAIN_IDS = ["e9eef26174542a76", "41c1f02e79900b32", "4f3b46a7f72d8f21", "fdfdf569e835fc78", "c0ca71b84d0d014c",
             "cb6baf292b4d9032"]
TEST_IDS = ["0bdbd1847c802fec", "d08d84b76399fada", "f67bc90d779da626"]
SYSTEM = "Help the person with one Python function. Ask short questions, then give the answer."


def take(*arguments, out, path=COPY):
    take.printed = call(1, "--source", "colbench", "--path", path, *arguments, "--out", out)
    return read(out)


# --- tasks

@pytest.mark.parametrize("split, files, ids", [
    ("train", [TRAIN], TRAIN_IDS), ("test", [TEST], TEST_IDS), ("all", [TRAIN, TEST], TRAIN_IDS + TEST_IDS)])
def test_tasks_are_taken_as_they_are(split, files, ids, tmp_path):
    tasks = take("--split", split, out=tmp_path / "t.jsonl")
    published = [task for file in files for task in read(file)]
    assert tasks == [{**task, "task_id": name} for task, name in zip(published, ids, strict=True)]
    assert ids == [task_id(task) for task in published]


def test_path_is_a_folder_a_flat_folder_or_a_file(tmp_path):
    (tmp_path / "flat").mkdir()
    shutil.copy(TEST, tmp_path / "flat" / "test.jsonl")
    expected = take("--split", "test", out=tmp_path / "a")
    assert expected == take("--split", "test", path=tmp_path / "flat", out=tmp_path / "b")
    assert expected == take(path=TEST, out=tmp_path / "c")
    assert expected == take("--split", "test", path=tmp_path / "c", out=tmp_path / "d")                # our own output


def test_a_task_id_is_kept_and_repeats_are_not_dropped(tmp_path):
    first, second = read(TEST)[:2]
    rows = [{**first, "task_id": "bread"}, second, second]
    tasks = take(path=write(tmp_path / "in.jsonl", rows), out=tmp_path / "t.jsonl")
    assert [task["task_id"] for task in tasks] == ["bread", TEST_IDS[1], TEST_IDS[1]]


def test_num_tasks_takes_the_first_of_a_seeded_shuffle(tmp_path, offline):
    random.Random(5).shuffle(ids := list(TRAIN_IDS))
    tasks = take("--split", "train", "--num-tasks", 2, "--seed", 5, out=tmp_path / "t.jsonl")
    assert [task["task_id"] for task in tasks] == ids[:2] and "kept 2 of 6 tasks\n" in take.printed
    line = refused(1, "--source", "colbench", "--path", TEST, "--num-tasks", 4, "--out", tmp_path / "u.jsonl")
    assert line == "--num-tasks 4: there are only 3 tasks"
    # of trajectories: all of a task, in the order of the file
    random.Random(1).shuffle(ids := TRAIN_IDS[:4])
    kept = take("--trajectories", "--num-tasks", 2, "--seed", 1, out=tmp_path / "o.jsonl")
    assert kept == [row for row in read(offline) if row["task_id"] in ids[:2]] and len(kept) == 4


# --- trajectories

@pytest.fixture(scope="module")
def offline(tmp_path_factory):
    out = tmp_path_factory.mktemp("offline") / "offline.jsonl"
    take("--trajectories", out=out)
    assert "kept 8 of 8 trajectories\n" in take.printed and "computed 3 missing rewards\n" in take.printed
    return out


def test_blocks_become_samples_and_missing_rewards_are_computed(offline, tmp_path):
    rows, published = read(offline), read(OFFLINE)
    assert [row["task_id"] for row in rows] == TRAIN_IDS[:4] * 2
    assert [row["sample"] for row in rows] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [row["reward"] for row in rows] == [1.0, 0.5, 0.5, 1.0, 0.25, 0.0, 0.5, 0]
    assert {n: row["tests"] for n, row in enumerate(rows) if "tests" in row} == {
        1: [True, True, False, False], 3: [True] * 4, 4: [False, False, False, True]}
    uneven = write(tmp_path / "uneven.jsonl", [published[0], *published[5:], published[0]])
    assert [row["sample"] for row in take("--trajectories", path=uneven, out=tmp_path / "b")] == [0, 0, 0, 0, 1]


def test_rows_keep_every_key_and_other_stages_read_them(offline):
    ours = {"task_id", "sample", "reward", "tests", "faults"}
    for row, published in zip(read(offline), read(OFFLINE), strict=True):
        assert {**row, **published} == row and set(row) <= set(published) | ours
        for turn in row["dialogue_history"]:
            assert set(turn) == ({"role", "content", "input", "output"} if turn["role"] == "assistant" else
                                 {"role", "content"})
        assert row["task_id"] == task_id(row["task"])
    assert read(offline)[2]["source"] == "trial run"
    assert read_trajectories(offline) == read(offline)


def test_the_logged_system_prompt_is_written_beside(offline, tmp_path):
    assert offline.with_name("offline.jsonl.system_prompt.txt").read_text() == SYSTEM + "\n"
    rows = read(OFFLINE)
    other = json.loads(json.dumps(rows[0]).replace(SYSTEM, "Say {nothing}."))
    for row in rows[2:4]:
        for turn in row["dialogue_history"]:
            turn.pop("input", 0)
    take("--trajectories", path=write(tmp_path / "mixed.jsonl", [other, *rows]), out=tmp_path / "m.jsonl")
    assert (tmp_path / "m.jsonl.system_prompt.txt").read_text() == SYSTEM + "\n"
    assert "in the logged prompts of 6 of 9 trajectories" in take.printed
    take("--trajectories", path=write(tmp_path / "none.jsonl", rows[2:4]), out=tmp_path / "n.jsonl")
    assert not (tmp_path / "n.jsonl.system_prompt.txt").exists()


def test_another_template_gets_the_logged_system_prompt(offline):
    """A policy whose template did not make the logged prompts has them rendered with the system prompt in them, and
    without our note on the last round."""
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    tokenizer.chat_template = tokenizer.chat_template.replace("message.role != 'system'", "true")
    trajectory, counts = read_trajectories(offline)[2], collections.Counter()
    turns = common.agent_turns(tokenizer, {**trajectory, "max_rounds": 3}, counts)
    assert counts == {"rendered again": 3}
    assert all(prompt.startswith(f"<|system|>{SYSTEM}<|end|><|user|>") and "last round" not in prompt
               for prompt, _ in turns)


# --- refused

def test_without_the_hub_one_line_says_what_to_do(tmp_path):
    for flags, files in ((["--split", "test"], "backend_tasks/test.jsonl"), (["--trajectories"], OFFLINE.name),
                         ([], "backend_tasks/train.jsonl backend_tasks/test.jsonl")):
        line = refused(1, "--source", "colbench", *flags, "--out", tmp_path / "t.jsonl")
        assert line.startswith("facebook/collaborative_agent_bench: ") and line.endswith("then pass --path FOLDER")
        assert f"hf download --repo-type dataset facebook/collaborative_agent_bench {files} --local-dir FOLDER" in line
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("flags, line", [
    (["--split", "validation"], "--split validation: of this the published data have train and test only"),
    (["--split", "test", "--trajectories"], "--split test: of this the published data have train only"),
    (["--path", "no/such"], "no/such: no such file or folder"),
    (["--path", COPY / "backend_tasks", "--trajectories"], f"{COPY / 'backend_tasks'}: no {OFFLINE.name} in it"),
    (["--path", TEST, "--trajectories"], f"{TEST}:1: a task, not a dialogue; 02_rollout.py makes dialogues of tasks")])
def test_arguments_are_refused_in_one_line(flags, line, tmp_path):
    assert refused(1, "--source", "colbench", "--path", COPY, *flags, "--out", tmp_path / "t.jsonl") == line
    assert not list(tmp_path.iterdir())


def test_flags_of_colbench_need_it(capsys):
    for flags in (["--path", "x"], ["--trajectories"]):
        with pytest.raises(SystemExit):
            stage(1).parse_args([*flags, "--out", "t"])
        assert "needs --source colbench" in capsys.readouterr().err


def test_bad_rows_are_one_line(tmp_path):
    """test_bad_input.py has more."""
    task, row = read(TEST)[1], read(OFFLINE)[1]
    del task["ground_truth"], row["task"]["test_cases"]
    for file, flags, bad, line in (
            (TEST, [], task, 'missing "ground_truth"'),
            (OFFLINE, ["--trajectories"], row,
             'task: missing "test_cases", or what a task of another domain has (backend, frontend, sql)')):
        path = write(tmp_path / "bad.jsonl", [read(file)[0], bad])
        said = refused(1, "--source", "colbench", *flags, "--path", path, "--out", tmp_path / "t.jsonl")
        assert said.startswith(f"{path}:2: ") and said.endswith(line)
        assert list(tmp_path.iterdir()) == [path]
