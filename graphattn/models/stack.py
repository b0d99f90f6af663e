"""Base of all models: a stack of blocks over token graphs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from graphattn.distributed.sharded_graph import ShardedGraph
from graphattn.graphs import TokenGraph
from graphattn.models.mixers import KINDS, options_taken, over_depth
from graphattn.models.presets import preset
from graphattn.nn.attention import GraphAttention
from graphattn.nn.base.graph_layer import GraphLayer
from graphattn.nn.files.config import Configured
from graphattn.nn.files.pretrained import KNOWN

Key = TypeVar("Key")
BlockGraph = TokenGraph | ShardedGraph  # of one block
Graphs = BlockGraph | Sequence[BlockGraph] | None


class BlockStack(Configured, nn.Module):
    """A model made of :class:`~graphattn.nn.PreNormBlock`, one mixer each; subclasses add the rest.

    Attributes:
        blocks: the blocks, an `nn.ModuleList`.
        supports_gradient_checkpointing: True; transformers' Trainer reads it.
    """

    supports_gradient_checkpointing: ClassVar = True
    blocks: nn.ModuleList
    _checkpointing: dict[str, Any] | None = None

    def graphs(self, *args: Any, **kwargs: Any) -> list[TokenGraph]:
        """Return the graphs, one per block, that `forward` uses if no graph is given."""
        raise NotImplementedError

    @classmethod
    def from_preset(cls, name: str, **changes: Any) -> Self:
        """Make a model with random weights and the shape of a preset.

        Args:
            name: one of :func:`graphattn.models.presets`.
            changes: arguments of the constructor that replace those of the preset. With `mixer`,
                the preset's arguments for that mixer apply, such as windows, and those
                `mixer_options` of the preset that the mixer has. With `depth`, the preset's
                schedule of `top_k` goes from its first to its last number over that many blocks.

        Raises:
            ValueError: if the name is unknown, or belongs to another class.
            TypeError: if the class does not have an argument.
        """
        arguments = {**preset(name, cls.__name__, changes.get("mixer")), **changes}
        if "mixer" in changes and "mixer_options" in arguments and "mixer_options" not in changes:
            arguments["mixer_options"] = options_taken(
                arguments["mixer"], arguments["depth"], arguments["mixer_options"]
            )
        if "depth" in changes and "mixer_options" not in changes:
            options = arguments.get("mixer_options") or {}
            arguments |= (
                {"mixer_options": over_depth(options, arguments["depth"])} if options else {}
            )
        return cls(**arguments)

    @classmethod
    def advice(cls, name: str) -> str | None:
        """Return advice on an argument that only mixers or other models have, or None."""
        takes = [mixer for mixer, kind in KINDS.items() if name in kind.options]
        if takes and "mixer_options" in inspect.signature(cls.__init__).parameters:
            mixers = " and ".join(filter(None, (", ".join(map(repr, takes[:-1])), repr(takes[-1]))))
            return f"it is an option of {mixers}: mixer_options={{{name!r}: ...}}"
        models = [
            other.__name__
            for other in KNOWN.values()
            if issubclass(other, BlockStack) and name in inspect.signature(other).parameters
        ]
        return f"it is an argument of {' and '.join(models)}" if models else None

    def num_parameters(self, only_trainable: bool = False) -> int:
        """Return the number of parameters; a parameter with two names counts once.

        Args:
            only_trainable: whether to count only parameters that require gradients.
        """
        wanted = (p for p in self.parameters() if p.requires_grad or not only_trainable)
        return sum(p.numel() for p in wanted)

    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: dict[str, Any] | None = None
    ) -> None:
        """Compute the blocks a second time in the backward pass, instead of storing activations.

        Args:
            gradient_checkpointing_kwargs: arguments of :func:`torch.utils.checkpoint.checkpoint`;
                ``{"use_reentrant": False}`` if None.
        """
        self._checkpointing = {"use_reentrant": False, **(gradient_checkpointing_kwargs or {})}

    def gradient_checkpointing_disable(self) -> None:
        """Store all activations for the backward pass again."""
        self._checkpointing = None

    @property
    def is_gradient_checkpointing(self) -> bool:
        """Whether blocks are computed a second time in the backward pass."""
        return self._checkpointing is not None

    # Methods for subclasses.

    def graph_of_blocks(self, graph: Graphs, *args: Any, **kwargs: Any) -> Sequence[BlockGraph]:
        """Return one graph per block from the `graph` of a call: None, one for all, or one per
        block.

        Raises:
            ValueError: if there is another number of graphs, or if ShardedGraphs among them divide
                the tokens differently.
        """
        if graph is None:
            return self.graphs(*args, **kwargs)
        if not isinstance(graph, list | tuple):
            one: Any = graph
            return [one] * len(self.blocks)
        if len(graph) != len(self.blocks):
            raise ValueError(
                f"graph must be one graph, or one per block ({len(self.blocks)}), got {len(graph)}"
            )
        _check_same_shares(graph)
        return graph

    def run_blocks(
        self,
        x: Tensor,
        graphs: Sequence[BlockGraph],
        *,
        of_edges: dict[str, Any] | None = None,
        **given: Any,
    ) -> Tensor:
        """Run all blocks, one after the other.

        Args:
            x: [*, N, dim].
            graphs: one per block.
            of_edges: keyword arguments that only some mixers take: one tensor for all of those, or
                one entry per block.
            given: further arguments of every block; None values are left out.
        """
        given = {name: value for name, value in given.items() if value is not None}
        for block, graph, edges in zip(
            self.blocks, graphs, self._of_blocks(of_edges or {}), strict=True
        ):
            x = self.run_block(block, x, graph, **given, **edges)
        return x

    def run_block(self, block: nn.Module, x: Tensor, graph: BlockGraph, **given: Any) -> Tensor:
        """Run one block, with gradient checkpointing if it is enabled."""
        if self._checkpointing is None or not (self.training and torch.is_grad_enabled()):
            out: Tensor = block(x, graph, **given)
            return out

        # A reentrant checkpoint computes gradients only if one of its tensor arguments requires
        # them.
        learned = {
            name: t for name, t in given.items() if isinstance(t, Tensor) and t.requires_grad
        }
        if not x.requires_grad and any(p.requires_grad for p in block.parameters()):
            x = x.detach().requires_grad_()

        def call(x: Tensor, *tensors: Tensor) -> Any:
            return block(x, graph, **{**given, **dict(zip(learned, tensors, strict=True))})

        result: Tensor = checkpoint(call, x, *learned.values(), **self._checkpointing)
        return result

    def _of_blocks(self, of_edges: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the edge arguments of every block, from one for all that take it or one per
        block."""
        given: list[dict[str, Any]] = [{} for _ in self.blocks]
        for name, tensors in of_edges.items():
            if tensors is None:
                continue
            if not isinstance(tensors, list | tuple):
                mixers: list[Any] = [block.mixer for block in self.blocks]
                takes_it, takers = OF_EDGES[name]
                takes = [takes_it(mixer) for mixer in mixers]
                if not any(takes):
                    raise ValueError(
                        f"{name} must be None in a model without {takers}, "
                        f"got {type(tensors).__name__}"
                    )
                tensors = [tensors if own_takes else None for own_takes in takes]
            if len(tensors) != len(self.blocks):
                raise ValueError(
                    f"{name} must be one tensor, or one per block ({len(self.blocks)}), "
                    f"got {len(tensors)}"
                )
            for of_block, tensor in zip(given, tensors, strict=True):
                if tensor is not None:
                    of_block[name] = tensor
        return given


