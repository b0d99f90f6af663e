"""The consensus layer of the code that the authors published, edge by edge.

There, one network of hidden width xi reads both tokens of an edge and gives one alpha for all
heads; another gives r rows per head, which are normalised; R is alpha I plus the sum of v v^T over
the rows v. The same matrices serve T gradient steps, each with a learned size.
"""

import inspect
import math

import pytest
import torch
from nn_by_hand import PUBLISHED
from torch.nn import functional

import graphattn as ga

DIM, HEADS, D, XI, RANK = 8, 2, 4, 5, 3
OPTIONS = {**PUBLISHED[-1], "edge_hidden": XI, "rank": RANK}


def layer_of(seed: int = 0, **options) -> ga.nn.SelfConsensus:
    torch.manual_seed(seed)
    layer = ga.nn.SelfConsensus(DIM, HEADS, **{**OPTIONS, **options}).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return layer


def published(layer: ga.nn.SelfConsensus, x: torch.Tensor, graph: ga.TokenGraph) -> torch.Tensor:
    """The states after T steps of the published layer with the parameters of ours."""
    state = {name: value.detach() for name, value in layer.state_dict().items()}
    weight = torch.cat([state[f"edge_net.{end}.weight"][0] for end in ("target", "source")], dim=1)
    bias = state["edge_net.target.bias"][0]
    u = functional.linear(x, state["source_proj.weight"], state["source_proj.bias"])
    u = u.reshape(-1, HEADS, D)
    edges = [(i, j) for j, i in graph.edge_index.T.tolist()]
    for raw in state["raw_step_size"]:
        change = torch.zeros_like(u)
        for i, j in edges:
            hidden = functional.gelu(weight @ torch.cat([x[i], x[j]]) + bias)
            logit = state["edge_net.alpha"] @ hidden[:XI] + state["edge_net.alpha_bias"]
            alpha = functional.softplus(logit)  # one number for all heads
            for h in range(HEADS):
                rows = state["edge_net.shear"][h] @ hidden[XI:] + state["edge_net.shear_bias"][h]
                rows = rows / rows.norm(dim=-1, keepdim=True)
                d = u[i, h] - u[j, h]
                pull = alpha * d + rows.T @ (rows @ d)
                change[i, h] += pull
                change[j, h] -= pull
        u = u - math.log1p(math.exp(raw)) * change
    return functional.linear(u.flatten(1), state["output_proj.weight"], state["output_proj.bias"])


@pytest.mark.parametrize("backend", ["auto", "structured", "reference"])
@pytest.mark.parametrize("iterations", [1, 2, 4])
def test_it_is_the_published_layer(iterations, backend):
    layer = layer_of(iterations=iterations, backend=backend)
    x = torch.randn(9, DIM, dtype=torch.float64)
    scores = torch.randn(9, 5).index_fill(1, torch.tensor(2), -torch.inf)  # no token sees itself
    for graph in (ga.window_path_graph(9, 2), ga.scored_window_graph(scores, 2)):
        torch.testing.assert_close(layer(x, graph), published(layer, x, graph))


def test_it_has_the_parameters_of_the_published_layer():
    """Two projections, three maps of each of two networks with their biases, a step per iteration.

    The published code keeps a step for each of 2,048 positions, beside that for each iteration.
    """
    dim, heads, xi, rank = 64, 4, 16, 8
    layer = ga.nn.SelfConsensus(dim, heads, **{**OPTIONS, "edge_hidden": xi, "rank": rank})
    projections = 2 * (dim * dim + dim)
    of_alpha = 2 * dim * xi + xi + xi + 1
    of_rows = 2 * dim * xi + xi + (xi + 1) * rank * dim
    assert sum(p.numel() for p in layer.parameters()) == projections + of_alpha + of_rows + 2


def test_every_iteration_starts_with_the_given_step_and_learns_its_own():
    layer = ga.nn.SelfConsensus(DIM, HEADS, iterations=3, learned_step=True, step_size=0.25)
    steps = torch.stack([layer.step_tensor(t) for t in range(3)])
    torch.testing.assert_close(steps, torch.full((3, HEADS), 0.25))
    with torch.no_grad():  # of equal steps, which commute, the gradients are equal, too
        layer.raw_step_size += torch.tensor([0.0, 0.5, 1.0])
    layer(torch.randn(6, DIM), ga.window_path_graph(6, 1)).square().sum().backward()
    assert layer.raw_step_size.grad is not None
    assert len(set(layer.raw_step_size.grad.tolist())) == 3


