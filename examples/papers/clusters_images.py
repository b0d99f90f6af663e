"""Does attention without weights segment images better than KMeans of the same pixels?"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from clusterings import CLAIM, NOTES, PREDICTION, REFUTED, STEPS, Case, measure_cases
from evidence import Experiment, Findings, main

import graphattn as ga
from graphattn.cli.clusters.sample import load_tokens

BLOCKS = (512, 128)  # tokens, as in the paper
NOISE, NOISES = 0.3, 3  # deviation of the noise on the horse, in units of black to white
IMAGES = {
    "cat": ("images/derived_Abyssinian_11_64.png", "images/derived_Abyssinian_11_64_trimap.png"),
    "lemur": ("images/lemur.png", "images/lemur_alpha.png"),
    "noisy horse": ("images/skimage_horse.png", "images/skimage_horse.png"),
}

EXPERIMENT = Experiment(
    name="clusters_images",
    title="Clusters of attention without weights: images",
    paper="Attention Clusters, Sections 3.1 to 3.3, Figures 3, 7 and 10",
    claim=CLAIM,
    prediction=PREDICTION.format(
        score="Dice coefficient (without the boundary of the trimap)",
        look="the cat gave Dice 0.858 for attention and 0.965 for KMeans of the data",
    ),
    refuted_if=REFUTED,
    config={
        "steps": STEPS,
        "blocks": BLOCKS,
        "noise": NOISE,
        "noises": NOISES,
        "files": {
            "images/derived_Abyssinian_11_64.png": "a cat of Oxford-IIIT Pet, 64 x 64",
            "images/derived_Abyssinian_11_64_trimap.png": "its trimap",
            "images/lemur.png": "of pymatting",
            "images/lemur_alpha.png": "its matte; a pixel is lemur from 0.5 on",
            "images/skimage_horse.png": "of scikit-image; the silhouette is its own mask",
        },
    },
    notes=f"{NOTES} The cat is another photo than the paper's. The horse is a silhouette, so noise "
    f"of deviation {NOISE:g} is added to its grey levels, three times. Images are averaged over "
    "blocks of pixels to at most 64 x 64. Only the horse has more than one draw.",
)


def cases(data: Path) -> Iterator[Case]:
    for name, (image, mask) in IMAGES.items():
        is_horse = name == "noisy horse"
        tokens = load_tokens(data / image, mask=data / mask)
        assert tokens.mask is not None
        truth = tokens.mask.clone()
        truth[truth == 255] = -1  # the boundary
        if is_horse:
            truth = 1 - truth  # the horse is black
        for draw in range(NOISES if is_horse else 1):
            x = tokens.x
            if is_horse:
                generator = torch.Generator().manual_seed(draw)
                grey = torch.from_numpy(tokens.image).view(x.shape)
                noise = torch.randn(x.shape, generator=generator, dtype=x.dtype)
                x = ga.dynamics.standardize(grey + NOISE * noise)
            yield Case(name, draw, x, truth, BLOCKS, global_token=len(x) // 2)


def measure(arguments: Namespace) -> Findings:
    planned = len(IMAGES) - 1 + NOISES
    every = partial(cases, Path(arguments.data))
    return measure_cases(arguments, every, list(IMAGES), planned, ga.dynamics.dice, "Dice")


if __name__ == "__main__":
    main(EXPERIMENT, measure)
