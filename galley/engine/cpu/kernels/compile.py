"""Compile kernels to machine code and keep it on disk; a damaged or full disk costs time and nothing else.

numba keeps machine code in pickles, and whoever writes one runs code here. So the files lie in a directory of
this user alone.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from pathlib import Path
from secrets import token_hex
from types import ModuleType
from typing import Any

import numba
from numba.core.caching import FunctionCache as _FunctionCache

from galley.core.errors import UnsafeCache
from galley.engine.cpu.kernels import attention, layers, openmp, ops
from galley.engine.load.support import cache_dir

# numba's own classes are not typed.
_Base: Any = _FunctionCache
_PRIVATE = 0o700
_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
# A division by zero gives an infinity, as in numpy. No fast-math: every sum has one order.
_OPTIONS: dict[str, Any] = {"nogil": True, "boundscheck": False, "error_model": "numpy"}


class _Cache(_Base):  # type: ignore[misc]  # a base of type Any
    """numba's cache of a function, without errors for damaged or mismatched files.

    Two processes that compile a function for different types at once may give their files the same name.
    """

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            overload = super().load_overload(sig, target_context)
        except Exception:  # noqa: BLE001  # a damaged file may raise anything
            with suppress(OSError):
                self.flush()
            return None
        return overload if overload is not None and tuple(overload.signature.args) == tuple(sig) else None

    def save_overload(self, sig: Any, data: Any) -> None:
        with suppress(OSError):
            super().save_overload(sig, data)


def compile_kernels(
    name: str, functions: Sequence[Callable[..., None]], modules: Iterable[ModuleType]
) -> list[Callable[..., None]]:
    """Return `functions` as machine code, compiled at the first call or loaded from the cache directory.

    `modules` are all that the compiled code comes from: numba notices only a change of a function's own file.
    Raises UnsafeCache if others may have written the cached files.
    """
    openmp.link()
    sources = b"".join(Path(str(module.__file__)).read_bytes() for module in modules)
    digest = blake2b(sources + repr(sorted(_OPTIONS.items())).encode(), digest_size=8).hexdigest()
    config: Any = numba.config
    before = config.CACHE_DIR
    config.CACHE_DIR = str(_private_dir() / f"{name}-{digest}")
    dispatchers: list[Any] = [numba.njit(**_OPTIONS)(function) for function in functions]
    for dispatcher, function in zip(dispatchers, functions, strict=True):
        with suppress(RuntimeError, OSError):  # nowhere to write: compile at every start
            dispatcher._cache = _Cache(function)  # noqa: SLF001  # as its `enable_caching` does
    config.CACHE_DIR = before
    return dispatchers


def _private_dir() -> Path:
    """Return the directory of this user's machine code, made private. Raises UnsafeCache.

    It does not exist if it cannot be created. If others could write to it, its files are discarded.
    """
    parent, user = cache_dir(), os.geteuid()
    directory = parent / "kernels"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        _discard_shared(directory)
        with suppress(FileExistsError):  # also a file or a link, which is refused below
            directory.mkdir(mode=_PRIVATE)
        above, own = parent.stat(), directory.lstat()
    except OSError:
        return directory
    if above.st_mode & stat.S_IWOTH and not above.st_mode & stat.S_ISVTX:
        raise UnsafeCache(
            f"{parent}: must not be writable by everyone, as cached code is run; chmod o-w it, or set "
            "GALLEY_CACHE_DIR to a directory in it"
        )
    if not stat.S_ISDIR(own.st_mode) or own.st_uid != user or own.st_mode & _BY_OTHERS:
        raise UnsafeCache(
            f"{directory}: must be a directory that only user {user} can write, as cached code is run; "
            "remove it, or set GALLEY_CACHE_DIR to another directory"
        )
    return directory


def _discard_shared(directory: Path) -> None:
    """Move `directory` away if it is this user's and others can write to it, and delete what can be."""
    with suppress(OSError):
        own = directory.lstat()
        if stat.S_ISDIR(own.st_mode) and own.st_uid == os.geteuid() and own.st_mode & _BY_OTHERS:
            aside = directory.with_name(f"kernels-{token_hex(8)}")
            directory.rename(aside)
            shutil.rmtree(aside, ignore_errors=True)  # others may own some of it


@dataclass(frozen=True, slots=True)
class Kernels:
    """The functions of `attention` and `layers`, compiled for this CPU and a dtype at the first call."""

    attend: Callable[..., None]
    store: Callable[..., None]
    normalize: Callable[..., None]
    rotations: Callable[..., None]
    rotate_store: Callable[..., None]
    gate: Callable[..., None]


@cache
def compiled() -> Kernels:
    functions = vars(attention) | vars(layers)
    chosen = [functions[name] for name in Kernels.__dataclass_fields__]
    return Kernels(*compile_kernels("layers", chosen, (ops, attention, layers, openmp)))
