"""The tests bite: each plausible mistake below, made in a copy of the code, fails a named test."""

import ast
from collections.abc import Iterator
from pathlib import Path

import mutations_of_data
import mutations_of_failures
import mutations_of_imports
import mutations_of_lists
import mutations_of_models
import mutations_of_numbers
import mutations_of_objectives
import mutations_of_parts
import mutations_of_plans
import mutations_of_proteins
import mutations_of_runs
import mutations_of_shards
import pytest
from checkout import Checkout
from mutation import Mutation

TOP = Path(__file__).resolve().parents[1]
ATTENTION = "tests/ops/test_ops_attention_values.py"
CONSENSUS = "tests/ops/test_ops_consensus_values.py"
THEOREMS = "tests/ops/test_ops_consensus_theorems.py"
TOP_K = "tests/ops/test_ops_top_k.py"
SDPA = "tests/ops/test_ops_sdpa.py"
STRUCTURED = "tests/ops/test_ops_structured.py"
CHUNKED = "tests/ops/test_ops_consensus_structured.py"
NATIVE_CONSENSUS = "tests/native/test_native_consensus.py"
NATIVE_BLOCKS = "tests/native/test_native_block_steps.py"
NATIVE_STEPS = "tests/native/test_native_consensus_steps.py"
MESSAGES = "tests/nn/test_nn_message_passing.py"
GUARANTEES = "tests/nn/test_nn_consensus_guarantees.py"
ROTARY = "tests/nn/test_nn_rotary.py"
FIXED_COSTS = "tests/nn/test_nn_fixed_costs.py"
REPEATED_CALLS = "tests/nn/test_nn_repeated_calls.py"
KERNELS = "tests/kernels/test_kernels_attention.py"
GAUSSIAN = "tests/kernels/test_kernels_gaussian.py"
BANDS = "tests/kernels/test_kernels_nan.py"
FAR_OFFSETS = "tests/kernels/test_kernels_offsets.py"
EDGES = "tests/kernels/test_kernels_edges.py"
KERNELS_TOP_K = "tests/kernels/test_kernels_topk.py"
EDGES_NAN = "tests/kernels/test_kernels_edges_nan.py"
NEIGHBORS = "tests/kernels/test_kernels_knn.py"
EXACT_NEIGHBORS = "tests/graphs/test_graphs_exact_neighbors.py"
NO_WAITING = "tests/kernels/test_kernels_no_waiting.py"
TABLES = "tests/graphs/test_graphs_neighbor_tables.py"
FUSED = "tests/kernels/test_kernels_consensus.py"
PIECES = "tests/kernels/test_kernels_consensus_pieces.py"
FUSED_NAN = "tests/kernels/test_kernels_consensus_nan.py"
STEP = "tests/kernels/test_kernels_window_step.py"
DEVICES = "tests/kernels/test_kernels_devices.py"
PRECISION = "tests/kernels/test_kernels_precision.py"
STREAMED = "tests/kernels/test_kernels_streamed_top_k.py"
PREDICTION = "tests/kernels/test_kernels_prediction.py"
STORED = "tests/kernels/test_kernels_stored.py"
UNSEEN = "tests/ops/test_ops_unseen.py"
HOLDS = "tests/ops/test_ops_what_holds.py"
LAYERS_UNSEEN = "tests/nn/test_nn_unseen.py"
CHECKPOINTING = "tests/nn/test_nn_checkpointing.py"
CACHE_LENGTHS = "tests/integrations/test_integrations_cache_lengths.py"
OVERRIDES = "tests/nn/test_nn_overrides.py"
CONFIG = "tests/nn/test_nn_config.py"
NAMES = "tests/nn/test_nn_argument_names.py"
FILES = "tests/models/test_models_files.py"
ENDS = "tests/spectral/test_spectral_block_laplacian.py"
MODELS = "tests/spectral/test_spectral_model_certificates.py"
PIXELS = "tests/plot/test_plot_pixels.py"
CLUSTERS = "tests/cli/test_cli_clusters.py"
EDGE_VALUES = "tests/graphs/test_graphs_edge_values.py"
SAVING = "tests/graphs/test_graphs_saving.py"
READERS = "tests/data/test_data_files.py"
DEMO = "tests/cli/test_cli_demo_training.py"
BENCH = "tests/bench/test_bench"
TARGETS = "tests/graphs/test_graphs_targets.py"
SECTIONS = "tests/ops/test_ops_sections.py"
SINK = "tests/ops/test_ops_sink.py"
SOFTCAP = "tests/ops/test_ops_softcap.py"
DROPOUT = "tests/ops/test_ops_dropout.py"
OPTIONS = "tests/nn/test_nn_attention_options.py"
PER_SAMPLE = "tests/ops/test_ops_edge_bias_per_sample.py"
BIASES = "tests/nn/test_nn_edge_bias.py"
OFFSETS = "tests/nn/test_nn_offset_bias.py"
FEATURES = "tests/ops/test_ops_consensus_edges.py"
DECODE = "tests/ops/test_ops_decode.py"
MERGE = "tests/ops/test_ops_merge.py"
CANDIDATES = "tests/ops/test_ops_candidates.py"
COLLATE = "tests/graphs/test_graphs_collate"
CACHES = "tests/nn/test_nn_caches.py"
BLOCK_STEPS = "tests/nn/test_nn_block_steps.py"
MODEL_STEPS = "tests/models/test_models_steps.py"

