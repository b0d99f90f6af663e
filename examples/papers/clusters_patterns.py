"""Does the score of an attention pattern before training predict its loss after training?"""

from __future__ import annotations

import gzip
import statistics
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from evidence import Experiment, Findings, Verdict, kept_result, main
from patterns import ARMS, PATTERNS, graph_of
from rates import ENDED, SMALL, cpu_hours, kept, losses_at, run_arms, summary
from torch import Tensor

import graphattn as ga

SEEDS, LR = 3, 3e-3
LENGTH, SIDE, PATCH = 128, 28, 4
PATCHES = (SIDE // PATCH) ** 2
EXAMPLES, STEPS_OF_PREVIEW, FEATURES = 16, 20, 3
HIGH, LOW = 0.5, 0.2


SHARED: dict[str, Any] = {
    "model_options": {**SMALL, "depth": 2},
    "batch_tokens": 1024,
    "warmup_steps": 50,
    "schedule": "cosine",
    "test": 0.0,
}
TEXT, IMAGES = "text/tinyshakespeare.txt", "images/mnist_t10k"
TASKS: dict[str, dict[str, Any]] = {
    "text": {
        **SHARED,
        "kind": "text",
        "tokenizer": "characters",
        "length": LENGTH,
        "model": "encoder-1m",
        "objective": "masked",
        "steps": 400,
        "validation_tokens": 32768,
    },
    "images": {
        **SHARED,
        "model": "digits",
        "model_options": {
            **SHARED["model_options"],
            "patch_size": PATCH,
            "class_token": False,
            "pooling": "mean",
        },
        "objective": "classification",
        "steps": 600,
        "validation": 0.2,
        "validation_tokens": 0,
    },
}
FILES = {"text": TEXT, "images": IMAGES}

EXPERIMENT = Experiment(
    name="clusters_patterns",
    title="Patterns: clusters before training, and the loss after it",
    paper="Attention Clusters, Appendix B",
    claim="The clusters of a new pattern without weights are a rapid proxy for training it: "
    "patterns whose clusters are most similar to those of global attention are the ones worth "
    "training. (The paper has no experiment about this.)",
    prediction="Twelve patterns are scored by the adjusted Rand index between their clusters and "
    "those of global attention (`ga.dynamics.preview`, mean over 16 examples of the data), "
    "and trained on two tasks with three seeds. The claim holds if Spearman's rank correlation of "
    "this score with minus the mean validation loss is above 0.5 for both tasks.",
    refuted_if="A mean of the two correlations below 0.2. It is inconclusive between, or if the "
    "losses of the patterns differ too little on a task: their deviation over patterns is below "
    "twice the mean deviation over seeds.",
    config={
        "patterns": list(PATTERNS),
        "seeds": SEEDS,
        "lr": LR,
        "tasks": TASKS,
        "preview": {"examples": EXAMPLES, "steps": STEPS_OF_PREVIEW, "features": FEATURES},
        "files": {TEXT: "1.1 MB of Shakespeare's plays", IMAGES: "the 10,000 test images of MNIST"},
    },
    notes="The data of a preview are raw, as in the paper: the 16 grey levels of a patch, and for "
    "characters three random features each (the paper's tokens have three features, too). With 64 "
    "random features, as many as the models have, clusters are the distinct characters whatever "
    "the pattern is, and all scores are equal. Global attention has the score 1 by definition; the "
    "table also has the correlation without it. The number of edges and the other scores that the "
    "paper names (silhouette, fragmentation) are in the table: they decide nothing, but a score "
    "that does not predict better than the number of edges is not needed. All patterns get the "
    "same steps, not the same time, since their times here are those of small graphs and say "
    "little about larger ones. One learning rate for all. With twelve patterns, the 95 % interval "
    "of a rank correlation of 0.5 reaches from about -0.1 to 0.8. The MNIST images are split into "
    "8,000 and 2,000, so no number can be compared with published ones.",
)


def examples_of(task: str, file: Path) -> list[Tensor]:
    """Return examples of the data without their classes, [N, C] each."""
    generator = torch.Generator().manual_seed(0)
    if task == "text":
        text = file.read_text(encoding="utf-8")
        known = sorted(set(text))
        starts = torch.randint(len(text) * 9 // 10, (EXAMPLES,), generator=generator).tolist()
        found = []
        for start in starts:
            features = torch.randn(len(known), FEATURES, generator=generator, dtype=torch.float64)
            letters = [known.index(letter) for letter in text[start : start + LENGTH]]
            found.append(features[letters])
        return found
    data = gzip.decompress((file / "t10k-images-idx3-ubyte.gz").read_bytes())[16:]
    images = torch.from_numpy(np.frombuffer(data, np.uint8).copy()).view(-1, SIDE, SIDE).double()
    chosen = torch.randperm(len(images), generator=generator)[:EXAMPLES]
    patches = images[chosen].unfold(1, PATCH, PATCH).unfold(2, PATCH, PATCH)
    return list(patches.reshape(EXAMPLES, PATCHES, PATCH * PATCH))


SCORES = ("agreement", "silhouette", "minus clusters per global cluster", "edges")


def previewed(pattern: str, examples: list[Tensor]) -> dict[str, Any]:
    """Return the mean scores of a pattern over examples, where larger is said to be better."""
    found = [
        ga.dynamics.preview(x, graph_of(pattern, len(x)), steps=STEPS_OF_PREVIEW) for x in examples
    ]
    values = (
        [each.agreement for each in found],
        [each.pattern.silhouette for each in found],
        [-each.pattern.clusters_per_label for each in found],
        [float(each.pattern.num_edges) for each in found],
    )
    return {name: statistics.fmean(own) for name, own in zip(SCORES, values, strict=True)}


def correlation(scores: list[float], losses: list[float]) -> float:
    from scipy.stats import spearmanr

    return float(spearmanr(scores, [-loss for loss in losses]).statistic)


def judged(
    scores: dict[str, dict[str, float]], losses: dict[str, dict[str, list[float]]]
) -> tuple[Verdict, str]:
    """Decide from score and losses of every pattern, by task."""
    runs = sum(len(own) for by_pattern in losses.values() for own in by_pattern.values())
    planned = len(TASKS) * len(PATTERNS) * SEEDS
    if runs < planned or min(map(len, scores.values()), default=0) < len(PATTERNS):
        return "open", f"{runs} of {planned} runs are done."
    found, parts, differ = [], [], True
    for task, by_pattern in losses.items():
        means = [statistics.fmean(by_pattern[name]) for name in PATTERNS]
        noise = statistics.fmean(statistics.stdev(by_pattern[name]) for name in PATTERNS)
        between = statistics.stdev(means)
        differ = differ and between >= 2 * noise
        found.append(correlation([scores[task][name] for name in PATTERNS], means))
        parts.append(
            f"{task}: rank correlation {found[-1]:.2f} (deviation of losses over patterns "
            f"{between:.3f}, over seeds {noise:.3f})"
        )
    why = f"{'; '.join(parts)}."
    if not differ:
        return "inconclusive", why
    if min(found) > HIGH:
        return "held", why
    return ("not held" if statistics.fmean(found) < LOW else "inconclusive"), why


def measure(arguments: Namespace) -> Findings:
    work, data = Path(arguments.work), Path(arguments.data)
    rows: list[dict[str, Any]] = []
    losses: dict[str, dict[str, list[float]]] = {}
    scores: dict[str, dict[str, dict[str, float]]] = {}
    for task, shared in TASKS.items():
        examples = examples_of(task, data / FILES[task])
        scores[task] = {}
        for pattern in PATTERNS:
            config = EXPERIMENT.config["preview"]
            score = partial(previewed, pattern, examples)
            known = kept_result(arguments, f"{task}-{pattern}", config, score)
            if known is not None:
                scores[task][pattern] = {name: known[name] for name in SCORES}
        given = Namespace(**{**vars(arguments), "work": str(work / task)})
        every = {"evaluate_every": shared["steps"], "save_every": shared["steps"]}
        ended = run_arms(
            given, ARMS, [LR], SEEDS, {**shared, **every, "data": str(data / FILES[task])}
        )
        rows += [{"task": task, **row} for row in ended]
        losses[task] = {name: losses_at(ended, name, LR) for name in PATTERNS}
    numbers = []
    for task in TASKS:
        for name in PATTERNS:
            if own := losses[task][name]:
                numbers.append(summary(name, f"{task}: loss", own))
            for measured, value in scores[task].get(name, {}).items():
                numbers.append(summary(name, f"{task}: {measured}", [value]))
        numbers += correlations(task, scores[task], losses[task])
    primary = {task: {k: v["agreement"] for k, v in own.items()} for task, own in scores.items()}

    def draw(ax: Any) -> None:
        for number, (task, by_pattern) in enumerate(losses.items()):
            done = [name for name in PATTERNS if by_pattern[name] and name in primary[task]]
            means = [statistics.fmean(by_pattern[name]) for name in done]
            ax = ax.twinx() if number else ax
            ax.plot([primary[task][name] for name in done], means, "os"[number],
                    color=f"C{number}")  # fmt: skip
            ax.set_ylabel(f"validation loss, {task} (nats)", color=f"C{number}")
            ax.set_xlabel("agreement with global attention before training")

    verdict, why = judged(primary, losses)
    return Findings(
        numbers=numbers,
        verdict=verdict,
        why=why,
        runs=[{"task": row["task"], **kept([row])[0]} for row in rows if row["status"] in ENDED],
        seeds=list(range(SEEDS)),
        cpu_hours=cpu_hours(rows),
        draw=draw if numbers else None,
        columns=("mean over seeds", "deviation"),
    )


def correlations(
    task: str, scores: dict[str, dict[str, float]], losses: dict[str, list[float]]
) -> list[dict[str, Any]]:
    """Return the rank correlation of every score with minus the loss, with and without global."""
    done = [name for name in PATTERNS if name in scores and losses[name]]
    numbers = []
    for which, names in (("all patterns", done), ("without global", done[1:])):
        means = [statistics.fmean(losses[name]) for name in names]
        for score in SCORES if len(names) > 2 else ():
            rank = correlation([scores[name][score] for name in names], means)
            numbers.append(summary(which, f"{task}: rank correlation of {score}", [rank]))
    return numbers


if __name__ == "__main__":
    main(EXPERIMENT, measure)
