"""Names that people bring from torch, timm, Hugging Face and PyG are answered with ours."""

import pytest
import torch
from nn_by_hand import DIM, HEADS

import graphattn as ga

nn = ga.nn
LAYERS = ("DotProductAttention", "KrauseAttention", "GaussianKernelAttention",
          "SelfConsensus", "CrossConsensus")  # fmt: skip


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("num_heads", "'num_heads': here it is called 'heads'"),
        ("n_head", "'n_head': here it is called 'heads'"),
        ("num_attention_heads", "here it is called 'heads'"),
        ("embed_dim", "here it is called 'dim'"),
        ("d_model", "here it is called 'dim'"),
        ("hidden_size", "here it is called 'dim'"),
        ("in_channels", "here it is called 'dim' (output and input have one width)"),
        ("batch_first", "always batch first"),
        ("qkv_bias", "here it is called 'bias'"),
        ("rotary", "here it is called 'rope'"),
        ("is_causal", "ga.causal_graph(N)"),
        ("window_size", "ga.causal_window_graph(N, window)"),
        ("max_seq_len", "no length is fixed"),
        ("key_padding_mask", "valid=~key_padding_mask"),
        ("attn_mask", "ga.from_mask(mask)"),
        ("device", "layer.to(device)"),
        ("head_dim", "dim / heads"),
        ("valid", "it is an argument of the call"),
        ("position_ids", "it is called 'positions', an argument of the call"),
        ("backnd", "did you mean 'backend'?"),
        ("zzz", "nothing here is called so"),
    ],
)
def test_a_constructor_answers_foreign_names(kind, name, says):
    with pytest.raises(TypeError) as caught:
        getattr(nn, kind)(DIM, HEADS, **{name: None})
    assert says in str(caught.value)
    assert f"{kind}(...) has no argument {name!r}" in str(caught.value)
    assert "It takes dim, heads, " in str(caught.value)


def test_all_unknown_names_are_answered_at_once():
    with pytest.raises(TypeError) as caught:
        nn.KrauseAttention(embed_dim=DIM, num_heads=HEADS, num_key_value_heads=2)
    for says in ("'embed_dim': here it is called 'dim'", "'num_heads'", "called 'kv_heads'"):
        assert says in str(caught.value)


X = torch.randn(2, 9, DIM)
GRAPH = ga.window_path_graph(9, 2)
CALLS = {
    "DotProductAttention": lambda **k: nn.DotProductAttention(DIM, HEADS)(X, GRAPH, **k),
    "KrauseAttention": lambda **k: nn.KrauseAttention(DIM, HEADS)(X, GRAPH, **k),
    "GaussianKernelAttention": lambda **k: nn.GaussianKernelAttention(DIM, HEADS)(X, GRAPH, **k),
    "SelfConsensus": lambda **k: nn.SelfConsensus(DIM, HEADS, edge_hidden=8)(X, GRAPH, **k),
    "CrossConsensus": lambda **k: nn.CrossConsensus(DIM, HEADS, edge_hidden=8)(X, GRAPH, X, **k),
    "PreNormBlock": lambda **k: nn.PreNormBlock(nn.KrauseAttention(DIM, HEADS))(X, GRAPH, **k),
    "SequenceEncoder": lambda **k: ga.models.SequenceEncoder(9, DIM, 1, HEADS)(
        torch.zeros(2, 9, dtype=torch.long), **k
    ),
}


@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("key_padding_mask", "valid=~key_padding_mask (valid is True where a token is real"),
        ("src_key_padding_mask", "valid=~src_key_padding_mask"),
        ("attn_mask", "True where a token may look"),
        ("attention_mask", "valid=attention_mask.bool()"),
        ("is_causal", "ga.causal_graph(N)"),
        ("position_ids", "here it is called 'positions'"),
        ("edge_index", "here it is called 'graph'"),
        ("past_key_values", "layer.init_cache(batch, window)"),
        ("posisions", "did you mean 'positions'?"),
    ],
)
def test_a_call_answers_foreign_names(kind, name, says):
    with pytest.raises(TypeError) as caught:
        CALLS[kind](**{name: None})
    assert says in str(caught.value)
    assert f"the call of {kind} has no argument {name!r}" in str(caught.value)


TAKE_FEATURES = ("SelfConsensus", "CrossConsensus", "PreNormBlock", "SequenceEncoder")


@pytest.mark.parametrize("kind", CALLS)
def test_what_pyg_says_of_edges_is_answered(kind):
    """Consensus sees features of edges; attention takes what a projection makes of them."""
    takes = kind in TAKE_FEATURES
    with pytest.raises(TypeError) as caught:
        CALLS[kind](edge_attr=None)
    says = "here it is called 'edge_features'" if takes else "ga.nn.EdgeProjection(features, heads)"
    assert "no argument 'edge_attr'" in str(caught.value)
    assert says in str(caught.value)
    if kind in LAYERS:
        with pytest.raises(TypeError) as caught:
            getattr(nn, kind)(DIM, HEADS, edge_dim=3)
        assert says in str(caught.value)


