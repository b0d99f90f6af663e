"""Hidden states and the eigenvalues of their covariance, by hand."""

import torch


def states_of(*shape, seed=1):
    """Random states, float64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def eigenvalues(x, padding=None):
    """Mean over sequences [B, N, C] of the eigenvalues of the real tokens' covariance."""
    spectra = []
    for b, tokens in enumerate(x):
        real = tokens if padding is None else tokens[~padding[b]]
        centred = real - real.mean(0)
        spectra.append(torch.linalg.eigvalsh(centred.T @ centred / len(real)).flip(0))
    return torch.stack(spectra).mean(0)
