"""Do heads of Krause attention differ more, and have more clusters, in trained vision models?"""

from __future__ import annotations

import statistics
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from evidence import Experiment, Findings, Verdict, main, once
from rates import Arm, config_of, cpu_hours, run_arms, spread, summary
from torch import Tensor

import graphattn as ga

RATE, SEEDS, IMAGES = 3e-3, 3, 64
PERSISTS = 0.9  # eigenvalues above this are clusters that keep 90 % of their mass in a step
TOP_K = [2, 3, 3, 4]
MODEL = {"depth": 4, "dim": 64, "heads": 4, "patch_size": 4}
NEAR = {**MODEL, "radius": 1}
CONTROL = "standard, same window and top-k"
ARMS = {
    "standard": Arm("dot", config={"model_options": MODEL}),
    "krause": Arm("krause", {"top_k": TOP_K, "init_sigma": 2.5}, config={"model_options": NEAR}),
    CONTROL: Arm("dot-window", {"top_k": TOP_K}, config={"model_options": NEAR}),
}
SHARED = {
    "kind": "images",
    "model": "digits",
    "objective": "classification",
    "validation": 0.1,
    "test": 0.1,
    "validation_tokens": 0,
    "steps": 500,
    "batch_tokens": 64 * 49,
    "evaluate_every": 250,
    "save_every": 250,
    "keep": 1,
}
FILES = "images/mnist_t10k"
COLUMNS = ("diversity", "patterns", "clusters")
COLLAPSED = 1.5  # patterns of 4 heads

EXPERIMENT = Experiment(
    name="krause_heads",
    title="Diversity and clusters of attention heads in trained vision models",
    paper="Krause Synchronization Transformers, Figure 3",
    claim="Heads of a vision transformer with Krause attention show clear patterns of several "
    "clusters, which differ between heads, while heads of a standard one nearly collapse to a "
    "single pattern.",
    prediction="Diversity is half of the L1 distance between the weights of two heads, mean over "
    "pairs; patterns are the effective number of different attention matrices among 4 heads; "
    "clusters are the number of eigenvalues of a head's matrix above 0.9 in absolute value. "
    "Means are over layers, heads and test images of three trained models. (1) All three are "
    "larger for Krause attention than for standard attention, by more than the larger deviation "
    "over seeds. (2) The heads of the standard models nearly collapse: fewer than 1.5 patterns. "
    "(3) Diversity and clusters are larger for Krause attention than for dot-product attention "
    "with the same window and top-k, by more than the larger deviation. Without (3), the "
    "difference is that of any sparse graph.",
    refuted_if="(1) or (3) with a mean that is not larger, or 1.5 or more patterns in standard "
    "heads. Differences within a deviation make it inconclusive.",
    config={
        **config_of(ARMS, [RATE], SHARED, FILES, "the 10,000 test images of MNIST, idx files"),
        "images": IMAGES,
        "persists": PERSISTS,
    },
    notes="The figure of the paper is a picture of heads; the three numbers are ours. Models "
    "have 4 layers of width 64 with 4 heads and patches of 4 x 4 pixels (49 and a class token), "
    "and train for 500 steps of 64 images; k grows from 2 to 4, in windows of 3 x 3 patches. "
    "Data are 10,000 images, of which 1,000 choose the checkpoint and 64 of another 1,000 are "
    "measured. Few kept sources differ between heads even if nothing is learned, so the same "
    "numbers of untrained models are in the table, and (3) compares with dot-product attention "
    "over the same graph. Before this prediction, models were measured after 3 steps: patterns "
    "were 1.04 (standard), 2.83 (Krause) and 2.64 (same window and top-k). The matrix of the "
    "class token's row is that of any other token. 'certified groups' says how many groups "
    "`ga.dynamics.persistent_groups` finds among the tokens that enter a Krause layer, with its "
    "k and graph; it is about the flow without projections, not about the layer, and decides "
    "nothing.",
)


def patterns(matrices: Tensor) -> float:
    """Return the effective number of patterns of the heads, between 1 and H.

    It is the participation ratio of the eigenvalues of the cosines between the attention matrices
    [H, N, N] of the heads, each as one long vector.
    """
    rows = torch.nn.functional.normalize(matrices.flatten(1).double(), dim=1)
    values = torch.linalg.eigvalsh(rows @ rows.T)
    return float(values.sum() ** 2 / values.square().sum())


def clusters(matrices: Tensor) -> Tensor:
    """Return the number of clusters of every matrix [..., N, N]: eigenvalues above PERSISTS."""
    return (torch.linalg.eigvals(matrices.double()).abs() > PERSISTS).sum(-1)


