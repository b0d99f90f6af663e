"""Splits of a corpus into training, validation and test parts, by position, record or group."""

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
_NEAR = 0.01  # the relative error of a share at which no more draws are made
_MOST_DRAWS = 1000
# The most residues that are compared. It takes about 5 s, and 64 MB of memory per million residues.
_MOST_COMPARED = 10**7
# A cut is shifted to the border of a record by at most this fraction of the smallest share.
_AT_A_BORDER = 0.1


@dataclass(frozen=True, eq=False, repr=False)
class Part:
    """A part of a corpus, such as the test part; :func:`split_corpus` makes it.

    Attributes:
        corpus: the whole :class:`Corpus`.
        spans: LongTensor [n, 3], the stretches of tokens in this part: the number of the record,
            the first token, and the one after the last. None is empty, and no two overlap.

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
        """The number of tokens of all spans; an image counts as 1."""
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
    r"""Split a corpus into parts for training, validation and test; no token is in two parts.

    The argument `by` says how:

    - **position**: the tokens in their order are first "train", then "validation", then "test". A
      cut is between two records if that changes no part by more than a tenth of the smallest share.
      Otherwise it is inside a record.
    - **record**: whole records, drawn at random. Equal records stay in the same part. Proteins and
      structures that share 5 % of their words of five letters also stay in the same part; these are
      copies, fragments and close relatives. To separate distant relatives, give a `group`, such as
      a chain's family. Give it also for more than 10 million residues, for which only equal records
      are found, and there is a warning.
    - **group**: whole groups, drawn at random. Every record must have a group. Equal records of
      different groups may be in different parts.

    For whole records or groups, up to 1,000 random draws are compared, and the one that is nearest
    to the shares is used. Validation and test then have at most twice their share.

    Args:
        corpus: from :func:`load_corpus`.
        validation, test: shares of all tokens, >= 0, with a sum below 1. With 0, the part is empty.
        by: "position", "record", "group" or "auto". "auto" means "group" if `group` is given,
            otherwise "position" for text or a single record, and "record" for all else. For
            nucleotides, it also means "position" if no choice of whole records is near the shares.
        group: a regular expression that is searched in the names of all records. The group is the
            text that its parentheses match: of several pairs, the first that matches something;
            without parentheses, the whole match. Without `group`, ``by="group"`` uses the groups of
            the corpus, such as organisms.
        seed: seed of the random draws, >= 0.

    Returns:
        A dict of the parts "train", "validation" and "test".

    Raises:
        ValueError: if an argument is outside its range, a record has no group, or a part with a
            share above 0 would be empty or have more than twice its share.

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
            "validation and test must have a sum below 1, so that tokens are left for training, "
            f"got {validation} + {test}"
        )
    as_choice("by", by, ("auto", "position", "record", "group"))
    seed = as_int("seed", seed, 0)
    if not isinstance(group, str):
        raise ValueError(f"group must be a regular expression, got {group!r}")
    if group and by not in ("auto", "group"):
        raise ValueError(
            f"by must be 'group' or 'auto' if group is given, got by={by!r} and group={group!r}"
        )
    if int(corpus.lengths.sum()) == 0:
        raise ValueError("corpus must hold at least one token, got none")
    is_one_text = corpus.kind == "text" or len(corpus) == 1
    if by == "position" or (by == "auto" and not group and is_one_text):
        return _by_position(corpus, shares)
    if by == "group" or group:
        return _by_sets(corpus, _groups(corpus, group), shares, seed, "group")
    try:
        return _by_sets(corpus, _relatives(corpus), shares, seed, "record")
    except ValueError:
        if by == "auto" and corpus.kind == "nucleotide":
            return _by_position(corpus, shares)
        raise


def _part(corpus: Corpus, starts: Tensor, stops: Tensor) -> Part:
    """Make the part with the tokens from start to stop of every record, if there are any."""
    records = (stops > starts).nonzero()[:, 0]
    return Part(corpus, torch.stack([records, starts[records], stops[records]], dim=1))


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
                f"{name} must have at least one token, but with {total} tokens, "
                f"validation={shares[0]} and test={shares[1]} it has none: choose other shares"
            )
        begins = ends - corpus.lengths
        starts = (first - begins).clamp(min=0)
        stops = torch.minimum(last - begins, corpus.lengths)
        parts[name] = _part(corpus, starts, stops)
    return parts


# By sets of records that stay together.


def _relatives(corpus: Corpus) -> Tensor:
    """Find the family of every record, as its first record; LongTensor [records]."""
    if corpus.kind not in ("protein", "structures") or corpus.tokenizer is None:
        return _equal_records(corpus)
    if int(corpus.lengths.sum()) > _MOST_COMPARED:
        warnings.warn(
            f"by='record' compares at most {_MOST_COMPARED:,} residues, and this corpus has more: "
            "similar records that are not equal may be in different parts; give group='...' to "
            "keep families together",
            stacklevel=3,
        )
        return _equal_records(corpus)
    first = torch.empty(len(corpus), dtype=torch.int64)
    sequences = [corpus.tokens(n, 0, None) for n in range(len(corpus))]
    for family in families(sequences, corpus.tokenizer.vocab_size):
        first[family] = family[0]
    return first


