"""The address that a replica registers with: a pod knows its IP address only as $(POD_IP)."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from services.draft.settings import DraftSettings


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("", ""),
        ("10.0.0.1:50052", "10.0.0.1:50052"),
        ("draft-0.draft:50052", "draft-0.draft:50052"),
        ("fd00::7:50052", "[fd00::7]:50052"),
        ("[fd00::7]:50052", "[fd00::7]:50052"),
        ("::1:50052", "[::1]:50052"),
        ("fd00:1:2:3:4:5:6:7:50052", "[fd00:1:2:3:4:5:6:7]:50052"),
    ],
)
def test_ipv6_addresses_get_brackets(given: str, expected: str) -> None:
    assert DraftSettings(advertise=given).advertise == expected


@pytest.mark.parametrize(
    "given", ["draft", "10.0.0.1", ":50052", "fd00::7", "host:0", "http://host:1", "a:b:1"]
)
def test_an_address_without_host_or_port_is_refused(given: str) -> None:
    with pytest.raises(ValidationError, match=r"advertise\n.*must be host:port"):
        DraftSettings(advertise=given)
