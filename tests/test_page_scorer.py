"""Pages: similarity of screenshots (PageScorer) and 05_evaluate.py on frontend trajectories, by hand."""
import itertools
import shutil
import types

import numpy as np
import pytest
import torch
from test_05 import report_of, scored, written

from colbench import frontend, InputError
from colbench.similarity import PageScorer, pixel_similarity
from conftest import call, read, turns
from lib import statistics

Image = pytest.importorskip("PIL.Image", reason="pip install -r scripts/frontend.txt")
Draw = pytest.importorskip("PIL.ImageDraw")
pytest.importorskip("skimage")


def picture(path, header="navy", back="white", card="khaki", side="left", columns=3, height=720):
    """A drawn screenshot of a page: header, sidebar, cards in columns."""
    image = Image.new("RGB", (1280, height), back)
    draw = Draw.Draw(image)
    draw.rectangle((0, 0, 1279, 99), fill=header)
    draw.rectangle((0, 100, 219, 659) if side == "left" else (1060, 100, 1279, 659), fill="lightgray")
    for x in range(250, 1050, 800 // columns):
        draw.rectangle((x, 130, x + 800 // columns - 10, 500), fill=card)
    image.save(path)
    return str(path)


def test_pixel_similarity_by_hand():
    white, red = np.full((20, 30, 3), 255, np.uint8), np.full((20, 30, 3), (255, 0, 0), np.uint8)
    assert pixel_similarity(white, white) == 1.0
    # no common colour; SSIM of two flat channels, means 0 and 255: C1 / (255 ** 2 + C1), C1 = 2.55 ** 2; red has one
    dark = 2.55 ** 2 / (255 ** 2 + 2.55 ** 2)
    assert pixel_similarity(white, None) == pytest.approx(dark / 2, abs=1e-12)
    assert pixel_similarity(white, red) == pytest.approx((1 + 2 * dark) / 3 / 2, abs=1e-12)
    # a page of 1.5 times the height: roots of 600 and 900 pixels of white, 2 / 3 of the area
    taller = np.full((30, 30, 3), 255, np.uint8)
    assert pixel_similarity(white, taller) == pytest.approx(((2 / 3) ** 0.5 + 2 / 3) / 2, abs=1e-12)


def test_pixels_are_symmetric_within_bounds_and_fall_with_every_aspect_that_differs(tmp_path):
    paths = [picture(tmp_path / "as it is.png"), picture(tmp_path / "red.png", header="red"),
             picture(tmp_path / "tall.png", height=1500)]
    scorer = PageScorer("pixels")
    pairs = list(itertools.product(paths, paths))
    there, back = scorer.score(pairs), scorer.score([(b, a) for a, b in pairs])
    assert there == back and all(0 <= score <= 1 for score in there) and scorer.name == "pixels"
    assert [score == 1 for score in there] == [a == b for a, b in pairs]
    half = np.random.default_rng(0).integers(0, 256, (90, 80, 3), dtype=np.uint8)
    noise = np.concatenate([half, 255 - half], 1)                                 # its negative: SSIM far below 0, …
    assert pixel_similarity(noise, 255 - noise) == 0.5                     # … the same colours elsewhere
    black = tmp_path / "black.png"                                                # stands for a missing picture
    Image.new("RGB", (1280, 720)).save(black)
    missing, drawn = scorer.score([(paths[0], None), (paths[0], str(black))])
    assert missing == drawn < 0.1
    assert scorer.score([(None, paths[0]), (None, None), (str(black), None)]) == [0, 0, 1]
    changes = {"header": "darkgreen", "back": "lightblue", "card": "white", "side": "right", "columns": 2}
    reference, *others = (picture(tmp_path / f"{len(aspects)} {min(aspects, default='')}.png", **aspects)
                          for aspects in ({}, *({name: changes[name]} for name in changes), changes))
    *each, all_of_them, missing = PageScorer("pixels").score([(reference, path) for path in [*others, None]])
    assert 0.99 > max(each) > min(each) > all_of_them > missing and all_of_them < 0.6


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    """A folder with a tiny CLIP, text half and all as the hub's are, random weights."""
    from transformers import CLIPConfig, CLIPImageProcessorPil, CLIPModel
    folder = str(tmp_path_factory.mktemp("clip"))
    torch.manual_seed(0)
    size = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, projection_dim=16)
    CLIPModel(CLIPConfig(text_config={**size, "vocab_size": 9, "bos_token_id": 7, "eos_token_id": 8}, projection_dim=16,
                         vision_config={**size, "image_size": 32, "patch_size": 8})).save_pretrained(folder)
    CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}).save_pretrained(folder)
    return folder