def heads_of(model: Any, images: Tensor) -> dict[str, float]:
    """Return the means over images and layers of what is measured in the heads of a model."""
    certified: list[float] = []

    def certify(layer: Any, given: tuple[Any, ...]) -> None:
        x, graph = given[0], given[1]
        groups = [int(ga.dynamics.persistent_groups(own, layer.top_k, graph).max()) for own in x]
        certified.append(1 + statistics.fmean(groups))

    layers = [part for part in model.modules() if isinstance(part, ga.nn.KrauseAttention)]
    hooks = [layer.register_forward_pre_hook(certify) for layer in layers]
    with torch.no_grad(), ga.diagnostics.record(model.eval()) as recording:
        model(images)
    for hook in hooks:
        hook.remove()
    diversity = [float(ga.diagnostics.head_diversity(call.weights, call.graph).mean())
                 for call in recording]  # fmt: skip
    found = [call.matrix for call in recording]  # [B, H, N, N] of every layer
    several = [patterns(image) for layer in found for image in layer]
    many = [float(clusters(layer).double().mean()) for layer in found]
    return {
        "diversity": statistics.fmean(diversity),
        "patterns": statistics.fmean(several),
        "clusters": statistics.fmean(many),
        **({"certified groups": statistics.fmean(certified)} if certified else {}),
    }


def judged(runs: list[dict[str, Any]]) -> tuple[Verdict, str]:
    own = {arm: [run for run in runs if run["arm"] == arm] for arm in ARMS}
    if min(len(each) for each in own.values()) < SEEDS:
        return "open", f"{sum(len(each) for each in own.values())} of {len(ARMS) * SEEDS} are done."
    mean = {arm: {column: statistics.fmean(run[column] for run in each) for column in COLUMNS}
            for arm, each in own.items()}  # fmt: skip
    more, sure = mean["standard"]["patterns"] < COLLAPSED, True
    for other, columns in (("standard", COLUMNS), (CONTROL, ("diversity", "clusters"))):
        for column in columns:
            deviation = max(spread([run[column] for run in own[arm]]) or 0.0
                            for arm in (other, "krause"))  # fmt: skip
            gain = mean["krause"][column] - mean[other][column]
            more, sure = more and gain > 0, sure and gain > deviation
    why = "Trained heads: " + "; ".join(
        f"{column} " + ", ".join(f"{mean[arm][column]:.3g} ({arm})" for arm in ARMS)
        for column in COLUMNS
    )
    if not more:
        return "not held", f"{why}."
    return ("held" if sure else "inconclusive"), f"{why}."


def measure(arguments: Namespace) -> Findings:
    work = Path(arguments.work)
    shared = {**SHARED, "data": str(Path(arguments.data) / FILES)}
    rows = run_arms(arguments, ARMS, [RATE], SEEDS, shared)
    runs: list[dict[str, Any]] = []
    for row in rows:
        if row["status"] != "finished":
            continue
        folder = work / row["arm"] / row["folder"]

        def find(folder: Path = folder) -> dict[str, Any]:
            made = ga.train.prepare(ga.train.RunConfig.load(folder / "config.yaml"))
            assert made.test is not None
            test = made.objective.collate([made.test[i] for i in range(IMAGES)])
            trained = ga.train.load_trained(folder).model
            report = ga.train.evaluate_model(trained, made.objective, made.test)
            before = heads_of(made.model, test["image"])
            untrained = {f"{name} before training": value for name, value in before.items()}
            return {**heads_of(trained, test["image"]), **untrained,
                    "test accuracy": report["accuracy"]}  # fmt: skip

        found = once(arguments, work / f"heads, {row['arm']}, {row['seed']}.json", find)
        if found is None:
            continue
        runs.append({"arm": row["arm"], "seed": row["seed"], "loss": row["loss"], **found})
    numbers: list[dict[str, Any]] = []
    for arm in ARMS:
        own = [run for run in runs if run["arm"] == arm]
        for column in own[0].keys() - {"arm", "seed"} if own else ():
            numbers.append(summary(arm, column, [run[column] for run in own]))
    numbers.sort(key=lambda number: number["setting"])

    def draw(ax: Any) -> None:
        for number, arm in enumerate(ARMS):
            own = [run for run in runs if run["arm"] == arm]
            for suffix, marker in ((" before training", "x"), ("", "o")):
                ax.plot([run[f"diversity{suffix}"] for run in own],
                        [run[f"clusters{suffix}"] for run in own], marker, color=f"C{number}",
                        label=arm + suffix)  # fmt: skip
        ax.set(xlabel="diversity of heads", ylabel="clusters per head")
        ax.legend()

    verdict, why = judged(runs)
    return Findings(
        numbers=numbers,
        verdict=verdict,
        why=why,
        runs=runs,
        seeds=list(range(SEEDS)),
        cpu_hours=cpu_hours(rows),
        draw=draw if numbers else None,
        columns=("mean over layers and images", "deviation over seeds"),
    )


if __name__ == "__main__":
    main(EXPERIMENT, measure)
