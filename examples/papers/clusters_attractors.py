"""Are clusters of attention without weights attractors of the hidden states of trained models?"""

from __future__ import annotations

import itertools
import statistics
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from evidence import Experiment, Findings, Verdict, kept_result, main
from probes import hidden_states, pretrained_models
from rates import ENDED, SMALL, Arm, cpu_hours, kept, run_arms, spread, summary
from torch import Tensor

import graphattn as ga
from graphattn.nn.files import pretrained
from graphattn.train.runs.checkpoints import checkpoint_path

SEEDS, LR = 3, 1e-3
CHECKPOINTS = (100, 300, 600)
LENGTH, TEXTS = 128, 8
CLUSTERS, STEPS = 8, 20
FILE = "text/tinyshakespeare.txt"
ARMS = {"dot": Arm("dot")}
SHARED: dict[str, Any] = {
    "kind": "text",
    "tokenizer": "characters",
    "length": LENGTH,
    "model": "encoder-1m",
    "model_options": SMALL,
    "objective": "masked",
    "steps": CHECKPOINTS[-1],
    "batch_tokens": 2048,
    "validation_tokens": 32768,
    "evaluate_every": 200,
    "save_every": 100,
    "keep": 6,
    "warmup_steps": 50,
    "schedule": "cosine",
}
INDICES = ("attention", "KMeans", "shuffled")

EXPERIMENT = Experiment(
    name="clusters_attractors",
    title="Clusters without weights as attractors of hidden states",
    paper="Attention Clusters, Section 5 (a question that the paper leaves open)",
    claim="Parameter-free clusters may act as attractors of learning: the hidden states of trained "
    "models would then cluster as attention without weights clusters the input of the layer.",
    prediction=f"For every layer, {STEPS} steps of attention without weights start from its input, "
    f"and KMeans makes {CLUSTERS} clusters of the last update and of the output of the layer. "
    "Their adjusted Rand index, the mean over layers and texts, is larger after training than "
    "before it (the same models, three seeds) by more than two deviations over seeds (the larger "
    "one of trained and untrained models), and also above the index that KMeans of the layer's "
    "input has instead, by more than two deviations. In a trial of the script, with one text, the "
    "index of both pretrained models was below that of the same model with new weights, and below "
    "that of KMeans, so we do not expect the claim to hold.",
    refuted_if="An index after training that is not above the one before it by more than two "
    "deviations. If it is, but KMeans of the input agrees as well, the input of a layer predicts "
    "its output without any attention, and the experiment is inconclusive.",
    config={
        "clusters": CLUSTERS,
        "steps_without_weights": STEPS,
        "texts": TEXTS,
        "checkpoints": CHECKPOINTS,
        "seeds": SEEDS,
        "lr": LR,
        "training": SHARED,
        "files": {FILE: "1.1 MB of Shakespeare's plays"},
    },
    notes="A residual stream keeps most of the input of a layer, so the clusters of input and "
    "output agree whatever the layer does: this is why KMeans of the input is a baseline. With "
    "standardised states of 64 features, attention without weights mostly looks at the token "
    "itself, and its clusters may be nearly those of KMeans. The index of shuffled clusters is 0 "
    "up to chance. The texts are the held-out end of the file. The "
    "curve over training steps, and AntiBERTy and MiniLM beside the same models "
    "with new weights (if their packages are installed; see clusters_models), decide nothing. "
    "Their deviations are over texts, those of the models trained here over seeds.",
)


def indices_of(states: list[Tensor]) -> dict[str, list[float]]:
    """Return the index of every layer from its input and output, [1, N, C], by kind of clusters."""
    from sklearn.metrics import adjusted_rand_score

    found: dict[str, list[float]] = {name: [] for name in INDICES}

    def clusters(points: Tensor) -> Tensor:
        return ga.dynamics.cluster(points, method="kmeans", num_clusters=CLUSTERS)

    generator = torch.Generator().manual_seed(0)
    for before, after in itertools.pairwise(states):
        x = ga.dynamics.standardize(before[0].double())
        run = ga.dynamics.simulate(x, ga.complete_graph(len(x)), steps=STEPS)
        truth, own = clusters(after[0]), clusters(run.updates[-1])
        shuffled = own[torch.randperm(len(own), generator=generator)]
        for name, labels in zip(INDICES, (own, clusters(before[0]), shuffled), strict=True):
            found[name].append(float(adjusted_rand_score(truth, labels)))
    return found


def of_texts(every: list[dict[str, list[float]]]) -> dict[str, Any]:
    """Return the mean of every kind over layers, per text, and layer by layer."""
    texts = {name: [statistics.fmean(own[name]) for own in every] for name in INDICES}
    layers = {
        name: [statistics.fmean(values) for values in zip(*(own[name] for own in every),
                                                          strict=True)]
        for name in INDICES
    }  # fmt: skip
    return {"texts": texts, "layers": layers}


