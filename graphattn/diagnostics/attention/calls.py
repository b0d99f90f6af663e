"""Observation of all attention calls of a model while it runs.

Hooks of modules are not enough, because most models call attention as a function. There are three
ways to such calls:

1. A :class:`Watcher` is a mode for torch functions, so torch hands it every call of
   ``scaled_dot_product_attention``, of ``multi_head_attention_forward``, and of the functions of
   :mod:`graphattn.integrations` that are made for such modes (:mod:`.converted_calls`).
2. Hugging Face's transformers look up an attention function in an interface. Its method is replaced
   while a watcher is open, because "eager" attention calls none of these functions.
3. Steps of generation of graphattn's layers do not call `forward`, so hooks do not see them. Their
   methods are replaced, too (:mod:`.step_calls`).

Hooks of all modules only say which module is running, which gives a call its name.
"""

from __future__ import annotations

import functools
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.overrides import TorchFunctionMode
from torch.utils.module_tracker import ModuleTracker

from graphattn.diagnostics.attention.converted_calls import converted_functions, mask_of_sketch
from graphattn.diagnostics.attention.operands import (
    Operands,
    of_interface,
    of_multi_head,
    of_sdpa,
)
from graphattn.diagnostics.attention.step_calls import (
    StepOperands,
    step_operands,
    stepping_classes,
)
from graphattn.diagnostics.hidden.evaluating import dropout_off

_LOOKS_LIKE_ATTENTION = re.compile("attention|attn", re.IGNORECASE)
# Only its `is_bw` is used, which needs no context: it says whether a backward pass runs.
_backward = ModuleTracker()


class _Thread(threading.local):
    """The state of a thread: its open watchers, and the current call.

    Replaced methods and hooks of all modules serve every thread. So they ask here whether the
    thread that runs them has a watcher.
    """

    def __init__(self) -> None:
        self.watchers: list[Watcher] = []
        # Attention inside an observed call is part of this call, and must not count again.
        self.is_paused = False
        # Calls that modes saw. If a function of transformers has raised it, it calls SDPA itself.
        self.num_calls = 0
        # The operands of the current step, or None outside a step. A step of a layer calls
        # `_mix_step`, which has the operands, so they go from there to the step in this list.
        self.step: list[StepOperands | str] | None = None


_thread = _Thread()
_lock = threading.Lock()
# The originals of replaced methods, and how many watchers need the replacement. Threads may open
# and close watchers in any order, so only the last one may restore a method.
_replaced: dict[tuple[Any, str], list[Any]] = {}


def in_backward() -> bool:
    """Whether this thread runs a backward pass."""
    return _backward.is_bw


def _open_watchers() -> list[Watcher]:
    """List the watchers of this thread that observe calls now."""
    return [] if _thread.is_paused or in_backward() else _thread.watchers


@contextmanager
def _paused() -> Iterator[None]:
    before, _thread.is_paused = _thread.is_paused, True
    try:
        yield
    finally:
        _thread.is_paused = before


@contextmanager
def _computing(device: str) -> Iterator[None]:
    """Run a block of code without observation, gradients and autocast."""
    with ExitStack() as stack:
        stack.enter_context(_paused())
        stack.enter_context(torch.no_grad())
        if torch.amp.is_autocast_available(device):
            stack.enter_context(torch.autocast(device, enabled=False))
        yield


