"""Machine code as text: its instructions, and the loops that do the work."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

# Any matrix instruction, also one that falls short of the device's rate (HMMA on sm_90).
_MATRIX = re.compile(r"[HIDQ]?G?MMA\b|[HIDQB]MMA|UTC\w*MMA|v_mfma|v_smfmac")
_FUSED = re.compile(r"FFMA|v_fma|v_fmac|v_pk_fma")
_SPECIAL = re.compile(r"MUFU|v_(exp|log|rcp|rsq|sqrt|sin|cos)_")
LOCAL = re.compile(r"(STL|LDL)\b|scratch_(load|store)")
# Copies to shared memory that go on while the warp computes, and waits for products of wgmma.
_COPY = re.compile(r"LDGSTS")
_BULK_COPY = re.compile(r"UTMALDG|UBLKCP")  # in a loop of their own, of another warp
_WAIT = re.compile(r"WARPGROUP\.DEPBAR")


class Instruction(NamedTuple):
    """One machine instruction: its name, where it may jump to, and whether the next one follows."""

    name: str
    jump: int | None  # index of another instruction
    continues: bool
    operands: str = ""


_SASS_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);")


def read_sass(text: str) -> list[Instruction]:
    """The instructions of a listing by ``cuobjdump -sass`` of one kernel.

    >>> listing = '''
    ... /*0000*/           MOV R1, c[0x0][0x28] ;
    ... /*0010*/           HMMA.16816.F32 R4, R8, R12, R4 ;
    ... /*0020*/      @!P0 BRA 0x10 ;
    ... /*0030*/           EXIT ;
    ... '''
    >>> [(line.name, line.jump) for line in read_sass(listing)]
    [('MOV', None), ('HMMA.16816.F32', None), ('BRA', 1), ('EXIT', None)]
    """
    lines = _SASS_LINE.findall(text)
    index = {int(address, 16): i for i, (address, *_) in enumerate(lines)}
    code = []
    for _, predicate, name, operands in lines:
        jump, continues = None, True
        if name.startswith(("BRA", "CALL", "JMP")):
            # CALL is also how a far jump is written: it may come back, so both ways count.
            target = re.search(r"(0x[0-9a-f]+)\s*$", operands)
            jump = index.get(int(target[1], 16)) if target else None
            # A condition is a predicate before the name, or an operand before the address.
            continues = bool(predicate) or "," in operands or name.startswith("CALL")
        elif name.startswith(("EXIT", "RET", "BRX")):
            continues = bool(predicate)
        code.append(Instruction(name, jump, continues, operands.strip()))
    return code


_AMD_LINE = re.compile(r"^(?:(\.L\w+):|\t([a-z]+_\w+)[ \t]*([^;\n]*))", re.M)


def read_amdgcn(text: str) -> list[Instruction]:
    """The instructions of AMD assembly of one kernel.

    >>> listing = ".LBB0_1:\\n\\tv_mov_b32 v1, v2\\n\\ts_cbranch_scc1 .LBB0_1\\n"
    >>> [(line.name, line.jump) for line in read_amdgcn(listing)]
    [('v_mov_b32', None), ('s_cbranch_scc1', 0)]
    """
    labels: dict[str, int] = {}
    lines: list[tuple[str, str]] = []
    for label, name, operands in _AMD_LINE.findall(text):
        if label:
            labels[label] = len(lines)
        else:
            lines.append((name, operands.strip()))
    return [
        Instruction(
            name,
            labels.get(operands) if name.startswith(("s_branch", "s_cbranch")) else None,
            name not in ("s_branch", "s_endpgm", "s_setpc_b64"),
            operands,
        )
        for name, operands in lines
    ]


def counts(code: list[Instruction]) -> dict[str, Any]:
    """The fields of `Compiled` that are counted over instructions."""
    working = _working_loops(code)
    body = [code[i].name for i in _main_of(working, code)]
    matrix = Counter(i.name for i in code if _MATRIX.match(i.name))
    inside = set().union(*working)
    waits = [code[i] for i in inside if _WAIT.match(code[i].name)]
    return {
        "matrix": dict(sorted(matrix.items())),
        "loop_instructions": len(body),
        "loop_matrix": sum(1 for name in body if _MATRIX.match(name)),
        "loop_spills": sum(1 for name in body if LOCAL.match(name)),
        "loop_special": _specials(body),
        "loops": tuple((len(loop), _specials(code[i].name for i in loop)) for loop in working),
        "outside": (
            len(code) - len(inside),
            _specials(code[i].name for i in range(len(code)) if i not in inside),
        ),
        "copies": sum(
            1
            for i, instruction in enumerate(code)
            if _BULK_COPY.match(instruction.name) or (i in inside and _COPY.match(instruction.name))
        ),
        "waits": len(waits),
        # ``gsb0, 0x1``: all products but the last ones; ``gsb0, 0x0``: all.
        "open_waits": sum(1 for wait in waits if not wait.operands.endswith("0x0")),
    }


def _specials(names: Iterable[str]) -> int:
    return sum(1 for name in names if _SPECIAL.match(name))


def main_loop(code: list[Instruction]) -> set[int]:
    """The instructions of the innermost loop that holds most matrix instructions.

    Without any matrix instruction fused multiply-adds decide. Of equal loops the shortest is
    taken; code that is in no such loop is one pass as a whole.
    """
    return _main_of(_working_loops(code), code)


def _main_of(working: list[set[int]], code: list[Instruction]) -> set[int]:
    if not working:
        return set(range(len(code)))
    product = _product(code)
    return max(
        working, key=lambda body: (sum(1 for i in body if product.match(code[i].name)), -len(body))
    )


def _product(code: list[Instruction]) -> re.Pattern[str]:
    """The instructions that do the work: matrix instructions, or fused multiply-adds if there are
    none."""
    return _MATRIX if any(_MATRIX.match(i.name) for i in code) else _FUSED


def _working_loops(code: list[Instruction]) -> list[set[int]]:
    """The innermost of the loops that hold such instructions, in the order of the code."""
    product = _product(code)
    working = [body for body in _loops(code) if any(product.match(code[i].name) for i in body)]
    innermost = [body for body in working if not any(inner < body for inner in working)]
    return sorted(innermost, key=min)


def _loops(code: list[Instruction]) -> list[set[int]]:
    """The natural loops: for a jump back to a header through which every way to the jump leads,
    all that reaches the jump without passing the header (Aho, Sethi and Ullman, section 10.4).

    Backward jumps alone are not loops: code moved out of line jumps back as well.
    """
    before: list[list[int]] = [[] for _ in code]
    for i, instruction in enumerate(code):
        if instruction.continues and i + 1 < len(code):
            before[i + 1].append(i)
        if instruction.jump is not None:
            before[instruction.jump].append(i)
    loops: dict[int, set[int]] = {}
    for i, instruction in enumerate(code):
        header = instruction.jump
        if header is None or header > i:
            continue
        body, open_ends = {header, i}, [i] if i != header else []
        while open_ends:
            for j in before[open_ends.pop()]:
                if j not in body:
                    body.add(j)
                    open_ends.append(j)
        if header == 0 or 0 not in body:
            loops.setdefault(header, set()).update(body)  # two ways back are one loop
    return list(loops.values())
