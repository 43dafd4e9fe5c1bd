"""The sentence on the slowest round: each cause with replica, position and numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from galley.core import names
from galley.trace.explain.explain import Explanation, explain
from galley.trace.read.model import Story
from galley.trace.read.spans import Event, Span
from galley.trace.show.rows import figures
from tests.fakes.trace_builder import (
    DRAFT_AT,
    GATEWAY,
    OTHER_TARGET_AT,
    SESSION,
    TARGET_AT,
    RequestMaker,
    Scene,
    event,
    ns,
    summarize,
)


def usual_rounds(request: RequestMaker, count: int = 6) -> RequestMaker:
    for _ in range(count):
        request.round()
    return request


def explained(make: Callable[[RequestMaker], object]) -> Explanation:
    scene = Scene()
    request = usual_rounds(scene.request())
    make(request)
    usual_rounds(request).end()
    return explain(scene.story())


def moved(request: RequestMaker, reason: str = "late") -> tuple[Event, ...]:
    return (
        event(
            names.SESSION_MOVED,
            request.at_ns,
            pool="target",
            source=TARGET_AT,
            to=OTHER_TARGET_AT,
            reason=reason,
        ),
    )


def test_a_slow_draft() -> None:
    result = explained(lambda request: request.round(draft=180, draft_compute_ns=ns(171)))
    assert result.sentence == (
        f"Round 6 (token 18, position 118, target {TARGET_AT}) took 210 ms (6.8 times the median of 31.0): "
        f"it waited 180 ms for draft {DRAFT_AT}, which computed for 171 ms."
    )


def test_draft_that_waited_and_degraded() -> None:
    degraded = event(names.DRAFT_DEGRADED, 0, to="ngram", reason="breaker open")
    result = explained(lambda r: r.round(draft=180, draft_compute_ns=ns(9), events=[degraded]))
    assert "computed for only 9.0 ms; the rest is its queue or the network" in result.sentence
    assert "drafting then fell back to ngram (breaker open)" in result.sentence


def test_a_full_batch() -> None:
    result = explained(lambda r: r.round(compute=142, batch={"sessions": 16, "rows": 71}))
    assert f"target {TARGET_AT}" in result.sentence
    assert "it computed for 142 ms in a step of 16 sessions and 71 rows" in result.sentence


def test_prefill_of_others() -> None:
    batch = {"sessions": 5, "rows": 200, "prefill_rows": 180}
    result = explained(lambda r: r.round(compute=300, batch=batch))
    assert "with prompts of other sessions: 180 of its 200 rows (90 %)" in result.sentence


def test_a_short_prompt_of_a_session_that_is_alone_is_not_one_of_others() -> None:
    scene = Scene()
    batch = {"sessions": 1, "rows": 20, "prefill_rows": 19}
    request = scene.request(prompt=20).round(compute=476, kv_reused=0, batch=batch)
    usual_rounds(request).end()
    result = explain(scene.story())
    assert "its step computed for 476 ms" in result.sentence


def test_a_cold_cache() -> None:
    result = explained(lambda r: r.round(compute=260, kv_reused=32))
    assert (
        "the target's cache held 32 of 118 tokens, and recomputing the other 86 took 260 ms"
        in result.sentence
    )


def test_uncached_prompt() -> None:
    scene = Scene()
    request = scene.request(prompt=182).round(compute=240, kv_reused=0)
    usual_rounds(request).end()
    result = explain(scene.story())
    assert result.sentence.startswith("Round 0 (token 0, position 182, target ")
    assert "it read the prompt, of which the cache held 0 of 182 tokens" in result.sentence


def test_cold_cache_after_a_move() -> None:
    result = explained(lambda r: r.round(compute=260, kv_reused=0, target=OTHER_TARGET_AT, events=moved(r)))
    assert f"target {OTHER_TARGET_AT}) took 262 ms" in result.sentence
    assert f"after the session moved from target {TARGET_AT} (late), the target's cache held 0 of 118" in (
        result.sentence
    )


def test_lost_replica() -> None:
    result = explained(
        lambda r: r.round(wire=900, compute=60, kv_reused=0, target=OTHER_TARGET_AT, events=moved(r, "late"))
    )
    assert (
        f"900 ms passed until the session moved from target {TARGET_AT} to target {OTHER_TARGET_AT} (late)"
        in (result.sentence)
    )
    assert "which recomputed 118 tokens in 60.0 ms" in result.sentence


def test_retried_request() -> None:
    again = event(names.REQUEST_RETRIED, 0, pool="target", reason="unavailable")
    result = explained(lambda r: r.round(wire=450, events=[again]))
    assert "450 ms passed until the request to the target was retried (unavailable)" in result.sentence


def test_slow_commit() -> None:
    def make(request: RequestMaker) -> None:
        request.round(commit=640)
        retried = event(names.STORE_RETRIED, request.at_ns + ns(500), reason="no response")
        request.store("commit", 640, passes=False, events=[retried])

    result = explained(make)
    assert result.sentence.startswith(
        f"The tokens of round 6 (token 18, position 118, target {TARGET_AT}) were "
    )
    assert "were logged 640 ms after they were confirmed" in result.sentence
    assert "the session store took 640 ms for the commit after a retry" in result.sentence


@pytest.mark.parametrize("retried", ["before", "after"])
def test_retries_of_other_commits_are_not_those_of_a_slow_one(retried: str) -> None:
    def commit(request: RequestMaker) -> None:
        request.store("commit", 700, passes=False, events=[event(names.STORE_RETRIED, request.at_ns)])

    def make(request: RequestMaker) -> None:
        if retried == "before":
            commit(request)
        request.round(commit=640).store("commit", 640, passes=False)
        if retried == "after":
            commit(request.idle(1))

    assert "took 640 ms for the commit, and tokens" in explained(make).sentence


def test_slow_commit_delays_the_next_round() -> None:
    result = explained(lambda r: r.round(commit=800).idle(900).round(kv_reused=118))
    assert "a commit to the session store was under way for 800 ms of it (it took 800 ms)" in result.sentence


def test_slow_commit_by_its_span() -> None:
    result = explained(lambda r: r.store("commit", 700, passes=False).idle(710).round())
    assert "a commit to the session store was under way" in result.sentence
    assert "(it took 700 ms)" in result.sentence


def test_a_stalled_client() -> None:
    result = explained(lambda r: r.idle(1200).event(names.CLIENT_STALLED, stalled_ns=ns(1100)))
    assert result.sentence.startswith("Round 6 (token 18, position 118, target ")
    assert "began after 1,200 ms without a round" in result.sentence
    assert "the client read nothing for 1,100 ms of it" in result.sentence


def test_a_queue_is_the_targets_whatever_else_happened() -> None:
    def make(request: RequestMaker) -> None:
        again = event(names.REQUEST_RETRIED, request.at_ns, pool="target", reason="unavailable")
        request.store("commit", 3900, passes=False)
        request.round(queue=4000, target=OTHER_TARGET_AT, events=[again, *moved(request, "left")])
        request.event(names.CLIENT_STALLED, stalled_ns=ns(3900))

    result = explained(make)
    assert f"target {OTHER_TARGET_AT}) took 4,029 ms" in result.sentence
    assert result.sentence.endswith(": it queued for 4,000 ms at the target.")


@pytest.mark.parametrize("reason", ["late", ""])
def test_an_open_round_waited_for_neither_client_nor_log(reason: str) -> None:
    def make(request: RequestMaker) -> None:
        events = moved(request, reason) if reason else ()
        request.store("commit", 1100, passes=False).round(wire=1200, events=events)
        request.event(names.CLIENT_STALLED, stalled_ns=ns(1100))

    result = explained(make)
    assert ("passed until the session moved" in result.sentence) == bool(reason)
    assert ("passed on the network" in result.sentence) == (not reason)


def test_no_free_blocks() -> None:
    result = explained(lambda r: r.round(queue=330, batch={"free_blocks": 0, "queue_depth": 3}))
    assert "it queued for 330 ms at the target because KV blocks were short (0 were free)" in (
        result.sentence
    )


def test_a_preempted_session() -> None:
    def make(request: RequestMaker) -> None:
        at_ns = request.at_ns + ns(200)
        request.round(queue=330, calls=True, served_events=[event(names.KV_PREEMPTED, at_ns)])

    result = explained(make)
    assert "an older session had taken its KV blocks" in result.sentence


def test_a_session_that_the_engine_preempted() -> None:
    scene = Scene()
    request = usual_rounds(scene.request())
    preempted = event(names.KV_PREEMPTED, request.at_ns + ns(200), session_id=SESSION)
    other = scene.request(session="0" * 32, at_ns=preempted.time_ns)
    other.round(batch={"events": [preempted]}).end()
    usual_rounds(request.round(queue=330, batch={})).end()
    story = next(one for one in scene.stories() if one.session_id == SESSION)
    assert "because an older session had taken its KV blocks" in explain(story).sentence


def test_a_plain_queue() -> None:
    result = explained(lambda r: r.round(queue=90, batch={"queue_depth": 7}))
    assert "it queued for 90.0 ms at the target with 6 other requests" in result.sentence


def test_a_slow_rank() -> None:
    result = explained(lambda r: r.round(compute=200, batch={"ranks": (40, 198, 41)}))
    assert "rank 1 took 198 ms for its part of the step, the others 40.5 ms" in result.sentence


def test_a_slow_wire() -> None:
    result = explained(lambda r: r.round(wire=77))
    assert "77.0 ms of it passed on the network to the target, or in the gateway" in result.sentence


def test_slow_step_without_other_cause() -> None:
    result = explained(lambda r: r.round(compute=120))
    assert "its step computed for 120 ms, usually 28.0: the machine was busy" in result.sentence


def test_a_step_is_compared_with_those_of_about_as_many_rows() -> None:
    def make(request: RequestMaker) -> None:
        for _ in range(3):
            request.round(compute=17, batch={"sessions": 2, "rows": 10})
        request.round(compute=100, batch={"sessions": 2, "rows": 11})

    assert "its step of 11 rows computed for 100 ms, usually 17.0: the machine was busy" in (
        explained(make).sentence
    )


def test_a_step_is_compared_with_those_of_its_target() -> None:
    def make(request: RequestMaker) -> None:
        for _ in range(3):
            request.round(compute=100, target=OTHER_TARGET_AT)
        request.round(compute=300, target=OTHER_TARGET_AT)

    assert "its step computed for 300 ms, usually 100: the machine was busy" in explained(make).sentence


def test_a_step_of_more_rows_than_all_others_is_not_blamed_on_the_machine() -> None:
    result = explained(lambda r: r.round(compute=120, batch={"sessions": 2, "rows": 40}))
    assert "its step computed for 120 ms, and nothing else delayed it" in result.sentence


def test_slow_round_after_the_prompt() -> None:
    scene = Scene()
    request = scene.request(prompt=900).round(compute=800, kv_reused=0)
    usual_rounds(request).round(draft=70, draft_compute_ns=ns(66)).end()
    assert "it read the prompt" in explain(scene.story()).sentence
    assert "After the prompt: Round 7 (token 21, position 921, target " in summarize(scene.story())
    assert "it waited 70.0 ms for draft" in summarize(scene.story())
    scene = Scene()
    usual_rounds(scene.request(prompt=900).round(compute=800, kv_reused=0)).end()
    assert "After the prompt" not in summarize(scene.story())


def test_round_without_response() -> None:
    scene = Scene()
    request = usual_rounds(scene.request())
    lost: dict[str, Any] = {names.ROUND_INDEX: 6, names.ROUND_POSITION: 118, names.ERROR_TYPE: "unavailable"}
    cut_off = Span(
        request.trace_id,
        scene.span_id(),
        request.span_id,
        names.ROUND,
        request.at_ns,
        request.at_ns + ns(10_000),
        GATEWAY,
        attributes=lost,
    )
    scene.add(cut_off)
    request.idle(10_000).end(error="unavailable")
    result = explain(scene.story())
    assert result.sentence.startswith("Round 6 (token 18, position 118) took 10,000 ms")
    assert result.sentence.endswith(": the target sent no response (unavailable).")


def test_a_slow_beginning() -> None:
    scene = Scene()
    usual_rounds(scene.request().idle(300)).end()
    assert "the gateway admitted the request, read it and opened" in explain(scene.story()).sentence
    scene = Scene()
    usual_rounds(scene.request().store("create", 250).store("claim", 30).idle(5)).end()
    result = explain(scene.story())
    assert "opening the session in the store took 280 ms of it" in result.sentence


def test_no_slow_round() -> None:
    scene = Scene()
    usual_rounds(scene.request()).round(compute=30).end()
    result = explain(scene.story())
    assert result.sentence.startswith("No round is much slower than the others; round 6 (token 18,")
    assert "took 32.0 ms (1.1 times the median of 31.0): its step computed for 30.0 ms" in result.sentence


def test_rounds_that_are_not_recorded_may_be_faster() -> None:
    scene = Scene()
    request = scene.request(attributes={names.ROUNDS: 200})
    for _ in range(6):
        request.round(compute=298)
    request.round(compute=310).end()
    sentence = explain(scene.story()).sentence
    assert sentence.startswith("Round 6 (token 18,")
    assert "took 312 ms (1.0 times the median of the recorded rounds, 301): its step computed" in sentence


def test_single_round() -> None:
    scene = Scene()
    scene.request().round(draft=20, compute=90, kv_reused=99).end()
    result = explain(scene.story())
    assert "and nothing else delayed it" in result.sentence
    assert "median" not in result.sentence


def test_trace_without_rounds() -> None:
    scene = Scene()
    scene.request(attributes={names.SLOWEST_ROUND_NS: ns(212), names.SLOWEST_ROUND_POSITION: 131}).end()
    result = explain(scene.story())
    assert result.round is None
    assert result.sentence == ("The trace has no rounds; the slowest was at position 131 and took 212 ms.")


def test_stall_outside_the_round_is_ignored() -> None:
    def make(request: RequestMaker) -> None:
        request.round(compute=400)
        request.round(queue=100).event(names.CLIENT_STALLED, stalled_ns=ns(90))

    assert "usually 28.0: the machine was busy" in explained(make).sentence


def test_summary() -> None:
    scene = Scene()
    request = usual_rounds(scene.request(attributes={names.CLIENT_STALLED_NS: ns(1500), names.ROUNDS: 9}))
    request.round(events=moved(request, "unavailable"))
    request.end(error="unavailable", problem="no verdict from the target")
    text = summarize(scene.story())
    assert "Accepted by source" not in text
    assert "It ended with unavailable (no verdict from the target)." in text
    assert "Of 210 ms in rounds, 0 % were spent waiting for drafts, 3 % in the target's queue" in text
    assert "Of 28 draft tokens, 28 were verified and 14 accepted (50 % of those)." in text
    assert f"It moved from target {TARGET_AT} to {OTHER_TARGET_AT} (unavailable)." in text
    assert "Its client left the stream unread for 1.50 s in all." in text
    assert "2 rounds of it are not in the trace." in text


def test_accepted_draft_tokens_are_told_by_their_sources() -> None:
    scene = Scene()
    request = usual_rounds(scene.request(attributes={names.SOURCES: ("grammar 4/4", "model 2/5")}))
    request.round(round_sources=("model 1/2", "ngram 1/2"))
    request.end()
    assert "Accepted by source: grammar 4 of 4, model 2 of 5." in summarize(scene.story())


def test_acceptance_of_trees_is_told_by_rank_and_position() -> None:
    scene = Scene()
    trees = {names.RANKS: ("0 9/20", "1 3/12"), names.POSITIONS: ("0 8/10", "1 4/9")}
    usual_rounds(scene.request(attributes=trees)).end()
    text = summarize(scene.story())
    assert "Accepted by rank: 0: 9 of 20, 1: 3 of 12." in text
    assert "Accepted by position, in rounds: 0: 8 of 10, 1: 4 of 9." in text


@pytest.mark.parametrize(("with_states", "is_told"), [(0, False), (9, True)])
def test_proposals_that_read_the_targets_state_are_told(with_states: int, is_told: bool) -> None:
    scene = Scene()
    counts = {names.PROPOSALS: 12, names.PROPOSALS_WITH_FEATURES: with_states}
    usual_rounds(scene.request(attributes=counts)).end()
    assert ("Of 12 proposals, 9 read the target's state." in summarize(scene.story())) == is_told


def test_a_chain_has_one_rank() -> None:
    scene = Scene()
    usual_rounds(scene.request(attributes={names.RANKS: ("0 9/20",), names.POSITIONS: ("0 8/10",)})).end()
    assert "by rank" not in summarize(scene.story())


def test_sources_of_a_lost_request_are_those_of_its_rounds() -> None:
    scene = Scene()
    request = usual_rounds(scene.request())
    request.round(round_sources=("model 1/2", "grammar 3/3")).round(round_sources=("model 2/2",))
    request.round(round_sources=("model 1/x", "\x1b[31m 1/1", "model 1/2/3", "model", 7))
    request.end()
    assert "Accepted by source: model 3 of 4, grammar 3 of 3." in summarize(scene.story())


def test_drafts_of_a_request_without_a_span_are_those_of_its_rounds() -> None:
    text = summarize(_resumed_once())
    assert "Of 8 draft tokens, 8 were verified and 4 accepted (50 % of those)." in text
    assert "Accepted by source: model 0 of 4, grammar 4 of 4." in text
    assert "Its client left the stream unread for 250 ms in all." in text
    assert "50 % accepted" in figures(_resumed_once())


def _resumed_once() -> Story:
    """Return a session whose first request has no span, since its gateway was killed."""
    scene = Scene()
    stall = event(names.CLIENT_STALLED, 0, stalled_ns=ns(50))
    killed = scene.request().round(accepted=0, round_sources=("model 0/4",), events=[stall])
    scene.request(
        at_ns=killed.at_ns + ns(100),
        position=killed.position,
        resumed=True,
        continues=killed.key,
        attributes={names.SOURCES: ("grammar 4/4",), names.CLIENT_STALLED_NS: ns(200)},
    ).round(accepted=4).end()
    (story,) = scene.stories(SESSION)
    return story
