"""The comparison of a log with what a target draws: all tokens, in random chunks, each after the log's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from galley.core.acceptance import confirm
from galley.core.answer.answer import SessionSpec
from galley.core.content import Miss, look_up, prefix_hash
from galley.core.records import PositionLogprobs
from galley.core.sampling_params import SamplingParams
from galley.core.session.events import CacheMissed, Verified, Verify
from services.gateway.audit.logged_answer import BuildRange, LoggedAnswer
from services.gateway.audit.replay import Replay
from tests.fakes.truth import SEED, VOCAB, true_next, true_output

PROMPT = tuple(b"Tell me more.")
LENGTH = 50
END = len(PROMPT) + LENGTH
TRUTH = (*PROMPT, *true_output(PROMPT, LENGTH))
MOST = 7
Draw = Callable[[Sequence[int]], int]


def answer_of(tokens: Sequence[int]) -> LoggedAnswer:
    spec = SessionSpec("s", PROMPT, SamplingParams(seed=SEED), END, VOCAB)
    return LoggedAnswer(spec, tokens, [BuildRange(len(PROMPT), END, "a")])


class Target:
    """A target that draws by `draw`, and takes at most `most` draft tokens a request."""

    def __init__(self, draw: Draw = true_next, most: int = MOST) -> None:
        self.held: list[int] = []
        self.requests: list[Verify] = []
        self._draw = draw
        self._most = most

    def respond(self, request: Verify) -> Verified | CacheMissed:
        self.requests.append(request)
        part = request.slice
        found = look_up(self.held, part.start, part.tokens, part.prefix_hash)
        if isinstance(found, Miss):
            return CacheMissed(request.request_id, found.have, found.prefix_hash)
        tokens = [*self.held[: part.start], *part.tokens]
        drafts, drawn = request.draft_tokens[: self._most], list[int]()
        for draft in (*drafts, None):
            drawn.append(self._draw([*tokens, *drawn]))
            if drawn[-1] != draft:
                break
        verdict = confirm(drafts, drawn, position=len(tokens), max_position=END, stop_token_ids=set())
        self.held = [*tokens, *verdict.tokens][:-1]
        logprobs = tuple(PositionLogprobs(-1.0, ((token, -1.0), (5, -2.0))) for token in verdict.tokens)
        return Verified(
            request.request_id,
            len(tokens),
            verdict.tokens,
            verdict.accepted,
            len(drafts),
            len(self.held),
            "a",
            logprobs,
        )


def run(replay: Replay, target: Target) -> None:
    for _ in range(10 * LENGTH):
        if replay.is_done:
            return
        step(replay, target)
    pytest.fail("it makes no progress")


def step(replay: Replay, target: Target) -> None:
    response = target.respond(replay.request())
    if isinstance(response, Verified):
        assert replay.take(response)
    else:
        replay.miss(response)


def replay_of(tokens: Sequence[int] = TRUTH, seed: str = "seed") -> Replay:
    answer = answer_of(tokens)
    return Replay(answer, answer.ranges, MOST, seed)


def test_all_tokens_are_compared_in_chunks_of_random_sizes() -> None:
    replay, target = replay_of(), Target()
    run(replay, target)
    assert (replay.compared, replay.differing, replay.differences) == (LENGTH, 0, [])
    sizes = {len(request.draft_tokens) for request in target.requests}
    assert sizes <= set(range(MOST + 1))
    assert len(sizes) > 4
    for request in target.requests:
        position = request.slice.start + len(request.slice.tokens)
        assert request.draft_tokens == TRUTH[position : position + len(request.draft_tokens)]
        assert position + len(request.draft_tokens) < END, "its own token may be the last one"
        assert request.survival == (1.0,) * len(request.draft_tokens)
    assert [request.slice.start for request in target.requests].count(0) == 1, "later ones use its KV"


def test_another_audit_has_other_chunks() -> None:
    sizes = []
    for seed in ("one", "two"):
        target = Target()
        run(replay_of(seed=seed), target)
        sizes.append([len(request.draft_tokens) for request in target.requests])
    assert sizes[0] != sizes[1]


@pytest.mark.parametrize("at", [0, 11, LENGTH - 1])
def test_an_edited_token_differs_and_those_that_do_not_follow_from_it(at: int) -> None:
    tokens = list(TRUTH)
    tokens[len(PROMPT) + at] = 5
    replay = replay_of(tokens)
    run(replay, Target())
    expected = [
        index
        for index in range(LENGTH)
        if true_next(tokens[: len(PROMPT) + index]) != tokens[len(PROMPT) + index]
    ]
    assert expected[0] == at
    assert (replay.compared, replay.differing) == (LENGTH, len(expected))
    assert [difference.index for difference in replay.differences] == expected[:16]
    first = replay.differences[0]
    assert (first.logged, first.computed) == (5, TRUTH[len(PROMPT) + at])
    assert (first.logged_logprob, first.computed_logprob) == (-2.0, -1.0)


def test_a_target_that_draws_one_token_wrong_differs_there_alone() -> None:
    wrong = len(PROMPT) + 23

    def draw(tokens: Sequence[int]) -> int:
        return 5 if len(tokens) == wrong else true_next(tokens)

    replay = replay_of()
    run(replay, Target(draw))
    assert [difference.index for difference in replay.differences] == [23]
    assert (replay.compared, replay.differing) == (LENGTH, 1)


def test_a_target_that_verifies_fewer_tokens_is_asked_for_the_others() -> None:
    replay = replay_of()
    run(replay, Target(most=0))
    assert (replay.compared, replay.differing) == (LENGTH, 0)


def test_a_target_that_lost_the_cache_is_sent_what_it_lacks() -> None:
    replay, target = replay_of(), Target()
    for kept in (0, 7):
        step(replay, target)
        target.held = target.held[:kept]
        step(replay, target)
    run(replay, target)
    assert (replay.compared, replay.differing) == (LENGTH, 0)
    assert 7 in {request.slice.start for request in target.requests}


def test_a_cache_of_other_tokens_is_not_used() -> None:
    replay = replay_of()
    replay.miss(CacheMissed(1, 4, prefix_hash([9, 9, 9, 9])))
    assert replay.request().slice.start == 0
    replay.miss(CacheMissed(1, 4, prefix_hash(TRUTH[:4])))
    assert replay.request().slice.start == 4
    replay.restart()
    assert replay.request().slice.start == 0


def test_only_the_ranges_are_compared() -> None:
    start = len(PROMPT)
    ranges = [BuildRange(start + 5, start + 9, "a"), BuildRange(start + 30, END, "a")]
    tokens = list(TRUTH)
    tokens[start + 20] = 5
    replay = Replay(answer_of(tokens), ranges, MOST, "seed")
    target = Target(lambda given: true_next(TRUTH[: len(given)]))
    run(replay, target)
    assert (replay.compared, replay.differing) == (4 + 20, 0)


def test_a_verdict_on_another_position_is_refused() -> None:
    replay, target = replay_of(), Target()
    response = target.respond(replay.request())
    assert isinstance(response, Verified)
    assert replay.take(response)
    assert not replay.take(response)
    assert not replay_of().take(Verified(1, len(PROMPT), (), 0, 0, 0, "a"))
