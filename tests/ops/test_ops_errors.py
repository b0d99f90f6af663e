"""Bad input is a ValueError that names the argument and its value."""

import re
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch
from cases_ops import consensus_inputs, qkv, random
from torch import Tensor
from torch_geometric import EdgeIndex

import graphattn as ga

N, H, D = 6, 2, 3
GRAPH = ga.window_path_graph(N, 1)  # 10 edges, 3 offsets
Q, K, V = qkv(GRAPH)
U, _, A, B, NETWORK = consensus_inputs(GRAPH)
UNSORTED = GRAPH.edge_index.flip(1)
nan = float("nan")


def rbf(query=Q, key=K, value=V, graph=GRAPH, sigma=1.0, **arguments) -> Tensor:
    return ga.rbf_attention(query, key, value, graph, sigma, **arguments)


def dot(query=Q, key=K, value=V, graph=GRAPH, **arguments) -> Tensor:
    return ga.dot_product_attention(query, key, value, graph, **arguments)


def weights(query=Q, key=K, graph=GRAPH, **arguments) -> Tensor:
    return ga.attention_weights(query, key, graph, **arguments)


def step(**arguments) -> Tensor:
    right = {"target_hidden": A, "source_hidden": B, "edge_network": NETWORK, "step_size": 0.1}
    return ga.consensus_update(
        **{"state": U, "neighbor_state": U, "graph": GRAPH, **right, **arguments}
    )


def matrices(target_hidden=A, source_hidden=B, edge_network=NETWORK, graph=GRAPH) -> Tensor:
    return ga.consensus_edge_matrices(target_hidden, source_hidden, edge_network, graph)


class Case(NamedTuple):
    call: Callable[..., Tensor]
    arguments: dict
    words: tuple[str, ...]  # what the message must name: argument and value


def cases(call: Callable[..., Tensor], rows: list[tuple[dict, tuple[str, ...]]]) -> list[Case]:
    return [Case(call, arguments, words) for arguments, words in rows]


TENSORS = [
    ({"query": Q.numpy()}, ("query", "ndarray")),
    ({"query": Q.long()}, ("query", "int64")),
    ({"query": Q[:, 0]}, ("query", "[6, 3]")),
    ({"key": K.float()}, ("key", "float32", "float64")),
    ({"key": K[..., :2]}, ("key", "3 features", "2")),
    ({"key": K.expand(2, N, H, D)}, ("key", "[2]", "[]")),
    ({"query": random(7, H, D, seed=1)}, ("graph", "7", "6")),
    ({"graph": ga.window_path_graph(7, 1)}, ("graph", "7", "6")),
    ({"graph": ga.window_path_graph(N, 1).to("meta")}, ("graph", "meta", "cpu")),
    ({"graph": None}, ("graph", "NoneType")),
    ({"graph": GRAPH.to_mask()}, ("[2, E]", "[6, 6]")),
    ({"graph": GRAPH.edge_index.double()}, ("integers", "float64")),
    ({"graph": EdgeIndex(GRAPH.edge_index, sparse_size=(7, 7))}, ("7", "6")),
]

EDGE_LISTS = [
    ({"graph": torch.tensor([[0, 6], [1, 1]])}, ("6", "0 .. 5")),
    ({"graph": torch.tensor([[0, -1], [1, 1]])}, ("-1", "0 .. 5")),
    ({"graph": torch.tensor([[0, 0], [1, 1]])}, ("source 0", "target 1", "more than once")),
]

VALID = [
    ({"valid": torch.ones(N)}, ("valid", "bool", "float32")),
    ({"valid": torch.ones(5, dtype=torch.bool)}, ("valid", "[6]", "[5]")),
    ({"valid": torch.ones(2, N, dtype=torch.bool)}, ("valid", "[6]", "[2, 6]")),
    ({"valid": True}, ("valid", "bool")),
    ({"valid": (None, torch.ones(5, dtype=torch.bool))}, ("valid", "sources", "[6]", "[5]")),
    ({"valid": (None, None, None)}, ("valid", "pair")),
]

