"""KeOps in `graphattn bench`: the call is right by KeOps' own rules, installed or not."""

from __future__ import annotations

import importlib.util
import types

import pytest
import torch
from torch import Tensor

import graphattn as ga
from graphattn.bench.cases.inputs import AttentionInputs, MissingError, attention_inputs
from graphattn.bench.contenders import peers as contenders
from graphattn.bench.measuring import correctness as gate

CPU = torch.device("cpu")


class DenseLazyTensor:
    """A symbolic tensor [*batch, N, M, D] by the rules of KeOps' manual, held in full.

    `ndim` is D, a vector's number of entries, and reductions over N or M are asked for by the
    number of batch dimensions and 0 or 1.
    """

    def __init__(self, x: Tensor) -> None:
        assert x.is_contiguous()
        assert 1 in x.shape[-3:-1], "a variable has no entry per pair"
        self.x = x

    @classmethod
    def of(cls, x: Tensor) -> DenseLazyTensor:
        made = cls.__new__(cls)
        made.x = x
        return made

    @property
    def ndim(self) -> int:
        return self.x.shape[-1]

    def __sub__(self, other: DenseLazyTensor) -> DenseLazyTensor:
        return self.of(self.x - other.x)

    def __neg__(self) -> DenseLazyTensor:
        return self.of(-self.x)

    def __truediv__(self, number: float) -> DenseLazyTensor:
        return self.of(self.x / number)

    def square(self) -> DenseLazyTensor:
        return self.of(self.x.square())

    def sum(self, axis: int) -> DenseLazyTensor:
        assert axis in (-1, self.x.dim() - 1), "other sums are reductions"
        return self.of(self.x.sum(-1, keepdim=True))

    def sumsoftmaxweight(
        self, weight: DenseLazyTensor, axis: int | None = None, dim: int | None = None
    ) -> Tensor:
        axis = dim if axis is None else axis
        batch = self.x.dim() - 3
        if axis is None or axis - batch not in (0, 1):
            raise ValueError(
                "Reductions must be called with 'axis' (or 'dim') equal to the number of batch "
                "dimensions + 0 or 1."
            )
        assert self.ndim == 1
        return (self.x.softmax(axis) * weight.x).sum(axis)


def inputs_of(batch: int | None, tokens: int = 20) -> AttentionInputs:
    return attention_inputs(ga.complete_graph(tokens), 3, 5, CPU, torch.float32, batch=batch)


@pytest.mark.parametrize("batch", [None, 2], ids=["one sequence", "a batch"])
def test_the_call_is_one_that_keops_takes(batch, monkeypatch):
    """KeOps' rules about axes, written down here: they hold where it is not installed."""
    module = types.SimpleNamespace(LazyTensor=DenseLazyTensor)
    monkeypatch.setattr(contenders, "installed", lambda name: module)
    truth = gate.truth_of(inputs_of(batch), backward=True)
    assert max(truth.errors_of(contenders.keops)) < 1e-5


@pytest.mark.parametrize("batch", [None, 2], ids=["one sequence", "a batch"])
def test_keops_itself_agrees(batch):
    pytest.importorskip("pykeops.torch", reason="KeOps is an optional peer: pip install pykeops")
    truth = gate.truth_of(inputs_of(batch), backward=True)
    assert max(truth.errors_of(contenders.keops)) < 1e-5


@pytest.mark.parametrize("axis", [0, 3])
def test_the_stand_in_refuses_the_axes_that_keops_refuses(axis):
    lazy = DenseLazyTensor(torch.ones(2, 4, 1, 1))
    with pytest.raises(ValueError, match="number of batch dimensions"):
        lazy.sumsoftmaxweight(lazy, axis=axis)


def test_without_keops_it_is_missing(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingError, match="pykeops is not installed"):
        contenders.keops(inputs_of(None))
