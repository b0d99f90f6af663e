"""Does Krause attention write images pixel by pixel with fewer bits, and faster?"""

from __future__ import annotations

import statistics
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from costs import in_turns, losses_in_time, over_time, seconds_per_step
from evidence import Experiment, Findings, Verdict, main, once
from rates import (
    Arm,
    best_rate,
    config_of,
    cpu_hours,
    kept,
    means,
    run_arms,
    spread,
    summary,
    table_of,
)
from torch.nn import functional

import graphattn as ga

RATES = (1e-3, 3e-3)
SEEDS = 3
SIDE, AT_ONCE = 14, 16  # pixels of a side; images that are generated together
TOKENS = SIDE * SIDE
FASTER = 1.05
KRAUSE = {"top_k": 48, "init_sigma": 2.5, "attention_dropout": 0.0}
ARMS = {
    "standard": Arm("dot", {"attention_dropout": 0.0}, window=TOKENS),
    "krause": Arm("krause", KRAUSE, window=64),
    "linear": Arm("linear", window=TOKENS),
}
SHARED = {
    "kind": "images",
    "model": "krause-mnist",
    "model_options": {"dim": 64, "depth": 4, "heads": 4, "num_positions": TOKENS, "dropout": 0.0},
    "objective": "causal",
    "validation": 0.1,
    "test": 0.1,
    "validation_tokens": 400 * TOKENS,
    "steps": 600,
    "batch_tokens": 16 * TOKENS,
    "evaluate_every": 100,
    "save_every": 200,
    "keep": 1,
}
FILES = "images/mnist_t10k"
ABOUT = "the 10,000 test images of MNIST, idx files"

EXPERIMENT = Experiment(
    name="krause_images",
    title="Images of digits, pixel by pixel",
    paper="Krause Synchronization Transformers, Main Results (MNIST and CIFAR-10, autoregressive)",
    claim="Autoregressive image models with Krause attention need fewer bits per dimension than "
    "standard attention (MNIST: 0.5652 and 0.5685) and are faster in generation (106 and 83 images "
    "per second). They are slower than linear attention, but have a better likelihood.",
    prediction="Each arm takes its rate with the lowest mean validation loss. Mean test bits per "
    "pixel of Krause are below those of standard and of linear attention, each time by more than "
    "the larger of the two deviations over three seeds. The same holds for the validation loss at "
    "equal CPU seconds of training. And Krause attention writes at least 1.05 times as many images "
    "per CPU second as standard attention.",
    refuted_if="Mean bits or mean loss of Krause that are not below those of the other two, or "
    "fewer than 1.05 times as many images per second. Differences in bits or loss that are smaller "
    "than the deviation make it inconclusive.",
    config=config_of(ARMS, RATES, SHARED, FILES, ABOUT),
    notes="784 pixels do not fit into the time of this experiment, so images are reduced to 14 x "
    "14 by averages of 2 x 2 pixels. Models have 4 layers of width 64 (12 of 256 in the paper) "
    "and no dropout, and train for 600 steps of 16 images. The window of 64 pixels contains as "
    "many rows of the image as 128 of 784 do, and 3 of 4 of its pixels are kept, as in the "
    "paper. Bits are the mean over 195 pixels; the first is given. Numbers of smaller images "
    "cannot be compared with those of the paper. Data are 8,000 images to train, 1,000 to choose "
    "the rate, and 1,000 to test. Before this prediction, untrained models were timed once: 16 "
    "images took 0.29 s with standard attention and 0.26 s with Krause attention. Models of 4 "
    "training steps gave a factor of 1.27. The paper's speed is that of a GPU with 784 pixels, "
    "where a window saves more.",
)


def smaller_images(data: Path, work: Path) -> Path:
    """Write the images with half as many pixels on each side, and their labels, as idx files."""
    folder = work / "images"
    images, labels = (ga.data.read_idx(path) for path in sorted(data.glob("*ubyte.gz")))
    if not (folder / "t10k-labels-idx1-ubyte").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        small = functional.avg_pool2d(images.double()[:, None], 2)[:, 0].round().to(torch.uint8)
        header = bytes([0, 0, 8, 3]) + b"".join(n.to_bytes(4, "big") for n in small.shape)
        content = header + small.numpy().tobytes()
        (folder / "t10k-images-idx3-ubyte").write_bytes(content)
        header = bytes([0, 0, 8, 1]) + len(labels).to_bytes(4, "big")
        (folder / "t10k-labels-idx1-ubyte").write_bytes(header + labels.numpy().tobytes())
    return folder


