"""The launches of attention over bands that matter most, at their real sizes."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch

from graphattn.kernels.bands import one_tensor
from graphattn.kernels.bands.backward import backward
from graphattn.kernels.bands.bias_backward import d_table
from graphattn.kernels.bands.forward import forward
from graphattn.kernels.bands.inputs import BandInputs
from graphattn.kernels.bands.schedule import BandSchedule, Side
from graphattn.kernels.bands.top_k import FEW_ROWS, select
from graphattn.kernels.shared.configuration import SHORT_NAMES, Configuration, made, scales
from graphattn.kernels.shared.launch import Launch, recording
from graphattn.kernels.shared.precision import FACTORS, PIECES


class Work(NamedTuple):
    """The work of a kernel for every feature of a pair of tokens, or of a token."""

    products: int  # of a pair, two operations each
    tensors: int  # of the size of the queries, which it reads and writes once
    read_again: int  # tensors of the other side, whose rows a program reads for each of its tiles


WORK = {
    "band_forward_kernel": Work(2, 4, 2),
    "window_forward_kernel": Work(2, 4, 2),
    "shared_forward_kernel": Work(2, 2, 1),
    "d_query_kernel": Work(3, 5, 2),
    "d_source_kernel": Work(4, 6, 2),
    "shared_backward_kernel": Work(5, 3, 2),
    "d_table_kernel": Work(2, 4, 2),
    "band_select_kernel": Work(1, 2, 1),
    "row_dots_kernel": Work(0, 2, 0),
}
# How often a selection whose ranks are held goes over its code. Until all of 64 rows of normally
# distributed tokens are done, the interval is halved 17 times, which is a third of the code.
TIMES_HELD = 2.0
# How often a streamed selection goes over its tiles, on average over programs of 64 rows of normal
# or chi-squared logits (512 of 4,096, simulated): to count, to write candidates down, to cut ties,
# and to write bits. Outside of these loops, halvings repeat a tenth of the code a dozen times.
TIMES_STREAMED, TIMES_OUTSIDE = (1.1, 1.1, 0.0, 1.0), 2.5


class BandCase(NamedTuple):
    """Attention over one kind of graph, forward and backward."""

    name: str
    target: str
    sequences: list[list[int]]  # rows of BandSchedule
    batch: int
    heads: int
    features: int
    dtype: torch.dtype = torch.bfloat16
    rbf: bool = False
    shared: bool = False
    table_rows: int = 0
    valid: bool = False
    top_k: int | None = None


def complete(tokens: int) -> list[list[int]]:
    """Every token sees every token."""
    return [[0, tokens, 0, tokens, 1, tokens - 1, tokens - 1, 1]]


def window(tokens: int, before: int, after: int) -> list[list[int]]:
    """Every token sees the tokens from `before` places before it to `after` places after it."""
    return [[0, tokens, 0, tokens, 1, before, after, 1]]


LONG = 65536
# Targets on an H200-class GPU: how many times faster than the named one, or a share of a bound.
SDPA, DEIT = "1.0x SDPA", "1.15x DeiT on SDPA"
KRAUSE = "5x masked dense, 1.5x Flex"
WIDE, NARROW = "1.3x Flex, 0.9x flash", "2.5x Flex, 60 % of bytes"
CASES = (
    BandCase("GKA complete 4096", SDPA, complete(4096), 16, 16, 64, rbf=True, shared=True),
    BandCase("GKA-S 197", DEIT, complete(197), 256, 6, 64, rbf=True, shared=True),
    BandCase("causal window 256, RBF", WIDE, window(LONG, 255, 0), 1, 16, 64, rbf=True),
    BandCase("causal window 256, dot", WIDE, window(LONG, 255, 0), 1, 16, 64),
    BandCase("window 8 each side, RBF", NARROW, window(LONG, 8, 8), 1, 16, 64, rbf=True),
    BandCase("window 8 each side, dot", NARROW, window(LONG, 8, 8), 1, 16, 64),
    BandCase("causal 4096, dot, D 128", "", window(4096, 4095, 0), 4, 16, 128),
    BandCase("causal 4096, dot, D 256", "", window(4096, 4095, 0), 4, 8, 256),
    BandCase("GKA complete 4096, D 128", "", complete(4096), 4, 16, 128, rbf=True, shared=True),
    BandCase("causal window 256, RBF, D 128", "", window(4096, 255, 0), 4, 16, 128, rbf=True),
    BandCase("complete 4096, RBF", "", complete(4096), 4, 16, 64, torch.float16, rbf=True),
    BandCase("complete 4096, RBF", "", complete(4096), 4, 16, 64, torch.float32, rbf=True),
    BandCase("causal window 256, ALiBi, padded", "", window(4096, 255, 0), 4, 16, 64,
             table_rows=256, valid=True),
    BandCase("Krause 192 of 256", KRAUSE, window(LONG, 255, 0), 1, 8, 64, rbf=True, top_k=192),
    BandCase("Krause 192 of 256", "", window(4096, 255, 0), 4, 8, 64, torch.float32, rbf=True,
             top_k=192),
    BandCase("Krause 256 of 1024", "", window(LONG, 1023, 0), 1, 8, 64, rbf=True, top_k=256),
    BandCase("Krause 192 of 256, D 128", "", window(LONG, 255, 0), 1, 8, 128, rbf=True, top_k=192),
    BandCase("Krause 512 of 4096", "", window(LONG, 4095, 0), 1, 8, 64, rbf=True, top_k=512),
)  # fmt: skip


def configurations_of(case: BandCase, device: str = "meta") -> list[Configuration]:
    """The launches of one case, in their order."""
    sequences, origin = torch.tensor(case.sequences), case.table_rows - 1
    bands = BandSchedule(sequences, device, origin=origin if case.table_rows else None)
    tokens = int(sequences[:, 1].sum())
    B, H = case.batch, case.heads
    make = partial(made, dtype=case.dtype, device=device)
    query, key, value = (make(B, tokens, H, case.features) for _ in range(3))
    valid = make(B, tokens, dtype=torch.bool) if case.valid else None
    table = make(case.table_rows, H, dtype=torch.float32) if case.table_rows else None
    if case.shared:
        key = value = query
    inputs = BandInputs(
        query, key, value, scales(H, device), bands, case.rbf, table, valid, valid
    )  # fmt: skip
    with recording() as launches:
        if case.top_k is not None:
            inputs.kept = select(inputs, case.top_k)
        _attend(inputs, case.shared)
    return [
        _describe(case, bands, tokens, launch)
        for launch in launches
        if not launch.arguments.get("CAREFUL")  # it ends at once, as long as no NaN is seen
    ]


def _attend(x: BandInputs, shared: bool) -> None:
    """Forward and backward, as the operator runs them."""
    d_out = made(*x.query.shape, dtype=x.query.dtype, device=x.query.device.type)
    if shared:
        out, lse, saved = one_tensor.shared_forward(x)
        if one_tensor.has_shared_backward(x, symmetric=True):
            one_tensor.shared_backward(x, out, lse, d_out, None)
            return
    else:
        out, _, saved = forward(x)
    *_, delta = backward(x, out, saved, d_out, None, scale_gradient=x.rbf)
    if x.table is not None:
        d_table(x, saved, delta, d_out)


def _describe(case: BandCase, bands: BandSchedule, tokens: int, launch: Launch) -> Configuration:
    kernel, arguments = launch.kernel.fn.__name__, launch.arguments
    edges = sum(_edges(row) for row in case.sequences) * case.batch * case.heads
    numbers = case.batch * tokens * case.heads * case.features
    work = WORK[kernel]
    tensors = work.tensors
    if "a" in arguments and arguments["a"].p is arguments["b"].p:  # a square
        tensors = 1
    iterations, gathered, products = 0.0, 0.0, float(work.products)
    passes: tuple[float, ...] = ()
    programs, groups = 0.0, arguments.get("GROUPS", 1)
    width = case.features * (2 if case.rbf else 1)  # distances keep more numbers
    if kernel == "window_forward_kernel":
        rows, columns = (arguments[name].block_shape[0] for name in ("query", "key"))
        programs = float(arguments["num_work"])
        # The first tile of every group is before the loop. Each group has a loop of its own.
        tiles = bands.tile_pairs(rows, columns) - len(bands.tiles("targets", rows))
        passes = (tiles * case.batch * case.heads / groups,) * groups
        copied = bands.tile_pairs(groups * rows, columns) * case.batch * case.heads
        gathered = float(copied * columns * work.read_again * case.features * case.dtype.itemsize)
    elif products:
        rows, columns = arguments["ROWS"], arguments["COLUMNS"]
        sizes: tuple[int, int, Side] = (rows, columns, "targets")
        if kernel == "d_source_kernel":
            others, sizes = rows, (columns, rows, "sources")
        else:
            others = columns
        iterations = float(bands.tile_pairs(*sizes) * case.batch * case.heads)
        # Kernels with three parts have a loop for each: masked, unmasked, masked.
        if arguments.get("PARTS") == 3:
            passes = tuple(float(n * case.batch * case.heads) for n in bands.part_pairs(*sizes))
        elif "PARTS" in arguments:
            passes = (iterations,)
        row = work.read_again * case.features * case.dtype.itemsize
        if arguments.get("p_pieces") is not None:  # another product adds them
            products += FACTORS.value / case.features
            row += PIECES.value * torch.bfloat16.itemsize
        gathered = iterations * others * row
    is_main = bool(products) and case.dtype != torch.float32 and width <= 128
    if kernel == "band_select_kernel":
        # Hopper's matrix instruction takes 64 rows, and few rows take the one before it.
        is_main = is_main and arguments["COLUMNS"] < FEW_ROWS.columns
        held = arguments["CHUNKS"] > 0
        if held:
            passes = ()
            iterations = TIMES_HELD * launch.grid[0]
        else:
            # Places of candidates are as many operations as 64 features.
            products = sum(TIMES_STREAMED) + TIMES_STREAMED[1] * 64 / case.features
            is_main = False  # it spills outside of its loops
            passes = _passes_streamed(launch, iterations)
            programs = TIMES_OUTSIDE * launch.grid[0]
            gathered *= sum(TIMES_STREAMED)
    kept = arguments.get("p_kept")
    words = 0 if kept is None else kept.nbytes
    part = kernel.removesuffix("_kernel").replace("_", " ")
    return Configuration(
        f"{case.name}, {SHORT_NAMES[case.dtype]}: {part}",
        launch,
        main=is_main,
        flops=2.0 * products * edges * case.features,
        bytes=float(tensors * numbers * case.dtype.itemsize + words),
        iterations=iterations,
        target=case.target,
        gathered=gathered,
        passes=passes,
        programs=programs,
        groups=groups,
    )


def _passes_streamed(launch: Launch, tiles: float) -> tuple[float, ...]:
    """Passes through the loops of a streamed selection of `tiles` tiles, in the order of the code.

    Loops are in three parts, of which the first and the last have masks, but the one for ties.
    """
    count, write_down, cut, write = (times * tiles for times in TIMES_STREAMED)
    arguments = launch.arguments
    if arguments["PARTS"] == 1:
        return count, write_down, cut, write
    masked = launch.grid[0] * (arguments["ROWS"] // arguments["COLUMNS"] + 0.5) / tiles
    parts = masked, 1 - 2 * masked, masked
    return (
        *(share * count for share in parts),
        *(share * write_down for share in parts),
        cut,
        *(share * write for share in parts),
    )


def _edges(row: list[int]) -> int:
    """Count the edges of one sequence."""
    _, targets, _, sources, _, before, after, _ = row
    i = torch.arange(targets)
    low, high = (i - before).clamp(min=0), (i + after + 1).clamp(max=sources)
    return int((high - low).clamp(min=0).sum())
