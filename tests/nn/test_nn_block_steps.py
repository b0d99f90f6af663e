"""A block goes token by token like its mixer, or says by the mixer's name why it cannot."""

import random
import types

import pytest
import torch
from nn_by_hand import DIM, Case
from nn_steps import STEPPING, causal, poisoned, random_pieces, stream
from torch import nn

import graphattn as ga

EVERY_LAYER = pytest.mark.parametrize("case", STEPPING, ids=str)
CLOSE = {"rtol": 1e-10, "atol": 1e-11}


def block_of(case, dropout=0.0, dtype=torch.float64):
    """Every parameter away from its initial value, so that no norm is the plain one."""
    block = ga.nn.PreNormBlock(case.make(dtype=dtype), mlp_ratio=2, dropout=dropout).to(dtype)
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return block.eval()


def texts(*shape, dtype=torch.float64):
    return torch.randn(*shape, DIM, dtype=dtype)


@EVERY_LAYER
@pytest.mark.parametrize("window", [1, 5, 40, None])
def test_steps_are_one_forward(case, window):
    block = block_of(case)
    for batch in ((), (2,), (2, 3)):
        x = texts(*batch, 21)
        y = stream(block, x, poisoned(block.init_cache(batch, window)))
        torch.testing.assert_close(y, block(x, causal(21, window)), **CLOSE)


@EVERY_LAYER
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_prompts_padding_and_positions_come_in_any_pieces(case, backend):
    block, rng = block_of(case), random.Random(3)
    x, graph = texts(3, 40), causal(40, 7)
    valid = torch.arange(40) >= torch.tensor([0, 4, 17])[:, None]
    positions = torch.randint(0, 500, (3, 40)).sort(dim=-1).values
    expected = block(x, graph, valid=valid, positions=positions)
    x = x.masked_fill(~valid[..., None], torch.nan)
    with ga.use_backend(backend):
        for _ in range(4):
            cache = poisoned(block.init_cache(3, 7))
            y = stream(block, x, cache, random_pieces(40, rng), valid, positions)
            torch.testing.assert_close(y[valid], expected[valid], **CLOSE)


@EVERY_LAYER
def test_training_drops_nothing_in_steps_and_a_step_has_no_gradient(case):
    block, x = block_of(case, dropout=0.5), texts(2, 12).requires_grad_()
    expected = block(x, causal(12, 4))
    block.train()
    y = stream(block, x, block.init_cache(2, 4), [5, *[1] * 7])
    assert not y.requires_grad
    torch.testing.assert_close(y, expected.detach(), **CLOSE)


def test_what_stands_in_the_place_of_dropout_is_applied():
    class Halve(nn.Module):
        def forward(self, x):
            return x / 2

    block, x = block_of(STEPPING[2]), texts(2, 12)
    block.dropout = Halve()
    y = stream(block, x, block.init_cache(2, 4))
    torch.testing.assert_close(y, block(x, causal(12, 4)), **CLOSE)


@EVERY_LAYER
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_as_good_as_that_of_forward(case, dtype):
    if "top_k" in case.options:  # of nearly equal tokens, another may be chosen at every rounding
        case = Case(case.kind, {k: v for k, v in case.options.items() if k != "top_k"})
    block, x = block_of(case, dtype=dtype), texts(2, 30).to(dtype)
    exact = block_of(case)
    exact.load_state_dict(block.state_dict())
    truth = exact(x.double(), causal(30, 7))
    y, forward = stream(block, x, block.init_cache(2, 7)), block(x, causal(30, 7))
    assert y.dtype == dtype
    assert (y - truth).norm() <= 1.5 * (forward - truth).norm()


