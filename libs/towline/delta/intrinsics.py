"""The few machine operations that numba can't express by itself: unaligned 16-bit access and whole-vector compares.

Every buffer is a C-contiguous uint8 array, which is "aligned" wherever it starts in a file, so that one explicit
signature serves any view, read-only or not. Offsets are in bytes and aren't checked: the callers check once per block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import extending, types

READ = types.Array(types.uint8, 1, "C", readonly=True)
WRITE = types.Array(types.uint8, 1, "C")
U64 = types.uint64
LANES = 32
"""16-bit elements in one compare."""
_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))


def intrinsic(function: Callable[..., Any]) -> Any:
    return extending.intrinsic(function)


def _pointer(context: Any, builder: Any, kind: Any, value: Any, offset: Any, element: Any) -> Any:
    data = context.make_array(kind)(context, builder, value).data
    return builder.bitcast(builder.gep(data, [offset]), element.as_pointer())


@intrinsic
def differing(typing: Any, a: Any, b: Any, offset: Any) -> tuple[Any, Callable[..., Any]]:
    """Bit k of the result: element k of the 32 at byte `offset` of a differs from b's."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vector = ir.VectorType(_I16, LANES)
        left = builder.load(_pointer(context, builder, signature.args[0], args[0], args[2], vector), align=1)
        right = builder.load(_pointer(context, builder, signature.args[1], args[1], args[2], vector), align=1)
        mask = builder.bitcast(builder.icmp_unsigned("!=", left, right), ir.IntType(LANES))
        return builder.zext(mask, _I64)

    return U64(a, b, U64), generate


@intrinsic
def trailing_zeros(typing: Any, x: Any) -> tuple[Any, Callable[..., Any]]:
    """64 for zero."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 0))

    return U64(U64), generate


@intrinsic
def ones(typing: Any, x: Any) -> tuple[Any, Callable[..., Any]]:
    """The number of bits that are set."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return U64(U64), generate


@intrinsic
def load(typing: Any, a: Any, offset: Any) -> tuple[Any, Callable[..., Any]]:
    """The 16 bits at byte `offset` as int64."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = builder.load(_pointer(context, builder, signature.args[0], args[0], args[1], _I16), align=1)
        return builder.zext(value, _I64)

    return types.int64(a, U64), generate


@intrinsic
def store(typing: Any, a: Any, offset: Any, value: Any) -> tuple[Any, Callable[..., Any]]:
    """The low 16 bits of `value` to byte `offset`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _pointer(context, builder, signature.args[0], args[0], args[1], _I16)
        builder.store(builder.trunc(args[2], _I16), pointer, align=1)
        return context.get_dummy_value()

    return types.void(a, U64, types.int64), generate


@intrinsic
def prefetch(typing: Any, a: Any, offset: Any) -> tuple[Any, Callable[..., Any]]:
    """Ask for the cache line at byte `offset`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _pointer(context, builder, signature.args[0], args[0], args[1], _I8)
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, _I32, _I32, _I32])
        builder.call(
            builder.module.declare_intrinsic("llvm.prefetch", [pointer.type], kind), [pointer, _I32(0), _I32(3), _I32(1)]
        )
        return context.get_dummy_value()

    return types.void(a, U64), generate
