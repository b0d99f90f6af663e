"""Where kernels are tested: `pytest` interprets them on the CPU, `--device cuda` runs them."""

import importlib.util
import os

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device",
        default="cpu",
        choices=("cpu", "cuda"),
        help="where tests/kernels run: in Triton's interpreter (cpu), or on a GPU",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Kernels that are to be interpreted must be imported so, and Triton's own functions too.

    That comes before all tests, because torch.compile imports Triton. Afterwards the variable is as
    before: what asks for it later (`graphattn.ops.attention.triton.is_interpreted`) is the tests'.
    """
    if config.getoption("--device") != "cpu" or importlib.util.find_spec("triton") is None:
        return
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        from graphattn.kernels import (  # noqa: F401
            band,
            band_backward,
            band_table,
            consensus,
            consensus_backward,
            edge_selection,
            edges,
            edges_backward,
            gaussian,
            knn,
            topk,
            window_step,
        )
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before
