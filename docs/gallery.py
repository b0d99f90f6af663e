"""The figures of gallery.md, one function each; numbers in them are computed as they are drawn.

python docs/gallery.py            all of them, into docs/_figures (Sphinx does this by itself)
python docs/gallery.py NAME ...   some

Needs the extra `docs` (matplotlib, scikit-learn), and `train` for gallery_training. The data are
what scikit-learn ships, and of gallery_pretrained a recorded run of examples/pretrained_models.py.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from contextlib import redirect_stderr
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

import graphattn as ga
from graphattn.plot.drawing.style import COLOURS, INK, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HERE = Path(__file__).resolve().parent


def canvas(
    width: float,
    height: float,
    rows: int = 1,
    columns: int = 1,
    *,
    maps: bool = False,
    **options: Any,
) -> Any:
    """A figure of so many inches and its axes, as an array; no pyplot, so no window can open."""
    from matplotlib.figure import Figure

    layout = "compressed" if maps else "constrained"  # maps are square: no gaps between them
    figure = Figure(figsize=(width, height), layout=layout)
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def panel(height: float = 3.0) -> tuple[Figure, Axes]:
    """One panel of several: two of them fit beside each other on a screen, one on a phone."""
    figure, ((ax,),) = canvas(3.75, height)
    return figure, ax


def name(ax: Axes, title: str, size: float = 9) -> None:
    ax.set_title(title, fontsize=size, color=INK)


# Consensus: the filter and the rate of mixing.


def gallery_low_pass() -> list[Figure]:
    """What a step keeps of every mode, and what that does to a noisy signal."""
    graph = ga.window_path_graph(64, window=2)
    eta = ga.spectral.max_step_size(graph)
    shown = (1, 4, 16, 64)
    (curves, left), (signals, right) = panel(), panel()
    ga.plot.filter_response(graph, eta, steps=shown, ax=left)
    name(left, "The filter: a window path, N = 64, w = 2")
    noise = torch.randn(64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    signal = (torch.arange(64) >= 32) + 0.25 * noise
    right.plot(signal, color="#bbbbbb", linewidth=1.2, label="start")
    for n in range(1, max(shown) + 1):
        signal = signal - eta * ga.spectral.energy_gradient(graph, signal)
        if n in shown:
            colour = COLOURS[shown.index(n)]
            label = "1 step" if n == 1 else f"{n} steps"
            right.plot(signal, color=colour, linewidth=1.6, label=label)
    right.axhline(float(signal.mean()), color=INK, linewidth=0.8, linestyle=(0, (4, 3)))
    right.annotate("the mean", (63, float(signal.mean())), (0, 3), textcoords="offset points",
                   ha="right", fontsize=8, color=INK)  # fmt: skip
    right.set(xlabel="token", ylabel="signal (no unit)")
    right.legend(frameon=False, fontsize=8, loc="upper left")
    styled(right)
    name(right, "A noisy step, filtered")
    return [curves, signals]


def gallery_fiedler() -> list[Figure]:
    """The Fiedler value of window paths between its two bounds, and where between them."""
    figures, (by_window, by_length, between) = zip(*(panel() for _ in range(3)), strict=True)
    ga.plot.path_fiedler_values(1024, [1, 2, 4, 8, 16, 32, 64, 128, 256], ax=by_window)
    name(by_window, "Wider windows mix faster: w³")
    ga.plot.path_fiedler_values([16, 32, 64, 128, 256, 512, 1024, 2048, 4096], 2, ax=by_length)
    by_length.set_xticks([16, 64, 256, 1024, 4096])
    name(by_length, "Longer sequences slower: 1 / N²")
    for i, N in enumerate((32, 128, 512)):
        windows = sorted({max(1, round(N / 2 * share / 24)) for share in range(1, 25)})
        windows = [w for w in windows if w < N / 2]
        ratio = [
            ga.spectral.fiedler_value(ga.window_path_graph(N, w))
            / (ga.spectral.path_fiedler_bounds(N, w)[0] / 2)
            for w in windows
        ]
        between.plot([w / N for w in windows], ratio, "o-", color=COLOURS[i], markersize=3,
                     linewidth=1.2, label=f"N = {N}")  # fmt: skip
    for bound in (2, 4):
        between.axhline(bound, color=INK, linewidth=1)
        between.annotate(f"bound: {bound} S", (0.01, bound), (0, 3), textcoords="offset points",
                         fontsize=8, color=INK)  # fmt: skip
    between.set(xlabel="window / length, w / N", ylabel="λ₁ / S", ylim=(1.85, 4.3))
    between.legend(frameon=False, fontsize=8, loc="center left")
    styled(between)
    name(between, "The upper bound is the near one")
    return list(figures)


# Attention without weights.


class Picture(NamedTuple):
    pixels: Tensor  # [side, side, 3], 0 .. 1
    tokens: Tensor  # [side * side, 3], standardised


@cache
def flower(side: int = 64) -> Picture:
    """The middle of scikit-learn's flower, averaged over blocks of pixels."""
    from sklearn.datasets import load_sample_image

    image = torch.from_numpy(load_sample_image("flower.jpg").copy()).double() / 255
    height, width, _ = image.shape
    edge = (width - height) // 2
    square = image[:, edge : edge + height].permute(2, 0, 1)[None]
    pixels = functional.interpolate(square, size=(side, side), mode="area")[0].permute(1, 2, 0)
    return Picture(pixels, ga.dynamics.standardize(pixels.reshape(-1, 3)))


