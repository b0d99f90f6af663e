"""Items with graphs of their own as one batch: every entry where its token, edge or item is."""

import copy
import functools
import pickle
import re

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import graphattn as ga

GRAPHS = {
    "structured": lambda n, seed: [
        ga.causal_window_graph(n, 3),
        ga.complete_graph(n),
        ga.window_cycle_graph(n, 2),
        ga.longformer_graph(n, 1, [0]),
    ][seed % 4],
    "windows": lambda n, seed: ga.window_path_graph(n, 2),
    "tables": lambda n, seed: ga.knn_graph(points(n, seed), min(3, n - 1)),
    "lists": lambda n, seed: ga.from_mask(points(n, seed) @ points(n, seed).T > 0),
    "structured and listed": lambda n, seed: (
        ga.causal_graph(n) if seed % 2 else ga.from_mask(points(n, seed) @ points(n, seed).T > 0)
    ),
}
LENGTHS = [4, 9, 6, 5]


def points(n, seed):
    return torch.randn(n, 3, generator=torch.manual_seed(100 * n + seed))


def items_of(kind, lengths=tuple(LENGTHS)):
    """Every value tells its item and its place there: 1000 item + token, or the two ends."""
    items = []
    for b, n in enumerate(lengths):
        graph = GRAPHS[kind](n, b)
        source, target = graph.edge_index
        items.append(
            {
                "graph": graph,
                "tokens": 1000 * b + torch.arange(n),
                "features": points(n, b),
                "edge_features": torch.stack(
                    [torch.full_like(source, b), source, target], dim=1
                ).double(),
                "name": f"item {b}",
                "target": float(b),
                "class": b,
                "image": torch.full((2, 3), float(b)),
                "chords": torch.full((b + 40, 2), b),
            }
        )
    return items


@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("kind", GRAPHS)
def test_every_entry_stands_where_its_token_edge_or_item_is(kind, padding):
    items = items_of(kind)
    batch = ga.collate(items, padding=padding)
    assert len(batch) == 4
    N = max(LENGTHS) if padding else None
    first = [b * N for b in range(4)] if padding else batch.ptr.tolist()
    # Every edge of the batch, read by its feature: the item's token j + first, i + first.
    item, source, target = batch.edge_features.long().unbind(1)
    begin = torch.tensor(first)[item]
    assert torch.equal(batch.graph.edge_index, torch.stack([source, target]) + begin)
    assert batch.graph.num_edges == sum(item["graph"].num_edges for item in items)
    flat = batch.tokens.flatten()
    for b in range(4):
        for token in range(LENGTHS[b]):
            assert int(flat[first[b] + token]) == 1000 * b + token
            assert int(batch.batch[first[b] + token]) == b
            assert int(batch.positions.flatten()[first[b] + token]) == token
    assert batch.lengths.tolist() == LENGTHS
    assert batch.ptr.tolist() == batch.cu_seqlens.tolist() == [0, 4, 13, 19, 24]
    assert (batch.cu_seqlens.dtype, batch.max_seqlen) == (torch.int32, 9)
    # Per item.
    assert batch.name == [f"item {b}" for b in range(4)]
    assert torch.equal(batch.target, torch.arange(4.0))
    assert torch.equal(batch["class"], torch.arange(4))
    assert batch.image.shape == (4, 2, 3)
    assert [len(value) for value in batch.chords] == [40, 41, 42, 43]


@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("kind", GRAPHS)
def test_unpacking_gives_every_item_its_own_back(kind, padding):
    items = items_of(kind)
    batch = ga.collate(items, padding=padding)
    kinds = {"tokens": "token", "features": "token", "edge_features": "edge", "image": "item"}
    for name, per in kinds.items():
        assert batch.kind(name) == per
        for value, item in zip(batch.unpack(batch[name], per=per), items, strict=True):
            assert torch.equal(value, item[name])
    for name in ("name", "chords", "tokens", "edge_features", "image"):
        for value, item in zip(batch.values_of_items(name), items, strict=True):
            assert value is item[name] or torch.equal(value, item[name])


