"""Structure: residues of protein chains with their coordinates, and graphs of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from graphattn.data.structures.edges import (
    distance_features,
    offset_features,
    places_along_chains,
    window_graph_of_chains,
)
from graphattn.data.structures.tracks import secondary_structure, solvent_accessibility
from graphattn.graphs.arguments import as_float, as_int
from graphattn.graphs.builders.neighbors import knn_graph, radius_graph
from graphattn.graphs.token_graph import TokenGraph

_LETTERS = "ARNDCQEGHILKMFPSTWYV"
_NAMES = "ALA ARG ASN ASP CYS GLN GLU GLY HIS ILE LEU LYS MET PHE PRO SER THR TRP TYR VAL"
THREE_LETTERS = dict(zip(_LETTERS, _NAMES.split(), strict=True))

_DEFAULT: Any = None  # the value of a field that is computed from the others


@dataclass(frozen=True, eq=False, repr=False)
class Structure:
    """Residues of one or several protein chains; a residue is a token, located at its C-alpha atom.

    :func:`read_structure` reads one from a file. The constructor, for example for a prediction,
    needs only the letters and the coordinates. The default is one chain A, numbered from 1.

    Attributes:
        sequence: N letters, one per residue, chain after chain; ``X`` for a residue without one.
        ca_positions: FloatTensor [N, 3], coordinates of the C-alpha atoms in Angstrom; NaN if the
            atom is missing.
        chain_index: LongTensor [N], the chain of every residue, as an index into `chain_ids`.
        chain_ids: the C names of the chains; a second copy of A in an assembly is ``"A-2"``.
        residue_numbers: LongTensor [N], the authors' numbers, which may be negative, have gaps, or
            repeat.
        insertion_codes: N strings that distinguish residues with the same number (52, 52A); mostly
            ``""``.
        residue_names: N names of the Chemical Component Dictionary, such as ``"MSE"``.
        b_factors: FloatTensor [N], B factors of the C-alpha atoms (pLDDT in many predictions); NaN
            if the file has none.
        atoms: coordinates of the requested atoms by name, FloatTensors [N, 3]; NaN if a residue has
            no such atom. ``"CA"`` is always there, and is `ca_positions`.
        has_all_atoms: whether `atoms` has all atoms except hydrogen.

    Raises:
        ValueError: if the shapes, dtypes or devices of the arguments do not fit.

    Example:
        >>> import torch, graphattn as ga
        >>> places = 3.8 * torch.arange(5.0)[:, None] * torch.tensor([1.0, 0.0, 0.0])
        >>> pair = ga.data.Structure(
        ...     "GWKAC",
        ...     places,
        ...     chain_index=torch.tensor([0, 0, 0, 1, 1]),
        ...     chain_ids=("A", "B"),
        ...     residue_numbers=torch.tensor([1, 2, 5, 1, 2]),
        ... )
        >>> pair
        Structure(num_residues=5, chains={'A': 3, 'B': 2})
        >>> pair.gaps  # 3 and 4 are missing before the third residue
        tensor([False, False,  True, False, False])
        >>> pair.window_graph(2).edge_index  # 2 and 5 are three places apart
        tensor([[1, 0, 4, 3],
                [0, 1, 3, 4]])
        >>> graph = pair.radius_graph(4.0)
        >>> graph.edge_index[:, graph.edge_index[1] == 3]  # in space the chains touch
        tensor([[2, 4],
                [3, 3]])
        >>> pair.select(chains="B").sequence
        'AC'
    """

    sequence: str
    ca_positions: Tensor
    chain_index: Tensor = _DEFAULT
    chain_ids: tuple[str, ...] = ("A",)
    residue_numbers: Tensor = _DEFAULT
    insertion_codes: tuple[str, ...] = _DEFAULT
    residue_names: tuple[str, ...] = _DEFAULT
    b_factors: Tensor = _DEFAULT
    atoms: Mapping[str, Tensor] = field(default_factory=dict)
    has_all_atoms: bool = False

    def __post_init__(self) -> None:
        N, places = len(self.sequence), self.ca_positions
        if not isinstance(places, Tensor) or not places.is_floating_point():
            got = places.dtype if isinstance(places, Tensor) else type(places).__name__
            raise ValueError(f"ca_positions must be a floating-point tensor [{N}, 3], got {got}")
        device = places.device
        defaults: dict[str, Any] = {
            "chain_index": torch.zeros(N, dtype=torch.int64, device=device),
            "residue_numbers": torch.arange(1, N + 1, device=device),
            "insertion_codes": ("",) * N,
            "residue_names": tuple(THREE_LETTERS.get(letter, "UNK") for letter in self.sequence),
            "b_factors": torch.full((N,), torch.nan, device=device),
        }
        for name, default in defaults.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)
        for name in ("chain_ids", "insertion_codes", "residue_names"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        object.__setattr__(self, "atoms", {"CA": places} | dict(self.atoms) | {"CA": places})
        self._check_shapes()
        self._check_chains()

    def _check_shapes(self) -> None:
        N, device = len(self.sequence), self.ca_positions.device
        tensors: dict[str, tuple[Tensor, tuple[int, ...]]]
        tensors = {"ca_positions": (self.ca_positions, (N, 3))}
        tensors |= {f"atoms[{name!r}]": (value, (N, 3)) for name, value in self.atoms.items()}
        for name in ("chain_index", "residue_numbers", "b_factors"):
            tensors[name] = (getattr(self, name), (N,))
        for name, (value, shape) in tensors.items():
            got = type(value).__name__
            if isinstance(value, Tensor):
                got = f"{list(value.shape)} on {value.device}"
            if not isinstance(value, Tensor) or value.shape != shape or value.device != device:
                raise ValueError(
                    f"{name} must be a tensor of shape {list(shape)} on {device}, because sequence "
                    f"has {N} letters and ca_positions is on this device, got {got}"
                )
        for name in ("chain_index", "residue_numbers"):
            if getattr(self, name).dtype != torch.int64:
                raise ValueError(
                    f"{name} must have dtype torch.int64, got {getattr(self, name).dtype}"
                )
        for name in ("insertion_codes", "residue_names"):
            if len(getattr(self, name)) != N:
                raise ValueError(
                    f"{name} must have {N} strings, one per letter of sequence, got "
                    f"{len(getattr(self, name))}"
                )

    def _check_chains(self) -> None:
        C, index = len(self.chain_ids), self.chain_index
        if len(set(self.chain_ids)) != C:
            raise ValueError(f"chain_ids must have every name once, got {self.chain_ids!r}")
        if index.is_meta:  # A meta tensor has no values to check.
            return
        if len(index) and (int(index.min()) < 0 or int(index.max()) >= C):
            raise ValueError(
                f"chain_index must be in 0..{C - 1}, because there are {C} chain_ids, got "
                f"{int(index.min())}..{int(index.max())}"
            )
        for at in (index.diff() < 0).nonzero()[:, 0].tolist():
            raise ValueError(
                "chain_index must be in ascending order, because residues are ordered by chain, "
                f"got {int(index[at + 1])} after {int(index[at])}"
            )

    # Facts.

    def __len__(self) -> int:
        """N, the number of residues."""
        return len(self.sequence)

    @property
    def num_residues(self) -> int:
        """N, the number of residues, as ``len(structure)``."""
        return len(self)

    def __repr__(self) -> str:
        sizes = self.chain_index.bincount(minlength=len(self.chain_ids)).tolist()
        chains = dict(zip(self.chain_ids, sizes, strict=True))
        return f"Structure(num_residues={len(self)}, chains={chains})"

    @property
    def has_ca(self) -> Tensor:
        """BoolTensor [N]: whether a residue has coordinates of its C-alpha atom."""
        return self.has_atom("CA")

    def has_atom(self, name: str) -> Tensor:
        """Return a BoolTensor [N] that says which residues have an atom of this name.

        Raises:
            ValueError: if `name` is not in `atoms`, because it was not read.
        """
        if name not in self.atoms:
            raise ValueError(
                f"name must be one of the atoms that were read ({', '.join(self.atoms)}), got "
                f"{name!r}: read_structure(..., atoms=[{name!r}]) reads it"
            )
        return self.atoms[name].isfinite().all(dim=1)

    @cached_property
    def positions(self) -> Tensor:
        """LongTensor [N], increasing positions along the chains, for rotary embeddings.

        The first position is 0. From one residue to the next in a chain, the position increases as
        much as the residue number, so missing residues count. It increases by 1 if only the
        insertion code changes, or if numbering restarts. It increases by more than the number if
        the C-alpha atoms are too far apart for the number, because n steps reach at most
        3.8 n + 0.7 Angstrom. From one chain to the next, it increases by 512, and also if numbering
        restarts at a residue that is too far from the one before to be joined to it.
        """
        return places_along_chains(
            self.chain_index, self.residue_numbers, self.insertion_codes, self.ca_positions
        )

    @property
    def gaps(self) -> Tensor:
        """BoolTensor [N]: whether residues are missing between this residue and the one before.

        It is False for the first residue of a chain. It follows from numbers and distances, and
        ``positions.diff() - 1`` is the number of missing residues.
        """
        if len(self) == 0:
            return torch.zeros_like(self.chain_index, dtype=torch.bool)
        missing = (self.positions.diff() > 1) & (self.chain_index.diff() == 0)
        return torch.cat([missing.new_zeros(1), missing])

    # Parts.

    def select(self, *, chains: str | Iterable[str]) -> Structure:
        """Return some of the chains, in the order of their names in `chains`.

        Args:
            chains: ``"all"``, the name of one chain, or a list of names.

        Raises:
            ValueError: if a name is not the name of a chain, or occurs twice.
        """
        if isinstance(chains, str) and chains == "all":
            return self
        is_list = isinstance(chains, Iterable) and not isinstance(chains, str)
        names: tuple[Any, ...] = tuple(chains) if is_list else (chains,)
        if not names or len(set(names)) != len(names):
            raise ValueError(
                f"chains must be 'all', one name, or a list of different names, got {chains!r}"
            )
        for name in names:
            if name not in self.chain_ids:
                existing = ", ".join(map(repr, self.chain_ids))
                raise ValueError(
                    f"chains must be names of protein chains, which are {existing}, got {name!r}"
                )
        index = self.chain_index
        selected = [(index == self.chain_ids.index(name)).nonzero()[:, 0] for name in names]
        new_index = torch.cat([torch.full_like(rows, new) for new, rows in enumerate(selected)])
        return residues_of(self, torch.cat(selected), new_index, names)

    def split(self) -> list[Structure]:
        """Return a list with one structure per chain.

        Example:
            >>> import torch, graphattn as ga
            >>> index = torch.tensor([0, 0, 1])
            >>> pair = ga.data.Structure("GWK", torch.eye(3), index, ("A", "B"))
            >>> [chain.sequence for chain in pair.split()]
            ['GW', 'K']
        """
        return [self.select(chains=[name]) for name in self.chain_ids]

    def to(self, device: torch.device | str) -> Structure:
        """Return this structure on another device."""
        names = ("chain_index", "residue_numbers", "b_factors", "ca_positions")
        changed: dict[str, Any] = {name: getattr(self, name).to(device) for name in names}
        changed["atoms"] = {name: value.to(device) for name, value in self.atoms.items()}
        return replace(self, **changed)

    # Graphs.

    def window_graph(self, window: int, *, self_loops: bool = False) -> TokenGraph:
        """Every residue sees the residues of its chain that are at most `window` positions away.

        The window counts :attr:`positions`, so missing residues count as if they were there. No
        window reaches into another chain.

        Args:
            window: positions on each side, >= 0.
            self_loops: whether a residue sees itself.

        Raises:
            ValueError: if `window` is negative or not an integer.
        """
        window = as_int("window", window, 0)
        return window_graph_of_chains(self.positions, self.chain_index, window, bool(self_loops))

    def neighbor_graph(self, k: int = 16, *, self_loops: bool = False) -> TokenGraph:
        """Every residue sees the `k` residues of all chains whose C-alpha atoms are nearest.

        If there are fewer than `k` others, it sees all of them. A residue without coordinates has
        no edges.

        Args:
            k: neighbours per residue, >= 1.
            self_loops: whether a residue is its own first neighbour.

        Raises:
            ValueError: if `k` is less than 1.
        """
        # As one item of a batch, the residues may have fewer than k others.
        one = torch.zeros_like(self.chain_index)
        return knn_graph(self.ca_positions, k, self_loops=self_loops, batch=one)

    def radius_graph(
        self, radius: float, *, max_neighbors: int | None = None, self_loops: bool = False
    ) -> TokenGraph:
        """Every residue sees the residues of all chains whose C-alpha atoms are within `radius`.

        Args:
            radius: the largest distance, in Angstrom.
            max_neighbors: the largest number of neighbours, which are then the nearest; None for
                no limit.
            self_loops: whether a residue sees itself.

        Raises:
            ValueError: if an argument is outside its range.
        """
        return radius_graph(
            self.ca_positions, radius, max_neighbors=max_neighbors, self_loops=self_loops
        )

    def edge_features(
        self,
        graph: TokenGraph,
        *,
        num_distances: int = 16,
        max_distance: float = 20.0,
        max_offset: int = 32,
    ) -> Tensor:
        r"""Compute features of every edge that do not change if the structure is moved or rotated.

        The first columns are radial basis functions of the distance d of the C-alpha atoms,
        :math:`\exp(-(\min(d, r) - \mu_k)^2 / 2 \delta^2)`, with centres :math:`\mu_k` evenly
        spaced from 0 to r = `max_distance`, and their spacing :math:`\delta`. They are 0 if
        coordinates are missing. The next columns are a one-hot encoding of the offset from target
        to source in :attr:`positions`, clipped to `max_offset` on either side. The last column is
        1. For an edge between two chains, the offset columns and the last one are 0.

        Args:
            graph: a graph of these residues.
            num_distances: the number of radial basis functions, >= 1.
            max_distance: the largest distance that is distinguished, in Angstrom, > 0.
            max_offset: the largest offset that is distinguished, >= 0.

        Returns:
            FloatTensor [E, F] in the order of ``graph.edge_index``; F is
            :meth:`num_edge_features`.

        Raises:
            ValueError: if an argument is outside its range, or `graph` does not fit the structure.

        Source: ProteinMPNN (Dauparas et al., 2022, supplementary methods) has similar features, but
        distances of five atoms and another basis.

        Example:
            >>> import torch, graphattn as ga
            >>> structure = ga.data.Structure("GWKA", 3.8 * torch.eye(4)[:, :3])
            >>> graph = structure.neighbor_graph(k=2)
            >>> structure.edge_features(graph).shape, structure.num_edge_features()
            (torch.Size([8, 82]), 82)
        """
        sizes = _feature_sizes(num_distances, max_distance, max_offset)
        num_distances, max_distance, max_offset = sizes
        if not isinstance(graph, TokenGraph):
            raise ValueError(f"graph must be a TokenGraph, got {type(graph).__name__}")
        if graph.num_targets != len(self) or graph.num_sources != len(self):
            raise ValueError(
                f"graph must have the {len(self)} residues as targets and as sources, got "
                f"{graph.num_targets} targets and {graph.num_sources} sources"
            )
        if graph.device != self.ca_positions.device:
            raise ValueError(
                f"graph must be on the device of the structure, {self.ca_positions.device}, got "
                f"{graph.device}"
            )
        edges = graph.edge_index
        distances = distance_features(self.ca_positions, edges, num_distances, max_distance)
        offsets = offset_features(self.positions, self.chain_index, edges, max_offset)
        return torch.cat([distances, offsets.to(distances.dtype)], dim=1)

    @staticmethod
    def num_edge_features(
        num_distances: int = 16, max_distance: float = 20.0, max_offset: int = 32
    ) -> int:
        """Return F, the width of :meth:`edge_features`: num_distances + 2 * max_offset + 2."""
        num_distances, _, max_offset = _feature_sizes(num_distances, max_distance, max_offset)
        return num_distances + 2 * max_offset + 2

    # Tracks.

    def secondary_structure(self) -> Tensor:
        """Compute the secondary structure from the C-alpha atoms: LongTensor [N].

        0 is coil, 1 is helix, 2 is strand. The chain is broken where :attr:`positions` increase by
        more than 1. A residue without coordinates is coil.

        Source: P-SEA (Labesse et al., 1997, CABIOS 13:291), by biotite's ``annotate_sse``.

        Raises:
            ImportError: if biotite is not installed.
        """
        return secondary_structure(self)

    def solvent_accessibility(self, *, probe_radius: float = 1.4) -> Tensor:
        """Compute the surface of every residue that water can reach: FloatTensor [N].

        The unit is Angstrom squared. All chains of this structure count, so a surface that another
        chain covers is not accessible. Water, ligands and nucleic acids are not in the structure,
        and cover nothing.

        Args:
            probe_radius: the radius of the rolling ball, in Angstrom.

        Source: Shrake and Rupley, 1973, with the radii of Tsai et al., 1999, by biotite's ``sasa``.

        Raises:
            ValueError: if not all atoms were read (``read_structure(path, atoms="all")``).
            ImportError: if biotite is not installed.
        """
        radius = as_float("probe_radius", probe_radius, positive=True)
        if not self.has_all_atoms:
            raise ValueError(
                "atoms must have all atoms of every residue for solvent_accessibility(), got only "
                f"{', '.join(self.atoms)}: read the file with read_structure(path, atoms='all')"
            )
        return solvent_accessibility(self, radius).to(self.ca_positions)


def _feature_sizes(
    num_distances: Any, max_distance: Any, max_offset: Any
) -> tuple[int, float, int]:
    return (
        as_int("num_distances", num_distances, 1),
        as_float("max_distance", max_distance, positive=True),
        as_int("max_offset", max_offset, 0),
    )


def residues_of(
    structure: Structure, rows: Tensor, chain_index: Tensor, chain_ids: tuple[str, ...]
) -> Structure:
    """Make a structure of the residues `rows` [n], which may be in any order and may repeat."""
    indices = rows.tolist()
    return replace(
        structure,
        sequence="".join(structure.sequence[row] for row in indices),
        chain_index=chain_index,
        chain_ids=chain_ids,
        insertion_codes=tuple(structure.insertion_codes[row] for row in indices),
        residue_names=tuple(structure.residue_names[row] for row in indices),
        ca_positions=structure.ca_positions[rows],
        residue_numbers=structure.residue_numbers[rows],
        b_factors=structure.b_factors[rows],
        atoms={name: places[rows] for name, places in structure.atoms.items()},
    )
