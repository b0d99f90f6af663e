"""The Krause shortcut: what it computes, and what it may see."""

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from shortcut_oracle import (
    FAMILIES,
    layer_loop,
    left_padded,
    tiny_model,
    with_shortcut,
)

from graphattn.integrations import transformers as gat
from graphattn.integrations.transformers.shortcut.masks import ShortcutCall, dense, reach_of

IMPLEMENTATIONS = [
    "eager",
    "sdpa",
    "graphattn",
    pytest.param("flex_attention", marks=pytest.mark.long),
]


def tokens_of(batch=2, length=20, seed=0):
    return torch.randint(3, 50, (batch, length), generator=torch.Generator().manual_seed(seed))


def logits_of(model, tokens, implementation=None, **given):
    if implementation is not None:
        gat.register()
        model.set_attn_implementation(implementation)
    with torch.no_grad():
        return model(tokens, **{"use_cache": False} | given).logits


# What it computes.


@pytest.mark.every_case
@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_is_the_equations_of_the_paper(family):
    model = with_shortcut(family, dtype=torch.float64)
    attention = model.model.layers[1].self_attn
    torch.manual_seed(2)
    x = torch.randn(2, 13, 32, dtype=torch.float64)
    places = torch.arange(13)[None].expand(2, -1)
    rotations = model.model.rotary_emb(x, places)
    keep = torch.ones(13, 13, dtype=torch.bool).tril() & left_padded([13, 9], 13).bool()[:, None]
    given = {"position_embeddings": rotations, "attention_mask": keep[:, None]}
    plain = tiny_model(family, torch.float64).model.layers[1].self_attn
    with torch.no_grad():
        actual, _ = attention(x, **given)
        standard, _ = plain(x, **given)
        expected = layer_loop(attention, standard, x, rotations, keep.tolist())
    real = keep.any(-1)
    assert (actual - standard)[real].abs().max() > 0.1
    # The norms of Qwen 3 compute in float32, whatever they are given.
    tolerance = 1e-5 if family == "Qwen3" else 1e-11
    torch.testing.assert_close(actual[real], expected[real], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("family", FAMILIES)
def test_it_starts_as_copies_with_a_fifth_of_the_say(family):
    model, plain = tiny_model(family), tiny_model(family)
    assert gat.add_krause_shortcut(model, lora_rank=None) == [0, 1]
    for layer in model.model.layers:
        attention, krause = layer.self_attn, layer.self_attn.krause
        for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"):
            module, copied = getattr(attention, name, None), getattr(krause, name, None)
            assert (module is None) == (copied is None)
            if module is not None:
                for (a, p), (b, q) in zip(
                    module.named_parameters(), copied.named_parameters(), strict=True
                ):
                    assert a == b
                    assert torch.equal(p, q)
                    assert p.data_ptr() != q.data_ptr()
        x = torch.randn(5, 32)
        shares = krause.gate.shares(x, 3 * x)
        torch.testing.assert_close(shares, torch.tensor([0.8, 0.2]).expand(5, 2))
        torch.testing.assert_close(krause.bandwidth(x), torch.full((4,), 5.5))
    of_model = {name: p for name, p in model.named_parameters() if ".krause." not in name}
    assert of_model.keys() == dict(plain.named_parameters()).keys()
    assert all(torch.equal(p, of_model[name]) for name, p in plain.named_parameters())


def test_one_neighbour_is_the_token_itself():
    """Every token averages itself where the window is 1: its output is its own value."""
    model = with_shortcut(window=1, top_k=None)
    attention = model.model.layers[0].self_attn
    q, k, v = torch.randn(2, 7, 4, 8), torch.randn(2, 7, 2, 8), torch.randn(2, 7, 2, 8)
    out = attention.krause.attend(q, k, v, None, 0, 0.0)
    assert torch.equal(out, v.repeat_interleave(2, dim=2).flatten(-2))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_implementation_of_attention_gives_the_same(family, implementation):
    model, tokens = with_shortcut(family), tokens_of()
    for mask in (None, left_padded([20, 7], 20), left_padded([20, 7], 20).flip(1)):
        expected = logits_of(model, tokens, "eager", attention_mask=mask)
        actual = logits_of(model, tokens, implementation, attention_mask=mask)
        real = torch.ones_like(tokens).bool() if mask is None else mask.bool()
        torch.testing.assert_close(actual[real], expected[real], rtol=1e-5, atol=1e-5)


# What it may see.


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("padded", [False, True])
def test_a_later_token_changes_no_bit_of_an_earlier_one(implementation, padded):
    """Fast attention gets no mask at all if nothing is padded: that is where the future leaked."""
    model, tokens = with_shortcut(), tokens_of()
    mask = left_padded([20, 15], 20) if padded else None
    before = logits_of(model, tokens, implementation, attention_mask=mask)
    changed = tokens.clone()
    changed[:, 12:] = (changed[:, 12:] + 5) % 50
    after = logits_of(model, changed, implementation, attention_mask=mask)
    real = slice(None) if mask is None else mask[:, :12].bool()
    assert torch.equal(before[:, :12][real], after[:, :12][real])
    assert not torch.equal(before[:, 12], after[:, 12])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("left", [True, False])
def test_a_padded_token_changes_no_bit_of_a_real_one(implementation, left):
    model, tokens = with_shortcut(), tokens_of()
    mask = left_padded([20, 8], 20) if left else left_padded([20, 8], 20).flip(1)
    before = logits_of(model, tokens, implementation, attention_mask=mask)
    changed = torch.where(mask.bool(), tokens, (tokens + 9) % 50)
    after = logits_of(model, changed, implementation, attention_mask=mask)
    assert torch.equal(before[mask.bool()], after[mask.bool()])
    assert not torch.equal(before[1], after[1])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_texts_packed_behind_each_other_do_not_meet(implementation):
    model, tokens = with_shortcut(), tokens_of(1, 20)
    places = torch.cat([torch.arange(n) for n in (6, 1, 13)])[None]
    packed = logits_of(model, tokens, implementation, position_ids=places)
    start = 0
    for n in (6, 1, 13):
        alone = logits_of(model, tokens[:, start : start + n])
        torch.testing.assert_close(packed[:, start : start + n], alone, rtol=1e-5, atol=1e-5)
        start += n
    changed = tokens.clone()
    changed[:, :6] = (changed[:, :6] + 5) % 50
    after = logits_of(model, changed, position_ids=places)
    assert torch.equal(packed[:, 6:], after[:, 6:])


def as_bool(keep):
    return keep[:, None]


def as_scores(keep):
    return torch.zeros(keep.shape).masked_fill(~keep, torch.finfo(torch.float32).min)[:, None]


def as_infinities(keep):
    return torch.zeros(keep.shape).masked_fill(~keep, -torch.inf)[:, None]


@pytest.mark.parametrize("form", [as_bool, as_scores, as_infinities])
def test_a_mask_hides_and_is_not_added(form):
    """NaN in what any mask hides reaches nothing; what it shows is averaged as without it."""
    krause = with_shortcut(window=5).model.layers[0].self_attn.krause
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 16, 4, 8), torch.randn(2, 16, 2, 8), torch.randn(2, 16, 2, 8)
    causal = torch.ones(2, 16, 16, dtype=torch.bool).tril()
    with torch.no_grad():
        bare = krause.attend(q, k, v, None, 0, 0.0)
        assert torch.equal(krause.attend(q, k, v, form(causal), 0, 0.0), bare)
        hidden = causal.clone()
        hidden[:, :, 6] = False  # padding in the middle
        torch.manual_seed(1)
        odd = causal & (torch.rand(2, 16, 16) < 0.6)  # no known shape
        for keep in (hidden, odd):
            result = krause.attend(q, k, v, form(keep), 0, 0.0)
            for b, i in ((0, 9), (1, 11), (0, 15)):
                seen = keep[b, i, i - 4 : i + 1].nonzero()[:, 0] + i - 4
                row = krause.attend(
                    q[b : b + 1, i : i + 1],
                    k[b : b + 1, seen],
                    v[b : b + 1, seen],
                    None,
                    len(seen) - 1,
                    0.0,
                )
                torch.testing.assert_close(result[b : b + 1, i : i + 1], row, rtol=1e-5, atol=1e-6)
        poisoned = [x.clone() for x in (k, v)]
        for x in poisoned:
            x[:, 6] = torch.nan
        assert torch.equal(
            krause.attend(q, *poisoned, form(hidden), 0, 0.0),
            krause.attend(q, k, v, form(hidden), 0, 0.0),
        )


