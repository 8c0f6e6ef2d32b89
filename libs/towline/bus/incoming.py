"""How messages come in: nats-py's client copies each payload six times on its way; here they're taken off the line with two.

Only messages are: whatever else the server says goes on to nats-py's own reader, which keeps the connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.transport import TcpTransport

Receiver = Callable[[Msg], None]
_END, _SPACE = b"\r\n", 0x20
_LONGEST_LINE = 1 << 20
"""Of what isn't a message; INFO with a cluster's addresses is the longest."""
_VERSION = len(b"NATS/1.0")
_STATUS = slice(_VERSION + 1, _VERSION + 4)
_log = structlog.get_logger("towline.bus")


def parse_header_lines(raw: bytes) -> dict[str, str]:
    """What nats-py's parser makes of a message's headers, in a third of its time: every message of a stream that is written by
    compare-and-swap has some, and a buffer reads a million of them at its start."""
    found: dict[str, str] = {}
    for line in raw.decode("utf-8", "replace").split("\r\n"):
        name, colon, value = line.partition(":")
        name = name.strip()
        if colon and name.isascii() and len(name.split()) < 2:
            found[name] = value.strip()
    return found


def parse_headers(block: bytes) -> dict[str, str] | None:
    """The headers of a message, `NATS/1.0` and the status with its description, if any, included; None where there are none."""
    line, _, rest = block.partition(_END)
    found: dict[str, str] = {}
    if line[_VERSION : _VERSION + 1] == b" ":
        status = line[_STATUS].strip()
        if status.isdigit():
            found["Status"] = status.decode()
        if description := line[_STATUS.stop + 1 :]:
            found["Description"] = description.decode("utf-8", "replace")
    found.update(parse_header_lines(rest))
    return found or None


class Incoming(asyncio.Protocol):
    """A connection's protocol from now on: messages go to `receiver(sid)` at once, all else to the protocol before."""

    def __init__(self, before: Any, client: Client, receiver: Callable[[int], Receiver | None]) -> None:
        self._before, self._client, self._receiver = before, client, receiver
        self._line = b""
        """A beginning without an end yet."""
        self._message: tuple[list[bytes], int] | None = None
        """Of the message whose payload is still coming: its line's words, and the bytes of its headers."""
        self._parts: list[bytes] = []
        self._missing = 0

    def data_received(self, data: bytes) -> None:
        at, size = 0, len(data)
        while at < size:
            if self._message is not None:
                at = self._take_payload(data, at)
                continue
            end = data.find(_END[1:], at)
            if end < 0:
                self._line += data[at:]
                if len(self._line) > _LONGEST_LINE:
                    self._before.data_received(self._line)  # nats-py ends the connection
                    self._line = b""
                return
            line = data[at : end + 1]
            at = end + 1
            if self._line:
                line, self._line = self._line + line, b""
            self._take_line(line)

    def _take_line(self, line: bytes) -> None:
        words = line.split()
        if not line.startswith((b"MSG ", b"HMSG ")) or not line.endswith(_END):
            self._before.data_received(line)
            return
        self._message = (words, int(words[-2]) if words[0] == b"HMSG" else 0)
        self._missing = int(words[-1]) + len(_END)

    def _take_payload(self, data: bytes, at: int) -> int:
        """Take what there is of it from `data[at:]`; where the next thing begins."""
        there = len(data) - at
        if there < self._missing:
            self._parts.append(data[at:] if at else data)
            self._missing -= there
            return len(data)
        assert self._message is not None
        words, header_bytes = self._message
        stop = at + self._missing
        self._message = None
        if self._parts:
            self._parts.append(data[at:stop])
            parts, self._parts = self._parts, []
            whole = b"".join(parts)
            self._deliver(words, header_bytes, whole, 0, len(whole) - len(_END))
        else:
            self._deliver(words, header_bytes, data, at, stop - len(_END))
        return stop

    def _deliver(self, words: list[bytes], header_bytes: int, data: bytes, start: int, stop: int) -> None:
        self._client.stats["in_msgs"] += 1
        self._client.stats["in_bytes"] += stop - start - header_bytes
        receive = self._receiver(int(words[2]))
        if receive is None:
            return
        with_reply = len(words) == (6 if header_bytes else 5)
        headers = parse_headers(data[start : start + header_bytes]) if header_bytes else None
        message = Msg(
            self._client, words[1].decode(), words[3].decode() if with_reply else "", data[start + header_bytes : stop], headers
        )
        try:
            receive(message)
        except Exception:  # noqa: BLE001  one receiver's fault ends neither the others nor the connection
            _log.exception("bus_receiver_failed", subject=message.subject)

    # What the transport says besides

    def connection_lost(self, exc: Exception | None) -> None:
        self._before.connection_lost(exc)

    def eof_received(self) -> bool | None:
        found: bool | None = self._before.eof_received()
        return found

    def pause_writing(self) -> None:
        self._before.pause_writing()

    def resume_writing(self) -> None:
        self._before.resume_writing()


def without_queue(client: Client, receiver: Callable[[int], Receiver | None]) -> None:
    """Let a connected client's messages, from now on, go to `receiver(sid)`, in order and at once. Before it has subscribed to
    anything. One that talks over a WebSocket stays as it is."""
    transport = client._transport
    if isinstance(transport, TcpTransport) and transport._io_writer is not None:
        line = transport._io_writer.transport
        line.set_protocol(Incoming(line.get_protocol(), client, receiver))
