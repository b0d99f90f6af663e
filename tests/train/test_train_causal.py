"""Causal language modelling: nats and bits of what follows, and nothing across borders."""

import itertools
import math

import pytest
import torch
from draws import Table, generator
from torch import nn
from transformers.loss.loss_utils import ForCausalLMLoss

import graphattn as ga

LENGTHS = (9, 1, 12, 5)


def examples(lengths=LENGTHS) -> list[dict]:
    random = generator()
    return [{"tokens": torch.randint(11, (length,), generator=random)} for length in lengths]


def language_model(**options) -> ga.models.CausalLM:
    torch.manual_seed(0)
    return ga.models.CausalLM(11, 16, 2, 2, **{"mixer": "mix", "window": 4, **options})


def test_the_loss_is_that_of_a_plain_loop_over_pairs():
    table = torch.randn(11, 11, dtype=torch.float64, generator=generator())
    for lengths in (LENGTHS, (8, 8)):
        objective = ga.train.NextToken()
        texts = examples(lengths)
        loss = objective.loss(Table(table), objective.collate(texts))
        nats = right = count = 0
        for text in texts:
            tokens = text["tokens"].tolist()
            for before, after in itertools.pairwise(tokens):
                nats -= math.log(table[before].softmax(0)[after])
                right += int(table[before].argmax()) == after
                count += 1
        assert loss.count == count == sum(lengths) - len(lengths)
        assert float(loss.total) == pytest.approx(nats, rel=1e-12)
        assert loss.sums["accuracy"] == right


@pytest.mark.parametrize("lengths", [LENGTHS, (8, 8)])
def test_the_mean_is_the_loss_of_transformers(lengths):
    model = language_model().eval()
    objective = ga.train.NextToken()
    batch = objective.collate(examples(lengths))
    labels, given = batch["tokens"], {}
    if "valid" in batch:
        labels = labels.masked_fill(~batch["valid"], -100)
        given["valid"] = batch["valid"]
    theirs = ForCausalLMLoss(model(batch["tokens"], **given), labels, 11)
    torch.testing.assert_close(objective.loss(model, batch).mean, theirs)


@pytest.mark.parametrize("mixer", ["dot", "gka", "krause", "linear", "mix"])
def test_packed_sequences_cost_what_padded_ones_cost_and_what_they_cost_alone(mixer):
    options = {"mixer_options": {"top_k": 3}} if mixer == "krause" else {}
    model = language_model(mixer=mixer, window=None if mixer == "linear" else 4, **options)
    padded, packed = ga.train.NextToken(), ga.train.NextToken(packed=True)
    batch = padded.collate(examples())
    costs = []
    for objective in (padded, packed):
        model.zero_grad()
        loss = objective.loss(model, batch)
        loss.total.backward()
        costs.append((loss.total.detach(), model.embedding.weight.grad.clone()))
    torch.testing.assert_close(costs[0], costs[1], rtol=1e-4, atol=1e-5)
    alone = sum(padded.loss(model, padded.collate([one])).total for one in examples())
    torch.testing.assert_close(costs[0][0], alone.detach(), rtol=1e-4, atol=1e-4)


def test_nothing_is_guessed_or_seen_across_the_border_of_two_windows():
    """Tokens of the first window change no gradient of the second window's loss."""
    model = language_model(mixer="dot", window=None)
    objective = ga.train.NextToken(packed=True)

    def gradient_of_the_second(first: torch.Tensor) -> torch.Tensor:
        texts = [{"tokens": first}, {"tokens": torch.tensor([3, 1, 4, 1])}]
        logits, truth = objective.guesses(model, objective.collate(texts))
        assert len(truth) == len(first) - 1 + 3
        loss = nn.functional.cross_entropy(logits[-3:], truth[-3:])
        return torch.autograd.grad(loss, list(model.parameters()))

    one = gradient_of_the_second(torch.tensor([5, 6, 7, 8, 9, 10]))
    other = gradient_of_the_second(torch.tensor([2, 2, 0, 0, 7, 7]))
    torch.testing.assert_close(one, other)


