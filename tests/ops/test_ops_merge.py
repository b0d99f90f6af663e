"""Attention over parts merges into attention over all, and candidates into top-k over all."""

import pytest
import torch
from cases_ops import random, random_mask
from torch import Tensor

import graphattn as ga

EXACT = {"rtol": 1e-10, "atol": 1e-12}


def split_edges(mask: Tensor, parts: int, seed: int = 0) -> list[ga.TokenGraph]:
    """The edges of a mask dealt out at random."""
    generator = torch.Generator().manual_seed(seed)
    owner = torch.randint(parts, mask.shape, generator=generator)
    return [ga.from_mask(mask & (owner == p)) for p in range(parts)]


@pytest.mark.parametrize("strength", [{}, {"sigma": 1.3}], ids=["dot", "rbf"])
@pytest.mark.parametrize("parts", [1, 2, 5])
def test_parts_of_the_edges_merge_into_all_of_them(strength, parts):
    mask = random_mask(7, 11, 0.4, seed=3)
    mask[2] = False  # a target without any edge
    q, k, v = random(2, 7, 4, 3, seed=1), random(2, 11, 2, 3, seed=2), random(2, 11, 2, 5, seed=3)
    operation = ga.rbf_attention if strength else ga.dot_product_attention
    found = [
        operation(q, k, v, graph, return_lse=True, **strength) for graph in split_edges(mask, parts)
    ]
    out, lse = ga.merge_attention(found)
    expected = operation(q, k, v, ga.from_mask(mask), return_lse=True, **strength)
    torch.testing.assert_close((out, lse), expected, **EXACT)
    assert (out[:, 2] == 0).all()
    assert (lse[:, 2] == -torch.inf).all()


def test_merging_in_any_order_and_grouping_gives_the_same():
    parts = [(random(6, 2, 3, seed=s), 5 * random(6, 2, seed=s + 50)) for s in range(4)]
    together = ga.merge_attention(parts)
    backward = ga.merge_attention(parts[::-1])
    nested = ga.merge_attention([ga.merge_attention(parts[:3]), parts[3]])
    for other in (backward, nested):
        torch.testing.assert_close(together, other, **EXACT)


def test_log_sums_far_apart_and_far_from_zero_merge():
    near, far = torch.ones(1, 1, 2), torch.full((1, 1, 2), 3.0)
    for shift in (0.0, 1e4, -1e4):
        lse = torch.full((1, 1), shift)
        out, total = ga.merge_attention([(near, lse), (far, lse)])
        torch.testing.assert_close(out, torch.full((1, 1, 2), 2.0))
        torch.testing.assert_close(total, lse + torch.tensor(2.0).log())
        out, total = ga.merge_attention([(near, lse), (far, lse - 1e3)])
        assert torch.equal(out, near)
        assert torch.equal(total, lse)


def test_a_part_without_sources_is_not_read_whatever_it_holds():
    """torch's fused attention gives NaN for a row that is all masked."""
    out, lse = random(4, 2, 3, seed=1), random(4, 2, seed=2)
    nothing = torch.full_like(out, torch.nan), torch.full_like(lse, -torch.inf)
    tensors = [x.requires_grad_() for x in (out, lse, *nothing)]
    merged, total = ga.merge_attention([(out, lse), nothing])
    torch.testing.assert_close(merged, out, **EXACT)
    torch.testing.assert_close(total, lse, **EXACT)
    gradients = torch.autograd.grad(merged.square().sum() + total.sum(), tensors)
    assert all(g.isfinite().all() for g in gradients)
    assert (gradients[2] == 0).all()
    assert (gradients[3] == 0).all()


def test_no_sources_anywhere_give_zeros_and_no_gradient():
    out = random(4, 2, 3, seed=1).requires_grad_()
    lse = torch.full((4, 2), -torch.inf, dtype=torch.float64, requires_grad=True)
    merged, total = ga.merge_attention([(out, lse)] * 3)
    assert (merged == 0).all()
    assert (total == -torch.inf).all()
    usable = torch.where(total.isfinite(), total, 0)
    for g in torch.autograd.grad(merged.sum() + usable.sum(), (out, lse)):
        assert (g == 0).all()


