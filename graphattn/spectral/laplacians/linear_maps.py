"""The norm and the spectral radius of a linear map that is given as a function."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigs, eigsh
from torch import Tensor

from graphattn.spectral.matrix_weighted.block_laplacian import Array

DENSE = 600  # rows up to which the map is written as a dense matrix
Map = Callable[[Tensor], Tensor]


def operator_of(step: Map, shape: tuple[int, ...]) -> LinearOperator:
    """Make an operator of a linear map of float64 tensors; autograd computes its transpose."""

    def forward(u: Tensor) -> Tensor:
        with torch.no_grad():
            return step(u)

    return _operator(shape, forward, _transposed(step, torch.zeros(shape, dtype=torch.float64)))


def derivative_of(function: Map, x: Tensor) -> LinearOperator:
    """Make an operator of the derivative of a function [*] -> [*] at `x`, by autograd."""

    def forward(u: Tensor) -> Tensor:
        with torch.enable_grad():
            given = x.detach().clone().requires_grad_()
            weight = torch.zeros_like(x).requires_grad_()
            (of_weight,) = torch.autograd.grad(
                function(given), given, weight, create_graph=True, materialize_grads=True
            )
            (product,) = torch.autograd.grad(of_weight, weight, u, materialize_grads=True)
        return product

    return _operator(x.shape, forward, _transposed(function, x))


def _transposed(function: Map, x: Tensor) -> Map:
    """The product of a vector with the derivative of a function at `x`, from the left."""

    def back(v: Tensor) -> Tensor:
        with torch.enable_grad():
            given = x.detach().clone().requires_grad_()
            (product,) = torch.autograd.grad(function(given), given, v, materialize_grads=True)
        return product

    return back


def _operator(shape: tuple[int, ...], forward: Map, back: Map) -> LinearOperator:
    """Make an operator of flat arrays from maps of tensors."""

    def flat(apply: Map) -> Callable[[Array], Array]:
        return lambda u: apply(torch.from_numpy(np.array(u)).view(shape)).flatten().numpy()

    size = int(np.prod(shape))
    return LinearOperator((size, size), matvec=flat(forward), rmatvec=flat(back), dtype=np.float64)


def spectral_radius(T: LinearOperator) -> float:
    """Compute the largest |eigenvalue|; NaN if Arnoldi's iteration finds none."""
    if T.shape[0] <= DENSE:
        return float(np.abs(np.linalg.eigvals(_dense(T))).max(initial=0.0))
    try:
        eigenvalues = eigs(T, k=1, which="LM", tol=1e-6, v0=_start(T), return_eigenvectors=False)
    except ArpackNoConvergence as error:
        eigenvalues = error.eigenvalues if len(error.eigenvalues) else np.array([np.nan])
    return float(np.abs(eigenvalues).max())


def largest_singular_value(T: LinearOperator) -> float:
    """Compute the norm of the map."""
    if T.shape[0] <= DENSE:
        return float(np.linalg.norm(_dense(T), 2)) if T.shape[0] else 0.0
    square = LinearOperator(T.shape, matvec=lambda u: T.rmatvec(T.matvec(u)), dtype=np.float64)
    squares = eigsh(square, k=1, which="LA", tol=1e-9, v0=_start(T), return_eigenvectors=False)
    return float(np.sqrt(squares[0]))


def _dense(T: LinearOperator) -> Array:
    columns = [T.matvec(column) for column in np.eye(T.shape[0])]
    return np.stack(columns, axis=1) if columns else np.zeros(T.shape)


def _start(T: LinearOperator) -> Array:
    return np.random.default_rng(0).standard_normal(T.shape[0])
