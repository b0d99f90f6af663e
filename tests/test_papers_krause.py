"""Experiments about Krause attention: their judgements, and what they measure."""

import gzip
import importlib
import statistics
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

import graphattn as ga

SCRIPTS = Path(__file__).resolve().parents[1] / "examples" / "papers"


@pytest.fixture(autouse=True)
def _scripts_are_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))


def script(name: str) -> ModuleType:
    return importlib.import_module(name)


# What scripts share.


def test_losses_in_time_lie_on_the_curve_of_each_run() -> None:
    costs = script("costs")
    rows = [
        {"arm": arm, "status": "finished", "step": 20, "curve": [(10, 4.0), (20, last)]}
        for arm, last in (("slow", 2.0), ("fast", 3.0))
    ]
    found = costs.losses_in_time(rows, {"slow": 0.2, "fast": 0.15})
    assert found["fast"] == [3.0]  # all 20 steps, in 3 s
    assert found["slow"] == pytest.approx([3.0])  # 15 steps


def test_calls_take_turns() -> None:
    order = []
    calls = {name: lambda name=name: order.append(name) for name in "ab"}
    assert set(script("costs").in_turns(calls, 2)) == {"a", "b"}
    assert order == ["a", "b", "a", "b"]


# krause_images.


@pytest.mark.parametrize(
    ("krause", "linear", "speed", "verdict"),
    [
        ([1.0, 1.1, 1.0], [1.5, 1.5, 1.6], 12.0, "held"),
        ([1.0, 1.1, 1.0], [1.5, 1.5, 1.6], 10.4, "not held"),  # not fast enough
        ([1.0, 1.1, 1.0], [0.9, 1.0, 0.9], 12.0, "not held"),  # linear attention is better
        ([1.0, 1.5, 2.0], [2.0, 2.0, 1.9], 12.0, "inconclusive"),  # within a deviation
        ([1.0, 1.1], [1.5, 1.5, 1.6], 12.0, "open"),
    ],
)
def test_images_are_judged_by_bits_and_by_speed(krause, linear, speed, verdict) -> None:
    images = script("krause_images")
    bits = {"standard": [1.8, 1.9, 1.9], "krause": krause, "linear": linear}
    speeds = {"standard": 10.0, "krause": speed, "linear": 20.0}
    equal = {arm: [2.0 * bit for bit in own] for arm, own in bits.items()}
    assert images.judged(bits, equal, speeds)[0] == verdict
    if verdict == "held":  # fewer bits at equal steps are not enough
        equal["krause"] = [9.0] * 3
        assert images.judged(bits, equal, speeds)[0] == "not held"


def test_smaller_images_are_averages_and_can_be_read(tmp_path) -> None:
    pixels = torch.randint(256, (3, 28, 28), dtype=torch.uint8)
    data = tmp_path / "data"
    data.mkdir()
    sizes = b"".join(n.to_bytes(4, "big") for n in pixels.shape)
    for name, content in (
        ("t10k-images-idx3-ubyte.gz", bytes([0, 0, 8, 3]) + sizes + pixels.numpy().tobytes()),
        ("t10k-labels-idx1-ubyte.gz", bytes([0, 0, 8, 1, 0, 0, 0, 3, 7, 2, 1])),
    ):
        (data / name).write_bytes(gzip.compress(content))
    folder = script("krause_images").smaller_images(data, tmp_path)
    corpus = ga.data.load_corpus(folder)
    found = ga.data.read_idx(folder / "t10k-images-idx3-ubyte")
    assert corpus.image_shape == (1, 14, 14)
    exact = pixels.double().view(3, 14, 2, 14, 2).mean((2, 4))
    assert (found - exact).abs().max() <= 0.5


# krause_sinks and sinks_closed_classes.


def sink_runs(arm: str, head: float, loss: float, count: int = 3):
    return [{"arm": arm, "head": [head], "loss": loss} for _ in range(count)]


