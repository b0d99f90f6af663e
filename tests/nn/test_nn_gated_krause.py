"""Dot products and Krause attention in parallel: the mixture, its two graphs, its caches."""

import copy
import math
import pickle

import pytest
import torch

import graphattn as ga

DIM, HEADS = 24, 4


def layer_of(**options):
    """A layer in float64 in which nothing is as at the start, the gate included."""
    torch.manual_seed(0)
    options = {"krause_window": 5, "top_k": 3, **options}
    layer = ga.nn.GatedKrauseAttention(DIM, HEADS, **options)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return layer.double().eval()


def tokens_of(*shape):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(*shape, DIM, generator=generator, dtype=torch.float64)


@torch.no_grad()
def by_hand(layer, x, window=None):
    """The output of every token, as the authors' code computes it, in plain loops.

    Krause, code: two branches with their own projections; scores -d^2 / (2 sigma^2) within the
    window, of which the k largest remain; softmax of a linear map of both outputs.
    """
    N, width, result = len(x), DIM // HEADS, []
    heads = {
        name: [
            getattr(branch, f"{which}_proj")(x).view(N, -1, width)
            for which in ("query", "key", "value")
        ]
        for name, branch in (("dot", layer.dot), ("krause", layer.krause))
    }
    groups = HEADS // layer.dot.kv_heads
    for i in range(N):
        outputs = []
        for name, (query, key, value) in heads.items():
            near = [w for w in (window, layer.krause_window if name == "krause" else None) if w]
            seen = list(range(max(0, i + 1 - min(near, default=N)), i + 1))
            of_heads = []
            for h in range(HEADS):
                if name == "dot":
                    logits = [float(query[i, h] @ key[j, h // groups]) / width**0.5 for j in seen]
                    kept = seen
                else:
                    sigma = layer.krause.log_sigma[h].exp().item()
                    logits = [
                        -float((query[i, h] - key[j, h // groups]).square().sum()) / (2 * sigma**2)
                        for j in seen
                    ]
                    best = sorted(range(len(seen)), key=lambda n, of=logits: -of[n])
                    best = best[: layer.krause.top_k]
                    kept, logits = [seen[n] for n in best], [logits[n] for n in best]
                weights = torch.tensor(logits, dtype=torch.float64).softmax(0)
                of_heads.append(weights @ value[kept, h // groups])
            branch = layer.dot if name == "dot" else layer.krause
            outputs.append(branch.output_proj(torch.cat(of_heads)))
        scores = layer.gate.weight @ torch.cat(outputs) + layer.gate.bias
        total = sum(math.exp(score) for score in scores)
        result.append(sum(math.exp(s) / total * y for s, y in zip(scores, outputs, strict=True)))
    return torch.stack(result)


@pytest.mark.parametrize("window", [None, 3, 8])
@pytest.mark.parametrize("options", [{}, {"kv_heads": 2, "bias": False}, {"krause_window": None}])
def test_every_token_gets_the_mixture_of_the_authors_code(options, window):
    layer, x = layer_of(**options), tokens_of(10)
    graph = ga.causal_graph(10) if window is None else ga.causal_window_graph(10, window)
    torch.testing.assert_close(layer(x, graph), by_hand(layer, x, window))


def test_it_starts_with_a_share_of_four_fifths_for_the_dot_product():
    layer, x, graph = (
        ga.nn.GatedKrauseAttention(DIM, HEADS),
        torch.randn(9, DIM),
        ga.causal_graph(9),
    )
    shares = layer.gate.shares(layer.dot(x, graph), layer.krause(x, graph))
    torch.testing.assert_close(shares, torch.tensor([0.8, 0.2]).expand(9, 2))
    with torch.no_grad():
        layer.gate.weight.normal_()
        layer.gate.bias.normal_()
        layer.krause.log_sigma.add_(1)
    layer.reset_parameters()
    assert layer.gate.shares(x, x).unique().numel() == 2
    assert layer.krause.log_sigma.exp().tolist() == pytest.approx([(DIM / HEADS) ** 0.5] * HEADS)


def test_it_shows_the_window_and_both_branches():
    shown = repr(ga.nn.GatedKrauseAttention(16, 4, krause_window=6, top_k=3))
    for part in (
        "krause_window=6",
        "(dot): DotProductAttention(16",
        "(krause): KrauseAttention(16",
    ):
        assert part in shown
    assert "krause_window" not in repr(ga.nn.GatedKrauseAttention(16, 4))


def test_its_parameters_are_those_of_two_layers_and_a_gate():
    layer = ga.nn.GatedKrauseAttention(DIM, HEADS)
    by_arithmetic = 8 * (DIM * DIM + DIM) + HEADS + 2 * (2 * DIM) + 2
    assert sum(p.numel() for p in layer.parameters()) == by_arithmetic


def test_packed_texts_and_padded_rows_are_the_texts_alone():
    layer, first, second = layer_of(rope=True), tokens_of(7), tokens_of(12).flip(0)
    alone = [layer(x, ga.causal_graph(len(x))) for x in (first, second)]
    packed = ga.batch([ga.causal_graph(7), ga.causal_graph(12)])
    torch.testing.assert_close(layer(torch.cat([first, second]), packed), torch.cat(alone))
    rows = torch.stack([torch.cat([first, first.new_full((5, DIM), torch.nan)]), second])
    valid = torch.arange(12) < torch.tensor([[7], [12]])
    padded = layer(rows, ga.causal_graph(12), valid=valid)
    torch.testing.assert_close(padded[0, :7], alone[0])
    torch.testing.assert_close(padded[1], alone[1])


def test_a_list_of_edges_is_cut_to_near_ones_as_a_structure_is():
    layer, x = layer_of(), tokens_of(2, 11)
    expected = layer(x, ga.causal_graph(11))
    torch.testing.assert_close(layer(x, ga.causal_graph(11).edge_index), expected)
    backend = layer_of(backend="reference")
    torch.testing.assert_close(backend(x, ga.causal_graph(11)), expected)


def test_the_future_does_not_reach_an_output_or_a_gradient():
    layer, x = layer_of(), tokens_of(9).requires_grad_()
    (gradient,) = torch.autograd.grad(layer(x, ga.causal_graph(9))[4].sum(), x)
    assert gradient[:5].abs().sum(-1).min() > 0
    assert torch.equal(gradient[5:], torch.zeros(4, DIM))


def test_gradients_are_those_of_differences():
    layer, x = layer_of(krause_window=3, top_k=None), tokens_of(6).requires_grad_()
    graph = ga.causal_graph(6)
    names = ["gate.weight", "gate.bias", "krause.log_sigma", "dot.value_proj.weight"]
    parameters = [layer.get_parameter(name) for name in names]

    def call(x, *given):
        return torch.func.functional_call(layer, dict(zip(names, given, strict=True)), (x, graph))

    assert torch.autograd.gradcheck(call, (x, *parameters), fast_mode=True)


@pytest.mark.parametrize("window", [None, 4, 9])
@pytest.mark.parametrize("rope", [False, True])
def test_steps_are_one_forward(window, rope):
    layer, x = layer_of(rope=rope), tokens_of(2, 20)
    graph = ga.causal_graph(20) if window is None else ga.causal_window_graph(20, window)
    cache, y = layer.init_cache(2, window, rollback=2), []
    for n in (6, 1, 1, 5, 3, 1, 3):
        at = cache.position
        y.append(layer.step(x[:, at : at + n], cache))
    torch.testing.assert_close(torch.cat(y, 1), layer(x, graph))
    assert [branch.window for branch in cache] == [window, min(window or 5, 5)]
    cache.truncate(18)
    torch.testing.assert_close(layer.step(x[:, 18], cache), layer(x, graph)[:, 18])


def test_padded_prompts_step_as_alone():
    layer, x = layer_of(rope=True), tokens_of(2, 12)
    valid = torch.ones(2, 12, dtype=torch.bool)
    valid[0, :4] = False
    positions = (valid.cumsum(-1) - 1).clamp(min=0)
    cache = layer.init_cache(2, None)
    prompt = layer.step(x[:, :9], cache, valid=valid[:, :9], positions=positions[:, :9])
    rest = [layer.step(x[:, t], cache, positions=positions[:, t]) for t in range(9, 12)]
    together = torch.cat([prompt, torch.stack(rest, 1)], 1)
    torch.testing.assert_close(together[0, 4:], layer(x[0, 4:], ga.causal_graph(8)))
    torch.testing.assert_close(together[1], layer(x[1], ga.causal_graph(12)))


def test_copies_and_files_are_equal(tmp_path):
    layer, x, graph = layer_of(), tokens_of(2, 9), ga.causal_graph(9)
    layer.save_pretrained(tmp_path)
    loaded = ga.nn.GatedKrauseAttention.from_pretrained(tmp_path)
    assert loaded.config["krause_window"] == 5
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), loaded):
        assert torch.equal(other(x, graph), layer(x, graph))
    with pytest.raises(RuntimeError, match="krause_window=5, but this one has krause_window=6"):
        layer_of(krause_window=6).load_state_dict(layer.state_dict())


def test_half_precision_autocast_and_nothing():
    layer, x, graph = layer_of(), tokens_of(2, 9), ga.causal_graph(9)
    rounded = copy.deepcopy(layer).bfloat16()(x.bfloat16(), graph)
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.double(), layer(x, graph), atol=0.1, rtol=0.1)
    single = copy.deepcopy(layer).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert single(x.float(), graph).dtype == torch.bfloat16
    assert layer(tokens_of(2, 0), ga.causal_graph(0)).shape == (2, 0, DIM)
    assert layer(tokens_of(0, 9), graph).shape == (0, 9, DIM)


@pytest.mark.long
def test_compiled_calls_are_equal():
    layer, x = layer_of(), tokens_of(2, 9)
    graph = ga.batch([ga.causal_graph(4), ga.causal_graph(5)])
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, graph), layer(x, graph))


def test_a_subclass_with_a_forward_of_its_own_does_not_step():
    class Louder(ga.nn.GatedKrauseAttention):
        def forward(self, x, graph, **given):
            return 2 * super().forward(x, graph, **given)

    with pytest.raises(ValueError, match=r"step does not run the forward\(\) of Louder"):
        Louder(DIM, HEADS).init_cache(2, None)


def test_wrong_arguments_are_named():
    layer, x = layer_of(), tokens_of(2, 9)
    with pytest.raises(ValueError, match="krause_window must be >= 1, got 0"):
        ga.nn.GatedKrauseAttention(DIM, HEADS, krause_window=0)
    with pytest.raises(ValueError, match="heads must divide dim = 24, got 5"):
        ga.nn.GatedKrauseAttention(DIM, 5)
    with pytest.raises(ValueError, match="graph has 8 targets and 8 sources"):
        layer(x, ga.causal_graph(8))
    with pytest.raises(ValueError, match="graph must be a TokenGraph"):
        layer(x, "causal")
    with pytest.raises(ValueError, match="cache must be a ModelCache with 2 layers"):
        layer.step(x[:, 0], layer.dot.init_cache(2, None))
    with pytest.raises(ValueError, match="x must be a tensor"):
        layer([1, 2], ga.causal_graph(2))
