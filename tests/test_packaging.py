"""An installation gives what pyproject.toml promises; every public name has a running example."""

import doctest
import importlib
import inspect
import re
import runpy
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

import graphattn as ga

pytestmark = pytest.mark.every_case

TOP = Path(ga.__file__).resolve().parents[1]
PYPROJECT = TOP / "pyproject.toml"
if not PYPROJECT.exists():
    pytest.skip("graphattn is not installed from a checkout", allow_module_level=True)
SETTINGS = tomllib.loads(PYPROJECT.read_text())


def test_every_folder_with_an_init_is_listed_as_a_package():
    listed = SETTINGS["tool"]["setuptools"]["packages"]
    found = {
        ".".join((*top, *path.parent.relative_to(folder).parts))
        for top, folder in (
            (("graphattn",), TOP / "graphattn"),
            (("graphattn", "kernels"), TOP / "kernels"),
        )
        for path in folder.rglob("__init__.py")
    }
    assert set(listed) == found
    assert len(listed) == len(set(listed))
    assert listed == sorted(listed)


def test_every_folder_that_holds_code_has_an_init():
    for top in ("graphattn", "kernels"):
        for path in (TOP / top).rglob("*.py"):
            assert (path.parent / "__init__.py").exists(), path


def test_no_other_folder_stands_at_the_top():
    """The layout of the architecture; hidden and derived folders aside."""
    allowed = {"graphattn", "kernels", "examples", "tests", "docs", "recipe", "build", "dist"}
    tracked = subprocess.run(["git", "ls-files"], cwd=TOP, capture_output=True, text=True)
    if tracked.returncode:
        pytest.skip("no git checkout: nothing says which folders are the project's own")
    found = {name.split("/")[0] for name in tracked.stdout.splitlines() if "/" in name}
    found = {name for name in found if not name.startswith(".")}
    assert found <= allowed


def test_kernels_lie_at_the_top_and_are_mapped_into_the_package():
    assert SETTINGS["tool"]["setuptools"]["package-dir"]["graphattn.kernels"] == "kernels"
    module = importlib.import_module("graphattn.kernels")
    assert Path(module.__file__).resolve().parent == TOP / "kernels"


