"""Token graphs, which say which token attends to which: the graph, its structure, its builders."""

from graphattn.graphs.batches.collate import collate
from graphattn.graphs.batches.token_batch import TokenBatch
from graphattn.graphs.builders.combine import batch, union
from graphattn.graphs.builders.grids import (
    grid_block_graph,
    grid_window_graph,
    neighborhood_graph,
    volume_window_graph,
)
from graphattn.graphs.builders.long_range import (
    bigbird_graph,
    causal_longformer_graph,
    longformer_graph,
)
from graphattn.graphs.builders.mask_mods import from_mask_mod
from graphattn.graphs.builders.neighbors import knn_graph, radius_graph
from graphattn.graphs.builders.routing import routing_graph
from graphattn.graphs.builders.scored_windows import scored_window_graph
from graphattn.graphs.builders.windows import (
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
from graphattn.graphs.conversions.from_libraries import (
    from_edge_index,
    from_mask,
    from_networkx,
    from_scipy,
)
from graphattn.graphs.conversions.from_pyg import from_pyg
from graphattn.graphs.search.nearest_neighbors import knn
from graphattn.graphs.token_graph import TokenGraph
from graphattn.near_names import explain_functions

__all__ = [
    "TokenBatch",
    "TokenGraph",
    "batch",
    "bigbird_graph",
    "bipartite_complete_graph",
    "bipartite_window_graph",
    "block_window_graph",
    "causal_graph",
    "causal_longformer_graph",
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
    "routing_graph",
    "scored_window_graph",
    "union",
    "volume_window_graph",
    "window_cycle_graph",
    "window_path_graph",
]

explain_functions(globals(), __all__)
