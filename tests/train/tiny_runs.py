"""A run that takes milliseconds, with everything that a continued one must restore.

Masks are drawn in the loss, dropout in the model, the order is shuffled, batches are of unequal
lengths, gradients are accumulated and clipped.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback
from transformers.trainer_pt_utils import safe_globals

import graphattn as ga
from graphattn.train import Loss, Objective, RunConfig, fit, mask_tokens

VOCABULARY = 6


class At(TrainerCallback):
    """Do something when a step ends."""

    def __init__(self, step: int, do: Any) -> None:
        self.step, self.do = step, do

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if state.global_step == self.step:
            self.do(given["model"].model)


class Hidden(Objective):
    """Guess hidden tokens."""

    name = "hidden"

    def collate(self, examples: Sequence[dict[str, Any]]) -> dict[str, Any]:
        longest = max(len(example["tokens"]) for example in examples)
        tokens = torch.zeros(len(examples), longest, dtype=torch.long)
        valid = torch.zeros(len(examples), longest, dtype=torch.bool)
        for row, example in enumerate(examples):
            tokens[row, : len(example["tokens"])] = example["tokens"]
            valid[row, : len(example["tokens"])] = True
        return {"tokens": tokens, "valid": valid}

    def loss(
        self, model: nn.Module, batch: dict[str, Any], generator: torch.Generator | None = None
    ) -> Loss:
        tokens, valid = batch["tokens"], batch["valid"]
        seen, masked = mask_tokens(
            tokens, VOCABULARY, mask_ratio=0.4, valid=valid, generator=generator
        )
        logits = model(seen, valid=valid)[masked].float()
        total = nn.functional.cross_entropy(logits, tokens[masked], reduction="sum")
        right = (logits.argmax(-1) == tokens[masked]).sum()
        return Loss(total, int(masked.sum()), {"accuracy": float(right)})


class Certain(Objective):
    """Guess the first token of a sequence: no random numbers."""

    name = "certain"
    collate = Hidden.collate

    def loss(
        self, model: nn.Module, batch: dict[str, Any], generator: torch.Generator | None = None
    ) -> Loss:
        # As many answers as tokens: batches weigh unequally.
        labels = batch["tokens"][:, :1].expand_as(batch["tokens"])[batch["valid"]]
        logits = model(batch["tokens"], valid=batch["valid"])[batch["valid"]]
        total = nn.functional.cross_entropy(logits, labels, reduction="sum")
        return Loss(total, len(labels))


def examples(count: int = 30, seed: int = 0) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, 16, (count,), generator=generator).tolist()
    return [
        {"tokens": torch.randint(VOCABULARY, (n,), generator=generator).sort().values}
        for n in lengths
    ]


def model(seed: int = 0, **changes: Any) -> nn.Module:
    torch.manual_seed(seed)
    options = {"depth": 2, "heads": 2, "dropout": 0.2, **changes}
    return ga.models.SequenceEncoder(VOCABULARY + 1, 8, **options)


def config(out: str | Path, **changes: Any) -> RunConfig:
    options: dict[str, Any] = {
        "steps": 14, "batch_tokens": 48, "accumulate": 2, "lr": 1e-2, "warmup_steps": 3,
        "evaluate_every": 5, "save_every": 3, "log_every": 4, "keep": 2, "record_every": 0,
    }  # fmt: skip
    return RunConfig(**{**options, **changes}, out=str(out))


def train(out: str | Path, *, callbacks: Sequence[Any] = (), **changes: Any) -> Any:
    return fit(
        model(), Hidden(), config(out, **changes), examples(), examples(9, 1), callbacks=callbacks
    )


class OddOnes(nn.Module):
    """A model with a weight that only some calls use."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.more = model(dropout=0.0), nn.Linear(VOCABULARY + 1, VOCABULARY + 1)

    def forward(self, tokens: Tensor, *, valid: Tensor, odd: bool) -> Tensor:
        logits = self.inside(tokens, valid=valid)
        return self.more(logits) if odd else logits


