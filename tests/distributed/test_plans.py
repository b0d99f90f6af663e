"""Plans of communication list exactly the rows that edges need, for any graph and many ranks."""

import random
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import graphattn as ga
from graphattn.distributed.layout import Layout
from graphattn.distributed.planning.inside import runs_inside
from graphattn.distributed.planning.needs import RunTable
from graphattn.distributed.planning.plans import H100_SXM, LINKS, CommunicationPlan, exchange_of
from graphattn.distributed.seen import joined


def edge_list(chance: random.Random, targets: int, sources: int) -> ga.TokenGraph:
    count = chance.randint(0, 3 * targets)
    pairs = {(chance.randrange(sources), chance.randrange(targets)) for _ in range(count)}
    edges = torch.tensor(sorted(pairs), dtype=torch.int64).view(-1, 2).T
    return ga.from_edge_index(edges, targets, sources)


def points(chance: random.Random, count: int) -> torch.Tensor:
    return torch.tensor([[chance.random(), chance.random()] for _ in range(count)])


BUILDERS: dict[str, Callable[[random.Random, int], ga.TokenGraph]] = {
    "window path": lambda c, n: ga.window_path_graph(
        n, c.randint(1, 9), self_loops=c.random() < 0.5
    ),
    "causal window": lambda c, n: ga.causal_window_graph(n, c.randint(1, 9)),
    "causal window with a past": lambda c, n: ga.causal_window_graph(
        n, c.randint(1, 9), past=c.randint(0, 9)
    ),
    "causal": lambda c, n: ga.causal_graph(n),
    "causal with a past": lambda c, n: ga.causal_graph(n, past=c.randint(0, 9)),
    "complete": lambda c, n: ga.complete_graph(n, self_loops=c.random() < 0.5),
    "blocks": lambda c, n: ga.block_window_graph(n, s := c.randint(1, 9), shift=c.randrange(s)),
    "cycle": lambda c, n: ga.window_cycle_graph(n, c.randint(1, (n - 1) // 2)),
    "dilated": lambda c, n: ga.dilated_window_graph(n, c.randint(1, 4), dilation=c.randint(1, 7)),
    "longformer": lambda c, n: ga.longformer_graph(n, c.randint(1, 4), [c.randrange(n), 0]),
    "bigbird": lambda c, n: ga.bigbird_graph(
        n, c.randint(1, 3), c.randint(0, 3), [c.randrange(n)], seed=c.randrange(99)
    ),
    "grid": lambda c, n: ga.grid_window_graph(
        4, n // 4, c.randint(1, 3), class_token=c.random() < 0.5
    ),
    "grid blocks": lambda c, n: ga.grid_block_graph(4, 2 * (n // 8), (2, 2)),
    "neighbourhood": lambda c, n: ga.neighborhood_graph((4, n // 4), 3),
    "volume": lambda c, n: ga.volume_window_graph(2, 2, n // 4, 1),
    "nearest neighbours": lambda c, n: ga.knn_graph(points(c, n), k=c.randint(1, 4)),
    "radius": lambda c, n: ga.radius_graph(points(c, n), 0.3),
    "edges": lambda c, n: edge_list(c, n, n),
    "edges between other tokens": lambda c, n: edge_list(c, n, c.randint(6, 40)),
    "bipartite window": lambda c, n: ga.bipartite_window_graph(n, c.randint(1, 9)),
    "bipartite complete": lambda c, n: ga.bipartite_complete_graph(n, c.randint(6, 40)),
    "batch": lambda c, n: ga.batch(
        [ga.causal_graph(c.randint(1, n)), ga.window_path_graph(n, 2), ga.complete_graph(3)]
    ),
    "batch of lists": lambda c, n: ga.batch([edge_list(c, n, n), ga.causal_graph(n)]),
    "union": lambda c, n: ga.union(
        ga.causal_window_graph(n, 3), ga.dilated_window_graph(n, 2, dilation=c.randint(2, 7))
    ),
    "union with a list": lambda c, n: ga.union(ga.window_path_graph(n, 2), edge_list(c, n, n)),
    "some targets": lambda c, n: ga.longformer_graph(2 * n, 2, [0]).targets(n // 2, n // 2 + n)[0],
    "other order": lambda c, n: ga.causal_graph(n).permute(
        torch.tensor(c.sample(range(n), n), dtype=torch.int64)
    ),
}


def expected_rows(
    graph: ga.TokenGraph,
    targets: Layout,
    sources: Layout,
    both: bool,
    left_out: tuple[int, ...] = (),
) -> dict[tuple[int, int], list[int]]:
    """List the rows that a rank needs of another one, from the edges: (receiver, sender) -> rows.

    The owners are read from the runs of the layouts, one token at a time.
    """
    owner_of_target, owner_of_source = (
        {token: rank for rank in range(layout.ranks) for run in layout.runs(rank) for token in run}
        for layout in (targets, sources)
    )
    needed: dict[tuple[int, int], set[int]] = {}
    for source, target in graph.edge_index.T.tolist():
        receiver, sender = owner_of_target[target], owner_of_source[source]
        if receiver != sender and target not in left_out:
            needed.setdefault((receiver, sender), set()).add(source)
            if both:
                needed.setdefault((sender, receiver), set()).add(target)
    return {pair: sorted(rows) for pair, rows in needed.items()}


def tokens_of(runs: list[tuple[int, int]]) -> list[int]:
    assert runs == joined(runs)  # as few runs as there can be
    return [token for run in runs for token in range(*run)]


def check(plan: CommunicationPlan) -> None:
    """Compare everything that a plan says with the list of all edges."""
    graph, ranks = plan.graph, plan.ranks
    both = plan.moves == "both"
    layouts = plan.target_layout, plan.source_layout
    expected = expected_rows(graph, *layouts, both, left_out=plan.broadcast)
    if plan.broadcast:  # only if the owner of a global token would need too many rows
        rows = expected_rows(graph, *layouts, both).items()
        owned = plan.own_rows.tolist()
        received = [sum(len(x) for (to, _), x in rows if to == rank) for rank in range(ranks)]
        assert any(received[rank] > 2 * owned[rank] for rank in range(ranks))
    received, sent, partners = ([0] * ranks for _ in range(3))
    for (receiver, sender), rows in expected.items():
        received[receiver] += len(rows)
        sent[sender] += len(rows)
        partners[receiver] += 1
    assert plan.received_rows.tolist() == received
    assert plan.sent_rows.tolist() == sent
    assert plan.partners.tolist() == partners
    rows_received = {
        (rank, sender): tokens_of(runs)
        for rank in range(ranks)
        for sender, runs in plan.pairs(rank)
    }
    assert rows_received == expected
    mirrored = {
        (receiver, rank): tokens_of(runs)
        for rank in range(ranks)
        for receiver, runs in plan.sends(rank)
    }
    assert mirrored == expected
    for rank in range(ranks):
        for listed in (plan.pairs(rank), plan.sends(rank)):
            assert [other for other, _ in listed] == sorted(other for other, _ in listed)
    degrees = torch.bincount(graph.edge_index[1], minlength=graph.num_targets)
    edges = [int(degrees[plan.target_layout.tokens(rank)].sum()) for rank in range(ranks)]
    assert plan.edges.tolist() == edges
    too_many = any(received[r] > 2 * plan.source_layout.size(r) for r in range(ranks))
    assert plan.exchange == ("ring" if too_many else "rows")


@pytest.mark.parametrize("zigzag", [False, True, None])
@pytest.mark.parametrize("builder", BUILDERS)
def test_a_plan_has_the_rows_that_the_edges_need_and_no_others(builder, zigzag):
    chance = random.Random(f"{builder} {zigzag}")
    for number in range(4):
        graph = BUILDERS[builder](chance, chance.randint(12, 40))
        most = min(graph.num_targets, graph.num_sources)
        for ranks in (chance.randint(1, 3), chance.randint(4, 6) if number else most):
            check(ga.distributed.plan(graph, ranks, zigzag=zigzag))
            if graph.has_same_tokens:
                check(ga.distributed.plan(graph, ranks, moves="both", zigzag=zigzag))


@pytest.mark.parametrize("builder", BUILDERS)
def test_what_all_ranks_send_is_what_all_ranks_receive(builder):
    graph = BUILDERS[builder](random.Random(builder), 37)
    for zigzag in (False, True):
        plan = ga.distributed.plan(graph, 5, zigzag=zigzag)
        assert plan.sent_rows.sum() == plan.received_rows.sum()
        assert plan.edges.sum() == graph.num_edges
        of_global = 2 * len(plan.broadcast) * 4  # a query to each other rank, and its result
        assert plan.bytes(torch.float32, 3, backward=True).sum() in (
            12 * (plan.sent_rows.sum() + of_global),
            12 * (plan.sent_rows + plan.received_rows).sum(),
        )


def test_a_causal_window_of_256_needs_255_rows_per_border():
    plan = ga.distributed.plan(ga.causal_window_graph(2**20, window=256), ranks=64)
    assert plan.received_rows.tolist() == [0] + 63 * [255]
    assert plan.sent_rows.tolist() == 63 * [255] + [0]
    assert plan.exchange == "rows"
    assert not plan.target_layout.zigzag
    assert plan.pairs(5) == [(4, [(5 * 2**14 - 255, 5 * 2**14)])]
    assert plan.sends(4) == [(5, [(5 * 2**14 - 255, 5 * 2**14)])]


def test_causal_attention_on_a_ring_is_balanced_by_a_zigzag():
    graph = ga.causal_graph(2**16)
    plan, plain = (ga.distributed.plan(graph, 8, zigzag=zigzag) for zigzag in (None, False))
    assert (plan.exchange, plan.target_layout.zigzag) == ("ring", True)
    assert plan.balance == 1
    assert plain.balance == pytest.approx(15 / 8, rel=1e-3)  # the last of 8 parts of a triangle


def test_a_zigzag_that_balances_nothing_is_not_chosen():
    """A window has the same work everywhere, even if shards are shorter than the window."""
    plan = ga.distributed.plan(ga.causal_window_graph(1024, window=256), ranks=16)
    assert (plan.exchange, plan.target_layout.zigzag) == ("ring", False)


def test_a_ring_begins_where_a_rank_receives_more_than_twice_what_it_owns():
    owned = torch.tensor([10, 10])
    assert exchange_of(torch.tensor([0, 20]), owned) == "rows"
    assert exchange_of(torch.tensor([0, 21]), owned) == "ring"
    exchanges = [
        ga.distributed.plan(ga.complete_graph(60), ranks).exchange for ranks in (1, 2, 3, 4)
    ]
    assert exchanges == ["rows", "rows", "rows", "ring"]


def test_bytes_of_a_ring_are_once_forward_and_twice_backward():
    plan = ga.distributed.plan(ga.complete_graph(800), ranks=8)
    forward, backward = (plan.bytes(torch.bfloat16, 10, backward=b) for b in (False, True))
    assert forward.tolist() == 8 * [700 * 10 * 2]
    assert backward.tolist() == 8 * [2 * 700 * 10 * 2]
    assert plan.all_gather_bytes(torch.bfloat16, 10).tolist() == forward.tolist()


def test_bytes_of_rows_go_back_to_those_who_sent_them():
    plan = ga.distributed.plan(ga.causal_window_graph(400, window=11), ranks=4)
    assert plan.bytes(torch.float32, 2).tolist() == [0, 80, 80, 80]
    assert plan.bytes(torch.float32, 2, backward=True).tolist() == [80, 80, 80, 0]
    assert plan.all_gather_bytes(torch.float32, 2).tolist() == 4 * [300 * 8]


@pytest.mark.parametrize("zigzag", [False, True])
@pytest.mark.parametrize("per_node", [1, 2, 4, 100])
def test_seconds_are_those_of_the_slowest_link_of_the_busiest_rank(zigzag, per_node):
    graph = edge_list(random.Random(per_node), 90, 90)
    plan = ga.distributed.plan(graph, 6, zigzag=zigzag)
    for exchange, backward in (("rows", False), ("rows", True), ("ring", False), ("ring", True)):
        plan = replace(plan, exchange=exchange)
        slowest = 0.0
        for rank in range(6):
            for near, speed in ((True, 5.0), (False, 2.0)):
                came, went = (
                    sum(
                        len(tokens_of(runs))
                        for other, runs in pairs
                        if (other // per_node == rank // per_node) == near
                    )
                    for pairs in (plan.pairs(rank), plan.sends(rank))
                )
                both_ways = backward and exchange == "ring"
                rows = came + went if both_ways else max(came, went)
                slowest = max(slowest, rows * 12 / speed)
        rounds = int(plan.partners.max()) * (1 + backward) if exchange == "ring" else 1
        seconds = plan.seconds(
            torch.float32, 3, backward=backward, bandwidth=(5, 2), latency=0.5, per_node=per_node
        )
        assert seconds == pytest.approx(slowest + 0.5 * rounds)


@pytest.mark.parametrize("zigzag", [False, True])
@pytest.mark.parametrize("name", BUILDERS)
def test_targets_inside_are_the_longest_runs_that_see_no_other_rank(name, zigzag):
    for seed in range(3):
        chance = random.Random(f"{name} {zigzag} {seed}")
        graph = BUILDERS[name](chance, chance.randint(24, 40))
        ranks = chance.randint(1, 3)
        targets, sources = (
            Layout(count, ranks, zigzag) for count in (graph.num_targets, graph.num_sources)
        )
        source, target = graph.edge_index
        sees = set(target[sources.owner(source) != targets.owner(target)].tolist())
        inside = runs_inside(graph, targets, sources)
        for chunk, start, stop in zip(*(column.tolist() for column in inside), strict=True):
            tokens = targets.chunk(chunk)
            assert tokens.start <= start <= stop <= tokens.stop
            assert not sees & set(range(start, stop))
            longest = run = 0
            for token in tokens:
                run = 0 if token in sees else run + 1
                longest = max(longest, run)
            assert stop - start == longest


def test_hidden_seconds_are_those_of_the_smallest_share_inside():
    plan = ga.distributed.plan(ga.causal_window_graph(1 << 20, window=1 << 14), ranks=4)
    assert plan.inside_targets.tolist() == [1 << 18] + [(1 << 18) - (1 << 14) + 1] * 3
    share = 1 - ((1 << 14) - 1) / (1 << 18)
    given = {"bandwidth": 1e9, "latency": 0.0}
    travel = plan.seconds(torch.half, 512, **given)
    assert travel == pytest.approx(((1 << 14) - 1) * 1024 / 1e9)
    assert plan.hidden_seconds(1.0, torch.half, 512, **given) == travel
    assert plan.hidden_seconds(1e-3, torch.half, 512, **given) == pytest.approx(share * 1e-3)
    assert plan.hidden_seconds(1.0, torch.half, 16, **given) == 0  # fewer than 1 MiB travel
    assert "targets computed while they travel, per rank: 245,761 to 262,144" in str(plan)


def test_a_round_of_a_ring_hides_the_rows_of_the_next():
    plan = ga.distributed.plan(ga.complete_graph(800), ranks=8)
    given = {"bandwidth": 1.0, "latency": 0.0}
    travel = plan.seconds(torch.half, 1, **given)
    assert plan.hidden_seconds(8.0, torch.half, 1, **given) == 7.0 < travel
    assert plan.hidden_seconds(1e9, torch.half, 1, **given) == travel
    assert not plan.has_inside


def test_nothing_is_hidden_where_nothing_travels_or_all_see_other_ranks():
    for graph in (ga.block_window_graph(64, 16), ga.longformer_graph(64, 2, [0])):
        plan = ga.distributed.plan(graph, 4)
        assert not plan.has_inside
        assert plan.hidden_seconds(1.0, torch.half, 1 << 20) == 0


@pytest.mark.parametrize("name", LINKS)
def test_bandwidths_have_names(name):
    plan = ga.distributed.plan(ga.causal_window_graph(400, window=11), ranks=4)
    seconds = [plan.seconds(torch.half, 9, bandwidth=x, per_node=2) for x in (name, LINKS[name])]
    assert seconds[0] == seconds[1]
    assert plan.seconds(torch.half, 9, bandwidth=3e9) == plan.seconds(
        torch.half, 9, bandwidth=(3e9, 3e9)
    )


def test_one_rank_sends_nothing_and_takes_no_time():
    plan = ga.distributed.plan(ga.causal_graph(100), 1)
    assert plan.pairs(0) == plan.sends(0) == []
    assert plan.seconds(torch.float32, 8) == 0
    assert "times the forward" not in str(plan)


def test_the_printed_bandwidths_are_the_published_ones():
    assert H100_SXM == (900e9 / 2, 400e9 / 8)  # NVLink 4 both ways together; NDR InfiniBand in bits


def test_a_printed_plan_says_who_receives_what():
    plan = ga.distributed.plan(ga.causal_window_graph(4096, window=256), ranks=4)
    text = plan.describe(dtype=torch.bfloat16, features=2048)
    assert str(plan) == text
    assert "   2   1,024  255: rank 1 (255)\n" in text
    assert "forward 1.04 MB, backward 1.04 MB; all-gather 12.6 MB each, 12 times" in text
    assert "predicted for H100 SXM in nodes of 8, not measured" in text


@pytest.mark.parametrize("ranks", [16, 17, 1000])
def test_a_printed_plan_is_short_for_any_number_of_ranks(ranks):
    text = str(ga.distributed.plan(ga.causal_graph(2048), ranks))
    assert len(text.splitlines()) <= 8 + 16
    assert max(map(len, text.splitlines())) <= 120
    assert ("11 other ranks" in text) == (ranks == 16)


@pytest.mark.long
@pytest.mark.parametrize(
    ("make", "rows"),
    [
        (lambda: ga.causal_window_graph(2**22, window=65), 64),
        (lambda: ga.causal_graph(2**24), None),
        (lambda: ga.batch([ga.causal_graph(64)] * 2**16), 0),
    ],
    ids=["window", "causal", "batch"],
)
def test_65536_ranks_take_seconds(make, rows):
    """About two seconds of one core; the bound is for slow machines."""
    start = time.process_time()
    plan = ga.distributed.plan(make(), 2**16)
    assert plan.sent_rows.sum() == plan.received_rows.sum()
    assert plan.pairs(2**15) or not rows
    assert plan.sends(2**15) or not rows
    assert len(str(plan)) < 2000
    assert time.process_time() - start < 60
    if rows is not None:
        assert plan.received_rows[1:].tolist() == [rows] * (2**16 - 1)
    else:  # a rank sees all chunks of 128 tokens before its second one, and owns one of those
        before = 2**17 - 1 - torch.arange(2**16)
        assert torch.equal(plan.received_rows, 128 * (before - 1))
        assert plan.partners.tolist() == [2**16 - 1] * 2**16


@pytest.mark.long
def test_edges_of_a_list_are_read_once_for_many_ranks():
    edges = torch.randint(2**16, (2, 2**18), generator=torch.Generator().manual_seed(0))
    edges = edges.unique(dim=1)
    graph = ga.from_edge_index(edges, 2**16)
    start = time.process_time()
    plan = ga.distributed.plan(graph, 2**14)
    source, target = graph.edge_index
    needed = torch.stack([target // 4, source])[:, source // 4 != target // 4].unique(dim=1)
    assert time.process_time() - start < 60
    assert torch.equal(plan.received_rows, torch.bincount(needed[0], minlength=2**14))
    assert torch.equal(plan.sent_rows, torch.bincount(needed[1] // 4, minlength=2**14))


def test_a_table_of_runs_joins_and_cuts_each_rank_alone():
    chance = random.Random(7)
    for _ in range(100):
        runs = [
            (chance.randrange(4), (start := chance.randint(0, 20), chance.randint(start, 20)))
            for _ in range(chance.randint(0, 12))
        ]
        runs = [(rank, run) for rank, run in runs if run[0] < run[1]]
        table = RunTable.of_runs(runs).joined(20)
        assert table.by_rank() == [
            (rank, joined(run for other, run in runs if other == rank))
            for rank in sorted({rank for rank, _ in runs})
        ]
        between = torch.tensor([0, 3, 11, 20])
        tokens = [token for _, of_rank in table.by_rank() for token in tokens_of(of_rank)]
        assert table.counted_between(between).tolist() == [
            sum(low <= token < high for token in tokens)
            for low, high in ((0, 3), (3, 11), (11, 20))
        ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"graph": torch.ones(2, 2)}, "graph must be a TokenGraph, got Tensor"),
        ({"ranks": 0}, "ranks must be >= 1, got 0"),
        ({"ranks": 2.0}, "ranks must be an integer >= 1, got 2.0"),
        ({"ranks": 11}, "ranks must be <= the number of targets = 10, got 11"),
        ({"moves": "sources"}, "moves must be one of 'targets', 'both', got 'sources'"),
        ({"zigzag": 1}, "zigzag must be True, False or None, got 1"),
        ({"moves": "both", "graph": ga.causal_graph(10, past=2)}, 'moves must be "targets" if'),
        (
            {"graph": ga.bipartite_complete_graph(10, 2), "ranks": 3},
            "ranks must be <= the number of sources = 2, got 3",
        ),
    ],
)
def test_arguments_out_of_range_are_named(change, message):
    arguments = {"graph": ga.causal_graph(10), "ranks": 2, **change}
    with pytest.raises(ValueError, match=message):
        ga.distributed.plan(**arguments)


def test_arguments_of_methods_are_named():
    plan = ga.distributed.plan(ga.causal_graph(10), 2)
    for call, message in (
        (lambda: plan.pairs(2), "rank must be < ranks = 2, got 2"),
        (lambda: plan.sends(-1), "rank must be >= 0, got -1"),
        (lambda: plan.bytes("bfloat16", 2), "dtype must be a torch.dtype, got 'bfloat16'"),
        (lambda: plan.all_gather_bytes(torch.half, 0), "features must be >= 1, got 0"),
        (
            lambda: plan.seconds(torch.half, 1, bandwidth="slow"),
            "bandwidth must be bytes per second",
        ),
        (lambda: plan.seconds(torch.half, 1, bandwidth=(1, 0)), "bandwidth must be a finite"),
        (lambda: plan.seconds(torch.half, 1, latency=-1), "latency must be a finite number >= 0"),
        (lambda: plan.seconds(torch.half, 1, per_node=0), "per_node must be >= 1, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
