"""Tools that look into models work on the whole zoo.

They give graphs, certificates, costs, records and spectra.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import zoo
from torch import nn

import graphattn as ga
from graphattn.models.overview import takes_num_tokens


def graphs_of(model: Any, tokens: int) -> list[ga.TokenGraph]:
    """List a model's graphs for a number of tokens; models of images have a number of their own."""
    if isinstance(model, ga.models.ProteinModel):
        return list(model.graphs(structure=zoo.two_helices(tokens)))
    return list(model.graphs(tokens) if takes_num_tokens(model) else model.graphs())


def graphs_that_blocks_get(model: nn.Module, batch: zoo.Batch) -> list[Any]:
    seen: list[Any] = []
    handles = []
    for block in zoo.blocks_of(model):
        names = list(inspect.signature(type(block).forward).parameters)[1:]

        def note(_: nn.Module, args: Any, given: Any, names: list[str] = names) -> None:
            seen.append({**dict(zip(names, args, strict=False)), **given}["graph"])

        handles.append(block.register_forward_pre_hook(note, with_kwargs=True))
    with torch.no_grad():
        zoo.call(model, batch)
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("name", zoo.ZOO)
def test_graphs_are_those_that_blocks_are_called_with(name: str) -> None:
    model = zoo.made(name).eval()
    for tokens in (18, 7) if zoo.ZOO[name].has_lengths else (18,):
        batch = zoo.batch_of(name, 0, tokens=tokens)
        seen = graphs_that_blocks_get(model, batch)
        assert len(seen) == len(zoo.blocks_of(model))
        assert seen == graphs_of(model, tokens)


@pytest.mark.parametrize("name", zoo.ZOO)
def test_operations_are_the_same_on_the_device_meta_and_count_every_matrix(name: str) -> None:
    """Each linear map once per token, at least; twice the examples cost twice as much."""
    model, batch = zoo.made(name).eval(), zoo.batch_of(name, 0)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    count = ga.diagnostics.flops(model, *batch.inputs, **batch.keywords)
    maps: list[int] = []
    handles = [
        part.register_forward_hook(
            lambda part, _, out: maps.append(2 * out.numel() * part.in_features)
        )
        for part in model.modules()
        if isinstance(part, nn.Linear)
    ]
    with torch.no_grad():
        zoo.call(model, batch)
    for handle in handles:
        handle.remove()
    assert count > sum(maps) > 0
    if "structure" in batch.keywords:  # its edges are known once for all examples, and by numbers
        return
    twice = zoo.batch_of(name, 0, examples=8)
    assert ga.diagnostics.flops(model, *twice.inputs, **twice.keywords) == 2 * count
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[key])
    empty = zoo.made(name).eval().to("meta")
    on_meta = batch.on("meta")
    assert ga.diagnostics.flops(empty, *on_meta.inputs, **on_meta.keywords) == count


def layers_of(mixer: nn.Module) -> list[nn.Module]:
    """The layers of a mixer: itself, or its two branches."""
    return [mixer.dot, mixer.krause] if isinstance(mixer, ga.nn.GatedKrauseAttention) else [mixer]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", zoo.ZOO)
def test_records_change_no_bit_of_training_and_hold_every_attention_layer(
    name: str, checkpointing: bool
) -> None:
    """Models train with dropout, and with blocks computed a second time in the backward pass."""
    model, batch = zoo.made(name).train(), zoo.batch_of(name, 1)
    if checkpointing:
        model.gradient_checkpointing_enable()
    consensus = (ga.nn.SelfConsensus, ga.nn.CrossConsensus)
    mixers = [part for b in zoo.blocks_of(model) for part in layers_of(b.mixer)]
    layers = [mixer for mixer in mixers if not isinstance(mixer, consensus)]

    def forward() -> torch.Tensor:
        model.zero_grad()
        torch.manual_seed(3)
        return zoo.loss_of(model, batch)

    def backward(loss: torch.Tensor) -> dict[str, torch.Tensor]:
        loss.backward()
        return {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}

    expected = backward(forward())
    if not layers:
        with pytest.raises(ValueError, match="nothing was recorded"), ga.diagnostics.record(model):
            forward()
        return
    with ga.diagnostics.record(model) as recording:
        loss = forward()
    actual = backward(loss)  # after the hooks are gone
    assert zoo.same(actual, expected)
    assert len(recording) == len(layers)
    assert not recording.missed
    for call in recording:
        sums = torch.zeros(
            (*call.weights.shape[:-2], call.graph.num_targets, call.weights.shape[-1])
        )
        sums.index_add_(-2, call.graph.edge_index[1], call.weights.float())
        rows = sums.flatten()
        assert bool(((rows - 1).abs().lt(1e-4) | rows.eq(0)).all())


def test_weights_below_0_are_recorded_without_shares_and_break_no_call() -> None:
    """Linear attention with rotary positions beside softmax attention."""
    model = zoo.encoder(mixer=["linear", "dot"], dim=32).eval()
    tokens = torch.randint(zoo.VOCABULARY, (2, 60), generator=torch.Generator().manual_seed(0))
    layer, x = model.blocks[0].mixer, model.embedding(tokens)
    with torch.no_grad():
        layer.query_proj.weight.mul_(9)
        layer.key_proj.weight.mul_(9)
        expected = model(tokens)
        normed = model.blocks[0].mixer_norm(x)
        _, weights = layer(normed, ga.complete_graph(60), return_attention_weights=True)
        assert (weights < 0).any()
        with ga.diagnostics.record(model) as recording:
            assert torch.equal(model(tokens), expected)
    assert recording.names == ("blocks.0.mixer", "blocks.1.mixer")
    assert recording.missed == {}
    torch.testing.assert_close(recording[0].weights, weights)
    assert recording[0].entropy.isnan().all()
    assert recording[1].entropy.isfinite().all()


