"""Build and start the server of a gateway's HTTP port."""

from __future__ import annotations

import socket
import time

from galley.common.metrics.registry import Registry
from galley.common.server.listen import server_tls_files
from services.gateway.auth.authentication import Authentication
from services.gateway.generation import Generation
from services.gateway.http.api.answers import Answers
from services.gateway.http.api.choices import ChoiceRunner
from services.gateway.http.api.operations import Operations
from services.gateway.http.api.sessions import Sessions
from services.gateway.http.api.tokens import Tokens
from services.gateway.http.app import OPEN_PATHS, STREAMS, build_app
from services.gateway.http.description import description_routes
from services.gateway.http.page.files import page_routes
from services.gateway.http.responses.handlers import Responses
from services.gateway.http.transport.front import Access, Front, Tracing
from services.gateway.http.transport.server import HttpServer
from services.gateway.http.transport.tls import server_contexts
from services.gateway.settings import GatewaySettings, comma_separated
from services.gateway.telemetry.interceptor import RequestTracer


async def open_port(
    settings: GatewaySettings,
    generation: Generation,
    authentication: Authentication,
    tracer: RequestTracer | None,
    registry: Registry | None,
    bound: socket.socket,
) -> HttpServer:
    """Serve HTTP on a bound socket; `tracer` and `registry` are None where traces and metrics are off."""
    runner = ChoiceRunner(generation, tracer)
    strict = settings.strict_parameters
    app = build_app(
        Answers(runner, strict=strict),
        Responses(runner, strict=strict),
        Sessions(runner),
        Tokens(generation, strict=strict),
        Operations(generation, registry, int(time.time())),
    )
    pages = list(page_routes()) if settings.page else []
    if settings.reflection:
        pages += description_routes(app)
    app.router.routes += pages
    limits = settings.server_limits()
    front = Front(
        app,
        authentication,
        limits,
        Access(
            OPEN_PATHS.union(one.path for one in pages),
            frozenset(comma_separated(settings.http_cors_origins)),
        ),
        Tracing(tracer, STREAMS),
    )
    server = HttpServer(front, limits, settings.client_timeout_s, server_contexts(server_tls_files(settings)))
    await server.start(bound)
    return server
