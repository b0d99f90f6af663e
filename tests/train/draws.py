"""Random numbers, a chain and a model that tests of objectives share."""

import torch
from torch import nn

import graphattn as ga

TRANSITION = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.6, 0.3], [0.45, 0.05, 0.5]]).double()
CHAIN = ga.train.MarkovChain(TRANSITION)
V = MASK = 3  # the number of tokens of the chain, and the token after them


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Table(nn.Module):
    """Outputs from a table, by token."""

    def __init__(self, table):
        super().__init__()
        self.table = nn.Parameter(table)

    def forward(self, tokens, valid=None):
        return self.table[tokens]