def test_bits(folder: Path) -> dict[str, float]:
    """Return the bits per pixel of a trained model, on the test images."""
    trained = ga.train.load_trained(folder)
    made = ga.train.prepare(ga.train.RunConfig.load(folder / "config.yaml"))
    assert made.test is not None
    report = ga.train.evaluate_model(trained.model, made.objective, made.test)
    return {"bits": float(report["bits_per_token"])}


def images_per_second(folders: dict[str, Path]) -> dict[str, float]:
    """Return how many images trained models write in one second of CPU time."""

    def writer(folder: Path) -> Any:
        model: Any = ga.train.load_trained(folder).model.eval()
        first = torch.zeros(AT_ONCE, 1, dtype=torch.int64)  # the corner of a digit is black

        def write() -> None:
            random = torch.Generator().manual_seed(0)
            model.generate(first, TOKENS - 1, temperature=1.0, generator=random)

        return write

    seconds = in_turns({arm: writer(folder) for arm, folder in folders.items()}, rounds=7)
    return {arm: AT_ONCE / each for arm, each in seconds.items()}


def judged(
    bits: dict[str, list[float]], equal: dict[str, list[float]], speed: dict[str, float]
) -> tuple[Verdict, str]:
    if set(bits) != set(ARMS) or min(len(own) for own in bits.values()) < SEEDS:
        return "open", f"{sum(len(own) for own in bits.values())} of {SEEDS * 3} models are tested."
    behind, unsure, parts = False, False, []
    for what, found in (("test bits", bits), ("loss at equal seconds", equal)):
        for arm in ("standard", "linear"):
            gain = statistics.fmean(found[arm]) - statistics.fmean(found["krause"])
            deviation = max(spread(found[name]) or 0.0 for name in (arm, "krause"))
            behind, unsure = behind or gain <= 0, unsure or gain <= deviation
            parts.append(f"{what} {gain:+.4f} (deviation {deviation:.4f}) against {arm}")
    faster = speed["krause"] / speed["standard"]
    why = (
        f"Gain of Krause: {', '.join(parts)}. It writes {speed['krause']:.1f} images per second, "
        f"{faster:.2f} times as many as standard attention; linear {speed['linear']:.1f}."
    )
    if behind or faster < FASTER:
        return "not held", why
    return ("inconclusive" if unsure else "held"), why


def measure(arguments: Namespace) -> Findings:
    work = Path(arguments.work)
    shared = {**SHARED, "data": str(smaller_images(Path(arguments.data) / FILES, work))}
    rows = run_arms(arguments, ARMS, RATES, SEEDS, shared)
    chosen = {arm: best_rate(rows, arm) for arm in ARMS if means(rows, arm)}
    best = [row for row in rows if row["lr"] == chosen.get(row["arm"]) and row["loss"] is not None]
    whole = len(kept(rows)) == len(ARMS) * len(RATES) * SEEDS
    folders = {(row["arm"], row["seed"]): work / row["arm"] / row["folder"] for row in best}
    bits: dict[str, list[float]] = {}
    equal, speed, seconds = {}, {}, {}
    if whole:
        for (arm, seed), folder in folders.items():
            file = work / f"bits, {arm}, {seed}.json"
            found = once(arguments, file, partial(test_bits, folder))
            if found is not None:
                bits.setdefault(arm, []).append(found["bits"])
        seconds = seconds_per_step(arguments, ARMS, shared)
        equal = losses_in_time(best, seconds)
        firsts = {arm: folders[arm, 0] for arm in ARMS}
        speed = once(arguments, work / "speed.json", partial(images_per_second, firsts)) or {}
    numbers = table_of(rows, list(ARMS))
    columns: tuple[tuple[str, dict[str, list[float]]], ...] = (
        ("test bits per pixel", bits),
        ("validation loss (nats) at equal CPU seconds", equal),
        ("images per CPU second", {arm: [each] for arm, each in speed.items()}),
        ("CPU seconds of a training step", {arm: [each] for arm, each in seconds.items()}),
        ("rate", {arm: [lr] for arm, lr in chosen.items()}),
    )
    for setting, found in columns:
        numbers += [summary(arm, setting, own) for arm, own in found.items()]
    verdict, why = judged(bits, equal, speed)

    return Findings(
        numbers=numbers,
        verdict=verdict,
        why=why,
        runs=kept(rows),
        seeds=list(range(SEEDS)),
        cpu_hours=cpu_hours(rows),
        draw=(lambda ax: over_time(best, seconds, ax)) if whole else None,
        columns=("validation loss (nats) of every rate; then values", "deviation"),
    )


if __name__ == "__main__":
    main(EXPERIMENT, measure)
