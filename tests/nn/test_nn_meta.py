"""Layers and models on the meta device give shapes and dtypes, and compute nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from nn_by_hand import DIM, ONE_OF_EACH, Case, graph_of, run, tokens_of

import graphattn as ga


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("case", ONE_OF_EACH, ids=str)
def test_a_layer_gives_the_shapes_of_its_output_and_gradients(
    case: Case, batched: bool, padded: bool
) -> None:
    graphs = [graph_of(case)]
    if case.context_width is None:
        graphs = [ga.window_path_graph(9, 2), ga.longformer_graph(9, 1, [0])]
        graphs += [ga.batch([ga.complete_graph(4), ga.window_path_graph(5, 1)]), graph_of(case)]
    with torch.device("meta"):
        layer = case.make(dtype=torch.float32)
    for graph in graphs:
        real = tokens_of(case, graph, (2,) if batched else (), dtype=torch.float32)
        tokens = tuple(x.to("meta").requires_grad_() for x in real)
        masks = [torch.ones(n, dtype=torch.bool, device="meta") for n in (9, graph.num_sources)]
        keywords: dict[str, Any] = {"valid": tuple(masks)} if padded else {}
        out = run(layer, tokens, graph.to("meta"), **keywords)
        assert (out.shape, out.dtype, out.device.type) == (real[0].shape, torch.float32, "meta")
        out.sum().backward()
        assert all(x.grad is not None and x.grad.shape == x.shape for x in tokens)


@pytest.mark.parametrize("mixer", ["dot", "consensus", "mix"])
def test_a_model_does_too(mixer: Any) -> None:
    with torch.device("meta"):
        model = ga.models.SequenceEncoder(9, DIM, 2, 4, mixer=mixer)
        out = model(torch.zeros(2, 12, dtype=torch.int64))
    assert (out.shape, out.device.type) == ((2, 12, 9), "meta")
