"""Structures as bytes that are fast to read: safetensors, with the strings as JSON."""

from __future__ import annotations

import json
from typing import Any

import torch

from graphattn.data.structures import Structure
from graphattn.data.structures.structure import residues_of

_TENSORS = ("chain_index", "residue_numbers", "b_factors")
_STRINGS = ("sequence", "chain_ids", "insertion_codes", "residue_names")


def structure_as_bytes(structure: Structure) -> bytes:
    """Convert a structure with all its attributes to bytes."""
    from safetensors.torch import save

    strings = {name: getattr(structure, name) for name in _STRINGS}
    text = json.dumps(strings | {"has_all_atoms": structure.has_all_atoms})
    tensors = {name: getattr(structure, name) for name in _TENSORS}
    tensors |= {f"atoms.{name}": places for name, places in structure.atoms.items()}
    tensors["strings"] = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    return save({name: value.contiguous() for name, value in tensors.items()})


def structure_from_bytes(data: bytes) -> Structure:
    """Restore a structure from the bytes of :func:`structure_as_bytes`."""
    from safetensors.torch import load

    tensors = load(data)
    strings: dict[str, Any] = json.loads(tensors.pop("strings").numpy().tobytes())
    atoms = {
        name.removeprefix("atoms."): tensors.pop(name)
        for name in list(tensors)
        if name.startswith("atoms.")
    }
    return Structure(**strings, **dict[str, Any](tensors), ca_positions=atoms["CA"], atoms=atoms)


def part_of_structure(structure: Structure, start: int, stop: int) -> Structure:
    """Return the residues `start` to `stop - 1`, with their chains."""
    if start == 0 and stop == len(structure):
        return structure
    rows = torch.arange(start, stop)
    chains, index = structure.chain_index[rows].unique(return_inverse=True)
    names = tuple(structure.chain_ids[chain] for chain in chains.tolist())
    return residues_of(structure, rows, index, names)
