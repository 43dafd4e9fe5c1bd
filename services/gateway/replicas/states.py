"""The target's states on their way to the draft of one session.

They come with the verdicts on requests that want them, and leave with the next request to the draft. They are
passed on at most once, and never stored: a draft does without those that are lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from galley.core.features import (
    MAX_FEATURE_LAYERS,
    MAX_FEATURE_TOKENS,
    NO_STATES,
    FeatureForm,
    States,
)
from galley.pb.galley.v1 import galley_pb2 as pb
from services.gateway.telemetry.observer import request_observer

MAX_STATES_BYTES = 1024 * 1024
"""Bytes of states in a request, well below what a draft takes as one message."""


def sends_states(info: pb.GetTargetInfoResponse, form: FeatureForm) -> bool:
    """Return True if a target sends states of this form; it would refuse a request for others."""
    layers = (0, *form.layers, info.feature_layers + 1)
    rise = all(before < after for before, after in pairwise(layers))
    return rise and 0 < len(form.layers) <= MAX_FEATURE_LAYERS and 0 < form.size == info.feature_size


class WaitingStates:
    """States that the draft of one session has not got, of at most the last MAX_FEATURE_TOKENS tokens."""

    def __init__(self) -> None:
        self._observer = request_observer()
        self._form: FeatureForm | None = None
        self._arrived: deque[States] = deque()
        self._tokens = 0

    def add(self, form: FeatureForm, answers: Sequence[pb.VerifyAnswer]) -> None:
        """Keep the states of verdicts that are of this form; drop those of any other."""
        if form != self._form:
            self.clear()
            self._form = form
        for answer in answers:
            result = answer.result
            if result.features:
                self._add(result.features_position, result.features, form.token_bytes)

    def _add(self, position: int, data: bytes, token_bytes: int) -> None:
        self._observer.passed_states("received", len(data))
        tokens, rest = divmod(len(data), token_bytes)
        if rest or tokens > MAX_FEATURE_TOKENS:
            return
        self._arrived.append(States(position, tokens, data))
        self._tokens += tokens
        while self._tokens - self._arrived[0].tokens >= MAX_FEATURE_TOKENS:
            self._tokens -= self._arrived.popleft().tokens

    def take(self, form: FeatureForm | None, end: int) -> States:
        """Return the states of tokens before `end` for a draft that reads this form; keep later ones."""
        if not self._arrived:
            return NO_STATES
        arrived = list(self._arrived)
        self.clear()
        if form is None or form != self._form:
            return NO_STATES
        joined = _joined(arrived)
        if (later := joined.since(end)).tokens:
            self._arrived.append(later)
            self._tokens = later.tokens
        states = joined.until(end)
        states = states.since(states.end - MAX_STATES_BYTES // form.token_bytes)
        self._observer.passed_states("sent", len(states.data))
        return states

    def clear(self) -> None:
        self._arrived.clear()
        self._tokens = 0


def _joined(arrived: Sequence[States]) -> States:
    """Return what `States.joined` makes of them one after another; copy those without a gap only once."""
    joined = run = NO_STATES
    parts: list[bytes] = []
    for states in arrived:
        if not run.tokens or states.position != run.end:
            joined = joined.joined(replace(run, data=b"".join(parts)))
            run, parts = replace(states, tokens=0), []
        run = replace(run, tokens=run.tokens + states.tokens)
        parts.append(states.data)
    return joined.joined(replace(run, data=b"".join(parts)))