MUTATIONS = [
    Mutation(
        "top-k keeps the larger of two equal indices",
        "graphattn/ops/top_k.py",
        "logits.detach().argsort(dim=dim, descending=True, stable=True)",
        "logits.detach().argsort(dim=dim, stable=True).flip(dim)",
        (f"{TOP_K}::test_equal_distances_on_both_sides_keep_the_left_one",),
    ),
    Mutation(
        "nearest neighbours take the larger of two equal indices",
        "graphattn/graphs/search/distances.py",
        "order = squared.argsort(stable=True)",
        "order = squared.neg().argsort(stable=True).flip(0)",
        ("tests/graphs/test_graphs_knn.py::test_equal_distances_stand_in_order_of_index",),
    ),
    Mutation(
        "attention runs against the direction of the edges",
        "graphattn/ops/attention/reference.py",
        "source, target = graph.edge_index",
        "target, source = graph.edge_index",
        (f"{STRUCTURED}::test_values_and_gradients_are_those_of_the_reference",),
        count=2,
    ),
    Mutation(
        "tiles begin a token late",
        "graphattn/ops/attention/structured/chunked.py",
        "low = torch.minimum((first - before[of])",
        "low = torch.minimum((first - before[of] + 1)",
        (f"{STRUCTURED}::test_values_and_gradients_are_those_of_the_reference",),
    ),
    Mutation(
        "padding counts as edges of a tile",
        "graphattn/ops/attention/structured/chunks.py",
        "reduce(operator.and_, given)",
        "reduce(operator.or_, given)",
        (f"{STRUCTURED}::test_values_and_gradients_are_those_of_the_reference",),
    ),
    Mutation(
        "the gradient of a log-sum has the wrong sign",
        "graphattn/ops/attention/structured/chunks.py",
        "less if d_lse is None else less - d_lse",
        "less if d_lse is None else less + d_lse",
        (f"{STRUCTURED}::test_values_and_gradients_are_those_of_the_reference",),
    ),
    Mutation(
        "second derivatives put rows back in another order",
        "graphattn/ops/attention/structured/chunked.py",
        "where = torch.cat(places)",
        "where = torch.cat(places).sort().values",
        (f"{STRUCTURED}::test_a_product_with_the_hessian_is_that_of_the_reference",),
    ),
    Mutation(
        "tokens far from zero are left to products",
        "graphattn/ops/attention/structured/pair_scores.py",
        "SURE = 1e7",
        "SURE = 1e30",
        (f"{STRUCTURED}::test_a_common_offset_beyond_products_costs_no_digits",),
    ),
    Mutation(
        "gradients come from products, in which distances cancel",
        "graphattn/ops/attention/structured/pair_scores.py",
        "    if sure is True:\n        return _gradients",
        "    if True:\n        return _gradients",
        (f"{UNSEEN}::test_two_crowds_far_from_zero_and_from_each_other_keep_their_gradients",),
    ),
    Mutation(
        "0 * NaN in the products of a tile",
        "graphattn/ops/attention/structured/pair_scores.py",
        "    if finite:\n        return weights @ x\n",
        "    if True:\n        return weights @ x\n",
        (f"{STRUCTURED}::test_a_bad_token_changes_no_bit_before_it_and_none_beyond_its_window",),
    ),
    Mutation(
        "of equal logits in a tile the later source is kept",
        "graphattn/ops/attention/structured/chunks.py",
        "top_k_mask(row, top_k) &",
        "top_k_mask(row.flip(-1), top_k).flip(-1) &",
        (f"{STRUCTURED}::test_equal_keys_tie_wherever_they_stand_in_a_tile",),
    ),
    Mutation(
        "global tokens count twice",
        "graphattn/ops/attention/structured/plans.py",
        "mask.index_fill(1, tokens, False)",
        "mask.index_fill(1, tokens[:0], False)",
        (f"{STRUCTURED}::test_values_and_gradients_are_those_of_the_reference",),
    ),
    Mutation(
        "chunks of consensus leave sources where they are",
        "graphattn/ops/consensus/structured/sums.py",
        "return total, total if self.plan.energy else None",
        "return total, None",
        (f"{THEOREMS}::test_energy_is_exactly_a_gradient_step_of_the_energy",),
    ),
    Mutation(
        "padding counts as an edge of a chunk of consensus",
        "graphattn/ops/consensus/pieces.py",
        "return x if self.counts is None else x.masked_fill(",
        "return x if True else x.masked_fill(",
        (f"{CONSENSUS}::test_an_edge_that_touches_an_invalid_token_is_no_edge",),
    ),
    Mutation(
        "nearest neighbours by products trust their rounding",
        "graphattn/graphs/search/distances.py",
        "+ 2 * self.rounding[",
        "+ 0 * self.rounding[",
        (
            "tests/graphs/test_graphs_knn.py"
            "::test_in_tight_clusters_products_keep_what_rounding_may_exchange[torch]",
        ),
    ),
    Mutation(
        "nearest neighbours trust a tree to have left nobody out",
        "graphattn/graphs/search/kd_tree.py",
        "return rows[last <= ",
        "return rows[last < 0 * ",
        (f"{EXACT_NEIGHBORS}::test_neighbours_are_those_of_float64[tree-lattice-3]",),
    ),
    Mutation(
        "compiled radius graphs forget self-loops",
        "kernels/cpu/neighbors.py",
        "ctypes.c_int32(self_loops), ctypes.c_double(reach)]",
        "ctypes.c_int32(False), ctypes.c_double(reach)]",
        (f"{EXACT_NEIGHBORS}::test_more_edges_than_memory_is_laid_by_for",),
    ),
    Mutation(
        "compiled neighbours within a radius may be farther",
        "kernels/cpu/neighbors.py",
        "*given, ctypes.c_double(reach), index)",
        "*given, ctypes.c_double(math.inf), index)",
        (f"{EXACT_NEIGHBORS}::test_the_nearest_within_a_radius_are_no_farther",),
    ),
    Mutation(
        "compiled neighbours are looked for at the address of a wrapped tensor",
        "kernels/cpu/neighbors.py",
        "return not makes_fakes() and is_plain and",
        "return not makes_fakes() and",
        (f"{EXACT_NEIGHBORS}::test_wrapped_tensors_have_no_numbers_to_read",),
    ),
    Mutation(
        "compiled neighbours of points that are views are those of their memory",
        "kernels/cpu/neighbors.py",
        "    points = as_it_lies(points)\n"
        "    candidates = points if to_self else as_it_lies(candidates)\n    rows, width",
        "    candidates = points if to_self else as_it_lies(candidates)\n    rows, width",
        (f"{EXACT_NEIGHBORS}::test_any_number_of_points_and_neighbours",),
    ),
    Mutation(
        "a tree forgets the first of many equal points",
        "graphattn/graphs/search/kd_tree.py",
        "everyone - first < copies",
        "everyone - first >= copies",
        (f"{EXACT_NEIGHBORS}::test_neighbours_are_those_of_float64[tree-four places-3]",),
    ),
    Mutation(
        "row pointers count the edges of sources",
        "graphattn/graphs/edges/storage.py",
        "torch.bincount(self.compact_edges[1], minlength",
        "torch.bincount(self.compact_edges[0], minlength",
        (
            "tests/graphs/test_graphs_token_graph.py"
            "::test_the_pair_of_a_paper_is_the_flipped_column",
        ),
    ),
    Mutation(
        "R d without the 1 / sqrt(r) of Lambda's rows",
        "graphattn/ops/consensus/edge_network.py",
        "(self.beta / rank)[..., None] * low_rank",
        "self.beta[..., None] * low_rank",
        (f"{CHUNKED}::test_values_and_gradients_are_those_of_the_reference",),
    ),
    Mutation(
        "R itself without the 1 / sqrt(r) of Lambda's rows",
        "graphattn/ops/consensus/edge_network.py",
        "(self.beta / rank)[..., None, None] * gram",
        "self.beta[..., None, None] * gram",
        (f"{CONSENSUS}::test_edge_matrices_are_their_equation_and_positive_definite",),
    ),
    Mutation(
        "RoPE turns the other way",
        "graphattn/nn/rotary.py",
        "        cos, sin = rotation\n        if can_rotate(x, cos, sin):",
        "        cos, sin = rotation[0], -rotation[1]\n        if can_rotate(x, cos, sin):",
        (f"{ROTARY}::test_rotation_is_a_product_of_complex_numbers",),
    ),
    Mutation(
        "value_projection=False still projects",
        "graphattn/nn/dot_product.py",
        "nn.Linear(self.context_dim, kv_dim, bias=bias) if value_projection else None",
        "nn.Linear(self.context_dim, kv_dim, bias=bias)",
        (
            "tests/nn/test_nn_multihead_attention.py"
            "::test_the_value_less_transformer_averages_the_input_itself",
        ),
    ),
    Mutation(
        "steps of sq_inplace project tokens that are not divided",
        "graphattn/nn/attention.py",
        "            x = x / self.input_divisor\n        query",
        "            pass\n        query",
        ("tests/nn/test_nn_block_steps.py::test_steps_are_one_forward",),
    ),
    Mutation(
        "query head h reads key head h % Hk",
        "graphattn/ops/inputs.py",
        "x.repeat_interleave(repeats, dim=-2)",
        "torch.cat([x] * repeats, dim=-2)",
        (f"{REPEATED_CALLS}::test_values_and_gradients_are_those_of_messages[()-turned-window]",),
    ),
    Mutation(
        "the log-sum-exp includes eps",
        "graphattn/ops/attention/api.py",
        "out = _with_extra_mass(out, lse, checked.eps, sink_logits)",
        "out = _with_extra_mass(out, lse, checked.eps, sink_logits)\n"
        "        lse = torch.logaddexp(lse, torch.full_like(lse, checked.eps).log())",
        (f"{ATTENTION}::test_eps_adds_to_the_normaliser",),
    ),
    Mutation(
        "eps joins the logarithm instead of the sum",
        "graphattn/ops/segments.py",
        "even_sigmoid(lse - math.log(eps))",
        "even_sigmoid(lse - eps)",
        (f"{ATTENTION}::test_eps_adds_to_the_normaliser",),
    ),
    Mutation(
        "eps joins a sum that has left the logarithm",
        "graphattn/ops/segments.py",
        "even_sigmoid(lse - math.log(eps))",
        "lse.exp() / (eps + lse.exp())",
        (f"{ATTENTION}::test_eps_beside_a_sum_that_overflows_is_nothing",),
    ),
    Mutation(
        "an energy step without in-edges",
        "graphattn/ops/consensus/reference.py",
        '    if update == "energy":\n'
        "        gradient = gradient.index_add(-3, source, message, alpha=-1)\n",
        "",
        (f"{CHUNKED}::test_values_and_gradients_are_those_of_the_reference",),
    ),
    Mutation(
        "energy messages back to the source with the edge network's inputs as they came",
        "graphattn/nn/consensus.py",
        '"hidden": (target_hidden, source_hidden),',
        '"hidden": (source_hidden, target_hidden),',
        (f"{MESSAGES}::test_message_and_operation_agree_in_value_and_every_gradient",),
    ),
    Mutation(
        "attention averages padding",
        "graphattn/ops/attention/reference.py",
        "keep = valid_edges(call.valid, source, target)",
        "keep = None",
        (f"{ATTENTION}::test_an_edge_that_touches_an_invalid_token_is_no_edge",),
    ),
    Mutation(
        "consensus moves towards padding",
        "graphattn/ops/consensus/reference.py",
        "keep = valid_edges(valid, source, target)",
        "keep = None",
        (f"{CHUNKED}::test_values_and_gradients_are_those_of_the_reference",),
    ),
    Mutation(
        "positions count on through a batch",
        "graphattn/graphs/edges/storage.py",
        "runs = zip(self._starts, self._sizes, strict=True)",
        "runs = [((0, 0), (self._num_targets, self._num_sources))]",
        (f"{ROTARY}::test_positions_restart_in_every_part_of_a_batch",),
    ),
    Mutation(
        "positions count on through a batch within a batch",
        "graphattn/graphs/builders/combine.py",
        "sizes=tuple(size for graph in graphs for size in graph.sizes)",
        "sizes=tuple((graph.num_targets, graph.num_sources) for graph in graphs)",
        ("tests/graphs/test_graphs_combine.py::test_batch_of_batches_is_the_flat_batch",),
    ),
    # What else is easily got wrong.
    Mutation(
        "sigma^2 without the 2",
        "graphattn/ops/attention/logits/score.py",
        "-scale / 2 * (query - key)",
        "-scale * (query - key)",
        (f"{STRUCTURED}::test_values_and_gradients_are_those_of_the_reference",),
    ),
    Mutation(
        "softmax over the targets of a source",
        "graphattn/ops/attention/reference.py",
        "        logits, target, graph.rowptr, keep",
        "        logits, source, graph.rowptr, keep",
        (f"{SDPA}::test_attention_weights_are_the_masked_softmax",),
    ),
    Mutation(
        "the automatic step counts one direction of an edge",
        "graphattn/ops/consensus/step_size.py",
        "        degree = degree.index_add(-2, source, strength)\n    return",
        "        pass\n    return",
        (f"{CHUNKED}::test_values_and_gradients_are_those_of_the_reference",),
    ),
    Mutation(
        "a batch with one causal sequence passes for one without",
        "graphattn/graphs/structures/composites.py",
        "return any(part.has_causal_part for part in self._without_padding())",
        "return all(part.has_causal_part for part in self._without_padding())",
        (
            "tests/nn/test_nn_causality_and_padding.py"
            "::test_energy_is_refused_where_one_sequence_of_a_batch_is_causal",
        ),
    ),
    Mutation(
        "a union forgets that both its edge lists hold a causal sequence",
        "graphattn/graphs/builders/combine.py",
        "has_causal_part=a.has_causal_part and b.has_causal_part",
        "has_causal_part=a.is_causal and b.is_causal",
        (
            "tests/graphs/test_graphs_combine.py"
            "::test_union_of_edge_lists_remembers_that_both_hold_a_causal_sequence",
        ),
    ),
    Mutation(
        "isometric RoPE turns further in place of back",
        "graphattn/nn/consensus.py",
        "[0], back=True)",
        "[0])",
        (f"{GUARANTEES}::test_tokens_that_agree_stay_where_they_are",),
    ),
    Mutation(
        "the banded way takes the second mode",
        "graphattn/spectral/laplacians/banded.py",
        "first = u[:, 0]",
        "first = u[:, 1]",
        (
            "tests/spectral/test_spectral_banded.py"
            "::test_the_slowest_mode_is_that_of_shift_invert_lanczos",
        ),
    ),
    Mutation(
        "certificates of layers with rope=True claim the theorems",
        "graphattn/spectral/certificates/layers.py",
        "        if layer.rotary is not None and not layer.isometric:\n",
        "        if False:\n",
        (
            "tests/spectral/test_spectral_certificates.py"
            "::test_what_no_theorem_speaks_of_is_not_applicable_and_measured",
        ),
    ),
    Mutation(
        "the Fiedler value is lambda_2 in place of lambda_1",
        "graphattn/spectral/eigenvalues.py",
        "return float(1 / values[-1]), vectors[:, -1]",
        "return float(1 / values[-2]), vectors[:, -2]",
        (
            "tests/spectral/test_spectral_eigenvalues.py"
            "::test_path_spectrum_is_that_of_the_cosine_transform",
        ),
    ),
    Mutation(
        "-0.0 is less than 0.0",
        "graphattn/ops/top_k.py",
        "    return logits.detach().argsort(",
        "    bits = logits.detach().double().view(torch.int64)\n"
        "    return torch.where(bits < 0, bits ^ (2**63 - 1), bits).argsort(",
        (f"{TOP_K}::test_logits_of_both_zeros_tie",),
    ),
    Mutation(
        "a row without a valid edge is 0 / 0",
        "graphattn/ops/segments.py",
        "    total = total.masked_fill(empty, 1)\n",
        "",
        (f"{ATTENTION}::test_an_edge_that_touches_an_invalid_token_is_no_edge",),
    ),
    Mutation(
        "a message reads the value of a source that top-k left out",
        "graphattn/nn/attention.py",
        "value_j = value_j.masked_fill(~keep[..., None], 0)",
        "pass",
        (f"{MESSAGES}::test_a_message_never_reads_the_value_of_a_source_that_is_not_chosen",),
    ),
    Mutation(
        "a causal window holds one key too many",
        "graphattn/graphs/builders/windows.py",
        "return _causal(num_tokens, window - 1, past)",
        "return _causal(num_tokens, window, past)",
        ("tests/graphs/test_graphs_windows.py::test_a_window_is_its_definition",),
    ),
    Mutation(
        "the permutation of the transpose is the inverse one",
        "graphattn/graphs/edges/storage.py",
        "order_by_source(*self.compact_csr(), self._num_sources)",
        "order_by_source(*self.compact_csr(), self._num_sources).argsort()",
        (
            "tests/graphs/test_graphs_token_graph.py"
            "::test_values_follow_their_edges_through_the_transpose",
        ),
    ),
    Mutation(
        "kernels keep earlier sums when a row's maximum grows",
        "kernels/bands/forward.py",
        "add_product(b_out * b_fade[:, None], b_weight",
        "add_product(b_out, b_weight",
        (f"{KERNELS}::test_values_and_gradients_are_those_of_float64[complete]",),
    ),
    Mutation(
        "kernels take a tile for whole that one row does not see in full",
        "kernels/bands/math.py",
        "i_common_end = tl.minimum(i_row + n_after + 1, n_other)",
        "i_common_end = tl.minimum(i_row + n_after + 2, n_other)",
        (f"{KERNELS}::test_a_tile_needs_no_mask_only_where_all_its_rows_see_it",),
    ),
    Mutation(
        "a streamed selection keeps one more of equal sources",
        "kernels/bands/top_k.py",
        "(b_place < b_left[:, None])",
        "(b_place <= b_left[:, None])",
        (f"{STREAMED}::test_the_choice_is_that_of_a_sort[all equal-40]",),
    ),
    Mutation(
        "a streamed selection keeps all NaN, as if something were larger",
        "kernels/bands/top_k.py",
        "reaches(b_logit, b_below_next) & m_number[:, None]",
        "reaches(b_logit, b_below_next)",
        (f"{STREAMED}::test_the_choice_is_that_of_a_sort[NaN alone-40]",),
    ),
    Mutation(
        "a streamed selection forgets what is larger than all that it has written down",
        "kernels/bands/top_k.py",
        "b_reach = b_of_all + tl.sum(",
        "b_reach = tl.sum(",
        (f"{STREAMED}::test_the_choice_is_that_of_a_sort[normal-40]",),
    ),
    Mutation(
        "kernels count 32 bits of offsets within a tile, however far apart tokens are",
        "kernels/bands/math.py",
        "STRIDED or x.FAR",
        "STRIDED",
        (f"{FAR_OFFSETS}::test_offsets_do_not_wrap_at_two_to_the_31[bands: within a tile]",),
    ),
    Mutation(
        "kernels sum the gradient of a key over one of its query heads",
        "kernels/bands/backward.py",
        "for i_repeat in range(REPEATS):",
        "for i_repeat in range(1):",
        (f"{KERNELS}::test_query_heads_share_key_heads_in_order",),
    ),
    Mutation(
        "kernels pull a query to its keys and not away from itself",
        "kernels/bands/backward.py",
        "b_d_query = b_d_query - b_pulled[:, None] * b_query",
        "b_d_query = b_d_query",
        (f"{KERNELS}::test_values_and_gradients_are_those_of_float64[complete]",),
    ),
    Mutation(
        "kernels let NaN in a value spread to the rows of its tile",
        "kernels/bands/math.py",
        "return tl.where(m_sound, b_x, 0.0).to(b_x.dtype), m_bad",
        "return b_x, m_bad",
        (f"{BANDS}::test_a_row_knows_nothing_of_tokens_it_does_not_see",),
    ),
    Mutation(
        "kernels hide NaN in a value that is seen",
        "kernels/bands/math.py",
        "if tl.max(m_bad.to(tl.int32), axis=0) > 0:",
        "if tl.max(m_bad.to(tl.int32), axis=0) > 1:",
        (
            f"{BANDS}::test_a_row_knows_nothing_of_tokens_it_does_not_see",
            f"{BANDS}::test_an_infinite_value_that_is_seen_is_not_hidden",
            f"{BANDS}::test_a_bad_gradient_reaches_only_what_its_row_sees",
        ),
    ),
    Mutation(
        "the five-product backward counts every pair twice in sigma's gradient",
        "kernels/bands/one_tensor.py",
        "axis=0) * 0.5 / (i_scale * LOG2E)",
        "axis=0) / (i_scale * LOG2E)",
        (f"{GAUSSIAN}::test_values_and_gradients_are_those_of_float64[complete]",),
    ),
    Mutation(
        "a table's gradient puts the diagonals that came round where they left",
        "kernels/bands/bias_backward.py",
        "o_offset -= COLUMNS",
        "o_offset -= 0",
        (f"{KERNELS}::test_sizes_of_tiles_change_no_gradient_of_a_table",),
    ),
    # Kernels over edges, and tables of neighbours.
    Mutation(
        "a table of two rows is taken for an edge list",
        "graphattn/graphs/token_graph.py",
        '"neighbors" if numbers[HAS_TABLE] else "edge_index"',
        '"neighbors" if edge_index.shape[0] != 2 else "edge_index"',
        (f"{TABLES}::test_a_table_of_two_rows_is_not_taken_for_a_list_of_edges",),
    ),
    Mutation(
        "a layer lists the edges of a table, which waits for the device",
        "graphattn/ops/attention/operators.py",
        "*call.valid, graph.code, graph.listed,",
        "*call.valid, graph.code, graph.edge_index,",
        (f"{NO_WAITING}::test_a_layer_whose_graph_is_made_from_its_features_waits_for_nothing",),
    ),
    Mutation(
        "the band's log-sums are taken for those of all edges",
        "graphattn/ops/attention/triton.py",
        "saved + (lse - of_bands) * LOG2E",
        "saved",
        (f"{EDGES}::test_values_and_gradients_are_those_of_float64[longformer]",),
    ),
    Mutation(
        "the edge kernels begin anew where the band kernels have been",
        "kernels/edges/forward.py",
        'b_sum = tl.where(b_max == float("-inf"), 0.0, 1.0)',
        "b_sum = tl.zeros([ROWS], tl.float32)",
        (f"{EDGES}::test_values_and_gradients_are_those_of_float64[longformer]",),
    ),
    Mutation(
        "parts of a split row are merged without fading what came before",
        "kernels/edges/split_rows.py",
        "b_out = b_out * i_fade + tl.sum(b_weight[:, None] * b_part, axis=0)",
        "b_out = b_out + tl.sum(b_weight[:, None] * b_part, axis=0)",
        (f"{EDGES}::test_where_rows_are_cut_changes_no_result",),
    ),
    Mutation(
        "the last part of a split row reads on in the next row",
        "kernels/edges/schedule.py",
        "(count[place] - done).clamp(max=LONGEST_SEGMENT)",
        "torch.full_like(done, LONGEST_SEGMENT)",
        (f"{EDGES}::test_where_rows_are_cut_changes_no_result",),
    ),
    Mutation(
        "empty entries of a table count when edges are numbered",
        "kernels/edges/schedule.py",
        "(self._sources >= 0).cumsum(0) - 1",
        "torch.arange(self.num_edges)",
        (
            f"{EDGES}::test_values_and_gradients_are_those_of_float64"
            "[bias of fewer neighbours than k]",
        ),
    ),
    Mutation(
        "of edges that equal the k-th one too many is kept",
        "kernels/shared/ordered_integers.py",
        "<= b_left[:, None])",
        "<= b_left[:, None] + 1)",
        (f"{KERNELS_TOP_K}::test_of_equal_edges_of_a_row_the_first_are_kept",),
    ),
    Mutation(
        "-0.0 is less than 0.0 when a kernel selects",
        "kernels/shared/ordered_integers.py",
        "(b_logit + 0.0).to(tl.int32",
        "b_logit.to(tl.int32",
        (f"{KERNELS_TOP_K}::test_negative_zero_ties_with_zero",),
    ),
    Mutation(
        "negative numbers are not turned round when they become ordered integers",
        "kernels/shared/ordered_integers.py",
        "return b_bits ^ ((b_bits >> 31) & LARGEST)",
        "return b_bits",
        (f"{KERNELS_TOP_K}::test_top_1_is_the_nearest_source",),
    ),
    Mutation(
        "programs of neighbouring heads take the same one",
        "kernels/shared/programs.py",
        "i_h = i_program % heads",
        "i_h = i_program % heads // 2 * 2",
        (f"{KERNELS}::test_values_and_gradients_are_those_of_float64[complete]",),
    ),
    Mutation(
        "a table that a CUDA graph makes is stored",
        "kernels/shared/stored.py",
        "return not is_capturing(device)",
        "return True",
        (f"{STORED}::test_what_a_capture_makes_is_not_stored",),
    ),
    Mutation(
        "a stream reads a table that another one has not made yet",
        "kernels/shared/stored.py",
        "stream.wait_event(self._made)",
        "pass",
        (f"{STORED}::test_a_reader_on_another_stream_waits_once_and_keeps_the_memory",),
    ),
    Mutation(
        "a table that a CUDA graph reads is freed",
        "kernels/shared/stored.py",
        "_read_by_graphs.add(self)",
        "pass",
        (f"{STORED}::test_what_a_capture_reads_is_never_freed_and_not_waited_for",),
    ),
    Mutation(
        "a CUDA graph copies a table from memory that is gone when it is replayed",
        "kernels/shared/stored.py",
        "if table.device != device and is_capturing(device):",
        "if False:",
        (f"{STORED}::test_a_table_of_the_host_is_refused_during_a_capture",),
    ),
    Mutation(
        "a program computes while its products are formed",
        "kernels/check/prediction.py",
        "computing = max(products, awaited + issued)",
        "computing = max(products, issued)",
        (f"{PREDICTION}::test_a_program_waits_for_its_products_before_it_computes_with_them",),
    ),
    Mutation(
        "programs do not share a multiprocessor",
        "kernels/check/prediction.py",
        "return max(1, min(fitting))",
        "return 1",
        (f"{PREDICTION}::test_programs_that_share_a_multiprocessor_fill_each_others_waits",),
    ),
    Mutation(
        "masked tiles are predicted as if they had no mask",
        "kernels/bands/configurations.py",
        'if arguments.get("PARTS") == 3:',
        "if False:",
        (
            f"{PREDICTION}::test_kernels_of_windows_go_over_masked_tiles_before_and_after_the_others",
        ),
    ),
    Mutation(
        "a warp is predicted to issue one instruction per clock",
        "kernels/check/prediction.py",
        "issued = prediction.issue_s * WARP_CLOCKS * SCHEDULERS / warps",
        "issued = prediction.issue_s * SCHEDULERS / warps",
        (f"{PREDICTION}::test_a_warp_issues_an_instruction_only_when_the_one_before_it_is_done",),
    ),
    Mutation(
        "sources are predicted to read tiles as large as their own",
        "kernels/bands/configurations.py",
        'others, sizes = rows, (columns, rows, "sources")',
        'others, sizes = columns, (columns, rows, "sources")',
        (f"{PREDICTION}::test_every_program_of_a_band_kernel_reads_all_tiles_that_it_sees",),
    ),
    Mutation(
        "a GPU without matrix instructions for bfloat16 gets kernels",
        "kernels/shared/launch.py",
        "numbers < LEAST_CAPABILITY",
        "numbers < (0, 0)",
        (f"{DEVICES}::test_a_device_before_ampere_gets_no_kernels",),
    ),
    Mutation(
        "all devices get the tiles of the first one",
        "kernels/shared/tuning.py",
        "_of_device(torch.cuda.current_device())",
        "_of_device(0)",
        (f"{DEVICES}::test_tiles_are_chosen_for_the_current_device",),
    ),
    Mutation(
        "tiles are chosen for the current device, wherever the tensors are",
        "kernels/shared/launch.py",
        "with torch.cuda.device_of(first):",
        "if first is not None:",
        (f"{DEVICES}::test_operations_run_with_the_device_of_their_tensors_as_the_current_one",),
    ),
    Mutation(
        "more programs than a device can start are left to Triton",
        "kernels/shared/launch.py",
        "if math.prod(grid) > MOST_PROGRAMS:",
        "if False:",
        (f"{DEVICES}::test_more_programs_than_a_device_can_start_are_refused",),
    ),
    Mutation(
        "half squares in pieces lose their last bits",
        "kernels/shared/precision.py",
        "(b_rest - b_second)[:, None]",
        "(0 * b_second)[:, None]",
        (f"{PRECISION}::test_half_squares_in_pieces_have_the_digits_of_float32",),
    ),
    Mutation(
        "what all kernels share imports a family of them",
        "kernels/shared/row_dots.py",
        "from graphattn.kernels.shared.launch import Heads, launch",
        "from graphattn.kernels.bands.schedule import BandSchedule  # noqa: F401\n"
        "from graphattn.kernels.shared.launch import Heads, launch",
        ("tests/test_imports.py::test_rooms_of_the_kernels_import_downward_only",),
    ),
    Mutation(
        "a kernel imports what is there for looking at kernels",
        "kernels/shared/row_dots.py",
        "from graphattn.kernels.shared.launch import Heads, launch",
        "from graphattn.kernels.shared.configuration import Configuration  # noqa: F401\n"
        "from graphattn.kernels.shared.launch import Heads, launch",
        ("tests/test_imports.py::test_nothing_but_the_check_reads_what_is_there_for_the_check",),
    ),
    Mutation(
        "a file of the kernels imports, in a function, what imports it",
        "kernels/shared/launch.py",
        "    before, _receiver = _receiver, receive",
        "    from graphattn.kernels.shared import row_dots  # noqa: F401\n\n"
        "    before, _receiver = _receiver, receive",
        ("tests/test_imports.py::test_no_file_imports_itself_by_way_of_others",),
    ),
    Mutation(
        "a key that is not valid is read",
        "kernels/edges/math.py",
        "m_edge = m_edge & (tl.load(p_valid + b_other, mask=m_edge, other=0) != 0)",
        "m_edge = m_edge",
        (f"{EDGES}::test_values_and_gradients_are_those_of_float64[masked sources]",),
    ),
    Mutation(
        "kernels of nearest neighbours trust their rounding",
        "kernels/neighbors/candidates.py",
        "norm_of_a.square() - 2 * rounding",
        "norm_of_a.square() + 2 * rounding",
        (f"{NEIGHBORS}::test_kernels_find_exactly_whom_torch_finds[duplicates]",),
    ),
    Mutation(
        "kernels of nearest neighbours take the larger of two equal indices",
        "kernels/neighbors/exact.py",
        "b_column = tl.min(tl.where(m_least, o_column[None, :], NONE), axis=1)",
        "b_column = tl.max(tl.where(m_least, o_column[None, :], -1), axis=1)",
        (f"{NEIGHBORS}::test_kernels_find_exactly_whom_torch_finds[ties]",),
    ),
    Mutation(
        "fused consensus divides its low-rank part by no rank",
        "kernels/consensus/forward.py",
        "(b_beta / RANK)[:, None]",
        "b_beta[:, None]",
        (f"{FUSED}::test_values_and_gradients_are_those_of_float64[path]",),
    ),
    Mutation(
        "fused consensus moves only the target of an edge under energy",
        "kernels/consensus/forward.py",
        "(1, -1 if x.energy else 0)",
        "(1, 0)",
        (f"{FUSED}::test_values_and_gradients_are_those_of_float64[path]",),
    ),
    Mutation(
        "fused degrees count edges in one direction",
        "kernels/consensus/forward.py",
        "(1, 1 if x.energy else 0)",
        "(1, 0)",
        (f"{FUSED}::test_values_and_gradients_are_those_of_float64[windows side by side]",),
    ),
    Mutation(
        "fused rows of Lambda lose the part of their gradient along themselves",
        "kernels/consensus/backward.py",
        "b_back = -2.0 * b_share",
        "b_back = -0.0 * b_share",
        (f"{FUSED}::test_values_and_gradients_are_those_of_float64[path]",),
    ),
    Mutation(
        "fused windows join the sequences of a batch",
        "kernels/consensus/math.py",
        "m_edge & (b_other == b_sequence)",
        "m_edge & (b_other != -1)",
        (f"{FUSED}::test_values_and_gradients_are_those_of_float64[windows side by side]",),
    ),
    Mutation(
        "fused consensus forgets gradients of the network of the groups before",
        "kernels/consensus/backward.py",
        "network += torch.bmm(",
        "network[:] = torch.bmm(",
        (f"{PIECES}::test_a_small_workspace_gives_the_same[window]",),
    ),
    Mutation(
        "fused consensus takes the first heads' weights for all groups",
        "graphattn/ops/consensus/triton.py",
        "(weight[heads] for weight in self._weights)",
        "(weight[: heads.stop - heads.start] for weight in self._weights)",
        (f"{PIECES}::test_a_small_workspace_gives_the_same[window]",),
    ),
    Mutation(
        "fused consensus forgets what the pieces before have summed up",
        "kernels/consensus/sum_messages.py",
        "self.is_whole = len(pieces) == 1 and not",
        "self.is_whole = not",
        (f"{PIECES}::test_a_small_workspace_gives_the_same[window]",),
    ),
    Mutation(
        "fused consensus takes rows of Lambda for zero whose squares underflow",
        "kernels/consensus/math.py",
        "b_scale = tl.where(m_usual | (b_largest == 0), 1.0, 1.0 / b_largest)",
        "b_scale = tl.where(m_usual | (b_largest >= 0), 1.0, 1.0)",
        (f"{FUSED_NAN}::test_rows_of_lambda_of_any_size_are_normalised",),
    ),
    Mutation(
        "segments are counted in 32 bits",
        "kernels/edges/math.py",
        "4 * o_segment.to(tl.int64)",
        "4 * o_segment",
        (f"{FAR_OFFSETS}::test_offsets_do_not_wrap_at_two_to_the_31[edges: segments]",),
    ),
    Mutation(
        "heads of a new token are at most 2^31 numbers apart",
        "kernels/shared/layout.py",
        "i_h.to(tl.int64) * x.stride_h",
        "i_h * x.stride_h",
        (f"{FAR_OFFSETS}::test_offsets_do_not_wrap_at_two_to_the_31[generation: heads]",),
    ),
    Mutation(
        "the step kernel keeps the newer of two equally near tokens",
        "kernels/shared/ordered_integers.py",
        "tl.cumsum(m_equal.to(tl.int32), axis=1) <= b_left[:, None]",
        "tl.cumsum(m_equal.to(tl.int32), axis=1) > (counted(m_equal) - b_left)[:, None]",
        (f"{STEP}::test_of_equally_near_tokens_the_older_is_kept",),
    ),
    Mutation(
        "NaN and infinity are passed over in silence",
        "graphattn/ops/attention/structured/pair_scores.py",
        "> 0, torch.nan)",
        "> 0, 0)",
        (f"{STRUCTURED}::test_a_bad_token_changes_no_bit_before_it_and_none_beyond_its_window",),
    ),
    Mutation(
        "rows that nobody asks for send back what they saw",
        "graphattn/ops/attention/structured/chunked.py",
        "unused = None if finite else unused_rows(d_out, d_lse)",
        "unused = None",
        (f"{HOLDS}::test_what_a_row_does_not_see_changes_no_bit_of_it_or_its_gradients",),
    ),
    Mutation(
        "a step in C++ code runs no hook of a module",
        "graphattn/nn/blocks/compiled_step.py",
        '        or attributes["_forward_hooks"]\n',
        "",
        (f"{NATIVE_BLOCKS}::test_a_changed_module_runs[mlp-hook]",),
    ),
    Mutation(
        "a step in C++ code reads transposed weights as they lie",
        "graphattn/nn/blocks/compiled_step.py",
        "        or not parameter.is_contiguous()\n",
        "",
        (f"{NATIVE_BLOCKS}::test_a_change_between_two_steps_counts[transposed_data]",),
    ),
    Mutation(
        "a step in C++ code passes over the step of a layer",
        "graphattn/nn/blocks/compiled_step.py",
        'SHORTENED = "step", "compiled_step"',
        'SHORTENED = "compiled_step", "compiled_step"',
        (f"{NATIVE_BLOCKS}::test_an_overridden_step_of_the_mixer_runs",),
    ),
    Mutation(
        "generation keeps the steps of a model that was changed",
        "graphattn/models/language/generation.py",
        "is_plain = valid is None and text.progress is None",
        "is_plain = valid is None",
        (f"{NATIVE_BLOCKS}::test_progress_may_change_the_model",),
    ),
    Mutation(
        "near ties are judged by products",
        "graphattn/ops/attention/structured/chunks.py",
        "row, hidden = exact(place), ",
        "row, hidden = ranked[place], ",
        (f"{STRUCTURED}::test_near_ties_are_decided_as_in_the_reference",),
    ),
    Mutation(
        "numbers whose squares overflow are taken for harmless",
        "graphattn/ops/attention/structured/chunked.py",
        "limit = torch.finfo(scale.dtype).max ** 0.5 / 1e3",
        "limit = torch.finfo(scale.dtype).max",
        (f"{HOLDS}::test_what_a_row_does_not_see_changes_no_bit_of_it_or_its_gradients",),
    ),
    Mutation(
        "a bad entry of a table is not looked for",
        "graphattn/ops/attention/structured/chunked.py",
        "if bias is not None and bias.numel() and not bool(bias.detach().amax() <= limit):",
        "if False:",
        (f"{UNSEEN}::test_an_entry_of_a_table_reaches_only_the_rows_that_read_it",),
    ),
    Mutation(
        "eps hands NaN back to rows that nobody asks for",
        "graphattn/ops/attention/api.py",
        "share_beside_eps(lse.masked_fill(lse.isnan(), torch.inf), eps, sink_logits)",
        "share_beside_eps(lse, eps, sink_logits)",
        (f"{LAYERS_UNSEEN}::test_what_a_token_does_not_see_changes_no_bit_of_a_layer",),
    ),
    Mutation(
        "consensus reads what it saved twice",
        "graphattn/ops/consensus/structured/sums.py",
        "gradients_of_sums(tensors, needed, ctx.plan",
        "gradients_of_sums(ctx.saved_tensors, needed, ctx.plan",
        (f"{CHECKPOINTING}::test_a_layer_gives_the_same_bits_however_activations_are_kept",),
    ),
    Mutation(
        "compiled consensus reads what it saved twice",
        "graphattn/ops/consensus/native/sums.py",
        "gradients_of_sums(\n                    graph, tensors, needed",
        "gradients_of_sums(\n                    graph, ctx.saved_tensors, needed",
        (f"{CHECKPOINTING}::test_a_layer_gives_the_same_bits_however_activations_are_kept",),
    ),
    Mutation(
        "compiled consensus leaves out the last source of complete graphs",
        "graphattn/ops/consensus/native/sums.py",
        "1 - structure.num_targets, structure.num_sources,",
        "1 - structure.num_targets, structure.num_sources - 1,",
        (f"{NATIVE_CONSENSUS}::test_edges_of_a_large_complete_graph_are_never_listed[120-120]",),
    ),
    Mutation(
        "compiled consensus reads padding of its sources",
        "graphattn/ops/consensus/native/sums.py",
        "*map(address, network), *map(address, masks)",
        "*map(address, network), address(masks[0]), 0",
        (f"{NATIVE_CONSENSUS}::test_padding_is_never_read",),
    ),
    Mutation(
        "compiled consensus gives nobody the gradients of v",
        "graphattn/ops/consensus/native/sums.py",
        "[any(needed[2:4])] * 2",
        "[any(needed[2:3])] * 2",
        (f"{NATIVE_CONSENSUS}::test_gradients_of_some_inputs_alone_are_those_among_all",),
    ),
    Mutation(
        "batches of windows are one sequence for compiled consensus",
        "graphattn/ops/consensus/native/sums.py",
        "borders=ends[:-1].contiguous()",
        "borders=ends[:0].contiguous()",
        (f"{CHUNKED}::test_a_batch_gives_what_each_sequence_gives_alone",),
    ),
    Mutation(
        "a trace of a layer holds what compiled code gave once",
        "graphattn/ops/backends.py",
        "if torch._C._get_tracing_state() is not None:",
        "if False:",
        (f"{NATIVE_CONSENSUS}::test_a_trace_holds_the_operator_and_not_its_result",),
    ),
    Mutation(
        "a compiled step of consensus overlooks another matrix of edges",
        "graphattn/nn/edges/network.py",
        'and "edge_matrix" not in vars(self)',
        "",
        (f"{NATIVE_STEPS}::test_what_somebody_put_into_a_layer_is_what_steps_do",),
    ),
    Mutation(
        "an automatic step moves what is padding as a target",
        "graphattn/ops/consensus/api.py",
        "if of_target is not None and step is None:",
        "if False:",
        ("tests/ops/test_ops_consensus_roles.py::test_an_invalid_target_keeps_its_state",),
    ),
    Mutation(
        "lengths that a compiler left open are asked for their dtype",
        "graphattn/graphs/arguments.py",
        "if type(value) is not int and not isinstance(value, torch.SymInt):",
        "if True:",
        ("tests/models/test_models_compile.py::test_graphs_can_be_built_inside_what_is_compiled",),
    ),
    Mutation(
        "autocast is switched off on a device that has none",
        "graphattn/ops/inputs.py",
        'if device.type == "meta" or not',
        "if not",
        ("tests/nn/test_nn_meta.py::test_a_layer_gives_the_shapes_of_its_output_and_gradients",),
    ),
    Mutation(
        "a plan is made anew in every call",
        "graphattn/graphs/edges/storage.py",
        "            results[key] = as_entry(result, self._device)",
        "            results = {key: result}",
        (f"{FIXED_COSTS}::test_the_second_call_on_a_graph_makes_no_plan[None-window]",),
    ),
    Mutation(
        "a graph keeps what was made of another list",
        "graphattn/graphs/edges/storage.py",
        "None if listed is None else listed._version",
        "None",
        (f"{FIXED_COSTS}::test_a_list_that_was_changed_in_place_has_a_plan_of_its_own",),
    ),
    Mutation(
        "consensus reads twice what it has written gradients into",
        "graphattn/ops/consensus/structured/sums.py",
        "stored, ctx.chunks = ctx.chunks, None",
        "stored = ctx.chunks",
        (
            f"{FIXED_COSTS}::test_few_edges_kept_for_the_backward_give_what_they_give_computed_again",
        ),
    ),
    Mutation(
        "short windows of consensus are gone over hop by hop",
        "graphattn/ops/consensus/pieces.py",
        "SHORTEST = 512",
        "SHORTEST = 0",
        (f"{FIXED_COSTS}::test_windows_of_consensus_are_not_gone_over_hop_by_hop",),
    ),
    Mutation(
        "the message of a subclass is ignored",
        "graphattn/nn/base/graph_layer.py",
        "        return bool(replaced)\n",
        "        return False\n",
        (f"{OVERRIDES}::test_the_message_of_a_subclass_is_the_layer",),
    ),
    Mutation(
        "steps ignore the bandwidths of a subclass",
        "graphattn/nn/base/overrides.py",
        '"fused", "mix", "sigma")',
        '"fused", "mix")',
        (f"{OVERRIDES}::test_steps_give_what_forward_gives",),
    ),
    Mutation(
        "steps ignore what a subclass makes of the end of a step",
        "graphattn/nn/base/overrides.py",
        '"step_hidden", "project_back", "rotate_back",',
        '"step_hidden",',
        (f"{OVERRIDES}::test_steps_give_what_forward_gives",),
    ),
    Mutation(
        "compiled steps ignore the first layer of a subclass",
        "graphattn/nn/edges/network.py",
        "if getattr(type(self), name) is not getattr(EdgeNetwork, name) or name in vars(self):",
        "if name in vars(self):",
        (f"{OVERRIDES}::test_steps_give_what_forward_gives",),
    ),
    Mutation(
        "compiled steps of a single text lose the dimension of tokens",
        "graphattn/nn/consensus_steps.py",
        "self.first_step_layers(x.unsqueeze(-2))",
        "self.first_step_layers(x)",
        ("tests/nn/test_nn_streaming.py::test_a_single_text_in_half_precision",),
    ),
    Mutation(
        "the options of a file are not compared with those of the layer",
        "graphattn/nn/files/config.py",
        "there, here = theirs.get(name), ours.get(name)",
        "there, here = ours.get(name), ours.get(name)",
        (f"{CONFIG}::test_weights_of_other_mathematics_are_refused",),
    ),
    Mutation(
        "state dicts do not carry the config",
        "graphattn/nn/files/config.py",
        "metadata.setdefault(prefix[:-1], {}).update(record(self))",
        "metadata.setdefault(prefix[:-1], {})",
        (f"{CONFIG}::test_layers_inside_any_module_of_torch_are_compared",),
    ),
    Mutation(
        "a config forgets what was set later",
        "graphattn/nn/files/config.py",
        "elif now != module._at_first[name]:",
        "elif False:",
        (f"{CONFIG}::test_what_is_changed_later_is_in_the_config",),
    ),
    Mutation(
        "a subclass is not compared with the layer it is made of",
        "graphattn/nn/files/config.py",
        'entry["base"] = {"class": base, "config": _present(module, arguments)}',
        'entry["base"] = {"class": base, "config": {}}',
        (f"{CONFIG}::test_a_subclass_is_compared_with_itself_and_with_the_layer_it_is_made_of",),
    ),
    Mutation(
        "weights under two names come back as two",
        "graphattn/nn/files/pretrained.py",
        "        _tie(module, name, kept)",
        "        pass",
        (f"{FILES}::test_weights_under_two_names_stay_one",),
    ),
    Mutation(
        "saved numbers do not carry the options of their layers",
        "graphattn/nn/files/pretrained.py",
        "LAYERS: json.dumps(_layers(state))",
        "LAYERS: json.dumps({})",
        (f"{FILES}::test_a_config_that_does_not_fit_the_numbers_is_refused",),
    ),
    Mutation(
        "a model rebuilt by hand is saved as its constructor made it",
        "graphattn/nn/files/pretrained.py",
        "    _check_is_as_configured(module, config, state)\n    folder",
        "    folder",
        (f"{FILES}::test_a_model_rebuilt_by_hand_is_refused_not_saved_wrongly",),
    ),
    Mutation(
        "a mask of padding is to be passed as it is",
        "graphattn/nn/files/argument_names.py",
        "valid=~{name} (",
        "valid={name} (",
        (f"{NAMES}::test_a_call_answers_foreign_names",),
    ),
    Mutation(
        "certificates take the best head for the worst",
        "graphattn/spectral/matrix_weighted/spectrum_ends.py",
        "    value, residual = max(pairs)\n",
        "    value, residual = min(pairs)\n",
        (f"{ENDS}::test_both_ends_are_those_of_a_dense_solver",),
    ),
    Mutation(
        "a count of eigenvalues is not looked at",
        "graphattn/spectral/matrix_weighted/spectrum_ends.py",
        "            return holds\n",
        "            return True\n",
        (f"{ENDS}::test_what_iterations_miss_the_counts_find",),
    ),
    Mutation(
        "a frozen step's transpose is not rotated back",
        "graphattn/spectral/certificates/frozen_steps.py",
        "self._summed(d, self._differences), back=True)",
        "self._summed(d, self._differences))",
        (
            "tests/spectral/test_spectral_certificates.py"
            "::test_what_no_theorem_speaks_of_is_not_applicable_and_measured",
        ),
    ),
    Mutation(
        "a certificate believes that every step is Algorithm 1's",
        "graphattn/spectral/certificates/frozen_steps.py",
        "                return False\n",
        "                return True\n",
        (f"{MODELS}::test_a_layer_with_its_own_step_claims_no_theorem",),
    ),
    Mutation(
        "the certificate of a batch is that of its best sequence",
        "graphattn/spectral/certificates/facts.py",
        "    where = max(by_place, key",
        "    where = min(by_place, key",
        (f"{MODELS}::test_a_batch_is_certified_per_sequence_and_by_its_worst",),
    ),
    Mutation(
        "padding is certified too",
        "graphattn/spectral/certificates/modules.py",
        "            if own_valid is not None and not bool(own_valid[here].all()):\n",
        "            if False:\n",
        (f"{MODELS}::test_padding_is_no_part_of_a_sequence_and_positions_are_those_given",),
    ),
    Mutation(
        "a certificate's table is not escaped",
        "graphattn/spectral/certificates/facts.py",
        "        says = escape(fact.statement)\n",
        "        says = fact.statement\n",
        (f"{MODELS}::test_a_certificate_is_a_table_in_a_notebook_and_escapes_what_it_shows",),
    ),
    Mutation(
        "the picture of a graph is transposed",
        "graphattn/graphs/notebook.py",
        'f"M{j} {i}h1v1h-1z"',
        'f"M{i} {j}h1v1h-1z"',
        (
            "tests/graphs/test_graphs_notebook.py"
            "::test_the_picture_has_a_cell_where_the_mask_is_true",
        ),
    ),
    Mutation(
        "cells of a picture are smaller than its pixels",
        "graphattn/plot/drawing/pixels.py",
        "LEAST_PIXELS, LEAST_POINTS = 1.2, 1.0",
        "LEAST_PIXELS, LEAST_POINTS = 0.3, 0.3",
        (
            f"{PIXELS}::test_the_global_row_and_column_of_longformer_are_seen_along_all_their_length",
        ),
    ),
    Mutation(
        "one edge in a cell is all but white",
        "graphattn/plot/matrices.py",
        'DENSITIES = ("#4f9bcf"',
        'DENSITIES = ("#f4f9fc"',
        (f"{PIXELS}::test_one_edge_among_a_million_tokens_is_seen",),
    ),
    Mutation(
        "edges that two parts of a graph share are counted twice",
        "graphattn/plot/drawing/cells.py",
        "self.add_edges(target[in_both] + t0, source[in_both] + s0, -sign)",
        "pass",
        (f"{PIXELS}::test_edges_per_cell_are_those_of_the_sparse_matrix",),
    ),
    Mutation(
        "a cell of weights shows its first and not its largest",
        "graphattn/plot/drawing/pixels.py",
        "part = np.fmax.reduceat(part, starts, axis=axis)",
        "part = part.take(starts, axis=axis)",
        (f"{PIXELS}::test_the_largest_weight_of_a_cell_is_what_a_large_picture_of_weights_shows",),
    ),
    Mutation(
        "words below a picture of weights lie across",
        "graphattn/plot/matrices.py",
        "rotation=90 if axis is ax.xaxis and not upright else 0",
        "rotation=0",
        (f"{PIXELS}::test_labels_of_tokens_do_not_lie_on_one_another",),
    ),
    Mutation(
        "a hub adds nothing to the Fiedler value of the rest",
        "graphattn/cli/graph/facts.py",
        "return g + ga.spectral.fiedler_value(rest)",
        "return ga.spectral.fiedler_value(rest)",
        ("tests/cli/test_cli_graph.py::test_facts_are_those_that_networkx_finds",),
    ),
    Mutation(
        "a mask with a palette is read in its colours",
        "graphattn/cli/clusters/images.py",
        'indexed = picture.mode in ("P", "PA") and not _is_black_and_white(picture)',
        "indexed = False",
        (f"{CLUSTERS}::test_a_trimap_with_a_palette_keeps_its_indices",),
    ),
    Mutation(
        "an image may have one pixel less than the limit",
        "graphattn/cli/clusters/images.py",
        "if width * height > most_pixels:",
        "if width * height >= most_pixels:",
        (f"{CLUSTERS}::test_the_limit_of_pixels_is_the_option_s",),
    ),
    Mutation(
        "balanced classes are the first rows of each",
        "graphattn/cli/clusters/sample.py",
        "generator.choice(np.flatnonzero(index == kind), per_class, replace=False)",
        "np.flatnonzero(index == kind)[:per_class]",
        (f"{CLUSTERS}::test_balanced_classes_are_drawn_at_random_and_kept_in_order",),
    ),
    Mutation(
        "a logarithmic axis of counts has parts of powers of ten",
        "graphattn/plot/clusters.py",
        "ax.yaxis.set_minor_locator(NullLocator())",
        "ax.yaxis.set_major_locator(NullLocator())",
        (
            "tests/plot/test_plot_clusters.py::"
            "test_ticks_of_cluster_counts_are_a_few_whole_numbers_written_out",
        ),
    ),
    Mutation(
        "tables of a report widen the page",
        "graphattn/cli/report.html.jinja",
        ".scroll { overflow-x: auto;",
        ".scroll {",
        (
            "tests/cli/test_cli_report.py::"
            "test_a_table_wider_than_a_phone_scrolls_alone_and_says_that_there_is_more",
        ),
    ),
    Mutation(
        "figures of reports are too wide for a phone",
        "graphattn/plot/drawing/style.py",
        "PAGE_WIDTH = 4.0",
        "PAGE_WIDTH = 5.0",
        ("tests/cli/test_cli_demo.py::test_labels_of_figures_can_be_read_on_a_phone",),
    ),
    Mutation(
        "weights of networkx stay in its order of edges",
        "graphattn/graphs/conversions/from_libraries.py",
        "return result, weights[permutation]",
        "return result, weights",
        (f"{EDGE_VALUES}::test_weights_of_networkx_stand_where_its_own_matrix_has_them",),
    ),
    Mutation(
        "the way back of an undirected edge has the weight of another",
        "graphattn/graphs/conversions/from_libraries.py",
        "values = one_way + [one_way[e] for e in way_back]",
        "values = one_way + one_way[: len(way_back)]",
        (f"{EDGE_VALUES}::test_weights_of_networkx_stand_where_its_own_matrix_has_them",),
    ),
    Mutation(
        "from_networkx drops weights in silence",
        "graphattn/graphs/conversions/from_libraries.py",
        'if not all(_number(data.get("weight", 1)) == 1 for _, _, data in edges):',
        "if False:",
        (f"{EDGE_VALUES}::test_weights_that_nobody_asks_for_are_announced",),
    ),
    Mutation(
        "edge_attr of PyG stays in its order of edges",
        "graphattn/graphs/conversions/from_pyg.py",
        "return value[permutation.to(value.device)]",
        "return value",
        (f"{EDGE_VALUES}::test_edge_attr_and_weight_of_pyg_tell_the_edges_they_stand_beside",),
    ),
    Mutation(
        "from_pyg drops edge_attr in silence",
        "graphattn/graphs/conversions/from_pyg.py",
        "elif value is not None and not return_permutation:",
        "elif False:",
        (f"{EDGE_VALUES}::test_what_pyg_holds_and_nobody_asks_for_is_named",),
    ),
    Mutation(
        "torch.load with weights_only does not know a graph",
        "graphattn/graphs/token_graph.py",
        "torch.serialization.add_safe_globals([TokenGraph, *KINDS])",
        "",
        (f"{SAVING}::test_a_fresh_process_reads_every_graph_with_weights_only",),
    ),
    Mutation(
        "a graph keeps the device it was saved on",
        "graphattn/graphs/edges/storage.py",
        'state["_device"] = torch.empty(0, device=self._device)',
        'state["_device"] = self._device',
        (f"{SAVING}::test_map_location_moves_a_graph_with_what_it_will_list",),
    ),
    Mutation(
        "a gzip file is unpacked whole before its size is looked at",
        "graphattn/data/files.py",
        'data = _read(packed, name, "unpacks to", max_bytes)',
        "data = packed.read()",
        (f"{READERS}::test_a_gzip_bomb_is_refused_long_before_it_fills_the_memory",),
    ),
    Mutation(
        "a large file is read before it is refused",
        "graphattn/data/files.py",
        "if max_bytes is not None and status.st_size > max_bytes:",
        "if False:",
        (f"{READERS}::test_a_large_file_is_refused_unread",),
    ),
    Mutation(
        "the demo judges by what it learnt from",
        "graphattn/cli/demo/pieces.py",
        "return Split(training, choosing, held_out)",
        "return Split(training + held_out, choosing, held_out)",
        (f"{DEMO}::test_records_that_are_copies_stand_on_one_side",),
    ),
    Mutation(
        "the demo does not see that two records are relatives",
        "graphattn/data/families.py",
        "least = (SHARED_WORDS * torch.minimum(num_words[a], num_words[b])).clamp(min=2)",
        "least = torch.minimum(num_words[a], num_words[b])",
        (f"{DEMO}::test_copies_fragments_and_near_relatives_are_found_and_unrelated_ones_are_not",),
    ),
    Mutation(
        "the demo trains on a structure without its graph",
        "graphattn/cli/demo/training.py",
        "pieces = cut(sample.sequences, sample.structures)",
        "pieces = cut(sample.sequences)",
        (f"{DEMO}::test_models_see_the_nearest_atoms_of_all_chains_and_nothing_else",),
    ),
    Mutation(
        "the demo's error takes every guess for independent",
        "graphattn/cli/demo/training.py",
        "names, group = group.unique(return_inverse=True)",
        "names = group = torch.arange(len(group))",
        (f"{DEMO}::test_the_standard_error_is_what_means_of_fresh_data_scatter_by",),
    ),
    Mutation(
        "the demo says that it beats guessing whatever its error",
        "graphattn/cli/demo/verdict.py",
        "if run.gain > CERTAIN * run.error:",
        "if run.gain > 0:",
        (f"{DEMO}::test_what_is_said_of_a_model_follows_from_its_gain_and_its_error",),
    ),
    Mutation(
        "the benchmark reduces KeOps' symbolic tensor along a batch",
        "graphattn/bench/contenders/peers.py",
        "axis=of_sources)",
        "axis=logits.ndim - 1)",
        (f"{BENCH}_peers.py::test_the_call_is_one_that_keops_takes",),
    ),
    Mutation(
        "FlexAttention sees one token more than the model beside it",
        "graphattn/bench/models/whole.py",
        "return (j <= i) & (j > i - window)",
        "return (j <= i) & (j >= i - window)",
        (f"{BENCH}_whole.py::test_the_window_of_flexattention_is_that_of_our_model[causal]",),
    ),
    Mutation(
        "a step by hand reads one token more than its window",
        "graphattn/bench/models/generation.py",
        "first = max(0, stop - self.window)",
        "first = max(0, stop - self.window - 1)",
        (f"{BENCH}.py::test_every_contender_of_a_case_is_right[causal-step-4096]",),
    ),
    Mutation(
        "a step of the benchmark leaves its token in the cache",
        "graphattn/bench/models/whole.py",
        "            cache.truncate(N)\n",
        "",
        (
            f"{BENCH}_whole.py::test_a_step_reads_the_last_token_after_those_it_sees_and_can_be_"
            "repeated[ours]",
        ),
    ),
    Mutation(
        "the benchmark times a contender right after another one",
        "graphattn/bench/measuring/host_clock.py",
        "            self._pass()\n        return self._mean()",
        "            pass\n        return self._mean()",
        (f"{BENCH}_clock.py::test_the_time_of_a_contender_does_not_depend_on_its_company",),
    ),
    Mutation(
        "the benchmark runs every contender with all threads",
        "graphattn/bench/measuring/host_clock.py",
        "best = min(best, alone, key=lambda clock: clock.seconds)",
        "pass",
        (f"{BENCH}_clock.py::test_a_contender_runs_with_the_number_of_threads_that_is_fastest",),
    ),
    Mutation(
        "the benchmark takes the compiler's time for that of a long pass",
        "graphattn/bench/measuring/host_clock.py",
        "if self.seconds < ENDLESS or num_compiled() > before:",
        "if self.seconds < ENDLESS:",
        (f"{BENCH}_clock.py::test_a_compiler_that_needs_half_a_minute_is_in_no_time",),
    ),
    Mutation(
        "the benchmark's chunks see a global token twice, in the window and apart",
        "graphattn/bench/contenders/by_hand/window_blocks.py",
        "is_edge &= ~torch.isin(source, left_out)",
        "pass",
        (f"{BENCH}_peers.py::test_every_row_of_chunks_is_right_and_not_a_sample[False]",),
    ),
    Mutation(
        "the benchmark's chunks go back with the sums of the window alone",
        "graphattn/bench/contenders/by_hand/sliding_chunks.py",
        "query, key, value, out, log_sum, scores, of_rows, log_rows)",
        "query, key, value, out, log_near, scores, of_rows, log_rows)",
        (f"{BENCH}_peers.py::test_every_row_of_chunks_is_right_and_not_a_sample[False]",),
    ),
    Mutation(
        "an edge of the benchmark's tables is one of another row",
        "graphattn/bench/contenders/by_hand/gathered.py",
        "is_edge = column < degree[members, None]",
        "is_edge = column <= degree[members, None]",
        (f"{BENCH}_peers.py::test_every_edge_stands_in_one_place_of_a_table",),
    ),
    Mutation(
        "a benchmark that goes on keeps the rows of a case that was cut off",
        "graphattn/bench/reporting/record.py",
        "return case in earlier.measured",
        "return True",
        (f"{BENCH}.py::test_an_interrupted_run_is_written_and_goes_on_with_its_file",),
    ),
    Mutation(
        "the benchmark does not check a forward pass without a backward pass",
        "graphattn/bench/measuring/runner.py",
        "return self.right(truth.forward_error_of(run)), None",
        "return truth.forward_error_of(run), None",
        (f"{BENCH}_flex.py::test_its_forward_pass_is_checked_like_any_other",),
    ),
    Mutation(
        "blocks of FlexAttention are taken for full that are not",
        "graphattn/bench/contenders/flex.py",
        "full = counts == size * size",
        "full = counts > size",
        (f"{BENCH}_flex.py::test_the_blocks_that_hold_edges_are_those_that_all_pairs_give",),
    ),
    Mutation(
        "rows count their positions from 0 again",
        "graphattn/graphs/targets.py",
        "starts.append((target + cut[0] - t0, source + seen[0] - s0))",
        "starts.append((target, source))",
        (f"{TARGETS}::test_positions_are_those_of_the_whole",),
    ),
    Mutation(
        "the hole of a window without self-loops stays on the diagonal of its rows",
        "graphattn/graphs/structures/bands.py",
        "loops = torch.ones_like(shift) if band.self_loops else -2 * shift",
        "loops = torch.ones_like(shift) if band.self_loops else 0 * shift",
        ("tests/graphs/test_graphs_bands.py::test_the_table_lists_the_edges_of_the_graph",),
    ),
    Mutation(
        "consensus compares rows with what stands beside their number, not their place",
        "graphattn/ops/consensus/pieces.py",
        "(move := hop * longest._stride + shift)",
        "(move := hop * longest._stride)",
        (f"{SECTIONS}::test_consensus_over_rows_is_those_rows_of_the_whole",),
    ),
    Mutation(
        "prefill forgets what the cache holds before the new rows",
        "graphattn/nn/base/streaming.py",
        "graph = causal_window_graph(n, cache.window, past=before)",
        "graph = causal_window_graph(n, cache.window - (before > 0), past=before)",
        ("tests/nn/test_nn_streaming.py::test_prompts_and_steps_mix_in_any_way",),
    ),
    Mutation(
        "a sink of minus infinity is infinity minus infinity where nothing is seen",
        "graphattn/ops/segments.py",
        "even_sigmoid(lse - sink.masked_fill(none, 0)).masked_fill(none, 1)",
        "even_sigmoid(lse - sink)",
        (f"{SINK}::test_rows_without_edges_and_heads_without_sinks_stay_what_they_are",),
    ),
    Mutation(
        "tiles drop edges of their own first targets everywhere",
        "graphattn/ops/attention/structured/chunks.py",
        "rows = gathered(dropout.rows[..., None]",
        "rows = gathered(dropout.rows[:, :1].expand_as(dropout.rows)[..., None]",
        (f"{DROPOUT}::test_the_edges_of_the_definition_are_dropped_after_the_softmax",),
    ),
    Mutation(
        "parts of a graph drop edges by their own numbers",
        "graphattn/ops/attention/calls.py",
        "else self.dropout.some(targets, sources),\n",
        "else self.dropout,\n",
        (f"{DROPOUT}::test_both_backends_drop_the_same_forward_and_backward",),
    ),
    Mutation(
        "the value of a dropped edge is read",
        "graphattn/ops/attention/structured/chunks.py",
        "            keep = self.kept_by_dropout.among(keep)\n        return product",
        "        return product",
        (f"{DROPOUT}::test_the_value_of_a_dropped_edge_is_not_read",),
    ),
    Mutation(
        "the normaliser is that of the edges dropout leaves",
        "graphattn/ops/attention/reference.py",
        "weights, keep = kept.weights(weights), kept.among(keep)",
        "weights, keep = kept.weights(weights), kept.among(keep)\n"
        "        total = segment_sum(weights[..., None], target, graph.num_targets)\n"
        "        weights = weights / total.clamp(min=1e-9)[..., target, :, 0]",
        (f"{DROPOUT}::test_the_edges_of_the_definition_are_dropped_after_the_softmax",),
    ),
    Mutation(
        "rows and columns of the hash are joined by nothing but their bits",
        "graphattn/ops/dropout.py",
        "x = (rows.to(torch.int32) ^ columns) * EDGE_FACTOR\n    x = (x",
        "return (rows.to(torch.int32) ^ columns) >= int(p * (1 << 32)) - (1 << 31)\n    x = (x",
        (f"{DROPOUT}::test_four_edges_between_two_targets_and_two_sources_are_independent",),
    ),
    Mutation(
        "biases are capped, too",
        "graphattn/ops/attention/structured/chunks.py",
        "logits = logits + self.biases\n",
        "logits = capped(logits + self.biases, self.options.softcap)\n",
        (f"{SOFTCAP}::test_biases_come_after_the_cap_and_padding_is_no_edge",),
    ),
    Mutation(
        "steps of generation drop weights",
        "graphattn/nn/attention_steps.py",
        "layer = self.without_dropout()",
        "layer = self",
        (f"{OPTIONS}::test_steps_drop_nothing_in_training_mode_either",),
    ),
    # Biases of edges.
    Mutation(
        "a NaN among the biases spreads to rows that are padded with its edge",
        "graphattn/ops/attention/structured/chunks.py",
        "        if keep is not None:\n            logits = torch.where(keep, logits, -torch.inf)",
        "        if keep is not None:\n            logits = logits + torch.where(keep, 0, "
        "-torch.inf)",
        (f"{PER_SAMPLE}::test_a_nan_of_one_edge_spoils_its_own_row_alone",),
    ),
    Mutation(
        "gradients of biases of samples are those of all samples together",
        "graphattn/ops/attention/structured/chunks.py",
        "if into.dim() == 2 or len(into) < len(d_logits):\n"
        "            d_logits = d_logits.sum(0, keepdim=True)",
        "if True:\n"
        "            d_logits = d_logits.sum(0, keepdim=True).expand_as(d_logits)[: len(into)]",
        (f"{PER_SAMPLE}::test_all_gradients_are_those_of_differences",),
    ),
    Mutation(
        "every row of all pairs reads the biases of the first",
        "graphattn/ops/attention/structured/chunked.py",
        "entries = i[:, rows, None] * M",
        "entries = 0 * i[:, rows, None] * M",
        (f"{PER_SAMPLE}::test_over_all_pairs_they_lose_no_digits_however_far_the_features_lie",),
    ),
    Mutation(
        "kernels read the biases of the first sample in all of them",
        "kernels/edges/forward.py",
        "p_bias = entry_of(p_bias, i_b * E, H)",
        "p_bias = entry_of(p_bias, i_b * 0, H)",
        (f"{EDGES}::test_values_and_gradients_are_those_of_float64[bias of every sample]",),
    ),
    Mutation(
        "a message that knows no biases passes over them in silence",
        "graphattn/nn/attention.py",
        'if not message_takes(self, "edge_bias"):',
        "if False:",
        (f"{BIASES}::test_a_message_that_does_not_take_it_is_not_passed_over_in_silence",),
    ),
    Mutation(
        "T5's buckets look forward where they should look back",
        "graphattn/nn/edges/offsets.py",
        "bucket = (offset > 0).to(offset.dtype) * num_buckets",
        "bucket = (offset < 0).to(offset.dtype) * num_buckets",
        (f"{OFFSETS}::test_the_bias_of_an_edge_is_that_of_its_offset",),
    ),
    Mutation(
        "the square root of distance 0 is differentiated",
        "graphattn/nn/edges/bias.py",
        "distance = square.masked_fill(same, 1).sqrt().masked_fill(same, 0)",
        "distance = square.sqrt()",
        (
            "tests/nn/test_nn_distance_bias.py"
            "::test_tokens_in_one_place_and_self_loops_have_gradient_0_and_not_nan",
        ),
    ),
    Mutation(
        "features of a window's edges stand one place late beyond the token itself",
        "graphattn/ops/consensus/pieces.py",
        "skipped = int(hop > 0 and not band.self_loops)",
        "skipped = 0",
        (f"{FEATURES}::test_one_step_is_its_equation",),
    ),
    Mutation(
        "features of edges that touch padding are read",
        "graphattn/ops/consensus/pieces.py",
        "        return self.clear(x)\n",
        "        return x\n",
        (f"{FEATURES}::test_features_of_edges_that_touch_padding_reach_nothing",),
    ),
    Mutation(
        "features that a batch shares get the gradient of its first sequence",
        "graphattn/ops/consensus/pieces.py",
        "values = values.sum(0, keepdim=True)",
        "values = values[:1]",
        (f"{FEATURES}::test_every_gradient_is_that_of_the_reference",),
    ),
    Mutation(
        "a message that takes no features of edges runs without them",
        "graphattn/nn/consensus.py",
        "            self.check_message_features()\n",
        "            pass\n",
        (
            "tests/nn/test_nn_edge_features.py"
            "::test_a_message_that_takes_no_features_refuses_them_by_name",
        ),
    ),
    Mutation(
        "certificates forget what edges have",
        "graphattn/spectral/certificates/frozen_steps.py",
        "edge_matrix(of_target[t] + of_source[s], of_edge)",
        "edge_matrix(of_target[t] + of_source[s])",
        (
            "tests/spectral/test_spectral_edge_features.py"
            "::test_numbers_are_those_of_the_layers_own_step",
        ),
    ),
    Mutation(
        "decoding reads what stands behind the end of a text",
        "graphattn/ops/attention/step/decode.py",
        "seen = source <= position",
        "seen = source <= position + 1",
        (
            f"{DECODE}::test_new_tokens_see_what_the_definition_says",
            f"{DECODE}::test_with_and_without_gradients_it_gives_the_same",
        ),
    ),
    Mutation(
        "a new token sees one key more than its window",
        "graphattn/ops/attention/step/decode.py",
        "(source > position - window)",
        "(source >= position - window)",
        (
            f"{DECODE}::test_new_tokens_see_what_the_definition_says",
            f"{DECODE}::test_with_and_without_gradients_it_gives_the_same",
        ),
    ),
    Mutation(
        "norms and products whatever cancels",
        "graphattn/ops/attention/step/pairs.py",
        "_sums_of_pairs(rows, key, lambda q, k: (q - k).square()) * -0.5",
        "rows @ key.mT - (rows.square().sum(-1)[..., None] + key.square().sum(-1)[:, :, None]) / 2",
        (f"{DECODE}::test_rbf_in_float32_survives_a_common_offset",),
    ),
    Mutation(
        "a part without sources is read",
        "graphattn/ops/attention/merge.py",
        ".masked_fill((lse == -torch.inf)[..., None], 0)",
        "",
        (f"{MERGE}::test_a_part_without_sources_is_not_read_whatever_it_holds",),
    ),
    Mutation(
        "of equal candidates the later is kept",
        "graphattn/ops/attention/candidates.py",
        "index.argsort(dim=-1)",
        "index.argsort(dim=-1, descending=True)",
        (f"{CANDIDATES}::test_shards_of_the_sources_give_what_one_pass_gives",),
    ),
    Mutation(
        "values of an edge list stay where they were while its edges are sorted",
        "graphattn/graphs/batches/item_fields.py",
        "value if order is None else value[order.to(value.device)]",
        "value",
        (f"{COLLATE}.py::test_an_edge_list_and_its_values_are_sorted_together",),
    ),
    Mutation(
        "neighbours in an item are counted from its first target",
        "graphattn/graphs/search/nearest_neighbors.py",
        "here.where(here < 0, here + s)",
        "here.where(here < 0, here + t)",
        ("tests/graphs/test_graphs_batch_vectors.py::test_targets_and_sources_have_a_vector_each",),
    ),
    Mutation(
        "padding passes for a causal sequence",
        "graphattn/graphs/structures/composites.py",
        "[part for part in self.parts if not is_padding(part)]",
        "[*self.parts]",
        (f"{COLLATE}.py::test_a_model_gives_every_item_of_a_batch_its_own_loss",),
    ),
    Mutation(
        "rows are laid end to end where parts of the graph cross them",
        "graphattn/nn/base/padded_rows.py",
        "if t > targets or s > sources:",
        "if t > rows * targets:",
        (
            "tests/nn/test_nn_padded_rows.py"
            "::test_a_graph_whose_parts_do_not_end_with_the_rows_is_refused",
        ),
    ),
    Mutation(
        "a window keeps nothing of what a rollback needs",
        "graphattn/nn/caches/layer_cache.py",
        "self.most_kept = None if window is None else window + rollback",
        "self.most_kept = None if window is None else window",
        (f"{CACHES}::test_every_length_that_is_kept_can_be_gone_back_to_and_no_other",),
    ),
    Mutation(
        "going back twice brings back what was forgotten",
        "graphattn/nn/caches/layer_cache.py",
        "self.min_length = max(self.min_length, self.position - self.rollback)",
        "self.min_length = self.position - self.rollback",
        (f"{CACHES}::test_going_back_does_not_bring_back_what_was_forgotten",),
    ),
    Mutation(
        "padding that was taken back is still known of",
        "graphattn/nn/caches/layer_cache.py",
        'if "valid" in self.buffers and length <= self.masked_from:',
        'if "valid" in self.buffers and length < 0:',
        (f"{CACHES}::test_length_0_is_a_new_cache",),
    ),
    Mutation(
        "a ring goes back as if it were a row",
        "graphattn/nn/caches/layer_cache.py",
        "            self.end = (length - 1) % self.capacity + 1",
        "            self.end -= self.position - length",
        (f"{STEP}::test_a_ring_with_places_for_a_guess_takes_it_back",),
    ),
    Mutation(
        "some layers of a model go back before another refuses",
        "graphattn/nn/caches/model_cache.py",
        "self.layers[i].min_length != most)",
        "self.layers[i].min_length == most)",
        (f"{CACHES}::test_layers_go_back_apart_and_reordered_together",),
    ),
    Mutation(
        "steps of a block drop features in training",
        "graphattn/nn/blocks/block.py",
        "if type(dropout) is nn.Dropout:",
        "if dropout is None:",
        (f"{BLOCK_STEPS}::test_training_drops_nothing_in_steps_and_a_step_has_no_gradient",),
    ),
    Mutation(
        "positions are checked by the first layer that turns features, after others went on",
        "graphattn/models/token_model.py",
        "            check_positions(positions, tokens.shape)\n",
        "            pass\n",
        (f"{MODEL_STEPS}::test_what_does_not_fit_is_refused_before_any_layer_goes_on",),
    ),
    # Windows on grids, and masks of FlexAttention.
    Mutation(
        "an even window has one more behind than before",
        "graphattn/graphs/builders/grids.py",
        "k - 1 if c else k // 2 for",
        "k - 1 if c else (k - 1) // 2 for",
        ("tests/graphs/test_graphs_grid_windows.py::test_a_neighborhood_is_nattens",),
    ),
    Mutation(
        "a dilated window is shifted by tokens of other lines",
        "graphattn/graphs/structures/grid_windows.py",
        "(self.size - 1 - place % self.step) // self.step",
        "(self.size - 1) // self.step",
        ("tests/graphs/test_graphs_grid_windows.py::test_a_neighborhood_is_nattens",),
    ),
    Mutation(
        "shifted windows are taken for symmetric",
        "graphattn/graphs/structures/grid_windows.py",
        "return replace(self, transposed=not self.transposed)",
        "return self",
        ("tests/graphs/test_graphs_grid_windows.py::test_a_neighborhood_is_nattens",),
    ),
    Mutation(
        "a grid is causal where its first axis is",
        "graphattn/graphs/structures/grid_windows.py",
        "return not self.class_token and all(",
        "return not self.class_token and any(",
        (
            "tests/graphs/test_graphs_grid_windows.py::test_a_grid_is_causal_where_no_token_sees_a_later_one",
        ),
    ),
    Mutation(
        "a guess at a mask is not compared with it",
        "graphattn/graphs/builders/mask_mods.py",
        "(not verify or mask.is_that_of(rows, b))",
        "(mask.num_targets > 0)",
        (
            "tests/graphs/test_graphs_mask_mods.py::test_a_shape_with_one_pair_changed_is_no_longer_that_shape",
        ),
    ),
    Mutation(
        "masks of other heads are not looked at",
        "graphattn/graphs/builders/mask_mods.py",
        "for h in range(1, alike if reads_h else 1):",
        "for h in range(1, 1):",
        ("tests/graphs/test_graphs_mask_mods.py::test_masks_of_heads_must_be_equal",),
    ),
    Mutation(
        "full blocks of a BlockMask ask its mask_mod",
        "graphattn/graphs/builders/mask_mods.py",
        "full[place] | (partial[place] & within_partial(b, h, q_idx, kv_idx))",
        "(full[place] | partial[place]) & within_partial(b, h, q_idx, kv_idx)",
        (
            "tests/graphs/test_graphs_mask_mods.py::test_full_blocks_do_not_ask_the_mask_mod_and_blocks_left_out_do_not_either",
        ),
    ),
    Mutation(
        "a window of a decoder has one key too many",
        "graphattn/integrations/transformers/masks/graphs.py",
        "Band(window - 1, after)",
        "Band(window, after)",
        ("tests/integrations/test_integrations_leaks.py::test_a_window_of_a_decoder_counts_keys",),
    ),
    Mutation(
        "an unknown argument of attention is ignored",
        "graphattn/integrations/transformers/attention.py",
        "if given is not None and name not in HARMLESS",
        "if False",
        (
            "tests/integrations/test_integrations_refusals.py::test_an_unknown_argument_is_refused_by_name",
        ),
    ),
    Mutation(
        "weights are not returned where the wish is not passed on",
        "graphattn/integrations/transformers/attention.py",
        'return collected is not None and any("attentions" in kind for kind in collected)',
        "return False",
        (
            "tests/integrations/test_integrations_leaks.py::test_weights_asked_for_equal_those_of_eager_attention",
        ),
    ),
    Mutation(
        "a model whose attention cannot change is configured in silence",
        "graphattn/integrations/transformers/configure.py",
        "and not _can_change(model)",
        "and False",
        (
            "tests/integrations/test_integrations_refusals.py::test_a_model_whose_attention_cannot_be_changed_is_refused_and_not_left_as_it_was",
        ),
    ),
    Mutation(
        "a mask that was written to is taken for the one before",
        "graphattn/integrations/transformers/masks/once.py",
        "torch.equal(entry.copy, mask) and entry.graph == graph",
        "entry.graph == graph",
        (
            "tests/integrations/test_integrations_attention.py::test_a_mask_that_is_written_to_is_another_mask",
        ),
    ),
    Mutation(
        "the last key that is seen is cut off",
        "graphattn/integrations/transformers/masks/pairs.py",
        "keys = range(int(seen[0]), int(seen[-1]) + 1)",
        "keys = range(int(seen[0]), int(seen[-1]))",
        ("tests/integrations/test_integrations_attention.py::test_dense_masks_are_what_they_say",),
    ),
    Mutation(
        "what is hidden and not finite reaches attention over pairs",
        "graphattn/ops/attention/step/pairs.py",
        "if _is_finite(value if out.requires_grad else out):",
        "if True:",
        ("tests/integrations/test_integrations_attention.py::test_what_is_hidden_changes_no_bit",),
    ),
    Mutation(
        "a sketch may have a row for every query",
        "graphattn/integrations/transformers/masks/mask_function.py",
        "rows = kind + (kind == q_length)",
        "rows = kind",
        (
            "tests/integrations/test_integrations_masks.py::test_a_sketch_never_has_a_row_for_every_query",
        ),
    ),
    Mutation(
        "an encoder reads only as many cached keys as there are queries",
        "graphattn/integrations/transformers/masks/mask_function.py",
        "return mask[..., :1].expand(*mask.shape[:3], num_keys)",
        "return mask",
        (f"{CACHE_LENGTHS}::test_an_encoder_reads_cached_keys_and_all_new_ones",),
    ),
    Mutation(
        "keys without a place in the mask are cut off",
        "graphattn/integrations/transformers/masks/mask_function.py",
        "if n < num_keys if more else n == num_keys:",
        "if n <= num_keys:",
        (f"{CACHE_LENGTHS}::test_layers_that_hold_different_numbers_of_tokens_are_refused",),
    ),
    Mutation(
        "a full causal mask does not say how many keys it has",
        "graphattn/integrations/transformers/masks/mask_function.py",
        "            return _sketch(band, padding,",
        "            if band == MaskBand(FAR, 0) and padding is None: return None\n"
        "            return _sketch(band, padding,",
        (f"{CACHE_LENGTHS}::test_layers_that_hold_different_numbers_of_tokens_are_refused",),
    ),
    Mutation(
        "a dense mask may have fewer keys than the call",
        "graphattn/integrations/transformers/masks/mask_function.py",
        "    elif n == num_keys:\n",
        "    elif n <= num_keys:\n",
        (f"{CACHE_LENGTHS}::test_a_dense_mask_of_another_number_of_keys_is_refused",),
    ),
    Mutation(
        "converted layers without a mask take any cache for a static one",
        "graphattn/integrations/transformers/conversion/replacement.py",
        "if held > num_targets:",
        "if False:",
        (f"{CACHE_LENGTHS}::test_converted_layers_refuse_them_too",),
    ),
    Mutation(
        "adapters of a changed model are not marked",
        "graphattn/integrations/transformers/files/saving.py",
        "model.register_state_dict_pre_hook(_mark_adapters)",
        "pass",
        (
            "tests/integrations/test_integrations_saving.py::test_loading_adapters_of_a_changed_model_onto_a_plain_one_warns",
        ),
    ),
    Mutation(
        "a model may have more blocks than there are weights",
        "graphattn/nn/files/pretrained.py",
        "        check_depths(description, state)\n",
        "",
        (f"{FILES}::test_a_config_cannot_make_more_than_the_weights",),
    ),
    Mutation(
        "a model is made whatever the size of the weights",
        "graphattn/nn/files/pretrained.py",
        "if min(left.values()) < 0:",
        "if False:",
        (f"{FILES}::test_a_model_that_another_thread_makes_is_not_counted",),
    ),
    Mutation(
        "parameters of other threads are counted",
        "graphattn/nn/files/pretrained.py",
        "if parameter is None or threading.get_ident() != thread:",
        "if parameter is None:",
        (f"{FILES}::test_a_model_that_another_thread_makes_is_not_counted",),
    ),
    Mutation(
        "a mask function that asks for a truth is read as a band",
        "graphattn/integrations/transformers/masks/bands.py",
        "`and`, `not`, `if` and `a < b < c` call it, as for a tensor\n        raise NoBandError",
        "`and`, `not`, `if` and `a < b < c` call it, as for a tensor\n        return True",
        ("tests/integrations/test_integrations_masks.py::test_what_is_no_band_is_not_read_as_one",),
    ),
    Mutation(
        "what was there before is not put back when a save fails",
        "graphattn/integrations/transformers/files/saving.py",
        "os.replace(kept / name, folder / name)",
        "pass",
        (
            "tests/integrations/test_integrations_saving.py::test_an_error_while_files_are_moved_puts_them_back",
        ),
    ),
    Mutation(
        "the kernels' frame does not scale what rotary positions turn",
        "graphattn/integrations/transformers/conversion/mixers.py",
        "size = cos.square() + sin.square()",
        "size = 1.0",
        (
            "tests/integrations/test_integrations_convert_mathematics.py::test_consensus_steps_in_the_frame_of_the_models_positions_and_back",
        ),
    ),
    Mutation(
        "values of GPT-NeoX are its keys",
        "graphattn/integrations/transformers/conversion/families.py",
        "[:, :2].flatten(0, 2)",
        "[:, 1:].flatten(0, 2)",
        (
            "tests/integrations/test_integrations_convert_mathematics.py::test_vlt_is_the_model_whose_value_projection_is_the_identity",
        ),
    ),
    Mutation(
        "shortcuts of different windows share the graph of a mask",
        "graphattn/integrations/transformers/shortcut/masks.py",
        'once(mask, ("shortcut", call), ',
        'once(mask, "shortcut", ',
        (
            "tests/integrations/test_integrations_shortcut.py::test_a_mask_is_looked_at_once_per_forward_and_again_when_it_changes",
        ),
    ),
    Mutation(
        "the shortcut forgets the past beside a cache",
        "graphattn/integrations/transformers/shortcut/layer.py",
        "self.past = min(before, most)",
        "self.past = 0",
        (
            "tests/integrations/test_integrations_shortcut_cache.py::test_pieces_beside_a_cache_give_what_the_whole_gives",
        ),
    ),
    Mutation(
        "adapters freeze bandwidths and gates",
        "graphattn/integrations/transformers/shortcut/add.py",
        "for name in names for kept in TRAINED_DIRECTLY]",
        "for name in names for kept in ()]",
        (
            "tests/integrations/test_integrations_shortcut_training.py::test_adapters_leave_the_model_as_it_is_and_train_both_branches",
        ),
    ),
    Mutation(
        "the shortcut measures distances without positions",
        "graphattn/integrations/transformers/shortcut/layer.py",
        "apply_rotary_pos_emb(query, key, *rotations, unsqueeze_dim=2)",
        "(query, key)",
        (
            "tests/integrations/test_integrations_shortcut.py::test_a_layer_is_the_equations_of_the_paper",
        ),
    ),
    Mutation(
        "a fused path goes round a converted module",
        "graphattn/integrations/torch/multihead.py",
        "_qkv_same_embed_dim: ClassVar[bool] = False",
        "_qkv_same_embed_dim: ClassVar[bool] = True",
        (
            "tests/integrations/test_integrations_torch.py::test_no_fused_path_goes_round_a_converted_module",
        ),
    ),
    Mutation(
        "an encoder nests tensors around converted layers",
        "graphattn/integrations/torch/convert.py",
        "parent.use_nested_tensor = False",
        "parent.use_nested_tensor = True",
        (
            "tests/integrations/test_integrations_torch.py::test_no_fused_path_goes_round_a_converted_module",
        ),
    ),
    Mutation(
        "first layers of consensus are computed outside of autocast",
        "graphattn/ops/consensus/backends.py",
        "    hidden = [x.hidden() if isinstance(x, FirstLayer) else x for x in layers]\n",
        "    with full_precision(state.device):\n"
        "        hidden = [x.hidden() if isinstance(x, FirstLayer) else x for x in layers]\n",
        ("tests/ops/test_ops_consensus_structured.py",),
    ),
    Mutation(
        "the cache of a layer is looked for under its old name alone",
        "graphattn/integrations/transformers/conversion/families.py",
        'CACHE_NAMES = ("cache", "past_key_values", "layer_past")',
        'CACHE_NAMES = ("past_key_values", "layer_past")',
        (
            "graphattn/integrations/transformers/conversion/families.py",
            "tests/integrations/test_integrations_shortcut_cache.py",
        ),
    ),
    Mutation(
        "rotations that a graph keeps outlive the positions that they are of",
        "graphattn/nn/base/graph_layer.py",
        "rotary.base, like.dtype, positions._version",
        "rotary.base, like.dtype",
        (f"{REPEATED_CALLS}::test_positions_that_are_changed_in_place_count",),
    ),
    Mutation(
        "a kept check is used for keys of another number of heads",
        "graphattn/ops/attention/calls.py",
        "query.shape, key.shape, value.shape, query.dtype",
        "query.shape, query.dtype",
        (f"{REPEATED_CALLS}::test_projections_of_another_width_are_refused_after_right_ones",),
    ),
    Mutation(
        "a kept check is used for another softcap",
        "graphattn/ops/attention/api.py",
        "options = top_k, eps, softcap, dropout, *map(int, facts)",
        "options = top_k, eps, 0, dropout, *map(int, facts)",
        (REPEATED_CALLS,),
    ),
    Mutation(
        "the slope of features is that of the exponential everywhere",
        "graphattn/ops/linear_attention/api.py",
        "torch.where(features <= 1, features, 1)",
        "features",
        ("tests/nn/test_nn_linear_attention.py",),
    ),
    Mutation(
        "compiled code runs unseen in a trace",
        "graphattn/ops/backends.py",
        "if torch._C._get_tracing_state() is not None:  # torch.jit.trace sees only operators, too",
        "if False:",
        (f"{REPEATED_CALLS}::test_a_traced_layer_gives_what_the_layer_gives",),
    ),
    Mutation(
        "gradients are turned the same way as features",
        "graphattn/ops/rotary.py",
        "_rotated(gradients, cosines, sines, not ctx.back)",
        "_rotated(gradients, cosines, sines, ctx.back)",
        ("tests/native/test_native_rotary.py::test_it_has_the_bits_of_torch",),
    ),
    Mutation(
        "a mask of PyTorch that changed is not read again",
        "graphattn/integrations/torch/masks.py",
        "same and kinds and torch.equal(allowed, self.allowed)",
        "same and kinds",
        ("tests/integrations/test_integrations_torch.py::test_a_mask_that_changed_is_read_again",),
    ),
    Mutation(
        "a boolean mask of PyTorch is read the wrong way round",
        "graphattn/integrations/torch/multihead.py",
        "return ~mask if mask.dtype == torch.bool else mask",
        "return mask",
        (
            "tests/integrations/test_integrations_torch.py::test_dot_is_the_module_that_was_replaced",
        ),
    ),
    Mutation(
        "scaling in place leaves the residual alone",
        "graphattn/diagnostics/hidden/changes.py",
        "x.div_(root) * root",
        "x",
        (
            "tests/diagnostics/test_diagnostics_hidden_spectra.py::test_scaling_in_place_reaches_keys_values_and_the_residual",
        ),
    ),
    Mutation(
        "a disabled attention still adds its bias",
        "graphattn/diagnostics/hidden/changes.py",
        "None if args[0].any() else torch.zeros_like(output)",
        "None",
        (
            "tests/diagnostics/test_diagnostics_hidden_spectra.py::test_the_bias_of_the_output_projection_goes_with_the_attention",
        ),
    ),
    Mutation(
        "a checkpointed layer is recorded twice",
        "graphattn/diagnostics/attention/calls.py",
        "_thread.is_paused or in_backward()",
        "_thread.is_paused",
        (
            "tests/integrations/test_integrations_recording.py::test_gradient_checkpointing_does_not_record_twice",
        ),
    ),
]
MUTATIONS += mutations_of_data.MUTATIONS
MUTATIONS += mutations_of_failures.MUTATIONS
MUTATIONS += mutations_of_imports.MUTATIONS
MUTATIONS += mutations_of_lists.MUTATIONS
MUTATIONS += mutations_of_models.MUTATIONS
MUTATIONS += mutations_of_numbers.MUTATIONS
MUTATIONS += mutations_of_objectives.MUTATIONS
MUTATIONS += mutations_of_parts.MUTATIONS
MUTATIONS += mutations_of_plans.MUTATIONS
MUTATIONS += mutations_of_proteins.MUTATIONS
MUTATIONS += mutations_of_runs.MUTATIONS
MUTATIONS += mutations_of_shards.MUTATIONS


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkout]:
    own = Checkout(TOP, tmp_path_factory.mktemp("checkout"))
    yield own
    own.close()


