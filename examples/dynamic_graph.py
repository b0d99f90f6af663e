"""A neighbour graph learned by the model itself: rebuilt from its own features every k layers.

The consensus paper leaves graphs that are learned to future work; this is the simplest kind.
Blocks run over the nearest neighbours of every token in feature space, found anew every few layers,
so that tokens far apart in the sequence see each other once their features are similar.

The task: every sequence mixes a few groups, whose tokens are scattered over it and share a random
direction. Each group also has a random label that one token in five shows. All others have to find
it out, from tokens of their group that may stand anywhere. Half of the features are noise which
makes the nearest tokens wrong ones now and then.

With the settings below (one seed, two cores) the window finds 26 % of the hidden labels, as many as
guessing; neighbours chosen once, from the embedding, find 78 %, and neighbours rebuilt every two
layers 76 %. So what helps here is to choose by features at all; to choose again gains nothing.

Gradients do not flow through the choice of neighbours, which is a set of indices. They flow through
what is done with the chosen ones: here the weights fall with the distance of learned queries and
keys, so that training pulls tokens together which help each other, and the next choice follows.

    python examples/dynamic_graph.py        # compares three graphs in less than a minute
"""

from __future__ import annotations

import time
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

import graphattn as ga

GROUPS, LABELS, FEATURES = 6, 4, 8
SHOWN = 0.2  # the share of tokens that show their group's label


class Sequences(NamedTuple):
    """A batch of the task."""

    tokens: Tensor  # [B, N, 2 * FEATURES + LABELS]: group direction, noise, label where shown
    label: Tensor  # [B, N]
    hidden: Tensor  # [B, N], True where the label is not shown


def draw_sequences(batch: int, num_tokens: int, generator: torch.Generator) -> Sequences:
    """New groups with new labels in every sequence."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    group = torch.randint(GROUPS, (batch, num_tokens), generator=generator)
    label_of = torch.randint(LABELS, (batch, GROUPS), generator=generator)
    label = label_of.gather(1, group)
    direction = normal(batch, GROUPS, FEATURES)
    own = direction.gather(1, group[..., None].expand(-1, -1, FEATURES))
    own = own + 0.3 * normal(batch, num_tokens, FEATURES)
    hidden = torch.rand(batch, num_tokens, generator=generator) > SHOWN
    shown = functional.one_hot(label, LABELS).float().masked_fill(hidden[..., None], 0)
    noise = normal(batch, num_tokens, FEATURES)
    return Sequences(torch.cat([own, noise, shown], dim=-1), label, hidden)


def neighbours(x: Tensor, k: int) -> ga.TokenGraph:
    """The k nearest tokens of every token in its own sequence, x: [B, N, dim].

    Every sequence has a graph of its own; side by side they are one graph of B * N tokens.
    """
    return ga.batch([ga.knn_graph(own, k, self_loops=True) for own in x])


class DynamicGraphEncoder(nn.Module):
    """Krause blocks over a neighbour graph, rebuilt before every `rebuild_every`-th of them.

    With ``rebuild_every=None`` all blocks run over the window of the k tokens around each token.
    """

    def __init__(self, dim: int, depth: int, k: int, rebuild_every: int | None) -> None:
        super().__init__()
        self.k, self.rebuild_every = k, rebuild_every
        self.embedding = nn.Linear(2 * FEATURES + LABELS, dim)
        self.blocks = nn.ModuleList(
            ga.nn.PreNormBlock(ga.nn.KrauseAttention(dim, heads=4), mlp_ratio=2)
            for _ in range(depth)
        )
        self.head = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, LABELS))

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, N, features] -> logits [B, N, LABELS]."""
        B, N, _ = tokens.shape
        x = self.embedding(tokens).flatten(0, 1)  # [B * N, dim]: sequences side by side
        graph = ga.batch([ga.window_path_graph(N, self.k // 2, self_loops=True)] * B)
        for i, block in enumerate(self.blocks):
            if self.rebuild_every is not None and i % self.rebuild_every == 0:
                graph = neighbours(block.mixer_norm(x).detach().view(B, N, -1), self.k)
            x = block(x, graph)
        return self.head(x).view(B, N, LABELS)


def train(model: nn.Module, steps: int, batch: int, num_tokens: int, seed: int) -> None:
    """Cross-entropy at the tokens that do not show their label."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(ga.train.parameter_groups(model, weight_decay=0.01), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=max(steps, 2))
    for _ in range(steps):
        tokens, label, hidden = draw_sequences(batch, num_tokens, generator)
        loss = functional.cross_entropy(model(tokens)[hidden], label[hidden])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()


@torch.no_grad()
def accuracy(model: nn.Module, num_tokens: int, sequences: int) -> float:
    """The share of hidden labels found, on sequences that training has not seen."""
    tokens, label, hidden = draw_sequences(
        sequences, num_tokens, torch.Generator().manual_seed(2**31)
    )
    return float((model(tokens).argmax(-1) == label)[hidden].float().mean())


def compare(
    *,
    steps: int = 150,
    batch: int = 8,
    num_tokens: int = 96,
    dim: int = 64,
    depth: int = 4,
    k: int = 8,
    sequences: int = 64,
    seed: int = 0,
) -> dict[str, float]:
    """Accuracies of the same encoder, from the same start, over three kinds of graph."""
    graphs = {
        f"window of {k // 2} on each side": None,
        "neighbours, chosen once": depth,
        "neighbours, rebuilt every 2 layers": 2,
    }
    print(f"{num_tokens} tokens, {GROUPS} groups, {LABELS} labels: guessing finds {1 / LABELS:.0%}")
    found = {}
    for name, rebuild_every in graphs.items():
        torch.manual_seed(seed)
        model = DynamicGraphEncoder(dim, depth, k, rebuild_every)
        start = time.perf_counter()
        train(model, steps, batch, num_tokens, seed)
        seconds = time.perf_counter() - start
        found[name] = accuracy(model, num_tokens, sequences)
        print(f"{name:36} {found[name]:.1%} of hidden labels found, trained in {seconds:.0f} s")
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)  # the tensors are small: a second thread gains little and can block
    compare()
