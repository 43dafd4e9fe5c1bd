"""What the parser of each program says of a call, without doing what it asks for.

helm and kubectl run with the address of a cluster that does not answer: a call that only this stops is well
formed. What they can do without a cluster, they do.
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import typer
import yaml
from google.protobuf.json_format import ParseDict, ParseError
from jsonschema.exceptions import ValidationError
from typer._click.exceptions import ClickException

from galley.cli.app import app
from galley.common.config.settings import parse_settings
from galley.pb.galley.v1 import galley_pb2
from scripts.chart_schema import ROLES, settings_of
from tests.deploy import schemas
from tests.deploy.render import default_values, tool
from tests.repo.commands.recording import ROOT, Call

UNPARSED = {
    "cosign": "a Go program that no package index here has",
    "docker": "Debian's has neither compose nor buildx; tests/deploy checks Dockerfiles and compose.yaml",
    "gh": "a Go program that no package index here has",
    "git": "it would change the repository",
    "kind": "a Go program that no package index here has",
    "minikube": "a Go program that no package index here has",
    "pip": "tests/repo/test_installs.py installs what the pages install",
    "tar": "it packs files that only the reader has",
    "valkey-cli": "it runs in the store's pod, and no package has its client",
}
"""Programs whose calls no parser here can check, each with the reason."""

_NOWHERE = "127.0.0.1:1"
_NO_CLUSTER = re.compile(r"connection refused|cluster unreachable|was refused", re.IGNORECASE)
# For charts of others and for images in registries, which cannot be fetched, only the flags are read.
_REMOTE = re.compile(r"^(oci|https?)://")


def problem(call: Call, folder: Path) -> str:
    """Return what is wrong with a call that is made in `folder`; empty: nothing."""
    if call.program in UNPARSED:
        return ""
    parser = _PARSERS.get(call.program)
    if parser is None:
        return f"{call.program}: no parser knows it; add one, or a line to UNPARSED"
    return _wrong_ports(call.arguments) or parser(call, folder)


@functools.cache
def _ports() -> frozenset[int]:
    """Return the ports of the chart's roles."""
    values = default_values()
    of_roles = (values[role].items() for role in ROLES)
    return frozenset(value for role in of_roles for name, value in role if name.lower().endswith("port"))


def _wrong_ports(words: Sequence[str]) -> str:
    """Return which ports of Galley's pods and Services, in arguments of a call, the chart does not have."""
    text = " ".join(words)
    named = re.findall(r"\bgalley-[\w.-]+:(\d{4,5})\b", text)
    if "port-forward" in words and "/galley" in text:
        named += [word.rpartition(":")[2] for word in words if re.fullmatch(r"(\d+:)?\d+", word)]
    wrong = [port for port in named if int(port) not in _ports()]
    return f"the chart has no port {', '.join(wrong)}" if wrong else ""


def mention_problem(call: Call, folder: Path) -> str:
    """Return what is wrong with a command in a sentence, which may lack arguments and values of flags."""
    words = [*call.arguments, "x"] if call.arguments[-1].startswith("-") else list(call.arguments)
    match call.program:
        case "galley" if words[0] not in ROLES:
            return _mentioned(words)
        case "helm" | "kubectl":
            return _succeeds(folder, tool(call.program), *words, "--help")
    return problem(call, folder)


def _mentioned(words: Sequence[str]) -> str:
    group: Any = typer.main.get_command(app)
    command = group if words[0].startswith("-") else group.commands.get(words[0])
    if command is None:
        return f"galley: no such command: {words[0]}"
    known = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
    unknown = [word for word in words if word.startswith("-") and word not in known | {"-", "--help"}]
    return f"galley: no such options: {', '.join(unknown)}" if unknown else ""


def _run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "KUBECONFIG": os.devnull, "HELM_KUBEAPISERVER": f"http://{_NOWHERE}"}
    return subprocess.run(
        command, cwd=folder, env=environment, input="", capture_output=True, text=True, check=False
    )


@functools.cache
def _needs_only_a_cluster(*command: str) -> str:
    """Return why a command that reads no file fails, except for the missing cluster; empty otherwise."""
    done = _run(ROOT, *command)
    return "" if done.returncode == 0 or _NO_CLUSTER.search(done.stderr) else done.stderr


def _succeeds(folder: Path, *command: str) -> str:
    done = _run(folder, *command)
    return "" if done.returncode == 0 else done.stderr


def _helm(call: Call, folder: Path) -> str:
    verbs = [one for one in call.arguments if not one.startswith("-")]
    if any(_REMOTE.match(one) for one in call.arguments) or verbs[0] == "repo":
        return _succeeds(folder, tool("helm"), *call.arguments, "--help")
    match verbs[0]:
        case "install":
            return _succeeds(folder, tool("helm"), *call.arguments, "--dry-run=client")
        case "upgrade":
            # It reads the release before it renders.
            dropped = ("--install", "--reuse-values", "--reset-then-reuse-values")
            kept = [one for one in call.arguments if one not in dropped]
            kept[kept.index("upgrade")] = "template"
            return _succeeds(folder, tool("helm"), *kept)
        case "lint" | "package" | "show" | "template":
            return _succeeds(folder, tool("helm"), *call.arguments)
    return _needs_only_a_cluster(tool("helm"), *call.arguments)


