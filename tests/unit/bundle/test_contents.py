"""What goes into a bundle and what doesn't, and which subjects a reader asks for."""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec
import pytest

from towline.bundle.export import _Copy
from towline.bundle.folder import BundleSource
from towline.bundle.manifest import BundleManifest, check_files, list_files, read_manifest, write_manifest
from towline.bundle.settings import REMOVED, portable_json, read_settings
from towline.bundle.source import matcher
from towline.config import Settings
from towline.errors import CorruptError, UsageError
from towline.store.manifest import FileRecord

SETTINGS = {
    "run": {"name": "small", "directory": "/somewhere/runs"},
    "bus": {"url": "nats://user:hidden-1@10.0.0.1:4222", "password": "hidden-2", "token": "hidden-3"},
    "store": {"url": "s3://bucket", "access_key": "hidden-4", "secret_key": "hidden-5"},
    "model": {"source": "a/model", "arguments": {}},
    "prompts": {"source": "mine:prompts", "arguments": {"api_key": "hidden-6", "rows": 3, "deep": [{"password": "hidden-7"}]}},
    "sampling": {"max_tokens": 4, "stop_token_ids": [2]},
    "reward": {"function": "mine:reward", "arguments": {"judge_token": "hidden-8", "stop_tokens": "kept", "url": "http://judge"}},
    "service": {"token": "hidden-9"},
}


def test_no_secret_goes_in_and_what_a_replay_needs_stays():
    data = portable_json(Settings.model_validate(SETTINGS))
    assert b"hidden" not in data
    tree = json.loads(data)
    assert tree["prompts"]["arguments"] == {"api_key": REMOVED, "rows": 3, "deep": [{"password": REMOVED}]}
    assert tree["reward"]["arguments"] == {"judge_token": REMOVED, "stop_tokens": "kept", "url": "http://judge"}
    again = read_settings(data, "here")
    assert again.sampling.stop_token_ids == (2,)
    assert again.trainer == Settings.model_validate(SETTINGS).trainer


@pytest.mark.parametrize("data", [b"{", b"{}", b'{"run": {"name": "x"}, "other": {}}', b"\xff"])
def test_settings_that_are_none_are_refused(data):
    with pytest.raises(CorruptError, match="here: these aren't settings"):
        read_settings(data, "here")


def sealed(folder):
    (folder / "streams").mkdir()
    (folder / "streams" / "x").write_bytes(b"content")
    manifest = BundleManifest(
        run="small", towline="0", exported_at=0.0, head=0, checkpoints=(), left_out=(), streams={}, files=list_files(folder)
    )
    write_manifest(folder, manifest)
    return manifest


def test_a_changed_missing_or_foreign_file_is_refused_by_name(tmp_path):
    manifest = sealed(tmp_path)
    check_files(tmp_path, read_manifest(tmp_path))
    path = tmp_path / "streams" / "x"
    path.write_bytes(b"Content")
    with pytest.raises(CorruptError, match="streams/x isn't what"):
        check_files(tmp_path, manifest)
    path.unlink()
    with pytest.raises(CorruptError, match="streams/x is missing"):
        check_files(tmp_path, manifest)
    path.write_bytes(b"content")
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "y").write_bytes(b"")
    with pytest.raises(CorruptError, match="store/y isn't in the bundle's manifest"):
        check_files(tmp_path, manifest)
    (tmp_path / "store" / "y").unlink()
    (tmp_path / "notes.txt").write_bytes(b"mine")
    check_files(tmp_path, manifest)
    outside = msgspec.structs.replace(manifest, files=(*manifest.files, msgspec.structs.replace(manifest.files[0], name="../y")))
    with pytest.raises(CorruptError, match="outside of the bundle"):
        check_files(tmp_path, outside)