def test_a_batch_of_single_tokens_asks_nothing_and_has_a_gradient_of_0():
    model = language_model()
    objective = ga.train.NextToken()
    loss = objective.loss(model, objective.collate(examples((1, 1))))
    assert loss.count == 0
    loss.mean.backward()
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())
    with pytest.raises(ValueError, match="batches must contain at least one guess"):
        objective.evaluate(model, [objective.collate(examples((1,)))])


def test_bits_per_byte_count_the_bytes_of_the_tokens_that_were_guessed():
    words = [b"to", b" be", b",", b" or", b" not", b"the", b"a", b"b", b"c", b"d", "é".encode()]
    table = torch.randn(11, 11, generator=generator())
    exact = ga.train.NextToken(bytes_per_token=[len(word) for word in words])
    texts = examples()
    batch = exact.collate(texts)
    guessed = [token for text in texts for token in text["tokens"].tolist()[1:]]
    num_bytes = len(b"".join(words[token] for token in guessed))
    report = exact.evaluate(Table(table), [batch, batch])
    bits = float(exact.loss(Table(table), batch).total) / math.log(2)
    assert report["bits_per_byte"] == pytest.approx(bits / num_bytes)
    assert report["bits_per_token"] == pytest.approx(bits / len(guessed))
    average = ga.train.NextToken(bytes_per_token=num_bytes / len(guessed))
    assert average.evaluate(Table(table), [batch])["bits_per_byte"] == pytest.approx(
        report["bits_per_byte"]
    )
    unknown = ga.train.NextToken().evaluate(Table(table), [batch])
    assert set(unknown) == {"loss", "perplexity", "accuracy", "bits_per_token"}


def test_a_uniform_guess_of_bytes_costs_8_bits():
    objective = ga.train.NextToken(bytes_per_token=1)
    batch = objective.collate([{"tokens": torch.arange(100)}])
    report = objective.evaluate(Table(torch.zeros(256, 256)), [batch])
    assert report["bits_per_byte"] == pytest.approx(8)
    assert report["perplexity"] == pytest.approx(256)


def test_a_model_that_sees_what_it_is_to_guess_is_refused():
    objective = ga.train.NextToken()
    batch = objective.collate(examples((5, 5)))
    encoder = ga.models.SequenceEncoder(11, 16, 2, 2)
    for model in (encoder, nn.DataParallel(encoder)):
        with pytest.raises(
            ValueError, match=r"in block 0 of this SequenceEncoder it sees the token"
        ):
            objective.loss(model, batch)
    one_ahead = Table(torch.zeros(11, 11))
    edges = torch.tensor([[1, 2, 3], [0, 1, 2]])  # from a token to the one before it
    ahead = ga.from_edge_index(edges, 4)
    one_ahead.graphs = lambda num_tokens: [ahead]
    with pytest.raises(ValueError, match="it sees the token that it guesses"):
        objective.loss(one_ahead, batch)


def test_an_evaluation_is_the_mean_over_tokens_and_not_over_batches():
    model, objective = Table(torch.randn(11, 11, generator=generator())), ga.train.NextToken()
    batches = [objective.collate(examples(lengths)) for lengths in ((3,), (9, 20))]
    losses = [objective.loss(model, batch) for batch in batches]
    mean = sum(float(loss.total) for loss in losses) / (2 + 8 + 19)
    assert objective.evaluate(model, batches)["loss"] == pytest.approx(mean)


@pytest.mark.parametrize("wrong", [0, -1, "4", [], [[1.0]], [1.0, math.nan], [-1.0]])
def test_bad_numbers_of_bytes_are_named(wrong):
    with pytest.raises(ValueError, match="bytes_per_token must be"):
        ga.train.NextToken(bytes_per_token=wrong)


def test_a_table_of_bytes_for_another_vocabulary_is_named():
    objective = ga.train.NextToken(bytes_per_token=[1, 2, 3])
    with pytest.raises(ValueError, match=r"one number per token of the vocabulary \(11\), got 3"):
        objective.loss(language_model(), objective.collate(examples()))
