"""PyG's Data and Batch: what goes in comes out again, edge by edge."""

import pytest
import torch
from torch_geometric.data import Batch, Data, HeteroData

import graphattn as ga


def molecule(n, seed):
    """Edges in random order; every value tells its edge: 10 source + target."""
    generator = torch.manual_seed(seed)
    source, target = (torch.rand(n, n, generator=generator) < 0.5).nonzero().T
    order = torch.randperm(len(source), generator=generator)
    edge_index = torch.stack([source, target])[:, order]
    value = 10 * edge_index[0] + edge_index[1]
    return Data(
        x=torch.randn(n, 4, generator=generator),
        pos=torch.randn(n, 3, generator=generator),
        edge_index=edge_index,
        edge_attr=torch.stack([value, -value], dim=1).double(),
        charge=torch.arange(n) + seed,
        y=torch.tensor([float(seed)]),
        fingerprint=torch.randn(1, 7, generator=generator),
        levels=torch.randn(50, 2, generator=generator),
        name=f"molecule {seed}",
        count=seed,
    )


MOLECULES = [molecule(n, seed) for seed, n in enumerate((5, 8, 1, 6))]


def sorted_by_target(data):
    """PyG's own sorting: by target, then source."""
    return data.clone().sort(sort_by_row=False)


@pytest.mark.parametrize("padding", [False, True])
def test_data_goes_in_and_comes_back(padding):
    batch = ga.collate(MOLECULES, padding=padding)
    again = batch.to_pyg()
    assert isinstance(again, Batch)
    assert again.num_graphs == 4
    for separated, data in zip(again.to_data_list(), MOLECULES, strict=True):
        expected = sorted_by_target(data)
        assert separated.num_nodes == data.num_nodes
        assert separated.name == data.name
        for name in ("x", "pos", "edge_index", "edge_attr", "charge", "y", "fingerprint", "levels"):
            assert torch.equal(separated[name], expected[name]), name
        assert int(separated.count) == data.count
    # And again: nothing is lost on the second way.
    assert ga.collate(again.to_data_list()).graph == ga.collate(MOLECULES).graph


def test_fields_are_joined_as_pyg_joins_them():
    batch = ga.collate(MOLECULES)
    theirs = Batch.from_data_list([sorted_by_target(data) for data in MOLECULES])
    for name in ("x", "pos", "edge_attr", "charge", "y", "fingerprint", "batch", "ptr"):
        assert torch.equal(getattr(batch, name), theirs[name]), name
    assert torch.equal(batch.graph.edge_index, theirs.edge_index)
    assert torch.equal(batch.graph.batch, theirs.batch)
    assert torch.equal(batch["count"], theirs["count"])
    assert batch.name == theirs.name
    assert batch.levels.shape == (4, 50, 2)  # where PyG gives [200, 2]: one entry per item


def test_the_graph_of_a_pyg_batch_is_the_collated_one():
    graph, edge_attr = ga.from_pyg(Batch.from_data_list(MOLECULES), return_edge_attr=True)
    batch = ga.collate(MOLECULES)
    assert graph == batch.graph
    assert graph.sizes == ((5, 5), (8, 8), (1, 1), (6, 6))
    assert torch.equal(edge_attr, batch.edge_attr)
    assert torch.equal(graph.batch, batch.batch)
    assert torch.equal(graph.positions, batch.positions)


def test_dicts_reach_pyg_with_their_graphs():
    items = [
        {"x": torch.randn(n, 2), "graph": ga.window_path_graph(n, 2), "label": n} for n in (3, 5)
    ]
    for padding in (False, True):
        for separated, item in zip(
            ga.collate(items, padding=padding).to_pyg().to_data_list(), items, strict=True
        ):
            assert torch.equal(separated.edge_index, item["graph"].edge_index)
            assert torch.equal(separated.x, item["x"])
            assert int(separated.label) == item["label"]
            assert ga.from_pyg(separated) == item["graph"]


def test_points_without_edges_get_a_graph():
    clouds = [Data(pos=torch.randn(n, 3), y=torch.tensor([n])) for n in (4, 6)]
    batch = ga.collate(clouds, graph=ga.complete_graph)
    assert batch.graph == ga.batch([ga.complete_graph(4), ga.complete_graph(6)])
    near = ga.knn_graph(batch.pos, 2, batch=batch.batch)
    assert near == ga.batch([ga.knn_graph(cloud.pos, 2) for cloud in clouds])
    assert ga.knn_graph(batch.pos, 2, within=batch.graph) == near


def test_data_without_a_number_of_nodes_but_with_tokens():
    texts = [
        Data(tokens=torch.arange(n), edge_index=torch.tensor([[0], [1]])) for n in (4, 2)
    ]  # fmt: skip
    assert ga.collate(texts).graph.sizes == ((4, 4), (2, 2))


class WithStack(Data):
    def __cat_dim__(self, key, value, *args, **kwargs):
        return None if key == "code" else super().__cat_dim__(key, value, *args, **kwargs)


def test_what_pyg_stacks_is_stacked():
    items = [WithStack(x=torch.randn(n, 2), code=torch.arange(1) + n) for n in (3, 4)]
    batch = ga.collate(items, graph=ga.complete_graph)
    assert batch.code.tolist() == [[3], [4]]


@pytest.mark.parametrize(
    ("items", "says"),
    [
        (
            [MOLECULES[0], {"x": torch.zeros(2, 4)}],
            r"all dicts or all Data, got a Data as items\[0\]",
        ),
        ([Batch.from_data_list(MOLECULES)], r"items\[0\]: its to_data_list\(\) returns them"),
        (Batch.from_data_list(MOLECULES), r"a DataBatch: its to_data_list\(\)"),
        ([HeteroData()], r"HeteroData as items\[0\]: make a dict"),
        ([Data(x=torch.zeros(2, 4))], r"items\[0\] has no graph"),
        (
            [
                Data(
                    x=torch.zeros(3, 1), edge_index=torch.zeros(2, 0).long(), face=torch.zeros(3, 1)
                )
            ],
            r"items\[0\].face holds indices.*item_fields=\('face',\)",
        ),
        (
            [Data(x=torch.zeros(3, 1)), Data(pos=torch.zeros(3, 1))],
            "items must all have the same fields",
        ),
    ],
)
def test_what_is_no_list_of_data_is_refused(items, says):
    with pytest.raises(ValueError, match=says):
        ga.collate(items)


def test_indices_stay_those_of_each_item_where_they_are_named():
    items = [
        Data(
            x=torch.zeros(n, 1), edge_index=torch.zeros(2, 0).long(), ring_index=torch.arange(n - 1)
        )
        for n in (3, 5)
    ]
    batch = ga.collate(items, item_fields=("ring_index",))
    assert [ring.tolist() for ring in batch.ring_index] == [[0, 1], [0, 1, 2, 3]]
