"""The objective of masked tokens: what it costs, whatever batch and model it is asked in."""

import math

import pytest
import torch
from draws import generator
from torch import nn
from transformers.loss.loss_utils import ForMaskedLMLoss

import graphattn as ga

MASK = 21
LENGTHS = (9, 5, 12)


def examples(lengths=LENGTHS, seed: int = 0) -> list[dict]:
    random = generator(seed)
    return [{"tokens": torch.randint(20, (length,), generator=random)} for length in lengths]


def protein_model(**options) -> ga.models.ProteinModel:
    torch.manual_seed(0)
    return ga.models.ProteinModel(
        16, 2, 2, mixer="mix", mixer_options={"edge_hidden": 8}, **options
    )


class Fixed(nn.Module):
    """Logits that depend on nothing but the place."""

    def __init__(self, logits):
        super().__init__()
        self.logits = nn.Parameter(logits)
        self.seen = []

    def forward(self, tokens, valid=None):
        self.seen.append(tokens)
        return self.logits[: tokens.shape[-1]].expand(*tokens.shape, -1)


def test_the_loss_is_the_mean_over_masked_tokens_of_what_a_plain_loop_counts():
    model = Fixed(torch.randn(12, 21, dtype=torch.float64, generator=generator()))
    objective = ga.train.MaskedTokens(MASK, "betalinear30")
    batch = objective.collate(examples())
    loss = objective.loss(model, batch, generator(5))
    total, right, count = 0.0, 0, 0
    logits = model.logits.detach()
    for row, seen in enumerate(model.seen[0]):
        for place in range(LENGTHS[row]):
            if seen[place] == MASK:
                token = batch["tokens"][row, place]
                total -= math.log(logits[place].softmax(0)[token])
                right += int(logits[place].argmax() == token)
                count += 1
    assert loss.count == count > 0
    assert float(loss.total) == pytest.approx(total, rel=1e-12)
    assert loss.sums["accuracy"] == right


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("mask_ratio", "options"),
    [("cosine", {}), ("linear", {"replace": True, "vocab_size": 20}), (1e-6, {})],
)
def test_the_mean_is_the_loss_of_transformers(mask_ratio, options):
    model = protein_model()
    is_constant = isinstance(mask_ratio, float)  # so small that one token of each is masked
    schedule = {"mask_ratio": mask_ratio} if is_constant else {"schedule": mask_ratio}
    objective = ga.train.MaskedTokens(MASK, **schedule, **options)
    batch = objective.collate(examples())
    loss = objective.loss(model, batch, generator())
    drawn = ("constant", 3) if is_constant else (mask_ratio, 3)
    ratio = {"mask_ratio": mask_ratio} if is_constant else {}
    ratios = ga.train.mask_ratios(*drawn, **ratio, generator=(random := generator()))
    inputs, masked = ga.train.mask_tokens(
        batch["tokens"],
        MASK,
        mask_ratio=ratios[:, None],
        valid=batch["valid"],
        generator=random,
        at_least_one=True,
        **options,
    )
    labels = batch["tokens"].masked_fill(~masked, -100)
    theirs = ForMaskedLMLoss(model(inputs, valid=batch["valid"]), labels, 21)
    torch.testing.assert_close(loss.mean, theirs)


