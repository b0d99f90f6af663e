"""Measure the layers of a model during training: stability, attention sinks, rank."""

from __future__ import annotations

import copy
import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from scipy.sparse.linalg import ArpackNoConvergence, eigsh
from torch import Tensor, nn
from torch.optim import Optimizer

from graphattn.diagnostics import record
from graphattn.diagnostics.attention.call_statistics import ranks
from graphattn.diagnostics.hidden.evaluating import dropout_off
from graphattn.diagnostics.stable_lr import (
    BatchLoss,
    TwinOptimizer,
    alpha_max,
    curvature_by_autograd,
    curvature_by_differences,
    dot,
    left_as_found,
    random_state,
)
from graphattn.nn import SelfConsensus
from graphattn.ops.inputs import check_graph
from graphattn.spectral.certificates.frozen_steps import FrozenStep
from graphattn.spectral.certificates.modules import sequences_of
from graphattn.train.objectives.objective import Batch, Objective, evaluation_generator
from graphattn.train.runs.records import Row

LOWEST = "1 - 2 eta lambda_max"
COLUMNS = ("alpha_max", "share_stable", "sink_share", "effective_rank", "max_step_size", LOWEST)
WITHIN = 1e-3  # relative accuracy of eigenvalues, enough for a curve
EPSILON = 1e-3  # step of finite differences of gradients, if a loss cannot be differentiated twice


def layer_state(
    model: nn.Module,
    objective: Objective,
    batches: Sequence[Batch],
    *,
    optimizer: Optimizer | None = None,
    max_norm: float | None = None,
    seed: int = 0,
) -> Row:
    r"""Measure the stability of a model during training, and its layers, on a few batches.

    The model runs in evaluation mode. Its parameters, gradients and buffers and the state of the
    random numbers do not change, so a run with records equals a run without.

    Args:
        model: any module; its layers are the attention and consensus layers that run.
        objective: the objective of the training.
        batches: small batches; everything except learning rates uses only the first.
        optimizer: the optimizer during training. Without it, or with a learning rate of 0, there is
            no `alpha_max`.
        max_norm: norm to which gradients are clipped before the optimizer; None or 0 for no
            clipping.
        seed: seed of the masks and the noise of the objective.

    Returns:
        A dict with

        - ``alpha_max``: the median over `batches` of the largest learning rate at which the
          optimizer's own next step still lowers the loss up to second order (Stabilizing
          Transformer Training Through Consensus, Eq. 17-19, as
          :func:`graphattn.diagnostics.max_stable_lr`); infinite if there is no positive curvature
          along the step
        - ``share_stable``: the share of `batches` whose alpha_max is above the learning rate
        - ``layers``: by name, a dict with

          - ``alpha_max``, ``share_stable``: the same if only this layer makes its step; None if it
            is frozen
          - ``sink_share``: the share of attention on the first token, over sequences and heads;
            None without attention weights
          - ``effective_rank``: the participation ratio of its output, over sequences
          - ``max_step_size``: of a consensus layer whose step is a gradient step, the largest step
            size that makes no mode oscillate, 1 / (2 lambda_max), over heads
          - ``1 - 2 eta lambda_max``: the factor of the roughest mode in such a layer; 0 or more
            means a low-pass filter. None if no theorem applies (``update="target"``, rope=True)

    Example:
        >>> import torch, graphattn as ga
        >>> class Zero(ga.train.Objective):  # all logits should be 0
        ...     name = "zero"
        ...     def collate(self, examples): ...
        ...     def loss(self, model, batch, generator=None):
        ...         logits = model(batch["tokens"])
        ...         return ga.train.Loss(logits.square().sum(), logits.numel())
        >>> model = ga.models.SequenceEncoder(9, 8, depth=2, heads=2, mixer="mix", edge_hidden=4)
        >>> batch = {"tokens": torch.randint(9, (2, 12))}
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        >>> state = ga.train.layer_state(model, Zero(), [batch], optimizer=optimizer)
        >>> list(state["layers"]), state["share_stable"]
        (['blocks.0.mixer', 'blocks.1.mixer'], 1.0)
    """
    if not batches:
        raise ValueError("batches must contain at least one batch, got none")
    with left_as_found(model, list(model.parameters())), dropout_off(model):
        layers = _seen(model, objective, batches[0], seed)
        state: Row = {"alpha_max": None, "share_stable": None, "layers": layers}
        if optimizer is not None and optimizer.param_groups[0].get("lr", 0.0) > 0:
            _add_learning_rates(state, model, objective, batches, optimizer, max_norm, seed)
    return state