PATTERNS: dict[str, Callable[[int], ga.TokenGraph]] = {
    "global": ga.complete_graph,
    "blocks of 512": lambda N: ga.block_window_graph(N, 512),
    "blocks of 128": lambda N: ga.block_window_graph(N, 128),
    "Longformer 512": lambda N: ga.longformer_graph(N, 256, [N // 2]),
}


@cache
def simulated(pattern: str) -> ga.dynamics.Trajectory:
    """20 steps of weightless attention among the pixels of the flower."""
    x = flower().tokens
    return ga.dynamics.simulate(x, PATTERNS[pattern](len(x)), steps=20)


def gallery_clusters() -> Figure:
    """Pixels of an image by cluster, under four patterns, beside KMeans without attention."""
    picture, side = flower(), len(flower().pixels)
    plain = ga.dynamics.cluster(picture.tokens, method="kmeans", num_clusters=2)
    figure, axes = canvas(4.8, 7.4, 3, 2)
    axes[0, 0].imshow(picture.pixels.numpy(), interpolation="nearest")
    name(axes[0, 0], f"input, {side} x {side} pixels\n= {side * side:,} tokens", 8)
    ga.plot.cluster_image(plain, side, side, ax=axes[0, 1])
    name(axes[0, 1], f"no attention: KMeans, k = 2\nsilhouette {score(picture.tokens, plain)}", 8)
    for ax, pattern in zip(axes.flat[2:], PATTERNS, strict=True):
        update = simulated(pattern).updates[-1]
        labels = ga.dynamics.cluster(update, method="kmeans", num_clusters=2)
        merged = int(ga.dynamics.cluster(update).max()) + 1
        ga.plot.cluster_image(labels, side, side, ax=ax)
        same = 100 * agreement(labels, plain)
        name(ax, f"{pattern}\nsilhouette {score(update, labels)}\n"
                 f"{merged} merged; {same:.0f} % as KMeans", 8)  # fmt: skip
    for ax in axes.flat:
        on_image(ax, "pixels")
    return figure


def score(points: Tensor, labels: Tensor) -> str:
    return f"{ga.dynamics.silhouette(points, labels):.2f}"


def agreement(labels: Tensor, others: Tensor) -> float:
    """Share of tokens with the same of two clusters, whichever way round they are named."""
    same = float((labels == others).double().mean())
    return max(same, 1 - same)


def on_image(ax: Axes, unit: str) -> None:
    """A thin frame, axes that say what they count."""
    ax.set_axis_on()
    ax.set(xlabel=f"column ({unit})", ylabel=f"row ({unit})")
    styled(ax, frame=True)


def gallery_cluster_counts() -> Figure:
    """How many merged clusters are left, step by step, under the four patterns."""
    figure, ((ax,),) = canvas(4.8, 3.2)
    ga.plot.cluster_counts({pattern: simulated(pattern) for pattern in PATTERNS}, ax=ax)
    ax.lines[-1].set_linestyle((0, (3, 2)))  # Longformer's covers that of global attention
    ax.legend(frameon=False, fontsize=8)
    ax.set_ylabel("merged clusters (of 4,096 tokens)")
    name(ax, "Small blocks leave more clusters")
    return figure


def gallery_scalings() -> list[Figure]:
    """Eigenvalues of the covariance under the three scalings of Attention Clusters, Figure 9."""
    from sklearn.datasets import load_breast_cancer

    # Radius, texture, perimeter.
    table = torch.from_numpy(load_breast_cancer().data[:, :3]).double()
    figures = []
    for title, x in (("breast cancer, 569 x 3", table), ("flower, 4,096 x 3", flower().tokens)):
        graph = ga.longformer_graph(len(x), 64, [0])
        runs = {
            scaling: ga.dynamics.simulate(
                ga.dynamics.standardize(x), graph, steps=20, scaling=scaling
            )
            for scaling in ("sdp", "sq", "sq_inplace")
        }
        apart = (runs["sdp"].states - runs["sq"].states).abs().max() / runs["sdp"].max_abs[-1]
        notes = {"sdp": "", "sq": f" (= sdp to {float(apart):.0e})", "sq_inplace": ""}
        figure, axes = canvas(3.75, 6.8, 3, 1)
        figure.suptitle(title, fontsize=10, color=INK)
        for ax, (scaling, run) in zip(axes.flat, runs.items(), strict=True):
            ga.plot.covariance_spectra(run, ax=ax)
            gap = run.spectra[:, 0] / run.spectra[:, 1]
            name(
                ax,
                f"{scaling}{notes[scaling]}\n"
                f"λ1 / λ2: {gap[1]:.1f} → {gap[-1]:,.1f}, largest |x| {run.max_abs[-1]:.1f}",
            )
            ax.set(yscale="log", ylim=(1e-6, 2))  # the gap is a distance
        figures.append(figure)
    return figures


def gallery_flows() -> list[Figure]:
    """Particles that trust those near them, and particles that listen to all."""
    generator = torch.Generator().manual_seed(4)
    x = 2 * torch.rand(80, 2, generator=generator, dtype=torch.float64) - 1
    steps = 400
    flows = {
        "softmax attention, all pairs": ga.dynamics.consensus_flow(
            x, ga.complete_graph(len(x)), steps=steps
        ),
        "Krause: trust within 0.4": ga.dynamics.krause_flow(x, radius=0.4, steps=steps),
        "Krause: the 8 nearest, σ = 0.5": ga.dynamics.krause_flow(
            x, sigma=0.5, top_k=8, steps=steps
        ),
    }
    figures, axes = zip(*(panel() for _ in range(4)), strict=True)
    for ax, (title, flow) in zip(axes, flows.items(), strict=False):
        paths(ax, flow)
        clusters = flow.num_clusters()
        name(ax, f"{title}\nends in {clusters} cluster{'s' * (clusters > 1)}")
    for i, flow in enumerate(flows.values()):
        label = ("softmax", "Krause, within 0.4", "Krause, 8 nearest")[i]
        style = ("-", "-", (0, (3, 2)))[i]  # the last two nearly coincide
        axes[3].plot(flow.spread.clamp(min=1e-12)[:61], color=COLOURS[i], linestyle=style,
                        linewidth=1.6, label=label)  # fmt: skip
    axes[3].set(xlabel="step", ylabel="spread (units of the features)", yscale="log",
                   ylim=(1e-6, 3))  # fmt: skip
    axes[3].legend(frameon=False, fontsize=8, loc="center right")
    styled(axes[3])
    name(axes[3], "Collapse, or not")
    return list(figures)


def paths(ax: Axes, flow: ga.dynamics.ParticleFlow) -> None:
    """The way of every particle, from a small grey dot to a large one."""
    labels = ga.dynamics.cluster(flow.states[-1], tolerance=0.01, spread=float(flow.spread[0]))
    for particle, cluster in enumerate(labels.tolist()):
        way = flow.states[:, particle]
        colour = COLOURS[cluster] if cluster < len(COLOURS) else "#888888"
        ax.plot(way[:, 0], way[:, 1], color=colour, linewidth=0.7, alpha=0.7)
        ax.plot(*way[0], ".", color="#999999", markersize=2.5)
        ax.plot(*way[-1], "o", color=colour, markersize=5, zorder=3)
    ax.set(xlabel="feature 0 (no unit)", ylabel="feature 1 (no unit)", aspect="equal")
    styled(ax)


# Gaussian kernel attention, trained: digits.py, beside this file, is imported where it is needed.


def draw_digit(ax: Axes, digit: int) -> None:
    from digits import image_of

    ax.imshow(image_of(digit).view(8, 8).numpy(), cmap="gray_r", vmin=0, vmax=1)
    on_image(ax, "pixels")


def gallery_bandwidths() -> list[Figure]:
    """What a model that reads digits has learned: one bandwidth per head and layer."""
    from digits import trained

    found = trained()
    sigma = ga.diagnostics.bandwidths(found.model).values
    (shades, left), (lines, right) = panel(), panel()
    ga.plot.bandwidth_map(sigma, ax=left)
    name(left, f"Reads {100 * found.accuracy:.1f} % of 450 held-out digits")
    ga.plot.bandwidth_lines(sigma, ax=right)
    start = {"color": INK, "linewidth": 0.8, "linestyle": (0, (4, 3)), "label": "at the start"}
    right.axhline(found.start, **start)
    below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.18), "ncols": 3}  # free of lines
    right.legend(frameon=False, fontsize=8, **below)
    name(right, "The same, head by head")
    return [shades, lines]


