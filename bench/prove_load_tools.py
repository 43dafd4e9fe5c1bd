"""Prove that load tools of other people run to their end without a failed request: `make prove-load-tools`.

guidellm and aiperf (NVIDIA's) send streamed chats over HTTP to a stack with a tiny model, one at a time and
many at once. Each lives in an environment of its own below .galley; guidellm finds Galley's torch. Their
tokenizer is the default model's own directory, so that nothing is fetched. Writes
bench/results/load-tools.json; exits 1 if a request failed or an answer had too few tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.harness import BENCH, Goal, goal_lines, result_path, write_record
from bench.loops.http import save_model
from galley.common.models.files import DEFAULT_MODEL
from galley.engine.load.resolve import resolve_model
from galley.stack.stack import Stack, StackOptions

PROMPT_TOKENS, OUTPUT_TOKENS = 64, 32
_RUN_S = 900
_FOLDER = BENCH.parent / ".galley" / "load-tools"
# guidellm needs some torch to be imported; PyPI's would bring several GB of CUDA libraries.
_WITHOUT_TORCH = "torch; sys_platform == 'never'\n"


@dataclass(frozen=True, slots=True)
class Work:
    url: str
    model: str
    tokenizer: Path
    streams: int
    requests: int
    out: Path


@dataclass(frozen=True, slots=True)
class Finding:
    """One run of a tool, by its own figures."""

    tool: str
    version: str
    streams: int
    completed: int
    failed: int
    output_tokens: int
    output_tokens_per_s: float
    ttft_ms: float


@dataclass(frozen=True, slots=True)
class Tool:
    """A load tool: its package, the words that start it, and what its report says."""

    package: str
    words: Callable[[Work], Sequence[str]]
    report: str
    read: Callable[[Any], tuple[int, int, int, float, float]]


def _guidellm(work: Work) -> Sequence[str]:
    return (
        *("run", "--backend", f"kind=openai_http,target={work.url}"),
        *("--profile", f"kind=concurrent,streams={work.streams}"),
        *("--constraint", f"kind=max_requests,count={work.requests}"),
        *("--tokenizer", f"kind=hf_auto,model={work.tokenizer}"),
        *("--data", f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}"),
        *("--output", f"kind=json,path={work.out / 'guidellm.json'}", "--disable-console"),
    )


def _read_guidellm(report: Any) -> tuple[int, int, int, float, float]:
    [found] = report["benchmarks"]
    of, sent = found["metrics"], found["scheduler_state"]
    tokens = of["output_token_count"]["successful"]["total_sum"]
    return (
        sent["successful_requests"],
        sent["created_requests"] - sent["successful_requests"],
        round(tokens),
        of["output_tokens_per_second"]["successful"]["mean"],
        of["time_to_first_token_ms"]["successful"]["median"],
    )


def _aiperf(work: Work) -> Sequence[str]:
    return (
        *("profile", "--model", work.model, "--url", work.url, "--endpoint-type", "chat", "--streaming"),
        *("--concurrency", f"{work.streams}", "--request-count", f"{work.requests}"),
        *(
            "--tokenizer",
            str(work.tokenizer),
            "--use-server-token-count",
            "--extra-inputs",
            "ignore_eos:true",
        ),
        *("--synthetic-input-tokens-mean", f"{PROMPT_TOKENS}", "--output-tokens-mean", f"{OUTPUT_TOKENS}"),
        *("--artifact-dir", str(work.out), "--ui", "none"),
    )


def _read_aiperf(report: Any) -> tuple[int, int, int, float, float]:
    failed = sum(error["count"] for error in report["error_summary"])
    if not report["is_complete"]:
        failed = max(failed, 1)
    return (
        round(report["request_count"]["avg"]),
        failed,
        round(report["total_output_tokens"]["avg"]),
        report["output_token_throughput"]["avg"],
        report["time_to_first_token"]["p50"],
    )


TOOLS = {
    "guidellm": Tool("guidellm==0.8.1", _guidellm, "guidellm.json", _read_guidellm),
    "aiperf": Tool("aiperf==0.13.0", _aiperf, "profile_export_aiperf.json", _read_aiperf),
}


def installed(name: str) -> Path:
    """Return the folder of a tool's environment, which is made if it is not there."""
    folder = _FOLDER / name
    python, done = folder / "bin" / "python", folder / ".made-of"
    package = TOOLS[name].package
    if done.exists() and done.read_text() == package:
        return folder
    uv = Path(sys.executable).with_name("uv")
    subprocess.run((uv, "venv", "--quiet", "--clear", "--python", sys.executable, folder), check=True)
    overrides = folder / "overrides.txt"
    overrides.write_text(_WITHOUT_TORCH)
    install = (uv, "pip", "install", "--quiet", "--python", python, "--overrides", overrides, package)
    subprocess.run(install, check=True)
    [packages] = folder.glob("lib/python*/site-packages")
    # Behind the tool's own packages, Galley's are found.
    torch = importlib.util.find_spec("torch")
    if torch is not None and torch.origin is not None:
        (packages / "galley.pth").write_text(f"{Path(torch.origin).parents[1]}\n")
    done.write_text(package)
    return folder


