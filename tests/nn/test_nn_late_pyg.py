"""Layers do not wait for torch_geometric, and are its MessagePassing layers once it is imported."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch_geometric.nn import MessagePassing

from graphattn.nn.base.message_passing import MEMBERS, STATE

pytestmark = pytest.mark.every_case

# What happens before torch_geometric is imported, and what is true afterwards: one new process.
STORY = '''
import copy, pickle, sys
import torch
import graphattn as ga

graph = ga.window_path_graph(6, 1, self_loops=True)
x = torch.randn(6, 8)


def tell(name, held):
    print(name, bool(held), sep="\\t")


def no(*packages):
    return not set(packages) & set(sys.modules)


class Doubled(ga.nn.KrauseAttention):
    """The class of a user, which overrides a method of MessagePassing."""

    def aggregate(self, inputs, index, dim_size=None):
        return 2 * super().aggregate(inputs, index, dim_size=dim_size)


class Plain(ga.nn.KrauseAttention):
    pass


def made(kind=ga.nn.KrauseAttention, like=None, **options):
    layer = kind(8, 2, bias=False, **options)
    if like is not None:
        layer.load_state_dict(like.state_dict())
    return layer


# Before.
layer = made()
others = [kind(8, 2) for kind in (
    ga.nn.SelfConsensus, ga.nn.LinearAttention, ga.nn.DotProductAttention,
    ga.nn.GaussianKernelAttention,
)]
y = layer(x, graph)
y.sum().backward()
outputs = [other(x, graph) for other in others]
causal = ga.causal_window_graph(6, 3)
layer.step(x[:1], layer.init_cache(1, 3))
ga.models.CausalLM(5, 8, 2, 2, window=3)(torch.tensor([[1, 2, 3]]))
tell("no layer waits", no("torch_geometric", "transformers", "pandas", "torch._dynamo"))
torch.compile(layer, backend="eager", fullgraph=True)(x, graph)
tell("nor a compiled one", no("torch_geometric"))
copied, pickled = copy.deepcopy(layer), pickle.dumps(layer)
explained = made(like=layer)
replaced, classwide = made(like=layer), made(Plain, like=layer)
assert torch.equal(classwide(x, graph), y)
tell("nor copies", no("torch_geometric"))
replaced.aggregate = lambda inputs, index, **rest: torch.zeros(6, 2, 4)
zeros = replaced(x, graph)
tell("a method replaced in a layer runs", (zeros == 0).all())
tell("and imports torch_geometric", not no("torch_geometric"))

# After.
from torch_geometric.nn import MessagePassing

everyone = [layer, copied, pickle.loads(pickled), explained, replaced, classwide, *others]
tell("all are MessagePassing", all(isinstance(each, MessagePassing) for each in everyone))
tell("classes are, too", issubclass(ga.nn.SelfConsensus, MessagePassing))
tell("plain calls stay fast", not layer.uses_propagate() and torch.equal(layer(x, graph), y))
with ga.use_backend("reference"):
    close = [torch.allclose(each(x, graph), y, atol=1e-5) for each in everyone[:3]]
    close += [torch.allclose(o(x, graph), out, atol=1e-5) for o, out in zip(others, outputs)]
tell("messages give the same", all(close))
shapes = []
handle = layer.register_message_forward_hook(lambda m, i, out: shapes.append(out.shape))
layer(x, graph)
handle.remove()
tell("hooks see messages", shapes == [(graph.num_edges, 2, 4)])
explained._edge_mask, explained._apply_sigmoid = torch.zeros(graph.num_edges), False
explained.explain = True
tell("explainers mask edges", (explained(x, graph) == 0).all())
assert torch.equal(classwide(x, graph), y)



def aggregate(self, inputs, index, dim_size=None):
    return torch.zeros(6, 2, 4)


Plain.aggregate = aggregate
tell("a method replaced in a class runs", (classwide(x, graph) == 0).all())
tell("own classes", torch.allclose(made(Doubled, like=layer)(x, graph), 2 * y, atol=1e-5))
again = pickle.loads(pickle.dumps(copy.deepcopy(layer)))
with ga.use_backend("reference"):
    tell("complete layers are copied", torch.allclose(again(x, graph), y, atol=1e-5))
tell("state dicts have weights alone", set(layer.state_dict()) == set(made().state_dict()))
'''


def test_a_layer_is_a_message_passing_layer_as_soon_as_there_is_such_a_thing(tmp_path: Path):
    run = subprocess.run(
        [sys.executable, "-c", STORY], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert run.returncode == 0, run.stderr
    facts = dict(line.split("\t") for line in run.stdout.splitlines())
    assert len(facts) == 15
    assert not [name for name, held in facts.items() if held != "True"]


def test_members_of_message_passing_are_known():
    """A member that is missing in the list would be missing in layers before the import."""
    here = {
        name for name in set(vars(MessagePassing)) - set(dir(torch.nn.Module)) if name[0] != "_"
    }
    assert here - {"reset_parameters"} == set(MEMBERS)
    layer = MessagePassing(aggr="add", node_dim=-3)
    stored = {*vars(layer), *layer._modules} - set(vars(torch.nn.Module()))
    assert stored == set(STATE)
