"""Plans of graphs of neighbours, of which every rank knows only the edges of its own targets."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NoReturn

import torch
from torch import Tensor

from graphattn.distributed.planning.plan_text import with_unit
from graphattn.distributed.planning.plans import CommunicationPlan

COUNT_BYTES = 8  # of a count of rows, and of the number of a token


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class NeighborPlan(CommunicationPlan):
    """Plan of the exchange over a graph of neighbours that was found over all ranks.

    It counts rows, and does not say which tokens they belong to.

    Attributes:
        rows: LongTensor [ranks, ranks], how many rows each rank (first) receives from each other.
        edges_of_ranks: LongTensor [ranks], how many edges lead to the targets of each rank.
        search: the plan of the search, in which coordinates travel on a ring.
    """

    rows: Tensor
    edges_of_ranks: Tensor
    search: CommunicationPlan

    @cached_property
    def received_rows(self) -> Tensor:
        """How many rows each rank receives, a LongTensor [ranks]."""
        return self.rows.sum(1)

    @cached_property
    def sent_rows(self) -> Tensor:
        """How many rows each rank sends, a LongTensor [ranks]; a row counts for every receiver."""
        return self.rows.sum(0)

    @cached_property
    def partners(self) -> Tensor:
        """How many ranks each rank receives rows from, a LongTensor [ranks]."""
        return (self.rows > 0).sum(1)

    @cached_property
    def edges(self) -> Tensor:
        """How many edges lead to the targets of each rank, a LongTensor [ranks]."""
        return self.edges_of_ranks

    @property
    def has_inside(self) -> bool:
        """False: which targets see no other rank is not known here."""
        return False

    def search_bytes(self, dtype: torch.dtype, coordinates: int) -> Tensor:
        """Count the bytes that every rank receives to find the neighbours, a LongTensor [ranks].

        These are the coordinates of all candidates on other ranks; the numbers of the tokens whose
        rows others ask for; and how many they are, from every rank to every other one.

        Args:
            dtype: the dtype of the coordinates.
            coordinates: how many coordinates, or features, a token has.

        Raises:
            ValueError: if `dtype` is not a dtype, or `coordinates` < 1.
        """
        asked = COUNT_BYTES * self.sent_rows
        counts = COUNT_BYTES * (self.ranks + 1) * (self.ranks - 1)
        return self.search.bytes(dtype, coordinates) + asked + counts

    def pairs(self, rank: int) -> NoReturn:
        """Raise ValueError, because the plan does not list rows."""
        raise ValueError(
            "the plan of a graph of neighbours counts rows and does not list them: read plan.rows"
        )

    sends = pairs

    def senders(self, rank: int) -> list[tuple[int, int]]:
        """Count the rows that `rank` receives from each sender, in ascending order."""
        of_rank = self.rows[self._checked(rank)].tolist()
        return [(sender, rows) for sender, rows in enumerate(of_rank) if rows]

    def title(self) -> str:
        """Name the graph, and say what the search costs."""
        one = with_unit(int(self.search_bytes(torch.float32, 1).max()), "B")
        many = with_unit(int(self.search_bytes(torch.float32, 64).max()), "B")
        return (
            f"graph of neighbours, {self.graph.num_targets:,} targets, {self.edges.sum():,} edges; "
            f"search in 1 or 64 coordinates of float32: {one} or {many} to the busiest rank"
        )

    def _within_nodes(self, per_node: int) -> tuple[Tensor, Tensor]:
        node = torch.arange(self.ranks) // per_node
        near = self.rows * (node[:, None] == node)
        return near.sum(1), near.sum(0)

    def __repr__(self) -> str:
        return (
            f"NeighborPlan(ranks={self.ranks}, largest_received_rows={self.received_rows.max()}, "
            f"edges={self.edges.sum()})"
        )
