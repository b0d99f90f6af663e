"""Absorbing discrete diffusion: noise that masks tokens, score entropy, sampling, likelihood."""

from graphattn.train.diffusion.likelihood import Likelihood, generative_nll, likelihood_bound
from graphattn.train.diffusion.markov_chain import MarkovChain
from graphattn.train.diffusion.noise import GeometricNoise, LogLinearNoise, Noise
from graphattn.train.diffusion.objective import AbsorbingDiffusion
from graphattn.train.diffusion.sampler import sample_diffusion
from graphattn.train.diffusion.score_entropy import (
    absorbing_log_scores,
    denoising_score_entropy,
    score_entropy,
)

__all__ = [
    "AbsorbingDiffusion",
    "GeometricNoise",
    "Likelihood",
    "LogLinearNoise",
    "MarkovChain",
    "Noise",
    "absorbing_log_scores",
    "denoising_score_entropy",
    "generative_nll",
    "likelihood_bound",
    "sample_diffusion",
    "score_entropy",
]