class Alternating(Certain):
    """Use all weights for every second batch: with two processes, for those of the second one."""

    def __init__(self) -> None:
        self.batches = -1

    def loss(
        self, model: nn.Module, batch: dict[str, Any], generator: torch.Generator | None = None
    ) -> Loss:
        self.batches += 1
        odd = bool((self.batches if "RANK" not in os.environ else int(os.environ["RANK"])) % 2)
        logits = model(batch["tokens"], valid=batch["valid"], odd=odd)[batch["valid"]]
        labels = batch["tokens"][:, :1].expand_as(batch["tokens"])[batch["valid"]]
        total = nn.functional.cross_entropy(logits, labels, reduction="sum")
        return Loss(total, len(labels))


def divided_run(kind: str, dropout: float) -> tuple[nn.Module, Objective]:
    """A model in float64 and an objective for runs whose sequences are divided among processes."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"depth": 2, "heads": 2, "dropout": dropout}
    if kind == "odd":
        return OddOnes().double(), Alternating()
    if kind == "causal":  # a window and a ring; the first block also has learned positions
        made = ga.models.CausalLM(
            VOCABULARY + 1, 8, window=[3, None], positions="learned", num_positions=16, **options
        )
        return made.double(), ga.train.NextToken()
    encoder = ga.models.SequenceEncoder(VOCABULARY + 1, 8, mixer="mix", **options)
    return encoder.double(), ga.train.MaskedTokens(VOCABULARY, "linear", weight="1/ratio")


def numbers_here(optimizer: Any) -> int:
    """How many numbers of weights and of their averages this process stores."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    states = [
        value for state in optimizer.state.values() for value in state.values() if value.dim()
    ]
    return sum((x.to_local() if isinstance(x, DTensor) else x).numel() for x in (*weights, *states))


def results(folder: Path) -> dict[str, bytes]:
    """Collect the bytes that a run must end with, whatever happened on the way."""
    kept = sorted((folder / "checkpoints").glob("step-*"))
    files = [folder / "log.jsonl", folder / "config.yaml"]
    files += [path / "running_loss.json" for path in kept]
    content = {str(path.relative_to(folder)): path.read_bytes() for path in files}
    for path in [folder / "model", *kept]:
        numbers = load_file(path / "model.safetensors")
        content[path.name] = b"".join(numbers[name].numpy().tobytes() for name in sorted(numbers))
    optimizer = torch.load(kept[-1] / "optimizer.pt", weights_only=True)
    moments = [value for state in optimizer["state"].values() for value in state.values()]
    content["moments"] = b"".join(moment.numpy().tobytes() for moment in moments)
    with safe_globals():
        random = torch.load(kept[-1] / "rng_state.pth", weights_only=True)
    content["random"] = random["cpu"].numpy().tobytes()
    content["config.yaml"] = content["config.yaml"].replace(str(folder).encode(), b"")
    return content


class Server:
    """A process that trains in forks of itself, so that transformers is imported once."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert self._answer() == "ready"

    def train(self, folder: Path, **given: Any) -> list[int]:
        """The exit statuses of all processes of a run; see :func:`_fork` for what is given."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"folder": str(folder), **given}) + "\n")
        self.process.stdin.flush()
        return [int(status) for status in self._answer().split()]

    def _answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def close(self) -> None:
        self.process.communicate()


def serve() -> None:
    """Train as every line says, and answer with the exit statuses."""
    import transformers.trainer  # noqa: F401 (once, not per fork)

    import graphattn.train.trainer  # noqa: F401

    torch.set_num_threads(1)
    gc.freeze()  # accelerate collects at every start, which takes longer than the run
    print("ready", flush=True)
    for line in sys.stdin:
        given = json.loads(line)
        if "restarts" in given:
            pid = os.fork()
            if not pid:
                launch(**given)
            print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
            continue
        processes, after = given.pop("processes", 1), given.pop("after", None)
        port = str(_free_port())
        pids = [_fork(rank, processes, port, given) for rank in range(processes)]
        if after is not None:
            time.sleep(after / 1000)
            for pid in pids:
                os.kill(pid, signal.SIGKILL)  # to one that is over already, nothing comes
        statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        print(*statuses, flush=True)
    os._exit(0)  # without the complaints of extensions that were loaded


