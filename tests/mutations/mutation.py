"""Define a mutation: one change of the code that a test must notice."""

from typing import NamedTuple


class Mutation(NamedTuple):
    """`old` stands `count` times in `file`; with `new` in its place, one of `caught_by` fails."""

    name: str
    file: str
    old: str
    new: str
    caught_by: tuple[str, ...]
    count: int = 1
