"""The page of model families says what is run, family by family."""

import importlib.util
from pathlib import Path

import pytest
from tiny_models import FAMILIES, families

DOCS = Path(__file__).resolve().parents[2] / "docs"


def script():
    spec = importlib.util.spec_from_file_location("docs_families", DOCS / "families.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_shows_the_table_that_is_made_of_the_tests_list():
    page = (DOCS / "integrations" / "transformers.md").read_text(encoding="utf-8")
    assert "{include} ../_figures/families.md" in page
    assert '"families": families.table' in (DOCS / "conf.py").read_text(encoding="utf-8")


@pytest.mark.long
def test_the_table_says_yes_for_every_installed_family_and_names_what_is_refused():
    rows = {
        cells[1]: cells[5:-1]
        for line in script().table().splitlines()
        if len(cells := [cell.strip() for cell in line.split("|")]) > 6
    }
    for name, family in FAMILIES.items():
        row = rows[family.title]
        if name not in families():
            assert row[0] == "not in this version"
            continue
        assert row[0] == "yes"
        assert row[1] == ("" if family.kind in ("encoder", "vision") else "yes")
        assert row[2] == "yes"
        assert row[3] == ("refused: `softcap`" if name == "gemma2" else "yes")


def test_a_family_that_differs_would_not_say_yes(monkeypatch):
    module = script()
    assert module.same_as_eager("llama") == "yes"
    monkeypatch.setattr(module.tiny, "twins", lambda name: different_twins(module, name))
    assert module.same_as_eager("llama") == "no"
    assert module.generates("llama") == "no"


def different_twins(module, name):
    from graphattn.integrations import transformers as gat

    model = module.tiny.tiny(name)
    other = module.tiny.tiny(name, implementation="graphattn")
    gat.configure(other, window=3)
    return model, other