def launch(restarts: int, processes: int, kills: list[dict[str, int]], **given: Any) -> None:
    """Start a run as torchrun --max-restarts does, with its agent, but workers that are forks.

    kills: for every start, the "rank" that dies, and "event" or "after" as in :func:`_fork`. The
    file FOLDER.starts gets a line per start.
    """
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # Otherwise a start may read the addresses of the last one's processes (pytorch issue 135712).
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=str(os.getpid()),
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        max_restarts=restarts,
        monitor_interval=0.02,
        start_method="fork",
    )
    try:
        elastic_launch(config, restarted)(kills, given)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)


def restarted(kills: list[dict[str, int]], given: dict[str, Any]) -> None:
    """Train in a process of the agent, which one of these starts will not survive."""
    rank, count = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    kill = kills[count] if count < len(kills) else {"rank": -1}
    if rank == 0:
        with open(f"{given['folder']}.starts", "a", encoding="utf-8") as file:
            file.write(f"{count}\n")
    if rank != kill["rank"]:
        kill = {}
    if "after" in kill:
        signal.setitimer(signal.ITIMER_REAL, kill["after"] / 1000)  # SIGALRM ends a process
    train_as_told(rank, event=kill.get("event", 0), **given)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _fork(rank: int, processes: int, port: str, given: dict[str, Any]) -> int:
    """A process that trains.

    given: "divided" names a run of :func:`divided_run`, whose processes write how many numbers of
    weights and of the optimizer they store to FOLDER.numbers-RANK; "event" kills it at the n-th
    time that a file is opened, renamed or removed in the folder; "interrupt" sends it a signal when
    a step ends; "certain" has no random numbers; the rest is of the config.
    """
    pid = os.fork()
    if pid:
        return pid
    if processes > 1:  # as torchrun does
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in names.items()})
        os.environ["MASTER_ADDR"] = "127.0.0.1"
    try:
        train_as_told(rank, **given)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)


def train_as_told(
    rank: int,
    folder: str,
    event: int = 0,
    interrupt: int = 0,
    certain: bool = False,
    divided: str = "",
    dropout: float = 0.0,
    **changes: Any,
) -> None:
    from transformers import TrainerCallback

    class Interrupt(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            # One process alone is asked: all must stop after the same step.
            if state.global_step == interrupt and rank == args.world_size - 1:
                os.kill(os.getpid(), signal.SIGINT)

    class Stored(TrainerCallback):
        def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            path, count = Path(f"{folder}.numbers-{rank}"), numbers_here(given["optimizer"])
            path.write_text(str(count), encoding="utf-8")

    left = event

    def count(name: str, args: tuple[Any, ...]) -> None:
        nonlocal left
        if name in ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir") and any(
            isinstance(arg, str | os.PathLike) and folder in os.fspath(arg) for arg in args
        ):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    if event:
        sys.addaudithook(count)
    if divided:
        learner, objective = divided_run(divided, dropout)
        data: Any = (examples(), examples(9, 1))
        callbacks: Any = [Interrupt(), Stored()]
        if divided == "odd":
            data = data[:1]  # whose batches would be counted
        run = fit(learner, objective, config(folder, **changes), *data, callbacks=callbacks)
    elif certain:
        run = fit(model(dropout=0.0), Certain(), config(folder, **changes), examples())
    else:
        run = train(folder, callbacks=[Interrupt()], **changes)
    assert run.status != "running", f"process {rank} read the run before it ended"


if __name__ == "__main__":
    if len(sys.argv) > 1:  # by torchrun
        train_as_told(int(os.environ["RANK"]), **json.loads(sys.argv[1]))
    else:
        serve()