def test_kernels_is_importable_as_graphattn_kernels_only(tmp_path):
    """PyPI's `kernels` is another project; where it is installed, it must be that one."""
    code = """
try:
    import kernels
except ModuleNotFoundError:
    print("absent")
else:
    print(kernels.__file__)
"""
    run = subprocess.run(
        [sys.executable, "-I", "-c", code],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    where = run.stdout.strip()
    assert where == "absent" or not Path(where).resolve().is_relative_to(TOP)


def test_the_package_says_that_it_is_typed():
    assert (TOP / "graphattn" / "py.typed").exists()
    assert "py.typed" in SETTINGS["tool"]["setuptools"]["package-data"]["graphattn"]


def test_the_version_is_the_same_everywhere():
    assert SETTINGS["project"]["version"] == ga.__version__ == metadata.version("graphattn")


def test_the_citation_is_of_this_version_and_of_the_four_papers():
    yaml = pytest.importorskip("yaml")
    citation = yaml.safe_load((TOP / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0"
    assert str(citation["version"]) == ga.__version__
    assert citation["license"] == SETTINGS["project"]["license"]
    assert citation["title"].split(":")[0] == SETTINGS["project"]["name"]
    papers = citation["references"]
    assert len(papers) == 4
    for paper in papers:
        assert {"type", "title", "authors"} <= set(paper), paper  # what the format asks for
        assert all("name" in one or "family-names" in one for one in paper["authors"])
    # The layers that cite a paper cite it under the name that it has there.
    sources = " ".join(
        " ".join((getattr(ga.nn, name).__doc__ or "").split()) for name in dir(ga.nn)
    )
    cited = [paper["title"].split(" via ")[0] for paper in papers[:3]]
    assert all(title in sources for title in cited), cited


def test_the_recipe_for_conda_asks_for_what_pyproject_asks_for():
    yaml = pytest.importorskip("yaml")
    recipe = yaml.safe_load((TOP / "recipe" / "recipe.yaml").read_text())
    assert recipe["context"]["version"] == ga.__version__
    named = {"torch": "pytorch", "torch-geometric": "pytorch_geometric"}  # there
    project = SETTINGS["project"]
    wanted = [f"python {project['requires-python']}"]
    for entry in project["dependencies"]:
        name, bound = entry.split(">=")
        wanted.append(f"{named.get(name, name)} >={bound}")
    assert recipe["requirements"]["run"] == wanted
    script = " ".join(f"{name} = {function}" for name, function in project["scripts"].items())
    assert recipe["build"]["python"]["entry_points"] == [script]


def test_the_changelog_has_this_version_first_and_five_lines_at_most_for_each():
    versions = (TOP / "CHANGELOG.md").read_text().split("\n## ")[1:]
    assert versions[0].startswith(f"{ga.__version__},")
    for text in versions:
        lines = [line for line in text.splitlines()[1:] if line]
        assert len(lines) <= 5, text
        assert all(line.startswith("- ") for line in lines)


def test_what_is_deprecated_in_code_stands_in_the_changelog():
    warned = [
        path
        for top in ("graphattn", "kernels")
        for path in (TOP / top).rglob("*.py")
        if re.search(r"DeprecationWarning|FutureWarning", path.read_text())
    ]
    says_none = "Nothing is deprecated" in (TOP / "CHANGELOG.md").read_text()
    assert says_none == (not warned), warned


def test_what_the_matrix_of_installations_reads_of_pyproject_is_what_stands_there():
    matrix = runpy.run_path(str(TOP / ".ci" / "matrix"), run_name="matrix")
    first = matrix["PYTHONS"][0]
    assert SETTINGS["project"]["requires-python"] == f">={first}"
    tried = {row.python for row in matrix["rows"]()}
    assert tried == {*matrix["PYTHONS"], matrix["NOT_TRIED"]}
    assert matrix["NOT_TRIED"] not in matrix["PYTHONS"]
    pinned = {pin.split("~=")[0] for pin in matrix["oldest_dependencies"]()}
    named = {re.match(r"[\w-]+", entry)[0] for entry in SETTINGS["project"]["dependencies"]}
    assert named - pinned == {"torch"}
    assert f"torch>={matrix['lower_bound']('torch')}" in SETTINGS["project"]["dependencies"]


def test_every_extra_that_a_message_or_a_page_names_exists_and_is_explained():
    extras = set(SETTINGS["project"]["optional-dependencies"])
    named: set[str] = set()
    for top in ("README.md", "docs", "graphattn", "kernels", "examples"):
        path = TOP / top
        files = [path] if path.is_file() else [*path.rglob("*.md"), *path.rglob("*.py")]
        for file in files:
            text = file.read_text(encoding="utf-8")
            for name in re.findall(r"pip install\s*\"?\s*\"?'graphattn\[([\w,]+)\]'", text):
                named |= set(name.split(","))
            if file.name not in ("log.md", "CHANGELOG.md"):
                assert not re.search(r"""["']\.\[\w|"graphattn\[\w""", text), file
    assert {"train", "bio", "plots", "clusters", "lora", "transformers"} <= named <= extras
    page = (TOP / "docs" / "start" / "install.md").read_text(encoding="utf-8")
    table = page.split("| extra |")[1].split("\n\n")[0]
    assert set(re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| (.*?) \|", table, re.M)))) == extras


def test_the_plug_in_says_which_extra_it_needs():
    code = """
import sys
sys.modules["transformers"] = None
try:
    from graphattn.integrations import transformers
except ImportError as error:
    print(error)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout.endswith("install it with pip install 'graphattn[transformers]'\n")


def test_the_command_points_to_a_function():
    module, function = SETTINGS["project"]["scripts"]["graphattn"].split(":")
    assert callable(getattr(importlib.import_module(module), function))


# Every public name has a docstring with an example. Pytest runs the examples of all modules.

PUBLIC = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module in (ga, ga.nn, ga.models, ga.train, ga.plot, ga.spectral, ga.data)
    for name in module.__all__
    # A version, numbers and a type alias have no docstring.
    if name not in ("__version__", "MAX_BYTES", "STRUCTURE_CONTEXT", "FileFormat")
}


def test_the_docstring_of_a_public_name_begins_with_a_sentence():
    first_lines = {
        name: (inspect.getdoc(thing) or "-").split("\n")[0] for name, thing in PUBLIC.items()
    }
    assert [name for name, line in first_lines.items() if not line.endswith((".", "::"))] == []


def test_a_public_name_has_an_example_that_pytest_runs():
    options = SETTINGS["tool"]["pytest"]["ini_options"]
    assert "--doctest-modules" in options["addopts"]
    assert "graphattn" in options["testpaths"]
    things = {name: thing for name, thing in PUBLIC.items() if not inspect.ismodule(thing)}
    for name, thing in things.items():
        text = thing.__doc__ or ""
        assert "Example:" in text, name
        assert doctest.DocTestParser().get_examples(text), name
        module = sys.modules[thing.__module__]
        assert Path(module.__file__).resolve().is_relative_to(TOP / "graphattn"), name


def test_a_layer_documents_its_shapes_its_source_and_every_argument():
    for name in ga.nn.__all__:
        if name == "ModelCache":
            continue
        layer = getattr(ga.nn, name)
        for needed in ("Shapes:", ".. math::", *inspect.signature(layer).parameters):
            assert needed in layer.__doc__, (name, needed)
