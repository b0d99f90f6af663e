"""The spectrum of a token graph: how fast consensus mixes, and how large a step it bears.

Everything here is about the Laplacian of the symmetrised weights, which gives the energy of a
directed graph exactly (see :func:`laplacian`)::

    ga.spectral.fiedler_value(graph)    # lambda_1: the rate of mixing; 0 when disconnected
    ga.spectral.max_step_size(graph)    # 1 / (2 lambda_max): the largest non-oscillating step
    ga.spectral.energy(graph, signal)   # what consensus descends
"""

from graphattn.spectral.bounds import cycle_fiedler_value, path_fiedler_bounds
from graphattn.spectral.eigenvalues import fiedler_value, max_eigenvalue, max_step_size
from graphattn.spectral.energy import energy
from graphattn.spectral.laplacian import laplacian

__all__ = [
    "cycle_fiedler_value",
    "energy",
    "fiedler_value",
    "laplacian",
    "max_eigenvalue",
    "max_step_size",
    "path_fiedler_bounds",
]
