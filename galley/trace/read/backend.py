"""Fetch traces over HTTP: from Grafana Tempo, from Jaeger, or any URL that serves OTLP's JSON.

Tempo has an API of its own, Jaeger `api/v3`. A request is fetched with the traces that its spans link to:
those of steps that it shared, and of the request that it continues.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.parse import quote, urlencode, urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from galley.core import names
from galley.trace.read.fetched_json import by_trace, continued_traces, linked_traces, plain_otlp
from galley.trace.read.library import WHEN, NotFound
from galley.trace.read.otlp_file import BadTraceFile, Line, Lines

HEADERS = "GALLEY_TRACE_HEADERS"
"""Variable with headers for each request, as `Authorization=Bearer KEY,X-Scope-OrgID=TENANT`."""
TEMPO, JAEGER, OTLP = "tempo", "jaeger", "otlp"
_MOST_BYTES = 64 * 2**20
_MOST_TRACES = 20
_TIMEOUT_S = 30.0
_SEARCHED_S = 24 * 3600
_WHOLE_ID = re.compile("[0-9a-fA-F]{32}")
_TRACE_OF = {TEMPO: "/api/v2/traces/{}", JAEGER: "/api/v3/traces/{}"}


class FetchedLines(Lines):
    """Traces that were fetched, as the lines of a file."""

    def __init__(self, name: str, documents: Mapping[str, Any]) -> None:
        self.name = name
        self._lines = [Line(name, json.dumps(document).encode() + b"\n") for document in documents.values()]

    def __iter__(self) -> Iterator[Line]:
        return iter(self._lines)


@dataclass(frozen=True, slots=True)
class Backend:
    """A back end of `kind` at `url`; `get` returns the JSON documents at a URL, None if there are none."""

    kind: str
    url: str
    get: Callable[[str], Any]

    def one(self, request_id: str) -> FetchedLines:
        """Fetch a session or a trace, with the traces that it links to. Raises NotFound, BadTraceFile."""
        if self.kind == OTLP:
            return self._whole(request_id)
        traces = self._trace(request_id) if _WHOLE_ID.fullmatch(request_id) else {}
        traces = traces or self._search(names.SESSION_ID, request_id)
        if not traces:
            raise NotFound(f"no session or trace {request_id!r} in {self.url}; {WHEN}")
        waiting = [trace for document in traces.values() for trace in linked_traces(document)]
        while waiting and len(traces) < _MOST_TRACES:
            trace_id = waiting.pop(0)
            if trace_id not in traces:
                found = self._trace(trace_id)
                traces |= found
                waiting += [trace for document in found.values() for trace in continued_traces(document)]
        return FetchedLines(self.url, traces)

    def latest(self) -> FetchedLines:
        """Fetch the latest requests of the last day, without the traces that they link to."""
        if self.kind == OTLP:
            return self._whole("")
        return FetchedLines(self.url, self._search(names.PROVIDER, names.GALLEY))

    def _whole(self, request_id: str) -> FetchedLines:
        documents = self.get(self.url.replace("{id}", quote(request_id, safe="")))
        return FetchedLines(self.url, {str(at): plain_otlp(one) for at, one in enumerate(documents or ())})

    def _trace(self, trace_id: str) -> dict[str, Any]:
        documents = self.get(self.url + _TRACE_OF[self.kind].format(trace_id.lower()))
        return by_trace(documents or ())

    def _search(self, attribute: str, value: str) -> dict[str, Any]:
        """Fetch traces of the last day in which a span has the attribute; of text its beginning for Tempo."""
        now_s = int(time.time())
        if self.kind == JAEGER:
            query = {
                "query.service_name": "galley-gateway",
                "query.start_time_min": _rfc3339(now_s - _SEARCHED_S),
                "query.start_time_max": _rfc3339(now_s + 1),
                "query.search_depth": str(_MOST_TRACES),
                "query.attributes": json.dumps({attribute: value}),
            }
            return by_trace(self.get(f"{self.url}/api/v3/traces?{urlencode(query)}") or ())
        pattern = json.dumps(re.escape(value) + ".*")
        query = {
            "q": f"{{ span.{attribute} =~ {pattern} }}",
            "start": str(now_s - _SEARCHED_S),
            "end": str(now_s + 1),
            "limit": str(_MOST_TRACES),
        }
        found: Sequence[Any] = self.get(f"{self.url}/api/search?{urlencode(query)}") or ({},)
        try:
            ids = [str(trace.get("traceID", "")).zfill(32) for trace in found[0].get("traces") or ()]
        except (AttributeError, TypeError) as error:
            raise BadTraceFile(f"{self.url}: must answer a search with a list of traces ({error})") from None
        traces: dict[str, Any] = {}
        for trace_id in ids:
            traces |= self._trace(trace_id)
        return traces


def backend_of(source: str) -> Backend:
    """Return the back end that `source` names. Raise ValueError, which says how."""
    parts = urlsplit(source)
    if parts.username or parts.password:  # before the source is printed
        raise ValueError(f"must have no user name or password; put headers into {HEADERS}")
    kind, _, transport = parts.scheme.partition("+")
    if parts.scheme in {"http", "https"}:
        kind, transport = OTLP, parts.scheme
    if (
        kind not in {TEMPO, JAEGER, OTLP}
        or transport not in {"", "http", "https"}
        or not parts.hostname
        or parts.port == 0
    ):
        raise ValueError(
            "must be tempo://HOST:PORT, jaeger://HOST:PORT (tempo+https://, jaeger+https:// over TLS) or the "
            f"http(s):// address of OTLP JSON, got {source!r}"
        )
    url = parts._replace(scheme=transport or "http").geturl()
    return Backend(kind, url if kind == OTLP else url.rstrip("/"), _get)


class _NoRedirects(HTTPRedirectHandler):
    """Make a redirect an error: urllib would send the headers, and keys in them, to any other host."""

    def redirect_request(self, *_: object) -> None:
        return None


def _get(url: str) -> list[Any] | None:
    """Return the JSON documents at a URL; None for 404. Raises BadTraceFile."""
    headers = {"accept": "application/json"}
    for pair in filter(None, os.environ.get(HEADERS, "").split(",")):
        name, _, value = pair.partition("=")
        headers[name.strip()] = value.strip()
    place = url.partition("?")[0]
    try:
        # The scheme is http or https: see backend_of.
        request = Request(url, headers=headers)  # noqa: S310
        with build_opener(_NoRedirects).open(request, timeout=_TIMEOUT_S) as response:
            body = response.read(_MOST_BYTES + 1)
    except HTTPError as error:
        with error:
            if error.code == 404:
                return None
            raise BadTraceFile(
                f"{place}: answered with status {error.code}; headers come from {HEADERS}"
            ) from None
    except (OSError, HTTPException, ValueError) as error:
        raise BadTraceFile(f"{place}: cannot be read ({error})") from None
    if len(body) > _MOST_BYTES:
        raise BadTraceFile(f"{place}: must be at most {_MOST_BYTES // 2**20} MiB")
    try:
        return list(_documents(body.decode()))
    except (TypeError, ValueError, RecursionError) as error:
        raise BadTraceFile(f"{place}: must be JSON ({error})") from None


def _documents(text: str) -> Iterator[Any]:
    """Yield JSON values one after another: Jaeger sends one for each part of a long response."""
    decoder, text = json.JSONDecoder(), text.strip()
    while text:
        document, end = decoder.raw_decode(text)
        if not isinstance(document, dict):
            raise TypeError("an object is needed")
        yield document
        text = text[end:].lstrip()


def _rfc3339(unix_s: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(unix_s))
