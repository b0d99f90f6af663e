"""Figures of the spectra of token graphs, and of how closely measured values meet theorems."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch import Tensor

from graphattn.graphs import TokenGraph, window_path_graph
from graphattn.graphs.arguments import as_float, as_int
from graphattn.plot.drawing.style import COLOURS, INK, axes_or_new, line_look, styled
from graphattn.spectral import fiedler_value, laplacian, max_eigenvalue, path_fiedler_bounds

if TYPE_CHECKING:
    from matplotlib.axes import Axes


MOST_EIGENVALUES = 1024  # Up to this number of tokens, a dense spectrum is computed and drawn.


def laplacian_spectrum(
    graph: TokenGraph,
    step_size: float | None = None,
    *,
    edge_weight: Tensor | None = None,
    ax: Axes | None = None,
) -> Axes:
    r"""Draw all eigenvalues of the Laplacian, smallest first, and the effect of a consensus step.

    One step multiplies a mode of eigenvalue lambda by :math:`\omega = 1 - 2 \eta \lambda`
    (consensus paper, Eq. 10). The left scale shows lambda and the right scale omega for the same
    points. A mode with a negative omega changes its sign at every step.

    Args:
        graph: a graph with as many targets as sources, 1 to 1,024 tokens.
        step_size: eta; if None, :func:`graphattn.spectral.max_step_size`, the largest step size
            that changes the sign of no mode.
        edge_weight: [E], weights >= 0; all 1 if None.
        ax: where to draw; new axes if None.

    Returns:
        The matplotlib axes; the values of its first line are the eigenvalues.

    Raises:
        ValueError: if the step size is <= 0, there are no tokens or too many, or
            :func:`graphattn.spectral.laplacian` does not accept the weights.

    Example:
        >>> import graphattn as ga
        >>> ax = ga.plot.laplacian_spectrum(ga.window_path_graph(64, window=2))
        >>> eigenvalues = ax.lines[0].get_ydata()
        >>> [round(float(value), 2) for value in eigenvalues[[0, 1, -1]]]
        [0.0, 0.01, 6.24]
    """
    if edge_weight is not None:
        edge_weight = edge_weight.detach()
    L = laplacian(graph, edge_weight)
    if not 1 <= L.shape[0] <= MOST_EIGENVALUES:
        raise ValueError(f"graph must have 1 to {MOST_EIGENVALUES} tokens, got {L.shape[0]}")
    values = numpy.linalg.eigvalsh(L.toarray()).clip(min=0)
    top = values[-1]
    eta = _step_size(step_size, top)
    ax = axes_or_new(ax, 4.6, 3.2)
    dots = 4.0 if len(values) <= 128 else 2.0
    ax.plot(numpy.arange(len(values)), values, ".", color=COLOURS[0], markersize=dots)

    def omega(eigenvalue: Any) -> Any:
        return 1 - 2 * eta * eigenvalue

    def eigenvalue_of(factor: Any) -> Any:
        return (1 - factor) / (2 * eta)

    right = ax.secondary_yaxis("right", functions=(omega, eigenvalue_of))
    right.set_ylabel(f"left by one step, η = {eta:.3g}", color=INK, fontsize=9)
    right.tick_params(colors=INK, labelsize=8, width=0.6, length=3)
    right.spines["right"].set(color="#999999", linewidth=0.6)
    if 2 * eta * top > 1 + 1e-9:
        # Modes above this line change their sign at every step.
        ax.axhline(1 / (2 * eta), color="#999999", linewidth=0.6)
    return styled(ax, "mode k (smooth → rough)", "eigenvalue λ")


def filter_response(
    graph: TokenGraph,
    step_size: float | None = None,
    *,
    steps: Sequence[int] = (1, 4, 16, 64),
    edge_weight: Tensor | None = None,
    ax: Axes | None = None,
) -> Axes:
    r"""Draw the factor by which n consensus steps multiply a mode, over its eigenvalue lambda.

    One step is :math:`H = I - 2 \eta L_{sym}` (consensus paper, Eq. 7 and 9), so n steps multiply a
    mode by :math:`(1 - 2 \eta \lambda)^n`. Dots mark the eigenvalues of the graph (if it has at
    most 1,024 tokens). The constant mode, lambda = 0, is not changed. With a step size up to
    :func:`graphattn.spectral.max_step_size` no factor is negative.

    Args:
        graph: a graph with as many targets as sources.
        step_size: eta; if None, :func:`graphattn.spectral.max_step_size`, the largest step size
            that changes the sign of no mode.
        steps: numbers of steps n, one curve for each.
        edge_weight: [E], one positive number per edge; all 1 if None.
        ax: where to draw; new axes if None.

    Raises:
        ValueError: if the step size is <= 0, a number of steps is < 1, or
            :func:`graphattn.spectral.laplacian` does not accept the weights.

    Example:
        >>> import graphattn as ga
        >>> ax = ga.plot.filter_response(ga.window_path_graph(64, window=2), steps=[1, 8])
        >>> [text.get_text() for text in ax.get_legend().get_texts()]
        ['1 step', '8 steps']
    """
    if not isinstance(steps, Sequence) or len(steps) == 0:
        raise ValueError(f"steps must be a non-empty sequence of integers >= 1, got {steps!r}")
    counts = [as_int("steps", n, 1) for n in steps]
    if edge_weight is not None:
        edge_weight = edge_weight.detach()
    top = max_eigenvalue(graph, edge_weight)
    eta = _step_size(step_size, top)
    ax = axes_or_new(ax, 4.6, 3.2)
    grid = torch.linspace(0, top, 400, dtype=torch.float64)
    eigenvalues = None
    if graph.num_tokens <= MOST_EIGENVALUES:
        dense = laplacian(graph, edge_weight, layout="dense").cpu().double()
        eigenvalues = torch.linalg.eigvalsh(dense).clamp_min(0)
    for i, n in enumerate(counts):
        look = line_look(i)
        label = "1 step" if n == 1 else f"{n:,} steps"
        ax.plot(grid, (1 - 2 * eta * grid) ** n, linewidth=1.6, label=label, **look)
        if eigenvalues is not None:
            factors = (1 - 2 * eta * eigenvalues) ** n
            ax.plot(eigenvalues, factors, ".", color=look["color"], markersize=6, alpha=0.7)
    ax.axhline(0, color="#999999", linewidth=0.6)
    ax.legend(frameon=False, fontsize=8, title=f"η = {eta:.3g}", title_fontsize=8)
    return styled(ax, "eigenvalue λ (smooth → rough)", "share that is left")


def _step_size(step_size: float | None, largest: float) -> float:
    """Return the step size that was given, or the largest that changes the sign of no mode."""
    if step_size is None:
        return 1 / (2 * largest) if largest > 0 else 1.0  # Without edges every step size is safe.
    return as_float("step_size", step_size, positive=True)


def path_fiedler_values(
    num_tokens: int | Sequence[int], window: int | Sequence[int], *, ax: Axes | None = None
) -> Axes:
    r"""Draw the Fiedler value of window paths, between the bounds that theory gives.

    The horizontal axis shows the windows or the numbers of tokens, whichever is given as a
    sequence. Both axes are logarithmic. The coloured band is :math:`2 S \le \lambda_1 \le 4 S`
    (Remark 4.2 of the consensus paper, see :func:`graphattn.spectral.path_fiedler_bounds`), so
    lambda_1 grows as w^3 / N^2.

    Args:
        num_tokens: N, one number or a sequence of numbers.
        window: w, one number or a sequence of numbers; every w < N / 2.
        ax: where to draw; new axes if None.

    Returns:
        The matplotlib axes; its first line has the measured values.

    Raises:
        ValueError: unless exactly one of the two is a sequence, this sequence is not empty, and
            every w < N / 2.

    Example:
        >>> import graphattn as ga
        >>> ax = ga.plot.path_fiedler_values(100, window=[1, 2, 4, 8, 16])
        >>> ax.get_xlabel(), ax.lines[0].get_xdata()
        ('window w', array([ 1,  2,  4,  8, 16]))
    """
    from matplotlib.ticker import NullLocator

    from graphattn.plot.drawing.ticks import IntegerTicks

    over_windows = isinstance(window, Sequence)
    if over_windows == isinstance(num_tokens, Sequence):
        raise ValueError(
            "one of num_tokens and window must be a sequence and the other a number, "
            f"got {num_tokens!r} and {window!r}"
        )
    along: Any = window if over_windows else num_tokens
    if len(along) == 0:
        name = "window" if over_windows else "num_tokens"
        raise ValueError(f"{name} must have at least one number, got {along!r}")
    x = sorted(as_int("window" if over_windows else "num_tokens", at, 1) for at in along)
    pairs: list[tuple[Any, Any]] = [(num_tokens, w) if over_windows else (w, window) for w in x]
    bounds = [path_fiedler_bounds(N, w) for N, w in pairs]
    values = [fiedler_value(window_path_graph(N, w)) for N, w in pairs]

    ax = axes_or_new(ax, 4.6, 3.4)
    lower, upper = zip(*bounds, strict=True)
    ax.plot(x, values, "o", color=COLOURS[1], markersize=3.5, label="measured λ₁", zorder=3)
    ax.fill_between(x, lower, upper, color=COLOURS[0], alpha=0.15, linewidth=0)
    for bound, style, label in ((upper, "-", "at most 4 S"), (lower, "--", "at least 2 S")):
        ax.plot(x, bound, style, color=COLOURS[0], linewidth=1.2, label=label)
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.xaxis.set_major_locator(IntegerTicks())
    ax.xaxis.set_major_formatter("{x:,.0f}")
    ax.xaxis.set_minor_locator(NullLocator())
    title = f"N = {num_tokens:,}" if over_windows else f"w = {window:,}"
    ax.legend(frameon=False, fontsize=8, title=title, title_fontsize=8)
    return styled(ax, "window w" if over_windows else "tokens N", "Fiedler value")


def theorem_margins(
    inequalities: Mapping[str, Iterable[float]],
    equations: Mapping[str, tuple[Iterable[float], float]] | None = None,
    *,
    ax: Axes | None = None,
) -> Axes:
    """Draw how closely a number of cases meet the inequalities and equations claimed of them.

    Every claim has one row on a logarithmic axis. For an inequality, the row shows the margin of
    every case, relative to the quantity, in blue: a smaller margin is closer to a violation, and a
    red cross at the left edge means that a case violates the inequality. For an equation, the row
    shows the relative error of every case in green, and a black tick the largest error allowed: the
    errors must lie on the left of the tick.

    Args:
        inequalities: for each claim the margins, one number per case; a violation is < 0.
        equations: for each claim a pair: the errors >= 0, one per case, and the largest error
            allowed, >= 0.
        ax: where to draw; new axes if None, whose height fits the number of claims.

    Raises:
        ValueError: if there is no claim, or a claim has no cases.

    Example:
        >>> import graphattn as ga
        >>> inequalities = {"Fiedler value": [0.3, 0.2, 0.01], "low-pass filter": [1e-3, 0.5]}
        >>> equations = {"mean is kept": ([1e-15, 3e-16], 1e-12)}
        >>> ax = ga.plot.theorem_margins(inequalities, equations)
        >>> [tick.get_text() for tick in ax.get_yticklabels()]
        ['Fiedler value', 'low-pass filter', 'mean is kept']
    """
    equations = equations or {}
    margins = {
        name: numpy.asarray(list(cases), dtype=float) for name, cases in inequalities.items()
    }
    errors = {
        name: (numpy.asarray(list(cases), dtype=float), as_float(name, allowed, positive=False))
        for name, (cases, allowed) in equations.items()
    }
    names = [*margins, *errors]
    if not names:
        raise ValueError("inequalities and equations must have at least one claim, got none")
    for name in names:
        if not len(margins[name] if name in margins else errors[name][0]):
            raise ValueError(f"each claim must have at least one case, got none for {name!r}")
    ax = axes_or_new(ax, 4.8, 0.9 + 0.26 * len(names))
    smallest = 1e-17  # Smaller numbers, among them 0, are only rounding and are drawn here.
    draw: dict[str, Any] = {"linestyle": "", "markersize": 6, "alpha": 0.35}
    for y, name in enumerate(names):
        ax.axhline(y, color="#eeeeee", linewidth=0.8, zorder=0)
        if name in margins:
            met = margins[name][margins[name] >= 0].clip(min=smallest)
            ax.plot(met, numpy.full(len(met), y), marker="|", color=COLOURS[0], **draw)
            if len(met) < len(margins[name]):
                ax.plot(smallest, y, marker="x", color="#cc0000", markersize=6)
        else:
            error, allowed = errors[name]
            error = error.clip(min=smallest)
            ax.plot(error, numpy.full(len(error), y), marker="|", color=COLOURS[2], **draw)
            if allowed > 0:
                ax.plot(allowed, y, marker="|", color=INK, markersize=12, markeredgewidth=1.5)
    ax.set_xscale("log")
    ax.set_xlim(smallest / 2, None)
    ax.set_ylim(len(names) - 0.4, -0.6)
    ax.set_yticks(range(len(names)), names, parse_math=False)
    styled(ax, "room left (blue),\nerror (green)")
    ax.tick_params(axis="y", length=0)
    return ax
