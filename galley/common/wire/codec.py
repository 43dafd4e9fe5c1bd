"""The shared messages of the wire as values of the core, and back."""

from __future__ import annotations

from types import MappingProxyType

from galley.core.records import PositionLogprobs
from galley.core.sampling_params import SamplingParams
from galley.pb.galley.v1 import galley_pb2 as pb

# Where the proto says that unset and 0 differ: the core's own defaults.
_DEFAULTS = SamplingParams()
_OPTIONAL = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "seed",
)


def sampling_from(message: pb.SamplingParams) -> SamplingParams:
    """What `message` says, defaults where it says nothing; not validated.

    Floats are those of the wire, 32 bits wide, so that every hop computes with the same.
    """
    given = {name: getattr(message, name) for name in _OPTIONAL if message.HasField(name)}  # type: ignore[arg-type]  # a literal union
    if message.logit_bias:
        given["logit_bias"] = MappingProxyType(dict(message.logit_bias))
    return SamplingParams(**given)


def sampling_message(params: SamplingParams) -> pb.SamplingParams:
    """The inverse; names only what is not the default, but always the seed."""
    given = {name: getattr(params, name) for name in _OPTIONAL if name != "seed"}
    changed = {name: value for name, value in given.items() if value != getattr(_DEFAULTS, name)}
    return pb.SamplingParams(**changed, seed=params.seed, logit_bias=dict(params.logit_bias))


def logprobs_from(message: pb.PositionLogprobs) -> PositionLogprobs:
    """Natural logs of the chosen token and of the likeliest."""
    return PositionLogprobs(message.logprob, tuple((top.token_id, top.logprob) for top in message.top))


def logprobs_message(logprobs: PositionLogprobs) -> pb.PositionLogprobs:
    """The inverse of `logprobs_from`, to 32 bits."""
    top = [pb.TokenLogprob(token_id=token, logprob=value) for token, value in logprobs.top]
    return pb.PositionLogprobs(logprob=logprobs.logprob, top=top)
