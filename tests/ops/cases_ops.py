"""The graphs and inputs that the tests of the operations share."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import graphattn as ga
from graphattn.kernels.cpu import library

# What runs on a CPU: compiled code where there is some, and the fallback that it stands in for.
FAST = ["structured", "native"] if library.why_not() is None else ["structured"]
BACKENDS = ["reference", *FAST]


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def random_mask(num_targets: int, num_sources: int, density: float, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(num_targets, num_sources, generator=generator) < density


def isolated_mask() -> Tensor:
    """A directed 8-token graph; tokens 0, 3 and 7 see nobody, token 3 is not seen either."""
    mask = random_mask(8, 8, 0.4, seed=5)
    mask[[0, 3, 7]] = False
    mask[:, 3] = False
    return mask


def shuffled(mask: Tensor, seed: int = 0) -> Tensor:
    """The edge_index of a mask, columns in random order."""
    edge_index = ga.from_mask(mask).edge_index
    order = torch.randperm(edge_index.shape[1], generator=torch.Generator().manual_seed(seed))
    return edge_index[:, order]


GRAPHS = {
    "path": lambda: ga.window_path_graph(9, 2),
    "path with self loops": lambda: ga.window_path_graph(9, 2, self_loops=True),
    "path shorter than its window": lambda: ga.window_path_graph(4, 9),
    "cycle": lambda: ga.window_cycle_graph(8, 2),
    "causal window": lambda: ga.causal_window_graph(9, 3),
    "causal": lambda: ga.causal_graph(7),
    "complete": lambda: ga.complete_graph(6),
    "complete without self": lambda: ga.complete_graph(6, self_loops=False),
    "blocks": lambda: ga.block_window_graph(9, 4, shift=2),
    "dilated": lambda: ga.dilated_window_graph(11, 2, 3),
    "grid": lambda: ga.grid_window_graph(3, 4, 1),
    "grid with class token": lambda: ga.grid_window_graph(3, 3, 1, class_token=True),
    "manhattan grid": lambda: ga.grid_window_graph(3, 4, 2, metric="manhattan"),
    "blocks of a grid": lambda: ga.grid_block_graph(4, 5, (3, 2), shift=(1, 0)),
    "shifted grid": lambda: ga.neighborhood_graph((4, 5), (3, 2), dilation=(1, 2)),
    "causal dilated grid": lambda: ga.grid_window_graph(
        4, 3, 1, dilation=(1, 2), causal=(True, False), class_token=True
    ),
    "volume": lambda: ga.volume_window_graph(2, 3, 3, 1),
    "longformer": lambda: ga.longformer_graph(10, 1, [0, 5]),
    "causal longformer": lambda: ga.causal_longformer_graph(10, 2, 2),
    "bigbird": lambda: ga.bigbird_graph(10, 1, 2, [0], seed=3),
    "bipartite window": lambda: ga.bipartite_window_graph(7, 2),
    "bipartite complete": lambda: ga.bipartite_complete_graph(4, 7),
    "random rectangle": lambda: ga.from_mask(random_mask(5, 8, 0.3, seed=2)),
    "nearest neighbours": lambda: ga.knn_graph(random(9, 3, seed=3).float(), 3),
    "isolated targets": lambda: ga.from_edge_index(shuffled(isolated_mask()), 8),
    "union": lambda: ga.union(ga.window_path_graph(9, 1), ga.dilated_window_graph(9, 1, 4)),
    "batch of windows": lambda: ga.batch([ga.window_path_graph(4, 1), ga.window_path_graph(6, 2)]),
    "mixed batch": lambda: ga.batch(
        [ga.complete_graph(3), ga.from_mask(isolated_mask()), ga.window_path_graph(1, 1)]
    ),
    "one token": lambda: ga.window_path_graph(1, 1, self_loops=True),
}

# One of each kind, for what need not be seen on every graph.
FEW = [
    "path with self loops",
    "complete",
    "grid with class token",
    "isolated targets",
    "mixed batch",
]
SQUARE = [name for name in GRAPHS if name not in ("bipartite complete", "random rectangle")]
ENERGY = [name for name in SQUARE if name not in ("causal window", "causal", "causal longformer")]


def sides(graph: ga.TokenGraph) -> tuple[int, int]:
    return graph.num_targets, graph.num_sources


def qkv(
    graph: ga.TokenGraph,
    *,
    batch: tuple[int, ...] = (),
    heads: int = 2,
    kv_heads: int | None = None,
    features: int = 3,
    value_features: int | None = None,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Random query [*, N, H, D], key [*, M, Hk, D] and value [*, M, Hk, Dv]."""
    N, M = sides(graph)
    kv_heads, value_features = kv_heads or heads, value_features or features
    return (
        random(*batch, N, heads, features, seed=seed, dtype=dtype),
        random(*batch, M, kv_heads, features, seed=seed + 1, dtype=dtype),
        random(*batch, M, kv_heads, value_features, seed=seed + 2, dtype=dtype),
    )


