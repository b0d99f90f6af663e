"""Swin: a vision transformer in stages, over windows that shift in every second block."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self

from torch import Tensor, nn
from torch.nn import functional

from graphattn.distributed.sharded_graph import ShardedGraph
from graphattn.graphs import TokenGraph
from graphattn.graphs.arguments import as_int, as_share
from graphattn.models.mixers import Mixer, mixers
from graphattn.models.stack import BlockStack, Graphs
from graphattn.models.vision.patches import check_images, draw_head, make_head
from graphattn.models.vision.swin_parts import PatchMerging, WindowBlock, stage_graph
from graphattn.models.vision.weights import swin_from_transformers
from graphattn.nn.attention import GraphAttention

Size = int | Sequence[int]


class SwinTransformer(BlockStack):
    r"""Swin, from images to logits of classes: stages of blocks over shifted windows.

    Source: Liu et al. (2021). Patches are tokens of a grid. In the blocks of a stage, every token
    sees the `window_size` x `window_size` tokens of its own window, with a learned bias for every
    relative position and head. In every second block the windows are shifted by half their size.
    Between stages, four neighbouring tokens become one token of twice the width. The graph of every
    block is a :func:`~graphattn.grid_block_graph`, and any mixer works on it: "krause" is the Swin
    of *Krause Synchronization Transformers*.

    Borders are treated as in the published code. If a grid is not larger than a window along an
    axis, it is one window along that axis, without shift, and the table of biases has that size. If
    windows do not divide a grid, it is padded with zeros below and to the right, after the first
    norm of the block, and the tokens of the image see these zeros. An image is padded in the same
    way if patches do not divide it. Images can have any size.

    Tables of biases and the head start as in Swin, normally distributed with deviation 0.02. All
    other maps start with PyTorch's default; Swin uses deviation 0.02 for those of blocks and
    merges, too.

    Args:
        image_size: size of the images in pixels: one number or (height, width). It determines the
            size of the tables of biases, and the default of :meth:`graphs`.
        patch_size: number of pixels of a patch along each axis.
        num_classes: number of classes of the head. With 0 there is no head, and the output is the
            pooled features.
        dim: width of the first stage; every stage doubles it.
        depths: number of blocks of every stage.
        heads: heads of every stage; each divides the stage's width.
        window_size: number of tokens of a window along each axis.
        mixer: a name, such as "dot", "vlt", "gka" or "krause"; or one entry per block over all
            stages: a name or a layer of the stage's width.
        channels: number of channels of the images.
        mlp_ratio: hidden width of the perceptrons, in units of the stage's width.
        dropout: share of the features that training sets to zero after the embedding and after
            every layer and perceptron.
        drop_path: share of the images for which training leaves out a part of the last block. The
            share grows linearly from 0 in the first block.
        mixer_options: further options of the named layers, such as ``{"top_k": 8}``; a list
            contains one value per block over all stages, as :func:`top_k_schedule` makes it.

    Shapes:
        - **images**: [*, channels, height, width]
        - **graph**: one graph per block (a sequence), over the tokens of the grid of its stage;
          None for those of :meth:`graphs`
        - **output**: [*, num_classes]

    Raises:
        ValueError: if an argument is not allowed; the message names it and says what is allowed.

    Example:
        >>> import torch, graphattn as ga
        >>> model = ga.models.SwinTransformer(
        ...     32, 2, 10, dim=16, depths=(2, 2), heads=(2, 4), window_size=4, mixer="krause",
        ...     mixer_options={"top_k": ga.models.top_k_schedule(4, 8, depth=4)})
        >>> model(torch.randn(2, 3, 32, 32)).shape
        torch.Size([2, 10])
        >>> for graph in model.graphs():
        ...     print(graph)
        TokenGraph(num_tokens=256, num_edges=4096, structure=GridBlocks)
        TokenGraph(num_tokens=256, num_edges=3136, structure=GridBlocks)
        TokenGraph(num_tokens=64, num_edges=1024, structure=GridBlocks)
        TokenGraph(num_tokens=64, num_edges=576, structure=GridBlocks)
    """

    options_of_parts: ClassVar = frozenset({"heads", "mixer_options"})

    def __init__(
        self,
        image_size: Size,
        patch_size: int,
        num_classes: int,
        dim: int,
        depths: Sequence[int],
        heads: Sequence[int],
        *,
        window_size: int = 7,
        mixer: Mixer = "dot",
        channels: int = 3,
        mlp_ratio: float = 4.0,
        dropout: float = 0.0,
        drop_path: float = 0.0,
        mixer_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.image_size = _as_size(image_size)
        self.patch_size = as_int("patch_size", patch_size, 1)
        self.num_classes = as_int("num_classes", num_classes, 0)
        self.window_size = as_int("window_size", window_size, 1)
        self.channels = as_int("channels", channels, 1)
        dim = as_int("dim", dim, 1)
        self.depths = _as_stages("depths", depths)
        if len(heads := _as_stages("heads", heads)) != len(self.depths):
            raise ValueError(
                f"heads must have one number per stage ({len(self.depths)}), got {len(heads)}"
            )
        last = as_share("drop_path", drop_path)
        self.patches = nn.Conv2d(self.channels, dim, self.patch_size, stride=self.patch_size)
        self.patch_norm = nn.LayerNorm(dim)
        self.dropout = nn.Dropout(as_share("dropout", dropout))
        self.blocks = nn.ModuleList()
        stage_of = [stage for stage, depth in enumerate(self.depths) for _ in range(depth)]
        widths = [dim * 2**stage for stage in stage_of]
        layers = mixers(
            mixer, len(stage_of), widths, [heads[s] for s in stage_of], options=mixer_options
        )
        self.windows = [min(self.window_size, *grid) for grid in self.grids()]
        for place, (layer, _) in enumerate(layers):
            reach = self.windows[stage_of[place]] - 1
            rate = last * place / max(len(stage_of) - 1, 1)
            block = WindowBlock(
                layer,
                reach if isinstance(layer, GraphAttention) else None,
                mlp_ratio=mlp_ratio,
                dropout=dropout,
                drop_path=rate,
            )
            self.blocks.append(block)
        stages = range(len(self.depths) - 1)
        self.merges = nn.ModuleList(PatchMerging(dim * 2**stage) for stage in stages)
        self.dim = dim * 2 ** (len(self.depths) - 1)
        self.norm = nn.LayerNorm(self.dim)
        self.head = make_head(self.dim, self.num_classes)

    def reset_parameters(self) -> None:
        """Initialise every parameter again."""
        for part in (self.patches, self.patch_norm, *self.blocks, *self.merges, self.norm):
            if callable(reset := getattr(part, "reset_parameters", None)):
                reset()
        draw_head(self.head)

    @classmethod
    def comparable(cls, config: dict[str, Any]) -> dict[str, Any]:
        """Return `config` with the windows of every stage, without what the weights' shapes
        show."""
        same = dict(config)
        size, patch, stages = same["image_size"], same["patch_size"], same["depths"]
        grids = _grids(_as_size(size), patch, len(stages))
        same["window_size"] = [min(same["window_size"], *grid) for grid in grids]
        for name in ("image_size", "num_classes", "channels"):
            same[name] = None
        return same

    @classmethod
    def from_transformers(cls, model: Any, **changes: Any) -> Self:
        """Make a model with the weights of a Swin of Hugging Face's transformers.

        `model` is a SwinForImageClassification, and the new model returns its logits; or a
        SwinModel, and the new model returns its averaged features (``pooler_output``). Another
        mixer copies those projections that it has: "krause" the queries, keys, values, output and
        table of biases, "gka" the output and the table. Its other parameters are initialised. The
        bandwidths of "krause" start at D^(1/4), where D is the number of features per head: its
        logits then differ from those of dot products only by squared lengths. Biases that `model`
        does not have (``qkv_bias=False``) are 0. In training, drop_path applies to both parts of a
        block, as published; in transformers it applies only to attention.

        Args:
            model: a model of transformers with its weights.
            changes: further arguments of the constructor, such as `mixer`, `mixer_options` and
                `drop_path`; they replace those from the config of `model`.

        Returns:
            A model in evaluation mode, with the dtype and on the device of `model`.

        Raises:
            ValueError: if `model` has another class, if its config needs something that this model
                does not have, or if its weights do not fit `changes`.
            TypeError: if the class does not have an argument.

        Example:
            >>> import torch, transformers, graphattn as ga
            >>> config = transformers.SwinConfig(
            ...     image_size=32, embed_dim=8, depths=[2], num_heads=[2], window_size=4)
            >>> theirs = transformers.SwinForImageClassification(config).eval()
            >>> model = ga.models.SwinTransformer.from_transformers(theirs)
            >>> images = torch.randn(2, 3, 32, 32)
            >>> torch.allclose(model(images), theirs(images).logits, atol=1e-5)
            True
            >>> nearest = ga.models.SwinTransformer.from_transformers(
            ...     theirs, mixer="krause", mixer_options={"top_k": 8})
        """
        loaded: Self = swin_from_transformers(cls, model, changes)
        return loaded

    # Grids and graphs.

    def grids(self, image_size: Size | None = None) -> list[tuple[int, int]]:
        """Return the height and width, in tokens, of the grid of every stage.

        Example:
            >>> import graphattn as ga
            >>> model = ga.models.SwinTransformer(224, 4, 10, 12, (1, 1, 1, 1), (1, 1, 1, 1))
            >>> model.grids()
            [(56, 56), (28, 28), (14, 14), (7, 7)]
        """
        size = self.image_size if image_size is None else _as_size(image_size)
        return list(_grids(size, self.patch_size, len(self.depths)))

    def graphs(self, image_size: Size | None = None) -> list[TokenGraph]:
        """Return the graphs, one per block, that `forward` uses if no graph is given.

        Args:
            image_size: size of the images in pixels; None for the model's own.

        Example:
            >>> import graphattn as ga
            >>> model = ga.models.SwinTransformer(32, 4, 10, 12, (2, 1), (1, 1), window_size=4)
            >>> [graph.structure.shift for graph in model.graphs()]
            [(0, 0), (2, 2), (0, 0)]
        """
        device = self.norm.weight.device
        graphs = []
        for size, depth, grid in zip(
            self.windows, self.depths, self.grids(image_size), strict=True
        ):
            plain, moved = (stage_graph(*grid, size, shifted=shifted) for shifted in (False, True))
            graphs += [(moved if place % 2 else plain).to(device) for place in range(depth)]
        return graphs

    # The forward pass.

    def encode(self, images: Tensor, graph: Graphs = None) -> Tensor:
        """Return the features of the tokens of the last stage, before averaging, [*, N, width].

        N is the number of tokens of the last stage, and the width is ``self.dim``.
        """
        check_images(images, self.channels, self.patches.weight.dtype)
        batch, (height, width) = images.shape[:-3], images.shape[-2:]
        patch = self.patch_size
        if height % patch or width % patch:
            images = functional.pad(images, (0, -width % patch, 0, -height % patch))
        cells = self.patches(images.reshape(-1, *images.shape[-3:])).flatten(-2).mT
        x = self.dropout(self.patch_norm(cells.reshape(*batch, *cells.shape[-2:])))
        graphs = self.graph_of_blocks(graph, (height, width))
        if any(isinstance(block_graph, ShardedGraph) for block_graph in graphs):
            raise ValueError(
                "graph must not be a ShardedGraph in a model that merges tokens between its stages"
            )
        place = 0
        for stage, grid in enumerate(self.grids((height, width))):
            for _ in range(self.depths[stage]):
                x = self.run_block(self.blocks[place], x, graphs[place], grid=grid)
                place += 1
            if stage < len(self.merges):
                x = self.merges[stage](x, grid)
        features: Tensor = self.norm(x)
        return features

    def forward(self, images: Tensor, graph: Graphs = None) -> Tensor:
        """Return the logits of every image, [*, num_classes]."""
        logits: Tensor = self.head(self.encode(images, graph).mean(-2))
        return logits


def _grids(image_size: tuple[int, int], patch_size: int, stages: int) -> Iterator[tuple[int, int]]:
    """Yield the height and width of the grid of every stage."""
    height, width = ((size + patch_size - 1) // patch_size for size in image_size)
    for _ in range(stages):
        yield height, width
        height, width = (height + 1) // 2, (width + 1) // 2


def _as_size(image_size: Any) -> tuple[int, int]:
    """Return the height and width in pixels."""
    if not isinstance(image_size, list | tuple):
        size = as_int("image_size", image_size, 1)
        return size, size
    if len(image_size) != 2:
        raise ValueError(f"image_size must be one number or (height, width), got {image_size!r}")
    return as_int("image_size", image_size[0], 1), as_int("image_size", image_size[1], 1)


def _as_stages(name: str, numbers: Any) -> tuple[int, ...]:
    """Check that there is one positive integer per stage."""
    if not isinstance(numbers, list | tuple) or not numbers:
        raise ValueError(f"{name} must be a list with one integer >= 1 per stage, got {numbers!r}")
    return tuple(as_int(name, number, 1) for number in numbers)
