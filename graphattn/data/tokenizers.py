"""Tokenizers of bytes and from files of the `tokenizers` library; saving of tokenizers."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from graphattn.data.fasta import NucleotideTokenizer, ProteinTokenizer
from graphattn.data.files import FileFormatError, read_text
from graphattn.data.tables.tokenizer import TableTokenizer
from graphattn.data.text import CharacterTokenizer, as_tokens


class Tokenizer(Protocol):
    """The interface of all tokenizers here, which convert text to a LongTensor [N] and back.

    Example:
        >>> import graphattn as ga
        >>> def round_trip(tokenizer: ga.data.Tokenizer, text: str) -> str:
        ...     return tokenizer.decode(tokenizer.encode(text))
        >>> round_trip(ga.data.ByteTokenizer(), "to be")
        'to be'
    """

    @property
    def vocab_size(self) -> int:
        """The number of tokens."""

    def encode(self, text: str, /) -> Tensor:
        """Return the tokens of `text`, a LongTensor [N]."""

    def decode(self, tokens: Tensor | Sequence[int], /) -> str:
        """Return the text of `tokens`, which are integers [N] in ``0..vocab_size - 1``."""


class ByteTokenizer:
    """A tokenizer with one token per byte of UTF-8: 256 tokens, for any text.

    The loss of a language model per token is then its loss per byte.

    Example:
        >>> import graphattn as ga
        >>> tokenizer = ga.data.ByteTokenizer()
        >>> tokenizer.encode("né")
        tensor([110, 195, 169])
        >>> tokenizer.decode([110, 195, 169]), tokenizer.vocab_size
        ('né', 256)
    """

    vocab_size = 256

    def encode(self, text: str) -> Tensor:
        """Return the tokens of `text`, a LongTensor [N]; N is the number of bytes in UTF-8.

        Raises:
            ValueError: if `text` has a lone surrogate (half of a character), which UTF-8 cannot
                encode.
        """
        try:
            return torch.tensor(list(text.encode("utf-8")), dtype=torch.long)
        except UnicodeEncodeError as error:
            raise ValueError(
                "text must have only characters that UTF-8 can encode, got the lone surrogate "
                f"{text[error.start]!a} at position {error.start}"
            ) from None

    def decode(self, tokens: Tensor | Sequence[int]) -> str:
        """Return the text of `tokens`, which are integers [N] in 0..255.

        Bytes that are not UTF-8 become U+FFFD, for example if a character was cut in two.

        Raises:
            ValueError: if `tokens` is not one-dimensional, or has other values.
        """
        return bytes(as_tokens(tokens, self.vocab_size)).decode("utf-8", errors="replace")

    def __repr__(self) -> str:
        return "ByteTokenizer()"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByteTokenizer)

    def __hash__(self) -> int:
        return hash(ByteTokenizer)


CANNOT_ENCODE = (
    "the tokenizers library cannot encode the text with this file (if its vocabulary has no "
    "unknown token, add one)"
)


class FileTokenizer:
    """A tokenizer from a file of the `tokenizers` library (``tokenizer.json``).

    The file may use byte pairs, WordPiece, unigrams or any other method. It also says what becomes
    of letters without a token: they give its unknown token, or no token. No special tokens are
    added.

    Args:
        path: the file; :func:`save_tokenizer` saves a copy of its content.

    Raises:
        FileFormatError: if the file cannot be read, or is no such file.
        ImportError: if `tokenizers` is not installed.

    Example:
        >>> import pathlib, tempfile, tokenizers, graphattn as ga
        >>> words = tokenizers.models.WordLevel({"to": 0, "be": 1, "?": 2}, unk_token="?")
        >>> made = tokenizers.Tokenizer(words)
        >>> made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "tokenizer.json")
        ...     made.save(str(path))
        ...     tokenizer = ga.data.FileTokenizer(path)
        >>> tokenizer.encode("to be or")
        tensor([0, 1, 2])
        >>> tokenizer.decode([0, 1]), tokenizer.vocab_size
        ('to be', 3)
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._read(path, read_text(path))

    @classmethod
    def _of_json(cls, path: str | os.PathLike[str], text: str) -> FileTokenizer:
        """Make a tokenizer from a file's content; error messages give `path` as the file."""
        tokenizer = cls.__new__(cls)
        tokenizer._read(path, text)
        return tokenizer

    def _read(self, path: str | os.PathLike[str], text: str) -> None:
        try:
            import tokenizers
        except ImportError as error:
            raise ImportError(
                "FileTokenizer needs tokenizers: install it with pip install 'graphattn[train]'"
            ) from error
        self._path = os.fspath(path)
        with self._explained("is no file of the tokenizers library"):
            self._tokenizer = tokenizers.Tokenizer.from_str(text)
        # A file may specify truncation and padding, but here a whole text becomes tokens.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        tokens = self._tokenizer.get_vocab(with_added_tokens=True).values()
        self.vocab_size = max(tokens, default=-1) + 1  # the numbers of tokens may have gaps

    def encode(self, text: str) -> Tensor:
        """Return the tokens of `text`, a LongTensor [N].

        Raises:
            FileFormatError: if the file does not say what becomes of a letter of `text`: its
                vocabulary has no unknown token.
        """
        with self._explained(CANNOT_ENCODE):
            encoding = self._tokenizer.encode(text, add_special_tokens=False)
        return torch.tensor(encoding.ids, dtype=torch.long)

    def _encode_fast(self, text: str) -> list[int]:
        """Return the tokens of `text` without computing their places in it."""
        with self._explained(CANNOT_ENCODE):
            encodings = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return list(encodings[0].ids)

    def decode(self, tokens: Tensor | Sequence[int]) -> str:
        """Return the text of `tokens`, which are integers [N] in ``0..vocab_size - 1``.

        Raises:
            ValueError: if `tokens` is not one-dimensional, or has other values.
            FileFormatError: if the library cannot decode them.
        """
        numbers = as_tokens(tokens, self.vocab_size)
        with self._explained("the tokenizers library cannot decode tokens with this file"):
            return self._tokenizer.decode(numbers, skip_special_tokens=False)

    @contextmanager
    def _explained(self, problem: str) -> Iterator[None]:
        """Name the file in errors of the library: plain exceptions, and panics of Rust."""
        try:
            yield
        except BaseException as error:
            if isinstance(error, Exception) or type(error).__name__ == "PanicException":
                raise FileFormatError(self._path, f"{problem}: {error}") from error
            raise

    def to_json(self) -> str:
        """Return the content of a file that describes this tokenizer."""
        with self._explained("the tokenizers library cannot write this file again"):
            return self._tokenizer.to_str()

    def __repr__(self) -> str:
        return f"FileTokenizer(vocab_size={self.vocab_size})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FileTokenizer) and self.to_json() == other.to_json()

    def __hash__(self) -> int:
        return hash((FileTokenizer, self.vocab_size))


