"""Translate core values to the messages of a stream."""

from __future__ import annotations

from galley.common.wire.codec import logprobs_message
from galley.core.answer.answer import Chunk, Ending, NumericsChanged, Reason
from galley.core.session.machine import Session
from galley.pb.galley.v1 import galley_pb2 as pb

_REASONS = {
    Reason.STOP: pb.Finished.REASON_STOP,
    Reason.LENGTH: pb.Finished.REASON_LENGTH,
    Reason.ABORTED: pb.Finished.REASON_ABORTED,
}
_STATS = tuple(pb.SpeculationStats.DESCRIPTOR.fields_by_name)


def started(session: Session, model: str) -> pb.StreamEvent:
    spec = session.spec
    return pb.StreamEvent(
        started=pb.Started(
            session_id=spec.session_id,
            seed=spec.sampling.seed,
            prompt_tokens=len(spec.prompt),
            model=model,
        )
    )


def item(value: Chunk | NumericsChanged) -> pb.StreamEvent:
    if isinstance(value, NumericsChanged):
        return pb.StreamEvent(
            numerics_changed=pb.NumericsChanged(index=value.index, fingerprint=value.fingerprint)
        )
    return pb.StreamEvent(
        chunk=pb.Chunk(
            index=value.index,
            token_ids=value.tokens,
            text=value.text,
            from_draft=[value.from_draft] * len(value.tokens),
            logprobs=[logprobs_message(entry) for entry in value.logprobs],
        )
    )


def finished(session: Session, ending: Ending) -> pb.StreamEvent:
    message = pb.Finished(
        reason=_REASONS[ending.reason],
        usage=pb.Usage(
            prompt_tokens=len(session.spec.prompt),
            output_tokens=session.logged_output,
        ),
        speculation=pb.SpeculationStats(**{name: getattr(session.stats, name) for name in _STATS}),
    )
    if isinstance(ending.matched, str):
        message.stop = ending.matched
    elif ending.matched is not None:
        message.stop_token_id = ending.matched
    return pb.StreamEvent(finished=message)
