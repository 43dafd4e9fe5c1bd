"""What a service reads of its environment, as the service itself reads it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from unittest.mock import patch

from galley.common.config.settings import ServiceSettings, parse_settings
from scripts.chart_schema import settings_of


def variables_of(role: str) -> frozenset[str]:
    settings = settings_of(role)
    prefix = settings.model_config["env_prefix"]
    return frozenset(f"{prefix}{name}".upper() for name in settings.model_fields)


def parse_env(role: str, environment: Mapping[str, str]) -> ServiceSettings:
    """Return the settings that the service reads. Raises SystemExit if it refuses them."""
    # Clear this process's own environment.
    with patch.dict(os.environ, environment, clear=True):
        return parse_settings(settings_of(role), [], role, "")
