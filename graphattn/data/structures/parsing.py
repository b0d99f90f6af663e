"""Use of biotite, an optional dependency, with its errors converted to FileFormatError."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from graphattn.data.files import FileFormatError

# Names that the force fields Amber and CHARMM give amino acids by their protons and bonds. In the
# Chemical Component Dictionary, some of these are names of other molecules.
FORCE_FIELD_NAMES = {
    **dict.fromkeys(("HID", "HIE", "HIP", "HSD", "HSE", "HSP"), "HIS"),
    **dict.fromkeys(("CYX", "CYM"), "CYS"),
    "ASH": "ASP",
    "GLH": "GLU",
    "LYN": "LYS",
    "ARN": "ARG",
    "TYM": "TYR",
}


def require_biotite(purpose: str) -> None:
    """Raise ImportError if biotite is not installed."""
    try:
        import biotite  # noqa: F401
    except ImportError as error:
        message = f"{purpose} needs biotite: install it with pip install 'graphattn[bio]'"
        raise ImportError(message) from error


@contextmanager
def biotite_at_work(path: str | os.PathLike[str]) -> Iterator[None]:
    """Convert every error of biotite to a FileFormatError, and ignore its warnings.

    It warns about guessed elements and missing optional columns, which this reader does not use.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except FileFormatError:
        raise
    except Exception as error:  # For a broken file, a parser may raise any exception.
        cause: BaseException = error
        while cause.__context__ is not None:  # The first error says more than the later ones.
            cause = cause.__context__
        missing = "no column or block " if isinstance(cause, KeyError) else ""
        raise FileFormatError(path, f"is malformed: {missing}{cause}") from error