def test_mutations_fit_the_code_as_it_is():
    """Not slow, so that a refactor meets it at once and no mutation turns into nothing."""
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS)
    for mutation in MUTATIONS:
        found = (TOP / mutation.file).read_text().count(mutation.old)
        assert found == mutation.count, mutation.name


def test_every_test_that_should_catch_a_mutation_exists():
    functions: dict[str, set[str]] = {}
    for mutation in MUTATIONS:
        for test in mutation.caught_by:
            file, _, name = test.partition("::")  # a whole file has no name
            if file not in functions:
                nodes = ast.walk(ast.parse((TOP / file).read_text()))
                functions[file] = {n.name for n in nodes if isinstance(n, ast.FunctionDef)}
            name = name.rpartition("::")[2].partition("[")[0]
            assert not name or name in functions[file], mutation.name


@pytest.mark.slow
def test_without_a_mutation_every_named_test_passes(checkout):
    named = dict.fromkeys(test for mutation in MUTATIONS for test in mutation.caught_by)
    status, output = checkout.run(tuple(named))
    assert status == 0, output


@pytest.mark.slow
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mutation_is_caught(mutation, checkout):
    code = (TOP / mutation.file).read_text()
    with checkout.replaced(mutation.file, code.replace(mutation.old, mutation.new)):
        status, output = checkout.run(mutation.caught_by)
    # 1: a test failed. 0 would be a survivor; with any other status no test has judged it.
    assert status == 1, output
    assert "1 failed" in output, output  # and not an error in a fixture
