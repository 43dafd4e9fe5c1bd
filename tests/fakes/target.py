"""What a fake target does with a request: it looks up its cache, follows the hints and confirms the truth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

from galley.core.acceptance import Verdict, confirm
from galley.core.answer.answer import SessionSpec
from galley.core.content import Miss, look_up, prefix_hash
from galley.core.hints import NOTHING, Hint, HintTail
from galley.core.session import events as ev
from galley.core.trees import ROOT, candidates_after
from galley.pb.galley.v1 import galley_pb2 as pb
from tests.fakes.truth import NextToken

VerifyT = TypeVar("VerifyT", ev.Verify, pb.VerifyItem)


def admit(held: Sequence[int], part: ev.Slice | pb.SessionSlice) -> Miss | list[int]:
    """Return all tokens of the session, if a cache with the tokens `held` has those before the part."""
    result = look_up(held, part.start, part.tokens, part.prefix_hash)
    return result if isinstance(result, Miss) else [*held[: part.start], *part.tokens]


class OpenRequest(Generic[VerifyT]):
    """A Verify of the session machine or of the wire: the fields of both have the same names.

    `tokens` is None until the cache was looked up; `session` says where the answer ends.
    """

    def __init__(
        self,
        verify: VerifyT,
        session: SessionSpec | pb.SessionSlice,
        prompt_len: int,
        next_token: NextToken,
    ) -> None:
        self.verify: VerifyT = verify
        self.tokens: list[int] | None = None
        position = verify.slice.start + len(verify.slice.tokens)
        self.limit = position + len(verify.draft_tokens) + 1 + verify.credit
        self._hint: Hint | None = None
        self._session = session
        self._prompt_len = prompt_len
        self._next_token = next_token
        self._stops = frozenset(session.stop_token_ids)

    def extend(self, limit: int, hint: Hint | None) -> None:
        self.limit = max(self.limit, limit)
        self._hint = hint or self._hint

    def begin(self, tokens: list[int]) -> None:
        self.tokens = tokens
        if self._hint is None:
            drafts, parents = tuple(self.verify.draft_tokens), tuple(self.verify.parents)
            self._hint = Hint(len(tokens), prefix_hash(tokens), drafts, parents=parents)

    def step(self, at_most: int | None = None) -> tuple[Verdict, int]:
        """Confirm tokens; return them, and how many draft tokens were verified: `at_most` so many."""
        tokens, session = self.tokens, self._session
        assert tokens is not None
        guesses = self._guesses(tokens)
        if at_most is not None:
            guesses = guesses.first(at_most)
        verdict = confirm(
            guesses.draft_tokens,
            self._samples(tokens, guesses),
            parents=guesses.parents,
            position=len(tokens),
            max_position=session.max_position,
            stop_token_ids=self._stops,
            output_len=len(tokens) - self._prompt_len,
            min_tokens=session.min_tokens,
        )
        tokens += verdict.tokens
        return verdict, len(guesses.draft_tokens)

    @property
    def may_go_on(self) -> bool:
        tokens = self.tokens
        assert tokens is not None
        stopped = len(tokens) - self._prompt_len > self._session.min_tokens and tokens[-1] in self._stops
        return self.verify.credit > 0 and len(tokens) < self._end and not stopped

    @property
    def _end(self) -> int:
        return min(self.limit, self._session.max_position)

    def _guesses(self, tokens: list[int]) -> HintTail:
        hint = self._hint
        if hint is None or hint.position > len(tokens):
            return NOTHING
        reached = tokens[hint.position :]
        path = hint.whole.follow(reached)
        if prefix_hash(tokens[: hint.position]) != hint.prefix_hash or len(path) < len(reached):
            return NOTHING
        room = max(0, self._end - len(tokens) - 1)
        left = hint.whole.below(path[-1] if path else ROOT)
        return left.first(min(room, self.verify.max_verified or room))

    def _samples(self, tokens: list[int], guesses: HintTail) -> list[int]:
        """Return the true tokens, up to and including the first that no draft token has."""
        seed, least = self._session.sampling.seed, self._prompt_len + self._session.min_tokens
        context, node = list(tokens), ROOT
        while True:
            banned = self._stops if len(context) < least else frozenset()
            context.append(self._next_token(context, seed, banned))
            after = candidates_after(guesses.parents, len(guesses.draft_tokens), node)
            right = [child for child in after if guesses.draft_tokens[child] == context[-1]]
            if not right:
                return context[len(tokens) :]
            node = right[0]
