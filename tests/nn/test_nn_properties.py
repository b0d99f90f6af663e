"""Properties of every layer with any options on any graph, on random layers, graphs and tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

import oracle_ops as oracle
import pytest
import torch
from cases_ops import random
from hypothesis import given, settings
from hypothesis import strategies as st
from nn_by_hand import grouped_linear, into_heads, linear, rotate, second_layer
from strategies_ops import (
    CAUSAL,
    batch_dimensions,
    coins,
    one_rectangle,
    poisoned,
    rectangles,
    seeds,
    sequence_of,
    sequences,
    squares,
)
from torch import Tensor

import graphattn as ga

pytestmark = pytest.mark.filterwarnings("ignore:all edges of this edge list point backward")

SWEEP = settings(max_examples=25, deadline=None, derandomize=True)
SHORT = settings(SWEEP, max_examples=12)  # for each of seven kinds of layer
TIGHT = {"rtol": 1e-9, "atol": 1e-10}
DTYPES = st.sampled_from([torch.float64, torch.float32, torch.bfloat16])
BACKENDS = st.sampled_from(["auto", "reference"])
data = st.data()

KINDS = {
    "DotProductAttention": False,
    "DotProductAttention across": True,  # to another track
    "GaussianKernelAttention": False,
    "KrauseAttention": False,
    "SelfConsensus energy": False,
    "SelfConsensus target": False,
    "CrossConsensus": True,
}
EVERY_LAYER = pytest.mark.parametrize("kind", KINDS)


class Layer(NamedTuple):
    """A layer with random options and parameters, and what the tests have to know of it."""

    module: Any
    across: bool
    is_energy: bool
    context_width: int

    def __call__(self, tokens: tuple[Tensor, ...], graph: Any, **keywords: Any) -> Tensor:
        return self.module(tokens[0], graph, *tokens[1:], **keywords)

    def tokens(
        self, graph: ga.TokenGraph, batch: tuple[int, ...], seed: int, dtype: torch.dtype
    ) -> tuple[Tensor, ...]:
        tokens = [random(*batch, graph.num_targets, self.module.dim, seed=seed, dtype=dtype)]
        if self.across:
            shape = (*batch, graph.num_sources, self.context_width)
            tokens.append(random(*shape, seed=seed + 1, dtype=dtype))
        return tuple(tokens)

    @property
    def reads_its_whole_sequence(self) -> bool:
        return self.is_energy and self.module.step_size == "auto"


@st.composite
def layers(draw, kind: str, **fixed: Any) -> Layer:
    """Every option drawn, except those that are given."""

    def choose(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    name, across = kind.split()[0], KINDS[kind]
    heads, head_dim = draw(st.integers(1, 3)), choose(2, 4)
    dim = heads * head_dim
    rotary = ga.nn.RotaryEmbedding(head_dim, base=20.0)
    options: dict[str, Any] = {"bias": choose(True, False), "rope": choose(False, True, rotary)}
    context = dim
    if name == "DotProductAttention":
        options["top_k"] = choose(None, 1, 2)
        options["qk_norm"] = choose(False, True)
        options["value_projection"] = choose(True, True, False)
        if options["value_projection"]:
            options["kv_heads"] = choose(None, 1)
            context = choose(dim, 5) if across else dim
            options["context_dim"] = context
    elif name == "KrauseAttention":
        options |= {"top_k": choose(None, 1, 2), "kv_heads": choose(None, 1)}
        options |= {"init_sigma": choose(None, 0.6), "sigma_per_head": choose(True, False)}
    elif name == "GaussianKernelAttention":
        options |= {"normalize": choose(True, False), "eps": choose(0.0, 0.2)}
        options |= {"init_sigma": choose(None, 0.6), "top_k": choose(None, 1, 2)}
    else:
        options |= {"rank": choose(1, 3), "edge_hidden": choose(1, 4)}
        options |= {"edge_input": choose("head", "full"), "trunk": choose("shared", "separate")}
        options["rope"] = choose(False, True, rotary, "isometric")
        plain = fixed.get("rope", options["rope"]) in (False, "isometric")
        options["step_size"] = choose(0.1, "learned", *(["auto"] * 3 if plain else []))
        if across:
            context = heads * choose(1, 3) if options["edge_input"] == "head" else choose(3, dim)
            options["context_dim"] = context
        else:
            options["update"] = kind.split()[1]
    torch.manual_seed(draw(seeds))
    module = getattr(ga.nn, name)(dim, heads, **{**options, **fixed}).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return Layer(module, across, kind.endswith("energy"), context)


def graphs_for(layer: Layer) -> st.SearchStrategy[ga.TokenGraph]:
    return rectangles() if layer.across else squares(causal=not layer.is_energy)


def sequences_for(layer: Layer) -> st.SearchStrategy[ga.TokenGraph]:
    return one_rectangle() if layer.across else sequences(causal=not layer.is_energy)


# Names of tokens, order of edges, batches.


@pytest.mark.long
@EVERY_LAYER
@SHORT
@given(data=data)
def test_renaming_tokens_renames_outputs(kind: str, data):
    layer = data.draw(layers(kind))
    graph, backend = data.draw(sequences_for(layer)), data.draw(BACKENDS)
    tokens = layer.tokens(graph, data.draw(batch_dimensions), data.draw(seeds), torch.float64)
    generator = torch.Generator().manual_seed(data.draw(seeds))
    mask = graph.to_mask()
    of_target, of_source = (torch.randperm(n, generator=generator) for n in mask.shape)
    if not layer.across:
        of_source = of_target
    renamed = tuple(
        x[..., order, :] for x, order in zip(tokens, (of_target, of_source), strict=False)
    )
    places = (graph.positions[of_target], graph.source_positions[of_source])
    with ga.use_backend(backend):
        there = layer(
            renamed,
            ga.from_mask(mask[of_target][:, of_source]),
            positions=places if layer.across else places[0],
        )
        torch.testing.assert_close(there, layer(tokens, graph)[..., of_target, :], **TIGHT)


@EVERY_LAYER
@SHORT
@given(data=data)
def test_the_order_of_a_raw_edge_index_changes_no_bit(kind: str, data):
    layer = data.draw(layers(kind))
    graph = data.draw(
        one_rectangle() if layer.across else sequences(causal=False)  # a list is never causal
    )
    edges, backend = graph.edge_index, data.draw(BACKENDS)
    generator = torch.Generator().manual_seed(data.draw(seeds))
    shuffled = edges[:, torch.randperm(edges.shape[1], generator=generator)]
    tokens = layer.tokens(graph, data.draw(batch_dimensions), data.draw(seeds), torch.float64)
    with ga.use_backend(backend):
        assert torch.equal(layer(tokens, shuffled), layer(tokens, edges))
        torch.testing.assert_close(layer(tokens, shuffled), layer(tokens, graph), **TIGHT)


@EVERY_LAYER
@SHORT
@given(data=data)
def test_a_sequence_in_a_batch_equals_the_sequence_alone(kind: str, data):
    """Positions restart, the automatic step is the sequence's own, lengths are random."""
    layer = data.draw(layers(kind))
    parts = data.draw(st.lists(sequences_for(layer), min_size=2, max_size=4))
    packed, backend = ga.batch(parts), data.draw(BACKENDS)
    tokens = layer.tokens(packed, data.draw(batch_dimensions), data.draw(seeds), torch.float64)
    pieces = zip(
        *(
            x.split([(g.num_targets, g.num_sources)[side] for g in parts], dim=-2)
            for side, x in enumerate(tokens)
        ),
        strict=True,
    )
    with ga.use_backend(backend):
        alone = [layer(piece, part) for piece, part in zip(pieces, parts, strict=True)]
        torch.testing.assert_close(layer(tokens, packed), torch.cat(alone, dim=-2), **TIGHT)


