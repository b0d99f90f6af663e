"""The image recipe from the command line: Mixup, CutMix and averages of weights."""

from __future__ import annotations

import json
from pathlib import Path

import numpy
import pytest
import torch
from cli_helpers import done, refused

import graphattn as ga

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")

RECIPE = ("--mixup", "0.8", "--cutmix", "1.0", "--ema-decay", "0.9")
TINY = ("--model-options", '{"dim": 16, "depth": 1, "heads": 2}', "--batch-tokens", "128")


@pytest.fixture(scope="module")
def digits(tmp_path_factory) -> Path:
    """scikit-learn's digits as an idx file with its labels."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = (bunch.images[:120] / 16 * 255).astype(numpy.uint8)
    folder = tmp_path_factory.mktemp("digits")
    header = [0, 0, 8, 3, *(0, 0, 0, 120), *(0, 0, 0, 8), *(0, 0, 0, 8)]
    (folder / "images-idx3-ubyte").write_bytes(bytes(header) + images.tobytes())
    labels = bunch.target[:120].astype(numpy.uint8)
    (folder / "labels-idx1-ubyte").write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, 120]) + labels.tobytes())
    return folder / "images-idx3-ubyte"


@pytest.mark.long
def test_digits_are_trained_with_the_recipe_continued_and_evaluated(digits, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    common = ("--model", "digits", *TINY, *RECIPE, "--schedule", "constant")
    common += ("--evaluate-every", 3)
    smoothing = ("--objective-options", '{"label_smoothing": 0.1}')
    done("train", "--data", digits, *common, *smoothing, "--steps", 6, "--out", whole)
    done("train", "--data", digits, *common, *smoothing, "--steps", 3, "--out", parts)
    done("train", "--resume", parts, "--steps", 6)
    runs = [ga.train.read_run(folder) for folder in (whole, parts)]
    assert runs[0].config.ema_decay == 0.9
    weights = [ga.load(run.path / "model").state_dict() for run in runs]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    prepared = ga.train.prepare(runs[0].config)
    names = [str(digit) for digit in range(10)]
    assert repr(prepared.objective) == (
        f"Classification(num_classes=10, label_smoothing=0.1, classes={names}, mixup=0.8, "
        "cutmix=1.0)"
    )
    trained = ga.train.load_trained(whole)
    assert trained.objective.mixup == 0  # it evaluates the images as they are
    done("evaluate", whole)
    batch = trained.objective.collate(list(prepared.test))
    expected = torch.nn.functional.cross_entropy(trained.model(batch["image"]), batch["label"])
    written = json.loads((whole / "evaluation.json").read_text())
    assert written[f"{digits.name} test"]["nats"] == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--mixup", "-1"), "mixup must be a finite number >= 0, got -1.0"),
        (("--cutmix", "lots"), "cutmix must be a finite number >= 0, got 'lots'"),
        (("--ema-decay", "1"), r"ema_decay must be in [0, 1), got 1.0"),
        (
            ("--objective-options", '{"mixup": 0.8}'),
            "objective_options must not contain 'mixup', because it is an option of the run: set "
            "mixup itself",
        ),
        (
            ("--model", "krause-mnist", "--objective", "causal", "--cutmix", "1.0"),
            "cutmix must be 0 for objective 'causal' and data of kind 'images', because only the",
        ),
    ],
)
def test_bad_values_are_refused_by_name(digits, tmp_path, options, says):
    assert says in refused("train", "--data", digits, "--out", tmp_path / "run", *options)


def test_texts_are_not_mixed(tmp_path):
    (tmp_path / "text.txt").write_text("to be or not to be " * 50)
    said = refused(
        "train", "--data", tmp_path / "text.txt", "--out", tmp_path / "run", "--mixup", "0.8"
    )
    assert "mixup must be 0 for objective 'causal' and data of kind 'text'" in said


def test_names_of_other_libraries_are_explained():
    for name, wanted in (("ema", "ema_decay"), ("mixup_alpha", "mixup")):
        with pytest.raises((TypeError, ValueError), match=rf"{name}.*did you mean '?{wanted}'?"):
            ga.train.RunConfig(**{name: 0.5})
