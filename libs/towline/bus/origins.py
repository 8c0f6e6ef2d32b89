"""Where a home stream's messages came from: each one that was taken in from a site says its sequence there.

nats-server writes the header, `Nats-Stream-Source: STREAM:HASH[:C=HASH] SEQUENCE …`; the first hash is of the site's API prefix.
A site's messages come in its order and none is left out, so of two that stand at home the one with the higher sequence there is
the later one here.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence

from nats.aio.msg import Msg

from towline.bus.jetstream import JetStream
from towline.bus.read import OrderedReader
from towline.bus.sites import domain_api

SOURCE = "Nats-Stream-Source"
_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_HASH_LENGTH = 8


async def newest_taken(
    jetstream: JetStream, stream: str, sites: Sequence[str], *, start: int, end: int | None = None
) -> tuple[dict[str, int], int]:
    """Site -> its highest sequence among home's messages [start, end), without their data; and the first sequence not read."""
    by_hash = {api_hash(domain_api(site)): site for site in sites}
    found: dict[str, int] = {}
    after = start
    reader = _Headers(jetstream, stream, None, start=start, follow=False, headers_only=True)
    async with contextlib.aclosing(reader.messages()) as messages:
        async for message in messages:
            if end is not None and message.sequence >= end:
                break
            after = message.sequence + 1
            if (origin := parse_source(message.headers.get(SOURCE, ""))) is not None and origin[0] in by_hash:
                site = by_hash[origin[0]]
                found[site] = max(found.get(site, 0), origin[1])
    return found, after


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


def api_hash(prefix: str) -> str:
    """nats-server's short hash of a name, which its own headers are read by again.

    >>> api_hash("$JS.b.API")
    '9OTaER0X'
    """
    digest = hashlib.sha256(prefix.encode()).digest()
    return "".join(_DIGITS[byte % len(_DIGITS)] for byte in digest[:_HASH_LENGTH])


class _Headers(OrderedReader):
    async def _payload(self, message: Msg, headers: dict[str, str]) -> bytes:
        return b""  # what names a blob isn't fetched
