"""All ranks raise an error if one of them differs or raises one, and none of them hangs."""

import itertools
import re
from typing import Any

import disagreements as cases
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import RankError, Ranks

import graphattn as ga
from graphattn.distributed.agreement import graph_digest

TIMEOUT = 3.0  # of collectives, in seconds, where a rank dies or hangs


def test_graphs_that_differ_are_named_on_every_rank(ranks: Ranks) -> None:
    for error in ranks.run(cases.graphs_differ, 3):
        assert error.startswith("ValueError: the graph must be equal on all ranks, got ")
        assert "on ranks 0 and 2" in error


def test_a_graph_is_the_same_whether_its_edges_are_listed_or_not(ranks: Ranks) -> None:
    assert ranks.run(cases.equal_graphs_of_which_one_is_listed, 3) == [""] * 3


def test_an_error_of_one_rank_in_shard_is_raised_on_every_rank(ranks: Ranks) -> None:
    first, middle, last = ranks.run(cases.an_argument_of_shard_is_wrong_on_one_rank, 3)
    assert middle.startswith("ValueError: order must be one of")
    assert first == last == f"RankFailure: rank 1 raised {middle}"


X_DIFFERS = "x must be equal on all ranks, got float32 [2, tokens, 8] on ranks 0 and 2, "
MASKS_DIFFER = (
    "valid of sources must be equal on all ranks, got None on ranks 0 and 2, bool [tokens]"
)
DIFFERENT: list[tuple[str, dict[str, Any], str]] = [
    ("rows", {"batch": 3}, X_DIFFERS + "float32 [3, tokens, 8] on rank 1"),
    ("ring", {"batch": 1}, X_DIFFERS + "float32 [1, tokens, 8] on rank 1"),
    ("global", {"batch": 3}, X_DIFFERS + "float32 [3, tokens, 8] on rank 1"),
    # It has as many bytes.
    ("rows", {"dtype": torch.float64, "batch": 1}, X_DIFFERS + "float64 [1, tokens, 8] on rank 1"),
    ("rows", {"autocast": True}, "autocast must be equal on all ranks, got none on ranks 0 and 2"),
    ("rows", {"valid": True}, MASKS_DIFFER),
    ("ring", {"valid": True}, MASKS_DIFFER),
    (
        "rows",
        {"layer": ("LinearAttention", 2)},
        "layer must be equal on all ranks, got DotProductAttention(8, heads=2) on ranks 0 and 2, "
        "LinearAttention(8, heads=2) on rank 1",
    ),
    ("ring", {"layer": ("DotProductAttention", 4)}, "DotProductAttention(8, heads=4) on rank 1"),
]


@pytest.mark.every_case
@pytest.mark.parametrize(("exchange", "of_rank_1", "message"), DIFFERENT)
def test_every_rank_says_what_differs_and_where(
    ranks: Ranks, exchange: str, of_rank_1: dict[str, Any], message: str
) -> None:
    for error in ranks.run(cases.a_call_differs, 3, exchange=exchange, of_rank_1=of_rank_1):
        assert error.startswith("ValueError: ")
        assert message in error


@pytest.mark.long
@pytest.mark.parametrize(("exchange", "of_rank_1"), [case[:2] for case in DIFFERENT])
def test_a_compiled_call_is_compared_as_others_are(
    ranks: Ranks, exchange: str, of_rank_1: dict[str, Any]
) -> None:
    """Rank 0 compiles the layer, rank 1 does not; both say what rank 1 has."""
    given = {"exchange": exchange, "of_rank_1": of_rank_1, "compiled": True}
    first, second = ranks.run(cases.a_call_differs, 2, limit=600, **given)
    assert first == second
    assert "must be equal on all ranks, got" in first


@pytest.mark.long
def test_a_compiled_call_goes_on_if_all_ranks_agree(ranks: Ranks) -> None:
    given = {"exchange": "rows", "of_rank_1": {}, "compiled": True}
    assert ranks.run(cases.a_call_differs, 2, limit=600, **given) == ["", ""]


def test_the_operator_of_compiled_calls_compares_them(ranks: Ranks) -> None:
    for direct, in_a_call, *others in ranks.run(cases.calls_differ_in_a_compiled_function, 2):
        assert direct == in_a_call
        assert direct.startswith("ValueError: x must be equal on all ranks, got float32 [2, tok")
        assert direct.endswith("[2, tokens, 8] on rank 0, float32 [2, tokens, 9] on rank 1")
        assert others == [""] * 3


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.long)])
def test_gathered_tensors_that_differ_are_named(ranks: Ranks, compiled: bool) -> None:
    for error in ranks.run(cases.gathered_tensors_differ, 3, compiled=compiled):
        assert "tensor to gather must be equal on all ranks" in error
        assert "float32 [2, tokens, 4] on rank 1" in error


def test_calls_may_differ_where_nothing_travels(ranks: Ranks) -> None:
    assert ranks.run(cases.calls_over_a_graph_whose_rows_do_not_travel, 3) == [""] * 3


