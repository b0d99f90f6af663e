"""Whole models of graphattn, one per mixer: the time of a block, and the share of its operations.

The operation of a block lies between its projections: the average of an attention layer (the method
`mix`) or the step of a consensus layer (the method `move`). The rest of the model consists
of projections, rotations, norms, perceptrons and the embedding.

Operations and rest are timed separately. One pass of the model records the inputs, the outputs and
the gradients of every operation. To time the operations, they run again on the recorded inputs and
gradients. To time the rest, the model runs with operations that return the recorded outputs, and in
the backward pass the recorded gradients. Both times together should be the time of the model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

import graphattn as ga
from graphattn.bench.models.generation import fused_projection, rotated, rotations
from graphattn.bench.reporting.record import OURS

VOCABULARY = 256
CHECKED = 1536  # tokens: more than six layers with windows of 256 see
DOT, PEER = "dot", "SDPA"
# The constructor arguments of the model of each mixer. `window` has the meaning that it has in
# CausalLM. The consensus layer is that of the text models of "Stabilizing Transformer Training
# Through Consensus" (Table 10).
MIXERS: dict[str, dict[str, Any]] = {
    DOT: {"mixer": "dot"},
    "dot-window": {"mixer": "dot-window", "window": True},
    "grouped": {"mixer": "dot", "window": True, "mixer_options": {"kv_heads": 2}},
    "vlt": {"mixer": "vlt", "window": True},
    "linear": {"mixer": "linear"},
    "gka": {"mixer": "gka", "window": True, "mixer_options": {"normalize": True}},
    "krause": {"mixer": "krause", "window": True, "mixer_options": {"init_sigma": 2.5}},
    "consensus": {"mixer": "consensus"},
}


def causal_sdpa(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend to all earlier tokens, [B, H, N, D]."""
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True)


