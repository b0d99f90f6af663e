"""An encoder of token sequences, with a mixer per layer."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn

from graphattn.graphs import TokenGraph, complete_graph, window_path_graph
from graphattn.graphs.arguments import as_choice, as_int
from graphattn.nn import (
    CrossConsensus,
    DotProductAttention,
    ModelCache,
    PreNormBlock,
    SelfConsensus,
)
from graphattn.nn.attention import GraphAttention
from graphattn.nn.config import Configured
from graphattn.nn.graph_layer import GraphLayer
from graphattn.nn.overrides import names_of, replaced_beside
from graphattn.nn.rotary import check_positions
from graphattn.nn.streaming import step_mask
from graphattn.ops.inputs import check_valid

MixerName = Literal["dot", "consensus"]
Mixer = Literal["dot", "consensus", "mix"] | Sequence[MixerName | nn.Module]


class SequenceEncoder(Configured, nn.Module):
    r"""Tokens in, logits per token out: embedding, pre-norm blocks, norm, linear head.

    An encoder with the mixers that *Stabilizing Transformer Training Through Consensus* compares
    (Section 5.1, Appendix E.1): ``mixer="dot"`` is its SA (all attention), "consensus" its SC, and
    "mix" its MIX: the first half of the layers attention, the second half consensus.
    Sliding-window attention (SW) is "dot" over a window graph. The backbone is a plain pre-norm
    encoder, not the paper's: no conditioning on the noise level and one track, so the parameter
    counts of its Table 10 are not met. At the text shapes, with "dot" and 50,258 tokens, there are
    49 M where it says 54 M, and 162 for 193, but 506 for 385.

    Without a graph, attention layers work on the complete graph and consensus layers on the
    window-path graph of `window` tokens on each side, over the tokens of each call.

    Args:
        vocab_size: number of tokens, a mask token included if there is one.
        dim: width.
        depth: number of blocks.
        heads: heads per layer, divides `dim`.
        mixer: "dot", "consensus" or "mix"; or one entry per block: "dot", "consensus", or a layer
            of width `dim`, of :mod:`graphattn.nn` or your own (see
            :class:`~graphattn.nn.PreNormBlock`).
        window: reach of the consensus layers' own graph (paper: 2).
        rank: of the consensus layers (paper: 4).
        edge_hidden: of the consensus layers (paper: 256).
        step_size: of the consensus layers, as in :class:`~graphattn.nn.SelfConsensus`; "auto" needs
            ``rope=False`` or "isometric".
        rope: rotary positions in attention and consensus layers; "isometric" where consensus
            layers should keep their guarantees (attention layers then use the usual rotation).
        mlp_ratio: hidden width of the perceptrons, in units of `dim`.
        dropout: share of features zeroed after every layer and perceptron, in training.
        edge_features: of the consensus layers: features of an edge that their networks see.

    Shapes:
        - **tokens**: integers [*, N]
        - **graph**: one TokenGraph for all layers, or one per layer (a sequence of `depth`); packed
          sequences come as a :func:`~graphattn.batch`. Without one, the tokens of a call are one
          sequence, packed ones too, and see each other
        - **valid**: bool [N] or [*, N], True where a token is real (keyword)
        - **positions**: [N] or [*, N]; those of the graph if None (keyword)
        - **edge_features**: [E, F] or [*, E, F] for all consensus layers that take them, in the
          order of their graph's ``edge_index``; or one entry per block, None where a block takes
          none (keyword)
        - **edge_bias**: for the attention layers of all blocks, as they take it: [E, heads] or
          [*, E, heads] over their graph, or a table [offsets, heads]; or one per block (a sequence
          of `depth`), None where a block has none (keyword)
        - **output**: [*, N, vocab_size]

    Raises:
        ValueError: names the argument, its value and what is allowed.

    Example:
        >>> import torch, graphattn as ga
        >>> model = ga.models.SequenceEncoder(
        ...     vocab_size=28, dim=32, depth=4, heads=4, mixer="mix", edge_hidden=16)
        >>> tokens = torch.randint(28, (2, 50))
        >>> model(tokens).shape
        torch.Size([2, 50, 28])
        >>> sliding = ga.window_path_graph(50, window=2, self_loops=True)
        >>> model(tokens, sliding).shape  # every layer over the same window
        torch.Size([2, 50, 28])
    """

    options_of_parts: ClassVar = frozenset({"heads", "rope", "step_size"})

    def __init__(
        self,
        vocab_size: int,
        dim: int,
        depth: int,
        heads: int,
        *,
        mixer: Mixer = "dot",
        window: int = 2,
        rank: int = 4,
        edge_hidden: int = 256,
        step_size: float | Literal["learned", "auto"] = 0.1,
        rope: bool | Literal["isometric"] = True,
        mlp_ratio: float = 4.0,
        dropout: float = 0.0,
        edge_features: int = 0,
    ) -> None:
        super().__init__()
        self.vocab_size = as_int("vocab_size", vocab_size, 1)
        self.window = as_int("window", window, 1)
        if not (isinstance(rope, bool) or rope == "isometric"):
            raise ValueError(f"rope must be True, False or 'isometric', got {rope!r}")

        def layer(entry: object) -> nn.Module:
            if entry == "dot":
                return DotProductAttention(dim, heads, rope=bool(rope))
            if entry == "consensus":
                return SelfConsensus(
                    dim,
                    heads,
                    rank=rank,
                    edge_hidden=edge_hidden,
                    step_size=step_size,
                    rope=rope,
                    edge_features=edge_features,
                )
            if isinstance(entry, CrossConsensus) or not isinstance(entry, nn.Module):
                got = type(entry).__name__ if isinstance(entry, nn.Module) else repr(entry)
                raise ValueError(
                    f"mixer must hold 'dot', 'consensus' or layers on one track, got {got}"
                )
            if getattr(entry, "dim", dim) != dim:
                raise ValueError(
                    f"mixer must hold layers of width dim = {dim}, got a {type(entry).__name__} "
                    f"of width {entry.dim}"
                )
            return entry

        self.embedding = nn.Embedding(self.vocab_size, as_int("dim", dim, 1))
        self.blocks = nn.ModuleList(
            PreNormBlock(layer(entry), mlp_ratio=mlp_ratio, dropout=dropout)
            for entry in _one_per_block(mixer, as_int("depth", depth, 1))
        )
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, self.vocab_size)
        nn.init.normal_(self.embedding.weight, std=0.02)

    @classmethod
    def comparable(cls, config: dict[str, Any]) -> dict[str, Any]:
        """`config` without `window` where no layer can ask for it."""
        mixer = config.get("mixer")
        asked = any(entry != "dot" for entry in (mixer if isinstance(mixer, list) else [mixer]))
        return config if asked else {**config, "window": None}

    def reset_parameters(self) -> None:
        """Draw every parameter anew."""
        nn.init.normal_(self.embedding.weight, std=0.02)
        for part in (*self.blocks, self.norm, self.head):
            part.reset_parameters()

    def graphs(self, num_tokens: int) -> list[TokenGraph]:
        """The graph of every block where `forward` is given none.

        Example:
            >>> import graphattn as ga
            >>> ga.models.SequenceEncoder(9, 8, depth=2, heads=2, mixer="mix").graphs(100)
            [TokenGraph(num_tokens=100, num_edges=10000, structure=Complete),
             TokenGraph(num_tokens=100, num_edges=394, structure=Band)]
        """
        device = self.embedding.weight.device
        everything = complete_graph(num_tokens).to(device)
        near = window_path_graph(num_tokens, self.window).to(device)
        return [
            near if isinstance(block.mixer, SelfConsensus) else everything for block in self.blocks
        ]

    def encode(
        self,
        tokens: Tensor,
        graph: TokenGraph | Sequence[TokenGraph] | None = None,
        *,
        valid: Tensor | None = None,
        positions: Tensor | None = None,
        edge_bias: Tensor | Sequence[Tensor | None] | None = None,
        edge_features: Tensor | Sequence[Tensor | None] | None = None,
    ) -> Tensor:
        """The features before the head, [*, N, dim]."""
        tokens = self._readable(tokens, valid)
        N = tokens.shape[-1]
        if graph is None:
            graphs: Sequence = self.graphs(N)
        elif isinstance(graph, list | tuple):
            graphs = graph
            if len(graphs) != len(self.blocks):
                raise ValueError(
                    f"graph must be one graph, or one per block ({len(self.blocks)}), "
                    f"got {len(graphs)}"
                )
        else:
            graphs = [graph] * len(self.blocks)
        x = self.embedding(tokens)
        of_edges = self._of_blocks({"edge_bias": edge_bias, "edge_features": edge_features})
        for block, own, given in zip(self.blocks, graphs, of_edges, strict=True):
            x = block(x, own, valid=valid, positions=positions, **given)
        return self.norm(x)

    def forward(
        self,
        tokens: Tensor,
        graph: TokenGraph | Sequence[TokenGraph] | None = None,
        *,
        valid: Tensor | None = None,
        positions: Tensor | None = None,
        edge_bias: Tensor | Sequence[Tensor | None] | None = None,
        edge_features: Tensor | Sequence[Tensor | None] | None = None,
    ) -> Tensor:
        """Logits over the vocabulary for every token, [*, N, vocab_size]."""
        of_edges = {"edge_bias": edge_bias, "edge_features": edge_features}
        given: dict[str, Any] = {name: x for name, x in of_edges.items() if x is not None}
        return self.head(self.encode(tokens, graph, valid=valid, positions=positions, **given))

    def _of_blocks(self, of_edges: dict[str, Any]) -> list[dict[str, Any]]:
        """What the edges of every block have: one for all that take it, or one per block."""
        given: list[dict[str, Any]] = [{} for _ in self.blocks]
        for name, tensors in of_edges.items():
            if tensors is None:
                continue
            if not isinstance(tensors, list | tuple):
                mixers = [cast(PreNormBlock, block).mixer for block in self.blocks]
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
            for own, tensor in zip(given, tensors, strict=True):
                if tensor is not None:
                    own[name] = tensor
        return given

    # Token by token.

    def init_cache(
        self,
        batch: int | tuple[int, ...],
        window: int | Sequence[int | None] | None = None,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        rollback: int = 0,
    ) -> ModelCache:
        """An empty cache for :meth:`step`, with one of every block in it.

        Args:
            batch: the leading dimensions of the tokens to come; () for a single text.
            window: how many tokens each token sees, itself included, as in
                :func:`~graphattn.causal_window_graph`; None for all before it; or a list with one
                of these per block.
            dtype, device: of what is kept; the model's own if None.
            rollback: how many of the newest tokens ``cache.truncate`` can take back at any time.

        Raises:
            ValueError: names the block and its mixer that cannot go token by token and what it
                needs, such as ``SelfConsensus(update="target")`` in the place of "consensus"; for
                arguments out of range; and where a subclass has replaced `forward` or `encode`
                alone.
        """
        self._check_steps()
        windows = window if isinstance(window, list | tuple) else [window] * len(self.blocks)
        if len(windows) != len(self.blocks):
            raise ValueError(
                f"window must be one for all, or one per block ({len(self.blocks)}), "
                f"got {len(windows)}"
            )
        caches = []
        for place, (block, own) in enumerate(zip(self._stack(), windows, strict=True)):
            try:
                made = block.init_cache(batch, own, dtype=dtype, device=device, rollback=rollback)
            except ValueError as error:
                raise ValueError(f"block {place}: {error}") from error
            caches.append(made)
        return ModelCache(caches)

    @torch.no_grad()
    def step(
        self,
        tokens: Tensor,
        cache: ModelCache,
        *,
        valid: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Logits of the next token, or of the next few, which the cache then holds too.

        T steps give what one forward over all T tokens gives in evaluation mode on the graphs
        ``causal_window_graph(T, window)`` of the windows that the cache was made with
        (``causal_graph(T)`` for None), to rounding. Not on the graphs that `forward` chooses by
        itself, which see later tokens. There is no gradient: `forward` is for training.

        Args:
            tokens: integers [*], the next of every text, or [*, n], the next n; * is the batch of
                the cache.
            cache: from this model's :meth:`init_cache`; updated in place.
            valid: bool [*] (or [*, n]), True where a token is real. A text that starts later than
                others of its batch is padded on the left.
            positions: [*] (or [*, n]), where tokens stand for rotary embeddings; counted from 0 by
                the cache if None.

        Returns:
            [*, vocab_size] or [*, n, vocab_size].

        Raises:
            ValueError: as :meth:`init_cache`, and for what does not fit the model or the cache.

        Example:
            >>> import torch, graphattn as ga
            >>> model = ga.models.SequenceEncoder(28, dim=32, depth=2, heads=4)
            >>> cache = model.init_cache(1, window=16)
            >>> text = torch.randint(28, (1, 5))
            >>> logits = model.step(text, cache)[:, -1]
            >>> for _ in range(20):
            ...     logits = model.step(logits.argmax(-1), cache)
            >>> cache.position
            25
        """
        return self.head(self.encode_step(tokens, cache, valid=valid, positions=positions))

    @torch.no_grad()
    def encode_step(
        self,
        tokens: Tensor,
        cache: ModelCache,
        *,
        valid: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """The features of :meth:`step` before the head, [*, dim] or [*, n, dim].

        Of a prompt, the head is often wanted of the last token alone.
        """
        self._check_steps()
        if not isinstance(cache, ModelCache) or len(cache) != len(self.blocks):
            got = f"one of {len(cache)}" if isinstance(cache, ModelCache) else type(cache).__name__
            raise ValueError(
                f"cache must be a ModelCache of {len(self.blocks)} layers, from init_cache, "
                f"got {got}"
            )
        batch, _ = cache.batch, cache.position  # both refuse a cache that was broken off
        single = isinstance(tokens, Tensor) and tokens.shape == batch
        if isinstance(tokens, Tensor) and not single and tokens.shape[:-1] != batch:
            raise ValueError(
                f"tokens must have shape {list(batch)} (one of every text) or "
                f"[{', '.join(map(str, [*batch, 'n']))}] with a cache of batch {list(batch)}, "
                f"got {list(tokens.shape)}"
            )
        if single:
            tokens = tokens.unsqueeze(-1)
            if isinstance(positions, Tensor):
                positions = positions.unsqueeze(-1)
        # All is checked before the first layer goes on, so that they stay together.
        n = tokens.shape[-1] if isinstance(tokens, Tensor) else 0
        valid = step_mask(valid, batch, None if single else n, self.embedding.weight.device)
        tokens = self._readable(tokens, valid)
        if positions is not None:
            check_positions(positions, tokens.shape)
        x = self.embedding(tokens)
        for block, own in zip(self._stack(), cache, strict=True):
            x = block.step(x, own, valid=valid, positions=positions)
        x = self.norm(x)
        return x.squeeze(-2) if single else x

    def _stack(self) -> Iterable[Any]:
        """The blocks, which are PreNormBlocks or have what those have."""
        return self.blocks

    def _check_steps(self) -> None:
        """Steps run neither `forward` nor `encode`: refuse where those were replaced."""
        names = ("forward", "encode")
        if replaced := replaced_beside(self, names, ("step", "encode_step")):
            raise ValueError(
                f"step does not run the {names_of(replaced)} of {type(self).__name__}, so it would "
                "not give what forward gives: override step, too"
            )

    def _readable(self, tokens: Tensor, valid: Tensor | None) -> Tensor:
        """The tokens, checked; padding may hold any number and is set to 0."""
        if (
            not isinstance(tokens, Tensor)
            or tokens.dim() < 1
            or tokens.dtype not in (torch.int32, torch.int64)
        ):
            got = (
                f"{tokens.dtype} of shape {list(tokens.shape)}"
                if isinstance(tokens, Tensor)
                else type(tokens).__name__
            )
            raise ValueError(f"tokens must be an int32 or int64 tensor of shape [*, N], got {got}")
        if valid is not None:
            if not isinstance(valid, Tensor):
                raise ValueError(f"valid must be a bool tensor, got {type(valid).__name__}")
            N = tokens.shape[-1]
            check_valid(valid, tokens.shape[:-1], tokens.device, N, N)
            tokens = tokens.masked_fill(~valid, 0)
        # Values are read where that costs nothing: not on a GPU, in torch.func, or while tracing.
        traced = (
            torch.compiler.is_compiling() or torch._C._functorch.maybe_current_level() is not None
        )
        if tokens.device.type == "cpu" and tokens.numel() > 0 and not traced:
            least, most = tokens.aminmax()
            if least < 0 or most >= self.vocab_size:
                bad = int(least if least < 0 else most)
                raise ValueError(
                    f"tokens must be 0 .. {self.vocab_size - 1} (vocab_size - 1), got {bad}"
                )
        return tokens


def _takes_edge_bias(mixer: nn.Module) -> bool:
    """Attention layers do, and modules of somebody else that have the keyword."""
    if isinstance(mixer, GraphAttention):
        return True
    if isinstance(mixer, GraphLayer):
        return False
    return "edge_bias" in inspect.signature(mixer.forward).parameters


def _takes_edge_features(mixer: nn.Module) -> bool:
    """Consensus layers do that were made for some."""
    width = getattr(mixer, "edge_features", None)
    return isinstance(width, int) and width > 0


OF_EDGES = {  # which layers take it, and what they are called
    "edge_bias": (_takes_edge_bias, "attention layers"),
    "edge_features": (_takes_edge_features, "consensus layers made with edge_features > 0"),
}


def _one_per_block(mixer: object, depth: int) -> Sequence[object]:
    """The mixer of every block, from its short form."""
    if not isinstance(mixer, list | tuple | nn.ModuleList):
        as_choice("mixer", mixer, ("dot", "consensus", "mix"))
        if mixer != "mix":
            return [mixer] * depth
        return ["dot"] * (depth // 2) + ["consensus"] * (depth - depth // 2)
    if len(mixer) != depth:
        raise ValueError(f"mixer must hold one entry per block ({depth}), got {len(mixer)}")
    layers = [entry for entry in mixer if isinstance(entry, nn.Module)]
    if len(set(map(id, layers))) < len(layers):
        raise ValueError("mixer must hold every layer once: blocks would share its weights")
    return list(mixer)