def gallery_class_token() -> list[Figure]:
    """Where the class token looks, head by head, in the last layer; and the rollout of all."""
    from digits import recorded

    figures = []
    for digit in (0, 3, 7):
        layers = recorded(digit)
        last = layers[-1]
        figure, axes = canvas(3.75, 2.75, 2, 3, maps=True)
        draw_digit(axes[0, 0], digit)
        rolled = ga.diagnostics.rollout([r.weights for r in layers], last.graph).flatten()
        maps = [*last.weights.T, rolled]
        darkest = max(float(weights[1:65].max()) for weights in maps)  # of the class token's edges
        for ax, weights in zip(axes.flat[1:], maps, strict=True):
            ga.plot.class_token_attention(weights, last.graph, grid=(8, 8), vmax=darkest, ax=ax)
        tidy_maps(axes, ["held-out digit", *(f"head {h}" for h in range(4)), "rollout"])
        figures.append(figure)
    return figures


def tidy_maps(axes: Any, titles: list[str]) -> None:
    """A title on each of a grid of maps, labels on the edge of the grid, and one colour bar."""
    for ax, title in zip(axes.flat, titles, strict=True):
        name(ax, title, 8)
        ax.set_xlabel("column (pixels)" if ax in axes[-1] else "", fontsize=8)
        ax.set_ylabel("row (pixels)" if ax in axes[:, 0] else "", fontsize=8)
        ax.set_xticks([0, 3, 7])
        ax.set_yticks([0, 3, 7])
        bar = ax.images[0].colorbar
        if bar is not None and ax is not axes[-1, -1]:
            bar.remove()  # all have the shades of the last


