"""How a span is named in a message."""

from __future__ import annotations

import pytest

from galley.common.tracing.span_names import names_a_span, packed, unpacked

TRACE_ID, SPAN_ID = 0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331
NAME = packed(TRACE_ID, SPAN_ID)


def test_a_span_comes_back_from_its_name() -> None:
    assert len(NAME) == 24
    assert names_a_span(NAME)
    found = unpacked(NAME)
    assert (found.trace_id, found.span_id) == (TRACE_ID, SPAN_ID)
    assert found.is_remote
    assert found.trace_flags.sampled


@pytest.mark.parametrize(
    "wrong", [b"", NAME[:-1], NAME + b"x", bytes(24), packed(TRACE_ID, 0), packed(0, SPAN_ID)]
)
def test_other_bytes_name_none(wrong: bytes) -> None:
    assert not names_a_span(wrong)
    assert not unpacked(wrong).is_valid
