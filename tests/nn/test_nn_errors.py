"""Bad input gets a ValueError that names the argument and, where there is one, its value."""

import re

import pytest
import torch

import graphattn as ga

nn = ga.nn
X, GRAPH = torch.randn(2, 9, 16), ga.window_path_graph(9, 2, self_loops=True)
CONTEXT, BIPARTITE = torch.randn(2, 6, 16), ga.bipartite_complete_graph(9, 6)
ALL = ("DotProductAttention", "KrauseAttention", "GaussianKernelAttention",
       "SelfConsensus", "CrossConsensus")  # fmt: skip
CONSENSUS = ALL[3:]
GROUPED = ALL[:2]
DISTANCE = ALL[1:3]


def refused(name: str, *words: str):
    """`name` stands in the message as a word, and so do the other words."""
    ahead = "".join(rf"(?=.*{re.escape(word)})" for word in words)
    return pytest.raises(ValueError, match=rf"(?s){ahead}.*\b{name}\b")


# (layers, constructor arguments, the argument that must be named, what else must be named)
CONSTRUCTORS = [
    (ALL, {"dim": 16, "heads": 3}, "heads", "3"),
    (ALL, {"dim": 16, "heads": 0}, "heads", "0"),
    (ALL, {"dim": 16, "heads": 32}, "heads", "32"),
    (ALL, {"dim": 16, "heads": 4.0}, "heads", "4.0"),
    (ALL, {"dim": -16, "heads": 4}, "dim", "-16"),
    (ALL, {"dim": "16", "heads": 4}, "dim", "'16'"),
    (ALL, {"rope": "yes"}, "rope", "'yes'"),
    (ALL, {"rope": None}, "rope", "None"),
    (ALL, {"rope": nn.RotaryEmbedding(8)}, "rope", "RotaryEmbedding(8"),
    (ALL[:3], {"rope": "isometric"}, "rope", "'isometric'"),
    (ALL, {"backend": "fast"}, "backend", "'fast'"),
    (GROUPED, {"kv_heads": 3}, "kv_heads", "3"),
    (GROUPED, {"kv_heads": 8}, "kv_heads", "8"),
    (GROUPED, {"kv_heads": 0}, "kv_heads", "0"),
    (GROUPED, {"top_k": 0}, "top_k", "0"),
    (GROUPED, {"top_k": 2.5}, "top_k", "2.5"),
    (ALL[:1], {"value_projection": False, "kv_heads": 2}, "kv_heads", "2"),
    (ALL[:1], {"value_projection": False, "kv_heads": 4}, "kv_heads", "4"),
    (ALL[:1], {"value_projection": False, "context_dim": 8}, "context_dim", "8"),
    (ALL[:1], {"context_dim": 0}, "context_dim", "0"),
    (ALL[:1], {"qk_norm": "rms"}, "qk_norm", "'rms'"),
    (ALL[:1], {"scaling": "sq"}, "scaling", "'sq'"),
    (ALL[:1], {"scaling": None}, "scaling", "None"),
    (ALL[:1], {"scaling": "sq_inplace", "qk_norm": True}, "scaling", "'sq_inplace'"),
    (ALL[2:3], {"top_k": 0}, "top_k", "0"),
    (DISTANCE, {"init_sigma": 0.0}, "init_sigma", "0"),
    (DISTANCE, {"init_sigma": -1.0}, "init_sigma", "-1"),
    (DISTANCE, {"init_sigma": float("nan")}, "init_sigma", "nan"),
    (DISTANCE, {"init_sigma": "auto"}, "init_sigma", "'auto'"),
    (ALL[2:3], {"eps": -0.1}, "eps", "-0.1"),
    (ALL[2:3], {"eps": None}, "eps", "None"),
    (CONSENSUS, {"rank": 0}, "rank", "0"),
    (CONSENSUS, {"edge_hidden": 0}, "edge_hidden", "0"),
    (CONSENSUS, {"edge_input": "token"}, "edge_input", "'token'"),
    (CONSENSUS, {"edge_networks": "token"}, "edge_networks", "'token'"),
    (CONSENSUS, {"edge_networks": "shared"}, "edge_networks", "edge_input='full'"),
    (CONSENSUS, {"trunk": "both"}, "trunk", "'both'"),
    (CONSENSUS, {"step_size": "fast"}, "step_size", "'fast'"),
    (CONSENSUS, {"step_size": 0}, "step_size", "0"),
    (CONSENSUS, {"step_size": -0.1}, "step_size", "-0.1"),
    (CONSENSUS, {"step_size": float("inf")}, "step_size", "inf"),
    (CONSENSUS, {"step_size": None}, "step_size", "None"),
    (CONSENSUS, {"step_size": "auto", "rope": True}, "step_size", "rope"),
    (CONSENSUS, {"update": "both"}, "update", "'both'"),
    (CONSENSUS[1:], {"update": "energy"}, "update", "'energy'"),
    (CONSENSUS[1:], {"context_dim": 6}, "context_dim", "6"),
    (CONSENSUS[1:], {"context_dim": 0}, "context_dim", "0"),
]


