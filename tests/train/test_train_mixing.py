"""Mixup and CutMix: pixels and labels are mixed in the same shares, in training only."""

from __future__ import annotations

import copy
import math
import os
import pickle
import signal

import pytest
import tiny_runs
import torch
from draws import generator
from scipy.stats import kstest
from torch import nn

import graphattn as ga
from graphattn.train.batches import lengths_of

K = 5


def marked(batch: int, height: int = 7, width: int = 10, dtype=torch.float64) -> torch.Tensor:
    """Images whose pixels say which image they are of."""
    return torch.arange(batch, dtype=dtype)[:, None, None, None].expand(-1, 2, height, width)


@pytest.mark.parametrize("alpha", [0.2, 0.8, 3.0])
def test_mixup_mixes_pixels_and_labels_with_one_share_of_the_beta_distribution(alpha):
    source, label, found = generator(), torch.arange(4), []
    images = torch.randn(4, 3, 2, 5, dtype=torch.float64, generator=source)
    for _ in range(200):
        mixed, target = ga.train.mix_images(images, label, 4, mixup=alpha, generator=source)
        share = float(target[0, 0])
        for i in range(4):
            wanted = share * images[i] + (1 - share) * images[3 - i]
            torch.testing.assert_close(mixed[i], wanted, rtol=1e-6, atol=1e-6)
            expected = {i: share, 3 - i: 1 - share}
            assert target[i].tolist() == pytest.approx([expected.get(k, 0.0) for k in range(4)])
        found.append(share)
    assert kstest(found, "beta", (alpha, alpha)).pvalue > 1e-3


@pytest.mark.parametrize("size", [(7, 10), (8, 8), (1, 6), (1, 1)])
def test_the_label_share_of_cutmix_is_the_share_of_pixels_that_were_not_replaced(size):
    source, clipped = generator(1), 0
    images = marked(4, *size)
    for _ in range(150):
        mixed, target = ga.train.mix_images(
            images, torch.arange(4), 4, cutmix=1.0, generator=source
        )
        for i in range(4):
            pasted = mixed[i] == 3 - i
            assert bool((pasted | (mixed[i] == i)).all())
            assert torch.equal(pasted[0], pasted[1])
            share = float(pasted.double().mean())
            assert float(target[i, 3 - i]) == pytest.approx(share, abs=1e-15)
            assert float(target[i].sum()) == pytest.approx(1, abs=1e-12)
            rows, columns = pasted[0].any(1), pasted[0].any(0)
            assert torch.equal(pasted[0], rows[:, None] & columns)  # a box
        if rows.any() and (rows[0] or rows[-1] or columns[0] or columns[-1]):
            clipped += 1
    assert clipped > 0 or 1 in size  # half of one pixel is none


