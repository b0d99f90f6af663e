"""Corpora: what files hold comes back token for token, whole or in parts, and errors say where."""

import gzip
import pickle

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from structure_files import pdb_line

from graphattn.data import (
    ByteTokenizer,
    CharacterTokenizer,
    Corpus,
    FileFormatError,
    FileTokenizer,
    NucleotideTokenizer,
    ProteinTokenizer,
    load_corpus,
    read_fasta,
    read_structure,
)
from graphattn.data.corpus import encoding, readers, streams, writer

pytest.importorskip("datasets", reason="corpora are kept with datasets")
pytest.importorskip("biotite", reason="sequences are read with biotite")

LETTERS = st.text("ACDEFGHIKLMNPQRSTVWYXBZJUO*-acdefg", min_size=1, max_size=30)
quick = settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture
def small_pieces(monkeypatch):
    """Every piece is a few letters, so that short files come in many."""
    for module in (streams, readers):
        monkeypatch.setattr(module, "PIECE", 8)
    monkeypatch.setattr(streams.text_pieces, "__defaults__", (8,))
    monkeypatch.setattr(writer, "_BLOCK", 16)
    monkeypatch.setattr(writer, "_ROWS", 2)


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


# Text.


@quick
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\ufeff")))
def test_a_text_comes_back_from_bytes_and_characters(small_pieces, tmp_path, text):
    text = "a" + text
    path = write(tmp_path / "a.txt", text)
    expected = text.replace("\r\n", "\n").replace("\r", "\n")
    for name, length in (("bytes", len(expected.encode())), ("characters", len(expected))):
        corpus = load_corpus(path, tokenizer=name)
        assert corpus.tokenizer.decode(corpus[0]["tokens"]) == expected
        assert corpus.num_tokens == length == corpus.lengths.sum()
        assert corpus.num_bytes == len(expected.encode())
    assert corpus.tokenizer.vocabulary == "".join(sorted(set(expected)))


def test_bytes_are_what_text_is_read_as(tmp_path):
    corpus = load_corpus(write(tmp_path / "a.txt", "né\n"))
    assert corpus.tokenizer == ByteTokenizer()
    assert corpus[0]["tokens"].tolist() == list("né\n".encode())
    assert (corpus.kind, corpus.names, corpus.groups) == ("text", ["a.txt"], [""])
    assert set(corpus[0]) == {"tokens", "name"}


def test_every_file_of_a_folder_is_a_record(tmp_path):
    (tmp_path / "deep").mkdir()
    write(tmp_path / "b.txt", "bee")
    write(tmp_path / "deep" / "a.txt.gz", gzip.compress(b"sea", mtime=0))
    write(tmp_path / ".hidden", b"\0")
    corpus = load_corpus(tmp_path)
    assert corpus.names == ["b.txt", "deep/a.txt.gz"]
    assert [bytes(each["tokens"].tolist()) for each in corpus] == [b"bee", b"sea"]
    assert load_corpus(tmp_path / "*.txt").names == ["b.txt"]


TOKENIZER_RULES = ["byte level", "digits and marks", "words", "blank before"]


