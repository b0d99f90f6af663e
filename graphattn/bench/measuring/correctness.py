"""Checks of results against float64, on a sample of rows.

A full float64 computation of a long case would take longer than the benchmark. Outputs of a few
targets, and the gradients of a loss on these outputs, depend only on the edges at those targets. A
graph of these edges therefore gives the same outputs and gradients.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import numpy
import torch
from torch import Tensor

import graphattn as ga
from graphattn.bench.cases.inputs import (
    AttentionInputs,
    ConsensusTensors,
    LayerInputs,
    NeighborInputs,
    SpectralInputs,
    Stream,
    StreamInputs,
    WindowSize,
)
from graphattn.bench.contenders.peers import Run, smallest_eigenpairs
from graphattn.bench.models.generation import GenerationInputs, GenerationTruth
from graphattn.bench.models.language import LanguageInputs, LanguageRun
from graphattn.bench.models.language import in_float64 as language_in_float64
from graphattn.bench.models.mixers import MixerInputs, MixerTruth
from graphattn.bench.models.vision import VisionInputs, VisionRun
from graphattn.bench.models.whole import StepInputs, StepTruth, WholeInputs, WholeTruth

SAMPLED_ROWS = 16
ALLOWED = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2, torch.float64: 1e-10}


class Truth(Protocol):
    """The right results of a case, with which a contender is compared."""

    def errors_of(self, run: Run) -> tuple[float, float]:
        """Return the relative error of the output, and the largest relative error of a gradient."""


def truth_of(inputs: Any, *, backward: bool, dot_product: bool = False) -> Truth:
    """Compute the truth of one case, by the dot product or by distance, for all its contenders."""
    if isinstance(inputs, LayerInputs):
        return LayerTruth(inputs, backward=backward)
    if type(inputs) in TRUTHS:
        return TRUTHS[type(inputs)](inputs)
    return OperationTruth(inputs, backward=backward, dot_product=dot_product)


def relative_error(value: Tensor, truth: Tensor) -> float:
    """Compute ||value - truth|| / ||truth||, or the norm of the value if the truth is 0."""
    scale = truth.norm()
    return float((value.detach().double() - truth).norm() / (scale if scale > 0 else 1))


def worst(errors: Iterable[float]) -> float:
    """Return the largest error: NaN if one of them is NaN, and 0 if there is none."""
    return float(torch.tensor([0.0, *errors], dtype=torch.float64).max())


def sample(count: int, generator: torch.Generator) -> Tensor:
    """Choose up to 16 rows: the first (a class token or a global one), and random others."""
    others = 1 + torch.randperm(max(count - 1, 0), generator=generator)[: SAMPLED_ROWS - 1]
    return torch.cat([torch.zeros(min(count, 1), dtype=torch.int64), others])


class OperationTruth:
    """Outputs of an operation (of the last sequence of a batch), and gradients of a random loss."""

    def __init__(
        self,
        inputs: AttentionInputs | ConsensusTensors,
        *,
        backward: bool,
        dot_product: bool = False,
    ) -> None:
        self.inputs: AttentionInputs | ConsensusTensors | LayerInputs = inputs
        is_batch = isinstance(inputs, AttentionInputs) and inputs.query.dim() > 3
        self.last = slice(-1, None) if is_batch else slice(None)
        generator = torch.Generator().manual_seed(1)
        self.rows = sample(inputs.graph.num_targets, generator).to(inputs.graph.device)
        learned = [t.detach()[self.last].double().requires_grad_() for t in inputs.learned()]
        few_edges = inputs.like(learned, self.edges_at_rows())
        out = in_float64(few_edges, dot_product=dot_product)[..., self.rows, :, :]
        self.keep(out, learned if backward else [], generator)

    def keep(self, out: Tensor, learned: list[Tensor], generator: torch.Generator) -> None:
        self.loss = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.device)
        loss = (out * self.loss).sum()
        self.gradients = list(torch.autograd.grad(loss, learned)) if learned else []
        self.out = out.detach()

    def edges_at_rows(self) -> ga.TokenGraph:
        is_energy = isinstance(self.inputs, ConsensusTensors)
        return edges_at(self.rows, self.inputs.graph, from_rows_too=is_energy)

    def errors_of(self, run: Run) -> tuple[float, float]:
        out = self.rows_of(run)
        gradients: list[Tensor] = []
        if self.gradients:
            loss = (out * self.loss.to(out.dtype)).sum()
            of_batch = torch.autograd.grad(loss, self.inputs.learned())
            gradients = [gradient[self.last] for gradient in of_batch]
        pairs = zip(gradients, self.gradients, strict=True)
        return relative_error(out, self.out), worst(relative_error(g, t) for g, t in pairs)

    def forward_error_of(self, run: Run) -> float:
        with torch.no_grad():
            return relative_error(self.rows_of(run), self.out)

    def rows_of(self, run: Run) -> Tensor:
        return run(self.inputs)[self.last][..., self.rows, :, :]


def edges_at(rows: Tensor, graph: ga.TokenGraph, *, from_rows_too: bool) -> ga.TokenGraph:
    """Return a graph of the edges with targets in `rows`, or also sources: energy moves both."""
    chosen = torch.zeros(graph.num_targets, dtype=torch.bool, device=graph.device)
    chosen[rows] = True
    if graph.structure is not None and graph.num_edges > 10**7:  # do not list all edges
        targets = rows.sort().values
        sources = torch.arange(graph.num_sources, device=graph.device)
        inside = torch.stack(
            [graph.structure.contains(t.expand_as(sources), sources) for t in targets]
        )
        row, source = inside.nonzero().T
        edges = torch.stack([source, targets[row]])
    else:
        source, target = graph.edge_index
        keep = chosen[target] | chosen[source] if from_rows_too else chosen[target]
        edges = graph.edge_index[:, keep]
    return ga.from_edge_index(edges, graph.num_targets, graph.num_sources)


def in_float64(x: Any, *, dot_product: bool = False) -> Tensor:
    """Compute an operation by the reference backend, on inputs that are in float64."""
    with ga.use_backend("reference"):
        if dot_product:
            return ga.dot_product_attention(x.query, x.key, x.value, x.graph)
        if isinstance(x, AttentionInputs):
            return ga.rbf_attention(x.query, x.key, x.value, x.graph, x.sigma, top_k=x.top_k)
        return ga.consensus_update(
            x.state, x.state, x.target_hidden, x.source_hidden, x.network, x.graph, x.step_size
        )


class NeighborTruth:
    """Distances of the nearest neighbours; they check a contender's distances and indices."""

    def __init__(self, inputs: NeighborInputs) -> None:
        self.inputs, self.points = inputs, inputs.points.double()
        self.rows = sample(len(self.points), torch.Generator().manual_seed(1))
        distance = (self.points[self.rows, None] - self.points).square().sum(-1)
        distance[torch.arange(len(self.rows)), self.rows] = torch.inf
        self.distance = distance.topk(inputs.k, largest=False).values.sqrt()

    def errors_of(self, run: Run) -> tuple[float, float]:
        squared, indices = run(self.inputs)
        of_indices = (self.points[self.rows, None] - self.points[indices[self.rows]]).norm(dim=-1)
        returned = squared[self.rows].sqrt()
        return worst(relative_error(d, self.distance) for d in (returned, of_indices)), 0.0


