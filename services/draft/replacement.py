"""Replace the weights of a running draft (docs/decisions/074-swap-weights-between-steps.md).

The present weights serve until the new ones are loaded and have proposed once. Then requests that begin use
the new ones, and those that are open end with the ones that they began with.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import TypeVar

from galley.common.logs import get_logger
from galley.common.server.process import in_passing_thread
from galley.core.errors import (
    CallerFault,
    GalleyError,
    InvalidField,
    OtherVersion,
    OutOfMemory,
    Overloaded,
    Unavailable,
    Unimplemented,
)
from galley.pb.galley.v1 import galley_pb2 as pb
from services.draft.loading import load_replacement
from services.draft.loop import DraftLoop
from services.draft.scratch import scratch_directory
from services.draft.settings import DraftSettings
from services.draft.strategies.base import Strategy
from services.draft.strategies.ngram import Lookups
from services.draft.telemetry import LoadResult
from services.draft.upload import receive_draft

T = TypeVar("T")

_LOG = get_logger(__name__)
_RETRY_AFTER_S = 10.0


class DraftReplacement:
    """Load trained drafts into `loop`, one at a time, and name the version that serves in `info`."""

    def __init__(
        self, settings: DraftSettings, lookups: Lookups, loop: DraftLoop, info: pb.GetDraftInfoResponse
    ) -> None:
        self._settings = settings
        self._lookups = lookups
        self._loop = loop
        self._info = info
        self._one_at_a_time = asyncio.Lock()

    async def load(
        self,
        first: pb.LoadDraftRequest,
        requests: AsyncIterator[pb.LoadDraftRequest],
        accept: Callable[[], Awaitable[None]],
    ) -> str:
        """Replace the weights by the draft that `first` describes and `requests` have; return its version.

        Call `accept` once the description of its files is accepted.

        A call that raises, or is cancelled, changes nothing. Raise Unimplemented, Overloaded, Unavailable,
        OtherVersion, InvalidField, and DeadlinePassed.
        """
        result: LoadResult = "refused"

        async def accept_and_note() -> None:
            nonlocal result
            result = "failed"
            await accept()

        try:
            version = await self._load(first, requests, accept_and_note)
            result = "loaded"
        finally:
            if self._loop.meter is not None:
                self._loop.meter.loaded(result)
        return version

    async def _load(
        self,
        first: pb.LoadDraftRequest,
        requests: AsyncIterator[pb.LoadDraftRequest],
        accept: Callable[[], Awaitable[None]],
    ) -> str:
        if not self._info.max_load_bytes:
            raise Unimplemented("LoadDraft", "must be allowed by --max-load-mib")
        if self._loop.draining.is_set():
            raise Unavailable("the replica is draining")
        if self._one_at_a_time.locked():
            raise Overloaded("another draft is being loaded", _RETRY_AFTER_S)
        async with self._one_at_a_time:
            if first.draft.replaces not in {"", self._info.version}:
                raise OtherVersion(self._info.version, first.draft.replaces)
            try:
                async with scratch_directory() as directory:
                    most = self._info.max_load_bytes
                    digest = await receive_draft(first, requests, accept, directory, most)
                    strategies = await self._loaded(directory)
            except OSError as error:
                raise Unavailable(
                    f"the files of the draft cannot be kept: {error.strerror or error}"
                ) from error
            self._loop.exchange(strategies)
            version = first.draft.version or digest
            previous, self._info.version, self._info.weights_digest = self._info.version, version, digest
        _LOG.info("draft weights replaced", version=version, previous=previous)
        return version

    async def _loaded(self, directory: Path) -> Mapping[str, Strategy]:
        loading = asyncio.ensure_future(
            in_passing_thread(load_replacement, self._settings, directory, self._info, self._lookups)
        )
        try:
            return await _result_of_thread(loading)
        except OutOfMemory as error:
            raise Overloaded(_problem(error, directory), _RETRY_AFTER_S) from error
        except Unavailable as error:
            raise Unavailable(_problem(error, directory)) from error
        except CallerFault as error:
            raise InvalidField("draft", _problem(error, directory)) from error


async def _result_of_thread(loading: asyncio.Task[T]) -> T:
    """Return the result; if this call is cancelled, end no earlier than the thread, which goes on."""
    cancelled: asyncio.CancelledError | None = None
    while not loading.done():
        try:
            await asyncio.wait({loading})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        loading.exception()  # it is of no interest any more
        raise cancelled
    return loading.result()


def _problem(error: GalleyError, directory: Path) -> str:
    """Return the message without the directory, which is gone and was never the caller's."""
    named = str(error).replace(f"{directory}/", "").replace(f"{directory}: ", "")
    return named.replace(str(directory), "the draft").replace(directory.name, "the draft")
