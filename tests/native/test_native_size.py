"""Compiled code stays little: the time of a build is that of the functions in it.

Before options were values at run time, a library had 2.4 MB, and took twice as long to build.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest

BYTES = 1_200_000  # of a library

# A template is compiled for float and for double; these also for constants of their inner loops.
INSTANCES = {
    "products_of_heads": 12,  # widths of 16, 32, 64, 128 or any (any of double); dot or RBF
    "sums_of_heads": 12,
    "affinities": 8,  # dot or RBF; 1 or 2 vectors of keys
    "diagonal_affinities": 4,
    "combine": 4,  # dot or RBF
    "put_columns": 4,  # tokens of a vector, or targets of a tile
    "make_logits": 4,  # 1 or 2 vectors of keys
    "forward_row": 4,  # 1 or 2 vectors of edges
    "forward_product": 4,
    "backward_product": 4,
    "BlockStep": 4,  # weights as they are computed with, or halves of two kinds (of floats)
    "Weights": 4,
    "linear_map": 4,
}


def instances(library: Path) -> Counter[str]:
    """How many forms of every function or class template are in a library."""
    run = subprocess.run(["nm", "-C", library], capture_output=True, text=True, check=True)
    names = (line.split(maxsplit=2)[-1] for line in run.stdout.splitlines())
    templates = re.findall(r"::(\w+)<((?:float|double)[^<>]*)>", "\n".join(names))
    return Counter(name for name, _ in set(templates))


def test_a_library_is_small_and_has_few_instances_of_its_large_functions(native):
    library = Path(native._name)
    assert library.stat().st_size < BYTES
    if shutil.which("nm") is None:
        pytest.skip("nm, which lists the functions of a library, is not installed")
    counts = instances(library)
    assert counts["Rows"] == counts["BandRow"] == 2  # so names are read as they are written
    assert {name: n for name, n in counts.items() if n > INSTANCES.get(name, 2)} == {}
