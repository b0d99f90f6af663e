"""`graphattn train`, `evaluate` and `generate`, on small files, as they are typed."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pickle
import random
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from cli_helpers import call, done, refused
from structure_files import pdb_line

import graphattn as ga

TINY = '{"dim": 16, "depth": 2, "heads": 2}'
SMALL = ("--model-options", TINY, "--batch-tokens", "64", "--length", "16")
TEXT = "the quick brown fox jumps over the lazy dog, and again: né! " * 30


pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    draws = torch.Generator().manual_seed(0)
    for name, letters in (("proteins", "ACDEFGHIKLMNPQRSTVWY"), ("bases", "ACGT")):
        records = []
        for n in range(40):
            drawn = torch.randint(len(letters), (40,), generator=draws).tolist()
            records.append(f">r{n} [group {n % 7}]\n{''.join(letters[i] for i in drawn)}\n")
        (folder / f"{name}.fasta").write_text("".join(records))
    return folder


@pytest.fixture(scope="module")
def run(data, tmp_path_factory) -> Path:
    """A causal model of a text."""
    out = tmp_path_factory.mktemp("runs") / "a"
    done("train", "--data", data / "text.txt", "--out", out, *SMALL, "--steps", 30)
    return out


@pytest.fixture(scope="module")
def masked(data, tmp_path_factory) -> Path:
    """A model of masked residues."""
    out = tmp_path_factory.mktemp("runs") / "m"
    done("train", "--data", data / "proteins.fasta", "--out", out, *SMALL, "--steps", 2)
    return out


# Options.


def test_every_field_of_a_config_is_an_option_that_is_described(monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 160)
    text = " ".join(call("train", "--help").output.split())
    for field in dataclasses.fields(ga.train.RunConfig):
        assert f"--{field.name.replace('_', '-')}" in text
        assert (
            f"    {field.name}: {field.metadata['description'][:40]}" in ga.train.RunConfig.__doc__
        )


@pytest.mark.long
def test_options_take_the_place_of_what_the_file_says(data):
    Path("run.yaml").write_text(
        f"data: {data / 'text.txt'}\nout: a\nsteps: 1\nlr: 1e-4\nbatch_tokens: 64\nlength: 16\n"
        "model_options: {dim: 16, depth: 2, heads: 2, dropout: 1e-1}\n"
    )
    result = done("train", "run.yaml", "--seed", 3, "--mixer", "gka")
    assert result.stdout.splitlines()[-1] == "a"
    assert "train: 1 of 1 texts are cut into 103 pieces of at most 16 tokens" in result.stdout
    config = ga.train.read_run("a").config
    assert (config.lr, config.seed, config.mixer) == (1e-4, 3, "gka")
    assert config.model_options["dropout"] == 0.1
    assert (config.model, config.objective, config.split) == ("text-1m", "causal", "position")
    again = call("train", "--config", "a/config.yaml")  # over: nothing is trained
    assert again.exit_code == 0, again.output
    assert ga.train.read_run("a").config == config


@pytest.mark.long
def test_what_is_wrong_is_told_in_one_line_by_its_name(data, run, masked):
    text, proteins = data / "text.txt", data / "proteins.fasta"
    train = ("train", "--data", text, "--out", "b")
    Path("empty.txt").write_text("")
    Path("odd.fasta").write_text(">one\nMKV\n>two\nMK1V\n")
    Path("wrong.yaml").write_text("data: x\nout: y\nbatch_token: 5\n")
    for arguments, reason in (
        (("train", "--data", "empty.txt", "--out", "b"), "empty.txt"),
        (("train", "--data", "odd.fasta", "--out", "b"), "odd.fasta: line 4"),
        (("train", "--data", "gone.txt", "--out", "b"), "gone.txt"),
        (("train", "--data", text), "--out is required"),
        (("train", "--steps", "5"), "--data must be"),
        (("train", "wrong.yaml"), "did you mean 'batch_tokens'"),
        (("train", "gone.yaml"), "gone.yaml"),
        (("train", "empty.txt"), "give --data empty.txt"),
        ((*train, "--steps", "many"), "steps must be an integer"),
        ((*train, "--lr", "-1"), "lr must be"),
        ((*train, "--split", "half"), "split must be one of"),
        ((*train, "--model", "text-1b"), "model must be"),
        ((*train, "--model", "digits"), "is a VisionTransformer, which reads data of kind images"),
        ((*train, "--model", "encoder-1m", "--objective", "causal"), "objective must be"),
        ((*train, "--objective", "regression"), "regression"),
        ((*train, "--objective", "classification"), "without labels"),
        ((*train, "--objective-options", "{bytes: 1}"), "has no option 'bytes'"),
        ((*train, "--model-options", "{width: 1}"), "got 'width'"),
        ((*train, "--model-options", "{vocab_size: 9}"), "vocab_size must be at least 256"),
        ((*train, "--mixer", "dott"), "mixer must be"),
        ((*train, "--log-to", "nobody"), "log_to must be 'none'"),
        ((*train, "--length", "300", "--batch-tokens", "299"), "batch_tokens must be at least"),
        (("train", "--resume", "gone"), "'gone'"),
        (("train", "--resume", run, "--lr", "1"), "--lr must not change"),
        (("train", "--resume", run, "--steps", "3"), "--steps must be at least"),
        (("train", "--data", text, "--out", run), "that of a run with the same config"),
        (("evaluate", "gone"), "'gone'"),
        (("evaluate", run, "--split", "half"), "--split must be one of"),
        (("evaluate", masked, "--data", "odd.fasta"), "odd.fasta: line 4"),
        (("generate", "gone"), "'gone'"),
        (("generate", run, "--steps", "3"), "--steps must not be given for a causal model"),
        (("generate", masked, "--top-k", "3"), "--top-k must not be given"),
        (("generate", masked, "--prompt", "MK1"), "--prompt"),
    ):
        assert reason in refused(*arguments), arguments
    assert not Path("b").exists()
    assert proteins.exists()


def test_a_folder_whose_files_are_of_two_runs_is_refused(run, masked, tmp_path):
    import shutil

    mixed = tmp_path / "mixed"
    shutil.copytree(masked, mixed)
    shutil.copyfile(run / "tokenizer.json", mixed / "tokenizer.json")
    assert "the two are from different runs" in refused("generate", mixed)


# What is made of the data.


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("text.txt", {}, ("text", "position", "text-1m", "causal", 256)),
        ("text.txt", {"objective": "diffusion"},
         ("text", "position", "encoder-1m", "diffusion", 256)),
        ("proteins.fasta", {}, ("protein", "record", "encoder-1m", "masked", 40)),
        ("proteins.fasta", {"split": "group", "validation": 0.2, "test": 0.2},
         ("protein", "group", "encoder-1m", "masked", 40)),
        ("bases.fasta", {}, ("nucleotide", "record", "dna-1m", "causal", 40)),
        ("bases.fasta", {"model": "protein-6m"},
         ("nucleotide", "record", "protein-6m", "masked", 40)),
        ("proteins.fasta", {"model": "protein-structure-1m", "mixer": "dot"},
         ("protein", "record", "protein-structure-1m", "masked", 40)),
    ],
)  # fmt: skip
def test_what_is_auto_fits_the_data_and_stays_as_it_is(data, name, given, expected):
    prepared = ga.train.prepare(ga.train.RunConfig(data=str(data / name), **given))
    c = prepared.config
    assert (c.kind, c.split, c.model, c.objective, c.length) == expected
    again = ga.train.prepare(c)
    assert again.config == c
    ours, theirs = prepared.model.state_dict(), again.model.state_dict()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    batch = prepared.objective.collate([prepared.train[0], prepared.train[1]])
    loss = prepared.objective.loss(prepared.model, batch, torch.Generator().manual_seed(0))
    assert loss.count
    assert loss.mean.isfinite()
    parts = [set(map(tuple, part.spans.tolist())) for part in prepared.parts.values()]
    assert not parts[0] & parts[1]


def test_runs_of_other_seeds_hold_out_the_same_records(data):
    def held_out(**given):
        config = ga.train.RunConfig(data=str(data / "proteins.fasta"), test=0.3, **given)
        prepared = ga.train.prepare(config)
        first = next(iter(prepared.model.state_dict().values()))
        return prepared.parts["test"].spans.tolist(), first

    (ours, weights), (theirs, others) = held_out(seed=0), held_out(seed=1)
    assert ours == theirs
    assert not torch.equal(weights, others)
    assert held_out(split_seed=1)[0] != ours


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    import numpy
    from PIL import Image

    folder = tmp_path_factory.mktemp("pictures")
    for label in ("cat", "dog"):
        (folder / label).mkdir()
        for n in range(20):
            pixels = numpy.random.default_rng(n).integers(0, 255, (12, 12), dtype=numpy.uint8)
            Image.fromarray(pixels).save(folder / label / f"{n}.png")
    return folder


@pytest.mark.parametrize("depth", [1, 4])
@pytest.mark.parametrize("options", [{}, {"init_sigma": 1.5}])
def test_a_schedule_of_a_preset_goes_over_the_depth_that_is_asked_for(pictures, depth, options):
    config = ga.train.RunConfig(
        data=str(pictures), mixer="krause", mixer_options=options, model_options={"depth": depth}
    )
    prepared = ga.train.prepare(config)
    expected = ga.models.top_k_schedule(2, 4, depth)
    assert [block.mixer.top_k for block in prepared.model.blocks] == expected
    assert ga.train.prepare(prepared.config).config == prepared.config
    with pytest.raises(ValueError, match="model_options: depth must be an integer"):
        ga.train.prepare(config.replace(model_options={"depth": "four"}))


def test_images_are_cut_into_patches_and_classified(pictures):
    prepared = ga.train.prepare(ga.train.RunConfig(data=str(pictures), batch_tokens=72))
    c = prepared.config
    assert (c.kind, c.model, c.objective, c.length) == ("images", "digits", "classification", 36)
    assert c.model_options["patch_size"] == [2, 2]
    assert prepared.train.lengths.tolist() == [36] * len(prepared.train)
    assert ga.train.prepare(c).config == c


def test_a_causal_model_reads_images_pixel_by_pixel(pictures, tmp_path):
    out = tmp_path / "run"
    options = {"dim": 16, "depth": 1, "heads": 2}
    chosen = ("--model", "krause-mnist", "--objective", "causal", "--steps", 2)
    result = call(
        "train", "--data", pictures, *chosen, "--model-options", json.dumps(options), "--out", out,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    trained = ga.train.load_trained(out)
    assert (trained.model.vocab_size, trained.run.config.length) == (256, 144)
    prepared = ga.train.prepare(trained.run.config)
    whole = ga.data.load_corpus(pictures)
    for example in prepared.train:
        place = whole.names.index(example["name"])
        assert torch.equal(
            example["tokens"], (whole[place]["image"] * 255).round().long().flatten()
        )
    assert pickle.loads(pickle.dumps(prepared.corpus)).tokens(3).tolist() == (
        prepared.corpus.tokens(3).tolist()
    )
    for more in ((), ("--data", pictures)):
        result = call("evaluate", out, *more)
        assert result.exit_code == 0, result.output
    with torch.no_grad():
        tokens = torch.stack([example["tokens"] for example in prepared.test])
        logits = trained.model(tokens)[:, :-1]
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    written = json.loads((out / "evaluation.json").read_text())[f"{pictures.name} test"]
    assert written["loss"] == pytest.approx(float(expected), rel=1e-5)
    assert written["bits_per_byte"] == pytest.approx(written["loss"] / math.log(2), rel=1e-6)
    assert "got one on images" in refused("generate", out)
    for objective in ("classification", "regression"):
        changes = {"data": str(pictures), "model": "krause-mnist", "objective": objective}
        with pytest.raises(ValueError, match="objective must be 'causal' for a CausalLM of images"):
            ga.train.prepare(ga.train.RunConfig(**changes))


def test_validation_while_training_is_spread_over_the_part(data):
    config = ga.train.RunConfig(
        data=str(data / "text.txt"), length=8, validation=0.4, validation_tokens=64
    )
    prepared = ga.train.prepare(config)
    windows = prepared.validation.windows
    places = [prepared.validation[k]["tokens"].tolist() for k in range(len(prepared.validation))]
    everything = [windows[k]["tokens"].tolist() for k in range(len(windows))]
    assert len(places) == 64 * len(windows) // int(windows.lengths.sum())
    assert places == [everything[k * len(windows) // len(places)] for k in range(len(places))]


# Runs.


@pytest.mark.long
def test_a_stopped_run_says_how_to_go_on_and_ends_as_one_that_never_stopped(data):
    given = ("train", "--data", data / "text.txt", *SMALL, "--steps", 12, "--log-every", 1)

    def stop() -> None:
        while not Path("a/log.jsonl").exists() or len(Path("a/log.jsonl").read_bytes()) < 200:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=stop)
    thread.start()
    stopped = call(*given, "--out", "a")
    thread.join()
    assert stopped.exit_code == 130, stopped.output
    assert "continue with: graphattn train --resume a" in stopped.stderr
    gone_on = call("train", "--resume", "a")
    assert gone_on.exit_code == 0, gone_on.output
    done(*given, "--out", "b")
    assert ga.train.read_run("a").training == ga.train.read_run("b").training


@pytest.mark.long
def test_a_run_that_diverges_is_a_result_with_an_exit_code_of_its_own(data):
    given = ("--lr", 1e8, "--clip-norm", 1e9, "--warmup-steps", 0, "--steps", 200)
    result = call("train", "--data", data / "text.txt", "--out", "a", *SMALL, *given)
    assert result.exit_code == 3, result.output
    assert "a valid result" in result.stderr


@pytest.mark.long
def test_a_full_disk_ends_in_one_line(data, monkeypatch):
    from graphattn.train.runs import checkpoints

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints, "save_model", full)
    result = call("train", "--data", data / "text.txt", "--out", "a", *SMALL, "--steps", 1)
    assert result.exit_code == 1
    assert "No space left on device" in result.stderr
    progress, line = result.stderr.strip().splitlines()
    assert progress.startswith("a: step 1 of 1, loss ")
    assert line.startswith("graphattn: the checkpoint of step 1 could not be written to ")


# Evaluation.


def test_an_evaluation_stands_beside_guessing(run):
    result = call("evaluate", run)
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1] == str(run / "evaluation.json")
    (written,) = json.loads((run / "evaluation.json").read_text()).values()
    assert written["bits_per_byte"] == pytest.approx(written["loss"] / 0.6931471805599453)
    info = ga.train.read_run(run).info
    assert written["origin"] == {
        name: info[name] for name in ("commit", "config", "seed", "versions")
    }
    assert 0 <= written["calibration"]["error"] <= 1
    prepared = ga.train.prepare(ga.train.read_run(run).config)
    tokens = torch.cat([prepared.train[k]["tokens"] for k in range(len(prepared.train))])
    share = (tokens.bincount(minlength=256) + 1.0) / (len(tokens) + 256)
    asked = torch.cat(
        [w["tokens"][1:] for w in (prepared.test[k] for k in range(len(prepared.test)))]
    )
    assert written["frequency_loss"] == pytest.approx(-float(share[asked].log().mean()), rel=1e-5)
    model = ga.load(run / "model")
    total = count = 0.0
    model.requires_grad_(False)
    for k in range(len(prepared.test)):
        window = prepared.test[k]["tokens"]
        logits = model(window[None])[0, :-1]
        total += float(torch.nn.functional.cross_entropy(logits, window[1:], reduction="sum"))
        count += len(window) - 1
    assert written["loss"] == pytest.approx(total / count, rel=1e-5)


def test_an_evaluation_is_kept_when_nobody_reads_its_table(run, monkeypatch):
    from graphattn.cli.training import evaluate

    def closed(*_: object) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    (run / "evaluation.json").unlink(missing_ok=True)
    monkeypatch.setattr(evaluate, "table_of", closed)
    assert call("evaluate", run, "--split", "validation").exit_code == 1
    assert "text.txt validation" in json.loads((run / "evaluation.json").read_text())
    (run / "evaluation.json").unlink()


def test_other_data_is_added_to_the_evaluation(run):
    Path("other.txt").write_text("something else entirely, which it has not read")
    done("evaluate", run, "--data", "other.txt")
    written = json.loads((run / "evaluation.json").read_text())
    assert written["other.txt"]["examples"] == 3  # 46 bytes in windows of 16


def test_the_test_split_is_the_one_that_training_left_out(data):
    given = ("--steps", 1, "--seed", 3, "--split-seed", 8)
    done("train", "--data", data / "proteins.fasta", "--out", "a", *SMALL, *given)
    prepared = ga.train.prepare(ga.train.read_run("a").config)
    done("evaluate", "a", "--pseudo-tokens", 0)
    (written,) = json.loads(Path("a/evaluation.json").read_text()).values()
    expected = ga.train.evaluate_model(
        ga.load("a/model"), prepared.objective, prepared.test,
        train=prepared.parts["train"], batch_tokens=64, pseudo_tokens=0,
    )  # fmt: skip
    assert written["loss"] == expected["loss"]
    assert written["frequency_loss"] == expected["frequency_loss"]


def test_masked_models_have_a_pseudo_perplexity_of_few_tokens(masked):
    done("evaluate", masked, "--pseudo-tokens", 32)
    (written,) = json.loads((masked / "evaluation.json").read_text()).values()
    assert written["pseudo_tokens"] == 32
    assert 10 < written["pseudo_perplexity"] < 40  # random letters of 20


def chain(name: str, start: float, residues: int, seed: int = 0) -> str:
    """C-alpha atoms of random residues on a line, 3.8 Angstrom apart."""
    names = ["ALA", "ARG", "ASN", "ASP", "CYS", "GLN", "GLU", "GLY", "HIS", "ILE", "LEU", "LYS"]
    kinds = random.Random(seed).choices(names, k=residues)
    places = [(start, 3.8 * i, 0.0) for i in range(residues)]
    return "\n".join(
        pdb_line("CA", kind, name, i, place)
        for i, (kind, place) in enumerate(zip(kinds, places, strict=True), start=1)
    )


@pytest.fixture(scope="module")
def structures(tmp_path_factory) -> Path:
    """A model that was trained on single chains."""
    pytest.importorskip("biotite", reason="structures are read with biotite")
    folder = tmp_path_factory.mktemp("structures")
    for k in range(20):
        (folder / f"{k}.pdb").write_text(chain("A", 0.0, 12, seed=k))
    out = tmp_path_factory.mktemp("runs") / "s"
    options = ("--model-options", TINY, "--batch-tokens", "64", "--steps", 1)
    done("train", "--data", folder, "--out", out, *options)
    return out


def test_structures_are_evaluated_whole(structures, monkeypatch):
    """Two chains that touch: pieces of the length of the training would have no edge between."""
    Path("complex.pdb").write_text(chain("A", 0.0, 20) + "\n" + chain("B", 5.0, 20))
    lengths, forward = [], ga.models.ProteinModel.forward

    def spy(self, tokens, *rest, **given):
        lengths.append(tokens.shape[-1])
        return forward(self, tokens, *rest, **given)

    monkeypatch.setattr(ga.models.ProteinModel, "forward", spy)
    result = done("evaluate", structures, "--data", "complex.pdb", "--pseudo-tokens", 0)
    assert set(lengths) == {40}
    assert "complex.pdb: 1 examples, " in result.stdout
    assert "cut" not in result.stdout
    lengths.clear()
    output = call("evaluate", structures, "--data", "complex.pdb", "--length", 15).stdout
    assert "1 of 1 sequences are cut into 3 pieces" in " ".join(output.split())
    assert max(lengths) == 15


def test_numbers_have_their_error_and_no_digits_beyond_it(masked):
    from graphattn.cli.training.evaluate import _number

    assert _number(3.45678, 0.0123) == "3.457 ± 0.012"
    assert _number(17.5, 3.46) == "17.5 ± 3.5"
    assert _number(1234.5, 87.0) == "1234 ± 87"
    assert _number(0.5, 1e-9) == "0.5000 ± 0.0000"
    assert _number(0.25, None) == "0.2500"
    text = " ".join(call("evaluate", masked).stdout.split())
    (written,) = json.loads((masked / "evaluation.json").read_text()).values()
    assert f"{written['guesses']} guesses" in text
    for name, key in (("loss", "loss"), ("guessing by frequency", "frequency_loss")):
        assert f"{name} (nats) {_number(written[key], written[f'{key}_error'])}" in text


# Generation.


def test_a_text_is_what_the_model_writes_and_is_kept(run):
    done("generate", run, "--prompt", "né ", "--tokens", 20, "--seed", 5, "--top-k", 9)
    row = json.loads((run / "samples.jsonl").read_text().splitlines()[-1])
    assert row["text"].startswith("né ")
    assert row["origin"]["seed"] == 5
    assert row["origin"]["config"] == ga.train.read_run(run).config.digest()
    draws = torch.Generator().manual_seed(5)
    tokenizer = ga.data.ByteTokenizer()
    made = ga.load(run / "model").generate(
        tokenizer.encode("né "), 20, temperature=1.0, top_k=9, generator=draws
    )
    assert tokenizer.decode(made) == row["text"]


def test_residues_are_unmasked_around_what_is_given(masked):
    result = done("generate", masked, "--prompt", "MK__W", "--samples", 2)
    for line in result.stdout.split():
        assert line[:2] == "MK"
        assert (line[4], len(line)) == ("W", 5)
    longer = call("generate", masked, "--prompt", "MK", "--tokens", 9, "--steps", 3)
    assert len(longer.stdout.strip()) == 11


@pytest.mark.long
def test_diffusion_trains_and_writes(data):
    given = ("--objective", "diffusion", "--steps", 2)
    trained = call("train", "--data", data / "bases.fasta", "--out", "a", *SMALL, *given)
    assert trained.exit_code == 0, trained.output
    done("evaluate", "a")
    result = call("generate", "a", "--tokens", 12, "--steps", 4)
    assert len(result.stdout.strip()) == 12
    assert set(result.stdout.strip()) <= set("ACGTN")


def test_a_tokenizer_without_its_unknown_token_is_named(data, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.models.WordLevel({"to": 0, "be": 1}, unk_token="?")
    tokenizers.Tokenizer(words).save(str(tmp_path / "words.json"))
    text, chosen = data / "text.txt", ("--tokenizer", tmp_path / "words.json")
    reason = refused("train", "--data", text, *chosen, "--out", tmp_path / "run", *SMALL)
    assert "words.json: the tokenizers library cannot encode" in reason


def test_a_run_of_fit_is_evaluated_in_code(data, tmp_path):
    tokenizer = ga.data.ByteTokenizer()
    examples = [{"tokens": tokenizer.encode(TEXT[:20])}] * 4
    for name, its_tokenizer in (("none", None), ("bytes", tokenizer)):
        model = ga.models.CausalLM(256, dim=8, depth=1, heads=1)
        config = ga.train.RunConfig(steps=1, batch_tokens=64, out=str(tmp_path / name))
        ga.train.fit(model, ga.train.NextToken(), config, examples, tokenizer=its_tokenizer)
        for command in (("evaluate", "--data", data / "text.txt"), ("generate",)):
            reason = refused(command[0], tmp_path / name, *command[1:])
            assert "which ga.train.fit trained on examples of its own" in reason
            assert "tokenizer.json" not in reason
