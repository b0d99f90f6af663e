"""Batches by tokens: within the budget, in an order that can be continued anywhere."""

import itertools
import re
import time

import pytest
import torch
from accelerate import Accelerator
from accelerate.data_loader import BatchSamplerShard, skip_first_batches
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_corpus import random_records
from torch.nn import functional
from torch.utils.data import DataLoader

import graphattn as ga
from graphattn.data import TokenBatches

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=80)


def many(count=3000, longest=700, seed=0):
    return torch.randint(10, longest, (count,), generator=torch.Generator().manual_seed(seed))


@settings(max_examples=150, deadline=None)
@given(
    lengths=LENGTHS,
    room=st.integers(0, 200),
    seed=st.integers(0, 3),
    shuffle=st.booleans(),
    packed=st.booleans(),
)
def test_every_example_is_in_one_batch_and_no_batch_is_larger_than_allowed(
    lengths, room, seed, shuffle, packed
):
    most = max(lengths) + room
    batches = TokenBatches(lengths, most, seed=seed, shuffle=shuffle, packed=packed)
    for epoch in range(3):
        batches.set_epoch(epoch)
        chosen = list(batches)
        assert sorted(i for batch in chosen for i in batch) == list(range(len(lengths)))
        assert len(chosen) == len(batches)
        for batch in chosen:
            sizes = [lengths[i] for i in batch]
            assert (sum(sizes) if packed else max(sizes) * len(sizes)) <= most


@settings(max_examples=80, deadline=None)
@given(lengths=LENGTHS, room=st.integers(0, 200))
def test_padded_batches_are_as_many_in_every_epoch_and_all_but_one_full(lengths, room):
    most = max(lengths) + room
    batches = TokenBatches(lengths, most)
    sizes = []
    for epoch in range(4):
        batches.set_epoch(epoch)
        sizes.append(len(list(batches)))
    assert len(set(sizes)) == 1
    # Full: one more example as long as the longest that may come with them would be too much.
    ordered = list(TokenBatches(lengths, most, shuffle=False))
    for batch in ordered[:-1]:
        assert max(lengths[i] for i in batch) / 0.9 * (len(batch) + 1) > most - 1e-9


def test_little_of_a_batch_is_padding_and_shuffling_costs_no_batches():
    lengths = many()
    batches = TokenBatches(lengths, 8192, seed=1)
    padded = sum(int(lengths[each].max()) * len(each) for each in batches)
    assert padded <= 1.1 * int(lengths.sum())
    assert len(batches) == len(TokenBatches(lengths, 8192, shuffle=False))
    random = torch.randperm(len(lengths)).split(12)  # what chance would give
    assert sum(int(lengths[each].max()) * len(each) for each in random) > 1.5 * int(lengths.sum())


@pytest.mark.parametrize("packed", [False, True])
def test_the_order_follows_from_seed_and_epoch_alone(packed):
    lengths = many()

    def order(seed, epoch):
        batches = TokenBatches(lengths, 4096, seed=seed, packed=packed)
        batches.set_epoch(epoch)
        return list(batches)

    orders = [order(seed, epoch) for seed in (0, 1) for epoch in (0, 1, 7)]
    assert orders == [order(seed, epoch) for seed in (0, 1) for epoch in (0, 1, 7)]
    for number, each in enumerate(orders):
        for other in orders[:number]:
            assert each != other
            assert {frozenset(b) for b in each} != {frozenset(b) for b in other}


def test_batches_come_in_random_order_whatever_their_length():
    lengths = many()
    batches = TokenBatches(lengths, 4096)
    longest = torch.tensor([float(lengths[each].max()) for each in batches])
    places = torch.arange(len(longest), dtype=torch.float32)
    correlation = torch.corrcoef(torch.stack([longest.argsort().argsort().float(), places]))[0, 1]
    assert abs(correlation) < 4 / len(longest) ** 0.5  # four standard deviations of chance


def test_without_shuffling_the_longest_come_first_in_every_epoch():
    lengths = many(200)
    batches = TokenBatches(lengths, 2000, shuffle=False)
    first = list(batches)
    batches.set_epoch(3)
    assert list(batches) == first
    flat = [int(lengths[i]) for each in first for i in each]
    assert flat == sorted(flat, reverse=True)
    packed = TokenBatches(lengths, 2000, shuffle=False, packed=True)
    assert [i for each in packed for i in each] == list(range(200))


@pytest.mark.parametrize("packed", [False, True])
def test_an_epoch_goes_on_from_any_batch_as_it_would_have(packed):
    lengths = many(150)
    whole = TokenBatches(lengths, 3000, seed=5, packed=packed)
    whole.set_epoch(2)
    expected = list(whole)
    for start in range(len(expected) + 1):
        other = TokenBatches(lengths, 3000, seed=5, packed=packed)
        other.set_epoch(2)
        other.start_at(start)
        other.set_epoch(2)  # as an engine says again: nothing changes
        assert list(other) == expected[start:]
        assert list(other) == expected  # what begins late is one iteration
        assert len(other) == len(expected)
    whole.start_at(3)
    whole.set_epoch(4)
    assert len(list(whole)) == len(whole)
    with pytest.raises(ValueError, match=f"batch must be at most {len(whole)}"):
        whole.start_at(len(whole) + 1)


class Noting(torch.utils.data.Dataset):
    """Notes what is read."""

    def __init__(self, windows):
        self.windows, self.read = windows, []

    def __len__(self):
        return len(self.windows)

    def __getitem__(self, index):
        self.read.append(index)
        return self.windows[index]


