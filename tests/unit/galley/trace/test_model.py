"""Stories from spans: parents, steps, clocks and resumed sessions."""

from __future__ import annotations

from dataclasses import replace

import pytest

from galley.core import names
from galley.trace.read.spans import Link, Process, Span
from tests.fakes.trace_builder import (
    BEGAN_NS,
    DRAFT,
    DRAFT_AT,
    GATEWAY,
    RANK,
    SESSION,
    TARGET,
    TARGET_AT,
    Scene,
    event,
    ns,
    summarize,
)
from tests.unit.galley.trace.picture import sample

OTHER_GATEWAY = Process("galley-gateway", "g2")


def test_recorded_sample() -> None:
    story = sample()
    assert len(story.rounds) > 20
    assert story.shifts == ()
    for one in story.rounds:
        parts = (names.DRAFT_PART, names.QUEUE_PART, names.COMPUTE_PART, names.WIRE_PART)
        assert sum(map(one.span.integer, parts)) == pytest.approx(one.span.duration_ns, abs=ns(1))
        assert len(one.text) == one.confirmed
        assert one.batch is not None
    assert any(story.company(one.batch) for one in story.rounds if one.batch is not None)
    verify = next(call for one in story.rounds for call in one.calls if call.span.name == names.VERIFY)
    assert verify.served is not None
    assert verify.served.process.service == "galley-target"


def test_rounds_are_ordered_by_time() -> None:
    scene = Scene()
    scene.request(prompt=40).round(draft=3, queue=2, compute=30, wire=5, commit=4).round(accepted=0).end()
    scene.spans.reverse()
    story = scene.story()
    assert story.session_id == SESSION
    (request,) = story.requests
    assert [(one.index, one.position, one.confirmed, one.accepted) for one in request.rounds] == [
        (0, 40, 3, 2),
        (1, 43, 1, 0),
    ]
    parts = request.rounds[0].parts
    assert (parts.draft_ns, parts.queue_ns, parts.compute_ns, parts.wire_ns) == (ns(3), ns(2), ns(30), ns(5))
    assert request.rounds[0].commit_ns == ns(4)
    assert story.prompt_tokens == 40
    assert story.output_index(43) == 3


def test_parts_sum_to_the_round() -> None:
    scene = Scene()
    scene.request().round(draft=1, queue=1, compute=1, wire=1, draft_part=ns(1e6), queue_part=-5).end()
    (one,) = scene.story().rounds
    assert sum((one.parts.draft_ns, one.parts.queue_ns, one.parts.compute_ns, one.parts.wire_ns)) == ns(4)


def test_idle_time_needs_neighbouring_rounds() -> None:
    scene = Scene()
    request = scene.request().idle(7).round().idle(50).round()
    request._index = 9  # rounds 2 to 8 are not in the trace
    request.idle(300).round().end()
    assert [one.idle_ns for one in scene.story().rounds] == [ns(7), ns(50), 0]


def test_calls_have_their_server_spans() -> None:
    scene = Scene()
    evicted = event(names.KV_EVICTED, BEGAN_NS + ns(20))
    scene.request().round(calls=True, served_events=[evicted]).end()
    (one,) = scene.story().rounds
    (call,) = one.calls
    assert call.replica == TARGET_AT
    assert call.served is not None
    assert call.served.process == TARGET
    assert [event_.name for event_ in one.events] == [names.KV_EVICTED]


def test_events_belong_to_the_round_of_their_time() -> None:
    scene = Scene()
    request = scene.request().round()
    first = request.rounds[0]
    request.round().round()
    at_ns = request.rounds[2].start_ns + 1
    preempted = event(names.KV_PREEMPTED, at_ns)
    request.call(first, names.VERIFY, TARGET, TARGET_AT, first.start_ns, request.at_ns, [preempted])
    request.end()
    assert [len(one.events) for one in scene.story().rounds] == [0, 0, 1]


def test_duplicate_events_are_dropped() -> None:
    scene = Scene()
    missed = event(names.KV_MISSED, BEGAN_NS + ns(5), pool="target", have=0, expected=100)
    scene.request().round(events=[missed], calls=True, served_events=[missed]).end()
    (one,) = scene.story().rounds
    assert [event_.name for event_ in one.events] == [names.KV_MISSED]


def test_events_of_other_sessions_are_dropped() -> None:
    scene = Scene()
    for session in ("0" * 32, SESSION):
        scene.request(session=session, trace_id=session).round(batch={"sessions": 2}).end()
    evicted = [event(names.KV_EVICTED, BEGAN_NS + 5, session_id=name) for name in ("0" * 32, SESSION)]
    scene.spans = [
        replace(span, events=tuple(evicted)) if span.name == names.VERIFY_BATCH else span
        for span in scene.spans
    ]
    for story in scene.stories():
        (result,) = story.rounds[0].events
        assert result.text(names.SESSION_ID) == story.session_id


