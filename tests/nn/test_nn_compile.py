"""torch.compile keeps every layer whole, and compiles it once for all lengths and windows."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import graphattn as ga
from graphattn.kernels.cpu import library

FAST = ["structured", "native"] if library.why_not() is None else ["structured"]
LAYERS = {
    "GaussianKernelAttention": lambda: ga.nn.GaussianKernelAttention(8, 2, rope=True, eps=0.1),
    "KrauseAttention": lambda: ga.nn.KrauseAttention(8, 2, top_k=3, kv_heads=1),
    "DotProductAttention": lambda: ga.nn.DotProductAttention(8, 2, rope=True),
    "DotProductAttention, sink, softcap": lambda: ga.nn.DotProductAttention(
        8, 2, sink=True, softcap=2.0
    ),
    "DotProductAttention, in place": lambda: ga.nn.DotProductAttention(8, 2, scaling="sq_inplace"),
    "LinearAttention": lambda: ga.nn.LinearAttention(8, 2, rope=True),
    "SelfConsensus, target": lambda: ga.nn.SelfConsensus(
        8, 2, rank=2, edge_hidden=4, update="target", step_size="auto"
    ),
    "SelfConsensus": lambda: ga.nn.SelfConsensus(8, 2, rank=2, edge_hidden=4, rope=True),
}
GRAPHS = {
    "causal window": lambda n: ga.causal_window_graph(n, n // 4),
    "path": lambda n: ga.window_path_graph(n, 2),
    "complete": ga.complete_graph,
    "cycle": lambda n: ga.window_cycle_graph(n, 2),
    "shifted grid": lambda n: ga.neighborhood_graph((3, n), (3, 4), dilation=(1, 2)),
    "edge list": lambda n: ga.from_edge_index(ga.window_path_graph(n, 3).edge_index, n),
    "batch": lambda n: ga.batch([ga.window_path_graph(n, 2), ga.longformer_graph(9, 1, (0,))]),
}


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.long
@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("name", LAYERS)
def test_two_compilations_serve_all_lengths(name: str, graph: str) -> None:
    """One for the first length, one for any: what forward and backward give stays the same."""
    if graph == "causal window" and name == "SelfConsensus":
        pytest.skip("update='energy' on a causal graph is refused")
    torch.manual_seed(0)
    layer = LAYERS[name]()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for n in (12, 17, 25, 40, 64):
        tokens = GRAPHS[graph](n)
        x = torch.randn(2, tokens.num_targets, 8, requires_grad=True)
        mine, theirs = compiled(x, tokens), layer(x, tokens)
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
        leaves = [x, *layer.parameters()]
        d_out = torch.randn_like(theirs)
        for a, b in zip(
            torch.autograd.grad(mine, leaves, d_out),
            torch.autograd.grad(theirs, leaves, d_out),
            strict=True,
        ):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert counter.frame_count <= 2


def test_padding_and_autocast_compile_too() -> None:
    layer = ga.nn.KrauseAttention(8, 2, top_k=3)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x, graph = torch.randn(2, 30, 8), ga.causal_window_graph(30, 6)
    valid = torch.rand(2, 30) < 0.8
    torch.testing.assert_close(compiled(x, graph, valid=valid), layer(x, graph, valid=valid))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mine, theirs = compiled(x, graph), layer(x, graph)
    assert mine.dtype == theirs.dtype == torch.bfloat16
    torch.testing.assert_close(mine, theirs)


@pytest.mark.long
def test_a_chosen_backend_is_compiled_as_chosen() -> None:
    """The override is part of what is compiled for: inside the block another version runs."""
    x, graph = torch.randn(6, 8), ga.window_path_graph(6, 1, self_loops=True)
    layer = ga.nn.DotProductAttention(8, 2)
    compiled = torch.compile(layer, backend="aot_eager")
    expected = layer(x, graph)
    torch.testing.assert_close(compiled(x, graph), expected)
    with ga.use_backend("reference"):
        torch.testing.assert_close(compiled(x, graph), expected)
    torch.testing.assert_close(compiled(x, graph), expected)


@pytest.mark.long
@pytest.mark.parametrize("score", ["rbf", "dot"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("graph", ["causal window", "edge list", "batch"])
def test_the_operator_keeps_the_promises_of_torch_library(graph: str, bias: bool, score: str):
    tokens = GRAPHS[graph](12)
    N = tokens.num_targets
    q, k, v = (torch.randn(2, N, 2, 3, requires_grad=True) for _ in range(3))
    scale = torch.tensor([0.5, 1.0], requires_grad=True)
    table = torch.randn(tokens.num_edges, 2, requires_grad=True) if bias else None
    edges = tokens.edge_index if tokens.structure is None else None
    valid, seed = torch.rand(N) < 0.8, torch.tensor([7])
    options = (score, 3, False, 5.0 if score == "dot" else None, 0.3, 1, "structured", False)
    torch.library.opcheck(
        torch.ops.graphattn.attention,
        (q, k, v, scale, table, valid, None, tokens.code, edges, seed, *options),
    )


@pytest.mark.parametrize("backend", ["structured", "native"])
def test_the_operator_saves_as_many_numbers_as_its_argument_says(backend: str) -> None:
    """Torch finds compiled graphs again on disk, with an earlier version's shapes in them."""
    if backend == "native" and (reason := library.why_not()) is not None:
        pytest.skip(reason)
    tokens = ga.causal_window_graph(9, 4)
    q, k, v = (torch.randn(2, 9, 2, 3) for _ in range(3))
    inputs = (q, k, v, torch.ones(2), None, None, None, tokens.code, None, None)
    gradients = {}
    for room in (4, 7):
        options = ("rbf", 3, False, None, 0.0, room, backend, False)
        results = torch.ops.graphattn.attention(*inputs, *options)
        assert results[2].shape == (2, 9, 2 * room)
        upstream = [torch.ones_like(x) for x in results[:2]]
        gradients[room] = torch.ops.graphattn.attention_backward(
            *inputs, *options, list(results), upstream, [True] * 4 + [False]
        )
    assert all(torch.equal(a, b) for a, b in zip(gradients[4], gradients[7], strict=True))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = ga.rbf_attention(*leaves, tokens, 1.0, top_k=3, return_lse=True, backend="reference")
    expected = torch.autograd.grad(out.sum() + lse.sum(), leaves)
    for mine, theirs in zip(gradients[4], expected, strict=False):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.long
