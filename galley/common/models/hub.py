"""Take models from the Hugging Face hub, or from its cache on the disk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from galley.common.models.files import IGNORED_FILES, hub_model, model_path
from galley.core.errors import UnsupportedModel

_NO_ACCESS = frozenset({401, 403, 404})


def local_directory(spec: str, patterns: Sequence[str]) -> Path:
    """Return the directory `spec`, or that of a hub model as `hub_directory` does."""
    path = model_path(spec)
    return path if path.is_dir() else hub_directory(spec, patterns)


def hub_directory(spec: str, patterns: Sequence[str]) -> Path:
    """Return the directory of a hub model, with its files that match `patterns`, but for IGNORED_FILES.

    Files that the hub's cache lacks are downloaded. If the hub does not respond or refuses, or with
    HF_HUB_OFFLINE=1, the cache must hold all of them. Raise UnsupportedModel.
    """
    # With its HTTP client it is slow to load, and every start of a stack resolves two models.
    import httpx2  # noqa: PLC0415
    import huggingface_hub  # noqa: PLC0415

    name, revision = hub_model(spec)
    try:
        directory = huggingface_hub.snapshot_download(
            name, revision=revision, allow_patterns=list(patterns), ignore_patterns=list(IGNORED_FILES)
        )
        return Path(directory)
    except (httpx2.HTTPError, OSError, ValueError) as error:
        raise refused(spec, error) from error


def refused(spec: str, error: Exception) -> UnsupportedModel:
    """Return an error that says why a hub model cannot be had, and what to do."""
    from huggingface_hub.errors import (  # noqa: PLC0415
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
    )

    if isinstance(error, HFValidationError):
        return UnsupportedModel(f"model: must be a directory, a .gguf file or a hub id, got {spec!r}")
    if isinstance(error, LocalEntryNotFoundError):
        return UnsupportedModel(f"{spec}: not in the hub's cache, and the hub cannot be reached")
    [reason, *_] = str(error).splitlines() or [type(error).__name__]
    if isinstance(error, HfHubHTTPError) and error.response.status_code in _NO_ACCESS:
        return UnsupportedModel(
            f"{spec}: the hub has no such model, or it is gated and the token has no access; accept its "
            f"license at the hub and set HF_TOKEN ({reason})"
        )
    return UnsupportedModel(f"{spec}: cannot be downloaded: {reason}")