def test_iterations_are_steps_with_one_matrix_per_edge():
    """T calls of a layer would compute R again from the tokens of the step before."""
    layer = layer_of(learned_step=False, step_size=0.05, iterations=3)
    once = layer_of(learned_step=False, step_size=0.05, iterations=1)
    graph, x = ga.window_path_graph(9, 2), torch.randn(9, DIM, dtype=torch.float64)
    with torch.no_grad():
        hidden = once.edge_net.target_hidden(x), once.edge_net.source_hidden(x)
        u = once.split(once.source_proj(x), HEADS)
        for _ in range(3):
            u = once.mix(u, (u, u), hidden, graph, (None, None))
        torch.testing.assert_close(layer(x, graph), once.output_proj(u.flatten(1)))


def test_theorems_are_checked_for_the_largest_step():
    graph, x = ga.window_path_graph(20, 2), torch.randn(20, DIM, dtype=torch.float64)
    layer = layer_of(iterations=2)
    with torch.no_grad():
        layer.raw_step_size[:] = torch.tensor([-6.0, -4.0])
    small = ga.spectral.certify(layer, x, graph=graph)["low-pass filter"]
    assert small.status == "holds"
    for t in range(2):  # one large step of two is enough to violate it
        with torch.no_grad():
            layer.raw_step_size[:] = -6.0
            layer.raw_step_size[t] = 2.0
        certificate = ga.spectral.certify(layer, x, graph=graph)
        assert certificate["low-pass filter"].status == "violated"
        assert certificate["mean stays"].status == "holds"


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"step_size must be a number with learned_step=True"):
        ga.nn.SelfConsensus(DIM, HEADS, step_size="auto", learned_step=True)
    with pytest.raises(ValueError, match=r"iterations must be .*got 0"):
        ga.nn.CrossConsensus(DIM, HEADS, iterations=0)
    causal = ga.nn.SelfConsensus(DIM, HEADS, iterations=2, update="target")
    with pytest.raises(ValueError, match=r"init_cache needs a layer made with iterations=1, got 2"):
        causal.init_cache(1, None)


def test_heads_with_networks_of_their_own_cannot_share_alpha():
    for options in ({}, {"edge_input": "full", "edge_networks": "per_head"}):
        with pytest.raises(ValueError, match="share_alpha must be False if every head has its own"):
            ga.nn.SelfConsensus(DIM, HEADS, share_alpha=True, **options)
    layer, x = layer_of(learned_beta=True), torch.randn(5, DIM, dtype=torch.float64)
    hidden = layer.edge_net.target_hidden(x[:1]) + layer.edge_net.source_hidden(x[1:])
    R = layer.edge_net.edge_matrix(hidden)
    assert torch.equal(R.alpha[:, 0], R.alpha[:, 1])
    assert not torch.equal(R.beta[:, 0], R.beta[:, 1])


def test_rows_of_a_sequence_cannot_iterate():
    layer = ga.nn.SelfConsensus(DIM, HEADS, iterations=2, update="target")
    x = torch.randn(9, DIM)
    with pytest.raises(ValueError, match="context must be None with iterations=2"):
        layer(x[6:], ga.causal_graph(3, past=6), x)


def test_a_step_size_of_a_user_s_own_has_no_iterations():
    graph, x = ga.window_path_graph(6, 2), torch.randn(6, DIM)
    torch.manual_seed(0)
    layer = ga.nn.SelfConsensus(DIM, HEADS, iterations=2)
    torch.manual_seed(0)
    other = ga.nn.SelfConsensus(DIM, HEADS, iterations=2, step_size=0.05)
    layer.step_tensor = lambda: 0.05
    assert torch.equal(layer(x, graph), other(x, graph))


def test_layers_that_were_pickled_before_have_one_step():
    layer = ga.nn.SelfConsensus(DIM, HEADS)
    graph, x = ga.window_path_graph(6, 2), torch.randn(6, DIM)
    expected = layer(x, graph)
    for name in ("iterations", "learned_step"):
        del layer.__dict__[name]
    del layer.edge_net.__dict__["lacks_trunk"]
    assert torch.equal(layer(x, graph), expected)


def test_models_pass_the_options_on():
    options = {name: OPTIONS[name] for name in PUBLISHED[-1]}
    model = ga.models.ProteinModel(
        dim=16,
        depth=1,
        heads=2,
        mixer="consensus",
        mixer_options=options,
        context={"dna": 16},
        context_every=1,
    )
    layers = [
        m for m in model.modules() if isinstance(m, ga.nn.SelfConsensus | ga.nn.CrossConsensus)
    ]
    assert len(layers) == 2
    for layer in layers:
        assert layer.iterations == 2
        assert layer.learned_step
        assert layer.edge_net.beta is None
    assert set(options) <= set(inspect.signature(ga.nn.CrossConsensus).parameters)
