"""Wheels with and without a compiler; nothing of an older build in either."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

import graphattn as ga
from graphattn.kernels.cpu import library

TOP = Path(ga.__file__).resolve().parents[1]

pytestmark = pytest.mark.long

if not (TOP / "setup.py").exists():
    pytest.skip("graphattn is not installed from a checkout", allow_module_level=True)
try:
    if int(version("setuptools").split(".")[0]) < 77:
        pytest.skip("setuptools is too old to build a wheel", allow_module_level=True)
except PackageNotFoundError:
    pytest.skip("setuptools is not installed", allow_module_level=True)

BUILD = """
import sys, build_backend
print("WHEEL", getattr(build_backend, sys.argv[1])(sys.argv[2]))
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """A copy of the checkout in which other builds have been before."""
    tree = tmp_path_factory.mktemp("tree")
    for name in ("graphattn", "kernels"):
        # Libraries that this checkout has come along: no wheel may take those for its own.
        shutil.copytree(TOP / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "build_backend.py", "MANIFEST.in", "README.md"):
        shutil.copy(TOP / name, tree)
    shutil.copy(TOP / "LICENSE", tree)
    return tree


def make(tree: Path, what: str, folder: Path, **environment: str) -> tuple[list[str], Path, str]:
    """The names in a distribution that the project's own backend makes, its file, and the log."""
    (tree / "kernels" / "cpu" / "_native_v9.abi3.so").write_text("old")
    for stale in ("lib", "lib.linux-x86_64-cpython-311"):
        package = tree / "build" / stale / "graphattn"
        (package / "kernels" / "cpu").mkdir(parents=True, exist_ok=True)
        (package / "old.py").write_text("old")
        (package / "kernels" / "cpu" / "_native_v4.abi3.so").write_text("old")
    folder.mkdir()
    run = subprocess.run(
        [sys.executable, "-c", BUILD, what, str(folder)],
        cwd=tree,
        env={**os.environ, "GRAPHATTN_NATIVE": "", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    (file,) = folder.iterdir()
    names = zipfile.ZipFile(file).namelist() if file.suffix == ".whl" else []
    return names, file, run.stdout


@pytest.fixture(scope="module")
def wheel_without_a_compiler(tree, tmp_path_factory) -> tuple[list[str], Path, str]:
    folder = tmp_path_factory.mktemp("without") / "wheel"
    return make(tree, "build_wheel", folder, CXX="/bin/false")


def test_a_wheel_without_a_compiler_carries_no_library_and_says_so_once(wheel_without_a_compiler):
    names, file, log = wheel_without_a_compiler
    assert [name for name in names if "_native" in name] == []
    assert not any(name.endswith((".cpp", ".h", "/old.py")) for name in names)
    assert file.name.endswith("-py3-none-any.whl")
    assert log.count("no C++ compiler") == 1
    said, last = log.strip().splitlines()[-2:]
    assert said.startswith("graphattn: the compiled CPU kernels are left out")
    assert last == f"WHEEL {file.name}"


def test_what_is_installed_without_a_compiler_imports_and_says_why(
    wheel_without_a_compiler, tmp_path
):
    zipfile.ZipFile(wheel_without_a_compiler[1]).extractall(tmp_path)
    code = f"""
import sys
sys.meta_path = [finder for finder in sys.meta_path if "ditable" not in repr(finder)]
sys.path.insert(0, {str(tmp_path)!r})
import torch
import graphattn as ga
from graphattn.kernels.cpu import library
assert library.__file__.startswith({str(tmp_path)!r})
assert library.library() is None and library.instruction_set() is None
x = torch.randn(6, 2, 4)
assert ga.dot_product_attention(x, x, x, ga.window_path_graph(6, 1)).shape == x.shape
print(library.why_not())
"""
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "GRAPHATTN_NATIVE": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert "there was no C++ compiler" in run.stdout


@pytest.mark.skipif(library.library() is None, reason=str(library.why_not()))
def test_a_wheel_carries_libraries_and_nothing_old(tree, tmp_path):
    names, file, log = make(tree, "build_wheel", tmp_path / "first")
    cpu = {name for name in names if name.startswith("graphattn/kernels/cpu/")}
    expected = {path.name.split(".")[0] for path in Path(library.__file__).parent.glob("_native_*")}
    assert {Path(name).name.split(".")[0] for name in cpu if "_native" in name} == expected
    assert not any(name.endswith((".cpp", ".h")) for name in names)
    assert "graphattn/old.py" not in names
    content = zipfile.ZipFile(file)
    assert all(content.read(name) != b"old" for name in cpu)
    assert "left out" not in log
    assert not file.name.endswith("-any.whl")


def test_what_is_distributed_as_source_holds_the_cpp_files(tree, tmp_path):
    _, file, _ = make(tree, "build_sdist", tmp_path / "source")
    with tarfile.open(file) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    folder = TOP / "kernels" / "cpu"
    sources = {path.name for path in (*folder.glob("*.cpp"), *folder.glob("*.h"))}
    assert {f"kernels/cpu/{name}" for name in sources} <= names
    assert {"setup.py", "build_backend.py"} <= names
    assert not any("_native_" in name for name in names)
