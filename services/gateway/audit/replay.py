"""The comparison of a logged answer with what a target draws again. No I/O.

The tokens of the log are sent as draft tokens. A target verifies them as those of any session: it draws each
token from the prompt, the tokens before it, the parameters and the seed. Where it draws another token than
the log has, the difference is noted, and the replay goes on after the log's token. So one difference does not
cause others. Chunks have random sizes, so that the steps are not those of the session.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from random import Random

from galley.core.audit import MAX_DIFFERENCES, Difference
from galley.core.content import PrefixHasher
from galley.core.records import PositionLogprobs
from galley.core.session.events import CacheMissed, Slice, Verified, Verify
from services.gateway.audit.logged_answer import BuildRange, LoggedAnswer

_PIECE_TOKENS = 32 * 1024
"""Tokens that are hashed before others get a turn: about 1 ms."""


class Replay:
    """Compare the output tokens in `ranges` of an answer; the positions of these rise.

    `compared` and `differing` count tokens. A chunk has at most `most_draft_tokens` draft tokens.
    """

    def __init__(
        self, answer: LoggedAnswer, ranges: Sequence[BuildRange], most_draft_tokens: int, seed: str
    ) -> None:
        self.compared = 0
        self.differing = 0
        self.differences: list[Difference] = []
        self._answer = answer
        self._ranges = list(ranges)
        self._most = most_draft_tokens
        self._sizes = Random(seed)  # noqa: S311  # sizes of chunks are no secret
        self._position = self._ranges[0].start if self._ranges else len(answer.tokens)
        self._cache_len = 0
        self._hasher = PrefixHasher()
        self._last_id = 0

    @property
    def is_done(self) -> bool:
        return not self._ranges

    async def prepare(self) -> None:
        """Hash the prompt, in pieces; later hashes only add to it."""
        for length in range(_PIECE_TOKENS, self._position, _PIECE_TOKENS):
            self._hasher.digest(self._answer.tokens, length)
            await asyncio.sleep(0)

    def request(self) -> Verify:
        """Return the next request; its response goes to `take`, `miss` or `restart`."""
        tokens, position = self._answer.tokens, self._position
        # The target draws one token more than it verifies.
        drafts = min(self._sizes.randint(0, self._most), self._ranges[0].end - position - 1)
        start = min(self._cache_len, position - 1)
        self._last_id += 1
        return Verify(
            self._last_id,
            Slice(start, tuple(tokens[start:position]), self._hasher.digest(tokens, start)),
            tuple(tokens[position : position + drafts]),
            (1.0,) * drafts,
        )

    def take(self, verdict: Verified) -> bool:
        """Compare what the target drew. Return False if the verdict is not one on the last request."""
        if verdict.position != self._position or not verdict.tokens:
            return False
        end = self._ranges[0].end
        for offset, token in enumerate(verdict.tokens[: end - self._position]):
            differs = token != self._answer.tokens[self._position]
            if differs:
                self._note(token, verdict.logprobs[offset] if offset < len(verdict.logprobs) else None)
            self.compared += 1
            self._position += 1
            if differs:  # what follows was drawn after another token than the log has
                break
        self._cache_len = max(0, verdict.cache_len)
        if self._position >= end:
            self._ranges.pop(0)
            if self._ranges:
                self._position = self._ranges[0].start
        return True

    def miss(self, missed: CacheMissed) -> None:
        """Send more tokens with the next request: the target holds fewer."""
        tokens = self._answer.tokens
        have = missed.have if missed.have < self._position else 0
        self._cache_len = have if self._hasher.digest(tokens, have) == missed.prefix_hash else 0

    def restart(self) -> None:
        """Send all tokens with the next request: it may go to another process."""
        self._cache_len = 0

    def _note(self, computed: int, logprobs: PositionLogprobs | None) -> None:
        self.differing += 1
        if len(self.differences) == MAX_DIFFERENCES:
            return
        logged = self._answer.tokens[self._position]
        self.differences.append(
            Difference(
                self._position - len(self._answer.spec.prompt),
                logged,
                computed,
                None if logprobs is None else dict(logprobs.top).get(logged),
                None if logprobs is None else logprobs.logprob,
            )
        )
