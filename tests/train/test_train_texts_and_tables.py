"""Classifiers of texts and of tables: what is fitted, split, cut and trained further."""

import csv
import shutil

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score

import graphattn as ga
from graphattn.train.objectives.classification import counts_of_classes, f1_macro

TINY = {"dim": 16, "depth": 1, "heads": 2}


def config_of(path, **changes):
    given = {"model_options": TINY, "mixer": "dot", "validation": 0.2, "test": 0.2, **changes}
    return ga.train.RunConfig(data=str(path), **given)


@pytest.fixture
def table(tmp_path):
    random = np.random.default_rng(0)
    x, c = random.normal(size=200).round(3), random.choice(["a", "b", "c"], 200)
    rows = [f"{n},{kind},{'high' if n > 0 else 'low'}" for n, kind in zip(x, c, strict=True)]
    path = tmp_path / "table.csv"
    path.write_text("x,kind,label\n" + "\n".join(rows) + "\n")
    return path


@pytest.fixture
def texts(tmp_path):
    random = np.random.default_rng(0)
    rows = []
    for n in range(120):
        words = random.choice(["so", "to", "no"], random.integers(1, 9))
        rows.append(f"{' '.join(words)} {'yes' if n % 3 else 'nay'} {n}\t{n % 3}")
    path = tmp_path / "texts.tsv"
    path.write_text("text\tlabel\n" + "\n".join(rows) + "\n")
    return path


# F1.


@pytest.mark.parametrize("classes", [2, 3, 7])
def test_f1_is_that_of_scikit_learn_over_any_batches(classes):
    random = torch.Generator().manual_seed(classes)
    for n in (1, 2, 5, 40):
        logits = torch.randn(n, classes, generator=random)
        truth = torch.randint(max(classes - 1, 1), (n,), generator=random)
        expected = f1_score(truth, logits.argmax(-1), average="macro", zero_division=0)
        assert f1_macro(counts_of_classes(logits, truth)) == pytest.approx(expected)
        objective = ga.train.Classification(classes)
        batches = [{"image": logits[k : k + 3], "label": truth[k : k + 3]} for k in range(0, n, 3)]
        report = objective.evaluate(torch.nn.Identity(), batches)
        assert report["f1_macro"] == pytest.approx(expected)
        assert set(report) == {"loss", "perplexity", "accuracy", "nats", "f1_macro"}


def test_f1_of_tokens_leaves_out_missing_labels():
    objective = ga.train.Classification(3, per_token=True)
    labels = torch.tensor([[0, -1, 2, 1], [1, 1, -1, 0]])
    logits = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(0))
    batch = {"tokens": torch.zeros(2, 4, dtype=torch.long), "labels": labels}
    known = labels >= 0
    expected = f1_score(labels[known], logits[known].argmax(-1), average="macro", zero_division=0)
    report = objective.evaluate(Constant(logits), [batch])
    assert report["f1_macro"] == pytest.approx(expected)


class Constant(torch.nn.Module):
    def __init__(self, logits):
        super().__init__()
        self.logits = logits

    def forward(self, tokens, graph=None, **given):
        return self.logits


def test_names_of_classes_are_at_most_as_many_as_classes():
    assert "classes=['no', 'yes']" in repr(ga.train.Classification(2, classes=["no", "yes"]))
    with pytest.raises(ValueError, match="classes must be at most num_classes=2 names, got 3"):
        ga.train.Classification(2, classes=["a", "b", "c"])


# Tables.


def test_bins_are_fitted_to_the_training_rows_alone(table):
    made = ga.train.prepare(config_of(table))
    rows = list(csv.reader(table.open()))[1:]
    train = made.parts["train"].spans[:, 0].tolist()
    x = np.array([float(rows[record][0]) for record in train])
    edges = np.quantile(x, np.arange(1, 16) / 16)
    np.testing.assert_allclose(made.tokenizer.columns[0].edges, edges)
    everything = np.quantile([float(row[0]) for row in rows], np.arange(1, 16) / 16)
    assert not np.allclose(edges, everything)
    records = torch.cat([part.spans[:, 0] for part in made.parts.values()])
    assert sorted(records.tolist()) == list(range(200))
    for place, record in enumerate(train):
        expected = made.tokenizer.encode(",".join(rows[record][:2]))
        assert torch.equal(made.train[place]["tokens"], expected)


