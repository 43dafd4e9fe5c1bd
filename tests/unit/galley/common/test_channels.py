"""The bound within which a channel notices that its peer is silent."""

from __future__ import annotations

from galley.common.tls.channels import KEEPALIVE

_NOTICED_MS = 15_000


def test_no_ping_outlasts_the_time_in_which_a_silent_peer_is_noticed() -> None:
    """While gRPC's ping for flow control is unanswered, which may take 60 s by default, keepalive waits."""
    options = dict(KEEPALIVE)
    assert options["grpc.keepalive_time_ms"] + options["grpc.keepalive_timeout_ms"] <= _NOTICED_MS
    assert options["grpc.http2.ping_timeout_ms"] <= _NOTICED_MS
