"""Does consensus train better on a graph that its tokens choose than on the window-path graph?"""

from __future__ import annotations

from argparse import Namespace
from functools import partial
from typing import Any

import torch
from consensus_text_diffusion import FILE, SHARED
from costs import at_equal_cost, measure_in_equal_time
from evidence import Experiment, Findings, Verdict, main
from rates import (
    Arm,
    config_of,
    losses_at,
    means,
    spread,
)
from sweep_claims import OPTIONS
from torch import Tensor, nn

import graphattn as ga

LR = 3.162e-3
SEEDS = 3
TARGET = 0.015  # Fiedler value for 128 tokens
WINDOW = ga.spectral.window_for_fiedler(SHARED["length"], TARGET)
SOURCES = 2 * WINDOW
CANDIDATES = 16  # tokens on each side


class Neighbours(ga.nn.SelfConsensus):
    """Consensus between each token, its `k` nearest tokens, and those of a window (0: none).

    The distance is that of the layer's input, so every layer has its own graph.
    """

    def __init__(self, *args: Any, k: int, window: int = 0, **options: Any) -> None:
        super().__init__(*args, **options)
        self.k, self.window = k, window

    def forward(self, x: Tensor, graph: Any, **_: Any) -> Tensor:
        B, N, _dim = x.shape
        tokens = x.flatten(0, 1)
        whole = ga.batch([ga.complete_graph(N)] * B)
        chosen = ga.knn_graph(tokens.detach(), self.k, within=whole)
        if self.window:
            chosen = ga.union(chosen, ga.batch([ga.window_path_graph(N, self.window)] * B))
        return super().forward(tokens, chosen).view_as(x)


class ScoredWindow(ga.nn.SelfConsensus):
    """Consensus between each token and the `k` tokens of a window with the best learned scores."""

    def __init__(self, dim: int, *, k: int, window: int, **options: Any) -> None:
        super().__init__(dim, edge_features=1, **options)
        self.k, self.score = k, nn.Linear(dim, 2 * window + 1)

    def forward(self, x: Tensor, graph: Any, **_: Any) -> Tensor:
        scores = self.score(x)
        itself = torch.arange(scores.shape[-1], device=x.device) == scores.shape[-1] // 2
        scores = scores.masked_fill(itself, -torch.inf)
        chosen, kept = ga.scored_window_graph(scores, self.k, return_scores=True)
        out = super().forward(x.flatten(0, 1), chosen, edge_features=kept[:, None])
        return out.view_as(x)


def with_layers(
    model: ga.models.SequenceEncoder, seed: int, *, kind: type[nn.Module], **options: Any
) -> nn.Module:
    """Make a model as `model`, with consensus layers of a class of this file."""
    torch.manual_seed(seed)
    config = dict(model.config)
    dim, depth, heads = (config[name] for name in ("dim", "depth", "heads"))
    made = [kind(dim, heads=heads, rope=True, **OPTIONS, **options) for _ in range(depth)]
    config |= {"mixer": made, "mixer_options": None}
    return ga.models.SequenceEncoder(**config)


def arm(kind: type[nn.Module], **options: Any) -> Arm:
    change = partial(with_layers, kind=kind, **options)
    return Arm("consensus", OPTIONS, window=WINDOW, change=change)


ARMS = {
    "path": Arm("consensus", OPTIONS, window=WINDOW),
    "neighbours": arm(Neighbours, k=SOURCES),
    "path and neighbours": arm(Neighbours, k=SOURCES // 2, window=WINDOW // 2),
    "short path, one neighbour": arm(Neighbours, k=1, window=1),
    "scored window": arm(ScoredWindow, k=SOURCES, window=CANDIDATES),
}
OF_TRAINING = {**SHARED, "evaluate_every": 50}
LEARNED = [name for name in ARMS if name != "path"]

EXPERIMENT = Experiment(
    name="learned_graphs",
    title="Consensus on graphs that the tokens choose",
    paper="Stabilizing Transformer Training Through Consensus, Section 6 names learned graphs as "
    "future work; the experiment is ours",
    claim="A graph that connects similar tokens lets consensus learn more, at equal cost, than "
    "the window-path graph.",
    prediction="For text, none does: no learned graph has a mean loss that is below that of the "
    "path by more than two standard deviations over seeds of the path (at least 0.01 nats), both "
    "after equal steps and after equal time.",
    refuted_if="The claim is refuted if the prediction holds. The prediction is refuted, and the "
    "claim holds, if one learned graph is better by that much after equal steps and after equal "
    "time.",
    config={
        **config_of(ARMS, [LR], OF_TRAINING, FILE, "1.1 MB of Shakespeare's plays"),
        "graphs": {
            name: made.change.keywords | {"kind": made.change.keywords["kind"].__name__}
            for name, made in ARMS.items()
            if isinstance(made.change, partial)
        },
    },
    notes="The window is the smallest whose path graph of 128 tokens has a Fiedler value of at "
    f"least {TARGET:g}. Neighbours, and the scored window, have as many sources per token as the "
    "path. 'Path and neighbours' is half of each. A path to the next token with one random "
    "neighbour more has a Fiedler value of 0.3 with three sources per token in place of eight; "
    "'short path, one neighbour' has that size. Neighbours are chosen again in every layer, by "
    "the distance of its input; the choice itself has no gradient. Scores of a window are a "
    "linear function of the target token, and the edge networks read them. Time is CPU time: the "
    "least of 15 steps of every arm, measured in turns.",
)


def judged(rows: list[dict[str, Any]], costs: dict[str, float]) -> tuple[Verdict, str]:
    counts = [len(losses_at(rows, name, LR)) for name in ARMS]
    if min(counts) < SEEDS:
        return "open", f"{sum(counts)} of {SEEDS * len(counts)} runs are done."
    path = means(rows, "path")[LR]
    enough = max(2 * (spread(losses_at(rows, "path", LR)) or 0.0), 0.01)
    parts, better = [], False
    for name in LEARNED:
        loss = means(rows, name)[LR]
        pair = at_equal_cost(rows, costs, name, "path", SHARED["steps"])
        better = better or max(loss - path, pair.loss - pair.other) < -enough
        parts.append(f"{name} {loss - path:+.3f} ({pair.loss - pair.other:+.3f} in equal time)")
    why = (
        f"The path has {path:.3f} nats. Beside it: {', '.join(parts)}. A "
        f"difference counts from {enough:.3f}."
    )
    return ("held" if better else "not held"), why


def measure(arguments: Namespace) -> Findings:
    return measure_in_equal_time(arguments, ARMS, [LR], SEEDS, OF_TRAINING, FILE, judged)


if __name__ == "__main__":
    main(EXPERIMENT, measure)
