"""What rank 0 tells the other ranks to do with it: small records over a `World`, one at a time on each of three channels."""

from __future__ import annotations

import msgspec

from towline.contract.control import BatchRecord
from towline.errors import InvariantError
from towline.store.manifest import VersionFacts

ROWS, WORK, STAGE = "rows", "work", "stage"
CHANNELS = (ROWS, WORK, STAGE)
"""Fetching rows, the learner, and making versions go on side by side; each channel is a thread's of its own on every rank."""


class Command(msgspec.Struct, frozen=True, kw_only=True, tag_field="do"):
    """Every rank does it at the same point of its channel."""


class Still(Command, frozen=True, kw_only=True, tag="still"):
    """Nothing to do yet: rank 0 is there, and waits too."""


class Stop(Command, frozen=True, kw_only=True, tag="stop"):
    """The channel's last command."""


class Make(Command, frozen=True, kw_only=True, tag="make"):
    """Fetch the base model into this folder of each machine, and make the learner of it."""

    folder: str


class Restore(Command, frozen=True, kw_only=True, tag="restore"):
    """Bring the learner to this checkpoint."""

    checkpoint: str


class Outline(Command, frozen=True, kw_only=True, tag="outline"):
    """Take the learner's state, and tell its tensors' digests."""


class Adopt(Command, frozen=True, kw_only=True, tag="adopt"):
    """The state of the last outline is the base of the next version."""


class Gather(Command, frozen=True, kw_only=True, tag="gather"):
    """Have the batch's rows, each part on its ranks."""

    record: BatchRecord
    entries: int
    """How many LOG entries rank 0 knows: a rank that knows less reads on first."""


class Train(Command, frozen=True, kw_only=True, tag="train"):
    """Train on the batch that was gathered for this depth."""

    for_depth: int


class Snapshot(Command, frozen=True, kw_only=True, tag="snapshot"):
    """Keep the learner's state for the next version, and its checkpoint if asked to."""

    checkpoint: bool
    probe: tuple[int, ...]


class Save(Command, frozen=True, kw_only=True, tag="save"):
    """Upload the snapshot's checkpoint files under this name."""

    name: str


class Upload(Command, frozen=True, kw_only=True, tag="upload"):
    """Encode the snapshot against the base and upload the parts."""

    epoch: int
    base: int
    write_id: str
    facts: VersionFacts


class Advance(Command, frozen=True, kw_only=True, tag="advance"):
    """The uploaded version stands: it is the base of the next."""


AnyCommand = Still | Stop | Make | Restore | Outline | Adopt | Gather | Train | Snapshot | Save | Upload | Advance
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyCommand] = msgspec.msgpack.Decoder(AnyCommand)


def encode_command(command: AnyCommand) -> bytes:
    return _encoder.encode(command)


def decode_command(data: bytes) -> AnyCommand:
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
        raise InvariantError(f"a command that this rank doesn't know: {error}; start all ranks alike", code="command") from error
