"""Wheels and builds in place, with and without a compiler; nothing of an older build in any.

The C++ sources are replaced by two short ones: how they are built does not depend on what they are.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import torch

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


CPU = Path("kernels", "cpu")
SHORT_FILES = {
    "first.h": f"#define NUMBER {library.ABI_VERSION}\n",
    "first.cpp": """
#include "first.h"
extern "C" __attribute__((visibility("default"))) int graphattn_abi_version() { return NUMBER; }
""",
    "second.cpp": """
extern "C" __attribute__((visibility("default"))) const char* graphattn_instruction_set() {
#if defined(__AVX512F__)
  return "AVX-512";
#elif defined(__AVX2__)
  return "AVX2";
#else
  return "baseline";
#endif
}
""",
    "third.cpp": """
extern "C" __attribute__((visibility("default"))) int has_openmp() {
#if defined(_OPENMP)
  return 1;
#else
  return 0;
#endif
}
""",
}
BUILDS = library.BUILDS if platform.machine() in ("x86_64", "AMD64") else ("base",)
RUNNABLE = library.RUN_ON.get(torch.backends.cpu.get_cpu_capability(), ("base",))

needs_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "c++")) is None, reason="there is no C++ compiler"
)


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """A copy of the checkout with short C++ sources, in which other builds have been before."""
    tree = tmp_path_factory.mktemp("tree")
    for name in ("graphattn", "kernels"):
        # Libraries that this checkout has come along: no wheel may take those for its own.
        ignored = shutil.ignore_patterns("__pycache__", "*.cpp", "*.h")
        shutil.copytree(TOP / name, tree / name, ignore=ignored)
    for name, content in SHORT_FILES.items():
        (tree / CPU / name).write_text(content)
    for name in ("pyproject.toml", "setup.py", "build_backend.py", "MANIFEST.in", "README.md"):
        shutil.copy(TOP / name, tree)
    shutil.copy(TOP / "LICENSE", tree)
    return tree


def run_python(*arguments: str, cwd: Path, **environment: str) -> str:
    """Run Python, which must succeed, and return what it prints."""
    run = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, "GRAPHATTN_NATIVE": "", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def make(tree: Path, what: str, folder: Path, **environment: str) -> tuple[list[str], Path, str]:
    """The names in a distribution that the project's own backend makes, its file, and the log."""
    (tree / "kernels" / "cpu" / "_native_v9.abi3.so").write_text("old")
    for stale in ("lib", "lib.linux-x86_64-cpython-311"):
        package = tree / "build" / stale / "graphattn"
        (package / "kernels" / "cpu").mkdir(parents=True, exist_ok=True)
        (package / "old.py").write_text("old")
        (package / "kernels" / "cpu" / "_native_v4.abi3.so").write_text("old")
    folder.mkdir()
    log = run_python("-c", BUILD, what, str(folder), cwd=tree, **environment)
    (file,) = folder.iterdir()
    names = zipfile.ZipFile(file).namelist() if file.suffix == ".whl" else []
    return names, file, log


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
    assert "there was no C++ compiler" in run_python("-c", code, cwd=tmp_path)


@needs_compiler
def test_a_wheel_carries_every_library_and_nothing_old(tree, tmp_path):
    names, file, log = make(tree, "build_wheel", tmp_path / "first")
    cpu = {name for name in names if name.startswith("graphattn/kernels/cpu/")}
    built = {Path(name).name.split(".")[0] for name in cpu if "_native" in name}
    assert built == {f"_native_{build}" for build in BUILDS}
    assert not any(name.endswith((".cpp", ".h", ".o")) for name in names)
    assert "graphattn/old.py" not in names
    content = zipfile.ZipFile(file)
    assert all(content.read(name) != b"old" for name in cpu)
    assert "left out" not in log
    assert log.count("GRAPHATTN_NATIVE=0") == 1
    assert not file.name.endswith("-any.whl")


def test_what_is_distributed_as_source_holds_the_cpp_files(tree, tmp_path):
    _, file, _ = make(tree, "build_sdist", tmp_path / "source")
    with tarfile.open(file) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {f"kernels/cpu/{name}" for name in SHORT_FILES} <= names
    assert {"setup.py", "build_backend.py"} <= names
    assert not any("_native_" in name for name in names)


def test_two_builds_of_the_same_files_are_the_same_bytes(tree, tmp_path):
    """The second is made in another folder, at another time, of files that nobody else may read."""
    other = tmp_path / "elsewhere" / "copy"
    ignored = shutil.ignore_patterns("build", "*.egg-info", "_native_*")
    shutil.copytree(tree, other, ignore=ignored, copy_function=shutil.copyfile)
    for path in (other, *other.rglob("*")):
        path.chmod(0o700 if path.is_dir() else 0o600)
        os.utime(path, (1, 400_000_000))
    for what in ("build_wheel", "build_sdist"):
        _, file, _ = make(tree, what, tmp_path / what)
        _, again, _ = make(other, what, tmp_path / f"{what}-again")
        assert file.name == again.name
        assert file.read_bytes() == again.read_bytes(), what
    _, dated, _ = make(tree, "build_sdist", tmp_path / "dated", SOURCE_DATE_EPOCH="1700000000")
    with tarfile.open(dated) as archive:
        assert {entry.mtime for entry in archive} == {1_700_000_000}


