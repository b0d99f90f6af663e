"""The documentation is complete: every public name in the API reference, every builder with its
picture, every mechanism with its page. Sphinx itself is not run here (`make docs` does)."""

import importlib
import importlib.util
import inspect
import json
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest

import graphattn as ga
from graphattn import graphs
from graphattn.nn.base.graph_layer import GraphLayer

DOCS = Path(__file__).resolve().parents[1] / "docs"
PARTS = (
    "nn", "spectral", "dynamics", "diagnostics", "data", "plot", "models", "train", "distributed"
)  # fmt: skip
PLUG_INS = ("integrations", "integrations.transformers", "integrations.torch")
MODULES = ["graphattn", *(f"graphattn.{name}" for name in (*PARTS, *PLUG_INS))]
DIRECTIVE = re.compile(
    r"^\.\. (?:auto|py:)?(currentmodule|module|function|class|exception|data)::"
    r" *([\w.]+).*(\n +:members:)?",
    re.MULTILINE,
)


def public_names(module: ModuleType) -> list[str]:
    return [name for name in getattr(module, "__all__", ()) if name != "__version__"]


def documented_names() -> Counter[str]:
    """Full names that the API pages document, with how often."""
    found: Counter[str] = Counter()
    for page in sorted((DOCS / "api").glob("*.md")):
        prefix = ""
        for kind, name, members in DIRECTIVE.findall(page.read_text(encoding="utf-8")):
            if kind in ("currentmodule", "module"):
                prefix = f"{name}."
                found[name] += kind == "module"
            else:
                found[name if name.startswith("graphattn.") else prefix + name] += 1
            if kind == "module" and members:
                found.update(f"{name}.{member}" for member in members_of(name))
    return found


def members_of(module: str) -> list[str]:
    """List the functions and classes of a module, which `automodule` with `:members:` documents.

    They have docstrings of their own.
    """
    found = importlib.import_module(module)
    objects = {name: getattr(found, name) for name in public_names(found)}
    return [n for n, o in objects.items() if inspect.isroutine(o) or inspect.isclass(o)]


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def page_of(layer: str) -> Path:
    """RotaryEmbedding -> rotary.md, KrauseAttention -> krause-attention.md."""
    words = re.findall("[A-Z][a-z]+", layer.removesuffix("Embedding"))
    return DOCS / "mechanisms" / f"{'-'.join(words).lower()}.md"


BUILDERS = [name for name in graphs.__all__ if name.endswith("_graph")] + ["union", "batch"]
MECHANISMS = [
    name
    for name in ga.nn.__all__
    if issubclass(getattr(ga.nn, name), GraphLayer) or name == "RotaryEmbedding"
]


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_is_in_the_api_reference_exactly_once(module):
    documented = documented_names()
    for name in public_names(importlib.import_module(module)):
        times = documented[f"{module}.{name}"]
        assert times == 1, f"{module}.{name} is documented {times} times in docs/api"


def test_the_api_reference_documents_public_names_only():
    public = {
        f"{module}.{name}"
        for module in MODULES
        for name in public_names(importlib.import_module(module))
    }
    assert set(+documented_names()) <= public


@pytest.mark.parametrize("builder", BUILDERS)
def test_every_builder_has_a_picture_on_the_page_of_graphs(builder):
    assert builder in script("figures").BUILDERS
    page = (DOCS / "graphs.md").read_text(encoding="utf-8")
    assert f"\n### {builder}\n" in page
    assert f"_figures/{builder}.png" in page


def test_every_picture_of_a_page_is_drawn_and_every_picture_drawn_is_shown():
    figures = script("figures")
    drawn = {*figures.BUILDERS, *figures.OTHERS, *script("gallery").FIGURES}
    shown: set[str] = set()
    for page in DOCS.rglob("*.md"):
        if "_figures" not in page.parts:
            shown |= set(re.findall(r"_figures/(\w+)\.png", page.read_text(encoding="utf-8")))
    panels: dict[str, list[int]] = {}
    for name in shown:
        figure, _, panel = re.fullmatch(r"(.+?)(_(\d+))?", name).groups()  # type: ignore[union-attr]
        panels.setdefault(figure, []).append(int(panel or 1))
    assert set(panels) == drawn
    for figure, numbers in panels.items():
        assert sorted(numbers) == list(range(1, len(numbers) + 1)), figure


