"""A small model of Gaussian kernel attention that gallery.py trains on scikit-learn's digits."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

import graphattn as ga

HELD_OUT = 450  # of 1,797 images
EPOCHS, BATCH, RATE = 10, 32, 8e-3


class DigitReader(nn.Module):
    """One token per pixel, which knows its 3 x 3 neighbourhood, and a class token that answers."""

    def __init__(self, dim: int = 32, depth: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, dim, 3, padding=1)
        self.lead = nn.Parameter(0.02 * torch.randn(1, dim))  # the class token
        self.place = nn.Parameter(0.1 * torch.randn(65, dim))
        self.blocks = nn.ModuleList(
            ga.nn.PreNormBlock(ga.nn.GaussianKernelAttention(dim, heads)) for _ in range(depth)
        )
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 10)
        self.graph = ga.complete_graph(65)

    def forward(self, images: Tensor) -> Tensor:
        """[batch, 64] in 0 .. 1 to logits [batch, 10]."""
        pixels = self.stem(images.view(-1, 1, 8, 8)).flatten(2).transpose(1, 2)
        x = torch.cat([self.lead.expand(len(images), 1, -1), pixels], dim=1) + self.place
        for block in self.blocks:
            x = block(x, self.graph)
        return self.head(self.norm(x[:, 0]))


class Trained(NamedTuple):
    model: DigitReader
    images: Tensor  # that it has not seen, [HELD_OUT, 64]
    digits: Tensor  # what they show, [HELD_OUT]
    accuracy: float  # on them
    start: float  # bandwidth before training


@cache
def trained() -> Trained:
    """The model after half a minute of training; refused if it has not learned."""
    from sklearn.datasets import load_digits

    torch.manual_seed(0)
    data = load_digits()
    images, digits = torch.from_numpy(data.data).float() / 16, torch.from_numpy(data.target).long()
    order = torch.randperm(len(images))
    kept, seen = order[:HELD_OUT], order[HELD_OUT:]
    model = DigitReader()
    start = float(ga.diagnostics.bandwidths(model).values.mean())
    optimizer = torch.optim.AdamW(ga.train.parameter_groups(model, weight_decay=0.01), lr=RATE)
    per_epoch = len(seen) // BATCH
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=EPOCHS * per_epoch)
    for _ in range(EPOCHS):
        for batch in seen[torch.randperm(len(seen))].split(BATCH)[:per_epoch]:
            loss = functional.cross_entropy(model(images[batch]), digits[batch])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    with torch.no_grad():
        accuracy = float((model(images[kept]).argmax(1) == digits[kept]).double().mean())
    if accuracy < 0.9:
        raise RuntimeError(f"the model must have learned to be shown, but reads {accuracy:.1%}")
    return Trained(model, images[kept], digits[kept], accuracy, start)


def image_of(digit: int) -> Tensor:
    """The first held-out image of a digit, [64]."""
    found = trained()
    return found.images[found.digits == digit][0]


@cache
def recorded(digit: int) -> list[ga.diagnostics.AttentionRecord]:
    """The attention of every layer on that image, weights [E, heads]."""
    model, image = trained().model, image_of(digit)
    with torch.no_grad(), ga.diagnostics.record_attention(model) as layers:
        model(image[None])
    return [
        ga.diagnostics.AttentionRecord(r.name, r.weights[0], r.output[0], r.graph) for r in layers
    ]
