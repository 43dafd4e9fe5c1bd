"""Values to try the chart with, and what its user makes before: certificates, keys, Secrets."""

from __future__ import annotations

import hashlib
import secrets
from typing import TYPE_CHECKING, Any

from tests.boot.objects import secret
from tests.boot.plan import Plan
from tests.deploy.render import default_values
from tests.gateway.tls import Authority, Certificate

if TYPE_CHECKING:
    from pathlib import Path

    from tests.deploy.render import Manifest

NAMESPACE = "galley"
_CLIENT_TLS = "/etc/trial/tls"
_NAMES = {role: f"{role}.galley.test" for role in ("gateway", "draft", "target")}
# Small pools and one kernel thread each: what is tried here is the chart.
_SMALL = {"settings": {"kv_memory_mb": 256}}


def offers(*keys: str) -> bool:
    """Whether the chart has such a value."""
    values: Any = default_values()
    for key in keys:
        if key not in values:
            return False
        values = values[key]
    return True


def plain(model: Path, **told: Any) -> Plan:
    """The chart's own values, but for the size of the KV pool."""
    return Plan(model=str(model), values={"target": _SMALL}, **told)


def secured(model: Path, folder: Path, *, pre_stop_s: int | None = None, **told: Any) -> Plan:
    """Two gateways and targets, TLS on every hop with certificates of both sides, callers with keys."""
    folder.mkdir(parents=True, exist_ok=True)
    servers, peers, callers = (Authority(folder, name) for name in ("servers", "peers", "callers"))
    key = secrets.token_hex(32)
    keys = f'[[keys]]\nprincipal = "trial"\nsha256 = "{hashlib.sha256(key.encode()).hexdigest()}"\n'
    objects = (
        _pair("gateway-tls", servers.issue(_NAMES["gateway"]), servers.ca),
        _pair("gateway-peer-tls", peers.issue("gateway"), peers.ca),
        _pair("draft-tls", peers.issue(_NAMES["draft"]), peers.ca),
        _pair("target-tls", peers.issue(_NAMES["target"]), peers.ca),
        secret("callers-ca", NAMESPACE, {"ca.crt": callers.ca.read_bytes()}),
        _pair("caller-tls", callers.issue("caller"), servers.ca),
        secret("api-keys", NAMESPACE, {"keys.toml": keys.encode()}),
        secret("caller-key", NAMESPACE, {"api-key": key.encode()}),
        secret("id-secret", NAMESPACE, {"id-secret": secrets.token_bytes(32).hex().encode()}),
    )
    return Plan(
        model=str(model),
        values=_secured_values(pre_stop_s),
        objects=objects,
        client_secrets={_CLIENT_TLS: "caller-tls"},
        client_environment={
            "GALLEY_API_KEY": key,
            "GALLEY_TLS_CA_FILE": f"{_CLIENT_TLS}/ca.crt",
            "GALLEY_TLS_CERT_FILE": f"{_CLIENT_TLS}/tls.crt",
            "GALLEY_TLS_KEY_FILE": f"{_CLIENT_TLS}/tls.key",
            "GALLEY_TLS_SERVER_NAME": _NAMES["gateway"],
        },
        **told,
    )


def _secured_values(pre_stop_s: int | None) -> Manifest:
    gateway: Manifest = {"replicas": 2}
    if pre_stop_s is not None:
        gateway["preStopSeconds"] = pre_stop_s
    return {
        "gateway": gateway,
        "target": {**_SMALL, "replicas": 2},
        "tls": {
            "enabled": True,
            "mutual": True,
            "gateway": {
                "secretName": "gateway-tls",
                "name": _NAMES["gateway"],
                "peerSecretName": "gateway-peer-tls",
                "clientCaSecretName": "callers-ca",
            },
            **{role: {"secretName": f"{role}-tls", "name": _NAMES[role]} for role in ("draft", "target")},
        },
        "auth": {"apiKeys": {"secretName": "api-keys"}, "idSecret": {"secretName": "id-secret"}},
        "test": {"apiKey": {"secretName": "caller-key"}, "clientCertSecretName": "caller-tls"},
    }


def _pair(name: str, pair: Certificate, ca: Path) -> Manifest:
    """As cert-manager writes it."""
    return secret(
        name,
        NAMESPACE,
        {"tls.crt": pair.cert.read_bytes(), "tls.key": pair.key.read_bytes(), "ca.crt": ca.read_bytes()},
    )
