"""Mistakes in protein models, in structures and in what is read of them."""

from mutation import Mutation

PROTEIN = "tests/models/test_models_protein.py"
CHAINS_IN_SPACE = "tests/data/test_data_structures_graphs.py"
CHAINS = "tests/data/test_data_structures_chains.py"
STRUCTURES = "tests/data/test_data_structures.py"
ASSEMBLIES = "tests/data/test_data_structures_assemblies.py"
TRACKS = "tests/data/test_data_structures_tracks.py"
EMBED = "tests/cli/test_cli_embed.py"

MUTATIONS = [
    Mutation(
        "frames of a trajectory are one model",
        "graphattn/data/structures/formats/pdb.py",
        '("MODEL", "ENDMDL", "END")',
        '("MODEL", "ENDMDL")',
        (f"{STRUCTURES}::test_every_end_of_a_frame_begins_a_model[END]",),
    ),
    Mutation(
        "an amino acid that a simulation names is a modification of another one",
        "graphattn/data/structures/residues.py",
        "if not is_hetero:",
        "if is_hetero:",
        (f"{STRUCTURES}::test_names_of_force_fields_are_those_of_their_amino_acid",),
    ),
    Mutation(
        "a quoted value of a CIF file is a keyword",
        "graphattn/data/structures/formats/mmcif.py",
        "words.append(_Quoted(quoted))",
        "words.append(quoted)",
        (f"{STRUCTURES}::test_every_spelling_of_cif_is_read[a name in quotes]",),
    ),
    Mutation(
        "log-odds of a mutation have the wrong sign",
        "graphattn/models/proteins/scores.py",
        "of_letters[token_of[mutation.mutant]] - of_letters[token_of[mutation.wild]]",
        "of_letters[token_of[mutation.wild]] - of_letters[token_of[mutation.mutant]]",
        (f"{PROTEIN}::test_scores_are_those_of_a_loop_of_single_masked_passes[False-dot]",),
    ),
    Mutation(
        "a mutation is scored without masking its residue",
        "graphattn/models/proteins/scores.py",
        "masked[row, some] = self.mask_token",
        "pass",
        (f"{PROTEIN}::test_scores_are_those_of_a_loop_of_single_masked_passes[False-dot]",),
    ),
    Mutation(
        "mutations count residues from 0",
        "graphattn/models/proteins/mutations.py",
        "index = number - 1",
        "index = number % len(sequence)",
        (f"{PROTEIN}::test_scores_are_those_of_a_loop_of_single_masked_passes[False-dot]",),
    ),
    Mutation(
        "insertion codes of mutations are ignored",
        "graphattn/models/proteins/mutations.py",
        "structure.insertion_codes[index].upper() == code.upper()",
        "True",
        (f"{PROTEIN}::test_numbers_may_be_those_of_the_structure",),
    ),
    Mutation(
        "the chain of a mutation is ignored",
        "graphattn/models/proteins/mutations.py",
        "(chain is None or ids[int(structure.chain_index[index])] == chain)",
        "True",
        (f"{PROTEIN}::test_numbers_may_be_those_of_the_structure",),
    ),
    Mutation(
        "chains are read as one sequence",
        "graphattn/models/proteins/scores.py",
        'return tokens, {"graph": self._one_by_one(sizes)}',
        "return tokens, {}",
        (f"{PROTEIN}::test_chains_are_read_one_by_one_where_structures_are_not",),
    ),
    Mutation(
        "sequences of a list see a token of padding",
        "graphattn/models/proteins/scores.py",
        "torch.arange(padded.shape[1]) < torch",
        "torch.arange(padded.shape[1]) <= torch",
        (f"{PROTEIN}::test_embeddings_of_a_list_are_those_of_its_proteins",),
    ),
    Mutation(
        "proteins in rows have a residue of padding",
        "graphattn/models/proteins/calls.py",
        "torch.arange(N, device=device) < lengths",
        "torch.arange(N, device=device) <= lengths",
        (f"{PROTEIN}::test_rows_and_packed_proteins_are_each_what_it_is_alone[dot]",),
    ),
    Mutation(
        "the track of a residue that is padding is read",
        "graphattn/models/proteins/calls.py",
        "known = known & valid",
        "pass",
        (f"{PROTEIN}::test_the_track_of_padding_is_never_read",),
    ),
    Mutation(
        "a track is looked at behind the step of the one before",
        "graphattn/models/proteins/context_steps.py",
        "step = layer(y,",
        "step = layer(self.norm(x),",
        (f"{PROTEIN}::test_one_step_is_its_layers_added_up",),
    ),
    Mutation(
        "offsets of a sequence go from source to target",
        "graphattn/models/proteins/residue_edges.py",
        "torch.stack([place, place.new_full((len(offset),), len(offset))])",
        "torch.stack([place.new_full((len(offset),), len(offset)), place])",
        (f"{PROTEIN}::test_a_sequence_alone_has_offsets_and_no_distances[dot]",),
    ),
    Mutation(
        "consensus exerts a force along self-loops in space",
        "graphattn/models/proteins/calls.py",
        '[reach != "near" for reach',
        "[True for reach",
        (f"{PROTEIN}::test_the_model_is_its_blocks_with_what_is_known_of_edges[consensus]",),
    ),
    Mutation(
        "the next chain begins one place behind the last",
        "graphattn/data/structures/edges.py",
        "is_chain_break = (chain_index.diff() != 0) | restarts",
        "is_chain_break = restarts",
        (f"{CHAINS_IN_SPACE}::test_no_window_is_long_enough_for_another_chain",),
    ),
    Mutation(
        "an inserted residue far away is another chain",
        "graphattn/data/structures/edges.py",
        "(step < 0) | (step == 0) & (codes.diff() == 0)",
        "step <= 0",
        (f"{CHAINS_IN_SPACE}::test_an_inserted_residue_behind_a_hole_is_of_the_same_chain",),
    ),
    Mutation(
        "holes that numbers do not tell are not seen",
        "graphattn/data/structures/edges.py",
        "torch.maximum(step.clamp(min=1), fewest)",
        "step.clamp(min=1)",
        (f"{CHAINS_IN_SPACE}::test_an_inserted_residue_behind_a_hole_is_of_the_same_chain",),
    ),
    Mutation(
        "a long window reaches into the next chain",
        "graphattn/data/structures/edges.py",
        " & (\n            chain_index[hop:] == chain_index[:-hop]\n        )",
        "",
        (f"{CHAINS_IN_SPACE}::test_no_window_is_long_enough_for_another_chain",),
    ),
    Mutation(
        "an unknown place reaches the gradients of others",
        "graphattn/data/structures/edges.py",
        "ca_positions.masked_fill(~is_known, 0)",
        "ca_positions",
        (f"{CHAINS_IN_SPACE}::test_gradients_reach_the_coordinates_and_stay_finite",),
    ),
    Mutation(
        "an unknown place has a distance",
        "graphattn/data/structures/edges.py",
        ".exp().masked_fill(~known, 0)",
        ".exp()",
        (
            f"{CHAINS_IN_SPACE}::test_residues_without_a_place_keep_their_window_and_have_no_neighbours",
        ),
    ),
    Mutation(
        "offsets along a chain go from source to target",
        "graphattn/data/structures/edges.py",
        "positions[..., source] - positions[..., target]",
        "positions[..., target] - positions[..., source]",
        (f"{PROTEIN}::test_the_model_is_its_blocks_with_what_is_known_of_edges[dot]",),
    ),
    Mutation(
        "edges between chains have an offset",
        "graphattn/data/structures/edges.py",
        "return features * same_chain[:, None]",
        "return features",
        (f"{PROTEIN}::test_the_model_is_its_blocks_with_what_is_known_of_edges[dot]",),
    ),
    Mutation(
        "helices run over breaks of a chain",
        "graphattn/data/structures/tracks.py",
        "atoms.res_id = structure.positions.cpu().numpy()",
        "atoms.res_id = numpy.arange(len(structure))",
        (f"{TRACKS}::test_no_helix_runs_over_a_break_of_a_chain",),
    ),
    Mutation(
        "a loop at a second location is read twice",
        "graphattn/data/structures/residues.py",
        "alpha[begins & ~_is_another_location(atoms[alpha], begins.cumsum() - 1)]",
        "alpha[begins]",
        (f"{STRUCTURES}::test_locations_of_a_whole_loop_one_after_the_other_are_one_loop",),
    ),
    Mutation(
        "ligands behind a chain are residues",
        "graphattn/data/structures/formats/pdb.py",
        "index < chain_end.get(record[_CHAIN], len(records))",
        "index >= 0",
        (f"{STRUCTURES}::test_amino_acid_ligands_after_the_chain_are_not_part_of_it",),
    ),
    Mutation(
        "copies of chains are turned the other way round",
        "graphattn/data/structures/assembly.py",
        "matrix[:, :, :3] @",
        "matrix[:, :, :3].mT @",
        (f"{ASSEMBLIES}::test_chains_are_copied_as_remark_350_says",),
    ),
    Mutation(
        "operations are applied in the order in which they are written",
        "graphattn/data/structures/formats/mmcif.py",
        "for operation in operations:\n        result",
        "for operation in reversed(operations):\n        result",
        (f"{ASSEMBLIES}::test_operations_of_mmcif_are_combined_as_their_expression_says",),
    ),
    Mutation(
        "other atoms stand at the last location",
        "graphattn/data/structures/residues.py",
        '.argsort(kind="stable")][::-1]',
        '.argsort(kind="stable")]',
        (f"{CHAINS}::test_other_atoms_stand_at_the_location_of_the_c_alpha",),
    ),
    Mutation(
        "residues of FASTA are numbered from 0",
        "graphattn/cli/embed.py",
        "list(range(1, len(sequence) + 1))",
        "list(range(len(sequence)))",
        (f"{EMBED}::test_every_record_has_its_features_and_their_mean",),
    ),
    Mutation(
        "assemblies of files that were joined are those of the first",
        "graphattn/data/structures/formats/pdb.py",
        "            assemblies.clear()\n",
        "            break\n",
        (f"{ASSEMBLIES}::test_an_assembly_of_joined_files_is_that_of_the_file_with_the_model",),
    ),
]
