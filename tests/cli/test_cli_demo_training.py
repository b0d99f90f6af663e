"""Check the data that the demo trains on or holds out, and what it says of the result."""

from __future__ import annotations

import math
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

import graphattn as ga
from graphattn.cli.demo import pieces, training
from graphattn.cli.demo.pieces import split
from graphattn.cli.demo.sample import Sample, load_sample
from graphattn.cli.demo.verdict import training_table, verdict
from graphattn.data import ProteinTokenizer, Structure
from graphattn.data.families import families, word_length

LETTERS = "ACDEFGHIKLMNPQRSTVWY"


def protein(length: int, seed: int) -> str:
    return "".join(random.Random(seed).choices(LETTERS, k=length))


def mutated(sequence: str, share: float, seed: int) -> str:
    rng = random.Random(seed)
    return "".join(rng.choice(LETTERS) if rng.random() < share else c for c in sequence)


def pdb_of(sequence: str, chain: str = "A", seed: int = 0) -> str:
    """A chain of C-alpha atoms along a random walk."""
    names = "ALA CYS ASP GLU PHE GLY HIS ILE LYS LEU MET ASN PRO GLN ARG SER THR VAL TRP TYR"
    name = dict(zip(LETTERS, names.split(), strict=True))
    rng = random.Random(seed)
    at = [0.0, 0.0, 0.0]
    lines = []
    for n, letter in enumerate(sequence, start=1):
        at = [x + rng.uniform(-3, 3) for x in at]
        place = "".join(f"{x:8.3f}" for x in at)
        lines.append(
            f"ATOM  {n:5d}  CA  {name[letter]} {chain}{n:4d}    {place}  1.00  0.00           C"
        )
    return "\n".join([*lines, "TER", ""])


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    """Make batches small, which saves time and changes nothing that is tested."""
    monkeypatch.setattr(pieces, "BATCH", 4)
    sizes = {"CHOOSING_TOKENS": 512, "JUDGING_TOKENS": 1024, "CHOOSING_RESIDUES": 256}
    for name, size in {**sizes, "JUDGING_RESIDUES": 512}.items():
        monkeypatch.setattr(training, name, size)


def quiet(sample: Sample, steps: int = 3, seed: int = 0) -> training.Training:
    result = training.train_models(sample, steps, seed, Console(quiet=True))
    assert result is not None
    return result


def sample_of(*sequences: torch.Tensor, vocab_size: int, **changes) -> Sample:
    sample = load_sample(None, 64)
    return replace(sample, sequences=tuple(sequences), vocab_size=vocab_size, **changes)


# Families, and which side they stand on.


def test_a_word_is_long_enough_that_unrelated_sequences_seldom_share_one():
    assert [word_length(v) for v in (21, 5)] == [5, 10]
    assert all(v ** word_length(v) >= 4e6 for v in range(2, 200))


def test_copies_fragments_and_near_relatives_are_found_and_unrelated_ones_are_not():
    text = [protein(200, seed) for seed in range(6)]
    text.append(text[1])  # a copy
    text.append(text[2][50:120])  # a fragment
    text.append(mutated(text[3], 0.3, seed=9))  # 70 % identity
    text.append("MKV")  # shorter than a word
    text.append("MKV")
    encode = ProteinTokenizer().encode
    groups = families([encode(t) for t in text], 21)
    assert groups == [[0], [1, 6], [2, 7], [3, 8], [4], [5], [9, 10]]


def test_relatives_of_relatives_belong_together():
    first = protein(100, 1)
    second = first[60:] + protein(60, 2)
    third = second[60:] + protein(60, 3)
    encode = ProteinTokenizer().encode
    assert families([encode(t) for t in (third, first, second)], 21) == [[0, 1, 2]]


@pytest.mark.parametrize("seed", range(5))
def test_a_split_takes_whole_families_and_leaves_most_to_learn_from(seed):
    lengths = [10 + n % 7 for n in range(100)]
    groups = [[n for n in range(100) if n % 40 == g] for g in range(40)]
    parts = split(lengths, groups, seed)
    sides = (parts.training, parts.choosing, parts.held_out)
    assert sorted(n for side in sides for n in side) == list(range(100))
    for group in groups:
        assert sum(not set(group).isdisjoint(side) for side in sides) == 1
    tokens = [sum(lengths[n] for n in side) / sum(lengths) for side in sides]
    assert tokens[0] >= 0.6
    assert all(0.1 <= share <= 0.2 for share in tokens[1:])
    assert parts != split(lengths, groups, seed + 100)


