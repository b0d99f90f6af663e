"""Seeing the attention calls of any model while it runs.

Four doors lead to attention outside of :mod:`graphattn.nn`: ``scaled_dot_product_attention``, the
fused functions of ``torch.nn.MultiheadAttention``, the attention interface of Hugging Face's
transformers, and what :mod:`graphattn.integrations` puts into other people's models. A fifth are
the steps of generation of our own layers. While a :class:`Watcher` is open, they are replaced by
functions that call the originals and tell the watchers of their own thread. Module hooks are global
ones: hooks on a module would turn torch's fast path for transformer layers off, and a mode for
torch functions as well.
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
    converted_doors,
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
    """State of a thread: its watchers, and the call that it is in."""

    def __init__(self) -> None:
        self.watchers: list[Watcher] = []
        self.paused = False  # an attention call is being looked at as a whole
        self.caller: tuple[nn.Module, Tensor] | None = None  # of transformers, and its query
        self.seen_inside = False
        self.same_tokens: bool | None = None  # as queries and keys, of a MultiheadAttention
        self.step: list[SeenStep | str] | None = None  # what the step under way attends to


_thread = _Thread()
_lock = threading.Lock()
_open = 0
_undo: list[Callable[[], None]] = []


class Watcher:
    """Is told of every attention call of a model, in the thread that opened it.

    Calls in a backward pass (recomputation by gradient checkpointing) are not told again.
    """

    reads = True  # whether it wants to know what calls are made of

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.names = {id(m): name or type(m).__name__ for name, m in model.named_modules()}
        self.stack: list[nn.Module] = []  # modules of the model that are running
        self.waiting: list[list[Any]] = []  # [module that looks like attention, seen a call in it]
        self.num_runs = 0
        #: what ran and looks like attention, but was not seen: name -> reason
        self.missed: dict[str, str] = {}

    def saw(self, name: str, operands: Operands) -> None:
        """A call that is known in all its parts."""

    def saw_step(self, name: str, layer: nn.Module, step: SeenStep | str, output: Tensor) -> None:
        """A step of a layer that :meth:`is_own`; or why its weights cannot be known."""

    def answer(self, output: Tensor, name: str) -> Tensor:
        """Return the model's substitute for the output of a call of this name."""
        return output

    def is_own(self, module: nn.Module) -> bool:
        """Whether what happens in a module is seen by other means."""
        return False

    def name_of(self, module: nn.Module | None = None) -> str | None:
        """The name of a call by a module, or by the innermost one that runs; None: not ours."""
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
        self.found()  # it is named once, not again for what it is part of


def _looks_like_attention(module: nn.Module) -> bool:
    """Whether a module looks like attention by its class name or its place."""
    return getattr(module, "replaces_attention", False) is True or any(
        _LOOKS_LIKE_ATTENTION.search(c.__name__) for c in type(module).__mro__
    )


@contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """Let a watcher see this thread's calls inside the block."""
    for module in watcher.model.modules():
        refuse_compiled(module)
    with ExitStack() as stack:
        if "torch._dynamo" in sys.modules:  # a compiled function may call the model
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
            "model must not be compiled: calls inside compiled code cannot be seen. Take the model "
            f"that was given to torch.compile, got a compiled {type(module).__name__}"
        )
    if isinstance(module, torch.jit.ScriptModule):
        raise ValueError(
            "model must be made of Python modules: calls inside TorchScript cannot be seen, got a "
            f"{type(module).__name__}"
        )


# What is replaced.


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
            for owner, name, operands_of in converted_doors():
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
    if original is None:  # a private function of torch that this version lacks
        return
    watched = functools.wraps(original)(wrap(original))
    watched.__dict__["__graphattn__"] = True
    setattr(owner, name, watched)
    _undo.append(lambda: setattr(owner, name, original))


def _replace_imported(model: nn.Module) -> None:
    """``from torch.nn.functional import scaled_dot_product_attention`` in a model's own package."""
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
    """Tell the watchers of a call with this output; what the model gets."""
    told: Operands | str | None = None
    for watcher in watchers:
        name = watcher.name_of(module)
        if name is None or any(map(watcher.is_own, watcher.stack)):
            continue
        if watcher.reads:
            with _aside(output):
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
def _aside(output: Any) -> Iterator[None]:
    """Leave a block of code out of watching, gradients and autocast."""
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
        with _paused():  # masks that are objects call it once more
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
        # Without weights asked for, it calls SDPA, which has been seen.
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


# What converted modules attend through.


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


# Steps of generation of our own layers.


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
        told = seen[0] if len(seen) == 1 else "what its own step() attends to is not known"
        with _aside(output):
            for watcher in watchers:
                watcher.saw_step(watcher.names[id(layer)], layer, told, output)
        return output

    return step


def _watched_mix(original: Any) -> Any:
    def mix_step(layer: Any, targets: Any, sources: Any, mask: Any, cache: Any) -> Any:
        steps, _thread.step = _thread.step, None  # what is inside is a part of this
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
    """An attention function of transformers that tells the watchers."""
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
        if seen:  # it went through SDPA
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
                return f"{kind} does not say its weights"
            weights = answer[1]
            if module.training or kw.get("dropout"):
                with dropout_off(module):
                    weights = call(dropout=0.0)[1]
            if weights is None:
                return "its attention function gives no weights"
            return Operands(answer[0], weights=weights, mask=mask)

        return _tell(watchers, answer, operands, module=module)

    return attention