# What a token must not see.


@EVERY_LAYER
@SHORT
@given(data=data)
def test_no_token_reads_what_it_has_no_edge_to(kind: str, data):
    """Future, other sequence or any missing edge; NaN, infinity or another number: no bit."""
    layer, dtype, backend = data.draw(layers(kind)), data.draw(DTYPES), data.draw(BACKENDS)
    layer.module.to(dtype)
    graph = data.draw(graphs_for(layer))
    tokens = layer.tokens(graph, data.draw(batch_dimensions), data.draw(seeds), dtype)
    hits, changed = [], []
    for x in tokens:
        hit, content = poisoned(data.draw, x.shape[-2])
        hits.append(hit)
        changed.append(torch.where(hit[:, None], content[:, None].to(dtype), x))
    mask = graph.to_mask()
    blind = ~hits[0] & ~mask[:, hits[-1]].any(1)
    if layer.is_energy:
        blind &= ~mask[hits[0]].any(0)
    if layer.reads_its_whole_sequence:
        sequence = sequence_of(graph)[0]
        blind = ~torch.isin(sequence, sequence[hits[0]])
    leaves = tuple(x.requires_grad_() for x in tokens)
    with ga.use_backend(backend):
        before, after = layer(leaves, graph), layer(tuple(changed), graph)
    assert torch.equal(after[..., blind, :], before[..., blind, :])
    loss = before[..., blind, :].double().square().sum()
    gradients = torch.autograd.grad(loss, leaves, materialize_grads=True)
    for gradient, hit in zip(gradients, hits, strict=True):
        assert (gradient[..., hit, :] == 0).all()


