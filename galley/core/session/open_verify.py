"""An open Verify: what the target may do and knows, and the check of its verdicts."""

from __future__ import annotations

from galley.core.answer.answer import Answer
from galley.core.hints import Hint
from galley.core.session.drafting import valid_prefix
from galley.core.session.events import Verified


class OpenVerify:
    """No token may be confirmed at or beyond position `limit`; without credit there is one verdict.

    `hint_due` is what the target was last sent. `prefills` is True until the first verdict if the target has
    a prompt to read: its steps then say nothing of later ones.
    """

    def __init__(
        self, request_id: int, limit: int, credit: int, *, hint_due: bool, prefills: bool = False
    ) -> None:
        self.request_id = request_id
        self.limit = limit
        self._has_credit = credit > 0
        self.hint_due = hint_due
        self.prefills = prefills
        self._hints: list[Hint] = []

    def add_hint(self, hint: Hint) -> None:
        """Remember a hint that is sent; the target may use earlier ones until it arrives."""
        self._hints.append(hint)

    def confirm(self, answer: Answer) -> None:
        """Forget the hints that end within the confirmed tokens."""
        self._hints = [hint for hint in self._hints if hint.end > len(answer.tokens)]

    def violation(self, event: Verified, answer: Answer) -> str:
        """Return how a verdict breaks the protocol, or "": a faulty target must not reach the log."""
        spec, position = answer.spec, len(answer.tokens)
        end = position + len(event.tokens)
        if event.position != position:
            return f"is for position {event.position}, not {position}"
        if not event.tokens:
            return "has no tokens"
        if end > self.limit:
            return f"goes beyond its limit: {end} of {self.limit}"
        if event.more and (end == self.limit or not self._has_credit):
            return f"promises more than it may: at {end} of {self.limit}"
        if not 0 <= event.accepted <= len(event.tokens) <= event.accepted + 1:
            return f"has {len(event.tokens)} tokens for {event.accepted} accepted"
        if not event.accepted <= event.verified:
            return f"accepts {event.accepted} of {event.verified} verified"
        if event.verified and not self._were_hinted(event, answer):
            return "verifies tokens that were not drafted"
        if len(valid_prefix(event.tokens, spec.vocab_size)) < len(event.tokens):
            return "has a token outside the vocabulary"
        if spec.logprobs is not None and len(event.logprobs) != len(event.tokens):
            return "lacks logprobs"
        return ""

    def _were_hinted(self, event: Verified, answer: Answer) -> bool:
        """Return True if each accepted token stands in a hint at its position.

        By position, because the target may use the rest of a hint after a token that was refused.
        """
        first = len(answer.tokens)
        if first + event.verified > max((hint.end for hint in self._hints), default=0):
            return False
        return all(
            any(_says(hint, first + i, token) for hint in self._hints)
            for i, token in enumerate(event.tokens[: event.accepted])
        )


def _says(hint: Hint, position: int, token: int) -> bool:
    return hint.position <= position < hint.end and hint.draft_tokens[position - hint.position] == token
