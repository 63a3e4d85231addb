"""Data of others become ours: the published format (--source colbench; the files in tests/colbench are written by us),
WebSight's pages, and dialogues that another program has made, as {"messages", "reward", "c"}."""
import json
import random
import re
import shutil

import pytest

import common
from colbench import published, task_id
from conftest import BASE, call, read, refused, ROOT, turns, write
from lib.data import read_trajectories
from lib.tokens import agent_chat

COPY = ROOT / "tests" / "colbench"
TRAIN, TEST = COPY / "backend_tasks" / "train.jsonl", COPY / "backend_tasks" / "test.jsonl"
OFFLINE = COPY / "colbench_code_offline_15k_llama8b.jsonl"
TRAIN_IDS = ["e9eef26174542a76", "41c1f02e79900b32", "4f3b46a7f72d8f21", "fdfdf569e835fc78", "c0ca71b84d0d014c",
             "cb6baf292b4d9032"]
TEST_IDS = ["0bdbd1847c802fec", "d08d84b76399fada", "f67bc90d779da626"]
SYSTEM = "Help the person with one Python function. Ask short questions, then give the answer."


def take(*arguments, out, path=COPY, source="colbench"):
    take.printed = call(1, "--source", source, "--path", path, *arguments, "--out", out)
    return read(out)


@pytest.mark.parametrize("split, path, files, ids", [
    ("train", COPY, [TRAIN], TRAIN_IDS), ("all", COPY, [TRAIN, TEST], TRAIN_IDS + TEST_IDS),
    ("test", COPY, [TEST], TEST_IDS), ("test", "flat", [TEST], TEST_IDS), ("test", TEST, [TEST], TEST_IDS)])
