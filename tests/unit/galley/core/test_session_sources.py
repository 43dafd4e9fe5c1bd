"""What a session proposes itself: forced runs of its grammar, and what its caller predicts."""

from __future__ import annotations

import json
from collections.abc import Container, Mapping
from functools import partial

import pytest

from galley.core.errors import Broken
from galley.core.grammar.compiled import compile_grammar
from galley.core.grammar.spec import GrammarSpec
from galley.core.lookup.prediction import PredictionLookup, prediction_calibration
from galley.core.names import GRAMMAR, PREDICTION
from galley.core.session import events as ev
from galley.core.session.machine import SessionLimits
from galley.core.session.round import SpeculationStats
from galley.core.session.sources import LocalSources
from tests.fakes.scripted_sources import scripted_sources
from tests.fakes.session_world import World, spec
from tests.fakes.vocabularies import byte_vocabulary, tokens_of

LENGTH = 57
ALL = range(LENGTH)
ANY_JSON = GrammarSpec("json_object")


@pytest.fixture(params=[0, 32], ids=["rounds", "credit"])
def credit(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def world(
    credit: int,
    forced: Container[int] = (),
    edits: Mapping[int, int] | None = None,
    *,
    k: int = 4,
    auto: bool = False,
) -> World:
    return World(
        spec(k=k, auto=auto, stop_token_ids=frozenset[int](), max_position=3 + LENGTH),
        SessionLimits(credit=credit),
        sources=partial(scripted_sources, forced=forced, edits=edits),
    )


def finished(here: World, spoil_at: int | None = None) -> SpeculationStats:
    here.run_to_end(spoil_at=spoil_at)
    assert here.seen == here.truth[3:]
    return here.session.stats


def test_a_forced_run_is_proposed_without_a_draft(credit: int) -> None:
    here = world(credit, ALL)
    request = here.to_target[0]
    assert isinstance(request, ev.Verify)
    assert request.draft_tokens == tuple(here.truth[3 : 3 + len(request.draft_tokens)])
    assert set(request.survival) == {1.0}
    stats = finished(here)
    assert here.proposals == 0
    assert stats.rounds <= 1 + LENGTH // 5
    assert {done.strategy for done in here.rounds[:-1]} == {GRAMMAR}
    assert stats.sources[GRAMMAR].accepted == stats.accepted >= LENGTH - stats.rounds


def test_a_prediction_is_proposed_without_a_draft(credit: int) -> None:
    here = world(credit, edits={})
    stats = finished(here)
    assert here.proposals == 0
    assert stats.rounds <= 1 + LENGTH // 5
    assert stats.sources[PREDICTION].accepted == stats.accepted >= LENGTH - stats.rounds


def test_a_prediction_is_used_again_after_a_difference(credit: int) -> None:
    here = world(credit, edits={20: 0, 21: 0, 40: 1})
    stats = finished(here)
    assert stats.sources[PREDICTION].accepted >= LENGTH // 2
    assert stats.sources[PREDICTION].accepted < stats.sources[PREDICTION].verified


def test_without_speculation_nothing_is_proposed(credit: int) -> None:
    stats = finished(world(credit, ALL, {}, k=0))
    assert (stats.drafted, stats.rounds, stats.sources) == (0, LENGTH, {})


def test_the_draft_is_judged_by_its_own_tokens(credit: int) -> None:
    """The draft proposes nothing that is right, and the session itself nothing that is wrong."""
    here = world(credit, [index for index in ALL if index % 8 < 5])
    stats = finished(here, spoil_at=0)
    drafts = here.shared.for_strategy("any")
    assert here.proposals > 0
    assert drafts.alpha < 0.6, "below the prior"
    assert drafts.tokens <= stats.sources["any"].verified + here.proposals
    assert stats.sources["any"].accepted < stats.sources["any"].verified
    assert stats.sources[GRAMMAR].accepted > 0
    assert finished(world(credit, ALL)).sources.keys() == {GRAMMAR}
    untouched = world(credit, ALL)
    finished(untouched)
    assert untouched.shared.for_strategy("any").tokens == 0


def test_a_forced_run_follows_what_the_draft_proposed() -> None:
    here = world(32, range(4, 12))
    here.draft_answers()
    here.target_answers()
    hints = [one.hint for one in here.to_target if isinstance(one, ev.ExtendVerify) and one.hint]
    assert hints
    assert here.session.stats.sources["any"].accepted > 0
    stats = finished(here)
    assert stats.sources[GRAMMAR].accepted > 0


def test_a_failed_draft_takes_no_forced_run_along() -> None:
    here = world(32, range(3))
    here.draft_answers(fail=True)
    here.target_answers()
    assert here.session.stats.sources[GRAMMAR].accepted == 3


def test_a_hint_is_due_after_predicted_tokens_and_not_after_forced_ones() -> None:
    forced = world(32, ALL, auto=True)
    predicted = world(32, edits={}, auto=True)
    for here, due in ((forced, False), (predicted, True)):
        request = here.to_target[0]
        assert isinstance(request, ev.Verify)
        assert request.hint_due == due


def test_auto_proposes_only_certain_tokens_where_none_is_worth_a_row(credit: int) -> None:
    here = world(credit, range(2), {}, auto=True)
    here.shared.record_step(1_000_000, 16, 1_000_000, 1)
    here.start()
    request = here.to_target[-1]
    assert isinstance(request, ev.Verify)
    assert request.draft_tokens == tuple(here.truth[3:5])


class Late:
    """The first `count` indices of an output, from when `is_known` on."""

    def __init__(self, count: int) -> None:
        self._count = count
        self.is_known = False

    def __contains__(self, index: object) -> bool:
        return self.is_known and index in range(self._count)


def of_target(verified: int, accepted: int, grammar: GrammarSpec | None, forced: int) -> World:
    """Return a session after a verdict with tokens that it had not sent to the target."""
    late = Late(forced)
    here = World(
        spec(k=4, stop_token_ids=frozenset[int](), max_position=3 + LENGTH, grammar=grammar),
        SessionLimits(credit=32),
        sources=partial(scripted_sources, forced=late),
    )
    late.is_known = True
    [request] = here.to_target
    assert isinstance(request, ev.Verify)
    assert request.draft_tokens == ()
    tokens = tuple(here.truth[3 : 3 + accepted + 1])
    here.send(ev.Verified(request.request_id, 3, tokens, accepted, verified, 2, "build", more=True))
    return here


@pytest.mark.parametrize(("verified", "accepted"), [(3, 3), (4, 4), (4, 2), (1, 0)])
def test_a_target_may_verify_what_the_grammar_forces_before_the_hint(verified: int, accepted: int) -> None:
    here = of_target(verified, accepted, ANY_JSON, 4)
    answer = here.session.answer
    assert answer.output == here.truth[3 : 3 + accepted + 1]
    assert [record.from_draft for record in answer.records] == [True] * accepted + [False]
    counts = {GRAMMAR: ev.SourceTokens(GRAMMAR, accepted, accepted, accepted)} if accepted else {}
    assert here.session.stats.sources == counts


@pytest.mark.parametrize("forced", [0, 2])
def test_only_tokens_that_the_grammar_forces_count_as_its_draft(forced: int) -> None:
    """A target that marks other tokens as drafted changes no statistics, and ends nothing."""
    here = of_target(4, 4, ANY_JSON, forced)
    assert here.session.answer.output == here.truth[3:8]
    stats = here.session.stats
    assert (stats.drafted, stats.verified, stats.accepted) == (forced, forced, forced)
    assert sum(record.from_draft for record in here.session.answer.records) == forced


@pytest.mark.parametrize(("verified", "accepted", "forced"), [(4, 4, 0), (4, 3, 2), (4, 1, 4), (4, 0, 0)])
def test_a_row_is_wasted_unless_it_confirms_a_token(verified: int, accepted: int, forced: int) -> None:
    [done] = of_target(verified, accepted, ANY_JSON, forced).rounds
    assert done.wasted_rows == verified - accepted


@pytest.mark.parametrize(("verified", "grammar"), [(5, ANY_JSON), (3, None)])
def test_a_target_verifies_at_most_k_tokens_that_it_was_not_sent_and_only_of_a_grammar(
    verified: int, grammar: GrammarSpec | None
) -> None:
    here = of_target(verified, verified, grammar, LENGTH)
    assert here.end is not None
    assert isinstance(here.end.error, Broken)


def test_tokens_are_counted_by_source_in_every_round(credit: int) -> None:
    stats = finished(world(credit, range(10, 20), {5: 0, 30: 0}), spoil_at=2)
    assert sum(of.verified for of in stats.sources.values()) == stats.verified
    assert sum(of.drafted for of in stats.sources.values()) == stats.drafted
    assert sum(of.accepted for of in stats.sources.values()) == stats.accepted


def test_a_real_grammar_forces_what_the_answer_then_has() -> None:
    """The answer is in the tokens that its tokenizer makes of it."""
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "true": {"type": "array", "items": {"type": "boolean"}}},
        "required": ["name", "true"],
        "additionalProperties": False,
    }
    vocabulary = byte_vocabulary()
    output = tokens_of(vocabulary, json.dumps({"name": "ab", "true": [True, False]}))
    grammar = compile_grammar(vocabulary, GrammarSpec("json_schema", json.dumps(schema)))
    sources = LocalSources(grammar.start(), PredictionLookup(output, prediction_calibration()))
    forced = 0
    for at, token in enumerate(output):
        proposals = sources.propose((), 64)
        assert [token for one in proposals for token in one.tokens] == output[at:]
        forced += proposals[0].source == GRAMMAR
        ahead = tuple(output[at : at + 5])
        assert [token for one in sources.propose(ahead, 64) for token in one.tokens] == output[
            at + len(ahead) :
        ]
        sources.confirm([token])
    assert forced > len(output) // 3
