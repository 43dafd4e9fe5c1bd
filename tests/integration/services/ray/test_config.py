"""The config that is committed, as Ray Serve and our application read it; and what is refused at start."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import SecretStr, ValidationError

from galley.core.errors import UnsupportedModel
from services.target.ranks.rank import REDIS_URL, REDIS_URL_FILE, settings_for_ranks
from services.target.ray import __main__ as deploy
from services.target.ray import autoscaling
from services.target.ray.__main__ import Deployment, DeploySettings
from services.target.settings import TargetSettings
from tests.deploy.render import env_of, only_container, pods, render

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's own, against pydantic
    import ray
    from ray._private import ray_constants
    from ray.serve.schema import ServeDeploySchema

    from services.target.ray import app as ray_app
    from services.target.ray import replica as ray_replica

CONFIG = Path(__file__).parents[4] / "deploy" / "ray" / "target.yaml"


def test_the_committed_config_is_read_by_serve_and_by_us() -> None:
    raw: dict[str, Any] = yaml.safe_load(CONFIG.read_text())
    schema = ServeDeploySchema.model_validate(raw)
    (application,) = schema.applications
    (deployment,) = application.deployments
    assert application.import_path == ray_app.IMPORT_PATH
    assert application.name == ray_app.APP
    assert deployment.name == ray_app.DEPLOYMENT
    args = ray_app.AppArgs.model_validate(application.args)
    TargetSettings(**args.settings)
    settings = DeploySettings(redis_url=SecretStr("unix:///nowhere"), max_replicas=4)
    ours = ray_app.schema_of(args, Deployment(settings).options())
    assert raw["applications"][0]["deployments"] == ours["applications"][0]["deployments"]
    assert f"{autoscaling.__name__}:{autoscaling.scale_targets.__name__}" == autoscaling.POLICY


def test_every_rank_has_a_bundle() -> None:
    bound = ray_app.app({"tensor_parallel": 3, "settings": {"threads": 2}})
    options = bound._bound_deployment._replica_config
    assert options.placement_group_bundles == [{"CPU": 2.0}] * 3
    assert options.ray_actor_options["num_cpus"] == 2


def test_an_unknown_argument_is_refused_without_its_value() -> None:
    with pytest.raises(ValidationError, match="redis_url") as refused:
        ray_app.AppArgs.model_validate({"redis_url": "redis://:secret@store"})
    assert "secret" not in str(refused.value)


def test_an_engine_with_ranks_of_its_own_is_refused() -> None:
    with pytest.raises(ValidationError, match="engine: must be paged on Ray Serve, got vllm"):
        ray_app.AppArgs.model_validate({"settings": {"engine": "vllm"}})
    with pytest.raises(ValidationError, match="--engine: must be paged on Ray Serve, got vllm"):
        DeploySettings(redis_url=SecretStr("unix:///nowhere"), engine="vllm")


def test_threads_are_a_number_as_ray_places_ranks_by_it() -> None:
    for threads in (0, "auto"):
        with pytest.raises(ValidationError, match="threads: must be a number on Ray Serve"):
            ray_app.AppArgs.model_validate({"settings": {"threads": threads}})
    with pytest.raises(ValidationError, match="--threads: must be a number on Ray Serve"):
        DeploySettings(redis_url=SecretStr("unix:///nowhere"), threads=0)


@pytest.mark.parametrize("drain", [0, 30, 600])
def test_the_charts_pods_drain_as_long_as_serve_lets_a_replica_go(drain: int) -> None:
    variable = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"
    assert hasattr(ray_constants, variable)
    bound = ray_app.app({"settings": {"drain_timeout_s": drain}})
    goes_within = bound._bound_deployment._deployment_config.graceful_shutdown_timeout_s
    rendered = pods(render({"target": {"kind": "rayservice", "drainTimeoutSeconds": drain}}))
    for name in ("ray-head", "target"):
        # Not longer: Serve would wait for a replacement first, for which there is no pod.
        assert float(env_of(only_container(rendered[name]))[variable]) == goes_within, name
        assert rendered[name]["terminationGracePeriodSeconds"] > goes_within, name


def test_ray_does_not_get_the_store_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url, file = "redis://galley:canary-5c1e@store.test:6379", tmp_path / "url"
    file.write_text(url)
    settings = DeploySettings.model_validate({"redis_url_file": str(file)})
    assert settings.redis_url.get_secret_value() == url
    args = deploy._args(settings)
    assert "canary" not in args.model_dump_json()
    assert "redis" not in args.model_dump_json()
    monkeypatch.setenv(REDIS_URL_FILE, str(file))
    here = ray_replica._settings_here(args.settings, 1)
    assert here.redis_url.get_secret_value() == url
    assert "canary" not in json.dumps(settings_for_ranks(here))
    monkeypatch.setenv(REDIS_URL, "unix:///other")
    assert ray_replica._settings_here(args.settings, 1).redis_url.get_secret_value() == "unix:///other"


async def test_ranks_that_do_not_divide_are_refused_before_ray_is_started(default_model_dir: Path) -> None:
    settings = DeploySettings(
        model=str(default_model_dir), redis_url=SecretStr("unix:///nowhere"), tensor_parallel=2
    )
    with pytest.raises(UnsupportedModel, match="must divide num_attention_heads = 9 of llama, got 2"):
        await Deployment(settings).run()
    assert not ray.is_initialized()