def test_clip_is_the_cosine_of_the_embeddings(clip, tmp_path):
    from transformers import CLIPImageProcessorPil, CLIPVisionModelWithProjection
    paths = [picture(tmp_path / f"{i}.png", **changes) for i, changes in enumerate(
        ({}, {"header": "red"}, {"back": "black"}, {"height": 1500}))]
    black = str(tmp_path / "black.png")
    Image.new("RGB", (1280, 720)).save(black)
    model = CLIPVisionModelWithProjection.from_pretrained(clip).double()
    processor = CLIPImageProcessorPil.from_pretrained(clip)
    with torch.no_grad():
        x, *others = (model(processor(Image.open(path), return_tensors="pt")["pixel_values"].double()).image_embeds[0]
                      for path in [*paths, black])
    expected = [max(0, float(x @ y / (x @ x).sqrt() / (y @ y).sqrt())) for y in others]
    scorer = PageScorer("clip", clip)
    assert scorer.name == f"clip:{clip}"
    scores = scorer.score([(paths[0], path) for path in [*paths[1:], None]])
    assert scores == pytest.approx(expected, abs=1e-5) and len(set(scores)) == 4
    assert scorer.score([(path, path) for path in paths]) == pytest.approx([1] * 4, abs=1e-12)
    assert scorer.score([(None, paths[0]), (None, None)]) == [0, 0]


def test_a_cosine_below_zero_is_zero_and_pictures_are_embedded_once(clip, tmp_path):
    paths = [picture(tmp_path / f"{i}.png", height=720 + i) for i in range(5)]
    scorer = PageScorer("clip", clip)
    vectors = iter(torch.tensor([[3.0, 4], [-3, -4], [4, -3], [4, 3], [8, 6]]))

    def model(pixel_values):
        return types.SimpleNamespace(image_embeds=torch.stack([next(vectors) for _ in pixel_values]))

    model.device = "cpu"
    scorer.clip = model, scorer.clip[1]
    assert scorer.score([(paths[0], path) for path in paths]) == pytest.approx([1, 0, 0, 0.96, 0.96])
    assert scorer.score([(paths[3], paths[4]), (paths[2], paths[3])]) == pytest.approx([1, 0.28])


def test_weights_that_cannot_be_had(clip, tmp_path):
    for name in ("openai/clip-vit-base-patch32", str(tmp_path / "none")):         # the tests run offline
        with pytest.raises(InputError) as error:
            PageScorer("clip", name)
        assert "\n" not in str(error.value) and name in str(error.value)
        assert "--similarity pixels" in str(error.value) and "--clip-model" in str(error.value)
    from safetensors.torch import load_file, save_file
    broken = shutil.copytree(clip, tmp_path / "broken")                           # a weight is missing: never made up
    weights = load_file(broken / "model.safetensors")
    del weights["visual_projection.weight"]
    save_file(weights, broken / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match="visual_projection.weight"):
        PageScorer("clip", str(broken))


def test_win_rate_and_ties_by_hand():
    def wins(ours, theirs):
        return statistics.win_rate(scored(*ours), scored(*theirs), frontend.eval_score)

    base = [("a", 0.5), ("a", 0.7), ("b", 0.4), ("c", 0.9), ("only_here", 0.1)]
    # a: 0.6 and 0.7 against 0.5 and 0.7: win, loss, win, tie = 2.5 of 4; b: tie within 1e-6; c: loss
    result = wins([("a", 0.6), ("a", 0.7), ("b", 0.4 + 5e-7), ("c", 0.8), ("only_there", 1)], base)
    assert result["win_rate"] == pytest.approx((0.625 + 0.5 + 0) / 3)
    assert result["ties"] == pytest.approx((0.25 + 1 + 0) / 3)
    assert result["win_rate_ci95"] == statistics.bootstrap_interval([0.625, 0.5, 0])
    itself = wins(base, base)
    assert itself["win_rate"] == 0.5 and itself["ties"] == pytest.approx((0.5 + 1 + 1 + 1) / 4)
    assert wins([("b", 0.4 + 2e-6)], base)["win_rate"] == 1 and wins(base, [("z", 1)]) == {}
    ours, theirs = [("a", 0.6, 0), ("a", 0.2, 1)], [("a", 0.5, 0), ("a", 0.1, 1)]
    assert wins(ours, theirs)["win_rate"] == 1                       # paired by run: of all pairs it were 3 of 4
    assert wins(ours[:1], theirs) == {}


