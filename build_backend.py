"""setuptools, and an editable installation that type checkers see.

An editable installation finds `graphattn` (and `kernels/` as `graphattn.kernels`) by a hook that
runs when something is imported. Type checkers run nothing, so they would find nothing. This backend
adds what they read: a folder of links in the layout of an installation, as a stub package (PEP
561), which Python itself never imports.

setuptools takes what an earlier build left in build/ for its own: a library of other sources, or of
a compiler that is no longer there. So a wheel is built without that.

Two builds of the same files by the same tools are the same bytes: archives say nothing of when,
where and by whom they were made. Every file in them has the date ``SOURCE_DATE_EPOCH``, or a fixed
one. Everything else is setuptools' own.

Where links cannot be made (Windows without its developer mode) the installation is as setuptools
makes it. A new file directly in graphattn/ is seen after the next installation, a deeper one at
once.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import os
import shutil
import stat
import tarfile
import time
import zipfile
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import (  # noqa: F401
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

TOP = Path(__file__).resolve().parent
PATH_FILE = "__editable__.graphattn-types.pth"
DATE = 1580601600  # 2020-02-02, as hatchling has it


def build_wheel(
    wheel_directory: str,
    config_settings: dict[str, Any] | None = None,
    metadata_directory: str | None = None,
) -> str:
    """setuptools' wheel, of nothing that an earlier build left."""
    remove_earlier_build(TOP / "build")
    name: str = build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)
    level_wheel(Path(wheel_directory, name))
    return name


def build_sdist(sdist_directory: str, config_settings: dict[str, Any] | None = None) -> str:
    """setuptools' source distribution, of the same bytes for the same files."""
    name: str = build_meta.build_sdist(sdist_directory, config_settings)
    level_sdist(Path(sdist_directory, name))
    return name


def level_wheel(wheel: Path) -> None:
    """Give every file in a wheel the same date, and rights that no umask has changed."""
    before = wheel.with_suffix(".before")
    wheel.rename(before)
    date = time.gmtime(max(source_date(), 315532800))[:6]  # 1980: zip files know no date before
    with zipfile.ZipFile(before) as old, zipfile.ZipFile(wheel, "w") as new:
        for entry in old.infolist():
            level = zipfile.ZipInfo(entry.filename, date)
            level.compress_type = zipfile.ZIP_DEFLATED
            level.external_attr = rights(entry.external_attr >> 16) << 16
            new.writestr(level, old.read(entry))
    before.unlink()


def level_sdist(sdist: Path) -> None:
    """Give every file in a .tar.gz the same date, owner and rights, and sort them by name."""
    before = sdist.with_suffix(".before")
    sdist.rename(before)
    date = source_date()
    with (
        tarfile.open(before) as old,
        sdist.open("wb") as raw,
        gzip.GzipFile("", "wb", fileobj=raw, mtime=date) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as new,
    ):
        for entry in sorted(old.getmembers(), key=lambda entry: entry.name):
            level = tarfile.TarInfo(entry.name)
            content = old.extractfile(entry)  # of a link: that of the file it leads to
            if content:
                data = content.read()
                level.size, level.mtime, level.mode = len(data), date, rights(entry.mode)
                new.addfile(level, io.BytesIO(data))
            else:
                level.type, level.mtime, level.mode = entry.type, date, 0o755
                new.addfile(level)
    before.unlink()


def source_date() -> int:
    """Seconds since 1970: ``SOURCE_DATE_EPOCH``, or `DATE`."""
    return int(os.environ.get("SOURCE_DATE_EPOCH") or DATE)


def rights(mode: int) -> int:
    """A regular file that all may read, and run if its owner may."""
    return stat.S_IFREG | (0o755 if mode & stat.S_IXUSR else 0o644)


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
