"""timm's `attn_layer`: made and called as timm does, with its parameters and its formula.

timm itself is not needed: the blocks here make and call attention as the vision transformers of its
versions do.
"""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional

import graphattn as ga
from graphattn.integrations import torch as gtorch

B, E, H = 2, 16, 4
GRID = (3, 4)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


class Attention(nn.Module):
    """The mathematics and the names of ``timm.layers.Attention``."""

    def __init__(self, dim, num_heads, qkv_bias=True, qk_norm=False, scale_norm=False):
        super().__init__()
        self.num_heads, head_dim = num_heads, dim // num_heads
        self.scale = head_dim**-0.5
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.q_norm = nn.LayerNorm(head_dim) if qk_norm else nn.Identity()
        self.k_norm = nn.LayerNorm(head_dim) if qk_norm else nn.Identity()
        self.attn_drop, self.proj_drop = nn.Dropout(0.0), nn.Dropout(0.0)
        self.norm = nn.LayerNorm(dim) if scale_norm else nn.Identity()
        self.proj = nn.Linear(dim, dim)

    def forward(self, x, attn_mask=None, is_causal=False):
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        x = functional.scaled_dot_product_attention(q, k, v, attn_mask, is_causal=is_causal)
        return self.proj_drop(self.proj(self.norm(x.transpose(1, 2).flatten(-2))))


# How versions of timm make and call attention, and what the formula then has.
FIRST = {"num_heads": H, "qkv_bias": True, "attn_drop": 0.0, "proj_drop": 0.0}
MIDDLE = {**FIRST, "qk_norm": True, "proj_bias": True, "norm_layer": nn.LayerNorm}
NEWEST = {**MIDDLE, "scale_norm": True, "device": None, "dtype": torch.float32}
VERSIONS = {
    "before qk_norm": (FIRST, {}, {}),
    "before scale_norm": (MIDDLE, {"attn_mask": None}, {"qk_norm": True}),
    "with attn_layer": (
        NEWEST,
        {"attn_mask": None, "is_causal": False},
        {"qk_norm": True, "scale_norm": True},
    ),
}


class Block(nn.Module):
    def __init__(self, attn, call):
        super().__init__()
        self.norm1, self.norm2, self.attn = nn.LayerNorm(E), nn.LayerNorm(E), attn
        self.mlp = nn.Sequential(nn.Linear(E, 32), nn.GELU(), nn.Linear(32, E))
        self.call = call

    def forward(self, x):
        x = x + self.attn(self.norm1(x), **self.call)
        return x + self.mlp(self.norm2(x))


def assert_same(a, b, tolerance=1e-10):
    torch.testing.assert_close(a, b, atol=tolerance, rtol=0)


@pytest.mark.parametrize("version", VERSIONS)
def test_dot_is_the_formula_and_weights_load(version):
    made, call, options = VERSIONS[version]
    theirs = Block(Attention(E, H, **options), call).double()
    ours = Block(gtorch.timm_attention()(E, **made), call).double()
    ours.load_state_dict(theirs.state_dict())
    swapped = copy.deepcopy(theirs)
    swapped.attn = gtorch.timm_attention().from_attention(swapped.attn)
    assert list(swapped.state_dict()) == list(theirs.state_dict())
    x = torch.randn(B, 13, E).double()
    for train in (True, False):
        for net in (theirs, ours, swapped):
            net.train(train)
            net.zero_grad()
            net(x).square().sum().backward()
        for net in (ours, swapped):
            assert_same(net(x), theirs(x))
            for a, b in zip(net.parameters(), theirs.parameters(), strict=True):
                assert_same(a.grad, b.grad)


N = 13
MASKS = {
    "bool": torch.eye(N).bool() | (torch.rand(N, N) > 0.5),
    "float": torch.randn(N, N).double(),
    "per sample": (torch.eye(N).bool() | (torch.rand(B, 1, N, N) > 0.5)),
    "per head": (torch.eye(N).bool() | (torch.rand(1, H, N, N) > 0.5)),
    "per head and sample": torch.randn(B, H, N, N)
    .double()
    .masked_fill(~torch.eye(N).bool() & (torch.rand(B, H, N, N) > 0.5), -torch.inf),
}


@pytest.mark.parametrize("mask", MASKS)
def test_masks_as_sdpa_takes_them(mask):
    theirs = Attention(E, H).double()
    ours = gtorch.timm_attention().from_attention(theirs)
    x = torch.randn(B, N, E).double()
    assert_same(ours(x, attn_mask=MASKS[mask]), theirs(x, MASKS[mask]))
    assert_same(ours(x, is_causal=True), theirs(x, is_causal=True))


@pytest.mark.parametrize("prefix", [0, 1, 5])
@pytest.mark.parametrize("is_causal", [True, False])
def test_a_grid_is_a_mask(prefix, is_causal):
    """Patches see those within a radius of 1; tokens before them see all and are seen by all."""
    theirs = Attention(E, H).double()
    ours = gtorch.timm_attention(grid=GRID, radius=1, prefix_tokens=prefix).from_attention(theirs)
    n = prefix + GRID[0] * GRID[1]
    mask = torch.ones(n, n).bool()
    for i in range(n - prefix):
        for j in range(n - prefix):
            rows, columns = i // GRID[1] - j // GRID[1], i % GRID[1] - j % GRID[1]
            mask[prefix + i, prefix + j] = max(abs(rows), abs(columns)) <= 1
    if is_causal:
        mask = mask.tril()
    x = torch.randn(B, n, E).double()
    assert_same(ours(x, is_causal=is_causal), theirs(x, mask))


