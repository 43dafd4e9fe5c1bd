"""Addresses as people type them."""

from __future__ import annotations

import pytest

from galley.client.addresses import Addresses, parse_addresses
from galley.common.sockets import host_and_port


@pytest.mark.parametrize(
    ("typed", "understood"),
    [
        ("localhost", ("localhost:50051",)),
        ("localhost:1", ("localhost:1",)),
        ("127.0.0.1", ("127.0.0.1:50051",)),
        ("::1", ("[::1]:50051",)),
        ("[::1]", ("[::1]:50051",)),
        ("[::1]:1", ("[::1]:1",)),
        ("http://localhost:1", ("localhost:1",)),
        ("http://[::1]:1/", ("[::1]:1",)),
        ("grpc://a.b", ("a.b:50051",)),
        ("unix:///run/galley.sock", ("unix:///run/galley.sock",)),
        ("dns:///a.b:1", ("dns:///a.b:1",)),
        (" a:1, b:2 ,a:1,", ("a:1", "b:2")),
        (["a", "b:2"], ("a:50051", "b:2")),
    ],
)
def test_what_is_understood(typed: str | list[str], understood: tuple[str, ...]) -> None:
    assert parse_addresses(typed) == Addresses(understood, tls=False)


def test_https_is_tls() -> None:
    assert parse_addresses("https://a:1") == Addresses(("a:1",), tls=True)


@pytest.mark.parametrize(
    "typed", ["", ",", "a:", ":1", "a:0", "a:65536", "a:b", "a:1:2", "http://a/b", "a b", "::x"]
)
def test_what_is_refused(typed: str) -> None:
    with pytest.raises(ValueError, match="must "):
        parse_addresses(typed)


@pytest.mark.parametrize(
    "typed", ["https://u:secret@a:1", "https://u:secret@a/b", "u:secret@a", "secret@a:x"]
)
def test_a_password_is_refused_and_not_printed(typed: str) -> None:
    for parse in (parse_addresses, host_and_port):
        with pytest.raises(ValueError, match="without a user name or password") as refused:
            parse(typed)
        assert "secret" not in str(refused.value)
