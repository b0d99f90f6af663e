"""Pages say in a browser, wide and on a phone, what Python computes: by mouse and by keys."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from pages_explorer import Browser, chromium, data_of

import graphattn as ga

pytestmark = pytest.mark.long
WIDTHS = 1280, 390
RANDOM = torch.Generator().manual_seed(0)
WINDOWS = {w: ga.window_path_graph(60, w) for w in (1, 2, 4, 8)}
LEFT, RIGHT, DOWN, HOME, END, TAB = "\ue012", "\ue014", "\ue015", "\ue011", "\ue010", "\ue004"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("explorer")


@pytest.fixture(scope="module")
def browser(folder):
    with chromium(folder / "profile") as started:
        yield started


@pytest.fixture(scope="module")
def pages(folder) -> dict[str, Path]:
    """One page of every kind."""
    model = ga.models.CausalLM(20, 16, depth=2, heads=2).eval()
    tokens = torch.randint(20, (1, 30), generator=RANDOM)
    turns = torch.arange(24.0) * 1.7
    places = torch.stack([5 * turns.cos(), 5 * turns.sin(), 1.5 * torch.arange(24.0)], dim=1)
    structure = ga.data.Structure("ARNDCQEGHILK" * 2, places)
    protein = ga.models.ProteinModel(16, depth=2, heads=2, mixer="dot").eval()
    points = torch.randn(40, 2, generator=RANDOM)
    subjects = {
        "window": (WINDOWS, {"option": "window", "start": 4}),
        "attention": (model, {"inputs": tokens}),
        "structure": (protein, {"inputs": structure}),
        "flow": (ga.dynamics.krause_flow(points, radius=0.8, steps=12), {}),
    }
    return {n: ga.explore(s, folder / f"{n}.html", **kw) for n, (s, kw) in subjects.items()}


def reached(graph: ga.TokenGraph, token: int, layers: int) -> int:
    """Count the tokens whose information reaches a token, by a plain search."""
    known = {token}
    for _ in range(layers):
        known |= {j for j, i in graph.edge_index.T.tolist() if i in known}
    return len(known)


@pytest.mark.every_case
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["window", "attention", "structure", "flow"])
def test_a_page_fits_draws_something_and_complains_of_nothing(browser, pages, name, width):
    browser.open(pages[name], width)
    assert browser.run("return document.documentElement.scrollWidth") <= width
    blank = """return [...document.querySelectorAll('canvas')].filter((canvas) => {
        const {data} = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
        return new Set(new Uint32Array(data.buffer)).size < 3; }).map((canvas) => canvas.id)"""
    assert browser.run(blank) == []
    dense = browser.run("const c = document.querySelector('canvas'); return c.width/c.clientWidth")
    assert dense == pytest.approx(1 if width > 600 else 2, abs=0.01)
    assert browser.complaints() == []


@pytest.mark.parametrize("width", WIDTHS)
def test_the_sliders_show_other_graphs_and_more_layers(browser, pages, width):
    browser.open(pages["window"], width)
    data = data_of(pages["window"])
    assert browser.text("said").startswith("token 30 sees 8 tokens: 26–29, 31–34; 8 tokens see it")
    for at, (window, graph) in enumerate(WINDOWS.items()):
        browser.set("option", at)
        assert browser.text("option-value") == str(window)
        assert f"token 30 sees {2 * window} tokens" in browser.text("said")
        assert browser.text("settled").startswith(f"{graph.num_edges:,} edges. After")
        assert browser.text("fiedler") == data["graphs"][at]["words"]
        assert f"{ga.spectral.fiedler_value(graph):.4g}" in browser.text("fiedler")
        for layers in (1, 3):
            browser.set("layers", layers)
            said = browser.text("reach")
            assert f"information of {reached(graph, 30, layers)} of 60 tokens" in said
    assert browser.complaints() == []


@pytest.mark.parametrize("width", WIDTHS)
def test_keys_and_the_mouse_choose_a_token(browser, pages, width):
    browser.open(pages["window"], width)
    browser.run("document.getElementById('matrix').focus()")
    browser.press(RIGHT, DOWN)
    assert browser.text("said").startswith("token 32 sees 8 tokens")
    browser.press(HOME)
    assert browser.text("said").startswith("token 0 sees 4 tokens: 1–4;")
    browser.press(END)
    assert browser.text("said").startswith("token 59 sees 4 tokens: 55–58;")
    browser.press("+", "+")
    browser.press("0")
    browser.point("matrix", 0.5, 0.262)  # passes, and does not choose
    assert browser.text("said").startswith("token 14 ")
    browser.point("drawing", 0.2, 0.5, click=True)
    assert browser.text("said").startswith("token 10 ")
    browser.point("matrix", 0.28, 0.262, click=True)
    assert browser.text("pointed") == "14 sees 15"
    assert browser.text("said").startswith("token 14 sees 8 tokens: 10–13, 15–18;")
    browser.set("shape", "circle")
    browser.point("drawing", 0.5, 0.035 if width > 600 else 0.04, click=True)
    assert browser.text("said").startswith("token 0 ")
    assert browser.complaints() == []


def test_the_tab_key_reaches_every_control_and_the_chosen_token_is_spoken(browser, pages):
    browser.open(pages["structure"])
    reached_in_turn = []
    for _ in range(16):
        browser.press(TAB)
        reached_in_turn.append(browser.run("return document.activeElement.id"))
    wanted = ["token", "token-number", "layers", "call", "head", "matrix", "closer", "farther",
              "whole", "drawing", "shape", "turn", "tilt"]  # fmt: skip
    assert reached_in_turn[: len(wanted)] == wanted
    names = """return [...document.querySelectorAll('input, select, button, canvas')].filter((it) =>
        !(it.labels?.length || it.textContent || it.hasAttribute('aria-label') ||
          it.hasAttribute('aria-labelledby'))).map((it) => it.id)"""
    assert browser.run(names) == []
    browser.set("token", 5)
    assert browser.run("return document.getElementById('live').ariaLive") == "polite"
    wait = "setTimeout(() => arguments[0](document.getElementById('live').textContent), 600)"
    spoken = browser.send("POST", "/execute/async", {"script": wait, "args": []})
    assert spoken.startswith("token 5 (Q6) sees ")


def test_the_weights_of_a_layer_and_a_head_are_those_of_the_model(browser, pages):
    model = ga.models.CausalLM(20, 16, depth=2, heads=2).eval()
    tokens = torch.randint(20, (1, 30))
    page = ga.explore(model, pages["flow"].parent / "weights.html", inputs=tokens)
    with torch.no_grad(), ga.diagnostics.record(model) as recording:
        model(tokens)
    browser.open(page)
    browser.set("token", 12)
    for layer in (0, 1):
        browser.set("call", layer)
        for head in (-1, 1):
            browser.set("head", head)
            row = recording[layer].matrix[0, :, 12]
            row = row.mean(dim=0) if head < 0 else row[head]
            said = browser.text("said")
            found = re.findall(r"(\d+) with (\d\.\d{3})", said)
            assert len(found) == 5
            assert [float(w) for _, w in found] == pytest.approx(
                row.sort(descending=True).values[:5].tolist(), abs=6e-4
            )
            for token, weight in found:
                assert float(row[int(token)]) == pytest.approx(float(weight), abs=6e-4)
    browser.set("call", -1)
    assert "with" not in browser.text("said")
    assert browser.complaints() == []


def test_a_structure_turns_and_is_coloured_by_what_a_residue_attends_to(browser, pages):
    browser.open(pages["structure"])
    image = "return document.getElementById('drawing').toDataURL()"
    seen = {browser.run(image)}
    for name, value in (("turn", 60), ("tilt", 40), ("token", 3), ("head", 1), ("call", -1)):
        browser.set(name, value)
        seen.add(browser.run(image))
    assert len(seen) == 6
    assert "token 3 (D4)" in browser.text("said")


@pytest.mark.parametrize("width", WIDTHS)
def test_steps_of_a_flow_show_its_clusters(browser, pages, width):
    browser.open(pages["flow"], width)
    flow = data_of(pages["flow"])["flow"]
    for step in (0, 5, 12):
        browser.set("step", step)
        count = flow["counts"][step]
        assert browser.text("clusters") == f"Step {step}: {count} cluster{'s' * (count > 1)}."
    browser.set("step", 9)
    browser.run("document.getElementById('play').click()")
    wait = """const done = arguments[0], last = '12';
        const look = () => document.getElementById('step-value').textContent === last ? done(true)
            : setTimeout(look, 50);
        setTimeout(look, 100);"""
    assert browser.send("POST", "/execute/async", {"script": wait, "args": []})
    assert browser.text("play") == "play"
    browser.set("token", 7)
    assert browser.text("said") == f"token 7 ends in cluster {flow['clusters'][7] + 1}."
    assert browser.complaints() == []


def test_the_page_follows_the_reader_s_dark_mode(browser: Browser, pages):
    browser.open(pages["attention"])
    image = "return document.getElementById('matrix').toDataURL()"
    paper = "return getComputedStyle(document.body).backgroundColor"
    light = browser.run(image), browser.run(paper)
    dark = [{"name": "prefers-color-scheme", "value": "dark"}]
    browser.devtools("Emulation.setEmulatedMedia", features=dark)
    browser.settle()
    assert browser.run(paper) != light[1]
    assert browser.run(image) != light[0]
    browser.devtools("Emulation.setEmulatedMedia", features=[])
