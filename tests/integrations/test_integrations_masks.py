"""The mask function says exactly what transformers' own masks say."""

import copy
import io
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

transformers = pytest.importorskip("transformers")

from transformers import masking_utils as upstream  # noqa: E402

from graphattn.integrations.transformers.masks.bands import FAR, MaskBand, band_of  # noqa: E402
from graphattn.integrations.transformers.masks.graphs import seen_through  # noqa: E402
from graphattn.integrations.transformers.masks.mask_function import (  # noqa: E402
    fitted,
    graph_mask,
    is_sketch,
)

EXAMPLES = int(os.environ.get("GRAPHATTN_MASK_EXAMPLES", "120"))


def dense_of(seen, batch, num_keys):
    """Write out the edges that `Seen` holds as a mask [B, Q, K]."""
    edges = seen.graph.to_mask()
    n = len(seen.keys)
    if seen.packed:
        Q = edges.shape[0] // batch
        blocks = edges.reshape(batch, Q, batch, n)
        of_samples = blocks[torch.arange(batch), :, torch.arange(batch)]
        assert int(blocks.sum()) == int(of_samples.sum()), "an edge between samples"
        edges = of_samples
    edges = edges.expand(batch, -1, -1)
    if seen.valid is not None:
        edges = edges & seen.valid[:, None, :]
    full = torch.zeros(batch, edges.shape[1], num_keys, dtype=torch.bool)
    full[:, :, seen.keys.start : seen.keys.stop] = edges
    return full


def ours(mask, batch, q_length, kv_length, causal):
    mask = fitted(mask, q_length, kv_length)
    seen = seen_through(mask, batch, q_length, kv_length, causal=causal, device="cpu")
    return dense_of(seen, batch, kv_length)


def overlay(kind, length, batch, generator):
    if kind == "types":
        types = torch.randint(0, 2, (batch, length), generator=generator)
        return lambda b, h, q, k: types[b, q] == types[b, k]
    if kind == "packed":
        starts = torch.rand(batch, length, generator=generator) < 0.3
        return upstream.packed_sequence_mask_function(starts.long().cumsum(-1))
    if kind == "chunked":
        return upstream.chunked_overlay(3, torch.randint(0, 3, (batch,), generator=generator))
    assert kind == "blockwise"
    blocks = torch.randint(-1, 2, (batch, length), generator=generator)
    return lambda b, h, q, k: (blocks[b, q] == blocks[b, k]) & (blocks[b, q] >= 0)


@st.composite
def calls(draw):
    batch = draw(st.integers(1, 3))
    q_length = draw(st.integers(1, 12))
    past = draw(st.integers(0, 6))
    kv_offset = draw(st.integers(0, past))
    room = draw(st.sampled_from([0, 0, 3]))
    kv_length = past + q_length - kv_offset + room
    causal = draw(st.booleans())
    window = draw(st.one_of(st.none(), st.integers(1, 14)))
    if room and not causal:
        causal = True  # a cache with room behind is a decoder's
    function = upstream.causal_mask_function if causal else upstream.bidirectional_mask_function
    if window is not None and causal:
        function = upstream.sliding_window_causal_mask_function(window)
    elif window is not None:
        function = upstream.sliding_window_bidirectional_mask_function(window)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    kind = draw(st.sampled_from([None, None, "types", "packed", "chunked", "blockwise"]))
    join = draw(st.sampled_from([upstream.and_masks, upstream.or_masks]))
    if kind is not None:
        extra = overlay(kind, kv_offset + kv_length, batch, generator)
        function = join(function, extra)
    padding = draw(st.sampled_from([None, "real", "left", "right", "some", "all", "short"]))
    mask = None
    if padding is not None:
        width = past + q_length
        mask = torch.ones(batch, width, dtype=draw(st.sampled_from([torch.int64, torch.bool])))
        pads = draw(st.integers(1, width))
        if padding == "left":
            mask[0, :pads] = 0
        elif padding == "right":
            mask[-1, -pads:] = 0
        elif padding == "some":
            mask &= (torch.rand(mask.shape, generator=generator) < 0.7).to(mask.dtype)
        elif padding == "all":
            mask[0] = 0
        elif padding == "short":
            mask = mask[:, : max(1, width - 2)]
    live = draw(st.booleans())
    plain = kind is None
    return causal, {
        "batch_size": batch,
        "q_length": q_length,
        "kv_length": kv_length,
        "q_offset": torch.tensor(past) if live else past,
        "kv_offset": kv_offset,
        "mask_function": function,
        "attention_mask": mask,
        "local_size": window,
        "allow_is_causal_skip": plain and causal,
        "allow_is_bidirectional_skip": plain and not causal,
        "use_vmap": False,
    }


