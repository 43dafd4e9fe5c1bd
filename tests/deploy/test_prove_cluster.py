"""`make prove-cluster`: which server it takes, why there is none, and what it removes after a failure."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.proofs.cluster.__main__ import NO_SERVER, main, prove
from tests.proofs.cluster.commands import Commands
from tests.proofs.cluster.servers import Server

RECORDS = '#!/bin/sh\necho "{name} $*" >>"{log}"\ncase "$*" in {cases} esac\n'


def program(folder: Path, name: str, cases: str = "") -> Path:
    """Write a program that notes how it was called, and then does what `cases` says."""
    path = folder / name
    path.write_text(RECORDS.format(name=name, log=folder / "log", cases=cases))
    path.chmod(0o755)
    return path


class Here:
    """This machine with the programs of a folder first on its PATH, and no kubeconfig."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self._folder, self._capsys = folder, capsys

    def reason(self, *arguments: str) -> str:
        """Return why it cannot be proved here."""
        assert main(arguments) == NO_SERVER
        return self._capsys.readouterr().out

    def calls(self) -> list[str]:
        log = self._folder / "log"
        return log.read_text().splitlines() if log.exists() else []


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Here:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.delenv("KUBEBUILDER_ASSETS", raising=False)
    return Here(tmp_path, capsys)


def test_without_a_server_it_says_what_it_looked_for(here: Here) -> None:
    output = here.reason()
    assert "CONTEXT: not set" in output
    assert "must be on the PATH" in output
    assert "KUBEBUILDER_ASSETS: not set" in output


def test_it_says_what_kind_and_the_assets_lack(
    here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path, "kind")
    program(tmp_path, "docker", "info) exit 1;;")
    program(tmp_path, "etcd")
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(tmp_path))
    output = here.reason()
    assert "kind: docker must have a running daemon" in output
    assert f"KUBEBUILDER_ASSETS: {tmp_path}: has no kube-apiserver" in output
    assert here.calls() == ["docker info"], "a cluster was made"


def test_a_cluster_of_kind_that_gets_no_images_is_deleted(here: Here, tmp_path: Path) -> None:
    program(tmp_path, "kind", 'load*) echo "image not present locally" >&2; exit 1;;')
    program(tmp_path, "docker")
    assert "image not present locally" in here.reason()
    names = {line.split()[line.split().index("--name") + 1] for line in here.calls() if "--name" in line}
    assert len(names) == 1
    assert here.calls()[-1].startswith("kind delete cluster")


def test_a_context_that_does_not_answer_is_named(here: Here) -> None:
    assert "CONTEXT nowhere: kubectl" in here.reason("--context", "nowhere")


@pytest.fixture
def fake(tmp_path: Path) -> Server:
    """Return a server whose kubectl succeeds, and warns of what is applied; its `helm test` fails."""
    program(tmp_path, "kubectl", '*apply*) echo "Warning: would violate PodSecurity" >&2;;')
    program(tmp_path, "helm", 'test*) echo "pod failed" >&2; exit 1;;')
    return Server("fake", Commands(find=lambda name: str(tmp_path / name)), has_nodes=True)


def test_a_failed_step_ends_the_proof_and_removes_the_namespace(fake: Server, tmp_path: Path) -> None:
    record = prove(fake, "registry.example.com", {"default": {}})
    assert not record["held"]
    assert [step["step"] for step in record["steps"] if not step["problem"]] == ["install"]
    assert "pod failed" in record["steps"][-1]["problem"]
    assert record["refused"] == {"default": ["Warning: would violate PodSecurity"]}
    calls = (tmp_path / "log").read_text().splitlines()
    namespace = calls[0].split()[-1]
    assert calls[0] == f"kubectl create namespace {namespace}"
    assert f"kubectl delete namespace {namespace}" in calls[-2]
    assert not any("helm uninstall" in call for call in calls)
