"""FlexAttention's masks as graphs: the same pairs as `create_mask`, in the structure they have."""

import itertools
import re

import pytest
import torch
from torch.nn.attention.flex_attention import (
    BlockMask,
    and_masks,
    create_block_mask,
    create_mask,
    flex_attention,
    noop_mask,
    or_masks,
)

import graphattn as ga
from graphattn.graphs.builders import mask_mods
from graphattn.graphs.structures.structure import Band, Blocks, Complete


def coins(*shape: int, seed: int = 0, share: float = 0.3) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < share


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def window(reach: int):
    return lambda b, h, q_idx, kv_idx: (q_idx - kv_idx).abs() <= reach


def documents(*lengths: int):
    document_id = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    return lambda b, h, q_idx, kv_idx: document_id[q_idx] == document_id[kv_idx]


def prefix(length: int):
    return lambda b, h, q_idx, kv_idx: (kv_idx < length) | (q_idx >= kv_idx)


def every(step: int):
    return lambda b, h, q_idx, kv_idx: (q_idx - kv_idx) % step == 0


def others(b, h, q_idx, kv_idx):
    return q_idx != kv_idx


def listed(mask: torch.Tensor):
    return lambda b, h, q_idx, kv_idx: mask[q_idx, kv_idx]


# mask, number of tokens, the builder's graph
KNOWN = {
    "causal": (causal, 23, lambda: ga.causal_graph(23)),
    "sliding window": (and_masks(causal, window(4)), 23, lambda: ga.causal_window_graph(23, 5)),
    "window on both sides": (
        window(3),
        23,
        lambda: ga.window_path_graph(23, 3, self_loops=True),
    ),
    "window without oneself": (
        and_masks(window(3), others),
        23,
        lambda: ga.window_path_graph(23, 3),
    ),
    "more ahead than behind": (
        lambda b, h, q, kv: (q - kv <= 2) & (kv - q <= 5),
        23,
        lambda: ga.union(ga.causal_window_graph(23, 3), ga.causal_window_graph(23, 6).transpose()),
    ),
    "complete": (noop_mask, 23, lambda: ga.complete_graph(23)),
    "everyone else": (others, 23, lambda: ga.complete_graph(23, self_loops=False)),
    "dilated": (and_masks(every(3), window(7)), 23, lambda: ga.dilated_window_graph(23, 2, 3)),
    "dilated without oneself": (
        and_masks(every(3), window(7), others),
        23,
        lambda: ga.dilated_window_graph(23, 2, 3, self_loops=False),
    ),
    "blocks": (
        lambda b, h, q, kv: q // 5 == kv // 5,
        23,
        lambda: ga.block_window_graph(23, 5),
    ),
    "shifted blocks": (
        lambda b, h, q, kv: (q + 3) // 5 == (kv + 3) // 5,
        23,
        lambda: ga.block_window_graph(23, 5, shift=2),
    ),
    "documents": (
        documents(7, 3, 13),
        23,
        lambda: ga.batch([ga.complete_graph(n) for n in (7, 3, 13)]),
    ),
    "causal documents": (
        and_masks(causal, documents(7, 1, 3, 12)),
        23,
        lambda: ga.batch([ga.causal_graph(n) for n in (7, 1, 3, 12)]),
    ),
    "windows in documents": (
        and_masks(causal, window(3), documents(7, 2, 14)),
        23,
        lambda: ga.batch([ga.causal_window_graph(n, 4) for n in (7, 2, 14)]),
    ),
    "documents of one length": (
        and_masks(causal, documents(5, 5, 5)),
        15,
        lambda: ga.batch([ga.causal_graph(5)] * 3),
    ),
    "documents and padding": (
        lambda b, h, q, kv: documents(4, 6, 3)(b, h, q, kv) & (q >= kv) & (q < 10),
        13,
        lambda: ga.batch([
            ga.causal_graph(4),
            ga.causal_graph(6),
            ga.from_mask(torch.zeros(3, 3, dtype=torch.bool)),
        ]),
    ),
    "later ones alone": (
        lambda b, h, q, kv: q < kv,
        23,
        lambda: ga.from_mask(torch.ones(23, 23).triu(1).bool()),
    ),
    "itself alone": (lambda b, h, q, kv: q == kv, 23, lambda: ga.block_window_graph(23, 1)),
    "nobody": (
        lambda b, h, q, kv: q < kv - 100,
        23,
        lambda: ga.from_mask(torch.zeros(23, 23, dtype=torch.bool)),
    ),
    "a prefix that all see": (
        prefix(6),
        23,
        lambda: ga.from_mask(torch.ones(23, 23).tril().bool() | (torch.arange(23) < 6)),
    ),
    "prefixes of documents": (
        and_masks(documents(9, 5), or_masks(causal, lambda b, h, q, kv: kv % 9 < 3)),
        14,
        lambda: ga.batch([
            ga.from_mask(torch.ones(n, n).tril().bool() | (torch.arange(n) < 3)) for n in (9, 5)
        ]),
    ),
    "one token": (causal, 1, lambda: ga.causal_graph(1)),
}  # fmt: skip

