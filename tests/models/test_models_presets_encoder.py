"""The consensus paper's encoders by name: its shapes, our counts, and models that run."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import graphattn as ga

TABLE_10 = {  # layers, heads, width (Appendix E.1)
    "consensus-text-54m": (6, 6, 384),
    "consensus-text-193m": (12, 12, 768),
    "consensus-text-385m": (32, 16, 1024),
    "consensus-dna-51m": (6, 6, 384),
    "consensus-dna-172m": (12, 12, 768),
    "consensus-dna-331m": (32, 16, 1024),
    "consensus-protein-35m": (12, 4, 256),
    "consensus-protein-133m": (24, 8, 512),
    "consensus-protein-320m": (32, 16, 768),
}
EVERY_SHAPE = pytest.mark.parametrize("name", TABLE_10)


def on_meta(name: str, **changes: Any) -> Any:
    with torch.device("meta"):
        return ga.models.SequenceEncoder.from_preset(name, **changes)


def by_hand(name: str, mixer: str) -> int:
    """Parameters from the formulas: tables, matrices, biases, norms, adaLN, edge networks."""
    layers, heads, d = TABLE_10[name]
    noisy = "protein" not in name
    V = {"text": 50_258, "dna": 6, "protein": 22}[name.split("-")[1]]
    c, r, xi = 128, 4, 256
    perceptron_and_norms = 8 * d * d + 5 * d + 4 * d
    adaln = 6 * d * c + 6 * d if noisy else 0
    attention = 4 * (d * d + d)
    edge_network = (2 * d * xi + heads * xi) + heads * 2 * (xi + 1) + r * d * (xi + 1)
    consensus = 2 * (d * d + d) + edge_network
    first = {"dot": layers, "consensus": 0, "mix": layers // 2}[mixer]
    blocks = layers * (perceptron_and_norms + adaln)
    blocks += first * attention + (layers - first) * consensus
    noise = (256 * c + c) + (c * c + c) + (2 * d * c + 2 * d) if noisy else 0
    return V * d + blocks + noise + 2 * d + (V * d + V)


@pytest.mark.every_case
@EVERY_SHAPE
def test_a_preset_has_the_paper_s_shape_and_the_counts_that_it_tells(name):
    layers, heads, dim = TABLE_10[name]
    preset = ga.models.presets()[name]
    assert preset.model == "SequenceEncoder"
    counted = []
    for mixer in ("dot", "consensus", "mix"):
        model = on_meta(name, mixer=mixer)
        assert (len(model.blocks), model.embedding.embedding_dim) == (layers, dim)
        assert {block.mixer.heads for block in model.blocks} == {heads}
        assert model.num_parameters() == by_hand(name, mixer)
        counted.append(f"{model.num_parameters() / 1e6:.1f}")
    assert f": {' / '.join(counted)} M parameters with dot / consensus / mix" in preset.about
    printed = re.fullmatch(r".*-(\d+)m", name).group(1)
    assert f"the paper's {printed} M" in preset.about
    assert float(printed) not in [round(float(millions)) for millions in counted]


@pytest.mark.long
def test_text_and_dna_have_a_noise_level_and_proteins_have_none():
    for name in TABLE_10:
        model = on_meta(name)
        noisy = "protein" not in name
        assert (model.noise_dim, model.zero_head) == ((128, True) if noisy else (None, False))
        assert model.head.weight is not model.embedding.weight  # untied
        half = len(model.blocks) // 2
        kinds = [type(block.mixer).__name__ for block in model.blocks]
        assert kinds == ["DotProductAttention"] * half + ["SelfConsensus"] * half
        consensus = model.blocks[-1].mixer
        assert (consensus.rank, consensus.edge_hidden, model.window) == (4, 256, 2)
        assert all(block.mixer.rotary is not None for block in model.blocks)


@pytest.mark.long
def test_vocabularies_are_those_of_the_tokenizers_and_a_mask():
    sizes = {name: on_meta(name).vocab_size for name in TABLE_10}
    assert sizes["consensus-dna-51m"] == ga.data.NucleotideTokenizer().vocab_size + 1
    assert sizes["consensus-protein-35m"] == ga.data.ProteinTokenizer().vocab_size + 1
    assert sizes["consensus-text-54m"] == 50_257 + 1
    tokenizer_file = pytest.importorskip("transformers").GPT2Config()
    assert sizes["consensus-text-54m"] == tokenizer_file.vocab_size + 1


@pytest.mark.parametrize(
    "mixer",
    ["dot", "dot-window", "vlt", "gka", "krause", "consensus", "mix", "gka-consensus"],
)
def test_a_preset_runs_with_every_mixer(mixer):
    torch.manual_seed(0)
    model = ga.models.SequenceEncoder.from_preset("consensus-dna-51m", mixer=mixer, depth=2)
    tokens = ga.data.NucleotideTokenizer().encode("GATTACA" * 3)
    assert not model(tokens, noise_level=torch.tensor(0.7)).any()  # a head that starts at 0
    plain = ga.models.SequenceEncoder.from_preset(
        "consensus-dna-51m", mixer=mixer, depth=2, noise_dim=None, zero_head=False
    )
    assert plain(tokens).shape == (21, 6)
    assert plain(tokens).any()


def test_names_of_others_and_unknown_ones_are_refused():
    with pytest.raises(ValueError, match=r"name must be one of .*'consensus-text-54m'"):
        ga.models.SequenceEncoder.from_preset("consensus-text-55m")
    with pytest.raises(TypeError, match="colour"):
        ga.models.SequenceEncoder.from_preset("protein-6m", colour="red")
