"""A conversation, and what the commands of `galley chat` do with it. Pure: streams are shown elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, field

from galley.client.options import Message


@dataclass(slots=True)
class Conversation:
    """The turns so far. `unanswered` is a message whose answer failed; `/retry` sends it again."""

    system: str = ""
    turns: list[tuple[str, str]] = field(default_factory=list)
    unanswered: str = ""

    def messages(self, user: str = "") -> list[Message]:
        """Return the messages for the chat template, with `user` as the last one if it is not empty."""
        messages = [Message("system", self.system)] if self.system else []
        for question, answer in self.turns:
            messages += [Message("user", question), Message("assistant", answer)]
        return [*messages, Message("user", user)] if user else messages

    def add(self, user: str, answer: str) -> None:
        self.turns.append((user, answer))
        self.unanswered = ""

    def reset(self) -> None:
        self.turns.clear()
        self.unanswered = ""

    def undo(self) -> str:
        """Drop the last message and its answer; return the message, empty if there is none."""
        user = self.unanswered or (self.turns.pop()[0] if self.turns else "")
        self.unanswered = ""
        return user


@dataclass(slots=True)
class Totals:
    """Counts of all answers since the chat began; a stopped answer counts its tokens only."""

    answers: int = 0
    tokens: int = 0
    seconds: float = 0.0
    rounds: int = 0
    verified: int = 0
    accepted: int = 0

    def line(self) -> str:
        answers = f"{self.answers} answer{'' if self.answers == 1 else 's'}"
        return f"{answers} · {speed_line(self)}"


@dataclass(frozen=True, slots=True)
class AnswerStats:
    """One answer as it was shown; times in seconds since the request."""

    tokens: int
    seconds: float
    first_token_s: float
    rounds: int
    verified: int
    accepted: int

    def line(self) -> str:
        return f"{speed_line(self)} · first token {self.first_token_s * 1000:.0f} ms"


def speed_line(of: Totals | AnswerStats) -> str:
    """Return tokens, their rate, and what speculation did if anything was verified."""
    parts = [f"{of.tokens} token{'' if of.tokens == 1 else 's'}"]
    if of.seconds:
        parts.append(f"{of.tokens / of.seconds:.1f} tokens/s")
    if of.verified:
        parts.append(f"mean accepted length {1 + of.accepted / of.rounds:.2f}")
        parts.append(f"{of.accepted / of.verified:.0%} of draft tokens accepted")
    return " · ".join(parts)