def test_a_number_that_is_none_reaches_its_own_rows_only():
    out, lse = random(4, 2, 3, seed=1), random(4, 2, seed=2)
    broken, low = out.clone(), lse.clone()
    broken[1, 0, 2] = torch.nan
    low[1, 0] = -1e6  # a weight that is 0 as a number: one pass would give 0 * NaN too
    merged, _ = ga.merge_attention([(out, lse), (broken, low)])
    bad = torch.zeros(4, 2, 3, dtype=torch.bool)
    bad[1, 0, 2] = True
    assert torch.equal(merged.isnan(), bad)


def test_gradients_are_right_twice():
    inputs = [random(3, 2, 2, seed=s).requires_grad_() for s in range(2)]
    sums = [random(3, 2, seed=s + 9).requires_grad_() for s in range(2)]

    def run(a, b, x, y):
        return ga.merge_attention([(a, x), (b, y)])

    assert torch.autograd.gradcheck(run, (*inputs, *sums))
    assert torch.autograd.gradgradcheck(run, (*inputs, *sums))


def test_gradients_through_parts_are_those_of_one_pass():
    mask = random_mask(7, 9, 0.5, seed=3)
    mask[4] = False
    tensors = [random(n, 2, 3, seed=s).requires_grad_() for s, n in enumerate((7, 9, 9))]
    parts = [
        ga.rbf_attention(*tensors, graph, 1.3, return_lse=True) for graph in split_edges(mask, 3)
    ]
    direction = random(7, 2, 3, seed=8)
    merged = torch.autograd.grad(ga.merge_attention(parts)[0], tensors, direction)
    whole = torch.autograd.grad(
        ga.rbf_attention(*tensors, ga.from_mask(mask), 1.3), tensors, direction
    )
    torch.testing.assert_close(merged, whole, **EXACT)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_merged_in_float32(dtype):
    parts = [
        (random(5, 2, 3, seed=s, dtype=dtype), random(5, 2, seed=s + 9).float()) for s in range(3)
    ]
    out, lse = ga.merge_attention(parts)
    expected = ga.merge_attention([(a.float(), b) for a, b in parts])
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    assert torch.equal(out, expected[0].to(dtype))
    assert torch.equal(lse, expected[1])


@pytest.mark.long
def test_it_compiles_whole():
    compiled = torch.compile(ga.merge_attention, fullgraph=True, backend="eager")
    for n in (3, 8, 20):
        parts = [(random(n, 2, 3, seed=s), random(n, 2, seed=s + 9)) for s in range(2)]
        torch.testing.assert_close(compiled(parts), ga.merge_attention(parts), **EXACT)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([], "parts must hold at least one pair"),
        ([torch.ones(3, 2, 4)], r"parts\[0\] must be a pair .*got Tensor"),
        ([(torch.ones(3, 2, 4),)], r"parts\[0\] must be a pair .*got 1 of them"),
        ([(torch.ones(3, 2, 4), None)], r"parts\[0\]: lse must be .*got NoneType"),
        ([(torch.ones(3, 2, 4), torch.ones(3, 4))], r"parts\[0\] must .*\[3, 2, 4\] and \[3, 4\]"),
        (
            [(torch.ones(3, 2, 4), torch.ones(3, 2)), (torch.ones(4, 2, 4), torch.ones(4, 2))],
            r"parts\[1\] must be like parts\[0\], torch.float32 \[3, 2, 4\], .*\[4, 2, 4\]",
        ),
        (
            [(torch.ones(1, 2, 4), torch.ones(1, 2)), (torch.ones(1, 2, 4).double(),) * 2],
            r"parts\[1\] must be \(out .*got \[1, 2, 4\] and \[1, 2, 4\]",
        ),
    ],
)
def test_parts_that_do_not_fit_are_refused_by_name(parts, message):
    with pytest.raises(ValueError, match=message):
        ga.merge_attention(parts)
