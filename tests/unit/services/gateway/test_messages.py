"""What a replica's responses become: a draft is not trusted with what it says of its tokens."""

from __future__ import annotations

import pytest

from galley.core.session import events as ev
from galley.pb.galley.v1 import galley_pb2 as pb
from services.gateway.replicas.messages import propose_event, verify_event

REQUEST = ev.Propose(1, ev.Slice(0, (1, 2), b""), k=4, strategy="hybrid")


def proposed(*runs: tuple[str, int]) -> ev.Proposed:
    result = pb.ProposeResult(
        position=2,
        draft_tokens=[5, 6, 7],
        sources=[pb.SourceRun(name=name, tokens=tokens) for name, tokens in runs],
    )
    event = propose_event(REQUEST, pb.ProposeAnswer(result=result), pb.GetDraftInfoResponse())
    assert isinstance(event, ev.Proposed)
    return event


def test_a_superseded_request_can_be_repeated() -> None:
    event = verify_event(1, pb.VerifyAnswer(superseded=pb.Superseded(position=2)))
    assert event == ev.Failed(1, "a newer request of the session superseded it")
    assert event.retryable


@pytest.mark.parametrize(
    ("runs", "sources"),
    [
        ((), ()),
        ((("model", 2), ("shared", 1)), ("model", "model", "shared")),
        ((("ngram", 1), ("grammar", 1), ("x" * 9999, 1)), ("ngram", "hybrid", "hybrid")),
        ((("ngram", 1),), ("ngram",)),
        ((("ngram", 2**32 - 1), ("model", 2**32 - 1)), ("ngram",) * 3),
    ],
)
def test_a_draft_names_what_proposed_each_token(
    runs: tuple[tuple[str, int], ...], sources: tuple[str, ...]
) -> None:
    event = proposed(*runs)
    assert event.sources == sources
    assert event.strategy == "hybrid"


def test_a_draft_says_how_its_tokens_are_a_tree() -> None:
    result = pb.ProposeResult(position=2, draft_tokens=[5, 6, 7], parents=[-1, -1, -7])
    event = propose_event(REQUEST, pb.ProposeAnswer(result=result), pb.GetDraftInfoResponse())
    assert isinstance(event, ev.Proposed)
    assert event.parents == (-1, -1, -7), "the session checks them"
