"""`graphattn models` lists every preset with its true size, and shows what its layers see."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch
from cli_helpers import done, refused

import graphattn as ga
from graphattn.models.presets import _PRESETS, preset


@pytest.fixture(scope="module")
def tiny() -> Iterator[str]:
    """A preset beside those that there are."""
    arguments = {
        "vocab_size": 11, "dim": 8, "depth": 4, "heads": 2, "mixer": "mix", "rank": 2,
        "edge_hidden": 4, "rope": "isometric", "step_size": "learned",
    }  # fmt: skip
    made = ga.models.Preset("SequenceEncoder", arguments, "for a [test], not to be used")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(_PRESETS, "tiny-mix", made)
        yield "tiny-mix"


@pytest.fixture(scope="module")
def everything(tiny: str) -> str:
    """Print all presets: no name is given, and every model is made to count its parameters."""
    return done("models").output


@pytest.fixture(scope="module")
def one(tiny: str) -> str:
    """Print one preset by its name."""
    return done("models", tiny).output


def counted(text: str) -> int:
    return int(text.replace(",", ""))


@pytest.mark.long
def test_every_preset_is_listed_once_with_its_class_and_its_parameters(everything: str) -> None:
    listed: dict[str, tuple[str, int]] = {}
    model = ""
    for line in everything.splitlines():
        if heading := re.fullmatch(r" ([A-Z]\w+) *", line):
            model = heading[1]
        elif row := re.fullmatch(r"  ([\w.+-]+) +([\d,]+) +\S.*", line):
            assert row[1] not in listed
            listed[row[1]] = model, counted(row[2])
    presets = ga.models.presets()
    assert set(listed) == set(presets)
    for name, (model, parameters) in listed.items():
        assert model == presets[name].model
        with torch.device("meta"):
            made = getattr(ga.models, model)(**preset(name, model))
        unique = {id(parameter): parameter.numel() for parameter in made.parameters()}
        assert parameters == sum(unique.values())


@pytest.mark.long
def test_the_size_is_that_of_the_model_in_memory(tiny: str, everything: str) -> None:
    model = ga.models.SequenceEncoder.from_preset(tiny)
    (line,) = (line for line in everything.splitlines() if tiny in line)
    assert f" {sum(len(p.flatten()) for p in model.parameters()):,} " in line
    assert "for a [test], not to be used" in " ".join(everything.split())


@pytest.mark.parametrize("tokens", [None, 2, 40])
def test_layers_are_shown_with_the_edges_that_they_have(tiny: str, tokens: int | None) -> None:
    result = done("models", tiny, *([] if tokens is None else ["--tokens", tokens]))
    N = 512 if tokens is None else tokens
    shown = re.findall(
        r"^ *([\d, -]+?) +(\w+) +([\d,]+) +(\S.*?) +([\d,]+) *$", result.output, re.M
    )
    rows = [(layers, mixer, counted(n), counted(edges)) for layers, mixer, n, _, edges in shown]
    near = sum(abs(i - j) <= 2 and i != j for i in range(N) for j in range(N))
    assert rows == [("0-1", "dot", N, N * N), ("2-3", "consensus", N, near)]


def test_arguments_are_those_of_the_config_the_presets_own_first(tiny: str, one: str) -> None:
    text = one.split("of the preset")[1]
    chosen, defaults = text.split("\n defaults ")
    assert " rope " in chosen
    assert " rope " not in defaults
    shown = dict(re.findall(r"^ *([a-z_]+) +(\S.*?) *$", chosen + defaults, re.M))
    config = ga.models.SequenceEncoder.from_preset(tiny).config
    assert {name: value for name, value in shown.items() if name in config} == {
        name: repr(value) for name, value in config.items()
    }
    assert list(config) != list(shown)
    given = list(ga.models.presets()[tiny].arguments)
    assert [name for name in shown if name in config][: len(given)] == given


@pytest.mark.parametrize("name", list(ga.models.presets()))
def test_every_preset_can_be_shown(name: str) -> None:
    assert "each sees" in done("models", name).output


def test_arguments_that_a_preset_has_for_its_mixer_are_shown_as_its_own() -> None:
    chosen, defaults = done("models", "krause-vit-small-cifar").output.split("\n defaults ")
    assert "'init_sigma'" in chosen
    assert "'init_sigma'" not in defaults


def test_bad_input_is_answered_in_one_line(tiny: str) -> None:
    for arguments, message in (
        (["tiny-max"], "NAME must be one of"),
        (["TinyMix"], "did you mean 'tiny-mix'?"),
        (["--tokens", "5"], "--tokens needs the name of a model"),
    ):
        assert message in refused("models", *arguments)


def test_nobody_takes_a_preset_for_a_trained_model(everything: str, one: str) -> None:
    for output in (everything, one):
        assert "random weights" in output


def test_what_a_structure_changes_is_said_where_it_does() -> None:
    text = "With one, each sees: 16 nearest, 4 along the chain"
    assert text in done("models", "protein-structure-1m").output
    assert "structure" not in done("models", "protein-6m").output


def test_no_line_is_wider_than_80_columns(everything: str, one: str) -> None:
    for output in (everything, one):
        assert max(map(len, output.splitlines())) <= 80
