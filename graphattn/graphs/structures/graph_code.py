"""The code of a graph: its sizes and its structure as numbers in a tensor.

A custom operator takes a graph in this form. torch.compile compiles again for every new Python
object, but not for new values in a tensor, so an operator is compiled once for all windows and
lengths.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor

from graphattn.graphs.structures import composites, grid_blocks, grid_windows, structure
from graphattn.graphs.structures.structure import GraphStructure

KINDS: tuple[type[GraphStructure], ...] = (
    structure.Band,
    structure.Cycle,
    structure.Complete,
    structure.Blocks,
    grid_windows.Grid,
    structure.GlobalTokens,
    composites.RandomSources,
    composites.Union,
    composites.Parts,
    composites.Section,
    grid_windows.GridWindows,
    grid_blocks.GridBlocks,
)
WORDS = ("chebyshev", "manhattan")
HAS_TABLE = 4  # the index of the number that says whether a graph stores a table of neighbours
SIZES = 6  # the index of the first size; the number of sequences is before it
PER_SEQUENCE = 4  # numbers per sequence: targets, sources, and the positions of the first of each


def encode(graph: Any) -> Tensor:
    """Encode a TokenGraph as an int64 tensor on the CPU, without its list of edges or table.

    The code only says whether the graph stores a table or a list. The positions of a permuted graph
    are not encoded either, because layers read them, but operators do not. No tensor is read, so
    this never waits for a device. :func:`graphattn.graphs.token_graph.decode` decodes it.
    """
    facts = [graph.num_targets, graph.num_sources, graph.is_causal, graph.has_causal_part]
    facts.append(graph.is_table)
    sizes = [
        number
        for size, start in zip(graph.sizes, graph.starts, strict=True)
        for number in (*size, *start)
    ]
    traced = torch.compiler.is_compiling()  # Sizes may be symbolic then, which is no cache key.
    of_structure = _numbers if traced else _cached_numbers
    structure = () if graph.structure is None else of_structure(graph.structure)
    return _as_tensor([*facts, len(graph.sizes), *sizes, *structure])


def _as_tensor(numbers: list[int]) -> Tensor:
    if any(isinstance(number, torch.SymInt) for number in numbers):  # torch.export, non-strict
        one_by_one = [torch.scalar_tensor(number, dtype=torch.int64) for number in numbers]
        return torch.stack(one_by_one)
    return torch.tensor(numbers, dtype=torch.int64)


def facts_of(code: list[int]) -> dict[str, Any]:
    """Decode the arguments of a graph except for its structure, edges and device."""
    numbers = code[SIZES : SIZES + PER_SEQUENCE * code[SIZES - 1]]
    targets, sources, *first = (tuple(numbers[k::PER_SEQUENCE]) for k in range(PER_SEQUENCE))
    return {
        "num_targets": code[0],
        "num_sources": code[1],
        "is_causal": bool(code[2]),
        "has_causal_part": bool(code[3]),
        "sizes": tuple(zip(targets, sources, strict=True)),
        "starts": tuple(zip(*first, strict=True)),
    }


def _numbers(graph_structure: GraphStructure) -> tuple[int, ...]:
    """Encode a structure: the number of its class, then its fields; tuples begin with a length."""
    kind = type(graph_structure)
    if kind not in KINDS:
        raise TypeError(
            f"structure must be one of ({', '.join(k.__name__ for k in KINDS)}), got "
            f"{kind.__name__}: operators take a graph as numbers, and do not know this class. "
            "Build the graph with from_edge_index(structure.edges(), ...), or add the class to "
            "graphattn.graphs.structures.graph_code.KINDS"
        )
    values = [getattr(graph_structure, field.name) for field in fields(cast(Any, graph_structure))]
    return KINDS.index(kind), *(number for value in values for number in _encoded(value))


def _encoded(value: Any) -> tuple[Any, ...]:
    """Encode the value of a field; :func:`_field` reads it."""
    if isinstance(value, tuple):
        return len(value), *(number for item in value for number in _encoded(item))
    if isinstance(value, GraphStructure):
        return _numbers(value)
    if isinstance(value, str):
        return (WORDS.index(value),)
    return (value if isinstance(value, torch.SymInt) else int(value),)


_cached_numbers = lru_cache(maxsize=1024)(_numbers)


def structure_of(numbers: Iterator[int]) -> GraphStructure:
    """Decode the structure at the beginning of these numbers."""
    kind = KINDS[next(numbers)]
    return kind(*(_field(field.type, numbers) for field in fields(cast(Any, kind))))


def _field(annotation: Any, numbers: Iterator[int]) -> Any:
    """Decode the next field, as its annotation says.

    The code has plain numbers, which do not say whether 1 is an integer, True or a word. The class
    says this by the annotations of its fields, and these are strings in every module with
    ``from __future__ import annotations``. A field of another type needs another case here.
    """
    match annotation:
        case "GraphStructure":
            return structure_of(numbers)
        case "tuple[GraphStructure, ...]":
            return tuple(structure_of(numbers) for _ in range(next(numbers)))
        case "tuple[int, ...]":
            return tuple(next(numbers) for _ in range(next(numbers)))
        case "tuple[bool, ...]":
            return tuple(bool(next(numbers)) for _ in range(next(numbers)))
        case "bool":
            return bool(next(numbers))
        case "int":
            return next(numbers)
    return WORDS[next(numbers)]
