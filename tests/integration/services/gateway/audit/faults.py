"""Faults to plant into engines and stores, and an engine that finds the wrong tokens by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

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
from tests.fakes.tiny_model import STOP, load_tiny_model
from tests.integration.services.target.conftest import KV_BLOCKS

PROMPT = [5, 9, 2, 33]
FAULT_PASS = 6
"""The pass of the session's target from which on it has the fault."""


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
