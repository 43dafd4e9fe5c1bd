"""The big switches of the chart, and combinations of them in which every pair of settings occurs.

A new switch is an entry of SWITCHES; its first setting is the default, `{}`. A switch of up to four
settings adds hardly any rendering.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from functools import partial
from itertools import combinations, product
from typing import Any

from tests.deploy.render import Manifest

OWN_STORE = {"embedded": {"enabled": False}}
TLS: dict[str, Any] = {
    "enabled": True,
    "gateway": {"secretName": "gateway-tls"},
    "draft": {"secretName": "draft-tls"},
    "target": {"secretName": "target-tls"},
}
JWT: dict[str, Any] = {"enabled": True, "issuer": "https://issuer.example.com", "audience": "galley"}
KEDA: dict[str, Any] = {"enabled": True, "prometheus": {"serverAddress": "http://prometheus:9090"}}
ALL_MONITORING = {"rules": {"enabled": True}, "dashboards": {"enabled": True}}
MONITORED_SERVICES: dict[str, Any] = {
    "scrape": "serviceMonitor",
    "labels": {"release": "prometheus"},
    "releaseLabel": "deployment",
}
FROM_EDGE = {"clients": [{"namespaceSelector": {"matchLabels": {"name": "edge"}}}]}
POLICY = {"enabled": True, "ca": {"name": "authority"}}

CLOSED = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
MOUNT = {"name": "scratch", "mountPath": "/scratch"}
SIDECAR: dict[str, Any] = {
    "image": "registry.example.com/sidecar:1",
    "imagePullPolicy": "IfNotPresent",
    "securityContext": CLOSED,
    "resources": {"requests": {"cpu": "10m", "memory": "16Mi"}, "limits": {"memory": "16Mi"}},
    "volumeMounts": [MOUNT],
}
EXTENDED: dict[str, Any] = {
    "podLabels": {"team": "serving"},
    "extraEnv": [{"name": "HF_ENDPOINT", "value": "https://mirror.example.com"}],
    "envFrom": [{"configMapRef": {"name": "proxy", "optional": True}}],
    "extraVolumes": [{"name": "scratch", "emptyDir": {"sizeLimit": "1Gi"}}],
    "extraVolumeMounts": [MOUNT],
    "extraContainers": [{"name": "sidecar", **SIDECAR}],
    "initContainers": [{"name": "prepare", **SIDECAR}],
    "runtimeClassName": "nvidia",
    "resourceClaims": [{"name": "device", "resourceClaimTemplateName": "device"}],
    "livenessProbe": {"failureThreshold": 10},
    "podSpec": {"hostname": "galley", "terminationGracePeriodSeconds": 600},
}
DNS_OF_OPENSHIFT = [
    {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "openshift-dns"}},
        "podSelector": {"matchLabels": {"dns.operator.openshift.io/daemonset-dns": "default"}},
    }
]

SWITCHES: dict[str, dict[str, dict[str, Any]]] = {
    "target": {
        "one pod": {},
        "several gpus": {"target": {"tensorParallel": 4, "gpus": 4, "replicas": 2}},
        "started first": {"target": {"kind": "deployment", "maxSurge": 1}},
        "vllm": {
            "target": {
                "engine": "vllm",
                "image": {"repository": "galley-target-vllm-cuda"},
                "vllmArgs": {"quantization": "fp8"},
                "tensorParallel": 2,
                "gpus": 2,
            }
        },
        "several nodes": {
            "target": {
                "kind": "leaderworkerset",
                "nodes": 2,
                "tensorParallel": 8,
                "gpus": 4,
                "replicas": 2,
                "exclusiveTopology": "topology.example.com/rack",
            }
        },
        "ray": {
            "target": {
                "kind": "rayservice",
                "tensorParallel": 3,
                "replicas": 2,
                "rayService": {"gcsFaultTolerance": {"redisAddress": "redis://ray-redis:6380"}},
            }
        },
    },
    "store": {
        "embedded": {},
        "url": {
            "redis": {**OWN_STORE, "url": "rediss://store:6380/0?ca=/etc/galley/redis-tls/ca.crt"},
            "networkPolicy": {"redis": {"ports": [6380]}},
        },
        "secret": {
            "redis": {
                **OWN_STORE,
                "existingSecret": {"name": "store", "replicaKey": "replica-url", "draftKey": "draft-url"},
                "tlsSecretName": "store-tls",
            }
        },
    },
    "draft": {
        "lookup": {},
        "none": {"draft": {"enabled": False}},
        "model": {"draft": {"gpus": 1, "settings": {"model": "/models/volume/small"}}},
        "canary": {
            "draft": {
                "canary": {
                    "enabled": True,
                    "version": "trained-2",
                    "overrides": {"gpus": 1, "settings": {"model": "/models/volume/small"}},
                }
            }
        },
        "learning": {
            "gateway": {"settings": {"learn_tokens": 100_000}},
            "draft": {"replicas": 2, "settings": {"model": "/models/volume/small", "max_load_mib": 64}},
            "learning": {"enabled": True, "start": "/models/volume/small"},
        },
        "pools": {
            "drafts": [
                {"name": "lookup", "replicas": 2},
                {
                    "name": "small",
                    "gpus": 1,
                    "settings": {"model": "example/small"},
                    "keda": {"maxReplicas": 2},
                },
            ]
        },
    },
    "models": {
        "of the images": {},
        "volume": {"model": "/models/volume/big", "modelVolume": {"existingClaim": "models"}},
        "image": {
            "model": "/models/volume/big",
            "modelImage": "registry.example.com/big:1",
            "gateway": {"modelImage": "registry.example.com/big-tokenizer:1"},
        },
        "hub, by job": {
            "model": "example/big",
            "modelSize": "90Gi",
            "modelCache": {
                "persistence": {"enabled": True},
                "download": {"enabled": True, "mode": "job"},
            },
        },
        "hub, kept": {
            "model": "example/big",
            "draft": {"settings": {"model": "example/small"}},
            "modelCache": {
                "persistence": {"enabled": True},
                "download": {"enabled": True},
                "hubToken": {"secretName": "hub"},
            },
        },
    },
    "tls": {
        "off": {},
        "mutual": {"tls": TLS},
        "servers alone": {"tls": {**TLS, "mutual": False}},
        "issued": {"tls": {"enabled": True, "certManager": {"enabled": True}}},
        "callers too": {
            "tls": {
                **TLS,
                "gateway": {
                    "secretName": "gateway-tls",
                    "peerSecretName": "peer-tls",
                    "clientCaSecretName": "callers",
                },
            },
            "test": {"clientCertSecretName": "caller"},
        },
    },
    "callers": {
        "anybody": {},
        "keys": {
            "auth": {"apiKeys": {"secretName": "keys"}, "idSecret": {"secretName": "ids"}},
            "test": {"apiKey": {"secretName": "test-key"}},
        },
        "tokens": {
            "auth": {"jwt": {**JWT, "jwksUrl": "https://issuer.example.com/keys", "caSecretName": "ca"}}
        },
        "both": {
            "auth": {
                "apiKeys": {"secretName": "keys"},
                "jwt": {**JWT, "jwksConfigMap": {"name": "jwks"}},
            }
        },
    },
    "edge": {
        "inside": {},
        "ingress": {
            "ingress": {
                "enabled": True,
                "hosts": ["galley.example.com", "galley.example.org"],
                "tls": [{"hosts": ["galley.example.com"], "secretName": "edge-tls"}],
                "annotations": {"nginx.ingress.kubernetes.io/proxy-ssl-secret": "galley/proxy"},
                "grpc": {
                    "serviceAnnotations": {"traefik.ingress.kubernetes.io/service.serversscheme": "h2c"}
                },
            },
            "networkPolicy": FROM_EDGE,
        },
        "route": {
            "gatewayApi": {
                "enabled": True,
                "parentRefs": [{"name": "edge"}],
                "hostnames": ["g.example.com"],
                "http": {"hostnames": ["h.example.com"]},
            },
            "networkPolicy": FROM_EDGE,
        },
        "pool": {
            "gatewayApi": {"enabled": True, "parentRefs": [{"name": "edge"}]},
            "inferencePool": {
                "enabled": True,
                "http": {"endpointPicker": {"name": "picker"}},
                "grpc": {"endpointPicker": {"name": "grpc-picker"}},
            },
            "networkPolicy": FROM_EDGE,
        },
        "balancer": {
            "gateway": {"service": {"type": "LoadBalancer", "externalTrafficPolicy": "Local"}},
            "networkPolicy": {"enabled": False},
        },
    },
    "seen": {
        "annotations": {"otel": {"endpoint": "http://collector.observability:4317"}},
        "pods": {"monitoring": {"scrape": "podMonitor", **ALL_MONITORING}},
        "services": {"monitoring": MONITORED_SERVICES},
        "not at all": {"monitoring": {"scrape": "none"}},
    },
    "pods": {
        "plain": {},
        "extended": {
            **dict.fromkeys(("gateway", "draft", "target", "test"), EXTENDED),
            "redis": {"embedded": EXTENDED},
            "ipFamilyPolicy": "PreferDualStack",
            "ipFamilies": ["IPv6", "IPv4"],
        },
        "openshift": {
            "podSecurityContext": dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup")),
            "networkPolicy": {"dns": DNS_OF_OPENSHIFT, "dnsPorts": [5353]},
        },
    },
    "scaled": {
        "by hand": {"gateway": {"replicas": 3}},
        "hpa": {"gateway": {"autoscaling": {"enabled": True}}, "draft": {"autoscaling": {"enabled": True}}},
        "keda": {"keda": KEDA},
    },
}

IMPOSSIBLE: tuple[dict[str, str], ...] = (
    {"scaled": "keda", "seen": "not at all"},
    *({"edge": "pool", "tls": each} for each in SWITCHES["tls"] if each != "off"),
)
"""Settings that the chart refuses together."""
TOGETHER: tuple[tuple[dict[str, str], dict[str, Any]], ...] = (
    ({"target": "ray", "scaled": "keda"}, {"keda": {"target": {"enabled": False}}}),
    *(
        ({"edge": "route", "tls": each}, {"gatewayApi": {"backendTlsPolicy": POLICY}})
        for each in SWITCHES["tls"]
        if each != "off"
    ),
)
"""Settings that need further values to go together, and these values."""

Row = dict[str, str]
Pair = tuple[tuple[str, str], tuple[str, str]]


def rows() -> list[Row]:
    """Return combinations of settings in which every possible pair of settings occurs."""
    expected = {
        pair
        for first, second in combinations(SWITCHES, 2)
        for pair in product(_settings(first), _settings(second))
        if possible(dict(pair))
    }
    results: list[Row] = []
    while expected:
        row = _row(expected)
        results.append(row)
        expected -= set(combinations(row.items(), 2))
    return results


def _settings(name: str) -> list[tuple[str, str]]:
    return [(name, each) for each in SWITCHES[name]]


def _row(expected: set[Pair]) -> Row:
    """Complete an uncovered pair, at each switch with the setting that covers most further pairs."""
    row: Row = dict(min(expected))
    for name, settings in SWITCHES.items():
        if name not in row:
            options = [each for each in settings if possible({**row, name: each})]
            if not options:
                raise ValueError(f"{name}: no setting is possible with {row}")
            row[name] = max(options, key=partial(_gain, row, name, expected))
    return {name: row[name] for name in SWITCHES}


def _gain(row: Row, name: str, expected: set[Pair], each: str) -> int:
    whole = {**row, name: each}
    ordered = {known: whole[known] for known in SWITCHES if known in whole}
    return sum(pair in expected for pair in combinations(ordered.items(), 2))


def possible(row: Mapping[str, str]) -> bool:
    return not any(each.items() <= row.items() for each in IMPOSSIBLE)


def values_of(row: Mapping[str, str]) -> Manifest:
    further = [values for settings, values in TOGETHER if settings.items() <= row.items()]
    return laid_over([*(SWITCHES[name][setting] for name, setting in row.items()), *further])


def laid_over(parts: Iterable[Manifest]) -> Manifest:
    """Merge values deeply in order, as helm does."""
    merged: Manifest = {}
    for part in parts:
        _lay(merged, part)
    return merged


def _lay(below: Manifest, above: Manifest) -> None:
    for key, value in above.items():
        if isinstance(value, dict) and isinstance(below.get(key), dict):
            _lay(below[key], value)
        else:
            below[key] = copy.deepcopy(value)
