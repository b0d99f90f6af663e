"""Vectors of the compiled kernels: their exponential, sums and largest lanes."""

from __future__ import annotations

import ctypes

import native_entries
import numpy as np
import pytest
import torch

pytestmark = pytest.mark.every_case

# The least and the largest argument with a normal, finite result (float32, float64), and numbers
# of more than twice the precision.
RANGES = {
    torch.float32: (-87.33654, 88.72283, np.float64),
    torch.float64: (-708.3964185322641, 709.782712893384, np.longdouble),
}
DTYPES = list(RANGES)


def errors(x: torch.Tensor, y: torch.Tensor) -> np.ndarray:
    """The errors of exponentials, in units in the last place of the exact ones."""
    exact = np.exp(x.numpy().astype(RANGES[x.dtype][2]))
    unit = np.spacing(exact.astype(x.numpy().dtype))
    return np.abs(y.numpy().astype(exact.dtype) - exact) / unit


@pytest.mark.skipif(
    np.finfo(np.longdouble).eps > 1e-18, reason="numpy has nothing more precise than float64"
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_exp_is_within_about_one_unit_in_the_last_place(native: ctypes.CDLL, dtype):
    least, largest, _ = RANGES[dtype]
    torch.manual_seed(0)
    x = torch.cat(
        [
            least + (largest - least) * torch.rand(30_000, dtype=dtype),
            -20 * torch.rand(30_000, dtype=dtype),  # where most logits lie
            1e-3 * torch.randn(10_000, dtype=dtype),
            (torch.arange(-120, 120, dtype=dtype) + 0.5) * np.log(2),  # ends of the reduction
        ]
    )
    assert errors(x, native_entries.exp(x, native=native)).max() < 1.1


@pytest.mark.parametrize("dtype", DTYPES)
def test_exp_of_what_is_not_a_usual_number(native: ctypes.CDLL, dtype):
    least, largest, _ = RANGES[dtype]
    inf, nan = torch.inf, torch.nan
    x = torch.tensor([0, -0.0, 1e-40, inf, -inf, nan, 1e30, -1e30, 1.01 * largest], dtype=dtype)
    expected = torch.tensor([1, 1, 1, inf, 0, nan, inf, 0, inf], dtype=dtype)
    assert torch.equal(native_entries.exp(x, native=native).nan_to_num(7), expected.nan_to_num(7))
    ends = torch.tensor([least, largest], dtype=dtype)
    y = native_entries.exp(ends, native=native)
    assert y[0] >= torch.finfo(dtype).tiny
    assert y[1].isfinite()
    assert errors(ends, y).max() < 1.1
    beyond = torch.nextafter(ends, torch.tensor([-inf, inf], dtype=dtype))
    y = native_entries.exp(beyond, native=native)
    assert 0 <= y[0] <= torch.finfo(dtype).tiny
    assert torch.equal(y[1], beyond[1].exp())


@pytest.mark.parametrize("dtype", DTYPES)
def test_exp_writes_every_element_once_whatever_the_count_and_the_threads(
    native: ctypes.CDLL, dtype
):
    x = torch.linspace(-30, 1, 9000, dtype=dtype)
    whole = native_entries.exp(x, native=native)
    for count in (0, 1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 4095, 4096, 4097, 9000):
        for threads in (1, 2, 5):
            part = native_entries.exp(x[:count].clone(), threads, native)
            assert torch.equal(part, whole[:count])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sum_joins_halves_and_the_largest_is_the_largest(native: ctypes.CDLL, dtype):
    torch.manual_seed(0)
    lanes = native_entries.lanes(dtype, native)
    for _ in range(20):
        x = torch.randn(lanes, dtype=dtype)
        tree = x
        while len(tree) > 1:
            tree = tree[: len(tree) // 2] + tree[len(tree) // 2 :]
        expected = torch.stack([tree[0], x.max()])
        assert torch.equal(native_entries.reduce(x, native), expected)


def test_a_large_fresh_output_is_the_same_as_a_small_one(native: ctypes.CDLL):
    """Above 2 MB the library asks for huge pages."""
    x = torch.linspace(-5, 0, 1_500_000)
    y = native_entries.exp(x, 2, native)
    assert torch.equal(y[-1000:], native_entries.exp(x[-1000:].clone(), native=native))
    assert torch.allclose(y, x.exp(), rtol=3e-7, atol=0)
