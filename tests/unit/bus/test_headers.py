"""The quick header parser reads whatever nats-py's own does, and the same."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st
from nats.aio.client import Client

from towline.bus.incoming import parse_header_lines

PIECES = st.sampled_from(
    [b"Nats-Sequence", b"a", b":", b": ", b"\t", b" ", b"\r\n", b"\r", b"\n", b"\xc3", b"\xa9", b"\xff", b"12"]
)


@given(st.lists(PIECES, max_size=30).map(b"".join) | st.binary(max_size=60))
@example(b"Nats-Expected-Last-Sequence: 7\r\nNats-Batch-Id:x\r\n\r\n")
@example(b"Name with space: 1\r\nN\xc3\xa9: 2\r\nvalue: caf\xc3\xa9\r\nhalf: \xc3\r\n\r\n")
def test_headers_are_what_nats_py_makes_of_them(raw: bytes) -> None:
    assert parse_header_lines(raw) == Client._parse_header_lines(raw)
