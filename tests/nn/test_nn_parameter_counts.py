"""Parameter counts, against the tables of the papers."""

import pytest

import graphattn as ga


def count(layer) -> int:
    return sum(parameter.numel() for parameter in layer.parameters())


@pytest.mark.parametrize(
    ("dim", "heads", "millions", "sigmas"),
    [(192, 3, "0.44", 36), (384, 6, "1.77", 72), (768, 12, "7.09", 144)],
)
def test_gaussian_kernel_attention_has_the_counts_of_its_paper(dim, heads, millions, sigmas):
    layers = [ga.nn.GaussianKernelAttention(dim, heads) for _ in range(12)]
    assert f"{sum(map(count, layers)) / 1e6:.2f}" == millions
    assert sum(layer.log_sigma.numel() for layer in layers) == sigmas


@pytest.mark.parametrize(("dim", "heads"), [(192, 3), (384, 6), (768, 12)])
def test_gaussian_kernel_attention_has_a_quarter_of_attentions_parameters(dim, heads):
    full = count(ga.nn.DotProductAttention(dim, heads))
    assert full == 4 * (dim * dim + dim)
    assert count(ga.nn.GaussianKernelAttention(dim, heads)) == full // 4 + heads


@pytest.mark.parametrize("dim", [16, 192])
def test_the_value_less_transformer_saves_one_projection(dim):
    full = count(ga.nn.DotProductAttention(dim, 4))
    assert full - count(ga.nn.DotProductAttention(dim, 4, value_projection=False)) == dim**2 + dim


def slope(**options) -> int:
    """Parameters per unit of edge_hidden: the difference of two sizes."""
    small, large = (ga.nn.SelfConsensus(768, 12, edge_hidden=n, **options) for n in (8, 9))
    return count(large) - count(small)


def test_consensus_grows_by_the_slope_of_table_9():
    """Each unit of edge_hidden adds 1536 parameters to the first layer, 3072 to Lambda, 3 per head.

    The three of a head are a bias, alpha and beta.
    """
    assert slope(rank=4) == 1536 + 3072 + 36 == 4644
    assert slope() == 4644  # rank 4 is the default


@pytest.mark.parametrize("rank", [1, 2, 8])
def test_only_lambda_grows_with_the_rank(rank):
    assert slope(rank=rank) == 1536 + 36 + 768 * rank


def test_the_full_width_network_has_a_first_layer_of_the_same_size():
    """One network of 2 * 768 inputs against 12 of 2 * 64: only the biases differ."""
    assert slope(edge_input="full") == 1536 + 1 + 24 + 3072
    layer = ga.nn.SelfConsensus(768, 12, edge_hidden=8, edge_input="full")
    first = layer.edge_net.target.weight.numel() + layer.edge_net.source.weight.numel()
    assert first == 2 * 768 * 8
    assert layer.edge_net.target.bias.numel() == 8


def test_a_full_width_network_per_head_grows_as_algorithm_5_says():
    each = slope(edge_input="full", edge_networks="per_head")
    assert each == 12 * (1536 + 3) + 3072
    assert 12 * each == 258_480  # 12 layers; Table 9 prints 55,600


def test_separate_trunks_are_three_first_layers():
    assert slope(trunk="separate") == 3 * (1536 + 12) + 24 + 3072


def test_consensus_in_closed_form():
    dim, heads, xi, rank = 768, 12, 256, 4
    projections = 2 * (dim * dim + dim)
    biases_of_the_second_layer = 2 * heads + rank * dim
    expected = projections + xi * 4644 + biases_of_the_second_layer
    assert count(ga.nn.SelfConsensus(dim, heads)) == expected
    learned = ga.nn.SelfConsensus(dim, heads, step_size="learned")
    assert count(learned) == expected + heads  # one step size per head


def test_cross_consensus_adds_the_projection_of_the_context():
    alone = count(ga.nn.SelfConsensus(768, 12, edge_hidden=8))
    cross = count(ga.nn.CrossConsensus(768, 12, edge_hidden=8))
    assert cross == alone + 768 * 768 + 768
    narrow = count(ga.nn.CrossConsensus(768, 12, edge_hidden=8, context_dim=384))
    assert cross - narrow == 384 * 768 + 384 * 8  # context_proj and the sources' first layer


def test_krause_attention_adds_its_bandwidths():
    full = count(ga.nn.DotProductAttention(64, 4))
    assert count(ga.nn.KrauseAttention(64, 4)) == full + 4
    assert count(ga.nn.KrauseAttention(64, 4, sigma_per_head=False)) == full + 1
    grouped = full - 2 * (64 * 64 + 64) + 2 * (64 * 32 + 32)
    assert count(ga.nn.KrauseAttention(64, 4, kv_heads=2)) == grouped + 4


@pytest.mark.parametrize("kind", ["SelfConsensus", "CrossConsensus"])
def test_bias_false_drops_the_biases_of_the_projections_only(kind):
    layer = getattr(ga.nn, kind)(64, 4, edge_hidden=8, bias=False)
    biases = {name for name, _ in layer.named_parameters() if "bias" in name}
    kept = {"alpha_bias", "beta_bias", "shear_bias", "target.bias"}
    assert biases == {f"edge_net.{name}" for name in kept}
