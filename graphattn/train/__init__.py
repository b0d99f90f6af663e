"""What training needs beside an engine: objectives and parameter groups."""

from graphattn.train.masking import mask_tokens, masked_token_loss
from graphattn.train.parameters import parameter_groups

__all__ = ["mask_tokens", "masked_token_loss", "parameter_groups"]
