"""Vision transformers, with a mixer per layer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from graphattn.distributed.losses import same_loss_on_all_ranks
from graphattn.distributed.sharded_graph import ShardedGraph
from graphattn.graphs import TokenGraph, batch, complete_graph, from_edge_index, grid_window_graph
from graphattn.graphs.arguments import as_choice, as_float, as_int, as_share
from graphattn.models.mixers import Mixer, Reach, mixers
from graphattn.models.stack import BlockStack, Graphs, one_each
from graphattn.models.vision.patches import (
    PatchEmbedding,
    Size,
    as_size,
    draw_head,
    make_head,
)
from graphattn.models.vision.weights import vit_from_transformers
from graphattn.nn import PostNormBlock, PreNormBlock
from graphattn.nn.rotary import RotaryEmbedding

Radius = int | Sequence[int] | None  # of both axes, or (down, right); None: see everything
CACHED_SIZES = 8  # a model stores the graphs of this many image sizes


class VisionTransformer(BlockStack):
    r"""A vision transformer from images to logits: patches, pre-norm blocks, norm, linear head.

    It is the vision transformer of Dosovitskiy et al. (2021) in the shapes of DeiT (Touvron et al.,
    2021): a class token first, then one token per patch, each with a learned position.
    ``mixer="gka"`` and "vlt" give the GKA and the value-less models of *Projection-Free
    Transformers*; "krause" with a `radius` and an increasing `top_k` gives those of *Krause
    Synchronization Transformers*.

    Layers without a window see all tokens. Those with one ("krause", "dot-window") see the patches
    within `radius` and the class token, which sees everything. "consensus" layers move only
    patches, because no step size is safe for a token with an edge to every other token.

    Leading tokens, positions and heads start as in DeiT, normally distributed with deviation 0.02,
    with biases 0. All other maps start with PyTorch's default; DeiT uses deviation 0.02 for those
    of the blocks, too.

    Args:
        image_size: size of the images in pixels: one number for squares, or (height, width).
        patch_size: size of the patches in pixels, in the same form; it must divide `image_size`.
        num_classes: number of classes of the head. With 0 there is no head, and the output is the
            pooled features.
        dim: width.
        depth: number of blocks.
        heads: heads per layer, divides `dim`.
        mixer: a name as in :class:`~graphattn.models.SequenceEncoder`, such as "dot", "dot-window",
            "vlt", "gka", "krause", "consensus", "mix"; or one entry per block: a name or a layer of
            width `dim`.
        mixer_options: further options of the named layers, such as ``{"top_k": 8}``: every layer
            takes the options that it has; an option that no layer has is an error. A list contains
            one value per block, as :func:`top_k_schedule` makes it.
        channels: number of channels of the images.
        class_token: whether a learned class token comes before the patches.
        distillation_token: whether a second learned token follows it, as in distilled DeiT models.
        pooling: what the head reads: the "class" token, the "mean" of the patches, or with
            "distilled" both leading tokens: each has its own head, and the mean of the two is
            returned.
        radius: radius of windows in patches, for both axes or (down, right). With None, layers with
            a window see everything, and consensus layers see the 8 patches around each patch.
        neighborhood: shape of the windows: "square", or "plus", the patches whose distances along
            both axes add up to at most `radius` (with radius 1, a plus).
        norm: whether blocks normalise before their parts ("pre", :class:`~graphattn.nn.
            PreNormBlock`) or after their residual sums ("post", as in the code that the authors of
            Krause attention published).
        rope: whether layers use rotary positions, in row-major order of the tokens, in addition to
            the learned ones; "isometric" as in :class:`~graphattn.nn.SelfConsensus`.
        mlp_ratio: hidden width of the perceptrons, in units of `dim`.
        dropout: share of the features that training sets to zero after the embedding and every
            part.
        drop_path: share of the images for which training leaves out a part of the last block. The
            share grows linearly from 0 in the first block (stochastic depth, as in DeiT).
        norm_eps: number added to the variance in all norms (DeiT: 1e-6; transformers: 1e-12).

    Shapes:
        - **images**: [*, channels, height, width], normalised as in training
        - **graph**: one TokenGraph for all layers, or one per layer (a sequence of `depth`). With
          their parts of one rank (:func:`graphattn.distributed.shard`), every rank gets the same
          images and returns the same output; average the gradients over the ranks
        - **edge_bias**: for the attention layers of all blocks, as they take it: [E, heads] or
          [*, E, heads] over their graph, or one entry per block (a sequence of `depth`), None for
          a block without a bias (keyword)
        - **output**: [*, num_classes]

    Raises:
        ValueError: if an argument is not allowed; the message names it and says what is allowed.

    Example:
        >>> import torch, graphattn as ga
        >>> model = ga.models.VisionTransformer.from_preset("digits", mixer="krause")
        >>> model(torch.randn(2, 1, 8, 8)).shape
        torch.Size([2, 10])
        >>> model.graphs()[0]  # a class token, and 4 x 4 patches that see 3 x 3
        TokenGraph(num_tokens=17, num_edges=133, structure=Grid)
    """

    options_of_parts: ClassVar = frozenset({"heads", "mixer_options", "rope"})
    head: nn.Module
    neighborhood = "square"  # of models that were pickled before there was another

    def __init__(
        self,
        image_size: Size,
        patch_size: Size,
        num_classes: int,
        dim: int,
        depth: int,
        heads: int,
        *,
        mixer: Mixer = "dot",
        mixer_options: Mapping[str, Any] | None = None,
        channels: int = 3,
        class_token: bool = True,
        distillation_token: bool = False,
        pooling: Literal["class", "mean", "distilled"] = "class",
        radius: Radius = None,
        neighborhood: Literal["square", "plus"] = "square",
        norm: Literal["pre", "post"] = "pre",
        rope: bool | Literal["isometric"] | RotaryEmbedding = False,
        mlp_ratio: float = 4.0,
        dropout: float = 0.0,
        drop_path: float = 0.0,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__()
        self.num_classes = as_int("num_classes", num_classes, 0)
        self.pooling = as_choice("pooling", pooling, ("class", "mean", "distilled"))
        self.radius = radius
        self.neighborhood = as_choice("neighborhood", neighborhood, ("square", "plus"))
        make_block = {"pre": PreNormBlock, "post": PostNormBlock}[
            as_choice("norm", norm, ("pre", "post"))
        ]
        if distillation_token and not class_token:
            raise ValueError("distillation_token must be False without class_token, got True")
        needs = {"class": class_token, "mean": True, "distilled": distillation_token}
        if not needs[pooling]:
            token = {"class": "class_token", "distilled": "distillation_token"}[pooling]
            raise ValueError(
                f"pooling={pooling!r} needs {token}=True, got {token}=False: set it, or use "
                "pooling='mean'"
            )
        depth, dim = as_int("depth", depth, 1), as_int("dim", dim, 1)
        mixings = mixers(mixer, depth, dim, heads, rope=rope, options=mixer_options)
        self.embedding = PatchEmbedding(
            as_size("image_size", image_size),
            as_size("patch_size", patch_size),
            channels=as_int("channels", channels, 1),
            dim=dim,
            class_token=bool(class_token),
            distillation_token=bool(distillation_token),
        )
        self.dropout = nn.Dropout(as_share("dropout", dropout))
        rates = _rising(as_share("drop_path", drop_path), depth)
        self.blocks = nn.ModuleList()
        self.reaches: list[Reach] = []
        for (layer, reach), rate in zip(mixings, rates, strict=True):
            self.blocks.append(
                make_block(layer, mlp_ratio=mlp_ratio, dropout=dropout, drop_path=rate)
            )
            self.reaches.append(reach)
        self._check_reaches(mixer)
        self.norm = nn.LayerNorm(dim)
        norms: list[Any] = [self.norm]
        norms += [part for block in self.blocks for part in (block.mixer_norm, block.mlp_norm)]
        for each in norms:
            each.eps = as_float("norm_eps", norm_eps, positive=False)
        self.head, self.distillation_head = make_head(dim, self.num_classes), None
        if pooling == "distilled":
            self.distillation_head = make_head(dim, self.num_classes)
        self._graphs: dict[Any, list[TokenGraph]] = {}
        self.graphs()  # raises an error if the radius does not fit

    def _check_reaches(self, mixer: Any) -> None:
        """Check that `radius`, `neighborhood` and `pooling` fit the mixers."""
        reaches = {*self.reaches}
        if self.neighborhood == "plus":
            if isinstance(self.radius, list | tuple):
                raise ValueError(
                    f"radius must be one number with neighborhood='plus', got {self.radius!r}"
                )
            if "near" not in reaches and (self.radius is None or reaches == {"all"}):
                raise ValueError(
                    "neighborhood must be 'square' in a model without windows, got 'plus': give a "
                    "radius, and a mixer that has windows, such as 'krause'"
                )
        if self.radius is None and "dot-window" in (
            mixer if isinstance(mixer, list | tuple) else [mixer]
        ):
            raise ValueError(
                "radius must be given for 'dot-window', got None: set it, or use the mixer 'dot' "
                "for all patches"
            )
        if self.radius is not None and reaches == {"all"}:
            raise ValueError(
                f"radius must be None in a model without windows, got {self.radius!r}: only "
                "'krause', 'dot-window' and 'consensus' layers that are given by name have a "
                "window. For other layers, pass a graph to the call"
            )
        if self.pooling != "mean" and self.reaches[-1] == "near":
            raise ValueError(
                f"pooling must be 'mean' if the last layer is consensus, got {self.pooling!r}: "
                "consensus moves only patches, so it would have no effect on the class token"
            )

    @classmethod
    def comparable(cls, config: dict[str, Any]) -> dict[str, Any]:
        """Return `config` with sizes as pairs, without what the shapes of the weights show."""
        same = dict(config)
        for name in ("image_size", "patch_size", "radius"):
            if isinstance(same.get(name), int):
                same[name] = [same[name]] * 2
        for name in ("num_classes", "channels", "class_token", "distillation_token"):
            same[name] = None
        return same

    @classmethod
    def from_transformers(cls, model: Any, **changes: Any) -> Self:
        """Make a model with the weights of a ViT or DeiT of Hugging Face's transformers.

        `model` can be a ViTModel, ViTForImageClassification, DeiTModel, DeiTForImageClassification
        or DeiTForImageClassificationWithTeacher. The three DeiT models have a distillation token,
        and so has the new model; with two heads it returns the mean of the logits. With
        ``mixer="dot"`` the logits are those of `model`. Another mixer copies those projections that
        it has: "krause" the queries, keys, values and output, "gka" the output. Its other
        parameters are initialised. The bandwidths of "krause" start at D^(1/4), where D is the
        number of features per head: its logits then differ from those of dot products only by
        squared lengths. Biases that `model` does not have (``qkv_bias=False``) are 0. A pooler is
        not copied.

        Args:
            model: a model of transformers with its weights.
            changes: further arguments of the constructor, such as `mixer`, `mixer_options`,
                `radius` and `drop_path`; they replace those from the config of `model`.

        Returns:
            A model in evaluation mode, with the dtype and on the device of `model`.

        Raises:
            ValueError: if `model` has another class, or computes something that this class cannot.
            TypeError: if the class does not have an argument.

        Example:
            >>> import torch, graphattn as ga
            >>> from transformers import ViTConfig, ViTForImageClassification
            >>> config = ViTConfig(
            ...     image_size=8, patch_size=4, hidden_size=16, num_hidden_layers=2,
            ...     num_attention_heads=2, intermediate_size=32)
            >>> theirs = ViTForImageClassification(config).eval()
            >>> ours = ga.models.VisionTransformer.from_transformers(theirs)
            >>> images = torch.randn(5, 3, 8, 8)
            >>> torch.allclose(ours(images), theirs(images).logits, atol=1e-5)
            True
            >>> near = ga.models.VisionTransformer.from_transformers(
            ...     theirs, mixer="krause", radius=1, mixer_options={"top_k": 3})
        """
        loaded: Self = vit_from_transformers(cls, model, changes)
        return loaded

    def reset_parameters(self) -> None:
        """Initialise every parameter again."""
        for part in (self.embedding, *self.blocks, self.norm):
            if callable(reset := getattr(part, "reset_parameters", None)):
                reset()
        draw_head(self.head)
        draw_head(self.distillation_head)

    def graphs(self, image_size: Size | None = None) -> list[TokenGraph]:
        """Return the graphs, one per block, that `forward` uses if no graph is given.

        Args:
            image_size: size of the images in pixels; None for the model's own.

        Example:
            >>> import graphattn as ga
            >>> model = ga.models.VisionTransformer.from_preset("deit-tiny", mixer="krause")
            >>> model.graphs()[0]  # 14 x 14 patches in windows of 5 x 5, and a class token
            TokenGraph(num_tokens=197, num_edges=4489, structure=Grid)
        """
        embedding = self.embedding
        size = embedding.image_size if image_size is None else as_size("image_size", image_size)
        device = embedding.positions.device
        if torch.compiler.is_compiling():
            return self._make_graphs(size, device)
        graphs = self._graphs.get((size, device))
        if graphs is None:
            with torch.device("cpu"):  # a graph stores numbers, which do not depend on the device
                graphs = self._make_graphs(size, device)
            if len(self._graphs) >= CACHED_SIZES:
                del self._graphs[next(iter(self._graphs))]
            self._graphs[size, device] = graphs
        return list(graphs)

    def _make_graphs(self, size: tuple[int, int], device: torch.device) -> list[TokenGraph]:
        grid = self.embedding.grid_of(size, "image_size")
        leading = self.embedding.leading
        return one_each(
            self.reaches,
            lambda reach: vision_graph(
                reach, grid, leading, self.radius, neighborhood=self.neighborhood
            ).to(device),
        )

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without graphs, which are made again when they are needed."""
        return {**self.__dict__, "_graphs": {}}

    def encode(
        self,
        images: Tensor,
        graph: Graphs = None,
        *,
        edge_bias: Tensor | Sequence[Tensor | None] | None = None,
        interpolate_pos_encoding: bool = False,
    ) -> Tensor:
        """Return the tokens after the last norm, [*, leading + patches, dim].

        The class token comes first, then the distillation token if there is one, then patches in
        row-major order. Arguments are those of :meth:`forward`.
        """
        x = self.embedding(images, interpolate_pos_encoding=interpolate_pos_encoding)
        graphs = self.graph_of_blocks(graph, (images.shape[-2], images.shape[-1]))
        shard = graphs[0] if isinstance(graphs[0], ShardedGraph) else None
        x = self.dropout(x)
        if shard is not None:
            x = shard.split(x, dim=-2)
        x = self.run_blocks(x, graphs, of_edges={"edge_bias": edge_bias})
        if shard is not None:
            x = same_loss_on_all_ranks(shard.gather(x, dim=-2), shard.ranks)
        return self.norm(x)

    def forward(
        self,
        images: Tensor,
        graph: Graphs = None,
        *,
        edge_bias: Tensor | Sequence[Tensor | None] | None = None,
        interpolate_pos_encoding: bool = False,
    ) -> Tensor:
        """Return the logits of the classes, [*, num_classes].

        With ``interpolate_pos_encoding=True``, images can have any size that is a multiple of the
        patch size. Learned positions are then interpolated bicubically, as in transformers.
        """
        given: dict[str, Any] = {} if edge_bias is None else {"edge_bias": edge_bias}
        if interpolate_pos_encoding:
            given["interpolate_pos_encoding"] = True
        x = self.encode(images, graph, **given)
        if self.pooling == "mean":
            return self.head(x[..., self.embedding.leading :, :].mean(-2))
        logits: Tensor = self.head(x[..., 0, :])
        if self.distillation_head is None:
            return logits
        return (logits + self.distillation_head(x[..., 1, :])) / 2


