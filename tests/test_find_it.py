"""The page "Find it" is true: its paths exist, and real calls enter the files that it names."""

from __future__ import annotations

import copy
import functools
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import graphattn as ga
from graphattn.kernels.cpu import library
from graphattn.ops.backends import BACKEND_NAMES

ROOT = Path(ga.__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "find-it.md").read_text()
needs_native = pytest.mark.skipif(library.library() is None, reason=str(library.why_not()))


@functools.cache  # interpreted kernels make very many calls
def name_of(file: str) -> str | None:
    """A file of the library as the page names it; None for any other file."""
    path = Path(file)
    if not path.is_relative_to(ROOT) or "site-packages" in file:
        return None
    name = str(path.relative_to(ROOT))
    return name if name.startswith(("graphattn/", "kernels/")) else None


def files_of(call: Callable[[], object]) -> list[str]:
    """Files of the project as a call enters them, one entry per change of file."""
    seen: list[str] = []

    def look(frame, event: str, _: object) -> None:
        if event != "call":
            return
        name = name_of(frame.f_code.co_filename)
        if name is not None and (not seen or seen[-1] != name):
            seen.append(name)

    before = sys.gettrace()
    sys.settrace(look)  # which returns None, so only calls are traced and not what they do
    try:
        call()
    finally:
        sys.settrace(before)
    return seen


def test_every_path_on_the_page_exists() -> None:
    paths = set(re.findall(r"`((?:graphattn|kernels|tests)/[\w./<>]*)`", PAGE))
    assert len(paths) > 25
    missing = {path for path in paths if "<" not in path and not (ROOT / path).exists()}
    assert not missing


def rows() -> list[tuple[str, str, list[str], list[str]]]:
    """Mechanism, backend, forward files and backward files of the table."""
    found, mechanism = [], ""
    for line in PAGE.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 4 and cells[1] in BACKEND_NAMES:
            mechanism = mechanism if cells[0] == "the same" else cells[0]
            forward, backward = (re.findall(r"`([^`]*)`", cell) for cell in cells[2:])
            found.append((mechanism, cells[1], forward, backward))
    return found


ROWS = rows()
WINDOW, LISTED, WHOLE = "windows and blocks", "other graphs", "complete and causal graphs"


def qkv() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shape = 1, 16, 1, 16
    return tuple(torch.randn(shape, generator=generator).requires_grad_() for _ in range(3))


def call_of(mechanism: str, backend: str) -> Callable[[], Tensor]:
    """A call of the kind that a row speaks of."""
    q, k, v = qkv()
    window = ga.causal_window_graph(16, 4)
    listed = ga.knn_graph(torch.randn(16, 3, generator=torch.Generator().manual_seed(1)), 4)
    graph = listed if LISTED in mechanism else window
    graph = ga.causal_graph(16) if WHOLE in mechanism else graph
    if mechanism == "consensus":
        shapes = [(1, 16), (1,), (1, 16), (1,), (1, 4, 16, 16), (1, 4, 16)]
        network = ga.EdgeNetworkParameters(*(torch.randn(s).requires_grad_() for s in shapes))
        return lambda: ga.consensus_update(
            q, q, k, v, network, window, 0.1, update="target", backend=backend
        )
    if mechanism == "linear attention":
        return lambda: ga.linear_attention(q.exp(), k.exp(), v, window, backend=backend)
    return lambda: ga.rbf_attention(q, k, v, graph, 1.0, backend=backend)


def test_the_table_has_every_engine_and_backend() -> None:
    assert len(ROWS) == 13
    assert {backend for _, backend, *_ in ROWS} == set(BACKEND_NAMES)


@pytest.mark.every_case
@pytest.mark.parametrize("row", range(len(ROWS)))
def test_a_call_enters_the_files_of_its_row(row: int, monkeypatch: pytest.MonkeyPatch) -> None:
    mechanism, backend, forward, backward = ROWS[row]
    if backend == "native" and library.library() is None:
        pytest.skip(str(library.why_not()))
    if backend == "triton":
        pytest.importorskip("triton")
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    call, out = call_of(mechanism, backend), []
    entered = files_of(lambda: out.append(call()))
    assert {path for path in forward if path.endswith(".py")} <= set(entered)
    left = set(files_of(lambda: out[0].sum().backward()))
    assert {path for path in backward if path.endswith(".py")} <= left
    if backend in ("reference", "structured"):  # nothing of other backends is on the way
        others = {"native", "triton.py", "cpu"}
        assert not {file for file in entered if others & set(Path(file).parts)}


