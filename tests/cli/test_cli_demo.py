"""`graphattn demo` on real and on broken files."""

from __future__ import annotations

import gzip
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import networkx
import numpy
import pytest
from cli_helpers import call, done, refused, shared
from typer.testing import Result

LAYERS = (
    "SelfConsensus",
    "SelfConsensus, target",
    "CrossConsensus",
    "GaussianKernelAttention",
    "KrauseAttention",
    "DotProductAttention",
    "DotProductAttention value-less",
    "DotProductAttention, cross",
)


pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


def demo(*arguments: str | Path, steps: int = 0) -> Result:
    with tempfile.TemporaryDirectory() as out:
        options = [] if "--out" in arguments else ["--out", out]
        return call("demo", *arguments, "--steps", steps, *options)


def row(output: str, start: str) -> str:
    return next(line for line in output.splitlines() if line.strip().startswith(start))


def numbers(text: str) -> list[float]:
    return [float(n.replace(",", "")) for n in re.findall(r"-?\d[\d,]*\.?\d*(?:e-?\d+)?", text)]


@pytest.fixture(scope="module")
def default_output() -> str:
    result = demo("--tokens", "64")
    assert result.exit_code == 0, result.output
    return result.output


def test_the_default_needs_no_file_and_shows_every_layer(default_output):
    assert "pydoc_data.topics" in default_output
    for name in LAYERS:
        assert name in default_output


def test_the_fiedler_value_of_the_path_is_networkx_s_and_lies_between_its_bounds(default_output):
    line = row(default_output, "path, window 2")
    tokens, edges, degree, lower, value, upper, step = numbers(line.split("window 2")[1])
    graph = networkx.Graph((i, j) for i in range(64) for j in (i + 1, i + 2) if j < 64)
    laplacian = networkx.laplacian_matrix(graph, sorted(graph)).toarray()
    spectrum = numpy.linalg.eigvalsh(laplacian)
    assert (tokens, edges) == (64, 2 * graph.number_of_edges())
    assert degree == pytest.approx(2 * graph.number_of_edges() / 64, abs=0.05)
    assert value == pytest.approx(spectrum[1], rel=5e-3)
    assert step == pytest.approx(1 / (2 * spectrum[-1]), rel=5e-3)
    assert lower <= value <= upper
    assert "✓" in line


def test_nothing_is_lost_on_a_terminal_of_80_columns(default_output):
    assert max(map(len, default_output.splitlines())) <= 80
    for name in ("tokens", "edges", "degree", "at least", "at most", "max step", "change"):
        assert name in default_output
    assert "…" not in default_output


def test_energy_and_spread_fall(default_output):
    table = default_output.split("Layers:")[1]
    falls = re.findall(r"([+-][\d.]+)%", table)
    assert len(falls) == 9
    assert all(float(fall) < 0 for fall in falls)


@pytest.mark.long
def test_two_runs_with_one_seed_agree(default_output):
    def without_times(text: str) -> str:
        return re.sub(r"[\d.]+ (ms|s)\b|─|\S+report.html", "", text)

    again = demo("--tokens", "64").output
    assert without_times(again).split() == without_times(default_output).split()


@pytest.mark.long
def test_a_structure_brings_its_nearest_neighbour_graph():
    output = demo(shared("structure/pdb/1aki.pdb")).output
    assert "129 residues" in output
    assert numbers(row(output, "16 nearest C-alpha").split("alpha")[1])[:2] == [129, 129 * 16]
    assert output.count("16 nearest C-alpha") == 2  # as a graph, and under Krause attention


@pytest.mark.long
def test_mmcif_works_like_pdb():
    pdb = demo(shared("structure/pdb/1a8o.pdb")).output
    cif = demo(shared("structure/pdb/1a8o.cif")).output
    for name in ("path, window 2", "16 nearest C-alpha", "C-alpha within 8"):
        assert row(pdb, name) == row(cif, name)


def test_fasta_brings_a_packed_batch():
    output = demo(shared("protein/sprot_archaea.fasta"), "--tokens", "512").output
    assert "record 1 of 2,872" in output
    line = row(output, "batch of 2 paths")
    assert numbers(line.split("paths")[1])[0] == 512


@pytest.mark.long
def test_gzipped_dna(tmp_path):
    file = tmp_path / "genome.fna.gz"
    file.write_bytes(gzip.compress(b">chr1\n" + b"ACGTTGCA" * 20))
    result = demo(file)
    assert result.exit_code == 0
    assert "160 bases" in result.output


@pytest.mark.parametrize("text", ["a", "ab", "abc", "abcd", "abcde"])
def test_very_short_texts(tmp_path, text):
    file = tmp_path / "short.txt"
    file.write_text(text)
    result = demo(file)
    assert result.exit_code == 0, result.output
    assert "violated" not in result.output


