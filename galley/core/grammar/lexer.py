"""A grammar as llguidance has compiled it, and the lexer that the matchers of its sessions share.

The lexer keeps whatever it has found out, and counts its work in fuel. What one session has written makes an
answer cheap for the next one, and brings the lexer nearer to its limits. So that no answer depends on other
sessions, an answer counts only in two cases. Either the lexer has spent, in all its life, no more fuel than
it may spend on one answer: then a new lexer would give the same answer. Or the lexer is new, and has read
the tokens of this session alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence, Set
from threading import Lock
from typing import TypeAlias, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
from llguidance import LLMatcher, LLParserLimits

from galley.core.grammar.limits import GrammarLimits, GrammarUnready, InvalidGrammar
from galley.core.grammar.schemas.places import place_of_message
from galley.core.grammar.spec import GrammarSpec
from galley.core.grammar.tags import schema_of_line
from galley.core.grammar.vocabulary import Vocabulary

T = TypeVar("T")
Operation: TypeAlias = "Callable[[LLMatcher], T]"

# llguidance's word for a place where nothing may follow; the matcher has then failed.
_DEAD_END = "NoExtensionBias"
_TRIED_TOKENS = 4
# Tokens that are read before fuel is given anew.
READ_TOKENS = 256
# A point of fuel takes 30 to 200 ns. This is a bound of the fuel that a time may have spent.
_LEAST_FUEL_NS = 20
# A lexer grows by 5 to 20 bytes for each point of fuel.
_FUEL_BYTES = 20
# A failed matcher says what its lexer has spent. To go back by more tokens than there are is such a failure.
_SPENT = re.compile(r'"lexer_cost": (\d+)')
_TOO_FAR = 1 << 30
_DETAILS = "\n<state>"
_MOST_MESSAGE_CHARS = 300
# Advice to set an option of llguidance, which no request can set.
_ADVICE = re.compile(r"\. Enable '\w+' option.*", re.DOTALL)
# A message about a schema within a grammar, and the lines of the grammar at its end. Those of a structural
# tag are our own.
_IN_SCHEMA = re.compile(r"at (\d+)\(\d+\): failed to compile JSON schema: ")
_LISTING = re.compile(r"\n +\d+ \| .*", re.DOTALL)


class Lexer:
    """A compiled grammar, and what its lexer has found out for all sessions. Threads may share it."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        spec: GrammarSpec,
        native: str,
        limits: GrammarLimits,
        grew: Callable[[], None],
    ) -> None:
        """`grew` is called when `fuel` was measured. Raise InvalidGrammar as `compile_grammar`."""
        self._start = _compiled(vocabulary, spec, native, limits)
        self._sound_fuel = limits.mask_fuel
        self._clock_ns = vocabulary.clock_ns
        self._grew = grew
        self._lock = Lock()
        self._is_alive = True
        self._unseen_ns = 0
        self.fuel = 0
        """What sessions have spent, when it was last measured."""
        self._matchers: WeakKeyDictionary[object, LLMatcher] = WeakKeyDictionary()
        self._unfinished: WeakKeyDictionary[object, tuple[LLMatcher, int]] = WeakKeyDictionary()
        self._probe = self.matcher()
        self._probed = _first_tokens(self.matcher(), spec, vocabulary.end_tokens)
        self._meter = _unforced(self.matcher())
        self._fuel_at_start = self._measured()

    # -------------------------------------------------------------------------------- what it can do --

    @property
    def is_sound(self) -> bool:
        """Return True if what it has answered does not depend on what it was asked before."""
        return self._is_alive and self.fuel <= self._sound_fuel

    @property
    def is_spent(self) -> bool:
        """Return True if the next answer needs a new lexer."""
        return not self._is_alive or self.fuel > self._sound_fuel // 2

    @property
    def is_worn(self) -> bool:
        """Return True if a new lexer should be made when there is time for it."""
        return not self._is_alive or self.fuel > self._sound_fuel // 4

    def has_spent_at_most(self, fuel: int) -> bool:
        """Return True if it has spent no more in all its life, and has reached no limit. Takes 0.1 ms."""
        self._measure()
        return self._is_alive and self.fuel <= fuel

    @property
    def grown_bytes(self) -> int:
        return self.fuel * _FUEL_BYTES

    def apply(self, operation: Operation[T], matcher: LLMatcher) -> T:
        """Return what `operation` gives for a matcher of this lexer."""
        began_ns = self._clock_ns()
        result = operation(matcher)
        self._charge(began_ns)
        # A lexer that has reached a limit allows no token any more, and does not always say so.
        if self._probed and not self._probe.validate_tokens(self._probed):
            self._is_alive = False
        return result

    def read(self, matcher: LLMatcher, tokens: Sequence[int]) -> bool:
        """Advance a matcher. Return False if it does not take all tokens; it has then failed."""
        for begin in range(0, len(tokens), READ_TOKENS):
            if begin:
                self._measure()
            began_ns = self._clock_ns()
            has_read = matcher.consume_tokens(list(tokens[begin : begin + READ_TOKENS]))
            self._charge(began_ns)
            if not has_read:
                return False
        return True

    # ------------------------------------------------------------------------------------- matchers --

    def matcher(self) -> LLMatcher:
        """Return a matcher at the start of the grammar."""
        return self._start.deep_copy()

    def matcher_at(self, tokens: Sequence[int]) -> LLMatcher:
        """Return a matcher that has read `tokens`, and computed nothing else. It may have failed."""
        matcher = self.matcher()
        self.read(matcher, tokens)
        return matcher

    def matcher_of(self, owner: object, tokens: Sequence[int], most: int | None = None) -> LLMatcher:
        """Return the matcher that `owner` has here, which has read its `tokens`. It may have failed.

        Where it has none, read at most `most` of them in one call. Raise GrammarUnready until all are read.
        """
        matcher = self._matchers.get(owner)
        if matcher is None:
            matcher, begin = self._unfinished.pop(owner, (self.matcher(), 0))
            end = len(tokens) if most is None else min(len(tokens), begin + most)
            if self.read(matcher, tokens[begin:end]) and end < len(tokens):
                self._unfinished[owner] = matcher, end
                raise GrammarUnready
            self._matchers[owner] = matcher
        return matcher

    def forget(self, owner: object) -> None:
        self._matchers.pop(owner, None)

    def share(self, owner: object, other: object) -> None:
        """Give `other` a copy of the matcher of `owner`, if there is one."""
        if (matcher := self._matchers.get(owner)) is not None:
            self._matchers[other] = matcher.deep_copy()

    # ----------------------------------------------------------------------------------------- fuel --

    def _charge(self, began_ns: int) -> None:
        """Count an answer, and measure what was spent if that may be much."""
        with self._lock:
            self._unseen_ns += self._clock_ns() - began_ns
            is_due = self._unseen_ns > self._sound_fuel // 2 * _LEAST_FUEL_NS
        if is_due:
            self._measure()

    def _measure(self) -> None:
        """Read what was spent. That computes a mask, for which llguidance gives the lexer fuel anew."""
        with self._lock:
            self._unseen_ns = 0
        self.fuel = self._measured() - self._fuel_at_start
        self._grew()

    def _measured(self) -> int:
        """Return all fuel that the lexer has spent; nothing where a grammar has a single text."""
        if self._meter is None:
            return 0
        meter = self._meter.deep_copy()
        meter.compute_bitmask()
        meter.rollback(_TOO_FAR)
        found = _SPENT.search(meter.get_error())
        if found is None:
            self._is_alive = False
            return 0
        return int(found[1])


