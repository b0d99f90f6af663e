"""The search of the documentation: words that users type lead to the right page first.

Sphinx searches in the browser (searchtools.js), in an index that it writes with the pages.
:func:`search` does the same with that index.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("sphinx_copybutton", reason="the documentation needs the extra `docs`")
from sphinx.search.en import SearchEnglish

ROOT = Path(__file__).resolve().parents[2]
WITHOUT_FIGURES = "\n\ndef draw_and_list(app) -> None:\n    pass\n"

FIRST = {  # what users type, and the page that answers it; a second page is as good
    "quickstart": "index start/tutorial",
    "tutorial": "start/tutorial",
    "install": "start/install",
    "sliding window": "graphs",
    "local attention": "graphs",
    "kNN": "graphs",
    "GQA": "mechanisms/dot-product-attention",
    "MQA": "mechanisms/dot-product-attention",
    "padding": "masks",
    "GPU": "gpu",
    "custom attention": "own-mechanism",
    "cosine attention": "own-mechanism",
    "attention sink": "mechanisms/index",
    "ALiBi": "mechanisms/edge-bias",
    "export": "export",
    "ONNX": "export",
    "save": "save-and-load",
    "KV cache": "generation",
    "cross-attention": "mechanisms/dot-product-attention",
    "Hugging Face": "integrations/index",
}
MAINTAINERS = "log", "changelog", "benchmarks/records", "benchmarks/kernels", "benchmarks/emulated"


class Result(NamedTuple):
    """A line of the page of results."""

    page: str
    title: str
    anchor: str
    score: int


def search(index: dict[str, Any], query: str) -> list[Result]:
    """Return what searchtools.js shows for a query, best first."""
    wanted = query.lower().strip()
    words = re.findall(r"\w+", wanted)
    main = [*titles(index, wanted), *objects(index, words), *terms(index, words)]
    others: list[Result] = []
    for entry, places in index["indexentries"].items():
        if wanted in entry and len(wanted) >= len(entry) / 2:
            score = round(100 * len(wanted) / len(entry))
            for page, anchor, is_main in places:
                result = Result(index["docnames"][page], index["titles"][page], anchor, score)
                (main if is_main else others).append(result)

    for results in (main, others):  # the best first; of equals, the one that was found last
        results.reverse()
        results.sort(key=lambda result: (-result.score, result.title.lower()))
    shown: dict[tuple[str, str, str], Result] = {}
    for result in main + others:  # what looks the same is shown once
        shown.setdefault(result[:3], result)
    return list(shown.values())


def titles(index: dict[str, Any], wanted: str) -> Iterator[Result]:
    """Yield the titles and headings that contain the query and are at most twice as long."""
    for title, places in index["alltitles"].items():
        if wanted in title.lower() and len(wanted) >= len(title) / 2:
            for page, anchor in places:
                whole = index["titles"][page]
                score = round(15 * len(wanted) / len(title)) + (whole == title)
                shown = title if whole == title else f"{whole} > {title}"
                yield Result(index["docnames"][page], shown, anchor or "", score)


def objects(index: dict[str, Any], words: list[str]) -> Iterator[Result]:
    """Yield the objects of the API whose name contains a word; other words must be near."""
    for word in words:
        for prefix, members in index["objects"].items():
            for page, kind, priority, _, name in members:
                full = f"{prefix}.{name}".lower() if prefix else name.lower()
                near = f"{prefix} {name} {index['objnames'][str(kind)][2]} {index['titles'][page]}"
                if word not in full or any(other not in near.lower() for other in words):
                    continue
                last = full.split(".")[-1]
                score = 11 if word in (full, last) else 6 if word in last else 0
                score += {0: 15, 1: 5, 2: -5}.get(priority, 0)
                yield Result(index["docnames"][page], full, full, score)


def terms(index: dict[str, Any], words: list[str]) -> Iterator[Result]:
    """Yield the pages that contain all words, by the best place of any word."""
    language = SearchEnglish({})
    stems = {language.stem(w) for w in words if w not in language.stopwords and not w.isdigit()}
    scores: dict[int, dict[str, int]] = defaultdict(dict)
    for stem in stems:
        found: list[tuple[Any, int]] = []
        for table, whole in (("terms", 5), ("titleterms", 15)):
            if stem in index[table]:
                found.append((index[table][stem], whole))
        for table, part in (("terms", 2), ("titleterms", 7)):
            if stem not in index[table] and len(stem) > 2:
                found += [(pages, part) for term, pages in index[table].items() if stem in term]
        for pages, score in found:
            for page in pages if isinstance(pages, list) else [pages]:
                scores[page][stem] = score
    for page, own in scores.items():
        if len(own) in (len(stems), sum(len(stem) > 2 for stem in stems)):
            yield Result(index["docnames"][page], index["titles"][page], "", max(own.values()))


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The index of the pages, built without figures and without the tables that take minutes."""
    folder = tmp_path_factory.mktemp("search")
    docs = folder / "docs"
    shutil.copytree(ROOT / "docs", docs, ignore=shutil.ignore_patterns("_build", "_figures"))
    shutil.copy(ROOT / "CHANGELOG.md", folder)
    (docs / "_figures").mkdir()
    for page in docs.rglob("*.md"):
        for name in re.findall(r"_figures/(\w+\.\w+)", page.read_text(encoding="utf-8")):
            (docs / "_figures" / name).touch()
    with (docs / "conf.py").open("a", encoding="utf-8") as conf:
        conf.write(WITHOUT_FIGURES)
    options = ["-D", "html_theme=basic", "-D", "nb_execution_mode=off"]
    command = ["-m", "sphinx", "-Q", *options, str(docs), str(folder / "html")]
    subprocess.run([sys.executable, *command], check=True)
    text = (folder / "html" / "searchindex.js").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text.removeprefix("Search.setIndex(").removesuffix(")"))
    return found


@pytest.mark.long
@pytest.mark.parametrize("query", FIRST)
def test_what_users_type_leads_to_the_right_page_first(query: str, index: dict[str, Any]) -> None:
    results = search(index, query)
    assert results[0].page in FIRST[query].split(), results[:5]


@pytest.mark.long
def test_pages_for_maintainers_are_never_found(index: dict[str, Any]) -> None:
    numbers = {index["docnames"].index(page) for page in MAINTAINERS}
    for table in ("terms", "titleterms"):
        for pages in index[table].values():
            assert not numbers & set(pages if isinstance(pages, list) else [pages])


def test_the_scorer_prefers_titles_to_text_and_whole_words_to_parts() -> None:
    small = {
        "docnames": ["a", "b", "c"],
        "titles": ["Masks", "Windows", "Blocks"],
        "alltitles": {"Masks": [[0, None]], "Windows": [[1, None]], "Blocks": [[2, None]]},
        "terms": {"mask": [1], "masked": [2]},
        "titleterms": {"mask": [0], "window": [1], "block": [2]},
        "objects": {}, "objnames": {},
        "indexentries": {"stencil": [[2, "", True]], "stencils": [[1, "", False]]},
    }  # fmt: skip
    assert [(r.page, r.score) for r in search(small, "masks")] == [("a", 16), ("b", 5)]
    assert [r.page for r in search(small, "stencil")] == ["c", "b"]  # entries with "!" come first
