"""Splits of a corpus into parts for training and for tests: by position, record or group."""

from __future__ import annotations

import hashlib
import re
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from graphattn.data.families import families
from graphattn.graphs.arguments import as_choice, as_float, as_int

if TYPE_CHECKING:
    from graphattn.data.corpus import Corpus

By = Literal["auto", "position", "record", "group"]

_NAMES = ("train", "validation", "test")
_NEAR = 0.01  # of a share: a draw that misses by no more is taken at once
_MOST_DRAWS = 1000
_MOST_COMPARED = 10**7  # residues: comparing them takes about 5 s, and 64 MB a million
_AT_A_BORDER = 0.1  # of the smallest share: so far a cut moves to the border of a record


@dataclass(frozen=True, eq=False, repr=False)
class Part:
    """A part of a corpus, such as what a model is tested on. :func:`split_corpus` makes it.

    Attributes:
        corpus: the whole :class:`Corpus`.
        spans: LongTensor [n, 3]: the record, its first token, and the one after the last, of every
            stretch that belongs to the part; none is empty and no two overlap.

    Example:
        >>> import torch, graphattn as ga
        >>> part = ga.data.Part(corpus=None, spans=torch.tensor([[0, 0, 90], [2, 10, 20]]))
        >>> part.num_tokens, len(part)
        (100, 2)
    """

    corpus: Corpus
    spans: Tensor

    def __len__(self) -> int:
        """The number of spans."""
        return len(self.spans)

    def __repr__(self) -> str:
        return f"Part(spans={len(self)}, tokens={self.num_tokens})"

    @property
    def num_tokens(self) -> int:
        """Tokens of all spans; of images, how many there are."""
        return int((self.spans[:, 2] - self.spans[:, 1]).sum())


def split_corpus(
    corpus: Corpus,
    *,
    validation: float,
    test: float,
    by: By = "auto",
    group: str = "",
    seed: int = 0,
) -> dict[str, Part]:
    r"""The parts of a corpus to learn from, to choose by and to test on: no token is in two.

    - **position**: the corpus in its order, first "train", then "validation", then "test", whose
      last token is the last of the corpus. A cut lies between two records where that changes no
      part by more than a tenth of the smallest share, and inside a record elsewhere.
    - **record**: whole records, drawn by `seed`. Those that are equal stay in one part, and of
      proteins and structures also those that share 5 % of their words of five letters: copies,
      fragments and close relatives. For distant ones, and in a corpus of more than 10 million
      residues (a warning says so), give a `group`, such as a chain's family.
    - **group**: whole groups, drawn by `seed`. Every record must have one. Equal records of two
      groups may stand in two parts.

    Of whole records or groups, up to 1,000 draws are compared and the nearest to the shares is
    taken; validation and test hold at most twice what was asked for.

    Args:
        corpus: from :func:`load_corpus`.
        validation, test: shares of all tokens, >= 0, together below 1; 0 leaves a part empty.
        by: "position", "record" or "group". "auto" is "group" where `group` is given, "position"
            of text and of a single record, and "record" of all else; of nucleotides it is
            "position" also where no choice of whole records comes near the shares.
        group: a regular expression that is searched in the names of all records: what its
            parentheses match (of several, the first that match something; without any, the whole
            match) is the group. Without it, by="group"
            takes the groups of the corpus, such as organisms.
        seed: of the draw, >= 0.

    Returns:
        "train", "validation" and "test".

    Raises:
        ValueError: names the argument that is outside its range, a record without a group, or the
            shares that leave a part empty although they are above 0.

    Example:
        >>> import pathlib, tempfile, graphattn as ga
        >>> names = [f"{n} [{'Homo' if n % 3 else 'Mus'} sp.]" for n in range(30)]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "some.fasta")
        ...     _ = path.write_text("".join(f">{name}\n{'MKVLTAG' * 9}\n" for name in names))
        ...     corpus = ga.data.load_corpus(path)
        >>> ga.data.split_corpus(corpus, validation=0.0, test=0.3, by="group", group=r"\[(\w+)")
        {'train': Part(spans=20, tokens=1260), 'validation': Part(spans=0, tokens=0),
         'test': Part(spans=10, tokens=630)}
    """
    shares = (as_float("validation", validation, positive=False),
              as_float("test", test, positive=False))  # fmt: skip
    if sum(shares) >= 1:
        raise ValueError(
            "validation and test must leave something to learn from: their sum must be below 1, "
            f"got {validation} + {test}"
        )
    as_choice("by", by, ("auto", "position", "record", "group"))
    seed = as_int("seed", seed, 0)
    if not isinstance(group, str):
        raise ValueError(f"group must be a regular expression, got {group!r}")
    if group and by not in ("auto", "group"):
        raise ValueError(f"group needs by='group' (or 'auto'), got by={by!r} and group={group!r}")
    if int(corpus.lengths.sum()) == 0:
        raise ValueError("corpus must hold at least one token, got none")
    if by == "position" or (by == "auto" and not group and _is_one_text(corpus)):
        return _by_position(corpus, shares)
    if by == "group" or group:
        return _by_sets(corpus, _groups(corpus, group), shares, seed, "group")
    try:
        return _by_sets(corpus, _relatives(corpus), shares, seed, "record")
    except ValueError:
        if by == "auto" and corpus.kind == "nucleotide":
            return _by_position(corpus, shares)
        raise


