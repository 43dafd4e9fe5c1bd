"""Answers to held-out prompts by the running system, and what distributions say about draft tokens there.

A draft token is right if it is the token of the answer. (In service the target verifies only draft tokens
that pay. Acceptance counted there is that of selected positions and does not estimate the closed form.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import grpc.aio
import numpy as np
import torch

from bench.acceptance.closed_form import Floats, list_chances, match_chance, optimal_chance
from galley.bench.closed_loop import AUTO, GatewayLoop
from galley.bench.workloads import Prompt
from galley.core.content import prefix_hash
from galley.core.names import MODEL
from galley.pb.galley.v1 import galley_pb2 as pb
from galley.pb.galley.v1 import galley_pb2_grpc as rpc


async def answers_at(
    side: GatewayLoop, prompts: Sequence[Prompt], *, temperature: float, max_tokens: int, seed: int
) -> list[tuple[int, ...]]:
    """Return the tokens of an answer to each prompt, with ascending seeds."""
    return [
        (
            await side.answer(
                AUTO,
                replace(prompt, label="heldout"),
                temperature=temperature,
                seed=seed + at,
                max_tokens=max_tokens,
            )
        ).tokens
        for at, prompt in enumerate(prompts)
    ]


async def proposals(
    address: str,
    answers: Sequence[Sequence[int]],
    prompts: Sequence[Sequence[int]],
    *,
    seed: int,
    temperature: float,
    k: int,
) -> list[list[Sequence[int]]]:
    """Return up to `k` draft tokens of the model for each output position of each answer."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = rpc.DraftStub(channel)
        found = []
        for at, (answer, prompt) in enumerate(zip(answers, prompts, strict=True)):
            tokens = [*prompt, *answer]
            sampling = pb.SamplingParams(temperature=temperature, seed=seed + at)
            items = [
                _item(f"heldout-{at}", tokens[:end], len(prompt), sampling, k)
                for end in range(len(prompt), len(tokens))
            ]
            found.append([await _propose(stub, item) for item in items])
        return found


def _item(
    session: str, tokens: Sequence[int], prompt_len: int, sampling: pb.SamplingParams, k: int
) -> pb.ProposeItem:
    return pb.ProposeItem(
        slice=pb.SessionSlice(
            session_id=session,
            request_id=len(tokens),
            tokens=tokens,
            prefix_hash=prefix_hash([]),
            prompt_len=prompt_len,
            max_position=len(tokens) + k + 1,
            sampling=sampling,
        ),
        k=k,
        strategy=MODEL,
        workload="heldout",
    )


async def _propose(stub: Any, item: pb.ProposeItem) -> Sequence[int]:
    (answer,) = (await stub.Propose(pb.ProposeRequest(items=[item]))).answers
    if not answer.HasField("result"):
        raise RuntimeError(f"the draft did not propose: {answer}")
    return tuple(answer.result.draft_tokens)


@dataclass(frozen=True, slots=True)
class Chances:
    """Chances of the target's token at one position: that the draft with the same noise has it first.

    `optimal` is that of the optimal coupling, `lists[m - 1]` that the draft's first m candidates have it.
    """

    first: float
    optimal: float
    lists: tuple[float, ...]


def chances_of(
    answer: Sequence[int],
    prompt: Sequence[int],
    models: tuple[Any, Any],
    temperature: float,
    most: int,
    rng: np.random.Generator,
) -> list[Chances]:
    """Return the chances at each position of an answer, by the `models` (target, draft)."""
    tokens = [*prompt, *answer]
    target, draft = (_logits(model, tokens, len(prompt)) / temperature for model in models)  # [output, vocab]
    found = []
    for logits in zip(target, draft, strict=True):
        p, q = (_softmax(of) for of in logits)
        lists = tuple(list_chances(p, q, most, rng).tolist())
        found.append(Chances(match_chance(p, q), optimal_chance(p, q), lists))
    return found


def _logits(model: Any, tokens: Sequence[int], first: int) -> Floats:
    """Return logits of positions [first, end), float64 [output, vocab]."""
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([tokens])).logits[0, first - 1 : -1]
    found: Floats = logits.double().numpy()
    return found


def _softmax(logits: Floats) -> Floats:
    raised = np.exp(logits - logits.max())
    probs: Floats = raised / raised.sum()
    return probs
