"""One step of a consensus layer as a linear map, with R, step size and rotations held fixed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import scipy.sparse
import torch
from scipy.sparse.linalg import LinearOperator
from torch import Tensor

from graphattn.graphs import TokenGraph
from graphattn.nn import CrossConsensus, SelfConsensus
from graphattn.ops.consensus.edge_network import EdgeMatrix, form
from graphattn.ops.consensus.step_size import automatic_bounds, automatic_step
from graphattn.spectral.matrix_weighted.block_laplacian import Array, BlockLaplacian

AGREE = 1e-9  # the largest relative difference between the layer's own step and this one
EDGES = 2**22  # numbers in hidden vectors that are formed at a time


def edge_hidden_of(
    layer: SelfConsensus | CrossConsensus, edge_features: Tensor | None, graph: TokenGraph
) -> dict[str, Tensor]:
    """Compute F e_ij, the keyword argument of a layer's step for features of edges, if given."""
    if edge_features is None:
        return {}
    hidden = layer.edge_net.edge_hidden(edge_features, graph, (None, None))
    return {"edge_hidden": form(hidden, None)}


def largest_iteration(layer: SelfConsensus | CrossConsensus) -> dict[str, int]:
    """Return the iteration with the largest step, as an argument of the layer's `mix`.

    What holds for that step holds for all. A layer with one step has no such argument, because a
    subclass may have its own `fused()`.
    """
    if not layer.learned_step or layer.iterations == 1:
        return {}
    return {"iteration": int(layer.raw_step_size.argmax())}


def step_sizes(
    layer: SelfConsensus | CrossConsensus, R: EdgeMatrix, graph: TokenGraph, update: str
) -> Tensor:
    """Compute the step size of every target and head, float64 [N, H], in the iteration with the
    largest."""
    eta = layer.step_tensor(**largest_iteration(layer))
    if isinstance(eta, str):
        eta = automatic_step(automatic_bounds(R.alpha + R.beta, graph, update))
    return torch.as_tensor(eta, dtype=torch.float64).expand(graph.num_targets, layer.heads)


