"""Draft tokens of the running draft at temperature 1, and the distributions that they are sampled from.

The running system answers, sampling at temperature 1. Then the running draft proposes one token at every
position of the answers, requested as by a gateway. A draft token is right if it is the token of the answer.
(In service the target verifies only draft tokens that pay. Acceptance counted there is that of selected
positions and does not estimate the closed form.)
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import grpc.aio
import numpy as np
import torch
from numpy.typing import NDArray

from bench.coupling.closed_form import Heldout, match_chance, optimal_chance
from galley.bench.answers import Answer
from galley.bench.closed_loop import AUTO, GatewayLoop
from galley.bench.workloads import Prompt
from galley.core.content import prefix_hash
from galley.core.names import MODEL
from galley.pb.galley.v1 import galley_pb2 as pb
from galley.pb.galley.v1 import galley_pb2_grpc as rpc


async def answers_at_one(
    side: GatewayLoop, prompts: Sequence[Prompt], max_tokens: int, seed: int
) -> list[Answer]:
    """Return an answer to each prompt at temperature 1, with ascending seeds."""
    return [
        await side.answer(
            AUTO, replace(prompt, label="heldout"), temperature=1.0, seed=seed + at, max_tokens=max_tokens
        )
        for at, prompt in enumerate(prompts)
    ]


async def guesses(
    address: str, answers: Sequence[Answer], prompts: Sequence[Sequence[int]], seed: int
) -> list[list[int | None]]:
    """Return the draft's token for each output position of each answer; None where it proposed none."""
    proposed = await proposals(
        address, [answer.tokens for answer in answers], prompts, seed=seed, temperature=1.0, k=1
    )
    return [[next(iter(tokens), None) for tokens in of_answer] for of_answer in proposed]


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


async def scored(
    answers: Sequence[Answer],
    prompts: Sequence[Sequence[int]],
    guessed: Sequence[Sequence[int | None]],
    models: tuple[Any, Any],
    report: Callable[[str], None],
) -> list[Heldout]:
    """Return closed form and outcome of the draft tokens of each answer, by `models` (target, draft)."""
    found = []
    for answer, prompt, guess in zip(answers, prompts, guessed, strict=True):
        found.append(await asyncio.to_thread(_score, answer, prompt, guess, models))
        report(f"closed form {len(found)}/{len(answers)}: {len(answer.tokens)} positions")
    return found


def _score(
    answer: Answer, prompt: Sequence[int], guess: Sequence[int | None], models: tuple[Any, Any]
) -> Heldout:
    tokens = [*prompt, *answer.tokens]
    target, draft = (_logits(model, tokens, len(prompt)) for model in models)  # each [output, vocab]
    at = [i for i, guessed in enumerate(guess) if guessed is not None]
    probs = [(_softmax(target[i]), _softmax(draft[i])) for i in at]
    return Heldout(
        closed=tuple(match_chance(p, q) for p, q in probs),
        optimal=tuple(optimal_chance(p, q) for p, q in probs),
        right=tuple(guess[i] == answer.tokens[i] for i in at),
    )


def _logits(model: Any, tokens: Sequence[int], first: int) -> NDArray[np.float64]:
    """Return logits of positions [first, end), float64 [output, vocab]."""
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([tokens])).logits[0, first - 1 : -1]
    found: NDArray[np.float64] = logits.double().numpy()
    return found


def _softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    raised = np.exp(logits - logits.max())
    probs: NDArray[np.float64] = raised / raised.sum()
    return probs
