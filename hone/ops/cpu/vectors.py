"""Vectors of 16 floats in numba: a type, its arithmetic and memory access by address, and atomics; LLVM fits them to the CPU.

Addresses are integers; `i` counts elements from an address. Values in memory are f32, f16 or bf16 and are computed in f32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.datamodel.models import PrimitiveModel
from numba.extending import intrinsic, register_model

WIDTH = 16
I8, I16, I32, I64, F16, F32 = (
    ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.HalfType(), ir.FloatType()
)  # fmt: skip
FLOATS = ir.VectorType(F32, WIDTH)
WORDS = ir.VectorType(I32, WIDTH)


class _Floats(types.Type):
    """16 floats in registers."""

    def __init__(self) -> None:
        super().__init__(name="floats16")


floats = _Floats()


@register_model(_Floats)
class _FloatsModel(PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, FLOATS)


class _BFloat(ir.Type):
    """LLVM's bfloat, which llvmlite has no class for."""

    intrinsic_name = "bf16"

    def __str__(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash("bfloat")


BF16_PAIRS = ir.VectorType(_BFloat(), 2 * WIDTH)


# Pieces of LLVM that several kernels emit.


def called(builder: Any, name: str, result: Any, *args: Any) -> Any:
    """A call of the LLVM intrinsic or C function `name`."""
    kind = ir.FunctionType(result, [one.type for one in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


def constant(kind: Any, value: Any) -> Any:
    """`value` in every lane of the vector type `kind`."""
    return ir.Constant(kind, [value] * kind.count)


def pointer(builder: Any, address: Any, offset: Any = None) -> Any:
    """The address, an integer, plus `offset` bytes as a byte pointer."""
    base = builder.inttoptr(address, I8.as_pointer())
    return base if offset is None else builder.gep(base, [offset])


def loaded(builder: Any, place: Any, kind: Any) -> Any:
    """A value of `kind` from a byte pointer, whatever its alignment."""
    return builder.load(builder.bitcast(place, kind.as_pointer()), align=1)


def splat(builder: Any, value: Any, kind: Any = FLOATS) -> Any:
    """The scalar `value` in every lane."""
    empty = ir.Constant(kind, ir.Undefined)
    first = builder.insert_element(empty, value, I32(0))
    return builder.shuffle_vector(first, empty, constant(ir.VectorType(I32, kind.count), 0))


def fma(builder: Any, x: Any, y: Any, z: Any) -> Any:
    """x * y + z of vectors of floats."""
    return called(builder, f"llvm.fma.v{x.type.count}f32", x.type, x, y, z)


def total(builder: Any, x: Any) -> Any:
    """The sum of the lanes."""
    kind = ir.FunctionType(F32, [F32, FLOATS])
    add = cgutils.get_or_insert_function(builder.module, kind, f"llvm.vector.reduce.fadd.v{WIDTH}f32")
    return builder.call(add, [F32(0.0), x], fastmath=("reassoc",))


def widened(builder: Any, place: Any, stored: str) -> Any:
    """16 values of dtype `stored` at a byte pointer, as FLOATS."""
    if stored == "f32":
        return loaded(builder, place, FLOATS)
    if stored == "f16":
        return builder.fpext(loaded(builder, place, ir.VectorType(F16, WIDTH)), FLOATS)
    bits = builder.zext(loaded(builder, place, ir.VectorType(I16, WIDTH)), WORDS)
    return builder.bitcast(builder.shl(bits, constant(WORDS, 16)), FLOATS)


def narrowed(builder: Any, x: Any, stored: str) -> Any:
    """FLOATS rounded to the nearest values of dtype `stored`, ready to be stored."""
    if stored == "f32":
        return x
    if stored == "f16":
        return builder.fptrunc(x, ir.VectorType(F16, WIDTH))
    bits = builder.bitcast(x, WORDS)
    odd = builder.and_(builder.lshr(bits, constant(WORDS, 16)), constant(WORDS, 1))
    rounded = builder.add(bits, builder.add(odd, constant(WORDS, 0x7FFF)))
    nan = builder.fcmp_unordered("uno", x, x)  # the addition could carry out of a NaN
    rounded = builder.select(nan, constant(WORDS, 0x7FC00000), rounded)
    return builder.trunc(builder.lshr(rounded, constant(WORDS, 16)), ir.VectorType(I16, WIDTH))


BYTES = {"f32": 4, "f16": 2, "bf16": 2, "i8": 1}
"""Bytes of a value in memory."""


# What kernels call.


def vector_load(stored: str) -> Any:
    """load(address, i) -> floats: 16 values of dtype `stored` from element i."""

    @intrinsic
    def load(typing: Any, address: Any, i: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            offset = builder.mul(args[1], I64(BYTES[stored]))
            return widened(builder, pointer(builder, args[0], offset), stored)

        return floats(types.intp, types.intp), build

    return load


def vector_store(stored: str) -> Any:
    """store(address, i, x): writes x rounded to dtype `stored` to elements i ... i + 15."""

    @intrinsic
    def store(typing: Any, address: Any, i: Any, x: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            value = narrowed(builder, args[2], stored)
            place = pointer(builder, args[0], builder.mul(args[1], I64(BYTES[stored])))
            builder.store(value, builder.bitcast(place, value.type.as_pointer()), align=1)
            return context.get_dummy_value()

        return types.void(types.intp, types.intp, floats), build

    return store


load_f32, store_f32 = vector_load("f32"), vector_store("f32")


def _lanewise(signature: Any, emit: Callable[..., Any]) -> Any:
    """The intrinsic of `emit(builder, *args)`."""
    count = len(signature.args)

    def typed(*_: Any) -> Any:
        return signature, lambda context, builder, found, args: emit(builder, *args)

    if count == 1:
        return intrinsic(lambda typing, a: typed())
    if count == 2:
        return intrinsic(lambda typing, a, b: typed())
    return intrinsic(lambda typing, a, b, c: typed())


add = _lanewise(floats(floats, floats), lambda builder, x, y: builder.fadd(x, y))
mul = _lanewise(floats(floats, floats), lambda builder, x, y: builder.fmul(x, y))
sub = _lanewise(floats(floats, floats), lambda builder, x, y: builder.fsub(x, y))
div = _lanewise(floats(floats, floats), lambda builder, x, y: builder.fdiv(x, y))
larger = _lanewise(
    floats(floats, floats), lambda builder, x, y: builder.select(builder.fcmp_ordered("ogt", x, y), x, y)
)
muladd = _lanewise(floats(floats, floats, floats), fma)
broadcast = _lanewise(floats(types.float32), splat)
sum_of = _lanewise(types.float32(floats), total)
max_of = _lanewise(
    types.float32(floats), lambda builder, x: called(builder, f"llvm.vector.reduce.fmax.v{WIDTH}f32", F32, x)
)


def _exp(builder: Any, x: Any) -> Any:
    """e^x, error below 2 units in the last place; 0 below -87.3, and no more than e^88."""

    def all_of(value: float) -> Any:
        return constant(FLOATS, value)

    low = all_of(-87.3)
    tiny = builder.fcmp_ordered("olt", x, low)
    x = builder.select(tiny, low, x)
    x = builder.select(builder.fcmp_ordered("ogt", x, all_of(88.0)), all_of(88.0), x)
    turns = called(builder, f"llvm.rint.v{WIDTH}f32", FLOATS, builder.fmul(x, all_of(1.4426950408889634)))
    rest = fma(builder, turns, all_of(-0.693145751953125), x)  # ln 2 in two parts, the first exact when multiplied
    rest = fma(builder, turns, all_of(-1.428606765330187e-06), rest)
    power = all_of(1 / 5040)
    for divisor in (720, 120, 24, 6, 2, 1, 1):  # the Taylor series: |rest| <= ln 2 / 2
        power = fma(builder, power, rest, all_of(1 / divisor))
    shift = builder.shl(builder.fptosi(turns, WORDS), constant(WORDS, 23))
    grown = builder.bitcast(builder.add(builder.bitcast(power, WORDS), shift), FLOATS)
    return builder.select(tiny, all_of(0.0), grown)


exp_of = _lanewise(floats(floats), _exp)


def _scalar(kind: Any, number: Any) -> tuple[Any, Any]:
    """(get(address, i), put(address, i, value)) of one scalar dtype."""

    @intrinsic
    def get(typing: Any, address: Any, i: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.load(builder.gep(builder.inttoptr(args[0], kind.as_pointer()), [args[1]]))

        return number(types.intp, types.intp), build

    @intrinsic
    def put(typing: Any, address: Any, i: Any, value: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            builder.store(args[2], builder.gep(builder.inttoptr(args[0], kind.as_pointer()), [args[1]]))
            return context.get_dummy_value()

        return types.void(types.intp, types.intp, number), build

    return get, put


get_f32, put_f32 = _scalar(F32, types.float32)
get_i32, put_i32 = _scalar(I32, types.int32)
get_i64, put_i64 = _scalar(I64, types.int64)


def _place(builder: Any, address: Any, i: Any) -> Any:
    return builder.gep(builder.inttoptr(address, I64.as_pointer()), [i])


take = _lanewise(
    types.int64(types.intp, types.intp, types.int64),
    lambda builder, address, i, more: builder.atomic_rmw("add", _place(builder, address, i), more, "acq_rel"),
)
"""take(address, i, more): adds `more` to an int64 that threads share, and returns what it was."""
seen = _lanewise(
    types.int64(types.intp, types.intp),
    lambda builder, address, i: builder.load_atomic(_place(builder, address, i), "acquire", 8),
)
"""seen(address, i): an int64 that other threads add to."""
pause = intrinsic(
    lambda typing: (
        types.int32(),
        lambda context, builder, signature, args: (called_void(builder, "llvm.x86.sse2.pause"), I32(0))[1],
    )
)
"""pause(): tells the core that it waits."""
give_way = intrinsic(
    lambda typing: (types.int32(), lambda context, builder, signature, args: called(builder, "sched_yield", I32))
)
"""give_way(): lets another thread run on this core."""


def called_void(builder: Any, name: str, *args: Any) -> Any:
    """`called` for functions without a result."""
    return called(builder, name, ir.VoidType(), *args)
