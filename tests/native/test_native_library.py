"""Choice of the build that a process takes, the reason given if there is none, and threads."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import native_entries
import pytest
import torch

from graphattn.kernels.cpu import library

pytestmark = pytest.mark.every_case

FOLDER = Path(library.__file__).parent
COMPILER = shutil.which(os.environ.get("CXX", "c++"))

needs_library = pytest.mark.skipif(library.library() is None, reason=str(library.why_not()))
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler")


def in_fresh_interpreter(code: str, **environment: str) -> str:
    """Run `code` in a new Python, and return what it prints."""
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "GRAPHATTN_NATIVE": "", **environment},
        cwd=Path(__file__).parent,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


SAY = """
from graphattn.kernels.cpu import library
print(library.library() is not None, library.instruction_set(), library.why_not())
"""


def compile_library(source: str, folder: Path, name: str = "other.so") -> Path:
    """A library of a C++ source."""
    (folder / "source.cpp").write_text(source)
    command = [COMPILER, "-shared", "-fPIC", folder / "source.cpp", "-o", folder / name]
    subprocess.run(command, check=True)
    return folder / name


def test_a_process_has_either_a_library_or_a_reason():
    assert (library.library() is None) == (library.why_not() is not None)
    assert (library.library() is None) == (library.instruction_set() is None)
    assert library.library() is library.library()


def test_the_variable_turns_the_library_off():
    said = in_fresh_interpreter(SAY, GRAPHATTN_NATIVE="0")
    assert said == "False None the compiled CPU kernels are turned off by GRAPHATTN_NATIVE=0"


@pytest.mark.long
@pytest.mark.parametrize("build", library.BUILDS)
def test_the_variable_chooses_a_build(build):
    loaded = library.find(FOLDER, build, torch.backends.cpu.get_cpu_capability())
    if loaded.library is None:
        pytest.skip(loaded.reason)
    said = in_fresh_interpreter(SAY, GRAPHATTN_NATIVE=build)
    assert said == f"True {library.NAMES[build]} None"


def test_a_value_that_names_nothing_is_refused():
    with pytest.raises(ValueError, match="GRAPHATTN_NATIVE='v5' is none of 0, base, v3, v4"):
        library.find(FOLDER, "v5", "AVX512")


def test_a_build_that_the_processor_cannot_run_is_not_taken():
    loaded = library.find(FOLDER, "v4", "AVX2")
    assert loaded.library is None
    assert (
        "asks for AVX-512, and the best that torch uses on this processor is AVX2" in loaded.reason
    )


def test_without_any_build_the_reason_names_the_compiler(tmp_path):
    loaded = library.find(tmp_path, "", "AVX512")
    assert loaded.library is None
    assert "no C++ compiler" in loaded.reason
    loaded = library.find(tmp_path, "base", "AVX512")
    assert loaded.reason == f"GRAPHATTN_NATIVE=base asks for a build that is not in {tmp_path}"


def test_a_file_that_is_missing_or_no_library_is_refused(tmp_path):
    missing = tmp_path / "missing.so"
    assert str(missing) in library.find(FOLDER, str(missing), "AVX2").reason
    (tmp_path / "_native_base.so").write_text("text")
    loaded = library.find(tmp_path, "", "DEFAULT")
    assert loaded.library is None
    assert loaded.reason.startswith("the compiled CPU kernels cannot be loaded: ")


@needs_compiler
def test_a_build_of_another_version_is_refused(tmp_path):
    later = library.ABI_VERSION + 1
    source = f'extern "C" int graphattn_abi_version() {{ return {later}; }}'
    loaded = library.load(compile_library(source, tmp_path))
    assert loaded.library is None
    assert f"(interface {later}, needed is {library.ABI_VERSION})" in loaded.reason


@needs_compiler
def test_a_library_of_something_else_is_refused(tmp_path):
    path = compile_library('extern "C" int other() { return 1; }', tmp_path)
    assert library.load(path).reason == f"{path} is no library of graphattn's compiled CPU kernels"


@needs_library
@pytest.mark.parametrize(
    ("capability", "taken"), [("AVX512", "v4"), ("AVX2", "v3"), ("DEFAULT", "base"), ("", "base")]
)
def test_the_best_build_for_the_processor_is_taken(capability, taken, tmp_path):
    for build in library.BUILDS:
        (tmp_path / f"_native_{build}.so").write_text("text")
    assert f"_native_{taken}.so" in library.find(tmp_path, "", capability).reason
    (tmp_path / f"_native_{taken}.so").unlink()
    if taken == "v4":
        assert "_native_v3.so" in library.find(tmp_path, "", capability).reason


@needs_library
def test_the_library_lies_beside_its_python_file():
    assert Path(library.library()._name).parent == FOLDER


def test_a_status_becomes_an_exception():
    library.check(0)
    with pytest.raises(MemoryError, match="scratch"):
        library.check(1)
    with pytest.raises(RuntimeError, match="status 2"):
        library.check(2)


# Memory, threads, forks


def test_too_little_memory_is_a_memory_error_on_any_number_of_threads(native):
    for threads in (1, 2):
        for nbytes in (-1, 1 << 62):
            with pytest.raises(MemoryError):
                native_entries.allocate(nbytes, 10, threads, native)
    native_entries.allocate(1000, 10, 2, native)


def test_every_task_is_done_by_one_of_the_workers_that_were_allowed(native):
    for tasks in (0, 1, 2, 7, 1000):
        for threads in (1, 2, 3):
            workers = native_entries.workers(tasks, threads, native=native)
            assert len(workers) == tasks
            assert all(0 <= worker < min(threads, tasks) for worker in workers)


@needs_library
def test_threads_are_those_that_torch_was_told_to_use():
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            workers = native_entries.workers(40, torch.get_num_threads(), 5000)
            assert len(set(workers)) == (threads if native_entries.has_openmp() else 1)
    finally:
        torch.set_num_threads(before)


# One process, because starting torch is what takes time: what it prints is judged one by one.
PROCESS = """
import os, signal
from pathlib import Path
import native_entries
import torch

torch.set_num_threads(2)
assert native_entries.workers(8, 2)
maps = Path("/proc/self/maps")
lines = maps.read_text().splitlines() if maps.exists() else []
print(len({line.split()[-1] for line in lines if "libgomp" in line or "libomp" in line}))
print((torch.full((3,), 1e-40) * 1 != 0).all().item() and 1e-310 * 1.0 != 0)
if not hasattr(os, "fork"):
    print("0 8")
    raise SystemExit
child = os.fork()
if child == 0:
    signal.alarm(60)  # a child that hangs is ended, and its status says so
    ones = bool((native_entries.exp(torch.zeros(20_000), 2) == 1).all())
    os._exit(0 if ones and set(native_entries.workers(8, 2)) == {0} else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), len(native_entries.workers(8, 2)))
"""


@pytest.fixture(scope="module")
def process() -> list[str]:
    return in_fresh_interpreter(PROCESS, OMP_NUM_THREADS="2").splitlines()


@needs_library
def test_a_process_has_one_openmp_runtime(process):
    assert int(process[0]) <= 1


@needs_library
def test_denormals_are_not_flushed_where_the_library_is_loaded(process):
    assert process[1] == "True"


@needs_library
def test_a_child_that_is_forked_after_a_parallel_loop_works_on_one_thread(process):
    assert process[2] == "0 8"
