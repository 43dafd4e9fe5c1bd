"""Cases that schemathesis makes from a gateway's own description: do the responses keep to it?"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import FlakyFailure
from schemathesis import APIOperation, Case, GenerationMode
from schemathesis.checks import CHECKS, load_all_checks
from schemathesis.core.failures import Failure, FailureGroup

CHECK_NAMES = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
)
_Operation = APIOperation[Any, Any, Any, Any]
MODES = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
_TIMEOUT_S = 60
# What the description leaves to the model: most valid cases have these values, so that many are answered.
MAX_TOKENS = 8
SHORT = json.dumps({"max_new_tokens": MAX_TOKENS})
"""The generation_config.json of the model that is served."""
_LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_SERVED: dict[str, Any] = {
    "model": None,
    "messages": [{"role": "user", "content": "Tell me."}],
    "input": "Tell me.",
    "prompt": "Tell me.",
    "previous_response_id": None,
    "instructions": None,
    "speculation": None,
    "logit_bias": None,
    "stop_token_ids": None,
    "min_tokens": 0,
    "workload": None,
}
_OF_CHATS = ("messages", "tools")


@dataclass
class Tally:
    """Responses by operation and status, and what was wrong with them."""

    responses: dict[str, Counter[int]] = field(default_factory=dict)
    faults: dict[str, str] = field(default_factory=dict)

    @property
    def cases(self) -> int:
        return sum(counts.total() for counts in self.responses.values())


def check(address: str, examples: int, first_seed: int) -> Tally:
    """Send `examples` cases a mode to each operation of the gateway at `address`.

    Three of four name a session, a response or a model that exists.
    """
    load_all_checks()
    url, tally = f"http://{address}", Tally()
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    with requests.Session() as session:
        begin_response = partial(_begun, session, f"{url}/v1/responses", "input")
        known = {
            "session_id": _begun(session, f"{url}/v1/completions", "prompt").removeprefix("cmpl-"),
            "response_id": begin_response(),
            "model": requests.get(f"{url}/v1/models", timeout=_TIMEOUT_S).json()["data"][0]["id"],
        }
        for found in schema.get_all_operations():
            operation: _Operation = found.ok()  # type: ignore[union-attr]  # ours has no invalid part
            for mode in _modes(operation):
                counts = tally.responses.setdefault(operation.label, Counter())
                sender = _Sender(session, known, counts, begin_response)
                try:
                    sender.run(operation, mode, examples, first_seed)
                except (FailureGroup, Failure, FlakyFailure) as fault:
                    tally.faults[f"{operation.label} ({mode.value})"] = str(fault)[:2000]
    return tally


def _modes(operation: _Operation) -> Sequence[GenerationMode]:
    """Leave out negative cases where none breaks the description: a path may hold any text."""
    return MODES if operation.query or operation.body else MODES[:1]


@dataclass
class _Sender:
    session: requests.Session
    known: dict[str, str]
    counts: Counter[int]
    begin_response: Callable[[], str]

    def run(self, operation: _Operation, mode: GenerationMode, examples: int, first_seed: int) -> None:
        """Raise the first failure that the checks find."""
        checks: Any = CHECKS.get_by_names(list(CHECK_NAMES))

        @seed(first_seed)
        @settings(
            max_examples=examples,
            database=None,
            deadline=None,
            phases=(Phase.generate,),
            suppress_health_check=list(HealthCheck),
        )
        @given(operation.as_strategy(generation_mode=mode), st.sampled_from((True, True, True, False)))
        def send(case: Case[Any], is_known: bool) -> None:
            if is_known:
                given = case.path_parameters or {}
                case.path_parameters = {name: self.known.get(name, it) for name, it in given.items()}
                if mode is GenerationMode.POSITIVE and isinstance(case.body, dict):
                    case.body |= {name: it for name, it in _SERVED.items() if name in case.body}
                    if "prompt" in case.body:  # in place of messages and their tools, where there are both
                        case.body = {name: it for name, it in case.body.items() if name not in _OF_CHATS}
            if mode is GenerationMode.POSITIVE and isinstance(case.body, dict):
                # Long answers would only take time. The model's own default is as short (`SHORT`).
                case.body |= {name: MAX_TOKENS for name in _LENGTHS if case.body.get(name)}
            response = case.call(session=self.session, timeout=_TIMEOUT_S)
            self.counts[response.status_code] += 1
            if (
                case.method == "DELETE"
                and response.status_code == 200
                and "response_id" in (case.path_parameters or {})
            ):
                self.known["response_id"] = self.begin_response()
            case.validate_response(response, checks=checks)

        send()


def _begun(session: requests.Session, url: str, name: str) -> str:
    """Return the id of a new answer to a prompt of this parameter."""
    response = session.post(url, json={name: "Tell me.", "seed": 7}, timeout=_TIMEOUT_S)
    return str(response.json()["id"])
