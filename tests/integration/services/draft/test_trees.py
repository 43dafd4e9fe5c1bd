"""Trees of a model and of a hybrid: their nodes, their order, what is kept of them and what they cost."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from galley.core.errors import GalleyError
from galley.core.grammar.compiled import CompiledGrammar, compile_grammar
from galley.core.grammar.spec import GrammarSpec
from galley.core.names import MODEL, NGRAM
from galley.core.sampling_params import SamplingParams
from galley.core.step import Draw
from galley.core.trees import ROOT, follow, main_path, path_to, ranks, valid_count
from galley.engine.model import CausalModel, Rows
from galley.engine.sampler import list_tokens
from galley.engine.sampling.guessing import ListedToken
from services.draft.strategies.base import DraftJob, DraftSession, Proposal, Strategy
from services.draft.strategies.hybrid import HybridStrategy
from services.draft.strategies.model import Feed, ModelProposal, ModelSteps, ModelStrategy
from services.draft.strategies.ngram import Lookups
from services.draft.strategies.trees import ByWidth, TreeStrategy
from tests.fakes.tiny_model import CONTEXT, VOCAB, load_tiny_model
from tests.fakes.vocabularies import ascii_vocabulary
from tests.integration.services.draft.jobs import job_of

PROMPT = [5, 9, 2, 33, 17]
GREEDY, WARM = SamplingParams(temperature=0.0), SamplingParams(temperature=1.1, seed=11)
HARSH = SamplingParams(temperature=0.9, seed=4, frequency_penalty=0.4)
WIDTH = 3


class Counting(ModelSteps):
    """The steps of the tiny model, which are counted, with the rows of trees that they read."""

    steps = rows = 0

    def list_after(self, feeds: Sequence[Feed], count: int) -> list[list[list[ListedToken]]]:
        self.steps += 1
        self.rows += sum(len(feed.rows.tokens) for feed in feeds)
        return super().list_after(feeds, count)


class Scripted(ModelSteps):
    """Candidates without a model: the last token plus 1, then plus 2, and so on."""

    steps = 0

    def list_after(self, feeds: Sequence[Feed], count: int) -> list[list[list[ListedToken]]]:
        self.steps += 1
        weights = (0.55, 0.3, 0.1, 0.05)
        return [
            [
                [(draw.history[-1] + 1 + rank, weight) for rank, weight in enumerate(weights[:count])]
                for draw in feed.draws
            ]
            for feed in feeds
        ]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> CausalModel:
    from tests.fakes.tiny_model import save_tiny_model  # noqa: PLC0415

    return load_tiny_model(save_tiny_model(tmp_path_factory.mktemp("tiny")), kv_blocks=512)


@pytest.fixture
def steps(model: CausalModel) -> Counting:
    return Counting(model)


def both(steps: ModelSteps) -> ByWidth:
    return ByWidth(ModelStrategy(steps), TreeStrategy(steps))


def check(proposal: Proposal) -> None:
    """Require a best-first tree of at most k nodes and of the job's width."""
    count = len(proposal.tokens)
    assert proposal.error is None
    assert valid_count(proposal.tokens, proposal.parents) == count <= proposal.job.k
    assert len(proposal.survival) == count
    assert proposal.survival == sorted(proposal.survival, reverse=True)
    assert all(0.0 <= chance <= 1.0 for chance in proposal.survival)
    assert max(ranks(proposal.parents, count), default=0) < proposal.job.width


def run(strategy: Strategy, *jobs: DraftJob) -> list[Proposal]:
    proposals = strategy.begin(jobs)
    while going := [proposal for proposal in proposals if not proposal.done]:
        strategy.advance(going)
        for proposal in proposals:
            check(proposal)
    return proposals


def grown(strategy: Strategy, session: DraftSession, tokens: list[int], k: int, **given: object) -> Proposal:
    (proposal,) = run(strategy, job_of(session, tokens, k, **{"width": WIDTH, **given}))  # type: ignore[arg-type]  # as given
    return proposal


def children(proposal: Proposal) -> dict[int, list[int]]:
    """Return the tokens of the children of each node, in order."""
    found: dict[int, list[int]] = {}
    parents = proposal.parents or range(-1, len(proposal.tokens) - 1)
    for token, parent in zip(proposal.tokens, parents, strict=True):
        found.setdefault(parent, []).append(token)
    return found


def candidates(model: CausalModel, tokens: list[int], sampling: SamplingParams, width: int) -> list[int]:
    """Return the first candidates after `tokens`, computed from nothing."""
    (logits,) = model.forward([Rows(model.new_cache(), tokens, 1)])
    (listed,) = list_tokens(logits, [Draw(sampling, tokens, 1, frozenset(), 0)], None, width)
    assert not isinstance(listed, GalleyError)
    return [token for token, _ in listed]


