"""The things that a round benchmark compares: our stack under each strategy and k, and transformers.

An arm is a name: `plain` (our k = 0), `<strategy>-<k>` (`ngram-4`, `model-4`, `oracle-4`), and the peer's
`transformers` and `transformers-lookup`.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import psutil

from bench.harness import Answer, Prompt, Rounds
from services.client.client import GalleyClient, Message, Speculation

if TYPE_CHECKING:
    from pathlib import Path

    from services.common.pb.galley.v1 import galley_pb2 as pb

PLAIN = "plain"
PEER_PLAIN = "transformers"
PEER_LOOKUP = "transformers-lookup"
PEERS = (PEER_PLAIN, PEER_LOOKUP)
PEER_LOOKUP_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Ask:
    """How a prompt is put; the same to every arm."""

    prompt: Prompt
    temperature: float
    seed: int
    max_tokens: int


class Side(Protocol):
    """Answers prompts, one at a time."""

    async def answer(self, arm: str, ask: Ask) -> Answer:
        """The answer that `arm` gives to `ask`."""
        ...


def speculation_of(arm: str) -> Speculation:
    """`plain` is speculation off, `ngram-4` that strategy at that k; ValueError if it is neither."""
    if arm == PLAIN:
        return Speculation(off=True)
    strategy, dash, k = arm.rpartition("-")
    if not (strategy and dash and k.isdigit()):
        raise ValueError(f"no arm {arm!r}: plain, <strategy>-<k>, {' or '.join(PEERS)}")
    return Speculation(k=int(k), strategy=strategy)


def strategies_of(arms: tuple[str, ...]) -> tuple[str, ...]:
    """The strategies that these arms need of the draft, each once."""
    named = [speculation_of(arm).strategy for arm in arms if arm not in PEERS]
    return tuple(dict.fromkeys(name for name in named if name))


class Cpu:
    """The CPU time of some processes, user and system, of all their threads."""

    def __init__(self, pids: list[int]) -> None:
        self._processes = [psutil.Process(pid) for pid in pids]

    def seconds(self) -> float:
        """Spent so far."""
        times = [process.cpu_times() for process in self._processes]
        return float(sum(spent.user + spent.system for spent in times))


class GalleySide:
    """Our stack, asked through its client; its CPU time is that of all its processes, the client's aside."""

    def __init__(self, client: GalleyClient, cpu: Cpu) -> None:
        self._client = client
        self._cpu = cpu

    async def answer(self, arm: str, ask: Ask) -> Answer:
        """Stream one answer; raises GalleyRpcError where the stream does."""
        tokens: list[int] = []
        at_s: list[float] = []
        from_draft: list[bool] = []
        prompt_tokens = 0
        finished: pb.Finished | None = None
        cpu_before = self._cpu.seconds()
        began = time.perf_counter()
        stream = self._client.generate(
            [Message("user", ask.prompt.text)],
            max_tokens=ask.max_tokens,
            temperature=ask.temperature,
            seed=ask.seed,
            speculation=speculation_of(arm),
        )
        async for event in stream:
            now = time.perf_counter() - began
            match event.WhichOneof("event"):
                case "started":
                    prompt_tokens = event.started.prompt_tokens
                case "chunk":
                    tokens += event.chunk.token_ids
                    from_draft += event.chunk.from_draft
                    at_s += [now] * len(event.chunk.token_ids)
                case "finished":
                    finished = event.finished
                case _:
                    pass
        wall_s = time.perf_counter() - began
        if finished is None:
            raise RuntimeError(f"{arm} ended {ask.prompt.id} without saying so")
        return Answer(
            prompt_id=ask.prompt.id,
            prompt_tokens=prompt_tokens,
            tokens=tuple(tokens),
            at_s=tuple(at_s),
            wall_s=wall_s,
            cpu_s=self._cpu.seconds() - cpu_before,
            from_draft=tuple(from_draft),
            rounds=_rounds(finished.speculation),
        )


def _rounds(stats: pb.SpeculationStats) -> Rounds:
    return Rounds(
        rounds=stats.rounds,
        drafted=stats.drafted,
        verified=stats.verified,
        accepted=stats.accepted,
        accepted_at=tuple(stats.accepted_at),
        verified_at=tuple(stats.verified_at),
        orchestration_ns=tuple(stats.orchestration_ns),
        round_ns=stats.round_ns,
        draft_compute_ns=stats.draft_compute_ns,
        target_compute_ns=stats.verify_compute_ns,
    )


class TransformersSide:
    """transformers' `generate` in this process, plain and with prompt lookup, on the same weights."""

    def __init__(self, model_dir: Path, dtype: str, threads: int) -> None:
        import torch  # noqa: PLC0415  # only where the peer is asked for
        from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415
        from transformers.utils.logging import disable_progress_bar  # noqa: PLC0415

        disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers has no types for it
        torch.set_num_threads(threads)
        self._torch = torch
        self._tokenizer: Any = AutoTokenizer.from_pretrained(model_dir)
        model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=getattr(torch, dtype))
        self._model = model.eval()

    async def answer(self, arm: str, ask: Ask) -> Answer:
        """Generate one answer in a thread."""
        return await asyncio.to_thread(self._generate, arm, ask)

    def _generate(self, arm: str, ask: Ask) -> Answer:
        cpu_before = time.process_time()
        began = time.perf_counter()
        inputs = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": ask.prompt.text}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        prompt_tokens = inputs["input_ids"].shape[1]
        clock = _Clock(began)
        self._torch.manual_seed(ask.seed)
        with self._torch.inference_mode():
            output = self._model.generate(**inputs, **_generation_options(arm, ask), streamer=clock)
        wall_s = time.perf_counter() - began
        tokens = output[0, prompt_tokens:].tolist()
        return Answer(
            prompt_id=ask.prompt.id,
            prompt_tokens=prompt_tokens,
            tokens=tuple(tokens),
            # Should a streamer not be told of the last tokens, they came at the end.
            at_s=tuple((clock.at_s + [wall_s] * len(tokens))[: len(tokens)]),
            wall_s=wall_s,
            cpu_s=time.process_time() - cpu_before,
        )


def _generation_options(arm: str, ask: Ask) -> dict[str, Any]:
    options: dict[str, Any] = {"max_new_tokens": ask.max_tokens, "do_sample": ask.temperature > 0}
    if ask.temperature > 0:
        # Pure temperature, as on our side: the model's own generation config would cut the distribution.
        options |= {"temperature": ask.temperature, "top_k": 0, "top_p": 1.0}
    if arm == PEER_LOOKUP:
        options["prompt_lookup_num_tokens"] = PEER_LOOKUP_TOKENS
    return options


class _Clock:
    """A streamer of transformers that notes when each token came."""

    def __init__(self, began: float) -> None:
        self._began = began
        self._prompt_seen = False
        self.at_s: list[float] = []

    def put(self, value: Any) -> None:
        """First the prompt, then the tokens of each step."""
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        self.at_s += [time.perf_counter() - self._began] * value.numel()

    def end(self) -> None:
        """Nothing is held back."""
