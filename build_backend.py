"""setuptools, and an editable installation that type checkers see.

An editable installation finds `graphattn` (and `kernels/` as `graphattn.kernels`) by a hook that
runs when something is imported. Type checkers run nothing, so they would find nothing. This backend
adds what they read: a folder of links in the layout of an installation, as a stub package (PEP
561), which Python itself never imports.

setuptools takes what an earlier build left in build/ for its own: a library of other sources, or of
a compiler that is no longer there. So a wheel is built without that. Everything else is setuptools'
own.

Where links cannot be made (Windows without its developer mode) the installation is as setuptools
makes it. A new file directly in graphattn/ is seen after the next installation, a deeper one at
once.
"""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import zipfile
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import (  # noqa: F401
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

TOP = Path(__file__).resolve().parent
PATH_FILE = "__editable__.graphattn-types.pth"


def build_wheel(
    wheel_directory: str,
    config_settings: dict[str, Any] | None = None,
    metadata_directory: str | None = None,
) -> str:
    """setuptools' wheel, of nothing that an earlier build left."""
    remove_earlier_build(TOP / "build")
    name: str = build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)
    return name


def remove_earlier_build(folder: Path) -> None:
    """What setuptools writes below `folder`; the rest of it (links, `make`'s files) stays."""
    for pattern in ("lib*", "temp*", "bdist*"):
        for path in folder.glob(pattern):
            shutil.rmtree(path)


def build_editable(
    wheel_directory: str,
    config_settings: dict[str, Any] | None = None,
    metadata_directory: str | None = None,
) -> str:
    """setuptools' editable wheel, with the path of the links in it."""
    name: str = build_meta.build_editable(wheel_directory, config_settings, metadata_directory)
    try:
        links = link_layout(TOP / "build" / "types")
    except OSError:
        return name
    add_file(Path(wheel_directory, name), PATH_FILE, f"{links}\n".encode())
    return name


def link_layout(folder: Path) -> Path:
    """Links to every part of an installed graphattn, below `folder`; returns `folder`."""
    package = folder / "graphattn-stubs"
    if package.exists():
        shutil.rmtree(package)
    package.mkdir(parents=True)
    for part in sorted((TOP / "graphattn").iterdir()):
        if part.suffix in ("", ".py", ".typed") and part.name not in ("__pycache__", "kernels"):
            # Of a stub package, only the first file must have a stub's name.
            link = "__init__.pyi" if part.name == "__init__.py" else part.name
            (package / link).symlink_to(os.path.relpath(part, package))
    (package / "kernels").symlink_to(os.path.relpath(TOP / "kernels", package))
    return folder


def add_file(wheel: Path, name: str, content: bytes) -> None:
    """Put one more file into a wheel, and into its list of files."""
    before = wheel.with_suffix(".before")
    wheel.rename(before)
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    with zipfile.ZipFile(before) as old, zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as new:
        for entry in old.infolist():
            data = old.read(entry)
            if entry.filename.endswith(".dist-info/RECORD"):
                data += f"{name},sha256={digest},{len(content)}\n".encode()
            new.writestr(entry, data)
        new.writestr(name, content)
    before.unlink()
