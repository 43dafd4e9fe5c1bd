"""Build a GenerateRequest from Python values."""

from __future__ import annotations

from galley.client.options import GenerateOptions, Message, Prompt, Speculation
from galley.pb.galley.v1 import galley_pb2 as pb


def generate_request(prompt: Prompt, options: GenerateOptions) -> pb.GenerateRequest:
    """Return the request; the gateway checks its bounds. Raises TypeError if the prompt mixes types."""
    speculation = options.get("speculation", Speculation())
    request = pb.GenerateRequest(
        model=options.get("model", ""),
        sampling=_sampling(options),
        max_tokens=options.get("max_tokens"),
        min_tokens=options.get("min_tokens", 0),
        stop=options.get("stop", ()),
        stop_token_ids=options.get("stop_token_ids", ()),
        ignore_eos=options.get("ignore_eos", False),
        logprobs=options.get("logprobs"),
        workload=options.get("workload", ""),
        speculation=_speculation(speculation),
        idempotency_key=options.get("idempotency_key", ""),
        priority=options.get("priority", 0),
        continue_without_client=options.get("continue_without_client", False),
    )
    _set_prompt(request, prompt)
    return request


def _sampling(options: GenerateOptions) -> pb.SamplingParams:
    return pb.SamplingParams(
        temperature=options.get("temperature"),
        top_p=options.get("top_p"),
        top_k=options.get("top_k"),
        min_p=options.get("min_p"),
        frequency_penalty=options.get("frequency_penalty"),
        presence_penalty=options.get("presence_penalty"),
        repetition_penalty=options.get("repetition_penalty"),
        logit_bias=options.get("logit_bias", {}),
        seed=options.get("seed"),
    )


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
