"""Attention on a protein structure: the C-alpha trace, and the strongest edges drawn in space."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from graphattn.graphs import TokenGraph
from graphattn.graphs.arguments import as_float, as_int
from graphattn.plot.drawing.style import INK, axes_or_new, colour_bar

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Pale, so that edges are seen before them: tints of Okabe and Ito's blue, green, purple, grey, ...
CHAINS = ("#7fb3d5", "#7fcbb0", "#d9a9c6", "#a9a9a9", "#c9b458", "#a5d3f0")
EDGES = ("#f3b27a", "#d55e00", "#6e1423")  # from a weak edge to the strongest
BOND = 4.5  # Angstrom: consecutive C-alpha atoms are 3.8 apart (2.9 in a cis peptide)
NEAREST, FARTHEST = 2.8, 1.2  # width of the trace in points, in front and at the back
WIDEST, THINNEST = 3.2, 0.5  # of edges


def structure_attention(
    ca_positions: Tensor,
    graph: TokenGraph,
    weights: Tensor,
    *,
    chain_index: Tensor | None = None,
    chain_names: Sequence[str] | None = None,
    targets: Sequence[int] | None = None,
    strongest: int | None = None,
    min_separation: int = 3,
    vmax: float | None = None,
    labels: Sequence[str] | None = None,
    colorbar: bool = True,
    ax: Axes | None = None,
) -> Axes:
    """Attention on a protein: the strongest edges as lines between residues of its C-alpha trace.

    The structure is turned so that its longest direction lies across and the next one upwards (its
    principal axes); what lies farther back is thinner and paler. Chains have a colour each, and
    their first residue a dot. Where two residues that follow each other are more than 4.5 Angstrom
    apart, some are missing and the trace has a gap. A pair of residues that look at each other is
    one line, of the larger weight. Width and shade of a line grow with its weight.

    Args:
        ca_positions: [N, 3], in Angstrom, such as those of
            :func:`graphattn.data.read_structure`; NaN where the atom is missing: such residues are
            not drawn, and the trace has a gap.
        graph: whose edges the weights belong to, N residues.
        weights: [E], >= 0, in the order of ``graph.edge_index``: one head of one sequence.
        chain_index: integers [N], the chain of every residue; one chain if None.
        chain_names: one per chain, for a legend; none if None.
        targets: residues whose attention alone is drawn; they get a ring. All if None.
        strongest: how many lines are drawn; by default as many as half the residues, from 12 to
            150, so that a long chain stays in sight.
        min_separation: edges within a chain are drawn between residues that are at least so many
            places apart, so that neighbours along the chain, which the trace shows, hide nothing;
            at least 1.
        vmax: the weight of the widest and darkest line, to compare figures, which then begin at 0;
            if None, shades and widths go from the smallest to the largest weight drawn.
        labels: one text per residue, written beside those of `targets`.
        colorbar: whether to put a colour bar beside the axes.
        ax: where to draw; new axes if None.

    Returns:
        The matplotlib axes; ``ax.collections`` are the trace, then the edges.

    Raises:
        ValueError: if shapes disagree, positions or weights are not finite, a weight is negative,
            or there is no such residue.

    Example:
        >>> import torch, graphattn as ga
        >>> turn = torch.arange(40) * 1.745  # an alpha helix: 100 degrees and 1.5 Angstrom each
        >>> helix = torch.stack([2.3 * turn.cos(), 2.3 * turn.sin(), 1.5 * torch.arange(40)], dim=1)
        >>> graph = ga.knn_graph(helix, k=8)
        >>> weights = ga.attention_weights(helix[:, None], helix[:, None], graph, sigma=3.0)[:, 0]
        >>> ax = ga.plot.structure_attention(helix, graph, weights, strongest=10)
        >>> len(ax.collections[-1].get_segments())
        10
    """
    x = _checked_positions(ca_positions)
    weights = _checked_weights(weights, graph, len(x))
    chain = _checked_chains(chain_index, len(x))
    looked_at = _checked_targets(targets, len(x))
    min_separation = as_int("min_separation", min_separation, 1)
    names = {"labels": (labels, len(x)), "chain_names": (chain_names, int(chain.max()) + 1)}
    for name, (texts, number) in names.items():
        if texts is not None and len(texts) != number:
            raise ValueError(f"{name} must be {number} texts, got {len(texts)}")
    if strongest is None:
        strongest = min(150, max(12, len(x) // 2))
    strongest, there = as_int("strongest", strongest, 0), x.isfinite().all(dim=1)
    pairs, shown = _strongest_pairs(
        graph, weights, chain, there, looked_at, strongest, min_separation
    )
    if vmax is not None:
        scale = 0.0, as_float("vmax", vmax, positive=True)
    else:
        scale = (float(shown[0]), float(shown[-1])) if len(shown) else (0.0, 1.0)
    turned = turned_to_principal_axes(x)
    across, up = _extent(turned)
    height = min(6.5, max(2.4, 5.6 * up / max(across, 1e-6)))
    ax = axes_or_new(ax, 5.6 + 0.8 * colorbar, height + 0.2, square=True)
    ax.set_aspect("equal")
    depth = _depth(turned)
    _draw_trace(ax, turned, depth, chain)
    _draw_edges(ax, turned, pairs, shown, scale)
    if looked_at is not None:
        _mark(ax, turned, looked_at, labels)
    _scale_bar(ax, turned)
    if chain_names is not None:
        _name_chains(ax, [str(name) for name in chain_names])
    if colorbar and len(shown):
        colour_bar(ax.collections[-1], "attention weight")
    ax.set_axis_off()
    return ax


def turned_to_principal_axes(x: Tensor) -> Tensor:
    """Positions with the longest direction across, the next upwards, the third to the reader.

    A rotation, no mirror: helices stay right-handed. The first residue lies on the left, below.
    """
    there = x[x.isfinite().all(dim=1)]
    x, there = x - there.mean(dim=0), there - there.mean(dim=0)
    _, axes = torch.linalg.eigh(there.T @ there)
    axes = axes.flip(1)  # the longest first
    for k in (0, 1):
        if float(there[0] @ axes[:, k]) > 0:
            axes[:, k] = -axes[:, k]
    if float(torch.linalg.det(axes)) < 0:
        axes[:, 2] = -axes[:, 2]
    return x @ axes


# What is given, checked.


def _checked_positions(positions: Any) -> Tensor:
    if not isinstance(positions, Tensor) or positions.dim() != 2 or positions.shape[1] != 3:
        got = list(positions.shape) if isinstance(positions, Tensor) else type(positions).__name__
        raise ValueError(f"ca_positions must be a tensor of shape [N, 3], got {got}")
    if len(positions) < 2:
        raise ValueError(f"ca_positions must hold at least 2 residues, got {len(positions)}")
    x = positions.detach().double().cpu()
    if x.isinf().any() or int(x.isfinite().all(dim=1).sum()) < 2:
        raise ValueError(
            "ca_positions must be finite for at least 2 residues, and NaN where an atom is missing"
        )
    return x


def _checked_weights(weights: Any, graph: Any, residues: int) -> Tensor:
    if not isinstance(graph, TokenGraph) or (graph.num_targets, graph.num_sources) != (
        residues,
        residues,
    ):
        raise ValueError(f"graph must be a TokenGraph of {residues} tokens, got {graph!r}")
    if not isinstance(weights, Tensor) or weights.shape != (graph.num_edges,):
        got = list(weights.shape) if isinstance(weights, Tensor) else type(weights).__name__
        raise ValueError(
            f"weights must be a tensor of shape [{graph.num_edges}] (one per edge: pick a head "
            f"and a sequence), got {got}"
        )
    weights = weights.detach().double().cpu()
    if not (weights.isfinite() & (weights >= 0)).all():
        raise ValueError("weights must be finite numbers >= 0")
    return weights


def _checked_chains(chain_index: Any, residues: int) -> Tensor:
    if chain_index is None:
        return torch.zeros(residues, dtype=torch.int64)
    is_fine = isinstance(chain_index, Tensor) and chain_index.shape == (residues,)
    if not is_fine or chain_index.is_floating_point() or int(chain_index.min()) < 0:
        got = type(chain_index).__name__
        if isinstance(chain_index, Tensor):
            got = f"{chain_index.dtype} of shape {list(chain_index.shape)}"
            if is_fine and not chain_index.is_floating_point():
                got += f" with {int(chain_index.min())}"
        raise ValueError(f"chain_index must be integers >= 0 of shape [{residues}], got {got}")
    return chain_index.detach().cpu().long()


def _checked_targets(targets: Any, residues: int) -> list[int] | None:
    if targets is None:
        return None
    if not isinstance(targets, Iterable):
        raise ValueError(f"targets must be a list of residues, got {targets!r}")
    found = [as_int("targets", target, 0) for target in targets]
    if beyond := [target for target in found if target >= residues]:
        raise ValueError(f"targets must be among 0 .. {residues - 1}, got {beyond[0]}")
    return found


# What is drawn.


def _strongest_pairs(
    graph: TokenGraph,
    weights: Tensor,
    chain: Tensor,
    there: Tensor,
    targets: list[int] | None,
    strongest: int,
    min_separation: int,
) -> tuple[Tensor, Tensor]:
    """Pairs of residues [K, 2] and their weights [K], the strongest last: it is drawn on top."""
    source, target = graph.edge_index.cpu()
    wanted = (source - target).abs() >= min_separation
    wanted |= (chain[source] != chain[target]) & (source != target)
    wanted &= (weights > 0) & there[source] & there[target]
    if targets is not None:
        wanted &= torch.isin(target, torch.tensor(targets, dtype=torch.int64))
    source, target, weights = source[wanted], target[wanted], weights[wanted]
    number = torch.minimum(source, target) * len(chain) + torch.maximum(source, target)
    keys, place = number.unique(return_inverse=True)
    largest = torch.zeros(len(keys), dtype=weights.dtype)
    largest.scatter_reduce_(0, place, weights, "amax")
    order = largest.argsort(stable=True)[max(0, len(keys) - strongest) :]
    pairs = torch.stack([keys // len(chain), keys % len(chain)], dim=1)
    return pairs[order], largest[order]


def _depth(turned: Tensor) -> Tensor:
    """Return the depth of every residue: 0 at the back, 1 in front."""
    z = turned[:, 2]
    low, high = (float(end(z[z.isfinite()])) for end in (torch.amin, torch.amax))
    return (z - low) / max(high - low, 1e-9)


def _extent(turned: Tensor) -> tuple[float, float]:
    """How wide and how high the structure is."""
    there = turned[turned.isfinite().all(dim=1)]
    across, up, _ = (there.amax(0) - there.amin(0)).tolist()
    return across, up


def _pieces(turned: Tensor, chain: Tensor) -> list[Tensor]:
    """Residues in a row without a gap."""
    near = turned.diff(dim=0).norm(dim=1) <= BOND  # not where an atom is missing
    apart = ~near | (chain.diff() != 0)
    ends = (apart.nonzero()[:, 0] + 1).tolist()
    return list(torch.arange(len(turned)).tensor_split(ends))


def _draw_trace(ax: Axes, turned: Tensor, depth: Tensor, chain: Tensor) -> Any:
    """The chains as smooth lines, what is in front over what is behind, on a white rim."""
    from matplotlib.collections import LineCollection
    from matplotlib.colors import to_rgb

    lines: list[tuple[float, Any, float, Any]] = []  # depth, points, width, colour
    for piece in _pieces(turned, chain):
        colour = torch.tensor(to_rgb(_colour(int(chain[piece[0]]))), dtype=torch.float64)
        if len(piece) == 1:
            continue
        points, along = _smooth(turned[piece]), _smooth(depth[piece][:, None])[:, 0]
        for k in range(len(points) - 1):
            near = float(along[k : k + 2].mean().clamp(0, 1))
            width = FARTHEST + near * (NEAREST - FARTHEST)
            shade = tuple((1 - (1 - colour) * (0.45 + 0.55 * near)).tolist())
            lines.append((near, points[k : k + 2, :2].numpy(), width + 1.6, "white"))
            overlapping = points[max(k - 1, 0) : k + 3, :2].numpy()  # the rim cuts no bend
            lines.append((near, overlapping, width, shade))
    lines.sort(key=lambda line: line[0])
    trace = LineCollection(
        [points for _, points, _, _ in lines],
        linewidths=[width for _, _, width, _ in lines],
        colors=[colour for _, _, _, colour in lines],
        capstyle="butt",
        joinstyle="round",
        zorder=2,
    )
    ax.add_collection(trace)
    for own in chain.unique():
        first = turned[(chain == own) & turned.isfinite().all(dim=1)]
        if not len(first):
            continue
        dot: dict[str, Any] = {
            "color": _colour(int(own)),
            "markeredgecolor": INK,
            "markeredgewidth": 0.6,
        }
        ax.plot(*first[0, :2].tolist(), "o", markersize=5, zorder=4, **dot)
    ax.autoscale_view()
    ax.margins(0.04)
    return trace


def _smooth(points: Tensor, steps: int = 6) -> Tensor:
    """A Catmull-Rom spline through points [n, C]."""
    padded = torch.cat([2 * points[:1] - points[1:2], points, 2 * points[-1:] - points[-2:-1]])
    before, start, stop, after = (padded[k : len(padded) - 3 + k] for k in range(4))
    t = torch.arange(steps, dtype=points.dtype)[None, :, None] / steps
    before, start, stop, after = (x[:, None] for x in (before, start, stop, after))
    curve = start + 0.5 * t * (
        stop - before
        + t * (2 * before - 5 * start + 4 * stop - after)
        + t.square() * (3 * (start - stop) + after - before)
    )  # fmt: skip
    return torch.cat([curve.flatten(0, 1), points[-1:]])


def _draw_edges(
    ax: Axes, turned: Tensor, pairs: Tensor, weights: Tensor, scale: tuple[float, float]
) -> None:
    from matplotlib.collections import LineCollection
    from matplotlib.colors import LinearSegmentedColormap, Normalize

    if not len(pairs):
        return
    low, top = scale
    share = ((weights - low) / (top - low)).clamp(0, 1) if top > low else torch.ones_like(weights)
    lines = LineCollection(
        list(turned[pairs][..., :2].numpy()),
        linewidths=(THINNEST + share * (WIDEST - THINNEST)).tolist(),
        cmap=LinearSegmentedColormap.from_list("edges", EDGES),
        norm=Normalize(low, top),
        capstyle="round",
        alpha=0.85,
        zorder=3,
    )
    lines.set_array(weights.numpy())
    ax.add_collection(lines)


def _mark(ax: Axes, turned: Tensor, targets: list[int], labels: Sequence[str] | None) -> None:
    """A ring around every target, and its name."""
    from matplotlib.patheffects import withStroke

    ring: dict[str, Any] = {
        "markerfacecolor": "white",
        "markeredgecolor": EDGES[-1],
        "markeredgewidth": 1.6,
    }
    for target in targets:
        place = (float(turned[target, 0]), float(turned[target, 1]))
        ax.plot(*place, "o", markersize=7, zorder=5, **ring)
        if labels is not None:
            ax.annotate(
                str(labels[target]), place, (5, 5), textcoords="offset points", fontsize=8,
                color=INK, zorder=6, path_effects=[withStroke(linewidth=2, foreground="white")],
                parse_math=False,
            )  # fmt: skip


def _scale_bar(ax: Axes, turned: Tensor) -> None:
    """A line of 10 Angstrom below the structure."""
    there = turned[turned.isfinite().all(dim=1)]
    left, low, _ = there.amin(0).tolist()
    y = low - 0.07 * max(_extent(turned))
    ax.plot([left, left + 10], [y, y], color=INK, linewidth=1.4, solid_capstyle="butt")
    ax.annotate("10 Å", (left + 10, y), (4, 0), textcoords="offset points", fontsize=8, color=INK,
                va="center")  # fmt: skip


def _name_chains(ax: Axes, names: list[str]) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=_colour(k), linewidth=2.4) for k in range(len(names))]
    legend = ax.legend(handles, names, frameon=False, fontsize=8, loc="upper right",
                       bbox_to_anchor=(1, 0.02), ncols=min(len(names), 6))  # fmt: skip
    for text in legend.get_texts():
        text.set_parse_math(False)


def _colour(chain: int) -> str:
    return CHAINS[chain % len(CHAINS)]
