"""That a staged version's bytes lead to the state that its manifest promises.

`reapply`: they are applied to the publisher's own copy of the base, and every tensor of the result is hashed. `sender`: the
writer has done that (`Manifest.proved`); here the parts' bytes, their coverage of the layout and their digests are checked.
"""

from __future__ import annotations

from towline.delta.applier import Coverage
from towline.delta.checksum import XXH3_128
from towline.delta.codec import allocate, apply
from towline.delta.part import PartReader
from towline.delta.state import ModelState, model_digest
from towline.errors import CorruptError
from towline.store.manifest import Manifest
from towline.store.objects import ObjectStore
from towline.store.transfer import fetch_all


def reapply(objects: ObjectStore, manifest: Manifest, candidate: ModelState) -> ModelState:
    """The version's state, made in `candidate`, a writable copy of its base's.

    `CorruptError` or `MissingError` names the part or the tensor that is wrong; `candidate` is then no version's state.
    """
    state = candidate if manifest.representation == "delta" else allocate(manifest.layout())
    parts = (data for _, data in fetch_all(objects, manifest.folder, manifest.parts))
    report = apply(state, parts, layout=manifest.layout(), digests=manifest.digests())
    if model_digest(report.digests) != manifest.model_digest:
        raise CorruptError(f"{manifest.folder}: the result has another model digest than the manifest", code="model_digest")
    return state


def check_sent(objects: ObjectStore, manifest: Manifest) -> None:
    """`CorruptError` or `MissingError` unless every part is the one that was proved, and together they are the whole model."""
    if not manifest.proved:
        raise CorruptError(
            f"{manifest.folder}: its writer didn't prove it; set publisher.verify alike for both", code="not_proved"
        )
    coverage, digests = Coverage(manifest.layout()), manifest.digests()
    for file, data in fetch_all(objects, manifest.folder, manifest.parts):
        reader = PartReader(data)
        for _, block, _ in reader.blocks():
            coverage.take(block, reader.head.specs[block.row : block.row + block.rows])
        for name, check in reader.head.tensor_checks.items():
            if reader.head.table.checksum == XXH3_128 and check.hex() != digests[name]:
                raise CorruptError(
                    f"{manifest.folder}/{file.name}: tensor {name!r} has another digest than in the manifest",
                    code="tensor_digest",
                )
    coverage.finish()
