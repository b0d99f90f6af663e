"""Encoders and causal models with every mixer, beside the same models on torch's attention.

The models are :class:`graphattn.models.SequenceEncoder` and :class:`graphattn.models.CausalLM`. A
peer is such a model, too, with the same weights; but its mixers are plain PyTorch: one projection
to queries, keys and values, rotary positions, and SDPA over all tokens or FlexAttention over the
window. On a GPU the blocks of all models are compiled; equal blocks are compiled once.

A step of generation reads one token after many. There the peer is
:class:`~graphattn.bench.models.generation.PlainLanguageModel`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import graphattn as ga
from graphattn.bench.cases.inputs import MissingError
from graphattn.bench.contenders.peers import compile_once
from graphattn.bench.models.generation import PlainLanguageModel, rotations
from graphattn.bench.models.mixers import FusedCausalAttention, errors_between
from graphattn.bench.models.training import ModelInTraining, TrainingRun, in_training
from graphattn.bench.reporting.record import OURS

VOCABULARY = 1000
CHECKED = 1536  # tokens of a causal model that are read in float64
REACH = 2  # tokens on each side (before, in a causal model) that consensus sees
FLEX, SDPA, SDPA_WINDOW = "FlexAttention", "SDPA", "SDPA, window"
# cuDNN is the fastest on an H200 (docs/benchmarks.md); the others take what it cannot run.
FUSED = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION,
         SDPBackend.MATH]  # fmt: skip
Kind = Literal["encoder", "causal"]


class Form(NamedTuple):
    """The mixer of a model, and whether torch's attention computes it."""

    mixer: str
    by_torch: bool = False


OURS_BY_MIXER = {
    "dot-window": OURS,
    **{mixer: f"{OURS}, {mixer}" for mixer in ("dot", "gka", "krause", "linear", "consensus")},
}
FORMS = {
    **{name: Form(mixer) for mixer, name in OURS_BY_MIXER.items()},
    FLEX: Form("dot-window", by_torch=True),
    SDPA_WINDOW: Form("dot-window", by_torch=True),
    SDPA: Form("dot", by_torch=True),
}


@dataclass
class WholeInputs:
    """Tokens and labels [B, N], and models by the name of their contender, made when needed."""

    kind: Kind
    size: dict[str, int]
    tokens: Tensor
    labels: Tensor
    dtype: torch.dtype
    made: dict[str, Any] = field(default_factory=dict)
    graphs: dict[str, Any] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        return self.tokens.device

    def training(self, name: str) -> ModelInTraining:
        """Return the model of a contender and its optimizer."""
        if name not in self.made:
            form, model = FORMS[name], self.model(name)
            if form.by_torch:
                put_torch_attention(model, form.mixer, self)
            if self.device.type == "cuda":
                compile_blocks(model)
            self.made[name] = in_training(model, self.device, self.dtype)
            self.graphs[name] = model.graphs(self.tokens.shape[1])
            for graph in self.graphs[name]:
                # Compiled blocks ask whether the graph has listed them: the first would be
                # compiled twice, before and after.
                _ = graph.positions
        trained: ModelInTraining = self.made[name]
        return trained

    def model(self, name: str) -> Any:
        """Make graphattn's model with the mixer of a contender; the weights are always the same."""
        mixer: Any = FORMS[name].mixer
        size = self.size
        width = size["window"] if mixer in ("dot-window", "gka", "krause") else None
        of_mixer: dict[str, dict[str, Any]] = {
            "gka": {"normalize": True},
            "krause": {"init_sigma": 2.5, "top_k": size["top_k"]},
            "consensus": {"edge_hidden": size["edge_hidden"]},
        }
        options = of_mixer.get(mixer)
        shape = VOCABULARY, size["dim"], size["depth"], size["heads"]
        with torch.random.fork_rng(devices=[]), self.device:
            torch.manual_seed(0)
            made: Any
            if self.kind == "causal":
                made = ga.models.CausalLM(
                    *shape, mixer=mixer, window=width, consensus_window=REACH,
                    mixer_options=options,
                )  # fmt: skip
            else:
                each_side = REACH if mixer == "consensus" else size["window"] // 2
                made = ga.models.SequenceEncoder(
                    *shape, mixer=mixer, window=each_side, mixer_options=options
                )
            nn.init.normal_(made.embedding.weight)  # so that tokens differ
        return made.to(self.dtype)


