"""The grammar of a request reaches the replicas, once, and stays with its session."""

from __future__ import annotations

from typing import Any

import pytest

from galley.common.wire.codec import grammar_from
from galley.core.grammar import cache
from galley.core.grammar.compiled import CompiledGrammar, compile_grammar
from galley.core.grammar.limits import GrammarLimits
from galley.core.grammar.spec import GrammarSpec
from galley.core.grammar.vocabulary import Vocabulary
from tests.fakes.world import Gateway, World, receive

ANY_TEXT = r"(?s:.*)"
SPEC = GrammarSpec("regex", ANY_TEXT)


def check(calls: list[Any]) -> None:
    """Check that slices from position 0 bring the grammar, and others its hash only."""
    for call in calls:
        assert call.slice.grammar_hash == SPEC.content_hash
        assert call.slice.HasField("structured_output") == (call.slice.start == 0)
        if call.slice.start == 0:
            assert grammar_from(call.slice.structured_output) == SPEC


async def test_replicas_get_the_grammar_once(world: World, gateway: Gateway) -> None:
    await receive(gateway.generate(regex=ANY_TEXT, ignore_eos=False))
    calls = [*world.target.calls, *world.draft.calls]
    check(calls)
    assert {call.slice.start == 0 for call in calls} == {True, False}


async def test_a_resumed_session_keeps_its_grammar(world: World) -> None:
    first, second = await world.gateway(), await world.gateway()
    stream, received = await world.held(first, passes=2, regex=ANY_TEXT, ignore_eos=False)
    stream.cancel()
    await first.idle()
    world.target.gate.open()
    world.target.calls.clear()
    await received.listen(second.client.resume_stream(stream))
    check(world.target.calls)
    assert world.target.calls[0].slice.start == 0


async def test_a_resume_compiles_a_grammar_only_where_the_answer_goes_on(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[GrammarSpec] = []

    def counted(vocabulary: Vocabulary, spec: GrammarSpec, limits: GrammarLimits) -> CompiledGrammar:
        compiled.append(spec)
        return compile_grammar(vocabulary, spec, limits)

    monkeypatch.setattr(cache, "compile_grammar", counted)
    first, second, third = [await world.gateway() for _ in range(3)]
    stream, received = await world.held(first, passes=2, regex=ANY_TEXT, ignore_eos=False)
    assert compiled == [SPEC], "the request and its drafts use one"
    stream.cancel()
    await first.idle()
    world.target.gate.open()
    whole = await received.listen(second.client.resume_stream(stream))
    assert compiled == [SPEC, SPEC]
    assert whole.started is not None
    again = await receive(third.client.resume(whole.started.session_id))
    assert again.tokens == whole.tokens
    assert compiled == [SPEC, SPEC]


async def test_a_session_without_a_grammar_sends_none(world: World, gateway: Gateway) -> None:
    await receive(gateway.generate(max_tokens=4))
    assert not any(
        call.slice.grammar_hash or call.slice.HasField("structured_output") for call in world.target.calls
    )