@EVERY_LAYER
def test_autocast_gives_what_forward_gives_under_it(case):
    if "top_k" in case.options:
        case = Case(case.kind, {k: v for k, v in case.options.items() if k != "top_k"})
    block, x = block_of(case, dtype=torch.float32), texts(2, 30, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        expected = block(x, causal(30, 7))
        for pieces in (None, [12, *[1] * 10, 8]):
            y = stream(block, x, block.init_cache(2, 7), pieces)
            assert y.dtype == expected.dtype
            torch.testing.assert_close(y, expected, rtol=5e-2, atol=5e-2)


@EVERY_LAYER
def test_a_guess_is_taken_back(case):
    block, x = block_of(case), texts(2, 30)
    expected, cache = block(x, causal(30, 5)), block.init_cache(2, 5, rollback=3)
    for t in range(30):
        block.step(texts(2, 3), cache)
        cache.truncate(t)
        torch.testing.assert_close(block.step(x[:, t], cache), expected[:, t], **CLOSE)
    assert cache.rollback == 3
    assert block.init_cache(2, 5, dtype=torch.float32).dtype == torch.float32
    assert block.init_cache(2, 5, device="meta").device.type == "meta"


# Mixers of one's own.


class Mean(nn.Module):
    """Every token becomes the mean of what it sees."""

    def __init__(self, dim=DIM):
        super().__init__()
        self.dim = dim

    def forward(self, x, graph, *, valid=None, positions=None):
        q = torch.zeros_like(x)[..., None, :]
        return ga.dot_product_attention(q, q, x[..., None, :], graph, valid=valid).squeeze(-2)


class Running(Mean):
    """The mean of all tokens so far, from their sum and count: enough without a window."""

    def init_cache(self, batch, window, *, dtype=None, device=None, rollback=0):
        assert window is None
        return types.SimpleNamespace(sum=torch.zeros(batch, self.dim).double(), count=0)

    def step(self, x, cache, *, valid=None, positions=None):
        cache.sum, cache.count = cache.sum + x, cache.count + 1
        return cache.sum / cache.count


def test_a_mixer_of_one_s_own_steps_as_it_says():
    block = ga.nn.PreNormBlock(Running()).double()
    x, cache = texts(2, 9), block.init_cache(2, None)
    y = torch.stack([block.step(x[:, t], cache) for t in range(9)], 1)
    torch.testing.assert_close(y, block(x, ga.causal_graph(9)), **CLOSE)


@pytest.mark.parametrize(
    ("mixer", "says"),
    [
        (
            Mean,
            r"mixer Mean cannot generate token by token: it needs the methods init_cache\(batch.* "
            r"and step\(x,",
        ),
        (
            lambda: ga.nn.CrossConsensus(DIM, 4, edge_hidden=4),
            "mixer CrossConsensus cannot generate token by token, because it attends to a context",
        ),
        (
            lambda: ga.nn.SelfConsensus(DIM, 4, edge_hidden=4),
            "SelfConsensus can generate token by token only with update='target', got "
            "update='energy'",
        ),
        (
            lambda: ga.nn.DotProductAttention(DIM, 4, context_dim=10),
            "DotProductAttention cannot generate token by token .* context_dim = 10 .*context",
        ),
    ],
)
def test_a_mixer_that_cannot_go_token_by_token_is_named_with_what_it_needs(mixer, says):
    block = ga.nn.PreNormBlock(mixer())
    cache = ga.nn.KrauseAttention(DIM, 4).init_cache(2, 5)
    with pytest.raises(ValueError, match=says):
        block.init_cache(2, 5)
    with pytest.raises(ValueError, match=says):
        block.step(torch.randn(2, DIM), cache)


class OwnForward(ga.nn.PreNormBlock):
    def forward(self, x, graph, context=None, *, valid=None, positions=None):
        return 2 * super().forward(x, graph, context, valid=valid, positions=positions)


class OwnForwardAndStep(OwnForward):
    def step(self, x, cache, *, valid=None, positions=None):
        return 2 * super().step(x, cache, valid=valid, positions=positions)


class OwnForwardAgain(OwnForwardAndStep):
    def forward(self, x, graph, context=None, *, valid=None, positions=None):
        return 3 * super().forward(x, graph, context, valid=valid, positions=positions)


def test_steps_refuse_where_forward_was_replaced_and_step_was_not(monkeypatch):
    says = r"step does not run the forward\(\) of {}"
    for kind in (OwnForward, OwnForwardAgain):
        block = kind(ga.nn.KrauseAttention(DIM, 4))
        with pytest.raises(ValueError, match=says.format(kind.__name__)):
            block.init_cache(2, window=4)
    block = OwnForwardAndStep(ga.nn.KrauseAttention(DIM, 4)).double()
    x, cache = texts(2, 9), block.init_cache(2, window=4)
    torch.testing.assert_close(stream(block, x, cache), block(x, causal(9, 4)), **CLOSE)
    # An instance, and the class itself, may be patched as well.
    plain = ga.nn.PreNormBlock(ga.nn.KrauseAttention(DIM, 4))
    cache = plain.init_cache(2, window=4)
    plain.forward = types.MethodType(lambda self, x, graph: x, plain)
    with pytest.raises(ValueError, match=says.format("PreNormBlock")):
        plain.step(torch.randn(2, DIM), cache)
    monkeypatch.setattr(ga.nn.PreNormBlock, "forward", lambda self, x, graph: x)
    with pytest.raises(ValueError, match=says.format("PreNormBlock")):
        ga.nn.PreNormBlock(ga.nn.KrauseAttention(DIM, 4)).init_cache(2, 4)


@pytest.mark.parametrize(
    ("x", "says"),
    [
        (torch.randn(2, 15), r"x must be a tensor of shape \[\*, 16\] .*got \[2, 15\]"),
        (torch.randn(()), r"x must be .*got \[\]"),
        ([1.0], r"x must be .*got list"),
        (torch.randn(3, DIM), r"x must be .*\[2, 16\] .*batch \[2\], got \[3, 16\]"),
        (torch.ones(2, DIM, dtype=torch.long), "x must be floating-point, got torch.int64"),
        (torch.randn(2, DIM).double(), "x must have the layer's dtype torch.float32, got .*64"),
    ],
)
def test_tokens_that_do_not_fit_are_refused_and_the_cache_stays(x, says):
    block = ga.nn.PreNormBlock(ga.nn.KrauseAttention(DIM, 4))
    cache = block.init_cache(2, 5)
    with pytest.raises(ValueError, match=says):
        block.step(x, cache)
    assert cache.position == 0
