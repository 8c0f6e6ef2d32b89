"""Tracing without a collector: ids and headers, which samples are traced, what turns it on, and that off costs nothing."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace.sampling import Decision, TraceIdRatioBased
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from towline import spans
from towline.config import TelemetrySettings
from towline.errors import UsageError
from towline.runtime.metrics import Metrics
from towline.runtime.tracing import begin, is_on, sample_ratio
from towline.runtime.tracing_otlp import OtlpTracing

ROOT = Path(__file__).parents[3]
NAMES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_TRACES_SAMPLER", "OTEL_TRACES_SAMPLER_ARG",
         "OTEL_SDK_DISABLED", "OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_SERVICE_NAME")  # fmt: skip


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    yield
    spans.install(None)


@pytest.fixture
def tracing() -> Iterator[OtlpTracing]:
    made = OtlpTracing(endpoint="http://127.0.0.1:9", ratio=0.1, service="t", replica="0", run="r", timeout_seconds=0.1)
    spans.install(made.tracer)
    yield made
    made.close(0.0)


def test_services_and_the_command_start_without_opentelemetry_and_without_protobuf() -> None:
    services = [path.parent.name for path in (ROOT / "services/towline").glob("*/service.py")]
    assert len(services) >= 6
    modules = [f"towline.{name}.service" for name in services] + ["towline.cli.main", "towline.runtime.service", "towline.spans"]
    program = f"import sys; import {', '.join(modules)}; print([m for m in sys.modules if m.startswith('opentelemetry')])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"


def test_off_nothing_is_made_and_nothing_is_allocated() -> None:
    headers = {"Nats-Msg-Id": "x"}

    def path() -> bool:
        with spans.follow("task", headers) as task, spans.child("rollout") as rollout, spans.child("trajectory", "producer"):
            found = task is spans.NOTHING and rollout.headers is None and not rollout
        return found and spans.request("r", None) is spans.NOTHING

    assert path()
    before = sys.getallocatedblocks()
    for _ in range(10_000):
        path()
    assert sys.getallocatedblocks() - before < 100


@given(st.integers(1, 2**128 - 1), st.integers(1, 2**64 - 1))
def test_traceparent_is_w3cs(trace_id: int, span_id: int) -> None:
    context = spans.Context(trace_id, span_id)
    assert spans.parse(context.traceparent) == context
    theirs = TraceContextTextMapPropagator().extract({"traceparent": context.traceparent})
    (span,) = theirs.values()
    found = span.get_span_context()
    assert (found.trace_id, found.span_id, found.trace_flags.sampled) == (trace_id, span_id, True)


_T, _S = "1" * 32, "1" * 16


@pytest.mark.parametrize(
    "text",
    ["", "00", f"00-{'0' * 32}-{_S}-01", f"00-{_T}-{'0' * 16}-01", f"ff-{_T}-{_S}-01", f"00-{_T}-{_S}-00",
     f"00-{_T}-{_S}-01-more", f"00-{'g' * 32}-{_S}-01", f"00-{_T[1:]}-{_S}-01", f"00-{'A' * 32}-{_S}-01"],
)  # fmt: skip
def test_what_is_no_traced_traceparent_traces_nothing(text: str, tracing: OtlpTracing) -> None:
    assert spans.parse(text) is None
    assert spans.follow("x", {"traceparent": text}) is spans.NOTHING


def test_a_later_version_of_traceparent_may_say_more(tracing: OtlpTracing) -> None:
    assert spans.parse(f"cc-{'1' * 32}-{'2' * 16}-03-what-else") == spans.Context(int("1" * 32, 16), int("2" * 16, 16))


@pytest.mark.parametrize("ratio", [0.0, 0.01, 0.5, 1.0])
def test_a_sample_is_traced_by_its_identity_alone_as_opentelemetrys_sampler_decides(ratio: float) -> None:
    theirs = TraceIdRatioBased(ratio)
    made = [
        OtlpTracing(endpoint="http://127.0.0.1:9", ratio=ratio, service=str(i), replica="0", run="r", timeout_seconds=0.1)
        for i in range(2)
    ]
    chosen = []
    for group in range(500):
        for sample in range(4):
            trace = spans.sample_trace("run", "born", group, sample)
            want = theirs.should_sample(None, trace, "admit").decision is Decision.RECORD_AND_SAMPLE
            assert [one.tracer.sampled(trace) for one in made] == [want, want]
            chosen.append(want)
    assert abs(sum(chosen) / len(chosen) - ratio) < 0.02
    for one in made:
        one.close(0.0)


def test_another_run_of_the_same_name_has_other_traces() -> None:
    assert spans.sample_trace("run", "2026-01-01", 1, 2) != spans.sample_trace("run", "2026-01-02", 1, 2)
    assert len({spans.sample_trace("run", "b", group, sample) for group in range(-50, 50) for sample in range(50)}) == 5000


def test_a_request_goes_on_with_its_clients_trace_and_with_its_clients_choice(tracing: OtlpTracing) -> None:
    context = spans.Context(random.getrandbits(128), random.getrandbits(64))
    traced = spans.request("gateway.request", context.traceparent)
    assert traced.context is not None
    assert traced.context.trace_id == context.trace_id
    assert spans.request("gateway.request", context.traceparent[:-1] + "0") is spans.NOTHING
    kept = sum(bool(spans.request("gateway.request", None)) for _ in range(3000))
    assert 200 < kept < 400


def test_a_fixed_span_that_fails_leaves_its_place_to_the_one_that_succeeds(tracing: OtlpTracing) -> None:
    parent = spans.Context(5, 6)
    with pytest.raises(ValueError, match="lost"), spans.follow("task", parent.headers):  # noqa: PT012
        with spans.child("trajectory", fixed=True) as first:
            wanted = first.context
            raise ValueError("lost")
    with spans.follow("task", parent.headers), spans.child("trajectory", fixed=True) as second:
        pass
    assert second.context == wanted == spans.fixed_context(5, "trajectory")
    assert first.context != wanted


def test_tracing_is_on_where_an_endpoint_is_named_unless_the_usual_variables_switch_it_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    named = TelemetrySettings(endpoint="http://collector:4318")
    assert not is_on(TelemetrySettings())
    assert is_on(named)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://elsewhere:4318")
    assert is_on(TelemetrySettings())
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    assert not is_on(named)
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert not is_on(named)


@pytest.mark.parametrize(
    ("sampler", "argument", "ratio"),
    [("", "", 0.01), ("always_on", "", 1.0), ("parentbased_always_off", "", 0.0), ("traceidratio", "0.25", 0.25),
     ("parentbased_traceidratio", "", 1.0)],
)  # fmt: skip
def test_the_ratio_is_the_settings_or_the_usual_variables(
    monkeypatch: pytest.MonkeyPatch, sampler: str, argument: str, ratio: float
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", argument)
    assert sample_ratio(TelemetrySettings()) == ratio
    assert sample_ratio(TelemetrySettings(sample_ratio=0.75)) == 0.75


def test_settings_that_cant_be_followed_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="4318"):
        TelemetrySettings(endpoint="collector:4317")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "two")
    with pytest.raises(UsageError, match="OTEL_TRACES_SAMPLER_ARG"):
        sample_ratio(TelemetrySettings())
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    with pytest.raises(UsageError, match="4318"):
        begin(TelemetrySettings(endpoint="http://c:4317"), service="s", replica="0", run="r")


def test_without_the_extra_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "towline.runtime.tracing_otlp", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.context", None)
    with pytest.raises(UsageError, match=r"towline\[otel\]"):
        begin(TelemetrySettings(endpoint="http://c:4318"), service="s", replica="0", run="r")


def test_what_the_collector_took_and_what_was_lost_is_counted() -> None:
    made = OtlpTracing(endpoint="http://127.0.0.1:9", ratio=1.0, service="t", replica="0", run="r", timeout_seconds=0.1)
    metrics = Metrics("t")
    made.show(metrics)
    for _ in range(3):
        made.tracer.start("x", None).end()
    made.close()
    page = metrics.render().decode()
    assert "towline_t_spans_ended_total 3.0" in page
    assert "towline_t_spans_failed_total 3.0" in page
    assert "towline_t_spans_exported_total 0.0" in page
