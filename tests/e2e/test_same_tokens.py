"""The same tokens whatever the draft, k and concurrency: the design's rule 3, on the real default model.

A pairwise subset on short answers; `make prove-tokens` runs the whole product on long ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import pytest_asyncio

from galley.client.options import GenerateOptions
from galley.common.models.tokenizer import Tokenizer
from galley.core.names import MODEL, ORACLE
from tests.e2e.matrix import FEW_SPOILS, Answer, Case, pairwise_cases, read_answers
from tests.e2e.prompts import PROMPTS, encode
from tests.e2e.reference import Reference
from tests.e2e.stacks import Clients

pytestmark = [
    pytest.mark.model,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(600),
]

MAX_TOKENS = 16
MOST_TRIES = 10
SUBSET = PROMPTS[::4]
PLAIN = Case("off", 0, 8)
CASES = pairwise_cases(FEW_SPOILS)
GREEDY = GenerateOptions(temperature=0.0, max_tokens=MAX_TOKENS)
SAMPLED = [
    GenerateOptions(temperature=0.8, seed=11, top_p=0.95, max_tokens=MAX_TOKENS),
    GenerateOptions(
        temperature=1.2,
        seed=12,
        top_k=50,
        min_p=0.02,
        max_tokens=MAX_TOKENS,
        frequency_penalty=0.4,
        presence_penalty=0.3,
        repetition_penalty=1.1,
    ),
]


@pytest.fixture(scope="module")
def prompt_tokens(default_model_dir: Path) -> list[list[int]]:
    return encode(Tokenizer.load(str(default_model_dir)), SUBSET)


@pytest.fixture(scope="module")
def greedy_answers(reference: Reference, prompt_tokens: list[list[int]]) -> list[list[int]]:
    return [reference.greedy(prompt, MAX_TOKENS) for prompt in prompt_tokens]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def taught(
    clients: Clients, prompt_tokens: list[list[int]], greedy_answers: list[list[int]]
) -> Clients:
    clients.teach([[*p, *a] for p, a in zip(prompt_tokens, greedy_answers, strict=True)])
    return clients


@pytest.mark.parametrize("case", CASES, ids=str)
async def test_greedy_equals_transformers(
    case: Case,
    taught: Clients,
    reference: Reference,
    prompt_tokens: list[list[int]],
    greedy_answers: list[list[int]],
) -> None:
    prompts = SUBSET if case.concurrency > 1 else SUBSET[:2]
    answers: list[Answer] = []
    # On a busy machine a draft may be too late for all answers; ask again until it is not.
    while not _draft_took_part(case, answers):
        answers = await read_answers(taught.of(case), prompts, GREEDY, case)
        for prompt, answer, expected in zip(prompt_tokens, answers, greedy_answers, strict=False):
            excuse = reference.excuse(prompt, answer.tokens, expected)
            if excuse:
                print(f"{case}: {excuse}")  # noqa: T201  # each excuse is shown
    _check_speculation(case, answers)


def _draft_took_part(case: Case, answers: Sequence[Answer]) -> bool:
    if case.spoil == 0.0:
        return any(answer.stats.accepted for answer in answers)
    # An untrained draft: its tokens may be dropped before they are verified.
    return any(case.strategy != MODEL or answer.stats.draft_compute_ns for answer in answers)


def _check_speculation(case: Case, answers: Sequence[Answer]) -> None:
    drafted = sum(answer.stats.drafted for answer in answers)
    verified = sum(answer.stats.verified for answer in answers)
    accepted = sum(answer.stats.accepted for answer in answers)
    if case.strategy in {"off", "none"}:
        assert drafted == 0
    if case.spoil == 0.0:
        assert drafted >= verified == accepted
    assert sum(sum(answer.from_draft) for answer in answers) == accepted


@pytest.mark.parametrize("options", SAMPLED, ids=["T0.8-top_p", "T1.2-penalties"])
async def test_sampled_tokens_equal_plain_decoding(
    options: GenerateOptions, taught: Clients, prompt_tokens: list[list[int]]
) -> None:
    plain = await read_answers(taught.main, SUBSET, options, PLAIN)
    taught.teach([[*p, *a.tokens] for p, a in zip(prompt_tokens, plain, strict=True)])
    for case in CASES[1 + SAMPLED.index(options) :: 2]:
        prompts = SUBSET if case.concurrency > 1 else SUBSET[:2]
        answers = await read_answers(taught.of(case), prompts, options, case)
        for answer, expected in zip(answers, plain, strict=False):
            assert answer.tokens == expected.tokens, case
            assert answer.text == expected.text, case


async def test_wrong_draft_token_ends_acceptance(taught: Clients, default_model_dir: Path) -> None:
    """The tokens before it may be accepted, it and later ones not."""
    k = 4
    # With none or several tokens before it: on a busy machine the draft is often too late for the first one.
    right = (0, 3, 4, 5, 6)
    options = GenerateOptions(temperature=0.0, max_tokens=max(right) + 1, ignore_eos=True)
    prompts = [f"{count} bottles of beer on the wall, {count} bottles of" for count in right]
    encoded = encode(Tokenizer.load(str(default_model_dir)), prompts)
    plain = await read_answers(taught.main, prompts, options, PLAIN)
    lessons = [
        [*prompt, *answer.tokens[:count], answer.tokens[count] + 1, *answer.tokens[count + 1 :]]
        for count, prompt, answer in zip(right, encoded, plain, strict=True)
    ]
    taught.teach(lessons)
    case = Case(ORACLE, k, 1, spoil=0.0)
    for count, prompt, expected in zip(right, prompts, plain, strict=True):
        for left in reversed(range(MOST_TRIES)):
            [answer] = await read_answers(taught.of(case), [prompt], options, case)
            assert answer.tokens == expected.tokens
            assert not answer.from_draft[count]
            if answer.stats.verified and any(answer.from_draft[:count]) == (count > 0):
                break
            assert left, f"the tokens before number {count} were never accepted: {answer}"
