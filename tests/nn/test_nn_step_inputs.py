"""Steps of layers whose parts were replaced, moved or tied: compiled code reads what they give."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import graphattn as ga

LAYERS = {
    "dot": lambda: ga.nn.DotProductAttention(16, 4, sink=True),
    "krause": lambda: ga.nn.KrauseAttention(16, 4, top_k=3),
    "gka": lambda: ga.nn.GaussianKernelAttention(16, 4, sink=True),
}
EACH = pytest.mark.parametrize("name", LAYERS)


class Wrapped(nn.Module):
    """A projection whose output lies otherwise in memory."""

    def __init__(self, own, form):
        super().__init__()
        self.own, self.form = own, form

    def forward(self, x):
        return self.form(self.own(x))


class Tied(nn.Module):
    def forward(self, x):
        return x.mean().expand_as(x)


class EverySecond(nn.Module):
    def forward(self, x):
        return x.repeat_interleave(2)[::2]


FORMS = {
    "transposed": lambda y: y.transpose(0, -1).contiguous().transpose(0, -1),
    "expanded": lambda y: y.mean(-1, keepdim=True).expand_as(y),
    "negated": lambda y: torch._neg_view(-y),
}


def steps_and_forward(layer):
    x = torch.randn(2, 9, 16, generator=torch.Generator().manual_seed(1))
    cache = layer.init_cache(2, window=5)
    y = torch.stack([layer.step(x[:, t], cache) for t in range(9)], dim=1)
    return y, layer(x, ga.causal_window_graph(9, 5))


def made(name):
    torch.manual_seed(0)
    return LAYERS[name]()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("projection", ["query_proj", "key_proj", "value_proj"])
@EACH
def test_projections_may_give_what_lies_otherwise(name, projection, form):
    layer = made(name)
    own = getattr(layer, projection, None)
    if own is None:
        pytest.skip("it has no such projection")
    setattr(layer, projection, Wrapped(own, FORMS[form]))
    torch.testing.assert_close(*steps_and_forward(layer), rtol=1e-5, atol=1e-5)


@EACH
def test_a_negated_view_is_what_it_says(name):
    layer, x = made(name), torch.randn(4, 2, 16)
    caches = layer.init_cache(2, window=3), layer.init_cache(2, window=3)
    for token in x:
        seen = layer.step(torch._neg_view(-token), caches[0])
        torch.testing.assert_close(seen, layer.step(token, caches[1]))


@pytest.mark.parametrize("tie", [Tied, EverySecond])
@pytest.mark.parametrize("parameter", ["log_sigma", "sink"])
@EACH
def test_numbers_of_heads_may_be_views(name, parameter, tie):
    layer = made(name)
    if getattr(layer, parameter, None) is None:
        pytest.skip("it has no such numbers")
    nn.init.normal_(getattr(layer, parameter))
    parametrize.register_parametrization(layer, parameter, tie())
    torch.testing.assert_close(*steps_and_forward(layer), rtol=1e-5, atol=1e-5)


@EACH
def test_a_layer_that_was_moved_or_cast_refuses_its_old_cache(name):
    layer, x = made(name), torch.randn(2, 16)
    cache = layer.init_cache(2, window=5)
    layer.step(x, cache)
    with pytest.raises(ValueError, match="cache must come from init_cache of this layer"):
        layer.double().step(x, cache)
    assert cache.position == 1
    with pytest.raises(ValueError, match="x must be on the device of cache"):
        layer.float().to("meta").step(x.to("meta"), cache)
    assert cache.position == 1
