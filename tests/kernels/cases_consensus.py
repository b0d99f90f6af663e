"""One consensus step as a problem, and what each way to solve it gives: new states, gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from cases_edges import EVERY, hubs, nearest, only, some
from cases_kernels import Errors, Tensors, assert_small, coins, random
from torch import Tensor

import graphattn as ga
from graphattn.ops.consensus import reference

BACKEND = "triton"
NETWORK = ga.EdgeNetworkParameters._fields
WEIGHT_OF = {"alpha_bias": "alpha", "beta_bias": "beta", "shear_bias": "shear"}
HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Case:
    """One consensus problem: a graph, an update rule, sizes, a step and masks.

    By default every token is compared with its neighbours' own states.
    """

    graph: ga.TokenGraph
    update: str = "energy"
    batch: tuple[int, ...] = (1,)
    heads: int = 2
    features: int = 5
    rank: int = 2
    xi: int = 7
    one_network: bool = False  # for all heads
    other_states: bool = False  # `neighbor_state` is a tensor of its own; on rectangles always
    rotated: str = ""  # a disagreement of its own: of "one tensor" or "two tensors"
    step: float | str | tuple[int, ...] = 0.1  # a shape: a tensor, which gets a gradient
    valid: str = ""  # "both", "targets", "sources"
    seed: int = 0

    @property
    def square(self) -> bool:
        return self.graph.num_targets == self.graph.num_sources

    def tensors(self, dtype: torch.dtype = torch.float32) -> Tensors:
        """Everything that gets a gradient, in `dtype`; a step size in float32."""
        N, M, s = self.graph.num_targets, self.graph.num_sources, 20 * self.seed
        H, D, r, xi = self.heads, self.features, self.rank, self.xi
        G = 1 if self.one_network else H
        tensors = {"state": random(*self.batch, N, H, D, seed=s)}
        if self.other_states or not self.square:
            tensors["neighbor_state"] = random(*self.batch, M, H, D, seed=s + 1)
        if self.rotated:
            tensors["u"] = random(*self.batch, N, H, D, seed=s + 2)
        if self.rotated == "two tensors":
            tensors["v"] = random(*self.batch, M, H, D, seed=s + 3)
        tensors["target_hidden"] = random(*self.batch, N, G, xi, seed=s + 4)
        tensors["source_hidden"] = random(*self.batch, M, G, xi, seed=s + 5)
        shapes = ((H, xi), (H,), (H, xi), (H,), (H, r, D, xi), (H, r, D))
        for place, (name, shape) in enumerate(zip(NETWORK, shapes, strict=True)):
            tensors[name] = random(*shape, seed=s + 6 + place)
            if name not in WEIGHT_OF:
                tensors[name] /= xi**0.5
        tensors = {name: x.to(dtype) for name, x in tensors.items()}
        if isinstance(self.step, tuple):
            tensors["step_size"] = 0.1 * random(*self.step, seed=s + 12).float()
        return tensors

    def upstream(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The gradient of the new states, as numbers that come in."""
        shape = (*self.batch, self.graph.num_targets, self.heads, self.features)
        return random(*shape, seed=20 * self.seed + 13).to(dtype)

    @property
    def masks(self) -> tuple[Tensor | None, Tensor | None]:
        """Masks of the valid targets and of the valid sources; None where all are valid."""
        of_targets = coins(*self.batch, self.graph.num_targets, seed=self.seed + 7)
        if self.valid == "both" and self.square:
            return of_targets, of_targets
        of_sources = coins(*self.batch, self.graph.num_sources, seed=self.seed + 8)
        return (
            of_targets if self.valid in ("both", "targets") else None,
            of_sources if self.valid in ("both", "sources") else None,
        )


