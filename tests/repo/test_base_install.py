"""`pip install galley` alone: the client streams from a real gateway, and the command names what it lacks."""

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
from tests.fakes.world import PROMPT, Heard, World, must_be_true

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
    stream = client.generate({PROMPT!r}, max_tokens=40, seed={SEED}, ignore_eos=True)
    text = "".join(event.chunk.text for event in stream)
    assert stream.finished is not None
    again = client.resume(stream.session_id)
    assert "".join(event.chunk.text for event in again) == text
print(",".join(str(token) for token in stream.token_ids))
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment that has `galley` and no extra."""
    home = tmp_path_factory.mktemp("base") / "venv"
    venv.create(home, with_pip=True, symlinks=True)
    environment = {**os.environ, "PIP_CONSTRAINT": str(ROOT / "constraints.txt")}
    pip = [str(home / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, str(ROOT)], env=environment, check=True)
    return home / "bin"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A directory with packages that are named as ours are."""
    for name in ("services", "proto", "tests"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('the wrong package')\n")
    return tmp_path


def clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "GALLEY_"))}


def test_it_needs_three_packages(base: Path) -> None:
    code = "from importlib.metadata import distributions as d; print(*(one.metadata['Name'] for one in d()))"
    ended = subprocess.run([base / "python", "-c", code], capture_output=True, text=True, check=True)
    assert set(ended.stdout.split()) <= ALLOWED


async def test_it_streams_an_answer_where_another_services_folder_lies(base: Path, project: Path) -> None:
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
            heard = await Heard().listen(gateway.ask())
    must_be_true(heard)
    assert [int(token) for token in out.decode().split(",")] == heard.tokens


@pytest.mark.parametrize("arguments", [["--help"], ["generate", "x"]])
def test_the_command_names_the_extra_that_it_lacks(base: Path, project: Path, arguments: list[str]) -> None:
    command = [str(base / "galley"), *arguments]
    ended = subprocess.run(
        command, cwd=project, env=clean_environment(), capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1
    assert ended.stdout == ""
    assert ended.stderr == "error: galley: the command line is not installed: pip install 'galley[cli]'\n"


def test_it_is_typed(base: Path) -> None:
    code = (
        "import galley; from pathlib import Path; print(Path(galley.__file__).with_name('py.typed').exists())"
    )
    ended = subprocess.run([base / "python", "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == "True\n"


def test_importing_it_loads_no_grpc() -> None:
    code = "import galley, sys; galley.__version__; galley.Message; sys.exit('grpc' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
