"""Tuning: other sizes of tiles for every kernel, precision and width of heads.

Around the present choice, rows, columns, warps and stages are halved and doubled, then once more
around the best. Times are medians of repeated launches between events of the GPU. On the emulator
executed instructions stand in: they rehearse the search, and say nothing of time.
"""

from __future__ import annotations

import fcntl
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

import graphattn as ga
from graphattn.bench.cases.inputs import consensus_inputs
from graphattn.bench.contenders import ours
from graphattn.kernels.shared import launch, tuning

from .jobs import run_jobs
from .session import Machine, Progress, Row, Session, compile_only, start
from .visits import Visit, earlier

# The kernel whose tile a name in `tuning` stands for.
KERNELS = {
    "forward": "band_forward_kernel", "d_query": "d_query_kernel", "d_source": "d_source_kernel",
    "shared_forward": "shared_forward_kernel", "shared_backward": "shared_backward_kernel",
    "d_table": "d_table_kernel", "band_select": "band_select_kernel",
    "consensus": "consensus_kernel", "consensus_backward": "consensus_backward_kernel",
    "edges_forward": "edges_forward_kernel", "edges_d_query": "edges_d_query_kernel",
    "edges_d_source": "edges_d_source_kernel", "edges_select": "edges_select_kernel",
    "sum_messages": "sum_rows_kernel", "window_step": "window_step_kernel",
}  # fmt: skip
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
ALLOWED = {"bf16": 3e-2, "fp32": 1e-3}  # between results of two sizes of tiles
WIDTHS = (64, 128, 256)
OF_EDGES = (16, 32, 64, 128, 256)
OTHER_WIDTHS = {"shared_backward": (64,)}  # wider heads take other kernels
# Kernels whose sizes depend on the window, by the widths of heads that are tried.
SPANS = {"short": (64, 128), "narrow": (64,)}
OF_SPANS = ("forward", "d_query", "d_source", "shared_forward", "shared_backward")
TINY = ("forward, bf16, 32", "edges_forward, bf16, 32")
SECONDS, ON_EMULATOR = 240.0, 600.0
ROUNDS = 2  # of a search: around the present choice, and around the best
SAMPLES = 20
LARGEST = 256  # rows or columns
Choice = tuning.Choice
Work = Callable[[], list[Tensor]]


class Setting(NamedTuple):
    """A kernel, the precision and width of heads, and the window: "short", "narrow", or any."""

    kernel: str
    dtype: str
    width: int
    span: str = ""

    @classmethod
    def parse(cls, job: str) -> Setting:
        """Read the name of a job: "forward, bf16, 64, narrow"."""
        kernel, dtype, width, *rest = job.split(", ")
        return cls(kernel, dtype, int(width), *rest)

    def __str__(self) -> str:
        return ", ".join(str(part) for part in self if part)


def jobs(size: str, visits: list[Visit] | None = None) -> list[str]:
    """Names of all settings: first those that no visit has tuned, then those of half precision."""
    if size == "tiny":
        return list(TINY)
    settings: list[Setting] = []
    for dtype in DTYPES:
        if dtype == "bf16":
            for span, span_widths in SPANS.items():
                settings += [
                    Setting(kernel, dtype, width, span)
                    for kernel in OF_SPANS
                    for width in span_widths
                    if width in OTHER_WIDTHS.get(kernel, span_widths)
                ]
        for kernel in KERNELS:
            is_edge = kernel in tuning.OF_EDGES
            if is_edge and dtype == "fp32":  # the rule does not depend on the precision
                continue
            widths = OTHER_WIDTHS.get(kernel, OF_EDGES if is_edge else WIDTHS)
            settings += [Setting(kernel, dtype, width) for width in widths]
    known = {job for visit in (earlier() if visits is None else visits) for job in visit.tuned}
    return sorted(map(str, settings), key=lambda job: job in known)


def run(session: Session) -> None:
    """Try what is left."""
    seconds = ON_EMULATOR if session.machine.is_emulated else SECONDS
    run_jobs(__name__, jobs(session.size), session, processes=session.processes, seconds=seconds)