def of_checkpoint(folder: Path, step: int, text: str) -> dict[str, Any]:
    """Return the indices of a model after some steps; after 0, of its weights at the start."""
    model: Any = (
        ga.train.prepare(ga.train.RunConfig.load(folder / "config.yaml")).model
        if step == 0
        else pretrained.load(checkpoint_path(folder, step))
    )
    model.eval()
    tokenizer = ga.data.load_tokenizer(folder / "tokenizer.json")
    tokens = tokenizer.encode(text[-TEXTS * LENGTH :]).view(TEXTS, 1, LENGTH)
    return of_texts(
        [indices_of(hidden_states(list(model.blocks), partial(model, each))) for each in tokens]
    )


def means(found: dict[int, list[dict[str, Any]]], step: int, kind: str) -> list[float]:
    """Return the mean index of every seed at a step of training."""
    return [statistics.fmean(own["texts"][kind]) for own in found.get(step, [])]


def judged(found: dict[int, list[dict[str, Any]]]) -> tuple[Verdict, str]:
    """Decide from the indices of every seed, by step of training."""
    last = CHECKPOINTS[-1]
    trained, untrained = (means(found, step, "attention") for step in (last, 0))
    plain = means(found, last, "KMeans")
    if min(len(trained), len(untrained)) < SEEDS:
        return "open", f"{len(trained)} of {SEEDS} models are measured."
    after, before, baseline = map(statistics.fmean, (trained, untrained, plain))
    noise = max(spread(trained) or 0.0, spread(untrained) or 0.0)
    noise_of_plain = max(spread(trained) or 0.0, spread(plain) or 0.0)
    why = (
        f"Index after training {after:.3f}, before it {before:.3f} (deviation {noise:.3f}), of "
        f"KMeans of the input {baseline:.3f} (deviation {noise_of_plain:.3f})."
    )
    if after - before <= 2 * noise:
        return "not held", why
    return ("held" if after - baseline > 2 * noise_of_plain else "inconclusive"), why


def of_pretrained(arguments: Namespace) -> dict[str, dict[str, Any]]:
    """Return the indices of AntiBERTy and MiniLM, trained and untrained, if they are installed."""
    try:
        probes = pretrained_models()
    except ImportError as error:
        print(f"left out: {error}", flush=True)
        return {}
    found = {}
    for probe in probes:
        for name, model in (("trained", probe.model), ("untrained", probe.untrained(0))):
            blocks = probe.blocks(model)

            def work(
                model: Any = model, blocks: Any = blocks, inputs: Any = probe.inputs
            ) -> dict[str, Any]:
                every = [hidden_states(blocks, partial(model, **given)) for given in inputs]
                return of_texts([indices_of(states) for states in every])

            config = {"clusters": CLUSTERS, "steps": STEPS, "texts": len(probe.inputs)}
            own = kept_result(arguments, f"{probe.name}-{name}", config, work)
            if own is not None:
                found[f"{probe.name}, {name}"] = own
    return found


def measure(arguments: Namespace) -> Findings:
    torch.set_num_threads(1)
    file = Path(arguments.data) / FILE
    rows = run_arms(arguments, ARMS, [LR], SEEDS, {**SHARED, "data": str(file)})
    text = file.read_text(encoding="utf-8")
    found: dict[int, list[dict[str, Any]]] = {}
    spent = []
    for row in rows:
        if row["status"] not in ENDED:
            continue
        folder = Path(arguments.work) / "dot" / row["folder"]
        for step in (0, *CHECKPOINTS):
            own = kept_result(
                arguments,
                f"step-{step}-seed-{row['seed']}",
                {"clusters": CLUSTERS, "steps": STEPS, "texts": TEXTS},
                partial(of_checkpoint, folder, step, text),
            )
            if own is not None:
                found.setdefault(step, []).append(own)
                spent.append({"step": step, "seed": row["seed"], **own})
    others = of_pretrained(arguments)
    numbers = []
    for kind in INDICES:
        for step in found:
            numbers.append(summary(kind, f"after {step} steps", means(found, step, kind)))
        for layer in range(SMALL["depth"] if CHECKPOINTS[-1] in found else 0):
            values = [own["layers"][kind][layer] for own in found[CHECKPOINTS[-1]]]
            numbers.append(summary(kind, f"after training, layer {layer + 1}", values))
        for name, own in others.items():
            numbers.append(summary(kind, name, own["texts"][kind]))

    def draw(ax: Any) -> None:
        for kind in INDICES:
            steps = sorted(found)
            values = [statistics.fmean(means(found, step, kind)) for step in steps]
            ax.plot(steps, values, "o-", label=kind)
        ax.set(xlabel="steps of training", ylabel="adjusted Rand index with the layer's output")
        ax.legend(title="clusters of the layer's input")

    verdict, why = judged(found)
    return Findings(
        numbers=numbers,
        verdict=verdict,
        why=why,
        runs=[*kept(rows), *spent, *({"model": name, **own} for name, own in others.items())],
        seeds=list(range(SEEDS)),
        cpu_hours=cpu_hours([*rows, *spent, *others.values()]),
        draw=draw if numbers else None,
        columns=("mean", "deviation"),
    )


if __name__ == "__main__":
    main(EXPERIMENT, measure)