@EVERY_LAYER
@SHORT
@given(data=data)
def test_what_padding_holds_reaches_no_output_and_no_gradient(kind: str, data):
    layer, dtype, backend = data.draw(layers(kind)), data.draw(DTYPES), data.draw(BACKENDS)
    layer.module.to(dtype)
    graph, batch = data.draw(graphs_for(layer)), data.draw(batch_dimensions)
    tokens = layer.tokens(graph, batch, data.draw(seeds), dtype)
    per_sequence = data.draw(st.booleans())
    masks = [
        coins(*(batch if per_sequence else ()), x.shape[-2], seed=data.draw(seeds)) for x in tokens
    ]
    contents = [poisoned(data.draw, x.shape[-2])[1] for x in tokens]
    valid = tuple(masks) if layer.across else masks[0]

    def run(spoiled: bool) -> list[Tensor]:
        leaves = [
            torch.where(mask[..., None], x, content[:, None].to(dtype) if spoiled else x)
            for x, mask, content in zip(tokens, masks, contents, strict=True)
        ]
        leaves = [x.detach().requires_grad_() for x in leaves]
        with ga.use_backend(backend):
            out = layer(tuple(leaves), graph, valid=valid)
        gradients = torch.autograd.grad(
            out.double().square().sum(), [*leaves, *layer.module.parameters()]
        )
        return [out, *gradients]

    for clean, spoiled in zip(run(False), run(True), strict=True):
        assert torch.equal(spoiled, clean)
        assert spoiled.isfinite().all()


# Causality, in full: the only sequence-wide statement that every layer must make.


@pytest.mark.parametrize("kind", [k for k in KINDS if not KINDS[k] and "energy" not in k])
@SHORT
@given(data=data)
def test_the_past_is_computed_without_the_future(kind: str, data):
    """The first t tokens of a causal graph alone give the same as within the whole."""
    layer, backend = data.draw(layers(kind)), data.draw(BACKENDS)
    build, window = data.draw(st.sampled_from([*CAUSAL.values()])), data.draw(st.integers(1, 4))
    n = data.draw(st.integers(2, 9))
    t = data.draw(st.integers(1, n - 1))
    (x,) = layer.tokens(build(n, window), (), data.draw(seeds), torch.float64)
    with ga.use_backend(backend):
        whole, past = layer((x,), build(n, window)), layer((x[:t],), build(t, window))
    torch.testing.assert_close(whole[:t], past, **TIGHT)


# Attention by distance.


def turned(x: Tensor, heads: int, seed: int) -> tuple[Tensor, Tensor]:
    """Every head's features of x turned by its own orthogonal matrix [H, D, D], and these."""
    width = x.shape[-1] // heads
    turn = torch.linalg.qr(random(heads, width, width, seed=seed)).Q
    return torch.einsum("...hd,hde->...he", into_heads(x, heads), turn).flatten(-2), turn


