"""What a client may ask for, in plain Python: nothing here needs grpc or protobuf."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation; `role` is "system", "user" or "assistant"."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Speculation:
    """How the answer is drafted: `Speculation()` leaves it to the gateway.

    `k` or `strategy` fixes both; what is left out of them is the gateway's default.
    """

    off: bool = False
    k: int | None = None
    strategy: str = ""


@dataclass(frozen=True, slots=True)
class Retries:
    """How a client goes on with a stream that broke, in seconds.

    It tries one gateway after the other until `patience_s` have passed in which no token came, and one that
    never began for `start_patience_s` at most; 0 tries nothing. The pause before each try doubles up to
    `longest_pause_s`, and is shortened by chance by up to a half, so that the clients of a gateway that died
    do not all come at once.
    """

    patience_s: float = 30.0
    start_patience_s: float = 5.0
    first_pause_s: float = 0.05
    longest_pause_s: float = 2.0


@dataclass(frozen=True, slots=True)
class Tls:
    """TLS to the gateways: paths of PEM files, which are read anew when they change.

    Trusted is a gateway whose certificate is of an authority in `ca_file` (empty: of a public one) and bears
    `server_name` (empty: the host of its address). `cert_file` and `key_file` are shown to gateways that ask.
    """

    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    server_name: str = ""


class GenerateOptions(TypedDict, total=False):
    """What `AsyncClient.generate` takes by keyword; names and bounds as in the proto.

    `timeout_s` is the deadline of the whole stream in seconds. Left out or None: the proto's own default.
    `force_trace` has the gateways trace this request, whatever they sample.
    """

    model: str
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
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    logprobs: int | None
    speculation: Speculation
    workload: str
    idempotency_key: str
    priority: int
    continue_without_client: bool
    timeout_s: float | None
    force_trace: bool


# Text to complete as it stands, a conversation for the chat template, or token ids.
Prompt = str | Sequence[Message] | Sequence[int]
