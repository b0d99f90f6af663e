"""Does a Krause shortcut lower the attention on the first token, as in Llama?"""

from __future__ import annotations

import statistics
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from costs import losses_in_time, seconds_per_step
from evidence import Experiment, Findings, Verdict, main, once
from rates import SMALL, Arm, config_of, cpu_hours, kept, run_arms, summary
from torch import Tensor, nn

import graphattn as ga

RATE, TUNING_RATE, SEEDS = 3e-3, 1e-3, 3
LENGTH, WINDOWS, MARK = 128, 8000, "§"  # tokens of a window; windows; the first token of each
UNIFORM = sum(1 / (i + 1) for i in range(1, LENGTH)) / (LENGTH - 1)  # share of equal weights
SINK, FALLS, WORSE = 3.0, 0.8, 0.02  # times UNIFORM; of the control; nats
MEASURED = 64  # windows of the validation data in which shares are measured
KRAUSE = {"krause_window": 32, "top_k": 16}
FILE = "text/tinyshakespeare.txt"
SHARED: dict[str, Any] = {
    "kind": "text",
    "tokenizer": "characters",
    "length": LENGTH,
    "model": "text-1m",
    "model_options": {**SMALL, "tie_weights": False},
    "objective": "causal",
    "validation_tokens": 32768,
    "batch_tokens": 2048,
    "save_every": 200,
    "keep": 1,
}
BASE = {"standard": Arm("dot", config={"steps": 2000, "evaluate_every": 500})}
TUNING = {"steps": 300, "evaluate_every": 50}
ARMS = {
    "continued": Arm("dot", config=TUNING),
    "shortcut": Arm("dot+krause", KRAUSE, config=TUNING),
    "replaced": Arm("krause", {"top_k": 16}, window=32, config=TUNING),
}

EXPERIMENT = Experiment(
    name="krause_sinks",
    title="Attention on the first token, with and without a Krause shortcut",
    paper="Krause Synchronization Transformers, Figure 7 (Llama with a Krause shortcut)",
    claim="Llama has peaks of attention on the first token, which oscillate between layers. With a "
    "Krause shortcut in parallel to standard attention in each layer, the curve is smooth and the "
    "sink disappears.",
    prediction="The share of a head is its mean attention weight on the first token, over all "
    "later tokens of 64 validation windows. After 300 steps of fine-tuning with a shortcut, the "
    "largest share of a head of the standard branch (mean over three seeds) is at most 0.8 times "
    "that of the same model after 300 steps without a shortcut, and the mean validation loss is "
    "at most 0.02 nats higher.",
    refuted_if="A larger share than 0.8 times that without a shortcut, or a loss that is more "
    "than 0.02 nats higher. If the largest share without a shortcut is below three times that of "
    "equal weights (0.105), there is no sink, and the experiment says nothing.",
    config={
        **config_of({**BASE, **ARMS}, [RATE, TUNING_RATE], SHARED, FILE,
                    "1.1 MB of Shakespeare's plays"),
        "windows": WINDOWS,
        "measured": MEASURED,
    },
    notes="The figure of the paper is about Llama-3-8B with LoRA. Here, a causal model with 4 "
    "layers of width 64 trains for 2,000 steps on windows of 128 characters of Shakespeare; each "
    "window begins with the same additional token, as Llama's texts do. Then all weights are "
    "tuned. The shortcut starts with copies of the projections and a gate of 0.8 and 0.2, as in "
    "the paper; it sees 32 tokens and keeps 16. Only the standard branch decides: the Krause "
    "branch cannot see the first token beyond its window, so a share of both branches ('mixed' "
    "in the table) falls by construction. The same is true if Krause attention replaces standard "
    "attention ('replaced', 'standard' in the table is then its only branch). The paper shows "
    "one share per layer; the table has it, too. A step with the shortcut takes longer, so the "
    "table also has losses at equal CPU seconds. Before this prediction, one model with another "
    "seed was trained for 500 steps: one head of the first layer had a share of 0.17, and every "
    "later layer had a mean below 0.03, less than with equal weights.",
)  # fmt: skip


def marked_text(data: Path, work: Path) -> Path:
    """Write the text in windows that all begin with the same token, as Llama's texts do."""
    text = (data / FILE).read_text(encoding="utf-8")
    size = LENGTH - 1
    file = work / "windows.txt"
    file.parent.mkdir(parents=True, exist_ok=True)
    windows = (MARK + text[i * size : (i + 1) * size] for i in range(WINDOWS))
    file.write_text("".join(windows), encoding="utf-8")
    return file


def tuned(model: Any, seed: int, *, work: Path) -> nn.Module:
    """Give a model the weights of the standard model with this seed.

    A Krause layer gets copies of the four projections of the layer that it replaces, or to which it
    is parallel. Bandwidths and gates keep their initial values.
    """
    base = ga.train.load_trained(base_folder(work, seed)).model.state_dict()
    weights = dict(model.state_dict())
    for name in weights:
        source = name.replace(".mixer.dot.", ".mixer.").replace(".mixer.krause.", ".mixer.")
        if source in base:
            weights[name] = base[source]
    model.load_state_dict(weights)
    return model


def base_folder(work: Path, seed: int) -> Path:
    rows = [row for row in ga.train.read_sweep(work / "standard") if row["seed"] == seed]
    return work / "standard" / rows[0]["folder"]


