"""Build a GenerateRequest from Python values."""

from __future__ import annotations

from typing import Any

from galley.client.options import GenerateOptions, Message, Prompt, Speculation
from galley.pb.galley.v1 import galley_pb2 as pb

# Most options have the name of their field.
_SAMPLING = pb.SamplingParams.DESCRIPTOR.fields_by_name.keys() & GenerateOptions.__annotations__.keys()
_REQUEST = pb.GenerateRequest.DESCRIPTOR.fields_by_name.keys() & GenerateOptions.__annotations__.keys()


def generate_request(prompt: Prompt, options: GenerateOptions) -> pb.GenerateRequest:
    """Return the request; the gateway checks its bounds. Raises TypeError if the prompt mixes types."""
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    speculation = _speculation(given.pop("speculation", Speculation()))
    request = pb.GenerateRequest(
        sampling=pb.SamplingParams(**{name: given[name] for name in _SAMPLING & given.keys()}),
        speculation=speculation,
        **{name: given[name] for name in _REQUEST & given.keys()},
    )
    _set_prompt(request, prompt)
    return request


def _speculation(options: Speculation) -> pb.Speculation:
    if options.off:
        return pb.Speculation(mode=pb.Speculation.MODE_OFF)
    if options.k is None and not options.strategy:
        return pb.Speculation(mode=pb.Speculation.MODE_AUTO)
    return pb.Speculation(mode=pb.Speculation.MODE_FIXED, k=options.k, strategy=options.strategy)


def _set_prompt(request: pb.GenerateRequest, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        request.text = prompt
        return
    messages = [part for part in prompt if isinstance(part, Message)]
    ids = [part for part in prompt if isinstance(part, int)]
    if messages and ids:
        raise TypeError("a prompt is text, messages or token ids, not a mixture")
    if messages:
        turns = [pb.ChatMessage(role=turn.role, content=turn.content) for turn in messages]
        request.messages.CopyFrom(pb.ChatMessages(messages=turns))
    else:
        request.token_ids.CopyFrom(pb.TokenIds(ids=ids))
