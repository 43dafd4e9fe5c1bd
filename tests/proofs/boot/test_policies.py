"""What NetworkPolicies, names and upgrades mean, by the documentation of Kubernetes."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from dnslib import RCODE, DNSRecord

from tests.proofs.boot.names import NameServer
from tests.proofs.boot.network import IPV6, VirtualAddress, ruleset
from tests.proofs.boot.policies import Endpoint, Policies, read_policies
from tests.proofs.boot.upgrade import immutable_changes

SPACES = {"app": {"name": "app"}, "seen": {"name": "seen", "team": "watch"}, "else": {"name": "else"}}
DENY_ALL = """
metadata: {name: deny, namespace: app}
spec: {podSelector: {}, policyTypes: [Ingress, Egress]}
"""
TO_SERVER = """
metadata: {name: server, namespace: app}
spec:
  podSelector: {matchLabels: {role: server}}
  policyTypes: [Ingress]
  ingress:
    - from: [{podSelector: {matchLabels: {role: client}}}]
      ports: [{port: rpc, protocol: TCP}]
    - from:
        - namespaceSelector: {matchLabels: {team: watch}}
          podSelector: {matchExpressions: [{key: scrape, operator: Exists}]}
      ports: [{port: 9000, endPort: 9002}]
    - from: [{ipBlock: {cidr: 10.9.0.0/16, except: [10.9.1.0/24]}}]
"""
FROM_CLIENT = """
metadata: {name: client, namespace: app}
spec:
  podSelector: {matchLabels: {role: client}}
  policyTypes: [Egress]
  egress:
    - to: [{podSelector: {matchLabels: {role: server}}}]
      ports: [{port: rpc}]
