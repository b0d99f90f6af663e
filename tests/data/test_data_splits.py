"""Parts of a corpus: nothing is in two, nothing is lost, and what belongs together stays so."""

import itertools
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_corpus import PlainCorpus, numbered, random_records

import graphattn as ga
from graphattn.data import splits
from graphattn.data.families import families

NAMES = ["train", "validation", "test"]


def places(corpus, parts):
    """The part of every token, found token by token."""
    begins = [0, *itertools.accumulate(corpus.lengths.tolist())]
    parts_of = [[] for _ in range(corpus.num_tokens)]
    for name, part in parts.items():
        for record, start, stop in part.spans.tolist():
            assert 0 <= start < stop <= corpus.lengths[record]
            for t in range(start, stop):
                parts_of[begins[record] + t].append(name)
    return parts_of


def shares_of(corpus, parts):
    return {name: part.num_tokens / corpus.num_tokens for name, part in parts.items()}


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=30),
    shares=st.tuples(st.floats(0, 0.45), st.floats(0, 0.45)),
    by=st.sampled_from(["auto", "position", "record", "group"]),
    kind=st.sampled_from(["text", "nucleotide", "protein"]),
    seed=st.integers(0, 5),
)
def test_every_token_is_in_one_part_and_what_was_asked_for_is_not_empty(
    lengths, shares, by, kind, seed
):
    groups = [str(n % 7) for n in range(len(lengths))]
    corpus = numbered(lengths, kind=kind, groups=groups)
    corpus.tokenizer = None  # numbers are no residues: equal ones alone are looked for
    try:
        parts = ga.data.split_corpus(corpus, validation=shares[0], test=shares[1], by=by, seed=seed)
    except ValueError:  # too few tokens or records: what is refused is below
        return
    assert list(parts) == NAMES
    assert all(len(each) == 1 for each in places(corpus, parts))
    for name, share in zip(NAMES[1:], shares, strict=True):
        assert (parts[name].num_tokens > 0) == (share > 0)
    assert parts["train"].num_tokens > 0


@settings(max_examples=50, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=20),
    shares=st.tuples(st.floats(0.05, 0.4), st.floats(0.05, 0.4)),
)
def test_by_position_the_parts_follow_one_another_and_the_last_is_the_end(lengths, shares):
    corpus = numbered([40, *lengths, 40])
    parts = ga.data.split_corpus(corpus, validation=shares[0], test=shares[1], by="position")
    order = [name for (name,) in places(corpus, parts)]
    assert order == sorted(order, key=NAMES.index)
    got = shares_of(corpus, parts)
    allowed = 0.2 * min(shares) + 1 / corpus.num_tokens  # two cuts, and one token of rounding
    assert abs(got["validation"] - shares[0]) <= allowed
    assert abs(got["test"] - shares[1]) <= allowed


def test_the_end_of_one_text_is_held_out_to_the_token():
    corpus = numbered([1000])
    parts = ga.data.split_corpus(corpus, validation=0.1, test=0.05)
    assert [part.spans.tolist() for part in parts.values()] == [
        [[0, 0, 850]],
        [[0, 850, 950]],
        [[0, 950, 1000]],
    ]


def test_a_cut_moves_to_the_border_of_a_record_that_is_near_and_else_cuts_the_record():
    near = numbered([898, 102])  # a tenth of the share is 10 tokens
    parts = ga.data.split_corpus(near, validation=0.0, test=0.1, by="position")
    assert parts["test"].spans.tolist() == [[1, 0, 102]]
    far = numbered([880, 120])
    parts = ga.data.split_corpus(far, validation=0.0, test=0.1, by="position")
    assert parts["test"].spans.tolist() == [[1, 20, 120]]
    assert parts["train"].spans.tolist() == [[0, 0, 880], [1, 0, 20]]


def test_equal_records_stay_in_one_part():
    distinct = random_records([30] * 40, kind="nucleotide")
    corpus = PlainCorpus([distinct.records[n % 13] for n in range(40)], "nucleotide")
    for seed in range(10):
        parts = ga.data.split_corpus(corpus, validation=0.2, test=0.2, by="record", seed=seed)
        texts = [
            {tuple(corpus.records[r].tolist()) for r in part.spans[:, 0].tolist()}
            for part in parts.values()
        ]
        assert sum(map(len, texts)) == len(set.union(*texts)) == 13
        assert all((part.spans[:, 2] == 30).all() for part in parts.values())


