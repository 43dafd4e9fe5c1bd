"""The stored form of a session's request and of its ending: one JSON object each.

The request is stored without id and prompt (key and log hold them) and without fields at their default, to
keep a session small. The defaults of SessionSpec and SamplingParams are therefore part of the stored format:
they mean "not set" and must not change.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from galley.core.answer.answer import Ending, Reason, SessionSpec
from galley.core.sampling_params import SamplingParams


def encode_spec(spec: SessionSpec) -> bytes:
    """Return everything of `spec` except its id and its prompt."""
    fields = _changed(spec)
    del fields["session_id"], fields["prompt"]
    fields["sampling"] = _changed(spec.sampling)
    if "logit_bias" in fields["sampling"]:
        fields["sampling"]["logit_bias"] = dict(spec.sampling.logit_bias)
    if "stop_token_ids" in fields:
        fields["stop_token_ids"] = sorted(spec.stop_token_ids)
    if "tenant_salt" in fields:
        fields["tenant_salt"] = spec.tenant_salt.hex()
    return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()


def decode_spec(data: bytes, session_id: str, prompt: tuple[int, ...]) -> SessionSpec:
    """Return the inverse of `encode_spec`. Raise ValueError, KeyError or TypeError for invalid `data`."""
    fields: dict[str, Any] = json.loads(data)
    sampling = fields.pop("sampling")
    if "logit_bias" in sampling:
        sampling["logit_bias"] = {int(token): bias for token, bias in sampling["logit_bias"].items()}
    if "stop_token_ids" in fields:
        fields["stop_token_ids"] = frozenset(fields["stop_token_ids"])
    if "stop_strings" in fields:
        fields["stop_strings"] = tuple(fields["stop_strings"])
    if "tenant_salt" in fields:
        fields["tenant_salt"] = bytes.fromhex(fields["tenant_salt"])
    return SessionSpec(session_id=session_id, prompt=prompt, sampling=SamplingParams(**sampling), **fields)


def encode_ending(ending: Ending) -> bytes:
    return json.dumps({"reason": ending.reason.value, "matched": ending.matched}).encode()


def decode_ending(data: bytes) -> Ending:
    fields = json.loads(data)
    return Ending(Reason(fields["reason"]), fields["matched"])


def _changed(values: SessionSpec | SamplingParams) -> dict[str, Any]:
    fields = {field.name: getattr(values, field.name) for field in dataclasses.fields(values)}
    defaults = _DEFAULTS[type(values)]
    return {name: value for name, value in fields.items() if value != defaults.get(name, _NONE)}


_NONE = object()
_DEFAULTS: dict[type, dict[str, Any]] = {
    kind: {
        field.name: field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        for field in dataclasses.fields(kind)
    }
    for kind in (SessionSpec, SamplingParams)
}
