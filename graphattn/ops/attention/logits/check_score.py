"""The check of a score: shapes, dtypes, agreement of its two methods, and gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from graphattn.graphs.arguments import as_int
from graphattn.ops.attention.logits.score import Method, Score, as_score, logits_by

AGREE = 1e-4  # the difference of equal logits in float32, as a share of their mean size
STEP = 1e-4  # of finite differences, in float64
SLOPE = 1e-2  # the difference of equal slopes, as a share of them


def check_score(score: Score, heads: int, head_dim: int) -> None:
    """Check a :class:`Score` of your own, on a few random queries and keys.

    The checks are: logits have the right shape and dtype; `edges` and `pairs` agree; the logit of
    an edge depends on its own query and key only, and is the same in every call; inputs are not
    changed; gradients reach queries, keys and all parameters, agree with differences of the logits,
    and are finite for tokens that are 0 (as invalid ones are) and for a key that equals its query.

    Args:
        score: a score; it is called on the device of its tensors.
        heads: H, the number of heads for which it is made.
        head_dim: D, the features of a head.

    Raises:
        ValueError: names the method that is wrong, and says what it must give; if the method raised
            an error, that is the cause.

    Example:
        >>> import torch, graphattn as ga
        >>> class Cosine(ga.Score):
        ...     def edges(self, query, key):
        ...         return 10 * torch.nn.functional.cosine_similarity(query, key, dim=-1)
        >>> ga.check_score(Cosine(), heads=4, head_dim=8)
        >>> class Product(ga.Score):
        ...     def edges(self, query, key):
        ...         return query * key  # without the sum over features
        >>> ga.check_score(Product(), heads=4, head_dim=8)
        Traceback (most recent call last):
            ...
        ValueError: Product.edges() must give floating-point logits of shape [5, 4] for query ...
    """
    score = as_score(score)
    heads, head_dim = as_int("heads", heads, 1), as_int("head_dim", head_dim, 1)
    held = dict(_tensors(score))
    dtype = torch.float64 if any(x.dtype == torch.float64 for x in held.values()) else torch.float32
    device = next((x.device for x in held.values()), torch.device("cpu"))
    draw = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        x = torch.randn(*shape, head_dim, generator=draw, dtype=torch.float64)
        return x.to(device, dtype)

    with torch.no_grad():
        ready = score.ready(heads, random(1, heads))
        for shape, other in (((5,), (5,)), ((2, 5), (2, 5)), ((3, 1), (1, 4)), ((0,), (0,))):
            _check_call(ready, "edges", random(*shape, heads), random(*other, heads), held)
        _check_independence(ready, random(5, heads), random(5, heads))
        if _has_pairs(score):
            for n, m, batch in ((3, 4, ()), (1, 4, (2,))):
                query, key = random(*batch, heads, n), random(*batch, heads, m)
                logits = _check_call(ready, "pairs", query, key, held)
                _check_agreement(ready, logits, Score.pairs(ready, query, key))
                query[..., :1, :], key[..., :1, :] = torch.nan, torch.nan
                spoilt = logits_by(ready, "pairs", query, key)[..., 1:, 1:]
                _check_same(ready, "pairs", logits[..., 1:, 1:], spoilt)
    dtype = torch.float64  # from here on, also of `random`
    _check_gradients(score, "edges", random(5, heads), random(5, heads))
    if _has_pairs(score):
        _check_gradients(score, "pairs", random(heads, 3), random(heads, 3))


def _has_pairs(score: Score) -> bool:
    """Whether the score has its own form for all pairs."""
    return type(score).pairs is not Score.pairs


def _wrong(score: Score, method: Method, what: str) -> ValueError:
    return ValueError(f"{type(score).__name__}.{method}() {what}")


def _check_call(
    score: Score, method: Method, query: Tensor, key: Tensor, held: dict[str, Tensor]
) -> Tensor:
    """The logits of a call, after checks of their shape, and that the call changed no tensor."""
    tensors = {"query": query, "key": key, **held}
    before = {name: x._version for name, x in tensors.items()}
    logits = logits_by(score, method, query, key)
    for name, x in tensors.items():
        if x._version != before[name]:
            raise _wrong(
                score,
                method,
                f"must not change {name} in place, which others read: write x = x * 2, not x *= 2",
            )
    again = logits_by(score, method, query, key)
    if not torch.equal(logits.nan_to_num(), again.nan_to_num()):
        raise _wrong(
            score, method, "must give the same logits in every call, got others in a second one"
        )
    return logits


def _check_independence(score: Score, query: Tensor, key: Tensor) -> None:
    """Check that the logits of an edge do not depend on other edges, even if those are NaN."""
    logits = logits_by(score, "edges", query, key)
    for e in range(len(query)):
        alone = logits_by(score, "edges", query[e : e + 1], key[e : e + 1])
        _check_same(score, "edges", logits[e : e + 1], alone)
    batch = torch.stack([query, 2 * query]), torch.stack([key, key])
    _check_same(score, "edges", logits, logits_by(score, "edges", *batch)[0])
    query, key = query.clone(), key.clone()
    query[0], key[0] = torch.nan, torch.nan
    _check_same(score, "edges", logits[1:], logits_by(score, "edges", query, key)[1:])


def _check_same(score: Score, method: Method, logits: Tensor, other: Tensor) -> None:
    same = (logits == other) | ((logits - other).abs() <= _tolerance(logits))  # inf - inf is NaN
    if not bool(same.all()):
        raise _wrong(
            score,
            method,
            "must give logits that depend on their own query and key only, but they change with "
            "other edges or sequences of the call: no mean, norm or softmax may be over them",
        )


def _tolerance(logits: Tensor) -> float:
    return AGREE * (1 + float(logits.nan_to_num(0, 0, 0).abs().sum() / max(logits.numel(), 1)))


def _check_agreement(score: Score, logits: Tensor, expected: Tensor) -> None:
    """Check that the logits of `pairs` [*, H, n, m] are those of `edges`."""
    same = (logits == expected) | ((logits - expected).abs() <= _tolerance(expected))
    if bool(same.all()):
        return
    place = (~same).nonzero()[0].tolist()
    h, i, j = place[-3:]
    raise _wrong(
        score,
        "pairs",
        f"must give the logits of edges(), got {float(logits[tuple(place)]):.4g} where that gives "
        f"{float(expected[tuple(place)]):.4g} (head {h}, query {i}, key {j})",
    )


# Gradients. They are checked in float64, with a copy of the score whose tensors are leaves.


def _check_gradients(score: Score, method: Method, query: Tensor, key: Tensor) -> None:
    """Compare gradients of the inputs and parameters with differences of the logits."""
    leaves: dict[str, Tensor] = {}
    wide = _wide(score, "", leaves)
    query, key = query.requires_grad_(), key.requires_grad_()
    leaves = {"query": query, "key": key, **leaves}

    def logits() -> Tensor:
        return logits_by(
            wide.ready(key.shape[-2 if method == "edges" else -3], query), method, query, key
        )

    first = logits()
    weights = torch.linspace(0.5, 1.5, first.numel(), dtype=first.dtype, device=first.device)

    def total() -> Tensor:
        return (logits() * weights.view_as(first)).sum()

    slopes = _gradients(score, method, total(), leaves)
    for name, x in leaves.items():
        slope = slopes[name]
        with torch.no_grad():
            value = x.clone()
            step = torch.linspace(-1, 1.3, x.numel(), dtype=x.dtype, device=x.device)
            step = STEP * step.view_as(x)
            before = logits()
            x.copy_(1.5 * value + 0.1)
            matters = not torch.equal(logits(), before)
            x.copy_(value + step)
            more = total()
            x.copy_(value - step)
            difference = float(more - total()) / 2
            x.copy_(value)
        if slope is None or not bool(slope.any()):
            if matters:
                raise _wrong(
                    score,
                    method,
                    f"must give gradients to {name}, on which its logits depend, got none: look "
                    "for detach(), item(), data, a new tensor made of its values, or a step "
                    "without a derivative such as round() or a comparison",
                )
            continue
        expected = float((slope * step).sum())
        if abs(difference) > 1e-9 and not abs(difference - expected) <= SLOPE * abs(difference):
            raise _wrong(
                score,
                method,
                f"gives wrong gradients to {name}: logits grow by {difference / STEP:.4g} per "
                f"step, the gradient says {expected / STEP:.4g}: look for detach() of a part, or a "
                "backward() of your own",
            )
    _check_special_tokens(score, method, logits, leaves)


def _check_special_tokens(
    score: Score, method: Method, logits: Callable[[], Tensor], leaves: dict[str, Tensor]
) -> None:
    """Check that logits and gradients are finite for tokens that are 0, and for equal ones."""
    query, key = leaves["query"], leaves["key"]
    first = (..., slice(0, 1), slice(None)) if method == "pairs" else slice(0, 1)
    for case, q, k in (
        ("query is 0", 0, None),
        ("key is 0", None, 0),
        ("key is equal to query", None, query.detach()[first]),
        ("query and key are 0", 0, 0),
    ):
        with torch.no_grad():
            before = query.clone(), key.clone()
            if q is not None:
                query[first] = q
            if k is not None:
                key[first] = k
        values = logits()
        slopes = _gradients(score, method, values.sum(), leaves)
        with torch.no_grad():
            query.copy_(before[0])
            key.copy_(before[1])
        bad = [name for name, x in slopes.items() if x is not None and not x.isfinite().all()]
        if bool(values.isnan().any()) or bad:
            what = f"the gradient of {bad[0]} is not finite" if bad else "the logit is NaN"
            raise _wrong(
                score,
                method,
                f"must give finite gradients for all tokens, but if {case}, {what}. Tokens that "
                "are not valid are 0: add a small number before a division, a square root or a "
                "logarithm",
            )


def _gradients(
    score: Score, method: Method, total: Tensor, leaves: dict[str, Tensor]
) -> dict[str, Tensor | None]:
    if not total.requires_grad:
        return dict.fromkeys(leaves)
    try:
        gradients = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    except RuntimeError as error:
        raise _wrong(
            score, method, f"must have gradients, but there is an error: {error}"
        ) from error
    return dict(zip(leaves, gradients, strict=True))


def _tensors(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The floating-point tensors of a score with their names, those of modules inside included."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield name, value
        return
    parts: Any = ()
    if isinstance(value, nn.Module):
        parts = value.state_dict(keep_vars=True).items()
    elif isinstance(value, Score):
        parts = vars(value).items()
    elif isinstance(value, dict):
        parts = value.items()
    elif isinstance(value, list | tuple):
        parts = enumerate(value)
    for key, part in parts:
        yield from _tensors(part, f"{name}.{key}" if name else str(key))


def _wide(value: Any, name: str, leaves: dict[str, Tensor]) -> Any:
    """A copy in float64; the tensors that need gradients are leaves, and are added to `leaves`."""
    if isinstance(value, Tensor):
        if not value.is_floating_point():
            return value
        wide = value.detach().to(torch.float64, copy=True).requires_grad_(value.requires_grad)
        if value.requires_grad:
            leaves[name] = wide
        return wide
    if isinstance(value, nn.Module):
        module = copy.deepcopy(value).double()
        for key, parameter in module.named_parameters(prefix=name):
            if parameter.requires_grad:
                leaves[key] = parameter
        return module

    def inside(key: Any, part: Any) -> Any:
        return _wide(part, f"{name}.{key}" if name else str(key), leaves)

    if isinstance(value, Score):
        same = object.__new__(type(value))
        vars(same).update({key: inside(key, part) for key, part in vars(value).items()})
        return same
    if isinstance(value, dict):
        return {key: inside(key, part) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(inside(key, part) for key, part in enumerate(value))
    return value
