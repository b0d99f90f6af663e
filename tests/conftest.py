"""Options of the tests: `pytest` interprets kernels on the CPU, `--device cuda` runs them."""

import gc
import importlib
import importlib.util
import os
import zlib

import pytest

LONG_PAGES = ("counts.md", "krause-shortcut.md")  # of the documentation, whose examples run


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device",
        default="cpu",
        choices=("cpu", "cuda"),
        help="where tests/kernels run: in Triton's interpreter (cpu), or on a GPU",
    )
    parser.addoption(
        "--cases",
        type=int,
        metavar="N",
        help="run at most N cases of every parametrized test, spread evenly; all if not given",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`--cases N` samples long sweeps; tests that are cheap and must be whole are marked so."""
    most = config.getoption("--cases")
    if most is None:
        return
    by_function: dict[str, list[pytest.Item]] = {}
    left_out = set()
    for item in items:
        if item.get_closest_marker("long") or item.path.name in LONG_PAGES:
            left_out.add(item)
        elif not item.get_closest_marker("every_case"):
            by_function.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for name, cases in by_function.items():
        if most == 1:  # any of them, and always that one
            kept = {zlib.crc32(name.encode()) % len(cases)}
        else:
            kept = {round(k * (len(cases) - 1) / (most - 1)) for k in range(most)}
        if len(cases) > most:
            left_out.update(case for k, case in enumerate(cases) if k not in kept)
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


def pytest_collection_finish() -> None:
    """Leave what is collected out of every later search for garbage, which takes long otherwise."""
    gc.collect()
    gc.freeze()


def pytest_configure(config: pytest.Config) -> None:
    forget_compiled_graphs()
    import_interpreted_kernels(config)


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
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before
