"""Encoding of long texts piece by piece, as small integers."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy

from graphattn.data.fasta import NucleotideTokenizer, ProteinTokenizer
from graphattn.data.files import FileFormatError
from graphattn.data.text import CharacterTokenizer
from graphattn.data.tokenizers import ByteTokenizer, FileTokenizer

_UNKNOWN, _DROPPED = -1, -2


def token_dtype(vocab_size: int) -> Any:
    """Return the smallest dtype of unsigned integers for all tokens."""
    return numpy.min_scalar_type(max(vocab_size - 1, 0))


class UnknownLetter(ValueError):
    """A text has a letter without a token, at the index `place`."""

    def __init__(self, letter: str, place: int, reason: str) -> None:
        super().__init__(reason)
        self.letter, self.place, self.reason = letter, place, reason


class LetterTable:
    """A table with the token of every letter, for tokenizers that encode letter by letter.

    It gives the same tokens as the tokenizer's ``encode``, and is many times faster.
    """

    def __init__(self, tokenizer: CharacterTokenizer | ProteinTokenizer | NucleotideTokenizer):
        self._tokenizer = tokenizer
        known = list(getattr(tokenizer, "_token_of", None) or map(chr, range(128)))
        # The additional last entry stands for all larger code points, which are unknown.
        table = numpy.full(max(127, *map(ord, known)) + 2, _UNKNOWN, dtype=numpy.int32)
        for letter in known:
            try:
                tokens = tokenizer.encode(letter)
            except ValueError:
                continue
            table[ord(letter)] = int(tokens[0]) if len(tokens) else _DROPPED
        self._table = table
        self._drops = bool((table == _DROPPED).any())
        self._dtype = token_dtype(tokenizer.vocab_size)

    def encode(self, text: str) -> Any:
        """Return the tokens of `text`; raise UnknownLetter for the first letter without one."""
        if text.isascii():
            all_tokens = self._table[numpy.frombuffer(text.encode("ascii"), numpy.uint8)]
        else:
            points = numpy.frombuffer(text.encode("utf-32-le"), numpy.uint32)
            all_tokens = self._table[numpy.minimum(points, len(self._table) - 1)]
        tokens = all_tokens[all_tokens != _DROPPED] if self._drops else all_tokens
        if len(tokens) and int(tokens.min()) == _UNKNOWN:
            place = int((all_tokens == _UNKNOWN).argmax())
            raise UnknownLetter(text[place], place, self._reason(text[place]))
        return tokens.astype(self._dtype)

    def _reason(self, letter: str) -> str:
        if isinstance(self._tokenizer, CharacterTokenizer):
            size = self._tokenizer.vocab_size
            name = f"{letter!a} (U+{ord(letter):04X})"
            return f"{name} is not in the tokenizer's vocabulary of {size} characters"
        return f"{letter!a} in a sequence is no {self._tokenizer._kind} letter"


def text_tokens(
    path: str | os.PathLike[str], pieces: Iterable[str], tokenizer: Any
) -> Iterator[Any]:
    """Yield the tokens of a text that is given in pieces."""
    if isinstance(tokenizer, ByteTokenizer):
        for piece in pieces:
            yield numpy.frombuffer(piece.encode("utf-8"), numpy.uint8)
    elif isinstance(tokenizer, FileTokenizer):
        yield from _file_tokens(pieces, tokenizer)
    else:
        table, line = LetterTable(tokenizer), 1
        for piece in pieces:
            try:
                tokens = table.encode(piece)
            except UnknownLetter as error:
                line += piece.count("\n", 0, error.place)
                raise FileFormatError(path, error.reason, line=line) from None
            line += piece.count("\n")
            yield tokens


# A single blank between other characters: most tokenizers separate words before or after it.
_BETWEEN_WORDS = re.compile(r"(?<=\S)\s(?=\S)")
_AROUND = 256  # characters on each side that are encoded to test a place
_TRIES = 50  # blanks that are tried


def _file_tokens(pieces: Iterable[str], tokenizer: FileTokenizer) -> Iterator[Any]:
    """Yield the tokens of a text that is cut where the cut changes no token.

    A place is suitable if the text around it has the same tokens whole and in two parts. If none of
    the last 50 blanks of a piece is suitable, the text is cut at the last blank.
    """
    encode = tokenizer._encode_fast
    dtype, rest = token_dtype(tokenizer.vocab_size), ""
    for piece in pieces:
        rest += piece
        place = _place_to_cut(rest, encode)
        yield numpy.array(encode(rest[:place]), dtype)
        rest = rest[place:]
    if rest:
        yield numpy.array(encode(rest), dtype)


def _place_to_cut(text: str, encode: Callable[[str], list[int]]) -> int:
    blanks = [m.start() for m in _BETWEEN_WORDS.finditer(text, max(0, len(text) - 2**14))]
    for blank in reversed(blanks[-_TRIES:]):
        for place in (blank, blank + 1):
            before = text[max(0, place - _AROUND) : place]
            after = text[place : place + _AROUND]
            if encode(before + after) == encode(before) + encode(after):
                return place
    return blanks[-1] if blanks else len(text)
