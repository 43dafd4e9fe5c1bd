"""The same tokens in bfloat16; the reference is this engine without a draft, one answer at a time.

transformers rounds differently, so it is no reference here. The target has six of the default model's layers;
`make prove-tokens` runs all of them, on long answers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from galley.client.options import GenerateOptions
from galley.common.models.files import DEFAULT_MODEL, shipped_draft
from galley.common.models.tokenizer import Tokenizer
from galley.core.names import HYBRID, MODEL, ORACLE
from tests.e2e.matrix import Case, pairwise_cases, read_answers
from tests.e2e.prompts import PROMPTS, encode
from tests.e2e.stacks import Clients, running_clients
from tests.fakes.truncated_model import truncate_model

pytestmark = [
    pytest.mark.model,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(300),
]

ALONE = Case("off", 0, 1)
LAYERS = (0, 1, 2, 27, 28, 29)
SPOIL = 0.3
SUBSET = PROMPTS[::4]
TEMPERATURES = (0.0, 0.8)
DRAFTED = {MODEL, HYBRID, ORACLE, "auto"}
MAX_TOKENS = 12


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def bf16_clients(
    default_model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Clients]:
    folder = tmp_path_factory.mktemp("bf16")
    target = truncate_model(default_model_dir, LAYERS, folder / "target")
    draft = shipped_draft(DEFAULT_MODEL)
    async with running_clients(
        folder, draft, model=str(target), dtype="bfloat16", gateways=1, spoils=(SPOIL,)
    ) as running:
        yield running


@pytest.mark.parametrize("turn", range(len(TEMPERATURES)), ids=lambda turn: f"T{TEMPERATURES[turn]}")
async def test_draft_and_concurrency_change_no_token(
    turn: int, bf16_clients: Clients, default_model_dir: Path
) -> None:
    options = GenerateOptions(temperature=TEMPERATURES[turn], seed=21 + turn, max_tokens=MAX_TOKENS)
    plain = await read_answers(bf16_clients.main, SUBSET, options, ALONE)
    assert not any(any(answer.from_draft) for answer in plain)
    prompt_tokens = encode(Tokenizer.load(str(default_model_dir)), SUBSET)
    bf16_clients.teach([[*p, *a.tokens] for p, a in zip(prompt_tokens, plain, strict=True)])
    accepted: Counter[str] = Counter()
    drafted: Counter[str] = Counter()
    cases = pairwise_cases((SPOIL,), turn)
    while cases:
        for case in cases:
            prompts = SUBSET if case.concurrency > 1 else SUBSET[-2:]
            answers = await read_answers(bf16_clients.of(case), prompts, options, case)
            for answer, expected in zip(answers, plain[-len(prompts) :], strict=True):
                assert answer.tokens == expected.tokens, case
                assert answer.text == expected.text, case
            accepted[case.strategy] += sum(answer.stats.accepted for answer in answers)
            drafted[case.strategy] += sum(answer.stats.drafted for answer in answers)
        # On a busy machine all drafts of a strategy may be too late: ask again until one is not.
        took_part = {*drafted.elements()} - {ORACLE} | {*accepted.elements()}
        cases = [case for case in cases if case.strategy in DRAFTED - took_part]
    assert accepted[ALONE.strategy] == 0