def whole_inputs(kind: Kind) -> Callable[[dict[str, int], torch.device, torch.dtype], WholeInputs]:
    """Draw random tokens and labels for models of that kind."""

    def make(size: dict[str, int], device: torch.device, dtype: torch.dtype) -> WholeInputs:
        return WholeInputs(kind, size, *random_tokens(size, device), dtype)

    return make


def random_tokens(size: dict[str, int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Draw tokens and labels, [B, N] each."""
    generator = torch.Generator().manual_seed(0)
    shape = 2, size["batch"], size["tokens"]
    tokens, labels = torch.randint(VOCABULARY, shape, generator=generator).to(device)
    return tokens, labels


def compile_blocks(model: Any) -> None:
    """Compile every block; those of one model, which are equal, share what is compiled."""
    # All models run the same lines of code, of which torch keeps only eight variants if not told.
    config: Any = torch._dynamo.config
    config.recompile_limit = 64
    for block in model.blocks:
        block.compile(dynamic=False, fullgraph=True)


# The peers.


def put_torch_attention(model: Any, mixer: str, x: WholeInputs) -> None:
    """Replace the mixers of a model by torch's attention with the same weights."""
    N = x.tokens.shape[1]
    is_causal = x.kind == "causal"
    if mixer == "dot":

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)

    else:
        mask = window_mask(N, x.size["window"], is_causal=is_causal, device=x.device)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            from torch.nn.attention.flex_attention import flex_attention

            out: Tensor = flex_attention(q, k, v, block_mask=mask)
            return out

    layer = model.blocks[0].mixer
    like = model.embedding.weight
    angles = rotations(N, layer.head_dim, layer.rotary.base, like)
    for block in model.blocks:
        block.mixer = FusedCausalAttention(block.mixer, attend, angles)


def window_mask(N: int, window: int, *, is_causal: bool, device: torch.device) -> Any:
    """Return FlexAttention's mask of the windows of the models."""
    refuse_flex(device)
    from torch.nn.attention.flex_attention import create_block_mask

    def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j <= i) & (j > i - window)

    def both_sides(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i - j).abs() <= window // 2

    create = compile_once(create_block_mask) if device.type == "cuda" else create_block_mask
    return create(causal if is_causal else both_sides, None, None, N, N, device=device)


def refuse_flex(device: torch.device) -> None:
    """Raise a MissingError on a CPU, where FlexAttention has no backward pass."""
    if device.type == "cpu":
        raise MissingError("FlexAttention has no backward pass on a CPU")


@dataclass(frozen=True)
class ModelRun(TrainingRun):
    """A contender that is one of the models."""

    name: str

    def __call__(self, x: WholeInputs) -> Tensor:
        features = self.features(x)
        logits: Tensor = x.training(self.name).model.head(features)
        return logits

    def features(self, x: WholeInputs) -> Tensor:
        model = self.training(x).model
        with fused(x.device):
            features: Tensor = model.encode(x.tokens, x.graphs[self.name])
        return features

    def training(self, x: WholeInputs) -> ModelInTraining:
        return x.training(self.name)

    def loss(self, x: WholeInputs) -> Tensor:
        return functional.cross_entropy(self(x).flatten(0, 1).float(), x.labels.flatten())


def fused(device: torch.device) -> Any:
    """Let SDPA take the fastest of its backends on a GPU; the only one on a CPU."""
    if device.type == "cpu":
        return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])
    return sdpa_kernel(FUSED, set_priority=True)


