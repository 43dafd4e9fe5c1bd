"""What the messages of replicas are to the session, and what replicas are told of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from galley.common.wire.codec import read_slice
from galley.common.wire.status import item_status
from galley.core.content import prefix_hash
from galley.core.errors import Broken, GalleyError, InvalidField, Overloaded
from galley.core.grammar.limits import GrammarFailed, InvalidGrammar
from galley.core.grammar.spec import GrammarSpec
from galley.core.hints import Hint
from galley.core.session import events as ev
from galley.pb.galley.v1 import galley_pb2 as pb
from services.gateway.replicas.messages import (
    extension,
    propose_item,
    verify_event,
    verify_item,
    without_tree,
)
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


# The main path is 4 6.
TREE: dict[str, Any] = {
    "draft_tokens": (4, 5, 6, 7),
    "survival": (0.5, 0.25, 0.125, 0.0625),
    "parents": (-1, -1, 0, 1),
}


@pytest.mark.parametrize(("credit", "kept"), [(0, 0), (8, 10)])
async def test_a_target_that_takes_chains_alone_gets_the_main_path(credit: int, kept: int) -> None:
    """The limit, which counts all draft tokens, stays; without credit there is one result in any case."""
    item = await verify_item(spec(), ev.Verify(1, slice_from(0), credit=credit, **TREE), None, "")
    assert (list(item.draft_tokens), list(item.parents)) == ([4, 5, 6, 7], [-1, -1, 0, 1])
    without_tree(item)
    assert (list(item.draft_tokens), list(item.survival)) == ([4, 6], [0.5, 0.125])
    assert not item.parents
    assert item.credit == kept


def test_a_hint_for_a_target_that_takes_chains_alone_is_the_main_path() -> None:
    request = ev.ExtendVerify(1, 20, Hint(3, b"", **TREE), hint_due=True)
    tree, chain = (extension(request, trees=trees).hint for trees in (True, False))
    assert (list(tree.draft_tokens), list(tree.parents)) == ([4, 5, 6, 7], [-1, -1, 0, 1])
    assert (list(chain.draft_tokens), list(chain.survival)) == ([4, 6], [0.5, 0.125])
    assert not chain.parents


@pytest.mark.parametrize(("width", "sent"), [(1, 0), (4, 4)])
async def test_a_draft_is_told_the_width_of_a_tree(width: int, sent: int) -> None:
    request = ev.Propose(1, slice_from(0), 4, "ngram", width=width)
    assert (await propose_item(spec(), request, 4, None, "")).width == sent


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
