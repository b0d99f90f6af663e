"""Start, continue and finish training runs with transformers' Trainer."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from graphattn.data.tokenizers import load_tokenizer, save_tokenizer, tokenizer_as_dict
from graphattn.train.objectives.objective import Example, Objective
from graphattn.train.runs import checkpoints
from graphattn.train.runs import folder as run_folder
from graphattn.train.runs.config import RunConfig
from graphattn.train.runs.folder import Run, read_run
from graphattn.train.runs.records import keep_rows, replace_file
from graphattn.train.runs.setup import Prepared, prepare

if TYPE_CHECKING:
    from graphattn.train.trainer import GraphTrainer

LOOKED_AT = 64  # examples in which tracks of context are looked for
SEVERAL_PROCESSES = "5.23"  # oldest version of transformers that is tested with several processes


def fit(
    model: nn.Module,
    objective: Objective,
    config: RunConfig,
    train: Sequence[Example],
    validation: Sequence[Example] | None = None,
    *,
    tokenizer: Any = None,
    callbacks: Sequence[Any] = (),
) -> Run:
    """Train a model, or continue the training run in the folder ``config.out``.

    transformers' Trainer does the work, in as many processes as ``torchrun`` started. The folder
    contains ``config.yaml``, ``run.json`` (commit, versions, status), ``log.jsonl``, checkpoints,
    and at the end ``model/``, which :func:`graphattn.load` reads: the model with the lowest
    validation loss, or the last one if there is no validation.

    If the folder exists, the run continues from its newest checkpoint. On a CPU, every number is
    then the same as without the interruption. A checkpoint is never incomplete, so a process can be
    killed at any moment. Control-C finishes the step, saves, and returns. If the loss is no longer
    finite, or stays above ten times its first value for a hundred steps, the run ends with the
    status "diverged", which is a valid result. A run that has already ended is returned without
    training.

    Args:
        model: the model, made with ``config.seed``; it is trained in place. With
            ``config.ema_decay``, evaluations and ``model/`` have the average of its weights
            instead. A model of graphattn is saved by :func:`graphattn.save`; of another module only
            the weights are saved. With ``config.fsdp``, several processes divide its weights, and
            each has only its part afterwards.
        objective: the objective of the training.
        config: the config of the run, with ``out`` set and no value "auto" that training depends
            on.
        train: a sequence of examples. If it has an attribute ``lengths``, examples are not read to
            find their lengths.
        validation: examples on which the model is evaluated every ``evaluate_every`` steps.
        tokenizer: saved together with the model, by :func:`graphattn.data.save_tokenizer`.
        callbacks: of transformers (``TrainerCallback``).

    Returns:
        The :class:`Run`: its status, its config, and all rows of its log.

    Raises:
        ValueError: if an argument is not allowed, if the folder contains a run with another config,
            or if another process is training in it.
        OSError: if a checkpoint cannot be written, for instance on a full disk; the last one
            remains.
        ImportError: if transformers or accelerate is not installed.

    Example:
        >>> import tempfile, torch, graphattn as ga
        >>> class Parity(ga.train.Objective):
        ...     name = "parity"
        ...     def collate(self, examples):
        ...         return {"tokens": torch.stack([e["tokens"] for e in examples])}
        ...     def loss(self, model, batch, generator=None):
        ...         logits = model(batch["tokens"]).mean(dim=1)
        ...         labels = batch["tokens"].sum(dim=1) % 2
        ...         total = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
        ...         return ga.train.Loss(total, len(labels))
        >>> data = [{"tokens": torch.randint(2, (8,))} for _ in range(20)]
        >>> model = ga.models.SequenceEncoder(2, 8, depth=1, heads=2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     config = ga.train.RunConfig(steps=3, batch_tokens=64, log_every=1, out=folder)
        ...     run = ga.train.fit(model, Parity(), config, data)
        ...     again = ga.load(run.path / "model")
        >>> run.status, [row["step"] for row in run.training]
        ('finished', [1, 2, 3])
    """
    _check(model, objective, config, train, validation)
    args = _arguments(config, evaluates=validation is not None)
    group = _group_of_sequences(config, args)
    path = Path(config.out)
    with contextlib.ExitStack() as stack:
        with _first_alone(args):
            if args.process_index == 0:
                run_folder.make_folder(path)
                stack.enter_context(run_folder.locked(path))
                run_folder.forget_failed(path)
        run_folder.check_config(path, config, args.world_size)
        over = run_folder.read_state(path).get("status") in run_folder.OVER
        if over and RunConfig.load(path / run_folder.CONFIG).steps == config.steps:
            return read_run(path)
        with _first_alone(args):
            if args.process_index == 0:
                _open(path, config, tokenizer, getattr(train, "fingerprint", None), args)
        steps = checkpoints.complete_checkpoints(path)
        given = args, group, train, validation, callbacks, steps
        return _train(model, objective, config, *given)


def resume(
    folder: str | os.PathLike[str], *, steps: int | None = None, callbacks: Sequence[Any] = ()
) -> Run:
    """Continue the training run in a folder, using only its config.

    Args:
        folder: folder of the run; it may have been moved.
        steps: a new number of steps, at least the old one; None for the old one.
        callbacks: of transformers (``TrainerCallback``).

    Raises:
        FileNotFoundError: if it is not the folder of a run, or its data does not exist any more.
        ValueError: if `steps` is smaller than before.

    Example:
        >>> import graphattn as ga
        >>> ga.train.resume("runs/a").status  # doctest: +SKIP
        'finished'
    """
    config = read_run(folder).config.replace(out=os.fspath(folder))
    if steps is not None:
        if steps < config.steps:
            raise ValueError(
                f"steps must be at least the number of steps of the run, {config.steps}, got "
                f"{steps}"
            )
        config = config.replace(steps=steps)
    return fit_prepared(prepare(config), callbacks)


def fit_prepared(prepared: Prepared, callbacks: Sequence[Any] = ()) -> Run:
    """Train what :func:`graphattn.train.prepare` has made, see :func:`fit`."""
    return fit(
        prepared.model,
        prepared.objective,
        prepared.config,
        prepared.train,
        prepared.validation,
        tokenizer=prepared.tokenizer,
        callbacks=callbacks,
    )


# Checks and preparation.


def _check(model: Any, objective: Any, config: Any, train: Any, validation: Any) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(objective, Objective):
        raise ValueError(f"objective must be an Objective, got {type(objective).__name__}")
    if not isinstance(config, RunConfig):
        raise ValueError(f"config must be a RunConfig, got {type(config).__name__}")
    if not config.out:
        raise ValueError("out must be the path of the folder of the run, got ''")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError("model must have parameters that require gradients, got none")
    for name, examples in (("train", train), ("validation", validation)):
        if examples is None:
            continue
        if not hasattr(examples, "__len__") or not hasattr(examples, "__getitem__"):
            raise ValueError(
                f"{name} must be a sequence of examples with a length and an index, such as a "
                f"list, got {type(examples).__name__}"
            )
        if len(examples) == 0:
            raise ValueError(f"{name} must contain at least one example, got none")
    _check_tracks(model, train)
    for name in ("mixup", "cutmix"):
        here, there = getattr(config, name), getattr(objective, name, 0)
        if here not in (0, there):
            raise ValueError(
                f"{name} must be 0 or that of the objective, {there}, got {here}: "
                f"give it to the objective, as in Classification(10, {name}={here})"
            )
    if config.precision == "float16" and not torch.cuda.is_available():
        raise ValueError("precision must be 'float32' or 'bfloat16' on a CPU, got 'float16'")
    if config.fsdp and config.precision == "float16":
        raise ValueError(
            "precision must be 'float32' or 'bfloat16' with fsdp=True, got 'float16', whose scaled "
            "gradients were not tested with it"
        )
    if config.fsdp and config.record_every:
        raise ValueError(
            f"record_every must be 0 with fsdp=True, got {config.record_every}: the first process "
            "records the layers, and has only a part of their weights"
        )
    if config.gradient_checkpointing and not hasattr(model, "gradient_checkpointing_enable"):
        raise ValueError(
            f"gradient_checkpointing must be False for a {type(model).__name__}, which has no "
            "method gradient_checkpointing_enable, got True"
        )


def _check_tracks(model: nn.Module, train: Sequence[Example]) -> None:
    """Raise if a model has context or tracks that no example has: they would not be trained."""
    for key, attribute in (("context", "context"), ("tracks", "source_tracks")):
        tracks = getattr(model, attribute, None)
        if not isinstance(tracks, Mapping) or not tracks:
            continue
        examples = [train[place] for place in range(min(len(train), LOOKED_AT))]
        found = [example.get(key) or () for example in examples if isinstance(example, dict)]
        given = set().union(*found)
        if missing := [name for name in tracks if name not in given]:
            raise ValueError(
                f"{key} must have only tracks of the examples, got {', '.join(missing)}, which is "
                f"in none of the first {len(examples)} examples: give every example {key!r}, or "
                "make the model without these tracks"
            )


def _arguments(config: RunConfig, *, evaluates: bool) -> Any:
    try:
        from graphattn.train.trainer import training_arguments
    except ImportError as error:
        raise ImportError(
            "training needs transformers and accelerate: install them with pip install "
            "'graphattn[train]'"
        ) from error
    if os.environ.get("ACCELERATE_USE_FSDP", "").lower() in ("1", "true"):
        raise ValueError(
            "fsdp must be an option of the run (--fsdp, fsdp=True), got ACCELERATE_USE_FSDP from "
            "accelerate's launcher: start it without --use_fsdp, or by torchrun"
        )
    on_cpu = not torch.accelerator.is_available()
    args = training_arguments(config, evaluates=evaluates, use_cpu=on_cpu)
    if args.world_size > 1:
        import transformers
        from packaging.version import Version

        # Older Trainers divide the gradient of several processes differently (seen with 5.4).
        if Version(transformers.__version__) < Version(SEVERAL_PROCESSES):
            raise ImportError(
                f"training in several processes needs transformers {SEVERAL_PROCESSES} or newer, "
                f"found {transformers.__version__}: install a newer version, or train in one "
                "process"
            )
    if args.n_gpu > 1:
        args._n_gpu = 1  # with several GPUs, one process would split our batches
    return args


def _group_of_sequences(config: RunConfig, args: Any) -> Any:
    """Return the process group that divides every sequence; None if none is divided."""
    cp = config.context_parallel
    if args.world_size % cp:
        raise ValueError(
            "context_parallel must divide the number of processes, got "
            f"{cp} and {args.world_size}: start the run by torchrun --nproc-per-node {cp}"
        )
    if cp == 1:
        return None
    mesh = torch.distributed.init_device_mesh(
        args.device.type, (args.world_size // cp, cp), mesh_dim_names=("dp", "cp")
    )
    return mesh["cp"].get_group()


@contextmanager
def _first_alone(args: Any) -> Iterator[None]:
    """Run the first process alone while the others wait; if it fails, all fail."""
    failure: BaseException | None = None
    try:
        yield
    except BaseException as error:
        failure = error
        raise
    finally:
        if args.world_size > 1:
            failed = torch.tensor([float(failure is not None)], device=args.device)
            torch.distributed.all_reduce(failed)
            if bool(failed) and failure is None:
                raise ValueError(
                    "out must be a folder that the first process can open, which failed: see the "
                    "error of that process"
                )


def _open(path: Path, config: RunConfig, tokenizer: Any, data: str | None, args: Any) -> None:
    """Prepare the folder: remove half-written files and log rows after the newest checkpoint."""
    checkpoints.remove_unfinished(path)
    (path / "checkpoints").mkdir(exist_ok=True)
    checkpoints.check_newest(path, averages=config.ema_decay > 0)
    checkpoints.keep_checkpoints(path, config.keep, checkpoints.best_checkpoint(path))
    newest = max(checkpoints.complete_checkpoints(path), default=0)
    keep_rows(path / run_folder.LOG, newest)
    before, saved = run_folder.read_state(path), path / "tokenizer.json"
    is_begun = (path / run_folder.CONFIG).is_file() or not before
    is_saved = is_begun and saved.is_file()
    if tokenizer is not None and is_saved:
        learned = tokenizer_as_dict(load_tokenizer(saved))
        if learned != tokenizer_as_dict(tokenizer):
            raise ValueError(
                f"data must have the tokens of the run in {str(saved)!r}, but they differ: it has "
                "changed since the run began, or it is another kind of file. Choose another folder "
                "as out"
            )
    if is_begun and data is not None and before.get("data") not in (None, data):
        raise ValueError(
            f"data must be the data with which the run in {str(path)!r} began, but it differs: it "
            "has changed since, or it is another file. Choose another folder as out"
        )
    run_folder.write_state(
        path,
        **run_folder.origin(config),
        device=str(args.device),
        processes=args.world_size,
        data=data,
        status="running",
        started=before.get("started", run_folder.now()),
        continued=[*before.get("continued", []), newest] if before else [],
        seconds=before.get("seconds", 0.0),
        error=None,
    )
    if tokenizer is not None and not is_saved:
        save_tokenizer(tokenizer, saved)
    replace_file(path / run_folder.CONFIG, config.save)


# The run.


def _train(
    model: nn.Module,
    objective: Objective,
    config: RunConfig,
    args: Any,
    group: Any,
    train: Sequence[Example],
    validation: Sequence[Example] | None,
    callbacks: Sequence[Any],
    steps: list[int],
) -> Run:
    from transformers.trainer_callback import PrinterCallback

    from graphattn.train.callbacks import LayerRecords, ProgressLine
    from graphattn.train.trainer import GraphTrainer

    path, start = Path(config.out), max(steps, default=0)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable()  # type: ignore[operator]
    if config.compile:
        model.compile()
    line = ProgressLine(path.resolve().name)
    recorders: list[Any] = [line]
    if config.record_every:
        examples = train if validation is None else validation
        recorders.append(LayerRecords(objective, config, examples))
    trainer = GraphTrainer(
        model,
        objective,
        config,
        args,
        train,
        validation,
        start=start,
        group=group,
        callbacks=[*recorders, *callbacks],
    )
    trainer.remove_callback(PrinterCallback)
    torch.manual_seed(config.seed + args.process_index)  # so that processes draw different masks
    newest = str(checkpoints.checkpoint_path(path, start)) if steps else None
    began = time.monotonic()
    status, error = "failed", None
    try:
        with _stopping_on_signals(trainer):
            if start < config.steps:
                trainer.train(resume_from_checkpoint=newest)
            elif newest is not None:  # a run without steps has no checkpoint
                trainer._load_from_checkpoint(newest)
        status = _status(trainer, config)
        model = trainer.whole(trainer.evaluated)
        if args.process_index == 0:
            _write_model(model, path)
    except BaseException as failure:
        error = f"{type(failure).__name__}: {failure}"
        if isinstance(failure, KeyboardInterrupt):
            status = "interrupted"
        raise
    finally:
        line.close()
        if args.process_index == 0:
            with contextlib.suppress(OSError):  # the original error says that the disk is full
                spent = run_folder.read_state(path)["seconds"] + time.monotonic() - began
                ended = {"ended": run_folder.now(), "seconds": spent}
                run_folder.write_state(path, status=status, error=error, **ended)
    with _first_alone(args):
        pass  # the first process has written how the run ended
    return read_run(path)


def _status(trainer: GraphTrainer, config: RunConfig) -> str:
    if trainer.running.diverged:
        return "diverged"
    step = max(trainer.state.global_step, trainer.start)
    return "finished" if step >= config.steps else "interrupted"


def _write_model(last: nn.Module, path: Path) -> None:
    """Save the best model, or the last one, in its own folder."""
    chosen = checkpoints.best_checkpoint(path)
    if chosen is None:
        checkpoints.write_folder(path / "model", lambda aside: checkpoints.save_model(last, aside))
    else:
        checkpoints.copy_model(checkpoints.checkpoint_path(path, chosen), path / "model")


@contextmanager
def _stopping_on_signals(trainer: GraphTrainer) -> Iterator[None]:
    """Let Control-C and the signals of schedulers end the run after the step, a second one at
    once."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread can handle signals
        return

    def ask(number: int, _: Any) -> None:
        if trainer.running.asked:
            raise KeyboardInterrupt
        trainer.running.asked = True

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
