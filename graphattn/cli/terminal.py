"""The terminal to which commands write."""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def terminal() -> Console:
    """Return a console with at least 80 columns; characters it cannot encode become "?"."""
    from rich.console import Console  # when a command runs, not for its help

    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")
    console = Console(emoji=False)
    return console if console.width >= 80 else Console(emoji=False, width=80)