@pytest.mark.parametrize(
    ("without", "head", "loss", "count", "verdict"),
    [
        (0.5, 0.3, 2.01, 3, "held"),
        (0.5, 0.45, 2.0, 3, "not held"),  # falls too little
        (0.5, 0.3, 2.03, 3, "not held"),  # at a worse loss
        (0.1, 0.03, 2.0, 3, "inconclusive"),  # there was no sink
        (0.5, 0.3, 2.0, 2, "open"),
    ],
)
def test_a_sink_must_be_there_and_fall_at_equal_loss(without, head, loss, count, verdict) -> None:
    runs = sink_runs("continued", without, 2.0) + sink_runs("shortcut", head, loss, count)
    assert script("krause_sinks").judged(runs)[0] == verdict


def test_all_windows_begin_with_the_mark(tmp_path, monkeypatch) -> None:
    sinks = script("krause_sinks")
    monkeypatch.setattr(sinks, "WINDOWS", 40)
    (tmp_path / "text").mkdir()
    (tmp_path / sinks.FILE).write_text("To be, or not to be. " * 300, encoding="utf-8")
    data = str(sinks.marked_text(tmp_path, tmp_path / "work"))
    made = ga.train.prepare(ga.train.RunConfig(**sinks.SHARED, data=data))
    mark = int(made.tokenizer.encode(sinks.MARK)[0])
    assert (len(made.train), len(made.validation)) == (36, 2)
    for part in (made.train, made.validation):
        for example in part:
            assert (example["tokens"] == mark).nonzero().flatten().tolist() == [0]


def test_a_shortcut_starts_with_the_weights_of_the_layer(tmp_path, monkeypatch) -> None:
    sinks = script("krause_sinks")
    base = ga.models.CausalLM(9, 16, depth=2, heads=2)
    monkeypatch.setattr(sinks, "base_folder", lambda work, seed: work)
    monkeypatch.setattr(ga.train, "load_trained", lambda folder: SimpleNamespace(model=base))
    options = {"krause_window": 4, "top_k": 2}
    model = ga.models.CausalLM(9, 16, depth=2, heads=2, mixer="dot+krause", mixer_options=options)
    tuned = sinks.tuned(model, 0, work=tmp_path)
    tokens = torch.randint(9, (3, 12))
    for block, own in zip(tuned.blocks, base.blocks, strict=True):
        for branch in (block.mixer.dot, block.mixer.krause):
            for name, weight in own.mixer.named_parameters():
                assert torch.equal(branch.get_parameter(name), weight), name
    with torch.no_grad():  # without the Krause branch, it is the same model
        for block in tuned.blocks:
            block.mixer.gate.bias.copy_(torch.tensor([50.0, 0.0]))
        torch.testing.assert_close(tuned.eval()(tokens), base.eval()(tokens))


def test_mixed_shares_are_weighted_by_the_gate() -> None:
    sinks = script("krause_sinks")
    options = {"krause_window": 4, "top_k": 2}
    model = ga.models.CausalLM(9, 16, depth=2, heads=2, mixer="dot+krause", mixer_options=options)
    tokens = torch.randint(9, (3, 12))
    found = sinks.shares_of(model, tokens)
    values, names = ga.diagnostics.sinks_per_layer(model.eval(), tokens)
    share = dict(zip(names, values.mean(1).tolist(), strict=True))
    for layer in range(2):
        dot, krause = (share[f"blocks.{layer}.mixer.{branch}"] for branch in ("dot", "krause"))
        assert found["standard"][layer] == pytest.approx(dot)
        assert found["mixed"][layer] == pytest.approx(0.8 * dot + 0.2 * krause, abs=1e-6)
    assert found["head"] == pytest.approx([float(values[::2].max())])


def test_graphs_have_as_many_closed_classes_as_their_names_say() -> None:
    closed = script("sinks_closed_classes")
    counts = []
    for classes in (0, *closed.CLASSES):
        graph = closed.graph_of(classes)
        source, target = graph.edge_index
        assert (source <= target).all()
        found = ga.spectral.closed_classes(graph)
        assert [tokens.tolist() for tokens in found] == [[i] for i in range(max(classes, 1))]
        counts.append(graph.num_edges)
    assert max(counts) / min(counts) < 1.011


