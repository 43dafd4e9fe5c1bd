"""Services, their ports and families of addresses, service accounts, and objects of one's own."""

from __future__ import annotations

from typing import Any

import pytest

from tests.deploy import schemas
from tests.deploy.matrix import DNS_OF_OPENSHIFT, FROM_EDGE
from tests.deploy.render import (
    CHART,
    ROLES,
    HelmFailed,
    Manifest,
    env,
    env_of,
    helm,
    of_kind,
    only_container,
    pods,
    render,
    render_refused,
    services,
    workloads,
)

RAY = {"target": {"kind": "rayservice"}}


def rendered(values: Manifest) -> list[Manifest]:
    manifests = render(values)
    for manifest in manifests:
        schemas.check(manifest)
    return manifests


def outside(**service: Any) -> Manifest:
    return {"gateway": {"service": {"type": "LoadBalancer", **service}}, "networkPolicy": FROM_EDGE}


def test_the_gateways_service_has_ports_of_its_own() -> None:
    manifests = rendered(outside(port=443, httpPort=80))
    ports = services(manifests)["galley-gateway"]["spec"]["ports"]
    assert [(port["port"], port["targetPort"]) for port in ports] == [(443, "grpc"), (80, "http")]
    test = env_of(only_container(pods(manifests)["test"]))
    assert test["GALLEY_ENDPOINT"].endswith(":443"), "`helm test` calls the Service"
    headless = services(manifests)["galley-gateway-headless"]["spec"]["ports"]
    assert headless[0]["port"] == 50051, "a headless Service does not translate ports"


def test_routes_lead_to_the_services_ports() -> None:
    values = {
        "gateway": {"service": {"port": 443, "httpPort": 80}},
        "ingress": {
            "enabled": True,
            "hosts": ["galley.example.com"],
            "tls": [{"secretName": "edge-tls", "hosts": ["galley.example.com"]}],
        },
        "networkPolicy": FROM_EDGE,
    }
    numbers = {
        path["backend"]["service"]["port"].get("number") or path["backend"]["service"]["port"]["name"]
        for ingress in of_kind(rendered(values), "Ingress").values()
        for rule in ingress["spec"]["rules"]
        for path in rule["http"]["paths"]
    }
    assert numbers <= {443, 80, "grpc", "http"}
    routes = {
        "gateway": {"service": {"port": 443, "httpPort": 80}},
        "gatewayApi": {"enabled": True, "parentRefs": [{"name": "edge"}], "hostnames": ["g.example.com"]},
        "networkPolicy": FROM_EDGE,
    }
    (route,) = of_kind(rendered(routes), "GRPCRoute").values()
    assert route["spec"]["rules"][0]["backendRefs"][0]["port"] == 443


def test_node_ports_and_a_class_of_load_balancers() -> None:
    given = {
        "nodePort": 30051,
        "httpNodePort": 30080,
        "loadBalancerClass": "tailscale",
        "loadBalancerSourceRanges": ["10.0.0.0/8", "fd00::/8"],
    }
    spec = services(rendered(outside(**given)))["galley-gateway"]["spec"]
    assert [port["nodePort"] for port in spec["ports"]] == [30051, 30080]
    assert spec["loadBalancerClass"] == "tailscale"
    assert spec["loadBalancerSourceRanges"] == ["10.0.0.0/8", "fd00::/8"]


@pytest.mark.parametrize(
    ("service", "message"),
    [
        ({"nodePort": 30051}, "gateway.service.nodePort: must be 0 with gateway.service.type ClusterIP"),
        ({"httpNodePort": 30051}, "gateway.service.httpNodePort: must be 0"),
        ({"loadBalancerClass": "a"}, "gateway.service.loadBalancerClass: must be empty with"),
        ({"loadBalancerSourceRanges": ["10.0.0.0/8"]}, "gateway.service.loadBalancerSourceRanges: must be"),
        ({"port": 443, "httpPort": 443}, "gateway.service.httpPort: must differ from gateway.service.port"),
        ({"httpPort": 50051}, "gateway.service.httpPort: must differ from"),
        ({"port": 65536}, "/gateway/service/port"),
        ({"nodePort": 80}, "/gateway/service/nodePort"),
        (
            {"type": "NodePort", "nodePort": 30051, "httpNodePort": 30051},
            "gateway.service.httpNodePort: must differ from gateway.service.nodePort, got 30051",
        ),
    ],
)
def test_a_service_that_cannot_be_is_refused(service: Manifest, message: str) -> None:
    assert message in render_refused({"gateway": {"service": service}, "networkPolicy": FROM_EDGE})


