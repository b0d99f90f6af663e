"""CausalLM: windows per layer, what is never seen, tied weights, presets with their counts."""

import copy
import pickle

import pytest
import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

import graphattn as ga
from graphattn.models.mixers import HALVES, KINDS, options_taken

V, D, H, DEPTH = 11, 16, 4, 4
NAMES = [*KINDS, *HALVES]
EVERY_MIXER = pytest.mark.parametrize("mixer", NAMES)
CLOSE = {"rtol": 1e-10, "atol": 1e-10}


def model_of(mixer="dot", depth=DEPTH, dtype=torch.float64, **options):
    torch.manual_seed(1)
    given = options_taken(mixer, depth, {"top_k": 3, "edge_hidden": 6})
    options = {"window": 5, "mixer_options": given, **options}
    model = ga.models.CausalLM(V, D, depth, H, mixer=mixer, **options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.to(dtype)


def tokens_of(*shape, seed=1):
    return torch.randint(V, shape, generator=torch.Generator().manual_seed(seed))


# What it computes.


def test_with_dot_products_it_is_gpt_neox_of_transformers():
    """Weights copied from GPT-NeoX give its logits, number of parameters and generated texts."""
    shape = {"num_hidden_layers": 3, "num_attention_heads": H, "intermediate_size": 4 * D}
    torch.manual_seed(0)
    theirs = GPTNeoXForCausalLM(
        GPTNeoXConfig(
            vocab_size=V,
            hidden_size=D,
            use_parallel_residual=False,
            rotary_pct=1.0,
            tie_word_embeddings=False,
            initializer_range=0.4,
            bos_token_id=None,
            eos_token_id=None,
            **shape,
        )
    )
    theirs = theirs.double().eval()
    ours = ga.models.CausalLM(V, D, 3, H).double()
    state = {
        "embedding.weight": theirs.gpt_neox.embed_in.weight,
        "head.weight": theirs.lm_head.weight,
    }
    modules = {"norm": theirs.gpt_neox.final_layer_norm}
    for i, layer in enumerate(theirs.gpt_neox.layers):
        modules[f"blocks.{i}.mixer_norm"] = layer.input_layernorm
        modules[f"blocks.{i}.mlp_norm"] = layer.post_attention_layernorm
        modules[f"blocks.{i}.mixer.output_proj"] = layer.attention.dense
        modules[f"blocks.{i}.mlp.0"] = layer.mlp.dense_h_to_4h
        modules[f"blocks.{i}.mlp.2"] = layer.mlp.dense_4h_to_h
        for name, tensor in layer.attention.query_key_value.named_parameters():
            parts = tensor.unflatten(0, (H, 3, D // H)).unbind(1)
            for part, rows in zip(("query", "key", "value"), parts, strict=True):
                state[f"blocks.{i}.mixer.{part}_proj.{name}"] = rows.flatten(0, 1)
    for place, module in modules.items():
        state.update({f"{place}.{name}": x for name, x in module.named_parameters()})
    ours.load_state_dict(state)
    assert ours.num_parameters() == theirs.num_parameters()
    tokens = tokens_of(2, 30)
    with torch.no_grad():
        # Their angles are float32 in every dtype.
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=0, atol=1e-4)
    expected = theirs.generate(
        tokens[:, :4], max_new_tokens=40, do_sample=False, pad_token_id=0,
        attention_mask=torch.ones(2, 4, dtype=torch.int64),
    )  # fmt: skip
    assert torch.equal(ours.generate(tokens[:, :4], 40), expected)


@EVERY_MIXER
def test_it_is_its_blocks_one_after_the_other_on_causal_graphs(mixer):
    model, tokens = model_of(mixer, norm="rms", activation="relu2", bias=False), tokens_of(3, 12)
    x = model.embedding.weight[tokens]
    for block, window in zip(model.blocks, model.windows, strict=True):
        y = x / (x.square().mean(-1, keepdim=True) + torch.finfo(x.dtype).eps).sqrt()
        y = y * block.mixer_norm.weight
        x = x + block.mixer(y, ga.causal_window_graph(12, window))
        y = x / (x.square().mean(-1, keepdim=True) + torch.finfo(x.dtype).eps).sqrt()
        hidden = (y * block.mlp_norm.weight) @ block.mlp[0].weight.T
        x = x + hidden.clamp_min(0).square() @ block.mlp[2].weight.T
    x = x / (x.square().mean(-1, keepdim=True) + torch.finfo(x.dtype).eps).sqrt()
    expected = (x * model.norm.weight) @ model.head.weight.T
    torch.testing.assert_close(model(tokens), expected, **CLOSE)
    names = [name for name, _ in model.named_parameters() if name.endswith("bias")]
    assert all("edge_net" in name or ".gate." in name for name in names)


@EVERY_MIXER
def test_a_later_token_changes_no_bit_of_earlier_logits(mixer):
    model, tokens = model_of(mixer), tokens_of(2, 14)
    expected = model(tokens)
    with torch.no_grad():
        model.embedding.weight[V - 1] = torch.nan  # what is read of it would show
    tokens = tokens % (V - 1)
    expected = model(tokens)
    for place in (1, 7, 13):
        later = tokens.clone()
        later[:, place:] = V - 1
        assert torch.equal(model(later)[:, :place], expected[:, :place])
        assert model(later)[:, place:].isnan().all()


@pytest.mark.parametrize("mixer", ["dot", "gka", "krause", "vlt"])
def test_logits_reach_back_as_far_as_the_windows_and_no_further(mixer):
    """Through windows of 2, 2, 2 and 5 keys: 1 + 1 + 1 + 4 tokens back."""
    model = model_of(mixer, window=(2, 5), window_pattern="SSSL", mixer_options=None)
    assert model.windows == [2, 2, 2, 5]
    tokens = tokens_of(20)
    whole = model(tokens)[-1]
    for place in range(20):
        other = tokens.clone()
        other[place] = (other[place] + 1) % V
        assert torch.equal(model(other)[-1], whole) == (place < 19 - 7)


def test_consensus_reaches_two_tokens_back_or_as_far_as_it_is_told():
    assert model_of("mix", window=None).windows == [None, None, 3, 3]
    assert model_of("consensus", consensus_window=2).windows == [2] * 4
    model, tokens = model_of("consensus", depth=1), tokens_of(9)
    assert model.blocks[0].mixer.update_rule == "target"
    moved = []
    for place in range(9):
        other = tokens.clone()
        other[place] = (other[place] + 1) % V
        moved.append(not torch.equal(model(other)[-1], model(tokens)[-1]))
    assert moved == [False] * 6 + [True] * 3


def test_windows_are_said_in_four_ways():
    def windows(window, **more):
        return ga.models.CausalLM(V, D, 5, H, window=window, **more).windows

    assert windows(None) == [None] * 5
    assert windows(7) == [7] * 5
    assert windows((3, 9), window_pattern="SSL") == [3, 3, 9, 3, 3]
    assert windows([1, None, 3, 4, 5]) == [1, None, 3, 4, 5]
    assert windows((4, None), window_pattern="SL") == [4, None, 4, None, 4]


def test_graphs_show_what_every_block_sees():
    model = model_of("krause-consensus", window=6)
    expected = [ga.causal_window_graph(20, 6)] * 2 + [ga.causal_window_graph(20, 3)] * 2
    assert model.graphs(20) == expected
    tokens = tokens_of(2, 20)
    assert torch.equal(model(tokens, expected), model(tokens))
    everything = model(tokens, ga.causal_graph(20))  # one for all, as it is given
    assert not torch.allclose(everything, model(tokens))


# Batches.


@EVERY_MIXER
def test_packed_texts_give_what_they_give_alone(mixer):
    model, lengths = model_of(mixer), (5, 1, 9)
    tokens = tokens_of(2, sum(lengths))
    packed = model(tokens, model.graphs(lengths)).split(lengths, 1)
    for text, logits in zip(tokens.split(lengths, 1), packed, strict=True):
        torch.testing.assert_close(logits, model(text), **CLOSE)


@EVERY_MIXER
def test_padding_on_either_side_changes_nothing(mixer):
    model, lengths = model_of(mixer), torch.tensor([[9], [4], [1]])
    right = torch.arange(9) < lengths
    left = right.flip(-1)
    texts = [tokens_of(int(n), seed=int(n)) for n in lengths]
    for valid in (right, left):
        positions = (torch.arange(9) - (valid.int().argmax(-1, keepdim=True))).clamp_min(0)
        by_filler = []
        for filler in (0, -100, 10**6):
            tokens = torch.full((3, 9), filler)
            tokens[valid] = torch.cat(texts)
            by_filler.append(model(tokens, valid=valid, positions=positions)[valid])
        assert all(torch.equal(by_filler[0], other) for other in by_filler[1:])
        torch.testing.assert_close(by_filler[0], torch.cat([model(t) for t in texts]), **CLOSE)


# Training.


def test_drop_path_grows_over_the_blocks_and_acts_in_training_alone():
    model, tokens = model_of(drop_path=0.3, dropout=0.1), tokens_of(2, 9)
    shares = [block.drop_path for block in model.blocks]
    assert shares == pytest.approx([0.0, 0.1, 0.2, 0.3])
    assert model_of(depth=1, drop_path=0.3).blocks[0].drop_path == 0.3
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


# Tied weights, files, copies.


def is_tied(model):
    return model.head.weight is model.embedding.weight


def test_tied_weights_stay_tied(tmp_path):
    model, tokens = model_of("gka", tie_weights=True), tokens_of(2, 9)
    expected = model(tokens)
    untied = model_of("gka")
    assert is_tied(model)
    assert not is_tied(untied)
    assert untied.num_parameters() - model.num_parameters() == V * D
    ga.save(model, tmp_path)
    other = model_of("gka", tie_weights=True)
    other.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    twins = [
        ga.load(tmp_path),
        ga.models.CausalLM.from_pretrained(tmp_path),
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        model.float().double(),
        other,
        model_of("gka", tie_weights=True).to("meta").to_empty(device="cpu"),
    ]
    twins[-1].load_state_dict(model.state_dict())
    for twin in twins:
        assert is_tied(twin)
        torch.testing.assert_close(twin(tokens), expected, rtol=1e-5, atol=1e-5)
        with torch.no_grad():
            twin.embedding.weight[3] += 1
        assert torch.equal(twin.head.weight, twin.embedding.weight)
        twin.reset_parameters()
        assert is_tied(twin)
        assert 0.01 < twin.embedding.weight.std() < 0.04


def test_tied_weights_are_one_on_every_device():
    """Before weights are loaded, too: on the device "meta", and where they are still to come."""
    model = model_of("gka", tie_weights=True)
    count = model.num_parameters()
    for move in (lambda: model.to("meta"), lambda: model.to_empty(device="cpu")):
        move()
        assert is_tied(model)
        assert model.num_parameters() == count
    both = torch.nn.ModuleDict({"model": model}).to("meta").to_empty(device="cpu")
    assert is_tied(both["model"])


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("strict", [False, True])
def test_two_weights_do_not_become_one_in_silence(assign, strict):
    """The numbers alone, without the config that would refuse them."""
    two, one = model_of("gka"), model_of("gka", tie_weights=True)
    state = {name: x.clone() for name, x in two.state_dict().items()}
    says = (
        r"head.weight must be equal to embedding.weight .* tie_weights=True, "
        "got two different weights"
    )
    with pytest.raises(RuntimeError, match=says):
        one.load_state_dict(state, strict=strict, assign=assign)
    state["head.weight"] = state["embedding.weight"].clone()
    state["head.weight"][0, 0] = state["embedding.weight"][0, 0] = torch.nan  # the same again
    one.load_state_dict(state, strict=strict, assign=assign)
    assert is_tied(one)
    both = torch.nn.ModuleDict({"model": model_of("gka", tie_weights=True)})
    within = {f"model.{name}": x.clone() for name, x in two.state_dict().items()}
    with pytest.raises(
        RuntimeError, match=r"model\.head\.weight must be equal to model\.embedding"
    ):
        both.load_state_dict(within)


def test_weights_of_other_windows_are_refused_however_they_are_said():
    model = model_of("mix", window=(4, 4), window_pattern="SL")
    model_of("mix", window=4).load_state_dict(model.state_dict())
    model_of("mix", window=[4, 4, None, None]).load_state_dict(model.state_dict())
    for other in ({"window": 5}, {"window": 4, "consensus_window": 4}):
        with pytest.raises(RuntimeError, match="saved with window="):
            model_of("mix", **other).load_state_dict(model.state_dict())
    with pytest.raises(RuntimeError, match="saved with logit_softcap=None, but this one has"):
        model_of("mix", window=4, logit_softcap=5.0).load_state_dict(model.state_dict())


# Presets.


def preset(name, **changes):
    with torch.device("meta"):
        return ga.models.CausalLM.from_preset(name, **changes)


def test_the_language_models_of_the_gka_paper_have_its_parameters():
    """Table 8: 378 M, and 896 M, of which 419.4 M are value embeddings."""
    block = 1280**2 + 8 * 1280**2  # output projection and perceptron
    ends = 2 * 32_768 * 1280
    gka, dot = preset("gka-d20"), preset("nanochat-d20")
    assert gka.num_parameters() == 20 * (block + 10) + ends == 378_798_280
    plain = preset("nanochat-d20", value_embeddings=False)
    assert plain.num_parameters() == 20 * (block + 3 * 1280**2) + ends == 477_102_080
    tables, gates = 10 * 32_768 * 1280, 10 * 32 * 10
    assert dot.num_parameters() == plain.num_parameters() + tables + gates == 896_535_680
    assert (dot.blocks[0].mixer.qk_norm, dot.logit_softcap) == (True, 15)
    assert [i for i, block in enumerate(dot.blocks) if block.mixer.embeds_values][:3] == [1, 3, 5]
    assert gka.windows == dot.windows == 5 * [1024, 1024, 1024, 2048]
    mixer = gka.blocks[0].mixer
    assert (mixer.normalize, mixer.heads, mixer.rotary is not None) == (True, 10, True)
    assert not is_tied(gka)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "weights", "formula", "paper", "exact"),
    [
        ("gka-d20", 9 * 20 * 1280**2, 2.41435e9, 2.4143e9, 2.277e9),
        ("nanochat-d20", 12 * 20 * 1280**2 + 10 * 32 * 10, 3.00419e9, 3.0042e9, 2.867e9),
    ],
)
def test_training_operations_are_those_of_the_gka_paper(name, weights, formula, paper, exact):
    counted = ga.diagnostics.training_operations(preset(name), 2048)
    assert counted.by_formula == pytest.approx(formula, rel=1e-5)
    assert counted.by_formula == pytest.approx(paper, rel=1e-4)
    assert counted.exact == pytest.approx(exact, rel=1e-3)
    # By hand: edges of a window W over N tokens are those of a triangle and of full rows behind it.
    N = 2048
    edges = sum(W * (W + 1) / 2 + (N - W) * W for W in 5 * [1024, 1024, 1024, 2048])
    by_hand = 6 * (weights + 32_768 * 1280) + 12 * 1280 * edges / N
    assert counted.exact == pytest.approx(by_hand, rel=1e-9)


