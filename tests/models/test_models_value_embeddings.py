"""Value embeddings of language models, as nanochat has them: mathematics, calls and files."""

import copy
import pickle

import pytest
import torch

import graphattn as ga

V, D, H, DEPTH = 11, 40, 4, 4
MIXERS = pytest.mark.parametrize("mixer", ["dot", "dot-window", "krause"])


def model_of(mixer="dot", depth=DEPTH, **options):
    """A model in which every gate and table differs from its start."""
    torch.manual_seed(0)
    window = {} if mixer == "dot" else {"window": 5}
    options = {"value_embeddings": True, **window, **options}
    model = ga.models.CausalLM(V, D, depth, H, mixer=mixer, **options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.double().eval()


def tokens_of(*shape):
    return torch.randint(V, shape, generator=torch.Generator().manual_seed(1))


def attention_by_hand(layer, x, tokens, window):
    """The output of every token, one by one: nanochat's formula and softmax over a causal window.

    The layer has no rotary positions.
    """
    Hk, width = layer.kv_heads, layer.head_dim
    query = layer.query_proj(x).view(-1, H, width)
    key = layer.key_proj(x).view(-1, Hk, width)
    value = layer.value_proj(x).view(-1, Hk, width)
    if "value_embedding" in layer._modules:
        table = layer.value_embedding.table.weight.view(V, Hk, width)
        gate = layer.value_embedding.gate.weight
        value = value.clone()
        for j, token in enumerate(tokens.tolist()):
            for h in range(Hk):
                opened = 2 / (1 + torch.exp(-(gate[h] * x[j, :32]).sum()))
                value[j, h] += opened * table[token, h]
    out = torch.zeros_like(query)
    for i in range(len(x)):
        seen = list(range(0 if window is None else max(0, i - window + 1), i + 1))
        for h in range(H):
            g = h // (H // Hk)
            if isinstance(layer, ga.nn.KrauseAttention):
                distance = (query[i, h] - key[seen, g]).square().sum(-1)
                logits = -distance / (2 * layer.log_sigma[h].exp() ** 2)
            else:
                logits = key[seen, g] @ query[i, h] / width**0.5
            out[i, h] = logits.softmax(0) @ value[seen, g]
    return layer.output_proj(out.flatten(1))


@MIXERS
def test_a_model_with_value_embeddings_is_nanochats_formula(mixer):
    model = model_of(mixer, positions=None, mixer_options={"kv_heads": 2})
    tokens = tokens_of(9)
    x = model.embedding.weight[tokens]
    for block, window in zip(model.blocks, model.windows, strict=True):
        x = x + attention_by_hand(block.mixer, block.mixer_norm(x), tokens, window)
        x = x + block.mlp(block.mlp_norm(x))
    torch.testing.assert_close(model(tokens), model.head(model.norm(x)))


@pytest.mark.parametrize("depth", [1, 2, 5, 6])
def test_the_last_block_and_every_second_one_before_it_have_them(depth):
    model = model_of(depth=depth, mixer_options={"kv_heads": 2})
    having = [i for i, block in enumerate(model.blocks) if block.mixer.embeds_values]
    assert having == list(range(depth - 1, -1, -2))[::-1]
    plain = ga.models.CausalLM(V, D, depth, H, mixer_options={"kv_heads": 2})
    by_hand = len(having) * (V * 2 * D // H + 32 * 2)
    assert model.num_parameters() - plain.num_parameters() == by_hand


def test_they_start_as_in_nanochat():
    """A uniform table with the deviation of the projections, 1 / sqrt(dim); gates of 1."""
    torch.manual_seed(0)
    model = ga.models.CausalLM(400, D, 2, H, value_embeddings=True)
    made = model.blocks[1].mixer.value_embedding
    for _ in range(2):
        table = made.table.weight
        assert table.std().item() == pytest.approx(D**-0.5, rel=0.02)
        assert (3 / D) ** 0.5 >= table.abs().max() > 0.99 * (3 / D) ** 0.5
        x, tokens = torch.randn(6, D), torch.arange(6)
        added = made(torch.zeros(6, H, D // H), x, tokens)
        torch.testing.assert_close(added.flatten(1), table[:6])
        before = table.clone()
        with torch.no_grad():
            made.gate.weight.add_(1)
        model.reset_parameters()
        assert not torch.equal(before, made.table.weight)


@MIXERS
@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_generation_adds_the_embeddings_of_forward(mixer, positions):
    learned = {"positions": "learned", "num_positions": 30} if positions == "learned" else {}
    model, prompt = model_of(mixer, **learned), tokens_of(2, 5)
    text = model.generate(prompt, 12)
    for end in range(5, 17):
        assert torch.equal(model(text[:, :end])[:, -1].argmax(-1), text[:, end])
    cache = model.init_cache(2)
    steps = [model.step(text[:, :7], cache)]
    steps += [model.step(text[:, i], cache)[:, None] for i in range(7, 17)]
    torch.testing.assert_close(torch.cat(steps, dim=1), model(text))
    draft = model_of(mixer, depth=1, **learned)
    assert torch.equal(model.generate(prompt, 12, draft=draft, draft_tokens=3), text)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_by_compiled_code_do_not_leave_them_out(dtype):
    """Blocks without padding usually run a step as one call of C++ code."""
    model = model_of(window=6).to(dtype)
    text, cache = tokens_of(2, 12), model.init_cache(2)
    assert model._runs(cache) is None
    steps = torch.stack([model.step(text[:, i], cache) for i in range(12)], dim=1)
    tolerance = 1e-4 if dtype is torch.float32 else 0.1
    torch.testing.assert_close(steps, model(text), rtol=tolerance, atol=tolerance)


def test_prompts_padded_on_the_left_go_on_as_alone():
    model, tokens = model_of(), tokens_of(2, 6)
    valid = torch.tensor([[False, False, True, True, True, True], [True] * 6])
    text = model.generate(tokens, 8, valid=valid)
    assert torch.equal(text[0, 2:], model.generate(tokens[:1, 2:], 8)[0])
    assert torch.equal(text[1], model.generate(tokens[1:], 8)[0])
    padded = model(tokens.masked_fill(~valid, -7), valid=valid)
    torch.testing.assert_close(padded[0, 2:], model(tokens[0, 2:]))


def test_packed_texts_and_rows_of_texts_are_the_texts_alone():
    model, first, second = model_of(window=3), tokens_of(7), tokens_of(12).flip(0)
    alone = torch.cat([model(first), model(second)])
    torch.testing.assert_close(model(torch.cat([first, second]), model.graphs([7, 12])), alone)
    rows = torch.stack([first, second[:7]])  # one graph of both rows
    torch.testing.assert_close(model(rows, model.graphs([7, 7])), model(rows))


@MIXERS
def test_gradients_are_those_of_differences(mixer):
    model, tokens = model_of(mixer, depth=1), tokens_of(2, 6)
    made = model.blocks[0].mixer.value_embedding
    for parameter in (made.table.weight, made.gate.weight):
        (gradient,) = torch.autograd.grad(model(tokens).square().mean(), parameter)
        direction, step = torch.randn_like(parameter), 1e-6
        with torch.no_grad():
            parameter.add_(step * direction)
            above = model(tokens).square().mean()
            parameter.sub_(2 * step * direction)
            below = model(tokens).square().mean()
            parameter.add_(step * direction)
        slope = (above - below) / (2 * step)
        torch.testing.assert_close((gradient * direction).sum(), slope, rtol=1e-5, atol=1e-9)


def test_checkpointed_gradients_and_the_reference_backend_agree():
    tokens = tokens_of(2, 8)

    def gradients(model):
        model(tokens).square().mean().backward()
        return [p.grad for p in model.parameters()]

    expected = gradients(model_of("krause").train())
    checkpointed = model_of("krause").train()
    checkpointed.gradient_checkpointing_enable()
    torch.testing.assert_close(gradients(checkpointed), expected)
    by_edge = model_of("krause", mixer_options={"backend": "reference"}).train()
    torch.testing.assert_close(gradients(by_edge), expected)


def test_copies_and_files_have_them(tmp_path):
    model, tokens = model_of("krause", mixer_options={"top_k": 3}), tokens_of(2, 9)
    expected = model(tokens)
    model.save_pretrained(tmp_path)
    loaded = ga.models.CausalLM.from_pretrained(tmp_path)
    assert loaded.config["value_embeddings"] is True
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), loaded):
        assert torch.equal(other(tokens), expected)
    with pytest.raises(RuntimeError, match="Unexpected key"):
        model_of("krause", mixer_options={"top_k": 3}, value_embeddings=False).load_state_dict(
            model.state_dict()
        )
    decaying, _ = ga.train.parameter_groups(model)
    tables = [b.mixer.value_embedding.table.weight for b in model.blocks if b.mixer.embeds_values]
    assert not {id(p) for p in decaying["params"]} & {id(table) for table in tables}


def test_autocast_adds_them_in_the_dtype_of_the_values():
    model, tokens = model_of().float(), tokens_of(2, 9)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = model(tokens)
    assert (rounded.float() - model(tokens)).abs().mean() < 0.1 * model(tokens).std()


@pytest.mark.long
def test_compiled_models_add_them():
    model, tokens = model_of(window=4, depth=2), tokens_of(2, 9)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(tokens), model(tokens))
    exported = torch.export.export(model, (tokens,))
    torch.testing.assert_close(exported.module()(tokens), model(tokens))


def test_layers_of_your_own_read_the_tokens_in_every_model():
    layers = [
        ga.nn.GaussianKernelAttention(D, H),
        ga.nn.DotProductAttention(D, H, value_embeddings=V),
    ]
    tokens = tokens_of(2, 9)
    causal = ga.models.CausalLM(V, D, 2, H, mixer=layers).eval()
    encoder = ga.models.SequenceEncoder(V, D, 2, H, mixer=layers).eval()
    for model, graph in ((causal, None), (encoder, ga.causal_graph(9))):
        expected = model(tokens, graph)
        cache = model.init_cache(2)
        steps = torch.stack([model.step(tokens[:, i], cache) for i in range(9)], dim=1)
        torch.testing.assert_close(steps, expected, rtol=1e-4, atol=1e-5)
        other = copy.deepcopy(model)
        with torch.no_grad():
            other.blocks[1].mixer.value_embedding.table.weight.add_(1)
        assert not torch.allclose(other(tokens, graph), expected)
    x = torch.randn(2, 9, D)
    cross = ga.nn.DotProductAttention(D, H, context_dim=3, value_embeddings=V)
    narrow, graph = torch.randn(2, 5, 3), ga.bipartite_complete_graph(9, 5)
    assert cross(x, graph, narrow, tokens=tokens[:, :5]).shape == (2, 9, D)


def test_padding_of_a_layer_may_have_any_number():
    layer = ga.nn.DotProductAttention(D, H, value_embeddings=V)
    x, tokens = torch.randn(2, 9, D), tokens_of(2, 9)
    valid = torch.ones(2, 9, dtype=torch.bool)
    valid[1, :4] = False
    padded = tokens.masked_fill(~valid, -100)
    y = layer(x, ga.causal_graph(9), valid=valid, tokens=padded)
    alone = layer(x[1, 4:], ga.causal_graph(5), tokens=tokens[1, 4:])
    torch.testing.assert_close(y[1, 4:], alone)
    cache = layer.init_cache(2, None)
    first = layer.step(x[:, :6], cache, valid=valid[:, :6], tokens=padded[:, :6])
    rest = [layer.step(x[:, i], cache, valid=valid[:, i], tokens=padded[:, i]) for i in (6, 7, 8)]
    steps = torch.cat([first, torch.stack(rest, 1)], dim=1)
    torch.testing.assert_close(steps[valid], y[valid])


def test_no_tokens_and_no_text():
    model = model_of()
    assert model(torch.zeros(2, 0, dtype=torch.int64)).shape == (2, 0, V)
    assert model(torch.zeros(0, 3, dtype=torch.int64)).shape == (0, 3, V)


@pytest.mark.parametrize("mixer", ["vlt", "linear", "gka", "consensus", "mix"])
def test_mixers_without_values_are_refused(mixer):
    message = r"value_embeddings=True needs the mixer 'dot', 'dot-window' or 'krause' in the last"
    with pytest.raises(ValueError, match=message):
        ga.models.CausalLM(V, D, 2, H, mixer=mixer, value_embeddings=True)
    halves = ga.models.CausalLM(V, D, 2, H, mixer=["consensus", "dot"], value_embeddings=True)
    assert halves.blocks[1].mixer.embeds_values


def test_wrong_arguments_are_named():
    x, tokens, graph = torch.randn(2, 9, D), tokens_of(2, 9), ga.causal_graph(9)
    layer = ga.nn.DotProductAttention(D, H, value_embeddings=V)
    plain = ga.nn.DotProductAttention(D, H)
    with pytest.raises(ValueError, match="tokens must be given to a layer with value_embeddings"):
        layer(x, graph)
    with pytest.raises(ValueError, match="tokens must be given to a layer with value_embeddings"):
        layer.step(x[:, 0], layer.init_cache(2, None))
    with pytest.raises(ValueError, match=r"tokens must have shape \[2, 9\], got \[9\]"):
        layer(x, graph, tokens=tokens[0])
    with pytest.raises(ValueError, match=r"tokens must be an int32 or int64 tensor \[2, 9\]"):
        layer(x, graph, tokens=tokens.float())
    for wrong in (-1, V):
        some = tokens.clone()
        some[1, 4] = wrong
        with pytest.raises(ValueError, match=rf"tokens must be 0 .. {V - 1} .* got {wrong}"):
            layer(x, graph, tokens=some)
        with pytest.raises(ValueError, match=rf"tokens must be 0 .. {V - 1} .* got {wrong}"):
            layer.step(x[:, 4], layer.init_cache(2, None), tokens=some[:, 4])
    with pytest.raises(ValueError, match="tokens must be None for this DotProductAttention"):
        plain(x, graph, tokens=tokens)
    with pytest.raises(ValueError, match="tokens must be None for this DotProductAttention"):
        plain.step(x[:, 0], plain.init_cache(2, None), tokens=tokens[:, 0])
    with pytest.raises(ValueError, match="value_embeddings must be None without value_projection"):
        ga.nn.DotProductAttention(D, H, value_projection=False, value_embeddings=V)
    with pytest.raises(ValueError, match="value_embeddings must be >= 1, got 0"):
        ga.nn.KrauseAttention(D, H, value_embeddings=0)
    with pytest.raises(ValueError, match="value_embeddings must be True or False, got 50"):
        ga.models.CausalLM(V, D, 2, H, value_embeddings=50)
    with pytest.raises(ValueError, match="mixer_options must contain options of the model's mixer"):
        ga.models.CausalLM(V, D, 2, H, mixer_options={"value_embeddings": 50})
