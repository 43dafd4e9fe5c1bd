"""The kernels as machine code, kept on disk between starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from galley.engine.cpu.kernels import attention as kernels
from galley.engine.cpu.kernels import layers as layer_kernels
from galley.engine.cpu.kernels import openmp
from galley.engine.cpu.kernels import ops as kernel_ops
from galley.engine.cpu.kernels.machine_code import compile_kept, sources_digest

_MODULES = (kernel_ops, kernels, layer_kernels, openmp)
_OPTIONS: dict[str, Any] = {"nogil": True, "boundscheck": False, "error_model": "numpy"}


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
    openmp.link()
    functions, folder = vars(kernels) | vars(layer_kernels), sources_digest(_MODULES, _OPTIONS)
    return Kernels(
        **{name: compile_kept(functions[name], folder, _OPTIONS) for name in Kernels.__dataclass_fields__}
    )