@pytest.mark.long
def test_operations_of_texts_shorter_than_a_window():
    model = preset("gka-d20")
    assert ga.diagnostics.training_operations(model, 1).exact == pytest.approx(
        ga.diagnostics.training_operations(model, 1).by_formula
    )
    with pytest.raises(ValueError, match="model must have no consensus layers"):
        ga.diagnostics.training_operations(model_of("mix"), 5)
    with pytest.raises(ValueError, match="model must be a CausalLM, got Linear"):
        ga.diagnostics.training_operations(torch.nn.Linear(2, 2), 5)


@pytest.mark.parametrize(
    ("name", "tokens", "dim", "depth", "window", "top_k"),
    [("krause-mnist", 784, 256, 12, 128, 96), ("krause-cifar10", 3072, 512, 16, 256, 192)],
)
def test_the_image_models_of_the_krause_paper_are_those_of_the_authors_code(
    name, tokens, dim, depth, window, top_k
):
    model = preset(name)
    assert (model.vocab_size, model.embedding.embedding_dim) == (256, dim)
    assert model.windows == [window] * depth
    for block in model.blocks:
        mixer = block.mixer
        assert (mixer.top_k, mixer.init_sigma, mixer.rotary) == (top_k, 2.5, None)
        assert (block.dropout.p, mixer.attention_dropout) == (0.1, 0.1)
    # Tokens, positions, and per block: four projections and a perceptron with biases, two norms
    # and one bandwidth per head; a norm and a head at the end. Their head has a bias of 256.
    block = 4 * (dim + 1) * dim + (dim + 1) * 4 * dim + (4 * dim + 1) * dim + 4 * dim + 8
    theirs = 256 * dim + tokens * dim + depth * block + 2 * dim + 256 * dim + 256
    assert model.num_parameters() == theirs - 256