def test_a_written_score_is_where_the_page_says() -> None:
    class Own(ga.Score):
        def edges(self, query: Tensor, key: Tensor) -> Tensor:
            return -(query - key).abs().sum(-1)

    q, k, v = qkv()
    for backend in ("reference", "structured"):
        names = [row for row in ROWS if "score of your own" in row[0] and row[1] == backend]
        ((_, _, forward, _),) = names
        graph = ga.causal_window_graph(16, 8)

        def call(graph: ga.TokenGraph = graph, backend: str = backend) -> None:
            ga.score_attention(q, k, v, graph, Own(), backend=backend)

        assert set(forward) <= set(files_of(call))


# The trip of a call: files that it enters, and how often it returns to one that it had left.

GRAPH, TOKENS = ga.window_path_graph(64, 4), torch.randn(2, 64, 128)
VALID = torch.ones(2, 64, dtype=torch.bool)


def krause(**options: object) -> ga.nn.KrauseAttention:
    return ga.nn.KrauseAttention(128, 8, top_k=4, **options)  # type: ignore[arg-type]


# By call: the most files and returns of a first and of a second call over a graph.
TRIPS: dict[str, tuple[tuple[int, int], tuple[int, int], Callable[[], Callable[..., object]]]] = {
    "dot product": ((21, 30), (14, 14), lambda: ga.nn.DotProductAttention(128, 8)),
    "Gaussian kernel": ((21, 30), (13, 15), lambda: ga.nn.GaussianKernelAttention(128, 8)),
    "Krause": ((21, 37), (12, 16), krause),
    "Krause with rope": ((24, 60), (15, 31), lambda: krause(rope=True)),
    "Krause with a sink": ((22, 42), (13, 21), lambda: krause(sink=True)),
    "Krause with masks": (
        (22, 41),
        (14, 19),
        lambda: functools.partial(krause(), valid=VALID),
    ),
    "Krause with dropout": ((25, 66), (17, 45), lambda: krause(attention_dropout=0.1)),
    "Krause in torch": ((23, 57), (16, 37), lambda: krause(backend="structured")),
    "linear": ((16, 53), (15, 49), lambda: ga.nn.LinearAttention(128, 8)),
    "consensus with rope": ((22, 74), (18, 60), lambda: ga.nn.SelfConsensus(128, 4, rope=True)),
    "rbf_attention": (
        (18, 26),
        (11, 10),
        lambda: lambda x, graph: ga.rbf_attention(*[x.view(2, 64, 8, 16)] * 3, graph, 1.0),
    ),
}


@needs_native
@pytest.mark.every_case
@pytest.mark.parametrize("name", TRIPS)
def test_a_call_enters_few_files(name: str) -> None:
    *limits, make = TRIPS[name]
    call, graph = make(), copy.deepcopy(GRAPH)
    call(TOKENS, GRAPH)  # what a process does once
    for most_files, most_returns in limits:
        trip = files_of(lambda: call(TOKENS, graph))
        files = len(set(trip))
        assert files <= most_files, (files, trip)
        assert len(trip) - files <= most_returns, (len(trip) - files, trip)


@needs_native
def test_a_call_enters_the_ten_files_of_the_page_in_its_order() -> None:
    page = (ROOT / "docs" / "read-the-code.md").read_text()
    files = re.findall(r"^ ?\d+\. `(.*?)`", page, re.MULTILINE)
    assert len(files) == 10
    trip = files_of(lambda: krause()(TOKENS, copy.deepcopy(GRAPH)))
    entered = dict.fromkeys(path for path in trip if path in files)
    assert set(entered) == set(files)
    # In between, the order is that of the explanation: a score is entered before the operation that
    # takes it, and checks before the table of backends that they ask.
    assert list(entered)[:2] == files[:2]
    assert list(entered)[-2:] == files[-2:]
    for path in re.findall(r"`((?:graphattn|kernels)/[\w./]*)`", page):
        assert (ROOT / path).exists(), path
