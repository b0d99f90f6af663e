"""More than 2^31 numbers and edges over any graph, in memory that nobody touches but for a few."""

import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.usefixtures("device")

START = """
import mmap
import resource
import time

import torch

from graphattn.kernels.edges import backward, forward, inputs, math
from graphattn.kernels.shared import tuning
from graphattn.kernels.edges.inputs import EdgeInputs
from graphattn.kernels.edges.schedule import Rows

torch.manual_seed(0)
started = time.perf_counter()
small = {name: tuning.Choice(16, 16, 4, 1) for name in tuning.OF_EDGES}
T, D = 20, 32
FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE


def memory():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def mapped(shape, dtype):
    # Zeros, of which only what is looked at takes memory.
    memory = mmap.mmap(-1, torch.Size(shape).numel() * dtype.itemsize, flags=FLAGS)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


class Tables:
    # Target N - T + i sees the last sources up to M - T + i; its edges stand one after the other
    # from `start` on. Other tokens have no rows.
    def __init__(self, N, M, E, start, others=None):
        self.num_targets, self.num_sources, self.num_edges = N, M, E
        i, j = torch.ones(T, T).tril().nonzero().T
        place = torch.arange(len(i))
        if others is None:
            others = torch.empty(start + len(i), dtype=torch.int32)
        others[start : start + len(i)] = M - T + j
        self.by_target = self.rows(N, i, others, None, start)
        order = j.argsort(stable=True)
        self.by_source = self.rows(M, j[order], (N - T + i[order]).int(), start + place[order], 0)

    def rows(self, tokens, own, others, edges, start):
        count = torch.bincount(own, minlength=T)
        first = start + count.cumsum(0) - count
        whole = torch.stack([tokens - T + torch.arange(T), first, count, torch.full((T,), -1)], 1)
        return Rows(others, edges, whole, whole, whole[:0, :3], 0, 10.0)


def attention(q, k, v, d_out, bias=None):
    # In float64, 1 head: output and gradients of attention over everything before, scale 0.5.
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    q, k, v = leaves
    logit = 0.5 * q @ k.T
    if bias is not None:
        bias = bias.double().requires_grad_()
        leaves.append(bias)
        edges = tuple(torch.ones(T, T).tril().nonzero().T)
        logit = logit + torch.zeros_like(logit).index_put(edges, bias)
    future = torch.ones_like(logit, dtype=torch.bool).triu(1)
    out = logit.masked_fill(future, -torch.inf).softmax(1) @ v
    return out, *torch.autograd.grad(out, leaves, d_out.double())


def close(found, expected):
    found = found.double()
    assert found.isfinite().all()
    error = float((found - expected).norm() / expected.norm())
    assert error < 3e-3, error


before = memory()
"""

# The tokens are the last of 2^26 targets and sources: features, outputs and gradients lie beyond.
FAR_TOKENS = """
N = 2**26 + T
tensors = [mapped((1, N, 1, D), torch.float16) for _ in range(4)]
assert tensors[0].numel() > 2**31
near = [torch.randn(T, D).half() for _ in range(4)]
for x, own in zip(tensors, near):
    x[0, -T:, 0] = own
q, k, v, d_out = tensors
x = EdgeInputs(q, k, v, torch.tensor([0.5]), Tables(N, N, 210, 0), rbf=False)


def row_dots(a, b, factor=1.0, subtracted=None):
    # Of the few tokens: a program for all would go over 2^26.
    found = torch.empty(1, 1, N)
    found[0, 0, -T:] = (a[0, -T:, 0].float() * b[0, -T:, 0].float()).sum(-1)
    return found


backward.row_dots = row_dots
with tuning.override(**small):
    out, lse, saved = forward.forward(x)
    d_q, d_k, d_v, *_ = backward.backward(
        x, out, saved, d_out, None, scale_gradient=True, bias_gradient=False
    )
for found, expected in zip((out, d_q, d_k, d_v), attention(*near)):
    close(found[0, -T:, 0], expected)
"""

# Few tokens, each 2^27 numbers from the next: the 17th begins at 2^31.
LONG_STRIDES = """
stride = 2**27
whole = mapped((T * stride,), torch.float16)
near = [torch.randn(T, D).half() for _ in range(4)]
tensors = []
for place, own in enumerate(near):
    tensors.append(whole.as_strided((1, T, 1, D), (T * stride, stride, D, 1), 1000 * place))
    tensors[-1][0, :, 0] = own
q, k, v, d_out = tensors
x = EdgeInputs(q, k, v, torch.tensor([0.5]), Tables(T, T, 210, 0), rbf=False)
assert x.query.data_ptr() == q.data_ptr()  # no copy
with tuning.override(**small):
    out, lse, saved = forward.forward(x)
    d_q, d_k, d_v, *_ = backward.backward(
        x, out, saved, d_out, None, scale_gradient=True, bias_gradient=False
    )
for found, expected in zip((out, d_q, d_k, d_v), attention(*near)):
    close(found[0, :, 0], expected)
"""