def blocks_of_one_width(model: Any) -> list[str]:
    """Names of the blocks that are as wide as the first one: all but those of later stages."""
    blocks = {name: part for name, part in model.named_modules() if part in zoo.blocks_of(model)}
    width = zoo.blocks_of(model)[0].mixer.dim
    return [name for name, block in blocks.items() if block.mixer.dim == width]


@pytest.mark.parametrize("name", zoo.ZOO)
def test_spectra_of_every_block_and_without_the_attention_of_one(name: str) -> None:
    model, batch = zoo.made(name).train(), zoo.batch_of(name, 2)
    names = blocks_of_one_width(model)
    blocks = [model.get_submodule(name) for name in names]
    states: list[torch.Tensor] = []
    handles = [block.register_forward_hook(lambda *a: states.append(a[2])) for block in blocks]
    with torch.no_grad():
        zoo.call(model.eval(), batch)
    model.train()
    for handle in handles:
        handle.remove()
    recorded = ga.diagnostics.hidden_spectra(model, *batch.inputs, layers=names, **batch.keywords)
    assert model.training
    assert recorded.names == ("input", *names)
    assert len(recorded.spectra) == len(blocks) + 1
    valid = batch.keywords.get("valid")
    for state, spectrum in zip(states, recorded.spectra[1:], strict=True):
        spectra = []
        for b, tokens in enumerate(state.double()):
            real = tokens if valid is None else tokens[valid[b]]
            spectra.append(torch.linalg.eigvalsh(torch.cov(real.T, correction=0)).flip(0))
        torch.testing.assert_close(spectrum, torch.stack(spectra).mean(0), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", zoo.ZOO)
def test_attention_can_be_taken_from_one_block_at_a_time(name: str) -> None:
    """Attention taken out of a block adds 0, which leaves the perceptron; consensus is left out."""
    model, batch = zoo.made(name).eval(), zoo.batch_of(name, 2)
    consensus = (ga.nn.SelfConsensus, ga.nn.CrossConsensus)
    chosen = [
        key
        for key in blocks_of_one_width(model)
        if not isinstance(model.get_submodule(key).mixer, consensus)
    ]
    if not chosen:
        return
    actual = ga.diagnostics.spectra_without_attention(
        model, *batch.inputs, layers=chosen, **batch.keywords
    )
    assert list(actual) == ["none", *chosen]
    for key in chosen:
        off = zoo.made(name).eval()
        mixer = off.get_submodule(key).mixer
        mixer.register_forward_hook(lambda *a: torch.zeros_like(a[2]))
        expected = ga.diagnostics.hidden_spectra(
            off, *batch.inputs, layers=chosen, **batch.keywords
        )
        torch.testing.assert_close(actual[key].spectra, expected.spectra, rtol=1e-6, atol=1e-9)
        assert not torch.equal(actual[key].spectra, actual["none"].spectra)


@pytest.mark.parametrize("name", zoo.ZOO)
def test_every_layer_of_a_model_gets_a_certificate(name: str) -> None:
    """Layers are certified on the tokens that reach them.

    Rows of attention are averages, and filters are low-pass. For linear attention alone the
    certificate says "not applicable".
    """
    model = zoo.made(name).train()
    batch = zoo.batch_of(name, 4, examples=1, tokens=9)
    certificate = ga.spectral.certify(model, *batch.inputs, **batch.keywords)
    assert model.training
    names = {id(part): key for key, part in model.named_modules()}
    layers = [part for b in zoo.blocks_of(model) for part in layers_of(b.mixer)]
    assert {names[id(layer)] for layer in layers} <= set(certificate.parts)
    assert certificate.sound in (True, None)
    if not batch.keywords:
        assert certificate.to_json() == ga.spectral.certify(model, *batch.inputs).to_json()


@pytest.mark.parametrize("name", zoo.ZOO)
def test_the_largest_stable_step_of_gradient_descent_is_that_of_its_hessian(name: str) -> None:
    """alpha = -2 <g, u> / <u, H u> by differences of the loss along the step, in float64."""
    model = zoo.made(name).double().eval()
    batches = [zoo.batch_of(name, seed, 2, 9).to(torch.float64) for seed in range(2)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    actual = ga.diagnostics.max_stable_lr(
        model, zoo.exact_loss_of, optimizer, batches,
        state_batches=0, warmup_steps=0, steps=1, max_norm=None,
    )  # fmt: skip
    assert zoo.same(dict(model.state_dict()), before)
    parameters = list(model.parameters())
    start = zoo.exact_loss_of(model, batches[0])
    slope = torch.autograd.grad(start, parameters, allow_unused=True)
    step = [
        torch.zeros_like(p) if g is None else -g for p, g in zip(parameters, slope, strict=True)
    ]
    square = sum(float(u.square().sum()) for u in step)
    h = 1e-5 / square**0.5  # top_k chooses anew on longer ways
    losses = []
    with torch.no_grad():
        for sign in (1, -1):
            for parameter, u in zip(parameters, step, strict=True):
                parameter.add_(u, alpha=sign * h)
            losses.append(float(zoo.exact_loss_of(model, batches[0])))
            for parameter, u in zip(parameters, step, strict=True):
                parameter.sub_(u, alpha=sign * h)
    curvature = (losses[0] - 2 * start.item() + losses[1]) / h**2
    expected = 2 * square / curvature if curvature > 0 else float("inf")
    assert actual.values[0] == pytest.approx(expected, rel=1e-2)