_WITHOUT_OPTIONS: dict[str, Callable[[], Tokenizer]] = {
    "ByteTokenizer": ByteTokenizer,
    "ProteinTokenizer": ProteinTokenizer,
    "NucleotideTokenizer": NucleotideTokenizer,
}


def tokenizer_as_dict(tokenizer: Any) -> dict[str, Any]:
    """Convert a tokenizer to a dict that can be written as JSON."""
    name = type(tokenizer).__name__
    if isinstance(tokenizer, CharacterTokenizer):
        return {"type": name, "vocabulary": tokenizer.vocabulary}
    if isinstance(tokenizer, FileTokenizer):
        return {"type": name, "file": json.loads(tokenizer.to_json())}
    if isinstance(tokenizer, TableTokenizer):
        return {"type": name, "columns": tokenizer.as_list()}
    if isinstance(tokenizer, NucleotideTokenizer) and tokenizer.iupac:
        return {"type": name, "iupac": True}
    if _WITHOUT_OPTIONS.get(name) is type(tokenizer):
        return {"type": name}
    with_options = "CharacterTokenizer", "FileTokenizer", "TableTokenizer"
    known = ", ".join([*with_options, *_WITHOUT_OPTIONS])
    raise ValueError(f"tokenizer must be one of {known}, got {tokenizer!r}")


