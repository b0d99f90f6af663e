"""Theorems about the layers of a trained model, on a few tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import graphattn as ga
from graphattn.cli.report import Notes, ReportSection
from graphattn.cli.runs_report.reading import MODEL, RunFiles
from graphattn.cli.runs_report.words import number
from graphattn.plain_tables import Cells, counted
from graphattn.spectral import Certificate

TOKENS = 24  # tokens for the certificates; one layer takes about a second
MOST_PARAMETERS = 20_000_000
TOKENIZER = "tokenizer.json"
NUMBERS = {  # the number that a cell shows for a fact
    "low-pass filter": "1 - 2 eta lambda_max",
    "map": "norm",  # norm of one step
}


def certificates_of(files: RunFiles) -> ReportSection | None:
    """Make the certificates of the layers of the model of a run, or None without a model."""
    folder = files.run.path / MODEL
    if not folder.exists():
        return None
    title = "Certificates of the layers"
    try:
        model = ga.load(folder)
    except (ValueError, OSError) as error:
        return ReportSection(title, [Notes([f"The model cannot be made from its folder: {error}"])])
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if parameters > MOST_PARAMETERS:
        reason = (
            f"Omitted for a model of {parameters / 1e6:.0f} million parameters, because they would "
            "take long; ga.spectral.certify(model, tokens) computes them."
        )
        return ReportSection(title, [reason])
    try:
        probe, what = _probe(model, files)
        certificate = ga.spectral.certify(model, probe, measure=True)
    except (ValueError, TypeError, RuntimeError) as error:
        line = " ".join(str(error).split())
        return ReportSection(title, [Notes([f"There are no certificates for this model: {line}"])])
    parts = dict(certificate.parts) or {type(model).__name__: certificate}
    sound = (
        "Nothing is violated."
        if certificate.sound
        else "No theorem applies, so nothing is certified."
        if certificate.sound is None
        else "A theorem is violated: its conditions hold, but its claim does not."
    )
    intro = (
        f"Theorems about the model in {MODEL}/ ({type(model).__name__}, "
        f"{counted(parameters, 'parameter')}) on {what}. {sound}"
    )
    rows = [
        [fact.name, fact.status, f"{fact.statement}\n{fact.source}".strip()]
        for fact in certificate.facts
    ]
    table = Cells("", "", ["fact", "state", "statement"], rows, [False] * 3)
    statements = ReportSection("Statements of the theorems", [table], folded=True)
    return ReportSection(title, [intro, _by_layer(parts), statements])


def _by_layer(parts: dict[str, Certificate]) -> Cells:
    names = dict.fromkeys(fact.name for part in parts.values() for fact in part.facts)
    rows = []
    for layer, part in parts.items():
        cells = {fact.name: _cell(fact) for fact in part.facts}
        rows.append([layer, *(cells.get(name, "–") for name in names)])
    caption = "A dash: no such theorem applies to this layer."
    for name, number_of_it in NUMBERS.items():
        if name in names:
            caption += f" In the column {name!r}: {number_of_it}."
    return Cells("", caption, ["layer", *names], rows, [False] * (1 + len(names)))


def _cell(fact: Any) -> str:
    if fact.status == "not applicable":
        return "–"
    measured = fact.numbers.get(NUMBERS.get(fact.name, ""))
    text = "" if measured is None else number(float(measured))
    if fact.status == "measured":
        return text or "measured"
    return f"{fact.status}\n{text}" if text else fact.status


def _probe(model: nn.Module, files: RunFiles) -> tuple[Tensor, str]:
    """Return the tokens for the model (the start of a sample, or random), and a name for them."""
    generator = torch.Generator().manual_seed(0)
    body: Any = getattr(model, "model", model)  # inside a model with a head for classes
    if isinstance(body, ga.models.VisionTransformer | ga.models.SwinTransformer):
        size: Any = body.config["image_size"]
        height, width = size if isinstance(size, list | tuple) else (size, size)
        image = torch.rand(1, body.config["channels"], height, width, generator=generator)
        return image, "an image of random pixels"
    vocabulary = getattr(body, "vocab_size", None)
    if not isinstance(vocabulary, int):
        raise ValueError(f"the model must read tokens or images, got a {type(model).__name__}")
    tokens = _tokens_of_samples(files, vocabulary)
    if tokens is not None:
        return tokens, f"the first {len(tokens)} tokens of its first sample"
    real = max(1, vocabulary - 1)  # without the last token, which is often a mask
    tokens = torch.randint(real, (TOKENS,), generator=generator)
    return tokens, f"{TOKENS} random tokens"


def _tokens_of_samples(files: RunFiles, vocabulary: int) -> Tensor | None:
    path: Path = files.run.path / TOKENIZER
    texts = [row["text"] for row in files.samples if isinstance(row.get("text"), str)]
    if not texts or not path.is_file():
        return None
    try:
        tokens = ga.data.load_tokenizer(path).encode(texts[0])[:TOKENS]
    except (ValueError, OSError, ImportError):
        return None
    fits = len(tokens) >= 8 and int(tokens.max()) < vocabulary
    return tokens if fits else None