def move(
    case: Case, tensors: Tensors, *, backend: str = BACKEND, device: str = "cpu", **options: Any
) -> Tensor:
    """The new states; `options` in place of the case's own."""
    state = tensors["state"]
    step = case.step if isinstance(case.step, float | str) else tensors["step_size"]
    if "u" in tensors:
        options["disagreement"] = tensors["u"], tensors.get("v", tensors["u"])
    if case.valid:
        one, other = (None if m is None else m.to(device) for m in case.masks)
        pair = (one, one) if case.masks[0] is case.masks[1] else (one, other)
        options.setdefault("valid", pair)
    return ga.consensus_update(
        state,
        tensors.get("neighbor_state", state),
        tensors["target_hidden"],
        tensors["source_hidden"],
        ga.EdgeNetworkParameters(*(tensors[name] for name in NETWORK)),
        case.graph.to(device),
        options.pop("step_size", step),
        update=case.update,
        backend=backend,
        **options,
    )


def differentiated(new: Tensor, leaves: Tensors, d_new: Tensor) -> Tensors:
    """The new states, and the gradients of all tensors under their names, on the CPU."""
    gradients = torch.autograd.grad(
        new, list(leaves.values()), d_new.to(new.device, new.dtype), materialize_grads=True
    )
    results = {"new": new, **dict(zip(leaves, gradients, strict=True))}
    return {name: x.detach().cpu() for name, x in results.items()}


def solve(
    case: Case, tensors: Tensors, d_new: Tensor, *, backend: str = BACKEND, device: str = "cpu"
) -> Tensors:
    leaves = {name: x.detach().to(device).requires_grad_() for name, x in tensors.items()}
    return differentiated(move(case, leaves, backend=backend, device=device), leaves, d_new)


def kernels(case: Case, device: str, dtype: torch.dtype = torch.float32) -> Tensors:
    return solve(case, case.tensors(dtype), case.upstream(dtype), device=device)


def in_float64(case: Case, tensors: Tensors, d_new: Tensor) -> Tensors:
    """The reference backend on the same numbers, in float64 on the CPU."""
    wide = {name: x.detach().cpu().double() for name, x in tensors.items()}
    return solve(case, wide, d_new.cpu().double(), backend="reference")


def exact(case: Case, dtype: torch.dtype = torch.float32) -> Tensors:
    """Compute new states and gradients in float64, from inputs that were rounded to `dtype`."""
    return in_float64(case, case.tensors(dtype), case.upstream(dtype))


def plain(case: Case, dtype: torch.dtype) -> Tensors:
    """Message passing in torch, every step rounded to `dtype`: what low precision must cost."""
    leaves = {name: x.requires_grad_() for name, x in case.tensors(dtype).items()}
    state = leaves["state"]
    compared = leaves.get("u", state), leaves.get("neighbor_state", state)
    if "u" in leaves:
        compared = leaves["u"], leaves.get("v", leaves["u"])
    step: Tensor | None = None
    if case.step != "auto":
        step = leaves.get("step_size", torch.as_tensor(case.step)).to(dtype)
        if case.masks[0] is not None:
            step = torch.where(case.masks[0][..., None], step, 0)
    new = reference.consensus_update(
        state,
        leaves["target_hidden"],
        leaves["source_hidden"],
        ga.EdgeNetworkParameters(*(leaves[name] for name in NETWORK)),
        case.graph,
        step,
        update=case.update,
        disagreement=compared,
        valid=case.masks,
    )
    return differentiated(new, leaves, case.upstream(dtype))


def _size(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt()) if x.numel() else 0.0


def errors(
    results: Tensors, expected: Tensors, case: Case, floor: float = 1e-3
) -> dict[str, float]:
    """Relative RMS of every result; `floor`: the least size.

    Biases and step sizes gather what many edges or tokens give, and may cancel to nearly 0: a bias
    is measured beside its weight, a step size beside what it would be without cancelling.
    """
    assert results.keys() == expected.keys()
    result = {}
    for name, theirs in expected.items():
        assert results[name].shape == theirs.shape, name
        size = max(_size(theirs), _size(expected.get(WEIGHT_OF.get(name, ""), theirs)), floor)
        if name == "step_size":
            size = max(size, _uncancelled(case, expected))
        result[name] = _size(results[name].double() - theirs.double()) / size
    return result


