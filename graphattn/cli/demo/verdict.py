"""Results of the training in the demo, as a table and as sentences made from its numbers."""

from __future__ import annotations

import math

from rich.table import Table

from graphattn.cli.demo.pieces import MASK_RATIO, NEAREST
from graphattn.cli.demo.training import BESIDE, DemoTraining, Training
from graphattn.plain_tables import number_columns, plain_table

CERTAIN = 2.0  # standard errors from 0


def training_table(training: Training) -> Table:
    material = training.material
    others = "others" if material.is_held_out else "the same"
    table = plain_table(
        f"Training: guess masked tokens, {MASK_RATIO:.0%} of all ({training.num_training:,} for "
        f"training, {training.num_guesses:,} guesses on {others})"
    )
    table.add_column("model", min_width=20)
    number_columns(table, "weights", "steps", "time", "before", "after", "gain", "±")
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
    """Say whether the models of this run are better than guessing by frequency."""
    where = "held-out tokens" if training.material.is_held_out else "the training tokens"
    said = [f"{run.name} {_judgement(run)}" for run in training.runs]
    return (
        f"On {where}, guessing by the frequencies of the training tokens loses "
        f"{training.frequency_loss:.3f} nats per guess: {'; '.join(said)}."
    )


def _judgement(run: DemoTraining) -> str:
    numbers = f"by {abs(run.gain):.3f} ± {run.error:.3f}"
    if math.isnan(run.error):
        return "cannot be compared with it on a single position"
    if run.gain > CERTAIN * run.error:
        return f"beats it {numbers}"
    if run.gain < -CERTAIN * run.error:
        return f"is worse {numbers}"
    return (
        f"does not differ from it significantly ({run.gain:+.3f} ± {run.error:.3f}): the training "
        "is too short, or the tokens are too few, to show a difference"
    )


def _how(training: Training) -> str:
    material = training.material
    graphs = (
        f"In both, a residue sees the {NEAREST} residues with the nearest C-alpha atoms in any "
        f"chain, and {BESIDE} on each side along its own chain, with their distances. "
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
        text += (
            " and keep the weights with the lowest loss on the tokens that were set aside for this"
        )
    early = [run.name for run in training.runs if run.stopped_early]
    if early:
        text += f". Stopped early, because the loss rose: {', '.join(early)}"
    return text + "."