def tokenizer_from_dict(saved: Any, path: str | os.PathLike[str]) -> Tokenizer:
    """Restore a tokenizer from :func:`tokenizer_as_dict`; `path` is the file in error messages."""
    name = saved.get("type") if isinstance(saved, dict) else None
    if name == "NucleotideTokenizer" and saved.get("iupac") is True:
        return NucleotideTokenizer(iupac=True)
    if name in _WITHOUT_OPTIONS:
        return _WITHOUT_OPTIONS[name]()
    if name == "CharacterTokenizer" and isinstance(saved.get("vocabulary"), str):
        try:
            return CharacterTokenizer(saved["vocabulary"])
        except ValueError as error:
            raise FileFormatError(path, str(error)) from None
    if name == "TableTokenizer":
        try:
            return TableTokenizer.from_list(saved.get("columns"))
        except (ValueError, TypeError) as error:
            raise FileFormatError(path, str(error)) from None
    if name == "FileTokenizer" and "file" in saved:
        return FileTokenizer._of_json(path, json.dumps(saved["file"]))
    hint = ""
    if isinstance(saved, dict) and "model" in saved:
        hint = "; use FileTokenizer(path) to read a file of the tokenizers library"
    raise FileFormatError(path, f"is not a tokenizer that save_tokenizer wrote{hint}")


def save_tokenizer(tokenizer: Tokenizer, path: str | os.PathLike[str]) -> None:
    """Write a tokenizer to a JSON file, which contains everything that is needed to restore it.

    The content is written under a temporary name first, so that there is never an incomplete file.

    Args:
        tokenizer: one of the six tokenizers of :mod:`graphattn.data`.
        path: the file.

    Raises:
        ValueError: if `tokenizer` is another object.

    Example:
        >>> import pathlib, tempfile, graphattn as ga
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "tokenizer.json")
        ...     ga.data.save_tokenizer(ga.data.CharacterTokenizer("abc"), path)
        ...     ga.data.load_tokenizer(path)
        CharacterTokenizer(vocabulary='abc')
    """
    text = json.dumps(tokenizer_as_dict(tokenizer), indent=1)
    target = Path(path)
    partial = target.with_name(f"{target.name}.part-{os.getpid()}")
    try:
        partial.write_text(text + "\n", encoding="utf-8")
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """Read a tokenizer that :func:`save_tokenizer` wrote.

    Args:
        path: the file.

    Raises:
        FileFormatError: if the file cannot be read, or has no such tokenizer.
        ImportError: if it is a :class:`FileTokenizer`, and `tokenizers` is not installed.

    Example:
        >>> import pathlib, tempfile, graphattn as ga
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "tokenizer.json")
        ...     ga.data.save_tokenizer(ga.data.ProteinTokenizer(), path)
        ...     ga.data.load_tokenizer(path).decode([10, 8])
        'MK'
    """
    text = read_text(path)
    try:
        saved = json.loads(text)
    except json.JSONDecodeError as error:
        raise FileFormatError(path, f"is not JSON: {error.msg}", line=error.lineno) from None
    return tokenizer_from_dict(saved, path)


def read_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """Read a tokenizer from a file of :func:`save_tokenizer`, or of the `tokenizers` library.

    Raises:
        FileFormatError: if the file cannot be read, or is neither.
    """
    text = read_text(path)
    try:
        saved = json.loads(text)
    except json.JSONDecodeError:
        saved = None
    is_ours = isinstance(saved, dict) and "type" in saved and "model" not in saved
    return tokenizer_from_dict(saved, path) if is_ours else FileTokenizer(path)