def test_the_language_model_of_the_krause_paper_is_that_of_the_authors_code():
    model, d, hidden = preset("krause-lm-100m"), 768, 2048
    attention = 8 * (d * d + d) + 12 + 2 * (2 * d) + 2  # two branches, sigmas, gate
    block = attention + 2 * d * hidden + hidden + d + 2 * (2 * d)  # perceptron and norms
    embeddings = 50_257 * d + 1024 * d
    assert model.num_parameters() == embeddings + 8 * block + 2 * d == 102_420_848
    assert model.windows == [None] * 8
    assert is_tied(model)
    for block in model.blocks:
        mixer = block.mixer
        assert (mixer.krause_window, mixer.krause.top_k, mixer.krause.init_sigma) == (32, 16, 2.5)
        assert (mixer.dot.rotary, mixer.dot.top_k, mixer.heads) == (None, None, 12)


@pytest.mark.parametrize(("name", "vocab"), [("text-1m", 256), ("dna-1m", 5)])
def test_small_presets_have_a_million_parameters_and_write(name, vocab):
    model = ga.models.CausalLM.from_preset(name)
    assert model.vocab_size == vocab
    assert model.num_parameters() == pytest.approx(1e6, rel=0.05)
    assert model.generate(torch.tensor([1, 2, 3]), 4).shape == (7,)


