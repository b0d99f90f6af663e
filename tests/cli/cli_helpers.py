"""Commands as they are typed, the pages that they write, and real data."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from graphattn.cli.app import app

SHARED = Path(__file__).parents[3] / "shared" / "data"


def shared(name: str) -> Path:
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"real data not there: {name}")
    return path


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def done(*arguments: object) -> Result:
    """Run a command that succeeds."""
    result = call(*arguments)
    assert result.exit_code == 0, result.output
    return result


def refused(*arguments: object) -> str:
    """Run a command that refuses its input; return the one line that says why."""
    result = call(*arguments)
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("graphattn: ")
    return line


class Page(HTMLParser):
    """Tags, headings, alternative texts, links and visible text of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.html, self.text = html, ""
        self.tags: list[str] = []
        self.levels: list[int] = []
        self.alts: list[str] = []
        self.links: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.levels += [int(tag[1])] if re.fullmatch(r"h[1-6]", tag) else []
        self.alts += [dict(attributes).get("alt", "")] if tag == "img" else []
        self.links += [value for name, value in attributes if name in ("src", "href")]

    def handle_data(self, data):
        self.text += data


def page_of(path: Path) -> Page:
    return Page(path.read_text(encoding="utf-8"))
