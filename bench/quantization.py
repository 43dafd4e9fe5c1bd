"""`make bench-quantization`: what int8 weights cost in quality, and gain in time, on this machine.

Quality. Each arm computes the logits of the fixed prompts and of greedy answers with the engine as it
serves. Perplexity is that of the prompts' own text, which nothing was trained on or tuned with. Agreement is
the share of positions at which the arm's likeliest token is that of float32, over float32's greedy answers up
to their first loop. bfloat16 stands beside int8: its differences are those that everybody accepts.

Speed. Steps with int8 weights alternate with steps without, at a context of 256 tokens: one token each of 1
to 64 sessions, and a prompt of 256 tokens.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import cross_entropy

from bench.engine.sides import Case, OurStep
from bench.harness import (
    MIN_PAIRS,
    RESULTS,
    Goal,
    at_least,
    commit,
    goal_lines,
    machine,
    prompt_hashes,
    result_path,
    write_record,
)
from bench.loops.options import names
from bench.paired import alternate
from galley.bench.answers import loop_start
from galley.bench.summary import ratio_interval
from galley.bench.workloads import mixed_workload
from galley.common.models.files import DEFAULT_MODEL
from galley.common.models.tokenizer import Tokenizer
from galley.engine.batch import INT8, NONE
from galley.engine.load.module import parse_dtype
from galley.engine.load.resolve import resolve_model
from galley.engine.model import CausalModel, Rows

if TYPE_CHECKING:
    from galley.engine.batch import SessionCache

# Arms by name: dtype and quantization. The first is the reference.
ARMS = {
    "float32": ("float32", NONE),
    "bfloat16": ("bfloat16", NONE),
    "float32+int8": ("float32", INT8),
    "bfloat16+int8": ("bfloat16", INT8),
}
REFERENCE = "float32"
PARTS = ("quality", "speed")
CONTEXT = 256
# Each with the least speed-up that is a goal.
CASES = {
    Case(1, 1, CONTEXT): 1.5,
    Case(8, 1, CONTEXT): 1.25,
    Case(16, 1, CONTEXT): 1.25,
    Case(64, 1, CONTEXT): 1.0,
    Case(1, 256, CONTEXT): 1.0,
}
_BATCH = 16


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt: its own text, its chat form, and the reference's greedy answer, as tokens."""

    words: tuple[int, ...]
    prompt: tuple[int, ...]
    answer: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Quality:
    """Sums over texts: negative log-likelihood (nats) of `tokens`, and `agreed` of `positions` of answers.

    `whole` of `answers` agree at every position.
    """

    loss: float
    tokens: int
    agreed: int
    positions: int
    whole: int
    answers: int

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss / self.tokens)

    @property
    def agreement(self) -> float:
        return self.agreed / self.positions


def quality(model: CausalModel, texts: Sequence[Text]) -> Quality:
    losses, agreed = [], []
    for text in texts:
        logits = _logits(model, text.words)[:-1]
        losses.append(float(cross_entropy(logits, torch.tensor(text.words[1:]), reduction="sum")))
        likeliest = _logits(model, (*text.prompt, *text.answer))[len(text.prompt) - 1 : -1].argmax(1)
        agreed.append(int((likeliest == torch.tensor(text.answer)).sum()))
    return Quality(
        loss=sum(losses),
        tokens=sum(len(text.words) - 1 for text in texts),
        agreed=sum(agreed),
        positions=sum(len(text.answer) for text in texts),
        whole=sum(count == len(text.answer) for count, text in zip(agreed, texts, strict=True)),
        answers=len(texts),
    )


def _logits(model: CausalModel, tokens: Sequence[int]) -> torch.Tensor:
    """Return float32 logits [tokens, vocab]."""
    return model.forward([Rows(model.new_cache(), tokens, len(tokens))])[0]


def answered(model: CausalModel, texts: Sequence[Text], count: int) -> list[Text]:
    """Return the texts with greedy answers of at most `count` tokens, up to their end or first loop."""
    done = []
    for first in range(0, len(texts), _BATCH):
        batch = texts[first : first + _BATCH]
        for text, tokens in zip(batch, _greedy(model, [text.prompt for text in batch], count), strict=True):
            ends = [at for at, token in enumerate(tokens) if token in model.info.eos_token_ids]
            kept = tokens[: ends[0] + 1 if ends else count]
            done.append(dataclasses.replace(text, answer=tuple(kept[: loop_start(kept)])))
    return done


