"""Layouts of a block's states: whose tokens, and in which order, against states cut by hand."""

import pytest
import torch
from hidden_states import eigenvalues, states_of
from torch import nn

from graphattn import diagnostics

B, N, C, H = 2, 6, 8, 2
FIRST = torch.tensor([[False] * 4 + [True] * 2, [False] * 6])  # True: padding
SECOND = torch.tensor([[False] * 6, [False] * 3 + [True] * 3])


def ranks(x, padding=None):
    real = [t if padding is None else t[~padding[b]] for b, t in enumerate(x)]
    return torch.stack([diagnostics.effective_rank(tokens) for tokens in real]).mean()


def outputs_of(model, names, *inputs, **keywords):
    """Return the outputs of the named blocks, on torch's slow path."""
    outputs, modules = {}, dict(model.named_modules())

    def keep(name):
        def hook(_, __, output):
            outputs[name] = output[0] if isinstance(output, tuple) else output

        return hook

    handles = [modules[name].register_forward_hook(keep(name)) for name in names]
    model(*inputs, **keywords)
    for handle in handles:
        handle.remove()
    return [outputs[name].detach() for name in names]


class Block(nn.Module):
    """Somebody's block with torch's attention."""

    def __init__(self, batch_first):
        super().__init__()
        self.self_attn = nn.MultiheadAttention(C, H, batch_first=batch_first, dtype=torch.float64)

    def forward(self, x, key_padding_mask=None):
        return x + self.self_attn(x, x, x, key_padding_mask=key_padding_mask)[0]


class Stack(nn.Module):
    def __init__(self, batch_first):
        super().__init__()
        self.layers = nn.ModuleList(Block(batch_first) for _ in range(2))

    def forward(self, x, src_key_padding_mask=None):
        for layer in self.layers:
            x = layer(x, src_key_padding_mask)
        return x


def encoder(batch_first):
    layer = nn.TransformerEncoderLayer(C, H, 12, batch_first=batch_first, dtype=torch.float64)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


@pytest.mark.parametrize("padding", [None, FIRST])
@pytest.mark.parametrize("make", [encoder, Stack])
def test_batch_second_and_batch_first_have_the_same_spectra_and_ranks(make, padding):
    torch.manual_seed(0)
    model, other = make(False).eval(), make(True).eval()
    other.load_state_dict(model.state_dict())
    x = states_of(B, N, C)
    given = {} if padding is None else {"src_key_padding_mask": padding}
    measured = diagnostics.hidden_spectra(model, x.transpose(0, 1), **given)
    states = outputs_of(model, ["layers.0", "layers.1"], x.transpose(0, 1), **given)
    states = [x, *(state.transpose(0, 1) for state in states)]
    expected = torch.stack([eigenvalues(state, padding) for state in states])
    torch.testing.assert_close(measured.spectra, expected)
    torch.testing.assert_close(diagnostics.hidden_spectra(other, x, **given).spectra, expected)
    expected = torch.stack([ranks(state, padding) for state in states[1:]])
    for asked, inputs in ((model, x.transpose(0, 1)), (other, x)):
        values, _ = diagnostics.effective_rank_per_layer(asked, inputs, **given)
        torch.testing.assert_close(values, expected)


@pytest.mark.parametrize("name", ["layers.0", "layers.0.self_attn", "layers.1.norm2", ""])
def test_parts_of_torchs_layers_and_the_whole_stack_are_read_alike(name):
    torch.manual_seed(0)
    model, x = encoder(False), states_of(N, B, C)
    measured = diagnostics.hidden_spectra(model, x, layers=[name])
    model.eval()
    state = outputs_of(model, [name], x)[0] if name != "" else model(x).detach()
    torch.testing.assert_close(measured.spectra[1], eigenvalues(state.transpose(0, 1)))


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("masks", [(), ("src",), ("tgt",), ("src", "tgt")])
def test_encoder_and_decoder_of_torch_have_masks_of_their_own(masks, batch_first):
    torch.manual_seed(0)
    model = nn.Transformer(C, H, 1, 1, 12, batch_first=batch_first, dtype=torch.float64).eval()
    source, target = states_of(B, N, C), states_of(B, N, C, seed=2)
    padding = {"src": FIRST, "tgt": SECOND}
    given = {f"{side}_key_padding_mask": padding[side] for side in masks}
    flip = (lambda x: x) if batch_first else (lambda x: x.transpose(0, 1))
    inputs = flip(source), flip(target)
    names = ("encoder.layers.0", "decoder.layers.0")
    one, two = map(flip, outputs_of(model, names, *inputs, **given))
    padding = {side: padding[side] if side in masks else None for side in padding}
    measured = diagnostics.hidden_spectra(model, *inputs, **given)
    assert measured.names == ("input", *names)
    expected = [
        eigenvalues(source, padding["src"]),
        eigenvalues(one, padding["src"]),
        eigenvalues(two, padding["tgt"]),
    ]
    torch.testing.assert_close(measured.spectra, torch.stack(expected))
    values, _ = diagnostics.effective_rank_per_layer(model, *inputs, **given)
    expected = torch.stack([ranks(one, padding["src"]), ranks(two, padding["tgt"])])
    torch.testing.assert_close(values, expected)