@pytest.mark.parametrize(
    ("policy", "families"),
    [("PreferDualStack", []), ("RequireDualStack", ["IPv6", "IPv4"]), ("SingleStack", ["IPv6"])],
)
def test_all_services_have_the_families_of_addresses(policy: str, families: list[str]) -> None:
    for name, service in services(rendered({"ipFamilyPolicy": policy, "ipFamilies": families})).items():
        assert service["spec"]["ipFamilyPolicy"] == policy, name
        assert service["spec"].get("ipFamilies", []) == families, name
    for service in services(render()).values():
        assert not {"ipFamilyPolicy", "ipFamilies"} & set(service["spec"]), "the cluster decides"


def test_families_that_contradict_are_refused() -> None:
    assert "ipFamilies: must be one with ipFamilyPolicy SingleStack, got IPv4, IPv6" in render_refused(
        {"ipFamilyPolicy": "SingleStack", "ipFamilies": ["IPv4", "IPv6"]}
    )
    assert "ipFamilies: must be one without ipFamilyPolicy, got IPv4, IPv6" in render_refused(
        {"ipFamilies": ["IPv4", "IPv6"]}
    )
    assert "/ipFamilies" in render_refused({"ipFamilies": ["IPv6", "IPv6"]})


@pytest.mark.parametrize("target", [{}, {"kind": "rayservice"}])
def test_pods_listen_at_all_addresses(target: Manifest) -> None:
    manifests = render({"target": target})
    for role in ROLES:
        variables = env_of(pods(manifests)[role]["containers"][0])
        assert variables[f"GALLEY_{role.upper()}_HOST"] == "::"
        if role != "gateway":
            # Galley adds the brackets of an IPv6 address.
            assert variables[f"GALLEY_{role.upper()}_ADVERTISE"].startswith("$(POD_IP):")


def test_rays_dashboard_listens_where_the_cluster_does() -> None:
    for families, host in (([], "0.0.0.0"), (["IPv4", "IPv6"], "0.0.0.0"), (["IPv6"], "::")):
        policy = "PreferDualStack" if len(families) > 1 else ""
        values = {**RAY, "ipFamilyPolicy": policy, "ipFamilies": families}
        (service,) = of_kind(render(values), "RayService").values()
        head = service["spec"]["rayClusterConfig"]["headGroupSpec"]
        assert head["rayStartParams"]["dashboard-host"] == host


def test_a_role_has_an_account_of_its_own() -> None:
    values = {
        "serviceAccount": {"annotations": {"team": "serving"}},
        "gateway": {"serviceAccount": {"name": "edge", "annotations": {"iam.example.com/role": "edge"}}},
        "draft": {"serviceAccount": {"create": False, "name": "shared"}},
        "target": {"serviceAccount": {"create": False}, "kind": "rayservice"},
    }
    manifests = rendered(values)
    accounts = of_kind(manifests, "ServiceAccount")
    assert set(accounts) == {"edge", "galley-redis"}
    assert accounts["edge"]["metadata"]["annotations"] == {"team": "serving", "iam.example.com/role": "edge"}
    used = {name: spec["serviceAccountName"] for name, spec in pods(manifests).items()}
    assert used == {
        "gateway": "edge",
        "test": "edge",
        "draft": "shared",
        "target": "default",
        "ray-head": "default",
        "redis": "galley-redis",
    }


def test_no_account_is_made_if_none_is_wanted() -> None:
    manifests = render({"serviceAccount": {"create": False}, "target": {"serviceAccount": {"name": "mine"}}})
    assert not of_kind(manifests, "ServiceAccount")
    assert pods(manifests)["target"]["serviceAccountName"] == "mine"
    assert pods(manifests)["draft"]["serviceAccountName"] == "default"


def test_two_roles_cannot_make_the_same_account() -> None:
    account = {"serviceAccount": {"name": "one"}}
    refusal = render_refused({"gateway": account, "target": account})
    assert (
        "target.serviceAccount.create: must be false, because gateway.serviceAccount creates one too"
        in refusal
    )


def test_objects_of_ones_own_are_rendered_with_the_release() -> None:
    values = {
        "extraObjects": [
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {"name": '{{ include "galley.name" . }}-extra'},
                "data": {"port": "{{ .Values.gateway.port }}"},
            },
            "apiVersion: v1\nkind: Secret\nmetadata:\n  name: of-text\n",
        ]
    }
    manifests = rendered(values)
    assert of_kind(manifests, "ConfigMap")["galley-extra"]["data"] == {"port": "50051"}
    assert "of-text" in of_kind(manifests, "Secret")


