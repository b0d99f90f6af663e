"""Models and layers to files and back."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from graphattn.nn.files import pretrained


def save(model: nn.Module, directory: str | os.PathLike[str]) -> None:
    """Write a model or layer into a folder, from which :func:`load` makes it again.

    Two files: ``model.safetensors``, the numbers, and ``config.json``, the class and the arguments
    of its constructor. Weights that are one tensor under two names stay one. Also as the method
    ``model.save_pretrained(directory)``.

    Args:
        model: a layer of :mod:`graphattn.nn` or a model of :mod:`graphattn.models`.
        directory: the folder; made if it is not there, and its two files replaced if they are.

    Raises:
        ValueError: for a `directory` that is a file, or would be called like one (``model.pt``).
        ValueError: for a model that files alone cannot make again: another class, one that holds
            modules of other classes, and one that has been rebuilt since its constructor made it.

    Example:
        >>> import tempfile, torch, graphattn as ga
        >>> model = ga.models.SequenceEncoder(28, 32, depth=2, heads=4, rope=False)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     ga.save(model, folder)
        ...     twin = ga.load(folder)
        >>> tokens = torch.randint(28, (2, 50))
        >>> torch.equal(twin(tokens), model(tokens))
        True
    """
    pretrained.save(model, directory)


def load(directory: str | os.PathLike[str], *, device: str | torch.device = "cpu") -> Any:
    """Make the model or layer that :func:`save` wrote, from its files alone.

    It comes with the dtype it was saved in, ready for inference (``model.eval()``). Only classes of
    graphattn are made: nothing that a file says is executed, and nothing is downloaded. Also as the
    class method ``ga.models.SequenceEncoder.from_pretrained(directory)``, which refuses files of
    another class, and which a subclass of your own has too.

    Args:
        directory: the folder.
        device: where its parameters go.

    Raises:
        FileNotFoundError: the folder or one of the files is not there.
        ValueError: a file is broken, names no class of graphattn, or does not fit the other.

    Example:
        >>> import tempfile, graphattn as ga
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     ga.save(ga.nn.KrauseAttention(16, heads=4, top_k=3), folder)
        ...     ga.load(folder)
        KrauseAttention(16, heads=4, top_k=3)
    """
    return pretrained.load(directory, device=device)
