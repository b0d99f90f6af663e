import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ranks import Ranks

Outcome = Callable[[str], list[dict[str, Any]]]


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Four processes that run functions together; see `ranks.py`."""
    processes = Ranks()
    yield processes
    processes.stop()


@pytest.fixture(scope="session")
def outcome() -> Iterator[Outcome]:
    """Run a scenario of `failing_ranks.py`: what each of three ranks raised, and when."""
    script = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("failing_ranks.py"))],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip

    def run(name: str) -> list[dict[str, Any]]:
        assert script.stdin is not None
        assert script.stdout is not None
        script.stdin.write(name + "\n")
        script.stdin.flush()
        found: list[dict[str, Any]] = json.loads(script.stdout.readline())
        return found

    yield run
    script.communicate(timeout=60)