@SWEEP
@given(data=data)
def test_gaussian_kernel_weights_see_no_rotation_of_a_head_and_outputs_turn_along(data):
    layer = data.draw(layers("GaussianKernelAttention", rope=False)).module
    graph = data.draw(squares())
    x = random(graph.num_targets, layer.dim, seed=data.draw(seeds))
    y, turn = turned(x, layer.heads, data.draw(seeds))
    expected, weights = layer(x, graph, return_attention_weights=True)
    with torch.no_grad():  # let the output projection undo the rotation
        weight = layer.output_proj.weight.unflatten(1, (layer.heads, -1))
        undone = torch.einsum("ohd,hde->ohe", weight, turn).flatten(1)
        layer.output_proj.weight.copy_(undone)
    out, weights_there = layer(y, graph, return_attention_weights=True)
    torch.testing.assert_close(weights_there, weights, **TIGHT)
    torch.testing.assert_close(out, expected, **TIGHT)


@SWEEP
@given(data=data, size=st.sampled_from([1.0, 50.0]))
def test_gaussian_kernel_attention_moves_along_with_every_sequence(data, size: float):
    """x + c: the same weights, and c itself in every average (of tokens that see anyone)."""
    layer = data.draw(
        layers("GaussianKernelAttention", rope=False, normalize=False, eps=0.0)
    ).module
    graph = data.draw(squares())
    x = random(graph.num_targets, layer.dim, seed=data.draw(seeds))
    shifts = size * random(len(graph.sizes), layer.dim, seed=data.draw(seeds))
    shift = shifts[sequence_of(graph)[0]]
    here, weights = layer(x, graph, return_attention_weights=True)
    there, weights_there = layer(x + shift, graph, return_attention_weights=True)
    torch.testing.assert_close(weights_there, weights, rtol=1e-8, atol=1e-9)
    seeing = (graph.in_degree() > 0)[:, None]
    moved = torch.where(seeing, shift, 0) @ layer.output_proj.weight.T
    torch.testing.assert_close(there, here + moved, rtol=1e-8, atol=1e-8)


@pytest.mark.long
@SWEEP
@given(data=data)
def test_krause_attention_sees_distances_of_queries_and_keys_only(data):
    """One rigid motion per head of queries and keys alike, through the two projections."""
    layer = data.draw(layers("KrauseAttention", rope=False, kv_heads=None, bias=True)).module
    graph = data.draw(squares())
    x = random(graph.num_targets, layer.dim, seed=data.draw(seeds))
    before = layer(x, graph, return_attention_weights=True)
    seed, shift = data.draw(seeds), random(layer.dim, seed=data.draw(seeds))
    with torch.no_grad():
        for projection in (layer.query_proj, layer.key_proj):
            projection.weight.copy_(turned(projection.weight.T, layer.heads, seed)[0].T)
            projection.bias.copy_(turned(projection.bias, layer.heads, seed)[0] + shift)
    after = layer(x, graph, return_attention_weights=True)
    for here, there in zip(before, after, strict=True):
        torch.testing.assert_close(there, here, rtol=1e-8, atol=1e-9)


@SWEEP
@given(data=data, more=st.integers(0, 5))
def test_krause_with_top_k_at_least_the_window_is_the_rbf_window(data, more: int):
    """Against the plain loops over the whole window, without a cut."""
    window = data.draw(st.integers(1, 5))
    layer = data.draw(layers("KrauseAttention", top_k=window + more)).module
    parts = data.draw(st.lists(st.integers(1, 8), min_size=1, max_size=2))
    graph = ga.batch([ga.causal_window_graph(n, window) for n in parts])
    x, state = random(graph.num_targets, layer.dim, seed=data.draw(seeds)), layer.state_dict()
    base = None if layer.rotary is None else layer.rotary.base
    query, key, value = (
        into_heads(linear(state, f"{name}_proj", x), heads)
        for name, heads in (("query", layer.heads), ("key", layer.kv_heads),
                            ("value", layer.kv_heads))
    )  # fmt: skip
    query, key = (rotate(t, graph.positions, base) for t in (query, key))
    sigma = state["log_sigma"].exp()
    rbf = oracle.attention(query, key, value, graph.to_mask(), sigma=sigma)
    expected = linear(state, "output_proj", rbf.out.flatten(-2))
    with ga.use_backend(data.draw(BACKENDS)):
        torch.testing.assert_close(layer(x, graph), expected, **TIGHT)


