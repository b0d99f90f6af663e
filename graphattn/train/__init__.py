"""What training needs beside an engine: objectives and parameter groups."""

from graphattn.train.baselines import bigram_loss, frequency_loss
from graphattn.train.calibration import Calibration
from graphattn.train.causal import NextToken
from graphattn.train.classification import Classification
from graphattn.train.config import RunConfig
from graphattn.train.heads import WithHead
from graphattn.train.masked import MaskedTokens
from graphattn.train.masking import mask_tokens, masked_token_loss
from graphattn.train.objective import Loss, Objective
from graphattn.train.parameters import parameter_groups
from graphattn.train.pseudo_likelihood import pseudo_log_likelihood, pseudo_perplexity
from graphattn.train.registry import objective
from graphattn.train.regression import ResidueRegression
from graphattn.train.schedules import MaskSchedule, mask_ratios

__all__ = [
    "Calibration",
    "Classification",
    "Loss",
    "MaskSchedule",
    "MaskedTokens",
    "NextToken",
    "Objective",
    "ResidueRegression",
    "RunConfig",
    "WithHead",
    "bigram_loss",
    "frequency_loss",
    "mask_ratios",
    "mask_tokens",
    "masked_token_loss",
    "objective",
    "parameter_groups",
    "pseudo_log_likelihood",
    "pseudo_perplexity",
]
