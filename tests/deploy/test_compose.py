"""compose.yaml: valid, closed, and its environment is what the services read."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from pydantic import SecretStr

from galley.common.config.settings import ServiceSettings, is_secret
from galley.version import __version__
from tests.deploy.render import CHART, ROLES, ROOT, Manifest, container, default_values, render, workloads
from tests.deploy.settings_of import parse_env, variables_of
from tests.fakes.promql import RULES
from tests.proofs.boot.images import last_stage

FILE = ROOT / "compose.yaml"
MONITORING, TRACES = {"prometheus", "grafana"}, {"phoenix"}
_VARIABLE = re.compile(r"\$\{(\w+):-([^}]*)\}")


def filled(value: Any) -> Any:
    """Return YAML as compose reads it where no variable is set."""
    return json.loads(_VARIABLE.sub(r"\2", json.dumps(value)))


@pytest.fixture(scope="module")
def compose() -> Manifest:
    result: Manifest = filled(yaml.safe_load(FILE.read_text()))
    return result


def settings_of(compose: Manifest, role: str) -> ServiceSettings:
    """Return what the service reads of its image and of compose.yaml."""
    image = last_stage(ROOT / "services" / role / "Dockerfile").env
    given = {**image, **compose["services"][role]["environment"]}
    return parse_env(role, {name: value for name, value in given.items() if name.startswith("GALLEY_")})


def published(service: Manifest) -> Iterator[tuple[str, int, int]]:
    for port in service.get("ports", []):
        host, outside, inside = port.split(":")
        yield host, int(outside), int(inside)


def test_it_follows_the_schema_of_compose() -> None:
    text = files("check_jsonschema").joinpath("builtin_schemas/vendor/compose-spec.json").read_text()
    jsonschema.Draft7Validator(json.loads(text)).validate(yaml.safe_load(FILE.read_text()))


def test_docker_compose_accepts_it() -> None:
    docker = shutil.which("docker") or "docker"
    if subprocess.run([docker, "compose", "version"], capture_output=True, check=False).returncode != 0:
        pytest.skip("docker compose is not installed")
    command = [docker, "compose", "--file", str(FILE), "--profile", "*", "config", "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("role", ROLES)
def test_each_variable_is_a_setting_and_the_service_accepts_them(compose: Manifest, role: str) -> None:
    given = compose["services"][role]["environment"]
    assert {name for name in given if not name.startswith("OTEL_")} <= variables_of(role)
    settings = settings_of(compose, role)
    grace_s = int(compose["services"][role]["stop_grace_period"].removesuffix("s"))
    assert grace_s >= settings.drain_timeout_s + 15


def test_addresses_lead_to_the_services(compose: Manifest) -> None:
    read: dict[str, Any] = {role: settings_of(compose, role) for role in ROLES}
    gateway = read["gateway"]
    assert gateway.target == f"target:{read['target'].port}"
    assert gateway.draft == f"draft:{read['draft'].port}"
    assert gateway.redis_url.get_secret_value() == "redis://redis:6379/0"
    networks = {name: set(service["networks"]) for name, service in compose["services"].items()}
    assert networks["target"] == networks["draft"] == {"pool"} < networks["gateway"]
    assert networks["redis"] == {"store"} < networks["gateway"]
    assert {name for name, network in compose["networks"].items() if network.get("internal")} == {
        "pool",
        "store",
    }


def test_ports_are_the_services_and_open_on_loopback_only(compose: Manifest) -> None:
    gateway: Any = settings_of(compose, "gateway")
    ports = {name: list(published(service)) for name, service in compose["services"].items()}
    assert {host for entries in ports.values() for host, _, _ in entries} == {"127.0.0.1"}
    assert [port for _, _, port in ports["gateway"]] == [gateway.port, gateway.http_port]
    assert [port for _, port, _ in ports["gateway"]] == [
        default_values()["gateway"]["port"],
        default_values()["gateway"]["httpPort"],
    ]
    assert not [name for name in ("redis", "target", "draft") if ports[name]]


def test_every_container_is_closed(compose: Manifest) -> None:
    for name, service in compose["services"].items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert int(service["user"].split(":")[0]) > 0, name
        assert set(service["deploy"]["resources"]["limits"]) == {"cpus", "memory", "pids"}, name
        # Compose copies `configs` and `secrets` into the container, which fails on a read-only file system.
        assert not {"configs", "secrets"} & set(service), name
        assert not {"privileged", "cap_add", "network_mode", "pid", "ipc", "devices"} & set(service), name
        for mount in service.get("volumes", []):
            source, _, access = mount.partition(":")
            assert source in compose["volumes"] or access.endswith(":ro"), f"{name}: {mount}"


def test_services_without_a_profile_are_those_of_galley(compose: Manifest) -> None:
    profiles = {name: service.get("profiles", []) for name, service in compose["services"].items()}
    assert {name for name, given in profiles.items() if not given} == {"redis", *ROLES}
    assert {name for name, given in profiles.items() if given == ["monitoring"]} == MONITORING
    assert {name for name, given in profiles.items() if given == ["traces"]} == TRACES


def test_it_holds_no_secret(compose: Manifest) -> None:
    for role in ROLES:
        settings = settings_of(compose, role)
        given = {name: getattr(settings, name) for name in type(settings).model_fields}
        secrets = [name for name, value in given.items() if isinstance(value, SecretStr)]
        assert not [name for name in secrets if is_secret(given[name].get_secret_value())]
    texts = [name for service in compose["services"].values() for name in service.get("environment", {})]
    assert not [name for name in texts if "PASSWORD" in name or "TOKEN" in name.removesuffix("TOKENIZER")]


@pytest.mark.parametrize("role", ROLES)
def test_images_are_those_of_this_version(compose: Manifest, role: str) -> None:
    service = compose["services"][role]
    assert service["image"] == f"galley-{role}:{__version__}"
    assert service["build"] == {"context": ".", "dockerfile": f"services/{role}/Dockerfile"}
    assert service["user"] == last_stage(ROOT / "services" / role / "Dockerfile").user


def test_the_store_runs_as_in_the_chart(compose: Manifest) -> None:
    chart = container(workloads(render())["redis"])
    store = compose["services"]["redis"]
    assert store["image"] == chart["image"]
    assert options([*store["command"]]) == options([*chart["command"], *chart["args"], "--port", ""]) | {
        "--maxmemory": "384mb"
    }
    assert options([*chart["command"], *chart["args"], "--port", ""])["--maxmemory"] == str(384 * 2**20)


def options(command: list[str]) -> dict[str, str]:
    """Return the options of a Valkey without its port, which is the default."""
    pairs = dict(zip(command[1::2], command[2::2], strict=True))
    pairs.pop("--port", None)
    return pairs


def test_prometheus_scrapes_each_service(compose: Manifest, tmp_path: Path) -> None:
    source = mounts(compose["services"]["prometheus"])["/etc/prometheus/prometheus.yml"]
    config = yaml.safe_load(source.read_text())
    (job,) = config["scrape_configs"]
    (static,) = job["static_configs"]
    assert sorted(static["targets"]) == sorted(
        f"{role}:{settings_of(compose, role).metrics_port}" for role in ROLES
    )
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed")
    config["rule_files"] = [str(RULES)]
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    done = subprocess.run(
        [promtool, "check", "config", str(tmp_path / "prometheus.yml")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def mounts(service: Manifest) -> dict[str, Path]:
    """Return the files of the repository that a service mounts, by their paths in the container."""
    entries = [entry.split(":") for entry in service.get("volumes", [])]
    return {entry[1]: ROOT / entry[0] for entry in entries if entry[0].startswith(".")}


def test_files_that_are_mounted_exist(compose: Manifest) -> None:
    for name, service in compose["services"].items():
        assert all(path.exists() for path in mounts(service).values()), name


def test_grafana_finds_prometheus_and_the_dashboards(compose: Manifest) -> None:
    mounted = mounts(compose["services"]["grafana"])
    provisioning = "/etc/grafana/provisioning"
    (provider,) = yaml.safe_load(mounted[f"{provisioning}/dashboards/galley.yaml"].read_text())["providers"]
    folder = provider["options"]["path"]
    assert mounted[folder] == CHART / "files" / "dashboards"
    home = compose["services"]["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert (mounted[folder] / Path(home).relative_to(folder)).is_file()
    (source,) = yaml.safe_load(mounted[f"{provisioning}/datasources/galley.yaml"].read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"


def test_traces_are_off_until_an_endpoint_is_named(compose: Manifest) -> None:
    for role in ROLES:
        assert compose["services"][role]["environment"]["OTEL_EXPORTER_OTLP_ENDPOINT"] == ""
    port = compose["services"]["phoenix"]["environment"]["PHOENIX_GRPC_PORT"]
    assert f"http://phoenix:{port}." in FILE.read_text()
