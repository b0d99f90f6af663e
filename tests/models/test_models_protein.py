"""ProteinModel: chains in space, edges, tracks, padding, and scores of mutations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from proteins import LETTERS, MIXERS, D, H, complex_of, letters, model_of, tokens_of
from torch import Tensor
from torch.nn import functional

import graphattn as ga
from graphattn.data import Structure


def features_by_hand(model: Any, structure: Structure, source: int, target: int) -> list[float]:
    """Compute the features of one edge from the text of the documentation."""
    edges = model.edges
    K, reach, most = edges.num_distances, edges.max_distance, edges.max_offset
    a, b = structure.ca_positions[source], structure.ca_positions[target]
    d = min(float((a - b).norm()), reach)
    spacing = reach / (K - 1)
    distances = [
        float(torch.exp(torch.tensor(-((d - k * spacing) ** 2) / 2 / spacing**2))) for k in range(K)
    ]
    along = [0.0] * (2 * most + 2)
    if structure.chain_index[source] == structure.chain_index[target]:
        offset = int(structure.positions[source] - structure.positions[target])
        along[min(max(offset, -most), most) + most] = 1.0
        along[-1] = 1.0
    return distances + along


# What the model is.


@pytest.mark.parametrize("mixer", MIXERS)
def test_the_model_is_its_blocks_with_what_is_known_of_edges(mixer):
    """Written out: the union of neighbours and windows, features edge by edge, then the blocks."""
    model, structure = model_of(mixer), complex_of(9, 7)
    N = 16
    distance = torch.cdist(structure.ca_positions, structure.ca_positions).fill_diagonal_(9e9)
    near = torch.zeros(N, N, dtype=torch.bool).scatter_(1, distance.argsort(1)[:, :5], True)
    apart = (structure.positions[:, None] - structure.positions).abs()
    near |= (apart <= 2) & (apart > 0) & (structure.chain_index[:, None] == structure.chain_index)
    x = model.embedding.weight[tokens_of(model, structure)]
    for place, block in enumerate(model.blocks):
        is_consensus = isinstance(block.mixer, ga.nn.SelfConsensus)
        graph = ga.from_mask(near if is_consensus else near | torch.eye(N, dtype=torch.bool))
        assert model.graphs(structure=structure)[place] == graph
        features = torch.tensor(
            [features_by_hand(model, structure, j, i) for j, i in graph.edge_index.T.tolist()],
            dtype=torch.float64,
        )
        given = {"edge_features": features}
        if not is_consensus:
            given = {"edge_bias": features @ model.edge_maps[str(place)].projection.weight.T}
        x = block(x, graph, positions=structure.positions, **given)
    expected = model.head(model.norm(x))
    out = model(tokens_of(model, structure), structure=structure)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)  # features: float32 places
    assert out.shape == (N, 21)


@pytest.mark.parametrize("mixer", MIXERS)
def test_a_sequence_alone_has_offsets_and_no_distances(mixer):
    """A table of offsets for attention is what the features of every edge give."""
    model = model_of(mixer)
    tokens = torch.randint(21, (2, 12), generator=torch.Generator().manual_seed(1))
    out = model(tokens)
    unknown = Structure("A" * 12, torch.full((12, 3), torch.nan, dtype=torch.float64))
    graphs = model.graphs(12)
    features = [unknown.edge_features(g, num_distances=4, max_offset=3).double() for g in graphs]
    given = model(tokens, graphs, edge_features=features)
    torch.testing.assert_close(out, given, rtol=0, atol=1e-12)
    assert {len(g.edge_index[0]) for g in graphs} <= {144, 42, 54}


def test_a_model_without_structures_is_a_sequence_encoder():
    model = model_of("mix", structure=False)
    torch.manual_seed(0)
    encoder = ga.models.SequenceEncoder(
        22, D, 2, H, mixer="mix", window=2, rank=2, edge_hidden=6
    ).double()
    state = {k: v for k, v in model.state_dict().items() if not k.startswith("head")}
    encoder.load_state_dict(dict(state), strict=False)
    tokens = torch.randint(22, (3, 10))
    torch.testing.assert_close(model.encode(tokens), encoder.encode(tokens), rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match="structure must be None in a model made with"):
        model(tokens[0], structure=complex_of(10))


# Space.


@pytest.mark.parametrize("mixer", MIXERS)
def test_a_motion_of_all_atoms_changes_nothing_and_of_one_chain_something(mixer):
    model, structure = model_of(mixer), complex_of(12, 9)
    turn, _ = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64))
    moved = replace(structure, ca_positions=structure.ca_positions @ turn.T + 30.0, atoms={})
    out = model.embed(structure)
    torch.testing.assert_close(model.embed(moved), out, rtol=0, atol=1e-9)
    shift = 3.0 * (structure.chain_index == 1)[:, None]
    apart = replace(structure, ca_positions=structure.ca_positions + shift, atoms={})
    assert (model.embed(apart)[:12] - out[:12]).abs().max() > 1e-4


def test_a_gap_in_the_numbers_is_a_gap_in_the_window():
    structure = complex_of(10)
    gap = replace(structure, residue_numbers=torch.tensor([*range(1, 6), *range(20, 25)]))
    model = model_of("consensus", neighbors=0)
    source, target = model.graphs(structure=gap)[0].edge_index
    assert not ((source < 5) != (target < 5)).any()
    source, target = model.graphs(structure=structure)[0].edge_index
    assert ((source < 5) != (target < 5)).sum() == 2 * 3


@pytest.mark.parametrize("mixer", ["dot", "mix"])
def test_a_missing_atom_has_a_window_and_no_neighbours(mixer):
    structure = complex_of(14)
    places = structure.ca_positions.clone()
    places[6] = torch.nan
    model, holed = model_of(mixer), replace(structure, ca_positions=places, atoms={})
    source, target = model.graphs(structure=holed)[0].edge_index
    assert set(source[target == 6].tolist()) - {6} == {4, 5, 7, 8}
    assert model.embed(holed).isfinite().all()


# Several proteins.


@pytest.mark.parametrize("mixer", MIXERS)
def test_rows_and_packed_proteins_are_each_what_it_is_alone(mixer):
    model = model_of(mixer)
    proteins = [complex_of(8, 4, seed=1), complex_of(6, seed=2), complex_of(15, seed=3)]
    alone = [model(tokens_of(model, protein), structure=protein) for protein in proteins]
    sizes = [len(protein) for protein in proteins]
    tokens = [tokens_of(model, protein) for protein in proteins]
    packed = model(torch.cat(tokens), structure=proteins)
    for actual, expected in zip(packed.split(sizes), alone, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    rows = functional.pad(torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True), (0, 2))
    valid = torch.arange(17) < torch.tensor(sizes)[:, None]
    out = model(rows, structure=proteins)
    assert out.shape == (3, 17, 21)
    for b, expected in enumerate(alone):
        torch.testing.assert_close(out[b, : sizes[b]], expected, rtol=0, atol=1e-12)
    for filler in (21, -100, 10**9):
        padded = rows.masked_fill(~valid, filler)
        assert torch.equal(model(padded, structure=proteins, valid=valid)[valid], out[valid])
        assert torch.equal(model(padded, structure=proteins)[valid], out[valid])


@pytest.mark.parametrize("mixer", MIXERS)
def test_padding_of_sequences_is_never_read(mixer):
    model = model_of(mixer)
    tokens = torch.randint(21, (2, 9), generator=torch.Generator().manual_seed(1))
    valid = torch.arange(9) < torch.tensor([[9], [6]])
    out = model(tokens, valid=valid)
    assert torch.equal(model(tokens.masked_fill(~valid, -7), valid=valid)[valid], out[valid])
    torch.testing.assert_close(out[1, :6], model(tokens[1, :6]), rtol=0, atol=1e-12)


@pytest.mark.parametrize("structure", [True, False])
def test_embeddings_of_a_list_are_those_of_its_proteins(structure):
    model = model_of("mix", structure=structure)
    proteins = [complex_of(7, 5), letters(9), complex_of(4, seed=5), "mk-vx", letters(3)]
    embeddings = model.embed(proteins, batch_size=2)
    assert [len(features) for features in embeddings] == [12, 9, 4, 4, 3]
    for features, protein in zip(embeddings, proteins, strict=True):
        torch.testing.assert_close(features, model.embed(protein), rtol=0, atol=1e-12)
    logits = model.logits(proteins)
    for of_protein, features in zip(logits, embeddings, strict=True):
        torch.testing.assert_close(of_protein, model.head(features), rtol=0, atol=1e-12)
        assert not of_protein.requires_grad


def test_chains_are_read_one_by_one_where_structures_are_not():
    model, structure = model_of("dot", structure=False), complex_of(7, 5)
    embedding = model.embed(structure)
    first, second = (model.embed(chain.sequence) for chain in structure.split())
    torch.testing.assert_close(embedding, torch.cat([first, second]), rtol=0, atol=1e-12)


# Tracks.

TRACKS = {"secondary": 3, "exposed": 1, "partner": "sequence"}


def tracks(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "secondary": torch.randint(3, (12,), generator=generator),
        "exposed": torch.rand(12, 1, generator=generator, dtype=torch.float64),
        "partner": torch.randint(20, (7,), generator=generator),
    }


@pytest.mark.parametrize("mixer", ["dot", "consensus", "mix"])
def test_every_track_is_looked_at_by_the_mechanism_of_the_model(mixer):
    model = model_of(mixer, context=TRACKS, context_every=1)
    kind = ga.nn.DotProductAttention if mixer == "dot" else ga.nn.CrossConsensus
    layers = [layer for steps in model.context_steps.values() for layer in steps.layers]
    assert len(layers) == 6
    assert all(type(layer) is kind for layer in layers)
    tokens = torch.randint(20, (2, 12), generator=torch.Generator().manual_seed(1))
    given = tracks()
    out, without = model(tokens, context=given), model(tokens)
    assert not torch.equal(out, without)
    for name in TRACKS:
        other = {**given, name: tracks(seed=1)[name]}
        assert (model(tokens, context=other) - out).abs().max() > 1e-6
        left_out = {key: value for key, value in given.items() if key != name}
        assert (model(tokens, context=left_out) - out).abs().max() > 1e-6
    assert torch.equal(model(tokens, context={}), without)


@pytest.mark.parametrize("mixer", ["dot", "mix"])
def test_one_step_is_its_layers_added_up(mixer):
    model = model_of(mixer, context=TRACKS, context_every=2)
    assert list(model.context_steps) == ["0"]
    given, tokens = tracks(), torch.randint(20, (12,))
    steps = model.context_steps["0"]
    x = model.embedding(tokens)
    y = steps.norm(x)
    one_hot = functional.one_hot(given["secondary"], 3).double()
    features = {
        "secondary": model.tracks.maps[0](one_hot),
        "exposed": model.tracks.maps[1](given["exposed"]),
        "partner": model.embedding(given["partner"]),
    }
    near, whole = ga.window_path_graph(12, 2, self_loops=True), ga.bipartite_complete_graph(12, 7)
    expected = x + sum(
        layer(y, whole if name == "partner" else near, features[name])
        for name, layer in zip(TRACKS, steps.layers, strict=True)
    )
    caught = []
    hook = model.blocks[0].register_forward_pre_hook(lambda _, args: caught.append(args[0]))
    model(tokens, context=given)
    hook.remove()
    torch.testing.assert_close(caught[0], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("mixer", ["dot", "mix"])
def test_what_is_not_known_of_a_track_is_not_read(mixer):
    model = model_of(mixer, context=TRACKS)
    tokens, given = torch.randint(20, (12,)), tracks()
    given["secondary"][3] = -1
    given["exposed"][5] = torch.nan
    given["partner"] = torch.cat([given["partner"], torch.tensor([-1, -1])])
    out = model(tokens, context=given)
    assert out.isfinite().all()
    given["secondary"][3], given["exposed"][5] = -100, torch.inf
    assert torch.equal(model(tokens, context=given), out)
    shorter = {**given, "partner": given["partner"][:-2]}
    torch.testing.assert_close(model(tokens, context=shorter), out, rtol=0, atol=1e-12)


@pytest.mark.parametrize("mixer", ["dot", "mix"])
def test_tracks_of_rows_are_those_of_their_proteins(mixer):
    model = model_of(mixer, context=TRACKS)
    proteins = [complex_of(8, 4, seed=1), complex_of(12, seed=2)]
    tokens = torch.stack([tokens_of(model, protein) for protein in proteins])
    both = {name: torch.stack([tracks(0)[name], tracks(1)[name]]) for name in TRACKS}
    out = model(tokens, structure=proteins, context=both)
    for b, protein in enumerate(proteins):
        alone = model(tokens[b], structure=protein, context=tracks(b))
        torch.testing.assert_close(out[b], alone, rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match="must be a pair"):
        model(tokens.flatten(), structure=proteins, context={"partner": both["partner"][0]})
    graph = ga.batch([ga.bipartite_complete_graph(12, 7)] * 2)
    packed = {
        "secondary": both["secondary"].flatten(),
        "exposed": both["exposed"].flatten(0, 1),
        "partner": (both["partner"].flatten(), graph),
    }
    flat = model(tokens.flatten(), structure=proteins, context=packed)
    torch.testing.assert_close(flat.view_as(out), out, rtol=0, atol=1e-12)


@pytest.mark.parametrize("mixer", ["dot", "mix"])
def test_the_track_of_padding_is_never_read(mixer):
    """A track also has values at padded places, and the residues before these do not read them."""
    model = model_of(mixer, context={"secondary": 3, "exposed": 1})
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(20, (2, 12), generator=generator)
    given = {
        "secondary": torch.randint(3, (2, 12), generator=generator),
        "exposed": torch.rand(2, 12, 1, generator=generator, dtype=torch.float64),
    }
    valid = torch.arange(12) < torch.tensor([[12], [7]])
    out = model(tokens, valid=valid, context=given)
    alone = {name: track[1, :7] for name, track in given.items()}
    expected = model(tokens[1, :7], context=alone)
    torch.testing.assert_close(out[1, :7], expected, rtol=0, atol=1e-12)
    other = {
        "secondary": torch.where(valid, given["secondary"], (given["secondary"] + 1) % 3),
        "exposed": given["exposed"].masked_fill(~valid[..., None], 1e6),
    }
    assert torch.equal(model(tokens, valid=valid, context=other)[valid], out[valid])


# Training.


def test_coordinates_have_gradients():
    model, structure = model_of("mix"), complex_of(12)
    places = structure.ca_positions.clone().requires_grad_()
    out = model(
        tokens_of(model, structure), structure=replace(structure, ca_positions=places, atoms={})
    )
    (gradient,) = torch.autograd.grad(out.square().sum(), places)
    assert gradient.isfinite().all()
    assert (gradient != 0).any(1).all()
    # No force and no torque: the output does not change with a motion of all atoms.
    torch.testing.assert_close(gradient.sum(0), torch.zeros(3).double(), rtol=0, atol=1e-4)


def test_presets_make_it():
    model = ga.models.ProteinModel.from_preset("protein-structure-1m", neighbors=8)
    assert 0.8e6 < model.num_parameters() < 1.2e6
    assert model.neighbors == 8
    assert model.embed(complex_of(9).sequence).shape == (9, model.config["dim"])


# Scores of mutations.


@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("in_space", [True, False])
def test_scores_are_those_of_a_loop_of_single_masked_passes(mixer, in_space):
    model, structure = model_of(mixer), complex_of(9, 5)
    protein = structure if in_space else structure.sequence
    given = {"structure": structure} if in_space else {}
    tokens, s = tokens_of(model, structure), structure.sequence
    vocabulary = model.tokenizer.vocabulary
    mutants, expected = [], []
    for sites in ([0], [3, 12], [13], [3], [5, 6, 7]):
        parts, total = [], 0.0
        for i in sites:
            to = LETTERS[(LETTERS.index(s[i]) + 1 + i) % 20]
            masked = tokens.clone()
            masked[i] = 21
            share = model(masked, **given)[i].softmax(-1)
            odds = share[vocabulary.index(to)] / share[vocabulary.index(s[i])]
            total += odds.log().item()
            parts.append(f"{s[i]}{i + 1}{to}")
        mutants.append(":".join(parts))
        expected.append(total)
    scores = model.score_mutations(protein, mutants, batch_size=3)
    assert scores.tolist() == pytest.approx(expected, abs=1e-6)
    assert torch.equal(scores, model.score_mutations(protein, mutants, batch_size=3))
    assert model.score_mutations(protein, [f"{s[2]}3{s[2]}"]).tolist() == [0.0]
    assert model.score_mutations(protein, []).shape == (0,)


def test_numbers_may_be_those_of_the_structure():
    structure = complex_of(6, 4)
    structure = replace(
        structure,
        residue_numbers=torch.tensor([-1, 5, 6, 6, 7, 9, 5, 6, 7, 12]),
        insertion_codes=("", "", "", "A", "", "", "", "", "", ""),
    )
    model, s = model_of("dot"), structure.sequence
    numbered = [f"{s[0]}-1W", f"{s[3]}6AW", f"A/{s[1]}5W", f"B/{s[6]}5W", f"{s[9]}12W:B/{s[7]}6W"]
    plain = [f"{s[0]}1W", f"{s[3]}4W", f"{s[1]}2W", f"{s[6]}7W", f"{s[9]}10W:{s[7]}8W"]
    scores = model.score_mutations(structure, numbered, numbering="structure")
    assert scores.tolist() == pytest.approx(
        model.score_mutations(structure, plain).tolist(), abs=1e-6
    )
    for text, says in [
        (f"{s[1]}5W", "must name the chain"),
        (f"{s[5]}8W", "residue numbers of the structure, got 8"),
        (f"{s[5]}9AW", "residue numbers of the structure, got 9A"),  # there is 9 alone
        (f"C/{s[1]}5W", r"must name chains of the structure \('A', 'B'\), got 'C'"),
        (f"A/{s[9]}12W", "does not exist in chain 'A'"),
    ]:
        with pytest.raises(ValueError, match=says):
            model.score_mutations(structure, [text], numbering="structure")


def test_insertion_codes_count_in_either_case_unless_a_chain_has_both():
    structure = replace(
        complex_of(4),
        residue_numbers=torch.tensor([52, 52, 52, 53]),
        insertion_codes=("", "A", "a", "b"),
    )
    model, s = model_of("dot"), structure.sequence
    numbered = [f"{s[1]}52AW", f"{s[2]}52aW", f"{s[3]}53BW", f"{s[0].lower()}52w"]
    plain = [f"{s[1]}2W", f"{s[2]}3W", f"{s[3]}4W", f"{s[0]}1W"]
    scores = model.score_mutations(structure, numbered, numbering="structure")
    assert torch.equal(scores, model.score_mutations(structure, plain))
    with pytest.raises(ValueError, match="with chain H 'H/A42G'; got 'A' in 'A:W52G'"):
        model.score_mutations(structure, ["A:W52G"], numbering="structure")


@pytest.mark.parametrize(
    ("mutation", "says"),
    [
        ("K1A", "'K1A' has K, but the sequence has M at 1"),
        ("M1B", "must name amino acids by one of ACDEFGHIKLMNPQRSTVWY, got 'B'"),
        ("X5A", "got 'X'"),
        ("M0A", r"numbers in 1 \.\. 5, .* got 0"),
        ("M6A", r"numbers in 1 \.\. 5, .* got 6"),
        ("M1A:M1G", "must change a residue only once"),
        ("M1", "substitution such as 'A42G'"),
        ("M1A:", "substitution such as 'A42G'"),
        ("", "must contain strings"),
        (7, "must contain strings"),
        ("A/M1A", "no chain and no insertion code"),
    ],
)
def test_a_mutation_that_cannot_be_is_refused_by_its_text(mutation, says):
    with pytest.raises(ValueError, match=says):
        model_of("dot").score_mutations("MKVLX", [mutation])


def test_scores_need_a_list_and_a_known_numbering():
    model = model_of("dot")
    with pytest.raises(ValueError, match="mutations must be a list of strings"):
        model.score_mutations("MKV", "K2A")
    with pytest.raises(ValueError, match="numbering must be one of 'sequence', 'structure'"):
        model.score_mutations("MKV", ["K2A"], numbering="pdb")
    with pytest.raises(ValueError, match="numbering must be 'sequence' for a sequence"):
        model.score_mutations("MKV", ["K2A"], numbering="structure")


def test_scores_switch_dropout_off_and_on_again():
    model = model_of("dot", dropout=0.5).train()
    model.head.eval()
    a, b = (model.score_mutations("MKVLA", ["K2A"]) for _ in range(2))
    assert torch.equal(a, b)
    assert model.training
    assert not model.head.training


# What is refused.


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"window": 0, "neighbors": 0}, "window must be >= 1"),
        ({"window": 0, "structure": False}, "window must be >= 1"),
        ({"neighbors": -1}, "neighbors must be >= 0"),
        ({"structure": "yes"}, "structure must be True or False"),
        ({"rope": "yes"}, "rope must be True, False or 'isometric'"),
        ({"context": ["a"]}, "context must be a dict"),
        (
            {"context": {"a b": 1}},
            "context must have names of tracks as keys that are valid Python identifiers",
        ),
        ({"context": {"a": 0}}, r"context\['a'\] must be >= 1"),
        ({"context_mixer": "dot"}, "context_mixer must be one of"),
        ({"mixer_options": {"edge_features": 3}}, "must not contain 'edge_features'"),
        ({"mixer_options": {"edge_hidden": 3}}, "mixer_options must contain options"),
        ({"max_distance": 0}, "max_distance must be a finite number > 0"),
    ],
)
def test_a_constructor_names_what_is_wrong(change, says):
    with pytest.raises(ValueError, match=says):
        ga.models.ProteinModel(D, 2, H, **change)


def test_a_call_names_what_is_wrong():
    model, structure = model_of("dot", context=TRACKS), complex_of(8, 4)
    tokens = tokens_of(model, structure)
    for given, says in [
        (
            {"structure": complex_of(5)},
            r"structure must have one residue per token .* got structures of \[5\]",
        ),
        ({"structure": "1abc"}, "structure must be a graphattn.data.Structure"),
        (
            {"structure": structure, "positions": torch.arange(12)},
            "positions must be None if structure is given",
        ),
        ({"edge_features": torch.zeros(3, 12)}, "graph must be given together with edge_features"),
        ({"context": {"other": tokens}}, "tracks .secondary, exposed, partner., got"),
        ({"context": {"exposed": torch.zeros(12, 2)}}, r"\[\*, M, 1\]"),
        ({"context": {"secondary": torch.full((12,), 3)}}, "from 0 to 2, got 3"),
        ({"context": {"secondary": torch.zeros(9).long()}}, r"one row per token \(12\), got 9"),
    ]:
        with pytest.raises(ValueError, match=says):
            model(tokens, **given)
    with pytest.raises(ValueError, match=r"tokens must be 0 \.\. 21"):
        model(torch.tensor([22]))
    with pytest.raises(ValueError, match="cannot generate token by token"):
        model.init_cache(1)
    with pytest.raises(ValueError, match="at least one residue"):
        model.embed("--")


@pytest.mark.long
@pytest.mark.parametrize("mixer", ["dot", "mix"])
def test_it_learns_letters_that_only_space_tells(mixer):
    """Letters are those of the other strand's residue beside it, which is masked."""
    torch.manual_seed(0)
    line = torch.arange(8.0)[:, None] * torch.tensor([4.0, 0.0, 0.0])
    places = torch.cat([line, line + torch.tensor([0.0, 3.0, 0.0])])
    index = torch.arange(2).repeat_interleave(8)
    model = ga.models.ProteinModel(
        32, 2, 4, mixer=mixer, neighbors=1, window=1, max_offset=2,
        mixer_options={"edge_hidden": 16} if mixer == "mix" else None,
    )  # fmt: skip
    optimizer = torch.optim.AdamW(ga.train.parameter_groups(model), lr=5e-3)
    losses = []
    for _ in range(60):
        strand = torch.randint(20, (16, 8))
        tokens = torch.cat([strand, strand], 1)
        masked = torch.zeros(16, 16, dtype=torch.bool)
        masked[:, 8:] = True
        inputs = tokens.masked_fill(masked, model.mask_token)
        structure = Structure("A" * 16, places, index, ("A", "B"))
        loss = ga.train.masked_token_loss(model(inputs, structure=structure), tokens, masked)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > 2.8  # log 21 = 3.04
    assert sum(losses[-5:]) / 5 < 0.5
