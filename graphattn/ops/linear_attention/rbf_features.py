"""Features whose products approximate the Gaussian kernel, for linear attention."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from graphattn.graphs.arguments import as_int


def random_features(
    query: Tensor, key: Tensor, sigma: float | Tensor, num_features: int, *, seed: int = 0
) -> tuple[Tensor, Tensor]:
    r"""Positive random features of queries and keys, whose products approximate their RBF weights.

    :func:`~graphattn.linear_attention` of the two approximates :func:`~graphattn.rbf_attention`, on
    any graph and in the time of linear attention. With :math:`\omega` drawn from a normal
    distribution,

    .. math::
        e^{-\lVert q - k \rVert^2 / 2 \sigma^2} = \mathrm{E}\big[ \phi_\omega(q) \,
            \phi_\omega(k) \big], \qquad
        \phi_\omega(z) = e^{\omega \cdot z / \sigma - \lVert z \rVert^2 / \sigma^2}

    and the mean is taken over `num_features` directions, which are orthogonal in groups of D
    (Choromanski et al., Rethinking Attention with Performers, 2021; one of the approximations that
    the Gaussian kernel paper names as future work). The error falls as 1 / sqrt(num_features), but
    grows as :math:`e^{\lVert q + k \rVert^2 / 2 \sigma^2}`: queries and keys should be within sigma
    of the origin. Further away, :func:`nystrom_features` are far better.

    Every query is scaled by a number of its own, and all keys of a head by one number, so that the
    largest feature is 1. Neither changes a weight.

    Args:
        query: [*, N, H, D].
        key: [*, M, Hk, D]; Hk divides H. Query head h and key head h // (H / Hk) read the same
            directions.
        sigma: bandwidth > 0; a float, or a tensor broadcastable to [Hk].
        num_features: number of directions m per head.
        seed: seed of the directions, which are those of each call with this seed, H, D and m.

    Returns:
        The features of queries [*, N, H, m] and of keys [*, M, Hk, m], all >= 0.

    Raises:
        ValueError: if a shape does not fit, or `num_features` or `sigma` is not positive.

    Example:
        >>> import torch, graphattn as ga
        >>> q, k, v = 0.3 * torch.randn(3, 100, 2, 4, generator=torch.Generator().manual_seed(0))
        >>> graph = ga.causal_graph(100)
        >>> exact = ga.rbf_attention(q, k, v, graph, sigma=1.0)
        >>> y = ga.linear_attention(*ga.random_features(q, k, 1.0, 256), v, graph)
        >>> bool((y - exact).norm() < 0.1 * exact.norm())
        True
    """
    m = as_int("num_features", num_features, 1)
    heads, scale = _checked(query, key, sigma)
    generator = torch.Generator().manual_seed(as_int("seed", seed, 0))
    directions = _orthogonal(heads, query.shape[-1], m, generator).to(query)
    of_key = torch.einsum("...nhd,hdm->...nhm", key * scale, directions)
    of_key = of_key - (key * scale).square().sum(-1, keepdim=True)
    of_key = of_key - of_key.detach().amax(dim=(-3, -1), keepdim=True) if of_key.numel() else of_key
    repeats = query.shape[-2] // heads
    scale, directions = (t.repeat_interleave(repeats, dim=0) for t in (scale, directions))
    of_query = torch.einsum("...nhd,hdm->...nhm", query * scale, directions)
    of_query = of_query - of_query.detach().amax(dim=-1, keepdim=True)
    return of_query.exp(), of_key.exp()


def nystrom_features(
    query: Tensor, key: Tensor, sigma: float | Tensor, landmarks: Tensor
) -> tuple[Tensor, Tensor]:
    r"""Features of queries and keys by Nystrom's method, whose products approximate RBF weights.

    With K the Gaussian kernel and L the landmarks, the weights are :math:`K(q, L) \, K(L, L)^+ \,
    K(L, k)` (Williams and Seeger, 2001; Xiong et al., Nystromformer, 2021; one of the
    approximations that the Gaussian kernel paper names as future work). They are exact for queries
    or keys that are landmarks. Give the two to :func:`~graphattn.linear_attention`. Features of
    keys can be negative, so far from all landmarks a sum of weights can be near 0 or negative.

    Landmarks that depend on later tokens let a causal model see them.

    Args:
        query: [*, N, H, D].
        key: [*, M, H, D].
        sigma: bandwidth > 0; a float, or a tensor broadcastable to [H].
        landmarks: [m, H, D] or [*, m, H, D], for example every tenth key.

    Returns:
        The features of queries [*, N, H, m] and of keys [*, M, H, m].

    Raises:
        ValueError: if a shape does not fit, or `sigma` is not positive.

    Example:
        >>> import torch, graphattn as ga
        >>> q, k, v = torch.randn(3, 100, 2, 2, generator=torch.Generator().manual_seed(0))
        >>> graph = ga.complete_graph(100)
        >>> exact = ga.rbf_attention(q, k, v, graph, sigma=1.0)
        >>> y = ga.linear_attention(*ga.nystrom_features(q, k, 1.0, k[::4]), v, graph)
        >>> bool((y - exact).norm() < 0.2 * exact.norm())
        True
    """
    heads, scale = _checked(query, key, sigma)
    if heads != query.shape[-2]:
        raise ValueError(f"key must have the {query.shape[-2]} heads of query, got {heads}")
    shape = (*key.shape[:-3], "m", *key.shape[-2:])
    fits = isinstance(landmarks, Tensor) and landmarks.dim() >= 3
    if not fits or landmarks.shape[-2:] != key.shape[-2:] or landmarks.shape[-3] == 0:
        got = list(landmarks.shape) if isinstance(landmarks, Tensor) else type(landmarks).__name__
        raise ValueError(f"landmarks must be [m, H, D] or {list(shape)} with m >= 1, got {got}")
    # Tokens and features last: [*, H, tokens, D].
    q, k, marks = ((x * scale).transpose(-3, -2) for x in (query, key, landmarks))
    of_query, of_key, among = (_kernel(x, marks) for x in (q, k, marks))
    # Of eigenvalues below rounding, the pseudoinverse has none.
    inverse = torch.linalg.pinv(among, hermitian=True, rtol=among.shape[-1] * _eps(among) ** 0.75)
    return of_query.transpose(-3, -2), (of_key @ inverse).transpose(-3, -2)


def _eps(x: Tensor) -> float:
    return torch.finfo(x.dtype).eps


def _kernel(a: Tensor, b: Tensor) -> Tensor:
    """Compute exp(-|a_i - b_j|^2 / 2), [*, n, m]."""
    return torch.exp(-torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist").square() / 2)


def _checked(query: Tensor, key: Tensor, sigma: float | Tensor) -> tuple[int, Tensor]:
    """Check shapes; return the number of key heads and 1 / sigma, [Hk, 1]."""
    for name, x in (("query", query), ("key", key)):
        if not isinstance(x, Tensor) or x.dim() < 3 or not x.is_floating_point():
            got = type(x).__name__
            if isinstance(x, Tensor):
                got = f"{x.dtype} of shape {list(x.shape)}"
            raise ValueError(f"{name} must be floating-point [*, tokens, heads, D], got {got}")
    if query.shape[-1] != key.shape[-1] or query.shape[-2] % key.shape[-2]:
        raise ValueError(
            "key must have the features of query, and a number of heads that divides its heads, "
            f"{list(query.shape[-2:])}, got {list(key.shape[-2:])}"
        )
    heads = key.shape[-2]
    bandwidth = torch.as_tensor(sigma, dtype=key.dtype, device=key.device)
    try:
        bandwidth = bandwidth.broadcast_to(heads)
    except RuntimeError:
        raise ValueError(
            f"sigma must be a number or broadcastable to [{heads}], got {list(bandwidth.shape)}"
        ) from None
    if not bool((bandwidth > 0).all()):
        raise ValueError(f"sigma must be > 0, got {sigma}")
    return heads, 1 / bandwidth[:, None]


def _orthogonal(heads: int, D: int, m: int, generator: torch.Generator) -> Tensor:
    """Draw directions [heads, D, m], normally distributed, orthogonal in groups of D."""
    groups = math.ceil(m / D)
    normal = torch.randn(heads * groups, D, D, dtype=torch.float64, generator=generator)
    basis, upper = torch.linalg.qr(normal)
    # With these signs, all directions are equally likely (Mezzadri, 2007).
    basis = basis * upper.diagonal(dim1=-2, dim2=-1).sign()[:, None]
    lengths = torch.randn(heads * groups, D, D, dtype=torch.float64, generator=generator)
    columns = basis * lengths.norm(dim=-1)[:, None]
    return columns.unflatten(0, (heads, groups)).transpose(1, 2).flatten(2)[..., :m]
