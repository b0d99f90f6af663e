"""`graphattn embed`: FASTA and structures to files of features."""

from __future__ import annotations

import gzip
import os
import threading
from pathlib import Path

import numpy
import pytest
import torch
from cli_helpers import call, done, refused, shared
from typer.testing import Result

import graphattn as ga

FASTA = ">sp|P1 first\nMKVLAGHWY\n>second\nacd-ef\n>second\nGGWXK\n"


pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


@pytest.fixture(scope="module")
def model() -> ga.models.ProteinModel:
    torch.manual_seed(3)
    return ga.models.ProteinModel(16, 2, 2, mixer="mix", mixer_options={"edge_hidden": 8}).eval()


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    model.save_pretrained(path)
    return path


def fasta(text: str = FASTA, name: str = "three.fasta") -> Path:
    Path(name).write_text(text)
    return Path(name)


def test_every_record_has_its_features_and_their_mean(model, folder):
    result = done("embed", fasta(), "--model", folder)
    assert result.stdout.splitlines()[-1] == "three-embeddings.npz"
    assert not result.stderr
    with numpy.load("three-embeddings.npz") as file:
        arrays = dict(file)
    assert arrays["names"].tolist() == ["sp|P1 first", "second", "second"]
    assert arrays["lengths"].tolist() == [9, 5, 5]
    assert "".join(arrays["letters"]) == "MKVLAGHWYACDEFGGWXK"
    assert arrays["numbers"].tolist() == [*range(1, 10), *range(1, 6), *range(1, 6)]
    assert set(arrays["chains"]) == {""}
    assert arrays["residues"].dtype == numpy.float32
    parts = numpy.split(arrays["residues"], [9, 14])
    for features, mean, text in zip(
        parts, arrays["means"], ("MKVLAGHWY", "ACDEF", "GGWXK"), strict=True
    ):
        expected = model.embed(text)
        torch.testing.assert_close(torch.tensor(features), expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(torch.tensor(mean), expected.mean(0), rtol=0, atol=1e-5)


def test_a_file_of_torch_and_a_folder_hold_the_same(folder):
    done("embed", fasta(), "--model", folder)
    done("embed", fasta(), "--model", folder, "--out", "a.pt")
    done("embed", fasta(), "--model", folder, "--out", "parts")
    tensors = torch.load("a.pt", weights_only=True)
    with numpy.load("three-embeddings.npz") as file:
        assert numpy.array_equal(tensors["residues"].numpy(), file["residues"])
        assert tensors["names"] == file["names"].tolist()
        whole = file["residues"]
    names = ["sp_P1.npz", "second-2.npz", "second.npz"]
    assert sorted(path.name for path in Path("parts").iterdir()) == sorted(names)
    parts = [numpy.load(Path("parts", name)) for name in (names[0], names[2], names[1])]
    assert numpy.array_equal(numpy.concatenate([part["residues"] for part in parts]), whole)
    assert [part["names"].tolist() for part in parts] == [["sp|P1 first"], ["second"], ["second"]]


def test_a_structure_is_read_in_space_with_its_own_numbers(model, folder):
    path = shared("structure/pdb/1a8o.pdb")
    done("embed", path, "--model", folder, "--out", "one.npz")
    structure = ga.data.read_structure(path)
    with numpy.load("one.npz") as file:
        assert file["names"].tolist() == ["1a8o"]
        assert file["numbers"].tolist() == structure.residue_numbers.tolist()
        assert set(file["chains"]) == {"A"}
        features = torch.tensor(file["residues"])
    torch.testing.assert_close(features, model.embed(structure), rtol=0, atol=1e-5)
    assert (features - model.embed(structure.sequence)).abs().max() > 1e-3


def test_chains_are_chosen_by_name(model, folder):
    path = shared("structure/pdb/1tim.cif")
    done("embed", path, "--model", folder, "--chains", "B", "--out", "b.npz")
    with numpy.load("b.npz") as file:
        assert set(file["chains"]) == {"B"}
        features = torch.tensor(file["residues"])
    expected = model.embed(ga.data.read_structure(path, chains="B"))
    torch.testing.assert_close(features, expected, rtol=0, atol=1e-5)
    assert "'Q'" in refused("embed", path, "--model", folder, "--chains", "B,Q")
    reason = refused("embed", fasta(), "--model", folder, "--chains", "A")
    assert "--chains can only be used with a structure" in reason


def test_a_preset_warns_that_its_weights_are_random_and_repeats_them_by_the_seed():
    runs = []
    for seed in (0, 0, 1):
        result = done("embed", fasta(), "--preset", "protein-structure-1m", "--seed", str(seed))
        assert "are random" in result.stderr
        with numpy.load("three-embeddings.npz") as file:
            runs.append(file["means"])
    assert numpy.array_equal(runs[0], runs[1])
    assert not numpy.array_equal(runs[0], runs[2])


def test_a_model_of_sequences_reads_chains_one_by_one(tmp_path):
    encoder = ga.models.SequenceEncoder(22, 8, 1, 2).eval()
    encoder.save_pretrained(tmp_path / "encoder")
    path = shared("structure/pdb/1tim.cif")
    done("embed", path, "--model", tmp_path / "encoder", "--out", "e.npz")
    encode = ga.data.ProteinTokenizer().encode
    chains = ga.data.read_structure(path).split()
    expected = torch.cat([encoder.encode(encode(chain.sequence)) for chain in chains])
    with numpy.load("e.npz") as file:
        torch.testing.assert_close(torch.tensor(file["residues"]), expected, rtol=0, atol=1e-6)


def test_no_weights_are_made_unless_asked_for(folder, tmp_path):
    for arguments, says in [
        ((), "give either --model FOLDER"),
        (("--model", folder, "--preset", "protein-structure-1m"), "not both"),
        (("--preset", "digits"), "--preset must be one of"),
        (("--model", tmp_path / "none"), "does not exist"),
        (("--model", folder, "--out", "a.csv"), "the ending must be one of '.npz', '.pt'"),
        (("--model", folder, "--out", "no/a.npz"), "there is no folder no"),
    ]:
        assert says in refused("embed", fasta(), *arguments)
        assert len(list(Path().iterdir())) == 1
    ga.models.SequenceEncoder(5, 8, 1, 2).save_pretrained(tmp_path / "dna")
    reason = call("embed", fasta(), "--model", tmp_path / "dna").stderr
    assert "got a SequenceEncoder of 5 tokens" in reason


def test_broken_and_other_files_are_refused_in_a_line(folder):
    for text, name, says in [
        ("just words", "a.txt", "must be a FASTA, PDB or mmCIF file"),
        (">a\n", "b.fasta", "no sequence"),
        (">a\n---\n", "c.fasta", "all its sequences contain only gaps"),
    ]:
        assert says in refused("embed", fasta(text, name), "--model", folder)
    refused("embed", "missing.fasta", "--model", folder)


def test_dna_is_warned_of_and_gzip_is_read(folder):
    path = Path("dna.fasta.gz")
    path.write_bytes(gzip.compress(b">chr1\n" + b"ACGTTGCA" * 5))
    result = done("embed", path, "--model", folder)
    assert "1 of 1 records look like DNA" in result.stderr
    assert result.stdout.splitlines()[-1] == "dna-embeddings.npz"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with a name")
@pytest.mark.parametrize("is_packed", [False, True])
def test_a_pipe_is_read_as_the_file_that_it_holds(folder, is_packed):
    """A named pipe gives the embeddings, and the errors, of the file that it holds.

    A pipe can be read but once, and the command looks at its content first.
    """
    done("embed", fasta(), "--model", folder)
    name = "pipe.gz" if is_packed else "pipe"
    os.mkfifo(name)

    def through(text: str) -> Result:
        content = gzip.compress(text.encode()) if is_packed else text.encode()
        writer = threading.Thread(target=Path(name).write_bytes, args=(content,), daemon=True)
        writer.start()
        result = call("embed", name, "--model", folder, "--out", "pipe.npz")
        writer.join(timeout=10)
        return result

    assert through(FASTA).exit_code == 0
    with numpy.load("three-embeddings.npz") as file, numpy.load("pipe.npz") as piped:
        assert numpy.array_equal(file["residues"], piped["residues"])
    result = through(">a\nMK\n>b\nM1\n")
    assert result.exit_code == 2
    assert f"{name}: line 4: '1' in a sequence" in result.stderr


def test_records_of_gaps_are_left_out_with_a_warning(folder):
    result = done("embed", fasta(">a\nMK\n>b\n--\n>c\nVL\n"), "--model", folder, "--out", "ac.npz")
    assert "1 of 3 records contain only gaps" in result.stderr
    with numpy.load("ac.npz") as file:
        assert file["names"].tolist() == ["a", "c"]


def test_inserted_residues_are_told_apart(folder):
    """Antibodies have residues 52 and 52A; and chains may be named with spaces between them."""
    lines = [
        f"ATOM      1  CA  GLY {chain}{number}   {3.8 * place:8.3f}   0.000   0.000  1.00  0.00"
        for chain in "HL"
        for place, number in enumerate(["  52 ", "  52A", "  53 "])
    ]
    Path("fv.pdb").write_text("\n".join(lines))
    done("embed", "fv.pdb", "--model", folder, "--chains", "L, H", "--out", "fv.npz")
    with numpy.load("fv.npz") as file:
        assert file["chains"].tolist() == ["L"] * 3 + ["H"] * 3
        assert file["numbers"].tolist() == [52, 52, 53] * 2
        assert file["insertion_codes"].tolist() == ["", "A", ""] * 2


def test_a_folder_that_cannot_be_made_is_refused_before_the_work(folder, monkeypatch):
    monkeypatch.setattr("graphattn.cli.embed.features_of", None)
    Path("taken").write_text("")
    for out in ("taken", "taken/inside"):
        reason = refused("embed", fasta(), "--model", folder, "--out", out)
        assert "--out must not be inside a file, but taken is a file" in reason
