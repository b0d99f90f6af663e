"""Masked-token modelling: what is hidden, and what it costs not to guess it."""

import math

import pytest
import torch
from draws import generator
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import graphattn as ga


@settings(deadline=None)
@given(st.integers(0, 99), st.floats(0.01, 1.0))
def test_masked_tokens_are_replaced_and_the_others_are_not(seed, mask_ratio):
    tokens = torch.randint(7, (4, 9), generator=generator(seed))
    inputs, masked = ga.train.mask_tokens(
        tokens, 7, mask_ratio=mask_ratio, generator=generator(seed)
    )
    assert (inputs[masked] == 7).all()
    assert torch.equal(inputs[~masked], tokens[~masked])
    again = ga.train.mask_tokens(tokens, 7, mask_ratio=mask_ratio, generator=generator(seed))
    assert torch.equal(again[1], masked)


def test_the_share_is_the_share_of_valid_tokens():
    tokens = torch.zeros(200, 500, dtype=torch.long)
    valid = torch.arange(500) < 300
    _, masked = ga.train.mask_tokens(tokens, 1, mask_ratio=0.3, valid=valid, generator=generator())
    assert not masked[:, 300:].any()
    n = 200 * 300
    assert abs(int(masked.sum()) - 0.3 * n) < 5 * math.sqrt(n * 0.3 * 0.7)  # five deviations


def test_the_loss_is_the_mean_negative_log_probability_of_the_masked_tokens():
    logits = torch.randn(3, 5, 6, dtype=torch.float64, generator=generator())
    tokens = torch.randint(6, (3, 5), generator=generator())
    masked = torch.rand(3, 5, generator=generator()) < 0.5
    probability = logits.exp() / logits.exp().sum(-1, keepdim=True)
    expected = [
        -math.log(probability[b, n, tokens[b, n]])
        for b in range(3)
        for n in range(5)
        if masked[b, n]
    ]
    loss = ga.train.masked_token_loss(logits, tokens, masked)
    assert float(loss) == pytest.approx(sum(expected) / len(expected), rel=1e-12)


def test_what_is_not_masked_has_no_gradient_and_nothing_masked_costs_nothing():
    logits = torch.randn(4, 6, requires_grad=True)
    tokens = torch.tensor([0, 1, 2, 3])
    masked = torch.tensor([True, False, False, True])
    ga.train.masked_token_loss(logits, tokens, masked).backward()
    assert logits.grad[[1, 2]].abs().sum() == 0
    assert (logits.grad[[0, 3]].abs().sum(-1) > 0).all()
    logits.grad = None
    nothing = ga.train.masked_token_loss(logits, tokens, torch.zeros(4, dtype=torch.bool))
    nothing.backward()
    assert nothing == 0
    assert not logits.grad.any()


def test_a_mask_is_that_of_the_first_version_bit_for_bit():
    tokens = torch.randint(7, (4, 9), generator=generator(1))
    drawn = torch.rand(4, 9, generator=generator(2))
    inputs, masked = ga.train.mask_tokens(tokens, 7, mask_ratio=0.4, generator=generator(2))
    assert torch.equal(masked, drawn < 0.4)
    assert torch.equal(inputs, torch.where(drawn < 0.4, 7, tokens))


def test_every_sequence_has_a_ratio_of_its_own():
    tokens = torch.zeros(3, 20_000).long()
    ratios = torch.tensor([[0.0], [0.3], [1.0]])
    _, masked = ga.train.mask_tokens(tokens, 1, mask_ratio=ratios, generator=generator())
    share = masked.double().mean(1)
    assert share[0] == 0
    assert share[2] == 1
    assert abs(float(share[1]) - 0.3) < 5 * math.sqrt(0.3 * 0.7 / 20_000)
    alike = ga.train.mask_tokens(
        tokens, 1, mask_ratio=torch.full((3, 1), 0.3), generator=generator()
    )
    assert torch.equal(
        alike[1], ga.train.mask_tokens(tokens, 1, mask_ratio=0.3, generator=generator())[1]
    )


