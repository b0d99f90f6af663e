"""Classification: classes of images, sequences and tokens."""

import math

import pytest
import torch
from draws import generator
from sklearn.metrics import accuracy_score, log_loss
from torch import nn
from transformers.trainer_pt_utils import LabelSmoother

import graphattn as ga


def images(count: int = 6, channels: int = 1, size: int = 8) -> list[dict]:
    random = generator()
    return [
        {"image": torch.rand(channels, size, size, generator=random), "label": k % 3}
        for k in range(count)
    ]


def sequences(lengths=(5, 9, 3)) -> list[dict]:
    random = generator()
    return [
        {
            "tokens": torch.randint(7, (n,), generator=random),
            "label": n % 3,
            "labels": torch.randint(-1, 3, (n,), generator=random),
        }
        for n in lengths
    ]


def models() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    vision = ga.models.VisionTransformer.from_preset("digits", num_classes=3)
    swin = ga.models.SwinTransformer(
        image_size=8, patch_size=2, num_classes=3, dim=8, depths=(2,), heads=(2,), window_size=2,
        channels=1,
    )  # fmt: skip
    return {"vision": vision.eval(), "swin": swin.eval()}


@pytest.mark.parametrize("name", ["vision", "swin"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_of_images_is_the_one_of_transformers_and_scikit_learn(name, smoothing):
    model = models()[name]
    objective = ga.train.Classification(3, smoothing)
    batch = objective.collate(images())
    report = objective.evaluate(model, [batch, batch])
    logits = model(batch["image"]).detach()
    truth = batch["label"]
    theirs = LabelSmoother(epsilon=smoothing)({"logits": logits}, truth)
    assert report["loss"] == pytest.approx(float(theirs), rel=1e-5)
    shares = logits.double().softmax(-1).numpy()
    assert report["nats"] == pytest.approx(log_loss(truth, shares, labels=[0, 1, 2]), rel=1e-5)
    assert report["accuracy"] == pytest.approx(accuracy_score(truth, logits.argmax(-1)))
    assert report["perplexity"] == pytest.approx(math.exp(report["nats"]))


def test_label_smoothing_is_cross_entropy_with_the_smoothed_distribution():
    logits = torch.randn(4, 5, dtype=torch.float64, generator=generator())
    truth = torch.tensor([0, 4, 2, 2])
    objective = ga.train.Classification(5, 0.3)
    loss = objective.loss(lambda image: logits, {"image": torch.zeros(4), "label": truth})
    expected = 0.0
    for row, y in zip(logits, truth, strict=True):
        for k, p in enumerate(row.softmax(0)):
            expected -= (0.7 * (k == int(y)) + 0.3 / 5) * math.log(p)
    assert float(loss.total) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", ["encoder", "protein", "causal"])
def test_the_class_of_a_sequence_is_the_heads_answer_to_the_mean_of_its_features(kind, packed):
    torch.manual_seed(0)
    made = {
        "encoder": lambda: ga.models.SequenceEncoder(7, 16, 2, 2, mixer="mix", edge_hidden=8),
        "protein": lambda: ga.models.ProteinModel(16, 2, 2),
        "causal": lambda: ga.models.CausalLM(7, 16, 2, 2, window=3),
    }[kind]()
    model = ga.train.WithHead(made, 3).eval()
    objective = ga.train.Classification(3, packed=packed)
    for lengths in ((5, 9, 3), (6, 6)):
        examples = sequences(lengths)
        logits, truth = objective.guesses(model, objective.collate(examples))
        for row, example in enumerate(examples):
            features = model.model.encode(example["tokens"]).mean(0)
            torch.testing.assert_close(
                logits[row], model.model.head(features), rtol=1e-4, atol=1e-5
            )
        assert truth.tolist() == [n % 3 for n in lengths]


def test_a_model_that_gives_classes_of_sequences_is_asked_for_those():
    class Own(nn.Module):
        def forward(self, tokens, valid):
            return torch.stack([valid.sum(1), 0 * valid.sum(1)], 1).float()

    objective = ga.train.Classification(2)
    examples = [{"tokens": torch.arange(n), "label": 1} for n in (2, 4)]
    logits, _ = objective.guesses(Own(), objective.collate(examples))
    assert logits.tolist() == [[2, 0], [4, 0]]


@pytest.mark.parametrize("packed", [False, True])
def test_classes_of_tokens_are_counted_where_they_are_known(packed):
    torch.manual_seed(0)
    model = ga.train.WithHead(ga.models.SequenceEncoder(7, 16, 1, 2), 3).eval()
    objective = ga.train.Classification(3, per_token=True, packed=packed)
    loss = objective.loss(model, objective.collate(sequences()))
    total = right = count = 0
    for example in sequences():
        logits = model(example["tokens"]).detach().double()
        for place, label in enumerate(example["labels"].tolist()):
            if label >= 0:
                total -= math.log(logits[place].softmax(0)[label])
                right += int(logits[place].argmax()) == label
                count += 1
    assert loss.count == count < sum(len(example["tokens"]) for example in sequences())
    assert float(loss.total) == pytest.approx(total, rel=1e-5)
    assert loss.sums["accuracy"] == right


def test_a_vision_transformer_learns_to_tell_bright_from_dark():
    torch.manual_seed(0)
    random = generator(1)
    examples = [
        {"image": torch.rand(1, 8, 8, generator=random) * 0.5 + 0.5 * (k % 2), "label": k % 2}
        for k in range(16)
    ]
    model = ga.models.VisionTransformer(8, 4, 2, 16, 1, 2, channels=1)
    objective = ga.train.Classification(2, 0.1)
    batch = objective.collate(examples)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(40):
        optimizer.zero_grad()
        objective.loss(model, batch).mean.backward()
        optimizer.step()
    assert objective.evaluate(model, [batch])["accuracy"] == 1


@pytest.mark.parametrize(
    ("examples", "says"),
    [
        ([{"image": torch.zeros(1, 2, 2)}], "every example must contain a class: label must be"),
        (
            [{"image": torch.zeros(1, 2, 2), "label": 3, "name": "x"}],
            r"label must be 0 .. 2, got 3",
        ),
        ([{"image": torch.zeros(2, 2), "label": 0}], r"'image', a floating-point tensor \[C, H"),
        ([{"image": torch.zeros(1, 2, 2).byte(), "label": 0}], "got torch.uint8"),
        (
            [{"image": torch.zeros(1, n, 2), "label": 0} for n in (2, 3)],
            "examples must contain images of one size",
        ),
        (
            [{"image": torch.zeros(1, 2, 2), "label": 0}, {"tokens": torch.arange(2), "label": 0}],
            "either all examples or none must contain 'image'",
        ),
        ([{"tokens": torch.arange(2), "label": -1, "name": "P1"}], r"\('P1'\): label must be >= 0"),
    ],
)
def test_bad_examples_are_named(examples, says):
    with pytest.raises(ValueError, match=says):
        ga.train.Classification(3).collate(examples)


def test_a_model_of_other_classes_and_bad_options_are_named():
    objective = ga.train.Classification(3)
    with pytest.raises(ValueError, match=r"num_classes=3 logits, .*WithHead"):
        objective.loss(ga.models.SequenceEncoder(7, 8, 1, 2), objective.collate(sequences()))
    with pytest.raises(ValueError, match="num_classes must be >= 2"):
        ga.train.Classification(1)
    with pytest.raises(ValueError, match="label_smoothing"):
        ga.train.Classification(3, 1.0)
    per_token = ga.train.Classification(3, per_token=True)
    with pytest.raises(ValueError, match="examples must contain 'labels'"):
        per_token.collate([{"tokens": torch.arange(2)}])
    floating = per_token.collate([{"tokens": torch.arange(2), "labels": torch.zeros(2)}])
    with pytest.raises(ValueError, match="labels must be integers"):
        per_token.loss(ga.models.SequenceEncoder(7, 8, 1, 2), floating)
