"""Parts of Swin: window graphs on padded grids, blocks with biases by position, and merging."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from graphattn.distributed.sharded_graph import ShardedGraph
from graphattn.graphs import TokenGraph, grid_block_graph
from graphattn.graphs.arguments import as_int
from graphattn.graphs.structures.grid_blocks import GridBlocks
from graphattn.graphs.structures.grid_windows import Grid, GridWindows
from graphattn.nn import OffsetBias, PreNormBlock
from graphattn.nn.files.config import Configured

OVER_A_GRID = Grid, GridWindows, GridBlocks


def stage_graph(height: int, width: int, window_size: int, *, shifted: bool) -> TokenGraph:
    """Make the graph of the windows of a Swin block on a grid of tokens, padded if necessary.

    If the grid is not larger than a window along an axis, there is one window along that axis,
    without shift. If windows do not divide the grid, the graph also has the rows below and the
    columns to the right with which Swin pads it.
    """
    smallest = min(height, width)
    size = min(window_size, smallest)
    shift = size // 2 if shifted and smallest > window_size else 0
    return grid_block_graph(height + -height % size, width + -width % size, size, shift=shift)


class WindowBlock(PreNormBlock):
    r"""A pre-norm block over windows of a grid, with a learned bias by relative position.

    .. math::
        x' = x + \mathrm{mixer}(\mathrm{norm}(x), G, B), \qquad
        y = x' + W_2 \, \mathrm{gelu}(W_1 \, \mathrm{norm}(x'))

    Source: Liu et al. (2021), Eq. 3 and 4. If the graph has more tokens than the grid, the block
        adds rows of zeros below and columns of zeros to the right after the first norm, as Swin
        does. The tokens of the image see them: their keys and values are the biases of the
        projections.

    Args:
        mixer: a mixer that :class:`~graphattn.nn.PreNormBlock` accepts.
        max_offset: the largest offset along an axis in the table of biases, ``window_size - 1``;
            None for a mixer that takes no biases.
        mlp_ratio, dropout, drop_path: as in :class:`~graphattn.nn.PreNormBlock`.

    Shapes:
        - **x**: [*, height * width, dim], the tokens of a grid in row-major order
        - **graph**: over these tokens, or over those of a larger grid
          (:func:`~graphattn.grid_block_graph`)
        - **grid**: height and width; can be omitted if there is no padding (keyword)
        - **output**: [*, height * width, dim]

    Raises:
        ValueError: as :class:`~graphattn.nn.PreNormBlock`, and if the graph does not fit the grid.

    Example:
        >>> import torch, graphattn as ga
        >>> from graphattn.models.vision.swin_parts import WindowBlock
        >>> block = WindowBlock(ga.nn.DotProductAttention(16, heads=4), 3)
        >>> block.position_bias.table.shape
        torch.Size([49, 4])
        >>> x, graph = torch.randn(2, 7 * 6, 16), ga.grid_block_graph(8, 8, 4, shift=2)
        >>> block(x, graph, grid=(7, 6)).shape
        torch.Size([2, 42, 16])
    """

    def __init__(
        self,
        mixer: nn.Module,
        max_offset: int | None,
        *,
        mlp_ratio: float = 4.0,
        dropout: float = 0.0,
        drop_path: float = 0.0,
    ) -> None:
        super().__init__(mixer, mlp_ratio=mlp_ratio, dropout=dropout, drop_path=drop_path)
        self.position_bias = None
        if max_offset is not None:
            heads = getattr(mixer, "heads", None)
            if not isinstance(heads, int):
                raise ValueError(
                    "mixer must have an integer attribute `heads`, because each head has its own "
                    f"biases, got {type(mixer).__name__}"
                )
            reach = as_int("max_offset", max_offset, 0)
            self.position_bias = OffsetBias(heads, (reach, reach))

    def reset_parameters(self) -> None:
        """Initialise every parameter again."""
        super().reset_parameters()
        if self.position_bias is not None:
            self.position_bias.reset_parameters()

    def forward(
        self,
        x: Tensor,
        graph: TokenGraph | ShardedGraph | Tensor,
        context: Tensor | None = None,
        *,
        grid: tuple[int, int] | None = None,
        **given: Any,
    ) -> Tensor:
        """Mix the tokens of every window, then transform each by itself."""
        padding = _padding(graph, grid)
        if self.position_bias is not None and given.get("edge_bias") is None:
            given["edge_bias"] = self._biases(graph, grid)
        if padding is None or grid is None:
            return super().forward(x, graph, context, **given)
        if context is not None:
            raise ValueError(f"context must be None on a padded grid, got {type(context).__name__}")
        (below, right), (height, width) = padding, grid
        cells = self.mixer_norm(x).unflatten(-2, (height, width))
        cells = functional.pad(cells, (0, 0, 0, right, 0, below))
        mixed = self.mixer(cells.flatten(-3, -2), graph, **given)
        mixed = mixed.unflatten(-2, (height + below, width + right))[..., :height, :width, :]
        x = x + self._branch(mixed.flatten(-3, -2), graph)
        return x + self._branch(self.mlp(self.mlp_norm(x)), graph)

    def _biases(self, graph: Any, grid: tuple[int, int] | None) -> Tensor:
        """Return the biases of a graph; if it has no grid, from positions on the given one."""
        assert self.position_bias is not None
        knows = isinstance(graph, TokenGraph) and isinstance(graph.structure, OVER_A_GRID)
        places = None
        if grid is not None and not knows:
            cell = torch.arange(grid[0] * grid[1], device=graph.device)
            places = torch.stack([cell // grid[1], cell % grid[1]], dim=-1)
        bias: Tensor = self.position_bias(graph, positions=places)
        return bias


def _padding(graph: Any, grid: tuple[int, int] | None) -> tuple[int, int] | None:
    """Return how many rows and columns a graph has more than the grid, or None if none."""
    if grid is None or not isinstance(graph, TokenGraph):
        return None
    height, width = grid
    if graph.num_targets == height * width:
        return None
    tall, wide = (getattr(graph.structure, name, 0) for name in ("height", "width"))
    if tall < height or wide < width:
        raise ValueError(
            f"graph must be over the {height} x {width} tokens of the grid, or over a larger grid "
            f"that contains it, got {graph}"
        )
    return tall - height, wide - width


class PatchMerging(Configured, nn.Module):
    """Merges four neighbouring tokens into one of twice the width, between two stages of Swin.

    Source: Liu et al. (2021), Section 3.1. A grid of odd size is padded with zeros.

    Args:
        dim: width of the tokens; the output has width 2 * dim.

    Shapes:
        - **x**: [*, height * width, dim]
        - **grid**: height and width
        - **output**: [*, ceil(height / 2) * ceil(width / 2), 2 * dim]

    Example:
        >>> import torch
        >>> from graphattn.models.vision.swin_parts import PatchMerging
        >>> PatchMerging(16)(torch.randn(2, 7 * 6, 16), (7, 6)).shape
        torch.Size([2, 12, 32])
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = as_int("dim", dim, 1)
        self.norm = nn.LayerNorm(4 * self.dim)
        self.reduction = nn.Linear(4 * self.dim, 2 * self.dim, bias=False)

    def reset_parameters(self) -> None:
        """Initialise every parameter again."""
        self.norm.reset_parameters()
        self.reduction.reset_parameters()

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        """Concatenate four tokens, normalise them, and apply the linear map."""
        height, width = grid
        cells = x.unflatten(-2, (height, width))
        if height % 2 or width % 2:
            cells = functional.pad(cells, (0, 0, 0, width % 2, 0, height % 2))
        # In Swin's order: the row within a pair of rows changes first.
        cells = cells.unflatten(-2, (-1, 2)).unflatten(-4, (-1, 2))
        four = torch.movedim(cells, (-2, -4), (-3, -2)).flatten(-3)
        merged: Tensor = self.reduction(self.norm(four.flatten(-3, -2)))
        return merged