def shares_of(model: Any, tokens: Tensor) -> dict[str, list[float]]:
    """Return the share of attention on the first token, mean over heads, of every layer.

    "standard" are the weights of the dot product (those of Krause attention, if there is no other),
    "mixed" those of both branches, each times its share of the gate; "head" is the largest share of
    a head in "standard".
    """
    gates: list[float] = []
    hooks = [
        layer.gate.register_forward_pre_hook(
            lambda gate, given: gates.append(float(gate.shares(*given)[..., 0].mean()))
        )
        for layer in model.modules()
        if isinstance(layer, ga.nn.GatedKrauseAttention)
    ]
    try:
        values, names = ga.diagnostics.sinks_per_layer(model.eval(), tokens)
    finally:
        for hook in hooks:
            hook.remove()
    is_beside = torch.tensor([name.endswith(".krause") for name in names])
    head = [float(values[~is_beside].max())]
    standard, beside = (values[rows].mean(1).tolist() for rows in (~is_beside, is_beside))
    if not gates:
        return {"standard": standard, "mixed": standard, "head": head}
    mixed = [g * a + (1 - g) * b for g, a, b in zip(gates, standard, beside, strict=True)]
    return {"standard": standard, "mixed": mixed, "head": head}


def judged(runs: list[dict[str, Any]]) -> tuple[Verdict, str]:
    """Return the verdict from "arm", "loss" and "head" (the largest share) of every run."""
    own = {arm: [run for run in runs if run["arm"] == arm] for arm in ("continued", "shortcut")}
    if min(len(each) for each in own.values()) < SEEDS:
        return "open", f"{sum(len(each) for each in own.values())} of {2 * SEEDS} runs are done."
    peak = {arm: statistics.fmean(run["head"][0] for run in each) for arm, each in own.items()}
    loss = {arm: statistics.fmean(run["loss"] for run in each) for arm, each in own.items()}
    behind = loss["shortcut"] - loss["continued"]
    why = (
        f"The largest share of a head is {peak['shortcut']:.3f} with the shortcut and "
        f"{peak['continued']:.3f} without ({UNIFORM:.3f} with equal weights), at a loss that "
        f"differs by {behind:+.3f} nats."
    )
    if peak["continued"] < SINK * UNIFORM:
        return "inconclusive", why
    held = peak["shortcut"] <= FALLS * peak["continued"] and behind <= WORSE
    return ("held" if held else "not held"), why


def measure(arguments: Namespace) -> Findings:
    work = Path(arguments.work)
    shared = {**SHARED, "data": str(marked_text(Path(arguments.data), work))}
    base = run_arms(arguments, BASE, [RATE], SEEDS, shared)
    arms = {
        name: Arm(arm.mixer, arm.options, arm.window, arm.config, partial(tuned, work=work))
        for name, arm in ARMS.items()
    }
    ready = {row["seed"] for row in base if row["status"] == "finished"}
    rows = run_arms(arguments, arms, [TUNING_RATE], SEEDS, shared) if len(ready) == SEEDS else []
    config = ga.train.RunConfig(**shared, mixer="dot")
    validation = ga.train.prepare(config).validation
    assert validation is not None
    tokens = torch.stack([validation[i]["tokens"] for i in range(MEASURED)])
    runs = []
    for row in [*base, *rows]:
        if row["status"] == "finished":
            folder = work / row["arm"] / row["folder"]

            def find(folder: Path = folder) -> dict[str, list[float]]:
                return shares_of(ga.train.load_trained(folder).model, tokens)

            shares = once(arguments, work / f"shares, {row['arm']}, {row['seed']}.json", find)
            if shares is None:
                continue
            runs.append({"arm": row["arm"], "seed": row["seed"], "loss": row["loss"], **shares})
    equal, seconds = {}, {}
    if len(kept(rows)) == len(ARMS) * SEEDS:
        seconds = seconds_per_step(arguments, arms, shared)
        equal = losses_in_time(rows, seconds)
    numbers = []
    for arm in [*BASE, *ARMS]:
        own = [run for run in runs if run["arm"] == arm]
        if not own:
            continue
        largest = [run["head"][0] for run in own]
        columns = {"loss": [run["loss"] for run in own]}
        columns["share on the first token, largest head"] = largest
        for which in ("standard", "mixed"):
            for layer in range(SMALL["depth"]):
                column = f"share on the first token, {which}, layer {layer + 1}"
                columns[column] = [run[which][layer] for run in own]
        columns["loss at equal CPU seconds"] = equal.get(arm, [])
        columns["CPU seconds of a step"] = [seconds[arm]] if arm in seconds else []
        numbers += [summary(arm, name, found) for name, found in columns.items() if found]

    def draw(ax: Any) -> None:
        for number, arm in enumerate([*BASE, *ARMS]):
            for place, run in enumerate([run for run in runs if run["arm"] == arm]):
                layers = list(range(1, len(run["standard"]) + 1))
                ax.set_xticks(layers)
                ax.plot(layers, run["standard"], "o-", color=f"C{number}", alpha=0.7,
                        label=None if place else arm)  # fmt: skip
        ax.axhline(UNIFORM, color="k", linestyle="--", label="equal weights")
        ax.set(xlabel="layer", ylabel="share of attention on the first token (standard branch)")
        ax.legend()

    verdict, why = judged(runs)
    return Findings(
        numbers=numbers,
        verdict=verdict,
        why=why,
        runs=runs,
        seeds=list(range(SEEDS)),
        cpu_hours=cpu_hours([*base, *rows]),
        draw=draw if numbers else None,
        columns=("value", "deviation"),
    )


if __name__ == "__main__":
    main(EXPERIMENT, measure)
