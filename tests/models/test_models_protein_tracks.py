"""Source tracks of ProteinModel: codes beside the letters, which it reads and guesses."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from proteins import complex_of, letters, model_of, tokens_of
from torch import Tensor, nn
from torch.nn import functional

import graphattn as ga

SIZES = {"structure": 11, "function": 4}
MIXERS = ["dot", "krause", "consensus", "mix"]


def random(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def codes_of(*shape: int, seed: int = 0) -> dict[str, Tensor]:
    generator = random(seed)
    return {name: torch.randint(size, shape, generator=generator) for name, size in SIZES.items()}


def close(out: dict[str, Tensor], expected: dict[str, Tensor], atol: float = 1e-12) -> None:
    assert list(out) == list(expected) == ["sequence", *SIZES]
    for name in out:
        torch.testing.assert_close(out[name], expected[name], rtol=0, atol=atol)


# What the model is.


@pytest.mark.parametrize("mixer", MIXERS)
def test_the_model_is_one_stack_between_the_embeddings_and_heads_of_all_tracks(mixer):
    """A model of letters with one token, whose embedding is the sum, has the same features."""
    model = model_of(mixer, tracks=SIZES)
    tokens, codes = torch.randint(21, (12,), generator=random()), codes_of(12)
    x = model.embedding.weight[tokens]
    for place, name in enumerate(SIZES):
        one_hot = functional.one_hot(codes[name], SIZES[name] + 1).double()
        x = x + one_hot @ model.sources.embeddings[place].weight
    alone = model_of(mixer)
    alone.load_state_dict({k: v for k, v in model.state_dict().items() if "sources" not in k})
    alone.embedding = nn.Embedding.from_pretrained(x)
    features = alone.encode(torch.arange(12))
    expected = {"sequence": functional.linear(features, model.head.weight, model.head.bias)}
    for name, head in zip(SIZES, model.sources.heads, strict=True):
        expected[name] = functional.linear(features, head.weight, head.bias)
    out = model(tokens, tracks=codes)
    close(out, expected)
    assert [list(logits.shape) for logits in out.values()] == [[12, 21], [12, 11], [12, 4]]


def test_a_track_that_is_not_given_is_masked_everywhere():
    model = model_of(tracks=SIZES)
    tokens, codes = torch.randint(21, (2, 9), generator=random()), codes_of(2, 9)
    masked = {name: torch.full((2, 9), size) for name, size in SIZES.items()}
    close(model(tokens), model(tokens, tracks=masked))
    close(model(tokens, tracks={}), model(tokens))
    some = {"structure": codes["structure"]}
    close(model(tokens, tracks=some), model(tokens, tracks={**masked, **some}))
    unknown = {name: torch.tensor([-1, -100]).repeat(9).view(2, 9) for name in SIZES}
    close(model(tokens, tracks=unknown), model(tokens))
    assert (model(tokens, tracks=codes)["sequence"] - model(tokens)["sequence"]).abs().max() > 1e-4


def test_a_model_without_source_tracks_returns_a_tensor_and_has_no_weights_for_them():
    model = model_of()
    tokens = torch.randint(21, (9,), generator=random())
    assert model(tokens).shape == (9, 21)
    assert not any("sources" in name for name in model.state_dict())
    assert model.source_tracks == {}
    with pytest.raises(ValueError, match=r"tracks must be a dict of .*source tracks \(none;"):
        model(tokens, tracks={"structure": tokens})


def test_codes_without_a_batch_belong_to_every_sequence():
    model = model_of(tracks=SIZES)
    tokens, codes = torch.randint(21, (3, 2, 9), generator=random()), codes_of(9)
    every = {name: of_track.expand(3, 2, 9) for name, of_track in codes.items()}
    close(model(tokens, tracks=codes), model(tokens, tracks=every))
    short = {name: of_track.int() for name, of_track in codes.items()}
    close(model(tokens, tracks=short), model(tokens, tracks=every))


# Padding, packing and empty inputs.


@pytest.mark.parametrize("mixer", ["dot", "mix"])
def test_codes_of_rows_and_of_packed_proteins_are_those_of_each(mixer):
    model = model_of(mixer, tracks=SIZES)
    proteins = [complex_of(8, 4, seed=1), complex_of(7, seed=2)]
    tokens = [tokens_of(model, protein) for protein in proteins]
    codes = [codes_of(12, seed=1), codes_of(7, seed=2)]
    alone = [
        model(row, structure=protein, tracks=of_row)
        for row, protein, of_row in zip(tokens, proteins, codes, strict=True)
    ]
    joined = {name: torch.cat([one[name] for one in codes]) for name in SIZES}
    packed = model(torch.cat(tokens), structure=proteins, tracks=joined)
    close(packed, {name: torch.cat([out[name] for out in alone]) for name in packed})
    rows = nn.utils.rnn.pad_sequence(tokens, batch_first=True)
    padded = {
        name: nn.utils.rnn.pad_sequence([one[name] for one in codes], True, padding_value=999)
        for name in SIZES
    }
    out = model(rows, structure=proteins, tracks=padded)
    for b, size in enumerate((12, 7)):
        close({name: of_track[b, :size] for name, of_track in out.items()}, alone[b])


@pytest.mark.parametrize("mixer", MIXERS)
def test_codes_of_padding_are_never_read(mixer):
    model = model_of(mixer, tracks=SIZES)
    tokens, codes = torch.randint(21, (2, 12), generator=random()), codes_of(2, 12)
    valid = torch.arange(12) < torch.tensor([[12], [7]])
    odd = {name: of_track.masked_fill(~valid, 10**6) for name, of_track in codes.items()}
    out = model(tokens, valid=valid, tracks=odd)
    alone = model(tokens[1, :7], tracks={name: row[1, :7] for name, row in codes.items()})
    close({name: of_track[1, :7] for name, of_track in out.items()}, alone)


def test_no_residues_have_no_logits_of_any_track():
    model = model_of(tracks=SIZES)
    for shape in ((0,), (2, 0), (0, 5)):
        out = model(torch.zeros(shape, dtype=torch.int64), tracks=codes_of(*shape))
        assert [logits.shape for logits in out.values()] == [(*shape, n) for n in (21, 11, 4)]


# Training, files and other calls.


def loss_of(out: dict[str, Tensor]) -> Tensor:
    return sum((logits.square().sum() for logits in out.values()), torch.zeros(()))


def gradients(model: Any, **given: Any) -> dict[str, Tensor]:
    model.zero_grad()
    loss_of(model(**given)).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_every_weight_of_a_track_has_a_gradient_with_checkpointing_too():
    model = model_of(tracks=SIZES).train()
    given = {"tokens": torch.randint(21, (2, 9), generator=random()), "tracks": codes_of(2, 9)}
    plain = gradients(model, **given)
    assert {name for name, _ in model.named_parameters()} == set(plain)
    for embedding, name in zip(model.sources.embeddings, SIZES, strict=True):
        seen = embedding.weight.grad.abs().sum(1) > 0
        assert seen.nonzero()[:, 0].tolist() == given["tracks"][name].unique().tolist()
    model.gradient_checkpointing_enable()
    again = gradients(model, **given)
    for name in plain:
        torch.testing.assert_close(again[name], plain[name], rtol=1e-9, atol=1e-12)


def test_files_copies_and_pickles_keep_the_tracks(tmp_path):
    model = model_of(tracks=SIZES)
    tokens, codes = torch.randint(21, (9,), generator=random()), codes_of(9)
    expected = model(tokens, tracks=codes)
    model.save_pretrained(tmp_path)
    loaded = ga.models.ProteinModel.from_pretrained(tmp_path)
    assert loaded.config["tracks"] == SIZES
    for twin in (loaded, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        close(twin(tokens, tracks=codes), expected, atol=0)
    other = model_of(tracks={"function": 11, "structure": 4})
    with pytest.raises(RuntimeError, match="tracks"):
        other.load_state_dict(model.state_dict())


def test_new_parameters_are_those_of_a_new_model():
    model = model_of(tracks=SIZES)
    before = copy.deepcopy(model.sources.state_dict())
    model.reset_parameters()
    for name, weight in model.sources.state_dict().items():
        assert not torch.equal(weight, before[name]), name
        if "embeddings" in name:
            assert 0.01 < float(weight.std()) < 0.03


def test_under_autocast_the_logits_of_all_tracks_are_of_half_precision():
    model = model_of(tracks=SIZES).float()
    tokens, codes = torch.randint(21, (9,), generator=random()), codes_of(9)
    expected = model(tokens, tracks=codes)
    with torch.autocast("cpu", torch.bfloat16):
        out = model(tokens, tracks=codes)
    for name in out:
        assert out[name].dtype == torch.bfloat16
        torch.testing.assert_close(out[name].float(), expected[name], rtol=0.05, atol=0.05)


@pytest.mark.long
def test_it_compiles_as_one_graph_and_exports():
    torch._dynamo.reset()
    model = model_of("dot", tracks=SIZES)
    tokens, codes = torch.randint(21, (2, 9), generator=random()), codes_of(2, 9)
    expected = model(tokens, tracks=codes)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    close(compiled(tokens, tracks=codes), expected, atol=1e-10)
    program = torch.export.export(model, (tokens,), {"tracks": codes})
    close(program.module()(tokens, tracks=codes), expected, atol=1e-10)


def test_embeddings_and_logits_of_proteins_take_their_codes():
    model, codes = model_of(tracks=SIZES), codes_of(10)
    text = letters(10)
    tokens = model.tokenizer.encode(text)
    features = model.encode(tokens, tracks=codes)
    torch.testing.assert_close(model.embed(text, tracks=codes), features, rtol=0, atol=0)
    close(model.logits(text, tracks=codes), model(tokens, tracks=codes), atol=0)
    several = [text, complex_of(5, 3), text[:4], complex_of(6)]
    for out, protein in zip(model.logits(several), several, strict=True):
        close(out, model.logits(protein))
    with pytest.raises(ValueError, match="tracks must be None for a list of proteins, got dict"):
        model.embed(several, tracks=codes)


def test_scores_of_mutations_are_of_the_letters_and_read_the_other_tracks():
    model, codes, text = model_of(tracks=SIZES), codes_of(8), "MKVLAGHW"
    expected = []
    for place, wild, mutant in ((1, "K", "R"), (5, "G", "A")):
        tokens = model.tokenizer.encode(text)
        tokens[place] = model.mask_token
        row = model(tokens, tracks=codes)["sequence"][place].log_softmax(0)
        of = model.tokenizer.vocabulary.index
        expected.append(float((row[of(mutant)] - row[of(wild)]).detach()))
    found = model.score_mutations(text, ["K2R", "G6A"], tracks=codes)
    assert found.tolist() == pytest.approx(expected, abs=1e-6)
    assert (found - model.score_mutations(text, ["K2R", "G6A"])).abs().max() > 1e-5


def test_a_subclass_that_knows_no_tracks_is_called_without_them():
    class Own(ga.models.ProteinModel):
        def encode(self, tokens, graph=None, *, valid=None):  # type: ignore[override]
            return super().encode(tokens, graph, valid=valid)

    torch.manual_seed(0)
    model = Own(16, 1, 2, tracks=SIZES)
    assert list(model(torch.arange(5))) == ["sequence", *SIZES]


def test_another_head_and_diffusion_are_of_the_letters():
    model = model_of("dot", tracks=SIZES)
    tokens = torch.randint(21, (2, 9), generator=random())
    headed = ga.train.WithHead(model, 3)
    expected = functional.linear(
        model.encode(tokens, tracks=codes_of(9)), headed.model.head.weight, headed.model.head.bias
    )
    out = headed(tokens, tracks=codes_of(9))
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    drawn = ga.train.sample_diffusion(model, (2, 9), mask_token=21, steps=2, generator=random())
    assert int(drawn.max()) < 21


# Bad input.


@pytest.mark.parametrize(
    ("tracks", "says"),
    [
        (512, "tracks must be a dict of names of source tracks .*got int"),
        ({"sequence": 5}, "and not 'sequence', the track of the letters"),
        ({"a b": 5}, "valid Python identifiers.*got 'a b'"),
        ({"structure": 0}, r"tracks\['structure'\] must be"),
    ],
)
def test_a_constructor_names_what_is_wrong(tracks, says):
    with pytest.raises(ValueError, match=says):
        ga.models.ProteinModel(16, 1, 2, tracks=tracks)


@pytest.mark.parametrize(
    ("tracks", "says"),
    [
        (torch.zeros(9).long(), "tracks must be a dict of codes .*structure, function.*got Tensor"),
        ({"shape": torch.zeros(9).long()}, r"got \['shape'\]"),
        ({"structure": torch.zeros(9)}, r"tracks\['structure'\] must be integers .*float32 \[9\]"),
        ({"structure": torch.zeros(8).long()}, r"the shape of the tokens, \[2, 9\], or \[9\]"),
        ({"structure": [0] * 9}, "got list"),
        ({"structure": torch.full((9,), 12)}, r"must be 0 .. 10, or 11 \(the mask token\).*got 12"),
    ],
)
def test_a_call_names_what_is_wrong(tracks, says):
    with pytest.raises(ValueError, match=says):
        model_of(tracks=SIZES)(torch.zeros(2, 9).long(), tracks=tracks)
