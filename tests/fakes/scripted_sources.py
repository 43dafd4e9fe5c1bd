"""Sources of draft tokens for a session whose output is known."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

from galley.core.lookup.prediction import PredictionLookup, prediction_calibration
from galley.core.session.sources import LocalSources


class ScriptedGrammar:
    """Forces the tokens at given indices of the output; only confirmed tokens may advance it."""

    def __init__(self, output: Sequence[int], forced: Container[int]) -> None:
        self._output = list(output)
        self._forced = forced
        self.length = 0
        self.row_ns = 0
        self.calls = 0

    def confirm(self, tokens: Sequence[int]) -> None:
        end = self.length + len(tokens)
        assert list(tokens) == self._output[self.length : end], "advanced by tokens that are not confirmed"
        self.length = end

    def forced(self, most: int, ahead: Sequence[int] = ()) -> tuple[int, ...]:
        self.calls += 1
        if self.allowed_prefix(ahead) < len(ahead):
            return ()
        start = end = self.length + len(ahead)
        while end < min(start + most, len(self._output)) and end in self._forced:
            end += 1
        return tuple(self._output[start:end])

    def allowed_prefix(self, tokens: Sequence[int], ahead: Sequence[int] = ()) -> int:
        """Allow anything where nothing is forced."""
        start = self.length + len(ahead)
        for index, token in enumerate(tokens, start):
            if index in self._forced and (index >= len(self._output) or token != self._output[index]):
                return index - start
        return len(tokens)


def scripted_sources(
    output: Sequence[int], forced: Container[int] = (), edits: Mapping[int, int] | None = None
) -> LocalSources:
    """Return a grammar that forces tokens of the output, and a prediction of it with some `edits`.

    An edit replaces the token at an index. Without edits (None) nothing is predicted.
    """
    predicted = None if edits is None else [edits.get(i, token) for i, token in enumerate(output)]
    return LocalSources(
        ScriptedGrammar(output, forced),
        None if predicted is None else PredictionLookup(predicted, prediction_calibration()),
    )