@pytest.mark.parametrize("mixer", ["rbf", "krause"])
def test_distances_are_those_of_converted_modules(mixer):
    theirs = Attention(E, H).double()
    graph = ga.grid_window_graph(*GRID, 1, class_token=True)
    ours = gtorch.timm_attention(mixer, grid=GRID, radius=1, top_k=3).from_attention(theirs)
    plain = nn.MultiheadAttention(E, H, batch_first=True).double()
    plain.in_proj_weight, plain.in_proj_bias = theirs.qkv.weight, theirs.qkv.bias
    plain.out_proj.weight, plain.out_proj.bias = theirs.proj.weight, theirs.proj.bias
    plain = gtorch.convert(plain, mixer, graph=graph, top_k=3)
    x = torch.randn(B, 13, E).double()
    assert_same(ours(x), plain(x, x, x)[0])
    assert ("log_sigma" in ours.state_dict()) == (mixer == "krause")


@pytest.mark.parametrize("mixer", ["dot", "rbf", "krause"])
def test_copies_pickles_dropout_and_half_precision(mixer):
    make = gtorch.timm_attention(mixer, grid=GRID, radius=1)
    assert gtorch.timm_attention(mixer, grid=GRID, radius=1) is make
    net = make(E, num_heads=H, attn_drop=0.5, proj_drop=0.1)
    x = torch.randn(B, 13, E)
    assert not torch.equal(net(x), net(x))
    net.eval()
    y = net(x)
    for same in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert type(same) is make
        assert torch.equal(same(x), y)
        assert same.qkv.weight is not net.qkv.weight
    half = copy.deepcopy(net).bfloat16()(x.bfloat16())
    assert (half.float() - y).abs().max() < 0.05
    with torch.autocast("cpu"):
        assert (net(x).float() - y).abs().max() < 0.05


def test_a_patch_sees_its_neighbours_and_nothing_else():
    net = gtorch.timm_attention(grid=(4, 4), radius=1, prefix_tokens=0)(E, num_heads=H)
    x = torch.randn(1, 16, E)
    broken = x.clone()
    broken[:, 15] = torch.nan
    y, z = net(x), net(broken)
    blind = [i for i in range(16) if i not in (10, 11, 14, 15)]
    assert torch.equal(y[:, blind], z[:, blind])
    assert z[:, 10].isnan().all()


def test_errors_name_what_is_wrong():
    net = gtorch.timm_attention(grid=GRID, radius=1)(E, num_heads=H)
    x = torch.randn(B, 13, E)
    with pytest.raises(ValueError, match=r"17 targets and 17 sources.*got 13 and 13"):
        net(torch.randn(B, 17, E))
    with pytest.raises(ValueError, match=r"attn_mask must be bool or floats of shape \[13, 13\]"):
        net(x, attn_mask=torch.ones(B, 13).bool())
    with pytest.raises(ValueError, match="is_causal=True"):
        net(x, attn_mask=torch.ones(13, 13).bool(), is_causal=True)
    for call, message in (
        ({"mixer": "gka"}, "mixer must be one of 'dot', 'rbf', 'krause'"),
        ({"grid": (2, 2)}, "grid and radius must be given together"),
        ({"grid": 4, "radius": 1}, r"grid must be \(height, width\)"),
        ({"grid": (2, 2), "radius": 1, "graph": ga.causal_graph(5)}, "graph must be None"),
        ({"prefix_tokens": -1}, "prefix_tokens must be >= 0"),
        ({"sigma": 2.0}, "sigma must be None for mixer='dot'"),
    ):
        with pytest.raises(ValueError, match=message):
            gtorch.timm_attention(**call)
    make = gtorch.timm_attention()
    with pytest.raises(ValueError, match="num_heads must divide dim = 16, got 3"):
        make(E, num_heads=3)
    with pytest.raises(ValueError, match="norm_layer must be given"):
        make(E, num_heads=4, qk_norm=True)
    with pytest.raises(ValueError, match=r"timm.layers.Attention.*got a Linear"):
        make.from_attention(nn.Linear(2, 2))
    scaled = Attention(E, H)
    scaled.scale = 1.0
    with pytest.raises(ValueError, match=r"attention.scale must be 0.5, got 1.0"):
        make.from_attention(scaled)


@pytest.mark.long
def test_compiled():
    net = gtorch.timm_attention("krause", grid=GRID, radius=1, top_k=4)(E, num_heads=H)
    x = torch.randn(B, 13, E)
    assert_same(torch.compile(net, fullgraph=True)(x), net(x), 1e-5)


def test_bandwidths_that_were_learned_go_along():
    learned = gtorch.timm_attention("krause", top_k=4)(16, 4)
    learned.log_sigma.data.fill_(3.0)
    again = gtorch.timm_attention("krause", top_k=2).from_attention(learned)
    assert again.log_sigma.tolist() == [3.0] * 4
