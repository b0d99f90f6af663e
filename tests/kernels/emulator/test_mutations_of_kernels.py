"""Barriers, waits, fences and masks of compiled kernels are taken out: is it noticed?"""

from __future__ import annotations

from collections import Counter

import pytest
from problems import problems

from emulator.device import CAPABILITIES, emulated_gpu
from emulator.mutations import MASKS, removals
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
