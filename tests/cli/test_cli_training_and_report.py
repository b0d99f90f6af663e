"""`graphattn demo` trains, draws, and writes a report that needs no other file."""

from __future__ import annotations

import base64
import math
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner, Result

import graphattn as ga
from graphattn.cli.app import app
from graphattn.cli.demo import training
from graphattn.cli.demo.sample import load_sample, printable

pytest.importorskip("matplotlib", reason="figures need matplotlib (the extra `plots`)")

HOSTILE = """<script>document.title='owned'</script>"><img src=x onerror=alert(1)>&amp;{{7*7}}"""


def demo(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["demo", *map(str, arguments)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("demo") / "not yet" / "there"


@pytest.fixture(scope="module")
def output(folder) -> str:
    result = demo("--tokens", "64", "--steps", "6", "--out", folder)
    assert result.exit_code == 0, result.output
    return result.output


class Page(HTMLParser):
    """Tags, images and visible text of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.links += [value for name, value in attributes if name in ("src", "href")]

    def handle_data(self, data):
        self.text += data


def test_the_report_s_path_is_the_last_line(output, folder):
    assert output.splitlines()[-1] == str(folder / "report.html")
    assert (folder / "report.html").exists()


def test_both_models_are_trained_and_their_held_out_losses_fall(output):
    table = output.split("Training:")[1]
    for name in training.MODELS:
        row = next(line for line in table.splitlines() if line.strip().startswith(name))
        before, best, last = map(float, row.split()[-3:])
        # Untrained models know nothing: about the logarithm of the 104 tokens there are.
        assert before == pytest.approx(math.log(104), abs=0.6)
        assert best < before - 0.2
        assert best <= last


def test_the_report_holds_every_picture_and_table_and_needs_no_other_file(output, folder):
    page = Page((folder / "report.html").read_text(encoding="utf-8"))
    assert page.tags.count("img") == 4
    assert page.tags.count("table") == 3
    assert "script" not in page.tags
    assert all(link.startswith("data:image/png;base64,") for link in page.links)
    embedded = [base64.b64decode(link.split(",")[1]) for link in page.links]
    files = ("graphs.png", "attention.png", "filter.png", "losses.png")
    assert embedded == [(folder / name).read_bytes() for name in files]
    assert all(picture.startswith(b"\x89PNG") for picture in embedded)
    for words in ("path, window 2", "KrauseAttention", "attention, consensus (MIX)"):
        assert words in page.text


def test_every_number_of_the_terminal_is_in_the_report(output, folder):
    page = Page((folder / "report.html").read_text(encoding="utf-8"))
    tables = output.split("done in")[0].split("\n", 1)[1]
    tables = "\n".join(line for line in tables.splitlines() if "━" not in line)
    said = set(re.findall(r"\d[\d,.]*\d", page.text))
    assert set(re.findall(r"\d[\d,.]*\d", tables)) <= said


def test_a_hostile_file_name_and_header_are_text_in_the_report(tmp_path):
    file = tmp_path / (HOSTILE.replace("/", "\u2215") + "\x1b[31m.fasta")
    file.write_text(f">{HOSTILE[:39]}\n{'MKVLAAGHNQ' * 8}\n")
    result = demo(file, "--steps", "2", "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "\x1b[31m" not in result.output
    html = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    page = Page(html)
    assert "script" not in page.tags
    assert page.tags.count("img") == 4
    assert "onerror=alert(1)" in page.text  # as text
    assert "{{7*7}}" in page.text
    assert HOSTILE[:39] in page.text
    assert "\x1b" not in html


def test_a_file_name_that_is_no_text_is_shown_by_its_escapes():
    assert printable("a\udce9\n\x1b[1mb ä.txt") == "a\\udce9\\n\\x1b[1mb ä.txt"


def chromium() -> str:
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if shutil.which(name):
            return name
    pytest.skip("no Chromium on this machine")


def test_the_report_opens_in_a_browser_without_errors(output, folder):
    run = subprocess.run(
        [
            chromium(),
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--enable-logging=stderr",
            "--virtual-time-budget=2000",
            "--dump-dom",
            (folder / "report.html").as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0
    assert "CONSOLE" not in run.stderr  # what the page itself complains of
    assert Page(run.stdout).tags.count("img") == 4


def test_a_structure_is_drawn_with_its_neighbours_in_space(tmp_path):
    file = Path(__file__).parents[3] / "shared" / "data" / "structure" / "pdb" / "1aki.pdb"
    if not file.exists():
        pytest.skip("real data not there: structure/pdb/1aki.pdb")
    result = demo(file, "--steps", "2", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert "attention, consensus (MIX)" in result.output


def test_no_training_without_steps_and_none_on_too_few_tokens(tmp_path):
    file = tmp_path / "short.txt"
    file.write_text("abc")
    result = demo(file, "--steps", "5", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert "no training: it needs 32 tokens" in result.output
    page = Page((tmp_path / "report.html").read_text())
    assert page.tags.count("img") == 3
    assert page.tags.count("table") == 2


def test_a_folder_that_cannot_be_written_is_one_line_and_exit_code_2(tmp_path):
    (tmp_path / "file").write_text("in the way")
    result = demo("--steps", "0", "--out", tmp_path / "file" / "below")
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1
    assert "Traceback" not in result.output


# The pieces it trains on.


def test_pieces_hold_every_token_once_and_mark_their_padding():
    sequences = (torch.arange(100), torch.arange(100, 237), torch.arange(237, 500))
    pieces = training.cut(sequences)
    assert pieces is not None
    assert pieces.tokens.shape == pieces.valid.shape == (12, 46)  # 3 + 3 + 6 pieces
    assert pieces.valid.sum(1).min() >= 33
    assert pieces.tokens[pieces.valid].tolist() == list(range(500))


def test_nothing_held_out_is_trained_on(monkeypatch):
    """Every piece is made of one token of its own; training and evaluation must not share one."""
    seen: list[tuple[bool, set[int]]] = []
    original = training.masked_loss

    def spy(model, batch):
        seen.append((torch.is_grad_enabled(), set(batch.pieces.tokens.flatten().tolist())))
        return original(model, batch)

    monkeypatch.setattr(training, "masked_loss", spy)
    sample = load_sample(None, 64)
    sequences = (torch.arange(40).repeat_interleave(training.LONGEST_PIECE),)
    sample = replace(sample, sequences=sequences, vocab_size=40)
    assert training.train_models(sample, 3, 0, Console(quiet=True)) is not None
    trained = set().union(*(tokens for learns, tokens in seen if learns))
    evaluated = set().union(*(tokens for learns, tokens in seen if not learns))
    assert evaluated == {36, 37, 38, 39}
    assert trained
    assert trained <= set(range(36))


def test_an_evaluation_has_64_pieces_spread_over_all_that_are_held_out():
    def held(count):
        tokens = torch.arange(count)[:, None].expand(-1, 8)
        return training.Pieces(tokens, torch.ones(count, 8, dtype=torch.bool))

    many = training.evaluation_batch(held(1000), 1000)
    first = many.pieces.tokens[:, 0]
    assert len(first.unique()) == 64
    assert (first.min(), first.max()) == (0, 999)
    few = training.evaluation_batch(held(3), 3)
    assert few.pieces.tokens[:, 0].bincount().tolist() == [21, 21, 21]
    assert len(few.masked.unique(dim=0)) > 3  # another mask each time


def test_the_loss_of_guessing_by_frequency_is_the_cross_entropy_of_the_counts():
    pieces = training.Pieces(torch.tensor([[0, 0, 0, 1]]), torch.ones(1, 4, dtype=torch.bool))
    evaluation = training.MaskedBatch(
        training.Pieces(torch.tensor([[0, 1]]), torch.ones(1, 2, dtype=torch.bool)),
        torch.tensor([[2, 2]]),
        torch.ones(1, 2, dtype=torch.bool),
    )
    expected = -(math.log(4 / 6) + math.log(2 / 6)) / 2  # one is added to every count
    assert training._frequency_loss(pieces, evaluation, 2) == pytest.approx(expected, rel=1e-6)


def test_training_stops_once_the_held_out_loss_rises(monkeypatch):
    """Four tokens at random: after learning their frequencies there is nothing left to learn."""
    torch.manual_seed(0)
    sample = load_sample(None, 64)
    noise = (torch.randint(4, (256,)),)
    sample = replace(sample, sequences=noise, vocab_size=4)
    monkeypatch.setattr(training, "MODELS", {"SA": "dot"})
    monkeypatch.setattr(training, "EVALUATIONS", 40)
    result = training.train_models(sample, 120, 0, Console(quiet=True))
    assert result is not None
    (run,) = result.runs
    assert run.stopped_early
    assert run.losses[-1][0] < 120
    assert run.best < run.losses[0][1]
    assert isinstance(run.model, ga.models.SequenceEncoder)