def _uncancelled(case: Case, expected: Tensors) -> float:
    """Root mean square of the gradient of a step size, were its terms of random signs."""
    step = case.tensors()["step_size"].double()
    full = step.expand(*case.batch, case.graph.num_targets, case.heads)
    moved = expected["new"].double() - case.tensors()["state"].double()
    terms = (moved * case.upstream().double()).sum(-1) / full
    return float(terms.square().sum_to_size(step.shape).mean().sqrt()) if step.numel() else 0.0


def check(results: Tensors, expected: Tensors, case: Case, allowed: float) -> None:
    """Every result within `allowed` relative RMS; NaN is not.

    The gradients that come in are about 1. Some that go out cancel to 0 (one edge a row under
    "auto" is an average of one, whatever its weight): rounding is measured beside 0.1.
    """
    got = errors(results, expected, case, floor=0.1)
    assert all(e <= allowed for e in got.values()), {n: f"{e:.1e}" for n, e in got.items()}


def half_errors(case: Case, dtype: torch.dtype, device: str) -> Errors:
    """Errors of kernels beside twice those of plain torch operations in `dtype`.

    One rounding in `dtype` is added to every plain error before it is doubled.

    Some tensors are few numbers, of which the plain error may be small by chance: those of the
    network share one allowance, and so do the two hidden vectors.
    """
    expected = exact(case, dtype)
    rounding = torch.finfo(dtype).eps / 2
    of_plain = errors(plain(case, dtype), expected, case, floor=0.03)
    got = errors(kernels(case, device, dtype), expected, case, floor=0.03)
    for group in (NETWORK, ("target_hidden", "source_hidden")):
        of_plain |= dict.fromkeys(group, max(of_plain[name] for name in group))
    return {name: (got[name], 2 * (e + rounding)) for name, e in of_plain.items()}


def check_half(case: Case, dtype: torch.dtype, device: str) -> None:
    """Assert that kernels err at most twice as much as plain torch operations in `dtype`."""
    assert_small(half_errors(case, dtype, device))


def one_way(targets: int, sources: int, share: float = 0.2) -> ga.TokenGraph:
    """Random edges with self-loops; token 3 sees nobody, 5 is seen by nobody, 7 is alone."""
    mask = coins(targets, sources, seed=3, share=share)
    mask[3] = mask[:, 5] = mask[7] = mask[:, 7] = False
    mask[2, 2] = True
    return ga.from_mask(mask)


def batch_of(*lengths: int, build: Any = ga.window_path_graph, **options: Any) -> ga.TokenGraph:
    return ga.batch([build(n, **options) for n in lengths])


