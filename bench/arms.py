"""The things that a round benchmark compares: our stack under each strategy and k, and transformers.

An arm is a name: `plain` (our k = 0), `<strategy>-<k>` (`ngram-4`, `model-4`, `oracle-4`), and the peer's
`transformers`, `transformers-lookup` and `transformers-assisted` (with a draft model).
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any, Protocol

import psutil

from galley.bench.answers import Answer
from galley.bench.gateway import Ask, speculation_of

PEER_PLAIN = "transformers"
PEER_LOOKUP = "transformers-lookup"
PEER_ASSISTED = "transformers-assisted"
PEERS = (PEER_PLAIN, PEER_LOOKUP, PEER_ASSISTED)
PEER_LOOKUP_TOKENS = 4


class Side(Protocol):
    """Answers prompts, one at a time."""

    async def answer(self, arm: str, ask: Ask) -> Answer:
        """The answer that `arm` gives to `ask`."""
        ...


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


class TransformersSide:
    """transformers' `generate` in this process, on the same weights: plain, with prompt lookup, assisted.

    `assistant` is the draft of PEER_ASSISTED, a causal language model of the target's vocabulary.
    """

    def __init__(self, model_dir: Path, dtype: str, threads: int, assistant: Any = None) -> None:
        import torch  # noqa: PLC0415  # only where the peer is asked for
        from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415
        from transformers.utils.logging import disable_progress_bar  # noqa: PLC0415

        disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers has no types for it
        self.threads = threads
        self._torch = torch
        self._tokenizer: Any = AutoTokenizer.from_pretrained(model_dir)  # nosec B615  # a directory
        kind: torch.dtype = getattr(torch, dtype)
        model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=kind)  # nosec B615  # a directory
        self._model = model.eval()
        self._assistant = assistant

    @property
    def models(self) -> tuple[Any, Any]:
        """The target and the assistant."""
        return self._model, self._assistant

    async def answer(self, arm: str, ask: Ask) -> Answer:
        """Generate one answer in a thread."""
        return await asyncio.to_thread(self._generate, arm, ask)

    def _generate(self, arm: str, ask: Ask) -> Answer:
        # Here: torch keeps the number for each thread that calls it.
        self._torch.set_num_threads(self.threads)
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
            output = self._model.generate(
                **inputs, **_generation_options(arm, ask, self._assistant), streamer=clock
            )
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


def _generation_options(arm: str, ask: Ask, assistant: Any) -> dict[str, Any]:
    options: dict[str, Any] = {"max_new_tokens": ask.max_tokens, "do_sample": ask.temperature > 0}
    if ask.temperature > 0:
        # Pure temperature, as on our side: the model's own generation config would cut the distribution.
        options |= {"temperature": ask.temperature, "top_k": 0, "top_p": 1.0}
    if arm == PEER_LOOKUP:
        options["prompt_lookup_num_tokens"] = PEER_LOOKUP_TOKENS
    if arm == PEER_ASSISTED:
        options["assistant_model"] = assistant
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
