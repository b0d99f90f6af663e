"""`graphattn explore` writes the page of the explorer for kinds of graphs and for proteins."""

from __future__ import annotations

import json
import re

import pytest
from cli_helpers import done, refused, shared

import graphattn as ga
from graphattn.cli.graph.kinds import KINDS


def data_of(path):
    html = path.read_text(encoding="utf-8")
    return json.loads(re.search(r'id="data">(.*?)</script>', html, re.S)[1])


@pytest.fixture
def page(tmp_path):
    return tmp_path / "page.html"


def test_a_window_has_a_slider_that_begins_with_the_window_that_was_asked_for(page):
    output = done("explore", "window-path", "--num-tokens", 20, "--window", 3, "--out", page).output
    assert output.strip() == str(page)
    data = data_of(page)
    assert data["option"] == "window"
    assert data["values"] == [1, 2, 3, 4, 8, 16, 32]  # of 32 and 64, one: all see all
    assert data["values"][data["shown"]] == 3
    for window, graph in zip(data["values"], data["graphs"], strict=True):
        assert graph["num_edges"] == ga.window_path_graph(20, window).num_edges


@pytest.mark.every_case
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_can_be_explored(kind, page):
    done("explore", kind, "--out", page)
    data = data_of(page)
    shown = data["graphs"][data["shown"]]
    options = {**KINDS[kind].options}
    if "global_tokens" in options:
        options["global_tokens"] = range(options["global_tokens"])
    assert shown["num_edges"] == KINDS[kind].build(**options).num_edges
    assert (data["positions"] is not None) == ("height" in options)


def test_a_structure_is_explored_alone_or_with_the_attention_of_a_model(page, tmp_path):
    file = shared("structure/pdb/1l2y.pdb")
    done("explore", file, "--neighbors", 5, "--out", page)
    data = data_of(page)
    assert data["values"][data["shown"]] == 5
    assert data["dimensions"] == 3
    ga.save(ga.models.ProteinModel(16, depth=2, heads=2, mixer="dot"), tmp_path / "model")
    done("explore", file, "--model", tmp_path / "model", "--out", page)
    assert [call["heads"] for call in data_of(page)["calls"]] == [2, 2]


def test_bad_input_is_one_line(page, tmp_path):
    assert "did you mean 'window-path'" in refused("explore", "windowpath", "--out", page)
    line = refused("explore", "window-path", "--neighbors", 4, "--out", page)
    assert "--neighbors is an option of a file, and not of the kind window-path" in line
    assert "--radius is not an option of" in refused("explore", "window-path", "--radius", 1)
    assert "5,000 tokens" in refused("explore", "causal", "--tokens", 6000, "--out", page)
    assert "--out" in refused("explore", "causal", "--out", tmp_path / "no" / "page.html")
    fasta = tmp_path / "a.fasta"
    fasta.write_text(">a\nMKV\n")
    assert "add --model FOLDER" in refused("explore", fasta, "--out", page)
    assert "--window is an option of a kind" in refused("explore", fasta, "--window", 1)
    assert not page.exists()
