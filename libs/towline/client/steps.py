"""What a call of a gateway does, without doing it: a generator says what to send and how long to wait, and is told what came.

So the decisions (what is repeated, after how long, where a stream goes on) stand here once, for HTTP and gRPC, sync and async; a
transport only does what it's told. `repeated` is a call with one answer, `followed` one whose answer comes in pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeAlias, TypeVar

from towline.client.rules import Patience
from towline.errors import TowlineError, UnavailableError

E = TypeVar("E")
"""What is sent."""
R = TypeVar("R")
"""What a transport tells: whatever came of it."""
T = TypeVar("T")
R_contra = TypeVar("R_contra", contravariant=True)
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Send(Generic[E]):
    """Send it, and tell what comes of it: the answer, or of a stream the first thing that comes."""

    what: E


@dataclass(frozen=True, slots=True)
class Next:
    """Tell the next thing of the stream that was sent last."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Do nothing for so long; what is told then isn't looked at."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Show(Generic[T]):
    """Give it to the caller; what is told then isn't looked at."""

    piece: T


@dataclass(frozen=True, slots=True)
class Refused:
    """`passes`: the same may be answered later."""

    error: TowlineError
    passes: bool
    retry_after: str | None = None
    """Seconds."""


@dataclass(frozen=True, slots=True)
class Passed(Generic[T]):
    value: T


Steps: TypeAlias = Generator[Send[E] | Wait, R, T]
Flow: TypeAlias = Generator[Send[E] | Next | Wait | Show[T], R, None]


def repeated(what: E, judge: Callable[[R], Passed[T] | Refused], patience: Patience) -> Steps[E, R, T]:
    """Send it until its answer is no state that passes, or the patience is over."""
    while True:
        verdict = judge((yield Send(what)))
        if isinstance(verdict, Passed):
            return verdict.value
        yield Wait(_pause(verdict, patience))


class Reader(Protocol[R_contra, T_co]):
    """Reads what comes of a stream. `again`: it begins anew, and what was read already isn't given again."""

    @property
    def done(self) -> bool: ...

    def read(self, told: R_contra) -> Sequence[T_co] | Refused: ...

    def again(self) -> None: ...


def followed(what: E, reader: Reader[R, T], new_patience: Callable[[], Patience]) -> Flow[E, T, R]:
    """Each piece once, over as many breaks as the patience bears; it begins anew with each piece."""
    patience = new_patience()
    while True:
        found = reader.read((yield Send(what)))
        while not isinstance(found, Refused):
            for piece in found:
                patience = new_patience()
                yield Show(piece)
            if reader.done:
                return
            found = reader.read((yield Next()))
        yield Wait(_pause(found, patience))
        reader.again()


def _pause(refused: Refused, patience: Patience) -> float:
    delay = patience.pause(refused.retry_after) if refused.passes else None
    if delay is None:
        raise refused.error
    return delay


def lost(reason: str) -> UnavailableError:
    return UnavailableError(f"the connection to the gateway was lost: {reason}", code="gateway_unreachable")
