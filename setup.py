"""Builds the compiled CPU kernels (`kernels/cpu`), where that is possible.

Everything else about the package is in pyproject.toml. The sources are built once per instruction
set, each build into a library of its own; `graphattn.kernels.cpu.library` chooses among them. A
build that fails is left out: graphattn works without, and says so.

    python setup.py build_ext --inplace    # into kernels/cpu, which is what an editable one has

``GRAPHATTN_NATIVE=0`` builds nothing.
"""

from __future__ import annotations

import os
import platform
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

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

# Every file of the folder belongs to the build; libraries are built anew when one changes.
SOURCES = sorted(str(path) for path in FOLDER.glob("*.cpp"))
DEPENDS = [*sorted(str(path) for path in FOLDER.glob("*.h")), "setup.py"]

BUILD_ERRORS = (BaseError, CCompilerError)
failed: list[str] = []  # builds


class BuildNative(build_ext):
    """Takes OpenMP where the compiler has it; leaves nothing of an older build where one fails."""

    build_temp: str
    extensions: list[Extension]

    def run(self) -> None:
        if self.inplace:
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
        super().build_extensions()
        if len(failed) == len(BUILDS):
            self.leave_out(self.extensions)

    def build_extension(self, ext: Extension) -> None:
        build, objects = ext.name.rpartition("_")[2], self.build_temp
        self.build_temp = os.path.join(objects, build)  # the sources are the same, objects are not
        try:
            super().build_extension(ext)
        except BUILD_ERRORS:
            failed.append(build)
            self.remove_library(ext)
            raise  # the extension is optional: setuptools goes on
        finally:
            self.build_temp = objects

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

if len(failed) == len(BUILDS):
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
