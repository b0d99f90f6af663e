"""Exact nearest-neighbour search."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from graphattn.graphs.arguments import as_choice, as_int, as_points, as_sources
from graphattn.graphs.search.distances import (
    IN_ORDER,
    PAIRS,
    exact_squared_distances,
    nearest_by_pairs,
    nearest_pairs,
    place_self,
)
from graphattn.graphs.search.kd_tree import is_for_trees, nearest_by_tree
from graphattn.graphs.structures.bands import band_schedule_of, bands_of, has_bands
from graphattn.graphs.structures.composites import Parts
from graphattn.graphs.structures.structure import Complete, GraphStructure
from graphattn.graphs.token_graph import TokenGraph, as_token_graph
from graphattn.kernels.cpu.neighbors import has_nearest, has_neighbors, nearest, squared_distances
from graphattn.kernels.shared.launch import is_transformed, on_its_device, untraced, why_not_on

NAMES = ("auto", "reference", "triton")  # what an argument `backend` may be
MOST = 256  # the most neighbours per token that the kernels find


def knn(
    x: Tensor,
    k: int,
    *,
    source: Tensor | None = None,
    within: TokenGraph | Tensor | None = None,
    self_loops: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Find the `k` nearest sources of every token by squared Euclidean distance.

    The distances that decide are computed from differences of coordinates in float64, never as
    ``|a|^2 + |b|^2 - 2 a.b``, so a common offset of all tokens costs no accuracy. Neighbours are
    sorted by distance, and by index if distances are equal. A token whose coordinates contain NaN
    or infinity has no neighbours and is no neighbour. The choice of neighbours is not
    differentiable; the returned distances are.

    Args:
        x: coordinates or features of the targets, [N, C]; half precision is searched in float32.
        k: neighbours per token, 1 <= k <= number of possible sources.
        source: coordinates or features of the sources, [M, C]; `x` if None.
        within: a TokenGraph, or an edge_index [2, E]; only its edges are candidates. A token with
            fewer than k candidates has all of them as neighbours.
        self_loops: with ``source=None``, whether a token may be its own neighbour; it then comes
            first and counts as one of the k.
        backend: "reference" (on a CPU also compiled code, or a k-d tree), "triton" (fused kernels,
            which neither store distances nor make the host wait for the device), or "auto", which
            takes the kernels on a GPU if they can run the case. They take float32 and half
            precision, k up to 256, and as `within` windows, blocks, causal and complete graphs, and
            batches of these. All backends find the same neighbours, except that two distances which
            differ only in the last bits of float64 may be in either order, and at the k-th place
            either of the two may be selected.

    Returns:
        ``(index, squared_distance)``, both [N, k], with -1 and infinity if there are fewer than k.

    Raises:
        ValueError: if shapes, dtypes or devices do not fit, k is not in the range above, or
            `backend` cannot run the case.

    Example:
        >>> import torch, graphattn as ga
        >>> index, squared_distance = ga.knn(torch.tensor([[0.0], [1.0], [3.0], [3.5]]), k=2)
        >>> index
        tensor([[1, 2],
                [0, 2],
                [3, 1],
                [2, 1]])
        >>> squared_distance[0]
        tensor([1., 9.])
    """
    index = nearest_index(x, k, source, within, self_loops, backend)
    return index, _squared_distances(x, x if source is None else source, index).to(x.dtype)


def nearest_index(
    x: Tensor,
    k: int,
    source: Tensor | None = None,
    within: TokenGraph | Tensor | None = None,
    self_loops: bool = False,
    backend: str = "auto",
) -> Tensor:
    """Return only the indices of :func:`knn`: sources in order of distance, int64 [N, k]."""
    search = _checked(x, k, source, within, bool(self_loops))
    return _choose(search, backend).run(search)