class EdgesTruth:
    """The number of edges of a window, and the sources of a few targets."""

    def __init__(self, inputs: WindowSize) -> None:
        self.inputs, N, w = inputs, inputs.num_tokens, inputs.window
        self.rows = sample(N, torch.Generator().manual_seed(1))
        self.count = sum(min(i, w) + min(N - 1 - i, w) for i in range(N))
        self.sources = [
            [j for j in range(max(0, i - w), min(N, i + w + 1)) if j != i]
            for i in self.rows.tolist()
        ]

    def errors_of(self, run: Run) -> tuple[float, float]:
        """Return the share of edges missing or added plus that of targets with wrong sources."""
        edges = run(self.inputs)
        source, target = edges.edge_index if isinstance(edges, ga.TokenGraph) else edges
        wrong = sum(
            source[target == i].tolist() != sources
            for i, sources in zip(self.rows, self.sources, strict=True)
        )
        return abs(len(target) - self.count) / self.count + wrong / len(self.rows), 0.0


class SpectralTruth:
    """The Fiedler value, with a bound of its error.

    The Rayleigh quotient of a vector that is orthogonal to the constants is an upper bound of the
    Fiedler value. Let r be its residual and lambda_2 the next eigenvalue. The quotient is at most
    ||r||^2 / (lambda_2 - quotient) too large (Temple's bound). Quotient and residual are computed
    from differences over edges, so that rounding errors stay small.
    """

    def __init__(self, inputs: SpectralInputs) -> None:
        self.inputs = inputs
        values, vectors = smallest_eigenpairs(inputs, 3)
        u = vectors[:, 1].astype(numpy.longdouble)
        u /= numpy.sqrt((u**2).sum())
        source, target = inputs.graph.edge_index.numpy()
        difference = u[target] - u[source]
        pull = inputs.edge_weight.numpy() * difference / 2  # of the symmetrised weights
        self.value = float((pull * difference).sum())
        laplacian_u = numpy.zeros_like(u)
        numpy.add.at(laplacian_u, target, pull)
        numpy.subtract.at(laplacian_u, source, pull)
        self.residual = float(numpy.sqrt(((laplacian_u - self.value * u) ** 2).sum()))
        self.slack = self.residual**2 / (values[2] - self.value) / self.value
        if not 0 <= self.slack < 1e-10:
            raise RuntimeError(
                f"the true Fiedler value is only known with an error of {self.slack:.0e}"
            )

    def errors_of(self, run: Run) -> tuple[float, float]:
        return abs(run(self.inputs) / self.value - 1) + self.slack, 0.0


