"""Parse the URL that says where Redis is and how to connect.

    redis://user:password@host:6379/0                     one server
    unix:///run/redis.sock?db=0                           one server
    redis+sentinel://user:password@s1:26379,s2:26379/0?service=galley
                                                          the current master of a replica set
    redis+cluster://user:password@n1:6379,n2:6379         a cluster; name several of its nodes

`rediss` in place of `redis` uses TLS, also to sentinels. User and password are percent-encoded. Options, each
at most once:

    ca=/path           PEM file of the authorities of the server certificate; else those of the system
    cert=/path         PEM file of the client certificate
    key=/path          PEM file of its key; else the key is in `cert`
    service=name       name of the replica set at the sentinels
    sentinel_user=, sentinel_password=    credentials for the sentinels
    db=0               database behind a unix socket
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal
from urllib.parse import parse_qsl, unquote

from pydantic import AfterValidator, SecretStr

Kind = Literal["server", "sentinel", "cluster"]

DEFAULT_PORT = 6379
SENTINEL_PORT = 26379
FORMS = "redis://, rediss://, unix://, redis+sentinel:// or redis+cluster:// (rediss+... with TLS)"

_KINDS: Mapping[str, Kind] = {"": "server", "sentinel": "sentinel", "cluster": "cluster"}
_TLS_OPTIONS = frozenset({"ca", "cert", "key"})
_SENTINEL_OPTIONS = frozenset({"service", "sentinel_user", "sentinel_password"})
_UNIX_OPTIONS = frozenset({"db"})
_ALL_OPTIONS = _TLS_OPTIONS | _SENTINEL_OPTIONS | _UNIX_OPTIONS


@dataclass(frozen=True, slots=True)
class Credentials:
    """An ACL user and password; an empty user is the server's default one."""

    user: str = ""
    password: str = field(default="", repr=False)

    def arguments(self) -> dict[str, Any]:
        return {"username": self.user or None, "password": self.password or None}


@dataclass(frozen=True, slots=True)
class Tls:
    """Paths of PEM files, empty where there is none."""

    ca: str = ""
    cert: str = ""
    key: str = ""


@dataclass(frozen=True, slots=True)
class RedisUrl:
    """A parsed URL. `hosts` are the server, the sentinels or some cluster nodes; or `path` is a socket."""

    kind: Kind
    hosts: tuple[tuple[str, int], ...] = ()
    path: str = ""
    database: int = 0
    credentials: Credentials = Credentials()
    tls: Tls | None = None
    service: str = ""
    sentinel_credentials: Credentials = Credentials()


def parse_redis_url(url: str) -> RedisUrl:
    """Parse a URL. Raise ValueError with the constraint that it violates, never with a secret."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        raise ValueError(f"must be a URL: {FORMS}")
    rest, _, query = rest.partition("?")
    name, _, suffix = scheme.partition("+")
    if scheme == "unix":
        return _unix(rest, _options(query, _UNIX_OPTIONS))
    if name not in {"redis", "rediss"} or suffix not in _KINDS or scheme.endswith("+"):
        # Not printed: with an unencoded password it may hold the credentials.
        raise ValueError(f"must be {FORMS}, got another scheme")
    return _tcp(_KINDS[suffix], rest, query, tls=name == "rediss")


def _unix(rest: str, options: Mapping[str, str]) -> RedisUrl:
    secrets, slash, path = rest.partition("/")
    if not path or (secrets and not secrets.endswith("@")):
        raise ValueError(
            "must have the absolute path of a socket after unix://, as in unix:///run/redis.sock"
        )
    return RedisUrl(
        "server",
        path=unquote(slash + path),
        database=_number("db", options.get("db", "0")),
        credentials=_credentials(secrets.removesuffix("@")),
    )


def _tcp(kind: Kind, rest: str, query: str, *, tls: bool) -> RedisUrl:
    secrets, _, address = rest.rpartition("@")
    hosts, _, database = address.partition("/")
    is_sentinel = kind == "sentinel"
    options = _options(
        query, (_TLS_OPTIONS if tls else frozenset()) | (_SENTINEL_OPTIONS if is_sentinel else frozenset())
    )
    sentinel = Credentials(options.get("sentinel_user", ""), options.get("sentinel_password", ""))
    url = RedisUrl(
        kind,
        tuple(_host(part, SENTINEL_PORT if is_sentinel else DEFAULT_PORT) for part in hosts.split(",")),
        database=_number("the database", database or "0"),
        credentials=_credentials(secrets),
        tls=Tls(*(options.get(name, "") for name in ("ca", "cert", "key"))) if tls else None,
        service=options.get("service", ""),
        sentinel_credentials=sentinel,
    )
    _check(url)
    return url


def _check(url: RedisUrl) -> None:
    if url.kind == "server" and len(url.hosts) > 1:
        raise ValueError(f"must name one host, got {len(url.hosts)}; or use redis+sentinel, redis+cluster")
    if url.kind == "cluster" and url.database:
        raise ValueError(f"must name database 0 of a cluster, got {url.database}")
    if url.kind == "sentinel" and not url.service:
        raise ValueError("must have ?service=, the name of the replica set at its sentinels")
    if url.tls is not None and url.tls.key and not url.tls.cert:
        raise ValueError("must have ?cert= with ?key=, got only ?key=")


def _options(query: str, known: frozenset[str]) -> dict[str, str]:
    pairs = parse_qsl(query, keep_blank_values=True)
    options = dict(pairs)
    if len(options) < len(pairs):
        raise ValueError("must have each option once after the question mark, got one twice")
    if unknown := options.keys() - known:
        allowed = f" except {', '.join(sorted(known))}" if known else ""
        # Other names may be parts of an unencoded password.
        named = ", ".join(sorted(unknown & _ALL_OPTIONS)) or "an unknown one"
        raise ValueError(
            f"must have no options{allowed} in this form of URL, got {named}; write ? and & in a password as "
            "%3F and %26"
        )
    return options


def _credentials(secrets: str) -> Credentials:
    user, _, password = secrets.partition(":")
    return Credentials(unquote(user), unquote(password))


def _host(text: str, default_port: int) -> tuple[str, int]:
    """Parse host, host:port or [address of IPv6]:port."""
    host, port = text, ""
    if text.startswith("["):
        host, _, port = text[1:].partition("]")
        port = port.removeprefix(":")
    elif text.count(":") == 1:
        host, _, port = text.partition(":")
    if not host:
        raise ValueError("must name a host, got none")
    return unquote(host), _number("the port", port) if port else default_port


def _number(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"{name} must be a number")
    return int(text)


def _readable(url: SecretStr) -> SecretStr:
    if text := url.get_secret_value():
        parse_redis_url(text)
    return url


RedisUrlSetting = Annotated[SecretStr, AfterValidator(_readable)]
