"""A language model: every token sees itself and earlier ones, and predicts the next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from graphattn.graphs import TokenGraph, batch, causal_graph, causal_window_graph
from graphattn.graphs.arguments import as_int
from graphattn.models.language.generation import Progress, Stop, generate
from graphattn.models.language.tied_model import TiedModel
from graphattn.models.language.windows import window_of_blocks
from graphattn.models.mixers import (
    HALVES,
    KINDS,
    Mixer,
    Mixing,
    as_options,
    mixers,
    one_per_block,
)
from graphattn.models.stack import Graphs
from graphattn.nn import ModelCache, PreNormBlock, SelfConsensus
from graphattn.nn.blocks.block import Activation, Norm, make_norm
from graphattn.ops.attention.logits.softcap import as_softcap, capped
from graphattn.ops.dropout import as_share

Window = int | None | Sequence[int | None]


class CausalLM(TiedModel):
    r"""A language model: tokens in, logits of the next token out, of any mixer.

    Embedding, pre-norm blocks, norm, linear head. Attention layers see the last `window` tokens
    (all earlier ones without), consensus layers the last `consensus_window`; both numbers count
    the token itself. Consensus moves the later token of a pair alone, ``update="target"``.
    :meth:`generate` writes on by streaming caches.

    Args:
        vocab_size: number of tokens.
        dim: width.
        depth: number of blocks.
        heads: heads per layer, divides `dim`.
        mixer: "dot" (softmax attention), "dot-window" (the same, which insists on a `window`),
            "vlt" (no value projection), "linear", "gka" (Gaussian kernel attention), "krause" or
            "consensus"; or "mix" ("dot" in the first half of the blocks, "consensus" in the
            second), "gka-consensus" or "krause-consensus"; or one entry per block: one of the first
            seven, or a layer of width `dim`, of :mod:`graphattn.nn` or your own.
        mixer_options: further options of the named layers, such as ``{"top_k": 8}``: every layer
            takes those that it has, and one that no layer has is refused. A list holds one value
            per block.
        window: keys that the attention layers see, the token itself included: one number for all,
            None for all tokens before; a pair (short, long) with `window_pattern`; or one per
            block, None at blocks of consensus, which have `consensus_window` in its place.
            "krause" without a window sees all tokens before, and without
            ``mixer_options={"top_k": k}`` nothing of what it sees is cut.
        window_pattern: "S" for the short and "L" for the long window of a block, repeated over the
            blocks: "SSSL" is every fourth block long, as in the language model of
            *Projection-Free Transformers via Gaussian Kernel Attention*, Section 5.2. There 1,024
            and 2,048 of 2,048 tokens.
        consensus_window: keys that consensus layers see, the token itself included: 3 is the two
            before it, the nearer half of the consensus paper's window of 2.
        rope: rotary positions in all named layers; "isometric" where consensus layers should keep
            their guarantees (attention layers then use the usual rotation).
        mlp_ratio: hidden width of the perceptrons, in units of `dim`.
        norm: "layer" or "rms", of the blocks and before the head.
        norm_affine: whether the norms have weights.
        activation: of the perceptrons: "gelu", or "relu2", the square of ReLU.
        bias: whether the perceptrons and norms have biases, and the projections of named mixers,
            where `mixer_options` says nothing else. The head has none.
        dropout: share of features zeroed after every layer and perceptron, in training.
        drop_path: share of sequences for which a part of the last block is left out in training;
            that of earlier blocks grows evenly from 0 (Huang et al., 2016).
        tie_weights: whether the head's weight is the embedding.
        logit_softcap: cap c > 0 on the logits, ``c * tanh(logits / c)`` (Gemma 2: 30); none if
            None.

    Attributes:
        windows: the window of every block, consensus included; None for all tokens before.

    Shapes:
        - **tokens**: integers [*, N]
        - **graph**: one TokenGraph for all layers, or one per layer (a sequence of `depth`), which
          then says alone what is seen. Packed sequences take ``model.graphs(lengths)``
        - **valid**: bool [N] or [*, N], True where a token is real (keyword)
        - **positions**: [N] or [*, N]; those of the graph if None (keyword)
        - **edge_features**, **edge_bias**: as :class:`SequenceEncoder` takes them (keywords)
        - **output**: [*, N, vocab_size]; the logits at token i are those of token i + 1

    Raises:
        ValueError: names the argument, its value and what is allowed; for a consensus layer whose
            update moves earlier tokens, too.

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
        mlp_ratio: float = 4.0,
        norm: Norm = "layer",
        norm_affine: bool = True,
        activation: Activation = "gelu",
        bias: bool = True,
        dropout: float = 0.0,
        drop_path: float = 0.0,
        tie_weights: bool = False,
        logit_softcap: float | None = None,
    ) -> None:
        super().__init__()
        self.vocab_size = as_int("vocab_size", vocab_size, 1)
        if not (isinstance(rope, bool) or rope == "isometric"):
            raise ValueError(f"rope must be True, False or 'isometric', got {rope!r}")
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
        self.embedding = nn.Embedding(self.vocab_size, dim)
        self.blocks = nn.ModuleList()
        self.windows: list[int | None] = []
        for place, mixing in enumerate(
            mixers(mixer, depth, dim, heads, rope=rope, options=options, causal=True)
        ):
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
        nn.init.normal_(self.embedding.weight, std=0.02)
        self._keep_tied(bool(tie_weights))

    @classmethod
    def comparable(cls, config: dict[str, Any]) -> dict[str, Any]:
        """`config` with the window of every block, however it was said."""
        depth, mixer = config.get("depth"), config.get("mixer")
        if not isinstance(depth, int):
            return config
        if isinstance(mixer, str):
            first, second = HALVES.get(mixer, (mixer, mixer))
            entries: list[Any] = [first] * (depth // 2) + [second] * (depth - depth // 2)
        else:
            entries = mixer if isinstance(mixer, list) else [mixer] * depth
        own = window_of_blocks(config.get("window"), config.get("window_pattern"), depth)
        near = config.get("consensus_window")
        windows = [
            near if _is_near(entry) else window for entry, window in zip(entries, own, strict=True)
        ]
        rest = ("window_pattern", "consensus_window")
        return {**config, "window": windows, **dict.fromkeys(rest)}

    def reset_parameters(self) -> None:
        """Draw every parameter anew."""
        for part in (*self.blocks, self.norm, self.head):
            part.reset_parameters()
        nn.init.normal_(self.embedding.weight, std=0.02)  # the head's, where it is tied

    def graphs(self, num_tokens: int | Sequence[int]) -> list[TokenGraph]:
        """The graph of every block where `forward` is given none; of packed sequences from lengths.

        Args:
            num_tokens: of one sequence, or of each of several that stand one after the other.

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
        made: dict[int | None, TokenGraph] = {}
        for window in self.windows:
            if window not in made:
                made[window] = _causal(num_tokens, window).to(device)
        return [made[window] for window in self.windows]

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
        """The features before the head, [*, N, dim]."""
        tokens = self._readable(tokens, valid)
        x = self.run_blocks(
            self.embedding(tokens),
            self.graph_of_blocks(graph, tokens.shape[-1]),
            of_edges={"edge_bias": edge_bias, "edge_features": edge_features},
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
        """Logits of the token after every token, [*, N, vocab_size]."""
        of_edges = {"edge_bias": edge_bias, "edge_features": edge_features}
        given: dict[str, Any] = {name: x for name, x in of_edges.items() if x is not None}
        features = self.encode(tokens, graph, valid=valid, positions=positions, **given)
        return self.logits(features)

    def logits(self, features: Tensor) -> Tensor:
        """The head, [*, dim] -> [*, vocab_size], with its softcap."""
        return capped(self.head(features), self.logit_softcap)

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
            window: the model's own, :attr:`windows`, if None; or another for all blocks, or one
                per block (None for all tokens before).
            dtype, device: of what is kept; the model's own if None.
            rollback: how many of the newest tokens ``cache.truncate`` can take back at any time.

        Raises:
            ValueError: names the block whose mixer cannot go token by token and what it needs; for
                arguments out of range; and where a subclass has replaced `forward` or `encode`
                alone.
        """
        own = self.windows if window is None else window
        return super().init_cache(batch, own, dtype=dtype, device=device, rollback=rollback)

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

        T steps give what one forward over all T tokens gives in evaluation mode, to rounding.
        There is no gradient: `forward` is for training.

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
        """
        return self.logits(self.encode_step(tokens, cache, valid=valid, positions=positions))

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
    ) -> Tensor:
        """Continue prompts: the prompts with their continuations, [*, N + new].

        The texts are those of whole forward passes over everything written so far, to rounding,
        but every token is read once. Nothing is dropped out, in no mode, and there is no gradient.

        With a `draft`, a smaller model of the same vocabulary, that one writes `draft_tokens`
        tokens ahead and this one reads them in one step, which keeps those that it would have
        written (speculative decoding; Leviathan, Kalman and Matias, 2023). Greedy texts stay the
        same; sampled ones keep their distribution, but not the draws of a generator. A batch goes
        on from the least number of tokens that all its texts keep.

        Args:
            tokens: the prompts, integers [*, N], at least one token each.
            max_new_tokens: how many tokens are written at most; 0 gives the prompts back.
            temperature: logits are divided by it before a token is drawn; 0 takes the likeliest
                token every time, and draws none.
            top_k: draw from the `top_k` likeliest tokens; all if None.
            top_p: draw from the fewest likeliest tokens that together have this probability, in
                (0, 1] (nucleus sampling; Holtzman et al., 2020), after `top_k`; all if None.
            stop: a token or several, each a number or a sequence of numbers: a text ends once
                it has written the first of them (a prompt does not count). It is filled with
                its last token while others of its batch go on; when all have ended, so does the
                generation.
            generator: draws the tokens; torch's own if None.
            valid: bool [N] or [*, N], True where a token is real: prompts of different lengths are
                padded on the left. Each then gives what it gives alone.
            progress: called as ``progress(step, tokens)`` after every token, with the number of
                tokens written and the texts so far, [*, N + step]; generation ends where it
                returns True (which some progress bars' own ``update`` does: wrap it).
            draft: a :class:`CausalLM` of the same vocabulary that writes ahead.
            draft_tokens: how far, at least 1.

        Returns:
            Integers [*, N + n], n <= max_new_tokens, prompts and their padding as they were given.

        Raises:
            ValueError: names the argument, its value and what is allowed: also for `top_k` or
                `top_p` at temperature 0, where they would do nothing.

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
        )


def _causal(num_tokens: int | Sequence[int], window: int | None) -> TokenGraph:
    if isinstance(num_tokens, list | tuple):
        return batch([_causal(length, window) for length in num_tokens])
    one: Any = num_tokens
    return causal_graph(one) if window is None else causal_window_graph(one, window)


def _is_near(entry: Any) -> bool:
    """Whether an entry of a config is a consensus layer."""
    return entry == "consensus" or (
        isinstance(entry, dict) and entry.get("class") == SelfConsensus.__name__
    )


def _window(
    place: int, entry: Any, mixing: Mixing, window: int | None, near: int, one_each: bool
) -> int | None:
    """The window of a block, in keys; a ValueError where it does not fit the layer."""
    layer, reach = mixing
    if isinstance(layer, SelfConsensus) and layer.update_rule == "energy":
        raise ValueError(
            f"mixer must not see later tokens, got a SelfConsensus(update='energy') at block "
            f"{place}: it moves earlier tokens by later ones; update='target' does not"
        )
    if reach == "near":
        if one_each and window is not None:
            raise ValueError(
                f"window must be None at block {place}, a consensus layer, whose window is "
                f"consensus_window={near}, got {window}"
            )
        return near
    if entry == "dot-window" and window is None:
        raise ValueError(
            f"window must be a number of keys for the mixer {entry!r} (block {place}), got None"
        )
    return window
