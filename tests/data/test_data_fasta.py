"""FASTA files: everything in them is kept, whatever is wrong with them is located."""

import gzip

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphattn.data import (
    FastaRecord,
    FileFormatError,
    NucleotideTokenizer,
    ProteinTokenizer,
    load_corpus,
    load_tokenizer,
    read_fasta,
    save_tokenizer,
    tokenizer_for_sequence,
)


@pytest.fixture
def fasta(tmp_path):
    """A function that writes bytes to a file and reads it as FASTA."""

    def read(content: bytes, name: str = "test.fasta") -> list[FastaRecord]:
        path = tmp_path / name
        path.write_bytes(content)
        return read_fasta(path)

    return read


def by_hand(text: str) -> list[tuple[str, str]]:
    """FASTA by splitting at ">": enough for well-formed files, and nothing of the reader."""
    entries = ("\n" + text).split("\n>")[1:]
    return [(entry.split("\n")[0], "".join(entry.split("\n")[1:])) for entry in entries]


@pytest.mark.parametrize(
    ("content", "line", "reason"),
    [
        (b"MKV\n>a\nMKV\n", 1, "text before the first '>'"),
        (b"\n\nMKVLT\n", 3, "text before the first '>'"),
        (b"; only\n; comments\n", None, "no line starts with '>'"),
        (b">a\n>b\nMKV\n", 1, "no sequence after this header"),
        (b">a\nMKV\n>b\n\n>c\nMKV\n", 3, "no sequence after this header"),
        (b">a\nMKV\n\n>b", 4, "no sequence after this header"),
        (b">a\nMKV\n>b\n; but a comment\n", 3, "no sequence after this header"),
        (b">a\nMKV\n>\nMKV\n", 3, "empty header"),
        (b">a\nMKV\n>  \t\nMKV\n", 3, "empty header"),
        (b">a\nMKV\nMK7V\n", 3, "'7' in a sequence"),
        (b">a\nMKV LTA\n", 2, "' ' in a sequence"),
        (b">a\nMKV\tLTA\n", 2, "'\\t' in a sequence"),
        (b">a\nMKV>b\n", 2, "'>' in a sequence"),
        (b">a\nMKV.LTA\n", 2, "'.' in a sequence"),
        (b">a\nMK\xc3\xa9\n", 2, "'\\xe9' in a sequence"),
        (b">a\nMKV\x0bLTA\n", 2, "'\\x0b' in a sequence"),
        (b">a\r\nMKV\r\n\r\nMK?\r\n", 4, "'?' in a sequence"),
        (b">a\rMKV\rMK?\r", 3, "'?' in a sequence"),
    ],
)
def test_a_malformed_file_names_its_line(fasta, tmp_path, content, line, reason):
    with pytest.raises(FileFormatError) as caught:
        fasta(content)
    error = caught.value
    assert error.line == line
    assert reason in error.reason
    where = "" if line is None else f"line {line}: "
    assert str(error) == f"{tmp_path / 'test.fasta'}: {where}{error.reason}"
    assert str(error).isprintable()


def test_equal_headers_lose_no_record(fasta):
    records = fasta(b">same\nMKV\n>same\nLTA\n>same\nMKV\n")
    assert [record.sequence for record in records] == ["MKV", "LTA", "MKV"]
    assert {record.header for record in records} == {"same"}


@pytest.mark.parametrize(
    "content",
    [
        b">a b\nMKVLTA\n>c\nAC-GT*\n",
        b">a b\nMKVLTA\n>c\nAC-GT*",  # no newline at the end
        b">a b\r\nMKV\r\nLTA\r\n>c\r\nAC-GT*\r\n",
        b">a b\rMKVLTA\r>c\rAC-GT*\r",
        b"\n\n>a b\n\nMKV\n\nLTA\n\n\n>c\nAC-GT*\n\n",
        b">a b\nmkvLta\n>c\nac-gt*\n",
        b">  a b \t\n  MKV  \nLTA\t\n>c \nAC-GT*\n",
        b"; a comment\n>a b\nMKV\n; another: 123\nLTA\n>c\nAC-GT*\n",
        b"\xef\xbb\xbf>a b\nMKVLTA\n>c\nAC-GT*\n",
        pytest.param(gzip.compress(b">a b\nMKVLTA\n>c\nAC-GT*\n"), id="gzip"),  # holds the time
    ],
)
def test_spelling_of_the_file_changes_nothing(fasta, content):
    assert fasta(content) == [FastaRecord("a b", "MKVLTA"), FastaRecord("c", "AC-GT*")]