def test_the_largest_family_is_learnt_from_and_one_family_is_not_split():
    assert split([5, 900, 5], [[0], [1], [2]], 0).training == [1]
    assert split([5, 5], [[0, 1]], 0) is None
    two = split([5, 9], [[0], [1]], 0)
    assert (two.training, two.choosing, two.held_out) == ([1], [], [0])


# Pieces.


def test_pieces_hold_every_token_once_and_batches_mark_their_padding():
    sequences = (torch.arange(50), torch.arange(50, 118), torch.arange(118, 250))
    cut = pieces.cut(sequences)
    assert [len(parts) for parts in cut] == [2, 3, 5]  # the longest has 250 // 8 = 31 tokens
    batch = pieces.batch_of([piece for parts in cut for piece in parts])
    assert batch.valid.sum(1).min() >= 22
    assert batch.tokens[batch.valid].tolist() == list(range(250))
    assert torch.equal(batch.place[batch.valid], batch.tokens[batch.valid])


def test_pieces_of_a_structure_bring_their_own_atoms_and_chains():
    index = torch.arange(2).repeat_interleave(550)
    whole = Structure("A" * 1100, torch.randn(1100, 3), index, ("A", "B"))
    (cut,) = pieces.cut([torch.arange(1100)], [whole])
    assert [len(piece.tokens) for piece in cut] == [367, 367, 366]
    for piece in cut:
        here = slice(piece.first, piece.first + len(piece.tokens))
        for name in ("ca_positions", "chain_index", "residue_numbers"):
            assert torch.equal(getattr(piece.structure, name), getattr(whole, name)[here])
    batch = pieces.batch_of(cut)
    assert torch.equal(batch.tokens, torch.arange(1100))
    assert batch.structures == [piece.structure for piece in cut]


def test_an_evaluation_is_spread_over_all_pieces_and_hides_few_ones_several_times():
    many = [pieces.DemoPiece(torch.full((8,), n), 8 * n) for n in range(1000)]
    some = [batch.batch.tokens for batch in pieces.evaluation(many, 1000, 512)]
    first = torch.cat(some)[:, 0]
    assert len(first.unique()) == 64
    assert (first.min(), first.max()) == (0, 999)
    few = pieces.evaluation(many[:3], 1000, 512)
    counts = torch.cat([batch.batch.tokens[:, 0] for batch in few]).bincount()
    assert counts.tolist() == [pieces.MOST_MASKINGS] * 3
    assert len(torch.cat([batch.masked for batch in few]).unique(dim=0)) > 3


# What is learnt from is never what is judged by.


def seen_in_training(monkeypatch, sample: Sample) -> tuple[set[int], set[int], set[int]]:
    """The tokens that were learnt from, that chose the weights, and that models are judged by."""
    learnt: set[int] = set()
    original = training.masked_loss

    def spy(model, batch):
        learnt.update(batch.batch.tokens[batch.batch.valid].tolist())
        return original(model, batch)

    monkeypatch.setattr(training, "masked_loss", spy)
    material = quiet(sample, steps=20).material
    choosing, judging = (
        {int(t) for piece in side for t in piece.tokens}
        for side in (material.choosing, material.judging)
    )
    return learnt, choosing, judging


@pytest.mark.long
def test_the_last_tenth_of_a_text_is_judged_by_and_the_tenth_before_chooses(monkeypatch):
    """Every piece is made of one token of its own."""
    text = torch.arange(40).repeat_interleave(pieces.LONGEST_PIECE)
    sample = sample_of(text, vocab_size=40)
    learnt, choosing, judging = seen_in_training(monkeypatch, sample)
    assert judging == {36, 37, 38, 39}
    assert choosing == {32, 33, 34, 35}
    assert learnt <= set(range(32))
    assert len(learnt) > 10


