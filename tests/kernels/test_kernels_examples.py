"""The examples in the kernels' docstrings run; the folder is no part of pytest's own search."""

import doctest
import importlib

import pytest

MODULES = (
    "bands.schedule",
    "check.compile",
    "check.machine_code",
    "check.measured",
    "check.prediction",
    "consensus.schedule",
    "edges.schedule",
    "shared.stored",
    "shared.tuning",
)


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name: str) -> None:
    module = importlib.import_module(f"graphattn.kernels.{name}")
    result = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    assert result.attempted > 0
    assert result.failed == 0