SIGMA = {"rbf": {"sigma": 1.3}, "dot": {}}  # what `attend` and the oracle take for a score


def attend(score: str, *arguments: Any, **options: Any) -> Any:
    """Attention by one of the two scores; the arguments are query, key, value and graph."""
    operation = ga.rbf_attention if score == "rbf" else ga.dot_product_attention
    return operation(*arguments, **SIGMA[score], **options)


def valid_tokens(*shape: int, seed: int = 0) -> Tensor:
    """About two thirds True."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.67


def edge_network(
    heads: int = 2,
    features: int = 3,
    hidden: int = 4,
    rank: int = 2,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> ga.EdgeNetworkParameters:
    shapes = [
        (heads, hidden),
        (heads,),
        (heads, hidden),
        (heads,),
        (heads, rank, features, hidden),
        (heads, rank, features),
    ]
    return ga.EdgeNetworkParameters(
        *(random(*shape, seed=100 * seed + k, dtype=dtype) for k, shape in enumerate(shapes))
    )


def identity_network(
    heads: int, features: int, hidden: int = 2, dtype: torch.dtype = torch.float64
) -> ga.EdgeNetworkParameters:
    """R = I on every edge: alpha = softplus(log(e - 1)) = 1, beta = softplus(-1e9) = 0."""
    zeros = edge_network(heads, features, hidden, rank=1, dtype=dtype)
    zeros = ga.EdgeNetworkParameters(*(torch.zeros_like(x) for x in zeros))
    one = torch.full((heads,), 1.0, dtype=dtype).expm1().log()
    return zeros._replace(alpha_bias=one, beta_bias=torch.full((heads,), -1e9, dtype=dtype))


class ConsensusInputs(NamedTuple):
    """The first five arguments of `consensus_update`."""

    state: Tensor
    neighbor_state: Tensor
    target_hidden: Tensor
    source_hidden: Tensor
    network: ga.EdgeNetworkParameters


def consensus_inputs(
    graph: ga.TokenGraph,
    *,
    batch: tuple[int, ...] = (),
    heads: int = 2,
    features: int = 3,
    hidden: int = 4,
    rank: int = 2,
    shared_network: bool = False,
    separate_trunks: bool = False,
    neighbor: bool = False,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> ConsensusInputs:
    """Random inputs; self-consensus on a square graph unless `neighbor`."""
    N, M = sides(graph)
    groups, width = 1 if shared_network else heads, hidden * (3 if separate_trunks else 1)
    state = random(*batch, N, heads, features, seed=seed, dtype=dtype)
    if N == M and not neighbor:
        other = state
    else:
        other = random(*batch, M, heads, features, seed=seed + 1, dtype=dtype)
    return ConsensusInputs(
        state,
        other,
        random(*batch, N, groups, width, seed=seed + 2, dtype=dtype),
        random(*batch, M, groups, width, seed=seed + 3, dtype=dtype),
        edge_network(heads, features, hidden, rank, dtype=dtype, seed=seed),
    )


def as_matrix(inputs: ConsensusInputs, graph: ga.TokenGraph, step: str | float, **kw) -> Tensor:
    """The step as matrices [H, ND, ND], from the op itself on the basis vectors."""
    N, H, D = inputs.state.shape
    basis = torch.eye(N * D, dtype=torch.float64).view(N * D, N, 1, D).expand(-1, -1, H, -1)
    hidden = (x.expand(N * D, *x.shape) for x in inputs[2:4])
    columns = ga.consensus_update(basis, basis, *hidden, inputs.network, graph, step, **kw)
    return columns.permute(2, 1, 3, 0).reshape(H, N * D, N * D)


class Largest(TorchDispatchMode):
    """The numbers in the largest tensor that any operation makes."""

    numel = 0

    def __torch_dispatch__(self, operation, types, arguments=(), options=None):
        result = operation(*arguments, **(options or {}))
        if isinstance(result, Tensor):
            self.numel = max(self.numel, result.untyped_storage().nbytes() // result.itemsize)
        return result