headers = st.text(st.characters(codec="utf-8", exclude_characters="\r\n\0"), min_size=1).filter(
    lambda header: header == header.strip() != ""
)
sequences = st.text("ACDEFGHIKLMNPQRSTVWYXBZUOJ*-", min_size=1)


@pytest.mark.long
@settings(deadline=None, max_examples=40)
@given(
    entries=st.lists(st.tuples(headers, sequences), min_size=1),
    width=st.integers(1, 80),
    line_end=st.sampled_from(["\n", "\r\n", "\r", "\n\n"]),
)
def test_what_is_written_comes_back(tmp_path_factory, entries, width, line_end):
    lines = []
    for header, sequence in entries:
        lines.append(">" + header)
        lines += [sequence[i : i + width] for i in range(0, len(sequence), width)]
    path = tmp_path_factory.mktemp("fasta") / "any.fasta"
    path.write_bytes(line_end.join(lines).encode())
    assert [(record.header, record.sequence) for record in read_fasta(path)] == entries


@settings(deadline=None)
@given(content=st.binary(max_size=200) | st.text(">;ACgt*- \t\r\n1").map(str.encode))
def test_any_bytes_are_records_or_one_clear_line(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("fasta") / "any.fasta"
    path.write_bytes(content)
    num_lines = 1 + content.count(b"\n") + content.count(b"\r")
    try:
        result: list[FastaRecord] | FileFormatError = read_fasta(path)
    except FileFormatError as error:
        result = error
    if isinstance(result, FileFormatError):
        assert str(result).isprintable()
        assert result.line is None or 1 <= result.line <= num_lines
    else:
        assert result
        assert all(record.header and record.sequence for record in result)


@pytest.mark.parametrize("pattern", ["protein/*.fasta", "dna/*.fa", "dna/*.fna.gz"])
def test_real_files_lose_nothing(real_files, pattern):
    for path in real_files(pattern):
        opener = gzip.open if path.suffix == ".gz" else open
        with opener(path, "rt") as file:
            text = file.read()
        records = read_fasta(path)
        assert len(records) == sum(line.startswith(">") for line in text.splitlines())
        assert [(r.header, r.sequence) for r in records] == [
            (header.strip(), sequence.upper()) for header, sequence in by_hand(text)
        ]


def test_real_proteins_and_genomes_get_their_tokenizer(real_files):
    for path in real_files("protein/*.fasta"):
        for record in read_fasta(path):
            assert type(tokenizer_for_sequence(record.sequence)) is ProteinTokenizer, record
    for path in real_files("dna/*.f*a*"):
        for record in read_fasta(path):
            assert type(tokenizer_for_sequence(record.sequence)) is NucleotideTokenizer


def test_every_iupac_code_can_keep_a_token(tmp_path):
    tokenizer, plain = NucleotideTokenizer(iupac=True), NucleotideTokenizer()
    codes = "ACGTNRYSWKMBDHV"  # the alphabet of IUPAC
    assert tokenizer.vocab_size == len(set(codes)) == 15
    assert tokenizer.decode(tokenizer.encode(codes.lower())) == codes
    assert tokenizer.encode("UX-").tolist() == tokenizer.encode("TN").tolist()
    assert tokenizer.encode("ACGTN").tolist() == plain.encode("ACGTN").tolist()  # the same numbers
    assert plain.decode(plain.encode(codes)) == "ACGTN" + 10 * "N"
    assert tokenizer != plain
    assert len({tokenizer, plain, NucleotideTokenizer(iupac=True)}) == 2
    with pytest.raises(ValueError, match="must hold IUPAC nucleotide letters, got 'E'"):
        tokenizer.encode("ACE")
    with pytest.raises(ValueError, match="iupac must be True or False, got 1"):
        NucleotideTokenizer(iupac=1)
    for made in (tokenizer, plain):
        save_tokenizer(made, tmp_path / "tokenizer.json")
        assert load_tokenizer(tmp_path / "tokenizer.json") == made
    path = tmp_path / "bases.fasta"
    path.write_text(">a\nACGTRYRY\n>b\nNNVVACGT\n")
    corpus = load_corpus(path, tokenizer="iupac")
    assert corpus.kind == "nucleotide"
    assert corpus.tokenizer.decode(corpus.tokens(0, 0, 8)) == "ACGTRYRY"
