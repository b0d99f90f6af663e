"""Shared memory of the blocks of a batch: what is written, and who may see it when.

Threads of a block share this memory, and nothing orders their accesses but

- barriers, between all threads of the block,
- ``bar.warp.sync``, between the threads of a warp,
- waits, for copies and matrix products that run beside the threads (``cp.async``, ``wgmma``),
- ``fence.proxy.async``, between writes of threads and reads of matrix products.

So every unit of memory remembers its last writer, the warps that read it, and what runs beside.
"""

from __future__ import annotations

import numpy as np

from .findings import Findings
from .global_memory import UNSIGNED

WARP = 32
THREADS = 10  # bits for the number of a thread in its block


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
        self._bit = (1 << (self._thread // WARP)).astype(np.uint16)
        self._synchronized = np.zeros(blocks * warps, np.int64)  # times a warp was synchronized
        self.writers = np.zeros(units, np.int64)  # the last writer since the last barrier, or 0
        self.readers = np.zeros(units, np.uint16)  # warps that have read since then, as bits
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
        units = self._note_writes(place, size * count, lanes)
        self.unfenced[units] = (self._thread[lanes] // WARP + 1)[:, None]
        elements = self.bytes.view(values.dtype)
        places = (place // size)[:, None] + np.arange(count)
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
        winners = (self.writers[units] - 1 & (1 << THREADS) - 1) // WARP
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
        return (self._synchronized[self._warp[lanes]] << THREADS | self._thread[lanes]) + 1

    def _conflict(self, others: np.ndarray, lanes) -> tuple[bool, bool]:
        """Whether accesses `others` [k, units] are unordered, of another warp and of this one."""
        stamp = self._stamps(lanes)[:, None]
        different = (others != 0) & (others != stamp)
        if not different.any():
            return False, False
        thread = (others - 1) & ((1 << THREADS) - 1)
        same_warp = thread // WARP == (self._thread[lanes] // WARP)[:, None]
        recent = (others - 1) >> THREADS == (stamp - 1) >> THREADS
        same_thread = thread == self._thread[lanes][:, None]
        across = different & ~same_warp
        within = different & same_warp & recent & ~same_thread
        return bool(across.any()), bool(within.any())

    def _note_reads(self, place: np.ndarray, size: int, lanes) -> None:
        units = self._units(place, size)
        across, within = self._conflict(self.writers[units], lanes)
        if across:
            self.findings.add("shared memory: read of what another warp wrote, without a barrier")
        if within:
            self.findings.add("shared memory: read of what another thread of the warp wrote")
        if self.copied[units].any():
            self.findings.add("shared memory: read of what cp.async has not yet written")
        self.last_readers[units] = self._stamps(lanes)[:, None]
        bits = self._bit[lanes]
        for bit in np.unique(bits):  # threads of several warps may read one unit
            of_warp = units[bits == bit]
            self.readers[of_warp] |= bit

    def _note_writes(self, place: np.ndarray, size: int, lanes) -> np.ndarray:
        units = self._units(place, size)
        self._check_writes(units, lanes)
        self.writers[units] = self._stamps(lanes)[:, None]
        return units

    def _check_writes(self, units: np.ndarray, lanes) -> None:
        across, within = self._conflict(self.writers[units], lanes)
        if across:
            self.findings.add("shared memory: two warps write at one place, without a barrier")
        if within:
            self.findings.add("shared memory: two threads of a warp write at one place")
        if (self.readers[units] & ~self._bit[lanes][:, None]).any():
            self.findings.add("shared memory: write of what another warp read, without a barrier")
        elif self._conflict(self.last_readers[units], lanes)[1]:
            self.findings.add("shared memory: write of what another thread of the warp read")
        if self.copied[units].any():
            self.findings.add("shared memory: write of what cp.async will write")
        if self.multiplied[units].any():
            self.findings.add("shared memory: write of what wgmma may still read")

    # Synchronization

    def barrier(self, blocks: np.ndarray | None) -> None:
        """All threads of some blocks (bool [blocks], None: all) have waited for each other."""
        for table in (self.writers, self.readers, self.last_readers):
            if blocks is None:
                table[:] = 0
            else:
                table.reshape(self.blocks, -1)[blocks] = 0

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
        thread = (others - 1) & ((1 << THREADS) - 1)
        group = (self._thread[lanes] // (4 * WARP))[:, None]
        if ((others != 0) & (thread // (4 * WARP) != group)).any():
            self.findings.add("shared memory: wgmma reads what another group wrote, no barrier")
        elif (others != 0).any():
            # Four warps share a product: what one of them wrote, the others have to wait for.
            self.findings.add("shared memory: wgmma reads what a warp wrote, without a barrier")
        if self.copied[units].any():
            self.findings.add("shared memory: wgmma reads what cp.async has not yet written")
        if self.unfenced[units].any():
            self.findings.add("shared memory: wgmma reads what no fence has made visible to it")
        bits, of_groups = self._bit[lanes], []
        for of_group, bit in zip(units, bits | bits << 1 | bits << 2 | bits << 3, strict=True):
            of_groups.append(np.unique(of_group))
            self.multiplied[of_groups[-1]] += 1
            self.readers[of_groups[-1]] |= np.uint16(bit)  # all four warps read
        return of_groups

    def end_product(self, units: np.ndarray) -> None:
        """A product that read `units`, each as often as it stands there, is done."""
        np.subtract.at(self.multiplied, units, 1)

    def gather_product(self, places: np.ndarray, lanes: np.ndarray, size: int) -> np.ndarray:
        """Numbers of `size` bytes at `places` [g, n], in bytes: [g, n]."""
        places = np.clip(places, 0, self.limit - size)
        elements = self.bytes.view(UNSIGNED[size])
        return elements[(places + self._base[lanes][:, None]) // size]
