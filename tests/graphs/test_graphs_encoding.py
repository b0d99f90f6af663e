"""A structure that operators cannot read as numbers says so."""

import pytest

import graphattn as ga
from graphattn.graphs.structures.structure import Band
from graphattn.graphs.token_graph import decode, encode


class Unlisted(Band):
    """A structure of somebody else."""


def test_a_structure_that_is_not_listed_says_what_to_do():
    said = "structure must be one of .*, got Unlisted.*from_edge_index.*KINDS"
    with pytest.raises(TypeError, match=said):
        ga.TokenGraph(structure=Unlisted(9, 1, 1))
    edges = Unlisted(9, 1, 1).edges()
    graph = ga.from_edge_index(edges, 9)
    assert decode(encode(graph), edges, graph.device) == graph
