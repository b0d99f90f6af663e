"""Device memory: tensors of a launch, their bounds, and who touched what.

Blocks of a launch run in any order and at once, so what one of them writes no other may read or
write. Within a block, warps see each other's writes after a barrier only.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import numpy as np
from torch import Tensor

from .findings import Findings

UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
# Who touched an element: block, barriers that the block had passed, and warp, in one number.
BLOCK, EPOCH = 40, 8  # bits to shift
WARPS = (1 << EPOCH) - 1  # in place of a warp: several
SEVERAL = (1 << 22) - 1  # in place of a block
KEPT_READS = 256  # lists of reads that are noted before they are written down


class Region:
    """Neighbouring bytes that tensors of a launch occupy."""

    def __init__(self, low: int, high: int, unit: int) -> None:
        self.low, self.high, self.unit = low, high, unit
        self.base = low // 16 * 16  # so that elements of any size may be viewed
        size = -(-(high - self.base) // 16) * 16
        self.bytes = np.frombuffer((ctypes.c_uint8 * size).from_address(self.base), np.uint8)
        self.writers: np.ndarray | None = None  # stamps of the last writers by unit
        self.readers: np.ndarray | None = None
        self._reads: list[tuple[np.ndarray, np.ndarray]] = []

    def units(self, address: np.ndarray, size: int) -> np.ndarray:
        """The places of the accesses in `writers` and `readers`, [k, units of an access]."""
        first = (address - self.base) // self.unit
        if size <= self.unit:
            return first[:, None]
        return first[:, None] + np.arange(size // self.unit)

    def note_reads(self, units: np.ndarray, stamps: np.ndarray) -> None:
        """Note reads; they are only written down if somebody writes here, which is rare."""
        self._reads.append((units, stamps))
        if len(self._reads) > KEPT_READS:
            self.write_down()

    def write_down(self) -> None:
        """Bring `readers` up to date."""
        if self.readers is None:
            self.readers = np.full(len(self.bytes) // self.unit + 1, -1, np.int64)
        for units, stamps in self._reads:
            new = np.broadcast_to(stamps[:, None], units.shape).copy()
            # Several threads of one instruction may read an element, so the last of them is kept
            # first, and then whether another one differs from it.
            for _ in range(2):
                old = self.readers[units]
                known = (old >= 0) & (old != new)
                elsewhere = known & (old >> BLOCK != new >> BLOCK)
                same_time = known & ~elsewhere & (old | WARPS == new | WARPS)
                merged = np.where(same_time, old | WARPS, new)
                merged = np.where(elsewhere, new | (SEVERAL << BLOCK), merged)
                self.readers[units] = merged
        self._reads.clear()


class GlobalMemory:
    """The tensors that a launch may touch.

    Args:
        tensors: the arguments of the launch.
        findings: where mistakes are noted.
    """

    def __init__(self, tensors: Iterable[Tensor], findings: Findings) -> None:
        self.findings = findings
        spans = sorted(_span(tensor) for tensor in tensors if tensor.numel())
        merged: list[list[int]] = []
        for low, high, unit in spans:
            if merged and low <= merged[-1][1]:
                merged[-1][1] = max(high, merged[-1][1])
                merged[-1][2] = min(unit, merged[-1][2])
            else:
                merged.append([low, high, unit])
        self.regions = [Region(*span) for span in merged]
        self._low = np.array([region.low for region in self.regions], np.int64)

    def read(self, address: np.ndarray, size: int, count: int, stamps: np.ndarray) -> np.ndarray:
        """`count` numbers of `size` bytes at every address, [k, count]; ones where out of bounds.

        Args:
            address: int64 [k].
            stamps: who reads, int64 [k] (see `BLOCK` and `EPOCH`).
        """
        values = np.full((len(address), count), ~UNSIGNED[size](0), UNSIGNED[size])
        for region, which in self._by_region(address, size * count, "read"):
            places, who = address[which], stamps[which]
            elements = region.bytes.view(UNSIGNED[size])
            place = (places - region.base) // size
            values[which] = elements[place[:, None] + np.arange(count)]
            units = region.units(places, size * count)
            if region.writers is not None:
                self._check_reads(region.writers[units], who)
            region.note_reads(units, who)
        return values

    def write(self, address: np.ndarray, values: np.ndarray, stamps: np.ndarray) -> None:
        """Write values [k, count] at every address [k]."""
        size, count = values.dtype.itemsize, values.shape[1]
        for region, which in self._by_region(address, size * count, "write"):
            addresses, who = address[which], stamps[which]
            elements = region.bytes.view(values.dtype)
            places = ((addresses - region.base) // size)[:, None] + np.arange(count)
            elements[places] = values[which]
            differ = (elements[places] != values[which]).any()
            units = region.units(addresses, size * count)
            if region.writers is None:
                region.writers = np.full(len(region.bytes) // region.unit + 1, -1, np.int64)
            region.write_down()
            assert region.readers is not None
            self._check_writes(region.writers[units], region.readers[units], who)
            region.writers[units] = who[:, None]
            if (region.writers[units] >> BLOCK != who[:, None] >> BLOCK).any():
                self.findings.add("global memory: two blocks write at one place")
            elif differ:
                self.findings.add("global memory: two threads write different values at one place")

    def _by_region(self, address: np.ndarray, size: int, what: str):
        """The regions that addresses lie in, and which addresses those are."""
        if not len(address):
            return
        if (address % size).any():
            self.findings.add(f"global memory: {what} of {size} bytes at no multiple of {size}")
            return
        low, high = int(address.min()), int(address.max())
        first = int(np.searchsorted(self._low, low, side="right")) - 1
        if first >= 0 and high + size <= self.regions[first].high:
            yield self.regions[first], slice(None)
            return
        numbers = np.searchsorted(self._low, address, side="right") - 1
        for number in np.unique(numbers):
            which = numbers == number
            if number >= 0:
                which &= address + size <= self.regions[number].high
            else:
                which &= False
            if which.sum() < (numbers == number).sum():
                self.findings.add(f"global memory: {what} out of bounds")
            if which.any():
                yield self.regions[number], which

    def _check_reads(self, written: np.ndarray, stamps: np.ndarray) -> None:
        of_another_block, unordered = _conflict(written, stamps)
        if of_another_block:
            self.findings.add("global memory: read of what another block writes")
        if unordered:
            self.findings.add("global memory: read of what another warp wrote, without a barrier")

    def _check_writes(self, written: np.ndarray, read: np.ndarray, stamps: np.ndarray) -> None:
        of_another_block, unordered = _conflict(written, stamps)
        if of_another_block:
            self.findings.add("global memory: two blocks write at one place")
        if unordered:
            self.findings.add("global memory: two warps write at one place, without a barrier")
        of_another_block, unordered = _conflict(read, stamps)
        if of_another_block:
            self.findings.add("global memory: write of what another block reads")
        if unordered:
            self.findings.add("global memory: write of what another warp read, without a barrier")


def _conflict(before: np.ndarray, stamps: np.ndarray) -> tuple[bool, bool]:
    """Whether accesses [k, units] are of another block, or of another warp with no barrier since.

    Places that nobody has accessed hold -1.
    """
    known, now = before >= 0, stamps[:, None]
    if not known.any():
        return False, False
    elsewhere = known & (before >> BLOCK != now >> BLOCK)
    unordered = known & ~elsewhere & (before != now) & (before | WARPS == now | WARPS)
    return bool(elsewhere.any()), bool(unordered.any())


def _span(tensor: Tensor) -> tuple[int, int, int]:
    """First and last byte of a tensor, and the size of an element."""
    size = tensor.element_size()
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * size, size
