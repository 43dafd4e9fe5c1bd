"""The sources that a gateway makes for a session: from its request, at the end of its answer."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
from structlog.testing import capture_logs

from galley.common.fair_threads import FairThreads
from galley.core.answer.answer import Answer, SessionSpec
from galley.core.errors import Broken, InvalidField
from galley.core.grammar import cache
from galley.core.grammar.compiled import CompiledGrammar, GrammarState, compile_grammar
from galley.core.grammar.limits import GrammarFailed, GrammarLimits
from galley.core.grammar.spec import GrammarSpec
from galley.core.grammar.vocabulary import Vocabulary
from galley.core.names import GRAMMAR, PREDICTION
from galley.core.records import NOT_DRAFTED
from galley.core.sampling_params import SamplingParams
from galley.core.session.sources import LocalSources
from services.gateway.request.grammars import Grammars
from services.gateway.session.own_sources import BoundedGrammar, OwnSources
from tests.fakes.vocabularies import SIZE, byte_vocabulary, tokens_of
from tests.fakes.waiting import PATIENCE_S, with_turns

VOCABULARY = byte_vocabulary()
CHOICE = GrammarSpec("choice", '["name: true", "name: null"]')
STOPPED_BY_TIME = ("grammar drafting stopped", "it takes too long")
SPEC = SessionSpec("s", (1, 2, 3), SamplingParams(), 600, SIZE, k=4, grammar=CHOICE)


async def compiled(_: str, spec: GrammarSpec) -> CompiledGrammar:
    return compile_grammar(VOCABULARY, spec)


async def too_large(_: str, spec: GrammarSpec) -> CompiledGrammar:
    raise InvalidField("structured_output", f"must be smaller, got {spec.text}")


def answered(spec: SessionSpec, text: str = "") -> Answer:
    answer = Answer(spec, lambda tokens: "x" * len(tokens))
    for token in tokens_of(VOCABULARY, text):
        answer.append(token, NOT_DRAFTED)
    return answer


async def sources_of(spec: SessionSpec, text: str = "") -> LocalSources:
    sources = await OwnSources(compiled).of(answered(spec, text), "me")
    assert sources is not None
    return sources


async def test_a_session_without_grammar_and_prediction_has_none() -> None:
    assert await OwnSources(compiled).of(answered(replace(SPEC, grammar=None), "name"), "me") is None


async def test_the_grammar_is_at_the_end_of_the_answer() -> None:
    [begin] = (await sources_of(SPEC)).propose((), 8)
    assert begin.source == GRAMMAR
    assert begin.tokens == tuple(tokens_of(VOCABULARY, "name: "))[: len(begin.tokens)]
    [rest] = (await sources_of(SPEC, "name: t")).propose((), 8)
    assert rest.tokens == tuple(tokens_of(VOCABULARY, "rue"))


async def test_a_prediction_ends_where_the_grammar_forbids_it() -> None:
    predicted = tuple(tokens_of(VOCABULARY, "name: truth"))
    sources = await sources_of(replace(SPEC, prediction=predicted), "name: ")
    proposals = sources.propose((), 8)
    assert {proposal.source for proposal in proposals} == {PREDICTION}
    assert [token for proposal in proposals for token in proposal.tokens] == tokens_of(VOCABULARY, "tru")
    assert sources.prediction is not None
    assert sources.prediction.counts[0] == len(tokens_of(VOCABULARY, "name: "))


async def test_others_get_turns_while_a_long_prediction_is_indexed() -> None:
    spec = replace(SPEC, grammar=None, prediction=(1, 2) * 32_768)
    sources, turns = await with_turns(OwnSources().of(answered(spec), "me"))
    assert sources is not None
    assert turns >= 32, "2,048 tokens between two turns"


async def test_without_speculation_a_grammar_is_not_even_compiled() -> None:
    sources = await OwnSources(too_large).of(answered(replace(SPEC, k=0)), "me")
    assert sources is not None
    assert sources.propose((), 8) == []


async def test_a_session_that_has_ended_compiles_nothing() -> None:
    predicted = tuple(tokens_of(VOCABULARY, "name: null"))
    over = answered(replace(SPEC, prediction=predicted), "name: true")
    with capture_logs() as logs:
        sources = await OwnSources(too_large).of(over, "me", is_over=True)
    assert not logs
    assert sources is not None
    assert sources.prediction is not None
    assert sources.prediction.counts[0] >= len(tokens_of(VOCABULARY, "name: "))


async def test_a_grammar_after_reasoning_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request compiles it before its prompt is read, which tells whether the model reasons first."""
    compiled_specs: list[GrammarSpec] = []

    def counted(vocabulary: Vocabulary, spec: GrammarSpec, limits: GrammarLimits) -> CompiledGrammar:
        compiled_specs.append(spec)
        return compile_grammar(vocabulary, spec, limits)

    monkeypatch.setattr(cache, "compile_grammar", counted)
    grammars, [after] = Grammars(VOCABULARY), tokens_of(VOCABULARY, ";")
    grammars.compile(CHOICE)
    sources = OwnSources(partial(grammars.compiled, FairThreads()))
    spec = replace(SPEC, grammar=replace(CHOICE, after_token=after))
    for text, forced in (("", ""), ("name", ""), ("name;", "name: "), ("name;name: t", "rue")):
        made = await sources.of(answered(spec, text), "me")
        assert made is not None
        assert made.forced(8) == tuple(tokens_of(VOCABULARY, forced))
    assert compiled_specs == [CHOICE]


