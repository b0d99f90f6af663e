"""Certificates: facts against plain eigenvalues, and an honest "not applicable"."""

import json
import math

import pytest
import torch

import graphattn as ga
from graphattn.spectral import Certificate, certify
from graphattn.spectral.certificates import layers
from graphattn.spectral.laplacians import linear_maps
from graphattn.spectral.matrix_weighted import spectrum_ends


def tokens(N, dim, seed=0):
    return torch.randn(N, dim, generator=torch.Generator().manual_seed(seed))


def layer(**options):
    torch.manual_seed(0)
    return ga.nn.SelfConsensus(12, 3, rank=2, edge_hidden=8, **options)


def matrix_of(consensus, x, graph):
    """One step with R held fixed, written out by autograd: [N D H, N D H], float64."""
    consensus, x = consensus.double(), x.double()
    x_, _, graph, valid = consensus.prepare(x, x, graph, None)
    hidden = consensus.edge_net.target_hidden(x_), consensus.edge_net.source_hidden(x_)
    rotations = consensus.rotations(x_, x_, graph, None)
    shape = len(x), consensus.heads, consensus.head_dim

    def step(u):
        u = u.view(shape)
        compared = consensus.rotate(u, u, rotations)
        return consensus.unfused(u, compared, hidden, graph, valid).flatten()

    return torch.autograd.functional.jacobian(step, torch.zeros(math.prod(shape)).double())


# Graphs.


def test_a_window_graph_holds_to_remark_4_2_and_its_numbers_are_those_of_the_functions():
    graph = ga.window_path_graph(80, window=3)
    certificate = certify(graph)
    assert certificate.sound
    numbers = certificate["Fiedler value"].numbers
    assert numbers["lambda_1"] == pytest.approx(ga.spectral.fiedler_value(graph), rel=1e-9)
    assert numbers["2 S"] < numbers["lambda_1"] < numbers["4 S"]
    step = certificate["step"].numbers
    assert step["1 / (2 lambda_max)"] == pytest.approx(ga.spectral.max_step_size(graph))


def test_bounds_are_claimed_for_windows_on_a_path_only():
    for graph in (
        ga.complete_graph(9),
        ga.window_cycle_graph(12, 2),
        ga.causal_window_graph(12, 3),
        ga.dilated_window_graph(12, 2, 3),
        ga.window_path_graph(8, window=4),  # 2 w >= N
    ):
        assert certify(graph)["Fiedler value"].status == "measured"


def test_a_graph_in_parts_has_no_rate_and_says_so():
    certificate = certify(ga.block_window_graph(12, 4), tokens(12, 2))
    for name in ("connected", "rate", "measured rate"):
        assert certificate[name].status == "not applicable"
    assert certificate["closed classes"].numbers["classes"] == 3
    assert certificate.sound


def test_a_causal_graph_does_not_bear_energy_updates():
    certificate = certify(ga.causal_window_graph(10, 4))
    assert certificate["energy updates"].status == "not applicable"
    assert certificate["closed classes"].numbers["classes"] == 1  # token 0


def test_a_signal_shrinks_at_the_predicted_rate():
    graph = ga.window_path_graph(30, window=4)
    fact = certify(graph, tokens(30, 5))["measured rate"]
    assert fact.status == "holds"
    assert fact.numbers["slowest step"] <= fact.numbers["predicted"] + 1e-9
    assert fact.numbers["last step"] == pytest.approx(fact.numbers["predicted"], rel=1e-2)
    eigenvalues = torch.linalg.eigvalsh(ga.spectral.laplacian(graph, layout="dense").double())
    assert fact.numbers["predicted"] == pytest.approx(
        float(1 - eigenvalues[1] / eigenvalues[-1]), abs=1e-6
    )


# Consensus layers.


@pytest.mark.parametrize("step_size", [0.001, "auto", "learned"])
@pytest.mark.parametrize("rope", [False, "isometric"])
def test_energy_layers_are_judged_by_their_smallest_eigenvalue(step_size, rope):
    graph, x = ga.window_path_graph(9, window=2), tokens(9, 12)
    consensus = layer(step_size=step_size, rope=rope)
    certificate = certify(consensus, x, graph=graph)
    fact = certificate["low-pass filter"]
    if rope is False:  # "isometric" is the same map in another basis
        smallest = torch.linalg.eigvalsh(matrix_of(consensus, x, graph))[0]
        assert fact.numbers["1 - 2 eta lambda_max"] == pytest.approx(float(smallest), abs=1e-7)
    assert fact.status == ("holds" if fact.numbers["1 - 2 eta lambda_max"] >= -1e-7 else "violated")
    assert certificate["constants stay"].status == "holds"
    if step_size == "auto":
        assert certificate.sound


def test_a_step_that_is_too_large_is_called_a_violation():
    graph, x = ga.complete_graph(20, self_loops=False), tokens(20, 12)
    certificate = certify(layer(step_size=0.5), x, graph=graph, measure=True)
    assert not certificate.sound
    assert certificate["low-pass filter"].status == "violated"
    assert certificate["energy falls"].status == "violated"
    assert certificate["mean stays"].status == "holds"
    assert certificate["rate"].status == "measured"  # the sandwich does not speak of it


@pytest.mark.parametrize("dense", [0, 600])
def test_the_slowest_mode_is_faster_than_the_sandwich_says(dense, monkeypatch):
    monkeypatch.setattr(spectrum_ends, "DENSE", dense)
    graph, x = ga.window_path_graph(9, window=2), tokens(9, 12)
    consensus = layer(step_size=0.01)
    fact = certify(consensus, x, graph=graph)["rate"]
    eigenvalues = torch.linalg.eigvalsh(matrix_of(consensus, x, graph))
    slowest = eigenvalues[eigenvalues < 1 - 1e-9].max()
    assert fact.status == "holds"
    assert fact.numbers["slowest mode"] == pytest.approx(float(slowest), abs=1e-7)
    assert fact.numbers["slowest mode"] <= fact.numbers["bound"] < 1


