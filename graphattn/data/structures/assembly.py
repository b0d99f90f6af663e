"""Biological assemblies: copies of chains, rotated and translated as the file says."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace

import torch
from torch import Tensor

from graphattn.data.files import FileFormatError
from graphattn.data.structures.structure import Structure, residues_of

Operation = list[list[float]]  # [3, 4]: a rotation, and a translation as the fourth column
Assemblies = dict[str, list[tuple[list[str], list[Operation]]]]  # name -> (chains, operations), ...


def checked_assembly(assembly: object) -> str | None:
    """Return the name of an assembly, ``""`` for the first one, or None for no assembly."""
    if assembly is None or assembly is True:
        return "" if assembly else None
    if not isinstance(assembly, str) or not assembly:
        raise ValueError(
            "assembly must be None, True (for the first assembly) or the name of an assembly, got "
            f"{assembly!r}"
        )
    return assembly


def assembled(
    path: str | os.PathLike[str],
    structure: Structure,
    chain_keys: list[str],
    assemblies: Assemblies,
    name: str,
) -> Structure:
    """Make the assembly `name`, or the first one: first copies of all chains, then second copies.

    `chain_keys` are the names of the residues' chains in the description of assemblies.
    """
    if not assemblies:
        raise ValueError(
            f"assembly must be None, because the file describes no assembly, got {name or True!r}"
        )
    name = name or next(iter(assemblies))
    if name not in assemblies:
        existing = ", ".join(map(repr, assemblies))
        raise ValueError(
            f"assembly must be an assembly of the file, which are {existing}, got {name!r}"
        )

    rows_of: dict[str, list[int]] = {}
    for row, key in enumerate(chain_keys):
        rows_of.setdefault(key, []).append(row)
    copies: Counter[str] = Counter()
    pieces: list[tuple[int, int, list[int], int]] = []  # copy, chain, residues, operation
    moves: list[Operation] = []
    for keys, operations in assemblies[name]:
        for operation in operations:
            moves.append(operation)
            for key in dict.fromkeys(keys):
                if key in rows_of:  # Water and nucleic acids were not read.
                    copies[key] += 1
                    chain = int(structure.chain_index[rows_of[key][0]])
                    pieces.append((copies[key], chain, rows_of[key], len(moves) - 1))
    if not pieces:
        raise FileFormatError(path, f"assembly {name!r} has no protein chain")
    pieces.sort(key=lambda piece: piece[:3])

    chains = list(dict.fromkeys((copy, chain) for copy, chain, _, _ in pieces))
    number = {chain: index for index, chain in enumerate(chains)}
    index = [number[copy, chain] for copy, chain, residue_rows, _ in pieces for _ in residue_rows]
    chain_ids = tuple(
        structure.chain_ids[chain] + (f"-{copy}" if copy > 1 else "") for copy, chain in chains
    )
    rows = torch.tensor([row for _, _, residue_rows, _ in pieces for row in residue_rows])
    copied = residues_of(structure, rows, torch.tensor(index), chain_ids)
    move_of = [operation for _, _, residue_rows, operation in pieces for _ in residue_rows]
    matrix = torch.tensor(moves, dtype=torch.float64)[move_of]  # [N, 3, 4]
    atoms = {atom: _transformed(places, matrix) for atom, places in copied.atoms.items()}
    return replace(copied, ca_positions=atoms["CA"], atoms=atoms)


def _transformed(places: Tensor, matrix: Tensor) -> Tensor:
    """Apply one operation [3, 4] to every point, of `places` [N, 3] and `matrix` [N, 3, 4]."""
    rotated = (matrix[:, :, :3] @ places.double()[:, :, None])[:, :, 0]
    return (rotated + matrix[:, :, 3]).to(places.dtype)