def test_equal_images_stay_in_one_part():
    images = torch.rand(8, 1, 2, 2)
    corpus = PlainCorpus([images[n % 8] for n in range(24)], "images")
    parts = ga.data.split_corpus(corpus, validation=0.0, test=0.25)
    assert parts["test"].num_tokens == 6
    drawn = [{r % 8 for r in part.spans[:, 0].tolist()} for part in parts.values()]
    assert not drawn[0] & drawn[2]


def test_relatives_among_proteins_stay_in_one_part():
    first = random_records([120] * 12, seed=3).records
    copies = []
    for each in first:
        other = each.clone()
        other[::10] = 3  # 90 % identity
        copies.append(other)
    corpus = PlainCorpus([*first, *copies, *(each[:60] for each in first)], "protein")
    for seed in range(8):
        parts = ga.data.split_corpus(corpus, validation=0.2, test=0.2, seed=seed)
        drawn = [{r % 12 for r in part.spans[:, 0].tolist()} for part in parts.values()]
        assert sum(map(len, drawn)) == 12
    nucleotides = PlainCorpus(corpus.records, "nucleotide")  # where equal ones alone are kept
    parts = ga.data.split_corpus(nucleotides, validation=0.2, test=0.2, by="record")
    drawn = [{r % 12 for r in part.spans[:, 0].tolist()} for part in parts.values()]
    assert sum(map(len, drawn)) > 12


def test_a_short_fragment_belongs_to_the_whole_and_repeats_of_one_letter_to_nothing():
    whole, other = random_records([400, 400], seed=5).records
    assert families([whole, other, whole[100:112]], 24) == [[0, 2], [1]]
    ends = torch.full((20,), 7)  # of one word, sixteen times
    assert families([torch.cat([whole, ends]), torch.cat([other, ends])], 24) == [[0], [1]]


def test_where_relatives_are_too_many_to_compare_a_warning_says_so(monkeypatch):
    monkeypatch.setattr(splits, "_MOST_COMPARED", 500)
    corpus = random_records([20] * 30)
    with pytest.warns(UserWarning, match="compares at most 500 residues"):
        parts = ga.data.split_corpus(corpus, validation=0.1, test=0.1)
    assert len(parts["test"]) == 3


def test_records_are_drawn_by_the_seed_and_come_near_the_shares():
    lengths = torch.randint(20, 900, (600,), generator=torch.Generator().manual_seed(1)).tolist()
    corpus = random_records(lengths, kind="nucleotide")

    def drawn(seed):
        return ga.data.split_corpus(corpus, validation=0.05, test=0.1, by="record", seed=seed)

    assert torch.equal(drawn(4)["test"].spans, drawn(4)["test"].spans)
    assert not torch.equal(drawn(4)["test"].spans, drawn(5)["test"].spans)
    for seed in range(5):
        got = shares_of(corpus, drawn(seed))
        assert got["validation"] == pytest.approx(0.05, rel=0.01)
        assert got["test"] == pytest.approx(0.1, rel=0.01)


