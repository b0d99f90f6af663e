"""Blocks on an image: what is joined, where borders move, and the order that makes blocks runs."""

import itertools
import re

import pytest
import torch

import graphattn as ga
from graphattn.graphs.structures.grid_blocks import GridBlocks, block_order
from graphattn.graphs.token_graph import decode, encode

CASES = [
    ((8, 8), 4, 0),
    ((8, 8), 4, 2),
    ((6, 9), 3, 1),
    ((7, 9), (3, 4), (1, 2)),
    ((5, 5), 7, 0),
    ((5, 5), 7, 3),
    ((5, 5), 7, 6),
    ((3, 10), 4, 0),
    ((1, 9), (2, 4), (1, 3)),
    ((4, 1), 3, 2),
    ((1, 1), 1, 0),
    ((6, 5), 1, 0),
    ((4, 6), (9, 2), (0, 1)),
]
EVERY_CASE = pytest.mark.parametrize(("shape", "block", "shift"), CASES)


def each(value) -> tuple[int, int]:
    return value if isinstance(value, tuple) else (value, value)


def cells_of(shape) -> list[tuple[int, int]]:
    return list(itertools.product(range(shape[0]), range(shape[1])))


def border_between(a: int, b: int, block: int, shift: int) -> bool:
    """Whether a border lies between two places of an axis: at shift, shift + block, ..."""
    low, high = min(a, b), max(a, b)
    return any(
        (place - shift) % block == 0 and place >= shift for place in range(low + 1, high + 1)
    )


def blocks(shape, block, shift) -> ga.TokenGraph:
    return ga.grid_block_graph(*shape, block, shift=shift)


@EVERY_CASE
def test_tokens_see_each_other_where_no_border_lies_between(
    shape, block, shift, check_graph, mask_of
):
    cells, sizes, moved = cells_of(shape), each(block), each(shift)

    def sees(i, j):
        return not any(
            border_between(cells[i][axis], cells[j][axis], sizes[axis], moved[axis])
            for axis in range(2)
        )

    graph = blocks(shape, block, shift)
    check_graph(graph, mask_of(sees, len(cells)), place=lambda i: cells[i])
    pieces = torch.cat(list(graph.structure.pieces()), dim=1)
    assert ga.from_edge_index(pieces, len(cells)) == graph


@pytest.mark.parametrize(("height", "width", "window"), [(8, 8, 4), (6, 9, 3), (14, 7, 7)])
@pytest.mark.parametrize("moved", [False, True])
def test_they_are_swin_s_windows_of_a_rolled_and_masked_image(height, width, window, moved):
    """The published recipe: roll the image, cut it, hide the pairs of different regions."""
    shift = window // 2 if moved else 0
    number = torch.arange(height * width).view(height, width).roll((-shift, -shift), (0, 1))
    region = torch.zeros(height, width)
    if shift:
        parts = slice(0, -window), slice(-window, -shift), slice(-shift, None)
        for count, (rows, columns) in enumerate(itertools.product(parts, parts)):
            region[rows, columns] = count
    seen = torch.zeros(height * width, height * width, dtype=torch.bool)
    for y, x in itertools.product(range(0, height, window), range(0, width, window)):
        tokens = number[y : y + window, x : x + window].flatten()
        kind = region[y : y + window, x : x + window].flatten()
        for a, b in itertools.product(range(len(tokens)), repeat=2):
            seen[tokens[a], tokens[b]] |= bool(kind[a] == kind[b])
    graph = ga.grid_block_graph(height, width, window, shift=shift)
    assert torch.equal(graph.to_mask(), seen)


@pytest.mark.parametrize("window", [1, 2, 4, 7])
def test_a_table_reads_the_rows_of_swin_s_index_backwards(window):
    """Swin numbers offsets by target minus source; here it is source minus target."""
    places = torch.tensor(cells_of((window, window)))
    apart = places[:, None] - places  # target - source, as in the published code
    index = (apart[..., 0] + window - 1) * (2 * window - 1) + apart[..., 1] + window - 1
    graph = ga.grid_block_graph(window, window, window)
    source, target = graph.edge_index
    rows = graph.structure.offset_index(target, source).view(window**2, window**2)
    assert graph.structure.num_offsets == (2 * window - 1) ** 2
    assert torch.equal(rows, (2 * window - 1) ** 2 - 1 - index)


