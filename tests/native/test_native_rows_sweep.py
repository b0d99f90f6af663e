"""Attention over rows of edges by compiled code against loops in float64, formula by formula.

The loops know nothing of torch's operations or its autograd: gradients are written out.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import test_native_rows
import torch
from numpy.typing import NDArray
from torch import Tensor

FEW, MANY = 100, 10_000
Array = NDArray[np.float64]


class Loops:
    """Output, log-sums and gradients of a case, one row and head after the other."""

    def __init__(self, case: test_native_rows.Case, d_out: Tensor, d_lse: Tensor) -> None:
        self.case, self.options = case, case.options
        query, key, value = (x.double().numpy() for x in case.tensors)
        self.query, self.key, self.value = (
            x.reshape(-1, *x.shape[-3:]) for x in (query, key, value)
        )
        self.strength = case.strength.double().numpy()
        B, N, H, _ = self.query.shape
        self.d_out, self.d_lse = d_out.numpy().reshape(B, N, H, -1), d_lse.numpy().reshape(B, N, H)
        bias = self.options.get("edge_bias")
        self.bias = None
        if bias is not None:
            samples = math.prod(bias.shape[:-2])
            self.bias = bias.double().numpy().reshape(samples, *bias.shape[-2:])
        self.valid = [x.numpy().reshape(B, -1) for x in self.options.get("valid", ())]
        self.out, self.lse = np.zeros_like(self.d_out), np.full((B, N, H), -np.inf)
        self.d_query, self.d_key, self.d_value, self.d_strength = (
            np.zeros_like(x) for x in (self.query, self.key, self.value, self.strength)
        )
        self.d_bias = None if self.bias is None else np.zeros_like(self.bias)
        source, target = case.graph.edge_index.numpy()
        for b in range(B):
            for i in range(N):
                if self.valid and not self.valid[0][b, i]:
                    continue
                edges = np.flatnonzero(target == i)
                if self.valid:
                    edges = edges[self.valid[1][b, source[edges]]]
                for h in range(H) if len(edges) else ():
                    self.row(b, i, h, edges, source[edges])

    def row(self, b: int, i: int, h: int, edges: Array, sources: Array) -> None:
        """One target and head over the edges between valid tokens."""
        g = h // (self.query.shape[2] // self.key.shape[2])
        x, strength = self.query[b, i, h], self.strength[h]
        k, v = self.key[b, sources, g], self.value[b, sources, g]
        if self.case.is_rbf:
            squares = ((x - k) ** 2).sum(1)
            logit, slope, d_strength = -squares / (2 * strength**2), 1.0, squares / strength**3
        else:
            d_strength = (k * x).sum(1)
            logit, slope = strength * d_strength, 1.0
            if cap := self.options.get("softcap"):
                bent = np.tanh(logit / cap)
                logit, slope = cap * bent, 1 - bent**2
        table = None if self.bias is None else b if len(self.bias) > 1 else 0
        if self.bias is not None:
            logit = logit + self.bias[table, edges, h]
        kept = np.argsort(-logit, kind="stable")[: self.options["top_k"]]
        weight = np.zeros_like(logit)
        weight[kept] = np.exp(logit[kept] - logit[kept].max())
        self.lse[b, i, h] = logit[kept].max() + np.log(weight.sum())
        weight /= weight.sum()
        self.out[b, i, h] = weight @ v
        d_weight = v @ self.d_out[b, i, h]
        d_logit = weight * (d_weight - weight @ d_weight + self.d_lse[b, i, h])
        if self.d_bias is not None:
            self.d_bias[table, edges, h] += d_logit
        d_logit = d_logit * slope
        self.d_strength[h] += d_logit @ d_strength
        pull = d_logit[:, None] * (strength**-2 if self.case.is_rbf else strength)
        self.d_query[b, i, h] = (pull * (k - x if self.case.is_rbf else k)).sum(0)
        self.d_key[b, sources, g] += pull * (x - k if self.case.is_rbf else x)
        self.d_value[b, sources, g] += weight[:, None] * self.d_out[b, i, h]

    def results(self) -> list[Array]:
        """List what the loops found, in the order of `Case.run`."""
        found = [self.out, self.lse, self.d_query, self.d_key, self.d_value, self.d_strength]
        return found if self.d_bias is None else [*found, self.d_bias]


def check(seed: int) -> None:
    case = test_native_rows.Case(seed)
    case.options.pop("dropout", None)  # what is dropped is not for loops to say
    if "softcap" in case.options:
        case.options["top_k"] = None  # large logits bend to the cap, and the last bit chooses then
    found = case.run("native")
    d_out, d_lse = case.upstream(*found[:2])
    for mine, theirs in zip(found, Loops(case, d_out, d_lse).results(), strict=True):
        expected = torch.from_numpy(theirs).reshape(mine.shape)
        torch.testing.assert_close(mine, expected, rtol=1e-10, atol=1e-10, msg=f"seed {seed}")


@pytest.mark.long
@pytest.mark.parametrize(
    "seeds",
    [
        range(FEW),
        *(pytest.param(range(k, k + 1000), marks=pytest.mark.slow) for k in range(0, MANY, 1000)),
    ],
    ids=lambda seeds: f"{seeds.start}-{seeds.stop}",
)
def test_rows_are_the_loops(seeds: range) -> None:
    for seed in seeds:
        check(seed)
