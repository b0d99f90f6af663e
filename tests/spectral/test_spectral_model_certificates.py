"""Certificates at model size, of blocks, encoders, batches and modules of other people."""

import json
import time

import pytest
import threadpoolctl
import torch
from torch import nn

import graphattn as ga
from graphattn.spectral import certify, eigenvalues
from graphattn.spectral.certificates import facts, frozen_steps
from graphattn.spectral.matrix_weighted import spectrum_ends
from graphattn.spectral.matrix_weighted.block_laplacian import BlockLaplacian


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def consensus(dim=12, heads=3, **options):
    torch.manual_seed(0)
    return ga.nn.SelfConsensus(dim, heads, **{"rank": 2, "edge_hidden": 8, **options})


def edge_matrices(layer, x, graph):
    """R [E, H, D, D] in float64, by the public operation."""
    net, x = layer.edge_net, x.double()
    with torch.no_grad():
        return ga.consensus_edge_matrices(
            net.target_hidden(x), net.source_hidden(x), net.second_layer(), graph
        )


# Model size.


@pytest.mark.long
@pytest.mark.parametrize(
    ("dim", "heads", "graph"),
    [
        (768, 12, ga.window_path_graph(12, window=2)),
        (128, 4, ga.window_path_graph(24, window=2)),
        (96, 2, ga.complete_graph(10)),
    ],
)
def test_numbers_at_model_width_are_those_of_dense_eigenvalues(dim, heads, graph):
    layer, x = (
        consensus(dim, heads, rank=4, edge_hidden=32, step_size=0.03),
        drawn(graph.num_targets, dim),
    )
    certificate = certify(layer, x, graph=graph, measure=True)
    R, D = edge_matrices(layer.double(), x, graph), dim // heads
    lowest, slowest = 1.0, 0.0
    for h in range(heads):
        L = ga.spectral.laplacian(graph, R[:, h]).toarray()
        kept = 1 - 2 * 0.03 * torch.linalg.eigvalsh(torch.from_numpy(L))  # descending
        lowest = min(lowest, float(kept[-1]))
        slowest = max(slowest, float(kept[D]), abs(float(kept[-1])))
    filter_, rate = certificate["low-pass filter"].numbers, certificate["rate"].numbers
    assert filter_["1 - 2 eta lambda_max"] == pytest.approx(lowest, abs=1e-9)
    assert rate["slowest mode"] == pytest.approx(slowest, abs=1e-9)
    assert 0 < filter_["error bound"] < 1e-9
    assert 0 < rate["error bound"] < 1e-9


@pytest.mark.long
def test_a_layer_of_twelve_heads_of_64_takes_seconds():
    torch.manual_seed(0)
    layer, graph = ga.nn.SelfConsensus(768, heads=12), ga.window_path_graph(128, window=2)
    start = time.process_time()  # of this process: other work on the machine does not count
    certificate = certify(layer, drawn(128, 768), graph=graph, measure=True)
    assert time.process_time() - start < 10
    assert certificate["rate"].numbers["error bound"] < 1e-9


def test_threads_wait_for_nobody_and_are_given_back(monkeypatch):
    """One thread while a layer is certified: beside other work, two take many times as long."""
    seen, before = [], torch.get_num_threads()
    torch.set_num_threads(2)
    apply = BlockLaplacian.apply

    def watched(self, u):
        pools = threadpoolctl.ThreadpoolController().info()
        blas = [pool["num_threads"] for pool in pools if pool["user_api"] == "blas"]
        seen.append((torch.get_num_threads(), *blas))
        return apply(self, u)

    monkeypatch.setattr(BlockLaplacian, "apply", watched)
    try:
        certify(consensus(), drawn(9, 12), graph=ga.window_path_graph(9, 2))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert {count for counts in seen for count in counts} == {1}


def test_a_graph_is_solved_once(monkeypatch):
    calls = []
    for name in ("slowest_pair", "_max_eigenvalue_from_above"):
        solve = getattr(eigenvalues, name)

        def counted(*given, solve=solve, name=name, **options):
            calls.append(name)
            return solve(*given, **options)

        for module in (eigenvalues, ga.spectral.filters):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, counted)
    graph = ga.window_path_graph(3000, window=2)
    fact = certify(graph)["rate"]
    assert calls.count("slowest_pair") == 1
    assert calls.count("_max_eigenvalue_from_above") <= 1
    steps = ga.spectral.steps_until_consensus(graph, ga.spectral.max_step_size(graph))
    assert fact.numbers["steps until a thousandth is left"] == steps


