"""Scores: functions that compute the logit of a query and a key.

Attention mechanisms differ in their score and in nothing else. `reference` asks a :class:`Score`
for the logits of edges; `structured` and steps of generation ask for those of all pairs of a few
tokens. Compiled code (`native`, `triton`) knows only the two scores of this file, by their name
`kernel`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from numbers import Real
from typing import Any, ClassVar, Literal, Self, TypeVar

import torch
from torch import Tensor

from graphattn.kernels.shared.stored import kept_for_training
from graphattn.ops.backends import has_values, is_watched
from graphattn.ops.inputs import compute_dtype

Kernel = Literal["dot", "rbf"]  # the scores that compiled code knows
Method = Literal["edges", "pairs"]
WIDE = (torch.float32, torch.float64)  # the dtypes in which operations compute
ScoreType = TypeVar("ScoreType", bound="Score")


class Score:
    r"""Computes the logit of an edge from its query and its key, before bias and softmax.

    A mechanism of your own is a subclass with one method, :meth:`edges`. It runs on "reference" and
    "structured", in layers, and in steps of generation, with gradients to every tensor it uses;
    "native" and "triton" refuse it, because compiled code knows dot products and Gaussian kernels
    alone. A score with a faster form for all pairs of tokens, such as a matrix product, also
    overrides :meth:`pairs`.

    Give one to :func:`score_attention`, or return it from the method `score` of a layer.

    Example:
        >>> import torch, graphattn as ga
        >>> class LaplacianKernel(ga.Score):
        ...     def __init__(self, bandwidth):  # a number, or a tensor [H]
        ...         self.bandwidth = bandwidth
        ...
        ...     def edges(self, query, key):
        ...         return -(query - key).norm(dim=-1) / self.bandwidth
        >>> x = torch.tensor([0.0, 1.0, 3.0]).view(3, 1, 1)
        >>> graph = ga.complete_graph(3)
        >>> ga.score_attention(x, x, x, graph, LaplacianKernel(1.0)).flatten()
        tensor([0.3649, 0.9353, 2.6456])
    """

    #: The name of this score in compiled code; None if compiled code does not know it.
    kernel: ClassVar[Kernel | None] = None

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Clear what a subclass makes wrong: its `kernel`, and an inherited `pairs`."""
        super().__init_subclass__(**keywords)
        changed = {"edges", "pairs", "ready", "strength", "sigma"} & vars(cls).keys()
        if changed and "kernel" not in vars(cls):
            cls.kernel = None
        if "edges" in changed and "pairs" not in changed:
            cls.pairs = Score.pairs  # type: ignore[method-assign]

    def edges(self, query: Tensor, key: Tensor) -> Tensor:
        """The logits [..., H] of queries and keys [..., H, D], edge by edge.

        Leading dimensions broadcast. A tensor [H] that the score holds broadcasts with the result.
        A logit may depend on its own query and key only.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must have edges(query, key): logits [..., H] of queries and "
            "keys [..., H, D]"
        )

    def pairs(self, query: Tensor, key: Tensor) -> Tensor:
        """The logits [..., H, n, m] of all pairs of queries [..., H, n, D] and keys [..., H, m, D].

        The default calls :meth:`edges`, which needs memory for n * m * D numbers.
        """
        query, key = query.transpose(-3, -2), key.transpose(-3, -2)
        logits = logits_by(self, "edges", query[..., :, None, :, :], key[..., None, :, :, :])
        return logits.movedim(-1, -3)

    def ready(self, heads: int, query: Tensor) -> Self:
        """Return this score with checked tensors [H] in the compute dtype of `query`."""
        return self

    @property
    def strength(self) -> Tensor | None:
        """The factor [H] that compiled code uses, of a :meth:`ready` score; None for others."""
        return None

    def pair_factor(self, query: Tensor) -> float | Tensor:
        """The factor of products, or of halved squared distances: a number, or a tensor [H] or [1].

        Only scores that compiled code knows have one.
        """
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class DotProduct(Score):
    r"""Scaled dot product, :math:`s_h \, q_i \cdot k_j` (Vaswani et al., 2017).

    Args:
        scale: s, a number or a tensor broadcastable to [H]; 1 / sqrt(D) if None.

    Example:
        >>> import torch, graphattn as ga
        >>> ga.DotProduct(0.5).edges(torch.ones(3, 1, 4), torch.ones(3, 1, 4)).flatten()
        tensor([2., 2., 2.])
    """

    kernel = "dot"
    number: float | None = None  # the scale of a :meth:`ready` score, if it was given as a number

    def __init__(self, scale: float | Tensor | None = None) -> None:
        self.scale = scale

    def edges(self, query: Tensor, key: Tensor) -> Tensor:
        scale = _default_scale(query) if self.scale is None else self.scale
        return scale * (query * key).sum(-1)

    def pairs(self, query: Tensor, key: Tensor) -> Tensor:
        scale = _default_scale(query) if self.scale is None else self.scale
        return (_per_row(scale) * query) @ key.mT

    def pair_factor(self, query: Tensor) -> float | Tensor:
        return _default_scale(query) if self.scale is None else _as_numbers(self.scale, query)

    def ready(self, heads: int, query: Tensor) -> Self:
        scale = _default_scale(query) if self.scale is None else self.scale
        if isinstance(scale, Real) and not math.isfinite(scale):
            raise ValueError(f"scale must be finite, got {scale}")
        same = _copy(self)
        same.number = None if isinstance(scale, Tensor) else scale
        same.scale = per_head("scale", scale, heads, query)
        return same

    @property
    def strength(self) -> Tensor:
        assert isinstance(self.scale, Tensor)
        return self.scale

    def __repr__(self) -> str:
        return f"DotProduct(scale={_shown(self.scale)})"


class GaussianKernel(Score):
    r"""Gaussian kernel of the distance, :math:`-\lVert q_i - k_j \rVert^2 / (2 \sigma_h^2)`.

    The RBF of Gaussian kernel attention (Projection-Free Transformers, Eq. 3) and of Krause
    attention. Logits come from the difference itself: nothing cancels, whatever offset tokens
    share.

    Args:
        sigma: bandwidth > 0 in units of the features: a number, a tensor broadcastable to [H], or a
            function without arguments that returns one of these when it is needed.
        log_sigma: its logarithm, where that is what is known; `sigma` is then its exponential
            unless given.

    Example:
        >>> import torch, graphattn as ga
        >>> ga.GaussianKernel(2.0).edges(torch.ones(3, 1, 4), torch.zeros(3, 1, 4)).flatten()
        tensor([-0.5000, -0.5000, -0.5000])
    """

    kernel = "rbf"

    def __init__(
        self,
        sigma: float | Tensor | Callable[[], Tensor] | None = None,
        *,
        log_sigma: Tensor | None = None,
    ) -> None:
        if sigma is None and log_sigma is None:
            raise ValueError("sigma or log_sigma must be given, got None for both")
        self.log_sigma = log_sigma
        self._sigma = sigma
        self._scale: Tensor | None = None

    @property
    def sigma(self) -> float | Tensor:
        """The bandwidth, a number or a tensor."""
        if self._sigma is None:
            assert self.log_sigma is not None
            return bandwidth(self.log_sigma)
        return self._sigma() if callable(self._sigma) else self._sigma

    def edges(self, query: Tensor, key: Tensor) -> Tensor:
        scale = self.sigma**-2 if self._scale is None else self._scale
        return -scale / 2 * (query - key).square().sum(-1)

    def pairs(self, query: Tensor, key: Tensor) -> Tensor:
        scale = self.sigma**-2 if self._scale is None else self._scale
        distance = torch.cdist(query, key, compute_mode="donot_use_mm_for_euclid_dist")
        return -_per_row(scale) / 2 * distance.square()

    def pair_factor(self, query: Tensor) -> float | Tensor:
        if self._scale is not None:
            return self._scale
        if self.log_sigma is None:
            return _as_numbers(self.sigma, query) ** -2
        return (-2 * _as_numbers(self.log_sigma, query)).exp()

    def ready(self, heads: int, query: Tensor) -> Self:
        same = _copy(self)
        same._scale = _inverse_square(self.sigma, heads, query)
        return same

    @property
    def strength(self) -> Tensor:
        assert self._scale is not None
        return self._scale

    def __repr__(self) -> str:
        return f"GaussianKernel(sigma={_shown(self.sigma)})"


def _copy(score: ScoreType) -> ScoreType:
    """A shallow copy. (`copy.copy` takes as long as to compute the logits of a few tokens.)"""
    same = object.__new__(type(score))
    if torch.compiler.is_compiling() and type(score) in (DotProduct, GaussianKernel):
        # torch 2.11 cannot compile what reads all attributes.
        for name in ("scale",) if type(score) is DotProduct else ("log_sigma", "_sigma", "_scale"):
            setattr(same, name, getattr(score, name))
        return same
    same.__dict__.update(score.__dict__)
    return same


def bandwidth(log_sigma: Tensor) -> Tensor:
    """The exponential of log(sigma), in float32 at least."""
    dtype = log_sigma.dtype
    return (log_sigma if dtype in WIDE else log_sigma.to(compute_dtype(dtype))).exp()


def as_score(score: Any) -> Score:
    """A score; a ValueError for anything else."""
    if isinstance(score, type) and issubclass(score, Score):
        raise ValueError(
            f"score must be an instance, got the class {score.__name__}: make one by "
            f"{score.__name__}(...)"
        )
    if not isinstance(score, Score):
        raise ValueError(
            "score must be a graphattn.Score, such as DotProduct() or GaussianKernel(sigma), got "
            f"the {type(score).__name__} {score!r}"
        )
    if replaced := {"edges", "pairs"} & vars(score).keys():
        raise ValueError(
            f"score must have {' and '.join(sorted(replaced))} as methods of its class, got a "
            f"{type(score).__name__} that has them as attributes: write a subclass"
        )
    return score


def edge_logits(score: Score, query: Tensor, key: Tensor) -> Tensor:
    """The logits [*, E, H] of queries and keys [*, E, H, D]; checked if the score is your own."""
    if score.kernel is not None:
        return score.edges(query, key)
    return logits_by(score, "edges", query, key)


def pair_logits_of(score: Score, query: Tensor, key: Tensor) -> Tensor:
    """The logits [*, H, n, m] of queries [*, H, n, D] and keys [*, H, m, D], checked."""
    return logits_by(score, "pairs", query, key)


def logits_by(score: Score, method: Method, query: Tensor, key: Tensor) -> Tensor:
    """The logits by a method of a score, in the dtype of `query`.

    Raises:
        ValueError: if they have another shape or dtype than they must, or the method itself raises
            an error, which then is the cause.
    """
    shape: tuple[int, ...] = query.shape[:-1]
    if method == "pairs":
        shape = (*shape, key.shape[-2])
    elif query.shape != key.shape:
        shape = torch.broadcast_shapes(shape, key.shape[:-1])
    try:
        logits = getattr(score, method)(query, key)
    except (NotImplementedError, torch.OutOfMemoryError):
        raise
    except (IndexError, RuntimeError, TypeError) as error:
        got = f"but it raised the {type(error).__name__}: {error}"
        raise _wrong_logits(score, method, query, key, shape, got) from error
    if not isinstance(logits, Tensor):
        raise _wrong_logits(score, method, query, key, shape, f"got {type(logits).__name__}")
    if logits.shape != shape or not logits.is_floating_point():
        got = f"got {logits.dtype} of shape {list(logits.shape)}"
        raise _wrong_logits(score, method, query, key, shape, got)
    return logits.to(query.dtype)


def _wrong_logits(
    score: Score, method: str, query: Tensor, key: Tensor, shape: tuple[int, ...], got: str
) -> ValueError:
    return ValueError(
        f"{type(score).__name__}.{method}() must give floating-point logits of shape "
        f"{list(shape)} for query {list(query.shape)} and key {list(key.shape)}, {got}. "
        "graphattn.check_score(score, heads, head_dim) checks a score alone"
    )


def known_score(kernel: str, strength: Tensor) -> DotProduct | GaussianKernel:
    """The score of this name in compiled code, ready, from its factor [H]."""
    if kernel == "dot":
        return DotProduct(strength)
    score = GaussianKernel(1.0)
    score._scale = strength
    return score


def score_of(sigma: Any, scale: Any) -> DotProduct | GaussianKernel:
    """The score that the arguments `sigma` and `scale` of an operation stand for."""
    if sigma is not None and scale is not None:
        raise ValueError(f"give sigma (RBF) or scale (dot product), not both: {sigma}, {scale}")
    return DotProduct(scale) if sigma is None else GaussianKernel(sigma)


def per_head(name: str, number: float | Tensor, heads: int, like: Tensor) -> Tensor:
    """`number` as a tensor [H] in the compute dtype and on the device of `like`."""
    if (
        isinstance(number, Tensor)
        and number.dtype is like.dtype
        and number.dtype in WIDE
        and number.shape == (heads,)
        and number.device == like.device
    ):
        return number
    dtype = compute_dtype(like.dtype)
    if not isinstance(number, Tensor):
        if isinstance(number, bool) or not isinstance(number, Real):
            raise ValueError(f"{name} must be a number or a tensor, got {number!r}")
        if like.device.type == "cpu" and not is_watched(like):
            return _constant(float(number), heads, dtype)
        return torch.full((heads,), float(number), dtype=dtype, device=like.device)
    try:
        return number.to(like.device, dtype).broadcast_to((heads,))
    except RuntimeError:
        raise ValueError(
            f"{name} must be a number or broadcastable to [{heads}] (heads), "
            f"got shape {list(number.shape)}"
        ) from None


@lru_cache(maxsize=256)
def _constant(number: float, heads: int, dtype: torch.dtype) -> Tensor:
    """A tensor [heads] of one number, cached: no operation writes into its inputs."""
    with kept_for_training():
        return torch.full((heads,), number, dtype=dtype, device="cpu")


def _inverse_square(sigma: float | Tensor, heads: int, query: Tensor) -> Tensor:
    """1 / sigma^2 per head, [H]; checked where its values can be read."""
    of_heads = per_head("sigma", sigma, heads, query)
    scale = of_heads**-2
    if has_values(scale):
        sigmas, scales = of_heads.tolist(), scale.tolist()
        # min() does not see a NaN in a list, but the sum is NaN then.
        if sigmas and min(sigmas) > 0 and min(scales) > 0 and math.isfinite(sum(scales)):
            return scale
        if not (all(s > 0 for s in sigmas) and all(0 < s < math.inf for s in scales)):
            got = sigma.tolist() if isinstance(sigma, Tensor) else sigma
            raise ValueError(f"sigma must be > 0 and finite, like 1 / sigma^2, got {got}")
    return scale


def _default_scale(query: Tensor) -> float:
    return 1 / math.sqrt(max(query.shape[-1], 1))


def _per_row(scale: Any) -> Any:
    """A factor for logits [..., H, n, m], from one factor or one per head [H]."""
    return scale[..., None, None] if isinstance(scale, Tensor) and scale.dim() else scale


def _shown(number: Any) -> Any:
    return [round(x, 4) for x in number.tolist()] if isinstance(number, Tensor) else number


# The softcap of Gemma 2, which bounds logits: ``softcap * tanh(logits / softcap)``.


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    """Logits between -softcap and softcap; unchanged if `softcap` is None.

    Far beyond the cap, tanh is 1 to the last bit, so many logits are equal. All backends in torch
    use this function, so that logits are equal either in all of them or in none.
    """
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def slope(logits: Tensor, softcap: float) -> Tensor:
    """The derivative of :func:`capped`, from its result; 0 where the cap is reached."""
    return 1 - (logits / softcap).square()


def _as_numbers(number: Any, like: Tensor) -> Any:
    """A number as it is, and a tensor in the compute dtype and on the device of `like`."""
    if not isinstance(number, Tensor):
        return number
    return number.to(like.device, compute_dtype(like.dtype))
