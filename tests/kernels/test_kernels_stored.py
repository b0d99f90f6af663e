"""Stored tables on a GPU: none is made by a CUDA graph, and none is read before it is there.

There is no GPU here: streams, events and captures are stand-ins that write down what is asked.
"""

from __future__ import annotations

import ast
import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import graphattn as ga
from graphattn.graphs.edges import storage
from graphattn.graphs.structures.bands import band_schedule_of
from graphattn.kernels.bands import schedule as bands
from graphattn.kernels.bands.schedule import BandSchedule
from graphattn.kernels.consensus.schedule import ConsensusSchedule
from graphattn.kernels.edges.schedule import EdgeSchedule
from graphattn.kernels.shared import stored as module
from graphattn.kernels.shared.stored import copied, stored, stores_results
from graphattn.ops.edge_cache import cached_by_edges

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
ROOT = Path(ga.__file__).parent


class Stream:
    """A stream that counts its events and notes for which it waits."""

    def __init__(self, name: str) -> None:
        self.name, self.events, self.waited = name, 0, []  # type: ignore[var-annotated]

    def record_event(self) -> tuple[str, int]:
        self.events += 1
        return self.name, self.events

    def wait_event(self, event: tuple[str, int]) -> None:
        self.waited.append(event)


class Cuda:
    """Answers of torch.cuda: the current stream, and whether it is captured."""

    def __init__(self) -> None:
        self.first, self.second = Stream("first"), Stream("second")
        self.stream, self.capturing = self.first, False
        self.recorded: list[tuple[torch.Tensor, Stream]] = []


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuda]:
    state = Cuda()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: state.stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.capturing)
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda x, stream: state.recorded.append((x, stream))
    )
    monkeypatch.setattr(module, "_read_by_graphs", set())
    yield state
    band_schedule_of.cache_clear()


def on_gpu(*shape: int) -> torch.Tensor:
    """A tensor whose device is a GPU, without memory."""
    with FakeTensorMode():
        return torch.empty(*shape, device="cuda:0")


def test_a_reader_on_another_stream_waits_once_and_keeps_the_memory(cuda: Cuda) -> None:
    place: dict[str, Any] = {}
    made = {"a": on_gpu(2), "b": [on_gpu(3)], "cpu": torch.ones(1)}
    for stream in (cuda.first, cuda.first, cuda.second, cuda.second, cuda.first):
        cuda.stream = stream
        assert stored(place, "table", GPU, lambda: made) is made
    assert (cuda.first.waited, cuda.second.waited) == ([], [("first", 1)])
    assert cuda.recorded == [(made["a"], cuda.second), (made["b"][0], cuda.second)]  # type: ignore[index]


def test_what_a_capture_makes_is_not_stored(cuda: Cuda) -> None:
    place: dict[str, Any] = {}
    cuda.capturing = True
    first = stored(place, "table", GPU, lambda: torch.ones(1))
    assert place == {}
    cuda.capturing = False
    second = stored(place, "table", GPU, lambda: torch.ones(1))
    assert second is not first
    assert stored(place, "table", GPU, lambda: torch.ones(1)) is second


def test_what_a_capture_reads_is_never_freed_and_not_waited_for(cuda: Cuda) -> None:
    place: dict[str, Any] = {}
    one, other = (
        weakref.ref(stored(place, name, GPU, lambda: torch.ones(1))) for name in ("one", "other")
    )
    cuda.stream, cuda.capturing = cuda.second, True
    assert stored(place, "one", GPU, lambda: torch.ones(1)) is one()
    assert cuda.second.waited == []  # a capture must not wait for an event outside of it
    place.clear()
    gc.collect()
    assert one() is not None
    assert other() is None


def test_a_table_of_the_host_is_refused_during_a_capture(cuda: Cuda) -> None:
    cuda.capturing = True
    with pytest.raises(RuntimeError, match="make the same call once before the capture"):
        copied(torch.ones(1), GPU)
    assert copied(torch.ones(1), CPU) == 1


def test_a_cpu_asks_for_no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("current_stream", "is_current_stream_capturing"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: pytest.fail("asked"))
    place: dict[str, Any] = {}
    for _ in range(2):
        stored(place, "table", CPU, lambda: torch.ones(1))
    assert torch.is_tensor(place["table"])
    graph = ga.window_path_graph(5, 1)
    for _ in range(2):
        _ = graph.edge_index, graph.positions, graph.transpose().rowptr, graph.listed
        cached_by_edges(graph, lambda *_: None)
        graph.derived("plan", lambda: 1)
        _ = EdgeSchedule(5, 5, edge_index=graph.edge_index).by_source
        band_schedule_of(graph.structure, CPU).tiles("targets", 16)


Reader = Callable[[], object]


def of_schedule(side: str, sources: int, **edges: torch.Tensor) -> Callable[..., Reader]:
    def reader(monkeypatch: pytest.MonkeyPatch) -> Reader:
        monkeypatch.setattr(EdgeSchedule, "device", GPU)
        schedule = EdgeSchedule(3, sources, **edges)
        return lambda: getattr(schedule, side)

    return reader


