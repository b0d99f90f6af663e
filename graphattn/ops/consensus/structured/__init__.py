"""Consensus in chunks of edges: `sums.py` goes over them, `edge_rows.py` has their matrices."""
