"""Random graphs and attention problems, drawn from one generator, for sweeps over many seeds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import graphattn as ga

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "heads first": lambda x: x.transpose(-2, -3).contiguous().transpose(-2, -3),
    "part of a wider tensor": lambda x: torch.cat([x, x], dim=-1)[..., : x.shape[-1]],
    "not aligned": lambda x: torch.cat([x.new_zeros(3), x.flatten()])[3:].view(x.shape),
    "every other token": lambda x: torch.stack([x, x], dim=-3).flatten(-4, -3)[..., ::2, :, :],
    "features apart": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
}


def draws(generator: torch.Generator):
    """A function that draws one of its arguments."""
    return lambda *options: options[int(torch.randint(len(options), (), generator=generator))]


def random_graph(draw, generator: torch.Generator) -> ga.TokenGraph:
    """Any kind of graph, of a few up to a hundred tokens."""
    window, loops, dilation = draw(1, 2, 3, 8, 40), draw(True, False), draw(2, 5)

    def edge_list(n: int) -> ga.TokenGraph:
        return ga.from_mask(torch.rand(n, n, generator=generator) < draw(0.05, 0.3))

    def nearest(n: int) -> ga.TokenGraph:
        return ga.knn_graph(torch.randn(n, 2, generator=generator), min(3, n - 1))

    def longformer(n: int) -> ga.TokenGraph:
        n = n if n < 40 else n + 100  # short ones go another way
        return ga.longformer_graph(n, window, (0, n // 2)[: draw(1, 2)], dilation=draw(1, 2))

    kinds = {
        "path": lambda n: ga.window_path_graph(n, window, self_loops=loops),
        "causal window": lambda n: ga.causal_window_graph(n, window),
        "dilated": lambda n: ga.dilated_window_graph(n, window, dilation, self_loops=loops),
        "bipartite window": lambda n: ga.bipartite_window_graph(n, window),
        "complete": lambda n: ga.complete_graph(n, self_loops=loops),
        "causal": ga.causal_graph,
        "blocks": lambda n: ga.block_window_graph(n, draw(2, 4, 16), shift=draw(0, 1)),
        "longformer": longformer,
        "edge list": edge_list,
        "nearest": nearest,
        "cycle": lambda n: ga.window_cycle_graph(n + 3, 2),
        "grid": lambda n: ga.grid_window_graph(3, n, draw(1, 2), class_token=loops),
        "grid blocks": lambda n: ga.grid_block_graph(3, n, draw(2, 5), shift=draw(0, 1)),
        "bipartite": lambda n: ga.bipartite_complete_graph(n, 7),
        "bigbird": lambda n: ga.bigbird_graph(n, 1, 2, (0,), seed=n),
    }
    lengths = draw((9,), (40,), (2,), (100,), (5, 17, 2), (30, 30))
    kind = draw(*kinds)
    parts = [kinds[draw(kind, kind, *kinds)](n) for n in lengths]
    if any(p.num_targets != p.num_sources for p in parts):
        parts = parts[:1]
    return parts[0] if len(parts) == 1 else ga.batch(parts)


def numbers(shape: Sequence[int], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float64).to(dtype)


class Problem:
    """Attention over any graph: sizes, options and the layout of the inputs are all random."""

    def __init__(self, seed: int, *dtypes: torch.dtype, offset: float | None = None) -> None:
        self.generator = generator = torch.Generator().manual_seed(seed)
        self.draw = draw = draws(generator)
        self.graph, self.dtype = random_graph(draw, generator), draw(*dtypes)
        batch, kv_heads = draw((), (1,), (2,), (2, 1)), draw(1, 2)
        heads, features = kv_heads * draw(1, 2, 3), draw(1, 5, 8, 19)
        N, M = self.graph.num_targets, self.graph.num_sources
        offset = draw(0, 0, 100) if offset is None else offset
        self.layout = draw(*LAYOUTS)
        self.tensors = [
            numbers((*batch, N, heads, features), generator, self.dtype) + offset,
            numbers((*batch, M, kv_heads, features), generator, self.dtype) + offset,
            numbers((*batch, M, kv_heads, draw(1, 5, 10, features)), generator, self.dtype),
        ]
        self.options: dict[str, Any] = {"top_k": draw(None, None, 1, 3, 50)}
        if draw(False, True):
            self.options["valid"] = tuple(
                torch.rand((*batch, n), generator=generator) < draw(0.5, 0.8) for n in (N, M)
            )
        E, table = self.graph.num_edges, None
        if self.graph.structure is not None:
            table = self.graph.structure.num_offsets
        of_bias = draw(None, (E,), (*draw((), batch), E), None if table is None else (table,))
        if of_bias is not None and table != E:  # otherwise nobody knows which of the two is meant
            self.options["edge_bias"] = numbers((*of_bias, heads), generator, self.dtype)
        wide = torch.promote_types(self.dtype, torch.float32)
        strength = (0.5 + torch.rand(heads, generator=generator, dtype=torch.float64)).to(wide)
        if draw(True, False):
            self.options["sigma"] = strength * draw(0.3, 1.0) * features**0.5
            self.options["eps"] = draw(0.0, 0.1)
        else:
            self.options["scale"] = strength / features**0.5 * draw(1, 1, -1)
            self.options["softcap"] = draw(None, None, 0.7)
        self.options["dropout"] = draw(0.0, 0.0, 0.0, 0.4)

    @property
    def edges(self) -> Tensor:
        """Bool [*, N, M]: which pairs count."""
        mask = self.graph.to_mask().expand(*self.tensors[0].shape[:-3], -1, -1)
        if "valid" in self.options:
            of_target, of_source = self.options["valid"]
            mask = mask & of_target[..., None] & of_source[..., None, :]
        return mask

    def run(
        self,
        backend: str = "auto",
        tensors: Sequence[Tensor] | None = None,
        *,
        rows: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> list[Tensor]:
        """Return what `differentiated` gives, if need be of other tensors or in another dtype."""
        tensors, options = tensors or self.tensors, dict(self.options)
        if dtype is not None:
            tensors = [x.to(dtype) for x in tensors]
            options |= {name: options[name].to(dtype) for name in LEARNED if name in options}
        return differentiated(backend, self.graph, tensors, options, layout=self.layout, rows=rows)


LEARNED = ("sigma", "scale", "edge_bias")


def differentiated(
    backend: str,
    graph: ga.TokenGraph,
    tensors: Sequence[Tensor],
    options: dict[str, Any],
    *,
    layout: str = "contiguous",
    rows: Tensor | None = None,
) -> list[Tensor]:
    """Output and log-sums of `rows` [*, N], and all gradients if only those rows count."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    learned = {
        name: options[name].detach().clone().requires_grad_() for name in LEARNED if name in options
    }
    options = {**options, **learned, "backend": backend, "return_lse": True}
    if options.get("dropout"):
        options["generator"] = torch.Generator().manual_seed(1)
    operation = ga.rbf_attention if "sigma" in options else ga.dot_product_attention
    out, lse = operation(*(LAYOUTS[layout](x) for x in leaves), graph, **options)
    if rows is not None:
        out, lse = out[rows], lse[rows]
    upstream, heard = torch.Generator().manual_seed(0), lse.isfinite()
    # Numbers that every dtype has: in all of them the loss is the same.
    d_out, d_lse = (numbers(x.shape, upstream, torch.bfloat16).to(x.dtype) for x in (out, lse))
    loss = (out * d_out).sum().to(lse.dtype) + (lse[heard] * d_lse[heard]).sum()
    leaves += learned.values()
    return [out, lse, *torch.autograd.grad(loss, leaves, materialize_grads=True)]
