"""Figures of graphs, weights, filters and training; needs matplotlib (the extra `plots`).

Every function draws on the matplotlib axes `ax`, or on new ones, and returns them: titles, limits
and files stay in the caller's hands.
"""

from graphattn.plot.filters import filter_response
from graphattn.plot.matrices import adjacency, attention_weights
from graphattn.plot.training import loss_curves

__all__ = ["adjacency", "attention_weights", "filter_response", "loss_curves"]
