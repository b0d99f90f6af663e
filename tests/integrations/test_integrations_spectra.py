"""Spectra of Hugging Face models: attention disabled by other means, and scaling in place."""

import math

import pytest
import torch

import graphattn as ga

transformers = pytest.importorskip("transformers", reason="needs transformers")
from graphattn.integrations import transformers as gat  # noqa: E402

gat.register()

N, C, H = 12, 32, 4
SIZES = {
    "hidden_size": C,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": H,
    "vocab_size": 50,
    "max_position_embeddings": 64,
}


def tiny(name, implementation="sdpa", **options):
    torch.manual_seed(0)
    if name == "GPT2":
        options = {"n_embd": C, "n_layer": 3, "n_head": H, "vocab_size": 50, "n_positions": 64}
    else:
        options = {**SIZES, **options}
    config = getattr(transformers, name + "Config")(**options)
    config._attn_implementation = implementation
    model = getattr(transformers, name + "Model")(config).eval().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def tokens():
    return torch.randint(3, 50, (2, N), generator=torch.Generator().manual_seed(1))


def eigenvalues(x, real=None):
    spectra = []
    for b, sequence in enumerate(x):
        tokens = sequence if real is None else sequence[real[b]]
        centred = tokens - tokens.mean(0)
        spectra.append(torch.linalg.eigvalsh(centred.T @ centred / len(tokens)).flip(0))
    return torch.stack(spectra).mean(0)


def hidden_states(model, blocks, **inputs):
    """Return the input of the first block and the outputs of all blocks, by hooks of our own."""
    states = []
    handles = [
        blocks[0].register_forward_pre_hook(
            lambda m, a, k: states.append(a[0] if a else k["hidden_states"]), with_kwargs=True
        )
    ]
    for block in blocks:
        handles.append(
            block.register_forward_hook(
                lambda m, a, y: states.append(y if isinstance(y, torch.Tensor) else y[0])
            )
        )
    with torch.no_grad():
        model(**inputs)
    for handle in handles:
        handle.remove()
    return states


def without(block, name):
    """Switch a block's attention off by its parameters: the output projection is 0."""
    with torch.no_grad():
        for parameter in block.get_submodule(name).parameters():
            parameter.zero_()


CASES = {
    "Llama": ("layers", "self_attn.o_proj"),
    "GPT2": ("h", "attn.c_proj"),
    "Bert": ("encoder.layer", "attention.output.dense"),
}


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "graphattn"])
@pytest.mark.parametrize("name", CASES)
def test_disabled_attention_is_an_output_projection_of_zeros(name, implementation):
    path, projection = CASES[name]
    model = tiny(name, implementation)
    mask = torch.ones(2, N, dtype=torch.int64)
    mask[0, -4:] = 0
    inputs = {"input_ids": tokens(), "attention_mask": mask}
    actual = ga.diagnostics.spectra_without_attention(model, **inputs)
    assert list(actual) == ["none", *(f"{path}.{n}" for n in range(3))]
    for n in (None, 0, 2):
        other = tiny(name, implementation)
        blocks = list(other.get_submodule(path))
        if n is not None:
            without(blocks[n], projection)
        states = hidden_states(other, blocks, **inputs)
        expected = torch.stack([eigenvalues(x, mask.bool()) for x in states])
        spectra = actual["none" if n is None else f"{path}.{n}"].spectra
        torch.testing.assert_close(spectra, expected, rtol=1e-6, atol=1e-9)


def attend(x, values, root_of_product, allowed=None):
    q, v = (t.unflatten(-1, (H, -1)).transpose(1, 2) for t in (x, values))
    logits = q @ q.mT / root_of_product
    if allowed is not None:
        logits = logits.masked_fill(~allowed, -torch.inf)
    return (logits.softmax(-1) @ v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("scaling", ["sdp", "sq_inplace"])
@pytest.mark.parametrize("name", ["Roberta", "Longformer"])
def test_without_weights_in_place_scaling_shrinks_the_residual_too(name, scaling):
    """Attention Clusters, Figure 14: Longformer and RoBERTa with nothing learned, no norms."""
    options, allowed = {"pad_token_id": 1}, None
    if name == "Longformer":
        options |= {"attention_window": 4, "sep_token_id": 2}
        place = torch.arange(N)
        allowed = (place[:, None] - place).abs() <= 2
    model = tiny(name, "eager", **options)
    inputs = {"input_ids": tokens()}
    actual = ga.diagnostics.hidden_spectra(
        model, **inputs, weights="disabled", normalization="disabled", scaling=scaling
    )
    x = hidden_states(model, list(model.encoder.layer), **inputs)[0]
    expected, root = [eigenvalues(x)], math.sqrt(C // H)
    for _ in range(3):
        if scaling == "sdp":
            x = x + attend(x, x, root, allowed)
        else:
            x = x / root
            x = x + attend(x, x, 1.0, allowed)
        expected.append(eigenvalues(x))
    torch.testing.assert_close(actual.spectra, torch.stack(expected), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("normalization", ["enabled", "disabled"])
def test_a_norm_before_attention_keeps_the_residual_whole(normalization):
    """A token alone attends to itself, so Llama's block is a sum that can be written down."""
    model, inputs = tiny("Llama"), {"input_ids": tokens()[:, :1]}
    states, root = [], math.sqrt(C // H)
    handle = model.layers[0].register_forward_hook(lambda m, a, y: states.append(y.clone()))
    ga.diagnostics.hidden_spectra(
        model, **inputs, weights="disabled", normalization=normalization, scaling="sq_inplace"
    )
    handle.remove()
    x = model.embed_tokens(inputs["input_ids"]).detach()
    normal = x / (x.square().mean(-1, keepdim=True) + model.config.rms_norm_eps).sqrt()
    expected = x + normal / root if normalization == "enabled" else x / root + x / root
    torch.testing.assert_close(states[0], expected)


def test_grouped_heads_have_no_form_without_weights():
    model = tiny("Llama", num_key_value_heads=2)
    with pytest.raises(ValueError, match="unless projections are square"):
        ga.diagnostics.hidden_spectra(model, input_ids=tokens(), weights="disabled")


@pytest.mark.parametrize("name", ["Llama", "Bert"])
def test_effective_ranks_know_the_blocks_and_the_padding_of_transformers(name):
    model = tiny(name)
    mask = torch.ones(2, N, dtype=torch.int64)
    mask[1, :3] = 0
    inputs = {"input_ids": tokens(), "attention_mask": mask}
    values, names = ga.diagnostics.effective_rank_per_layer(model, **inputs)
    path = CASES[name][0]
    assert names == tuple(f"{path}.{n}" for n in range(3))
    states = hidden_states(model, list(model.get_submodule(path)), **inputs)[1:]
    for value, x in zip(values, states, strict=True):
        ranks = [ga.diagnostics.effective_rank(x[b][mask[b].bool()]) for b in range(2)]
        torch.testing.assert_close(value, torch.stack(ranks).mean())
