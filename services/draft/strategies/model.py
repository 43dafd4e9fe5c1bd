"""Draft with a small model that has the target's tokenizer.

Draft tokens are kept beside the KV cache, so those that the next request of a session still needs cost no
step. The model samples with the target's noise: same seed, same position, its own distribution, so that it
proposes what the target will sample (Daliri et al., arXiv 2408.07978).
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

from torch import Tensor

from galley.common.logs import log_internal
from galley.core.content import common_prefix_len
from galley.core.errors import GalleyError
from galley.core.grammar.compiled import GrammarState
from galley.core.lookup.calibration import Calibration
from galley.core.scheduler.messages import Slice
from galley.core.step import Draw
from galley.core.trees import follow
from galley.engine.masking import MaskThread
from galley.engine.model import CausalModel, Rows, SessionCache
from galley.engine.sampler import guess as guess_tokens
from galley.engine.sampler import list_tokens, with_masks
from galley.engine.sampling import draw as sampling
from galley.engine.sampling import guessing
from galley.engine.sampling.allowed import allows_any
from galley.engine.sampling.guessing import ListedToken, ListOutcome
from services.draft.strategies.base import DraftJob, DraftSession, Proposal
from services.draft.strategies.grammars import DraftGrammars, tried_mask
from services.draft.strategies.ngram import ByKind
from services.draft.strategies.states import StateReader

# Tokens of a session in one step, and of all that read prompts, so that long prompts do not delay the others.
# A session that lacks few tokens is not counted: it goes on in each step.
_SESSION_PREFILL_ROWS = 128
_STEP_PREFILL_ROWS = 256
_FEW_ROWS = 32
# Edges of the confidence buckets, finer near 1, where the probabilities of many tokens are multiplied.
_EDGES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 1.0)
CONFIDENCES = tuple((low + high) / 2 for low, high in pairwise(_EDGES))
"""The confidence of each bucket of greedy tokens; buckets of sampled tokens follow them."""
# Edges of the weights of listed candidates (`ListedToken`), and the ranks that have buckets of their own.
_LISTED_EDGES = (
    *(0.0, 0.01, 0.03, 0.06, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5),
    *(0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 1.0),
)
_RANKS = 4
_WEIGHTS = tuple((low + high) / 2 for low, high in pairwise(_LISTED_EDGES))
# A sampled candidate of little weight is right less often than that says (measured with the shipped draft).
_SAMPLED = tuple(min(weight, 3.5 * weight**2) for weight in _WEIGHTS)
LISTED = _WEIGHTS * _RANKS + _SAMPLED * _RANKS
"""The prior of each bucket of listed candidates: greedy, then sampled ones, each by rank, then by weight."""
# Weight of the prior, in verdicts; and workloads whose acceptance rate is kept.
_STRENGTH = 8.0
_WORKLOADS = 256


@dataclass(slots=True)
class ModelProposal(Proposal):
    """An unfinished proposal of at most `limit` tokens, `reach` of them within the model's window."""

    cache: SessionCache = field(kw_only=True)
    reach: int = field(kw_only=True)
    limit: int = field(kw_only=True)
    state: GrammarState | None = field(kw_only=True)

    def draw_after(self, path: Sequence[int]) -> Draw:
        request = self.job.slice
        return Draw(
            request.sampling,
            [*self.job.session.tokens, *path],
            request.prompt_len,
            request.stop_token_ids,
            request.min_tokens,
            grammar=self.state,
        )

    @property
    def missing(self) -> list[int]:
        """Return the tokens that the cache lacks: at least the last one, whose logits are needed."""
        known, cached = self.job.session.tokens, len(self.cache.tokens)
        return [*known[cached:], *self.tokens[max(0, cached - len(known)) :]]

    def add(self, token: int, chance: float) -> None:
        """Append a token that is accepted with probability `chance` if those before are; then `settle`."""
        self.tokens.append(token)
        self.survival.append((self.survival[-1] if self.survival else 1.0) * chance)
        self.settle()

    def settle(self) -> None:
        stopped = bool(self.tokens) and self.tokens[-1] in self.job.slice.stop_token_ids
        self.done = stopped or len(self.tokens) >= self.limit


@dataclass(frozen=True, slots=True)
class Drawn:
    """The next token of a proposal, and the bucket of the model's confidence in it."""

    proposal: ModelProposal
    token: int
    bucket: int


@dataclass(frozen=True, slots=True)
class Feed:
    """The rows of a proposal in a step, and a draw for each row whose logits are wanted."""

    proposal: ModelProposal
    rows: Rows
    draws: Sequence[Draw]


