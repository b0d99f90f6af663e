"""Tensors of more than 2^31 elements, in memory that nobody touches but for a few tokens."""

import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.usefixtures("device")

START = """
import resource
import time

import torch

from graphattn.kernels.bands import backward, forward
from graphattn.kernels.shared import tuning
from graphattn.kernels.bands.inputs import BandInputs
from graphattn.kernels.bands.schedule import BandSchedule

torch.manual_seed(0)
started = time.perf_counter()
small = {name: tuning.Choice(16, 16, 4, 1) for name in tuning.KERNELS}


def memory():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def attention(q, k, v, d_out):
    # In float64, 1 head: output and gradients of attention over everything before, scale 0.5.
    q, k, v = (x.double().requires_grad_() for x in (q, k, v))
    logit = 0.5 * q @ k.T
    future = torch.ones_like(logit, dtype=torch.bool).triu(1)
    out = logit.masked_fill(future, -torch.inf).softmax(1) @ v
    return out, *torch.autograd.grad(out, (q, k, v), d_out.double())


def close(found, expected):
    found = found.double()
    assert found.isfinite().all()
    error = float((found - expected).norm() / expected.norm())
    assert error < 3e-3, error


before = memory()
"""

# The sequence's tokens are the last of 2^26: outputs and gradients lie beyond 2^31, too.
FAR_TOKENS = """
N, D, T = 2**26 + 20, 32, 20
tensors = [torch.empty(1, N, 1, D, dtype=torch.float16) for _ in range(4)]
assert tensors[0].numel() > 2**31
near = [torch.randn(T, D).half() for _ in range(4)]
for x, own in zip(tensors, near):
    x[0, -T:, 0] = own
q, k, v, d_out = tensors
bands = BandSchedule(torch.tensor([[N - T, T, N - T, T, 1, T, 0, 1]]), "cpu")
x = BandInputs(q, k, v, torch.tensor([0.5]), bands, rbf=False)


def row_dots(a, b, factor=1.0, subtracted=None):
    # Of the few tokens: a program for all would go over 2^26.
    found = torch.empty(1, 1, N)
    found[0, 0, -T:] = (a[0, -T:, 0].float() * b[0, -T:, 0].float()).sum(-1)
    return found


backward.row_dots = row_dots
with tuning.override(**small):
    out, lse, saved = forward.forward(x)
    d_q, d_k, d_v, _, _ = backward.backward(x, out, saved, d_out, None, scale_gradient=True)
for found, expected in zip((out, d_q, d_k, d_v), attention(*near)):
    close(found[0, -T:, 0], expected)
"""

# Few tokens, each 2^27 elements from the next: in tiles of 16 the second tile begins at 2^31. Tiles
# of 32 end beyond it.
LONG_STRIDES = """
T, D, stride = 40, 32, 2**27
whole = torch.empty(T * stride, dtype=torch.float16)
near = [torch.randn(T, D).half() for _ in range(4)]
tensors = []
for place, own in enumerate(near):
    tensors.append(whole.as_strided((1, T, 1, D), (T * stride, stride, D, 1), 1000 * place))
    tensors[-1][0, :, 0] = own
q, k, v, d_out = tensors
bands = BandSchedule(torch.tensor([[0, T, 0, T, 1, T, 0, 1]]), "cpu")
x = BandInputs(q, k, v, torch.tensor([0.5]), bands, rbf=False)
assert x.query.data_ptr() == q.data_ptr()  # no copy
with tuning.override(**small):
    out, lse, saved = forward.forward(x)
    d_q, d_k, d_v, _, _ = backward.backward(x, out, saved, d_out, None, scale_gradient=True)
for found, expected in zip((out, d_q, d_k, d_v), attention(*near)):
    close(found[0, :, 0], expected)
"""

IN_LARGE_TILES = (
    "small = {name: tuning.Choice(32, 32, 4, 1) for name in tuning.KERNELS}" + LONG_STRIDES
)

END = """
took, grown = time.perf_counter() - started, memory() - before
assert grown < 0.2, f"{grown} GiB"
print("all close", round(took, 2), "s", round(grown, 3), "GiB")
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "program",
    [FAR_TOKENS, LONG_STRIDES, IN_LARGE_TILES],
    ids=["tokens", "strides", "strides within a tile"],
)
def test_offsets_do_not_wrap_at_two_to_the_31(program: str, device: str) -> None:
    """Offsets of 2^31 and more find the right numbers, for far tokens and for long strides.

    The program runs interpreted, in a process of its own. Its memory is mapped, and only few tokens
    of it are ever touched.
    """
    if device != "cpu":
        pytest.skip("on a GPU memory is not mapped lazily")
    code = START + textwrap.dedent(program) + END
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("all close")
