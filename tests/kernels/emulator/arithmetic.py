"""Arithmetic of every thread on its own registers.

Numbers are kept as unsigned bits, and viewed as what an instruction's last part says: ``add.s32``,
``mul.f32``, ``fma.rn.bf16x2``. Products that are added (``fma``) are computed in twice the
precision and rounded once. Approximate functions are as exact as NumPy's.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from .global_memory import UNSIGNED
from .machine import SPECIAL, Machine, Step, UnknownInstruction
from .ptx import Instruction
from .transfers import SIGNED, elements

FLOATS = {"f16": np.float16, "f32": np.float32, "f64": np.float64}
TINY = np.float32(2.0**-126)  # the least normal number: .ftz makes zeros of smaller ones


# Numbers as bits


def from_bfloat16(bits: np.ndarray) -> np.ndarray:
    """float32 numbers of the bits of bfloat16 numbers."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_bfloat16(x: np.ndarray) -> np.ndarray:
    """The bits of the nearest bfloat16 numbers of float32 numbers, ties to even.

    >>> hex(int(to_bfloat16(np.asarray([1.0 + 2.0**-8], np.float32))[0]))
    '0x3f80'
    """
    bits = np.asarray(x, np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + np.uint64(0x7FFF) + (bits >> np.uint64(16) & np.uint64(1))) >> np.uint64(16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), rounded.astype(np.uint16))


def width_of(kind: str) -> int:
    """Bits of a type: 32 of "s32", "b32", "f32" or "bf16x2"."""
    match = re.fullmatch(r"[a-z]+(\d+)(?:x(\d))?", kind)
    if match is None:
        raise UnknownInstruction(kind)
    return int(match[1]) * int(match[2] or 1)


