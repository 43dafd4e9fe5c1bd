"""The request of an answer, from the arguments of a call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from galley.client.arguments import checked_options, checked_prompt
from galley.client.options import GenerateOptions, Message, Prompt, Speculation
from galley.pb.galley.v1 import galley_pb2 as pb

# Most options have the name of their field.
_SAMPLING = pb.SamplingParams.DESCRIPTOR.fields_by_name.keys() & GenerateOptions.__annotations__.keys()
_REQUEST = pb.GenerateRequest.DESCRIPTOR.fields_by_name.keys() & GenerateOptions.__annotations__.keys()
_REQUEST -= {"speculation", "prediction"}


def generate_request(prompt: Prompt, options: Mapping[str, Any]) -> pb.GenerateRequest:
    """Return the request; the gateway checks its bounds.

    Raises TypeError or ValueError, which names the argument, for a value that the request cannot hold.
    """
    given = checked_options(options)
    request = pb.GenerateRequest(
        sampling=pb.SamplingParams(**{name: given[name] for name in _SAMPLING & given.keys()}),
        speculation=_speculation(given.get("speculation", Speculation())),
        use_default_sampling=True,
        **{name: given[name] for name in _REQUEST & given.keys()},
    )
    _set_form(request.structured_output, given)
    _set_prediction(request.prediction, given.get("prediction"))
    _set_prompt(request, checked_prompt("prompt", prompt))
    return request


def _set_form(form: pb.StructuredOutput, given: Mapping[str, Any]) -> None:
    if (schema := given.get("schema")) is not None:
        form.json_schema = schema
    if (regex := given.get("regex")) is not None:
        form.regex = regex
    if (grammar := given.get("grammar")) is not None:
        form.grammar = grammar
    if (tag := given.get("structural_tag")) is not None:
        form.structural_tag = tag
    if (choices := given.get("choice")) is not None:
        form.choice.SetInParent()
        form.choice.choices.extend(choices)


def _set_prediction(prediction: pb.Prediction, given: str | list[int] | None) -> None:
    if isinstance(given, str):
        prediction.text = given
    elif given is not None:
        prediction.token_ids.SetInParent()
        prediction.token_ids.ids.extend(given)


def _speculation(options: Speculation) -> pb.Speculation:
    if options.off:
        return pb.Speculation(mode=pb.Speculation.MODE_OFF)
    if options == Speculation():
        return pb.Speculation(mode=pb.Speculation.MODE_AUTO)
    return pb.Speculation(
        mode=pb.Speculation.MODE_FIXED, k=options.k, width=options.width, strategy=options.strategy
    )


def _set_prompt(request: pb.GenerateRequest, prompt: str | list[Message] | list[int]) -> None:
    if isinstance(prompt, str):
        request.text = prompt
        return
    for part in prompt:
        if isinstance(part, Message):
            request.messages.messages.add(role=part.role, content=part.content)
        else:
            request.token_ids.ids.append(part)
    if not prompt:
        request.token_ids.SetInParent()
