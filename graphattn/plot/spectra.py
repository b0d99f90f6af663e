"""Spectra of token graphs, and how much room theorems leave around measured values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy
from torch import Tensor

from graphattn.graphs import TokenGraph, window_path_graph
from graphattn.graphs.arguments import as_float, as_int
from graphattn.plot.drawing.style import COLOURS, INK, axes_or_new, style_axes
from graphattn.plot.filters import MOST_EIGENVALUES
from graphattn.spectral import fiedler_value, laplacian, path_fiedler_bounds

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def laplacian_spectrum(
    graph: TokenGraph,
    step_size: float | None = None,
    *,
    edge_weight: Tensor | None = None,
    ax: Axes | None = None,
) -> Axes:
    r"""All eigenvalues of the Laplacian, smallest first, and what one consensus step leaves.

    The scale on the right is the one on the left read as a filter (consensus paper, Eq. 10): a
    mode of eigenvalue lambda is multiplied by :math:`\omega = 1 - 2 \eta \lambda`. Modes below
    0 there change sign at every step.

    Args:
        graph: square, 1 to 1,024 tokens.
        step_size: eta; the largest that changes no sign,
            :func:`graphattn.spectral.max_step_size`, if None.
        edge_weight: [E], weights >= 0; ones if None.
        ax: where to draw; new axes if None.

    Returns:
        The matplotlib axes; its line holds the eigenvalues.

    Raises:
        ValueError: for a step size <= 0, no or too many tokens, or weights that
            :func:`graphattn.spectral.laplacian` refuses.

    Example:
        >>> import graphattn as ga
        >>> ax = ga.plot.laplacian_spectrum(ga.complete_graph(5))
        >>> [round(float(value), 9) for value in ax.lines[0].get_ydata()]
        [0.0, 5.0, 5.0, 5.0, 5.0]
    """
    if edge_weight is not None:
        edge_weight = edge_weight.detach()
    L = laplacian(graph, edge_weight)
    if not 1 <= L.shape[0] <= MOST_EIGENVALUES:
        raise ValueError(f"graph must have 1 to {MOST_EIGENVALUES} tokens, got {L.shape[0]}")
    values = numpy.linalg.eigvalsh(L.toarray()).clip(min=0)
    top = values[-1]
    if step_size is None:
        eta = 1 / (2 * top) if top > 0 else 1.0  # without edges every step is safe
    else:
        eta = as_float("step_size", step_size, positive=True)
    ax = axes_or_new(ax, 5, 3.2)
    dots = 4.0 if len(values) <= 128 else 2.0
    ax.plot(numpy.arange(len(values)), values, ".", color=COLOURS[0], markersize=dots)

    def left(value: Any) -> Any:
        return 1 - 2 * eta * value

    def eigenvalue(share: Any) -> Any:
        return (1 - share) / (2 * eta)

    right = ax.secondary_yaxis("right", functions=(left, eigenvalue))
    right.set_ylabel(f"left by one step, η = {eta:.3g}", color=INK, fontsize=9)
    right.tick_params(colors=INK, labelsize=8, width=0.6, length=3)
    right.spines["right"].set(color="#999999", linewidth=0.6)
    if 2 * eta * top > 1 + 1e-9:
        ax.axhline(1 / (2 * eta), color="#999999", linewidth=0.6)  # beyond, modes change sign
    ax.set_xlabel("mode k (smooth → rough)")
    ax.set_ylabel("eigenvalue λ")
    style_axes(ax)
    return ax


def path_fiedler_values(
    num_tokens: int | Sequence[int], window: int | Sequence[int], *, ax: Axes | None = None
) -> Axes:
    r"""The Fiedler value of window paths, between the bounds that theory gives.

    Against the window, or against the number of tokens: one of them is a sequence. Both axes are
    logarithmic; the band is :math:`2 S \le \lambda_1 \le 4 S` (Remark 4.2 of the consensus paper,
    see :func:`graphattn.spectral.path_fiedler_bounds`), so lambda_1 grows as w^3 / N^2.

    Args:
        num_tokens: N, or several.
        window: w, or several; every w < N / 2.
        ax: where to draw; new axes if None.

    Returns:
        The matplotlib axes; its first line holds the measured values.

    Raises:
        ValueError: unless exactly one of the two is a sequence, of at least one number, and every
            w < N / 2.

    Example:
        >>> import graphattn as ga
        >>> ax = ga.plot.path_fiedler_values(100, window=[1, 2, 4, 8])
        >>> ax.get_xlabel(), ax.lines[0].get_xdata()
        ('window w', array([1, 2, 4, 8]))
    """
    over_windows = isinstance(window, Sequence)
    if over_windows == isinstance(num_tokens, Sequence):
        raise ValueError(
            "one of num_tokens and window must be a sequence and the other a number, "
            f"got {num_tokens!r} and {window!r}"
        )
    along: Any = window if over_windows else num_tokens
    if len(along) == 0:
        raise ValueError(f"{'window' if over_windows else 'num_tokens'} must hold a number")
    x = sorted(as_int("window" if over_windows else "num_tokens", at, 1) for at in along)
    pairs: list[tuple[Any, Any]] = [(num_tokens, w) if over_windows else (w, window) for w in x]
    bounds = [path_fiedler_bounds(N, w) for N, w in pairs]
    values = [fiedler_value(window_path_graph(N, w)) for N, w in pairs]

    ax = axes_or_new(ax, 5, 3.4)
    lower, upper = zip(*bounds, strict=True)
    ax.plot(x, values, "o", color=COLOURS[1], markersize=3.5, label="measured λ₁", zorder=3)
    ax.fill_between(x, lower, upper, color=COLOURS[0], alpha=0.15, linewidth=0)
    for bound, style, label in ((upper, "-", "at most 4 S"), (lower, "--", "at least 2 S")):
        ax.plot(x, bound, style, color=COLOURS[0], linewidth=1.2, label=label)
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlabel("window w" if over_windows else "tokens N")
    ax.set_ylabel("Fiedler value")
    title = f"N = {num_tokens:,}" if over_windows else f"w = {window:,}"
    ax.legend(frameon=False, fontsize=8, title=title, title_fontsize=8)
    style_axes(ax)
    return ax


def theorem_margins(
    inequalities: Mapping[str, Iterable[float]],
    equations: Mapping[str, tuple[Iterable[float], float]] | None = None,
    *,
    ax: Axes | None = None,
) -> Axes:
    """How near sweeps of cases came to violating what was claimed of them.

    One row per claim, on a logarithmic axis. Of an inequality: the room left in every case,
    relative to the quantity (blue; nearer the left is nearer to a violation, and a case that
    violates is a red cross at the left edge). Of an equation: the relative error of every case
    (green), which must stay left of the tick that says what is allowed.

    Args:
        inequalities: claim -> room left, one number per case; < 0 where it is violated.
        equations: claim -> (errors >= 0, one per case, and the error allowed, >= 0).
        ax: where to draw; new axes, as high as the rows need, if None.

    Returns:
        The matplotlib axes.

    Raises:
        ValueError: if there is no claim, or one without cases.

    Example:
        >>> import graphattn as ga
        >>> ax = ga.plot.theorem_margins({"Remark 4.2": [0.3, 0.01]}, {"mean": ([1e-15], 1e-12)})
        >>> [tick.get_text() for tick in ax.get_yticklabels()]
        ['Remark 4.2', 'mean']
    """
    equations = equations or {}
    room = {name: numpy.asarray(list(cases), dtype=float) for name, cases in inequalities.items()}
    errors = {
        name: (numpy.asarray(list(cases), dtype=float), as_float(name, allowed, positive=False))
        for name, (cases, allowed) in equations.items()
    }
    names = [*room, *errors]
    if not names:
        raise ValueError("inequalities and equations must hold at least one claim, got none")
    for name in names:
        if not len(room[name] if name in room else errors[name][0]):
            raise ValueError(f"claims must have cases, got none for {name!r}")
    ax = axes_or_new(ax, 7.2, 0.8 + 0.26 * len(names))
    smallest = 1e-17  # rounding: what is less, or 0, stands here
    draw: dict[str, Any] = {"linestyle": "", "markersize": 6, "alpha": 0.35}
    for y, name in enumerate(names):
        ax.axhline(y, color="#eeeeee", linewidth=0.8, zorder=0)
        if name in room:
            held = room[name][room[name] >= 0].clip(min=smallest)
            ax.plot(held, numpy.full(len(held), y), marker="|", color=COLOURS[0], **draw)
            if len(held) < len(room[name]):
                ax.plot(smallest, y, marker="x", color="#cc0000", markersize=6)
        else:
            error, allowed = errors[name]
            at = error.clip(min=smallest)
            ax.plot(at, numpy.full(len(at), y), marker="|", color=COLOURS[2], **draw)
            if allowed > 0:
                ax.plot(allowed, y, marker="|", color=INK, markersize=12, markeredgewidth=1.5)
    ax.set_xscale("log")
    ax.set_xlim(smallest / 2, None)
    ax.set_ylim(len(names) - 0.4, -0.6)
    ax.set_yticks(range(len(names)), names, parse_math=False)
    ax.set_xlabel("room left of an inequality (blue), error of an equation (green)")
    style_axes(ax)
    ax.tick_params(axis="y", length=0)
    return ax
