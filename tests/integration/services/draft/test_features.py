"""A draft that reads its target's states: as it was trained, whatever of them comes, and when."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from galley.core.features import MAX_FEATURE_TOKENS, NO_STATES, States
from galley.core.sampling_params import SamplingParams
from galley.core.trees import ROOT, path_to
from galley.distill.export import read_draft
from galley.distill.features.draft import FeatureDraft, TargetStates
from galley.distill.training.models import read_target
from galley.engine.load.feature_head import FeatureHead
from galley.engine.model import CausalModel, Rows
from services.draft.strategies.base import DraftSession, Proposal, Strategy
from services.draft.strategies.hybrid import HybridStrategy
from services.draft.strategies.model import ModelSteps, ModelStrategy
from services.draft.strategies.ngram import Lookups
from services.draft.strategies.states import StateReader
from services.draft.strategies.trees import ByWidth, TreeStrategy
from tests.fakes.feature_drafts import save_feature_draft
from tests.integration.galley.engine.drafts import draft_of, load_draft, save_target
from tests.integration.services.draft.jobs import job_of

PROMPT = [5, 9, 2, 33, 17, 60, 71, 12, 8, 90, 21, 64]
LAYERS = (1, 3)
SIZE = 64
K = 5
GREEDY = SamplingParams(temperature=0.0)
KNOWN = {"all": (0, len(PROMPT) - 1), "part": (4, 3), "late part": (6, 5), "none": (0, 0)}


class Pair:
    """A draft in our engine and as it was trained, and the target's states of any place."""

    def __init__(self, model: CausalModel, trained: FeatureDraft, head: Tensor) -> None:
        self.model = model
        self.trained = trained
        self.head = head
        self._states = torch.randn(200, len(LAYERS), SIZE, generator=torch.Generator().manual_seed(3)) * 4

    @property
    def features(self) -> FeatureHead:
        assert self.model.features is not None
        return self.model.features

    def states(self, position: int, tokens: int) -> States:
        data = self._states[position : position + tokens].bfloat16().contiguous()
        return States(position, tokens, data.view(torch.int16).numpy().tobytes()) if tokens else NO_STATES

    @torch.inference_mode()
    def logits(self, confirmed: Sequence[int], path: Sequence[int], known: Sequence[range]) -> Tensor:
        """Return the logits after draft tokens that begin where the confirmed ones end, as in training."""
        tokens = torch.tensor([[*confirmed, *path]])
        length = tokens.shape[1]
        has = [any(place in one for one in known) for place in range(length)]
        given = TargetStates(self._states[:length].bfloat16().float()[None], torch.tensor([has]))
        outputs = self.trained.unrolled(tokens, torch.arange(length), given, len(path) + 1)
        logits: Tensor = self.trained.lm_head(outputs[-1][-1])
        return logits

    def drafted(self, confirmed: Sequence[int], count: int, known: Sequence[range]) -> list[int]:
        path: list[int] = []
        for _ in range(count):
            path.append(int(self.head[self.logits(confirmed, path, known).argmax()]))
        return path


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    target = save_target(tmp_path_factory.mktemp("target"))
    plain = draft_of(target, int8=False).save(tmp_path_factory.mktemp("plain") / "draft")
    folder = tmp_path_factory.mktemp("features")
    directory = save_feature_draft(plain, folder / "draft", LAYERS, size=1.0, int8=False)
    trained, head = read_draft(directory, read_target(target), "draft")
    assert isinstance(trained, FeatureDraft)
    return Pair(load_draft(directory, target, kv_blocks=256), trained.eval(), torch.from_numpy(head))


class Counting(ModelSteps):
    """Count the rows of each step."""

    def __init__(self, model: CausalModel) -> None:
        super().__init__(model)
        self.rows: list[int] = []
        real, rows = model.forward_states, self.rows

        def counted(batch: Sequence[Rows], layers: Sequence[int]) -> tuple[Tensor, Tensor]:
            rows.append(sum(len(item.tokens) for item in batch))
            return real(batch, layers)

        model.forward_states = counted  # type: ignore[method-assign]


