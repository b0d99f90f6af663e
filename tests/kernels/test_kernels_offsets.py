"""Tensors of more than 2^31 elements, in memory that nobody touches but for a few tokens."""

import os
import subprocess
import sys
from pathlib import Path

import far_memory
import pytest

pytestmark = pytest.mark.usefixtures("device")


@pytest.mark.long
@pytest.mark.parametrize("program", far_memory.PROGRAMS)
def test_offsets_do_not_wrap_at_two_to_the_31(program: str, device: str) -> None:
    """Offsets of 2^31 and more find the right numbers and edges, in every family of kernels."""
    if device != "cpu":
        pytest.skip("on a GPU memory is not mapped lazily")
    file = Path(far_memory.__file__)
    done = subprocess.run(
        [sys.executable, str(file), program],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == "right\n"
