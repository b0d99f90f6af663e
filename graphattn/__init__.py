"""graphattn: build a token graph, apply a layer to it.

    import graphattn as ga

    graph = ga.window_path_graph(num_tokens=1024, window=2)        # who talks to whom
    layer = ga.nn.SelfConsensus(384, heads=6, rope=True)
    y = layer(x, graph)                                            # x: [batch, 1024, 384]

Graph builders and operations live here. `ga.nn`, `ga.models`, `ga.spectral`, `ga.dynamics`,
`ga.diagnostics`, `ga.distributed`, `ga.train`, `ga.plot`, `ga.data` and `ga.integrations` load on
first use, so that importing graphattn costs little more than importing torch; `ga.save` and
`ga.load` too.
"""

from typing import TYPE_CHECKING, Any

from graphattn.graphs import *  # noqa: F403
from graphattn.graphs import __all__ as _graphs
from graphattn.ops import *  # noqa: F403
from graphattn.ops import __all__ as _ops
from graphattn.version import __version__ as __version__

if TYPE_CHECKING:  # what loads on first use, for those who read without running
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
    from graphattn.models.files import load as load
    from graphattn.models.files import save as save
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
    "load": "graphattn.models.files",
    "save": "graphattn.models.files",
}

__all__ = [*_graphs, *_ops, *_ON_FIRST_USE, *_FUNCTIONS_ON_FIRST_USE, "__version__"]


if not TYPE_CHECKING:  # a type checker would believe that every name is there

    def __getattr__(name: str) -> Any:
        from importlib import import_module

        if name in _ON_FIRST_USE:
            return import_module(f"graphattn.{name}")
        if name in _FUNCTIONS_ON_FIRST_USE:
            return getattr(import_module(_FUNCTIONS_ON_FIRST_USE[name]), name)
        from graphattn.graphs.arguments import did_you_mean

        near = did_you_mean(name, __all__)
        raise AttributeError(f"module 'graphattn' has no attribute {name!r}{near}")


def __dir__() -> list[str]:
    return sorted(__all__)