def test_a_call_names_what_belongs_to_the_constructor():
    with pytest.raises(TypeError, match="'top_k': it is an argument of the constructor"):
        CALLS["KrauseAttention"](top_k=3)
    with pytest.raises(TypeError, match="called 'return_attention_weights'"):
        CALLS["KrauseAttention"](need_weights=True)
    with pytest.raises(TypeError, match="called 'tokens'"):
        CALLS["SequenceEncoder"](input_ids=X)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("num_layers", "here it is called 'depth'"),
        ("num_hidden_layers", "here it is called 'depth'"),
        ("nhead", "here it is called 'heads'"),
        ("hidden_dropout_prob", "here it is called 'dropout'"),
        ("attention_dropout", "mixer_options={'attention_dropout': ...}"),
        ("dim_feedforward", "mlp_ratio"),
        ("hidden_act", "activation='gelu' or 'relu2'"),
        ("norm_first", "PreNormBlock normalises first, PostNormBlock last"),
    ],
)
def test_a_model_answers_foreign_names(name, says):
    with pytest.raises(TypeError) as caught:
        ga.models.SequenceEncoder(9, DIM, 1, HEADS, **{name: 1})
    assert says in str(caught.value)


def test_a_block_and_a_rotation_answer_too():
    layer = nn.KrauseAttention(DIM, HEADS)
    with pytest.raises(TypeError, match="called 'mixer'"):
        nn.PreNormBlock(attention=layer)
    with pytest.raises(TypeError, match="called 'base'"):
        nn.RotaryEmbedding(4, theta=500.0)
    with pytest.raises(TypeError, match="called 'dim'"):
        nn.RotaryEmbedding(head_dim=4)


def test_a_missing_argument_of_a_constructor_is_told_as_python_tells_it():
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'heads'"):
        nn.KrauseAttention(DIM)


CALLED = {
    **{kind: lambda kind=kind: getattr(nn, kind)(DIM, HEADS) for kind in LAYERS},
    "PreNormBlock": lambda: nn.PreNormBlock(nn.KrauseAttention(DIM, HEADS)),
}


@pytest.mark.parametrize("name", CALLED)
def test_a_call_without_a_graph_says_what_makes_one(name):
    layer = CALLED[name]()
    for arguments in ({"x": X}, {"x": X, "valid": None}):
        with pytest.raises(TypeError) as caught:
            layer(**arguments)
        assert (
            f"the call of {name} needs a graph as its second argument, for instance "
            "ga.causal_graph(x.shape[-2])"
        ) in str(caught.value)
    with pytest.raises(TypeError, match="needs a graph as its second argument"):
        layer(X)


def test_a_bias_without_a_graph_says_so_too():
    with pytest.raises(TypeError, match=r"first argument, .* ga\.causal_graph\(num_tokens\)"):
        nn.OffsetBias(HEADS, 2)()
    with pytest.raises(TypeError, match="DistanceBias needs a graph as its second argument"):
        nn.DistanceBias(HEADS)(X[0, :, :3])


def test_caches_and_generation_are_told_the_nearest_name_too():
    model = ga.models.CausalLM(9, DIM, depth=1, heads=HEADS)
    layer = nn.DotProductAttention(DIM, HEADS)
    for call, words in (
        (lambda: layer.init_cache(2, windw=3), "did you mean 'window'"),
        (lambda: nn.PreNormBlock(layer).init_cache(2, window_size=3), "did you mean 'window'"),
        (lambda: nn.LinearAttention(DIM, HEADS).init_cache(2, rollbck=3), "'rollback'"),
        (lambda: model.init_cache(2, windows=3), "did you mean 'window'"),
        (lambda: model.generate(torch.ones(1, 2).long(), max_tokens=3), "'max_new_tokens'"),
    ):
        with pytest.raises(TypeError, match=words):
            call()


def test_a_call_without_a_context_names_it():
    layer = nn.CrossConsensus(DIM, HEADS)
    for graph in (GRAPH, GRAPH.edge_index):
        with pytest.raises(TypeError, match="CrossConsensus needs the argument 'context'"):
            layer(X, graph)
    with pytest.raises(TypeError, match=r"a graph as its second .*, and the argument 'context'"):
        layer(X)


@pytest.mark.parametrize("name", CALLED)
def test_what_is_no_graph_is_told_how_it_becomes_one(name):
    layer, N = CALLED[name](), X.shape[-2]
    more = (X,) if name == "CrossConsensus" else ()
    sees = torch.ones(N, N).tril()
    for given, words in (
        (None, "got NoneType: make one, for instance graphattn.causal_graph(9)"),
        (N, "got int: make one"),
        (sees.bool(), "use graphattn.from_mask(mask)"),
        (sees.log(), "use graphattn.from_mask(mask == 0)"),
        (sees.long(), "use graphattn.from_mask(mask.bool())"),
        (torch.ones(2, N - 1).bool(), "a mask of padding [batch, N] is the argument valid="),
        (X, "other tensors come after the graph"),
        (sees.numpy(), "from_numpy"),
    ):
        with pytest.raises(ValueError, match="graph must be a TokenGraph") as caught:
            layer(X, given, *more)
        assert words in str(caught.value)
    for mask in (sees.bool(), sees.log() == 0, sees.long().bool()):  # as the messages say
        assert ga.from_mask(mask) == ga.causal_graph(N)


