"""Write each role's settings and pod values into the chart's schema: `python -m scripts.chart_schema FILE`.

Settings are the fields of services/<role>/settings.py, with their types and bounds, except those that the
chart derives from other values and those for tests and local stacks. Pod values are the definition `pod`, for
every pod of the chart. The rest of the file stays as it is.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from galley.common.config.settings import ServiceSettings

ROLES = ("gateway", "draft", "target")
NOT_IN_A_CLUSTER = frozenset({"die_with_parent", "ready_fd", "oracle_answers", "oracle_spoil"})
"""Settings for tests and for programs that start the services themselves."""
_WIRING = {
    "advertise",
    "draft",
    "host",
    "log_format",
    "pool",
    "port",
    "redis_url",
    "redis_url_file",
    "target",
}
_OWN_VALUES = {
    *("drain_timeout_s", "health_port", "http_port", "log_level", "metrics_port", "model"),
    "startup_timeout_s",
}
_ENGINE = {"engine", "vllm_args"}
_RANKS = {"host_index", "hosts", "ranks_address", "ranks_timeout_s", "tensor_parallel"}
_TLS = {"tls_cert_file", "tls_client_ca_file", "tls_key_file"}
_PEERS = {"draft_tls_name", "peer_ca_file", "peer_cert_file", "peer_key_file", "target_tls_name"}
_CALLERS = {
    *("api_keys_file", "id_secret", "id_secret_file"),
    *("jwt_algorithms", "jwt_audience", "jwt_ca_file", "jwt_issuer", "jwt_jwks_file", "jwt_jwks_url"),
    "jwt_principal_claim",
}
DECIDED = frozenset(_WIRING | _OWN_VALUES | _ENGINE | _RANKS | _TLS | _PEERS | _CALLERS | {"tokenizer"})
"""Settings that the chart derives from other values."""
# The chart's `model` is the target's, so the draft's model is offered among its settings.
_OFFERED = {"draft": {"model"}}
_KEPT_WORDS = ("type", "enum", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minLength")
_WIDTH = 128
_COMMON = frozenset({"canary", "enabled", "port", "healthPort", "metricsPort", "serviceAccount"})
"""Values that all pools of drafts share."""
_SCALING = frozenset({"autoscaling", "keda"})


def settings_of(role: str) -> type[ServiceSettings]:
    """Return the settings class in services.<role>.settings."""
    settings: type[ServiceSettings] = getattr(
        import_module(f"services.{role}.settings"), f"{role.capitalize()}Settings"
    )
    return settings


def offered(role: str) -> dict[str, dict[str, Any]]:
    """Return the settings that the chart offers for a role, each with its JSON Schema."""
    fields = settings_of(role).model_json_schema()["properties"]
    kept_back = (DECIDED - _OFFERED.get(role, set())) | NOT_IN_A_CLUSTER
    return {name: _value_of(fields[name]) for name in sorted(set(fields) - kept_back)}


def _value_of(field: Mapping[str, Any]) -> dict[str, Any]:
    """Return a field's JSON Schema without title, default and the like."""
    merged = dict(field)
    for option in field.get("anyOf", ()):
        if option.get("type") != "null":
            merged |= option
    return {word: merged[word] for word in _KEPT_WORDS if word in merged}


def pods_of(schema: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the properties of each part of the values that configures a pod."""
    values = {name: part.get("properties", {}) for name, part in schema["properties"].items()}
    return [
        *(values[role] for role in ROLES),
        values["target"]["rayService"]["properties"]["head"]["properties"],
        values["redis"]["embedded"]["properties"],
        values["learning"],
        values["test"],
    ]


def draft_pool(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the properties of an entry of `drafts`: those of `draft` that pools may differ in."""
    own = schema["properties"]["draft"]["properties"]
    return {
        "name": {"type": "string", "pattern": "^[a-z0-9]([a-z0-9-]{0,14}[a-z0-9])?$"},
        **{name: _part_of(schema, one) for name, one in own.items() if name not in _COMMON},
        "keda": _part_of(schema, schema["properties"]["keda"]["properties"]["draft"]),
    }


def draft_canary(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the properties of draft.canary.overrides: those of a pool without name, version and scaling."""
    pool = draft_pool(schema)
    own = {name: part for name, part in pool.items() if name not in _SCALING | {"name"}}
    settings = own["settings"]["properties"]
    own["settings"] |= {"properties": {name: settings[name] for name in settings if name != "version"}}
    return own


def _part_of(schema: Mapping[str, Any], value: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of what is laid over `value`: nothing is required, and null removes it."""
    known: Any = value
    if str(value.get("$ref", "")).startswith("#/definitions/"):
        known = schema
        for name in value["$ref"].removeprefix("#/").split("/"):
            known = known[name]
    if "properties" not in known:
        return {"anyOf": [dict(value), {"type": "null"}]}
    properties = {name: _part_of(schema, one) for name, one in known["properties"].items()}
    return {"type": ["object", "null"], "additionalProperties": False, "properties": properties}


def text_of(value: Any, indent: int = 0, taken: int = 0) -> str:
    """Return JSON in which every value that fits into a line stands in one."""
    line = json.dumps(value, ensure_ascii=False)
    if not value or not isinstance(value, dict | list) or len(line) + indent + taken <= _WIDTH:
        return line
    inner = " " * (indent + 2)
    if isinstance(value, list):
        parts = [text_of(each, indent + 2) for each in value]
    else:
        names = {name: json.dumps(name) + ": " for name in value}
        parts = [names[name] + text_of(each, indent + 2, len(names[name])) for name, each in value.items()]
    opening, closing = "[]" if isinstance(value, list) else "{}"
    return f"{opening}\n" + ",\n".join(inner + part for part in parts) + "\n" + " " * indent + closing


def main() -> int:
    """Rewrite the file; return 2 if none is named."""
    if len(sys.argv) != 2:
        sys.stderr.write("usage: python -m scripts.chart_schema FILE\n")
        return 2
    file = Path(sys.argv[1])
    schema = json.loads(file.read_text(encoding="utf-8"))
    for role in ROLES:
        schema["properties"][role]["properties"]["settings"]["properties"] = offered(role)
    for part in pods_of(schema):
        part |= {
            name: {"$ref": f"#/definitions/pod/properties/{name}"}
            for name in schema["definitions"]["pod"]["properties"]
        }
    schema["properties"]["drafts"]["items"]["properties"] = draft_pool(schema)
    canary = schema["properties"]["draft"]["properties"]["canary"]["properties"]
    canary["overrides"]["properties"] = draft_canary(schema)
    file.write_text(text_of(schema) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
