"""An encoder of token sequences, with a mixer per layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from graphattn.graphs import TokenGraph
from graphattn.graphs.arguments import as_int, as_share
from graphattn.models.mixers import KINDS, Mixer, as_options, check_rope, mixers, one_per_block
from graphattn.models.stack import Graphs
from graphattn.models.token_model import TokenModel, can_read_cheaply
from graphattn.nn import NoiseEmbedding, PreNormBlock
from graphattn.nn.blocks.parts import Activation, Norm, make_norm, zero_linear


class SequenceEncoder(TokenModel):
    r"""An encoder from tokens to logits: embedding, pre-norm blocks, norm, linear head.

    It has the mixers that *Stabilizing Transformer Training Through Consensus* compares (Section
    5.1, Appendix E.1): ``mixer="dot"`` is called SA there (attention in all layers), "consensus" is
    SC, and "mix" is MIX (attention in the first half of the layers, consensus in the second half).
    Sliding-window attention (SW) is "dot-window".

    With ``noise_dim=128, zero_head=True`` it is the backbone of that paper for text and DNA, which
    is the one of SEDD (Lou et al., 2024). An embedded noise level sets shift, scale and gate of
    both parts of every block, and shift and scale before the head. All of these start at 0, and so
    does the head. The parameter counts differ from those of Table 10, which cannot follow from the
    shapes given there: see "What the papers count" in the documentation. The shapes are presets
    (:func:`~graphattn.models.presets`), such as "consensus-text-54m".

    If a call gives no graph, the name of each mixer decides the graph over the tokens of the call:
    "dot", "vlt", "linear" and "gka" on the complete graph; "dot-window" and "krause" on `window`
    tokens on each side and the token itself; "consensus" on the window-path graph of `window`
    tokens on each side. ("krause" averages all of these tokens unless you set
    ``mixer_options={"top_k": k}``.)

    Args:
        vocab_size: number of tokens, a mask token included if there is one.
        dim: width.
        depth: number of blocks.
        heads: heads per layer, divides `dim`.
        mixer: "dot", "dot-window", "vlt" (no value projection), "linear", "gka", "krause",
            "dot+krause" (:class:`~graphattn.nn.GatedKrauseAttention`) or "consensus"; or "mix"
            ("dot" in the first half, "consensus" in the second), "gka-consensus" or
            "krause-consensus"; or one entry per block: one of the first eight, or a layer of width
            `dim`, of :mod:`graphattn.nn` or your own (see :class:`~graphattn.nn.PreNormBlock`).
        window: tokens on each side, for the mixers with a window, if a call gives no graph (2 in
            the paper).
        rank: rank of the consensus layers (4 in the paper).
        edge_hidden: hidden width of the edge networks of consensus layers (256 in the paper).
        step_size: step size of the consensus layers, as in :class:`~graphattn.nn.SelfConsensus`;
            "auto" needs ``rope=False`` or "isometric".
        rope: whether all named layers use rotary positions; with "isometric", consensus layers keep
            their guarantees (other layers then use the usual rotation).
        mlp_ratio: hidden width of the perceptrons, in units of `dim`.
        dropout: share of the features that training sets to zero after every layer and perceptron.
        edge_features: number of features of an edge that the networks of consensus layers read.
        mixer_options: further options of the named layers, such as ``{"top_k": 8}``. Every layer
            takes the options that it has; an option that no layer has is an error. A list contains
            one value per block, as :func:`top_k_schedule` makes it. `rank`, `edge_hidden` and
            `step_size` may be here, too, as in the other models, and then replace the arguments.
        noise_dim: width of the embedded noise level (128 in SEDD); None for a model without noise
            levels.
        zero_head: whether the head starts at 0, so that at first all tokens are equally likely.
        drop_path: share of the sequences for which training leaves out a part of the last block
            (stochastic depth). The share grows evenly from 0 in the first block.
        norm: "layer" (LayerNorm) or "rms" (RMSNorm).
        activation: activation of the perceptrons: "gelu", or "relu2", the square of ReLU.
        bias: whether perceptrons, norms and the head have biases. It also holds for the named
            layers, unless `mixer_options` contains "bias". The maps of the noise level always have
            biases.

    Shapes:
        - **tokens**: integers [*, N]
        - **graph**: one TokenGraph for all layers, or one per layer (a sequence of `depth`); for
          packed sequences use :func:`~graphattn.batch`. Without a graph, all tokens of a row are
          one sequence, even if you have packed several into it. With parts of one rank
          (:func:`graphattn.distributed.shard`), all arguments and the output are of its tokens
        - **noise_level**: floating-point [*], numbers >= 0, one per sequence, or [*, N], one per
          token, which packed sequences need. Required if the model has `noise_dim`, not allowed
          otherwise (keyword)
        - **valid**: bool [N] or [*, N], True where a token is real (keyword)
        - **positions**: [N] or [*, N]; those of the graph if None (keyword)
        - **edge_features**: [E, F] or [*, E, F] for all consensus layers that take them, in the
          order of ``edge_index`` of their graph; or one entry per block, None for a block without
          edge features (keyword)
        - **edge_bias**: for the attention layers of all blocks, as they take it: [E, heads] or
          [*, E, heads] over their graph, or a table [offsets, heads]; or one entry per block (a
          sequence of `depth`), None for a block without a bias (keyword)
        - **output**: [*, N, vocab_size]

    Raises:
        ValueError: if an argument is not allowed; the message names it and says what is allowed.

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

        For diffusion, with the noise level of either text:

        >>> denoiser = ga.models.SequenceEncoder(
        ...     28, 32, depth=4, heads=4, noise_dim=16, zero_head=True)
        >>> denoiser(tokens, noise_level=torch.tensor([0.1, 3.0])).shape
        torch.Size([2, 50, 28])
    """

    options_of_parts: ClassVar = frozenset({"heads", "mixer_options", "rope", "step_size"})

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
        mixer_options: Mapping[str, Any] | None = None,
        noise_dim: int | None = None,
        zero_head: bool = False,
        drop_path: float = 0.0,
        norm: Norm = "layer",
        activation: Activation = "gelu",
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.vocab_size = as_int("vocab_size", vocab_size, 1)
        self.window = as_int("window", window, 1)
        check_rope(rope)
        depth, dim = as_int("depth", depth, 1), as_int("dim", dim, 1)
        options = as_options(mixer_options)
        if "edge_features" in options:
            raise ValueError(
                "mixer_options must not contain 'edge_features': it is an argument of the model "
                "itself, edge_features="
            )
        entries = one_per_block(mixer, depth)
        if "consensus" in entries:
            of_consensus = {"rank": rank, "edge_hidden": edge_hidden, "step_size": step_size}
            options = {**of_consensus, **options, "edge_features": edge_features}
        elif as_int("edge_features", edge_features, 0):
            raise ValueError(
                "edge_features must be 0 in a model without consensus layers given by name, got "
                f"{edge_features}: make a layer that you pass as a module with its own "
                "edge_features="
            )
        if not bias and any("bias" in KINDS[e].options for e in entries if isinstance(e, str)):
            options.setdefault("bias", False)
        mixings = mixers(mixer, depth, dim, heads, rope=rope, options=options)
        self.noise_dim = None if noise_dim is None else as_int("noise_dim", noise_dim, 1)
        self.zero_head = zero_head
        last_drop_path = as_share("drop_path", drop_path)
        self.embedding = nn.Embedding(self.vocab_size, dim)
        self.blocks = nn.ModuleList()
        self.reaches = []
        for place, (layer, reach) in enumerate(mixings):
            block = PreNormBlock(
                layer,
                mlp_ratio=mlp_ratio,
                dropout=dropout,
                drop_path=last_drop_path * (place / (depth - 1) if depth > 1 else 1),
                norm=norm,
                activation=activation,
                bias=bias,
                condition_dim=self.noise_dim,
            )
            self.blocks.append(block)
            self.reaches.append(reach)
        self.norm = make_norm(norm, dim, bias=bias)
        self.head = nn.Linear(dim, self.vocab_size, bias=bias)
        self.noise: NoiseEmbedding | None = None
        self.head_modulation: nn.Linear | None = None
        if self.noise_dim is not None:
            self.noise = NoiseEmbedding(self.noise_dim)
            self.head_modulation = zero_linear(self.noise_dim, 2 * dim)
        nn.init.normal_(self.embedding.weight, std=0.02)
        if zero_head:
            _set_to_zero(self.head)

    @classmethod
    def comparable(cls, config: dict[str, Any]) -> dict[str, Any]:
        """Return `config` without `window` if no layer uses it."""
        mixer = config.get("mixer")
        entries = mixer if isinstance(mixer, list) else [mixer]
        never = [name for name, kind in KINDS.items() if kind.reach == "all"]
        return {**config, "window": None} if all(e in never for e in entries) else config

    def reset_parameters(self) -> None:
        """Initialise every parameter again."""
        nn.init.normal_(self.embedding.weight, std=0.02)
        for part in (*self.blocks, self.norm, self.head):
            part.reset_parameters()
        if self.zero_head:
            _set_to_zero(self.head)
        if self.noise is not None:
            self.noise.reset_parameters()
            _set_to_zero(self.head_modulation)

    def graphs(self, num_tokens: int) -> list[TokenGraph]:
        """Return the graphs, one per block, that `forward` uses if no graph is given.

        Example:
            >>> import graphattn as ga
            >>> ga.models.SequenceEncoder(9, 8, depth=2, heads=2, mixer="mix").graphs(100)
            [TokenGraph(num_tokens=100, num_edges=10000, structure=Complete),
             TokenGraph(num_tokens=100, num_edges=394, structure=Band)]
        """
        return self._graphs_of_reaches(num_tokens)

    def encode(
        self,
        tokens: Tensor,
        graph: Graphs = None,
        *,
        noise_level: Tensor | None = None,
        valid: Tensor | None = None,
        positions: Tensor | None = None,
        edge_bias: Tensor | Sequence[Tensor | None] | None = None,
        edge_features: Tensor | Sequence[Tensor | None] | None = None,
    ) -> Tensor:
        """Return the features before the head, [*, N, dim]."""
        tokens = self._readable(tokens, valid)
        condition = self._condition(noise_level, tokens, valid)
        x = self.run_blocks(
            self.embedding(tokens),
            self.graph_of_blocks(graph, tokens.shape[-1]),
            of_edges={
                "edge_bias": edge_bias,
                "edge_features": edge_features,
                "tokens": self.tokens_of_values(tokens),
            },
            valid=valid,
            positions=positions,
            condition=condition,
        )
        x = self.norm(x)
        if self.head_modulation is None or condition is None:
            return x
        if condition.dim() < x.dim():  # one per sequence
            condition = condition.unsqueeze(-2)
        shift, scale = self.head_modulation(condition).chunk(2, -1)
        return torch.addcmul(shift, x, 1 + scale)

    def forward(
        self,
        tokens: Tensor,
        graph: Graphs = None,
        *,
        noise_level: Tensor | None = None,
        valid: Tensor | None = None,
        positions: Tensor | None = None,
        edge_bias: Tensor | Sequence[Tensor | None] | None = None,
        edge_features: Tensor | Sequence[Tensor | None] | None = None,
    ) -> Tensor:
        """Return logits over the vocabulary for every token, [*, N, vocab_size]."""
        return self._logits_of(
            tokens,
            graph,
            noise_level=noise_level,
            valid=valid,
            positions=positions,
            edge_bias=edge_bias,
            edge_features=edge_features,
        )

    def _condition(
        self, noise_level: Tensor | None, tokens: Tensor, valid: Tensor | None
    ) -> Tensor | None:
        """Embed the noise level, [*, noise_dim] or [*, N, noise_dim]; that of padding is read as
        0."""
        if self.noise is None:
            if noise_level is not None:
                raise ValueError(
                    "noise_level must be None in a model made without noise_dim, got "
                    f"{type(noise_level).__name__}"
                )
            return None
        per_token = tokens.shape
        if (
            not isinstance(noise_level, Tensor)
            or not noise_level.is_floating_point()
            or noise_level.shape not in (per_token[:-1], per_token)
        ):
            got = repr(noise_level)
            if isinstance(noise_level, Tensor):
                got = f"{noise_level.dtype} of shape {list(noise_level.shape)}"
            raise ValueError(
                f"noise_level must be a floating-point tensor of shape {list(per_token[:-1])} (one "
                f"per sequence) or {list(per_token)} (one per token) in a model with noise_dim="
                f"{self.noise_dim}, got {got}"
            )
        if valid is not None:
            real = valid.expand(per_token)
            real = real if noise_level.shape == per_token else real.any(-1)
            noise_level = noise_level.masked_fill(~real, 0)
        if can_read_cheaply(noise_level):
            wrong = ~((noise_level >= 0) & (noise_level < float("inf")))
            if wrong.any():
                raise ValueError(
                    "noise_level must contain finite numbers >= 0 where tokens are real, got "
                    f"{noise_level[wrong][0].item()}"
                )
        condition: Tensor = self.noise(noise_level)
        return condition

    def _check_steps(self) -> None:
        if self.noise_dim is not None:
            raise ValueError(
                f"a model with noise_dim={self.noise_dim} cannot generate token by token, because "
                "its noise level applies to whole sequences: call the model itself, with "
                "noise_level="
            )
        super()._check_steps()


def _set_to_zero(layer: nn.Linear | None) -> None:
    if layer is not None:
        for parameter in layer.parameters():
            nn.init.zeros_(parameter)