def _compiled(vocabulary: Vocabulary, spec: GrammarSpec, native: str, limits: GrammarLimits) -> LLMatcher:
    matcher = LLMatcher(
        vocabulary.tokenizer,
        native,
        log_level=0,
        limits=LLParserLimits(
            max_items_in_row=limits.most_items_in_row,
            initial_lexer_fuel=limits.compile_fuel,
            step_lexer_fuel=limits.mask_fuel,
            step_max_items=limits.mask_items,
            max_lexer_states=limits.most_lexer_states,
            max_grammar_size=limits.most_grammar_symbols,
            verbose_errors=True,
        ),
    )
    if matcher.is_error():
        raise InvalidGrammar(spec.kind, _problem(vocabulary, spec, limits, matcher.get_error()))
    return matcher


def _problem(vocabulary: Vocabulary, spec: GrammarSpec, limits: GrammarLimits, message: str) -> str:
    """Return what is wrong with a grammar, and the place in a schema if the message tells it."""
    part, schema = "", json.loads(spec.text) if spec.kind == "json_schema" else None
    if spec.kind == "structural_tag":
        message = _LISTING.sub("", message)
        found = _IN_SCHEMA.match(message)
        of_line = found and schema_of_line(json.loads(spec.text), vocabulary, limits, int(found[1]))
        if found and of_line:
            message = message[found.end() :]
            part, schema = f"{of_line[0]} ", of_line[1]
    reason = _short(_ADVICE.sub("", message))
    place = "" if schema is None else place_of_message(schema, reason)
    return f"{part}{place}{': ' if place else ''}must be a grammar that can be compiled, got: {reason}"


def _first_tokens(matcher: LLMatcher, spec: GrammarSpec, ends: Set[int]) -> list[int]:
    """Return a first token in a list, which is empty if only the empty text is allowed.

    Raise InvalidGrammar if there is no text, or the first masks take more work than one may.
    """
    read: list[int] = []
    while len(read) < _TRIED_TOKENS:
        token = _least_token(matcher.compute_bitmask(), ends)
        if matcher.get_error().startswith(_DEAD_END):
            if not read:
                raise InvalidGrammar(spec.kind, "must allow some text, got a grammar that allows none")
            break
        if token is None:
            break
        if matcher.is_error() or not matcher.consume_token(token):
            raise InvalidGrammar(spec.kind, f"must allow quick masks, got: {_short(matcher.get_error())}")
        read.append(token)
    return read[:1]


def _unforced(matcher: LLMatcher) -> LLMatcher | None:
    """Return a matcher at the first place with a choice, None if the grammar has a single text.

    It has computed no mask, so each copy of it computes one.
    """
    forced = matcher.deep_copy().compute_ff_tokens()
    if not forced:
        return matcher
    has_read = matcher.consume_tokens(forced) and not matcher.is_stopped()
    return matcher if has_read and not matcher.deep_copy().compute_ff_tokens() else None


def _least_token(mask: bytes, ends: Set[int]) -> int | None:
    bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
    return next((token for token in np.flatnonzero(bits).tolist() if token not in ends), None)


def _short(message: str) -> str:
    """Return a message of llguidance in one line; the reason proper is often at its end."""
    line, half = " ".join(message.split(_DETAILS, 1)[0].split()), _MOST_MESSAGE_CHARS // 2
    return line if len(line) <= 2 * half else f"{line[:half]} ... {line[-half:]}"
