"""A model of tokens with a head of another width: for classes and numbers."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

from graphattn.graphs import TokenGraph
from graphattn.graphs.arguments import as_int
from graphattn.nn.files.config import Configured


class WithHead(Configured, nn.Module):
    """A model of tokens whose head answers something else: classes, or numbers per token.

    A copy of `model` whose head, a linear map to its vocabulary, is replaced by a new one. All else
    stays, what it has learned, too.

    Args:
        model: a :class:`~graphattn.models.SequenceEncoder`, ProteinModel or CausalLM.
        outputs: width of the new head.

    Shapes:
        - **tokens** and keywords: those of `model`
        - **output**: [*, N, outputs]

    Raises:
        ValueError: for a model without a linear head, or one whose head is its embedding.

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
                "model must be made with tie_weights=False: its head is its embedding, and cannot "
                "answer anything else"
            )
        if getattr(model, "logit_softcap", None) is not None:
            raise ValueError(
                "model must be made with logit_softcap=None, which would bound what the head says"
            )
        self.model: Any = copy.deepcopy(model)
        self.outputs = as_int("outputs", outputs, 1)
        weight = head.weight
        self.model.head = nn.Linear(
            head.in_features, self.outputs, device=weight.device, dtype=weight.dtype
        )

    def reset_parameters(self) -> None:
        """Draw every parameter anew."""
        self.model.reset_parameters()

    def forward(self, tokens: Tensor, graph: Any = None, **given: Any) -> Tensor:
        """Answers for every token, [*, N, outputs]; keywords are those of the model."""
        found: Tensor = self.model(tokens, graph, **given)
        return found

    def graphs(self, *args: Any, **kwargs: Any) -> Sequence[TokenGraph]:
        """The graph of every block, as the model has it."""
        found: Sequence[TokenGraph] = self.model.graphs(*args, **kwargs)
        return found

    @property
    def structure(self) -> bool:
        """Whether the model reads structures."""
        return getattr(self.model, "structure", False) is True

    @property
    def context(self) -> dict[str, Any]:
        """The tracks that the model reads."""
        return getattr(self.model, "context", None) or {}

    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: dict[str, Any] | None = None
    ) -> None:
        """Compute the blocks a second time in the backward pass, instead of keeping activations."""
        self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs)

    def gradient_checkpointing_disable(self) -> None:
        """Keep all activations for the backward pass again."""
        self.model.gradient_checkpointing_disable()
