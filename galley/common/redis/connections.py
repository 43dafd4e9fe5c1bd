"""Connections to Redis as a URL says, over TLS by files that may be replaced meanwhile.

redis-py reads the files once for each connection object, which its pool keeps and connects again and again.
Here every connection that is made goes by the files as they are.
"""

from __future__ import annotations

import ssl
from typing import Any

from pydantic import SecretStr
from redis.asyncio.connection import Connection, SSLConnection, UnixDomainSocketConnection

from galley.common.redis.url import RedisUrl, Tls, parse_redis_url
from galley.common.tls.files import BadFile, NamedFile, WatchedFiles

Kind = type[Connection]

_SETTING = "redis_url"


class _Contexts:
    """The TLS context of redis-py connections; certificates and host names are always checked."""

    def __init__(self, tls: Tls) -> None:
        """Read the TLS files. Raises BadFile."""
        self._tls = tls
        self._named = [NamedFile(_SETTING, path) for path in (tls.ca, tls.cert, tls.key) if path]
        self._files = WatchedFiles(self._named, self._read)

    def get(self) -> ssl.SSLContext:
        """Return the context of the current files, or of the last usable ones."""
        return self._files.current()

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
            raise BadFile(_SETTING, f"the files of ca=, cert= and key= are of no use: {why}") from None
        return context


class _TlsConnection(SSLConnection):
    def __init__(self, *, contexts: _Contexts, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.ssl_context: Any = contexts  # asked for the context whenever it connects


class Connections:
    """Choose class and arguments of the connections of `url`."""

    def __init__(self, url: RedisUrl) -> None:
        """Read the TLS files. Raises BadFile."""
        self._url = url
        self._contexts = None if url.tls is None else _Contexts(url.tls)

    def to_server(self, host: str, port: int) -> tuple[Kind, dict[str, Any]]:
        """Return them for a server; host and port are ignored for a unix socket."""
        arguments = {**self._url.credentials.arguments(), "db": self._url.database}
        if self._url.path:
            # It is no Connection by type only.
            unix: Any = UnixDomainSocketConnection
            return unix, {**arguments, "path": self._url.path}
        return self._tcp(host, port, arguments)

    def to_sentinel(self, host: str, port: int) -> tuple[Kind, dict[str, Any]]:
        """Return them for a sentinel."""
        return self._tcp(host, port, self._url.sentinel_credentials.arguments())

    def _tcp(self, host: str, port: int, arguments: dict[str, Any]) -> tuple[Kind, dict[str, Any]]:
        there = {**arguments, "host": host, "port": port}
        if self._contexts is None:
            return Connection, there
        return _TlsConnection, {**there, "contexts": self._contexts}


def refuse_bad_files(redis_url: SecretStr) -> None:
    """Raise BadFile if the URL, which may be empty, names files that are of no use."""
    if url := redis_url.get_secret_value():
        Connections(parse_redis_url(url))
