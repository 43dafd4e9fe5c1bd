"""Drive a `SteppedCore` as a target does, and say what a plain forward pass of the model would draw."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import torch

from galley.core.records import PositionLogprobs
from galley.core.sampling_params import SamplingParams
from galley.core.step import Draw, Sampled, StepOutcome
from services.target.engine.vllm.protocol import NewSequence, SequenceStep, SteppedCore

MOST_DRAFT_TOKENS = 16

# Return draft tokens for the next step: of the prompt, the drawn tokens, all that will be drawn, and chance.
Propose = Callable[[Sequence[int], Sequence[int], Sequence[int], Random], Sequence[int]]


def no_tokens(
    _prompt: Sequence[int], _drawn: Sequence[int], _truth: Sequence[int], _random: Random
) -> list[int]:
    return []


def right_tokens(
    _prompt: Sequence[int], drawn: Sequence[int], truth: Sequence[int], random: Random
) -> list[int]:
    return list(truth[len(drawn) : len(drawn) + random.randint(0, MOST_DRAFT_TOKENS)])


def wrong_tokens(
    prompt: Sequence[int], drawn: Sequence[int], truth: Sequence[int], random: Random
) -> list[int]:
    return [token ^ 1 for token in right_tokens(prompt, drawn, truth, random)]


def spoiled_tokens(
    prompt: Sequence[int], drawn: Sequence[int], truth: Sequence[int], random: Random
) -> list[int]:
    """Return right tokens, one of which is replaced."""
    tokens = right_tokens(prompt, drawn, truth, random)
    if tokens:
        tokens[random.randrange(len(tokens))] ^= 1
    return tokens


def ngram_tokens(
    prompt: Sequence[int], drawn: Sequence[int], _truth: Sequence[int], random: Random
) -> list[int]:
    """Return what followed the last token where it occurred before."""
    known = [*prompt, *drawn]
    for at in range(len(known) - 2, -1, -1):
        if known[at] == known[-1]:
            return known[at + 1 : at + 1 + random.randint(1, MOST_DRAFT_TOKENS)]
    return []


PROPOSALS: Mapping[str, Propose] = {
    "no": no_tokens,
    "right": right_tokens,
    "wrong": wrong_tokens,
    "spoiled": spoiled_tokens,
    "n-gram": ngram_tokens,
}


@dataclass(slots=True)
class Continued:
    """What a sequence drew, step by step."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    steps: list[SequenceStep] = field(default_factory=list)

    def take(self, step: SequenceStep) -> None:
        self.steps.append(step)
        if isinstance(step.outcome, Sampled):
            self.tokens += step.outcome.tokens
            self.logprobs += step.outcome.logprobs

    @property
    def draws(self) -> int:
        return sum(isinstance(step.outcome, Sampled) for step in self.steps)


def sequence_of(
    name: str, prompt: Sequence[int], sampling: SamplingParams | None = None, **draw: Any
) -> NewSequence:
    """Return a sequence of its own salt, so that it finds no cached prefix."""
    wanted: dict[str, Any] = {"prompt_len": len(prompt), "stop_token_ids": frozenset(), "min_tokens": 0}
    params = sampling or SamplingParams(temperature=0.0)
    made = Draw(params, prompt, **(wanted | draw))
    return NewSequence(name, prompt, made, salt=name, priority=0, arrival_ns=1)


class Reference:
    """The same model by transformers' own forward pass, one sequence at a time, with Galley's draw."""

    def __init__(self, directory: Path, dtype: torch.dtype = torch.float32) -> None:
        from transformers import AutoModelForCausalLM  # noqa: PLC0415  # seconds, and not for every test

        self._model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)

    def outcome(self, draw: Draw) -> StepOutcome:
        """Return what one pass over the history and the draft tokens draws."""
        from galley.engine.sampler import draw_all  # noqa: PLC0415  # numba must come after vLLM's start

        tokens = torch.tensor([[*draw.history, *draw.draft_tokens]])
        with torch.inference_mode():
            logits = self._model(tokens).logits[0, -1 - len(draw.draft_tokens) :]
        return draw_all(logits.float(), [draw])[0]

    def continue_(self, draw: Draw, count: int) -> Continued:
        """Return the next `count` tokens after `draw.history`."""
        from galley.engine.sampler import draw_all  # noqa: PLC0415  # numba must come after vLLM's start

        made, tokens, past = Continued(), list(draw.history), None
        fed = tokens
        with torch.inference_mode():
            for _ in range(count):
                output = self._model(torch.tensor([fed]), past_key_values=past, use_cache=True)
                past = output.past_key_values
                (outcome,) = draw_all(output.logits[0, -1:].float(), [replace(draw, history=tokens)])
                made.take(SequenceStep(outcome, len(tokens)))
                fed = made.tokens[-1:]
                tokens = [*draw.history, *made.tokens]
        return made


def continue_all(
    core: SteppedCore,
    sequences: Iterable[NewSequence],
    count: int,
    propose: Propose = no_tokens,
    truths: Mapping[str, Sequence[int]] | None = None,
    *,
    seed: int = 0,
    most_steps: int = 1000,
) -> dict[str, Continued]:
    """Step the sequences together until each has drawn `count` tokens or failed; then end them."""
    named = {sequence.id: sequence for sequence in sequences}
    made = {name: Continued() for name in named}
    random = Random(seed)
    for sequence in named.values():
        core.add(sequence)
    try:
        for _ in range(most_steps):
            open_ = [name for name, so_far in made.items() if not _is_over(so_far, count)]
            if not open_:
                return {name: _cut(so_far, count) for name, so_far in made.items()}
            drafts = {
                name: tuple(
                    propose(named[name].tokens, made[name].tokens, (truths or {}).get(name, ()), random)
                )
                for name in open_
            }
            for name, step in core.step(drafts).items():
                made[name].take(step)
    finally:
        core.end(named)
    raise AssertionError(
        f"after {most_steps} steps: {[(name, len(run.tokens)) for name, run in made.items()]}"
    )


def _is_over(so_far: Continued, count: int) -> bool:
    last = so_far.steps[-1].outcome if so_far.steps else None
    return len(so_far.tokens) >= count or not (last is None or isinstance(last, Sampled))


def _cut(made: Continued, count: int) -> Continued:
    return Continued(made.tokens[:count], made.logprobs[:count], made.steps)
