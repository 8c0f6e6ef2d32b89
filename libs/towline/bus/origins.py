"""Where a home stream's messages came from: each one that was taken in from a site says its sequence there.

nats-server writes the header, `Nats-Stream-Source: STREAM:HASH[:C=HASH] SEQUENCE …`; the first hash is of the site's API prefix.
A site's messages come in its order and none is left out, so of two that stand at home the one with the higher sequence there is
the later one here.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import AsyncGenerator, Sequence
from typing import NamedTuple

from towline.bus.jetstream import JetStream
from towline.bus.read import Unfetched
from towline.bus.sites import domain_api
from towline.bus.wire import Message

SOURCE = "Nats-Stream-Source"
_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_HASH_LENGTH = 8


class Way(NamedTuple):
    """By which consumer, and from which stream of its name, home takes in: sequences of one way are of one numbering."""

    consumer: str
    """The short hash of its name."""
    stream: str
    """The short hash of the stream's creation time; "" where nats-server is too old to say it."""

    def fits(self, other: Way) -> bool:
        return self.consumer == other.consumer and (self.stream == other.stream or not self.stream)


class Origin(NamedTuple):
    """Where a home message came from: the site, the way, and the message's subject and sequence there."""

    site: str
    way: Way
    sequence: int
    subject: str


async def origins(
    jetstream: JetStream, stream: str, sites: Sequence[str], *, start: int, end: int | None = None
) -> AsyncGenerator[tuple[Message, Origin | None], None]:
    """Home's messages [start, end), without their data; None for what didn't come from one of the sites."""
    by_hash = {api_hash(domain_api(site)): site for site in sites}
    reader = Unfetched(jetstream, stream, None, start=start, follow=False, headers_only=True)
    async with contextlib.aclosing(reader.messages()) as messages:
        async for message in messages:
            if end is not None and message.sequence >= end:
                return
            yield message, _origin(message.headers.get(SOURCE, ""), by_hash)


def parse_source(header: str) -> tuple[str, int] | None:
    """(hash of the API prefix, sequence there); None for what didn't come from another domain.

    >>> parse_source("towline_r_TRAJECTORY:9OTaER0X:C=CsQepArc 51 > > towline.r.trajectory.51.0 Qc3xfENv")
    ('9OTaER0X', 51)
    """
    words = header.split(" ")
    parts = words[0].split(":")
    if len(words) < 2 or len(parts) < 2 or not words[1].isdigit():
        return None
    return parts[1], int(words[1])


def _origin(header: str, by_hash: dict[str, str]) -> Origin | None:
    place = parse_source(header)
    if place is None or place[0] not in by_hash:
        return None
    words = header.split(" ")
    consumer = next((part.removeprefix("C=") for part in words[0].split(":")[2:] if part.startswith("C=")), "")
    subject, stream = [*words[4:], "", ""][:2]
    return Origin(by_hash[place[0]], Way(consumer, stream), place[1], subject)


def way_of(consumer: str, created: str) -> Way:
    """`created`: of the site's stream, as the server writes it."""
    return Way(api_hash(consumer), api_hash(created))


def api_hash(prefix: str) -> str:
    """nats-server's short hash of a name, which its own headers are read by again.

    >>> api_hash("$JS.b.API")
    '9OTaER0X'
    """
    digest = hashlib.sha256(prefix.encode()).digest()
    return "".join(_DIGITS[byte % len(_DIGITS)] for byte in digest[:_HASH_LENGTH])