class StreamTruth:
    """The last output of one float64 forward pass over all tokens that the next step sees.

    Queries and keys are rounded as in the stream's cache: they decide which keys are the nearest.
    """

    def __init__(self, inputs: StreamInputs) -> None:
        self.inputs = inputs
        dtype = inputs.late.tokens.dtype
        self.layer = copy.deepcopy(inputs.late.layer).double()
        for projection in (self.layer.query_proj, self.layer.key_proj):
            projection.register_forward_hook(lambda _, __, out: out.to(dtype).to(out.dtype))

    def errors_of(self, run: Run) -> tuple[float, float]:
        expected = [self.next_of(stream) for stream in (self.inputs.early, self.inputs.late)]
        before = self.inputs.early.position
        with torch.no_grad():
            out = run(self.inputs)
        moved = 0 if self.inputs.early.position > before else 1
        return relative_error(out, expected[moved]), 0.0

    def next_of(self, stream: Stream) -> Tensor:
        tokens = stream.seen().double()
        graph = ga.causal_graph(tokens.shape[1]).to(tokens.device)
        with torch.no_grad(), ga.use_backend("reference"):
            return self.layer(tokens, graph)[:, -1]


class LayerTruth(OperationTruth):
    """Rows of a layer's output, and gradients of a random loss on them, in float64."""

    def __init__(self, inputs: LayerInputs, *, backward: bool) -> None:
        self.inputs, self.last = inputs, slice(None)
        generator = torch.Generator().manual_seed(1)
        self.rows = sample(inputs.graph.num_targets, generator).to(inputs.graph.device)
        layer = copy.deepcopy(inputs.layer).double()
        tokens = inputs.tokens.detach().double().requires_grad_()
        with ga.use_backend("reference"):
            out = layer(tokens, edges_at(self.rows, inputs.graph, from_rows_too=True))[:, self.rows]
        self.keep(out, [tokens, *layer.parameters()] if backward else [], generator)

    def rows_of(self, run: Run) -> Tensor:
        rows: Tensor = run(self.inputs)[:, self.rows]
        return rows


class ModelTruth:
    """Logits of the last image and the gradients of its loss, with the same weights in float64."""

    def __init__(self, inputs: VisionInputs) -> None:
        self.inputs = inputs

    def errors_of(self, run: Run) -> tuple[float, float]:
        assert isinstance(run, VisionRun)
        x, last = self.inputs, slice(-1, None)
        parameters = list(x.trained[run.mixer].model.parameters())
        with torch.no_grad():
            logits = run(x)[last]
        gradients = torch.autograd.grad(run.loss(x, last), parameters)

        model = copy.deepcopy(x.trained[run.mixer].model).double()
        with ga.use_backend("reference"):
            truth = model(x.images[last].double())
            loss = torch.nn.functional.cross_entropy(truth, x.labels[last])
            true_gradients = torch.autograd.grad(loss, list(model.parameters()))
        error = relative_error(logits, truth.detach())
        return error, relative_error(flat(gradients), flat(true_gradients))


class LanguageTruth:
    """The last hidden state of a language model in a window, and the gradients of its sum."""

    def __init__(self, inputs: LanguageInputs) -> None:
        self.inputs = inputs
        self.out, self.gradients = language_in_float64(inputs)

    def errors_of(self, run: Run) -> tuple[float, float]:
        assert isinstance(run, LanguageRun)
        out = run(self.inputs)[:, -1]
        parameters = list(self.inputs.models[run.name].parameters())
        gradients = torch.autograd.grad(out.sum(), parameters)
        error = relative_error(out.detach(), self.out)
        return error, relative_error(flat(gradients), flat(self.gradients))


def flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([t.flatten().double() for t in tensors])


TRUTHS: dict[type, Callable[[Any], Truth]] = {
    NeighborInputs: NeighborTruth,
    WindowSize: EdgesTruth,
    SpectralInputs: SpectralTruth,
    StreamInputs: StreamTruth,
    VisionInputs: ModelTruth,
    LanguageInputs: LanguageTruth,
    GenerationInputs: GenerationTruth,
    MixerInputs: MixerTruth,
    WholeInputs: WholeTruth,
    StepInputs: StepTruth,
}