def test_a_file_that_is_a_link_in_an_archive_of_the_source_keeps_its_content(tree, tmp_path):
    """tarfile writes a hard link where two files of the source are one on disk."""
    archive = tmp_path / "source.tar.gz"
    (tmp_path / "b").write_text("text")
    os.link(tmp_path / "b", tmp_path / "a")
    with tarfile.open(archive, "w:gz") as new:
        new.add(tmp_path / "b", "b")
        new.add(tmp_path / "a", "a")
        assert new.getmember("a").islnk()
    code = "import sys, pathlib, build_backend as b; b.level_sdist(pathlib.Path(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", code, str(archive)], cwd=tree, check=True)
    with tarfile.open(archive) as new:
        found = [(entry.name, new.extractfile(entry).read()) for entry in new]
    assert found == [("a", b"text"), ("b", b"text")]


def build_in_place(tree: Path, *options: str, **environment: str) -> tuple[list[str], str]:
    """The libraries that lie in the tree after a build, and what it printed."""
    command = "setup.py", "--quiet", "build_ext", "--inplace", *options
    said = run_python(*command, cwd=tree, **environment)
    names = (path.name.split(".")[0] for path in (tree / CPU).glob("_native_*"))
    return sorted(name.removeprefix("_native_") for name in names), said


@needs_compiler
def test_a_build_in_place_makes_the_best_set_that_this_machine_runs_and_says_so_once(tree):
    build_in_place(tree)
    for library_of_other_objects in (tree / "build").rglob("_native_*"):
        library_of_other_objects.write_text("old")  # and newer than the objects, which are kept
    built, said = build_in_place(tree)
    assert built == [RUNNABLE[0]]
    assert said.count("seconds") == said.count("GRAPHATTN_NATIVE=0") == len(said.splitlines()) == 1
    built_library = library.find(tree / CPU, "", torch.backends.cpu.get_cpu_capability()).library
    built_library.graphattn_instruction_set.restype = ctypes.c_char_p
    assert built_library.graphattn_instruction_set().decode() == library.NAMES[RUNNABLE[0]]


@needs_compiler
def test_a_build_in_place_makes_every_set_or_none_if_it_is_told_to(tree):
    assert build_in_place(tree, "--every-set")[0] == sorted(BUILDS)
    (tree / CPU / "_native_base.abi3.so").unlink()
    assert build_in_place(tree, GRAPHATTN_NATIVE="0")[1] == ""


@needs_compiler
def test_a_compiler_without_openmp_builds_libraries_of_one_thread(tree, tmp_path):
    """Apple's clang refuses -fopenmp."""
    compiler = tmp_path / "c++"
    compiler.write_text(
        "#!/bin/sh\n"
        'for argument; do [ "$argument" = -fopenmp ] && exit 1; done\n'
        f'exec {os.environ.get("CXX", "c++")} "$@"\n'
    )
    compiler.chmod(0o755)
    capability = torch.backends.cpu.get_cpu_capability()

    def has_openmp(**environment: str) -> bool:
        built, said = build_in_place(tree, **environment)
        assert built == [RUNNABLE[0]], said
        copy = tmp_path / f"copy{len(list(tmp_path.iterdir()))}"  # a library is loaded once
        shutil.copytree(tree / CPU, copy)
        return bool(library.find(copy, "", capability).library.has_openmp())

    if not has_openmp():
        pytest.skip("the compiler has no OpenMP at all")
    assert not has_openmp(CXX=str(compiler))


@needs_compiler
def test_only_what_has_changed_is_compiled_again(tree):
    def compiled() -> set[str]:
        """Build, and return the files that are new since the last call."""
        build_in_place(tree)
        times = {path: path.stat().st_mtime_ns for path in (tree / "build").rglob("*.o")}
        new = {path.stem for path, time in times.items() if before.get(path) != time}
        before.update(times)
        return new

    before: dict[Path, int] = {}
    compiled()
    assert compiled() == set()
    for name, expected in (("second.cpp", {"second"}), ("first.h", {"first", "second", "third"})):
        file = tree / CPU / name
        file.write_text(file.read_text() + "\n")
        assert compiled() == expected


@needs_compiler
def test_a_set_that_the_compiler_refuses_is_left_out(tree, tmp_path):
    if len(RUNNABLE) == 1:
        pytest.skip("this machine runs one instruction set alone")
    best, next_best = RUNNABLE[:2]
    macro = {"v4": "__AVX512F__", "v3": "__AVX2__"}[best]
    file = tree / CPU / "refused.cpp"
    file.write_text(f"#if defined({macro})\n#error refused\n#endif\n")
    try:
        assert build_in_place(tree)[0] == [next_best]
        built, said = build_in_place(tree, "--every-set")
        assert built == sorted(build for build in BUILDS if build not in ("v4", best))
        assert f"left out for {best}" in said
    finally:
        file.unlink()
