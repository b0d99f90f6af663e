"""Attention over bands by compiled code: the reference's results, and the same bits always.

The sweeps of tests/ops run on it, too; here is what its own ways need: borders of tiles and tasks,
layouts, threads, and every build.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from test_native_rows import Case

import graphattn as ga
from graphattn.kernels.cpu import library
from graphattn.ops.attention import native

if library.why_not() is not None:
    pytest.skip(str(library.why_not()), allow_module_level=True)

CASES = int(os.environ.get("GRAPHATTN_SWEEP", "200"))
LENGTHS = (1, 2, 7, 8, 9, 31, 33, 64, 65, 130)


class BandCase(Case):
    """A window, blocks or a batch of them; a table in place of biases per edge."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.float64) -> None:
        super().__init__(seed, dtype)
        self.graph = self.draw_graph()
        batch, heads, width = self.tensors[0].shape[:-3], *self.tensors[0].shape[-2:]
        kv_heads, value_width = self.tensors[2].shape[-2:]
        n, m = self.graph.num_targets, self.graph.num_sources
        self.tensors = [
            self.tensor(*batch, n, heads, width),
            self.tensor(*batch, m, kv_heads, width),
            self.tensor(*batch, m, kv_heads, value_width),
        ]
        if "valid" in self.options:
            self.options["valid"] = tuple(
                torch.rand(*batch, k, generator=self.generator) < 0.8 for k in (n, m)
            )
        self.options.pop("dropout", None)
        offsets = None if self.graph.structure is None else self.graph.structure.num_offsets
        self.options.pop("edge_bias", None)
        if offsets and offsets != self.graph.num_edges and self.draw(True, False):
            self.options["edge_bias"] = self.tensor(offsets, heads)

    def draw_graph(self) -> ga.TokenGraph:
        n = self.draw(*LENGTHS)
        window = self.draw(1, 2, 5, 16, 17, 40, 100)
        loops = self.draw(True, False)

        def one(n: int) -> ga.TokenGraph:
            return self.draw(
                lambda: ga.causal_window_graph(n, window),
                lambda: ga.window_path_graph(n, window, self_loops=loops),
                lambda: ga.block_window_graph(n, window),
                lambda: ga.complete_graph(n, self_loops=loops),
                lambda: ga.dilated_window_graph(n, window, dilation=3),
            )()

        kind = self.draw("one", "batch", "rows")
        if kind == "batch":
            return ga.batch([one(n), one(self.draw(1, 9, 40)), one(n)])
        if kind == "rows" and n > 2:
            return ga.causal_window_graph(n, window, past=self.draw(1, 5, 70))
        return one(n)


def is_of_bands(case: Case) -> bool:
    query = case.tensors[0].reshape(-1, *case.tensors[0].shape[-3:])
    key, value = (x.reshape(-1, *x.shape[-3:]) for x in case.tensors[1:])
    options: dict[str, Any] = {
        "score": "dot",
        "per_offset": "edge_bias" in case.options,
        "top_k": case.options["top_k"],
        "valid": (None, None),
    }
    bias = case.options.get("edge_bias")
    _, plan = native.plan_call((query, key, value, case.strength, bias), case.graph, **options)
    return type(plan).__name__ == "NativeBandPlan"


@pytest.mark.long
@pytest.mark.parametrize("part", range(4))
def test_it_is_the_reference(part: int) -> None:
    for seed in range(part, CASES, 4):
        case = BandCase(seed)
        for mine, theirs in zip(case.run("native"), case.run("reference"), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10, msg=f"seed {seed}")


def test_most_of_these_cases_are_bands() -> None:
    assert sum(is_of_bands(BandCase(seed)) for seed in range(40)) > 25


def test_float32_is_float64_to_its_rounding() -> None:
    for seed in range(60):
        case = BandCase(seed, torch.float32)
        exact = case.run("native", dtype=torch.float64)
        for mine, theirs in zip(case.run("native"), exact, strict=True):
            largest = (
                float(theirs.detach().nan_to_num(0, 0, 0).abs().max()) if theirs.numel() else 0
            )
            torch.testing.assert_close(
                mine.double(), theirs, rtol=0, atol=3e-5 * (1 + largest), msg=f"seed {seed}"
            )
