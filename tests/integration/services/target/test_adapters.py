"""LoRA adapters at a target: which names it takes, and that no KV crosses from one adapter to another."""

from __future__ import annotations

import grpc
import pytest

from galley.pb.galley.v1 import galley_pb2 as pb
from galley.pb.galley.v1 import galley_pb2_grpc as rpc
from tests.fakes.engine import KnownEngine
from tests.fakes.verify_items import slice_of, verify
from tests.integration.services.target.conftest import Served

ADAPTERS = ("sql", "fr")
BLOCK = 8
PROMPT = [1 + i % 5 for i in range(2 * BLOCK + 1)]


@pytest.fixture
def engine() -> KnownEngine:
    return KnownEngine(lora_adapters=ADAPTERS, kv_block_tokens=BLOCK)


async def reused(target: rpc.TargetAsyncStub, session_id: str, lora: str, tenant: bytes = b"a") -> int:
    """Return how many tokens of the prompt were cached for a new session."""
    part = slice_of(PROMPT, session_id=session_id, tenant_salt=tenant)
    (answer,) = await verify(target, pb.VerifyItem(slice=part, lora=lora))
    assert answer.WhichOneof("outcome") == "result", answer
    return answer.result.kv_reused


async def test_a_target_tells_its_adapters(target: rpc.TargetAsyncStub, service: Served) -> None:
    info = await target.GetTargetInfo(pb.GetTargetInfoRequest())
    assert tuple(info.lora_adapters) == ADAPTERS
    assert service.running.service.lease("here").lora_adapters == ADAPTERS  # type: ignore[attr-defined]  # a TargetService


async def test_an_adapter_that_is_not_offered_is_refused_by_name(target: rpc.TargetAsyncStub) -> None:
    bad = pb.VerifyItem(slice=slice_of(PROMPT, session_id="bad"), lora="it")
    good = pb.VerifyItem(slice=slice_of(PROMPT, session_id="good"), lora="fr")
    refused, served = await verify(target, bad, good)
    assert refused.status.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert refused.status.message == "lora: must be empty or one of sql, fr, got 'it'"
    assert served.result.tokens


async def test_adapters_and_tenants_share_no_prefix(target: rpc.TargetAsyncStub) -> None:
    kinds = [(lora, tenant) for lora in ("", *ADAPTERS) for tenant in (b"a", b"b")]
    first = [await reused(target, f"first {index}", *kind) for index, kind in enumerate(kinds)]
    again = [await reused(target, f"again {index}", *kind) for index, kind in enumerate(kinds)]
    assert first == [0] * len(kinds)
    assert again == [2 * BLOCK] * len(kinds)


async def test_a_session_does_not_continue_with_the_kv_of_another_adapter(
    target: rpc.TargetAsyncStub,
) -> None:
    await reused(target, "s", "sql")
    for lora in ("fr", ""):
        item = pb.VerifyItem(slice=slice_of(PROMPT, session_id="s", start=4, tenant_salt=b"a"), lora=lora)
        (answer,) = await verify(target, item)
        assert answer.cache_miss.have == 0
