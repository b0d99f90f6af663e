"""Do trained image models with Gaussian kernels look as the figures of the paper say?"""

from __future__ import annotations

import time
from argparse import Namespace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from evidence import Experiment, Findings, Verdict, main
from gka_vision import SEEDS
from images import DATA, MNIST, arms_of
from rates import prepared_as, run_at, summary
from torch import Tensor

import graphattn as ga

IMAGES = 256
DISCARD = (0.0, 0.5, 0.9)
APART = 1.1  # of the bandwidths of a layer, the largest divided by the smallest
ARMS = ("gka", "gka, untrained", "dot")
BANDWIDTHS = "largest / smallest bandwidth of a layer"
FIRST, LAST = "weight of a token on itself, first layer", "weight of a token on itself, last layer"
INK = "ink of the rollout, discard {:g}"
MAP = "ink of the class token's map, last layer"
HEADS = "distance between the heads' weights"

EXPERIMENT = Experiment(
    name="gka_figures",
    title="Bandwidths and attention of trained image models with Gaussian kernels",
    paper="Projection-Free Transformers via Gaussian Kernel Attention, Sections 1 and 7.2 to 7.6",
    claim="Learned bandwidths specialize across heads. Attention in early layers tends toward the "
    "identity, and becomes broader in later layers. The rollout of the class token, of which weak "
    "connections are removed, shows that the network looks at the regions that matter.",
    prediction="In the models of gka_vision that were trained on MNIST. (1) The largest bandwidth "
    "of a layer divided by its smallest, averaged over the layers, is at least 1.1. At the start "
    "all are equal. (2) The mean weight of a token on itself is larger in the first layer than in "
    "the last. (3) The ink of a rollout is the mean brightness of the patches, weighted by the "
    "rollout of the class token, divided by the plain mean; a map without relation to the image "
    "has 1. With 90 % of the connections removed it is above 1, above that without removal, and "
    "above that of the same model before its training. Each of the three has to be true in the "
    "model of every seed.",
    refuted_if="One of the three that is true in the model of no seed. If one is true for some "
    "seeds only, it is inconclusive.",
    config={"runs": "gka_vision, mnist", "images": IMAGES, "discard": DISCARD,
            "files": {MNIST: "10,000 images of MNIST with their labels, in the file beside it"}},
    notes="The paper shows its figures for one image of ImageNet and the smallest model, and says "
    "in words what they reveal; the numbers are ours. Averages are over 256 test images. Its "
    "models train for 214 thousand steps, ours for 700, so a bandwidth cannot move far. Patches of "
    "the border of an image are dark for every digit, so a map may have much ink without looking "
    "at the image: the table also has the rollout of attention, and that of untrained models. That "
    "a token's weight on itself is the largest of its row is true of Gaussian kernels for any "
    "weights, so it is not tested.",
)  # fmt: skip


def ink(weights: Tensor, images: Tensor, patch: int) -> float:
    """Return the brightness of patches under weights [B, patches], divided by the plain mean."""
    patches = torch.nn.functional.avg_pool2d(images, patch).flatten(1)
    total = weights.sum(1, keepdim=True)
    weights = torch.where(total > 0, weights, 1)  # a map of nothing says as little as a plain one
    share = weights / weights.sum(1, keepdim=True)
    return float(((share * patches).sum(1) / patches.mean(1)).mean())


def numbers_of(model: Any, images: Tensor, patch: int) -> dict[str, float]:
    """Return what the figures of a model show, in numbers."""
    with torch.no_grad(), ga.diagnostics.record_attention(model.eval()) as layers:
        model(images)
    weights, graphs = [layer.weights for layer in layers], [layer.graph for layer in layers]
    tokens = graphs[0].num_targets
    own = [(w * (g.edge_index[0] == g.edge_index[1])[:, None]).sum(1) / tokens
           for w, g in zip(weights, graphs, strict=True)]  # fmt: skip
    found = {FIRST: float(own[0].mean()), LAST: float(own[-1].mean())}
    for discard in DISCARD:
        flow = ga.diagnostics.rollout(weights, graphs, discard=discard)
        found[INK.format(discard)] = ink(flow[:, 0, 1:], images, patch)
    of_class = weights[-1].mean(-1)[:, (graphs[-1].edge_index[1] == 0)]
    found[MAP] = ink(of_class[:, 1:], images, patch)
    found[HEADS] = fmean(
        float(ga.diagnostics.head_diversity(w, g).mean())
        for w, g in zip(weights, graphs, strict=True)
    )
    if any(name.endswith("log_sigma") for name, _ in model.named_parameters()):
        sigma = ga.diagnostics.bandwidths(model).values
        found[BANDWIDTHS] = float((sigma.amax(1) / sigma.amin(1)).mean())
    return found