def _rising(last: float, depth: int) -> list[float]:
    """Return numbers that grow evenly from 0 to `last`."""
    return [last * i / max(depth - 1, 1) for i in range(depth)]


def vision_graph(
    reach: Reach,
    grid: tuple[int, int],
    leading: int,
    radius: Radius,
    *,
    neighborhood: str = "square",
) -> TokenGraph:
    """Make the graph of a layer over the patches of an image.

    Args:
        reach: "all": every token sees all; "window": patches see those within `radius`, and leading
            tokens see and are seen by all; "near": the same window, but only among patches.
        grid: number of patches (down, right).
        leading: number of tokens before the patches (class token, distillation token).
        radius: radius of windows; None means everything for "window", and 1 for "near".
        neighborhood: shape of windows, "square" or "plus".
    """
    if reach == "all" or (reach == "window" and radius is None):
        return complete_graph(leading + math.prod(grid))
    metric: Any = "manhattan" if neighborhood == "plus" else "chebyshev"
    window = grid_window_graph(*grid, 1 if radius is None else radius, metric=metric)
    if leading == 0:
        return window
    if reach == "near":  # an edge of leading tokens to every patch would leave no safe step
        apart = batch([*[complete_graph(1, self_loops=False)] * leading, window])
        return TokenGraph(structure=apart.structure)  # drop_path then drops the whole image at once
    assert radius is not None
    if leading == 1:
        return grid_window_graph(*grid, radius, metric=metric, class_token=True)
    return _behind(window, leading)


def _behind(window: TokenGraph, leading: int) -> TokenGraph:
    """Add leading tokens, which see and are seen by all, before a window graph."""
    tokens = leading + window.num_tokens
    first, all_tokens = torch.arange(leading), torch.arange(tokens)
    seen_by_all = torch.cartesian_prod(first, all_tokens).T
    seeing_all = torch.cartesian_prod(all_tokens[leading:], first).T
    edges = torch.cat([seen_by_all, seeing_all, window.edge_index + leading], dim=1)
    return from_edge_index(edges, tokens)
