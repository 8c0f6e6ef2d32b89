"""Turns tracing on for a process where its settings ask for it. Off, not one module of OpenTelemetry is imported.

On: `telemetry.endpoint` or the usual OTEL_EXPORTER_OTLP_ENDPOINT names a collector. Nothing waits for it: what it doesn't take in
time is dropped and counted.
"""

from __future__ import annotations

import os
from typing import Protocol

from towline import spans
from towline.config import TelemetrySettings
from towline.errors import UsageError
from towline.runtime.metrics import Metrics

DEFAULT_RATIO = 0.01
CLOSE_SECONDS = 2.0
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_HTTP = "http/protobuf"


class Tracing(Protocol):
    """What a process does about its spans."""

    def show(self, metrics: Metrics) -> None:
        """Count what was exported and what was lost among the service's metrics."""

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Send what is left within `seconds`; a collector that is away isn't waited for."""


def is_on(settings: TelemetrySettings) -> bool:
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or os.environ.get("OTEL_TRACES_EXPORTER", "otlp") == "none":
        return False
    return bool(settings.endpoint or any(os.environ.get(name) for name in _ENDPOINTS))


def sample_ratio(settings: TelemetrySettings) -> float:
    """The settings' ratio, else OTEL_TRACES_SAMPLER's where it is one by trace id, else one in a hundred."""
    if settings.sample_ratio is not None:
        return settings.sample_ratio
    kind, argument = os.environ.get("OTEL_TRACES_SAMPLER", ""), os.environ.get("OTEL_TRACES_SAMPLER_ARG", "")
    match kind.removeprefix("parentbased_"):
        case "always_on":
            return 1.0
        case "always_off":
            return 0.0
        case "traceidratio":
            try:
                ratio = float(argument or "1")
            except ValueError:
                ratio = -1.0
            if not 0 <= ratio <= 1:
                raise UsageError(f"OTEL_TRACES_SAMPLER_ARG = {argument!r}: give a number from 0 to 1", code="telemetry")
            return ratio
    return DEFAULT_RATIO


def begin(settings: TelemetrySettings, *, service: str, replica: str, run: str) -> Tracing | None:
    """Tracing for this process, installed in `towline.spans`; None where it's off. `UsageError` where it can't be had."""
    if not is_on(settings):
        return None
    protocol = next((os.environ[name] for name in _PROTOCOLS if os.environ.get(name)), _HTTP)
    if protocol != _HTTP:
        raise UsageError(
            f"OTEL_EXPORTER_OTLP_PROTOCOL = {protocol!r}: Towline sends {_HTTP} alone; name the collector's HTTP port (4318)",
            code="telemetry",
        )
    try:
        from towline.runtime.tracing_otlp import OtlpTracing
    except ModuleNotFoundError as error:
        raise UsageError(
            f"tracing needs {error.name}: pip install 'towline[otel]', or leave telemetry.endpoint empty", code="telemetry"
        ) from None
    tracing = OtlpTracing(
        endpoint=settings.endpoint, ratio=sample_ratio(settings), service=service, replica=replica, run=run,
        timeout_seconds=settings.timeout_seconds,
    )  # fmt: skip
    spans.install(tracing.tracer)
    return tracing