def test_every_recorded_benchmark_is_shown_with_where_it_comes_from():
    shown = script("records").markdown()
    files = script("records").FILES
    assert len(files) > 5
    for file in files:
        section = shown.split(f"## {file.stem}\n")[1].split("\n## ")[0]
        found = json.loads(file.read_text(encoding="utf-8"))
        found = found.get("benchmark", found)
        for fact in found["provenance"].values():
            assert str(fact) in section
        for row in found["rows"]:
            assert f"**{row['case']}**" in section
            assert (
                f"| {row['passes']} | {row['contender']} | {1000 * row['median']:,.4g} ms"
                in section
            )


def test_speeds_in_the_readme_are_those_of_the_records():
    said = re.search(
        r"(\d+) times as fast as causal SDPA over all pairs, ([\d.]+) times as fast as "
        r"FlexAttention.*?([\d.]+) times as fast as FlexAttention forward, ([\d.]+) times forward "
        r"and backward",
        (DOCS.parent / "README.md").read_text(encoding="utf-8"),
        re.DOTALL,
    )
    assert said is not None
    found = []
    for record, passes, peer in (
        ("cpu-paper-attention", "forward", "SDPA flash, causal"),
        ("cpu-paper-attention", "forward", "FlexAttention"),
        ("visits/2026-11-26-h200", "forward", "FlexAttention"),
        ("visits/2026-11-26-h200", "forward + backward", "FlexAttention"),
    ):
        run = json.loads((DOCS / "benchmarks" / f"{record}.json").read_text())
        rows = run.get("benchmark", run)["rows"]
        medians = {
            row["contender"]: row["median"]
            for row in rows
            if (row["case"], row["passes"]) == ("causal-window", passes)
        }
        found.append(medians[f"{peer} (dot product)"] / medians["graphattn (dot product)"])
    assert [float(number) for number in said.groups()] == pytest.approx(found, rel=0.02)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_every_mechanism_has_a_page_that_leads_to_its_api(mechanism):
    page = page_of(mechanism)
    assert page.is_file()
    assert f"graphattn.nn.{mechanism}" in page.read_text(encoding="utf-8")


def test_every_command_is_on_the_page_of_the_command_line():
    from graphattn.cli.app import app

    page = (DOCS / "commands.md").read_text(encoding="utf-8")
    commands = [
        command.name or getattr(command.callback, "__name__", "")
        for command in app.registered_commands
    ]
    assert len(commands) > 10
    for command in commands:
        assert f"\n| `{command}` | " in page
        assert f"\ngraphattn {command}" in page


def test_no_page_has_a_heading_twice():
    for page in DOCS.rglob("*.md"):
        if {"_build", "_figures"} & set(page.parts) or page.name in ("kernels.md", "log.md"):
            continue
        text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.S)
        headings = Counter(re.findall(r"^#+ (.+)$", text, re.M))
        assert not [heading for heading, times in headings.items() if times > 1], page


def test_no_sentence_becomes_a_list_where_its_line_ends():
    """A line that begins with "1) " or "+ " makes a list, also in the middle of a sentence."""
    item = re.compile(r"(\d+[.)]|[-+*]) ")
    for page in (*DOCS.rglob("*.md"), DOCS.parent / "README.md"):
        if "_build" in page.parts:
            continue
        text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
        lines = text.splitlines()
        for before, line in pairwise(lines):
            is_sentence = before and before[-1] not in " .:*|" and not before.startswith(" ")
            assert not (item.match(line) and is_sentence and not item.match(before)), (page, line)


def test_no_formula_of_a_docstring_is_one_long_line():
    """About 90 signs of TeX fit beside the contents; what is wider is broken, or scrolls."""
    for module in (importlib.import_module(name) for name in MODULES):
        for name in public_names(module):
            doc = inspect.getdoc(getattr(module, name)) or ""
            for formula in re.findall(r"\.\. math::(.*?)(?:\n\S|\n\n\S|\Z)", doc, re.S):
                for line in re.split(r"\\\\\n|\n\n", formula):
                    shown = re.sub(r"\\(?:[a-zA-Z]+|[,;! ])|[{}&^_\s]", "", line)
                    assert len(shown) <= 90, (name, line)
    assert "overflow-x: auto" in (DOCS / "_static" / "graphattn.css").read_text("utf-8")


def test_every_page_is_reached_from_a_table_of_contents():
    listed = {DOCS / "index.md"}
    for page in DOCS.rglob("*.md"):
        for block in re.findall(r"```\{toctree\}\n(.*?)```", page.read_text("utf-8"), re.S):
            entries = [line for line in block.split() if re.fullmatch(r"[\w/-]+", line)]
            listed |= {page.parent / f"{entry}.md" for entry in entries}
    derived = {"_build", "_figures"}
    pages = {page for page in DOCS.rglob("*.md") if not derived & set(page.parts)}
    assert pages <= listed
