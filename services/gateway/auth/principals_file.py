"""The file of principals: their API keys, as hashes, and their limits.

[[keys]]                          # one entry a key; a principal may have several
principal = "team-a"
sha256 = "9f86d0…"                # of the key's bytes, in hex
expires = 2027-01-31T00:00:00Z    # may be left out

[principals.team-a]               # limits of one principal; [defaults] holds them for all others
max_sessions = 8
tokens_per_s = 500
burst_tokens = 20000
max_priority = 10                 # 0 where it is not said

[principals."jwt:alice@example.com"]    # of one who brings a token
max_sessions = 2
"""

from __future__ import annotations

import hmac
import secrets
import tomllib
from collections.abc import Mapping
from datetime import datetime  # pydantic reads it
from hashlib import blake2b, sha256
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from galley.common.tls.files import NamedFile
from galley.core.admission.principal import ANONYMOUS_NAME, TOKEN_PREFIX, Principal, PrincipalLimits
from galley.core.errors import Unauthenticated

_MAX_KEY_BYTES = 1024
_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.@:/%|-]{1,256}$")]


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


class Principals:
    """One reading of the file: keys by a keyed hash, so that the time of a look-up tells nothing of them."""

    def __init__(self, read: _File) -> None:
        self._secret = secrets.token_bytes(32)
        self._keys = {self._tag(bytes.fromhex(key.sha256)): key for key in read.keys}
        self._defaults = read.defaults
        self._limits: Mapping[str, _Limits] = read.principals

    def by_key(self, key: str, now: datetime) -> Principal | None:
        """Whose `key` it is; None if it is not known. Raises Unauthenticated if it has expired."""
        presented = key.encode()
        if len(presented) > _MAX_KEY_BYTES:
            return None
        digest = sha256(presented).digest()
        found = self._keys.get(self._tag(digest))
        if found is None or not hmac.compare_digest(digest, bytes.fromhex(found.sha256)):
            return None
        if found.expires is not None and now >= found.expires:
            raise Unauthenticated("this API key has expired")
        return self.named(found.principal)

    def named(self, name: str) -> Principal:
        """With the limits of its own, or the defaults."""
        return Principal(name, self._limits.get(name, _Limits()).over(self._defaults))

    def _tag(self, digest: bytes) -> bytes:
        return blake2b(digest, key=self._secret, digest_size=16).digest()


def read_principals(file: NamedFile) -> Principals:
    """Raises BadFile, which says what is wrong with it."""
    content = file.read()
    try:
        read = _File.model_validate(tomllib.loads(content.decode()))
        _check(read)
    except ValidationError as error:
        problems = "; ".join(f"{_place(problem['loc'])}: {problem['msg']}" for problem in error.errors())
        raise file.bad(problems) from None
    except ValueError as error:
        raise file.bad(str(error)) from None
    return Principals(read)


def _check(read: _File) -> None:
    """What a single entry does not show."""
    hashes = [key.sha256.lower() for key in read.keys]
    first = {digest: index for index, digest in reversed(list(enumerate(hashes)))}
    for index, key in enumerate(read.keys):
        if key.principal == ANONYMOUS_NAME:
            raise ValueError(f"keys[{index}].principal: {ANONYMOUS_NAME!r} is whoever has no key")
        if key.principal.startswith(TOKEN_PREFIX):
            raise ValueError(f"keys[{index}].principal: {TOKEN_PREFIX!r} begins names of those with tokens")
        if key.expires is not None and key.expires.tzinfo is None:
            raise ValueError(f"keys[{index}].expires: needs a time zone, such as Z")
        if first[hashes[index]] != index:
            raise ValueError(f"keys[{index}].sha256: is that of keys[{first[hashes[index]]}] too")
    known = {key.principal for key in read.keys}
    if unused := {name for name in read.principals if not name.startswith(TOKEN_PREFIX)} - known:
        raise ValueError(f"principals.{min(unused)}: has no key")


def _place(loc: tuple[int | str, ...]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).lstrip(".")