# Energy consensus in the frame in which tokens are compared.


class Step(NamedTuple):
    """A SelfConsensus layer between orthogonal maps: what is left is the step u -> u'."""

    layer: Any
    graph: ga.TokenGraph
    x: Tensor  # what the edge network looks at

    def framed(self, u: Tensor, *, back: bool = False) -> Tensor:
        """u [*, N, H, D] as it is compared: rotated by position for "isometric"."""
        base = self.layer.rotary.base if self.layer.isometric else None
        return rotate(u, self.graph.positions, base, back=back)

    def __call__(self, u: Tensor) -> Tensor:
        """u' [*, N, H, D], while the edge network keeps looking at x."""
        layer = self.layer
        handle = layer.source_proj.register_forward_hook(lambda module, given, out: u.flatten(-2))
        try:
            x = self.x.expand(*u.shape[:-2], layer.dim)
            out = layer(x, self.graph)
        finally:
            handle.remove()
        bias = 0 if layer.output_proj.bias is None else layer.output_proj.bias
        return into_heads((out - bias) @ layer.output_proj.weight, layer.heads)

    def matrix(self) -> Tensor:
        """The step of every head as a matrix [H, N D, N D], all heads fed the same basis."""
        N, H, D = len(self.x), self.layer.heads, self.layer.head_dim
        basis = torch.eye(N * D, dtype=torch.float64).view(N * D, N, 1, D).expand(-1, -1, H, -1)
        return self(basis).permute(2, 1, 3, 0).reshape(H, N * D, N * D)


@st.composite
def steps(draw, **fixed: Any) -> Step:
    fixed.setdefault("rope", draw(st.sampled_from([False, "isometric"])))
    layer = draw(layers("SelfConsensus energy", **fixed)).module
    with torch.no_grad():
        torch.nn.init.orthogonal_(layer.output_proj.weight)
        size = draw(st.sampled_from([1.0, 10.0, 100.0]))
        for parameter in layer.edge_net.parameters():
            parameter.mul_(size)
        if draw(st.booleans()):  # R of rank 1: its norm is beta, all that the bound allows
            layer.edge_net.alpha_bias.sub_(40 * size**2)
            for rows in (layer.edge_net.shear, layer.edge_net.shear_bias):
                rows.copy_(rows[:, :1].clone().expand_as(rows))
    graph = draw(squares(6, causal=False))
    x = random(graph.num_targets, layer.dim, seed=draw(seeds))
    return Step(layer.requires_grad_(False), graph, x)


@pytest.mark.long
@SWEEP
@given(step=steps(), seed=seeds)
def test_what_agrees_in_every_sequence_stays(step: Step, seed: int):
    """Constants; for "isometric", tokens that are equal after their rotation."""
    values = random(len(step.graph.sizes), step.layer.heads, step.layer.head_dim, seed=seed)
    agreed = step.framed(values[sequence_of(step.graph)[0]], back=True)
    torch.testing.assert_close(step(agreed), agreed, rtol=0, atol=1e-9)


@pytest.mark.long
@SWEEP
@given(step=steps(step_size="auto"), seed=seeds)
def test_the_energy_falls_by_a_layer_of_any_options(step: Step, seed: int):
    state = step.layer.state_dict()
    hidden = (grouped_linear(state, f"edge_net.{side}", step.x) for side in ("target", "source"))
    mask = step.graph.to_mask()
    R, _, _ = oracle.edge_matrices(*hidden, second_layer(state), mask)
    u = random(len(step.x), step.layer.heads, step.layer.head_dim, seed=seed)
    before, after = (oracle.energy(step.framed(t), R, mask) for t in (u, step(u)))
    assert after < before or before < 1e-12


@SWEEP
@given(step=steps(step_size="auto"))
def test_the_automatic_step_of_a_layer_has_its_measured_spectrum_in_0_1(step: Step):
    """Rope "isometric" included: the rotated map is the same in another orthogonal basis."""
    matrix = step.matrix()
    torch.testing.assert_close(matrix, matrix.mT, rtol=0, atol=1e-10)
    spectrum = torch.linalg.eigvalsh(matrix)
    assert spectrum.min() >= -1e-10
    assert spectrum.max() <= 1 + 1e-10
