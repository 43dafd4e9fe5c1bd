"""The traces of a stack whose processes are killed, as a collector receives them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from galley.core import names
from galley.trace.read.build import stories_of
from galley.trace.read.library import find
from galley.trace.read.model import Story
from galley.trace.read.otlp_file import Lines, OtlpFile
from galley.trace.read.spans import CLIENT as ASKS
from galley.trace.read.spans import ERROR, SERVER, Span, SpanKey
from tests.e2e.tracing import ASK, CLIENT, MAX_TOKENS, PROMPT, STREAMS, Run, traced_run
from tests.fakes.spans import MS
from tests.fakes.tiny_model import save_tiny_model
from tests.integration.services.gateway.test_request_spans import PARTS, RECOMMENDED, REQUIRED

SLACK_NS = 500 * MS
GATEWAY, DRAFT, TARGET = "galley-gateway", "galley-draft", "galley-target"
REQUEST = "text_completion tiny"
STEPS = (names.VERIFY_BATCH, names.DRAFT_BATCH)
OF_ALL_ROUNDS = {
    *PARTS,
    *(names.ROUND_INDEX, names.ROUND_POSITION, names.ROUND_CONFIRMED, names.ROUND_K, names.ROUND_DRAFTED),
    *(names.ROUND_VERIFIED, names.ROUND_ACCEPTED, names.ROUND_STRATEGY, names.ROUND_OVERLAP),
    *(names.LINGER_NS, names.DRAFT_COMPUTE_NS, names.COMMIT_NS, names.BATCH_SESSIONS, names.TARGET_REPLICA),
}
UNSET = {names.SEED, names.REQUEST_SEED}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def run(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Run]:
    yield await traced_run(save_tiny_model(tmp_path_factory.mktemp("models") / "tiny"))


def spans_by_name(spans: list[Span]) -> dict[str, list[Span]]:
    found: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        found[span.name].append(span)
    return found


def assert_one_tree(spans: list[Span]) -> None:
    """Check that all spans descend from the client's."""
    ids = {span.span_id for span in spans}
    [root] = [span for span in spans if not span.parent_id]
    assert (root.name, root.process.service) == (ASK, CLIENT)
    orphans = [f"{span.process.service}: {span.name}" for span in spans if span.parent_id not in {"", *ids}]
    assert orphans == []


def chains(spans: list[Span]) -> Iterator[tuple[str, ...]]:
    """Yield services and names from each span up to the root."""
    by_id = {span.span_id: span for span in spans}
    for span in spans:
        chain = [span]
        while chain[-1].parent_id:
            chain.append(by_id[chain[-1].parent_id])
        yield tuple(f"{one.process.service.removeprefix('galley-')}: {one.name}" for one in chain)


def test_request_is_one_trace_of_four_processes(run: Run) -> None:
    assert len(set(run.whole)) == STREAMS
    for trace_id in run.whole:
        spans = run.trace(trace_id)
        assert_one_tree(spans)
        assert len({span.process.instance for span in spans}) >= 4
        assert {span.process.service for span in spans} == {CLIENT, GATEWAY, DRAFT, TARGET}
        above = (f"gateway: {REQUEST}", "client: ask")
        beneath = ("gateway: round", *above)
        expected = {
            ("client: ask",),
            above,
            beneath,
            *((f"gateway: EVALSHA {operation}", *above) for operation in ("create", "finish")),
            *((f"gateway: {call}", *beneath) for call in (names.PROPOSE, names.VERIFY)),
            (f"draft: {names.PROPOSE}", f"gateway: {names.PROPOSE}", *beneath),
            (f"target: {names.VERIFY}", f"gateway: {names.VERIFY}", *beneath),
        }
        steps = {
            (f"target: {names.VERIFY_BATCH}", f"gateway: {names.VERIFY}", *beneath),
            (f"draft: {names.DRAFT_BATCH}", f"gateway: {names.PROPOSE}", *beneath),
        }
        assert expected <= set(chains(spans)) <= expected | steps | {("gateway: EVALSHA commit", *above)}
    made = [*run.whole, *run.refused, *run.cut_from_target, *run.cut_from_gateway]
    assert {span.trace_id for span in run.spans.values()} == set(made)


