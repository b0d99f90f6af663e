"""Whole models of ours, one mixer each: the time of a block, and the share of its operations.

A model's operations are what lies between its projections: the averages of an attention layer (its
`mix`), the step of a consensus layer (its `move`). All else is projections, rotations, norms,
perceptrons and the embedding. Both parts are timed by themselves. Operations run again on what they
read in one pass of the model, with the gradients that came back to them there; all else is the
model as it is, whose operations hand on what they gave in that pass, and in the backward pass the
gradients that they gave. What the two take together should be what the model takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

import graphattn as ga
from graphattn.bench.reporting.record import OURS

VOCABULARY = 256
CHECKED = 1536  # tokens: more than six layers with windows of 256 look back
DOT, PEER = "dot", "SDPA"
# What a model of each mixer is made with; windows are counted as CausalLM counts them. Consensus is
# that of the text models of Stabilizing Transformer Training Through Consensus (Table 10).
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


class FusedCausalAttention(nn.Module):
    """The peer as a mixer: one projection to rotated queries, keys and values, causal SDPA."""

    def __init__(self, layer: ga.nn.DotProductAttention) -> None:
        super().__init__()
        self.dim, self.heads, self.output_proj = layer.dim, layer.heads, layer.output_proj
        parts = layer.query_proj, layer.key_proj, layer.value_proj
        self.qkv = nn.Linear(self.dim, 3 * self.dim)
        with torch.no_grad():
            self.qkv.weight.copy_(torch.cat([part.weight for part in parts if part is not None]))
            self.qkv.bias.copy_(torch.cat([part.bias for part in parts if part is not None]))
        assert layer.rotary is not None
        self.base = layer.rotary.base

    def forward(self, x: Tensor, graph: Any, *, valid: Any = None, positions: Any = None) -> Tensor:
        """[1, N, dim] -> [1, N, dim]; the graph is not read."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        half = torch.arange(0, 1, 2 / q.shape[-1], dtype=torch.float64, device=x.device)
        places = torch.arange(x.shape[1], dtype=torch.float64, device=x.device)
        angles = places[:, None] * self.base**-half
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)

        def turned(t: Tensor) -> Tensor:
            first, second = t.chunk(2, -1)
            return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

        out = functional.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True)
        projected: Tensor = self.output_proj(out.transpose(1, 2).flatten(2))
        return projected


@dataclass(frozen=True)
class Operation:
    """Record of one block's operation: its arguments, results and gradients in one pass."""

    call: Callable[..., Tensor]
    args: tuple[Any, ...]
    options: dict[str, Any]
    out: Tensor
    gradient: Tensor
    gradients: list[Tensor | None]  # of the tensors among its arguments

    def __call__(self) -> Tensor:
        """Run the operation again."""
        return self.call(*self.args, **self.options)


@dataclass
class MixerInputs:
    """Tokens [1, N], models by name, and the gradient [1, N, dim] of a loss by their features."""

    tokens: Tensor
    models: dict[str, Any]
    gradient: Tensor
    reach: int  # how many tokens on both sides consensus looks at; attention sees earlier ones
    _operations: list[Operation] = field(default_factory=list)

    def operations(self) -> list[Operation]:
        """Operations of graphattn's model, one per block, from one pass that is made on demand."""
        if not self._operations:
            with torch.enable_grad():
                self._operations = captured(self)
        return self._operations


def mixer_inputs(mixer: str) -> Callable[[dict[str, int], torch.device, torch.dtype], MixerInputs]:
    """Random tokens and weights, and with dot products over all tokens the peer's model, too."""

    def make(size: dict[str, int], device: torch.device, dtype: torch.dtype) -> MixerInputs:
        own = {**MIXERS[mixer]}
        kind: Any = ga.models.CausalLM
        reach = 0
        if own.pop("window", False):
            own["window"] = size["window"]
        if mixer == "krause":
            own["mixer_options"] = {**own["mixer_options"], "top_k": size["top_k"]}
        if mixer == "consensus":
            kind, reach = ga.models.SequenceEncoder, size["window"]
            own.update(window=reach, edge_hidden=size["edge_hidden"])
        dim, heads = size["dim"], size["heads"]
        with torch.random.fork_rng(devices=[]), device:
            torch.manual_seed(0)
            models = {OURS: kind(VOCABULARY, dim, size["blocks"], heads, **own)}
            nn.init.normal_(models[OURS].embedding.weight)  # tokens that differ from the start
            if mixer == DOT:
                layers = [FusedCausalAttention(block.mixer) for block in models[OURS].blocks]
                models[PEER] = kind(VOCABULARY, dim, size["blocks"], heads, mixer=layers)
                theirs = {
                    name: weight
                    for name, weight in models[OURS].state_dict().items()
                    if ".mixer." not in name
                }
                models[PEER].load_state_dict(theirs, strict=False)
        for model in models.values():
            model.to(dtype)
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(VOCABULARY, (1, size["tokens"]), generator=generator)
        gradient = torch.randn(1, size["tokens"], dim, generator=generator)
        return MixerInputs(tokens.to(device), models, gradient.to(device, dtype), reach)

    return make


