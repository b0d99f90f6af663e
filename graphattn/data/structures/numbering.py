"""Positions along chains: residue numbers, made unique and increasing."""

from __future__ import annotations

import torch
from torch import Tensor

CA_DISTANCE = 3.8  # distance in Angstrom of C-alpha atoms joined by a trans peptide bond
SLACK = 0.7  # Angstrom, for coordinates of low resolution: neighbours are at most 4.5 apart
CHAIN_BREAK = 512  # positions between two chains, which is more than models see along a chain


def places_along_chains(
    chain_index: Tensor,
    residue_numbers: Tensor,
    insertion_codes: tuple[str, ...],
    ca_positions: Tensor,
) -> Tensor:
    """Compute an increasing position for every residue.

    The difference of positions of neighbours in a chain is the difference of their residue numbers,
    if the numbers increase. It is larger if the distance of their C-alpha atoms requires more
    steps, because n steps reach at most 3.8 n Angstrom. If the numbers do not increase (because
    numbering restarts, for example after 9999), the difference is 1 if the residues are near
    enough to be joined, and as large as between two chains otherwise.
    """
    if len(chain_index) == 0:
        return torch.zeros_like(chain_index)
    step = residue_numbers.diff()
    code = {code: number for number, code in enumerate(dict.fromkeys(insertion_codes))}
    codes = torch.tensor([code[letter] for letter in insertion_codes], device=step.device)
    restarts = (step < 0) | (step == 0) & (codes.diff() == 0)
    distance = ca_positions.diff(dim=0).norm(dim=1)
    fewest = ((distance - SLACK) / CA_DISTANCE).ceil().nan_to_num(1.0, posinf=1.0).long()
    step = torch.maximum(step.clamp(min=1), fewest)
    is_chain_break = (chain_index.diff() != 0) | restarts & (fewest > 1)
    step = step.masked_fill(is_chain_break, CHAIN_BREAK)
    return torch.cat([step.new_zeros(1), step.cumsum(0)])
