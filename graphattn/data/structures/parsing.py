"""Biotite, which parses the formats: an optional dependency, and none whose errors users read."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from graphattn.data.files import FileFormatError


def require_biotite(purpose: str) -> None:
    """Raise where biotite is not installed."""
    try:
        import biotite  # noqa: F401
    except ImportError as error:
        message = f"{purpose} needs biotite: pip install 'graphattn[bio]'"
        raise ImportError(message) from error


@contextmanager
def biotite_at_work(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn every error of biotite into one line about the file; its warnings stay quiet.

    It warns of guessed elements and missing optional columns, which this reader does not use.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except FileFormatError:
        raise
    except Exception as error:  # a parser fed with a broken file raises anything
        cause: BaseException = error
        while cause.__context__ is not None:  # "Failed to deserialize" hides what failed
            cause = cause.__context__
        missing = "no column or block " if isinstance(cause, KeyError) else ""
        raise FileFormatError(path, f"is malformed: {missing}{cause}") from error
