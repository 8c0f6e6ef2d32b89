"""Structured logs: one line an event, JSON or for people, on standard output. What is secret never gets into one."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Mapping
from typing import Any

import structlog
from pydantic import SecretStr

from towline.bus.address import without_user
from towline.config import ServiceSettings

SECRET_NAMES = re.compile(
    r"(^|_)(password|passwd|token|secret|secret_key|access_key|credentials?|authorization|api_key)$", re.IGNORECASE
)
HIDDEN = "***"


def configure_logging(settings: ServiceSettings, **context: object) -> None:
    """Send structlog's and the standard library's records to standard output; every line carries `context`."""
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="at"),
    ]
    for_people = settings.log_format == "console"
    last: list[Any] = [
        structlog.stdlib.ProcessorFormatter.remove_processors_meta,
        structlog.processors.format_exc_info,
        hide_secrets,
        structlog.dev.ConsoleRenderer(colors=sys.stdout.isatty())
        if for_people
        else structlog.processors.JSONRenderer(default=str, sort_keys=False),
    ]
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(processors=last, foreign_pre_chain=shared))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)  # of libraries; Towline's own is below
    level = logging.getLevelNamesMapping()[settings.log_level.upper()]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=_Unfiltered(handler),
        cache_logger_on_first_use=False,
    )
    structlog.contextvars.clear_contextvars()
    structlog.contextvars.bind_contextvars(**context)


def hide_secrets(_logger: object, _method: str, event: Mapping[str, Any]) -> dict[str, Any]:
    """A structlog processor: the event without values of secret names, `SecretStr`s and users in URLs."""
    return {name: HIDDEN if SECRET_NAMES.search(name) and value else _hidden(value) for name, value in event.items()}


def _hidden(value: Any) -> Any:
    if isinstance(value, str):
        return without_user(value)
    if isinstance(value, SecretStr):
        return HIDDEN
    if isinstance(value, Mapping):
        return hide_secrets(None, "", {str(name): item for name, item in value.items()})
    if isinstance(value, list | tuple):
        return [_hidden(item) for item in value]
    return value


class _Unfiltered:
    """Loggers that write to our handler, whatever levels the standard library's loggers have."""

    def __init__(self, handler: logging.Handler) -> None:
        self._handler = handler

    def __call__(self, *args: object) -> logging.Logger:
        logger = logging.Logger(str(args[0]) if args else "towline", logging.DEBUG)
        logger.addHandler(self._handler)
        return logger
