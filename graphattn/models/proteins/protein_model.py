"""A model of proteins: residues are tokens, with edges along the chain and in space."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from graphattn.data import ProteinTokenizer
from graphattn.graphs import TokenGraph
from graphattn.graphs.arguments import as_choice, as_int
from graphattn.models.mixers import Mixer, check_rope, mixers, one_per_block
from graphattn.models.proteins.calls import ProteinCalls
from graphattn.models.proteins.context_steps import ContextSteps, TrackEmbeddings, checked_context
from graphattn.models.proteins.residue_edges import ResidueEdges
from graphattn.models.proteins.source_tracks import LETTERS, SourceTracks, checked_tracks
from graphattn.models.stack import OF_EDGES, Graphs
from graphattn.nn import EdgeProjection, PreNormBlock, SelfConsensus

OWN_OPTIONS = ("edge_features",)  # options of the layers that the model itself sets


class ProteinModel(ProteinCalls):
    r"""A protein model: residues in, logits per residue out, with structure and further tracks.

    The tokens are the letters of :class:`graphattn.data.ProteinTokenizer` and, after them, a mask
    token (`mask_token`) for masked residues. Logits are only for the letters. The model has an
    embedding, pre-norm blocks with one mixer each, a norm and a linear head.

    **Structure.** If a call has a :class:`graphattn.data.Structure`, whose residues are the tokens,
    all blocks use one graph: a residue sees its nearest residues in any chain (`neighbors` of them,
    by the distance of C-alpha atoms), and the residues of its own chain up to `window` positions
    away. Each edge has features (the distance, the offset along the chain, and whether both
    residues are in one chain: see :meth:`graphattn.data.Structure.edge_features`). In attention
    layers, a linear map per block turns them into a bias of the logits; in consensus layers, the
    edge networks read them. Neither changes if the structure is translated or rotated. Without a
    structure, attention sees all residues of the call, and consensus (and attention in a window)
    sees those up to `window` positions away; the distance features are then 0.

    **Source tracks.** `tracks` are further tokens per residue that the model reads and guesses as
    it does the letters, such as the codes of a :class:`graphattn.data.StructureTokenizer`. Their
    embeddings are added to those of the letters, and each track has a head. A track's mask token is
    the number after its last code; a track that a call does not give is masked everywhere.

    **Context.** `context` contains further inputs per residue (such as secondary structure or
    solvent accessibility) and other chains. In every n-th block, before the mixer, the tokens see
    each track: by cross-consensus if the model has consensus layers, by cross-attention if it has
    none (Appendix E.1 of the consensus paper). A residue sees the rows of a track around its own
    position, and all residues of another chain.

    Args:
        dim: width.
        depth: number of blocks.
        heads: heads per layer, divides `dim`.
        mixer: a name, or one entry per block: a name, or a layer of width `dim`.
        mixer_options: further options of the named layers, such as ``{"edge_hidden": 64}``. Every
            layer takes the options that it has; an option that no layer has is an error. A list
            contains one value per block. Cross layers of the same kind also take those options,
            except lists.
        window: how many positions a residue sees along its chain, on each side; 0 for only the
            `neighbors`.
        neighbors: how many nearest residues a residue sees in space; 0 for only the `window`.
        structure: whether the model reads structures. If False, it has no edge features.
        num_distances: number of radial basis functions of a distance.
        max_distance: centre of the last of these functions, in Angstrom.
        max_offset: the largest offset with its own feature, in residues; larger offsets share it.
        context: names of tracks and their widths: an integer for features of the residues (or for
            that many classes), "sequence" for the residues of another chain.
        context_every: tokens see the tracks in block 0 and in every `context_every`-th block after
            it.
        context_window: how many rows of a track a residue sees on each side of its own.
        context_mixer: "auto", "consensus" or "attention".
        tracks: names of source tracks beside the letters, and the number of codes of each, such as
            ``{"structure": 512}``.
        rope: whether all layers use rotary positions; with "isometric", consensus layers keep their
            guarantees (attention layers then use the usual rotation).
        mlp_ratio: hidden width of the perceptrons, in units of `dim`.
        dropout: share of the features that training sets to zero after every layer and perceptron.
        drop_path: share of the sequences for which training leaves out a part of a block.

    Shapes:
        - **tokens**: integers [*, N], from 0 to 21
        - **graph**: one TokenGraph for all blocks, or one per block (a sequence of `depth`),
          instead of the graphs above; for packed proteins use :func:`~graphattn.batch`. With parts
          of one rank (:func:`graphattn.distributed.shard`), all arguments and the output are of its
          tokens, except for the structure, which is that of all ranks
        - **structure**: a Structure of N residues, the same for every sequence; or a list, packed
          in tokens [N], or one per row of tokens [B, N], padded at the end (keyword)
        - **valid**: bool [N] or [*, N], True where a token is real (keyword)
        - **positions**: [N] or [*, N]; those of the structure or the graph if None (keyword)
        - **edge_features**: [E, F] or [*, E, F] for the given `graph`, instead of the features of
          the structure; or one entry per block (keyword)
        - **context**: dict of tracks. Features are [*, N, width], or integers [*, N] that are
          classes; another chain is integers [*, M]. Integers below 0 and rows with NaN or infinity
          are unknown. A pair (track, graph) gives the graph from residues to rows of the track
          (keyword)
        - **tracks**: dict of codes of source tracks, integers [*, N], or [N] for every sequence;
          integers below 0 are unknown, and read as the mask token (keyword)
        - **output**: [*, N, 21]; with source tracks, a dict of logits: "sequence" [*, N, 21], and
          [*, N, codes] for every track by its name

    Raises:
        ValueError: if an argument is not allowed; the message names it and says what is allowed.

    Source:
        Stabilizing Transformer Training Through Consensus, Section 5.1 and Appendix E.1, for source
        tracks, context and cross-consensus; ProteinMPNN (Dauparas et al., 2022) for the features of
        edges; ESM-1v (Meier et al., 2021) for scores of mutations.

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
        >>> both = ga.models.ProteinModel(32, depth=2, heads=4, tracks={"structure": 512})
        >>> codes = torch.tensor([7, 500, -1, 3])  # the third is unknown
        >>> logits = both(torch.tensor([5, 18, 8, 0]), tracks={"structure": codes})
        >>> {name: tuple(of_track.shape) for name, of_track in logits.items()}
        {'sequence': (4, 21), 'structure': (4, 512)}
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
        tracks: Mapping[str, int] | None = None,
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
                "window must be >= 1 if residues see no neighbors in space (neighbors=0 or "
                f"structure=False), got {window}"
            )
        if not isinstance(structure, bool):
            raise ValueError(f"structure must be True or False, got {structure!r}")
        check_rope(rope)
        self.structure = structure
        self.edges = ResidueEdges(num_distances, max_distance, max_offset)
        options = dict(mixer_options or {})
        if taken := [name for name in OWN_OPTIONS if name in options]:
            raise ValueError(
                f"mixer_options must not contain {taken[0]!r}, which the model sets itself"
            )
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
        self.edge_maps = nn.ModuleDict()  # for blocks that take biases; the keys are block numbers
        if structure:
            self._make_edge_maps(heads)
        self._make_context(
            context, context_every, context_mixer, dim, heads, rope, options, dropout
        )
        self.context_window = as_int("context_window", context_window, 1)
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, self.tokenizer.vocab_size)
        self.source_tracks = checked_tracks(tracks)
        self.sources = SourceTracks(self.source_tracks, dim)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def _make_edge_maps(self, heads: int) -> None:
        takes_bias, _ = OF_EDGES["edge_bias"]
        for place, block in enumerate(self.blocks):
            layer: Any = block.mixer
            if takes_bias(layer):
                # No bias: a number added to all logits of a row does not change the softmax.
                self.edge_maps[str(place)] = EdgeProjection(
                    self.edges.width, getattr(layer, "heads", heads), bias=False
                )
            elif (width := getattr(layer, "edge_features", 0)) not in (0, self.edges.width):
                raise ValueError(
                    "mixer must contain consensus layers made with "
                    f"edge_features={self.edges.width} (the number of edge features of the model) "
                    f"or 0, got {width} in block {place}"
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
        self.context_steps = nn.ModuleDict()  # the keys are the numbers of the blocks that follow
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
        """Initialise every parameter again."""
        nn.init.normal_(self.embedding.weight, std=0.02)
        parts = [*self.blocks, *self.edge_maps.values(), *self.context_steps.values()]
        for part in (*parts, self.tracks, self.norm, self.head, self.sources):
            part.reset_parameters()

    def graphs(self, num_tokens: int | None = None, *, structure: Any = None) -> list[TokenGraph]:
        """Return the graphs, one per block, that `forward` uses if no graph is given.

        Args:
            num_tokens: N, for a sequence without a structure.
            structure: a Structure, or a list of packed ones.

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
            raise ValueError(
                "graphs must get either num_tokens or structure=, got "
                f"{'neither' if structure is None else 'both'}"
            )
        if structure is not None:
            return self._graphs_in_space(self._lay_out(structure, None))
        N = as_int("num_tokens", num_tokens, 0)
        if not self.window and set(self.reaches) != {"all"}:
            raise ValueError(
                "structure must be given to a model with window=0, got None: some of its layers "
                "see only neighbors in space"
            )
        return self._graphs_of_reaches(N)

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
        tracks: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """Return the features before the head, [*, N, dim]."""
        call = self._call(
            tokens, graph, structure, valid, positions, edge_features, context, tracks
        )
        x = self.sources.add_to(self.embedding(call.tokens), call.codes)
        for place, (block, block_graph) in enumerate(zip(self.blocks, call.graphs, strict=True)):
            if call.context and str(place) in self.context_steps:
                steps: Any = self.context_steps[str(place)]
                x = steps(x, call.context)
            of_edges = self._of_edges(place, block_graph, call)
            x = self.run_block(block, x, block_graph, **call.given, **of_edges)
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
        tracks: Mapping[str, Tensor] | None = None,
    ) -> Tensor | dict[str, Tensor]:
        """Return logits over the letters for every residue, [*, N, 21]; or a dict of all tracks."""
        features = self._features_of(
            tokens,
            graph,
            structure=structure,
            valid=valid,
            positions=positions,
            edge_features=edge_features,
            context=context,
            tracks=tracks,
        )
        logits = self._apply_head(features)
        return {LETTERS: logits, **self.sources.logits(features)} if self.source_tracks else logits
