"""Define the settings that draft and target replicas share."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, SecretStr

from galley.common.config.settings import ServiceSettings
from galley.common.redis.url import RedisUrlSetting  # pydantic reads it


class ReplicaSettings(ServiceSettings):
    dtype: Literal["auto", "bfloat16", "float32"] = Field(
        default="auto",
        description="Type of weights and KV. auto is bfloat16 where the device computes in it, else float32.",
    )
    device: str = Field(default="cpu", min_length=1, description="Torch device, such as cpu or cuda:0.")
    threads: int = Field(
        default=1,
        ge=1,
        le=1024,
        description="Threads of the CPU kernels. More than one is slow beside other busy processes.",
    )
    redis_url: RedisUrlSetting = Field(
        default=SecretStr(""),
        description="URL of the Redis to register with (docs/operate/redis.md). Empty registers nowhere. "
        "Must come by environment or file if it has a password.",
    )
    redis_url_file: str = Field(default="", description="File that holds the value of --redis-url.")
    advertise: str = Field(
        default="",
        description="Address of this replica for gateways, host:port. Empty uses the listening address.",
    )
