"""Planted faults of engines and stores: an audit finds each, at the tokens that another engine finds too."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from galley import Speculation
from galley.client.audit import AuditReport, Verdict
from galley.core.answer.answer import decode_spec, encode_spec
from galley.core.content import prefix_hash
from galley.core.cost.model import StepTimes
from galley.core.sampling_params import SamplingParams
from galley.core.step import Draw, Sampled, StepChunk, StepOutcome, StepPlan, StepTrace
from galley.core.store import LogHashes, NewSession, StoredSession
from galley.engine.model import CausalModel
from services.gateway.store.redis import RedisStore
from services.target.engine.paged.engine import PagedEngine
from services.target.engine.protocol import Limits, TargetEngine
from tests.fakes.redis_servers import Server
from tests.fakes.tiny_model import STOP, load_tiny_model
from tests.fakes.world import Received, receive
from tests.integration.services.gateway.real import Real, paged
from tests.integration.services.target.conftest import KV_BLOCKS

PROMPT = [5, 9, 2, 33]
LENGTH = 60
FAULT_PASS = 6
"""The pass of the session's target from which on it has the fault."""
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "seed": 3},
    "sampled": {"temperature": 0.8, "seed": 3},
}


def flip_a_bit(model: CausalModel) -> Callable[[], None]:
    """Flip a bit of a weight; return what flips it back."""
    weights = cast("Any", model)._forward._final_norm.view(np.uint32)
    weights[3] ^= np.uint32(1 << 26)

    def repair() -> None:
        weights[3] ^= np.uint32(1 << 26)

    return repair


def corrupt_a_block(model: CausalModel) -> Callable[[], None]:
    """Overwrite the values of all blocks once; those that are written afterwards are right."""
    model.kv.values.mul_(-3.0)
    return lambda: None


def break_attention_of_several_rows(model: CausalModel) -> Callable[[], None]:
    """Have the kernel compute steps of more than one row wrong; return what repairs it."""
    attention = cast("Any", model)._forward.attention
    right = attention.attend

    def attend(pages: Any, layer: int, queries: Any, out: Any, shape: Any) -> None:
        right(pages, layer, queries, out, shape)
        if pages.rows > 1:
            out *= np.float32(-2.0)

    attention.attend = attend

    def repair() -> None:
        attention.attend = right

    return repair


FAULTS: Mapping[str, Callable[[CausalModel], Callable[[], None]]] = {
    "a bit of a weight": flip_a_bit,
    "a block of KV": corrupt_a_block,
    "a kernel": break_attention_of_several_rows,
}


@dataclass
class Faulty:
    """An engine that has a fault from its pass FAULT_PASS on, until it is repaired."""

    model: CausalModel
    fault: Callable[[CausalModel], Callable[[], None]]
    passes: int = 0
    repair: Callable[[], None] = lambda: None
    target: Any = field(default=None)

    def serve(self, times: StepTimes, limits: Limits) -> TargetEngine:
        self.target = PagedEngine(self.model, "f00d").serve(times, limits)
        return cast("TargetEngine", self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.target, name)

    def run(self, plan: StepPlan, watch: StepTrace | None = None) -> Sequence[StepOutcome]:
        self.passes += 1
        if self.passes == FAULT_PASS:
            self.repair = self.fault(self.model)
        outcomes: Sequence[StepOutcome] = self.target.run(plan, watch)
        return outcomes


