"""Files that are not as a reader hopes: each is read as it is, or refused with its reason."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest
import torch

import graphattn as ga


def test_a_character_beyond_the_vocabulary_is_refused_and_not_taken_for_its_last(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("aé\naü", encoding="utf-8")
    tokenizer = ga.data.CharacterTokenizer("\naé")  # ü is behind é
    with pytest.raises(ga.data.FileFormatError, match=r"line 2: '\\xfc' \(U\+00FC\) is not in"):
        ga.data.load_corpus(path, tokenizer=tokenizer)


@pytest.mark.parametrize("seed", range(5))
def test_a_corpus_has_the_tokens_that_its_character_tokenizer_gives(tmp_path, seed):
    letters = [0x0A, 0x20, 0x61, 0x7E, 0x7F, 0x80, 0xE9, 0xFFFD, 0x10000, 0x1F600, 0x10FFFF]
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(letters), generator=generator).tolist()
    known = [chr(letters[n]) for n in order[:6]]
    tokenizer = ga.data.CharacterTokenizer("".join(known))
    for character in map(chr, letters):
        path = tmp_path / "text.txt"
        text = f"{known[0]}x{character}".replace("x", known[1])
        path.write_text(text, encoding="utf-8", newline="")
        if text.isspace():
            continue
        if character in known:
            corpus = ga.data.load_corpus(path, tokenizer=tokenizer)
            assert torch.equal(corpus.tokens(0), tokenizer.encode(text))
        else:
            with pytest.raises(ga.data.FileFormatError, match="is not in the tokenizer"):
                ga.data.load_corpus(path, tokenizer=tokenizer)


def test_halves_of_characters_are_refused_where_no_file_could_keep_them():
    with pytest.raises(
        ValueError,
        match=r"vocabulary must have whole characters, got the lone surrogate '\\ud83d'",
    ):
        ga.data.CharacterTokenizer("\ud83d\ude00")
    with pytest.raises(
        ValueError, match=r"text must have only characters .* got .* '\\ud800' at position 1"
    ):
        ga.data.ByteTokenizer().encode("a\ud800")


def test_tokenizers_of_sequences_are_equal_by_their_kind():
    protein, nucleotide = ga.data.ProteinTokenizer(), ga.data.NucleotideTokenizer()
    assert protein == ga.data.ProteinTokenizer() != nucleotide
    assert len({protein, ga.data.ProteinTokenizer(), nucleotide}) == 2


@pytest.mark.parametrize("path", ["", 3, None])
def test_a_path_that_is_none_is_not_the_working_directory(path):
    with pytest.raises(ValueError, match="path must be the path of a file or folder, or a pattern"):
        ga.data.load_corpus(path)


def test_a_cache_that_is_no_folder_is_refused_by_its_name(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("to be")
    for cache in ("", path, 3):
        with pytest.raises(ValueError, match="cache must be a folder"):
            ga.data.load_corpus(path, cache=cache)
    assert sorted(tmp_path.iterdir()) == [path]


def test_a_path_that_is_too_long_is_refused_in_one_line():
    with pytest.raises(ga.data.FileFormatError, match="cannot be read: File name too long"):
        ga.data.load_corpus("a" * 5000)


def test_files_whose_names_are_no_utf8_are_read(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    try:
        Path(os.fsdecode(os.fsencode(folder) + b"/caf\xe9.txt")).write_text("to be")
    except OSError:
        pytest.skip("this file system has names of UTF-8 alone")
    for cache in (None, tmp_path / "cache"):
        assert ga.data.load_corpus(folder, cache=cache).names == ["caf\\xe9.txt"]


@pytest.mark.parametrize("shape", [(2, 2**32 - 1, 2**32 - 1), (1, 2**20, 2**20), (10**9, 10**3, 1)])
def test_images_that_a_header_makes_larger_than_any_memory_are_cut_off(tmp_path, shape):
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(b"\0\0\x08\x03" + struct.pack(">3I", *shape) + b"abc")
    with pytest.raises(ga.data.FileFormatError, match="is cut off"):
        ga.data.load_corpus(path)


def test_a_class_without_images_is_told_and_not_left_out(tmp_path):
    from PIL import Image

    for name in ("cat", "dog", ".hidden"):
        (tmp_path / name).mkdir()
    Image.new("L", (2, 2)).save(tmp_path / "cat" / "1.png")
    with pytest.raises(ga.data.FileFormatError, match="dog: is a class without images"):
        ga.data.load_corpus(tmp_path)
    Image.new("L", (2, 2)).save(tmp_path / "dog" / "1.png")
    assert ga.data.load_corpus(tmp_path).classes == ("cat", "dog")


ENTRY = """LOCUS       TOY                   72 bp    DNA     linear   UNA 01-JAN-2000
DEFINITION  A toy.
FEATURES             Location/Qualifiers
     CDS             3..8
ORIGIN
        1 acgtacgtac acgtacgtac acgtacgtac acgtacgtac acgtacgtac acgtacgtac
       61 acgtacgtac gt
//
"""


@pytest.mark.parametrize(
    ("old", "new", "line", "reason"),
    [
        (
            "        1 " + "acgtacgtac " * 5 + "acgtacgtac\n",
            "",
            6,
            "begins with base 61, but 0 bases come before it",
        ),
        ("       61 acgtacgtac gt\n", "", 1, "LOCUS says 72 bp, but this entry has 60"),
        ("acgtacgtac gt\n", "acgtacgtac\n", 1, "LOCUS says 72 bp, but this entry has 70"),
        ("       61 ", "       62 ", 7, "begins with base 62, but 60 bases come before it"),
    ],
)
def test_genbank_entries_that_have_lost_bases_are_refused(tmp_path, old, new, line, reason):
    path = tmp_path / "toy.gb"
    path.write_text(ENTRY)
    assert len(ga.data.read_genbank(path)[0].sequence) == 72
    assert old in ENTRY
    path.write_text(ENTRY.replace(old, new))
    with pytest.raises(ga.data.FileFormatError, match=reason) as caught:
        ga.data.read_genbank(path, feature="CDS")
    assert caught.value.line == line
