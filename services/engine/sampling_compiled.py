"""The kernels of sampling as machine code, kept on disk between starts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from services.core import noise
from services.engine import (
    kernel_ops,
    openmp,
    sampling_filters,
    sampling_kernels,
    sampling_largest,
    sampling_layout,
    sampling_noise,
)
from services.engine.machine_code import compile_kept, sources_digest

if TYPE_CHECKING:
    from collections.abc import Callable

_SOURCES = (
    *(kernel_ops, noise, openmp),
    *(sampling_filters, sampling_kernels, sampling_largest, sampling_layout, sampling_noise),
)
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}


@dataclass(frozen=True, slots=True)
class SamplingKernels:
    """The functions of `sampling_kernels`, compiled for this CPU when first called."""

    draw_rows: Callable[..., None]
    list_likeliest: Callable[..., None]


@cache
def compiled() -> SamplingKernels:
    """The kernels; from the cache directory, where that can be written, after the first start."""
    openmp.link()
    folder = f"sampling-{sources_digest(_SOURCES, _OPTIONS)}"
    return SamplingKernels(
        draw_rows=compile_kept(sampling_kernels.draw_rows, folder, _OPTIONS),
        list_likeliest=compile_kept(sampling_kernels.list_likeliest, folder, _OPTIONS),
    )
