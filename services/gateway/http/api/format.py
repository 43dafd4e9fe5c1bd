"""The form in which answers are written; a session stores it, so that any gateway goes on alike."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from typing import Literal

from galley.core.errors import LogLost
from galley.core.names import CHAT
from services.gateway.http.transport.encoding import to_json
from services.gateway.request.validate import BODY_HASH_BYTES, SESSION_ID_HEX
from services.gateway.telemetry.attributes import stored_operation

FIELD = "http"
"""Field of a stored session: the format of its answers; absent for a session of gRPC."""

Kind = Literal["chat", "completion", "response"]
PromptText = Callable[[int], str]
"""Returns the text of a prompt to echo; called once the request was checked."""


def no_prompt(_index: int) -> str:
    return ""


@dataclass(frozen=True, slots=True)
class Format:
    """The kind of the answers, their number, and the number of each prompt's.

    With `tools`, answers may call tools. With `reasoning`, the model may reason before it answers.
    """

    kind: Kind
    choices: int = 1
    n: int = 1
    usage: bool = False
    echo: bool = False
    token_ids: bool = False
    rounds: bool = False
    tools: bool = False
    reasoning: bool = False

    @property
    def has_parts(self) -> bool:
        """Return True if answers are read for calls or reasoning."""
        return self.tools or self.reasoning

    @property
    def stored(self) -> dict[str, bytes]:
        fields = asdict(self)
        for name in ("tools", "reasoning"):  # gateways of earlier versions do not know them
            if not fields[name]:
                del fields[name]
        return {FIELD: to_json(fields)}

    def body_hash(self, requests: bytes, more: Mapping[str, bytes]) -> bytes:
        """Return the hash of a body, from those of its requests and its `more` stored fields.

        That of a plain chat or completion is the request's, so that its repeat may come by gRPC.
        """
        if replace(self, reasoning=False) == Format(self.kind) and not more:
            return requests
        parts = b"".join([requests, *self.stored.values(), *more.values()])
        return blake2b(parts, digest_size=BODY_HASH_BYTES).digest()


def stored_format(fields: Mapping[str, bytes]) -> Format:
    """Return the format of a stored session; one of gRPC is written as its operation suggests."""
    if FIELD not in fields:
        return Format("chat" if stored_operation(fields) == CHAT else "completion")
    try:
        return Format(**json.loads(fields[FIELD]))
    except (ValueError, TypeError) as error:
        raise LogLost("the stored session cannot be read") from error


def choice_id(session_id: str, index: int) -> str:
    """Return the session id of a choice; the first one's is that of the request."""
    if not index:
        return session_id
    named = f"{session_id}/{index}".encode()
    return blake2b(named, digest_size=SESSION_ID_HEX // 2, person=b"galley.choice").hexdigest()