@pytest.mark.parametrize("exchange", ["rows", "ring"])
def test_an_error_of_one_rank_is_raised_on_every_rank(ranks: Ranks, exchange: str) -> None:
    by_rank = ranks.run(cases.one_rank_raises, 3, exchange=exchange)
    assert by_rank[1][0].startswith("ValueError: x must have the 8 tokens of rank 1 of 3")
    assert by_rank[1][1] == "MemoryError: no memory for keys"
    for errors in (by_rank[0], by_rank[2]):
        assert errors == [f"RankFailure: rank 1 raised {error}" for error in by_rank[1]]


def test_ranks_that_generate_something_else_are_named(ranks: Ranks) -> None:
    for prompts, counts in ranks.run(cases.generation_differs, 3):
        assert prompts.startswith("ValueError: tokens must be equal on all ranks, got [24] ")
        assert counts.endswith(
            "max_new_tokens must be equal on all ranks, got 2 on ranks 0 and 2, 3 on rank 1"
        )


def test_tokens_with_two_positions_on_one_rank_are_named(ranks: Ranks) -> None:
    for error in ranks.run(cases.positions_of_one_rank_are_two, 3):
        assert "positions of targets must be equal on all ranks, got none on ranks 0" in error


def test_an_error_that_all_ranks_raise_is_their_own(ranks: Ranks) -> None:
    for error in ranks.run(cases.all_ranks_raise, 3):
        assert error.startswith("ValueError: x must be a tensor of shape [*, N, 8]")


@pytest.mark.long
@pytest.mark.parametrize("backward", [False, True])
def test_a_rank_that_dies_ends_the_others_within_the_time_out(backward: bool) -> None:
    """Gloo raises when a connection closes; a rank without one to the dead rank may time out."""
    processes = Ranks(TIMEOUT)
    with pytest.raises(RankError) as raised:
        processes.run(cases.one_rank_dies_or_hangs, 3, dies=True, backward=backward)
    assert sorted(raised.value.results) == [0, 1]
    for error, seconds in raised.value.results.values():
        assert re.match(r"RuntimeError: .*(by peer|Timed out)", error, re.DOTALL)
        assert seconds < cases.HANGS


@pytest.mark.long
def test_a_rank_that_hangs_ends_the_others_after_the_time_out() -> None:
    processes = Ranks(TIMEOUT)
    by_rank = processes.run(cases.one_rank_dies_or_hangs, 3, dies=False, backward=False)
    processes.stop()
    for error, seconds in by_rank[:2]:
        assert re.match(r"RuntimeError: .*(by peer|Timed out)", error, re.DOTALL)
        assert seconds < cases.HANGS


# Digests of graphs.

GRAPHS = {
    "window": lambda: ga.causal_window_graph(20, 4),
    "wider": lambda: ga.causal_window_graph(20, 5),
    "longer": lambda: ga.causal_window_graph(21, 4),
    "both ways": lambda: ga.window_path_graph(20, 4),
    "listed": lambda: ga.from_edge_index(ga.causal_window_graph(20, 4).edge_index, 20),
    "one edge less": lambda: ga.from_edge_index(
        ga.causal_window_graph(20, 4).edge_index[:, :-1], 20
    ),
    "batch": lambda: ga.batch([ga.causal_graph(10), ga.causal_graph(10)]),
    "other batch": lambda: ga.batch([ga.causal_graph(9), ga.causal_graph(11)]),
    "neighbours": lambda: ga.knn_graph(torch.arange(20.0)[:, None], k=3),
    "other neighbours": lambda: ga.knn_graph(torch.arange(20.0)[:, None].sin(), k=3),
    "permuted": lambda: ga.causal_window_graph(20, 4).permute(torch.arange(20).flip(0)),
    "part": lambda: ga.causal_window_graph(40, 4).targets(0, 20)[0],
}


@pytest.mark.parametrize("name", GRAPHS)
def test_graphs_share_a_digest_only_with_their_equals(name):
    graph = GRAPHS[name]()
    digest = graph_digest(graph)
    graph.edge_index, graph.rowptr, graph.transpose()
    assert graph_digest(graph) == digest == graph_digest(GRAPHS[name]())
    assert all(graph_digest(make()) != digest for other, make in GRAPHS.items() if other != name)


@given(st.permutations(range(6)), st.permutations(range(6)))
@settings(deadline=None, max_examples=50)
def test_permuted_graphs_share_a_digest_if_and_only_if_they_are_equal(first, other):
    path = ga.from_edge_index(ga.window_path_graph(6, 1).edge_index, 6)
    mirrored = [5 - token for token in first]  # equal edges, other positions
    graphs = [path.permute(torch.tensor(order)) for order in (first, mirrored, other, range(6))]
    for a, b in itertools.product([*graphs, path], repeat=2):
        assert (graph_digest(a) == graph_digest(b)) == (a == b)


def test_the_digest_of_a_structured_graph_lists_no_edges():
    assert graph_digest(ga.causal_graph(1 << 40)) != graph_digest(ga.causal_graph((1 << 40) + 1))
