"""Structured logs on stderr: one event a line, with service, session and trace ids, never prompt text."""

from __future__ import annotations

import logging
import sys
import time
from typing import Literal

import structlog
from opentelemetry import trace
from structlog.contextvars import merge_contextvars
from structlog.stdlib import ProcessorFormatter
from structlog.typing import EventDict, Processor, WrappedLogger

from galley.core.errors import CallerFault

# What a session is about never stands in a log, whoever passes it by mistake.
CONTENT_KEYS = frozenset(
    {"prompt", "text", "messages", "content", "tokens", "token_ids", "draft_tokens", "answer", "request"}
)

# Say each request that they make, with all of its URL.
_CHATTERING = ("httpx2", "httpcore2")


def start_logging(service: str, level: str = "info", log_format: Literal["json", "console"] = "json") -> None:
    """Route structlog and the standard library's logging to stderr; call once, at the start of a process."""
    shared: list[Processor] = [
        merge_contextvars,
        _add_service(service),
        add_trace_ids,
        withhold_content,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.PositionalArgumentsFormatter(),
            ProcessorFormatter.wrap_for_formatter,
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[ProcessorFormatter.remove_processors_meta, *_renderers(log_format)],
        )
    )
    handler.addFilter(_Seldom("opentelemetry"))
    for library in _CHATTERING:
        logging.getLogger(library).setLevel(logging.WARNING)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """A logger whose events carry what `structlog.contextvars.bind_contextvars` has bound."""
    logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(name)
    return logger


def level_of(error: BaseException | None) -> int:
    """Of how something ended: a fault of ours is for us to see to, a caller's is news."""
    return logging.WARNING if error is not None and not isinstance(error, CallerFault) else logging.INFO


def add_trace_ids(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Add trace_id and span_id of the current span, if there is one."""
    span = trace.get_current_span().get_span_context()
    if span.is_valid:
        event["trace_id"] = trace.format_trace_id(span.trace_id)
        event["span_id"] = trace.format_span_id(span.span_id)
    return event


def withhold_content(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Replace what a session is about by its length."""
    for key in CONTENT_KEYS.intersection(event):
        size = len(event[key]) if hasattr(event[key], "__len__") else 1
        event[key] = f"<withheld: {size}>"
    return event


class _Seldom(logging.Filter):
    """Lets a library say the same once a minute: a collector that is away is no news for each batch."""

    def __init__(self, library: str, pause_s: float = 60.0) -> None:
        super().__init__()
        self._library = library
        self._pause_s = pause_s
        self._said_s: dict[tuple[str, object], float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whatever it is about: what differs is its arguments."""
        if record.name.partition(".")[0] != self._library:
            return True
        said, now_s = (record.name, record.msg), time.monotonic()
        if now_s - self._said_s.get(said, -self._pause_s) < self._pause_s:
            return False
        self._said_s[said] = now_s
        return True


def _add_service(service: str) -> Processor:
    def add(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        event["service"] = service
        return event

    return add


def _renderers(log_format: Literal["json", "console"]) -> list[Processor]:
    if log_format == "json":
        return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]
    # The plain traceback, because the rich one prints local variables, prompts among them.
    return [structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)]
