"""Find out whether a mask function is a band of offsets, by calling it with symbols.

transformers writes a mask as a function of indices, ``f(batch, head, query, key) -> bool``, which
consists of comparisons: ``key <= query``, ``key > query - 256``, ``abs(query - key) <= 64``. Called
with the symbols below instead of numbers, such a function returns the offsets that it allows. A
function that reads a tensor (padding, packed sequences, token types) cannot be called with symbols,
so it is not a band.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

FAR = 1 << 62  # more than any offset


class MaskBand(NamedTuple):
    """Targets i see the sources j with -before <= j - i <= after."""

    before: int
    after: int

    def __and__(self, other: Any) -> MaskBand:
        if not isinstance(other, MaskBand):
            return NotImplemented
        return MaskBand(min(self.before, other.before), min(self.after, other.after))

    def spans(self, num_sources: int) -> int:
        """Return the number of offsets inside a sequence."""
        return min(self.before, num_sources) + min(self.after, num_sources) + 1

    def holds(self, offset: Tensor) -> Tensor:
        """Return which offsets j - i are inside."""
        return (offset >= -self.before) & (offset <= self.after)

    def __bool__(self) -> bool:  # `and`, `not`, `if` and `a < b < c` call it, as for a tensor
        raise NoBandError

    # Methods of tensors that mask functions may call.

    def to(self, *_: Any, **__: Any) -> MaskBand:
        return self

    @property
    def device(self) -> None:
        return None


EVERYTHING = MaskBand(FAR, FAR)


class NoBandError(Exception):
    """A mask function does something that a band cannot do."""


class Symbol:
    """Symbol instead of a number, with only those operations that its subclasses define."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> Any:
        raise NoBandError

    def __ne__(self, other: object) -> Any:
        raise NoBandError

    def __bool__(self) -> bool:
        raise NoBandError


class Index(Symbol):
    """The number ``targets * i + sources * j + shift`` of a target i and a source j."""

    def __init__(self, targets: int, sources: int, shift: int = 0) -> None:
        self.targets, self.sources, self.shift = targets, sources, shift

    def __add__(self, other: Any) -> Index:
        x = _index(other)
        return Index(self.targets + x.targets, self.sources + x.sources, self.shift + x.shift)

    def __neg__(self) -> Index:
        return Index(-self.targets, -self.sources, -self.shift)

    def __sub__(self, other: Any) -> Index:
        return self + -_index(other)

    def __radd__(self, other: Any) -> Index:
        return self + other

    def __rsub__(self, other: Any) -> Index:
        return -self + other

    def __abs__(self) -> MaskSize:
        return MaskSize(self)

    def __ge__(self, other: Any) -> MaskBand:
        return _where_positive(self - other)

    def __le__(self, other: Any) -> MaskBand:
        return _where_positive(_index(other) - self)

    def __gt__(self, other: Any) -> MaskBand:
        return _where_positive(self - other - 1)

    def __lt__(self, other: Any) -> MaskBand:
        return _where_positive(_index(other) - self - 1)

    def new_ones(self, *_: Any, **__: Any) -> MaskBand:
        return EVERYTHING


class MaskSize(Symbol):
    """The absolute value of an index."""

    def __init__(self, of: Index) -> None:
        self.of = of

    def __le__(self, other: Any) -> MaskBand:
        return (self.of <= other) & (self.of >= -_index(other))

    def __lt__(self, other: Any) -> MaskBand:
        return self <= _index(other) - 1


def band_of(mask_function: Callable[..., Any]) -> MaskBand | None:
    """Return the offsets that a mask function allows, or None if it is not a band.

    A function ``f(batch, head, query, key)`` is not a band if it uses its batch or head, compares
    with a tensor, or uses operations other than addition, subtraction, comparison and ``&``; nor is
    it if a token does not see itself.

    Example:
        >>> from graphattn.integrations.transformers.masks.bands import band_of
        >>> band_of(lambda batch, head, query, key: abs(query - key) <= 3)
        MaskBand(before=3, after=3)
    """
    try:
        band = mask_function(Symbol(), Symbol(), Index(1, 0), Index(0, 1))
    except Exception:  # the function does something that only works with tensors
        return None
    return band if isinstance(band, MaskBand) and min(band) >= 0 else None


def _index(x: Any) -> Index:
    if isinstance(x, Index):
        return x
    if isinstance(x, int):
        return Index(0, 0, x)
    raise NoBandError


def _where_positive(x: Index) -> MaskBand:
    """Return the offsets j - i for which x >= 0."""
    if (x.targets, x.sources) == (-1, 1):
        return MaskBand(x.shift, FAR)
    if (x.targets, x.sources) == (1, -1):
        return MaskBand(FAR, x.shift)
    if x.targets >= 0 and x.sources >= 0 and x.shift >= 0:  # positions are >= 0
        return EVERYTHING
    raise NoBandError
