"""Leaders against the column sums of the attention matrix, written out."""

import math

import pytest
import torch

import graphattn as ga
from graphattn.dynamics import cluster, leader_tokens, simulate


def attention_matrix(x, mask, *, hubs=(), scaling="sdp", sigma=None):
    """Dense softmax of the rule, row by row [N, N]."""
    d = x.shape[1]
    if sigma is not None:
        logits = (
            -(torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist") ** 2) / 2 / sigma**2
        )
    else:
        logits = x @ x.T / (d if scaling == "sq_inplace" else math.sqrt(d))
    for hub in hubs:
        logits[hub] /= math.sqrt(d)
    return logits.masked_fill(~mask, -math.inf).softmax(dim=1).nan_to_num(0.0)


CASES = {
    "global": (ga.complete_graph(24), "sdp", None, ()),
    "in place": (ga.longformer_graph(24, 3, [5]), "sq_inplace", None, (5,)),
    "causal": (ga.causal_window_graph(24, 6), "sq", None, ()),
    "rbf": (ga.longformer_graph(24, 4, [0]), "sdp", 0.8, ()),
    "rows without edges": (ga.from_mask(torch.rand(24, 24) < 0.08), "sdp", None, ()),
    "rbf, rows without edges": (ga.from_mask(torch.rand(24, 24) < 0.08), "sdp", 1.3, ()),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("offset", [0.0, 3.0])
@pytest.mark.parametrize("step", [0, -1])
def test_a_leader_receives_most_of_its_cluster_s_attention(name, offset, step):
    graph, scaling, sigma, hubs = CASES[name]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(24, 3, generator=generator, dtype=torch.float64) + offset
    score = "dot" if sigma is None else "rbf"
    trajectory = simulate(x, graph, steps=3, scaling=scaling, score=score, sigma=sigma)
    labels = torch.randint(4, (24,), generator=generator)
    state = trajectory.states[step % 3]
    weights = attention_matrix(state, graph.to_mask(), hubs=hubs, scaling=scaling, sigma=sigma)
    leaders = leader_tokens(trajectory, labels, step=step)
    for c in range(4):
        received = weights[labels == c].mean(dim=0)
        assert leaders.share[c].item() == pytest.approx(received.max().item(), rel=1e-9)
        assert received[leaders.tokens[c]].item() == pytest.approx(received.max().item(), rel=1e-9)


@pytest.mark.parametrize("score", ["dot", "rbf"])
def test_with_top_k_only_kept_edges_count(score):
    x = torch.randn(20, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    labels = torch.arange(20) % 3
    trajectory = simulate(x, ga.complete_graph(20), steps=1, score=score, top_k=4)
    logits = x @ x.T / math.sqrt(2) if score == "dot" else -(torch.cdist(x, x) ** 2) / 4
    least = logits.topk(4, dim=1).values[:, -1:]
    weights = logits.masked_fill(logits < least, -math.inf).softmax(dim=1)
    leaders = leader_tokens(trajectory, labels)
    for c in range(3):
        received = weights[labels == c].mean(dim=0)
        assert leaders.share[c].item() == pytest.approx(received.max().item(), rel=1e-7)


def test_weights_of_a_model_will_do():
    graph = ga.from_edge_index(torch.tensor([[1, 2, 0, 2, 2], [0, 0, 1, 1, 2]]), 3)
    weights = torch.tensor([0.9, 0.1, 0.7, 0.3, 1.0])
    leaders = leader_tokens(weights, torch.tensor([0, 0, 1]), graph=graph)
    assert leaders.tokens.tolist() == [1, 2]
    assert leaders.share.tolist() == pytest.approx([0.45, 1.0])


def test_every_token_may_be_its_own_cluster():
    """More clusters than are handled at a time; the leader of {i} is where row i is largest."""
    x = torch.randn(150, 2, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    graph = ga.block_window_graph(150, 40)
    leaders = leader_tokens(simulate(x, graph, steps=1), torch.arange(150))
    weights = attention_matrix(x, graph.to_mask())
    assert torch.equal(leaders.tokens, weights.argmax(dim=1))
    torch.testing.assert_close(leaders.share, weights.amax(dim=1), rtol=1e-9, atol=0)


def test_the_clusters_of_the_update_are_the_default():
    x = torch.randn(60, 2, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    trajectory = simulate(x, ga.complete_graph(60), steps=20)
    labels = cluster(trajectory.updates[-1])
    assert len(labels.unique()) < 30
    ours, given = leader_tokens(trajectory), leader_tokens(trajectory, labels)
    assert torch.equal(ours.tokens, given.tokens)


def test_bad_input_is_named():
    x, graph = torch.randn(5, 2), ga.complete_graph(5)
    trajectory = simulate(x, graph, steps=2)
    labels = torch.zeros(5, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"step must be an integer in -2 .. 1, got 2"):
        leader_tokens(trajectory, step=2)
    with pytest.raises(ValueError, match="source must be a trajectory with at least one step"):
        leader_tokens(simulate(x, graph, steps=0))
    with pytest.raises(ValueError, match="graph must be None if source is a trajectory"):
        leader_tokens(trajectory, graph=graph)
    with pytest.raises(ValueError, match="labels must have 5 entries, one per token, got 4"):
        leader_tokens(trajectory, labels[:4])
    with pytest.raises(ValueError, match="graph must be given if source is weights"):
        leader_tokens(torch.ones(25), labels)
    with pytest.raises(ValueError, match="labels must be given if source is weights"):
        leader_tokens(torch.ones(25), graph=graph)
    with pytest.raises(ValueError, match=r"a Trajectory or weights \[25\], one per edge"):
        leader_tokens(torch.ones(5, 5), labels, graph=graph)
