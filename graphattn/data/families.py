"""Families of similar sequences, which are copies, fragments or close relatives."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

# The share of words that two sequences of a family have in common. With words of 5 letters, it is
# about 55 % identity.
SHARED_WORDS = 0.05
# A word is compared among at most this many sequences. Words of more are of low complexity.
_MOST_OWNERS = 64


def word_length(vocab_size: int) -> int:
    """Return how many letters a word needs to be rare: 5 for proteins, 10 for DNA."""
    return max(1, math.ceil(math.log(4e6) / math.log(max(vocab_size, 2))))


def families(sequences: Sequence[Tensor], vocab_size: int) -> list[list[int]]:
    """Group similar sequences; return the numbers of the sequences of every family.

    Two sequences are in one family if they are equal, or if 5 % of the words of the shorter one
    are in the other, too. This finds copies, fragments and close relatives. It does not find
    distant homologs.
    """
    k, count = word_length(vocab_size), len(sequences)
    parent = list(range(count))

    def root(n: int) -> int:
        while parent[n] != n:
            parent[n] = parent[parent[n]]
            n = parent[n]
        return n

    def join(a: int, b: int) -> None:
        a, b = sorted((root(a), root(b)))
        parent[b] = a

    known: dict[bytes, int] = {}
    for n, tokens in enumerate(sequences):
        join(known.setdefault(tokens.numpy().tobytes(), n), n)
    powers = vocab_size ** torch.arange(k)
    words = [
        (tokens.unfold(0, k, 1) * powers).sum(1).unique() if len(tokens) >= k else tokens[:0]
        for tokens in sequences
    ]
    num_words = torch.tensor([len(word_list) for word_list in words])
    owners = torch.arange(count).repeat_interleave(num_words)
    key = (torch.cat(words) * count + owners).sort().values
    word, owner = key // count, key % count
    pairs = []
    for step in range(1, min(_MOST_OWNERS, len(key))):
        same = word[step:] == word[:-step]
        if not same.any():
            break
        pairs.append((owner[:-step] * count + owner[step:])[same])
    if pairs:
        pair, shared = torch.cat(pairs).unique(return_counts=True)
        a, b = pair // count, pair % count
        least = (SHARED_WORDS * torch.minimum(num_words[a], num_words[b])).clamp(min=2)
        for close in (shared >= least).nonzero()[:, 0].tolist():
            join(int(a[close]), int(b[close]))
    members: dict[int, list[int]] = {}
    for n in range(count):
        members.setdefault(root(n), []).append(n)
    return list(members.values())
