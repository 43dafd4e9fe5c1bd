"""Compile a grammar, and follow it along the output of a session.

A state is a pure function of the compiled grammar and the output tokens: whoever has lost it confirms the
tokens of the log again. Draft tokens are only tried: they never change a state.

A grammar may lead to a place where it allows nothing, or where the next mask would take more work than its
limits. The mask then allows end tokens only, and `confirm` raises GrammarFailed for them. So an answer that
ends by an end token always belongs to the language.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

import numpy as np
from llguidance import LLMatcher, LLParserLimits
from numpy.typing import NDArray

from galley.core.errors import Broken
from galley.core.grammar.limits import DEFAULT_LIMITS, GrammarFailed, GrammarLimits, InvalidGrammar
from galley.core.grammar.source import native_grammar
from galley.core.grammar.spec import GrammarSpec
from galley.core.grammar.vocabulary import Vocabulary

_ALL = np.uint32(0xFFFFFFFF)
# llguidance's word for a place where nothing may follow; the matcher has then failed.
_DEAD_END = "NoExtensionBias"
_FULL = "too many states"
_MOST_MESSAGE_CHARS = 300
_TRIED_TOKENS = 4


def compile_grammar(
    vocabulary: Vocabulary, spec: GrammarSpec, limits: GrammarLimits = DEFAULT_LIMITS
) -> CompiledGrammar:
    """Return the compiled grammar. Raise InvalidGrammar if it is out of bounds, wrong, or allows no text.

    Takes milliseconds, and up to a second for a large grammar; other threads run meanwhile.
    """
    compiled = CompiledGrammar(vocabulary, spec, native_grammar(spec, vocabulary, limits), limits)
    compiled.check()
    return compiled


class CompiledGrammar:
    """A grammar of one vocabulary, which any number of sessions may start from."""

    def __init__(
        self, vocabulary: Vocabulary, spec: GrammarSpec, native: str, limits: GrammarLimits = DEFAULT_LIMITS
    ) -> None:
        self.vocabulary = vocabulary
        self.spec = spec
        self.content_hash = spec.content_hash
        self._native = native
        self._limits = limits
        self._matcher = self._compile()

    def check(self) -> None:
        """Raise InvalidGrammar if there is no first token, or the first masks take more work than one may."""
        matcher = self.matcher()
        for step in range(_TRIED_TOKENS):
            token = _first_token(matcher.compute_bitmask(), self.vocabulary.end_tokens)
            if _is_dead_end(matcher):
                if step == 0:
                    raise InvalidGrammar(
                        self.spec.kind, "must allow some text, got a grammar that allows none"
                    )
                return
            if token is None:
                return
            if matcher.is_error() or not matcher.consume_token(token):
                reason = _short(matcher.get_error())
                raise InvalidGrammar(self.spec.kind, f"must allow quick masks, got: {reason}")

    def start(self) -> GrammarState:
        """Return the state before the first output token."""
        return GrammarState(self)

    def matcher(self) -> LLMatcher:
        """Return a matcher at the start of the grammar."""
        return self._matcher.deep_copy()

    def matcher_after(self, tokens: Sequence[int], failed: LLMatcher) -> LLMatcher:
        """Return a matcher after `tokens`, in place of one that failed.

        Matchers of a grammar share a lexer, whose states are bounded. A full one is made anew.
        """
        if _FULL in failed.get_error():
            self._matcher = self._compile()
        return self.matcher_at(tokens)

    def matcher_at(self, tokens: Sequence[int]) -> LLMatcher:
        """Return a matcher that has consumed `tokens`, and computed nothing else. It may have failed."""
        matcher = self.matcher()
        matcher.consume_tokens(list(tokens))
        return matcher

    def fill(self, tokens: Sequence[int], draft_tokens: Sequence[int], rows: NDArray[np.uint32]) -> None:
        """Fill `rows` as `GrammarState.masks` does, each by a matcher of its own.

        What a matcher has computed before can make it fail, where the rest of a text is certain and has no
        end. So this decides where one has failed. A row that fails allows end tokens only.
        """
        for index, row in enumerate(rows):
            matcher = self.matcher_at([*tokens, *draft_tokens[:index]])
            is_allowed = index < len(draft_tokens) and matcher.validate_tokens([draft_tokens[index]]) > 0
            matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
            if not is_allowed or matcher.is_error():
                return

    def _compile(self) -> LLMatcher:
        limits = self._limits
        matcher = LLMatcher(
            self.vocabulary.tokenizer,
            self._native,
            log_level=0,
            limits=LLParserLimits(
                max_items_in_row=limits.most_items_in_row,
                initial_lexer_fuel=limits.compile_fuel,
                step_lexer_fuel=limits.mask_fuel,
                step_max_items=limits.mask_items,
                max_lexer_states=limits.most_lexer_states,
                max_grammar_size=limits.most_grammar_symbols,
                verbose_errors=False,
            ),
        )
        if matcher.is_error():
            reason = _short(matcher.get_error())
            raise InvalidGrammar(self.spec.kind, f"must be a grammar that can be compiled, got: {reason}")
        return matcher


class GrammarState:
    """A place in a grammar: that of one session's output. Not safe to use from several threads at once."""

    __slots__ = ("_ahead", "_compiled", "_matcher", "_tokens", "_tried", "length", "row_ns")

    def __init__(self, compiled: CompiledGrammar) -> None:
        self._compiled = compiled
        # None while the model reasons: everything but an end token is allowed.
        self._matcher = None if compiled.spec.reasons_first else compiled.matcher()
        self._tokens: list[int] = []
        """Confirmed tokens since the grammar began."""
        self.length = 0
        """Number of confirmed output tokens."""
        self.row_ns = 0
        """Time that a row of its masks takes, as whoever computes them measures it."""
        self._ahead: list[int] = []
        self._tried: GrammarState | None = None
        """The state after `_ahead`, which are not confirmed; None if they were not tried."""

    @property
    def is_over(self) -> bool:
        """Return True if the text is complete and nothing but an end token may follow."""
        return self._matcher is not None and self._matcher.is_stopped() and self._matcher.is_accepting()

    def confirm(self, tokens: Sequence[int]) -> None:
        """Advance by confirmed output tokens. Raise GrammarFailed where the grammar allows no token."""
        self._forget(tokens)
        begin = 0
        if self._opens(tokens):
            self._matcher = None
        if self._matcher is None:
            begin = self._begin(tokens)
            self.length += min(begin, len(tokens))
            if begin > len(tokens):
                return
            self._matcher = self._compiled.matcher()
        rest = list(tokens[begin:])
        if not rest:
            return
        if self._compiled.vocabulary.end_tokens.isdisjoint(rest):
            if self._matcher.consume_tokens(rest):
                self._tokens += rest
                self.length += len(rest)
                return
            self._matcher = self._compiled.matcher_after(self._tokens, self._matcher)
        for token in rest:
            self._matcher = self._advanced(self._matcher, token)
            self._tokens.append(token)
            self.length += 1

    def masks(self, draft_tokens: Sequence[int]) -> NDArray[np.uint32]:
        """Return which tokens may follow, as bits: bit t % 32 of word t // 32 is that of token t.

        The shape is [len(draft_tokens) + 1, mask_words]. Row i holds after draft_tokens[:i]. Rows after a
        draft token that is not allowed, or after the end of the text, are all ones. The state stays as it is.
        Other threads run meanwhile.
        """
        rows = np.full((len(draft_tokens) + 1, self._compiled.vocabulary.mask_words), _ALL, np.uint32)
        if self._matcher is None:
            self._fill_reasoning(draft_tokens, rows)
        elif self._opens(draft_tokens):
            self._fill(self._matcher, (), rows[:1])
            self._fill_reasoning(draft_tokens[1:], rows[1:])
        else:
            self._fill(self._matcher, draft_tokens, rows)
        if (opening := self._opening) is not None:
            rows[0, opening >> 5] |= np.uint32(1 << (opening & 31))
        return rows

    def mask_after(self, ahead: Sequence[int]) -> NDArray[np.uint32]:
        """Return the mask after `ahead`, tokens that are not confirmed; all ones if they are not allowed.

        What was tried is remembered: a call with one more token costs that token only.
        """
        tried = self._after(ahead)
        if tried is None:
            return np.full(self._compiled.vocabulary.mask_words, _ALL, np.uint32)
        return tried.masks(()).reshape(-1)

    def allowed_prefix(self, tokens: Sequence[int], ahead: Sequence[int] = ()) -> int:
        """Return how many of `tokens` the grammar allows after `ahead`, the first first.

        Where text is certain, a mask allows its usual tokens only; here others of the same text count, too.
        """
        if ahead:
            tried = self._after(ahead)
            return 0 if tried is None else tried.allowed_prefix(tokens)
        if self._opens(tokens):
            return 1 + self._reasoning_prefix(tokens[1:])
        if self._matcher is None:
            return self._reasoning_prefix(tokens)
        if self.is_over:  # where llguidance allows no token at all
            return int(len(tokens) > 0 and tokens[0] in self._compiled.vocabulary.end_tokens)
        return self._matcher.validate_tokens(list(tokens))

    def forced(self, most: int, ahead: Sequence[int] = ()) -> tuple[int, ...]:
        """Return at most `most` tokens that are certain after `ahead`, as the tokenizer writes them."""
        if ahead:
            tried = self._after(ahead)
            return () if tried is None else tried.forced(most)
        if self._matcher is None or self._opening is not None or most <= 0:
            return ()
        return tuple(self._matcher.compute_ff_tokens()[:most])

    # ------------------------------------------------------------------------------------ reasoning --

    @property
    def _opening(self) -> int | None:
        """Return the token by which the output may now begin with reasoning instead of the grammar."""
        return None if self.length else self._compiled.spec.opening_token

    def _opens(self, tokens: Sequence[int]) -> bool:
        return self._opening is not None and len(tokens) > 0 and tokens[0] == self._opening

    def _begin(self, tokens: Sequence[int]) -> int:
        """Return the index after `after_token`, where the grammar begins; beyond all rows if it is absent."""
        after = self._compiled.spec.after_token
        return next((i + 1 for i, token in enumerate(tokens) if token == after), len(tokens) + 1)

    def _fill_reasoning(self, draft_tokens: Sequence[int], rows: NDArray[np.uint32]) -> None:
        begin = self._begin(draft_tokens)
        for token in self._compiled.vocabulary.end_tokens:
            rows[:begin, token >> 5] &= ~np.uint32(1 << (token & 31))
        if begin < len(rows):
            self._compiled.fill((), draft_tokens[begin:], rows[begin:])

    def _reasoning_prefix(self, tokens: Sequence[int]) -> int:
        begin, ends = self._begin(tokens), self._compiled.vocabulary.end_tokens
        free = next((i for i, token in enumerate(tokens[:begin]) if token in ends), len(tokens))
        if free < begin or begin > len(tokens):
            return free
        return begin + self._compiled.matcher().validate_tokens(list(tokens[begin:]))

    # ------------------------------------------------------------------------------------- matching --

    def _advanced(self, matcher: LLMatcher, token: int) -> LLMatcher:
        if token in self._compiled.vocabulary.end_tokens and not matcher.is_accepting():
            raise GrammarFailed(self.length)
        if not matcher.consume_token(token):
            matcher = self._compiled.matcher_after(self._tokens, matcher)
            if not matcher.validate_tokens([token]) and not matcher.is_error():
                raise Broken(f"the grammar does not allow output token {self.length}")
            if not matcher.consume_token(token):
                raise GrammarFailed(self.length)
        return matcher

    def _fill(self, matcher: LLMatcher, draft_tokens: Sequence[int], rows: NDArray[np.uint32]) -> None:
        if draft_tokens:
            drafts = [(matcher, 0, list(draft_tokens))]
            row_bytes = rows.shape[1] * rows.itemsize
            self._compiled.vocabulary.executor.unsafe_compute_mask_ptr_with_draft_token(
                drafts, rows.ctypes.data, row_bytes, len(rows)
            )
        else:
            matcher.unsafe_compute_mask_ptr(rows.ctypes.data, rows.nbytes)
        if matcher.is_error():
            self._matcher = self._compiled.matcher_after(self._tokens, matcher)
            rows[:] = _ALL
            self._compiled.fill(self._tokens, draft_tokens, rows)

    # ---------------------------------------------------------------------------------------- ahead --

    def _after(self, ahead: Sequence[int]) -> GrammarState | None:
        """Return the state after tokens that are not confirmed, None if they are not allowed."""
        if not ahead:
            return self
        known = len(self._ahead)
        if self._tried is None or list(ahead[:known]) != self._ahead:
            self._tried, self._ahead, known = self._copy(), [], 0
        rest = list(ahead[known:])
        if self._tried.allowed_prefix(rest) < len(rest):
            return None
        try:
            self._tried.confirm(rest)
        except GrammarFailed:
            self._tried = None
            return None
        self._ahead += rest
        return self._tried

    def _forget(self, confirmed: Sequence[int]) -> None:
        """Drop what was tried unless it begins with what is confirmed."""
        if self._tried is not None and list(confirmed) == self._ahead[: len(confirmed)]:
            self._ahead = self._ahead[len(confirmed) :]
        else:
            self._tried, self._ahead = None, []

    def _copy(self) -> GrammarState:
        copy = GrammarState(self._compiled)
        copy._matcher = None if self._matcher is None else self._matcher.deep_copy()
        copy._tokens = list(self._tokens)
        copy.length = self.length
        return copy


def _is_dead_end(matcher: LLMatcher) -> bool:
    return matcher.get_error().startswith(_DEAD_END)


def _first_token(mask: bytes, ends: Set[int]) -> int | None:
    bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
    return next((token for token in np.flatnonzero(bits).tolist() if token not in ends), None)


def _short(message: str) -> str:
    """Return a message of llguidance in one line; the reason proper is often at its end."""
    line, half = " ".join(message.split()), _MOST_MESSAGE_CHARS // 2
    return line if len(line) <= 2 * half else f"{line[:half]} ... {line[-half:]}"
