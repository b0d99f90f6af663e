"""Does a token graph with several closed classes have less attention on the first token?"""

from __future__ import annotations

import statistics
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from costs import losses_in_time, seconds_per_step
from evidence import Experiment, Findings, Verdict, main, once
from krause_sinks import FALLS, FILE, LENGTH, MEASURED, SHARED, SINK, WINDOWS, WORSE, marked_text
from rates import Arm, config_of, cpu_hours, kept, run_arms, summary
from torch import Tensor, nn

import graphattn as ga

RATE, SEEDS, STEPS = 3e-3, 3, 800
LEADING, WINDOW = 8, 16  # tokens that all tokens see; keys of the window
CLASSES = (1, 4, LEADING)


def graph_of(classes: int) -> ga.TokenGraph:
    """Return a causal graph with a number of closed classes; 0 for a plain window.

    All tokens see the leading tokens and a window. The first `classes` of the leading tokens see
    only themselves, so that each is a closed class. The plain window is longer, for as many edges.
    """
    i = torch.arange(LENGTH)
    target, source = i[:, None], i
    if not classes:
        return ga.from_mask((source <= target) & (source > target - WINDOW - LEADING))
    mask = (source <= target) & ((source > target - WINDOW) | (source < LEADING))
    mask[:classes] = False
    mask[i[:classes], i[:classes]] = True
    return ga.from_mask(mask)


def over_graph(model: Any, seed: int, *, classes: int) -> nn.Module:
    """Let a model see this graph instead of its own, without a change of its weights."""
    graph = graph_of(classes)

    def give(_: nn.Module, args: Any, given: dict[str, Any]) -> Any:
        return args, {**given, "graph": graph}

    model.register_forward_pre_hook(give, with_kwargs=True)
    changed: nn.Module = model
    return changed


ARMS = {
    **{f"{classes} closed": Arm("dot", change=partial(over_graph, classes=classes))
       for classes in CLASSES},
    "window": Arm("dot", change=partial(over_graph, classes=0)),
}  # fmt: skip
TRAINING = {**SHARED, "steps": STEPS, "evaluate_every": 100}
EQUAL = float((1 / graph_of(1).in_degree()[LEADING:]).mean())  # share of a token, if equal

EXPERIMENT = Experiment(
    name="sinks_closed_classes",
    title="Attention on the first token, and closed classes of the graph",
    paper="Beyond the papers",
    claim="A causal graph has one closed class, the first token: repeated attention ends there, "
    "whatever the weights are. If several tokens see only themselves, each is a closed class, "
    "and attention has as many limits. So there is less reason for a sink in the first token.",
    prediction="All tokens see the 8 leading tokens and a window of 16. With 8 closed classes, "
    "the leading tokens see only themselves; with one, they also see those before them, which is "
    "all the difference. The share of a head is its mean weight on the first token, or on the 8 "
    "leading tokens together, over all other tokens; the largest head of a model is taken, and "
    "the mean over three seeds. With 8 closed classes, the share on the first token is at most "
    "0.8 times that with one, and so is the share on the 8 leading tokens (otherwise the sink is "
    "only divided among them). The validation loss is at most 0.02 nats higher.",
    refuted_if="One of the two shares above 0.8 times that with one closed class, or a loss with "
    "8 classes that is more than 0.02 nats higher. If the share on the first token with one "
    "class is below three times that of equal weights, there is no sink, and the experiment says "
    "nothing.",
    config={
        **config_of(ARMS, [RATE], TRAINING, FILE, "1.1 MB of Shakespeare's plays"),
        "leading": LEADING,
        "window": WINDOW,
        "windows": WINDOWS,
        "measured": MEASURED,
    },
    notes="The paper speaks of sinks and of closed groups, but does not connect them; this is "
    "our question. Models, text and the additional first token are those of krause_sinks, with "
    "800 steps. Graphs with one, 4 and 8 closed classes have 2,768 to 2,796 edges. In the plain "
    "window, which has one closed class too, most tokens do not see the first token, so its "
    "share is small by construction; it shows what the leading tokens do to the loss, and "
    "decides nothing. All graphs are lists of edges, so a step takes equally long with each; the "
    "table has the CPU seconds and the losses at equal seconds.",
)


