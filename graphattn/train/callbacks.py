"""Callbacks of a run: its progress in the terminal, and records of its layers in the log.

Importing this module imports transformers; :func:`graphattn.train.fit` does so when it is called.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from accelerate.utils import send_to_device  # type: ignore[import-untyped]
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
from transformers import TrainerCallback

from graphattn.train.batches import lengths_of, unwrapped
from graphattn.train.layer_records import layer_state
from graphattn.train.objectives.objective import Batch, Example, Objective
from graphattn.train.runs.config import RunConfig
from graphattn.train.runs.folder import LOG
from graphattn.train.runs.records import append_row

BATCHES, TOKENS = 4, 256  # of the probe: enough for a curve, and cheap compared with a step


class ProgressLine(TrainerCallback):
    """Show the steps, the loss, and the remaining time; every line begins with `name`.

    If stderr is not a terminal, as in the log file of a batch system, it writes a line after every
    evaluation, and otherwise one per minute.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.began = self.last_line = time.monotonic()
        self.first = 0
        self.bar: Progress | None = None
        self.losses: dict[str, str] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.began = self.last_line = time.monotonic()
        self.first = state.global_step
        if not (state.is_world_process_zero and sys.stderr.isatty()):
            return
        columns = ("step", MofNCompleteColumn(), BarColumn(), "{task.description}")
        self.bar = Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True))
        self.bar.start()
        self.task = self.bar.add_task("", total=state.max_steps, completed=state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.bar is not None:
            self.bar.update(self.task, completed=state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        for name, title in (("loss", "loss"), ("eval_loss", "validation")):
            if name in logs:
                self.losses[title] = f"{title} {logs[name]:.4g}"
        if self.bar is not None:
            self.bar.update(self.task, description="  ".join(self.losses.values()))
        elif state.is_world_process_zero and (
            "eval_loss" in logs or time.monotonic() - self.last_line > 60
        ):
            self._write_line(state.global_step, state.max_steps)

    def _write_line(self, step: int, steps: int) -> None:
        self.last_line = time.monotonic()
        left = (self.last_line - self.began) / max(step - self.first, 1) * (steps - step)
        parts = [f"step {step:,} of {steps:,}", *self.losses.values()]
        parts += [f"{timedelta(seconds=round(left))} left"] * (step < steps)
        print(f"{self.name}: {', '.join(parts)}", file=sys.stderr, flush=True)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.close()

    def close(self) -> None:
        """Restore the terminal, also after an exception."""
        if self.bar is not None:
            self.bar.stop()
            self.bar = None


class LayerRecords(TrainerCallback):
    """Write the state of all layers every ``record_every`` steps, on the same few examples.

    They are drawn from `examples` with the seed of the run.
    """

    def __init__(self, objective: Objective, config: RunConfig, examples: Sequence[Example]):
        self.objective, self.config, self.examples = objective, config, examples
        self.probe: list[Batch] | None = None

    def on_step_end(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None,
        **kwargs: Any,
    ) -> None:  # fmt: skip
        if state.global_step % self.config.record_every or not state.is_world_process_zero:
            return
        model = unwrapped(getattr(model, "model", model))  # without the objective around it
        if self.probe is None:
            self.probe = send_to_device(self._batches(model), args.device)
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
