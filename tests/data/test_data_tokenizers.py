"""Characters, residues and bases as tokens."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from graphattn.data import (
    CharacterTokenizer,
    NucleotideTokenizer,
    ProteinTokenizer,
    read_text,
    tokenizer_for_sequence,
)

AMINO_ACIDS = "ACDEFGHIKLMNPQRSTVWY"
IUPAC_BASES = "ACGTURYSWKMBDHVN"
SEQUENCE_TOKENIZERS = [ProteinTokenizer(), NucleotideTokenizer()]


@given(st.text(min_size=1))
def test_any_text_survives_its_own_tokenizer(text):
    tokenizer = CharacterTokenizer.from_text(text)
    tokens = tokenizer.encode(text)
    assert tokens.dtype == torch.long
    assert tokens.shape == (len(text),)
    assert tokenizer.decode(tokens) == text
    assert tokenizer.decode(tokens.tolist()) == text


@given(st.text(min_size=1))
def test_the_vocabulary_is_the_sorted_distinct_characters(text):
    tokenizer = CharacterTokenizer.from_text(text)
    # NumPy sorts code points by itself.
    points = np.unique(np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32))
    assert [ord(char) for char in tokenizer.vocabulary] == points.tolist()
    assert tokenizer.vocab_size == len(points)


@given(st.text(min_size=1), st.text())
def test_a_character_outside_the_vocabulary_is_named_where_it_first_stands(known, text):
    unknown = [position for position, char in enumerate(text) if char not in known]
    assume(unknown)
    with pytest.raises(ValueError, match="at position") as caught:
        CharacterTokenizer.from_text(known).encode(text)
    assert f"U+{ord(text[unknown[0]]):04X}) at position {unknown[0]}" in str(caught.value)
    assert str(caught.value).isascii()


def test_unknown_character_error_reads_well():
    with pytest.raises(ValueError, match="text must have only") as caught:
        CharacterTokenizer.from_text("abc").encode("cab?")
    assert str(caught.value) == (
        "text must have only the 3 characters of the vocabulary, got '?' (U+003F) at position 3"
    )


def test_empty_text_is_zero_tokens():
    tokenizer = CharacterTokenizer("ab")
    assert tokenizer.encode("").shape == (0,)
    assert tokenizer.encode("").dtype == torch.long
    assert tokenizer.decode([]) == tokenizer.decode(tokenizer.encode("")) == ""


def test_a_tokenizer_needs_distinct_characters():
    with pytest.raises(ValueError, match="at least one character"):
        CharacterTokenizer("")
    with pytest.raises(ValueError, match="at least one character"):
        CharacterTokenizer.from_text("")
    with pytest.raises(ValueError, match="once, got 'b' twice"):
        CharacterTokenizer("abcb")


@pytest.mark.parametrize("tokenizer", [CharacterTokenizer("abc"), *SEQUENCE_TOKENIZERS], ids=repr)
def test_decode_names_a_token_that_is_none(tokenizer):
    size = tokenizer.vocab_size
    for wrong in (-1, size, 10**9):
        with pytest.raises(ValueError, match=rf"from 0 to {size - 1}, got {wrong}"):
            tokenizer.decode([0, wrong])
        with pytest.raises(ValueError, match=rf"from 0 to {size - 1}, got {wrong}"):
            tokenizer.decode(torch.tensor([0, wrong]))
    for wrong in (torch.tensor([0.0]), torch.tensor([True]), [1.0], [None]):
        with pytest.raises(ValueError, match="tokens must be integers"):
            tokenizer.decode(wrong)
    for shape in ([1, 1], []):
        with pytest.raises(ValueError, match=r"tokens must have shape \[N\], got"):
            tokenizer.decode(torch.zeros(shape, dtype=torch.long))


def test_shakespeare_has_65_characters_and_comes_back(real_file):
    text = read_text(real_file("text/tinyshakespeare.txt"))
    tokenizer = CharacterTokenizer.from_text(text)
    tokens = tokenizer.encode(text)
    assert tokenizer.vocab_size == 65
    assert tokens.shape == (1_115_394,)
    counts = Counter(text)
    expected = [counts[char] for char in sorted(counts)]
    assert torch.bincount(tokens).tolist() == expected
    assert tokenizer.decode(tokens) == text


@pytest.mark.parametrize("tokenizer", SEQUENCE_TOKENIZERS, ids=repr)
@given(data=st.data())
def test_every_token_survives_the_letters(tokenizer, data):
    tokens = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1)))
    encoded = tokenizer.encode(tokenizer.decode(tokens))
    assert encoded.dtype == torch.long
    assert encoded.tolist() == tokens


@given(st.text("ABCDEFGHIJKLMNOPQRSTUVWXYZ*-"))
def test_protein_spelling_rules(sequence):
    letters = [char if char in AMINO_ACIDS else "X" for char in sequence if char != "-"]
    tokenizer = ProteinTokenizer()
    assert tokenizer.decode(tokenizer.encode(sequence)) == "".join(letters)
    assert tokenizer.decode(tokenizer.encode(sequence.lower())) == "".join(letters)


@given(st.text(IUPAC_BASES + "X-"))
def test_nucleotide_spelling_rules(sequence):
    letters = [char if char in "ACGT" else "N" for char in sequence.replace("U", "T")]
    expected = "".join(
        letter for letter, char in zip(letters, sequence, strict=True) if char != "-"
    )
    tokenizer = NucleotideTokenizer()
    assert tokenizer.decode(tokenizer.encode(sequence)) == expected


@pytest.mark.parametrize("wrong", [" ", "\t", "\n", "1", ".", "é", "ſ", "\u212a"])
@pytest.mark.parametrize("tokenizer", SEQUENCE_TOKENIZERS, ids=repr)
def test_what_is_no_letter_is_named(tokenizer, wrong):
    with pytest.raises(ValueError, match="sequence must hold") as caught:
        tokenizer.encode("ACG" + wrong)
    assert f"got {wrong!a} at position 3" in str(caught.value)


@pytest.mark.parametrize("wrong", "EFIJLOPQZefijlopqz*")
def test_a_letter_that_codes_no_base_is_refused(wrong):
    with pytest.raises(ValueError, match="IUPAC nucleotide letters"):
        NucleotideTokenizer().encode("ACGT" + wrong)


@pytest.mark.parametrize(
    ("sequence", "expected"),
    [
        ("ACGT", NucleotideTokenizer),
        ("acgu", NucleotideTokenizer),
        ("AC-GT--N", NucleotideTokenizer),
        ("ACGT" * 5 + "R", NucleotideTokenizer),  # 20 of 21 letters: 95.2 %
        ("ACGT" * 4 + "ACG" + "R", NucleotideTokenizer),  # 19 of 20: 95 % exactly
        ("ACGT" * 4 + "AC" + "R", ProteinTokenizer),  # 18 of 19: 94.7 %
        ("ACGT" * 20 + "E", ProteinTokenizer),  # E codes no base
        ("ACGT*", ProteinTokenizer),
        ("MKV", ProteinTokenizer),
        ("X", ProteinTokenizer),
    ],
)
def test_the_letters_decide_between_nucleotides_and_protein(sequence, expected):
    assert type(tokenizer_for_sequence(sequence)) is expected


@given(st.text("ABCDEFGHIKLMNPQRSTUVWYXZabcdnu*-") | st.text("ACGTNRUacgtu-"))
def test_the_chosen_tokenizer_can_encode_the_sequence(sequence):
    assume(sequence.strip("-"))
    tokens = tokenizer_for_sequence(sequence).encode(sequence)
    assert len(tokens) == len(sequence) - sequence.count("-")


@pytest.mark.parametrize("sequence", ["", "---"])
def test_no_letters_are_no_sequence(sequence):
    with pytest.raises(ValueError, match="at least one letter"):
        tokenizer_for_sequence(sequence)


@pytest.mark.parametrize("sequence", ["AC GT", "ACGſ" * 9, "ACGT1" * 3])
def test_a_sequence_of_neither_alphabet_is_refused(sequence):
    with pytest.raises(ValueError, match="sequence must hold amino acid letters"):
        tokenizer_for_sequence(sequence)


def test_a_quarter_of_protein_letters_look_like_bases(real_file):
    # The share behind the error rates that `tokenizer_for_sequence` documents.
    lines = real_file("protein/sprot_archaea.fasta").read_text().splitlines()
    residues = "".join(line for line in lines if not line.startswith(">"))
    share = sum(residues.count(base) for base in "ACGTUN") / len(residues)
    assert 0.22 < share < 0.30