def test_a_table_is_classified_by_an_encoder_of_its_columns(table):
    made = ga.train.prepare(config_of(table))
    config = made.config
    assert (config.kind, config.model, config.split) == ("table", "encoder-1m", "record")
    assert (config.objective, config.length) == ("classification", 2)
    assert config.objective_options == {"num_classes": 2, "classes": ["high", "low"]}
    assert config.model_options["vocab_size"] == made.tokenizer.vocab_size == 17 + 4
    assert made.model(made.train[0]["tokens"]).shape == (2, 2)
    again = ga.train.prepare(config)  # as a run that goes on
    assert again.tokenizer == made.tokenizer
    assert again.train.fingerprint == made.train.fingerprint


def test_cells_can_be_masked_and_the_model_trained_further_on_other_rows(table, tmp_path):
    run = ga.train.RunConfig.load
    first = ga.train.prepare(config_of(table, objective="masked", out=str(tmp_path / "a"), steps=2))
    assert first.objective.mask_token == first.tokenizer.vocab_size
    done = ga.train.engine.fit_prepared(first)
    assert run(done.path / "config.yaml").objective == "masked"
    other = tmp_path / "other.csv"
    other.write_text("x,kind,label\n" + "".join(f"{n},a,{'hl'[n % 2]}\n" for n in range(50)))
    for model in (done.path, done.path / "model"):
        made = ga.train.prepare(config_of(other, model=str(model), mixer=None, model_options={}))
        assert made.tokenizer == first.tokenizer  # bins of the first table
        assert made.config.model == str(done.path / "model")
        kept = dict(ga.load(done.path / "model").state_dict())
        for name, weight in made.model.model.state_dict().items():
            assert name.startswith("head.") or torch.equal(weight, kept[name])
    again = ga.train.prepare(made.config)
    assert torch.equal(again.model.model.head.weight, made.model.model.head.weight)


# Texts.


def test_texts_with_classes_are_split_whole_and_read_from_their_beginning(texts):
    made = ga.train.prepare(config_of(texts, objective="classification", length=12))
    assert (made.config.split, made.config.model) == ("record", "encoder-1m")
    assert made.config.objective_options["classes"] == ["0", "1", "2"]
    assert len(made.train) == len(made.parts["train"])  # one example per text
    rows = [line.split("\t") for line in texts.read_text().splitlines()[1:]]
    for place, (record, *_) in enumerate(made.parts["train"].spans.tolist()):
        text, label = rows[record]
        example = made.train[place]
        assert bytes(example["tokens"].tolist()) == text.encode()[:12]
        assert example["label"] == int(label)
    assert made.model(made.train[0]["tokens"]).shape[-1] == 3
    masked = ga.train.prepare(config_of(texts, objective="masked", length=12))
    assert masked.config.split == "position"
    assert len(masked.train) > len(masked.parts["train"])  # every window of a text


def test_a_characters_vocabulary_goes_on_with_the_model(texts, tmp_path):
    given = {"objective": "masked", "tokenizer": "characters", "steps": 1, "length": 16}
    run = ga.train.engine.fit_prepared(
        ga.train.prepare(config_of(texts, out=str(tmp_path / "a"), **given))
    )
    other = tmp_path / "other.tsv"
    other.write_text("text\tlabel\n" + "no\t0\nso\t1\n" * 30)
    options = {
        "mixer": None,
        "model_options": {},
        "objective": "classification",
        "split": "position",
    }
    made = ga.train.prepare(config_of(other, model=str(run.path), **options))
    learned = ga.data.load_tokenizer(run.path / "tokenizer.json")
    assert made.tokenizer == learned
    assert made.train[0]["tokens"].tolist() == learned.encode("no").tolist()


def test_a_classifier_is_trained_further_with_its_head(texts, tmp_path):
    given = {"objective": "classification", "length": 16, "steps": 1, "out": str(tmp_path / "a")}
    run = ga.train.engine.fit_prepared(ga.train.prepare(config_of(texts, **given)))
    options = {"mixer": None, "model_options": {}, "model": str(run.path), "length": 16}
    made = ga.train.prepare(config_of(texts, objective="classification", **options))
    assert torch.equal(made.model.model.head.weight, ga.load(run.path / "model").model.head.weight)
    two = tmp_path / "two.tsv"
    two.write_text("text\tlabel\n" + "".join(f"a{n}\t{n % 2 + 1}\n" for n in range(60)))
    made = ga.train.prepare(config_of(two, objective="classification", **options))
    assert made.config.objective_options["classes"] == ["0", "1", "2"]  # of which two occur
    labels = {made.train[n]["label"] for n in range(len(made.train))}
    assert labels == {1, 2}
    two.write_text("text\tlabel\n" + "".join(f"a{n}\t{'no' * (n % 2 + 1)}\n" for n in range(60)))
    with pytest.raises(ValueError, match="has a head for 3 classes, but the data has 2"):
        ga.train.prepare(config_of(two, objective="classification", **options))
    two.write_text("text\tlabel\n" + "".join(f"a{n}\tc{n % 3}\n" for n in range(60)))
    with pytest.raises(ValueError, match="head for the classes 0, 1, 2, but the data has c0,"):
        ga.train.prepare(config_of(two, objective="classification", **options))
    options["objective_options"] = {"classes": ["c2", "c0", "c1"]}
    made = ga.train.prepare(config_of(two, objective="classification", **options))
    assert made.corpus.classes == ("c2", "c0", "c1")


