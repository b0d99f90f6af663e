"""Barriers, waits, fences and masks of compiled kernels are taken out: is it noticed?

A kernel's text has barriers, waits, fences and masks. Each of them is removed, one at a time, and
the kernel is run on the same numbers. The removal is

- noticed, if the emulator finds a mistake that it does not find in the whole kernel,
- seen in the results, if those change,
- harmless, if neither happens, also where warps run one after another in place of in step: on this
  launch no two accesses needed it,
- not run, if the launch never comes to it: nothing changes either if the kernel ends there.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from problems import problems

from emulator.device import CAPABILITIES, Compiled, Device, emulated_gpu
from graphattn.kernels.shared import launch, tuning

PROBLEMS = {problem.name: problem for problem in problems()}
QUICK = {  # every family, and every kind of synchronisation
    "sm_80": ("bands: heads of 7, bf16", "edges: bias of every edge, bf16"),
    "sm_90": ("bands: no self-loops, bf16",),
}
ALL = {arch: [name for name in PROBLEMS if not name.endswith("fp16")] for arch in CAPABILITIES}
CASES = [
    pytest.param(name, arch, marks=() if name in QUICK[arch] else pytest.mark.long)
    for arch, names in ALL.items()
    for name in names
]


# What is taken out, by a name for reports.
REMOVED = {
    "barrier": r"bar\.sync\s+0;",
    "barrier of a warp": r"bar\.warp\.sync\s+[^;]+;",
    "wait for copies": r"cp\.async\.wait_group\s+\d+;",
    "wait for products": r"wgmma\.wait_group\.sync\.aligned\s+\d+;",
    "fence before products": r"fence\.proxy\.async[\w:.]*;",
    "fence of registers": r"wgmma\.fence\.sync\.aligned;",
}
MASKS = {
    "mask": r"@!?%p\d+\s+(?=(?:ld|st)\.(?:global|shared))",
    "size of a copy": r"(?<=0x10), %r\d+(?=;)",  # how many of its bytes are read: all or none
}
ORDERS = {0: "warps in step", 1: "the first warp first", -1: "the last warp first"}


class Removal(NamedTuple):
    """Something that was taken out, and what became of it."""

    kind: str
    line: int  # of the kernel's text
    text: str
    verdict: str  # "noticed", "seen in the results", "harmless", "not run"
    why: str  # what was found


def removals(device: Device, started: launch.Launch, *, masks: bool = True) -> Iterator[Removal]:
    """Take out every synchronisation (and mask) of a launch's kernel in turn, and run it.

    Args:
        device: an emulated GPU.
        started: the launch. Its tensors are as they were before it, in the end.
        masks: whether masks of loads, stores and copies are taken out, too.
    """
    compiled = device.compile(started)
    storages = {
        x.untyped_storage().data_ptr(): x for x in launch.tensors_in(started.arguments.values())
    }
    before = [(x, x.untyped_storage().clone()) for x in storages.values()]

    def run(ptx: str, order: int = 0) -> tuple[set[str], list[torch.Tensor]]:
        for tensor, kept in before:
            tensor.untyped_storage().copy_(kept)
        changed = compiled._replace(ptx=ptx)
        machine = device.new_machine(changed, started.num_warps)
        machine.order = order
        device.execute(machine, changed, started)
        results = [
            torch.tensor([], dtype=torch.uint8).set_(x.untyped_storage()).clone() for x, _ in before
        ]
        return {kind for kind, _ in machine.findings.counts}, results

    known, expected = run(compiled.ptx)
    for kind, match in _places(compiled, masks):
        text = compiled.ptx[: match.start()] + compiled.ptx[match.end() :]
        verdict, why = "harmless", ""
        # A mask has nothing to do with the order of warps.
        for order in (0,) if kind in MASKS else (0, 1, -1):
            mistakes, results = run(text, order)
            if new := mistakes - known:
                verdict, why = "noticed", sorted(new)[0]
            elif any(not torch.equal(a, b) for a, b in zip(results, expected, strict=True)):
                verdict, why = "seen in the results", ORDERS[order]
            if why:
                break
        if not why and kind not in MASKS:
            ended = f"{compiled.ptx[: match.start()]}ret;{compiled.ptx[match.end() :]}"
            mistakes, results = run(ended)
            if mistakes <= known and all(map(torch.equal, results, expected)):
                verdict = "not run"
        line = compiled.ptx[: match.start()].count("\n") + 1
        end = compiled.ptx.find("\n", match.start())
        yield Removal(kind, line, compiled.ptx[match.start() : end].strip(), verdict, why)
    for tensor, kept in before:
        tensor.untyped_storage().copy_(kept)


def _places(compiled: Compiled, masks: bool) -> Iterator[tuple[str, re.Match[str]]]:
    for kind, pattern in (REMOVED | (MASKS if masks else {})).items():
        for match in re.finditer(pattern, compiled.ptx):
            yield kind, match


@pytest.mark.parametrize(("name", "arch"), CASES)
def test_what_is_taken_out_is_noticed_or_not_needed(
    name: str, arch: str, request: pytest.FixtureRequest
) -> None:
    gpu = emulated_gpu(arch)
    counts: Counter[tuple[str, str]] = Counter()
    seen = set()

    def receive(started: launch.Launch) -> None:
        kernel = started.kernel.fn.__name__
        if kernel not in seen and 0 not in started.grid:
            seen.add(kernel)
            for removal in removals(gpu, started, masks=name not in QUICK[arch]):
                counts[removal.kind, removal.verdict] += 1
        gpu.run(started)

    with tuning.compiling_for(arch), launch.redirected(receive):
        PROBLEMS[name].run()
    request.node.user_properties.append(("removals", [[*key, n] for key, n in counts.items()]))
    # Triton writes some that another one makes needless, where a loop is peeled. Most are needed;
    # of the fences before products, which stand before every product that reads what threads have
    # stored, one in three: each makes visible what was stored before it, for later products, too.
    for kind in {kind for kind, _ in counts} - set(MASKS):
        ran = {verdict: n for (of, verdict), n in counts.items() if of == kind}
        ran.pop("not run", None)
        least = 0.3 if kind == "fence before products" else 0.6
        assert sum(ran.values()) - ran.get("harmless", 0) >= least * sum(ran.values()), counts