def of_consensus(_: pytest.MonkeyPatch) -> Reader:
    schedule = ConsensusSchedule(3, 2, GPU, edge_index=EDGES)
    return lambda: schedule.pieces(2)


def of_bands(table: str) -> Callable[..., Reader]:
    def reader(monkeypatch: pytest.MonkeyPatch) -> Reader:
        monkeypatch.setattr(bands, "copied", lambda table, _: table.clone())
        schedule = BandSchedule(torch.tensor([[0, 40, 0, 40, 1, 8, 8, 1]]), GPU)
        return lambda: getattr(schedule, table)("targets", 16)

    return reader


def of_structure(monkeypatch: pytest.MonkeyPatch) -> Reader:
    monkeypatch.setattr(bands, "copied", lambda table, _: table.clone())
    structure = ga.causal_window_graph(9, 3).structure
    return lambda: band_schedule_of(structure, GPU)


def of_list(_: pytest.MonkeyPatch) -> Reader:
    with FakeTensorMode():
        edges = torch.zeros(2, 1, dtype=torch.int64, device="cuda:0")
        graph = ga.TokenGraph(edge_index=edges, num_targets=2, num_sources=2)

    def make(graph: ga.TokenGraph, listed: torch.Tensor) -> object:
        return torch.ones(1)

    return lambda: cached_by_edges(graph, make)


def structured(monkeypatch: pytest.MonkeyPatch) -> ga.TokenGraph:
    """A graph that believes to be on a GPU, whose tables are made on a CPU all the same."""
    make = storage.edges_of_structure
    monkeypatch.setattr(storage, "edges_of_structure", lambda structure, _: make(structure, CPU))
    monkeypatch.setattr(storage.StoredGraph, "_counted", lambda *_: torch.arange(5))
    monkeypatch.setattr(
        storage.StoredGraph, "in_degree", lambda graph: graph.structure.in_degree(CPU)
    )
    graph = ga.window_path_graph(5, 1)
    graph._device, graph._on_streams = GPU, {}
    return graph


def of_graph(read: Callable[[ga.TokenGraph], object]) -> Callable[..., Reader]:
    def reader(monkeypatch: pytest.MonkeyPatch) -> Reader:
        graph = structured(monkeypatch)
        return lambda: read(graph)

    return reader


def of_function(_: pytest.MonkeyPatch) -> Reader:
    make = stores_results(4)(lambda number, device: torch.full((), number))
    return lambda: make(3, GPU)


EDGES = torch.tensor([[0, 1, 1], [0, 0, 2]])
NEIGHBORS = torch.tensor([[-1, 0], [0, 1], [1, -1]])
CACHES: dict[str, Callable[[pytest.MonkeyPatch], Reader]] = {
    "edges by source": of_schedule("by_source", 2, edge_index=EDGES),
    "rows of a table": of_schedule("by_target", 2, neighbors=NEIGHBORS),
    "pieces of consensus": of_consensus,
    "tiles of bands": of_bands("tiles"),
    "centers": of_bands("nearby_sources"),
    "bands of a structure": of_structure,
    "plans of a list": of_list,
    "edges": of_graph(lambda graph: graph.compact_edges),
    "rows": of_graph(lambda graph: graph.compact_rowptr),
    "positions": of_graph(lambda graph: graph.positions),
    "the transposed graph": of_graph(lambda graph: graph.transpose()),
    "plans": of_graph(lambda graph: graph.derived("plan", lambda: torch.ones(1))),
    "results of a function": of_function,
}


@pytest.mark.every_case
@pytest.mark.parametrize("cache", CACHES)
def test_every_table_is_stored_but_not_by_a_capture_and_waited_for(
    cache: str, cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = CACHES[cache](monkeypatch)
    cuda.capturing = True
    captured = read()
    cuda.capturing, before = False, cuda.first.events
    mine = read()
    assert mine is not captured
    assert read() is mine
    assert cuda.first.events > before
    cuda.stream = cuda.second
    assert read() is mine
    assert cuda.second.waited
    assert not cuda.first.waited


def test_a_copy_of_a_graph_and_its_file_have_no_streams(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = structured(monkeypatch)
    _ = graph.compact_edges
    assert graph._on_streams
    graph._device = CPU  # a file has an empty tensor of this device
    assert not copy.copy(graph)._on_streams
    assert not graph.__getstate__()["_on_streams"]


# Graphs in closed form, which make their own tables: nothing of them is on a device yet.
WITHOUT_TENSORS = {"_structured", "_graph_of"}


@pytest.mark.long
def test_no_function_with_a_device_stores_results_by_lru_cache() -> None:
    names_of_cached = set()
    for folder in (ROOT, Path(module.__file__).parents[1]):
        for path in folder.rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.FunctionDef):
                    caches = [d for d in node.decorator_list if "cache" in ast.unparse(d)]
                    names = {argument.arg for argument in node.args.args}
                    if caches and "device" in names:
                        names_of_cached.add(node.name)
    assert names_of_cached - {"larger_than_cache"} == WITHOUT_TENSORS
