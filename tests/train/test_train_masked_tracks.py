"""Masked tokens of several source tracks, and context that is corrupted."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy
import pytest
import tiny_runs
import torch
from draws import generator
from scipy.stats import kstest
from torch import Tensor, nn
from torch.nn import functional

import graphattn as ga

MASK = 21
SIZES = {"structure": 11, "function": 4}
SHARED_STRUCTURES = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "structure"


class Fixed(nn.Module):
    """Logits of every track that depend on the place alone; it keeps what it has read."""

    def __init__(self, length: int, dtype: torch.dtype = torch.float64):
        super().__init__()
        random = generator()
        sizes = {"sequence": 21, **SIZES}
        self.logits = {
            name: torch.randn(length, size, dtype=dtype, generator=random)
            for name, size in sizes.items()
        }
        self.seen: dict[str, Any] = {}

    def forward(self, tokens: Tensor, **given: Any) -> dict[str, Tensor]:
        self.seen = {"sequence": tokens, **given["tracks"], "context": given.get("context")}
        return {
            name: logits[: tokens.shape[-1]].expand(*tokens.shape, -1)
            for name, logits in self.logits.items()
        }


def examples(lengths=(9, 5, 12), seed: int = 0, unknown: bool = True) -> list[dict]:
    random = generator(seed)
    made = []
    for length in lengths:
        tracks = {name: torch.randint(n, (length,), generator=random) for name, n in SIZES.items()}
        if unknown:
            tracks["structure"][::4] = -1
        tokens = torch.randint(20, (length,), generator=random)
        made.append({"tokens": tokens, "tracks": tracks})
    return made


def protein_model(**options: Any) -> ga.models.ProteinModel:
    torch.manual_seed(0)
    options = {"tracks": SIZES, "mixer": "mix", "mixer_options": {"edge_hidden": 8}, **options}
    return ga.models.ProteinModel(16, 2, 2, **options)


BOTH = {"structure": "cosine", "function": "linear"}


def test_the_loss_is_the_mean_over_masked_tokens_of_all_tracks_in_a_plain_loop():
    model = Fixed(12)
    objective = ga.train.MaskedTokens(MASK, "betalinear30", tracks=BOTH)
    batch = objective.collate(examples())
    loss = objective.loss(model, batch, generator(5))
    total, squares, right, counts = 0.0, 0.0, 0, {}
    by_track: dict[str, list[float]] = {}
    for name, logits in model.logits.items():
        truth = batch["tokens"] if name == "sequence" else batch["tracks"][name]
        for row, length in enumerate((9, 5, 12)):
            for place in range(length):
                read, code = int(model.seen[name][row, place]), int(truth[row, place])
                if read == code:
                    continue
                assert read == (MASK if name == "sequence" else -1)
                share = logits[place].softmax(0)[code]
                by_track.setdefault(name, []).append(-math.log(share))
                counts[name] = counts.get(name, 0) + int(logits[place].argmax() == code)
    total = sum(map(sum, by_track.values()))
    squares = sum(x * x for each in by_track.values() for x in each)
    right = sum(counts.values())
    assert set(by_track) == {"sequence", "structure", "function"}
    assert loss.count == sum(map(len, by_track.values()))
    assert float(loss.total) == pytest.approx(total, rel=1e-12)
    assert float(loss.squares) == pytest.approx(squares, rel=1e-12)
    assert loss.sums["accuracy"] == right
    report = objective.report_of(loss)
    for name, losses in by_track.items():
        assert report[f"loss_{name}"] == pytest.approx(sum(losses) / len(losses), rel=1e-6)
        assert report[f"accuracy_{name}"] == pytest.approx(counts[name] / len(losses))
    assert report["loss"] == pytest.approx(total / loss.count)
    logits, truth = objective.guesses(model, batch, generator(5))
    nats = functional.cross_entropy(logits, truth, reduction="sum")
    assert float(nats) == pytest.approx(total, rel=1e-12)


def shares_of(tracks: Any, schedule: str = "betalinear30") -> dict[str, Tensor]:
    """The share of each of 1000 sequences that the model reads as masked, and where."""
    model, objective = Fixed(300), ga.train.MaskedTokens(MASK, schedule, tracks=tracks)
    batch = objective.collate(examples((300,) * 1000, unknown=False))
    objective.loss(model, batch, generator(1))
    masked = {"sequence": model.seen["sequence"] == MASK}
    return {**masked, **{name: model.seen[name] == -1 for name in SIZES}}


def test_every_track_has_the_distribution_of_its_own_schedule_and_draws_apart():
    masked = shares_of(BOTH)
    shares = {name: of_track.double().mean(1) for name, of_track in masked.items()}
    assert float(shares["sequence"].mean()) == pytest.approx(0.3, abs=0.03)
    # arcsine: the distribution function of cos(pi t / 2)
    assert kstest(shares["structure"], lambda r: 2 / math.pi * numpy.arcsin(r)).statistic < 0.06
    assert kstest(shares["function"], "uniform").statistic < 0.06
    together = torch.stack([*shares.values()])
    assert torch.corrcoef(together).triu(1).abs().max() < 0.12
    places = torch.stack([x.double().flatten() - x.double().mean() for x in masked.values()])
    assert torch.corrcoef(places).triu(1).abs().max() < 0.05


def test_a_track_that_is_masked_together_is_masked_where_the_letters_are():
    masked = shares_of({"structure": "together", "function": "cosine"}, "sqrt")
    assert torch.equal(masked["structure"], masked["sequence"])
    assert not torch.equal(masked["function"], masked["sequence"])
    assert float(masked["sequence"].double().mean()) == pytest.approx(1 / 3, abs=0.04)


def test_tracks_change_no_mask_of_the_letters():
    batch = ga.train.MaskedTokens(MASK).collate(examples())
    model, seen = Fixed(12), []
    for tracks in (None, BOTH, {"structure": "together"}):
        ga.train.MaskedTokens(MASK, "linear", tracks=tracks).loss(model, batch, generator(2))
        seen.append(model.seen["sequence"])
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(seen[0], seen[2])


def test_one_known_code_of_every_sequence_is_masked_at_least_and_none_that_is_unknown():
    several = examples((9, 5, 12))
    several[1]["tracks"] = {"structure": torch.full((5,), -1)}  # and no function
    objective = ga.train.MaskedTokens(
        MASK, mask_ratio=1e-6, tracks={"structure": "constant", "function": "constant"}
    )
    batch = objective.collate(several)
    assert batch["tracks"]["function"][1].tolist() == [-1] * 12
    assert batch["tracks"]["structure"][0, 9:].tolist() == [-1] * 3
    loss = objective.loss(Fixed(12), batch, generator())
    assert [loss.sums[f"count_{name}"] for name in ("sequence", "structure", "function")] == [
        3, 2, 2,
    ]  # fmt: skip


def test_a_track_of_which_nothing_is_known_is_not_in_the_report():
    both = examples((6, 4))
    for example in both:
        example["tracks"]["function"].fill_(-1)
    objective = ga.train.MaskedTokens(MASK, tracks=BOTH)
    report = objective.evaluate(Fixed(6), [objective.collate(both)])
    assert "loss_structure" in report
    assert "loss_function" not in report


@pytest.mark.parametrize("in_space", [False, True])
def test_padding_and_packing_change_no_loss_and_no_gradient(in_space):
    model = protein_model(neighbors=3)
    several = examples((9, 5))
    if in_space:
        for example in several:
            N = len(example["tokens"])
            places = torch.randn(N, 3, generator=generator(N)).cumsum(0) * 2
            example["structure"] = ga.data.Structure("A" * N, places)
    everything = {"mask_ratio": 1.0, "tracks": {"structure": "together", "function": "constant"}}
    costs = []
    for packed in (False, True):
        objective = ga.train.MaskedTokens(MASK, **everything, packed=packed)
        model.zero_grad()
        loss = objective.loss(model, objective.collate(several), generator())
        loss.total.backward()
        costs.append((loss.total.detach(), model.sources.heads[0].weight.grad.clone()))
    torch.testing.assert_close(costs[0], costs[1], rtol=1e-4, atol=1e-5)
    alone = [objective.loss(model, objective.collate([one]), generator()) for one in several]
    torch.testing.assert_close(
        costs[0][0], sum(one.total for one in alone).detach(), rtol=1e-4, atol=1e-4
    )
    assert loss.count == 14 + 9 + 14  # of the structure, 3 + 2 codes are unknown


def test_tracks_that_are_not_asked_for_are_read_as_they_are():
    """Letters from codes alone: what is known as inverse folding."""
    model = protein_model().eval()
    objective = ga.train.MaskedTokens(MASK, mask_ratio=1.0)
    batch = objective.collate(examples((7, 7)))
    logits = model(torch.full((2, 7), MASK), tracks=batch["tracks"])["sequence"]
    expected = functional.cross_entropy(logits.flatten(0, 1), batch["tokens"].flatten())
    torch.testing.assert_close(objective.loss(model, batch).mean, expected, rtol=1e-5, atol=1e-6)
    assert list(objective.evaluate(model, [batch])) == ["loss", "perplexity", "accuracy"]
    one = {"tokens": batch["tokens"][0], "tracks": {"structure": batch["tracks"]["structure"][0]}}
    found = ga.train.pseudo_log_likelihood(model, one, MASK, positions=[3])
    hidden = one["tokens"].clone()
    hidden[3] = MASK
    logits = model(hidden, tracks=one["tracks"])["sequence"][3]
    torch.testing.assert_close(found[0], logits.log_softmax(0)[one["tokens"][3]])


# Context.


def test_a_share_of_every_track_of_context_becomes_unknown_by_the_schedule():
    model = Fixed(200)
    objective = ga.train.MaskedTokens(MASK, context_schedule="sqrt")
    several = examples((200,) * 1000)
    for example in several:
        example["context"] = {
            "secondary": torch.randint(3, (200,)),
            "exposed": torch.rand(200, 2),
        }
    batch = objective.collate(several)
    objective.loss(model, batch, generator())
    seen, given = model.seen["context"], batch["context"]
    hidden = {"secondary": seen["secondary"] == -1, "exposed": seen["exposed"].isnan().all(-1)}
    shares = {}
    for name, rows in hidden.items():
        assert torch.equal(seen[name][~rows], given[name][~rows])
        shares[name] = rows.double().mean(1)
        # 1 - (1 - r)^2: the distribution function of 1 - sqrt(t)
        assert kstest(shares[name], lambda r: 1 - (1 - r) ** 2).statistic < 0.06
    assert not seen["exposed"][~hidden["exposed"]].isnan().any()
    assert not (given["secondary"] == -1).any()
    assert torch.corrcoef(torch.stack([*shares.values()])).triu(1).abs().max() < 0.12
    ga.train.MaskedTokens(MASK).loss(model, batch, generator())
    assert model.seen["context"] is given


@pytest.mark.parametrize("packed", [False, True])
def test_a_model_reads_corrupted_context_as_unknown(packed):
    model = protein_model(context={"secondary": 3, "exposed": 1}).eval()
    both = examples((6, 4))
    for example in both:
        N = len(example["tokens"])
        example["context"] = {"secondary": torch.arange(N) % 3, "exposed": torch.rand(N, 1)}
    objective = ga.train.MaskedTokens(
        MASK, mask_ratio=1.0, tracks=dict.fromkeys(SIZES, "constant"), packed=packed,
        context_schedule="constant",
    )  # fmt: skip
    loss = objective.loss(model, objective.collate(both), generator())
    for example in both:
        N = len(example["tokens"])
        example["context"] = {
            "secondary": torch.full((N,), -1), "exposed": torch.full((N, 1), torch.nan),
        }  # fmt: skip
    objective.context_schedule = None
    unknown = objective.loss(model, objective.collate(both), generator())
    torch.testing.assert_close(loss.total, unknown.total, rtol=1e-5, atol=1e-5)


# Runs.


def test_a_run_names_a_track_that_no_example_has(tmp_path):
    alone = [{"tokens": torch.arange(6)}] * 4
    with pytest.raises(ValueError, match=r"tracks must have only tracks of the examples.*function"):
        ga.train.fit(
            protein_model(), ga.train.MaskedTokens(MASK), tiny_runs.config(tmp_path, steps=1), alone
        )


def test_an_evaluation_reports_every_track():
    model = protein_model().eval()
    objective = ga.train.MaskedTokens(MASK, tracks=BOTH)
    report = ga.train.evaluate_model(model, objective, examples(), pseudo_tokens=4)
    assert {"loss_sequence", "loss_structure", "accuracy_function", "calibration"} <= set(report)
    assert report["guesses"] > 0


def real_chains(tokenizer_steps: int) -> tuple[list[dict], list[dict], dict[str, int]]:
    """Codes of real chains, for training and held out; the tokenizer has seen the first alone."""
    files = sorted(SHARED_STRUCTURES.glob("globins/*.pdb"))
    if not files:
        pytest.skip(f"no real structures are in {SHARED_STRUCTURES / 'globins'}")
    chains = [ga.data.read_structure(path, atoms="backbone") for path in files]
    torch.manual_seed(0)
    tokenizer = ga.data.StructureTokenizer((4, 4, 4), width=64)
    tokenizer.fit(chains[6:], steps=tokenizer_steps, batch_size=256)
    letters = ga.data.ProteinTokenizer()
    all_of = [
        {
            "tokens": letters.encode(chain.sequence),
            "structure": chain,
            "tracks": {"structure": tokenizer.encode(chain)},
        }
        for chain in chains
    ]
    return all_of[6:], all_of[:6], {"structure": tokenizer.vocab_size}


@pytest.mark.long
def test_structures_of_held_out_globins_are_guessed_better_than_by_frequency():
    """Codes of the backbone can be learned from 20 chains; of letters, hardly more than shares."""
    pytest.importorskip("biotite", reason="biotite reads the files")
    train, held_out, sizes = real_chains(tokenizer_steps=40)
    torch.manual_seed(0)
    model = ga.models.ProteinModel(32, 2, 4, tracks=sizes, neighbors=8, dropout=0.1)
    objective = ga.train.MaskedTokens(MASK, "betalinear30", tracks={"structure": "cosine"})
    judging = [objective.collate(held_out)] * 4  # with four masks
    first = objective.evaluate(model, judging)
    optimizer = torch.optim.AdamW(model.parameters(), 4e-3)
    random = generator()
    for _ in range(150):
        some = [train[int(i)] for i in torch.randint(len(train), (4,), generator=random)]
        optimizer.zero_grad()
        objective.loss(model, objective.collate(some)).mean.backward()
        optimizer.step()
    sums = objective.sums_over(model, judging)
    last = objective.report_of(sums)
    by_frequency, total = {}, 0.0
    for name, size in {"sequence": 21, **sizes}.items():
        parts = [
            [each["tokens"] if name == "sequence" else each["tracks"][name] for each in part]
            for part in (train, held_out)
        ]
        known = [[codes[codes >= 0] for codes in part] for part in parts]
        by_frequency[name] = ga.train.frequency_loss(*known, size)
        total += by_frequency[name] * sums.sums[f"count_{name}"]
        assert last[f"loss_{name}"] < first[f"loss_{name}"] - 0.2
    assert last["loss"] < total / sums.count - 0.05
    assert last["loss_structure"] < by_frequency["structure"] - 0.1
    assert last["loss_sequence"] < by_frequency["sequence"] + 0.1


# Bad input.


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tracks": "cosine"}, "tracks must be a dict of names of source tracks.*got str"),
        ({"tracks": {"structure": "cos"}}, r"tracks\['structure'\] must be one of .*'together'"),
        ({"tracks": {"sequence": "cosine"}}, "tracks must not contain 'sequence'"),
        ({"tracks": BOTH, "replace": True}, "replace must be False with tracks"),
        ({"tracks": BOTH, "weight": "1/ratio"}, "weight must be 'none' with tracks"),
        ({"context_schedule": "together"}, "context_schedule must be one of"),
    ],
)
def test_bad_options_are_named(options, says):
    with pytest.raises(ValueError, match=says):
        ga.train.MaskedTokens(MASK, **options)


def test_options_are_shown():
    made = ga.train.objective("masked", mask_token=21, tracks=BOTH, context_schedule="sqrt")
    assert repr(made) == (
        "MaskedTokens(mask_token=21, tracks={'structure': 'cosine', 'function': 'linear'}, "
        "context_schedule='sqrt')"
    )


@pytest.mark.parametrize(
    ("codes", "says"),
    [
        (torch.zeros(5).long(), r"tracks\['structure'\] must be integers \[N\].*\(6\).*in 'P1'"),
        (torch.zeros(6), "got torch.float32"),
        ([0] * 6, "got list"),
    ],
)
def test_bad_codes_of_examples_are_named(codes, says):
    example = {"tokens": torch.arange(6), "tracks": {"structure": codes}, "name": "P1"}
    with pytest.raises(ValueError, match=says):
        ga.train.MaskedTokens(MASK).collate([example])


def test_tracks_that_a_batch_or_a_model_does_not_have_are_named():
    objective = ga.train.MaskedTokens(MASK, tracks={"structure": "cosine"})
    with pytest.raises(ValueError, match=r"examples must contain codes of tracks\['structure'\]"):
        objective.loss(protein_model(), objective.collate([{"tokens": torch.arange(6)}]))
    batch = objective.collate(examples((6, 6)))
    with pytest.raises(ValueError, match="tracks must be a dict of codes"):
        objective.loss(protein_model(tracks={"other": 11}), batch)

    class ReadsOnly(Fixed):
        def forward(self, tokens: Tensor, **given: Any) -> Any:
            return super().forward(tokens, **given)["sequence"]

    with pytest.raises(ValueError, match="model must have the source track 'structure'"):
        objective.loss(ReadsOnly(6), batch)
    schedule = ga.train.MaskedTokens(MASK, context_schedule="sqrt")
    with pytest.raises(ValueError, match=r"context_schedule must be None .*, got 'sqrt'"):
        schedule.loss(protein_model(), schedule.collate([{"tokens": torch.arange(6)}]))
    over = examples((6,), unknown=False)
    over[0]["tracks"]["structure"].fill_(11)
    whole = ga.train.MaskedTokens(MASK, mask_ratio=1.0, tracks={"structure": "constant"})
    with pytest.raises(ValueError, match=r"must be 0 .. 10, one per output of the model, got 11"):
        whole.loss(protein_model(), whole.collate(over))
