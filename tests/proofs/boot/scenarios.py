"""Values of clusters and pods that are not the usual ones: each is a trial of its own."""

from __future__ import annotations

from typing import Any

from tests.deploy.render import ROLES, Manifest
from tests.proofs.boot.worlds import HUB

UPGRADED: Manifest = {role: {"podAnnotations": {"galley.example.com/upgraded": "true"}} for role in ROLES}
"""Values that change the pods of every role, whatever else an upgrade changes."""

ONE_REPLICA: Manifest = {
    "gateway": {"settings": {"target_timeout_s": 300}},
    "target": {"replicas": 1, "tensorParallel": 3},
}
"""A target of several ranks without a second: its streams wait while it is replaced."""

ANY_USER: Manifest = {"podSecurityContext": dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup"))}
"""Pods that name no user, as OpenShift's restricted-v2 wants them."""
ASSIGNED_USER = 1000680000

_CLOSED: Manifest = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
_HOST, _ADDRESS = "hub.internal.example.com", "192.0.2.7"
_MADE = "/shared/made"
# Ready only if what the values ask for is so in the pod.
_LOOK = f"""
import os, pathlib, signal, socket, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit())
assert socket.gethostbyname({_HOST!r}) == {_ADDRESS!r}
assert pathlib.Path({_MADE!r}).read_text() == os.environ["PROOF"]
assert "ndots:2" in pathlib.Path("/etc/resolv.conf").read_text()
pathlib.Path("/shared/looked").touch()
signal.pause()
"""


def _beside(name: str, script: str, **fields: Any) -> Manifest:
    return {
        "name": name,
        "image": "galley-gateway:proof",
        "command": ["python", "-I", "-S", "-c", script],
        "env": [{"name": "PROOF", "value": "passed through"}],
        "securityContext": _CLOSED,
        "volumeMounts": [{"name": "shared", "mountPath": "/shared"}],
        **fields,
    }


_WRITE = f"import os, pathlib; pathlib.Path({_MADE!r}).write_text(os.environ['PROOF'])"
EXTENDED: Manifest = {
    "gateway": {
        "podLabels": {"team": "proof"},
        "envFrom": [{"secretRef": {"name": "further"}}],
        "extraVolumes": [{"name": "shared", "emptyDir": {"sizeLimit": "1Mi"}}],
        "extraVolumeMounts": [{"name": "shared", "mountPath": "/shared"}],
        "initContainers": [_beside("writer", _WRITE)],
        "extraContainers": [
            _beside(
                "looker",
                _LOOK,
                readinessProbe={"exec": {"command": ["test", "-e", "/shared/looked"]}, "periodSeconds": 1},
            )
        ],
        "dnsConfig": {"options": [{"name": "ndots", "value": "2"}]},
        "podSpec": {
            "hostAliases": [{"ip": _ADDRESS, "hostnames": [_HOST]}],
            "terminationGracePeriodSeconds": 70,
            "containers": [
                # The service is ready only with what comes by envFrom and by podSpec.
                {"name": "gateway", "workingDir": "/shared", "args": ["--log-level", "$(LEVEL)"]},
            ],
        },
    }
}
"""A gateway with a sidecar, an init container, a volume, variables of a Secret, and fields by podSpec."""
BY_IPV6: Manifest = {"ipFamilies": ["IPv6"]}
"""A cluster without IPv4."""

GATED: Manifest = {
    "model": "owner/model",
    "extraEnv": [{"name": "HF_ENDPOINT", "value": f"http://{HUB}.{HUB}:8080"}],
    "modelCache": {
        "persistence": {"enabled": True},
        "download": {"enabled": True, "mode": "job"},
        "hubToken": {"secretName": HUB},
    },
    "networkPolicy": {
        "https": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": HUB}}}],
        "httpsPorts": [8080],
    },
}
"""A gated model of a hub, which a Job downloads into a claim."""
TWO_POOLS: Manifest = {
    "drafts": [
        {"name": "lookup"},
        {"name": "model", "settings": {"model": GATED["model"], "default_strategy": "model"}},
    ]
}
"""Drafts without a model, and with one."""
