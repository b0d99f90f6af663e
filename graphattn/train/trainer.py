"""transformers' Trainer with our objectives, parameter groups, order and checkpoints.

Importing this module imports transformers; :func:`graphattn.train.fit` does so when it is called.
"""

from __future__ import annotations

import functools
import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from graphattn.data import TokenBatches
from graphattn.nn.files import pretrained
from graphattn.train.averaging import WeightAverage
from graphattn.train.batches import EndlessBatches, TrainingLoader, lengths_of
from graphattn.train.objectives.objective import (
    Batch,
    Example,
    Loss,
    Objective,
    evaluation_generator,
)
from graphattn.train.parameters import parameter_groups
from graphattn.train.running_loss import RunningLoss
from graphattn.train.runs import checkpoints
from graphattn.train.runs import folder as run_folder
from graphattn.train.runs.config import RunConfig
from graphattn.train.runs.divided import Divided
from graphattn.train.runs.records import append_row, replace_text, sync
from graphattn.train.runs.sharded_weights import ShardedWeights

SEED_OF_BATCHES = 2**32  # evaluations draw from smaller seeds
SCHEDULES = {"cosine": "cosine", "linear": "linear", "constant": "constant_with_warmup"}


def training_arguments(
    config: RunConfig, *, evaluates: bool, use_cpu: bool = False
) -> TrainingArguments:
    """Return the arguments of transformers' Trainer for a run."""
    return TrainingArguments(
        output_dir=config.out,
        max_steps=config.steps,
        gradient_accumulation_steps=config.accumulate,
        learning_rate=config.lr,
        lr_scheduler_type=SCHEDULES[config.schedule],
        warmup_steps=config.warmup_steps,
        weight_decay=config.weight_decay,
        max_grad_norm=config.clip_norm,
        bf16=config.precision == "bfloat16",
        fp16=config.precision == "float16",
        seed=config.seed,
        logging_strategy="steps",
        logging_steps=config.log_every,
        logging_nan_inf_filter=False,
        eval_strategy="steps" if evaluates else "no",
        eval_steps=config.evaluate_every,
        save_strategy="steps",
        save_steps=config.save_every,
        metric_for_best_model="loss" if evaluates else None,
        greater_is_better=False if evaluates else None,
        report_to=services(config.log_to),
        dataloader_num_workers=config.workers,
        dataloader_pin_memory=torch.cuda.is_available() and not use_cpu,
        remove_unused_columns=False,
        ignore_data_skip=True,  # our sampler itself starts at the right batch
        disable_tqdm=True,
        use_cpu=use_cpu,
    )


def _collated(objective: Objective, examples: Sequence[Example]) -> Batch:
    batch = objective.collate(examples)
    if not isinstance(batch, dict):
        raise ValueError(
            f"{type(objective).__name__}.collate must return a dict, such as "
            f"{{'tokens': tensor}}, got {type(batch).__name__}"
        )
    return batch


def services(log_to: str) -> list[str]:
    """Return the services in `log_to`, after checking that transformers can report to them."""
    from transformers.integrations import integration_utils as known

    names = [name.strip() for name in log_to.split(",")]
    if names in (["none"], ["all"]):
        return names
    there = known.get_available_reporting_integrations()
    for name in names:
        if name not in known.INTEGRATION_TO_CALLBACK:
            allowed = ", ".join(sorted(known.INTEGRATION_TO_CALLBACK))
            raise ValueError(
                f"log_to must be 'none', 'all' or some of {allowed}, separated by commas, got "
                f"{log_to!r}"
            )
        # The last two report a missing package themselves.
        if name not in (*there, "azure_ml", "flyte"):
            raise ImportError(
                f"log_to={name!r} needs a package that is missing: install it with pip install "
                f"{name}"
            )
    return names


class Learner(nn.Module):
    """A model and its objective as one module, whose call returns the loss.

    Wrappers of transformers and torch (for processes or half precision) then apply to the whole
    step, and the objective can call the model in any way.
    """

    def __init__(self, model: nn.Module, objective: Objective) -> None:
        super().__init__()
        self.model, self.objective = model, objective

    def forward(self, batch: Batch, generator: torch.Generator | None = None) -> tuple[Tensor, int]:
        loss = self.objective.loss(self.model, batch, generator)
        if not isinstance(loss, Loss):
            raise ValueError(
                f"{type(self.objective).__name__}.loss must return a graphattn.train.Loss(total, "
                "count), with the sum over all guesses and their number, got "
                f"{type(loss).__name__}"
            )
        return loss.total, loss.count


