"""NaN and infinity stay where they are: behind a mask, a missing edge, or a place not chosen."""

import pytest
import torch
from cases_ops import (
    GRAPHS,
    SIGMA,
    attend,
    consensus_inputs,
    edge_network,
    qkv,
    random,
    valid_tokens,
)
from torch import Tensor

import graphattn as ga

BAD = [torch.nan, torch.inf]
# Windows, asymmetric edges, a packed batch.
NAMES = ["path with self loops", "isolated targets", "mixed batch"]


def spoil(x: Tensor, valid: Tensor, bad: float) -> Tensor:
    """x [B, N, H, D] with `bad` in every token that is not valid."""
    return x.detach().masked_fill(~valid[..., None, None], bad).requires_grad_()


@pytest.mark.parametrize("bad", BAD)
def test_what_a_padded_token_holds_is_never_read_by_attention_weights(bad: float) -> None:
    graph = ga.window_path_graph(9, 2, self_loops=True)
    valid = valid_tokens(9)
    q, k, _ = qkv(graph)
    for arguments in ({"sigma": 1.0, "eps": 0.1}, {"top_k": 2}, {}):
        weights = [
            ga.attention_weights(a, b, graph, valid=valid, **arguments)
            for a, b in ((q, k), (spoil(q, valid, bad), spoil(k, valid, bad)))
        ]
        assert torch.equal(*weights)


@pytest.mark.parametrize(
    ("bad", "dtype"),
    [(torch.nan, torch.float64), (torch.inf, torch.float64), (-torch.inf, torch.float16)],
)
@pytest.mark.parametrize("which", ["state", "neighbor_state", "hidden", "disagreement", "all"])
@pytest.mark.parametrize("step", [0.2, "auto"])
@pytest.mark.parametrize("update", ["energy", "target"])
@pytest.mark.parametrize("name", NAMES)
def test_what_a_padded_token_holds_is_never_read_by_consensus(
    name: str, update: str, step: float | str, which: str, bad: float, dtype: torch.dtype
) -> None:
    graph = GRAPHS[name]()
    valid = valid_tokens(2, graph.num_targets, seed=1)
    u, v, a, b, network = consensus_inputs(graph, batch=(2,), neighbor=True, dtype=dtype)
    other = [random(*u.shape, seed=s, dtype=dtype) for s in (8, 9)]
    roles = {"state": [u], "neighbor_state": [v], "hidden": [a, b], "disagreement": other}
    rotated = which in ("disagreement", "all")

    def run(spoiled: bool) -> list[Tensor]:
        tensors = []
        for role, members in roles.items():
            for x in members:
                hit = spoiled and which in (role, "all")
                tensors.append(spoil(x, valid, bad) if hit else x.detach().requires_grad_())
        parameters = [x.detach().requires_grad_() for x in network]
        new = ga.consensus_update(
            *tensors[:4],
            ga.EdgeNetworkParameters(*parameters),
            graph,
            step,
            update=update,
            valid=valid,
            disagreement=tuple(tensors[4:]) if rotated else None,
        )
        assert new.isfinite().all()
        loss = new[valid].float().square().sum() + new[~valid].float().sum()
        gradients = torch.autograd.grad(loss, [*tensors, *parameters], materialize_grads=True)
        assert all(gradient.isfinite().all() for gradient in gradients)
        assert all((gradient[~valid] == 0).all() for gradient in gradients[1:6])
        return [new[valid], gradients[0][valid], *gradients[1:]]

    for clean, spoiled in zip(run(False), run(True), strict=True):
        assert torch.equal(clean, spoiled)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("op", ["rbf", "dot"])
def test_the_value_of_a_source_that_is_not_chosen_is_never_read(op: str, bad: float) -> None:
    graph = ga.complete_graph(8)
    q, k, v = qkv(graph, heads=1)
    chosen = ga.attention_weights(q, k, graph, top_k=2, **SIGMA[op]).view(8, 8) > 0
    clean = attend(op, q, k, v, graph, top_k=2)
    for i in range(8):
        x, y = (x.clone().requires_grad_() for x in (q, k))
        z = v.masked_fill(~chosen[i][:, None, None], bad).requires_grad_()
        out = attend(op, x, y, z, graph, top_k=2)[i]
        assert torch.equal(out, clean[i])
        assert torch.autograd.grad(out.sum(), z)[0].isfinite().all()


def test_a_nan_that_is_seen_shows() -> None:
    """Silence would be worse: a row whose source turned NaN must not look healthy."""
    graph = ga.window_path_graph(5, 1)
    q, k, v = qkv(graph)
    k[2] = torch.nan
    for out in (
        ga.rbf_attention(q, k, v, graph, 1.0),
        ga.rbf_attention(q, k, v, graph, 1.0, eps=0.1),
        ga.dot_product_attention(q, k, v, graph),
    ):
        assert out[[1, 3]].isnan().all()
        assert out[[0, 2, 4]].isfinite().all()


def test_a_bad_step_of_an_invalid_token_moves_nothing() -> None:
    """A step made from a padded token's own features is what that token holds, too."""
    graph = ga.window_path_graph(5, 1)
    inputs = consensus_inputs(graph)
    valid = torch.tensor([True, True, True, False, False])
    step = torch.full((5, 2), 0.2, dtype=torch.float64)
    clean = ga.consensus_update(*inputs, graph, step, valid=valid)
    step[~valid] = torch.nan
    assert torch.equal(ga.consensus_update(*inputs, graph, step, valid=valid), clean)


def test_a_network_that_saturates_keeps_everything_finite() -> None:
    """Steps, matrices and gradients for hidden vectors and parameters a thousand times too big."""
    graph = ga.window_path_graph(5, 1)
    inputs = consensus_inputs(graph, dtype=torch.float32)
    hidden = [(1e3 * x).requires_grad_() for x in inputs[2:4]]
    network = edge_network(dtype=torch.float32, seed=3)
    for sign in (1e3, -1e3):
        parameters = ga.EdgeNetworkParameters(*((sign * x).requires_grad_() for x in network))
        for update in ("energy", "target"):
            new = ga.consensus_update(
                *inputs[:2], *hidden, parameters, graph, "auto", update=update
            )
            gradients = torch.autograd.grad(new.sum(), [*hidden, *parameters])
            assert new.isfinite().all()
            assert all(gradient.isfinite().all() for gradient in gradients)