def test_wide_graphs_say_residual_where_counting_costs_too_much(monkeypatch):
    monkeypatch.setattr("graphattn.spectral.matrix_weighted.block_laplacian.COUNTABLE", 0)
    monkeypatch.setattr("graphattn.spectral.matrix_weighted.spectrum_ends.DENSE", 0)
    graph, x = ga.complete_graph(12), drawn(12, 12)
    numbers = certify(consensus(), x, graph=graph, measure=True)["rate"].numbers
    assert "error bound" not in numbers
    assert numbers["residual"] < 1e-6


# Maps without a theorem.


@pytest.mark.long
def test_on_a_causal_graph_the_spectral_radius_is_that_of_the_diagonal_blocks():
    graph, x = ga.causal_window_graph(20, window=4), drawn(20, 12)
    for rope in (False, True):
        layer = consensus(update="target", step_size=0.4, rope=rope)
        radius = certify(layer, x, graph=graph, measure=True)["map"].numbers["spectral radius"]
        layer = layer.double()
        net, tokens = layer.edge_net, x.double()
        hidden = net.target_hidden(tokens), net.source_hidden(tokens)

        def step(u, layer=layer, hidden=hidden, tokens=tokens):
            u = u.view(20, 3, 4)
            pair = layer.rotate(u, u, layer.rotations(tokens, tokens, graph, None))
            network = layer.edge_net.second_layer()
            moved = ga.consensus_update(
                u, pair[1], *hidden, network, graph, 0.4, update="target", disagreement=pair
            )
            return moved.flatten()

        J = torch.autograd.functional.jacobian(step, torch.zeros(240).double())
        blocks = J.view(20, 3, 4, 20, 3, 4).diagonal(dim1=0, dim2=3)  # [H, D, H, D, N]
        expected = max(
            float(torch.linalg.eigvals(blocks[h, :, h, :, i]).abs().max())
            for h in range(3)
            for i in range(20)
        )
        assert radius == pytest.approx(expected, rel=1e-9)


def test_a_layer_with_its_own_step_claims_no_theorem():
    class Doubled(ga.nn.SelfConsensus):
        def mix(self, u, compared, hidden, graph, valid):
            return 2 * super().mix(u, compared, hidden, graph, valid)

    torch.manual_seed(0)
    layer, graph, x = Doubled(12, 3, edge_hidden=8), ga.window_path_graph(8, 2), drawn(8, 12)
    certificate = certify(layer, x, graph=graph, measure=True)
    for name in ("low-pass filter", "energy falls", "constants stay"):
        assert certificate[name].status == "not applicable"
    assert certificate["map"].numbers["norm"] == pytest.approx(2, abs=0.5)


# Modules.


def test_a_block_is_certified_on_what_reaches_its_layer():
    block, graph, x = ga.nn.PreNormBlock(consensus()), ga.window_path_graph(9, 2), drawn(9, 12)
    certificate = certify(block, x, graph=graph)
    assert list(certificate.parts) == ["mixer"]
    alone = certify(block.mixer, block.mixer_norm(x).detach(), graph=graph)
    for fact in alone.facts:
        part = certificate.parts["mixer"][fact.name]
        assert part.status == certificate[fact.name].status == fact.status
        for name, value in fact.numbers.items():
            assert part.numbers[name] == pytest.approx(value, abs=1e-5)