class ModelSteps:
    """The steps of one model; strategies that share it share its caches."""

    def __init__(self, model: CausalModel) -> None:
        sampling.warm_up()
        guessing.warm_up()
        self._model = model
        # None for a draft that reads no states.
        self._states = None if model.features is None else StateReader(model, model.features)
        self._caches: WeakKeyDictionary[DraftSession, SessionCache] = WeakKeyDictionary()
        self._grammars = DraftGrammars()
        self._masks = MaskThread()

    def open(self, job: DraftJob) -> ModelProposal:
        """Return an empty proposal, not settled yet."""
        cache = self._caches.get(job.session)
        if cache is None:
            cache = self._caches[job.session] = self._model.new_cache()
        elif cache.tree:
            path = follow(cache.tree, cache.parents, job.session.tokens[len(cache.tokens) :])
            self._model.keep_path(cache, path)
        # A token is drawn from the logits of the one before it, so the window must hold only that one.
        reach = max(0, self._model.info.context_window - len(job.session.tokens) + 1)
        state = self._grammars.state_of(job)
        return ModelProposal(job, cache=cache, reach=reach, limit=min(job.k, reach), state=state)

    def read_states(self, proposal: ModelProposal) -> bool:
        """Take the target's states that came; cut the cache back to where they change it.

        Return True if they do: what was drafted after the session's tokens is then worth drafting again.
        """
        if self._states is None:
            return False
        session = proposal.job.session
        changed = self._states.take(session, proposal.cache)
        proposal.used_features = self._states.has_read(session)
        return changed

    def cut_back(self, proposal: ModelProposal) -> None:
        """Truncate the cache to the tokens of the proposal, without its last one."""
        tokens = [*proposal.job.session.tokens, *proposal.tokens]
        proposal.cache.truncate(min(common_prefix_len(proposal.cache.tokens, tokens), len(tokens) - 1))

    def advance(self, proposals: Sequence[ModelProposal]) -> list[Drawn]:
        """Run a step of proposals, the oldest first; those in a long prefill get no token.

        An error ends its proposal only. So does a grammar that allows no token that the head knows.
        """
        lacking = [proposal.missing for proposal in proposals]
        fed = [
            (proposal, Rows(proposal.cache, missing[:count], int(count == len(missing))))
            for proposal, missing, count in zip(proposals, lacking, rows_in_a_step(lacking), strict=True)
            if count
        ]
        drawing = [proposal for proposal, rows in fed if rows.want_logits]
        draws: Sequence[Draw] = [proposal.draw_after(proposal.tokens) for proposal in drawing]
        with self._masks.beside(draws, tried_mask) as masks:
            logits = self._feed(fed)
        if not drawing:
            return []
        draws = with_masks(draws, masks)
        outcomes, confidences = guess_tokens(logits, draws, self._model.head)
        drawn = []
        for proposal, draw, outcome, confidence in zip(drawing, draws, outcomes, confidences, strict=True):
            if isinstance(outcome, GalleyError):
                if self._can_draw(draw):
                    self._fail(proposal, outcome)
                proposal.done = True
            else:
                greedy = proposal.job.slice.sampling.is_greedy
                drawn.append(Drawn(proposal, outcome.tokens[0], _bucket(confidence, greedy=greedy)))
        return drawn

    def list_after(self, feeds: Sequence[Feed], count: int) -> list[list[list[ListedToken]]]:
        """Run a step; return for each draw of each feed at most `count` candidates, the first one first.

        There are none where the grammar allows no token that the head knows. An error ends its proposal only.
        """
        draws: Sequence[Draw] = [draw for feed in feeds for draw in feed.draws]
        with self._masks.beside(draws, tried_mask) as masks:
            logits = self._feed([(feed.proposal, feed.rows) for feed in feeds])
        draws = with_masks(draws, masks)
        outcomes = iter(zip(draws, list_tokens(logits, draws, self._model.head, count), strict=True))
        return [[self._listed(feed.proposal, *next(outcomes)) for _ in feed.draws] for feed in feeds]

    def _listed(self, proposal: ModelProposal, draw: Draw, outcome: ListOutcome) -> list[ListedToken]:
        if not isinstance(outcome, GalleyError):
            return outcome
        if self._can_draw(draw):
            self._fail(proposal, outcome)
        return []

    def _can_draw(self, draw: Draw) -> bool:
        """Return False if the grammar allows no token that the head knows."""
        head = self._model.head
        return draw.allowed is None or head is None or allows_any(draw.allowed[0], head.columns)

    def _feed(self, fed: Sequence[tuple[ModelProposal, Rows]]) -> Tensor:
        try:
            return self._forward_rows(fed)
        except BaseException:
            # The state of the caches is unknown.
            for proposal, _ in fed:
                self._caches.pop(proposal.job.session, None)
            raise

    def _forward_rows(self, fed: Sequence[tuple[ModelProposal, Rows]]) -> Tensor:
        if self._states is None:
            return self._model.forward_head([rows for _, rows in fed])
        logits = self._states.forward([(proposal.job.session, rows) for proposal, rows in fed])
        for proposal, _ in fed:
            proposal.used_features = self._states.has_read(proposal.job.session)
        return logits

    def _fail(self, proposal: ModelProposal, error: GalleyError) -> None:
        log_internal(error, session_id=proposal.job.slice.key[1])
        self._caches.pop(proposal.job.session, None)
        proposal.error = error