@pytest.mark.parametrize("form", [as_bool, as_scores, as_infinities])
def test_a_row_that_sees_nothing_is_zero_and_not_the_mean_of_everything(form):
    krause = with_shortcut(window=4).model.layers[0].self_attn.krause
    q, k, v = torch.randn(2, 12, 4, 8), torch.randn(2, 12, 2, 8), torch.randn(2, 12, 2, 8)
    keep = torch.ones(2, 12, 12, dtype=torch.bool).tril()
    keep[1, :, :7] = False  # padding on the left that is longer than the window
    with torch.no_grad():
        out = krause.attend(q, k, v, form(keep), 0, 0.0)
        assert not out[1, :7].any()
        assert out[1, 7:].all()
        keep[:] = False
        assert not krause.attend(q, k, v, form(keep), 0, 0.0).any()


def test_room_that_a_static_cache_has_left_is_never_read():
    """Masks speak of all slots, or end with the last query's."""
    krause = with_shortcut(window=4).model.layers[0].self_attn.krause
    q, k, v = torch.randn(2, 5, 4, 8), torch.randn(2, 12, 2, 8), torch.randn(2, 12, 2, 8)
    with torch.no_grad():
        expected = krause.attend(q, k[:, :8], v[:, :8], None, 3, 0.0)
        k[:, 8:] = v[:, 8:] = torch.nan
        causal = torch.ones(12, 12, dtype=torch.bool).tril()[3:8].expand(2, 1, 5, 12)
        for mask in (None, causal, causal[..., :8], as_scores(causal[:, 0])):
            assert torch.equal(krause.attend(q, k, v, mask, 3, 0.0), expected)
            row = None if mask is None else mask[:, :, 4:]
            for past in (7, torch.tensor(7)):  # read, and not looked at
                last = krause.attend(q[:, 4:], k, v, row, past, 0.0)
                torch.testing.assert_close(last, expected[:, 4:], rtol=1e-5, atol=1e-6)


