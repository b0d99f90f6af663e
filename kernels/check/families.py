"""The launches of every family of kernels: compiled and judged without a device, timed on one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from graphattn.kernels.bands import configurations as bands
from graphattn.kernels.consensus import configurations as consensus
from graphattn.kernels.edges import configurations as edges
from graphattn.kernels.generation import configurations as generation
from graphattn.kernels.neighbors import configurations as neighbors
from graphattn.kernels.shared.configuration import Configuration

FAMILIES = {
    "bands": bands, "edges": edges, "neighbors": neighbors, "generation": generation,
    "consensus": consensus,
}  # fmt: skip


def cases() -> dict[str, Callable[[str], list[Configuration]]]:
    """Return what makes the launches of every case on a device, by the name of the case: "bands 3".

    On "meta" their tensors have no values.
    """
    return {
        f"{name} {i}": partial(family.configurations_of, case)
        for name, family in FAMILIES.items()
        for i, case in enumerate(family.CASES)
    }


def all_configurations() -> list[Configuration]:
    """Every launch of every family of kernels."""
    return [configuration for make in cases().values() for configuration in make("meta")]
