"""Training on sequences that are longer than the share of one rank, in a plain torchrun script.

The tokens of every sequence are divided among the ranks of the mesh dimension "cp"; sequences are
divided among those of "dp". A rank gets only those rows of other ranks that its tokens see.

    torchrun --nproc-per-node 2 examples/long_sequences.py
    torchrun --nproc-per-node 4 examples/long_sequences.py --dp 2 --engine fsdp

The text is made here: words in random order, from a dictionary of eight random words. A language
model learns to spell them. It cannot know which word comes next, so the loss falls towards
log(8) / 6 = 0.35 nats per letter.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import graphattn as ga

LETTERS, WORDS, LENGTH = 16, 8, 6


def draw_texts(count: int, num_tokens: int, seed: int) -> Tensor:
    """Draw texts [count, num_tokens] of words from the dictionary, which is always the same."""
    dictionary = torch.randint(LETTERS, (WORDS, LENGTH), generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(WORDS, (count, -(-num_tokens // LENGTH)), generator=generator)
    return dictionary[words].flatten(1)[:, :num_tokens]


def make_model() -> ga.models.CausalLM:
    """Make the same model on every rank."""
    torch.manual_seed(0)
    return ga.models.CausalLM(LETTERS, dim=32, depth=2, heads=4, window=2 * LENGTH)


def wrap(model: Any, engine: str) -> Any:
    """Let all ranks, of both dimensions of the mesh, average their gradients."""
    if engine == "ddp":
        return DistributedDataParallel(model)
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def train(mesh: DeviceMesh, chosen: argparse.Namespace) -> list[float]:
    """Train, and return the loss of every step, which is the same on all ranks."""
    model = make_model()
    # One graph per block, and this rank's part of each.
    shards = [ga.distributed.shard(g, mesh["cp"]) for g in model.graphs(chosen.tokens)]
    model = wrap(model, chosen.engine)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for step in range(chosen.steps):
        texts = draw_texts(chosen.batch, chosen.tokens, seed=step)  # the same on all ranks
        # The next token of a rank's last token is on another rank, so labels are made first.
        labels = texts.roll(-1, dims=1)
        counts = torch.ones_like(texts, dtype=torch.bool)
        counts[:, -1] = False
        own = [x.chunk(chosen.dp)[mesh["dp"].get_local_rank()] for x in (texts, labels, counts)]
        texts, labels, counts = shards[0].split(*own)
        logits = model(texts, shards)
        losses = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        loss = ga.distributed.token_mean(losses, counts.flatten(), mesh)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
        if dist.get_rank() == 0:
            print(f"step {step:4} loss {found[-1]:.5f}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=4096, help="of a sequence, on all ranks")
    parser.add_argument("--batch", type=int, default=2, help="sequences; a multiple of --dp")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--dp", type=int, default=1, help="ranks that divide the batch")
    parser.add_argument("--engine", choices=("ddp", "fsdp"), default="ddp")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    sizes = chosen.dp, dist.get_world_size() // chosen.dp
    train(init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "cp")), chosen)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
