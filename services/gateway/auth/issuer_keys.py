"""The keys of an issuer, held here and fetched anew beside the calls, never for each.

They are fetched when a call finds them older than `refresh_s`, or finds none of its token's id; and never
sooner than FLOOR_S after the last time, so that made-up ids do not have us pester the issuer. A call waits
for that only where it has nothing to go by: no keys, no key of its id, or ones that have not been looked
after since long before it. While the issuer cannot be reached the old ones serve, for `stale_s`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from galley.common.server.logs import get_logger
from galley.common.tls.files import WatchedFiles
from galley.core.errors import CallerUnknown

if TYPE_CHECKING:
    from services.gateway.auth.jwks import KeySet

_log = get_logger(__name__)
FLOOR_S = 10.0
REFRESH_S = 300.0
STALE_S = 21_600.0


class KeySource(Protocol):
    """Where keys are had."""

    async def current(self) -> KeySet:
        """Those that are known. Raises CallerUnknown where there are none that may be used."""
        ...

    async def newer(self) -> KeySet:
        """The same, after a look for others where one is due."""
        ...


class KeyFile(KeySource):
    """Those of a file, which is watched."""

    def __init__(self, file: WatchedFiles[KeySet]) -> None:
        self._file = file

    async def current(self) -> KeySet:
        """See `KeySource`."""
        return self._file.current()

    async def newer(self) -> KeySet:
        """No others: it has just been looked at."""
        return self._file.current()


@dataclass(frozen=True, slots=True)
class _Held:
    keys: KeySet
    since_s: float


class FetchedKeys(KeySource):
    """What `fetch` gets, which raises ValueError or OSError, in its own good time, where it gets nothing."""

    def __init__(
        self,
        fetch: Callable[[], Awaitable[KeySet]],
        refresh_s: float = REFRESH_S,
        stale_s: float = STALE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fetch = fetch
        self._refresh_s = refresh_s
        self._stale_s = stale_s
        self._clock = clock
        self._held: _Held | None = None
        self._tried_s: float | None = None
        self._failed = False
        self._fetching: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Have the first ones fetched; in the event loop."""
        self._look()

    async def current(self) -> KeySet:
        """See `KeySource`."""
        age_s = self._age_s()
        if age_s > self._refresh_s:
            self._look()
        neglected = age_s > 2 * self._refresh_s and not self._failed
        if neglected or age_s > self._stale_s:
            await self._wait()
        return self._keys()

    async def newer(self) -> KeySet:
        """See `KeySource`."""
        self._look()
        await self._wait()
        return self._keys()

    def _keys(self) -> KeySet:
        if self._held is None or self._age_s() > self._stale_s:
            raise CallerUnknown("the keys of the tokens' issuer cannot be had at present; try again later")
        return self._held.keys

    def _age_s(self) -> float:
        return float("inf") if self._held is None else self._clock() - self._held.since_s

    def _look(self) -> None:
        """Begin to fetch, unless that is under way or was tried just now."""
        if self._fetching is not None:
            return
        if self._tried_s is None or self._clock() - self._tried_s >= FLOOR_S:
            self._tried_s = self._clock()
            self._fetching = asyncio.create_task(self._refresh())

    async def _wait(self) -> None:
        """Until what is under way is done; whoever waits may go, and it goes on."""
        if self._fetching is not None:
            await asyncio.wait({self._fetching})

    async def _refresh(self) -> None:
        asked_s = self._clock()
        try:
            self._held = _Held(await self._fetch(), asked_s)
        except (OSError, ValueError) as error:
            self._failed = True
            _log.error("the keys of the tokens' issuer could not be fetched", problem=str(error))
        else:
            self._failed = False
            _log.debug("fetched the keys of the tokens' issuer", keys=len(self._held.keys.keys))
        finally:
            self._fetching = None
