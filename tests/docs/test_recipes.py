"""Recipes that are notebooks: without outputs in git, installable from a wheel, shown in a browser.

Sphinx executes them when it builds the documentation (`make docs`).
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pages_explorer import Browser, chromium

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "docs" / "recipes"
PAGES = ROOT / "docs" / "_build" / "html" / "recipes"  # from `make docs`
NOTEBOOKS = sorted(path.stem for path in RECIPES.glob("*.ipynb"))
WITH_GRAPHATTN = {"graphattn", "torch", "numpy"}  # pip installs these with it
PACKAGES = {"sklearn": "scikit-learn", "PIL": "pillow"}  # by the name that is imported


def cells(name: str, kind: str = "code") -> list[dict[str, Any]]:
    found = json.loads((RECIPES / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]
    return [cell for cell in found if cell["cell_type"] == kind]


def source(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def parsed(name: str) -> list[ast.Module]:
    """Parse the code cells, without the commands of IPython."""
    return [ast.parse(re.sub(r"%.*", "pass", source(c)) if i == 0 else source(c))
            for i, c in enumerate(cells(name))]  # fmt: skip


def calls(tree: ast.Module) -> set[str]:
    return {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}


def test_five_recipes_are_notebooks_and_all_ten_are_in_the_table() -> None:
    index = (RECIPES / "index.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[.+?\]\(([\w-]+)\.(ipynb|md)\) \| (notebook|page) \|", index, re.M)
    assert sorted(name for name, suffix, _ in rows if suffix == "ipynb") == NOTEBOOKS
    assert len(NOTEBOOKS) == 5
    assert len(rows) == len({name for name, *_ in rows}) == 10
    assert all((suffix == "ipynb") == (form == "notebook") for _, suffix, form in rows)
    listed = index.split("```{toctree}")[1].split("```")[0].split()[1:]
    assert listed == [name for name, *_ in rows]


@pytest.mark.every_case
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_has_no_outputs_and_its_code_can_be_parsed(name: str) -> None:
    for cell in cells(name):
        assert cell["outputs"] == []
        assert cell["execution_count"] is None
    assert len(parsed(name)) > 3


@pytest.mark.every_case
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_the_first_cell_installs_the_wheel_and_all_that_is_imported(name: str) -> None:
    first, *others = parsed(name)
    (attempt,) = first.body
    assert isinstance(attempt, ast.Try)
    command = re.search(r"%pip install --quiet graphattn-\*\.whl(.*)", source(cells(name)[0]))
    assert command is not None
    needed = set()
    for node in (node for tree in others for node in ast.walk(tree)):
        if isinstance(node, ast.Import):
            needed |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            needed.add(str(node.module).split(".")[0])
    needed -= WITH_GRAPHATTN | sys.stdlib_module_names
    assert set(command[1].split()) == {PACKAGES.get(package, package) for package in needed}


@pytest.mark.every_case
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_ends_in_a_picture_or_a_number(name: str) -> None:
    assert {"plt.show", "print"} & calls(parsed(name)[-1])


@pytest.mark.every_case
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_every_picture_is_described_for_those_who_do_not_see_it(name: str) -> None:
    for cell, tree in zip(cells(name), parsed(name), strict=True):
        described = len(cell["metadata"].get("mystnb", {}).get("image", {}).get("alt", "")) > 30
        assert described == ("plt.show" in calls(tree))


@pytest.mark.long
def test_the_clusters_of_an_image_come_out_of_the_notebook(tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat", reason="needs the extra `docs`")
    client = pytest.importorskip("nbclient", reason="needs the extra `docs`")
    notebook = nbformat.read(RECIPES / "clusters.ipynb", as_version=4)
    folder = {"metadata": {"path": str(tmp_path)}}
    client.NotebookClient(notebook, timeout=300, resources=folder).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    agreement = re.findall(r"([\d.]+)$", outputs[-1]["text"], re.M)
    assert len(agreement) == 3
    assert agreement[-1] == "1.00"  # the clusters of colours with themselves
    assert all(0 < float(number) < 1 for number in agreement[:2])


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.mark.long
@pytest.mark.every_case
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_page_shows_its_outputs_at_any_width(name: str, browser: Browser) -> None:
    page = PAGES / f"{name}.html"
    if not page.exists() or page.stat().st_mtime < (RECIPES / f"{name}.ipynb").stat().st_mtime:
        pytest.skip("no page of this notebook: run `make docs` first")
    pictures = sum("plt.show" in calls(tree) for tree in parsed(name))
    for width in (1280, 390):
        browser.open(page, width)
        found = browser.run(
            "return [...document.querySelectorAll('.cell_output img')].map("
            "i => [i.naturalWidth, i.getBoundingClientRect().right, i.alt.length])"
        )
        assert len(found) == pictures
        assert all(natural > 300 and right <= width and alt for natural, right, alt in found)
        assert browser.run("return document.documentElement.scrollWidth") <= width
        printed = "return document.querySelectorAll('.cell_output pre').length"
        assert browser.run(printed) > 0
        assert browser.complaints() == []
