"""Compiled code runs where its tensors lie, whatever torch's default device is meanwhile.

Models are made within ``with torch.device("meta")``, and on machines with a GPU people set it as
the default device. A wrong address ends the process, so all of this runs in one of its own.
"""

import subprocess
import sys

import pytest

from graphattn.kernels.cpu import library

if library.why_not() is not None:
    pytest.skip(str(library.why_not()), allow_module_level=True)

CODE = """
import pickle
import torch
import graphattn as ga

torch.manual_seed(0)
N = 300
points, wide = torch.randn(N, 3), torch.randn(N, 40)
pairs = torch.stack([torch.arange(N).flip(0), torch.arange(N)])
x, other = torch.randn(2, N, 16), torch.randn(2, N, 16)
layers = {
    "turned": ga.nn.DotProductAttention(16, 4, rope=True),
    "krause": ga.nn.KrauseAttention(16, 4, top_k=3),
    "linear": ga.nn.LinearAttention(16, 4),
    "consensus": ga.nn.SelfConsensus(16, 4),
}

def results():
    graphs = {
        "list": ga.from_edge_index(pairs, N),
        "window": ga.window_path_graph(N, 3),
        "batch": ga.batch([ga.complete_graph(100), ga.window_path_graph(N - 100, 2)]),
        "table": ga.knn_graph(points, k=4),
    }
    computed = {"far": ga.knn_graph(wide, k=4).edge_index}
    computed["near"] = ga.radius_graph(points, 0.5).edge_index
    long = ga.window_path_graph(100_000, 3)
    several = ga.batch([long, ga.complete_graph(3)])
    computed["long"], computed["several"] = long.edge_index, several.edge_index
    computed["star"] = ga.longformer_graph(100_000, 2, global_tokens=[0, 7]).edge_index
    for kind, graph in graphs.items():
        computed[kind] = pickle.loads(pickle.dumps(graph)).edge_index
        computed[kind, "back"] = graph.transpose().edge_index
        for name, layer in layers.items():
            for options in ({}, {"valid": valid}):
                leaf = x.clone().requires_grad_()
                out = layer(leaf, graph, **options)
                wanted = [leaf, *layer.parameters()]
                gradients = torch.autograd.grad(out, wanted, other, allow_unused=True)
                computed[kind, name, len(options)] = out, *gradients
    return computed

valid = torch.ones(N, dtype=torch.bool)
with torch.device("meta"):
    there = results()
here = results()
torch.testing.assert_close(there, here, rtol=0, atol=0)
print(len(here))
"""


@pytest.mark.long
def test_another_default_device_changes_nothing():
    run = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) == 5 + 4 * (2 + 4 * 2)
