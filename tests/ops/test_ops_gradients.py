"""First and second derivatives of every operation in every input, against finite differences."""

from collections.abc import Callable

import pytest
import torch
from cases_ops import consensus_inputs, qkv, random, random_mask
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


ATTENTION = {
    "plain": {},
    "top-k": {"top_k": 2},
    "eps": {"eps": 0.3},
    "eps and top-k": {"eps": 0.3, "top_k": 1},
    "valid": {"valid": torch.tensor([True, True, True, False, True])},
}


@pytest.mark.parametrize("kv_heads", [2, 1])
@pytest.mark.parametrize("option", ATTENTION)
def test_rbf_attention_in_query_key_value_sigma_and_edge_bias(option: str, kv_heads: int) -> None:
    graph = small_graph()
    q, k, v = qkv(graph, kv_heads=kv_heads, features=2, value_features=1)
    bias = random(graph.num_edges, 2, seed=8)
    sigma = torch.tensor([0.8, 1.7], dtype=torch.float64)
    check(
        lambda q, k, v, sigma, bias: finite(
            *ga.rbf_attention(
                q, k, v, graph, sigma, edge_bias=bias, return_lse=True, **ATTENTION[option]
            )
        ),
        [q, k, v, sigma, bias],
    )


@pytest.mark.parametrize("kv_heads", [2, 1])
@pytest.mark.parametrize("option", ["plain", "top-k", "valid"])
def test_dot_product_attention_in_query_key_value_scale_and_edge_bias(
    option: str, kv_heads: int
) -> None:
    graph = small_graph()
    q, k, v = qkv(graph, kv_heads=kv_heads, features=2, value_features=1)
    bias = random(graph.num_edges, 2, seed=8)
    scale = torch.tensor([0.8, -1.7], dtype=torch.float64)
    check(
        lambda q, k, v, scale, bias: finite(
            *ga.dot_product_attention(
                q,
                k,
                v,
                graph,
                scale=scale,
                edge_bias=bias,
                return_lse=True,
                **ATTENTION[option],
            )
        ),
        [q, k, v, scale, bias],
    )


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
