"""Bytes, files of the tokenizers library, and tokenizers as JSON."""

import json
import pickle
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphattn.data import (
    ByteTokenizer,
    CharacterTokenizer,
    FileFormatError,
    FileTokenizer,
    NucleotideTokenizer,
    ProteinTokenizer,
    load_corpus,
    load_tokenizer,
    save_tokenizer,
)

tokenizers = pytest.importorskip("tokenizers", reason="files of the tokenizers library are its own")

TEXT = "To be, or not to be: that is the question.\nWhether 'tis nobler\n\nin the mind\n" * 20


@pytest.fixture(scope="session")
def byte_pairs(tmp_path_factory):
    """The file of a tokenizer of byte pairs, learned from TEXT."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<mask>"],
        show_progress=False,
    )
    made.train_from_iterator([TEXT], trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return path


@given(st.text())
def test_any_text_survives_its_bytes(text):
    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode(text)
    assert tokens.dtype == torch.long
    assert bytes(tokens.tolist()) == text.encode("utf-8")
    assert tokenizer.decode(tokens) == text


def test_half_a_character_is_marked_where_it_stands():
    assert ByteTokenizer().decode([97, 195]) == "a\ufffd"


def test_a_file_tokenizer_does_what_the_library_does(byte_pairs):
    ours, theirs = FileTokenizer(byte_pairs), tokenizers.Tokenizer.from_file(str(byte_pairs))
    for text in (TEXT, "nöt ☃ seen", ""):
        assert ours.encode(text).tolist() == theirs.encode(text, add_special_tokens=False).ids
        assert ours.decode(ours.encode(text)) == text
    assert ours.vocab_size == theirs.get_vocab_size()
    assert len(ours.encode(TEXT)) < len(TEXT)


def test_no_text_is_cut_to_a_length_that_the_file_asks_for(byte_pairs, tmp_path):
    made = tokenizers.Tokenizer.from_file(str(byte_pairs))
    whole = made.encode(TEXT).ids
    made.enable_truncation(8)
    made.enable_padding(length=16)
    made.save(str(tmp_path / "short.json"))
    assert FileTokenizer(tmp_path / "short.json").encode(TEXT).tolist() == whole


def test_special_tokens_of_a_file_are_not_added(byte_pairs, tmp_path):
    made = tokenizers.Tokenizer.from_file(str(byte_pairs))
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<mask> $A", special_tokens=[("<mask>", 0)]
    )
    made.save(str(tmp_path / "special.json"))
    assert made.encode("to be").ids[0] == 0
    assert FileTokenizer(tmp_path / "special.json").encode("to be").tolist() == [
        *made.encode("to be").ids[1:]
    ]


def test_a_vocabulary_reaches_to_its_largest_token_where_numbers_are_left_out(tmp_path):
    words = tokenizers.models.WordLevel({"to": 0, "be": 5}, unk_token="to")
    tokenizers.Tokenizer(words).save(str(tmp_path / "gaps.json"))
    tokenizer = FileTokenizer(tmp_path / "gaps.json")
    assert tokenizer.vocab_size == 6
    assert tokenizer.encode("be").tolist() == [5]


@pytest.mark.parametrize("make", [lambda path: ByteTokenizer(), FileTokenizer])
def test_decode_names_a_token_that_is_none(make, byte_pairs):
    tokenizer = make(byte_pairs)
    for wrong in (-1, tokenizer.vocab_size, 1.0, True):
        with pytest.raises(ValueError, match=f"from 0 to {tokenizer.vocab_size - 1}, got {wrong}"):
            tokenizer.decode([0, wrong])
    with pytest.raises(ValueError, match=r"must have shape \[N\], got \[1, 1\]"):
        tokenizer.decode(torch.zeros(1, 1, dtype=torch.long))


def test_every_tokenizer_is_the_same_after_it_was_saved(byte_pairs, tmp_path):
    samples = {
        ByteTokenizer(): "nö",
        CharacterTokenizer('ab"\\\n\u2028é☃'): 'a"\\é☃\u2028\n',
        ProteinTokenizer(): "MKV-X*",
        NucleotideTokenizer(): "ACGTNRU",
        FileTokenizer(byte_pairs): TEXT,
    }
    for tokenizer, text in samples.items():
        path = tmp_path / "own.json"
        save_tokenizer(tokenizer, path)
        for again in (load_tokenizer(path), pickle.loads(pickle.dumps(tokenizer))):
            assert type(again) is type(tokenizer)
            assert again.vocab_size == tokenizer.vocab_size
            assert torch.equal(again.encode(text), tokenizer.encode(text))
        assert [each.name for each in tmp_path.iterdir()] == ["own.json"]


def test_a_saved_file_tokenizer_needs_its_file_no_more(byte_pairs, tmp_path):
    original = tmp_path / "original.json"
    original.write_bytes(byte_pairs.read_bytes())
    tokenizer = FileTokenizer(original)
    save_tokenizer(tokenizer, tmp_path / "own.json")
    original.unlink()
    assert load_tokenizer(tmp_path / "own.json") == tokenizer


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "is empty"),
        ('{"type":\n"Byte', "line 2: is not JSON"),
        ('{"type": "Exec"}', "is not a tokenizer that save_tokenizer wrote"),
        ("[1]", "is not a tokenizer that save_tokenizer wrote"),
        ('{"type": "CharacterTokenizer"}', "is not a tokenizer that save_tokenizer wrote"),
        ('{"type": "CharacterTokenizer", "vocabulary": "aa"}', "once, got 'a' twice"),
        ('{"type": "FileTokenizer", "file": {}}', "is no file of the tokenizers library"),
        ('{"model": {}}', r"use FileTokenizer\(path\) to read a file of the tokenizers library"),
    ],
)
def test_a_file_that_is_no_tokenizer_says_so(tmp_path, content, reason):
    path = tmp_path / "wrong.json"
    path.write_text(content)
    with pytest.raises(FileFormatError, match=reason) as caught:
        load_tokenizer(path)
    assert str(caught.value).startswith(str(path))


def test_a_file_of_another_kind_is_no_file_tokenizer(tmp_path):
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps({"type": "ByteTokenizer"}))
    with pytest.raises(FileFormatError, match="is no file of the tokenizers library"):
        FileTokenizer(path)
    with pytest.raises(FileFormatError, match="no such file"):
        FileTokenizer(tmp_path / "missing.json")


MODELS = {
    "WordLevel": lambda m: m.WordLevel({"to": 0, "be": 1}, unk_token="?"),
    "WordPiece": lambda m: m.WordPiece({"to": 0, "be": 1}, unk_token="?"),
    "Unigram": lambda m: m.Unigram([("to", -1.0), ("be", -2.0)]),
    "BPE": lambda m: m.BPE({"t": 0, "o": 1, "to": 2}, [("t", "o")], unk_token="?"),
}


@pytest.mark.parametrize("kind", MODELS)
def test_a_file_without_its_unknown_token_is_named(kind, tmp_path):
    """The library raises a plain Exception, which no caller expects."""
    path = tmp_path / "tokenizer.json"
    tokenizers.Tokenizer(MODELS[kind](tokenizers.models)).save(str(path))
    tokenizer = FileTokenizer(path)
    if kind != "Unigram":  # it may need the unknown token for any text
        assert tokenizer.encode("to").tolist() == [2 if kind == "BPE" else 0]
    (tmp_path / "text.txt").write_text("to é")
    save_tokenizer(tokenizer, tmp_path / "own.json")
    loaded = load_tokenizer(tmp_path / "own.json")
    for call, name in (
        (lambda: tokenizer.encode("to é"), "tokenizer.json"),
        (lambda: loaded.encode("to é"), "own.json"),
        (lambda: load_corpus(tmp_path / "text.txt", tokenizer=path), "tokenizer.json"),
    ):
        with pytest.raises(
            FileFormatError, match=r"cannot encode the text.*unknown token"
        ) as caught:
            call()
        assert str(caught.value).startswith(str(tmp_path / name))
    with pytest.raises(FileFormatError, match="cannot encode"):
        tokenizer.encode("\ud800")


def test_a_panic_of_the_library_names_the_file_and_ctrl_c_does_not(byte_pairs, monkeypatch):
    class PanicException(BaseException):  # that of Rust cannot be imported
        pass

    tokenizer = FileTokenizer(byte_pairs)
    for error, expected in ((PanicException, FileFormatError), (KeyboardInterrupt,) * 2):
        library = SimpleNamespace(decode=Mock(side_effect=error), to_str=Mock(side_effect=error))
        monkeypatch.setattr(tokenizer, "_tokenizer", library)
        for call in (lambda: tokenizer.decode([0]), tokenizer.to_json):
            with pytest.raises(expected):
                call()


def test_only_known_tokenizers_are_saved(tmp_path):
    with pytest.raises(ValueError, match="tokenizer must be one of CharacterTokenizer"):
        save_tokenizer(object(), tmp_path / "own.json")
    assert not list(tmp_path.iterdir())