CASES = {
    "path": Case(ga.window_path_graph(20, 2)),
    "path, target": Case(ga.window_path_graph(20, 2), "target"),
    "path with self loops": Case(ga.window_path_graph(18, 3, self_loops=True)),
    "path with self loops, target": Case(
        ga.window_path_graph(18, 3, self_loops=True), "target", step="auto"
    ),
    "path shorter than its window": Case(ga.window_path_graph(7, 20), step="auto"),
    "wide window": Case(ga.window_path_graph(20, 17), heads=1, rank=1, xi=3, step="auto"),
    "causal window": Case(ga.causal_window_graph(20, 4), "target"),
    "causal": Case(ga.causal_graph(9), "target", heads=1, step="auto"),
    "dilated": Case(ga.dilated_window_graph(24, 2, 3), step="auto"),
    "dilated, target": Case(ga.dilated_window_graph(24, 2, 3, self_loops=False), "target"),
    "blocks": Case(ga.block_window_graph(19, 6, shift=2)),
    "complete": Case(ga.complete_graph(9), heads=1, step="auto"),
    "complete, target": Case(ga.complete_graph(9, self_loops=False), "target", heads=1),
    "cycle": Case(ga.window_cycle_graph(17, 3)),
    "windows side by side": Case(batch_of(17, 1, 6, window=2), step="auto"),
    "windows side by side, target": Case(batch_of(17, 1, 6, window=2), "target", step=(24, 1)),
    "causal windows side by side": Case(
        batch_of(9, 2, 16, build=ga.causal_window_graph, window=4), "target", step="auto"
    ),
    "many kinds side by side": Case(
        ga.batch([
            ga.window_path_graph(9, 2),
            some(12, 12),
            ga.complete_graph(1),
            ga.window_cycle_graph(6, 1),
        ]),
        step="auto",
    ),
    "list": Case(some(20, 20)),
    "list, target": Case(some(20, 20), "target", step="auto"),
    "list of many edges": Case(some(16, 16, share=0.9), heads=1, step="auto"),
    "tokens without edges": Case(one_way(20, 20), step="auto"),
    "tokens without edges, target": Case(one_way(20, 20), "target", step="auto"),
    "hubs": Case(hubs(), heads=1, xi=4, step="auto"),
    "hubs, target": Case(hubs(), "target", heads=1, xi=4),
    "neighbours": Case(nearest(20, 4)),
    "neighbours, target": Case(nearest(20, 4, self_loops=True), "target", step="auto"),
    "fewer neighbours than k": Case(
        nearest(20, 6, within=ga.causal_window_graph(20, 5)), "target"
    ),
    "neighbours of other tokens": Case(nearest(20, 4, source=random(9, 3, seed=2)), "target"),
    "grid with a class token": Case(ga.grid_window_graph(4, 5, 1, class_token=True)),
    "longformer": Case(ga.longformer_graph(20, 2, [0, 11]), heads=1),
    "union": Case(ga.union(ga.window_path_graph(20, 2), some(20, 20)), heads=1),
    "more sources": Case(some(9, 22), "target", step="auto"),
    "more targets": Case(some(22, 9), "target"),
    "rectangle": Case(ga.bipartite_complete_graph(5, 11), "target", step="auto"),
    "another track": Case(ga.bipartite_window_graph(20, 2), "target", other_states=True),
    "all edges on one target": Case(only(20, 20, (5, EVERY)), "target", heads=1),
    "all edges from one source": Case(only(20, 20, (EVERY, 5)), heads=1, step="auto"),
    "one edge": Case(only(18, 18, (0, 17)), step="auto"),
    "one token": Case(ga.window_path_graph(1, 1, self_loops=True), "target", step="auto"),
    "other states": Case(ga.window_path_graph(20, 2), other_states=True),
    "other states of a list": Case(some(20, 20), other_states=True, step="auto"),
    "rotated": Case(ga.window_path_graph(20, 2), rotated="one tensor"),
    "rotated, target": Case(ga.causal_window_graph(20, 3), "target", rotated="two tensors"),
    "rotated list": Case(some(20, 20), rotated="two tensors"),
    "rotated rectangle": Case(some(9, 22), "target", rotated="two tensors"),
    "padding": Case(ga.window_path_graph(20, 2), batch=(2,), valid="both", step="auto"),
    "padding, target": Case(
        ga.causal_window_graph(20, 4), "target", batch=(2,), valid="both", step="auto"
    ),
    "padding of windows side by side": Case(batch_of(17, 6, window=2), valid="both", step="auto"),
    "padding of a list": Case(some(20, 20), batch=(2,), valid="both", step=(2, 20, 1)),
    "masked targets": Case(some(22, 9), "target", valid="targets", step="auto"),
    "masked sources": Case(ga.window_path_graph(20, 2), valid="sources"),
    "both masked, differently": Case(some(9, 22), "target", batch=(2,), valid="both"),
    "one network for all heads": Case(ga.window_path_graph(20, 2), heads=3, one_network=True),
    "one network, list": Case(
        some(20, 20), "target", heads=3, one_network=True, step="auto", valid="both"
    ),
}  # fmt: skip