class Watcher(TorchFunctionMode):
    """Base class of observers, which are notified of every attention call of a model.

    Only calls in the thread that opened the observer count. Calls in a backward pass, which
    gradient checkpointing repeats, do not count.
    """

    needs_operands = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.names = {id(m): name or type(m).__name__ for name, m in model.named_modules()}
        self.running: list[nn.Module] = []  # modules of the model that are running
        # Running modules that look like attention, and whether a call was observed in each: in a
        # list, because a call inside marks all modules around it.
        self.attention_modules: list[tuple[nn.Module, list[bool]]] = []
        self.num_runs = 0
        self.readers: dict[Any, Callable[..., Operands | str]] = {
            nn.functional.scaled_dot_product_attention: of_sdpa,
            nn.functional.multi_head_attention_forward: of_multi_head,
            **converted_functions(),
        }
        #: names of modules that look like attention and ran, but were not observed, with reasons
        self.missed: dict[str, str] = {}

    def record_call(self, name: str, operands: Operands) -> None:
        """Handle a call whose operands are known."""

    def record_step(
        self, name: str, layer: nn.Module, step: StepOperands | str, output: Tensor
    ) -> None:
        """Handle a step of a layer; `step` is a string that says why, if it cannot be recorded."""

    def replace_output(self, output: Tensor, name: str) -> Tensor:
        """Return the output that the model gets instead of the output of a call."""
        return output

    def is_recorded_by_hooks(self, module: nn.Module) -> bool:
        """Whether the calls in a module are observed in another way."""
        return False

    # Which module is running. A call gets the name of the innermost one.

    def enter(self, module: nn.Module, args: Any) -> None:
        if self not in _open_watchers() or id(module) not in self.names:
            return
        self.num_runs += not self.running
        self.running.append(module)
        if not self.is_recorded_by_hooks(module) and _looks_like_attention(module):
            self.attention_modules.append((module, [False]))

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self not in _open_watchers() or id(module) not in self.names:
            return
        if any(running is module for running in self.running):
            while self.running.pop() is not module:  # Modules inside it that raised an error.
                pass
        while self.attention_modules and self.attention_modules[-1][0] is module:
            _, [is_observed] = self.attention_modules.pop()
            has_failed = output is None
            if not is_observed and not has_failed:
                reason = getattr(module, "no_attention_weights", None)
                reason = reason or "no call of attention was seen in it"
                self.report_missed(self.names[id(module)], reason)

    # EdgeNetwork runs other code if hooks may change outputs. These do not, and say so.
    enter.only_watches = leave.only_watches = True  # type: ignore[attr-defined]

    def mark_observed(self) -> None:
        """Note that a call was observed in all running modules, so none of them is missed."""
        for _, is_observed in self.attention_modules:
            is_observed[0] = True

    def report_missed(self, name: str, reason: str) -> None:
        self.missed.setdefault(name, reason)
        self.mark_observed()  # The modules around this one are not reported again.

    # Calls.

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        read = self.readers.get(func)
        if read is None or self not in _open_watchers():
            return func(*args, **kwargs)
        _thread.num_calls += 1
        output = func(*args, **kwargs)
        # A method of a module has the module as its first argument.
        module = args[0] if args and isinstance(args[0], nn.Module) else None
        return self.observe(output, lambda: read(func, output, *args, **kwargs), module)

    def observe(
        self, output: Any, operands: Callable[[], Operands | str], module: nn.Module | None
    ) -> Any:
        """Handle a call with this output; return the output that the model gets."""
        if module is None or id(module) not in self.names:
            module = self.running[-1] if self.running else None
        if module is None or any(map(self.is_recorded_by_hooks, self.running)):
            return output
        name = self.names[id(module)]
        first = output[0] if isinstance(output, tuple) else output
        if self.needs_operands:
            with _computing(first.device.type):
                read = operands()
                if isinstance(read, str):
                    self.report_missed(name, read)
                else:
                    self.mark_observed()
                    self.record_call(name, read)
        changed = self.replace_output(first, name)
        if changed is not first:
            output = (changed, *output[1:]) if isinstance(output, tuple) else changed
        return output


def _looks_like_attention(module: nn.Module) -> bool:
    """Whether a module looks like attention, by the name of a class or as a replacement."""
    return getattr(module, "replaces_attention", False) is True or any(
        _LOOKS_LIKE_ATTENTION.search(c.__name__) for c in type(module).__mro__
    )


@contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """Notify a watcher of this thread's calls inside the block."""
    for module in watcher.model.modules():
        refuse_compiled(module)
    with ExitStack() as stack:
        # A compiled function may call the model, and modes do not see calls inside compiled code.
        if "torch._dynamo" in sys.modules:  # Otherwise nothing can be compiled.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.callback(register_module_forward_pre_hook(watcher.enter).remove)
        stack.callback(register_module_forward_hook(watcher.leave, always_call=True).remove)
        for cls, method in stepping_classes(watcher.model):
            stack.enter_context(_replacing(cls, method, _STEP_METHODS[method]))
        modeling = sys.modules.get("transformers.modeling_utils")
        if modeling is not None:  # Otherwise no model can use it.
            interface = modeling.AttentionInterface
            stack.enter_context(_replacing(interface, "get_interface", _observed_get_interface))
        _thread.watchers.append(watcher)
        stack.callback(_thread.watchers.remove, watcher)
        stack.enter_context(watcher)
        yield


def refuse_compiled(module: nn.Module) -> None:
    compiled = (
        getattr(module, "_orig_mod", None) is not None and "Optimized" in type(module).__name__
    )
    if compiled or getattr(module, "_compiled_call_impl", None) is not None:
        raise ValueError(
            "model must not be compiled, because calls inside compiled code cannot be observed, "
            f"got a compiled {type(module).__name__}: use the model before torch.compile"
        )
    if isinstance(module, torch.jit.ScriptModule):
        raise ValueError(
            "model must consist of Python modules, because calls inside TorchScript cannot be "
            f"observed, got a {type(module).__name__}: use the model before torch.jit"
        )


