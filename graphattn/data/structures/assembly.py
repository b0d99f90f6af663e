"""Biological assemblies: copies of chains, moved as the file says."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace

import torch
from torch import Tensor

from graphattn.data.files import FileFormatError
from graphattn.data.structures.structure import Structure, residues_of

Operation = list[list[float]]  # three rows of a rotation and, as the fourth column, a translation
Assemblies = dict[str, list[tuple[list[str], list[Operation]]]]  # name: (chains, operations), ...


def checked_assembly(assembly: object) -> str | None:
    """The name of an assembly, ``""`` for the first, None for what was deposited."""
    if assembly is None or assembly is True:
        return "" if assembly else None
    if not isinstance(assembly, str) or not assembly:
        raise ValueError(
            f"assembly must be None, True or the name of an assembly, got {assembly!r}"
        )
    return assembly


def assembled(
    path: str | os.PathLike[str],
    structure: Structure,
    chain_keys: list[str],
    assemblies: Assemblies,
    name: str,
) -> Structure:
    """The chains of an assembly: first those as deposited, then second copies, and so on.

    Args:
        path: what errors name.
        structure: the deposited chains.
        chain_keys: of every residue the name by which the assembly calls its chain.
        assemblies: of the file.
        name: of the assembly; the first for ``""``.
    """
    if not assemblies:
        raise ValueError(f"assembly must be None: the file describes none, got {name or True!r}")
    name = name or next(iter(assemblies))
    if name not in assemblies:
        existing = ", ".join(map(repr, assemblies))
        raise ValueError(f"assembly must be one of the file ({existing}), got {name!r}")

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
                if key in rows_of:  # not water, nor nucleic acids
                    copies[key] += 1
                    chain = int(structure.chain_index[rows_of[key][0]])
                    pieces.append((copies[key], chain, rows_of[key], len(moves) - 1))
    if not pieces:
        raise FileFormatError(path, f"assembly {name!r} has no protein chain")
    pieces.sort(key=lambda piece: piece[:3])

    chains = list(dict.fromkeys((copy, chain) for copy, chain, _, _ in pieces))
    number = {chain: index for index, chain in enumerate(chains)}
    index = [number[copy, chain] for copy, chain, own, _ in pieces for _ in own]
    chain_ids = tuple(
        structure.chain_ids[chain] + (f"-{copy}" if copy > 1 else "") for copy, chain in chains
    )
    rows = torch.tensor([row for _, _, own, _ in pieces for row in own])
    unmoved = residues_of(structure, rows, torch.tensor(index), chain_ids)
    matrix = torch.tensor(moves, dtype=torch.float64)
    matrix = matrix[[operation for _, _, own, operation in pieces for _ in own]]  # [N, 3, 4]
    atoms = {atom: _moved(places, matrix) for atom, places in unmoved.atoms.items()}
    return replace(unmoved, ca_positions=atoms["CA"], atoms=atoms)


def _moved(places: Tensor, matrix: Tensor) -> Tensor:
    """Places [N, 3] after one operation each, [N, 3, 4]."""
    rotated = (matrix[:, :, :3] @ places.double()[:, :, None])[:, :, 0]
    return (rotated + matrix[:, :, 3]).to(places.dtype)