def _greedy(model: CausalModel, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    caches: list[SessionCache] = [model.new_cache() for _ in prompts]
    fed: list[Sequence[int]] = list(prompts)
    answers: list[list[int]] = [[] for _ in prompts]
    for _ in range(count):
        logits = model.forward([Rows(cache, tokens, 1) for cache, tokens in zip(caches, fed, strict=True)])
        drawn = [int(row.argmax()) for row in logits]
        for answer, token in zip(answers, drawn, strict=True):
            answer.append(token)
        fed = [[token] for token in drawn]
    return answers


def texts_of(model_dir: Path, count: int) -> list[Text]:
    """Return the first `count` fixed prompts, taken from the sets in turn."""
    tokenizer = Tokenizer.load(str(model_dir))
    return [
        Text(
            tuple(tokenizer.encode(prompt.text)),
            tuple(tokenizer.encode_chat([{"role": "user", "content": prompt.text}])),
        )
        for prompt in mixed_workload().prompts[:count]
    ]


def speed(
    plain: CausalModel, int8: CausalModel, pairs: int
) -> Iterator[tuple[Case, dict[str, tuple[float, ...]]]]:
    """Yield for each case the seconds of each pair, wall and CPU, without and with int8 weights."""
    for case in CASES:
        times = alternate({"plain": OurStep(plain, case), "int8": OurStep(int8, case)}, pairs)
        wall = {name: timed.wall_s for name, timed in times.items()}
        yield case, wall | {f"{name}_cpu": timed.cpu_s for name, timed in times.items()}


def goals_of(found: Mapping[Case, Mapping[str, Sequence[float]]], dtype: str) -> list[Goal]:
    ratios = {case: ratio_interval(times["plain"], times["int8"]) for case, times in found.items()}
    return [
        at_least("int8", f"step of {case}: {dtype} over int8", ratio, CASES[case], "x")
        for case, ratio in ratios.items()
    ]


def parse_options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.quantization",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default=DEFAULT_MODEL, help="hub id or directory (default: %(default)s)")
    parser.add_argument("--parts", type=names, default=PARTS, help=", ".join(PARTS))
    parser.add_argument("--arms", type=names, default=tuple(ARMS), help=", ".join(ARMS))
    parser.add_argument("--prompts", type=int, default=96, help="prompts of the sets (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=64, help="longest answer (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="auto", help="of the steps timed (default: as a target's)")
    parser.add_argument("--pairs", type=int, default=MIN_PAIRS, help="of each case (default: %(default)s)")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    for name, known in (("parts", PARTS), ("arms", ARMS)):
        if unknown := set(getattr(options, name)) - set(known):
            parser.error(f"--{name}: must be of {', '.join(known)}, got {', '.join(sorted(unknown))}")
    if options.pairs < MIN_PAIRS:
        parser.error(f"--pairs: must be at least {MIN_PAIRS}, got {options.pairs}")
    return options


def _load(options: argparse.Namespace, dtype: str, quantization: str) -> CausalModel:
    return CausalModel.load(
        resolve_model(options.model),
        dtype=parse_dtype(dtype, "cpu"),
        device="cpu",
        threads=options.threads,
        quantization=quantization,
    )


def _measure_quality(options: argparse.Namespace) -> dict[str, Quality]:
    reference = _load(options, *ARMS[REFERENCE])
    texts = answered(reference, texts_of(reference.info.directory, options.prompts), options.tokens)
    found = {}
    for name in options.arms:
        model = reference if name == REFERENCE else _load(options, *ARMS[name])
        found[name] = one = quality(model, texts)
        print(
            f"{name}: perplexity {one.perplexity:.3f} of {one.tokens} tokens; the likeliest token of float32 "
            f"at {one.agreement:.2%} of {one.positions} positions, in {one.whole} of {one.answers} answers "
            "at all",
            flush=True,
        )
    return found


def _measure_speed(options: argparse.Namespace) -> dict[Case, dict[str, tuple[float, ...]]]:
    plain, int8 = _load(options, options.dtype, NONE), _load(options, options.dtype, INT8)
    found = {}
    for case, times in speed(plain, int8, options.pairs):
        found[case] = times
        wall, cpu = (ratio_interval(times[f"plain{kind}"], times[f"int8{kind}"]) for kind in ("", "_cpu"))
        print(f"{case}: {plain.info.dtype} over int8: {wall} in time, {cpu} in CPU time", flush=True)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 0 even if a goal is missed, which is a finding and no error."""
    options = parse_options(argv)
    path = result_path("quantization", options.results)
    record: dict[str, Any] = {"name": "quantization", **_kept(path, options.parts)}
    run = {
        "commit": commit(),
        "machine": machine(),
        "options": {name: value for name, value in vars(options).items() if name != "results"},
    }
    if "quality" in options.parts:
        found = {
            name: dataclasses.asdict(one) | {"perplexity": one.perplexity, "agreement": one.agreement}
            for name, one in _measure_quality(options).items()
        }
        record["quality"] = {**run, "prompt_sha256": prompt_hashes(), "arms": found}
    if "speed" in options.parts:
        times = _measure_speed(options)
        goals = goals_of(times, str(parse_dtype(options.dtype, "cpu")).removeprefix("torch."))
        record["speed"] = {**run, "steps": {str(case): one for case, one in times.items()}, "goals": goals}
        print(*goal_lines(goals), sep="\n")
    write_record(path, record)
    return 0


def _kept(path: Path, parts: Sequence[str]) -> dict[str, Any]:
    """Return the parts of an earlier record that this run does not measure."""
    earlier = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return {part: earlier[part] for part in PARTS if part in earlier and part not in parts}


if __name__ == "__main__":
    sys.exit(main())