def test_a_loss_of_a_session_whose_id_is_no_text_is_dropped() -> None:
    scene = Scene()
    scene.request().round(batch={"events": [event(names.KV_EVICTED, BEGAN_NS, session_id={"a": 1})]}).end()
    assert not scene.story().requests[0].all_events


def test_a_preemption_is_one_event_of_the_request_in_which_it_happened() -> None:
    scene = Scene()
    request = scene.request().round()
    at_ns = request.at_ns + ns(9)
    seen = event(names.KV_PREEMPTED, at_ns, pool="target", have=32)
    noted = event(names.KV_PREEMPTED, at_ns + ns(2), session_id=SESSION)
    request.round(calls=True, served_events=[seen])
    later = event(names.KV_PREEMPTED, request.at_ns + ns(5), session_id=SESSION)
    request.round().end()
    scene.request(at_ns=request.at_ns + ns(50), resumed=True).round().end()
    scene.request(session="0" * 32).round(batch={"events": [noted, later]}).end()
    story = next(one for one in scene.stories() if one.session_id == SESSION)
    assert [[len(one.events) for one in each.rounds] for each in story.requests] == [[0, 1, 1], [0]]


def test_events_outside_rounds_belong_to_the_request() -> None:
    scene = Scene()
    scene.request().round().round().idle(100).event(names.CLIENT_STALLED, stalled_ns=ns(90)).end()
    (request,) = scene.story().requests
    assert [event_.name for event_ in request.events] == [names.CLIENT_STALLED]
    assert not any(one.events for one in request.rounds)


def test_retries_of_store_calls_are_events() -> None:
    scene = Scene()
    request = scene.request().store("create", 30, events=[event(names.STORE_RETRIED, BEGAN_NS + ns(9))])
    request.round()
    retried = event(names.STORE_RETRIED, request.at_ns + ns(4), reason="no response")
    request.store("finish", 20, events=[retried]).end()
    (result,) = scene.story().requests
    assert [event_.time_ns for event_ in result.all_events] == [BEGAN_NS + ns(9), retried.time_ns]
    assert {event_.name for event_ in result.all_events} == {names.STORE_RETRIED}


def test_round_has_its_step_ranks_and_company() -> None:
    scene = Scene()
    other = scene.request(session="0" * 32).round().end()
    anonymous = ("f" * 32, "e" * 16)
    batch = {"sessions": 4, "rows": 20, "prefill_rows": 5, "ranks": (28, 27, 26), "queue_depth": 6}
    scene.request().round(batch=batch, company=[other.key, anonymous]).end()
    story = next(one for one in scene.stories() if one.session_id == SESSION)
    result = story.rounds[0].batch
    assert result is not None
    assert (result.sessions, result.rows, result.prefill_share, result.waiting) == (4, 20, 0.25, 2)
    assert result.rank_ns == (ns(28), ns(27), ns(26))
    assert [rank.process for rank in result.ranks] == [RANK, RANK]
    assert list(story.company(result)) == ["0" * 32, f"one of trace {'f' * 32}"]


def test_resumed_session_is_one_story() -> None:
    scene = Scene()
    first = scene.request().round().round().end(error="unavailable")
    scene.request(
        at_ns=first.at_ns + ns(400),
        position=first.position,
        resumed=True,
        continues=first.key,
        process=OTHER_GATEWAY,
    ).round().end()
    story = scene.story()
    assert [request.is_resumed for request in story.requests] == [False, True]
    assert [one.position for one in story.rounds] == [100, 103, 106]
    assert story.output_index(106) == 6


def test_killed_gateway_is_found_by_its_continuation() -> None:
    scene = Scene()
    killed = scene.request().round().round()
    scene.request(
        at_ns=killed.at_ns + ns(900), position=killed.position, resumed=True, continues=killed.key
    ).round().end()
    story = scene.story()
    assert [request.span is None for request in story.requests] == [True, False]
    assert len(story.rounds) == 3
    assert "Request 1 of 2 has no span of its own" in summarize(story)


def test_rounds_without_a_request() -> None:
    scene = Scene()
    scene.request().round().round()
    story = scene.story()
    assert story.session_id == ""
    assert story.prompt_tokens == 100
    assert story.end_ns - story.start_ns == ns(60)


def test_sessions_of_one_trace_are_separate() -> None:
    scene = Scene()
    first = scene.request().round().end()
    scene.request(session="b" * 32, trace_id=first.trace_id, at_ns=first.at_ns).round().end()
    assert [story.session_id for story in scene.stories()] == [SESSION, "b" * 32]
    (alone,) = scene.stories("b" * 32)
    assert alone.session_id == "b" * 32


def test_client_span_above_the_request() -> None:
    scene = Scene(skew_ms={Process("shop"): -80})
    request = scene.request()
    request.parent_id = scene.span_id()
    request.round().end()
    client = Span(
        request.trace_id,
        request.parent_id,
        "",
        "buy",
        BEGAN_NS - ns(1),
        request.at_ns + ns(5),
        Process("shop"),
    )
    scene.add(client)
    assert scene.story().start_ns == BEGAN_NS
    assert scene.story().shifts == ()


