"""What training needs beside an engine: objectives and parameter groups."""

from graphattn.train.config import RunConfig
from graphattn.train.masking import mask_tokens, masked_token_loss
from graphattn.train.objective import Loss, Objective
from graphattn.train.parameters import parameter_groups

__all__ = [
    "Loss",
    "Objective",
    "RunConfig",
    "mask_tokens",
    "masked_token_loss",
    "parameter_groups",
]