@pytest.mark.long
def test_a_hostile_file_name_is_printed_as_it_is(tmp_path):
    file = tmp_path / "[red]not markup[bold].txt"
    file.write_text("some text, long enough for a graph")
    result = demo(file)
    assert result.exit_code == 0
    assert "[red]not markup[bold].txt" in result.output


@pytest.mark.long
def test_a_record_of_gaps_and_one_of_another_kind_are_passed_over(tmp_path):
    file = tmp_path / "mixed.fasta"
    file.write_text(">gaps\n-----\n>dna\nACGTACGTAC\n>protein\nMKVLAGHW\n>more\nGGTTAACC-\n")
    output = demo(file).output
    assert "record 2 of 4 (dna): 10 bases" in output
    assert numbers(row(output, "batch of 2 paths").split("paths")[1])[0] == 18


@pytest.mark.long
def test_names_with_codes_of_emoji_and_escapes_stay_what_they_are(tmp_path):
    file = tmp_path / ":fire: \x1b[2J.txt"
    file.write_text("some text")
    out = tmp_path / ":fire:\tfolder"
    result = demo(file, "--out", out)
    assert result.exit_code == 0, result.output
    assert ":fire: \\x1b[2J.txt" in result.output
    assert result.stdout_bytes.splitlines()[-1] == os.fsencode(out / "report.html")


@pytest.mark.long
@pytest.mark.parametrize("columns", ["30", "80", "200"])
def test_a_terminal_of_any_width_shows_every_name(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    output = demo("--tokens", "8").output
    for name in ("path, window 2", "SelfConsensus", "another track, all of it"):
        assert name in output


@pytest.mark.long
def test_an_encoding_that_lacks_a_character_shows_a_question_mark(tmp_path):
    command = [sys.executable, "-m", "graphattn.cli", "demo", "--steps", "0", "--tokens", "8"]
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    run = subprocess.run(command, capture_output=True, cwd=tmp_path, env=environment)
    assert run.returncode == 0, run.stderr.decode()
    assert b"1 / (2 ?_max)" in run.stdout
    assert run.stdout.splitlines()[-1] == b"graphattn-demo/report.html"


def test_labels_of_figures_can_be_read_on_a_phone(on_a_phone):
    assert demo("--tokens", "64", steps=1).exit_code == 0
    assert len(on_a_phone) == 9 + 3 + 2 + 1  # graphs, mechanisms, filters, losses
    assert on_a_phone.smallest_label() >= 9


BAD_PDB = (
    "ATOM      1  CA  ALA A   1      11.104   6.134  -6.504  1.00  0.00           C\n"
    "ATOM      2  CA  ALA A   2      xx.104   6.134  -6.504  1.00  0.00           C\n"
)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("missing.txt", None, ["missing.txt", "no such file"]),
        ("empty.txt", b"", ["empty.txt", "empty"]),
        ("blank.txt", b"\n\n  \n", ["blank.txt", "empty"]),
        ("binary.txt", b"\x00\x01\x02\xff", ["binary.txt"]),
        ("latin.txt", b"caf\xe9 au lait", ["latin.txt"]),
        ("broken.gz", b"\x1f\x8b garbage", ["broken.gz"]),
        ("bad.fasta", b"MKV\n>late\nMKV\n", ["bad.fasta", "line 1"]),
        ("odd.fasta", b">one\nMKV\nMK7V\n", ["odd.fasta", "line 3"]),
        ("bare.fasta", b">one\nMKV\n>two\n", ["bare.fasta", "line 3"]),
        ("bad.pdb", BAD_PDB.encode(), ["bad.pdb", "line 2"]),
        ("gaps.fasta", b">a\n---\n>b\n-\n", ["gaps.fasta", "gaps"]),
        ("none.pdb", b"HEADER    NOTHING HERE\nEND\n", ["none.pdb"]),
        ("bad.cif", b"data_x\nloop_\n_atom_site.id\n", ["bad.cif"]),
    ],
)
def test_a_bad_file_is_one_line_and_exit_code_2(tmp_path, name, content, says):
    file = tmp_path / name
    if content is not None:
        file.write_bytes(content)
    reason = refused("demo", file)
    assert all(fragment in reason for fragment in says)


def test_a_folder_a_pipe_and_a_seed_beyond_torch_s_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert "is a pipe" in refused("demo", tmp_path / "pipe")
    assert "is a folder without structures" in refused("demo", tmp_path)
    result = demo("--seed", str(2**63))
    assert result.exit_code == 2
    assert "Traceback" not in result.output


def test_the_command_says_its_version():
    assert re.fullmatch(r"graphattn \d+\.\d+\.\d+\n", done("--version").stdout)


@pytest.mark.long
def test_the_installed_command_says_its_version():
    command = [sys.executable, "-m", "graphattn.cli", "--version"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert re.fullmatch(r"graphattn \d+\.\d+\.\d+\n", text)
