"""The public keys that a token issuer publishes as a JWKS (RFC 7517): fetch, parse and cache them.

The keys come from a watched file (`JwksFile`) or over https (`CachedJwks` over `JwksClient`). The cache is
refreshed when a call meets keys older than `refresh_s`, or a token with an unknown key id, and at most every
MIN_FETCH_INTERVAL_S, so that forged key ids do not flood the issuer. A call waits for a fetch only if there
are no keys, none with the token's id, or none that were checked recently. While the issuer is unreachable,
the cached keys stay valid for `stale_s`.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx2
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from jwt import PyJWK
from jwt.exceptions import PyJWTError

from galley.common.logs import get_logger
from galley.common.tls.files import CALL_PATIENCE_S, NamedFile, WatchedFiles
from galley.core.errors import AuthenticationUnavailable
from services.gateway.settings import check_https

_T = TypeVar("_T")
_log = get_logger(__name__)

MIN_FETCH_INTERVAL_S = 10.0
REFRESH_S = 300.0
STALE_S = 21_600.0
FETCH_TIMEOUT_S = 5.0
MAX_BYTES = 256 * 1024
_MAX_KEYS = 100
_MIN_RSA_BITS = 2048
_RSA_ALGORITHMS = frozenset({"RS256", "RS384", "RS512", "PS256", "PS384", "PS512"})
_CURVE_ALGORITHMS = {
    "secp256r1": frozenset({"ES256"}),
    "secp384r1": frozenset({"ES384"}),
    "secp521r1": frozenset({"ES512"}),
}


# -------------------------------------------------------------------------------------- key sets --


@dataclass(frozen=True, slots=True)
class SigningKey:
    key_id: str | None
    algorithms: frozenset[str]
    public: Any


class KeySet:
    def __init__(self, keys: Sequence[SigningKey]) -> None:
        self.keys = tuple(keys)

    def find(self, key_id: str | None, algorithm: str) -> SigningKey | None:
        """Return the algorithm's key with this id, or without an id its only key; None if none fits."""
        fitting = [key for key in self.keys if algorithm in key.algorithms]
        if key_id is not None:
            return next((key for key in fitting if key.key_id == key_id), None)
        return fitting[0] if len(fitting) == 1 else None


def read_jwks(file: NamedFile) -> KeySet:
    """Return the keys in `file`. Raise BadFile, which names the problem."""
    content = file.read()
    try:
        return parse_jwks(content)
    except ValueError as error:
        raise file.bad(str(error)) from None


def parse_jwks(content: bytes) -> KeySet:
    """Parse a JWKS. Raise ValueError if it is malformed or has no usable key.

    Keys for other purposes or of unknown kinds are skipped, as the RFC demands. Secret and private keys are
    skipped too: whoever can read the JWKS could sign with them.
    """
    entries = parse_object(content).get("keys")
    if not isinstance(entries, list) or len(entries) > _MAX_KEYS:
        raise ValueError(f"must be a JWKS: `keys` must be a list of at most {_MAX_KEYS} keys")
    keys = [key for entry in entries if isinstance(entry, dict) and (key := _signing_key(entry)) is not None]
    if not keys:
        raise ValueError("must have a public key for RSA (2048 bits or more), ECDSA or EdDSA signatures")
    return KeySet(keys)


def parse_object(content: bytes) -> dict[str, Any]:
    """Return the JSON object in `content`. Raise ValueError if it is none, or larger than MAX_BYTES."""
    if len(content) > MAX_BYTES:
        raise ValueError(f"must be at most {MAX_BYTES} bytes, is larger")
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ValueError("must be a JSON object")  # noqa: TRY004  # the content is at fault, not a type
    return value