class FusedCausalAttention(nn.Module):
    """The peer as a mixer: one projection to queries, keys and values, rotations, causal SDPA.

    Args:
        layer: layer of dot products whose weights are used.
        attend: takes queries, keys and values [B, H, N, D], if not causal SDPA.
        angles: cos and sin of the rotations, which are otherwise computed in every call.
    """

    def __init__(
        self,
        layer: ga.nn.DotProductAttention,
        attend: Callable[[Tensor, Tensor, Tensor], Tensor] = causal_sdpa,
        angles: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.attend, self.angles = attend, angles
        self.dim, self.heads, self.output_proj = layer.dim, layer.heads, layer.output_proj
        self.qkv = fused_projection(layer)
        assert layer.rotary is not None
        self.base = layer.rotary.base

    def forward(self, x: Tensor, graph: Any, *, valid: Any = None, positions: Any = None) -> Tensor:
        """Mix tokens, [1, N, dim] -> [1, N, dim]; the graph is not used."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        angles = self.angles or rotations(x.shape[1], q.shape[-1], self.base, x)
        q, k = (rotated(t, *angles) for t in (q, k))
        out = self.attend(q, k, v)
        projected: Tensor = self.output_proj(out.transpose(1, 2).flatten(2))
        return projected


@dataclass(frozen=True)
class Operation:
    """The operation of one block, with its arguments, result and gradients in one pass."""

    call: Callable[..., Tensor]
    args: tuple[Any, ...]
    options: dict[str, Any]
    out: Tensor
    gradient: Tensor
    gradients: list[Tensor | None]  # of the tensors among its arguments

    def __call__(self) -> Tensor:
        return self.call(*self.args, **self.options)


@dataclass
class MixerInputs:
    """Tokens [1, N], models by name, and the gradient [1, N, dim] of a loss by the features."""

    tokens: Tensor
    models: dict[str, Any]
    gradient: Tensor
    reach: int  # tokens that consensus sees on each side; 0 for attention, which is causal
    _operations: list[Operation] = field(default_factory=list)

    def operations(self) -> list[Operation]:
        """Return the operations of graphattn's model, recorded in one pass at the first call."""
        if not self._operations:
            with torch.enable_grad():
                self._operations = captured(self)
        return self._operations


def mixer_inputs(mixer: str) -> Callable[[dict[str, int], torch.device, torch.dtype], MixerInputs]:
    """Make random tokens, the model of a mixer, and for dot products the model of the peer."""

    def make(size: dict[str, int], device: torch.device, dtype: torch.dtype) -> MixerInputs:
        options = {**MIXERS[mixer]}
        kind: Any = ga.models.CausalLM
        reach = 0
        if options.pop("window", False):
            options["window"] = size["window"]
        if mixer == "krause":
            options["mixer_options"] = {**options["mixer_options"], "top_k": size["top_k"]}
        if mixer == "consensus":
            kind, reach = ga.models.SequenceEncoder, size["window"]
            options.update(window=reach, edge_hidden=size["edge_hidden"])
        dim, heads = size["dim"], size["heads"]
        with torch.random.fork_rng(devices=[]), device:
            torch.manual_seed(0)
            models = {OURS: kind(VOCABULARY, dim, size["blocks"], heads, **options)}
            nn.init.normal_(models[OURS].embedding.weight)  # so that tokens differ
            if mixer == DOT:
                layers = [FusedCausalAttention(block.mixer) for block in models[OURS].blocks]
                models[PEER] = kind(VOCABULARY, dim, size["blocks"], heads, mixer=layers)
                weights = models[OURS].state_dict()
                shared = {name: w for name, w in weights.items() if ".mixer." not in name}
                models[PEER].load_state_dict(shared, strict=False)
        for model in models.values():
            model.to(dtype)
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(VOCABULARY, (1, size["tokens"]), generator=generator)
        gradient = torch.randn(1, size["tokens"], dim, generator=generator)
        return MixerInputs(tokens.to(device), models, gradient.to(device, dtype), reach)

    return make


# Runs. Each returns one tensor, and the backward pass starts there from a gradient of ones.


@dataclass(frozen=True)
class WholeRun:
    """A whole model, from tokens to the features before its head."""

    model: str = OURS
    backend: str = "auto"

    def __call__(self, x: MixerInputs) -> Tensor:
        return self.features(x) * x.gradient

    def features(self, x: MixerInputs) -> Tensor:
        with ga.use_backend(self.backend):
            features: Tensor = x.models[self.model].encode(x.tokens)
        return features


@dataclass(frozen=True)
class OperationsRun:
    """The operations of all blocks, without the rest of the model."""

    backend: str = "auto"

    def __call__(self, x: MixerInputs) -> Tensor:
        """Return a zero; backward from it, every operation gets its recorded gradient."""
        operations = x.operations()
        with ga.use_backend(self.backend):
            outs = [operation() for operation in operations]
        return _Joined.apply([operation.gradient for operation in operations], *outs)


@dataclass(frozen=True)
class RestRun:
    """The model without its operations."""

    def __call__(self, x: MixerInputs) -> Tensor:
        operations = iter(x.operations())

        def call(_: Callable[..., Tensor], *args: Any, **options: Any) -> Tensor:
            operation = next(operations)
            return _HandedOn.apply(operation.out, operation.gradients, *_tensors((args, options)))

        with operations_by(x.models[OURS], call):
            return WholeRun()(x)


class _Joined(torch.autograd.Function):
    """A zero whose backward pass gives each tensor a gradient that is already known."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *outs: Tensor) -> Tensor:
        ctx.gradients = gradients
        return outs[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, *ctx.gradients


class _HandedOn(torch.autograd.Function):
    """A result and gradients that are already known, in place of an operation."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, gradients: list[Tensor], *given: Tensor) -> Tensor:
        ctx.gradients = gradients
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, None, *ctx.gradients


@contextmanager
def operations_by(model: Any, call: Callable[..., Tensor]) -> Iterator[None]:
    """Let a model's blocks run ``call(operation, *args)`` for each operation in this context."""
    layers = [block.mixer for block in model.blocks]
    names = ["move" if hasattr(layer, "move") else "mix" for layer in layers]

    for layer, name in zip(layers, names, strict=True):
        setattr(layer, name, partial(call, getattr(layer, name)))
    try:
        yield
    finally:
        for layer, name in zip(layers, names, strict=True):
            delattr(layer, name)


def captured(x: MixerInputs) -> list[Operation]:
    """Record inputs, outputs and gradients of the operations of graphattn's model in one pass."""
    calls: list[tuple[Callable[..., Tensor], Any, list[Tensor], Tensor]] = []

    def call(operation: Callable[..., Tensor], *args: Any, **options: Any) -> Tensor:
        out = operation(*args, **options)
        out.retain_grad()
        calls.append((operation, *_detached((args, options)), out))
        return out

    model = x.models[OURS]
    with operations_by(model, call):
        WholeRun()(x).sum().backward()
    model.zero_grad(set_to_none=True)
    return [_operation(*call) for call in calls]


def _operation(
    call: Callable[..., Tensor], given: tuple[Any, Any], tensors: list[Tensor], out: Tensor
) -> Operation:
    gradient = out.grad
    assert gradient is not None
    learned = [t for t in tensors if t.requires_grad]
    computed = iter(torch.autograd.grad(call(*given[0], **given[1]), learned, gradient))
    gradients = [next(computed) if t.requires_grad else None for t in tensors]
    return Operation(call, *given, out.detach(), gradient, gradients)


def _tensors(given: Any) -> list[Tensor]:
    """List all tensors among arguments once: query and key may be the same tensor."""
    tensors = (t for t in pytree.tree_leaves(given) if isinstance(t, Tensor))
    return list({id(t): t for t in tensors}.values())


def _detached(given: Any) -> tuple[Any, list[Tensor]]:
    """Detach arguments from their history, and list the tensors among them."""
    copies = {id(t): t.detach().requires_grad_(t.requires_grad) for t in _tensors(given)}
    return pytree.tree_map(lambda t: copies.get(id(t), t), given), list(copies.values())


class MixerTruth:
    """Features of one token, and the gradients of a loss on them by all weights, in float64.

    They depend on the first 1,536 tokens only; the reference backend would need gigabytes for them.
    """

    def __init__(self, inputs: MixerInputs) -> None:
        self.inputs = inputs
        N, x = inputs.tokens.shape[1], inputs
        read = min(N, CHECKED)
        blocks = len(x.models[OURS].blocks)
        self.row = read - 1 if read == N else read - 1 - blocks * x.reach
        double = MixerInputs(
            x.tokens[:, :read],
            {OURS: copy.deepcopy(x.models[OURS]).double()},
            x.gradient[:, :read].double(),
            x.reach,
        )
        self.out, self.gradients = self.of(WholeRun(backend="structured"), double)

    def of(self, run: WholeRun, x: MixerInputs) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the features of the token, and the gradients of all weights but the head's."""
        out = run.features(x)[0, self.row]
        model = x.models[run.model]
        learned = {n: p for n, p in model.named_parameters() if not n.startswith("head.")}
        loss = (out * x.gradient[0, self.row]).sum()
        gradients = torch.autograd.grad(loss, list(learned.values()))
        return out.detach(), dict(zip(learned, gradients, strict=True))

    def errors_of(self, run: Any) -> tuple[float, float]:
        """Return the errors of features and of all gradients that both models have by name."""
        return errors_between(self.of(run, self.inputs), (self.out, self.gradients))


def errors_between(
    found: tuple[Tensor, dict[str, Tensor]], truth: tuple[Tensor, dict[str, Tensor]]
) -> tuple[float, float]:
    """Return the errors of a result, and of those gradients that both have by name."""
    (out, gradients), (true_out, true_gradients) = found, truth
    names = [name for name in true_gradients if name in gradients]
    pairs = [(gradients[name].double(), true_gradients[name]) for name in names]
    wrong = sum(float((a - b).square().sum()) for a, b in pairs) ** 0.5
    scale = sum(float(b.square().sum()) for _, b in pairs) ** 0.5
    return float((out.double() - true_out).norm() / true_out.norm()), wrong / scale
