"""Steps of generation by C++ code: the newest token of every text moves towards a cache.

The code is `kernels/cpu/consensus_steps.cpp`. A layer runs a step per token, so the part of a call
that stays the same is stored with the cache.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import Any, Literal

import torch
from torch import Tensor

from graphattn.kernels.cpu import library
from graphattn.kernels.cpu.tensors import KINDS, TokenView, address, as_it_lies
from graphattn.ops.consensus.edge_network import EdgeNetworkParameters, FirstLayer
from graphattn.ops.consensus.native.sums import ConsensusNetwork


class ConsensusStepsCall(ctypes.Structure):
    """One call; the fields are those of ``kernels/cpu/consensus_steps.h``, in their order."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("texts", "heads", "groups", "width", "rank")),
        *((name, ctypes.c_int64) for name in ("hidden", "trunks", "room", "first", "held")),
        *((name, TokenView) for name in ("state", "hidden_vectors")),
        *((name, TokenView) for name in ("moving", "compared", "new_state")),
        *((name, TokenView) for name in ("target_hidden", "new_hidden", "token")),
        ("inputs", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("target_weight", "target_bias")),
        *((name, ctypes.c_void_p) for name in ("source_weight", "source_bias")),
        ("network", ConsensusNetwork),
        ("is_automatic", ctypes.c_int64),
        ("step", ctypes.c_void_p),
        ("same_step", ctypes.c_double),
        ("valid", ctypes.c_void_p),
        ("new_valid", ctypes.c_void_p),
        ("new_valid_step", ctypes.c_int64),
        ("out", TokenView),
        ("threads", ctypes.c_int64),
    )


_LIBRARY = library.library()

StepSize = float | Tensor | Literal["auto"]  # a tensor [heads] in the dtype of the network


def check_shape(name: str, x: Tensor, shape: tuple[int, ...]) -> None:
    """Refuse a tensor of another shape, beyond whose end C++ code would read."""
    if x.shape != shape:
        raise ValueError(f"{name} must have shape {list(shape)}, got {list(x.shape)}")


def applies(layer: Any, dtype: torch.dtype) -> bool:
    """Whether C++ code can apply a first layer to tokens of a dtype."""
    if not isinstance(layer, FirstLayer) or dtype not in (torch.float32, torch.float64):
        return False
    for x in layer:  # a plain loop, because it runs once per token
        if x is not None and (x.dtype is not dtype or not x.is_contiguous() or x.is_neg()):
            return False
    return True


def first_hidden(layer: FirstLayer) -> Tensor:
    """The hidden vectors [*, G, features] of tokens [*, G, in], with the same bits as in a step."""
    tokens, weight, bias = layer
    groups, features, inputs = weight.shape
    check_shape("tokens of a first layer", tokens, (*tokens.shape[:-2], groups, inputs))
    if bias is not None:
        check_shape("bias of a first layer", bias, (groups, features))
    out = tokens.new_empty(*tokens.shape[:-1], features)
    sizes = (ctypes.c_int64(n) for n in (tokens.shape[:-2].numel(), groups, inputs, features))
    addresses = (ctypes.c_void_p(address(x)) for x in layer)
    assert _LIBRARY is not None
    library.check(
        _LIBRARY.graphattn_first_layer(
            *addresses, *sizes, ctypes.c_void_p(out.data_ptr()), out.dtype == torch.float64
        )
    )
    return out


