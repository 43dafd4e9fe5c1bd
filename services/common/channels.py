"""How a channel notices that its peer has gone, and finds it again."""

from __future__ import annotations

# A peer that is gone without a word (a partition, a lost machine) is noticed within 15 seconds.
KEEPALIVE = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
)
# A peer that comes back must be found at once, not after a long back-off.
RECONNECT = (
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 1000),
)