def _signing_key(entry: dict[str, Any]) -> SigningKey | None:
    operations, only = entry.get("key_ops", ["verify"]), entry.get("alg")
    if entry.get("use", "sig") != "sig" or not isinstance(operations, list) or "verify" not in operations:
        return None
    if entry.get("kty") == "oct" or "d" in entry:
        return None
    try:
        public = PyJWK(entry).key
    except (PyJWTError, ValueError, TypeError, KeyError):
        return None
    algorithms = _algorithms(public)
    if only is not None:
        algorithms = frozenset(name for name in algorithms if name == only)
    key_id = entry.get("kid")
    if not algorithms or not (key_id is None or isinstance(key_id, str)):
        return None
    return SigningKey(key_id, algorithms, public)


def _algorithms(public: object) -> frozenset[str]:
    if isinstance(public, RSAPublicKey):
        return _RSA_ALGORITHMS if public.key_size >= _MIN_RSA_BITS else frozenset()
    if isinstance(public, EllipticCurvePublicKey):
        return _CURVE_ALGORITHMS.get(public.curve.name, frozenset())
    return frozenset({"EdDSA"}) if isinstance(public, Ed25519PublicKey) else frozenset()


# --------------------------------------------------------------------------------------- sources --


class JwksFile:
    def __init__(self, file: WatchedFiles[KeySet]) -> None:
        self._file = file

    async def current(self) -> KeySet:
        return await self._file.checked(CALL_PATIENCE_S)

    refreshed = current

    def start(self) -> None:
        pass


