"""What containers are told, as the kubelet would tell them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.proofs.boot.dockerfile import last_stage
from tests.proofs.boot.environment import PodFacts, command_of, environment_of
from tests.proofs.boot.images import Image
from tests.proofs.boot.launch import CannotRun, security_of
from tests.proofs.boot.names import Answers, Served, Service
from tests.proofs.boot.objects import NoSuchObject, Objects, secret
from tests.proofs.boot.policies import Endpoint
from tests.proofs.boot.volumes import Volumes

FACTS = PodFacts("pod-0", "app", "uid", "10.0.0.7", "10.0.0.1", {"zone": "a"}, {})


def objects(**data: bytes) -> Objects:
    return Objects([secret("words", "app", data)], "app")


def test_later_variables_are_made_of_earlier_ones() -> None:
    container = {
        "env": [
            {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "ADDRESS", "value": "$(IP):1 $(LATER) $$(IP)"},
            {"name": "LATER", "value": "x"},
            {"name": "ZONE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['zone']"}}},
            {"name": "WORD", "valueFrom": {"secretKeyRef": {"name": "words", "key": "one"}}},
        ],
        "envFrom": [{"prefix": "W_", "secretRef": {"name": "words"}}],
        "args": ["--to", "$(ADDRESS)"],
    }
    given = environment_of(container, FACTS, objects(one=b"1"), {"ZONE": "of the image", "KEPT": "yes"})
    assert given["ADDRESS"] == "10.0.0.7:1 $(LATER) $(IP)"
    assert (given["ZONE"], given["KEPT"], given["WORD"], given["W_one"]) == ("a", "yes", "1", "1")
    assert command_of(container, ["run"], ["it"], given) == ["run", "--to", given["ADDRESS"]]
    assert command_of({"command": ["other"]}, ["run"], ["it"], given) == ["other"]
    assert command_of({}, ["run"], ["it"], given) == ["run", "it"]


@pytest.mark.parametrize(
    "source",
    [
        {"secretKeyRef": {"name": "words", "key": "two"}},
        {"secretKeyRef": {"name": "nothing", "key": "one"}},
        {"configMapKeyRef": {"name": "words", "key": "one"}},
        {"fieldRef": {"fieldPath": "status.podName"}},
    ],
)
def test_what_names_nothing_is_an_error(source: dict[str, Any]) -> None:
    with pytest.raises(NoSuchObject):
        environment_of({"env": [{"name": "X", "valueFrom": source}]}, FACTS, objects(one=b"1"), {})


def made(spec: dict[str, Any], given: Objects, folder: Path) -> Volumes:
    volumes = Volumes(
        spec, FACTS, given, folder / "v", folder / "c", lambda path, _: path.mkdir(parents=True)
    )
    volumes.make()
    return volumes


def test_files_of_a_secret_change_all_at_once(tmp_path: Path) -> None:
    spec = {"volumes": [{"name": "s", "secret": {"secretName": "words", "defaultMode": 0o440}}]}
    given = objects(one=b"1", two=b"2")
    volumes = made(spec, given, tmp_path)
    [mount] = volumes.mounts({"volumeMounts": [{"name": "s", "mountPath": "/s"}]})
    assert mount.read_only
    before = (mount.source / "one").resolve()
    assert before.stat().st_mode & 0o777 == 0o440
    given.add(secret("words", "app", {"one": b"11", "two": b"22"}))
    volumes.refresh()
    assert [(mount.source / name).read_bytes() for name in ("one", "two")] == [b"11", b"22"]
    assert not before.exists()


def test_a_volume_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(NoSuchObject, match="there is none"):
        made({"volumes": [{"name": "s", "secret": {"secretName": "gone"}}]}, objects(), tmp_path)
    with pytest.raises(NoSuchObject, match="no claim"):
        made({"volumes": [{"name": "s", "persistentVolumeClaim": {"claimName": "c"}}]}, objects(), tmp_path)
    with pytest.raises(NoSuchObject, match="no volume"):
        made({}, objects(), tmp_path).mounts({"volumeMounts": [{"name": "s", "mountPath": "/s"}]})


DOCKERFILE = """
ARG BASE=debian  # not a comment
FROM ${BASE} AS build
ENV PATH=/lost
FROM ${BASE}
ARG USERS=7
# a comment \\
ENV PATH=/venv/bin:$PATH \\
    # within
    WORD="two words"
USER ${USERS}:8
WORKDIR /work
ENTRYPOINT ["python", "-m", "it"]
CMD ["--port", "1"]
"""


def test_an_image_runs_as_its_dockerfile_says(tmp_path: Path) -> None:
    path = tmp_path / "Dockerfile"
    path.write_text(DOCKERFILE)
    stage = last_stage(path)
    assert stage.env["PATH"].startswith("/venv/bin:/usr/local/sbin")
    assert stage.env["WORD"] == "two words"
    assert (stage.entrypoint, stage.cmd) == (("python", "-m", "it"), ("--port", "1"))
    assert (stage.ids(), stage.workdir) == ((7, 8), "/work")
    image = Image("it", stage)
    container = {"name": "c", "securityContext": {"capabilities": {"drop": ["ALL"], "add": ["KILL"]}}}
    assert security_of({"securityContext": {"fsGroup": 9}}, container, image).user == 7
    assert security_of({}, container, image).capabilities == ("CAP_KILL",)
    with pytest.raises(CannotRun, match="root"):
        security_of({"securityContext": {"runAsNonRoot": True, "runAsUser": 0}}, container, image)


def test_names_stand_for_pods_that_are_ready() -> None:
    served = [
        Served(Endpoint(f"db-{n}", f"10.0.0.{n}", "app", {"role": "db"}, {}), n != 2, f"db-{n}", "db")
        for n in (1, 2, 3)
    ]
    spec = {"selector": {"role": "db"}, "clusterIP": "None"}
    answers = Answers([Service("db", "app", spec, ""), Service("one", "app", spec, "10.96.0.1")], served)
    assert answers.of("db.app.svc.cluster.local.") == ["10.0.0.1", "10.0.0.3"]
    assert answers.of("db-3.db.app.svc.cluster.local") == ["10.0.0.3"]
    assert answers.of("db-2.db.app.svc.cluster.local") == []
    assert answers.of("one.app.svc.cluster.local") == ["10.96.0.1"]
    assert answers.of("db") == []


def test_a_service_sends_nobody_to_a_pod_without_its_port() -> None:
    spec = {"selector": {"role": "db"}, "ports": [{"port": 1, "targetPort": "sql"}]}
    served = [
        Served(Endpoint("db", "10.0.0.1", "app", {"role": "db"}, {"sql": 7}), ready=True),
        Served(Endpoint("guest", "10.0.0.2", "app", {"role": "db"}, {}), ready=True),
    ]
    [address] = Service("db", "app", spec, "10.96.0.1").addresses(served)
    assert address.backends == (("10.0.0.1", 7),)
