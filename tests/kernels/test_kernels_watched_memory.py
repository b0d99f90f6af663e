"""The watch over interpreted kernels sees what it is there for."""

import pytest
import torch
from watched_memory import watched_memory

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")


def run(device: str, offset: int = 0, step: int = 4) -> torch.Tensor:
    """Three programs, each of which copies 4 numbers of 12 from `offset` on, `step` apart."""
    if device != "cpu":
        pytest.skip("nothing is watched on a GPU")

    @triton.jit
    def copy_kernel(p_from, p_to, offset, step):
        o_number = offset + tl.program_id(0) * step + tl.arange(0, 4)
        tl.store(p_to + o_number, tl.load(p_from + o_number))

    memory = torch.arange(200.0)
    source, target = memory[50:62], torch.zeros(200)[100:112]
    with watched_memory(device):
        copy_kernel[(3,)](source, target, offset, step)
    return target


@pytest.mark.parametrize("offset", [-1, 1])
def test_a_number_outside_is_seen(offset: int, device: str) -> None:
    with pytest.raises(Exception, match="copy_kernel reads 1 numbers outside"):
        run(device, offset=offset)


def test_two_programs_that_write_one_number_are_seen(device: str) -> None:
    with pytest.raises(AssertionError, match="copy_kernel writes numbers more than once"):
        run(device, step=3)


def test_reading_what_another_program_writes_is_seen(device: str) -> None:
    if device != "cpu":
        pytest.skip("nothing is watched on a GPU")

    @triton.jit
    def shift_kernel(p_numbers):
        i = tl.program_id(0)
        tl.store(p_numbers + i + 1, tl.load(p_numbers + i))

    with (
        pytest.raises(AssertionError, match="shift_kernel reads what another program writes"),
        watched_memory(device),
    ):
        shift_kernel[(3,)](torch.zeros(4))