def test_padding_is_what_valid_says_and_holds_what_is_asked_for():
    items = [{**item, "label": item["tokens"] % 3} for item in items_of("windows")]
    batch = ga.collate(items, padding=True, padding_value={"label": -100})
    assert batch.valid.tolist() == [[i < n for i in range(9)] for n in LENGTHS]
    assert (batch.label[~batch.valid] == -100).all()
    assert (batch.label[batch.valid] >= 0).all()
    assert (batch.tokens[~batch.valid] == 0).all()
    loss = torch.nn.functional.cross_entropy(
        torch.randn(4, 9, 3).flatten(0, 1), batch.label.view(-1)
    )
    assert loss.isfinite()
    everywhere = ga.collate(items_of("windows"), padding=True, padding_value=7)
    assert (everywhere.features[~everywhere.valid] == 7).all()
    assert ga.collate(items).valid is None


@pytest.mark.parametrize("padding", [False, True])
def test_masks_of_the_items_take_part_in_valid(padding):
    masks = [torch.tensor([True, False, True]), torch.tensor([True])]
    for name, convert in (("valid", torch.Tensor.bool), ("attention_mask", torch.Tensor.long)):
        items = [{"x": torch.randn(len(m), 2), name: convert(m)} for m in masks]
        fill = {"padding_value": 5.0} if padding else {}
        batch = ga.collate(items, graph=ga.complete_graph, padding=padding, **fill)
        expected = [[True, False, True], [True, False, False]] if padding else [1, 0, 1, 1]
        assert batch.valid.tolist() == expected
        assert batch.valid.dtype == torch.bool
        for a, b in zip(batch.unpack(batch.valid), masks, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("padding", [False, True])
def test_structured_graphs_stay_structured_and_nothing_is_listed(padding, nobody_lists_edges):
    items = [
        {
            "tokens": torch.arange(n),
            "graph": ga.window_path_graph(n, 2),
            "n": n,
            "label": points(n, 0),
        }
        for n in (100_000, 50_000)
    ]
    batch = ga.collate(items, padding=padding)
    assert batch.graph.structure is not None
    assert batch.graph.num_edges == sum(item["graph"].num_edges for item in items)
    assert batch.graph.structure.num_offsets == 5, "padding takes no table of offsets from windows"
    assert batch.edge_counts() == [item["graph"].num_edges for item in items]


def test_padding_keeps_causality_and_tables():
    causal = [{"x": points(n, 0), "graph": ga.causal_window_graph(n, 3)} for n in (3, 5)]
    assert ga.collate(causal, padding=True).graph.is_causal
    mixed = [causal[0], {"x": points(5, 0), "graph": ga.complete_graph(5)}]
    assert not ga.collate(mixed, padding=True).graph.is_causal
    assert ga.collate(mixed, padding=True).graph.has_causal_part
    tables = ga.collate(items_of("tables"), padding=True).graph
    assert tables.neighbors is not None
    assert tables.structure is None


def test_an_item_that_is_a_batch_itself_keeps_its_positions():
    pair = ga.batch([ga.causal_graph(2), ga.causal_graph(1)])
    items = [{"x": points(3, 0), "graph": pair}, {"x": points(4, 0), "graph": ga.causal_graph(4)}]
    assert ga.collate(items).positions.tolist() == [0, 1, 0, 0, 1, 2, 3]
    padded = ga.collate(items, padding=True)
    assert padded.positions.tolist() == [[0, 1, 0, 0], [0, 1, 2, 3]]
    assert [len(rows) for rows in padded.unpack(padded.x)] == [3, 4]


def test_tracks_of_two_lengths_come_with_their_sources():
    sizes = [(2, 5), (4, 3), (3, 3)]
    items = [
        {
            "graph": ga.bipartite_complete_graph(n, m),
            "x": points(n, 0),
            "context": points(m, 1),
            "bases": torch.arange(m),
            "edge_bias": torch.arange(n * m),
        }
        for n, m in sizes
    ]
    packed, padded = ga.collate(items), ga.collate(items, padding=True)
    assert packed.kind("bases") == packed.kind("context") == "source"
    assert packed.source_lengths.tolist() == [5, 3, 3]
    assert (padded.x.shape, padded.context.shape) == ((3, 4, 3), (3, 5, 3))
    assert [mask.sum(1).tolist() for mask in padded.valid] == [[2, 4, 3], [5, 3, 3]]
    layer = ga.nn.DotProductAttention(3, 1, context_dim=3)
    for batch in (packed, padded):
        for rows, item in zip(batch.unpack(batch.context, per="source"), items, strict=True):
            assert torch.equal(rows, item["context"])
        for rows, item in zip(batch.unpack(batch.edge_bias, per="edge"), items, strict=True):
            assert torch.equal(rows, item["edge_bias"])
        y = layer(batch.x, batch.graph, batch.context, valid=batch.valid)
        for rows, item in zip(batch.unpack(y), items, strict=True):
            expected = layer(item["x"], item["graph"], item["context"])
            torch.testing.assert_close(rows, expected)
        with pytest.raises(ValueError, match="one kind of nodes"):
            batch.to_pyg()


# What a field is.


def test_lists_and_arrays_are_tensors_and_words_are_not():
    items = [
        {
            "tokens": [1, 2],
            "labels": [0.5, 1],
            "x": np.ones((2, 3), np.float32),
            "words": ["a", "b"],
        },
        {"tokens": [], "labels": [], "x": np.ones((0, 3), np.float32), "words": []},
        {"tokens": [3], "labels": [2], "x": np.ones((1, 3), np.float32), "words": ["c"]},
    ]
    batch = ga.collate(items, graph=ga.complete_graph)
    assert batch.tokens.tolist() == [1, 2, 3]
    assert batch.tokens.dtype == torch.int64, "an empty list tells no dtype"
    assert batch.labels.tolist() == [0.5, 1.0, 2.0]
    assert batch.x.shape == (3, 3)
    assert batch.words == [["a", "b"], [], ["c"]]
    assert batch.lengths.tolist() == [2, 0, 1]


def test_numbers_keep_their_kind():
    items = [{"x": points(2, 0), "i": b, "f": 0.5, "t": b > 0, "n": np.int32(b)} for b in range(2)]
    batch = ga.collate(items, graph=ga.complete_graph)
    assert (batch.i.dtype, batch.t.dtype, batch.n.dtype) == (torch.int64, torch.bool, torch.int32)
    assert batch.f.dtype == torch.get_default_dtype()


def test_an_edge_list_and_its_values_are_sorted_together():
    edge_index = torch.tensor([[2, 0, 1, 1], [0, 1, 0, 2]])
    value = 10 * edge_index[0] + edge_index[1]
    items = [
        {"x": points(3, b), "edge_index": edge_index, "edge_attr": value, "value": value + 0.5}
        for b in range(2)
    ]
    batch = ga.collate(items)
    source, target = batch.graph.edge_index % 3
    assert torch.equal(batch.edge_attr, 10 * source + target)
    assert torch.equal(batch.value, 10 * source + target + 0.5)
    assert batch.graph.sizes == ((3, 3), (3, 3))


def test_a_graph_may_be_made_from_the_number_of_tokens():
    items = [{"tokens": torch.arange(n), "label": b} for b, n in enumerate((3, 5))]
    batch = ga.collate(items, graph=lambda n: ga.window_path_graph(n, 2))
    assert batch.graph == ga.batch([ga.window_path_graph(3, 2), ga.window_path_graph(5, 2)])
    with pytest.raises(
        ValueError, match=r"graph must make a TokenGraph of 5 tokens for items\[1\]"
    ):
        ga.collate(items, graph=lambda n: ga.causal_graph(3))
    with pytest.raises(
        ValueError, match=r"graph must be a function of the number of tokens.*TokenGraph"
    ):
        ga.collate(items, graph=ga.causal_graph(3))


SQUARE = [{"graph": ga.causal_graph(n), "tokens": torch.arange(n)} for n in (3, 5)]


def with_fields(*values, name="y"):
    return [{**item, name: value} for item, value in zip(SQUARE, values, strict=True)]


RING = [{"graph": ga.from_edge_index(torch.stack([torch.arange(n), torch.arange(n).roll(1)]), n)}
        for n in (3, 5)]  # fmt: skip

BAD_CALLS = [
    (lambda: ga.collate([]), ["items must hold at least one"]),
    (lambda: ga.collate(SQUARE[0]), ["items must be a list", "dict"]),
    (lambda: ga.collate(3), ["items must be a list", "int"]),
    (lambda: ga.collate([(1, 2)]), ["items[0]", "tuple", "name its parts"]),
    (lambda: ga.collate([ga.causal_graph(3)]), ["items[0]", "graphattn.batch"]),
    (
        lambda: ga.collate([SQUARE[0], {**SQUARE[1], "z": 1}]),
        ["the same fields", "items[1] has 'z'", "items[0] does not"],
    ),
    (lambda: ga.collate([{"x": points(3, 0)}]), ["items[0] has no graph", "graph="]),
    (
        lambda: ga.collate([{**SQUARE[0], "edge_index": torch.zeros(2, 0).long()}]),
        ["items[0]", "either a graph or an edge_index, but has both"],
    ),
    (
        lambda: ga.collate(SQUARE, graph=ga.causal_graph),
        ["graph must be None if items have graphs", "items[0]"],
    ),
    (
        lambda: ga.collate([{"y": points(3, 0)}], graph=ga.causal_graph),
        ["items[0] has an unknown number of tokens", "token_fields="],
    ),
    (lambda: ga.collate([{**SQUARE[0], "ptr": 1}]), ["items[0] has a field 'ptr'", "another name"]),
    (
        lambda: ga.collate([SQUARE[0], {**SQUARE[1], "tokens": torch.arange(4)}]),
        ["items[1]['tokens']", "[5, ...]", "got [4]", "item_fields"],
    ),
    (
        lambda: ga.collate([{**SQUARE[0], "tokens": "ACD"}]),
        ["items[0]['tokens']", "tensor", "got str"],
    ),
    (
        lambda: ga.collate(with_fields(torch.zeros(6), torch.zeros(16), name="edge_weight")),
        ["items[1]['edge_weight']", "[15, ...]", "per edge", "got [16]"],
    ),
    (
        lambda: ga.collate([{**item, "y": torch.zeros(item["graph"].num_edges)} for item in RING]),
        [
            "y is ambiguous: in every item its length is the number of edge entries and of token",
            "edge_fields=('y',)",
            "token_fields=('y',)",
        ],
    ),
    (
        lambda: ga.collate(with_fields(torch.zeros(3), torch.zeros(3))),
        ["y has one entry per token in items[0], but not in items[1]", "[3]", "item_fields=('y',)"],
    ),
    (
        lambda: ga.collate(with_fields(torch.zeros(6), torch.zeros(5))),
        ["y has one entry per edge in items[0], but not in items[1]"],
    ),
    (
        lambda: ga.collate(with_fields(torch.zeros(3), torch.zeros(5).long())),
        ["y must have the same dtype", "float32 in items[0]", "int64 in items[1]"],
    ),
    (
        lambda: ga.collate(with_fields(torch.zeros(()), torch.zeros(()).long())),
        ["y must have the same dtype", "items[1]"],
    ),
    (
        lambda: ga.collate(with_fields(torch.zeros(3, 2), torch.zeros(5, 4))),
        [
            "y must have the same shape after the first dimension",
            "[2] in items[0]",
            "[4] in items[1]",
        ],
    ),
    (
        lambda: ga.collate(SQUARE, token_fields=("labels",)),
        ["token_fields", "'tokens'", "'labels'"],
    ),
    (
        lambda: ga.collate(SQUARE, token_fields="tokens"),
        ["token_fields must be a tuple or list of names", "('tokens',)"],
    ),
    (
        lambda: ga.collate(SQUARE, token_fields=["tokens"], item_fields=["tokens"]),
        ["item_fields and token_fields both name 'tokens'"],
    ),
    (
        lambda: ga.collate(SQUARE, padding=True, padding_value={"y": 1}),
        ["padding_value must have names of fields per token (tokens) as keys", "'y'"],
    ),
    (
        lambda: ga.collate(SQUARE, padding_value=-100),
        ["padding_value must be 0 with padding=False", "-100"],
    ),
    (
        lambda: ga.collate(SQUARE, padding=True, padding_value="<pad>"),
        ["padding_value must be a number", "<pad>"],
    ),
    (
        lambda: ga.collate([{"x": points(2, 0), "edge_index": torch.tensor([[0], [5]])}]),
        ["items[0]['edge_index']", "edge_index[1, 0] = 5"],
    ),
    (
        lambda: ga.collate(SQUARE).unpack(torch.zeros(7, 2)),
        ["y must be a tensor of shape [8, ...]", "per='token'", "[7, 2]"],
    ),
    (
        lambda: ga.collate(SQUARE, padding=True).unpack(torch.zeros(2, 6)),
        ["y must be a tensor of shape [2, 5, ...]", "[2, 6]"],
    ),
    (
        lambda: ga.collate(SQUARE).unpack(torch.zeros(8), per="head"),
        ["per must be one of", "'head'"],
    ),
]


@pytest.mark.parametrize(("call", "fragments"), BAD_CALLS)
def test_a_bad_call_says_what_and_why(call, fragments):
    with pytest.raises(ValueError, match=re.escape(fragments[0])) as raised:
        call()
    for fragment in fragments:
        assert fragment in str(raised.value)


def test_what_the_caller_names_decides():
    per_item = with_fields(torch.zeros(3), torch.zeros(3))
    assert ga.collate(per_item, item_fields=("y",)).y.shape == (2, 3)
    ring = [{**item, "y": torch.arange(item["graph"].num_edges)} for item in RING]
    assert ga.collate(ring, edge_fields=("y",)).kind("y") == "edge"
    assert ga.collate(ring, token_fields=("y",)).kind("y") == "token"
    classes = [{**item, "features": torch.zeros(2)} for item in SQUARE]
    assert ga.collate(classes, item_fields=["features"]).features.shape == (2, 2)
    # Where the lengths of one item are alike, those of another decide.
    other = {"graph": ga.causal_graph(4), "y": torch.arange(4)}
    assert ga.collate([ring[0], other]).kind("y") == "token"


# The batch as an object.


def test_a_batch_copies_pickles_and_saves(tmp_path):
    batch = ga.collate(items_of("lists"), padding=True)
    torch.save(batch, tmp_path / "batch.pt")
    for again in (
        copy.copy(batch),
        copy.deepcopy(batch),
        pickle.loads(pickle.dumps(batch)),
        torch.load(tmp_path / "batch.pt"),
        batch.to("cpu"),
        batch.cpu(),
    ):
        assert again.graph == batch.graph
        assert again.name == batch.name
        assert torch.equal(again.valid, batch.valid)
        assert torch.equal(again.edge_features, batch.edge_features)
        assert repr(again) == repr(batch)
        assert again.unpack(again.features)[1].shape == (9, 3)


def test_all_tensors_move_to_another_device():
    batch = ga.collate(items_of("lists"))
    moved = batch.to("meta", non_blocking=True)
    assert moved.graph.device.type == moved.device.type == "meta"
    assert moved.graph.edge_index.is_meta
    for name in ("tokens", "features", "edge_features", "target", "batch", "lengths", "cu_seqlens"):
        assert getattr(moved, name).is_meta, name
    assert all(chord.is_meta for chord in moved.chords), "tensors in lists, too"
    assert moved.positions.is_meta
    assert not batch.tokens.is_meta
    assert [rows.shape[0] for rows in moved.unpack(moved.features)] == LENGTHS


def test_every_tensor_is_pinned(monkeypatch):
    """A stand-in for pin_memory returns a copy, because nothing can be pinned without a GPU."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self + 0 * (self == self))
    batch = ga.collate([{"graph": item["graph"], "tokens": item["tokens"], "chords": item["chords"]}
                        for item in items_of("lists")])  # fmt: skip
    pinned = batch.pin_memory()
    assert pinned.graph == batch.graph
    assert pinned.graph.edge_index.data_ptr() != batch.graph.edge_index.data_ptr()
    assert pinned.tokens.data_ptr() != batch.tokens.data_ptr()
    assert pinned.chords[0].data_ptr() != batch.chords[0].data_ptr()
    assert torch.equal(pinned.batch, batch.batch)


def test_fields_are_attributes_and_entries():
    batch = ga.collate(SQUARE)
    assert batch.tokens is batch["tokens"]
    assert "tokens" in batch
    assert "graph" not in batch
    assert list(batch.keys()) == ["tokens"]
    batch.tokens = batch.tokens + 1
    assert batch["tokens"].tolist() == [1, 2, 3, 1, 2, 3, 4, 5]
    with pytest.raises(AttributeError, match=r"'labels' is neither .* its fields are tokens"):
        batch.labels  # noqa: B018
    with pytest.raises(KeyError, match="no field"):
        batch["labels"]
    with pytest.raises(TypeError, match="name of a field, got 0"):
        batch[0]
    with pytest.raises(TypeError, match="not iterable"):
        list(batch)
    assert repr(batch) == "TokenBatch(2 items, num_tokens=8, num_edges=21, tokens=[8])"


def test_positions_of_the_items_come_before_those_of_the_graph():
    for name in ("positions", "position_ids"):
        items = [{**item, name: item["tokens"] + 7} for item in SQUARE]
        assert ga.collate(items).positions.tolist() == [7, 8, 9, 7, 8, 9, 10, 11]
        assert ga.collate(items, padding=True).positions.shape == (2, 5)


# In a DataLoader.


class Texts(Dataset):
    def __len__(self):
        return 10

    def __getitem__(self, b):
        n = 3 + b % 4
        return {"tokens": torch.arange(n) + b, "graph": ga.window_path_graph(n, 2), "label": b}


@pytest.mark.long
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_workers_hand_over_whole_batches(start):
    loader = DataLoader(
        Texts(),
        batch_size=4,
        num_workers=2,
        multiprocessing_context=start,
        collate_fn=functools.partial(ga.collate, padding=False),
    )
    batches = list(loader)
    assert [len(batch) for batch in batches] == [4, 4, 2]
    labels = torch.cat([batch.label for batch in batches])
    assert labels.tolist() == list(range(10))
    for batch in batches:
        here = ga.collate([Texts()[int(b)] for b in batch.label])
        assert batch.graph == here.graph
        assert batch.graph.structure is not None
        assert torch.equal(batch.tokens, here.tokens)


@pytest.mark.parametrize("padding", [False, True])
def test_a_model_gives_every_item_of_a_batch_its_own_loss(padding):
    torch.manual_seed(0)
    model = ga.models.SequenceEncoder(
        12, 16, depth=2, heads=2, mixer="mix", edge_hidden=8, rope="isometric"
    ).double()
    items = [Texts()[b] for b in range(5)]
    batch = ga.collate(items, padding=padding)
    logits = model(batch.tokens, batch.graph, valid=batch.valid)
    losses = [
        torch.nn.functional.cross_entropy(rows, item["tokens"])
        for rows, item in zip(batch.unpack(logits), items, strict=True)
    ]
    alone = [
        torch.nn.functional.cross_entropy(model(item["tokens"], item["graph"]), item["tokens"])
        for item in items
    ]
    torch.testing.assert_close(torch.stack(losses), torch.stack(alone))
    together, apart = (
        torch.autograd.grad(torch.stack(each).mean(), model.embedding.weight)[0]
        for each in (losses, alone)
    )
    torch.testing.assert_close(together, apart)


@pytest.mark.parametrize(
    ("dtype", "fill"),
    [(torch.uint8, -100), (torch.int64, 1.5), (torch.int64, float("nan")), (torch.int8, 300)],
)
def test_a_filling_that_its_dtype_cannot_hold_is_refused(dtype, fill):
    items = [{"tokens": torch.arange(n, dtype=dtype), "graph": ga.causal_graph(n)} for n in (3, 2)]
    with pytest.raises(
        ValueError, match=f"padding_value of tokens must be a number that .*{dtype}"
    ):
        ga.collate(items, padding=True, padding_value=fill)


@pytest.mark.parametrize("padding", [False, True])
def test_valid_holds_booleans_or_zeros_and_ones(padding):
    def of(*masks):
        return [{"valid": m, "tokens": m, "graph": ga.causal_graph(len(m))} for m in masks]

    batch = ga.collate(of([1, 1, 0], [1, 1]), padding=padding)
    assert batch.valid.dtype == torch.bool
    assert batch.valid.sum() == 4
    with pytest.raises(ValueError, match=r"items must hold valid as booleans \(or 0 and 1\)"):
        ga.collate(of([1, 2, 0], [2, 1]), padding=padding)


def test_padding_keeps_causality_between_two_tracks_of_time():
    items = [
        {"tokens": torch.arange(n), "graph": ga.causal_graph(n, past=p)}
        for n, p in ((3, 1), (2, 0))
    ]
    assert ga.collate(items).graph.is_causal
    assert ga.collate(items, padding=True).graph.is_causal
