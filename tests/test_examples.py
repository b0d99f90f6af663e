"""The scripts in examples/ run, and say what is true."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
STRUCTURES = EXAMPLES.parents[1] / "shared" / "data" / "structure"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"examples_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def dynamic() -> ModuleType:
    return load("dynamic_graph")


def test_the_comparison_of_graphs_runs(dynamic, capsys):
    tiny = {"steps": 2, "batch": 2, "num_tokens": 20, "dim": 8, "k": 4, "sequences": 2}
    found = dynamic.compare(**tiny)
    printed = capsys.readouterr().out
    assert len(found) == 3
    for name, share in found.items():
        assert 0 <= share <= 1
        assert name in printed
    assert dynamic.compare(**tiny) == found  # the seed fixes everything


def test_hidden_labels_are_those_of_the_group_and_not_in_the_input(dynamic):
    tokens, label, hidden = dynamic.draw_sequences(4, 50, torch.Generator().manual_seed(0))
    shown = tokens[..., -dynamic.LABELS :]
    assert not shown[hidden].any()
    assert (shown[~hidden].argmax(-1) == label[~hidden]).all()
    direction = tokens[..., : dynamic.FEATURES]
    nearest = torch.cdist(direction, direction).topk(2, largest=False).indices[..., 1]
    assert (label.gather(1, nearest) == label).float().mean() > 0.95


def test_neighbours_stay_within_their_sequence(dynamic):
    x = torch.randn(3, 10, 4, generator=torch.Generator().manual_seed(0))
    source, target = dynamic.neighbours(x, 4).edge_index
    assert (source // 10 == target // 10).all()
    for b in range(3):
        nearest = torch.cdist(x[b], x[b]).topk(4, largest=False).indices
        for i in range(10):
            assert set(source[target == 10 * b + i].tolist()) == {
                10 * b + j for j in nearest[i].tolist()
            }


def test_the_graph_is_rebuilt_every_few_layers_from_features_without_gradient(dynamic, monkeypatch):
    seen: list[torch.Tensor] = []
    build = dynamic.neighbours
    monkeypatch.setattr(dynamic, "neighbours", lambda x, k: seen.append(x) or build(x, k))
    tokens = dynamic.draw_sequences(2, 20, torch.Generator().manual_seed(0)).tokens
    for rebuild_every, times in ((None, 0), (4, 1), (2, 2), (1, 4)):
        seen.clear()
        torch.manual_seed(0)
        model = dynamic.DynamicGraphEncoder(8, 4, 4, rebuild_every)
        model(tokens).square().sum().backward()
        assert len(seen) == times
        assert not any(x.requires_grad for x in seen)
        assert model.embedding.weight.grad.abs().sum() > 0


def test_orders_of_tokens_give_the_same_and_reordering_brings_neighbours_near(capsys):
    order = load("token_order")
    generator = torch.Generator().manual_seed(0)
    for tokens in (order.random_points(400, generator), order.shuffled_image(20, generator)):
        names = order.measure(tokens, rounds=1).keys()  # which compares outputs and gradients
        printed = capsys.readouterr().out
        assert all(name in printed for name in ("as it came", *names))
        _, shuffled, by_edges, by_points = order.orders_of(tokens, generator)
        far = order.distance_apart(shuffled.graph)
        assert far > 4 * order.distance_apart(by_points.graph)
        assert far > 1.5 * order.distance_apart(by_edges.graph)


def test_orders_of_tokens_are_measured_over_copies_of_a_structure():
    path = STRUCTURES / "pdb" / "1l2y.pdb"
    if not path.exists():
        pytest.skip("real data not there: structure/pdb/1l2y.pdb")
    pytest.importorskip("biotite")
    tokens = load("token_order").atoms_of(str(path), 2)
    source, target = tokens.graph.edge_index
    assert tokens.graph.num_tokens == 2 * 304
    # Far enough apart that they see themselves alone, and alike.
    assert (source // 304 == target // 304).all()
    own = target < 304
    assert torch.equal(source[own] + 304, source[~own])