def _equal_records(corpus: Corpus) -> Tensor:
    """Find the first record that is equal to each record, often itself; LongTensor [records].

    Only records that have the same length as another one are read.
    """
    first = torch.arange(len(corpus))
    _, place, count = corpus.lengths.unique(return_inverse=True, return_counts=True)
    known: dict[bytes, int] = {}
    if corpus.kind == "table":  # a row is named by its cells, of which tokens know less
        rows: dict[str, int] = {}
        return torch.tensor([rows.setdefault(name, n) for n, name in enumerate(corpus.names)])
    for n in (count[place] > 1).nonzero()[:, 0].tolist():
        example = corpus[n] if corpus.kind == "images" else {}  # an image, or its pixels
        values = example["image"] if "image" in example else corpus.tokens(n, 0, None)
        digest = hashlib.blake2b(values.numpy().tobytes(), digest_size=16).digest()
        first[n] = known.setdefault(digest, n)
    return first


def _groups(corpus: Corpus, pattern: str) -> Tensor:
    """Number the groups; LongTensor [records], the group of every record."""
    if pattern:
        try:
            search = re.compile(pattern).search
        except re.error as error:
            raise ValueError(
                f"group must be a regular expression, got {pattern!r}: {error}"
            ) from None
        groups = [
            match and next(filter(None, match.groups() or (match[0],)), "")
            for match in map(search, corpus.names)
        ]
    else:
        groups = list(corpus.groups)
    missing = [n for n, name in enumerate(groups) if not name]
    if missing:
        where = "the corpus has none for"
        advice = "give group=, a regular expression that finds it in the name"
        if pattern:
            where = f"group={pattern!r} finds none in"
            advice = (
                r"add an alternative at the end of the pattern, such as '|^(\S+)', which makes "
                "each of the other records a group"
            )
        more = f" and {len(missing) - 1} others" if len(missing) > 1 else ""
        raise ValueError(
            f"every record must have a group: {where} {corpus.names[missing[0]]!r}{more}; " + advice
        )
    numbers: dict[str | None, int] = {}
    return torch.tensor([numbers.setdefault(name, len(numbers)) for name in groups])


def _by_sets(
    corpus: Corpus, sets: Tensor, shares: tuple[float, float], seed: int, what: str
) -> dict[str, Part]:
    distinct, numbers = sets.unique(return_inverse=True)
    sizes = torch.zeros_like(distinct).index_add_(0, numbers, corpus.lengths)
    part, start = _draw(sizes, shares, seed, what)[numbers], torch.zeros_like(numbers)
    return {
        name: _part(corpus, start, torch.where(part == number, corpus.lengths, 0))
        for number, name in enumerate(_NAMES)
    }


def _draw(sizes: Tensor, shares: tuple[float, float], seed: int, what: str) -> Tensor:
    """Choose a part for every set of records; LongTensor [sets] of 0, 1 and 2.

    A draw puts the sets in random order. The first sets are the test part and the next ones the
    validation part, each with as many sets as come nearest to its share.
    """
    total, count = int(sizes.sum()), len(sizes)
    generator = torch.Generator().manual_seed(seed)
    draws, at_once = max(10, min(_MOST_DRAWS, 10**7 // count)), max(1, 10**5 // count)
    best: tuple[Tensor, int, int] | None = None
    best_error = float("inf")
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
        error = (
            ((got - asked).abs() / asked)[:, asked > 0].amax(dim=1) if any(shares) else got[:, 0]
        )
        is_empty = ((asked > 0) & (got == 0)).any(dim=1) | (got.sum(dim=1) >= 1 - 0.5 / total)
        error = error.masked_fill(is_empty, torch.inf)
        nearest = int(error.argmin())
        if error[nearest] < best_error:
            best_error = float(error[nearest])
            best = order[nearest], int(tested[nearest]), int(chosen[nearest])
        if best_error <= _NEAR:
            break
    if best is None:
        largest = sizes.sort(descending=True).values[:3]
        percent = ", ".join(f"{100 * int(size) / total:.3g} %" for size in largest)
        sets = {"record": "records or families of records", "group": "groups"}[what]
        raise ValueError(
            f"validation={shares[0]} and test={shares[1]} leave a part empty, or with more than "
            f"twice its share, because {sets} are not divided: there are {count:,}, and the "
            f"largest hold {percent} of the tokens; choose other shares, or by='position'"
        )
    drawn, first, last = best
    part = torch.zeros(count, dtype=torch.int64)
    part[drawn[:first]], part[drawn[first:last]] = 2, 1
    return part
