"""Draft trees: more candidates for a position, where they are worth more than further positions.

The candidates of a place are the model's first ones by log q + g, with the noise g that the target will use;
a hybrid adds the lookup's. A tree grows best first, as in EAGLE-2 (Li et al., arXiv 2406.16858, section 4):
its k likeliest nodes count, and a step of the model reads at once all of those whose children may be among
the k likeliest. It ends when there is no such node.

What was drawn is kept with the session. The next proposal goes on from it, and it is compared with what is
confirmed in its place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol
from weakref import WeakKeyDictionary

from galley.core.content import common_prefix_len
from galley.core.trees import ROOT, best_first, path_to
from galley.engine.batch import Rows
from galley.engine.sampling.guessing import ListedToken
from services.draft.strategies.base import DraftJob, DraftSession, Proposal, Strategy
from services.draft.strategies.hybrid import Candidate, Candidates, Ensemble, lookup_candidate
from services.draft.strategies.model import (
    Feed,
    ModelProposal,
    ModelSteps,
    listed_bucket,
    rows_in_a_step,
    rules_of,
)
from services.draft.strategies.ngram import ByKind, Lookups, SessionLookups

_WORKLOADS = 256
# A node that is less likely to be accepted is not worth a row.
_LEAST_SURVIVAL = 0.02
# How likely the first candidate of a place is taken to be before the model has read it.
_FIRST_CHANCE = 0.7


@dataclass(eq=False, slots=True)
class Place:
    """A place after some tokens: its `candidates`, None until they are drawn, and the places behind them."""

    candidates: Candidates | None = None
    after: dict[int, Place] = field(default_factory=dict)


class PlaceHistory:
    """The places after a session's tokens, as far as they were drawn."""

    __slots__ = ("_root", "_rules", "_tokens")

    def __init__(self) -> None:
        # The confirmed tokens before `_root`.
        self._tokens: list[int] = []
        self._root = Place()
        self._rules: object = None

    def compare(self, session: DraftSession) -> Iterator[tuple[Candidates, int]]:
        """Yield the candidates of newly confirmed positions, each with the confirmed token, and drop them."""
        known = len(self._tokens)
        if session.confirmed < known or session.tokens[:known] != self._tokens:
            known, self._root = session.confirmed, Place()
        for token in session.tokens[known : session.confirmed]:
            if self._root.candidates is not None:
                yield self._root.candidates, token
            self._root = self._root.after.get(token) or Place()
        self._tokens = session.tokens[: session.confirmed]

    def end(self, session: DraftSession, rules: object, *, again: bool) -> Place:
        """Return the place after the session's tokens; drop what contradicts them or has other rules.

        With `again`, nothing is drawn there yet. Call it after `compare`.
        """
        if rules != self._rules:
            self._root, self._rules = Place(), rules
        place = self._root
        for token in session.tokens[session.confirmed :]:
            place.after = {token: place.after.get(token) or Place()}
            place = place.after[token]
        if again:
            place.candidates, place.after = None, {}
        return place


@dataclass(slots=True)
class Node:
    """A draft token of a proposal, or the end of the session; `is_read` once its children are nodes, too.

    `lookup` is what a lookup proposes after it, once `is_looked_up`.
    """

    token: int
    survival: float
    source: str
    place: Place
    is_read: bool = False
    lookup: Candidate | None = None
    is_looked_up: bool = False


