"""Nearest neighbours in tensors of more than 2^31 elements, of which a few tokens are touched."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.usefixtures("device")

START = """
import resource

import torch

from graphattn.kernels.neighbors import candidates, exact
from graphattn.kernels.bands.schedule import BandSchedule

torch.manual_seed(0)
candidates.choose = lambda k, width: candidates.Sizes(16, 16, 4, 16)
N, T, D = 2**26 + 20, 20, 32
near, other = torch.randn(T, D), torch.randn(T, D)
expected = torch.cdist(near.double(), other.double()).topk(3, largest=False).indices


def far(tokens):
    # The last of 2^26: whoever counted in 32 bits would look elsewhere.
    found = torch.empty(N, *tokens.shape[1:], dtype=tokens.dtype)
    assert found.numel() > 2**31 or tokens.dim() == 1
    found[-T:] = tokens
    return found


def memory():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


before = memory()
"""

FAR_TARGETS = """
tokens = candidates.centred(near, other, "widened")
candidates.centred = lambda x, y, precision: tokens._replace(
    a=far(tokens.a), margin=far(tokens.margin if PROVED else tokens.margin - torch.inf)
)
bands = BandSchedule(torch.tensor([[N - T, T, 0, T, 1, T, T, 1]]), "cpu")
index = candidates.nearest(far(near), other, bands, 3, to_self=False, self_loops=False)
assert torch.equal(index[-T:], expected)
assert memory() - before < 0.5, memory() - before
"""

# Searching again copies all sources: the kernels before it are looked at.
FAR_SOURCES = """
tokens = candidates.centred(near, other, "widened")
candidates.centred = lambda x, y, precision: tokens._replace(
    b=far(tokens.b), square=far(tokens.square)
)
candidates.search_again = lambda x, y, index, unsure, *more: None if not unsure.any() else 1 / 0
bands = BandSchedule(torch.tensor([[0, T, N - T, T, 1, T, T, 1]]), "cpu")
index = candidates.nearest(near, far(other), bands, 3, to_self=False, self_loops=False)
assert torch.equal(index, expected + N - T)
assert memory() - before < 0.5, memory() - before
"""

CASES = {
    "far targets": "PROVED = True" + FAR_TARGETS,
    "far targets, searched again": "PROVED = False" + FAR_TARGETS,
    "far sources": FAR_SOURCES,
}


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_offsets_beyond_31_bits(name: str, device: str) -> None:
    if device != "cpu":
        pytest.skip("memory is reserved without being used on the CPU only")
    run = subprocess.run(
        [sys.executable, "-c", START + CASES[name]], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
