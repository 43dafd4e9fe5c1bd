"""The lists of a long answer's tokens are encoded in slices, between which others get a turn."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

from galley.core.answer.answer import Answer, Chunk
from galley.core.records import DRAFTED, NOT_DRAFTED
from galley.core.session.machine import Session, SessionLimits
from services.gateway.generation import ServedModel
from services.gateway.http.api.choices import Choice
from services.gateway.http.api.format import Format
from services.gateway.http.api.positions import START
from services.gateway.http.api.rounds import Rounds
from services.gateway.http.api.whole import WholeAnswers
from services.gateway.http.responses.objects import ResponseObjects
from services.gateway.http.responses.record import Record
from tests.fakes.session_ports import SPEC
from tests.fakes.waiting import with_turns

TOKENS = [5 + index % 7 for index in range(20_000)]
DRAFTS = [index % 3 > 0 for index in range(20_000)]
MOST = 4096
"""Tokens that may be encoded in a turn: about 0.5 ms."""


def model() -> ServedModel:
    named: Any = SimpleNamespace(
        turn=asyncio.Lock(), name_of=lambda _: "m", info=SimpleNamespace(fingerprint="f")
    )
    return cast("ServedModel", named)


def answered(tokens: int) -> Answer:
    answer = Answer(replace(SPEC, max_position=10**6), lambda ids: "x" * len(ids))
    for token, is_drafted in zip(TOKENS[:tokens], DRAFTS, strict=False):
        answer.append(token, DRAFTED if is_drafted else NOT_DRAFTED)
    return answer


async def test_those_of_a_response() -> None:
    objects = ResponseObjects(Record(), model(), Format("response", token_ids=True), answered(20_000))
    encoded, turns = await with_turns(objects.whole())
    body = json.loads(encoded)
    assert (body["token_ids"], body["from_draft"]) == (TOKENS, DRAFTS)
    assert turns >= 2 * len(TOKENS) / MOST


async def test_a_response_without_output_or_ids_has_none() -> None:
    with_ids = Format("response", token_ids=True)
    for form, is_begun in ((with_ids, False), (Format("response"), True)):
        objects = ResponseObjects(Record(), model(), form, answered(3))
        body = json.loads(await objects.whole() if is_begun else (await objects.with_lists()).response())
        assert not body.keys() & {"token_ids", "from_draft"}
        assert body["output"] == [] or is_begun


async def test_those_of_an_answer_and_its_rounds() -> None:
    form = Format("completion", token_ids=True, rounds=True)
    answers = WholeAnswers(form, model())
    session = Session(answered(0), SessionLimits())
    choice = Choice(0, session, START, cast("Rounds", SimpleNamespace(take=lambda end: [{"index": end}])))
    await answers.begin([choice])
    for at in range(0, len(TOKENS), 10):
        tokens, drafts = tuple(TOKENS[at : at + 10]), tuple(DRAFTS[at : at + 10])
        await answers.item(choice, Chunk(at, tokens, "x" * 10, drafts))
    encoded, turns = await with_turns(answers.body())
    [one] = json.loads(encoded)["choices"]
    assert (one["token_ids"], one["from_draft"], one["logprobs"]) == (TOKENS, DRAFTS, None)
    assert one["rounds"] == [{"index": at} for at in range(10, len(TOKENS) + 1, 10)]
    assert turns >= 2 * len(TOKENS) / MOST + len(one["rounds"]) / 64
