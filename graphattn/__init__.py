"""graphattn: build a token graph, apply a layer to it.

    import graphattn as ga

    graph = ga.window_path_graph(num_tokens=1024, window=2)        # who talks to whom
    layer = ga.nn.SelfConsensus(384, heads=6, rope=True)
    y = layer(x, graph)                                            # x: [batch, 1024, 384]

Graph builders and operations live here. `ga.nn`, `ga.models`, `ga.spectral`, `ga.dynamics`,
`ga.diagnostics`, `ga.train`, `ga.plot` and `ga.data` load on first use, so that importing graphattn
costs little more than importing torch.
"""

from typing import Any

from graphattn.graphs import *  # noqa: F403
from graphattn.graphs import __all__ as _graphs
from graphattn.ops import *  # noqa: F403
from graphattn.ops import __all__ as _ops

__version__ = "0.1.0"

_ON_FIRST_USE = (
    "data",
    "diagnostics",
    "dynamics",
    "models",
    "nn",
    "plot",
    "spectral",
    "train",
)

__all__ = [*_graphs, *_ops, *_ON_FIRST_USE, "__version__"]


def __getattr__(name: str) -> Any:
    if name in _ON_FIRST_USE:
        from importlib import import_module

        return import_module(f"graphattn.{name}")
    raise AttributeError(f"module 'graphattn' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
