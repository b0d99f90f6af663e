"""Generation, a token at a time.

- `step`: a cache takes a token in, and the token attends to its window.
- `configurations`: the launches that are compiled ahead of time.
"""
