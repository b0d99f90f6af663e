"""How many clusters are certain at the start, and how many are there in the end?"""

from __future__ import annotations

import statistics
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from evidence import Experiment, Findings, Verdict, main, once
from rates import spread
from torch import Tensor

import graphattn as ga

STARTS, STEPS = 50, 400  # starts of every setting; steps of a flow
CHECKED = (0, 5, 20, 80)  # steps after which the certificate is asked
BLOBS = 4
SIZES = {"k": (1, 0), "2 k - 1": (2, -1), "3 k": (3, 0)}  # tokens of a group; below 2 k it is one
SEPARATIONS = (0.0, 8.0, 64.0)  # distance scale of the centres, in deviations of a group
KS = (2, 4)
DIMENSIONS = (1, 4)
APART, LATE = 0.9, 0.9  # shares of flows
FIRST_SEED = 1000
SIGMA = 100.0  # larger than most distances, so weights are nearly equal
SAME = 1e-10  # of the spread at the start; certified groups are farther apart

EXPERIMENT = Experiment(
    name="krause_persistence",
    title="Clusters that are certain before the flow starts",
    paper="Beyond the papers: ga.dynamics.persistent_groups. Krause Synchronization Transformers "
    "proves that groups out of each other's reach stay apart, and assumes that they are",
    claim="Groups of at least k tokens, whose convex hulls are farther apart than the diameter of "
    "either, never join under top-k attention by distance. So their number can be certified at the "
    "start.",
    prediction="In 1,800 flows, the number of groups certified at step 0, 5, 20 or 80 is never "
    "above the number of different points after 400 steps, and no token attends to another "
    "certified group in the end. For groups of k or 2 k - 1 tokens whose centres have a "
    "deviation of 64, the number certified at the start is that of the end in at least 90 % of "
    "the flows. Over all flows, the number certified after 80 steps is that of the end in at least "
    "90 %: by then, the certificate proves that the clusters are final.",
    refuted_if="One flow with a certified number above the final one or with attention between "
    "certified groups (then the theorem or its program is wrong), or one of the two shares below "
    "90 %.",
    config={
        "starts": STARTS,
        "first_seed": FIRST_SEED,
        "sigma": SIGMA,
        "steps": STEPS,
        "checked": list(CHECKED),
        "groups": BLOBS,
        "sizes": list(SIZES),
        "separations": list(SEPARATIONS),
        "k": list(KS),
        "dimensions": list(DIMENSIONS),
    },
    notes="The paper has no such certificate. Starts are 4 groups with normal noise of deviation "
    "1, around centres that are normal with the deviation of the separation; separation 0 is one "
    "cloud. Flows have steps of size 0.5 on the complete graph, and a bandwidth of 100, so that "
    "weights are nearly equal. (With a bandwidth of 1, tokens far from their nearest would take "
    "longer than any simulation.) A set of tokens that attends to nothing outside has at least k "
    "tokens, so a group of 2 k - 1 tokens cannot split into two, while one of 3 k tokens can: "
    "then, fewer are certified at the start than there are in the end. Points within 1e-10 of "
    "the spread at the start count as equal. The certificate is about tokens that are queries, "
    "keys and values at once, so it says nothing about trained layers; krause_heads counts what "
    "their weights do. Before this prediction, 3 other starts of every setting were run, in "
    "which the two shares were 100 % and 98 %.",
)


def start_of(k: int, size: str, separation: float, dimension: int, seed: int) -> Tensor:
    """Draw the tokens of a start, [N, C]."""
    times, more = SIZES[size]
    count = times * k + more
    random = torch.Generator().manual_seed(seed)
    centres = separation * torch.randn(BLOBS, dimension, generator=random, dtype=torch.float64)
    noise = torch.randn(BLOBS * count, dimension, generator=random, dtype=torch.float64)
    return centres.repeat_interleave(count, 0) + noise


def links_of(x: Tensor, k: int) -> Tensor:
    """Return whether token j is one of the k nearest of token i, bool [N, N], ties by index."""
    distance = (x[:, None] - x).square().sum(-1)
    near = distance.argsort(dim=1, stable=True)[:, :k]
    return torch.zeros_like(distance, dtype=torch.bool).scatter(1, near, True)


