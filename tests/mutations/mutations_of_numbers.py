"""Bugs in spectral numbers, searches by distance and consensus steps."""

from mutation import Mutation

BANDED = "tests/spectral/test_spectral_banded.py"
KINDS = "tests/spectral/test_spectral_certificate_kinds.py"
SINK = "tests/ops/test_ops_sink.py"
CHEEGER = "tests/spectral/test_spectral_cheeger.py"
DESIGN = "tests/spectral/test_spectral_design.py"
SWEEP = "tests/train/test_train_sweep.py"
SCALE = "tests/ops/test_ops_consensus_scale.py"
RADIUS = "tests/graphs/test_graphs_radius.py"

MUTATIONS = [
    Mutation(
        "the Cheeger sweep subtracts running sums",
        "graphattn/spectral/cheeger.py",
        "    cut = _sums_over_ranges(start, stop, pairs.data, len(height))[:-1]\n",
        "    cut = np.cumsum(np.bincount(start, pairs.data, len(height))\n"
        "        - np.bincount(stop, pairs.data, len(height)))[:-1]\n",
        (f"{CHEEGER}::test_cuts_of_tiny_weights_lie_between_the_bounds",),
    ),
    Mutation(
        "any token is the ground of an elimination",
        "graphattn/spectral/laplacians/elimination.py",
        "ground = int(adjacency.sum(axis=1).argmax())",
        "ground = num_tokens - 1",
        (f"{CHEEGER}::test_cuts_of_tiny_weights_lie_between_the_bounds",),
    ),
    Mutation(
        "the window for mixing promises a larger step than layers take",
        "graphattn/spectral/design.py",
        '    is_largest = step_size == "largest"\n',
        "    is_largest = True\n",
        (f"{DESIGN}::test_steps_of_a_layer_leave_what_was_promised",),
    ),
    Mutation(
        "the automatic step is differentiated at the scale of the matrices",
        "graphattn/ops/consensus/step_size.py",
        "    size = bound.detach()\n",
        "    size = torch.ones_like(bound)\n",
        (f"{SCALE}::test_gradients_in_float32_are_those_of_float64_at_every_scale",),
    ),
    Mutation(
        "matrices of any size have an automatic step",
        "graphattn/ops/consensus/step_size.py",
        "bound < 256 * torch.finfo(bound.dtype).tiny",
        "bound == 0",
        (
            f"{SCALE}::test_matrices_of_nearly_zero_move_nothing_or_little_and_have_finite_gradients",
        ),
    ),
    Mutation(
        "every rate that has not diverged is stable",
        "graphattn/train/sweeps/results.py",
        "if loss <= limit}",
        "if True}",
        (f"{SWEEP}::test_a_stable_rate_ends_near_the_best_loss",),
    ),
    Mutation(
        "a Fiedler value is accepted by Temple's bound",
        "graphattn/spectral/laplacians/banded.py",
        "        size = np.abs((residual * correction)[:, :near].sum(axis=0)).sum()\n",
        "        size = np.square(residual[:, :near]).sum() / value[near % 4]\n",
        (f"{BANDED}::test_values_as_small_as_those_of_millions_of_tokens_are_accepted",),
    ),
    Mutation(
        "a certificate of nothing is sound",
        "graphattn/spectral/certificates/facts.py",
        "if self.num_checked == 0:",
        "if False:",
        (f"{KINDS}::test_a_certificate_of_nothing_is_not_sound",),
    ),
    Mutation(
        "a step towards other tokens is certified by one edge of a target",
        "graphattn/spectral/certificates/two_tracks.py",
        "sums.index_add_(0, target[some] - i, dense)",
        "sums.index_copy_(0, target[some] - i, dense)",
        (f"{KINDS}::test_a_step_towards_other_tokens_is_judged_by_its_largest_eigenvalue",),
    ),
    Mutation(
        "a signal on a weighted graph is smoothed without its weights",
        "graphattn/spectral/certificates/certify.py",
        "u = u - eta * energy_gradient(graph, u, weight)",
        "u = u - eta * energy_gradient(graph, u)",
        (f"{KINDS}::test_the_numbers_of_a_weighted_graph_are_those_of_its_laplacian",),
    ),
    Mutation(
        "a sink's share is rounded as torch places its numbers",
        "graphattn/ops/segments.py",
        "return torch.sigmoid(x.double()).to(x.dtype)",
        "return torch.sigmoid(x)",
        (f"{SINK}::test_the_rest_of_the_batch_changes_no_bit_of_a_row",),
    ),
    Mutation(
        "the square of the rounded radius bounds squared distances",
        "graphattn/graphs/builders/neighbors.py",
        "            squared_reach(radius, wide),\n",
        "            float(points.new_tensor(radius)) ** 2,\n",
        (f"{RADIUS}::test_lattices_find_the_neighbours_at_the_radius",),
    ),
    Mutation(
        "sources of an item are numbered as its targets",
        "graphattn/graphs/builders/neighbors.py",
        "torch.tensor([[s], [t]], device",
        "torch.tensor([[t], [t]], device",
        (f"{RADIUS}::test_items_of_two_sets_are_searched_each_by_itself",),
    ),
]
