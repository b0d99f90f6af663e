"""A process that does jobs of a step: it reads their names, and writes rows."""

from __future__ import annotations

import importlib
import json
import os
import sys
import time

from .session import Machine

LAST_WORDS = 400  # characters of an error that are kept


def main() -> None:
    """Do the jobs that come in, each a JSON line; give back rows, the last with `"end": true`."""
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what compilers print is no row
    module, device, arch, size = sys.argv[1:]
    work = importlib.import_module(module).work

    def send(row: dict[str, object]) -> None:
        channel.write(json.dumps(row) + "\n")
        channel.flush()

    for line in sys.stdin:
        asked = json.loads(line)
        name, begin = asked["job"], time.perf_counter()
        last: dict[str, object] = {"job": name, "end": True}
        spoilt = False
        try:
            for row in work(name, asked["known"], Machine(device, arch), size):
                send({"job": name, **row})
        except Exception as error:  # other jobs can still run
            text = str(error).strip() or type(error).__name__
            last["error"] = f"{type(error).__name__}: {text[-LAST_WORDS:]}"
            spoilt = "CUDA error" in text or "an illegal" in text
        send(last | {"seconds": round(time.perf_counter() - begin, 2)})
        if spoilt:  # everything that this process would do on the GPU now fails
            os._exit(1)


if __name__ == "__main__":
    main()
