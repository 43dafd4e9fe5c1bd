"""Grammars made to take long: bounded CPU time to compile them, and to compute masks."""

from __future__ import annotations

import time
from contextlib import suppress

import numpy as np
import pytest

from galley.core.grammar.cache import GrammarCache
from galley.core.grammar.compiled import GrammarState, compile_grammar
from galley.core.grammar.limits import GrammarFailed, InvalidGrammar
from galley.core.grammar.spec import GrammarSpec
from tests.fakes.grammar_bombs import BOMBS, small_schema
from tests.fakes.vocabularies import allowed, bpe_vocabulary

VOCABULARY = bpe_vocabulary()
COMPILE_S, MASK_S = 1.0, 0.2
STEPS = 40


@pytest.mark.parametrize("spec", BOMBS.values(), ids=BOMBS)
def test_a_bomb_is_compiled_or_refused_within_a_second(spec: GrammarSpec) -> None:
    began_s = time.thread_time()
    state = None
    with suppress(InvalidGrammar):
        state = compile_grammar(VOCABULARY, spec).start()
    assert time.thread_time() - began_s < COMPILE_S
    if state is not None:
        with suppress(GrammarFailed):
            _walk(state)


def _walk(state: GrammarState) -> None:
    rng = np.random.default_rng(0)
    for _ in range(STEPS):
        began_s = time.thread_time()
        tokens = sorted(allowed(state.masks(())[0]))
        assert time.thread_time() - began_s < MASK_S
        on = [token for token in tokens if token not in VOCABULARY.end_tokens]
        state.confirm([int(rng.choice(on or tokens))])
        if not on:
            return


def test_a_cache_of_a_thousand_schemas_is_bounded() -> None:
    cache = GrammarCache(VOCABULARY, most_bytes=8 << 20)
    began_s = time.thread_time()
    for number in range(1000):
        cache.compile(small_schema(number))
    assert time.thread_time() - began_s < 10
    assert cache.held_bytes <= 8 << 20
    assert len(cache) < 60
    assert cache.get(small_schema(999).content_hash) is not None
