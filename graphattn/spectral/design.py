"""Choosing a window that mixes fast enough, or a top-k that covers enough weight."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from graphattn.graphs import TokenGraph, window_path_graph
from graphattn.graphs.arguments import as_float, as_int
from graphattn.graphs.token_graph import as_token_graph
from graphattn.spectral.eigenvalues import fiedler_value, max_eigenvalue
from graphattn.spectral.filters import as_share

ACCURACY = 1e-9  # relative accuracy of eigenvalues; a target counts as reached within it
EDGES = 1 << 18  # edges whose queries and keys are compared at a time


def window_for_fiedler(num_tokens: int, target: float) -> int:
    r"""Find the smallest window of :func:`~graphattn.window_path_graph` that mixes fast enough.

    It is the smallest w with lambda_1(P_N^w) >= `target`, to a relative accuracy of 1e-9. lambda_1
    increases with w, so w is found by a search on the computed value. By Remark 4.2, lambda_1 is
    between 2 S and 4 S, which limits the search. The next guess assumes that lambda_1 / S, which
    changes slowly, stays the same. If w is much smaller than N, it is about
    (3 N^2 target / pi^2)^(1/3). The search takes as long as two or three Fiedler values for this
    window.

    Source: Stabilizing Transformer Training Through Consensus, Remark 4.2 (Eq. 16).

    Args:
        num_tokens: N >= 1.
        target: the Fiedler value to reach, > 0; that of the complete graph is N.

    Returns:
        w, 1 <= w <= N - 1.

    Raises:
        ValueError: if a number is out of range, or the Fiedler value of the complete graph is
            smaller than `target`.

    Example:
        >>> import graphattn as ga
        >>> window = ga.spectral.window_for_fiedler(1000, target=0.01)
        >>> for w in (window - 1, window):
        ...     print(w, ga.spectral.fiedler_value(ga.window_path_graph(1000, w)) >= 0.01)
        13 False
        14 True
    """
    num_tokens = as_int("num_tokens", num_tokens, 1)
    target = as_float("target", target, positive=True)
    enough = target * (1 - ACCURACY)
    if _complete_fiedler(num_tokens) < enough:
        raise ValueError(
            f"target must be <= {_complete_fiedler(num_tokens):g}, the Fiedler value of the "
            f"complete graph of {num_tokens} tokens, got {target:g}"
        )
    S = _sine_sums(num_tokens, (num_tokens - 1) // 2)
    first = _first(enough <= 4 * S)
    last = _first(enough <= 2 * S, beyond=num_tokens - 1)

    def value_at(window: int) -> float:
        return fiedler_value(window_path_graph(num_tokens, window))

    return _smallest_window(value_at, enough, _sine_sums(num_tokens, num_tokens - 1), first, last)


def window_for_mixing(
    num_tokens: int, depth: int, tolerance: float, *, step_size: float | str = "auto"
) -> int:
    r"""Find the smallest window in which `depth` consensus steps bring all tokens close together.

    It is the smallest w for which `depth` steps of H = I - 2 eta L on the window path P_N^w reduce
    every mode except the mean to at most `tolerance` of its size: :math:`\rho(w)^{depth} \le`
    `tolerance` (see :func:`smoothing_rate`).

    The default is the step of the layers: ``SelfConsensus(step_size="auto")`` takes
    eta = 1 / (2 max_i d_i) with update "energy", where d_i counts the edges from and to token i. On
    a window path this is 1 / (4 k) for tokens with up to k neighbours, so
    rho = 1 - lambda_1 / (2 k), which is never below (N - 2) / (2 N - 2). With ``"largest"``, every
    window uses its largest step without oscillation, eta = 1 / (2 lambda_max) of
    :func:`max_step_size`, so rho = 1 - lambda_1 / lambda_max. The search assumes that
    lambda_1 / k and lambda_1 / lambda_max increase with w. (This was checked for all windows up to
    N = 40, and for N = 120.) With a fixed step, rho first falls with w, because lambda_1 increases,
    and then rises, because the mode of lambda_max oscillates. So only the smallest window that is
    fast enough for lambda_1 has to be tested for lambda_max.

    The edges have no matrices here, R = I. The bounds of :func:`matrix_fiedler_bounds` say how much
    the matrices of a layer change the eigenvalues.

    Source: Stabilizing Transformer Training Through Consensus, Eq. 13 and Remark 4.2.

    Args:
        num_tokens: N >= 1.
        depth: the number of steps, >= 1.
        tolerance: the share of a mode that may be left, between 0 and 1 (exclusive).
        step_size: ``"auto"``, ``"largest"``, or eta > 0.

    Returns:
        w, 1 <= w <= N - 1 (1 for a single token).

    Raises:
        ValueError: if an argument is out of range, or no window is sufficient with this step.

    Example:
        >>> import graphattn as ga
        >>> ga.spectral.window_for_mixing(256, depth=12, tolerance=0.1)
        136
        >>> ga.spectral.window_for_mixing(256, depth=12, tolerance=0.1, step_size="largest")
        92
    """
    num_tokens, depth = as_int("num_tokens", num_tokens, 1), as_int("depth", depth, 1)
    # The factor per step by which a mode has to shrink at least.
    factor = as_share("tolerance", tolerance) ** (1 / depth)
    if isinstance(step_size, str):
        if step_size not in ("auto", "largest"):
            raise ValueError(
                f'step_size must be "auto", "largest" or a finite number > 0, got {step_size!r}'
            )
    else:
        step_size = as_float("step_size", step_size, positive=True)
    if num_tokens == 1:
        return 1
    if not isinstance(step_size, str):
        return _window_for_fixed_step(num_tokens, depth, factor, step_size)
    is_largest = step_size == "largest"
    ratio = (1 - factor) * (1 - ACCURACY)  # the smallest sufficient 2 eta lambda_1
    if not is_largest and ratio > num_tokens / (2 * num_tokens - 2):  # of the complete graph
        left = (1 - num_tokens / (2 * num_tokens - 2)) ** depth
        raise ValueError(
            f"tolerance must be >= {left:.3g} for {depth} automatic steps of {num_tokens} tokens, "
            f"because even the complete graph leaves this share, got {tolerance:g}; take more "
            'steps, or step_size="largest"'
        )
    S = _sine_sums(num_tokens, (num_tokens - 1) // 2)
    w = np.arange(1, len(S) + 1)  # windows in which some token has 2 w neighbours
    # lambda_max is at least the largest degree + 1, and at most twice that degree and at most N.
    least, most = (2 * w + 1, np.minimum(4 * w, num_tokens)) if is_largest else (4 * w, 4 * w)
    first = _first(ratio * least <= 4 * S)
    last = _first(ratio * most <= 2 * S, beyond=num_tokens - 1)

    def value_at(window: int) -> float:
        graph = window_path_graph(num_tokens, window)
        if is_largest:
            return fiedler_value(graph) / max_eigenvalue(graph)
        return fiedler_value(graph) / (2 * min(2 * window, num_tokens - 1))

    model = _sine_sums(num_tokens, num_tokens - 1) / np.arange(1, num_tokens)
    return _smallest_window(value_at, ratio, model, first, last)


def suggest_top_k(
    query: Tensor,
    key: Tensor,
    graph: TokenGraph | Tensor,
    sigma: float | Tensor,
    *,
    mass: float = 0.9,
    quantile: float = 0.95,
) -> int:
    r"""Suggest a top-k for RBF (Krause) attention on your data.

    It is the smallest k for which the k nearest sources have at least the share `mass` of a row's
    weight, for at least the share `quantile` of all rows. A row is one target in one head and batch
    entry. Its weights are those of :func:`~graphattn.rbf_attention` without top-k. Targets without
    sources do not count.

    The Krause paper chooses top-k by hand for each task (2 to 16 in windows of 4 to 25, and 192 of
    256), and says that a rule is missing. This rule is not from the paper.

    Args:
        query: [*, N, H, D], or [N, D] for one head.
        key: [*, M, Hk, D] with Hk a divisor of H, or [M, D].
        graph: a TokenGraph with N targets and M sources, or an edge_index [2, E].
        sigma: bandwidth > 0; a number or a tensor broadcastable to [H].
        mass: the share of a row's weight, between 0 and 1 (exclusive).
        quantile: the share of rows, > 0 and <= 1.

    Returns:
        k >= 1.

    Raises:
        ValueError: if an argument is out of range, shapes do not fit, a query or key of an edge is
            not finite, or no target has a source.

    Example:
        >>> import torch, graphattn as ga
        >>> x = torch.tensor([0.0, 1.0, 10.0, 11.0]).view(4, 1)
        >>> graph = ga.complete_graph(4)
        >>> ga.spectral.suggest_top_k(x, x, graph, sigma=1.0)  # two groups of two
        2
        >>> ga.spectral.suggest_top_k(x, x, graph, sigma=100.0)  # all look alike
        4
    """
    mass = as_share("mass", mass)
    quantile = as_float("quantile", quantile, positive=True)
    if quantile > 1:
        raise ValueError(f"quantile must be > 0 and <= 1, got {quantile}")
    query, key = _as_heads("query", query), _as_heads("key", key)
    heads = query.shape[-2]
    if query.shape[:-3] != key.shape[:-3] or query.shape[-1] != key.shape[-1]:
        raise ValueError(
            "key must have the same batch dimensions and features as query, whose shape is "
            f"{list(query.shape)}, got {list(key.shape)}"
        )
    if key.shape[-2] == 0 or heads % key.shape[-2]:
        raise ValueError(
            f"key must have a number of heads that divides the {heads} heads of query, got "
            f"{key.shape[-2]}"
        )
    bandwidth = _as_bandwidth(sigma, heads)
    checked = as_token_graph(graph, query.shape[-3], key.shape[-3])
    source, target = checked.edge_index.to(query.device)
    key = key.repeat_interleave(heads // key.shape[-2], dim=-2)
    needed = []
    for q, k in zip(query.flatten(0, -4), key.flatten(0, -4), strict=True):
        for h in range(heads):
            squared = _squared_distances(q[:, h], k[:, h], target, source)
            needed.append(_needed(squared / (2 * bandwidth[h] ** 2), target, mass))
    rows = torch.cat(needed).sort().values if needed else torch.empty(0)
    if len(rows) == 0:
        raise ValueError(
            "graph must have at least one edge, and query at least one batch entry, got "
            f"{len(target)} edges and {len(query.flatten(0, -4))} batch entries"
        )
    # A small factor corrects rounding: 0.95 of 20 rows is 19, not 19.000000000000004.
    return int(rows[math.ceil(quantile * len(rows) * (1 - 1e-12)) - 1])


def _window_for_fixed_step(num_tokens: int, depth: int, factor: float, eta: float) -> int:
    target = (1 - factor) / (2 * eta)
    limit = (1 + factor) / (2 * eta)
    if target <= _complete_fiedler(num_tokens):
        window = window_for_fiedler(num_tokens, target)
        largest = max_eigenvalue(window_path_graph(num_tokens, window))
        if largest <= limit * (1 + ACCURACY):
            return window
        reason = (
            f"window {window} is the first that is fast enough, but the mode of its largest "
            f"eigenvalue {largest:g} oscillates, and at most {limit:g} is allowed; choose a "
            "smaller step"
        )
    else:
        reason = "even the complete graph is too slow; choose a larger step"
    raise ValueError(
        f"step_size must be such that some window mixes {num_tokens} tokens in {depth} steps, got "
        f"{eta:g}: {reason}"
    )


def _complete_fiedler(num_tokens: int) -> float:
    return float(num_tokens) if num_tokens > 1 else 0.0


def _sine_sums(num_tokens: int, last: int) -> NDArray[np.float64]:
    """Compute S of Remark 4.2 for the windows 1, ..., last; it bounds lambda_1 if w < N / 2."""
    w = np.arange(1, last + 1)
    return np.cumsum(np.sin(np.pi * w / (2 * num_tokens)) ** 2)


def _first(enough: NDArray[np.bool_], beyond: int | None = None) -> int:
    """Return the first window < N / 2 that is enough; otherwise `beyond` or the next window."""
    if enough.any():
        return int(enough.argmax()) + 1
    return len(enough) + 1 if beyond is None else beyond


def _smallest_window(
    value_at: Callable[[int], float],
    wanted: float,
    model: NDArray[np.float64],
    first: int,
    last: int,
) -> int:
    """Find the smallest window in [first, last] whose value is at least `wanted`.

    Args:
        value_at: computes the value of a window; it increases with the window.
        wanted: the value to reach, which the last window reaches.
        model: numbers for the windows 1, 2, ..., roughly proportional to the value, from which the
            next guess is computed.
        first: the smallest window that is possible.
        last: the largest window that is possible.
    """
    guess, tries = first, 0
    while first < last:
        value, tries = value_at(guess), tries + 1
        if value >= wanted:
            last = guess
        else:
            first = guess + 1
        if tries % 3:  # Every third try is bisection, in case that the model converges slowly.
            guess = 1 + int(np.searchsorted(model, wanted * model[guess - 1] / value))
        else:
            guess = (first + last) // 2
        guess = min(max(guess, first), max(last - 1, first))
    return first


def _as_heads(name: str, x: Any) -> Tensor:
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.dim() < 2:
        got = f"{x.dtype} of shape {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(
            f"{name} must be a floating-point tensor [*, tokens, heads, features] or "
            f"[tokens, features], got {got}"
        )
    x = x.detach()
    x = x[:, None] if x.dim() == 2 else x
    return x[None] if x.dim() == 3 else x


def _as_bandwidth(sigma: Any, heads: int) -> list[float]:
    if isinstance(sigma, Tensor):
        try:
            values = sigma.detach().double().broadcast_to((heads,)).tolist()
        except RuntimeError:
            raise ValueError(
                f"sigma must be a number or broadcastable to [{heads}] (heads), "
                f"got shape {list(sigma.shape)}"
            ) from None
    else:
        values = [sigma] * heads
    return [as_float("sigma", value, positive=True) for value in values]


def _squared_distances(q: Tensor, k: Tensor, target: Tensor, source: Tensor) -> Tensor:
    """Compute the squared distance of every edge from coordinate differences; float64 [E]."""
    squared = torch.empty(len(target), dtype=torch.float64, device=q.device)
    for e in range(0, len(target), EDGES):
        edges = slice(e, e + EDGES)
        gap = q[target[edges]].double() - k[source[edges]].double()
        squared[edges] = gap.square().sum(dim=-1)
    if not squared.isfinite().all():
        e = int(squared.isfinite().logical_not().nonzero()[0])
        raise ValueError(
            "query and key must be finite for all tokens with edges, got the squared distance "
            f"{squared[e].item()} from target {int(target[e])} to source {int(source[e])}"
        )
    return squared


def _needed(exponent: Tensor, target: Tensor, mass: float) -> Tensor:
    """Count the nearest sources whose weights exp(-exponent) sum to `mass` of a row; [rows]."""
    order = exponent.argsort(stable=True)
    order = order[target[order].argsort(stable=True)]  # sorted by row, then by distance
    _, row, count = target.unique_consecutive(return_inverse=True, return_counts=True)
    start = count.cumsum(0) - count
    exponent = exponent[order]
    weight = (exponent[start][row] - exponent).exp()  # relative to the weight of the nearest
    wanted = mass * (1 - 1e-12) * weight.new_zeros(len(count)).index_add(0, row, weight)
    needed, total = count.clone(), torch.zeros_like(wanted)
    rows_left, k = torch.arange(len(count), device=count.device), 0
    while len(rows_left):
        total[rows_left] += weight[start[rows_left] + k]
        k += 1
        done = (total[rows_left] >= wanted[rows_left]) | (count[rows_left] == k)
        needed[rows_left[done]] = k
        rows_left = rows_left[~done]
    return needed
