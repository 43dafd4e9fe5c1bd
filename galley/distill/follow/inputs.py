"""Choose the sessions of a cycle from those that are spooled: some of each principal, and none that is bad.

Whoever calls a gateway writes part of what drafts learn from. So of several principals none fills more than
half of a cycle; sessions that repeat themselves or others, or hold token ids that do not exist, are
left out. What is chosen depends on the spooled sessions alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b

from galley.common.registry.spool import SpooledSession
from galley.core.content import token_bytes
from galley.core.versions.counts import effective

HELD_OUT_PARTS = 10
"""One session in this many is measured on, and never trained on."""
_MOST_PROMPT, _MOST_ANSWER = 1024, 1024
"""Tokens of a session that are used: the last ones of the prompt, and the first ones of the answer."""
_FEWEST_TOKENS = 8
_GRAM = 8
_MOST_REPEATED = 0.5
"""Share of an answer's runs of _GRAM tokens that may have occurred in it before."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """A session of a principal, cut to what is used of it."""

    principal: str
    session: SpooledSession

    @property
    def answer_len(self) -> int:
        return len(self.session.tokens) - self.session.prompt_len


@dataclass(slots=True)
class Counts:
    """Counts of a principal's sessions by what became of them, and the answer tokens to train on."""

    read: int = 0
    invalid: int = 0
    short: int = 0
    looping: int = 0
    repeated: int = 0
    train: int = 0
    held_out: int = 0
    train_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Inputs:
    train: Sequence[Chosen]
    held_out: Sequence[Chosen]
    counts: Mapping[str, Counts] = field(default_factory=dict)

    @property
    def train_tokens(self) -> int:
        return sum(chosen.answer_len for chosen in self.train)

    @property
    def held_out_sessions(self) -> float:
        """Return how many equal held-out sessions would say as much."""
        lengths = [chosen.answer_len for chosen in self.held_out]
        return effective(sum(lengths), sum(length**2 for length in lengths)) if lengths else 0.0


def choose(
    spooled: Mapping[str, Sequence[SpooledSession]], vocab: int, train_tokens: int, held_out_tokens: int
) -> Inputs:
    """Return sessions of all principals (given the newest first), of at most so many tokens each.

    `vocab` is the target's number of tokens.
    """
    counts = {principal: Counts(read=len(sessions)) for principal, sessions in spooled.items()}
    seen: set[bytes] = set()
    parts: dict[bool, dict[str, deque[Chosen]]] = {True: {}, False: {}}
    for principal in sorted(spooled):
        for session in spooled[principal]:
            fault = fault_of(session, vocab, seen)
            if fault:
                setattr(counts[principal], fault, getattr(counts[principal], fault) + 1)
                continue
            part = parts[is_held_out(session.session_id)]
            part.setdefault(principal, deque()).append(usable(principal, session))
    train, held_out = _fair(parts[False], train_tokens), _fair(parts[True], held_out_tokens)
    for chosen in train:
        counts[chosen.principal].train += 1
        counts[chosen.principal].train_tokens += chosen.answer_len
    for chosen in held_out:
        counts[chosen.principal].held_out += 1
    return Inputs(train, held_out, counts)


def is_held_out(session_id: str) -> bool:
    digest = blake2b(session_id.encode(), digest_size=4, person=b"galley.heldout").digest()
    return int.from_bytes(digest, "little") % HELD_OUT_PARTS == 0


def fault_of(session: SpooledSession, vocab: int, seen: set[bytes]) -> str:
    """Return why a session is left out, as a field of Counts, or nothing; note its answer in `seen`."""
    answer = session.tokens[session.prompt_len :]
    if not 0 <= min(session.tokens) <= max(session.tokens) < vocab:
        return "invalid"
    if len(answer) < _FEWEST_TOKENS:
        return "short"
    if is_looping(answer):
        return "looping"
    digest = blake2b(token_bytes(answer), digest_size=16).digest()
    if digest in seen:
        return "repeated"
    seen.add(digest)
    return ""


def is_looping(answer: Sequence[int]) -> bool:
    """Return True if most of an answer has occurred in it before."""
    grams = [tuple(answer[at : at + _GRAM]) for at in range(len(answer) - _GRAM + 1)]
    return len(grams) - len(set(grams)) > _MOST_REPEATED * len(grams)


def usable(principal: str, session: SpooledSession) -> Chosen:
    """Return what is used of a session."""
    first = max(0, session.prompt_len - _MOST_PROMPT)
    tokens = session.tokens[first : session.prompt_len + _MOST_ANSWER]
    return Chosen(principal, replace(session, tokens=tokens, prompt_len=session.prompt_len - first))


def _fair(sessions: Mapping[str, deque[Chosen]], budget: int) -> list[Chosen]:
    """Return sessions with `budget` tokens at most, always one of the principal with the fewest so far."""
    most = budget if len(sessions) == 1 else budget // 2
    taken = dict.fromkeys(sorted(sessions), 0)
    left = {principal: deque(queue) for principal, queue in sessions.items()}
    chosen: list[Chosen] = []
    while left and sum(taken.values()) < budget:
        principal = min(left, key=lambda name: (taken[name], name))
        if not left[principal] or taken[principal] + len(left[principal][0].session.tokens) > most:
            del left[principal]
            continue
        chosen.append(left[principal].popleft())
        taken[principal] += len(chosen[-1].session.tokens)
    return chosen
