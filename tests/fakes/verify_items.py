"""Making items, and a client that goes round by round as a gateway does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from galley.core.content import common_prefix_len, prefix_hash
from galley.pb.galley.v1 import galley_pb2 as pb
from galley.pb.galley.v1 import galley_pb2_grpc as rpc
from tests.fakes.tiny_model import CONTEXT

GREEDY = pb.SamplingParams(temperature=0)


def slice_of(
    confirmed: Sequence[int], *, start: int = 0, session_id: str = "s", **given: Any
) -> pb.SessionSlice:
    """The `confirmed` tokens of a session from `start` on."""
    fields: dict[str, Any] = {
        "session_id": session_id,
        "request_id": 7,
        "start": start,
        "tokens": confirmed[start:],
        "prefix_hash": prefix_hash(confirmed[:start]),
        "prompt_len": min(4, len(confirmed)),
        "max_position": CONTEXT,
        "sampling": GREEDY,
    }
    return pb.SessionSlice(**(fields | given))


async def verify(target: rpc.TargetAsyncStub, *items: pb.VerifyItem) -> list[pb.VerifyAnswer]:
    return list((await target.Verify(pb.VerifyRequest(items=items))).answers)


async def generate(
    target: rpc.TargetAsyncStub,
    prompt: list[int],
    count: int,
    draft: Callable[[list[int]], list[int]],
    **given: Any,
) -> tuple[list[int], list[int]]:
    """`count` output tokens or up to a stop token, and how many were accepted in each round."""
    tokens, held, accepted = list(prompt), 0, []
    given |= {"prompt_len": len(prompt), "max_position": len(prompt) + count}
    stop = set(given.get("stop_token_ids", ()))
    while len(tokens) < len(prompt) + count and not (stop & set(tokens[len(prompt) :])):
        guesses = draft(tokens)
        item = pb.VerifyItem(slice=slice_of(tokens, start=held, **given), draft_tokens=guesses)
        (answer,) = await verify(target, item)
        assert answer.WhichOneof("outcome") == "result", answer
        result = answer.result
        assert result.position == len(tokens)
        assert result.accepted == common_prefix_len(guesses[: result.verified], result.tokens)
        tokens += result.tokens
        held = result.kv_len
        assert held == len(tokens) - 1
        accepted.append(result.accepted)
    return tokens[len(prompt) :], accepted
