"""Places along the chains: residue numbers, made unique and increasing."""

from __future__ import annotations

import torch
from torch import Tensor

CA_DISTANCE = 3.8  # Angstrom between C-alpha atoms that a trans peptide bond joins
SLACK = 0.7  # Angstrom: coordinates of low resolution; neighbours are at most 4.5 apart
CHAIN_BREAK = 512  # places between chains: farther than models look along one


def places_along_chains(
    chain_index: Tensor,
    residue_numbers: Tensor,
    insertion_codes: tuple[str, ...],
    ca_positions: Tensor,
) -> Tensor:
    """One place per residue, increasing: neighbours in a chain as far apart as is known.

    Numbers are believed where they grow. A chain of n steps reaches at most 3.8 n Angstrom, so
    residues that lie farther apart than their numbers say are at least that many steps apart. Where
    numbers fall (a chain numbered anew, as after 9999) the next residue is the next place, if it
    lies near enough; if not, it is as far away as another chain.
    """
    if len(chain_index) == 0:
        return torch.zeros_like(chain_index)
    step = residue_numbers.diff()
    code = {code: number for number, code in enumerate(dict.fromkeys(insertion_codes))}
    codes = torch.tensor([code[own] for own in insertion_codes], device=step.device)
    numbered_anew = (step < 0) | (step == 0) & (codes.diff() == 0)
    distance = ca_positions.diff(dim=0).norm(dim=1)
    fewest = ((distance - SLACK) / CA_DISTANCE).ceil().nan_to_num(1.0, posinf=1.0).long()
    step = torch.maximum(step.clamp(min=1), fewest)
    apart = (chain_index.diff() != 0) | numbered_anew & (fewest > 1)
    step = step.masked_fill(apart, CHAIN_BREAK)
    return torch.cat([step.new_zeros(1), step.cumsum(0)])
