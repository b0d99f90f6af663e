"""Tables that are made once for a device and then stored: when they may be, and who may read them.

A tensor on a GPU has its values when the stream that computes them gets there. So

- what one stream makes must not be read by another one before that: the reader's stream waits
  (:class:`OnStream`);
- what is made while a CUDA graph is captured is not stored. Its memory belongs to the graph, and
  has values only when the graph is replayed (:func:`may_store`);
- what a CUDA graph reads stays as long as the process, because the graph may be replayed at any
  time;
- tables that are made on the host cannot be copied within a capture (:func:`copied`). They must be
  there before: a call like the captured one, with its backward if that is captured, makes them.
  PyTorch asks for such a call anyway, which it calls warm-up.

On a CPU nothing of this is done. On every device,

- what is stored must be usable anywhere later, also in training and outside of a trace. So it is
  made within :func:`kept_for_training`. Fake, functional and traced tensors are not stored
  (:func:`makes_fakes`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import lru_cache, update_wrapper
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes

K = TypeVar("K")
T = TypeVar("T")
P = ParamSpec("P")
_MODES = torch._C._TorchDispatchModeKey
TRACES = _MODES.FAKE, _MODES.PROXY, _MODES.FUNCTIONAL
PRE_DISPATCH = torch._C.DispatchKey.PreDispatch  # where torch.export and make_fx may trace
CPU = torch.device("cpu")
NOT_STORED: Any = object()  # stands for a missing entry, because None may be one


def is_capturing(device: torch.device) -> bool:
    """Whether work for a device is not done now, but captured as a part of a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def may_store(device: torch.device) -> bool:
    """Whether a value that is made now on a device may be read later than in this call."""
    return not is_capturing(device) and not makes_fakes()


def makes_fakes() -> bool:
    """Whether new tensors are fake, functional or traced: they mean nothing after this call.

    torch.export is such a trace. torch.compile is not: what it traces is stored when the compiled
    function runs, with real tensors.
    """
    if torch.compiler.is_dynamo_compiling():
        return False
    has_modes = torch._C._len_torch_dispatch_stack() > 0
    if has_modes and any(torch._C._get_dispatch_mode(kind) is not None for kind in TRACES):
        return True
    if torch._C._dispatch_tls_is_dispatch_key_included(PRE_DISPATCH):
        return True
    if torch._C._functorch.maybe_current_level() is None:
        return False
    functionalize = torch._C._functorch.TransformType.Functionalize
    levels = torch._C._functorch.get_interpreter_stack()
    return any(level.key() == functionalize for level in levels)


def kept_for_training(
    device: torch.device | None = None, *, is_constant: bool = True
) -> AbstractContextManager[object]:
    """Let tensors made inside be used anywhere later: leave inference mode, torch.func and traces.

    Some tensors are computed once and stored. If the first use is in inference mode, inside a
    function transform or in a trace, autograd must still be able to use them afterwards. In a trace
    they are constants.

    Args:
        device: where tensors are made; None for a CPU.
        is_constant: whether they are made from real tensors alone. Otherwise the trace has to see
            how they are made, and :func:`may_store` says that they may not be stored.
    """
    if torch.compiler.is_dynamo_compiling():
        return nullcontext()
    stack = ExitStack()
    if torch.is_inference_mode_enabled():
        stack.enter_context(torch.inference_mode(False))
    if is_constant and makes_fakes():
        # Fake tensors can be on any device; those with values only on one that is here.
        kind = "cpu" if device is None else device.type
        is_here = kind == "cpu" or (kind == "cuda" and torch.cuda.is_available())
        fake: Any = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
        if is_here and (fake is None or fake.allow_non_fake_inputs):
            stack.enter_context(_disable_current_modes())
    if is_constant and (trace := torch._C._get_tracing_state()) is not None:
        resume: Any = torch._C._set_tracing_state  # type: ignore[attr-defined]
        resume(None)  # torch.jit.trace would draw random edges anew
        stack.callback(resume, trace)
    if is_constant and torch._C._functorch.maybe_current_level() is not None:
        stack.enter_context(temporarily_clear_interpreter_stack())
    return stack