def test_dns_may_be_at_another_port() -> None:
    """OpenShift's DNS pods listen at 5353; a policy sees the port of the pod."""
    manifests = rendered({"networkPolicy": {"dns": DNS_OF_OPENSHIFT, "dnsPorts": [5353]}})
    resolving = [
        (name, {(port["port"], port["protocol"]) for port in rule["ports"]})
        for name, policy in of_kind(manifests, "NetworkPolicy").items()
        for rule in policy["spec"].get("egress", [])
        if rule.get("to") == DNS_OF_OPENSHIFT
    ]
    assert {name for name, _ in resolving} >= {f"galley-{role}" for role in ROLES}
    assert all(ports == {(5353, "UDP"), (5353, "TCP")} for _, ports in resolving)


def test_the_hub_is_reached_by_both_families() -> None:
    values = {"model": "example/big", "draft": {"settings": {"model": "example/small"}}}
    policies = of_kind(render(values), "NetworkPolicy")
    blocks = [
        peer["ipBlock"]["cidr"]
        for rule in policies["galley-target"]["spec"]["egress"]
        for peer in rule.get("to", [])
        if "ipBlock" in peer
    ]
    assert blocks == ["0.0.0.0/0", "::/0"]


def test_an_openshift_cluster_chooses_the_user() -> None:
    """restricted-v2 refuses a fixed user, and sets one of the namespace's range."""
    unset = dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup"))
    for target in ({}, {"kind": "rayservice"}):
        for name, spec in pods(rendered({"podSecurityContext": unset, "target": target})).items():
            assert not set(unset) & set(spec["securityContext"]), name
            assert spec["securityContext"]["runAsNonRoot"] is True, name
            assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name


def test_the_user_can_be_unset_on_the_command_line() -> None:
    text = helm("template", "galley", str(CHART), "--set", "podSecurityContext.runAsUser=null")
    assert "runAsUser" not in text
    assert "runAsGroup: 10001" in text


def test_security_contexts_of_all_pods_and_of_one() -> None:
    values = {
        "podSecurityContext": {"runAsUser": 4711, "supplementalGroups": [7]},
        "securityContext": {"readOnlyRootFilesystem": False},
        "target": {"podSecurityContext": {"runAsUser": 4712}, "securityContext": {"privileged": False}},
    }
    rendered_pods = pods(rendered(values))
    assert {name: spec["securityContext"]["runAsUser"] for name, spec in rendered_pods.items()} == {
        "gateway": 4711,
        "draft": 4711,
        "redis": 4711,
        "test": 4711,
        "target": 4712,
    }
    for name, spec in rendered_pods.items():
        context = spec["containers"][0]["securityContext"]
        assert context["readOnlyRootFilesystem"] is False, name
        assert context["capabilities"] == {"drop": ["ALL"]}, name
        assert ("privileged" in context) is (name == "target")


def test_rdma_is_a_device_and_a_capability() -> None:
    values = {
        "target": {
            "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
            "resources": {"limits": {"rdma/hca": 1}},
            "podAnnotations": {"k8s.v1.cni.cncf.io/networks": "rdma-net"},
        }
    }
    target = only_container(pods(rendered(values))["target"])
    assert target["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert target["resources"]["limits"]["rdma/hca"] == 1


def test_the_cache_on_a_local_disk() -> None:
    """An ephemeral claim of a class of local disks replaces the emptyDir, within restricted Pod Security."""
    claim = {
        "volumeClaimTemplate": {
            "spec": {
                "accessModes": ["ReadWriteOnce"],
                "storageClassName": "local-nvme",
                "resources": {"requests": {"storage": "500Gi"}},
            }
        }
    }
    volume = {"name": "cache", "ephemeral": claim}
    spec = pods(rendered({"target": {"extraVolumes": [volume]}}))["target"]
    assert [each for each in spec["volumes"] if each["name"] == "cache"] == [volume]
    assert {"name": "cache", "mountPath": "/var/cache/galley"} in only_container(spec)["volumeMounts"]


def test_a_wrong_family_is_refused() -> None:
    with pytest.raises(HelmFailed, match="ipFamilyPolicy"):
        render({"ipFamilyPolicy": "Both"})
    assert env(workloads(render())["gateway"])["GALLEY_GATEWAY_PORT"] == "50051"
