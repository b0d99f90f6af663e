"""Training: objectives, the engine that runs them, and the folders that runs write.

::

    config = ga.train.RunConfig(steps=2000, lr=1e-3, out="runs/a")
    run = ga.train.fit(model, objective, config, train, validation)
    ga.train.resume("runs/a", steps=4000)
    ga.train.read_run("runs/a").evaluations
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graphattn.train.public import *  # noqa: F403
    from graphattn.train.trainer import GraphTrainer as GraphTrainer
else:
    # The command reads RunConfig, for the names of its options, without waiting for all of these.

    def __getattr__(name: str) -> Any:
        if name == "GraphTrainer":  # it imports transformers' Trainer, which takes seconds
            return import_module("graphattn.train.trainer").GraphTrainer
        if name.startswith("__") and name != "__all__":
            raise AttributeError(f"module 'graphattn.train' has no attribute {name!r}")
        public = import_module("graphattn.train.public")
        globals().update({each: getattr(public, each) for each in public.__all__})
        globals()["__all__"] = sorted([*public.__all__, "GraphTrainer"])
        if name not in globals():
            raise AttributeError(f"module 'graphattn.train' has no attribute {name!r}")
        return globals()[name]