def test_of_the_masked_tokens_80_percent_are_hidden_10_are_others_and_10_stay():
    n, vocab_size, mask_token = 200_000, 12, 5
    tokens = torch.full((n,), 3)
    inputs, masked = ga.train.mask_tokens(
        tokens,
        mask_token,
        mask_ratio=0.5,
        generator=generator(),
        replace=True,
        vocab_size=vocab_size,
    )
    assert torch.equal(inputs[~masked], tokens[~masked])
    plain = ga.train.mask_tokens(tokens, mask_token, mask_ratio=0.5, generator=generator())[1]
    assert torch.equal(masked, plain)  # the same tokens are to be guessed
    m = int(masked.sum())
    counts = inputs[masked].bincount(minlength=vocab_size).double()
    letters = vocab_size - 1
    expected = torch.full((vocab_size,), 0.1 / letters).double()  # a random one may be the same
    expected[mask_token] = 0.8
    expected[3] += 0.1
    assert stats.chisquare(counts.numpy(), (m * expected).numpy()).pvalue > 1e-3


def test_random_tokens_are_those_below_the_mask_token_where_no_vocabulary_is_given():
    tokens = torch.zeros(10_000).long()
    inputs, masked = ga.train.mask_tokens(
        tokens, 4, mask_ratio=1.0, generator=generator(), replace=True
    )
    assert set(inputs.tolist()) == {0, 1, 2, 3, 4}
    assert masked.all()


@settings(deadline=None)
@given(st.integers(0, 99))
def test_a_sequence_of_which_nothing_was_drawn_has_one_token_masked(seed):
    tokens = torch.randint(7, (6, 5), generator=generator(seed))
    valid = torch.arange(5) < torch.tensor([5, 4, 3, 2, 1, 0])[:, None]
    options = {"mask_ratio": 0.2, "valid": valid}
    drawn = ga.train.mask_tokens(tokens, 7, generator=generator(seed), **options)[1]
    with_one = ga.train.mask_tokens(
        tokens, 7, generator=generator(seed), at_least_one=True, **options
    )[1]
    assert not (with_one & ~valid).any()
    assert not with_one[5].any()  # all of it is padding
    for before, after in zip(drawn[:5], with_one[:5], strict=True):
        assert torch.equal(before, after) if before.any() else int(after.sum()) == 1


def test_the_one_that_is_masked_at_least_is_any_of_the_valid_ones():
    valid = torch.arange(6) < 4
    _, masked = ga.train.mask_tokens(
        torch.zeros(20_000, 6).long(),
        1,
        mask_ratio=1e-6,
        valid=valid,
        generator=generator(),
        at_least_one=True,
    )
    assert (masked.sum(1) == 1).all()
    assert not masked[:, 4:].any()
    assert stats.chisquare(masked[:, :4].sum(0).numpy()).pvalue > 1e-3


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"mask_ratio": torch.tensor([1])}, "mask_ratio must be a floating-point tensor"),
        ({"mask_ratio": torch.rand(4)}, "mask_ratio must be broadcastable to tokens"),
        ({"mask_ratio": torch.tensor([0.1, 1.5, 0.2])}, r"mask_ratio must be in \[0, 1\], got 1.5"),
        ({"mask_ratio": torch.tensor(torch.nan)}, r"mask_ratio must be in \[0, 1\], got nan"),
        ({"mask_token": 0, "replace": True}, "vocab_size must leave at least one token"),
        ({"replace": True, "vocab_size": 0}, "vocab_size must be >= 1"),
    ],
)
def test_bad_ratios_and_vocabularies_are_named(arguments, says):
    with pytest.raises(ValueError, match=says):
        ga.train.mask_tokens(**{"tokens": torch.arange(3), "mask_token": 9, **arguments})


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"tokens": torch.zeros(3)}, "tokens must be an integer tensor"),
        ({"tokens": [1, 2]}, "tokens must be an integer tensor"),
        ({"tokens": torch.zeros(3).bool()}, "tokens must be an integer tensor"),
        (
            {"tokens": torch.zeros(3).byte(), "mask_token": 300},
            "mask_token must be a number that fits the dtype of tokens",
        ),
        ({"mask_token": -1}, "mask_token must be >= 0"),
        ({"mask_ratio": 0.0}, "mask_ratio must be"),
        ({"mask_ratio": 1.5}, r"mask_ratio must be in \(0, 1\]"),
        ({"valid": torch.ones(4)}, "valid must be a bool tensor"),
        ({"valid": torch.ones(4).bool()}, "valid must be broadcastable"),
    ],
)
def test_bad_arguments_of_the_mask_are_named(arguments, says):
    with pytest.raises(ValueError, match=says):
        ga.train.mask_tokens(**{"tokens": torch.arange(3), "mask_token": 9, **arguments})


