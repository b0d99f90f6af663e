"""Recording the attention of any model while it runs, with statistics and rollout."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, overload

import torch
from torch import Tensor, nn

from graphattn.diagnostics.arguments import as_model
from graphattn.diagnostics.attention.call_statistics import (
    Keep,
    RecordedCall,
    of_edges,
    of_operands,
    of_step,
)
from graphattn.diagnostics.attention.calls import Watcher, watching
from graphattn.diagnostics.attention.operands import Operands
from graphattn.diagnostics.attention.record import is_attention_layer, listening
from graphattn.diagnostics.attention.rollout import rollout_of_matrices
from graphattn.diagnostics.attention.same_tokens import by_name
from graphattn.diagnostics.attention.step_calls import StepOperands
from graphattn.diagnostics.per_layer import PerLayer, per_layer
from graphattn.graphs.arguments import as_choice, as_int
from graphattn.nn import CrossConsensus, SelfConsensus
from graphattn.nn.base.graph_layer import GraphLayer


class Recording(Sequence[RecordedCall]):
    """The attention calls of a model in their order, from :func:`record`.

    Attributes:
        missed: modules that look like attention and ran, but could not be recorded: the reason by
            the name of the module.

    Example:
        >>> import torch, graphattn as ga
        >>> layer = torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        >>> with ga.diagnostics.record(model) as recording:
        ...     y = model(torch.randn(3, 10, 16))
        >>> recording.names
        ('layers.0.self_attn', 'layers.1.self_attn')
    """

    def __init__(self, calls: Sequence[RecordedCall] = ()) -> None:
        self.calls = list(calls)
        self.missed: dict[str, str] = {}

    @overload
    def __getitem__(self, index: int) -> RecordedCall: ...

    @overload
    def __getitem__(self, index: slice) -> list[RecordedCall]: ...

    def __getitem__(self, index: int | slice) -> RecordedCall | list[RecordedCall]:
        if isinstance(index, str):
            raise TypeError(
                f"index must be the number of a call or a slice, got {index!r}: use "
                f"select({index!r}) to choose calls by the names of their modules, {self.names}"
            )
        return self.calls[index]

    def __len__(self) -> int:
        return len(self.calls)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the called modules as in ``model.named_modules()``, one per call."""
        return tuple(call.name for call in self.calls)

    def select(self, text: str) -> Recording:
        """Choose the calls of modules whose names contain a text, such as "encoder".

        Raises:
            ValueError: if there are none.
        """
        chosen = Recording([call for call in self.calls if text in call.name])
        if not chosen.calls:
            raise ValueError(f"text must be part of one of the names {self.names}, got {text!r}")
        chosen.missed = {name: why for name, why in self.missed.items() if text in name}
        return chosen

    def sinks(self) -> PerLayer:
        """Return the share of attention on one token, :func:`sink_share`, [calls, heads].

        The token is the argument `token` of :func:`record`, counted from the first real token of
        every sequence, so padding on the left does not count.
        """
        return per_layer([(c.name, c.sinks.nanmean(dim=0)) for c in self._some()])

    def entropy(self) -> PerLayer:
        """Return the entropy of rows in nats, :func:`attention_entropy`, [calls, heads]."""
        return per_layer([(c.name, c.entropy.nanmean(dim=0)) for c in self._some()])

    def head_diversity(self) -> PerLayer:
        """Return the diversity of heads, :func:`head_diversity`, [calls]; NaN for one head."""
        return self._numbers([c.diversity.nanmean() for c in self._some()])

    def effective_rank(self) -> PerLayer:
        """Return the effective rank of the attention outputs, :func:`effective_rank`, [calls].

        The outputs are those of the attention call, with heads concatenated, before the output
        projection (for graphattn's layers: after it). For hidden states, use
        :func:`effective_rank_per_layer` and :func:`hidden_spectra`.
        """
        return self._numbers([c.effective_rank.nanmean() for c in self._some()])

    def rollout(self, *, residual: float = 0.5, discard: float = 0.0) -> Tensor:
        """Compute attention rollout through all recorded calls in their order, [B, N, N].

        It is :func:`graphattn.diagnostics.rollout`, where the edges of a row are its weights above
        0.

        Raises:
            ValueError: if a module was called more than once, calls have different tokens (use
                :meth:`select`), both a layer and its Krause shortcut were recorded, or the weights
                were not stored (``keep="statistics"``).
        """
        calls = self._some()
        again = {name for name in self.names if self.names.count(name) > 1}
        if again:
            raise ValueError(
                f"rollout() needs one call of every layer, got several calls of "
                f"{sorted(again)[0]!r}: record a single forward pass"
            )
        beside = {f"{name}.krause" for name in self.names} & set(self.names)
        if beside:
            raise ValueError(
                "rollout() needs layers that follow each other, but the shortcut "
                f"{min(beside)!r} is parallel to its layer: use select('.krause'), or "
                "Recording([call for call in recording if not call.name.endswith('.krause')])"
            )
        crossing = any(c.shape[2] != c.shape[3] or c.same_tokens is False for c in calls)
        if crossing or (len({(call.shape[0], call.shape[2]) for call in calls}) > 1):
            got = sorted({f"{call.shape[2]} x {call.shape[3]}" for call in calls})
            raise ValueError(
                "rollout() needs calls with the same tokens as queries and keys, got weights of "
                f"{', '.join(got)}: choose calls with select(text)"
            )
        return rollout_of_matrices(
            (call.mean_over_heads() for call in calls), residual=residual, discard=discard
        )

    def __repr__(self) -> str:
        missed = f", {len(self.missed)} missed" if self.missed else ""
        return f"Recording({len(self)} calls{missed})"

    def __str__(self) -> str:
        """Return a table with a line per call."""
        if not self.calls:
            return repr(self)
        width = max(len(name) for name in self.names)
        lines = [f"{'':{width}}  queries x keys  sink  tokens  diversity  rank"]
        for call in self.calls:
            size = f"{call.shape[2]} x {call.shape[3]}"
            seen = call.entropy.exp().nanmean()
            lines.append(
                f"{call.name:{width}}  {size:>14}  {call.sinks.nanmean():4.2f}  {seen:6.1f}"
                f"  {call.diversity.nanmean():9.2f}  {call.effective_rank.nanmean():4.1f}"
            )
        if any(call.signed for call in self.calls):
            lines.append("nan: negative weights (linear attention with rope=True) are not shares")
        lines += [f"{name:{width}}  not recorded: {why}" for name, why in self.missed.items()]
        return "\n".join(lines)

    def _some(self) -> list[RecordedCall]:
        if not self.calls:
            raise ValueError(
                "the recording must have at least one call, got none: run the model inside the "
                "block of record()"
            )
        return self.calls

    def _numbers(self, values: list[Tensor]) -> PerLayer:
        return PerLayer(torch.stack([value.cpu() for value in values]), self.names)


