"""First and second derivatives of every operation in every input, against finite differences."""

from collections.abc import Callable

import pytest
import torch
from cases_ops import BACKENDS, consensus_inputs, qkv, random, random_mask
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import graphattn as ga


def small_graph() -> ga.TokenGraph:
    """Five tokens, directed, with a self loop, one token that sees nobody and one not seen."""
    mask = random_mask(5, 5, 0.5, seed=4)
    mask[2] = False
    mask[:, 4] = False
    mask[1, 1] = True
    return ga.from_mask(mask)


def check(operation: Callable[..., object], inputs: list[Tensor]) -> None:
    torch.manual_seed(0)  # the fast second-order check draws its directions
    for x in inputs:
        x.requires_grad_()
    assert gradcheck(operation, inputs)
    assert gradgradcheck(operation, inputs, fast_mode=True)


def finite(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Differences of -inf (rows without edges) are not numbers: 0 stands in for them."""
    return out, torch.where(lse.isfinite(), lse, 0)


def dropped() -> dict:
    return {"dropout": 0.4, "generator": torch.Generator().manual_seed(5)}


# Options of one call, for which score; sigma or scale, biases and sinks are differentiated too.
ATTENTION = {
    "plain": ("rbf dot", dict),
    "top-k": ("rbf dot", lambda: {"top_k": 2}),
    "eps": ("rbf", lambda: {"eps": 0.3}),
    "eps and top-k": ("rbf", lambda: {"eps": 0.3, "top_k": 1}),
    "valid": ("rbf dot", lambda: {"valid": torch.tensor([True, True, True, False, True])}),
    "softcap": ("dot", lambda: {"softcap": 0.6}),
    "dropout": ("rbf dot", dropped),
}


@pytest.mark.parametrize("kv_heads", [2, 1])
@pytest.mark.parametrize("score", ["rbf", "dot"])
@pytest.mark.parametrize("option", ATTENTION)
def test_attention_in_all_its_inputs(option: str, score: str, kv_heads: int) -> None:
    scores, options = ATTENTION[option]
    if score not in scores:
        pytest.skip(f"{option} is no option of this score")
    graph = small_graph()
    q, k, v = qkv(graph, kv_heads=kv_heads, features=2, value_features=1)
    bias, sink = random(graph.num_edges, 2, seed=8), random(2, seed=9)
    strength = torch.tensor([0.8, 1.7], dtype=torch.float64)
    operation = ga.rbf_attention if score == "rbf" else ga.dot_product_attention
    name = "sigma" if score == "rbf" else "scale"

    def attend(q: Tensor, k: Tensor, v: Tensor, strength: Tensor, bias: Tensor, sink: Tensor):
        more = {name: strength, "edge_bias": bias, "sink": sink, **options()}
        return finite(*operation(q, k, v, graph, return_lse=True, **more))

    check(attend, [q, k, v, strength, bias, sink])


def test_rbf_attention_of_tokens_with_themselves() -> None:
    """q = k = v, as in Gaussian kernel attention: distances of exactly 0 have gradients, too."""
    graph = ga.window_path_graph(4, 1, self_loops=True)
    x = random(4, 2, 2, seed=1)
    log_sigma = torch.zeros(2, dtype=torch.float64)
    check(lambda x, s: ga.rbf_attention(x, x, x, graph, s.exp(), eps=0.1), [x, log_sigma])


def test_a_table_of_offsets() -> None:
    graph = ga.window_path_graph(4, 1, self_loops=True)
    q, k, v = qkv(graph, features=2)
    check(
        lambda q, table: ga.rbf_attention(q, k, v, graph, 1.0, edge_bias=table),
        [q, random(3, 2, seed=1)],
    )


def test_attention_weights_in_all_they_depend_on() -> None:
    graph = small_graph()
    q, k, _ = qkv(graph, features=2)
    sigma, bias = torch.tensor([0.8, 1.7], dtype=torch.float64), random(graph.num_edges, 2, seed=8)
    check(
        lambda q, k, sigma, bias: ga.attention_weights(
            q, k, graph, sigma=sigma, top_k=2, eps=0.3, edge_bias=bias
        ),
        [q, k, sigma, bias],
    )


@pytest.mark.parametrize(
    ("step", "separate_trunks", "shared_network"),
    [
        ("tensor", False, False),
        ("tensor", False, True),
        ("tensor", True, False),
        ("tensor", True, True),
        ("auto", False, True),
        ("auto", True, False),
    ],
    ids=["xi, G = H", "xi, G = 1", "3 xi, G = H", "3 xi, G = 1", "auto, G = 1", "auto, 3 xi"],
)
@pytest.mark.parametrize("update", ["energy", "target"])
def test_consensus_in_states_hidden_vectors_all_six_parameters_and_step(
    update: str, step: str, separate_trunks: bool, shared_network: bool
) -> None:
    graph = small_graph()
    u, v, a, b, network = consensus_inputs(
        graph,
        features=2,
        hidden=2,
        shared_network=shared_network,
        separate_trunks=separate_trunks,
        neighbor=True,
    )
    eta = random(5, 2, seed=6).exp()
    disagreement = [random(5, 2, 2, seed=9), random(5, 2, 2, seed=10)]

    def operation(u: Tensor, a: Tensor, b: Tensor, eta: Tensor, u2, v2, *parameters: Tensor):
        return ga.consensus_update(
            u,
            v,
            a,
            b,
            ga.EdgeNetworkParameters(*parameters),
            graph,
            "auto" if step == "auto" else eta,
            update=update,
            disagreement=(u2, v2),
        )

    check(operation, [u, a, b, eta, *disagreement, *network])


@pytest.mark.parametrize("update", ["energy", "target"])
@pytest.mark.parametrize("valid", [None, torch.tensor([True, False, True, True, True])])
def test_consensus_without_disagreement_in_both_states(update: str, valid: Tensor | None) -> None:
    graph = small_graph()
    u, v, a, b, network = consensus_inputs(graph, features=2, hidden=2, neighbor=True)
    check(
        lambda u, v, a, eta: ga.consensus_update(
            u, v, a, b, network, graph, eta, update=update, valid=valid
        ),
        [u, v, a, torch.tensor(0.3, dtype=torch.float64)],
    )


@pytest.mark.parametrize("update", ["energy", "target"])
def test_consensus_where_the_neighbours_are_the_tokens_themselves(update: str) -> None:
    graph = small_graph()
    u, _, a, b, network = consensus_inputs(graph, batch=(2,), features=2, hidden=2)
    check(
        lambda u: ga.consensus_update(u, u, a, b, network, graph, "auto", update=update),
        [u],
    )


@pytest.mark.parametrize("shared_network", [False, True], ids=["G = H", "G = 1"])
@pytest.mark.parametrize("separate_trunks", [False, True], ids=["xi", "3 xi"])
def test_edge_matrices_in_hidden_vectors_and_all_six_parameters(
    separate_trunks: bool, shared_network: bool
) -> None:
    graph = ga.window_path_graph(3, 1)
    _, _, a, b, network = consensus_inputs(
        graph,
        features=2,
        hidden=2,
        shared_network=shared_network,
        separate_trunks=separate_trunks,
    )
    check(
        lambda a, b, *parameters: ga.consensus_edge_matrices(
            a, b, ga.EdgeNetworkParameters(*parameters), graph
        ),
        [a, b, *network],
    )


# Not by gradcheck, which copies its inputs apart.
@pytest.mark.parametrize("backend", ["auto", "structured", "reference"])
@pytest.mark.parametrize("lead", [(), (1,), (2, 1)])
def test_one_tensor_as_query_key_and_value_has_one_gradient(backend, lead):
    for graph in (ga.window_path_graph(6, 2), small_graph_of(6)):
        x = random(*lead, 6, 2, 4, seed=0).requires_grad_()
        loss = ga.rbf_attention(x, x, x, graph, 1.0, backend=backend).square().sum()
        once = torch.autograd.grad(loss, x, retain_graph=True)[0]
        again = torch.autograd.grad(loss, x, create_graph=True)[0]
        torch.testing.assert_close(again, once)


def small_graph_of(tokens: int) -> ga.TokenGraph:
    return ga.from_mask(random_mask(tokens, tokens, 0.6, seed=3))


@pytest.mark.parametrize("backend", ["auto", "structured"])
@pytest.mark.parametrize("rbf", [False, True])
def test_log_sums_of_equal_logits_have_their_second_derivative(backend, rbf):
    query, key = random(1, 1, 3, seed=0), random(1, 1, 3, seed=1).expand(2, 1, 3)
    graph = ga.bipartite_complete_graph(1, 2)

    def log_sum(k: Tensor) -> Tensor:
        if rbf:
            distance = (query - k).square().sum(-1)
            return (-distance / 2).logsumexp(0).sum()
        return ((query * k).sum(-1) / 3**0.5).logsumexp(0).sum()

    def returned(k: Tensor) -> Tensor:
        score = ga.GaussianKernel(1.0) if rbf else ga.DotProduct()
        options = {"return_lse": True, "backend": backend}
        return ga.score_attention(query, k, k.detach(), graph, score, **options)[1].sum()

    hessians = (torch.autograd.functional.hessian(f, key.clone()) for f in (returned, log_sum))
    torch.testing.assert_close(*hessians)


@pytest.mark.parametrize("backend", ["auto", "structured"])
@pytest.mark.parametrize("name", ["band", "list"])
def test_what_inference_mode_has_kept_serves_second_derivatives(backend, name):
    make = {"band": lambda: ga.window_path_graph(23, 2), "list": lambda: small_graph_of(23)}[name]
    graph, x = make(), random(1, 23, 2, 4, seed=0)
    with torch.inference_mode():
        ga.rbf_attention(x, x, x, graph, 1.0, backend=backend)
    for seen in (graph, make()):
        y = x.clone().requires_grad_()
        out = ga.rbf_attention(y, y * 1, y * 2, seen, 1.0, backend=backend)
        first = torch.autograd.grad(out.sum(), y, create_graph=True)[0]
        second = torch.autograd.grad(first.square().sum(), y)[0]
        assert second.isfinite().all()


@pytest.mark.parametrize("backend", ["auto", "structured", "reference"])
def test_no_samples_have_no_rows(backend):
    for graph in (ga.window_path_graph(6, 2), small_graph_of(6)):
        x = torch.zeros(0, 6, 2, 4, requires_grad=True)
        out = ga.rbf_attention(x, x, x, graph, 1.0, backend=backend)
        assert out.shape == x.shape
        assert torch.autograd.grad(out.sum(), x)[0].shape == x.shape


@pytest.mark.parametrize("name", ["knn", "list", "band"])
def test_what_torch_func_has_kept_serves_others(name):
    x = random(9, 2, 4, seed=0)
    make = {
        "knn": lambda: ga.knn_graph(x.flatten(1), 3),
        "list": lambda: small_graph_of(9),
        "band": lambda: ga.window_path_graph(9, 2),
    }[name]
    graph = make()

    def loss(z: Tensor) -> Tensor:
        return ga.rbf_attention(z, z, z, graph, 1.0).square().sum()

    inside = torch.func.grad(loss)(x)
    y = x.clone().requires_grad_()
    torch.testing.assert_close(torch.autograd.grad(loss(y), y)[0], inside)
    torch.testing.assert_close(torch.autograd.grad(loss(y), y, create_graph=True)[0], inside)


def no_edges(num_targets: int, num_sources: int) -> ga.TokenGraph:
    return ga.from_edge_index(torch.empty(2, 0, dtype=torch.int64), num_targets, num_sources)


EMPTY: dict[str, Callable[[], ga.TokenGraph]] = {
    "list": lambda: no_edges(4, 4),
    "rectangle": lambda: no_edges(3, 5),
    "no sources": lambda: no_edges(3, 0),
    "no tokens": lambda: no_edges(0, 0),
    "isolated atoms": lambda: ga.radius_graph(9.0 * torch.arange(4.0)[:, None], 1.0),
    "window of one token": lambda: ga.window_path_graph(1, 1),
    "one token without itself": lambda: ga.complete_graph(1, self_loops=False),
    "windows of one token": lambda: ga.batch([ga.window_path_graph(1, 1)] * 3),
    "mixed batch": lambda: ga.batch([no_edges(2, 2), ga.window_path_graph(1, 1)]),
    "beside edges": lambda: ga.batch([no_edges(2, 2), ga.complete_graph(3)]),
    "union": lambda: ga.union(no_edges(4, 4), no_edges(4, 4)),
}


class Product(ga.Score):
    def edges(self, query: Tensor, key: Tensor) -> Tensor:
        return (query * key).sum(-1)


Call = Callable[[dict[str, Tensor], ga.TokenGraph, str], Tensor | tuple[Tensor, Tensor]]


def attend(x: dict[str, Tensor], graph: ga.TokenGraph, backend: str, **more: object) -> Tensor:
    return ga.dot_product_attention(
        x["query"], x["key"], x["value"], graph, backend=backend, **more
    )


EMPTY_CALLS: dict[str, Call] = {
    "dot": lambda x, g, b: attend(x, g, b, return_lse=True),
    "top-k": lambda x, g, b: attend(x, g, b, top_k=1),
    "softcap": lambda x, g, b: attend(x, g, b, softcap=2.0),
    "bias": lambda x, g, b: attend(x, g, b, edge_bias=x["bias"]),
    "sink": lambda x, g, b: attend(x, g, b, sink=x["of_heads"]),
    "rbf": lambda x, g, b: ga.rbf_attention(
        x["query"], x["key"], x["value"], g, x["of_heads"].exp(), eps=0.1, backend=b
    ),
    "score": lambda x, g, b: ga.score_attention(
        x["query"], x["key"], x["value"], g, Product(), backend=b
    ),
    "linear": lambda x, g, b: ga.linear_attention(x["query"], x["key"], x["value"], g, backend=b),
}


@pytest.mark.parametrize("backend", [*BACKENDS[1:], "auto"])
@pytest.mark.parametrize("operation", EMPTY_CALLS)
@pytest.mark.parametrize("kind", EMPTY)
def test_without_edges_all_derivatives_are_there_and_zero(kind, operation, backend):
    """The reference gives the same; forces ask for the derivatives of zeros."""
    if operation in ("linear", "score") and backend == "native":
        pytest.skip("there is no compiled code for these")
    graph = EMPTY[kind]()
    q, k, v = qkv(graph, batch=(2,))
    given = {"query": q, "key": k, "value": v}
    if operation in ("rbf", "sink"):
        given["of_heads"] = random(2, seed=7)
    if operation == "bias":
        given["bias"] = random(graph.num_edges, 2, seed=8)
    found = {}
    for name in (backend, "reference"):
        leaves = {key: x.clone().requires_grad_() for key, x in given.items()}
        result = EMPTY_CALLS[operation](leaves, graph, name)
        outs = finite(*result) if isinstance(result, tuple) else (result,)
        loss = sum(((out - 1) ** 2).sum() for out in outs)
        first = torch.autograd.grad(loss, list(leaves.values()), create_graph=True)
        penalty = sum(x.square().sum() for x in first)
        second = torch.autograd.grad(penalty, list(leaves.values()), materialize_grads=True)
        found[name] = [*first, *second]
    torch.testing.assert_close(found[backend], found["reference"])
    if kind != "beside edges":
        assert not any(x.any() for x in found[backend])
