"""numba's functions as machine code, kept on disk between starts; a bad or full disk costs time, no more."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from types import ModuleType
from typing import Any

import numba
from numba.core.caching import FunctionCache as _FunctionCache

from galley.engine.load.cache_directory import cache_dir

# numba's own classes are not typed.
_Base: Any = _FunctionCache


class _Cache(_Base):  # type: ignore[misc]  # a base of type Any
    """numba's cache of a function, where nothing that is wrong with its files is an error.

    Two processes that compile a function for different types at once may each name their file the same:
    what is found under a name may be for other types.
    """

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The compiled function for these types, or None."""
        try:
            found = super().load_overload(sig, target_context)
        except Exception:  # noqa: BLE001  # a damaged file may raise anything
            with suppress(OSError):
                self.flush()
            return None
        return found if found is not None and tuple(found.signature.args) == tuple(sig) else None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep it, if that can be."""
        with suppress(OSError):
            super().save_overload(sig, data)


def compile_kept(function: Callable[..., None], folder: str, options: dict[str, Any]) -> Any:
    """`function`, compiled when first called, or loaded from `folder` of the cache directory."""
    dispatcher: Any = numba.njit(**options)(function)
    kept: Any = numba.config
    before = kept.CACHE_DIR
    kept.CACHE_DIR = str(cache_dir() / "kernels" / folder)
    with suppress(RuntimeError, OSError):  # nowhere to write: compile at every start
        dispatcher._cache = _Cache(function)  # noqa: SLF001  # as its `enable_caching` does
    kept.CACHE_DIR = before
    return dispatcher


def sources_digest(modules: Iterable[ModuleType], options: dict[str, Any]) -> str:
    """Of all that code is made of: numba sees a change of a function's own file, and not of what it calls."""
    sources = b"".join(Path(str(module.__file__)).read_bytes() for module in modules)
    sources += repr(sorted(options.items())).encode()
    return blake2b(sources, digest_size=8).hexdigest()
