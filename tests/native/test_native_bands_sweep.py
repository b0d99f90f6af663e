"""Compiled attention over bands against loops in float64: values and all gradients.

Random graphs, sizes, layouts and options. GRAPHATTN_SWEEP sets how many cases (`pytest -m slow`
takes 10,000).
"""

from __future__ import annotations

import os
from typing import Any

import bands_by_hand as by_hand
import pytest
import torch
from torch import Tensor

import graphattn as ga
from graphattn.kernels.cpu import library

if library.why_not() is not None:
    pytest.skip(str(library.why_not()), allow_module_level=True)

CASES = int(os.environ.get("GRAPHATTN_SWEEP", "200"))
MANY = max(CASES, 10_000)
PARTS = 20  # a case takes 20 ms or so

LENGTHS = (0, 1, 2, 3, 7, 8, 9, 16, 31, 33, 40, 63, 64, 65, 127, 129, 140)
WIDTHS = (1, 2, 3, 5, 8, 15, 16, 17, 19, 32, 33, 64, 100)


class Case:
    """A graph of bands, tensors in some layout, and options, all drawn from one seed."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        draw = self.draw
        self.dtype = draw(torch.float64, torch.float64, torch.float32)
        self.seen = self.draw_graph()
        batch, kv_heads = draw((), (1,), (2,), (2, 2), (0,)), draw(1, 1, 2)
        heads, width = kv_heads * draw(1, 2, 3), draw(*WIDTHS)
        value_width = draw(width, *WIDTHS)
        n, m = self.seen.mask.shape
        self.score = draw("dot", "rbf")
        offset = draw(0, 0, 0, 100) if self.score == "rbf" else 0
        size = draw(1.0, 1.0, 0.3)
        self.tensors = [
            self.tensor(*batch, n, heads, width) * size + offset,
            self.tensor(*batch, m, kv_heads, width) * size + offset,
            self.tensor(*batch, m, kv_heads, value_width),
        ]
        self.tensors = [self.laid_out(x) for x in self.tensors]
        strength = 0.5 + torch.rand(heads, generator=self.generator, dtype=torch.float64)
        strength = strength.to(self.dtype)
        if self.score == "rbf":
            self.strength = strength * draw(1.0, 0.3, 0.1) * width**0.5
        else:
            self.strength = strength / width**0.5 * draw(1.0, 1.0, -1.0)
        self.table: Tensor | None = None
        if self.seen.offsets and self.seen.offsets != self.seen.graph.num_edges and draw(0, 1):
            self.table = self.tensor(self.seen.offsets, heads)
            unseen = torch.rand(self.seen.offsets, generator=self.generator) < draw(0, 0, 0.2)
            self.table = self.table.masked_fill(unseen[:, None], -torch.inf)
        self.options: dict[str, Any] = {"top_k": draw(None, None, 1, 2, 5, 30)}
        self.valid: tuple[Tensor | None, Tensor | None] = (None, None)
        if draw(True, False):
            self.valid = tuple(
                torch.rand((*batch, k), generator=self.generator) < draw(0.3, 0.8) for k in (n, m)
            )
        if self.score == "dot" and draw(True, False, False):
            self.options["softcap"] = draw(0.7, 3.0)
        self.with_sums, self.with_output = draw((True, True), (False, True), (True, False))

    def draw(self, *options: Any) -> Any:
        return options[int(torch.randint(len(options), (), generator=self.generator))]

    def tensor(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64).to(self.dtype)

    def laid_out(self, x: Tensor) -> Tensor:
        """Contiguous, part of a wider tensor, heads first, not aligned, or every other token."""
        match self.draw("whole", "part", "heads", "moved", "tokens"):
            case "part":
                return torch.cat([x, x], -1)[..., : x.shape[-1]]
            case "heads":
                return x.transpose(-2, -3).contiguous().transpose(-2, -3)
            case "moved":
                return torch.cat([x.new_zeros(3), x.flatten()])[3:].view(x.shape)
            case "tokens":
                return torch.stack([x, x], -3).flatten(-4, -3)[..., ::2, :, :]
        return x

    def draw_graph(self) -> by_hand.Seen:
        draw = self.draw
        kind = draw("causal window", "causal", "path", "path", "dilated", "blocks", "complete")
        window, loops, step = draw(1, 2, 5, 16, 17, 40, 100, 300), draw(True, False), draw(2, 3, 7)
        shift = int(torch.randint(window, (), generator=self.generator))

        def one(n: int, past: int) -> by_hand.Seen:
            match kind:
                case "causal window":
                    return by_hand.causal_window(n, window, past)
                case "causal":
                    return by_hand.causal(n, past)
                case "path":
                    return by_hand.path(n, window, loops)
                case "dilated":
                    return by_hand.dilated(n, window, step, loops)
                case "blocks":
                    return by_hand.blocks(n, window, shift)
            if draw(True, False, False):
                return by_hand.bipartite(n, draw(*LENGTHS))
            return by_hand.complete(n, loops)

        n = draw(*LENGTHS)
        match draw("one", "one", "batch", "section"):
            case "batch":
                few = [x for x in LENGTHS if x <= 40]
                return by_hand.side_by_side([one(k, 0) for k in (draw(*few), n, draw(*few))])
            case "section" if n > 3 and kind != "complete":
                start, stop = sorted(torch.randperm(n, generator=self.generator)[:2].tolist())
                return by_hand.section(one(n, 0), start, stop)
        return one(n, draw(0, 0, 1, 5, 70))

    def leaves(self) -> list[Tensor]:
        leaves = [*self.tensors, self.strength, *([] if self.table is None else [self.table])]
        return [x.detach().requires_grad_() for x in leaves]

    def gradients(self, out: Tensor, lse: Tensor, leaves: list[Tensor]) -> list[Tensor]:
        upstream = torch.Generator().manual_seed(2)
        d_out, d_lse = (
            torch.randn(x.shape, generator=upstream, dtype=torch.float64).to(x.dtype)
            for x in (out, lse)
        )
        heard = lse != -torch.inf
        loss = lse.new_zeros(())
        if self.with_output:
            loss = loss + (out * d_out).sum()
        if self.with_sums:
            loss = loss + (lse[heard] * d_lse[heard]).sum()
        if not loss.requires_grad:  # no row to loop over
            return [torch.zeros_like(x) for x in leaves]
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
        return [
            torch.zeros_like(x) if g is None else g for x, g in zip(leaves, gradients, strict=True)
        ]

    def run(self, backend: str = "native") -> list[Tensor]:
        """Output, log-sums, and the gradients of all that has one."""
        leaves = self.leaves()
        options = dict(self.options, valid=self.valid, backend=backend, return_lse=True)
        if self.table is not None:
            options["edge_bias"] = leaves[4]
        if self.score == "rbf":
            out, lse = ga.rbf_attention(*leaves[:3], self.seen.graph, leaves[3], **options)
        else:
            options["scale"] = leaves[3]
            out, lse = ga.dot_product_attention(*leaves[:3], self.seen.graph, **options)
        return [out, lse, *self.gradients(out, lse, leaves)]

    def by_hand(self) -> list[Tensor]:
        """Compute output, log-sums and gradients in loops."""
        leaves = self.leaves()
        exact = [x.double() for x in leaves]
        batch = self.tensors[0].shape[:-3]
        tensors = [x.reshape(batch.numel(), *x.shape[-3:]) for x in exact[:3]]
        valid = tuple(
            None if x is None else x.reshape(batch.numel(), x.shape[-1]) for x in self.valid
        )
        scale = exact[3] if self.score == "dot" else exact[3] ** -2
        out, lse = by_hand.rows(
            *tensors,
            self.seen,
            by_hand.AFFINITIES[self.score],
            scale,
            exact[4] if len(exact) > 4 else None,
            valid=valid,
            **self.options,
        )
        out, lse = out.view(*batch, *out.shape[1:]), lse.view(*batch, *lse.shape[1:])
        return [out, lse, *(x.double() for x in self.gradients(out, lse, leaves))]


def check(seed: int) -> None:
    """Fails where a case is not what the loops say, to the rounding of its numbers."""
    case = Case(seed)
    double = case.dtype == torch.float64
    for place, (mine, exact) in enumerate(zip(case.run(), case.by_hand(), strict=True)):
        finite = exact.detach().masked_fill(exact == -torch.inf, 0)
        largest = float(finite.abs().max()) if finite.numel() else 0.0
        rounding = 1e-11 if double else (1e-5 if place < 2 else 5e-5)
        if place >= 5:  # strengths and tables: sums over rows, whose terms may cancel
            rounding *= max(1, case.tensors[0].shape[:-1].numel()) ** 0.5
        torch.testing.assert_close(
            mine.double(), exact, rtol=0, atol=rounding * (1 + largest),
            msg=lambda text, place=place: f"seed {seed}, result {place}: {text}",
        )  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("part", range(PARTS))
def test_it_is_what_loops_in_float64_say(part: int) -> None:
    for seed in range(part, CASES, PARTS):
        check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_many_cases_are_what_loops_in_float64_say(part: int) -> None:
    for seed in range(CASES + part, MANY, PARTS):
        check(seed)
