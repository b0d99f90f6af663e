"""Every main configuration of every kernel, compiled without a device and judged.

    python -m graphattn.kernels.check                    # sm_90
    python -m graphattn.kernels.check --all --markdown docs/benchmarks/kernels.md
    python -m graphattn.kernels.check --measured docs/benchmarks/visits/DATE-GPU.json

Exits with 1 and a list where a kernel spills registers, needs more shared memory than there is,
or lacks the matrix instruction of its architecture.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from graphattn.kernels.check.compile import ARCHITECTURES
from graphattn.kernels.check.measured import read_measured
from graphattn.kernels.check.report import CONFIGURATIONS, as_json, check, markdown


def main(arguments: Sequence[str] | None = None, *, configurations: str = CONFIGURATIONS) -> int:
    """The command; returns its exit status.

    Args:
        arguments: what follows ``python -m graphattn.kernels.check``.
        configurations: the module whose ``all_configurations()`` are checked.
    """
    parser = argparse.ArgumentParser(
        prog="python -m graphattn.kernels.check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--arch", nargs="+", choices=ARCHITECTURES, default=["sm_90"])
    parser.add_argument("--all", action="store_true", help="every architecture")
    parser.add_argument("--json", type=Path, metavar="FILE", help="every number, for programs")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="the tables, as a file")
    parser.add_argument(
        "--measured",
        type=Path,
        metavar="FILE",
        help="times on a GPU, shown beside predictions: visit.json of `make gpu STEP=times`",
    )
    options = parser.parse_args(arguments)
    try:
        measured = read_measured(options.measured) if options.measured else None
    except ValueError as error:
        parser.error(str(error))
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        print(
            "TRITON_INTERPRET is set: an interpreted kernel cannot be compiled. Unset it.",
            file=sys.stderr,
        )
        return 2
    rows = check(list(ARCHITECTURES) if options.all else options.arch, configurations)
    text = markdown(rows, measured)
    print(text)
    if options.markdown:
        options.markdown.write_text(text, encoding="utf-8")
    if options.json:
        options.json.write_text(as_json(rows), encoding="utf-8")
    num_problems = sum(len(row.problems) for row in rows)
    if num_problems:
        print(f"{num_problems} problems, listed above", file=sys.stderr)
    return 1 if num_problems else 0


if __name__ == "__main__":
    sys.exit(main())
