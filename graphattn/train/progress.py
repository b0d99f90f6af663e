"""A line that tells how far a run is, where somebody can see it."""

from __future__ import annotations

import sys
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
    """Steps, the loss, and the time that is left; nothing where stderr is no terminal."""

    def __init__(self) -> None:
        self.bar: Progress | None = None
        self.task: TaskID | None = None
        self.told: dict[str, str] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
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
        if self.bar is None or self.task is None:
            return
        for name, title in (("loss", "loss"), ("eval_loss", "validation")):
            if name in logs:
                self.told[title] = f"{title} {logs[name]:.4g}"
        self.bar.update(self.task, description="  ".join(self.told.values()))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.close()

    def close(self) -> None:
        """Leave the terminal as it was, after an exception too."""
        if self.bar is not None:
            self.bar.stop()
            self.bar = None
