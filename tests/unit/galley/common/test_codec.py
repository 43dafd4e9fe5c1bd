"""Grammars on the wire."""

from __future__ import annotations

import pytest

from galley.common.wire.codec import grammar_from, grammar_message, read_slice
from galley.core.content import prefix_hash
from galley.core.errors import InvalidField
from galley.core.grammar.spec import KINDS, GrammarSpec, Kind
from galley.core.scheduler.messages import Slice
from galley.pb.galley.v1 import galley_pb2 as pb

SPEC = GrammarSpec("regex", "a+", after_token=0)
TEXTS: dict[Kind, str] = {"json_object": "", "choice": '["é", ""]'}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [(None, None), (0, None), (7, 0)])
def test_a_grammar_crosses_the_wire(kind: Kind, tokens: tuple[int | None, int | None]) -> None:
    spec = GrammarSpec(kind, TEXTS.get(kind, "é"), *tokens)
    data = grammar_message(spec).SerializeToString()
    assert grammar_from(pb.StructuredOutput.FromString(data)) == spec


def test_a_grammar_without_a_kind_is_refused() -> None:
    with pytest.raises(InvalidField, match=r"structured_output: must have one of json_object, .*, got none"):
        grammar_from(pb.StructuredOutput())


def read(**fields: object) -> Slice:
    message = pb.SessionSlice(
        session_id="s", tokens=[1, 2], prefix_hash=prefix_hash([]), prompt_len=1, max_position=9
    )
    message.MergeFrom(pb.SessionSlice(**fields))  # type: ignore[arg-type]  # of the test's own making
    return read_slice(message, vocab_size=10, context_window=10)


def test_a_slice_brings_its_grammar_or_names_it() -> None:
    assert (read().grammar, read().grammar_hash) == (None, b"")
    whole = read(structured_output=grammar_message(SPEC), grammar_hash=SPEC.content_hash)
    assert (whole.grammar, whole.grammar_hash) == (SPEC, SPEC.content_hash)
    assert read(grammar_hash=SPEC.content_hash).grammar is None


@pytest.mark.parametrize("wrong", [b"", b"x" * 16, GrammarSpec("regex", "b+").content_hash])
def test_a_grammar_with_the_hash_of_another_is_refused(wrong: bytes) -> None:
    with pytest.raises(InvalidField, match=r"slice\.grammar_hash: must be the hash"):
        read(structured_output=grammar_message(SPEC), grammar_hash=wrong)


def test_a_hash_of_another_length_is_refused() -> None:
    with pytest.raises(InvalidField, match=r"slice\.grammar_hash: must be empty or 16 bytes, got 3"):
        read(grammar_hash=b"abc")


def test_a_grammar_with_min_tokens_is_refused() -> None:
    with pytest.raises(InvalidField, match=r"slice\.min_tokens: must be 0 with a grammar.*, got 2"):
        read(grammar_hash=SPEC.content_hash, min_tokens=2)
