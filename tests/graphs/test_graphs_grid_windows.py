"""Windows on grids: dilated, causal, of several radii, in volumes, and NATTEN's, shifted inside."""

import itertools
import math

import pytest
import torch

import graphattn as ga


def cells(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    return list(itertools.product(*(range(size) for size in shape)))


def each(value, axes: int) -> tuple:
    return tuple(value) if isinstance(value, tuple) else (value,) * axes


def line_of(place: int, size: int, dilation: int) -> list[int]:
    """The places of one axis that hops of `dilation` lead to."""
    return [other for other in range(size) if (other - place) % dilation == 0]


def within(place: int, size: int, radius: int, dilation: int, causal: bool) -> set[int]:
    """A window that is cut: hop by hop."""
    hops = range(-radius, 1 if causal else radius + 1)
    return {place + hop * dilation for hop in hops if 0 <= place + hop * dilation < size}


def nattens(place, size, kernel_size, stride, dilation, is_causal) -> set[int]:
    """Return the places that a query sees along one axis, as the papers of NATTEN define them.

    Neighbourhood attention: a window of fixed size that starts kernel_size // 2 before the query
    and is moved where it would leave the line. Causal: the last kernel_size tokens. Strided: the
    query takes the window of its group's leader, the middle one, the last one where causal; what
    is ahead of a causal query stays out.
    """
    line = line_of(place, size, dilation)
    query = line.index(place)
    group = query // stride
    if is_causal:
        leader = min(group * stride + stride - 1, len(line) - 1)
        window = range(max(leader - kernel_size + 1, 0), query + 1)
    else:
        leader = min(group * stride + stride // 2, len(line) - 1)
        start = leader - kernel_size // 2
        while start < 0:
            start += 1
        while start + kernel_size > len(line):
            start -= 1
        window = range(start, start + kernel_size)
    return {line[k] for k in window}


def product(shape, sees_along):
    """`sees(i, j)` of tokens from what places see along every axis."""
    places = cells(shape)
    seen = [[sees_along(axis, place) for place in range(size)] for axis, size in enumerate(shape)]
    return lambda i, j: all(
        b in seen[axis][a] for axis, (a, b) in enumerate(zip(places[i], places[j], strict=True))
    )


IMAGES = [
    ((5, 7), {"radius": 1, "dilation": 2}),
    ((5, 7), {"radius": (1, 3)}),
    ((6, 4), {"radius": (0, 2)}),
    ((6, 4), {"radius": 2, "causal": True}),
    ((4, 6), {"radius": 1, "causal": (True, False)}),
    ((4, 6), {"radius": (2, 1), "causal": (False, True), "dilation": (1, 2)}),
    ((7, 8), {"radius": (2, 1), "dilation": (3, 2)}),
    ((1, 1), {"radius": 2, "dilation": 3}),
    ((3, 2), {"radius": 9, "dilation": 7}),
    ((1, 9), {"radius": 2, "causal": (False, True)}),
]
VOLUMES = [
    ((3, 4, 5), {"radius": 1}),
    ((2, 3, 4), {"radius": (1, 0, 2)}),
    ((4, 3, 3), {"radius": (2, 1, 1), "causal": (True, False, False)}),
    ((5, 4, 3), {"radius": 1, "dilation": (2, 1, 3), "causal": (True, True, False)}),
    ((3, 3, 3), {"radius": 2, "causal": True}),
    ((1, 1, 4), {"radius": 1}),
]


def build(shape, **options) -> ga.TokenGraph:
    builder = ga.grid_window_graph if len(shape) == 2 else ga.volume_window_graph
    return builder(*shape, **options)


@pytest.mark.parametrize(("shape", "options"), IMAGES + VOLUMES)
@pytest.mark.parametrize("class_token", [False, True])
def test_a_window_is_cut_hop_by_hop_along_every_axis(
    shape, options, class_token, check_graph, mask_of
):
    axes = len(shape)
    radius, dilation = each(options["radius"], axes), each(options.get("dilation", 1), axes)
    causal = each(options.get("causal", False), axes)
    sees = product(shape, lambda a, x: within(x, shape[a], radius[a], dilation[a], causal[a]))
    lead = int(class_token)
    graph = build(shape, **options, class_token=class_token)
    check_graph(
        graph,
        mask_of(
            lambda i, j: (lead and not (i and j)) or sees(i - lead, j - lead),
            math.prod(shape) + lead,
        ),
        place=None if lead else lambda i: cells(shape)[i],
    )


@pytest.mark.parametrize(("shape", "options"), IMAGES + VOLUMES)
def test_a_diamond_adds_up_the_hops_of_all_axes(shape, options, check_graph, mask_of):
    axes = len(shape)
    options = {**options, "radius": max(each(options["radius"], axes))}
    dilation, causal = each(options.get("dilation", 1), axes), each(options.get("causal", 0), axes)
    places = cells(shape)

    def sees(i, j):
        moves = [b - a for a, b in zip(places[i], places[j], strict=True)]
        return (
            all(move % d == 0 for move, d in zip(moves, dilation, strict=True))
            and not any(move > 0 and c for move, c in zip(moves, causal, strict=True))
            and sum(abs(m) // d for m, d in zip(moves, dilation, strict=True)) <= options["radius"]
        )

    graph = build(shape, **options, metric="manhattan")
    check_graph(graph, mask_of(sees, len(places)), place=lambda i: places[i])


NATTEN = [
    ((9,), {"kernel_size": 3}),
    ((9,), {"kernel_size": 4}),
    ((9,), {"kernel_size": 9}),
    ((9,), {"kernel_size": 3, "dilation": 3}),
    ((11,), {"kernel_size": 3, "dilation": 3}),
    ((11,), {"kernel_size": 4, "is_causal": True, "stride": 3}),
    ((11,), {"kernel_size": 5, "stride": 2}),
    ((12,), {"kernel_size": 5, "stride": 5}),
    ((11,), {"kernel_size": 1}),
    ((11,), {"kernel_size": 2, "dilation": 5}),
    ((11,), {"kernel_size": 3, "is_causal": True, "dilation": 2}),
    ((5, 7), {"kernel_size": 3}),
    ((5, 7), {"kernel_size": (3, 5)}),
    ((6, 7), {"kernel_size": (2, 3), "dilation": (3, 2)}),
    ((6, 7), {"kernel_size": 3, "is_causal": (True, False)}),
    ((6, 7), {"kernel_size": (4, 2), "is_causal": (False, True), "dilation": (1, 3)}),
    ((6, 7), {"kernel_size": 4, "stride": (2, 3)}),
    ((6, 6), {"kernel_size": 6}),
    ((3, 4, 5), {"kernel_size": (2, 3, 3)}),
    (
        (4, 4, 4),
        {"kernel_size": (3, 2, 2), "dilation": (1, 2, 1), "is_causal": (True, False, True)},
    ),
    ((4, 4, 4), {"kernel_size": 3, "stride": (1, 2, 3), "is_causal": (False, False, True)}),
]


@pytest.mark.parametrize(("shape", "options"), NATTEN)
def test_a_neighborhood_is_nattens(shape, options, check_graph, mask_of):
    axes = len(shape)
    kernel_size, is_causal = each(options["kernel_size"], axes), options.get("is_causal", False)
    stride, dilation = (each(options.get(name, 1), axes) for name in ("stride", "dilation"))
    is_causal = each(is_causal, axes)
    sees = product(
        shape,
        lambda a, x: nattens(x, shape[a], kernel_size[a], stride[a], dilation[a], is_causal[a]),
    )
    graph = ga.neighborhood_graph(shape if axes > 1 else shape[0], **options)
    assert graph == ga.neighborhood_graph(shape, **options)
    places = cells(shape)
    check_graph(graph, mask_of(sees, len(places)), place=lambda i: places[i])
    rows = [k if c else 2 * k - 1 for k, c in zip(kernel_size, is_causal, strict=True)]
    assert graph.structure.num_offsets == math.prod(rows), "NATTEN's rpb"


@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.parametrize("causal", [False, (True, False), True])
def test_a_shifted_border_is_a_neighborhood_of_an_odd_kernel(dilation, causal):
    options = {"dilation": dilation}
    shifted = ga.grid_window_graph(7, 8, 1, border="shift", causal=causal, **options)
    along = each(causal, 2)
    kernel_size = tuple(2 if c else 3 for c in along)
    assert shifted == ga.neighborhood_graph((7, 8), kernel_size, is_causal=causal, **options)
    token = ga.grid_window_graph(7, 8, 1, border="shift", causal=causal, class_token=True)
    inner = token.to_mask()[1:, 1:]
    assert torch.equal(
        inner, ga.grid_window_graph(7, 8, 1, border="shift", causal=causal).to_mask()
    )
    assert bool(token.to_mask()[0].all())
    assert bool(token.to_mask()[:, 0].all())


def test_one_radius_is_the_same_for_every_axis():
    assert ga.grid_window_graph(4, 5, (2, 2)) == ga.grid_window_graph(4, 5, 2)
    assert ga.grid_window_graph(4, 5, (2, 2)).structure == ga.grid_window_graph(4, 5, 2).structure
    assert ga.volume_window_graph(1, 4, 5, 2) == ga.grid_window_graph(4, 5, 2)
    causal = ga.neighborhood_graph(9, 4, is_causal=True)
    assert causal.structure == ga.causal_window_graph(9, 4).structure


CAUSAL = [
    (ga.volume_window_graph(3, 3, 3, 1, causal=True), True),
    (ga.volume_window_graph(3, 3, 3, 1, causal=(True, False, False)), False),
    (ga.volume_window_graph(3, 3, 3, (1, 0, 0), causal=(True, False, False)), True),
    (ga.neighborhood_graph((4, 4), 2, is_causal=True), True),
    (ga.neighborhood_graph((4, 4), 2), False),  # An even window has one more token before it.
    (ga.grid_window_graph(3, 3, 1, causal=True, class_token=True), False),
    (ga.neighborhood_graph((4, 4), 2, is_causal=True).transpose(), False),
    (ga.neighborhood_graph((4, 4), 2, stride=2, is_causal=True).transpose(), False),
]


@pytest.mark.parametrize(("graph", "expected"), CAUSAL)
def test_a_grid_is_causal_where_no_token_sees_a_later_one(graph, expected):
    source, target = graph.edge_index
    assert graph.is_causal == expected
    assert bool((source <= target).all()) == expected


@pytest.mark.parametrize("name", ["shift", "stride", "diamonds"])
def test_large_grids_count_without_listing_an_edge(name):
    N = 1000
    graph, expected = {
        "shift": lambda: (ga.neighborhood_graph((N, N), 7), 49 * N * N),
        "stride": lambda: (
            ga.neighborhood_graph((N, N), (8, 7), stride=(4, 1), is_causal=(True, False)),
            # Rows of 8 - (3 - o) tokens for o = 0 .. 3, less what would lie before the first one.
            (N * (8 + 7 + 6 + 5) // 4 - sum(max(4 - q // 4 * 4, 0) for q in range(8))) * 7 * N,
        ),
        "diamonds": lambda: (
            ga.grid_window_graph(N, N, 2, metric="manhattan", dilation=3),
            # 13 hops, each less the rows and columns from which it leaves the image.
            sum(
                (N - 3 * abs(a)) * (N - 3 * abs(b))
                for a in range(-2, 3)
                for b in range(-2, 3)
                if abs(a) + abs(b) <= 2
            ),
        ),
    }[name]()
    assert graph.num_edges == expected
    assert int(graph.in_degree().sum()) == expected
    assert int(graph.transpose().in_degree().sum()) == expected
    assert graph._edge_index is None


@pytest.mark.parametrize(("shape", "options"), [*NATTEN, ((700,), {"kernel_size": 9})])
def test_pieces_hold_every_edge_once(shape, options, monkeypatch):
    monkeypatch.setattr("graphattn.graphs.structures.grid_windows.AT_ONCE", 64)
    graph = ga.neighborhood_graph(shape, **options)
    for each_way in (graph, graph.transpose()):
        pieces = torch.cat(list(each_way.structure.pieces()), dim=1)
        key = pieces[1] * each_way.num_tokens + pieces[0]
        assert torch.equal(
            key.sort().values, each_way.edge_index[1] * each_way.num_tokens + each_way.edge_index[0]
        )


def test_windows_of_one_reach_share_a_table_of_offsets_in_a_batch():
    small, large = (ga.neighborhood_graph(shape, 3) for shape in ((3, 4), (5, 5)))
    packed = ga.batch([small, large])
    assert packed.structure.num_offsets == 25
    source, target = packed.edge_index
    rows = packed.structure.offset_index(target, source)
    separate = [graph.structure.offset_index(*graph.edge_index.flip(0)) for graph in (small, large)]
    assert torch.equal(rows, torch.cat(separate))
    assert ga.batch([small, ga.grid_window_graph(5, 5, 1)]).structure.num_offsets is None


@pytest.mark.parametrize("reach", [10**6, 2**62])
def test_a_reach_beyond_the_grid_sees_everything(reach):
    assert ga.volume_window_graph(2, 3, 2, reach) == ga.complete_graph(12)
    alone = ga.grid_window_graph(3, 3, 2, dilation=reach)
    assert alone == ga.block_window_graph(9, 1)
    assert alone.num_edges == 9
    assert ga.grid_window_graph(3, 3, reach, metric="manhattan", dilation=(1, 2)).num_edges == 45


BAD = [
    (
        lambda: ga.grid_window_graph(4, 4, (1, 1, 1)),
        r"radius must be an integer >= 1, or 2 integers >= 0.*got \(1, 1, 1\)",
    ),
    (
        lambda: ga.grid_window_graph(4, 4, (0, 0)),
        r"radius must be >= 1 along " r"at least one axis",
    ),
    (lambda: ga.grid_window_graph(4, 4, (1, -1)), r"radius\[1\] must be >= 0"),
    (lambda: ga.grid_window_graph(4, 4, 1, dilation=0), r"dilation must be >= 1"),
    (
        lambda: ga.volume_window_graph(4, 4, 4, 1, dilation=(1, 0, 1)),
        r"dilation\[1\] must be >= 1, got 0",
    ),
    (lambda: ga.grid_window_graph(4, 4, 1, causal="rows"), r"causal must be a bool"),
    (
        lambda: ga.grid_window_graph(4, 4, 1, causal=(True, False, True)),
        r"causal must be a bool, or 2 bools",
    ),
    (lambda: ga.grid_window_graph(4, 4, 1, border="wrap"), r"border must be one of"),
    (
        lambda: ga.grid_window_graph(9, 4, 1, dilation=2, border="shift"),
        r"radius must be so small .* <= 4 along axis 1, got radius 1 and dilation 2",
    ),
    (
        lambda: ga.grid_window_graph(4, 4, (1, 2), metric="manhattan"),
        r"radius must be one number with metric='manhattan', got \(1, 2\)",
    ),
    (
        lambda: ga.grid_window_graph(4, 4, 1, metric="manhattan", border="shift"),
        r"border must be 'cut' with metric='manhattan'",
    ),
    (
        lambda: ga.neighborhood_graph((8, 5), 3, dilation=2),
        r"kernel_size \* dilation must be <= shape = 5 along axis 1, got 3 \* 2",
    ),
    (
        lambda: ga.neighborhood_graph(8, 3, stride=4),
        r"stride must be <= kernel_size = 3 along axis 0, got 4",
    ),
    (lambda: ga.neighborhood_graph((), 1), r"shape must hold a size"),
    (lambda: ga.neighborhood_graph("8", 1), r"shape must be an integer >= 1"),
    (lambda: ga.neighborhood_graph((4, 0), 1), r"shape\[1\] must be >= 1, got 0"),
]


@pytest.mark.parametrize(("call", "words"), BAD)
def test_what_no_grid_can_have_is_refused_by_name(call, words):
    with pytest.raises(ValueError, match=words):
        call()