def test_the_parts_of_a_round_sum_to_it(run: Run) -> None:
    for trace_id in run.whole:
        by_name = spans_by_name(run.trace(trace_id))
        rounds = sorted(by_name[names.ROUND], key=lambda span: span.integer(names.ROUND_INDEX))
        [request] = by_name[REQUEST]
        assert [span.integer(names.ROUND_INDEX) for span in rounds] == list(
            range(request.integer(names.ROUNDS))
        )
        position = len(PROMPT)
        for span in rounds:
            assert span.attributes.keys() >= OF_ALL_ROUNDS
            assert abs(sum(span.integer(part) for part in PARTS) - span.duration_ns) < MS
            assert request.start_ns <= span.start_ns
            assert span.end_ns <= request.end_ns
            assert span.integer(names.ROUND_POSITION) == position
            position += span.integer(names.ROUND_CONFIRMED)
        assert position == len(PROMPT) + MAX_TOKENS


def test_rounds_batches_and_items_are_linked_both_ways(run: Run) -> None:
    every = run.spans
    for trace_id in run.whole:
        by_name = spans_by_name(run.trace(trace_id))
        # Of what was given up in time, nothing need have been computed.
        served = {
            name: {span.key for span in by_name[name] if span.text(names.OUTCOME) == "result"}
            for name in (names.VERIFY, names.PROPOSE)
        }
        linked: set[SpanKey] = set()
        for one in by_name[names.ROUND]:
            [link] = one.links
            assert link.attributes == {names.LINK: names.LINK_BATCH}
            batch = every[link.key]
            assert (batch.name, batch.process.service) == (names.VERIFY_BATCH, TARGET)
            assert every[batch.trace_id, batch.parent_id].name == names.VERIFY
            items = {back.key for back in batch.links}
            assert all(back.attributes == {names.LINK: names.LINK_ITEM} for back in batch.links)
            assert len(items & served[names.VERIFY]) == 1, "one item of a session is in a pass"
            assert len(items) == batch.integer(names.BATCH_SESSIONS), "all are traced"
            assert one.integer(names.BATCH_SESSIONS) == batch.integer(names.BATCH_SESSIONS)
            assert len(batch.values(names.RANK_FORWARD_NS)) == 1
            assert 0 < batch.integer(names.FORWARD_NS) <= batch.duration_ns
            linked |= items
        assert served[names.VERIFY] <= linked
        of_draft = [span for span in every.values() if span.name == names.DRAFT_BATCH]
        assert served[names.PROPOSE] <= {link.key for span in of_draft for link in span.links}
    company = [span for span in every.values() if span.name == names.VERIFY_BATCH and len(span.links) > 1]
    assert company, "some passes served several"


def test_every_request_keeps_the_conventions(run: Run) -> None:
    requests = [span for span in run.spans.values() if span.is_request]
    assert len(requests) == 2 * STREAMS + 2, "not every request has a span"
    for span in requests:
        assert span.kind == SERVER
        assert span.attributes.keys() >= REQUIRED
        assert (span.status == ERROR) == (names.ERROR_TYPE in span.attributes)
        if span.trace_id in run.refused:
            assert span.text(names.ERROR_TYPE) == "invalid_argument"
            continue
        assert span.name == REQUEST
        assert span.attributes.keys() >= RECOMMENDED - UNSET
        assert span.integer(names.INPUT_TOKENS) == len(PROMPT)
        assert span.integer(names.OUTPUT_TOKENS) == MAX_TOKENS
        assert span.text(names.RESPONSE_ID) == span.text(names.SESSION_ID)


