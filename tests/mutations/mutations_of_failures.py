"""Mutations of `graphattn/distributed/`, where ranks agree on graphs and calls."""

from mutation import Mutation

HERE = "graphattn/distributed"
TESTS = "tests/distributed/test_agreement.py"
SAME = f"{TESTS}::test_every_rank_says_what_differs_and_where"

MUTATIONS = [
    Mutation(
        "the digest of a graph forgets its list",
        f"{HERE}/agreement.py",
        "tensors.append(graph.listed)",
        "pass",
        (f"{TESTS}::test_graphs_share_a_digest_only_with_their_equals[listed]",),
    ),
    Mutation(
        "the digest of a graph forgets its positions",
        f"{HERE}/agreement.py",
        "tensors.extend(graph.own_positions)",
        "pass",
        (f"{TESTS}::test_permuted_graphs_share_a_digest_if_and_only_if_they_are_equal",),
    ),
    Mutation(
        "the error of a rank is not told when graphs are compared",
        f"{HERE}/agreement.py",
        "text = None if error is None else",
        "text = None if error is not None else",
        (f"{TESTS}::test_an_error_of_one_rank_in_shard_is_raised_on_every_rank",),
    ),
    Mutation(
        "rows are sent before ranks agree on a call",
        f"{HERE}/exchange.py",
        "            agree_on_call(self.group)",
        "            pass",
        (SAME,),
    ),
    Mutation(
        "compiled functions do not compare their calls",
        f"{HERE}/agreement.py",
        "        _agree_on(rows, facts.texts, facts.sizes, group.group_name)",
        "        pass",
        (f"{TESTS}::test_the_operator_of_compiled_calls_compares_them",),
    ),
    Mutation(
        "only the largest hashes of ranks are compared",
        f"{HERE}/agreement.py",
        "return int(largest.sum()) == 0",
        "return int(largest[0]) == number",
        (SAME,),
    ),
    Mutation(
        "nobody hears of an error before rows are sent",
        f"{HERE}/agreement.py",
        "        agree_on_call(group, error)",
        "        pass",
        (f"{TESTS}::test_an_error_of_one_rank_is_raised_on_every_rank[rows]",),
    ),
    Mutation(
        "ranks agree on calls in which nothing travels",
        f"{HERE}/sharded_graph.py",
        "        if self.group is None or not self._has_border:",
        "        if self.group is None:",
        (f"{TESTS}::test_calls_may_differ_where_nothing_travels",),
    ),
    Mutation(
        "the dtype of autocast is not compared",
        f"{HERE}/agreement.py",
        "    if torch.is_autocast_enabled(device):",
        "    if False:",
        (SAME,),
    ),
    Mutation(
        "prompts of ranks are not compared",
        "graphattn/models/language/generation.py",
        "            agree(shard.group, {name: _digest(value) for name, value in given.items()})",
        "            pass",
        (f"{TESTS}::test_ranks_that_generate_something_else_are_named",),
    ),
    Mutation(
        "positions of both ends are not compared if they are one tensor",
        f"{HERE}/agreement.py",
        'not (name == "positions" and of_targets is of_sources)',
        "True",
        (f"{TESTS}::test_tokens_with_two_positions_on_one_rank_are_named",),
    ),
]