class FrozenStep:
    r"""The linear map u -> u' of one consensus step, for states u [N, H, D] of one sequence.

    .. math:: u' = u - \eta A^\top R G Q u

    Here Q are the rotations (if any), G takes the differences of all edges (target minus source), R
    are the edges' matrices alpha I + rows^T rows, and A selects the tokens that an edge changes:
    A = G for update "energy", and the targets for update "target".
    """

    def __init__(
        self,
        layer: SelfConsensus,
        x: Tensor,
        graph: TokenGraph,
        positions: Tensor | None,
        edge_features: Tensor | None = None,
    ) -> None:
        self.layer = layer
        self.x, _, self.graph, _ = layer.prepare(x, x, graph, None)
        self.rotations = layer.rotations(self.x, self.x, self.graph, positions)
        net = layer.edge_net
        self.hidden = net.target_hidden(self.x), net.source_hidden(self.x)
        features = layer.checked_features(edge_features, self.x, self.graph)
        self.edge_hidden = edge_hidden_of(layer, features.get("edge_features"), self.graph)
        R = self._matrices()
        eta = step_sizes(layer, R, self.graph, layer.update_rule)
        source, target = self.graph.edge_index
        edge = source != target  # a self-loop exerts no force
        self.source, self.target = source[edge].numpy(), target[edge].numpy()
        self.alpha = R.alpha[edge].T.numpy()  # [H, E]
        rank = R.unit_rows.shape[-2]
        scaled = (R.beta / rank).sqrt()[..., None, None] * R.unit_rows
        self.rows = scaled[edge].transpose(0, 1).contiguous().numpy()  # [H, E, r, D]
        self.step_size = eta.T.contiguous().numpy()  # [H, N]
        self.shape = len(x), layer.heads, layer.head_dim

    def _matrices(self) -> EdgeMatrix:
        """Compute R of every edge, including self-loops, some edges at a time."""
        source, target = self.graph.edge_index
        of_target, of_source = self.hidden
        at_a_time = max(1, EDGES // max(1, of_target[0].numel() if len(of_target) else 1))
        ends = zip(source.split(at_a_time), target.split(at_a_time), strict=True)
        of_edges: Sequence[Tensor | None] = [None] * len(target.split(at_a_time))
        if self.edge_hidden:
            of_edges = self.edge_hidden["edge_hidden"].split(at_a_time)
        pieces = [
            self.layer.edge_net.edge_matrix(of_target[t] + of_source[s], of_edge)
            for (s, t), of_edge in zip(ends, of_edges, strict=True)
        ]
        alpha, beta, rows = (torch.cat(parts) for parts in zip(*pieces, strict=True))
        return EdgeMatrix(alpha, beta, rows)

    # The step of the layer, and the step of this class.

    def of_layer(self, u: Tensor) -> Tensor:
        """Apply the layer's own step to u [N, H, D]."""
        layer = self.layer
        compared = layer.rotate(u, u, self.rotations)
        start = compared[0] if layer.isometric else u
        valid = None, None
        more: dict[str, Any] = {**largest_iteration(layer), **self.edge_hidden}
        updated = layer.mix(start, compared, self.hidden, self.graph, valid, **more)
        return layer.rotate_back(updated, self.rotations)

    @property
    def states(self) -> Tensor:
        """States u = W_s y + b_s of the tokens, [N, H, D]."""
        return self.layer.split(self.layer.source_proj(self.x), self.layer.heads)

    def is_of_layer(self) -> bool:
        """Whether this map is the layer's own step, tested on its states and on random states.

        Two linear maps that agree on a random state are equal with probability 1. They differ if a
        subclass of the layer overrides `message()`.
        """
        drawn = np.random.default_rng(0).standard_normal(self.shape)
        for u in (self.states, torch.from_numpy(drawn)):
            theirs, ours = self.of_layer(u), self.apply(u)
            if not bool((theirs - ours).norm() <= AGREE * (theirs.norm() + u.norm())):
                return False
        return True

    def apply(self, u: Tensor) -> Tensor:
        """Apply the map to u [N, H, D] without rotation."""
        if self.layer.isometric:
            rotated = self._rotated(u.numpy())
            updated = rotated - self._change(rotated, self._ends)
            return self.layer.rotate_back(torch.from_numpy(updated), self.rotations)
        return torch.from_numpy(self._step(u.numpy()))

    def energy(self, u: Tensor) -> float:
        """Compute 1/2 sum_e (u_i - u_j)^T R_e (u_i - u_j) over all heads, for rotated states."""
        d = self._per_edge(self._rotated(u.numpy()), self._differences)
        along = np.matmul(self.rows, d[..., None])
        return float(np.sum(self.alpha * np.square(d).sum(-1)) + np.square(along).sum()) / 2

    @cached_property
    def smallest_matrix_eigenvalue(self) -> float:
        """The smallest eigenvalue of R over all edges and heads; 0 without edges."""
        if self.alpha.size == 0:
            return 0.0
        rank, features = self.rows.shape[-2:]
        if rank < features:
            return float(self.alpha.min())
        gram = self.rows.swapaxes(-1, -2) @ self.rows
        return float((self.alpha + np.linalg.eigvalsh(gram)[..., 0]).min())

    # As operators.

    def heads(self) -> list[BlockLaplacian]:
        """Return M of every head, where I - M is the step of update "energy" on rotated states."""
        return [
            BlockLaplacian(self.source, self.target, alpha, rows, step)
            for alpha, rows, step in zip(self.alpha, self.rows, self.step_size, strict=True)
        ]

    def operator(self) -> LinearOperator:
        """Return the step and its transpose as an operator on states [N H D]."""
        size = int(np.prod(self.shape))

        def step(u: Array) -> Array:
            return self._step(u.reshape(self.shape)).reshape(-1)

        def transposed(v: Array) -> Array:
            v = v.reshape(self.shape)
            d = self._per_edge(self.step_size.T[..., None] * v, self._ends)
            return (v - self._rotated(self._summed(d, self._differences), back=True)).reshape(-1)

        return LinearOperator((size, size), matvec=step, rmatvec=transposed, dtype=np.float64)

    def diagonal_blocks(self) -> Array:
        """Return the derivative of every token's new state by its own state, [H, N, D, D].

        It is for update "target".
        """
        N, heads, D = self.shape
        blocks = np.zeros((heads, N, D, D))
        rotation = self._rotated(np.broadcast_to(np.eye(D)[:, None, None], (D, N, heads, D)))
        for head, out in enumerate(blocks):
            matrices = self.rows[head].swapaxes(-1, -2) @ self.rows[head]
            matrices += self.alpha[head][:, None, None] * np.eye(D)
            np.add.at(out, self.target, matrices)
            # The product is R Q_i: column k of Q_i is the rotated unit vector e_k.
            out[:] = self.step_size[head][:, None, None] * (
                out @ rotation[:, :, head].transpose(1, 2, 0)
            )
        return np.eye(D) - blocks

    def _step(self, u: Array) -> Array:
        return u - self._change(self._rotated(u), self._ends)

    def _change(self, rotated: Array, ends: scipy.sparse.csr_array) -> Array:
        """Compute eta A^T R G u for rotated states [N, H, D]."""
        d = self._per_edge(rotated, self._differences)
        return self.step_size.T[..., None] * self._summed(d, ends)

    def _per_edge(self, u: Array, ends: scipy.sparse.csr_array) -> Array:
        """Multiply u [N, H, D] by a matrix [E, N], to values per edge [H, E, D]."""
        N, heads, D = self.shape
        return (ends @ u.reshape(N, heads * D)).reshape(len(self.source), heads, D).swapaxes(0, 1)

    def _summed(self, d: Array, ends: scipy.sparse.csr_array) -> Array:
        """Multiply d [H, E, D] by R of every edge, and add it up at the `ends`: [N, H, D]."""
        _, heads, D = self.shape
        force = self.alpha[..., None] * d
        along = np.einsum("herd,hed->her", self.rows, d)
        force += np.einsum("herd,her->hed", self.rows, along)
        force = force.swapaxes(0, 1).reshape(len(self.source), heads * D)
        return (ends.T @ force).reshape(self.shape)

    def _rotated(self, u: Array, back: bool = False) -> Array:
        if self.rotations is None:
            return u
        assert self.layer.rotary is not None
        given = torch.from_numpy(np.ascontiguousarray(u))
        return self.layer.rotary.turn(given, self.rotations[0], back=back).numpy()

    @cached_property
    def _differences(self) -> scipy.sparse.csr_array:
        return self._incidence(1.0, -1.0)

    @cached_property
    def _ends(self) -> scipy.sparse.csr_array:
        if self.layer.update_rule == "energy":
            return self._differences
        return self._incidence(1.0, 0.0)

    def _incidence(self, at_target: float, at_source: float) -> scipy.sparse.csr_array:
        edges = len(self.source)
        edge = np.arange(edges)
        numbers = np.repeat([at_target, at_source], edges)
        places = np.concatenate([edge, edge]), np.concatenate([self.target, self.source])
        shape = edges, self.shape[0]
        return scipy.sparse.csr_array(scipy.sparse.coo_array((numbers, places), shape=shape))
