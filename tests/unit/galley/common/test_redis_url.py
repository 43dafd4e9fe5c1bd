"""URLs of Redis: what they say, and what they must not."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from galley.common.redis.url import Credentials, RedisUrl, Tls, parse_redis_url
from services.gateway.settings import GatewaySettings


@pytest.mark.parametrize(
    ("url", "meant"),
    [
        ("redis://store", RedisUrl("server", (("store", 6379),))),
        ("redis://store:7000/3", RedisUrl("server", (("store", 7000),), database=3)),
        (
            "redis://:p%40ss/w@[::1]:7000",
            RedisUrl("server", (("::1", 7000),), credentials=Credentials("", "p@ss/w")),
        ),
        (
            "rediss://me:it@store?ca=/c%20a&cert=/c&key=/k",
            RedisUrl(
                "server", (("store", 6379),), credentials=Credentials("me", "it"), tls=Tls("/c a", "/c", "/k")
            ),
        ),
        ("unix:///run/s?db=2", RedisUrl("server", path="/run/s", database=2)),
        ("unix://me:it@/run/s", RedisUrl("server", path="/run/s", credentials=Credentials("me", "it"))),
        ("redis+cluster://a:1,b", RedisUrl("cluster", (("a", 1), ("b", 6379)))),
        ("rediss+cluster://a", RedisUrl("cluster", (("a", 6379),), tls=Tls())),
        (
            "redis+sentinel://me:it@a,b:1/4?service=x&sentinel_user=u&sentinel_password=p",
            RedisUrl(
                "sentinel",
                (("a", 26379), ("b", 1)),
                database=4,
                credentials=Credentials("me", "it"),
                service="x",
                sentinel_credentials=Credentials("u", "p"),
            ),
        ),
    ],
)
def test_url_parsing(url: str, meant: RedisUrl) -> None:
    assert parse_redis_url(url) == meant


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("store:6379", "must be a URL"),
        ("http://store", r"must be redis://.*, got another scheme"),
        ("redis+://store", "got another scheme"),
        ("redis+ring://store", "got another scheme"),
        ("user:secret@redis://", "got another scheme"),
        ("redis://", "must name a host"),
        ("redis://a,b", "must name one host, got 2"),
        ("redis://a:secret", "the port must be a number"),
        ("redis://a/secret", "the database must be a number"),
        ("redis+cluster://a/1", "must name database 0 of a cluster, got 1"),
        ("redis+sentinel://a", "service="),
        ("redis://a?ca=/x", "must have no options in this form of URL, got ca;"),
        ("unix:///s?db=0&ca=/x&cert=/y", "must have no options except db in this form of URL, got ca, cert;"),
        ("rediss://a?key=/x", "with .key="),
        ("rediss://a?ca=/x&ca=/y", "twice"),
        ("unix://secret/run", "must have the absolute path of a socket"),
        ("redis://:secret@a?timeout=3", "got an unknown one"),
        ("redis://user:pa?secret@a", "got an unknown one; write . and & in a password as %3F and %26"),
        ("redis+sentinel://a?service=x&sentinel_password=p&secret", "got an unknown one"),
        ("rediss://user:p?secret@a?ca=/x", "except ca, cert, key in this form of URL, got an unknown one"),
    ],
)
def test_invalid_url_is_reported_without_secrets(url: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem) as refused:
        parse_redis_url(url)
    assert "secret" not in str(refused.value)


def test_a_gateway_refuses_such_a_url_at_its_start() -> None:
    with pytest.raises(ValidationError, match="must name one host") as refused:
        GatewaySettings.model_validate({"redis_url": "redis://:secret@a,b"})
    assert "secret" not in str(refused.value)


def test_a_password_is_in_no_representation() -> None:
    assert "secret" not in repr(parse_redis_url("redis://:secret@a"))
