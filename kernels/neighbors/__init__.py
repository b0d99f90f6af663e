"""Nearest neighbours, exactly. In this order:

- `candidates`: who may be among the nearest, by rounded distances.
- `exact`: their order by exact distances, and the search where rounding may have hidden somebody.
- `configurations`: the launches that are compiled ahead of time.
"""
