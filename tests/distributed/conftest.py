from collections.abc import Iterator

import pytest
from ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Four processes that run functions together; see `ranks.py`."""
    processes = Ranks()
    yield processes
    processes.stop()
