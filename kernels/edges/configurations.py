"""The launches of the edge kernels that matter most, at their real sizes."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch

from graphattn.kernels.edges.backward import backward
from graphattn.kernels.edges.forward import forward
from graphattn.kernels.edges.inputs import EdgeInputs
from graphattn.kernels.edges.schedule import LONGEST_SEGMENT, EdgeSchedule
from graphattn.kernels.edges.top_k import select
from graphattn.kernels.shared.configuration import (
    SHORT_NAMES,
    Configuration,
    made,
    made_indices,
    scales,
)
from graphattn.kernels.shared.launch import Launch, recording

# Rows of features that a kernel gathers per edge, and that it reads or writes per token.
GATHERED = {
    "edges_forward_kernel": (2, 2),
    "edges_d_query_kernel": (2, 3),
    "edges_d_source_kernel": (2, 4),
    "edges_select_kernel": (1, 1),
}


class EdgeCase(NamedTuple):
    """Attention over rows of `degree` edges each, forward and backward."""

    name: str
    target: str
    tokens: int
    degree: int
    heads: int = 8
    features: int = 64
    batch: int = 1
    dtype: torch.dtype = torch.bfloat16
    rbf: bool = True
    listed: bool = True  # as a list of edges, whose rows may be split; or a table of neighbours
    bias: bool = False
    valid: bool = False
    top_k: int | None = None


LONG = 65536
FAST = "10x gather/scatter, 4x compiled"
CASES = (
    EdgeCase("kNN graph, k 16", FAST, LONG, 16, listed=False),
    EdgeCase("bipartite, degree 32, dot", "", 16384, 32, rbf=False),
    EdgeCase("grid 64 x 64 with class token, radius 2", "", 4097, 27, batch=16),
    # The edges that are not in the band: every target sees 4 global sources, 4 rows see all tokens.
    EdgeCase("longformer, 4 global tokens", "", LONG, 8, rbf=False),
    EdgeCase("kNN graph, k 16, top 8", "", LONG, 16, listed=False, top_k=8),
    EdgeCase("kNN graph, k 16, bias, padded", "", LONG, 16, listed=False, bias=True, valid=True),
    EdgeCase("kNN graph, k 16", "", LONG, 16, listed=False, dtype=torch.float32),
    EdgeCase("kNN graph, k 16, D 16", "", LONG, 16, features=16, listed=False),
    EdgeCase("kNN graph, k 16, D 128", "", LONG, 16, features=128, listed=False),
    EdgeCase("kNN graph, k 16, D 256", "", LONG, 16, features=256, listed=False),
)


def configurations_of(case: EdgeCase, device: str = "meta") -> list[Configuration]:
    """The launches of one case, in their order, except those that add up parts of split rows."""
    B, N, H, D = case.batch, case.tokens, case.heads, case.features
    if case.listed:
        edges_of = {"edge_index": made_indices(2, N * case.degree, below=N, device=device)}
    else:
        edges_of = {"neighbors": made_indices(N, case.degree, below=N, device=device)}
    make = partial(made, dtype=case.dtype, device=device)
    query, key, value, d_out = (make(B, N, H, D) for _ in range(4))
    valid = make(B, N, dtype=torch.bool) if case.valid else None
    bias = make(N * case.degree, H, dtype=torch.float32) if case.bias else None
    x = EdgeInputs(
        query, key, value, scales(H, device), EdgeSchedule(N, N, **edges_of), case.rbf,
        bias, valid, valid,
    )  # fmt: skip
    with recording() as launches:
        if case.top_k is not None:
            x.kept = select(x, case.top_k)
        out, _, saved = forward(x)
        backward(x, out, saved, d_out, None, scale_gradient=case.rbf, bias_gradient=case.bias)
    return [_describe(case, launch) for launch in launches if launch.kernel.fn.__name__ in GATHERED]


def _describe(case: EdgeCase, launch: Launch) -> Configuration:
    kernel, arguments = launch.kernel.fn.__name__, launch.arguments
    gathered, of_tokens = GATHERED[kernel]
    tokens, edges_of_all = case.batch * case.tokens, case.batch * case.tokens * case.degree
    row = float(case.heads * case.features * case.dtype.itemsize)
    segments = case.batch * case.tokens * case.heads * -(-case.degree // LONGEST_SEGMENT)
    passes = segments / arguments["ROWS"] * -(-case.degree // arguments["SLOTS"])
    # A selection gathers the rows that it holds twice: to choose, and to write. Its code has two
    # more such parts, for rows that it does not hold, so about half of it is run.
    share, times = (0.5, 2) if kernel == "edges_select_kernel" else (1.0, 1)
    part = kernel.removesuffix("_kernel").removeprefix("edges_").replace("_", " ")
    return Configuration(
        f"{case.name}, {SHORT_NAMES[case.dtype]}: {part}",
        launch,
        # Tensors are read at least once, and so is the list of edges, four bytes an edge.
        bytes=(gathered + of_tokens) * tokens * row + 4.0 * case.tokens * case.degree,
        iterations=share * passes,
        target=case.target,
        gathered=gathered * edges_of_all * row,
        table=gathered * case.tokens * row,  # batch entries come one after the other
        lookups=times * passes,
    )