def work(name: str, known: list[Row], machine: Machine, size: str) -> Iterator[Row]:
    """Search the sizes of one setting; yield a row for every choice, with its cost.

    Choices in `known`, of a search that was cut off, are not measured again.
    """
    setting = Setting.parse(name)
    compute = inputs(setting, machine, size)
    present, expected = present_choice(setting, compute, machine)
    costs: dict[Choice, float] = {
        Choice(*row["choice"]): row["cost"] for row in known if row.get("cost") is not None
    }
    seen = {Choice(*row["choice"]) for row in known if "choice" in row}
    center = present
    for _ in range(1 if size == "tiny" else ROUNDS):
        around = [center, *neighbours(center, smallest(setting))]
        for choice in around[: 3 if size == "tiny" else None]:
            if choice in seen:
                continue
            seen.add(choice)
            row: Row = {"choice": list(choice), "present": choice == present}
            try:
                cost, results = measure(setting, choice, compute, machine)
                difference = largest_difference(results, expected)
                row["difference"] = difference
                if difference <= ALLOWED[setting.dtype]:
                    row["cost"] = costs[choice] = cost
                else:
                    row["refused"] = "other results"
            except Exception as error:  # too much shared memory, or too many registers
                if "illegal" in str(error):
                    raise
                row["refused"] = f"{type(error).__name__}: {str(error)[:120]}"
            yield row
        if not costs or (best := min(costs, key=lambda choice: costs[choice])) == center:
            break
        center = best


def smallest(setting: Setting) -> int:
    """The fewest rows or columns that a kernel takes."""
    return 1 if setting.kernel in tuning.OF_EDGES else 16