TOP_K = [
    ({"top_k": 0}, ("top_k", "0", ">= 1")),
    ({"top_k": -2}, ("top_k", "-2", ">= 1")),
    ({"top_k": 2.0}, ("top_k", "2.0", "integer")),
    ({"top_k": True}, ("top_k", "True", "integer")),
    ({"top_k": "2"}, ("top_k", "'2'", "integer")),
]

EDGE_BIAS = [
    ({"edge_bias": random(4, H, seed=1)}, ("edge_bias", "[10, 2]", "[3, 2]", "[4, 2]")),
    ({"edge_bias": random(10, 3, seed=1)}, ("edge_bias", "[10, 2]", "[10, 3]")),
    ({"edge_bias": random(10, seed=1)}, ("edge_bias", "[10, 2]", "[10]")),
    ({"edge_bias": random(2, 10, H, seed=1)}, ("edge_bias", "[10, 2]", "[2, 10, 2]")),
    ({"edge_bias": 0.5}, ("edge_bias", "[10, 2]", "float")),
    (
        {"edge_bias": random(3, H, seed=1), "graph": ga.longformer_graph(N, 1, [0])},
        ("edge_bias", "[24, 2]", "[3, 2]"),
    ),
    (
        {"edge_bias": random(10, H, seed=1), "graph": UNSORTED},
        ("edge_index", "sorted", "return_permutation"),
    ),
]

BACKEND = [
    ({"backend": "cuda"}, ("backend", "'cuda'", "'reference'")),
    ({"backend": None}, ("backend", "None", "'reference'")),
    ({"backend": "triton"}, ("backend", "'triton'")),
    ({"backend": "triton"}, ("backend", "'triton'")),
]

SIGMA = [
    ({"sigma": 0.0}, ("sigma", "0.0", "> 0")),
    ({"sigma": -1.0}, ("sigma", "-1.0", "> 0")),
    ({"sigma": nan}, ("sigma", "nan")),
    ({"sigma": float("inf")}, ("sigma", "inf", "finite")),
    ({"sigma": torch.tensor([1.0, 0.0])}, ("sigma", "0.0", "> 0")),
    ({"sigma": torch.tensor(-2.0)}, ("sigma", "-2.0", "> 0")),
    ({"sigma": torch.tensor([1.0, nan])}, ("sigma", "nan", "> 0")),
    ({"sigma": torch.ones(3)}, ("sigma", "[2]", "[3]")),
    ({"sigma": torch.ones(2, 1)}, ("sigma", "[2]", "[2, 1]")),
    ({"sigma": "wide"}, ("sigma", "wide")),
    ({"sigma": [1.0, 2.0]}, ("sigma", "1.0, 2.0")),
]

SCALE = [
    ({"scale": torch.ones(3)}, ("scale", "[2]", "[3]")),
    ({"scale": "big"}, ("scale", "big")),
    ({"scale": nan}, ("scale", "nan")),
    ({"scale": [1.0, 2.0]}, ("scale", "1.0, 2.0")),
]

EPS = [
    ({"eps": -1e-6}, ("eps", "-1e-06", ">= 0")),
    ({"eps": nan}, ("eps", "nan", ">= 0")),
    ({"eps": float("inf")}, ("eps", "inf", "finite")),
    ({"eps": "small"}, ("eps", "small")),
    ({"eps": None}, ("eps", "None")),
]

VALUE = [
    ({"key": random(5, H, D, seed=1), "value": random(5, H, D, seed=2)}, ("graph", "6", "5")),
    ({"value": V[:5]}, ("value", "[6, 2]", "[5, 2]")),
    ({"value": V[:, :1]}, ("value", "[6, 2]", "[6, 1]")),
    ({"value": V.half()}, ("value", "float16", "float64")),
    ({"value": V.to("meta")}, ("value", "meta", "cpu")),
    (
        {"query": random(N, 3, D, seed=1)},  # 2 key heads do not divide 3
        ("key", "heads", "3", "2"),
    ),
]

HIDDEN_3 = random(N, H, 3, seed=1)