@dataclass(slots=True)
class TreeProposal(ModelProposal):
    """A tree that grows from `end`, the end of the session's tokens.

    `nodes` are in the order in which they were found, `links` their parents. The next step reads the nodes
    `unread`, and again those `above` them that the cache lacks. `slots` are the indices of nodes in the tree
    that the cache holds.
    """

    end: Node = field(kw_only=True)
    nodes: list[Node] = field(default_factory=list)
    links: list[int] = field(default_factory=list)
    unread: list[int] = field(default_factory=list)
    above: list[int] = field(default_factory=list)
    slots: dict[int, int] = field(default_factory=dict)

    def node(self, index: int) -> Node:
        return self.end if index == ROOT else self.nodes[index]

    def path(self, index: int) -> list[int]:
        """Return the draft tokens up to and including this node's."""
        return [self.nodes[node].token for node in path_to(self.links, index)]

    def worth_reading(self) -> list[int]:
        """Return the nodes whose children may be among the k likeliest, the likeliest first."""
        if not self.end.is_read:
            return [ROOT] if self.job.k else []
        stops = self.job.slice.stop_token_ids
        leaves = [
            index
            for index, node in enumerate(self.nodes)
            if not node.is_read and node.token not in stops and node.survival >= _LEAST_SURVIVAL
        ]
        hoped = [self.nodes[index].survival * _FIRST_CHANCE for index in leaves]
        ranked = sorted([*hoped, *(node.survival for node in self.nodes)], reverse=True)
        least = ranked[self.job.k - 1] if len(ranked) >= self.job.k else 0.0
        worth = [index for index, chance in zip(leaves, hoped, strict=True) if chance >= least]
        return sorted(worth, key=lambda index: -self.nodes[index].survival)

    def add_node(self, token: int, chance: float, source: str, parent: int) -> None:
        above = self.node(parent)
        place = above.place.after.setdefault(token, Place())
        self.nodes.append(Node(token, above.survival * chance, source, place))
        self.links.append(parent)

    def settle(self) -> None:
        """Propose the k likeliest nodes."""
        order, parents, survival = best_first(self.links, [node.survival for node in self.nodes])
        kept = [self.nodes[index] for index in order[: self.job.k]]
        self.tokens = [node.token for node in kept]
        self.sources = [node.source for node in kept]
        self.survival, self.parents = survival[: self.job.k], list(parents[: self.job.k])

    def want(self, worth: Sequence[int]) -> None:
        """Have the next step read the first nodes that are `worth` it, as many as the cache may hold."""
        room = min(self.job.k, self.reach - 1) - len(self.cache.tree)
        above: list[int] = []
        self.unread = []
        for index in worth:
            path = [node for node in path_to(self.links, index) if node not in self.slots]
            new = [node for node in path[:-1] if node not in above]
            if len(self.unread) + len(above) + len(new) + len(path[-1:]) <= room:
                self.unread.append(index)
                above += new
        self.above = sorted(above)
        self.done = not self.unread

    def lacking(self) -> list[int]:
        """Return the session's tokens that the next step has to read; the last one if it needs its logits."""
        known, cache = self.job.session.tokens, self.cache
        if self.unread == [ROOT]:
            cache.truncate(min(len(cache.tokens), len(known) - 1))
        return known[len(cache.tokens) :]

    def feed(self, missing: Sequence[int], count: int) -> Feed:
        """Return the rows of a step: `count` of the missing tokens, and after the last one the unread nodes.

        Before those come the nodes that the cache lacks.
        """
        cache = self.cache
        if count < len(missing):
            return Feed(self, Rows(cache, missing[:count], 0), ())
        parents = list(cache.parents)
        fed = [index for index in (*self.above, *self.unread) if index != ROOT]
        for index in fed:
            self.slots[index] = len(parents)
            parents.append(self.slots.get(self.links[index], ROOT))
        tokens = [*missing, *(self.nodes[index].token for index in fed)]
        rows = Rows(cache, tokens, len(self.unread), tuple(parents))
        return Feed(self, rows, [self.draw_after(self.path(index)) for index in self.unread])