def neighbours(center: Choice, least: int) -> list[Choice]:
    """Choices one step away, in an order that begins with the most promising."""
    r, c, w, s = center
    choices = [
        Choice(r, c, 2 * w, s), Choice(r, c, w // 2, s), Choice(r, 2 * c, w, s),
        Choice(2 * r, c, w, s), Choice(r, c // 2, w, s), Choice(r // 2, c, w, s),
        Choice(r, c, w, s + 1), Choice(r, c, w, s - 1), Choice(2 * r, c // 2, w, s),
        Choice(r // 2, 2 * c, w, s),
    ]  # fmt: skip
    return [
        choice
        for choice in choices
        if least <= choice.rows <= LARGEST and least <= choice.columns <= LARGEST
        and 1 <= choice.num_warps <= 16 and 1 <= choice.num_stages <= 5
    ]  # fmt: skip


def present_choice(
    setting: Setting, compute: Work, machine: Machine
) -> tuple[Choice, list[Tensor]]:
    """The sizes that the library takes now, and the results with them.

    Raises:
        LookupError: the computation does not start the kernel.
    """
    asked: dict[str, Choice] = {}

    def watch(choose: Callable[..., Choice], kernel: str, *args: Any, **options: Any) -> Choice:
        asked[kernel] = choose(kernel, *args, **options)
        return asked[kernel]

    with ExitStack() as stack:
        for name in ("choose", "choose_for_edges"):
            real = getattr(tuning, name)
            stack.enter_context(mock.patch.object(tuning, name, partial(watch, real)))
        started = stack.enter_context(machine.launching())
        results = compute()
    if KERNELS[setting.kernel] not in {one.kernel for one in started}:
        raise LookupError(f"{setting}: no launch of {KERNELS[setting.kernel]}")
    return asked[setting.kernel], results


def measure(
    setting: Setting, choice: Choice, compute: Work, machine: Machine
) -> tuple[float, list[Tensor]]:
    """Seconds of the kernel's launches (on the emulator: instructions), and all results."""
    kernel = KERNELS[setting.kernel]
    with tuning.override(**{setting.kernel: choice}):
        if machine.is_emulated:
            with machine.launching() as started:
                results = compute()
            return float(sum(one.instructions for one in started if one.kernel == kernel)), results
        with alone(), launch.recording() as recorded:
            compute()
        for one in recorded:  # the compiler works while others measure
            if one.kernel.fn.__name__ == kernel:
                compile_only(one)
        del recorded
        with alone():
            with machine.launching() as started:
                results = compute()
            again = [one.launch for one in started if one.kernel == kernel]
            return seconds_of(lambda: [start(one) for one in again]), results


def seconds_of(start: Callable[[], object]) -> float:
    """Median time on the GPU."""
    for _ in range(3):
        start()
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(SAMPLES)
    ]
    torch.cuda.synchronize()
    for begin, end in events:
        begin.record()
        start()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in events) / 1000


@contextmanager
def alone() -> Iterator[None]:
    """Keep the GPU to this process within the block; other searches wait."""
    with Path(tempfile.gettempdir(), "graphattn-tune.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
            torch.cuda.synchronize()
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)


def largest_difference(results: list[Tensor], expected: list[Tensor]) -> float:
    """Relative RMS, the largest of all results; infinite if one is not finite."""
    worst = 0.0
    for one, other in zip(results, expected, strict=True):
        size = other.double().square().mean().sqrt().clamp(min=1e-6)
        error = float((one.double() - other.double()).square().mean().sqrt() / size)
        worst = max(worst, error if error == error else float("inf"))
    return worst


def inputs(setting: Setting, machine: Machine, size: str) -> Work:
    """A computation that starts the kernel, at a size where its time matters."""
    torch.manual_seed(0)
    tiny, device = size == "tiny", torch.device(machine.tensors)
    dtype, width, kernel = DTYPES[setting.dtype], setting.width, setting.kernel
    if kernel == "window_step":
        return _steps(width, dtype, machine, tiny=tiny)
    if kernel in ("consensus", "consensus_backward", "sum_messages"):
        return _consensus(width, dtype, device, tiny=tiny, listed=kernel == "sum_messages")
    heads, batch = (1, 1) if tiny else (8, 2)
    shared = kernel.startswith("shared")
    options: dict[str, Any] = {}
    if kernel in tuning.OF_EDGES:
        tokens = 40 if tiny else 16384
        graph = ga.knn_graph(torch.randn(tokens, 3), 4 if tiny else 16)
        if kernel == "edges_select":
            options["top_k"] = 3 if tiny else 8
    elif kernel == "band_select":
        graph = ga.causal_window_graph(*((40, 16) if tiny else (8192, 256)))
        options["top_k"] = 12 if tiny else 192
    elif kernel == "d_table":
        graph = ga.window_path_graph(*((40, 8) if tiny else (8192, 256)), self_loops=True)
    elif setting.span == "narrow":
        graph = ga.window_path_graph(40 if tiny else 65536, 8, self_loops=True)
    elif setting.span == "short" and shared:  # a causal window takes other kernels backward
        graph = ga.window_path_graph(40 if tiny else 16384, 128, self_loops=True)
    elif setting.span == "short":
        graph = ga.causal_window_graph(*((40, 16) if tiny else (16384, 256)))
    else:
        graph = ga.complete_graph(40 if tiny else 4096)
    tokens = graph.num_targets
    leaves = [
        torch.randn(batch, tokens, heads, width, device=device, dtype=dtype, requires_grad=True)
        for _ in range(1 if shared else 3)
    ]
    if kernel == "d_table":
        assert graph.structure is not None
        table = torch.randn(graph.structure.num_offsets, heads, device=device).requires_grad_()
        options["edge_bias"] = table
    graph = graph.to(device)
    upstream = torch.randn(batch, tokens, heads, width, device=device, dtype=dtype)

    def compute() -> list[Tensor]:
        query, key, value = leaves * 3 if shared else leaves
        out = ga.rbf_attention(query, key, value, graph, width**0.5, backend="triton", **options)
        wanted = [*leaves, *([options["edge_bias"]] if "edge_bias" in options else [])]
        return [out.detach(), *torch.autograd.grad(out, wanted, upstream)]

    return compute


def _consensus(
    width: int, dtype: torch.dtype, device: torch.device, *, tiny: bool, listed: bool
) -> Work:
    heads = 1 if tiny else max(1, 768 // width)
    size = {"batch": 1 if tiny or listed else 16, "tokens": 24 if tiny else 1024, "heads": heads,
            "dim": heads * width, "edge_hidden": 16 if tiny else 256, "rank": 4,
            "window": 2}  # fmt: skip
    x = consensus_inputs(size, device, dtype)
    if listed:
        graph = ga.knn_graph(torch.randn(size["tokens"], 3), 8).to(device)
        x = x.like(x.learned(), graph)

    def compute() -> list[Tensor]:
        with ga.use_backend("triton"):
            out = ours.consensus(x)
        return [out.detach(), *torch.autograd.grad(out.sum(), x.learned())]

    return compute


def _steps(width: int, dtype: torch.dtype, machine: Machine, *, tiny: bool) -> Work:
    """Steps whose window is full; of one token again and again, so that all steps are equal."""
    heads, texts, window = (1, 1, 8) if tiny else (8, 64, 256)
    layer = ga.nn.DotProductAttention(heads * width, heads, backend="triton")
    layer = layer.to(machine.tensors, dtype)
    token = torch.randn(texts, heads * width, device=machine.tensors, dtype=dtype)

    def compute() -> list[Tensor]:
        with torch.no_grad():
            return [layer.step(token, cache)]

    with machine.launching():
        cache = layer.init_cache(texts, window)
        for _ in range(window):
            compute()
    return compute


class Proposal(NamedTuple):
    """The best choice of a setting, and the present one's cost divided by its cost."""

    setting: Setting
    present: Choice
    best: Choice
    gain: float


def proposals(rows: list[Row]) -> list[Proposal]:
    """The best choices of all settings whose present choice was measured."""
    by_job: dict[str, dict[Choice, float]] = {}
    present: dict[str, Choice] = {}
    for row in rows:
        if row.get("cost") is not None:
            by_job.setdefault(row["job"], {})[Choice(*row["choice"])] = row["cost"]
            if row["present"]:
                present[row["job"]] = Choice(*row["choice"])
    best_of_all = []
    for job, now in present.items():
        costs = by_job[job]
        best = min(costs, key=lambda choice: (costs[choice], choice != now))
        best_of_all.append(Proposal(Setting.parse(job), now, best, costs[now] / costs[best]))
    return best_of_all


def source(best_of_all: list[Proposal], where: str) -> str:
    """Tables for `kernels/shared/tuning.py`, as Python source.

    Beside each line are the costs of the present choices, divided by those of the new ones.
    """
    lines = []
    kinds = (
        ("bf16", "", "Half precision"), ("fp32", "", "float32"),
        ("bf16", "short", f"Half precision, windows of at most {tuning.SHORT}"),
        ("bf16", "narrow", f"Half precision, windows narrower than {tuning.NARROW}"),
    )  # fmt: skip
    for dtype, span, title in kinds:
        of_kind = [p for p in best_of_all if (p.setting.dtype, p.setting.span) == (dtype, span)]
        if not of_kind:
            continue
        lines += [f"# {title}. {where}; behind each line: cost of the present / the new.", "{"]
        for kernel in dict.fromkeys(p.setting.kernel for p in of_kind):
            choices = sorted((p for p in of_kind if p.setting.kernel == kernel),
                             key=lambda p: p.setting.width)  # fmt: skip
            cells = ", ".join(f"{p.setting.width}: Choice{tuple(p.best)}" for p in choices)
            gains = ", ".join(f"{p.gain:.2f}" for p in choices)
            lines.append(f'    "{kernel}": {{{cells}}},  # {gains}')
        lines.append("}")
    return "\n".join(lines)


def progress(session: Session) -> Progress:
    """How many settings have been searched; one that gave no cost at all counts as wrong."""
    return session.progress("tune", jobs(session.size))
