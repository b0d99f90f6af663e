"""The thumbnails of plots.md: what the example in the docstring of every function of ga.plot draws.

python docs/plots.py              all of them, into docs/_figures (Sphinx does this by itself)
python docs/plots.py NAME ...     some
"""

from __future__ import annotations

import doctest
import inspect
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import graphattn as ga

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HERE = Path(__file__).resolve().parent


def drawn_by_example(function: Callable[..., Any]) -> Figure:
    """Run the example of a docstring, and return the one figure that it makes."""
    import matplotlib.pyplot as plt

    name = function.__name__
    examples = doctest.DocTestParser().get_examples(inspect.getdoc(function) or "")
    plt.switch_backend("agg")
    plt.close("all")
    with torch.random.fork_rng(), redirect_stdout(StringIO()):  # not what the example prints
        torch.manual_seed(0)  # the same picture in every build
        exec(compile("".join(e.source for e in examples), f"<example of {name}>", "exec"), {})
    figures = [plt.figure(number) for number in plt.get_fignums()]
    plt.close("all")
    if len(figures) != 1 or not any(ax.has_data() for ax in figures[0].axes):
        raise ValueError(
            f"the example of {name} must draw exactly one figure with something in it, got "
            f"{len(figures)} figures"
        )
    return figures[0]


def draw_all(folder: Path, names: list[str] | None = None) -> None:
    """Every thumbnail, or some, as ``folder/plot_NAME.png``."""
    from pictures import save  # beside this file

    for name in names or ga.plot.__all__:
        save(drawn_by_example(getattr(ga.plot, name)), folder / f"plot_{name}.png")


def markdown() -> str:
    """Return the grid of thumbnails: a name, what the function does, and the picture."""
    cells = []
    for name in ga.plot.__all__:
        about = (inspect.getdoc(getattr(ga.plot, name)) or "").split("\n\n")[0]
        picture = [f"```{{image}} _figures/plot_{name}.png", f":alt: {about}", ":scale: 50%", "```"]
        link = f"{{func}}`{name} <graphattn.plot.{name}>`"
        cells.append("\n".join(["````{container}", f"{link}: {about}", "", *picture, "````"]))
    return "\n\n".join(["`````{container} thumbnails", *cells, "`````"]) + "\n"


if __name__ == "__main__":
    draw_all(HERE / "_figures", sys.argv[1:])