GOOD = {
    "logits": torch.zeros(3, 4),
    "tokens": torch.tensor([0, 1, 3]),
    "masked": torch.ones(3).bool(),
}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"tokens": torch.zeros(2).long()}, "logits, tokens and masked must have shapes"),
        ({"tokens": torch.zeros(3)}, "tokens must be an integer tensor, got torch.float32"),
        ({"tokens": torch.tensor([0, 1, 4])}, r"tokens must be 0 .. 3 where masked, got 4"),
        ({"tokens": torch.tensor([0, -100, 1])}, "got -100"),
        ({"masked": torch.tensor([0, 1, 1])}, "masked must be a bool tensor, got torch.int64"),
        ({"masked": [True] * 3}, "masked must be a bool tensor, got list"),
        ({"logits": torch.zeros(3, 4).long()}, "logits must be a floating-point tensor"),
    ],
)
def test_bad_arguments_of_the_loss_are_named(change, says):
    with pytest.raises(ValueError, match=says):
        ga.train.masked_token_loss(**{**GOOD, **change})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_logits_are_summed_in_float32(dtype):
    """A sum of 16,384 losses of 5 nats is beyond float16."""
    logits = torch.randn(16384, 100, generator=generator()).to(dtype)
    tokens, masked = torch.zeros(16384).long(), torch.ones(16384).bool()
    loss = ga.train.masked_token_loss(logits, tokens, masked)
    exact = ga.train.masked_token_loss(logits.double(), tokens, masked)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), exact, rtol=1e-5, atol=0)


# Parameter groups.


def groups_by_name(model):
    decays, stays = ga.train.parameter_groups(model, 0.1)
    assert (decays["weight_decay"], stays["weight_decay"]) == (0.1, 0.0)
    names = {id(p): name for name, p in model.named_parameters()}
    return [{names[id(p)] for p in group["params"]} for group in (decays, stays)]


def test_maps_decay_and_bandwidths_steps_biases_norms_and_embeddings_do_not():
    layers = [
        ga.nn.KrauseAttention(16, 4),
        ga.nn.SelfConsensus(16, 4, edge_hidden=8, step_size="learned"),
    ]
    model = ga.models.SequenceEncoder(9, 16, 2, 4, mixer=layers)
    decays, stays = groups_by_name(model)
    assert decays | stays == {name for name, _ in model.named_parameters()}
    assert not decays & stays
    assert all(name.endswith(("weight", "alpha", "beta", "shear")) for name in decays)
    for name in (
        "embedding.weight",
        "blocks.0.mixer.log_sigma",
        "blocks.1.mixer.raw_step_size",
        "blocks.1.mixer.edge_net.shear_bias",
        "blocks.1.mixer.edge_net.target.bias",
        "blocks.0.mlp_norm.weight",
        "head.bias",
    ):
        assert name in stays, name
    for name in ("head.weight", "blocks.0.mixer.query_proj.weight"):
        assert name in decays


def test_weights_of_norms_embeddings_and_class_tokens_stay_and_those_of_recurrences_decay():
    model = torch.nn.ModuleDict(
        {
            "lstm": torch.nn.LSTM(2, 3),
            "conv": torch.nn.Conv1d(2, 3, 2),
            "norm": torch.nn.LayerNorm((8, 4)),
            "bag": torch.nn.EmbeddingBag(5, 2),
        }
    )
    model.class_token = torch.nn.Parameter(torch.zeros(1, 1, 4))
    decays, stays = groups_by_name(model)
    assert decays == {"lstm.weight_ih_l0", "lstm.weight_hh_l0", "conv.weight"}
    assert {"norm.weight", "bag.weight", "class_token", "lstm.bias_ih_l0"} <= stays
    with pytest.raises(ValueError, match="weight_decay must be a finite number >= 0"):
        ga.train.parameter_groups(model, -1)


def test_frozen_parameters_are_left_out_and_shared_ones_stand_once():
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2), "b": torch.nn.Linear(2, 2)})
    model["b"].weight = model["a"].weight
    model["a"].bias.requires_grad_(False)
    decays, stays = ga.train.parameter_groups(model)
    assert [len(decays["params"]), len(stays["params"])] == [1, 1]


def test_a_step_of_the_optimizer_leaves_what_has_no_gradient_but_shrinks_maps():
    layer = ga.nn.GaussianKernelAttention(8, 2)
    optimizer = torch.optim.SGD(ga.train.parameter_groups(layer, 0.5), lr=0.1)
    before = {name: p.detach().clone() for name, p in layer.named_parameters()}
    for p in layer.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    torch.testing.assert_close(layer.output_proj.weight, before["output_proj.weight"] * 0.95)
    assert torch.equal(layer.log_sigma, before["log_sigma"])