@pytest.mark.parametrize("skew_ms", [-2500.0, -5.0, 5.0, 2500.0])
def test_skewed_clock_is_corrected_and_reported(skew_ms: float) -> None:
    scene = Scene(skew_ms={TARGET: skew_ms, RANK: skew_ms * 3})
    request = scene.request()
    for _ in range(3):
        request.round(calls=True, batch={"ranks": (20, 19)})
    request.end()
    story = scene.story()
    shifts = {shift.process: shift for shift in story.shifts}
    assert set(shifts) == {TARGET, RANK}
    assert shifts[TARGET].offset_ns == pytest.approx(-ns(skew_ms), abs=ns(1))
    assert shifts[RANK].offset_ns == pytest.approx(-ns(3 * skew_ms), abs=ns(12))
    assert not any(shift.unfit for shift in story.shifts)
    for one in story.rounds:
        (call,) = one.calls
        assert call.served is not None
        assert call.span.start_ns <= call.served.start_ns <= call.served.end_ns <= call.span.end_ns
    assert "estimated from 3 calls between it and galley-gateway" in summarize(story)


def test_rank_with_the_gateways_clock_is_not_shifted() -> None:
    scene = Scene(skew_ms={TARGET: 40})
    scene.request().round(calls=True, batch={"ranks": (20, 19)}).end()
    (shift,) = scene.story().shifts
    assert shift.process == TARGET


def test_equal_clocks_are_not_shifted() -> None:
    scene = Scene()
    scene.request().round(calls=True).round(calls=True).end()
    assert scene.story().shifts == ()


def test_server_span_after_a_cancelled_call_is_no_skew() -> None:
    scene = Scene()
    request = scene.request().round().round()
    first = request.rounds[0]
    caller, served = request.call(
        first, names.PROPOSE, DRAFT, DRAFT_AT, first.start_ns, first.start_ns + ns(5)
    )
    scene.spans[scene.spans.index(served)] = replace(served, end_ns=served.end_ns + ns(70))
    request.end()
    assert caller.duration_ns == ns(5)
    assert scene.story().shifts == ()


@pytest.mark.parametrize("outcome", ["cancelled", "superseded", ""])
def test_abandoned_call_is_no_skew(outcome: str) -> None:
    scene = Scene()
    request = scene.request().round(calls=True).round(calls=not outcome)
    first = request.rounds[0]
    _, served = request.call(first, names.PROPOSE, TARGET, DRAFT_AT, first.start_ns, first.start_ns + ns(5))
    late = replace(
        served,
        start_ns=served.start_ns + ns(40),
        end_ns=served.end_ns + ns(40),
        attributes={"galley.outcome": outcome} if outcome else {},
    )
    scene.spans[scene.spans.index(served)] = late
    request.end()
    assert scene.story().shifts == ()


def test_jumping_clock_is_reported() -> None:
    scene = Scene()
    request = scene.request().round()
    scene.skew_ms[TARGET] = 40
    request.round(calls=True)
    scene.skew_ms[TARGET] = -10
    request.round(calls=True).end()
    (shift,) = scene.story().shifts
    assert (shift.calls, shift.unfit) == (2, 1)
    text = summarize(scene.story())
    assert "estimated from 2 calls between it and galley-gateway; 1 of them still end too late" in text


def test_duplicate_spans_count_once() -> None:
    scene = Scene()
    scene.request().round().end()
    scene.spans *= 2
    assert len(scene.story().rounds) == 1


def test_attributes_of_wrong_types_are_ignored() -> None:
    scene = Scene()
    scene.request().round(
        round_position="x" * 1000,
        round_confirmed=-4,
        round_accepted=True,
        round_text="no list",
        target_replica=17,
        kv_reused=2.5,
        commit_ns="now",
    ).end()
    (one,) = scene.story().rounds
    assert (one.position, one.confirmed, one.accepted, one.text, one.target, one.commit_ns) == (
        0,
        0,
        0,
        (),
        "",
        0,
    )
    assert one.reused is None


def test_foreign_spans_have_no_story() -> None:
    scene = Scene()
    trace_id = scene.trace_id()
    scene.add(Span(trace_id, scene.span_id(), "", "GET /", BEGAN_NS, BEGAN_NS + 1, Process("web")))
    assert scene.stories() == ()


def test_cyclic_parents_and_links_terminate() -> None:
    scene = Scene()
    trace_id = scene.trace_id()
    first, second = scene.span_id(), scene.span_id()
    for own, parent in ((first, second), (second, first)):
        link = Link(trace_id, own, {names.LINK: names.LINK_BATCH})
        span = Span(trace_id, own, parent, names.ROUND, BEGAN_NS, BEGAN_NS + 5, GATEWAY, links=(link,))
        scene.add(span)
    (story,) = scene.stories()
    assert len(story.rounds) == 2
