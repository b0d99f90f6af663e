"""The layers written out by hand: the tensors of a state_dict around one operation.

Nothing here calls a layer's own code: projections are `functional.linear`, the rotation is a
product of complex numbers, the edge network's first layer is one linear map per head.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import graphattn as ga

DIM, HEADS, HEAD_DIM = 16, 4, 4


@dataclass(frozen=True)
class Case:
    """A layer and its options; `context_width` is None where the layer takes no context."""

    kind: str
    options: dict[str, Any] = field(default_factory=dict)
    context_width: int | None = None

    def __str__(self) -> str:
        cross = "" if self.context_width is None else f"context={self.context_width},"
        return f"{self.kind}({cross}{','.join(f'{k}={v}' for k, v in self.options.items())})"

    def make(self, seed: int = 0, dtype: torch.dtype = torch.float64, **more: Any) -> Any:
        """The layer, every parameter moved away from its initial value."""
        torch.manual_seed(seed)
        layer = getattr(ga.nn, self.kind)(DIM, HEADS, **self.options, **more).to(dtype)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        return layer

    @property
    def is_consensus(self) -> bool:
        return self.kind.endswith("Consensus")

    @property
    def rope_base(self) -> float | None:
        rope = self.options.get("rope", False)
        if rope is False:
            return None
        return rope.base if isinstance(rope, ga.nn.RotaryEmbedding) else 10000.0

    @property
    def is_energy(self) -> bool:
        return self.kind == "SelfConsensus" and self.options.get("update", "energy") == "energy"


BASE_100 = ga.nn.RotaryEmbedding(HEAD_DIM, base=100.0)
# What the code that the authors of the consensus paper published does otherwise than the paper.
PUBLISHED: list[dict[str, Any]] = [
    {"iterations": 3, "step_size": "learned", "rope": "isometric"},
    {"iterations": 2, "step_size": "auto"},
    {"iterations": 2, "rope": True},
    {"learned_step": True, "share_alpha": True, "edge_input": "full"},
    {"learned_beta": False, "trunk": "separate"},
    {
        "iterations": 2,
        "learned_step": True,
        "share_alpha": True,
        "learned_beta": False,
        "edge_input": "full",
        "trunk": "separate",
    },
]


def _cases() -> list[Case]:
    dot = [
        {},
        {"bias": False},
        {"kv_heads": 2},
        {"kv_heads": 1, "top_k": 3},
        {"top_k": 2},
        {"value_projection": False},
        {"value_projection": False, "rope": True, "top_k": 2},
        {"rope": True},
        {"rope": BASE_100, "kv_heads": 2},
        {"sink": True, "kv_heads": 2},
        {"softcap": 0.5, "top_k": 3},
        {"softcap": 0.3, "sink": True, "kv_heads": 1, "rope": True},
        {"qk_norm": True, "kv_heads": 2, "rope": True},
        {"qk_norm": True, "value_projection": False, "top_k": 2},
        {"scaling": "sq_inplace"},
        {"scaling": "sq_inplace", "value_projection": False, "rope": True, "top_k": 2},
    ]
    krause = [
        {},
        {"bias": False},
        {"top_k": 2},
        {"sigma_per_head": False},
        {"kv_heads": 2},
        {"rope": True},
        {"init_sigma": 0.7},
        {"sink": True, "top_k": 2},
        {"top_k": 3, "init_sigma": 0.5, "sigma_per_head": False, "kv_heads": 1, "rope": BASE_100},
    ]
    gaussian = [
        {},
        {"bias": False},
        {"init_sigma": 0.5},
        {"eps": 0.3},
        {"eps": 0.3, "sink": True},
        {"rope": True},
        {"normalize": True},
        {"top_k": 2},
        {"top_k": 2, "eps": 0.3, "normalize": True, "rope": True},
        {"rope": BASE_100, "normalize": True, "eps": 0.01, "init_sigma": 1.5},
    ]
    cases = [Case("DotProductAttention", options) for options in dot]
    cases += [
        Case("DotProductAttention", {}, DIM),
        Case("DotProductAttention", {"context_dim": 10}, 10),
        Case("DotProductAttention", {"context_dim": 10, "kv_heads": 2, "rope": True}, 10),
        Case("DotProductAttention", {"context_dim": 10, "top_k": 2, "bias": False}, 10),
        Case("DotProductAttention", {"value_projection": False, "rope": BASE_100}, DIM),
        Case("DotProductAttention", {"context_dim": 10, "qk_norm": True, "rope": True}, 10),
        Case("DotProductAttention", {"context_dim": 10, "scaling": "sq_inplace"}, 10),
    ]
    cases += [Case("KrauseAttention", options) for options in krause]
    cases += [Case("GaussianKernelAttention", options) for options in gaussian]

    small: dict[str, Any] = {"edge_hidden": 6}
    steps: tuple[Any, ...] = (0.05, "learned", "auto")
    for kind in ("SelfConsensus", "CrossConsensus"):
        context = DIM if kind == "CrossConsensus" else None
        updates: tuple[dict[str, Any], ...] = (
            ({},) if context else ({"update": "energy"}, {"update": "target"})
        )
        for update in updates:
            cases.append(Case(kind, {**small, **update}, context))
            cases.append(Case(kind, {**small, **update, "rank": 1, "bias": False}, context))
            for rope in (False, True, BASE_100, "isometric"):
                for step in steps:
                    if step == "auto" and rope in (True, BASE_100):
                        continue
                    options = {**small, **update, "step_size": step, "rope": rope}
                    cases.append(Case(kind, options, context))
            for edge_input in ("head", "full", "each full"):
                for trunk in ("shared", "separate"):
                    options = {**small, **update, "edge_input": edge_input[-4:], "trunk": trunk}
                    options["rank"] = 2
                    if edge_input == "each full":
                        options["edge_networks"] = "per_head"
                    width = context and (8 if edge_input == "head" else 6)
                    if width:
                        options["context_dim"] = width
                    cases.append(Case(kind, options, width))
            cases += [Case(kind, {**small, **update, **of_code}, context) for of_code in PUBLISHED]
    return cases


CASES = _cases()
ONE_OF_EACH = [
    Case("DotProductAttention"),
    Case("DotProductAttention", {"context_dim": 10}, 10),
    Case("DotProductAttention", {"value_projection": False, "rope": True}),
    Case("KrauseAttention", {"top_k": 2}),
    Case("GaussianKernelAttention", {"rope": True, "normalize": True, "eps": 0.01}),
    Case("SelfConsensus", {"edge_hidden": 6}),
    Case("SelfConsensus", {"edge_hidden": 6, "update": "target", "step_size": "learned"}),
    Case("SelfConsensus", {"edge_hidden": 6, "step_size": "auto", "rope": "isometric"}),
    Case("CrossConsensus", {"edge_hidden": 6, "rope": True}, DIM),
    Case("SelfConsensus", {"edge_hidden": 6, **PUBLISHED[-1]}),
]


def irregular_graph(num_targets: int = 9, num_sources: int = 9, seed: int = 3) -> ga.TokenGraph:
    """Random edges; target 4 sees nobody and (on a square graph) nobody sees token 4."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(num_targets, num_sources, generator=generator) < 0.45
    mask[4] = False
    if num_targets == num_sources:
        mask[:, 4] = False
    return ga.from_mask(mask)