CONSENSUS = [
    ({"state": U.numpy()}, ("state", "ndarray")),
    ({"state": U[:, 0]}, ("state", "[6, 3]")),
    ({"neighbor_state": U.float()}, ("neighbor_state", "float32", "float64")),
    ({"neighbor_state": U[..., :2]}, ("neighbor_state", "[2, 3]", "[2, 2]")),
    ({"target_hidden": A[:5]}, ("target_hidden", "6 tokens", "5")),
    ({"source_hidden": B[:5]}, ("source_hidden", "6 tokens", "5")),
    ({"source_hidden": B.expand(2, N, H, 4)}, ("source_hidden", "[2]", "[]")),
    ({"target_hidden": HIDDEN_3}, ("target_hidden", "4", "12", "[2, 3]")),
    ({"target_hidden": A[:, :1]}, ("target_hidden", "source_hidden", "[1, 4]", "[2, 4]")),
    ({"target_hidden": random(N, 3, 4, seed=1)}, ("target_hidden", "[3, 4]")),
    ({"edge_network": None}, ("edge_network", "None")),
    ({"edge_network": tuple(NETWORK)[:5]}, ("edge_network", "tuple")),
    (
        {"edge_network": NETWORK._replace(alpha=NETWORK.alpha[:1])},
        ("edge_network.alpha", "[2, 4]", "[1, 4]"),
    ),
    (
        {"edge_network": NETWORK._replace(beta_bias=NETWORK.beta)},
        ("edge_network.beta_bias", "[2]", "[2, 4]"),
    ),
    (
        {"edge_network": NETWORK._replace(shear_bias=NETWORK.shear_bias[:, :1])},
        ("edge_network.shear_bias", "[2, 2, 3]", "[2, 1, 3]"),
    ),
    (
        {"edge_network": NETWORK._replace(shear=NETWORK.shear[0])},
        ("edge_network", "shear", "[H, r, D, xi]", "[2, 3, 4]"),
    ),
    ({"edge_network": NETWORK._replace(alpha=None)}, ("edge_network.alpha", "None")),
    (
        {
            "edge_network": NETWORK._replace(
                shear=NETWORK.shear[:, :0], shear_bias=NETWORK.shear_bias[:, :0]
            )
        },
        ("edge_network", "rank", "0"),
    ),
    ({"graph": ga.window_path_graph(5, 1)}, ("graph", "5", "6")),
    ({"graph": None}, ("graph", "NoneType")),
    ({"update": "both"}, ("update", "'both'", "'energy'", "'target'")),
    ({"step_size": "learned"}, ("step_size", "'learned'", "'auto'")),
    ({"step_size": torch.ones(3)}, ("step_size", "[6, 2]", "[3]")),
    ({"step_size": torch.ones(4, N, H)}, ("step_size", "[6, 2]", "[4, 6, 2]")),
    ({"step_size": None}, ("step_size", "None")),
    ({"step_size": [0.1, 0.2]}, ("step_size", "0.1, 0.2")),
    ({"step_size": nan}, ("step_size", "nan")),
    ({"disagreement": (U, U[:3])}, ("disagreement", "v", "[6, 2, 3]", "[3, 2, 3]")),
    ({"disagreement": (U.float(), U)}, ("disagreement", "u", "float64", "float32")),
    ({"disagreement": (U, None)}, ("disagreement", "v", "None")),
    ({"disagreement": (U,)}, ("disagreement", "pair")),
    ({"disagreement": 3}, ("disagreement", "pair", "3")),
]

MATRICES = [
    ({"graph": UNSORTED}, ("edge_index", "sorted")),
    ({"graph": ga.window_path_graph(5, 1)}, ("graph", "5", "6")),
    ({"target_hidden": A.float()}, ("source_hidden", "float64", "float32")),
    ({"target_hidden": HIDDEN_3}, ("target_hidden", "[2, 3]")),
    ({"edge_network": 7}, ("edge_network", "int")),
]

