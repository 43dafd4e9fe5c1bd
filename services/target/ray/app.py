"""The Ray Serve application: `services.target.ray.app:app` in deploy/ray/target.yaml."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator
from ray import serve

from services.target.ray.replica import TargetReplica

APP = "galley-target"
DEPLOYMENT = "TargetReplica"
IMPORT_PATH = "services.target.ray.app:app"

# A dead process is noticed at the next check; a hanging one after three of these.
_HEALTH_CHECK_S = 1
_HEALTH_CHECK_TIMEOUT_S = 10
_AFTER_DRAIN_S = 10


class AppArgs(BaseModel):
    """The `args` of the application: a replica's settings, and its number of ranks."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    tensor_parallel: int = Field(default=1, ge=1, description="Ranks of a replica.")
    settings: dict[str, Any] = Field(
        default_factory=dict, description="Fields of services.target.settings.TargetSettings."
    )

    @field_validator("settings")
    @classmethod
    def _fits_ray(cls, settings: dict[str, Any]) -> dict[str, Any]:
        if (engine := settings.get("engine", "paged")) != "paged":
            raise ValueError(f"engine: must be paged on Ray Serve, got {engine}")
        if settings.get("threads", 1) in {0, "auto"}:
            raise ValueError("threads: must be a number on Ray Serve, which places ranks by it, got auto")
        return settings


def app(args: Mapping[str, Any]) -> serve.Application:
    """Return the deployment of `args`, an AppArgs; the configuration sets the number of replicas."""
    parsed = AppArgs.model_validate(args)
    settings = parsed.settings
    cpus, gpus = int(settings.get("threads", 1)), int(str(settings.get("device", "cpu")).startswith("cuda"))
    bundle: dict[str, float] = {"CPU": cpus, **({"GPU": 1} if gpus else {})}
    deployment = serve.deployment(
        name=DEPLOYMENT,
        ray_actor_options={"num_cpus": cpus, "num_gpus": gpus},
        placement_group_bundles=[bundle] * parsed.tensor_parallel,
        placement_group_strategy="PACK",
        health_check_period_s=_HEALTH_CHECK_S,
        health_check_timeout_s=_HEALTH_CHECK_TIMEOUT_S,
        # Serve sees no request; the replica's destructor drains.
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=float(settings.get("drain_timeout_s", 25.0)) + _AFTER_DRAIN_S,
    )(TargetReplica)
    bound: serve.Application = deployment.bind(settings, parsed.tensor_parallel)
    return bound


def schema_of(args: AppArgs, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration, as `serve deploy` reads it, with these options of the deployment.

    Deploying it again with another number of replicas leaves the running ones alone.
    """
    return {
        "proxy_location": "Disabled",
        "applications": [
            {
                "name": APP,
                "route_prefix": None,
                "import_path": IMPORT_PATH,
                "args": args.model_dump(),
                "deployments": [{"name": DEPLOYMENT, **options}],
            }
        ],
    }
