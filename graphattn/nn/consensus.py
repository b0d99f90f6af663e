"""Consensus layers: one step towards agreement along the edges of a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from graphattn.distributed.sharded_graph import ShardedGraph
from graphattn.graphs.arguments import as_choice, as_float, as_int
from graphattn.graphs.token_graph import TokenGraph
from graphattn.nn.base.consensus_across_ranks import (
    consensus_on_ring,
    consensus_own_first,
    may_go_own_first,
    may_use_ring,
)
from graphattn.nn.base.graph_layer import (
    GraphLayer,
    Positions,
    Rotations,
    edge_mask,
    valid_for_propagate,
)
from graphattn.nn.base.message_passing import OptTensor, PairTensor
from graphattn.nn.base.overrides import names_of, overridden_rows
from graphattn.nn.caches.layer_cache import LayerCache
from graphattn.nn.consensus_steps import CompiledSteps
from graphattn.nn.edges.network import (
    EdgeNetwork,
    check_edge_features,
    inverse_softplus,
    networks_of,
)
from graphattn.nn.rotary import RotaryEmbedding
from graphattn.ops.backends import choose, wanted_backend
from graphattn.ops.consensus.api import run
from graphattn.ops.consensus.backends import BACKENDS
from graphattn.ops.consensus.calls import (
    ConsensusCall,
    ConsensusKind,
    check_arguments,
    check_energy_graph,
)
from graphattn.ops.consensus.edge_network import FirstLayer, form, in_dtype
from graphattn.ops.consensus.step_size import automatic_bounds, automatic_move, automatic_step
from graphattn.ops.inputs import Valid, ValidPair, compute_dtype, full_precision, valid_edges

StepSize = float | Literal["learned", "auto"]
Rope = bool | Literal["isometric"] | RotaryEmbedding
HiddenPair = tuple[Tensor | FirstLayer, Tensor | FirstLayer]  # of targets and of sources


class _Consensus(GraphLayer):
    """Base of self- and cross-consensus; `update_rule` says which tokens of an edge move."""

    attribute_of: ClassVar = {"update": "update_rule"}
    iterations = 1  # of layers that were pickled before there were several
    learned_step = False
    drawn = (nn.Linear, EdgeNetwork)
    exchanged = (*GraphLayer.exchanged, "positions", "edge_features")
    # Types of the arguments that PyG's generated code passes on; pairs are (sources, targets).
    propagate_type: ClassVar = {
        "u": PairTensor,
        "hidden": PairTensor,
        "valid": tuple[OptTensor, OptTensor],
        "edge_hidden": OptTensor,
    }
    edge_updater_type: ClassVar = {
        "hidden": PairTensor,
        "valid": tuple[OptTensor, OptTensor],
        "edge_hidden": OptTensor,
    }

    def __init__(
        self,
        dim: int,
        heads: int,
        context_dim: int,
        *,
        rank: int,
        edge_hidden: int,
        step_size: StepSize,
        rope: Rope,
        edge_input: str,
        trunk: str,
        update: str,
        bias: bool,
        backend: str,
        edge_features: int = 0,
        edge_networks: str | None = None,
        iterations: int = 1,
        learned_step: bool = False,
        share_alpha: bool = False,
        learned_beta: bool = True,
    ) -> None:
        isometric = rope == "isometric"
        super().__init__(
            dim,
            heads,
            context_dim=context_dim,
            rope=True if isometric else rope,
            backend=backend,
        )
        self.isometric = isometric
        self.rank, self.edge_hidden = as_int("rank", rank, 1), as_int("edge_hidden", edge_hidden, 1)
        self.edge_input = as_choice("edge_input", edge_input, ("head", "full"))
        self.edge_networks = edge_networks
        self.trunk = as_choice("trunk", trunk, ("shared", "separate"))
        self.update_rule = as_choice("update", update, ("energy", "target"))
        self.edge_features = as_int("edge_features", edge_features, 0)
        self.iterations = as_int("iterations", iterations, 1)
        self.learned_step = bool(learned_step)
        if edge_input == "head" and self.context_dim % self.heads:
            raise ValueError(
                f"context_dim must be a multiple of heads = {heads} with edge_input='head' (each "
                f"head reads its own slice), got {context_dim}: change one of them, or use "
                "edge_input='full'"
            )
        self.source_proj = nn.Linear(self.dim, self.dim, bias=bias)
        if share_alpha and networks_of(self.edge_input, edge_networks) == "per_head":
            raise ValueError(
                "share_alpha must be False if every head has its own network, and so its own "
                "alpha, got True: use edge_input='full' with edge_networks='shared'"
            )
        self.edge_net = EdgeNetwork(
            self.heads,
            self.head_dim,
            self.dim,
            self.context_dim,
            rank=self.rank,
            hidden=self.edge_hidden,
            edge_input=edge_input,
            trunk=trunk,
            edge_networks=self.edge_networks,
            edge_features=self.edge_features,
            share_alpha=bool(share_alpha),
            learned_beta=bool(learned_beta),
        )
        self.step_size: StepSize
        if self.learned_step and isinstance(step_size, str):
            raise ValueError(
                "step_size must be a number with learned_step=True, where the step of every "
                f"iteration starts to learn, got {step_size!r}. 'learned' is one step per head, "
                "with learned_step=False"
            )
        if step_size == "learned":
            self.step_size = "learned"
            self.raw_step_size = nn.Parameter(torch.empty(self.heads))
            self.reset_step_size()
        elif step_size == "auto":
            if self.rotary is not None and not self.isometric:
                raise ValueError(
                    "step_size='auto' needs rope=False or rope='isometric': with rope=True (Eq. "
                    "42) the update is not a gradient step, and no bound on R gives a safe step "
                    "size. Change rope, or set step_size to a number or 'learned'"
                )
            self.step_size = "auto"
        elif isinstance(step_size, str):
            raise ValueError(
                f"step_size must be a number > 0, 'learned' or 'auto', got {step_size!r}"
            )
        else:
            self.step_size = as_float("step_size", step_size, positive=True)
            if self.learned_step:
                self.raw_step_size = nn.Parameter(torch.empty(self.iterations))
                self.reset_step_size()

    def reset_parameters(self) -> None:
        """Initialise the parameters again."""
        super().reset_parameters()
        if self.step_size == "learned" or self.learned_step:
            self.reset_step_size()

    def reset_step_size(self) -> None:
        """Set raw_step_size so that softplus(raw_step_size) is the first step size; 0.1 if
        "learned"."""
        first = self.step_size if isinstance(self.step_size, float) else 0.1
        nn.init.constant_(self.raw_step_size, inverse_softplus(first))

    def message(
        self,
        u_i: Tensor,
        u_j: Tensor,
        hidden_i: Tensor,
        hidden_j: Tensor,
        valid_i: Tensor | None,
        valid_j: Tensor | None,
        edge_hidden: Tensor | None = None,
    ) -> Tensor:
        """Return R_ij (u_i - u_j), with R_ij from the edge network."""
        R = self.edge_net.edge_matrix(hidden_i + hidden_j, edge_hidden)
        pull = R.apply(u_i - u_j)
        keep = edge_mask(valid_i, valid_j)
        return pull if keep is None else pull.masked_fill(~keep[..., None], 0)

    # The steps of the forward pass, in the order in which it runs them.

    def forward_pass(
        self,
        x: Tensor,
        context: Tensor,
        graph: Any,
        valid: Valid,
        positions: Positions,
        weights: Any = False,
        tokens: Tensor | None = None,
        **of_edges: Tensor | None,
    ) -> Any:
        """The template of a call, over the tokens of one rank if the graph is divided.

        Tokens that other ranks own are fetched before they are projected: they are narrower than
        their hidden vectors. If the step moves both ends of an edge, an edge between two ranks is
        computed on both of them, so that nothing has to travel back.
        """
        if tokens is not None:
            self.with_embedding(x, x, tokens)  # says that there is none
        if not isinstance(graph, ShardedGraph):
            if self.iterations > 1:
                return self.iterated(x, context, graph, valid, positions, None, **of_edges)
            return super().forward_pass(x, context, graph, valid, positions, weights, **of_edges)
        features = of_edges["edge_features"]
        if may_use_ring(self, graph, positions, features):
            return consensus_on_ring(self, x, context, graph, valid, positions)
        alone = context is x
        both = self.update_rule == "energy" and context is x
        x, sources, graph_of_rank, pair = self.prepare(
            x, context, graph, valid, per_edge=features is not None
        )
        if both and features is not None:
            features = graph.values_of_both_ends(features)
        elif features is not None:  # before rows travel, so that other ranks are told of an error
            self.checked_features(features, x, graph.graph)
        places: Any = (None, None)
        if positions is not None:
            places = self.resolve_positions(graph_of_rank, positions)
        sent = {"sources": (sources, -2), "valid": (pair[1], -1), "positions": (places[1], -1)}
        if both:
            sent |= {"valid targets": (pair[0], -1), "of targets": (places[0], -1)}
        sent = {name: part for name, part in sent.items() if part[0] is not None}
        local = graph.by_both_ends if both else graph.by_targets
        if may_go_own_first(self, sources, graph, local):
            return consensus_own_first(self, x, sources, graph, pair, places, sent)
        arrived: Any = local.exchange(
            *(tensor for tensor, _ in sent.values()), dims=[dim for _, dim in sent.values()]
        )
        fetched: dict[str, Any] = dict(zip(sent, arrived, strict=True))
        seen = fetched["sources"]
        masks = fetched.get("valid targets", pair[0]), fetched.get("valid")
        places = fetched.get("of targets", places[0]), fetched.get("positions")
        given = (
            seen if both else x,
            seen,
            local.graph,
            None if pair == (None, None) else masks,
            None if positions is None else places,
        )
        if self.iterations == 1:
            moved = super().forward_pass(*given, edge_features=features)
        else:

            def states_of_sources(u: Tensor) -> Tensor:
                return local.exchange(u[..., local.owned, :, :] if both else u, dims=[-3])[0]

            fetch = states_of_sources if alone else None
            moved = self.iterated(*given, fetch, edge_features=features)
        return moved[..., local.owned, :] if both else moved

    def iterated(
        self,
        x: Tensor,
        context: Tensor,
        graph: Any,
        valid: Valid,
        positions: Positions,
        fetch: Callable[[Tensor], Tensor] | None = None,
        **of_edges: Tensor | None,
    ) -> Tensor:
        """The template of a call that makes several steps, with R from the tokens of the call.

        If the targets are among the sources and some of these belong to other ranks, `fetch` gets
        the states of sources from those of targets.
        """
        values = {name: value for name, value in of_edges.items() if value is not None}
        alone, given = context is x, x
        x, context, graph, masks = self.prepare(x, context, graph, valid, per_edge=bool(values))
        if fetch is not None and not alone:
            x = given  # prepared before: tokens that may not move may yet be seen
        values = self.edge_arguments(x, graph, masks, **values)
        rotations = self.rotations(x, context, graph, positions)
        u, compared, hidden = self.project(x, context, rotations)
        for iteration in range(self.iterations):
            if iteration:
                if alone and fetch is not None:
                    u = fetch(u)
                plain = self.rotate_back(u, rotations)
                if fetch is not None and not alone:
                    compared = self.rotate(plain, fetch(plain), rotations)
                else:
                    compared = self.compared_again(plain, compared, rotations, alone)
            which = {"iteration": iteration} if self.learned_step else {}
            u = self.mix(u, compared, hidden, graph, masks, **which, **values)
        return self.project_back(u, rotations)

    def compared_again(
        self, plain: Tensor, compared: PairTensor, rotations: Rotations, alone: bool
    ) -> PairTensor:
        """The two states that are compared after a step to `plain` ones, the sources if `alone`."""
        if alone:
            return self.rotate(plain, plain, rotations)
        if self.rotary is None or rotations is None:
            return plain, compared[1]
        return self.rotary.turn(plain, rotations[0]), compared[1]

    def edge_arguments(
        self, x: Tensor, graph: TokenGraph, valid: ValidPair, **of_edges: Tensor
    ) -> dict[str, Any]:
        """The first layer of the features of edges, as `edge_hidden`."""
        features = self.checked_features(of_edges.get("edge_features"), x, graph)
        if not features:
            return {}
        return {"edge_hidden": self.edge_net.edge_hidden(features["edge_features"], graph, valid)}

    def checked_features(
        self, edge_features: Any, x: Tensor, graph: TokenGraph
    ) -> dict[str, Tensor]:
        """Check `edge_features` and return it as a keyword argument, if there is any."""
        if edge_features is None and not self.edge_features:
            return {}  # skip the count of the edges: it can be slow, or wait for a GPU
        checked = check_edge_features(
            edge_features, self.edge_features, x, graph.num_edges, type(self).__name__
        )
        self.check_dtype("edge_features", checked)
        return {"edge_features": checked}

    def project(
        self, x: Tensor, context: Tensor, rotations: Rotations
    ) -> tuple[Tensor, PairTensor, HiddenPair]:
        """The states that move, the two that are compared, and the hidden vectors of both sides.

        States are [*, N, H, D] for targets and [*, M, H, D] for sources.
        """
        u, compared = self.moving_states(x, context, rotations)
        return u, compared, self.hidden_vectors(u, x, context)

    def moving_states(
        self, x: Tensor, context: Tensor, rotations: Rotations
    ) -> tuple[Tensor, PairTensor]:
        """The states that move, and the two that are compared."""
        u, v = self.states(x, context)
        compared = self.rotate(u, v, rotations)
        # "isometric": make the step in the rotated frame; project_back rotates it back
        return compared[0] if self.isometric else u, compared

    def hidden_vectors(self, u: Tensor, x: Tensor, context: Tensor) -> HiddenPair:
        """The hidden vectors of both sides, for states like u, or the layers that make them."""
        if self.applies_first_layer(u):
            return self.edge_net.first_layers(x, context)
        return self.edge_net.target_hidden(x), self.edge_net.source_hidden(context)

    def states(self, x: Tensor, context: Tensor) -> PairTensor:
        """The states of targets [*, N, H, D] and of sources [*, M, H, D]."""
        raise NotImplementedError

    def applies_first_layer(self, u: Tensor) -> bool:
        """Whether the operation computes hidden vectors itself, so that none are stored."""
        if u.device.type == "cpu" and wanted_backend(self.backend) != "triton":
            return False
        if self.uses_propagate():
            return False
        trunks = 1 if self.trunk == "shared" else 3
        case = ConsensusKind(u, trunks, edge_hidden=self.edge_features or None)
        return choose(BACKENDS, case, self.backend).name == "triton"

    def project_back(self, mixed: Tensor, rotations: Rotations) -> Tensor:
        """The output W_o u' + b_o; with rope="isometric", u' is first rotated back."""
        return super().project_back(self.rotate_back(mixed, rotations), rotations)

    def rotate_back(self, u: Tensor, rotations: Rotations) -> Tensor:
        """Rotate u back if rope="isometric"; return u itself otherwise."""
        if not self.isometric:
            return u
        assert self.rotary is not None
        assert rotations is not None
        return self.rotary.turn(u, rotations[0], back=True)

    def step_of(self, iteration: int) -> Any:
        """Return the step size of an iteration; an own `step_tensor` may not have iterations."""
        return self.step_tensor(iteration) if self.learned_step else self.step_tensor()

    def step_tensor(self, iteration: int = 0) -> Any:
        """Return the step size of an iteration in the form that `consensus_update` accepts."""
        if self.learned_step:
            return functional.softplus(self.raw_step_size[iteration]).expand(self.heads)
        if self.step_size == "learned":
            return functional.softplus(self.raw_step_size)
        return self.step_size

    def fused(
        self,
        u: Tensor,
        compared: PairTensor,
        hidden: HiddenPair,
        graph: TokenGraph,
        valid: ValidPair,
        edge_hidden: Tensor | FirstLayer | None = None,
        iteration: int = 0,
    ) -> Tensor:
        """One step as one operation; `compared`, (targets, sources), gives the disagreement."""
        if self.update_rule == "energy":
            check_energy_graph(graph)
        network = check_arguments(u, compared[1], *hidden, self.edge_net.second_layer())
        call = ConsensusCall(
            u, *hidden, network, graph, self.step_of(iteration), self.update_rule, compared,
            valid, edge_hidden,
        )  # fmt: skip
        return run(call, self.backend)

    def unfused(
        self,
        u: Tensor,
        compared: PairTensor,
        hidden: PairTensor,
        graph: TokenGraph,
        valid: ValidPair,
        edge_hidden: Tensor | FirstLayer | None = None,
        iteration: int = 0,
    ) -> Tensor:
        """:meth:`mix` by messages to the target of every edge, and for "energy" to its source."""
        if self.update_rule == "energy":
            check_energy_graph(graph)
        self.check_message_masks(valid)
        if edge_hidden is not None:
            self.check_message_features()
        dtype = compute_dtype(u.dtype)
        targets, sources = compared[0].to(dtype), compared[1].to(dtype)
        target_hidden, source_hidden = hidden[0].to(dtype), hidden[1].to(dtype)
        valid_source, valid_target = valid_for_propagate(valid)
        edge_index, size = graph.edge_index, (graph.num_sources, graph.num_targets)
        with full_precision(u.device):
            formed = in_dtype(edge_hidden, dtype)
            if formed is not None:
                formed = form(formed, valid_edges(valid, *edge_index))
            forward = {
                "hidden": (source_hidden, target_hidden),
                "valid": (valid_source, valid_target),
                "edge_hidden": formed,
            }
            backward = {
                "hidden": (target_hidden, source_hidden),
                "valid": (valid_target, valid_source),
                "edge_hidden": formed,
            }
            gradient = self.propagate(edge_index, size=size, u=(sources, targets), **forward)
            if self.update_rule == "energy":
                gradient = gradient + self.propagate(
                    edge_index.flip(0), size=size, u=(targets, sources), **backward
                )
            eta = self.step_of(iteration)
            if eta == "auto":
                strength = self.edge_updater(edge_index, size=size, **forward)
                bound = automatic_bounds(strength, graph, self.update_rule)
                moved = automatic_move(u.to(dtype), gradient, bound)
            else:
                moved = u - (eta[:, None] if isinstance(eta, Tensor) else eta) * gradient
        moved = moved.to(u.dtype)
        return moved if valid[0] is None else torch.where(valid[0][..., None, None], moved, u)

    def check_message_features(self) -> None:
        """Raise an error if there are edge features and a user's `message()` does not take them."""
        known = [("message", self._user_args)]
        if self.step_size == "auto":
            known.append(("edge_update", self._edge_user_args))
        for name, arguments in known:
            if "edge_hidden" not in arguments:
                raise ValueError(
                    f"edge_features cannot be used with the {names_of((name,))} of "
                    f"{type(self).__name__}, which would ignore them: give it an argument "
                    "edge_hidden (F e_ij, a tensor [*, E, G, xi], or None), and add it to "
                    "hidden_i + hidden_j"
                )

    def edge_update(
        self,
        hidden_i: Tensor,
        hidden_j: Tensor,
        valid_i: Tensor | None,
        valid_j: Tensor | None,
        edge_hidden: Tensor | None = None,
    ) -> Tensor:
        """Return alpha + beta, an upper bound on the norm of R_ij, [*, E, H]."""
        R = self.edge_net.edge_matrix(hidden_i + hidden_j, edge_hidden)
        keep = edge_mask(valid_i, valid_j)
        bound = R.alpha + R.beta
        return bound if keep is None else bound.masked_fill(~keep, 0)


