"""Matrix products, and the loads and stores of their fragments.

A fragment is the part of a matrix that a thread holds in its registers. With g = lane / 4 and
t = lane % 4, the fragments of ``mma.m16n8k16`` are (PTX ISA, "Matrix Fragments for mma.m16n8k16"):

- A [16, 16]: rows g and g + 8, columns 2 t, 2 t + 1 and the same plus 8; two numbers a register.
- B [16, 8]: rows 2 t, 2 t + 1 and the same plus 8, column g.
- sums [16, 8]: rows g and g + 8, columns 2 t and 2 t + 1; one number a register.

``wgmma`` forms products of four warps, [64, n], whose factors lie in shared memory. It runs beside
the threads: until ``wgmma.wait_group`` its sums are not to be read, and its factors not to be
written (PTX ISA, "Asynchronous wgmma Instructions").
"""

from __future__ import annotations

import re
from functools import cache

import numpy as np

from .arithmetic import from_bfloat16
from .machine import GROUP, Machine, Step, UnknownInstruction
from .ptx import Instruction
from .shared_memory import WARP
from .transfers import elements

LANE = np.arange(WARP)
G, T = LANE // 4, LANE % 4
TF32 = np.uint32(0xFFFFE000)  # the bits of a float32 that a tf32 product reads


def numbers(bits: np.ndarray, kind: str) -> np.ndarray:
    """float32 numbers of the bits of a factor: "bf16", "f16" or "tf32"."""
    if kind == "bf16":
        return from_bfloat16(bits)
    if kind == "f16":
        return bits.astype(np.uint16).view(np.float16).astype(np.float32)
    if kind == "tf32":
        return (bits & TF32).view(np.float32)
    raise UnknownInstruction(f"factors of type {kind}")


