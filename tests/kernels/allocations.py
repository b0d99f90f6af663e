"""Peak memory from the allocations themselves: a computation on "meta", with nothing computed.

Tensors there have shapes and storages but no numbers, so a pass that takes gigabytes on a GPU is
followed in a second without one. Kernels are noted, not run. What vendors' libraries take for
themselves is not seen, nor that an allocator rounds up.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from graphattn.kernels.shared.launch import Launch, recording

MEGABYTE = 1e6


class Block(NamedTuple):
    """A storage: its bytes, and the tensor that it was made for."""

    bytes: int
    made_by: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.bytes / MEGABYTE:10,.1f} MB  {self.made_by} {list(self.shape)} {dtype}"


class Peak(NamedTuple):
    """The most bytes that were held at once, beyond inputs, and by whom; largest first.

    `inputs` is the size of what was there before and was read: data, weights.
    """

    bytes: int
    inputs: int
    blocks: list[Block]
    kernels: list[str]  # that were started, in this order

    def __str__(self) -> str:
        """One line per block; those below a hundredth of the peak share one."""
        large = [block for block in self.blocks if 100 * block.bytes >= self.bytes]
        others = self.bytes - sum(block.bytes for block in large)
        lines = [
            f"{self.bytes / MEGABYTE:10,.1f} MB at the peak, beyond inputs of "
            f"{self.inputs / MEGABYTE:,.1f} MB",
            *map(str, large),
            f"{others / MEGABYTE:10,.1f} MB  in {len(self.blocks) - len(large)} smaller ones",
        ]
        return "\n".join(lines)


class Allocations(TorchDispatchMode):
    """Follows every storage on "meta" from the operator that makes it to its end.

    Of `launches`, which grows meanwhile, it keeps names: the tensors that a list of launches holds
    would live on after their kernels.
    """

    def __init__(self, launches: list[Launch]) -> None:
        super().__init__()
        self.launches = launches
        self.kernels: list[str] = []
        self.held: dict[int, Block] = {}  # by the identity of the storage
        self.given: dict[int, int] = {}
        self.now = self.peak = self.inputs = 0
        self.at_peak: list[Block] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.let_go_of_launches()
        for tensor in on_meta((args, kwargs)):
            self.look_at_input(tensor.untyped_storage())
        name = func._schema.name
        if name.startswith("graphattn::"):  # PyTorch would only ask for the shapes of its results
            with self:
                result = OPDEFS[name]._init_fn(*args, **kwargs)
        else:
            result = func(*args, **kwargs)
        for tensor in on_meta(result):
            self.look_at_output(tensor, name)
        return result

    def let_go_of_launches(self) -> None:
        """Before anything new is made."""
        self.kernels.extend(launch.kernel.fn.__name__ for launch in self.launches)
        self.launches.clear()

    def look_at_input(self, storage: torch.UntypedStorage) -> None:
        """Count a storage as an input if no followed operator has made it.

        Such a storage was there before.
        """
        key = id(storage)
        if key not in self.held and key not in self.given:
            self.given[key] = storage.nbytes()
            self.inputs += storage.nbytes()
            weakref.finalize(storage, self.given.pop, key)

    def look_at_output(self, tensor: Tensor, made_by: str) -> None:
        """A view of something, or something new."""
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self.held or key in self.given:
            return
        self.held[key] = block = Block(storage.nbytes(), made_by, tuple(tensor.shape), tensor.dtype)
        weakref.finalize(storage, self.forget, key)
        self.now += block.bytes
        if self.now > self.peak:
            self.peak, self.at_peak = self.now, list(self.held.values())

    def forget(self, key: int) -> None:
        """The last tensor that saw it is gone."""
        self.now -= self.held.pop(key).bytes


def on_meta(nested: Any) -> Iterator[Tensor]:
    """The tensors on "meta" among arguments or results; others lie on the host."""
    for leaf in tree_leaves(nested):
        if isinstance(leaf, Tensor) and leaf.device.type == "meta":
            yield leaf


def peak_of(work: Callable[[], object]) -> Peak:
    """The peak of `work`, which computes with tensors on "meta"; what it returns is held too.

    Kernels are started as they would be, if the caller has Triton's interpreter switched on.
    """
    with recording() as launches, Allocations(launches) as allocations:
        work()
    allocations.let_go_of_launches()
    blocks = sorted(allocations.at_peak, key=lambda block: -block.bytes)
    return Peak(allocations.peak, allocations.inputs, blocks, allocations.kernels)
