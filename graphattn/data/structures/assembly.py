"""Biological assemblies: copies of chains, moved as the file says."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace

import torch

from graphattn.data.files import FileFormatError
from graphattn.data.structures.structure import Structure

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

    copies: Counter[str] = Counter()
    pieces: list[tuple[int, int, list[int], int]] = []  # copy, chain, residues, operation
    moves: list[Operation] = []
    for keys, operations in assemblies[name]:
        for operation in operations:
            moves.append(operation)
            for key in dict.fromkeys(keys):
                rows = [row for row, own in enumerate(chain_keys) if own == key]
                if rows:
                    copies[key] += 1
                    chain = int(structure.chain_index[rows[0]])
                    pieces.append((copies[key], chain, rows, len(moves) - 1))
    if not pieces:
        raise FileFormatError(path, f"assembly {name!r} has no protein chain")
    pieces.sort(key=lambda piece: piece[:3])

    chains = list(dict.fromkeys((copy, chain) for copy, chain, _, _ in pieces))
    number = {chain: index for index, chain in enumerate(chains)}
    chain_index = [number[copy, chain] for copy, chain, rows, _ in pieces for _ in rows]
    move = [own for _, _, rows, own in pieces for _ in rows]
    matrix = torch.tensor(moves, dtype=torch.float64)[move]  # [N, 3, 4]
    unmoved = structure.rows([row for _, _, rows, _ in pieces for row in rows])
    atoms = {
        atom: ((matrix[:, :, :3] @ places.double()[:, :, None])[:, :, 0] + matrix[:, :, 3]).to(
            places.dtype
        )
        for atom, places in unmoved.atoms.items()
    }
    return replace(
        unmoved,
        ca_positions=atoms["CA"],
        atoms=atoms,
        chain_index=torch.tensor(chain_index),
        chain_ids=tuple(
            structure.chain_ids[chain] + (f"-{copy}" if copy > 1 else "") for copy, chain in chains
        ),
    )
