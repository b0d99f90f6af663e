"""The launches of every family of kernels that are compiled and judged without a device."""

from __future__ import annotations

from graphattn.kernels.bands.configurations import configurations as of_bands
from graphattn.kernels.consensus.configurations import configurations as of_consensus
from graphattn.kernels.edges.configurations import configurations as of_edges
from graphattn.kernels.generation.configurations import configurations as of_generation
from graphattn.kernels.neighbors.configurations import configurations as of_neighbors
from graphattn.kernels.shared.configuration import Configuration

FAMILIES = (of_bands, of_edges, of_neighbors, of_generation, of_consensus)


def all_configurations() -> list[Configuration]:
    """Every launch of every family of kernels."""
    return [configuration for family in FAMILIES for configuration in family()]
