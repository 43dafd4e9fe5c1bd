"""Tell which prompts are parsed in the event loop. Others are parsed in threads, so that they do not hold it.

A thread begins and ends in several turns of a busy event loop. So in a thread the short prompts of one
principal would wait for each other much longer than they take.
"""

from __future__ import annotations

from galley.pb.galley.v1 import galley_pb2 as pb

SHORT_BYTES = 1024
FEW_MESSAGES = 16


def is_short(request: pb.GenerateRequest) -> bool:
    """Return True if the request needs no thread: it is parsed and tokenized in less than a millisecond."""
    return (
        request.ByteSize() <= SHORT_BYTES
        and len(request.messages.messages) <= FEW_MESSAGES
        and not request.HasField("structured_output")
    )