@contextmanager
def record(model: nn.Module, *, token: int = 0, keep: Keep = "weights") -> Iterator[Recording]:
    """Record the attention of any model while it runs in the block.

    It records the layers of :mod:`graphattn.nn`, all calls of
    ``torch.nn.functional.scaled_dot_product_attention``, ``torch.nn.MultiheadAttention`` and
    ``torch.nn.TransformerEncoder``, the attention of Hugging Face's transformers with "eager",
    "sdpa", "flex_attention" and "graphattn", and the layers that :mod:`graphattn.integrations` puts
    into such models. Consensus has no weights, and is in :attr:`Recording.missed`. The weights are
    those of the call, with its mask, causality, scale, softcap, sinks and groups of heads, but
    without dropout. With a sink logit (as in GPT-OSS), rows sum to less than 1; the rest is the
    share of the sink.

    Steps of generation (``step``, ``generate``) are also calls, with few queries. For graphattn's
    layers, the queries are the newest tokens, and the keys are the tokens in the cache. The cache
    of linear attention without a window has sums instead of tokens, so only its first step (the
    prompt) has weights; the other steps are in :attr:`Recording.missed`.

    Queries that may see no keys do not count in the statistics. In self-attention, tokens that no
    query may see, not even their own, do not count either, because they are padding. A call is
    self-attention if queries and keys are one tensor or parts of one, if it is causal, or by the
    name of its module (all attention in transformers that is not named cross-attention). In other
    calls, all queries with keys count, and also count in :meth:`Recording.sinks`.

    The results, gradients and random numbers of the model are the same to the last bit, except
    where torch would use its fused inference of ``TransformerEncoder`` and ``MultiheadAttention``,
    the fast path. It is off inside the block, as by
    ``torch.backends.mha.set_fastpath_enabled(False)``. So results differ by rounding and at padding
    there, and a nested tensor, which only the fast path accepts, raises an error of torch: use a
    padded tensor with a mask.

    A compiled function that calls the model runs uncompiled inside the block. Only calls in the
    thread that opened the block are recorded. Calls that gradient checkpointing repeats in the
    backward pass are not recorded twice. Blocks may be nested.

    Args:
        model: any torch model that is not compiled.
        token: the token for :meth:`Recording.sinks`, counted from the first real token of every
            sequence.
        keep: what is stored of every call, besides its statistics. "weights" are H Q K numbers per
            sequence, so record short runs. "mean" is their mean over heads, which is enough for
            rollout. "statistics" stores no weights. Statistics are computed in blocks of rows, so
            recording needs no matrix of queries by keys that the model does not need (except one
            per call for ``MultiheadAttention``, "graphattn", converted layers and shortcuts).

    Yields:
        A :class:`Recording`, to which every call is added.

    Raises:
        ValueError: if the model is compiled or TorchScript; at the end of the block, if nothing was
            recorded.

    Warns:
        UserWarning: at the end of the block, if modules that look like attention ran but could
            not be recorded. They and the reasons are in :attr:`Recording.missed`.

    Example:
        >>> import torch, graphattn as ga
        >>> class Attention(torch.nn.Module):
        ...     def forward(self, x):  # [B, H, N, D]
        ...         return torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
        >>> model = torch.nn.Sequential(Attention(), Attention())
        >>> with ga.diagnostics.record(model) as recording:
        ...     y = model(torch.randn(2, 4, 10, 8))
        >>> values, names = recording.sinks()
        >>> values.shape, names
        (torch.Size([2, 4]), ('0', '1'))
        >>> recording.rollout().shape
        torch.Size([2, 10, 10])
        >>> call = recording[0]  # weights by edges of a graph, for all functions of this module
        >>> ga.diagnostics.attention_entropy(call.weights, call.graph).shape
        torch.Size([2, 4])
    """
    as_choice("keep", keep, ("weights", "mean", "statistics"))
    watcher = _Recorder(as_model(model), as_int("token", token, 0), keep)
    with listening(model, watcher.record_layer), watching(watcher):
        yield watcher.recording
    recording, missed = watcher.recording, watcher.missed
    named = "; ".join(f"{name}: {why}" for name, why in missed.items())
    if not recording.calls:
        if watcher.num_runs == 0 and not missed:
            raise ValueError(
                f"nothing was recorded, because the {type(model).__name__} was not called inside "
                "the block of record(), or only in another thread: call it inside the block"
            )
        raise ValueError(
            f"nothing was recorded, because the {type(model).__name__} made no known call of "
            "attention" + (f" ({named})" if named else _only_consensus(model))
        )
    if missed:
        warnings.warn(
            f"record() could not record all attention of the model: {named}", stacklevel=3
        )