def chance_of(proposal: Proposal, token: int) -> float:
    """Return the survival of a child of the root."""
    nodes = zip(proposal.tokens, proposal.parents, proposal.survival, strict=True)
    return next(chance for own, parent, chance in nodes if (own, parent) == (token, ROOT))


def path_of(proposal: Proposal, node: int) -> list[int]:
    return [proposal.tokens[index] for index in path_to(proposal.parents, node)]


@pytest.mark.parametrize("sampling", [GREEDY, WARM, HARSH], ids=["greedy", "sampled", "penalized"])
def test_children_of_a_node_are_the_first_candidates_after_its_path(
    model: CausalModel, steps: Counting, sampling: SamplingParams
) -> None:
    proposal = grown(both(steps), DraftSession(), PROMPT, 14, sampling=sampling)
    assert 10 <= len(proposal.tokens) <= 14
    assert len(children(proposal)) > 3
    for parent, tokens in children(proposal).items():
        path = [*PROMPT, *path_of(proposal, parent)]
        assert tokens == candidates(model, path, sampling, WIDTH)[: len(tokens)]
    chain = grown(both(steps), DraftSession(), PROMPT, 14, width=1, sampling=sampling)
    main = [proposal.tokens[node] for node in main_path(proposal.parents, len(proposal.tokens))]
    assert main == chain.tokens[: len(main)]


@pytest.mark.parametrize("seed", range(3))
def test_what_a_session_proposes_depends_on_its_tokens_alone(
    model: CausalModel, steps: Counting, seed: int
) -> None:
    """Sessions wander together: they follow paths of their trees or leave them, in turn chains and trees."""
    strategy, chance = both(steps), random.Random(seed)
    sessions = [DraftSession() for _ in range(4)]
    tokens = [[chance.randrange(2, VOCAB - 1) for _ in range(3 + i)] for i in range(4)]
    confirmed = [len(of) for of in tokens]
    sampling = [GREEDY, WARM, HARSH, WARM]
    for _ in range(12):
        jobs = [
            job_of(
                session,
                list(of),
                chance.randrange(12),
                ahead=len(of) - sure,
                width=chance.choice([1, 2, 4]),
                sampling=params,
            )
            for session, of, sure, params in zip(sessions, tokens, confirmed, sampling, strict=True)
        ]
        for i, proposal in enumerate(run(strategy, *jobs)):
            for parent, found in children(proposal).items():
                path = [*tokens[i], *path_of(proposal, parent)]
                assert set(found) <= set(candidates(model, path, sampling[i], proposal.job.width))
            if proposal.tokens and chance.random() < 0.7:
                tokens[i] += path_of(proposal, chance.randrange(len(proposal.tokens)))
            if chance.random() < 0.7:
                confirmed[i] = len(tokens[i])
            elif chance.random() < 0.5:
                tokens[i] = [*tokens[i][: confirmed[i]], chance.randrange(2, VOCAB - 1)]


def test_a_confirmed_path_keeps_what_was_drafted_below_it(steps: Counting) -> None:
    strategy, session = both(steps), DraftSession()
    first = grown(strategy, session, PROMPT, 24, sampling=WARM)
    longest = max(range(len(first.tokens)), key=lambda node: len(path_of(first, node)))
    tokens = [*PROMPT, *path_of(first, longest)[:2]]
    steps.steps = steps.rows = 0
    later = grown(strategy, session, tokens, 6, sampling=WARM)
    kept = steps.steps, steps.rows
    steps.steps = steps.rows = 0
    fresh = grown(both(steps), DraftSession(), tokens, 6, sampling=WARM)
    assert later.tokens[0] == fresh.tokens[0]
    assert kept < (steps.steps, steps.rows)
    assert kept[1] < steps.rows - len(PROMPT), "the confirmed tokens were not read again"


def test_survival_follows_the_verdicts_by_rank(model: CausalModel) -> None:
    strategy = both(Scripted(model))

    def likeliest() -> int:
        return grown(strategy, DraftSession(), [50], 4).tokens[0]

    assert likeliest() == 51
    session, tokens = DraftSession(), [0]
    for _ in range(40):
        grown(strategy, session, tokens, 4)
        tokens = [*tokens, tokens[-1] + 2]
    assert likeliest() == 52


def test_a_node_that_may_not_be_followed_is_not_read(model: CausalModel) -> None:
    strategy = both(Scripted(model))
    free = grown(strategy, DraftSession(), [10], 12)
    stopped = grown(strategy, DraftSession(), [10], 12, stop_token_ids=frozenset({11}))
    assert 0 in children(free)
    assert stopped.tokens[0] == 11
    assert 0 not in children(stopped)


