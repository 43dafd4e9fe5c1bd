"""Move every module to its place in the new tree: read `mapping.txt`, `git mv`, rewrite imports and paths.

Usage: move.py MAPPING. Run in the root of a clean checkout; then regenerate the stubs and format.
"""
import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path.cwd()
STAY = {"gateway", "draft", "target"}
PACKAGES = {"core", "common", "client", "cli", "benching", "top", "tracing", "distill", "engine"}
NEW_PACKAGE = {"benching": "bench", "tracing": "trace"}


def git(*args: str) -> str:
    return subprocess.run(["git", *args], check=True, capture_output=True, text=True).stdout


def read_mapping(path: Path) -> dict[str, str]:
    files = [p for p in git("ls-files", "services").split() if p.endswith(".py") and "/pb/" not in p]
    modules = {".".join(Path(p).with_suffix("").parts[1:]) for p in files if not p.endswith("__init__.py")}
    exact: dict[str, str] = {}
    stars: list[tuple[str, str]] = []
    for line in path.read_text().splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        old, new = line.split()
        if old.endswith(".*"):
            stars.append((old[:-2], new[:-2]))
        elif old in modules:
            exact[old] = new
    for module in sorted(modules - set(exact)):
        for old, new in sorted(stars, key=lambda s: -len(s[0])):
            if module.startswith(old + "."):
                exact[module] = new + module[len(old):]
                break
        else:
            if module != "__init__":
                raise SystemExit(f"no place for {module}")
    return {"services." + k: v for k, v in exact.items()}


def package_of(dotted: str) -> str:
    """Map a package's dotted name."""
    parts = dotted.split(".")
    if parts[:3] == ["services", "common", "pb"]:
        return ".".join(["galley", "pb", *parts[3:]])
    if len(parts) > 1 and parts[1] in PACKAGES:
        return ".".join(["galley", NEW_PACKAGE.get(parts[1], parts[1]), *parts[2:]])
    return dotted


def translate(dotted: str, mapping: dict[str, str]) -> str:
    parts = dotted.split(".")
    for size in range(len(parts), 1, -1):
        head = ".".join(parts[:size])
        if head in mapping:
            return ".".join([mapping[head], *parts[size:]])
    return package_of(dotted)


def rewrite_from_imports(text: str, mapping: dict[str, str]) -> str:
    """Rewrite `from services.pkg import module` where `module` moved."""
    tree = ast.parse(text)
    lines = text.splitlines(keepends=True)
    for node in sorted((n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)), key=lambda n: -n.lineno):
        if not node.module or not node.module.startswith("services"):
            continue
        hit = [a for a in node.names if f"{node.module}.{a.name}" in mapping]
        if not hit:
            continue
        indent = " " * node.col_offset
        comment = ""
        last = lines[node.end_lineno - 1]
        if "#" in last:
            comment = "  " + last[last.index("#"):].rstrip("\n")
        out = []
        for alias in node.names:
            full = f"{node.module}.{alias.name}"
            if full in mapping:
                package, _, name = mapping[full].rpartition(".")
                bound = alias.asname or alias.name
                out.append(f"{indent}from {package} import {name}" + (f" as {bound}" if bound != name else "") + comment + "\n")
            else:
                out.append(f"{indent}from {node.module} import {alias.name}" + (f" as {alias.asname}" if alias.asname else "") + comment + "\n")
        lines[node.lineno - 1 : node.end_lineno] = out
    return "".join(lines)


def main() -> None:
    mapping = read_mapping(Path(sys.argv[1]))
    if len(set(mapping.values())) != len(mapping):
        raise SystemExit("two modules share a place")
    skip = ("bench/results/", "bench/prompts/", "CHANGELOG.md")
    texts = [Path(p) for p in git("ls-files").split("\n") if p and not p.startswith(skip) and not p.endswith((".safetensors", ".png", ".svg", ".npz", "_pb2.py", "_pb2_grpc.py", ".pyi"))]
    dotted = re.compile(r"\bservices(?:\.[a-z_][a-z0-9_]*)+")
    slashed = re.compile(r"\bservices(?:/[a-z_][a-z0-9_]*)+(\.py\b)?")

    def by_dot(match: re.Match[str]) -> str:
        return translate(match.group(0), mapping)

    def by_slash(match: re.Match[str]) -> str:
        path = match.group(0)
        stem = path.removesuffix(".py")
        return translate(stem.replace("/", "."), mapping).replace(".", "/") + path[len(stem):]

    for path in (t for t in texts if t.is_file() and not t.is_symlink()):
        try:
            text = path.read_text()
        except (UnicodeDecodeError, FileNotFoundError):
            continue
        if "services" not in text:
            continue
        new = rewrite_from_imports(text, mapping) if path.suffix == ".py" else text
        new = slashed.sub(by_slash, dotted.sub(by_dot, new))
        if new != text:
            path.write_text(new)

    moves = {}
    for old, new in mapping.items():
        a, b = old.replace(".", "/") + ".py", new.replace(".", "/") + ".py"
        if a != b:
            moves[a] = b
    for path in git("ls-files", "services").split():
        if path in moves or path.endswith("/__init__.py"):
            continue
        parts = Path(path).parts
        if parts[1] in PACKAGES and not path.endswith(".py") and "/pb/" not in path:
            moves[path] = "/".join(["galley", NEW_PACKAGE.get(parts[1], parts[1]), *parts[2:]])
    moves["services/tracing/page.html"] = "galley/trace/show/page.html"
    moves["services/tracing/page.css"] = "galley/trace/show/page.css"
    for path in git("ls-files", "services/gateway/scripts").split():
        moves[path] = path.replace("gateway/scripts", "gateway/store/scripts")
    Path("galley").mkdir(exist_ok=True)
    git("mv", "services/common/pb", "galley/pb")
    link = Path("bench/prompts")
    link.unlink()
    link.symlink_to("../galley/bench/prompts")
    for a, b in moves.items():
        Path(b).parent.mkdir(parents=True, exist_ok=True)
        git("mv", a, b)
    for path in git("ls-files", "services").split():
        parts = Path(path).parts
        if path.endswith("/__init__.py") and len(parts) > 2 and parts[1] in PACKAGES:
            git("rm", "-q", "-f", path)
    for folder in {p.parent for p in Path("galley").rglob("*.py")} | {p.parent for p in Path("services").rglob("*.py")}:
        while folder != Path("."):
            init = folder / "__init__.py"
            if not init.exists():
                init.write_text("")
            folder = folder.parent
    git("add", "-A", "galley", "services")


main()
