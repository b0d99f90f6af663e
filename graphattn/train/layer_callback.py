"""Record the state of the layers in the log of a run.

Importing this module imports transformers; :func:`graphattn.train.fit` does so when it is called.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from graphattn.train.batches.order import lengths_of
from graphattn.train.layer_records import layer_state
from graphattn.train.objectives.objective import Batch, Example, Objective
from graphattn.train.runs.config import RunConfig
from graphattn.train.runs.folder import LOG
from graphattn.train.runs.records import append_row

BATCHES, TOKENS = 4, 256  # of the probe: enough for a curve, and cheap compared with a step


class LayerRecords(TrainerCallback):
    """Write the state of all layers every ``record_every`` steps, on the same few examples.

    Args:
        objective: the objective of the run.
        config: the config of the run.
        examples: examples, from which a few are drawn with the seed of the run.
    """

    def __init__(
        self, objective: Objective, config: RunConfig, examples: Sequence[Example]
    ) -> None:
        self.objective, self.config, self.examples = objective, config, examples
        self.probe: list[Batch] | None = None

    def on_step_end(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None,
        **kwargs: Any,
    ) -> None:  # fmt: skip
        if state.global_step % self.config.record_every or not state.is_world_process_zero:
            return
        model = getattr(model, "model", model)  # without the objective around it
        if self.probe is None:
            self.probe = [_on(batch, args.device) for batch in self._batches(model)]
        state_of_layers = layer_state(
            model,
            self.objective,
            self.probe,
            optimizer=getattr(optimizer, "optimizer", optimizer),  # accelerate wraps it
            max_norm=self.config.clip_norm,
            seed=self.config.seed,
        )
        row = {"step": state.global_step, "split": "layers", **state_of_layers}
        append_row(Path(self.config.out) / LOG, row)

    def _batches(self, model: Any) -> list[Batch]:
        lengths = lengths_of(self.examples, model)
        order = list(range(len(lengths)))
        random.Random(self.config.seed).shuffle(order)
        batches = []
        for place in range(min(BATCHES, len(order))):
            chosen: list[int] = []
            for index in order[place::BATCHES]:
                longest = max(int(lengths[i]) for i in [*chosen, index])
                if chosen and longest * (len(chosen) + 1) > TOKENS:
                    break
                chosen.append(index)
            batches.append(self.objective.collate([self.examples[i] for i in chosen]))
        return batches


def _on(value: Any, device: torch.device) -> Any:
    if isinstance(value, dict):
        return {name: _on(entry, device) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_on(entry, device) for entry in value)
    return value.to(device) if callable(getattr(value, "to", None)) else value
