"""graphattn: build a token graph, apply a layer to it.

    import graphattn as ga

    graph = ga.window_path_graph(num_tokens=1024, window=2)        # who talks to whom
    layer = ga.nn.SelfConsensus(384, heads=6, rope=True)
    y = layer(x, graph)                                            # x: [batch, 1024, 384]

Graph builders and operations live here, and load with torch. `ga.nn`, `ga.models`, `ga.spectral`,
`ga.dynamics`, `ga.diagnostics`, `ga.distributed`, `ga.train`, `ga.plot`, `ga.data` and
`ga.integrations` load on first use, so that importing graphattn costs little more than importing
torch; `ga.save`, `ga.load` and `ga.explore` too.
"""

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from graphattn.late_imports import after_import
from graphattn.version import __version__ as __version__

if TYPE_CHECKING:  # what loads later, for those who read without running
    from graphattn import data as data
    from graphattn import diagnostics as diagnostics
    from graphattn import distributed as distributed
    from graphattn import dynamics as dynamics
    from graphattn import integrations as integrations
    from graphattn import models as models
    from graphattn import nn as nn
    from graphattn import plot as plot
    from graphattn import spectral as spectral
    from graphattn import train as train
    from graphattn.explorer.explore import explore as explore
    from graphattn.graphs import *  # noqa: F403
    from graphattn.models.files import load as load
    from graphattn.models.files import save as save
    from graphattn.ops import *  # noqa: F403
    from graphattn.ops.attention.logits.check_score import check_score as check_score

_ON_FIRST_USE = (
    "data",
    "diagnostics",
    "distributed",
    "dynamics",
    "integrations",
    "models",
    "nn",
    "plot",
    "spectral",
    "train",
)
_FUNCTIONS_ON_FIRST_USE = {
    "check_score": "graphattn.ops.attention.logits.check_score",
    "explore": "graphattn.explorer.explore",
    "load": "graphattn.models.files",
    "save": "graphattn.models.files",
}


if find_spec("graphattn.kernels") is None:  # in the source, they lie beside this package
    raise ImportError(
        "graphattn is imported from its own source, because Python runs in that folder, and not "
        "from where it is installed: go to another folder first (cd ..), or install what this "
        "folder needs with make"
    )


def _load() -> None:
    """Load graphs and operations, which register operators with torch."""
    import_module("torch")  # which has called this function then, if it was new
    if "__all__" in globals():
        return
    parts = import_module("graphattn.graphs"), import_module("graphattn.ops")
    for part in parts:
        globals().update({name: getattr(part, name) for name in part.__all__})
    names = [name for part in parts for name in part.__all__]
    globals()["__all__"] = [*names, *_ON_FIRST_USE, *_FUNCTIONS_ON_FIRST_USE, "__version__"]


if not TYPE_CHECKING:  # a type checker would believe that every name is there

    def __getattr__(name: str) -> Any:
        if name in _ON_FIRST_USE:
            return import_module(f"graphattn.{name}")
        if name in _FUNCTIONS_ON_FIRST_USE:
            return getattr(import_module(_FUNCTIONS_ON_FIRST_USE[name]), name)
        known = ()
        if name == "__all__" or not name.startswith("__"):
            _load()
            known = globals()["__all__"]
            if name in globals():
                return globals()[name]
        from graphattn.near_names import did_you_mean

        raise AttributeError(
            f"module 'graphattn' has no attribute {name!r}{did_you_mean(name, known)}"
        )


def __dir__() -> list[str]:
    _load()
    return sorted(globals()["__all__"])


def _load_with_torch() -> None:
    if not any(name.startswith("graphattn.") for name in set(sys.modules) - _BEFORE_TORCH):
        _load()  # otherwise a part of graphattn imports torch, and is not ready to be imported


# Not before torch: the command shows its help, and refuses a mistyped option, without it.
_BEFORE_TORCH = {"graphattn.late_imports", "graphattn.version"}
after_import("torch", _load_with_torch)