@EVERY_MIXER
def test_every_preset_takes_every_mixer(mixer):
    names = [name for name, entry in ga.models.presets().items() if entry.model == "CausalLM"]
    assert len(names) >= 6
    for name in names:
        assert preset(name, mixer=mixer, depth=2).config["mixer"] == mixer


# What is refused.


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"window": 0}, "window must be >= 1, got 0"),
        ({"window": [3, 4]}, r"window must be .* per block \(4\), got \[3, 4\]; .* window_pattern"),
        ({"window": 7, "window_pattern": "SL"}, r"window must be a pair .* got 7"),
        (
            {"window": (3, 9), "window_pattern": "SX"},
            "window_pattern must be a string of the letters S .* 'SX'",
        ),
        (
            {"window": (3, 9), "window_pattern": ""},
            "window_pattern must be a string of the letters S",
        ),
        ({"mixer": "dot-window"}, r"window must be a number of keys .*'dot-window' \(block 0\)"),
        (
            {"mixer": "mix", "window": [3, 3, 3, 3]},
            "window must be None for block 2, because a consensus",
        ),
        ({"consensus_window": 0}, "consensus_window must be >= 1"),
        ({"mixer": "consensus", "mixer_options": {"update": "energy"}}, "update must be 'target'"),
        ({"rope": "yes"}, "rope must be True, False or 'isometric'"),
        ({"norm": "batch"}, "norm must be one of 'layer', 'rms'"),
        ({"activation": "relu"}, "activation must be one of 'gelu', 'relu2'"),
        ({"logit_softcap": 0}, "logit_softcap must be a finite number > 0"),
        ({"logit_softcap": 1e39}, "logit_softcap must be a number of float32"),
        ({"heads": 2.0}, "heads must be an integer >= 1, got 2.0"),
        ({"heads": None}, "heads must be an integer >= 1, got None"),
        ({"heads": [4]}, r"heads must be one number, or one per block \(4\), got 1"),
        ({"mixer_options": ["top_k", 3]}, "mixer_options must be a dict .*, or None, got list"),
        ({"drop_path": 1.0}, "drop_path must be"),
        ({"dropout": 1.0}, "dropout must be"),
        ({"vocab_size": 0}, "vocab_size must be >= 1"),
        ({"depth": 0}, "depth must be >= 1"),
    ],
)
def test_what_does_not_fit_is_refused(given, says):
    arguments = {"vocab_size": V, "dim": D, "depth": DEPTH, "heads": H, **given}
    with pytest.raises(ValueError, match=says):
        ga.models.CausalLM(**arguments)


