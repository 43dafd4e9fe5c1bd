"""Compile a grammar, and follow it along the output of a session.

A state is a pure function of the compiled grammar and the output tokens: whoever has lost it confirms the
tokens of the log again. Draft tokens are only tried: they never change a state.

A grammar may lead to a place where it allows nothing, or where the next mask would take more work than its
limits. The mask then allows end tokens only, and `confirm` raises GrammarFailed for them. So an answer that
ends by an end token always belongs to the language.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from galley.core.errors import Broken, GalleyError
from galley.core.grammar.lexer import READ_TOKENS, Lexer, Operation, T
from galley.core.grammar.limits import DEFAULT_LIMITS, GrammarFailed, GrammarLimits, GrammarUnready
from galley.core.grammar.rows import ALL, fill_below, fill_row, fill_tree, is_set
from galley.core.grammar.source import native_grammar
from galley.core.grammar.spec import GrammarSpec
from galley.core.grammar.vocabulary import Vocabulary
from galley.core.trees import CHAIN, ROOT, Parents, child_of, children_of, depths, parent_of, path_to

# After each so many tokens it is checked what reading them takes a lexer.
_CHECKED_TOKENS = 32
# A new lexer reads an output again. On an event loop it reads so many tokens for each one that is confirmed.
_READ_AGAIN = 32
# The result holds so many tokens later, so that it depends on no draft token: masks are for no more of them.
MOST_AHEAD = 64
# A compiled grammar was measured to take less, before sessions use it: a constant, and for each byte of text.
_BASE_BYTES, _BYTES_PER_BYTE = 128 * 1024, 400


def compile_grammar(
    vocabulary: Vocabulary, spec: GrammarSpec, limits: GrammarLimits = DEFAULT_LIMITS
) -> CompiledGrammar:
    """Return the compiled grammar. Raise InvalidGrammar if it is out of bounds, wrong, or allows no text.

    Takes milliseconds, and up to a second for a large grammar; other threads run meanwhile.
    """
    compiled = CompiledGrammar(vocabulary, spec, native_grammar(spec, vocabulary, limits), limits)
    compiled.prepare()
    return compiled


class CompiledGrammar:
    """A grammar of one vocabulary, which any number of sessions may start from.

    It holds a lexer, which may be dropped at any time and is then made anew. So are the matchers of its
    sessions, which the lexer holds.
    """

    def __init__(
        self, vocabulary: Vocabulary, spec: GrammarSpec, native: str, limits: GrammarLimits = DEFAULT_LIMITS
    ) -> None:
        self.vocabulary = vocabulary
        self.spec = spec
        self.content_hash = spec.content_hash
        self.grew: Callable[[CompiledGrammar], None] = lambda _: None
        """Called when `held_bytes` has changed, by any thread."""
        self._native = native
        self._limits = limits
        self._lexer: Lexer | None = None

    def start(self, *, may_compile: bool = True, spec: GrammarSpec | None = None) -> GrammarState:
        """Return the state before the first output token.

        With a `spec` of the same language, its tokens tell where that begins.
        """
        return GrammarState(self, spec, may_compile=may_compile)

    # ---------------------------------------------------------------------------------------- lexer --

    @property
    def is_ready(self) -> bool:
        """Return True if its states can go on for a while before it is compiled again."""
        return self._lexer is not None and not self._lexer.is_worn

    @property
    def is_exhausted(self) -> bool:
        """Return True if the last answer was that a limit is reached."""
        return self._lexer is not None and not self._lexer.is_sound

    @property
    def held_bytes(self) -> int:
        """Return about what it takes in memory, with all that its lexer has learnt from sessions."""
        lexer = self._lexer
        if lexer is None:
            return 0
        return _BASE_BYTES + _BYTES_PER_BYTE * len(self.spec.text.encode()) + lexer.grown_bytes

    def prepare(self) -> None:
        """Compile it unless it is ready. Raise InvalidGrammar as `compile_grammar`."""
        if not self.is_ready:
            self._install(self._made())

    def drop(self) -> None:
        """Free what was compiled."""
        self._lexer = None

    def lexer(self, *, may_compile: bool) -> Lexer:
        """Return the lexer, a new one if it is spent. Raise GrammarUnready unless `may_compile`."""
        lexer = self._lexer
        if lexer is None or lexer.is_spent:
            if not may_compile:
                raise GrammarUnready
            lexer = self._made()
            self._install(lexer)
        return lexer

    def decide(self, tokens: Sequence[int], operation: Operation[T], *, may_compile: bool) -> T:
        """Return what `operation` gives for a matcher that has read `tokens`, and computed nothing else.

        What a matcher has computed before can make it fail, where the rest of a text is certain and has no
        end. What its lexer has been asked before can do so, too. So this decides where one has failed. Raise
        GrammarUnready if it may not compile, and would have to, or to read many tokens.
        """
        if len(tokens) > READ_TOKENS and not may_compile:
            raise GrammarUnready
        lexer = self._lexer
        if lexer is not None and not lexer.is_spent:
            result = lexer.apply(operation, lexer.matcher_at(tokens))
            if lexer.is_sound:
                return result
        if not may_compile:
            raise GrammarUnready
        lexer = self._made()
        result = lexer.apply(operation, lexer.matcher_at(tokens))
        self._install(lexer)
        return result

    def affords(self, state: GrammarState, tokens: Sequence[int], count: int, *, may_compile: bool) -> bool:
        """Return True if a new lexer reads the first `count` tokens of a state for at most `output_fuel`.

        Any lexer that has read them and has spent no more, on all sessions, shows that at once.
        """
        lexer = self._lexer
        if lexer is not None and not lexer.is_spent:
            lexer.matcher_of(state, tokens, None if may_compile else 0)
            if lexer.has_spent_at_most(self._limits.output_fuel):
                return True
        if not may_compile:
            raise GrammarUnready
        lexer = self._made()
        lexer.matcher_at(tokens[:count])
        if not lexer.has_spent_at_most(self._limits.output_fuel):
            return False
        self._install(lexer)
        return True

    def share(self, state: GrammarState, other: GrammarState) -> None:
        """Let `other`, at the same place as `state`, go on from what was computed for it."""
        if self._lexer is not None:
            self._lexer.share(state, other)

    def fill(
        self,
        tokens: Sequence[int],
        draft_tokens: Sequence[int],
        parents: Parents,
        rows: NDArray[np.uint32],
        *,
        may_compile: bool,
    ) -> None:
        """Fill `rows` as `GrammarState.masks` does. A row that fails allows end tokens only."""
        children, usual = children_of(parents, len(draft_tokens)), {ROOT: True}
        reached = [ROOT]
        for node in reached:  # which grows
            before = [*tokens, *(draft_tokens[at] for at in path_to(parents, node))]
            row = rows[node + 1]
            if self.decide(before, partial(fill_row, row, usual[node]), may_compile=may_compile):
                reached += children[node]
                usual |= {child: usual[node] and is_set(row, draft_tokens[child]) for child in children[node]}

    def _made(self) -> Lexer:
        return Lexer(self.vocabulary, self.spec, self._native, self._limits, self._has_grown)

    def _install(self, lexer: Lexer) -> None:
        self._lexer = lexer
        self._has_grown()

    def _has_grown(self) -> None:
        self.grew(self)


def _checked(length: int) -> int:
    """Return how many tokens must be affordable so that another may follow `length` tokens."""
    return max(0, (length - MOST_AHEAD) // _CHECKED_TOKENS * _CHECKED_TOKENS)


class GrammarState:
    """A place in a grammar: that of one session's output. Not safe to use from several threads at once."""

    __slots__ = (
        "__weakref__",
        "_afforded",
        "_ahead",
        "_compiled",
        "_has_begun",
        "_spec",
        "_tokens",
        "_tried",
        "_unaffordable",
        "length",
        "may_compile",
        "row_ns",
    )

    def __init__(
        self, compiled: CompiledGrammar, spec: GrammarSpec | None = None, *, may_compile: bool = True
    ) -> None:
        self._compiled = compiled
        self._spec = spec or compiled.spec
        self.may_compile = may_compile
        """Whether it may wait until its grammar is compiled anew.

        A state that may not takes tokens unchecked until the new lexer has read its output, and knows nothing
        of what may follow.
        """
        # False while the model reasons: everything but an end token is allowed.
        self._has_begun = not self._spec.reasons_first
        self._tokens: list[int] = []
        """Confirmed tokens since the grammar began."""
        self._afforded = 0
        """How many of these tokens are known to be read for the fuel of an output."""
        self._unaffordable: int | None = None
        """How many of them are known not to be."""
        self.length = 0
        """Number of confirmed output tokens."""
        self.row_ns = 0
        """Time that a row of its masks takes, as whoever computes them measures it."""
        self._ahead: list[int] = []
        self._tried: GrammarState | None = None
        """The state after `_ahead`, which are not confirmed; None if they were not tried."""

    @property
    def grammar(self) -> CompiledGrammar:
        return self._compiled

    @property
    def is_over(self) -> bool:
        """Return True if the text is complete and nothing but an end token may follow."""
        return self._has_begun and self._decide(
            lambda matcher: matcher.is_stopped() and matcher.is_accepting()
        )

    def confirm(self, tokens: Sequence[int]) -> None:
        """Advance by confirmed output tokens. Raise GrammarFailed where the grammar allows no token."""
        self._forget(tokens)
        begin = 0
        if self._opens(tokens):
            self._has_begun = False
        if not self._has_begun:
            begin = self._begin(tokens)
            self.length += min(begin, len(tokens))
            if begin > len(tokens):
                return
            self._has_begun = True
        for at in range(begin, len(tokens), READ_TOKENS):
            self._read(list(tokens[at : at + READ_TOKENS]))

    def masks(self, draft_tokens: Sequence[int], parents: Parents = CHAIN) -> NDArray[np.uint32]:
        """Return which tokens may follow, as bits: bit t % 32 of word t // 32 is that of token t.

        The shape is [len(draft_tokens) + 1, mask_words]. Row 0 holds after the confirmed tokens, row i + 1
        after draft token i and those before it on its path. Rows after a draft token that is not allowed, or
        after the end of the text, are all ones. The state stays as it is. Other threads run meanwhile. Raise
        GrammarUnready if it would have to compile, and may not.
        """
        rows = np.full((len(draft_tokens) + 1, self._compiled.vocabulary.mask_words), ALL, np.uint32)
        if not self._has_begun:
            self._fill_reasoning(draft_tokens, parents, rows)
            return rows
        self._fill(draft_tokens, parents, rows)
        self._end_spent(draft_tokens, parents, rows)
        if (opening := self._opening) is not None:
            if (opened := child_of(draft_tokens, parents, ROOT, opening)) is not None:
                fill_below(opened, draft_tokens, parents, rows, self._fill_reasoning)
            rows[0, opening >> 5] |= np.uint32(1 << (opening & 31))
        return rows

    def mask_after(self, ahead: Sequence[int]) -> NDArray[np.uint32]:
        """Return the mask after `ahead`, tokens that are not confirmed; all ones if they are not allowed.

        What was tried is remembered: a call with one more token costs that token only.
        """
        tried = self._after(ahead)
        if tried is None:
            return np.full(self._compiled.vocabulary.mask_words, ALL, np.uint32)
        return tried.masks(()).reshape(-1)

    def allowed_prefix(self, tokens: Sequence[int], ahead: Sequence[int] = ()) -> int:
        """Return how many of `tokens` the grammar allows after `ahead`, the first first.

        Where text is certain, a mask allows its usual tokens only; here others of the same text count, too.
        """
        if ahead:
            tried = self._after(ahead)
            return 0 if tried is None else tried.allowed_prefix(tokens)
        try:
            if self._opens(tokens):
                return 1 + self._reasoning_prefix(tokens[1:])
            if not self._has_begun:
                return self._reasoning_prefix(tokens)
            if self.is_over:  # where llguidance allows no token at all
                return int(len(tokens) > 0 and tokens[0] in self._compiled.vocabulary.end_tokens)
            count = self._decide(lambda matcher: matcher.validate_tokens(list(tokens)))
            if count <= (left := self._left(len(tokens))):
                return count
            return left + (tokens[left] in self._compiled.vocabulary.end_tokens)
        except GrammarUnready:
            return 0

    def allowed_nodes(
        self, tokens: Sequence[int], parents: Parents = CHAIN, ahead: Sequence[int] = ()
    ) -> Sequence[int]:
        """Return the nodes of a tree that the grammar allows after `ahead`, in order.

        What is below a node that is not allowed is not allowed either.
        """
        if not parents:
            return range(self.allowed_prefix(tokens, ahead))
        allowed, refused = set[int](), set[int]()
        for leaf in sorted(set(range(len(tokens))).difference(parents)):
            path = path_to(parents, leaf)
            if refused.isdisjoint(path):
                count = self.allowed_prefix([tokens[node] for node in path], ahead)
                allowed.update(path[:count])
                refused.update(path[count : count + 1])
        return sorted(allowed)

    def forced(self, most: int, ahead: Sequence[int] = ()) -> tuple[int, ...]:
        """Return at most `most` tokens that are certain after `ahead`, as the tokenizer writes them."""
        if ahead:
            tried = self._after(ahead)
            return () if tried is None else tried.forced(most)
        if not self._has_begun or self._opening is not None or most <= 0:
            return ()
        try:
            most = min(most, MOST_AHEAD)
            forced = self._decide(lambda matcher: matcher.compute_ff_tokens()[:most])
            return tuple(forced[: self._left(len(forced))])
        except GrammarUnready:
            return ()

    # ------------------------------------------------------------------------------------ reasoning --

    @property
    def _opening(self) -> int | None:
        """Return the token by which the output may now begin with reasoning instead of the grammar."""
        return None if self.length else self._spec.opening_token

    def _opens(self, tokens: Sequence[int]) -> bool:
        return self._opening is not None and len(tokens) > 0 and tokens[0] == self._opening

    def _begin(self, tokens: Sequence[int]) -> int:
        """Return the index after `after_token`, where the grammar begins; beyond all rows if it is absent."""
        after = self._spec.after_token
        return next((i + 1 for i, token in enumerate(tokens) if token == after), len(tokens) + 1)

    def _fill_reasoning(
        self, draft_tokens: Sequence[int], parents: Parents, rows: NDArray[np.uint32]
    ) -> None:
        for token in self._compiled.vocabulary.end_tokens:
            rows[:, token >> 5] &= ~np.uint32(1 << (token & 31))
        ended = set[int]()
        for node, token in enumerate(draft_tokens):
            if parent_of(parents, node) in ended:
                ended.add(node)
            elif token == self._spec.after_token:
                ended.add(node)
                fill_below(node, draft_tokens, parents, rows, self._fill_new)

    def _fill_new(self, draft_tokens: Sequence[int], parents: Parents, rows: NDArray[np.uint32]) -> None:
        """Fill rows of a text that begins with the draft tokens."""
        self._compiled.fill((), draft_tokens, parents, rows, may_compile=self.may_compile)

    def _reasoning_prefix(self, tokens: Sequence[int]) -> int:
        begin, ends = self._begin(tokens), self._compiled.vocabulary.end_tokens
        free = next((i for i, token in enumerate(tokens[:begin]) if token in ends), len(tokens))
        if free < begin or begin > len(tokens):
            return free
        rest = list(tokens[begin:])
        return begin + self._compiled.decide(
            (), lambda matcher: matcher.validate_tokens(rest), may_compile=self.may_compile
        )

    # ----------------------------------------------------------------------------------------- fuel --

    def _left(self, most: int) -> int:
        """Return how many tokens, at most `most`, may follow within the fuel of an output.

        After them only the end may follow. That is a function of the tokens alone: a lexer that is new reads
        them for more than this fuel, and it does so a while before.
        """
        length = len(self._tokens)
        due = _checked(length + min(most, MOST_AHEAD))
        while self._unaffordable is None and self._afforded < due:
            count = max(self._afforded + _CHECKED_TOKENS, _checked(length))
            if self._compiled.affords(self, self._tokens, count, may_compile=self.may_compile):
                self._afforded = count
            else:
                self._unaffordable = count
        if self._unaffordable is None:
            return most
        return min(most, max(0, self._unaffordable + MOST_AHEAD - length))

    def _end_spent(self, draft_tokens: Sequence[int], parents: Parents, rows: NDArray[np.uint32]) -> None:
        """Allow end tokens only in rows that are beyond the fuel of an output."""
        left = self._left(len(rows))
        if left < len(rows):
            before = [0, *(depth + 1 for depth in depths(parents, len(draft_tokens)))]
            beyond = np.flatnonzero(np.array(before) >= left)
            rows[beyond] = 0
            for token in self._compiled.vocabulary.end_tokens:
                rows[beyond, token >> 5] |= np.uint32(1 << (token & 31))

    # ------------------------------------------------------------------------------------- matching --

    def _prepared(self, confirmed: int = 0) -> tuple[Lexer, LLMatcher]:
        """Return the lexer, and the matcher that has read the output.

        If it may not compile, a new lexer reads a slice only, for the tokens that are `confirmed` now. Raise
        GrammarUnready until it has read all.
        """
        lexer = self._compiled.lexer(may_compile=self.may_compile)
        most = None if self.may_compile else min(READ_TOKENS, _READ_AGAIN * confirmed)
        return lexer, lexer.matcher_of(self, self._tokens, most)

    def _decide(self, operation: Operation[T]) -> T:
        lexer, matcher = self._prepared()
        result = lexer.apply(operation, matcher)
        if lexer.is_sound and not matcher.is_error():
            return result
        lexer.forget(self)
        return self._decide_anew(operation)

    def _decide_anew(self, operation: Operation[T]) -> T:
        return self._compiled.decide(self._tokens, operation, may_compile=self.may_compile)

    def _read(self, tokens: list[int]) -> None:
        """Advance by tokens. Raise GrammarFailed or Broken at one that is not allowed."""
        if self._read_at_once(tokens):
            return
        if len(tokens) == 1:
            self._require(tokens[0])
            self._grow(tokens)
            return
        half = len(tokens) // 2
        self._read(tokens[:half])
        self._read(tokens[half:])

    def _read_at_once(self, tokens: list[int]) -> bool:
        """Advance by tokens if no end token is among them, and all are allowed."""
        if not self._compiled.vocabulary.end_tokens.isdisjoint(tokens):
            return False
        try:
            lexer, matcher = self._prepared(len(tokens))
        except GrammarUnready:
            self._grow(tokens)
            return True
        if matcher.is_error() and lexer.is_sound and not self.may_compile:
            raise GrammarFailed(self.length)  # at a token that was taken unchecked
        has_read = lexer.read(matcher, tokens) and lexer.is_sound
        if has_read:
            self._grow(tokens)
        else:
            lexer.forget(self)
        return has_read

    def _require(self, token: int) -> None:
        # No matcher has refused an end token yet, so that of this state may read it.
        is_end = token in self._compiled.vocabulary.end_tokens
        decide = self._decide if is_end else self._decide_anew
        try:
            refusal = decide(partial(self._refusal, token))
        except GrammarUnready:
            return
        if refusal is not None:
            raise GrammarFailed(self.length) if self._compiled.is_exhausted else refusal

    def _refusal(self, token: int, matcher: LLMatcher) -> GalleyError | None:
        """Return why the token may not follow where a matcher is, None if it may."""
        if token in self._compiled.vocabulary.end_tokens and not matcher.is_accepting():
            return GrammarFailed(self.length)
        before = matcher.deep_copy()
        if matcher.consume_token(token):
            return None
        if before.validate_tokens([token]) or before.is_error():
            return GrammarFailed(self.length)
        return Broken(f"the grammar does not allow output token {self.length}")

    def _grow(self, tokens: list[int]) -> None:
        self._tokens += tokens
        self.length += len(tokens)

    def _fill(self, draft_tokens: Sequence[int], parents: Parents, rows: NDArray[np.uint32]) -> None:
        lexer, matcher = self._prepared()
        lexer.apply(partial(self._fill_ahead, draft_tokens, parents, rows), matcher)
        if matcher.is_error() or not lexer.is_sound:
            lexer.forget(self)
            rows[:] = ALL
            self._compiled.fill(self._tokens, draft_tokens, parents, rows, may_compile=self.may_compile)

    def _fill_ahead(
        self, draft_tokens: Sequence[int], parents: Parents, rows: NDArray[np.uint32], matcher: LLMatcher
    ) -> None:
        if parents:
            fill_tree(draft_tokens, parents, rows, matcher)
        elif draft_tokens:
            drafts = [(matcher, 0, list(draft_tokens))]
            self._compiled.vocabulary.executor.unsafe_compute_mask_ptr_with_draft_token(
                drafts, rows.ctypes.data, rows.shape[1] * rows.itemsize, len(rows)
            )
        else:
            matcher.unsafe_compute_mask_ptr(rows.ctypes.data, rows.nbytes)

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
        except GalleyError:
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
        copy = GrammarState(self._compiled, self._spec, may_compile=self.may_compile)
        copy._has_begun = self._has_begun
        copy._tokens = list(self._tokens)
        copy._afforded, copy._unaffordable = self._afforded, self._unaffordable
        copy.length = self.length
        self._compiled.share(self, copy)
        return copy
