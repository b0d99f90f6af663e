"""Kernels whose warps do different things: bulk copies, ``mbarrier``, named barriers.

They are right in any order of warps, and what is broken in them is noticed.
"""

from __future__ import annotations

import re

import pytest
import torch
from fresh_memory import nan_until_written
from problems import problems

from emulator.device import Device, watched
from graphattn.kernels.bands.forward import forward
from graphattn.kernels.bands.hopper.choice import VARIABLE, has_gluon
from graphattn.kernels.bands.inputs import BandInputs
from graphattn.kernels.bands.schedule import BandSchedule
from graphattn.kernels.shared import tuning
from graphattn.kernels.shared.launch import Launch, recording

if not has_gluon():
    pytest.skip("this version of Triton has no Gluon for Hopper", allow_module_level=True)

from emulator.rings import product
from graphattn.kernels.bands.hopper import forward as hopper

PROBLEMS = {problem.name: problem for problem in problems()}
WINDOWS = ("window, dot, bf16", "causal window, RBF, bf16", "causal, wide heads, bf16",
           "grouped queries, bf16")  # fmt: skip
ORDERS = (0, 1, -1)  # warps in step, the first warp first, the last warp first
WAIT = r"mbarrier\.try_wait\S+ complete, (\[%r\d+\]), (%r\d+);"
# What is broken, by its name: a pattern of the kernel's text, and what takes its place.
BROKEN = {
    "a wait left out": (WAIT + r"\s*@!complete bra\.uni waitLoop;", ""),
    "a wrong parity": (
        WAIT,
        r".reg .b32 other; xor.b32 other, \2, 1; "
        r"mbarrier.try_wait.parity.shared::cta.b64 complete, \1, other;",
    ),
    "an arrive before the product is done": (
        r"(wgmma\.wait_group\.sync\.aligned\s+0;)(.*?)(@%p\d+ mbarrier\.arrive\.shared[^;]*;)",
        r"\2\3\1",
    ),
    "an arrive before all warps are done": (
        r"bar\.sync\s+\d+, 128;(?=(?:[^;]|\n)*mbarrier\.arrive\.shared)", "",
    ),
    "bytes that are not announced": (
        r"mbarrier\.arrive\.expect_tx(\S+ _, \[%r\d+\]), \d+;", r"mbarrier.arrive\1;",
    ),
    "too few bytes": (r"(expect_tx\S+ _, \[%r\d+\]), 16384;", r"\1, 8192;"),
    "one more thread": (r"(mbarrier\.init\S+ \[%r\d+\]), 1;", r"\1, 2;"),
    "no fence after barriers are made": (r"fence\.proxy\.async[\w:.]*;", ""),
    "a barrier that is never made": (r"@%p\d+ mbarrier\.init[^;]*;", ""),
}  # fmt: skip


def started() -> tuple[Launch, torch.Tensor, torch.Tensor]:
    """A launch of 2 blocks and 5 tiles, its output and what that should be."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(*n, generator=generator).half() for n in ((128, 320), (320, 64)))
    with recording() as launches:
        out = product(left, right)
    return launches[0], out, left.double() @ right.double()


@pytest.fixture(scope="module")
def gpu() -> Device:
    return Device("sm_90")


def run(gpu: Device, launch: Launch, ptx: str | None = None, order: int = 0) -> str:
    """Run a launch, with another text of its kernel. Returns what is found."""
    compiled = gpu.compile(launch)
    compiled = compiled._replace(ptx=compiled.ptx if ptx is None else ptx)
    machine = gpu.new_machine(compiled, launch.num_warps)
    machine.order = order
    gpu.execute(machine, compiled, launch)
    return str(machine.findings)


@pytest.mark.parametrize("order", ORDERS)
def test_a_ring_of_copies_and_products_is_right_and_clean(gpu: Device, order: int) -> None:
    launch, out, expected = started()
    out.fill_(torch.nan)
    assert run(gpu, launch, order=order) == "none"
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.every_case
@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_in_a_ring_is_noticed(gpu: Device, name: str) -> None:
    launch, *_ = started()
    pattern, replacement = BROKEN[name]
    text = gpu.compile(launch).ptx
    places = list(re.finditer(pattern, text, re.S))
    assert places
    for place in places:
        broken = text[: place.start()] + place.expand(replacement) + text[place.end() :]
        findings = [run(gpu, launch, broken, order) for order in ORDERS]
        assert any(found != "none" for found in findings), place[0]


@pytest.mark.long
@pytest.mark.every_case
@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_in_a_window_on_hopper_is_noticed(
    gpu: Device, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mistakes in the code of the first group of warps, and of the warp that copies.

    Some places are needless here: a buffer that is not used again may be free too early, and fences
    between reads of threads and later copies are not watched.
    """
    monkeypatch.setenv(VARIABLE, "1")
    monkeypatch.setattr(hopper, "multiprocessors", lambda: 1)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 260, 1, 64, generator=generator).half() for _ in range(3))
    bands = BandSchedule(torch.tensor([[0, 260, 0, 260, 1, 90, 0, 1]]), "cpu")
    x = BandInputs(query, key, value, torch.full((1,), 0.125), bands, rbf=False)
    with tuning.compiling_for("sm_90"), recording() as launches:
        forward(x)
    text = gpu.compile(launches[0]).ptx
    first_group = range(text.index("brx.idx"))
    copying = range(text.rindex("setmaxnreg", 0, text.index("cp.async.bulk")), len(text))
    places = [
        place
        for place in re.finditer(BROKEN[name][0], text, re.S)
        if place.start() in first_group or place.start() in copying
    ]
    noticed = 0
    for place in places:
        broken = text[: place.start()] + place.expand(BROKEN[name][1]) + text[place.end() :]
        noticed += any(run(gpu, launches[0], broken, order) != "none" for order in ORDERS)
    assert 0 < noticed >= len(places) / 2


@pytest.fixture
def _two_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward for Hopper is asked for, and its programs take several tiles each."""
    monkeypatch.setenv(VARIABLE, "1")
    monkeypatch.setattr(hopper, "multiprocessors", lambda: 2)


@pytest.mark.usefixtures("_two_programs")
@pytest.mark.parametrize("name", WINDOWS)
def test_windows_on_hopper_are_right_and_clean(name: str) -> None:
    with watched("sm_90") as launches, nan_until_written():
        PROBLEMS[f"bands: {name}"].run()
    assert "window_forward_kernel" in [launch.kernel for launch in launches]


@pytest.mark.usefixtures("_two_programs")
def test_nan_reaches_only_the_targets_that_see_it() -> None:
    """Targets 100 to 199 see source 100. Of other targets in their tiles nothing changes."""
    generator = torch.Generator().manual_seed(0)
    make = [torch.randn(1, 300, 1, 64, generator=generator).bfloat16() for _ in range(3)]
    bands = BandSchedule(torch.tensor([[0, 300, 0, 300, 1, 99, 0, 1]]), "cpu")

    def attend() -> torch.Tensor:
        with watched("sm_90") as launches:
            out, *_ = forward(BandInputs(*make, torch.full((1,), 0.125), bands, rbf=False))
        assert launches[0].kernel == "window_forward_kernel"
        return out[0, :, 0]

    before = attend()
    make[2][0, 100] = torch.nan
    after = attend()
    sees = (torch.arange(300) >= 100) & (torch.arange(300) < 200)
    assert after[sees].isnan().all()
    torch.testing.assert_close(after[~sees], before[~sees], rtol=0.02, atol=0.02)