class Held(Grammars):
    """Grammars of which none is compiled until `go_on` is set, but choices."""

    def __init__(self) -> None:
        super().__init__(VOCABULARY)
        self.began, self.go_on = threading.Event(), threading.Event()
        self.compiled_count = 0

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        if spec.kind != "choice":
            self.began.set()
            self.go_on.wait(PATIENCE_S)
        self.compiled_count += 1
        return super().compile(spec)


async def test_resumed_grammars_of_one_principal_hold_up_no_other() -> None:
    """More than there are threads, and each another one."""
    grammars = Held()
    sources = OwnSources(partial(grammars.compiled, FairThreads()))
    specs = [replace(SPEC, grammar=GrammarSpec("regex", f"ab{{{n}}}")) for n in range(2, 66)]
    many = [asyncio.create_task(sources.of(answered(spec), "bad")) for spec in specs]
    try:
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.to_thread(grammars.began.wait, PATIENCE_S)
            assert await sources.of(answered(SPEC), "good") is not None
            assert grammars.compiled_count == 1
            grammars.go_on.set()
            for made in await asyncio.gather(*many):
                assert made is not None
                assert made.forced(2) == tuple(tokens_of(VOCABULARY, "abb"))[:2]
    finally:
        grammars.go_on.set()


class Slow(GrammarState):
    """A state of which each call takes 3 ms of the thread's time."""

    def confirm(self, tokens: Sequence[int]) -> None:
        super().confirm(tokens)
        _spin()

    def forced(self, most: int, ahead: Sequence[int] = ()) -> tuple[int, ...]:
        _spin()
        return super().forced(most, ahead)


class Failing(GrammarState):
    """A state that fails in one of its calls: its lexer is full, or llguidance panics."""

    def __init__(self, compiled: CompiledGrammar, call: str, error: BaseException) -> None:
        super().__init__(compiled)
        self._call, self._error = call, error

    def _check(self, call: str) -> None:
        if call == self._call:
            raise self._error

    def confirm(self, tokens: Sequence[int]) -> None:
        self._check("confirm")
        super().confirm(tokens)

    def forced(self, most: int, ahead: Sequence[int] = ()) -> tuple[int, ...]:
        self._check("forced")
        return super().forced(most, ahead)

    def allowed_prefix(self, tokens: Sequence[int], ahead: Sequence[int] = ()) -> int:
        self._check("allowed_prefix")
        return super().allowed_prefix(tokens, ahead)


