"""Value embeddings: a table of the vocabulary whose rows are added to the values of attention."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from graphattn.graphs.arguments import as_int

CHANNELS = 32  # of the layer's input that the gate reads, as in nanochat


class ValueEmbedding(nn.Module):
    r"""Add an embedding of every token to its value, with a gate per head.

    .. math::
        v_j^h \leftarrow v_j^h + 2 \operatorname{sigmoid}(w_h \cdot x_j^{1..32}) \, E[t_j]^h

    for token t_j with features x_j, as in nanochat, the baseline of Projection-Free Transformers,
    Section 5 (its code of February 2026, when the paper read it; nanochat's later gate reads 12
    channels and goes up to 3). The idea is that of ResFormer (Zhou et al., 2024).

    It starts as there: the table is uniform with deviation 1 / sqrt(dim), and w = 0, so every gate
    is 1.

    Args:
        vocab_size: number of tokens.
        dim: width of the features that the gate reads; of a narrow layer, it reads all of them.
        kv_heads: Hk, the number of value heads.
        head_dim: D, their width.

    Example:
        >>> import torch
        >>> from graphattn.nn.blocks.value_embedding import ValueEmbedding
        >>> values = ValueEmbedding(50, dim=64, kv_heads=2, head_dim=16)
        >>> x, tokens = torch.randn(3, 10, 64), torch.randint(50, (3, 10))
        >>> values(torch.zeros(3, 10, 2, 16), x, tokens).shape
        torch.Size([3, 10, 2, 16])
    """

    def __init__(self, vocab_size: int, dim: int, kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.vocab_size = as_int("value_embeddings", vocab_size, 1)
        self.dim, self.kv_heads, self.head_dim = dim, kv_heads, head_dim
        self.table = nn.Embedding(self.vocab_size, kv_heads * head_dim)
        self.gate = nn.Linear(min(CHANNELS, dim), kv_heads, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the table anew, and open every gate by 1."""
        bound = math.sqrt(3 / self.dim)  # a uniform distribution with deviation 1 / sqrt(dim)
        nn.init.uniform_(self.table.weight, -bound, bound)
        nn.init.zeros_(self.gate.weight)

    def forward(self, value: Tensor, x: Tensor, tokens: Any, valid: Tensor | None = None) -> Tensor:
        """Return the values [*, M, Hk, D] with the embeddings of tokens [*, M] of features x.

        `valid` is False where a token is padding, which may have any number.
        """
        self.check(x, tokens)
        if valid is not None:
            tokens = tokens.masked_fill(~valid, 0)
        gate = 2 * torch.sigmoid(self.gate(x[..., : self.gate.in_features]))
        try:
            rows = self.table(tokens)
        except IndexError:  # on a CPU, where the values can be read
            wrong = int(tokens.min() if tokens.min() < 0 else tokens.max())
            raise ValueError(
                f"tokens must be 0 .. {self.vocab_size - 1} (value_embeddings - 1), got {wrong}"
            ) from None
        embedded = rows.unflatten(-1, (self.kv_heads, self.head_dim))
        return value + (gate[..., None] * embedded).to(value.dtype)

    def check(self, x: Tensor, tokens: Any) -> None:
        """Check that there is one token for every row of x."""
        shape = list(x.shape[:-1])
        if tokens is None:
            raise ValueError(
                "tokens must be given to a layer with value_embeddings, the integers "
                f"{shape} that its features come from, got None"
            )
        is_tensor = isinstance(tokens, Tensor)
        if not is_tensor or tokens.dtype not in (torch.int32, torch.int64):
            got = tokens.dtype if is_tensor else type(tokens).__name__
            raise ValueError(f"tokens must be an int32 or int64 tensor {shape}, got {got}")
        if list(tokens.shape) != shape:
            raise ValueError(f"tokens must have shape {shape}, got {list(tokens.shape)}")

    def extra_repr(self) -> str:
        return f"{self.vocab_size}, kv_heads={self.kv_heads}, head_dim={self.head_dim}"