def gallery_patches() -> list[Figure]:
    """Where five pixels look: the mean over heads, first and last layer."""
    from digits import recorded

    layers = recorded(3)
    queries = ((2, 2), (4, 4), (6, 6), (2, 6), (6, 2))  # the diagonal, then two other corners
    figures = []
    for title, layer in (("first layer", layers[0]), ("last layer", layers[-1])):
        figure, axes = canvas(3.75, 2.95, 2, 3, maps=True)
        figure.suptitle(title, fontsize=9, color=INK)
        draw_digit(axes[0, 0], 3)
        weights = layer.weights.mean(dim=-1)
        rows = [1 + 8 * down + across for down, across in queries]
        darkest = float(weights.view(65, 65)[rows, 1:].max())
        for ax, query in zip(axes.flat[1:], queries, strict=True):
            ga.plot.patch_attention(weights, layer.graph, query, grid=(8, 8), vmax=darkest, ax=ax)
        tidy_maps(axes, ["held-out digit", *(f"from {query}" for query in queries)])
        figures.append(figure)
    return figures


def gallery_off_diagonal() -> list[Figure]:
    """One head per layer: all weights, and those that tokens give to others."""
    from digits import recorded, trained

    figures = []
    for depth, layer in enumerate(recorded(3)):
        sigma = ga.diagnostics.bandwidths(trained().model).values[depth]
        head = int(sigma.argmin())
        weights = layer.weights[:, head]
        own = weights[layer.graph.edge_index[0] == layer.graph.edge_index[1]].mean()
        figure, ((every, others),) = canvas(3.75, 1.9, 1, 2, maps=True)
        ga.plot.attention_weights(weights, layer.graph, ax=every)
        ga.plot.off_diagonal_attention(weights, layer.graph, most_tokens=65, ax=others)
        name(every, f"layer {depth}, head {head}, σ = {sigma[head]:.2f}\n"
                    f"to itself: {100 * float(own):.0f} %", 8)  # fmt: skip
        name(others, "without the diagonal", 8)
        others.set_ylabel("")
        every.images[0].colorbar.set_label("")
        figures.append(figure)
    return figures