def _is_one_text(corpus: Corpus) -> bool:
    return corpus.kind == "text" or len(corpus) == 1


# By position.


def _by_position(corpus: Corpus, shares: tuple[float, float]) -> dict[str, Part]:
    ends = corpus.lengths.cumsum(0)
    total = int(ends[-1])
    wanted = (1.0 - sum(shares), *shares)
    room = _AT_A_BORDER * total * min(share for share in wanted if share > 0)
    cuts = [0]
    for share in (sum(shares), shares[1]):
        cut = total - round(total * share)
        place = int(torch.searchsorted(ends, cut))
        near = [int(end) for end in ends[max(place - 1, 0) : place + 1]]
        border = min(near, key=lambda end: abs(end - cut))
        cuts.append(border if share > 0 and abs(border - cut) <= room else cut)
    cuts.append(total)
    parts = {}
    for name, share, first, last in zip(_NAMES, wanted, cuts, cuts[1:], strict=False):
        if share > 0 and first >= last:
            raise ValueError(
                f"{name} must hold at least one token: of {total} tokens, validation={shares[0]} "
                f"and test={shares[1]} leave it none"
            )
        begins = ends - corpus.lengths
        starts = (first - begins).clamp(min=0)
        stops = torch.minimum(last - begins, corpus.lengths)
        kept = (stops > starts).nonzero()[:, 0]
        parts[name] = Part(corpus, torch.stack([kept, starts[kept], stops[kept]], dim=1))
    return parts


# By sets of records that stay together.


def _relatives(corpus: Corpus) -> Tensor:
    """LongTensor [records]: the first record that a record stays with, often itself."""
    if corpus.kind not in ("protein", "structures") or corpus.tokenizer is None:
        return _equal_records(corpus)
    if int(corpus.lengths.sum()) > _MOST_COMPARED:
        warnings.warn(
            f"by='record' compares at most {_MOST_COMPARED:,} residues: relatives may stand in "
            "two parts unless they are equal; group='...' keeps families together",
            stacklevel=3,
        )
        return _equal_records(corpus)
    first = torch.empty(len(corpus), dtype=torch.int64)
    sequences = [corpus.tokens(n, 0, None) for n in range(len(corpus))]
    for family in families(sequences, corpus.tokenizer.vocab_size):
        first[family] = family[0]
    return first


def _equal_records(corpus: Corpus) -> Tensor:
    """LongTensor [records]: the first record that a record is equal to, often itself.

    Only those are read that have the length of another one.
    """
    first = torch.arange(len(corpus))
    _, place, count = corpus.lengths.unique(return_inverse=True, return_counts=True)
    known: dict[bytes, int] = {}
    for n in (count[place] > 1).nonzero()[:, 0].tolist():
        own = corpus[n]["image"] if corpus.kind == "images" else corpus.tokens(n, 0, None)
        digest = hashlib.blake2b(own.numpy().tobytes(), digest_size=16).digest()
        first[n] = known.setdefault(digest, n)
    return first