# What no structure here is.
OTHER = {
    "random": listed(coins(23, 23)),
    "random with oneself": listed(coins(23, 23, seed=1) | torch.eye(23).bool()),
    "a sink and a window": lambda b, h, q, kv: (q >= kv) & ((q - kv <= 3) | (kv == 0)),
    "a neighborhood on a grid": lambda b, h, q, kv: (
        ((q // 5 - kv // 5).abs() <= 1) & ((q % 5 - kv % 5).abs() <= 1)
    ),
    "a column less": lambda b, h, q, kv: (q >= kv) & (kv != 7),
    "a window that grows": lambda b, h, q, kv: (q - kv).abs() <= q // 4,
}


@pytest.fixture(params=["whole", "in chunks"])
def chunks(request, monkeypatch):
    """Small masks are evaluated whole, large ones a few rows at a time."""
    if request.param == "in chunks":
        monkeypatch.setattr(mask_mods, "AT_ONCE", 61)


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("verify", [True, False])
def test_a_known_shape_becomes_the_graph_of_its_builder(name, verify, chunks):
    mask_mod, N, build = KNOWN[name]
    graph = ga.from_mask_mod(mask_mod, N, verify=verify)
    expected = build()
    assert graph == expected
    assert graph.structure is not None
    assert torch.equal(graph.to_mask(), create_mask(mask_mod, 1, 1, N, N, "cpu")[0, 0])
    assert graph.positions.tolist() == expected.positions.tolist()
    if expected.structure is not None:
        assert graph.is_causal == expected.is_causal


@pytest.mark.parametrize("name", OTHER)
def test_any_other_mask_becomes_its_list_of_edges(name, chunks):
    graph = ga.from_mask_mod(OTHER[name], 23)
    assert graph.structure is None
    assert torch.equal(graph.to_mask(), create_mask(OTHER[name], 1, 1, 23, 23, "cpu")[0, 0])


@pytest.mark.parametrize("place", [(5, 5), (17, 16), (9, 0), (22, 22), (22, 1), (0, 3)])
@pytest.mark.parametrize("name", ["causal", "complete", "windows in documents", "dilated"])
def test_a_shape_with_one_pair_changed_is_no_longer_that_shape(name, place, chunks):
    mask_mod, N, build = KNOWN[name]

    def changed(b, h, q_idx, kv_idx):
        return mask_mod(b, h, q_idx, kv_idx) ^ ((q_idx == place[0]) & (kv_idx == place[1]))

    graph = ga.from_mask_mod(changed, N)
    mask = build().to_mask()
    mask[place] = ~mask[place]
    assert torch.equal(graph.to_mask(), mask)


@pytest.mark.parametrize("seed", range(40))
def test_random_sequences_side_by_side_are_what_they_are(seed):
    draw = torch.Generator().manual_seed(seed)

    def number(most: int) -> int:
        return int(torch.randint(1, most + 1, (), generator=draw))

    makers = (
        lambda n: ga.causal_graph(n),
        lambda n: ga.complete_graph(n),
        lambda n: ga.causal_window_graph(n, number(4)),
        lambda n: ga.window_path_graph(n, number(3), self_loops=True),
        lambda n: ga.from_mask(torch.zeros(n, n, dtype=torch.bool)),
    )
    mask = torch.block_diag(
        *(makers[number(5) - 1](number(9)).to_mask().float() for _ in range(number(6)))
    ).bool()
    if seed % 2:  # and sometimes one pair more or less
        i, j = number(len(mask)) - 1, number(len(mask)) - 1
        mask[i, j] = ~mask[i, j]
    assert torch.equal(ga.from_mask_mod(listed(mask), len(mask)).to_mask(), mask)


@pytest.mark.long
def test_a_shape_that_samples_cannot_tell_is_not_guessed():
    """A single row differs from a causal mask, far away from all rows that are sampled."""
    N = 3000
    odd = 1234
    assert odd not in mask_mods._Mask(causal, (N, N), torch.device("cpu")).samples().tolist()

    def mask_mod(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & ~((q_idx == odd) & (kv_idx == 777))

    graph = ga.from_mask_mod(mask_mod, N)
    assert graph.structure is None
    assert graph.num_edges == N * (N + 1) // 2 - 1
    assert ga.from_mask_mod(mask_mod, N, verify=False) == ga.causal_graph(N), "as documented"


@pytest.mark.parametrize("sizes", [(5, 9), (9, 5), (0, 4), (4, 0), (1, 6)])
def test_unequally_many_sources_are_everything_or_a_list(sizes, chunks):
    N, M = sizes
    assert ga.from_mask_mod(noop_mask, N, M).structure == Complete(N, M)
    if not N or not M:
        return
    past = max(M - N, 0)
    graph = ga.from_mask_mod(lambda b, h, q, kv: q + past >= kv, N, M)
    assert torch.equal(graph.to_mask(), torch.ones(N, M).tril(past).bool())
    assert (graph.num_targets, graph.num_sources) == sizes


@pytest.mark.parametrize(
    "name", ["causal", "windows in documents", "dilated", "a prefix that all see"]
)
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_attention_over_the_graph_is_flex_attention(name, heads):
    mask_mod, N, _ = KNOWN[name]
    q, k, v = torch.randn(3, 2, heads, N, 8, dtype=torch.float64)
    blocks = create_block_mask(mask_mod, None, None, N, N, device="cpu")
    expected = flex_attention(q, k, v, block_mask=blocks)
    for graph in (ga.from_mask_mod(mask_mod, N), ga.from_mask_mod(blocks)):
        averages = ga.dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), graph)
        torch.testing.assert_close(averages.transpose(1, 2), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", [*KNOWN, *OTHER])
@pytest.mark.parametrize("block_size", [16, (8, 4)])
def test_a_block_mask_is_its_mask_mod(name, block_size):
    mask_mod, N = KNOWN[name][:2] if name in KNOWN else (OTHER[name], 23)
    blocks = create_block_mask(mask_mod, None, None, N, N, device="cpu", BLOCK_SIZE=block_size)
    assert blocks.seq_lengths == (N, N)
    assert ga.from_mask_mod(blocks) == ga.from_mask_mod(mask_mod, N)


def test_blocks_without_a_mask_mod_are_full():
    number = torch.tensor([[[1, 2, 1]]], dtype=torch.int32)
    index = torch.tensor([[[[0, 1, 2], [0, 1, 2], [2, 0, 1]]]], dtype=torch.int32)
    graph = ga.from_mask_mod(BlockMask.from_kv_blocks(number, index, BLOCK_SIZE=4))
    expected = torch.tensor([[1, 0, 0], [1, 1, 0], [0, 0, 1]]).repeat_interleave(4, 0)
    assert torch.equal(graph.to_mask(), expected.repeat_interleave(4, 1).bool())


def test_full_blocks_do_not_ask_the_mask_mod_and_blocks_left_out_do_not_either():
    partial, full = torch.tensor([[[1, 1]]]), torch.tensor([[[0, 1]]])
    blocks = BlockMask.from_kv_blocks(
        partial.int(),
        torch.tensor([[[[0, 1], [1, 0]]]]).int(),
        full.int(),
        torch.tensor([[[[0, 1], [0, 1]]]]).int(),
        BLOCK_SIZE=3,
        mask_mod=lambda b, h, q, kv: q < kv,
    )
    inside = torch.ones(3, 3).triu(1)
    expected = torch.cat([
        torch.cat([inside, torch.zeros(3, 3)], dim=1),
        torch.cat([torch.ones(3, 3), inside], dim=1),
    ])  # fmt: skip
    assert torch.equal(ga.from_mask_mod(blocks).to_mask(), expected.bool())


def test_part_of_a_block_mask_may_be_taken():
    blocks = create_block_mask(causal, None, None, 300, 300, device="cpu")
    assert ga.from_mask_mod(blocks, 200, 200) == ga.causal_graph(200)
    with pytest.raises(ValueError, match=r"num_targets must be <= 300, .* got 301"):
        ga.from_mask_mod(blocks, 301)


def test_the_entries_of_a_batch_are_packed_side_by_side():
    lengths = torch.tensor([5, 0, 9])

    def padded(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (q_idx < lengths[b])

    graph = ga.from_mask_mod(padded, 9, batch=3)
    assert (graph.num_tokens, len(graph.sizes)) == (27, 4)  # the first: five tokens, and padding
    expected = create_mask(padded, 3, 1, 9, 9, "cpu")[:, 0]
    assert torch.equal(graph.to_mask(), torch.block_diag(*expected.float()).bool())
    blocks = create_block_mask(padded, 3, None, 9, 9, device="cpu", BLOCK_SIZE=4)
    assert ga.from_mask_mod(blocks, batch=3) == graph
    alike = ga.from_mask_mod(causal, 4, batch=3)
    assert alike == ga.batch([ga.causal_graph(4)] * 3)
    with pytest.raises(
        ValueError, match=r"batch must be given if mask_mod depends on b.*got batch=None.*batch=B"
    ):
        ga.from_mask_mod(padded, 9)
    with pytest.raises(
        ValueError, match=r"batch must be given if mask_mod depends on b.*got batch=None.*batch=B"
    ):
        ga.from_mask_mod(blocks)


@pytest.mark.long
def test_masks_of_heads_must_be_equal(chunks):
    reach = torch.tensor([3, 3, 5])

    def by_head(b, h, q_idx, kv_idx):
        return (q_idx - kv_idx).abs() <= reach[h]

    with pytest.raises(
        ValueError, match=r"heads must be given if mask_mod uses h.*got heads=None.*heads=H"
    ):
        ga.from_mask_mod(by_head, 20)
    assert ga.from_mask_mod(by_head, 20, heads=2) == ga.window_path_graph(20, 3, self_loops=True)
    words = r"same for all heads.*heads 0 and 2 differ at q_idx = 0, kv_idx = 4"
    with pytest.raises(ValueError, match=words):
        ga.from_mask_mod(by_head, 20, heads=3)
    blocks = create_block_mask(by_head, None, 3, 20, 20, device="cpu", BLOCK_SIZE=4)
    with pytest.raises(ValueError, match=words):
        ga.from_mask_mod(blocks, heads=3)


def test_a_block_mask_of_equal_heads_and_entries_needs_neither_number():
    blocks = create_block_mask(causal, 3, 2, 40, 40, device="cpu", BLOCK_SIZE=16)
    assert ga.from_mask_mod(blocks) == ga.causal_graph(40)
    assert ga.from_mask_mod(blocks, batch=3) == ga.batch([ga.causal_graph(40)] * 3)


def test_combined_masks_do_not_count_as_looking_at_b_or_h():
    mask_mod = or_masks(and_masks(causal, window(3)), noop_mask)
    assert ga.from_mask_mod(mask_mod, 9) == ga.complete_graph(9)


class Sliding:
    """A callable object, as some libraries keep their masks."""

    def __init__(self, reach: int) -> None:
        self.reach = torch.tensor(reach)

    def __call__(self, b, h, q_idx, kv_idx, scale=1):
        return torch.where(q_idx >= kv_idx, q_idx - kv_idx <= self.reach, False)


def test_objects_that_can_be_called_are_masks():
    assert ga.from_mask_mod(Sliding(3), 12) == ga.causal_window_graph(12, 4)


BAD = [
    (
        lambda: ga.from_mask_mod(lambda score, b, h, q, kv: score, 4),
        r"mask_mod must take .* five arguments: give what a "
        r"score_mod adds to the scores as edge_bias",
    ),
    (lambda: ga.from_mask_mod(torch.ones(3, 3), 3), r"mask_mod must be a function"),
    (
        lambda: ga.from_mask_mod(causal),
        r"num_targets must be an integer >= " r"0 if mask_mod is a function",
    ),
    (lambda: ga.from_mask_mod(causal, -1), r"num_targets must be >= 0, got -1"),
    (lambda: ga.from_mask_mod(causal, 3, 1.5), r"num_sources must be an integer >= 0"),
    (lambda: ga.from_mask_mod(causal, 3, batch=0), r"batch must be >= 1, got 0"),
    (lambda: ga.from_mask_mod(causal, 3, heads=True), r"heads must be an integer >= 1"),
    (
        lambda: ga.from_mask_mod(lambda b, h, q, kv: q - kv, 4),
        r"mask_mod must return booleans, got torch.int64",
    ),
    (
        lambda: ga.from_mask_mod(lambda q, kv: q >= kv, 4),
        r"mask_mod must be a function \(b, h, q_idx, kv_idx\).*TypeError",
    ),
    (
        lambda: ga.from_mask_mod(documents(3, 4), 9),
        r"with q_idx < 9 and kv_idx < 9. When it was called with these, it raised IndexError",
    ),
    (
        lambda: ga.from_mask_mod(
            create_block_mask(causal, 2, None, 40, 40, device="cpu", BLOCK_SIZE=8)[0:1]
        ),
        r"sliced BlockMask",
    ),
]


@pytest.mark.parametrize(("call", "words"), BAD)
def test_what_is_no_mask_of_a_graph_is_refused_by_name(call, words):
    with pytest.raises(ValueError, match=re.compile(words, re.DOTALL)):
        call()


@pytest.mark.long
def test_large_masks_take_the_memory_of_a_chunk(monkeypatch):
    """Nothing of N x N entries is held: at most AT_ONCE pairs are asked for at a time."""
    asked = []

    def counting(function, B, H, rows, columns, device):
        asked.append(rows * columns)
        return create_mask(function, B, H, rows, columns, device)

    monkeypatch.setattr(mask_mods, "AT_ONCE", 1 << 14)
    monkeypatch.setattr("torch.nn.attention.flex_attention.create_mask", counting)
    N = 1000
    graph = ga.from_mask_mod(and_masks(causal, window(30)), N)
    assert graph.structure == Band(N, 30, 0)
    assert max(asked) <= max(1 << 14, mask_mods.SAMPLES * N, 2 * N)
    assert sum(asked) >= N * N
    asked.clear()
    assert ga.from_mask_mod(and_masks(causal, window(30)), N, verify=False) == graph
    assert sum(asked) < N * N / 10


def test_blocks_keep_their_structure_in_all_sizes():
    for N, size, shift in itertools.product((9, 10), (2, 3, 4), (0, 1)):
        graph = ga.from_mask_mod(
            lambda b, h, q, kv, size=size, shift=shift: (
                (q + size - shift) // size == (kv + size - shift) // size
            ),
            N,
        )
        assert graph.structure == Blocks(N, size, shift)


def test_a_block_mask_says_how_many_entries_and_heads_it_has():
    of_entries = create_block_mask(
        lambda b, h, q, kv: (q >= kv) & (kv <= b * 20), 3, None, 40, 40, device="cpu", BLOCK_SIZE=16
    )
    for count in (2, 4):
        with pytest.raises(ValueError, match=f"batch must be 3, .* got {count}"):
            ga.from_mask_mod(of_entries, batch=count)
    assert len(ga.from_mask_mod(of_entries, batch=3).sizes) == 3
    of_heads = create_block_mask(
        lambda b, h, q, kv: (q >= kv) & (kv <= h * 20), None, 3, 40, 40, device="cpu"
    )
    with pytest.raises(ValueError, match=r"heads must be 3, .* got 1"):
        ga.from_mask_mod(of_heads, heads=1)
