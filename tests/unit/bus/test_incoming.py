"""What is taken off the line is what nats-py's own client makes of the same bytes, wherever the network cuts them."""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.protocol.parser import Parser

from towline.bus.incoming import Incoming

HEADERS = st.sampled_from([
    b"", b"NATS/1.0\r\n\r\n", b"NATS/1.0 404 No Messages\r\n\r\n", b"NATS/1.0 503\r\n\r\n",
    b"NATS/1.0\r\nA: 1\r\nB:  two \r\n\r\n", b"NATS/1.0\r\nNats-Subject: a.b\r\nNats-Sequence: 7\r\n\r\n",
    b"NATS/1.0 100 Idle Heartbeat\r\nNats-Last-Consumer: 10\r\n\r\n",
])  # fmt: skip
PAYLOADS = st.sampled_from([b"", b"\r\n", b"MSG a 1 2\r\n", b"x" * 5000]) | st.binary(max_size=300)
OTHERS = st.sampled_from([b"PING\r\n", b"PONG\r\n", b"+OK\r\n", b"-ERR 'Permissions Violation for Publish to \"a\"'\r\n",
                          b'INFO {"max_payload": 100}\r\n'])  # fmt: skip


@st.composite
def messages(draw: st.DrawFn) -> bytes:
    headers, payload, reply = draw(HEADERS), draw(PAYLOADS), draw(st.sampled_from([b"", b" _INBOX.x.1"]))
    sid = draw(st.integers(1, 3))
    if headers:
        return b"HMSG a.b %d%s %d %d\r\n%s%s\r\n" % (sid, reply, len(headers), len(headers) + len(payload), headers, payload)
    return b"MSG a.b %d%s %d\r\n%s\r\n" % (sid, reply, len(payload), payload)


class Reader:
    """What nats-py's parser calls, and the protocol that is there before ours."""

    def __init__(self) -> None:
        self.found: list[Any] = []
        self.others: list[Any] = []
        self._client = Client()

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> None:
        parsed = await self._client._process_headers(headers)
        self.found.append((sid, subject.decode(), reply.decode(), bytes(data), parsed))

    async def _process_ping(self) -> None:
        self.others.append("ping")

    async def _process_pong(self) -> None:
        self.others.append("pong")

    async def _process_err(self, text: str) -> None:
        self.others.append(text)

    async def _process_info(self, info: dict[str, Any]) -> None:
        self.others.append(info)


@given(st.lists(messages() | OTHERS, max_size=12), st.lists(st.integers(1, 2000), min_size=1))
@example([b"MSG a.b 1 0\r\n\r\n", b"PING\r\n"], [1])
def test_messages_are_nats_pys_whatever_pieces_they_come_in(parts: list[bytes], cuts: list[int]) -> None:
    line = b"".join(parts)
    expected, seen, rest = Reader(), Reader(), []

    class Before:
        def data_received(self, data: bytes) -> None:
            rest.append(data)

    def receiver(sid: int) -> Any:
        def receive(message: Msg) -> None:
            seen.found.append((sid, message.subject, message.reply, message.data, message.headers))

        return receive

    incoming = Incoming(Before(), Client(), receiver)
    at, number = 0, 0
    while at < len(line):
        incoming.data_received(line[at : at + cuts[number % len(cuts)]])
        at, number = at + cuts[number % len(cuts)], number + 1

    async def read() -> None:
        await Parser(expected).parse(line)
        await Parser(seen).parse(b"".join(rest))

    asyncio.run(read())
    assert seen.found == expected.found
    assert seen.others == expected.others
