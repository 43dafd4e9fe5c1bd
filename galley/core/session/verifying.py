"""The session's side of its request at the target: the open request, its credit, and when to retry.

1. At most one Verify is open. It ends with its first verdict without `more`, a cache miss or a failure.
2. The limit of a Verify is never lowered. ExtendVerify raises it once half of the credit is used.
3. After a cache miss the request is repeated with more tokens. More than `MAX_MISSES` in a row are a failure.
4. A failed target is retried with doubling delays, until `timeout_ns` have passed since its first failure
   without a verdict; a silent one has failed since it got the request, or since its last verdict. Each
   delay is cut by up to half, so that sessions that failed together do not retry together.
"""

from __future__ import annotations

from hashlib import blake2b
from itertools import islice

from galley.core.answer.answer import Answer
from galley.core.hints import Hint, HintTail
from galley.core.session.drafting import MAX_MISSES, remaining, usable_cache_len, valid_prefix
from galley.core.session.events import CacheMissed, CancelVerify, ExtendVerify, Slice, Verified, Verify
from galley.core.session.round import VerifiedNodes
from galley.core.trees import depths, kept


class _SentHint:
    """A hint that the target has, and of a tree the depth of each node: each verdict is compared with it."""

    __slots__ = ("_depths", "hint")

    def __init__(self, hint: Hint) -> None:
        self.hint = hint
        self._depths = depths(hint.parents, len(hint.draft_tokens)) if hint.parents else ()

    def node_at(self, position: int, token: int | None) -> int | None:
        """Return the first node for this position that has the token, or any if that is None."""
        tokens, at = self.hint.draft_tokens, position - self.hint.position
        if not self._depths:
            return at if 0 <= at < len(tokens) and (token is None or token == tokens[at]) else None
        nodes = (node for node, depth in enumerate(self._depths) if depth == at)
        return next((node for node in nodes if token is None or token == tokens[node]), None)

    def nodes_from(self, position: int) -> int:
        """Return how many nodes are for this position or a later one."""
        count, first = len(self.hint.draft_tokens), position - self.hint.position
        if not self._depths:
            return max(0, count - first)
        return count if first <= 0 else sum([depth >= first for depth in self._depths])