def halves(bits: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """The lower and upper number of every register of two."""
    low = (bits & np.uint32(0xFFFF)).astype(np.uint16)
    return numbers(low, kind), numbers((bits >> np.uint32(16)).astype(np.uint16), kind)


def product(a: np.ndarray, b: np.ndarray, sums: np.ndarray) -> np.ndarray:
    """a @ b + sums, rounded to float32 once."""
    return (a.astype(np.float64) @ b.astype(np.float64) + sums).astype(np.float32)


def _by_warp(machine: Machine, get) -> np.ndarray:
    return np.broadcast_to(get(), machine.threads).reshape(-1, WARP)


def _load_fragment(machine: Machine, getters, kind: str, depth: int) -> np.ndarray:
    """The factor A [warps, 16, depth] of registers as ``mma`` takes it."""
    fragment = np.zeros((machine.threads // WARP, 16, depth), np.float32)
    for i, get in enumerate(getters):
        bits, row = _by_warp(machine, get), G + 8 * (i & 1)
        if kind == "tf32":
            fragment[:, row, T + 4 * (i >> 1)] = numbers(bits, kind)
        else:
            column = 2 * T + 8 * (i >> 1)
            fragment[:, row, column], fragment[:, row, column + 1] = halves(bits, kind)
    return fragment


def multiply(machine: Machine, instruction: Instruction) -> Step:
    """``mma.sync``: a product of one warp."""
    parts = instruction.parts
    shape, kind = parts[3], parts[7]
    depth = int(shape.rpartition("k")[2])
    if not shape.startswith("m16n8k") or parts[6] != "f32":
        raise UnknownInstruction(instruction.text)
    puts = [machine.setter(register) for register in elements(instruction.operands[0])]
    a, b, c = (
        [machine.getter(register) for register in elements(operand)]
        for operand in instruction.operands[1:4]
    )

    def run() -> None:
        warps = machine.threads // WARP
        first = _load_fragment(machine, a, kind, depth)
        second = np.zeros((warps, depth, 8), np.float32)
        for i, get in enumerate(b):
            bits = _by_warp(machine, get)
            if kind == "tf32":
                second[:, T + 4 * i, G] = numbers(bits, kind)
            else:
                row = 2 * T + 8 * i
                second[:, row, G], second[:, row + 1, G] = halves(bits, kind)
        sums = np.zeros((warps, 16, 8), np.float32)
        for i, get in enumerate(c):
            sums[:, G + 8 * (i >> 1), 2 * T + (i & 1)] = _by_warp(machine, get).view(np.float32)
        after = product(first, second, sums)
        for i, put in enumerate(puts):
            of_thread = after[:, G + 8 * (i >> 1), 2 * T + (i & 1)]
            put(np.ascontiguousarray(of_thread).reshape(-1).view(np.uint32))

    return run


def _row_addresses(machine: Machine, get, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Addresses of the rows of `count` 8 x 8 tiles [warps, count * 8], and the threads they are of.

    Thread i gives the address of row i % 8 of tile i / 8.
    """
    lanes = np.arange(machine.threads).reshape(-1, WARP)[:, : 8 * count]
    return get()[lanes], lanes


def load_matrices(machine: Machine, instruction: Instruction) -> Step:
    """``ldmatrix``: tiles of 8 rows of 16 bytes, as fragments."""
    puts = [machine.setter(register) for register in elements(instruction.operands[0])]
    get, transposed = machine.address_getter(instruction.operands[1]), "trans" in instruction.parts

    def run() -> None:
        warps = machine.active_warps()
        address, lanes = _row_addresses(machine, get, len(puts))
        rows = np.zeros((len(warps), 8 * len(puts), 8), np.uint16)
        tiles = machine.shared.read(address[warps].reshape(-1), 2, 8, lanes[warps].reshape(-1))
        rows[warps] = tiles.reshape(-1, 8 * len(puts), 8)
        for i, put in enumerate(puts):
            tile = rows[:, 8 * i : 8 * i + 8]
            if transposed:
                low, high = tile[:, 2 * T, G], tile[:, 2 * T + 1, G]
            else:
                low, high = tile[:, G, 2 * T], tile[:, G, 2 * T + 1]
            put((low.astype(np.uint32) | high.astype(np.uint32) << np.uint32(16)).reshape(-1))

    return run


def store_matrices(machine: Machine, instruction: Instruction) -> Step:
    """``stmatrix``: the inverse of ``ldmatrix``."""
    getters = [machine.getter(register) for register in elements(instruction.operands[1])]
    get, transposed = machine.address_getter(instruction.operands[0]), "trans" in instruction.parts

    def run() -> None:
        warps = machine.active_warps()
        address, lanes = _row_addresses(machine, get, len(getters))
        rows = np.zeros((len(warps), 8 * len(getters), 8), np.uint16)
        for i, register in enumerate(getters):
            bits, tile = _by_warp(machine, register), rows[:, 8 * i : 8 * i + 8]
            low, high = bits.astype(np.uint16), (bits >> np.uint32(16)).astype(np.uint16)
            if transposed:
                tile[:, 2 * T, G], tile[:, 2 * T + 1, G] = low, high
            else:
                tile[:, G, 2 * T], tile[:, G, 2 * T + 1] = low, high
        values = rows[warps].reshape(-1, 8)
        machine.shared.write(address[warps].reshape(-1), values, lanes[warps].reshape(-1))

    return run


# Products of four warps

SWIZZLES = {0: 0, 1: 128, 2: 64, 3: 32}  # bytes of the rows whose chunks are exchanged


@cache
def places(descriptor: int, rows: int, columns: int, size: int, transposed: bool) -> np.ndarray:
    """Bytes of shared memory at which a factor's elements [rows, columns] lie.

    Args:
        descriptor: 64 bits (PTX ISA, "Matrix Descriptor Format").
        rows: along m or n. columns: along k.
        size: bytes of an element.
        transposed: neighbours in memory are neighbours along m or n, not along k.

    Example:
        Without a swizzle, tiles of 8 rows of 16 bytes follow each other:

        >>> places((8 << 32) | (64 << 16), 64, 16, 2, False)[1, :9]
        array([  16,   18,   20,   22,   24,   26,   28,   30, 1040])
    """
    start = (descriptor & 0x3FFF) << 4
    leading, stride = (descriptor >> 16 & 0x3FFF) << 4, (descriptor >> 32 & 0x3FFF) << 4
    if descriptor >> 49 & 7:
        raise UnknownInstruction("a descriptor with a base offset")
    width = SWIZZLES[descriptor >> 62 & 3]
    row, column = np.arange(rows)[:, None], np.arange(columns)[None, :] * size
    if transposed:
        row, column = row * size, column // size
        if width:  # k: eight rows of `width` bytes; m or n: along such a row, then `leading`
            place = row // width * leading + row % width
            place = place + column // 8 * stride + column % 8 * width
        else:
            place = row // 16 * stride + row % 16 + column // 8 * leading + column % 8 * 16
    elif width:
        place = row // 8 * stride + row % 8 * width + column
    else:
        place = row // 8 * stride + row % 8 * 16 + column // 16 * leading + column % 16
    place = place + start
    if width:  # chunks of 16 bytes change places, by the number of their row of 128 bytes
        place = place ^ (place >> 7 & width // 16 - 1) << 4
    return place


def group_product(machine: Machine, instruction: Instruction) -> Step:
    """``wgmma``: products of four warps, and what they wait for."""
    name = instruction.name
    if name.startswith("wgmma.fence"):

        def fence() -> None:
            machine.fenced = machine.executed

        return fence
    if name.startswith("wgmma.commit_group"):

        def commit() -> None:
            for group in machine.active_groups():
                machine.products[group].append(machine.open_products[group])
                machine.open_products[group] = []

        return commit
    if name.startswith("wgmma.wait_group"):
        keep = int(instruction.operands[0])

        def wait() -> None:
            for group in machine.active_groups():
                started = machine.products[group]
                done = started[: max(0, len(started) - keep)]
                machine.products[group] = started[len(done) :]
                for units, _ in (one for some in done for one in some):
                    machine.shared.end_product(units, group * GROUP)
            left = (one for groups in machine.products for group in groups for one in group)
            machine.busy = {slot for _, slots in left for slot in slots}

        return wait
    return _group_product(machine, instruction)


def _group_product(machine: Machine, instruction: Instruction) -> Step:
    match = re.search(r"\.m64n(\d+)k(\d+)\.f32\.(\w+)\.(\w+)$", instruction.name)
    if match is None:
        raise UnknownInstruction(instruction.text)
    n, k, kind = int(match[1]), int(match[2]), match[3]
    size = 4 if kind == "tf32" else 2
    operands = instruction.operands
    registers = elements(operands[0])
    puts, sums = [machine.setter(r) for r in registers], [machine.getter(r) for r in registers]
    from_registers = operands[1].startswith("{")
    first = elements(operands[1]) if from_registers else [operands[1]]
    a = [machine.getter(r, 32 if from_registers else 64) for r in first]
    b, adds = machine.getter(operands[2], 64), machine.getter(operands[3])
    signs = [int(o) for o in operands[4:6]]
    turned = [o == "1" for o in operands[6:]]  # A (if it is in shared memory) and B
    a_turned = bool(turned and not from_registers and turned[0])
    b_turned = bool(turned and turned[-1])
    if signs != [1, 1]:
        raise UnknownInstruction(instruction.text)
    # Registers that no thread may touch while the product runs.
    slots = [machine.slot(r) for r in registers]
    read = slots + ([machine.slot(r) for r in first] if from_registers else [])

    def from_shared(get, rows: int, transposed: bool, lanes: np.ndarray):
        descriptors = np.broadcast_to(get(), machine.threads)[lanes]
        where = np.stack([places(int(d), rows, k, size, transposed) for d in descriptors])
        where = where.reshape(len(lanes), -1)
        units = machine.shared.begin_product(where, lanes)
        bits = machine.shared.gather_product(where, lanes, size)
        return numbers(bits, kind).reshape(len(lanes), rows, k), units

    def run() -> None:
        groups = machine.active_warps().reshape(-1, 4)[:, 0]
        lanes = np.nonzero(groups)[0] * GROUP
        if max(machine.written[slot] for slot in read) > machine.fenced:
            machine.findings.add("wgmma: a register was written after wgmma.fence")
        units = []
        if from_registers:
            fragment = _load_fragment(machine, a, kind, k)
            left = fragment.reshape(-1, 64, k)[groups]
        else:
            left, touched = from_shared(a[0], 64, a_turned, lanes)
            units.append(touched)
        right, touched = from_shared(b, n, b_turned, lanes)
        units.append(touched)
        before = np.zeros((machine.threads // WARP, 16, n), np.float32)
        for i, get in enumerate(sums):
            bits = _by_warp(machine, get).view(np.float32)
            before[:, G + 8 * (i >> 1 & 1), 8 * (i >> 2) + 2 * T + (i & 1)] = bits
        before = before.reshape(-1, 64, n)
        keeps = np.broadcast_to(adds(), machine.threads).reshape(-1, GROUP)[:, 0]
        after = before.copy()
        start = np.where(keeps[groups][:, None, None], before[groups], 0)
        after[groups] = product(left, right.transpose(0, 2, 1), start)
        after = after.reshape(-1, 16, n)
        for i, put in enumerate(puts):
            touched = after[:, G + 8 * (i >> 1 & 1), 8 * (i >> 2) + 2 * T + (i & 1)]
            put(np.ascontiguousarray(touched).reshape(-1).view(np.uint32))
        for slot in slots:
            machine.written[slot] = machine.fenced  # products follow each other in order
        for i, lane in enumerate(lanes):
            touched = np.concatenate([of_groups[i] for of_groups in units])
            machine.open_products[lane // GROUP].append((touched, frozenset(read)))
        machine.busy |= set(read)

    return run


INSTRUCTIONS = {
    "mma": multiply, "ldmatrix": load_matrices, "stmatrix": store_matrices, "wgmma": group_product,
}  # fmt: skip
