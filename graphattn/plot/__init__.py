"""Figures of graphs, weights, spectra, clusters, training; needs matplotlib (extra `plots`).

Every function draws on the matplotlib axes `ax`, or on new axes, and returns the axes (a list of
them for :func:`model_graphs`). You can then set titles and limits and save the figure.
"""

from graphattn.plot.benchmarks import benchmark_ratios, benchmark_scaling
from graphattn.plot.clusters import (
    cluster_counts,
    cluster_image,
    cluster_scatter,
    covariance_spectra,
)
from graphattn.plot.communication import communication_plan
from graphattn.plot.diagnostics import (
    attention_ablation,
    bandwidth_lines,
    bandwidth_map,
    class_token_attention,
    effective_ranks,
    off_diagonal_attention,
    patch_attention,
    sink_shares,
)
from graphattn.plot.matrices import adjacency, attention_weights
from graphattn.plot.models import model_graphs
from graphattn.plot.runs import (
    layer_curves,
    learning_rates,
    loss_curves,
    reliability_diagram,
    training_curves,
)
from graphattn.plot.spectra import (
    filter_response,
    laplacian_spectrum,
    path_fiedler_values,
    theorem_margins,
)
from graphattn.plot.structures import structure_attention
from graphattn.plot.sweeps import sweep_curves

__all__ = [
    "adjacency",
    "attention_ablation",
    "attention_weights",
    "bandwidth_lines",
    "bandwidth_map",
    "benchmark_ratios",
    "benchmark_scaling",
    "class_token_attention",
    "cluster_counts",
    "cluster_image",
    "cluster_scatter",
    "communication_plan",
    "covariance_spectra",
    "effective_ranks",
    "filter_response",
    "laplacian_spectrum",
    "layer_curves",
    "learning_rates",
    "loss_curves",
    "model_graphs",
    "off_diagonal_attention",
    "patch_attention",
    "path_fiedler_values",
    "reliability_diagram",
    "sink_shares",
    "structure_attention",
    "sweep_curves",
    "theorem_margins",
    "training_curves",
]
