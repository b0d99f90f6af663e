"""Does information spread in trained consensus models as the Fiedler value of the window says?"""

from __future__ import annotations

import math
import statistics
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from consensus_ablation import LR, VALUES, arm_of
from consensus_text_diffusion import FILE
from evidence import Experiment, Findings, Verdict, main
from rates import ENDED, summary

import graphattn as ga
from graphattn.nn.files import pretrained
from graphattn.train.runs.checkpoints import checkpoint_path

WINDOWS = VALUES["window"]
TOKENS, CENTRES, STEP = 129, 8, 600
LOW, HIGH = 2.0, 4.0
T_MIN = 1e-3  # the lowest time at which AbsorbingDiffusion trains

EXPERIMENT = Experiment(
    name="consensus_mixing",
    title="How far information spreads in trained consensus models",
    paper="Stabilizing Transformer Training Through Consensus, Remark 4.2",
    claim="The Fiedler value of a window-path graph, which bounds the rate at which consensus "
    "mixes information, grows as w^3 / N^2 with the window w.",
    prediction="In the trained models of consensus_ablation, the second moment of the influence "
    "of tokens at distance d on a token (the squared gradient of its features, as a share) grows "
    "as a power of w between 2 and 4, fitted over windows 2, 4, 8 and 12.",
    refuted_if="A power below 2 or above 4.",
    config={
        "runs": "consensus_ablation, windows",
        "tokens": TOKENS,
        "centres": CENTRES,
        "step": STEP,
        "files": {FILE: "1.1 MB of Shakespeare's plays"},
    },
    notes="The theorem is about one graph with given weights, and training chooses the weights. "
    "If every token of a window has the same weight, a step moves the variance of the influence "
    "by the sum of d^2 over the window, w (w + 1) (2 w + 1) / 3, which also grows as w^3. Over "
    "these four windows the exact power of that sum is 2.72. The texts have no masks, so the "
    "models read the lowest noise level of their training.",
)


def influence(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Return the share of every distance in the influence on tokens in the middle, [TOKENS]."""
    generator = torch.Generator().manual_seed(0)
    share = torch.zeros(TOKENS, dtype=torch.float64)
    embedded: list[torch.Tensor] = []
    hook = model.embedding.register_forward_hook(
        lambda module, given, out: embedded.append(out.detach().requires_grad_()) or embedded[-1]
    )
    try:
        features = model.encode(tokens, **unmasked(model, tokens))
    finally:
        hook.remove()
    middle = TOKENS // 2
    for centre in range(middle - CENTRES // 2, middle + CENTRES // 2):
        direction = torch.randn(features.shape[-1], generator=generator, dtype=features.dtype)
        out = (features[:, centre] @ direction).sum()
        (gradient,) = torch.autograd.grad(out, embedded[0], retain_graph=True)
        squared = gradient.square().sum((0, 2)).double()
        distance = (torch.arange(TOKENS) - centre).abs()
        share.index_add_(0, distance, squared / squared.sum())
    return share / CENTRES


def unmasked(model: Any, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the noise level of a text without masks, the lowest of training, if it is an input."""
    if model.noise_dim is None:
        return {}
    lowest = torch.full(tokens.shape[:1], T_MIN, dtype=torch.float64)
    return {"noise_level": ga.train.LogLinearNoise().total(lowest)}


def second_moment(share: torch.Tensor) -> float:
    return float((share * torch.arange(TOKENS).square()).sum())


def power(moments: dict[int, float]) -> float:
    """Return the slope of the line through log moment over log window (least squares)."""
    x = [math.log(w) for w in moments]
    return statistics.linear_regression(x, [math.log(m) for m in moments.values()]).slope


def measure(arguments: Namespace) -> Findings:
    torch.set_num_threads(1)
    start = time.process_time()
    ablation = Path(arguments.work).parent / "consensus_ablation"
    text = (Path(arguments.data) / FILE).read_text(encoding="utf-8")
    runs: list[dict[str, Any]] = []
    for window in WINDOWS:
        name = arm_of("window", window)[0]
        if not (ablation / name).is_dir():
            continue
        for row in ga.train.read_sweep(ablation / name):
            if row["status"] not in ENDED:
                continue
            folder = ablation / name / row["folder"]
            tokenizer = ga.data.load_tokenizer(folder / "tokenizer.json")
            model: Any = pretrained.load(checkpoint_path(folder, STEP)).eval().double()
            tokens = tokenizer.encode(text[: 16 * TOKENS]).view(16, TOKENS)
            moment = second_moment(influence(model, tokens))
            runs.append({"window": window, "lr": LR, "seed": row["seed"], "second_moment": moment})
    by_window = {
        w: [run["second_moment"] for run in runs if run["window"] == w]
        for w in WINDOWS
        if any(run["window"] == w for run in runs)
    }
    numbers = [summary("sc", f"window {window}", own) for window, own in by_window.items()]
    means = {window: statistics.fmean(own) for window, own in by_window.items()}
    verdict: Verdict = "open"
    why = f"{len(means)} of {len(WINDOWS)} windows are trained."
    if len(means) == len(WINDOWS):
        slope = power(means)
        verdict = "held" if LOW <= slope <= HIGH else "not held"
        why = f"The second moment grows as w to the power {slope:.2f}."

    def draw(ax: Any) -> None:
        ax.plot([run["window"] for run in runs], [run["second_moment"] for run in runs], "o",
                label="trained models")  # fmt: skip
        first = min(means)
        cubes = [means[first] * (w / first) ** 3 for w in WINDOWS]
        ax.plot(WINDOWS, cubes, "k--", label="w^3")
        ax.set(xscale="log", yscale="log", xlabel="window w", ylabel="second moment of influence")
        ax.set_xticks(WINDOWS, [str(w) for w in WINDOWS])
        ax.minorticks_off()
        ax.legend()

    return Findings(
        numbers=numbers,
        verdict=verdict,
        why=why,
        runs=runs,
        seeds=sorted({run["seed"] for run in runs}),
        cpu_hours=(time.process_time() - start) / 3600,
        draw=draw if means else None,
        columns=("second moment (tokens squared)", "deviation"),
    )


if __name__ == "__main__":
    main(EXPERIMENT, measure)
