"""Schedules of mask ratios: what is drawn has the distribution that the formulas say."""

import math

import pytest
import torch
from scipy import integrate, stats

import graphattn as ga
from graphattn.train.objectives.masking import SCHEDULES

DRAWS = 100_000
DRAWN = [name for name in SCHEDULES if name != "constant"]
CDF = {
    "linear": stats.uniform().cdf,
    "cosine": lambda r: 2 / math.pi * torch.asin(torch.as_tensor(r)).numpy(),
    "sqrt": lambda r: 1 - (1 - r) ** 2,
    "betalinear30": lambda r: 0.8 * stats.beta(3, 9).cdf(r) + 0.2 * r,
}


def ratios(schedule: str, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return ga.train.mask_ratios(schedule, DRAWS, generator=generator).double()


@pytest.mark.every_case
@pytest.mark.parametrize("schedule", DRAWN)
def test_drawn_ratios_have_the_distribution_of_the_schedule(schedule):
    """Kolmogorov and Smirnov: a wrong formula that differs by 1 % somewhere would fail."""
    drawn = ratios(schedule)
    assert drawn.min() >= 0
    assert drawn.max() <= 1
    assert stats.kstest(drawn.numpy(), CDF[schedule]).pvalue > 1e-3


@pytest.mark.every_case
@pytest.mark.parametrize("schedule", DRAWN)
def test_the_density_is_the_derivative_of_the_distribution_and_has_the_mean_that_is_said(schedule):
    distribution = ga.train.MaskSchedule(schedule)

    def density(r: float) -> float:
        return float(distribution.density(torch.tensor(r, dtype=torch.float64)))

    for r in (0.05, 0.3, 0.61, 0.94):
        assert integrate.quad(density, 0, r)[0] == pytest.approx(float(CDF[schedule](r)), abs=1e-7)
    mean = integrate.quad(lambda r: r * density(r), 0, 1)[0]
    assert distribution.mean == pytest.approx(mean, abs=1e-6)
    drawn = ratios(schedule)
    assert abs(float(drawn.mean()) - distribution.mean) < 5 * float(drawn.std()) / math.sqrt(DRAWS)


def test_the_mean_of_betalinear30_is_30_percent():
    assert ga.train.MaskSchedule("betalinear30").mean == pytest.approx(0.8 * 3 / 12 + 0.2 / 2)


def test_cosine_and_sqrt_are_those_functions_of_uniform_numbers():
    t = torch.rand(50, generator=torch.Generator().manual_seed(3))
    expected = {"linear": 1 - t, "cosine": (math.pi / 2 * t).cos(), "sqrt": 1 - t**0.5}
    for name, ratio in expected.items():
        drawn = ga.train.mask_ratios(name, 50, generator=torch.Generator().manual_seed(3))
        torch.testing.assert_close(drawn, ratio)


def test_a_constant_ratio_is_constant_and_draws_nothing():
    generator = torch.Generator().manual_seed(0)
    before = generator.get_state()
    drawn = ga.train.mask_ratios("constant", 4, mask_ratio=0.4, generator=generator)
    assert drawn.tolist() == pytest.approx([0.4] * 4)
    assert torch.equal(generator.get_state(), before)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("betalinear", 3), "schedule must be one of 'constant', 'linear', 'cosine'"),
        (("cosine", -1), "size must be >= 0"),
    ],
)
def test_bad_arguments_are_named(arguments, says):
    with pytest.raises(ValueError, match=says):
        ga.train.mask_ratios(*arguments)


def test_a_constant_ratio_must_be_a_share_and_has_no_density():
    with pytest.raises(ValueError, match=r"mask_ratio must be in \(0, 1\]"):
        ga.train.mask_ratios("constant", 2, mask_ratio=1.5)
    with pytest.raises(ValueError, match="density"):
        ga.train.MaskSchedule("constant").density(torch.tensor([0.5]))
