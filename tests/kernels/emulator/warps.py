"""Instructions that threads execute together: barriers, shuffles, reductions, votes."""

from __future__ import annotations

import numpy as np

from .machine import Machine, Step
from .ptx import Instruction
from .shared_memory import WARP


def synchronize(machine: Machine, instruction: Instruction) -> Step:
    """``bar.sync`` (of a block, or of some of its warps) and ``bar.warp.sync`` (of a warp)."""
    if instruction.name.startswith("bar.warp"):
        return lambda: machine.shared.synchronize_warps(machine.active_warps())
    return machine.barrier


def shuffle(machine: Machine, instruction: Instruction) -> Step:
    """``shfl.sync``: a register of another thread of the warp."""
    how, operands = instruction.parts[2], instruction.operands
    targets = operands[0].split("|")
    puts = [machine.setter(target) for target in targets]
    get, number, bounds = (machine.getter(operand) for operand in operands[1:4])

    def run() -> None:
        lane = np.arange(WARP)[None, :]
        value = np.broadcast_to(get(), machine.threads).reshape(-1, WARP)
        by = np.broadcast_to(number(), machine.threads).astype(np.int64).reshape(-1, WARP)
        limits = np.broadcast_to(bounds(), machine.threads).astype(np.int64).reshape(-1, WARP)
        # Segments of the warp, and the last (for "up" the first) thread that may be asked.
        segment, clamp = limits >> 8 & 31, limits & 31
        last = lane & segment | clamp & ~segment
        if how == "bfly":
            source = lane ^ by
        elif how == "up":
            source = lane - by
        elif how == "down":
            source = lane + by
        else:
            source = lane & segment | by & ~segment
        there = source >= last if how == "up" else source <= last
        source = np.where(there, source, lane)
        puts[0](np.take_along_axis(value, source, axis=1).reshape(-1))
        if len(puts) > 1:
            puts[1](np.broadcast_to(there, value.shape).reshape(-1))

    return run


REDUCTIONS = {
    "add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and,
    "or": np.bitwise_or, "xor": np.bitwise_xor,
}  # fmt: skip


def reduce(machine: Machine, instruction: Instruction) -> Step:
    """``redux.sync``: a sum, an extreme, ... over the threads of a warp."""
    function, kind = REDUCTIONS[instruction.parts[2]], instruction.parts[-1]
    get, put = machine.getter(instruction.operands[1]), machine.setter(instruction.operands[0])

    def run() -> None:
        value = np.broadcast_to(get(), machine.threads).reshape(-1, WARP)
        value = value.view(np.int32) if kind == "s32" else value
        result = function.reduce(value, axis=1, dtype=value.dtype)
        put(np.repeat(result, WARP).view(np.uint32))

    return run


def vote(machine: Machine, instruction: Instruction) -> Step:
    """``vote.sync``: whether all threads of a warp, or any, say yes; or who does."""
    how, operands = instruction.parts[2], instruction.operands
    get, put = machine.getter(operands[1]), machine.setter(operands[0])
    bits = np.uint32(1) << np.arange(WARP, dtype=np.uint32)

    def run() -> None:
        votes = np.broadcast_to(get(), machine.threads).reshape(-1, WARP)
        if how == "ballot":
            result = (votes * bits).sum(axis=1, dtype=np.uint32)
        else:
            result = votes.all(axis=1) if how == "all" else votes.any(axis=1)
        put(np.repeat(result, WARP))

    return run


def elect(machine: Machine, instruction: Instruction) -> Step:
    """``elect.sync``: one thread of a warp, the first, is to go on."""
    number, chosen = (machine.setter(target) for target in instruction.operands[0].split("|"))

    def run() -> None:
        number(np.zeros(machine.threads, np.uint32))
        chosen(machine.lane == 0)

    return run


def nothing(machine: Machine, instruction: Instruction) -> Step:
    """Hints, numbers of registers, and fences of device memory: blocks see every write at once."""
    return lambda: None


def fence(machine: Machine, instruction: Instruction) -> Step:
    """``fence.proxy.async``: matrix products may read what these threads wrote."""
    if "proxy" in instruction.parts and "async" in instruction.name:
        return lambda: machine.shared.fence(machine.active_warps())
    return nothing(machine, instruction)


def trap(machine: Machine, instruction: Instruction) -> Step:
    """``trap``: the kernel gives up."""
    return lambda: machine.findings.add("the kernel gives up")


INSTRUCTIONS = {
    "bar": synchronize, "barrier": synchronize, "shfl": shuffle, "redux": reduce, "vote": vote,
    "elect": elect, "membar": nothing, "fence": fence, "prefetch": nothing, "setmaxnreg": nothing,
    "trap": trap,
}  # fmt: skip