class OpenVerify:
    """A Verify that may confirm no token at or beyond position `limit`. Without credit it has one verdict.

    `prefills` is True until the first verdict if the target has a prompt to read.
    """

    def __init__(
        self, request_id: int, limit: int, credit: int, *, hint_due: bool, prefills: bool = False
    ) -> None:
        self.request_id = request_id
        self.limit = limit
        self._has_credit = credit > 0
        self.hint_due = hint_due
        self.prefills = prefills
        self._sent: list[_SentHint] = []
        self._has_trees = False

    def add_hint(self, hint: Hint) -> None:
        """Remember a hint that is sent; the target may use earlier ones until it arrives."""
        self._sent.append(_SentHint(hint))
        self._has_trees = self._has_trees or bool(hint.parents)

    def confirm(self, answer: Answer) -> None:
        self._sent = [sent for sent in self._sent if sent.nodes_from(len(answer.tokens))]

    def tree(self, event: Verified, answer: Answer) -> VerifiedNodes | None:
        """Return the verified nodes of the latest hint that the verdict fits; None unless that is a tree.

        Call it before they are confirmed. The target verifies the first nodes, but for those that a grammar
        forbids: then which of the others it verified is not known.
        """
        for sent in reversed(self._sent if self._has_trees and event.trees else ()):
            tail = remaining(sent.hint, answer.tokens)
            path = tail.follow(event.tokens[: event.accepted])
            if len(path) < event.accepted or len(tail.draft_tokens) < event.verified:
                continue
            if not tail.parents:
                return None
            others = (node for node in range(len(tail.draft_tokens)) if node not in path)
            verified = sorted((*path, *islice(others, event.verified - len(path))))
            return VerifiedNodes(
                [tail.sources[node] for node in verified],
                kept(tail.parents, verified),
                [verified.index(node) for node in path],
            )
        return None

    def sources(self, event: Verified, answer: Answer) -> list[str]:
        """Return what proposed each of the verified draft tokens, "" for those that no hint has.

        Call it before they are confirmed.
        """
        first = len(answer.tokens)
        return [
            self._source(first + i, event.tokens[i] if i < event.accepted else None)
            for i in range(event.verified)
        ]

    def _source(self, position: int, token: int | None) -> str:
        """Return the source of the latest hint with this token at the position; None: with any."""
        for sent in reversed(self._sent):
            node = sent.node_at(position, token)
            if node is not None and node < len(sent.hint.sources):
                return sent.hint.sources[node]
        return ""

    def violation(self, event: Verified, answer: Answer) -> str:
        """Return how a verdict breaks the protocol, or "": a faulty target must not reach the log."""
        spec, position = answer.spec, len(answer.tokens)
        end = position + len(event.tokens)
        if event.position != position:
            return f"is for position {event.position}, not {position}"
        if not event.tokens:
            return "has no tokens"
        if end > self.limit:
            return f"ends at position {end}, beyond its limit {self.limit}"
        if event.more and (end == self.limit or not self._has_credit):
            return f"must be the last (end {end}, limit {self.limit}) but announces more"
        if not 0 <= event.accepted <= len(event.tokens) <= event.accepted + 1:
            return f"has {len(event.tokens)} tokens, with {event.accepted} accepted draft tokens"
        if not event.accepted <= event.verified:
            return f"accepts {event.accepted} draft tokens, but verified only {event.verified}"
        if event.verified and not self._were_hinted(event, answer):
            return "verifies tokens that were not drafted"
        if len(valid_prefix(event.tokens, spec.vocab_size)) < len(event.tokens):
            return "has a token outside the vocabulary"
        if spec.logprobs is not None and len(event.logprobs) != len(event.tokens):
            return "lacks logprobs"
        return ""

    def _were_hinted(self, event: Verified, answer: Answer) -> bool:
        """Return True if each accepted token stands in a hint at its position.

        Only positions are compared, because the target may use the rest of a hint after a rejected token. It
        may also verify tokens that a grammar forces before their hint has come.
        """
        if answer.spec.grammar is not None:
            return event.verified <= answer.spec.k
        first = len(answer.tokens)
        if event.verified > max((sent.nodes_from(first) for sent in self._sent), default=0):
            return False
        return all(
            any(sent.node_at(first + i, token) is not None for sent in self._sent)
            for i, token in enumerate(event.tokens[: event.accepted])
        )


