"""A session or a trace is found by its id or how that begins, with all that belongs to it and no more."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from galley.core import names
from galley.trace.explain.explain import explain
from galley.trace.read import library
from galley.trace.read.build import stories_of
from galley.trace.read.library import NotFound, find, index_of
from galley.trace.read.otlp_file import Lines, new_file, newest_file
from galley.trace.read.spans import Process, Span
from tests.fakes.trace_builder import BEGAN_NS, SESSION, Scene, event, ns, summarize, write

OTHER = "0123456789abcdef0123456789abcdef"
_NO_PID = 2**22 + 1
"""Linux gives no process a higher number than 2^22."""


@pytest.fixture
def scene() -> Scene:
    scene = Scene()
    other = scene.request(session=OTHER).round().end()
    shared = {"sessions": 2, "ranks": (5, 6), "below": other.key}
    first = scene.request().round(batch=shared, company=[other.key]).end()
    scene.request(
        at_ns=first.at_ns + ns(100), position=first.position, resumed=True, continues=first.key
    ).round().end()
    return scene


def test_a_session_brings_its_requests_its_passes_and_their_ranks(scene: Scene, tmp_path: Path) -> None:
    result = find(Lines(write(scene, tmp_path / "t.jsonl")), SESSION)
    assert result.session_id == SESSION
    assert {span.name for span in result.spans} >= {"round", names.VERIFY_BATCH, names.RANK_FORWARD}
    (story,) = stories_of(result.spans, result.session_id, result.index.sessions_of)
    assert len(story.requests) == 2
    batch = story.rounds[0].batch
    assert batch is not None
    assert [rank.duration_ns for rank in batch.ranks] == [ns(6)]
    assert list(story.company(batch)) == [OTHER]
    assert not any(span.text(names.SESSION_ID) == OTHER for span in result.spans)


def test_a_shared_step_does_not_bring_rounds_of_the_other_session(scene: Scene, tmp_path: Path) -> None:
    result = find(Lines(write(scene, tmp_path / "t.jsonl")), OTHER)
    assert {names.VERIFY_BATCH, names.RANK_FORWARD} <= {span.name for span in result.spans}
    (story,) = stories_of(result.spans, "", result.index.sessions_of)
    assert [story.session_id, len(story.rounds)] == [OTHER, 1]


@pytest.mark.parametrize("expected", ["5e55a0de5e55a0", "5e", "5e55a0de5e55a0de5e55a0de5e55a0de"])
def test_the_beginning_of_an_id_will_do(scene: Scene, tmp_path: Path, expected: str) -> None:
    assert find(Lines(write(scene, tmp_path / "t.jsonl")), expected).session_id == SESSION


def test_a_trace_leads_to_its_session(scene: Scene, tmp_path: Path) -> None:
    lines = Lines(write(scene, tmp_path / "t.jsonl"))
    resumed = next(span for span in scene.spans if span.attributes.get(names.RESUMED))
    for expected in (resumed.trace_id, resumed.trace_id.upper()):
        assert find(lines, expected).session_id == SESSION


def test_a_killed_gateways_trace_leads_to_the_session_that_went_on(tmp_path: Path) -> None:
    scene = Scene()
    killed = scene.request(trace_id="abc" + "0" * 29).round()
    scene.request(at_ns=killed.at_ns, position=103, resumed=True, continues=killed.key).round().end()
    result = find(Lines(write(scene, tmp_path / "t.jsonl")), "abc")
    assert result.session_id == SESSION
    assert sum(span.name == names.ROUND for span in result.spans) == 2


def test_a_request_that_was_refused_has_no_session_and_is_found_by_its_trace(tmp_path: Path) -> None:
    scene = Scene()
    for _ in range(2):
        refused = scene.request(session="", attributes={names.ROUNDS: 0, names.FIELD: "max_tokens"})
        refused.end(error="invalid_argument", problem="max_tokens: must be >= 1")
    lines = Lines(write(scene, tmp_path / "t.jsonl"))
    (latest, first) = index_of(lines).latest(2)
    assert latest.error == first.error == "invalid_argument max_tokens"
    result = find(lines, first.trace_id)
    assert len(result.spans) == 1
    (story,) = stories_of(result.spans, result.session_id)
    reason = "invalid_argument (max_tokens: must be >= 1), before it had a session."
    assert explain(story).sentence == f"The call was refused with {reason}"
    assert "ended with" not in summarize(story)


def test_the_field_is_named_if_the_message_does_not(tmp_path: Path) -> None:
    scene = Scene()
    refused = scene.request(session="", attributes={names.ROUNDS: 0, names.FIELD: "body"})
    refused.end(error="invalid_argument", problem="must be JSON")
    assert "invalid_argument (field body, must be JSON)" in explain(scene.story()).sentence


def test_a_trace_of_several_sessions_is_all_of_them(tmp_path: Path) -> None:
    scene = Scene()
    first = scene.request().round().end()
    scene.request(session=OTHER, trace_id=first.trace_id).round().end()
    result = find(Lines(write(scene, tmp_path / "t.jsonl")), first.trace_id)
    assert result.session_id == ""
    assert {story.session_id for story in stories_of(result.spans)} == {SESSION, OTHER}


def test_a_trace_of_another_system_is_found_as_it_is(scene: Scene, tmp_path: Path) -> None:
    trace_id = "feed" + "0" * 28
    scene.add(Span(trace_id, scene.span_id(), "", "GET /", BEGAN_NS, BEGAN_NS + 5, Process("web")))
    result = find(Lines(write(scene, tmp_path / "t.jsonl")), "feed")
    assert [span.name for span in result.spans] == ["GET /"]
    assert stories_of(result.spans) == ()


def test_missing_or_ambiguous_id_is_refused(scene: Scene, tmp_path: Path) -> None:
    scene.request(session="5e99" + "0" * 28).round().end()
    lines = Lines(write(scene, tmp_path / "t.jsonl"))
    with pytest.raises(NotFound, match=r"no session or trace 'dead' in .*t\.jsonl"):
        find(lines, "dead")
    with pytest.raises(NotFound, match=r"one id only, got session 5e55a0de.*, session 5e990000"):
        find(lines, "5e")
    with pytest.raises(NotFound, match=r"no session or trace '\.\*'"):
        find(lines, ".*")


def test_latest_sessions_come_first_with_their_summary(scene: Scene, tmp_path: Path) -> None:
    scene.request(session="f" * 32, at_ns=BEGAN_NS + ns(9000)).round(draft=70).end(error="unavailable")
    latest = index_of(Lines(write(scene, tmp_path / "t.jsonl"))).latest(2)
    assert [entry.session_id for entry in latest] == ["f" * 32, SESSION]
    assert (latest[0].output_tokens, latest[0].slowest_round_ns, latest[0].error) == (
        3,
        ns(100),
        "unavailable",
    )


def test_excess_spans_are_cut_off_with_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "MAX_SPANS", 10)
    scene = Scene()
    request = scene.request()
    for _ in range(30):
        request.round()
    request.end()
    scene.spans.insert(0, scene.spans.pop())
    result = find(Lines(write(scene, tmp_path / "t.jsonl")), SESSION)
    assert result.cut
    assert len(result.spans) == 10
    (story,) = stories_of(result.spans, result.session_id, cut=result.cut)
    assert "only part of its spans was read" in summarize(story)


def test_only_a_few_files_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "galley" / "traces"
    assert newest_file(directory) is None
    made = []
    for pid in range(_NO_PID, _NO_PID + 6):
        monkeypatch.setattr("os.getpid", lambda pid=pid: pid)
        made.append(new_file(directory))
        made[-1].write_text("{}\n")
        made[-1].with_name(f"{made[-1].name}.1").write_text("{}\n")
    assert newest_file(directory) in made
    assert len(list(directory.glob("*.jsonl"))) == 4
    assert len(list(directory.iterdir())) == 8
    assert directory.stat().st_mode & 0o077 == 0


def test_the_files_of_stacks_that_run_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = new_file(tmp_path)
    mine.write_text("{}\n")
    os.utime(mine, (0, 0))
    for pid in range(_NO_PID, _NO_PID + 6):
        monkeypatch.setattr("os.getpid", lambda pid=pid: pid)
        new_file(tmp_path).write_text("{}\n")
    assert mine.exists()


def test_step_that_evicted_the_session_is_included(tmp_path: Path) -> None:
    scene = Scene()
    idle = scene.request().round().end()
    evicted = event(names.KV_EVICTED, idle.at_ns + ns(50), session_id=SESSION)
    others = scene.request(session=OTHER, trace_id=OTHER, at_ns=idle.at_ns + ns(40)).round(batch={}).end()
    scene.spans = [
        replace(span, events=(evicted,)) if span.name == names.VERIFY_BATCH else span for span in scene.spans
    ]
    scene.request(
        at_ns=others.at_ns + ns(100), position=idle.position, resumed=True, continues=idle.key
    ).round().end()
    lines = Lines(write(scene, tmp_path / "t.jsonl"))
    result = find(lines, SESSION)
    (story,) = stories_of(result.spans, result.session_id, result.index.sessions_of)
    before, after = story.requests
    assert [reported.name for reported in before.events] == [names.KV_EVICTED]
    assert not after.events
    (other,) = stories_of(find(lines, OTHER).spans, OTHER)
    assert not any(request.events for request in other.requests)
    assert not any(one.events for one in other.rounds)
