"""Mistakes in plans of communication between ranks."""

from mutation import Mutation

PLANS = "tests/distributed/test_plans.py"
ROWS = f"{PLANS}::test_a_plan_has_the_rows_that_the_edges_need_and_no_others"

WHOLE = "tests/ops/test_ops_whole.py"
FUSED = "tests/ops/test_ops_fused.py"
MUTATIONS = [
    Mutation(
        "an owner is read from the chunk after the one it owns",
        "graphattn/distributed/layout.py",
        "parts = self.chunk_of(stop - 1) - first + 1",
        "parts = self.chunk_of(stop) - first + 1",
        (f"{ROWS}[causal-False]",),
    ),
    Mutation(
        "the second chunk of a zigzag is not taken out of what a rank receives",
        "graphattn/distributed/planning/needs.py",
        "for numbers in (rank, sources.num_chunks - 1 - rank) if sources.zigzag else (rank,):",
        "for numbers in (rank,):",
        (f"{ROWS}[causal-True]",),
    ),
    Mutation(
        "targets that see the sources of a rank are forgotten",
        "graphattn/distributed/planning/needs.py",
        "for seen in (part, flipped) if flipped != part else (part,):",
        "for seen in (part,):",
        (f"{ROWS}[causal window-False]",),
    ),
    Mutation(
        "runs of two ranks are joined",
        "graphattn/distributed/planning/needs.py",
        "line = self.rank * (num_tokens + 1)",
        "line = self.rank * num_tokens",
        (f"{PLANS}::test_a_table_of_runs_joins_and_cuts_each_rank_alone",),
    ),
    Mutation(
        "rows come again in the backward pass of every exchange",
        "graphattn/distributed/planning/plans.py",
        '(rows if self.exchange == "ring" else 0)',
        "rows",
        (f"{PLANS}::test_bytes_of_rows_go_back_to_those_who_sent_them",),
    ),
    Mutation(
        "a plan for a causal window is a zigzag, which balances nothing",
        "graphattn/distributed/planning/plans.py",
        "if int(balanced.edges.max()) <= WORTH_ZIGZAG * int(plain.edges.max()):",
        "if True:",
        (f"{PLANS}::test_a_zigzag_that_balances_nothing_is_not_chosen",),
    ),
    Mutation(
        "a batch begins at the sequence after the first one that is seen",
        "graphattn/distributed/seen.py",
        "bisect_right(structure.target_ptr, start) - 1",
        "bisect_right(structure.target_ptr, start + 1) - 1",
        (f"{ROWS}[batch-False]",),
    ),
    Mutation(
        "fused attention gets features that do not lie side by side",
        "graphattn/ops/attention/structured/whole.py",
        "else featurewise(x)",
        "else x",
        (f"{WHOLE}::test_features_need_not_lie_side_by_side",),
    ),
    Mutation(
        "the future decides how rows of a causal graph are computed",
        "graphattn/ops/attention/structured/whole.py",
        "of_key.cummax(-1).values if self.causal else",
        "of_key.amax(-1, keepdim=True) if self.causal else",
        (f"{WHOLE}::test_a_bad_number_changes_no_bit_of_rows_that_do_not_see_it",),
    ),
    Mutation(
        "gradients of log-sums get lost in fused attention",
        "graphattn/ops/attention/structured/whole.py",
        "d_query = d_query - query * d_lse * self.scales",
        "pass",
        (f"{WHOLE}::test_values_and_gradients_are_those_of_the_reference",),
    ),
    Mutation(
        "the largest number of a query counts once, not for every feature",
        "graphattn/ops/attention/structured/whole.py",
        "of_query = of_query * self.query.shape[-1]",
        "pass",
        (f"{WHOLE}::test_many_features_of_moderate_size_are_too_large_together",),
    ),
    Mutation(
        "half squares are rounded to half precision",
        "graphattn/ops/attention/fused.py",
        "return 1 if dtype in WIDE else 3",
        "return 1",
        (f"{FUSED}::test_half_squares_keep_the_digits_of_float32_in_half_precision",),
    ),
    Mutation(
        "half squares overflow in float16",
        "graphattn/ops/attention/fused.py",
        "UNIT = 64.0",
        "UNIT = 1.0",
        (f"{FUSED}::test_half_squares_beyond_the_largest_number_of_float16_are_finite",),
    ),
    Mutation(
        "half squares have no gradient",
        "graphattn/ops/attention/fused.py",
        "pieces[0] = pieces[0] + (half - half.detach()).to(dtype)",
        "pass",
        (f"{FUSED}::test_values_and_gradients_are_those_of_the_reference",),
    ),
    Mutation(
        "sequences of a batch may differ",
        "graphattn/ops/attention/fused.py",
        "not all(part == parts[0] for part in parts[1:])",
        "False",
        (f"{FUSED}::test_other_graphs_are_refused",),
    ),
    Mutation(
        "engines get a scale that is not positive",
        "graphattn/ops/attention/fused.py",
        "if scale is None or scale <= 0:",
        "if scale is None:",
        (f"{FUSED}::test_a_scale_that_is_not_positive_is_no_matter",),
    ),
    Mutation(
        "second derivatives of fused attention get lost",
        "graphattn/ops/attention/fused.py",
        "if not torch.is_grad_enabled():",
        "if True:",
        (f"{FUSED}::test_gradients_can_be_differentiated",),
    ),
    Mutation(
        "features that do not lie side by side are left to torch",
        "graphattn/ops/attention/fused.py",
        "return x if x.stride(-1) == 1 else x.contiguous()",
        "return x",
        (f"{FUSED}::test_no_logits_of_all_pairs_are_stored",),
    ),
    Mutation(
        '"auto" takes fused attention over causal graphs',
        "graphattn/ops/attention/fused.py",
        "sequences is None or sequences[1]",
        "sequences is None",
        (f"{FUSED}::test_auto_takes_what_was_measured_to_be_the_fastest",),
    ),
    Mutation(
        "the mean of no keys is NaN",
        "graphattn/ops/attention/fused.py",
        "count = max(key.shape[1], 1)",
        "count = key.shape[1]",
        (f"{FUSED}::test_values_and_gradients_are_those_of_the_reference",),
    ),
    Mutation(
        "a call with a mask runs as one without",
        "graphattn/ops/attention/api.py",
        "bias is not None, per_offset, valid != (None, None), needs_log_sums",
        "bias is not None, per_offset, False, needs_log_sums",
        (f"{FUSED}::test_options_are_refused_with_the_reason",),
    ),
    Mutation(
        "networks of full width share one first layer",
        "graphattn/nn/edges/network.py",
        'self.groups = 1 if networks_of(edge_input, edge_networks) == "shared" else heads',
        'self.groups = 1 if edge_input == "full" else heads',
        (
            "tests/nn/test_nn_parameter_counts.py::test_a_full_width_network_per_head_grows_as_algorithm_5_says",
        ),
    ),
]