def learned(rule: str, text: str, path):
    """The file of a tokenizer that cuts text into words by one of several rules."""
    tokenizers = pytest.importorskip("tokenizers")
    rules, models, trainers = (
        tokenizers.pre_tokenizers,
        tokenizers.models,
        tokenizers.trainers,
    )
    unknown = {"unk_token": "[UNK]"}
    made = tokenizers.Tokenizer(models.BPE(**unknown))
    made.pre_tokenizer = {
        "byte level": rules.ByteLevel(add_prefix_space=False),
        "digits and marks": rules.Sequence(
            [
                rules.Split(
                    tokenizers.Regex(r"[^\r\n\w]?\w+| ?[^\s\w]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"),
                    "isolated",
                ),
                rules.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        ),
        "words": rules.BertPreTokenizer(),
        "blank before": rules.Metaspace(prepend_scheme="first"),
    }[rule]
    special = {"special_tokens": ["[UNK]"], "show_progress": False}
    made.train_from_iterator([text], trainers.BpeTrainer(vocab_size=400, **special))
    made.save(str(path))
    return FileTokenizer(path)


@pytest.mark.every_case
@pytest.mark.parametrize("rule", TOKENIZER_RULES)
def test_a_text_in_pieces_has_the_tokens_of_the_whole(tmp_path, monkeypatch, rule):
    words = ["to", "be,", "or\n", "not\n\n", " be.\n", "\t1984 ", "it's", "  ", "question:\r\n"]
    drawn = np.random.default_rng(0).integers(0, len(words), 3000)
    text = " ".join(words[k] for k in drawn)
    tokenizer = learned(rule, text, tmp_path / "tokenizer.json")
    monkeypatch.setattr(readers, "PIECE", 4 * 300)
    corpus = load_corpus(write(tmp_path / "a.txt", text), tokenizer=tmp_path / "tokenizer.json")
    whole = tokenizer.encode(text.replace("\r\n", "\n"))
    assert corpus[0]["tokens"].tolist() == whole.tolist()
    assert corpus.num_bytes == len(text.replace("\r\n", "\n"))


def test_a_text_without_a_blank_is_read_too(tmp_path, monkeypatch):
    text = "abc" * 400
    learned("blank before", text, tmp_path / "tokenizer.json")
    monkeypatch.setattr(readers, "PIECE", 4 * 300)
    corpus = load_corpus(write(tmp_path / "a.txt", text), tokenizer=tmp_path / "tokenizer.json")
    decoded = corpus.tokenizer.decode(corpus[0]["tokens"])
    assert decoded.replace("▁", "").replace(" ", "") == text


# FASTA.


@quick
@given(sequences=st.lists(LETTERS.filter(lambda text: text.strip("-")), min_size=1, max_size=5))
def test_fasta_has_the_records_that_read_fasta_has(small_pieces, tmp_path, sequences):
    lines = [
        f">{i} some header\n{each[:7]}\n\n;c\n{each[7:]}\n" for i, each in enumerate(sequences)
    ]
    path = write(tmp_path / "a.fasta.gz", gzip.compress("".join(lines).encode()))
    corpus = load_corpus(path, kind="protein")
    expected = read_fasta(path)
    assert corpus.names == [record.header for record in expected]
    for example, record in zip(corpus, expected, strict=True):
        assert torch.equal(example["tokens"], ProteinTokenizer().encode(record.sequence))


def test_a_sequence_on_one_line_comes_in_pieces(small_pieces, tmp_path):
    sequence = "ACGTN" * 31
    corpus = load_corpus(write(tmp_path / "a.fa", f">{'long header ' * 9}\n{sequence}"))
    assert corpus.names == [("long header " * 9).strip()]
    assert torch.equal(corpus.tokens(0), NucleotideTokenizer().encode(sequence))


@pytest.mark.parametrize(
    ("header", "group"),
    [
        ("gi|1| protein DnaA [Mycoplasma agalactiae]", "Mycoplasma agalactiae"),
        ("gi|2| [NiFe] hydrogenase [Escherichia coli]", "Escherichia coli"),
        ("gi|3| thing [[Clostridium] scindens]", "[Clostridium] scindens"),
        ("gi|4| thing [Mycoplasma str. R(low)] ", "Mycoplasma str. R(low)"),
        ("sp|P1|A_HUMAN Thing OS=Homo sapiens OX=9606 GN=A PE=1 SV=1", "Homo sapiens"),
        ("sp|P1|A_HUMAN Thing OS=Homo sapiens", "Homo sapiens"),
        ("gi|5| [NiFe] hydrogenase", ""),
        ("O57809 3.5.99.7~~~~~~Putative", ""),
        ("thing PROS=none", ""),
    ],
)
def test_a_group_is_the_organism_of_the_header(tmp_path, header, group):
    corpus = load_corpus(write(tmp_path / "a.fasta", f">{header}\nMKVLTAGEEF\n"))
    assert corpus.groups == [group]
    assert corpus[0].get("group", "") == group


def test_records_of_several_files_without_an_organism_have_their_files_name(tmp_path):
    write(tmp_path / "one.fasta", ">a\nMKVEE\n>b [Mus musculus]\nMKVEE\n")
    write(tmp_path / "two.faa", ">c\nMKVEE\n")
    assert load_corpus(tmp_path).groups == ["one", "Mus musculus", "two"]


def test_letters_tell_bases_from_residues(tmp_path):
    assert load_corpus(write(tmp_path / "a.fa", ">a\nACGTACGTNN\n")).kind == "nucleotide"
    assert load_corpus(write(tmp_path / "b.fa", ">a\nACGEFFKLMN\n")).kind == "protein"
    assert load_corpus(tmp_path / "a.fa", kind="protein").tokenizer.vocab_size == 21


@pytest.mark.parametrize(
    ("content", "line", "reason"),
    [
        ("", None, "is empty"),
        (" \n\n", None, "is empty"),
        (">a\0\nMKV\n", 1, "NUL"),
        ("MKV\n>a\nMKV\n", 1, "text before the first '>'"),
        ("; only\n", None, "no line starts with '>'"),
        (">a\n>b\nMKV\n", 1, "no sequence after this header"),
        (">a\nMKV\n>b\n---\n", 3, "no sequence after this header"),
        (">a\nMKV\n>\nMKV\n", 3, "empty header"),
        (">a\nMKV\nMKKKKKKKKKKKKKKKKKK7V\n", 3, "'7' in a sequence is no amino acid letter"),
        (">a\nMKV LTA\n", 2, "' ' in a sequence"),
        (">a\nMKVEEE\nMKé\n", 3, "'\\xe9' in a sequence"),
        (b">a\r\nMKV\r\n\r\nMK\xff\r\n", 4, "byte 0xff is not UTF-8"),
    ],
)
@pytest.mark.usefixtures("small_pieces")
def test_a_malformed_fasta_file_names_its_line(tmp_path, content, line, reason):
    path = write(tmp_path / "a.fasta", content)
    with pytest.raises(FileFormatError) as caught:
        load_corpus(path)
    assert reason in caught.value.reason
    assert caught.value.line == line
    assert str(caught.value).startswith(str(path))


def test_a_residue_among_bases_is_named(tmp_path):
    path = write(tmp_path / "a.fa", ">a\n" + "ACGT\n" * 4000 + "ACEF\n")
    with pytest.raises(FileFormatError, match="line 4002: 'E' in a sequence is no IUPAC nucleo"):
        load_corpus(path)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize(
    ("content", "line", "reason"),
    [
        ("", None, "is empty"),
        ("\n" * 30, None, "is empty"),
        ("abba\n" * 7 + "ab\0", 8, "is binary"),
        ("abba\r\n" * 7 + "abc", 8, "'c' (U+0063) is not in the tokenizer's vocabulary of 3"),
        ("abba\n" * 7 + "ab☃", 8, "'\\u2603' (U+2603) is not in the tokenizer's vocabulary of 3"),
        (b"abba\r" * 7 + b"ab\xc3\xff", 8, "byte 0xc3 is not UTF-8"),
        (b"abbaabb\r\nab\xc3\xff", 2, "byte 0xc3 is not UTF-8"),  # pieces are of 8 bytes
        (gzip.compress(b"abba\n" * 100, mtime=0)[:-9], None, "is not a whole gzip file"),
    ],
)
def test_a_malformed_text_names_its_line(tmp_path, content, line, reason):
    path = write(tmp_path / ("a.txt.gz" if content[:1] == b"\x1f" else "a.txt"), content)
    with pytest.raises(FileFormatError) as caught:
        load_corpus(path, tokenizer=CharacterTokenizer("ab\n"))
    assert reason in caught.value.reason
    assert caught.value.line == line


@quick
@given(data=st.binary(max_size=40))
def test_the_line_of_a_wrong_byte_is_right_however_the_file_is_cut(small_pieces, tmp_path, data):
    data = b"a\r\nb" + data.replace(b"\0", b"\r\n") + b"\xff"
    with pytest.raises(UnicodeDecodeError) as expected:
        data.decode()
    good = data[: expected.value.start].replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    with pytest.raises(FileFormatError) as caught:
        load_corpus(write(tmp_path / "a.txt", data), kind="text")
    assert caught.value.line == 1 + good.count(b"\n")


@pytest.mark.parametrize(
    ("size", "dtype"), [(2, "u1"), (256, "u1"), (257, "u2"), (65_536, "u2"), (65_537, "u4")]
)
def test_tokens_lie_in_the_smallest_integers_that_hold_them(size, dtype):
    assert encoding.token_dtype(size) == np.dtype(dtype)


# Parts of records.


@quick
@given(data=st.data())
def test_a_part_is_what_slicing_the_whole_gives(small_pieces, tmp_path, data):
    texts = data.draw(st.lists(st.text("abc", min_size=1, max_size=60), min_size=1, max_size=4))
    for old in tmp_path.glob("*.txt"):
        old.unlink()
    for i, text in enumerate(texts):
        write(tmp_path / f"{i}.txt", text)
    corpus = load_corpus(tmp_path)
    i = data.draw(st.integers(0, len(texts) - 1))
    start = data.draw(st.integers(0, len(texts[i])))
    stop = data.draw(st.integers(start, len(texts[i])))
    part = corpus.tokens(i, start, stop)
    assert part.dtype == torch.long
    assert bytes(part.tolist()).decode() == texts[i][start:stop]
    assert torch.equal(corpus.tokens(i - len(texts), start), corpus[i]["tokens"][start:])


def test_a_part_outside_the_record_is_refused(tmp_path):
    corpus = load_corpus(write(tmp_path / "a.txt", "abcdef"))
    for start, stop in ((0, 7), (4, 3), (7, None)):
        with pytest.raises(ValueError, match=r"0 <= start <= stop <= 6, the length of record 0"):
            corpus.tokens(0, start, stop)
    with pytest.raises(ValueError, match="start must be >= 0, got -1"):
        corpus.tokens(0, -1)
    for i in (1, -2):
        with pytest.raises(IndexError, match=f"number of a record must be from -1 to 0, got {i}"):
            corpus[i]


def test_labels_and_tokens_are_cut_alike(tmp_path):
    entry = (
        "LOCUS       X\nSOURCE      a bug\nFEATURES             Location/Qualifiers\n"
        "     CDS             3..6\nORIGIN\n        1 acgtacgtac\n//\n"
    )
    corpus = load_corpus(write(tmp_path / "a.gb", entry))
    assert corpus.kind == "nucleotide"
    assert corpus[0]["labels"].tolist() == [0, 0, 1, 1, 1, 1, 0, 0, 0, 0]
    part = corpus.example(0, 1, 4)
    assert part["labels"].tolist() == [0, 1, 1]
    assert part["tokens"].tolist() == [1, 2, 3]
    assert (part["name"], part["group"]) == ("X", "a bug")
    with pytest.raises(FileFormatError, match="line 6: 'E' in a sequence is no IUPAC"):
        load_corpus(write(tmp_path / "b.gb", entry.replace("acgtacgtac", "acgtacgtae")))


# Structures.


def assert_same_structure(structure, expected):
    for name in ("sequence", "chain_ids", "insertion_codes", "residue_names", "has_all_atoms"):
        assert getattr(structure, name) == getattr(expected, name)
    for name in ("ca_positions", "chain_index", "residue_numbers", "b_factors"):
        value, other = getattr(structure, name), getattr(expected, name)
        torch.testing.assert_close(value, other, rtol=0, atol=0, equal_nan=True)
    assert set(structure.atoms) == set(expected.atoms)


def two_chains(path):
    residues = [("GLY", "A", 5), ("TRP", "A", 6), ("LYS", "A", 9), ("MSE", "B", 1), ("ALA", "B", 2)]
    lines = [
        pdb_line("CA", name, chain, number, (3.8 * place, 0.5, -1.25))
        for place, (name, chain, number) in enumerate(residues)
    ]
    return write(path, "\n".join(lines) + "\nEND\n")


def test_structures_come_back_as_they_were_read(tmp_path):
    paths = [two_chains(tmp_path / "a.pdb"), two_chains(tmp_path / "b.ent")]
    corpus = load_corpus(tmp_path)
    assert (corpus.kind, corpus.names) == ("structures", ["a.pdb", "b.ent"])
    for example, path in zip(corpus, paths, strict=True):
        expected = read_structure(path)
        assert_same_structure(example["structure"], expected)
        assert torch.equal(example["tokens"], ProteinTokenizer().encode(expected.sequence))


def test_a_part_of_a_structure_has_the_chains_of_its_residues(tmp_path):
    corpus = load_corpus(two_chains(tmp_path / "a.pdb"))
    whole = corpus[0]["structure"]
    assert corpus.example(0, 1, 3)["structure"].chain_ids == ("A",)
    part = corpus.example(0, 2, 5)
    assert part["structure"].sequence == whole.sequence[2:5]
    assert part["structure"].chain_ids == ("A", "B")
    assert part["structure"].residue_numbers.tolist() == [9, 1, 2]
    assert torch.equal(part["structure"].ca_positions, whole.ca_positions[2:5])
    assert_same_structure(corpus.example(0, 3, 5)["structure"], whole.select(chains="B"))


def test_a_folder_of_real_structures_is_what_its_files_are(real_file):
    folder = real_file("structure/pdb")
    corpus = load_corpus(folder)
    assert len(corpus) == len(list(folder.iterdir()))
    for example in corpus:
        assert_same_structure(example["structure"], read_structure(folder / example["name"]))


# Real sequences.


def test_every_base_of_a_genome_is_there(real_file):
    path = real_file("dna/ecoli_k12_GCF_000005845.2.fna.gz")
    corpus = load_corpus(path)
    letters = b"".join(gzip.decompress(path.read_bytes()).split(b"\n")[1:]).upper()
    assert (len(corpus), corpus.num_tokens) == (1, 4_641_652)
    expected = np.frombuffer(letters.translate(bytes.maketrans(b"ACGT", bytes(range(4)))), np.uint8)
    assert np.array_equal(corpus.tokens(0).numpy(), expected)


def test_the_groups_of_three_proteomes_are_their_organisms(real_files):
    paths = real_files("protein/mycoplasma_*.fasta")
    corpus = load_corpus(paths[0].parent / "mycoplasma_*.fasta")
    assert len(set(corpus.groups)) == 3
    expected = [record for path in paths for record in read_fasta(path)]
    assert corpus.names == [record.header for record in expected]
    assert corpus.lengths.tolist() == [len(record.sequence) for record in expected]


# What is asked for.


def test_a_folder_of_several_kinds_must_be_told_which(tmp_path):
    write(tmp_path / "a.fasta", ">a\nMKVEE\n")
    write(tmp_path / "notes.txt", "some notes")
    with pytest.raises(
        FileFormatError,
        match=(r"several formats \(fasta, text\): " r"choose one by the argument kind"),
    ):
        load_corpus(tmp_path)
    assert load_corpus(tmp_path, kind="protein").names == ["a"]
    assert load_corpus(tmp_path, kind="text").names == ["notes.txt"]
    with pytest.raises(
        FileFormatError, match=("holds no structure files, which kind='structures' needs")
    ):
        load_corpus(tmp_path, kind="structures")


def test_a_kind_is_what_a_file_is_read_as(tmp_path):
    path = write(tmp_path / "a.fasta", ">a\nMKVEE\n")
    assert bytes(load_corpus(path, kind="text").tokens(0).tolist()) == path.read_bytes()
    with pytest.raises(FileFormatError, match=r"a\.txt: line 1: not FASTA"):
        load_corpus(write(tmp_path / "a.txt", "hello"), kind="protein")
    with pytest.raises(FileFormatError, match=r"a\.txt: is neither PDB nor mmCIF"):
        load_corpus(tmp_path / "a.txt", kind="structures")
    with pytest.raises(FileFormatError, match=r"a\.txt: is not an image"):
        load_corpus(tmp_path / "a.txt", kind="images")


def test_arguments_that_are_not_allowed_are_named(tmp_path):
    path = write(tmp_path / "a.fasta", ">a\nMKVEE\n")
    with pytest.raises(ValueError, match=r"kind must be one of 'auto', .* got 'music'"):
        load_corpus(path, kind="music")
    with pytest.raises(ValueError, match=r"tokenizer must be 'auto', .* got 'byte', which does"):
        load_corpus(path, tokenizer="byte")
    with pytest.raises(ValueError, match="tokenizer must be one of CharacterTokenizer"):
        load_corpus(path, tokenizer=3)
    for wrong in ("bytes", "characters"):
        with pytest.raises(ValueError, match="one token per letter"):
            load_corpus(path, tokenizer=wrong)
    for missing in ("no/such/file", "*.nothing"):
        with pytest.raises(FileFormatError, match="no such file"):
            load_corpus(tmp_path / missing)
    (tmp_path / "nothing").mkdir()
    with pytest.raises(FileFormatError, match="nothing: is an empty folder"):
        load_corpus(tmp_path / "nothing")


def test_a_corpus_is_the_same_in_another_process(tmp_path):
    corpus = load_corpus(write(tmp_path / "a.txt", "to be"), cache=tmp_path / "cache")
    again = pickle.loads(pickle.dumps(corpus))
    assert again.fingerprint == corpus.fingerprint
    assert torch.equal(again.tokens(0), corpus.tokens(0))


def test_a_folder_without_a_corpus_is_refused(tmp_path):
    with pytest.raises(ValueError, match="folder must contain a corpus that load_corpus wrote"):
        Corpus(tmp_path)


def test_files_of_a_folder_that_are_left_out_are_named(tmp_path):
    (tmp_path / "a.pdb").write_text(pdb_line("CA", "GLY"))
    (tmp_path / "notes.txt").write_text("to be")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "b.fasta").write_text(">b\nMKV\n")
    with pytest.warns(UserWarning, match=r"files are left out.*: deep/b\.fasta, notes\.txt$"):
        corpus = load_corpus(tmp_path, kind="structures")
    assert corpus.names == ["a.pdb"]
