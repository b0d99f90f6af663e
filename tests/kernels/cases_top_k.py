"""Selections of the k largest logits of a window, and what is wrong with one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import cases_kernels
import torch
from cases_kernels import Case, Errors, Tensors
from torch import Tensor

from graphattn.graphs.structures.bands import bands_of
from graphattn.kernels.bands import top_k as selection
from graphattn.kernels.bands.inputs import BandInputs
from graphattn.kernels.bands.schedule import BandSchedule


@contextmanager
def streamed() -> Iterator[None]:
    """Let no selection hold its logits: within the block they are computed anew in every pass."""
    with mock.patch.object(selection, "HELD", {dtype: {} for dtype in selection.HELD}):
        yield


def inputs_of(case: Case, tensors: Tensors, device: str) -> BandInputs:
    """Make the inputs that the selection of the k best sources is given."""
    structure = case.graph.structure
    assert structure is not None
    bands = bands_of(structure)
    assert bands is not None
    x = {name: t.to(device) for name, t in tensors.items()}
    strength = x["strength"].float()
    qkv = [x.get(name, x["query"]) for name in ("query", "key", "value")]
    masks = [None if m is None else m.to(device) for m in case.masks]
    return BandInputs(
        *qkv,
        strength**-2 if case.score == "rbf" else strength,
        BandSchedule(bands.sequences, torch.device(device), origin=bands.origin),
        case.score == "rbf",
        x.get("table"),
        *masks,
    )


def pairs_of(words: Tensor, case: Case, bands: BandSchedule) -> Tensor:
    """Bits [B, H, N, words] as a mask [B, H, N, M]; False where there is no edge."""
    kept = torch.zeros(*words.shape[:3], case.graph.num_sources, dtype=torch.bool)
    words = words.cpu()
    for start, targets, source, sources, step, before, *_ in bands.on_cpu.tolist():
        i, c = torch.arange(targets)[:, None], torch.arange(sources)[None, :]
        o_word = c // 32 - (i - before).clamp(min=0) // 32
        inside = (o_word >= 0) & (o_word < words.shape[-1])
        words_of_part = words[:, :, start + i * step, o_word.clamp(0, words.shape[-1] - 1)]
        bits = (words_of_part >> (c % 32)) & 1 != 0
        kept[:, :, start + i * step, source + c * step] = bits & inside
    return kept & case.edges[:, None]


def chosen(case: Case, tensors: Tensors, device: str) -> Tensor:
    """The pairs [B, H, N, M] that the kernel keeps."""
    x = inputs_of(case, tensors, device)
    return pairs_of(selection.select(x, case.options["top_k"]), case, x.bands)


def logits_in_float64(case: Case, tensors: Tensors) -> Tensor:
    """Logits of all pairs, [B, H, N, M]."""
    x = {name: t.double() for name, t in tensors.items()}
    q, k = x["query"], x.get("key", x["query"])
    k = k.repeat_interleave(case.heads // k.shape[-2], dim=-2)
    q, k = (y.transpose(-2, -3) for y in (q, k))
    strength = x["strength"][:, None, None]
    if case.score == "rbf":
        logit = -(q[..., :, None, :] - k[..., None, :, :]).square().sum(-1) / (2 * strength**2)
    else:
        logit = q @ k.mT * strength
    if case.table:
        logit = logit + cases_kernels._dense(x["table"], case.graph)
    return logit


def largest(case: Case, logit: Tensor) -> Tensor:
    """The mask of the k largest logits [B, H, N, M] of every row's edges, by sorting.

    NaN comes first, as in torch. The sort is stable: of equal logits the smaller source is kept.
    """
    edges = case.edges[:, None].expand_as(logit)
    first = torch.where(logit.isnan(), 2, torch.where(logit == torch.inf, 1, 0))
    order = logit.nan_to_num(0.0, 0.0, -torch.inf).sort(dim=-1, descending=True, stable=True)[1]
    for key in (first, edges.long()):  # sorted by the last key first
        by_key = key.gather(-1, order).sort(dim=-1, descending=True, stable=True)[1]
        order = order.gather(-1, by_key)
    kept = torch.zeros_like(edges).scatter(-1, order[..., : case.options["top_k"]], True)
    return kept & edges


def with_ties(case: Case) -> Tensors:
    """Features and scales whose logits are exact, and few: equal ones are equal bit by bit."""
    tensors = case.tensors()
    for name in ("query", "key"):
        tensors[name] = torch.zeros_like(tensors[name])
        tensors[name][..., :2] = cases_kernels.random(
            *tensors[name].shape[:-1], 2, seed=len(name)
        ).clamp(-1.4, 1.4).round()  # fmt: skip
    tensors["strength"] = torch.tensor([0.5, 2.0, 1.0, 4.0])[: case.heads]
    return tensors


def choice_errors(kept: Tensor, case: Case, logit: Tensor, rounding: float) -> Errors:
    """Compute what is wrong with the pairs [B, H, N, M] that are kept.

    The share of rows that keep another number of sources than k, or than all if there are fewer;
    and by how much a logit that is left out exceeds one that is kept, beside the largest, which may
    be `rounding`. If that is 0, logits are exact, and it is the share of rows with a wrong choice.
    """
    edges = case.edges[:, None].expand_as(kept)
    number = edges.sum(-1).clamp(max=case.options["top_k"])
    wrong = float((kept.sum(-1) != number).double().mean())
    if rounding == 0:
        worse = float((kept != largest(case, logit)).any(-1).double().mean())
    else:
        least = logit.masked_fill(~kept, torch.inf).amin(-1)
        left = logit.masked_fill(kept | ~edges, -torch.inf).amax(-1)
        worse = float((left - least).clamp(min=0).max() / logit[edges].abs().max())
    return {"another number": (wrong, 0.0), "a worse choice": (worse, rounding)}