def test_killed_target_orphans_no_span(run: Run) -> None:
    moved = []
    for trace_id in run.cut_from_target:
        spans = run.trace(trace_id)
        assert_one_tree(spans)
        moved += [event for span in spans for event in span.events if event.name == names.SESSION_MOVED]
        by_name = spans_by_name(spans)
        [request] = by_name[REQUEST]
        served = {span.text(names.TARGET_REPLICA) for span in by_name[names.ROUND]}
        assert len(served) == 1 + request.integer(names.MOVES)
        assert sum(span.integer(names.ROUND_CONFIRMED) for span in by_name[names.ROUND]) == MAX_TOKENS
    assert moved, "the killed target served none"
    for event in moved:
        assert (event.text(names.POOL), event.text(names.SOURCE)) == ("target", run.killed_target)
        assert event.text(names.TO) not in {"", run.killed_target}


def story_of(run: Run, trace_id: str, directory: Path) -> Story:
    """Return the request as `galley trace` reads it."""
    directory.mkdir(exist_ok=True)
    file = OtlpFile(directory / "traces.jsonl")
    file.append(run.export)
    file.close()
    found = find(Lines(file.path), trace_id)
    [story] = stories_of(found.spans, found.session_id, found.index.sessions_of)
    return story


def test_resumed_request_continues_the_trace_of_a_killed_gateway(run: Run, tmp_path: Path) -> None:
    """Only its own span and its calls under way are missing."""
    [trace_id] = run.cut_from_gateway
    spans = run.trace(trace_id)
    [resumed] = [span for span in spans if span.is_request]
    [root] = [span for span in spans if not span.parent_id]
    assert (resumed.parent_id, resumed.attributes[names.RESUMED]) == (root.span_id, True)
    [link] = resumed.links
    assert (link.trace_id, link.attributes) == (trace_id, {names.LINK: names.LINK_CONTINUES})
    killed = link.span_id
    ids = {span.span_id for span in spans}
    assert killed not in ids
    instances = {span.process.instance for span in spans if span.process.service == GATEWAY}
    assert len(instances) == 2
    for span in spans:
        if span.parent_id in {"", *ids}:
            continue
        # Of a round, or a call, that was under way.
        assert span.parent_id == killed or span.name in {names.VERIFY, names.PROPOSE, *STEPS}
        assert span.process.instance != resumed.process.instance
        # A call that waited in a socket began later: its caller was gone by then.
        assert span.start_ns < resumed.start_ns or span.text(names.OUTCOME) == "cancelled"

    story = story_of(run, trace_id, tmp_path)
    before, after = story.requests
    assert (before.span, after.is_resumed) == (None, True)
    assert before.rounds
    assert before.rounds[0].position == len(PROMPT)
    ends = [one.position + one.confirmed for one in after.rounds]
    assert max(ends) == len(PROMPT) + MAX_TOKENS
    assert len(PROMPT) < after.rounds[0].position, "it started anew"


@pytest.mark.parametrize("seconds", [-5, 5])
def test_clock_offset_is_corrected(run: Run, tmp_path: Path, seconds: int) -> None:
    """The targets' clocks are off, as another machine's may be."""
    off_ns = seconds * 1_000_000_000
    skewed = Run()
    skewed.export.CopyFrom(run.export)
    for resource in skewed.export.resource_spans:
        attributes = {one.key: one.value.string_value for one in resource.resource.attributes}
        if attributes["service.name"] == TARGET:
            for span in (span for scope in resource.scope_spans for span in scope.spans):
                span.start_time_unix_nano += off_ns
                span.end_time_unix_nano += off_ns
    trace_id = run.whole[0]
    corrected, reference = (
        story_of(one, trace_id, tmp_path / name) for one, name in ((skewed, "a"), (run, "b"))
    )
    # A process that waits for a core ends its spans late, which looks like a small offset.
    assert all(abs(shift.offset_ns) < SLACK_NS for shift in reference.shifts)
    [shift] = [shift for shift in corrected.shifts if shift.process.service == TARGET]
    assert abs(shift.offset_ns + off_ns) < reference.end_ns - reference.start_ns
    assert [one.parts for one in corrected.rounds] == [one.parts for one in reference.rounds]
    for call in (call for one in corrected.rounds for call in one.calls if call.span.name == names.VERIFY):
        assert call.span.kind == ASKS
        assert call.served is not None
        assert call.span.start_ns - SLACK_NS < call.served.start_ns
        assert call.served.end_ns < call.span.end_ns + SLACK_NS