def flow_of(x: Tensor, k: int) -> dict[str, Any]:
    """Return the certified numbers, the final one, and whether certified groups attend to another.

    Who attends to whom in the end is found by sorting all distances, independently of the flow.
    """
    flow = ga.dynamics.krause_flow(x, sigma=SIGMA, top_k=k, steps=STEPS)
    labels = [ga.dynamics.persistent_groups(flow.states[step], k) for step in CHECKED]
    links = links_of(flow.states[-1], k)
    crossing = any(bool((links & (own[:, None] != own)).any()) for own in labels)
    final = flow.num_clusters(tolerance=SAME)
    return {"certified": [int(own.max()) + 1 for own in labels], "final": final,
            "crossing": crossing}  # fmt: skip


def judged(runs: Sequence[dict[str, Any]], planned: int) -> tuple[Verdict, str]:
    flows = [flow for run in runs for flow in run["flows"]]
    wrong = sum(flow["crossing"] or max(flow["certified"]) > flow["final"] for flow in flows)
    apart = [
        flow["certified"][0] == flow["final"]
        for run in runs
        if run["size"] != "3 k" and run["separation"] == max(SEPARATIONS)
        for flow in run["flows"]
    ]
    late = [flow["certified"][-1] == flow["final"] for flow in flows]
    if not apart:
        return "open", f"{len(runs)} of {planned} settings are done."
    why = (
        f"{wrong} of {len(flows)} flows contradict the theorem. The number certified at the start "
        f"is the final one in {statistics.fmean(apart):.0%} of the flows of small groups far "
        f"apart, and that after {CHECKED[-1]} steps in {statistics.fmean(late):.0%} of all flows."
    )
    if wrong:
        return "not held", why
    if len(runs) < planned:
        return "open", f"{len(runs)} of {planned} settings are done. {why}"
    enough = statistics.fmean(apart) >= APART and statistics.fmean(late) >= LATE
    return ("held" if enough else "not held"), why


def measure(arguments: Namespace) -> Findings:
    torch.set_num_threads(1)
    settings = [(k, size, separation, dimension) for k in KS for size in SIZES
                for separation in SEPARATIONS for dimension in DIMENSIONS]  # fmt: skip
    runs = []
    for k, size, separation, dimension in settings:
        name = f"k {k}, size {size}, separation {separation:g}, {dimension} dimensions"
        setting = {"k": k, "size": size, "separation": separation, "dimension": dimension}

        def find(setting: dict[str, Any] = setting) -> dict[str, Any]:
            began = time.process_time()
            flows = [flow_of(start_of(**setting, seed=seed), setting["k"])
                     for seed in range(FIRST_SEED, FIRST_SEED + STARTS)]  # fmt: skip
            return {**setting, "flows": flows, "seconds": time.process_time() - began}

        run = once(arguments, Path(arguments.work) / f"{name}.json", find)
        if run is not None:
            runs.append({"name": name, **run})
            print(name, f"{runs[-1]['seconds']:.0f} s", flush=True)
    numbers = []
    for run in runs:
        columns = {f"certified at step {step}": [flow["certified"][place] for flow in run["flows"]]
                   for place, step in enumerate(CHECKED)}  # fmt: skip
        columns["in the end"] = [flow["final"] for flow in run["flows"]]
        for column, counts in columns.items():
            numbers.append({"mechanism": column, "setting": run["name"], "seeds": len(counts),
                            "mean": statistics.fmean(counts),
                            "spread": spread(counts)})  # fmt: skip

    def draw(ax: Any) -> None:
        for number, step in enumerate(CHECKED):
            x = [statistics.fmean(flow["final"] for flow in run["flows"]) for run in runs]
            y = [statistics.fmean(f["certified"][number] for f in run["flows"]) for run in runs]
            ax.plot(x, y, "o", label=f"step {step}", alpha=0.7)
        highest = max(x)
        ax.plot([1, highest], [1, highest], "k--", label="equal")
        ax.set(xlabel="clusters in the end (mean of a setting)", ylabel="certified clusters (mean)")
        ax.legend()

    verdict, why = judged(runs, len(settings))
    return Findings(
        numbers=numbers,
        verdict=verdict,
        why=why,
        runs=runs,
        seeds=list(range(FIRST_SEED, FIRST_SEED + STARTS)),
        cpu_hours=sum(run["seconds"] for run in runs) / 3600,
        draw=draw if runs else None,
        columns=("number of clusters", "deviation"),
    )


if __name__ == "__main__":
    main(EXPERIMENT, measure)
