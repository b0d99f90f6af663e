"""Progress of a run in the terminal."""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from transformers import TrainerCallback


class ProgressLine(TrainerCallback):
    """Show the steps, the loss, and the remaining time.

    If stderr is not a terminal, as in the log file of a batch system, it writes a line after every
    evaluation, and otherwise one per minute.

    Args:
        name: name of the run, with which every line begins.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.began = self.last_line = time.monotonic()
        self.first = 0
        self.bar: Progress | None = None
        self.task: TaskID | None = None
        self.told: dict[str, str] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.began = self.last_line = time.monotonic()
        self.first = state.global_step
        if not (state.is_world_process_zero and sys.stderr.isatty()):
            return
        self.bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self.bar.start()
        self.task = self.bar.add_task("", total=state.max_steps, completed=state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.bar is not None and self.task is not None:
            self.bar.update(self.task, completed=state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        for name, title in (("loss", "loss"), ("eval_loss", "validation")):
            if name in logs:
                self.told[title] = f"{title} {logs[name]:.4g}"
        if self.bar is not None and self.task is not None:
            self.bar.update(self.task, description="  ".join(self.told.values()))
        elif state.is_world_process_zero and (
            "eval_loss" in logs or time.monotonic() - self.last_line > 60
        ):
            self._write_line(state.global_step, state.max_steps)

    def _write_line(self, step: int, steps: int) -> None:
        now = time.monotonic()
        self.last_line = now
        left = (now - self.began) / max(step - self.first, 1) * (steps - step)
        told = [f"step {step:,} of {steps:,}", *self.told.values()]
        told += [f"{timedelta(seconds=round(left))} left"] * (step < steps)
        print(f"{self.name}: {', '.join(told)}", file=sys.stderr, flush=True)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.close()

    def close(self) -> None:
        """Restore the terminal, also after an exception."""
        if self.bar is not None:
            self.bar.stop()
            self.bar = None