@pytest.mark.parametrize(
    ("kind", "arguments", "name", "value"),
    [(kind, *rest) for kinds, *rest in CONSTRUCTORS for kind in kinds],
)
def test_a_constructor_names_what_it_refuses(kind, arguments, name, value):
    with refused(name, value):
        getattr(nn, kind)(**{"dim": 16, "heads": 4, **arguments})


@pytest.mark.parametrize("kind", ALL)
def test_an_odd_head_dimension_cannot_be_rotated_and_the_message_says_which_option(kind):
    """The caller wrote dim=12, heads=4: "dim must be even, got 3" would point at the wrong one."""
    with pytest.raises(ValueError, match=r"\brope\b|\bhead_dim\b|dim / heads"):
        getattr(nn, kind)(12, 4, rope=True)


@pytest.mark.parametrize("kind", CONSENSUS)
def test_an_odd_head_dimension_cannot_be_rotated_back_and_forth_either(kind):
    with pytest.raises(ValueError, match=r"\brope\b|\bhead_dim\b|dim / heads"):
        getattr(nn, kind)(12, 4, rope="isometric")


@pytest.mark.parametrize(
    ("arguments", "name", "value"),
    [
        ({"dim": 7}, "dim", "7"),
        ({"dim": 0}, "dim", "0"),
        ({"dim": 8, "base": 0.0}, "base", "0"),
        ({"dim": 8, "base": -2.0}, "base", "-2"),
    ],
)
def test_rotary_embedding_names_what_it_refuses(arguments, name, value):
    with refused(name, value):
        nn.RotaryEmbedding(**arguments)


@pytest.mark.parametrize(
    ("x", "positions", "name", "value"),
    [
        (torch.randn(9, 4, 6), None, "x", "[9, 4, 6]"),
        (torch.randn(9, 8), None, "x", "[9, 8]"),
        (torch.randn(9, 4, 8), torch.arange(8), "positions", "[8]"),
        (torch.randn(2, 9, 4, 8), torch.zeros(3, 9), "positions", "[3, 9]"),
        (torch.randn(2, 9, 4, 8), torch.zeros(9, 1), "positions", "[9, 1]"),
    ],
)
def test_a_rotation_names_the_shape_it_refuses(x, positions, name, value):
    with refused(name, value):
        nn.RotaryEmbedding(8)(x, positions)


def layer(kind, **options):
    if kind in CONSENSUS:
        options["edge_hidden"] = 6
    return getattr(nn, kind)(16, 4, **options)


def call(kind, backend, *, x=X, graph=None, context=CONTEXT, options=(), **keywords):
    """One forward pass with good arguments wherever none are given."""
    crossed = kind == "CrossConsensus"
    if graph is None:
        graph = BIPARTITE if crossed else GRAPH
    with ga.use_backend(backend):
        return layer(kind, **dict(options))(x, graph, *([context] if crossed else []), **keywords)