def test_a_loader_goes_on_with_the_same_tensors_and_reads_nothing_of_what_came_before():
    corpus = random_records([300, 150, 420, 77])
    part = ga.data.split_corpus(corpus, validation=0.0, test=0.0)["train"]
    windows = ga.data.Windows(part, 25)

    def loader(start):
        data = Noting(windows)
        batches = TokenBatches(windows.lengths, 100, seed=2)
        batches.set_epoch(1)
        batches.start_at(start)
        chosen = list(DataLoader(data, batch_sampler=batches, collate_fn=list))
        return [torch.cat([each["tokens"] for each in batch]) for batch in chosen], data.read

    everything, read = loader(0)
    assert sorted(read) == list(range(len(windows)))
    rest, read_again = loader(6)
    assert len(rest) == len(everything) - 6
    assert all(map(torch.equal, rest, everything[6:]))
    assert read_again == read[-len(read_again) :]


@pytest.mark.parametrize("even_batches", [True, False])
def test_two_processes_share_the_batches_between_them(even_batches):
    lengths = [*range(1, 41), *[40] * 45]
    expected = list(TokenBatches(lengths, 200, seed=1))
    assert len(expected) % 2 == 1  # else there would be nothing to even out
    shards = [
        BatchSamplerShard(TokenBatches(lengths, 200, seed=1), 2, rank, even_batches=even_batches)
        for rank in range(2)
    ]
    chosen = [list(each) for each in shards]
    assert [len(each) for each in chosen] == [len(each) for each in shards]
    assert chosen[0] == expected[::2]
    assert chosen[1][: len(expected) // 2] == expected[1::2]
    again = [] if not even_batches else [expected[0]]  # from the beginning, so that none waits
    assert chosen[1][len(expected) // 2 :] == again


def test_accelerate_prepares_a_loader_of_them_and_skips_in_it():
    lengths = many(60, longest=40)
    data = [{"index": torch.tensor(n)} for n in range(60)]
    batches = TokenBatches(lengths, 200, seed=1)
    loader = Accelerator(cpu=True).prepare(DataLoader(data, batch_sampler=batches))
    loader.set_epoch(3)
    chosen = [each["index"].tolist() for each in loader]
    other = TokenBatches(lengths, 200, seed=1)
    other.set_epoch(3)
    assert chosen == list(other)
    loader.set_epoch(3)
    skipping = skip_first_batches(loader, 4)
    assert [each["index"].tolist() for each in skipping] == chosen[4:]


def test_packed_batches_are_filled_in_order_and_join_without_padding():
    lengths = many(200)
    batches = TokenBatches(lengths, 2000, seed=1, packed=True)
    chosen = list(batches)
    for each, following in itertools.pairwise(chosen):
        assert int(lengths[each].sum() + lengths[following[0]]) > 2000
    for most, parts in ((10, [[0, 1], [2]]), (9, [[0], [1], [2]])):
        assert list(TokenBatches([5, 5, 5], most, shuffle=False, packed=True)) == parts
    items = [{"tokens": torch.full((int(lengths[i]),), i)} for i in chosen[0]]
    batch = ga.collate(items, graph=lambda n: ga.window_path_graph(n, 2))
    assert batch.tokens.shape == (int(lengths[chosen[0]].sum()),)
    assert batch.graph.num_tokens <= 2000


@pytest.mark.parametrize(
    ("lengths", "most", "message"),
    [
        ([3, 9, 2], 8, "the length of the longest example, 9 for example 1, got 8"),
        ([3, 0], 8, "lengths must be >= 1, got 0 for example 1"),
        ([], 8, "lengths must hold the length of at least one example"),
        ([1.5], 8, "lengths must be a list or tensor of integers, one per example, got"),
        (
            torch.ones(2, 2, dtype=torch.int64),
            8,
            ("lengths must be a list or tensor of integers, one per example, got"),
        ),
        (torch.tensor([True, True]), 3, "lengths must be a list or tensor of integers"),
        (["x"], 8, "lengths must be a list or tensor of integers, one per example, got"),
        ([3], 0, "max_tokens must be >= 1, got 0"),
    ],
)
def test_what_makes_no_batches_is_refused_by_name(lengths, most, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        TokenBatches(lengths, most)


@pytest.mark.long
@pytest.mark.parametrize("workers", [0, 2])
def test_a_genome_is_loaded_many_times_as_fast_as_it_is_trained_on(workers, tmp_path):
    letters = torch.tensor(list(b"ACGT"), dtype=torch.uint8)
    genome = letters[torch.randint(4, (4_600_000,), generator=torch.Generator().manual_seed(0))]
    (tmp_path / "genome.fasta").write_bytes(b">genome\n" + genome.numpy().tobytes() + b"\n")
    corpus = ga.data.load_corpus(tmp_path / "genome.fasta", cache=tmp_path / "cache")
    windows = ga.data.Windows(
        ga.data.split_corpus(corpus, validation=0.05, test=0.05)["train"], 512
    )
    batches = TokenBatches(windows.lengths, 8192)
    loader = DataLoader(windows, batch_sampler=batches, num_workers=workers, collate_fn=list)

    model = ga.models.SequenceEncoder(corpus.tokenizer.vocab_size, 128, depth=5, heads=4)
    tokens = torch.stack([windows[n]["tokens"] for n in range(16)])
    began = time.perf_counter()
    functional.cross_entropy(model(tokens).mT, tokens).backward()
    step = time.perf_counter() - began

    began = time.perf_counter()
    assert sum(1 for _ in loader) == len(batches)
    assert (time.perf_counter() - began) / len(batches) < step / 10