def test_groups_stay_whole_and_no_other_choice_of_them_is_nearer_to_the_shares():
    sizes = [310, 40, 170, 95, 130, 255]
    names, lengths = [], []
    for number, size in enumerate(sizes):
        for part in (size // 2, size - size // 2):
            names.append(f"gene {len(names)} [species {number}]")
            lengths.append(part)
    corpus = random_records(lengths, names=names)
    shares, total = (0.2, 0.1), sum(sizes)
    best = min(
        max(
            abs(sum(s for s, p in zip(sizes, choice, strict=True) if p == k) / total / share - 1)
            for k, share in enumerate(shares, start=1)
        )
        for choice in itertools.product(range(3), repeat=6)
        if set(choice) == {0, 1, 2}
    )
    parts = ga.data.split_corpus(
        corpus, validation=shares[0], test=shares[1], group=r"\[species (\d)\]"
    )
    drawn = [{r // 2 for r in part.spans[:, 0].tolist()} for part in parts.values()]
    assert sum(map(len, drawn)) == 6
    assert sum(map(len, parts.values())) == 12
    got = shares_of(corpus, parts)
    deviation = max(abs(got["validation"] / 0.2 - 1), abs(got["test"] / 0.1 - 1))
    assert deviation == pytest.approx(best)


def test_without_an_expression_groups_are_those_of_the_corpus():
    corpus = random_records([10] * 20, groups=["ab"[n % 2] + str(n % 5) for n in range(20)])
    parts = ga.data.split_corpus(corpus, validation=0.1, test=0.1, by="group")
    owners = [{corpus.groups[r] for r in part.spans[:, 0].tolist()} for part in parts.values()]
    assert [len(each) for each in owners] == [8, 1, 1]


def test_a_record_without_the_first_choice_of_an_expression_is_grouped_by_the_second():
    names = ["a 1.1", "b 1.1", "c", "d"]
    corpus = random_records([10] * 4, names=names)
    pattern = r"^\S+ ([\d.]+)|^(\S+)"
    together = set()
    for seed in range(20):
        parts = ga.data.split_corpus(corpus, validation=0.0, test=0.5, group=pattern, seed=seed)
        for part in (parts["train"], parts["test"]):
            together.add(tuple(sorted(part.spans[:, 0].tolist())))
    assert together == {(0, 1), (2, 3)}


@pytest.mark.every_case
@pytest.mark.parametrize("group", ["[xy]", r"([xy])\d"])
def test_a_group_is_what_parentheses_match_and_without_any_the_whole(group):
    corpus = random_records([10] * 4, names=["x1", "x2", "y1", "y2"])
    for seed in range(8):
        parts = ga.data.split_corpus(corpus, validation=0.0, test=0.5, group=group, seed=seed)
        drawn = {tuple(sorted(parts[each].spans[:, 0].tolist())) for each in ("train", "test")}
        assert drawn == {(0, 1), (2, 3)}


def test_auto_takes_the_end_of_texts_and_records_of_all_else():
    def kinds(corpus, **how):
        parts = ga.data.split_corpus(corpus, validation=0.1, test=0.1, **how)
        return [part.spans[:, 0].tolist() for part in parts.values()]

    in_order = [list(range(32)), list(range(32, 36)), list(range(36, 40))]
    assert kinds(random_records([50] * 40, kind="text")) == in_order
    drawn = kinds(random_records([50] * 40, kind="protein"))
    assert [len(each) for each in drawn] == [32, 4, 4]
    assert drawn != in_order
    # A chromosome with two plasmids has no records to spare: its end is held out.
    genome = random_records([900, 60, 40], kind="nucleotide")
    assert kinds(genome) == [[0], [0], [1, 2]]
    with pytest.raises(ValueError, match="records or families of records are not divided"):
        kinds(genome, by="record")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (
            {"validation": 0.6, "test": 0.5},
            ("must have a sum below 1, so that tokens are left for training, got 0.6"),
        ),
        ({"validation": -0.1, "test": 0.1}, "validation must be a finite number >= 0"),
        ({"validation": 0.1, "test": float("nan")}, "test must be a finite number >= 0"),
        ({"by": "sequence"}, "by must be one of 'auto', 'position', 'record', 'group'"),
        ({"by": "position", "group": "x"}, "by must be 'group' or 'auto' if group is given"),
        ({"group": "("}, "group must be a regular expression, got"),
        ({"group": "record [0-8]$"}, "finds none in 'record 9' and 10 others; add an alternative"),
        ({"by": "group"}, "the corpus has none for 'record 0' and 19 others"),
        ({"test": 0.01, "by": "record"}, "test=0.01 leave a part empty"),
        ({"test": 0.001, "by": "position"}, "test must have at least one token"),
        ({"seed": -1}, "seed must be >= 0"),
    ],
)
def test_what_cannot_be_split_is_refused_by_name(how, message):
    corpus = random_records([10] * 20)
    with pytest.raises(ValueError, match=re.escape(message)):
        ga.data.split_corpus(corpus, **{"validation": 0.1, "test": 0.1, **how})


def test_a_corpus_without_tokens_is_refused():
    with pytest.raises(ValueError, match="corpus must hold at least one token"):
        ga.data.split_corpus(PlainCorpus([]), validation=0.1, test=0.1)


def test_a_cut_moves_to_no_border_that_would_take_most_of_a_small_training_part():
    # 5 % is 21 tokens to learn from; the border at 19 is near, measured by the other shares alone.
    corpus = numbered([3, 10, 3, 3, 200, 200])
    parts = ga.data.split_corpus(corpus, validation=0.45, test=0.5, by="position")
    assert abs(parts["train"].num_tokens - 0.05 * 419) <= 0.1 * 0.05 * 419
    parts = ga.data.split_corpus(numbered([490, 510]), validation=0.49, test=0.49, by="position")
    assert parts["train"].num_tokens == 20