FORWARDS = [
    (ALL, {"x": torch.randn(2, 9, 15)}, "x", "[2, 9, 15]"),
    (ALL, {"x": torch.randn(16)}, "x", "[16]"),
    (ALL, {"x": [[0.0] * 16] * 9}, "x", "list"),
    (ALL, {"graph": ga.window_path_graph(8, 2)}, "graph", "8"),
    (ALL[:4], {"graph": BIPARTITE}, "graph", "6"),
    (ALL, {"graph": [[0], [1]]}, "graph", "list"),
    (ALL, {"graph": torch.tensor([[0], [9]])}, "edge_index", "9"),
    (ALL, {"graph": torch.tensor([[0.0], [1.0]])}, "edge_index", "float32"),
    (ALL, {"graph": torch.zeros(3, 4, dtype=torch.long)}, "edge_index", "[3, 4]"),
    (ALL, {"graph": torch.tensor([[0, 0], [1, 1]])}, "edge_index", "more than once"),
    (ALL[:4], {"valid": torch.ones(2, 8, dtype=torch.bool)}, "valid", "[2, 8]"),
    (ALL[:4], {"valid": torch.ones(3, 9, dtype=torch.bool)}, "valid", "[3, 9]"),
    (ALL[:4], {"valid": torch.ones(2, 9)}, "valid", "float32"),
    (ALL[:4], {"valid": torch.ones(2, 9, dtype=torch.long)}, "valid", "int64"),
    (ALL[:4], {"valid": [True] * 9}, "valid", "list"),
    (ALL[4:], {"valid": torch.ones(2, 9, dtype=torch.bool)}, "valid", "pair"),
    (ALL[4:], {"valid": (None, torch.ones(2, 9, dtype=torch.bool))}, "valid", "[2, 9]"),
    (ALL[:4], {"positions": torch.arange(8), "options": {"rope": True}}, "positions", "[8]"),
    (ALL[:4], {"positions": torch.zeros(3, 9), "options": {"rope": True}}, "positions", "[3, 9]"),
    (ALL[:4], {"positions": list(range(9)), "options": {"rope": True}}, "positions", "list"),
    (ALL, {"positions": (None, None, None), "options": {"rope": True}}, "positions", "3"),
    (ALL[4:], {"positions": torch.arange(9), "options": {"rope": True}}, "positions", "pair"),
    (
        ALL[4:],
        {"positions": (None, torch.arange(9)), "options": {"rope": True}},
        "positions",
        "[9]",
    ),
    (ALL[4:], {"context": torch.randn(2, 6, 15)}, "context", "[2, 6, 15]"),
    (ALL[4:], {"context": torch.randn(3, 6, 16)}, "context", "[3]"),
    (ALL[4:], {"context": torch.randn(2, 5, 16)}, "graph", "5"),
    (ALL[4:], {"context": None}, "context", "NoneType"),
]


@pytest.mark.parametrize(
    ("kind", "arguments", "name", "value"),
    [(kind, *rest) for kinds, *rest in FORWARDS for kind in kinds],
)
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_a_forward_pass_names_what_it_refuses(kind, arguments, name, value, backend):
    with refused(name, value):
        call(kind, backend, **arguments)


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_the_good_arguments_of_this_table_are_good(kind, backend):
    assert call(kind, backend).shape == X.shape


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_cross_attention_names_a_context_of_the_wrong_width(backend):
    cross = nn.DotProductAttention(16, 4, context_dim=8, backend=backend)
    with refused("context", "[2, 6, 16]", "8"):
        cross(X, BIPARTITE, CONTEXT)
    with refused("context", "[2, 9, 16]"):
        cross(X, GRAPH)  # context is x itself, which is too wide


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_energy_consensus_needs_one_set_of_tokens(backend):
    with refused("graph", "6"):
        layer("SelfConsensus", backend=backend)(X, BIPARTITE)


def test_an_unknown_backend_is_refused_by_the_context_manager_too():
    with refused("backend", "'fast'"), ga.use_backend("fast"):
        pass


@pytest.mark.parametrize("kind", ["DotProductAttention", "GaussianKernelAttention"])
def test_a_layer_of_another_dtype_says_what_to_convert(kind):
    layer = getattr(ga.nn, kind)(8, 2)
    with pytest.raises(ValueError, match=r"x must have the layer's dtype torch.float32.*float64"):
        layer(torch.randn(5, 8, dtype=torch.float64), ga.complete_graph(5))


def test_a_mask_in_place_of_a_graph_points_to_from_mask():
    with pytest.raises(ValueError, match="from_mask"):
        ga.nn.DotProductAttention(8, 2)(torch.randn(5, 8), torch.ones(5, 5).bool())
