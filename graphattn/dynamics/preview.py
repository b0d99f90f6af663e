"""Comparison of an attention pattern with global attention, without training."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from graphattn.dynamics.arguments import as_labels, as_tokens, contingency
from graphattn.dynamics.clusters import cluster
from graphattn.dynamics.scores import fragmentation, label_accuracy, silhouette
from graphattn.dynamics.simulate import Scaling, simulate, standardize
from graphattn.graphs.arguments import as_int
from graphattn.graphs.builders.windows import complete_graph
from graphattn.graphs.token_graph import TokenGraph, as_token_graph


@dataclass(frozen=True)
class PatternScores:
    """Scores of one pattern after the last step.

    Attributes:
        num_edges: the number of edges of the graph, which is the cost of the pattern.
        num_clusters: the number of clusters of the standardised update.
        silhouette: the silhouette of these clusters; NaN for one cluster.
        clusters_per_label: the number of clusters in which tokens of a label are, the mean over
            labels. Without given labels, the clusters of global attention are the labels.
        largest_share: the share of a label's tokens in its largest cluster, the mean over labels.
        leading_share: the share of the variance of X along its leading direction.
        accuracy: the accuracy of the best map from clusters to the given labels; None without
            labels.
    """

    num_edges: int
    num_clusters: int
    silhouette: float
    clusters_per_label: float
    largest_share: float
    leading_share: float
    accuracy: float | None


@dataclass(frozen=True)
class Preview:
    """The result of :func:`preview`, which ``print`` shows as a table.

    Attributes:
        pattern: scores of the given pattern.
        baseline: scores of global attention.
        agreement: the adjusted Rand index of both clusterings: 1 if they are equal, and about 0 if
            they agree by chance.
        steps: the number of steps.
        from_labels: whether `clusters_per_label` and `largest_share` are those of given labels.
    """

    pattern: PatternScores
    baseline: PatternScores
    agreement: float
    steps: int
    from_labels: bool

    def __str__(self) -> str:
        of = "label" if self.from_labels else "global cluster"
        names = {
            "num_edges": ("edges", "{:,}"),
            "num_clusters": ("clusters", "{:,}"),
            "silhouette": ("silhouette", "{:.3f}"),
            "clusters_per_label": (f"clusters per {of}", "{:.2f}"),
            "largest_share": (f"largest share of a {of}", "{:.3f}"),
            "leading_share": ("leading eigenvalue's share", "{:.3f}"),
            "accuracy": ("accuracy of the best map", "{:.3f}"),
        }
        after = f"after {self.steps:,} step" + "s" * (self.steps != 1)
        lines = [f"{after:36}{'pattern':>14}{'global':>14}"]
        for field, (name, form) in names.items():
            values = [getattr(scores, field) for scores in (self.pattern, self.baseline)]
            if None not in values:
                cells = [form.format(value) for value in values]
                lines.append(f"{name:36}{cells[0]:>14}{cells[1]:>14}")
        lines.append(f"{'agreement (adjusted Rand index)':36}{self.agreement:>14.3f}")
        return "\n".join(lines)


def preview(
    x: Tensor,
    graph: TokenGraph | Tensor,
    *,
    steps: int = 20,
    scaling: Scaling = "sdp",
    tolerance: float = 0.1,
    labels: Tensor | None = None,
    progress: bool = False,
) -> Preview:
    """Compare an attention pattern with global attention, without training.

    The tokens are standardised, and :func:`simulate` runs `steps` steps of dot-product attention,
    once over `graph`, and once over the complete graph with the same `scaling`. In both, the tokens
    of the last update are clustered by merging (:func:`cluster`). The result has the number,
    silhouette and fragmentation of the clusters, the leading eigenvalue's share of the variance,
    and the accuracy of the best map from clusters to `labels`. The adjusted Rand index says how
    similar the two clusterings are.

    This describes attention without weights. It does not predict which pattern trains better: that
    patterns similar to global attention do is a conjecture of the paper, which has no experiment.

    Source: Attention Clusters, Appendix B: "compare the resulting clusters and metrics (e.g.,
    silhouette score, fragmentation) directly against a global attention baseline".

    Args:
        x: tokens, [N, C]; they are standardised first (:func:`standardize`).
        graph: the graph of the pattern, N tokens.
        steps: T >= 1.
        scaling: "sdp", "sq" or "sq_inplace", as in :func:`simulate`.
        tolerance: the argument of :func:`cluster`, > 0.
        labels: the true label of every token, integers [N], if there are any.
        progress: whether progress bars are shown.

    Raises:
        ValueError: in the same cases as :func:`simulate` and :func:`cluster`.
        ImportError: if scikit-learn is missing, which computes silhouettes.

    Example:
        >>> import torch, graphattn as ga
        >>> x = torch.cat([torch.linspace(-3, -2, 32), torch.linspace(2, 3, 32)])[:, None].double()
        >>> print(ga.dynamics.preview(x, ga.block_window_graph(64, 16), steps=10))
        after 10 steps                             pattern        global
        edges                                        1,024         4,096
        ...
    """
    x = as_tokens("x", x)
    graph = as_token_graph(graph, len(x), len(x))
    steps = as_int("steps", steps, 1)
    truth = None if labels is None else as_labels("labels", labels, len(x))
    x = standardize(x)
    graphs = {"pattern": graph, "baseline": complete_graph(len(x)).to(x.device)}
    runs = {
        name: simulate(x, g, steps=steps, scaling=scaling, progress=progress)
        for name, g in graphs.items()
    }
    labels_of = {name: cluster(run.updates[-1], tolerance=tolerance) for name, run in runs.items()}
    scores = {}
    for name, run in runs.items():
        pieces = fragmentation(labels_of[name], labels_of["baseline"] if truth is None else truth)
        scores[name] = PatternScores(
            num_edges=graphs[name].num_edges,
            num_clusters=int(labels_of[name].max()) + 1,
            silhouette=silhouette(run.updates[-1], labels_of[name]),
            clusters_per_label=pieces.mean_clusters,
            largest_share=pieces.mean_largest_share,
            leading_share=float(run.leading_share[-1]),
            accuracy=None if truth is None else label_accuracy(labels_of[name], truth),
        )
    return Preview(
        pattern=scores["pattern"],
        baseline=scores["baseline"],
        agreement=adjusted_rand_index(labels_of["pattern"], labels_of["baseline"]),
        steps=steps,
        from_labels=truth is not None,
    )


def adjusted_rand_index(a: Tensor, b: Tensor) -> float:
    """Compute the adjusted Rand index of two clusterings (Hubert and Arabie, 1985)."""
    counts = contingency(a, b).double()

    def pairs(n: Tensor) -> float:
        return float((n * (n - 1) / 2).sum())

    together = pairs(counts)
    in_a, in_b = pairs(counts.sum(dim=1)), pairs(counts.sum(dim=0))
    everything = pairs(counts.sum())
    expected = in_a * in_b / everything if everything else 0.0
    most = (in_a + in_b) / 2
    return 1.0 if most == expected else (together - expected) / (most - expected)
