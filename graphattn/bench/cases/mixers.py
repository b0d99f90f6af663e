"""Cases of whole models, one per mixer and number of tokens, and their tables."""

from __future__ import annotations

from collections.abc import Iterable

from graphattn.bench.cases.attention import STRUCTURED
from graphattn.bench.cases.case import BOTH, FORWARD, BenchmarkCase, sizes
from graphattn.bench.contenders.peers import Run
from graphattn.bench.models.mixers import (
    DOT,
    MIXERS,
    PEER,
    OperationsRun,
    RestRun,
    WholeRun,
    mixer_inputs,
)
from graphattn.bench.reporting.record import OURS, Row

OPERATIONS, REST = "its operations", "all else"
STRUCTURED_OPERATIONS = "structured, its operations"
LENGTHS = (2048, 8192)
# Linear attention is products of matrices in torch: there is no other backend.
NOT_COMPILED = ("linear",)
HEADER = ("ms per block", "in operations", "structured", "in operations", "SDPA", "parts")


def mixer_case(mixer: str, tokens: int) -> BenchmarkCase:
    """A model of that mixer over so many tokens: whole, in parts, and as it was before."""
    contenders: dict[str, Run] = {OURS: WholeRun()}
    yardsticks: dict[str, Run] = {OPERATIONS: OperationsRun()}
    is_long = tokens == max(LENGTHS)  # then minutes matter: nothing is timed that can be told
    if not is_long:
        yardsticks[REST] = RestRun()
    if mixer not in NOT_COMPILED and not (is_long and mixer == DOT):
        contenders[STRUCTURED] = WholeRun(backend="structured")
        yardsticks[STRUCTURED_OPERATIONS] = OperationsRun("structured")
    if mixer == DOT:
        contenders[PEER] = WholeRun(PEER)
    more: dict[str, tuple[int, int, int]] = {}
    if mixer == "consensus":
        more = {"window": (2, 2, 2), "edge_hidden": (16, 256, 256)}
    elif "window" in MIXERS[mixer]:
        more = {"window": (16, 256, 256)}
    if mixer == "krause":
        more["top_k"] = (12, 192, 192)
    return BenchmarkCase(
        f"mixer-{mixer}-{tokens}",
        f"A model of the mixer {mixer}",
        sizes(
            tokens=(tokens // 16, tokens, 2 * tokens),
            dim=(48, 384, 384),
            heads=6,
            blocks=(2, 6, 6),
            **more,
        ),
        mixer_inputs(mixer),
        contenders,
        yardsticks=yardsticks,
        memory=False,
        long_passes=True,
        devices=("cpu",),
    )


WHOLE_MODELS = [mixer_case(mixer, tokens) for tokens in LENGTHS for mixer in MIXERS]


def parts_notes(rows: list[Row]) -> Iterable[str]:
    """Times per block and shares of operations of one case, and what the parts add up to."""
    for _, passes, cells in lines_of(rows):
        named = zip(HEADER, cells, strict=True)
        yield f"{passes}: {', '.join(f'{name} {cell}' for name, cell in named if cell)}"


def lines_of(rows: list[Row]) -> Iterable[tuple[Row, str, list[str]]]:
    """(a row, pass, cells under HEADER), one per case and pass of whole models."""
    groups: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        if "blocks" in row.size:
            groups.setdefault((row.case, row.passes), {})[row.contender] = row
    for (_, passes), by_contender in groups.items():
        cells = [
            per_block(by_contender.get(OURS)),
            share(by_contender, OPERATIONS, OURS),
            per_block(by_contender.get(STRUCTURED)),
            share(by_contender, STRUCTURED_OPERATIONS, STRUCTURED),
            per_block(by_contender.get(PEER)),
            parts(by_contender),
        ]
        yield next(iter(by_contender.values())), passes, cells


def per_block(row: Row | None) -> str:
    """Milliseconds of one of the blocks."""
    return "" if row is None else f"{1000 * row.median / row.size['blocks']:,.3g}"


def share(by_contender: dict[str, Row], part: str, whole: str) -> str:
    """Return the share of a model's time in its operations, by the ratios of single rounds."""
    if part not in by_contender or whole not in by_contender:
        return ""
    of_part, of_whole = by_contender[part].ratio, by_contender[whole].ratio
    return f"{of_part / of_whole:.0%}" if of_part and of_whole else ""


def parts(by_contender: dict[str, Row]) -> str:
    """Return the share of operations and all else together in the time of the model."""
    ratios = [by_contender[name].ratio for name in (OPERATIONS, REST) if name in by_contender]
    known = [ratio for ratio in ratios if ratio is not None]
    return f"{sum(known):.0%}" if len(known) == 2 else ""


def by_pass(rows: list[Row]) -> Iterable[tuple[str, list[list[str]]]]:
    """(pass, lines under "mixer", "tokens" and HEADER), forward first."""
    for passes in (FORWARD, BOTH):
        lines = [
            [mixer_of(row.case), f"{row.size['tokens']:,}", *cells]
            for row, row_passes, cells in lines_of(rows)
            if row_passes == passes
        ]
        if lines:
            yield passes, lines


def mixer_of(case: str) -> str:
    """``"gka"`` of ``"mixer-gka-2048"``."""
    return case.removeprefix("mixer-").rpartition("-")[0]
