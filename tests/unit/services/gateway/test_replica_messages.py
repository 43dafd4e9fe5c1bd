"""What the messages of replicas are to the session, and what replicas are told of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from galley.common.wire.codec import read_slice
from galley.common.wire.status import item_status
from galley.core.content import prefix_hash
from galley.core.errors import Broken, GalleyError, InvalidField, Overloaded
from galley.core.grammar.limits import GrammarFailed, InvalidGrammar
from galley.core.grammar.spec import GrammarSpec
from galley.core.session import events as ev
from galley.pb.galley.v1 import galley_pb2 as pb
from services.gateway.replicas.messages import propose_item, verify_event, verify_item
from tests.fakes.session_world import spec

GRAMMAR = GrammarSpec("choice", '["yes", "no"]', after_token=4)


def slice_from(start: int) -> ev.Slice:
    tokens = spec().prompt[start:]
    return ev.Slice(start, tokens, prefix_hash(spec().prompt[:start]))


@pytest.mark.parametrize("start", [0, 1])
async def test_a_slice_that_starts_at_0_brings_the_grammar_and_all_bring_its_hash(start: int) -> None:
    own = replace(spec(), grammar=GRAMMAR)
    verify = ev.Verify(1, slice_from(start), (), (), 0, False, 0)
    propose = ev.Propose(1, slice_from(start), 4, "ngram")
    items = await verify_item(own, verify, None, ""), await propose_item(own, propose, 4, None, "")
    for item in items:
        item.slice.sampling.seed = 1
        read = read_slice(item.slice, vocab_size=1000, context_window=1000)
        assert read.grammar_hash == GRAMMAR.content_hash
        assert read.grammar == (None if start else GRAMMAR)


async def test_a_session_without_a_grammar_sends_none() -> None:
    item = await verify_item(spec(), ev.Verify(1, slice_from(0), (), (), 0, False, 0), None, "")
    assert not item.slice.HasField("structured_output")
    assert not item.slice.grammar_hash


@pytest.mark.parametrize(
    ("error", "field"),
    [
        (GrammarFailed(7), "structured_output"),
        (InvalidGrammar("regex", "must close"), "structured_output.regex"),
        (InvalidField("slice.tokens", "must not be empty"), None),
        (Broken("structured_output: broken"), None),
        (Overloaded("structured_output: busy", 1.0), None),
    ],
)
def test_a_grammar_that_leads_nowhere_is_the_callers_fault(error: GalleyError, field: str | None) -> None:
    event = verify_event(3, pb.VerifyAnswer(status=item_status(error)))
    assert isinstance(event, ev.Failed)
    if field is None:
        assert event.refusal is None
    else:
        assert isinstance(event.refusal, InvalidField)
        assert (event.refusal.field, str(event.refusal), event.retryable) == (field, str(error), False)
