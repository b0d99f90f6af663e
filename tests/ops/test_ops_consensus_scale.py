"""The automatic step does not see the scale of the edges' matrices, and neither do gradients."""

import pytest
import torch

import graphattn as ga

H, D, XI, RANK = 2, 3, 4, 2
GRAPHS = {
    "window": lambda: ga.window_path_graph(6, 2),
    "list": lambda: ga.from_edge_index(torch.tensor([[0, 1, 2, 3, 5], [1, 2, 0, 5, 3]]), 6),
    "batch": lambda: ga.batch([ga.complete_graph(4), ga.from_mask(torch.zeros(2, 2).bool())]),
}
BACKENDS = ["reference", "structured", "native"]


def tensors(bias, dtype):
    generator = torch.Generator().manual_seed(0)
    shapes = (6, H, D), (6, 1, XI), (H, XI), (H,), (H, XI), (H,), (H, RANK, D, XI), (H, RANK, D)
    made = [torch.randn(shape, generator=generator) for shape in shapes]
    made[3] = made[3] + bias
    made[5] = made[5] + bias
    return [x.to(dtype).requires_grad_() for x in made]


def moved(given, graph, update, backend):
    u, hidden, *network = given
    parameters = ga.EdgeNetworkParameters(*network)
    return ga.consensus_update(
        u, u, hidden, hidden, parameters, graph, "auto", update=update, backend=backend
    )


def close(results, expected, tolerance):
    for x, y in zip(results, expected, strict=True):
        assert (x.double() - y).abs().max() <= tolerance * y.abs().max().clamp(min=1e-3)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("update", ["target", "energy"])
@pytest.mark.parametrize("bias", [-80.0, -60.0, -46.0, 0.0, 1e15, 1e30])
@pytest.mark.parametrize("name", GRAPHS)
def test_gradients_in_float32_are_those_of_float64_at_every_scale(name, bias, update, backend):
    graph = GRAPHS[name]()
    results = []
    for dtype in (torch.float64, torch.float32):
        given = tensors(bias, dtype)
        out = moved(given, graph, update, "reference" if dtype == torch.float64 else backend)
        results.append([out, *torch.autograd.grad(out.square().sum(), given)])
    close(results[1], results[0], 2e-4 if bias >= -60 else 1e-3)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("update", ["target", "energy"])
@pytest.mark.parametrize("bias", [-46.0, 1e15])
def test_second_derivatives_are_those_of_float64_at_every_scale(bias, update, backend):
    results = []
    for dtype in (torch.float64, torch.float32):
        given = tensors(bias, dtype)
        chosen = "reference" if dtype == torch.float64 else backend
        out = moved(given, GRAPHS["window"](), update, chosen)
        first = torch.autograd.grad(out.square().sum(), given, create_graph=True)
        results.append(torch.autograd.grad(sum(x.square().sum() for x in first), given))
    close(results[1], results[0], 2e-3)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("update", ["target", "energy"])
@pytest.mark.parametrize("bias", [-83.0, -88.0, -95.0, -102.0, -110.0])
def test_matrices_of_nearly_zero_move_nothing_or_little_and_have_finite_gradients(
    bias, update, backend
):
    given = tensors(0.0, torch.float32)
    for x in given[3], given[5]:
        x.data.fill_(bias)
    for x in given[2], given[4]:
        x.data.zero_()
    out = moved(given, GRAPHS["window"](), update, backend)
    for x in (out, *torch.autograd.grad(out.square().sum(), given)):
        assert x.isfinite().all()
    if bias < -90:
        assert torch.equal(out, given[0])


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("kind", ["target", "energy", "cross"])
def test_layers_train_wherever_their_scale_has_drifted(kind, backend):
    graph, results = ga.window_path_graph(6, 2), []
    for dtype in (torch.float64, torch.float32):
        torch.manual_seed(0)
        x = torch.randn(6, 4).to(dtype)
        if kind == "cross":
            layer = ga.nn.CrossConsensus(4, heads=2, step_size="auto", backend=backend).to(dtype)
        else:
            layer = ga.nn.SelfConsensus(
                4, heads=2, step_size="auto", update=kind, backend=backend
            ).to(dtype)
        with torch.no_grad():
            layer.edge_net.alpha_bias.fill_(-60)
            layer.edge_net.beta_bias.fill_(-60)
        out = layer(x, graph, x.flip(0)) if kind == "cross" else layer(x, graph)
        results.append([out, *torch.autograd.grad(out.square().sum(), list(layer.parameters()))])
    close(results[1], results[0], 2e-4)
