"""What draft and target replicas are both told of the model that they run."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, SecretStr

from galley.common.config.settings import ServiceSettings
from galley.common.redis.url import RedisUrlSetting  # pydantic reads it


class ReplicaSettings(ServiceSettings):
    """Settings of a replica that computes."""

    dtype: Literal["auto", "bfloat16", "float32"] = Field(
        default="auto",
        description="Of weights and KV; auto is bfloat16 where the device computes in it, else float32.",
    )
    device: str = Field(default="cpu", min_length=1, description="Torch device, such as cpu or cuda:0.")
    threads: int = Field(
        default=1,
        ge=1,
        le=1024,
        description="Threads of the CPU kernels; more than one stalls beside other busy processes.",
    )
    max_waiting: int = Field(
        default=1024, ge=1, description="Most items that wait for a step; more are refused."
    )
    redis_url: RedisUrlSetting = Field(
        default=SecretStr(""),
        description="Where the replica registers, in a form of docs/operate/redis.md; empty: it does not. "
        "With a password, by environment or by file.",
    )
    redis_url_file: str = Field(default="", description="File that holds it instead.")
    advertise: str = Field(
        default="", description="Address that gateways are told, host:port; empty: where it listens."
    )
