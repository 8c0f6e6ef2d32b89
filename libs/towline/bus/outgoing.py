"""How a message goes out: nats-py's client copies each payload twice into its command; a large one goes as it is instead."""

from __future__ import annotations

from nats.aio.client import Client

LARGE_BYTES = 16 << 10
"""Below this the copies cost less than the pieces."""
_HEAD, _END = "NATS/1.0\r\n", b"\r\n"


def without_copies(client: Client) -> None:
    """Let the client, from now on, send large payloads in pieces: the same bytes on the line, in the same order."""
    whole = client._send_publish

    async def send(subject: str, reply: str, payload: bytes, size: int, headers: dict[str, str] | None) -> None:
        if size < LARGE_BYTES or type(payload) is not bytes or not _plain(headers):
            await whole(subject, reply, payload, size, headers)
            return
        if headers:
            lines = (_HEAD + "".join(f"{name}: {value}\r\n" for name, value in headers.items()) + "\r\n").encode()
            head = f"HPUB {subject} {reply} {len(lines)} {len(lines) + size}\r\n".encode() + lines
        else:
            head = f"PUB {subject} {reply} {size}\r\n".encode()
        client.stats["out_msgs"] += 1
        client.stats["out_bytes"] += size
        # Nothing may come between the three, so they are put there together; the end goes through the client, which then
        # sends what is due.
        client._pending += (head, payload)
        client._pending_data_size += len(head) + size
        await client._send_command(_END)
        if client._flush_queue is not None and client._flush_queue.empty():
            await client._flush_pending()

    client._send_publish = send


def _plain(headers: dict[str, str] | None) -> bool:
    """Whether the headers go as they stand; nats-py cleans or refuses others."""
    return all(name.isascii() and name.replace("-", "").isalnum() and value.isprintable() and value.strip() == value
               for name, value in (headers or {}).items())  # fmt: skip