"""


def pod(role: str, ip: str, space: str = "app", **labels: str) -> Endpoint:
    return Endpoint(role, ip, space, {"role": role, **labels}, {"rpc": 5000})


SERVER, CLIENT, OTHER = pod("server", "10.0.0.1"), pod("client", "10.0.0.2"), pod("other", "10.0.0.3")
WATCHER = pod("watcher", "10.0.0.4", "seen", scrape="yes")


def policies(*texts: str) -> Policies:
    return read_policies([yaml.safe_load(text) for text in texts], SPACES)


def may(given: Policies, source: Endpoint, destination: Endpoint, port: int, protocol: str = "TCP") -> bool:
    return given.leave(source, destination, protocol, port)[0]


def test_without_a_policy_all_is_open() -> None:
    assert may(policies(), OTHER, SERVER, 1)


def test_a_connection_needs_leave_at_both_ends() -> None:
    assert not may(policies(DENY_ALL, TO_SERVER), CLIENT, SERVER, 5000)
    assert not may(policies(DENY_ALL, FROM_CLIENT), CLIENT, SERVER, 5000)
    given = policies(DENY_ALL, TO_SERVER, FROM_CLIENT)
    leave, through = given.leave(CLIENT, SERVER, "TCP", 5000)
    assert leave
    assert [opening.name for opening in through] == ["client.egress.0", "server.ingress.0"]
    assert not may(given, SERVER, CLIENT, 5000), "answers pass, but no connections back"


@pytest.mark.parametrize(("port", "protocol"), [(5001, "TCP"), (5000, "UDP")])
def test_ports_and_protocols_are_meant(port: int, protocol: str) -> None:
    assert not may(policies(TO_SERVER), CLIENT, SERVER, port, protocol)


@pytest.mark.parametrize(("port", "opened"), [(8999, False), (9000, True), (9002, True), (9003, False)])
def test_a_range_of_ports_for_pods_of_another_namespace(port: int, opened: bool) -> None:
    assert may(policies(TO_SERVER), WATCHER, SERVER, port) is opened
    assert not may(policies(TO_SERVER), pod("watcher", "10.0.0.5", "else", scrape="yes"), SERVER, port)
    assert not may(policies(TO_SERVER), pod("watcher", "10.0.0.6", "seen"), SERVER, port)


@pytest.mark.parametrize(("ip", "opened"), [("10.9.0.1", True), ("10.9.1.1", False), ("10.8.0.1", False)])
def test_addresses_but_for_their_exceptions(ip: str, opened: bool) -> None:
    assert may(policies(TO_SERVER), Endpoint(ip, ip), SERVER, 1) is opened


def test_an_empty_rule_opens_to_everyone_and_no_rule_to_nobody() -> None:
    reported: Any = yaml.safe_load(TO_SERVER)
    reported["spec"]["ingress"] = [{}]
    assert may(read_policies([reported], SPACES), OTHER, SERVER, 7)
    reported["spec"]["ingress"] = []
    assert not may(read_policies([reported], SPACES), OTHER, SERVER, 7)


def test_without_policy_types_egress_is_guarded_only_where_there_are_rules_for_it() -> None:
    reported: Any = yaml.safe_load(FROM_CLIENT)
    del reported["spec"]["policyTypes"]
    assert not may(read_policies([reported], SPACES), CLIENT, OTHER, 5000)
    assert not may(read_policies([reported], SPACES), OTHER, CLIENT, 5000), "ingress is always guarded"
    del reported["spec"]["egress"]
    assert may(read_policies([reported], SPACES), CLIENT, OTHER, 5000)


def test_packet_filter_matches_the_policies() -> None:
    text = ruleset([SERVER, CLIENT, OTHER], policies(DENY_ALL, TO_SERVER, FROM_CLIENT), [])
    assert f"ip saddr {CLIENT.ip} ip daddr {SERVER.ip} tcp dport 5000 return" in text
    assert f"ip daddr {SERVER.ip} ip saddr {CLIENT.ip} tcp dport 5000 return" in text
    assert f"ip daddr {SERVER.ip} ip saddr 10.9.0.0/16 ip saddr != {{ 10.9.1.0/24 }}" in text
    for guarded in (SERVER, CLIENT, OTHER):
        assert f"ip saddr {guarded.ip} jump refuse" in text
        assert f"ip daddr {guarded.ip} jump refuse" in text


def test_a_service_draws_evenly_among_its_pods() -> None:
    address = VirtualAddress("10.96.0.1", 80, (("10.0.0.1", 5000), ("10.0.0.2", 5000)))
    text = ruleset([], policies(), [address])
    assert "ip daddr 10.96.0.1 tcp dport 80 numgen random mod 2 == 0 dnat to 10.0.0.1:5000" in text
    assert "ip daddr 10.96.0.1 tcp dport 80 dnat to 10.0.0.2:5000" in text


def test_packet_filter_of_a_cluster_without_ipv4() -> None:
    server, client = pod("server", "fd00::1"), pod("client", "fd00::2")
    address = VirtualAddress("fd00:96::1", 80, (("fd00::1", 5000),))
    text = ruleset([server, client], policies(DENY_ALL, TO_SERVER, FROM_CLIENT), [address], IPV6)
    assert "ip6 saddr fd00::2 ip6 daddr fd00::1 tcp dport 5000 return" in text
    assert "ip6 daddr fd00:96::1 tcp dport 80 dnat to [fd00::1]:5000" in text
    assert "10.9.0.0" not in text, "a block of the other family"
    assert "table ip galley" not in text


def test_names_have_addresses_of_the_cluster_s_family() -> None:
    server = NameServer(lambda: {"a.cluster.local": ["fd00::1"]})
    for kind, count in (("AAAA", 1), ("A", 0)):
        reply = server.resolve(DNSRecord.question("a.cluster.local", kind), None)
        assert len(reply.rr) == count
        assert reply.header.rcode == RCODE.NOERROR
    assert not server.unknown


def test_fields_that_an_api_server_lets_nobody_change() -> None:
    old: Any = {"kind": "StatefulSet", "metadata": {"name": "s"}, "spec": {"serviceName": "a", "replicas": 1}}
    new = {**old, "spec": {"serviceName": "b", "replicas": 2, "selector": {}}}
    assert list(immutable_changes(old, new)) == ["StatefulSet s: selector", "StatefulSet s: serviceName"]
    service: Any = {"kind": "Service", "metadata": {"name": "s"}, "spec": {"clusterIP": "None", "ports": []}}
    assert list(immutable_changes(service, {**service, "spec": {"ports": [1]}})) == ["Service s: clusterIP"]