def test_the_box_has_the_area_that_the_beta_distribution_says_before_it_is_clipped():
    """Algorithm A1 of the CutMix paper, with every draw made again by hand."""
    height, width, places = 31, 45, []
    for seed in range(60):
        mixed, target = ga.train.mix_images(
            marked(2, height, width), torch.arange(2), 2, cutmix=1.0, generator=generator(seed)
        )
        again = generator(seed)
        share = float(torch._sample_dirichlet(torch.ones(2), again)[0])
        y, x = (int(torch.randint(size, (), generator=again)) for size in (height, width))
        tall, wide = (int(size * math.sqrt(1 - share)) // 2 for size in (height, width))
        inside = torch.zeros(height, width, dtype=torch.bool)
        for i in range(y - tall, y + tall):
            for j in range(x - wide, x + wide):
                if 0 <= i < height and 0 <= j < width:
                    inside[i, j] = True
        assert torch.equal(mixed[0, 0] == 1, inside)
        expected = float(inside.double().mean())
        assert float(target[0, 1]) == pytest.approx(expected, abs=1e-12)
        places.append(share)
    assert kstest(places, "uniform").pvalue > 1e-3  # Beta(1, 1)


def test_with_both_on_half_of_the_batches_are_of_each():
    source, cut = generator(2), 0
    for _ in range(400):
        mixed, _ = ga.train.mix_images(
            marked(2, 32, 32), torch.arange(2), 2, mixup=1.0, cutmix=1.0, generator=source
        )
        cut += bool(((mixed == 0) | (mixed == 1)).all())
    assert abs(cut / 400 - 0.5) < 4 * math.sqrt(0.25 / 400)


def test_without_alphas_images_stay_and_labels_become_one_hot():
    images = marked(3)
    mixed, target = ga.train.mix_images(images, torch.tensor([1, 0, 1]), 2)
    assert torch.equal(mixed, images)
    assert target.tolist() == [[0, 1], [1, 0], [0, 1]]


@pytest.mark.parametrize("mode", ["mixup", "cutmix"])
def test_a_batch_keeps_its_images_dtype_and_gradients_and_may_be_of_one_or_none(mode):
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        images = marked(3, dtype=dtype).clone().requires_grad_()
        before = images.detach().clone()
        mixed, target = ga.train.mix_images(images, torch.tensor([0, 1, 1]), 2, **{mode: 1.0})
        assert mixed.dtype == dtype
        assert target.dtype == torch.promote_types(dtype, torch.float32)
        mixed.sum().backward()
        total = images.grad.double().sum()  # every pixel is in one or two images
        assert float(total) == pytest.approx(images.numel(), rel=1e-2)
        assert torch.equal(images.detach(), before)
    alone, target = ga.train.mix_images(marked(1), torch.tensor([1]), 2, **{mode: 1.0})
    assert torch.equal(alone, marked(1))
    assert target.tolist() == [[0, 1]]
    none, target = ga.train.mix_images(marked(0), torch.zeros(0).long(), 2, **{mode: 1.0})
    assert (none.shape, target.shape) == ((0, 2, 7, 10), (0, 2))


def test_the_generator_gives_the_numbers_and_none_means_torchs_own():
    call = {"mixup": 0.8, "cutmix": 1.0}
    images, label = torch.rand(6, 1, 8, 8), torch.arange(6) % K
    ours = ga.train.mix_images(images, label, K, **call, generator=generator(3))
    torch.manual_seed(3)
    default = ga.train.mix_images(images, label, K, **call)
    same = ga.train.mix_images(images, label, K, **call, generator=generator(3))
    for one, two, three in zip(ours, default, same, strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one, three)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"mixup": -0.1}, r"mixup must be a finite number >= 0, got -0.1"),
        ({"cutmix": "big"}, r"cutmix must be a finite number >= 0, got 'big'"),
        ({"mixup": math.inf}, r"mixup must be a finite number"),
        ({"images": torch.zeros(2, 8, 8)}, r"images must be a floating-point tensor \[B, C, H, W"),
        ({"images": torch.zeros(2, 1, 8, 8).byte()}, r"images must be .* got torch.uint8"),
        ({"label": torch.zeros(2)}, r"label must be an integer tensor \[2\], .* got torch.float32"),
        ({"label": torch.zeros(3).long()}, r"label must be .* \[2\], .* shape \[3\]"),
        ({"label": torch.tensor([0, K])}, rf"label must be 0 .. {K - 1}, got {K}"),
        ({"num_classes": 1}, r"num_classes must be >= 2"),
    ],
)
def test_bad_arguments_are_named(change, says):
    given = {"images": torch.zeros(2, 1, 8, 8), "label": torch.zeros(2).long(), "num_classes": K}
    with pytest.raises(ValueError, match=says):
        ga.train.mix_images(**given | change)


# The objective.