def test_a_tree_keeps_within_the_window_and_asks_for_nothing_beyond(steps: Counting) -> None:
    strategy = both(steps)
    for length in range(CONTEXT - 3, CONTEXT + 2):
        prompt = [2 + i % 90 for i in range(length)]
        proposal = grown(strategy, DraftSession(), prompt, 12, sampling=WARM)
        deepest = max((len(path_of(proposal, node)) for node in range(len(proposal.tokens))), default=0)
        assert deepest <= max(0, CONTEXT - length + 1)
        assert (deepest > 0) == (length <= CONTEXT)
    assert grown(strategy, DraftSession(), PROMPT, 0).tokens == []


def test_a_long_prompt_is_read_in_parts(steps: Counting) -> None:
    prompt = [2 + i % 90 for i in range(150)]
    proposal = grown(both(steps), DraftSession(), prompt, 5, sampling=WARM)
    assert len(proposal.tokens) == 5
    assert steps.steps > 2


@pytest.mark.parametrize("width", [1, WIDTH])
def test_many_long_prompts_do_not_delay_a_session_that_lacks_few_tokens(
    model: CausalModel, steps: Counting, width: int
) -> None:
    prompts = [[2 + (i + start) % 90 for i in range(150)] for start in range(32)]
    strategy = both(steps)
    jobs = [job_of(DraftSession(), tokens, 2, width=width) for tokens in (*prompts, PROMPT)]
    *long, short = proposals = [one for one in strategy.begin(jobs) if isinstance(one, ModelProposal)]
    strategy.advance(proposals)
    assert sum(len(proposal.cache.tokens) for proposal in long) == 256
    assert [len(proposal.cache.tokens) for proposal in long[:2]] == [128, 128], "the oldest first"
    assert short.tokens
    while going := [proposal for proposal in proposals if not proposal.done]:
        strategy.advance(going)
    alone = [grown(both(ModelSteps(model)), DraftSession(), tokens, 2, width=width) for tokens in prompts]
    assert [proposal.tokens for proposal in long] == [proposal.tokens for proposal in alone]


@pytest.mark.parametrize("sampling", [GREEDY, WARM])
def test_a_grammar_allows_every_node_after_its_path(steps: Counting, sampling: SamplingParams) -> None:
    grammar: CompiledGrammar = compile_grammar(ascii_vocabulary(), GrammarSpec("regex", "([a-c]{2}[x-z])+"))
    strategy, session, output = both(steps), DraftSession(), b""
    for more in (b"", b"ab", b"xc"):
        output += more
        proposal = grown(
            strategy,
            session,
            [5, 9, *output],
            12,
            prompt_len=2,
            sampling=sampling,
            grammar=grammar,
            stop_token_ids=frozenset({1}),
        )
        assert proposal.tokens
        state = grammar.start()
        state.confirm(output)
        for node in range(len(proposal.tokens)):
            path = path_of(proposal, node)
            assert state.allowed_prefix(path) == len(path)


def test_a_lookup_adds_its_candidate_and_one_that_is_sure_takes_no_step(model: CausalModel) -> None:
    scripted = Scripted(model)
    strategy = ByWidth(HybridStrategy(Lookups(), scripted), TreeStrategy(scripted, Lookups()))
    sure = grown(strategy, DraftSession(), [*range(30), *range(20)], 4)
    assert sure.tokens[:3] == [20, 21, 22]
    assert sure.sources[:3] == [NGRAM] * 3
    assert scripted.steps == 0
    # The lookup has 80 after 40, 41, 51; the model has 52, then 53.
    against = grown(strategy, DraftSession(), [40, 41, 51, 80, 7, 40, 41, 51], 6)
    assert {52, 80} <= set(children(against)[ROOT])
    assert against.sources[against.tokens.index(80)] == NGRAM
    agreed = grown(strategy, DraftSession(), [40, 41, 51, 53, 7, 40, 41, 51], 6)
    assert children(agreed)[ROOT].count(53) == 1
    assert agreed.sources[agreed.tokens.index(53)] == MODEL
    alone = grown(strategy, DraftSession(), [90, 51], 6)
    assert chance_of(agreed, 53) > chance_of(alone, 53)


def test_the_accepted_path_of_a_tree_is_in_its_cache(model: CausalModel) -> None:
    """After a verdict only the target's own token is to be read, if it was no node."""
    steps = Counting(model)
    strategy, session = both(steps), DraftSession()
    proposal = grown(strategy, session, PROMPT, 16, sampling=WARM)
    inner = [node for node in children(proposal) if node != ROOT]
    path = path_of(proposal, max(inner, key=lambda node: len(path_of(proposal, node))))
    assert follow(proposal.tokens, proposal.parents, path)
    other = next(t for t in range(2, VOCAB - 1) if t not in candidates(model, [*PROMPT, *path], WARM, 8))
    steps.steps = steps.rows = 0
    grown(strategy, session, [*PROMPT, *path, other], 1, sampling=WARM)
    assert (steps.steps, steps.rows) == (1, 1)
