"""The priority of audits, and their totals before the first."""

from __future__ import annotations

import struct
from dataclasses import astuple

import pytest

from galley.core.audit import AUDIT_PRIORITY, AuditCounts


def test_no_priority_that_a_message_can_hold_is_lower() -> None:
    struct.pack("<i", AUDIT_PRIORITY)
    with pytest.raises(struct.error):
        struct.pack("<i", AUDIT_PRIORITY - 1)


def test_a_deployment_without_audits_has_counted_nothing() -> None:
    assert set(astuple(AuditCounts())) == {0}