def graph_of(case: Case) -> ga.TokenGraph:
    """A graph that suits the case: square, or 9 targets looking at 6 sources."""
    return irregular_graph() if case.context_width is None else irregular_graph(9, 6)


def tokens_of(
    case: Case,
    graph: ga.TokenGraph,
    batch: tuple[int, ...] = (2,),
    seed: int = 1,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, ...]:
    """(x,) or (x, context), random."""
    generator = torch.Generator().manual_seed(seed)

    def draw(tokens: int, width: int) -> Tensor:
        return torch.randn(*batch, tokens, width, generator=generator, dtype=torch.float64)

    tokens = [draw(graph.num_targets, DIM)]
    if case.context_width is not None:
        tokens.append(draw(graph.num_sources, case.context_width))
    return tuple(t.to(dtype) for t in tokens)


def run(layer: Any, tokens: tuple[Tensor, ...], graph: Any, **keywords: Any) -> Any:
    """``layer(x, graph[, context], ...)``."""
    return layer(tokens[0], graph, *tokens[1:], **keywords)


def rotate(x: Tensor, positions: Tensor, base: float | None, *, back: bool = False) -> Tensor:
    """Feature k and feature k + D/2 of x [*, N, H, D] as one complex number, turned."""
    if base is None:
        return x
    half = x.shape[-1] // 2
    turn = torch.tensor([base ** (-2 * k / x.shape[-1]) for k in range(half)], dtype=torch.float64)
    angle = positions.double()[..., None, None] * turn
    number = torch.complex(x[..., :half].double(), x[..., half:].double())
    number = number * torch.exp(1j * (-angle if back else angle))
    return torch.cat([number.real, number.imag], dim=-1).to(x.dtype)


