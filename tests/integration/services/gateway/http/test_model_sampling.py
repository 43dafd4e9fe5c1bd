"""The sampling that a model recommends holds for requests over HTTP and of the Python client alike."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from galley.pb.galley.v1 import galley_pb2 as pb
from services.gateway.request.validate import DEFAULT_MAX_TOKENS
from tests.fakes.http_client import http_client
from tests.fakes.truth import SEED
from tests.fakes.world import World, receive

RECOMMENDED: dict[str, Any] = {"temperature": 0.25, "top_p": 0.5, "top_k": 20}
LENGTH = 7


@pytest.fixture
def model(tokenizer: Path, tmp_path: Path) -> str:
    directory = tmp_path / "model"
    shutil.copytree(tokenizer, directory)
    (directory / "generation_config.json").write_text(json.dumps(RECOMMENDED | {"max_new_tokens": LENGTH}))
    return str(directory)


def sampling_at_target(world: World) -> pb.SamplingParams:
    item = world.target.calls[-1]
    assert isinstance(item, pb.VerifyItem)
    return item.slice.sampling


async def test_requests_sample_as_the_model_recommends(world: World, model: str) -> None:
    gateway = await world.gateway(model=model, http_port=0)
    assert (await gateway.client.model_info()).default_sampling == pb.SamplingParams(**RECOMMENDED)
    await receive(gateway.generate())
    over_grpc = sampling_at_target(world)
    async with http_client(gateway.http) as client:
        await client.complete()
    assert sampling_at_target(world) == over_grpc == pb.SamplingParams(**RECOMMENDED, seed=SEED)
    await receive(gateway.generate(temperature=0.0, top_p=1.0))
    assert sampling_at_target(world) == pb.SamplingParams(temperature=0, top_k=20, seed=SEED)


async def test_the_models_recommendation_can_be_switched_off(world: World, model: str) -> None:
    gateway = await world.gateway(model=model, generation_config="none")
    assert (await gateway.client.model_info()).default_sampling == pb.SamplingParams()
    await receive(gateway.generate())
    assert sampling_at_target(world) == pb.SamplingParams(seed=SEED)


async def test_answers_are_as_long_as_the_model_recommends_or_the_request_asks(
    world: World, model: str
) -> None:
    gateway = await world.gateway(model=model, http_port=0)
    assert (await receive(gateway.generate(max_tokens=None))).end.usage.output_tokens == LENGTH
    async with http_client(gateway.http) as client:
        body = await client.complete(max_tokens=None)
        assert (body["usage"]["completion_tokens"], body["choices"][0]["finish_reason"]) == (LENGTH, "length")
        assert (await client.complete(max_tokens=3 * LENGTH))["usage"]["completion_tokens"] == 3 * LENGTH
    other = await world.gateway(model=model, generation_config="none")
    assert (await receive(other.generate(max_tokens=None))).end.usage.output_tokens == DEFAULT_MAX_TOKENS
