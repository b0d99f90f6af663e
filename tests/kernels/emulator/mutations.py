"""Does the emulator notice what is missing? Synchronisation and masks are taken out in turn.

A kernel's text has barriers, waits, fences and masks. Each of them is removed, one at a time, and
the kernel is run on the same numbers. The removal is

- noticed, if the emulator finds a mistake that it does not find in the whole kernel,
- seen in the results, if those change,
- harmless, if neither happens: on this launch no two accesses needed it. For a barrier that is
  shown a second time, from the text alone: no shared memory is touched between it and another one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import torch

from graphattn.kernels.shared.launch import Launch, tensors_in

from .device import Compiled, Device

# What is taken out, by a name for reports.
REMOVED = {
    "barrier": r"bar\.sync\s+0;",
    "barrier of a warp": r"bar\.warp\.sync\s+[^;]+;",
    "wait for copies": r"cp\.async\.wait_group\s+\d+;",
    "wait for products": r"wgmma\.wait_group\.sync\.aligned\s+\d+;",
    "fence before products": r"fence\.proxy\.async[\w:.]*;",
    "fence of registers": r"wgmma\.fence\.sync\.aligned;",
}
MASKED = r"@!?%p\d+\s+(?=(?:ld|st)\.(?:global|shared))"  # the mask of a load or store
SIZED = r"(?<=0x10), %r\d+(?=;)"  # the mask of a copy: how many of its bytes are read
_TOUCHES = re.compile(r"(ld|st)\.shared|ldmatrix|stmatrix|cp\.async\.c|wgmma\.mma_async")


class Removal(NamedTuple):
    """Something that was taken out, and what became of it."""

    kind: str
    line: int  # of the kernel's text
    text: str
    verdict: str  # "noticed", "seen in the results", "harmless"
    why: str  # what was found; for a harmless barrier, whether the text shows it

    @property
    def counts(self) -> bool:
        """Whether it was noticed, in one way or the other."""
        return self.verdict != "harmless"


def removals(device: Device, started: Launch, *, masks: bool = True) -> Iterator[Removal]:
    """Take out every synchronisation (and mask) of a launch's kernel in turn, and run it.

    Args:
        device: an emulated GPU.
        started: the launch. Its tensors are as they were before it, in the end.
        masks: whether masks of loads, stores and copies are taken out, too.
    """
    compiled = device.compile(started)
    storages = {x.untyped_storage().data_ptr(): x for x in tensors_in(started.arguments.values())}
    before = [(x, x.untyped_storage().clone()) for x in storages.values()]

    def run(ptx: str) -> tuple[set[str], list[torch.Tensor]]:
        for tensor, kept in before:
            tensor.untyped_storage().copy_(kept)
        changed = compiled._replace(ptx=ptx)
        machine = device.new_machine(changed, started.num_warps)
        device.execute(machine, changed, started)
        results = [torch.tensor([], dtype=torch.uint8).set_(x.untyped_storage()).clone() for x, _ in before]
        return {kind for kind, _ in machine.findings.counts}, results

    known, expected = run(compiled.ptx)
    for kind, match in _places(compiled, masks):
        text = compiled.ptx[: match.start()] + compiled.ptx[match.end() :]
        found, results = run(text)
        if new := found - known:
            verdict, why = "noticed", sorted(new)[0]
        elif any(not torch.equal(a, b) for a, b in zip(results, expected, strict=True)):
            verdict, why = "seen in the results", "other numbers"
        else:
            verdict, why = "harmless", _reason(compiled.ptx, match) if "barrier" == kind else ""
        line = compiled.ptx[: match.start()].count("\n") + 1
        end = compiled.ptx.find("\n", match.start())
        yield Removal(kind, line, compiled.ptx[match.start() : end].strip(), verdict, why)
    for tensor, kept in before:
        tensor.untyped_storage().copy_(kept)


def _places(compiled: Compiled, masks: bool) -> Iterator[tuple[str, re.Match[str]]]:
    patterns = dict(REMOVED)
    if masks:
        patterns |= {"mask": MASKED, "size of a copy": SIZED}
    for kind, pattern in patterns.items():
        for match in re.finditer(pattern, compiled.ptx):
            yield kind, match


def _reason(ptx: str, match: re.Match[str]) -> str:
    """Whether the text shows that a barrier is not needed: nothing happens next to it.

    Between it and the barrier before (or after) it, no shared memory is touched, and no other way
    leads there. "" if the text does not show it.
    """
    stop = re.compile(r"bar\.sync|^\$L|\bbra\b", re.M)
    after = ptx[match.end() :]
    end = stop.search(after)
    if end and end[0] == "bar.sync" and not _TOUCHES.search(after[: end.start()]):
        return "nothing is touched before the next barrier"
    before = ptx[: match.start()]
    begin = [found for found in stop.finditer(before)]
    if begin and begin[-1][0] == "bar.sync" and not _TOUCHES.search(before[begin[-1].end() :]):
        return "nothing was touched since the last barrier"
    return ""
