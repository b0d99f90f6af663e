"""Features turned by compiled code, with the bits that operations of torch give."""

from __future__ import annotations

import builds
import pytest
import torch
from torch import Tensor

import graphattn as ga
from graphattn.kernels.cpu import library
from graphattn.nn import rotary as of_layers
from graphattn.ops import rotary

if library.why_not() is not None:
    pytest.skip(str(library.why_not()), allow_module_level=True)

DTYPES = torch.float32, torch.float64, torch.float16, torch.bfloat16
SHAPES = (1, 1, 2), (7, 3, 6), (2, 65, 3, 18), (2, 3, 130, 1, 64), (0, 5, 2, 4), (2, 0, 2, 4)


def features(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    if x.numel() > 4:
        x.view(-1)[:3] = torch.tensor([0.0, 1e-30, 300.0])
    return x.to(dtype)


def positions_of(shape: tuple[int, ...], per_sample: bool) -> Tensor:
    count = shape[:-2] if per_sample else shape[-3:-2]
    return torch.randint(0, 10_000, count, generator=torch.Generator().manual_seed(1))


def by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_layers, "can_rotate", lambda *_: False)


@pytest.mark.parametrize("per_sample", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_has_the_bits_of_torch(
    dtype: torch.dtype, shape: tuple[int, ...], per_sample: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled code has the bits of torch in outputs and in all gradients.

    That is so for features that lie apart in memory, too.
    """
    turn, positions = ga.nn.RotaryEmbedding(shape[-1]), positions_of(shape, per_sample)
    x, upstream = features(shape, dtype), features(shape, dtype).flip(-1)
    asked = []
    monkeypatch.setattr(
        rotary, "view", lambda x, view=rotary.view: asked.append(x) or view(x), raising=True
    )
    results = []
    for _ in range(2):
        for back in (False, True):
            apart = x.transpose(-3, -2).contiguous().transpose(-3, -2)
            narrow = torch.cat([x, x], dim=-1)[..., : shape[-1]]
            for given in (x, apart, narrow, torch.stack([x, x], dim=-1)[..., 0]):
                leaf = given.detach().requires_grad_()
                out = turn(leaf, positions, back=back)
                results.append((out.detach(), *torch.autograd.grad(out, leaf, upstream)))
        assert asked  # compiled code was there the first time
        by_torch(monkeypatch)
    for mine, other in zip(results[: len(results) // 2], results[len(results) // 2 :], strict=True):
        for a, b in zip(mine, other, strict=True):
            assert a.dtype == dtype
            assert a.shape == shape
            assert torch.equal(a, b)


def test_second_derivatives_are_right() -> None:
    turn, positions = ga.nn.RotaryEmbedding(4), torch.tensor([0, 3, 17])
    x = features((2, 3, 2, 4), torch.float64).clamp(-1, 1).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: turn(x, positions), x)
    assert torch.autograd.gradgradcheck(lambda x: turn(x, positions).square(), x)


def test_learned_positions_have_gradients() -> None:
    """Compiled code has none for angles: it leaves these calls to torch."""
    positions = torch.tensor([0.5, 2.0, 3.5], dtype=torch.float64, requires_grad=True)
    x, turn = features((3, 2, 4), torch.float64).clamp(-1, 1), ga.nn.RotaryEmbedding(4)
    assert torch.autograd.gradcheck(lambda p: turn(x, p), positions)


def test_what_looks_into_steps_sees_them() -> None:
    turn, x = ga.nn.RotaryEmbedding(4), features((2, 5, 2, 4), torch.float32)
    assert torch.equal(torch.func.vmap(turn)(x), turn(x))
    _, tangent = torch.func.jvp(turn, (x,), (x,))
    torch.testing.assert_close(tangent, turn(x))  # a rotation is linear
    traced = torch.jit.trace(turn, x, check_trace=False)
    assert torch.equal(traced(2 * x), turn(2 * x))


@pytest.mark.parametrize("back", [False, True])
def test_gradients_of_many_directions_at_once_are_those_of_each(back: bool) -> None:
    turn, x = ga.nn.RotaryEmbedding(6), features((2, 7, 3, 6), torch.float32).requires_grad_()
    out, directions = turn(x, back=back), torch.randn(4, 2, 7, 3, 6)
    each = [torch.autograd.grad(out, x, d, retain_graph=True)[0] for d in directions]
    (at_once,) = torch.autograd.grad(out, x, directions, is_grads_batched=True)
    assert torch.equal(at_once, torch.stack(each))


@pytest.mark.parametrize(
    ("of_cosines", "of_sines"),
    [((7, 3, 2), (7, 3, 2)), ((7, 1, 2), (1, 1, 2)), ((3, 2), (3, 2)), ((2,), (7, 1, 2))],
    ids=str,
)
def test_angles_of_other_shapes_are_broadcast(
    of_cosines: tuple[int, ...], of_sines: tuple[int, ...]
) -> None:
    """One per head, say, which only who calls `turn` itself can ask for."""
    x, cosines, sines = torch.randn(7, 3, 4), torch.randn(of_cosines), torch.randn(of_sines)
    pairs = torch.complex(*x.chunk(2, dim=-1)) * torch.complex(
        cosines.expand(7, 3, 2), sines.expand(7, 3, 2)
    )
    expected = torch.cat([pairs.real, pairs.imag], dim=-1)
    torch.testing.assert_close(ga.nn.RotaryEmbedding(4).turn(x, (cosines, sines)), expected)


def test_the_result_may_be_written_to() -> None:
    x = features((5, 2, 4), torch.float32).requires_grad_()
    out = ga.nn.RotaryEmbedding(4)(x).add_(1)
    out.sum().backward()
    assert x.grad is not None


@pytest.mark.long
@pytest.mark.parametrize("build", library.BUILDS)
def test_every_build_has_the_bits_of_torch(build: str) -> None:
    builds.run_with(
        build,
        "import pytest, test_native_rotary as native\n"
        "for shape in native.SHAPES:\n"
        "    for dtype in native.DTYPES:\n"
        "        with pytest.MonkeyPatch.context() as patch:\n"
        "            native.test_it_has_the_bits_of_torch(dtype, shape, True, patch)",
    )


@pytest.mark.parametrize("shapes", [((5, 2, 4), (3, 5, 1, 4)), ((3, 5, 2, 4), (5, 1, 4))], ids=str)
def test_two_tensors_of_other_samples_are_not_read_as_of_one_number(
    shapes: tuple[tuple[int, ...], ...],
) -> None:
    turn = ga.nn.RotaryEmbedding(4)
    rotation = turn.rotation(torch.arange(5), torch.float32)
    both = [features(shape, torch.float32) for shape in shapes]
    for x, rotated in zip(both, turn.turn_both(both[0], both[1], rotation), strict=True):
        assert torch.equal(rotated, turn(x))
