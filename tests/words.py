"""The words that a documentation string may not begin with, and who begins with one.

    python tests/words.py graphattn/ops kernels   # lists file, line, name and first sentence

A first sentence is what a tooltip shows, alone: it begins with a verb or a full noun, and points at
nothing outside itself.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
FOLDERS = "graphattn", "kernels", "tests", "examples"

# Pronouns, conjunctions, prepositions and genitives: they say that a sentence goes on from another.
REFUSED = """
    what whatever which who whom whose where when why as of with without within for in into by from
    to at on under over its it it's their theirs they them his her this these that those such same
    other others another and but or nor so then than also likewise if unless until while because
    since though beside besides both either neither here there itself themselves only just
    """
REFUSED_PAIRS = frozenset({"the same", "the other", "the others", "the like", "the former"})


class Beginning(NamedTuple):
    """The first sentence of a documentation string, and where it stands."""

    path: str
    line: int
    name: str
    sentence: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {self.name}: {self.sentence}"


def beginnings(path: Path) -> Iterator[Beginning]:
    """Yield the first sentence of the file, of its classes and of its functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                sentence = re.split(r"(?<=[.:;?!])\s", " ".join(text.split()), maxsplit=1)[0]
                yield Beginning(
                    str(path.relative_to(ROOT)),
                    node.body[0].lineno,
                    getattr(node, "name", "(file)"),
                    sentence,
                )


def begins_badly(sentence: str) -> bool:
    """Whether a sentence begins with a word that points outside of it.

    >>> begins_badly("What a row holds."), begins_badly("Rows of a tile.")
    (True, False)
    """
    words = re.findall(r"[A-Za-z'`]+", sentence.lower())[:2]
    return bool(words) and (words[0] in REFUSED.split() or " ".join(words) in REFUSED_PAIRS)


def found(folders: tuple[str, ...] = FOLDERS) -> list[Beginning]:
    """List the first sentences that begin badly in some folders or files."""
    paths: list[Path] = []
    for folder in folders:
        where = ROOT / folder
        paths += [where] if where.is_file() else sorted(where.rglob("*.py"))
    return [b for path in paths for b in beginnings(path) if begins_badly(b.sentence)]


if __name__ == "__main__":
    print("\n".join(map(str, found(tuple(sys.argv[1:]) or FOLDERS))))
