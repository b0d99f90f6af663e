"""Figures of graphs, weights, filters, training and benchmarks; needs matplotlib (extra `plots`).

Every function draws on the matplotlib axes `ax`, or on new ones, and returns them: titles, limits
and files stay in the caller's hands.
"""

from graphattn.plot.benchmarks import benchmark_ratios, benchmark_scaling
from graphattn.plot.filters import filter_response
from graphattn.plot.matrices import adjacency, attention_weights
from graphattn.plot.training import loss_curves

__all__ = [
    "adjacency",
    "attention_weights",
    "benchmark_ratios",
    "benchmark_scaling",
    "filter_response",
    "loss_curves",
]