@pytest.mark.parametrize("name", ["encoder", "protein", "consensus"])
def test_padding_and_packing_change_no_loss_and_no_gradient(name):
    torch.manual_seed(1)
    model = {
        "encoder": lambda: ga.models.SequenceEncoder(22, 16, 2, 2, mixer=["dot-window", "dot"]),
        "consensus": lambda: ga.models.SequenceEncoder(22, 16, 2, 2, mixer="mix", edge_hidden=8),
        "protein": protein_model,
    }[name]()
    together = ga.train.MaskedTokens(MASK, mask_ratio=1.0)
    packed = ga.train.MaskedTokens(MASK, mask_ratio=1.0, packed=True)
    batch = together.collate(examples())
    costs = []
    for objective in (together, packed):
        model.zero_grad()
        loss = objective.loss(model, batch, generator())
        loss.total.backward()
        costs.append((loss.total.detach(), model.embedding.weight.grad.clone()))
    alone = [together.loss(model, together.collate([one]), generator()) for one in examples()]
    torch.testing.assert_close(costs[0], costs[1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        costs[0][0], sum(one_loss.total for one_loss in alone), rtol=1e-4, atol=1e-4
    )
    assert loss.count == sum(one_loss.count for one_loss in alone) == sum(LENGTHS)


def test_the_masks_of_a_packed_batch_are_those_of_a_padded_one():
    batch = ga.train.MaskedTokens(MASK).collate(examples())
    model = protein_model().eval()
    padded, packed = (
        ga.train.MaskedTokens(MASK, "betalinear30", packed=packed).loss(model, batch, generator(3))
        for packed in (False, True)
    )
    assert padded.count == packed.count
    torch.testing.assert_close(padded.total, packed.total, rtol=1e-4, atol=1e-4)


def test_equal_lengths_are_called_without_a_mask_of_padding():
    objective = ga.train.MaskedTokens(MASK)
    assert "valid" not in objective.collate(examples((7, 7)))
    assert "valid" in objective.collate(examples((7, 6)))


def in_space(length: int, seed: int) -> dict:
    places = torch.randn(length, 3, generator=generator(seed)).cumsum(0) * 2
    letters = ga.data.ProteinTokenizer().decode(examples((length,), seed)[0]["tokens"])
    structure = ga.data.Structure(letters, places)
    return {"tokens": ga.data.ProteinTokenizer().encode(letters), "structure": structure}


@pytest.mark.parametrize("packed", [False, True])
def test_structures_are_handed_to_a_model_that_reads_them(packed):
    model = protein_model(neighbors=3).eval()
    objective = ga.train.MaskedTokens(MASK, mask_ratio=1.0, packed=packed)
    both = [in_space(9, 1), in_space(6, 2)]
    batch = objective.collate([{**example, "name": "x"} for example in both])
    loss = objective.loss(model, batch)
    expected = 0.0
    for example in both:
        hidden = torch.full_like(example["tokens"], MASK)
        logits = model(hidden, structure=example["structure"])
        expected += nn.functional.cross_entropy(logits, example["tokens"], reduction="sum")
    torch.testing.assert_close(loss.total, expected, rtol=1e-4, atol=1e-4)
    blind = objective.collate([{"tokens": example["tokens"]} for example in both])
    assert not torch.allclose(objective.loss(model, blind).total, expected, rtol=1e-4)
    reads_none = ga.models.SequenceEncoder(22, 16, 1, 2)
    torch.testing.assert_close(
        objective.loss(reads_none, batch).total, objective.loss(reads_none, blind).total
    )


@pytest.mark.parametrize("packed", [False, True])
def test_context_is_handed_on_and_what_is_not_known_of_it_stays_unknown(packed):
    model = protein_model(context={"accessible": 2, "shape": 3}).eval()
    one, other = examples((6, 4))
    one["context"] = {
        "accessible": torch.randn(6, 2, generator=generator()),
        "shape": torch.tensor([0, 1, -1, 2, 2, 0]),
    }
    other["context"] = {"shape": torch.tensor([1, 1, 0, 2])}
    objective = ga.train.MaskedTokens(MASK, mask_ratio=1.0, packed=packed)
    batch = objective.collate([one, other])
    loss = objective.loss(model, batch)
    other["context"]["accessible"] = torch.full((4, 2), torch.nan)  # what is not known
    expected = 0.0
    for example in (one, other):
        logits = model(torch.full_like(example["tokens"], MASK), context=example["context"])
        expected += nn.functional.cross_entropy(logits, example["tokens"], reduction="sum")
    torch.testing.assert_close(loss.total, expected, rtol=1e-4, atol=1e-4)


def test_another_chain_is_padded_and_cannot_be_packed():
    model = protein_model(context={"partner": "sequence"}).eval()
    one, other = examples((6, 4))
    one["context"] = {"partner": torch.tensor([3, 4, 5])}
    other["context"] = {"partner": torch.tensor([7, 8, 9, 10, 11])}
    objective = ga.train.MaskedTokens(MASK, mask_ratio=1.0)
    batch = objective.collate([one, other])
    expected = 0.0
    for example in (one, other):
        logits = model(torch.full_like(example["tokens"], MASK), context=example["context"])
        expected += nn.functional.cross_entropy(logits, example["tokens"], reduction="sum")
    torch.testing.assert_close(objective.loss(model, batch).total, expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="packed must be False with context"):
        ga.train.MaskedTokens(MASK, packed=True).loss(model, batch)


def test_positions_are_handed_on():
    model = ga.models.SequenceEncoder(22, 16, 1, 2).eval()
    objective = ga.train.MaskedTokens(MASK, mask_ratio=1.0)
    spread = [{**each, "positions": 3 * torch.arange(len(each["tokens"]))} for each in examples()]
    batch = objective.collate(spread)
    hidden = torch.full_like(batch["tokens"], MASK)
    logits = model(hidden, valid=batch["valid"], positions=batch["positions"])
    expected = nn.functional.cross_entropy(logits[batch["valid"]], batch["tokens"][batch["valid"]])
    for packed in (False, True):
        each = ga.train.MaskedTokens(MASK, mask_ratio=1.0, packed=packed).loss(model, batch)
        torch.testing.assert_close(each.mean, expected, rtol=1e-4, atol=1e-5)


def test_weighted_by_its_ratio_a_loss_is_per_token_of_all_tokens():
    """Every guess has the same cost c, so E[1/r * r * N * c] / N is c, for every schedule."""
    tokens = [{"tokens": torch.zeros(400).long()} for _ in range(200)]
    model = Fixed(torch.zeros(400, 21))
    for schedule in ("constant", "linear", "betalinear30"):
        objective = ga.train.MaskedTokens(MASK, schedule, weight="1/ratio")
        loss = objective.loss(model, objective.collate(tokens), generator())
        assert loss.count == 400 * 200
        assert float(loss.mean) == pytest.approx(math.log(21), rel=0.05)


def test_a_weighted_loss_masks_what_was_drawn_alone():
    """One more than was drawn would cost 1/r, and the mean would be no bound."""
    objective = ga.train.MaskedTokens(MASK, mask_ratio=0.1, weight="1/ratio")
    model = Fixed(torch.zeros(1, 21))
    objective.loss(model, objective.collate(examples((1,) * 1000)), generator())
    assert abs(int((model.seen[0] == MASK).sum()) - 100) < 5 * math.sqrt(90)


def test_every_sequence_of_a_batch_has_a_ratio_of_its_own():
    objective = ga.train.MaskedTokens(MASK, "linear")
    model = Fixed(torch.zeros(400, 21))
    objective.loss(model, objective.collate(examples((400,) * 100)), generator())
    shares = (model.seen[0] == MASK).float().mean(1)  # uniform in 0 .. 1
    assert shares.min() < 0.1
    assert shares.max() > 0.9
    assert float(shares.std()) == pytest.approx(math.sqrt(1 / 12), rel=0.25)


def test_with_linear_ratios_the_weighted_loss_is_a_bound_that_an_independent_text_meets():
    """A text whose letters are drawn apart has the exact bound: its likelihood, at any mask."""
    share = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    tokens = torch.tensor([0] * 5 + [1] * 3 + [2] * 2).repeat(30)
    model = Fixed(share.log().expand(300, 3).clone())
    objective = ga.train.MaskedTokens(3, "linear", weight="1/ratio")
    batch = objective.collate([{"tokens": tokens}] * 400)
    loss = objective.loss(model, batch, generator())
    entropy = -float((share * share.log()).sum())
    assert float(loss.mean) == pytest.approx(entropy, rel=0.03)


def test_an_evaluation_is_the_same_every_time_and_leaves_the_model_in_training():
    model = protein_model(dropout=0.3).train()
    objective = ga.train.MaskedTokens(MASK, "sqrt")
    batches = [objective.collate(examples(seed=seed)) for seed in range(2)]
    state = torch.get_rng_state()
    first = objective.evaluate(model, batches, seed=3)
    assert first == objective.evaluate(model, batches, seed=3)
    assert first != objective.evaluate(model, batches, seed=4)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert first["perplexity"] == pytest.approx(math.exp(first["loss"]))
    twice = objective.evaluate(model, batches[:1] * 2, seed=3)
    assert twice["loss"] != objective.evaluate(model, batches[:1], seed=3)["loss"]  # other masks


def test_a_model_learns_what_its_neighbours_tell():
    torch.manual_seed(0)
    tokens = [{"tokens": (torch.arange(12) + start) % 5} for start in range(5)]
    model = ga.models.SequenceEncoder(6, 16, 1, 2)
    objective = ga.train.MaskedTokens(5, mask_ratio=0.3)
    batch = objective.collate(tokens * 4)
    optimizer = torch.optim.Adam(model.parameters(), 2e-2)
    for _ in range(100):
        optimizer.zero_grad()
        objective.loss(model, batch).mean.backward()
        optimizer.step()
    assert objective.evaluate(model, [batch])["accuracy"] > 0.7


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"schedule": "cos"}, "schedule must be one of"),
        ({"mask_ratio": 2.0}, r"mask_ratio must be in \(0, 1\]"),
        ({"weight": "ratio"}, "weight must be one of 'none', '1/ratio'"),
        ({"replace": "bert"}, "replace must be one of False, True"),
        ({"vocab_size": 20}, "vocab_size must be None without replace=True"),
        ({"mask_token": 0, "replace": True}, "vocab_size must leave at least one token"),
        ({"mask_token": 1.5}, "mask_token must be an integer"),
    ],
)
def test_bad_options_are_named(options, says):
    with pytest.raises(ValueError, match=says):
        ga.train.MaskedTokens(**{"mask_token": MASK, **options})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ([], "examples must contain at least one example"),
        ([{"image": torch.zeros(1, 2, 2)}], r"examples must contain 'tokens'.*got none"),
        ([{"tokens": torch.zeros(0).long(), "name": "P1"}], r"N >= 1.*\[0\] in 'P1'"),
        ([{"tokens": torch.zeros(3)}], "got torch.float32"),
        ([{"tokens": torch.arange(3), "graph": 1}], "examples must not contain 'graph'"),
        ([torch.arange(3)], "examples must be dicts, got Tensor"),
        (
            [{"tokens": torch.arange(3), "positions": torch.arange(2)}],
            r"one row of 'positions' per token \(3\)",
        ),
        (
            [{"tokens": torch.arange(2), "structure": 1}, {"tokens": torch.arange(2)}],
            "either all examples or none must contain 'structure', got 1 of 2",
        ),
        (
            [
                {"tokens": torch.arange(2), "context": {"a": torch.zeros(2, 1)}},
                {"tokens": torch.arange(2), "context": {"a": torch.zeros(2, 3)}},
            ],
            r"context\['a'\] must have the same width and dtype in all examples",
        ),
    ],
)
def test_bad_examples_are_named(change, says):
    with pytest.raises(ValueError, match=says):
        ga.train.MaskedTokens(MASK).collate(change)


def test_tokens_that_the_model_cannot_answer_and_answers_of_another_shape_are_named():
    objective = ga.train.MaskedTokens(MASK, mask_ratio=1.0)
    batch = objective.collate([{"tokens": torch.tensor([3, 21])}])
    with pytest.raises(ValueError, match=r"tokens and labels must be 0 .. 20, .* got 21"):
        objective.loss(protein_model(), batch)
    without_a_mask = ga.models.SequenceEncoder(21, 8, 1, 2)
    with pytest.raises(ValueError, match="mask_token must be one of the 21 tokens that this Seq"):
        objective.loss(without_a_mask, objective.collate(examples()))
    with pytest.raises(ValueError, match=r"model must return a tensor \[B, N, K\]"):
        objective.loss(nn.Sequential(nn.Embedding(30, 4), nn.Flatten(1)), batch)
