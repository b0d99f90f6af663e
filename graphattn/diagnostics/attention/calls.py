"""Observation of all attention calls of a model while it runs.

Outside of :mod:`graphattn.nn`, models call attention by four kinds of functions:
``scaled_dot_product_attention``, the fused functions of ``torch.nn.MultiheadAttention``, the
attention interface of Hugging Face's transformers, and the attention that
:mod:`graphattn.integrations` puts into other models. The fifth kind are the steps of generation of
graphattn's layers. While a :class:`Watcher` is open, these functions are replaced by wrappers that
call the originals and notify the watchers of their thread. The hooks for modules are global,
because hooks of a single module would disable torch's fast path for transformer layers, and so
would a mode for torch functions.
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

from graphattn.diagnostics.attention.converted_calls import (
    OperandsOf,
    converted_functions,
    mask_of_sketch,
)
from graphattn.diagnostics.attention.operands import (
    Operands,
    of_encoder_layer,
    of_flex,
    of_multi_head,
    of_native_multi_head,
    of_sdpa,
)
from graphattn.diagnostics.attention.same_tokens import is_same_tensor
from graphattn.diagnostics.attention.step_calls import SeenStep, seen_step, stepping_classes
from graphattn.diagnostics.hidden.evaluating import dropout_off

_LOOKS_LIKE_ATTENTION = re.compile("attention|attn", re.IGNORECASE)
_SDPA = nn.functional.scaled_dot_product_attention
_MULTI_HEAD = nn.functional.multi_head_attention_forward


class _Thread(threading.local):
    """The state of a thread: its watchers, and the current call."""

    def __init__(self) -> None:
        self.watchers: list[Watcher] = []
        self.paused = False  # whether calls inside the current call are ignored
        self.caller: tuple[nn.Module, Tensor] | None = None  # a module of transformers, its query
        self.seen_inside = False  # whether SDPA was called inside the current call
        self.same_tokens: bool | None = None  # whether a MultiheadAttention is self-attention
        self.step: list[SeenStep | str] | None = None  # the operands of the current step


_thread = _Thread()
_lock = threading.Lock()
_open = 0
_undo: list[Callable[[], None]] = []


class Watcher:
    """Base class of observers, which are notified of every attention call of a model.

    Only calls in the thread that opened the observer count. Calls in a backward pass, which
    gradient checkpointing repeats, do not count.
    """

    reads = True  # whether it needs the operands of calls

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.names = {id(m): name or type(m).__name__ for name, m in model.named_modules()}
        self.stack: list[nn.Module] = []  # modules of the model that are running
        # Running modules that look like attention, and whether a call was seen in each.
        self.waiting: list[list[Any]] = []
        self.num_runs = 0
        #: names of modules that look like attention and ran, but were not observed, with reasons
        self.missed: dict[str, str] = {}

    def saw(self, name: str, operands: Operands) -> None:
        """Handle a call whose operands are known."""

    def saw_step(self, name: str, layer: nn.Module, step: SeenStep | str, output: Tensor) -> None:
        """Handle a step of a layer; `step` is a string that says why, if it cannot be recorded."""

    def answer(self, output: Tensor, name: str) -> Tensor:
        """Return the output that the model gets instead of the output of a call."""
        return output

    def is_own(self, module: nn.Module) -> bool:
        """Whether the calls in a module are observed in another way."""
        return False

    def name_of(self, module: nn.Module | None = None) -> str | None:
        """Return the name of a module, or of the innermost running one; None if there is none."""
        if module is not None and id(module) in self.names:
            return self.names[id(module)]
        return self.names[id(self.stack[-1])] if self.stack else None

    def enter(self, module: nn.Module) -> None:
        self.num_runs += not self.stack
        self.stack.append(module)
        if not self.is_own(module) and _looks_like_attention(module):
            self.waiting.append([module, False])

    def leave(self, module: nn.Module, failed: bool) -> None:
        if any(running is module for running in self.stack):
            while self.stack.pop() is not module:
                pass
        while self.waiting and id(self.waiting[-1][0]) == id(module):
            _, seen = self.waiting.pop()
            if not seen and not failed:
                reason = getattr(module, "no_attention_weights", None)
                reason = reason or "no call of attention was seen in it"
                self.miss(self.names[id(module)], reason)

    def found(self) -> None:
        for entry in self.waiting:
            entry[1] = True

    def miss(self, name: str, reason: str) -> None:
        self.missed.setdefault(name, reason)
        self.found()  # The modules around this one are not reported again.


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
        if "torch._dynamo" in sys.modules:  # A compiled function may call the model.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        _install(watcher.model)
        stack.callback(_uninstall)
        _thread.watchers.append(watcher)
        stack.callback(_thread.watchers.remove, watcher)
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


# The functions that are replaced.


def _install(model: nn.Module) -> None:
    global _open
    with _lock:
        _open += 1
        try:
            if _open == 1:
                for owner, name, wrap in (
                    (nn.functional, "scaled_dot_product_attention", _watched_sdpa),
                    (torch._C._nn, "scaled_dot_product_attention", _watched_sdpa),
                    (nn.functional, "multi_head_attention_forward", _watched_multi_head),
                    (torch, "_native_multi_head_attention", _watched_native),
                    (torch, "_transformer_encoder_layer_fwd", _watched_encoder_layer),
                ):
                    _replace(owner, name, wrap)
                _enter.only_watches = _leave.only_watches = True  # type: ignore[attr-defined]
                before = register_module_forward_pre_hook(_enter)
                after = register_module_forward_hook(_leave, always_call=True)
                _undo.extend((before.remove, after.remove))
            _replace_imported(model)
            for cls, method in stepping_classes(model):
                if not hasattr(getattr(cls, method), "__graphattn__"):
                    _replace(cls, method, _watched_step if method == "step" else _watched_mix)
            for owner, name, operands_of in converted_functions():
                if not hasattr(getattr(owner, name), "__graphattn__"):
                    _replace(owner, name, _watched_converted(operands_of))
            modeling = sys.modules.get("transformers.modeling_utils")
            interface = getattr(modeling, "AttentionInterface", None)
            if interface is not None and not hasattr(interface.get_interface, "__graphattn__"):
                _replace(interface, "get_interface", _watched_get_interface)
        except BaseException:
            _close()
            raise


def _uninstall() -> None:
    with _lock:
        _close()


def _close() -> None:
    global _open
    _open -= 1
    if _open == 0:
        while _undo:
            _undo.pop()()


def _replace(owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
    original = getattr(owner, name, None)
    if original is None:  # This version of torch does not have this private function.
        return
    watched = functools.wraps(original)(wrap(original))
    watched.__dict__["__graphattn__"] = True
    setattr(owner, name, watched)
    _undo.append(lambda: setattr(owner, name, original))


def _replace_imported(model: nn.Module) -> None:
    """Replace SDPA where a model's own package imported it by name."""
    packages = {
        base.__module__.partition(".")[0]
        for module in model.modules()
        for base in type(module).__mro__
    } - {"torch", "builtins", "transformers", "graphattn"}
    for file, module in list(sys.modules.items()):
        if file.partition(".")[0] in packages:
            for name, value in list(getattr(module, "__dict__", {}).items()):
                if value is _SDPA:
                    _replace(module, name, _watched_sdpa)