def nearest_in_items(
    x: Tensor,
    k: int,
    source: Tensor | None,
    sizes: Sequence[tuple[int, int]],
    self_loops: bool,
    backend: str,
) -> Tensor:
    """Apply :func:`nearest_index` to every item of a batch separately; int64 [N, at most k].

    `sizes` are the (targets, sources) of the items. If an item has fewer than k possible sources,
    its tokens get all of them, and -1 for the rest.
    """
    k, sources = as_int("k", k, 1), x if source is None else source
    as_choice("backend", backend, NAMES)
    to_self = source is None
    if self_loops and not to_self:
        raise ValueError(
            "self_loops must be False if source is given, because sources are then other tokens; "
            "got self_loops=True"
        )
    possible = [max(count - int(to_self and not self_loops), 0) for _, count in sizes]
    k = max(min(k, max(possible, default=0)), 1)
    if max(possible, default=0) > 0 and backend != "reference":
        parts = tuple(Complete(*pair) for pair in sizes)
        within = TokenGraph(structure=Parts(parts), device=x.device)
        search = _checked(x, k, source, within, bool(self_loops))
        chosen = _choose(search, backend)
        if chosen.name == "triton":  # The kernels search all items in one call.
            return chosen.run(search)
    index = torch.full((len(x), k), -1, dtype=torch.int64, device=x.device)
    t = s = 0
    for (num_targets, num_sources), most in zip(sizes, possible, strict=True):
        if num_targets and most:
            candidates = sources[s : s + num_sources]
            here = nearest_index(
                x[t : t + num_targets],
                min(k, most),
                None if to_self else candidates,
                self_loops=self_loops,
                backend=backend,
            )
            index[t : t + num_targets, : here.shape[1]] = here.where(here < 0, here + s)
        t, s = t + num_targets, s + num_sources
    return index


class _Search(NamedTuple):
    """Checked arguments of a search."""

    tokens: tuple[Tensor, Tensor]  # targets [N, C] and sources [M, C]
    k: int
    within: TokenGraph | None
    to_self: bool  # whether targets and sources are the same tokens
    self_loops: bool

    @property
    def points(self) -> tuple[Tensor, Tensor]:
        """Targets and sources in float32 or float64, detached."""
        wide = torch.promote_types(self.tokens[0].dtype, torch.float32)
        x, source = self.tokens
        points = x.detach().to(wide)
        return points, points if self.to_self else source.detach().to(wide)


def _checked(
    x: Tensor,
    k: int,
    source: Tensor | None,
    within: TokenGraph | Tensor | None,
    self_loops: bool,
) -> _Search:
    x, k = as_points("x", x), as_int("k", k, 1)
    to_self = source is None
    sources = as_sources(source, x, self_loops)
    possible = max(len(sources) - int(to_self and not self_loops), 0)
    if k > possible:
        raise ValueError(f"k must be <= {possible}, the number of possible sources, got {k}")
    graph = None if within is None else _candidate_graph(within, x, sources)
    return _Search((x, sources), k, graph, to_self, self_loops)


def _candidate_graph(within: TokenGraph | Tensor, x: Tensor, sources: Tensor) -> TokenGraph:
    try:
        graph = as_token_graph(within, len(x), len(sources))
    except ValueError as error:
        raise ValueError(f"within must fit the tokens, but it does not: {error}") from None
    if graph.device != x.device:
        raise ValueError(f"within must be on the device of x, {x.device}, got {graph.device}")
    return graph


