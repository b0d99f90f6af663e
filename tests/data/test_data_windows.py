"""Windows: inside a record and a part, and together all of it."""

import itertools
import pathlib
import pickle
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_corpus import PlainCorpus, numbered, random_records
from torch.utils.data import DataLoader

import graphattn as ga
from graphattn.data import Part, Windows


@st.composite
def parts(draw):
    """Stretches of records, with gaps between them or none."""
    lengths = draw(st.lists(st.integers(1, 50), min_size=1, max_size=8))
    spans = []
    for record, length in enumerate(lengths):
        cuts = sorted(draw(st.sets(st.integers(0, length), max_size=6)))
        spans += [(record, a, b) for a, b in itertools.pairwise(cuts) if draw(st.booleans())]
    return Part(numbered(lengths), torch.tensor(spans, dtype=torch.int64).reshape(-1, 3))


@pytest.mark.long
@settings(max_examples=150, deadline=None)
@given(part=parts(), length=st.integers(1, 20), data=st.data())
def test_no_window_crosses_a_border_and_every_token_is_in_one(part, length, data):
    stride = data.draw(st.none() | st.integers(1, length))
    windows = Windows(part, length, stride=stride)
    # Tokens of this corpus are all different: each says where it stands.
    expected = []
    for record, start, stop in part.spans.tolist():
        tokens = part.corpus.records[record][start:stop].tolist()
        for first in range(0, len(tokens), stride or length):
            expected.append(tokens[first : first + length])
            if first + length >= len(tokens):
                break
    assert len(windows) == len(expected)
    assert [window["tokens"].tolist() for window in windows] == expected
    assert windows.lengths.tolist() == [len(window) for window in expected]
    seen = sorted({token for window in expected for token in window})
    assert seen == sorted(
        t for r, a, b in part.spans.tolist() for t in part.corpus.records[r][a:b].tolist()
    )


def test_an_image_is_one_window():
    images = torch.rand(5, 1, 4, 4)
    corpus = PlainCorpus(list(images), "images")
    part = Part(corpus, torch.tensor([[1, 0, 1], [3, 0, 1]]))
    windows = Windows(part, length=4)
    assert [torch.equal(a["image"], images[b]) for a, b in zip(windows, (1, 3), strict=True)] == [
        True,
        True,
    ]
    assert windows.lengths.tolist() == [1, 1]


class LongCorpus(PlainCorpus):
    def example(self, i, start=0, stop=None):
        return {"tokens": torch.arange(start, stop) + 10**12 * i}


def test_a_window_far_inside_a_record_of_a_trillion_tokens_is_found_at_once():
    spans = torch.tensor([[n, 7, 10**12] for n in range(1000)])
    windows = Windows(Part(LongCorpus([]), spans), 512)
    each = -(-(10**12 - 7) // 512)
    assert len(windows) == 1000 * each
    began = time.process_time()
    tokens = windows[999 * each + 12_345]["tokens"]
    assert time.process_time() - began < 0.05
    assert torch.equal(tokens, torch.arange(512) + 7 + 512 * 12_345 + 999 * 10**12)
    assert len(pickle.dumps(windows)) < 100_000


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_read_what_the_main_process_reads(workers):
    corpus = random_records([100, 33, 260])
    part = ga.data.split_corpus(corpus, validation=0.0, test=0.0)["train"]
    windows = Windows(part, 32)
    batches = ga.data.TokenBatches(windows.lengths, 128, seed=3)
    loader = DataLoader(windows, batch_sampler=batches, num_workers=workers, collate_fn=list)
    for batch, indices in zip(loader, batches, strict=True):
        for window, index in zip(batch, indices, strict=True):
            assert torch.equal(window["tokens"], windows[index]["tokens"])
    again = pickle.loads(pickle.dumps(windows))
    assert torch.equal(again[4]["tokens"], windows[4]["tokens"])


def test_labels_and_structures_are_cut_with_their_tokens(tmp_path):
    ca = "ATOM  {0:5d}  CA  GLY A{0:4d}    {1:8.3f}{2:8.3f}{2:8.3f}  1.00  0.00           C\n"
    lines = "".join(ca.format(n, 3.8 * n, 0.0) for n in range(1, 24))
    pathlib.Path(tmp_path, "line.pdb").write_text(lines + "END\n")
    corpus = ga.data.load_corpus(tmp_path, kind="structures", cache=tmp_path / "cache")
    part = ga.data.split_corpus(corpus, validation=0.0, test=0.0)["train"]
    windows = Windows(part, 10)
    parts = [window["structure"] for window in windows]
    assert [len(part) for part in parts] == [10, 10, 3] == [len(w["tokens"]) for w in windows]
    assert torch.cat([part.residue_numbers for part in parts]).tolist() == list(range(1, 24))
    again = pickle.loads(pickle.dumps(windows))
    assert again[2]["structure"].sequence == "GGG"


def test_windows_are_refused_by_name():
    part = Part(numbered([10]), torch.tensor([[0, 0, 10]]))
    with pytest.raises(ValueError, match="length must be >= 1, got 0"):
        Windows(part, 0)
    with pytest.raises(ValueError, match=r"stride must be at most length=4, .* got 5"):
        Windows(part, 4, stride=5)
    with pytest.raises(ValueError, match="part must be a Part"):
        Windows(part.corpus, 4)
    windows = Windows(part, 4)
    assert windows[-1]["tokens"].tolist() == [8, 9]
    for index in (3, -4):
        with pytest.raises(
            IndexError, match=f"number of a window must be from -3 to 2, got {index}"
        ):
            windows[index]


@pytest.mark.parametrize("index", [1.5, True, "1", None, slice(0, 2)])
def test_what_is_no_number_of_a_window_is_refused(index):
    part = ga.data.split_corpus(numbered([30]), validation=0.0, test=0.0)["train"]
    with pytest.raises(IndexError, match="number of a window must be an integer"):
        ga.data.Windows(part, 7)[index]
