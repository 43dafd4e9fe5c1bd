"""Grammars of JSON schemas: our own set, and the JSON-Schema-Test-Suite."""

from __future__ import annotations

import json
import random
import time
from collections import Counter

import numpy as np
import pytest
from numpy.typing import NDArray

from galley.core.grammar.compiled import CompiledGrammar, compile_grammar
from galley.core.grammar.limits import InvalidGrammar
from galley.core.grammar.spec import GrammarSpec
from tests.fakes.vocabularies import of_bytes
from tests.structured.suite import SchemaCase, refused_cases, suite_cases, taken_cases

END = 256
WALKS, LONGEST_WALK, ENDS = 6, 300, 0.5
ENDLESS = {"a pattern that is found anywhere", "a pattern with its own end"}
"""Cases of which a random walk does not come to an end."""
BYTES = of_bytes([*(bytes([byte]) for byte in range(END)), b"<end>"], [END], time.monotonic_ns)

DIFFERENCES = {
    ("allOf", "valid"): (2, "fields have the order in which the schema names them"),
    ("const", "valid"): (5, "fields have that order; numbers are written in one way, 1 and not 1.0"),
    ("enum", "valid"): (4, "numbers are written in one way"),
    ("type", "valid"): (1, "an integer has no fraction"),
    ("optional/float-overflow", "valid"): (1, "a multiple has no exponent"),
    ("optional/ecmascript-regex", "valid"): (6, r"\D, \W, \s, \S: only what all validators find"),
    ("optional/format/email", "valid"): (4, "no quoted local part, no address as the domain"),
    ("optional/format/ipv6", "valid"): (4, "no IPv4 address at its end"),
    ("optional/format/date", "invalid"): (2, "February has 29 days in every year"),
    ("optional/format/date-time", "invalid"): (2, "every minute may have a leap second"),
    ("optional/format/time", "invalid"): (10, "every minute may have a leap second"),
}
"""Where grammars differ from the suite: by file and label the number of its instances, and why."""


def _compile(case: SchemaCase) -> CompiledGrammar:
    return compile_grammar(BYTES, GrammarSpec("json_schema", case.text))


def _accepts(grammar: CompiledGrammar, text: str) -> bool:
    tokens = [*text.encode(), END]
    return grammar.start().allowed_prefix(tokens) == len(tokens)


def _walk(grammar: CompiledGrammar, rng: random.Random) -> str | None:
    """Return a text whose every byte was drawn from what the grammar allows; None if it does not end soon."""
    state, output = grammar.start(), bytearray()
    while len(output) < LONGEST_WALK:
        allowed = _allowed(state.masks(())[0])
        if END in allowed and rng.random() < ENDS:
            return output.decode()
        token = rng.choice([byte for byte in allowed if byte < END] or [END])
        if token == END:
            return output.decode()
        output.append(token)
        state.confirm([token])
    return None


def _allowed(row: NDArray[np.uint32]) -> list[int]:
    """Return the tokens of a mask; of bytes those that are printed, if there are any."""
    tokens = [int(token) for token in np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))]
    return [token for token in tokens if token == END or 32 <= token < 127] or tokens


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def test_set_has_the_size_that_it_claims() -> None:
    names = [str(case) for case in (*taken_cases(), *refused_cases())]
    assert len(set(names)) == len(names)
    assert len(taken_cases()) >= 200
    assert len(refused_cases()) >= 50
    assert len(suite_cases()) >= 190


@pytest.mark.parametrize("case", taken_cases(), ids=str)
def test_labels_are_those_of_a_validator(case: SchemaCase) -> None:
    is_valid = case.checker(shapes_only=False)
    assert [text for text in case.valid if not is_valid(text)] == []
    assert [text for text in case.invalid if _is_json(text) and is_valid(text)] == []


@pytest.mark.parametrize("case", taken_cases(), ids=str)
def test_grammar_takes_valid_answers_and_no_others(case: SchemaCase) -> None:
    grammar = _compile(case)
    assert case.valid
    assert case.invalid
    assert [text for text in case.valid if not _accepts(grammar, text)] == []
    assert [text for text in case.invalid if _accepts(grammar, text)] == []


@pytest.mark.parametrize("case", taken_cases(), ids=str)
def test_whatever_the_grammar_allows_is_valid(case: SchemaCase) -> None:
    grammar, is_valid, rng = _compile(case), case.checker(), random.Random(str(case))
    texts = [text for text in (_walk(grammar, rng) for _ in range(WALKS)) if text is not None]
    assert bool(texts) == (case.name not in ENDLESS)
    assert [text for text in texts if not is_valid(text)] == []


@pytest.mark.parametrize("case", refused_cases(), ids=str)
def test_refusal_names_its_reason(case: SchemaCase) -> None:
    with pytest.raises(InvalidGrammar) as refusal:
        _compile(case)
    assert (case.refused or "").lower() in str(refusal.value).lower()


def test_json_schema_test_suite() -> None:
    differences: Counter[tuple[str, str]] = Counter()
    for case in suite_cases():
        grammar = _compile(case)
        for text in case.valid:
            differences[case.group, "valid"] += not _accepts(grammar, text)
        for text in case.invalid:
            differences[case.group, "invalid"] += _accepts(grammar, text)
    assert +differences == {key: count for key, (count, _) in DIFFERENCES.items()}
