"""Cache results that are derived from a mask, as long as the mask is in memory.

All layers of a model get the same mask, and gradient checkpointing passes views of its memory.
Therefore the memory of the mask is the key of the cache, and an entry is removed when that memory
is released.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from graphattn.graphs.token_graph import TokenGraph

MOST_MASKS = 8  # masks per thread: full and sliding layers, encoder and decoder
Result = TypeVar("Result")
_kept = threading.local()


class _OnceEntry(NamedTuple):
    storage: StorageWeakRef
    copy: Tensor
    graph: TokenGraph | None
    result: Any


def once(
    mask: Tensor, options: Any, make: Callable[[], Result], *, graph: TokenGraph | None = None
) -> Result:
    """Return the result of `make`, or an earlier one for this mask, options and an equal graph.

    Args:
        mask: identified by its memory, and compared with a copy, because changes through
            ``mask.data``, numpy, or in inference mode are not counted by torch.
        options: all other values on which the result depends; hashable.
        make: function without arguments; its result must not require gradients.
        graph: a graph on which the result also depends.
    """
    entries: OrderedDict[Any, _OnceEntry] = _kept.__dict__.setdefault("entries", OrderedDict())
    for key in [key for key, entry in list(entries.items()) if entry.storage.expired()]:
        entries.pop(key, None)
    key = (mask.data_ptr(), mask.shape, mask.stride(), mask.dtype, mask.device, options)
    entry = entries.get(key)
    if entry is not None and torch.equal(entry.copy, mask) and entry.graph == graph:
        entries.move_to_end(key)
        return entry.result
    result = make()
    storage = mask.untyped_storage()
    entries[key] = _OnceEntry(StorageWeakRef(storage), mask.detach().clone(), graph, result)
    weakref.finalize(storage, entries.pop, key, None).atexit = False
    while len(entries) > MOST_MASKS:
        entries.popitem(last=False)
    return result
