"""Shared memory of the blocks of a batch: what is written, and who may see it when.

Threads of a block share this memory, and nothing orders their accesses but

- barriers, between all threads of the block or some of its warps,
- ``mbarrier``, between those who arrive and those who wait for it,
- ``bar.warp.sync``, between the threads of a warp,
- waits, for copies and matrix products that run beside the threads (``cp.async``, ``wgmma``),
- ``fence.proxy.async``, between writes of threads and reads of matrix products.

So every unit of memory remembers its last writer, when each warp read it, and what runs beside.
Warps have clocks (vector clocks; Mattern 1989): a warp knows up to which time of every other one
all accesses come before its own next. Bulk copies that announce themselves at one ``mbarrier`` have
a clock, too, as if they were a warp: its time is the number of the copy.
"""

from __future__ import annotations

import numpy as np

from .findings import Findings
from .global_memory import UNSIGNED

WARP = 32
THREADS = 11  # bits for the number of a thread in its block; those from 1024 on are bulk copies
CLOCK = 40  # bits to shift the time of an access
COPIES = 1024 // WARP  # the first clock of bulk copies, after those of warps
CLOCKS = (1 << THREADS) // WARP


class SharedMemory:
    """Shared memory of several blocks that run in step.

    Args:
        blocks: how many.
        size: bytes of each.
        warps: warps of each.
        unit: the least bytes that any instruction of the kernel accesses.
        findings: where mistakes are noted.
    """

    def __init__(self, blocks: int, size: int, warps: int, unit: int, findings: Findings) -> None:
        self.size = -(-max(size, 1) // 128) * 128
        self.limit, self.unit, self.warps, self.findings = size, unit, warps, findings
        self.blocks = blocks
        self.bytes = np.full(blocks * self.size, 0xFF, np.uint8)
        units = len(self.bytes) // unit
        thread = np.arange(blocks * warps * WARP)
        self._base = thread // (warps * WARP) * self.size
        self._thread = (thread % (warps * WARP)).astype(np.int64)
        self._warp = thread // WARP  # among those of the batch
        self._synchronized = np.zeros(blocks * warps, np.int64)  # times a warp was synchronized
        self._clock = np.ones(blocks * warps, np.int64)
        self._seen = np.zeros((blocks * warps, CLOCKS), np.int64)  # what comes before a warp's next
        self.writers = np.zeros(units, np.int64)  # the last writer (`_stamps`), or 0
        self.readers = np.zeros((units, warps), np.int32)  # when each warp last read
        self.last_readers = np.zeros(units, np.int64)
        self.copied = np.zeros(units, bool)  # an asynchronous copy will write here
        self.multiplied = np.zeros(units, np.uint8)  # matrix products that may still read here
        self.unfenced = np.zeros(units, np.uint16)  # warp + 1 whose write no product may read yet

    # Accesses of threads

    def read(self, address: np.ndarray, size: int, count: int, lanes) -> np.ndarray:
        """`count` numbers of `size` bytes at every address [k], [k, count].

        `lanes` are the numbers of the k threads in the batch, or a slice of all.
        """
        place = self._place(address, size * count, lanes)
        self._note_reads(place, size * count, lanes)
        elements = self.bytes.view(UNSIGNED[size])
        return elements[(place // size)[:, None] + np.arange(count)]

    def write(self, address: np.ndarray, values: np.ndarray, lanes) -> None:
        """Write values [k, count] at every address [k]."""
        size, count = values.dtype.itemsize, values.shape[1]
        place = self._place(address, size * count, lanes)
        elements = self.bytes.view(values.dtype)
        places = (place // size)[:, None] + np.arange(count)
        # Several warps may write the same number, such as a constant, at one place.
        new = (elements[places] != values).any(axis=1)
        units = self._note_writes(place, size * count, lanes, new)
        self.unfenced[units] = (self._thread[lanes] // WARP + 1)[:, None]
        elements[places] = values
        if (differ := (elements[places] != values).any(axis=1)).any():
            warps = self._thread[lanes][differ] // WARP
            self._note_differences(elements[places][differ], values[differ], units[differ], warps)

    def _note_differences(
        self, kept: np.ndarray, lost: np.ndarray, units: np.ndarray, warps: np.ndarray
    ) -> None:
        """Threads of one instruction write different values at one place.

        Threads of a warp that form one sum, each in its own order, may differ in the last bits. Any
        of them is right, and a GPU always keeps the same one. So that is only remarked upon.
        Between warps it is a race.
        """
        winners = _number(self.writers[units]) // WARP
        alike = kept.dtype == np.uint32 and bool((winners == warps[:, None]).all())
        if alike:
            a, b = kept.view(np.float32), lost.view(np.float32)
            alike = np.allclose(a, b, rtol=1e-5, atol=1e-5 * np.nanmax(np.abs(a)), equal_nan=True)
        if alike:
            self.findings.remark("shared memory: threads of a warp write different roundings")
        else:
            self.findings.add("shared memory: two threads write different values at one place")

    def _place(self, address: np.ndarray, size: int, lanes) -> np.ndarray:
        """Places in `bytes`, of addresses that are within bounds."""
        if len(address):
            if address.min() < 0 or address.max() + size > self.limit:
                self.findings.add("shared memory: out of bounds")
                address = np.clip(address, 0, self.size - size)
            if (address & (size - 1)).any():
                self.findings.add(f"shared memory: {size} bytes at no multiple of {size}")
                address = address & ~(size - 1)
        return address + self._base[lanes]

    def _units(self, place: np.ndarray, size: int) -> np.ndarray:
        first = place // self.unit
        if size == self.unit:
            return first[:, None]
        return first[:, None] + np.arange(size // self.unit)

    def _stamps(self, lanes) -> np.ndarray:
        """Notes of an access: in one number clock, synchronizations of the warp, and thread."""
        warps = self._warp[lanes]
        synchronized = self._synchronized[warps] << THREADS
        return self._clock[warps] << CLOCK | synchronized | self._thread[lanes]

    def _conflict(self, others: np.ndarray, lanes) -> tuple[bool, bool, bool]:
        """Whether accesses `others` [k, units] are unordered: of another warp, of this one, or of
        a bulk copy."""
        stamp = self._stamps(lanes)[:, None]
        different = (others != 0) & (others != stamp)
        if not different.any():
            return False, False, False
        other, own = _number(others) // WARP, (self._thread[lanes] // WARP)[:, None]
        across = different & (other != own)
        across &= others >> CLOCK > self._seen[self._warp[lanes][:, None], other]
        recent = others >> THREADS == stamp >> THREADS
        within = different & (other == own) & recent
        of_copies = across & (other >= COPIES)
        return bool((across & ~of_copies).any()), bool(within.any()), bool(of_copies.any())

    def _note_reads(self, place: np.ndarray, size: int, lanes) -> None:
        units = self._units(place, size)
        self._check_reads(units, lanes)
        self.last_readers[units] = self._stamps(lanes)[:, None]
        warps = self._warp[lanes]
        self.readers[units, warps[:, None] % self.warps] = self._clock[warps][:, None]

    def _check_reads(self, units: np.ndarray, lanes) -> None:
        across, within, of_copies = self._conflict(self.writers[units], lanes)
        if across:
            self.findings.add("shared memory: read of what another warp wrote, without a barrier")
        if within:
            self.findings.add("shared memory: read of what another thread of the warp wrote")
        if of_copies:
            self.findings.add("shared memory: read of what a bulk copy writes, without a wait")
        if self.copied[units].any():
            self.findings.add("shared memory: read of what cp.async has not yet written")

    def _note_writes(self, place: np.ndarray, size: int, lanes, new: np.ndarray) -> np.ndarray:
        """Note writes, and check those that are `new` [k]: that change what is there."""
        units = self._units(place, size)
        if new.any():
            self._check_writes(units[new], np.arange(len(self._thread))[lanes][new])
        self.writers[units] = self._stamps(lanes)[:, None]
        return units

    def is_unseen(self, address: np.ndarray, size: int, lanes) -> bool:
        """Whether other warps have written at addresses, and these threads do not know it yet."""
        units = self._units(self._place(address, size, lanes), size)
        return any(self._conflict(self.writers[units], lanes))

    def _check_writes(self, units: np.ndarray, lanes) -> None:
        across, within, of_copies = self._conflict(self.writers[units], lanes)
        if across:
            self.findings.add("shared memory: two warps write at one place, without a barrier")
        if within:
            self.findings.add("shared memory: two threads of a warp write at one place")
        if of_copies:
            self.findings.add("shared memory: write of what a bulk copy writes, without a wait")
        unseen = self.readers[units] > self._seen[self._warp[lanes], None, : self.warps]
        own = self._thread[lanes][:, None, None] // WARP == np.arange(self.warps)
        if (unseen & ~own).any():
            self.findings.add("shared memory: write of what another warp read, without a barrier")
        elif self._conflict(self.last_readers[units], lanes)[1]:
            self.findings.add("shared memory: write of what another thread of the warp read")
        if self.copied[units].any():
            self.findings.add("shared memory: write of what cp.async will write")
        if self.multiplied[units].any():
            self.findings.add("shared memory: write of what wgmma may still read")

    # Synchronization

    def barrier(self, warps: np.ndarray) -> None:
        """Some warps of some blocks (bool [blocks * warps]) have waited for each other."""
        self.published(np.nonzero(warps)[0])
        met = warps.reshape(self.blocks, self.warps, 1)
        seen = self._seen.reshape(self.blocks, self.warps, CLOCKS)
        latest = np.where(met, seen, 0).max(axis=1, keepdims=True)
        seen[:] = np.where(met, latest, seen)

    def published(self, warps: np.ndarray) -> np.ndarray:
        """Clocks of what comes before anything that waits for these warps now, [k, CLOCKS].

        Their later accesses get a later time.
        """
        self._seen[warps, warps % self.warps] = self._clock[warps]
        self._clock[warps] += 1
        return self._seen[warps]

    def acquire(self, warps: np.ndarray, clocks: np.ndarray) -> None:
        """Let everything up to `clocks` come before what these warps do next."""
        self._seen[warps] = np.maximum(self._seen[warps], clocks)

    def has_seen(self, block: int, clock: int, time: int) -> bool:
        """Whether a warp of a block has waited for what happened at a time of a clock."""
        warps = slice(block * self.warps, (block + 1) * self.warps)
        return bool((self._seen[warps, clock] >= time).any())

    def synchronize_warps(self, warps: np.ndarray | slice) -> None:
        """The threads of some warps, by number in the batch, have waited for each other."""
        self._synchronized[warps] += 1

    # Asynchronous copies

    def begin_copy(self, address: np.ndarray, size: int, lanes) -> np.ndarray:
        """A copy to every address [k] begins: nothing else may touch it. Returns its places."""
        place = self._place(address, size, lanes)
        units = self._units(place, size)
        self._check_writes(units, lanes)
        self.copied[units] = True
        return place

    def end_copy(self, place: np.ndarray, values: np.ndarray, lanes: np.ndarray) -> None:
        """A copy that began at `place` [k] is done: values [k, bytes] are written."""
        size = values.shape[1]
        units = self._units(place, size)
        self.copied[units] = False
        self.writers[units] = self._stamps(lanes)[:, None]
        self.unfenced[units] = (self._thread[lanes] // WARP + 1)[:, None]
        self.bytes[place[:, None] + np.arange(size)] = values

    def copy_in_bulk(
        self, places: np.ndarray, values: np.ndarray, thread: int, clock: int, time: int
    ) -> None:
        """A bulk copy that a thread of the batch starts writes bytes `values` [n] at `places` [n].

        Whoever reads them must have waited for the `time` of its `clock`.
        """
        if len(places) and (places.min() < 0 or places.max() >= self.limit):
            self.findings.add("shared memory: out of bounds")
            places = np.clip(places, 0, self.limit - 1)
        lanes = np.asarray([thread])
        places = places + self._base[thread]
        units = np.unique(places // self.unit)
        self._check_writes(units[None], lanes)
        if self.unfenced[units].any():
            self.findings.add("shared memory: a bulk copy writes where no fence follows a store")
        self.unfenced[units] = 0
        self.writers[units] = time << CLOCK | clock * WARP
        self.bytes[places] = values

    def is_unfenced(self, address: int, size: int, thread: int) -> bool:
        """Whether no fence follows a store to `size` bytes of the block of `thread`."""
        first = int(address + self._base[thread]) // self.unit
        return bool(self.unfenced[first : first + -(-size // self.unit)].any())

    # Matrix products that read shared memory

    def fence(self, warps: np.ndarray) -> None:
        """Let matrix products read what some warps (bool [blocks * warps]) wrote."""
        table = self.unfenced.reshape(self.blocks, -1)
        if not table.any():
            return
        if warps.all():
            table[:] = 0
            return
        fenced = warps.reshape(self.blocks, self.warps)
        for warp in range(self.warps):
            rows = fenced[:, warp]
            table[rows] = np.where(table[rows] == warp + 1, 0, table[rows])

    def begin_product(self, places: np.ndarray, lanes: np.ndarray) -> list[np.ndarray]:
        """Products of groups of warps begin to read bytes at `places` [g, n].

        `lanes` [g] are a thread of each group. Returns the units of every group that must stay as
        they are until its product is done.
        """
        if len(places) and (places.min() < 0 or places.max() >= self.limit):
            self.findings.add("shared memory: out of bounds")
            places = np.clip(places, 0, self.limit - 1)
        units = (places + self._base[lanes][:, None]) // self.unit
        others = self.writers[units]
        # Four warps share a product: each has to wait for what any of them wrote.
        warps = self._warp[lanes][:, None] + np.arange(4)
        seen = self._seen[warps].min(axis=1)
        other = _number(others) // WARP
        unseen = others >> CLOCK > np.take_along_axis(seen, other, axis=1)
        of_copies, own = other >= COPIES, other // 4 == self._thread[lanes][:, None] // WARP // 4
        if (unseen & of_copies).any():
            self.findings.add("shared memory: wgmma reads what a bulk copy writes, without a wait")
        if (unseen & ~of_copies & ~own).any():
            self.findings.add("shared memory: wgmma reads what another group wrote, no barrier")
        elif (unseen & own).any():
            self.findings.add("shared memory: wgmma reads what a warp wrote, without a barrier")
        if self.copied[units].any():
            self.findings.add("shared memory: wgmma reads what cp.async has not yet written")
        if self.unfenced[units].any():
            self.findings.add("shared memory: wgmma reads what no fence has made visible to it")
        of_groups = [np.unique(of_group) for of_group in units]
        for of_group, four in zip(of_groups, warps, strict=True):
            self.multiplied[of_group] += 1
            self._read_by(of_group, four)
        return of_groups

    def end_product(self, units: np.ndarray, lane: int) -> None:
        """A product of the warps from that of thread `lane` on is done.

        It has read `units`, each as often as it stands there, until now.
        """
        np.subtract.at(self.multiplied, units, 1)
        self._read_by(units, self._warp[lane] + np.arange(4))

    def _read_by(self, units: np.ndarray, warps: np.ndarray) -> None:
        self.readers[units[:, None], warps % self.warps] = self._clock[warps]

    def gather_product(self, places: np.ndarray, lanes: np.ndarray, size: int) -> np.ndarray:
        """Numbers of `size` bytes at `places` [g, n], in bytes: [g, n]."""
        places = np.clip(places, 0, self.limit - size)
        elements = self.bytes.view(UNSIGNED[size])
        return elements[(places + self._base[lanes][:, None]) // size]


def _number(stamps: np.ndarray) -> np.ndarray:
    """The threads of `_stamps`; for bulk copies `WARP` times their clock."""
    return stamps & ((1 << THREADS) - 1)
