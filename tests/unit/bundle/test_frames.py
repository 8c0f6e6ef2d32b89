"""Streams as files: what goes in comes out, and what is cut off or out of order is refused."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from towline.bundle.frames import StreamFile, write_message
from towline.bus.client import Message
from towline.errors import CorruptError

messages = st.lists(
    st.tuples(st.sampled_from(["a.1", "a.2", "b.1"]), st.integers(1, 5), st.binary(max_size=40), st.floats(0, 2e9)), max_size=12
)


def write(path, made):
    with path.open("wb") as file:
        for message in made:
            write_message(file, message)
    return StreamFile(path)


@given(made=messages)
@settings(max_examples=40, deadline=None)
def test_every_message_is_found_by_sequence_and_the_last_by_subject(tmp_path_factory, made):
    sequence, whole = 0, []
    for subject, gap, data, at in made:
        sequence += gap
        whole.append(Message(subject, sequence, data, {"h": subject}, at))
    file = write(tmp_path_factory.mktemp("frames") / "x.frames", whole)
    assert list(file.messages()) == whole
    known = {message.sequence: message for message in whole}
    assert [file.get(number) for number in range(sequence + 2)] == [known.get(number) for number in range(sequence + 2)]
    last = {message.subject: message for message in whole}
    assert {subject: file.last(subject) for subject in ("a.1", "a.2", "b.1")} == {
        subject: last.get(subject) for subject in ("a.1", "a.2", "b.1")
    }


def test_a_file_that_is_cut_off_anywhere_is_refused(tmp_path):
    path = tmp_path / "x.frames"
    write(path, [Message("a", 1, b"12345", {}, 0.0), Message("a", 2, b"67890", {}, 0.0)])
    data = path.read_bytes()
    half = len(data) // 2
    for size in set(range(len(data))) - {0, half}:
        path.write_bytes(data[:size])
        with pytest.raises(CorruptError, match="can't be read"):
            list(StreamFile(path).messages())
    path.write_bytes(data[:half])  # whole frames alone: the manifest's digest refuses that
    assert len(list(StreamFile(path).messages())) == 1


def test_sequences_out_of_order_are_refused(tmp_path):
    file = write(tmp_path / "x.frames", [Message("a", 2, b"", {}, 0.0), Message("a", 2, b"", {}, 0.0)])
    with pytest.raises(CorruptError, match="message 2 after 2"):
        list(file.messages())
