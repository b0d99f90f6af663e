"""Arguments with a wrong name are told the nearest one, and nothing else notices."""

from __future__ import annotations

import doctest
import inspect
import pickle
import sys

import pytest
import torch

import graphattn as ga
from graphattn.near_names import explained

FUNCTIONS = [
    name for name in ga.__all__ if inspect.isfunction(getattr(ga, name)) and name not in
    ("load", "save", "check_score", "explore")
]  # fmt: skip


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: ga.causal_graph(seq_len=8), "did you mean 'num_tokens'? It takes num_tokens"),
        (lambda: ga.window_path_graph(8, windw=2), "did you mean 'window'?"),
        (lambda: ga.window_path_graph(8, window_size=2), "did you mean 'window'?"),
        (lambda: ga.knn_graph(torch.zeros(3, 2), num_neighbors=2), "did you mean 'k'?"),
        (lambda: ga.complete_graph(8, loop=True), "did you mean 'self_loops'?"),
        (lambda: ga.from_edge_index(num_nodes=3), "did you mean 'num_targets'?"),
        (lambda: ga.block_window_graph(8, window_size=2), "did you mean 'block_size'?"),
        (lambda: ga.causal_graph(8, zzz=1), "'zzz'. It takes num_tokens, past"),
        (lambda: ga.dot_product_attention(1, 2, 3, 4, topk=1), "did you mean 'top_k'?"),
        (lambda: ga.dot_product_attention(1, 2, 3, softmax_scale=1), "did you mean 'scale'?"),
        (lambda: ga.train.RunConfig(learning_rate=1), "did you mean 'lr'?"),
        (lambda: ga.train.RunConfig(warmup_stps=1), "did you mean 'warmup_steps'?"),
        (lambda: ga.train.mask_ratios("cosine", number=3), "It takes"),
    ],
)
def test_an_unknown_argument_is_told_the_nearest_one(call, words) -> None:
    with pytest.raises(TypeError, match="got an unexpected keyword argument") as caught:
        call()
    assert words in str(caught.value)


def test_other_errors_stay_as_python_has_them() -> None:
    with pytest.raises(TypeError, match=r"^causal_graph\(\) missing 1 required .*'num_tokens'$"):
        ga.causal_graph()

    @explained
    def fails(x: int, *, y: int = 0) -> int:
        return x + y

    assert fails(1, y=2) == 3
    with pytest.raises(TypeError, match=r"^can only concatenate") as caught:
        fails("a", y=2)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_looks_as_it_was_written(name: str) -> None:
    function = getattr(ga, name)
    plain = inspect.unwrap(function)
    assert plain is not function
    assert pickle.loads(pickle.dumps(function)) is function
    assert inspect.signature(function) == inspect.signature(plain)
    assert (function.__doc__, function.__module__) == (plain.__doc__, plain.__module__)
    module = sys.modules[function.__module__]
    names = [test.name for test in doctest.DocTestFinder().find(module, module.__name__)]
    assert names.count(f"{module.__name__}.{name}") == 1


def test_a_compiler_sees_through() -> None:
    @torch.compile(fullgraph=True, backend="eager")
    def run(q: torch.Tensor) -> torch.Tensor:
        return ga.dot_product_attention(q, q, q, ga.causal_graph(8), scale=0.5)

    q = torch.randn(8, 2, 4)
    expected = ga.dot_product_attention(q, q, q, ga.causal_graph(8), scale=0.5)
    torch.testing.assert_close(run(q), expected)


def test_a_name_that_the_package_does_not_have_is_told_the_nearest_one() -> None:
    with pytest.raises(AttributeError, match=r"'casual_graph': did you mean 'causal_graph'\?$"):
        _ = ga.casual_graph
    assert not hasattr(ga, "something_else_entirely")
