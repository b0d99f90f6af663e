"""The launches of nearest-neighbour search that matter most, at their real sizes."""

from __future__ import annotations

from typing import NamedTuple

import torch

from graphattn.kernels.bands.schedule import BandSchedule
from graphattn.kernels.neighbors.candidates import nearest
from graphattn.kernels.shared.configuration import Configuration, made
from graphattn.kernels.shared.launch import recording

TOKENS, FEATURES = 65536, 64


class NeighborCase(NamedTuple):
    """A search for the `k` nearest of all tokens."""

    k: int
    target: str = ""


CASES = (NeighborCase(16, "1.5x matmul + topk"), NeighborCase(64), NeighborCase(256))


def configurations_of(case: NeighborCase, device: str = "meta") -> list[Configuration]:
    """Candidates among all tokens. (What follows them has no fixed amount of work.)"""
    bands = BandSchedule(
        torch.tensor([[0, TOKENS, 0, TOKENS, 1, TOKENS - 1, TOKENS - 1, 1]]), device
    )
    x = made(TOKENS, FEATURES, dtype=torch.float32, device=device)
    with recording() as launches:
        nearest(x, x, bands, case.k, to_self=True, self_loops=False)
    launch = launches[0]
    sizes = launch.arguments
    return [
        Configuration(
            f"kNN {TOKENS}, D {FEATURES}, k {case.k}, fp32: candidates",
            launch,
            flops=2.0 * TOKENS**2 * FEATURES,
            bytes=4.0 * TOKENS * (2 * FEATURES + sizes["KEPT"]),
            iterations=float(bands.tile_pairs(sizes["ROWS"], sizes["COLUMNS"])),
            target=case.target,
        )
    ]
