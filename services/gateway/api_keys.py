"""API keys from a file, which holds their SHA-256 and never the keys themselves.

    [[keys]]                          # one entry a key; a principal may have several
    principal = "team-a"
    sha256 = "9f86d0…"                # of the key's bytes, in hex
    expires = 2027-01-31T00:00:00Z    # may be left out

    [principals.team-a]               # limits of one principal; [defaults] holds them for all others
    max_sessions = 8
    tokens_per_s = 500
    burst_tokens = 20000
    max_priority = 10                 # 0 where it is not said

The file is looked at again as calls come in, at most once a second, and read anew where it has changed; one
that cannot be read then is reported, and what was read before stays in force.
"""

from __future__ import annotations

import hmac
import secrets
import time
import tomllib
from datetime import UTC, datetime
from hashlib import blake2b, sha256
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from services.common.logs import get_logger
from services.core.errors import Unauthenticated
from services.core.principal import ANONYMOUS_NAME, Principal, PrincipalLimits
from services.gateway.authentication import Authenticator

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from services.gateway.authentication import Presented

_log = get_logger(__name__)
_LOOK_AGAIN_S = 1.0
_MAX_KEY_BYTES = 1024
_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.@:/-]{1,128}$")]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True, allow_inf_nan=False)


class _Limits(_Strict):
    max_sessions: int | None = Field(default=None, ge=1)
    tokens_per_s: float | None = Field(default=None, gt=0)
    burst_tokens: int | None = Field(default=None, ge=1)
    max_priority: int | None = Field(default=None, ge=-(2**31), lt=2**31)

    def over(self, defaults: Self) -> PrincipalLimits:
        """Where these say nothing, those do."""
        said = defaults.model_dump(exclude_none=True) | self.model_dump(exclude_none=True)
        return PrincipalLimits(**{"max_priority": 0, **said})


class _Key(_Strict):
    principal: _Name
    sha256: str = Field(pattern=r"^[0-9a-fA-F]{64}$")
    expires: datetime | None = None


class _File(_Strict):
    keys: list[_Key]
    defaults: _Limits = _Limits()
    principals: dict[_Name, _Limits] = {}


class _Known:
    """One reading of the file: keys by a keyed hash, so that the time of a look-up tells nothing of them."""

    def __init__(self, read: _File) -> None:
        self._secret = secrets.token_bytes(32)
        self._keys = {self._tag(bytes.fromhex(key.sha256)): key for key in read.keys}
        names = {key.principal for key in read.keys}
        self._principals: Mapping[str, Principal] = MappingProxyType(
            {
                name: Principal(name, read.principals.get(name, _Limits()).over(read.defaults))
                for name in names
            }
        )

    def find(self, key: str, now: datetime) -> Principal:
        """Raises Unauthenticated."""
        presented = key.encode()[:_MAX_KEY_BYTES]
        digest = sha256(presented).digest()
        found = self._keys.get(self._tag(digest))
        if found is None or not hmac.compare_digest(digest, bytes.fromhex(found.sha256)):
            raise Unauthenticated("this API key is not known")
        if found.expires is not None and now >= found.expires:
            raise Unauthenticated("this API key has expired")
        return self._principals[found.principal]

    def _tag(self, digest: bytes) -> bytes:
        return blake2b(digest, key=self._secret, digest_size=16).digest()


class ApiKeys(Authenticator):
    """The keys of the file at `path`. Raises ValueError, naming what is wrong with it, or OSError."""

    def __init__(
        self,
        path: Path,
        *,
        clock: Callable[[], float] = time.monotonic,
        today: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._path = path
        self._clock = clock
        self._today = today
        self._looked_s = clock()
        self._seen = _version(path)
        self._known = _read(path)

    async def authenticate(self, presented: Presented) -> Principal:
        """See `Authenticator`."""
        self._look_again()
        if not presented.key:
            raise Unauthenticated("an API key is needed: `authorization: Bearer KEY` or `x-api-key: KEY`")
        return self._known.find(presented.key, self._today())

    def _look_again(self) -> None:
        """In passing: a small local file, seldom."""
        if self._clock() - self._looked_s < _LOOK_AGAIN_S:
            return
        self._looked_s = self._clock()
        try:
            version = _version(self._path)
            if version == self._seen:
                return
            self._seen = version
            self._known = _read(self._path)
        except (OSError, ValueError) as error:
            _log.error("the API keys could not be read anew; those read before stay", problem=str(error))
        else:
            _log.info("read the API keys anew")


def _version(path: Path) -> tuple[int, int, int]:
    """Another whenever the file is: a mounted Secret is replaced as a whole."""
    stat = path.stat()
    return stat.st_mtime_ns, stat.st_ino, stat.st_size


def _read(path: Path) -> _Known:
    try:
        read = _File.model_validate(tomllib.loads(path.read_text()))
        _check(read)
    except ValidationError as error:
        problems = "; ".join(f"{_place(problem['loc'])}: {problem['msg']}" for problem in error.errors())
        raise ValueError(f"{path}: {problems}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return _Known(read)


def _check(read: _File) -> None:
    """What a single entry does not show."""
    hashes = [key.sha256.lower() for key in read.keys]
    for index, key in enumerate(read.keys):
        if key.principal == ANONYMOUS_NAME:
            raise ValueError(f"keys[{index}].principal: {ANONYMOUS_NAME!r} is whoever has no key")
        if key.expires is not None and key.expires.tzinfo is None:
            raise ValueError(f"keys[{index}].expires: needs a time zone, such as Z")
        if hashes.index(hashes[index]) != index:
            raise ValueError(f"keys[{index}].sha256: is that of keys[{hashes.index(hashes[index])}] too")
    if unused := read.principals.keys() - {key.principal for key in read.keys}:
        raise ValueError(f"principals.{min(unused)}: has no key")


def _place(loc: tuple[int | str, ...]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).lstrip(".")
