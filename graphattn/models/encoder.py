"""An encoder of token sequences, with a mixer per layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from graphattn.graphs import TokenGraph, complete_graph, window_path_graph
from graphattn.graphs.arguments import as_int
from graphattn.models.mixers import Mixer, Reach, mixers, one_per_block
from graphattn.models.stack import Graphs
from graphattn.models.token_model import TokenModel
from graphattn.nn import PreNormBlock

CONSENSUS = ("rank", "edge_hidden", "step_size", "edge_features")  # options of the model itself


class SequenceEncoder(TokenModel):
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
        mixer_options: further options of the named layers, such as ``{"top_k": 8}``: every layer
            takes those that it has, and one that no layer has is refused. A list holds one value
            per block, as :func:`top_k_schedule` makes it.

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
    ) -> None:
        super().__init__()
        self.vocab_size = as_int("vocab_size", vocab_size, 1)
        self.window = as_int("window", window, 1)
        if not (isinstance(rope, bool) or rope == "isometric"):
            raise ValueError(f"rope must be True, False or 'isometric', got {rope!r}")
        depth = as_int("depth", depth, 1)
        options = dict(mixer_options or {})
        if own := [name for name in CONSENSUS if name in options]:
            raise ValueError(
                f"mixer_options must not hold {own[0]!r}, which is an argument of the model itself"
            )
        if "consensus" in one_per_block(mixer, depth):
            options.update(
                rank=rank,
                edge_hidden=edge_hidden,
                step_size=step_size,
                edge_features=edge_features,
            )
        mixings = mixers(mixer, depth, dim, heads, rope=rope, options=options)
        self.embedding = nn.Embedding(self.vocab_size, as_int("dim", dim, 1))
        self.blocks = nn.ModuleList()
        self.reaches: list[Reach] = []
        for layer, reach in mixings:
            self.blocks.append(PreNormBlock(layer, mlp_ratio=mlp_ratio, dropout=dropout))
            self.reaches.append(reach)
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
        windowed = window_path_graph(num_tokens, self.window, self_loops=True).to(device)
        of_reach = {"all": everything, "window": windowed, "near": near}
        return [of_reach[reach] for reach in self.reaches]

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
        """Logits over the vocabulary for every token, [*, N, vocab_size]."""
        of_edges = {"edge_bias": edge_bias, "edge_features": edge_features}
        given: dict[str, Any] = {name: x for name, x in of_edges.items() if x is not None}
        return self.head(self.encode(tokens, graph, valid=valid, positions=positions, **given))