def _kubectl(call: Call, folder: Path) -> str:
    own, _, inner = _split(call.arguments, "--")
    verbs = [one for one in own if not one.startswith("-")]
    options = dict(zip(own, [*own[1:], ""], strict=True))
    source = options.get("-f") or options.get("--filename") or ""
    if "-k" in own:
        return _succeeds(folder, tool("kubectl"), "kustomize", options["-k"])
    if source and not _REMOTE.match(source):
        return _manifests(call.stdin if source == "-" else (folder / source).read_text())
    if "create" in verbs and not source:
        return _succeeds(folder, tool("kubectl"), *call.arguments, "--dry-run=client")
    if source:
        return _succeeds(folder, tool("kubectl"), *call.arguments, "--help")
    found = _needs_only_a_cluster(tool("kubectl"), "--server", f"http://{_NOWHERE}", *call.arguments)
    if inner and not found:
        # `env NAME=VALUE` stands before the program where the page gives it variables.
        words = [one for one in inner if not re.match(r"env$|\w+=", one)]
        found = "" if words[0] in HARMLESS_IN_A_POD else problem(Call(words[0], tuple(words[1:])), folder)
    return found


HARMLESS_IN_A_POD = ("cat", "printenv", "sh")
UNDESCRIBED = {"Gateway": "the chart renders none", "GatewayClass": "the chart renders none"}
"""Kinds whose schemas are not here, each with the reason."""


def _manifests(text: str) -> str:
    documents = [document for document in yaml.safe_load_all(text) if document]
    if not documents:
        return "no manifest is written to kubectl"
    try:
        for document in documents:
            if document["kind"] not in UNDESCRIBED:
                schemas.check(document)
    except ValidationError as error:
        return f"{error.json_path}: {error.message}"
    return ""


def _galley(call: Call, folder: Path) -> str:
    group: Any = typer.main.get_command(app)
    arguments = _unabridged(call.arguments)
    if arguments[0].startswith("-"):
        return "" if arguments[0] in ("--version", "--help") else f"galley: no such option: {arguments[0]}"
    if arguments[0] not in group.commands:
        return f"galley: no such command: {arguments[0]}"
    if arguments[0] in ROLES:
        return _service(arguments[0], arguments[1:])
    try:
        group.commands[arguments[0]].make_context(arguments[0], arguments[1:])
    except (typer.Exit, ClickException) as error:
        return "" if isinstance(error, typer.Exit) else error.format_message()
    return ""


def _unabridged(arguments: Sequence[str]) -> list[str]:
    return [one for one in arguments if one != "…"]


def _python(call: Call, folder: Path) -> str:
    if call.arguments[0] != "-m":
        return "python: must run a module"
    module, arguments = call.arguments[1], _unabridged(call.arguments[2:])
    if module == "galley.cli":
        return _galley(Call("galley", tuple(arguments)), folder)
    if module.removeprefix("services.") in ROLES:
        return _service(module.removeprefix("services."), arguments)
    return "" if find_spec(module) is not None else f"python: no module {module}"


def _service(role: str, arguments: list[str]) -> str:
    try:
        parse_settings(settings_of(role), arguments, role, "")
    except SystemExit as ended:
        return f"exit status {ended.code}" if ended.code else ""
    return ""


@functools.cache
def _make_in_root(arguments: tuple[str, ...]) -> str:
    return _succeeds(ROOT, "make", "--dry-run", f"VENV={sys.prefix}", *arguments)


def _make(call: Call, folder: Path) -> str:
    return _make_in_root(call.arguments)


def _curl(call: Call, folder: Path) -> str:
    body = dict(zip(call.arguments, call.arguments[1:], strict=False)).get("-d", "{}")
    json.loads(body)
    moved = [re.sub(r"^(https?://)[^/]+", rf"\g<1>{_NOWHERE}", one) for one in call.arguments]
    done = _run(folder, "curl", "--noproxy", "*", *moved)
    return "" if done.returncode == 7 else f"exit status {done.returncode}: {done.stderr}"


def _buf(call: Call, folder: Path) -> str:
    moved = [re.sub(r"^(https?://)[^/]+", rf"\g<1>{_NOWHERE}", one) for one in call.arguments]
    done = _run(folder, str(Path(sys.prefix) / "bin" / "buf"), *moved, "--schema", str(ROOT / "proto"))
    if "refused" not in done.stderr:
        return done.stderr
    return _message(call.arguments, moved[-1].split("/", 3)[-1])


def _grpcurl(call: Call, folder: Path) -> str:
    """No package has grpcurl, but what it sends can be read."""
    flags = [one for one in call.arguments if one.startswith("-")]
    known = {"-plaintext", "-d", "-H", "-cacert", "-cert", "-key", "-authority"}
    if not known >= set(flags):
        return f"grpcurl: must use only {', '.join(sorted(known))}, got {', '.join(flags)}"
    return _message(call.arguments, call.arguments[-1])


def _message(arguments: Sequence[str], method: str) -> str:
    """Return why the argument of -d is no request of `method`, which is SERVICE/METHOD."""
    service, _, name = method.partition("/")
    described = galley_pb2.DESCRIPTOR.services_by_name.get(service.removeprefix("galley.v1."))
    found = described and described.methods_by_name.get(name)
    if not found:
        return f"{method}: not in the proto file"
    body = json.loads(arguments[arguments.index("-d") + 1])
    try:
        ParseDict(body, getattr(galley_pb2, found.input_type.name)())
    except ParseError as error:
        return str(error)
    return ""


def _split(words: Sequence[str], at: str) -> tuple[Sequence[str], str, Sequence[str]]:
    return (words[: words.index(at)], at, words[words.index(at) + 1 :]) if at in words else (words, "", ())


_PARSERS: dict[str, Callable[[Call, Path], str]] = {
    "buf": _buf,
    "curl": _curl,
    "galley": _galley,
    "grpcurl": _grpcurl,
    "helm": _helm,
    "kubectl": _kubectl,
    "make": _make,
    "python": _python,
}
