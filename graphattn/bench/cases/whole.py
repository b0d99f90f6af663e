"""Cases of whole models: training an encoder and a causal model, and steps of generation."""

from __future__ import annotations

from graphattn.bench.cases.case import BenchmarkCase, sizes
from graphattn.bench.cases.least_work import Size
from graphattn.bench.models.whole import (
    FLEX,
    OURS_BY_MIXER,
    SDPA,
    SDPA_WINDOW,
    Kind,
    ModelRun,
    StepRun,
    step_inputs,
    whole_inputs,
)

TOKENS = (4096, 32768)
AT_ONCE = 32768  # tokens of a batch
OF_OURS = tuple(OURS_BY_MIXER.values())


def model_sizes(tokens: int) -> tuple[dict[str, Size], dict[str, Size]]:
    """Sizes on a CPU, and of the models of 768 features and 12 blocks on a GPU."""
    others = {"edge_hidden": (16, 256, 256), "top_k": (12, 192, 192), "window": (16, 256, 256)}
    batch = AT_ONCE // tokens
    on_cpu = sizes(batch=1, tokens=(tokens // 64, tokens // 8, tokens), dim=(48, 768, 768),
                   heads=(4, 12, 12), depth=(2, 12, 12), **others)  # fmt: skip
    on_gpu = sizes(batch=(2, batch, batch), tokens=(tokens // 16, tokens, 2 * tokens),
                   dim=(192, 768, 768), heads=(3, 12, 12), depth=(2, 12, 12), **others)  # fmt: skip
    return on_cpu, on_gpu


def training_case(kind: Kind, tokens: int) -> BenchmarkCase:
    """A pass and a training step of an encoder or a causal model of so many tokens."""
    on_cpu, on_gpu = model_sizes(tokens)
    return BenchmarkCase(
        f"{kind}-{tokens}",
        f"{kind.capitalize()} models: a pass, and a step of training in place of the backward pass",
        on_cpu,
        whole_inputs(kind),
        {name: ModelRun(name) for name in (*OF_OURS, FLEX, SDPA)},
        long_passes=True,
        cuda=on_gpu,
    )


def step_case(tokens: int) -> BenchmarkCase:
    """A token of a causal model, after so many."""
    on_cpu, on_gpu = model_sizes(tokens)
    return BenchmarkCase(
        f"causal-step-{tokens}",
        f"One more token of a causal model, after {tokens:,}",
        on_cpu,
        step_inputs,
        {name: StepRun(name) for name in (*OF_OURS, SDPA_WINDOW, SDPA)},
        backward=False,
        cuda=on_gpu,
    )


KINDS: tuple[Kind, ...] = ("encoder", "causal")
WHOLE = [
    case
    for tokens in TOKENS
    for case in (*(training_case(kind, tokens) for kind in KINDS), step_case(tokens))
]
