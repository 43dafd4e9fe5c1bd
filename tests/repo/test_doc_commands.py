"""Every shell command of the pages runs, or passes the parser of its program."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from galley.version import __version__
from tests.deploy.render import Manifest
from tests.deploy.test_first_call import WITH_ALL, notes
from tests.repo.commands.parsers import UNPARSED, mention_problem, problem
from tests.repo.commands.recording import ROOT, Shell, blocks, inline

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "helm" / "galley" / "README.md"]
PAGES += sorted((ROOT / "docs").rglob("*.md"))
# Files that a page's reader has from an earlier step, and what stands for them.
FILES = {"mine.yaml": ROOT / "helm" / "galley" / "examples" / "values-llama70b-tp4.yaml"}


def has_commands(page: Path) -> bool:
    return bool(blocks(page.read_text()) or inline(page.read_text()))


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def problems(page: str, folder: Path, *, tells_the_past: bool = False) -> list[str]:
    shell = Shell(folder)
    for name, source in FILES.items():
        (shell.folder / name).write_bytes(source.read_bytes())
    found = []
    checks = [(block, problem) for block in blocks(page)]
    if not tells_the_past:
        checks += [(mention, mention_problem) for mention in inline(page)]
    for script, check in checks:
        calls, failure = shell.run(script)
        found += [f"{script}\n  {failure}"] if failure else []
        found += [f"{call}\n  {wrong}" for call in calls if (wrong := check(call, shell.folder))]
    return found


@pytest.mark.parametrize("page", [page for page in PAGES if has_commands(page)], ids=name_of)
def test_commands_are_what_their_programs_take(page: Path, tmp_path: Path) -> None:
    found = problems(page.read_text(), tmp_path, tells_the_past=page.parent.name == "decisions")
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("helm install galley helm/galley --set gateway.replica=2", "replica"),
        ("helm upgrade galley helm/galley --set target.kind=deamonset", "kind"),
        ("helm rollback galley --too", "unknown flag: --too"),
        ("kubectl get pods --name galley", "unknown flag"),
        ("kubectl create secret generic one --from-litteral=a=b", "unknown flag"),
        ("kubectl exec deployment/galley-gateway -- galley generate --endpint x:1 hello", "No such option"),
        (
            "kubectl apply -f - <<EOF\napiVersion: v1\nkind: Secret\nmetadata: {name: a}\nvalue: x\nEOF",
            "value",
        ),
        ("kubectl port-forward service/galley-gateway 50052:50061", "no port 50061"),
        ("galley top --metrics galley-target.galley:9464", "no port 9464"),
        ("galley generat hello", "no such command"),
        ("python -m services.target --tensor-paralel 2", "exit status 2"),
        ("python -m services.kitchen", "no module"),
        ("make no-such-target", "No rule to make target"),
        ("curl --no-such-flag http://127.0.0.1:8000/", "exit status 2"),
        ('grpcurl -plaintext -d \'{"txt": "a"}\' 127.0.0.1:50051 galley.v1.Generation/Generate', "txt"),
        ("grpcurl -plaintext -d '{}' 127.0.0.1:50051 galley.v1.Generation/Generat", "not in the proto file"),
        ("nomad run galley", "no parser knows it"),
        ("sha256sum no-such-file", "No such file"),
        ("for one in a b; do echo $one", "syntax error"),
    ],
)
def test_mistakes_are_found(wrong: str, words: str, tmp_path: Path) -> None:
    (found,) = problems(
        f"1. Do it:\n\n   ```sh\n   {wrong.replace(chr(10), chr(10) + '   ')}\n   ```\n", tmp_path
    )
    assert words in found


@pytest.mark.parametrize(
    "wrong", ["galley up --prt", "galley serv x", "helm upgrade --sett", "kubectl drain --nod", "make testt"]
)
def test_mistakes_in_sentences_are_found(wrong: str, tmp_path: Path) -> None:
    assert len(problems(f"Run `{wrong}` first.", tmp_path)) == 1


@pytest.mark.parametrize("values", [{}, WITH_ALL], ids=["plain", "with TLS and keys"])
def test_commands_of_the_notes(values: Manifest, tmp_path: Path) -> None:
    """What helm prints after an installation: commands stand two spaces in."""
    scripts = re.findall(r"(?:^  \S.*\n(?:^    .*\n)*)+", notes(values), re.MULTILINE)
    assert len(scripts) >= 2
    found = problems("".join(f"```sh\n{textwrap.dedent(script)}```\n" for script in scripts), tmp_path)
    assert not found, "\n".join(found)


def test_commands_name_the_version_of_the_code() -> None:
    named = r"(?:galley-[a-z-]+:|galley-|--version |tag v|origin v)(\d+\.\d+\.\d+)"
    found = {
        f"{name_of(page)}: {version}"
        for page in PAGES
        for block in blocks(page.read_text())
        for version in re.findall(named, block)
        if version != __version__
    }
    assert not found


def test_programs_without_a_parser_are_used() -> None:
    used = {word for page in PAGES for block in blocks(page.read_text()) for word in block.split()}
    assert set(UNPARSED) <= used
