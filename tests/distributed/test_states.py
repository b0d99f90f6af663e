"""Linear attention sends states where targets see whole runs of sources, and only there."""

import random

import pytest
import state_cases as cases
import torch
from test_plans import BUILDERS

import graphattn as ga
from graphattn.distributed.layout import Layout
from graphattn.distributed.ring.states import plan_of_states
from graphattn.distributed.seen import common

PLANNED = {  # whether states are exact over every such graph, wherever the borders are
    "causal": True,
    "complete": True,
    "blocks": True,
    "bipartite complete": True,
    "causal with a past": False,
    "batch": False,
    "edges": False,
    "longformer": False,
    "other order": False,
}


def remote_edges(graph, targets, sources):
    """The edges between two ranks, (source, target), from the list of all edges."""
    source, target = graph.edge_index
    crossing = sources.owner(source) != targets.owner(target)
    return {(int(j), int(i)) for j, i in graph.edge_index.T[crossing]}


def edges_of_states(plan):
    """The edges that states stand for, (source, target); each must occur once."""
    edges = []
    for rank in range(plan.sources.ranks):
        of_rank = plan.of_rank(rank, None, torch.device("cpu"))
        tokens = plan.targets.tokens(rank).tolist()
        assert [t for group in of_rank.groups for t in tokens[group.start : group.stop]] == tokens
        needed = dict(plan.needs.by_rank()).get(rank, [])
        pieces = [
            piece
            for other in range(plan.sources.ranks)
            for start, stop in common(needed, plan._owned(other))
            for piece in range(start, stop)
        ]
        assert len(pieces) == sum(of_rank.exchange.received) == int(plan.received[rank])
        assert len(of_rank.exchange.send) == sum(of_rank.exchange.sent) == int(plan.sent[rank])
        for group in of_rank.groups:
            for piece in (pieces[row] for row in group.rows):
                run = range(int(plan.pieces.start[piece]), int(plan.pieces.stop[piece]))
                edges += [(j, i) for i in tokens[group.start : group.stop] for j in run]
    assert len(edges) == len(set(edges))
    return set(edges)


def layouts(chance, graph):
    for zigzag in (False, True):
        most = graph.num_targets // (1 + zigzag)
        ranks = chance.randint(2, min(6, most))
        yield Layout(graph.num_targets, ranks, zigzag), Layout(graph.num_sources, ranks, zigzag)


@pytest.mark.parametrize("builder", BUILDERS)
def test_states_stand_for_exactly_the_edges_between_ranks(builder):
    chance, planned = random.Random(builder), []
    for _ in range(8):
        graph = BUILDERS[builder](chance, chance.randint(12, 40))
        for targets, sources in layouts(chance, graph):
            plan = plan_of_states(graph, targets, sources)
            expected = remote_edges(graph, targets, sources)
            if plan is not None:
                assert edges_of_states(plan) == expected
            if expected:
                planned.append(plan is not None)
    if builder in PLANNED:
        assert all(planned) if PLANNED[builder] else not all(planned)


@pytest.mark.parametrize("name", cases.GRAPHS)
def test_states_stand_for_the_edges_of_packed_sequences(name):
    chance, graph = random.Random(name), cases.GRAPHS[name]()
    for targets, sources in [pair for _ in range(4) for pair in layouts(chance, graph)]:
        plan = plan_of_states(graph, targets, sources)
        assert edges_of_states(plan) == remote_edges(graph, targets, sources)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", cases.GRAPHS)
def test_outputs_and_gradients_equal_those_of_one_process(ranks, name, size):
    for ways in ranks.run(cases.equal_to_one_process, size, name=name, forced=True):
        assert ways == ["runs: states", "zigzag: states"]


@pytest.mark.every_case
def test_rows_travel_where_they_are_smaller(ranks):
    """A state of four features is as large as 2.5 rows; pieces have 10 or 20 tokens, or few."""
    run = cases.equal_to_one_process
    assert ranks.run(run, 2, name="causal", forced=False) == 2 * [
        ["runs: states", "zigzag: states"]
    ]
    for ways in ranks.run(run, 4, name="two tracks, few sources", forced=False):
        assert ways == ["runs: rows", "zigzag: rows"]
    for ways in ranks.run(run, 4, name="short sequences", forced=False):
        assert "zigzag: rows" in ways


