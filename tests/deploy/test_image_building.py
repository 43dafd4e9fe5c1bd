"""What `make images` does beside building: reasons, pip's sources, the compiler's stand-in."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.images import host, pip_settings
from scripts.images.build import ORDER, image
from tests.deploy.render import ROLES, ROOT

LISTED = """\
global.cert='/etc/ssl/one.pem'
global.find-links='/no/such/folder'
install.index-url='https://index.example/simple'
global.default-timeout='180'
:env:.find-links='{wheels} file://{index}/simple'
"""


def test_missing_programs_are_named(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "scripts.images", "--folder", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "the images cannot be built here: buildah and debootstrap and unshare not found" in done.stderr
    assert not list(tmp_path.iterdir())


def test_unknown_role_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "scripts.images", "--roles", "gateway,kitchen"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "--roles: must be among target, draft, gateway, got kitchen" in done.stderr


@pytest.mark.parametrize(
    ("attribute", "value", "words"),
    [
        ("platform.machine", lambda: "aarch64", "got Linux aarch64"),
        ("os.geteuid", lambda: 1000, "must run as root"),
        ("shutil.disk_usage", lambda _: shutil._ntuple_diskusage(10**12, 10**12, 10**9), "got 1 GB"),
    ],
)
def test_each_reason_is_named(
    attribute: str, value: object, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, _, name = attribute.partition(".")
    monkeypatch.setattr(host, "PROGRAMS", ())
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 0))
    monkeypatch.setattr(getattr(host, module), name, value)
    assert words in str(host.lacking(tmp_path, "cpu"))


def test_every_role_is_built_the_target_first() -> None:
    assert set(ORDER) == set(ROLES)
    assert ORDER[0] == "target"
    assert image("gateway", "cuda") == image("gateway", "cpu")
    assert image("draft", "cuda") != image("draft", "cpu")


def test_builds_use_the_pip_settings_of_this_machine(tmp_path: Path) -> None:
    wheels, index = tmp_path / "wheels", tmp_path / "index"
    wheels.mkdir()
    (index / "simple").mkdir(parents=True)
    conf = pip_settings.pip_conf(LISTED.format(wheels=wheels, index=index))
    assert conf == (
        f"[global]\ncert = /etc/ssl/one.pem\nfind-links = {wheels} file://{index}/simple\n"
        "index-url = https://index.example/simple\n"
    )
    assert pip_settings.folders(conf) == (index, wheels)
    assert pip_settings.pip_conf("") == "[global]\n"


DRIVER = """
#include <Python.h>
#include "cuda.h"
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "cuda_utils", NULL, ANSWER, NULL};
PyMODINIT_FUNC PyInit_cuda_utils(void) { return PyModule_Create(&module); }
"""


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """Create an environment whose triton is only a driver, prepared as in a CUDA image."""
    if shutil.which("gcc") is None:
        pytest.skip("gcc is not installed")
    backend = tmp_path / "site" / "triton" / "backends" / "nvidia"
    (backend / "include").mkdir(parents=True)
    (backend / "driver.c").write_text(DRIVER)
    (backend / "include" / "cuda.h").write_text("#define ANSWER 0\n")
    (tmp_path / "site" / "triton" / "__init__.py").touch()
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "venv" / "lib").mkdir()
    python = tmp_path / "venv" / "bin" / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path}/site exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "apt-get").symlink_to(shutil.which("true") or "/bin/true")
    path = f"{tools}:{os.environ['PATH']}"
    subprocess.run(
        [ROOT / "deploy" / "images" / "triton-module.sh", tmp_path / "venv"],
        env={**os.environ, "PATH": path},
        check=True,
        capture_output=True,
    )
    return tmp_path / "venv"


def compiled(environment: Path, source: Path, out: Path) -> subprocess.CompletedProcess[str]:
    options = ["-O3", "-shared", "-fPIC", "-Wno-psabi", "-o", str(out), "-l:libcuda.so.1", "-L/usr/lib"]
    command = [str(environment / "bin" / "triton-module"), str(source), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_triton_module_needs_no_compiler(environment: Path, tmp_path: Path) -> None:
    out, source = tmp_path / "cuda_utils.so", tmp_path / "main.c"
    source.write_text(DRIVER)
    done = compiled(environment, source, out)
    assert done.returncode == 0, done.stderr
    # It is linked with the node's driver; here a stand-in of that name.
    load = (
        "import importlib.util as u; s = u.spec_from_file_location('cuda_utils', '{}'); u.module_from_spec(s)"
    )
    command = [sys.executable, "-c", load.format(out)]
    stub = tmp_path / "driver"
    stub.mkdir()
    subprocess.run(
        ["gcc", "-shared", "-Wl,-soname,libcuda.so.1", "-o", stub / "libcuda.so.1", "-x", "c", os.devnull],
        check=True,
    )
    with_driver = {**os.environ, "LD_LIBRARY_PATH": str(stub)}
    loaded = subprocess.run(command, env=with_driver, capture_output=True, text=True, check=False)
    assert loaded.returncode == 0, loaded.stderr
    assert b"libcuda.so.1" in out.read_bytes()


def test_other_sources_are_refused(environment: Path, tmp_path: Path) -> None:
    source = tmp_path / "main.c"
    source.write_text(f"{DRIVER}// another\n")
    done = compiled(environment, source, tmp_path / "out.so")
    assert done.returncode == 1
    assert "this image has no compiler" in done.stderr
    assert not (tmp_path / "out.so").exists()
