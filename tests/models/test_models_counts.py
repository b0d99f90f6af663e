"""Statements of docs/counts.md on the papers' numbers, checked by models where we have them."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import graphattn as ga

PAGE = Path(__file__).resolve().parents[2] / "docs" / "counts.md"


def operations(model: Any, *inputs: Any, **keywords: Any) -> int:
    return ga.diagnostics.flops(model, *inputs, **keywords)


# 001: vision transformers. The matrix products are counted in transformers' models.

VITS = {  # image, patch, width, heads, classes; standard and Krause as printed, share of N^2
    "CIFAR-10, ViT-B": (32, 4, 768, 12, 10, "5.61", "3.77", "1.4"),
    "ViT-S/16": (224, 16, 384, 6, 1000, "4.62", "3.22", "7.8"),
    "ViT-B/32": (224, 32, 768, 12, 1000, "4.42", "3.00", "1.0"),
}


def vit_parts(image: int, patch: int, dim: int, heads: int, classes: int) -> dict[str, int]:
    """Multiply-adds by part, and the elements of everything that is no product."""
    N = (image // patch) ** 2 + 1
    counts = dict.fromkeys(("projections", "between", "rest", "small", "projection biases"), 0)
    for _ in range(12):
        counts["small"] += 2 * N * dim + heads * N * N  # norm, softmax
        for out in [dim] * 4:
            counts["projections"] += N * dim * out
            counts["projection biases"] += N * out
        counts["between"] += heads * N * N * (dim // heads) * 2
        counts["small"] += 2 * N * dim + 4 * N * dim  # norm, GELU
        counts["rest"] += 2 * N * dim * 4 * dim
        counts["small"] += N * (4 * dim + dim)  # biases of the perceptron
    counts["rest"] += (N - 1) * 3 * patch**2 * dim + dim * classes
    counts["small"] += (N - 1) * dim + 2 * N * dim + classes
    counts["small"] += counts["projection biases"]
    return counts


@pytest.mark.every_case
@pytest.mark.parametrize("name", VITS)
def test_products_of_vision_transformers_are_those_of_transformers_models(name):
    transformers = pytest.importorskip("transformers")
    image, patch, dim, heads, classes, *_ = VITS[name]
    config = transformers.ViTConfig(
        hidden_size=dim,
        num_hidden_layers=12,
        num_attention_heads=heads,
        intermediate_size=4 * dim,
        image_size=image,
        patch_size=patch,
        num_labels=classes,
    )
    with torch.device("meta"):
        model = transformers.ViTForImageClassification(config)
        pixels = torch.zeros(1, 3, image, image)
    parts = vit_parts(image, patch, dim, heads, classes)
    products = parts["projections"] + parts["between"] + parts["rest"]
    assert operations(model.eval(), pixels) == 2 * products


@pytest.mark.every_case
@pytest.mark.parametrize("name", VITS)
def test_krause_s_thirty_percent_are_the_projections_and_cannot_be_the_attention(name):
    *shape, standard, krause, share = VITS[name]
    n = vit_parts(*shape)
    everything = n["projections"] + n["between"] + n["rest"] + n["small"]
    assert f"{everything / 1e9:.2f}" == standard
    without = everything - n["projections"] - n["projection biases"]
    assert f"{without / 1e9:.2f}" == krause
    products = n["projections"] + n["between"] + n["rest"]
    assert f"{100 * n['between'] / products:.1f}" == share
    # All of the work between tokens, gone: still more than is printed, and far from rounding.
    assert (everything - n["between"]) / 1e9 > float(krause) + 0.5
    saved = 1 - float(krause) / float(standard)
    assert saved > 3.8 * n["between"] / products


def swin(
    patch: int, depths: tuple[int, ...], window: int, padded: bool
) -> tuple[float, float, float]:
    """G of Swin on 32 x 32 pixels: all, without projections, without work between tokens."""
    side, dim = 32 // patch, 96
    total, projections, between = 3 * patch**2 * side**2 * dim, 0, 0
    for stage, depth in enumerate(depths):
        tokens = side * side
        per_side = -(-side // window) if padded else max(side / window, 1)
        in_window = window**2 if padded else min(window, side) ** 2
        seen = int(per_side**2 * in_window) if padded else tokens
        projections += depth * (4 * seen * dim**2 + 4 * seen * dim)
        between += depth * 2 * seen * in_window * dim
        total += depth * (8 * tokens * dim**2 + 13 * tokens * dim)
        if stage + 1 < len(depths):
            total += tokens // 4 * 8 * dim**2
            side, dim = side // 2, 2 * dim
    total += projections + between
    return total / 1e9, (total - projections) / 1e9, (total - between) / 1e9


def test_swin_s_pair_is_padding():
    small = (2, 2, 18, 2)
    padded, without, cheaper = swin(4, small, 4, True)
    assert f"{padded:.2f}" == "0.38"
    assert f"{without:.2f}" == "0.12"
    assert cheaper > 0.37
    assert f"{swin(4, small, 4, False)[0]:.2f}" == "0.18"
    for patch, depths, window, pad in itertools.product(
        (1, 2, 4), (small, (2, 2, 6, 2)), (2, 4, 7, 8), (True, False)
    ):
        standard, fewer, _ = swin(patch, depths, window, pad)
        assert (f"{standard:.2f}", f"{fewer:.2f}") != ("0.38", "0.18")
        if f"{standard:.2f}" == "0.38":
            assert (patch, depths, window, pad) == (4, small, 4, True)


# 003: Tables 1 and 9.


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize(("N", "w", "r", "xi"), [(40, 2, 4, 16), (33, 5, 1, 7)])
def test_table_1_with_constants(heads, N, w, r, xi):
    d = 32
    near = ga.window_path_graph(N, w).to("meta")
    assert near.num_edges == 2 * w * N - w * (w + 1)
    with torch.device("meta"):
        consensus = ga.nn.SelfConsensus(d, heads, rank=r, edge_hidden=xi)
        attention = ga.nn.DotProductAttention(d, heads)
        x = torch.zeros(N, d)
    between = 2 * near.num_edges * heads * (xi * (r * d // heads + 2) + 2 * r * d // heads)
    assert operations(consensus, x, near) == 4 * N * d * d + 4 * N * d * xi + between
    everything = ga.complete_graph(N).to("meta")
    assert operations(attention, x, everything) == 8 * N * d * d + 4 * N * N * d


TABLE_9 = {
    "edge_hidden": {4: 179, 16: 180, 64: 182, 256: 193},
    "rank": {1: 186, 4: 193, 8: 203, 16: 222},
    "window": {2: 193, 4: 193, 8: 193, 12: 193},
}


def text_model(**changes: Any) -> int:
    with torch.device("meta"):
        return ga.models.SequenceEncoder.from_preset(
            "consensus-text-193m", mixer="consensus", **changes
        ).num_parameters()


@pytest.mark.long
def test_table_9_is_one_size_and_our_differences():
    base = text_model()
    low, high = 0.0, 1e9
    for name, row in TABLE_9.items():
        for value, millions in row.items():
            difference = (text_model(**{name: value}) - base) / 1e6
            low, high = (
                max(low, millions - 0.5 - difference),
                min(high, millions + 0.5 - difference),
            )
    assert low < high
    assert (round(low, 2), round(high, 2)) == (193.08, 193.20)


@pytest.mark.long
def test_slopes_of_table_9():
    for xi in (4, 64, 255):
        slope = text_model(edge_hidden=xi + 1) - text_model(edge_hidden=xi)
        # Of both tokens to the hidden vector, of it to Lambda; a bias, alpha and beta per head.
        assert slope == 12 * (1536 + 3072 + 12 * (1 + 1 + 1))
        full = {"mixer_options": {"edge_input": "full"}}  # one network for all heads: one bias
        slope = text_model(edge_hidden=xi + 1, **full) - text_model(edge_hidden=xi, **full)
        assert slope == 12 * (1536 + 3072 + 1 + 12 * 2)
    for rank in (1, 15):
        assert text_model(rank=rank + 1) - text_model(rank=rank) == 12 * 768 * (256 + 1)
    assert len({text_model(window=window) for window in TABLE_9["window"]}) == 1


def test_three_networks_are_not_those_of_table_9():
    separate = {"mixer_options": {"trunk": "separate"}}
    difference = (text_model(**separate) - text_model(edge_hidden=4, **separate)) / 1e6
    assert difference > 23 > 193.5 - 178.5


def test_totals_of_table_10_contradict_its_shapes():
    widths, text, dna = (384, 768, 1024), (54, 193, 385), (51, 172, 331)
    # k tokens of difference, from rounded millions: no number is in all three intervals.
    least = [1e6 * (t - d - 1) / w for w, t, d in zip(widths, text, dna, strict=True)]
    most = [1e6 * (t - d + 1) / (w + 1) for w, t, d in zip(widths, text, dna, strict=True)]
    assert max(least) > min(most)
    assert most[0] < least[1] < most[1] < least[2]  # not even two of them agree
    blocks = 32 * 12 * 1024**2
    assert blocks / 1e6 > 385.5 > 331.5


def test_the_page_has_the_papers_numbers_as_they_are_printed():
    """The page docs/counts.md holds the papers' numbers that its own doctests do not compute."""
    page = re.sub(r"\s+", " ", PAGE.read_text(encoding="utf-8"))
    for *_, standard, krause, share in VITS.values():
        row = f"| {standard} G | {krause} G | {standard} G | {krause} G | {share} % |"
        assert row in page
    for number in ("0.38 G and 0.18 G", "3.0042e9", "2.4143e9", "896 M against 378 M", "5.28 M"):
        assert number in page
    for printed in ("54 M", "193 M", "385 M"):
        assert f"| {printed} |" in page