@settings(max_examples=EXAMPLES, deadline=None)
@given(calls())
def test_every_mask_is_the_mask_of_transformers(call):
    causal, arguments = call
    never = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    expected = upstream.sdpa_mask(**{**arguments, **never})
    mask = graph_mask(**arguments, dtype=torch.float32)
    B, Q, K = (arguments[name] for name in ("batch_size", "q_length", "kv_length"))
    expected = expected.expand(B, 1, Q, K)[:, 0]
    assert torch.equal(ours(mask, B, Q, K, causal), expected)
    for change in (torch.Tensor.contiguous, torch.clone, copy.deepcopy, _saved):
        if mask is not None:
            assert torch.equal(ours(change(mask), B, Q, K, causal), expected)


def _saved(mask):
    file = io.BytesIO()
    torch.save(mask, file)
    file.seek(0)
    return torch.load(file)


def test_plain_masks_need_no_square_tensor():
    def plain(function, padding=None, **more):
        return graph_mask(1, 500, 500, mask_function=function, attention_mask=padding, **more)

    causal, window = (
        upstream.causal_mask_function,
        upstream.sliding_window_causal_mask_function(9),
    )
    padding = torch.ones(1, 500)
    padding[:, :3] = 0
    for mask in (
        plain(causal),
        plain(causal, torch.ones(1, 500)),
        plain(causal, padding),
        plain(window, local_size=9),
        plain(upstream.bidirectional_mask_function, allow_is_bidirectional_skip=True),
    ):
        assert is_sketch(mask)
        assert mask.untyped_storage().nbytes() == 500
    assert not is_sketch(plain(causal, padding, allow_is_causal_skip=False))


def test_cross_attention_needs_no_places():
    padding = torch.tensor([[1, 1, 0], [1, 1, 1]])
    for queries, skip in ((2, True), (9, True), (9, False)):
        mask = graph_mask(
            2,
            queries,
            3,
            mask_function=upstream.bidirectional_mask_function,
            attention_mask=padding,
            allow_is_causal_skip=False,
            allow_is_bidirectional_skip=skip,
        )
        assert is_sketch(mask) == skip
        expected = padding.bool()[:, None].expand(2, queries, 3)
        assert torch.equal(ours(mask, 2, queries, 3, False), expected)


@pytest.mark.parametrize("shape", [[1, 1, 1, 6], [1, 1, 6, 6], [2, 4, 1, 6], [6, 6], [1, 1, 40, 6]])
def test_an_int8_mask_of_somebody_else_is_refused(shape):
    with pytest.raises(ValueError, match="attention_mask of dtype int8 must come from"):
        seen_through(torch.ones(shape, dtype=torch.int8), 1, 6, 6, causal=True, device="cpu")


@pytest.mark.parametrize("length", range(2, 12))
def test_a_sketch_never_has_a_row_for_every_query(length):
    padding = torch.ones(1, length)
    padding[0, 0] = 0
    for causal in (True, False):
        for given_padding in (None, padding):
            function = (
                upstream.sliding_window_causal_mask_function(1)
                if causal
                else upstream.bidirectional_mask_function
            )
            mask = graph_mask(
                1,
                length,
                length,
                mask_function=function,
                attention_mask=given_padding,
                allow_is_bidirectional_skip=not causal,
            )
            assert is_sketch(mask)
            assert mask.shape[2] not in (1, length)


# Bands.


@st.composite
def comparisons(draw):
    """A random composition, and whether symbols can read it at all."""
    terms = []
    for _ in range(draw(st.integers(1, 4))):
        shift = draw(st.integers(-4, 6))
        terms.append(
            draw(
                st.sampled_from(
                    [
                        lambda q, k, s=shift: k <= q + s,
                        lambda q, k, s=shift: k < q + s,
                        lambda q, k, s=shift: q - s < k,
                        lambda q, k, s=shift: k - q >= -s,
                        lambda q, k, s=shift: s >= q - k,
                        lambda q, k, s=shift: s + k > q,
                        lambda q, k, s=shift: abs(q - k) <= s,
                        lambda q, k, s=shift: abs(k - q) < s,
                        lambda q, k, s=shift: s > abs(k - q + 1),
                        lambda q, k, s=shift: q + s >= 0,
                        lambda q, k, s=shift: q >= 0,
                        lambda q, k, s=shift: -k <= -q + s,
                        lambda q, k, s=shift: q.new_ones((), dtype=torch.bool),
                        lambda q, k, s=shift: k >= s,
                        lambda q, k, s=shift: k + q >= s,
                    ]
                )
            )
        )

    def function(batch, head, q, k):
        allowed = terms[0](q, k)
        for term in terms[1:]:
            allowed = allowed & term(q, k)
        return allowed

    return function


