"""The release: its workflow, and what it makes of the chart and the wheel."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts.release import chart, schema, wheel
from tests.deploy.render import CHART, LOCKS, ROLES, ROOT, Manifest, pods, tool

FILE = ROOT / ".github" / "workflows" / "release.yml"
WORKFLOW: dict[str, Any] = yaml.safe_load(FILE.read_text())
JOBS: dict[str, Any] = WORKFLOW["jobs"]
LINTERS = (("actionlint",), ("zizmor", "--offline", "--quiet"))
DIGESTS = {name: f"sha256:{number:064x}" for number, name in enumerate((*chart.NAMES, chart.store_image()))}
REGISTRY = "registry.example.com/team"
SCHEMA = (json.loads((CHART / "values.schema.json").read_text()), (CHART / "values.yaml").read_text())


def lint(linter: tuple[str, ...], file: Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.prefix) / "bin" / linter[0]), *linter[1:], str(file)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("file", sorted(FILE.parent.glob("*.yml")), ids=lambda file: file.stem)
@pytest.mark.parametrize("linter", LINTERS, ids=lambda linter: linter[0])
def test_linters_find_nothing(linter: tuple[str, ...], file: Path) -> None:
    done = lint(linter, file)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("linter", "right", "wrong", "words"),
    [
        (LINTERS[0], "needs.check.outputs.version", "needs.check.outputs.verson", "verson"),
        (LINTERS[0], "runs-on: ubuntu-24.04\n", "runs-on: ubuntu-24.04.04\n", "unknown"),
        (LINTERS[1], "@08c6903cd8c0fde910a37f88322edcfb5dd907a8 # v5.0.0", "@v5", "unpinned"),
        (LINTERS[1], "run: bash .ci/run", "run: bash .ci/run ${{ github.head_ref }}", "injection"),
    ],
)
def test_linters_find_mistakes(
    linter: tuple[str, ...], right: str, wrong: str, words: str, tmp_path: Path
) -> None:
    file = tmp_path / ".github" / "workflows" / "release.yml"
    file.parent.mkdir(parents=True)
    assert right in FILE.read_text()
    file.write_text(FILE.read_text().replace(right, wrong))
    done = lint(linter, file)
    assert done.returncode != 0
    assert words in done.stdout + done.stderr


def steps_with(text: str) -> list[dict[str, Any]]:
    return [step for job in JOBS.values() for step in job["steps"] if text in step.get("uses", "")]


def test_actions_are_pinned_with_their_versions() -> None:
    used = re.findall(r"uses: (.*)", FILE.read_text())
    assert len(used) > 20
    assert not [line for line in used if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line)]


def test_each_job_may_write_only_what_it_publishes() -> None:
    may_write = {
        f"{name}: {scope}"
        for name, job in JOBS.items()
        for scope, access in job["permissions"].items()
        if access == "write"
    }
    signing = {
        f"{job}: {scope}" for job in ("images", "chart") for scope in ("attestations", "id-token", "packages")
    }
    release = {f"release: {scope}" for scope in ("attestations", "contents", "id-token")}
    assert may_write == {"build: packages", "pypi: id-token", *signing, *release}


@pytest.mark.parametrize("step", steps_with("build-push-action"), ids=lambda step: step["id"])
def test_images_are_built_with_arguments_that_exist(step: dict[str, Any]) -> None:
    text = (ROOT / step["with"]["file"]).read_text()
    given = re.findall(r"^(\w+)=", step["with"]["build-args"], re.MULTILINE)
    assert set(given) <= set(re.findall(r"^ARG (\w+)", text, re.MULTILINE))
    assert step["with"]["file"] == f"services/{step['id']}/Dockerfile"
    assert f"galley-{step['id']}" in step["with"]["outputs"]
    assert (step["with"]["provenance"], step["with"]["sbom"]) == ("mode=max", True)


def test_every_role_has_an_image_for_both_platforms_and_for_cuda() -> None:
    variants = JOBS["build"]["strategy"]["matrix"]["include"]
    assert {one["variant"] for one in variants} == {"cpu-amd64", "cpu-arm64", "cuda-amd64", "vllm-cuda-amd64"}
    for one in variants:
        assert (LOCKS / f"torch-{one['device']}.txt").exists()
        engine = "-vllm" if one["engine"] == "vllm" else ""
        assert one["suffix"] == engine + ("-cuda" if one["device"] == "cuda" else "")
        assert ("arm" in one["runner"]) is one["variant"].endswith("arm64")
    assert {step["id"] for step in steps_with("build-push-action")} == set(ROLES)
    joined = JOBS["images"]["strategy"]["matrix"]["include"]
    assert {one["image"] for one in joined} == set(chart.NAMES)
    assert all((LOCKS / f"{one['sbom']}.txt").exists() for one in joined)


def test_everything_that_is_run_is_here() -> None:
    text = FILE.read_text()
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(" ".join(re.findall(r"run: make (.*)", text)).split()) <= targets
    for path in re.findall(r"bash (\S+)", text):
        assert (ROOT / path).exists()
    assert (ROOT / "scripts" / "release" / "chart.py").exists()


def packaged(out: Path) -> Path:
    titled = out / "schema.json"
    titled.write_text(json.dumps(schema.described(*SCHEMA)))
    chart.Release(REGISTRY, "https://example.com/galley", DIGESTS, titled).package(out, tool("helm"))
    (package,) = out.glob("*.tgz")
    return package


def helm(*arguments: str | Path) -> str:
    done = subprocess.run([tool("helm"), *arguments], capture_output=True, text=True, check=True)
    return done.stdout


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packaged(tmp_path_factory.mktemp("chart"))


def images(manifests: list[Manifest]) -> set[str]:
    specs = pods(manifests).values()
    return {one["image"] for spec in specs for one in (*spec["containers"], *spec.get("initContainers", []))}


@pytest.mark.parametrize("variant", chart.VARIANTS)
def test_values_name_each_image_by_digest(variant: str, package: Path) -> None:
    file = package.parent / f"values-{variant}-images.yaml"
    text = helm("template", "galley", package, "--values", file)
    own = {f"{REGISTRY}/{name}:{chart.version()}@{DIGESTS[name]}" for name in chart.VARIANTS[variant]}
    store = f"{chart.store_image()}@{DIGESTS[chart.store_image()]}"
    assert images([one for one in yaml.safe_load_all(text) if one]) == {*own, store}


def test_the_package_needs_no_values(package: Path) -> None:
    text = helm("template", "galley", package)
    own = {f"{REGISTRY}/galley-{role}:{chart.version()}" for role in ROLES}
    assert images([one for one in yaml.safe_load_all(text) if one]) == {*own, chart.store_image()}


def test_artifact_hub_finds_images_and_repository(package: Path) -> None:
    metadata = yaml.safe_load(helm("show", "chart", package))
    assert metadata["home"] == "https://example.com/galley"
    listed = yaml.safe_load(metadata["annotations"]["artifacthub.io/images"])
    assert {one["name"]: one["image"] for one in listed} == {
        name: f"{REGISTRY}/{name}:{chart.version()}@{DIGESTS[name]}" for name in chart.NAMES
    }


def properties(node: object) -> Iterator[dict[str, Any]]:
    if isinstance(node, dict):
        yield from (one for one in node.get("properties", {}).values() if isinstance(one, dict))
        node = list(node.values())
    for inner in node if isinstance(node, list) else ():
        yield from properties(inner)


def test_the_packaged_schema_describes_the_values(package: Path) -> None:
    with tarfile.open(package) as archive:
        file = archive.extractfile("galley/values.schema.json")
        assert file is not None
        packaged = json.load(file)
    assert all(one["title"] for one in properties(packaged))
    drain = packaged["properties"]["gateway"]["properties"]["drainTimeoutSeconds"]
    assert drain["title"] == "Drain timeout seconds"
    assert drain["description"].startswith("Longest drain after SIGTERM, in seconds.")


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("httpPort", "HTTP port"),
        ("targetCPUUtilizationPercentage", "Target CPU utilization percentage"),
        ("kv_memory_mb", "Kv memory mb"),
        ("jwksUrl", "JWKS URL"),
    ],
)
def test_titles_are_keys_in_words(key: str, words: str) -> None:
    assert schema.title(key) == words


@pytest.mark.parametrize(
    ("registry", "digests", "words"),
    [
        ("ghcr.io/Owner", DIGESTS, "registry: must be lower case"),
        ("https://ghcr.io", DIGESTS, "without a scheme"),
        (REGISTRY, DIGESTS | {"galley-draft": "0.1.0"}, "galley-draft: must be sha256: and 64 hex digits"),
        (REGISTRY, {"galley-draft": DIGESTS["galley-draft"]}, "images: must be docker.io"),
    ],
)
def test_wrong_names_are_refused(
    registry: str, digests: dict[str, str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = tmp_path / "images.json", tmp_path / "out"
    file.write_text(json.dumps(digests))
    arguments = ["--registry", registry, "--repository", "https://example.com", "--images", str(file)]
    with pytest.raises(SystemExit) as ended:
        chart.main([*arguments, "--out", str(out)])
    assert ended.value.code == 2
    assert words in capsys.readouterr().err
    assert not out.exists()


def test_the_source_distribution_builds_the_whole_wheel(tmp_path: Path) -> None:
    """uv builds the wheel from the source distribution, as pip does where there is no wheel."""
    command = [str(Path(sys.prefix) / "bin" / "uv"), "build", "--quiet", "--out-dir", str(tmp_path)]
    subprocess.run([*command, "--build-constraint", "constraints.txt", str(ROOT)], cwd=ROOT, check=True)
    (built,) = tmp_path.glob("*.whl")
    assert list(wheel.problems(built, wheel.files_of_the_tree())) == []


def test_a_wheel_is_compared_with_the_tree(tmp_path: Path) -> None:
    file = tmp_path / "galley-1-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("galley/one.py", "")
        archive.writestr("galley/__pycache__/one.pyc", "")
        archive.writestr(
            "galley-1.dist-info/METADATA", "Name: galley\nVersion: 1\nLicense-Expression: Apache-2.0\n"
        )
    assert list(wheel.problems(file, {"galley/one.py", "services/two.lua"})) == [
        f"{file.name}: services/two.lua is missing",
        f"{file.name}: galley/__pycache__/one.pyc is not in the tree",
        f"{file.name}: METADATA has no Requires-Python",
        f"{file.name}: METADATA has no Description-Content-Type",
    ]


def test_a_tag_of_another_version_is_refused() -> None:
    environment = {**os.environ, "VENV": sys.prefix, "TAG": "v99.0.0"}
    command = [ROOT / "scripts" / "release" / "dry.sh"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"TAG: must be v{chart.version()}" in done.stderr