def test_sequences_of_different_lengths_need_no_choice_of_blocks():
    torch.manual_seed(0)
    model = nn.Transformer(C, H, 1, 1, 12, batch_first=True, dtype=torch.float64)
    target = states_of(B, 4, C, seed=2)
    measured = diagnostics.hidden_spectra(
        model, states_of(B, N, C), target, src_key_padding_mask=FIRST
    )
    assert measured.spectra.shape == (3, C)


def test_torchs_decoder_alone_has_the_mask_of_what_it_writes():
    torch.manual_seed(0)
    layer = nn.TransformerDecoderLayer(C, H, 12, batch_first=True, dtype=torch.float64)
    model = nn.TransformerDecoder(layer, 1).eval()
    inputs = states_of(B, N, C), states_of(B, N, C, seed=2)
    given = {"tgt_key_padding_mask": SECOND, "memory_key_padding_mask": FIRST}
    (state,) = outputs_of(model, ["layers.0"], *inputs, **given)
    measured = diagnostics.hidden_spectra(model, *inputs, **given)
    expected = [eigenvalues(inputs[0], SECOND), eigenvalues(state, SECOND)]
    torch.testing.assert_close(measured.spectra, torch.stack(expected))


class Wrapped(nn.Module):
    """A model whose signature says nothing, as those of PEFT."""

    def __init__(self, model):
        super().__init__()
        self.model, self.config = model, model.config

    def forward(self, *args, **kwargs):
        return self.model(*args, **kwargs)


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("masks", [(), ("",), ("decoder_",), ("", "decoder_")])
def test_encoder_and_decoder_of_transformers_have_masks_of_their_own(masks, wrapped):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BartConfig(
        vocab_size=20, d_model=C, encoder_layers=1, decoder_layers=1, encoder_attention_heads=H,
        decoder_attention_heads=H, encoder_ffn_dim=12, decoder_ffn_dim=12,
        max_position_embeddings=16, attn_implementation="sdpa",
    )  # fmt: skip
    model = transformers.BartModel(config).double().eval()
    source, target = torch.randint(3, 20, (B, N)), torch.randint(3, 20, (B, N))
    padding = {"": FIRST, "decoder_": SECOND}
    given = {f"{side}attention_mask": (~padding[side]).long() for side in masks}
    given |= {"decoder_input_ids": target}
    names = ["encoder.layers.0", "decoder.layers.0"]
    one, two = outputs_of(model, names, source, **given)
    padding = {side: padding[side] if side in masks else None for side in padding}
    measured = diagnostics.hidden_spectra(Wrapped(model) if wrapped else model, source, **given)
    expected = [eigenvalues(one, padding[""]), eigenvalues(two, padding["decoder_"])]
    torch.testing.assert_close(measured.spectra[1:], torch.stack(expected))


class Autoencoder(nn.Module):
    """One sequence, read by an encoder and a decoder: one mask is of both."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = encoder(True), encoder(True)

    def forward(self, x, valid=None):
        padding = None if valid is None else ~valid
        x = self.encoder(x, src_key_padding_mask=padding)
        return self.decoder(x, src_key_padding_mask=padding)


def test_the_one_mask_of_a_model_is_of_its_decoder_too():
    torch.manual_seed(0)
    model, x = Autoencoder().eval(), states_of(B, N, C)
    names = [f"{side}.layers.{n}" for side in ("encoder", "decoder") for n in range(2)]
    states = [x, *outputs_of(model, names, x, ~FIRST)]
    measured = diagnostics.hidden_spectra(model, x, ~FIRST)
    expected = torch.stack([eigenvalues(state, FIRST) for state in states])
    torch.testing.assert_close(measured.spectra, expected)
