"""Save models and layers to files, and load them."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from graphattn.nn.files import pretrained


def save(model: nn.Module, directory: str | os.PathLike[str]) -> None:
    """Write a model or layer into a folder, from which :func:`load` can make it again.

    It writes two files: ``model.safetensors`` contains the weights, ``config.json`` the class and
        the arguments of its constructor. One tensor with two names stays one tensor. The method
        ``model.save_pretrained(directory)`` does the same.

    Args:
        model: a layer of :mod:`graphattn.nn` or a model of :mod:`graphattn.models`.
        directory: the folder. It is made if it does not exist; if it contains the two files, they
            are replaced.

    Raises:
        ValueError: if `directory` is a file, or has the name of one (``model.pt``).
        ValueError: if the model cannot be made again from files alone: it is not of graphattn, it
            contains modules of other classes, or it has been changed since its constructor made it.

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
    """Make a model or layer from the files that :func:`save` wrote.

    It has the dtype with which it was saved, and is in evaluation mode. Only classes of graphattn
    are made: nothing in a file is executed, and nothing is downloaded. The class method
    ``ga.models.SequenceEncoder.from_pretrained(directory)`` does the same, but raises an error if
    the files are those of another class. A subclass of your own has this method, too.

    Args:
        directory: the folder.
        device: device of the parameters.

    Raises:
        FileNotFoundError: if the folder or one of the files does not exist.
        ValueError: if a file is broken, names no class of graphattn, or does not fit the other
            file.

    Example:
        >>> import tempfile, graphattn as ga
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     ga.save(ga.nn.KrauseAttention(16, heads=4, top_k=3), folder)
        ...     ga.load(folder)
        KrauseAttention(16, heads=4, top_k=3)
    """
    return pretrained.load(directory, device=device)