def decode(bits: np.ndarray, kind: str) -> np.ndarray:
    """Numbers of a type, from their bits. Pairs such as "bf16x2" get a last dimension of two."""
    bits = bits.astype(UNSIGNED[width_of(kind) // 8])
    if kind.endswith("x2"):
        halves = np.stack([bits & np.uint32(0xFFFF), bits >> np.uint32(16)], -1).astype(np.uint16)
        return decode(halves, kind[:-2])
    if kind == "bf16":
        return from_bfloat16(bits)
    if kind in FLOATS:
        return bits.view(FLOATS[kind])
    return bits.view(SIGNED[bits.dtype.itemsize]) if kind[0] == "s" else bits


def encode(x: np.ndarray, kind: str) -> np.ndarray:
    """The inverse of `decode`."""
    if kind.endswith("x2"):
        halves = encode(x, kind[:-2]).astype(np.uint32)
        return halves[..., 0] | halves[..., 1] << np.uint32(16)
    if kind == "bf16":
        return to_bfloat16(x.astype(np.float32))
    return np.asarray(x.astype(FLOATS[kind]) if kind in FLOATS else x).view(
        UNSIGNED[width_of(kind) // 8]
    )


def is_float(kind: str) -> bool:
    """Whether a type is one of floating-point numbers."""
    return kind[0] == "f" or kind.startswith("bf")


# Functions of one type: operands and result are numbers of it


def fused(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """x * y + z, rounded once."""
    wide = np.longdouble if x.dtype == np.float64 else np.float64
    return (x.astype(wide) * y.astype(wide) + z.astype(wide)).astype(x.dtype)


def _quotient(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """x / y of whole numbers, rounded towards zero."""
    y = np.where(y == 0, y.dtype.type(1), y)
    quotient = x // y
    if x.dtype.kind == "i":
        quotient = quotient + ((quotient * y != x) & ((x < 0) != (y < 0)))
    return quotient.astype(x.dtype)


FLOAT_FUNCTIONS: dict[str, Callable[..., np.ndarray]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "fma": fused,
    "mad": fused, "neg": np.negative, "abs": np.abs, "max": np.fmax, "min": np.fmin,
    "sqrt": np.sqrt, "rcp": np.reciprocal, "ex2": np.exp2, "lg2": np.log2, "tanh": np.tanh,
    "sin": np.sin, "cos": np.cos,
    "rsqrt": lambda x: (1 / np.sqrt(x.astype(np.float64))).astype(x.dtype),
    "copysign": lambda sign, x: np.copysign(x, sign),
}  # fmt: skip
WHOLE_FUNCTIONS: dict[str, Callable[..., np.ndarray]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "neg": np.negative, "abs": np.abs,
    "max": np.maximum, "min": np.minimum, "div": _quotient,
    "mad": lambda x, y, z: x * y + z,
    "rem": lambda x, y: (x - _quotient(x, y) * y).astype(x.dtype),
}  # fmt: skip
OF_BITS: dict[str, Callable[..., np.ndarray]] = {
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.bitwise_not,
}  # fmt: skip


def calculate(machine: Machine, instruction: Instruction) -> Step:
    """Instructions whose operands and result have one type: ``add.f32``, ``max.s32``, ..."""
    parts = instruction.parts
    name, kind = parts[0], parts[-1]
    if name in ("mul", "mad") and ("wide" in parts or "hi" in parts):
        return _wide_product(machine, instruction)
    if is_float(kind):
        function = FLOAT_FUNCTIONS[name]
        if name in ("max", "min") and "NaN" in parts:
            function = np.maximum if name == "max" else np.minimum
        if name == "div" and "full" in parts:
            function = _full_range_quotient
    else:
        function = WHOLE_FUNCTIONS[name]
    flushes = "ftz" in parts and kind == "f32"
    bits = width_of(kind)
    getters = [machine.getter(operand, bits) for operand in instruction.operands[1:]]
    put = machine.setter(instruction.operands[0])

    def run() -> None:
        result = function(*[decode(get(), kind) for get in getters])
        if flushes:
            result = np.where(np.abs(result) < TINY, result * np.float32(0), result)
        put(encode(result, kind))

    return run


def _full_range_quotient(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """x / y as ``div.full.f32`` gives it: 0 for divisors above 2^126."""
    return np.where((np.abs(y) > 2.0**126) & np.isfinite(y), x * np.float32(0), x / y)


def _wide_product(machine: Machine, instruction: Instruction) -> Step:
    """``mul.wide``, ``mad.wide`` (a result of twice the bits) and ``mul.hi`` (its upper half)."""
    parts, operands = instruction.parts, instruction.operands
    kind = parts[-1]
    bits = width_of(kind)
    x, y = (machine.getter(operand, bits) for operand in operands[1:3])
    is_wide, put = "wide" in parts, machine.setter(operands[0])
    added = (
        machine.getter(operands[3], 2 * bits if is_wide else bits) if len(operands) > 3 else None
    )

    def run() -> None:
        a, b = decode(x(), kind), decode(y(), kind)
        if bits == 64:
            a, b = np.broadcast_arrays(a, b)
            high = [
                (int(p) * int(q) >> 64) & (2**64 - 1) for p, q in zip(a.flat, b.flat, strict=True)
            ]
            result = np.array(high, np.uint64).reshape(a.shape)
        else:
            wide = (SIGNED if kind[0] == "s" else UNSIGNED)[bits // 4]
            result = (a.astype(wide) * b.astype(wide)).view(UNSIGNED[bits // 4])
            if not is_wide:
                result = (result >> result.dtype.type(bits)).astype(UNSIGNED[bits // 8])
        if added is not None:
            result = result + added().astype(result.dtype)
        put(result)

    return run


def calculate_bits(machine: Machine, instruction: Instruction) -> Step:
    """``and``, ``or``, ``xor`` and ``not``, also of predicates."""
    name, kind = instruction.parts[0], instruction.parts[-1]
    put, function = machine.setter(instruction.operands[0]), OF_BITS[name]
    if kind == "pred":
        getters = [_predicate(machine, operand) for operand in instruction.operands[1:]]
    else:
        getters = [machine.getter(o, width_of(kind)) for o in instruction.operands[1:]]
    return lambda: put(function(*[get() for get in getters]))


def _predicate(machine: Machine, operand: str) -> Callable[[], np.ndarray]:
    """A predicate register, the inverse of one, or a constant."""
    if operand[0] == "!":
        get = machine.getter(operand[1:])
        return lambda: ~get()
    if operand[0] == "%":
        return machine.getter(operand)
    value = np.asarray(operand not in ("0", "false"))
    return lambda: value


def shift(machine: Machine, instruction: Instruction) -> Step:
    """``shl`` and ``shr``; all bits are gone after as many places as there are bits."""
    name, kind = instruction.parts[0], instruction.parts[-1]
    bits, put = width_of(kind), machine.setter(instruction.operands[0])
    x, places = (
        machine.getter(instruction.operands[1], bits),
        machine.getter(instruction.operands[2]),
    )
    signed = "s" + str(bits) if kind[0] == "s" else "u" + str(bits)

    def run() -> None:
        value, by = decode(x(), signed), places().astype(np.int64)
        far = by >= bits
        if name == "shr" and kind[0] == "s":
            result = value >> np.where(far, bits - 1, by).astype(value.dtype)
        else:
            near = np.where(far, 0, by).astype(value.dtype)
            result = np.where(
                far, value.dtype.type(0), value << near if name == "shl" else value >> near
            )
        put(result.view(UNSIGNED[bits // 8]))

    return run


def compare(machine: Machine, instruction: Instruction) -> Step:
    """``setp``: a comparison, perhaps joined with another predicate."""
    parts, operands = instruction.parts, instruction.operands
    how, kind = parts[1], parts[-1]
    x, y = (machine.getter(operand, width_of(kind)) for operand in operands[1:3])
    targets = operands[0].split("|")
    puts = [machine.setter(target) for target in targets]
    other = _predicate(machine, operands[3]) if len(operands) > 3 else None
    join = OF_BITS[parts[2]] if other is not None else None
    function = _comparison(how, is_float(kind))
    is_pair = kind.endswith("x2")

    def run() -> None:
        holds = function(decode(x(), kind), decode(y(), kind))
        results = [holds[..., 0], holds[..., 1]] if is_pair else [holds, ~holds]
        for put, result in zip(puts, results, strict=False):
            put(result if join is None or other is None else join(result, other()))

    return run


COMPARISONS = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal, "lo": np.less, "ls": np.less_equal, "hi": np.greater,
    "hs": np.greater_equal,
}  # fmt: skip


def _comparison(how: str, of_floats: bool) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """Comparisons are false beside NaN; those that end in u ("neu") are then true."""
    if not of_floats:
        return COMPARISONS[how]
    if how in ("num", "nan"):
        either = lambda x, y: np.isnan(x) | np.isnan(y)  # noqa: E731
        return either if how == "nan" else lambda x, y: ~either(x, y)
    if how.endswith("u"):
        plain = COMPARISONS[how[:-1]]
        return lambda x, y: plain(x, y) | np.isnan(x) | np.isnan(y)
    plain = COMPARISONS[how]
    return lambda x, y: plain(x, y) & ~(np.isnan(x) | np.isnan(y))


def select(machine: Machine, instruction: Instruction) -> Step:
    """``selp``: one of two operands, as a predicate says."""
    bits = width_of(instruction.parts[-1])
    x, y = (machine.getter(operand, bits) for operand in instruction.operands[1:3])
    predicate = _predicate(machine, instruction.operands[3])
    put, dtype = machine.setter(instruction.operands[0]), UNSIGNED[bits // 8]
    return lambda: put(np.where(predicate(), x(), y()).astype(dtype))


def move(machine: Machine, instruction: Instruction) -> Step:
    """``mov``, also between a register and the parts of it; and ``cvta``."""
    target, source = instruction.operands[0], instruction.operands[1]
    if target[0] == "{":
        puts, get = [machine.setter(part) for part in elements(target)], machine.getter(source)

        def split_up() -> None:
            value = get()
            bits = 8 * value.dtype.itemsize // len(puts)
            for i, put in enumerate(puts):
                part = value >> value.dtype.type(bits * i)
                put(part.astype(UNSIGNED[bits // 8]))

        return split_up
    put, dtype = machine.setter(target), machine.dtype(target)
    if source[0] == "{":
        parts = elements(source)
        bits = 8 * np.dtype(dtype).itemsize // len(parts)
        getters = [machine.getter(part, bits) for part in parts]

        def put_together() -> None:
            result = dtype(0)
            for i, get in enumerate(getters):
                result = result | get().astype(dtype) << dtype(bits * i)
            put(np.asarray(result))

        return put_together
    if dtype is np.bool_:
        get = _predicate(machine, source)
    else:
        get = machine.getter(source, 8 * np.dtype(dtype).itemsize)
    if source[0] != "%" or source in SPECIAL:
        return lambda: put(get())
    to, origin = machine.slot(target), machine.slot(source)

    def copy() -> None:
        put(get())
        # Registers here are names, and a copy is none in a GPU: its value is as old as the first.
        machine.written[to] = machine.written[origin]

    return copy


ROUND = {"rni": np.rint, "rmi": np.floor, "rpi": np.ceil, "rzi": np.trunc}


def convert(machine: Machine, instruction: Instruction) -> Step:
    """``cvt``: from one type to another."""
    parts, operands = instruction.parts, instruction.operands
    source, target = parts[-1], parts[-2]
    put = machine.setter(operands[0])
    getters = [machine.getter(operand, width_of(source)) for operand in operands[1:]]
    if target in ("bf16x2", "f16x2"):  # two numbers; the first is the upper half
        high, low = getters

        def pack() -> None:
            pair = np.stack(np.broadcast_arrays(decode(low(), source), decode(high(), source)), -1)
            put(encode(pair, target))

        return pack
    (get,) = getters
    rounding = next((ROUND[part] for part in parts if part in ROUND), None)
    held = machine.dtype(operands[0])

    def run() -> None:
        x = decode(get(), source)
        if target == "tf32":  # ties away from zero
            bits = x.view(np.uint32).astype(np.uint64) + np.uint64(0x1000)
            put((bits & np.uint64(0xFFFFE000)).astype(np.uint32))
        elif is_float(target):
            wide = x.astype(np.float32 if target == "bf16" else FLOATS[target])
            put(encode(rounding(wide) if rounding else wide, target))
        else:
            bits = width_of(target)
            if x.dtype.kind == "f":
                assert rounding is not None, instruction.text
                whole = np.nan_to_num(rounding(x).astype(np.float64), nan=0.0)
                low, high = (
                    (0, 2**bits - 1)
                    if target[0] == "u"
                    else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
                )
                x = np.clip(whole, low, high).astype(np.int64 if low else np.uint64)
            sign = SIGNED if target[0] == "s" else UNSIGNED
            result = x.astype(sign[bits // 8])
            if np.dtype(held).itemsize * 8 > bits:  # the register is wider
                result = result.astype(sign[np.dtype(held).itemsize])
            put(result.view(UNSIGNED[result.dtype.itemsize]))

    return run


def of_values(function: Callable[..., np.ndarray]) -> Callable[[Machine, Instruction], Step]:
    """The translation of instructions that compute a number of 32 bits from some others.

    `function` is given the parts of the instruction's name and the bits of its operands.
    """

    def translate(machine: Machine, instruction: Instruction) -> Step:
        parts, put = instruction.parts, machine.setter(instruction.operands[0])
        bits = 64 if parts[-1] == "b64" else 32
        getters = [machine.getter(operand, bits) for operand in instruction.operands[1:]]
        return lambda: put(function(parts, *[get() for get in getters]).astype(np.uint32))

    return translate


@of_values
def logic(parts: list[str], *operands: np.ndarray) -> np.ndarray:
    """``lop3``: any function of three bits, by a table of its eight values."""
    *inputs, table = operands
    result = np.zeros(np.broadcast_shapes(*(x.shape for x in inputs)), np.uint32)
    for row in range(8):
        if int(table) >> row & 1:
            term = ~np.uint32(0)
            for place, x in enumerate(inputs):
                term = term & (x if row >> 2 - place & 1 else ~x)
            result |= term
    return result


@of_values
def extract(
    parts: list[str], value: np.ndarray, place: np.ndarray, count: np.ndarray
) -> np.ndarray:
    """``bfe``: some bits of a number."""
    n = count.astype(np.int64) & 255
    value = value.astype(np.int64) >> (place.astype(np.int64) & 255)
    value = value & ((np.int64(1) << n) - 1)
    if parts[-1] == "s32":
        negative = (value >> np.maximum(n, 1) - 1 & 1 == 1) & (n > 0)
        value = np.where(negative, value - (np.int64(1) << n), value)
    return value & 0xFFFFFFFF


@of_values
def insert(
    parts: list[str], new: np.ndarray, old: np.ndarray, place: np.ndarray, count: np.ndarray
) -> np.ndarray:
    """``bfi``: some bits of a number, replaced by another one's lowest."""
    by, n = (x.astype(np.int64) & 255 for x in (place, count))
    mask = ((np.int64(1) << n) - 1) << by
    return ((new.astype(np.int64) << by) & mask | old.astype(np.int64) & ~mask) & 0xFFFFFFFF


@of_values
def count_bits(parts: list[str], x: np.ndarray) -> np.ndarray:
    """``popc`` (bits that are set) and ``clz`` (zeros before the first one)."""
    if parts[0] == "popc":
        return np.bitwise_count(x)
    length = np.ceil(np.log2(x.astype(np.float64) + 1)).astype(np.uint32)
    return np.uint32(width_of(parts[-1])) - length


@of_values
def permute(parts: list[str], x: np.ndarray, y: np.ndarray, choice: np.ndarray) -> np.ndarray:
    """``prmt``: four bytes, chosen from the eight of two numbers."""
    both = y.astype(np.uint64) << np.uint64(32) | x.astype(np.uint64)
    result = np.uint32(0)
    for i in range(4):
        one = choice >> np.uint32(4 * i) & np.uint32(15)
        byte = both >> (one & np.uint32(7)).astype(np.uint64) * np.uint64(8) & np.uint64(255)
        byte = byte.astype(np.uint32)
        sign = np.where(byte & np.uint32(128), np.uint32(255), np.uint32(0))
        result = result | np.where(one & np.uint32(8), sign, byte) << np.uint32(8 * i)
    return result


@of_values
def shift_pair(
    parts: list[str], low: np.ndarray, high: np.ndarray, places: np.ndarray
) -> np.ndarray:
    """``shf``: 32 of the 64 bits of two numbers, shifted."""
    by = places.astype(np.uint64)
    by = by & np.uint64(31) if "wrap" in parts else np.minimum(by, np.uint64(32))
    both = high.astype(np.uint64) << np.uint64(32) | low.astype(np.uint64)
    result = (both << by) >> np.uint64(32) if "l" in parts else both >> by
    return result & np.uint64(0xFFFFFFFF)


INSTRUCTIONS = {
    **dict.fromkeys((*FLOAT_FUNCTIONS, *WHOLE_FUNCTIONS), calculate),
    **dict.fromkeys(OF_BITS, calculate_bits),
    "shl": shift, "shr": shift, "shf": shift_pair, "setp": compare, "selp": select, "mov": move,
    "cvta": move, "cvt": convert, "lop3": logic, "bfe": extract, "bfi": insert,
    "popc": count_bits, "clz": count_bits, "prmt": permute,
}  # fmt: skip
