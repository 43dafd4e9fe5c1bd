"""Answer load balancers, operators and tools: health, models, metrics, version."""

from __future__ import annotations

from typing import Any

from google.protobuf.json_format import MessageToDict
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from galley.common.metrics.registry import Registry
from galley.core.errors import InvalidField
from galley.version import __version__
from services.gateway.generation import Generation
from services.gateway.http.transport.errors import Refused
from services.gateway.request.validate import adapter_of


class Operations:
    """`registry` is None where metrics are off; `created_s` is the Unix time of the gateway's start."""

    def __init__(self, generation: Generation, registry: Registry | None, created_s: int) -> None:
        self._generation = generation
        self._registry = registry
        self._created_s = created_s

    async def health(self) -> dict[str, str]:
        """Return 200 while the process serves."""
        return {"status": "ok"}

    async def ready(self) -> Response:
        """Return 200 if new requests are accepted, 503 while the gateway shuts down."""
        is_ready = not self._generation.streams.is_draining
        return JSONResponse({"status": "ok" if is_ready else "draining"}, 200 if is_ready else 503)

    async def version(self) -> dict[str, str]:
        """Return the version of Galley."""
        return {"version": __version__}

    async def metrics(self, request: HttpRequest) -> Response:
        """Return the metrics of this gateway for Prometheus."""
        if self._registry is None:
            raise Refused(404, "not_found", "metrics are off (--metrics-port)")
        from galley.common.metrics.scrape import render  # noqa: PLC0415  # imports prometheus_client

        body, kind = await render(self._registry.read(), request.headers.get("accept", ""))
        return Response(body, media_type=kind)

    async def audits(self) -> dict[str, Any]:
        """Return the totals of all audits of the deployment."""
        counts = await self._generation.auditor.counts()
        return {
            "object": "galley.audits",
            "ratio": self._generation.auditor.ratio,
            "sessions": counts.sessions,
            "damaged": counts.damaged,
            "deterministic": {"tokens": counts.tokens, "differing": counts.differing},
            "other": {"tokens": counts.loose_tokens, "differing": counts.loose_differing},
        }

    async def models(self) -> dict[str, Any]:
        """Return the served model and its LoRA adapters."""
        adapters = self._generation.model.info.lora_adapters
        return {"object": "list", "data": [self._model(), *map(self._model, adapters)]}

    async def model(self, model: str) -> dict[str, Any]:
        """Return the served model, or the LoRA adapter, of this name."""
        served = self._generation.model.request_model()
        if not model:
            raise InvalidField("model", "must not be empty")
        return self._model(adapter_of(model, served))

    def _model(self, lora: str = "") -> dict[str, Any]:
        described = self._generation.model.describe()
        return {
            "id": lora or described.model,
            "object": "model",
            "created": self._created_s,
            "owned_by": "galley",
            "parent": described.model if lora else None,
            "max_model_len": described.context_window,
            "galley": MessageToDict(described, preserving_proto_field_name=True),
        }