class GraphTrainer(Trainer):
    """transformers' Trainer with an objective instead of a loss.

    The loss of a step is the mean over all guesses of all accumulated batches and of all processes.
    Everything else is the Trainer's: precision, clipping, schedule, processes, logging services,
    callbacks.

    Args:
        model: a module that the objective can call.
        objective: the objective of the run.
        config: the config without "auto".
        args: from :func:`training_arguments`.
        train, validation: sequences of examples.
        start: the step of the checkpoint from which the run continues.
        group: the process group that divides every sequence; None with ``context_parallel=1``.
        callbacks: transformers' TrainerCallback.

    Example:
        >>> import transformers, graphattn as ga
        >>> issubclass(ga.train.GraphTrainer, transformers.Trainer)
        True
    """

    optimizer: Any
    control: Any

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        config: RunConfig,
        args: TrainingArguments,
        train: Sequence[Example],
        validation: Sequence[Example] | None = None,
        *,
        start: int = 0,
        group: Any = None,
        callbacks: Sequence[TrainerCallback] = (),
    ) -> None:
        self.objective, self.config, self.start, self.group = objective, config, start, group
        # Processes of one group train on the same batches.
        self.groups = args.world_size // config.context_parallel
        self.place = args.process_index // config.context_parallel
        self.batches_done = start * config.accumulate  # of this group
        self.divided: dict[nn.Module, Divided] = {}
        self.folder = Path(config.out)
        self.running = RunningLoss()
        most = config.batch_tokens
        self.batches = TokenBatches(lengths_of(train, model, most), most, seed=config.seed)
        self._validation_lengths: Tensor | None = None
        if validation is not None:  # check the validation examples before the first step
            self._validation_lengths = lengths_of(validation, model, most, "validation")
        self.learned = model
        self.average = WeightAverage(model, config.ema_decay) if config.ema_decay else None
        self.parts: ShardedWeights | None = None  # with ``fsdp``
        if config.fsdp and args.world_size > 1:
            # Before the Trainer moves the model to its device, where all of it may not fit.
            self.parts = ShardedWeights(model, args.device)
            self.parts.shard(model)
            if self.average is not None:
                self.parts.shard(self.average.module)
        super().__init__(
            model=Learner(self._divided(model), objective),
            args=args,
            train_dataset=train,
            eval_dataset=validation,
            data_collator=functools.partial(_collated, objective),
            callbacks=[_Flow(self), *callbacks],
        )
        if self.average is not None:
            self.average.module.to(args.device)

    def _wrap_model(self, model: nn.Module, *args: Any, **given: Any) -> nn.Module:
        if self.parts is None:
            return super()._wrap_model(model, *args, **given)
        # Then accelerate adds only autocast, and no DistributedDataParallel.
        options = {"device_placement": False, "evaluation_mode": True}
        return self.accelerator.prepare_model(model, **options)

    def _divided(self, model: nn.Module) -> nn.Module:
        if self.group is None:
            return model
        if model not in self.divided:  # it keeps the divided graphs
            self.divided[model] = Divided(model, self.group)
        return self.divided[model]

    @property
    def evaluated(self) -> nn.Module:
        """Return the model that is evaluated and saved: the average of the weights, if any."""
        return self.learned if self.average is None else self.average.module

    # Batches.

    def get_train_dataloader(self) -> TrainingLoader:
        done = self.start * self.config.accumulate * self.groups
        return TrainingLoader(
            self.train_dataset,
            batch_sampler=EndlessBatches(self.batches, done, self.place, self.groups),
            collate_fn=self.data_collator,
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory,
            batches=self.config.steps * self.config.accumulate,
        )

    def batches_of(self, dataset: Sequence[Example]) -> torch.utils.data.DataLoader:
        """Load all examples once, in order, on the CPU."""
        lengths = self._validation_lengths
        if dataset is not self.eval_dataset or lengths is None:
            lengths = lengths_of(dataset, self.learned, self.config.batch_tokens, "eval_dataset")
        order = TokenBatches(lengths, self.config.batch_tokens, seed=0, shuffle=False)
        return torch.utils.data.DataLoader(
            dataset,  # type: ignore[arg-type]
            batch_sampler=order,
            collate_fn=self.data_collator,
            num_workers=self.args.dataloader_num_workers,
            generator=torch.Generator().manual_seed(0),
        )

    def _prepare_input(self, data: Any) -> Any:
        """Move an input to the device, including graphs and structures."""
        if not isinstance(data, Tensor) and callable(getattr(data, "to", None)):
            return data.to(self.args.device)
        return super()._prepare_input(data)

    # A step.

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            kind, options = self.get_optimizer_cls_and_kwargs(self.args)
            groups = parameter_groups(self.learned, self.config.weight_decay)
            self.optimizer = kind(groups, **options)
        return self.optimizer

    def training_step(
        self, model: nn.Module, inputs: Batch, num_items_in_batch: Any = None
    ) -> Tensor:
        """Run one batch forward and backward; after the last of a step, scale the gradients."""
        model.train()
        inputs = self._prepare_inputs(inputs)
        generator = None
        if self.group is not None:
            # All processes of a group draw the same masks. The numbers depend on the batch alone,
            # so a continued run draws them, too, with any number of processes.
            number = self.batches_done * self.groups + self.place
            generator = evaluation_generator(inputs, number, self.config.seed + SEED_OF_BATCHES)
        self.batches_done += 1
        total, count = model(inputs, generator)
        # The number of guesses of all batches is known only at the end. Until then, sums are
        # divided by the same approximate number, because they would overflow in half precision.
        self.accelerator.backward(total / self.config.batch_tokens)
        self.running.add(float(total.detach()), count)
        if self.accelerator.sync_gradients:
            self._finish_step()
        return total.detach() / max(count, 1)

    def _finish_step(self) -> None:
        total, count, stop = self._over_processes(self.running.of_step())
        self.running.finish_step(total, count, bool(stop))
        gradients = [p.grad for p in self.learned.parameters() if p.grad is not None]
        if self.running.diverged and getattr(self.accelerator, "scaler", None) is None:
            for parameter in self.learned.parameters():
                parameter.grad = None  # this step would damage the weights
        elif gradients:
            # Processes average their gradients.
            scale = self.config.batch_tokens * self.args.world_size / max(count, 1.0)
            torch._foreach_mul_(gradients, scale)

    def _over_processes(self, numbers: list[float]) -> list[float]:
        if self.args.world_size == 1:
            return numbers
        one = torch.tensor(numbers, dtype=torch.float64, device=self.args.device)
        return self.accelerator.reduce(one, reduction="sum").tolist()

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        norm = super()._get_grad_norm(model, grad_norm)
        # Of the gradients of all parts; a DTensor, which may hold only the share of this process.
        return norm if self.parts is None else norm.full_tensor()

    # Evaluation and the log.

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Return the report of the objective, with the same numbers on every process."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        batches = map(self._prepare_inputs, self.batches_of(dataset))
        with self.accelerator.autocast():
            model = self._divided(self.evaluated)
            numbers = self.objective.evaluate(model, batches, seed=self.config.seed)
        if "loss" not in numbers:  # the best checkpoint is the one with the lowest loss
            raise ValueError(
                f"objective must report a 'loss', got {sorted(numbers)} from a "
                f"{type(self.objective).__name__}"
            )
        report = {
            f"{metric_key_prefix}_{name}": value.item() if isinstance(value, Tensor) else value
            for name, value in numbers.items()
        }
        self.log(dict(report))
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, report
        )
        return report

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Write a row of the log, and report it to the services."""
        batches_per_step = self.config.accumulate * self.groups
        self.state.epoch = self.state.global_step * batches_per_step / max(len(self.batches), 1)
        row: dict[str, Any] = {"step": self.state.global_step}
        if "loss" in logs:
            logs["loss"] = self.running.take_mean()
            row |= {"split": "train", "loss": logs["loss"], "lr": logs["learning_rate"]}
            row |= {"grad_norm": float(logs["grad_norm"])} if "grad_norm" in logs else {}
        elif any(name.startswith("eval_") for name in logs):
            row |= {"split": "validation"}
            row |= {name.removeprefix("eval_"): value for name, value in logs.items()}
        if "split" in row and self.is_world_process_zero():
            append_row(self.folder / run_folder.LOG, row)
        super().log(logs, start_time)
        del self.state.log_history[:-16]  # log.jsonl contains all of them

    # Checkpoints.

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write a checkpoint, each process its part, and rename it when it is complete."""
        path = checkpoints.checkpoint_path(self.folder, self.state.global_step)
        aside = checkpoints.unfinished_path(self.folder, self.state.global_step)

        def make_room() -> None:
            if self.args.should_save:
                shutil.rmtree(aside, ignore_errors=True)
                aside.mkdir(parents=True)

        # Each part first collects what processes have, then writes: only writing is likely to fail.
        def write_model() -> None:
            model = self.whole(self.evaluated)
            if self.args.should_save:
                checkpoints.save_model(model, aside)

        def write_not_averaged() -> None:
            if self.average is not None:
                model = self.whole(self.learned)
                if self.args.should_save:
                    checkpoints.save_weights(model, aside / checkpoints.NOT_AVERAGED)

        def write() -> None:
            self._save_optimizer_and_scheduler(str(aside))
            if self.args.should_save:
                replace_text(aside / "running_loss.json", json.dumps(self.running.state()))
                self.state.save_to_json(str(aside / checkpoints.STATE))
            self._save_scaler(str(aside))
            self._save_rng_state(str(aside))

        def publish() -> None:
            if self.args.should_save:
                sync(self.folder / run_folder.LOG)
                checkpoints.publish(aside, path)
                best = self.state.best_global_step
                checkpoints.keep_checkpoints(self.folder, self.config.keep, best)

        for part in (make_room, write_model, write_not_averaged, write, publish):
            failure: Exception | None = None
            try:
                part()
            except Exception as error:  # torch and safetensors differ in theirs for a full disk
                failure = error
            if not self._over_processes([float(failure is not None)])[0]:
                continue
            shutil.rmtree(aside, ignore_errors=True)
            last = max(checkpoints.complete_checkpoints(self.folder), default=None)
            kept = f"the checkpoint of step {last} remains" if last else "nothing was saved before"
            raise OSError(
                f"the checkpoint of step {self.state.global_step} could not be written to "
                f"{str(path.parent)!r}: {failure or 'another process failed'}; {kept}. Free disk "
                "space and start again: the run continues from there"
            ) from failure

    def whole(self, model: nn.Module) -> Any:
        """Return a model with all of its weights, or None if only the first process has it."""
        return model if self.parts is None else self.parts.gather(model)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.parts is None:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        state = self.parts.gather_state(self.optimizer)
        if self.args.should_save:
            torch.save(state, Path(output_dir, "optimizer.pt"))
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, "scheduler.pt"))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if self.parts is None or checkpoint is None:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        self.parts.load_state(self.optimizer, Path(checkpoint, "optimizer.pt"))
        schedule = torch.load(Path(checkpoint, "scheduler.pt"), weights_only=True)
        self.lr_scheduler.load_state_dict(schedule)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        folder = Path(resume_from_checkpoint)
        load = checkpoints.load_weights if self.parts is None else self.parts.load_weights
        load(self.evaluated, folder / pretrained.WEIGHTS)
        if self.average is not None:
            load(self.learned, folder / checkpoints.NOT_AVERAGED)
            self.average.n_averaged.fill_(self.start)  # one per step
        text = (folder / "running_loss.json").read_text(encoding="utf-8")
        self.running.load_state(json.loads(text))


class _Flow(TrainerCallback):
    """Callback that averages weights, decides when a run stops, and what it does last."""

    def __init__(self, trainer: GraphTrainer) -> None:
        self.trainer = trainer

    def on_step_end(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> Any:
        running = self.trainer.running
        if self.trainer.average is not None:
            self.trainer.average.update_parameters(self.trainer.learned)
        if state.global_step >= state.max_steps:
            control.should_training_stop = control.should_log = control.should_save = True
            control.should_evaluate = self.trainer.eval_dataset is not None
        if running.diverged:
            control.should_training_stop = control.should_log = True
            control.should_evaluate = control.should_save = False
        elif running.stopped:
            control.should_training_stop = control.should_save = True
        return control

    def on_evaluate(
        self, args: TrainingArguments, state: Any, control: Any, metrics: Any = None, **kwargs: Any
    ) -> Any:
        best = math.inf if state.best_metric is None else state.best_metric
        if metrics["eval_loss"] < best and self.trainer.is_in_train:
            control.should_save = True  # save the best model
        return control
