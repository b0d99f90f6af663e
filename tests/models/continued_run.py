"""Goes on with the training of models from their files, in a process that has nothing else.

python continued_run.py FOLDER: of every folder in it, five more steps; writes what they lead to.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import zoo
from torch import nn

import graphattn as ga

LR = 1e-2


def optimizer_of(model: nn.Module, lr: float = LR) -> torch.optim.Optimizer:
    """AdamW with the groups that the package makes."""
    return torch.optim.AdamW(ga.train.parameter_groups(model), lr=lr)


def train(
    name: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: range,
    examples: int = 4,
) -> list[float]:
    """Train a model of the zoo for the given steps, and return the loss of each."""
    losses = []
    model.train()
    for step in steps:
        optimizer.zero_grad()
        loss = zoo.loss_of(model, zoo.batch_of(name, step, examples))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """All that the next step depends on, but the weights."""
    return {"optimizer": optimizer.state_dict(), "random": torch.get_rng_state()}


def main(folder: Path) -> None:
    """Continue every run in the folder."""
    torch.set_num_threads(1)
    for run in sorted(path for path in folder.iterdir() if path.is_dir()):
        state = torch.load(run / "training.pt")
        model = ga.load(run)
        optimizer = optimizer_of(model)
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["random"])
        losses = train(state["name"], model, optimizer, range(20, 25))
        after = {"losses": losses, "weights": dict(model.state_dict())}
        torch.save({**after, **state_of(model, optimizer)}, run / "continued.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