def one_each(keys: Sequence[Key], make: Callable[[Key], TokenGraph]) -> list[TokenGraph]:
    """Return a graph for every key; equal keys share one."""
    made = {key: make(key) for key in dict.fromkeys(keys)}
    return [made[key] for key in keys]


def _takes_edge_bias(mixer: nn.Module) -> bool:
    """Return whether a mixer takes edge_bias: attention layers, and modules with that keyword."""
    if isinstance(mixer, GraphAttention):
        return True
    if isinstance(mixer, GraphLayer):
        return False
    return "edge_bias" in inspect.signature(mixer.forward).parameters


def _takes_edge_features(mixer: nn.Module) -> bool:
    """Return whether a mixer takes edge_features: consensus layers made with edge_features > 0."""
    width = getattr(mixer, "edge_features", None)
    return isinstance(width, int) and width > 0


def embeds_values(mixer: Any) -> bool:
    """Return whether a mixer takes the tokens: attention with value embeddings."""
    return isinstance(mixer, GraphLayer) and mixer.embeds_values


OF_EDGES = {  # argument: (which layers take it, how messages describe them)
    "edge_bias": (_takes_edge_bias, "attention layers"),
    "edge_features": (_takes_edge_features, "consensus layers made with edge_features > 0"),
    "tokens": (embeds_values, "attention layers with value_embeddings"),
}


def _check_same_shares(graphs: Sequence[BlockGraph]) -> None:
    """Check that all graphs are of the same tokens on this rank.

    The output of a block is the input of the next one. Graphs that are not divided among ranks are
    not compared.
    """
    first = graphs[0] if graphs else None
    for place, graph in enumerate(graphs):
        if isinstance(graph, ShardedGraph) != isinstance(first, ShardedGraph):
            raise ValueError(
                "graph must be a ShardedGraph for every block or for none, got "
                f"{type(first).__name__} for block 0 and {type(graph).__name__} for block {place}"
            )
        if not isinstance(graph, ShardedGraph) or not isinstance(first, ShardedGraph):
            continue
        if graph.share != first.share or graph.group is not first.group:
            raise ValueError(
                "graph must divide the same tokens in the same way for every block, got "
                f"{first.share} for block 0 and {graph.share} for block {place}: call "
                "graphattn.distributed.shard with the same group for all graphs, which must have "
                "the same number of tokens"
            )