class Recorder(nn.Module):
    """A linear model that keeps the images it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(4, 3).double()

    def forward(self, images):
        self.seen = images
        return self.map(images.flatten(1))


def batch_of(objective, count=6):
    random = generator(5)
    return objective.collate(
        [
            {"image": torch.rand(1, 2, 2, dtype=torch.float64, generator=random), "label": k % 3}
            for k in range(count)
        ]
    )


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("mode", [{"mixup": 0.8}, {"cutmix": 1.0}, {"mixup": 0.8, "cutmix": 1.0}])
def test_the_loss_is_cross_entropy_with_the_mixed_and_smoothed_distribution(mode, smoothing):
    objective, model = ga.train.Classification(3, smoothing, **mode), Recorder()
    batch = batch_of(objective)
    for seed in range(8):
        loss = objective.loss(model, batch, generator(seed))
        images, target = ga.train.mix_images(
            batch["image"], batch["label"], 3, **mode, generator=generator(seed)
        )
        assert torch.equal(model.seen, images)
        total = nats = right = 0.0
        for row, goal in zip(model.map(images.flatten(1)).detach(), target, strict=True):
            p = row.softmax(0)
            nats -= sum(float(goal[k] * p[k].log()) for k in range(3))
            for k in range(3):
                total -= ((1 - smoothing) * float(goal[k]) + smoothing / 3) * float(p[k].log())
            right += int(p.argmax()) == int(goal.argmax())
        assert float(loss.total.detach()) == pytest.approx(total, rel=1e-12)
        assert loss.sums["nats"] == pytest.approx(nats, rel=1e-12)
        assert (loss.count, loss.sums["accuracy"]) == (6, right)
        loss.mean.backward()
    assert batch["image"] is not model.seen


def test_an_evaluation_sees_the_images_as_they_are():
    plain = ga.train.Classification(3, 0.1)
    changing = ga.train.Classification(3, 0.1, mixup=0.8, cutmix=1.0, augment=torch.zeros_like)
    model = Recorder()
    batch = batch_of(plain)
    assert changing.evaluate(model, [batch]) == plain.evaluate(model, [batch])
    assert torch.equal(model.seen, batch["image"])
    assert model.training
    changing.loss(model, batch)
    assert not torch.equal(model.seen, batch["image"])


def test_augment_comes_before_mixing_and_draws_from_a_generator_if_there_is_one():
    def noisy(images):
        return images + torch.randn_like(images)

    objective, model = ga.train.Classification(3, augment=noisy), Recorder()
    batch = batch_of(objective)
    torch.manual_seed(4)
    objective.loss(model, batch)
    torch.manual_seed(4)
    assert torch.equal(model.seen, noisy(batch["image"]))
    before, seen = torch.get_rng_state(), []
    for seed in (0, 0, 1):
        objective.loss(model, batch, generator(seed))
        seen.append(model.seen)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[0], seen[2])
    ones = ga.train.Classification(3, mixup=0.8, augment=torch.ones_like)
    ones.loss(model, batch)
    torch.testing.assert_close(model.seen, torch.ones_like(model.seen))


def test_objectives_that_mix_are_copied_pickled_and_shown():
    objective = ga.train.Classification(3, mixup=0.8, cutmix=1.0, augment=nn.Identity())
    assert repr(objective) == (
        "Classification(num_classes=3, mixup=0.8, cutmix=1.0, augment=Identity())"
    )
    model, batch = Recorder(), batch_of(objective)
    expected = objective.loss(model, batch, generator()).total
    for twin in (copy.deepcopy(objective), pickle.loads(pickle.dumps(objective))):
        assert torch.equal(twin.loss(model, batch, generator()).total, expected)


def test_a_compiled_vision_transformer_under_autocast_is_trained_on_mixed_images():
    torch.manual_seed(0)
    model = ga.models.VisionTransformer.from_preset("digits", num_classes=3)
    objective = ga.train.Classification(3, 0.1, mixup=0.8, cutmix=1.0)
    batch = objective.collate([{"image": torch.rand(1, 8, 8), "label": k % 3} for k in range(6)])
    plain = objective.loss(model, batch, generator()).mean
    compiled = torch.compile(model, backend="eager")
    same = objective.loss(compiled, batch, generator()).mean
    torch.testing.assert_close(same, plain, rtol=1e-4, atol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        near = objective.loss(model, batch, generator()).mean
    assert near.dtype == torch.float32
    assert float(near.detach()) == pytest.approx(float(plain.detach()), rel=3e-2)


# Runs.


def test_the_length_of_an_image_is_its_number_of_patches():
    example = [{"image": torch.zeros(1, 8, 8), "label": 0}]
    vision = ga.models.VisionTransformer(8, (2, 4), 3, 8, 1, 2, channels=1)
    swin = ga.models.SwinTransformer(8, 2, 3, 8, (1,), (1,), window_size=2, channels=1)
    own = nn.Linear(1, 1)
    assert [int(lengths_of(example, model)) for model in (vision, swin, own)] == [8, 16, 64]
    own.patch_size = 4
    assert int(lengths_of(example, own)) == 4


def train_on_images(out, *, callbacks=(), **changes):
    """A run with everything that is drawn: order, augmentation, mixing, dropout."""
    torch.manual_seed(0)
    model = ga.models.VisionTransformer(8, 4, 3, 8, 1, 2, channels=1, dropout=0.1, drop_path=0.1)
    objective = ga.train.Classification(
        3, 0.1, mixup=0.8, cutmix=1.0, augment=lambda images: images + torch.rand(1)
    )
    random = generator(1)
    examples = [{"image": torch.rand(1, 8, 8, generator=random), "label": k % 3} for k in range(22)]
    config = tiny_runs.config(out, batch_tokens=20, steps=9, ema_decay=0.5, **changes)
    return ga.train.fit(model, objective, config, examples[:18], examples[18:], callbacks=callbacks)


@pytest.mark.usefixtures("short_collections")
def test_a_run_on_mixed_images_that_was_interrupted_ends_as_if_undisturbed(tmp_path):
    stop = tiny_runs.At(4, lambda _: os.kill(os.getpid(), signal.SIGINT))
    assert train_on_images(tmp_path / "run", callbacks=[stop]).status == "interrupted"
    again, straight = (train_on_images(tmp_path / name) for name in ("run", "straight"))
    assert again.info["continued"] == [5]
    ours, wanted = (tiny_runs.results(run.path) for run in (again, straight))
    for name in ("log.jsonl", "model", "moments", "random"):
        assert ours[name] == wanted[name]


@pytest.mark.parametrize("change", [{"mixup": 0.4}, {"cutmix": 0.5}])
def test_a_config_with_another_mixing_than_the_objective_is_refused(tmp_path, change):
    ((name, value),) = change.items()
    there = {"mixup": 0.8, "cutmix": 1.0}[name]
    says = f"{name} must be 0 or that of the objective, {there}, got {value}: give it to the objec"
    with pytest.raises(ValueError, match=says):
        train_on_images(tmp_path / "run", **change)
    with pytest.raises(ValueError, match=rf"{name} must be 0 or that of the objective, 0, got"):
        ga.train.fit(
            tiny_runs.model(),
            tiny_runs.Hidden(),
            tiny_runs.config(tmp_path / "run", **change),
            tiny_runs.examples(),
        )


def test_options_that_images_alone_have_are_refused_for_tokens_and_bad_ones_by_name():
    tokens = [{"tokens": torch.arange(4), "label": 1}]
    for name, value in (("mixup", 0.8), ("cutmix", 1.0), ("augment", torch.abs)):
        with pytest.raises(ValueError, match=rf"{name} must be \S+ with examples of tokens"):
            ga.train.Classification(2, **{name: value}).collate(tokens)
        with pytest.raises(ValueError, match=rf"{name} must be \S+ with per_token=True"):
            ga.train.Classification(2, **{name: value}, per_token=True)
    with pytest.raises(ValueError, match="mixup must be a finite number >= 0, got -1"):
        ga.train.Classification(2, mixup=-1)
    with pytest.raises(ValueError, match=r"augment must be a function of images .* got str"):
        ga.train.Classification(2, augment="randaugment")
    cropped = ga.train.Classification(3, augment=lambda images: images[..., 1:])
    with pytest.raises(ValueError, match=r"augment must return images of the same shape, \[6, 1,"):
        cropped.loss(Recorder(), batch_of(cropped))


def test_augmentations_of_kornia_are_functions_of_images():
    """The recipe of the page on images: the values stay in 0 .. 1, and a seed repeats them."""
    pytest.importorskip("kornia", reason="kornia is optional: pip install kornia")
    from kornia.augmentation import (
        ImageSequential,
        RandomErasing,
        RandomHorizontalFlip,
        RandomResizedCrop,
    )
    from kornia.augmentation.auto import RandAugment

    augment = ImageSequential(
        RandomResizedCrop((8, 8), scale=(0.08, 1.0), resample="bicubic"),
        RandomHorizontalFlip(),
        RandAugment(n=2, m=9),
        RandomErasing(p=0.25),
    )
    objective = ga.train.Classification(10, 0.1, mixup=0.8, cutmix=1.0, augment=augment)
    images = torch.rand(16, 3, 8, 8, generator=generator())
    batch = {"image": images, "label": torch.arange(16) % 10}
    model = ga.models.VisionTransformer.from_preset("digits", channels=3)
    losses = []
    for seed in (0, 0, 1):
        losses.append(objective.loss(model, batch, generator(seed)).mean)
        losses[-1].backward()
    assert torch.equal(losses[0], losses[1])
    assert not torch.equal(losses[0], losses[2])
    changed = augment(images)
    assert changed.shape == images.shape
    assert 0 <= float(changed.min()) <= float(changed.max()) <= 1 + 1e-5
