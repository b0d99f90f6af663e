"""Backward kernels that start from log-sums over more sources than they read."""

import pytest
import torch
from part_cases import CASES, Case, check, is_left_to_the_parts


@pytest.mark.parametrize(("graph", "score", "biased"), CASES)
def test_parts_add_up(graph: str, score: str, biased: bool, device: str) -> None:
    case = Case(graph, score, biased=biased, valid=True, kv=1)
    check(case, "triton", torch.float32, 1e-4, device)


@pytest.mark.long
def test_parts_add_up_in_half_precision(device: str) -> None:
    """Log-sums that band kernels save lack the squares of queries there."""
    check(Case("causal window", "rbf"), "triton", torch.float16, 0.05, device)


@pytest.mark.parametrize("size", [1.0, 3e3, torch.nan])
def test_log_sums_too_large_for_float32_are_left_to_the_parts(size: float, device: str) -> None:
    assert is_left_to_the_parts("triton", size, device) == (size != 1.0)
