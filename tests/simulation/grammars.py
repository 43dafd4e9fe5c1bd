"""Grammars of simulated sessions, and which tokens each allows after an output.

The product keeps a state for each session and moves it. Here every answer starts from the beginning of the
output, so that no fault of a state can hide.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from functools import lru_cache

from llguidance import LLMatcher

from galley.core.answer.answer import SessionSpec
from galley.core.grammar.spec import GrammarSpec
from tests.fakes.truth import letters
from tests.fakes.vocabularies import of_bytes

VOCAB = 48
STOP = VOCAB - 1

_LISTS = """
start: "[" item ("_" item){6,12} "]"
list: "[" (item ("_" item)*)? "]"
item: list | WORD
WORD: /[A-D]{1,3}/
"""

_TEXTS = json.dumps(["ABCDEFGHIJKLMNOPQRSTUVWXYZ", "ABCDEFGHIJKLLKJIHGFEDCBA", "ABCA", "B" + "AB" * 12])

GRAMMARS = (
    GrammarSpec("regex", "(ABC|ABDE|F{2,4}|[G-K]L){9,20}M"),
    GrammarSpec("regex", "([A-H]{3}_){6,9}(abcdefghijkl|abcmno)?"),
    GrammarSpec("choice", _TEXTS),
    GrammarSpec("grammar", _LISTS),
)
"""Languages with forced runs, with choices at every token, of a few texts, and of lists of lists."""

VOCABULARY = of_bytes(
    [*(letters([token]).encode() for token in range(STOP)), b"<end>"], [STOP], time.monotonic_ns
)


@lru_cache(maxsize=200_000)
def allowed_after(grammar: GrammarSpec, output: tuple[int, ...]) -> tuple[int, ...]:
    """Return the tokens that may follow `output`, which the grammar allows."""
    matcher = _matcher(grammar).deep_copy()
    if matcher.try_consume_tokens(list(output)) < len(output):
        raise ValueError(f"{letters(output)} is not of {grammar}")
    bits = int.from_bytes(matcher.compute_bitmask(), "little")
    return tuple(token for token in range(VOCAB) if bits >> token & 1)


def may_follow(spec: SessionSpec, tokens: Sequence[int]) -> bool:
    """Return True if the grammar of a session allows all tokens after the prompt, and another one."""
    output = tuple(tokens[len(spec.prompt) :])
    if spec.grammar is None:
        return True
    return STOP not in output and _matcher(spec.grammar).validate_tokens(list(output)) == len(output)


@lru_cache
def _matcher(grammar: GrammarSpec) -> LLMatcher:
    if grammar.kind == "grammar":
        native = LLMatcher.grammar_from_lark(grammar.text)
    else:
        regex = "|".join(json.loads(grammar.text)) if grammar.kind == "choice" else grammar.text
        native = LLMatcher.grammar_from_regex(regex)
    return LLMatcher(VOCABULARY.tokenizer, native, log_level=0)