class WholeTruth:
    """Features of one token, and the gradients of a loss on them by all weights, in float64.

    In a causal model they depend on the first tokens only.
    """

    def __init__(self, inputs: WholeInputs) -> None:
        self.inputs = inputs
        N = inputs.tokens.shape[1]
        self.read = min(N, CHECKED) if inputs.kind == "causal" else N
        generator = torch.Generator().manual_seed(1)
        self.weights = torch.randn(inputs.size["dim"], generator=generator)
        self.known: dict[str, tuple[Tensor, dict[str, Tensor]]] = {}

    def errors_of(self, run: Any) -> tuple[float, float]:
        """Return the errors of features and of all gradients that both models have by name."""
        x, mixer = self.inputs, FORMS[run.name].mixer
        if mixer not in self.known:
            double = x.model(OURS_BY_MIXER[mixer]).double()
            with ga.use_backend("structured"):
                self.known[mixer] = self.of(double, double.encode(x.tokens[-1:, : self.read]))
        found = self.of(x.training(run.name).model, run.features(x))
        return errors_between(found, self.known[mixer])

    def of(self, model: Any, features: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the features of the token, and the gradients of all weights but the head's."""
        out = features[-1, self.read - 1]
        learned = {n: p for n, p in model.named_parameters() if not n.startswith("head.")}
        loss = (out * self.weights.to(out)).sum()
        gradients = torch.autograd.grad(loss, list(learned.values()))
        return out.detach(), dict(zip(learned, gradients, strict=True))


# Steps of generation.


@dataclass
class StepInputs(WholeInputs):
    """Texts [B, N + 1], of which caches have read N tokens."""

    def stepping(self, name: str) -> tuple[Callable[[], Tensor], float]:
        """Return a function that reads the last token, and the bytes of its cache.

        Every call reads the same token: caches are as before.
        """
        if name not in self.made:
            with torch.no_grad():
                self.made[name] = self._filled(FORMS[name])
        made: tuple[Callable[[], Tensor], float] = self.made[name]
        return made

    def _filled(self, form: Form) -> tuple[Callable[[], Tensor], float]:
        model = self.model(OURS_BY_MIXER[form.mixer]).eval()
        N = self.tokens.shape[1] - 1
        if form.by_torch:
            plain = PlainLanguageModel(model, compiled=self.device.type == "cuda")
            read, held = plain.reader(self.tokens)
            read(slice(0, N))
            return lambda: read(slice(N, N + 1)), held
        cache = model.init_cache(len(self.tokens), rollback=1)
        model.encode_step(self.tokens[:, :N], cache)

        def step() -> Tensor:
            logits: Tensor = model.step(self.tokens[:, N], cache)
            cache.truncate(N)
            return logits

        step()  # caches get room for one more token
        return step, float(cache.num_bytes)


def step_inputs(size: dict[str, int], device: torch.device, dtype: torch.dtype) -> StepInputs:
    """Draw random texts of one token more than `size` says."""
    longer = {**size, "tokens": size["tokens"] + 1}
    return StepInputs("causal", size, *random_tokens(longer, device), dtype)


@dataclass(frozen=True)
class StepRun:
    """A contender that reads one more token, and returns its logits [B, V]."""

    name: str

    def __call__(self, x: StepInputs) -> Tensor:
        with fused(x.device):
            return x.stepping(self.name)[0]()

    def held(self, x: StepInputs) -> float:
        """Return the bytes of the caches."""
        return x.stepping(self.name)[1]


class StepTruth:
    """Logits of the last text's last token by a pass over all tokens, in float64."""

    def __init__(self, inputs: StepInputs) -> None:
        self.inputs = inputs
        self.known: dict[str, Tensor] = {}

    def errors_of(self, run: Any) -> tuple[float, float]:
        x, mixer = self.inputs, FORMS[run.name].mixer
        with torch.no_grad():
            if mixer not in self.known:
                model = x.model(OURS_BY_MIXER[mixer]).double()
                with ga.use_backend("structured"):
                    self.known[mixer] = model.head(model.encode(x.tokens[-1:])[0, -1])
            truth = self.known[mixer]
            return float((run(x)[-1].double() - truth).norm() / truth.norm()), 0.0
