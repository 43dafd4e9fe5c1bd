"""The Dockerfiles, as far as they can be read without an engine that builds them."""

from __future__ import annotations

import re
from importlib.util import find_spec

import pytest

from services.common.version import __version__
from tests.deploy.render import ROLES, ROOT, container, default_values, pod, render, workloads
from tests.deploy.settings_of import variables_of


def dockerfile(role: str) -> str:
    text = (ROOT / "services" / role / "Dockerfile").read_text()
    return text.replace("\\\n", " ")


def last_stage(role: str) -> str:
    return "FROM" + dockerfile(role).rsplit("\nFROM", 1)[1]


def env(role: str) -> dict[str, str]:
    (line,) = re.findall(r"^ENV (.*)$", last_stage(role), re.MULTILINE)
    return dict(pair.split("=", 1) for pair in line.split())


@pytest.mark.parametrize("role", ROLES)
def test_variables_are_settings_of_the_service(role: str) -> None:
    given = {name: value for name, value in env(role).items() if name.startswith("GALLEY_")}
    assert set(given) <= variables_of(role)
    port = default_values()[role]["port"]
    assert given[f"GALLEY_{role.upper()}_PORT"] == str(port)
    assert f"\nEXPOSE {port}\n" in last_stage(role)


@pytest.mark.parametrize("role", ROLES)
def test_it_runs_the_service_as_the_charts_user(role: str) -> None:
    stage = last_stage(role)
    assert f'ENTRYPOINT ["python", "-m", "services.{role}"]' in stage
    assert find_spec(f"services.{role}.__main__") is not None
    assert find_spec("services.common.healthcheck") is not None
    user = pod(workloads(render())[role])["securityContext"]["runAsUser"]
    assert f"\nUSER {user}:{user}\n" in stage


@pytest.mark.parametrize("role", ROLES)
def test_caches_lie_where_the_chart_mounts_something(role: str) -> None:
    mounts = [mount["mountPath"] for mount in container(workloads(render())[role])["volumeMounts"]]
    for variable in ("XDG_CACHE_HOME", "HF_HOME"):
        assert any(env(role)[variable].startswith(mount) for mount in mounts)


@pytest.mark.parametrize("role", ROLES)
def test_only_the_services_own_extra_is_installed_and_nothing_in_the_last_stage(role: str) -> None:
    assert re.findall(r'"\.\[(\w+)\]"', dockerfile(role)) == [role]
    assert "pip install" not in last_stage(role)
    assert "apt-get" not in dockerfile(role)


@pytest.mark.parametrize("role", ROLES)
def test_the_base_is_an_argument_and_the_version_is_the_codes(role: str) -> None:
    text = dockerfile(role)
    assert re.search(r"^ARG BASE=\S+$", text, re.MULTILINE)
    assert f"\nARG VERSION={__version__}\n" in text
    others = re.findall(r"^ARG TARGET_IMAGE=(\S+)$", text, re.MULTILINE)
    assert others == ([] if role == "target" else [f"galley-target:{__version__}"])
