"""Builds the compiled CPU kernels (`kernels/cpu`), where that is possible.

Everything else about the package is in pyproject.toml. The sources are built once per instruction
set, each build into a library of its own; `graphattn.kernels.cpu.library` chooses among them. A
build that fails is left out: graphattn works without, and says so.

    python setup.py build_ext --inplace              # into kernels/cpu, for this machine
    python setup.py build_ext --inplace --every-set  # for every instruction set, as in wheels

As many files are compiled at a time as there are cores, or ``MAX_JOBS``. ``GRAPHATTN_NATIVE=0``
builds nothing.
"""

from __future__ import annotations

import hashlib
import os
import platform
import runpy
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError

FOLDER = Path("kernels/cpu")
PACKAGE = "graphattn.kernels.cpu"

# -fno-fast-math first: whatever the environment's flags say, NaN and denormals keep their meaning.
FLAGS = [
    *("-std=c++17", "-O3", "-g0", "-fvisibility=hidden", "-Wno-psabi"),
    *("-fno-fast-math", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"),
]
OPENMP = "-fopenmp"
BUILDS: dict[str, list[str]] = {"base": []}
if platform.machine() in ("x86_64", "AMD64"):
    BUILDS["v3"] = ["-march=x86-64-v3"]
    BUILDS["v4"] = ["-march=x86-64-v4", "-mprefer-vector-width=512"]

TURNED_OFF = os.environ.get("GRAPHATTN_NATIVE") == "0"
# No Python is in the libraries: one file serves every version. Free-threaded ones cannot say so.
ANY_PYTHON = not sysconfig.get_config_var("Py_GIL_DISABLED")

# Every file of the folder belongs to the build. All are compiled anew when a header changes.
SOURCES = sorted(str(path) for path in FOLDER.glob("*.cpp"))
DEPENDS = [*sorted(str(path) for path in FOLDER.glob("*.h")), "setup.py"]
SECONDS = 60  # that one core takes for one instruction set: 30 on new ones, 100 on old ones

BUILD_ERRORS = (BaseError, CCompilerError)
built: list[str] = []
failed: list[str] = []


class BuildNative(build_ext):
    """Compiles all files of all libraries side by side; takes OpenMP where the compiler has it."""

    user_options: ClassVar[list[Any]] = [
        *build_ext.user_options,
        ("every-set", None, "also sets of other machines"),
    ]
    boolean_options: ClassVar[list[str]] = [*build_ext.boolean_options, "every-set"]
    build_temp: str
    extensions: list[Extension]

    def initialize_options(self) -> None:
        super().initialize_options()
        self.every_set = False
        self.for_this_machine = False

    def run(self) -> None:
        self.for_this_machine = bool(self.inplace and not self.every_set)
        if self.inplace:  # nothing of an older build stays, whatever fails
            for path in FOLDER.glob("_native_*"):
                path.unlink()
        super().run()

    def build_extensions(self) -> None:
        if not self.compiles("int main() { return 0; }"):
            failed.extend(BUILDS)
            self.leave_out(self.extensions)
            return
        if self.compiles("#include <omp.h>\nint main() { return !omp_get_max_threads(); }", OPENMP):
            for extension in self.extensions:
                extension.extra_compile_args.append(OPENMP)
                extension.extra_link_args.append(OPENMP)
        attempts = [self.extensions]
        if self.for_this_machine:  # the next best set if a compiler does not know one
            by_build = {build_of(extension): extension for extension in self.extensions}
            attempts = [[by_build[build]] for build in runnable() if build in by_build]
        for attempt in attempts:
            if not built:
                self.build_all(attempt)
        there = [extension for extension in self.extensions if build_of(extension) in built]
        if not there:
            self.leave_out(self.extensions)
            return
        for extension in self.extensions:
            if extension not in there:
                self.remove_library(extension)
        self.extensions = self.distribution.ext_modules = there

    def build_all(self, extensions: list[Extension]) -> None:
        """Build some libraries; `built` and `failed` say how that went."""
        cores = num_cores()
        seconds = SECONDS * len(extensions) // cores
        print(
            f"graphattn: compiling the CPU kernels takes about {seconds} seconds on {cores} cores "
            f"(instruction sets: {', '.join(map(build_of, extensions))}); "
            "to go without them, set GRAPHATTN_NATIVE=0",
            flush=True,
        )
        # The longest first: what is left at the end is short.
        sources = sorted(SOURCES, key=lambda source: -Path(source).stat().st_size)
        with ThreadPoolExecutor(cores) as pool:
            jobs = {
                (build_of(extension), source): pool.submit(self.compile_file, extension, source)
                for source in sources
                for extension in extensions
            }
        for extension in extensions:
            build = build_of(extension)
            try:
                objects = [jobs[build, source].result() for source in SOURCES]
                extension.sources, extension.extra_objects = [], objects
                self.remove_library(extension)  # it may be newer than these, and of other ones
                self.build_extension(extension)
            except BUILD_ERRORS as error:
                self.warn(f"{extension.name}: {error}")
                failed.append(build)
            else:
                built.append(build)

    def compile_file(self, extension: Extension, source: str) -> str:
        """The object file of a source, which is kept if it was made of the same in the same way."""
        compiler: Any = self.compiler
        command = getattr(compiler, "compiler_so_cxx", compiler.compiler_so)
        how = " ".join([*command, *extension.extra_compile_args])
        folder = Path(self.build_temp, hashlib.sha256(how.encode()).hexdigest()[:12])
        kept = folder / f"{Path(source).stem}.o"
        since = max(Path(file).stat().st_mtime_ns for file in (source, *DEPENDS))
        if kept.exists() and kept.stat().st_mtime_ns > since:
            return str(kept)
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            (made,) = compiler.compile(
                [source], scratch, extra_postargs=extension.extra_compile_args
            )
            os.replace(made, kept)  # whole, or not at all
        return str(kept)

    def compiles(self, source: str, *flags: str) -> bool:
        """Whether the C++ compiler makes a program of a source."""
        compiler: Any = self.compiler
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "probe.cpp")
            file.write_text(source)
            try:
                objects = compiler.compile([str(file)], folder, extra_postargs=list(flags))
                compiler.link_executable(
                    objects, "probe", folder, extra_postargs=list(flags), target_lang="c++"
                )
            except BUILD_ERRORS:
                return False
        return True

    def leave_out(self, extensions: list[Extension]) -> None:
        """Without any library the package is Python alone, and its wheel one for every platform."""
        for extension in extensions:
            self.remove_library(extension)
        self.extensions = []
        self.distribution.ext_modules = []
        wheel = self.distribution.command_obj.get("bdist_wheel")
        if wheel is not None:
            wheel.root_is_pure = True

    def remove_library(self, extension: Extension) -> None:
        Path(self.get_ext_fullpath(extension.name)).unlink(missing_ok=True)


