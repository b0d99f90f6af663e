"""Consensus by compiled code: the reference's results, and the same bits always.

The sweeps of tests/ops run on it, too; here is what its own ways need: the functions of one number,
layouts, threads, rounds of edges, what is kept for a backward, half precision, and every build.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

import builds
import native_entries
import numpy as np
import pytest
import torch
from scipy import special
from threads import same_on_threads
from torch import Tensor

import graphattn as ga
from graphattn.kernels.cpu import library
from graphattn.ops.consensus.native import sums

if library.why_not() is not None:
    pytest.skip(str(library.why_not()), allow_module_level=True)

CASES = int(os.environ.get("GRAPHATTN_SWEEP", "200"))
NETWORK = ("alpha", "alpha_bias", "beta", "beta_bias", "shear", "shear_bias")
TOKENS = ("target_hidden", "source_hidden", "u", "v")
GRAPHS = {
    "windows": lambda: ga.batch([ga.window_path_graph(n, 3) for n in (40, 2, 23)]),
    "hub": lambda: ga.longformer_graph(61, 2, (0, 30)),
    "neighbors": lambda: ga.knn_graph(torch.rand(70, 2), k=5),
    "loops": lambda: ga.window_path_graph(50, 4, self_loops=True),
}


class Case:
    """A graph, tensors in some layout, and options, all drawn from one seed."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.float64) -> None:
        self.generator, self.dtype = torch.Generator().manual_seed(seed), dtype
        targets = self.draw(1, 2, 17, 40)
        same = self.draw(True, False)
        sources = targets if same else self.draw(1, 3, 33)
        density = self.draw(0.0, 0.1, 0.4, 1.0)
        mask = torch.rand(targets, sources, generator=self.generator) < density
        self.graph = ga.from_mask(mask)
        batch, heads = self.draw(1, 3), self.draw(1, 2, 4)
        groups, trunks = self.draw(1, heads), self.draw(1, 3)
        rank, width, xi = self.draw(1, 3), self.draw(1, 3, 16, 33), self.draw(1, 5, 16, 50)
        self.tensors = {
            "target_hidden": self.tensor(batch, targets, groups, trunks * xi),
            "source_hidden": self.tensor(batch, sources, groups, trunks * xi),
            "u": self.tensor(batch, targets, heads, width),
            "v": self.tensor(batch, sources, heads, width),
            "alpha": self.tensor(heads, xi),
            "alpha_bias": self.tensor(heads),
            "beta": self.tensor(heads, xi),
            "beta_bias": self.tensor(heads),
            "shear": self.tensor(heads, rank, width, xi),
            "shear_bias": self.tensor(heads, rank, width),
        }
        self.options: dict[str, Any] = {"update": "energy" if same else "target"}
        self.options["step_size"] = self.draw(0.1, "auto")
        if self.draw(True, False):
            self.options["valid"] = (
                torch.rand(batch, targets, generator=self.generator) < 0.7,
                torch.rand(batch, sources, generator=self.generator) < 0.7,
            )

    def draw(self, *options: Any) -> Any:
        return options[int(torch.randint(len(options), (), generator=self.generator))]

    def tensor(self, *shape: int) -> Tensor:
        """Normal numbers, now and then not side by side."""
        x = torch.randn(shape, generator=self.generator, dtype=torch.float64).to(self.dtype)
        layout = self.draw("plain", "features first", "with room", "negated")
        if layout == "features first" and x.dim() > 1:
            return x.movedim(-1, 0).contiguous().movedim(0, -1)
        if layout == "with room":
            return torch.stack([x, x + 1], dim=-1)[..., 0]
        return torch.imag(torch.complex(x, -x).conj()) if layout == "negated" else x

    def run(self, backend: str, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """The new state and all gradients."""
        x = {
            n: t.detach().to(dtype or self.dtype).requires_grad_() for n, t in self.tensors.items()
        }
        new = step(backend, self.graph, x, **self.options)
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(new.shape, generator=generator, dtype=torch.float64).to(new.dtype)
        gradients = torch.autograd.grad(new, list(x.values()), weight)
        return {"new": new.detach(), **dict(zip(x, gradients, strict=True))}


def step(backend: str, graph: ga.TokenGraph, x: dict[str, Tensor], **options: Any) -> Tensor:
    network = ga.EdgeNetworkParameters(*(x[name] for name in NETWORK))
    hidden = x["target_hidden"], x["source_hidden"]
    options = {"step_size": 0.1, **options}
    return ga.consensus_update(x["u"], x["v"], *hidden, network, graph, backend=backend, **options)


def tensors_of(
    graph: ga.TokenGraph, batch: int = 2, dtype: torch.dtype = torch.float32, **sizes: int
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    N, H, D, xi = graph.num_targets, sizes.get("heads", 2), sizes.get("width", 20), 24
    shapes = {"target_hidden": (batch, N, H, xi), "source_hidden": (batch, N, H, xi)}
    shapes |= {"u": (batch, N, H, D), "v": (batch, N, H, D)}
    shapes |= {"alpha": (H, xi), "alpha_bias": (H,), "beta": (H, xi), "beta_bias": (H,)}
    shapes |= {"shear": (H, 2, D, xi), "shear_bias": (H, 2, D)}
    return {name: torch.randn(*s, generator=generator).to(dtype) for name, s in shapes.items()}


def both_passes(graph: ga.TokenGraph, x: dict[str, Tensor], **options: Any) -> dict[str, Tensor]:
    """Compute the new state, and the gradients of everything, by compiled code."""
    leaves = {name: t.clone().requires_grad_() for name, t in x.items()}
    new = step("native", graph, leaves, **options)
    gradients = torch.autograd.grad(new.square().sum(), list(leaves.values()))
    return {"new": new.detach(), **dict(zip(leaves, gradients, strict=True))}


# Functions of one number.


@pytest.mark.every_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_activations_are_as_exact_as_one_rounding_near_one(native: ctypes.CDLL, dtype):
    """Against scipy, in float64 or as near to it as that can tell."""
    torch.manual_seed(0)
    x = torch.cat([4 * torch.randn(20_000, dtype=dtype), torch.linspace(-9, 9, 5001, dtype=dtype)])
    results = native_entries.activations(x, native).double().numpy()
    z = x.double().numpy()
    distribution, density = special.ndtr(z), np.exp(-(z**2) / 2) / np.sqrt(2 * np.pi)
    expected = (z * distribution, distribution + z * density, np.logaddexp(0, z), special.expit(z))
    unit = torch.finfo(dtype).eps
    for mine, exact in zip(results, expected, strict=True):
        assert (np.abs(mine - exact) / (1 + np.abs(z))).max() < unit
    small = np.abs(z) < 20  # softplus is as exact where it is small
    assert (np.abs(results[2] - expected[2]) / expected[2])[small].max() < 4 * unit


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_activations_of_what_is_not_a_usual_number_are_those_of_torch(native: ctypes.CDLL, dtype):
    x = torch.tensor([0, -0.0, 1e-30, -1e30, 1e30, 25, -200, torch.nan], dtype=dtype)
    results = native_entries.activations(x, native)
    leaf = x.clone().requires_grad_()
    for k, function in enumerate((torch.nn.functional.gelu, torch.nn.functional.softplus)):
        y = function(leaf)
        (slope,) = torch.autograd.grad(y.sum(), leaf)
        torch.testing.assert_close(results[2 * k], y.detach(), equal_nan=True)
        torch.testing.assert_close(results[2 * k + 1], slope, equal_nan=True)


# The reference's results.


@pytest.mark.long
def test_values_and_gradients_are_those_of_the_reference() -> None:
    for seed in range(CASES):
        case = Case(seed)
        mine, theirs = case.run("native"), case.run("reference")
        for name, value in theirs.items():
            message = f"seed {seed}, {name}"
            torch.testing.assert_close(mine[name], value, rtol=1e-9, atol=1e-10, msg=message)


@pytest.mark.long
@pytest.mark.parametrize("build", ["base", "v3", "v4"])
def test_every_build_gives_what_the_reference_gives(build: str) -> None:
    builds.run_with(
        build,
        """
import torch
from test_native_consensus import Case
for seed in range(60):
    case = Case(seed)
    mine, theirs = case.run("native"), case.run("reference")
    for name, value in theirs.items():
        torch.testing.assert_close(mine[name], value, rtol=1e-9, atol=1e-10)
""",
    )


def test_float32_is_as_exact_as_products_of_torch() -> None:
    """Compiled code in float32 is about as exact as products of torch are.

    Errors of values and of every gradient, relative to float64, are summed over all cases; those of
    compiled code may be 1.3 times as large.
    """
    total: dict[str, list[float]] = {}
    for seed in range(40):
        case = Case(seed, torch.float32)
        exact = case.run("reference", torch.float64)
        mine, theirs = case.run("native"), case.run("structured")
        for name, value in exact.items():
            scale = value.norm() + 1  # some are 0 but for rounding
            errors = [((x[name].double() - value).norm() / scale).item() for x in (mine, theirs)]
            total[name] = [a + b for a, b in zip(total.get(name, [0, 0]), errors, strict=True)]
    for name, (mine, theirs) in total.items():
        assert mine <= 1.3 * theirs + 1e-6, name


# The same bits.


@pytest.mark.parametrize("kind", GRAPHS)
@pytest.mark.parametrize("update", ["energy", "target"])
def test_results_do_not_depend_on_the_number_of_threads(kind: str, update: str) -> None:
    graph = GRAPHS[kind]()
    x = tensors_of(graph, batch=30)
    same_on_threads(lambda: both_passes(graph, x, update=update, step_size="auto"))


@pytest.mark.parametrize("kind", GRAPHS)
def test_a_sample_has_the_bits_that_it_has_alone(kind: str) -> None:
    graph = GRAPHS[kind]()
    x = tensors_of(graph, batch=5)
    together = both_passes(graph, x, step_size="auto")
    alone = both_passes(
        graph, {name: t[3:4] if name in TOKENS else t for name, t in x.items()}, step_size="auto"
    )
    for name in ("new", *TOKENS):
        assert torch.equal(together[name][3:4], alone[name]), name


@pytest.mark.parametrize("kind", GRAPHS)
def test_rounds_of_edges_change_no_bit_of_tokens(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    graph = GRAPHS[kind]()
    x = tensors_of(graph)
    whole = both_passes(graph, x, step_size="auto")
    for edges in (1, 31, 160):
        monkeypatch.setattr(sums, "EDGES_OF_ROUND", edges)
        results = both_passes(graph, x, step_size="auto")
        for name in ("new", *TOKENS):
            assert torch.equal(whole[name], results[name]), name
        for name in NETWORK:  # sums over all edges, which rounds put together in another order
            torch.testing.assert_close(whole[name], results[name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", GRAPHS)
def test_what_is_kept_of_few_edges_gives_what_they_give_computed_again(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    graph = GRAPHS[kind]()
    x = tensors_of(graph, batch=1)
    network = [x[name] for name in NETWORK]
    call = sums.SumsCall(graph, [x[name] for name in TOKENS] + network, (None, None), energy=True)
    assert call.new_storage() is not None
    kept = both_passes(graph, x)
    monkeypatch.setattr(sums, "MOST_STORED", 0)
    assert call.new_storage() is None
    again = both_passes(graph, x)
    assert all(torch.equal(value, again[name]) for name, value in kept.items())


@pytest.mark.every_case
@pytest.mark.parametrize(("targets", "sources"), [(120, 120), (300, 7), (5, 400)])
def test_edges_of_a_large_complete_graph_are_never_listed(targets: int, sources: int) -> None:
    case, same = Case(0), targets == sources
    whole = ga.bipartite_complete_graph(targets + 3, sources + 2)
    # As a block of a ring, whose structure is that of a part.
    case.graph = ga.complete_graph(targets) if same else whole.targets(3, targets + 3)[0]
    sizes = case.graph.num_targets, case.graph.num_sources
    case.options = {"update": "energy" if same else "target", "step_size": "auto"}
    generator = torch.Generator().manual_seed(0)
    case.options["valid"] = tuple(torch.rand(2, n, generator=generator) < 0.7 for n in sizes)
    ends = dict(zip(TOKENS, sizes * 2, strict=True))
    shapes = {"u": (4, 8), "v": (4, 8), "target_hidden": (4, 5), "source_hidden": (4, 5)}
    for name, shape in shapes.items():
        case.tensors[name] = case.tensor(2, ends[name], *shape)
    for name, shape in {"alpha": (4, 5), "shear": (4, 2, 8, 5)}.items():
        case.tensors[name], case.tensors[f"{name}_bias"] = (
            case.tensor(*shape),
            case.tensor(*shape[:-1]),
        )
    case.tensors["beta"], case.tensors["beta_bias"] = case.tensor(4, 5), case.tensor(4)
    mine = case.run("native")
    same_on_threads(lambda: case.run("native"))
    assert case.graph._edge_index is None
    for name, value in case.run("reference").items():
        torch.testing.assert_close(mine[name], value, rtol=1e-9, atol=1e-10, msg=name)


def test_one_forward_serves_two_backwards() -> None:
    graph = ga.window_path_graph(20, 2)
    x = {name: t.requires_grad_() for name, t in tensors_of(graph).items()}
    new = step("native", graph, x)
    first = torch.autograd.grad(new.sum(), list(x.values()), retain_graph=True)
    second = torch.autograd.grad(new.sum(), list(x.values()))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# What else is asked of it.


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_are_read_as_the_floats_that_they_are(dtype: torch.dtype) -> None:
    """Tensors of half precision give what the same numbers give as floats, rounded once.

    Without gradients they are read where they lie; the network's numbers are given as floats.
    """
    graph = GRAPHS["windows"]()
    x = tensors_of(graph, width=37)
    halves = {name: t.to(dtype) if name in TOKENS else t for name, t in x.items()}
    with torch.no_grad():
        results = step("native", graph, halves, step_size="auto")
        expected = step(
            "native", graph, {n: t.float() for n, t in halves.items()}, step_size="auto"
        )
    assert torch.equal(results, expected.to(dtype))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_padding_is_never_read(bad: float) -> None:
    graph = GRAPHS["loops"]()
    x = tensors_of(graph)
    valid = torch.arange(50) % 4 != 1
    clean = both_passes(graph, {n: padded(t, n, valid, 0.0) for n, t in x.items()}, valid=valid)
    dirty = {n: padded(t, n, valid, bad) for n, t in x.items() if n != "u"} | {"u": x["u"]}
    dirty["u"] = padded(x["u"], "u", valid, 7.0)  # an invalid target keeps its state
    results = both_passes(graph, dirty, valid=valid)
    for name in ("target_hidden", "source_hidden", "v", *NETWORK):
        assert torch.equal(clean[name], results[name]), name
    assert torch.equal(clean["new"][:, valid], results["new"][:, valid])


def padded(x: Tensor, name: str, valid: Tensor, bad: float) -> Tensor:
    return x.masked_fill(~valid[:, None, None], bad) if name in TOKENS else x


def test_gradients_of_some_inputs_alone_are_those_among_all() -> None:
    graph = GRAPHS["hub"]()
    x = tensors_of(graph)
    everything = both_passes(graph, x, step_size="auto")
    for wanted in (("u",), ("v",), ("source_hidden",), ("shear",), ("alpha_bias", "u")):
        leaves = {name: t.clone().requires_grad_(name in wanted) for name, t in x.items()}
        step("native", graph, leaves, step_size="auto").square().sum().backward()
        for name, leaf in leaves.items():
            if name in wanted:
                torch.testing.assert_close(leaf.grad, everything[name])
            else:
                assert leaf.grad is None


def test_what_it_cannot_do_is_refused_by_name() -> None:
    graph = ga.window_path_graph(6, 1)
    x = tensors_of(graph, batch=1)
    with pytest.raises(ValueError, match="cannot run inside"):
        torch.func.vmap(lambda u: step("native", graph, {**x, "u": u[None]}))(x["u"])
    there = ga.backends("consensus_update", graph, x["u"].to("meta"))
    assert there["native"] == "it runs on CPUs, not on meta"


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("gradients", [False, True])
def test_a_trace_holds_the_operator_and_not_its_result(gradients: bool) -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mixer = ga.nn.SelfConsensus(8, 2, edge_hidden=4)

        def forward(self, x: Tensor) -> Tensor:
            return self.mixer(x, ga.window_path_graph(9, 2))

    layer, x, other = Layer(), torch.randn(9, 8), torch.randn(9, 8)
    with torch.set_grad_enabled(gradients):
        traced = torch.jit.trace(layer, (x,), check_trace=False)
        torch.testing.assert_close(traced(other), layer(other))
