"""The code of a graph: its sizes and its structure as numbers, and back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from functools import lru_cache
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from graphattn.graphs.structures import composites, grid_blocks, grid_windows, sections, structure
from graphattn.graphs.structures.structure import GraphStructure

KINDS: tuple[type[GraphStructure], ...] = (
    structure.Band,
    structure.Cycle,
    structure.Complete,
    structure.Blocks,
    structure.Grid,
    structure.GlobalTokens,
    composites.RandomSources,
    composites.Union,
    composites.Parts,
    sections.Section,
    grid_windows.GridWindows,
    grid_blocks.GridBlocks,
)
WORDS = ("chebyshev", "manhattan")
HAS_TABLE = 4  # place of the fact that a graph is a table of neighbours
SIZES = 6  # where the sizes begin; how many sequences there are stands before them
PER_SEQUENCE = 4  # targets, sources, and the positions of the first of each


class Facts(Protocol):
    """Facts that generated code reads of a graph."""

    @property
    def num_targets(self) -> int: ...
    @property
    def num_sources(self) -> int: ...
    @property
    def is_causal(self) -> bool: ...
    @property
    def has_causal_part(self) -> bool: ...
    @property
    def is_table(self) -> bool: ...
    @property
    def sizes(self) -> tuple[tuple[int, int], ...]: ...
    @property
    def starts(self) -> tuple[tuple[int, int], ...]: ...
    @property
    def structure(self) -> GraphStructure | None: ...


def encode(graph: Facts) -> Tensor:
    """Everything about a graph but its list of edges or table of neighbours, int64 on the CPU.

    (And but the positions of a permuted graph: layers read them, operators do not.)

    Tensors are not read, wherever they lie: only which of the two there is.

    Example:
        >>> import graphattn as ga
        >>> from graphattn.graphs.encoding import decode, encode
        >>> graph = ga.batch([ga.causal_window_graph(9, 4), ga.complete_graph(3)])
        >>> decode(encode(graph), None, graph.device) == graph
        True
    """
    facts = [graph.num_targets, graph.num_sources, graph.is_causal, graph.has_causal_part]
    facts.append(graph.is_table)
    sizes = [
        number
        for size, start in zip(graph.sizes, graph.starts, strict=True)
        for number in (*size, *start)
    ]
    traced = torch.compiler.is_compiling()  # sizes may be left open then: no key of a cache
    of_structure = _numbers if traced else _kept_numbers
    own = [] if graph.structure is None else of_structure(graph.structure)
    return _as_tensor([*facts, len(graph.sizes), *sizes, *own])


def _as_tensor(numbers: list[int]) -> Tensor:
    if any(isinstance(number, torch.SymInt) for number in numbers):  # torch.export, non-strict
        one_by_one = [torch.scalar_tensor(number, dtype=torch.int64) for number in numbers]
        return torch.stack(one_by_one)
    return torch.tensor(numbers, dtype=torch.int64)


def facts_of(code: list[int]) -> dict[str, Any]:
    """Arguments of a graph, all but its structure, edges and device."""
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


def _numbers(own: GraphStructure) -> tuple[int, ...]:
    """The kind of a structure, then its fields in their order; lists begin with their length."""
    if type(own) not in KINDS:
        raise TypeError(
            f"structure {type(own).__name__} is not known to operators, which take a graph as "
            "numbers: build the graph with from_edge_index(structure.edges(), ...), or add the "
            "class to graphattn.graphs.structures.graph_code.KINDS "
            f"({', '.join(k.__name__ for k in KINDS)})"
        )
    found = [KINDS.index(type(own))]
    for field in fields(cast(Any, own)):
        value = getattr(own, field.name)
        if isinstance(value, tuple):
            found.append(len(value))
        for item in value if isinstance(value, tuple) else (value,):
            if isinstance(item, GraphStructure):
                found.extend(_numbers(item))
            else:
                found.append(_number(item))
    return tuple(found)


def _number(item: Any) -> Any:
    if isinstance(item, torch.SymInt):
        return item
    return WORDS.index(item) if isinstance(item, str) else int(item)


_kept_numbers = lru_cache(maxsize=1024)(_numbers)


def structure_of(numbers: Iterator[int]) -> GraphStructure:
    """The structure that these numbers are, or begin with."""
    kind = KINDS[next(numbers)]
    return kind(*(_field(field.type, numbers) for field in fields(cast(Any, kind))))


def _field(annotation: Any, numbers: Iterator[int]) -> Any:
    """The next field; its annotation (text) says how to read it."""
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
