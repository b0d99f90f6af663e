"""Consensus as a low-pass filter: the factor of every mode, and the steps until tokens agree."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from graphattn.graphs import TokenGraph
from graphattn.graphs.arguments import as_float
from graphattn.spectral.arguments import as_edge_weight
from graphattn.spectral.eigenvalues import connected_adjacencies, max_eigenvalue, slowest_pair
from graphattn.spectral.energy import as_signal, edges_of


def filter_response(eigenvalues: Tensor, step_size: float) -> Tensor:
    r"""Compute the factor by which one step multiplies a mode, :math:`1 - 2 \eta \lambda`.

    A consensus step is the filter H = I - 2 eta L, so n steps multiply a mode by the n-th power of
    this factor. If it is below 0, the mode changes sign in every step; if it is below -1, the mode
    grows. :func:`graphattn.plot.filter_response` draws it.

    Source: Stabilizing Transformer Training Through Consensus, Eq. 9-10.

    Args:
        eigenvalues: eigenvalues of a Laplacian, such as from :func:`spectrum`; a floating-point
            tensor of any shape.
        step_size: eta > 0.

    Returns:
        The factors, with the shape and dtype of `eigenvalues`; differentiable.

    Raises:
        ValueError: if `eigenvalues` is not a floating-point tensor or `step_size` is not a finite
            number > 0.

    Example:
        >>> import graphattn as ga
        >>> ring = ga.window_cycle_graph(4, window=1)
        >>> eta = ga.spectral.max_step_size(ring)
        >>> ga.spectral.filter_response(ga.spectral.spectrum(ring), eta)
        tensor([1.0000, 0.5000, 0.5000, 0.0000], dtype=torch.float64)
    """
    if not isinstance(eigenvalues, Tensor) or not eigenvalues.is_floating_point():
        got = eigenvalues.dtype if isinstance(eigenvalues, Tensor) else type(eigenvalues).__name__
        raise ValueError(f"eigenvalues must be a floating-point tensor, got {got}")
    return 1 - 2 * as_float("step_size", step_size, positive=True) * eigenvalues


def smoothing_rate(graph: TokenGraph, step_size: float, edge_weight: Tensor | None = None) -> float:
    r"""Compute the factor per step of the mode that shrinks slowest.

    .. math:: \rho = \max_{\lambda > 0} \, \lvert 1 - 2 \eta \lambda \rvert

    The maximum is over all modes that are not constant on the connected parts of the graph. It is
    reached at lambda_1 or at lambda_max. After n steps, the distance of a signal from its mean is
    at most rho^n of what it was (Eq. 13), and for some signals exactly that. For steps up to
    :func:`max_step_size`, rho is omega_1 = 1 - 2 eta lambda_1 of the paper. If rho >= 1, signals do
    not converge.

    For a **disconnected** graph, tokens converge to the mean of their own connected part, and rho
    is the rate of the slowest part. Different parts never agree, so :func:`steps_until_consensus`
    is infinite for any rho. lambda_1 is then the smallest positive eigenvalue. Without an edge
    between two tokens, rho is 0.0.

    Source: Stabilizing Transformer Training Through Consensus, Section 2.3 (Eq. 10-13).

    Args:
        graph: N tokens; direction does not matter, see :func:`laplacian`.
        step_size: eta > 0.
        edge_weight: weights >= 0 in the order of ``graph.edge_index``, [E]; ones if None.

    Raises:
        ValueError: if `step_size` is not a finite number > 0, and in the same cases as
            :func:`fiedler_value`.

    Example:
        >>> import graphattn as ga
        >>> graph = ga.complete_graph(10)  # every eigenvalue but one is 10
        >>> round(ga.spectral.smoothing_rate(graph, 0.02), 12)
        0.6
        >>> round(ga.spectral.smoothing_rate(graph, ga.spectral.max_step_size(graph)), 12)
        0.0
    """
    eta = as_float("step_size", step_size, positive=True)
    ends = positive_eigenvalues(graph, edge_weight)
    return max((abs(1 - 2 * eta * end) for end in ends), default=0.0)


def steps_until_consensus(
    graph: TokenGraph,
    step_size: float,
    *,
    tolerance: float = 1e-3,
    edge_weight: Tensor | None = None,
) -> int | float:
    r"""Count the steps until all signals are near their means.

    It is the smallest n with :math:`\lVert H^n u - \bar u \mathbf 1 \rVert \le \text{tolerance}
    \cdot \lVert u - \bar u \mathbf 1 \rVert` for **every** signal u. This means
    :math:`\rho^n \le \text{tolerance}` with the rate of :func:`smoothing_rate`. (**Erratum**: the
    limit of H^n u is the mean, so the last form of Eq. 12 must be (1/N) 1 1^T u with an outer
    product. The paper writes 1^T 1, which is the number N.)

    Source: Stabilizing Transformer Training Through Consensus, Eq. 11-13.

    Args:
        graph: N tokens; direction does not matter, see :func:`laplacian`.
        step_size: eta > 0.
        tolerance: the distance from the mean, relative to the start, between 0 and 1 (exclusive).
        edge_weight: weights >= 0 in the order of ``graph.edge_index``, [E]; ones if None.

    Returns:
        An int; ``math.inf`` if tokens never agree, because the graph is disconnected or a mode does
        not shrink (or shrinks by less than 4e-9, the accuracy of an eigenvalue, while it changes
        sign); 0 if there are fewer than two tokens.

    Raises:
        ValueError: if a number is out of range, and in the same cases as :func:`fiedler_value`.

    Example:
        >>> import graphattn as ga
        >>> graph = ga.window_path_graph(64, window=2)
        >>> ga.spectral.steps_until_consensus(graph, ga.spectral.max_step_size(graph))
        3578
        >>> ga.spectral.steps_until_consensus(ga.block_window_graph(8, block_size=4), 0.1)
        inf
    """
    eta = as_float("step_size", step_size, positive=True)
    tolerance = as_share("tolerance", tolerance)
    ends = positive_eigenvalues(graph, edge_weight, connected=True)
    if graph.num_targets < 2:
        return 0
    if not ends:
        return math.inf
    return steps_of_rates(ends, eta, tolerance)


def steps_of_rates(ends: tuple[float, ...], eta: float, tolerance: float) -> int | float:
    """Count the steps until consensus from the smallest and the largest positive eigenvalue."""
    log_rate = max(_log_share(2 * eta * end) for end in ends)
    if log_rate >= 0:
        return math.inf
    # The small factor avoids one step too many because of rounding.
    return max(1, math.ceil(math.log(tolerance) / log_rate * (1 - 1e-12)))


def energy_gradient(
    graph: TokenGraph | Tensor, signal: Tensor, edge_weight: Tensor | None = None
) -> Tensor:
    r"""Compute the gradient of the energy, 2 L u.

    .. math:: \nabla E(u)_i = \sum_j (W_{ij} + W_{ji}) (u_i - u_j)

    A consensus step with update "energy" and R = I is
    ``signal - step_size * energy_gradient(graph, signal)``.

    Source: Stabilizing Transformer Training Through Consensus, Eq. 6-7.

    Args:
        graph: a graph of N tokens, or a tensor edge_index [2, E].
        signal: u, floating-point, [N] or [N, C].
        edge_weight: weights >= 0 in the order of ``graph.edge_index``, or of the columns of a
            tensor edge_index, [E]; ones if None.

    Returns:
        A tensor with the shape of `signal`; differentiable with respect to `signal` and
        `edge_weight`. For half precision, the sums and the result are float32.

    Raises:
        ValueError: in the same cases as :func:`energy`.

    Example:
        >>> import torch, graphattn as ga
        >>> graph = ga.window_path_graph(3, window=1)
        >>> ga.spectral.energy_gradient(graph, torch.tensor([0.0, 1.0, 3.0]))
        tensor([-2., -2.,  4.])
    """
    u = as_signal(signal)
    source, target = edges_of(graph, signal)
    message = u[target] - u[source]
    if edge_weight is not None:
        weight = as_edge_weight(edge_weight, len(source))
        message = (weight if message.dim() == 1 else weight[:, None]) * message
    out = torch.zeros(u.shape, dtype=message.dtype, device=u.device)
    return out.index_add(0, target, message).index_add(0, source, -message)


def as_share(name: str, value: float) -> float:
    """Check that `value` is a number between 0 and 1 (exclusive), and convert it to a float."""
    number = as_float(name, value, positive=True)
    if number >= 1:
        raise ValueError(f"{name} must be between 0 and 1 (exclusive), got {number}")
    return number


def positive_eigenvalues(
    graph: TokenGraph, edge_weight: Tensor | None, *, connected: bool = False
) -> tuple[float, ...]:
    """Compute the smallest and the largest eigenvalue of modes not constant on connected parts.

    The result is empty if there are none, or with `connected` if the graph is not connected.
    """
    parts, scale = connected_adjacencies(graph, edge_weight)
    if connected and len(parts) != 1:
        return ()
    slowest = [slowest_pair(part)[0] * scale for part in parts if part.shape[0] > 1]
    return (min(slowest), max_eigenvalue(graph, edge_weight)) if slowest else ()


def _log_share(x: float) -> float:
    """Compute log |1 - x|, exactly for tiny x; 0 if x is at least 2, within the accuracy."""
    if x == 1:
        return -math.inf
    if x < 1:
        return math.log1p(-x)
    return math.log(x - 1) if x < 2 * (1 - 1e-9) else 0.0
