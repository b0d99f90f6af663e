"""Kernels that compare sums are started without fused multiply-adds; see `launch`.

Fused, the lanes of a warp that share a sum may hold it with different last bits, and a comparison
for equality then depends on which lane is asked. The interpreter has one lane and cannot show it.
"""

import pytest
import torch

from graphattn.kernels.bands.schedule import BandSchedule
from graphattn.kernels.edges.inputs import EdgeInputs
from graphattn.kernels.edges.schedule import EdgeSchedule
from graphattn.kernels.shared.launch import Launch, recording

pytestmark = pytest.mark.usefixtures("device")


def fused(launches: list[Launch]) -> dict[str, bool]:
    return {launch.kernel.fn.__name__: launch.fp_fusion for launch in launches}


def test_neighbours_are_put_in_order_by_sums_of_rounded_products() -> None:
    from graphattn.kernels.neighbors.candidates import nearest

    every = BandSchedule(torch.tensor([[0, 50, 0, 50, 1, 49, 49, 1]]), "meta")
    x = torch.empty(50, 24, device="meta")
    with recording() as launches:
        nearest(x, x, every, 5, to_self=True, self_loops=False)
    assert fused(launches) == {
        "candidates_kernel": True,
        "order_kernel": False,
        "search_kernel": False,
    }


def test_edges_are_chosen_by_sums_of_rounded_products() -> None:
    from graphattn.kernels.edges.forward import forward
    from graphattn.kernels.edges.top_k import select

    x = torch.empty(1, 50, 2, 8, device="meta")
    tables = EdgeSchedule(50, 50, neighbors=torch.empty(50, 6, dtype=torch.int64, device="meta"))
    inputs = EdgeInputs(x, x, x, torch.empty(2, device="meta"), tables, rbf=True)
    with recording() as launches:
        select(inputs, 3)
        forward(inputs)
    assert fused(launches) == {"edges_select_kernel": False, "edges_forward_kernel": True}


def test_sources_of_windows_are_chosen_by_sums_of_rounded_products() -> None:
    from graphattn.kernels.bands.forward import forward
    from graphattn.kernels.bands.inputs import BandInputs
    from graphattn.kernels.bands.top_k import select

    window = BandSchedule(torch.tensor([[0, 50, 0, 50, 1, 9, 0, 1]]), "meta")
    x = torch.empty(1, 50, 2, 8, device="meta")
    inputs = BandInputs(x, x, x, torch.empty(2, device="meta"), window, rbf=True)
    with recording() as launches:
        inputs.kept = select(inputs, 4)
        forward(inputs)
    kernels = fused(launches)
    assert kernels.pop("band_forward_kernel")
    assert list(kernels.values()) == [False]


def test_a_step_chooses_by_sums_of_rounded_products() -> None:
    from graphattn.kernels.generation.step import window_step

    new, kept = torch.empty(3, 2, 8, device="meta"), torch.empty(6, 9, 8, device="meta")
    sigma, kernels = torch.empty(2, device="meta"), {}
    for top_k in (4, None):
        with recording() as launches:
            window_step(
                new, new, new, kept, kept, first=0, held=9, window=9, log_sigma=sigma, top_k=top_k
            )
        kernels[top_k] = fused(launches)
    assert kernels == {4: {"window_step_kernel": False}, None: {"window_step_kernel": True}}