def rows_in_a_step(lacking: Sequence[Sequence[int]]) -> list[int]:
    """Return how many of the tokens that each proposal lacks it is fed in a step, the oldest first."""
    counts, left = [], _STEP_PREFILL_ROWS
    for missing in lacking:
        count = len(missing)
        if count > _FEW_ROWS:
            count = min(count, _SESSION_PREFILL_ROWS, left)
            left -= count
        counts.append(count)
    return counts


def rules_of(request: Slice) -> object:
    """Return everything but the earlier tokens that determines a drawn token."""
    return (
        request.sampling,
        request.prompt_len,
        request.stop_token_ids,
        request.min_tokens,
        request.grammar_hash,
    )


def listed_bucket(rank: int, weight: float, *, greedy: bool) -> int:
    """Return the bucket of a listed candidate, after those of CONFIDENCES for greedy and sampled tokens."""
    kind = min(rank, _RANKS - 1) + (0 if greedy else _RANKS)
    bucket = min(bisect(_LISTED_EDGES, weight), len(_WEIGHTS)) - 1
    return 2 * len(CONFIDENCES) + kind * len(_WEIGHTS) + bucket


def _bucket(confidence: float, *, greedy: bool) -> int:
    bucket = min(bisect(_EDGES, confidence), len(CONFIDENCES)) - 1
    return bucket if greedy else bucket + len(CONFIDENCES)


E = TypeVar("E")


class DraftHistory(Generic[E]):
    """Consecutive draft tokens from position `first` on, each with its evidence."""

    __slots__ = ("_evidence", "_first", "_rules", "_tokens")

    def __init__(self) -> None:
        self._first = 0
        self._tokens: list[int] = []
        self._evidence: list[E] = []
        self._rules: object = None

    def append(self, token: int, evidence: E) -> None:
        self._tokens.append(token)
        self._evidence.append(evidence)

    def compare(self, session: DraftSession, agreed: int) -> list[tuple[E, int, int]]:
        """Return (evidence, draft token, confirmed token) of decided tokens, up to the first wrong one.

        Drop these tokens, and those that the session contradicts or has passed. The session has not
        changed before position `agreed` since the last call.
        """
        verdicts: list[tuple[E, int, int]] = []
        if agreed >= self._first:
            confirmed = session.tokens[self._first : session.confirmed]
            for token, evidence, right in zip(self._tokens, self._evidence, confirmed, strict=False):
                verdicts.append((evidence, token, right))
                if token != right:
                    break
        ahead = session.tokens[self._first :]
        if agreed < self._first or common_prefix_len(self._tokens, ahead) < len(ahead):
            self._first = len(session.tokens)
            self._cut(self._first)
        else:
            answered = max(0, session.confirmed - self._first)
            self._first += answered
            del self._tokens[:answered], self._evidence[:answered]
        return verdicts

    def ready(self, position: int, most: int, rules: object) -> list[tuple[int, E]]:
        """Return at most `most` kept tokens from `position` on, with their evidence; drop the rest.

        Drop tokens that were drawn by other `rules` too. Call it after `compare`, with the session's end.
        """
        self._cut(position + (most if rules == self._rules else 0))
        self._rules = rules
        begin = position - self._first
        return list(zip(self._tokens[begin:], self._evidence[begin:], strict=True))

    def _cut(self, position: int) -> None:
        kept = max(0, position - self._first)
        del self._tokens[kept:], self._evidence[kept:]


class ModelStrategy:
    def __init__(self, steps: ModelSteps) -> None:
        self._steps = steps
        # Draft tokens of each session, with their confidence buckets.
        self._history: WeakKeyDictionary[DraftSession, DraftHistory[int]] = WeakKeyDictionary()
        self._calibrations = ByKind(_calibration, _WORKLOADS)

    def begin(self, jobs: Sequence[DraftJob]) -> list[Proposal]:
        return [self._begin(job) for job in jobs]

    def advance(self, proposals: Sequence[Proposal]) -> None:
        """Draft one token each, but none while a long prompt is being prefilled."""
        for drawn in self._steps.advance(
            [proposal for proposal in proposals if isinstance(proposal, ModelProposal)]
        ):
            job = drawn.proposal.job
            self._history[job.session].append(drawn.token, drawn.bucket)
            drawn.proposal.add(drawn.token, self._calibrations.of(job).chance(drawn.bucket))

    def forget(self, session: DraftSession) -> None:
        self._history.pop(session, None)

    def _begin(self, job: DraftJob) -> ModelProposal:
        proposal, session = self._steps.open(job), job.session
        history = self._history.setdefault(session, DraftHistory())
        calibration = self._calibrations.of(job)
        agreed = common_prefix_len(proposal.cache.tokens, session.tokens)
        for bucket, drafted, confirmed in history.compare(session, agreed):
            calibration.record(bucket, drafted == confirmed)
        most = 0 if self._steps.read_states(proposal) else proposal.limit
        proposal.settle()
        for token, bucket in history.ready(len(session.tokens), most, rules_of(job.slice)):
            proposal.add(token, calibration.chance(bucket))
        self._steps.cut_back(proposal)
        return proposal


def _calibration() -> Calibration:
    prior = CONFIDENCES * 2
    return Calibration(prior, _STRENGTH)
