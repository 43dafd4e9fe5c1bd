"""Which of two calls of a stream is the later one."""

from __future__ import annotations

import secrets

import pytest

from galley.core.admission.attempts import MAX_NUMBER, Attempt, Attempts

FIRST = Attempt(b"stream", 1)


def test_a_call_precedes_the_later_ones_of_its_stream_alone() -> None:
    second = Attempt(b"stream", 2)
    nonce = second.nonce(secrets.token_bytes(16))
    assert len(nonce) == 16
    assert FIRST.precedes(nonce)
    assert not second.precedes(nonce), "gRPC may send it twice"
    assert not Attempt(b"stream", 3).precedes(nonce)
    assert not Attempt(b"others", 1).precedes(nonce)
    assert not FIRST.precedes(b"")


def test_calls_are_numbered_as_far_as_numbers_go() -> None:
    attempts = Attempts()
    numbers = [attempts.next().number for _ in range(MAX_NUMBER + 1)]
    assert numbers == [*range(1, MAX_NUMBER + 1), MAX_NUMBER]
    assert attempts.next().stream != Attempts().next().stream


def test_nonces_of_one_call_differ() -> None:
    assert FIRST.nonce(b"a" * 16) != FIRST.nonce(b"b" * 16)


def test_a_call_is_read_as_it_is_written() -> None:
    last = Attempt(b"\x00\xff" * 3, MAX_NUMBER)
    assert (str(last), Attempt.parse(str(last))) == ("00ff00ff00ff-65535", last)


@pytest.mark.parametrize(
    "text", ["", "1", "00ff00ff00ff", "00ff00ff00ff-65536", "00ff00ff00ff-x", "00ff00ff00fg-1"]
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be 12 hexadecimal digits, - and a number <= 65535, got '"):
        Attempt.parse(text)
