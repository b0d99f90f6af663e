"""Base of every layer over a token graph: PyG's MessagePassing on [*, N, H, D] tensors."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from graphattn.distributed.sharded_graph import ShardedGraph
from graphattn.graphs.arguments import as_int
from graphattn.graphs.token_graph import TokenGraph
from graphattn.nn.base.across_ranks import (
    averages_in_parts,
    may_compute_meanwhile,
    output_meanwhile,
)
from graphattn.nn.base.message_passing import (
    STATE,
    Later,
    Stored,
    complete,
    is_imported,
    when_imported,
)
from graphattn.nn.base.overrides import (
    ClassOverrides,
    is_ours,
    names_of,
    note_members,
    overridden_edges,
    overrides_of_class,
)
from graphattn.nn.base.padded_rows import takes_padded_rows
from graphattn.nn.files.config import Configured, not_default
from graphattn.nn.rotary import Rotation, as_rotary, check_positions
from graphattn.ops.backends import check_backend, wanted_backend
from graphattn.ops.counting import note_uncounted
from graphattn.ops.inputs import Valid, ValidPair, check_graph, check_valid
from graphattn.ops.library.numbered import numbered

Positions = Tensor | tuple[Tensor | None, Tensor | None] | None
Rotations = tuple[Rotation, Rotation] | None  # of targets and of sources
FEW_ANGLES = 1 << 16  # the most numbers of a rotation that a graph stores


class GraphLayer(Configured, Later):
    """A layer whose `message()` is the mathematics of one edge.

    :meth:`forward_pass` is the template of every call. A subclass defines its steps: how tokens are
    projected (:meth:`project`), and what a target receives from its sources, by :meth:`unfused`
    (`message()` through PyG's `propagate`) and by :meth:`fused` (one operation on all edges).

    ``backend="reference"`` runs `message()`; other backends run the fused operation. (PyG itself
    fuses only for its sparse tensor types.) If a method that `propagate` runs is overridden, "auto"
    uses `propagate`, and fused backends refuse, because they compute the library's own mathematics
    only.

    It is a MessagePassing once torch_geometric is imported (:mod:`.message_passing`).
    """

    class_overrides: ClassVar[ClassOverrides]
    drawn: ClassVar[tuple[Any, ...]] = (nn.Linear,)  # parts that `reset_parameters` draws anew
    # Operations in parts: on a ring, with global tokens, and over the sources of a rank first.
    merged_by: ClassVar[tuple[Any, Any, Any]]
    output_proj: nn.Linear
    # Its repr at the end of the constructor: torch.compile could not trace that.
    text_when_made: str = ""
    _number: Tensor  # by which operators find the layer
    # Arguments that must be alike on all ranks if the graph is divided: their rows travel.
    exchanged: ClassVar[tuple[str, ...]] = ("x", "context", "valid")

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if "forward" in vars(cls) and is_ours(cls):  # a user's forward gets its arguments unchanged
            cls.forward = takes_padded_rows(cls.forward)
        cls.class_overrides = overrides_of_class(cls)

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        context_dim: int | None = None,
        rope: object,
        backend: str,
    ) -> None:
        nn.Module.__init__(self)
        self.dim, self.heads = as_int("dim", dim, 1), as_int("heads", heads, 1)
        if self.dim % self.heads:
            raise ValueError(f"heads must divide dim = {dim}, got {heads}")
        self.head_dim = self.dim // self.heads
        self.kv_heads = self.heads if kv_heads is None else as_int("kv_heads", kv_heads, 1)
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads must divide heads = {heads}, got {kv_heads}")
        given = self.dim if context_dim is None else context_dim
        self.context_dim = as_int("context_dim", given, 1)
        self.rotary = as_rotary(rope, self.head_dim)
        self.backend = check_backend(backend)
        if is_imported() or overridden_edges(self) or wanted_backend(backend) == "reference":
            complete(self)

    def when_made(self) -> None:
        self.text_when_made, self._number = repr(self), numbered(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        state.setdefault("context_dim", state["dim"])  # older files have it of some layers only
        if "inspector" in state:  # PyG reads it
            super().__setstate__(state)
        else:
            nn.Module.__setstate__(self, state)
        self._number = numbered(self)  # a copy is another layer

    def reset_parameters(self) -> None:
        """Draw the parameters of every part anew."""
        for part in self.children():
            if isinstance(part, self.drawn):
                part.reset_parameters()

    # A call, in the order in which it runs.

    def forward_pass(
        self,
        x: Tensor,
        context: Tensor,
        graph: Any,
        valid: Valid,
        positions: Positions,
        weights: bool | Literal["detached"] = False,
        tokens: Tensor | None = None,
        **of_edges: Tensor | None,
    ) -> Any:
        """The forward pass of every layer: check, project, mix, project the output.

        1. :meth:`prepare` checks the inputs and replaces invalid tokens by zeros;
           :meth:`edge_arguments` checks values of edges.
        2. :meth:`project` makes tensors per head, such as queries [*, N, H, D], and keys and values
           [*, M, Hk, D], and rotates them by their positions. A layer with value embeddings adds
           those of `tokens` to the values.
        3. :meth:`mix` computes for every target what it receives from its sources, [*, N, H, D]. If
           the graph is divided among ranks, results of several ranks are merged, or else
           :meth:`fetch` first fetches the keys and values of other ranks.
        4. :meth:`project_back` takes all heads of a token together, [*, N, dim].

        With ``weights=True`` the weights [*, E, H] are returned, too, and can be differentiated.
        With "detached" they have no gradient, and nothing is stored for one: the output is computed
        exactly as without weights. A gradient checkpoint needs this, because it runs the layer a
        second time, without weights, and must find the same saved tensors.

        Args:
            x: [*, N, dim], the targets.
            context: [*, M, context_dim], the sources; `x` itself in self-attention.
            graph: a TokenGraph with N targets, M sources and E edges, or an edge_index [2, E].
            valid: bool [N] or [*, N], or a pair for targets and sources; None if all are valid.
            positions: [N] or [*, N], or a pair for targets and sources; the graph's own if None.
            weights: whether to return weights: False, True or "detached".
            tokens: integers [*, M] of the sources, for a layer with value embeddings.
            of_edges: values of edges, such as `edge_bias`; None if there are none.
        """
        shard = graph if isinstance(graph, ShardedGraph) else None
        values = {name: value for name, value in of_edges.items() if value is not None}
        x, context, graph, masks = self.prepare(
            x, context, graph, valid, per_edge=bool(weights or values)
        )
        values = self.edge_arguments(x, graph, masks, **values)
        rotations = self.rotations(x, context, graph, positions)
        if (
            shard is not None
            and shard.exchange == "rows"
            and may_compute_meanwhile(self, x, shard, weights, values)
        ):
            return output_meanwhile(self, x, context, rotations, tokens, shard, masks)
        projected = self.project(x, context, rotations)
        if tokens is not None or self.embeds_values:
            *others, value = projected
            projected = (*others, self.with_embedding(value, context, tokens, masks[1]))
        if shard is not None:
            mixed = averages_in_parts(self, projected, shard, masks, weights, values)
            if mixed is not None:
                return self.project_back(mixed, rotations)
            projected, graph, masks, values = self.fetch(shard, projected, masks, values)
        mixed = self.mix(*projected, graph, masks, **values)
        out = self.project_back(mixed, rotations)
        if not weights:
            return out
        with torch.no_grad() if weights == "detached" else nullcontext():
            return out, self.weights_of_edges(*projected, graph, masks, **values)

    def prepare(
        self,
        x: Tensor,
        context: Tensor,
        graph: Any,
        valid: Valid,
        *,
        per_edge: bool = False,
    ) -> tuple[Tensor, Tensor, TokenGraph, ValidPair]:
        """Check the inputs, and replace invalid tokens by zeros.

        Returns:
            x, context, the TokenGraph, and the masks of targets and of sources. In place of a
            ShardedGraph, it is the graph of this rank's tokens without edges.
        """
        self.check_tokens("x", x, self.dim)
        if context is not x or self.context_dim != self.dim:
            self.check_tokens("context", context, self.context_dim)
            if x.shape[:-2] != context.shape[:-2]:
                raise ValueError(
                    f"context must have the batch dimensions of x ({list(x.shape[:-2])}), "
                    f"got {list(context.shape[:-2])}"
                )
        if isinstance(graph, ShardedGraph):
            graph.check_tokens("x", x, graph.num_targets)
            graph.check_tokens("context", context, graph.num_sources)
            graph = graph.tokens
        N, M = x.shape[-2], context.shape[-2]
        if not (isinstance(graph, TokenGraph) and graph.fits(x, N, M)):
            graph = check_graph(graph, x, N, M, per_edge=per_edge)
        pair: ValidPair = (None, None)
        if valid is not None:
            pair = check_valid(valid, x.shape[:-2], x.device, N, M)
        same = context is x
        if same and not graph.has_same_tokens:
            raise ValueError(
                "context must be the tokens that are seen, since `x` alone cannot be both: the "
                "targets of this graph are not its sources. They start at positions "
                f"{graph.starts} (first target, first source) and number {graph.sizes} (targets, "
                "sources)"
            )
        if pair[0] is not None:
            x = x.masked_fill(~pair[0][..., None], 0)
        if same and pair[0] is pair[1]:
            context = x
        elif pair[1] is not None:
            context = context.masked_fill(~pair[1][..., None], 0)
        return x, context, graph, pair

    def check_tokens(self, name: str, tokens: Any, width: int) -> None:
        """Check that an argument is tokens of this width, in the dtype of the layer."""
        if not isinstance(tokens, Tensor) or tokens.dim() < 2 or tokens.shape[-1] != width:
            got = list(tokens.shape) if isinstance(tokens, Tensor) else type(tokens).__name__
            count = "N" if name == "x" else "M"
            raise ValueError(f"{name} must be a tensor of shape [*, {count}, {width}], got {got}")
        self.check_dtype(name, tokens)

    def check_dtype(self, name: str, tokens: Tensor) -> None:
        """Check that tokens have the layer's dtype, or under autocast any floating-point one."""
        if not tokens.is_floating_point():
            raise ValueError(f"{name} must be floating-point, got {tokens.dtype}")
        dtype = self.output_proj.weight.dtype
        if tokens.dtype != dtype and not torch.is_autocast_enabled(tokens.device.type):
            raise ValueError(
                f"{name} must have the layer's dtype {dtype}, got {tokens.dtype}: convert one "
                f"of them, layer.to({tokens.dtype}) for instance"
            )

    def edge_arguments(
        self, x: Tensor, graph: TokenGraph, valid: ValidPair, **of_edges: Tensor
    ) -> dict[str, Any]:
        """The values of edges as :meth:`mix` takes them."""
        return of_edges

    def rotations(
        self, x: Tensor, context: Tensor, graph: TokenGraph, positions: Positions
    ) -> Rotations:
        """The rotations of targets and of sources, by their positions; None without rope."""
        if self.rotary is None:
            return None
        known = graph.positions, graph.source_positions
        of_target, of_source = known
        if positions is not None:
            of_target, of_source = self.resolve_positions(graph, positions)
            check_positions(of_target, x.shape[:-1])
            check_positions(of_source, context.shape[:-1])
        rotation = self.rotation_of(of_target, x, graph, known)
        if of_source is of_target:
            return rotation, rotation
        return rotation, self.rotation_of(of_source, x, graph, known)

    def rotation_of(
        self, positions: Tensor, like: Tensor, graph: TokenGraph, known: tuple[Tensor, Tensor]
    ) -> Rotation:
        """The rotation by some positions; a graph stores that by its `known` ones, if small."""
        assert self.rotary is not None
        traced = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0
        few = positions.numel() * self.head_dim <= FEW_ANGLES
        stored = positions is known[0] or positions is known[1]
        here = positions.device == like.device
        if traced or not (stored and here and few and self.rotary.is_plain()):
            return self.rotary.rotation(positions.to(like.device), like.dtype)
        rotary, side = self.rotary, positions is not known[1]
        key = "rotation", side, rotary.dim, rotary.base, like.dtype, positions._version
        return graph.derived(key, lambda: rotary.rotation(positions, like.dtype))

    def resolve_positions(self, graph: TokenGraph, positions: Positions) -> tuple[Tensor, Tensor]:
        """The positions of targets and of sources: those of the caller, or else of the graph."""
        if isinstance(positions, Tensor) and graph.num_targets != graph.num_sources:
            raise ValueError("positions must be a pair (targets, sources) on a bipartite graph")
        if not isinstance(positions, Tensor | tuple | None):
            raise ValueError(
                "positions must be a tensor or a pair (targets, sources) of them, "
                f"got the {type(positions).__name__} {positions!r}"
            )
        given = positions if isinstance(positions, tuple) else (positions, positions)
        if len(given) != 2:
            raise ValueError(
                f"positions must be a pair (targets, sources), got {len(given)} of them"
            )
        return (
            graph.positions if given[0] is None else given[0],
            graph.source_positions if given[1] is None else given[1],
        )

    def project(self, x: Tensor, context: Tensor, rotations: Rotations) -> tuple[Any, ...]:
        """The first arguments of :meth:`mix`, from tokens [*, N, dim] and [*, M, context_dim]."""
        raise NotImplementedError

    @property
    def embeds_values(self) -> bool:
        """Whether embeddings of the tokens are added to the values."""
        return self._modules.get("value_embedding") is not None

    def with_embedding(
        self, value: Tensor, x: Tensor, tokens: Tensor | None, valid: Tensor | None = None
    ) -> Tensor:
        """The values [*, M, Hk, D] with the embeddings of the `tokens` [*, M] of features x."""
        if not self.embeds_values:
            raise ValueError(
                f"tokens must be None for this {type(self).__name__}, which was made without "
                f"value_embeddings, got {type(tokens).__name__}: attention with a value projection "
                "(DotProductAttention, KrauseAttention) has value_embeddings=vocab_size"
            )
        embedded: Tensor = self._modules["value_embedding"](value, x, tokens, valid)
        return embedded

    def split(self, x: Tensor, heads: int) -> Tensor:
        """x [*, N, heads * D] as [*, N, heads, D]."""
        return x.view(*x.shape[:-1], heads, x.shape[-1] // heads)

    def rotate(self, target: Tensor, source: Tensor, rotations: Rotations) -> tuple[Tensor, Tensor]:
        """Rotate two tensors by the positions of targets and of sources; unchanged without rope."""
        if self.rotary is None or rotations is None:
            return target, source
        if rotations[0][0] is rotations[1][0]:
            if source is target:
                rotated = self.rotary.turn(target, rotations[0])
                return rotated, rotated
            return self.rotary.turn_both(target, source, rotations[0])
        return self.rotary.turn(target, rotations[0]), self.rotary.turn(source, rotations[1])

    def sides(self, projected: Any) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Divide what :meth:`project` returns into [*, N, heads, D] of targets and of sources."""
        raise NotImplementedError

    def from_sides(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> tuple[Any, ...]:
        """Make what :meth:`project` returns from tensors of targets and of sources."""
        raise NotImplementedError

    def fetch(
        self, shard: ShardedGraph, projected: Any, valid: ValidPair, of_edges: dict[str, Tensor]
    ) -> tuple[tuple[Any, ...], TokenGraph, ValidPair, dict[str, Tensor]]:
        """The arguments of :meth:`mix` on one rank, with what its targets see of other ranks."""
        raise NotImplementedError

    def mix(self, *arguments: Any, **of_edges: Any) -> Tensor:
        """The sums over the sources of every target, [*, N, H, D]: by edge, or all at once.

        Args:
            arguments: what :meth:`project` returns, the graph, and masks bool [*, N] and [*, M] of
                targets and sources, None where all are valid.
            of_edges: what :meth:`edge_arguments` returns.
        """
        if self.uses_propagate():
            return self.unfused(*arguments, **of_edges)
        return self.fused(*arguments, **of_edges)

    def unfused(self, *arguments: Any, **of_edges: Any) -> Tensor:
        """:meth:`mix` by `message()`, through PyG's `propagate`."""
        raise NotImplementedError

    def fused(self, *arguments: Any, **of_edges: Any) -> Tensor:
        """:meth:`mix` by one operation on all edges."""
        raise NotImplementedError

    def project_back(self, mixed: Tensor, rotations: Rotations) -> Tensor:
        """The output [*, N, dim], from [*, N, H, D]."""
        output: Tensor = self.output_proj(mixed.flatten(-2))
        return output

    def weights_of_edges(self, *arguments: Any, **of_edges: Any) -> Tensor:
        """The weights that :meth:`mix` averages with, [*, E, H]."""
        raise NotImplementedError

    # The choice between the two ways.

    def uses_propagate(self) -> bool:
        """Whether `forward` runs `message()`: by backend="reference", or because it is overridden.

        Raises:
            ValueError: a fused backend was asked for by name, but a method is overridden that only
                `propagate` runs.
        """
        wanted = wanted_backend(self.backend)
        if wanted == "reference":
            note_uncounted(f"{type(self).__name__} with backend='reference'")
            return True
        replaced = overridden_edges(self)
        if replaced and wanted != "auto":
            raise ValueError(
                f"backend {wanted!r} cannot run this {type(self).__name__}: it has its own "
                f"{names_of(replaced)}, and fused operations know the library's mathematics only. "
                "Use backend='auto' or 'reference', which run it through propagate(), or override "
                "fused(), too"
            )
        if replaced:
            note_uncounted(f"{type(self).__name__} with its own {names_of(replaced)}")
        return bool(replaced)

    def check_message_masks(self, valid: ValidPair) -> None:
        """Refuse masks if `message()` is overridden and takes none: it would read padding."""
        if valid == (None, None) or {"valid_i", "valid_j"} <= {*self._user_args}:
            return
        raise ValueError(
            f"valid cannot be used with the message() of {type(self).__name__}, which would read "
            "padding: let it take valid_i and valid_j (bool [*, E, 1, 1], or None) and return 0 "
            "for edges where one of them is False"
        )

    @classmethod
    def comparable(cls, config: dict[str, Any]) -> dict[str, Any]:
        """`config` with rope=True in place of a RotaryEmbedding that is equal to it."""
        rope = config.get("rope")
        usual = isinstance(rope, dict) and rope.get("base") == 10000
        return {**config, "rope": True} if usual else config

    def __repr__(self) -> str:
        """``Layer(dim, heads=H, option=...)``, with the options whose value is not the default."""
        facts = [f"{self.dim}", f"heads={self.heads}"]
        for name, value in not_default(self).items():
            if name not in ("dim", "heads"):
                shown = self.rotary if isinstance(value, dict) else value
                number = f"{value:.4g}" if isinstance(value, float) else repr(shown)
                facts.append(f"{name}={number}")
        return f"{type(self).__name__}({', '.join(facts)})"


for _name in STATE:
    setattr(GraphLayer, _name, Stored(_name))


when_imported(functools.partial(note_members, GraphLayer))


def valid_for_propagate(valid: ValidPair) -> tuple[Tensor | None, Tensor | None]:
    """Masks of (sources, targets), [*, M, 1, 1] and [*, N, 1, 1], in the form for `propagate`."""
    of_target, of_source = valid
    return (
        None if of_source is None else of_source[..., None, None],
        None if of_target is None else of_target[..., None, None],
    )


def edge_mask(valid_i: Tensor | None, valid_j: Tensor | None) -> Tensor | None:
    """Edges between valid tokens, bool [*, E, 1], from `message()`'s arguments; None if all are."""
    if valid_i is None:
        return None if valid_j is None else valid_j[..., 0]
    return valid_i[..., 0] if valid_j is None else (valid_i & valid_j)[..., 0]
