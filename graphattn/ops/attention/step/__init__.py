"""Steps of generation: the newest tokens of texts attend to the caches of all that came before.

`kernels.py` says whose kernel takes a step of a layer, `cached.py` and `masked_rows.py` are a step
in operations of torch, `all_pairs.py` is attention over all pairs of a call by another library's
model, and `decode.py` is the operation :func:`~graphattn.decode_attention`.
"""
