"""Figure of attention on a protein structure: the C-alpha trace and the strongest edges."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from graphattn.data.structures.principal_axes import rotated_to_principal_axes
from graphattn.graphs import TokenGraph
from graphattn.graphs.arguments import as_float, as_int
from graphattn.plot.drawing.style import INK, axes_or_new, colour_bar, plain_legend
from graphattn.plot.matrices import checked_weights

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Chains are pale, so that edges stand out: lighter Okabe-Ito blue, green, purple, grey and so on.
CHAINS = ("#7fb3d5", "#7fcbb0", "#d9a9c6", "#a9a9a9", "#c9b458", "#a5d3f0")
EDGES = ("#f3b27a", "#d55e00", "#6e1423")  # from a weak edge to the strongest
BOND = 4.5  # Angstrom; consecutive C-alpha atoms are 3.8 apart (2.9 in a cis peptide)
NEAREST, FARTHEST = 2.8, 1.2  # width of the trace in points, in front and at the back
WIDEST, THINNEST = 3.2, 0.5  # width of edges in points


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
    """Draw attention on a protein: the strongest edges as lines between residues of its trace.

    The structure is rotated to its principal axes: the longest direction is horizontal and the
    second longest is vertical. Parts farther back are thinner and paler. Each chain has a colour
    and a dot at its first residue. If two consecutive residues are more than 4.5 Angstrom apart,
    residues are missing between them and the trace has a gap. If two residues see each other, one
    line with the larger of the two weights is drawn. A line with a larger weight is wider and
    darker.

    Args:
        ca_positions: [N, 3], positions of the C-alpha atoms in Angstrom, such as those of
            :func:`graphattn.data.read_structure`; NaN for a missing atom. A residue without a
            position is not drawn, and the trace has a gap.
        graph: the graph of the N residues whose edges have these weights.
        weights: [E], >= 0, in the order of ``graph.edge_index``, of one head of one sequence.
        chain_index: integers [N], the number of every residue's chain; one chain if None.
        chain_names: one name per chain for a legend; no legend if None.
        targets: residues to mark with a ring; only their attention is drawn. The attention of all
            residues, without rings, if None.
        strongest: the number of lines to draw; by default half the number of residues, but at least
            12 and at most 150, so that the chain of a long protein remains visible.
        min_separation: edges within a chain are drawn only between residues that are at least this
            number of positions apart, at least 1; edges between neighbors along the chain would
            hide the trace.
        vmax: the weight of the widest and darkest line; the scale then begins at 0. Give the same
            value to compare figures. If None, the scale goes from the smallest to the largest
            weight that is drawn.
        labels: one text per residue; the texts of `targets` are written next to them.
        colorbar: whether to draw a colour bar next to the axes.
        ax: where to draw; new axes if None.

    Returns:
        The matplotlib axes; ``ax.collections`` are the trace, then the edges.

    Raises:
        ValueError: if shapes do not fit together, a position is infinite, fewer than two residues
            have a position, a weight is negative or not finite, or a residue does not exist.

    Example:
        >>> import torch, graphattn as ga
        >>> turn = torch.arange(20) * 1.745  # an alpha helix: 100 degrees and 1.5 Angstrom each
        >>> helix = torch.stack([2.3 * turn.cos(), 2.3 * turn.sin(), 1.5 * torch.arange(20)], dim=1)
        >>> pair = torch.cat([helix, helix + torch.tensor([9.0, 0.0, 0.0])])  # side by side
        >>> graph = ga.knn_graph(pair, k=12)
        >>> weights = ga.attention_weights(pair[:, None], pair[:, None], graph, sigma=3.0)[:, 0]
        >>> ax = ga.plot.structure_attention(
        ...     pair, graph, weights, chain_index=torch.arange(40) // 20, chain_names=["A", "B"]
        ... )
        >>> len(ax.collections[-1].get_segments())  # the strongest pairs
        20
    """
    x = _checked_positions(ca_positions)
    weights = _checked_weights(weights, graph, len(x))
    chain = _checked_chains(chain_index, len(x))
    marked = _checked_targets(targets, len(x))
    min_separation = as_int("min_separation", min_separation, 1)
    names = {"labels": (labels, len(x)), "chain_names": (chain_names, int(chain.max()) + 1)}
    for name, (texts, number) in names.items():
        if texts is not None and len(texts) != number:
            per = "residue" if name == "labels" else "chain"
            raise ValueError(f"{name} must be {number} texts, one per {per}, got {len(texts)}")
    if strongest is None:
        strongest = min(150, max(12, len(x) // 2))
    strongest, has_position = as_int("strongest", strongest, 0), x.isfinite().all(dim=1)
    pairs, shown = _strongest_pairs(
        graph, weights, chain, has_position, marked, strongest, min_separation
    )
    if vmax is not None:
        scale = 0.0, as_float("vmax", vmax, positive=True)
    else:
        scale = (float(shown[0]), float(shown[-1])) if len(shown) else (0.0, 1.0)
    rotated = rotated_to_principal_axes(x)
    across, up = _extent(rotated)
    height = min(5.0, max(2.2, 4.0 * up / max(across, 1e-6)))
    ax = axes_or_new(ax, 4.0 + 0.8 * colorbar, height + 0.2, square=True)
    ax.set_aspect("equal")
    depth = _depth(rotated)
    _draw_trace(ax, rotated, depth, chain)
    _draw_edges(ax, rotated, pairs, shown, scale)
    if marked is not None:
        _mark(ax, rotated, marked, labels)
    _scale_bar(ax, rotated)
    if chain_names is not None:
        _name_chains(ax, [str(name) for name in chain_names])
    if colorbar and len(shown):
        colour_bar(ax.collections[-1], "attention weight")
    ax.set_axis_off()
    return ax


# Checks of the arguments.


def _checked_positions(positions: Any) -> Tensor:
    if not isinstance(positions, Tensor) or positions.dim() != 2 or positions.shape[1] != 3:
        got = list(positions.shape) if isinstance(positions, Tensor) else type(positions).__name__
        raise ValueError(f"ca_positions must be a tensor of shape [N, 3], got {got}")
    if len(positions) < 2:
        raise ValueError(f"ca_positions must have at least 2 residues, got {len(positions)}")
    x = positions.detach().double().cpu()
    if x.isinf().any() or int(x.isfinite().all(dim=1).sum()) < 2:
        raise ValueError(
            "ca_positions must be finite for at least 2 residues, and NaN (not infinite) for a "
            "missing atom"
        )
    return x


def _checked_weights(weights: Any, graph: Any, residues: int) -> Tensor:
    size = (residues, residues)
    if not isinstance(graph, TokenGraph) or (graph.num_targets, graph.num_sources) != size:
        raise ValueError(f"graph must be a TokenGraph of {residues} tokens, got {graph!r}")
    return checked_weights(weights, graph).double()


def _checked_chains(chain_index: Any, residues: int) -> Tensor:
    if chain_index is None:
        return torch.zeros(residues, dtype=torch.int64)
    fits = isinstance(chain_index, Tensor) and chain_index.shape == (residues,)
    if not fits or chain_index.is_floating_point() or int(chain_index.min()) < 0:
        got = type(chain_index).__name__
        if isinstance(chain_index, Tensor):
            got = f"{chain_index.dtype} of shape {list(chain_index.shape)}"
            if fits and not chain_index.is_floating_point():
                got += f" with {int(chain_index.min())}"
        raise ValueError(
            f"chain_index must be a tensor of integers >= 0 of shape [{residues}], got {got}"
        )
    return chain_index.detach().cpu().long()


def _checked_targets(targets: Any, residues: int) -> list[int] | None:
    if targets is None:
        return None
    if not isinstance(targets, Iterable):
        raise ValueError(f"targets must be a list of residues, got {targets!r}")
    targets = [as_int("targets", target, 0) for target in targets]
    if beyond := [target for target in targets if target >= residues]:
        raise ValueError(f"targets must be residues from 0 to {residues - 1}, got {beyond[0]}")
    return targets


# Drawing.


def _strongest_pairs(
    graph: TokenGraph,
    weights: Tensor,
    chain: Tensor,
    has_position: Tensor,
    targets: list[int] | None,
    strongest: int,
    min_separation: int,
) -> tuple[Tensor, Tensor]:
    """Pairs of residues [K, 2] and their weights [K]; the strongest is last and drawn on top."""
    source, target = graph.edge_index.cpu()
    selected = (source - target).abs() >= min_separation
    selected |= (chain[source] != chain[target]) & (source != target)
    selected &= (weights > 0) & has_position[source] & has_position[target]
    if targets is not None:
        selected &= torch.isin(target, torch.tensor(targets, dtype=torch.int64))
    source, target, weights = source[selected], target[selected], weights[selected]
    number = torch.minimum(source, target) * len(chain) + torch.maximum(source, target)
    keys, key_index = number.unique(return_inverse=True)
    largest = torch.zeros(len(keys), dtype=weights.dtype)
    largest.scatter_reduce_(0, key_index, weights, "amax")
    order = largest.argsort(stable=True)[max(0, len(keys) - strongest) :]
    pairs = torch.stack([keys // len(chain), keys % len(chain)], dim=1)
    return pairs[order], largest[order]


def _depth(rotated: Tensor) -> Tensor:
    """Return the depth of every residue: 0 at the back, 1 in front."""
    z = rotated[:, 2]
    low, high = (float(end(z[z.isfinite()])) for end in (torch.amin, torch.amax))
    return (z - low) / max(high - low, 1e-9)


def _extent(rotated: Tensor) -> tuple[float, float]:
    """Width and height of the structure."""
    known = rotated[rotated.isfinite().all(dim=1)]
    across, up, _ = (known.amax(0) - known.amin(0)).tolist()
    return across, up


def _pieces(rotated: Tensor, chain: Tensor) -> list[Tensor]:
    """Divide the residues into pieces of chains without a gap."""
    # A missing atom is NaN, and a comparison with NaN is False.
    is_bonded = rotated.diff(dim=0).norm(dim=1) <= BOND
    is_gap = ~is_bonded | (chain.diff() != 0)
    ends = (is_gap.nonzero()[:, 0] + 1).tolist()
    return list(torch.arange(len(rotated)).tensor_split(ends))


def _draw_trace(ax: Axes, rotated: Tensor, depth: Tensor, chain: Tensor) -> None:
    """Draw the chains as smooth lines with a white rim, from the back to the front."""
    from matplotlib.collections import LineCollection
    from matplotlib.colors import to_rgb

    lines: list[tuple[float, Any, float, Any]] = []  # depth, points, width, colour
    for piece in _pieces(rotated, chain):
        colour = torch.tensor(to_rgb(_colour(int(chain[piece[0]]))), dtype=torch.float64)
        if len(piece) == 1:
            continue
        points, depths = _smooth(rotated[piece]), _smooth(depth[piece][:, None])[:, 0]
        for k in range(len(points) - 1):
            nearness = float(depths[k : k + 2].mean().clamp(0, 1))
            width = FARTHEST + nearness * (NEAREST - FARTHEST)
            shade = tuple((1 - (1 - colour) * (0.45 + 0.55 * nearness)).tolist())
            lines.append((nearness, points[k : k + 2, :2].numpy(), width + 1.6, "white"))
            # The coloured line overlaps the next pieces, so that white rims do not cut it in bends.
            overlapping = points[max(k - 1, 0) : k + 3, :2].numpy()
            lines.append((nearness, overlapping, width, shade))
    lines.sort(key=lambda line: line[0])
    _, segments, widths, colours = zip(*lines, strict=True) if lines else ((),) * 4
    style: dict[str, Any] = {"capstyle": "butt", "joinstyle": "round", "zorder": 2}
    ax.add_collection(LineCollection(segments, linewidths=widths, colors=colours, **style))
    for number in chain.unique():
        known = rotated[(chain == number) & rotated.isfinite().all(dim=1)]
        if not len(known):
            continue
        dot: dict[str, Any] = {"color": _colour(int(number)), "markeredgecolor": INK}
        ax.plot(*known[0, :2].tolist(), "o", markersize=5, markeredgewidth=0.6, zorder=4, **dot)
    ax.autoscale_view()
    ax.margins(0.04)


def _smooth(points: Tensor, steps: int = 6) -> Tensor:
    """Interpolate points [n, C] by a Catmull-Rom spline, with `steps` points per interval."""
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
    ax: Axes, rotated: Tensor, pairs: Tensor, weights: Tensor, scale: tuple[float, float]
) -> None:
    from matplotlib.collections import LineCollection
    from matplotlib.colors import LinearSegmentedColormap, Normalize

    if not len(pairs):
        return
    low, top = scale
    share = ((weights - low) / (top - low)).clamp(0, 1) if top > low else torch.ones_like(weights)
    lines = LineCollection(
        list(rotated[pairs][..., :2].numpy()),
        linewidths=(THINNEST + share * (WIDEST - THINNEST)).tolist(),
        cmap=LinearSegmentedColormap.from_list("edges", EDGES),
        norm=Normalize(low, top),
        capstyle="round",
        alpha=0.85,
        zorder=3,
    )
    lines.set_array(weights.numpy())
    ax.add_collection(lines)


def _mark(ax: Axes, rotated: Tensor, targets: list[int], labels: Sequence[str] | None) -> None:
    """Draw a ring around every target and write its label."""
    from matplotlib.patheffects import withStroke

    ring: dict[str, Any] = {"markerfacecolor": "white", "markeredgecolor": EDGES[-1]}
    for target in targets:
        position = (float(rotated[target, 0]), float(rotated[target, 1]))
        ax.plot(*position, "o", markersize=7, markeredgewidth=1.6, zorder=5, **ring)
        if labels is not None:
            ax.annotate(
                str(labels[target]), position, (5, 5), textcoords="offset points", fontsize=8,
                color=INK, zorder=6, path_effects=[withStroke(linewidth=2, foreground="white")],
                parse_math=False,
            )  # fmt: skip


def _scale_bar(ax: Axes, rotated: Tensor) -> None:
    """Draw a line of 10 Angstrom below the structure."""
    known = rotated[rotated.isfinite().all(dim=1)]
    left, low, _ = known.amin(0).tolist()
    y = low - 0.07 * max(_extent(rotated))
    ax.plot([left, left + 10], [y, y], color=INK, linewidth=1.4, solid_capstyle="butt")
    ax.annotate("10 Å", (left + 10, y), (4, 0), textcoords="offset points", fontsize=8, color=INK,
                va="center")  # fmt: skip


def _name_chains(ax: Axes, names: list[str]) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=_colour(k), linewidth=2.4) for k in range(len(names))]
    place = {"loc": "upper right", "bbox_to_anchor": (1, 0.02)}
    plain_legend(ax, handles, names, ncols=min(len(names), 6), **place)


def _colour(chain: int) -> str:
    return CHAINS[chain % len(CHAINS)]
