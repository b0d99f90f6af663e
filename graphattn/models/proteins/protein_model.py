"""A model of proteins: residues as tokens, along the chain and in space."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from graphattn.data import ProteinTokenizer
from graphattn.graphs import TokenGraph, complete_graph, window_path_graph
from graphattn.graphs.arguments import as_choice, as_int
from graphattn.models.mixers import Mixer, mixers, one_per_block
from graphattn.models.proteins.calls import ProteinCalls
from graphattn.models.proteins.context_steps import ContextSteps, TrackEmbeddings, checked_context
from graphattn.models.proteins.residue_edges import ResidueEdges
from graphattn.models.stack import OF_EDGES, Graphs
from graphattn.nn import EdgeProjection, PreNormBlock, SelfConsensus

OWN_OPTIONS = ("edge_features",)  # of the layers, which the model itself decides


class ProteinModel(ProteinCalls):
    r"""Residues in, logits per residue out: along the chain, in space, beside other tracks.

    The tokens are the letters of :class:`graphattn.data.ProteinTokenizer` and, after them, the mask
    token (`mask_token`), which a masked residue is read as. Logits are of the letters alone. There
    are pre-norm blocks, one mixer each, between an embedding and a norm with a linear head.

    **Structure.** With a :class:`graphattn.data.Structure`, whose residues the tokens are, every
    block works on one graph: a residue sees the `neighbors` whose C-alpha atoms are nearest, of
    whatever chain, and the residues of its chain up to `window` places away. What is known of an
    edge (the distance, the offset along the chain, whether there is one: see
    :meth:`graphattn.data.Structure.edge_features`) is a bias of the logits in attention layers, by
    a linear map per block, and an input of the edge networks in consensus layers. All of it stays
    as it is when the structure is moved or turned. Without a structure, attention sees all residues
    of the call, and consensus (and attention in a window) those up to `window` places away; the
    features of distances are then 0.

    **Tracks.** What else is known of the residues (secondary structure, solvent accessibility), and
    other chains, comes as `context`: in every n-th block the tokens take a step towards each track
    before they look at each other, by cross-consensus where the model has consensus layers and by
    cross-attention where it has none (Appendix E.1 of the consensus paper). A residue looks at the
    rows of a track around its own place, and at all of another chain.

    Args:
        dim: width.
        depth: number of blocks.
        heads: heads per layer, divides `dim`.
        mixer: a name, or one entry per block: a name, or a layer of width `dim`.
        mixer_options: further options of the named layers, such as ``{"edge_hidden": 64}``: every
            layer takes those that it has, and one that no layer has is refused. A list holds one
            value per block. Cross layers have those of their kind that are not such lists.
        window: how far a residue sees along its chain, on each side; 0 for neighbours alone.
        neighbors: how many residues it sees in space; 0 for the window alone.
        structure: whether the model reads structures. One that does not has no features of edges.
        num_distances: radial basis functions of a distance.
        max_distance: the distance from which on they are alike, in Angstrom.
        max_offset: the offset from which on they are alike, in residues.
        context: names of tracks and their widths: an integer for features of the residues (or for
            that many classes), "sequence" for the residues of another chain.
        context_every: tracks are looked at in block 0 and in every so many blocks after it.
        context_window: how many rows on each side of its own a residue sees of a track.
        context_mixer: "auto", "consensus" or "attention".
        rope: rotary positions in all layers; "isometric" where consensus layers should keep their
            guarantees (attention layers then use the usual rotation).
        mlp_ratio: hidden width of the perceptrons, in units of `dim`.
        dropout: share of features zeroed after every layer and perceptron, in training.
        drop_path: share of sequences for which a part is left out, in training.

    Shapes:
        - **tokens**: integers [*, N], from 0 to 21
        - **graph**: one TokenGraph for all blocks, or one per block (a sequence of `depth`), in
          place of those above; packed proteins come as a :func:`~graphattn.batch`
        - **structure**: a Structure of N residues, the same for every sequence; or a list, whose
          residues stand one after the other in tokens [N], or are the rows of tokens [B, N], padded
          at the end (keyword)
        - **valid**: bool [N] or [*, N], True where a token is real (keyword)
        - **positions**: [N] or [*, N]; those of the structure or the graph if None (keyword)
        - **edge_features**: [E, F] or [*, E, F] in place of what the structure says, for the given
          `graph`, or one entry per block (keyword)
        - **context**: dict of tracks. Features are [*, N, width], or integers [*, N] that are
          classes; another chain is integers [*, M]. Integers below 0 and rows that are not finite
          are not known. A pair (track, graph) says by a graph who sees which row (keyword)
        - **output**: [*, N, 21]

    Raises:
        ValueError: names the argument, its value and what is allowed.

    Source:
        Stabilizing Transformer Training Through Consensus, Section 5.1 and Appendix E.1, for tracks
        and cross-consensus; ProteinMPNN (Dauparas et al., 2022) for the features of edges; ESM-1v
        (Meier et al., 2021) for scores of mutations.

    Example:
        >>> import torch, graphattn as ga
        >>> model = ga.models.ProteinModel(
        ...     32, depth=2, heads=4, mixer="mix", mixer_options={"edge_hidden": 16})
        >>> model.embed("MKVLAGHW").shape
        torch.Size([8, 32])
        >>> places = 3.8 * torch.eye(4)[:, :3]
        >>> structure = ga.data.Structure("GWKA", places)
        >>> model.logits(structure).shape
        torch.Size([4, 21])
        >>> model.score_mutations(structure, ["W2F", "G1A:K3R"]).shape
        torch.Size([2])
    """

    options_of_parts: ClassVar = frozenset({"heads", "mixer_options", "rope"})

    def __init__(
        self,
        dim: int,
        depth: int,
        heads: int,
        *,
        mixer: Mixer = "dot",
        mixer_options: Mapping[str, Any] | None = None,
        window: int = 4,
        neighbors: int = 16,
        structure: bool = True,
        num_distances: int = 16,
        max_distance: float = 20.0,
        max_offset: int = 32,
        context: Mapping[str, int | Literal["sequence"]] | None = None,
        context_every: int = 2,
        context_window: int = 2,
        context_mixer: Literal["auto", "consensus", "attention"] = "auto",
        rope: bool | Literal["isometric"] = True,
        mlp_ratio: float = 4.0,
        dropout: float = 0.0,
        drop_path: float = 0.0,
    ) -> None:
        super().__init__()
        depth = as_int("depth", depth, 1)
        self.tokenizer = ProteinTokenizer()
        self.mask_token = self.tokenizer.vocab_size
        self.vocab_size = self.mask_token + 1
        self.window, self.neighbors = as_int("window", window, 0), as_int("neighbors", neighbors, 0)
        if not self.window and (not self.neighbors or not structure):
            raise ValueError(
                f"window must be >= 1 where a residue sees no neighbors in space, got {window}"
            )
        if not isinstance(structure, bool):
            raise ValueError(f"structure must be True or False, got {structure!r}")
        if not (isinstance(rope, bool) or rope == "isometric"):
            raise ValueError(f"rope must be True, False or 'isometric', got {rope!r}")
        self.structure = structure
        self.edges = ResidueEdges(num_distances, max_distance, max_offset)
        options = dict(mixer_options or {})
        if own := [name for name in OWN_OPTIONS if name in options]:
            raise ValueError(f"mixer_options must not hold {own[0]!r}, which the model decides")
        entries = one_per_block(mixer, depth)
        of_layers = dict(options)
        if structure and "consensus" in entries:
            of_layers["edge_features"] = self.edges.width
        layers = mixers(mixer, depth, dim, heads, rope=rope, options=of_layers)
        self.embedding = nn.Embedding(self.vocab_size, as_int("dim", dim, 1))
        self.blocks = nn.ModuleList()
        self.reaches = []
        for layer, reach in layers:
            self.blocks.append(
                PreNormBlock(layer, mlp_ratio=mlp_ratio, dropout=dropout, drop_path=drop_path)
            )
            self.reaches.append(reach)
        self.edge_maps = nn.ModuleDict()  # of the blocks that take biases, by their number
        if structure:
            self._make_edge_maps(heads)
        self._make_context(
            context, context_every, context_mixer, dim, heads, rope, options, dropout
        )
        self.context_window = as_int("context_window", context_window, 1)
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, self.tokenizer.vocab_size)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def _make_edge_maps(self, heads: int) -> None:
        takes_bias, _ = OF_EDGES["edge_bias"]
        for place, block in enumerate(self.blocks):
            layer: Any = block.mixer
            if takes_bias(layer):
                # A number added to all logits of a row would change no softmax: no bias.
                self.edge_maps[str(place)] = EdgeProjection(
                    self.edges.width, getattr(layer, "heads", heads), bias=False
                )
            elif (width := getattr(layer, "edge_features", 0)) not in (0, self.edges.width):
                raise ValueError(
                    f"mixer must hold consensus layers with edge_features={self.edges.width} (what "
                    f"the model knows of an edge) or 0, got {width} in block {place}"
                )

    def _make_context(
        self,
        context: Any,
        every: int,
        mechanism: str,
        dim: int,
        heads: int,
        rope: Any,
        options: dict[str, Any],
        dropout: float,
    ) -> None:
        self.context = checked_context(context)
        self.context_every = as_int("context_every", every, 1)
        as_choice("context_mixer", mechanism, ("auto", "consensus", "attention"))
        if mechanism == "auto":
            consensus = any(isinstance(block.mixer, SelfConsensus) for block in self.blocks)
            mechanism = "consensus" if consensus else "attention"
        self.tracks = TrackEmbeddings(self.context, dim)
        self.context_steps = nn.ModuleDict()  # by the number of the block they come before
        if not self.context:
            return
        for place in range(0, len(self.blocks), self.context_every):
            self.context_steps[str(place)] = ContextSteps(
                tuple(self.context),
                dim,
                heads,
                mechanism=mechanism,
                rope=rope,
                options={k: v for k, v in options.items() if not isinstance(v, list | tuple)},
                dropout=dropout,
            )

    def reset_parameters(self) -> None:
        """Draw every parameter anew."""
        nn.init.normal_(self.embedding.weight, std=0.02)
        parts = [*self.blocks, *self.edge_maps.values(), *self.context_steps.values()]
        for part in (*parts, self.tracks, self.norm, self.head):
            part.reset_parameters()

    def graphs(self, num_tokens: int | None = None, *, structure: Any = None) -> list[TokenGraph]:
        """The graph of every block where `forward` is given none.

        Args:
            num_tokens: N, of a sequence without a structure.
            structure: a Structure, or a list of them one after the other.

        Example:
            >>> import torch, graphattn as ga
            >>> model = ga.models.ProteinModel(8, depth=2, heads=2, mixer="mix", neighbors=2)
            >>> model.graphs(100)
            [TokenGraph(num_tokens=100, num_edges=10000, structure=Complete),
             TokenGraph(num_tokens=100, num_edges=780, structure=Band)]
            >>> structure = ga.data.Structure("GWKA", 3.8 * torch.eye(4)[:, :3])
            >>> [graph.num_edges for graph in model.graphs(structure=structure)]
            [16, 12]
        """
        if (structure is None) == (num_tokens is None):
            raise ValueError("graphs takes num_tokens or structure=, and not both")
        if structure is not None:
            return self._graphs_in_space(self._laid_out(structure, None))
        N = as_int("num_tokens", num_tokens, 0)
        if not self.window and set(self.reaches) != {"all"}:
            raise ValueError(
                "structure must be given to a model with window=0, whose layers see nothing else"
            )
        device = self.embedding.weight.device
        of_reach = {
            "all": lambda: complete_graph(N),
            "window": lambda: window_path_graph(N, self.window, self_loops=True),
            "near": lambda: window_path_graph(N, self.window),
        }
        made = {reach: of_reach[reach]().to(device) for reach in dict.fromkeys(self.reaches)}
        return [made[reach] for reach in self.reaches]

    def encode(
        self,
        tokens: Tensor,
        graph: Graphs = None,
        *,
        structure: Any = None,
        valid: Tensor | None = None,
        positions: Tensor | None = None,
        edge_features: Tensor | Sequence[Tensor | None] | None = None,
        context: Mapping[str, Any] | None = None,
    ) -> Tensor:
        """The features before the head, [*, N, dim]."""
        call = self._call(tokens, graph, structure, valid, positions, edge_features, context)
        x = self.embedding(call.tokens)
        for place, (block, own) in enumerate(zip(self.blocks, call.graphs, strict=True)):
            if call.tracks and str(place) in self.context_steps:
                steps: Any = self.context_steps[str(place)]
                x = steps(x, call.tracks)
            of_edges = self._of_edges(place, own, call)
            x = self.run_block(block, x, own, **call.given, **of_edges)
        return self.norm(x).unflatten(-2, call.rows) if call.rows else self.norm(x)

    def forward(
        self,
        tokens: Tensor,
        graph: Graphs = None,
        *,
        structure: Any = None,
        valid: Tensor | None = None,
        positions: Tensor | None = None,
        edge_features: Tensor | Sequence[Tensor | None] | None = None,
        context: Mapping[str, Any] | None = None,
    ) -> Tensor:
        """Logits over the letters for every residue, [*, N, 21]."""
        given = {"edge_features": edge_features, "context": context, "structure": structure}
        given = {name: value for name, value in given.items() if value is not None}
        return self.head(self.encode(tokens, graph, valid=valid, positions=positions, **given))
