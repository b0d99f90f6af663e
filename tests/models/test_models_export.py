"""torch.export, as docs/export.md promises: models and what builds its graph inside, any length."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, export, load, save

import graphattn as ga


class Within(nn.Module):
    """A layer and the graph that it is applied to."""

    def __init__(self, layer: nn.Module, build: Callable[[Any], ga.TokenGraph]) -> None:
        super().__init__()
        self.layer, self.build = layer, build

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x, self.build(x.shape[-2]))
        return out


@pytest.mark.long
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("mixer", ["dot", "mix"])
def test_an_encoder_is_exported_once_for_all_lengths_and_saved(mixer: Any, strict: bool) -> None:
    torch.manual_seed(0)
    model = ga.models.SequenceEncoder(9, 8, 2, 2, mixer=mixer, edge_hidden=4).eval()
    dynamic = ({0: Dim("batch", max=64), 1: Dim("num_tokens", min=4, max=4096)},)
    exported = export(model, (torch.randint(9, (2, 12)),), dynamic_shapes=dynamic, strict=strict)
    file = io.BytesIO()
    save(exported, file)
    file.seek(0)
    again = load(file).module()
    for batch, n in ((2, 4), (1, 12), (5, 33), (3, 200)):
        tokens = torch.randint(9, (batch, n))
        torch.testing.assert_close(again(tokens), model(tokens), rtol=1e-5, atol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize(
    ("layer", "build"),
    [
        (lambda: ga.nn.KrauseAttention(8, 2, top_k=3), lambda n: ga.causal_window_graph(n, 4)),
        (lambda: ga.nn.GaussianKernelAttention(8, 2, rope=True), ga.complete_graph),
        (lambda: ga.nn.SelfConsensus(8, 2, edge_hidden=4), lambda n: ga.window_path_graph(n, 2)),
    ],
    ids=["krause", "gka", "consensus"],
)
def test_a_layer_that_builds_its_graph_too(layer: Any, build: Any) -> None:
    torch.manual_seed(0)
    module, x = Within(layer(), build).eval(), torch.randn(2, 12, 8)
    exported = export(module, (x,), dynamic_shapes=({1: Dim("n", min=4, max=4096)},)).module()
    for n in (4, 12, 50):
        x = torch.randn(2, n, 8)
        torch.testing.assert_close(exported(x), module(x), rtol=1e-5, atol=1e-6)


def test_what_cannot_be_exported_is_an_input_that_is_a_graph() -> None:
    layer, x = ga.nn.DotProductAttention(8, 2).eval(), torch.randn(2, 12, 8)
    graph = ga.window_path_graph(12, 2)
    with pytest.raises(Exception, match="TokenGraph"):
        export(layer, (x, graph))
    with pytest.raises(Exception, match=r"[Dd]ata-dependent"):
        export(layer, (x, graph.edge_index))