def test_a_layer_that_moves_earlier_tokens_is_refused():
    leaks = ga.nn.SelfConsensus(D, H, edge_hidden=4)
    with pytest.raises(ValueError, match=r"SelfConsensus\(update='energy'\) in block 1"):
        ga.models.CausalLM(V, D, 2, H, mixer=["dot", leaks])
    fine = ga.nn.SelfConsensus(D, H, edge_hidden=4, update="target")
    assert ga.models.CausalLM(V, D, 2, H, mixer=["dot", fine]).windows == [None, 3]


def test_layers_of_all_kinds_in_one_model_by_module():
    layers = [ga.nn.KrauseAttention(D, H, top_k=3, kv_heads=2, rope=True), "gka", "consensus"]
    model = ga.models.CausalLM(V, D, 3, H, mixer=layers, window=7).double()
    assert model.windows == [7, 7, 3]
    cache, tokens = model.init_cache(2), tokens_of(2, 20)
    torch.testing.assert_close(model.step(tokens, cache), model(tokens), **CLOSE)
    other = model.init_cache(2, 2)  # windows of one's own
    torch.testing.assert_close(
        model.step(tokens, other), model(tokens, ga.causal_window_graph(20, 2)), **CLOSE
    )


def test_krause_without_a_window_chooses_among_all_tokens_before():
    torch.manual_seed(0)
    model = ga.models.CausalLM(11, 16, 2, 2, mixer="krause", mixer_options={"top_k": 3}).double()
    tokens = torch.randint(11, (1, 20))
    everything = ga.causal_graph(20)
    assert model.graphs(20) == [everything] * 2
    whole = model(tokens)
    torch.testing.assert_close(whole[:, :12], model(tokens[:, :12]), rtol=0, atol=1e-12)
    text = model.generate(tokens[:, :5], 15)
    assert torch.equal(model(text)[:, 4:-1].argmax(-1), text[:, 5:])
