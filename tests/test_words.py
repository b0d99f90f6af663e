"""Documentation strings are read alone, in tooltips: their first sentences stand alone."""

from __future__ import annotations

import pytest
import words


@pytest.mark.parametrize("folder", ["graphattn", "kernels", "examples", "tests"])
def test_first_sentences_begin_with_a_verb_or_a_noun(folder: str) -> None:
    assert not [str(beginning) for beginning in words.found((folder,))]


def test_sentences_that_point_outside_are_found() -> None:
    for sentence in (
        "What a row holds.",
        "Of every token.",
        "The same by torch.",
        "Its derivative.",
        "Which edges are kept.",
        "In no order.",
    ):
        assert words.begins_badly(sentence), sentence
    for sentence in (
        "Rows of a tile.",
        "Return the rows.",
        "The rows of a tile.",
        "RBF attention.",
    ):
        assert not words.begins_badly(sentence), sentence


def test_documentation_of_files_classes_and_functions_is_read(tmp_path, monkeypatch) -> None:
    source = '''"""Files."""
class A:
    """What a class is."""
    def f(self):
        """Its value."""
'''
    (tmp_path / "some.py").write_text(source)
    monkeypatch.setattr(words, "ROOT", tmp_path)
    found = [(b.name, b.line, b.sentence) for b in words.found(("some.py",))]
    assert found == [("A", 3, "What a class is."), ("f", 5, "Its value.")]
