"""The compiled kernels of this process: one build of them, or the reason why there is none.

    library()          # a ctypes.CDLL, or None
    why_not()          # None, or a sentence

The best build that the processor can run is taken. ``GRAPHATTN_NATIVE`` chooses another: ``base``,
``v3`` (AVX2), ``v4`` (AVX-512), ``0`` (none), or the path of a library.
"""

from __future__ import annotations

import ctypes
import functools
import os
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import NamedTuple

import torch  # before the library: its OpenMP runtime is then the one that the library finds

# `graphattn_abi_version` in native.cpp. To be raised, in both places, whenever a function changes
# its arguments or its meaning.
ABI_VERSION = 10

VARIABLE = "GRAPHATTN_NATIVE"
BUILDS = ("v4", "v3", "base")  # the best first
NAMES = {"v4": "AVX-512", "v3": "AVX2", "base": "baseline"}
# What torch calls an x86 processor, and the builds that run on it.
RUN_ON = {"AVX512": ("v4", "v3", "base"), "AVX2": ("v3", "base")}

STATUS_OUT_OF_MEMORY = 1  # `Status` in interface.h; 0 is success


class Loaded(NamedTuple):
    """A library, or the reason why there is none."""

    library: ctypes.CDLL | None
    reason: str | None


def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None (`why_not` says why); looked for once in a process."""
    return _loaded().library


def why_not() -> str | None:
    """A sentence that says why `library` is None; None where there is a library."""
    return _loaded().reason


def instruction_set() -> str | None:
    """ "AVX-512", "AVX2" or "baseline": what the library of this process is built for."""
    loaded = library()
    if loaded is None:
        return None
    loaded.graphattn_instruction_set.restype = ctypes.c_char_p
    name: bytes = loaded.graphattn_instruction_set()
    return name.decode()


def check(status: int) -> None:
    """Raises what the status of a function of the library stands for.

    Raises:
        MemoryError: there was too little memory for the kernel's scratch space.
        RuntimeError: anything else; it is a mistake in the kernel.
    """
    if status == STATUS_OUT_OF_MEMORY:
        raise MemoryError("a compiled CPU kernel found too little memory for its scratch space")
    if status:
        raise RuntimeError(f"a compiled CPU kernel failed with status {status}")


@functools.cache
def _loaded() -> Loaded:
    choice = os.environ.get(VARIABLE, "")
    capability = torch.backends.cpu.get_cpu_capability()
    return find(Path(__file__).parent, choice, capability)


def find(folder: Path, choice: str, capability: str) -> Loaded:
    """The library for a processor among the builds in a folder.

    Args:
        folder: where the builds lie.
        choice: the value of ``GRAPHATTN_NATIVE``; "" for the best build.
        capability: what the processor can do, as ``torch.backends.cpu`` names it.

    Raises:
        ValueError: ``choice`` is no build and no path.
    """
    if choice == "0":
        return Loaded(None, f"the compiled CPU kernels are turned off by {VARIABLE}=0")
    if os.sep in choice:
        return load(Path(choice))
    if choice and choice not in BUILDS:
        allowed = ", ".join(("0", *reversed(BUILDS)))
        raise ValueError(f"{VARIABLE}={choice!r} is none of {allowed}, and no path with {os.sep!r}")
    runnable = RUN_ON.get(capability, ("base",))
    if choice and choice not in runnable:
        return Loaded(
            None,
            f"{VARIABLE}={choice} asks for {NAMES[choice]}, and the best that torch uses on this "
            f"processor is {capability}",
        )
    for build in (choice,) if choice else runnable:
        for suffix in EXTENSION_SUFFIXES:
            path = folder / f"_native_{build}{suffix}"
            if path.exists():
                return load(path)
    if choice:
        return Loaded(None, f"{VARIABLE}={choice} asks for a build that is not in {folder}")
    return Loaded(
        None,
        "the compiled CPU kernels were not built: there was no C++ compiler (GCC or clang) when "
        "graphattn was installed; install one, then graphattn again: pip install "
        "--force-reinstall --no-deps --no-cache-dir . in the folder of its source",
    )


def load(path: Path) -> Loaded:
    """The library in a file, if it is one that these Python files can call."""
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        return Loaded(None, f"the compiled CPU kernels cannot be loaded: {error}")
    try:
        version = loaded.graphattn_abi_version()
    except AttributeError:
        return Loaded(None, f"{path} is no library of graphattn's compiled CPU kernels")
    if version != ABI_VERSION:
        return Loaded(
            None,
            f"the compiled CPU kernels in {path.name} are of another version of graphattn "
            f"(interface {version}, needed is {ABI_VERSION}): install graphattn again, or run "
            f"`make` in its checkout",
        )
    return Loaded(loaded, None)