class TreeStrategy:
    """Grow the trees of a model, with the lookups of a hybrid or without."""

    def __init__(self, steps: ModelSteps, lookups: Lookups | None = None) -> None:
        self._steps = steps
        self._lookups = lookups
        self._histories: WeakKeyDictionary[DraftSession, PlaceHistory] = WeakKeyDictionary()
        self._ensembles = ByKind(Ensemble, _WORKLOADS)
        # What the lookups of each session have followed, None while a prompt is indexed.
        self._followed: WeakKeyDictionary[DraftSession, SessionLookups | None] = WeakKeyDictionary()

    def begin(self, jobs: Sequence[DraftJob]) -> list[TreeProposal]:
        return [self._begin(job) for job in jobs]

    def advance(self, proposals: Sequence[TreeProposal]) -> None:
        """Read the unread nodes of each, but none while a long prompt is being prefilled."""
        lacking = [proposal.lacking() for proposal in proposals]
        fed = [
            (proposal, proposal.feed(missing, count))
            for proposal, missing, count in zip(proposals, lacking, rows_in_a_step(lacking), strict=True)
            if count or not missing
        ]
        listed = self._steps.list_after(
            [feed for _, feed in fed], max(proposal.job.width for proposal in proposals)
        )
        for (proposal, _), lists in zip(fed, listed, strict=True):
            for index, tokens in zip(proposal.unread, lists, strict=False):
                self._set_candidates(proposal, index, tokens)
            if lists:
                self._grow(proposal)

    def _begin(self, job: DraftJob) -> TreeProposal:
        opened, ensemble = self._steps.open(job), self._ensembles.of(job)
        history = self._histories.setdefault(job.session, PlaceHistory())
        for candidates, confirmed in history.compare(job.session):
            ensemble.record(candidates, confirmed)
        changed = self._steps.read_states(opened)
        place = history.end(job.session, (rules_of(job.slice), job.width), again=changed)
        proposal = TreeProposal(
            job,
            cache=opened.cache,
            reach=opened.reach,
            limit=opened.limit,
            state=opened.state,
            used_features=opened.used_features,
            end=Node(ROOT, 1.0, "", place),
        )
        if self._lookups is not None:
            self._followed[job.session] = self._lookups.follow(job)
        proposal.cache.truncate(common_prefix_len(proposal.cache.tokens, job.session.tokens))
        self._grow(proposal)
        return proposal

    def _grow(self, proposal: TreeProposal) -> None:
        """Give children to the nodes whose candidates are known, and have the next step read the others."""
        while True:
            worth = proposal.worth_reading()
            found = [(index, self._candidates(proposal, index)) for index in worth]
            known = [(index, candidates) for index, candidates in found if candidates is not None]
            if not known:
                break
            for index, candidates in known:
                self._add_children(proposal, index, candidates)
        proposal.settle()
        proposal.want(worth)

    def _candidates(self, proposal: TreeProposal, index: int) -> Candidates | None:
        """Return the candidates of a node if they are known, or a lookup is sure of one."""
        place = proposal.node(index).place
        if place.candidates is None:
            lookup = self._lookup(proposal, index)
            if lookup is not None and self._ensembles.of(proposal.job).is_sure(lookup):
                place.candidates = Candidates(lookup, ())
        return place.candidates

    def _lookup(self, proposal: TreeProposal, index: int) -> Candidate | None:
        node = proposal.node(index)
        if not node.is_looked_up:
            lookups = self._followed.get(proposal.job.session)
            node.lookup = lookup_candidate(lookups, proposal, proposal.path(index))
            node.is_looked_up = True
        return node.lookup

    def _set_candidates(self, proposal: TreeProposal, index: int, listed: Sequence[ListedToken]) -> None:
        greedy = proposal.job.slice.sampling.is_greedy
        model = tuple(
            Candidate(token, listed_bucket(rank, weight, greedy=greedy))
            for rank, (token, weight) in enumerate(listed[: proposal.job.width])
        )
        proposal.node(index).place.candidates = Candidates(self._lookup(proposal, index), model)

    def _add_children(self, proposal: TreeProposal, index: int, candidates: Candidates) -> None:
        ranked = self._ensembles.of(proposal.job).ranked(candidates)
        for token, chance in ranked[: proposal.job.width]:
            proposal.add_node(token, chance, candidates.source_of(token), index)
        proposal.node(index).is_read = True


class Chains(Strategy, Protocol):
    """A strategy that proposes chains."""

    def forget(self, session: DraftSession) -> None:
        """Drop the draft tokens of a session: others have been drafted for it since."""


class ByWidth:
    """Draft chains for jobs of width 1, and trees for the others."""

    def __init__(self, chains: Chains, trees: TreeStrategy) -> None:
        self._chains = chains
        self._trees = trees

    def begin(self, jobs: Sequence[DraftJob]) -> list[Proposal]:
        wide = [job for job in jobs if job.width > 1]
        for job in wide:
            self._chains.forget(job.session)
        trees = iter(self._trees.begin(wide))
        chains = iter(self._chains.begin([job for job in jobs if job.width <= 1]))
        return [next(trees) if job.width > 1 else next(chains) for job in jobs]

    def advance(self, proposals: Sequence[Proposal]) -> None:
        trees = [proposal for proposal in proposals if isinstance(proposal, TreeProposal)]
        if len(trees) < len(proposals):
            self._chains.advance([one for one in proposals if not isinstance(one, TreeProposal)])
        if trees:
            self._trees.advance(trees)
