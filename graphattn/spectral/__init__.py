"""The spectrum of a token graph: how fast consensus mixes, and how large its step may be.

All functions use the Laplacian of the symmetrised weights, because it gives the energy of a
directed graph exactly (see :func:`laplacian`)::

    ga.spectral.fiedler_value(graph)    # lambda_1: the rate of mixing; 0 if disconnected
    ga.spectral.max_step_size(graph)    # 1 / (2 lambda_max): the largest step without oscillation
    ga.spectral.energy(graph, signal)   # the energy that consensus reduces
    ga.spectral.certify(graph)          # all of these, and which theorems hold
    ga.spectral.steps_until_consensus(graph, step_size)
    ga.spectral.cheeger_bounds(graph)   # bottlenecks
    ga.spectral.closed_classes(graph)   # groups of tokens that see no tokens outside
    ga.spectral.window_for_mixing(num_tokens, depth, tolerance)  # the smallest sufficient window
"""

from graphattn.spectral.bounds import cycle_fiedler_value, path_fiedler_bounds
from graphattn.spectral.certificates.certify import certify
from graphattn.spectral.certificates.facts import Certificate, Fact
from graphattn.spectral.cheeger import CheegerBounds, cheeger_bounds, conductance
from graphattn.spectral.classes import closed_classes, eigenvalue_one_multiplicity
from graphattn.spectral.design import suggest_top_k, window_for_fiedler, window_for_mixing
from graphattn.spectral.eigenvalues import (
    FiedlerPair,
    fiedler_pair,
    fiedler_value,
    max_eigenvalue,
    max_step_size,
)
from graphattn.spectral.energy import energy
from graphattn.spectral.filters import (
    energy_gradient,
    filter_response,
    smoothing_rate,
    steps_until_consensus,
)
from graphattn.spectral.full_spectrum import spectrum
from graphattn.spectral.laplacians.laplacian import laplacian
from graphattn.spectral.matrix_weighted.matrix_weights import (
    MatrixFiedlerBounds,
    matrix_fiedler_bounds,
    matrix_fiedler_value,
)

__all__ = [
    "Certificate",
    "CheegerBounds",
    "Fact",
    "FiedlerPair",
    "MatrixFiedlerBounds",
    "certify",
    "cheeger_bounds",
    "closed_classes",
    "conductance",
    "cycle_fiedler_value",
    "eigenvalue_one_multiplicity",
    "energy",
    "energy_gradient",
    "fiedler_pair",
    "fiedler_value",
    "filter_response",
    "laplacian",
    "matrix_fiedler_bounds",
    "matrix_fiedler_value",
    "max_eigenvalue",
    "max_step_size",
    "path_fiedler_bounds",
    "smoothing_rate",
    "spectrum",
    "steps_until_consensus",
    "suggest_top_k",
    "window_for_fiedler",
    "window_for_mixing",
]