# What is timed. A run gives one tensor, from which the backward pass starts with ones.


@dataclass(frozen=True)
class WholeRun:
    """A whole model, from tokens to the features before its head."""

    model: str = OURS
    backend: str = "auto"

    def __call__(self, x: MixerInputs) -> Tensor:
        """The features times their gradient."""
        return self.features(x) * x.gradient

    def features(self, x: MixerInputs) -> Tensor:
        """[1, N, dim]."""
        with ga.use_backend(self.backend):
            features: Tensor = x.models[self.model].encode(x.tokens)
        return features


@dataclass(frozen=True)
class OperationsRun:
    """The operations of all blocks and nothing else."""

    backend: str = "auto"

    def __call__(self, x: MixerInputs) -> Tensor:
        """An empty result, from which every operation gets the gradient that it got before."""
        operations = x.operations()
        with ga.use_backend(self.backend):
            outs = [operation() for operation in operations]
        return _Joined.apply([operation.gradient for operation in operations], *outs)


@dataclass(frozen=True)
class RestRun:
    """The model without its operations."""

    def __call__(self, x: MixerInputs) -> Tensor:
        """The features times their gradient."""
        operations = iter(x.operations())

        def call(own: Callable[..., Tensor], *args: Any, **options: Any) -> Tensor:
            operation = next(operations)
            given = _tensors((args, options))
            return _HandedOn.apply(operation.out, operation.gradients, *given)

        with operations_by(x.models[OURS], call):
            return WholeRun()(x)


class _Joined(torch.autograd.Function):
    """A number that depends on tensors, whose gradients are known."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *outs: Tensor) -> Tensor:
        ctx.gradients = gradients
        return outs[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, *ctx.gradients


class _HandedOn(torch.autograd.Function):
    """A result that is there already, and gradients that are."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, gradients: list[Tensor], *given: Tensor) -> Tensor:
        ctx.gradients = gradients
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, None, *ctx.gradients


@contextmanager
def operations_by(model: Any, call: Callable[..., Tensor]) -> Iterator[None]:
    """A model whose blocks run ``call(operation, *args)`` for a while, in place of an operation."""
    layers = [block.mixer for block in model.blocks]
    names = ["move" if hasattr(layer, "move") else "mix" for layer in layers]

    def through(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *args, **options: call(own, *args, **options)

    for layer, name in zip(layers, names, strict=True):
        setattr(layer, name, through(getattr(layer, name)))
    try:
        yield
    finally:
        for layer, name in zip(layers, names, strict=True):
            delattr(layer, name)


def captured(x: MixerInputs) -> list[Operation]:
    """Capture the inputs and outputs of the operations of graphattn's model in one pass."""
    calls: list[tuple[Callable[..., Tensor], Any, list[Tensor], Tensor]] = []

    def call(own: Callable[..., Tensor], *args: Any, **options: Any) -> Tensor:
        out = own(*args, **options)
        out.retain_grad()
        calls.append((own, *_detached((args, options)), out))
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
    found = iter(torch.autograd.grad(call(*given[0], **given[1]), learned, gradient))
    gradients = [next(found) if t.requires_grad else None for t in tensors]
    return Operation(call, *given, out.detach(), gradient, gradients)


def _tensors(given: Any) -> list[Tensor]:
    """All tensors among arguments, each once: operations make use of a key that is the query."""
    found = (t for t in pytree.tree_leaves(given) if isinstance(t, Tensor))
    return list({id(t): t for t in found}.values())


def _detached(given: Any) -> tuple[Any, list[Tensor]]:
    """Detach arguments from their history, and list the tensors among them."""
    own = {id(t): t.detach().requires_grad_(t.requires_grad) for t in _tensors(given)}
    return pytree.tree_map(lambda t: own.get(id(t), t), given), list(own.values())


class MixerTruth:
    """Features of one token, and the gradients of a loss on them by all weights, in float64.

    The token is one that stands where it looks at no more than the first 1,536 tokens, which are
    computed by the structured backend (the readable one would need gigabytes).
    """

    def __init__(self, inputs: MixerInputs) -> None:
        import copy

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
        """The features, and gradients by the weights that all models have under the same name."""
        out = run.features(x)[0, self.row]
        model = x.models[run.model]
        learned = {n: p for n, p in model.named_parameters() if not n.startswith("head.")}
        loss = (out * x.gradient[0, self.row]).sum()
        gradients = torch.autograd.grad(loss, list(learned.values()))
        return out.detach(), dict(zip(learned, gradients, strict=True))

    def errors_of(self, run: Any) -> tuple[float, float]:
        """Relative: of the features, and of all gradients together."""
        out, gradients = self.of(run, self.inputs)
        names = [name for name in self.gradients if name in gradients]
        pairs = [(gradients[name].double(), self.gradients[name]) for name in names]
        wrong = sum(float((a - b).square().sum()) for a, b in pairs) ** 0.5
        scale = sum(float(b.square().sum()) for _, b in pairs) ** 0.5
        return float((out.double() - self.out).norm() / self.out.norm()), wrong / scale
