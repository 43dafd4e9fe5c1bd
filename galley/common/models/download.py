"""Download hub models into the hub's cache, and compare each file with the hub's checksum.

`python -m galley.common.models.download MODEL...`

The log shows progress. A model that was downloaded and checked before is not downloaded again, and is enough
while the hub is away. Servers find it with HF_HUB_OFFLINE=1.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from galley.common.logs import get_logger, start_logging
from galley.common.models.files import IGNORED_FILES, MODEL_FILES, TOKENIZER_FILES, hub_model
from galley.common.models.hub import refused
from galley.core.errors import GalleyError, UnsupportedModel

_LOG = get_logger(__name__)
_POLL_S = 2.0
_STALE_S = 3600
"""Age of an unfinished file that no process writes to any more."""
_MB = 1_000_000


class Download:
    """One hub model, of which the files that match `patterns` are wanted, but for IGNORED_FILES."""

    def __init__(self, spec: str, patterns: Sequence[str], report_every_s: float) -> None:
        """Raise UnsupportedModel unless `spec` is a hub id."""
        # With its HTTP client it is slow to load.
        import huggingface_hub  # noqa: PLC0415
        from huggingface_hub.constants import HF_HUB_CACHE  # noqa: PLC0415
        from huggingface_hub.file_download import repo_folder_name  # noqa: PLC0415

        self._hub: Any = huggingface_hub  # which does not declare filter_repo_objects
        self._spec = spec
        self._name, self._revision = hub_model(spec)
        try:
            folder = repo_folder_name(repo_id=self._name, repo_type="model")
        except ValueError as error:
            raise refused(spec, error) from error
        self._patterns = list(patterns)
        self._filter = {"allow_patterns": self._patterns, "ignore_patterns": list(IGNORED_FILES)}
        self._report_every_s = report_every_s
        self._folder = Path(HF_HUB_CACHE) / folder

    def is_checked(self, revision: str | None = None) -> bool:
        """Return True if the cache holds all files of the revision and they were checked."""
        try:
            directory = self._snapshot(revision or self._revision, local_files_only=True)
        except OSError:
            return False
        return any(self._mark(directory.name, kind).exists() for kind in (self._patterns, list(MODEL_FILES)))

    def run(self) -> None:
        """Raise UnsupportedModel if the model can neither be downloaded nor is in the cache."""
        import httpx2  # noqa: PLC0415

        try:
            commit, files = self._listing()
        except (httpx2.HTTPError, OSError, ValueError) as error:
            if not self.is_checked():
                raise refused(self._spec, error) from error
            _LOG.warning("hub did not list the model; using the cache", model=self._spec, reason=str(error))
            return
        if not self.is_checked(commit):
            try:
                self._fetch(commit, files)
            except (httpx2.HTTPError, OSError) as error:
                raise refused(self._spec, error) from error
        self._refer_to(commit)
        _LOG.info("model ready", model=self._spec, commit=commit, files=len(files))

    def _listing(self) -> tuple[str, list[Any]]:
        api = self._hub.HfApi()
        commit = str(api.model_info(self._name, revision=self._revision).sha)
        tree = api.list_repo_tree(self._name, recursive=True, revision=commit)
        files = [entry for entry in tree if isinstance(entry, self._hub.hf_api.RepoFile)]
        matching = self._hub.utils.filter_repo_objects(files, **self._filter, key=lambda file: file.path)
        return commit, list(matching)

    def _fetch(self, commit: str, files: list[Any]) -> None:
        self._remove_stale()
        size = sum(file.size for file in files)
        missing = size - self._received(files)
        self._folder.mkdir(parents=True, exist_ok=True)
        if missing > (free := shutil.disk_usage(self._folder).free):
            raise UnsupportedModel(
                f"{self._spec}: needs {missing // _MB} MB more in {self._folder}, got {free // _MB} MB free"
            )
        _LOG.info(
            "model download started", model=self._spec, commit=commit, files=len(files), size_mb=size // _MB
        )
        # A second time, if files came damaged.
        if self._problems(commit, files, size) and (problems := self._problems(commit, files, size)):
            raise UnsupportedModel(f"{self._spec}: {'; '.join(problems)}")
        mark = self._mark(commit, self._patterns)
        mark.parent.mkdir(exist_ok=True)
        mark.touch()

    def _problems(self, commit: str, files: list[Any], size: int) -> list[str]:
        """Download what is missing; remove damaged files, and return what is wrong with each."""
        with self._progress(files, size):
            directory = self._snapshot(commit)
        problems = [problem for file in files if (problem := _problem(directory / file.path, file))]
        if problems:
            _LOG.warning("model files removed", model=self._spec, problems=problems)
        return problems

    def _snapshot(self, revision: str | None, *, local_files_only: bool = False) -> Path:
        directory = self._hub.snapshot_download(
            self._name,
            revision=revision,
            local_files_only=local_files_only,
            **self._filter,
        )
        return Path(directory)

    def _refer_to(self, commit: str) -> None:
        """Make servers that are offline find the commit under the name of its branch or tag."""
        revision = self._revision or "main"
        if revision != commit:
            reference = self._folder / "refs" / revision
            reference.parent.mkdir(parents=True, exist_ok=True)
            scratch = reference.with_name(f".{reference.name}.{os.getpid()}")
            scratch.write_text(commit, encoding="ascii")
            scratch.replace(reference)

    def _mark(self, commit: str, patterns: list[str]) -> Path:
        kind = "model" if patterns == list(MODEL_FILES) else "tokenizer"
        return self._folder / "checked" / f"{commit}.{kind}"

    def _remove_stale(self) -> None:
        """Remove what killed downloads left: they are not continued, and would fill the volume."""
        for path in (self._folder / "blobs").glob("*.incomplete"):
            with suppress(FileNotFoundError):  # another download has just finished it
                if path.stat().st_mtime < time.time() - _STALE_S:
                    path.unlink()

    @contextmanager
    def _progress(self, files: list[Any], size: int) -> Iterator[None]:
        """Log the progress of the download until the end of the block."""
        done = threading.Event()

        def report() -> None:
            started_s, before = time.monotonic(), self._received(files)
            while not done.wait(self._report_every_s):
                received = self._received(files)
                _LOG.info(
                    "model download progressed",
                    model=self._spec,
                    received_mb=received // _MB,
                    size_mb=size // _MB,
                    percent=100 * received // max(1, size),
                    mb_per_s=round((received - before) / _MB / (time.monotonic() - started_s), 1),
                )

        thread = threading.Thread(target=report)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _received(self, files: list[Any]) -> int:
        """Return how many bytes of the files are on the disk, unfinished ones included."""
        total = 0
        for file in files:
            digest = file.lfs.sha256 if file.lfs else file.blob_id
            sizes = [_size(path) for path in (self._folder / "blobs").glob(f"{digest}*")]
            total += min(file.size, max(sizes, default=0))
        return total


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # renamed meanwhile
        return 0


def _problem(path: Path, file: Any) -> str:
    """Return what is wrong with a file, and remove it; return "" if the hub has the same content."""
    if file.lfs:
        algorithm, expected, head = "sha256", file.lfs.sha256, b""
    else:  # git's name of the content
        algorithm, expected, head = "sha1", file.blob_id, f"blob {path.stat().st_size}\0".encode()
    with path.open("rb") as content:
        actual = hashlib.file_digest(content, partial(_seeded, algorithm, head)).hexdigest()
    if actual == expected:
        return ""
    path.resolve().unlink()
    path.unlink(missing_ok=True)
    return f"{file.path}: {algorithm} must be {expected}, got {actual}"


def _seeded(algorithm: str, head: bytes) -> Any:
    return hashlib.new(algorithm, head, usedforsecurity=False)


def _wait(downloads: Sequence[Download], report_every_s: float) -> None:
    """Wait until another process has downloaded and checked all models."""
    reported_s = float("-inf")
    while not all(download.is_checked() for download in downloads):
        if time.monotonic() >= reported_s + report_every_s:
            reported_s = time.monotonic()
            _LOG.info("waiting for the download of the models")
        time.sleep(_POLL_S)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m galley.common.models.download", description=__doc__)
    parser.add_argument("models", nargs="+", metavar="MODEL", help="hub id, or hub id@revision")
    parser.add_argument("--tokenizer", action="store_true", help="only the files that a gateway needs")
    parser.add_argument("--wait", action="store_true", help="wait until another process has downloaded them")
    parser.add_argument("--report-every-s", type=float, default=10.0, help="time between two reports")
    arguments = parser.parse_args(argv)
    start_logging("download")
    patterns = TOKENIZER_FILES if arguments.tokenizer else MODEL_FILES
    try:
        downloads = [Download(model, patterns, arguments.report_every_s) for model in arguments.models]
        if arguments.wait:
            _wait(downloads, arguments.report_every_s)
            return 0
        for download in downloads:
            download.run()
    except GalleyError as error:
        _LOG.error("model download failed", reason=str(error))
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
