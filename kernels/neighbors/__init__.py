"""Nearest neighbours, exactly. In this order:

- `candidates`: the sources that may be among the nearest, by rounded distances.
- `exact`: their order by exact distances, and a search where rounding may have hidden a source.
- `configurations`: the launches that are compiled ahead of time.
"""
