"""The options of a request, in plain Python: nothing here needs grpc or protobuf."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias, TypedDict


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation; `role` is "system", "user" or "assistant"."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Speculation:
    """The drafting of a request; `Speculation()` leaves it to the gateway.

    `off` is plain decoding. `k`, `strategy` or `width` fixes all three for the request; those left out are
    the gateway's defaults. `k` is the number of draft tokens a round. `width`, from 1 to 8, is the most of
    them for one position; above 1 they form a tree.
    """

    off: bool = False
    k: int | None = None
    strategy: str = ""
    width: int | None = None


@dataclass(frozen=True, slots=True)
class Retries:
    """The attempts to resume a broken stream; all times in seconds.

    The client tries one gateway after the other until no token has come for `patience_s`, or for
    `start_patience_s` if the stream had not started; 0: no attempt. The pause before each attempt starts at
    `first_pause_s`, doubles up to `longest_pause_s`, and is cut at random by up to half, so that the clients
    of a dead gateway do not all return at once.
    """

    patience_s: float = 30.0
    start_patience_s: float = 5.0
    first_pause_s: float = 0.05
    longest_pause_s: float = 2.0


@dataclass(frozen=True, slots=True)
class Tls:
    """TLS to the gateways; the files are PEM, and are read again when they change.

    `ca_file` holds the trusted authorities; empty: public ones. `cert_file` and `key_file` are the client's
    certificate, for gateways that require one. `server_name` is the name in the gateways' certificate; empty:
    the host of the address.
    """

    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    server_name: str = ""


class PydanticModel(Protocol):
    """A pydantic model class, or another object with these methods."""

    def model_json_schema(self) -> dict[str, Any]: ...

    def model_validate_json(self, json_data: str, /) -> Any: ...


class PydanticAdapter(Protocol):
    """A pydantic TypeAdapter, or another object with these methods."""

    def json_schema(self) -> dict[str, Any]: ...

    def validate_json(self, data: str, /) -> Any: ...


Schema: TypeAlias = Mapping[str, Any] | PydanticModel | PydanticAdapter


class GenerateOptions(TypedDict, total=False):
    """The keyword arguments of `generate`, `stream` and `chat`; None leaves one to the gateway.

    Names and bounds are those of the proto. Sampling that is left out is the model's own, from its
    generation_config.json; `model_info().default_sampling` shows it. `stop` is one text or several. `lora` is
    one of `model_info().lora_adapters`.
    At most one of `schema` (JSON; `parsed` of the result is its value), `regex`, `choice` (one of several
    texts), `grammar` (Lark) and `structural_tag` (a dict, or JSON) gives the form of the answer.
    `prediction`, text or token ids, is what the answer repeats for the most part; it changes the speed and
    no token.
    `no_audit` leaves the session out of the audits that gateways make by themselves.
    `timeout_s` is the deadline of the whole answer, in seconds. `force_trace` makes the gateways trace this
    request whatever they sample.
    """

    model: str
    lora: str
    max_tokens: int | None
    min_tokens: int
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    frequency_penalty: float | None
    presence_penalty: float | None
    repetition_penalty: float | None
    logit_bias: Mapping[int, float]
    seed: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    logprobs: int | None
    schema: Schema | None
    regex: str | None
    choice: Sequence[str] | None
    grammar: str | None
    structural_tag: str | Mapping[str, Any] | None
    prediction: str | Sequence[int] | None
    speculation: Speculation | Literal["auto", "off"]
    workload: str
    idempotency_key: str
    priority: int
    continue_without_client: bool
    no_audit: bool
    timeout_s: float | None
    force_trace: bool


Conversation: TypeAlias = Sequence[Message | Mapping[str, object]]
"""Messages; a dict has the keys "role" and "content"."""

Prompt: TypeAlias = str | Conversation | Sequence[int]
"""Text to complete, a conversation for the chat template, or token ids."""
