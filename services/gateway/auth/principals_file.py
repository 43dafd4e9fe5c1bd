"""The principals file: API keys, as hashes, and the limits of principals.

[[keys]]                          # one entry a key; several keys may name one principal
principal = "team-a"
sha256 = "9f86d0…"                # SHA-256 of the key, in hex
expires = 2027-01-31T00:00:00Z    # optional

[principals.team-a]               # limits of one principal; those not given here come from [defaults]
max_sessions = 8
tokens_per_s = 500
burst_tokens = 20000
max_priority = 10                 # default: 0
learn = true                      # drafts may be trained on its sessions; default: false

[principals."jwt:alice@example.com"]    # a principal with a token
max_sessions = 2
"""

from __future__ import annotations

import hmac
import secrets
import tomllib
from collections.abc import Mapping
from datetime import datetime  # pydantic reads it
from hashlib import blake2b, sha256
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from galley.common.constraints import constraint_of
from galley.common.tls.files import NamedFile
from galley.core.admission.admission import ANONYMOUS_NAME, TOKEN_PREFIX, Principal, PrincipalLimits
from galley.core.errors import Unauthenticated

_MAX_KEY_BYTES = 1024
_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.@:/%|~-]{1,256}$")]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True, allow_inf_nan=False)


class _Limits(_Strict):
    max_sessions: int | None = Field(default=None, ge=1)
    tokens_per_s: float | None = Field(default=None, gt=0)
    burst_tokens: int | None = Field(default=None, ge=1)
    max_priority: int | None = Field(default=None, ge=-(2**31), lt=2**31)

    def or_defaults(self, defaults: _Limits) -> PrincipalLimits:
        given = self.model_dump(exclude_none=True, exclude={"learn"})
        values = defaults.model_dump(exclude_none=True) | given
        return PrincipalLimits(**{"max_priority": 0, **values})


class _Principal(_Limits):
    learn: bool = False  # not in [defaults]: each principal allows it for itself


class _Key(_Strict):
    principal: _Name
    sha256: str = Field(pattern=r"^[0-9a-fA-F]{64}$")
    expires: datetime | None = None


class _File(_Strict):
    keys: list[_Key]
    defaults: _Limits = _Limits()
    principals: dict[_Name, _Principal] = {}


class Principals:
    """Index keys by a keyed hash, so that lookup time reveals nothing about them."""

    def __init__(self, file: _File) -> None:
        self._secret = secrets.token_bytes(32)
        self._keys = {self._tag(bytes.fromhex(key.sha256)): key for key in file.keys}
        self._defaults = file.defaults
        self._principals: Mapping[str, _Principal] = file.principals

    def by_key(self, key: str, now: datetime) -> Principal | None:
        """Return the principal of `key`, None if it is unknown. Raise Unauthenticated if it has expired."""
        presented = key.encode()
        if len(presented) > _MAX_KEY_BYTES:
            return None
        digest = sha256(presented).digest()
        entry = self._keys.get(self._tag(digest))
        if entry is None or not hmac.compare_digest(digest, bytes.fromhex(entry.sha256)):
            return None
        if entry.expires is not None and now >= entry.expires:
            raise Unauthenticated("this API key has expired")
        return self.named(entry.principal)

    def named(self, name: str) -> Principal:
        principal = self._principals.get(name, _Principal())
        return Principal(name, principal.or_defaults(self._defaults), learns=principal.learn)

    def _tag(self, digest: bytes) -> bytes:
        return blake2b(digest, key=self._secret, digest_size=16).digest()


def read_principals(file: NamedFile) -> Principals:
    """Return the principals in `file`. Raise BadFile, which names the problem."""
    content = file.read()
    try:
        parsed = _File.model_validate(tomllib.loads(content.decode()))
        _check(parsed)
    except ValidationError as error:
        problems = "; ".join(
            f"{_place(problem['loc'])}: {constraint_of(problem)}" for problem in error.errors()
        )
        raise file.bad(problems) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise file.bad(f"must be TOML in UTF-8: {error}") from None
    except ValueError as error:
        raise file.bad(str(error)) from None
    return Principals(parsed)


def _check(file: _File) -> None:
    """Raise ValueError for problems between entries, which the model does not show."""
    hashes = [key.sha256.lower() for key in file.keys]
    first = {digest: index for index, digest in reversed(list(enumerate(hashes)))}
    for index, key in enumerate(file.keys):
        if key.principal == ANONYMOUS_NAME:
            raise ValueError(f"keys[{index}].principal: must not be {ANONYMOUS_NAME!r}, which means no key")
        if key.principal.startswith(TOKEN_PREFIX):
            raise ValueError(
                f"keys[{index}].principal: must not begin with {TOKEN_PREFIX!r}, which means a token"
            )
        if key.expires is not None and key.expires.tzinfo is None:
            raise ValueError(f"keys[{index}].expires: must have a time zone, such as Z")
        if first[hashes[index]] != index:
            raise ValueError(
                f"keys[{index}].sha256: must be unique, got that of keys[{first[hashes[index]]}]"
            )
    known = {key.principal for key in file.keys}
    if unused := {name for name in file.principals if not name.startswith(TOKEN_PREFIX)} - known:
        what = f"must be the principal of an entry of keys, or begin with {TOKEN_PREFIX}"
        raise ValueError(f"principals.{min(unused)}: {what}")


def _place(loc: tuple[int | str, ...]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).lstrip(".")
