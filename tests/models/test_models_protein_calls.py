"""How proteins lie in a call: odd shapes and sizes, arguments that do not fit, compiled calls."""

from __future__ import annotations

import pytest
import torch
from proteins import complex_of, model_of, tokens_of
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional

from graphattn.data import Structure


@pytest.mark.parametrize("mixer", ["dot", "krause", "consensus", "mix"])
def test_a_batch_of_one_may_be_padded_like_every_other(mixer):
    """The last batch of an epoch often holds one protein, in rows as long as those before."""
    model, structure = model_of(mixer), complex_of(6, 4)
    alone = model(tokens_of(model, structure), structure=structure)
    rows = functional.pad(tokens_of(model, structure), (0, 3), value=-1)[None]
    out = model(rows, structure=[structure])
    assert out.shape == (1, 13, 21)
    torch.testing.assert_close(out[0, :10], alone, rtol=0, atol=1e-12)
    with pytest.raises(
        ValueError, match=r"structure must have one residue per token .* got structures of \[10\]"
    ):
        model(rows, structure=structure)  # by itself it is every row, which must be as long
    with pytest.raises(
        ValueError, match=r"structure must have one residue per token .* got structures of \[10\]"
    ):
        model(rows[:, :9], structure=[structure])


@pytest.mark.parametrize("mixer", ["dot", "krause", "consensus", "mix"])
def test_no_residues_have_no_logits(mixer):
    model, tokens = model_of(mixer), torch.zeros(0, dtype=torch.int64)
    nothing = Structure("", torch.zeros(0, 3, dtype=torch.float64))
    assert model(tokens).shape == (0, 21)
    assert model(tokens.view(2, 0)).shape == (2, 0, 21)
    assert model(tokens, structure=nothing).shape == (0, 21)
    assert model.embed(nothing).shape == (0, 16)
    some = complex_of(5)
    embeddings = model.embed([nothing, some])
    assert [len(features) for features in embeddings] == [0, 5]
    torch.testing.assert_close(embeddings[1], model.embed(some), rtol=0, atol=1e-12)


@pytest.mark.parametrize("mixer", ["dot", "mix"])
def test_rows_may_have_places_of_their_own(mixer):
    """Places of rows, as features of edges and in rotations, are those of each row alone."""
    model = model_of(mixer)
    tokens = torch.randint(21, (3, 8), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(8) * torch.tensor([[1], [2], [1]])
    positions[2, 4:] += 10
    out = model(tokens, positions=positions)
    for b in range(3):
        alone = model(tokens[b], positions=positions[b])
        torch.testing.assert_close(out[b], alone, rtol=0, atol=1e-12)
    assert (out[0] - model(tokens[0], positions=positions[1])).abs().max() > 1e-4


def test_a_call_names_what_does_not_fit():
    model, structure = model_of("dot"), complex_of(6, 4)
    tokens = tokens_of(model, structure)
    rows, both = tokens.expand(2, -1), [structure, structure]
    for batch, given, says in [
        (rows, {"structure": both, "valid": [True]}, "valid must be a bool tensor, got list"),
        (rows, {"structure": both, "valid": torch.ones(3).bool()}, r"got \[3\]"),
        (tokens, {"positions": torch.arange(10.0)}, "positions must be integers, because offsets"),
        (tokens, {"positions": torch.arange(7)}, r"positions must have shape \[10\]"),
        (
            tokens,
            {"structure": []},
            r"structure must have one residue per token .* got structures of \[\]",
        ),
    ]:
        with pytest.raises(ValueError, match=says):
            model(batch, **given)


@pytest.mark.long
@pytest.mark.parametrize("mixer", ["dot", "mix"])
def test_structures_of_all_lengths_share_compiled_code(mixer):
    """Graphs are found outside of it; two compilations, of one length and of all, serve the rest.

    Kept by `id`, features of edges made the code that of one structure.
    """
    torch._dynamo.reset()
    model = model_of(mixer)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter)
    counts = []
    for sizes in ((9, 7), (12,), (20, 5, 3), (11,)):
        structure = complex_of(*sizes)
        tokens = tokens_of(model, structure)
        out = compiled(tokens, structure=structure)
        expected = model(tokens, structure=structure)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-9)
        counts.append(counter.frame_count)
    assert counts[1] == counts[-1]
    with pytest.raises(Exception, match="compute graph, positions and edge_features outside"):
        torch.compile(model, fullgraph=True, backend="eager")(tokens, structure=structure)


@pytest.mark.long
def test_one_graph_of_code_serves_structures_whose_edges_are_given():
    torch._dynamo.reset()
    model = model_of("mix")
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for sizes in ((9, 7), (12,), (20, 5, 3), (11,)):
        structure = complex_of(*sizes)
        tokens, graphs = tokens_of(model, structure), model.graphs(structure=structure)
        features = [
            structure.edge_features(graph, num_distances=4, max_offset=3).double()
            for graph in graphs
        ]
        out = compiled(tokens, graphs, edge_features=features, positions=structure.positions)
        expected = model(tokens, structure=structure)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-9)
    assert counter.frame_count == 2