def page(colour, body="<h1>Shop</h1>"):
    return f'<!doctype html><body style="margin:0;background:{colour}">{body}</body>'


RELOADS = "<p>a<script>location.reload()</script>"                  # cannot be rendered
TASKS = [{"task_id": "t1", "problem_description": "A shop <b>in green</b>", "ground_truth": page("green")},
         {"task_id": "t2", "problem_description": "A café", "ground_truth": page("#804000", "<p>Menu</p>" * 60)},
         {"task_id": "t3", "problem_description": "A shop", "ground_truth": RELOADS}]


def answered(*answers, similarity="clip:elsewhere"):
    """A dialogue of two rounds for every (task number, answer)."""
    rows = []
    for number, answer in answers:
        history = turns(TASKS[number]["problem_description"], page("white"), "The background should be darker.",
                        answer or "I cannot.")
        rows.append({"task": TASKS[number], "answer": answer, "reward": 0.5, "similarity": similarity,
                     "dialogue_history": history})
    return rows


def test_metrics_of_pages(tmp_path):
    files = {"base": answered((0, page("white")), (1, "")),
             "sweet": answered((0, page("green")), (1, page("#804000", "<script>1</script>"))),
             "odd": answered((0, page("green")), (0, RELOADS), (0, ""), (2, page("green")))}
    printed = call(5, *written(tmp_path, files), "--baseline", "base", "--similarity", "pixels")
    assert "similarity of screenshots: pixels" in printed and "pixel similarity" in printed
    assert "success" not in printed and "tests" not in printed
    metrics, html, _ = report_of(tmp_path)
    scored_files = tmp_path / "report" / "scored"
    rows = {name: read(scored_files / f"{name}.jsonl") for name in metrics}
    base, sweet, odd = metrics["base"], metrics["sweet"], metrics["odd"]
    for name in ("base", "sweet"):
        m = metrics[name]
        assert m["n"] == m["tasks"] == 2 and m["mean_rounds"] == 2 and m["similarity"] == "pixels" and m["leaks"] == 0
        assert m["pixel_similarity"] == pytest.approx(sum(row["reward"] for row in rows[name]) / 2)
        assert m["failed_renders"] == m["failed_references"] == 0
        assert not {"success_rate", "tests_passed", "cosine_similarity", "asked_last"} & set(m)
        for row, colour in zip(rows[name], ((0, 128, 0), (128, 64, 0))):              # paths start at the file's folder
            assert Image.open(scored_files / row["reference_image"]).getpixel((1000, 10)) == colour
            assert row["similarity"] == "pixels" and (row["image"] is None) == (row["answer"] == "")
    assert (base["no_page"], base["win_rate"], base["ties"]) == (0.5, 0.5, 1)
    assert (sweet["no_page"], sweet["win_rate"], sweet["ties"]) == (0, 1, 0) and rows["sweet"][0]["reward"] == 1
    difference = sweet["pixel_similarity"] - base["pixel_similarity"]
    assert sweet["against_baseline"]["difference"] == pytest.approx(difference)

    assert (odd["failed_renders"], odd["failed_references"], odd["no_page"]) == (1, 1, 0.25)
    assert odd["faults"] == {"not drawn: the page replaced itself": 1}
    rewards = [row["reward"] for row in rows["odd"]]
    assert rewards[0] == 1 and rewards[1] == rewards[2] < 0.4 and rewards[3] == 0
    assert "odd: the solutions of 1 tasks cannot be rendered; no answer is like them" in printed
    assert ">not rendered<" in html


def test_metrics_of_pages_by_clip(clip, tmp_path):
    rows = answered((0, page("white")), (1, page("green")), similarity=f"clip:{clip}")
    call(5, *written(tmp_path, {"judge": rows}), "--clip-model", clip)
    metrics, html, _ = report_of(tmp_path)
    rewards = [row["reward"] for row in read(tmp_path / "report" / "scored" / "judge.jsonl")]
    assert metrics["judge"]["cosine_similarity"] == pytest.approx(sum(rewards) / 2)
    assert metrics["judge"]["similarity"] == f"clip:{clip}" and ">cosine similarity<" in html
    assert f"similarity of screenshots: clip:{clip}" in html
