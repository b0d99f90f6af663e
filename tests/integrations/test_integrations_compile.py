"""Packed texts and steps with a cache compile without a graph break, like plain masks."""

import pytest
import torch
from tiny_models import CACHE, tiny
from transformers import StaticCache

from graphattn.integrations import transformers as gat

pytestmark = pytest.mark.long

WINDOWS = [None, 5]


def configured(window):
    torch._dynamo.reset()
    model = tiny("llama")
    gat.configure(model, window=window)
    return model, torch.compile(model, fullgraph=True, backend="eager")


@pytest.mark.parametrize("window", WINDOWS)
@torch.no_grad()
def test_packed_texts_are_what_each_is_alone(window):
    model, compiled = configured(window)
    for lengths in ((7, 9), (12, 8), (5, 30)):
        texts = [torch.randint(3, 50, (1, length)) for length in lengths]
        positions = torch.cat([torch.arange(length) for length in lengths])[None]
        got = compiled(torch.cat(texts, 1), position_ids=positions, use_cache=False).logits
        alone = [model(text, use_cache=False).logits for text in texts]
        torch.testing.assert_close(got, torch.cat(alone, 1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", WINDOWS)
@torch.no_grad()
def test_steps_with_a_static_cache_are_rows_of_the_whole(window):
    model, compiled = configured(window)
    tokens = torch.randint(3, 50, (1, 14))
    whole = model(tokens, use_cache=False).logits
    cache = StaticCache(config=model.config, max_cache_len=32)
    model(tokens[:, :10], **{CACHE: cache})
    for place in range(10, 14):
        step = compiled(tokens[:, place : place + 1], **{CACHE: cache}).logits
        torch.testing.assert_close(step[:, 0], whole[:, place], rtol=1e-4, atol=1e-5)
