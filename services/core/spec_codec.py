"""How the store keeps a session's request: one JSON object, the prompt excepted (the log begins with it)."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from services.core.answer import SessionSpec
from services.core.params import SamplingParams


def encode_spec(spec: SessionSpec) -> bytes:
    """Everything of `spec` but its prompt, and what an older gateway may not know, unless it is set."""
    fields = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
    del fields["prompt"]
    if not spec.continue_without_client:
        del fields["continue_without_client"]
    fields["sampling"] = _sampling_fields(spec.sampling)
    fields["stop_token_ids"] = sorted(spec.stop_token_ids)
    fields["tenant_salt"] = spec.tenant_salt.hex()
    return json.dumps(fields, sort_keys=True).encode()


def decode_spec(data: bytes, prompt: tuple[int, ...]) -> SessionSpec:
    """The inverse of `encode_spec`; raises ValueError, KeyError or TypeError if `data` is not one."""
    fields: dict[str, Any] = json.loads(data)
    sampling = fields.pop("sampling")
    sampling["logit_bias"] = {int(token): bias for token, bias in sampling["logit_bias"].items()}
    fields["stop_token_ids"] = frozenset(fields["stop_token_ids"])
    fields["stop_strings"] = tuple(fields["stop_strings"])
    fields["tenant_salt"] = bytes.fromhex(fields["tenant_salt"])
    return SessionSpec(prompt=prompt, sampling=SamplingParams(**sampling), **fields)


def _sampling_fields(sampling: SamplingParams) -> dict[str, Any]:
    fields = {field.name: getattr(sampling, field.name) for field in dataclasses.fields(sampling)}
    fields["logit_bias"] = dict(sampling.logit_bias)
    return fields
