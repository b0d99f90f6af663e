"""Random graphs and random attention and consensus problems, as hypothesis strategies.

Shapes and options are drawn by hypothesis and shrink; numbers come from a drawn seed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from cases_ops import ConsensusInputs, consensus_inputs, random
from hypothesis import strategies as st
from torch import Tensor

import graphattn as ga

seeds = st.integers(0, 10**6)
batch_dimensions = st.sampled_from([(), (2,), (2, 1)])
poisons = st.sampled_from([torch.nan, torch.inf, -torch.inf, 1e4, -3.0])

NOT_CAUSAL = {
    "path": lambda n, w: ga.window_path_graph(n, w),
    "path with self loops": lambda n, w: ga.window_path_graph(n, w, self_loops=True),
    "cycle": lambda n, w: ga.window_cycle_graph(n, w),
    "dilated": lambda n, w: ga.dilated_window_graph(n, w, 2),
    "blocks": lambda n, w: ga.block_window_graph(n, w + 1, shift=1),
    "complete": lambda n, w: ga.complete_graph(n, self_loops=w % 2 == 0),
    "longformer": lambda n, w: ga.longformer_graph(n, w, [n // 2]),
    "bigbird": lambda n, w: ga.bigbird_graph(n, w, 1, [0], seed=n),
    "grid": lambda n, w: ga.grid_window_graph(2, (n + 1) // 2, w, class_token=w == 1),
    "grid blocks": lambda n, w: ga.grid_block_graph(2, (n + 1) // 2, w + 1, shift=1),
    "union": lambda n, w: ga.union(ga.window_path_graph(n, 1), ga.dilated_window_graph(n, w, 3)),
}
CAUSAL = {
    "causal window": lambda n, w: ga.causal_window_graph(n, w),
    "causal": lambda n, w: ga.causal_graph(n),
}


@st.composite
def edge_lists(draw, max_tokens: int = 7, *, square: bool = True) -> ga.TokenGraph:
    """Any directed edges; often some targets see nobody and some sources are seen by nobody."""
    N = draw(st.integers(1, max_tokens))
    M = N if square else draw(st.integers(1, max_tokens))
    mask = random(N, M, seed=draw(seeds)) < draw(st.sampled_from([-9.0, -1.0, 0.0, 1.0, 9.0]))
    mask[list(draw(st.sets(st.integers(0, N - 1), max_size=2)))] = False
    mask[:, list(draw(st.sets(st.integers(0, M - 1), max_size=1)))] = False
    return ga.from_mask(mask)


def structured(max_tokens: int = 7, *, causal: bool = True) -> st.SearchStrategy[ga.TokenGraph]:
    builders = [*NOT_CAUSAL.values(), *(CAUSAL.values() if causal else ())]
    return st.builds(
        lambda build, n, w: build(n, w),
        st.sampled_from(builders),
        st.integers(1, max_tokens),
        st.integers(1, 3),
    )


def sequences(max_tokens: int = 7, *, causal: bool = True) -> st.SearchStrategy[ga.TokenGraph]:
    """One sequence: an edge list or a structure; without causal ones, energy consensus runs."""
    return st.one_of(edge_lists(max_tokens), structured(max_tokens, causal=causal)).filter(
        lambda graph: causal or not graph.has_causal_part
    )


def squares(max_tokens: int = 7, *, causal: bool = True) -> st.SearchStrategy[ga.TokenGraph]:
    """One sequence or a batch of up to three."""
    parts = st.lists(sequences(max(max_tokens - 2, 2), causal=causal), min_size=1, max_size=3)
    return st.one_of(sequences(max_tokens, causal=causal), parts.map(ga.batch))


def one_rectangle(max_tokens: int = 7) -> st.SearchStrategy[ga.TokenGraph]:
    """One sequence of targets that looks at one sequence of sources."""
    sizes = st.integers(1, max_tokens)
    return st.one_of(
        edge_lists(max_tokens, square=False),
        st.builds(ga.bipartite_complete_graph, sizes, sizes),
        st.builds(ga.bipartite_window_graph, sizes, st.integers(1, 3)),
    )


def rectangles(max_tokens: int = 7) -> st.SearchStrategy[ga.TokenGraph]:
    parts = st.lists(one_rectangle(max(max_tokens - 2, 2)), min_size=1, max_size=3)
    return st.one_of(one_rectangle(max_tokens), parts.map(ga.batch))


def graphs(max_tokens: int = 7) -> st.SearchStrategy[ga.TokenGraph]:
    return st.one_of(squares(max_tokens), rectangles(max_tokens))


def coins(*shape: int, seed: int, share: float = 0.7) -> Tensor:
    """True with probability `share`."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < share


def poisoned(draw, tokens: int) -> tuple[Tensor, Tensor]:
    """Draw which tokens hold something else, bool [tokens], and what they hold, [tokens]."""
    hit = coins(tokens, seed=draw(seeds), share=draw(st.sampled_from([0.2, 0.5])))
    content = [draw(poisons) for _ in range(tokens)]
    return hit, torch.tensor(content, dtype=torch.float64)


