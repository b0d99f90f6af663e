"""Figures of plans of communication show the rows that the plans have."""

import numpy
import pytest
import torch

import graphattn as ga


@pytest.mark.parametrize("ranks", [1, 5, 12])
def test_a_matrix_has_the_rows_of_every_pair_of_ranks(ax, ranks):
    graph = ga.longformer_graph(300, 4, global_tokens=[7])
    plan = ga.distributed.plan(graph, ranks)
    assert ga.plot.communication_plan(plan, ax=ax) is ax
    ax.figure.draw_without_rendering()
    rows = numpy.asarray(ax.images[0].get_array())
    assert rows.sum(1).tolist() == plan.received_rows.tolist()
    assert rows.sum(0).tolist() == plan.sent_rows.tolist()
    assert len(ax.texts) == ((rows > 0).sum() if ranks <= 8 else 0)


def test_a_plan_for_many_ranks_is_a_line_below_that_of_an_all_gather(ax):
    plan = ga.distributed.plan(ga.causal_window_graph(1000, window=20), 100)
    ga.plot.communication_plan(plan, ax=ax)
    gathered, received = (line.get_ydata() for line in ax.lines)
    assert list(received) == plan.received_rows.tolist()
    assert list(gathered) == 100 * [990]


def test_several_plans_are_drawn_against_their_numbers_of_ranks(ax):
    graphs = ga.causal_window_graph(1024, window=9), ga.complete_graph(1024)
    plans = [ga.distributed.plan(graph, ranks) for ranks in (16, 2, 4) for graph in graphs]
    ga.plot.communication_plan(plans, ax=ax)
    ax.figure.draw_without_rendering()
    window, complete, gathered = ax.lines
    assert list(window.get_xdata()) == [2, 4, 16]
    assert list(window.get_ydata()) == [8, 8, 8]
    assert list(complete.get_ydata()) == list(gathered.get_ydata()) == [512, 768, 960]
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["2", "4", "16"]
    names = [text.get_text() for text in ax.get_legend().get_texts()]
    assert names == [
        "a token sees 9 tokens",
        "a token sees 1,024 tokens",
        "all-gather of 1,024 rows",
    ]


@pytest.mark.parametrize("wrong", [[], None, ga.causal_graph(4), [torch.ones(2)]])
def test_only_plans_are_drawn(wrong, ax):
    with pytest.raises(ValueError, match="plan must"):
        ga.plot.communication_plan(wrong, ax=ax)
