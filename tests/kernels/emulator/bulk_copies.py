"""Bulk copies (``cp.async.bulk.tensor``): boxes of a tensor, from device to shared memory.

A tensor map says where the tensor is and how a box of it is laid out in shared memory. On a GPU it
is 128 bytes that the driver makes (CUDA driver API, ``cuTensorMapEncodeTiled``). Here it is a tuple
that stands in for these bytes among the arguments of a kernel, and its address is that of the
argument.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy as np

from .machine import PARAMETERS, Machine, Step, UnknownInstruction
from .ptx import Instruction, split

WIDTHS = {0: 0, 1: 32, 2: 64, 3: 128}  # bytes of the rows whose chunks are exchanged


class TensorMap(NamedTuple):
    """A tensor and a box of it; the last dimension is the one whose numbers are neighbours."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # bytes
    box: tuple[int, ...]
    size: int  # bytes of a number
    width: int  # bytes of the rows whose chunks of 16 bytes are exchanged, or 0
    fill: bytes  # the number beyond the tensor

    @classmethod
    def of(cls, descriptor: Any, meta: dict[str, Any]) -> TensorMap:
        """The map of a ``TensorDescriptor``, in the boxes that the compiler chose (`meta`)."""
        size = descriptor.base.element_size()
        nan = {2: b"\xff\x7f", 4: b"\xff\xff\xff\x7f"}
        return cls(
            descriptor.base.data_ptr(),
            tuple(descriptor.shape),
            tuple(size * stride for stride in descriptor.strides),
            tuple(meta["block_size"]),
            size,
            WIDTHS[meta["swizzle"]],
            nan[size] if descriptor.padding == "nan" else bytes(size),
        )

    def numbers(self, first: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        """Addresses of the numbers of a box, and which of them are in the tensor, [numbers]."""
        address, inside = np.asarray(self.address), np.asarray(True)
        for dimension, (begin, count) in enumerate(zip(first, self.box, strict=True)):
            place = begin + np.arange(count)
            shape = [-1 if i == dimension else 1 for i in range(len(self.box))]
            address = address + (place * self.strides[dimension]).reshape(shape)
            inside = inside & ((place >= 0) & (place < self.shape[dimension])).reshape(shape)
        return address.reshape(-1), inside.reshape(-1)


def places(start: int, size: int, width: int) -> np.ndarray:
    """Places of the `size` bytes of a box in shared memory, from `start` on.

    Chunks of 16 bytes change places, by the number of their row of 128 bytes.

    >>> places(0, 256, 128)[[0, 16, 128, 144]]
    array([  0,  16, 144, 128])
    """
    place = start + np.arange(size)
    return place ^ (place >> 7 & width // 16 - 1) << 4 if width else place


def bulk_copy(machine: Machine, instruction: Instruction) -> Step:
    """``cp.async.bulk.tensor``: a box, announced at an ``mbarrier``."""
    name = instruction.name
    if not (name.startswith("cp.async.bulk.tensor.") and name.endswith("complete_tx::bytes")):
        raise UnknownInstruction(instruction.text)
    to, barrier_at = (machine.address_getter(instruction.operands[i]) for i in (0, 2))
    match = re.fullmatch(r"\[(%\w+), \{(.*)\}\]", instruction.operands[1])
    assert match is not None, instruction.text
    map_at = machine.getter(match[1], 64)
    coordinates = [machine.getter(x) for x in reversed(split(match[2]))]

    def run() -> None:
        for lane in np.arange(machine.threads)[machine.lanes]:

            def of_thread(get: Any, lane: int = lane) -> int:
                return int(np.broadcast_to(get(), machine.threads)[lane])

            tensor = machine.arguments[of_thread(map_at) - PARAMETERS]
            first = tuple(int(np.int32(np.uint32(of_thread(get)))) for get in coordinates)
            key = int(machine.block_of[lane]), of_thread(barrier_at)
            barrier = machine.memory_barriers.get(key)
            if barrier is None:
                machine.findings.add("mbarrier: used before it is made")
                continue
            if machine.shared.is_unfenced(key[1], 8, lane):
                machine.findings.add("mbarrier: no fence makes it visible to bulk copies")
            start = of_thread(to)
            if start % 128:
                machine.findings.add("shared memory: a bulk copy to no multiple of 128 bytes")
            if first[-1] * tensor.size % 16:
                machine.findings.add("global memory: a bulk copy from no multiple of 16 bytes")
            address, inside = tensor.numbers(first)
            values = np.tile(np.frombuffer(tensor.fill, np.uint8), (len(address), 1))
            stamps = np.full(int(inside.sum()), machine.stamps_of(lane))
            read = machine.memory.read(address[inside], tensor.size, 1, stamps)
            values[inside] = np.ascontiguousarray(read).view(np.uint8)
            barrier.copies += 1
            machine.shared.copy_in_bulk(
                places(start, values.size, tensor.width),
                values.reshape(-1),
                lane,
                barrier.clock,
                barrier.copies,
            )
            barrier.copied(values.size)

    return run