def clear_unread(x: Tensor, valid: ValidPair) -> Tensor:
    """Set x [*, N, dim] to zero where a token is padding both as a target and as a source."""
    of_target, of_source = valid
    if of_target is None or of_source is None:
        return x
    return x.masked_fill(~(of_target | of_source)[..., None], 0)


class SelfConsensus(_Consensus, CompiledSteps):
    r"""Every token takes a step towards the tokens that it shares an edge with.

    **The default step overshoots.** With ``step_size=0.1`` over a window of 2, the roughest modes
    change sign in every step of a newly made layer: on standard normal tokens 1 - 2 eta lambda_max
    is -0.07 to -0.31 (lower on longer sequences). A low-pass filter needs 0 or more. The energy
    still falls, because it only needs more than -1. ``step_size="auto"`` never oscillates;
    :func:`graphattn.spectral.certify` checks a given layer.

    .. math::
        u &= W_s y + b_s \\
        u_i' &= u_i - \eta \Big[ \sum_{j: (i,j) \in E} R_{ij} (u_i - u_j) \\
             &\qquad + \sum_{k: (k,i) \in E} R_{ki} (u_i - u_k) \Big] \\
        y_i' &= W_o u_i' + b_o

    A small network computes a positive definite matrix :math:`R_{ij} = \alpha I + \beta
    \Lambda^\top \Lambda` per edge and head from [y_i; y_j] (Stabilizing Transformer Training
    Through Consensus, Algorithms 1, 2 and 5). The step is an exact gradient step on the energy
    :math:`\frac12 \sum_{(i,j)} (u_i - u_j)^\top R_{ij} (u_i - u_j)`, and a low-pass filter on the
    graph while eta <= 1 / (2 lambda_max). ``update="target"`` moves only the target of every edge.
    Causal graphs need it: the gradient step would also move the source j, so that its state would
    depend on a later token i.

    Args:
        dim: width of `x` and of the output.
        heads: H, divides `dim`; D = dim / H.
        rank: r, the number of rows of Lambda.
        edge_hidden: xi, the hidden width of the edge network.
        step_size: eta: a number > 0; "learned" (one per head, softplus, starts at 0.1); or "auto",
            a step that is always safe (typically 0.3 to 0.5 of the exact limit). "auto" with
            update="energy": let d_i be the sum of alpha + beta over the in- and out-edges of i,
            without self-loops, which have no effect. Since lambda_max(R_ij) <= alpha + beta,
            Gershgorin's theorem gives lambda_max(L_sym) <= max_i d_i, and eta = 1 / (2 max_i d_i)
            never oscillates. The maximum is taken per head over the valid tokens of one sequence,
            so one token with many edges makes the step small for all. "auto" with update="target":
            eta_i = 1 / sum_j (alpha + beta)_ij per row. With "auto", the overall scale of R has no
            effect.
        rope: rotate the states by position before they are compared. True or a
            :class:`RotaryEmbedding` is Eq. 42 of the paper. The update is then not a gradient step:
            it changes constant states, and a step that would be safe without RoPE can amplify. With
            "isometric" the result is also rotated back. That is the map without RoPE in another
            orthogonal basis, so every guarantee holds again; states that are equal after the
            rotation take the role of constant states.
        edge_input: "head" (the network of a head reads that head's slice of y) or "full" (all of
            y).
        trunk: "shared" (one first layer for alpha, beta and Lambda) or "separate" (one for each).
        edge_features: F, the number of features of an edge (such as a distance or a kind of bond)
            that its network reads in addition to its two tokens, ``gelu(T y_i + t + S y_j + F
            e_ij)``; 0 for none.
        edge_networks: with edge_input="full", "shared" (the first layers of the networks of all
            heads are one; the default there) or "per_head" (every head has its own, Algorithm 5 to
            the letter). Heads that read slices always have their own.
        iterations: T, the number of steps that one call makes. All have the same R, which the
            tokens of the call determine.
        learned_step: whether every iteration learns a step size of its own, the same for all heads:
            softplus of T parameters, and `step_size` (a number) before training.
        share_alpha: whether all heads of an edge have the same alpha. It needs
            edge_input="full" with a shared network.
        learned_beta: whether beta is computed. If not, it is the rank, so that R = alpha I plus the
            sum of v v^T over the rows v of Lambda before they are divided by sqrt(r). The authors'
            published code has ``iterations=2, learned_step=True, share_alpha=True,
            learned_beta=False, edge_input="full", trunk="separate"``.
        update: "energy" or "target".
        bias: whether the two projections have biases (without RoPE, b_s has no effect on
            disagreements, and b_o can replace it).
        backend: "auto", or one of :func:`~graphattn.backends`; "reference" runs `message()` through
            PyG's `propagate`.

    Shapes:
        - **x**: [*, N, dim]
        - **graph**: a TokenGraph, with N sources unless there is a `context`; or an edge_index [2,
          E] or PyG EdgeIndex, which is read as one sequence (only a TokenGraph says where the
          sequences of a :func:`~graphattn.batch` end)
        - **context**: [*, M, dim], all tokens that are seen, if `x` contains only some rows of the
          sequence, for example with ``causal_graph(N, past=m)`` or
          :meth:`graphattn.TokenGraph.targets`; `x` itself if None. It needs update="target"
        - **valid**: bool [N] or [*, N], True where a token is real (keyword), or a pair for `x` and
          `context`; padding is not read, and its output has no meaning
        - **positions**: [N] or [*, N], or a pair for `x` and `context` (keyword)
        - **edge_features**: [E, F], or [*, E, F], in the order of ``graph.edge_index`` (keyword);
          an edge_index must then be sorted. The edges (i, j) and (j, i) have separate features
        - **output**: [*, N, dim]

    Raises:
        ValueError: if update="energy" is used on a causal graph or with a context, if an argument
            is out of range, or if `edge_features` is missing or not expected.

    Example:
        >>> import torch, graphattn as ga
        >>> layer = ga.nn.SelfConsensus(16, heads=4, rank=2, edge_hidden=32, rope=True)
        >>> graph = ga.window_path_graph(10, window=2)
        >>> layer(torch.randn(2, 10, 16), graph).shape
        torch.Size([2, 10, 16])
        >>> layer = ga.nn.SelfConsensus(16, heads=4, edge_hidden=32, edge_features=1)
        >>> distances = torch.rand(graph.num_edges, 1)
        >>> layer(torch.randn(2, 10, 16), graph, edge_features=distances).shape
        torch.Size([2, 10, 16])
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        rank: int = 4,
        edge_hidden: int = 256,
        step_size: StepSize = 0.1,
        rope: Rope = False,
        edge_input: Literal["head", "full"] = "head",
        trunk: Literal["shared", "separate"] = "shared",
        update: Literal["energy", "target"] = "energy",
        bias: bool = True,
        backend: str = "auto",
        edge_features: int = 0,
        edge_networks: Literal["per_head", "shared"] | None = None,
        iterations: int = 1,
        learned_step: bool = False,
        share_alpha: bool = False,
        learned_beta: bool = True,
    ) -> None:
        super().__init__(
            dim,
            heads,
            dim,
            rank=rank,
            edge_hidden=edge_hidden,
            step_size=step_size,
            rope=rope,
            edge_input=edge_input,
            trunk=trunk,
            update=update,
            bias=bias,
            backend=backend,
            edge_features=edge_features,
            edge_networks=edge_networks,
            iterations=iterations,
            learned_step=learned_step,
            share_alpha=share_alpha,
            learned_beta=learned_beta,
        )
        self.output_proj = nn.Linear(self.dim, self.dim, bias=bias)

    def forward(
        self,
        x: Tensor,
        graph: TokenGraph | ShardedGraph | Tensor,
        context: Tensor | None = None,
        *,
        valid: Valid = None,
        positions: Positions = None,
        edge_features: Tensor | None = None,
    ) -> Tensor:
        """Make one consensus step of the tokens of `x` towards each other, or towards `context`.

        The rows of `context` are tokens of the same sequence, with the same projection as `x`. They
        do not move.
        """
        context = x if context is None else context
        if context is not x and self.update_rule == "energy":
            raise ValueError(
                "context must be None with update='energy', which moves both tokens of an edge, "
                f"also those in the context, got {type(context).__name__}: use update='target'"
            )
        if context is not x and self.iterations > 1:
            raise ValueError(
                f"context must be None with iterations={self.iterations}, because later iterations "
                f"need those of all tokens that are seen, got {type(context).__name__}: use "
                "iterations=1, or call the layer on the whole sequence"
            )
        moved: Tensor = self.forward_pass(
            x, context, graph, valid, positions, edge_features=edge_features
        )
        return moved

    def prepare(
        self, x: Tensor, context: Tensor, graph: Any, valid: Valid, *, per_edge: bool = False
    ) -> tuple[Tensor, Tensor, TokenGraph, ValidPair]:
        masked, seen, graph, pair = super().prepare(x, context, graph, valid, per_edge=per_edge)
        if context is x and pair[0] is not pair[1]:  # a token may move and yet not be seen
            masked = seen = clear_unread(x, pair)
        return masked, seen, graph, pair

    def states(self, x: Tensor, context: Tensor) -> PairTensor:
        u = self.split(self.source_proj(x), self.heads)
        return u, u if context is x else self.split(self.source_proj(context), self.heads)

    # Generation, token by token.

    def cache_fields(self) -> dict[str, tuple[int, int]]:
        if self.update_rule == "energy":
            raise ValueError(
                f"{type(self).__name__} can generate token by token only with update='target', got "
                "update='energy', which moves both tokens of an edge: every new token would move "
                "the earlier ones again. Make the layer with update='target'. A model takes such "
                "a layer in its list of mixers: mixer=['dot', SelfConsensus(dim, heads, "
                "update='target')]"
            )
        if self.edge_features:
            raise ValueError(
                "init_cache needs a layer made with edge_features=0, got "
                f"edge_features={self.edge_features}: a step has no features for the edges of a "
                "new token. Call the layer on the whole sequence"
            )
        if self.iterations > 1:
            raise ValueError(
                f"init_cache needs a layer made with iterations=1, got {self.iterations}: later "
                "iterations of a new token need those of all tokens before it. Call the layer on "
                "the whole sequence"
            )
        return {
            "state": (self.heads, self.head_dim),
            "hidden": (self.edge_net.groups, self.edge_net.width),
        }

    def project_step(
        self, x: Tensor, rotations: Rotations
    ) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        u = self.split(self.source_proj(x), self.heads)
        compared, state = self.rotate(u, u, rotations)
        if self.isometric:
            u = compared
        of_target, of_source = self.step_hidden(x, u)
        return (u, compared, of_target), {"state": state, "hidden": of_source}

    def step_rows(
        self,
        targets: tuple[Tensor, ...],
        sources: dict[str, Tensor],
        graph: TokenGraph,
        valid: ValidPair,
    ) -> Tensor:
        u, compared, hidden = targets
        pairs = (compared, sources["state"]), (hidden, sources["hidden"])
        return self.mix(u, *pairs, graph, valid)

    def step_row(self, targets: tuple[Tensor, ...], cache: LayerCache) -> Tensor:
        if self.uses_propagate() or overridden_rows(self):
            return self.row_as_graph(targets, cache)
        n = cache.held(cache.window)
        dtype = compute_dtype(targets[0].dtype)
        u, u_i, hidden_i = (target.to(dtype) for target in targets)
        u_j, hidden_j = (cache.tokens(name, n).to(dtype) for name in ("state", "hidden"))
        keep = cache.valid(n)
        R = self.edge_net.edge_matrix(hidden_i + hidden_j)
        pull, bound = R.apply(u_i - u_j), R.alpha + R.beta
        if keep is not None:
            keep = (keep & keep[..., -1:])[..., None]  # a padded target sees no token
            pull = pull.masked_fill(~keep[..., None], 0)
            bound = bound.masked_fill(~keep, 0)
        eta = self.step_tensor()
        if eta == "auto":
            degree = bound.sum(-2, keepdim=True)
            eta = automatic_step(degree)[..., None]
        elif isinstance(eta, Tensor):
            eta = eta[:, None]
        moved = u - eta * pull.sum(-3, keepdim=True)
        return moved.to(targets[0].dtype)


class CrossConsensus(_Consensus):
    r"""Every token takes a step towards the tokens of another track.

    .. math::
        u = W_s y + b_s, \quad v = W_c c + b_c, \qquad
        u_i' = u_i - \eta \sum_{j: (i,j) \in E_+} R_{ij} (u_i - v_j), \qquad
        y_i' = W_o u_i' + b_o

    over the edges E_+ between the two tracks, with R_ij from [y_i; c_j] (Algorithms 3, 4 and 6 of
    the consensus paper, whose b_Lambda has r d entries). The context does not move, so the update
    is always "target".

    Args:
        context_dim: width of `context`; `dim` if None. With ``edge_input="head"``, each head reads
            a slice of width context_dim / heads.
        dim, heads, rank, edge_hidden, step_size, rope, edge_input, trunk, bias, backend: as in
            :class:`SelfConsensus`.
        edge_features, edge_networks: as in :class:`SelfConsensus`.
        iterations, learned_step, share_alpha, learned_beta: as in :class:`SelfConsensus`. The
            context is the same in every iteration.
        update: must be "target".

    Shapes:
        - **x**: [*, N, dim]
        - **graph**: TokenGraph, edge_index [2, E] or PyG EdgeIndex; N targets, M sources
        - **context**: [*, M, context_dim]
        - **valid**: bool [N] or [*, N], or a pair for targets and sources (keyword); one mask
          serves both tracks if they have the same length
        - **positions**: [N] or [*, N], or a pair (keyword)
        - **edge_features**: [E, F] or [*, E, F], in the order of ``graph.edge_index`` (keyword)
        - **output**: [*, N, dim]

    Raises:
        ValueError: if an argument is out of range, or `edge_features` is missing or not expected.

    Example:
        >>> import torch, graphattn as ga
        >>> layer = ga.nn.CrossConsensus(16, heads=4, edge_hidden=32, context_dim=8)
        >>> graph = ga.bipartite_window_graph(10, window=2)
        >>> layer(torch.randn(2, 10, 16), graph, torch.randn(2, 10, 8)).shape
        torch.Size([2, 10, 16])
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        context_dim: int | None = None,
        rank: int = 4,
        edge_hidden: int = 256,
        step_size: StepSize = 0.1,
        rope: Rope = False,
        edge_input: Literal["head", "full"] = "head",
        trunk: Literal["shared", "separate"] = "shared",
        update: Literal["target"] = "target",
        bias: bool = True,
        backend: str = "auto",
        edge_features: int = 0,
        edge_networks: Literal["per_head", "shared"] | None = None,
        iterations: int = 1,
        learned_step: bool = False,
        share_alpha: bool = False,
        learned_beta: bool = True,
    ) -> None:
        super().__init__(
            dim,
            heads,
            dim if context_dim is None else context_dim,
            rank=rank,
            edge_hidden=edge_hidden,
            step_size=step_size,
            rope=rope,
            edge_input=edge_input,
            trunk=trunk,
            update=as_choice("update", update, ("target",)),
            bias=bias,
            backend=backend,
            edge_features=edge_features,
            edge_networks=edge_networks,
            iterations=iterations,
            learned_step=learned_step,
            share_alpha=share_alpha,
            learned_beta=learned_beta,
        )
        self.context_proj = nn.Linear(self.context_dim, self.dim, bias=bias)
        self.output_proj = nn.Linear(self.dim, self.dim, bias=bias)

    def forward(
        self,
        x: Tensor,
        graph: TokenGraph | ShardedGraph | Tensor,
        context: Tensor,
        *,
        valid: Valid = None,
        positions: Positions = None,
        edge_features: Tensor | None = None,
    ) -> Tensor:
        """Make one consensus step of the tokens of `x` towards those of `context`."""
        moved: Tensor = self.forward_pass(
            x, context, graph, valid, positions, edge_features=edge_features
        )
        return moved

    def states(self, x: Tensor, context: Tensor) -> PairTensor:
        u = self.split(self.source_proj(x), self.heads)
        return u, self.split(self.context_proj(context), self.heads)
