"""Calls whose gradients are computed in parts, beside those over all sources at once."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import graphattn as ga
from graphattn.distributed.local_graph import edges_between, unlike_edges
from graphattn.ops.attention.part_gradients import part_gradients

WIDE = torch.float64
H, D = 2, 3
TOKENS, BORDERS = 21, (0, 6, 13, 21)
GRAPHS = {
    "causal window": lambda: ga.causal_window_graph(TOKENS, 6),
    "complete": lambda: ga.complete_graph(TOKENS),
    "longformer": lambda: ga.longformer_graph(TOKENS, 4, [2]),
    "edges": lambda: ga.from_edge_index(
        torch.randint(TOKENS, (2, 3 * TOKENS)).unique(dim=1), num_targets=TOKENS
    ),
}


class Case:
    """A call over a graph, its gradients over all sources in float64, and in parts."""

    def __init__(
        self,
        graph: str,
        score: str,
        *,
        biased: bool = False,
        valid: bool = False,
        kv: int = H,
    ) -> None:
        torch.manual_seed(1)
        self.graph, self.name = GRAPHS[graph](), score
        sizes = (H, D), (kv, D), (kv, 4), (H, 4)
        self.tensors = [torch.randn(2, TOKENS, *size, dtype=WIDE) for size in sizes]
        self.d_lse = torch.randn(2, TOKENS, H, dtype=WIDE)
        self.strength = torch.tensor([0.7, 1.3], dtype=WIDE)
        tokens = torch.arange(TOKENS)
        self.valid = (tokens % 5 > 0, tokens % 3 > 0) if valid else (None, None)
        self.bias = None
        if biased:
            structure = self.graph.structure
            offsets = structure.num_offsets if structure is not None else 0
            self.bias = torch.randn(offsets or self.graph.num_edges, H, dtype=WIDE)

    def score(self, strength: Tensor) -> ga.Score:
        if self.name == "rbf":
            return ga.GaussianKernel(strength.rsqrt())
        return ga.DotProduct(strength)

    def leaves(self, dtype: torch.dtype, wide: torch.dtype, device: str = "cpu") -> list[Tensor]:
        """Query, key and value in one dtype, strength and bias in another one, and d_out."""
        *tensors, d_out = (x.to(device, dtype) for x in self.tensors)
        others = [x.to(device, wide) for x in (self.strength, self.bias) if x is not None]
        return [*(x.detach().requires_grad_() for x in [*tensors, *others]), d_out.to(wide)]

    def whole(self, dtype: torch.dtype) -> tuple[list[Tensor], tuple[Tensor, Tensor]]:
        """The gradients over all sources, and the output and log-sums, from rounded inputs."""
        *leaves, d_out = (x.to(WIDE) for x in self.leaves(dtype, WIDE))
        leaves = [x.detach().requires_grad_() for x in leaves]
        query, key, value, strength, *bias = leaves
        out, lse = ga.score_attention(
            query, key, value, self.graph, self.score(strength), backend="reference",
            return_lse=True, valid=self.valid, edge_bias=bias[0] if bias else None,
        )  # fmt: skip
        total = (out * d_out).sum() + (lse.masked_fill(lse.isinf(), 0) * self.d_lse).sum()
        return list(torch.autograd.grad(total, leaves)), (out.detach(), lse.detach())

    def in_parts(
        self, backend: str, dtype: torch.dtype, device: str
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The gradients that parts add up to, and those over all sources."""
        expected, whole = self.whole(dtype)
        wide = WIDE if dtype == WIDE else torch.float32
        *leaves, d_out = self.leaves(dtype, wide, device)
        query, key, value, strength, *bias = leaves
        results = tuple(x.to(device, wide) for x in whole)
        of_targets, of_sources = (None if x is None else x.to(device) for x in self.valid)
        pairs = []
        for first, last in itertools.pairwise(BORDERS):
            block = edges_between(self.graph, range(TOKENS), torch.arange(first, last)).to(device)
            actual = part_gradients(
                query, key[:, first:last], value[:, first:last], block, self.score(strength),
                whole=results, d_whole=(d_out, self.d_lse.to(device, wide)), backend=backend,
                valid=(of_targets, None if of_sources is None else of_sources[first:last]),
                edge_bias=self._bias_of(bias, block, first, last),
            )  # fmt: skip
            assert actual is not None
            pairs += [(x, d) for x, d in actual if x.requires_grad]
        inputs, gradients = zip(*pairs, strict=True)
        return list(torch.autograd.grad(inputs, leaves, gradients)), expected

    def _bias_of(self, bias: list[Tensor], block: ga.TokenGraph, first: int, last: int) -> Any:
        if not bias:
            return None
        structure, (source, _) = self.graph.structure, self.graph.edge_index
        if structure is None or not structure.num_offsets:
            return bias[0][((first <= source) & (source < last)).to(bias[0].device)]
        if block.structure is not None and block.structure.num_offsets:
            return unlike_edges(bias[0], block)
        source, target = block.edge_index
        return bias[0][structure.offset_index(target, source + first)]


def check(case: Case, backend: str, dtype: torch.dtype, atol: float, device: str = "cpu") -> None:
    """Parts add up to the gradient over all sources, and rows without sources get exactly 0."""
    actual, expected = case.in_parts(backend, dtype, device)
    for a, b in zip(actual, expected, strict=True):
        assert torch.allclose(a.to("cpu", WIDE), b, rtol=atol, atol=atol), (a - b).abs().max()
    if case.valid[0] is not None:
        assert (actual[0].cpu()[:, ~case.valid[0]] == 0).all()


FEW = [("edges", "dot", True), ("causal window", "rbf", True), ("longformer", "rbf", False)]
ALL = [(g, s, b) for g in GRAPHS for s in ("dot", "rbf") for b in (False, True)]
CASES = [pytest.param(*c, marks=[] if c in FEW else [pytest.mark.long]) for c in ALL]


def is_left_to_the_parts(backend: str, size: float, device: str = "cpu") -> bool:
    """Whether a part in float32 whose logits are as large as this has to be computed again."""
    ends = torch.tensor([[0, 1, 2], [0, 0, 1]], device=device)
    graph = ga.from_edge_index(ends, num_targets=3)
    query = torch.full((3, 1, 1), size, device=device, requires_grad=True)
    key, value = torch.ones(3, 1, 1, device=device), torch.randn(3, 1, 1, device=device)
    score, backends = ga.DotProduct(1.0), {"backend": backend}
    out, lse = ga.score_attention(query, key, value, graph, score, return_lse=True, **backends)
    pairs = part_gradients(
        query, key, value, graph, score, whole=(out.detach(), lse.detach()),
        d_whole=(torch.ones_like(out), torch.ones_like(lse)), **backends,
    )  # fmt: skip
    return pairs is None
