"""PTX text as a list of instructions: what the emulator executes.

PTX is the assembly language that Triton's compiler writes for NVIDIA's GPUs, one instruction per
statement (PTX ISA, https://docs.nvidia.com/cuda/parallel-thread-execution/). Only what Triton
writes is read: one entry function, virtual registers, labels, and blocks in braces whose registers
have names of their own.
"""

from __future__ import annotations

import re
from itertools import count
from typing import NamedTuple


class Instruction(NamedTuple):
    """One instruction: ``@!%p1 ld.global.v2.b32 {%r1, %r2}, [%rd1+8];``."""

    guard: str | None  # a predicate register: only threads where it is true execute this
    negated: bool  # ... where it is false
    name: str  # "ld.global.v2.b32"
    operands: tuple[str, ...]  # ("{%r1, %r2}", "[%rd1+8]")
    text: str

    @property
    def parts(self) -> list[str]:
        """The name, split at its dots."""
        return self.name.split(".")


class Program(NamedTuple):
    """An entry function."""

    parameters: list[str]  # types in order: "u64", "u32", ...
    code: list[Instruction]
    labels: dict[str, int]  # index of the instruction that follows a label
    types: dict[str, str]  # of registers: by name, or by the beginning of numbered names
    local_bytes: int = 0  # memory that every thread has for itself
    threads: int = 0  # of a block, if the kernel says so
    tables: dict[str, list[str]] = {}  # labels that ``brx.idx`` chooses from  # noqa: RUF012


SKIPPED = (
    ".loc",
    ".file",
    ".pragma",
    ".section",
    ".align",
    ".b8",
    ".b32",
    ".b64",
)
_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.S)
_LABEL = re.compile(r"^([$\w]+):\s*")
_NUMBERED = re.compile(r"(%\w+?)<\d+>$")
_GUARD = re.compile(r"@(!?)(%\w+)\s+")
_TABLE = re.compile(r"([$\w]+):\s*\.branchtargets([^;]*);")
# Braces that hold statements, on lines of their own; within them, those of ``{%r1, %r2}``.
_BLOCK = re.compile(r"\{\n(?:[^{}]|\{[^{}\n]*\})*\}")


def parse(text: str) -> Program:
    """Read the entry function of a PTX module.

    Example:
        >>> program = parse('''
        ... .visible .entry k(
        ...   .param .u64 k_param_0
        ... )
        ... {
        ...   .reg .b32 %r<3>;
        ...   mov.u32 %r1, %tid.x;
        ... $L1:
        ...   @%p1 bra $L1;
        ... }''')
        >>> program.parameters, program.labels, [i.name for i in program.code]
        (['u64'], {'$L1': 1}, ['mov.u32', 'bra'])
    """
    body = text[text.index(".visible .entry") :]
    header = body[: body.index(")\n")]
    parameters = re.findall(r"\.param (?:\.align \d+ )?\.(\w+)[^\n]*?\w+_param_\d+", header)
    threads = re.search(r"\n\.(?:req|max)ntid (\d+)", body)
    body = _COMMENT.sub("", body[body.index("{\n") + 2 :]).split("\n.section")[0]
    tables = {name: re.findall(r"[$\w]+", labels) for name, labels in _TABLE.findall(body)}
    numbers = count()
    body = _BLOCK.sub(lambda m: _with_own_labels(m[0], next(numbers)), _TABLE.sub("", body))
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    types: dict[str, str] = {}
    scopes: list[dict[str, str]] = [{}]  # names of registers within braces, and what they became
    for statement in re.split(r"[;\n]", body):
        statement = statement.strip()
        while label := _LABEL.match(statement):
            labels[label[1]] = len(code)
            statement = statement[label.end() :]
        while statement.startswith("{") and not re.match(r"^\{[^}]*\}\s*,", statement):
            scopes.append({})
            statement = statement[1:].strip()
        closed = 0
        while statement.endswith("}") and statement.count("}") > statement.count("{"):
            statement = statement[:-1].strip()
            closed += 1
        if statement.startswith(".reg"):
            _declare(statement, types, scopes)
        elif statement and not statement.startswith("."):
            code.append(_instruction(statement, scopes))
        for _ in range(closed):
            if len(scopes) > 1:
                scopes.pop()
    local = re.search(r"\.local[^\n]*\[(\d+)\]", body)
    return Program(
        parameters,
        code,
        labels,
        types,
        int(local[1]) if local else 0,
        int(threads[1]) if threads else 0,
        tables,
    )


def _with_own_labels(block: str, number: int) -> str:
    """Statements in braces whose labels no other braces have.

    >>> _with_own_labels("{\\nwaitLoop:\\n@!p bra.uni waitLoop;\\n}", 3)
    '{\\nwaitLoop_3:\\n@!p bra.uni waitLoop_3;\\n}'
    """
    for label in re.findall(r"^\s*(\w+):", block, re.M):
        block = re.sub(rf"(?<![$\w]){label}\b", f"{label}_{number}", block)
    return block


def _declare(statement: str, types: dict[str, str], scopes: list[dict[str, str]]) -> None:
    """Note the types of ``.reg .b32 %r<5>`` or, within braces, of ``.reg .pred p, q``."""
    match = re.match(r"\.reg \.(\w+)\s+(.*)", statement)
    assert match is not None, statement
    for name in (part.strip() for part in match[2].split(",")):
        if numbered := _NUMBERED.match(name):
            types[numbered[1]] = match[1]
        else:
            unique = f"%_{len(types)}_{name.strip('%')}"
            scopes[-1][name] = unique
            types[unique] = match[1]


def _instruction(statement: str, scopes: list[dict[str, str]]) -> Instruction:
    names: dict[str, str] = {}
    for scope in scopes:
        names.update(scope)
    if names:
        statement = re.sub(r"%?\b[A-Za-z_]\w*\b", lambda m: names.get(m[0], m[0]), statement)
    text, guard, negated = statement, None, False
    if match := _GUARD.match(statement):
        guard, negated = match[2], bool(match[1])
        statement = statement[match.end() :]
    name, _, rest = statement.partition(" ")
    if "\t" in name:
        name, _, rest = statement.partition("\t")
    return Instruction(guard, negated, name.strip(), tuple(split(rest)), " ".join(text.split()))


def split(operands: str) -> list[str]:
    """Split at the commas that are in no brackets.

    >>> split("{%r1, %r2}, [%rd1+8], 3")
    ['{%r1, %r2}', '[%rd1+8]', '3']
    """
    parts, depth, begin = [], 0, 0
    for place, letter in enumerate(operands + ","):
        depth += (letter in "{[") - (letter in "}]")
        if letter == "," and depth == 0:
            parts.append(operands[begin:place].strip())
            begin = place + 1
    return [part for part in parts if part]
