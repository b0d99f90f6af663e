"""What training needs beside an engine: objectives and parameter groups."""

from graphattn.train.config import RunConfig
from graphattn.train.diffusion import (
    AbsorbingDiffusion,
    GeometricNoise,
    Likelihood,
    LogLinearNoise,
    MarkovChain,
    Noise,
    absorbing_log_scores,
    denoising_score_entropy,
    generative_nll,
    likelihood_bound,
    sample_diffusion,
    score_entropy,
)
from graphattn.train.masking import mask_tokens, masked_token_loss
from graphattn.train.objective import Loss, Objective
from graphattn.train.parameters import parameter_groups

__all__ = [
    "AbsorbingDiffusion",
    "GeometricNoise",
    "Likelihood",
    "LogLinearNoise",
    "Loss",
    "MarkovChain",
    "Noise",
    "Objective",
    "RunConfig",
    "absorbing_log_scores",
    "denoising_score_entropy",
    "generative_nll",
    "likelihood_bound",
    "mask_tokens",
    "masked_token_loss",
    "parameter_groups",
    "sample_diffusion",
    "score_entropy",
]