@contextmanager
def _replacing(owner: Any, name: str, wrap: Callable[[Any], Any]) -> Iterator[None]:
    """Replace a method while a watcher is open, once for the watchers of all threads."""
    with _lock:
        if (owner, name) not in _replaced:
            original = getattr(owner, name)
            _replaced[owner, name] = [original, 0]
            setattr(owner, name, functools.wraps(original)(wrap(original)))
        _replaced[owner, name][1] += 1
    try:
        yield
    finally:
        with _lock:
            _replaced[owner, name][1] -= 1
            if _replaced[owner, name][1] == 0:
                setattr(owner, name, _replaced.pop((owner, name))[0])


# Steps of generation of graphattn's layers.


def _observed_step(original: Any) -> Any:
    def step(layer: Any, *args: Any, **keywords: Any) -> Any:
        watchers = [
            watcher
            for watcher in _open_watchers()
            if id(layer) in watcher.names and watcher.is_recorded_by_hooks(layer)
        ]
        if not watchers:
            return original(layer, *args, **keywords)
        before, _thread.step = _thread.step, []
        try:
            with _paused():
                output = original(layer, *args, **keywords)
            steps = _thread.step
        finally:
            _thread.step = before
        reason = "its step() is its own, so its operands are unknown"
        with _computing(output.device.type):
            for watcher in watchers:
                operands = steps[0] if len(steps) == 1 else reason
                watcher.record_step(watcher.names[id(layer)], layer, operands, output)
        return output

    return step


def _observed_mix_step(original: Any) -> Any:
    def mix_step(layer: Any, targets: Any, sources: Any, mask: Any, cache: Any) -> Any:
        steps, _thread.step = _thread.step, None  # Calls inside are part of this one.
        try:
            if steps is not None:
                steps.append(step_operands(targets, sources, mask, cache))
            return original(layer, targets, sources, mask, cache)
        finally:
            _thread.step = steps

    return mix_step


def _observed_compiled_step(original: Any) -> Any:
    def compiled_step(layer: Any, x: Tensor, cache: Any) -> Tensor | None:
        # Compiled steps hand no operands out. None makes the layer call `_mix_step` instead.
        return original(layer, x, cache) if _thread.step is None else None

    return compiled_step


_STEP_METHODS: dict[str, Callable[[Any], Any]] = {
    "step": _observed_step,
    "_mix_step": _observed_mix_step,
    "compiled_step": _observed_compiled_step,
}


# The attention interface of transformers.


def _observed_get_interface(original: Any) -> Any:
    def get_interface(self: Any, implementation: Any, default: Any) -> Any:
        function = original(self, implementation, default)
        if not _open_watchers():
            return function
        return _observed_attention(function, is_eager=function is default)

    return get_interface


def _observed_attention(function: Any, *, is_eager: bool) -> Any:
    """Wrap an attention function of transformers, so that watchers are notified.

    The weights of known functions are computed again from their operands, or by a second call that
    returns them. Other functions count if they call SDPA, which is observed by itself.
    """
    kind = "eager" if is_eager else getattr(function, "__name__", type(function).__name__)
    is_known = kind in (
        "eager", "sdpa_attention_forward", "flex_attention_forward", "graph_attention",
    )  # fmt: skip

    @functools.wraps(function)
    def attention(
        module: nn.Module, query: Any, key: Any, value: Any, *args: Any, **keywords: Any
    ) -> Any:
        def call(**changed: Any) -> Any:
            return function(module, query, key, value, *args, **{**keywords, **changed})

        watchers = _open_watchers()
        if not watchers:
            return call()
        if is_known:
            with _paused():  # "sdpa" calls SDPA inside, which must not count as a second call.
                output = call()
        else:
            before = _thread.num_calls
            output = call()
            if _thread.num_calls > before:  # It called SDPA, which was observed.
                return output
        mask = args[0] if args else keywords.get("attention_mask")

        def operands() -> Operands | str:
            if kind in ("sdpa_attention_forward", "flex_attention_forward"):
                given = {k: v for k, v in keywords.items() if k != "attention_mask"}
                return of_interface(kind, module, output[0], query, key, mask, **given)
            if kind == "graph_attention":
                weights = call(output_attentions=True, dropout=0.0)[1]
                return Operands(output[0], weights=weights, mask=mask_of_sketch(mask))
            if kind != "eager":
                return f"{kind} does not return its weights"
            weights = output[1]
            if module.training or keywords.get("dropout"):  # They are those after dropout.
                with dropout_off(module):
                    weights = call(dropout=0.0)[1]
            if weights is None:
                return "its attention function returns no weights"
            return Operands(output[0], weights=weights, mask=mask)

        for watcher in watchers:
            output = watcher.observe(output, operands, module)
        return output

    return attention
