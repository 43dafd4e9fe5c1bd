"""Asking an issuer of tokens for its keys, over https: what it answers is bounded in size and in time.

Redirects are not followed: where the keys are is for the settings, or for the issuer's OpenID configuration,
to say.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import httpx2

from galley.common.tls.files import NamedFile
from services.gateway.auth.jwks import MAX_BYTES, KeySet, parse_jwks, parse_object
from services.gateway.auth.settings import check_https

_C = TypeVar("_C")
_T = TypeVar("_T")
TIMEOUT_S = 5.0
_CONFIGURATION = "/.well-known/openid-configuration"


@dataclass(frozen=True, slots=True)
class Issuer:
    """`jwks_url` is empty where its OpenID configuration says it; `ca_file` where the system's CAs vouch."""

    name: str
    jwks_url: str = ""
    ca_file: str = ""
    timeout_s: float = TIMEOUT_S

    async def keys(self) -> KeySet:
        """What it publishes at present. Raises ValueError or OSError, in `timeout_s` or little more."""
        url = self.jwks_url
        try:
            async with asyncio.timeout(self.timeout_s):
                # In a thread: the system's authorities take tens of milliseconds. Each time: they change.
                trusted = await asyncio.to_thread(self.trust)
                async with httpx2.AsyncClient(verify=trusted, timeout=self.timeout_s) as client:
                    url = url or await self._discover(client)
                    return _told(url, parse_jwks, await _get(client, url))
        except TimeoutError:
            raise OSError(f"{url or self.name}: no answer in {self.timeout_s:g} s") from None
        except (httpx2.HTTPError, httpx2.InvalidURL, UnicodeError) as error:
            raise OSError(f"{url or self.name}: {str(error) or type(error).__name__}") from None

    def trust(self) -> ssl.SSLContext:
        """Whose word is taken for who answers. Raises BadFile if `ca_file` is of no use."""
        try:
            return ssl.create_default_context(cafile=self.ca_file or None)
        except OSError as error:
            raise NamedFile("jwt_ca_file", self.ca_file).bad(error.strerror or str(error)) from None

    async def _discover(self, client: httpx2.AsyncClient) -> str:
        url = self.name.removesuffix("/") + _CONFIGURATION
        told = _told(url, parse_object, await _get(client, url))
        if told.get("issuer") != self.name:
            raise ValueError(f"{url}: is of another issuer")
        found = told.get("jwks_uri")
        if not isinstance(found, str) or not found:
            raise ValueError(f"{url}: names no jwks_uri")
        return _told(url, check_https, found)


async def _get(client: httpx2.AsyncClient, url: str) -> bytes:
    """The body of a good answer, MAX_BYTES and a little more of it. Raises OSError."""
    # Packed, it could be of any size.
    wanted = {"Accept": "application/json", "Accept-Encoding": "identity"}
    async with client.stream("GET", url, headers=wanted) as response:
        if response.status_code != httpx2.codes.OK:
            raise OSError(f"{url}: HTTP {response.status_code}")
        if response.headers.get("content-encoding", "identity") != "identity":
            raise OSError(f"{url}: the answer is packed, which was not asked for")
        content = b""
        async for piece in response.aiter_raw():
            content += piece
            if len(content) > MAX_BYTES:
                break
        return content


def _told(url: str, read: Callable[[_C], _T], content: _C) -> _T:
    """What `read` makes of it. Raises ValueError, which says where it came from."""
    try:
        return read(content)
    except ValueError as error:
        raise ValueError(f"{url}: {error}") from None
