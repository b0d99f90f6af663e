"""Loads, stores and asynchronous copies (PTX ISA, "Data Movement and Conversion Instructions")."""

from __future__ import annotations

import re

import numpy as np

from .bulk_copies import bulk_copy
from .global_memory import UNSIGNED
from .machine import DTYPES, Machine, Step, UnknownInstruction
from .ptx import Instruction, split

SIGNED = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}


def elements(operand: str) -> list[str]:
    """The registers of ``{%r1, %r2}``, or of ``%r1``."""
    return split(operand[1:-1]) if operand.startswith("{") else [operand]


def load(machine: Machine, instruction: Instruction) -> Step:
    """``ld``: of a parameter, of device memory, of shared memory."""
    parts = instruction.parts
    kind, targets = parts[-1], elements(instruction.operands[0])
    puts = [machine.setter(target) for target in targets]
    widths = [8 if t == "_" else np.dtype(machine.dtype(t)).itemsize for t in targets]
    size = np.dtype(DTYPES[kind]).itemsize
    if parts[1] == "param":
        match = re.match(r"\[\w+_param_(\d+)\]", instruction.operands[1])
        assert match is not None, instruction.text
        number, width = int(match[1]), widths[0]

        def load_parameter() -> None:
            bits = machine.arguments[number] & ((1 << 8 * size) - 1)
            puts[0](np.asarray(bits, UNSIGNED[width]))

        return load_parameter
    get, space = machine.address_getter(instruction.operands[1]), _space(machine, instruction)

    def run() -> None:
        lanes = machine.lanes
        address = get()[lanes]
        if space == "shared":
            values = machine.shared.read(address, size, len(puts), lanes)
        elif space == "local":
            threads, where = _local_places(machine, address, size * len(puts), lanes)
            values = machine.local[threads, where].view(UNSIGNED[size])
        else:
            values = machine.memory.read(address, size, len(puts), machine.stamps())
        for i, (put, width) in enumerate(zip(puts, widths, strict=True)):
            value = values[:, i]
            if width > size:
                value = value.view(SIGNED[size]) if kind[0] == "s" else value
                value = value.astype(SIGNED[width]).view(UNSIGNED[width])
            put(_to_all(machine, value))

    return run


def _space(machine: Machine, instruction: Instruction) -> str:
    """The memory that a load or store goes to."""
    space = instruction.parts[1].removesuffix("::cta")
    if space in DTYPES:  # any memory: Triton's kernels have local addresses only where they need it
        space = "local" if machine.program.local_bytes else "global"
    if space not in ("global", "shared", "local"):
        raise UnknownInstruction(instruction.text)
    return space


def _local_places(machine: Machine, address: np.ndarray, size: int, lanes):
    """Threads [k, 1] and bytes [k, size] of accesses to their own memory."""
    if len(address) and (address.min() < 0 or address.max() + size > machine.program.local_bytes):
        machine.findings.add("local memory: out of bounds")
        address = np.clip(address, 0, machine.program.local_bytes - size)
    threads = np.arange(machine.threads)[lanes]
    return threads[:, None], address[:, None] + np.arange(size)


def _to_all(machine: Machine, value: np.ndarray) -> np.ndarray:
    """Numbers of the executing threads, as an array of all threads."""
    if machine.mask is None:
        return np.ascontiguousarray(value)
    of_all = np.zeros(machine.threads, value.dtype)
    of_all[machine.mask] = value
    return of_all


def store(machine: Machine, instruction: Instruction) -> Step:
    """``st``: to device memory, to shared memory."""
    parts = instruction.parts
    size = np.dtype(DTYPES[parts[-1]]).itemsize
    get = machine.address_getter(instruction.operands[0])
    getters = [machine.getter(o, 8 * size) for o in elements(instruction.operands[1])]
    space = _space(machine, instruction)

    def run() -> None:
        lanes = machine.lanes
        address = get()[lanes]
        values = np.empty((len(address), len(getters)), UNSIGNED[size])
        for i, value in enumerate(getters):
            bits = value()
            values[:, i] = bits if bits.ndim == 0 else bits[lanes]
        if space == "shared":
            machine.shared.write(address, values, lanes)
        elif space == "local":
            threads, where = _local_places(machine, address, size * len(getters), lanes)
            machine.local[threads, where] = values.view(np.uint8)
        else:
            machine.memory.write(address, values, machine.stamps())

    return run


def copy(machine: Machine, instruction: Instruction) -> Step:
    """``cp.async``: copies from device memory to shared memory that run beside the threads."""
    name = instruction.name
    if name == "cp.async.commit_group":
        return lambda: _commit(machine)
    if name in ("cp.async.wait_group", "cp.async.wait_all"):
        keep = int(instruction.operands[0]) if instruction.operands else 0

        def wait() -> None:
            if name.endswith("wait_all"):
                _commit(machine)
            for block in machine.active_block_numbers():
                groups = machine.copies[block]
                done = groups[: max(0, len(groups) - keep)]
                machine.copies[block] = groups[len(done) :]
                for place, values, lanes in (copy for group in done for copy in group):
                    machine.shared.end_copy(place, values, lanes)

        return wait
    if name.startswith("cp.async.bulk."):
        return bulk_copy(machine, instruction)
    if not name.startswith(("cp.async.ca.", "cp.async.cg.")):
        raise UnknownInstruction(instruction.text)
    operands = instruction.operands
    to, source = (machine.address_getter(operand) for operand in operands[:2])
    size = int(operands[2], 0)
    given = machine.getter(operands[3]) if len(operands) > 3 else None

    def run() -> None:
        lanes = machine.lanes
        lanes = np.arange(machine.threads) if isinstance(lanes, slice) else lanes
        place = machine.shared.begin_copy(to()[lanes], size, lanes)
        values = np.zeros((len(lanes), size), np.uint8)  # beyond the bytes that are read: zeros
        read = np.full(len(lanes), size)
        if given is not None:
            bits = given()
            read = np.broadcast_to(bits, machine.threads)[lanes].astype(np.int64)
            if not np.isin(read, (0, size)).all():
                machine.findings.add("cp.async: part of a chunk")
        reads = read > 0
        if reads.any():
            stamps = machine.stamps()[reads]
            words = machine.memory.read(source()[lanes][reads], 4, size // 4, stamps)
            values[reads] = np.ascontiguousarray(words).view(np.uint8)
        blocks = machine.block_of[lanes]
        for block in np.unique(blocks):
            of_block = blocks == block
            machine.open_copies[block].append((place[of_block], values[of_block], lanes[of_block]))

    return run


def _commit(machine: Machine) -> None:
    """Make a group of the copies that began since the last one."""
    for block in machine.active_block_numbers():
        machine.copies[block].append(machine.open_copies[block])
        machine.open_copies[block] = []


INSTRUCTIONS = {"ld": load, "st": store, "cp": copy}