class ConsensusCacheCall:
    """The part of a call that stays the same while a layer's cache keeps its buffers.

    Args:
        layer: whose steps they are.
        state, hidden: buffers [texts * heads, room, D] and [texts * groups, room, features].
        heads, groups, trunks: of the layer.
        dtype: of its new tokens.
    """

    def __init__(
        self,
        layer: object,
        state: Tensor,
        hidden: Tensor,
        heads: int,
        groups: int,
        trunks: int,
        dtype: torch.dtype,
    ) -> None:
        (entries, room, width), features = state.shape, hidden.shape[-1]
        self.layer, self.trunks = weakref.ref(layer), trunks
        self.state, self.hidden, self.dtype = state, hidden, dtype
        self.shape = entries // heads, heads, width
        self.sizes = entries * width, (entries // heads) * groups * features  # of new tokens
        self.features = heads * width
        self.is_double = dtype == torch.float64
        self.compute = torch.promote_types(dtype, torch.float32)
        self.kind = KINDS.get(dtype, 0)

        def buffer(x: Tensor, count: int) -> TokenView:
            steps = count * room * x.shape[-1], x.shape[-1], room * x.shape[-1]
            return TokenView(x.data_ptr(), *steps, KINDS.get(x.dtype, 0))

        states, vectors = self.tokens(heads, width), self.tokens(groups, features)
        self.call = ConsensusStepsCall(
            texts=entries // heads,
            heads=heads,
            groups=groups,
            width=width,
            room=room,
            state=buffer(state, heads),
            hidden_vectors=buffer(hidden, groups),
            moving=states,
            compared=states,
            new_state=states,
            target_hidden=vectors,
            new_hidden=vectors,
            out=states,
            new_valid_step=1,
        )
        self.reference = ctypes.byref(self.call)
        self.moving, self.compared = self.call.moving, self.call.compared
        self.new_state, self.out = self.call.new_state, self.call.out
        self.target_hidden, self.new_hidden = self.call.target_hidden, self.call.new_hidden
        self.token, self.network = self.call.token, self.call.network

    def tokens(self, heads: int, width: int) -> TokenView:
        """The view of one token of every text, with heads side by side."""
        return TokenView(None, heads * width, heads * width, width, self.kind)

    def serves(self, layer: object, state: Tensor, hidden: Tensor, dtype: torch.dtype) -> bool:
        """Whether this call was made for this layer, these buffers and this dtype."""
        same = self.state is state and self.hidden is hidden
        return same and self.layer() is layer and self.dtype is dtype

    def fits(self, layer: object, x: Any, buffers: dict[str, Tensor]) -> bool:
        """Whether tokens and a cache fit this call; the size of the batch is not checked."""
        return (
            self.layer() is layer
            and buffers["state"] is self.state
            and type(x) is Tensor
            and x.dtype is self.dtype
            and x.is_cpu
            and x.shape[-1:] == (self.features,)
        )

    def run(
        self,
        moving: Tensor,
        compared: Tensor,
        state: Tensor,
        hidden: tuple[Tensor, Tensor] | tuple[FirstLayer, FirstLayer],
        network: EdgeNetworkParameters,
        step: StepSize,
        first: int,
        held: int,
        valid: Tensor | None,
        valids: Tensor | None,
    ) -> Tensor:
        """Move the newest tokens of all texts; add their states and hidden vectors to the cache.

        Tokens have texts * heads * D numbers, in any shape; the result is contiguous. `hidden` are
        their hidden vectors as targets and as sources, or the two first layers that compute them
        from the same tokens, for which :func:`applies` holds.
        """
        call, (numbers, of_hidden) = self.call, self.sizes
        moving = self._readable("u", moving, numbers)
        compared = self._readable("u", compared, numbers)
        state = self._readable("u", state, numbers)
        out = torch.empty_like(moving)
        self.moving.data, self.out.data = moving.data_ptr(), out.data_ptr()
        self.compared.data, self.new_state.data = compared.data_ptr(), state.data_ptr()
        target, source = hidden
        if isinstance(target, FirstLayer):
            self._set_layers(target, source)
        else:
            target = self._readable("target_hidden", target, of_hidden)
            source = self._readable("source_hidden", source, of_hidden)
            self.target_hidden.data, self.new_hidden.data = target.data_ptr(), source.data_ptr()
        alive = self._set_network(network)
        call.first, call.held, call.threads = first, held, torch.get_num_threads()
        if isinstance(step, Tensor):
            step = as_it_lies(step.to(self.compute))
            call.step, call.is_automatic = step.data_ptr(), 0
        elif isinstance(step, str):
            call.is_automatic = 1
        else:
            call.step, call.same_step, call.is_automatic = None, step, 0
        valid = None if valid is None else valid.contiguous()
        call.valid, call.new_valid = address(valids), address(valid)
        assert _LIBRARY is not None
        status = _LIBRARY.graphattn_consensus_steps(self.reference, self.is_double)
        del alive
        if status:
            library.check(status)
        return out

    def _readable(self, name: str, x: Any, numbers: int) -> Tensor:
        if x.numel() != numbers:
            raise ValueError(f"{name} must have {numbers} numbers, got {list(x.shape)}")
        if x.dtype is self.dtype and x.is_contiguous() and not x.is_neg():
            return x
        readable: Tensor = as_it_lies(x.to(self.dtype))
        return readable

    def _set_network(self, network: EdgeNetworkParameters) -> EdgeNetworkParameters:
        """Pass the second layer to the call; the result must live as long as the call runs."""
        compute = self.compute
        for x in network:
            if not (x.dtype is compute and x.is_contiguous()) or x.is_neg():
                network = EdgeNetworkParameters(*(as_it_lies(x.to(compute)) for x in network))
                break
        alpha, alpha_bias, beta, beta_bias, shear, shear_bias = network
        call, given = self.call, self.network
        _, heads, width = self.shape
        xi, rank = alpha.shape[-1], shear_bias.shape[1]
        check_shape("edge_network.alpha", alpha, (heads, xi))
        check_shape("edge_network.alpha_bias", alpha_bias, (heads,))
        check_shape("edge_network.beta", beta, (heads, xi))
        check_shape("edge_network.beta_bias", beta_bias, (heads,))
        check_shape("edge_network.shear", shear, (heads, rank, width, xi))
        check_shape("edge_network.shear_bias", shear_bias, (heads, rank, width))
        if xi * self.trunks != self.hidden.shape[-1]:
            raise ValueError(
                f"edge_network must have {self.hidden.shape[-1] // self.trunks} hidden features "
                f"like the cache, got {xi}"
            )
        given.alpha, given.alpha_bias = alpha.data_ptr(), alpha_bias.data_ptr()
        given.beta, given.beta_bias = beta.data_ptr(), beta_bias.data_ptr()
        given.shear, given.shear_bias = shear.data_ptr(), shear_bias.data_ptr()
        call.rank, call.hidden, call.trunks = rank, xi, self.trunks
        return network

    def _set_layers(self, target: FirstLayer, source: Any) -> None:
        call, inputs = self.call, target.tokens.shape[-1]
        shape = call.groups, self.hidden.shape[-1], inputs
        check_shape("target_hidden.weight", target.weight, shape)
        check_shape("source_hidden.weight", source.weight, shape)
        for layer in (target, source):
            if layer.bias is not None:
                check_shape("bias of a first layer", layer.bias, shape[:2])
        self.target_hidden.data = None
        if call.inputs != inputs:
            call.inputs, call.token = inputs, self.tokens(call.groups, inputs)
        self.token.data = target.tokens.data_ptr()
        call.target_weight, call.target_bias = target.weight.data_ptr(), address(target.bias)
        call.source_weight, call.source_bias = source.weight.data_ptr(), address(source.bias)