class Verifying:
    """The open Verify of one session, its credit and retries. Times in nanoseconds.

    `cache_len` is how many of the session's tokens the target has in its KV cache, as far as is known.
    """

    def __init__(
        self, credit: int, max_draft_tokens: int, *, retry_ns: int, max_retry_ns: int, timeout_ns: int
    ) -> None:
        self.credit = credit
        self.open: OpenVerify | None = None
        self.cache_len = 0
        self._max_draft_tokens = max_draft_tokens
        self._misses = 0
        self._first_retry_ns = self._retry_ns = retry_ns
        self._max_retry_ns = max_retry_ns
        self._timeout_ns = timeout_ns
        self._failing_since: int | None = None

    def is_open(self, request_id: int) -> bool:
        return self.open is not None and self.open.request_id == request_id

    def request(
        self,
        request_id: int,
        answer: Answer,
        tail: HintTail,
        room: int,
        *,
        hint_due: bool,
        is_drafting: bool = False,
    ) -> Verify:
        """Open a Verify of the first draft tokens of `tail`, at most `room` - 1 of them.

        Without credit, the limit is what one verdict can reach.
        """
        most = min(self._max_draft_tokens, max(0, room - 1))
        tail = tail.first(most if self.credit else min(most, answer.spec.k))
        draft_tokens = tail.draft_tokens
        first_verdict = len(draft_tokens) + 1
        credit = max(0, min(self.credit, room - first_verdict))
        hint_due = hint_due and self.credit > 0
        position = len(answer.tokens)
        part = Slice.after(answer, self.cache_len)
        self.open = OpenVerify(
            request_id,
            position + first_verdict + credit,
            credit,
            hint_due=hint_due,
            prefills=len(part.tokens) > 1,
        )
        if draft_tokens:
            self.open.add_hint(Hint(position, b"", draft_tokens, tail.survival, tail.sources, tail.parents))
        return Verify(
            request_id,
            part,
            draft_tokens,
            tail.survival,
            credit,
            hint_due,
            answer.spec.k,
            tail.parents,
            is_drafting,
        )

    def can_extend(self, answer: Answer, hint: Hint | None, *, hint_due: bool) -> bool:
        """Return True if an extension may be worth a message: for a hint, or once half the credit is used."""
        if self.open is None or not self.credit:
            return False
        left = self.open.limit - len(answer.tokens)
        return hint is not None or hint_due != self.open.hint_due or left <= max(1, self.credit // 2)

    def extend(self, answer: Answer, room: int, hint: Hint | None, *, hint_due: bool) -> ExtendVerify | None:
        """Extend the open Verify, where `can_extend`; None if the room is not worth a message."""
        if self.open is None:
            return None
        drafted = len(hint.draft_tokens) if hint else 0
        limit = len(answer.tokens) + min(drafted + 1 + self.credit, room)
        enough = 1 if limit == answer.spec.max_position else max(1, self.credit // 4)
        if hint is None and hint_due == self.open.hint_due and limit - self.open.limit < enough:
            return None
        if hint is not None:
            self.open.add_hint(hint)
        self.open.limit = max(self.open.limit, limit)
        self.open.hint_due = hint_due
        return ExtendVerify(self.open.request_id, self.open.limit, hint, hint_due)

    def cancel(self) -> CancelVerify | None:
        open_verify, self.open = self.open, None
        return None if open_verify is None else CancelVerify(open_verify.request_id)

    def confirm(self, event: Verified, answer: Answer) -> None:
        """Take a valid verdict whose tokens are in the answer: the target works again."""
        self._misses = 0
        self._failing_since = None
        self._retry_ns = self._first_retry_ns
        self.cache_len = min(max(0, event.cache_len), len(answer.tokens))
        if self.open is not None:
            self.open.prefills = False
            self.open.confirm(answer)

    def miss(self, event: CacheMissed, answer: Answer) -> bool:
        """Close the Verify after a cache miss. Leave it open and return False after too many in a row."""
        self._misses += 1
        if self._misses > MAX_MISSES:
            return False
        self.open = None
        self.cache_len = usable_cache_len(event, answer)
        return True

    def fail(self, *, elsewhere: bool = False) -> None:
        """Close the Verify after a failure: another replica, or a new process, may have no cache.

        With `elsewhere` another replica gets the request, and its time counts anew.
        """
        if elsewhere:
            self._failing_since = None
        self.open = None
        self._misses = 0
        self.cache_len = 0

    def next_retry_ns(self, now: int, session_id: str, failed_ns: int) -> int | None:
        """Return when to retry, the last time at the end of the timeout; None once that has come.

        The timeout counts from the first failure; `failed_ns` is the time of this one.
        """
        if self._failing_since is None:
            self._failing_since = failed_ns
        left_ns = self._failing_since + self._timeout_ns - now
        if left_ns <= self._first_retry_ns // 2:  # timers may fire early, too
            return None
        delay_ns = self._retry_ns - int(_draw(session_id, now) * self._retry_ns / 2)
        self._retry_ns = min(2 * self._retry_ns, self._max_retry_ns)
        return now + min(delay_ns, left_ns)


def _draw(session_id: str, now: int) -> float:
    """Return a number in [0, 1) that differs between sessions, and is the same in each run."""
    digest = blake2b(f"{session_id} {now}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") / 2**32
