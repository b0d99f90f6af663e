"""The public names of graphattn.train, which load together when one of them is used."""

from graphattn.near_names import explain_functions
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
from graphattn.train.engine import fit, resume
from graphattn.train.evaluation.baselines import bigram_loss, frequency_loss
from graphattn.train.evaluation.calibration import Calibration
from graphattn.train.evaluation.evaluate import evaluate_model
from graphattn.train.evaluation.pseudo_likelihood import pseudo_log_likelihood, pseudo_perplexity
from graphattn.train.layer_records import layer_state
from graphattn.train.objectives.causal import NextToken
from graphattn.train.objectives.classification import Classification
from graphattn.train.objectives.masked import MaskedTokens
from graphattn.train.objectives.masking import (
    MaskSchedule,
    mask_ratios,
    mask_tokens,
    masked_token_loss,
)
from graphattn.train.objectives.mixing import mix_images
from graphattn.train.objectives.objective import Loss, Objective
from graphattn.train.objectives.registry import objective
from graphattn.train.objectives.regression import ResidueRegression
from graphattn.train.parameters import parameter_groups
from graphattn.train.runs.config import RunConfig
from graphattn.train.runs.folder import Run, read_run
from graphattn.train.runs.heads import WithHead
from graphattn.train.runs.setup import Prepared, prepare
from graphattn.train.runs.trained import Trained, load_trained
from graphattn.train.sweeps.results import MixerSummary, summarize_sweep
from graphattn.train.sweeps.sweep import read_sweep, resume_sweep, run_sweep

__all__ = [
    "AbsorbingDiffusion",
    "Calibration",
    "Classification",
    "GeometricNoise",
    "Likelihood",
    "LogLinearNoise",
    "Loss",
    "MarkovChain",
    "MaskSchedule",
    "MaskedTokens",
    "MixerSummary",
    "NextToken",
    "Noise",
    "Objective",
    "Prepared",
    "ResidueRegression",
    "Run",
    "RunConfig",
    "Trained",
    "WithHead",
    "absorbing_log_scores",
    "bigram_loss",
    "denoising_score_entropy",
    "evaluate_model",
    "fit",
    "frequency_loss",
    "generative_nll",
    "layer_state",
    "likelihood_bound",
    "load_trained",
    "mask_ratios",
    "mask_tokens",
    "masked_token_loss",
    "mix_images",
    "objective",
    "parameter_groups",
    "prepare",
    "pseudo_log_likelihood",
    "pseudo_perplexity",
    "read_run",
    "read_sweep",
    "resume",
    "resume_sweep",
    "run_sweep",
    "sample_diffusion",
    "score_entropy",
    "summarize_sweep",
]

explain_functions(globals(), __all__)