class CachedJwks:
    """A cache over `fetch`, which raises ValueError or OSError where it fails."""

    def __init__(
        self,
        fetch: Callable[[], Awaitable[KeySet]],
        refresh_s: float = REFRESH_S,
        stale_s: float = STALE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Fetch keys again after `refresh_s` seconds, and use none older than `stale_s` seconds."""
        self._fetch = fetch
        self._refresh_s = refresh_s
        self._stale_s = stale_s
        self._clock = clock
        self._fetched: KeySet | None = None
        self._fetched_s = 0.0
        self._tried_s: float | None = None
        self._failed = False
        self._fetching: asyncio.Task[None] | None = None

    async def current(self) -> KeySet:
        """Return the cached keys; start a fetch if they are older than `refresh_s`.

        Wait for it if they are missing or older than `stale_s`, or older than twice `refresh_s` while the
        last fetch has not failed. Raise AuthenticationUnavailable if there are still none, or too old ones.
        """
        age_s = self._age_s()
        if age_s > self._refresh_s:
            self.start()
        unchecked = age_s > 2 * self._refresh_s and not self._failed
        if unchecked or age_s > self._stale_s:
            await self._wait()
        return self._keys()

    async def refreshed(self) -> KeySet:
        """Fetch the keys, at most once in MIN_FETCH_INTERVAL_S, and return them. Raise like `current`."""
        self.start()
        await self._wait()
        return self._keys()

    def _keys(self) -> KeySet:
        if self._fetched is None or self._age_s() > self._stale_s:
            raise AuthenticationUnavailable("the keys of the token issuer cannot be fetched; try again later")
        return self._fetched

    def _age_s(self) -> float:
        return float("inf") if self._fetched is None else self._clock() - self._fetched_s

    def start(self) -> None:
        """Start a fetch unless one runs or started less than MIN_FETCH_INTERVAL_S ago, in the event loop."""
        if self._fetching is not None:
            return
        if self._tried_s is None or self._clock() - self._tried_s >= MIN_FETCH_INTERVAL_S:
            self._tried_s = self._clock()
            self._fetching = asyncio.create_task(self._refresh())

    async def _wait(self) -> None:
        """Wait for the running fetch, which goes on if the waiting call is cancelled."""
        if self._fetching is not None:
            await asyncio.wait({self._fetching})

    async def _refresh(self) -> None:
        started_s = self._clock()
        try:
            self._fetched = await self._fetch()
        except (OSError, ValueError) as error:
            self._failed = True
            _log.error("jwks fetch failed", error=str(error))
        else:
            self._fetched_s, self._failed = started_s, False
            _log.debug("jwks fetched", keys=len(self._fetched.keys))
        finally:
            self._fetching = None


# ----------------------------------------------------------------------------------------- https --


class JwksClient:
    """Fetch the keys of an issuer over https, with bounds on size and time, and without redirects.

    An empty `jwks_url` is looked up in the issuer's OpenID configuration. An empty `ca_file` means the
    system's authorities.
    """

    def __init__(
        self, issuer: str, jwks_url: str = "", ca_file: str = "", timeout_s: float = FETCH_TIMEOUT_S
    ) -> None:
        """Raise BadFile if `ca_file` is unusable; later, the earlier authorities stay in use."""
        self._issuer = issuer
        self._jwks_url = jwks_url
        self._timeout_s = timeout_s
        self._contexts: WatchedFiles[ssl.SSLContext] | None = None
        if ca_file:
            file = NamedFile("jwt_ca_file", ca_file)
            self._contexts = WatchedFiles([file], lambda: _context_of(file))

    async def fetch(self) -> KeySet:
        """Return the published keys. Raise ValueError or OSError, after `timeout_s` at the latest."""
        url = self._jwks_url
        try:
            async with asyncio.timeout(self._timeout_s):
                context = await self._context()
                async with httpx2.AsyncClient(verify=context, timeout=self._timeout_s) as client:
                    url = url or await _get(client, self._configuration_url, self._jwks_uri)
                    return await _get(client, url, parse_jwks)
        except TimeoutError:
            problem = f"no complete response within {self._timeout_s:g} s"
            raise OSError(f"{url or self._issuer}: {problem}") from None
        except (httpx2.HTTPError, httpx2.InvalidURL, UnicodeError) as error:
            raise OSError(f"{url or self._issuer}: {str(error) or type(error).__name__}") from None

    async def _context(self) -> ssl.SSLContext:
        """Return the context that verifies the issuer's host, by the authorities of this moment."""
        if self._contexts is not None:
            return await self._contexts.checked()
        # In a thread, because it takes tens of ms.
        return await asyncio.to_thread(ssl.create_default_context)

    @property
    def _configuration_url(self) -> str:
        return self._issuer.removesuffix("/") + "/.well-known/openid-configuration"

    def _jwks_uri(self, content: bytes) -> str:
        configuration = parse_object(content)
        if configuration.get("issuer") != self._issuer:
            raise ValueError(f"issuer: must be {self._issuer}, is another")
        try:
            return check_https(str(configuration.get("jwks_uri") or None))
        except ValueError as error:
            raise ValueError(f"jwks_uri: {error}") from None


def _context_of(file: NamedFile) -> ssl.SSLContext:
    # OpenSSL takes ASCII; other characters can only be in comments between the certificates.
    authorities = file.read().decode("ascii", errors="ignore")
    bad = file.bad("must hold certificates in PEM, got none or a broken one")
    if not authorities:
        raise bad  # without any, the context would trust those of the system
    try:
        return ssl.create_default_context(cadata=authorities)
    except (ssl.SSLError, ValueError):
        raise bad from None


async def _get(client: httpx2.AsyncClient, url: str, parse: Callable[[bytes], _T]) -> _T:
    """Return `parse` of the body, read to little more than MAX_BYTES. Raise OSError or ValueError."""
    # A compressed body could expand to any size.
    headers = {"Accept": "application/json", "Accept-Encoding": "identity"}
    async with client.stream("GET", url, headers=headers) as response:
        if response.status_code != httpx2.codes.OK:
            raise OSError(f"{url}: HTTP {response.status_code}")
        if response.headers.get("content-encoding", "identity") != "identity":
            raise OSError(f"{url}: the response is compressed, though identity was requested")
        content = b""
        async for piece in response.aiter_raw():
            content += piece
            if len(content) > MAX_BYTES:
                break
    try:
        return parse(content)
    except ValueError as error:
        raise ValueError(f"{url}: {error}") from None