def run_tool(name: str, work: Work) -> Finding:
    """Run a tool to its end. Raise RuntimeError if it ends with an error."""
    tool, folder = TOOLS[name], installed(name)
    command = (str(folder / "bin" / name), *tool.words(work))
    log = work.out / f"{name}.log"
    with log.open("wb") as out:
        done = subprocess.run(
            command, check=False, stdout=out, stderr=out, cwd=work.out, timeout=_RUN_S, env=_environment()
        )
    if done.returncode:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-30:])
        raise RuntimeError(f"{name} ended with status {done.returncode}:\n{tail}")
    completed, failed, tokens, per_s, ttft_ms = tool.read(json.loads((work.out / tool.report).read_text()))
    version = tool.package.partition("==")[2]
    return Finding(name, version, work.streams, completed, failed, tokens, round(per_s, 1), round(ttft_ms, 1))


def _environment() -> dict[str, str]:
    """Return an environment in which nothing is fetched from a hub, and bytecode is kept."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return kept | {"HF_HUB_DISABLE_TELEMETRY": "1", "TRANSFORMERS_VERBOSITY": "error"}


def goals(findings: Sequence[Finding], requests: int) -> list[Goal]:
    """Bound the failed requests, and the tokens that are missing."""
    found = []
    for one in findings:
        what = f"failed requests of {requests}, {one.tool} {one.version}, {one.streams} streams"
        found.append(
            Goal("failed", what, str(one.failed), "0", one.failed == 0 and one.completed == requests)
        )
        missing = one.completed * OUTPUT_TOKENS - one.output_tokens
        what = f"tokens missing in its answers, {one.tool}, {one.streams} streams"
        found.append(Goal("tokens", what, str(missing), "0", missing == 0))
    return found


async def findings_of(tools: Sequence[str], streams: Sequence[int], requests: int) -> list[Finding]:
    """Start a stack, and run each tool against it."""
    tokenizer = resolve_model(DEFAULT_MODEL)
    found = []
    with tempfile.TemporaryDirectory(prefix="galley-tools-") as folder:
        model = save_model(Path(folder) / "model")
        options = StackOptions(model=str(model), draft_model="none", dtype="float32", http_port=0)
        async with Stack(options) as stack:
            url = f"http://{stack.http_addresses[0]}"
            for name in tools:
                for count in streams:
                    out = Path(folder) / f"{name}-{count}"
                    out.mkdir()
                    work = Work(url, model.name, tokenizer, count, requests, out)
                    one = await asyncio.to_thread(run_tool, name, work)
                    print(one)
                    found.append(one)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tools; return 0 if no request failed."""
    parser = argparse.ArgumentParser(prog="python -m bench.prove_load_tools", description=__doc__)
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=list(TOOLS))
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 16], help="at once (default: 1 16)")
    parser.add_argument("--requests", type=int, default=32, help="of each run (default: %(default)s)")
    parser.add_argument("--results", type=Path, default=BENCH / "results")
    given = parser.parse_args(argv)
    for name in given.tools:
        installed(name)
    findings = asyncio.run(findings_of(given.tools, given.streams, given.requests))
    judged = goals(findings, given.requests)
    path = result_path("load-tools", given.results)
    record = {
        "runs": findings,
        "goals": judged,
    }
    write_record(path, record)
    print(f"record: {path}", *goal_lines(judged), sep="\n")
    return 0 if all(goal.met for goal in judged) else 1


if __name__ == "__main__":
    sys.exit(main())
