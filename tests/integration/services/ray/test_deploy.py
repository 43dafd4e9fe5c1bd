"""A deployment whose Ray ends, or never answers, ends too."""

from __future__ import annotations

import asyncio
import warnings
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from galley.core.errors import Unavailable
from services.target.ray import __main__ as deploy
from services.target.ray import cluster as ray_cluster
from services.target.ray.__main__ import Deployment, DeploySettings
from tests.fakes.tiny_model import save_tiny_model

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's own, against pydantic
    import services.target.ray.app  # noqa: F401  # the deployment imports it late


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls: list[Any] = []
    nothing: Any = lambda *_, **__: None  # noqa: E731
    for name in ("start", "deploy", "ping_serve"):
        monkeypatch.setattr(ray_cluster, name, nothing)
    monkeypatch.setattr(ray_cluster, "running_replicas", lambda: 0)
    monkeypatch.setattr(ray_cluster, "refuse_dead_head", nothing)
    monkeypatch.setattr(ray_cluster, "stop", lambda **given: calls.append(given))
    monkeypatch.setattr(deploy, "_WATCH_S", 0.01)
    return calls


def deployment(folder: Path) -> Deployment:
    model = str(save_tiny_model(folder))
    return Deployment(
        DeploySettings(model=model, redis_url=SecretStr(f"unix://{folder}/no.sock"), tensor_parallel=2)
    )


async def test_dead_head_ends_the_deployment_without_a_stop_request(
    stopped: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dead() -> None:
        raise ray_cluster.RayLost("Ray has lost its raylet")

    monkeypatch.setattr(ray_cluster, "refuse_dead_head", dead)
    with pytest.raises(ray_cluster.RayLost, match="raylet"):
        await asyncio.wait_for(deployment(tmp_path).run(), 30)
    assert not stopped


async def test_a_controller_that_stays_silent_ends_it(
    stopped: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def silent() -> None:
        raise ConnectionError("nobody there")

    monkeypatch.setattr(ray_cluster, "ping_serve", silent)
    monkeypatch.setattr(deploy, "_SILENCE_S", 0.2)
    with pytest.raises(ray_cluster.RayLost, match=r"not responded for 0\.2 s"):
        await asyncio.wait_for(deployment(tmp_path).run(), 30)
    assert not stopped


async def test_replicas_that_cannot_start_end_it_in_order(
    stopped: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failed() -> int:
        raise Unavailable("no such file")

    monkeypatch.setattr(ray_cluster, "running_replicas", failed)
    with pytest.raises(Unavailable, match="no such file"):
        await asyncio.wait_for(deployment(tmp_path).run(), 30)
    assert stopped == [{"own": True}]
