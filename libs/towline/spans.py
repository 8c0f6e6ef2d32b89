"""Spans of a traced sample, request or version, as every part may make them: free of any telemetry library.

`tracer` is None until a process turns tracing on (towline.runtime.tracing); then every call here answers with `NOTHING`, whose
methods do nothing, and no message carries a header. What is traced follows from a sample's identity, so every service agrees on
it without asking: docs/design/080-tracing.md.
"""

from __future__ import annotations

import contextvars
import random
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Literal, NamedTuple, Protocol

import xxhash

TRACEPARENT = "traceparent"
"""W3C Trace Context's header, on the bus as in HTTP."""
Value = str | int | float | bool
Kind = Literal["internal", "producer", "consumer", "client", "server"]
_SAMPLED = 1


class Context(NamedTuple):
    """Where a span stands; whoever has one is traced."""

    trace_id: int
    span_id: int

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-01"

    @property
    def headers(self) -> dict[str, str]:
        return {TRACEPARENT: self.traceparent}


class Span(Protocol):
    """One piece of work. `with span:` makes it the one whose children `child` makes, and ends it, failed where that raises."""

    @property
    def context(self) -> Context | None: ...

    @property
    def headers(self) -> dict[str, str] | None:
        """What a message carries so that its reader goes on from here; None where nothing is traced."""

    def set(self, **attributes: Value | Sequence[int] | None) -> None:
        """Attributes, under `towline.NAME`; None says nothing."""

    def link(self, context: Context) -> None:
        """It has to do with a span of another trace."""

    def renumber(self) -> None:
        """Another has the number that was meant for it: it gets one of its own."""

    def fail(self, reason: str) -> None: ...

    def end(self, at: float | None = None) -> None:
        """Once; `at` is Unix seconds, now where it's left out."""

    def __bool__(self) -> bool: ...

    def __enter__(self) -> Span: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...


class Tracer(Protocol):
    """Makes spans; the one there is stands in `tracer`."""

    def sampled(self, trace_id: int) -> bool:
        """Whether the trace of a sample or request is among those that are kept."""

    def start(
        self,
        name: str,
        parent: Context | None,
        *,
        kind: Kind = "internal",
        own: Context | None = None,
        trace_id: int | None = None,
        links: Sequence[Context] = (),
        at: float | None = None,
    ) -> Span:
        """A span, begun `at` (Unix seconds) or now, in its parent's trace, in `trace_id`'s, or in a new one. `own`: its place,
        where that is fixed by what it says has happened; where it fails it hasn't, and the span gets another number."""


class _Nothing:
    """The span of what isn't traced."""

    __slots__ = ()
    context = None
    headers = None

    def set(self, **attributes: Value | Sequence[int] | None) -> None: ...

    def link(self, context: Context) -> None: ...

    def renumber(self) -> None: ...

    def fail(self, reason: str) -> None: ...

    def end(self, at: float | None = None) -> None: ...

    def __bool__(self) -> bool:
        return False

    def __enter__(self) -> Span:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...


NOTHING: Span = _Nothing()
tracer: Tracer | None = None
"""Set by `install` alone."""
current: contextvars.ContextVar[Context | None] = contextvars.ContextVar("towline-span", default=None)


def install(new: Tracer | None) -> None:
    """Turn tracing on for this process, or off."""
    global tracer
    tracer = new


def follow(name: str, headers: Mapping[str, str] | None, kind: Kind = "consumer", *, fixed: bool = False) -> Span:
    """The span of whoever handles a message; nothing where its sender wasn't traced. `fixed`: as in `child`."""
    if tracer is None or not headers:
        return NOTHING
    parent = parse(headers.get(TRACEPARENT))
    if parent is None:
        return NOTHING
    return tracer.start(name, parent, kind=kind, own=fixed_context(parent.trace_id, name) if fixed else None)


def child(name: str, kind: Kind = "internal", *, fixed: bool = False) -> Span:
    """A span below the one that this task is in. `fixed`: there is one such of its trace, whose number others can tell."""
    if tracer is None:
        return NOTHING
    parent = current.get()
    if parent is None:
        return NOTHING
    return tracer.start(name, parent, kind=kind, own=fixed_context(parent.trace_id, name) if fixed else None)


def request(name: str, traceparent: str | None) -> Span:
    """The span of a request from outside: traced where its sender traces it or, where that says nothing, by the ratio."""
    if tracer is None:
        return NOTHING
    if traceparent is not None and _fields(traceparent) is not None:
        parent = parse(traceparent)
        return NOTHING if parent is None else tracer.start(name, parent, kind="server")
    trace_id = random.getrandbits(128) or 1
    return tracer.start(name, None, kind="server", trace_id=trace_id) if tracer.sampled(trace_id) else NOTHING


def of_version(name: str, write_id: str, *, committed: bool) -> Span:
    """A span below the commit of the version with this WRITE_ID; not `committed`: the base model's. All versions are traced."""
    if tracer is None:
        return NOTHING
    trace_id = version_trace(write_id)
    return tracer.start(name, fixed_context(trace_id, COMMIT) if committed else None, trace_id=trace_id)


COMMIT = "version.commit"
STAGE = "version.stage"


def sample_trace(run: str, born: str, group: int, sample: int) -> int:
    """A sample's trace id. `born` tells apart runs of one name: when CONTROL was created."""
    return _trace(f"sample/{run}/{born}/{group}/{sample}")


def batch_trace(run: str, born: str, epoch: int, for_depth: int) -> int:
    return _trace(f"batch/{run}/{born}/{epoch}/{for_depth}")


def version_trace(write_id: str) -> int:
    return _trace(f"version/{write_id}")


def fixed_context(trace_id: int, name: str) -> Context:
    """The place of the one span of this name that a trace has."""
    return Context(trace_id, xxhash.xxh3_64_intdigest(f"{trace_id:x}/{name}".encode()) or 1)


def _trace(identity: str) -> int:
    return xxhash.xxh3_128_intdigest(identity.encode()) or 1


def parse(traceparent: str | None) -> Context | None:
    """The sender's place; None where there is none, it isn't one, or its sender isn't traced."""
    fields = None if traceparent is None else _fields(traceparent)
    return Context(fields[0], fields[1]) if fields is not None and fields[2] & _SAMPLED else None


def _fields(text: str) -> tuple[int, int, int] | None:
    """Trace id, span id and flags of `00-TRACE-SPAN-FLAGS`; a later version may have more behind."""
    parts = text.strip().split("-")
    if len(parts) < 4 or [len(part) for part in parts[:4]] != [2, 32, 16, 2] or (parts[0] == "00" and len(parts) > 4):
        return None
    if parts[0] == "ff" or any(char not in "0123456789abcdef" for part in parts[:4] for char in part):
        return None
    trace_id, span_id, flags = int(parts[1], 16), int(parts[2], 16), int(parts[3], 16)
    return (trace_id, span_id, flags) if trace_id and span_id else None
