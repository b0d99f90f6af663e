"""A model of tokens with a new head, for classes or numbers."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

from graphattn.graphs import TokenGraph
from graphattn.graphs.arguments import as_int
from graphattn.models.proteins.source_tracks import LETTERS
from graphattn.nn.files.config import Configured


class WithHead(Configured, nn.Module):
    """A model of tokens with a new head, for classes or numbers per token.

    It is a copy of `model`, in which a new linear map replaces the head. Everything else, including
    trained weights, stays the same.

    Args:
        model: a :class:`~graphattn.models.SequenceEncoder`, ProteinModel or CausalLM.
        outputs: width of the new head.

    Shapes:
        - **tokens** and keywords: those of `model`
        - **output**: [*, N, outputs]

    Raises:
        ValueError: if the model has no linear head, or its head is its embedding.

    Example:
        >>> import torch, graphattn as ga
        >>> encoder = ga.models.SequenceEncoder(28, 32, depth=2, heads=4)
        >>> model = ga.train.WithHead(encoder, 3)
        >>> model(torch.randint(28, (2, 50))).shape
        torch.Size([2, 50, 3])
    """

    supports_gradient_checkpointing: ClassVar = True

    def __init__(self, model: nn.Module, outputs: int) -> None:
        super().__init__()
        head: Any = getattr(model, "head", None)
        embedding = getattr(model, "embedding", None)
        if not isinstance(head, nn.Linear) or not isinstance(embedding, nn.Embedding):
            raise ValueError(
                "model must be a SequenceEncoder, ProteinModel or CausalLM with a linear head, got "
                f"a {type(model).__name__}"
            )
        if getattr(model, "tie_weights", False):
            raise ValueError(
                "model must be made with tie_weights=False, got True: its head is its embedding, "
                "so it cannot be replaced"
            )
        if getattr(model, "logit_softcap", None) is not None:
            raise ValueError(
                f"model must be made with logit_softcap=None, got {model.logit_softcap}: a softcap "
                "would bound the outputs of the new head"
            )
        self.model: Any = copy.deepcopy(model)
        self.outputs = as_int("outputs", outputs, 1)
        like: Any = {"device": head.weight.device, "dtype": head.weight.dtype}
        self.model.head = nn.Linear(head.in_features, self.outputs, **like)

    def reset_parameters(self) -> None:
        """Initialise every parameter again."""
        self.model.reset_parameters()

    def forward(self, tokens: Tensor, graph: Any = None, **given: Any) -> Tensor:
        """Return outputs for every token, [*, N, outputs]; keywords are those of the model."""
        outputs = self.model(tokens, graph, **given)
        return outputs[LETTERS] if isinstance(outputs, dict) else outputs

    def graphs(self, *args: Any, **kwargs: Any) -> Sequence[TokenGraph]:
        """Return the graphs of the model, one per block."""
        return self.model.graphs(*args, **kwargs)

    @property
    def structure(self) -> bool:
        """Return whether the model reads structures."""
        return getattr(self.model, "structure", False) is True

    @property
    def context(self) -> dict[str, Any]:
        """Return the tracks that the model reads."""
        return getattr(self.model, "context", None) or {}

    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: dict[str, Any] | None = None
    ) -> None:
        """Compute the blocks a second time in the backward pass, instead of storing activations."""
        self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs)

    def gradient_checkpointing_disable(self) -> None:
        """Store all activations for the backward pass again."""
        self.model.gradient_checkpointing_disable()