def test_tasks_are_taken_as_they_are(split, path, files, ids, tmp_path, monkeypatch):
    """Their task_id is kept, and repeats are not dropped."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "flat").mkdir()
    shutil.copy(TEST, "flat/test.jsonl")
    tasks = take("--split", split, path=path, out="t.jsonl")
    rows = [task for file in files for task in read(file)]
    assert tasks == [{**task, "task_id": name} for task, name in zip(rows, ids, strict=True)]
    assert ids == [task_id(task) for task in rows]
    path = write(tmp_path / "in.jsonl", [{**tasks[0], "task_id": "bread"}, tasks[1], rows[1]])
    assert [task["task_id"] for task in take(path=path, out="again.jsonl")] == ["bread", ids[1], ids[1]]


def test_pages_and_functions_are_told_apart(tmp_path):
    rows = [{"problem_description": "A page.", "ground_truth": f"<p>{i}</p><img src='https://a.com/9x9'>"}
            for i in range(3)]
    path = write(tmp_path / "test.jsonl", rows)
    line = refused(1, "--source", "colbench", "--path", path, "--out", tmp_path / "t.jsonl")
    assert line.endswith("test.jsonl: has no tasks of --domain backend; pass --path FILE with such tasks")
    tasks = take("--domain", "frontend", path=path, out=tmp_path / "t.jsonl")
    assert [{key: task[key] for key in rows[0]} for task in tasks] == rows


def test_num_tasks_takes_the_first_of_a_seeded_shuffle(tmp_path, offline):
    random.Random(5).shuffle(ids := list(TRAIN_IDS))
    tasks = take("--split", "train", "--num-tasks", 2, "--seed", 5, out=tmp_path / "t.jsonl")
    assert [task["task_id"] for task in tasks] == ids[:2] and "kept 2 of 6 tasks\n" in take.printed
    # of trajectories: all of a task, in the order of the file
    random.Random(1).shuffle(ids := TRAIN_IDS[:4])
    kept = take("--trajectories", "--num-tasks", 2, "--seed", 1, out=tmp_path / "o.jsonl")
    assert kept == [row for row in read(offline) if row["task_id"] in ids[:2]] and len(kept) == 4


@pytest.fixture(scope="module")
def offline(tmp_path_factory):
    out = tmp_path_factory.mktemp("offline") / "offline.jsonl"
    take("--trajectories", out=out)
    assert "kept 8 of 8 trajectories\n" in take.printed and "computed 3 missing rewards\n" in take.printed
    return out


def test_blocks_become_samples_and_rows_keep_every_key(offline):
    rows, logged = read(offline), read(OFFLINE)
    assert [row["task_id"] for row in rows] == TRAIN_IDS[:4] * 2 == [task_id(row["task"]) for row in rows]
    assert [row["sample"] for row in rows] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [row["reward"] for row in rows] == [1.0, 0.5, 0.5, 1.0, 0.25, 0.0, 0.5, 0]
    assert {n: row["tests"] for n, row in enumerate(rows) if "tests" in row} == {
        1: [True, True, False, False], 3: [True] * 4, 4: [False, False, False, True]}
    ours = {"task_id", "sample", "reward", "tests", "faults"}
    for row, logged_row in zip(rows, logged, strict=True):
        assert {**row, **logged_row} == row and set(row) <= set(logged_row) | ours
    assert rows[2]["source"] == "trial run" and read_trajectories(offline) == rows


def test_the_logged_system_prompt_is_written_beside(offline, tmp_path):
    assert offline.with_name("offline.jsonl.system_prompt.txt").read_text() == SYSTEM + "\n"
    row = {**read_trajectories(offline)[2], "max_rounds": 3}        # another template gets it, without our note
    system, *_, last = agent_chat(row, row["dialogue_history"][:-1])
    assert system == {"role": "system", "content": SYSTEM} and "last round" not in last["content"]
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


PAGES = COPY / "websight.jsonl"
KEPT = read(COPY / "websight_tasks.jsonl")


def test_websight_from_jsonl_and_parquet(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    site, folder = read(PAGES), tmp_path / "v0.2"
    folder.mkdir()
    for name, rows in (("b", site[4:]), ("a", site[:4])):           # read in the order of the names
        table = pyarrow.Table.from_pylist([{**row, "image": {"bytes": b"png"}} for row in rows])
        parquet.write_table(table, folder / f"{name}.parquet")
    for number, (path, split, tasks) in enumerate((
            (folder, "train", KEPT[:2]), (folder / "a.parquet", "all", KEPT[:2]), (PAGES, "test", KEPT[2:]),
            (PAGES, "all", KEPT))):
        flags = "--split", split, "--num-tasks", len(tasks)
        assert take(*flags, source="websight", path=path, out=tmp_path / str(number)) == tasks
    assert [int(task["task_id"], 16) % 100 for task in KEPT] == [66, 50, 95]
    assert "7 rows in the order of the data set: 3 kept, 2 empty, 1 repeated, 1 no page\n" in take.printed


NAME = "facebook/collaborative_agent_bench"
HUB = f'{NAME}: .*"hf download --repo-type dataset {NAME} {{}} --local-dir FOLDER", then pass --path FOLDER'


@pytest.mark.parametrize("source, flags, line", [
    ("colbench", "--split test", HUB.format("backend_tasks/test.jsonl")),
    ("colbench", "--trajectories", HUB.format(OFFLINE.name)),
    ("colbench", "", HUB.format("backend_tasks/train.jsonl backend_tasks/test.jsonl")),
    ("colbench", f"--path {COPY} --split validation",
     "--split validation: the published data have only train and test of this kind"),
    ("colbench", f"--path {COPY} --split test --trajectories",
     "--split test: the published data have only train of this kind"),
    ("colbench", "--path no/such", "no/such: no such file or folder"),
    ("colbench", "--path empty --trajectories", f"empty: no {OFFLINE.name} in it"),
    ("colbench", f"--path {TEST} --num-tasks 4", "--num-tasks 4: there are only 3 tasks"),
    ("websight", "", r"HuggingFaceM4/WebSight: cannot be read \(.*--path FOLDER/v0.2"),
    ("websight", "--path no/such", "no/such: no such file or folder"),
    ("websight", "--path empty", "empty: no .parquet files in it"),
    ("websight", "--path bad.parquet", r"bad.parquet: cannot be read \(.*"),
    ("websight", f"--path {PAGES} --num-tasks 4", f"--num-tasks 4: there are only 3 tasks in {PAGES} "
     r"\(rows: 3 kept, 2 empty, 1 repeated, 1 no page\)")])
def test_arguments_are_refused_in_one_line(source, flags, line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.parquet").write_text("no parquet")
    (tmp_path / "empty").mkdir()
    assert re.fullmatch(line, refused(1, "--source", source, *flags.split(), "--out", "out/t.jsonl"))
    assert not (tmp_path / "out").exists()


def test_other_addresses_stay_and_a_tag_can_name_the_size():
    for page in ('<img src="logo.png">', '<script src="https://cdn.com/10x10.js"></script>',
                 '<style>@import url("https://fonts.googleapis.com/css2"); a {src: url(https://a.com/b.woff)}</style>'):
        assert published.one_photo(page) == page
    assert published.one_photo('<img width="30" height=20 src="https://a.com/x">') == (
        '<img width="30" height=20 src="https://picsum.photos/id/48/30/20">')


def dialogue(request, reply, reward, **more):
    system = {"role": "system", "content": "Be brief."}
    return {"messages": [system, *turns(request, "What is the fee?", "12", reply)], "reward": reward, **more}


@pytest.fixture
def path(tmp_path):
    return write(tmp_path / "own.jsonl", [
        dialogue(f"the price of {number}", reply, reward, c=f"the fee is {number}")
        for number in range(8) for reply, reward in (("Please use 12 for the fee.", 0.75), ("12 and <script>", 0.25))])


def test_a_dialogue_is_what_the_file_says(path):
    [first, second, third, *_] = read_trajectories(path)
    assert first["task_id"] == second["task_id"] != third["task_id"] and (first["sample"], second["sample"]) == (0, 1)
    assert [first["reward"], second["reward"]] == [0.75, 0.25] and first["system_prompt"] == "Be brief."
    assert [turn["role"] for turn in first["dialogue_history"]] == ["user", "assistant", "user", "assistant"]
    chat = agent_chat(first, first["dialogue_history"][:3])
    assert [message["content"] for message in chat] == ["Be brief.", "the price of 0", "What is the fee?", "12"]
    assert common.trajectory_pairs([first, second], path) == [(0, 1)]
    assert "the fee is 0" in common.solution_text(first["task"])
    assert common.solution_text({**first["task"], "ground_truth": ""}) == ""
    [row] = read_trajectories(write(path, [{"messages": turns("a", "b"), "reward": 1}]))         # without a system's
    assert [message["role"] for message in agent_chat(row, row["dialogue_history"][:1])] == ["user"]


def test_logs_with_unique_openings_form_tasks_by_their_task_id(tmp_path):
    """Production logs: no two dialogues open alike, and each has its own c. A text of one's own states c; a least gap
    limits the pairs."""
    rows = [dialogue(f"trip {number}", "ok", number / 4, c=f"seat {number}", c_text="They want: {c}\n")
            for number in range(5)]
    path = write(tmp_path / "logs.jsonl", rows)
    flags = ["--trajectories", path, "--model", BASE, "--max-steps", 1]
    line = refused(3, *flags, "--out", tmp_path / "critic")
    assert "each task has one dialogue: train on single dialogues (03 --score value), or give " in line
    printed = call(3, *flags, "--score", "value", "--held-out-frac", 0, "--out", tmp_path / "value")
    assert "0 trajectory pairs from 0 of 5 tasks; 5 dialogues, 5 with c\n" in printed
    assert "They want: seat " in printed
    write(path, [{**row, "task_id": "trips"} for row in rows])
    printed = call(3, *flags, "--held-out-frac", 0, "--out", tmp_path / "critic")
    assert "10 trajectory pairs from 1 of 1 tasks; 5 dialogues, 5 with c\n" in printed
    printed = call(4, "--method", "mtdpo", *flags, "--min-return-gap", 0.5, "--out", tmp_path / "mtdpo")
    assert "6 trajectory pairs from 1 of 1 tasks" in printed
    call(5, f"logs={path}", "--out", tmp_path / "report")
    page = (tmp_path / "report" / "report.html").read_text()
    assert all(f'"request":"trip {number}","solution":"seat {number}"' in page for number in range(5))


def test_all_stages_take_it(path, tmp_path):
    flags = ["--trajectories", path, "--model", BASE, "--epochs", 1, "--lr", 1e-4]
    printed = call(3, *flags, "--out", tmp_path / "critic")
    assert "32 rendered again without their system prompt, which the template leaves out" in printed
    call(4, "--method", "mtdpo", *flags, "--out", tmp_path / "mtdpo")
    call(4, "--method", "sweet", *flags, "--critic", tmp_path / "critic", "--max-new-tokens", 8, "--num-candidates", 4,
         "--out", tmp_path / "sweet")
    printed = call(5, f"mine={path}", "--critic", tmp_path / "critic", "--out", tmp_path / "report",
                   "--export", "messages")
    again = read_trajectories(tmp_path / "report" / "export" / "mine.jsonl")
    assert [row["task_id"] for row in again] == [row["task_id"] for row in read_trajectories(path)]
    metrics = json.loads((tmp_path / "report" / "metrics.json").read_text())["mine"]
    assert metrics["mean_reward"] == 0.5 and metrics["n"] == 16 and "0.500" in printed and "leaks" not in metrics
    page = (tmp_path / "report" / "report.html").read_text()
    assert "the price of 3" in page and "12 and <script>" not in page
