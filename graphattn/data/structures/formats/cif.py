"""The syntax of CIF 1.1 (Hall, Allen and Brown, 1991): data blocks of items, alone or in loops.

biotite's own parser needs capitals, line breaks and comments where the programs of the wwPDB put
them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from graphattn.data.files import FileFormatError

Tables = dict[str, dict[str, list[str]]]  # category -> item -> values; names in lower case

_WORD = re.compile(r"""'(.*?)'(?=\s|$)|"(.*?)"(?=\s|$)|\#.*|(\S+)""")
_NEEDS_A_LOOK = re.compile(r"['\"#]")
_KEYWORDS = ("data_", "save_", "loop_", "global_", "stop_")


class _Quoted(str):
    """A value in quotes: no keyword and no name, whatever it says."""

    __slots__ = ()


def cif_blocks(path: str | os.PathLike[str], text: str) -> list[Tables]:
    """Parse the data blocks of a file.

    Raises:
        FileFormatError: if a loop ends within a row, a name has no value, a value has no name, or a
            text between semicolons does not end.
    """
    blocks: list[Tables] = [{}]
    columns: list[list[str]] = []  # of the loop, or of the one item, that is being read
    values: list[str] = []
    in_loop, line = False, 1

    def finish() -> None:
        """Give the values to the items that were named before them."""
        width = len(columns)
        if len(values) % width if in_loop and width else len(values) != width:
            counts = f"{len(values)} values for {width} items"
            raise FileFormatError(path, f"is malformed: {counts} before this line", line=line)
        for place, column in enumerate(columns):
            column += values[place::width]
        columns.clear()
        values.clear()

    for line, words in _words_of_lines(path, text):  # noqa: B007 (finish reads it)
        if in_loop and values and not any("_" in word for word in words):
            values += words  # most lines are such rows
            continue
        for word in words:
            if isinstance(word, _Quoted) or not (
                word[0] == "_" or word.lower().startswith(_KEYWORDS)
            ):
                values.append(word)
            elif word[0] == "_":
                if values or not in_loop:
                    finish()
                    in_loop = False
                category, _, item = word[1:].lower().partition(".")
                columns.append(blocks[-1].setdefault(category, {}).setdefault(item, []))
            else:
                finish()
                in_loop = word.lower() == "loop_"
                if word.lower().startswith("data_"):
                    blocks.append({})
    finish()
    return blocks


def _words_of_lines(path: str | os.PathLike[str], text: str) -> Iterator[tuple[int, list[str]]]:
    """Split every line into words, without comments; a text between semicolons is one word."""
    text_field: list[str] | None = None  # the lines of the text that is being read
    first = 0
    for number, line in enumerate(text.split("\n"), start=1):
        rest = line
        if line.startswith(";"):
            rest = line[1:]
            if text_field is None:
                text_field, first = [rest], number
                continue
            yield number, [_Quoted("\n".join(text_field))]
            text_field = None
        elif text_field is not None:
            text_field.append(line)
            continue
        if _NEEDS_A_LOOK.search(rest) is None:
            yield number, rest.split()
            continue
        words: list[str] = []
        for match in _WORD.finditer(rest):
            quoted = match[1] if match[1] is not None else match[2]
            if quoted is not None:
                words.append(_Quoted(quoted))
            elif match[3] is not None:
                words.append(match[3])
        yield number, words
    if text_field is not None:
        raise FileFormatError(path, "is malformed: the text that begins here has no end", first)
