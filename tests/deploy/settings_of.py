"""The settings class of each service, as the service itself reads it."""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING
from unittest.mock import patch

from services.common.config import ServiceSettings, parse_settings

if TYPE_CHECKING:
    from collections.abc import Mapping


def settings_of(role: str) -> type[ServiceSettings]:
    """The one class of services.<role>.settings that a server is configured by."""
    module = import_module(f"services.{role}.settings")
    (found,) = (
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, ServiceSettings)
        and value.__module__ == module.__name__
    )
    return found


def variables_of(role: str) -> frozenset[str]:
    """The environment variables that the service reads as settings."""
    settings = settings_of(role)
    prefix = settings.model_config["env_prefix"]
    return frozenset(f"{prefix}{name}".upper() for name in settings.model_fields)


def parse_env(role: str, environment: Mapping[str, str]) -> ServiceSettings:
    """What the service itself reads from `environment`; raises SystemExit if it refuses."""
    with patch.dict(os.environ, environment):
        return parse_settings(settings_of(role), [], role, "")
