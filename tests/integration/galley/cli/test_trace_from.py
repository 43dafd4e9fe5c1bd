"""`galley trace --from` fetches from what answers as Tempo, Jaeger and a collector do."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from google.protobuf.json_format import MessageToDict
from typer.testing import CliRunner, Result

from galley.cli.app import app
from galley.core import names
from galley.trace.read.otlp_file import document_of
from galley.trace.read.spans import Span
from tests.fakes.http_server import serving_http
from tests.fakes.trace_builder import SESSION, Scene, otlp

OTHER = "0123456789abcdef0123456789abcdef"
PLAIN = {"NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "200"}


def shared_step() -> Scene:
    scene = Scene()
    other = scene.request(session=OTHER).round().end()
    shared = {"sessions": 2, "rows": 33, "prefill_rows": 30, "ranks": (5, 6), "below": other.key}
    request = scene.request(attributes={names.SLOWEST_ROUND_NS: 900}).round(compute=9)
    request.round(compute=9).round(compute=9).round(compute=9)
    request.round(compute=900, batch=shared, company=[other.key]).end()
    return scene


@dataclass
class Server:
    """What each path answers, by the spans of a scene; `requests` are those it got."""

    spans: list[Span] = field(default_factory=list)
    address: str = ""
    requests: list[tuple[str, dict[str, list[str]]]] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)
    moved_to: str = ""

    def answer(self, path: str, query: dict[str, list[str]]) -> Any:
        """Return the JSON for a path; None for 404."""
        *_, last = path.split("/")
        if path == "/api/search":
            (wanted,) = query["q"]
            value = wanted.split('"')[1].removesuffix(".*").replace("\\\\", "")
            return {"traces": [{"traceID": trace.lstrip("0")} for trace in self.having(value)]}
        if path.startswith("/api/v2/traces/"):
            request = otlp(self.of({last}))
            return {"trace": MessageToDict(request)} if request.resource_spans else None
        if path.startswith("/api/v3/traces/"):
            found = document_of(otlp(self.of({last})))
            return {"result": found} if found else None
        if path == "/api/v3/traces":
            ((value,),) = [json.loads(one).values() for one in query["query.attributes"]]
            return {"result": document_of(otlp(self.of(self.having(value))))}
        return document_of(otlp(self.spans)) if path == "/traces.json" else None

    def of(self, traces: set[str]) -> list[Span]:
        return [span for span in self.spans if span.trace_id in traces]

    def having(self, value: str) -> set[str]:
        return {
            span.trace_id
            for span in self.spans
            if any(str(one).startswith(value) for one in span.attributes.values())
        }


@pytest.fixture
def server() -> Iterator[Server]:
    state = Server(shared_step().spans)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            parts = urlsplit(self.path)
            query = parse_qs(parts.query)
            state.requests.append((parts.path, query))
            state.headers = {name.lower(): value for name, value in self.headers.items()}
            if state.moved_to:
                self.send_response(302)
                self.send_header("location", state.moved_to)
                self.end_headers()
                return
            found = state.answer(parts.path, query)
            body = json.dumps(found).encode()
            self.send_response(404 if found is None else 200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with serving_http(Handler) as state.address:
        yield state


def trace_from(source: str, *args: str, **env: str) -> Result:
    return CliRunner().invoke(app, ["trace", "--from", source, *args], env=PLAIN | env)


@pytest.mark.parametrize("source", ["tempo://{}", "jaeger://{}", "http://{}/traces.json"])
def test_a_session_is_explained_with_the_steps_that_it_shared(server: Server, source: str) -> None:
    shown = trace_from(source.format(server.address), SESSION)
    assert shown.exit_code == 0, shown.output
    assert shown.stdout.startswith(f"session {SESSION}  trace ")
    assert "in a step with prompts of other sessions: 30 of its 33 rows" in " ".join(shown.stdout.split())


@pytest.mark.parametrize("source", ["tempo://{}", "jaeger://{}"])
def test_a_trace_is_found_by_its_own_id_and_the_latest_by_none(server: Server, source: str) -> None:
    [request] = [span for span in server.spans if span.text(names.SESSION_ID) == SESSION]
    by_trace = trace_from(source.format(server.address), request.trace_id)
    assert by_trace.stdout.startswith(f"session {SESSION}  trace {request.trace_id}")
    slowest = trace_from(source.format(server.address), "--slowest").stdout
    assert slowest.startswith(f"session {SESSION}")
    assert "in a step with prompts of other sessions" in slowest
    listed = trace_from(source.format(server.address), "--list").stdout
    assert SESSION in listed
    assert OTHER in listed
    assert f"2 requests in http://{server.address}" in listed


def test_the_beginning_of_a_session_will_do_for_tempo(server: Server) -> None:
    assert trace_from(f"tempo://{server.address}", SESSION[:6]).stdout.startswith(f"session {SESSION}")
    (path, query) = server.requests[0]
    assert (path, query["q"]) == ("/api/search", ['{ span.galley.session.id =~ "5e55a0.*" }'])


@pytest.mark.parametrize("source", ["tempo://{}", "jaeger://{}"])
def test_an_unknown_id_says_when_it_will_be_there(server: Server, source: str) -> None:
    missing = trace_from(source.format(server.address), "f" * 32)
    assert missing.exit_code == 1
    problem = f"no session or trace '{'f' * 32}' in http://{server.address}; a request is there"
    assert problem in missing.stderr


def test_headers_of_the_environment_are_sent(server: Server) -> None:
    headers = "Authorization=Basic YTpi=, X-Scope-OrgID=one"
    trace_from(f"tempo://{server.address}/", SESSION, GALLEY_TRACE_HEADERS=headers)
    assert (server.headers["authorization"], server.headers["x-scope-orgid"]) == ("Basic YTpi=", "one")


def test_headers_are_not_sent_where_a_back_end_redirects_to(server: Server) -> None:
    server.moved_to = f"http://{server.address}/elsewhere"
    failed = trace_from(f"tempo://{server.address}", SESSION, GALLEY_TRACE_HEADERS="Authorization=Bearer key")
    assert failed.exit_code == 1
    assert "answered with status 302" in failed.stderr
    assert [path for path, _ in server.requests] == [f"/api/v2/traces/{SESSION}"]


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("zipkin://host", "--from: must be tempo://HOST:PORT"),
        ("file:///etc/passwd", "--from: must be tempo://HOST:PORT"),
        ("tempo+ftp://host", "--from: must be tempo://HOST:PORT"),
        ("tempo://me:secret@host", "--from: must have no user name or password"),
        ("zipkin://me:secret@host", "--from: must have no user name or password"),
    ],
)
def test_other_sources_are_refused(source: str, problem: str) -> None:
    refused = trace_from(source, "--last")
    assert refused.exit_code == 2
    assert problem in " ".join(refused.stderr.split()).replace("'", "")
    assert "secret" not in refused.output


@pytest.mark.parametrize(
    ("path", "problem"), [("", "cannot be read"), ("/nothing.json", "holds no request yet")]
)
def test_a_back_end_that_is_away_or_empty_is_named(server: Server, path: str, problem: str) -> None:
    address = server.address if path else "127.0.0.1:1"
    failed = trace_from(f"http://{address}{path}", "--last")
    assert failed.exit_code == 1
    assert problem in failed.stderr
    assert failed.stderr.startswith(f"error: http://{address}{path}")


def of_span(**fields: Any) -> dict[str, Any]:
    span = {"traceId": OTHER, "spanId": OTHER[:16], **fields}
    return {"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]}


@pytest.mark.parametrize(
    ("source", "answer"),
    [
        ("tempo", {"traces": ["x"]}),
        ("tempo", {"traces": 1}),
        ("jaeger", of_span(kind=float("inf"))),
        ("jaeger", of_span(links=[{"attributes": ["x"]}])),
    ],
)
def test_an_answer_of_another_form_is_named(
    server: Server, source: str, answer: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "answer", lambda *_: answer)
    failed = trace_from(f"{source}://{server.address}", SESSION)
    assert failed.exit_code == 1
    assert failed.stderr.startswith("error: ")
    assert len(failed.stderr.splitlines()) == 1


def test_an_answer_that_is_no_http_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"no HTTP\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        failed = trace_from(f"http://127.0.0.1:{listening.getsockname()[1]}/traces.json", "--last")
        thread.join()
    assert failed.exit_code == 1
    assert "cannot be read" in failed.stderr


def test_a_port_that_is_no_number_is_refused() -> None:
    refused = trace_from("tempo://127.0.0.1:port", "--last")
    assert refused.exit_code == 2
    assert "--from: " in refused.stderr.replace("'", "")