@pytest.fixture
def steps(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> Counting:
    monkeypatch.setattr(pair.model, "forward_states", pair.model.forward_states)
    return Counting(pair.model)


def run(
    strategy: Strategy, session: DraftSession, tokens: list[int], states: States, **given: int
) -> Proposal:
    job = job_of(session, tokens, given.pop("k", K), sampling=GREEDY, **given)  # type: ignore[arg-type]  # as given
    session.states = session.states.joined(states)
    (proposal,) = strategy.begin([job])
    while not proposal.done:
        strategy.advance([proposal])
    assert proposal.error is None
    return proposal


@pytest.mark.parametrize("known", KNOWN)
def test_logits_are_those_of_training_at_each_depth(pair: Pair, known: str) -> None:
    reader, session, cache = StateReader(pair.model, pair.features), DraftSession(), pair.model.new_cache()
    session.tokens, session.confirmed = list(PROMPT), len(PROMPT)
    position, count = KNOWN[known]
    session.states = pair.states(position, count)
    reader.take(session, cache)
    assert session.states is NO_STATES
    path: list[int] = []
    for depth in range(4):
        fed = path[-1:] if path else PROMPT
        (logits,) = reader.forward([(session, Rows(cache, fed, 1))])
        truth = pair.logits(PROMPT, path, [range(position, position + count)])
        assert torch.allclose(logits, truth, atol=1e-3, rtol=1e-3), depth
        path.append(int(pair.head[logits.argmax()]))
    assert reader.has_read(session) == (position + count == len(PROMPT) - 1)


def test_a_node_of_a_tree_reads_the_state_of_its_parent(pair: Pair) -> None:
    reader, session, cache = StateReader(pair.model, pair.features), DraftSession(), pair.model.new_cache()
    session.tokens, session.confirmed = list(PROMPT), len(PROMPT)
    session.states = pair.states(0, len(PROMPT) - 1)
    reader.take(session, cache)
    reader.forward([(session, Rows(cache, PROMPT, 1))])
    first, second = [[3], [4]], [[3, 7], [4, 8], [3, 9]]
    steps = [(first, (ROOT, ROOT)), (second, (ROOT, ROOT, 0, 1, 0))]
    for paths, parents in steps:
        rows = Rows(cache, [path[-1] for path in paths], len(paths), parents)
        logits = reader.forward([(session, rows)])
        for ours, path in zip(logits, paths, strict=True):
            truth = pair.logits(PROMPT, path, [range(len(PROMPT) - 1)])
            assert torch.allclose(ours, truth, atol=1e-3, rtol=1e-3), path


def _span(known: str) -> tuple[int, int]:
    position, count = KNOWN[known]
    return position, position + count


def test_states_change_what_is_drafted(pair: Pair) -> None:
    """Otherwise the tests here would show nothing."""
    drafted = {tuple(pair.drafted(PROMPT, K, [range(*_span(known))])) for known in KNOWN}
    assert len(drafted) == len(KNOWN)


@pytest.mark.parametrize("known", KNOWN)
@pytest.mark.parametrize("kind", ["features", "hybrid"])
def test_tokens_are_those_of_training(pair: Pair, steps: Counting, kind: str, known: str) -> None:
    strategy = ModelStrategy(steps) if kind == "features" else HybridStrategy(Lookups(), steps)
    proposal = run(strategy, DraftSession(), PROMPT, pair.states(*KNOWN[known]))
    # In a hybrid, lookups may find the tokens behind the first one.
    own = K if kind == "features" else 1
    assert proposal.tokens[:own] == pair.drafted(PROMPT, own, [range(*_span(known))])
    assert proposal.used_features == (known in {"all", "late part"})


@pytest.mark.parametrize("width", [1, 2])
def test_late_states_cut_the_cache_back_and_what_was_drafted_is_drafted_again(
    pair: Pair, steps: Counting, width: int
) -> None:
    strategy, session = ByWidth(ModelStrategy(steps), TreeStrategy(steps)), DraftSession()
    run(strategy, session, PROMPT, NO_STATES, width=width)
    steps.rows.clear()
    proposal = run(strategy, session, PROMPT, pair.states(4, len(PROMPT) - 5), width=width)
    assert proposal.tokens[0] == pair.drafted(PROMPT, 1, [range(4, len(PROMPT) - 1)])[0]
    # The first row that reads a state is that of the token behind it.
    assert steps.rows[0] == len(PROMPT) - 5
    assert proposal.used_features
    steps.rows.clear()
    assert run(strategy, session, PROMPT, NO_STATES, width=width).tokens == proposal.tokens
    assert not steps.rows


@pytest.mark.parametrize("width", [1, 2])
def test_rounds_with_states_draft_as_in_training(pair: Pair, steps: Counting, width: int) -> None:
    strategy, session, tokens = ByWidth(ModelStrategy(steps), TreeStrategy(steps)), DraftSession(), PROMPT
    states = pair.states(0, len(PROMPT) - 1)
    for accepted in (2, 0, 3, 1):
        proposal = run(strategy, session, tokens, states, width=width, k=2 * K)
        known = [range(len(tokens) - 1)]
        _check_paths(pair, proposal, tokens, known)
        path = _path(proposal)[:accepted]
        confirmed = [*tokens, *path, 45]
        states = pair.states(len(tokens) - 1, len(path) + 1)
        steps.rows.clear()
        tokens = confirmed
        first = run(strategy, session, tokens, states, width=width, k=2 * K)
        # Accepted tokens are fed again: their states have come.
        assert steps.rows[0] == len(path) + 1
        _check_paths(pair, first, tokens, [range(len(tokens) - 1)])
        assert first.used_features
        states = NO_STATES


def _path(proposal: Proposal) -> list[int]:
    """Return the longest path of a proposal."""
    parents = proposal.parents or range(-1, len(proposal.tokens) - 1)
    paths = (path_to(tuple(parents), node) for node in range(len(proposal.tokens)))
    return [proposal.tokens[node] for node in max(paths, key=len)]


def _check_paths(pair: Pair, proposal: Proposal, tokens: list[int], known: Sequence[range]) -> None:
    """Require the children of each node to be the first candidates after it, as in training."""
    parents = tuple(proposal.parents or range(-1, len(proposal.tokens) - 1))
    for parent in set(parents):
        path = [] if parent == ROOT else [proposal.tokens[above] for above in path_to(parents, parent)]
        children = {proposal.tokens[node] for node, above in enumerate(parents) if above == parent}
        logits = pair.logits(tokens, path, known)
        assert children == set(pair.head[logits.topk(len(children)).indices].tolist())


def test_states_that_are_lost_leave_a_draft_that_goes_on(pair: Pair, steps: Counting) -> None:
    strategy, session = ModelStrategy(steps), DraftSession()
    first = run(strategy, session, PROMPT, pair.states(0, len(PROMPT) - 1))
    tokens = [*PROMPT, *first.tokens[:2], 45]
    lost = run(strategy, session, tokens, NO_STATES)
    assert len(lost.tokens) == K
    assert not lost.used_features
    # Those of later tokens are read, and the rows before them stay as they are.
    steps.rows.clear()
    later = [*tokens, lost.tokens[0], 46]
    found = run(strategy, session, later, pair.states(len(tokens) - 1, 2))
    assert found.used_features
    assert steps.rows[0] == 2


@pytest.mark.parametrize("again", [PROMPT, [*PROMPT[:-1], 46, 47]], ids=["fewer tokens", "other tokens"])
def test_states_of_tokens_that_a_session_begins_again_without_are_dropped(
    pair: Pair, again: list[int]
) -> None:
    session, tokens = DraftSession(), [*PROMPT, 45, 46]
    job_of(session, tokens, K)
    session.states = pair.states(2, len(tokens) - 3)
    job_of(session, again, K)
    assert session.states == pair.states(2, len(PROMPT) - 3)


def test_states_of_tokens_that_were_replaced_are_not_read(pair: Pair, steps: Counting) -> None:
    strategy, session = ModelStrategy(steps), DraftSession()
    run(strategy, session, [*PROMPT, 45, 46, 47], pair.states(0, len(PROMPT) + 2))
    run(strategy, session, [*PROMPT, 48], NO_STATES)
    tokens = [*PROMPT, 48, 49, 50]
    found = run(strategy, session, tokens, NO_STATES)
    assert not found.used_features
    assert found.tokens == pair.drafted(tokens, K, [range(len(PROMPT) - 1)])


def test_states_of_rows_before_those_that_have_read_one_are_not_worth_feeding_them_again(
    pair: Pair, steps: Counting
) -> None:
    strategy, session = ModelStrategy(steps), DraftSession()
    first = run(strategy, session, PROMPT, pair.states(6, len(PROMPT) - 7))
    steps.rows.clear()
    assert run(strategy, session, PROMPT, pair.states(0, 6)).tokens == first.tokens
    assert not steps.rows


def test_the_last_confirmed_token_may_be_fed_again_with_its_state(pair: Pair, steps: Counting) -> None:
    strategy, session = ModelStrategy(steps), DraftSession()
    first = run(strategy, session, PROMPT, pair.states(0, len(PROMPT) - 1))
    strategy.forget(session)
    again = run(strategy, session, PROMPT, NO_STATES)
    assert again.tokens == first.tokens
    assert again.used_features


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf"), 3e38])
def test_states_that_are_no_numbers_are_as_if_they_had_not_come(
    pair: Pair, steps: Counting, number: float
) -> None:
    strategy, good = ModelStrategy(steps), pair.states(0, len(PROMPT) - 1)
    numbers = torch.frombuffer(bytearray(good.data), dtype=torch.bfloat16).clone()
    numbers.view(good.tokens, -1)[5, 7] = number
    states = States(0, good.tokens, numbers.view(torch.int16).numpy().tobytes())
    proposal = run(strategy, DraftSession(), PROMPT, states)
    assert len(proposal.tokens) == K
    assert proposal.used_features
    if number != 3e38:
        assert proposal.tokens == pair.drafted(PROMPT, K, [range(6, len(PROMPT) - 1)])


@pytest.mark.parametrize("width", [1, 2])
def test_tokens_ahead_read_the_drafts_own_states(pair: Pair, steps: Counting, width: int) -> None:
    """With no verdict in between, a draft goes on as if it had been asked for more at once."""
    strategy, session = ByWidth(ModelStrategy(steps), TreeStrategy(steps)), DraftSession()
    states = pair.states(0, len(PROMPT) - 1)
    path = _path(run(strategy, session, PROMPT, states, width=width))
    proposal = run(strategy, session, [*PROMPT, *path], NO_STATES, ahead=len(path), k=2, width=width)
    assert proposal.used_features
    after = pair.logits(PROMPT, path, [range(len(PROMPT) - 1)])
    assert proposal.tokens[0] == int(pair.head[after.argmax()])


def test_sessions_in_one_step_do_not_read_each_others_states(pair: Pair, steps: Counting) -> None:
    strategy = ModelStrategy(steps)
    sessions = [DraftSession() for _ in KNOWN]
    jobs = [job_of(session, PROMPT, K, sampling=GREEDY) for session in sessions]
    for session, known in zip(sessions, KNOWN, strict=True):
        session.states = pair.states(*KNOWN[known])
    proposals = strategy.begin(jobs)
    while going := [proposal for proposal in proposals if not proposal.done]:
        strategy.advance(going)
    for proposal, known in zip(proposals, KNOWN, strict=True):
        assert proposal.tokens == pair.drafted(PROMPT, K, [range(*_span(known))])


def test_no_more_states_are_kept_than_may_be_read(pair: Pair, steps: Counting) -> None:
    """A strategy that reads none leaves those of one message."""
    session = DraftSession()
    for position in range(0, 150, 10):
        session.states = session.states.joined(pair.states(position, 10))
    assert session.states.tokens == MAX_FEATURE_TOKENS


def test_states_that_were_read_are_dropped_at_once(pair: Pair, steps: Counting) -> None:
    """A session that is never asked for again keeps one, for the last confirmed token."""
    session, reader = DraftSession(), steps._states
    run(ModelStrategy(steps), session, PROMPT, pair.states(0, len(PROMPT) - 1))
    assert reader is not None
    assert reader._memories[session].held.tokens == 1