@pytest.mark.parametrize(("tokens", "block", "shift"), [(9, 4, 2), (12, 3, 0), (5, 8, 7)])
def test_an_image_of_one_row_has_the_blocks_of_a_sequence(tokens, block, shift):
    of_sequence = ga.block_window_graph(tokens, block, shift=shift)
    assert ga.grid_block_graph(1, tokens, (1, block), shift=(0, shift)) == of_sequence
    assert ga.grid_block_graph(tokens, 1, (block, 1), shift=(shift, 0)) == of_sequence


def test_one_block_is_complete_and_blocks_of_one_token_see_themselves():
    assert ga.grid_block_graph(3, 5, 5) == ga.complete_graph(15)
    alone = ga.grid_block_graph(3, 5, 1)
    assert alone.edge_index.tolist() == [[*range(15)]] * 2


@EVERY_CASE
def test_the_order_of_blocks_makes_every_block_a_run(shape, block, shift):
    grid = GridBlocks(*shape, each(block), each(shift))
    equal, tokens, places = block_order(grid, torch.device("cpu"))
    assert sorted(tokens.tolist()) == list(range(shape[0] * shape[1]))
    assert torch.equal(tokens[places], torch.arange(len(tokens)))
    together = torch.zeros(len(tokens), len(tokens), dtype=torch.bool)
    for kind in equal:
        size = kind.height * kind.width
        for first in range(kind.start, kind.start + kind.count * size, size):
            together[tokens[first : first + size][:, None], tokens[first : first + size]] = True
    assert torch.equal(together, ga.TokenGraph(structure=grid).to_mask())
    assert len({(kind.height, kind.width) for kind in equal}) == len(equal) <= 9


@EVERY_CASE
def test_operators_and_batches_and_rows_know_them(shape, block, shift):
    graph = blocks(shape, block, shift)
    assert decode(encode(graph), None, graph.device) == graph
    packed = ga.batch([graph, ga.grid_block_graph(2, 3, block, shift=shift)])
    assert decode(encode(packed), None, graph.device) == packed
    assert packed.structure.num_offsets == graph.structure.num_offsets
    mask = graph.to_mask()
    assert torch.equal(packed.to_mask()[: len(mask), : len(mask)], mask)
    start = len(mask) // 3
    part, seen = graph.targets(start, len(mask))
    assert torch.equal(part.to_mask(), mask[start:, seen.start : seen.stop])
    assert int(part.num_edges) == int(mask[start:].sum())


def test_a_large_image_is_counted_without_listing_its_edges():
    graph = ga.grid_block_graph(4096, 4096, 8, shift=4)
    assert graph.num_edges == (2 * 4**2 + 511 * 8**2) ** 2
    assert graph._edge_index is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 4, 2), "height must be >= 1, got 0"),
        ((4, 2.5, 2), "width must be an integer >= 1, got 2.5"),
        ((4, 4, 0), "block_size must be >= 1, got 0"),
        ((4, 4, (2, 0)), "block_size[1] must be >= 1, got 0"),
        ((4, 4, (2, 2, 2)), "block_size must be an integer >= 1, or 2 integers >= 1"),
        ((4, 4, 2, -1), "shift must be >= 0, got -1"),
        ((4, 4, 2, 2), "shift must be < block_size = 2 along axis 0, got 2"),
        ((4, 4, (5, 2), (1, 2)), "shift must be < block_size = 2 along axis 1, got 2"),
    ],
)
def test_errors_name_the_argument(arguments, message):
    *sizes, block = arguments[:3]
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        ga.grid_block_graph(*sizes, block, shift=arguments[3] if len(arguments) > 3 else 0)
