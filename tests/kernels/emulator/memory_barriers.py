"""``mbarrier``: objects in shared memory at which threads arrive, and for which others wait.

Such a barrier is in a phase. The phase is complete when so many threads have arrived as
``mbarrier.init`` says, and all bytes have been copied that these announced (``expect_tx``); then
the next one begins. A wait names the parity of a phase, and ends when the current phase has the
other parity (PTX ISA, "Parallel Synchronization and Communication Instructions: mbarrier").
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .machine import Machine, Step, UnknownInstruction
from .ptx import Instruction
from .shared_memory import CLOCKS, COPIES, WARP


class MemoryBarrier:
    """One ``mbarrier`` of a block.

    Args:
        machine: where it is.
        block: whose it is, by number in the batch.
        number: how many the block has before it.
        count: threads that arrive in a phase.
    """

    def __init__(self, machine: Machine, block: int, number: int, count: int) -> None:
        self.machine, self.block, self.count = machine, block, count
        self.clock = COPIES + number  # of the copies that are announced here
        if self.clock >= CLOCKS:
            raise UnknownInstruction(f"more than {CLOCKS - COPIES} mbarriers")
        self.phase, self.missing, self.bytes, self.copies = 0, count, 0, 0
        # What comes before the end of this phase, and before that of the last.
        self._before, self.released = np.zeros(CLOCKS, np.int64), np.zeros(CLOCKS, np.int64)

    def arrive(self, clocks: np.ndarray, expected: int = 0) -> None:
        """A thread arrives, after all that is in `clocks`, and announces bytes."""
        if self.missing == 0:
            self.machine.findings.add("mbarrier: more threads arrive than it was made for")
            return
        self.bytes += expected
        self.missing -= 1
        self._complete(clocks)

    def copied(self, size: int) -> None:
        """A copy of so many bytes is done."""
        clocks = np.zeros(CLOCKS, np.int64)
        clocks[self.clock] = self.copies
        self.bytes -= size
        self._complete(clocks)

    def _complete(self, clocks: np.ndarray) -> None:
        self._before = np.maximum(self._before, clocks)
        if self.missing == 0 and self.bytes < 0:
            self.machine.findings.add("mbarrier: more bytes are copied than are expected")
        if self.missing == 0 and self.bytes == 0:
            self.released = self._before
            self.phase, self.missing = self.phase + 1, self.count
            self.machine.completed(self.block)

    def check_at_the_end(self) -> None:
        """Note it if the kernel ends before somebody has waited for the last copy."""
        if self.copies and not self.machine.shared.has_seen(self.block, self.clock, self.copies):
            self.machine.findings.add("shared memory: the kernel ends before a bulk copy into it")


class Call(NamedTuple):
    """Threads of a warp that name one barrier."""

    barrier: MemoryBarrier
    warp: int
    lanes: np.ndarray


def calls(machine: Machine, address: np.ndarray, lanes: np.ndarray) -> list[Call]:
    """The barriers at the addresses of some threads, by warp."""
    found = []
    keys = np.stack([lanes // WARP, address[lanes]], 1)
    for warp, place in np.unique(keys, axis=0):
        of_warp = lanes[(keys == (warp, place)).all(axis=1)]
        block = int(machine.block_of[of_warp[0]])
        barrier = machine.memory_barriers.get((block, int(place)))
        if barrier is None or machine.shared.is_unseen(np.asarray([place]), 8, of_warp[:1]):
            machine.findings.add("mbarrier: used before it is made")
        if barrier is not None:
            found.append(Call(barrier, int(warp), of_warp))
    return found


def memory_barrier(machine: Machine, instruction: Instruction) -> Step:
    """``mbarrier``: made, arrived at, waited for."""
    what, operands = instruction.parts[1], instruction.operands
    if what == "try_wait":
        return _wait(machine, instruction)
    get = machine.address_getter(operands[0 if what in ("init", "inval", "expect_tx") else 1])
    number = machine.getter(operands[-1]) if operands[-1][0] not in "[_" else None

    def threads() -> np.ndarray:
        return np.arange(machine.threads)[machine.lanes]

    if what in ("init", "inval"):

        def make() -> None:
            lanes, address = threads(), get()
            value = np.zeros((len(lanes), 1), np.uint64)
            machine.shared.write(address[lanes], value, lanes)
            for lane in lanes:
                block = int(machine.block_of[lane])
                known = machine.memory_barriers
                key = block, int(address[lane])
                if what == "inval":
                    known.pop(key, None)
                    continue
                assert number is not None
                count = int(np.broadcast_to(number(), machine.threads)[lane])
                others = [barrier for barrier in known.values() if barrier.block == block]
                known[key] = MemoryBarrier(machine, block, len(others), count)

        return make
    if what != "arrive" and what != "expect_tx":
        raise UnknownInstruction(instruction.text)
    expects = "expect_tx" in instruction.parts

    def arrive() -> None:
        for barrier, warp, lanes in calls(machine, get(), threads()):
            clocks = machine.shared.published(np.asarray([warp]))[0]
            for lane in lanes:
                given = (
                    0 if number is None else int(np.broadcast_to(number(), machine.threads)[lane])
                )
                if what == "expect_tx":
                    barrier.bytes += given
                elif expects:
                    barrier.arrive(clocks, given)
                else:
                    for _ in range(given or 1):
                        barrier.arrive(clocks)

    return arrive


def _wait(machine: Machine, instruction: Instruction) -> Step:
    """``mbarrier.try_wait.parity``: threads stay at it until the phase is complete."""
    put, get = (
        machine.setter(instruction.operands[0]),
        machine.address_getter(instruction.operands[1]),
    )
    parity = machine.getter(instruction.operands[2])

    def done() -> np.ndarray:
        machine.mask = None
        address, wanted = get(), np.broadcast_to(parity(), machine.threads)
        result = np.ones(machine.threads, bool)
        for (block, place), barrier in machine.memory_barriers.items():
            here = (machine.block_of == block) & (address == place)
            result[here] = (barrier.phase & 1) != wanted[here]
        return result

    def run() -> None:
        for barrier, warp, _ in calls(machine, get(), np.arange(machine.threads)[machine.lanes]):
            machine.shared.acquire(np.asarray([warp]), barrier.released[None])
        put(np.ones(machine.threads, bool))

    machine.waits[machine.now] = done
    return run


INSTRUCTIONS = {"mbarrier": memory_barrier}
