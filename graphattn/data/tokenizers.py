"""Tokens of bytes, tokens as a file of the `tokenizers` library says, and tokenizers as files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from graphattn.data.fasta import NucleotideTokenizer, ProteinTokenizer
from graphattn.data.files import FileFormatError, read_text
from graphattn.data.text import CharacterTokenizer


class Tokenizer(Protocol):
    """Interface of every tokenizer here: text to a LongTensor [N] and back.

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
        """The tokens of `text`: a LongTensor [N]."""

    def decode(self, tokens: Tensor | Sequence[int], /) -> str:
        """The text of `tokens`: integers [N] in ``0..vocab_size - 1``."""


class ByteTokenizer:
    """One token per byte of a text's UTF-8 form: 256 tokens, and no text that it does not know.

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
        """The tokens of `text`: a LongTensor [N], N = its bytes in UTF-8.

        Raises:
            ValueError: `text` holds half of a character (a lone surrogate), which UTF-8 has not.
        """
        try:
            return torch.tensor(list(text.encode("utf-8")), dtype=torch.long)
        except UnicodeEncodeError as error:
            raise ValueError(
                f"text must hold characters that UTF-8 has, got {text[error.start]!a} at position "
                f"{error.start}"
            ) from None

    def decode(self, tokens: Tensor | Sequence[int]) -> str:
        """The text of `tokens`: integers [N] in 0..255.

        Bytes that are no UTF-8, as where a character was cut in two, become U+FFFD.

        Raises:
            ValueError: `tokens` is not one-dimensional, or holds something else.
        """
        return bytes(_as_tokens(tokens, self.vocab_size)).decode("utf-8", errors="replace")

    def __repr__(self) -> str:
        return "ByteTokenizer()"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByteTokenizer)

    def __hash__(self) -> int:
        return hash(ByteTokenizer)


class FileTokenizer:
    """The tokenizer that a file of the `tokenizers` library describes (``tokenizer.json``).

    Byte pairs, WordPiece, unigrams: whatever the file says, also of letters that it has no token
    for: they become its unknown token, or nothing. No special tokens are added.

    Args:
        path: the file; :func:`save_tokenizer` keeps its content.

    Raises:
        FileFormatError: the file cannot be read, or is no such file.
        ImportError: `tokenizers` is not installed.

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
        """The tokenizer of a file's content; `path` is where errors say it stood."""
        tokenizer = cls.__new__(cls)
        tokenizer._read(path, text)
        return tokenizer

    def _read(self, path: str | os.PathLike[str], text: str) -> None:
        try:
            import tokenizers
        except ImportError as error:
            raise ImportError(
                "FileTokenizer needs tokenizers: pip install 'graphattn[train]'"
            ) from error
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises plain Exception
            raise FileFormatError(path, f"is no file of the tokenizers library: {error}") from error
        # A file may ask for windows of one length; here all of a text becomes tokens.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        tokens = self._tokenizer.get_vocab(with_added_tokens=True).values()
        self.vocab_size = max(tokens, default=-1) + 1  # a file may leave numbers out

    def encode(self, text: str) -> Tensor:
        """The tokens of `text`: a LongTensor [N]."""
        found = self._tokenizer.encode(text, add_special_tokens=False)
        return torch.tensor(found.ids, dtype=torch.long)

    def decode(self, tokens: Tensor | Sequence[int]) -> str:
        """The text of `tokens`: integers [N] in ``0..vocab_size - 1``.

        Raises:
            ValueError: `tokens` is not one-dimensional, or holds something else.
        """
        own = _as_tokens(tokens, self.vocab_size)
        return self._tokenizer.decode(own, skip_special_tokens=False)

    def to_json(self) -> str:
        """The content of a file that describes this tokenizer."""
        return self._tokenizer.to_str()

    def __repr__(self) -> str:
        return f"FileTokenizer(vocab_size={self.vocab_size})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FileTokenizer) and self.to_json() == other.to_json()

    def __hash__(self) -> int:
        return hash((FileTokenizer, self.vocab_size))


def _as_tokens(tokens: Tensor | Sequence[int], vocab_size: int) -> list[int]:
    """`tokens` as a list of integers below `vocab_size`."""
    if isinstance(tokens, Tensor):
        if tokens.dim() != 1:
            raise ValueError(f"tokens must have shape [N], got {list(tokens.shape)}")
        tokens = tokens.tolist()
    own: list[int] = list(tokens)
    for token in own:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise ValueError(f"tokens must be integers from 0 to {vocab_size - 1}, got {token!r}")
    return own


_WITHOUT_OPTIONS: dict[str, Callable[[], Tokenizer]] = {
    "ByteTokenizer": ByteTokenizer,
    "ProteinTokenizer": ProteinTokenizer,
    "NucleotideTokenizer": NucleotideTokenizer,
}


def tokenizer_as_dict(tokenizer: Any) -> dict[str, Any]:
    """Return the JSON form of a tokenizer."""
    name = type(tokenizer).__name__
    if isinstance(tokenizer, CharacterTokenizer):
        return {"type": name, "vocabulary": tokenizer.vocabulary}
    if isinstance(tokenizer, FileTokenizer):
        return {"type": name, "file": json.loads(tokenizer.to_json())}
    if _WITHOUT_OPTIONS.get(name) is type(tokenizer):
        return {"type": name}
    known = ", ".join(["CharacterTokenizer", "FileTokenizer", *_WITHOUT_OPTIONS])
    raise ValueError(f"tokenizer must be one of {known}, got {tokenizer!r}")


def tokenizer_from_dict(found: Any, path: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer that :func:`tokenizer_as_dict` took apart; `path` is where errors say it is."""
    name = found.get("type") if isinstance(found, dict) else None
    if name in _WITHOUT_OPTIONS:
        return _WITHOUT_OPTIONS[name]()
    if name == "CharacterTokenizer" and isinstance(found.get("vocabulary"), str):
        try:
            return CharacterTokenizer(found["vocabulary"])
        except ValueError as error:
            raise FileFormatError(path, str(error)) from None
    if name == "FileTokenizer" and "file" in found:
        return FileTokenizer._of_json(path, json.dumps(found["file"]))
    hint = ""
    if isinstance(found, dict) and "model" in found:
        hint = "; FileTokenizer(path) reads a file of the tokenizers library"
    raise FileFormatError(path, f"is no tokenizer that save_tokenizer wrote{hint}")


def save_tokenizer(tokenizer: Tokenizer, path: str | os.PathLike[str]) -> None:
    """Write a tokenizer as JSON, whole: a :class:`FileTokenizer` with the content of its file.

    The file is written under another name first, so that none is ever half there.

    Args:
        tokenizer: one of the five of this module.
        path: the file.

    Raises:
        ValueError: `tokenizer` is another object.

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
    aside = target.with_name(f"{target.name}.part-{os.getpid()}")
    try:
        aside.write_text(text + "\n", encoding="utf-8")
        os.replace(aside, target)
    finally:
        aside.unlink(missing_ok=True)


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """Read a tokenizer that :func:`save_tokenizer` wrote.

    Args:
        path: the file.

    Raises:
        FileFormatError: the file cannot be read, or holds no such tokenizer.
        ImportError: it is a :class:`FileTokenizer`, and `tokenizers` is not installed.

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
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise FileFormatError(path, f"is not JSON: {error.msg}", line=error.lineno) from None
    return tokenizer_from_dict(found, path)
