"""Pseudo-perplexity: every token masked by itself, one after the other."""

import math

import pytest
import torch
from draws import generator
from torch import nn

import graphattn as ga
from graphattn.train.evaluation import evaluate as evaluation


def protein_model(**options) -> ga.models.ProteinModel:
    torch.manual_seed(0)
    return ga.models.ProteinModel(16, 2, 2, neighbors=3, **options)


def one_by_one(model, tokens, **given) -> list[float]:
    log_p = []
    for place in range(len(tokens)):
        hidden = tokens.clone()
        hidden[place] = model.mask_token
        logits = model(hidden, **given).detach().double()
        log_p.append(float(logits[place].log_softmax(0)[tokens[place]]))
    return log_p


def sequences(lengths=(11, 4)) -> list[torch.Tensor]:
    return [torch.randint(20, (n,), generator=generator(n)) for n in lengths]


@pytest.mark.parametrize("batch_size", [1, 3, 32])
def test_it_is_that_of_a_loop_that_masks_one_token_at_a_time(batch_size):
    model = protein_model(dropout=0.5).train()
    log_p = [
        ga.train.pseudo_log_likelihood(model, tokens, 21, batch_size=batch_size)
        for tokens in sequences()
    ]
    together = ga.train.pseudo_perplexity(model, sequences(), 21, batch_size=batch_size)
    assert model.training
    model.eval()
    expected = [one_by_one(model, tokens) for tokens in sequences()]
    for ours, theirs in zip(log_p, expected, strict=True):
        torch.testing.assert_close(ours.double(), torch.tensor(theirs).double(), rtol=1e-4, atol=0)
    assert together == pytest.approx(math.exp(-sum(map(sum, expected)) / 15), rel=1e-4)


def test_structures_and_context_are_seen():
    model = protein_model(context={"accessible": 2}).eval()
    (tokens,) = sequences((9,))
    places = torch.randn(9, 3, generator=generator()).cumsum(0) * 2
    structure = ga.data.Structure(ga.data.ProteinTokenizer().decode(tokens), places)
    context = {"accessible": torch.randn(9, 2, generator=generator(1))}
    example = {"tokens": tokens, "structure": structure, "context": context}
    log_p = ga.train.pseudo_log_likelihood(model, example, 21, batch_size=4)
    expected = one_by_one(model, tokens, structure=structure, context=context)
    torch.testing.assert_close(log_p.double(), torch.tensor(expected).double(), rtol=1e-4, atol=0)
    blind = ga.train.pseudo_log_likelihood(model, tokens, 21)
    assert not torch.allclose(log_p, blind, rtol=1e-3)


def test_it_agrees_with_scores_of_mutations():
    """Masked marginals (ESM-1v) are differences of the same log-probabilities."""
    model = protein_model()
    wild = model.tokenizer.encode("MKVLAGHW")
    wild_log_p = ga.train.pseudo_log_likelihood(model, wild, 21, positions=torch.tensor([2]))
    hidden = wild.clone()
    hidden[2] = 21
    mutant = model.eval()(hidden)[2].log_softmax(0)[model.tokenizer.encode("A")[0]]
    score = model.score_mutations("MKVLAGHW", ["V3A"])
    torch.testing.assert_close(mutant.detach() - wild_log_p[0], score[0], rtol=1e-4, atol=1e-5)


def test_a_model_that_knows_nothing_is_as_perplexed_as_it_has_choices():
    class Uniform(nn.Module):
        def forward(self, tokens, valid=None):
            return torch.zeros(*tokens.shape, 21)

    assert ga.train.pseudo_perplexity(Uniform(), sequences(), 21) == pytest.approx(21)


def test_a_sample_of_the_tokens_has_the_same_mean():
    model = protein_model().eval()
    (tokens,) = sequences((40,))
    whole = ga.train.pseudo_log_likelihood(model, tokens, 21)
    random = generator()
    samples = [
        -math.log(ga.train.pseudo_perplexity(model, tokens, 21, max_tokens=8, generator=random))
        for _ in range(30)
    ]
    deviation = float(whole.std()) / math.sqrt(8 * 30)
    assert abs(sum(samples) / 30 - float(whole.mean())) < 5 * deviation
    assert len(set(samples)) > 1


def test_an_evaluation_asks_sequences_spread_over_all_of_them(monkeypatch):
    asked = []
    monkeypatch.setattr(
        evaluation, "pseudo_perplexity", lambda model, some, *_, **__: asked.extend(some)
    )
    model = ga.models.SequenceEncoder(5, dim=16, depth=1, heads=2)
    data = [{"tokens": torch.full((40,), n % 4)} for n in range(8)]
    objective = ga.train.MaskedTokens(4)
    report = ga.train.evaluate_model(model, objective, data, pseudo_tokens=32)
    assert [each is data[n] for each, n in zip(asked, (0, 4), strict=True)] == [True, True]
    assert report["pseudo_tokens"] == 32


def test_bad_arguments_are_named():
    model = protein_model()
    with pytest.raises(ValueError, match="examples must contain at least one sequence"):
        ga.train.pseudo_perplexity(model, [], 21)
    with pytest.raises(ValueError, match=r"positions must be integers \[n\] in 0 .. 3"):
        ga.train.pseudo_log_likelihood(model, torch.arange(4), 21, positions=torch.tensor([4]))
    with pytest.raises(ValueError, match="max_tokens must be >= 1"):
        ga.train.pseudo_perplexity(model, [torch.arange(4)], 21, max_tokens=0)
