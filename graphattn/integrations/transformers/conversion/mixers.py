"""Modules that `convert` puts into a model: attention by distance, or with fewer projections."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import wrap_torch_function

from graphattn.graphs.arguments import as_float, as_int
from graphattn.integrations.transformers.conversion.families import Family, without_values
from graphattn.integrations.transformers.conversion.replacement import (
    Bandwidth,
    ReplacedCall,
    Replacement,
    device_and_dtype,
    key_heads_of,
)
from graphattn.ops import dot_product_attention, rbf_attention


class ReplacedAttention(Replacement):
    """Weighted averages over the tokens that a token sees; `operation` computes them."""

    # A mode for torch functions, such as graphattn.diagnostics.record, sees every call.
    @wrap_torch_function(lambda self, query, key, value, *_: (query, key, value))
    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, hidden: Tensor, call: ReplacedCall
    ) -> Tensor:
        """Average values [B, Hk, K, D] by queries [B, H, Q, D] and keys: [B, Q, H, D]."""
        seen = self.seen(call, hidden, key.shape[2])
        keys = slice(seen.keys.start, seen.keys.stop)
        q, k, v = (x.transpose(1, 2) for x in (query, key[:, :, keys], value[:, :, keys]))
        q, k = q.to(v.dtype), k.to(v.dtype)  # with autocast, dtypes can differ
        if seen.packed:
            q, k, v = (x.reshape(1, -1, *x.shape[2:]) for x in (q, k, v))
        valid = None if seen.valid is None else (None, seen.valid)
        dropout = self.dropout_of_weights if self.training else 0.0
        out = self.operation(q, k, v, seen.graph, valid=valid, dropout=dropout)
        return out.reshape(*hidden.shape[:2], self.heads, -1)

    def operation(self, query: Tensor, key: Tensor, value: Tensor, graph: Any, **kw: Any) -> Tensor:
        """Call the operation of this library."""
        raise NotImplementedError

    def slices(self, hidden: Tensor) -> Tensor:
        """Return the slices of the hidden states for each head, [B, H, Q, D]."""
        return hidden.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def keep(self, replaced: nn.Module, *names: str) -> None:
        """Copy references to projections, and to norms of queries and keys if there are any."""
        for name in (*names, *(("q_norm", "k_norm") if self.family.norms else ())):
            if hasattr(replaced, name):
                setattr(self, name, getattr(replaced, name))

    def projected(self, hidden: Tensor, parts: int) -> tuple[Tensor, ...]:
        """Compute queries, keys and (for 3 parts) values as the model does: [B, Hx, Q, D]."""
        family, D = self.family, self.head_dim
        if family.fused is None:
            names = (family.query, family.key, family.value)[:parts]
            made = [getattr(self, name)(hidden) for name in names]
            if family.norms == "full":
                made[0] = self.normed("q_norm", made[0]).to(hidden.dtype)
                made[1] = self.normed("k_norm", made[1]).to(hidden.dtype)
            heads = [x.unflatten(-1, (-1, D)) for x in made]
        else:
            all_of_them = getattr(self, family.query)(hidden)
            layout = (parts, -1, D) if family.fused == "thirds" else (-1, parts, D)
            where = -3 if family.fused == "thirds" else -2
            heads = list(all_of_them.unflatten(-1, layout).unbind(where))
        if family.norms == "head":
            heads[0] = self.normed("q_norm", heads[0])
            heads[1] = self.normed("k_norm", heads[1])
        query, key, *value = (x.transpose(1, 2) for x in heads)
        return query, key, *value

    def normed(self, name: str, x: Tensor) -> Tensor:
        norm = getattr(self, name, None)
        return x if norm is None else norm(x)


class ReplacedByGaussianKernel(ReplacedAttention):
    """Gaussian kernel attention: queries, keys and values are slices of the hidden states."""

    mixer = "gka"

    def __init__(
        self,
        replaced: nn.Module,
        family: Family,
        *,
        window: int | None = None,
        init_sigma: float | None = None,
        normalize: bool = False,
        eps: float = 0.0,
        rope: bool | None = None,
    ) -> None:
        super().__init__(replaced, family, window=window)
        sigma = self.head_dim**0.5
        if init_sigma is not None:
            sigma = as_float("init_sigma", init_sigma, positive=True)
        self.normalize = bool(normalize)
        self.eps = as_float("eps", eps, positive=False)
        self.choose_rotation(rope)
        self.bandwidth = Bandwidth(self.heads, sigma, *device_and_dtype(replaced))

    def mix(self, hidden: Tensor, call: ReplacedCall) -> Tensor:
        (features,) = self.rotate(call, self.slices(hidden))
        features = features.to(hidden.dtype)
        if self.normalize:
            features = functional.rms_norm(features, features.shape[-1:])
        if call.cache is None:
            key = value = features
        else:
            key, value = self.remember(call, features, features)
        return self.attend(features, key, value, hidden, call)

    def operation(self, query: Tensor, key: Tensor, value: Tensor, graph: Any, **kw: Any) -> Tensor:
        sigma = self.bandwidth(query)
        return rbf_attention(query, key, value, graph, sigma, eps=self.eps, **kw)


class ValueLess(ReplacedAttention):
    """Softmax attention whose values are slices of the hidden states."""

    mixer = "vlt"

    def __init__(
        self,
        replaced: nn.Module,
        family: Family,
        *,
        window: int | None = None,
        top_k: int | None = None,
    ) -> None:
        super().__init__(replaced, family, window=window)
        self.top_k = None if top_k is None else as_int("top_k", top_k, 1)
        self.softcap = getattr(replaced, "attn_logit_softcapping", None)
        if family.fused is None:
            self.keep(replaced, family.query, family.key)
        else:
            fused = without_values(getattr(replaced, family.query), family, self.head_dim)
            setattr(self, family.query, fused)

    def mix(self, hidden: Tensor, call: ReplacedCall) -> Tensor:
        query, key = self.projected(hidden, 2)
        query, key = self.rotate(call, query, key)
        value = self.slices(hidden)
        key, value = self.remember(call, key.to(hidden.dtype), value)
        return self.attend(query, key, value, hidden, call)

    def operation(self, query: Tensor, key: Tensor, value: Tensor, graph: Any, **kw: Any) -> Tensor:
        return dot_product_attention(
            query, key, value, graph, scale=self.scale, softcap=self.softcap, top_k=self.top_k, **kw
        )


class Krause(ReplacedAttention):
    """Krause attention: the model's own projections, weights by distance, only the nearest."""

    mixer = "krause"

    def __init__(
        self,
        replaced: nn.Module,
        family: Family,
        *,
        window: int | None = None,
        top_k: int | None = None,
        init_sigma: float | None = None,
        sigma_per_head: bool = True,
    ) -> None:
        super().__init__(replaced, family, window=window)
        self.top_k = None if top_k is None else as_int("top_k", top_k, 1)
        sigma = self.scale**-0.5  # logits then differ from the model's only by squared lengths
        if init_sigma is not None:
            sigma = as_float("init_sigma", init_sigma, positive=True)
        self.keep(replaced, *family.projections)
        count = self.heads if sigma_per_head else 1
        self.bandwidth = Bandwidth(count, sigma, *device_and_dtype(replaced))
        self.key_heads = key_heads_of(replaced, family)

    def mix(self, hidden: Tensor, call: ReplacedCall) -> Tensor:
        query, key, value = self.projected(hidden, 3)
        query, key = self.rotate(call, query, key)
        key, value = self.remember(call, key.to(value.dtype), value)
        return self.attend(query, key, value, hidden, call)

    def operation(self, query: Tensor, key: Tensor, value: Tensor, graph: Any, **kw: Any) -> Tensor:
        sigma = self.bandwidth(query)
        return rbf_attention(query, key, value, graph, sigma, top_k=self.top_k, **kw)