def judged(found: dict[str, list[dict[str, float]]]) -> tuple[Verdict, str]:
    """Judge the numbers of the models of every arm, one dict per seed in the same order."""
    trained, before = found["gka"], found["gka, untrained"]
    if len(trained) < SEEDS:
        return "open", f"{len(trained)} of {SEEDS} models with Gaussian kernels are trained."
    plain, few = INK.format(DISCARD[0]), INK.format(DISCARD[-1])
    true = {
        "bandwidths": [own[BANDWIDTHS] >= APART for own in trained],
        "first and last layer": [own[FIRST] > own[LAST] for own in trained],
        "rollout": [
            own[few] > max(1.0, own[plain], start[few])
            for own, start in zip(trained, before, strict=True)
        ],
    }
    means = {name: fmean(own[name] for own in trained) for name in trained[0]}
    why = (
        f"Largest / smallest bandwidth {means[BANDWIDTHS]:.3f}. Weight of a token on itself "
        f"{means[FIRST]:.3f} in the first and {means[LAST]:.3f} in the last layer. Ink of the "
        f"rollout {means[plain]:.2f}, with 90 % removed {means[few]:.2f} (before training "
        f"{fmean(own[few] for own in before):.2f}). True for how many of {SEEDS} seeds: "
        + ", ".join(f"{name} {sum(own)}" for name, own in true.items())
        + "."
    )
    if not all(any(own) for own in true.values()):
        return "not held", why
    return ("held" if all(all(own) for own in true.values()) else "inconclusive"), why


def measure(arguments: Namespace) -> Findings:
    torch.set_num_threads(1)
    start = time.process_time()
    work = Path(arguments.work).parent / "gka_vision" / "mnist"
    step, patch = DATA["mnist"]["steps"], DATA["mnist"]["patch_size"]
    found: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
    runs: list[dict[str, Any]] = []
    sigma: Tensor | None = None
    for name in ("gka", "dot"):
        if name == "dot" and sigma is None:
            break  # there is nothing to draw, and nothing to compare with
        arm = arms_of("mnist")[name]
        rows = ga.train.read_sweep(work / name) if (work / name).is_dir() else []
        for row in sorted(rows, key=lambda row: row["seed"]):
            if row["status"] != "finished":
                continue
            prepared = run_at(arm, work / name / row["folder"], step)
            assert prepared.test is not None
            images = torch.stack([one["image"] for one in prepared.test.__getitems__(
                range(min(IMAGES, len(prepared.test))))])  # fmt: skip
            models = {name: prepared.model}
            if name == "gka":
                models["gka, untrained"] = prepared_as(arm, prepared.config).model
                if sigma is None:
                    sigma = ga.diagnostics.bandwidths(prepared.model).values
            for kind, model in models.items():
                numbers = numbers_of(model, images, patch)
                found[kind].append(numbers)
                runs.append({"arm": kind, "seed": row["seed"], **numbers})
    settings = [FIRST, LAST, BANDWIDTHS, *map(INK.format, DISCARD), MAP, HEADS]
    rows_of_table = []
    for kind, own in found.items():
        for setting in settings:
            values = [each[setting] for each in own if setting in each]
            if values:
                rows_of_table.append(summary(kind, setting, values))
    verdict, why = judged(found)
    return Findings(
        numbers=rows_of_table,
        verdict=verdict,
        why=why,
        runs=runs,
        seeds=sorted({run["seed"] for run in runs}),
        cpu_hours=(time.process_time() - start) / 3600,
        draw=None if sigma is None else lambda ax: ga.plot.bandwidth_lines(sigma, ax=ax),
        columns=("mean", "deviation"),
    )


if __name__ == "__main__":
    main(EXPERIMENT, measure)
