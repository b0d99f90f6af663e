"""Run tests in forks of a process that has imported what takes seconds, and nothing of ours.

Lines of the standard input are lists of tests, in JSON. For each of them a fork runs pytest in the
current folder, up to the first failure. Its status is printed; what it prints is in OUTPUT. A fork
that takes longer than LIMIT is ended, with a negative status.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import sys
import traceback
from contextlib import suppress
from pathlib import Path

OUTPUT = "output.txt"
LIMIT = 1800  # seconds: code with a mistake may never end
NOT_RUN = 99  # the status where the code cannot be imported, or is not that of the folder
HEAVY = (
    "torch", "torch.distributed", "torch._dynamo", "torch_geometric", "transformers", "networkx",
    "scipy.sparse.linalg", "hypothesis", "pytest",
)  # fmt: skip


def import_what_takes_seconds() -> None:
    """Import it as tests need it: Triton is to interpret its own functions (`conftest.py`)."""
    os.environ["TRITON_INTERPRET"] = "1"
    for name in ("triton.language", "triton.runtime.interpreter", *HEAVY):
        with suppress(ImportError):
            importlib.import_module(name)
    del os.environ["TRITON_INTERPRET"]
    gc.collect()
    gc.freeze()


def run(tests: list[str]) -> int:
    """Run tests on the code of the current folder."""
    # An editable installation maps both names to the checkout: only their files tell.
    try:
        import graphattn
        import graphattn.kernels

        for module in (graphattn, graphattn.kernels):
            file = Path(str(module.__file__)).resolve()
            assert file.is_relative_to(Path.cwd().resolve()), file
    except Exception:
        traceback.print_exc()
        return NOT_RUN
    import pytest

    return int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests]))


def main() -> None:
    """Serve until the standard input ends."""
    import_what_takes_seconds()
    assert "graphattn" not in sys.modules
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            output = os.open(OUTPUT, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            status = NOT_RUN
            signal.alarm(LIMIT)
            try:
                status = run(json.loads(line))
                sys.stdout.flush()
            finally:
                os._exit(status)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
