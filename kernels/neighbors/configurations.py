"""The launches of nearest-neighbour search that matter most, at their real sizes."""

from __future__ import annotations

import torch

from graphattn.kernels.bands.schedule import BandSchedule
from graphattn.kernels.neighbors.candidates import nearest
from graphattn.kernels.shared.configuration import Configuration
from graphattn.kernels.shared.launch import recording

TOKENS, FEATURES = 65536, 64
TARGETS = {16: "1.5x matmul + topk", 64: "", 256: ""}  # by neighbours


def configurations() -> list[Configuration]:
    """Candidates among all tokens. (What follows them has no fixed amount of work.)"""
    bands = BandSchedule(
        torch.tensor([[0, TOKENS, 0, TOKENS, 1, TOKENS - 1, TOKENS - 1, 1]]), "meta"
    )
    x = torch.empty(TOKENS, FEATURES, device="meta")
    found = []
    for k, target in TARGETS.items():
        with recording() as launches:
            nearest(x, x, bands, k, to_self=True, self_loops=False)
        launch = launches[0]
        sizes = launch.arguments
        found.append(
            Configuration(
                f"kNN {TOKENS}, D {FEATURES}, k {k}, fp32: candidates",
                launch,
                main=False,
                flops=2.0 * TOKENS**2 * FEATURES,
                bytes=4.0 * TOKENS * (2 * FEATURES + sizes["KEPT"]),
                iterations=float(bands.tile_pairs(sizes["ROWS"], sizes["COLUMNS"])),
                target=target,
            )
        )
    return found