@pytest.mark.long
def test_records_that_are_copies_stand_on_one_side(monkeypatch):
    """Record n holds tokens 3 n .. 3 n + 2; every one stands there twice."""
    generator = torch.manual_seed(0)
    records = [3 * n + torch.randint(3, (40,), generator=generator) for n in range(20)]
    sample = sample_of(*records, *records, vocab_size=60, sequence_name="record")
    sides = seen_in_training(monkeypatch, sample)
    owners = [{token // 3 for token in side} for side in sides]
    assert owners[0] | owners[1] | owners[2] <= set(range(20))
    for one in range(3):
        for other in range(one):
            assert owners[one].isdisjoint(owners[other])
    assert all(owners)


def test_copies_of_one_record_are_split_as_one_text():
    record = torch.randint(20, (400,), generator=torch.manual_seed(0))
    material = training.material_of(sample_of(record, record, record[:300], vocab_size=20), 0)
    whole = [*material.training, *material.choosing, *material.judging]
    assert torch.equal(torch.cat([piece.tokens for piece in whole]), record)
    assert "the last tenth" in material.how


# Structures.


def folder_of(tmp_path: Path, *chains: str) -> Path:
    for n, sequence in enumerate(chains):
        (tmp_path / f"s{n}.pdb").write_text(pdb_of(sequence, seed=n))
    return tmp_path


def test_a_folder_of_structures_holds_some_out_and_never_a_copy(tmp_path):
    chains = [protein(40, seed) for seed in range(8)]
    folder = folder_of(tmp_path, *chains, *chains)
    sample = load_sample(folder, 64)
    assert "16 chains of 16 files; shown: s0.pdb, chain A" in sample.title
    material = training.material_of(sample, seed=0)
    assert material.is_held_out
    learnt, chosen, judged = (
        {tuple(piece.tokens.tolist()) for piece in side}
        for side in (material.training, material.choosing, material.judging)
    )
    assert learnt.isdisjoint(judged | chosen)
    assert chosen.isdisjoint(judged)
    assert len(learnt) + len(chosen) + len(judged) == 8
    assert "(8 families)" in material.how


@pytest.mark.long
def test_models_see_the_nearest_atoms_of_all_chains_and_nothing_else(tmp_path, monkeypatch):
    """Files of two chains that lie in each other: the model's graphs are of whole files."""
    for n in range(5):
        chains = [
            pdb_of(protein(20, 2 * n + side), "AB"[side], seed=2 * n + side) for side in (0, 1)
        ]
        (tmp_path / f"s{n}.pdb").write_text("".join(chains))
    sample = load_sample(tmp_path, 64)
    assert [structure.chain_ids for structure in sample.structures] == [("A", "B")] * 5
    seen = []
    original = training._logits

    def spy(model, batch):
        assert isinstance(model, ga.models.ProteinModel)
        seen.append((model, batch.batch))
        return original(model, batch)

    monkeypatch.setattr(training, "_logits", spy)
    quiet(sample)
    assert seen
    atoms = torch.cat([structure.ca_positions for structure in sample.structures]).double()
    across = 0
    for model, batch in seen[:4]:
        graph = model.graphs(structure=batch.structures)[0]
        expected = torch.zeros(len(batch.tokens), len(batch.tokens), dtype=torch.bool)
        begin = 0
        for place in batch.place.split([len(structure) for structure in batch.structures]):
            assert torch.equal(place, place[0] + torch.arange(40))  # one file, whole
            distance = torch.cdist(atoms[place], atoms[place]).fill_diagonal_(math.inf)
            near = torch.zeros(40, 40, dtype=torch.bool)
            near.scatter_(1, distance.argsort(dim=1)[:, : pieces.NEAREST], True)
            across += int(near[:20, 20:].sum())
            chain, along = torch.arange(40) // 20, torch.arange(40)
            beside = (along[:, None] - along).abs() <= training.BESIDE
            near |= beside & (chain[:, None] == chain)
            expected[begin : begin + 40, begin : begin + 40] = near
            begin += 40
        assert torch.equal(graph.to_mask(), expected)
    assert across > 100


@pytest.mark.long
def test_one_chain_makes_no_claim_about_held_out_residues(tmp_path):
    file = tmp_path / "one.pdb"
    file.write_text(pdb_of(protein(60, 0)))
    result = quiet(load_sample(file, 64))
    assert not result.material.is_held_out
    caption = str(training_table(result).caption)
    assert "On the training tokens" in caption
    assert "Nothing is held out, because there is only this structure" in caption
    assert "eld-out" not in caption
    assert "guesses on the same" in str(training_table(result).title)


def test_copies_of_one_chain_are_one_chain(tmp_path):
    same = protein(60, 0)
    material = training.material_of(load_sample(folder_of(tmp_path, same, same), 64), 0)
    assert not material.is_held_out
    assert "only these structures, all relatives" in material.how


def test_a_folder_reads_every_chain_below_it_and_names_what_it_leaves_out(tmp_path):
    (tmp_path / "below").mkdir()
    two = pdb_of(protein(20, 0), "A") + pdb_of(protein(30, 1), "B") + pdb_of("GKL", "C")
    (tmp_path / "below" / "two.pdb").write_text(two)
    (tmp_path / "broken.pdb").write_text("ATOM  nonsense")
    (tmp_path / "notes.txt").write_text("no structure")
    sample = load_sample(tmp_path, 64)
    assert [len(sequence) for sequence in sample.sequences] == [50]
    (structure,) = sample.structures
    assert structure.chain_ids == ("A", "B")
    assert structure.chain_index.bincount().tolist() == [20, 30]
    assert f"{tmp_path.name}: 2 chains of 1 files; shown: two.pdb, chains A, B" in sample.title
    assert len(sample.notes) == 3
    assert "broken.pdb: line 1" in sample.notes[0]
    assert sample.notes[1] == "omitted: 1 chains with fewer than 8 residues"
    assert sample.notes[2] == "omitted, because they are no structures: notes.txt"


# Judging.


def test_the_loss_of_guessing_by_frequency_is_the_cross_entropy_of_the_counts():
    log_share = training.log_frequency([pieces.DemoPiece(torch.tensor([0, 0, 0, 1]), 0)], 2)
    batch = pieces.batch_of([pieces.DemoPiece(torch.tensor([0, 1]), 4)])
    hidden = pieces.MaskedBatch(batch, torch.tensor([[2, 2]]), torch.ones(1, 2, dtype=torch.bool))
    expected = [-math.log(4 / 6), -math.log(2 / 6)]  # one is added to every count
    got = training.frequency_losses(log_share, [hidden])
    assert got.tolist() == pytest.approx(expected, rel=1e-6)


def test_the_standard_error_of_independent_guesses_is_the_usual_one_and_copies_add_nothing():
    values = torch.randn(50, generator=torch.manual_seed(0), dtype=torch.float64)
    usual = float(values.std(correction=1)) / math.sqrt(50)
    assert training.standard_error(values, torch.arange(50)) == pytest.approx(usual)
    ten_times = training.standard_error(values.repeat(10), torch.arange(50).repeat(10))
    assert ten_times == pytest.approx(usual)
    assert math.isnan(training.standard_error(values, torch.zeros(50)))


def test_the_standard_error_is_what_means_of_fresh_data_scatter_by():
    """Guesses of one protein lean the same way: 20 proteins of 30 guesses, many times over."""
    generator = torch.manual_seed(0)
    group = torch.arange(20).repeat_interleave(30)
    means, errors = [], []
    for _ in range(400):
        lean = torch.randn(20, generator=generator, dtype=torch.float64)
        values = lean[group] + torch.randn(600, generator=generator, dtype=torch.float64)
        means.append(float(values.mean()))
        errors.append(training.standard_error(values, group))
    scatter = float(torch.tensor(means).std())
    assert sum(errors) / len(errors) == pytest.approx(scatter, rel=0.1)


def run_with(gain: float, error: float) -> training.DemoTraining:
    model = ga.models.SequenceEncoder(5, 8, 1, 2)
    return training.DemoTraining("SA", model, [(10, 2.0)], 3.0, 2.0, gain, error, 1.0, False)


@pytest.mark.parametrize(
    ("gain", "error", "says"),
    [
        (0.022, 0.003, r"SA beats it by 0\.022 ± 0\.003"),
        (0.005, 0.003, r"SA does not differ .* \(\+0\.005 ± 0\.003\): the training is too short"),
        (-0.005, 0.003, r"SA does not differ from it significantly \(-0\.005 ± 0\.003\)"),
        (-0.1, 0.003, r"SA is worse by 0\.100 ± 0\.003"),
        (0.1, math.nan, "cannot be compared with it on a single position"),
    ],
)
def test_what_is_said_of_a_model_follows_from_its_gain_and_its_error(gain, error, says):
    material = training.Material([], [], [], True, "held out: a tenth")
    result = training.Training([run_with(gain, error)], 2.84, 2.83, 900, 100, material, False)
    assert re.search(says, verdict(result))
    assert "loses 2.840 nats per guess" in verdict(result)


@pytest.mark.long
def test_noise_is_not_said_to_be_learnt_and_training_stops_once_it_is_learnt_by_heart(monkeypatch):
    """Four tokens at random: after their frequencies there is nothing left to learn."""
    noise = torch.randint(4, (256,), generator=torch.manual_seed(0))
    monkeypatch.setattr(training, "MODELS", {"SA": "dot"})
    monkeypatch.setattr(training, "EVALUATIONS", 40)
    result = quiet(sample_of(noise, vocab_size=4), steps=160)
    (run,) = result.runs
    assert run.stopped_early
    assert run.losses[-1][0] < 160
    assert min(loss for _, loss in run.losses) < run.losses[-1][1] - training.RISE
    assert "beats it" not in verdict(result)
    assert "Stopped early" in str(training_table(result).caption)


def test_what_can_be_learnt_is_learnt_and_said():
    """Every token is the one before it plus one: neighbours tell it all."""
    counting = torch.arange(320) % 7
    result = quiet(sample_of(counting, vocab_size=7), steps=70)
    assert result.frequency_loss == pytest.approx(math.log(7), abs=0.01)
    assert all(run.gain > 1 for run in result.runs)
    assert verdict(result).count("beats it by") == 2
