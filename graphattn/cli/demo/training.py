"""Train two tiny models on the tokens of the file: attention, and attention with consensus.

The objective is masked-token modelling. Models start with guesses by frequency. The weights with
the lowest loss on a choosing set are kept, and evaluated on other tokens, which are not used for
anything else.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

import graphattn as ga
from graphattn.cli.demo.pieces import (
    NEAREST,
    SHARE,
    DemoPiece,
    MaskedBatch,
    cut,
    drawn,
    evaluation,
    hide,
    split,
)
from graphattn.cli.demo.sample import Sample
from graphattn.data.families import families
from graphattn.models.mixers import Mixer

DIM, DEPTH, HEADS, EDGE_HIDDEN = 64, 2, 4, 32
MODELS: dict[str, Mixer] = {"attention (SA)": "dot", "attention, consensus (MIX)": "mix"}
Model = ga.models.SequenceEncoder | ga.models.ProteinModel
LEARNING_RATE, WARM_UP = 3e-3, 20  # its maximum, and the number of steps until then
FEWEST_TOKENS = 32
CHOOSING_TOKENS, JUDGING_TOKENS = 6_144, 32_768  # tokens per evaluation
CHOOSING_RESIDUES, JUDGING_RESIDUES = 3_072, 8_192  # fewer, because their edges cost more
BESIDE = 2  # a residue sees this many residues on each side along its chain
EVALUATIONS, PATIENCE, RISE = 10, 4, 0.05  # RISE, in nats per guess, is larger than noise
NEVER = -20.0  # the bias of the mask token, which is never the answer
FEWEST_PIECES = 10  # from this number of pieces on, a standard error over pieces is used


@dataclass(frozen=True)
class Material:
    """Pieces for training, for choosing the weights, and for the evaluation."""

    training: list[DemoPiece]
    choosing: list[DemoPiece]  # if empty, the last weights are kept
    judging: list[DemoPiece]
    is_held_out: bool  # False: the evaluation uses the training tokens
    how: str  # in words


@dataclass(frozen=True)
class DemoTraining:
    """A trained model, its losses during training, and its loss in the evaluation."""

    name: str
    model: Model
    losses: list[tuple[int, float]]  # on the tokens that choose the weights
    before: float
    after: float
    gain: float  # compared with guessing by frequency, in nats per guess
    error: float  # its standard error
    seconds: float
    stopped_early: bool


@dataclass(frozen=True)
class Training:
    """Training of both models, and the loss of guessing by frequency alone."""

    runs: list[DemoTraining]
    frequency_loss: float  # on the tokens of the evaluation
    choosing_frequency_loss: float  # on those that choose the weights
    num_training: int  # tokens to learn from
    num_guesses: int  # masked tokens, some perhaps several times
    material: Material
    in_space: bool  # whether graphs use C-alpha atoms


def train_models(sample: Sample, steps: int, seed: int, console: Console) -> Training | None:
    """Train both models for `steps` steps; return None if there are too few tokens."""
    material = material_of(sample, seed)
    if material is None:
        return None
    mask_token = sample.vocab_size
    in_space = sample.structures is not None
    judged = JUDGING_RESIDUES if in_space else JUDGING_TOKENS
    chosen = CHOOSING_RESIDUES if in_space else CHOOSING_TOKENS
    judging = evaluation(material.judging, mask_token, judged)
    choosing = evaluation(material.choosing or material.judging, mask_token, chosen)
    log_share = log_frequency(material.training, mask_token)
    runs = []
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=14),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}"),
        TimeRemainingColumn(compact=True),
    )
    with one_thread(), Progress(*columns, console=console) as progress:
        for name, mixer in MODELS.items():
            task = progress.add_task(name, total=steps, loss="")

            def report(step: int, loss: float, task: int = task) -> None:
                progress.update(task, completed=step, loss=f"{loss:.3f}")  # type: ignore[arg-type]

            torch.manual_seed(seed)
            model = start(mixer, log_share, in_space)
            run = _train(name, model, material, choosing, judging, log_share, steps, seed, report)
            runs.append(run)
            progress.update(task, total=run.losses[-1][0])  # less if it stopped early
    return Training(
        runs,
        float(frequency_losses(log_share, judging).mean()),
        float(frequency_losses(log_share, choosing).mean()),
        sum(len(piece.tokens) for piece in material.training),
        sum(len(batch.hidden) for batch in judging),
        material,
        in_space,
    )


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one thread: for small tensors, more are not faster, and slow on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def material_of(sample: Sample, seed: int) -> Material | None:
    """Return the tokens for training and evaluation, or None if there are too few."""
    if sum(map(len, sample.sequences)) < FEWEST_TOKENS:
        return None
    pieces = cut(sample.sequences, sample.structures)
    if len(pieces) > 1:
        groups = families(sample.sequences, sample.vocab_size)
        parts = split(list(map(len, sample.sequences)), groups, seed)
        if parts is not None:
            training, choosing, held_out = (
                [piece for n in side for piece in pieces[n]]
                for side in (parts.training, parts.choosing, parts.held_out)
            )
            how = (
                f"held out: {len(parts.held_out):,} of {len(pieces):,} {sample.sequence_name}s, "
                f"drawn with the seed ({len(parts.choosing):,} others chose the weights); "
                "sequences that are equal or share 5 % of their words are on the same side "
                f"({len(groups):,} families)"
            )
            return Material(training, choosing, held_out, True, how)
    if sample.structures is not None:
        everything = [piece for structure in pieces for piece in structure]
        one = len(pieces) == 1
        what = f"this {sample.sequence_name}" if one else "these structures, all relatives"
        how = (
            f"nothing is held out, because there is only {what}. These losses show how well it was "
            "memorised, and nothing about other data"
        )
        return Material(everything, [], everything, False, how)
    # There is one text, or only copies of one record: split the longest of them by position.
    whole = cut([max(sample.sequences, key=len)])[0]
    tenth = max(1, round(SHARE * len(whole)))
    how = f"held out: the last tenth of the {sample.sequence_name} (the tenth before chose weights)"
    return Material(whole[: -2 * tenth], whole[-2 * tenth : -tenth], whole[-tenth:], True, how)


def log_frequency(pieces: Sequence[DemoPiece], vocab_size: int) -> Tensor:
    """Return the logarithms of the frequencies of tokens, with one added to every count."""
    tokens = torch.cat([piece.tokens for piece in pieces])
    counts = torch.bincount(tokens, minlength=vocab_size) + 1
    return (counts / counts.sum()).log()


def start(mixer: Mixer, log_share: Tensor, in_space: bool) -> Model:
    """Make a model whose guesses start near the frequencies of the tokens."""
    if in_space:
        options = {"edge_hidden": EDGE_HIDDEN} if mixer == "mix" else None
        protein = ga.models.ProteinModel(
            DIM, DEPTH, HEADS, mixer=mixer, mixer_options=options, neighbors=NEAREST, window=BESIDE
        )
        with torch.no_grad():
            protein.head.bias.copy_(log_share)
        return protein
    model = ga.models.SequenceEncoder(
        len(log_share) + 1, DIM, DEPTH, HEADS, mixer=mixer, edge_hidden=EDGE_HIDDEN
    )
    with torch.no_grad():
        model.head.bias.copy_(torch.cat([log_share, torch.tensor([NEVER])]))
    return model


def masked_loss(model: nn.Module, batch: MaskedBatch) -> Tensor:
    tokens = batch.batch.tokens
    return ga.train.masked_token_loss(_logits(model, batch), tokens, batch.masked)


def _logits(model: nn.Module, batch: MaskedBatch) -> Tensor:
    if batch.batch.structures:
        return model(batch.inputs, structure=batch.batch.structures)
    return model(batch.inputs, valid=batch.batch.valid)


@torch.no_grad()
def losses_of(model: nn.Module, batches: Sequence[MaskedBatch]) -> Tensor:
    entropy = nn.functional.cross_entropy
    guesses = ((_logits(model, batch)[batch.masked], batch.hidden) for batch in batches)
    return torch.cat([entropy(logits, hidden, reduction="none") for logits, hidden in guesses])


def frequency_losses(log_share: Tensor, batches: Sequence[MaskedBatch]) -> Tensor:
    return torch.cat([-log_share[batch.hidden] for batch in batches])


def standard_error(difference: Tensor, group: Tensor) -> float:
    """Return the standard error of a mean of differences [n] that correlate within a group.

    Cluster-robust: deviations are added up in each group before they are squared (Cameron and
    Miller 2015, *A Practitioner's Guide to Cluster-Robust Inference*, of a regression on 1).
    """
    names, group = group.unique(return_inverse=True)
    if len(names) < 2:
        return math.nan
    away = (difference - difference.mean()).double()
    sums = torch.zeros(len(names), dtype=torch.float64).index_add_(0, group, away)
    factor = len(names) / (len(names) - 1)
    return math.sqrt(factor * float(sums.square().sum())) / len(difference)


def gain_of(
    losses: Tensor, batches: Sequence[MaskedBatch], log_share: Tensor
) -> tuple[float, float]:
    """Return the gain of losses [guesses] over guessing by frequency, and its standard error.

    It is the larger of two: over positions (one that is masked several times counts once), and, if
    there are enough, over pieces, because a model can be good or bad on a whole protein.
    """
    difference = (frequency_losses(log_share, batches) - losses).double()
    places, pieces = (
        torch.cat([getattr(batch.batch, name)[batch.masked] for batch in batches])
        for name in ("place", "piece")
    )
    error = standard_error(difference, places)
    if len(pieces.unique()) >= FEWEST_PIECES:
        error = max(error, standard_error(difference, pieces))
    return float(difference.mean()), error


def _rises(losses: list[float]) -> bool:
    """Return whether the loss is well above its minimum, which was several evaluations ago."""
    lowest = min(losses)
    return losses[-1] > lowest + RISE and len(losses) - 1 - losses.index(lowest) >= PATIENCE


def _train(
    name: str,
    model: Model,
    material: Material,
    choosing: Sequence[MaskedBatch],
    judging: Sequence[MaskedBatch],
    log_share: Tensor,
    steps: int,
    seed: int,
    report: Callable[[int, float], None],
) -> DemoTraining:
    """Train with AdamW, warm-up, a cosine schedule, and gradients clipped to norm 1.

    It stops when the loss on the choosing tokens has risen, and restores the weights with the
    lowest loss. Without such tokens, it keeps the last weights.
    """
    started = time.perf_counter()
    mask_token = len(log_share)
    draw = torch.Generator().manual_seed(seed)  # the same pieces and masks for both models
    optimizer = torch.optim.AdamW(
        ga.train.parameter_groups(model), lr=LEARNING_RATE, betas=(0.9, 0.98)
    )
    warm_up = min(WARM_UP, max(1, steps // 4))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min(1.0, (step + 1) / warm_up) * (1 + math.cos(math.pi * step / steps)) / 2,
    )
    every = max(1, steps // EVALUATIONS)
    before = float(losses_of(model, judging).mean())
    losses: list[tuple[int, float]] = []
    best, kept = math.inf, model.state_dict()
    for step in range(steps + 1):
        if step % every == 0 or step == steps:
            losses.append((step, float(losses_of(model, choosing).mean())))
            report(step, losses[-1][1])
            if material.choosing and losses[-1][1] < best:
                best, kept = losses[-1][1], copy.deepcopy(model.state_dict())
            if step == steps or (material.choosing and _rises([loss for _, loss in losses])):
                break
        loss = masked_loss(model, hide(drawn(material.training, draw), mask_token, draw))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.load_state_dict(kept)
    after = losses_of(model, judging)
    gain, error = gain_of(after, judging, log_share)
    return DemoTraining(
        name,
        model,
        losses,
        before,
        float(after.mean()),
        gain,
        error,
        time.perf_counter() - started,
        losses[-1][0] < steps,
    )
