"""The kernels of sampling as machine code, kept on disk between starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from galley.core import noise
from galley.engine.cpu.kernels import openmp
from galley.engine.cpu.kernels import ops as kernel_ops
from galley.engine.cpu.kernels.machine_code import compile_kept, sources_digest
from galley.engine.sampling import filters as sampling_filters
from galley.engine.sampling import gumbel as sampling_noise
from galley.engine.sampling import kernels as sampling_kernels
from galley.engine.sampling import largest as sampling_largest
from galley.engine.sampling import layout as sampling_layout

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
