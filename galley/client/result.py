"""The result of an answer, and the output of a stream from which it is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, Self, TypeAlias

from galley.client.options import Message
from galley.pb.galley.v1 import galley_pb2 as pb

FinishReason: TypeAlias = Literal["stop", "length", "aborted", "unknown"]
_REASONS: dict[int, FinishReason] = {
    pb.Finished.REASON_STOP: "stop",
    pb.Finished.REASON_LENGTH: "length",
    pb.Finished.REASON_ABORTED: "aborted",
}


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of the whole session.

    Of the tokens of `prediction`, the accepted ones are those that the answer repeats at its place.
    """

    prompt_tokens: int
    output_tokens: int
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens


@dataclass(frozen=True, slots=True)
class SourceUsage:
    """Draft tokens of one source that were sent to the target, verified and accepted."""

    drafted: int
    verified: int
    accepted: int

    @property
    def acceptance_rate(self) -> float:
        """Accepted over verified draft tokens; 0 if none was verified."""
        return self.accepted / self.verified if self.verified else 0.0


@dataclass(frozen=True, slots=True)
class SpeculationUsage:
    """Rounds, and draft tokens that were sent to the target, verified and accepted.

    `sources` has those of each source: a strategy of the draft such as `model`, the request's `grammar`, its
    `prediction`, or `shared` (recent answers that all drafts know). `accepted_by_rank` and `verified_by_rank`
    count draft tokens by rank among the candidates for their position, the likeliest first. Of the
    `proposals` of drafts, `proposals_with_features` read the target's state of the token before the last
    confirmed one. A gateway counts from the start of its stream. If the stream was resumed, the rounds before
    are missing.
    """

    rounds: int
    drafted: int
    verified: int
    accepted: int
    sources: dict[str, SourceUsage] = field(default_factory=dict)
    accepted_by_rank: tuple[int, ...] = ()
    verified_by_rank: tuple[int, ...] = ()
    proposals: int = 0
    proposals_with_features: int = 0

    @property
    def acceptance_rate(self) -> float:
        """Accepted over verified draft tokens; 0 if none was verified."""
        return self.accepted / self.verified if self.verified else 0.0

    @property
    def mean_accepted_length(self) -> float:
        """Tokens confirmed per round, 1 + accepted / rounds; 0 without rounds."""
        return 1 + self.accepted / self.rounds if self.rounds else 0.0


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Logprob of an output token; `top` maps the likeliest tokens to theirs, the likeliest first.

    `token_bytes` is the token's text in UTF-8, which may begin or end inside a character; `top_bytes` maps
    the tokens of `top` to theirs. A text is empty if the id has none, or the gateway is too old to send it.
    """

    logprob: float
    top: dict[int, float]
    token_bytes: bytes = b""
    top_bytes: dict[int, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Result:
    """An answer that has ended.

    `tokens`, `from_draft` (True for an accepted draft token) and `logprobs` have an entry a token; `logprobs`
    is empty unless the request set it. `stop` is the stop string or stop token that ended the answer. `seed`
    repeats the answer on the target build of `fingerprint`. `numerics_changed` are the indexes of output
    tokens from which another build computed. `first_index` is above 0 only for an answer that `resume`
    continued. `parse` makes `parsed` of the text; None without `schema`.
    """

    text: str
    tokens: list[int]
    finish_reason: FinishReason
    stop: str | int | None
    usage: Usage
    speculation: SpeculationUsage
    session_id: str
    model: str
    seed: int
    fingerprint: str
    from_draft: list[bool] = field(repr=False)
    logprobs: list[TokenLogprobs] = field(repr=False)
    numerics_changed: list[int]
    first_index: int = 0
    parse: Callable[[str], Any] | None = field(default=None, repr=False, compare=False)

    @property
    def parsed(self) -> Any:
        """Return the value of an answer by `schema`: plain JSON for a dict, else what its model makes of it.

        Raises ValueError if the request had no schema, if the answer was cut before its JSON was complete, or
        if the model refuses it.
        """
        if self.parse is None:
            raise ValueError("parsed: requires a request with schema")
        try:
            return self.parse(self.text)
        except ValueError:
            if self.finish_reason == "stop":
                raise
            count, reason = self.usage.output_tokens, self.finish_reason
            problem = f"the answer ended by {reason!r} after {count} tokens, before its JSON was complete"
            raise ValueError(f"parsed: {problem}") from None

    @property
    def message(self) -> Message:
        """Return the answer as a message of the assistant, to continue a conversation."""
        return Message("assistant", self.text)


@dataclass(slots=True)
class Output:
    """The delivered part of an answer, from output token `first_index` on."""

    first_index: int = 0
    tokens: list[int] = field(default_factory=list)
    chunks: list[pb.Chunk] = field(default_factory=list)
    numerics_changed: list[int] = field(default_factory=list)
    started: pb.Started = field(default_factory=pb.Started)
    parse: Callable[[str], Any] | None = None

    def copy(self) -> Self:
        """Return a copy to which another stream can add."""
        return replace(
            self,
            tokens=list(self.tokens),
            chunks=list(self.chunks),
            numerics_changed=list(self.numerics_changed),
        )

    def add(self, chunk: pb.Chunk) -> None:
        # For each token of each stream: what a result needs besides is read from the chunks at the end.
        self.tokens += chunk.token_ids
        self.chunks.append(chunk)

    @property
    def text(self) -> str:
        return "".join(chunk.text for chunk in self.chunks)

    def result(self, finished: pb.Finished) -> Result:
        """Return the answer that `finished` has ended."""
        started, matched = self.started, finished.WhichOneof("matched_stop")
        return Result(
            text=self.text,
            tokens=list(self.tokens),
            finish_reason=_REASONS.get(finished.reason, "unknown"),
            stop=getattr(finished, matched) if matched else None,
            usage=Usage(*(getattr(finished.usage, one.name) for one in fields(Usage))),
            speculation=speculation_usage(finished.speculation),
            session_id=started.session_id,
            model=started.model,
            seed=started.seed,
            fingerprint=finished.fingerprint,
            from_draft=[flag for chunk in self.chunks for flag in chunk.from_draft],
            logprobs=[_logprobs(entry) for chunk in self.chunks for entry in chunk.logprobs],
            numerics_changed=list(self.numerics_changed),
            first_index=self.first_index,
            parse=self.parse,
        )


def speculation_usage(stats: pb.SpeculationStats) -> SpeculationUsage:
    sources = {one.source: SourceUsage(one.drafted, one.verified, one.accepted) for one in stats.sources}
    return SpeculationUsage(
        rounds=stats.rounds,
        drafted=stats.drafted,
        verified=stats.verified,
        accepted=stats.accepted,
        sources=sources,
        accepted_by_rank=tuple(stats.accepted_by_rank),
        verified_by_rank=tuple(stats.verified_by_rank),
        proposals=stats.proposals,
        proposals_with_features=stats.proposals_with_features,
    )


def _logprobs(entry: pb.PositionLogprobs) -> TokenLogprobs:
    return TokenLogprobs(
        entry.logprob,
        {top.token_id: top.logprob for top in entry.top},
        entry.token_bytes,
        {top.token_id: top.token_bytes for top in entry.top},
    )
