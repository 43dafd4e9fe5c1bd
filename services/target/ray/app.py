"""The Ray Serve application: `services.target.ray.app:app` in deploy/ray/target.yaml."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from ray import serve

from services.target.ray.replica import TargetReplica

APP = "galley-target"
DEPLOYMENT = "TargetReplica"
IMPORT_PATH = "services.target.ray.app:app"
AUTOSCALING_POLICY = "services.target.ray.autoscaling:scale_targets"

# A dead process is noticed at the next check; a hanging one after three of these.
_HEALTH_CHECK_S = 1
_HEALTH_CHECK_TIMEOUT_S = 10
_AFTER_DRAIN_S = 10


class AppArgs(BaseModel):
    """The `args` of the application: a replica's settings, and its number of ranks."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tensor_parallel: int = Field(default=1, ge=1, description="Ranks of a replica.")
    settings: dict[str, Any] = Field(
        default_factory=dict, description="Fields of services.target.settings.TargetSettings."
    )


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


class Scale(BaseModel):
    """The number of replicas: `replicas`, or from there up to `max_replicas` as the load needs."""

    model_config = ConfigDict(frozen=True)

    replicas: int
    max_replicas: int
    # How long the load must need it, in seconds.
    upscale_delay_s: float
    downscale_delay_s: float

    def options(self) -> dict[str, Any]:
        """Return the deployment's options in a configuration."""
        if self.max_replicas <= self.replicas:
            return {"num_replicas": self.replicas}
        return {
            "autoscaling_config": {
                "min_replicas": self.replicas,
                "max_replicas": self.max_replicas,
                "upscale_delay_s": self.upscale_delay_s,
                "downscale_delay_s": self.downscale_delay_s,
                "policy": {"policy_function": AUTOSCALING_POLICY},
            }
        }


def schema_of(args: AppArgs, scale: Scale) -> dict[str, Any]:
    """Return a configuration, as `serve deploy` reads it.

    Deploying it again with another scale leaves the running replicas alone.
    """
    return {
        "proxy_location": "Disabled",
        "applications": [
            {
                "name": APP,
                "route_prefix": None,
                "import_path": IMPORT_PATH,
                "args": args.model_dump(),
                "deployments": [{"name": DEPLOYMENT, **scale.options()}],
            }
        ],
    }
