"""Mutations of `graphattn/distributed/`: rows that travel, rings, and layers that use them."""

from mutation import Mutation

HERE = "graphattn/distributed"
TESTS = "tests/distributed/test_sharded_layers.py"
UNUSUAL = "tests/distributed/test_unusual_inputs.py"
PARTS = "tests/distributed/test_part_gradients.py"
KERNELS = "tests/kernels/test_kernels_part_gradients.py"
LARGE = "test_log_sums_too_large_for_float32_are_left_to_the_parts"
SAME = f"{TESTS}::test_outputs_and_gradients_equal_those_of_one_process"
COUNTS = f"{TESTS}::test_a_causal_window_of_256_sends_255_rows_over_every_border"
OTHERS = "tests/distributed/test_combinations.py"
OVERLAP = "tests/distributed/test_overlap.py"
PLANS = "tests/distributed/test_plans.py"
STATES = "tests/distributed/test_states.py"
NEIGHBORS = "tests/distributed/test_neighbors.py"
NEAREST = f"{NEIGHBORS}::test_edges_outputs_and_gradients_equal_those_of_one_process"
DIVIDED = "tests/distributed/test_divided.py"
OBJECTIVES = f"{DIVIDED}::test_objectives_over_divided_sequences_are_those_of_one_process[2]"
GENERATION = "tests/distributed/test_generation.py"
TEXTS = f"{GENERATION}::test_texts_after_a_divided_prompt_are_those_of_one_process[2]"

