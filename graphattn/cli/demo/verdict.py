"""Verdict on a run of the demo, in a table and in sentences that its own numbers make."""

from __future__ import annotations

import math

from rich.table import Table

from graphattn.cli.demo.pieces import MASK_RATIO, NEAREST
from graphattn.cli.demo.training import BESIDE, DemoTraining, Training
from graphattn.plain_tables import plain_table

CERTAIN = 2.0  # standard errors from 0


def training_table(training: Training) -> Table:
    """Table of both models' losses before and after, and of gains over guessing by frequency."""
    material = training.material
    others = "others" if material.is_held_out else "the same"
    table = plain_table(
        f"Training: guess hidden tokens, {MASK_RATIO:.0%} of all "
        f"({training.num_training:,} to learn from, {training.num_guesses:,} guesses on {others})"
    )
    table.add_column("model", min_width=20)
    for column in ("weights", "steps", "time", "before", "after", "gain", "±"):
        table.add_column(column, justify="right", no_wrap=True)
    for run in training.runs:
        table.add_row(
            run.name,
            f"{sum(p.numel() for p in run.model.parameters()):,}",
            f"{run.losses[-1][0]:,}",
            f"{run.seconds:.0f} s",
            f"{run.before:.3f}",
            f"{run.after:.3f}",
            f"{run.gain:+.3f}",
            "" if math.isnan(run.error) else f"{run.error:.3f}",
        )
    table.caption = " ".join([verdict(training), _how(training)])
    return table


def verdict(training: Training) -> str:
    """Whether the models beat guessing by frequency, as this run measured it."""
    where = "held-out tokens" if training.material.is_held_out else "the tokens they learnt from"
    said = [f"{run.name} {_judgement(run)}" for run in training.runs]
    return (
        f"On {where}, guessing by the frequencies of the training tokens loses "
        f"{training.frequency_loss:.3f} nats per guess: {'; '.join(said)}."
    )


def _judgement(run: DemoTraining) -> str:
    numbers = f"by {abs(run.gain):.3f} ± {run.error:.3f}"
    if math.isnan(run.error):
        return "cannot be told from it on a single position"
    if run.gain > CERTAIN * run.error:
        return f"beats it {numbers}"
    if run.gain < -CERTAIN * run.error:
        return f"is worse {numbers}"
    return (
        f"cannot be told from it ({run.gain:+.3f} ± {run.error:.3f}): so short a training on so "
        "few tokens does not show a difference"
    )


def _how(training: Training) -> str:
    material = training.material
    graphs = (
        f"In both, a residue sees the {NEAREST} whose C-alpha atoms are nearest, of whatever "
        f"chain, and {BESIDE} on each side along its own, with their distances. "
        if training.in_space
        else "Attention sees a whole piece, consensus 2 tokens on each side. "
    )
    text = (
        "±: one standard error of the gain, guess by guess on the same tokens. "
        f"{material.how[0].upper()}{material.how[1:]}. "
        f"SA: attention in both layers. MIX: attention, then consensus (consensus paper). {graphs}"
        "Models start near the guess by frequency"
    )
    if material.choosing:
        text += " and keep the weights that did best on the tokens set aside for that"
    early = [run.name for run in training.runs if run.stopped_early]
    if early:
        text += f". Stopped early, as the loss rose: {', '.join(early)}"
    return text + "."
