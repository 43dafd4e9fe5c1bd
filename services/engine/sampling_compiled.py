"""The kernels of sampling as machine code, kept on disk between starts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numba

from services.core import noise
from services.engine import (
    sampling_filters,
    sampling_kernels,
    sampling_largest,
    sampling_layout,
    sampling_noise,
)
from services.engine.store import cache_dir

if TYPE_CHECKING:
    from collections.abc import Callable

_SOURCES = (noise, sampling_filters, sampling_kernels, sampling_largest, sampling_layout, sampling_noise)


@dataclass(frozen=True, slots=True)
class SamplingKernels:
    """The functions of `sampling_kernels`, compiled for this CPU when first called."""

    draw_rows: Callable[..., None]
    list_likeliest: Callable[..., None]


@cache
def compiled() -> SamplingKernels:
    """The kernels; from the cache directory, where that can be written, after the first start."""
    return SamplingKernels(
        draw_rows=_compile(sampling_kernels.draw_rows),
        list_likeliest=_compile(sampling_kernels.list_likeliest),
    )


def _compile(function: Callable[..., None]) -> Any:
    kept: Any = numba.config
    before = kept.CACHE_DIR
    # numba looks whether a function's own file has changed, but not the files of what it calls.
    kept.CACHE_DIR = str(cache_dir() / "kernels" / f"sampling-{_sources_digest()}")
    try:
        return numba.njit(nogil=True, error_model="numpy", cache=True)(function)
    except (RuntimeError, OSError):  # nowhere to write: compile at every start
        return numba.njit(nogil=True, error_model="numpy")(function)
    finally:
        kept.CACHE_DIR = before


def _sources_digest() -> str:
    sources = b"".join(Path(str(module.__file__)).read_bytes() for module in _SOURCES)
    return blake2b(sources, digest_size=8).hexdigest()
