"""Graphs of tokens, which say who attends to whom: the token graph, what is known of its structure,
and its builders.
"""

from graphattn.graphs.collate import collate
from graphattn.graphs.combine import batch, union
from graphattn.graphs.convert import (
    from_edge_index,
    from_mask,
    from_networkx,
    from_scipy,
)
from graphattn.graphs.convert_pyg import from_pyg
from graphattn.graphs.grids import (
    grid_block_graph,
    grid_window_graph,
    neighborhood_graph,
    volume_window_graph,
)
from graphattn.graphs.long_range import bigbird_graph, longformer_graph
from graphattn.graphs.mask_mods import from_mask_mod
from graphattn.graphs.nearest_neighbors import knn
from graphattn.graphs.neighbors import knn_graph, radius_graph
from graphattn.graphs.token_batch import TokenBatch
from graphattn.graphs.token_graph import TokenGraph
from graphattn.graphs.windows import (
    bipartite_complete_graph,
    bipartite_window_graph,
    block_window_graph,
    causal_graph,
    causal_window_graph,
    complete_graph,
    dilated_window_graph,
    window_cycle_graph,
    window_path_graph,
)

__all__ = [
    "TokenBatch",
    "TokenGraph",
    "batch",
    "bigbird_graph",
    "bipartite_complete_graph",
    "bipartite_window_graph",
    "block_window_graph",
    "causal_graph",
    "causal_window_graph",
    "collate",
    "complete_graph",
    "dilated_window_graph",
    "from_edge_index",
    "from_mask",
    "from_mask_mod",
    "from_networkx",
    "from_pyg",
    "from_scipy",
    "grid_block_graph",
    "grid_window_graph",
    "knn",
    "knn_graph",
    "longformer_graph",
    "neighborhood_graph",
    "radius_graph",
    "union",
    "volume_window_graph",
    "window_cycle_graph",
    "window_path_graph",
]
