"""Experiments about attention clusters: their judgements and their mathematics."""

import importlib
import json
import math
from argparse import Namespace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import graphattn as ga

SCRIPTS = Path(__file__).resolve().parents[1] / "examples" / "papers"


@pytest.fixture(autouse=True)
def _scripts_are_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))


def script(name: str) -> ModuleType:
    return importlib.import_module(name)


def test_a_result_is_kept_and_belongs_to_its_config(tmp_path, capsys) -> None:
    kept, calls = script("evidence").kept_result, []

    def work() -> dict[str, Any]:
        calls.append(1)
        return {"value": 2}

    given = Namespace(work=str(tmp_path), partial=True)
    assert kept(given, "a", {"k": (1, 2)}, work) is None
    given.partial = False
    first = kept(given, "a", {"k": (1, 2)}, work)
    assert first == kept(given, "a", {"k": (1, 2)}, work)
    assert first["value"] == 2
    assert len(calls) == 1
    with pytest.raises(SystemExit, match="has another config"):
        kept(given, "a", {"k": (1, 3)}, work)
    capsys.readouterr()


def rows_of_clusters(
    scores: list[tuple[float, float, float]], counts: tuple[float, float, float]
) -> list[dict[str, Any]]:
    """Rows of three data sets from (KMeans, attention, attention at its best step)."""
    clusterings = script("clusterings")
    rows: list[dict[str, Any]] = []
    for number, (raw, last, best) in enumerate(scores):
        case = {"data": "abc"[number], "draw": 0}
        rows.append({**case, "pattern": clusterings.BASELINE, "score": raw, "best": raw})
        for pattern, count in zip(clusterings.PATTERNS, (*counts, 9.0), strict=True):
            rows.append({**case, "pattern": pattern, "score": last, "best": best,
                         "clusters_per_class": count})  # fmt: skip
    return rows


@pytest.mark.parametrize(
    ("scores", "counts", "verdict"),
    [
        ([(0.8, 0.9, 0.9), (0.8, 0.82, 0.9), (0.8, 0.5, 0.9)], (1, 2, 3), "held"),
        ([(0.8, 0.9, 0.9)] * 3, (1, 3, 2), "not held"),  # the order of fragmentation
        ([(0.8, 0.9, 0.9)] * 3, (1, 1, 2), "not held"),  # a tie is no order
        ([(0.9, 0.8, 0.905)] * 3, (1, 2, 3), "not held"),
        ([(0.8, 0.7, 0.9)] * 3, (1, 2, 3), "inconclusive"),  # better at its best step only
        ([(0.8, 0.9, 0.9)] * 2, (1, 2, 3), "open"),
    ],
)
def test_clusters_are_judged_beside_kmeans_of_the_data(scores, counts, verdict) -> None:
    rows = rows_of_clusters(scores, counts)
    assert script("clusterings").judged(rows, ("a", "b", "c"), 3)[0] == verdict


