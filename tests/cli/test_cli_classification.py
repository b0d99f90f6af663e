"""`graphattn train --objective classification` of texts and tables, as it is typed."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from cli_helpers import done, refused, shared
from sklearn.metrics import accuracy_score, f1_score

import graphattn as ga

TINY = '{"dim": 16, "depth": 2, "heads": 2}'
HALVES = ("--validation", 0.2, "--test", 0.2)

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


@pytest.fixture
def reviews() -> Path:
    draws = random.Random(0)
    rows = []
    for n in range(120):
        words = draws.choices(["a", "film", "of", "town", "and", "dog"], k=draws.randint(2, 6))
        rows.append(" ".join([*words, ("bad", "good")[n % 2] * 3]) + f"\t{('no', 'yes')[n % 2]}")
    path = Path("reviews.tsv")
    path.write_text("sentence\tlabel\n" + "\n".join(rows) + "\n")
    return path


def numbers_of(run: Path, name: str) -> dict:
    return json.loads((run / "evaluation.json").read_text())[name]


def by_hand(trained: ga.train.Trained, rows: list[tuple[str, str]], length: int) -> tuple:
    classes = trained.objective.classes
    guesses = []
    with torch.no_grad():
        for text, _ in rows:
            tokens = trained.tokenizer.encode(text)[:length]
            guesses.append(classes[int(trained.model(tokens).mean(0).argmax())])
    return [label for _, label in rows], guesses


@pytest.mark.parametrize("scaling", ["sdp", "sq_inplace"])
def test_masked_then_classified_then_evaluated(reviews, scaling):
    """The experiment of Table 1 of Attention Clusters, in miniature."""
    Path("wiki.txt").write_text(" ".join(reviews.read_text().split()) * 2)
    small = ("--batch-tokens", 512, "--length", 24, "--model-options", TINY)
    mixer = ("--mixer", "dot-window", "--window", 4, "--mixer-options", f"{{scaling: {scaling}}}")
    masked = ("--objective", "masked", "--tokenizer", "characters", "--steps", 3)
    done("train", "--data", "wiki.txt", "--out", "pre", *masked, *small, *mixer)
    given = ("--objective", "classification", "--length", 24, "--batch-tokens", 512, *HALVES)
    output = done(
        "train", "--data", reviews, "--model", "pre", "--out", "cls", *given, "--steps", 40,
        "--lr", 0.01, "--warmup-steps", 5,
    ).output  # fmt: skip
    assert "Classification(num_classes=2, classes=['no', 'yes'])" in output
    assert "are cut to a beginning of at most 24 tokens" in " ".join(output.split())
    trained = ga.train.load_trained("cls")
    assert {block.mixer.scaling for block in trained.model.model.blocks} == {scaling}
    assert "F1 (macro)" in done("evaluate", "cls").output
    done("evaluate", "cls", "--data", reviews)
    rows = [tuple(line.split("\t")) for line in reviews.read_text().splitlines()[1:]]
    truth, guesses = by_hand(trained, rows, 24)
    found = numbers_of(Path("cls"), "reviews.tsv")
    assert found["accuracy"] == pytest.approx(accuracy_score(truth, guesses))
    assert found["f1_macro"] == pytest.approx(f1_score(truth, guesses, average="macro"))
    assert found["examples"] == 120
    only = Path("only.tsv")  # classes keep their numbers, though one does not occur
    only.write_text("sentence\tlabel\n" + "".join("\t".join(r) + "\n" for r in rows if "yes" in r))
    done("evaluate", "cls", "--data", only)
    of_yes = [guess for answer, guess in zip(truth, guesses, strict=True) if answer == "yes"]
    assert numbers_of(Path("cls"), "only.tsv")["accuracy"] == of_yes.count("yes") / len(of_yes)
    other = Path("other.tsv")
    other.write_text("sentence\tlabel\na film\tperhaps\nan dog\tno\n")
    assert "none of the classes no, yes" in refused("evaluate", "cls", "--data", other)


def test_a_run_of_a_table_goes_on_and_is_evaluated_on_its_own_split():
    draws = random.Random(0)
    numbers = [(draws.gauss(0, 1), draws.choice("ab")) for _ in range(150)]
    rows = [f"{x:.3f},{kind},{int(x > 0)}" for x, kind in numbers]
    Path("table.csv").write_text("x,kind,label\n" + "\n".join(rows) + "\n")
    given = ("--data", "table.csv", "--model-options", TINY, "--mixer", "dot", *HALVES)
    rate = ("--lr", 0.01, "--warmup-steps", 5, "--batch-tokens", 64, "--save-every", 10)
    done("train", *given, *rate, "--steps", 20, "--schedule", "constant", "--out", "a")
    done("train", "--resume", "a", "--steps", 40)
    done("evaluate", "a")
    assert numbers_of(Path("a"), "table.csv test")["accuracy"] > 0.8
    trained = ga.train.load_trained("a")
    prepared = ga.train.prepare(trained.run.config)
    assert prepared.tokenizer == trained.tokenizer
    examples = [prepared.test[n] for n in range(len(prepared.test))]
    truth = [example["label"] for example in examples]
    with torch.no_grad():
        guesses = [int(trained.model(row["tokens"]).mean(0).argmax()) for row in examples]
    found = numbers_of(Path("a"), "table.csv test")
    assert found["f1_macro"] == pytest.approx(f1_score(truth, guesses, average="macro"))
    assert found["examples"] == len(examples)
    assert "--length must be 2" in refused("evaluate", "a", "--length", 1)


@pytest.mark.long
def test_a_real_table_is_classified_better_than_by_guessing():
    data = shared("tabular/sklearn_breast_cancer.csv")
    model = ("--model-options", TINY, "--mixer", "dot", "--batch-tokens", 2048)
    done("train", "--data", data, "--out", "a", *model, *HALVES, "--steps", 60, "--lr", 0.003)
    done("evaluate", "a")
    assert numbers_of(Path("a"), f"{data.name} test")["f1_macro"] > 0.85
