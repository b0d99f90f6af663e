"""Inputs of the consensus kernels, checked and laid out once for forward and backward."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.nn import functional

from graphattn.kernels.consensus.math import LOGITS
from graphattn.kernels.consensus.schedule import ConsensusSchedule, Piece
from graphattn.kernels.shared import tuning
from graphattn.kernels.shared.launch import launch
from graphattn.kernels.shared.layout import Valid, as_bytes
from graphattn.kernels.shared.precision import product_precision
from graphattn.kernels.shared.tuning import Choice

WORKSPACE = 7 << 26  # bytes for the messages of a piece of the edges
STEPS = 4  # tiles of a list of edges that one program takes
HELD_BYTES = 1 << 17  # the most weights that stay in shared memory; AMD's has 64 KiB in all
MOST_CHUNKS = 8  # the most tiles of such weights, because the loop over them is unrolled


def block_of(features: int) -> int:
    """A number of features, rounded up to a power of 2 of 16 or more, as tiles need."""
    return max(triton.next_power_of_2(features), 16)


class HeadFeatures(NamedTuple):
    """A tensor [B, N, H, features] beside its strides, as kernels take it."""

    p: Tensor
    stride_b: int
    stride_n: int
    stride_h: int

    @classmethod
    def of(cls, x: Tensor) -> HeadFeatures:
        """The argument for a tensor `x` whose features are contiguous."""
        return cls(x, *x.stride()[:3])


class PieceEdges(NamedTuple):
    """The edges of a piece as kernels take them (see `Piece`): a list, or moves.

    `p_sequence` [N] has the sequence of every token; None: no edge leaves its own.
    """

    p_targets: Tensor | None
    p_sources: Tensor | None
    p_moves: Tensor | None
    p_sequence: Tensor | None


class Weights(NamedTuple):
    """The second layer of the edge network, [H, ...] each, padded with zeros.

    Attributes:
        shear: [H, groups * RANKS * BLOCK_D, BLOCK_XI] in the dtype of the products.
        shear_bias: [H, groups * RANKS * BLOCK_D], float32.
        logits: [H, LOGITS, BLOCK_XI]: the weights of alpha, those of beta, then zeros.
        logit_bias: [H, 2], float32.
    """

    shear: Tensor
    shear_bias: Tensor
    logits: Tensor
    logit_bias: Tensor


@dataclass
class ConsensusInputs:
    """A consensus step: tensors, edges and options.

    Args:
        target_hidden: [B, N, H, xi], float32, float16 or bfloat16; one dtype for all four.
        source_hidden: [B, M, H, xi].
        u: vectors of the targets, [B, N, H, D]. The difference of an edge is u_i - v_j.
        v: vectors of the sources, [B, M, H, D].
        network: alpha [H, xi], alpha_bias [H], beta, beta_bias likewise, shear [H, r, D, xi] and
            shear_bias [H, r, D].
        edges: of the graph, without self-loops if `energy`.
        energy: an edge adds to the results of both its ends, not of its target only.
        degrees: whether the sums of alpha + beta over the edges of every token are wanted, too.
        valid_target, valid_source: bool [B, N] and [B, M]; None: all are.
        shared: whether u and v are one tensor.
        workspace: bytes for the messages of a piece of the edges.
    """

    target_hidden: Tensor
    source_hidden: Tensor
    u: Tensor
    v: Tensor
    network: tuple[Tensor, ...]
    edges: ConsensusSchedule
    energy: bool
    degrees: bool = False
    valid_target: Tensor | None = None
    valid_source: Tensor | None = None
    shared: bool = False
    workspace: int = field(default_factory=lambda: WORKSPACE)

    def __post_init__(self) -> None:
        self.target_hidden, self.source_hidden, self.u, self.v = (
            x if x.stride(-1) == 1 else x.contiguous()
            for x in (self.target_hidden, self.source_hidden, self.u, self.v)
        )
        self.valid_target, self.valid_source = map(as_bytes, (self.valid_target, self.valid_source))

    @property
    def rank(self) -> int:
        """r, rows of Lambda."""
        return self.network[4].shape[1]

    @property
    def xi(self) -> int:
        """Hidden features."""
        return self.target_hidden.shape[-1]

    @property
    def block_features(self) -> int:
        """D, rounded up to a power of 2 of 16 or more, as tiles need."""
        return block_of(self.u.shape[-1])

    @property
    def ranks(self) -> int:
        """Rows of Lambda that are computed at a time: a group."""
        fitting = max(1, tuning.most_columns(self.u.dtype) // self.block_features)
        return min(triton.next_power_of_2(self.rank), fitting)

    @property
    def groups(self) -> int:
        """Number of groups of rows of Lambda."""
        return triton.cdiv(self.rank, self.ranks)

    @property
    def columns(self) -> int:
        """Rows of the packed weights of Lambda, all groups together."""
        return self.groups * self.ranks * self.block_features

    @property
    def block_xi(self) -> int:
        """Hidden features, rounded up to whole chunks of any size."""
        return max(triton.next_power_of_2(self.xi), 16) if self.xi < 64 else -(-self.xi // 64) * 64

    @cached_property
    def weights(self) -> Weights:
        """The parameters as the kernels read them."""
        alpha, alpha_bias, beta, beta_bias, shear, shear_bias = self.network
        dtype, more_xi = self.u.dtype, self.block_xi - self.xi
        more_rows = self.groups * self.ranks - self.rank
        more_features = self.block_features - shear.shape[2]
        packed = functional.pad(shear.to(dtype), (0, more_xi, 0, more_features, 0, more_rows))
        bias = functional.pad(shear_bias.to(torch.float32), (0, more_features, 0, more_rows))
        logits = torch.stack([alpha, beta], dim=1).to(dtype)
        return Weights(
            packed.flatten(1, 2).contiguous(),
            bias.flatten(1).contiguous(),
            functional.pad(logits, (0, more_xi, 0, LOGITS.value - 2)).contiguous(),
            torch.stack([alpha_bias, beta_bias], dim=1).to(torch.float32).contiguous(),
        )

    def pieces(self, bytes_per_message: int) -> list[Piece]:
        """The edges, so many at a time that their messages fit into the workspace."""
        B, _, H, _ = self.u.shape
        return self.edges.pieces(self.workspace // max(B * H * bytes_per_message, 1))

    def choice(self, kernel: str) -> Choice:
        """Edges of a tile and hidden features of a chunk (`columns`)."""
        choice = tuning.choose(kernel, self.u.dtype, self.block_features, tuning.NARROW)
        return choice._replace(columns=min(choice.columns, self.block_xi))

    def common(self, piece: Piece) -> dict[str, Any]:
        """The arguments that both kernels take, whether they read them or not.

        Names in capitals are constants (``tl.constexpr``): Triton compiles another version of the
        kernel for every set of values, and of tensors that are None. Beginnings of names, such as
        ``b_``, are explained in :mod:`graphattn.kernels`. The constants of both calls are:

        - RANK: rows of Lambda, r. They are computed in GROUPS groups of RANKS rows.
        - D, XI: features of u and v, and of hidden vectors. BLOCK_D, BLOCK_XI: the same, rounded up
          as tiles need.
        - PRECISION: how float32 tiles are multiplied (:mod:`graphattn.kernels.shared.precision`).

        :meth:`launch_over` adds:

        - ROWS: edges of a tile.
        - CHUNK: hidden features that are computed and multiplied at a time.

        The forward adds HELD (`holds_weights`), the backward ENERGY (both ends of an edge have
        gradients).
        """
        return {
            "target_hidden": HeadFeatures.of(self.target_hidden),
            "source_hidden": HeadFeatures.of(self.source_hidden),
            "u": HeadFeatures.of(self.u),
            "v": HeadFeatures.of(self.v),
            "weights": self.weights,
            "edges": PieceEdges(piece.targets, piece.sources, piece.moves, self.edges.sequence),
            "valid": Valid(self.valid_target, self.valid_source),
            "B": self.u.shape[0],
            "N": self.u.shape[1],
            "M": self.v.shape[1],
            "H": self.u.shape[2],
            "first": piece.first,
            "count": piece.count,
            "num_places": piece.places,
            "RANK": self.rank,
            "RANKS": self.ranks,
            "D": self.u.shape[-1],
            "XI": self.xi,
            "PRECISION": product_precision(self.u.dtype),
        }

    def launch_over(
        self, kernel: Any, name: str, piece: Piece, *, steps_each: bool, **arguments: Any
    ) -> None:
        """Starts a kernel on the edges of a piece, for all heads and entries of the batch.

        `name` is that of the kernel in `tuning`. With `steps_each` every step is a program of its
        own; otherwise a program takes all steps of its tile, one after another.
        """
        B, _, H, _ = self.u.shape
        choice = self.choice(name)
        tiles, steps = triton.cdiv(piece.count, choice.rows), piece.runs
        if piece.targets is not None:  # a few tiles of the list in a row
            steps = min(STEPS, tiles)
            tiles = triton.cdiv(tiles, steps)
        launch(
            kernel,
            (B * H * tiles * (steps if steps_each else 1),),
            **arguments,
            **self.common(piece),
            num_steps=steps,
            num_tiles=tiles,
            ROWS=choice.rows,
            CHUNK=choice.columns,
            num_warps=choice.num_warps,
            num_stages=choice.num_stages,
        )

    def holds_weights(self, choice: Choice) -> bool:
        """Whether a program reads all weights of its head once, and keeps them on chip."""
        size = self.columns * self.block_xi * self.u.element_size()
        few = self.groups == 1 and self.block_xi // choice.columns <= MOST_CHUNKS
        return few and size <= HELD_BYTES and tuning.reads_weights_on_chip()
