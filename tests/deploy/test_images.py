"""The Dockerfiles, as far as they can be read without an engine that builds them."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from asyncio.subprocess import PIPE
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from galley.common.server.server import start_server
from galley.version import __version__
from tests.deploy.render import LOCKS, ROLES, ROOT, container, default_values, locked, pod, render, workloads
from tests.deploy.settings_of import variables_of
from tests.fakes.certificates import Authority, mounted
from tests.fakes.echo_service import EchoService, building, settings
from tests.fakes.tls_servers import tls_settings


def dockerfile(role: str) -> str:
    text = (ROOT / "services" / role / "Dockerfile").read_text()
    return text.replace("\\\n", " ")


def last_stage(role: str) -> str:
    return "FROM" + dockerfile(role).rsplit("\nFROM", 1)[1]


def env(role: str) -> dict[str, str]:
    (line,) = re.findall(r"^ENV (.*)$", last_stage(role), re.MULTILINE)
    return dict(pair.split("=", 1) for pair in line.split())


def healthcheck(role: str) -> list[str]:
    (command,) = re.findall(r"HEALTHCHECK .*?CMD (\[.*\])", last_stage(role))
    words: list[str] = json.loads(command)
    return words


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
    assert find_spec("galley.common.server.healthcheck") is not None
    user = pod(workloads(render())[role])["securityContext"]["runAsUser"]
    assert f"\nUSER {user}:{user}\n" in stage


@pytest.mark.parametrize("role", ROLES)
def test_caches_lie_in_mounted_volumes(role: str) -> None:
    mounts = [mount["mountPath"] for mount in container(workloads(render())[role])["volumeMounts"]]
    for variable in ("XDG_CACHE_HOME", "HF_HOME"):
        assert any(env(role)[variable].startswith(mount) for mount in mounts)


@pytest.mark.parametrize("role", ROLES)
def test_written_paths_are_volumes(role: str) -> None:
    (line,) = re.findall(r"^VOLUME (.*)$", last_stage(role), re.MULTILINE)
    mounts = {mount["mountPath"] for mount in container(workloads(render())[role])["volumeMounts"]}
    assert set(json.loads(line)) <= mounts


@pytest.mark.parametrize("role", ROLES)
def test_installed_packages_are_locked(role: str) -> None:
    text = dockerfile(role)
    results = re.findall(r"pip (?:--python \S+ )?install ([^&\n]*)", text)
    installed, own = [words.strip() for words in results], "dist/*.whl"
    assert own in installed
    assert all("--require-hashes" in words for words in installed if words != own)
    expected = {"gateway": {"gateway"}, "draft": {"torch-${DEVICE}", "draft"}}
    expected["target"] = {"torch-${DEVICE}", "target", "model"}  # for ENGINE=vllm, vLLM's lock has that name
    assert set(re.findall(r"-r \"?locks/(\S+?)\.txt", text)) == expected[role] | {"build"}
    assert re.search(r"\b(pip|apt-get|gcc|strip)\b", last_stage(role)) is None


@pytest.mark.parametrize("role", ["draft", "target"])
def test_each_device_has_a_lock(role: str) -> None:
    (device,) = re.findall(r"^ARG DEVICE=(\S+)$", dockerfile(role), re.MULTILINE)
    assert device == "cpu"
    assert {path.stem for path in LOCKS.glob("torch-*.txt")} == {"torch-cpu", "torch-cuda"}


@pytest.mark.parametrize(("model", "status"), [("none", 0), ("smollm2-135m-instruct", 0), ("llama", 1)])
def test_image_accepts_only_its_model(model: str, status: int) -> None:
    (script,) = re.findall(r"^RUN (case \"\$\{MODEL.* esac)$", dockerfile("target"), re.MULTILINE)
    done = subprocess.run(
        ["sh", "-c", script], env={"MODEL": model}, capture_output=True, text=True, check=False
    )
    assert done.returncode == status
    assert ("MODEL: must be none or" in done.stderr) == bool(status)


@pytest.mark.parametrize(
    ("engine", "device", "status", "lock"),
    [
        ("paged", "cpu", 0, "ray"),
        ("vllm", "cpu", 0, "vllm-cpu"),
        ("vllm", "cuda", 0, "vllm"),
        ("sglang", "cpu", 1, ""),
    ],
)
def test_each_engine_has_a_lock(engine: str, device: str, status: int, lock: str, tmp_path: Path) -> None:
    """The image installs what its engine's extra asks for."""
    (script,) = re.findall(r"^RUN (case \"\$\{ENGINE\}\".* esac)$", dockerfile("target"), re.MULTILINE)
    shutil.copytree(LOCKS, tmp_path / "locks")
    environment = {"ENGINE": engine, "DEVICE": device, "PATH": os.environ["PATH"]}
    done = subprocess.run(
        ["sh", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == status
    assert ("ENGINE: must be paged or vllm, got sglang" in done.stderr) == bool(status)
    if lock:
        installed = locked((tmp_path / "locks" / "target.txt").read_text())
        asked = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"][lock]
        assert {canonicalize_name(Requirement(one).name) for one in asked} - {"galley"} <= installed.keys()


def test_only_packages_for_images_and_sound_may_be_missing(tmp_path: Path) -> None:
    """The packages that vLLM asks for and its locks leave out."""
    (pattern,) = re.findall(r"grep -vE '([^']*)' broken", dockerfile("target"))
    wanted = [
        f"vllm 0 requires {name}, which is not installed."
        for name in ("torchaudio", "torchcodec", "torchvision")
    ]
    assert all(re.search(pattern, line) for line in wanted)
    assert not re.search(pattern, "vllm 0 requires numba, which is not installed.")
    assert not re.search(pattern, "vllm 0 has requirement numba==1, but you have numba 2.")


@pytest.mark.parametrize("role", ROLES)
def test_copied_files_are_in_the_context(role: str) -> None:
    """.dockerignore excludes everything that it does not name."""
    admitted = [
        line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")
    ]
    for words in re.findall(r"^COPY (?!--from)(.*)$", dockerfile(role), re.MULTILINE):
        for source in words.split()[:-1]:
            path = source.replace("${DEVICE}", "cuda").rstrip("/")
            assert (ROOT / path).exists(), path
            assert any(path == name or path.startswith(f"{name}/") for name in admitted), path


@pytest.mark.parametrize("role", ROLES)
async def test_healthcheck_with_tls(role: str, tmp_path: Path) -> None:
    authority = Authority(tmp_path, "authority")
    files = mounted(tmp_path / "server", authority.ca, authority.issue("server"))
    port = f"GALLEY_{role.upper()}_HEALTH_PORT"
    running = await start_server(
        settings(health_port=0, **tls_settings(files, mutual=True)), building(EchoService())
    )
    here = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    try:
        for address, status in ((running.health_address, 0), (running.address, 1)):
            moved = env(role) | here | {port: address.rpartition(":")[2]}
            probe = await asyncio.create_subprocess_exec(*healthcheck(role), env=moved, stderr=PIPE)
            _, message = await probe.communicate()
            assert probe.returncode == status, message
    finally:
        await running.stop()


@pytest.mark.parametrize("role", ROLES)
def test_the_health_port_is_open_and_the_charts(role: str) -> None:
    assert env(role)[f"GALLEY_{role.upper()}_HEALTH_PORT"] == str(default_values()[role]["healthPort"])


@pytest.mark.parametrize("role", ROLES)
def test_hadolint_finds_nothing(role: str) -> None:
    hadolint = Path(sys.prefix) / "bin" / "hadolint"
    done = subprocess.run(
        [hadolint, ROOT / "services" / role / "Dockerfile"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("role", ROLES)
def test_the_base_is_an_argument_and_the_version_is_the_codes(role: str) -> None:
    text = dockerfile(role)
    assert re.search(r"^ARG BASE=\S+$", text, re.MULTILINE)
    assert f"\nARG VERSION={__version__}\n" in text
    others = re.findall(r"^ARG TARGET_IMAGE=(\S+)$", text, re.MULTILINE)
    assert others == ([] if role == "target" else [f"galley-target:{__version__}"])
