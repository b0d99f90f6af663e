"""Bugs of lists of edges, and of the short ways of layers: what is kept, and what is read where."""

from mutation import Mutation

WIDTH = "tests/graphs/test_graphs_index_width.py"
NATIVE_ROTARY = "tests/native/test_native_rotary.py"
DEFAULT_DEVICE = "tests/native/test_native_default_device.py"
TRACES = "tests/nn/test_nn_traces.py"
GRADIENTS = "tests/ops/test_ops_gradients.py"
FREED = "tests/nn/test_nn_freed_graphs.py"
PYG_BATCHES = "tests/graphs/test_graphs_pyg_batches.py"

MUTATIONS = [
    Mutation(
        "a list with one edge too many has 32 bits",
        "graphattn/graphs/edges/index_width.py",
        "max(sizes) <= MOST",
        "max(sizes) <= MOST + 1",
        (f"{WIDTH}::test_the_largest_graph_of_32_bits_is_as_large_as_its_numbers[10]",),
    ),
    Mutation(
        "a union multiplies in 32 bits",
        "graphattn/graphs/builders/combine.py",
        "graph.compact_edges[1].long() * a.num_sources",
        "graph.compact_edges[1] * a.num_sources",
        (f"{WIDTH}::test_products_of_numbers_of_tokens_do_not_overflow",),
    ),
    Mutation(
        "a graph hands out what somebody wrote into",
        "graphattn/graphs/edges/storage.py",
        "if kept is not None and kept[0] == (stored._version, kept[1]._version):",
        "if kept is not None:",
        (f"{WIDTH}::test_writing_into_what_was_asked_for_does_not_change_the_graph",),
    ),
    Mutation(
        "a moved graph keeps what was derived where it was",
        "graphattn/graphs/edges/storage.py",
        "changed._wide, changed._derived = {}, {}",
        "changed._wide = {}",
        (f"{WIDTH}::test_what_was_derived_for_one_device_is_not_used_on_another",),
    ),
    Mutation(
        "rows of a union are numbered from the first of a piece",
        "graphattn/graphs/structures/composites.py",
        "        edges[1] += start\n",
        "",
        (
            f"{WIDTH}::test_edges_listed_some_rows_at_a_time_are_those_that_the_structure_contains"
            "[10-longformer]",
        ),
    ),
    Mutation(
        "sources of a batch for PyG begin where its targets do",
        "graphattn/graphs/conversions/to_libraries.py",
        "shift = torch.stack([shift, first_target[:-1]], dim=1)[:, :, None]",
        "shift = torch.stack([first_target[:-1], shift], dim=1)[:, :, None]",
        (f"{PYG_BATCHES}::test_a_batch_comes_apart_again[two sides-edge_type16]",),
    ),
    Mutation(
        "two tensors of other numbers of samples are rotated in one call",
        "graphattn/nn/rotary.py",
        "if self.is_plain() and x.shape[:-2] == other.shape[:-2]:",
        "if self.is_plain():",
        (f"{NATIVE_ROTARY}::test_two_tensors_of_other_samples_are_not_read_as_of_one_number",),
    ),
    Mutation(
        "angles per head are read as those of all heads",
        "graphattn/ops/rotary.py",
        "cosines.shape[-3:] == (*x.shape[-3:-2], 1, x.shape[-1] / 2)",
        "cosines.shape[-1] == x.shape[-1] / 2",
        (f"{NATIVE_ROTARY}::test_angles_of_other_shapes_are_broadcast",),
    ),
    Mutation(
        "a graph keeps fake positions",
        "graphattn/graphs/edges/storage.py",
        "        elif may_store(self._device):",
        "        elif name:",
        (f"{TRACES}::test_where_all_tensors_are_fake_none_is_kept",),
    ),
    Mutation(
        "what is stored for a list of edges holds a view of it",
        "graphattn/graphs/edges/storage.py",
        "return self.compact_rowptr, self.compact_edges[0].detach()",
        "return self.compact_rowptr, self.compact_edges[0]",
        (
            f"{FREED}::test_a_graph_and_its_list_are_freed_without_a_search_for_garbage[list-native]",
        ),
    ),
    Mutation(
        "an export leaves its tensors with the graph",
        "kernels/shared/stored.py",
        "    if torch.compiler.is_dynamo_compiling():\n        return False\n",
        "    if torch.compiler.is_compiling():\n        return False\n",
        (
            f"{TRACES}::test_a_trace_first_then_calls_then_training[window-export-DotProductAttention(rope=True,kv_heads=2)-auto]",
        ),
    ),
    Mutation(
        "what a trace needs of a graph is computed in the trace",
        "kernels/shared/stored.py",
        "        stack.enter_context(_disable_current_modes())",
        "        pass",
        (
            f"{TRACES}::test_a_trace_first_then_calls_then_training[list-export-DotProductAttention(rope=True,kv_heads=2)-reference]",
        ),
    ),
    Mutation(
        "tables that graphs share are kept as a trace makes them",
        "kernels/shared/stored.py",
        "        with kept_for_training(device):\n            entry = make()\n",
        "        if True:\n            entry = make()\n",
        (f"{TRACES}::test_tables_that_graphs_share_are_not_made_in_a_trace[band]",),
    ),
    Mutation(
        "a trace draws the edges of a graph anew",
        "kernels/shared/stored.py",
        "        resume(None)",
        "        pass",
        (
            f"{TRACES}::test_a_trace_first_then_calls_then_training[bigbird-jit-LinearAttention()-reference]",
        ),
    ),
    Mutation(
        "bandwidths that are mapped are read",
        "graphattn/ops/backends.py",
        "            if torch._C._functorch.is_batchedtensor(x):\n                return False\n",
        "",
        (f"{TRACES}::test_numbers_of_heads_may_be_mapped",),
    ),
    Mutation(
        "structured runs into torch.func",
        "graphattn/ops/backends.py",
        'is_seen = row.name == "reference" or (row.name == "structured" and row.run is None)',
        'is_seen = row.name in ("reference", "structured")',
        (f"{TRACES}::test_a_backend_that_torch_func_cannot_follow_says_so",),
    ),
    Mutation(
        "the edges of a graph that is made in a trace are constants",
        "graphattn/graphs/edges/storage.py",
        "is_constant=self._is_constant)",
        "is_constant=True)",
        (f"{TRACES}::test_a_graph_made_in_a_trace_is_traced",),
    ),
    Mutation(
        "neighbours are searched where a trace does not see it",
        "kernels/cpu/neighbors.py",
        "return not makes_fakes() and is_plain and",
        "return is_plain and",
        (f"{TRACES}::test_a_graph_made_in_a_trace_is_traced",),
    ),
    Mutation(
        "without edges, gradients are not there to be differentiated again",
        "graphattn/ops/attention/structured/chunked.py",
        "            out, lse = out + nothing, lse + nothing\n",
        "            del nothing\n",
        (f"{GRADIENTS}::test_without_edges_all_derivatives_are_there_and_zero[list-dot-auto]",),
    ),
    Mutation(
        "edges are sorted on the default device",
        "kernels/cpu/edge_order.py",
        'torch.empty((2, num_edges), dtype=torch.int32, device="cpu")',
        "torch.empty((2, num_edges), dtype=torch.int32)",
        (f"{DEFAULT_DEVICE}::test_another_default_device_changes_nothing",),
    ),
]