def test_shares_of_equal_weights_are_those_of_the_graph() -> None:
    closed = script("sinks_closed_classes")
    model = ga.models.CausalLM(9, 16, depth=2, heads=2)
    for block in model.blocks:
        torch.nn.init.zeros_(block.mixer.query_proj.weight)
        torch.nn.init.zeros_(block.mixer.query_proj.bias)
    model = closed.over_graph(model, 0, classes=4)
    found = closed.shares_of(model, torch.randint(9, (2, closed.LENGTH)))
    assert found["first"] == pytest.approx(closed.EQUAL)
    assert found["first, mean"] == pytest.approx(closed.EQUAL)
    assert found["leading"] == pytest.approx(closed.LEADING * closed.EQUAL)


@pytest.mark.parametrize(
    ("several", "verdict"),
    [
        ((0.3, 0.5, 2.01), "held"),
        ((0.3, 0.7, 2.0), "not held"),  # only divided among the leading tokens
        ((0.45, 0.5, 2.0), "not held"),
        ((0.3, 0.5, 2.1), "not held"),
    ],
)
def test_a_sink_must_not_only_be_divided(several, verdict) -> None:
    closed = script("sinks_closed_classes")

    def runs(arm, first, leading, loss):
        return [{"arm": arm, "first": first, "leading": leading, "loss": loss}] * closed.SEEDS

    others = [run for arm in closed.ARMS if arm not in ("1 closed", "8 closed")
              for run in runs(arm, 0.5, 0.8, 2.0)]  # fmt: skip
    assert closed.judged(others + runs("1 closed", 0.5, 0.8, 2.0))[0] == "open"
    whole = others + runs("8 closed", *several)
    assert closed.judged(whole + runs("1 closed", 0.5, 0.8, 2.0))[0] == verdict
    assert closed.judged(whole + runs("1 closed", 0.1, 0.8, 2.0))[0] == "inconclusive"


# krause_heads.


def test_patterns_and_clusters_of_heads_that_are_known() -> None:
    heads = script("krause_heads")
    same = torch.rand(1, 6, 6).expand(4, 6, 6)
    assert heads.patterns(same) == pytest.approx(1)
    apart = torch.stack([torch.eye(6).roll(shift, 1) for shift in range(4)])
    assert heads.patterns(apart) == pytest.approx(4)
    blocks = torch.block_diag(*[torch.full((n, n), 1 / n) for n in (3, 2, 4)])
    everyone = torch.full((9, 9), 1 / 9)
    assert heads.clusters(torch.stack([blocks, everyone])).tolist() == [3, 1]


def test_heads_are_measured_in_a_model_of_each_mechanism() -> None:
    heads = script("krause_heads")
    model = ga.models.VisionTransformer.from_preset("digits", mixer="krause")
    found = heads.heads_of(model, torch.randn(2, 1, 8, 8))
    assert set(found) == {*heads.COLUMNS, "certified groups"}
    assert 0 < found["diversity"] <= 1
    assert 1 <= found["patterns"] <= 4
    assert "certified groups" not in heads.heads_of(
        ga.models.VisionTransformer.from_preset("digits"), torch.randn(2, 1, 8, 8)
    )


@pytest.mark.parametrize(
    ("standard", "control", "verdict"),
    [
        ((0.1, 1.2, 1.0), (0.4, 2.0, 2.0), "held"),
        ((0.1, 1.6, 1.0), (0.4, 2.0, 2.0), "not held"),  # standard heads do not collapse
        ((0.1, 1.2, 1.0), (0.7, 2.0, 2.0), "not held"),  # the graph alone does it
        ((0.1, 1.2, 1.0), (0.59, 2.0, 2.0), "inconclusive"),
    ],
)
def test_heads_are_compared_with_the_same_graph(standard, control, verdict) -> None:
    heads = script("krause_heads")

    def runs(arm, diversity, patterns, clusters):
        return [
            {"arm": arm, "diversity": diversity + noise, "patterns": patterns, "clusters": clusters}
            for noise in (-0.02, 0.0, 0.02)
        ]

    rows = runs("standard", *standard) + runs(heads.CONTROL, *control)
    assert heads.judged(rows)[0] == "open"
    assert heads.judged(rows + runs("krause", 0.6, 2.5, 3.0))[0] == verdict


