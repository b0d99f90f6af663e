"""Whether a result is right: against float64, on a sample of rows.

A full float64 computation of a long case would take longer than the benchmark. Outputs and
gradients of a few targets need the edges at those targets alone, so a graph of these edges gives
them exactly.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import graphattn as ga
from graphattn.cli.bench.cases import consensus, rbf_reference
from graphattn.cli.bench.contenders import Run
from graphattn.cli.bench.inputs import AttentionInputs, ConsensusInputs, NeighborInputs

SAMPLED_ROWS = 16
ALLOWED = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2, torch.float64: 1e-10}


class Truth:
    """Float64 outputs, and gradients of a random loss on them, for a sample of rows of a case."""

    def __init__(self, inputs: Any, *, backward: bool) -> None:
        self.inputs = inputs
        generator = torch.Generator().manual_seed(1)
        if isinstance(inputs, NeighborInputs):
            N = len(inputs.points)
            self.rows = torch.randperm(N, generator=generator)[:SAMPLED_ROWS]
            points = inputs.points.double()
            distance = (points[self.rows, None] - points).square().sum(-1)
            distance[torch.arange(len(self.rows)), self.rows] = torch.inf
            self.out = distance.topk(inputs.k, largest=False).values
            self.gradients: list[Tensor] = []
            return
        N = inputs.graph.num_targets
        self.rows = torch.randperm(N, generator=generator)[:SAMPLED_ROWS].to(inputs.graph.device)
        learned = [t.detach().double().requires_grad_() for t in inputs.learned()]
        self.out = self._run_in_float64(inputs.like(learned, self._edges_at_rows(inputs)))
        self.loss = torch.randn(self.out.shape, generator=generator, dtype=torch.float64)
        self.loss = self.loss.to(self.out.device)
        self.gradients = []
        if backward:
            self.gradients = list(torch.autograd.grad((self.out * self.loss).sum(), learned))
        self.out = self.out.detach()

    def _edges_at_rows(self, inputs: Any) -> ga.TokenGraph:
        graph: ga.TokenGraph = inputs.graph
        chosen = torch.zeros(graph.num_targets, dtype=torch.bool, device=graph.device)
        chosen[self.rows] = True
        if graph.structure is not None and graph.num_edges > 10**7:  # list the chosen rows only
            targets = self.rows.sort().values
            sources = torch.arange(graph.num_sources, device=graph.device)
            inside = torch.stack(
                [graph.structure.contains(t.expand_as(sources), sources) for t in targets]
            )
            row, source = inside.nonzero().T
            edges = torch.stack([source, targets[row]])
        else:
            source, target = graph.edge_index
            keep = chosen[target]
            if isinstance(inputs, ConsensusInputs):  # "energy" also moves the source of an edge
                keep = keep | chosen[source]
            edges = graph.edge_index[:, keep]
        return ga.from_edge_index(edges, graph.num_targets, graph.num_sources)

    def _run_in_float64(self, inputs: Any) -> Tensor:
        if isinstance(inputs, AttentionInputs):
            return rbf_reference(inputs)[..., self.rows, :, :]
        return consensus(inputs)[..., self.rows, :, :]

    def error_of(self, run: Run) -> tuple[float, float]:
        """Relative RMS errors of a contender's output and, worst of all inputs, its gradients."""
        if isinstance(self.inputs, NeighborInputs):
            distances, indices = run(self.inputs)
            points = self.inputs.points.double()
            found = points[self.rows, None] - points[indices[self.rows]]
            returned = relative_error(distances[self.rows].sqrt(), self.out.sqrt())
            return max(returned, relative_error(found.norm(dim=-1), self.out.sqrt())), 0.0
        learned = self.inputs.learned()
        out = run(self.inputs)[..., self.rows, :, :]
        gradients = []
        if self.gradients:
            gradients = list(torch.autograd.grad((out * self.loss.to(out.dtype)).sum(), learned))
        worst = max(
            (relative_error(g, t) for g, t in zip(gradients, self.gradients, strict=True)),
            default=0.0,
        )
        return relative_error(out, self.out), worst


def relative_error(value: Tensor, truth: Tensor) -> float:
    """||value - truth|| / ||truth||; where the truth is 0, the norm of the value."""
    scale = truth.norm()
    return float((value.detach().double() - truth).norm() / (scale if scale > 0 else 1))
