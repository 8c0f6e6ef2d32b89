"""What docs/operations.md promises about upgrades, over files that an earlier build wrote: a newer writer's extra field is
ignored, in the message and in what it holds; another schema number is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest

from contract import samples
from towline.contract.control import decode_control
from towline.contract.entries import decode_entry
from towline.contract.outcome import decode_outcome
from towline.contract.partial import decode_partial
from towline.contract.policy import decode_policy
from towline.contract.requests import decode_request
from towline.contract.trajectory import decode_trajectory
from towline.errors import CorruptError, MalformedError

FOLDER = Path(__file__).parents[2] / "golden" / "contract" / "schema-1"
READERS: dict[str, Callable[[bytes], Any]] = {
    "control": decode_control, "outcome": decode_outcome, "policy": decode_policy, "request": decode_request,
    "trajectory": decode_trajectory, "partial": decode_partial,
}  # fmt: skip
MESSAGES = sorted(path.name for path in FOLDER.glob("*.msgpack"))
ENTRIES = sorted(path.name for path in FOLDER.glob("*.json"))


def reader(name: str) -> Callable[[bytes], Any]:
    return READERS[name.removesuffix(".msgpack").partition("-")[0]]


def newer(tree: Any) -> Any:
    """The same with a field that no reader of today knows, in each of its maps that has a fixed set of keys."""
    if isinstance(tree, dict):
        open_ended = ("reference", "components")
        inside = {key: value if key in open_ended else newer(value) for key, value in tree.items()}
        return inside | {"added_later": {"by": ["a", "newer", "release", 2]}}
    return [newer(value) for value in tree] if isinstance(tree, list) else tree


@pytest.mark.parametrize("name", MESSAGES)
def test_a_golden_message_with_fields_of_a_newer_release_is_read_as_without_them(name: str) -> None:
    data = (FOLDER / name).read_bytes()
    extended = msgpack.packb(newer(msgpack.unpackb(data)))
    assert b"added_later" in extended
    was, now = reader(name)(data), reader(name)(extended)
    assert samples.same(now, was) if name in ("trajectory.msgpack", "partial.msgpack") else now == was


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_of_another_schema_is_refused_by_its_number_and_kept_whole(name: str) -> None:
    data = msgpack.packb(msgpack.unpackb((FOLDER / name).read_bytes()) | {"schema": 2})
    with pytest.raises(MalformedError, match="schema 2, this reader knows 1") as found:
        reader(name)(data)
    assert found.value.code == "schema"
    assert found.value.data == data


@pytest.mark.parametrize("name", ENTRIES)
def test_a_log_entry_takes_new_fields_and_refuses_a_new_schema(name: str) -> None:
    data = (FOLDER / name).read_bytes()
    tree = json.loads(data)
    assert decode_entry(json.dumps(newer(tree)).encode(), tree["number"]) == decode_entry(data, tree["number"])
    with pytest.raises(CorruptError, match="schema 2") as found:
        decode_entry(json.dumps(tree | {"schema": 2}).encode(), tree["number"])
    assert found.value.code == "log_entry"
