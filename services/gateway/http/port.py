"""Build and start the server of a gateway's HTTP port."""

from __future__ import annotations

import socket
import time

from galley.common.server.listen import server_files
from services.gateway.http.api.answers import Answers
from services.gateway.http.api.choices import ChoiceRunner
from services.gateway.http.api.operations import Operations
from services.gateway.http.api.sessions import Sessions
from services.gateway.http.api.tokens import Tokens
from services.gateway.http.app import OPEN_PATHS, STREAMS, build_app
from services.gateway.http.description import description_routes
from services.gateway.http.page.files import page_routes
from services.gateway.http.responses.handlers import Responses
from services.gateway.http.shared import Shared
from services.gateway.http.transport.front import Access, Front, Tracing
from services.gateway.http.transport.server import HttpServer
from services.gateway.http.transport.tls import server_context
from services.gateway.settings import GatewaySettings, comma_separated


async def open_port(settings: GatewaySettings, shared: Shared, bound: socket.socket) -> HttpServer:
    """Serve HTTP on a bound socket."""
    generation = shared.generation
    runner = ChoiceRunner(generation, shared.tracer)
    strict = settings.strict_parameters
    app = build_app(
        Answers(runner, strict=strict),
        Responses(runner, strict=strict),
        Sessions(runner),
        Tokens(generation, strict=strict),
        Operations(generation, shared.registry, int(time.time())),
    )
    pages = list(page_routes()) if settings.page else []
    if settings.reflection:
        pages += description_routes(app)
    app.router.routes += pages
    limits = settings.server_limits()
    front = Front(
        app,
        shared.authentication,
        limits,
        Access(
            OPEN_PATHS.union(one.path for one in pages),
            frozenset(comma_separated(settings.http_cors_origins)),
        ),
        Tracing(shared.tracer, STREAMS),
    )
    server = HttpServer(front, limits, settings.client_timeout_s, server_context(server_files(settings)))
    await server.start(bound)
    return server
