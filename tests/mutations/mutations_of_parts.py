"""Mistakes in what whole models are made of: layers, sums, graphs, and what is counted of them."""

from mutation import Mutation

LANGUAGE = "tests/models/test_models_causal_lm.py"
NOISE = "tests/models/test_models_encoder_noise.py"
VISION = "tests/models/test_models_vision.py"
LINEAR = "tests/nn/test_nn_linear_attention.py"
GRID_BLOCKS = "tests/graphs/test_graphs_grid_blocks.py"
STEPS_RECORDED = "tests/diagnostics/test_diagnostics_record_steps.py"
DROP_PATH = "tests/nn/test_nn_drop_path.py"
PERMUTE = "tests/graphs/test_graphs_permute.py"
REORDER = "tests/graphs/test_graphs_reorder.py"

LAYOUTS = "tests/ops/test_ops_layouts.py"
SCORES = "tests/ops/test_ops_check_score.py"
CALLS = "tests/nn/test_nn_argument_names.py"
ARGUMENTS = "tests/graphs/test_graphs_argument_names.py"
PERSISTENCE = "tests/dynamics/test_dynamics_persistence.py"

MUTATIONS = [
    Mutation(
        "the distance of two hulls is compared with the smaller diameter",
        "graphattn/dynamics/persistence.py",
        "max(width[a], width[b]) + slack",
        "min(width[a], width[b]) + slack",
        (f"{PERSISTENCE}::test_tokens_apart_are_not_hulls_apart",),
    ),
    Mutation(
        "a group of k - 1 tokens is certified",
        "graphattn/dynamics/persistence.py",
        "return len(group) >= self.needed[0]",
        "return len(group) >= self.needed[0] - 1",
        (f"{PERSISTENCE}::test_certified_groups_never_exchange_in_300_simulations",),
    ),
    Mutation(
        "sources outside of a group count as its own",
        "graphattn/dynamics/persistence.py",
        "np.bincount(target[inside[source]], minlength=self.num_tokens)",
        "np.bincount(target, minlength=self.num_tokens)",
        (f"{PERSISTENCE}::test_certified_groups_never_exchange_in_300_simulations",),
    ),
    Mutation(
        "two groups that are too near are certified together with others",
        "graphattn/dynamics/persistence.py",
        "while (pair := _too_near(x, group)) is not None:",
        "if (pair := _too_near(x, group)) is not None:",
        (f"{PERSISTENCE}::test_tokens_apart_are_not_hulls_apart",),
    ),
    Mutation(
        "another layout is said to fit whatever the graph",
        "graphattn/ops/inputs.py",
        "return (targets, sources) == needed",
        "return True",
        (
            f"{LAYOUTS}::test_heads_before_tokens_are_told_to_be_transposed[dot-graph]",
            f"{LAYOUTS}::test_sizes_that_fit_in_no_layout_name_the_axes_and_no_remedy[dot]",
        ),
    ),
    Mutation(
        "axes of another layout are counted from the batch on",
        "graphattn/ops/inputs.py",
        "transpose({dims - 3}, {dims - 2})",
        "transpose(1, 2)",
        (f"{LAYOUTS}::test_axes_are_counted_from_the_front_whatever_the_batch",),
    ),
    Mutation(
        "a call without a graph reaches the layer",
        "graphattn/nn/files/config.py",
        "if len(args) < num_required:",
        "if False:",
        (f"{CALLS}::test_a_call_without_a_graph_says_what_makes_one[PreNormBlock]",),
    ),
    Mutation(
        "a call on a graph without a context reaches the layer",
        "graphattn/nn/base/padded_rows.py",
        "if not kwargs and len(args) >= num_required:",
        "if not kwargs:",
        (f"{CALLS}::test_a_call_without_a_context_names_it",),
    ),
    Mutation(
        "numbers to be added become the opposite graph",
        "graphattn/graphs/arguments.py",
        "from_mask(mask == 0)",
        "from_mask(mask.bool())",
        (f"{CALLS}::test_what_is_no_graph_is_told_how_it_becomes_one[KrauseAttention]",),
    ),
    Mutation(
        "an error of a function itself is taken for a wrong name",
        "graphattn/near_names.py",
        "            if not unknown:\n                raise\n",
        "",
        (f"{ARGUMENTS}::test_other_errors_stay_as_python_has_them",),
    ),
    Mutation(
        "a public function is another one than where it is defined",
        "graphattn/near_names.py",
        "namespace[name] = vars(sys.modules[wrapped.__module__])[name] = wrapped",
        "namespace[name] = wrapped",
        (f"{ARGUMENTS}::test_a_function_looks_as_it_was_written[causal_graph]",),
    ),
    Mutation(
        "a score is checked without NaN in another edge",
        "graphattn/ops/attention/logits/check_score.py",
        "query[..., :1, :], key[..., :1, :] = torch.nan, torch.nan",
        "pass",
        (f"{SCORES}::test_a_wrong_score_is_told_which_method_is_wrong",),
    ),
    Mutation(
        "parameters of a score are not among what gradients must reach",
        "graphattn/ops/attention/logits/check_score.py",
        "        if value.requires_grad:\n            leaves[name] = wide\n",
        "",
        (f"{SCORES}::test_a_wrong_score_is_told_which_method_is_wrong",),
    ),
    Mutation(
        "gradients are not checked where tokens are 0",
        "graphattn/ops/attention/logits/check_score.py",
        "    _check_special_tokens(score, method, logits, leaves)\n\n\n",
        "\n\n",
        (f"{SCORES}::test_a_wrong_score_is_told_which_method_is_wrong",),
    ),
    Mutation(
        "an error of a score inside an operation stays raw",
        "graphattn/ops/attention/logits/score.py",
        "except (IndexError, RuntimeError, TypeError) as error:",
        "except KeyError as error:",
        (f"{SCORES}::test_errors_of_a_score_inside_an_operation_name_the_score",),
    ),
    Mutation(
        "what is left of dropped paths is not scaled",
        "graphattn/nn/blocks/drop_path.py",
        "keep.to(x.dtype) / (1 - share)",
        "keep.to(x.dtype)",
        (f"{VISION}::test_a_path_is_dropped_for_a_whole_image[dot-1]",),
    ),
    Mutation(
        "packed sequences are dropped together",
        "graphattn/nn/blocks/drop_path.py",
        "parts = max(len(sizes), 1)",
        "parts = 1",
        (f"{DROP_PATH}::test_packed_sequences_are_dropped_one_by_one",),
    ),
    Mutation(
        "a block's shift and scale change places",
        "graphattn/nn/blocks/block.py",
        "shift_mix, scale_mix, gate_mix, shift_map",
        "scale_mix, shift_mix, gate_mix, shift_map",
        (f"{NOISE}::test_the_model_is_the_backbone_of_lou_et_al",),
    ),
    Mutation(
        "sines of a noise level come first",
        "graphattn/nn/blocks/noise_embedding.py",
        "[angle.cos(), angle.sin()]",
        "[angle.sin(), angle.cos()]",
        (f"{NOISE}::test_the_model_is_the_backbone_of_lou_et_al",),
    ),
    Mutation(
        "waves of a noise level reach the longest period",
        "graphattn/nn/blocks/noise_embedding.py",
        "(-math.log(self.max_period) / half)",
        "(-math.log(self.max_period) / (half - 1))",
        (f"{NOISE}::test_the_model_is_the_backbone_of_lou_et_al",),
    ),
    Mutation(
        "running sums forget what rounding added",
        "graphattn/nn/caches/running_cache.py",
        "torch.sub(torch.sub(after, total, out=total), more, out=more)",
        "more.zero_()",
        (f"{LINEAR}::test_rounding_does_not_add_up_in_a_long_text_that_repeats_itself[dtype0]",),
    ),
    Mutation(
        "what rounding added is added again",
        "graphattn/nn/caches/running_cache.py",
        'self.sums["total_rest"].neg_()',
        'self.sums["total_rest"]',
        (f"{LINEAR}::test_rounding_does_not_add_up_in_a_long_text_that_repeats_itself[dtype0]",),
    ),
    Mutation(
        "a token joins the sums one step early",
        "graphattn/nn/caches/running_cache.py",
        "max(0, held + n - self.rollback)",
        "max(0, held + n - self.rollback + 1)",
        (f"{LINEAR}::test_tokens_that_are_taken_back_were_never_seen[None]",),
    ),
    Mutation(
        "padding joins the running sums",
        "graphattn/nn/caches/running_cache.py",
        "{name: clear_invalid(x, valid) for name, x in tokens.items()}",
        "dict(tokens)",
        (f"{LINEAR}::test_padded_texts_go_on_beside_each_other[0]",),
    ),
    Mutation(
        "an emptied cache keeps its sums",
        "graphattn/nn/caches/running_cache.py",
        "                x.zero_()\n",
        "                pass\n",
        (f"{LINEAR}::test_tokens_that_are_taken_back_were_never_seen[None]",),
    ),
    Mutation(
        "rotation turns the denominator of linear attention",
        "graphattn/ops/linear_attention/averages.py",
        "return above, sums(query, key, ones, graph, transposed=False)",
        "return above, sums(*rotated, ones, graph, transposed=False)",
        (f"{LINEAR}::test_rotation_turns_the_numerator_alone",),
    ),
    Mutation(
        "a row of linear attention sees its own token",
        "graphattn/ops/linear_attention/intervals.py",
        "    if band.self_loops:\n",
        "    if True:\n",
        (f"{LINEAR}::test_the_layer_is_its_formula[window-{{}}]",),
    ),
    Mutation(
        "a long window of linear attention counts a token twice",
        "graphattn/ops/linear_attention/sums.py",
        "backward=True, strict=True",
        "backward=True",
        (f"{LINEAR}::test_the_layer_is_its_formula[long causal window-{{}}]",),
    ),
    Mutation(
        "windows of linear attention end a token late",
        "graphattn/ops/linear_attention/sums.py",
        "ones.tril(seen - 1)",
        "ones.tril(seen)",
        (f"{LINEAR}::test_the_layer_is_its_formula[causal window-{{}}]",),
    ),
    Mutation(
        "a running sum of linear attention knows its own chunk",
        "graphattn/ops/linear_attention/sums.py",
        "torch.cumsum(matrices[:, :-1], 1, out=known[:, 1:])",
        "torch.cumsum(matrices, 1, out=known)",
        (f"{LINEAR}::test_the_layer_is_its_formula[causal-{{}}]",),
    ),
    Mutation(
        "shifted blocks of linear attention are not shifted",
        "graphattn/ops/linear_attention/intervals.py",
        "min(shift or block_size, num_tokens)",
        "min(block_size, num_tokens)",
        (f"{LINEAR}::test_the_layer_is_its_formula[blocks-{{}}]",),
    ),
    Mutation(
        "offsets in blocks of a grid go from source to target",
        "graphattn/graphs/structures/grid_blocks.py",
        "down = source // self.width - target // self.width",
        "down = target // self.width - source // self.width",
        (f"{GRID_BLOCKS}::test_a_table_reads_the_rows_of_swin_s_index_backwards",),
    ),
    Mutation(
        "blocks of a grid are put in order as if they were not shifted",
        "graphattn/graphs/structures/grid_blocks.py",
        "axis.shift or axis.block_size",
        "axis.block_size",
        (f"{GRID_BLOCKS}::test_the_order_of_blocks_makes_every_block_a_run",),
    ),
    Mutation(
        "steps are recorded with a key too many",
        "graphattn/diagnostics/attention/step_calls.py",
        "cache.window - 1)",
        "cache.window)",
        (f"{STEPS_RECORDED}::test_the_sink_of_steps_is_a_token_of_the_text_and_not_of_the_window",),
    ),
    Mutation(
        "the first token of a recorded step is that of its window",
        "graphattn/diagnostics/attention/step_calls.py",
        "cache.position - before,",
        "0,",
        (f"{STEPS_RECORDED}::test_the_sink_of_steps_is_a_token_of_the_text_and_not_of_the_window",),
    ),
    Mutation(
        "windows longer than a text cost more than the text",
        "graphattn/diagnostics/cost.py",
        "min(window or num_tokens, num_tokens)",
        "(window or num_tokens)",
        (f"{LANGUAGE}::test_operations_of_texts_shorter_than_a_window",),
    ),
    Mutation(
        "tokens of a permuted graph forget where they stood",
        "graphattn/graphs/permutations.py",
        "positions=(positions, source_positions),",
        "positions=None,",
        (f"{PERMUTE}::test_positions_travel_with_their_tokens[causal window]",),
    ),
    Mutation(
        "a causal graph may leak the future once it is permuted",
        "graphattn/graphs/permutations.py",
        "has_causal_part=graph.has_causal_part,",
        "has_causal_part=False,",
        (
            f"{PERMUTE}::test_a_permuted_causal_graph_claims_no_order_and_still_refuses_to_leak_"
            "the_future[graph0]",
        ),
    ),
    Mutation(
        "a Hilbert curve does not turn",
        "graphattn/graphs/orders.py",
        "axes[a] = axes[a] ^ swap",
        "axes[a] = axes[a]",
        (f"{REORDER}::test_consecutive_cells_of_the_curve_are_neighbours_on_a_full_grid[16-2]",),
    ),
    Mutation(
        "points of a batch share one curve",
        "graphattn/graphs/orders.py",
        "return order[item[order].argsort(stable=True)].to(graph.device)",
        "return order.to(graph.device)",
        (f"{REORDER}::test_points_nowhere_come_last_in_their_own_part",),
    ),
]