def build_of(extension: Extension) -> str:
    """The instruction set of a library."""
    return str(extension.name.rpartition("_")[2])


def runnable() -> list[str]:
    """The instruction sets that this machine runs, the best first."""
    try:
        import torch

        rules: dict[str, Any] = runpy.run_path(str(FOLDER / "library.py"))
    except ImportError:  # then nobody can say which is the best
        return list(BUILDS)
    return list(rules["RUN_ON"].get(torch.backends.cpu.get_cpu_capability(), ("base",)))


def num_cores() -> int:
    """How many files are compiled at a time."""
    if "MAX_JOBS" in os.environ:
        return max(1, int(os.environ["MAX_JOBS"]))
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def extensions() -> list[Extension]:
    """One library for every instruction set."""
    return [
        Extension(
            f"{PACKAGE}._native_{build}",
            SOURCES,
            depends=DEPENDS,
            extra_compile_args=[*FLAGS, *flags],
            language="c++",
            optional=True,
            py_limited_api=ANY_PYTHON,
        )
        for build, flags in BUILDS.items()
    ]


setup(
    ext_modules=[] if TURNED_OFF else extensions(),
    cmdclass={"build_ext": BuildNative},
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if ANY_PYTHON else {},
)

if failed and not built:
    print(
        "graphattn: the compiled CPU kernels are left out, because no C++ compiler (GCC or clang) "
        "works here. Everything else works without them; to have them, install a compiler (or name "
        "it: CXX=...) and install graphattn again."
    )
elif failed:
    print(
        f"graphattn: compiled CPU kernels are left out for {', '.join(failed)}: the C++ compiler "
        "does not know the instruction set. Other builds take their place."
    )
