"""Nothing that can change is kept of a dense mask: no gradients, no numbers written to later."""

import pytest
import torch
from tiny_models import CACHE, tiny
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

import graphattn as ga
from graphattn.integrations import transformers as gat

N = 12
OPTIONS = [{}, {"window": 4}, {"top_k": 3}, {"mixer": "krause", "window": 5, "top_k": 3}]


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(3, 50, (1, N), generator=torch.Generator().manual_seed(0))


def configured(**options):
    model = tiny("llama").double()
    gat.configure(model, **options)
    return model


@pytest.mark.every_case
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_bias_that_is_learned_gets_its_gradient_every_time(options, tokens):
    model = configured(**options)
    bias = torch.randn(1, 1, N, N, dtype=torch.float64, requires_grad=True)
    with torch.no_grad():
        model(tokens, attention_mask=bias)
    gradients = []
    for _ in range(2):
        bias.grad = None
        model(tokens, attention_mask=bias).logits.square().sum().backward()
        gradients.append(bias.grad)
    assert gradients[0].abs().max() > 0
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-9, atol=1e-9)


@pytest.mark.every_case
@pytest.mark.parametrize("pieces", [[N], [6, 6], [11, 1]], ids=str)
@pytest.mark.parametrize("options", OPTIONS[1:], ids=str)
def test_a_window_counts_from_the_query_in_a_mask_as_wide_as_a_static_cache(
    options, pieces, tokens
):
    model = configured(**options)
    expected = model(tokens).logits
    whole = torch.ones(N, 20, dtype=torch.bool).tril()
    cache, start, got = StaticCache(config=model.config, max_cache_len=20), 0, []
    for length in pieces:
        mask = whole[None, None, start : start + length]
        part = tokens[:, start : start + length]
        positions = torch.arange(start, start + length)[None]
        got.append(
            model(part, attention_mask=mask, **{CACHE: cache}, position_ids=positions).logits
        )
        start += length
    torch.testing.assert_close(torch.cat(got, 1), expected, rtol=1e-9, atol=1e-9)


class Window:
    """A graph that says it equals another, and has no hash."""

    def __init__(self, width: int) -> None:
        self.width = width

    def __eq__(self, other: object) -> bool:
        return True

    def __call__(self, num_targets: int, num_sources: int) -> ga.TokenGraph:
        return ga.causal_window_graph(num_sources, self.width)


@pytest.mark.every_case
@pytest.mark.parametrize("options", [{}, {"top_k": 2}], ids=str)
def test_a_graph_is_asked_for_again_beside_a_dense_mask(options, tokens):
    window = Window(4)
    model = configured(graph=window, **options)
    mask = torch.ones(1, 1, N, N, dtype=torch.bool).tril()
    for window.width in (4, 2):
        expected = configured(window=window.width, **options)(tokens).logits
        got = model(tokens, attention_mask=mask).logits
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


def test_models_of_one_config_object_say_so(tokens):
    config = LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4,
    )  # fmt: skip
    first, second = LlamaForCausalLM(config).eval(), LlamaForCausalLM(config).eval()
    gat.configure(first, window=4)
    with pytest.raises(ValueError, match="make each from its own copy"):
        second(tokens)
    with pytest.raises(ValueError, match="make each from its own copy"):
        gat.configure(second, window=3)