@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.parametrize("order", ["runs", "zigzag"])
@pytest.mark.parametrize("name", cases.GRAPHS)
def test_bytes_that_are_sent_are_those_of_the_plan(ranks, name, order, forced):
    counts = ranks.run(cases.bytes_sent, 3, name=name, order=order, forced=forced)
    assert len(set(counts)) == 1
    assert counts[0] > 0


@pytest.mark.every_case
@pytest.mark.parametrize("name", ["causal", "two tracks", "complete and causal"])
def test_nan_in_padding_is_not_sent_and_changes_no_bit(ranks, name):
    assert ranks.run(cases.nan_in_padding, 3, name=name) == [True] * 3


@pytest.mark.every_case
def test_nan_reaches_those_that_see_it_and_no_gradient_of_others(ranks):
    counts = ranks.run(cases.nan_that_is_seen, 3)
    for of_layer in zip(*counts, strict=True):
        assert sum(of_layer) == 41 - 13


@pytest.mark.every_case
@pytest.mark.parametrize("name", ["causal", "one sequence crosses"])
def test_ranks_whose_states_nobody_needs_take_part_in_the_backward_pass(ranks, name):
    assert ranks.run(cases.only_values_are_trained, 4, name=name) == [True] * 4


@pytest.mark.every_case
def test_states_travel_in_the_dtype_of_sums(ranks):
    assert ranks.run(cases.dtypes_that_travel, 2) == [["torch.float32"] * 3] * 2


@pytest.mark.long
def test_the_first_call_over_a_shard_may_be_a_compiled_one(ranks):
    for errors in ranks.run(cases.compiled_at_once, 2):
        assert max(errors) < 1e-12


def test_bytes_of_states_do_not_depend_on_the_number_of_tokens():
    for tokens in (2**16, 2**20):
        plan = ga.distributed.plan(ga.causal_graph(tokens), ranks=8, zigzag=False)
        bytes_of_rank = 4 * 8 * 64 * 65 * torch.arange(8)  # rank r sees r chunks before its own
        assert torch.equal(plan.linear_bytes(torch.float32, 8, 64), bytes_of_rank)
        backward = plan.linear_bytes(torch.float32, 8, 64, backward=True)
        assert torch.equal(backward, bytes_of_rank.flip(0))


@pytest.mark.parametrize("rope", [False, True])
def test_states_are_sent_if_all_of_them_are_smaller_than_all_rows(rope):
    plan = ga.distributed.plan(ga.causal_graph(400), ranks=5, zigzag=False)
    states, rows = 10, 80 * 10  # one state and 80 rows for every pair of ranks
    widest = plan.widest_state(rope=rope)
    tensors = 3 if rope else 2
    assert states * widest * (widest + 1) < rows * tensors * widest
    wider = widest + 1
    assert states * wider * (wider + 1) >= rows * tensors * wider
    sums, features = states * widest * (widest + 1), rows * tensors * 2 * wider
    assert plan.linear_bytes(torch.float32, 1, widest, rope=rope).sum() == 4 * sums
    assert plan.linear_bytes(torch.float32, 1, 2 * wider, rope=rope).sum() == 4 * features


def test_a_printed_plan_says_where_states_travel():
    text = str(ga.distributed.plan(ga.causal_graph(4096), ranks=8, zigzag=False))
    assert (
        "\n  linear attention sends states in place of rows, if heads have at most 1,022 features: "
        "7 to the busiest rank\n"
    ) in text
    for graph in (ga.causal_window_graph(4096, 256), ga.causal_window_graph(64, 32)):
        plan = ga.distributed.plan(graph, ranks=8)
        assert "states" not in str(plan)
        assert plan.widest_state() == 0
        assert plan.linear_bytes(torch.float32, 2, 16).equal(plan.bytes(torch.float32, 64))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_heads": 0}, "kv_heads must be >= 1, got 0"),
        ({"head_dim": 1.5}, "head_dim must be an integer >= 1, got 1.5"),
        ({"dtype": "float32"}, "dtype must be a torch.dtype, got 'float32'"),
    ],
)
def test_arguments_out_of_range_are_named(change, message):
    arguments = {"dtype": torch.float32, "kv_heads": 1, "head_dim": 8, **change}
    with pytest.raises(ValueError, match=message):
        ga.distributed.plan(ga.causal_graph(400), 5).linear_bytes(**arguments)