# The edges are the last of 2^31 + 210, each with a bias and a mark that it is kept.
FAR_EDGES = """
start = 2**31
E = start + 210
q, k, v, d_out = near = [torch.randn(T, D) for _ in range(4)]
bias, d_bias = mapped((E, 1), torch.float32), mapped((1, E, 1), torch.float32)
kept = mapped((1, E, 1), torch.uint8)
bias[start:] = torch.randn(210, 1)
kept[0, start:] = 1
x = EdgeInputs(
    *(t[None, :, None] for t in (q, k, v)), torch.tensor([0.5]),
    Tables(T, T, E, start, mapped((E,), torch.int32)), rbf=False, bias=bias, kept=kept,
)
assert x.bias.data_ptr() == bias.data_ptr()  # no copy
launch_over = backward.launch_over


def with_d_bias(*arguments, **named):
    # The kernel's own, which nobody fills with zeros or sums up.
    if "p_d_bias" in named:
        named |= {"p_d_bias": d_bias}
    launch_over(*arguments, **named)


backward.launch_over = with_d_bias
with tuning.override(**small):
    out, lse, saved = forward.forward(x)
    d_q, d_k, d_v, *_ = backward.backward(
        x, out, saved, d_out[None, :, None], None, scale_gradient=True, bias_gradient=False
    )
out, d_q, d_k, d_v = (t[0, :, 0] for t in (out, d_q, d_k, d_v))
found = out, d_q, d_k, d_v, d_bias[0, start:, 0]
for mine, expected in zip(found, attention(*near, bias=bias[start:, 0]), strict=True):
    close(mine, expected)
"""

# The segments of 2^29 targets, four numbers each. Only the programs of the last are run.
FAR_SEGMENTS = """
N = 2**29 + T
near = [torch.randn(T, 1) for _ in range(4)]
q, d_out = (mapped((1, N, 1, 1), torch.float32) for _ in range(2))
q[0, -T:, 0], d_out[0, -T:, 0] = near[0], near[3]
tables = Tables(N, T, 210, 0)
segments = mapped((N, 4), torch.int64)
assert segments.numel() > 2**31
segments[-T:] = tables.by_target.segments
tables.by_target = tables.by_target._replace(segments=segments)
k, v = (x[None, :, None] for x in near[1:3])
x = EdgeInputs(q, k, v, torch.tensor([0.5]), tables, rbf=False)
heads_first, launch = math.heads_first, inputs.launch


def two_last(num_tiles, heads):
    i_b, i_h, i_tile = heads_first(num_tiles, heads)
    return i_b, i_h, i_tile + num_tiles - 2


def row_dots(a, b, factor=1.0, subtracted=None):
    found = torch.empty(1, 1, N)
    found[0, 0, -T:] = (a[0, -T:, 0] * b[0, -T:, 0]).sum(-1)
    return found


math.heads_first = two_last
inputs.launch = lambda kernel, grid, **arguments: launch(kernel, (2,), **arguments)
backward.row_dots = row_dots
with tuning.override(**small):
    out, lse, saved = forward.forward(x)
    d_q, d_k, d_v, *_ = backward.backward(
        x, out, saved, d_out, None, scale_gradient=False, bias_gradient=False
    )
for found, expected in zip((out, d_q, d_k, d_v), attention(*near)):
    close(found[0, -T:, 0], expected)
"""

END = """
took, grown = time.perf_counter() - started, memory() - before
assert grown < 0.2, f"{grown} GiB"
print("all close", round(took, 2), "s", round(grown, 3), "GiB")
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "program",
    [FAR_TOKENS, LONG_STRIDES, FAR_EDGES, FAR_SEGMENTS],
    ids=["tokens", "strides", "edges", "segments"],
)
def test_offsets_do_not_wrap_at_two_to_the_31(program: str, device: str) -> None:
    """Offsets of 2^31 and more find the right numbers and edges.

    The program runs interpreted, in a process of its own. Its memory is mapped, and only few tokens
    and edges of it are ever touched.
    """
    if device != "cpu":
        pytest.skip("on a GPU memory is not mapped lazily")
    code = START + textwrap.dedent(program) + END
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("all close")