def gallery_layers() -> Figure:
    """How attention changes with depth: the matrix, the class token's map, and where it looks."""
    from digits import recorded
    from matplotlib.colors import to_rgb

    layers = recorded(3)
    figure, axes = canvas(4.8, 1.65 * len(layers), len(layers), 3, maps=True)
    for depth, (layer, row) in enumerate(zip(layers, axes, strict=True)):
        mean = layer.weights.mean(dim=-1)
        ga.plot.attention_weights(mean, layer.graph, colorbar=False, ax=row[0])
        ga.plot.class_token_attention(mean, layer.graph, grid=(8, 8), ax=row[1])
        row[1].images[0].colorbar.remove()  # the titles say what the darkest shade is
        draw_digit(row[2], 3)
        share = mean.view(65, 65)[0, 1:].view(8, 8)
        cover = torch.tensor(to_rgb(COLOURS[1])).expand(8, 8, 3)
        cover = torch.cat([cover, (0.9 * share / share.max())[..., None]], dim=-1)
        row[2].imshow(cover.numpy(), interpolation="bilinear")
        name(row[0], f"layer {depth}, up to {float(mean.max()):.2f}", 8)
        name(row[1], f"class token, up to {float(share.max()):.2f}", 8)
        name(row[2], "over the digit", 8)
        for ax in row[1:]:
            on_image(ax, "pixels")
            ax.set(xticks=[0, 3, 7], yticks=[0, 3, 7])
        for ax in row:
            ax.xaxis.label.set_visible(ax in axes[-1])
    return figure


# Whole models.


