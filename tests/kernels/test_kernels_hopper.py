"""The forward for Hopper is taken where it is asked for and can run, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton

from graphattn.kernels.bands.forward import forward
from graphattn.kernels.bands.hopper import choice
from graphattn.kernels.bands.inputs import BandInputs
from graphattn.kernels.bands.schedule import BandSchedule
from graphattn.kernels.shared import tuning
from graphattn.kernels.shared.launch import Launch, recording

with pytest.MonkeyPatch.context() as patch:
    if not isinstance(triton.language.cdiv, triton.JITFunction):
        patch.setenv("TRITON_INTERPRET", "1")  # Triton was imported so, and Gluon asks
    HAS_GLUON = choice.has_gluon()
ours = pytest.mark.skipif(not HAS_GLUON, reason="this Triton has no Gluon for Hopper")


def inputs(
    width: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    sequence: tuple[int, ...] = (0, 300, 0, 300, 1, 90, 0, 1),
    heads: int = 2,
    **options: Any,
) -> BandInputs:
    query, key, value = (
        torch.empty(2, max(sequence[1], 299), heads, width, dtype=dtype, device="meta")
        for _ in range(3)
    )
    bands = BandSchedule(torch.tensor([sequence]), "meta")
    scale = torch.ones(heads, device="meta")
    return BandInputs(query, key, value, scale, bands, rbf=True, **options)


@pytest.fixture(autouse=True)
def _is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv(choice.VARIABLE, "1")


def launches(x: BandInputs, arch: str = "sm_90") -> list[Launch]:
    """The launches of a forward pass, but for those of half squares."""
    with tuning.compiling_for(arch), recording() as started:
        forward(x)
    return [one for one in started if one.kernel.__name__ != "row_dots_kernel"]


def names(started: list[Launch]) -> list[str]:
    return [one.kernel.__name__ for one in started]


@ours
def test_the_kernel_for_hopper_must_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert names(launches(inputs())) == ["window_forward_kernel", "band_forward_kernel"]
    monkeypatch.delenv(choice.VARIABLE)
    assert names(launches(inputs())) == ["band_forward_kernel"] * 2


@ours
@pytest.mark.parametrize("width", choice.WIDTHS)
def test_unsound_tiles_are_computed_again_by_the_plain_kernel(width: int) -> None:
    """A flag for every 64 targets of each head and batch entry, in the order of its programs."""
    first, again = launches(inputs(width))
    flags = again.arguments["p_again"]
    assert flags is first.arguments["p_again"]
    assert flags.shape == (2, 5, 2)  # batch, tiles, heads
    assert again.grid == (20,)
    assert again.arguments["CAREFUL"]
    assert again.arguments["num_tiles"] == 5
    first_rows = BandSchedule(torch.tensor([[0, 300, 0, 300, 1, 90, 0, 1]]), "cpu")
    assert first_rows.tiles_in_order(64)[:, 1].tolist() == [0, 64, 128, 192, 256]


def spread(x: BandInputs) -> BandInputs:
    """Heads with a gap between them."""
    x.query = torch.empty(2, 300, 2, 128, dtype=torch.bfloat16, device="meta")[..., :64]
    return x


REFUSED: dict[str, tuple[Callable[[], BandInputs], str]] = {
    "float32": (lambda: inputs(dtype=torch.float32), "not float32"),
    "width": (lambda: inputs(32), "not of [32]"),
    "mask": (
        lambda: inputs(valid_source=torch.ones(2, 300, dtype=torch.bool, device="meta")),
        "no table of biases, mask or top-k",
    ),
    "tokens": (lambda: inputs(sequence=(0, 299, 0, 299, 1, 90, 0, 1)), "multiple of 16 bytes"),
    "narrow": (lambda: inputs(sequence=(0, 300, 0, 300, 1, 30, 0, 1)), "64 or more sources"),
    "holes": (lambda: inputs(sequence=(0, 300, 0, 300, 1, 90, 90, 0)), "without holes"),
    "dilated": (lambda: inputs(sequence=(0, 100, 0, 100, 3, 90, 90, 1)), "one window"),
    "gaps": (lambda: spread(inputs()), "side by side"),
}


@ours
@pytest.mark.every_case
@pytest.mark.parametrize("name", REFUSED)
def test_what_it_does_not_take_goes_to_the_plain_kernel(name: str) -> None:
    make, reason = REFUSED[name]
    with tuning.compiling_for("sm_90"):
        assert choice.why_not(inputs()) is None
        said = choice.why_not(make())
    assert said is not None
    assert reason in said
    assert names(launches(make()))[0] == "band_forward_kernel"


def test_other_gpus_and_other_versions_of_triton_take_the_plain_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert names(launches(inputs(), "sm_100")) == ["band_forward_kernel"] * 2
    monkeypatch.setattr(choice, "has_gluon", lambda: False)
    assert names(launches(inputs())) == ["band_forward_kernel"] * 2
