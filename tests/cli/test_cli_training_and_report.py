"""`graphattn demo` trains, draws, and writes a report that needs no other file."""

from __future__ import annotations

import base64
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from cli_helpers import Page, done, page_of, refused, shared

from graphattn.cli.demo import training
from graphattn.cli.demo.sample import printable

pytest.importorskip("matplotlib", reason="figures need matplotlib (the extra `plots`)")

FIGURES = 9 + 3 + 2 + 1  # of graphs, mechanisms, filters and losses

HOSTILE = """<script>document.title='owned'</script>"><img src=x onerror=alert(1)>&amp;{{7*7}}"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("demo") / "not yet" / "there"


@pytest.fixture(scope="module")
def output(folder) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "CHOOSING_TOKENS", 1024)
        patch.setattr(training, "JUDGING_TOKENS", 2048)
        return done("demo", "--tokens", 64, "--steps", 6, "--out", folder).output


def test_the_report_s_path_is_the_last_line(output, folder):
    assert output.splitlines()[-1] == str(folder / "report.html")
    assert (folder / "report.html").exists()


def test_both_models_are_trained_from_near_the_guess_by_frequency(output):
    table = output.split("Training:")[1]
    guess = float(re.search(r"loses\s+([\d.]+)\s+nats", table)[1])
    for name in training.MODELS:
        row = next(line for line in table.splitlines() if line.strip().startswith(name))
        before, after, gain, error = map(float, row.split()[-4:])
        assert before == pytest.approx(guess, abs=0.6)
        assert gain == pytest.approx(guess - after, abs=0.0011)  # of numbers with three digits
        assert 0 < error < 0.5


def test_the_report_holds_every_picture_and_table_and_needs_no_other_file(output, folder):
    page = page_of(folder / "report.html")
    assert page.tags.count("img") == FIGURES
    assert page.tags.count("table") == 3
    assert "script" not in page.tags
    assert all(link.startswith("data:image/png;base64,") for link in page.links)
    embedded = [base64.b64decode(link.split(",")[1]) for link in page.links]
    assert all(picture.startswith(b"\x89PNG") for picture in embedded)
    assert [file.name for file in folder.iterdir()] == ["report.html"]
    for words in ("path, window 2", "KrauseAttention", "attention, consensus (MIX)"):
        assert words in page.text


def test_every_number_of_the_terminal_is_in_the_report(output, folder):
    page = page_of(folder / "report.html")
    tables = output.split("done in")[0].split("\n", 1)[1]
    tables = "\n".join(line for line in tables.splitlines() if "━" not in line)
    numbers = set(re.findall(r"\d[\d,.]*\d", page.text))
    assert set(re.findall(r"\d[\d,.]*\d", tables)) <= numbers


@pytest.mark.long
def test_a_hostile_file_name_and_header_are_text_in_the_report(tmp_path):
    file = tmp_path / (HOSTILE.replace("/", "\u2215") + "\x1b[31m.fasta")
    file.write_text(f">{HOSTILE[:39]}\n{'MKVLAAGHNQ' * 8}\n")
    result = done("demo", file, "--steps", "2", "--out", tmp_path / "out")
    assert "\x1b[31m" not in result.output
    page = page_of(tmp_path / "out" / "report.html")
    assert "script" not in page.tags
    assert page.tags.count("img") == FIGURES
    assert "onerror=alert(1)" in page.text  # as text
    assert "{{7*7}}" in page.text
    assert HOSTILE[:39] in page.text
    assert "\x1b" not in page.html


def test_a_file_name_that_is_no_text_is_shown_by_its_escapes():
    assert printable("a\udce9\n\x1b[1mb ä.txt") == "a\\udce9\\n\\x1b[1mb ä.txt"


def chromium() -> str:
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if shutil.which(name):
            return name
    pytest.skip("no Chromium on this machine")


@pytest.mark.long
def test_the_report_opens_in_a_browser_without_errors(output, folder):
    options = "--headless --no-sandbox --disable-gpu --enable-logging=stderr --dump-dom"
    command = [chromium(), *options.split(), "--virtual-time-budget=2000"]
    command.append((folder / "report.html").as_uri())
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0
    assert "CONSOLE" not in run.stderr  # what the page itself complains of
    assert Page(run.stdout).tags.count("img") == FIGURES


@pytest.mark.long
def test_a_structure_is_trained_on_its_neighbours_in_space_and_claims_nothing_held_out(tmp_path):
    file = shared("structure/pdb/1aki.pdb")
    text = " ".join(done("demo", file, "--steps", 2, "--out", tmp_path).output.split())
    assert "attention, consensus (MIX)" in text
    assert "a residue sees the 16 residues with the nearest C-alpha atoms in any chain" in text
    assert "Nothing is held out, because there is only this structure" in text
    page = " ".join(page_of(tmp_path / "report.html").text.split())
    assert "Attention weights among neighbours in space" in page
    assert not re.search(r"[Hh]eld[- ]out", page.replace("Nothing is held out", ""))


@pytest.mark.long
def test_no_training_without_steps_and_none_on_too_few_tokens(tmp_path):
    file = tmp_path / "short.txt"
    file.write_text("abc")
    result = done("demo", file, "--steps", "5", "--out", tmp_path)
    assert "no training, because it needs 32 tokens" in result.output
    page = page_of(tmp_path / "report.html")
    assert page.tags.count("img") == FIGURES - 1
    assert page.tags.count("table") == 2


def test_a_folder_that_cannot_be_written_is_one_line_and_exit_code_2(tmp_path):
    (tmp_path / "file").write_text("in the way")
    refused("demo", "--steps", 0, "--out", tmp_path / "file" / "below")
