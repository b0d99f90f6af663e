"""Certificates of weighted graphs, of steps towards other tokens and of linear attention."""

import json

import numpy as np
import pytest
import torch

import graphattn as ga
from graphattn.spectral import Certificate, certify
from graphattn.spectral.certificates.facts import Fact


def tokens(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# Graphs with weights.


def test_the_numbers_of_a_weighted_graph_are_those_of_its_laplacian():
    graph = ga.union(ga.window_path_graph(20, 2), ga.longformer_graph(20, 1, (0,)))
    weight = tokens(graph.num_edges).exp()
    spectrum = np.linalg.eigvalsh(ga.spectral.laplacian(graph, weight).toarray())
    certificate = certify(graph, tokens(20, 3), edge_weight=weight)
    assert certificate["Fiedler value"].numbers["lambda_1"] == pytest.approx(spectrum[1], rel=1e-9)
    assert certificate["step"].numbers["lambda_max"] == pytest.approx(spectrum[-1], rel=1e-9)
    omega = 1 - spectrum[1] / spectrum[-1]
    assert certificate["measured rate"].status == "holds"
    assert certificate["measured rate"].numbers["last step"] == pytest.approx(omega, rel=1e-3)
    before = certificate["energy falls"].numbers["before"]
    assert before == pytest.approx(float(ga.spectral.energy(graph, tokens(20, 3), weight)))
    assert certificate.sound


def test_weights_divide_a_graph_and_take_its_bounds_away():
    graph = ga.window_path_graph(10, 1)
    source, target = graph.edge_index
    weight = ((source < 5) == (target < 5)).double()  # no way between two halves
    certificate = certify(graph, edge_weight=weight)
    assert certificate["connected"].status == "not applicable"
    assert certificate["closed classes"].numbers["classes"] == 2
    assert certify(graph, edge_weight=torch.ones(18))["Fiedler value"].status == "measured"
    assert certify(graph)["Fiedler value"].status == "holds"
    with pytest.raises(ValueError, match="edge_weight must"):
        certify(graph, edge_weight=torch.ones(3))
    layer = ga.nn.SelfConsensus(4, 2, edge_hidden=4)
    with pytest.raises(ValueError, match="edge_weight must be None for a layer"):
        certify(layer, tokens(10, 4), graph, edge_weight=weight)


# How much is certified.


def test_a_certificate_of_nothing_is_not_sound():
    layer = ga.nn.SelfConsensus(8, 2, edge_hidden=4, rope=True)
    certificate = certify(layer, tokens(9, 8), ga.window_path_graph(9, 2))
    assert certificate.sound is None
    assert (certificate.num_checked, certificate.num_facts) == (0, 3)  # "map" is no theorem
    assert "0 of 3 theorems apply, nothing is certified" in str(certificate)
    content = json.loads(certificate.to_json())
    assert (content["sound"], content["num_checked"], content["num_facts"]) == (None, 0, 3)


def test_theorems_are_counted_over_all_parts():
    holds, not_here = Fact("a", "holds", ""), Fact("b", "not applicable", "")
    violated, measured = Fact("c", "violated", ""), Fact("d", "measured", "")
    parts = {
        "one": Certificate("one", (holds, not_here, measured)),
        "two": Certificate("two", (), {"x": Certificate("x", (holds,))}),
    }
    whole = Certificate("whole", (holds, not_here), parts)
    assert (whole.num_checked, whole.num_facts, whole.sound) == (2, 3, True)
    wrong = Certificate("wrong", (violated, holds))
    assert (wrong.num_checked, wrong.num_facts, wrong.sound) == (2, 2, False)
    for shown in (repr(wrong), str(wrong), wrong._repr_html_()):
        assert "2 of 2 theorems apply, 1 violated" in shown


def test_a_model_shows_its_progress(capsys):
    model = ga.models.SequenceEncoder(9, 8, depth=2, heads=2, mixer="dot")
    certify(model, torch.randint(9, (1, 6)), progress=True)
    assert "certify layers" in capsys.readouterr().err
    certify(model, torch.randint(9, (1, 6)))
    assert capsys.readouterr().err == ""  # this is no terminal


# Consensus towards other tokens.


def cross(**options):
    torch.manual_seed(0)
    layer = ga.nn.CrossConsensus(8, 2, context_dim=6, edge_hidden=4, rank=2, **options)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    return layer.double()


def jacobian(layer, x, context, graph):
    """The matrix of one step by its states, R held fixed, from autograd; [N H D, N H D]."""
    hidden = layer.edge_net.target_hidden(x), layer.edge_net.source_hidden(context)
    u = layer.split(layer.source_proj(x), 2).detach()
    v = layer.split(layer.context_proj(context), 2).detach()
    compared = layer.rotate(u, v, layer.rotations(x, context, graph, None))
    shape = u.shape

    def step(states):
        states = states.view(shape)
        return layer.unfused(states, (states, compared[1]), hidden, graph, (None, None)).flatten()

    return torch.autograd.functional.jacobian(step, compared[0].flatten())


@pytest.mark.parametrize("rope", [False, "isometric"])
@pytest.mark.parametrize("step_size", [0.05, 0.1, 3.0, "auto", "learned"])
def test_a_step_towards_other_tokens_is_judged_by_its_largest_eigenvalue(step_size, rope):
    layer, x, context = cross(step_size=step_size, rope=rope), tokens(7, 8), tokens(9, 6, seed=1)
    graph = ga.knn_graph(tokens(7, 2), 4, source=tokens(9, 2, seed=1))
    certificate = certify(layer, x, graph, context=context)
    least = torch.linalg.eigvalsh(jacobian(layer, x, context, graph)).min()
    fact = certificate["no overshoot"]
    assert fact.numbers["1 - eta lambda_max"] == pytest.approx(float(least), abs=1e-9)
    assert fact.status == ("holds" if least >= -1e-7 else "violated")
    numbers = certificate["energy falls"].numbers
    assert (certificate["energy falls"].status == "holds") == (
        numbers["after"] <= numbers["before"] * (1 + 1e-7)
    )
    assert least < -1 or certificate["energy falls"].status == "holds"
    assert least > 0 or step_size != "auto"
    assert certificate["constants stay"].status == "holds"
    assert (certificate.num_checked, certificate.num_facts) == (3, 3)


def test_the_energy_towards_other_tokens_is_its_definition():
    layer, x, context = cross(step_size=0.1), tokens(5, 8), tokens(4, 6, seed=1)
    graph = ga.bipartite_complete_graph(5, 4)
    u = layer.split(layer.source_proj(x), 2)
    v = layer.split(layer.context_proj(context), 2)
    R = ga.consensus_edge_matrices(
        layer.edge_net.target_hidden(x),
        layer.edge_net.source_hidden(context),
        layer.edge_net.second_layer(),
        graph,
    )
    source, target = graph.edge_index
    d = u[target] - v[source]
    expected = 0.5 * torch.einsum("ehd,ehdc,ehc->", d, R, d)
    numbers = certify(layer, x, graph, context=context)["energy falls"].numbers
    assert numbers["before"] == pytest.approx(float(expected), rel=1e-9)


def test_what_is_no_gradient_step_towards_other_tokens_is_not_certified():
    class Halved(ga.nn.CrossConsensus):
        def message(
            self, u_i, u_j, hidden_i, hidden_j, valid_i, valid_j, edge_hidden=None
        ):  # pragma: no cover
            return 0.5 * super().message(
                u_i, u_j, hidden_i, hidden_j, valid_i, valid_j, edge_hidden
            )

    x, context, graph = tokens(5, 8), tokens(4, 6, seed=1), ga.bipartite_complete_graph(5, 4)
    certificate = certify(cross(rope=True), x, graph, context=context)
    assert certificate.sound is None
    assert "Eq. 43" in certificate["energy falls"].statement
    torch.manual_seed(0)
    halved = Halved(8, 2, context_dim=6, edge_hidden=4)
    certificate = certify(halved, x, graph, context=context)
    assert certificate.sound is None
    assert "overrides message()" in certificate["energy falls"].statement


def test_entries_and_padding_of_two_tracks_are_certified_each_by_itself():
    layer, graph = cross(step_size=0.1, rope="isometric"), ga.bipartite_complete_graph(5, 4)
    x, context = tokens(2, 5, 8), tokens(2, 4, 6, seed=1)
    valid = torch.ones(2, 5).bool(), torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]).bool()
    context[1, 2:] = torch.nan
    whole = certify(layer, x, graph, context=context, valid=valid)
    alone = certify(layer, x[0], graph, context=context[0])
    short = certify(layer, x[1], ga.bipartite_complete_graph(5, 2), context=context[1, :2])
    assert list(whole.parts) == ["x[0]", "x[1]"]
    for part, mask in ((whole.parts["x[0]"], alone), (whole.parts["x[1]"], short)):
        for fact in mask.facts:
            assert part[fact.name].numbers == pytest.approx(dict(fact.numbers), rel=1e-9, abs=1e-12)


def test_sources_of_a_step_towards_other_tokens_are_needed():
    with pytest.raises(ValueError, match=r"context must be given .* \[\*, M, 6\] .* got NoneType"):
        certify(cross(), tokens(5, 8), ga.bipartite_complete_graph(5, 4))


# Linear attention.


@pytest.mark.parametrize(
    ("options", "status"),
    [({}, "holds"), ({"eps": 0.1}, "not applicable"), ({"rope": True}, "not applicable")],
    ids=str,
)
def test_rows_of_linear_attention_are_averages(options, status):
    torch.manual_seed(0)
    layer = ga.nn.LinearAttention(8, 2, **options)
    certificate = certify(layer, tokens(9, 8), ga.causal_graph(9))
    assert certificate["rows are averages"].status == status
    if status == "holds":
        assert certificate["eigenvalue 1"].numbers == {"head 0": 1.0, "head 1": 1.0}
        model = ga.models.SequenceEncoder(9, 8, depth=2, heads=2, mixer="linear", rope=False)
        assert certify(model, torch.randint(9, (2, 6))).num_checked == 8
