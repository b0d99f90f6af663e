"""The compiled CPU kernels under the compiler's sanitizers: `make native-check`.

Builds the library with the address and undefined-behaviour sanitizers (as it is shipped: with
OpenMP) and with the thread sanitizer (on std::thread, because libgomp's synchronisation is unknown
to it), and runs `cases_native.py` with each. First, each must find what is planted in
`planted.cpp`. Exits with 1 where one reports something, or finds nothing of what is planted.

With ``--best``, only the best instruction set of this machine.

A sanitizer that this machine lacks is left out with a message; GCC's are what it knows to load.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

HERE = Path(__file__).resolve().parent
TOP = HERE.parents[1]
SOURCES = TOP / "kernels" / "cpu"
BUILD = TOP / "build" / "native-check"

FLAGS = "-std=c++17 -g -O1 -fno-omit-frame-pointer -shared -fPIC -fvisibility=hidden -Wno-psabi"
SECONDS = 1500


class Sanitizer(NamedTuple):
    """How a library is built with one, and a process started."""

    name: str
    flags: str
    runtimes: tuple[str, ...]  # preloaded: Python itself is not built with it
    settings: dict[str, str]
    planted: tuple[str, ...]  # functions of planted.cpp


SANITIZERS = (
    Sanitizer(
        "address and undefined behaviour",
        "-fsanitize=address,undefined -fno-sanitize-recover=all -fopenmp",
        ("libasan.so", "libubsan.so"),
        # Python leaks on purpose.
        {"ASAN_OPTIONS": "detect_leaks=0"},
        ("planted_address", "planted_behaviour"),
    ),
    Sanitizer(
        "thread",
        "-fsanitize=thread -DGRAPHATTN_STD_THREADS -pthread",
        ("libtsan.so",),
        {"TSAN_OPTIONS": "ignore_noninstrumented_modules=1"},
        ("planted_thread",),
    ),
)


def instruction_sets() -> dict[str, str]:
    """Builds that this machine can run, the best last, and their flags."""
    sets = {"base": ""}
    capability = torch.backends.cpu.get_cpu_capability()
    if capability in ("AVX2", "AVX512"):
        sets["v3"] = "-march=x86-64-v3"
    if capability == "AVX512":
        sets["v4"] = "-march=x86-64-v4 -mprefer-vector-width=512"
    return sets


def find_compiler() -> list[str] | None:
    """``CXX``, or the first C++ compiler there is."""
    for name in filter(None, (os.environ.get("CXX"), "g++", "c++", "clang++")):
        command = shlex.split(name)
        if shutil.which(command[0]):
            return command
    return None


def find_runtimes(compiler: list[str], sanitizer: Sanitizer) -> list[str] | None:
    """The shared libraries of a sanitizer, None where one is missing."""
    paths = []
    for name in sanitizer.runtimes:
        run = subprocess.run(
            [*compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=False
        )
        path = Path(run.stdout.strip())
        if run.returncode or not path.is_absolute() or not path.exists():
            return None
        paths.append(str(path))
    return paths


def build(compiler: list[str], flags: str, library: Path, *sources: Path) -> str | None:
    """Builds a library; the compiler's message where that fails."""
    library.parent.mkdir(parents=True, exist_ok=True)
    command = [*compiler, *shlex.split(f"{FLAGS} {flags}"), f"-I{SOURCES}"]
    run = subprocess.run(
        [*command, *map(str, sources), "-o", str(library)],
        capture_output=True,
        text=True,
        check=False,
    )
    return run.stderr if run.returncode else None


def run_python(
    sanitizer: Sanitizer, runtimes: list[str], library: Path, *arguments: str
) -> subprocess.CompletedProcess[str]:
    """Python with a sanitizer in it, and a library for it to take."""
    environment = {
        **os.environ,
        **sanitizer.settings,
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "LD_PRELOAD": " ".join(runtimes),
        "GRAPHATTN_NATIVE": str(library),
        "OMP_NUM_THREADS": "2",
    }
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        cwd=TOP,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


def missed(
    compiler: list[str], sanitizer: Sanitizer, runtimes: list[str]
) -> tuple[list[str], str | None]:
    """Name the planted mistakes that a sanitizer does not find.

    The second result is the reason why the sanitizer cannot be used here, or None.

    Raises:
        RuntimeError: the mistakes cannot be built without a sanitizer, either.
    """
    library = BUILD / f"planted-{sanitizer.name.split()[0]}.so"
    problem = build(compiler, sanitizer.flags, library, HERE / "planted.cpp")
    if problem is not None:
        if build(compiler, "", library, HERE / "planted.cpp") is not None:
            raise RuntimeError(f"planted.cpp cannot be built:\n{problem}")
        return [], f"the compiler cannot build with it: {problem.strip().splitlines()[-1]}"
    load = f"import ctypes; library = ctypes.CDLL({str(library)!r})"
    run = run_python(sanitizer, runtimes, library, "-c", load)
    if run.returncode:
        return [], f"a process cannot run with it: {(run.stderr.strip() or '?').splitlines()[-1]}"
    runs = {
        name: run_python(sanitizer, runtimes, library, "-c", f"{load}; library.{name}()")
        for name in sanitizer.planted
    }
    return [
        name
        for name, run in runs.items()
        if not run.returncode or not ("Sanitizer" in run.stderr or "runtime error" in run.stderr)
    ], None


def main() -> int:
    """The command; returns its exit status."""
    compiler = find_compiler()
    if compiler is None:
        print("native-check: skipped, there is no C++ compiler")
        return 0
    failed = False
    checks = []
    for sanitizer in SANITIZERS:
        runtimes = find_runtimes(compiler, sanitizer)
        if runtimes is None:
            print(f"{sanitizer.name}: skipped, {compiler[0]} has no {sanitizer.runtimes[0]}")
            continue
        not_found, unusable = missed(compiler, sanitizer, runtimes)
        if unusable is not None:
            print(f"{sanitizer.name}: skipped, {unusable}")
            continue
        for name in not_found:
            print(f"{sanitizer.name}: does not find {name} of planted.cpp")
            failed = True
        # What threads do does not depend on the instruction set.
        best_alone = sanitizer.name == "thread" or "--best" in sys.argv[1:]
        sets = list(instruction_sets().items())[-1 if best_alone else 0 :]
        for name, flags in sets:
            checks.append((compiler, sanitizer, runtimes, name, flags))
    # Each builds with one core and spends half of its run in Python.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for clean, report in pool.map(lambda arguments: check(*arguments), checks):
            print(report, flush=True)
            failed |= not clean
    return int(failed)


def check(
    compiler: list[str], sanitizer: Sanitizer, runtimes: list[str], name: str, flags: str
) -> tuple[bool, str]:
    """Builds for one instruction set and runs the cases.

    Returns:
        Whether nothing was reported, and what to print.
    """
    title = f"{sanitizer.name}, {name}:\n"
    library = BUILD / f"{sanitizer.name.split()[0]}-{name}.so"
    sources = sorted(SOURCES.glob("*.cpp"))
    problem = build(compiler, f"{sanitizer.flags} {flags}", library, *sources)
    if problem is not None:
        return False, title + problem
    run = run_python(sanitizer, runtimes, library, str(HERE / "cases_native.py"))
    clean = run.returncode == 0 and run.stdout.endswith("done\n") and "Sanitizer" not in run.stderr
    return clean, title + run.stdout.rstrip() + ("" if clean else f"\n{run.stderr}")


if __name__ == "__main__":
    sys.exit(main())
