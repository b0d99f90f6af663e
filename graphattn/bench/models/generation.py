"""Generation of text token by token: graphattn's language models, and a model in plain PyTorch.

The plain model has the same weights as graphattn's model. The parts are pre-norm blocks, one
projection to queries, keys and values, rotary positions and SDPA. The tensors of its cache have the
length of the finished text, as in hand-written PyTorch code. Two more models of the same width and
depth are timed for comparison. One has Gaussian kernel attention. The other has windows, so its
cache stops growing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import graphattn as ga
from graphattn.bench.contenders.peers import compile_once

VOCABULARY = 1000
DOT, PLAIN, GKA, WINDOWED = "dot", "plain", "gka", "windowed"


def fused_projection(mixer: Any) -> nn.Linear:
    """Join the projections of a layer to queries, keys and values."""
    parts = (mixer.query_proj, mixer.key_proj, mixer.value_proj)
    projection = nn.Linear(mixer.dim, 3 * mixer.dim).to(mixer.query_proj.weight)
    with torch.no_grad():
        projection.weight.copy_(torch.cat([part.weight for part in parts]))
        projection.bias.copy_(torch.cat([part.bias for part in parts]))
    return projection


def rotations(length: int, dim: int, base: float, like: Tensor) -> tuple[Tensor, Tensor]:
    """Compute cos and sin of the rotary angles at all positions, [length, dim / 2]."""
    k = torch.arange(dim // 2, device=like.device, dtype=torch.float64)
    positions = torch.arange(length, device=like.device, dtype=torch.float64)
    angles = positions[:, None] * base ** (-2 * k / dim)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs of features of every token, [..., N, dim]."""
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class PlainLanguageModel(nn.Module):
    """A model in plain PyTorch, equal to a :class:`~graphattn.models.CausalLM` of dot products.

    Args:
        model: model whose weights are used, with rotary positions. It may have one window for all
            blocks; a step then reads only that part of the cache.
        compiled: whether the block of a step is compiled, once for each place of a text.

    Example:
        >>> import torch, graphattn as ga
        >>> from graphattn.bench.models.generation import PlainLanguageModel
        >>> _ = torch.manual_seed(0)
        >>> ours = ga.models.CausalLM(50, dim=16, depth=2, heads=2).double()
        >>> prompt = torch.tensor([[3, 1, 4]])
        >>> torch.equal(PlainLanguageModel(ours).generate(prompt, 20), ours.generate(prompt, 20))
        True
    """

    def __init__(self, model: ga.models.CausalLM, *, compiled: bool = False) -> None:
        super().__init__()
        first: Any = model.blocks[0]
        self.window = model.windows[0]
        self.run_block = compile_once(self._block) if compiled else self._block
        self.heads, self.head_dim = first.mixer.heads, first.mixer.head_dim
        self.base = first.mixer.rotary.base
        self.embedding, self.norm, self.head = model.embedding, model.norm, model.head
        self.blocks = nn.ModuleList()
        for block in model.blocks:
            shared: Any = copy.copy(block)
            self.blocks.append(
                nn.ModuleDict(
                    {
                        "mixer_norm": shared.mixer_norm,
                        "qkv": fused_projection(shared.mixer),
                        "output": shared.mixer.output_proj,
                        "mlp_norm": shared.mlp_norm,
                        "mlp": shared.mlp,
                    }
                )
            )

    @torch.no_grad()
    def generate(self, tokens: Tensor, count: int) -> Tensor:
        """Extend prompts [B, N] by the likeliest tokens, [B, N + count]."""
        N = tokens.shape[1]
        text = torch.cat([tokens, tokens.new_zeros(len(tokens), count)], 1)
        read, _ = self.reader(text)
        here = slice(0, N)
        for t in range(N, N + count):
            text[:, t] = read(here).argmax(-1)
            here = slice(t, t + 1)
        return text

    def reader(self, text: Tensor) -> tuple[Callable[[slice], Tensor], float]:
        """Return a function that reads some of the tokens [B, N], and the bytes of its cache.

        It returns the logits after the last one that it has read, [B, V]. The first call reads any
        number of tokens from the first on, and later calls one each.
        """
        B, N = text.shape
        like = self.embedding.weight
        shape = (len(self.blocks), 2, B, self.heads, N, self.head_dim)
        cache = torch.empty(shape, dtype=like.dtype, device=like.device)
        cos, sin = rotations(N, self.head_dim, self.base, like)

        def read(here: slice) -> Tensor:
            x = self.embedding(text[:, here])
            for block, (keys, values) in zip(self.blocks, cache, strict=True):
                run = self._block if here.start == 0 else self.run_block
                x = run(block, x, keys, values, here.start, here.stop, cos[here], sin[here])
            logits: Tensor = self.head(self.norm(x[:, -1]))
            return logits

        return read, float(cache.nbytes)

    def _block(
        self,
        parts: Any,
        x: Tensor,
        keys: Tensor,
        values: Tensor,
        start: int,
        stop: int,
        *angles: Tensor,
    ) -> Tensor:
        """Run a block on the tokens [B, n, dim] at some places, and extend its cache."""
        here, first, mask = slice(start, stop), 0, None
        qkv = parts["qkv"](parts["mixer_norm"](x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        q, keys[:, :, here], values[:, :, here] = rotated(q, *angles), rotated(k, *angles), v
        if self.window is not None and start > 0:
            first = max(0, stop - self.window)
        elif self.window is not None:
            mask = ga.causal_window_graph(stop, self.window).to_mask().to(x.device)
        seen = slice(first, stop)
        mixed = functional.scaled_dot_product_attention(
            q, keys[:, :, seen], values[:, :, seen], mask,
            is_causal=start == 0 and mask is None,
        )  # fmt: skip
        x = x + parts["output"](mixed.transpose(1, 2).flatten(2))
        out: Tensor = x + parts["mlp"](parts["mlp_norm"](x))
        return out


@dataclass(frozen=True)
class GenerationInputs:
    """Prompts [texts, N], the number of new tokens, and models ("plain" and "dot" are equal)."""

    prompts: Tensor
    new_tokens: int
    models: dict[str, Any]


def generation_inputs(
    size: dict[str, int], device: torch.device, dtype: torch.dtype
) -> GenerationInputs:
    def model(mixer: Any, window: int | None = None) -> ga.models.CausalLM:
        with torch.random.fork_rng(devices=[]), device:
            torch.manual_seed(0)
            made = ga.models.CausalLM(
                VOCABULARY, size["dim"], size["depth"], size["heads"], mixer=mixer, window=window
            )
            nn.init.normal_(made.embedding.weight)  # a text would otherwise repeat one token
        return made.to(dtype).eval()

    dot = model("dot")
    models = {
        DOT: dot,
        PLAIN: PlainLanguageModel(dot),
        GKA: model("gka"),
        WINDOWED: model("dot", size["window"]),
    }
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(VOCABULARY, (size["texts"], size["prompt"]), generator=generator)
    return GenerationInputs(prompts.to(device), size["new_tokens"], models)


@dataclass(frozen=True)
class GenerationRun:
    """A contender that is one of the models; it returns the prompts with the new tokens."""

    name: str

    def __call__(self, x: GenerationInputs) -> Tensor:
        text: Tensor = x.models[self.name].generate(x.prompts, x.new_tokens)
        return text


class GenerationTruth:
    """The check that every new token is the likeliest one after its prefix, in float64.

    The error is the difference between the highest logit and that of the new token, divided by the
    standard deviation of the logits. If two logits differ only by rounding, both tokens are right.
    """

    def __init__(self, inputs: GenerationInputs) -> None:
        self.inputs = inputs

    def errors_of(self, run: Any) -> tuple[float, float]:
        x = self.inputs
        N, name = x.prompts.shape[1], DOT if run.name == PLAIN else run.name
        text = run(x)
        if text.shape[1] != N + x.new_tokens or not torch.equal(text[:, :N], x.prompts):
            return float("nan"), 0.0
        model = copy.deepcopy(x.models[name]).double()
        with torch.no_grad():
            logits = model.logits(model.encode(text)[:, N - 1 : -1])
        written = logits.gather(-1, text[:, N:, None]).squeeze(-1)
        return float(((logits.amax(-1) - written) / logits.std(-1)).max()), 0.0
