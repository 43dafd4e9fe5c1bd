"""The checks of a started core: drafts are verified as they must be, and how far its bits depend on a step.

One prompt is continued without draft tokens. Then, from several positions of that continuation, one step
verifies right draft tokens, or wrong ones, alone or beside other sequences, and after a pause another one
draws. The rule of acceptance must hold, or the replica does not serve. Whether the bits of the logprobs are
those of the first run is only reported: where they are not, a near tie may give another token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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

# Return the draft tokens for a position of the continuation.
Propose = Callable[[int], tuple[int, ...]]


@dataclass(slots=True)
class Run:
    """Drawn tokens and their logprobs."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)

    def take(self, drawn: Sampled) -> None:
        self.tokens += drawn.tokens
        self.logprobs += drawn.logprobs

    def digest(self) -> bytes:
        """Return a hash of all bits of the logprobs."""
        values = [(entry.logprob, *(logprob for _, logprob in entry.top)) for entry in self.logprobs]
        ids = [[token for token, _ in entry.top] for entry in self.logprobs]
        return blake2b(np.array(values, np.float32).tobytes() + np.array(ids, np.int64).tobytes()).digest()


@dataclass(slots=True)
class Arm:
    """The results from the positions whose first token was the continuation's; a near tie excludes one."""

    accepted: list[int] = field(default_factory=list)  # draft tokens
    resumed: list[bool] = field(default_factory=list)  # drew the continuation's token after a pause
    same_bits: bool = True


@dataclass(frozen=True, slots=True)
class Probe:
    """`deterministic`: the bits were the same in all runs. `bits` is a hash of those of the plain run."""

    deterministic: bool
    bits: bytes


def probe(core: SteppedCore) -> Probe:
    """Return what the runs showed. Raise UnsupportedModel if drafts are not verified as they must be."""
    plain = Run()
    with _sequences(core, "plain") as names:
        while len(plain.tokens) < _count(core):
            plain.take(_draw(core, names))
    # One token is drawn before the draft tokens, one by their step, one after a pause.
    drafts, vocab = min(_DRAFT_TOKENS, core.max_draft_tokens, _count(core) - 3), core.info.vocab_size

    def right(at: int) -> tuple[int, ...]:
        return tuple(plain.tokens[at : at + drafts])

    def wrong(at: int) -> tuple[int, ...]:
        return tuple((token + 1) % vocab for token in right(at))

    accepting, refusing = _verify(core, plain, "right", right), _verify(core, plain, "wrong", wrong)
    beside = _verify(core, plain, "beside", right, others=min(_OTHERS, core.max_sequences - 1))
    if not any(accepting.accepted):
        raise UnsupportedModel("vllm: must accept draft tokens that it would draw itself, but does not")
    if all(refusing.accepted):
        raise UnsupportedModel("vllm: must refuse draft tokens that it would not draw itself, but does not")
    if not any(accepting.resumed):
        raise UnsupportedModel("vllm: must draw the same after a pause that follows a draft, but does not")
    return Probe(all(arm.same_bits for arm in (accepting, refusing, beside)), plain.digest())


def _verify(core: SteppedCore, plain: Run, name: str, propose: Propose, others: int = 0) -> Arm:
    arm = Arm()
    for start in range(0, _count(core) - 2, _DRAFT_TOKENS):
        with _sequences(core, name, plain.tokens[:start], others) as names:
            run = Run()
            run.take(_draw(core, names))
            if run.tokens == plain.tokens[start : start + 1]:
                drawn = _draw(core, names, propose(start + 1))
                run.take(drawn)
                arm.accepted.append(len(drawn.tokens) - 1)
                if run.tokens == plain.tokens[start : start + len(run.tokens)] != plain.tokens[start:]:
                    core.step({})  # a pause
                    run.take(_draw(core, names))
                    arm.resumed.append(run.tokens == plain.tokens[start : start + len(run.tokens)])
            arm.same_bits &= _has_bits(run, plain, start)
    return arm


def _has_bits(run: Run, plain: Run, start: int) -> bool:
    """Return True if the logprobs agree, up to the first token that differs."""
    known = zip(plain.tokens[start:], plain.logprobs[start:], strict=True)
    for token, logprobs, (other, others) in zip(run.tokens, run.logprobs, known, strict=False):
        if logprobs != others:
            return False
        if token != other:
            break
    return True


def _count(core: SteppedCore) -> int:
    return max(4, min(_DRAWN_TOKENS, core.info.context_window // 4))


@contextmanager
def _sequences(
    core: SteppedCore, name: str, drawn: Sequence[int] = (), others: int = 0
) -> Iterator[list[str]]:
    """Add a sequence of the probe's prompt and `drawn`, and others beside it; no cached prefix is used."""
    names = [f"probe-{name}-{len(drawn)}-{index}" for index in range(1 + others)]
    for index, sequence in enumerate(names):
        length = max(1, min(_PROMPT_TOKENS, core.info.context_window // 2) - index)
        prompt = [*(token * _STRIDE % core.info.vocab_size for token in range(length)), *drawn]
        draw = Draw(_SAMPLING, prompt, length, frozenset(), 0, logprobs=_LOGPROBS)
        core.add(NewSequence(sequence, prompt, draw, salt=sequence, priority=0, arrival_ns=index))
    try:
        yield names
    finally:
        core.end(names)


def _draw(core: SteppedCore, names: Sequence[str], drafts: tuple[int, ...] = ()) -> Sampled:
    """Step all sequences until the first has drawn; `drafts` are its draft tokens."""
    outcome = None
    while outcome is None:
        outcome = core.step({name: drafts if name == names[0] else () for name in names})[names[0]].outcome
    if not isinstance(outcome, Sampled):
        raise UnsupportedModel(f"vllm: must give logits for the probe's prompt: {outcome}")
    if outcome.tokens[:-1] != drafts[: len(outcome.tokens) - 1]:
        raise UnsupportedModel("vllm: must end a draw at the first draft token that differs")
    return outcome
