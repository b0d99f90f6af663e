"""One attention problem, and what each way to solve it gives: outputs, log-sums, gradients."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import graphattn as ga
from graphattn.kernels.shared import tuning

Tensors = dict[str, Tensor]
Errors = dict[str, tuple[float, float]]  # of every result: its error, and the largest allowed


def random(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def coins(*shape: int, seed: int, share: float = 0.7) -> Tensor:
    """True with probability `share`."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < share


def tiles(rows: int, columns: int) -> dict[str, tuning.Choice]:
    """Return arguments of `tuning.override` that give tiles of this size to every kernel."""
    return {kernel: tuning.Choice(rows, columns, 4, 1) for kernel in tuning.KERNELS}


@dataclass(frozen=True)
class Case:
    """One attention problem: a graph, a score, sizes, biases, masks and options.

    If `shared`, query, key and value are one tensor.
    """

    graph: ga.TokenGraph
    score: str = "rbf"
    batch: tuple[int, ...] = (1,)
    heads: int = 2
    kv_heads: int = 2
    features: int = 7
    value_features: int = 5
    table: bool = False
    per_edge: bool = False  # a bias for every edge and head
    per_sample: bool = False  # ... and every sample
    valid: str = ""  # "both", "targets", "sources"
    eps: float = 0.0
    shared: bool = False
    offset: float = 0.0  # of all tokens, every feature
    strength: tuple[float, ...] | None = None  # sigma or scale
    seed: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    def tensors(self, dtype: torch.dtype = torch.float32) -> Tensors:
        """query, key and value in `dtype`; strength (and table or edge_bias) in float32."""
        N, M, s = self.graph.num_targets, self.graph.num_sources, 10 * self.seed
        H, Hk, D, Dv = self.heads, self.kv_heads, self.features, self.value_features
        tensors = {"query": random(*self.batch, N, H, D, seed=s) + self.offset}
        if not self.shared:
            tensors["key"] = random(*self.batch, M, Hk, D, seed=s + 1) + self.offset
            tensors["value"] = random(*self.batch, M, Hk, Dv, seed=s + 2)
        tensors = {name: x.to(dtype) for name, x in tensors.items()}
        if self.strength is not None:
            strength = torch.tensor(self.strength, dtype=torch.float64)
        elif self.score == "rbf":
            strength = D**0.5 * (0.3 * random(H, seed=s + 3)).exp()
        else:
            strength = random(H, seed=s + 3) / D**0.5  # of either sign
        tensors["strength"] = strength.float()
        if self.table:
            assert self.graph.structure is not None
            rows = self.graph.structure.num_offsets
            assert rows is not None
            tensors["table"] = random(rows, H, seed=s + 4).float()
        if self.per_edge:
            batch = self.batch if self.per_sample else ()
            tensors["edge_bias"] = random(*batch, self.graph.num_edges, H, seed=s + 4).float()
        return tensors

    def upstream(self, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Gradients of the output (in `dtype`) and of the log-sums, as numbers that come in."""
        N, s = self.graph.num_targets, 10 * self.seed
        Dv = self.features if self.shared else self.value_features
        return (
            random(*self.batch, N, self.heads, Dv, seed=s + 5).to(dtype),
            random(*self.batch, N, self.heads, seed=s + 6).float(),
        )

    @property
    def masks(self) -> tuple[Tensor | None, Tensor | None]:
        """Masks of the valid targets and of the valid sources; None where all are valid."""
        of_targets = coins(*self.batch, self.graph.num_targets, seed=self.seed + 7)
        if self.valid == "both" and self.graph.num_targets == self.graph.num_sources:
            return of_targets, of_targets
        of_sources = coins(*self.batch, self.graph.num_sources, seed=self.seed + 8)
        return (
            of_targets if self.valid in ("both", "targets") else None,
            of_sources if self.valid in ("both", "sources") else None,
        )

    @property
    def edges(self) -> Tensor:
        """Bool [*, N, M]: which pairs count."""
        edges = self.graph.to_mask().expand(*self.batch, -1, -1)
        of_targets, of_sources = self.masks
        if of_targets is not None:
            edges = edges & of_targets[..., :, None]
        if of_sources is not None:
            edges = edges & of_sources[..., None, :]
        return edges


def attend(
    case: Case, tensors: Tensors, *, backend: str, device: str = "cpu", valid: Any = None
) -> tuple[Tensor, Tensor]:
    """Output and log-sums."""
    query = tensors["query"]
    qkv = [tensors.get(name, query) for name in ("query", "key", "value")]
    if valid is None:
        one, other = (None if m is None else m.to(device) for m in case.masks)
        valid = (one, one) if case.masks[0] is case.masks[1] else (one, other)
    options = {"valid": valid, "backend": backend, "return_lse": True, **case.options}
    for name in ("table", "edge_bias"):
        if name in tensors:
            options["edge_bias"] = tensors[name]
    graph = case.graph.to(device)
    if case.score == "rbf":
        return ga.rbf_attention(*qkv, graph, tensors["strength"], eps=case.eps, **options)
    return ga.dot_product_attention(*qkv, graph, scale=tensors["strength"], **options)


def solve(
    case: Case,
    tensors: Tensors,
    upstream: tuple[Tensor, Tensor],
    *,
    backend: str,
    device: str = "cpu",
) -> Tensors:
    """out, lse, and the gradients of all tensors under their names, on the CPU."""
    leaves = {name: x.detach().to(device).requires_grad_() for name, x in tensors.items()}
    out, lse = attend(case, leaves, backend=backend, device=device)
    return differentiated(out, lse, leaves, upstream)


def differentiated(
    out: Tensor, lse: Tensor, leaves: Tensors, upstream: tuple[Tensor, Tensor]
) -> Tensors:
    d_out, d_lse = (d.to(x.device, x.dtype) for d, x in zip(upstream, (out, lse), strict=True))
    gradients = torch.autograd.grad((out, lse), list(leaves.values()), (d_out, d_lse))
    results = {"out": out, "lse": lse, **dict(zip(leaves, gradients, strict=True))}
    return {name: x.detach().cpu() for name, x in results.items()}


def in_float64(case: Case, tensors: Tensors, upstream: tuple[Tensor, Tensor]) -> Tensors:
    """The reference backend on the same numbers, in float64 on the CPU."""
    wide = {name: x.detach().cpu().double() for name, x in tensors.items()}
    d_out, d_lse = (d.cpu().double() for d in upstream)
    return solve(case, wide, (d_out, d_lse), backend="reference")


def kernels(case: Case, device: str, dtype: torch.dtype = torch.float32) -> Tensors:
    return solve(case, case.tensors(dtype), case.upstream(dtype), backend="triton", device=device)


def exact(case: Case, dtype: torch.dtype = torch.float32) -> Tensors:
    """Compute outputs, log-sums and gradients in float64, from inputs rounded to `dtype`."""
    return in_float64(case, case.tensors(dtype), case.upstream(dtype))


def kernels_and_exact(device: str) -> tuple[tuple[str, str, torch.dtype], ...]:
    """Backend, device and dtype of what is tested, and of what it is compared with."""
    return ("triton", device, torch.float32), ("reference", "cpu", torch.float64)


def hessian_products(case: Case, device: str) -> list[Tensors]:
    """Hessian-vector products, through outputs and log-sums, by kernels and in float64."""
    products = []
    for backend, where, dtype in kernels_and_exact(device):
        leaves = {n: x.to(where, dtype).requires_grad_() for n, x in case.tensors().items()}
        out, lse = attend(case, leaves, backend=backend, device=where)
        loss = out.square().sum() + lse[lse.isfinite()].square().sum()
        first = torch.autograd.grad(loss, list(leaves.values()), create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), list(leaves.values()))
        products.append({n: g.detach().cpu() for n, g in zip(leaves, second, strict=True)})
    return products


def plain(case: Case, dtype: torch.dtype) -> Tensors:
    """Dense attention in torch, every step rounded to `dtype`: what low precision must cost.

    Of top_k only the sources are averaged that float64 chooses: a choice has no rounding.
    """
    leaves = {name: x.requires_grad_() for name, x in case.tensors(dtype).items()}
    q, k, v = (leaves.get(name, leaves["query"]) for name in ("query", "key", "value"))
    k, v = (x.repeat_interleave(case.heads // x.shape[-2], dim=-2) for x in (k, v))
    strength, edges = leaves["strength"][:, None, None], _kept(case, dtype)
    q, k, v = (x.transpose(-2, -3) for x in (q, k, v))  # [*, H, tokens, features]
    if case.score == "rbf":
        squared = (q[..., :, None, :] - k[..., None, :, :]).square().sum(-1)
        logit = (-squared / (2 * strength.square())).to(dtype)
    else:
        logit = (q @ k.mT * strength).to(dtype)
    if case.table:
        logit = logit + _dense(leaves["table"].to(dtype), case.graph)
    if case.per_edge:
        source, target = case.graph.edge_index
        bias = leaves["edge_bias"].to(dtype)
        dense = logit.new_zeros(*bias.shape[:-2], *case.graph.to_mask().shape, case.heads)
        dense[..., target, source, :] = bias
        logit = logit + dense.movedim(-1, -3)
    alive = edges.any(-1, keepdim=True)
    logit = logit.masked_fill(~edges & alive, -torch.inf)
    lse = logit.logsumexp(-1, keepdim=True)
    weight = (logit - lse).exp() * alive
    if case.eps:
        weight = weight * (lse.exp() / (lse.exp() + case.eps))
    out = (weight @ v).transpose(-2, -3)
    lse = lse.masked_fill(~alive, -torch.inf)[..., 0].mT
    return differentiated(out, lse, leaves, case.upstream(dtype))


def _kept(case: Case, dtype: torch.dtype) -> Tensor:
    """Bool [*, 1 or H, N, M]: the pairs that count, with top_k those of float64's choice."""
    edges = case.edges[..., None, :, :]
    if case.options.get("top_k") is None:
        return edges
    leaves = {name: x.double() for name, x in case.tensors(dtype).items()}
    strength = leaves["strength"]
    weights = ga.attention_weights(
        leaves["query"],
        leaves.get("key", leaves["query"]),
        case.graph,
        **({"sigma": strength} if case.score == "rbf" else {"scale": strength}),
        top_k=case.options["top_k"],
        edge_bias=leaves.get("edge_bias", leaves.get("table")),
        valid=case.masks,
    )
    source, target = case.graph.edge_index
    kept = edges.new_zeros(*case.batch, case.heads, *edges.shape[-2:])
    kept[..., target, source] = (weights > 0).mT
    return kept


def _dense(table: Tensor, graph: ga.TokenGraph) -> Tensor:
    """[offsets, H] -> [H, N, M], zeros where there is no edge."""
    structure, edges = graph.structure, graph.to_mask()
    assert structure is not None
    i, j = (torch.arange(n) for n in edges.shape)
    row = structure.offset_index(i[:, None], j[None, :]).clamp(0, len(table) - 1)
    return (table[row] * edges[..., None]).movedim(-1, 0)


def guarded(x: Tensor, device: str) -> Tensor:
    """Copy `x` into the middle of a larger tensor that holds NaN everywhere else.

    NaN surrounds tokens, heads and features; a tensor of fewer than four dimensions is one flat
    list of numbers with NaN at both ends.
    """
    if x.dim() < 4:  # read as a flat list of numbers
        flat = torch.full((x.numel() + 64,), torch.nan, dtype=x.dtype, device=device)
        inner = flat[32 : 32 + x.numel()].view(x.shape)
    else:
        B, N, H, D = x.shape
        wide = torch.full((B * N + 64, H + 2, D + 16), torch.nan, dtype=x.dtype, device=device)
        inner = wide[32 : 32 + B * N, 1 : 1 + H, 8 : 8 + D].view(B, N, H, D)
        assert H * D == 0 or not inner.is_contiguous()
    return inner.copy_(x)


def solve_guarded(case: Case, device: str) -> tuple[Tensors, Tensors]:
    """Results by kernels with NaN around every input, d_out and d_lse, and those in float64."""
    tensors, upstream = case.tensors(), case.upstream()
    inside = {n: guarded(x, device).requires_grad_() for n, x in tensors.items()}
    d_out, d_lse = (guarded(d, device) for d in upstream)
    out, lse = attend(case, inside, backend="triton", device=device)
    return differentiated(out, lse, inside, (d_out, d_lse)), in_float64(case, tensors, upstream)


def spoiled(tensors: Tensors, hit: Tensor, bad: float | Tensor) -> Tensors:
    """Tokens that are hit [*, M] hold `bad` in query, key and value; a tensor has a number each."""
    return {
        n: torch.where(hit[..., None, None], torch.as_tensor(bad)[..., None, None], x).to(x.dtype)
        if n in ("query", "key", "value")
        else x
        for n, x in tensors.items()
    }


def error(result: Tensor, expected: Tensor, floor: float = 1e-3) -> float:
    """Relative RMS over finite numbers (infinite ones must agree); `floor`: the least size."""
    result, expected = result.double(), expected.double()
    assert result.shape == expected.shape
    infinite = expected.isinf()
    assert torch.equal(result[infinite], expected[infinite]), "not infinite in the same places"
    result, expected = result[~infinite], expected[~infinite]
    if not expected.numel():
        return 0.0
    size = expected.square().mean().sqrt().clamp(min=floor)
    return float((result - expected).square().mean().sqrt() / size)


def errors(results: Tensors, expected: Tensors, floor: float = 1e-3) -> dict[str, float]:
    """Compute the relative error of every result, by name.

    The gradient of `strength` sums what all tokens give and may cancel to 0: its error is measured
    beside a size of at least 1.
    """
    assert results.keys() == expected.keys()
    return {
        name: error(results[name], expected[name], 1.0 if name == "strength" else floor)
        for name in expected
    }


def check(results: Tensors, expected: Tensors, allowed: float, floor: float = 1e-3) -> None:
    """Every result within `allowed` relative RMS; NaN is not."""
    got = errors(results, expected, floor)
    assert all(e <= allowed for e in got.values()), {n: f"{e:.1e}" for n, e in got.items()}


def half_errors(case: Case, dtype: torch.dtype, device: str) -> Errors:
    """Errors of kernels beside twice those of plain torch operations in `dtype`.

    One rounding in `dtype` is added to every plain error before it is doubled.
    """
    expected = exact(case, dtype)
    rounding = torch.finfo(dtype).eps / 2
    of_plain = errors(plain(case, dtype), expected)
    got = errors(kernels(case, device, dtype), expected)
    return {name: (got[name], 2 * (e + rounding)) for name, e in of_plain.items()}


def check_half(case: Case, dtype: torch.dtype, device: str) -> None:
    """Assert that kernels err at most twice as much as plain torch operations in `dtype`."""
    assert_small(half_errors(case, dtype, device))


def assert_small(measured: Errors) -> None:
    """Assert that every error is allowed; NaN is not."""
    table = {name: f"{error:.1e} <= {allowed:.1e}" for name, (error, allowed) in measured.items()}
    assert all(error <= allowed for error, allowed in measured.values()), table
