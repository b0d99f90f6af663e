"""A report is one page: nothing is loaded, whatever it is told is text, and both modes are read."""

from __future__ import annotations

import base64
import json
import math
import re
import sys
from datetime import date

import pytest
import torch
from cli_helpers import Page, page_of

import graphattn as ga
from graphattn.cli import outputs
from graphattn.cli.report import Figure, write_report
from graphattn.plain_tables import Cells, cells_of, plain_table

MARGIN = 16  # CSS pixels at either side of a page
HOSTILE = """<script>alert(1)</script>"><img src=x onerror=alert(2)>{{ 7 * 7 }}&lt;"""
ROWS = [["one", "1"], ["two", "2"]]
TABLE = Cells("a table", "its caption", ["name", "number"], ROWS, [False, True])


@pytest.fixture
def page(tmp_path):
    """(arguments of write_report) -> the page it writes."""

    def write(title="a title", **rest) -> Page:
        path = write_report(tmp_path / "report.html", title, **rest)
        assert path == tmp_path / "report.html"
        return page_of(path)

    return write


@pytest.fixture
def drawn():
    figure = pytest.importorskip("matplotlib.figure", reason="figures need the extra `plots`")
    made = figure.Figure(figsize=(2, 1))
    made.add_subplot().plot([1, 2])
    return made


def test_everything_said_is_on_the_page(page, drawn):
    written = page(
        intro="an introduction",
        figures=[Figure("a figure", "what it shows", drawn)],
        tables=[TABLE],
        facts={"seed": 17},
    )
    for words in ("a title", "an introduction", "a figure", "what it shows", "a table", "two"):
        assert words in written.text
    assert written.tags.count("img") == written.tags.count("figcaption") == 1
    assert written.tags.count("tr") == 3
    assert written.html.count('class="number"') == 3  # the header and both cells of one column


def test_nothing_is_loaded_from_anywhere(page, drawn):
    written = page(figures=[Figure("one", "", drawn), Figure("two", "", {"a": drawn, "b": drawn})])
    assert len(written.links) == 3
    assert all(link.startswith("data:image/png;base64,") for link in written.links)
    pictures = [base64.b64decode(link.split(",")[1]) for link in written.links]
    assert all(picture.startswith(b"\x89PNG") for picture in pictures)
    assert not {"script", "link", "iframe"} & set(written.tags)
    assert "url(" not in written.html
    assert "@import" not in written.html


def test_whatever_characters_it_is_given_are_text(page, drawn):
    written = page(
        HOSTILE,
        intro=HOSTILE,
        figures=[Figure(HOSTILE, HOSTILE, drawn)],
        tables=[Cells(HOSTILE, HOSTILE, [HOSTILE], [[HOSTILE]], [False])],
        facts={HOSTILE: HOSTILE},
    )
    assert "script" not in written.tags
    assert written.tags.count("img") == 1
    assert written.text.count(HOSTILE) >= 10
    assert "49" not in re.sub(r"base64,[^\"]*", "", written.html)


def test_a_figure_has_its_own_size_where_there_is_room_and_panels_are_named(page, drawn):
    written = page(figures=[Figure("f", "", {"left": drawn, "right": drawn}, "both")])
    sizes = re.findall(r'<img alt="(.*?)" width="(.*?)" height="(.*?)"', written.html)
    assert sizes == [("left", "192", "96"), ("right", "192", "96")]  # 96 CSS pixels per inch
    assert written.html.count('<div class="panel" style="width: 192px">') == 2
    style = written.html.split("<style>")[1].split("</style>")[0]
    rules = dict(re.findall(r"^([^@{}\n]+?) \{(.*?)\}", style, flags=re.DOTALL | re.MULTILINE))
    assert "flex-wrap: wrap" in rules[".panels"]
    for name in (".panel", "figure img"):
        assert "max-width: 100%" in rules[name]
    assert f"padding: 0 {MARGIN / 16:g}rem" in rules["body"]


def test_a_table_wider_than_a_phone_scrolls_alone_and_says_that_there_is_more(page, drawn):
    wide = Cells(
        "wide", "", [f"a long header {n}" for n in range(12)], [["1.000"] * 12], [True] * 12
    )
    html = page(figures=[Figure("f", "", drawn)], tables=[TABLE, wide, TABLE]).html
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in html
    # Every table lies in a container that can be scrolled, with the keyboard too.
    assert len(re.findall(r'<div class="scroll"[^>]*tabindex="0">\s*<table>', html)) == 3
    style = html.split("<style>")[1].split("</style>")[0]
    scroll = re.search(r"\.scroll \{(.*?)\}", style, flags=re.DOTALL)[1]
    assert "overflow-x: auto" in scroll
    assert scroll.count("local") == scroll.count("scroll ") == 2  # shades at both edges
    # Names of files without a blank break, so that no line is wider than the page.
    assert re.search(r"body \{[^}]*overflow-wrap: anywhere", style)
    assert "max-width: 100%" in re.search(r"figure img \{(.*?)\}", style, flags=re.DOTALL)[1]


def test_a_table_without_a_caption_has_none(page):
    bare = plain_table("bare")
    bare.add_column("one")
    assert "None" not in page(tables=[cells_of(bare)]).text


def test_the_footer_says_what_made_it(page):
    footer = page(facts={"seed": 17, "size": "small"}).html.split("<footer>")[1]
    for words in (ga.__version__, torch.__version__, date.today().isoformat(), "seed 17"):
        assert words in footer


def test_dark_mode_redefines_every_colour_and_no_other_colour_is_used(page, drawn):
    style = page(figures=[Figure("f", "", drawn)]).html.split("<style>")[1].split("</style>")[0]
    light, dark = re.findall(r":root \{(.*?)\}", style, flags=re.DOTALL)
    names = [set(re.findall(r"(--[a-z]+):", part)) for part in (light, dark)]
    assert names[0] == names[1] >= {"--ink", "--paper"}
    assert set(re.findall(r"var\((--[a-z]+)\)", style)) <= names[0]
    rules = re.sub(r":root \{.*?\}", "", style, flags=re.DOTALL)
    # Pictures are drawn dark on white; their card is the one thing that has one colour.
    assert re.findall(r"#[0-9a-f]{3,6}", rules) == ["#fff"]
    assert "color-scheme: light dark" in light


def test_a_page_without_figures_needs_no_matplotlib(page, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert page(tables=[TABLE]).tags.count("table") == 1
    with pytest.raises(ImportError, match=r"graphattn\[plots\]"):
        outputs.check_figures_can_be_drawn()


def test_a_json_file_holds_null_where_a_number_is_infinite(tmp_path):
    record = {"a": math.inf, "b": [1.5, math.nan, {"c": -math.inf}], "d": (1, "λ")}
    outputs.write_json(tmp_path / "record.json", record)
    text = (tmp_path / "record.json").read_text(encoding="utf-8")
    read = json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not valid JSON"))
    assert read == {"a": None, "b": [1.5, None, {"c": None}], "d": [1, "λ"]}
