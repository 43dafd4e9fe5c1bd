"""Connect to Redis as a URL says, over TLS with files that may be replaced meanwhile.

redis-py reads the files once for each connection object, which its pool connects again and again. Here every
new connection uses the current files.
"""

from __future__ import annotations

import ssl
from typing import Any

from pydantic import SecretStr
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.connection import Connection, SSLConnection, UnixDomainSocketConnection
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff

from galley.common.redis.url import RedisUrl, Tls, parse_redis_url
from galley.common.tls.files import BadFile, NamedFile, WatchedFiles

_SETTING = "redis_url"


class _Contexts:
    """The TLS context of redis-py connections; certificates and host names are always checked."""

    def __init__(self, tls: Tls) -> None:
        """Raise BadFile if a file is missing or of no use."""
        self._tls = tls
        self._named = [NamedFile(_SETTING, path) for path in (tls.ca, tls.cert, tls.key) if path]
        self._files = WatchedFiles(self._named, self._read)

    async def check(self) -> None:
        """Have `get` return a context of the current files."""
        await self._files.checked()

    def get(self) -> ssl.SSLContext:
        return self._files.latest()

    def _read(self) -> ssl.SSLContext:
        for file in self._named:
            file.read()  # says which of them is missing
        try:
            context = ssl.create_default_context(cafile=self._tls.ca or None)
            if self._tls.cert:
                # No password: OpenSSL would ask for one on the terminal.
                context.load_cert_chain(self._tls.cert, self._tls.key or None, password="")
        except (OSError, ValueError) as error:
            why = getattr(error, "reason", None) or error
            raise BadFile(_SETTING, f"ca=, cert= and key= must name usable files: {why}") from None
        return context


class _TlsConnection(SSLConnection):
    def __init__(self, *, contexts: _Contexts, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._contexts = contexts
        self.ssl_context: Any = contexts  # asked for the context whenever it connects

    async def _connect(self) -> None:
        await self._contexts.check()
        await super()._connect()  # type: ignore[no-untyped-call]  # is untyped


class Connector:
    def __init__(
        self,
        url: RedisUrl,
        *,
        call_timeout_s: float,
        reply_timeout_s: float,
        max_connections: int,
    ) -> None:
        """Bound connecting, and waiting for a free connection, by `call_timeout_s` each. Raise BadFile."""
        self.url = url
        self._tls = None if url.tls is None else _Contexts(url.tls)
        self._arguments: dict[str, Any] = {
            "timeout": call_timeout_s,
            "max_connections": max_connections,
            "socket_timeout": reply_timeout_s,
            "socket_connect_timeout": call_timeout_s,
            "retry": Retry(NoBackoff(), 0),
            "protocol": 2,
            "driver_info": None,  # CLIENT SETINFO is not in 7.0
        }

    def server(self, host: str, port: int) -> Redis:
        """Return the client of a server; host and port are ignored for a unix socket."""
        arguments = {**self.url.credentials.arguments(), "db": self.url.database}
        if self.url.path:
            return self._client(UnixDomainSocketConnection, **arguments, path=self.url.path)
        return self._tcp(host, port, arguments)

    def sentinel(self) -> Sentinel:
        sentinel = Sentinel([])  # type: ignore[no-untyped-call]  # is untyped
        arguments = self.url.sentinel_credentials.arguments()
        sentinel.sentinels = [self._tcp(host, port, arguments) for host, port in self.url.hosts]
        return sentinel

    def _tcp(self, host: str, port: int, arguments: dict[str, Any]) -> Redis:
        if self._tls is None:
            return self._client(Connection, **arguments, host=host, port=port)
        return self._client(_TlsConnection, **arguments, host=host, port=port, contexts=self._tls)

    def _client(self, kind: Any, **arguments: Any) -> Redis:
        pool = BlockingConnectionPool(connection_class=kind, **self._arguments, **arguments)
        return Redis.from_pool(pool)


def refuse_bad_files(redis_url: SecretStr) -> None:
    """Raise BadFile if the URL, which may be empty, names files that are missing or of no use."""
    url = redis_url.get_secret_value()
    if url and (tls := parse_redis_url(url).tls) is not None:
        _Contexts(tls)
