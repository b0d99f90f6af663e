"""Steps of blocks by compiled code, beside the blocks themselves, and where torch must run."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from threads import same_on_threads
from torch import Tensor, nn

import graphattn as ga
from graphattn.kernels.cpu import library
from graphattn.ops.attention.native import blocks

if library.why_not() is not None:
    pytest.skip(str(library.why_not()), allow_module_level=True)

DTYPES = torch.float32, torch.float64, torch.bfloat16, torch.float16
LAYERS: dict[str, Callable[[int], Any]] = {
    "dot": lambda d: ga.nn.DotProductAttention(d, 4, kv_heads=2, rope=True, softcap=5.0),
    "no values": lambda d: ga.nn.DotProductAttention(d, 2, value_projection=False, bias=False),
    "krause": lambda d: ga.nn.KrauseAttention(d, 4, kv_heads=1, top_k=5, sink=True),
    "gka": lambda d: ga.nn.GaussianKernelAttention(d, 4, rope=True, eps=0.3),
    "qk_norm": lambda d: ga.nn.DotProductAttention(d, 4, kv_heads=2, rope=True, qk_norm=True),
    "nearest": lambda d: ga.nn.GaussianKernelAttention(d, 4, top_k=5, eps=0.3),
    "normalized": lambda d: ga.nn.GaussianKernelAttention(d, 4, normalize=True),
    "consensus": lambda d: ga.nn.SelfConsensus(d, 4, update="target", edge_hidden=8),
    "linear": lambda d: ga.nn.LinearAttention(d, 4),
}
WHOLE = (
    "dot",
    "no values",
    "krause",
    "gka",
    "nearest",
)  # layers whose step is part of the block's call
OPTIONS: dict[str, dict[str, Any]] = {
    "usual": {},
    "rms": {"norm": "rms", "activation": "relu2", "bias": False},
    "plain norms": {"norm_affine": False, "mlp_ratio": 1.3},
}


def block_of(name: str, dtype: torch.dtype = torch.float64, dim: int = 24, **options: Any) -> Any:
    torch.manual_seed(0)
    block = ga.nn.PreNormBlock(LAYERS[name](dim), **options).to(dtype).eval()
    for parameter in block.parameters():
        mean = 1.0 if parameter.dim() == 1 else 0.0
        nn.init.normal_(parameter, mean, 0.3)
    return block


def stream(block: Any, x: Tensor, cache: Any) -> Tensor:
    """Steps of single tokens."""
    return torch.stack([block.step(x[..., t, :], cache) for t in range(x.shape[-2])], dim=-2)


@contextmanager
def taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """How many calls of block steps there are within the block, of whole ones and of halves."""
    library_of_process: Any = blocks._LIBRARY
    run, calls = library_of_process.graphattn_block_step, {"whole": 0, "perceptron": 0}

    class Counted:
        def graphattn_block_step(self, call: bytes, is_double: bool) -> int:
            fields = blocks.BlockStepCall.from_buffer_copy(call)
            calls["whole" if fields.attention else "perceptron"] += 1
            status: int = run(call, is_double)
            return status

    with monkeypatch.context() as patch:
        patch.setattr(blocks, "_LIBRARY", Counted())
        yield calls


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", LAYERS)
def test_steps_give_what_the_block_gives(name, options, dtype, monkeypatch) -> None:
    block = block_of(name, dtype, **OPTIONS[options])
    if name in ("krause", "nearest") and dtype.itemsize == 2:
        block.mixer.top_k = None  # rounding would choose other neighbours
    exact = copy.deepcopy(block).double()
    x = torch.randn(3, 12, 24, dtype=dtype)
    with ga.use_backend("reference"):
        wanted = exact(x.double(), ga.causal_window_graph(12, 5))
    with taken(monkeypatch) as calls:
        found = stream(block, x, block.init_cache(3, window=5))
    assert found.dtype is dtype
    assert not found.requires_grad
    error = {torch.float64: 1e-13, torch.float32: 1e-5}.get(dtype, 0.05)
    assert (found.double() - wanted).abs().max() <= error * wanted.abs().max()
    assert calls["whole"] == (12 if name in WHOLE else 0)
    assert sum(calls.values()) == 12


@pytest.mark.parametrize("dim", [4, 20, 52, 68, 132])
@pytest.mark.parametrize("texts", [1, 2, 3, 5, 7, 16])
def test_any_width_and_number_of_texts(dim, texts) -> None:
    for dtype, error in ((torch.float32, 1e-5), (torch.float64, 1e-13)):
        block = block_of("no values", dtype, dim, mlp_ratio=2.7)
        x = torch.randn(texts, 4, dim, dtype=dtype)
        found = stream(block, x, block.init_cache(texts, None))
        wanted = block(x, ga.causal_graph(4))
        assert (found - wanted).abs().max() <= error * wanted.abs().max()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_text_has_its_bits_beside_any_others(dtype) -> None:
    most = blocks.MOST_ROWS[dtype]
    block = block_of("dot", dtype)
    x = torch.randn(most, 6, 24, dtype=dtype)
    together = stream(block, x, block.init_cache(most, None))
    for texts in (1, 2, 5):
        alone = stream(block, x[:texts], block.init_cache(texts, None))
        assert torch.equal(alone, together[:texts])


def test_bits_do_not_depend_on_threads() -> None:
    block = block_of("krause", torch.float32, dim=512)
    x = torch.randn(2, 3, 512)
    same_on_threads(lambda: [stream(block, x, block.init_cache(2, None))])


def test_nan_and_infinity_of_a_text_stay_in_it() -> None:
    block = block_of("dot", torch.float32)
    x = torch.randn(4, 5, 24)
    wanted = stream(block, x, block.init_cache(4, None))
    x[1, 2, 3], x[2, 3, 0] = torch.nan, torch.inf
    found = stream(block, x, block.init_cache(4, None))
    assert torch.equal(found[[0, 3]], wanted[[0, 3]])
    assert found[1, 2:].isnan().all()
    assert found[2, 3:].isnan().all()


def test_no_texts() -> None:
    block = block_of("dot")
    cache = block.init_cache(0, None)
    assert stream(block, torch.randn(0, 3, 24, dtype=torch.float64), cache).shape == (0, 3, 24)


def test_many_texts_are_left_to_torch(monkeypatch) -> None:
    block = block_of("dot")
    x = torch.randn(17, 3, 24, dtype=torch.float64)
    with taken(monkeypatch) as calls:
        stream(block, x, block.init_cache(17, None))
    assert calls == {"whole": 0, "perceptron": 0}


# Where a module does something else than torch's own, it runs itself.


def hook(module: nn.Module) -> None:
    module.register_forward_hook(lambda _, inputs, output: output + 1)


def pre_hook(module: nn.Module) -> None:
    module.register_forward_pre_hook(lambda _, inputs: (inputs[0].abs(),))


def own_forward(module: Any) -> None:
    forward = module.forward
    module.forward = lambda x: forward(x) + 1


def subclass(module: Any) -> None:
    cls = type(module)
    module.__class__ = type("Own", (cls,), {"forward": lambda self, x: cls.forward(self, x) + 1})


PARTS = (
    "mixer_norm", "mlp_norm", "mlp", "mlp.0", "mlp.1", "mlp.2",
    "mixer.query_proj", "mixer.key_proj", "mixer.value_proj", "mixer.output_proj",
)  # fmt: skip


@pytest.mark.parametrize("change", [hook, pre_hook, own_forward, subclass])
@pytest.mark.parametrize("part", PARTS)
def test_a_changed_module_runs(part, change) -> None:
    block = block_of("dot")
    check_change(block, lambda: change(block.get_submodule(part)), 1e-3)


def check_change(block: Any, change: Callable[[], None], least: float) -> None:
    """Check that steps with a cache that was used before follow a change, which has an effect."""
    x = torch.randn(2, 8, 24, dtype=torch.float64)
    before = block(x, ga.causal_graph(8))
    cache = block.init_cache(2, None)
    stream(block, x[:, :4], cache)
    cache.truncate(0)
    change()
    wanted = block(x, ga.causal_graph(8))
    assert (wanted - before).abs().max() > least
    torch.testing.assert_close(stream(block, x, cache), wanted)


def parametrized(block: Any) -> None:
    class Twice(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 2 * weight

    nn.utils.parametrize.register_parametrization(block.mlp[0], "weight", Twice())


def other_weights(block: Any) -> None:
    block.mixer.query_proj.weight = nn.Parameter(torch.randn(24, 24, dtype=torch.float64))


def transposed_data(block: Any) -> None:
    block.mixer.query_proj.weight.data = block.mixer.query_proj.weight.data.t()


def tensor_for_parameter(block: Any) -> None:
    weight = block.mlp_norm.weight.detach()
    del block.mlp_norm.weight
    block.mlp_norm.weight = 3 * weight


def other_eps(block: Any) -> None:
    block.mlp_norm.eps = 0.7


def other_activation(block: Any) -> None:
    block.mlp[1] = nn.GELU(approximate="tanh")


def longer_perceptron(block: Any) -> None:
    block.mlp.append(nn.Tanh())


def own_dropout(block: Any) -> None:
    block.dropout = nn.Hardtanh()


@pytest.mark.parametrize(
    "change",
    [
        parametrized,
        other_weights,
        transposed_data,
        tensor_for_parameter,
        other_eps,
        other_activation,
        longer_perceptron,
        own_dropout,
    ],
)
def test_a_change_between_two_steps_counts(change) -> None:
    block = block_of("dot")
    check_change(block, lambda: change(block), 1e-5)


def test_what_watches_all_modules_sees_them() -> None:
    block = block_of("dot")
    x = torch.randn(2, 4, 24, dtype=torch.float64)
    cache = block.init_cache(2, None)
    stream(block, x, cache)
    seen: list[str] = []
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, *_: seen.append(type(module).__name__)
    )
    try:
        block.step(x[:, 0], cache)
    finally:
        handle.remove()
    assert seen.count("LayerNorm") == 2
    assert seen.count("Linear") == 6

    class Names(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            names.append(getattr(func, "__name__", ""))
            return func(*args, **(kwargs or {}))

    names: list[str] = []
    with Names():
        block.step(x[:, 0], cache)
    assert names.count("layer_norm") == 2
    assert "gelu" in names


def test_autocast_and_functional_calls_are_left_to_torch(monkeypatch) -> None:
    block = block_of("dot", torch.float32)
    x = torch.randn(2, 4, 24)
    cache = block.init_cache(2, None)
    stream(block, x, cache)
    with taken(monkeypatch) as calls:
        with torch.autocast("cpu", torch.bfloat16):
            block.step(x[:, 0], cache)
        with ga.use_backend("reference"):
            block.step(x[:, 0], cache)
        weights = {name: 2 * p.detach() for name, p in block.named_parameters()}
        cache.truncate(0)
        found = torch.func.functional_call(block, weights, (x, ga.causal_graph(4)))
        assert calls == {"whole": 0, "perceptron": 0}
    assert not torch.allclose(found, block(x, ga.causal_graph(4)))


def test_an_overridden_step_of_the_mixer_runs() -> None:
    class Twice(ga.nn.DotProductAttention):
        def step(self, x: Tensor, cache: Any, **given: Any) -> Tensor:
            return 2 * super().step(x, cache, **given)

    block = ga.nn.PreNormBlock(Twice(24, 4)).double()
    x = torch.randn(2, 4, 24, dtype=torch.float64)
    found = stream(block, x, block.init_cache(2, None))
    mixed = block.mixer(block.mixer_norm(x), ga.causal_graph(4))
    wanted = x + 2 * mixed
    torch.testing.assert_close(found, wanted + block.mlp(block.mlp_norm(wanted)))


# Generation repeats the steps of blocks without their checks.


def model_of(**options: Any) -> Any:
    torch.manual_seed(0)
    model = ga.models.CausalLM(13, 24, 3, 4, **options).double().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    return model


def whole_texts(model: Any, tokens: Tensor, count: int) -> Tensor:
    """Greedy texts, each token by a forward pass over all."""
    for _ in range(count):
        tokens = torch.cat([tokens, model(tokens)[..., -1:, :].argmax(-1)], dim=-1)
    return tokens


MODELS: dict[str, dict[str, Any]] = {
    "dot": {},
    "window": {"window": 5},
    "krause": {"mixer": "krause", "mixer_options": {"top_k": 3}},
    "gka": {"mixer": "gka", "norm": "rms", "activation": "relu2"},
    "qk_norm": {"mixer_options": {"qk_norm": True, "kv_heads": 2}},
    "mix": {"mixer": "mix"},
    "softcap": {"logit_softcap": 2.0, "rope": False, "tie_weights": True},
}


@pytest.mark.parametrize("name", MODELS)
def test_texts_are_those_of_forward(name, monkeypatch) -> None:
    model = model_of(**MODELS[name])
    prompts = torch.randint(13, (2, 7))
    with taken(monkeypatch) as calls:
        texts = model.generate(prompts, 80)
    assert torch.equal(texts, whole_texts(model, prompts, 80))
    assert calls["whole"] == 79 * {"mix": 1, "qk_norm": 0}.get(name, 3)


def test_progress_may_change_the_model() -> None:
    torch.manual_seed(3)
    prompts, weights = torch.randint(13, (2, 7)), torch.randn(24, 96).double()
    kept: list[Tensor] = []  # memory that is freed could get the new weights

    def change(model: Any, step: int) -> None:
        if step == 5:
            kept.append(model.blocks[1].mlp[2].weight)
            model.blocks[1].mlp[2].weight = nn.Parameter(weights)

    model = model_of()
    found = model.generate(prompts, 20, progress=lambda step, _: change(model, step))
    model = model_of()
    cache, wanted = model.init_cache(2), prompts
    with ga.use_backend("reference"):
        logits = model.step(prompts, cache)[:, -1]
        for step in range(1, 21):
            newest = logits.argmax(-1)
            wanted = torch.cat([wanted, newest[:, None]], dim=1)
            change(model, step)
            logits = model.step(newest, cache)
    assert torch.equal(found, wanted)
    assert not torch.equal(found, model_of().generate(prompts, 20))


@pytest.mark.parametrize("whose", ["model", "block", "mixer"])
def test_overridden_steps_run_in_generation(whose) -> None:
    calls = [0]

    def counted(step: Any) -> Any:
        def run(*given: Any, **named: Any) -> Any:
            calls[0] += 1
            return step(*given, **named)

        return run

    model = model_of()
    owner = {"model": model, "block": model.blocks[1], "mixer": model.blocks[1].mixer}[whose]
    name = "encode_step" if whose == "model" else "step"
    setattr(owner, name, counted(getattr(owner, name)))
    model.generate(torch.randint(13, (2, 7)), 20)
    assert calls[0] == 20


def test_drafts_and_samples_agree_with_steps_of_torch() -> None:
    model, draft = model_of(), model_of(mixer="gka")
    prompts = torch.randint(13, (1, 7))
    wanted = whole_texts(model, prompts, 30)
    assert torch.equal(model.generate(prompts, 30, draft=draft), wanted)
    given = {"temperature": 0.8, "top_k": 5}
    sampled = model.generate(prompts, 30, generator=torch.Generator().manual_seed(3), **given)
    with ga.use_backend("reference"):
        again = model.generate(prompts, 30, generator=torch.Generator().manual_seed(3), **given)
    assert torch.equal(sampled, again)
