"""A neighbour graph learned by the model: it is rebuilt from the model's features every k layers.

The consensus paper names learned graphs as future work. This example shows the simplest kind. The
sources of a token are its nearest neighbours in feature space, and the graph is rebuilt every few
layers. Tokens that are far apart in the sequence see each other as soon as their features are
similar.

The task uses sequences that mix a few groups. The tokens of a group share a random direction and
stand anywhere in the sequence. Each group has a random label, which one token in five shows. The
model has to predict the label for the other tokens, so it must find tokens of the same group.
Apart from the label, half of the features are noise, so some of the nearest tokens belong to other
groups.

These are the results with the settings below (one seed, two cores). The window finds 26 % of the
hidden labels, about as many as guessing. Neighbours chosen once, from the embedding, find 78 %.
Neighbours rebuilt every two layers find 76 %. In this task it helps to choose sources by features,
but it does not help to choose them again.

No gradient flows through the choice of neighbours, because the choice is a set of indices.
Gradients flow through the attention over the chosen neighbours. The weights decrease with the
distance between learned queries and keys. Training thus moves useful tokens closer to each other,
and the next choice of neighbours follows.

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
    """A batch of sequences of the task."""

    tokens: Tensor  # [B, N, 2 * FEATURES + LABELS]: group direction, noise, label where shown
    label: Tensor  # [B, N]
    hidden: Tensor  # [B, N], True where the label is not shown


def draw_sequences(batch: int, num_tokens: int, generator: torch.Generator) -> Sequences:
    """Draw sequences; every sequence has new groups with new labels."""

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
    """Build the graph of the k nearest tokens of every token in its sequence, x: [B, N, dim].

    Every sequence has its own graph. The batch of these graphs is one graph of B * N tokens.
    """
    return ga.batch([ga.knn_graph(own, k, self_loops=True) for own in x])


class DynamicGraphEncoder(nn.Module):
    """Krause blocks over a neighbour graph that is rebuilt every `rebuild_every` blocks.

    With ``rebuild_every=None``, all blocks use a window of k // 2 tokens on each side.
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
        """Predict the labels of all tokens, [B, N, features] -> logits [B, N, LABELS]."""
        B, N, _ = tokens.shape
        x = self.embedding(tokens).flatten(0, 1)  # [B * N, dim]: one sequence after another
        graph = ga.batch([ga.window_path_graph(N, self.k // 2, self_loops=True)] * B)
        for i, block in enumerate(self.blocks):
            if self.rebuild_every is not None and i % self.rebuild_every == 0:
                graph = neighbours(block.mixer_norm(x).detach().view(B, N, -1), self.k)
            x = block(x, graph)
        return self.head(x).view(B, N, LABELS)


def train(model: nn.Module, steps: int, batch: int, num_tokens: int, seed: int) -> None:
    """Train by the cross-entropy at the tokens that do not show their label."""
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
    """Compute the share of hidden labels found, on sequences that training has not used."""
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
    """Train the same encoder, with the same initial weights, on three graphs; return accuracies."""
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
    torch.set_num_threads(1)  # a second thread gains little for small tensors, and can block
    compare()
