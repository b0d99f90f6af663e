"""DistanceBias and EdgeProjection: what edges hold, as one number per head."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

import graphattn as ga

TIGHT = {"rtol": 1e-10, "atol": 1e-12}
LAYERS = {
    "dot": lambda: ga.nn.DotProductAttention(8, 2),
    "krause": lambda: ga.nn.KrauseAttention(8, 2, top_k=3),
    "gka": lambda: ga.nn.GaussianKernelAttention(8, 2, rope=True),
}


def places(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 4 * torch.randn(*shape, 3, generator=generator, dtype=torch.float64)


def by_loops(weight: Tensor, x: Tensor, y: Tensor, graph: ga.TokenGraph, cutoff: float) -> Tensor:
    """[E, H] by the formula: Gaussians of the distance times the cosine cutoff."""
    heads, radial = weight.shape
    spacing = cutoff / (radial - 1)
    values = torch.zeros(graph.num_edges, heads, dtype=torch.float64)
    for e, (j, i) in enumerate(graph.edge_index.T.tolist()):
        d = math.dist(x[i].tolist(), y[j].tolist())
        if d >= cutoff:
            continue
        fade = (1 + math.cos(math.pi * d / cutoff)) / 2
        for h in range(heads):
            values[e, h] = fade * math.fsum(
                float(weight[h, k]) * math.exp(-((d - k * spacing) ** 2) / (2 * spacing**2))
                for k in range(radial)
            )
    return values


def test_it_is_a_sum_of_gaussians_of_the_distance() -> None:
    module = ga.nn.DistanceBias(3, num_radial=7, cutoff=9.0).double()
    graph, x = ga.complete_graph(10), places(10)
    expected = by_loops(module.projection.weight, x, x, graph, 9.0)
    assert (expected == 0).any()  # beyond the cutoff
    torch.testing.assert_close(module(x, graph), expected, **TIGHT)
    several = torch.stack([x, places(10, seed=1)])
    torch.testing.assert_close(module(several, graph)[0], expected, **TIGHT)
    torch.testing.assert_close(module(several, graph)[1], module(several[1], graph), **TIGHT)


def test_two_tracks_have_two_sets_of_places() -> None:
    module = ga.nn.DistanceBias(3, num_radial=7, cutoff=9.0).double()
    graph, x, y = ga.bipartite_complete_graph(4, 6), places(4), places(6, seed=1)
    expected = by_loops(module.projection.weight, x, y, graph, 9.0)
    torch.testing.assert_close(module((x, y), graph), expected, **TIGHT)


def test_turning_and_moving_a_structure_changes_nothing() -> None:
    module, graph, x = ga.nn.DistanceBias(3).double(), ga.complete_graph(10), places(10)
    turn, _ = torch.linalg.qr(places(3, seed=2))
    torch.testing.assert_close(module(x @ turn + 7, graph), module(x, graph), **TIGHT)


@pytest.mark.parametrize("order", [1, 2])
def test_gradients_in_the_places_are_those_of_differences(order: int) -> None:
    module = ga.nn.DistanceBias(2, num_radial=5, cutoff=12.0).double()
    graph, x = ga.complete_graph(4, self_loops=False), places(4).requires_grad_()
    check = torch.autograd.gradcheck if order == 1 else torch.autograd.gradgradcheck
    assert check(lambda x, w: torch.func.functional_call(
        module, {"projection.weight": w}, (x, graph)), (x, module.projection.weight))  # fmt: skip


def test_tokens_in_one_place_and_self_loops_have_gradient_0_and_not_nan() -> None:
    module, graph = ga.nn.DistanceBias(2, num_radial=5).double(), ga.complete_graph(3)
    x = torch.zeros(3, 3, dtype=torch.float64, requires_grad=True)
    bias = module(x, graph)
    at_0 = by_loops(module.projection.weight, x, x, graph, 20.0)
    torch.testing.assert_close(bias, at_0, **TIGHT)
    (gradient,) = torch.autograd.grad(bias.sum(), x, create_graph=True)
    assert (gradient == 0).all()
    (second,) = torch.autograd.grad(gradient.sum(), x)
    assert second.isfinite().all()


def test_at_the_cutoff_it_fades_out_with_its_slope() -> None:
    module = ga.nn.DistanceBias(2, cutoff=6.0).double()
    graph = ga.from_edge_index(torch.tensor([[1], [0]]), 2)
    for distance, limit in [(6.0, 0.0), (6.5, 0.0), (1e200, 0.0), (5.9999, 1e-6)]:
        x = torch.tensor([[0.0, 0, 0], [distance, 0, 0]], dtype=torch.float64, requires_grad=True)
        bias = module(x, graph)
        (slope,) = torch.autograd.grad(bias.sum(), x)
        assert bias.abs().max() <= limit
        assert slope.abs().max() <= 1e3 * limit + 1e-15


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_an_atom_that_was_not_resolved_has_bias_0_and_spoils_nothing(bad: float) -> None:
    module, graph, x = ga.nn.DistanceBias(2).double(), ga.complete_graph(5), places(2, 5)
    spoilt = x.clone()
    spoilt[1, 3, 1] = bad
    spoilt.requires_grad_()
    bias = module(spoilt, graph)
    touches = (graph.edge_index == 3).any(0)
    assert (bias[1, touches] == 0).all()
    torch.testing.assert_close(bias[1, ~touches], module(x, graph)[1, ~touches], **TIGHT)
    torch.testing.assert_close(bias[0], module(x, graph)[0], **TIGHT)
    of_places, of_weight = torch.autograd.grad(bias.sum(), (spoilt, module.projection.weight))
    assert of_places.isfinite().all()
    assert of_weight.isfinite().all()
    assert (of_places[1, 3] == 0).all()


@pytest.mark.parametrize("backend", ["structured", "reference"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_sees_the_structure_of_every_sample(name: str, backend: str) -> None:
    torch.manual_seed(0)
    layer, module = LAYERS[name](), ga.nn.DistanceBias(2, cutoff=12.0)
    graph, x = ga.complete_graph(9), torch.randn(2, 9, 8)
    shape = places(2, 9).float().requires_grad_()
    with ga.use_backend(backend):
        out = layer(x, graph, edge_bias=module(shape, graph))
        for b in range(2):
            alone = layer(x[b], graph, edge_bias=module(shape[b], graph))
            torch.testing.assert_close(out[b], alone, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(out, layer(x, graph), atol=1e-3)
    gradients = torch.autograd.grad(out.square().sum(), (module.projection.weight, shape))
    assert all(g.isfinite().all() and g.abs().sum() > 0 for g in gradients)


def test_autocast_measures_in_full_precision() -> None:
    module, graph, x = ga.nn.DistanceBias(2), ga.complete_graph(9), 100 + places(9).float()
    expected = module.radial_basis(x, graph)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(module.radial_basis(x, graph), expected)
        torch.testing.assert_close(module(x, graph).float(), module(x, graph).float())
    half = copy.deepcopy(module).bfloat16()
    assert half(x, graph).dtype == torch.bfloat16


def test_as_many_edges_as_offsets_do_not_confuse_a_layer() -> None:
    graph, x = ga.causal_window_graph(4, 10), places(4).float()  # 10 edges, 10 offsets
    module, tokens, layer = ga.nn.DistanceBias(2), torch.randn(4, 8), LAYERS["dot"]()
    plain = ga.from_edge_index(graph.edge_index, 4)
    torch.testing.assert_close(
        layer(tokens, graph, edge_bias=module(x, graph)),
        layer(tokens, plain, edge_bias=module(x, plain)),
    )


# Any features.


@pytest.mark.parametrize("batch", [(), (2, 3)], ids=str)
def test_a_projection_is_a_linear_map_of_every_edge(batch: tuple[int, ...]) -> None:
    module, features = ga.nn.EdgeProjection(5, 3), torch.randn(*batch, 7, 5)
    weight, bias = module.projection.weight, module.projection.bias
    expected = torch.einsum("...f,hf->...h", features, weight) + bias
    torch.testing.assert_close(module(features), expected)
    assert ga.nn.EdgeProjection(5, 3, bias=False).projection.bias is None


@pytest.mark.parametrize("name", LAYERS)
def test_from_zero_a_layer_starts_unbiased_and_learns(name: str) -> None:
    torch.manual_seed(0)
    layer, graph, x = LAYERS[name](), ga.window_path_graph(9, 3), torch.randn(2, 9, 8)
    features = torch.randn(2, graph.num_edges, 4)
    module = ga.nn.EdgeProjection(4, 2, zero_init=True)
    out = layer(x, graph, edge_bias=module(features))
    torch.testing.assert_close(out, layer(x, graph))
    out.square().sum().backward()
    assert module.projection.weight.grad.abs().sum() > 0
    far = ga.nn.DistanceBias(2, zero_init=True)
    assert (far(places(9).float(), graph) == 0).all()


def test_nan_in_features_of_padding_reaches_no_gradient() -> None:
    """0 * NaN is NaN: the gradient of the map must not see features of edges that do not count."""
    torch.manual_seed(0)
    layer, graph, x = LAYERS["dot"](), ga.complete_graph(6), torch.randn(2, 6, 8)
    valid = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
    source, target = graph.edge_index
    features = torch.randn(2, 36, 4)
    spoilt = features.masked_fill(~(valid[:, source] & valid[:, target])[..., None], torch.nan)
    module, results = ga.nn.EdgeProjection(4, 2), []
    for given in (features, spoilt):
        module.zero_grad()
        out = layer(x, graph, valid=valid, edge_bias=module(given))
        out[valid].square().sum().backward()
        results.append((out[valid], *(p.grad for p in module.parameters())))
    for clean, other in zip(*results, strict=True):
        torch.testing.assert_close(other, clean)
    spoilt[0, 0] = torch.nan  # of an edge that counts, nothing is hidden
    assert layer(x, graph, valid=valid, edge_bias=module(spoilt))[0, 0].isnan().all()


def test_features_without_gaps_are_not_copied(monkeypatch) -> None:
    module, features = ga.nn.EdgeProjection(4, 2), torch.randn(6, 4)
    large = features.abs() * 6e37  # finite, but their sum is not
    gap = features.clone()
    gap[1] = torch.nan
    expected = module(gap)[[0, 2, 3, 4, 5]]
    assert torch.equal(module(large), module.projection(large))
    monkeypatch.setattr(torch.Tensor, "masked_fill", None)
    assert torch.equal(module(features)[[0, 2, 3, 4, 5]], expected)
    with pytest.raises(TypeError):
        module(gap)


MODULES = {
    "distance": lambda: ga.nn.DistanceBias(3, num_radial=5, cutoff=8.5),
    "distance from zero": lambda: ga.nn.DistanceBias(3, zero_init=True),
    "projection": lambda: ga.nn.EdgeProjection(4, heads=3),
    "projection without bias": lambda: ga.nn.EdgeProjection(4, heads=3, bias=False, zero_init=True),
}


@pytest.mark.parametrize("name", MODULES)
def test_copies_pickles_and_files_are_the_same_module(name: str, tmp_path: Any) -> None:
    module = MODULES[name]()
    ga.save(module, tmp_path)
    again = type(module)(**module.config)
    again.load_state_dict(module.state_dict())
    for other in (
        copy.deepcopy(module),
        pickle.loads(pickle.dumps(module)),
        ga.load(tmp_path),
        again,
    ):
        assert repr(other) == repr(module) == repr(eval(repr(module), vars(ga.nn)))
        torch.testing.assert_close(
            dict(other.state_dict()), dict(module.state_dict()), rtol=0, atol=0
        )


def test_weights_of_another_cutoff_are_refused() -> None:
    ours, theirs = ga.nn.DistanceBias(3), ga.nn.DistanceBias(3, cutoff=10.0)
    with pytest.raises(RuntimeError, match="cutoff"):
        ours.load_state_dict(theirs.state_dict())
    ours.load_state_dict(ga.nn.DistanceBias(3, zero_init=True).state_dict())


def test_their_maps_decay_and_their_biases_do_not() -> None:
    both = torch.nn.ModuleList([ga.nn.DistanceBias(3), ga.nn.EdgeProjection(4, 3)])
    decays, stays = ga.train.parameter_groups(both)
    assert [tuple(p.shape) for p in decays["params"]] == [(3, 16), (3, 4)]
    assert [tuple(p.shape) for p in stays["params"]] == [(3,)]


GRAPH = ga.window_path_graph(4, 1)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: ga.nn.DistanceBias(0), "heads must be >= 1"),
        (lambda: ga.nn.DistanceBias(3, num_radial=0), "num_radial must be >= 1"),
        (lambda: ga.nn.DistanceBias(3, cutoff=0), "cutoff must be a finite number > 0"),
        (lambda: ga.nn.DistanceBias(3)(GRAPH, torch.zeros(4, 3)), "graph must be a TokenGraph"),
        (
            lambda: ga.nn.DistanceBias(3)(torch.zeros(5, 3), GRAPH),
            r"positions must be a floating-point tensor of shape \[\*, 4, 3\].*"
            r"got torch.float32 of shape \[5, 3\]",
        ),
        (
            lambda: ga.nn.DistanceBias(3)(torch.zeros(4, 3, dtype=torch.long), GRAPH),
            "positions must be a floating-point tensor",
        ),
        (
            lambda: ga.nn.DistanceBias(3)(torch.zeros(4, 3), ga.bipartite_complete_graph(4, 5)),
            r"positions must be a pair \(targets \[\*, 4, 3\], sources \[\*, 5, 3\]\)",
        ),
        (lambda: ga.nn.DistanceBias(3)("1abc", GRAPH), "positions must be a tensor"),
        (lambda: ga.nn.EdgeProjection(0, 3), "features must be >= 1"),
        (
            lambda: ga.nn.EdgeProjection(4, 3)(torch.zeros(6, 5)),
            r"edge_attr must be a floating-point tensor \[\*, E, 4\], got .* \[6, 5\]",
        ),
        (lambda: ga.nn.EdgeProjection(4, 3)(torch.ones(6, 4).long()), "floating-point"),
        (
            lambda: ga.nn.EdgeProjection(4, 3)(torch.ones(6, 4).double()),
            "edge_attr must have the module's dtype torch.float32",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_name(call: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        call()
