"""Models whose weights are divided among all processes of a run, by torch's fully_shard (FSDP2)."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn

from graphattn.train.runs import checkpoints


class ShardedWeights:
    """Divide the weights of models like `model` among all processes, and put them together again.

    Gradients and the state of the optimizer are divided like the weights. While a block computes,
    every process has all of its weights; the blocks of graphattn's models do so one after the
    other. The first process keeps one whole model in the memory of the CPU, through which it reads
    and writes. So the files of a run are those of a run without this.

    Source: Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel" (2023),
    as :func:`torch.distributed.fsdp.fully_shard`.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        from torch.distributed import get_rank, get_world_size, init_device_mesh

        self.mesh = init_device_mesh(device.type, (get_world_size(),))
        self.whole = copy.deepcopy(model).cpu() if get_rank() == 0 else None

    def shard(self, model: nn.Module) -> None:
        """Divide a model, in place; every process begins with the weights of the first one."""
        from torch.distributed.fsdp import fully_shard

        inner_first = reversed([*model.modules()])  # as fully_shard wants it
        stacks = [getattr(module, "blocks", None) for module in inner_first]
        blocks = [block for stack in stacks if isinstance(stack, nn.ModuleList) for block in stack]
        if len(set(blocks)) < len(blocks):
            raise ValueError(
                "fsdp must be False for a model with the same block several times, got a "
                f"{type(model).__name__}: its state dict cannot be divided"
            )
        for part in (*blocks, model):
            # Also the outermost part: between its calls, only parts are to be read and averaged.
            fully_shard(part, mesh=self.mesh, reshard_after_forward=True)
        wrapped: Any = model
        if hasattr(wrapped, "set_reduce_scatter_unused_params"):  # older PyTorch lacks it
            # A batch may leave out weights that those of other processes use.
            wrapped.set_reduce_scatter_unused_params(True)
        self.scatter(model)

    def gather(self, model: nn.Module) -> nn.Module | None:
        """Return the whole model on the first process, and None on others; all must call it."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(model, options=options)
        if self.whole is not None:
            self.whole.load_state_dict(state)
        return self.whole

    def scatter(self, model: nn.Module) -> None:
        """Give every process its part of the whole model of the first process."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        state = {} if self.whole is None else self.whole.state_dict()
        set_model_state_dict(model, state, options=options)

    def load_weights(self, model: nn.Module, path: Path) -> None:
        """Read the weights of a file, on the first process, into all parts of a model."""
        if self.whole is not None:
            checkpoints.load_weights(self.whole, path)
        self.scatter(model)

    def gather_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the state of an optimizer as without parts; on other processes without numbers."""
        from torch.distributed.tensor import DTensor

        def whole(x: Any) -> Any:
            if not isinstance(x, DTensor):
                return x
            full = x.full_tensor()  # on all processes, and only one at a time
            return None if self.whole is None else full.cpu()

        given = optimizer.state_dict()
        parts = given["state"].items()
        state = {key: {name: whole(x) for name, x in part.items()} for key, part in parts}
        return {**given, "state": state}

    def load_state(self, optimizer: torch.optim.Optimizer, path: Path) -> None:
        """Read this process's part of the state of an optimizer from a file with all of it."""
        from torch.distributed.tensor import distribute_tensor

        # One tensor after the other, not the whole file.
        given = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for number, entries in given["state"].items():
            like = parameters[number]
            for name, x in entries.items():
                if x.shape == like.shape:  # a count of steps has no shape
                    spec = like.device_mesh, like.placements
                    entries[name] = distribute_tensor(x, *spec, src_data_rank=None).clone()
        optimizer.load_state_dict(given)
