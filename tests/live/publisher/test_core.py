"""What the publisher decides, on both kinds of store: one entry a version, and a named refusal for whatever can't be one."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import msgspec
import pytest

from live.store import logs
from live.store.faulty import Faulty, lose, once
from live.store.models import Run, begun, model, same, stepped
from towline.config import PublisherSettings
from towline.contract.entries import Probe, VersionEntry
from towline.contract.policy import Committed, Refused, Staged
from towline.delta.state import copy_state, model_digest, tensor_digests
from towline.errors import CorruptError, UnavailableError
from towline.publisher.anchoring import Anchorer
from towline.publisher.core import PublisherCore
from towline.store import checkpoints, keys
from towline.store.anchors import load_anchor, read_anchor
from towline.store.checkpoints import CheckpointMeta
from towline.store.log import Log
from towline.store.manifest import Manifest, encode_manifest
from towline.store.materialize import materialize, plan
from towline.store.objects import ObjectStore


@pytest.fixture
def run(objects: ObjectStore, run_name: str) -> Run:
    return begun(objects, run_name)


def publisher(run: Run, objects: ObjectStore | None = None, **settings: Any) -> PublisherCore:
    core = PublisherCore(objects or run.objects, run.log.run, PublisherSettings(**settings))
    assert core.follow() is None
    return core


def staged_of(manifest: Manifest) -> Staged:
    return Staged(
        epoch=manifest.epoch,
        base=manifest.base,
        write_id=manifest.write_id,
        folder=manifest.folder,
        manifest_digest=manifest.digest,
    )


def refusal(verdict: Committed | Refused) -> str:
    assert isinstance(verdict, Refused)
    return verdict.reason


def entries_of(run: Run) -> list[str]:
    log = Log(run.objects, run.log.run)
    log.refresh()
    return [entry.write_id for entry in log.entries() if isinstance(entry, VersionEntry)]


@pytest.mark.parametrize("verify", ["reapply", "sender"])
def test_staged_versions_become_entries_that_readers_can_materialise(run: Run, verify: str) -> None:
    core, state = publisher(run, verify=verify), run.states[0]
    for step in range(1, 5):
        run.states[run.log.lineage.epoch_head(1)] = state
        state = stepped(state, step)
        manifest = run.stage(state, full=step == 3, prove=True)
        verdict = core.decide(staged_of(manifest))
        assert verdict == Committed(number=step + 1, epoch=1, write_id=manifest.write_id)
        run.log.refresh()
        entry = run.log.version(step + 1)
        assert (entry.depth, entry.base, entry.epoch, entry.batch_cursor) == (step, step if step > 1 else 0, 1, 10 * step)
        assert (entry.model_digest, entry.manifest_digest) == (model_digest(tensor_digests(state)), manifest.digest)
        assert (entry.wire_bytes, entry.density, entry.step) == (manifest.wire_bytes, manifest.density, step)
        assert entry.verify_seconds > 0
        assert entry.encode_seconds == manifest.encode_seconds
        assert same(materialize(run.objects, run.log, step + 1), state)
        if verify == "reapply":
            assert core.copy.version == step + 1
            assert same(core.copy.state, state)
    assert (core.figures.head, core.figures.committed, core.figures.refused) == (5, 4, 0)


def test_a_version_that_is_in_the_log_is_committed_again_without_another_entry(run: Run) -> None:
    core, manifest = publisher(run), run.stage(stepped(run.states[0], 1))
    first = core.decide(staged_of(manifest))
    assert core.decide(staged_of(manifest)) == first
    assert publisher(run).decide(staged_of(manifest)) == first
    run.states[2] = stepped(run.states[0], 1)
    run.commit()
    run.fork(2)
    assert core.decide(staged_of(manifest)) == first  # also when its epoch is over and others stand on it
    assert len(entries_of(run)) == 2
    assert core.figures.committed == 1


def test_a_zombie_trainers_version_is_refused(run: Run) -> None:
    core = publisher(run)
    manifest = run.stage(stepped(run.states[0], 1))
    new = run.fork(0)
    assert refusal(core.decide(staged_of(manifest))) == f"epoch: epoch 1 isn't the newest, which is {new}"
    assert entries_of(run) == []


def test_an_open_that_takes_the_number_in_the_last_moment_fences_the_commit(run: Run) -> None:
    slow = Faulty(run.objects)
    core = publisher(run, slow)
    manifest = run.stage(stepped(run.states[0], 1))
    slow.before_create = once(lambda key: run.fork(0))
    assert refusal(core.decide(staged_of(manifest))).startswith("epoch: ")
    assert entries_of(run) == []
    assert core.copy.version == 0
    assert same(core.copy.state, run.states[0])


def test_a_base_that_is_not_the_epochs_head_is_refused(run: Run) -> None:
    core = publisher(run)
    stale = run.stage(stepped(run.states[0], 1))
    run.commit()
    assert refusal(core.decide(staged_of(stale))) == "base: base 0 isn't the epoch's head, which is 2"
    ahead = run.stage(stepped(run.states[0], 1), base=0)
    assert "base: base 7" in refusal(core.decide(staged_of(replace_base(ahead, 7))))


def replace_base(manifest: Manifest, base: int) -> Manifest:
    return msgspec.structs.replace(manifest, base=base)


def test_a_quarantined_base_is_refused_and_the_publisher_waits(run: Run) -> None:
    core = publisher(run)
    bad = run.commit()
    manifest = run.stage(stepped(run.states[bad], 1))
    run.log.append(logs.quarantine(bad))
    assert core.follow() == "head_quarantined"
    assert refusal(core.decide(staged_of(manifest))) == f"quarantined: base {bad} is quarantined"
    run.fork(0)
    assert core.follow() is None
    run.states[0] = run.states[0]
    again = run.stage(stepped(run.states[0], 2))
    assert isinstance(core.decide(staged_of(again)), Committed)


def test_a_fork_is_followed_to_its_base(run: Run) -> None:
    core = publisher(run)
    first, second = run.commit(), run.commit()
    assert core.follow() is None
    assert core.copy.version == second
    run.fork(first)
    assert core.follow() is None
    assert core.copy.version == first
    assert same(core.copy.state, run.states[first])


def flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


@pytest.mark.parametrize("verify", ["reapply", "sender"])
@pytest.mark.parametrize("damage", [flipped, lambda data: data[:-9]])
def test_a_damaged_part_is_refused_and_named(run: Run, verify: str, damage: Callable[[bytes], bytes]) -> None:
    core = publisher(run, verify=verify)
    manifest = run.stage(stepped(run.states[0], 1), prove=True)
    part = f"{manifest.folder}/part-00000.safetensors"
    run.objects.put(part, damage(run.objects.get(part)))
    assert part in refusal(core.decide(staged_of(manifest)))
    run.objects.delete(part)
    assert part in refusal(core.decide(staged_of(manifest)))
    assert entries_of(run) == []
    good = run.stage(stepped(run.states[0], 1), prove=True)
    assert isinstance(core.decide(staged_of(good)), Committed)


def test_a_delta_of_another_base_is_refused_with_the_tensors_name(run: Run) -> None:
    """Every part's digest is right, and still they don't lead where the manifest says."""
    core = publisher(run)
    real, run.states[0] = run.states[0], stepped(run.states[0], 77)
    manifest = run.stage(stepped(run.states[0], 1))
    run.states[0] = real
    reason = refusal(core.decide(staged_of(manifest)))
    assert "model." in reason
    assert entries_of(run) == []
    assert isinstance(core.decide(staged_of(run.stage(stepped(real, 1)))), Committed)


def test_parts_that_lead_elsewhere_than_the_manifest_says_are_refused(run: Run) -> None:
    core = publisher(run)
    one, two = run.stage(stepped(run.states[0], 1)), run.stage(stepped(run.states[0], 2))
    mixed = msgspec.structs.replace(two, parts=one.parts, wire_bytes=one.wire_bytes)
    run.objects.put(f"{mixed.folder}/part-00000.safetensors", run.objects.get(f"{one.folder}/part-00000.safetensors"))
    run.objects.put(keys.manifest(mixed.folder), encode_manifest(mixed))
    assert "model." in refusal(core.decide(staged_of(mixed)))
    assert "model." in refusal(publisher(run, verify="sender").decide(staged_of(_proved(run, mixed))))
    assert entries_of(run) == []


def _proved(run: Run, manifest: Manifest) -> Manifest:
    changed = msgspec.structs.replace(manifest, proved=True)
    run.objects.put(keys.manifest(manifest.folder), encode_manifest(changed))
    return changed


def test_sender_verification_needs_the_senders_proof(run: Run) -> None:
    core = publisher(run, verify="sender")
    assert "publisher.verify" in refusal(core.decide(staged_of(run.stage(stepped(run.states[0], 1)))))


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"depth": 0}, "depth"),
        ({"depth": 3, "skipped": (1, 3)}, "skipped"),
        ({"checkpoint": "never-uploaded"}, "checkpoint"),
        ({"checkpoint": "../../log"}, "checkpoint"),
        ({"probe": Probe(tokens=tuple(range(900)), logprobs=(-0.123456789,) * 899, tolerance=1.0)}, "entry_size"),
    ],
)
def test_facts_that_cannot_be_are_refused(run: Run, change: dict[str, Any], code: str) -> None:
    manifest = run.stage(stepped(run.states[0], 1))
    wrong = msgspec.structs.replace(manifest, facts=msgspec.structs.replace(manifest.facts, **change))
    run.objects.put(keys.manifest(wrong.folder), encode_manifest(wrong))
    assert refusal(publisher(run).decide(staged_of(wrong))).startswith(f"{code}: ")
    assert entries_of(run) == []


def test_the_entry_repeats_what_only_the_trainer_knows(run: Run) -> None:
    meta = CheckpointMeta(epoch=1, base=0, depth=3, batch_cursor=55, step=9, at=1.0)
    checkpoints.save(run.objects, run.log.run, "c", {"f": b"x"}, meta)
    manifest = run.stage(stepped(run.states[0], 1))
    probe = Probe(tokens=(1, 2), logprobs=(-0.5,), tolerance=0.01)
    facts = {"depth": 3, "skipped": (1,), "step": 9, "batch_cursor": 55, "checkpoint": "c", "missing_rows": 2, "probe": probe}
    full = msgspec.structs.replace(manifest, facts=msgspec.structs.replace(manifest.facts, **facts))
    run.objects.put(keys.manifest(full.folder), encode_manifest(full))
    assert isinstance(publisher(run).decide(staged_of(full)), Committed)
    run.log.refresh()
    entry = run.log.version(2)
    assert {name: getattr(entry, name) for name in facts} == facts


@pytest.mark.parametrize(
    "change",
    [
        {"folder": "elsewhere"},
        {"write_id": "../x", "folder": "{run}/versions/00000001-00000000-../x"},
        {"write_id": ""},
        {"manifest_digest": hashlib.sha256(b"other").hexdigest()},
        {"epoch": 99},
        {"epoch": -1},
        {"base": -1},
    ],
)
def test_a_staged_record_that_makes_no_sense_is_refused(run: Run, change: dict[str, Any]) -> None:
    staged = msgspec.to_builtins(staged_of(run.stage(stepped(run.states[0], 1))))
    staged |= {k: v.format(run=run.log.run) if isinstance(v, str) else v for k, v in change.items()}
    assert refusal(publisher(run).decide(msgspec.convert(staged, Staged)))
    assert entries_of(run) == []


def test_another_layout_is_refused(objects: ObjectStore, run_name: str) -> None:
    run = begun(objects, run_name)
    assert refusal(publisher(run).decide(staged_of(run.stage(model(rows=97), full=True)))).startswith("layout: ")


def test_a_lost_reply_of_the_commit_is_one_entry(run: Run) -> None:
    lossy = Faulty(run.objects)
    core = publisher(run, lossy)
    manifest = run.stage(stepped(run.states[0], 1))
    lossy.after_create = lose
    assert isinstance(core.decide(staged_of(manifest)), Committed)
    assert entries_of(run) == [manifest.write_id]


def test_a_commit_that_stays_open_is_settled_by_asking_again(run: Run) -> None:
    """The put landed, the store went away before anybody could see it."""
    lossy = Faulty(run.objects)
    core = publisher(run, lossy)
    manifest = run.stage(stepped(run.states[0], 1))
    lossy.after_create = lose
    lossy.change[keys.log_entry(run.log.run, 2)] = lambda data: lose("read")
    with pytest.raises(UnavailableError):
        core.decide(staged_of(manifest))
    lossy.after_create, lossy.change = (lambda key: None), {}
    assert core.decide(staged_of(manifest)) == Committed(number=2, epoch=1, write_id=manifest.write_id)
    assert entries_of(run) == [manifest.write_id]
    run.states[2] = stepped(run.states[0], 1)
    assert isinstance(core.decide(staged_of(run.stage(stepped(run.states[2], 2)))), Committed)


def test_two_publishers_of_the_same_version_make_one_entry(run: Run) -> None:
    gate = Barrier(2)
    for step in range(1, 4):
        head = run.log.lineage.epoch_head(1)
        state = stepped(run.states[head], step)
        staged = staged_of(run.stage(state))
        cores = [publisher(run), publisher(run)]

        def decide(core: PublisherCore, staged: Staged = staged) -> Committed | Refused:
            gate.wait()
            return core.decide(staged)

        with ThreadPoolExecutor(2) as pool:
            verdicts = list(pool.map(decide, cores))
        assert verdicts[0] == verdicts[1]
        assert isinstance(verdicts[0], Committed)
        run.states[verdicts[0].number] = state
        assert len(entries_of(run)) == step
        run.log.refresh()


def test_two_publishers_of_two_versions_on_one_base_commit_one_and_refuse_the_other(run: Run) -> None:
    gate = Barrier(2)
    staged = [staged_of(run.stage(stepped(run.states[0], seed))) for seed in (1, 2)]
    cores = [publisher(run), publisher(run)]

    def decide(index: int) -> Committed | Refused:
        gate.wait()
        return cores[index].decide(staged[index])

    with ThreadPoolExecutor(2) as pool:
        verdicts = list(pool.map(decide, range(2)))
    won = [v for v in verdicts if isinstance(v, Committed)]
    assert [v.write_id for v in won] == entries_of(run)
    assert [refusal(v).split(":")[0] for v in verdicts if isinstance(v, Refused)] == ["base"]


def test_a_base_that_cannot_be_read_decides_nothing(run: Run) -> None:
    """The fault is the store's, not the staged version's: refusing it would throw training away."""
    run.commit()
    run.log.refresh()
    part = f"{run.log.version(2).folder}/part-00000.safetensors"
    good = run.objects.get(part)
    run.objects.put(part, flipped(good))
    manifest = run.stage(stepped(run.states[2], 1))
    core = PublisherCore(run.objects, run.log.run, PublisherSettings())
    with pytest.raises(CorruptError, match=part):
        core.decide(staged_of(manifest))
    run.objects.put(part, good)
    assert isinstance(core.decide(staged_of(manifest)), Committed)


def test_a_publisher_waits_for_the_base_and_for_an_epoch(objects: ObjectStore, run_name: str) -> None:
    core = PublisherCore(objects, run_name, PublisherSettings())
    assert core.follow() == "log_empty"
    Log(objects, run_name).append(logs.base())
    assert core.follow() == "no_epoch"


def next_version(run: Run, core: PublisherCore) -> int:
    """Stage the next step on the head through the publisher."""
    run.log.refresh()
    head = run.log.lineage.epoch_head(1)
    state = stepped(run.states[head], head)
    verdict = core.decide(staged_of(run.stage(state)))
    assert isinstance(verdict, Committed)
    run.states[verdict.number] = state
    return verdict.number


def test_an_anchor_is_the_version_that_was_due_while_newer_ones_come(run: Run) -> None:
    core = publisher(run)
    anchorer = Anchorer(run.objects, core, every=2)
    written: list[int] = []
    while len(written) < 3:
        next_version(run, core)
        if (due := anchorer.due()) is not None:
            for _ in range(2):
                next_version(run, core)
            anchorer.write(*due)
            written.append(due[0])
    assert written == [3, 6, 9]
    for version in written:
        assert same(load_anchor(run.objects, read_anchor(run.objects, run.log.run, version)), run.states[version])
    run.log.refresh()
    hint = run.log.read_hint()
    assert hint is not None
    assert (hint.number, hint.anchors) == (11, (0, 3, 6, 9))
    assert [(s.kind, len(s.chain)) for s in list(plan(run.objects, run.log, 11))[:2]] == [("anchor", 2), ("anchor", 5)]


def test_a_new_publisher_goes_on_with_the_anchors_that_it_finds(run: Run) -> None:
    core = publisher(run)
    anchorer = Anchorer(run.objects, core, every=3)
    for _ in range(3):
        next_version(run, core)
    due = anchorer.due()
    assert due is not None
    anchorer.write(*due)
    run.objects.delete(keys.head_hint(run.log.run))  # the hint isn't needed for those that are near
    core = publisher(run)
    anchorer = Anchorer(run.objects, core, every=3)
    found = []
    for _ in range(3):
        next_version(run, core)
        found.append(anchorer.due() is not None)
    assert found == [False, False, True]


def test_a_version_off_the_line_gets_no_anchor(run: Run) -> None:
    core = publisher(run)
    for _ in range(2):
        next_version(run, core)
    run.fork(0)
    core.log.refresh()
    assert Anchorer(run.objects, core, every=1).due() is None


def test_the_copy_is_the_bases_again_after_a_refusal(run: Run) -> None:
    core = publisher(run)
    before = copy_state(core.copy.state)
    manifest = run.stage(stepped(run.states[0], 1))
    part = f"{manifest.folder}/part-00000.safetensors"
    run.objects.put(part, flipped(run.objects.get(part)))
    refusal(core.decide(staged_of(manifest)))
    assert same(core.copy.state, before)
