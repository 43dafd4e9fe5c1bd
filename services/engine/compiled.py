"""The kernels as machine code, kept on disk between starts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numba

from services.engine import kernel_ops, kernels, layer_kernels
from services.engine.store import cache_dir

if TYPE_CHECKING:
    from collections.abc import Callable

_MODULES = (kernel_ops, kernels, layer_kernels)


@dataclass(frozen=True, slots=True)
class Kernels:
    """The functions of `kernels` and `layer_kernels`, compiled for this CPU and a dtype when first called."""

    attend: Callable[..., None]
    store: Callable[..., None]
    normalize: Callable[..., None]
    add_normalize: Callable[..., None]
    rotations: Callable[..., None]
    rotate_store: Callable[..., None]
    gate: Callable[..., None]


@cache
def compiled() -> Kernels:
    """The kernels; from the cache directory, where that can be written, after the first start."""
    functions = vars(kernels) | vars(layer_kernels)
    return Kernels(**{name: _compile(functions[name]) for name in Kernels.__dataclass_fields__})


def _compile(function: Callable[..., None]) -> Any:
    jit: Any = numba.njit
    options = {"nogil": True, "boundscheck": False, "error_model": "numpy"}
    kept: Any = numba.config
    before = kept.CACHE_DIR
    # numba looks whether a function's own file has changed, but not the files of what it calls.
    kept.CACHE_DIR = str(cache_dir() / "kernels" / _sources_digest())
    try:
        return jit(cache=True, **options)(function)
    except (RuntimeError, OSError):  # nowhere to write: compile at every start
        return jit(**options)(function)
    finally:
        kept.CACHE_DIR = before


def _sources_digest() -> str:
    sources = b"".join(Path(str(module.__file__)).read_bytes() for module in _MODULES)
    return blake2b(sources, digest_size=8).hexdigest()
