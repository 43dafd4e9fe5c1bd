"""Read the JSON of Tempo, Jaeger and collectors as OTLP: they differ in ids, enums and the outer object."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Iterable, Iterator
from typing import Any

from galley.core import names
from galley.trace.read.otlp_file import IDS, BadTraceFile, alone, flat

_HEX_DIGITS = {"traceId": 32, "spanId": 16, "parentSpanId": 16}
_KINDS = ("UNSPECIFIED", "INTERNAL", "SERVER", "CLIENT", "PRODUCER", "CONSUMER")
_CODES = ("UNSET", "OK", "ERROR")


def by_trace(documents: Iterable[Any]) -> dict[str, Any]:
    """Return the spans of documents by their traces, as OTLP's JSON."""
    traces: dict[str, Any] = {}
    for document in documents:
        for resource, scope, span in flat(plain_otlp(document)):
            into = traces.setdefault(str(span.get("traceId")), {"resourceSpans": []})
            into["resourceSpans"].append(alone(resource, scope, span))
    return traces


def plain_otlp(document: Any) -> dict[str, Any]:
    """Return OTLP's JSON of what Tempo, Jaeger or a collector answered. Raises BadTraceFile."""
    try:
        inner = document.get("trace") or document.get("result") or document
        resources = inner.get("resourceSpans") or inner.get("batches") or ()
        return {"resourceSpans": [_resource(resource) for resource in resources]}
    except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
        raise _malformed(error) from None


def _malformed(error: Exception) -> BadTraceFile:
    return BadTraceFile(f"must be traces in OTLP's JSON encoding ({error})")


def _resource(resource: Any) -> dict[str, Any]:
    scopes = resource.get("scopeSpans") or resource.get("instrumentationLibrarySpans") or ()
    return {
        "resource": resource.get("resource") or {},
        "scopeSpans": [{"spans": [_span(span) for span in scope.get("spans") or ()]} for scope in scopes],
    }


def _span(span: Any) -> dict[str, Any]:
    status = span.get("status") or {}
    return {
        **_with_hex_ids(span),
        "kind": _number(span.get("kind"), _KINDS),
        "status": {**status, "code": _number(status.get("code"), _CODES)},
        "links": [_with_hex_ids(link) for link in span.get("links") or ()],
    }


def _with_hex_ids(holder: Any) -> dict[str, Any]:
    """Return a span or link whose ids are hexadecimal: Tempo writes bytes as protobuf does, in base64."""
    ids = {name: holder[name] for name in IDS if holder.get(name)}
    plain = {
        name: one if len(one) == _HEX_DIGITS[name] else b64decode(one).hex() for name, one in ids.items()
    }
    return {**holder, **plain}


def _number(value: Any, known: tuple[str, ...]) -> int:
    """Return an enum's number: some write its name, as SPAN_KIND_SERVER."""
    if isinstance(value, str) and not value.isdigit():
        return next((number for number, name in enumerate(known) if value.endswith(f"_{name}")), 0)
    return int(value or 0)


def _links(document: Any) -> Iterator[tuple[str, str]]:
    """Yield the kind of each link of ours, and its trace. Raises BadTraceFile."""
    try:
        for link in (link for *_, span in flat(document) for link in span["links"]):
            for pair in link.get("attributes") or ():
                if pair.get("key") == names.LINK:
                    yield str((pair.get("value") or {}).get("stringValue")), str(link.get("traceId"))
    except (AttributeError, TypeError) as error:
        raise _malformed(error) from None


def linked_traces(document: Any) -> list[str]:
    """Return the traces that spans link to: the request continued first, then steps, then their company."""
    order = (names.LINK_CONTINUES, names.LINK_BATCH, names.LINK_ITEM)
    found = sorted((order.index(kind), trace) for kind, trace in _links(document) if kind in order)
    return list(dict.fromkeys(trace for _, trace in found))


def continued_traces(document: Any) -> list[str]:
    return [trace for kind, trace in _links(document) if kind == names.LINK_CONTINUES]