def gallery_model_graphs() -> list[Figure]:
    """Which layer sees what: a language model, a vision model and Swin, one row each."""
    from matplotlib.figure import Figure

    consensus = {"edge_hidden": 16}
    models: dict[str, tuple[Any, tuple[int, ...]]] = {
        "CausalLM, 12 layers, mixer 'gka-consensus',\nwindows SSSL (16 and 64), 64 tokens": (
            ga.models.CausalLM(
                256, 32, 12, 4, mixer="gka-consensus", window=(16, 64), window_pattern="SSSL",
                mixer_options=consensus,
            ),
            (64,),
        ),
        "VisionTransformer, 8 layers: Krause on windows,\ndot products, VLT; 6 × 6 patches, "
        "a class token": (
            ga.models.VisionTransformer(
                24, 4, 10, 32, 8, 4, radius=1,
                mixer=["krause"] * 4 + ["dot"] * 2 + ["vlt"] * 2, mixer_options={"top_k": 4},
            ),
            (),
        ),
        "SwinTransformer, 2 + 2 layers: windows of 4 × 4\non 8 × 8 patches, then all of 4 × 4": (
            ga.models.SwinTransformer(32, 4, 10, 24, (2, 2), (2, 4), window_size=4),
            (),
        ),
    }  # fmt: skip
    figures = []
    for title, (model, sizes) in models.items():
        figure = Figure(layout="constrained")
        axes = ga.plot.model_graphs(model, *sizes, columns=2, figure=figure)
        figure.set_size_inches(4.8, 0.5 + 2.6 * math.ceil(len(axes) / 2))
        figure.suptitle(title, fontsize=9, color=INK)
        figures.append(figure)
    return figures


def gallery_structure() -> list[Figure]:
    """Attention by distance on a coiled coil of three chains: all of it, and that of a residue."""
    x, chain = coiled_coil(chains=3, residues=29)
    graph = ga.knn_graph(x, k=24)
    weights = ga.attention_weights(x[:, None], x[:, None], graph, sigma=4.0)[:, 0]
    names = [f"chain {letter}" for letter in "ABC"]
    core = 29 + 14  # position a of a heptad, in the middle of chain B
    (pairs, ((above,),)), (one, ((below,),)) = (canvas(4.8, 2.7, maps=True) for _ in range(2))
    ga.plot.structure_attention(
        x, graph, weights, chain_index=chain, strongest=80, min_separation=5, ax=above
    )
    name(above, "The 80 strongest pairs of residues five or more apart:\n"
                "the core holds the chains together")  # fmt: skip
    labels = [f"{'ABC'[int(c)]}{k % 29 + 1}" for k, c in enumerate(chain)]
    ga.plot.structure_attention(
        x, graph, weights, chain_index=chain, chain_names=names, targets=[core],
        min_separation=1, labels=labels, ax=below,
    )  # fmt: skip
    name(below, f"What residue {labels[core]} of the core looks at")
    return [pairs, one]


def coiled_coil(chains: int, residues: int) -> tuple[Tensor, Tensor]:
    """C-alpha atoms of parallel helices around each other, by Crick's equations (1953).

    In the form of Grigoryan and DeGrado (2011), with the radii and the pitch angle that coiled
    coils of three chains have; positions a and d of every heptad point inwards.
    """
    radius, helix, pitch = 6.7, 2.26, math.radians(-12)  # Angstrom, Angstrom, angle
    t = torch.arange(residues, dtype=torch.float64)
    turn = 1.51 * math.sin(pitch) / radius * t  # of the axis of a helix; 1.51 Angstrom per residue
    inner = math.radians(360 * 2 / 7) * t + math.pi + math.radians(26)
    places = []
    for k in range(chains):
        outer = turn + 2 * math.pi * k / chains
        along, across = radius + helix * inner.cos(), helix * math.cos(pitch) * inner.sin()
        places.append(torch.stack([
            along * outer.cos() - across * outer.sin(),
            along * outer.sin() + across * outer.cos(),
            1.51 * math.cos(pitch) * t - helix * math.sin(pitch) * inner.sin(),
        ], dim=1))  # fmt: skip
    return torch.cat(places), torch.arange(chains).repeat_interleave(residues)