ALL = [
    *cases(rbf, TENSORS + EDGE_LISTS + VALUE + VALID + TOP_K + EDGE_BIAS + BACKEND + SIGMA + EPS),
    *cases(rbf, [({"sigma": None}, ("sigma", "None"))]),
    *cases(dot, TENSORS + EDGE_LISTS + VALUE + VALID + TOP_K + EDGE_BIAS + BACKEND + SCALE),
    *cases(weights, TENSORS + VALID + TOP_K + EDGE_BIAS + SIGMA + SCALE + EPS),
    *cases(
        weights,
        [
            ({"graph": UNSORTED}, ("edge_index", "sorted")),
            ({"sigma": 1.0, "scale": 2.0}, ("sigma", "scale", "1.0", "2.0")),
        ],
    ),
    *cases(step, CONSENSUS + EDGE_LISTS + VALID + BACKEND),
    *cases(matrices, MATRICES),
]


def name(case: Case) -> str:
    return f"{case.call.__name__}({', '.join(case.arguments)}: {', '.join(case.words[1:])})"


@pytest.mark.parametrize("case", ALL, ids=name)
def test_bad_input_is_named(case: Case) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the words are matched below)
        case.call(**case.arguments)
    for word in case.words:  # whole words; "6" is not in "0.6", but "float32" is in "torch.float32"
        apart = r"(?<![\w.])" if word[0].isdigit() else r"(?<!\w)"
        assert re.search(rf"{apart}{re.escape(word)}(?!\w)", str(caught.value)), word


@pytest.mark.parametrize("call", [rbf, dot, step])
def test_one_mask_of_tokens_is_refused_on_a_bipartite_graph(call: Callable[..., Tensor]) -> None:
    graph = ga.bipartite_complete_graph(4, N)
    short = {"state": U[:4], "target_hidden": A[:4]} if call is step else {"query": Q[:4]}
    more = {"update": "target"} if call is step else {}
    with pytest.raises(ValueError, match=r"valid.*pair.*4.*6"):
        call(graph=graph, valid=torch.ones(N, dtype=torch.bool), **short, **more)


def test_use_backend_lasts_for_its_block_only() -> None:
    with ga.use_backend("reference"):
        assert torch.equal(rbf(), rbf(backend="reference"))
    with pytest.raises(ValueError, match=r"backend.*'cuda'"), ga.use_backend("cuda"):
        pass
    with pytest.raises(ValueError, match=r"backend.*'triton'"), ga.use_backend("triton"):
        rbf()
    with pytest.raises(RuntimeError, match="inside"), ga.use_backend("reference"):
        raise RuntimeError("inside")
    rbf()


def test_good_input_of_every_kind_passes() -> None:
    """The table above must not pass because everything is refused."""
    rbf(sigma=2, eps=1, top_k=3, valid=torch.ones(N, dtype=torch.bool))
    rbf(sigma=torch.ones(2, requires_grad=True), edge_bias=torch.zeros(3, H), graph=GRAPH)
    rbf(graph=EdgeIndex(GRAPH.edge_index, sparse_size=(6, 6)))
    rbf(graph=EdgeIndex(GRAPH.edge_index))
    dot(scale=-1, edge_bias=torch.zeros(10, H))
    weights(sigma=1.0), weights(scale=0.0), weights(graph=GRAPH.edge_index)
    step(step_size=1, edge_network=tuple(NETWORK), disagreement=(U, U))
    step(step_size="auto", update="target", valid=[None, None])
    matrices(graph=GRAPH.edge_index)


@pytest.mark.parametrize("number", [np.float32(2), np.int64(2), np.float64(2), 2])
def test_numbers_from_numpy_are_numbers(number: float) -> None:
    """A sweep over np.arange or a float32 array must not stop at the type of its numbers."""
    assert torch.equal(rbf(sigma=number, eps=number), rbf(sigma=2.0, eps=2.0))
    assert torch.equal(dot(scale=number), dot(scale=2.0))
    assert torch.equal(weights(sigma=number), weights(sigma=2.0))
    assert torch.equal(step(step_size=number), step(step_size=2.0))
    if not isinstance(number, np.floating):
        assert torch.equal(rbf(top_k=number), rbf(top_k=2))