@pytest.mark.parametrize("degrees", [False, True])
@pytest.mark.parametrize("graph", ["path", "edge list"])
@pytest.mark.parametrize("backend", FAST)
def test_the_sums_of_consensus_do_too(backend: str, graph: str, degrees: bool) -> None:
    tokens = GRAPHS[graph](7)
    edges = tokens.edge_index if tokens.structure is None else None
    hidden, state = [(2, 7, 2, 3)] * 2, [(2, 7, 2, 4)] * 2
    network = [(2, 3), (2,), (2, 3), (2,), (2, 2, 4, 3), (2, 2, 4)]
    tensors = [torch.randn(s, requires_grad=True) for s in (*hidden, *state, *network)]
    valid = torch.rand(2, 7) < 0.8
    torch.library.opcheck(
        torch.ops.graphattn.consensus,
        (
            *(tensors[0], None, None, tensors[1], None, None, *tensors[2:], None, None),
            *(valid, valid, tokens.code, edges, True, degrees, backend, False),
        ),
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERS)
def test_inductor_gives_the_same(name: str) -> None:
    layer, graph = LAYERS[name](), ga.window_path_graph(40, 3, self_loops=True)
    compiled = torch.compile(layer, fullgraph=True)
    x = torch.randn(2, 40, 8)
    torch.testing.assert_close(compiled(x, graph), layer(x, graph), rtol=1e-5, atol=1e-6)
