"""Compiled loops that run on the threads of torch's own products.

One pool serves both: between two products of a layer its threads still spin, so a loop starts on all of them
within 3 µs. Another pool's thread must be woken first (25 to 60 µs) and then shares a core with the first
pool's. (GNU libgomp's entry points, as compilers emit them for `#pragma omp parallel`.)
"""

# ruff: noqa: ARG001  # numba calls these with its own contexts and types

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from llvmlite import binding, ir
from numba.core import types

from galley.engine.cpu.kernels.ops import cgutils, helper, intrinsic

_PARALLEL, _THREAD, _THREADS = "GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads"
_I32, _I64, _POINTER = ir.IntType(32), ir.IntType(64), ir.IntType(8).as_pointer()
# Work of a loop from which more threads pay off, while they spin.
_WORTH_NS = 12_000


@cache
def _library() -> ctypes.CDLL | None:
    """Return the libgomp of torch's products, or None; another copy of it would have its own pool."""
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    if not path.exists():
        return None
    library = ctypes.CDLL(str(path))
    return library if hasattr(library, _PARALLEL) else None


def threads() -> int:
    """Return how many threads a loop may use: as many as torch's products, or 1 without libgomp."""
    return 1 if _library() is None else torch.get_num_threads()


def use_one_thread() -> None:
    """Have torch's products and all loops use one thread when the calling thread starts them."""
    torch.get_num_threads()  # its first call in a thread sets as many as elsewhere
    library = _library()
    if library is not None:
        library.omp_set_num_threads(1)


def worth(count: int, work_ns: float) -> int:
    """Return how many threads a loop of `work_ns` uses: 1 or `count`, since libgomp ends threads left out."""
    return count if work_ns >= _WORTH_NS else 1


def link() -> None:
    """Make libgomp's functions known to the compiler, before code that calls them is loaded."""
    library = _library()
    for name in (_PARALLEL, _THREAD, _THREADS):
        # Without the library loops use one thread, so any address will do.
        function = ctypes.pythonapi.Py_IncRef if library is None else getattr(library, name)
        binding.add_symbol(name, ctypes.cast(function, ctypes.c_void_p).value)


def shared(loop: Callable[..., None]) -> Callable[..., None]:
    """Turn loop(thread, first, last, *arguments) into run(threads, items, *arguments), for compiled code.

    Up to `threads` threads each call `loop` once, for their items [first, last). `loop` must not raise. All
    calls have returned when `run` returns.
    """
    compiled: Any = helper(loop)
    parallel = _parallel(compiled)

    @helper
    def run(threads: int, items: int, *arguments: Any) -> None:
        if threads == 1:
            compiled(0, 0, items, *arguments)
        else:
            parallel(threads, items, arguments)

    return run


def _parallel(loop: Any) -> Callable[..., Any]:
    """Return the intrinsic parallel(threads, items, arguments), which runs `loop` on libgomp's threads."""

    @intrinsic
    def parallel(typingctx: Any, threads: Any, items: Any, arguments: Any) -> tuple[Any, Any]:
        index = types.int64
        given = typingctx.resolve_function_type(loop, (index, index, index, *arguments.types), {})

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            threads_, items_, arguments_ = args
            fields = cgutils.pack_struct(builder, [items_, arguments_])
            work = cgutils.alloca_once_value(builder, fields)
            body = _emit_body(context, builder.module, loop, given, fields.type)
            kind = ir.FunctionType(ir.VoidType(), [body.type, _POINTER, _I32, _I32])
            start = cgutils.get_or_insert_function(builder.module, kind, _PARALLEL)
            count, flags = builder.trunc(threads_, _I32), ir.Constant(_I32, 0)
            builder.call(start, [body, builder.bitcast(work, _POINTER), count, flags])
            return context.get_dummy_value()

        return types.void(index, index, arguments), generate

    return parallel


def _emit_body(context: Any, module: Any, loop: Any, given: Any, work: Any) -> Any:
    """Emit what each thread runs, given the address of (items, arguments): its share of the items."""
    compiled = loop.get_compile_result(given)
    context.active_code_library.add_linking_library(compiled.library)
    name = module.get_unique_name(f"share_of_{loop.py_func.__name__}")
    body = ir.Function(module, ir.FunctionType(ir.VoidType(), [_POINTER]), name)
    body.linkage = "internal"
    builder = ir.IRBuilder(body.append_basic_block("entry"))
    fields = builder.load(builder.bitcast(body.args[0], work.as_pointer()))
    items = builder.extract_value(fields, 0)
    counter = ir.FunctionType(_I32, [])
    # There may be fewer threads than requested.
    thread, count = (
        builder.sext(builder.call(cgutils.get_or_insert_function(module, counter, number), []), _I64)
        for number in (_THREAD, _THREADS)
    )
    first = builder.sdiv(builder.mul(items, thread), count)
    last = builder.sdiv(builder.mul(items, builder.add(thread, ir.Constant(_I64, 1))), count)
    values = cgutils.unpack_tuple(builder, builder.extract_value(fields, 1))
    context.call_internal_no_propagate(builder, compiled.fndesc, given, [thread, first, last, *values])
    builder.ret_void()
    return body