def test_masks_that_look_ahead_show_nothing_ahead():
    """The shortcut is causal, even under a mask of somebody's own that is not."""
    krause = with_shortcut().model.layers[0].self_attn.krause
    q, k, v = torch.randn(1, 12, 4, 8), torch.randn(1, 12, 2, 8), torch.randn(1, 12, 2, 8)
    everything = torch.ones(1, 1, 12, 12, dtype=torch.bool)
    with torch.no_grad():
        out = krause.attend(q, k, v, everything, 0, 0.0)
        assert torch.equal(out, krause.attend(q, k, v, None, 0, 0.0))


def test_a_mask_is_looked_at_once_per_forward_and_again_when_it_changes():
    call = ShortcutCall(batch=1, queries=6, slots=6, past=0, window=4)
    mask = torch.ones(1, 1, 6, 6, dtype=torch.bool).tril()
    first = reach_of(mask, call)
    assert reach_of(mask, call) is first
    mask[..., 2] = False
    assert reach_of(mask, call) is not first
    assert not reach_of(mask, call).valid[1][0, 2]
    assert reach_of(mask, call._replace(window=2)).graph != reach_of(mask, call).graph
    mask.numpy()[..., 3] = False  # which torch does not count
    assert not reach_of(mask, call).valid[1][0, 3]


# What is refused.


@pytest.mark.parametrize(
    ("mask", "said"),
    [
        (torch.ones(2, 9, dtype=torch.bool), r"must have shape \[2, 1, 9, 9\]"),
        (torch.ones(2, 1, 9, 8, dtype=torch.bool), r"must have shape \[2, 1, 9, 9\]"),
        (torch.ones(2, 4, 9, 9, dtype=torch.bool), "same for all heads"),
        (torch.ones(2, 1, 9, 9, dtype=torch.int64), "must be bool"),
        (torch.full((2, 1, 9, 9), -1.5), "got -1.5"),
        ("causal", "got str"),
    ],
)
def test_masks_that_it_cannot_follow_are_refused(mask, said):
    with pytest.raises(ValueError, match=said):
        dense(mask, ShortcutCall(batch=2, queries=9, slots=9, past=0, window=4))


def test_other_families_and_bad_arguments_are_refused_and_change_nothing():
    gpt2 = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=9, n_embd=8, n_layer=1, n_head=2)
    )
    with pytest.raises(ValueError, match=r"GPT2Attention in transformer\.h\.0\.attn"):
        gat.add_krause_shortcut(gpt2, lora_rank=None)
    with pytest.raises(ValueError, match=r"model must be a model of transformers.*got Linear"):
        gat.add_krause_shortcut(torch.nn.Linear(2, 2))
    model = tiny_model()
    names = [name for name, _ in model.named_parameters()]
    for name, value, said in (
        ("window", 0, "window must be >= 1, got 0"),
        ("top_k", 1.5, "top_k must be an integer"),
        ("lora_rank", 0, "lora_rank must be >= 1"),
        ("lora_alpha", -1, "lora_alpha must be >= 1"),
        ("init_sigma", 0, "init_sigma must be a finite number > 0"),
        ("layers", [2], "layers must be numbers in -2 .. 1 .*got 2"),
    ):
        with pytest.raises(ValueError, match=said):
            gat.add_krause_shortcut(model, **{name: value})
    assert [name for name, _ in model.named_parameters()] == names
    assert not hasattr(model.config, "graphattn")
    gat.add_krause_shortcut(model, lora_rank=None, layers=[1])
    with pytest.raises(ValueError, match=r"model.layers.1.self_attn has one"):
        gat.add_krause_shortcut(model, lora_rank=None)


def test_implementations_that_hide_their_mask_are_refused():
    model = with_shortcut()
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="'flash_attention_2' passes no mask"):
        logits_of(model, tokens_of())


def test_only_chosen_layers_have_one():
    model, plain = tiny_model(), tiny_model()
    assert gat.add_krause_shortcut(model, lora_rank=None, layers=[-1]) == [1]
    kept = []
    for each in (model, plain):
        each.model.layers[1].register_forward_pre_hook(lambda _, args: kept.append(args[0]))
        logits_of(each, tokens_of())
    assert torch.equal(*kept)
    assert not hasattr(model.model.layers[0].self_attn, "krause")
