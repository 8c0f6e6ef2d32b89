"""What is read from and written to the protocol, against nats-py's own bytes and the server's documented forms."""

from __future__ import annotations

import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from towline.bus.wire import (
    ApiError,
    Stub,
    answer,
    fetch,
    header_bytes,
    own_headers,
    place,
    stow,
    timestamp,
)
from towline.contract.codec import digest
from towline.errors import CorruptError, FullError, UnavailableError, UsageError


@pytest.mark.parametrize("headers", [{}, {"A": "b"}, {"Nats-Msg-Id": "x" * 24, "Towline-Reason": "é and more"}])
async def test_a_headers_size_is_what_the_client_sends(headers: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[bytes] = []
    client = Client()

    async def keep(command: bytes, priority: bool = False) -> None:
        sent.append(command)

    monkeypatch.setattr(client, "_send_command", keep)
    await client._send_publish("subject", "", b"payload", 7, headers or None)
    parts = sent[0].split(b"\r\n", 1)[0].split(b" ")
    assert header_bytes(headers) == (int(parts[-2]) if parts[0] == b"HPUB" else 0)


def test_a_place_is_read_from_both_forms_of_the_reply_subject() -> None:
    old = place("$JS.ACK.STREAM.consumer.3.41.7.1700000000123456789.5")
    new = place("$JS.ACK.hub.accHash.STREAM.consumer.3.41.7.1700000000123456789.5.token")
    assert old == new
    assert (old.num_delivered, old.sequence, old.consumer_sequence, old.pending) == (3, 41, 7, 5)
    assert old.at == pytest.approx(1700000000.123456789)


def test_times_have_up_to_nanoseconds() -> None:
    assert timestamp("2024-05-06T07:08:09Z") == 1714979289.0
    assert timestamp("2024-05-06T07:08:09.5Z") == 1714979289.5
    assert timestamp("2024-05-06T07:08:09.123456789Z") == pytest.approx(1714979289.123456, abs=1e-6)


@pytest.mark.parametrize(
    ("code", "err_code", "kind"),
    [
        (503, 10077, FullError),
        (503, 10008, UnavailableError),
        (429, 10167, UnavailableError),
        (400, 10071, UsageError),
        (404, 10059, UsageError),
        (500, 10047, UsageError),
    ],
)
def test_an_api_error_says_whether_a_repeat_may_help(code: int, err_code: int, kind: type[Exception]) -> None:
    reply = Msg(_client=None, data=b'{"error":{"code":%d,"err_code":%d,"description":"why"}}' % (code, err_code))
    with pytest.raises(ApiError) as caught:
        answer(reply)
    translated = caught.value.translated("doing it")
    assert type(translated) is kind
    assert str(translated) == f"doing it: why ({err_code})"


def test_place_headers_are_not_the_publishers() -> None:
    assert own_headers({"Nats-Sequence": "1", "Nats-Subject": "a", "Towline-Reason": "r"}) == {"Towline-Reason": "r"}
    assert own_headers(None) == {}


class Kept:
    """A blob store in a dictionary."""

    def __init__(self) -> None:
        self.blobs: dict[bytes, bytes] = {}

    def put(self, data: bytes) -> bytes:
        self.blobs[digest(data)] = data
        return digest(data)

    def get(self, name: bytes) -> bytes:
        return self.blobs[name]


async def test_a_payload_is_stowed_exactly_where_it_does_not_fit() -> None:
    blobs, headers = Kept(), {"A": "b"}
    room = 100
    fits = b"x" * (room - header_bytes(headers))
    assert await stow(fits, headers, room, blobs, "s") == Stub(fits, headers)
    assert not blobs.blobs
    stub = await stow(fits + b"x", headers, room, blobs, "s")
    assert stub.data == b""
    assert await fetch(stub.data, stub.headers, blobs, "s") == fits + b"x"
    assert stub.same_as(b"", {"Towline-Blob": digest(fits + b"x").hex(), "Nats-Msg-Id": "other"})
    assert not stub.same_as(b"", {})
    assert not Stub(b"", {}).same_as(b"", stub.headers)
    blobs.blobs[digest(fits + b"x")] = b"other"
    with pytest.raises(CorruptError, match="other bytes"):
        await fetch(stub.data, stub.headers, blobs, "s")
