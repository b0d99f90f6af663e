"""The page that compares libraries: its counts are those of its code, its numbers have sources."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).resolve().parents[1] / "docs/start/compare.md").read_text("utf-8")
LIBRARIES = "FlexAttention", "NATTEN", "KeOps", "PyG", "xFormers", "fla", "graphattn"
TASKS = "window", "neighbourhood", "points"
NUMBER = r"[⁰¹²³⁴⁵⁶⁷⁸⁹]+"
FEATURES = "| feature | " + " | ".join(LIBRARIES) + " |"


def cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip().strip("|").split("|")]


def tables(head: str) -> list[list[list[str]]]:
    """Rows of every table that begins with this line, each a list of cells."""
    found = []
    for part in PAGE.split(f"\n{head}\n")[1:]:
        rows = part.split("\n\n")[0].splitlines()[1:]
        found.append([cells(row) for row in rows])
    return found


def section(library: str, task: str) -> str:
    return PAGE.split(f"\n### {library}, {task}\n")[1].split("\n### ")[0]


def lines_of_code(library: str, task: str) -> list[str]:
    """Lines of the last block: the one before it, if there is one, makes the inputs."""
    blocks = re.findall(r"```python\n(.*?)```", section(library, task), re.S)
    lines = blocks[-1].splitlines() if blocks else []
    lines = [re.sub(r"^(>>>|\.\.\.) ?", "", line) for line in lines]
    return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]


@pytest.mark.parametrize("library", LIBRARIES)
def test_counts_of_lines_are_those_of_the_code(library):
    (counts,) = tables("| library | " + " | ".join(TASKS) + " |")
    (said,) = [row[1:] for row in counts if row[0] == library]
    for task, count in zip(TASKS, said, strict=True):
        if count == "cannot":
            assert "Cannot: " in section(library, task)
        assert count == (str(len(lines_of_code(library, task))) if count != "cannot" else count)
        assert bool(lines_of_code(library, task)) == (count != "cannot")


def test_code_that_is_not_ours_can_be_read_by_python():
    for library in LIBRARIES:
        for task in TASKS:
            compile("\n".join(lines_of_code(library, task)), f"{library}, {task}", "exec")


def test_every_cell_of_features_has_a_source_or_says_that_none_was_found():
    found = tables(FEATURES)
    assert len(found) >= 5
    for table in found:
        for row in table:
            assert len(row) == 1 + len(LIBRARIES), row
            for cell in row[1:]:
                assert cell == "not found" or re.search(rf" \[{NUMBER}\]$", cell), row


def test_every_number_is_a_link_and_is_named_below_its_table():
    links = dict(re.findall(rf"^\[({NUMBER})\]: (\S+)$", PAGE, re.M))
    assert set(re.findall(rf"\[({NUMBER})\](?!:)", PAGE)) == set(links)
    for part in PAGE.split(f"\n{FEATURES}\n")[1:]:
        table, sources = part.split("\n\n")[:2]
        assert sources.startswith("Sources: ")
        assert re.findall(rf"\[({NUMBER})\]", sources) == sorted(
            set(re.findall(rf"\[({NUMBER})\]", table)), key=list(links).index
        )


def test_links_to_other_libraries_name_a_version_or_a_commit():
    for url in re.findall(r"^\[.+\]: (https://github\.com/\S+)$", PAGE, re.M):
        assert re.search(r"/(blob|tree)/(v[\d.]+|[0-9a-f]{9})/|/issues/\d+$", url), url
