"""`graphattn report`: what is in the folders is on the page, and what is not is said."""

from __future__ import annotations

import gc
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from cli_helpers import Page, done, page_of, refused

import graphattn as ga
from graphattn.cli.runs_report import certificates

pytest.importorskip("matplotlib", reason="figures need the extra `plots`")
pytest.importorskip("transformers")
pytest.importorskip("accelerate")

HOSTILE = """<script>alert(1)</script>"><img src=x onerror=alert(2)>{{ 7 * 7 }} \ud800"""


def report(*folders, out: Path, options=("--no-certify",)):
    assert done("report", *folders, "--out", out, *options).output.splitlines()[-1] == str(out)
    return page_of(out)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run through the engine, evaluated, with a sample."""
    gc.freeze()  # accelerate collects at every start, which takes longer than this run
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    torch.manual_seed(0)
    model = ga.models.CausalLM(7, dim=8, depth=2, heads=2, mixer="mix", rope="isometric")
    data = [{"tokens": torch.randint(6, (12,))} for _ in range(20)]
    config = ga.train.RunConfig(
        data="texts/some.txt", model="tiny", mixer="mix", steps=6, batch_tokens=60, lr=1e-2,
        warmup_steps=2, evaluate_every=3, save_every=3, log_every=1, record_every=3, length=12,
        objective="causal", out=str(folder),
    )  # fmt: skip
    objective = ga.train.NextToken()
    ga.train.fit(model, objective, config, data[:15], data[15:])
    batch = objective.collate(data[15:])
    calibration = ga.train.Calibration.of(objective, model, [batch])
    numbers = objective.evaluate(model, [batch])
    numbers |= {"frequency_loss": 1.8125, "bigram_loss": 1.625, "model": "model"}
    numbers["calibration"] = {"error": calibration.error, "bins": calibration.rows()}
    (folder / "evaluation.json").write_text(json.dumps({"some.txt test": numbers}))
    sample = {"prompt": "ab", "text": "abracadabra", "seed": 3, "temperature": 0.75}
    (folder / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    yield folder
    gc.unfreeze()


@pytest.fixture
def run(finished, tmp_path):
    """A copy to be damaged."""
    return Path(shutil.copytree(finished, tmp_path / "tiny"))


def sections(page: Page) -> list[str]:
    return re.findall(r"<h2>(.*?)</h2>", page.html)


def test_a_page_of_one_run_has_all_its_parts(finished, tmp_path, on_a_phone):
    page = report(finished, out=tmp_path / "page.html", options=())
    assert sections(page) == [
        "What was trained", "Curves", "Results", "Samples", "Certificates of the layers",
        "Layers over time", "Origin",
    ]  # fmt: skip
    kept = ga.train.read_run(finished)
    for words in (
        "Finished: 6 steps", "texts/some.txt", "tiny", "abracadabra", "Prompt: ab", "1.812",
        "guessing by frequency", "1.625", kept.info["config"], kept.info["versions"]["torch"],
        f"{kept.evaluations[-1]['loss']:.4g}", "Nothing is violated", "1 - 2 eta lambda_max",
    ):  # fmt: skip
        assert words in page.text, words
    assert "missing" not in page.text
    assert page.tags.count("img") == len(on_a_phone) >= 6
    assert on_a_phone.smallest_label() >= 9
    assert all(len(alt) > 20 for alt in page.alts)


@pytest.mark.long
def test_the_page_needs_nothing_else_and_its_headings_are_in_order(finished, tmp_path):
    page = report(finished, finished, out=tmp_path / "page.html")
    assert all(link.startswith(("data:image/png;base64,", "#section-")) for link in page.links)
    assert not {"script", "link", "iframe"} & set(page.tags)
    assert page.levels[0] == 1
    assert page.levels.count(1) == 1
    assert all(b - a <= 1 for a, b in zip(page.levels, page.levels[1:], strict=False))


@pytest.mark.long
def test_options_that_differ_from_their_defaults_stand_before_the_others(finished, tmp_path):
    html = report(finished, out=tmp_path / "page.html").html
    before, after = html.split("<details>", 1)
    usual, kept = ga.train.RunConfig().as_dict(), ga.train.read_run(finished).config.as_dict()
    rest = after.split("</details>", 1)[0]
    for name, value in kept.items():
        cell = f"<td>{name}</td>"
        is_changed = value != usual[name] or name in ("data", "out")
        assert (cell in before, cell in rest) == (is_changed, not is_changed), name


@pytest.mark.long
def test_whatever_files_hold_is_text(run, tmp_path):
    (run / "samples.jsonl").write_text(json.dumps({"text": HOSTILE, "prompt": HOSTILE}) + "\n")
    (run / "evaluation.json").write_text(json.dumps({HOSTILE: {"loss": 2.0, "bigram_loss": 3.0}}))
    state = json.loads((run / "run.json").read_text())
    state |= {"status": "failed", "error": HOSTILE, "commit": HOSTILE, "versions": {HOSTILE: "1"}}
    (run / "run.json").write_text(json.dumps(state))
    page = report(run, out=tmp_path / "page.html")
    assert "script" not in page.tags
    assert page.tags.count("img") == page.html.count("data:image/png")
    assert page.text.count("<script>alert(1)</script>") >= 5
    assert "49" not in re.sub(r"base64,[^\"]*", "", page.html).split("{{ 7 * 7 }}")[1][:9]


@pytest.mark.parametrize(
    ("state", "sentence"),
    [
        ({"status": "diverged"}, "Diverged: the run ended at step 6 of 6"),
        ({"status": "interrupted"}, "Interrupted: the log ends at step 6 of 6"),
        ({"status": "running"}, "Interrupted: the log ends at step 6 of 6"),  # nobody holds it
        ({"status": "failed", "error": "no room"}, "Failed at step 6 of 6: no room"),
        ({"status": "failed"}, "its error is not known"),
    ],
)
def test_how_a_run_ended_is_said_plainly(run, tmp_path, state, sentence):
    kept = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**kept, "error": None, **state}))
    assert sentence in report(run, out=tmp_path / "page.html").text


@pytest.mark.parametrize(
    ("name", "content", "said", "gone"),
    [
        ("config.yaml", None, "There is no config.yaml", "What was trained"),
        ("config.yaml", "a: [", "config.yaml cannot be read", "What was trained"),
        ("config.yaml", "steps: many\n", "steps must be", None),
        ("run.json", None, "There is no run.json", "Origin"),
        ("run.json", "{", "run.json cannot be read", "Origin"),
        ("log.jsonl", None, "There is no log.jsonl", "Curves"),
        ("log.jsonl", "", "log.jsonl contains no rows", "Curves"),
        ("evaluation.json", "{", "evaluation.json cannot be read", None),
        ("evaluation.json", "[1]", "must contain a JSON object, got a list", None),
        ("samples.jsonl", "{\n", "samples.jsonl: omitted because damaged: line 1", "Samples"),
        ("samples.jsonl", None, "Missing (or not written yet): samples.jsonl.", "Samples"),
    ],
)
def test_what_is_absent_or_damaged_is_said_and_all_else_is_shown(
    run, tmp_path, name, content, said, gone
):
    (run / name).unlink()
    if content is not None:
        (run / name).write_text(content)
    page = report(run, out=tmp_path / "page.html")
    assert said in page.text
    shown = sections(page)
    assert shown[0] == "Missing data"
    for part in ("What was trained", "Curves", "Samples", "Origin"):
        assert (part in shown) == (part != gone)


@pytest.mark.long
def test_damaged_lines_of_a_log_are_counted_and_the_others_drawn(run, tmp_path):
    lines = (run / "log.jsonl").read_text().splitlines()
    (run / "log.jsonl").write_text("\n".join(["{half", *lines[:2], "[1]", *lines[2:]]) + "\n")
    page = report(run, out=tmp_path / "page.html")
    assert f"damaged: lines 1, 4 of {len(lines) + 3}" in page.text
    assert "Finished: 6 steps" in page.text
    assert "Curves" in sections(page)


@pytest.mark.long
def test_a_model_that_cannot_be_made_is_said_beside_all_else(run, tmp_path):
    (run / "model" / "model.safetensors").write_bytes(b"nothing")
    page = report(run, out=tmp_path / "page.html", options=())
    assert "The model cannot be made from its folder" in page.text
    assert "Layers over time" in sections(page)


@pytest.mark.long
def test_several_runs_are_compared_by_what_they_differ_in(finished, run, tmp_path):
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace("lr: 0.01", "lr: 0.5"))
    page = report(finished, run, out=tmp_path / "page.html")
    first = page.html.split("<table>")[1].split("</table>")[0]
    header = re.findall(r"<th[^>]*>(.*?)</th>", first)
    assert header[:3] == ["run", "ended", "lowest validation loss"]
    assert header[-2:] == ["lr", "time"]
    assert re.findall(r"<td>(0\.01|0\.5)</td>", first) == ["0.01", "0.5"]
    assert sections(page)[0] == "Comparison"
    # Both are called "tiny": as much of their paths as tells them apart.
    assert len(set(sections(page))) == 3


def test_runs_that_differ_in_many_options_are_columns_of_the_comparison(finished, run, tmp_path):
    options = yaml.safe_load((run / "config.yaml").read_text())
    others = ("seed", "warmup_steps", "batch_tokens", "log_every", "length", "save_every")
    options |= {name: options[name] + 1 for name in others}
    (run / "config.yaml").write_text(yaml.safe_dump(options))
    page = report(finished, run, out=tmp_path / "page.html")
    table = page.html.split("<table>")[1].split("</table>")[0]
    assert table.count("<th ") == 1 + 2  # what is told, and two runs
    names = re.findall(r"<tr>\s*<td[^>]*>(.*?)</td>", table)
    assert names[0] == "ended"
    assert set(others) <= set(names)


TRIALS = [
    {"mixer": mixer, "lr": lr, "seed": seed, "status": status, "loss": loss, "steps": 9}
    for mixer, lr, seed, status, loss in [
        ("dot", 0.001, 0, "finished", 2.0), ("dot", 0.001, 1, "finished", 3.0),
        ("dot", 0.01, 0, "diverged", None), ("mix", 0.001, 0, "finished", 2.125),
        ("mix", 0.01, 0, "failed", None), ("mix", 0.01, 1, "waiting", None),
    ]
]  # fmt: skip


def sweep_in(path: Path, text: str) -> Path:
    path.mkdir()
    (path / "results.jsonl").write_text(text)
    return path


def test_a_sweep_has_means_over_seeds_and_says_how_trials_ended(tmp_path, on_a_phone):
    folder = sweep_in(tmp_path / "sweep", "".join(json.dumps(row) + "\n" for row in TRIALS))
    page = report(folder, out=tmp_path / "page.html")
    assert "6 trials: 3 finished, 1 diverged, 1 failed, 1 waiting." in page.text
    assert "1 trial without a result so far" in page.text
    cells = re.findall(r'<td class="number">(.*?)</td>', page.html)
    assert "2.5" in cells  # the mean of 2 and 3
    assert "2.125" in cells
    assert "1 of 2 failed, 1 of 2 waiting" in cells
    assert page.tags.count("img") == 1
    assert on_a_phone.smallest_label() >= 9


def test_a_sweep_without_results_or_with_damaged_ones_is_said(tmp_path):
    empty = sweep_in(tmp_path / "empty", "")
    assert "No trials." in report(empty, out=tmp_path / "a.html").text
    broken = sweep_in(tmp_path / "broken", '{\n{"mixer": "dot"}\n' + json.dumps(TRIALS[0]) + "\n")
    page = report(broken, out=tmp_path / "b.html")
    assert "damaged: line 1 of" in page.text
    assert "because mixer, lr or status is missing: 1 of 2 rows" in page.text
    assert "1 trial: 1 finished." in page.text


@pytest.mark.long
def test_by_default_the_page_of_one_folder_lies_in_it(run):
    done("report", run, "--no-certify")
    assert (run / "report.html").is_file()


@pytest.mark.parametrize("make", [True, False])
def test_a_folder_of_something_else_is_refused(tmp_path, make):
    other = tmp_path / "other"
    if make:
        other.mkdir()
    assert "FOLDER must be the folder of a run or of a sweep" in refused("report", other)


@pytest.mark.parametrize(
    "model",
    [
        ga.models.VisionTransformer(8, 4, 3, 16, 1, 2, channels=1),
        ga.models.SwinTransformer((8, 16), 2, 3, 8, (1,), (2,), window_size=2),
    ],
    ids=["VisionTransformer", "SwinTransformer"],
)
def test_models_of_images_are_certified_on_an_image_of_their_size(model):
    image, name = certificates._probe(model, None)
    assert model(image).shape == (1, 3)
    assert name == "an image of random pixels"
