"""The checks of a started core: drafts are verified as they must be, and how far its bits depend on a step.

One prompt is continued without draft tokens, with right ones, with wrong ones, and beside other sequences.
The rule of acceptance must hold in every run, or the replica does not serve. Whether the bits of the logprobs
agree between the runs is only reported: where they do not, a near tie may give another token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from galley.core.errors import UnsupportedModel
from galley.core.records import PositionLogprobs
from galley.core.sampling_params import SamplingParams
from galley.core.step import Draw, Sampled
from services.target.engine.vllm.protocol import NewSequence, SteppedCore

_PROMPT_TOKENS = 40
_DRAWN_TOKENS = 16
_DRAFT_TOKENS = 3
_LOGPROBS = 20
_OTHERS = 3
_STRIDE = 7919
_SAMPLING = SamplingParams(temperature=1.0, seed=1)

# Return the draft tokens to verify after these drawn ones.
Propose = Callable[[Sequence[int]], tuple[int, ...]]


@dataclass(slots=True)
class Run:
    """Drawn tokens and their logprobs; `lengths` is how many tokens each step drew."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)

    def digest(self) -> bytes:
        """Return a hash of all bits of the logprobs."""
        values = [(entry.logprob, *(logprob for _, logprob in entry.top)) for entry in self.logprobs]
        ids = [[token for token, _ in entry.top] for entry in self.logprobs]
        return blake2b(np.array(values, np.float32).tobytes() + np.array(ids, np.int64).tobytes()).digest()


@dataclass(frozen=True, slots=True)
class Probe:
    """`deterministic`: the bits were the same in all runs. `bits` is a hash of those of the plain run."""

    deterministic: bool
    bits: bytes


def probe(core: SteppedCore) -> Probe:
    """Return what the runs showed. Raise UnsupportedModel if drafts are not verified as they must be."""
    drafts = min(_DRAFT_TOKENS, core.max_draft_tokens)
    vocab = core.info.vocab_size
    plain = _continue(core, "plain", lambda _: ())

    def right(drawn: Sequence[int]) -> tuple[int, ...]:
        return tuple(plain.tokens[len(drawn) : len(drawn) + drafts])

    def wrong(drawn: Sequence[int]) -> tuple[int, ...]:
        return tuple((token + 1) % vocab for token in right(drawn))

    accepting, refusing = _continue(core, "right", right), _continue(core, "wrong", wrong)
    beside = _continue(core, "beside", right, others=min(_OTHERS, core.max_sequences - 1))
    # A near tie may change single tokens, not most of them.
    if len(accepting.lengths) > len(accepting.tokens) / 2:
        raise UnsupportedModel("vllm: must accept draft tokens that it would draw itself, but does not")
    if len(refusing.lengths) < len(refusing.tokens) / 2:
        raise UnsupportedModel("vllm: must refuse draft tokens that it would not draw itself, but does not")
    bits = plain.digest()
    same = all(run.digest() == bits for run in (accepting, refusing, beside))
    return Probe(same, bits)


def _continue(core: SteppedCore, name: str, propose: Propose, others: int = 0) -> Run:
    """Draw tokens after the probe's prompt, beside `others` sequences; no cached prefix is used."""
    names = [f"probe-{name}-{index}" for index in range(1 + others)]
    room = core.info.context_window
    for index, sequence in enumerate(names):
        prompt = _prompt(core, min(_PROMPT_TOKENS, room // 2) - index)
        draw = Draw(_SAMPLING, prompt, len(prompt), frozenset(), 0, logprobs=_LOGPROBS)
        core.add(NewSequence(sequence, prompt, draw, salt=sequence, priority=0, arrival_ns=index))
    run = Run()
    try:
        while len(run.tokens) < min(_DRAWN_TOKENS, room // 4):
            _take(run, core, names, propose(run.tokens))
    finally:
        core.end(names)
    return run


def _take(run: Run, core: SteppedCore, names: Sequence[str], drafts: tuple[int, ...]) -> None:
    outcome = core.step({name: drafts if name == names[0] else () for name in names})[names[0]].outcome
    if isinstance(outcome, Sampled):
        if outcome.tokens[:-1] != drafts[: len(outcome.tokens) - 1]:
            raise UnsupportedModel("vllm: must end a draw at the first draft token that differs")
        run.tokens += outcome.tokens
        run.logprobs += outcome.logprobs
        run.lengths.append(len(outcome.tokens))
    elif outcome is not None:
        raise UnsupportedModel(f"vllm: must give logits for the probe's prompt: {outcome}")


def _prompt(core: SteppedCore, length: int) -> list[int]:
    return [index * _STRIDE % core.info.vocab_size for index in range(max(1, length))]