def test_separate_groups_are_found_and_blocks_cut_them() -> None:
    clusterings = script("clusterings")
    generator = torch.Generator().manual_seed(0)
    truth = torch.arange(64) % 2
    x = 0.1 * torch.randn(64, 3, generator=generator, dtype=torch.float64) + 4 * truth[:, None]
    case = clusterings.Case("two", 0, ga.dynamics.standardize(x), truth, (32, 8), 0)
    rows = {row["pattern"]: row for row in clusterings.measured(case, ga.dynamics.dice)}
    assert rows[clusterings.BASELINE]["score"] == rows["global"]["score"] == 1
    assert rows["global"]["clusters_per_class"] == 1
    assert rows["small blocks"]["clusters_per_class"] >= 1
    mixed = clusterings.Case("two", 0, case.x, truth.roll(1), (32, 8), 0)
    wrong = {row["pattern"]: row for row in clusterings.measured(mixed, ga.dynamics.label_accuracy)}
    assert wrong["global"]["score"] == 1  # swapped labels are the same clusters
    alone = clusterings.Case("two", 0, case.x, (torch.arange(64) // 32), (32, 8), 0)
    assert clusterings.measured(alone, ga.dynamics.label_accuracy)[1]["score"] == 0.5


def test_scaled_queries_are_scaled_products_and_in_place_is_not() -> None:
    scaling = script("scaling_in_place")
    assert scaling.at_equal_weights(64, 4) == 0
    assert 0 < scaling.at_equal_weights(72, 3) < 1e-6
    torch.manual_seed(0)
    x, graph = torch.randn(9, 16), ga.complete_graph(9)
    layer = ga.nn.DotProductAttention(16, 2)
    root = math.sqrt(8)
    q, k, v = (
        p(x).view(9, 2, 8).transpose(0, 1)
        for p in (layer.query_proj, layer.key_proj, layer.value_proj)
    )
    expected = ((q / root) @ k.mT).softmax(-1) @ v
    scaled = script("controls").with_scaled_queries(torch.nn.Sequential(layer))[0]
    assert type(scaled).__name__ == "QueryScaled"
    out = scaled.output_proj(expected.transpose(0, 1).reshape(9, 16))
    torch.testing.assert_close(scaled(x, graph), out)


@pytest.mark.parametrize(
    ("sq", "in_place", "verdict", "shows"),
    [
        ([0.5, 0.6, 0.7], [(2.0, 0.5), (2.0, 0.6), (2.0, 0.7)], "not held", "does not show"),
        ([0.9, 0.9, 0.9], [(2.0, 0.9), (2.0, 0.9), (2.0, 0.9)], "held", "does not show"),
        ([0.5, 0.6, 0.7], [(2.5, 0.9), (2.5, 0.9), (2.5, 0.9)], "not held", "shows"),
        ([0.5], [(2.5, 0.9)], "open", ""),
    ],
)
def test_scaled_queries_must_be_more_accurate_than_noise(sq, in_place, verdict, shows) -> None:
    scaling = script("scaling_in_place")
    runs = {"sdp": [(2.0, 0.5), (2.1, 0.6), (2.2, 0.7)][: len(sq)],
            "sq": [(2.0 + n / 10, value) for n, value in enumerate(sq)],
            "sq_inplace": in_place}  # fmt: skip
    rows = [
        {"arm": arm, "seed": seed, "masked": masked, "accuracy": accuracy}
        for arm, own in runs.items()
        for seed, (masked, accuracy) in enumerate(own)
    ]
    found, why = scaling.judged(rows, 0.0)
    assert found == verdict
    assert f"in place {shows}" in why or verdict == "open"


def spectra(shares: dict[str, float]) -> dict[str, list[dict[str, Any]]]:
    rows = {}
    for setting in script("clusters_models").SETTINGS:
        share = shares.get(setting, 0.3)
        noise = (0.0, 0.01, 0.02)
        rows[setting] = [{"share": [0.1, share + n, share + n]} for n in noise]
    return rows


@pytest.mark.parametrize(
    ("first", "second", "verdict"),
    [
        ({}, {}, "held"),
        ({"bare, in place": 0.45}, {"bare, in place": 0.45}, "not held"),  # does not dominate
        ({"bare, in place": 0.45}, {}, "inconclusive"),  # in one model
        ({"trained": 0.3}, {"trained": 0.3}, "not held"),  # training amplifies nothing
        ({"bare": 0.7}, {"trained": 0.3}, "inconclusive"),
    ],
)
def test_spectra_are_judged_over_both_models(first, second, verdict) -> None:
    models = script("clusters_models")
    low_rank = {"bare, in place": 0.6, "norms, in place": 0.6, "trained": 0.6}
    found = {
        name: spectra({**low_rank, **changes})
        for name, changes in zip(models.MODELS, (first, second), strict=True)
    }
    assert models.judged(found)[0] == verdict
    del found[models.MODELS[0]]["bare"]
    assert models.judged(found)[0] == "open"


def test_differences_of_pairs_count_beyond_their_error() -> None:
    is_larger = script("clusters_models").is_larger
    assert is_larger([1.0, 2.1, 3.0], [0.9, 2.0, 2.8])
    assert not is_larger([1.0, 2.0, 3.5], [0.9, 2.1, 2.8])
    assert not is_larger([1.0, 2.0], [1.0, 2.0])


def losses_of(means: list[float], noise: float = 0.001) -> dict[str, list[float]]:
    patterns = script("patterns").PATTERNS
    return {
        name: [mean - noise, mean, mean + noise] for name, mean in zip(patterns, means, strict=True)
    }


def test_a_score_predicts_by_ranks_on_both_tasks() -> None:
    experiment = script("clusters_patterns")
    agreement = [1 - n / 12 for n in range(12)]
    scores = {
        task: dict(zip(experiment.PATTERNS, agreement, strict=True)) for task in ("text", "images")
    }
    rising, falling = [n**3 / 1000 for n in range(12)], [-n / 10 for n in range(12)]

    def verdict(first: list[float], second: list[float], noise: float = 0.001) -> str:
        losses = {"text": losses_of(first, noise), "images": losses_of(second, noise)}
        return experiment.judged(scores, losses)[0]

    assert verdict(rising, rising) == "held"  # a better score, a lower loss
    assert verdict(falling, falling) == "not held"
    assert verdict(rising, falling) == "not held"
    assert verdict(rising, rising, noise=10.0) == "inconclusive"
    order = (3, 0, 1, 9, 4, 11, 2, 6, 10, 5, 8, 7)
    squares = sum((place - n) ** 2 for n, place in enumerate(order))
    expected = 1 - 6 * squares / (12 * (12**2 - 1))  # Spearman's formula for ranks without ties
    found = experiment.correlation(agreement, [rising[n] for n in order])
    assert found == pytest.approx(expected)
    losses = {"text": losses_of(rising), "images": {}}
    assert experiment.judged(scores, losses)[0] == "open"


def test_every_pattern_is_the_graph_of_every_block() -> None:
    patterns = script("patterns")
    torch.manual_seed(0)
    encoder = ga.models.SequenceEncoder(9, 8, depth=2, heads=2)
    tokens = torch.randint(9, (1, 64))
    moved = tokens.clone()
    moved[0, -1] = (moved[0, -1] + 1) % 9
    seen = {}
    for name, make in patterns.PATTERNS.items():
        patterns.over(encoder, 0, pattern=name)
        assert [graph.num_edges for graph in encoder.graphs(64)] == [make(64).num_edges] * 2
        seen[name] = bool((encoder(tokens)[0, 0] != encoder(moved)[0, 0]).any())
    assert seen["global"]
    assert not seen["blocks of 8"]
    assert not seen["window 2"]
    images = ga.models.VisionTransformer(
        8, 2, 3, 8, 2, 2, channels=1, class_token=False, pooling="mean"
    )
    patterns.over(images, 0, pattern="blocks of 8")
    assert images.graphs()[0].num_edges == 2 * 8**2
    assert images(torch.randn(1, 1, 8, 8)).shape == (1, 3)


@pytest.mark.parametrize(
    ("before", "after", "plain", "verdict"),
    [
        ([0.2, 0.3, 0.4], [0.7, 0.7, 0.7], [0.4, 0.4, 0.4], "held"),
        ([0.2, 0.3, 0.4], [0.7, 0.7, 0.7], [0.7, 0.7, 0.8], "inconclusive"),
        ([0.2, 0.3, 0.4], [0.4, 0.5, 0.6], [0.1, 0.1, 0.1], "not held"),
        ([0.2, 0.3], [0.7, 0.7], [0.4, 0.4], "open"),
    ],
)
def test_attractors_must_beat_untrained_models_and_kmeans(before, after, plain, verdict) -> None:
    attractors = script("clusters_attractors")

    def seeds(values: list[float], others: list[float]) -> list[dict[str, Any]]:
        return [
            {"texts": {"attention": [value - 0.1, value + 0.1], "KMeans": [other]}}
            for value, other in zip(values, others, strict=True)
        ]

    found = {0: seeds(before, plain), attractors.CHECKPOINTS[-1]: seeds(after, plain)}
    assert attractors.judged(found)[0] == verdict


def test_a_layer_that_keeps_its_groups_has_index_one_and_shuffled_ones_have_none() -> None:
    attractors = script("clusters_attractors")
    generator = torch.Generator().manual_seed(0)
    centres = 10 * torch.eye(attractors.CLUSTERS)
    x = centres.repeat(12, 1) + 0.01 * torch.randn(96, 8, generator=generator)
    found = attractors.indices_of([x[None], x[None] * 2, x[None] + 1])
    assert found["attention"] == found["KMeans"] == [1.0, 1.0]
    assert abs(sum(found["shuffled"])) < 0.2
    texts = attractors.of_texts([found, {**found, "attention": [0.0, 0.5]}])
    assert texts["texts"]["attention"] == [1.0, 0.25]
    assert texts["layers"]["attention"] == [0.5, 0.75]


def test_hidden_states_are_the_input_and_the_output_of_every_block() -> None:
    torch.manual_seed(0)
    model = ga.models.SequenceEncoder(9, 8, depth=2, heads=2).eval()
    tokens = torch.randint(9, (1, 12))
    blocks = list(model.blocks)
    states = script("probes").hidden_states(blocks, lambda: model(tokens))
    torch.testing.assert_close(states[0], model.embedding(tokens))
    torch.testing.assert_close(model.head(model.norm(states[-1])), model(tokens))
    assert len(states) == 3
    assert all(not block._forward_hooks for block in blocks)


def test_classes_of_the_heart_data_and_examples_are_as_described(tmp_path) -> None:
    patterns, tables = script("clusters_patterns"), script("clusters_tables")
    folder = tmp_path / "tabular"
    folder.mkdir()
    lines = [
        ",".join(map(str, [60 + n, 1, 1 + n % 4, *([n % 7] * 10), n % 2 * (1 + n % 4)]))
        for n in range(400)
    ]
    (folder / "uci_heart_processed.cleveland.csv").write_text("\n".join(lines) + "\n")
    values, truth = tables.tables(tmp_path)["heart, 3 features"]
    assert values.shape == (400, 3)
    assert truth.tolist() == [n % 2 for n in range(400)]
    case = next(tables.cases(tmp_path))
    assert case.truth.bincount().tolist() == [tables.PER_CLASS] * 2
    torch.testing.assert_close(case.x.mean(0), torch.zeros(3, dtype=torch.float64))
    text = tmp_path / "text.txt"
    text.write_text("abcab" * 200)
    examples = patterns.examples_of("text", text)
    assert len(examples) == patterns.EXAMPLES
    assert examples[0].shape == (patterns.LENGTH, patterns.FEATURES)
    assert torch.equal(examples[0][0], examples[0][5])  # the same letter
    assert len({json.dumps(row) for row in examples[0].tolist()}) == 3
