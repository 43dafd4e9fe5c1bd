"""The load of a client process and its measurements: values that cross between processes as JSON."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import TypeAdapter


@dataclass(frozen=True, slots=True)
class Load:
    """Streams at gateways, measured for `window_s` once all have started.

    `streams` are kept open, each answer followed by the next. With `arrivals_per_s`, answers begin at that
    rate instead, whatever becomes of those before. `drafted` tokens are drafted for each round; 0: plain
    decoding. CPU time is that of the gateways `pids` and of the `store`. All streams start within `start_s`;
    `partly`: measure those that have, where a saturated gateway refuses the others.
    """

    gateways: tuple[str, ...]
    pids: tuple[int, ...]
    store: tuple[int, ...] = ()
    streams: int = 0
    arrivals_per_s: float = 0.0
    answer_tokens: int = 16_384
    drafted: int = 0
    warm_s: float = 1.0
    window_s: float = 5.0
    start_s: float = 90.0
    partly: bool = False


@dataclass(frozen=True, slots=True)
class Measured:
    """The measurements of one window; times in ms at the percentiles 50, 90 and 99.

    Gaps lie between two messages of a stream. Streams that began in the window and still `waiting` for
    their first token at its end count with the time that they have waited. A refusal is `hinted` if it says
    when to retry. `started` of the streams had a token before the window.
    """

    seconds: float
    tokens: int
    messages: int
    cpu_s: float
    store_cpu_s: float
    began: int
    ended: int
    waiting: int
    first_token_ms: tuple[float, ...]
    gap_ms: tuple[float, ...]
    refused: int
    hinted: int
    refusal_ms: tuple[float, ...]
    failed: tuple[str, ...]
    started: int = 0

    @property
    def us_per_token(self) -> float:
        """Return the CPU time of a token, in µs."""
        return 1e6 * self.cpu_s / max(1, self.tokens)

    @property
    def store_us_per_token(self) -> float:
        return 1e6 * self.store_cpu_s / max(1, self.tokens)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def tokens_per_message(self) -> float:
        return self.tokens / max(1, self.messages)


LOAD, MEASURED = TypeAdapter(Load), TypeAdapter(Measured)