class PanicException(BaseException):  # its name in pyo3, where it is no Exception either
    pass


@pytest.mark.parametrize("call", ["confirm", "forced", "allowed_prefix"])
@pytest.mark.parametrize(
    "error", [GrammarFailed(3), Broken("not allowed"), OSError("x"), PanicException("y")]
)
def test_a_grammar_that_fails_stops_drafting_and_ends_nothing(call: str, error: BaseException) -> None:
    grammar = BoundedGrammar(Failing(compile_grammar(VOCABULARY, CHOICE), call, error), "s")
    text = tokens_of(VOCABULARY, "name: ")
    with capture_logs() as logs:
        for token in text:
            assert grammar.forced(1) in {(token,), ()}
            assert grammar.allowed_prefix(text) in {0, 1, len(text)}
            grammar.confirm([token])
    assert [(entry["event"], entry["reason"]) for entry in logs] == [("grammar drafting stopped", str(error))]
    assert grammar.forced(8) == ()
    assert grammar.allowed_prefix(text) == len(text), "the target decides"


def _spin() -> None:
    until_ns = time.thread_time_ns() + 3_000_000
    while time.thread_time_ns() < until_ns:
        pass


def test_a_slow_grammar_stops_drafting() -> None:
    grammar = BoundedGrammar(Slow(compile_grammar(VOCABULARY, CHOICE)), "s")
    text, calls = tokens_of(VOCABULARY, "name: "), 0
    with capture_logs() as logs:
        while grammar.forced(8):
            calls += 1
        for token in text:
            grammar.confirm([token])
    assert calls == 7, "20 ms at first"
    assert [(entry["event"], entry["reason"]) for entry in logs] == [STOPPED_BY_TIME]
    assert grammar.forced(8) == ()
    assert grammar.allowed_prefix(text) == len(text), "the target decides"


def test_a_grammar_has_time_for_each_token_that_it_reads() -> None:
    """3 ms for 40 tokens are within their time, however often."""
    grammar = BoundedGrammar(Slow(compile_grammar(VOCABULARY, GrammarSpec("regex", "(abc12)+"))), "s")
    output = tokens_of(VOCABULARY, "abc12" * 20)
    for _ in range(10):
        grammar.confirm(output)
    assert grammar.forced(2, output[:1])


def test_a_grammar_that_is_quick_drafts_on() -> None:
    grammar = BoundedGrammar(compile_grammar(VOCABULARY, GrammarSpec("regex", "(abc12)+")).start(), "s")
    output = tokens_of(VOCABULARY, "abc12" * 200)
    forced = 0
    for token in output:
        forced += bool(grammar.forced(2))
        grammar.confirm([token])
    assert forced > len(output) // 4
    assert grammar.forced(2) or grammar.forced(2, output[:1])


def test_a_grammar_drafts_on_after_its_lexer_was_replaced() -> None:
    """It has too little time to read all of a long output at once."""
    made = compile_grammar(VOCABULARY, GrammarSpec("regex", "(abc12)+"))
    grammar = BoundedGrammar(made.start(may_compile=False), "s")
    output = tokens_of(VOCABULARY, "abc12" * 10_000)
    for at in range(0, len(output), 16):
        grammar.confirm(output[at : at + 16])
    made.drop()
    made.prepare()
    with capture_logs() as logs:
        for token in tokens_of(VOCABULARY, "abc12" * 400):
            grammar.confirm([token])
    assert not logs
    assert grammar.forced(2) or grammar.forced(2, output[:1])


async def test_a_grammar_that_cannot_draft_leaves_the_prediction() -> None:
    predicted = tuple(tokens_of(VOCABULARY, "never"))
    for compile_grammar_, text in ((too_large, ""), (compiled, "other")):
        with capture_logs() as logs:
            sources = await OwnSources(compile_grammar_).of(
                answered(replace(SPEC, prediction=predicted), text), "me"
            )
        assert [entry["event"] for entry in logs] == ["grammar drafting stopped"]
        assert sources is not None
        assert sources.prediction is not None