def linear(state: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return functional.linear(x, state[f"{name}.weight"], state.get(f"{name}.bias"))


def into_heads(x: Tensor, heads: int = HEADS) -> Tensor:
    return x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads)


def grouped_linear(state: dict[str, Tensor], name: str, y: Tensor) -> Tensor:
    """One functional.linear per group, on a slice of y or all: [*, N, dim] -> [*, N, G, xi]."""
    weight, bias = state[f"{name}.weight"], state.get(f"{name}.bias")
    reads_all = y.shape[-1] == weight.shape[-1]
    slices = [y] * len(weight) if reads_all else y.chunk(len(weight), dim=-1)
    parts = [
        functional.linear(part, weight[g], None if bias is None else bias[g])
        for g, part in enumerate(slices)
    ]
    return torch.stack(parts, dim=-2)


def hidden_of(state: dict[str, Tensor], name: str, y: Tensor) -> Tensor:
    """The first layer; that of alpha is also that of a beta which has none and reads nothing."""
    hidden, xi = grouped_linear(state, f"edge_net.{name}", y), state["edge_net.alpha"].shape[-1]
    return torch.cat([hidden[..., :xi], hidden], -1) if hidden.shape[-1] == 2 * xi else hidden


def second_layer(state: dict[str, Tensor]) -> ga.EdgeNetworkParameters:
    names = ga.EdgeNetworkParameters._fields
    given = {name: state.get(f"edge_net.{name}") for name in names}
    alpha, shear = given["alpha"], given["shear"]
    assert alpha is not None
    assert shear is not None
    heads, rank = shear.shape[:2]
    if len(alpha) == 1:
        given["alpha"] = alpha.expand(heads, -1).contiguous()
        given["alpha_bias"] = state["edge_net.alpha_bias"].expand(heads).contiguous()
    if given["beta"] is None:  # the number whose softplus is the rank
        given["beta"] = torch.zeros(heads, alpha.shape[-1], dtype=alpha.dtype)
        given["beta_bias"] = torch.full((heads,), rank, dtype=torch.float64).expm1().log()
        given["beta_bias"] = given["beta_bias"].to(alpha.dtype)
    return ga.EdgeNetworkParameters(**given)


def steps_of(case: Case, state: dict[str, Tensor]) -> list[Any]:
    """The step size of every iteration."""
    count, step = case.options.get("iterations", 1), case.options.get("step_size", 0.1)
    if case.options.get("learned_step"):
        return [eta.reshape(1) for eta in functional.softplus(state["raw_step_size"])]
    return [functional.softplus(state["raw_step_size"]) if step == "learned" else step] * count