def test_images_of_some_classes_keep_the_numbers_that_a_saved_model_gave_them(tmp_path):
    from PIL import Image

    draws = np.random.default_rng(0)
    for name in "abc":
        (tmp_path / "all" / name).mkdir(parents=True)
        for n in range(20):
            pixels = draws.integers(0, 255, (8, 8), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "all" / name / f"{n}.png")
    given = {"objective": "classification", "model": "digits", "mixer": None, "model_options": {}}
    config = config_of(tmp_path / "all", steps=1, out=str(tmp_path / "run"), **given)
    run = ga.train.engine.fit_prepared(ga.train.prepare(config))
    shutil.copytree(tmp_path / "all", tmp_path / "some", ignore=lambda *_: ["a"])
    made = ga.train.prepare(config_of(tmp_path / "some", **{**given, "model": str(run.path)}))
    assert made.corpus.classes == ("a", "b", "c")
    assert {made.train[n]["label"] for n in range(len(made.train))} == {1, 2}


ROWS = "".join(f"{n},a,{n % 2}\n" for n in range(40))


@pytest.mark.parametrize(
    ("rows", "changes", "says"),
    [
        ("".join(f"{n},a,{n}\n" for n in range(20)), {}, "got 20 different labels of 20 records"),
        ("".join(f"{n},a,0\n" for n in range(20)), {}, "got 1 different labels of 20 records"),
        (ROWS, {"length": 1}, "length must be 0 or 2 for a table"),
        (ROWS, {"model": "text-1m"}, "which reads data of kind"),
        (ROWS, {"objective_options": {"num_classes": 1}}, "num_classes must be >= 2"),
    ],
)
def test_what_cannot_be_classified_is_named(tmp_path, rows, changes, says):
    path = tmp_path / "a.csv"
    path.write_text("x,kind,label\n" + rows)
    with pytest.raises(ValueError, match=says):
        ga.train.prepare(config_of(path, **{"objective": "classification", **changes}))


def test_a_text_beside_the_folders_of_classes_is_named(tmp_path):
    for name in (*(f"{folder}/{n}.txt" for folder in "ab" for n in range(10)), "about.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"This is {name}.")
    with pytest.raises(ValueError, match=r"without labels.* \('about.txt' is in no folder"):
        ga.train.prepare(config_of(tmp_path, objective="classification"))
    (tmp_path / "about.txt").unlink()
    made = ga.train.prepare(config_of(tmp_path, objective="classification"))
    assert made.config.objective_options["classes"] == ["a", "b"]


@pytest.mark.parametrize("preset", ["nanochat-d20", "krause-lm-100m"])
def test_presets_of_language_models_get_a_head_of_classes_without_bounds(texts, preset):
    tiny = {"dim": 16, "depth": 2, "heads": 2}
    given = {"model": preset, "model_options": tiny, "mixer": None, "length": 12}
    made = ga.train.prepare(config_of(texts, objective="classification", **given))
    made.model.model.head.bias.data.fill_(1e4)
    features = made.model(made.train[0]["tokens"])
    assert features.shape[-1] == 3
    assert features.min() > 9e3
    given["model_options"] = {**tiny, "logit_softcap": 9.0}
    with pytest.raises(ValueError, match=r"logit_softcap=None, got 9\.0"):
        ga.train.prepare(config_of(texts, objective="classification", **given))


def test_guessing_by_frequency_counts_every_text_once(texts):
    made = ga.train.prepare(config_of(texts, objective="classification", length=4))
    report = ga.train.evaluate_model(
        made.model, made.objective, made.test, train=made.parts["train"]
    )
    labels = [int(line.split("\t")[1]) for line in texts.read_text().splitlines()[1:]]
    seen = np.bincount([labels[n] for n in made.parts["train"].spans[:, 0].tolist()]) + 1
    asked = np.array([labels[n] for n in made.parts["test"].spans[:, 0].tolist()])
    expected = -np.log(seen / seen.sum())[asked].mean()
    assert report["frequency_loss"] == pytest.approx(expected)