def test_an_encoder_is_certified_layer_by_layer_on_its_activations():
    torch.manual_seed(0)
    model = ga.models.SequenceEncoder(
        11, 12, depth=4, heads=3, mixer="mix", rope="isometric", edge_hidden=8
    )
    tokens = torch.randint(11, (2, 15))
    certificate = certify(model, tokens)
    assert list(certificate.parts) == [f"blocks.{i}.mixer" for i in range(4)]
    assert certificate["rows are averages"].status == "holds"
    # The last layer, on what the blocks before it give, written out.
    x = model.embedding(tokens)
    for block, graph in zip(model.blocks[:3], model.graphs(15), strict=False):
        x = block(x, graph)
    x = model.blocks[3].mixer_norm(x).detach()
    last = certificate.parts["blocks.3.mixer"]
    assert list(last.parts) == ["x[0]", "x[1]"]
    lowest = []
    for b in range(2):
        alone = certify(model.blocks[3].mixer, x[b], graph=model.graphs(15)[3])
        numbers = alone["low-pass filter"].numbers
        lowest.append(numbers["1 - 2 eta lambda_max"])
        assert last.parts[f"x[{b}]"]["low-pass filter"].numbers[
            "1 - 2 eta lambda_max"
        ] == pytest.approx(lowest[b], abs=1e-5)
    worst = last["low-pass filter"].numbers["1 - 2 eta lambda_max"]
    assert worst == pytest.approx(min(lowest), abs=1e-5)
    assert model.training
    assert next(model.parameters()).dtype == torch.float32
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_module_of_someone_else_is_searched_for_layers():
    class Mine(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.ModuleList([consensus(step_size="auto"), ga.nn.KrauseAttention(12, 3)])

        def forward(self, x, graph):
            for layer in self.inner:
                x = x + layer(x, graph)
            return self.inner[0](x, graph)  # called again

    certificate = certify(Mine(), drawn(9, 12), graph=ga.window_path_graph(9, 2))
    assert list(certificate.parts) == ["inner.0", "inner.1", "inner.0, call 2"]
    assert certificate.sound


@pytest.mark.long
@pytest.mark.parametrize("tokens", [9, 90])
def test_a_module_without_our_layers_is_measured_by_its_derivative(tokens):
    class Average(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x, graph):
            source, target = graph.edge_index
            return torch.zeros_like(x).index_add(0, target, self.inner(x).tanh()[source])

    torch.manual_seed(0)
    module, graph, x = Average(), ga.window_cycle_graph(tokens, 1), drawn(tokens, 8)
    certificate = certify(module, x, graph=graph, measure=True)
    assert certificate["low-pass filter"].status == "not applicable"
    J = torch.autograd.functional.jacobian(lambda u: module.double()(u, graph), x.double())
    J = J.view(8 * tokens, 8 * tokens)
    numbers = certificate["map"].numbers
    assert numbers["norm"] == pytest.approx(float(torch.linalg.matrix_norm(J, 2)), rel=1e-6)
    radius = float(torch.linalg.eigvals(J).abs().max())
    assert numbers["spectral radius"] == pytest.approx(radius, rel=1e-4)


# Batches.


def test_a_batch_is_certified_per_sequence_and_by_its_worst():
    layer, graph, x = consensus(), ga.window_path_graph(9, 2), drawn(2, 2, 9, 12)
    certificate = certify(layer, x, graph=graph, measure=True)
    assert list(certificate.parts) == ["x[0]", "x[1]", "x[2]", "x[3]"]
    alone = [certify(layer, one, graph=graph, measure=True) for one in x.view(4, 9, 12)]
    for name, worst in (("low-pass filter", min), ("rate", max)):
        number = {"low-pass filter": "1 - 2 eta lambda_max", "rate": "slowest mode"}[name]
        values = [one[name].numbers[number] for one in alone]
        assert certificate[name].numbers[number] == pytest.approx(worst(values), abs=1e-9)
        assert f"x[{values.index(worst(values))}]" in certificate[name].statement


def test_one_violation_in_a_batch_is_a_violation():
    layer, graph = consensus(step_size=0.2), ga.complete_graph(9)
    x = torch.stack([torch.zeros(9, 12), 30 * drawn(9, 12)])
    with torch.no_grad():
        layer.edge_net.alpha_bias.fill_(-6)
        layer.edge_net.beta_bias.fill_(-4)
    certificate = certify(layer, x, graph=graph, measure=True)
    states = [part["low-pass filter"].status for part in certificate.parts.values()]
    assert states == ["holds", "violated"]
    assert certificate["low-pass filter"].status == "violated"
    assert not certificate.sound


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("step_size", [0.02, "auto"])
def test_a_packed_batch_is_certified_sequence_by_sequence(listed, step_size):
    graphs = [ga.window_path_graph(7, 2), ga.complete_graph(5, self_loops=False)]
    packed = ga.batch(graphs)
    if listed:
        packed = ga.batch([ga.from_edge_index(g.edge_index, g.num_tokens) for g in graphs])
    layer, x = consensus(step_size=step_size), drawn(12, 12)
    certificate = certify(layer, x, graph=packed, measure=True)
    assert list(certificate.parts) == ["sequence 0", "sequence 1"]
    pieces = x.split([7, 5])
    for part, piece, graph in zip(certificate.parts.values(), pieces, graphs, strict=True):
        alone = certify(layer, piece, graph=graph, measure=True)["rate"]
        slowest = part["rate"].numbers["slowest mode"]
        assert slowest == pytest.approx(alone.numbers["slowest mode"], abs=1e-9)
        assert slowest < 1


def test_padding_is_no_part_of_a_sequence_and_positions_are_those_given():
    layer, graph = consensus(step_size="auto", rope="isometric"), ga.window_path_graph(9, 2)
    x = drawn(2, 9, 12)
    x[1, 6:] = float("nan")
    valid = torch.arange(9) < torch.tensor([[9], [6]])
    positions = torch.arange(9) * 3
    certificate = certify(layer, x, graph=graph, valid=valid, positions=positions)
    alone = certify(layer, x[1, :6], graph=ga.window_path_graph(6, 2), positions=positions[:6])
    for fact in alone.facts:
        for name, value in fact.numbers.items():
            part = certificate.parts["x[1]"][fact.name].numbers[name]
            assert part == pytest.approx(value, abs=1e-9)


# How it looks.


def test_a_certificate_is_a_table_at_the_prompt():
    certificate = certify(ga.window_path_graph(40, window=1))
    lines = repr(certificate).splitlines()
    assert lines[0] == "TokenGraph(num_tokens=40, num_edges=78, structure=Band)"
    assert lines[1].split()[:3] == ["fact", "status", "numbers"]
    assert max(map(len, lines)) <= 120
    for fact in certificate.facts:
        row = next(line for line in lines if line.startswith(fact.name))
        assert fact.status in row
        for name, value in fact.numbers.items():
            assert f"{name} {value:.6g}" in repr(certificate)


def test_a_certificate_is_a_table_in_a_notebook_and_escapes_what_it_shows():
    import xml.etree.ElementTree as ET

    fact = facts.Fact("a < b", "violated", "x & y <script>", {"<n>": 1.0}, '"paper"')
    inner = facts.Certificate("part > 0", (fact,))
    html = facts.worst_of("<b>subject</b>", {"blocks.<0>": inner})._repr_html_()
    table = ET.fromstring(html.replace("<br>", "<br/>"))  # well-formed
    assert table.tag == "table"
    assert "<script>" not in html
    assert "<b>" not in html
    text = "".join(table.itertext())
    for shown in ("a < b", "violated", "x & y <script>", "<n> 1", "blocks.<0>: part > 0"):
        assert shown in text
    assert len(table.findall(".//tbody")) == 2


def test_parts_are_printed_and_in_the_json():
    layer, graph = consensus(), ga.window_path_graph(9, 2)
    certificate = certify(layer, drawn(3, 9, 12), graph=graph)
    assert str(certificate).count("low-pass filter") == 4
    assert "the worst of 3" in repr(certificate)
    read = json.loads(certificate.to_json())
    assert [fact["name"] for fact in read["parts"]["x[2]"]["facts"]] == [
        fact.name for fact in certificate.facts
    ]
    assert certificate._repr_html_().count("low-pass filter") == 4


# Bad input.


def test_modules_that_cannot_be_certified_are_named():
    block, graph, x = ga.nn.PreNormBlock(consensus()), ga.window_path_graph(9, 2), drawn(9, 12)
    with pytest.raises(ValueError, match="graph must be given to certify a module"):
        certify(block, x)
    with pytest.raises(ValueError, match="x must be given to certify a module"):
        certify(block, graph=graph)
    with pytest.raises(ValueError, match=r"forward\(x, graph\), got Sequential"):
        certify(nn.Sequential(block), x, graph=graph)
    with pytest.raises(ValueError, match=r"x must have shape \[\*, 9, 12\].*got \[2, 8, 12\]"):
        certify(block.mixer, drawn(2, 8, 12), graph=graph)
    with pytest.raises(ValueError, match="valid must be None if the first argument is a graph"):
        certify(graph, valid=torch.ones(9, dtype=torch.bool))
    with pytest.raises(ValueError, match="leaks the future"):
        certify(block, x, graph=ga.causal_graph(9))


# What the layer's page says first.


@pytest.mark.parametrize(
    ("dim", "heads", "tokens"),
    [(16, 2, 30), (64, 4, 64), pytest.param(64, 4, 2048, marks=pytest.mark.long)],
)
@pytest.mark.parametrize("seed", range(3))
def test_the_default_step_violates_the_low_pass_condition_as_the_docs_say(dim, heads, tokens, seed):
    torch.manual_seed(seed)
    layer, graph = ga.nn.SelfConsensus(dim, heads), ga.window_path_graph(tokens, window=2)
    with torch.no_grad():
        step = frozen_steps.FrozenStep(layer.double(), drawn(tokens, dim).double(), graph, None)
        lowest = 1 - spectrum_ends.largest_eigenvalue(step.heads()).value
    assert -0.4 < lowest < -0.05
    assert "-0.07 to -0.31" in ga.nn.SelfConsensus.__doc__