def _squared_distances(x: Tensor, sources: Tensor, index: Tensor) -> Tensor:
    """Compute squared distances of neighbours, float64 [N, k], differentiable.

    A missing neighbour (-1) has infinite distance. Its difference is set to 0 before the square, so
    that its gradient is exactly 0.
    """
    N, k = index.shape
    is_neighbor, place = index >= 0, index.clamp(min=0)
    differentiated = torch.is_grad_enabled() and (x.requires_grad or sources.requires_grad)
    if not differentiated and has_neighbors(x):
        row = torch.arange(N, device=index.device).repeat_interleave(k)
        return untraced(squared_distances)(x, sources, row, index.flatten()).view(N, k)
    if not differentiated and not is_transformed() and x.shape[1] <= IN_ORDER:
        squared = torch.full((N, k), torch.inf, dtype=torch.float64, device=x.device)
        row, slot = is_neighbor.nonzero().unbind(1)
        squared[row, slot] = exact_squared_distances(x, sources, row, place[row, slot])
        return squared
    step = max(1, PAIRS // max(k * x.shape[1], 1))
    pieces = [x.new_empty((0, k), dtype=torch.float64)]
    for i in range(0, N, step):
        rows = slice(i, i + step)
        gap = x[rows, None].double() - sources[place[rows]].double()
        pieces.append(gap.where(is_neighbor[rows, :, None], 0.0).square().sum(-1))
    return torch.cat(pieces).where(is_neighbor, torch.inf)


def _why_no_kernels(search: _Search) -> str | None:
    """Say why the kernels cannot run a search; None if they can."""
    x, source = search.tokens
    if (reason := why_not_on(x)) is not None:
        return reason
    if is_transformed():
        return "its kernels cannot run inside torch.func or under forward-mode differentiation"
    if search.k > MOST:
        return f"its kernels find up to {MOST} neighbours, not {search.k}"
    if max(len(x), len(source)) >= 2**29:
        return f"its kernels take fewer than 2^29 tokens, not {max(len(x), len(source))}"
    if search.within is not None:
        structure = search.within.structure
        if structure is None or not has_bands(structure):
            got = "a list or table of edges" if structure is None else type(structure).__name__
            return (
                "its kernels take as `within` only windows, blocks, causal and complete graphs and "
                f"batches of these, not {got}"
            )
        bands = bands_of(structure)
        if bands is not None and not set(bands.sequences[:, 7].tolist()) <= {0, 1}:
            return (
                "its kernels do not take as `within` a section of a window without self-loops in "
                "which a token has different numbers as a source and as a target"
            )
    return None


def _nearest_by_kernels(search: _Search) -> Tensor:
    from graphattn.kernels.neighbors.candidates import nearest as nearest_by_triton

    points, candidates = search.points
    structure: GraphStructure = Complete(len(points), len(candidates))
    if search.within is not None:
        assert search.within.structure is not None
        structure = search.within.structure
    tables = band_schedule_of(structure, points.device)
    return on_its_device(nearest_by_triton)(
        points,
        candidates,
        tables,
        search.k,
        to_self=search.to_self,
        self_loops=search.self_loops,
    )


def _nearest_by_torch(search: _Search) -> Tensor:
    """Find the nearest among the edges of a graph, or among all candidates.

    Among all candidates, compiled code is used if it is available. Otherwise it is a k-d tree for
    few coordinates, and matrix products for many. Rows for which the tree gives no proof are
    searched in all pairs.
    """
    (points, candidates), k = search.points, search.k
    selves = search.to_self, search.self_loops
    if search.within is not None:
        source, target = search.within.edge_index
        squared = exact_squared_distances(points, candidates, target, source)
        if search.to_self:
            place_self(squared, target == source, search.self_loops)
        return nearest_pairs(target, source, squared, len(points), k)
    if has_nearest(points, candidates):
        return untraced(nearest)(points, candidates, k, *selves)
    by_tree = None
    if is_for_trees(points, candidates, k):
        by_tree = untraced(nearest_by_tree)(points, candidates, k, *selves)
    if by_tree is None:
        return nearest_by_pairs(points, candidates, k, *selves)
    index, left = by_tree
    if len(left):
        index[left] = nearest_by_pairs(points, candidates, k, *selves, rows=left)
    return index


class SearchBackend(NamedTuple):
    """A row of the table of backends.

    Attributes:
        name: one of :data:`NAMES`.
        run: runs a search.
        why_not: returns the reason why the backend cannot run a search, or None if it can.
        is_default: whether "auto" may take the backend for a search.
    """

    name: str
    run: Callable[[_Search], Tensor]
    why_not: Callable[[_Search], str | None] = lambda search: None
    is_default: Callable[[_Search], bool] = lambda search: True


BACKENDS = (  # fastest first
    SearchBackend(
        "triton",
        lambda search: untraced(_nearest_by_kernels)(search),
        why_not=_why_no_kernels,
        is_default=lambda search: search.tokens[0].device.type == "cuda",
    ),
    SearchBackend("reference", _nearest_by_torch),
)


def _choose(search: _Search, backend: str) -> SearchBackend:
    """Return the backend of this name, or for "auto" the first that can run the search."""
    as_choice("backend", backend, NAMES)
    for row in BACKENDS:
        if backend == row.name or (backend == "auto" and row.is_default(search)):
            reason = row.why_not(search)
            if reason is None:
                return row
            if backend != "auto":
                raise ValueError(f"backend {backend!r} cannot run this case: {reason}")
    raise AssertionError(backend)  # "reference" can run every search