# Training.


def gallery_training() -> list[Figure]:
    """Losses of three small runs, what rate one of them bears, and a sweep over two mixers."""
    from sklearn.datasets import load_breast_cancer, load_iris, load_wine

    # Lines of progress are of no use here.
    with TemporaryDirectory() as folder, redirect_stderr(StringIO()):
        text = Path(folder, "text.txt")
        described = (load().DESCR for load in (load_iris, load_wine, load_breast_cancer))
        text.write_text("\n".join(described))
        small = ga.train.RunConfig(
            data=str(text), tokenizer="characters", length=64, batch_tokens=512, steps=64, lr=1e-2,
            model_options={"dim": 32, "depth": 2, "heads": 2}, validation=0.1, test=0.0,
            warmup_steps=8, log_every=4, evaluate_every=16, save_every=64,
        )  # fmt: skip
        runs = {}
        for mixer in ("dot", "consensus", "mix"):
            own = small.replace(mixer=mixer, record_every=4, out=str(Path(folder, mixer)))
            found = ga.train.prepare(own if mixer == "mix" else own.replace(record_every=0))
            made = found.model, found.objective, found.config, found.train, found.validation
            runs[mixer] = ga.train.fit(*made)
        letters = found.tokenizer.vocab_size
        guess = ga.train.frequency_loss(found.train, found.validation, letters)
        short = small.replace(steps=16, evaluate_every=16, out=str(Path(folder, "sweep")))
        rows = ga.train.run_sweep(short, mixers="dot,mix", lrs="1e-4..1:5")
    figures, (losses, stable, sweep) = zip(*(panel() for _ in range(3)), strict=True)
    ga.plot.training_curves(runs, reference={"guessing by frequency": guess}, ax=losses)
    ga.plot.layer_curves(runs["mix"], "alpha_max", ax=stable)
    ga.plot.sweep_curves(rows, ax=sweep)
    name(losses, "Losses of three mixers")
    name(stable, "Largest stable rate, mixer 'mix'")
    name(sweep, "After 16 steps, by learning rate")
    return list(figures)


# Pretrained models.


def gallery_pretrained() -> Figure:
    """What trained models lose in windows and with few keys, from a recorded run of the example."""
    spec = spec_from_file_location("figure", HERE.parent / "examples" / "pretrained_figure.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    record = json.loads((HERE / "integrations" / "pretrained.json").read_text(encoding="utf-8"))
    return module.draw(record)


FIGURES: dict[str, Callable[[], Figure | list[Figure]]] = {
    draw.__name__: draw
    for draw in (
        gallery_low_pass,
        gallery_fiedler,
        gallery_clusters,
        gallery_cluster_counts,
        gallery_scalings,
        gallery_flows,
        gallery_bandwidths,
        gallery_class_token,
        gallery_patches,
        gallery_off_diagonal,
        gallery_layers,
        gallery_model_graphs,
        gallery_structure,
        gallery_training,
        gallery_pretrained,
    )
}


def draw_all(folder: Path, names: list[str] | None = None) -> None:
    """Every figure, or some, as ``folder/NAME.png``; its panels, if several, as ``NAME_1.png``."""
    from pictures import save  # beside this file

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # of tensors this small, threads wait for each other most of the time
    for chosen in names or FIGURES:
        drawn = FIGURES[chosen]()
        if not isinstance(drawn, list):
            save(drawn, folder / f"{chosen}.png")
            continue
        for number, figure in enumerate(drawn, 1):
            save(figure, folder / f"{chosen}_{number}.png")
    torch.set_num_threads(threads)


if __name__ == "__main__":
    draw_all(HERE / "_figures", sys.argv[1:])
