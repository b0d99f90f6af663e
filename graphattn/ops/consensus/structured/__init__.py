"""Consensus by what is known of a graph: `sums.py` goes over a chunk of edges at a time, in which
`edge_rows.py` applies the edge network to rows of numbers.
"""
