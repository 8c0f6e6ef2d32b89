"""Bundles that aren't whole, and runs whose history was purged: one line each that says what is wrong and what to do."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from live.replay.conftest import Ran
from support.bundles import changed_bundle, reseal, towline
from towline.bundle.folder import BundleSource, stream_path
from towline.bundle.frames import StreamFile, write_message
from towline.bundle.line import read_batches
from towline.bundle.manifest import read_manifest, write_manifest
from towline.bus.topology import CONTROL, TRAJECTORY, StreamSpec
from towline.contract.control import BatchRecord, decode_control
from towline.errors import CorruptError, MissingError, TowlineError, UsageError
from towline.replay.verify import verify


def without(name: str) -> Callable[[Path], object]:
    def break_it(bundle: Path) -> None:
        path = bundle / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        reseal(bundle)

    return break_it


@pytest.mark.parametrize(
    ("break_it", "kind", "says"),
    [
        (without("settings.json"), CorruptError, "names no settings.json; export the bundle again"),
        (without("acks.msgpack"), CorruptError, "names no acks.msgpack; export the bundle again"),
        (without("streams/outcome.frames"), CorruptError, "names no streams/outcome.frames; export the bundle again"),
        (without("store/small/log/00000003.json"), CorruptError, "LOG ends with entry 2, and the manifest says"),
        (without("store/small/log"), CorruptError, "LOG ends with entry -1, and the manifest says"),
        (lambda bundle: (bundle / "manifest.json").unlink(), UsageError, "no bundle, which has a manifest.json"),
        (lambda bundle: (bundle / "manifest.json").write_bytes(b"{"), CorruptError, "manifest.json can't be read"),
        (
            lambda bundle: (bundle / "streams" / "trajectory.frames").write_bytes(b"\0" * 99),
            CorruptError,
            "trajectory.frames isn't what the bundle's manifest says",
        ),
    ],
)
def test_a_bundle_that_isnt_whole_is_refused(
    ran: Ran, tmp_path: Path, break_it: Callable[[Path], object], kind: type[TowlineError], says: str
) -> None:
    bundle = shutil.copytree(ran.bundle, tmp_path / "broken")
    break_it(bundle)
    with pytest.raises(kind) as refused:
        BundleSource.open(bundle)
    assert says in refused.value.message
    assert "\n" not in refused.value.message


def test_the_command_says_it_in_one_line(ran: Ran, tmp_path: Path) -> None:
    bundle = shutil.copytree(ran.bundle, tmp_path / "broken")
    (bundle / "manifest.json").unlink()
    done = towline(tmp_path, "replay", "broken", "--verify")
    assert done.returncode == 2
    assert done.stderr.startswith("bundle_missing: broken: no bundle")
    assert len(done.stderr.splitlines()) == 1


async def test_a_missing_base_is_named(ran: Ran, tmp_path: Path) -> None:
    bundle = shutil.copytree(ran.bundle, tmp_path / "broken")
    without("store/small/anchors")(bundle)
    with pytest.raises(MissingError, match="anchors/00000000"):
        await verify(BundleSource.open(bundle))


def purged(bundle: Path, target: Path, spec: StreamSpec, first: int) -> Path:
    """A sealed copy whose stream begins at `first`, as the janitor leaves it."""
    shutil.copytree(bundle, target)
    path = stream_path(target, spec)
    left = [message for message in StreamFile(path).messages() if message.sequence >= first]
    with path.open("wb") as file:
        for message in left:
            write_message(file, message)
    manifest = read_manifest(target)
    record = msgspec.structs.replace(manifest.streams[spec.key], first=first, messages=len(left))
    write_manifest(target, msgspec.structs.replace(manifest, streams={**manifest.streams, spec.key: record}))
    return reseal(target)


@pytest.mark.parametrize("spec", [CONTROL, TRAJECTORY], ids=lambda spec: str(spec.key))
async def test_a_purged_history_names_the_version_to_begin_with(ran: Ran, tmp_path: Path, spec: StreamSpec) -> None:
    source = BundleSource.open(ran.bundle)
    epoch = source.log.lineage.newest_epoch
    first = (await read_batches(source))[epoch or 0, 0]
    cut = first.sequence + 1 if spec is CONTROL else max(row.sequence for row in first.record.rows) + 1
    bundle = BundleSource.open(purged(ran.bundle, tmp_path / "purged", spec, cut))
    with pytest.raises(MissingError, match=f"were purged .*; begin with --from {ran.checkpoint}") as refused:
        await verify(bundle)
    assert refused.value.code == "history_purged"
    report = await verify(bundle, start=ran.checkpoint)
    assert report.equal, list(report.lines())


async def test_a_batch_that_is_lost_in_the_middle_stops_the_replay_there(ran: Ran, tmp_path: Path) -> None:
    source = BundleSource.open(ran.bundle)
    last = max(depth for _, depth in await read_batches(source))

    def emptied(message: object) -> bytes:
        data: bytes = message.data  # type: ignore[attr-defined]
        record = decode_control(data)
        if not isinstance(record, BatchRecord) or record.for_depth != last:
            return data
        return msgspec.msgpack.encode(msgspec.structs.replace(record, for_depth=10_000))

    report = await verify(BundleSource.open(changed_bundle(ran.bundle, tmp_path / "lost", control=emptied)))
    assert report.stopped is not None
    assert f"CONTROL has no batch for depth {last}" in report.stopped
    assert all(result.equal for result in report.results)
    assert not report.equal