# krause_flows and krause_persistence.


def flow_runs(flows):
    runs = []
    for space, share in flows.SETTINGS:
        count = round(0.8 / (2 * share)) if share < 0.4 else 1
        flow = {"clusters": count, "groups": count, "multiplicity": count}
        runs.append({"space": space, "range": share, "flows": [dict(flow) for _ in range(2)]})
    return runs


def test_flows_are_judged_part_by_part() -> None:
    flows = script("krause_flows")
    assert flows.judged(flow_runs(flows), [1, 1])[0] == "held"
    assert flows.judged(flow_runs(flows)[1:], [1, 1])[0] == "open"
    assert "5 (2 clusters)" in flows.judged(flow_runs(flows), [1, 2])[1]
    for part, place, change in (
        ("1 (square", flows.SETTINGS.index(("square", 0.2)), {"clusters": 1, "groups": 1}),
        ("2 (interval", 0, {"clusters": 2, "groups": 2}),
        ("3 (interval", 0, {"multiplicity": 2}),
        ("3 (interval", 0, {"groups": 20}),
        ("4 (square", flows.SETTINGS.index(("square", 0.5)), {"clusters": 9, "groups": 9}),
    ):
        runs = flow_runs(flows)
        for flow in runs[place]["flows"]:
            flow.update({"multiplicity": 99, **change})
        verdict, why = flows.judged(runs, [1, 1])
        assert verdict == "not held"
        assert part in why.split("Against parts: ")[1]


def test_a_flow_of_two_groups_ends_in_two_closed_groups(monkeypatch) -> None:
    flows = script("krause_flows")
    two = torch.tensor([[0.0], [0.05], [0.1], [0.9], [1.0]], dtype=torch.float64)
    monkeypatch.setitem(flows.SPACES, "interval", (lambda seed: two, 1.0, {}))
    assert flows.flow_of("interval", 0.2, 0) == {"clusters": 2, "groups": 2, "multiplicity": 2}
    assert flows.flow_of("interval", 1.0, 0)["clusters"] == 1


def test_a_flow_that_contradicts_the_theorem_refutes_it() -> None:
    persistence = script("krause_persistence")

    def runs(**change):
        good = {"certified": [2, 2, 2, 2], "final": 2, "crossing": False}
        flows = [dict(good) for _ in range(20)]
        flows[0].update(change)
        return [{"size": "k", "separation": 64.0, "flows": flows}]

    assert persistence.judged(runs(), 1)[0] == "held"
    assert persistence.judged(runs(), 2)[0] == "open"
    assert persistence.judged(runs(certified=[2, 3, 2, 2]), 1)[0] == "not held"
    assert persistence.judged(runs(crossing=True), 1)[0] == "not held"
    many = runs()
    for flow in many[0]["flows"][:5]:
        flow["final"] = 3
    assert persistence.judged(many, 1)[0] == "not held"  # 75 % only


def test_starts_and_flows_of_the_certificate() -> None:
    persistence = script("krause_persistence")
    sizes = [len(persistence.start_of(4, size, 64.0, 1, 0)) for size in persistence.SIZES]
    assert sizes == [16, 28, 48]
    x = torch.tensor([[0.0], [0.1], [5.0], [5.1], [9.0], [9.2]], dtype=torch.float64)
    found = persistence.flow_of(x, 2)
    assert found == {"certified": [3, 3, 3, 3], "final": 3, "crossing": False}
    links = persistence.links_of(x, 2)
    assert links.sum(1).tolist() == [2] * 6
    assert statistics.fmean(links.diagonal().double().tolist()) == 1
