"""Values to try the chart with, and what its user makes before: certificates, keys, Secrets, a collector."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.deploy.matrix import SWITCHES, laid_over
from tests.deploy.render import ROOT, Manifest
from tests.fakes.certificates import Authority, Certificate
from tests.fakes.truncated_model import truncate_model
from tests.proofs.boot.objects import secret
from tests.proofs.boot.plan import Plan

NAMESPACE = "galley"
# Small pools and one kernel thread each: what is tried here is the chart.
SMALL: Manifest = {"target": {"settings": {"kv_memory_mb": 256}}}
SECURED = laid_over([SMALL, SWITCHES["tls"]["callers too"], SWITCHES["callers"]["keys"]])
"""TLS on every hop with certificates of both sides, and callers with keys."""
RANKS: Manifest = {"target": {"kind": "leaderworkerset", "nodes": 3, "tensorParallel": 3}}
"""A target over three pods, each with a third of the default model's heads."""
TWICE: Manifest = {"gateway": {"replicas": 2}, "target": {"replicas": 2}}

_LAYERS = (0, 1, 28, 29)
_CLIENT_TLS = "/etc/trial/tls"
_COLLECTOR, _OBSERVABILITY = "collector", "observability"
HUB, HUB_TOKEN = "hub", "hf_of_the_trial"
HUB_STUB = ROOT / "tests" / "fakes" / "hub.py"


def few_layers_of(model: Path, folder: Path) -> Path:
    """Return a model of few layers, for trials that do not depend on its size."""
    few = truncate_model(model, list(_LAYERS), folder)
    for path in few.iterdir():
        path.chmod(0o644)
    return few


def plan(model: Path, folder: Path, values: Manifest, **options: Any) -> Plan:
    """Return a trial of `values` with the Secrets that the matrix names, and clients that use them."""
    folder.mkdir(parents=True, exist_ok=True)
    key = secrets.token_hex(32)
    environment: dict[str, str] = {}
    mounted: dict[str, str] = {}
    if values.get("auth", {}).get("apiKeys"):
        environment["GALLEY_API_KEY"] = key
    if values.get("tls", {}).get("enabled"):
        mounted[_CLIENT_TLS] = "caller"
        environment["GALLEY_TLS_CA_FILE"] = f"{_CLIENT_TLS}/ca.crt"
        environment["GALLEY_TLS_SERVER_NAME"] = _name("gateway")
        if values["tls"]["gateway"].get("clientCaSecretName"):
            environment["GALLEY_TLS_CERT_FILE"] = f"{_CLIENT_TLS}/tls.crt"
            environment["GALLEY_TLS_KEY_FILE"] = f"{_CLIENT_TLS}/tls.key"
    objects = [*_secrets(folder, key)]
    if values.get("otel", {}).get("endpoint"):
        objects += _collector()
    if values.get("modelCache", {}).get("hubToken"):
        objects += _gated_hub()
    return Plan(
        model=str(model),
        values=values,
        objects=tuple(objects),
        client_secrets=mounted,
        client_environment=environment,
        **options,
    )


def _name(role: str) -> str:
    """Return the name that the chart expects in a role's certificate."""
    return f"galley-{role}.{NAMESPACE}.svc"


def _secrets(folder: Path, key: str) -> Iterator[Manifest]:
    # One authority for both sides where gateways show their own certificate, and another for callers.
    ours, callers = Authority(folder, "ours"), Authority(folder, "callers")
    keys = f'[[keys]]\nprincipal = "trial"\nsha256 = "{hashlib.sha256(key.encode()).hexdigest()}"\n'
    for role in ("gateway", "draft", "target"):
        yield _pair(f"{role}-tls", ours.issue(_name(role)), ours.ca)
    yield _pair("peer-tls", ours.issue("peer"), ours.ca)
    yield secret("callers", NAMESPACE, {"ca.crt": callers.ca.read_bytes()})
    yield _pair("caller", callers.issue("caller"), ours.ca)
    yield secret("keys", NAMESPACE, {"keys.toml": keys.encode()})
    yield secret("test-key", NAMESPACE, {"api-key": key.encode()})
    # For variables that a pod takes from a Secret (scenarios.py).
    yield secret("further", NAMESPACE, {"LEVEL": b"info"})
    yield secret("ids", NAMESPACE, {"id-secret": secrets.token_hex(32).encode()})


def _pair(name: str, pair: Certificate, ca: Path) -> Manifest:
    return secret(
        name,
        NAMESPACE,
        {"tls.crt": pair.cert.read_bytes(), "tls.key": pair.key.read_bytes(), "ca.crt": ca.read_bytes()},
    )


def _collector() -> list[Manifest]:
    """Return a small collector at collector.observability:4317."""
    command = ["python", "-m", "galley.trace", "--host", "::", "--port", "4317"]
    container = {
        "image": "galley-gateway:trial",
        "command": [*command, "--file", "/tmp/traces.jsonl"],
        "readinessProbe": {"grpc": {"port": 4317}, "periodSeconds": 1},
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
    }
    return _serving(_COLLECTOR, _OBSERVABILITY, 4317, container, {"name": "tmp", "emptyDir": {}})


def _gated_hub() -> list[Manifest]:
    """Return a hub at hub.hub:8080 that gives the model of the images to callers with the token."""
    script = HUB_STUB.read_text()
    files = {
        "kind": "ConfigMap",
        "metadata": {"name": HUB, "namespace": HUB},
        "data": {HUB_STUB.name: script},
    }
    container = {
        "image": "galley-target:trial",
        "command": ["python", f"/stub/{HUB_STUB.name}", "/models/default", "8080", HUB_TOKEN],
        "readinessProbe": {"tcpSocket": {"port": "serving"}, "periodSeconds": 1},
        "volumeMounts": [{"name": "stub", "mountPath": "/stub"}],
    }
    volume = {"name": "stub", "configMap": {"name": HUB}}
    return [
        files,
        secret(HUB, NAMESPACE, {"token": HUB_TOKEN.encode()}),
        *_serving(HUB, HUB, 8080, container, volume),
    ]


def _serving(name: str, namespace: str, port: int, container: Manifest, volume: Manifest) -> list[Manifest]:
    """Return a Service and a Deployment of one pod."""
    labels = {"app.kubernetes.io/component": name}
    metadata = {"name": name, "namespace": namespace, "labels": labels}
    ports = [{"name": "serving", "containerPort": port}]
    spec = {"containers": [{"name": name, "ports": ports, **container}], "volumes": [volume]}
    template = {"metadata": {"labels": labels}, "spec": spec}
    return [
        {
            "kind": "Service",
            "metadata": metadata,
            "spec": {"selector": labels, "ports": [{"name": name, "port": port, "targetPort": "serving"}]},
        },
        {"kind": "Deployment", "metadata": metadata, "spec": {"replicas": 1, "template": template}},
    ]
