"""Fiedler values of window graphs in closed form."""

from __future__ import annotations

import math

from graphattn.graphs.arguments import as_int


def cycle_fiedler_value(num_tokens: int, window: int) -> float:
    r"""Compute the Fiedler value of :func:`~graphattn.window_cycle_graph` in closed form.

    .. math:: \lambda_1(C_N^w) = 4 \sum_{j=1}^{w} \sin^2\!\left(\frac{\pi j}{N}\right)

    It increases with the window. It is about 4 pi^2 w^3 / (3 N^2) if w is much smaller than N.

    Source: Stabilizing Transformer Training Through Consensus, Remark 4.1 (Eq. 15).

    Args:
        num_tokens: N.
        window: tokens on each side, 1 <= window < num_tokens / 2.

    Raises:
        ValueError: unless 1 <= `window` < `num_tokens` / 2. (Larger windows overlap themselves.)

    Example:
        >>> import graphattn as ga
        >>> round(ga.spectral.cycle_fiedler_value(6, window=1), 12)
        1.0
    """
    num_tokens, window = _window_sizes(num_tokens, window)
    return 4 * _sum_of_squared_sines(math.pi / num_tokens, window)


def path_fiedler_bounds(num_tokens: int, window: int) -> tuple[float, float]:
    r"""Compute bounds of the Fiedler value of :func:`~graphattn.window_path_graph`.

    .. math:: 2 S \le \lambda_1(P_N^w) \le 4 S, \qquad
        S = \sum_{j=1}^{w} \sin^2\!\left(\frac{\pi j}{2 N}\right)

    So lambda_1 is of the order w^3 / N^2. The upper bound is the better estimate: lambda_1 / S
    tends to 4 for small w / N, and is about 3.4 for w = N / 2. For w = 1, the upper bound is equal
    to the Fiedler value.

    Source: Stabilizing Transformer Training Through Consensus, Remark 4.2 (Eq. 16).

    Args:
        num_tokens: N.
        window: tokens on each side, 1 <= window < num_tokens / 2.

    Returns:
        ``(lower, upper)``.

    Raises:
        ValueError: unless 1 <= `window` < `num_tokens` / 2.

    Example:
        >>> import graphattn as ga
        >>> lower, upper = ga.spectral.path_fiedler_bounds(1000, window=8)
        >>> lower <= ga.spectral.fiedler_value(ga.window_path_graph(1000, window=8)) <= upper
        True
    """
    num_tokens, window = _window_sizes(num_tokens, window)
    S = _sum_of_squared_sines(math.pi / (2 * num_tokens), window)
    return 2 * S, 4 * S


def _window_sizes(num_tokens: int, window: int) -> tuple[int, int]:
    num_tokens, window = as_int("num_tokens", num_tokens, 0), as_int("window", window, 1)
    if 2 * window >= num_tokens:
        raise ValueError(f"window must be < num_tokens / 2 = {num_tokens / 2:g}, got {window}")
    return num_tokens, window


def _sum_of_squared_sines(angle: float, window: int) -> float:
    return math.fsum(math.sin(angle * j) ** 2 for j in range(1, window + 1))
