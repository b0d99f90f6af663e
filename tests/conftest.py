"""Options of the tests: `pytest` interprets kernels on the CPU, `--device cuda` runs them, and
`--device emulator` emulates what they were compiled to."""

import functools
import gc
import importlib
import importlib.util
import os
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
from covering import covering

# Pages of the documentation whose examples take a second or more.
LONG_PAGES = (
    *("counts.md", "diagnostics.md", "diffusion.md", "distributed.md", "integrations/index.md"),
    *("krause-shortcut.md", "language_models.md", "models.md", "protein_models.md", "spectral.md"),
    *("swin.md", "training.md"),
    *("scale.md", "recipes/graph-transformer.md", "recipes/serve.md", "recipes/tracks.md"),
    "recipes/long-sequences.md",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device",
        default="cpu",
        choices=("cpu", "cuda", "emulator"),
        help="where tests/kernels run: in Triton's interpreter (cpu), on a GPU, or compiled for "
        "one and emulated",
    )
    parser.addoption(
        "--arch",
        default="sm_80",
        choices=("sm_80", "sm_90"),
        help="the GPU that `--device emulator` emulates",
    )
    parser.addoption(
        "--emulated",
        metavar="FILE",
        help="write a table of the launches that `--device emulator` has run",
    )
    parser.addoption(
        "--cases",
        type=lambda cases: cases if cases == "pairs" else int(cases),
        metavar="N",
        help="run at most N cases of every parametrized test, spread evenly; with `pairs`, as many "
        "as hold every pair of its options, and of a test marked `long` every option; all if not "
        "given",
    )
    parser.addoption(
        "--long",
        action="store_true",
        help="with `--cases N`, also run tests marked `long`, one case each",
    )


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Iterator[None]:
    """`--cases` thins out long sweeps; tests that are cheap and must be whole are marked so.

    What is left out never becomes a test: most of the collection would be spent on it.
    """
    yield
    most = metafunc.config.getoption("--cases")
    if most is None:
        return
    of_all = {mark.name for mark in metafunc.definition.iter_markers()}
    whole, sampled, long = [], [], []
    for case in metafunc._calls:  # there is no public name for it
        own = of_all | {mark.name for mark in case.marks}
        if own & {"every_case", "slow"}:  # pytest itself leaves out what is slow
            whole.append(case)
        elif own & left_out(metafunc.config):
            continue
        elif "long" in own and most != "pairs":
            long.append(case)
        else:
            sampled.append(case)
    whole += some_of(long, 1, metafunc.definition.nodeid)
    if most == "pairs":
        strength = 1 if "long" in of_all else 2
        kept = [sampled[k] for k in covering([case.indices for case in sampled], strength)]
    else:
        kept = some_of(sampled, most, metafunc.definition.nodeid)
    metafunc._calls[:] = (whole + kept) or metafunc._calls[:1]  # of what is left out below


def some_of(cases: list[Any], most: int, test: str) -> list[Any]:
    """Return at most so many cases, spread evenly; of one, always the same for a test."""
    if len(cases) <= most:
        return cases
    if most == 1:
        return [cases[zlib.crc32(test.encode()) % len(cases)]]
    last = len(cases) - 1
    return [cases[k] for k in sorted({round(k * last / (most - 1)) for k in range(most)})]


def left_out(config: pytest.Config) -> set[str]:
    """Return the marks of tests that `--cases` leaves out."""
    most = config.getoption("--cases")
    if most is None:
        return set()
    keeps_long = most == "pairs" or config.getoption("--long")
    return {"nightly"} if keeps_long else {"nightly", "long"}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`--cases` leaves out what takes long."""
    marks = left_out(config)
    out = [
        item
        for item in items
        if any(mark.name in marks for mark in item.iter_markers())
        or ("long" in marks and item.path.as_posix().endswith(LONG_PAGES))
    ]
    if out:
        config.hook.pytest_deselected(items=out)
        left = set(out)
        items[:] = [item for item in items if item not in left]


def pytest_collection_finish() -> None:
    """Leave what is collected out of every later search for garbage, which takes long otherwise."""
    gc.enable()
    gc.collect()
    gc.freeze()


def pytest_configure(config: pytest.Config) -> None:
    refuse_a_missing_device(config)
    gc.disable()  # until everything is imported and collected, which stays
    forget_compiled_graphs()
    import_interpreted_kernels(config)


def refuse_a_missing_device(config: pytest.Config) -> None:
    """End with a usage error: tests that are skipped would look as if a GPU had run them."""
    if config.getoption("--device") != "cuda":
        return
    import torch

    if not torch.cuda.is_available():
        raise pytest.UsageError(
            "--device must be cpu, because there is no CUDA device, got cuda: "
            "torch.cuda.is_available() is False"
        )


def forget_compiled_graphs() -> None:
    """Switch off torch's caches of compiled graphs on disk, which may be those of earlier code.

    What a C++ compiler made of a graph is still reused: it is found by its source.
    """
    for cache in ("FX_GRAPH_CACHE", "AUTOGRAD_CACHE"):
        os.environ.setdefault(f"TORCHINDUCTOR_{cache}", "0")


# Files of kernels/ whose kernels tests interpret; those of `shared` come with them.
INTERPRETED = {
    "bands": ("forward", "backward", "bias_backward", "top_k", "one_tensor"),
    "edges": ("forward", "backward", "top_k"),
    "consensus": ("forward", "backward"),
    "neighbors": ("candidates",),
    "generation": ("step",),
}


def import_interpreted_kernels(config: pytest.Config) -> None:
    """Kernels that are to be interpreted must be imported so, and Triton's own functions too.

    That comes before all tests, because torch.compile imports Triton. Afterwards the variable is as
    before: what asks for it later (`graphattn.ops.attention.triton.is_interpreted`) is the tests'.
    """
    if config.getoption("--device") != "cpu" or importlib.util.find_spec("triton") is None:
        return
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        for room, files in INTERPRETED.items():
            for file in files:
                importlib.import_module(f"graphattn.kernels.{room}.{file}")
        patch_language_once_per_launch()
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before


class AlreadyPatched:
    """The scope of a second replacement of Triton's functions, which has nothing to take back."""

    def restore(self) -> None:
        """Leave everything to the scope of the launch."""


def patch_language_once_per_launch() -> None:
    """Spare Triton's interpreter half of its time: it replaces again what it has replaced.

    A launch replaces the functions of the module `triton.language` by interpreted ones, and puts
    them back at its end. The interpreter also does so for every function that a kernel calls, and
    never puts those back. Nothing is left to replace then; looking for it takes a millisecond.
    """
    interpreter = importlib.import_module("triton.runtime.interpreter")
    language = importlib.import_module("triton.language")
    patch_language = interpreter._patch_lang
    of_launch: set[str] = set()  # modules that the launch which runs now has replaced
    of_functions: set[str] = set()  # modules that functions of kernels have replaced, for good

    @functools.cache
    def modules_of(function) -> set[str]:
        names = function.__globals__.values()
        modules = [m for m in (language, language.core) if any(value is m for value in names)]
        return {module.__name__ for module in modules}

    def patch_once(function):
        used = modules_of(function)
        if of_launch and used <= of_launch | of_functions:
            return AlreadyPatched()
        scope = patch_language(function)
        if of_launch:
            of_functions.update(used)
            return scope
        restore = scope.restore

        def restore_once() -> None:
            of_launch.clear()
            restore()

        of_launch.update(used)
        scope.restore = restore_once
        return scope

    interpreter._patch_lang = patch_once