MUTATIONS = [
    Mutation(
        "a window reaches one token too far",
        f"{HERE}/seen.py",
        "sides = [(start - before * step, stop - step)] if before else []",
        "sides = [(start - before * step - 1, stop - step)] if before else []",
        (COUNTS,),
    ),
    Mutation(
        "edges among halo tokens lack the last token",
        f"{HERE}/local_graph.py",
        "        among = block_of(graph, (first, last), (first, last))",
        "        among = block_of(graph, (first, last - 1), (first, last - 1))",
        (f"{SAME}[window-4]",),
    ),
    Mutation(
        "gradients of rows do not travel",
        f"{HERE}/exchange.py",
        "_exchanged(d_rows, *back)",
        "_exchanged(0 * d_rows, *back)",
        (f"{SAME}[window-4]",),
    ),
    Mutation(
        "the output of a part has no share in its log-sum's gradient",
        f"{HERE}/ring/operations.py",
        "        return share * d_out, share * (change + d_lse)",
        "        return share * d_out, share * d_lse",
        (f"{SAME}[causal window-3]",),
    ),
    Mutation(
        "all ranks draw the same seed",
        f"{HERE}/local_graph.py",
        "        return self.rank, self.ranks",
        "        return 0, 1",
        (f"{OTHERS}::test_ranks_drop_different_edges_and_keep_the_mean",),
    ),
    Mutation(
        "the automatic step is that of one rank",
        f"{HERE}/local_graph.py",
        "        return self.over_ranks(largest).index_select(-2, self.sequence)",
        "        return largest.index_select(-2, self.sequence)",
        (f"{SAME}[window-4]",),
    ),
    Mutation(
        "nobody hears of an error in a layer",
        "graphattn/nn/base/padded_rows.py",
        "            with graph.call_of(self, given):",
        "            if True:",
        ("tests/distributed/test_agreement.py::test_an_error_of_one_rank_is_raised_on_every_rank",),
    ),
    Mutation(
        "rows that nobody needs travel on a ring",
        f"{HERE}/ring/rounds.py",
        "            arriving = common(self.needed[rank], self.sources.runs(sender))",
        "            arriving = [(run.start, run.stop) for run in self.sources.runs(sender)]",
        (f"{SAME}[window-3]",),
    ),
    Mutation(
        "the backward pass of a ring computes parts again",
        f"{HERE}/ring/passes.py",
        "        pairs = part.operation.from_results(*part[1:])",
        "        pairs = None",
        (f"{PARTS}::test_the_backward_pass_of_a_ring_computes_no_part_again",),
    ),
    Mutation(
        "the log-sum of a part has no gradient",
        "graphattn/ops/attention/native/bands.py",
        "        return self.backward(inputs, out, saved.flatten(-2), d_out, d_lse)",
        "        return self.backward(inputs, out, saved.flatten(-2), d_out, None)",
        (f"{PARTS}::test_parts_add_up_to_the_gradient_over_all_sources[dot-False]",),
    ),
    Mutation(
        "products of a part may overflow",
        "graphattn/ops/attention/native/bands.py",
        "        if not are_moderate((*inputs[:4], out, d_out, d_lse), (sums,)):",
        "        if False:",
        (f"{PARTS}::test_numbers_whose_products_overflow_are_left_to_the_parts[nan-0]",),
    ),
    Mutation(
        "steep differences of a part are those of products",
        "graphattn/ops/attention/native/bands.py",
        "        if may_be_steep and (bias",
        "        if False and (bias",
        (f"{PARTS}::test_targets_far_from_all_sources_are_left_to_the_parts",),
    ),
    Mutation(
        "log-sums of all sources keep the squares that band kernels leave out",
        "kernels/bands/inputs.py",
        "        return saved_log_sums(lse, squares",
        "        return saved_log_sums(lse, 0 * squares",
        (f"{KERNELS}::test_parts_add_up_in_half_precision",),
    ),
    Mutation(
        "the log-sum of a part of an edge list has no gradient",
        "graphattn/ops/attention/native/rows.py",
        "        delta = (out * d_out).sum(-1) - d_lse",
        "        delta = (out * d_out).sum(-1)",
        (f"{PARTS}::test_parts_of_any_graph_add_up[edges-dot-True-native]",),
    ),
    Mutation(
        "weights of a part come from log-sums without digits",
        "graphattn/ops/attention/merge.py",
        "bound = SOUND if x.dtype == torch.float64 else most",
        "bound = SOUND",
        (f"{PARTS}::{LARGE}[3000.0-structured]",),
    ),
    Mutation(
        "a scale that no layer has is lost on a ring",
        f"{HERE}/ring/passes.py",
        "    leaves = [x for x in outs if x.grad_fn is None]",
        "    leaves = []",
        (f"{OTHERS}::test_no_gradient_is_lost_on_a_ring",),
    ),
    Mutation(
        "a compiled ring computes with the parameters that the layer has by itself",
        f"{HERE}/ring/compiled.py",
        "dict(zip(names, parameters, strict=True))",
        "{}",
        (f"{OTHERS}::test_a_ring_is_compiled_once_for_all_layers_of_a_kind",),
    ),
    Mutation(
        "a copy of a layer has the number of the first one",
        "graphattn/nn/base/graph_layer.py",
        "        self._number = numbered(self)  # a copy",
        "        pass  # a copy",
        (f"{OTHERS}::test_a_ring_is_compiled_once_for_all_layers_of_a_kind",),
    ),
    Mutation(
        "a state has keys that are not rotated",
        f"{HERE}/ring/states.py",
        "    products = turned_key.movedim(-3, -1) @ value.transpose(-3, -2)",
        "    products = key.movedim(-3, -1) @ value.transpose(-3, -2)",
        (f"{STATES}::test_outputs_and_gradients_equal_those_of_one_process[causal-2]",),
    ),
    Mutation(
        "padding enters a state",
        f"{HERE}/ring/states.py",
        "clear_invalid(x, of_sources) for x in (key, value, turned_key)",
        "x for x in (key, value, turned_key)",
        (f"{STATES}::test_outputs_and_gradients_equal_those_of_one_process[causal-3]",),
    ),
    Mutation(
        "a state stands for sources that only some targets see",
        f"{HERE}/ring/states.py",
        "        if len(without_own(partly, rank, sources, borders).rank):",
        "        if False:",
        (f"{STATES}::test_states_stand_for_exactly_the_edges_between_ranks[causal window]",),
    ),
    Mutation(
        "a plan counts states where rows are smaller",
        "graphattn/distributed/planning/plans.py",
        "        if self.states is None or self.widest_state(rope=rope) < D:",
        "        if self.states is None:",
        (f"{STATES}::test_states_are_sent_if_all_of_them_are_smaller_than_all_rows[False]",),
    ),
    Mutation(
        "both ends of the edges within a rank move twice",
        f"{HERE}/ring/rounds.py",
        'parts += [] if which_side else [([(run.start, run.stop)], "both")]',
        'parts += [([(run.start, run.stop)], "both")]',
        (f"{SAME}[complete-2]",),
    ),
    Mutation(
        "a token that moves is seen on a ring, although it is not valid as a source",
        "graphattn/nn/base/consensus_across_ranks.py",
        "(as_sources, as_targets)",
        "(of_targets, of_sources)",
        ("tests/distributed/test_unusual_inputs.py::test_a_token_may_move_and_yet_not_be_seen",),
    ),
    Mutation(
        "later iterations keep the states of other ranks",
        "graphattn/nn/consensus.py",
        "                    u = fetch(u)",
        "                    pass",
        (f"{SAME}[window-4]",),
    ),
    Mutation(
        "of equally near tokens on several ranks the last one wins",
        f"{HERE}/neighbors.py",
        "    order = edges[0].argsort(stable=True)\n    order = order[squared",
        "    order = edges[0].argsort(descending=True)\n    order = order[squared",
        (f"{NEAREST}[3]",),
    ),
    Mutation(
        "coordinates that are not numbers travel",
        f"{HERE}/neighbors.py",
        "x.isnan().any(1, keepdim=True)",
        "x.isnan().all(1, keepdim=True)",
        (f"{NEIGHBORS}::test_the_search_sends_the_bytes_of_its_plan",),
    ),
    Mutation(
        "both ends of edges between ranks do not move",
        f"{HERE}/neighbors.py",
        "    return torch.cat([edges, arrived], dim=1)",
        "    return edges",
        (f"{NEAREST}[3]",),
    ),
    Mutation(
        "rows are waited for before anything is computed",
        f"{HERE}/exchange.py",
        "travelling.elem if isinstance",
        "travelling.wait() if isinstance",
        (f"{OVERLAP}::test_results_and_bytes_are_those_without_an_overlap",),
    ),
    Mutation(
        "gradients on a ring are waited for at once",
        f"{HERE}/ring/passes.py",
        "            returning = exchange, exchange.send_back(leaving)",
        "            exchange.add_returned(exchange.send_back(leaving), of_sources)",
        (f"{OVERLAP}::test_results_and_bytes_are_those_without_an_overlap",),
    ),
    Mutation(
        "all targets of a graph of neighbours are taken for such that see no other rank",
        f"{HERE}/planning/neighbor_plans.py",
        "        return False\n",
        "        return True\n",
        (f"{OVERLAP}::test_results_and_bytes_are_those_without_an_overlap",),
    ),
    Mutation(
        "consensus leaves out tokens of other ranks if it begins with its own",
        "graphattn/nn/base/consensus_across_ranks.py",
        "tuple(x.index_add(-3, rows, y) for",
        "tuple(x for",
        (f"{OVERLAP}::test_results_and_bytes_are_those_without_an_overlap",),
    ),
    Mutation(
        "attention that begins with its own sources forgets them where it sees others",
        f"{HERE}/ring/passes.py",
        "    merged = operation.merge(tuple(_rows(part, rows)), other)",
        "    merged = other",
        (f"{OVERLAP}::test_results_and_bytes_are_those_without_an_overlap",),
    ),
    Mutation(
        "the first run of targets that see no other rank is taken, not the longest",
        f"{HERE}/planning/inside.py",
        "    order = (stop - start).argsort(stable=True)",
        "    order = torch.arange(len(start)).flip(0)",
        (f"{PLANS}::test_targets_inside_are_the_longest_runs_that_see_no_other_rank[edges-False]",),
    ),
    Mutation(
        "every rank guesses at all tokens",
        "graphattn/train/batches.py",
        "where = where & model.own_tokens(",
        "where = where | model.own_tokens(",
        (OBJECTIVES, f"{DIVIDED}::test_a_rank_guesses_at_its_own_tokens_only"),
    ),
    Mutation(
        "the gradient of gathered outputs is that of one rank's share",
        "graphattn/train/runs/divided.py",
        "same_loss_on_all_ranks(part.gather(x, dim=-2), part.ranks)",
        "part.gather(x, dim=-2)",
        (OBJECTIVES,),
    ),
    Mutation(
        "padding of a short sequence is real",
        "graphattn/train/runs/divided.py",
        'given.setdefault("valid", torch.ones_like(tokens, dtype=torch.bool))',
        "pass",
        (OBJECTIVES,),
    ),
    Mutation(
        "ranks may guess at different masks",
        "graphattn/train/runs/divided.py",
        "        self._agree_on(tokens)\n",
        "",
        (f"{DIVIDED}::test_masks_that_differ_between_ranks_are_an_error",),
    ),
    Mutation(
        "distances are those of residues that a rank owns",
        "graphattn/models/proteins/residue_edges.py",
        "joined[name] = torch.cat([x, of_source], dim)",
        "joined[name] = torch.cat([x, torch.zeros_like(of_source)], dim)",
        (OBJECTIVES,),
    ),
    Mutation(
        "every rank stores every new token",
        "graphattn/nn/caches/divided_cache.py",
        "        if place % self.shard.ranks == self.shard.rank:",
        "        if True:",
        (TEXTS,),
    ),
    Mutation(
        "a token is taken back on all ranks at once",
        "graphattn/nn/caches/divided_cache.py",
        "self.end = end - (self._owned_before(before) - self._owned_before(self.position))",
        "pass",
        (TEXTS,),
    ),
    Mutation(
        "of equal logits of several ranks, the first rank's are selected",
        "graphattn/nn/attention_steps.py",
        "in_order = places.argsort(dim=-1, stable=True)",
        "in_order = torch.arange(places.shape[-1]).expand_as(places)",
        (f"{GENERATION}::test_equal_logits_of_several_ranks_select_the_earlier_token",),
    ),
    Mutation(
        "running sums after a prompt are those of one rank",
        "graphattn/nn/caches/divided_cache.py",
        "torch.distributed.all_reduce(x, group=shard.group)",
        "pass",
        (TEXTS,),
    ),
    Mutation(
        "a token with two positions has one state on a ring",
        "graphattn/nn/base/consensus_across_ranks.py",
        "        plain &= len({*map(id, positions)}) == 1",
        "        pass",
        (f"{UNUSUAL}::test_a_token_may_move_and_yet_not_be_seen",),
    ),
    Mutation(
        "every part of a ring differentiates the history of a table of biases",
        f"{HERE}/ring/passes.py",
        "            leaves[i] = x.detach().requires_grad_()",
        "            leaves[i] = x",
        (f"{UNUSUAL}::test_a_learned_table_of_biases_gets_its_gradient_once",),
    ),
    Mutation(
        "values per edge may pass as a table on one rank",
        f"{HERE}/sharded_graph.py",
        '            facts.texts.extend(["edge_bias", TABLE if self.is_table(bias) else VALUES])',
        "            pass",
        (f"{UNUSUAL}::test_a_bias_is_not_taken_for_a_table",),
    ),
    Mutation(
        "a branch of a window sees all edges over ranks",
        "graphattn/nn/gated_krause.py",
        "            near = near.nearby(self.krause_window)",
        "            pass",
        (f"{TESTS}::test_a_branch_sees_the_nearby_edges_over_all_ranks",),
    ),
]
