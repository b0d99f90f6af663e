"""Generation after a prompt that ranks divide, beside one process; the functions run on ranks."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphattn as ga

VOCAB, DIM = 11, 8
SelfConsensus, Krause = ga.nn.SelfConsensus, ga.nn.KrauseAttention


def of_gka() -> list[nn.Module]:
    return [ga.nn.GaussianKernelAttention(DIM, 2, eps=0.1, sink=True, rope=True) for _ in range(2)]


# Models whose windows and options draw on a random generator.
MODELS: dict[str, Callable[[random.Random], dict[str, Any]]] = {
    "dot": lambda rng: {"mixer_options": {"kv_heads": rng.choice([1, 2]), "sink": True}},
    "softcap, windows": lambda rng: {
        "window": [rng.randint(1, 40), None],
        "mixer_options": {"softcap": 2.0},
    },
    "learned positions": lambda rng: {"positions": "learned", "num_positions": 99},
    "value embeddings": lambda rng: {"value_embeddings": True, "window": rng.randint(1, 40)},
    "vlt": lambda rng: {"mixer": "vlt", "window": rng.choice([None, 30])},
    "gka": lambda rng: {"mixer": of_gka(), "window": rng.choice([None, 30])},
    "krause": lambda rng: {"mixer": "krause", "mixer_options": {"top_k": rng.randint(1, 12)}},
    "krause, window": lambda rng: {
        "mixer": "krause",
        "window": rng.randint(1, 40),
        "mixer_options": {"top_k": 3},
    },
    "linear": lambda rng: {"mixer": "linear"},
    "linear, window": lambda rng: {"mixer": "linear", "window": rng.randint(1, 40)},
    "consensus": lambda rng: {"mixer": "mix", "consensus_window": rng.randint(1, 40)},
    "consensus, auto": lambda rng: {
        "mixer": "consensus",
        "consensus_window": 4,
        "rope": "isometric",
        "mixer_options": {"step_size": "auto"},
    },
}


def model_of(name: str, seed: int) -> ga.models.CausalLM:
    torch.manual_seed(seed)
    given = {"depth": 2, "heads": 2, **MODELS[name](random.Random(seed))}
    model = ga.models.CausalLM(VOCAB, DIM, **given).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)  # so that texts do not repeat one token
    return model


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-12)


def texts_are_those_of_one_process(group: Any, cases: int, seed: int = 0) -> int:
    """Compare logits of prompts and steps, and greedy and drawn texts; count new tokens."""
    rng, count = random.Random(seed), 0
    for case in range(cases):
        name = list(MODELS)[case % len(MODELS)]
        model = model_of(name, rng.randrange(1000))
        N, batch = rng.randint(28, 60), rng.choice([(), (2,)])
        order: Any = rng.choice(["runs", "zigzag", "auto"])
        draws = torch.Generator().manual_seed(case)
        prompt = torch.randint(VOCAB, (*batch, N), generator=draws)
        shard = ga.distributed.shard(ga.causal_graph(N), group, order=order)
        given: dict[str, Any] = {}
        if batch and rng.random() < 0.4:  # prompts of unequal lengths
            given["valid"] = torch.arange(N) >= torch.tensor([[0], [rng.randint(1, 20)]])
        expected = model.generate(prompt, 12, **given)
        assert torch.equal(model.generate(prompt, 12, shard=shard, **given), expected), name
        steps_are_those_of_one_process(model, shard, prompt, rng)
        drawn = model.generate(
            prompt, 5, shard=shard, temperature=1.0, generator=torch.Generator().manual_seed(7)
        )
        alone = model.generate(
            prompt, 5, temperature=1.0, generator=torch.Generator().manual_seed(7)
        )
        assert torch.equal(drawn, alone), name
        count += 17
    return count


def steps_are_those_of_one_process(
    model: ga.models.CausalLM, shard: Any, prompt: Tensor, rng: random.Random
) -> None:
    """Compares steps of one token and of several, and after tokens are taken back."""
    alone = model.init_cache(tuple(prompt.shape[:-1]), rollback=3)
    cache = model.init_cache(tuple(prompt.shape[:-1]), rollback=3, shard=shard)
    model.train()  # steps have no dropout
    close(shard.gather(model.step(shard.split(prompt), cache)), model.step(prompt, alone))
    assert cache.position == prompt.shape[-1]
    draws = torch.Generator().manual_seed(rng.randrange(1000))
    for n in (1, 4, 1, 2):
        tokens = torch.randint(VOCAB, (*prompt.shape[:-1], n), generator=draws)
        close(model.step(tokens, cache), model.step(tokens, alone))
        assert cache.min_length == alone.min_length
        back = rng.randint(max(alone.min_length, alone.position - 3), alone.position)
        cache.truncate(back)
        alone.truncate(back)
    twin = cache.clone()
    close(model.step(tokens, twin), model.step(tokens, alone))
    cache.truncate(0)
    with pytest.raises(ValueError, match=r"tokens must be the .* of the prompt on rank"):
        model.step(tokens, cache)
    close(shard.gather(model.step(shard.split(prompt), cache)), model(prompt))


def every_rank_stores_its_part(group: Any) -> tuple[int, int, list[int]]:
    """Return the bytes of one process, and of this rank: with all tokens, and with a window."""
    model = model_of("dot", 0)
    prompt = torch.randint(VOCAB, (400,), generator=torch.Generator().manual_seed(0))
    alone, far = model.init_cache(()), []
    model.step(prompt, alone)
    shard = ga.distributed.shard(ga.causal_graph(400), group)
    divided = model.init_cache((), shard=shard)
    model.step(shard.split(prompt), divided)
    for token in range(8):
        model.step(torch.tensor(token), divided)
        far.append(divided.layers[0].held(None))
    of_all = alone.layers[0].held(None)
    return of_all, far[0], far


def equal_logits_select_the_earlier_token(group: Any) -> None:
    """Top-k over ranks selects as one process does if all logits are equal, and values are not.

    In a window, the earliest token need not be on the first rank.
    """
    torch.manual_seed(0)
    model = ga.models.CausalLM(VOCAB, DIM, depth=2, heads=2, mixer="krause", window=30).double()
    for block in model.blocks:
        mixer: Any = block.mixer
        mixer.top_k = 5
        for projection in (mixer.query_proj, mixer.key_proj):
            for parameter in projection.parameters():
                nn.init.zeros_(parameter)
    prompt = torch.randint(VOCAB, (48,))
    for order in ("runs", "zigzag"):
        shard = ga.distributed.shard(ga.causal_graph(48), group, order=order)
        alone, cache = model.init_cache(()), model.init_cache((), shard=shard)
        model.step(prompt, alone)
        model.step(shard.split(prompt), cache)
        for token in (0, 0, 1):
            one = torch.tensor(token)
            close(model.step(one, cache), model.step(one, alone))


def what_cannot_be_merged_is_refused(group: Any) -> None:
    shard = ga.distributed.shard(ga.causal_graph(40), group)
    model = ga.models.CausalLM(VOCAB, DIM, depth=1, heads=2, mixer="consensus")
    with pytest.raises(ValueError, match="block 0: shard must be None for a layer without a win"):
        model.init_cache((), [None], shard=shard)
    model = ga.models.CausalLM(VOCAB, DIM, depth=1, heads=2, mixer="dot+krause")
    with pytest.raises(ValueError, match="shard must be None for a layer whose cache is its own"):
        model.init_cache((), shard=shard)
    model = ga.models.CausalLM(VOCAB, DIM, depth=1, heads=2)
    tokens = torch.zeros(41, dtype=torch.long)
    with pytest.raises(ValueError, match="shard must be of a graph over the 41 tokens"):
        model.generate(tokens, 1, shard=shard)
    with pytest.raises(ValueError, match="draft must be None with shard"):
        model.generate(tokens[:40], 1, shard=shard, draft=model)
    with pytest.raises(ValueError, match="shard must be a ShardedGraph over the tokens"):
        model.init_cache((), shard=ga.causal_graph(40))  # type: ignore[arg-type]
