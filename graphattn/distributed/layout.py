"""Layouts: how tokens are divided among ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """Tokens 0 .. num_tokens - 1, divided among ranks in chunks of consecutive tokens.

    Chunks differ in length by one token at most; the longer ones come first. Without `zigzag`,
    rank r owns chunk r. With it there are twice as many chunks, and rank r owns chunk r and chunk
    2 * ranks - 1 - r. In a causal graph, where later tokens see more, all ranks then have about
    the same work.

    Example:
        >>> from graphattn.distributed.layout import Layout
        >>> Layout(num_tokens=10, ranks=4).runs(3), Layout(16, ranks=2, zigzag=True).runs(0)
        ((range(8, 10),), (range(0, 4), range(12, 16)))
    """

    num_tokens: int
    ranks: int
    zigzag: bool = False

    @property
    def num_chunks(self) -> int:
        return self.ranks * (2 if self.zigzag else 1)

    def chunk(self, number: int) -> range:
        """Return the tokens of a chunk."""
        size, longer = divmod(self.num_tokens, self.num_chunks)
        start = number * size + min(number, longer)
        return range(start, start + size + (number < longer))

    def borders(self) -> Tensor:
        """Return the first token of every chunk and the number of tokens, [num_chunks + 1]."""
        size, longer = divmod(self.num_tokens, self.num_chunks)
        number = torch.arange(self.num_chunks + 1)
        return number * size + number.clamp(max=longer)

    def per_rank(self, counts: Tensor) -> Tensor:
        """Add up one number per chunk, [num_chunks], to one number per rank, [ranks]."""
        return counts[: self.ranks] + counts[self.ranks :].flip(0) if self.zigzag else counts

    def runs(self, rank: int) -> tuple[range, ...]:
        """Return the runs of tokens that a rank owns, in ascending order."""
        if not self.zigzag:
            return (self.chunk(rank),)
        return self.chunk(rank), self.chunk(self.num_chunks - 1 - rank)

    def size(self, rank: int) -> int:
        """Count the tokens of a rank."""
        return sum(len(run) for run in self.runs(rank))

    def sizes(self) -> list[int]:
        """Count the tokens of every rank."""
        return [self.size(rank) for rank in range(self.ranks)]

    def tokens(self, rank: int) -> Tensor:
        """Return the tokens of a rank in ascending order, a LongTensor."""
        return torch.cat([torch.arange(run.start, run.stop) for run in self.runs(rank)])

    def owner(self, token: Tensor) -> Tensor:
        """Return the ranks that own some tokens."""
        return self.rank_of(self.chunk_of(token))

    def rank_of(self, chunk: Tensor) -> Tensor:
        """Return the ranks that own some chunks."""
        return torch.minimum(chunk, self.num_chunks - 1 - chunk) if self.zigzag else chunk

    def cut_at_chunks(self, start: Tensor, stop: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Cut runs of tokens, which are not empty, at the borders of chunks.

        The results are, for every part, the number of its run, its chunk, its start and its stop.
        """
        first = self.chunk_of(start)
        parts = self.chunk_of(stop - 1) - first + 1
        run = torch.arange(len(start)).repeat_interleave(parts)
        chunk = first[run] + torch.arange(len(run)) - (parts.cumsum(0) - parts)[run]
        borders = self.borders()
        return run, chunk, start[run].maximum(borders[chunk]), stop[run].minimum(borders[chunk + 1])

    def chunk_of(self, token: Tensor) -> Tensor:
        """Return the chunks that some tokens are in."""
        size, longer = divmod(self.num_tokens, self.num_chunks)
        in_longer = longer * (size + 1)  # the number of tokens in longer chunks
        return torch.where(
            token < in_longer,
            torch.div(token, size + 1, rounding_mode="floor"),
            torch.div(token - in_longer, max(size, 1), rounding_mode="floor") + longer,
        )
