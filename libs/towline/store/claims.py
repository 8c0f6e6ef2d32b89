"""Who wants what kept: pins (for good, create-only) and readers' holds (until they expire, renewed by their reader).

Neither is needed to read a version; both keep the garbage collector (`collect.py`) from what they name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from towline.contract.codec import SCHEMA
from towline.errors import CorruptError, MissingError, UsageError
from towline.store import keys
from towline.store.objects import ObjectStore


class Pin(msgspec.Struct, frozen=True, kw_only=True):
    """The version stays readable, and its checkpoint, if it names one, stays too. Different names pin independently."""

    schema: int = SCHEMA
    version: int
    name: str
    reason: str = ""


class Hold(msgspec.Struct, frozen=True, kw_only=True):
    """A reader has the version: it stays readable until then, and so does every delta from it to the latest."""

    schema: int = SCHEMA
    reader: str
    version: int
    until: float
    """Unix time, by the reader's clock."""


@dataclass(frozen=True, slots=True)
class Standing:
    """A pin as it stands, and when the store got it, by the store's clock."""

    pin: Pin
    at: float


_T = TypeVar("_T", Pin, Hold)


def create_pin(objects: ObjectStore, run: str, pin: Pin) -> bool:
    """False where a pin of this version and name stands already. `collect.pin` also sees to it that it isn't too late."""
    return objects.create(keys.pin(run, pin.version, _name(pin.name)), msgspec.json.encode(pin))


def remove_pin(objects: ObjectStore, run: str, version: int, name: str) -> None:
    """`MissingError` if there is no such pin."""
    key = keys.pin(run, version, _name(name))
    if objects.stat(key) is None:
        raise MissingError(f"run {run}: version {version} has no pin {name!r}; see `towline versions list`", code="pin_missing")
    objects.delete(key)


def pins(objects: ObjectStore, run: str) -> list[Standing]:
    """By version and name."""
    found = [Standing(pin, at) for pin, at in _all(objects, keys.pins_folder(run), Pin)]
    return sorted(found, key=lambda standing: (standing.pin.version, standing.pin.name))


def put_hold(objects: ObjectStore, run: str, hold: Hold) -> None:
    """Take or renew it; a reader has one."""
    objects.put(keys.hold(run, _name(hold.reader)), msgspec.json.encode(hold))


def release_hold(objects: ObjectStore, run: str, reader: str) -> None:
    objects.delete(keys.hold(run, _name(reader)))


def holds(objects: ObjectStore, run: str) -> list[Hold]:
    """By reader, expired ones too."""
    return sorted((hold for hold, _ in _all(objects, keys.holds_folder(run), Hold)), key=lambda hold: hold.reader)


def _all(objects: ObjectStore, folder: str, kind: type[_T]) -> Iterator[tuple[_T, float]]:
    for info in list(objects.list(folder)):
        try:
            record = msgspec.json.decode(objects.get(info.key), type=kind)
        except MissingError:
            continue  # gone since it was listed
        except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError) as error:
            raise CorruptError(f"{objects.url}: {info.key} can't be read: {error}; delete it, or write it anew",
                               code="claim") from error  # fmt: skip
        yield record, info.modified


def _name(text: str) -> str:
    if not keys.is_name(text):
        raise UsageError(f"{text!r}: use 1 to 100 letters, digits, '_' and '-', a letter or digit first", code="claim_name")
    return text
