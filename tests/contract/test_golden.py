"""Schema 1 stays readable: messages that an earlier build wrote are decoded by this one, and mean the same.

`python tests/contract/test_golden.py` writes the files; they are written once for a schema number and then only added to.
"""

from __future__ import annotations

from pathlib import Path

import msgpack
import pytest

from contract import samples
from towline.contract.codec import encode
from towline.contract.control import decode_control
from towline.contract.entries import decode_entry, encode_entry
from towline.contract.outcome import decode_outcome
from towline.contract.partial import decode_partial, encode_partial
from towline.contract.policy import decode_policy
from towline.contract.requests import decode_request
from towline.contract.trajectory import decode_trajectory, encode_trajectory

FOLDER = Path(__file__).parent.parent / "golden" / "contract" / "schema-1"
MESSAGES = {
    **{f"outcome-{kind}": (message, decode_outcome) for kind, message in samples.OUTCOMES.items()},
    **{f"control-{kind}": (message, decode_control) for kind, message in samples.CONTROL.items()},
    "request-requeue_request": (samples.REQUEST, decode_request),
    **{f"policy-{kind}": (message, decode_policy) for kind, message in samples.POLICY.items()},
}


@pytest.mark.parametrize("name", MESSAGES)
def test_a_golden_message_decodes_to_what_was_written(name: str) -> None:
    message, decode = MESSAGES[name]
    data = (FOLDER / f"{name}.msgpack").read_bytes()
    assert decode(data) == message


@pytest.mark.parametrize("name", MESSAGES)
def test_a_second_messagepack_library_reads_the_same_map(name: str) -> None:
    tree = msgpack.unpackb((FOLDER / f"{name}.msgpack").read_bytes())
    assert tree["schema"] == 1
    assert tree["kind"] == name.split("-", 1)[1].partition("+")[0]


def test_the_golden_trajectory_decodes_bit_for_bit() -> None:
    assert samples.same(decode_trajectory((FOLDER / "trajectory.msgpack").read_bytes()), samples.trajectory())


def test_the_golden_partial_decodes_bit_for_bit() -> None:
    partial = decode_partial((FOLDER / "partial.msgpack").read_bytes())
    assert samples.same(partial, samples.partial())
    assert partial.is_of(samples.TASK)


@pytest.mark.parametrize("kind", samples.ENTRIES)
def test_a_golden_entry_decodes_and_its_bytes_are_stable(kind: str) -> None:
    entry = samples.ENTRIES[kind]
    data = (FOLDER / f"entry-{kind}.json").read_bytes()
    assert decode_entry(data, entry.number) == entry
    assert encode_entry(entry) == data


def test_every_golden_file_is_read_by_a_test() -> None:
    known = {f"{name}.msgpack" for name in MESSAGES} | {f"entry-{kind}.json" for kind in samples.ENTRIES}
    assert {path.name for path in FOLDER.iterdir()} == known | {"trajectory.msgpack", "partial.msgpack"}


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    files = {f"{name}.msgpack": encode(message) for name, (message, _) in MESSAGES.items()}
    files |= {f"entry-{kind}.json": encode_entry(entry) for kind, entry in samples.ENTRIES.items()}
    files["trajectory.msgpack"] = encode_trajectory(samples.trajectory())
    files["partial.msgpack"] = encode_partial(samples.partial())
    for name, data in files.items():
        if not (FOLDER / name).exists():
            (FOLDER / name).write_bytes(data)
