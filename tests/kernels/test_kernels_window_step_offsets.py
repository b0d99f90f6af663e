"""A step of generation in memory that nobody touches: heads are more than 2^31 numbers apart."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.usefixtures("device")

PROGRAM = """
import mmap

import torch

from graphattn.kernels.generation.step import window_step

torch.manual_seed(0)
H, D, ROOM, STRIDE = 20, 16, 5, 2**27  # head 16 begins at 2^31
FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
memory = mmap.mmap(-1, 2 * H * STRIDE, flags=FLAGS)
whole = torch.frombuffer(memory, dtype=torch.float16)
near = [torch.randn(1, H, D).half() for _ in range(3)]
far = []
for place, x in enumerate(near):
    far.append(whole.as_strided((1, H, D), (H * STRIDE, STRIDE, 1), 1000 * place))
    far[-1].copy_(x)
keys, values = torch.randn(2, H, ROOM, D).half()
found = []
for tokens in (near, far):
    caches = keys.clone(), values.clone()
    out = window_step(*tokens, *caches, first=3, held=4, window=4, log_sigma=None)
    found.append((out, *caches))
for of_near, of_far in zip(*found):
    assert torch.equal(of_near, of_far)
print("all equal")
"""


@pytest.mark.long
def test_heads_of_a_new_token_may_be_far_apart(device: str) -> None:
    """One token of a tensor [heads, tokens, features] has heads as far apart as its tokens reach.

    The program runs interpreted, in a process of its own: a wrong offset may leave its memory.
    """
    if device != "cpu":
        pytest.skip("on a GPU memory is not mapped lazily")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("all equal")