def _loss(objective: Objective, model: nn.Module, batch: Batch, seed: int) -> Tensor:
    return objective.loss(model, batch, evaluation_generator(batch, 0, seed)).mean


# Measurements in a forward pass.


def _seen(model: nn.Module, objective: Objective, batch: Batch, seed: int) -> dict[str, Row]:
    rows: dict[str, Row] = {}
    ran = False
    try:
        with torch.no_grad(), _consensus_layers(model, rows), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about attention that could not be recorded
            with record(model, keep="statistics") as recording:
                _loss(objective, model, batch, seed)
                ran = True
                for call in recording:
                    row = rows.setdefault(call.name, dict.fromkeys(COLUMNS))
                    row["sink_share"] = _number(call.sinks)
                    row["effective_rank"] = _number(call.effective_rank)
    except ValueError:  # the model has no attention
        if not ran:
            raise
    order = {name: place for place, (name, _) in enumerate(model.named_modules())}
    return dict(sorted(rows.items(), key=lambda item: order.get(item[0], len(order))))


def _number(values: Tensor) -> float | None:
    mean = float(values.float().nanmean())
    return None if math.isnan(mean) else mean


@contextmanager
def _consensus_layers(model: nn.Module, rows: dict[str, Row]) -> Iterator[None]:
    """Record every consensus layer that runs."""

    def listen(name: str, layer: SelfConsensus) -> Callable[..., None]:
        parameters = inspect.signature(type(layer).forward)

        def look(_: nn.Module, args: Any, keywords: dict[str, Any], output: Tensor) -> None:
            given = dict(parameters.bind(layer, *args, **keywords).arguments)
            row = rows.setdefault(name, dict.fromkeys(COLUMNS))
            real = given.get("valid")
            if not isinstance(real, Tensor):
                real = torch.ones(output.shape[:-1], dtype=torch.bool, device=output.device)
            tokens = output.detach().float().reshape(-1, *output.shape[-2:])
            real = real.expand(output.shape[:-1]).reshape(tokens.shape[:-1])
            row["effective_rank"] = _number(ranks(tokens, real))
            if given.get("context") is None:
                row["max_step_size"], row[LOWEST] = _step_sizes(layer, given)

        return look

    handles = [
        layer.register_forward_hook(listen(name or "model", layer), with_kwargs=True)
        for name, layer in model.named_modules()
        if isinstance(layer, SelfConsensus)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _step_sizes(layer: SelfConsensus, given: dict[str, Any]) -> tuple[float | None, float | None]:
    """Return the least 1 / (2 lambda_max) and 1 - 2 eta lambda_max of the heads, first sequence."""
    if layer.update_rule == "target" or (layer.rotary is not None and not layer.isometric):
        return None, None
    x = given["x"].detach().cpu().double()
    rows = x.reshape(-1, *x.shape[-2:])[:1]
    layer = copy.deepcopy(layer).cpu().double().eval()
    graph = check_graph(given["graph"].to("cpu"), rows, rows.shape[-2], rows.shape[-2])
    first = {
        name: None if given.get(name) is None else _first(given[name], x.dim())
        for name in ("valid", "positions", "edge_features")
    }
    sequence = next(iter(sequences_of(rows, graph, *first.values())))[1]
    if not bool(sequence[0].isfinite().all()):
        return None, None
    step = FrozenStep(layer, *sequence)
    largest, lowest = math.inf, 1.0
    for head, sizes in zip(step.heads(), step.step_size, strict=True):
        if head.size == 0:
            continue
        top = _largest_eigenvalue(head)  # of 2 eta L
        if top > 0:
            largest = min(largest, float(sizes.max()) / top)
        lowest = min(lowest, 1 - top)
    return largest, lowest


def _first(value: Any, dims: int) -> Tensor:
    """Return the part of the first sequence of a batch."""
    value = (value[0] if isinstance(value, tuple) else value).detach().cpu()
    value = value.double() if value.is_floating_point() else value
    return value[:1] if dims > 2 and value.dim() >= dims - 1 and value.dim() > 1 else value


def _largest_eigenvalue(head: Any) -> float:
    if head.size < 64:
        return float(head.dense_eigenvalues()[-1])
    start = np.random.default_rng(0).standard_normal(head.size)
    options = {"which": "LA", "tol": WITHIN, "v0": start, "return_eigenvectors": False}
    try:
        return float(eigsh(head.operator, k=1, **options)[0])
    except ArpackNoConvergence:
        return math.nan


# Learning rates.


def _add_learning_rates(
    state: Row,
    model: nn.Module,
    objective: Objective,
    batches: Sequence[Batch],
    optimizer: Optimizer,
    max_norm: float | None,
    seed: int,
) -> None:
    """Add alpha_max and the share of stable steps, for the model and its trained layers."""
    first = TwinOptimizer(optimizer, max_norm or None)
    parts: list[tuple[Row, list[bool]]] = [(state, [True] * len(first.parameters))]
    for name, row in state["layers"].items():
        try:
            parameters = {id(parameter) for parameter in model.get_submodule(name).parameters()}
        except AttributeError:  # the name of a Krause shortcut is not a module of the model
            continue
        chosen = [id(parameter) in parameters for parameter in first.parameters]
        if any(chosen):
            parts.append((row, chosen))
    loss = BatchLoss(model, lambda m, b: _loss(objective, m, b, seed), first.parameters)
    values: list[list[float]] = [[] for _ in parts]
    for batch in batches:
        # Every batch starts with the present state of the optimizer.
        twin = TwinOptimizer(optimizer, max_norm or None)
        pairs = _slopes_and_curvatures(loss, batch, twin, [chosen for _, chosen in parts])
        for alphas, pair in zip(values, pairs, strict=True):
            alphas.append(alpha_max(*pair))
    for (row, _), alphas in zip(parts, values, strict=True):
        known = sorted(value for value in alphas if not math.isnan(value))
        row["alpha_max"] = known[len(known) // 2] if known else None
        row["share_stable"] = sum(value > first.lr for value in alphas) / len(alphas)


def _slopes_and_curvatures(
    loss: BatchLoss, batch: Batch, twin: TwinOptimizer, parts: list[list[bool]]
) -> list[tuple[float, float]]:
    """Return <g, u> and <u, H u> for every part, with u restricted to its parameters."""
    start = random_state(loss.parameters)
    gradients = loss.gradient(batch, create_graph=True)
    u = twin.step([None if g is None else g.detach() for g in gradients])

    def pairs(curvature: Callable[[list[Tensor]], float]) -> list[tuple[float, float]]:
        restricted = (
            [v if kept else torch.zeros_like(v) for v, kept in zip(u, chosen, strict=True)]
            for chosen in parts
        )
        return [(dot(gradients, v), curvature(v)) for v in restricted]

    try:
        return pairs(
            lambda v: curvature_by_autograd(loss.parameters, gradients, v, retain_graph=True)
        )
    except RuntimeError:  # kernels and fused attention have no second derivative
        return pairs(lambda v: curvature_by_differences(loss, batch, v, EPSILON, start))