def _only_consensus(model: nn.Module) -> str:
    """Return the reason why nothing was recorded if all layers are consensus; "" otherwise."""
    layers = [layer for layer in model.modules() if isinstance(layer, GraphLayer)]
    if not layers or not all(isinstance(x, SelfConsensus | CrossConsensus) for x in layers):
        return ""
    which = f"its {len(layers)} layers are" if len(layers) > 1 else "its layer is"
    return f": {which} consensus, which has no attention weights"


class _Recorder(Watcher):
    """A watcher that adds all calls to a recording."""

    def __init__(self, model: nn.Module, token: int, keep: Keep) -> None:
        super().__init__(model)
        self.recording = Recording()
        self.recording.missed = self.missed
        self.token = token
        self.keep = keep
        self.modules = {self.names[id(module)]: module for module in model.modules()}

    def is_recorded_by_hooks(self, module: nn.Module) -> bool:
        return is_attention_layer(module)

    def record_call(self, name: str, operands: Operands) -> None:
        if operands.same_tokens is None:
            operands.same_tokens = by_name(name, self.modules.get(name))
        self.recording.calls.append(of_operands(name, operands, self.token, self.keep))

    def record_layer(
        self, name: str, weights: Tensor, output: Tensor, graph: Any, valid: Tensor | None
    ) -> None:
        self.mark_observed()
        call = of_edges(name, weights, output, graph, self.token, self.keep, valid)
        self.recording.calls.append(call)

    def record_step(
        self, name: str, layer: nn.Module, step: StepOperands | str, output: Tensor
    ) -> None:
        if isinstance(step, str):
            self.report_missed(name, step)
            return
        self.mark_observed()
        call = of_step(name, step.weights(layer), output, step, self.token, self.keep)
        self.recording.calls.append(call)