def _watchers() -> list[Watcher]:
    """List the watchers of this thread."""
    if not _thread.watchers or _thread.paused or torch._C._current_graph_task_id() != -1:
        return []
    return _thread.watchers


@contextmanager
def _paused() -> Iterator[None]:
    before, _thread.paused = _thread.paused, True
    try:
        yield
    finally:
        _thread.paused = before


def _enter(module: nn.Module, args: Any) -> None:
    for watcher in _watchers():
        if id(module) in watcher.names:
            watcher.enter(module)


def _leave(module: nn.Module, args: Any, output: Any) -> None:
    for watcher in _watchers():
        if id(module) in watcher.names:
            watcher.leave(module, failed=output is None)


def _tell(
    watchers: list[Watcher],
    output: Any,
    operands: Callable[[], Operands | str],
    *,
    module: nn.Module | None = None,
    suffix: str = "",
) -> Any:
    """Notify the watchers of a call with this output; return the output that the model gets."""
    told: Operands | str | None = None
    for watcher in watchers:
        name = watcher.name_of(module)
        if name is None or any(map(watcher.is_own, watcher.stack)):
            continue
        if watcher.reads:
            with _unobserved(output):
                told = operands() if told is None else told
                if isinstance(told, str):
                    watcher.miss(name + suffix, told)
                else:
                    watcher.found()
                    watcher.saw(name + suffix, told)
        first = output[0] if isinstance(output, tuple) else output
        changed = watcher.answer(first, name)
        if changed is not first:
            output = (changed, *output[1:]) if isinstance(output, tuple) else changed
    return output


@contextmanager
def _unobserved(output: Any) -> Iterator[None]:
    """Run a block of code without observation, gradients and autocast."""
    first = output[0] if isinstance(output, tuple) else output
    device = first.device.type
    with ExitStack() as stack:
        stack.enter_context(_paused())
        stack.enter_context(torch.no_grad())
        if torch.amp.is_autocast_available(device):
            stack.enter_context(torch.autocast(device, enabled=False))
        yield


# The four functions of torch.


def _watched_sdpa(original: Any) -> Any:
    def scaled_dot_product_attention(*args: Any, **keywords: Any) -> Any:
        watchers = _watchers()
        if not watchers:
            return original(*args, **keywords)
        with _paused():  # A mask that is an object calls SDPA again inside.
            output = original(*args, **keywords)
        caller = _thread.caller
        _thread.seen_inside = True
        module, query = caller or (None, None)

        def operands() -> Operands | str:
            told = of_sdpa(output, query, *args, **keywords)
            if isinstance(told, Operands) and told.same_tokens is None:
                told.same_tokens = _thread.same_tokens
            return told

        return _tell(watchers, output, operands, module=module)

    return scaled_dot_product_attention