def replaced(x: Tensor, hit: Tensor, content: Tensor) -> Tensor:
    """x [*, tokens, heads, features] with `content` in the tokens that are hit."""
    return torch.where(hit[:, None, None], content[:, None, None].to(x.dtype), x)


class AttentionCase(NamedTuple):
    graph: ga.TokenGraph
    query: Tensor
    key: Tensor
    value: Tensor
    arguments: dict[str, Any]  # sigma or scale, top_k

    def output(self, graph: Any = None, **changes: Any) -> Tensor:
        """The operation, with any input, argument or the graph replaced."""
        tensors = [changes.pop(name, getattr(self, name)) for name in ("query", "key", "value")]
        graph = self.graph if graph is None else graph
        arguments = {**self.arguments, **changes}
        if "sigma" in arguments:
            return ga.rbf_attention(*tensors, graph, **arguments)
        return ga.dot_product_attention(*tensors, graph, **arguments)

    def weights(self, **changes: Any) -> Tensor:
        query, key = changes.pop("query", self.query), changes.pop("key", self.key)
        return ga.attention_weights(query, key, self.graph, **{**self.arguments, **changes})


@st.composite
def attention_cases(
    draw,
    graph: st.SearchStrategy[ga.TokenGraph] | None = None,
    *,
    scores: tuple[str, ...] = ("rbf", "dot"),
    dtypes: tuple[torch.dtype, ...] = (torch.float64,),
    sizes: tuple[float, ...] = (0.1, 1.0, 20.0),
) -> AttentionCase:
    """RBF or dot product, grouped-query heads, top-k, batch dimensions: all of it random."""
    graph = draw(graphs() if graph is None else graph)
    batch, seed, dtype = draw(batch_dimensions), draw(seeds), draw(st.sampled_from(dtypes))
    kv_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    features, value_features = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    size = draw(st.sampled_from(sizes))
    arguments: dict[str, Any] = {"top_k": draw(st.sampled_from([None, None, 1, 2, 5]))}
    strength = random(kv_heads * group, seed=seed + 3)
    if draw(st.sampled_from(scores)) == "rbf":
        arguments["sigma"] = strength.exp()
    else:
        arguments["scale"] = strength  # of either sign
    N, M = graph.num_targets, graph.num_sources
    return AttentionCase(
        graph,
        size * random(*batch, N, kv_heads * group, features, seed=seed, dtype=dtype),
        size * random(*batch, M, kv_heads, features, seed=seed + 1, dtype=dtype),
        random(*batch, M, kv_heads, value_features, seed=seed + 2, dtype=dtype),
        arguments,
    )


class ConsensusCase(NamedTuple):
    graph: ga.TokenGraph
    inputs: ConsensusInputs
    step_size: Any
    update: str

    def output(self, graph: Any = None, inputs: Any = None, **keywords: Any) -> Tensor:
        inputs = self.inputs if inputs is None else inputs
        graph = self.graph if graph is None else graph
        return ga.consensus_update(*inputs, graph, self.step_size, update=self.update, **keywords)

    @property
    def reads_its_whole_sequence(self) -> bool:
        """The automatic energy step is one number per sequence."""
        return self.update == "energy" and self.step_size == "auto"


@st.composite
def consensus_cases(
    draw,
    graph: st.SearchStrategy[ga.TokenGraph] | None = None,
    *,
    updates: tuple[str, ...] = ("energy", "target"),
    steps: tuple[Any, ...] = (0.05, "auto"),
    dtypes: tuple[torch.dtype, ...] = (torch.float64,),
    batches: st.SearchStrategy = batch_dimensions,
) -> ConsensusCase:
    """Self- or cross-consensus with a random edge network of any scale, rank and layout."""
    update = draw(st.sampled_from(updates))
    if graph is None:
        graph = squares(causal=False) if update == "energy" else graphs()
    graph = draw(graph)
    inputs = consensus_inputs(
        graph,
        batch=draw(batches),
        heads=draw(st.integers(1, 3)),
        features=draw(st.integers(1, 3)),
        hidden=draw(st.integers(1, 4)),
        rank=draw(st.integers(1, 3)),
        shared_network=draw(st.booleans()),
        separate_trunks=draw(st.booleans()),
        dtype=draw(st.sampled_from(dtypes)),
        seed=draw(seeds),
    )
    scale = draw(st.sampled_from([0.1, 1.0, 10.0]))
    network = ga.EdgeNetworkParameters(*(scale * x for x in inputs.network))
    return ConsensusCase(graph, inputs._replace(network=network), draw(st.sampled_from(steps)),
                         update)  # fmt: skip


def sequence_of(graph: ga.TokenGraph) -> tuple[Tensor, Tensor]:
    """The number of the sequence of every target and of every source."""
    return tuple(
        torch.repeat_interleave(torch.tensor([size[side] for size in graph.sizes]))
        for side in (0, 1)
    )
