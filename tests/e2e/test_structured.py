"""Answers of a form have it, and the same tokens whatever the draft, k and concurrency, on the default model.

70 answers; `make prove-structured` reads 3,000, also from vLLM, over HTTP, and while processes are killed.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import pytest_asyncio

from galley.core.names import GRAMMAR, HYBRID, MODEL, NGRAM, NO_STRATEGY
from tests.e2e.matrix import Case
from tests.e2e.stacks import Clients
from tests.structured.forms import requests
from tests.structured.trial import Trial, reader, vocabulary_of

pytestmark = [
    pytest.mark.model,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(300),
]

REQUESTS = 30
CASES = (
    Case("off", 0, 8),
    Case("auto", 0, 1),
    Case("auto", 0, 8),
    Case(NO_STRATEGY, 4, 8),
    Case(NGRAM, 1, 1),
    Case(NGRAM, 16, 8),
    Case(MODEL, 4, 8),
    Case(HYBRID, 8, 8),
)
EACH = 5
"""Requests of a case: the next ones in turn."""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def trial(clients: Clients, default_model_dir: Path) -> Trial:
    started = Trial(requests(REQUESTS), await vocabulary_of(clients.main, default_model_dir))
    await started.learn(reader(clients.main))
    return started


async def test_plain_answers_have_their_form(trial: Trial) -> None:
    assert trial.tally.problems == []
    assert trial.tally.finished >= REQUESTS // 2


async def test_drafts_and_company_change_no_token(trial: Trial, clients: Clients) -> None:
    before = trial.tally.answers
    for number, case in enumerate(CASES):
        first = EACH * number % REQUESTS
        await trial.compare(reader(clients.main), case, slice(first, first + EACH))
    assert trial.tally.problems == []
    assert trial.tally.answers == before + EACH * len(CASES)
    assert json.loads(json.dumps(asdict(trial.tally)))["sources"][GRAMMAR] > 0
