"""The hashes by which a draft names the tokens before a proposal, while its sessions grow and roll back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from galley.core import content
from galley.core.content import Miss, look_up, prefix_hash, token_bytes
from galley.core.sampling_params import SamplingParams
from galley.core.scheduler.messages import Slice
from services.draft.loop import DraftLoop, Proposed, ProposeJob, ProposeOutcome
from services.draft.strategies.base import NoneStrategy

LENGTH = 20_000


def job_after(tokens: list[int], start: int, ahead: int = 0) -> ProposeJob:
    own = Slice(
        key=(b"", "s"),
        start=start,
        tokens=tokens[start:],
        prefix_hash=prefix_hash(tokens[:start]),
        prompt_len=1,
        max_position=1 << 20,
        sampling=SamplingParams(),
    )
    return ProposeJob(own, 4, "none", ahead)


async def outcomes_of(
    jobs: Sequence[ProposeJob], before_each: Callable[[], None] = lambda: None
) -> list[ProposeOutcome]:
    """Return the outcomes of jobs that one draft gets one after another."""
    loop, outcomes = DraftLoop({"none": NoneStrategy()}, max_sessions=4, max_tokens=1 << 20, max_batch=4), []
    try:
        for job in jobs:
            before_each()
            outcomes.append((await loop.submit(job)).outcome)
    finally:
        await loop.close()
    return outcomes


STEPS = st.lists(
    st.tuples(st.integers(0, 1200), st.integers(1, 700), st.integers(0, 40), st.booleans()), max_size=10
)


@settings(max_examples=60, deadline=None)
@given(STEPS)
def test_a_session_that_grows_and_rolls_back_has_the_hash_of_its_tokens(
    steps: list[tuple[int, int, int, bool]],
) -> None:
    held: list[int] = []
    jobs: list[ProposeJob] = []
    expected: list[Miss | bytes] = []
    for number, (back, grown, sent_again, is_behind) in enumerate(steps):
        kept = max(0, len(held) - back)
        tokens = [*held[:kept], *(index * index % 251 + number for index in range(grown))]
        # Behind the tokens that differ, the draft's own have another hash, or it has too few.
        start = min(kept + back // 2 + 1, len(tokens) - 1) if is_behind else max(0, kept - sent_again)
        jobs.append(job_after(tokens, start, ahead=min(grown, sent_again)))
        found = look_up(held, start, tokens[start:], prefix_hash(tokens[:start]))
        expected.append(found if isinstance(found, Miss) else prefix_hash(tokens))
        held = held if isinstance(found, Miss) else tokens
    outcomes = asyncio.run(outcomes_of(jobs))
    assert [one.prefix_hash if isinstance(one, Proposed) else one for one in outcomes] == expected


async def test_a_proposal_hashes_only_the_last_tokens_of_a_long_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hashed = [0]

    def counted(tokens: Sequence[int]) -> bytes:
        hashed[-1] += len(tokens)
        return token_bytes(tokens)

    jobs = [job_after(list(range(LENGTH + 3 * i)), LENGTH + 3 * (i - 1) if i else 0) for i in range(4)]
    monkeypatch.setattr(content, "token_bytes", counted)
    outcomes = await outcomes_of(jobs, lambda: hashed.append(0))
    assert all(isinstance(outcome, Proposed) for outcome in outcomes)
    assert all(tokens < LENGTH / 10 for tokens in hashed[2:]), hashed