def _groups(corpus: Corpus, pattern: str) -> Tensor:
    """LongTensor [records]: the number of a record's group.

    Raises:
        ValueError: the pattern is no regular expression, or a record has no group.
    """
    if pattern:
        try:
            search = re.compile(pattern).search
        except re.error as error:
            raise ValueError(
                f"group must be a regular expression, got {pattern!r}: {error}"
            ) from None
        found = [search(name) for name in corpus.names]
        own = [match and next(filter(None, match.groups() or (match[0],)), "") for match in found]
    else:
        own = list(corpus.groups)
    missing = [n for n, name in enumerate(own) if not name]
    if missing:
        where = f"group={pattern!r} finds none in" if pattern else "the corpus has none for"
        advice = (
            r"a second choice, as '|^(\S+)' at the end of one that begins with '^', makes each of "
            "the others a group of its own"
            if pattern
            else "group is a regular expression that finds it in the name"
        )
        more = f" and {len(missing) - 1} others" if len(missing) > 1 else ""
        raise ValueError(
            f"every record must have a group: {where} {corpus.names[missing[0]]!r}{more}; " + advice
        )
    numbers: dict[str | None, int] = {}
    return torch.tensor([numbers.setdefault(name, len(numbers)) for name in own])


def _by_sets(
    corpus: Corpus, sets: Tensor, shares: tuple[float, float], seed: int, what: str
) -> dict[str, Part]:
    _, own = sets.unique(return_inverse=True)
    sizes = torch.zeros(int(own.max()) + 1, dtype=torch.int64).index_add_(0, own, corpus.lengths)
    part = _draw(sizes, shares, seed, what)[own]
    parts = {}
    for number, name in enumerate(_NAMES):
        kept = ((part == number) & (corpus.lengths > 0)).nonzero()[:, 0]
        spans = torch.stack([kept, torch.zeros_like(kept), corpus.lengths[kept]], dim=1)
        parts[name] = Part(corpus, spans)
    return parts


def _draw(sizes: Tensor, shares: tuple[float, float], seed: int, what: str) -> Tensor:
    """LongTensor [sets]: 0, 1 or 2 for the part of every set.

    In every draw the first sets, in random order, are the test part, the next the validation part:
    as many as come nearest to the share.
    """
    total, count = int(sizes.sum()), len(sizes)
    generator = torch.Generator().manual_seed(seed)
    draws, at_once = max(10, min(_MOST_DRAWS, 10**7 // count)), max(1, 10**5 // count)
    best: tuple[Tensor, int, int] | None = None
    best_miss = float("inf")
    for start in range(0, draws, at_once):
        shape = (min(at_once, draws - start), count)
        order = torch.rand(shape, generator=generator, dtype=torch.float64).argsort(dim=1)
        ends = torch.nn.functional.pad(sizes[order].cumsum(1).double(), (1, 0))
        tested = (ends - total * shares[1]).abs().argmin(dim=1, keepdim=True)
        from_there = ends - ends.gather(1, tested)
        missing = (from_there - total * shares[0]).abs()
        is_tested = torch.arange(count + 1) < tested
        chosen = missing.masked_fill(is_tested, torch.inf).argmin(dim=1, keepdim=True)
        got = torch.cat([from_there.gather(1, chosen), ends.gather(1, tested)], dim=1) / total
        asked = torch.tensor(shares, dtype=torch.float64)
        miss = ((got - asked).abs() / asked)[:, asked > 0].amax(dim=1) if any(shares) else got[:, 0]
        is_empty = ((asked > 0) & (got == 0)).any(dim=1) | (got.sum(dim=1) >= 1 - 0.5 / total)
        miss = miss.masked_fill(is_empty, torch.inf)
        nearest = int(miss.argmin())
        if miss[nearest] < best_miss:
            best_miss = float(miss[nearest])
            best = order[nearest], int(tested[nearest]), int(chosen[nearest])
        if best_miss <= _NEAR:
            break
    if best is None:
        largest = sizes.sort(descending=True).values[:3]
        held = ", ".join(f"{100 * int(size) / total:.3g} %" for size in largest)
        sets = {"record": "records or families of them", "group": "groups"}[what]
        raise ValueError(
            f"validation={shares[0]} and test={shares[1]} leave a part empty, or with more than "
            f"twice its share, because {sets} stay whole: there are {count:,}, and the largest "
            f"hold {held} of the tokens; ask for other shares, or for by='position'"
        )
    drawn, first, last = best
    part = torch.zeros(count, dtype=torch.int64)
    part[drawn[:first]], part[drawn[first:last]] = 2, 1
    return part
