"""Mutations of `graphattn/distributed/`, where it says which rank differs, failed or died."""

from mutation import Mutation

HERE = "graphattn/distributed"
TESTS = "tests/distributed/test_failures.py"
CALLS = "tests/distributed/test_different_calls.py"
SAME = f"{CALLS}::test_every_rank_says_what_differs_and_where"
ALIKE = f"{CALLS}::test_ranks_are_not_kept_from_calls_that_are_alike"

MUTATIONS = [
    Mutation(
        "the digest of a graph forgets its list",
        f"{HERE}/failures/agreement.py",
        "tensors.append(graph.listed)",
        "pass",
        (f"{TESTS}::test_graphs_share_a_digest_only_with_their_equals[listed]",),
    ),
    Mutation(
        "the digest of a graph forgets its positions",
        f"{HERE}/failures/agreement.py",
        "tensors.extend(graph.own_positions)",
        "pass",
        (f"{TESTS}::test_permuted_graphs_share_a_digest_if_and_only_if_they_are_equal",),
    ),
    Mutation(
        "the error of a rank is not told when graphs are compared",
        f"{HERE}/failures/agreement.py",
        "None if error is None else said(error)",
        "None",
        (f"{TESTS}::test_the_error_of_one_rank_before_the_graph_is_made_is_raised_on_every_rank",),
    ),
    Mutation(
        "an error that all ranks raise breaks their group",
        f"{HERE}/failures/group_watch.py",
        "failure.rank == self.rank or failure.call in self.raised",
        "failure.rank == self.rank",
        (f"{TESTS}::test_an_error_that_all_ranks_raise_alike_breaks_nothing",),
    ),
    Mutation(
        "a rank has no time for an error of its own",
        f"{HERE}/failures/group_watch.py",
        "(GRACE if is_same_call else self.limit)",
        "(0 if is_same_call else self.limit)",
        ("tests/distributed/test_combinations.py::test_a_rank_that_is_late_raises_its_own_error",),
    ),
    Mutation(
        "a call outside of a context waits for ever",
        f"{HERE}/failures/group_watch.py",
        "(GRACE if is_same_call else self.limit)",
        "(GRACE if is_same_call else 1e9)",
        (f"{TESTS}::test_a_call_that_nothing_watches_ends_when_the_limit_is_over",),
    ),
    Mutation(
        "a broken group keeps its connections",
        f"{HERE}/failures/group_watch.py",
        "close_connections(self.addresses)",
        "pass",
        (f"{TESTS}::test_a_wrong_shard_on_one_rank_raises_on_all",),
    ),
    Mutation(
        "nobody notices a rank that hangs",
        f"{HERE}/failures/group_watch.py",
        "self._look_at([(self.rank + 1) % self.size], self.limit)",
        "pass",
        (f"{TESTS}::test_a_rank_that_dies_or_hangs_is_named[stop]",),
    ),
    Mutation(
        "nobody notices a store that hangs",
        f"{HERE}/failures/group_watch.py",
        "if self.unanswered * self.pause > self.limit:",
        "if False:",
        (f"{TESTS}::test_a_rank_that_takes_the_store_with_it_is_named[stop_host]",),
    ),
    Mutation(
        "a new group is confused with the one before it",
        f"{HERE}/failures/connections.py",
        "connection.getpeername()[1] == store.port and not is_closed(connection)",
        "connection.getpeername()[1] == store.port",
        (f"{TESTS}::test_groups_can_be_destroyed_and_made_again_and_leave_no_thread",),
    ),
    Mutation(
        "a rank sends rows of a call that others do not expect",
        f"{HERE}/failures/same_calls.py",
        "        if call == expected:",
        "        if expected:",
        (f"{SAME}[batch]",),
    ),
    Mutation(
        "nobody answers a rank that waits for the same call",
        f"{HERE}/failures/same_calls.py",
        '            store.compare_set(f"call/{self.name}/{count}/{self.watch.rank}", "", "{}")',
        "            pass",
        (f"{SAME}[batch]",),
    ),
    Mutation(
        "a question to a rank that is late is dropped",
        f"{HERE}/failures/group_watch.py",
        "                self.questions.append((shard, call))",
        "                pass",
        (f"{CALLS}::test_a_rank_that_is_late_and_differs_is_named",),
    ),
    Mutation(
        "ranks have to cross a border to call as they like",
        f"{HERE}/sharded_graph.py",
        "or torch.compiler.is_compiling() or not self._has_border",
        "or torch.compiler.is_compiling()",
        (f"{ALIKE}[nothing_travels]",),
    ),
    Mutation(
        "a rank that compares nothing is waited for",
        f"{HERE}/failures/same_calls.py",
        "if waited > watch.limit and not differ:",
        "if waited > 100 * watch.limit and not differ:",
        (f"{CALLS}::test_a_rank_that_compares_nothing_is_waited_for_no_longer_than_the_limit",),
    ),
    Mutation(
        "ranks expect the last call again, whatever followed it before",
        f"{HERE}/failures/same_calls.py",
        "            if numbers in self.following:",
        "            if False:",
        (f"{ALIKE}[only_surprises]",),
    ),
    Mutation(
        "the dtype of autocast is not compared",
        f"{HERE}/failures/same_calls.py",
        "    if torch.is_autocast_enabled(device):",
        "    if False:",
        (f"{SAME}[autocast]",),
    ),
]
