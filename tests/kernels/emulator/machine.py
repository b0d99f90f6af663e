"""The machine: threads of several blocks, their registers, and the order in which they run.

All threads of a batch of blocks are NumPy arrays and run in step, one instruction after another.
Where threads take different ways, those at the lowest address run first, and others wait; threads
that arrive at one address run on together. An instruction that several threads execute as one (a
barrier, a shuffle, a matrix product) runs when all threads that it needs have arrived. Warps may
meet at one named barrier from different instructions, and wait for an ``mbarrier`` until its phase
is complete.

An instruction is translated once into a function without arguments (by the tables `INSTRUCTIONS` of
the modules beside this one), so that executing it costs little more than NumPy's own work.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .findings import Findings
from .global_memory import BLOCK, EPOCH, UNSIGNED, GlobalMemory
from .ptx import Instruction, Program
from .shared_memory import WARP, SharedMemory

Step = Callable[[], None]
DTYPES = {
    "pred": np.bool_, "b8": np.uint8, "b16": np.uint16, "u16": np.uint16, "s16": np.uint16,
    "b32": np.uint32, "u32": np.uint32, "s32": np.uint32, "f32": np.uint32,
    "b64": np.uint64, "u64": np.uint64, "s64": np.uint64, "f64": np.uint64,
}  # fmt: skip
PARAMETERS = 1 << 12  # the address of parameter 0; that of the next is one more
UNDEFINED = 0x7FBADBAD  # what registers hold that nothing has written: NaN as a float32
GROUP = 4 * WARP  # threads that form a matrix product of wgmma together
# How many threads must have arrived before an instruction runs, by the beginning of its name.
SCOPES = {
    # 0: all threads of the block. Triton's warps copy together, and groups are counted by block.
    "cp.async.commit_group": 0,
    "cp.async.wait": 0,
    "wgmma.": GROUP,
    "bar.warp.sync": WARP,
    "shfl.sync": WARP,
    "redux.sync": WARP,
    "vote.sync": WARP,
    "mma.sync": WARP,
    "ldmatrix.sync": WARP,
    "stmatrix.sync": WARP,
    "elect.sync": WARP,
}
JUMPS = ("bra", "brx", "ret", "exit")
BARRIERS = ("bar.sync", "barrier.sync")


class UnknownInstruction(Exception):
    """The emulator has no translation of an instruction."""


class Machine:
    """A kernel that is ready to run.

    Args:
        program: its instructions.
        num_warps: warps of a block.
        shared_bytes: shared memory of a block.
        instructions: translations, by the first part of an instruction's name.
    """

    def __init__(
        self,
        program: Program,
        num_warps: int,
        shared_bytes: int,
        instructions: dict[str, Callable[[Machine, Instruction], Step]],
    ) -> None:
        self.program, self.num_warps, self.shared_bytes = program, num_warps, shared_bytes
        self.block_threads = num_warps * WARP
        # Warps run in step, or, to look for what only their order hides, one after another as far
        # as they can: those with the lowest numbers first (1), or the highest (-1).
        self.order = 0
        self.findings = Findings(lambda: program.code[self.now].text)
        self.executed = 0  # instructions, each for a whole batch
        self._slots: dict[str, int] = {}
        self._dtypes: list[type] = []
        self.registers: list[np.ndarray] = []
        self.written: list[int] = []  # when a register was written, in executed instructions
        # Where threads wait for something: a function that says for whom it is done, [threads].
        self.waits: dict[int, Callable[[], np.ndarray]] = {}
        self.now = 0  # the number of the instruction that is executed
        self.mask: np.ndarray | None = None  # threads that execute it; None: all
        self.unit = _least_access(program)
        self.steps = []
        for place, instruction in enumerate(program.code):
            self.now = place
            self.steps.append(self._translate(instruction, instructions))
        self.scopes = [self._scope(i) for i in program.code]
        # Where threads meet at a barrier: its name, and of how many threads.
        self.meetings = [self._meeting(i) for i in program.code]
        self.touched = [self._touched(i) for i in program.code]
        self._ends = self._straight_lines()

    # Registers and operands, for translations

    def slot(self, name: str) -> int:
        """The place of a register in `registers`."""
        if name not in self._slots:
            kind = self.program.types.get(name)
            if kind is None:
                beginning = re.match(r"%[a-zA-Z_]+", name)
                kind = self.program.types[beginning[0] if beginning else name]
            self._slots[name] = len(self._dtypes)
            self._dtypes.append(DTYPES[kind])
        return self._slots[name]

    def dtype(self, name: str) -> type:
        """The dtype that the bits of a register are kept in."""
        return self._dtypes[self.slot(name)]

    def getter(self, operand: str, bits: int = 32) -> Callable[[], np.ndarray]:
        """A function that returns an operand's bits: an array of all threads, or one number."""
        if operand in SPECIAL:
            special = SPECIAL[operand]
            return lambda: getattr(self, special)
        if match := re.fullmatch(r"\w+_param_(\d+)", operand):
            number = np.asarray(PARAMETERS + int(match[1]), UNSIGNED[bits // 8])
            return lambda: number
        if operand[0] == "%":
            slot, registers = self.slot(operand), self.registers
            return lambda: registers[slot]
        if operand[:2] in ("0f", "0F"):
            number = np.asarray(int(operand[2:], 16), np.uint32)
        elif operand[:2] in ("0d", "0D"):
            number = np.asarray(int(operand[2:], 16), np.uint64)
        elif operand in ("global_smem", "__local_depot0"):
            number = np.asarray(0, UNSIGNED[bits // 8])  # shared and local memory begin at 0
        else:
            number = np.asarray(
                int(operand.rstrip("U"), 0) & ((1 << bits) - 1), UNSIGNED[bits // 8]
            )
        return lambda: number

    def setter(self, operand: str) -> Callable[[np.ndarray], None]:
        """A function that writes a register of the threads that execute an instruction."""
        if operand == "_":
            return lambda value: None
        slot, registers, written = self.slot(operand), self.registers, self.written
        dtype = np.dtype(self._dtypes[slot])

        def put(value: np.ndarray) -> None:
            if value.dtype != dtype:
                if value.dtype.itemsize == dtype.itemsize and dtype.kind != "b":
                    value = value.view(dtype)
                else:
                    value = value.astype(dtype)
            if self.mask is not None:
                value = np.where(self.mask, value, registers[slot])
            elif value.ndim == 0:
                value = np.full(self.threads, value, dtype)
            registers[slot] = value
            written[slot] = self.executed

        return put

    def address_getter(self, operand: str) -> Callable[[], np.ndarray]:
        """A function that returns the addresses ``[%rd1+8]``, int64 of all threads."""
        match = re.match(r"\[\s*([%\w]+)\s*(?:\+\s*(-?\w+))?\s*\]", operand)
        if match is None:
            raise UnknownInstruction(f"address {operand}")
        base, offset = self.getter(match[1], 64), int(match[2] or "0", 0)

        def get() -> np.ndarray:
            value = base().astype(np.int64)
            if value.ndim == 0:
                value = np.full(self.threads, value)
            return value + offset if offset else value

        return get

    @property
    def lanes(self) -> np.ndarray | slice:
        """The numbers of the threads that execute the instruction; a slice if all do."""
        return slice(None) if self.mask is None else np.nonzero(self.mask)[0]

    def stamps(self) -> np.ndarray:
        """The executing threads as device memory notes them, int64 [k]."""
        return self._stamps[self.lanes]

    def stamps_of(self, lane: int) -> int:
        """One thread as device memory notes it."""
        return int(self._stamps[lane])

    # Translation

    def _translate(self, instruction: Instruction, instructions) -> Step:
        kind = instruction.parts[0]
        if kind in JUMPS:
            return lambda: None  # `_run_batch` does it
        if kind not in instructions:
            raise UnknownInstruction(instruction.text)
        try:
            step = instructions[kind](self, instruction)
        except (KeyError, IndexError, ValueError) as error:
            raise UnknownInstruction(f"{instruction.text}: {error!r}") from error
        if instruction.guard is None:
            return step
        get, negated = self.getter(instruction.guard), instruction.negated

        def guarded() -> None:
            before, guard = self.mask, get()
            guard = ~guard if negated else guard
            mask = guard if before is None else before & guard
            if mask.all():
                step()
            elif mask.any():
                self.mask = mask
                step()
                self.mask = before

        return guarded

    def _scope(self, instruction: Instruction) -> int | None:
        """How many threads execute an instruction as one; None: each for itself."""
        for beginning, scope in SCOPES.items():
            if instruction.name.startswith(beginning):
                return scope or self.block_threads
        return None

    def _meeting(self, instruction: Instruction) -> tuple[int, int] | None:
        """The barrier at which threads meet, and how many of them; 0: all of the block."""
        if not instruction.name.startswith(BARRIERS):
            return None
        name, *count = (int(operand, 0) for operand in instruction.operands)
        return name, count[0] if count else 0

    def _touched(self, instruction: Instruction) -> frozenset[int]:
        """The registers that an instruction reads or writes, but for those of a matrix product."""
        if instruction.parts[0] == "wgmma":
            return frozenset()
        names = re.findall(r"%\w+", " ".join((instruction.guard or "", *instruction.operands)))
        return frozenset(self._slots[name] for name in names if name in self._slots)

    def _straight_lines(self) -> list[int]:
        """Find, for every instruction, the next one at which threads may part, meet or wait."""
        code = self.program.code
        stops = set(self.program.labels.values()) | {len(code)}
        for place, instruction in enumerate(code):
            meets = self.scopes[place] or self.meetings[place] or place in self.waits
            if instruction.parts[0] in JUMPS or meets:
                stops.add(place)
        ends, stop = [0] * len(code), len(code)
        for place in reversed(range(len(code))):
            ends[place] = stop
            if place in stops:
                stop = place
        return ends

    # Execution

    def run(
        self,
        grid: Sequence[int],
        arguments: Sequence[int],
        memory: GlobalMemory,
        blocks: Sequence[int],
    ) -> None:
        """Run blocks, all at once.

        Args:
            grid: blocks in each dimension.
            arguments: bits of the parameters, in order.
            memory: what the kernel may touch.
            blocks: the numbers of the blocks to run, from 0.
        """
        count = len(blocks)
        self.blocks, self.threads = count, count * self.block_threads
        self.memory, self.arguments = memory, arguments
        self.shared = SharedMemory(
            count, self.shared_bytes, self.num_warps, self.unit, self.findings
        )
        thread = np.arange(self.threads)
        self.block_of = thread // self.block_threads
        self.tid = (thread % self.block_threads).astype(np.uint32)
        self.lane = self.tid % np.uint32(WARP)
        number = np.asarray(blocks)[self.block_of]
        sizes = (*grid, 1, 1)[:3]
        self.ctaid_x = (number % sizes[0]).astype(np.uint32)
        self.ctaid_y = (number // sizes[0] % sizes[1]).astype(np.uint32)
        self.ctaid_z = (number // (sizes[0] * sizes[1])).astype(np.uint32)
        self.nctaid_x, self.nctaid_y, self.nctaid_z = (np.asarray(n, np.uint32) for n in sizes)
        self.ntid_x, self.zero = np.asarray(self.block_threads, np.uint32), np.uint32([0])[0]
        self._stamps = number.astype(np.int64) << BLOCK | (self.tid // WARP).astype(np.int64)
        self.local = np.full((self.threads, self.program.local_bytes), 0xFF, np.uint8)
        self.copies: list[list[list]] = [[] for _ in blocks]  # groups of copies by block
        self.open_copies: list[list] = [[] for _ in blocks]
        # Matrix products that run, in the same way, by group of four warps: units of shared memory
        # that one reads, and its registers.
        groups = -(-self.threads // GROUP)
        self.products: list[list[list]] = [[] for _ in range(groups)]
        self.open_products: list[list] = [[] for _ in range(groups)]
        self.busy: set[int] = set()  # registers of these products
        self.fenced = -1  # when wgmma.fence was last executed
        self.memory_barriers: dict[tuple[int, int], Any] = {}  # by block and address
        self.blocked = np.zeros(self.threads, bool)  # threads that cannot go on
        self.waiting = np.zeros(self.threads, bool)  # those of them that wait for an mbarrier
        self.met = np.full(self.threads, -1)  # the barrier that a thread has come to
        undefined = {
            np.dtype(d): np.zeros(self.threads, d)
            if d is np.bool_
            else np.full(self.threads, UNDEFINED & (2 ** (8 * np.dtype(d).itemsize) - 1), d)
            for d in set(self._dtypes)
        }
        self.registers[:] = [undefined[np.dtype(d)] for d in self._dtypes]
        self.written[:] = [-1] * len(self._dtypes)
        self.mask = None
        with np.errstate(all="ignore"):
            self._run_batch()
        if any(self.open_copies) or any(any(groups) for groups in self.copies):
            self.findings.add("shared memory: the kernel ends before a copy into it")
        if any(self.open_products) or any(any(groups) for groups in self.products):
            self.findings.add("wgmma: the kernel ends before a product")
        for barrier in self.memory_barriers.values():
            barrier.check_at_the_end()

    def _run_batch(self) -> None:
        code, steps, ends, labels = self.program.code, self.steps, self._ends, self.program.labels
        end = len(code)
        place: int = 0
        places: np.ndarray | None = None  # of every thread, where they differ
        warp = self.order * (self.tid // WARP).astype(np.int64)
        if self.order:
            places = np.zeros(self.threads, np.int64)
        while True:
            if places is not None:
                alive = places < end
                if not alive.any():
                    return
                ready = alive & ~self.blocked
                if not ready.any():
                    # Nobody can go on: threads wait for each other at different places.
                    self.now = int(places[alive].min())
                    self.findings.add(
                        "threads wait for a phase of an mbarrier that nobody completes"
                        if self.now in self.waits
                        else "threads wait for each other at different places"
                    )
                    return
                if self.order:
                    first = ready & (warp == warp[ready].min())
                    place = int(places[first].min())
                    active = alive & (places == place) & (first | self.blocked)
                else:
                    place = int(places[ready].min())
                    active = alive & (places == place)
                scope = self.scopes[place]
                if scope is not None:
                    complete = (active | ~alive).reshape(-1, scope).all(axis=1).repeat(scope)
                    self.blocked = self.blocked & ~(active & complete) | active & ~complete
                    active = active & complete
                    if not active.any():
                        continue
                elif place in self.waits:
                    done = self.waits[place]()
                    self.waiting |= active & ~done
                    self.blocked |= active & ~done
                    active = active & done
                    if not active.any():
                        continue
                elif self.meetings[place] is not None:
                    self.now = place
                    places = self._meet(places, active & ~self.blocked, alive)
                    continue
                if active.all() and not self.order:
                    places, self.mask = None, None
                else:
                    self.mask = active
            elif place in self.waits or self._is_of_some(place):
                places = np.full(self.threads, place)
                continue
            if place == end:
                return
            self.now = place
            kind = code[place].parts[0]
            if kind == "brx":
                self.executed += 1
                places = np.full(self.threads, place) if places is None else places
                places = np.where(
                    True if self.mask is None else self.mask, self._chosen(code[place]), places
                )
                continue
            if kind in JUMPS:
                target = labels[code[place].operands[0]] if kind == "bra" else end
                taken = self._guard(code[place])
                self.executed += 1
                if places is None:
                    if taken is None or taken.all():
                        place = target
                    elif not taken.any():
                        place += 1
                    else:
                        places = np.where(taken, target, place + 1)
                else:
                    goal = target if taken is None else np.where(taken, target, place + 1)
                    places = np.where(self.mask, goal, places)
                continue
            stop = ends[place]
            for self.now in range(place, stop):
                self.executed += 1
                if self.busy and self.busy & self.touched[self.now]:
                    self._check_busy(self.touched[self.now])
                steps[self.now]()
            if places is None:
                place = stop
            else:
                places = np.where(self.mask, stop, places)

    def _is_of_some(self, place: int) -> bool:
        """Whether a place is a barrier of some warps of a block only."""
        meeting = self.meetings[place] if place < len(self.meetings) else None
        return meeting is not None and 0 < meeting[1] < self.block_threads

    def _meet(self, places: np.ndarray, arriving: np.ndarray, alive: np.ndarray) -> np.ndarray:
        """Threads come to a barrier. Those of blocks in which it is complete go on."""
        meeting = self.meetings[self.now]
        assert meeting is not None
        name, count = meeting
        self.met[arriving], self.blocked[arriving] = name, True
        here = (self.met == name).reshape(self.blocks, -1)
        needed = count or alive.reshape(self.blocks, -1).sum(axis=1)
        met = (here & (here.sum(axis=1) >= needed)[:, None]).reshape(-1)
        if met.any():
            self.executed += 1
            self.mask = met
            self.barrier()
            self.met[met], self.blocked[met] = -1, False
        return np.where(met, places + 1, places)

    def _chosen(self, instruction: Instruction) -> np.ndarray:
        """The place that ``brx.idx`` chooses, of every thread."""
        labels = self.program.tables[instruction.operands[1]]
        places = np.array([self.program.labels[label] for label in labels])
        number = self.getter(instruction.operands[0])()
        return places[np.minimum(number, len(places) - 1)]

    def _check_busy(self, touched: frozenset[int]) -> None:
        """Note it if a group touches registers of a product of its own that still runs."""
        for group in self.active_groups():
            products = (*self.products[group], self.open_products[group])
            if any(touched & slots for some in products for _, slots in some):
                self.findings.add("wgmma: a register is touched before the product is done")

    def _guard(self, instruction: Instruction) -> np.ndarray | None:
        if instruction.guard is None:
            return None
        value = self.registers[self.slot(instruction.guard)]
        return ~value if instruction.negated else value

    # Synchronization, for translations

    def active_block_numbers(self) -> Sequence[int]:
        """The numbers, within the batch, of the blocks that execute the instruction."""
        return self._active(self.blocks)

    def active_groups(self) -> Sequence[int]:
        """The numbers, within the batch, of the groups of four warps that execute it."""
        return self._active(len(self.products))

    def _active(self, parts: int) -> Sequence[int]:
        if self.mask is None:
            return range(parts)
        active = self.mask.reshape(parts, -1).any(axis=1)
        return [int(i) for i in np.nonzero(active)[0]]

    def active_warps(self) -> np.ndarray:
        """The warps that execute the instruction, bool [blocks * warps]."""
        if self.mask is None:
            return np.ones(self.threads // WARP, bool)
        return self.mask.reshape(-1, WARP).any(axis=1)

    def barrier(self) -> None:
        """The threads that execute the instruction wait for those of their block."""
        warps = self.active_warps()
        self.shared.barrier(warps)
        if self._is_of_some(self.now):
            return  # of device memory, only barriers of whole blocks are watched
        met = warps.reshape(self.blocks, -1).any(axis=1)
        passed = np.where(met[self.block_of], 1 << EPOCH, 0)
        self._stamps = self._stamps + passed  # a new array: lists of accesses refer to the old

    def completed(self, block: int) -> None:
        """A phase of an mbarrier of a block is complete: those who wait for one look again."""
        of_block = self.waiting & (self.block_of == block)
        self.waiting[of_block] = self.blocked[of_block] = False


SPECIAL = {
    "%tid.x": "tid", "%tid.y": "zero", "%tid.z": "zero", "%laneid": "lane", "%ntid.x": "ntid_x",
    "%ctaid.x": "ctaid_x", "%ctaid.y": "ctaid_y", "%ctaid.z": "ctaid_z",
    "%nctaid.x": "nctaid_x", "%nctaid.y": "nctaid_y", "%nctaid.z": "nctaid_z",
}  # fmt: skip


def _least_access(program: Program) -> int:
    """The least bytes of shared memory that an instruction accesses, at most 16."""
    least = 16
    for instruction in program.code:
        parts = instruction.parts
        if parts[0] in ("ld", "st") and parts[1].startswith("shared"):
            vector = next((int(p[1:]) for p in parts if re.fullmatch(r"v\d", p)), 1)
            least = min(least, vector * int(re.sub(r"\D", "", parts[-1])) // 8)
        elif instruction.name.startswith("cp.async.c") and len(instruction.operands) > 2:
            least = min(least, int(instruction.operands[2], 0))
    return least