@pytest.mark.long
@settings(max_examples=4 * EXAMPLES, deadline=None)
@given(comparisons())
def test_a_band_is_what_the_function_lets_through(function):
    band = band_of(function)
    if band is None:
        return
    places = torch.arange(20)
    q, k = places[:, None], places[None, :]
    expected = function(None, None, q, k).expand(20, 20)
    offset = k - q
    assert torch.equal((offset >= -band.before) & (offset <= band.after), expected)


def test_what_transformers_writes_is_read():
    assert band_of(upstream.causal_mask_function) == MaskBand(FAR, 0)
    assert band_of(upstream.bidirectional_mask_function) == MaskBand(FAR, FAR)
    assert band_of(upstream.sliding_window_causal_mask_function(5)) == MaskBand(4, 0)
    assert band_of(upstream.sliding_window_bidirectional_mask_function(5)) == MaskBand(5, 5)
    nested = upstream.and_masks(
        upstream.and_masks(upstream.sliding_window_overlay(7), upstream.sliding_window_overlay(3)),
        upstream.causal_mask_function,
    )
    assert band_of(nested) == MaskBand(2, 0)


TABLE = torch.arange(30) % 3
NO_BANDS = {
    "or": lambda b, h, q, k: (k <= q) | (q < 3),
    "not": lambda b, h, q, k: ~(k > q),
    "where": lambda b, h, q, k: torch.where(k <= q, q >= k, k > q),
    "equal": lambda b, h, q, k: q == k,
    "equal and a band": lambda b, h, q, k: (k <= q) & (q == k),
    "not equal": lambda b, h, q, k: (k <= q) & (q != k + 2),
    "modulo": lambda b, h, q, k: (k <= q) & (k % 2 == 0),
    "blocks": lambda b, h, q, k: q // 4 >= k // 4,
    "tensor shift": lambda b, h, q, k: k <= q + torch.tensor(3),
    "compared with a tensor": lambda b, h, q, k: torch.tensor(3) >= q - k,
    "tensor of one": lambda b, h, q, k: k <= torch.tensor([5]),
    "lookup": lambda b, h, q, k: (k <= q) & (TABLE[k] == 1),
    "lookup by a comparison": lambda b, h, q, k: TABLE[k <= q] == 1,
    "batch": lambda b, h, q, k: k <= q + b,
    "batch equals": lambda b, h, q, k: k <= q if b == 0 else k <= q + 1,
    "head": lambda b, h, q, k: (k <= q) if h != 1 else (k >= 0),
    "python and": lambda b, h, q, k: (k <= q) and (k > q - 3),
    "python or": lambda b, h, q, k: (k <= q) or (k > q - 3),
    "python not": lambda b, h, q, k: not k <= q,
    "chain": lambda b, h, q, k: q - 3 < k <= q,
    "if on an index": lambda b, h, q, k: (k <= q) if q else (k >= 0),
    "smaller of both": lambda b, h, q, k: min(q, k) >= 0,
    "python bool": lambda b, h, q, k: True,
    "band and a bool": lambda b, h, q, k: (k <= q) & True,
    "a multiple": lambda b, h, q, k: 2 * k <= q,
    "a float": lambda b, h, q, k: k <= q + 0.5,
    "nothing": lambda b, h, q, k: (k <= q) & (k > q),
    "not itself": lambda b, h, q, k: k < q,
    "nobody": lambda b, h, q, k: q < 0,
    "raises": lambda b, h, q, k: q.long().clamp(min=int(k)) >= 0,
    "runtime error": lambda b, h, q, k: (_ for _ in ()).throw(RuntimeError("symbols?")),
    "tuple": lambda b, h, q, k: (k <= q) * 2,
    "further than": lambda b, h, q, k: abs(q - k) > 2,
}


@pytest.mark.parametrize("name", NO_BANDS)
def test_what_is_no_band_is_not_read_as_one(name):
    assert band_of(NO_BANDS[name]) is None


# Compiled, at three lengths.
