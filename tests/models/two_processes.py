"""Every model of the zoo in two processes, with half of the examples each, beside one with all.

python two_processes.py FILE RANK NAME ...: the first process writes, of every model and way of
sharing the work, the largest difference of its gradients and of its weights after two steps from
those of one process, relative to the largest; all in float64.
"""

from __future__ import annotations

import copy
import json
import sys
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import zoo
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

WAYS = ("DDP", "FSDP2")
STEPS = 2
EXAMPLES = 4


def whole(tensor: Tensor) -> Tensor:
    """The tensor of which every process holds a part."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def steps(model: nn.Module, name: str, rank: int, of: int) -> dict[str, Tensor]:
    """The gradients of every step and the weights after the last, by name."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    tensors = {}
    for step in range(STEPS):
        optimizer.zero_grad()
        batch = zoo.batch_of(name, 100 + step, EXAMPLES).to(torch.float64).part(rank, of)
        zoo.exact_loss_of(model, batch).backward()
        for key, parameter in model.named_parameters():
            if parameter.grad is not None:
                tensors[f"{step} {key.removeprefix('module.')}"] = whole(parameter.grad).clone()
        optimizer.step()
    for key, parameter in model.named_parameters():
        tensors[key.removeprefix("module.")] = whole(parameter.detach())
    return tensors


def shared(model: nn.Module, way: str) -> nn.Module:
    """The model as two processes hold it."""
    if way == "DDP":
        return DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (2,))
    for block in zoo.blocks_of(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def compared(name: str, way: str, rank: int) -> float:
    """The largest relative difference between two processes and one."""
    model = zoo.made(name).double().eval()  # no dropout: its random numbers are each process's own
    expected = steps(copy.deepcopy(model), name, 0, 1)
    actual = steps(shared(model, way), name, rank, 2)
    if set(actual) != set(expected):
        raise ValueError(f"gradients of {sorted(set(actual) ^ set(expected))} on one side only")
    return max(
        float((actual[key] - tensor).abs().max() / tensor.abs().max().clamp(min=1e-6))
        for key, tensor in expected.items()
    )


def main(file: Path, rank: int, names: list[str]) -> None:
    """All models, all ways; an error is written down and the next one has its turn."""
    torch.set_num_threads(1)
    store = f"file://{file}.store"
    distributed.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    differences: dict[str, Any] = {}
    for name in names:
        for way in WAYS:
            try:
                differences[f"{name}, {way}"] = compared(name, way, rank)
            except Exception:
                differences[f"{name}, {way}"] = traceback.format_exc()
            distributed.barrier()
    if rank == 0:
        file.write_text(json.dumps(differences), encoding="utf-8")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
