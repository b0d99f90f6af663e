"""Steps of generation: the newest tokens of texts attend to the caches of all that came before.

`pairs.py` is the operation over all pairs of queries and keys, for steps of layers and for models
of other libraries. `decode.py` is :func:`~graphattn.decode_attention`. `kernels.py` chooses the
backend of a step of a layer.
"""