def _watched_multi_head(original: Any) -> Any:
    def multi_head_attention_forward(*args: Any, **keywords: Any) -> Any:
        watchers = _watchers()
        before = _thread.same_tokens
        query, key = [*args[:2], *(keywords[part] for part in ("query", "key") if part in keywords)]
        _thread.same_tokens = is_same_tensor(query, key) or None
        try:
            output = original(*args, **keywords)
        finally:
            _thread.same_tokens = before
        # If weights were not requested, it has called SDPA, which was observed already.
        if not watchers or output[1] is None:
            return output
        return _tell(watchers, output, lambda: of_multi_head(output[0], *args, **keywords))

    return multi_head_attention_forward


def _watched_native(original: Any) -> Any:
    def native_multi_head_attention(*args: Any, **keywords: Any) -> Any:
        output = original(*args, **keywords)
        if not (watchers := _watchers()):
            return output
        return _tell(watchers, output, lambda: of_native_multi_head(output[0], *args, **keywords))

    return native_multi_head_attention


def _watched_encoder_layer(original: Any) -> Any:
    def transformer_encoder_layer_fwd(*args: Any, **keywords: Any) -> Any:
        if not (watchers := _watchers()):
            return original(*args, **keywords)
        source = args[0]
        output = original(*args, **keywords)

        def operands() -> Operands | str:
            return of_encoder_layer(source, *args[1:], **keywords)

        return _tell(watchers, output, operands, suffix=".self_attn")

    return transformer_encoder_layer_fwd


# The functions that converted modules call.


def _watched_converted(operands_of: OperandsOf) -> Any:
    def wrap(original: Any) -> Any:
        def attend(*args: Any, **keywords: Any) -> Any:
            watchers = _watchers()
            if not watchers:
                return original(*args, **keywords)
            with _paused():
                output = original(*args, **keywords)
            module = args[0] if isinstance(args[0], nn.Module) else None

            def operands() -> Operands:
                return operands_of(original, output, *args, **keywords)

            return _tell(watchers, output, operands, module=module)

        return attend

    return wrap


# Steps of generation of graphattn's layers.


def _watched_step(original: Any) -> Any:
    def step(layer: Any, *args: Any, **keywords: Any) -> Any:
        watchers = [w for w in _watchers() if id(layer) in w.names and w.is_own(layer)]
        if not watchers:
            return original(layer, *args, **keywords)
        before, _thread.step = _thread.step, []
        try:
            with _paused():
                output = original(layer, *args, **keywords)
            seen = _thread.step
        finally:
            _thread.step = before
        told = seen[0] if len(seen) == 1 else "its step() is its own, so its operands are unknown"
        with _unobserved(output):
            for watcher in watchers:
                watcher.saw_step(watcher.names[id(layer)], layer, told, output)
        return output

    return step


def _watched_mix(original: Any) -> Any:
    def mix_step(layer: Any, targets: Any, sources: Any, mask: Any, cache: Any) -> Any:
        steps, _thread.step = _thread.step, None  # Calls inside are part of this one.
        try:
            if steps is not None:
                steps.append(seen_step(targets, sources, mask, cache))
            return original(layer, targets, sources, mask, cache)
        finally:
            _thread.step = steps

    return mix_step


# The attention interface of transformers.


def _watched_get_interface(original: Any) -> Any:
    def get_interface(self: Any, implementation: Any, default: Any) -> Any:
        function = original(self, implementation, default)
        if not _watchers():
            return function
        return _watched_interface(function, function is default)

    return get_interface


def _watched_interface(function: Any, is_eager: bool) -> Any:
    """Wrap an attention function of transformers, so that it notifies the watchers."""
    kind = "eager" if is_eager else getattr(function, "__name__", type(function).__name__)

    @functools.wraps(function)
    def attention(
        module: nn.Module, query: Any, key: Any, value: Any, *args: Any, **kw: Any
    ) -> Any:
        def call(**changed: Any) -> Any:
            return function(module, query, key, value, *args, **{**kw, **changed})

        watchers = _watchers()
        if not watchers:
            return call()
        seen = False
        if kind in ("eager", "flex_attention_forward", "graph_attention"):
            with _paused():
                answer = call()
        else:
            before = _thread.caller, _thread.seen_inside
            _thread.caller, _thread.seen_inside = (module, query), False
            try:
                answer = call()
                seen = _thread.seen_inside
            finally:
                _thread.caller, _thread.seen_inside = before
        if seen:  # It called SDPA, which was observed.
            return answer
        mask = args[0] if args else kw.get("attention_mask")

        def operands() -> Operands | str:
            if kind == "flex_attention_forward":
                others = {k: v for k, v in kw.items() if k != "attention_mask"}
                return of_flex(answer[0], query, key, mask, **others)
            if kind == "graph_attention":
                weights = call(output_attentions=True, dropout=0.0)[1]
                return Operands(answer[0], weights=weights, mask=mask_of_sketch(mask))
            if kind != "eager":
                return f"{kind} does not return its weights"
            weights = answer[1]
            if module.training or kw.get("dropout"):
                with dropout_off(module):
                    weights = call(dropout=0.0)[1]
            if weights is None:
                return "its attention function returns no weights"
            return Operands(answer[0], weights=weights, mask=mask)

        return _tell(watchers, answer, operands, module=module)

    return attention