class OnStream(Generic[T]):
    """A stored value whose tensors the current stream of a CUDA device makes.

    The tensors may be anywhere in tuples, lists, dicts and objects of this library.
    """

    def __init__(self, value: T, device: torch.device) -> None:
        stream = torch.cuda.current_stream(device)
        self.value, self.device = value, device
        self._made = stream.record_event()
        self._after = {stream}  # the streams whose work from now on comes after the event

    def read(self) -> T:
        """The value, for work that is queued on the current stream from now on."""
        if torch.compiler.is_compiling():  # it traces operations of torch only
            return self.value
        if torch.cuda.is_current_stream_capturing():
            # A graph cannot wait for what is not in it. A capture begins when the device is idle.
            _read_by_graphs.add(self)
            return self.value
        stream = torch.cuda.current_stream(self.device)
        if stream not in self._after:
            stream.wait_event(self._made)
            for tensor in tensors_of(self.value):
                # Otherwise its memory is reused as soon as the stream that made it is done.
                tensor.record_stream(stream)
            self._after.add(stream)
        return self.value


_read_by_graphs: set[OnStream[Any]] = set()


def tensors_of(value: Any, _seen: set[int] | None = None) -> Iterator[Tensor]:
    """The tensors on CUDA devices in a value, at any depth."""
    seen = set() if _seen is None else _seen
    if id(value) in seen:
        return
    seen.add(id(value))
    parts: Any = ()
    if isinstance(value, Tensor):
        if value.is_cuda:
            yield value
    elif isinstance(value, Mapping):
        parts = value.values()
    elif isinstance(value, tuple | list | set):
        parts = value
    elif type(value).__module__.startswith("graphattn"):
        parts = getattr(value, "__dict__", {}).values()
    for part in list(parts):
        yield from tensors_of(part, seen)


def as_entry(value: T, device: torch.device) -> T | OnStream[T]:
    """The entry to store for a value that was just made on a device: on a CPU, the value itself."""
    if device.type != "cuda" or torch.compiler.is_compiling():
        return value
    return OnStream(value, device)


def stored(place: MutableMapping[K, Any], key: K, device: torch.device, make: Callable[[], T]) -> T:
    """The entry of a dict, or ``make()``, which becomes one if it may be stored.

    Example:
        >>> import torch
        >>> from graphattn.kernels.shared.stored import stored
        >>> tables = {}
        >>> stored(tables, "ones", torch.device("cpu"), lambda: torch.ones(2))
        tensor([1., 1.])
        >>> tables
        {'ones': tensor([1., 1.])}
    """
    entry = place.get(key, NOT_STORED)
    if entry is NOT_STORED:
        with kept_for_training(device):
            entry = make()
            if may_store(device):
                place[key] = as_entry(entry, device)
    elif isinstance(entry, OnStream):
        entry = entry.read()
    result: T = entry
    return result


class StoredResults(Generic[P, T]):
    """A function that stores its results, as :func:`functools.lru_cache` makes it.

    Its second argument, if any, is the device on which the tensors of its result are.
    """

    def __init__(self, make: Callable[P, T], most: int) -> None:
        update_wrapper(self, make)
        self._make = make
        # A dict for each device and key.
        self._places: Any = lru_cache(maxsize=most)(lambda *_, **__: dict[str, Any]())

    def __call__(self, *arguments: P.args, **named: P.kwargs) -> T:
        key: Any = arguments
        device: torch.device = key[1] if len(key) > 1 else CPU
        place = self._places(*key, **named)
        return stored(place, "", device, lambda: self._make(*arguments, **named))

    def cache_clear(self) -> None:
        """Forget all results."""
        self._places.cache_clear()


def stores_results(most: int) -> Callable[[Callable[P, T]], StoredResults[P, T]]:
    """Decorate a function to store its last `most` results; see :class:`StoredResults`."""
    return lambda make: StoredResults(make, most)


def copied(table: Tensor, device: torch.device) -> Tensor:
    """A table on a device; the copy is queued behind other work, and nothing waits for it.

    Raises:
        RuntimeError: a CUDA graph is captured, which would copy the table's memory at every replay,
            when it is long gone.
    """
    if table.device != device and is_capturing(device):
        raise RuntimeError(
            "a table of a graph must be copied from the CPU, which a CUDA graph cannot do: make "
            "the same call once before the capture, with its backward if that is captured"
        )
    return table.to(device, non_blocking=True)
