"""The launches of the consensus kernels that matter most, at their real sizes."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch

from graphattn.kernels.consensus.backward import backward, no_sums
from graphattn.kernels.consensus.forward import forward
from graphattn.kernels.consensus.inputs import ConsensusInputs
from graphattn.kernels.consensus.math import LOGITS, WIDE
from graphattn.kernels.consensus.schedule import ConsensusSchedule
from graphattn.kernels.shared import tuning
from graphattn.kernels.shared.configuration import SHORT_NAMES, Configuration, made, made_indices
from graphattn.kernels.shared.launch import Launch, recording

KERNELS = ("consensus_kernel", "consensus_backward_kernel")
UNBOUNDED = 1 << 60  # bytes of workspace: all edges in one launch, as if there were memory for it


class ConsensusCase(NamedTuple):
    """A step of `update` "energy", forward and backward."""

    name: str
    target: str
    batch: int
    tokens: int
    heads: int
    features: int = 64
    rank: int = 4
    hidden: int = 256
    window: int = 2  # on each side
    degree: int = 0  # of a listed graph, in place of a window
    dtype: torch.dtype = torch.bfloat16
    degrees: bool = False  # step_size="auto"
    valid: bool = False
    sums: bool = False  # whether the sums at both ends of edges are looked at, too


FAST = "5x gather/scatter, 2x compiled"
CASES = (
    ConsensusCase("consensus 64 x 1024", FAST, 64, 1024, 12, sums=True),
    ConsensusCase(
        "consensus 64 x 1024, auto step, padded", "", 64, 1024, 12, degrees=True, valid=True
    ),
    ConsensusCase("consensus 64 x 1024, D 32, rank 8", "", 64, 1024, 12, 32, 8),
    ConsensusCase("consensus 16 x 1024, D 128", "", 16, 1024, 12, 128),
    ConsensusCase("consensus 16 x 1024, D 256", "", 16, 1024, 6, 256),
    ConsensusCase("consensus 64 x 1024, xi 128", "", 64, 1024, 12, hidden=128),
    ConsensusCase("consensus 16 x 1024, xi 1024", "", 16, 1024, 12, hidden=1024),
    ConsensusCase("consensus kNN graph, k 16", "", 1, 65536, 12, degree=16, sums=True),
    ConsensusCase("consensus 16 x 1024", "", 16, 1024, 12, dtype=torch.float32),
    ConsensusCase("consensus 64 x 1024", "", 64, 1024, 12, dtype=torch.float16),
)


def configurations_of(case: ConsensusCase, device: str = "meta") -> list[Configuration]:
    """The launches of one case, in their order."""
    B, N, H, D = case.batch, case.tokens, case.heads, case.features
    r, xi = case.rank, case.hidden
    make = partial(made, dtype=case.dtype, device=device)
    # Hidden vectors as a batched product over heads leaves them.
    of_target, of_source = (
        make(H, B * N, xi).unflatten(1, (B, N)).permute(1, 2, 0, 3) for _ in range(2)
    )
    u = make(B, N, H, D)
    sizes = (H, xi), (H,), (H, xi), (H,), (H, r, D, xi), (H, r, D)
    network = tuple(make(*size, dtype=torch.float32) for size in sizes)
    valid = make(B, N, dtype=torch.bool) if case.valid else None
    if case.degree:
        listed = made_indices(2, N * case.degree, below=N, device=device)
        edges = ConsensusSchedule(N, N, device, edge_index=listed)
    else:
        w = case.window
        moves = (*range(-w, 0), *range(1, w + 1))
        edges = ConsensusSchedule(N, N, device, moves)
    x = ConsensusInputs(
        of_target, of_source, u, u, network, edges, energy=True, degrees=case.degrees,
        valid_target=valid, valid_source=valid, shared=True, workspace=UNBOUNDED,
    )  # fmt: skip
    d_degree = make(B, N, H, dtype=torch.float32) if case.degrees else None
    with recording() as launches:
        forward(x)
        first_of_backward = len(launches)
        backward(x, make(B, N, H, D), d_degree, network=no_sums(x, H))
    return [
        _describe(case, x, launch, "forward" if i < first_of_backward else "backward")
        for i, launch in enumerate(launches)
        if launch.kernel.fn.__name__ in KERNELS or (case.sums and "p_messages" in launch.arguments)
    ]


def _describe(case: ConsensusCase, x: ConsensusInputs, launch: Launch, part: str) -> Configuration:
    kernel, arguments = launch.kernel.fn.__name__, launch.arguments
    name = f"{case.name}, {SHORT_NAMES[case.dtype]}: {part}"
    messages = x.edges.places * case.batch * case.heads
    tokens = case.batch * case.tokens * case.heads
    size, D, xi = case.dtype.itemsize, case.features, case.hidden
    if kernel not in KERNELS:
        width = arguments["WIDTH"]
        number = arguments["p_messages"].element_size()
        ends = 2 if arguments.get("AT_TARGET") and arguments.get("AT_SOURCE") else 1
        of_total = arguments["p_total"].element_size()
        listed = "num_runs" not in arguments
        return Configuration(
            f"{name}, sums of {width}",
            launch,
            bytes=float(width * (messages * number + tokens * of_total)),
            # The loop over the runs of a window only adds, so it is not told apart from the rest.
            iterations=float(launch.grid[0]),
            gathered=float(width * messages * number * ends),
            table=float(width * messages * number) if listed else 0.0,
            lookups=float(launch.grid[0]) if listed else 0.0,
        )
    is_backward = kernel == "consensus_backward_kernel"
    width = x.columns + LOGITS.value
    written = D + is_backward * (width + 2 * xi)
    tiles = float(launch.grid[0]) * (1 if is_backward else arguments["num_steps"])
    chunks = x.block_xi / arguments["CHUNK"] * x.groups
    if is_backward:
        # The product that forms the rows, and the one that brings their gradients back.
        wide = tiles * x.block_xi / min(WIDE.value, x.block_xi) * x.groups
        passes: tuple[float, ...] = (tiles * chunks, wide)
    else:  # one loop over everything if weights are held
        passes = (tiles if arguments["HELD"] else tiles * chunks,)
    # Weights are read once a program or once a tile, hidden vectors and states for every edge.
    times = float(launch.grid[0]) if not is_backward and arguments["HELD"] else tiles
    weights = times * width * xi * size * (2 if is_backward else 1)
    return Configuration(
        name,
        launch,
        main=is_main(case, kernel),
        flops=2.0 * messages * width * xi * (2 if is_backward else 1),
        bytes=float(size * (tokens * (2 * xi + 2 * D * (1 + is_backward)) + messages * written)),
        iterations=tiles,
        target=case.target,
        gathered=weights + float(messages * size * (2 * xi * (1 + is_backward) + 2 * D)),
        passes=passes,
        programs=0.0 if not is_backward and arguments["HELD"] else tiles,
    )


def is_main(case: ConsensusCase, kernel: str) -> bool:
    """Half precision in heads of usual sizes, where matrix instructions read weights on chip."""
    usual = case.features <= 64 and case.hidden <= 256 and case.dtype != torch.float32
    if kernel == "consensus_backward_kernel":  # elsewhere some registers spill around the loops
        return usual and not case.valid and tuning.architecture() == "sm_90"
    return usual and tuning.reads_weights_on_chip()
