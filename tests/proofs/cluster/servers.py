"""The API server of a proof: a context that its user names, a cluster of kind, or kube-apiserver alone."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.proofs.cluster.commands import Commands, Failed

ASSETS = "KUBEBUILDER_ASSETS"
_IMAGES = tuple(f"galley-{role}" for role in ("gateway", "draft", "target"))
_READY_S = 60.0
_POLL_S = 0.5


class NoServer(Exception):
    """Here is no API server that may be used; the message says why, one line for each that was looked for."""


@dataclass(frozen=True, slots=True)
class Server:
    name: str
    commands: Commands
    # False: an API server alone, which accepts objects and runs no pod.
    has_nodes: bool


@contextlib.contextmanager
def server(context: str, version: str, environ: Mapping[str, str]) -> Iterator[Server]:
    """Yield the first API server that can be had, and remove what was made for it. Raises NoServer."""
    if context:
        yield _named(context)
        return
    kind, assets = _kind_problem(), _assets_problem(environ)
    if not kind:
        with _of_kind(version) as made:
            yield made
    elif not assets:
        with _alone(Path(environ[ASSETS])) as made:
            yield made
    else:
        unset = "CONTEXT: not set; the current context of a kubeconfig is never used by itself"
        raise NoServer("\n".join((unset, f"kind: {kind}", f"{ASSETS}: {assets}")))


def _named(context: str) -> Server:
    commands = Commands(context=context)
    try:
        commands.kubectl("get", "--raw", "/readyz", "--request-timeout=10s")
    except Failed as failure:
        raise NoServer(f"CONTEXT {context}: {failure}") from None
    return Server(context, commands, has_nodes=True)


def _kind_problem() -> str:
    missing = [name for name in ("kind", "docker") if shutil.which(name) is None]
    if missing:
        return f"{' and '.join(missing)} must be on the PATH"
    if subprocess.run(["docker", "info"], capture_output=True, check=False).returncode != 0:
        return "docker must have a running daemon"
    return ""


def _assets_problem(environ: Mapping[str, str]) -> str:
    folder = environ.get(ASSETS)
    if not folder:
        return "not set: must be a folder with kube-apiserver and etcd"
    missing = [name for name in ("kube-apiserver", "etcd") if not os.access(Path(folder, name), os.X_OK)]
    return f"{folder}: has no {' and no '.join(missing)}" if missing else ""


@contextlib.contextmanager
def _of_kind(version: str) -> Iterator[Server]:
    """Make a cluster of its own with the images that docker has, and delete it."""
    name = f"galley-{secrets.token_hex(3)}"
    with tempfile.TemporaryDirectory(prefix="galley-") as folder:
        kubeconfig = Path(folder, "kubeconfig")
        where = ["--name", name, "--kubeconfig", str(kubeconfig)]
        images = [f"{image}:{version}" for image in _IMAGES]
        try:
            _kind("create", "cluster", *where, "--wait", "180s")
            _kind("load", "docker-image", "--name", name, *images)
            yield Server(f"kind {name}", Commands(kubeconfig=kubeconfig), has_nodes=True)
        finally:
            subprocess.run(["kind", "delete", "cluster", *where], check=False)


def _kind(*arguments: str) -> None:
    done = subprocess.run(["kind", *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NoServer(f"kind {' '.join(arguments[:2])}: {done.stderr.strip()[-2000:]}")


@contextlib.contextmanager
def _alone(assets: Path) -> Iterator[Server]:
    """Start etcd and kube-apiserver on loopback, without controllers, and stop them."""
    with tempfile.TemporaryDirectory(prefix="galley-") as folder, contextlib.ExitStack() as running:
        place = Path(folder)
        store, peers, port = (_free_port() for _ in range(3))
        urls = [f"http://127.0.0.1:{each}" for each in (store, peers)]
        running.enter_context(
            _process(
                place / "etcd.log",
                *(str(assets / "etcd"), "--data-dir", str(place / "etcd")),
                *("--listen-client-urls", urls[0], "--advertise-client-urls", urls[0]),
                *("--listen-peer-urls", urls[1]),
            )
        )
        kubeconfig = _credentials(place, port)
        log = place / "kube-apiserver.log"
        running.enter_context(
            _process(
                log,
                *(str(assets / "kube-apiserver"), "--etcd-servers", urls[0]),
                *("--bind-address", "127.0.0.1", "--secure-port", str(port), "--cert-dir", str(place)),
                *("--service-cluster-ip-range", "10.0.0.0/24", "--authorization-mode", "RBAC"),
                *("--token-auth-file", str(place / "tokens.csv")),
                *("--service-account-issuer", "https://kubernetes.default.svc"),
                *("--service-account-signing-key-file", str(place / "accounts.key")),
                *("--service-account-key-file", str(place / "accounts.key")),
                # No controller makes the account `default` of a namespace.
                *("--disable-admission-plugins", "ServiceAccount"),
            )
        )
        commands = Commands(kubeconfig=kubeconfig)
        _wait_until_ready(commands, log)
        yield Server(f"kube-apiserver of {assets}", commands, has_nodes=False)


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port


def _credentials(place: Path, port: int) -> Path:
    """Write a signing key and a token; return a kubeconfig that uses it."""
    token = secrets.token_hex(16)
    (place / "tokens.csv").write_text(f"{token},admin,admin,system:masters\n")
    key = ["openssl", "genrsa", "-out", str(place / "accounts.key"), "2048"]
    subprocess.run(key, capture_output=True, check=True)
    cluster = {"server": f"https://127.0.0.1:{port}", "certificate-authority": str(place / "apiserver.crt")}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "proof", "cluster": cluster}],
        "users": [{"name": "admin", "user": {"token": token}}],
        "contexts": [{"name": "proof", "context": {"cluster": "proof", "user": "admin"}}],
        "current-context": "proof",
    }
    path = place / "kubeconfig"
    path.write_text(yaml.safe_dump(config))
    return path


def _wait_until_ready(commands: Commands, log: Path) -> None:
    end = time.monotonic() + _READY_S
    while True:
        try:
            commands.kubectl("get", "--raw", "/readyz")
        except Failed as failure:
            if time.monotonic() > end:
                raise NoServer(f"kube-apiserver: {failure}\n{log.read_text()[-2000:]}") from None
            time.sleep(_POLL_S)
        else:
            return


@contextlib.contextmanager
def _process(log: Path, *command: str) -> Iterator[None]:
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
        try:
            yield
        finally:
            process.terminate()
            try:
                process.wait(10.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