def test_a_graph_and_tokens_in_the_wrong_order_are_told():
    for layer in (nn.KrauseAttention(DIM, HEADS), CALLED["PreNormBlock"]()):
        with pytest.raises(ValueError, match=r"x must be a tensor .* got TokenGraph"):
            layer(GRAPH, X)


def test_a_subclass_of_one_s_own_keeps_its_arguments():
    class Scaled(nn.KrauseAttention):
        def __init__(self, *args, num_layers=1, **kwargs):
            super().__init__(*args, **kwargs)
            self.num_layers = num_layers

        def forward(self, x, graph, scale=1.0, **kwargs):
            return scale * super().forward(x, graph, **kwargs)

    layer = Scaled(DIM, heads=HEADS, num_layers=2)
    assert torch.equal(layer(X, GRAPH, scale=2.0), 2 * layer(X, GRAPH))
    with pytest.raises(TypeError, match="called 'heads'"):
        Scaled(DIM, num_heads=HEADS)
    with pytest.raises(TypeError, match="valid=~key_padding_mask"):
        layer(X, GRAPH, key_padding_mask=None)


def test_a_warning_of_a_call_points_to_the_line_that_calls():
    layer = nn.SelfConsensus(DIM, HEADS, edge_hidden=8)
    backward = torch.tensor([[0, 1], [1, 2]])  # every edge points to a later token
    with pytest.warns(UserWarning, match="target") as caught:
        layer(torch.randn(9, DIM), backward)
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.parametrize("name", ["dropout", "attn_drop", "attention_probs_dropout_prob"])
def test_dropout_of_weights_has_one_name(name):
    for kind in LAYERS:
        says = "no weights to drop" if "Consensus" in kind else "called 'attention_dropout'"
        with pytest.raises(TypeError, match=says):
            getattr(nn, kind)(DIM, HEADS, **{name: 0.1})


@pytest.mark.parametrize(
    ("name", "ours"), [("s_aux", "sink"), ("attn_logit_softcapping", "softcap")]
)
def test_names_of_gpt_oss_and_gemma_are_answered(name, ours):
    with pytest.raises(TypeError, match=f"here it is called '{ours}'"):
        nn.DotProductAttention(DIM, HEADS, **{name: 1.0})


MODELS = {
    "CausalLM": lambda **k: ga.models.CausalLM(9, 8, 1, 2, **k),
    "SequenceEncoder": lambda **k: ga.models.SequenceEncoder(9, 8, 1, 2, **k),
    "VisionTransformer": lambda **k: ga.models.VisionTransformer(8, 2, 10, 8, 1, 2, **k),
    "SwinTransformer": lambda **k: ga.models.SwinTransformer(8, 2, 10, 8, (1,), (2,), **k),
}


@pytest.mark.parametrize(
    ("model", "name", "says"),
    [
        ("CausalLM", "top_k", "'dot+krause': mixer_options={'top_k': ...}"),
        ("CausalLM", "topk", "'dot+krause': mixer_options={'top_k': ...}"),
        ("CausalLM", "edge_hidden", "option of 'consensus': mixer_options={'edge_hidden': ...}"),
        ("CausalLM", "attn_dropout", "mixer_options={'attention_dropout': ...}"),
        ("CausalLM", "noise_dim", "it is an argument of SequenceEncoder"),
        ("CausalLM", "sliding_window", "here it is called 'window'"),
        ("CausalLM", "mixr", "did you mean 'mixer'? It takes"),
        ("SequenceEncoder", "consensus_window", "it is an argument of CausalLM"),
        ("SequenceEncoder", "init_sigma", "mixer_options={'init_sigma': ...}"),
        ("VisionTransformer", "window", "here it is called 'radius' (patches on each side"),
        ("VisionTransformer", "window_size", "here it is called 'radius'"),
        ("SwinTransformer", "window", "here it is called 'window_size'"),
    ],
)
def test_a_model_answers_options_of_its_mixers_and_arguments_of_others(model, name, says):
    with pytest.raises(TypeError) as caught:
        MODELS[model](**{name: 1})
    assert says in str(caught.value)


def test_what_is_advised_for_a_mixer_is_taken():
    assert MODELS["CausalLM"](mixer="krause", mixer_options={"top_k": 4}).blocks[0].mixer.top_k == 4
    assert MODELS["VisionTransformer"](mixer="dot-window", radius=1).graphs()[0].num_edges < 17 * 17


def test_the_call_of_a_vision_model_knows_pixel_values():
    with pytest.raises(TypeError, match="'pixel_values': here it is called 'images'"):
        MODELS["VisionTransformer"]()(pixel_values=torch.zeros(1, 3, 8, 8))