def forward_by_hand(
    case: Case,
    state: dict[str, Tensor],
    tokens: tuple[Tensor, ...],
    graph: ga.TokenGraph,
    positions: tuple[Tensor, Tensor] | None = None,
    valid: Any = None,
    edge_features: Tensor | None = None,
) -> Tensor:
    """Compute the layer's correct output from its state_dict, without the layer's own code."""
    if positions is None:
        positions = (graph.positions, graph.source_positions)
    mix = _attention_by_hand
    more: dict[str, Any] = {}
    if case.is_consensus:
        mix = _consensus_by_hand
    if edge_features is not None:
        of_groups = [functional.linear(edge_features, w) for w in state["edge_net.edge.weight"]]
        more["edge_hidden"] = torch.stack(of_groups, dim=-2)
    return mix(case, state, (tokens[0], tokens[-1]), graph, positions, valid=valid, **more)


def _rms_normed(x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + torch.finfo(x.dtype).eps).sqrt()


def _attention_by_hand(
    case: Case,
    state: dict[str, Tensor],
    tokens: tuple[Tensor, Tensor],
    graph: ga.TokenGraph,
    positions: tuple[Tensor, Tensor],
    **masks: Any,
) -> Tensor:
    x, context = tokens
    kv_heads = case.options.get("kv_heads") or HEADS
    if case.kind == "GaussianKernelAttention":
        query = rotate(into_heads(x), positions[0], case.rope_base)
        if case.options.get("normalize"):
            query = _rms_normed(query)
        key = value = query
    else:
        in_place = case.options.get("scaling") == "sq_inplace"
        if in_place:
            x, context = x / HEAD_DIM**0.5, context / HEAD_DIM**0.5
        query = rotate(into_heads(linear(state, "query_proj", x)), positions[0], case.rope_base)
        key = into_heads(linear(state, "key_proj", context), kv_heads)
        key = rotate(key, positions[1], case.rope_base)
        if case.options.get("qk_norm"):
            query, key = _rms_normed(query), _rms_normed(key)
        if case.options.get("value_projection", True):
            context = linear(state, "value_proj", context)
        value = into_heads(context, kv_heads)
    options: dict[str, Any] = {"top_k": case.options.get("top_k"), "sink": state.get("sink")}
    if case.kind == "DotProductAttention":
        options["softcap"] = case.options.get("softcap")
        options["scale"] = 1.0 if in_place else None
        mixed = ga.dot_product_attention(query, key, value, graph, **masks, **options)
    else:
        sigma, options["eps"] = state["log_sigma"].exp(), case.options.get("eps", 0.0)
        mixed = ga.rbf_attention(query, key, value, graph, sigma, **masks, **options)
    return linear(state, "output_proj", mixed.flatten(-2))


def _consensus_by_hand(
    case: Case,
    state: dict[str, Tensor],
    tokens: tuple[Tensor, Tensor],
    graph: ga.TokenGraph,
    positions: tuple[Tensor, Tensor],
    **of_edges: Any,
) -> Tensor:
    x, context = tokens
    cross = case.kind == "CrossConsensus"
    u = into_heads(linear(state, "source_proj", x))
    v = into_heads(linear(state, "context_proj", context)) if cross else u
    isometric = case.options.get("rope") == "isometric"
    hidden = hidden_of(state, "target", x), hidden_of(state, "source", context)
    moves_alone = cross or tokens[1] is not x
    for step in steps_of(case, state):
        turned = (rotate(u, positions[0], case.rope_base), rotate(v, positions[1], case.rope_base))
        u = ga.consensus_update(
            turned[0] if isometric else u,
            turned[1] if isometric else v,
            *hidden,
            second_layer(state),
            graph,
            step,
            update="target" if cross else case.options.get("update", "energy"),
            disagreement=None if isometric else turned,
            **of_edges,
        )
        if isometric:
            u = rotate(u, positions[0], case.rope_base, back=True)
        v = v if moves_alone else u
    return linear(state, "output_proj", u.flatten(-2))
