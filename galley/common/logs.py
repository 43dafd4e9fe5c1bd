"""Write structured logs to stderr: one event a line, with service and trace ids, never prompt text.

Modules that clients import too (`tls`) log by the standard library, with fields in `extra`; the format is the
same.
"""

from __future__ import annotations

import logging
import sys
import time
from typing import Literal

import grpc
import structlog
from opentelemetry import trace
from structlog.contextvars import merge_contextvars
from structlog.stdlib import ProcessorFormatter
from structlog.typing import EventDict, Processor, WrappedLogger

from galley.common.printable import printable
from galley.common.wire.status import code_of
from galley.core.errors import CallerFault

# Content of a session is never logged, even if a caller passes it by mistake.
CONTENT_KEYS = frozenset(
    {"prompt", "text", "messages", "content", "tokens", "token_ids", "draft_tokens", "answer", "request"}
)

# These log every request that they make, with its whole URL.
_VERBOSE_LIBRARIES = ("httpx2", "httpcore2")


def start_logging(service: str, level: str = "info", log_format: Literal["json", "console"] = "json") -> None:
    """Route structlog and the standard library's logging to stderr; call once, when a process starts."""
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
            foreign_pre_chain=[structlog.stdlib.ExtraAdder(), *shared],
            processors=[ProcessorFormatter.remove_processors_meta, *_renderers(log_format)],
        )
    )
    handler.addFilter(_RepeatFilter("opentelemetry"))
    for library in _VERBOSE_LIBRARIES:
        logging.getLogger(library).setLevel(logging.WARNING)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(name)
    return logger


_LOG = get_logger(__name__)


def log_internal(error: BaseException, **fields: object) -> None:
    """Log `error` with its traceback if a caller will only read "internal error"."""
    if code_of(error) is grpc.StatusCode.INTERNAL:
        _LOG.error("internal error", exc_info=error, **fields)


def level_of(error: BaseException | None) -> int:
    """Return WARNING for an error of the server, INFO for no error or an error of the caller."""
    return logging.WARNING if error is not None and not isinstance(error, CallerFault) else logging.INFO


def add_trace_ids(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    span = trace.get_current_span().get_span_context()
    if span.is_valid:
        event["trace_id"] = trace.format_trace_id(span.trace_id)
        event["span_id"] = trace.format_span_id(span.span_id)
    return event


def withhold_content(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    for key in CONTENT_KEYS.intersection(event):
        size = len(event[key]) if hasattr(event[key], "__len__") else 1
        event[key] = f"<withheld: {size}>"
    return event


def _replace_controls(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    # Peers wrote some of the values, and this is for a terminal; the renderer adds its colours later.
    return {key: printable(value) if isinstance(value, str) else value for key, value in event.items()}


class _RepeatFilter(logging.Filter):
    """A filter that passes each message of `library` once in `interval_s`, not at every failed export."""

    def __init__(self, library: str, interval_s: float = 60.0) -> None:
        super().__init__()
        self._library = library
        self._interval_s = interval_s
        self._logged_at_s: dict[tuple[str, object], float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name.partition(".")[0] != self._library:
            return True
        key, now_s = (record.name, record.msg), time.monotonic()
        if now_s - self._logged_at_s.get(key, -self._interval_s) < self._interval_s:
            return False
        self._logged_at_s[key] = now_s
        return True


def _add_service(service: str) -> Processor:
    def add(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        event["service"] = service
        return event

    return add


def _renderers(log_format: Literal["json", "console"]) -> list[Processor]:
    if log_format == "json":
        return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]
    # A rich traceback would print local variables, and prompts with them.
    console = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
    return [structlog.processors.format_exc_info, _replace_controls, console]
