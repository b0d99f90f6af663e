"""Folders that a run must not go on in, or write over; and its config as a file."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import pytest
import tiny_runs
import torch

import graphattn as ga
from graphattn.train import RunConfig
from graphattn.train.runs import checkpoints

pytestmark = pytest.mark.usefixtures("short_collections")


# What belongs to somebody else.


@pytest.mark.parametrize("name", ["model/mine.bin", "checkpoints/step-00000007/mine", "log.jsonl"])
def test_files_of_others_are_never_written_over(tmp_path, name):
    file = tmp_path / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text('{"step": 90}\n')
    with pytest.raises(
        ValueError, match=f"contains {name.split('/')[0]} but no .* choose another folder"
    ):
        tiny_runs.train(tmp_path, steps=1)
    assert file.read_text() == '{"step": 90}\n'
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [file]


def test_a_folder_with_other_files_keeps_them(tmp_path):
    hidden = tmp_path / ".models" / "mine.bin"
    hidden.parent.mkdir()
    hidden.write_text("mine")
    assert tiny_runs.train(tmp_path, steps=1).status == "finished"
    assert hidden.read_text() == "mine"


@pytest.mark.parametrize("place", ["file", "file/run"])
def test_where_no_folder_can_be_is_an_error_of_the_argument(tmp_path, place):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match="out must be a folder in which files can be made, got"):
        tiny_runs.train(tmp_path / place)


# Checkpoints.


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    ["model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json",
     "running_loss.json"],
)  # fmt: skip
def test_a_checkpoint_that_lacks_something_is_named_and_the_one_before_goes_on(
    tmp_path, straight, name
):
    folder = tmp_path / "run"
    shutil.copytree(straight.path, folder)
    first, *_, last = checkpoints.complete_checkpoints(folder)
    for step in checkpoints.complete_checkpoints(folder)[1:-1]:
        shutil.rmtree(checkpoints.checkpoint_path(folder, step))
    file = checkpoints.checkpoint_path(folder, last) / name
    content, rows = file.read_bytes(), (folder / "log.jsonl").read_bytes()
    for broken in (None, content[: len(content) // 2], b""):
        file.unlink() if broken is None else file.write_bytes(broken)
        said = f"{name} is .*, so the run cannot continue .* from the checkpoint of step {first}"
        with pytest.raises(ValueError, match=said):
            tiny_runs.train(folder, steps=15)
        assert (folder / "log.jsonl").read_bytes() == rows
    shutil.rmtree(file.parent)
    if name == "optimizer.pt":
        assert tiny_runs.train(folder, steps=15).info["continued"] == [first]


class Command:
    def __reduce__(self):
        return Path.touch, (Path(COMMANDED),)


COMMANDED = "a-pickle-was-executed"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("optimizer.pt", "it has no 'param_groups'"),
        ("scheduler.pt", "it has no 'last_epoch'"),
        ("rng_state.pth", "it has no 'cpu'"),
        ("trainer_state.json", "it has no 'best_global_step'"),
        ("running_loss.json", "it has no 'above'"),
    ],
)
def test_a_checkpoint_with_other_content_is_named(tmp_path, straight, name, says, monkeypatch):
    """A pickle could contain a command: it is neither executed nor an error of torch."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "run"
    shutil.copytree(straight.path, folder)
    last = checkpoints.complete_checkpoints(folder)[-1]
    file = checkpoints.checkpoint_path(folder, last) / name
    contents = [({}, says), (3, says)]
    if file.suffix != ".json":
        contents.append((Command(), "it is cut off, or contains other objects than numbers"))
    for content, said in contents:
        if file.suffix == ".json":
            file.write_text(json.dumps(content))
        else:
            torch.save(content, file)
        with pytest.raises(ValueError, match=f"{name} is broken .*{said}.*so the run cannot"):
            tiny_runs.train(folder, steps=15)
    if file.suffix != ".json":
        file.write_bytes(pickle.dumps(Command()))
        with pytest.raises(ValueError, match=f"{name} is broken .*so the run cannot"):
            tiny_runs.train(folder, steps=15)
    assert not Path(COMMANDED).exists()


# Starts that come to nothing.


def test_a_start_that_fails_before_its_first_step_leaves_the_folder_to_another_config(tmp_path):
    class Unable(tiny_runs.Hidden):
        def loss(self, *given):
            raise ValueError("mask_token must be one of the tokens")

    config = tiny_runs.config(tmp_path / "run", seed=5)
    with pytest.raises(ValueError, match="mask_token"):
        ga.train.fit(tiny_runs.model(), Unable(), config, tiny_runs.examples())
    assert ga.train.read_run(tmp_path / "run").status == "failed"
    run = tiny_runs.train(tmp_path / "run", steps=1)
    assert (run.status, run.config.seed) == ("finished", 0)