@pytest.mark.parametrize(
    ("options", "why"), [({"update": "target"}, "target"), ({"rope": True}, "Eq. 42")]
)
@pytest.mark.parametrize("dense", [0, 600])
def test_what_no_theorem_speaks_of_is_not_applicable_and_measured(options, why, dense, monkeypatch):
    monkeypatch.setattr(linear_maps, "DENSE", dense)
    graph, x = ga.window_path_graph(8, window=2), tokens(8, 12)
    consensus = layer(**options)
    certificate = certify(consensus, x, graph=graph, measure=True)
    unmeasured = certify(consensus, x, graph=graph)
    assert unmeasured.facts == certificate.facts[:3]
    for name in ("low-pass filter", "energy falls", "constants stay"):
        assert certificate[name].status == "not applicable"
        assert why in certificate[name].statement
    matrix = matrix_of(consensus, x, graph)
    numbers = certificate["map"].numbers
    assert numbers["norm"] == pytest.approx(float(torch.linalg.matrix_norm(matrix, 2)), rel=1e-4)
    radius = torch.linalg.eigvals(matrix).abs().max()
    assert numbers["spectral radius"] == pytest.approx(float(radius), rel=1e-4)


def test_eigenvalues_that_no_theorem_bounds_are_not_computed(monkeypatch):
    def refuse(*args):
        raise AssertionError("computed though no theorem applies")

    for name in ("spectral_radius", "largest_singular_value", "smallest_eigenvalue"):
        monkeypatch.setattr(layers, name, refuse)
    for options in ({"update": "target"}, {"rope": True}, {"step_size": "auto"}):
        arguments = layer(**options), tokens(8, 12), ga.window_path_graph(8, window=2)
        assert certify(*arguments).sound in (True, None)
        with pytest.raises(AssertionError, match="no theorem"):
            certify(*arguments, measure=True)


def test_without_edges_a_layer_moves_nothing_and_nothing_is_violated():
    alone = ga.from_edge_index(torch.empty(2, 0, dtype=torch.int64), 5)
    for step_size in (0.1, "auto"):
        certificate = certify(layer(step_size=step_size), tokens(5, 12), graph=alone)
        assert certificate.sound
        assert certificate["low-pass filter"].numbers["1 - 2 eta lambda_max"] == pytest.approx(1)


def test_a_layer_is_left_as_it_was():
    graph, x = ga.window_path_graph(8, window=2), tokens(8, 12)
    consensus = layer()
    before = {name: value.clone() for name, value in consensus.state_dict().items()}
    certify(consensus, x, graph=graph)
    assert consensus.training
    for name, value in consensus.state_dict().items():
        assert value.dtype == torch.float32
        assert torch.equal(value, before[name])


# Attention layers.


def test_attention_rows_are_averages_and_closed_classes_are_counted():
    x = torch.cat([torch.zeros(6, 8), torch.full((6, 8), 50.0)]) + tokens(12, 8)
    torch.manual_seed(0)
    krause = ga.nn.KrauseAttention(8, 2, top_k=3)
    with torch.no_grad():
        krause.query_proj.weight.copy_(torch.eye(8))
        krause.key_proj.weight.copy_(torch.eye(8))
    certificate = certify(krause, x, graph=ga.complete_graph(12))
    assert certificate["rows are averages"].status == "holds"
    assert min(certificate["eigenvalue 1"].numbers.values()) >= 2
    assert certificate["energy falls"].status == "not applicable"


# The certificate itself, and bad input.


def test_a_certificate_prints_and_is_json():
    certificate = certify(ga.window_path_graph(40, window=1), tokens(40, 1))
    assert "[holds] Fiedler value" in str(certificate)
    read = json.loads(certificate.to_json())
    assert read["sound"] is True
    assert [fact["name"] for fact in read["facts"]] == [fact.name for fact in certificate.facts]
    assert isinstance(certificate, Certificate)
    with pytest.raises(
        KeyError, match="there is no fact 'no such fact' in this certificate, whose facts are"
    ):
        certificate["no such fact"]


def test_bad_input_is_named():
    graph, x = ga.window_path_graph(8, window=2), tokens(8, 12)
    with pytest.raises(ValueError, match="graph must be given to certify a module"):
        certify(layer(), x)
    with pytest.raises(ValueError, match="x must be given to certify a module"):
        certify(layer(), graph=graph)
    with pytest.raises(ValueError, match=r"x must have shape \[\*, 8, 12\]"):
        certify(layer(), tokens(7, 12), graph=graph)
    with pytest.raises(ValueError, match=r"x must be a signal of shape \[8\]"):
        certify(graph, tokens(7, 2))
    bad = tokens(8, 12)
    bad[3, 1] = math.nan
    for subject in (graph, layer()):
        with pytest.raises(ValueError, match=r"x must be finite, got x\[3, 1\] = nan"):
            certify(subject, bad, graph=None if subject is graph else graph)
    with pytest.raises(ValueError, match="graph must be None if the first argument is a graph"):
        certify(graph, graph=graph)
    with pytest.raises(ValueError, match="got Linear"):
        certify(torch.nn.Linear(3, 3), x, graph=graph)
    with pytest.raises(ValueError, match="context must be given to certify a CrossConsensus"):
        certify(ga.nn.CrossConsensus(12, 3), x, graph=graph)
    with pytest.raises(ValueError, match="TokenGraph"):
        certify(torch.eye(3))
