"""Two tiny models on the file's own tokens: all attention, and half attention, half consensus.

Masked-token modelling on pieces of the file; the last tenth of them is held out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn

import graphattn as ga
from graphattn.cli.demo.sample import Sample
from graphattn.cli.tables import plain_table

DIM, DEPTH, HEADS, EDGE_HIDDEN = 64, 4, 4, 32
MODELS = {"attention (SA)": "dot", "attention, consensus (MIX)": "mix"}
LONGEST_PIECE, BATCH = 48, 12
MASK_RATIO = 0.3
LEARNING_RATE = 3e-3
FEWEST_TOKENS = 32
EVALUATION_PIECES = 64
EVALUATIONS, PATIENCE = 12, 4


@dataclass(frozen=True)
class Pieces:
    """The sequences cut into pieces of about equal length, padded to the longest."""

    tokens: Tensor  # [P, L]
    valid: Tensor  # [P, L]

    def of(self, index: Tensor | slice) -> Pieces:
        """Some of them."""
        return Pieces(self.tokens[index], self.valid[index])


@dataclass(frozen=True)
class Trained:
    """A model, what it lost on held-out tokens on the way, and how long that took."""

    name: str
    model: ga.models.SequenceEncoder
    losses: list[tuple[int, float]]
    seconds: float
    stopped_early: bool

    @property
    def best(self) -> float:
        """The smallest held-out loss."""
        return min(loss for _, loss in self.losses)


@dataclass(frozen=True)
class Training:
    """Both models, and the loss of guessing by frequency alone."""

    runs: list[Trained]
    frequency_loss: float
    num_training: int  # tokens to learn from
    num_guesses: int  # hidden held-out tokens, some perhaps several times


def train_models(sample: Sample, steps: int, seed: int, console: Console) -> Training | None:
    """Train both for `steps` steps, with progress bars; None where the file is too short."""
    pieces = cut(sample.sequences)
    if pieces is None:
        return None
    held_out = max(1, len(pieces.tokens) // 10)
    training, held = pieces.of(slice(None, -held_out)), pieces.of(slice(-held_out, None))
    evaluation = evaluation_batch(held, sample.vocab_size)
    runs = []
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=14),
        MofNCompleteColumn(),
        TextColumn("held out {task.fields[loss]}"),
        TimeRemainingColumn(compact=True),
    )
    with one_thread(), Progress(*columns, console=console) as progress:
        for name, mixer in MODELS.items():
            task = progress.add_task(name, total=steps, loss="")

            def report(step: int, loss: float, task: int = task) -> None:
                progress.update(task, completed=step, loss=f"{loss:.3f}")  # type: ignore[arg-type]

            runs.append(
                _train(name, mixer, training, evaluation, sample.vocab_size, steps, seed, report)
            )
            progress.update(task, total=runs[-1].losses[-1][0])  # less if it stopped early
    return Training(
        runs,
        _frequency_loss(training, evaluation, sample.vocab_size),
        int(training.valid.sum()),
        int(evaluation.masked.sum()),
    )


@contextmanager
def one_thread() -> Iterator[None]:
    """Small tensors gain nothing from a second thread, and lose tenfold on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def cut(sequences: tuple[Tensor, ...]) -> Pieces | None:
    """All sequences in pieces of about equal length; None where they are too short to train on."""
    total = sum(map(len, sequences))
    if total < FEWEST_TOKENS:
        return None
    length = min(LONGEST_PIECE, total // 8)
    rows = [
        piece
        for sequence in sequences
        for piece in sequence.tensor_split(-(-len(sequence) // length))
    ]
    valid = [torch.ones(len(row), dtype=torch.bool) for row in rows]
    return Pieces(
        nn.utils.rnn.pad_sequence(rows, batch_first=True),
        nn.utils.rnn.pad_sequence(valid, batch_first=True),
    )


@dataclass(frozen=True)
class MaskedBatch:
    """Pieces with hidden tokens: what a model sees, and what it has to guess."""

    pieces: Pieces
    inputs: Tensor  # [P, L]
    masked: Tensor  # [P, L]


def masked_batch(pieces: Pieces, mask_token: int, generator: torch.Generator) -> MaskedBatch:
    """Hide a share of the tokens."""
    inputs, masked = ga.train.mask_tokens(
        pieces.tokens, mask_token, mask_ratio=MASK_RATIO, valid=pieces.valid, generator=generator
    )
    return MaskedBatch(pieces, inputs, masked)


def evaluation_batch(held: Pieces, mask_token: int) -> MaskedBatch:
    """What both models are measured on: up to 64 pieces, and few several times, masks differing."""
    count = len(held.tokens)
    spread = torch.linspace(0, count - 1, min(count, EVALUATION_PIECES)).long()
    pieces = held.of(spread.repeat(EVALUATION_PIECES // len(spread)))
    return masked_batch(pieces, mask_token, torch.Generator().manual_seed(0))


def masked_loss(model: nn.Module, batch: MaskedBatch) -> Tensor:
    """Nats per hidden token."""
    logits = model(batch.inputs, valid=batch.pieces.valid)
    return ga.train.masked_token_loss(logits, batch.pieces.tokens, batch.masked)


def _train(
    name: str,
    mixer: Any,  # a name that SequenceEncoder knows
    training: Pieces,
    evaluation: MaskedBatch,
    vocab_size: int,
    steps: int,
    seed: int,
    report: Callable[[int, float], None],
) -> Trained:
    """AdamW with warm-up, gradients clipped to norm 1; stops once the held-out loss rises."""
    started = time.perf_counter()
    torch.manual_seed(seed)
    draw = torch.Generator().manual_seed(seed)  # the same pieces and masks for both models
    model = ga.models.SequenceEncoder(
        vocab_size + 1, DIM, DEPTH, HEADS, mixer=mixer, edge_hidden=EDGE_HIDDEN
    )
    optimizer = torch.optim.AdamW(ga.train.parameter_groups(model), lr=LEARNING_RATE)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=max(1, steps // 10))
    every = max(1, steps // EVALUATIONS)
    losses: list[tuple[int, float]] = []
    for step in range(steps + 1):
        if step % every == 0 or step == steps:
            with torch.no_grad():
                losses.append((step, float(masked_loss(model, evaluation))))
            report(step, losses[-1][1])
            since_best = len(losses) - 1 - min(range(len(losses)), key=lambda i: losses[i][1])
            if step == steps or since_best >= PATIENCE:
                break
        index = torch.randint(len(training.tokens), (BATCH,), generator=draw)
        loss = masked_loss(model, masked_batch(training.of(index), vocab_size, draw))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warm_up.step()
    return Trained(name, model, losses, time.perf_counter() - started, losses[-1][0] < steps)


def _frequency_loss(training: Pieces, evaluation: MaskedBatch, vocab_size: int) -> float:
    """Nats per hidden token of guessing by the frequencies of the training tokens."""
    counts = torch.bincount(training.tokens[training.valid], minlength=vocab_size) + 1
    log_share = (counts / counts.sum()).log()
    return abs(float(log_share[evaluation.pieces.tokens[evaluation.masked]].mean()))


def training_table(training: Training) -> Table:
    """What both models lost on held-out tokens, before and after."""
    table = plain_table(
        f"Training: guess hidden tokens, {MASK_RATIO:.0%} of all "
        f"({training.num_training:,} to learn from, {training.num_guesses:,} guesses on others)"
    )
    table.add_column("model", min_width=20)
    for column in ("weights", "steps", "time", "before", "best", "last"):
        table.add_column(column, justify="right", no_wrap=True)
    for run in training.runs:
        table.add_row(
            run.name,
            f"{sum(p.numel() for p in run.model.parameters()):,}",
            f"{run.losses[-1][0]:,}",
            f"{run.seconds:.0f} s",
            f"{run.losses[0][1]:.3f}",
            f"{run.best:.3f}",
            f"{run.losses[-1][1]:.3f}",
        )
    table.caption = (
        "Loss on held-out tokens, nats per guess; guessing by frequency alone loses "
        f"{training.frequency_loss:.3f}. Best: the lowest of the evaluations, which also decide "
        "when to stop. SA: attention over complete graphs in all layers. MIX: in the first "
        "half; in the second, consensus over paths of window 2 (consensus paper)."
    )
    early = [run.name for run in training.runs if run.stopped_early]
    if early:
        table.caption += f" Stopped early, as the loss no longer fell: {', '.join(early)}."
    return table