def shares_of(model: Any, tokens: Tensor) -> dict[str, float]:
    """Return shares of attention of the largest head, and means over heads and layers.

    "first" is the share of the first token, "leading" that of all leading tokens, both over the
    tokens behind these.
    """
    with torch.no_grad(), ga.diagnostics.record_attention(model.eval()) as records:
        model(tokens)
    found: dict[str, float] = {}
    source, target = records[0].graph.edge_index
    for name, last in (("first", 1), ("leading", LEADING)):
        chosen = (source < last) & (target >= LEADING)
        heads = torch.stack([record.weights[:, chosen].sum(1).mean(0) for record in records])
        heads = heads / (LENGTH - LEADING)
        found |= {name: float(heads.max()), f"{name}, mean": float(heads.mean())}
    return found


def judged(runs: list[dict[str, Any]]) -> tuple[Verdict, str]:
    """Return the verdict from "arm", "loss", "first" and "leading" of every run."""
    one, several = "1 closed", f"{LEADING} closed"
    own = {arm: [run for run in runs if run["arm"] == arm] for arm in ARMS}
    if min(len(each) for each in own.values()) < SEEDS:
        return "open", f"{sum(len(each) for each in own.values())} of {len(ARMS) * SEEDS} are done."
    names = "first", "leading", "loss"
    mean = {arm: {name: statistics.fmean(run[name] for run in each) for name in names}
            for arm, each in own.items()}  # fmt: skip
    behind = mean[several]["loss"] - mean[one]["loss"]
    why = (
        f"Share of the largest head on the first token {mean[several]['first']:.3f} with {LEADING} "
        f"closed classes and {mean[one]['first']:.3f} with one ({EQUAL:.3f} with equal weights); "
        f"on the leading tokens {mean[several]['leading']:.3f} and {mean[one]['leading']:.3f}; "
        f"losses differ by {behind:+.3f} nats."
    )
    if mean[one]["first"] < SINK * EQUAL:
        return "inconclusive", why
    falls = all(mean[several][name] <= FALLS * mean[one][name] for name in ("first", "leading"))
    return ("held" if falls and behind <= WORSE else "not held"), why


def measure(arguments: Namespace) -> Findings:
    work = Path(arguments.work)
    shared = {**TRAINING, "data": str(marked_text(Path(arguments.data), work))}
    rows = run_arms(arguments, ARMS, [RATE], SEEDS, shared)
    validation = ga.train.prepare(ga.train.RunConfig(**shared, mixer="dot")).validation
    assert validation is not None
    tokens = torch.stack([validation[i]["tokens"] for i in range(MEASURED)])
    runs = []
    for row in rows:
        if row["status"] != "finished":
            continue
        arm, folder = ARMS[row["arm"]], work / row["arm"] / row["folder"]

        def find(arm: Arm = arm, folder: Path = folder) -> dict[str, float]:
            model: Any = ga.train.load_trained(folder).model
            assert arm.change is not None
            return shares_of(arm.change(model, 0), tokens)

        shares = once(arguments, work / f"shares, {row['arm']}, {row['seed']}.json", find)
        if shares is None:
            continue
        runs.append({"arm": row["arm"], "seed": row["seed"], "loss": row["loss"], **shares})
    equal, seconds = {}, {}
    if len(kept(rows)) == len(ARMS) * SEEDS:
        seconds = seconds_per_step(arguments, ARMS, shared)
        equal = losses_in_time(rows, seconds)
    numbers = []
    for arm_name in ARMS:
        own = [run for run in runs if run["arm"] == arm_name]
        names = "loss", "first", "leading", "first, mean", "leading, mean"
        columns = {name: [run[name] for run in own] for name in names}
        columns["loss at equal CPU seconds"] = equal.get(arm_name, [])
        columns["CPU seconds of a step"] = [seconds[arm_name]] if arm_name in seconds else []
        numbers += [summary(arm_name, name, found) for name, found in columns.items() if found]

    def draw(ax: Any) -> None:
        for number, name in enumerate(("first", "leading")):
            for arm_place, arm_name in enumerate(ARMS):
                y = [run[name] for run in runs if run["arm"] == arm_name]
                label = f"{name} token" if number == 0 else f"{LEADING} {name} tokens"
                ax.plot([arm_place] * len(y), y, "o", color=f"C{number}",
                        label=None if arm_place else label)  # fmt: skip
        ax.axhline(EQUAL, color="k", linestyle="--", label="one token, equal weights")
        ax.set_xticks(range(len(ARMS)), list(ARMS))
        ax.set(xlabel="graph (closed classes)", ylabel="share of attention, largest head")
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
        columns=("value", "deviation"),
    )


if __name__ == "__main__":
    main(EXPERIMENT, measure)
