"""Do models whose queries are scaled (SQ) generalise better than models whose products are (SDP)?

SDP, SQ and queries scaled in place are pre-trained by masked letters of proteins, and then learn
the organism of a protein, as in Table 1, where the data are texts.
"""

from __future__ import annotations

import itertools
import statistics
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from controls import with_scaled_queries
from evidence import Experiment, Findings, Verdict, main
from rates import SMALL, Arm, cpu_hours, spread, summary, train

import graphattn as ga
from graphattn.train.runs.checkpoints import load_weights

SEEDS = 3
ORGANISMS = ("hyopneumoniae", "gallisepticum", "agalactiae")
LENGTH = 128
WINDOW = {"mixer": "dot-window", "window": 16}
ARMS = {
    "sdp": Arm("dot-window", {"scaling": "sdp"}),
    "sq": Arm("dot-window", {"scaling": "sdp"}, change=with_scaled_queries),
    "sq_inplace": Arm("dot-window", {"scaling": "sq_inplace"}),
}
BOTH: dict[str, Any] = {
    "kind": "text",
    "tokenizer": "characters",
    "length": LENGTH,
    "split": "record",
    "validation": 0.2,
    "test": 0.0,
    "validation_tokens": 0,
    "batch_tokens": 2048,
    "warmup_steps": 50,
    "schedule": "cosine",
    "log_every": 50,
}
PRETRAINING: dict[str, Any] = {
    **BOTH,
    **WINDOW,
    "model": "encoder-1m",
    "model_options": SMALL,
    "objective": "masked",
    "steps": 800,
    "lr": 1e-3,
}
FINE_TUNING: dict[str, Any] = {**BOTH, "objective": "classification", "steps": 300, "lr": 5e-4}
FILES = {
    f"protein/mycoplasma_{name}.fasta": f"the proteins of Mycoplasma {name}" for name in ORGANISMS
}

EXPERIMENT = Experiment(
    name="scaling_in_place",
    title="Scaled queries and scaled products",
    paper="Attention Clusters, Section 4, Table 1 and Figure 11",
    claim="Scaling the queries (SQ) instead of the products (SDP) is an architectural choice. "
    "Models with SQ have a slightly higher loss in pre-training (2.267, SDP 2.253) and generalise "
    "better: +0.8 points of accuracy on IMDB and +2.5 on SST-2, means of two runs.",
    prediction="The claim holds if the accuracy of SQ on held-out proteins is above that of SDP by "
    "more than two standard deviations over three seeds (the larger of the two arms' deviations). "
    "We expect it to fail, because (q / sqrt(D)) . k is (q . k) / sqrt(D): with equal weights, the "
    "outputs of both layers differ by 0.0 where sqrt(D) is a power of two, as in the trained "
    "models, and by rounding elsewhere.",
    refuted_if="Accuracies that differ by at most two deviations, or SQ worse than SDP. Beside "
    "this, we look for the pattern of Table 1 in queries scaled in place: a higher masked loss and "
    "a higher accuracy than SDP, each by more than two deviations. It decides nothing about SQ.",
    config={
        "arms": {name: arm.options for name, arm in ARMS.items()},
        "seeds": SEEDS,
        "pretraining": PRETRAINING,
        "fine_tuning": FINE_TUNING,
        "files": FILES,
    },
    notes="The paper pre-trains on WikiText-2 and learns the sentiment of film reviews; we have no "
    "such texts. We take the first 128 letters of 2,257 proteins of three organisms, which differ "
    "in composition and in sequence; 20 % of the proteins are held out, the same in both phases. "
    "The numbers are those of the last step, so held-out data choose nothing in fine-tuning; its "
    "start is the pre-trained model at its last step, too. All arms take the same steps and "
    "the same learning rates. With projections, scaling in place is SDP with weights of another "
    "size at the start and another effective learning rate, so its result is about these rates "
    "only. The three arms cost the same per step, up to one division: equal steps are equal "
    "compute; the table shows the seconds of a run.",
)


def at_equal_weights(dim: int, heads: int) -> float:
    """Return the largest difference of the outputs of SDP and SQ with the same weights."""
    torch.manual_seed(0)
    layer = ga.nn.DotProductAttention(dim, heads)
    x, graph = torch.randn(4, LENGTH, dim), ga.window_path_graph(LENGTH, 16, self_loops=True)
    with torch.no_grad():
        product = layer(x, graph)
        return float((product - with_scaled_queries(layer)(x, graph)).abs().max())


def table_of_proteins(data: Path, file: Path) -> None:
    """Write the first letters and the organism of every protein."""
    lines = ["text\tlabel"]
    for organism, name in zip(ORGANISMS, FILES, strict=True):
        for record in ga.data.read_fasta(data / name):
            lines.append(f"{record.sequence[:LENGTH]}\t{organism}")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


