"""Points that make a search for neighbours lose something, and who their neighbours are."""

from __future__ import annotations

import math

import numpy as np
import torch
from hypothesis import strategies as st

from graphattn.graphs.search.nearest_neighbors import nearest_index

N = 400


def generator(seed):
    return torch.Generator().manual_seed(seed)


def cloud(width, seed=0, *, count=N, dtype=torch.float32):
    return torch.randn(count, width, generator=generator(seed), dtype=dtype)


def holed(x):
    x = x.clone()
    x[5, 0], x[17, -1], x[18] = math.nan, math.inf, -math.inf
    return x


def with_outlier(x):
    return torch.cat([x, torch.full_like(x[:1], 1e30)])


def lattice(width):
    """Shuffled, so that places and indices have nothing to do with each other; at most 6 axes."""
    axes = min(width, 6)
    side = math.ceil(500 ** (1 / axes))
    points = torch.cartesian_prod(*[torch.arange(float(side))] * axes).reshape(-1, axes)
    points = points[torch.randperm(len(points), generator=generator(1))]
    return torch.nn.functional.pad(points, (0, width - axes))


POINTS = {
    "random": cloud,
    "float64": lambda width: cloud(width, dtype=torch.float64),
    "half": lambda width: cloud(width).half(),
    "bfloat16": lambda width: cloud(width).bfloat16(),
    "lattice": lattice,
    "thirds": lambda width: lattice(width) / 3,
    "on a line": lambda width: torch.linspace(-1, 1, N)[:, None].repeat(1, width),
    "on an axis": lambda width: cloud(width) * torch.eye(width)[0],
    "all equal": lambda width: torch.ones(N, width),
    "four places": lambda width: cloud(width, count=4)[torch.arange(N) % 4],
    "pairs": lambda width: cloud(width, count=N // 2).repeat(2, 1),
    "outlier": lambda width: with_outlier(cloud(width)),
    "offset": lambda width: cloud(width) + 1e6,
    "holed": lambda width: holed(cloud(width)),
    "holed copies": lambda width: holed(torch.ones(N, width)),
    "hardly any": lambda width: torch.where(torch.arange(N)[:, None] < 3, cloud(width), math.nan),
    "denormal": lambda width: cloud(width) * 1e-43,
    "vanishing squares": lambda width: cloud(width, dtype=torch.float64) * 1e-162,
    "vanished squares": lambda width: cloud(width, dtype=torch.float64) * 1e-200,
    "overflowing squares": lambda width: cloud(width, dtype=torch.float64) * 1e160,
    "large": lambda width: cloud(width) * 1e37,
    "halving": lambda width: 0.5 ** torch.arange(N, dtype=torch.float64)[:, None].repeat(1, width),
    "signed zeros": lambda width: cloud(width).round() * 0.0,
}


def squared_by_numpy(a, b):
    """Squared distances in float64, rounded as documented: eight sums joined by halves, a rest."""
    gap = np.square(a[:, None] - b[None])
    whole = gap.shape[2] // 8 * 8
    sums = np.zeros((*gap.shape[:2], 8))
    for c in range(0, whole, 8):
        sums += gap[:, :, c : c + 8]
    for half in (4, 2, 1):
        sums = sums[:, :, :half] + sums[:, :, half : 2 * half]
    rest = np.zeros(gap.shape[:2])
    for c in range(whole, gap.shape[2]):
        rest += gap[:, :, c]
    return sums[:, :, 0] + rest


def nearest_by_numpy(x, k, source=None, self_loops=False):
    """All differences in float64, sorted by distance, then index."""
    a = x.double().numpy()
    b = a if source is None else source.double().numpy()
    with np.errstate(all="ignore"):
        squared = np.nan_to_num(squared_by_numpy(a, b), nan=np.inf, posinf=np.inf)
    if source is None:
        own = np.where(np.isfinite(a).all(1) & self_loops, -1.0, np.inf)
        np.fill_diagonal(squared, own)
    order = np.argsort(squared, axis=1, kind="stable")[:, :k]
    found = np.take_along_axis(squared, order, axis=1) < np.inf
    return torch.from_numpy(np.where(found, order, -1))


def wide(x):
    return x.to(torch.promote_types(x.dtype, torch.float32))


def on_a_sphere():
    """Hundreds of whole numbers x^2 + y^2 + z^2 = 1001, all exactly as far from the origin."""
    whole = torch.cartesian_prod(*[torch.arange(-31.0, 32.0)] * 3)
    sphere = whole[whole.square().sum(1) == 1001]
    assert len(sphere) > 300
    return sphere[torch.randperm(len(sphere), generator=generator(2))]


def draw_clusters(data, widths, scales):
    """Points in tight clusters, far from the origin or at any scale."""
    width, seed = data.draw(widths), data.draw(st.integers(0, 10**6))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64]))
    centers = cloud(width, seed, count=data.draw(st.sampled_from([1, 3, 50])), dtype=dtype)
    spread = data.draw(st.sampled_from([0.0, 1e-7, 1e-4, 1.0]))
    offset = data.draw(st.sampled_from([0.0, 100.0, 1e6]))
    own = torch.randint(len(centers), (N,), generator=generator(seed))
    points = centers[own] + spread * cloud(width, seed + 1, dtype=dtype) + offset
    return points * data.draw(st.sampled_from(scales))


def check_equal_points(width, count):
    """Thousands of equal points among others all see those of smallest index."""
    x = cloud(width, count=count)
    x[7::3] = x[7]
    first = (x == x[7]).all(1).nonzero()[:, 0]
    assert len(first) > count // 4
    index = nearest_index(x, 4)[first]
    assert torch.equal(index[5:], first[:4].expand(len(first) - 5, 4))
    assert index[0].tolist() == first[1:5].tolist()
    loops = nearest_index(x, 4, self_loops=True)[first]
    assert torch.equal(loops[:, 0], first)
    assert torch.equal(loops[5:, 1:], first[:3].expand(len(first) - 5, 3))
