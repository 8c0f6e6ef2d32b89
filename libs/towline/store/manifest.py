"""A staged version's manifest: its parts, the digests of the state they lead to, and what its LOG entry will repeat.

FOLDER/manifest.json is created after the parts and named by its sha256, so that whoever holds that digest holds them all.
"""

from __future__ import annotations

import hashlib
from typing import Literal

import msgspec

from towline.contract.codec import SCHEMA
from towline.contract.entries import Probe
from towline.delta.state import TensorSpec, layout_digest, model_digest
from towline.errors import CorruptError, UsageError
from towline.store import keys
from towline.store.objects import ObjectStore

MAX_MANIFEST_BYTES = 256 << 20


class VersionFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What only the trainer knows of a version; see `VersionEntry` for each."""

    depth: int
    skipped: tuple[int, ...] = ()
    step: int
    batch_cursor: int
    checkpoint: str | None = None
    missing_rows: int = 0
    probe: Probe | None = None
    skip_reasons: dict[str, int] = {}


class FileRecord(msgspec.Struct, frozen=True, array_like=True):
    """A stored file: its name in its folder, its size and its xxh3-128, 32 hex digits."""

    name: str
    nbytes: int
    digest: str


class TensorRecord(msgspec.Struct, frozen=True, array_like=True):
    """A tensor of the final state, and the xxh3-128 of its bytes, 32 hex digits."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: str

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec(self.name, self.dtype, self.shape)


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """A version that may be committed."""

    schema: int = SCHEMA
    run: str
    epoch: int
    base: int
    write_id: str
    representation: Literal["full", "delta"]
    mode: str
    """Of the delta codec; libs/towline/delta/FORMAT.md."""
    codec: str
    """The codecs that were used, joined by "+"."""
    parts: tuple[FileRecord, ...]
    """In the order to apply them in."""
    tensors: tuple[TensorRecord, ...]
    """By name."""
    layout_digest: str
    model_digest: str
    density: float
    wire_bytes: int
    model_bytes: int
    proved: bool
    """The writer decoded the very bytes it uploaded onto its base and found these digests (`publisher.verify = "sender"`)."""
    encode_seconds: float
    upload_seconds: float
    """Inside the uploads, in all; they may run side by side."""
    facts: VersionFacts

    @property
    def folder(self) -> str:
        """Where it lies, as `Staged` and the entry name it."""
        return keys.version_folder(self.run, self.epoch, self.base, self.write_id)

    @property
    def digest(self) -> str:
        """sha256 of its bytes, 64 hex digits, as `Staged` and the entry name it."""
        return hashlib.sha256(encode_manifest(self)).hexdigest()

    def layout(self) -> list[TensorSpec]:
        return [t.spec for t in self.tensors]

    def digests(self) -> dict[str, str]:
        """Tensor name -> digest."""
        return {t.name: t.digest for t in self.tensors}


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Manifest)


def encode_manifest(manifest: Manifest) -> bytes:
    """Equal manifests give equal bytes."""
    return _encoder.encode(manifest)


def read_manifest(objects: ObjectStore, folder: str, digest: str) -> Manifest:
    """The manifest in `folder` with this sha256, its own digests recomputed.

    `MissingError` where it isn't there (yet), `CorruptError` where it's another, or contradicts itself.
    """
    key = keys.manifest(folder)
    data = objects.get(key)
    if len(data) > MAX_MANIFEST_BYTES or hashlib.sha256(data).hexdigest() != digest:
        raise CorruptError(f"{objects.url}: {key} isn't what its sha256 says", code="manifest")
    try:
        manifest = _decoder.decode(data)
        layout, digests = manifest.layout(), manifest.digests()
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, UsageError, RecursionError) as error:
        raise CorruptError(f"{objects.url}: {key} can't be read: {error}", code="manifest") from error
    if manifest.schema != SCHEMA:
        raise CorruptError(f"{objects.url}: {key} has schema {manifest.schema}, this reader knows {SCHEMA}", code="manifest")
    names = [t.name for t in manifest.tensors]
    sound = (
        names == sorted(set(names))
        and manifest.layout_digest == layout_digest(layout)
        and manifest.model_digest == model_digest(digests)
        and manifest.model_bytes == sum(spec.nbytes for spec in layout)
        and manifest.wire_bytes == sum(part.nbytes for part in manifest.parts)
        and 0.0 <= manifest.density <= 1.0
        and keys.lacking_part([part.name for part in manifest.parts]) is None
        and manifest.folder == folder
    )
    if not sound:
        raise CorruptError(f"{objects.url}: {key} contradicts itself", code="manifest")
    return manifest
