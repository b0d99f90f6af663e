"""Substitutions as text: "A42G" is residue A at number 42 that becomes G."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from graphattn.graphs.arguments import as_choice

AMINO_ACIDS = "ACDEFGHIKLMNPQRSTVWY"
NUMBERINGS = ("sequence", "structure")
_SUBSTITUTION = re.compile(
    r"(?:(?P<chain>[^/:]+)/)?(?P<wild>[A-Za-z])(?P<number>-?\d+)(?P<code>[A-Za-z]?)(?P<to>[A-Za-z])"
)
_EXAMPLE = "a substitution such as 'A42G', or several such as 'A42G:L50P'"


class Mutation(NamedTuple):
    """One substitution."""

    residue: int  # index, from 0
    wild: str
    mutant: str


def parsed(text: Any, sequence: str, structure: Any, numbering: str) -> list[Mutation]:
    """Parse the substitutions of a mutant, "A42G" or "A42G:L50P".

    `numbering` "sequence" counts residues from 1. "structure" uses the numbers of the structure,
    with an insertion code ("A52AG": 52A) and, if several chains have a number, the chain
    ("B/A42G").
    """
    as_choice("numbering", numbering, NUMBERINGS)
    if numbering == "structure" and structure is None:
        raise ValueError(
            "numbering must be 'sequence' for a sequence of letters, got 'structure': give a "
            "Structure to use its residue numbers"
        )
    if not isinstance(text, str) or not text:
        raise ValueError(f"mutations must contain strings, {_EXAMPLE}, got {text!r}")
    mutations: dict[int, Mutation] = {}
    for part in text.split(":"):
        mutation = _one(part, text, sequence, structure, numbering)
        if mutation.residue in mutations:
            raise ValueError(
                f"mutations must change a residue only once, got {text!r}, where {part!r} changes "
                "a residue again"
            )
        mutations[mutation.residue] = mutation
    return list(mutations.values())


def _one(part: str, text: str, sequence: str, structure: Any, numbering: str) -> Mutation:
    match = _SUBSTITUTION.fullmatch(part)
    if match is None:
        chain = "" if structure is None else ", or with chain H 'H/A42G'"
        raise ValueError(f"mutations must contain {_EXAMPLE}{chain}; got {part!r} in {text!r}")
    wild, mutant = match["wild"].upper(), match["to"].upper()
    for letter in (wild, mutant):
        if letter not in AMINO_ACIDS:
            raise ValueError(
                f"mutations must name amino acids by one of {AMINO_ACIDS}, got {letter!r} in "
                f"{text!r}"
            )
    number, code = int(match["number"]), match["code"]
    if numbering == "structure":
        index = _in_structure(part, match["chain"], number, code, structure)
    else:
        if match["chain"] is not None or code:
            raise ValueError(
                f"mutations must have no chain and no insertion code, got {part!r}: use "
                "numbering='structure' for these"
            )
        if not 1 <= number <= len(sequence):
            raise ValueError(
                f"mutations must have residue numbers in 1 .. {len(sequence)}, the length of the "
                f"sequence, got {number} in {text!r}"
            )
        index = number - 1
    there = sequence[index]
    if there != wild:
        raise ValueError(
            f"mutations must begin with the residue of the sequence at that number: {part!r} has "
            f"{wild}, but the sequence has {there} at {number}{code}"
        )
    return Mutation(index, wild, mutant)


def _in_structure(part: str, chain: str | None, number: int, code: str, structure: Any) -> int:
    """Return the index of the residue with this number."""
    ids = structure.chain_ids
    if chain is not None and chain not in ids:
        raise ValueError(
            f"mutations must name chains of the structure ({', '.join(map(repr, ids))}), got "
            f"{chain!r} in {part!r}"
        )
    places = [
        index
        for index in (structure.residue_numbers == number).nonzero()[:, 0].tolist()
        if structure.insertion_codes[index].upper() == code.upper()
        and (chain is None or ids[int(structure.chain_index[index])] == chain)
    ]
    as_written = [index for index in places if structure.insertion_codes[index] == code]
    places = as_written or places  # if both 52a and 52A exist
    if not places:
        where = "" if chain is None else f" in chain {chain!r}"
        raise ValueError(
            f"mutations must have residue numbers of the structure, got {number}{code} in "
            f"{part!r}, which does not exist{where}"
        )
    if len(places) > 1:
        owners = ", ".join(repr(ids[int(structure.chain_index[index])]) for index in places)
        raise ValueError(
            "mutations must name the chain if several chains have the residue number: "
            f"{number}{code} is in the chains {owners}. Write for instance {ids[0]}/{part}"
        )
    return places[0]
