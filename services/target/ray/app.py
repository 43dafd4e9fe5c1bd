"""The Ray Serve application, `services.target.ray.app:app` in configs such as deploy/ray/target.yaml."""

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

# A dead process is seen at the next check; one that hangs after three of these.
_HEALTH_CHECK_S = 1
_HEALTH_CHECK_TIMEOUT_S = 10
_AFTER_DRAIN_S = 10


class AppArgs(BaseModel):
    """The `args` of the application: a replica's settings, and over how many ranks it is cut."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tensor_parallel: int = Field(default=1, ge=1, description="Ranks a replica.")
    settings: dict[str, Any] = Field(
        default_factory=dict, description="Of services.target.settings.TargetSettings."
    )


def app(args: Mapping[str, Any]) -> serve.Application:
    """The deployment of these arguments, an AppArgs; how many replicas there are is the config's to say."""
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
        # Serve knows of no request; the drain is our own, in the replica's destructor.
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=float(settings.get("drain_timeout_s", 25.0)) + _AFTER_DRAIN_S,
    )(TargetReplica)
    bound: serve.Application = deployment.bind(settings, parsed.tensor_parallel)
    return bound


class Scale(BaseModel):
    """How many replicas there are: `replicas`, or as many as the load wants from there up to `most`."""

    model_config = ConfigDict(frozen=True)

    replicas: int
    most: int
    # How long the load must want it.
    upscale_delay_s: float
    downscale_delay_s: float

    def options(self) -> dict[str, Any]:
        """Of the deployment, in a config."""
        if self.most <= self.replicas:
            return {"num_replicas": self.replicas}
        return {
            "autoscaling_config": {
                "min_replicas": self.replicas,
                "max_replicas": self.most,
                "upscale_delay_s": self.upscale_delay_s,
                "downscale_delay_s": self.downscale_delay_s,
                "policy": {"policy_function": AUTOSCALING_POLICY},
            }
        }


def schema_of(args: AppArgs, scale: Scale) -> dict[str, Any]:
    """A config, as `serve deploy` reads it. Deployed again with another scale it leaves the others alone."""
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