class Judge:
    """Draw each token of an answer anew, by a model of its own, one position a pass."""

    def __init__(self, tiny: Path) -> None:
        self._engine = PagedEngine(load_tiny_model(tiny, kv_blocks=KV_BLOCKS), "judge")

    def differing(self, output: Sequence[int], sampling: Mapping[str, Any]) -> list[int]:
        params = SamplingParams(temperature=sampling["temperature"], seed=sampling["seed"])
        tokens = [*PROMPT, *output]
        return [
            index
            for index, token in enumerate(output)
            if self._draw(tokens[: len(PROMPT) + index], params) != token
        ]

    def _draw(self, tokens: list[int], params: SamplingParams) -> int:
        blocks = range(-(-len(tokens) // self._engine.info.kv_block_tokens))
        draw = Draw(params, tokens, len(PROMPT), frozenset({STOP}), 0)
        [outcome] = self._engine.run(StepPlan((StepChunk(0, tokens, blocks, 1, draw),)))
        assert isinstance(outcome, Sampled)
        return outcome.tokens[0]


@pytest.fixture(scope="module")
def judge(tiny: Path) -> Judge:
    return Judge(tiny)


def must_find(report: AuditReport, received: Received, differing: list[int]) -> None:
    assert differing
    assert report.verdict is Verdict.DIFFERS
    assert (report.compared, report.differing) == (len(received.tokens), len(differing))
    assert [difference.index for difference in report.differences] == differing[:16]
    for difference in report.differences:
        assert difference.logged == received.tokens[difference.index] != difference.computed
        assert difference.computed_logprob is not None


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("fault", FAULTS)
async def test_a_fault_while_a_session_ran_is_found(
    tmp_path: Path, tiny: Path, shared_store: Server, judge: Judge, fault: str, sampling: str
) -> None:
    engines: list[Faulty] = []

    def make(model: CausalModel) -> Faulty:
        engines.append(Faulty(model, FAULTS[fault]))
        return engines[-1]

    async with Real(tmp_path, tiny, shared_store.url, engines=[make], drafts=True, credit=0) as real:
        options = {**SAMPLINGS[sampling], "max_tokens": LENGTH, "speculation": Speculation(k=2)}
        stream = real.generate(PROMPT, **options)
        received = await receive(stream)
        assert engines[0].passes > FAULT_PASS
        engines[0].repair()
        report = await real.gateway.client.audit(stream.session_id)
        must_find(report, received, judge.differing(received.tokens, SAMPLINGS[sampling]))
        again = real.generate([*PROMPT, 1], **options)
        await receive(again)
        assert (await real.gateway.client.audit(again.session_id)).verdict is Verdict.SAME


async def rewrite(url: str, session_id: str, change: Callable[[StoredSession], StoredSession]) -> None:
    """Change a stored session, with its hashes, as one can who may write to the store."""
    store = RedisStore(url)
    stored = change(await store.read(session_id, "anonymous"))
    latest_ms = await store.now_ms(session_id) + 60_000
    await store.delete(session_id, "anonymous", latest_ms)
    prompt, output = stored.tokens[: stored.prompt_len], stored.tokens[stored.prompt_len :]
    new = NewSession(session_id, "anonymous", stored.body_hash, stored.fields, prompt)
    owner = (await store.create(new, b"n" * 16, latest_ms)).ownership
    hashes = LogHashes(prefix_hash(prompt), prefix_hash(stored.tokens))
    length = await store.commit(owner, len(prompt), output, stored.meta, hashes, stored.directory)
    await store.finish(owner, length, stored.finish, hashes.after)
    await store.close()


def with_seed(stored: StoredSession, seed: int) -> StoredSession:
    spec = decode_spec(stored.fields["spec"], "", ())
    changed = replace(spec, sampling=replace(spec.sampling, seed=seed))
    return replace(stored, fields={**stored.fields, "spec": encode_spec(changed)})


def with_token(stored: StoredSession, index: int) -> StoredSession:
    tokens = list(stored.tokens)
    tokens[stored.prompt_len + index] ^= 1
    return replace(stored, tokens=tokens)


async def test_a_session_that_was_changed_with_its_hashes_is_found(
    tmp_path: Path, tiny: Path, shared_store: Server, judge: Judge
) -> None:
    sampling = SAMPLINGS["sampled"]
    async with Real(tmp_path, tiny, shared_store.url, engines=[paged]) as real:
        stream = real.generate(PROMPT, max_tokens=LENGTH, **sampling)
        received = await receive(stream)
        await rewrite(shared_store.url, stream.session_id, lambda stored: with_token(stored, 30))
        received.tokens[30] ^= 1
        report = await real.gateway.client.audit(stream.session_id)
        differing = judge.differing(received.tokens, sampling)
        must_find(report, received, differing)
        assert differing[0] == 30
        received.tokens[30] ^= 1
        await rewrite(
            shared_store.url, stream.session_id, lambda stored: with_seed(with_token(stored, 30), 4)
        )
        report = await real.gateway.client.audit(stream.session_id)
        must_find(report, received, judge.differing(received.tokens, {**sampling, "seed": 4}))


async def test_a_seed_that_was_changed_without_its_hash_is_damaged(
    tmp_path: Path, tiny: Path, shared_store: Server
) -> None:
    async with Real(tmp_path, tiny, shared_store.url, engines=[paged]) as real:
        stream = real.generate(PROMPT, max_tokens=8, **SAMPLINGS["sampled"])
        await receive(stream)
        async with shared_store.raw() as raw:
            [key] = [key async for key in raw.scan_iter(f"galley:sessions:*{{{stream.session_id}}}")]
            fields: dict[Any, Any] = await raw.hgetall(key)
            [piece] = [name for name, value in fields.items() if b'"seed":3' in value]
            await raw.hset(key, piece, fields[piece].replace(b'"seed":3', b'"seed":4'))
        assert (await real.gateway.client.audit(stream.session_id)).verdict is Verdict.DAMAGED