def test_no_steps_keep_the_model_as_it_was_made(tmp_path):
    run = tiny_runs.train(tmp_path / "run", steps=0)
    assert (run.status, run.step) == ("finished", 0)
    made, kept = tiny_runs.model().state_dict(), ga.load(run.path / "model").state_dict()
    assert all((made[name] == kept[name]).all() for name in made)
    assert tiny_runs.train(run.path, steps=2).status == "finished"


def test_data_whose_tokens_have_changed_is_refused(tmp_path):
    def start(letters: str) -> ga.train.Run:
        return ga.train.fit(
            tiny_runs.model(),
            tiny_runs.Hidden(),
            tiny_runs.config(tmp_path / "run", steps=1),
            tiny_runs.examples(),
            tokenizer=ga.data.CharacterTokenizer(letters),
        )

    assert start("abcdef").status == "finished"
    config = Path(tmp_path / "run/config.yaml")
    config.write_text(config.read_text().replace("steps: 1\n", "steps: 0\n"))  # it shall go on
    with pytest.raises(
        ValueError, match=r"data must have the tokens of the run in .*json.* differ"
    ):
        start("abcdeg")
    assert start("abcdef").status == "finished"


@pytest.mark.long
def test_a_run_does_not_go_on_with_data_that_has_changed(tmp_path):
    data = tmp_path / "text.txt"

    def start(text: str, steps: int) -> ga.train.Run:
        data.write_text(text)
        prepared = ga.train.prepare(
            RunConfig(
                data=str(data), tokenizer="characters", length=8, batch_tokens=64, steps=steps,
                model_options={"depth": 1, "dim": 8, "heads": 1}, out=str(tmp_path / "run"),
            )
        )  # fmt: skip
        return ga.train.fit(
            prepared.model,
            prepared.objective,
            prepared.config,
            prepared.train,
            tokenizer=prepared.tokenizer,
        )

    text = "to be or not to be " * 20
    assert start(text, 1).info["data"]
    with pytest.raises(
        ValueError, match=r"data must be the data with which the run in .* began, but it differs"
    ):
        start(text.replace("to be or", "or be to", 1), 2)
    assert start(text, 2).training[-1]["step"] == 2


# The config.


@pytest.mark.parametrize("out", ["1e-3", "010", "1_0", "0x1", "null", "no", "2024-01-01", "1:30"])
def test_a_folder_may_be_called_like_a_number(tmp_path, out):
    RunConfig(out=out).save(tmp_path / "config.yaml")
    assert RunConfig.load(tmp_path / "config.yaml") == RunConfig(out=out)


def test_numbers_with_an_exponent_are_numbers_and_a_name_occurs_once(tmp_path):
    """PyYAML reads YAML 1.1, in which 1e-4 is text."""
    file = tmp_path / "run.yaml"
    file.write_text("lr: 1e-4\ngroup: 1e-4\nmodel_options: {a: [1e-4, 2, -1E3], b: elephant}\n")
    config = RunConfig.load(file)
    assert (config.lr, config.group) == (1e-4, "1e-4")
    assert config.model_options == {"a": [1e-4, 2, -1e3], "b": "elephant"}
    assert RunConfig.parse("steps", "010") == 10
    for text in ("lr: 1\nlr: 2", "model_options: {a: [{b: 1, b: 2}]}"):
        file.write_text(text)
        with pytest.raises(ValueError, match=r"run\.yaml: is not YAML: '(lr|b)' occurs twice"):
            RunConfig.load(file)


def test_yaml_that_holds_itself_or_is_too_deep_is_refused(tmp_path):
    for text in ("{a: &x [*x]}", "[" * 600):
        with pytest.raises(ValueError, match="model_options must be a value in YAML"):
            RunConfig.parse("model_options", text)
        (tmp_path / "run.yaml").write_text(text)
        with pytest.raises(ValueError, match=r"run\.yaml: is not YAML"):
            RunConfig.load(tmp_path / "run.yaml")


def test_a_seed_is_one_that_all_generators_take():
    with pytest.raises(ValueError, match=r"seed must be < 2\*\*32"):
        RunConfig(seed=2**32)
    assert RunConfig(seed=2**32 - 1).seed == 2**32 - 1
