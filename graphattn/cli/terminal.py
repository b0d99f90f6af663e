"""The terminal that commands write to."""

from __future__ import annotations

import io
import sys

from rich.console import Console


def terminal() -> Console:
    """The terminal, at least 80 columns of it; what its encoding lacks becomes a question mark."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")
    console = Console(emoji=False)
    return console if console.width >= 80 else Console(emoji=False, width=80)
