"""A causal language model: every token sees itself and earlier tokens, and predicts the next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from graphattn.distributed.sharded_graph import ShardedGraph
from graphattn.graphs import TokenGraph, batch, causal_graph, causal_window_graph
from graphattn.graphs.arguments import as_int, as_share, as_softcap
from graphattn.models.language.generation import Progress, Stop, generate
from graphattn.models.mixers import (
    HALVES,
    KINDS,
    Mixer,
    Mixing,
    as_options,
    check_rope,
    mixers,
    one_per_block,
)
from graphattn.models.stack import Graphs, one_each
from graphattn.models.token_model import TiedModel, can_read_cheaply
from graphattn.near_names import explained
from graphattn.nn import PreNormBlock, SelfConsensus
from graphattn.nn.blocks.parts import Activation, Norm, make_norm
from graphattn.nn.rotary import check_positions
from graphattn.ops.attention.logits.score import capped

Window = int | None | Sequence[int | None]


class CausalLM(TiedModel):
    r"""A language model with any mixer: tokens in, logits of the next token out.

    It has an embedding, pre-norm blocks, a norm and a linear head. Attention layers see the last
    `window` tokens (all earlier tokens without a window), consensus layers the last
    `consensus_window` tokens; both numbers include the token itself. Consensus moves only the later
    token of a pair (``update="target"``). :meth:`generate` continues a text with caches.

    Args:
        vocab_size: number of tokens.
        dim: width.
        depth: number of blocks.
        heads: heads per layer, divides `dim`.
        mixer: "dot" (softmax attention), "dot-window" (the same, but it needs a `window`), "vlt"
            (no value projection), "linear", "gka" (Gaussian kernel attention), "krause",
            "dot+krause" (both in every block, mixed by a gate) or "consensus"; or "mix" ("dot" in
            the first half of the blocks, "consensus" in the second), "gka-consensus" or
            "krause-consensus"; or one entry per block: one of the first eight, or a layer of width
            `dim`, of :mod:`graphattn.nn` or your own.
        mixer_options: further options of the named layers, such as ``{"top_k": 8}``. Every layer
            takes the options that it has; an option that no layer has is an error. A list contains
            one value per block. ``{"qk_norm": True}`` normalises queries and keys of "dot", as
            nanochat does.
        window: keys that the attention layers see, the token itself included: one number for all,
            None for all earlier tokens; a pair (short, long) with `window_pattern`; or one per
            block, None for consensus blocks, which use `consensus_window` instead. "krause" without
            a window sees all earlier tokens, and it averages all of them unless you set
            ``mixer_options={"top_k": k}``. It is the window of the dot product in "dot+krause",
            which has another one for the Krause branch, ``mixer_options={"krause_window": w}``.
        window_pattern: the letters S (short window) and L (long window), one per block, repeated
            over all blocks. "SSSL" gives every fourth block the long window, as in the language
            model of *Projection-Free Transformers via Gaussian Kernel Attention*, Section 5.2,
            where the windows are 1,024 and 2,048 of 2,048 tokens.
        consensus_window: keys that consensus layers see, the token itself included: 3 means the two
            tokens before it, which is the earlier half of the consensus paper's window of 2.
        rope: whether all named layers use rotary positions; with "isometric", consensus layers keep
            their guarantees (attention layers then use the usual rotation).
        positions: "rotary", as `rope` says; "learned", a vector per position that is added to the
            embedding, in place of rotary positions; or None for no positions at all.
        num_positions: the largest number of tokens of a text, for learned positions.
        mlp_ratio: hidden width of the perceptrons, in units of `dim`.
        norm: "layer" or "rms", of the blocks and before the head.
        norm_affine: whether the norms have weights.
        activation: activation of the perceptrons: "gelu", or "relu2", the square of ReLU.
        bias: whether the perceptrons and norms have biases. It also holds for the projections of
            named mixers, unless `mixer_options` contains "bias". The head has no bias.
        dropout: share of the features that training sets to zero after every layer and perceptron.
        drop_path: share of the sequences for which training leaves out a part of the last block.
            The share grows evenly from 0 in the first block (Huang et al., 2016).
        tie_weights: whether the head's weight is the embedding.
        logit_softcap: c > 0, which bounds the logits: ``c * tanh(logits / c)`` (30 in Gemma 2).
            None for no bound.
        value_embeddings: whether the last block and every second one before it have a table
            [vocab_size, kv_heads * D] of the input tokens, whose rows are added to the values, each
            with a gate per head (nanochat, the baseline of the GKA paper). It is for "dot",
            "dot-window" and "krause". A layer that you make yourself can have its own,
            ``DotProductAttention(..., value_embeddings=vocab_size)``.

    Attributes:
        windows: the window of every block, consensus included; None for all earlier tokens.

    Shapes:
        - **tokens**: integers [*, N]
        - **graph**: one TokenGraph for all layers, or one per layer (a sequence of `depth`), which
          replaces all windows. For packed sequences use ``model.graphs(lengths)``. With parts of
          one rank (:func:`graphattn.distributed.shard`), all arguments and the output are of its
          tokens
        - **valid**: bool [N] or [*, N], True where a token is real (keyword)
        - **positions**: [N] or [*, N]; those of the graph if None (keyword)
        - **edge_features**, **edge_bias**: as :class:`SequenceEncoder` takes them (keywords)
        - **output**: [*, N, vocab_size]; the logits at token i are those of token i + 1

    Raises:
        ValueError: if an argument is not allowed, or if the update of a consensus layer moves
            earlier tokens; the message names the argument and says what is allowed.

    Example:
        >>> import torch, graphattn as ga
        >>> model = ga.models.CausalLM(
        ...     28, dim=32, depth=4, heads=4, mixer="gka", window=(8, 16), window_pattern="SSSL")
        >>> model(torch.randint(28, (2, 50))).shape
        torch.Size([2, 50, 28])
        >>> model.windows
        [8, 8, 8, 16]
        >>> model.generate(torch.tensor([[3, 1, 4]]), max_new_tokens=5).shape
        torch.Size([1, 8])
    """

    options_of_parts: ClassVar = frozenset({"heads", "mixer_options", "rope", "norm", "activation"})
    num_positions: int | None = None  # of models that were pickled before there were any
    windows: list[int | None]

    def __init__(
        self,
        vocab_size: int,
        dim: int,
        depth: int,
        heads: int,
        *,
        mixer: Mixer = "dot",
        mixer_options: Mapping[str, Any] | None = None,
        window: Window = None,
        window_pattern: str | None = None,
        consensus_window: int = 3,
        rope: bool | Literal["isometric"] = True,
        positions: Literal["rotary", "learned"] | None = "rotary",
        num_positions: int | None = None,
        mlp_ratio: float = 4.0,
        norm: Norm = "layer",
        norm_affine: bool = True,
        activation: Activation = "gelu",
        bias: bool = True,
        dropout: float = 0.0,
        drop_path: float = 0.0,
        tie_weights: bool = False,
        logit_softcap: float | None = None,
        value_embeddings: bool = False,
    ) -> None:
        super().__init__()
        self.vocab_size = as_int("vocab_size", vocab_size, 1)
        check_rope(rope)
        self.num_positions = _num_positions(positions, num_positions)
        if positions != "rotary":
            rope = False
        depth, dim = as_int("depth", depth, 1), as_int("dim", dim, 1)
        entries = one_per_block(mixer, depth)
        options = as_options(mixer_options)
        if any("bias" in KINDS[name].options for name in entries if isinstance(name, str)):
            options.setdefault("bias", bool(bias))
        near = as_int("consensus_window", consensus_window, 1)
        share = as_share("drop_path", drop_path)
        self.logit_softcap = as_softcap(logit_softcap, "logit_softcap")
        own_windows = window_of_blocks(window, window_pattern, depth)
        one_each = window_pattern is None and isinstance(window, list | tuple)
        if not isinstance(value_embeddings, bool):
            raise ValueError(f"value_embeddings must be True or False, got {value_embeddings!r}")
        embedded = self.vocab_size if value_embeddings else None
        self.embedding = nn.Embedding(self.vocab_size, dim)
        self.position_embedding = None
        if self.num_positions is not None:
            self.position_embedding = nn.Embedding(self.num_positions, dim)
        self.blocks = nn.ModuleList()
        self.windows = []
        layers = mixers(
            mixer,
            depth,
            dim,
            heads,
            rope=rope,
            options=options,
            causal=True,
            value_embeddings=embedded,
        )
        for place, mixing in enumerate(layers):
            self.windows.append(
                _window(place, entries[place], mixing, own_windows[place], near, one_each)
            )
            block = PreNormBlock(
                mixing.layer,
                mlp_ratio=mlp_ratio,
                dropout=dropout,
                drop_path=share * (place / (depth - 1) if depth > 1 else 1),
                norm=norm,
                norm_affine=norm_affine,
                activation=activation,
                bias=bias,
            )
            self.blocks.append(block)
        self.norm = make_norm(norm, dim, affine=norm_affine, bias=bias)
        self.head = nn.Linear(dim, self.vocab_size, bias=False)
        self._reset_embeddings()
        self._keep_tied(bool(tie_weights))

    @classmethod
    def comparable(cls, config: dict[str, Any]) -> dict[str, Any]:
        """Return `config` with one window per block, for every form of `window`."""
        depth, mixer = config.get("depth"), config.get("mixer")
        if not isinstance(depth, int):
            return config
        if isinstance(mixer, str):
            first, second = HALVES.get(mixer, (mixer, mixer))
            entries: list[Any] = [first] * (depth // 2) + [second] * (depth - depth // 2)
        else:
            entries = mixer if isinstance(mixer, list) else [mixer] * depth
        of_attention = window_of_blocks(config.get("window"), config.get("window_pattern"), depth)
        near = config.get("consensus_window")
        windows = [
            near if _is_near(entry) else window
            for entry, window in zip(entries, of_attention, strict=True)
        ]
        rest = ("window_pattern", "consensus_window")
        return {**config, "window": windows, **dict.fromkeys(rest)}

    def reset_parameters(self) -> None:
        """Initialise every parameter again."""
        for part in (*self.blocks, self.norm, self.head):
            part.reset_parameters()
        self._reset_embeddings()  # last: one may be the head's weight, too

    def _reset_embeddings(self) -> None:
        for embedding in (self.embedding, self.position_table):
            if embedding is not None:
                nn.init.normal_(embedding.weight, std=0.02)

    def graphs(self, num_tokens: int | Sequence[int]) -> list[TokenGraph]:
        """Return the graphs, one per block, that `forward` uses if no graph is given.

        Args:
            num_tokens: number of tokens of one sequence, or a list of the numbers of packed
                sequences.

        Example:
            >>> import graphattn as ga
            >>> model = ga.models.CausalLM(9, 8, depth=2, heads=2, mixer="mix", window=50)
            >>> model.graphs(100)
            [TokenGraph(num_tokens=100, num_edges=3775, structure=Band),
             TokenGraph(num_tokens=100, num_edges=297, structure=Band)]
            >>> [graph.num_edges for graph in model.graphs([60, 40])]  # none between the two
            [2595, 294]
        """
        device = self.embedding.weight.device
        return one_each(self.windows, lambda window: _causal(num_tokens, window).to(device))

    def embed_tokens(
        self,
        tokens: Tensor,
        *,
        start: int = 0,
        positions: Tensor | None = None,
        valid: Tensor | None = None,
    ) -> Tensor:
        x = super().embed_tokens(tokens)
        table = self.position_table
        if table is None:
            return x
        if positions is None:
            self.check_length(start + tokens.shape[-1])
            positions = torch.arange(start, start + tokens.shape[-1], device=tokens.device)
        if not isinstance(positions, Tensor) or positions.dtype not in (torch.int32, torch.int64):
            got = positions.dtype if isinstance(positions, Tensor) else type(positions).__name__
            raise ValueError(
                "positions must be a tensor of integers in a model with positions='learned', got "
                f"{got}"
            )
        check_positions(positions, tokens.shape)
        if valid is not None:  # padding on the left has negative positions
            positions = positions.masked_fill(~valid, 0)
        if can_read_cheaply(positions):
            least, most = positions.aminmax()
            if least < 0:
                raise ValueError(f"positions must be >= 0, got {int(least)}")
            self.check_length(int(most) + 1)
        return x + table(positions)

    def check_length(self, num_tokens: int) -> None:
        if self.num_positions is not None and num_tokens > self.num_positions:
            raise ValueError(
                f"tokens must be at most {self.num_positions} (num_positions), because this model "
                f"has learned a vector for so many positions, got {num_tokens}"
            )

    def _learned_places(self, first: Any, valid: Tensor | None) -> Tensor:
        """Return the learned positions of a call that gives none, from the graph of a block."""
        graph: TokenGraph = first.tokens if isinstance(first, ShardedGraph) else first
        for num_tokens, _ in graph.sizes:
            self.check_length(num_tokens)
        if valid is None or len(graph.sizes) != 1:
            return graph.positions
        # Padding on the left does not count, as in generate().
        padding = (valid.cumsum(-1) == 0).sum(-1, keepdim=True)
        return graph.positions - padding

    def encode(
        self,
        tokens: Tensor,
        graph: Graphs = None,
        *,
        valid: Tensor | None = None,
        positions: Tensor | None = None,
        edge_bias: Tensor | Sequence[Tensor | None] | None = None,
        edge_features: Tensor | Sequence[Tensor | None] | None = None,
    ) -> Tensor:
        """Return the features before the head, [*, N, dim]."""
        tokens = self._readable(tokens, valid)
        graphs = self.graph_of_blocks(graph, tokens.shape[-1])
        places = positions
        if places is None and self.position_table is not None:
            places = self._learned_places(graphs[0], valid)
        x = self.run_blocks(
            self.embed_tokens(tokens, positions=places, valid=valid),
            graphs,
            of_edges={
                "edge_bias": edge_bias,
                "edge_features": edge_features,
                "tokens": self.tokens_of_values(tokens),
            },
            valid=valid,
            positions=positions,
        )
        return self.norm(x)

    def forward(
        self,
        tokens: Tensor,
        graph: Graphs = None,
        *,
        valid: Tensor | None = None,
        positions: Tensor | None = None,
        edge_bias: Tensor | Sequence[Tensor | None] | None = None,
        edge_features: Tensor | Sequence[Tensor | None] | None = None,
    ) -> Tensor:
        """Return the logits of the next token after every token, [*, N, vocab_size]."""
        return self._logits_of(
            tokens,
            graph,
            valid=valid,
            positions=positions,
            edge_bias=edge_bias,
            edge_features=edge_features,
        )

    def logits(self, features: Tensor) -> Tensor:
        """Apply the head with its softcap, [*, dim] -> [*, vocab_size]."""
        return capped(self.head(features), self.logit_softcap)

    def _apply_head(self, features: Tensor) -> Tensor:
        return self.logits(features)

    @explained
    def generate(
        self,
        tokens: Tensor,
        max_new_tokens: int,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        stop: Stop = None,
        generator: torch.Generator | None = None,
        valid: Tensor | None = None,
        progress: Progress | None = None,
        draft: CausalLM | None = None,
        draft_tokens: int = 4,
        shard: ShardedGraph | None = None,
    ) -> Tensor:
        """Continue prompts; return the prompts with their continuations, [*, N + new].

        The texts are the same as if each step called `forward` on the whole text so far, up to
        rounding, but every token is read only once. There is no dropout, not even in training mode,
        and there are no gradients.

        A `draft` is a smaller model with the same vocabulary. It writes `draft_tokens` tokens in
        advance, this model reads them in one step, and accepts those that it would have written
        itself (speculative decoding; Leviathan, Kalman and Matias, 2023). Greedy texts stay the
        same. Sampled texts have the same distribution, but a generator draws other tokens. All
        texts of a batch continue from the smallest number of accepted tokens.

        Args:
            tokens: the prompts, integers [*, N], at least one token each.
            max_new_tokens: maximal number of new tokens; 0 returns the prompts.
            temperature: logits are divided by it before a token is drawn; with 0 the most likely
                token is taken, without a draw.
            top_k: draw from the `top_k` most likely tokens; None for all.
            top_p: draw from the smallest set of most likely tokens that together have this
                probability, in (0, 1] (nucleus sampling; Holtzman et al., 2020), after `top_k`;
                None for all.
            stop: one stop or several, each a token or a sequence of tokens. A text ends as soon as
                it has written one of them; the prompt does not count. While other texts of the
                batch continue, it is filled with its last token. Generation ends when all texts
                have ended.
            generator: random generator that draws the tokens; None for torch's default.
            valid: bool [N] or [*, N], True where a token is real: pad prompts of different lengths
                on the left. Each text is then the same as without a batch.
            progress: called as ``progress(step, tokens)`` after every token, with the number of new
                tokens and the texts so far, [*, N + step]. Generation ends if it returns True. (The
                method ``update`` of some progress bars returns True: wrap it in a function.)
            draft: a :class:`CausalLM` with the same vocabulary that writes tokens in advance.
            draft_tokens: how many tokens the draft writes in advance, at least 1.
            shard: this rank's part of a graph over the prompt, for a prompt whose keys and values
                are too many for one rank (:func:`graphattn.distributed.shard`, see
                :meth:`init_cache`). Every rank calls with the same arguments and all tokens, and
                gets the same texts. The first rank draws the tokens. It excludes a draft.

        Returns:
            Integers [*, N + n], n <= max_new_tokens, with the prompts and their padding unchanged.

        Raises:
            ValueError: if an argument is not allowed, or if `top_k` or `top_p` is given with
                temperature 0, where it has no effect; the message names the argument and says what
                is allowed.

        Example:
            >>> import torch, graphattn as ga
            >>> model = ga.models.CausalLM(28, dim=32, depth=2, heads=4, window=16)
            >>> prompts = torch.randint(28, (2, 10))
            >>> model.generate(prompts, 20).shape
            torch.Size([2, 30])
            >>> draws = torch.Generator().manual_seed(0)
            >>> model.generate(prompts, 20, temperature=0.8, top_p=0.9, generator=draws).shape
            torch.Size([2, 30])
        """
        if draft is not None and not isinstance(draft, CausalLM):
            raise ValueError(f"draft must be a CausalLM or None, got {type(draft).__name__}")
        return generate(
            self,
            tokens,
            max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            stop=stop,
            generator=generator,
            valid=valid,
            progress=progress,
            draft=draft,
            draft_tokens=draft_tokens,
            shard=shard,
        )


def _num_positions(positions: Any, num_positions: Any) -> int | None:
    """Return the number of learned positions, None if there are none."""
    if positions not in ("rotary", "learned", None):
        raise ValueError(f"positions must be 'rotary', 'learned' or None, got {positions!r}")
    if positions == "learned":
        if num_positions is None:
            raise ValueError(
                "num_positions must be a number with positions='learned', the tokens of the "
                "longest text, got None"
            )
        return as_int("num_positions", num_positions, 1)
    if num_positions is not None:
        raise ValueError(
            f"num_positions must be None with positions={positions!r}, which have no such number, "
            f"got {num_positions!r}: use positions='learned'"
        )
    return None


def _causal(num_tokens: int | Sequence[int], window: int | None) -> TokenGraph:
    if isinstance(num_tokens, list | tuple):
        return batch([_causal(length, window) for length in num_tokens])
    one: Any = num_tokens
    return causal_graph(one) if window is None else causal_window_graph(one, window)


def _is_near(entry: Any) -> bool:
    """Return whether an entry of a config is a consensus layer."""
    return entry == "consensus" or (
        isinstance(entry, dict) and entry.get("class") == SelfConsensus.__name__
    )


def _window(
    place: int, entry: Any, mixing: Mixing, window: int | None, near: int, one_each: bool
) -> int | None:
    """Return the window of a block, in keys, or raise a ValueError if it does not fit the layer."""
    layer, reach = mixing
    if isinstance(layer, SelfConsensus) and layer.update_rule == "energy":
        raise ValueError(
            "mixer must not let later tokens change earlier ones, got a "
            f"SelfConsensus(update='energy') in block {place}, which does: make it with "
            "update='target'"
        )
    if reach == "near":
        if one_each and window is not None:
            raise ValueError(
                f"window must be None for block {place}, because a consensus layer uses "
                f"consensus_window={near} instead, got {window}"
            )
        return near
    if entry == "dot-window" and window is None:
        raise ValueError(
            f"window must be a number of keys for the mixer {entry!r} (block {place}), got None"
        )
    return window


def window_of_blocks(window: Any, pattern: Any, depth: int) -> list[int | None]:
    """Return the window of every block, in keys, the token itself included; None for no window.

    Args:
        window: one for all blocks, a pair (short, long) with a `pattern`, or one per block.
        pattern: letters S and L, one per block from the first on, repeated for more blocks; None
            without a pair. Letters beyond the last block are ignored.
        depth: number of blocks.
    """

    def checked(keys: Any) -> int | None:
        return None if keys is None else as_int("window", keys, 1)

    several = isinstance(window, list | tuple)
    if pattern is not None:
        if not isinstance(pattern, str) or not pattern or set(pattern) - {"S", "L"}:
            raise ValueError(
                "window_pattern must be a string of the letters S (short) and L (long), got "
                f"{pattern!r}"
            )
        if not several or len(window) != 2:
            raise ValueError(
                f"window must be a pair (short, long) with window_pattern={pattern!r}, "
                f"got {window!r}"
            )
        short, long = map(checked, window)
        return [short if pattern[i % len(pattern)] == "S" else long for i in range(depth)]
    if not several:
        return [checked(window)] * depth
    if len(window) != depth:
        hint = "; a pair (short, long) needs a window_pattern" if len(window) == 2 else ""
        raise ValueError(
            f"window must be one number for all blocks, or a list with one per block ({depth}), "
            f"got {window!r}{hint}"
        )
    return [checked(keys) for keys in window]
