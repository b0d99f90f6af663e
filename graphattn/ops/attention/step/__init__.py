"""Steps of generation: the newest tokens of texts attend to the caches of all that came before.

`kernels.py` chooses the backend of a step of a layer. `cached.py` and `masked_rows.py` compute a
step in operations of torch. `all_pairs.py` is attention over all pairs, for models of other
libraries. `decode.py` is the operation :func:`~graphattn.decode_attention`.
"""