@pytest.mark.parametrize("what", ["file", "folder", "loop", "pipe"])
def test_what_is_no_file_of_its_own_is_refused_before_anything_is_read_through_it(tmp_path, what):
    bundle, elsewhere = tmp_path / "bundle", tmp_path / "elsewhere"
    bundle.mkdir()
    elsewhere.mkdir()
    manifest = sealed(bundle)
    place = bundle / "store" / "small"
    place.parent.mkdir()
    if what == "pipe":
        os.mkfifo(place)
    else:
        place.symlink_to(place if what == "loop" else elsewhere if what == "folder" else Path("/dev/zero"))
    with pytest.raises(CorruptError, match="store/small is"):
        check_files(bundle, manifest)


@pytest.mark.parametrize("name", ["a\0b", "x" * 300, "", "/etc/passwd", "a//b", "/".join("a" * 40)])
def test_a_name_that_no_bundle_has_is_refused_in_one_line(tmp_path, name):
    manifest = sealed(tmp_path)
    hostile = msgspec.structs.replace(manifest, files=(FileRecord(name, 1, "0" * 32),))
    with pytest.raises(CorruptError, match="is no file of a bundle"):
        check_files(tmp_path, msgspec.structs.replace(hostile, files=(*manifest.files, *hostile.files)))


def test_servers_and_folders_that_a_bundles_settings_name_are_nobodys(tmp_path):
    """A bundle has none; one that has was made by hand, and its reader's spans and files go nowhere because of it."""
    tree = json.loads(portable_json(Settings.model_validate(SETTINGS)))
    tree["telemetry"] = {"endpoint": "http://collector.example"}
    tree["bus"] = {"url": "nats://hostile.example"}
    tree["run"]["directory"] = "/elsewhere"
    tree["rollout"]["copy_folder"] = "/elsewhere"
    read = read_settings(json.dumps(tree).encode(), "here")
    usual = Settings.model_validate({section: SETTINGS[section] for section in SETTINGS if section not in ("bus", "store")})
    assert read.telemetry == usual.telemetry
    assert (read.bus.url, read.run.directory, read.rollout.copy_folder) == ("", "runs", "")


def test_an_export_writes_nothing_outside_of_its_folder_whatever_a_manifest_names(tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (tmp_path / "bundle" / "store").mkdir(parents=True)
    with pytest.raises(UsageError, match="object key"):
        _Copy(None, tmp_path / "bundle" / "store").take("run/versions/../../../../precious")
    assert precious.read_text() == "mine"


async def test_acks_that_arent_any_are_named(tmp_path):
    (tmp_path / "acks.msgpack").write_bytes(b"\xc1")
    with pytest.raises(CorruptError, match=r"acks\.msgpack can't be read"):
        await BundleSource(tmp_path, sealed(tmp_path), Settings.model_validate(SETTINGS), None, None).acks()


def test_a_folder_without_a_manifest_or_with_another_format_is_no_bundle(tmp_path):
    with pytest.raises(UsageError, match="towline trajectories export"):
        read_manifest(tmp_path)
    write_manifest(tmp_path, msgspec.structs.replace(sealed(tmp_path), format_version=2))
    with pytest.raises(UsageError, match="towline-bundle 2, this towline reads towline-bundle 1"):
        read_manifest(tmp_path)
    (tmp_path / "manifest.json").write_bytes(b"[")
    with pytest.raises(CorruptError):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    ("pattern", "subject", "fits"),
    [
        ("a.b.c", "a.b.c", True),
        ("a.b.c", "a.b", False),
        ("a.*.c", "a.b.c", True),
        ("a.*.c", "a.b.d", False),
        ("a.*", "a.b.c", False),
        ("a.>", "a.b.c", True),
        ("a.>", "a", False),
        ("*.>", "a.b", True),
    ],
)
def test_subjects_match_by_the_bus_rules(pattern, subject, fits):
    assert matcher([pattern])(subject) is fits
    assert matcher(["z.z", pattern])(subject) is fits
    assert matcher(None)(subject)
