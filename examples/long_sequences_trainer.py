"""Training on sequences that are longer than the share of one rank, by transformers' Trainer.

    torchrun --nproc-per-node 2 examples/long_sequences_trainer.py

Trainer wraps the model in DistributedDataParallel over all ranks. Three things are added: ranks of
one group of "cp" load the same sequences, a data collator takes this rank's part of their tokens,
and the loss is the mean over the tokens of all ranks.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from long_sequences import draw_texts, make_model
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler
from transformers import Trainer, TrainerCallback, TrainingArguments

import graphattn as ga


class Learner(nn.Module):
    """A model and its loss, over this rank's part of every graph.

    Trainer writes into the `config` of a model as into one of transformers; this module has none.
    """

    def __init__(self, model: ga.models.CausalLM, mesh: DeviceMesh, num_tokens: int) -> None:
        super().__init__()
        self.model, self.mesh = model, mesh
        self.shards = [ga.distributed.shard(g, mesh["cp"]) for g in model.graphs(num_tokens)]

    def forward(self, tokens: Tensor, labels: Tensor, counts: Tensor) -> dict[str, Tensor]:
        logits = self.model(tokens, self.shards)
        losses = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        return {"loss": ga.distributed.token_mean(losses, counts.flatten(), self.mesh)}

    def collate(self, texts: list[Tensor]) -> dict[str, Tensor]:
        """Join texts, and take this rank's part of their tokens."""
        tokens = torch.stack(texts)
        # The next token of a rank's last token is on another rank, so labels are made first.
        labels = tokens.roll(-1, dims=1)
        counts = torch.ones_like(tokens, dtype=torch.bool)
        counts[:, -1] = False
        parts = self.shards[0].split(tokens, labels, counts)
        return dict(zip(("tokens", "labels", "counts"), parts, strict=True))


class LongSequenceTrainer(Trainer):
    """A Trainer whose sequences are divided among the ranks of ``mesh["cp"]``."""

    def __init__(self, learner: Learner, **given: Any) -> None:
        self.mesh = learner.mesh
        super().__init__(learner, data_collator=learner.collate, **given)

    def get_train_dataloader(self) -> DataLoader:
        """Load other sequences on every rank of "dp", and the same ones on all ranks of "cp"."""
        dp = self.mesh["dp"]
        order = DistributedSampler(
            self.train_dataset, dp.size(), dp.get_local_rank(), shuffle=False
        )
        size = self.args.per_device_train_batch_size
        return DataLoader(self.train_dataset, size, sampler=order, collate_fn=self.data_collator)


class Printer(TrainerCallback):
    """Print the loss of every step."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if state.is_world_process_zero and "loss" in logs:
            print(f"step {state.global_step - 1:4} loss {float(logs['loss']):.5f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=4096, help="of a sequence, on all ranks")
    parser.add_argument("--batch", type=int, default=2, help="sequences per rank of --dp")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--dp", type=int, default=1, help="ranks that divide the batch")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    texts = [
        text
        for step in range(chosen.steps)
        for text in draw_texts(chosen.batch * chosen.dp, chosen.tokens, seed=step)
    ]
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder,
            max_steps=chosen.steps,
            per_device_train_batch_size=chosen.batch,
            learning_rate=1e-2,
            weight_decay=0.01,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            remove_unused_columns=False,
            dataloader_pin_memory=False,
            disable_tqdm=True,
            ddp_find_unused_parameters=False,
            use_cpu=True,
        )  # which starts the process group
        sizes = chosen.dp, dist.get_world_size() // chosen.dp
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "cp"))
        learner = Learner(make_model(), mesh, chosen.tokens)
        LongSequenceTrainer(learner, args=args, train_dataset=texts, callbacks=[Printer()]).train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