def one_run(arguments: Namespace, name: str, seed: int) -> dict[str, Any] | None:
    """Train and fine-tune one model, or read it if it is there."""
    arm, work = ARMS[name], Path(arguments.work)
    folders = [work / name / f"{phase}-{seed}" for phase in ("masked", "classes")]
    if arguments.partial and not all((folder / "model").is_dir() for folder in folders):
        return None
    file = work / "proteins.tsv"
    if not file.is_file():
        table_of_proteins(Path(arguments.data), file)
    every: dict[str, Any] = {"data": str(file), "seed": seed, "save_every": 100}

    def config(phase: dict[str, Any], **more: Any) -> ga.train.RunConfig:
        return ga.train.RunConfig(**phase, **every, evaluate_every=phase["steps"], **more)

    first = config(PRETRAINING, mixer_options=arm.options, out=str(folders[0]))
    runs = [train(arm, first)]
    start = work / name / f"start-{seed}"  # a folder with config, which other layers do not have
    if not start.is_dir():
        model = ga.train.prepare(first).model
        load_weights(model, folders[0] / "model" / "model.safetensors")
        ga.save(model, start)
    runs.append(train(arm, config(FINE_TUNING, model=str(start), out=str(folders[1]))))
    last = [run.evaluations[-1] for run in runs]
    found = {
        "arm": name,
        "seed": seed,
        "masked": last[0]["loss"],
        "accuracy": last[1]["accuracy"],
        "seconds": sum(run.info["seconds"] for run in runs),
    }
    print(found, flush=True)
    return found


def judged(rows: list[dict[str, Any]], equal: float) -> tuple[Verdict, str]:
    """Decide from a row per run, and the difference at equal weights."""
    own = {arm: [row for row in rows if row["arm"] == arm] for arm in ARMS}
    if min(map(len, own.values())) < SEEDS:
        return "open", f"{len(rows)} of {SEEDS * len(ARMS)} runs are done."

    def above(arm: str, measure: str) -> tuple[float, float]:
        values = [[row[measure] for row in own[name]] for name in (arm, "sdp")]
        deviation = max(spread(each) or 0.0 for each in values)
        return statistics.fmean(values[0]) - statistics.fmean(values[1]), deviation

    gain, deviation = above("sq", "accuracy")
    parts = [f"SQ minus SDP: accuracy {gain:+.4f} (deviation {deviation:.4f})"]
    parts.append(f"masked loss {above('sq', 'masked')[0]:+.4f}")
    parts.append(f"outputs at equal weights differ by {equal:g}")
    changes = {measure: above("sq_inplace", measure) for measure in ("accuracy", "masked")}
    pattern = all(difference > 2 * noise for difference, noise in changes.values())
    parts.append(
        "in place minus SDP: "
        + ", ".join(f"{k} {d:+.4f} (deviation {s:.4f})" for k, (d, s) in changes.items())
    )
    shows = "shows" if pattern else "does not show"
    why = f"{'; '.join(parts)}. Scaling in place {shows} the pattern of Table 1."
    return ("held" if gain > 2 * deviation else "not held"), why


def measure(arguments: Namespace) -> Findings:
    found = [one_run(arguments, name, seed) for seed in range(SEEDS) for name in ARMS]
    rows = [row for row in found if row is not None]
    equal, other = at_equal_weights(64, 4), at_equal_weights(72, 3)
    numbers = []
    for key, name in itertools.product(("masked", "accuracy", "seconds"), ARMS):
        if own := [row[key] for row in rows if row["arm"] == name]:
            numbers.append(summary(name, key, own))
    for width, difference in ((16, equal), (24, other)):
        setting = f"largest difference from SDP at equal weights, heads of width {width}"
        numbers.append(summary("sq", setting, [difference]))

    def draw(ax: Any) -> None:
        for number, name in enumerate(ARMS):
            own = [row for row in rows if row["arm"] == name]
            ax.plot([row["masked"] for row in own], [row["accuracy"] for row in own],
                    "osx"[number], label=name, fillstyle="none")  # fmt: skip
        ax.set(xlabel="masked loss (nats per letter)", ylabel="accuracy after fine-tuning")
        ax.legend()

    verdict, why = judged(rows, equal)
    return Findings(
        numbers=numbers,
        verdict=verdict,
        why=why,
        runs=rows,
        seeds=sorted({row["seed"] for row in rows}),
        cpu_hours=cpu_hours(rows),
        draw=draw,
        columns=("mean over seeds", "deviation"),
    )


if __name__ == "__main__":
    main(EXPERIMENT, measure)
