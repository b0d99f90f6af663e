"""Small image models: their data, their recipe and their mechanisms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
from controls import with_projected_values
from rates import Arm

import graphattn as ga

MNIST = "images/mnist_t10k/t10k-images-idx3-ubyte.gz"
DATA: dict[str, dict[str, Any]] = {  # "longer" are the steps of gka in the time of dot
    "mnist": {"patch_size": 4, "patches": 49, "steps": 700, "longer": 860},
    "digits": {"patch_size": 2, "patches": 16, "steps": 600, "longer": 720},
}
DEPTH, BATCH = 4, 64
SHARED: dict[str, Any] = {
    "kind": "images",
    "model": "digits",
    "objective": "classification",
    "objective_options": {"label_smoothing": 0.1},
    "validation": 0.05,
    "test": 0.25,
    "schedule": "cosine",
    "warmup_steps": 50,
    "weight_decay": 0.05,
    "evaluate_every": 100,
    "save_every": 100,
    "keep": 1,
}
KRAUSE = {"top_k": ga.models.top_k_schedule(2, 4, DEPTH), "init_sigma": 2.5}
KRAUSE_5 = {"top_k": ga.models.top_k_schedule(8, 16, DEPTH), "init_sigma": 4.5}


def shared_of(name: str) -> dict[str, Any]:
    """Return the options of the runs on one data set."""
    data = DATA[name]
    options = {"depth": DEPTH, "patch_size": data["patch_size"]}
    tokens = BATCH * data["patches"]
    return {**SHARED, "model_options": options, "batch_tokens": tokens, "steps": data["steps"]}


def arms_of(name: str) -> dict[str, Arm]:
    """Return the arms on one data set; only "gka, longer" depends on it."""
    options = shared_of(name)["model_options"]
    near, wide = {**options, "radius": 1, "neighborhood": "plus"}, {**options, "radius": 2}
    return {
        "dot": Arm("dot"),
        "vlt": Arm("vlt"),
        "gka": Arm("gka"),
        "krause": Arm("krause", KRAUSE, config={"model_options": near}),
        "krause, 5 x 5": Arm("krause", KRAUSE_5, config={"model_options": wide}),
        "gka with values": Arm("gka", change=with_projected_values),
        "gka, longer": Arm("gka", config={"steps": DATA[name]["longer"]}),
    }


def write_digits(folder: Path) -> Path:
    """Write scikit-learn's digits as idx files, and return the path of the images."""
    from sklearn.datasets import load_digits

    found = load_digits()
    path = folder / "images-idx3-ubyte"
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        labels = folder / "labels-idx1-ubyte"
        for file, values in ((labels, found.target), (path, found.images * 255 / 16)):
            sizes = numpy.array(values.shape, ">u4").tobytes()
            numbers = values.round().astype(numpy.uint8).tobytes()
            file.write_bytes(bytes([0, 0, 8, values.ndim]) + sizes + numbers)
    return path
