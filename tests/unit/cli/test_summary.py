"""summary.json, computed from hand-made logs."""

from __future__ import annotations

import io

import msgspec
import pytest
from rich.console import Console

from towline.audit.report import AuditReport, Counts
from towline.contract.control import BatchRecord, BatchRow, EvalRecord, EvalRow
from towline.contract.entries import BaseEntry, OpenEntry, VersionEntry
from towline.local.report import print_outcome
from towline.local.run_directory import RunDirectory
from towline.local.summary import ControlFold, summarise
from towline.local.up import Finished
from towline.report.figures import FigureBook, Status
from towline.store.lineage import Lineage

KEYS = {
    "run": None, "steps": None, "versions_committed": None, "reward_first": None, "reward_last": None,
    "samples": {"admitted", "trained", "dropped", "evaluated", "open"},
    "staleness": {"mean", "p99", "max"},
    "delta": {"wire_bytes_mean", "density_mean", "ratio_mean"},
    "phase_seconds": {"encode", "upload", "commit", "prepare", "pause"},
    "trajectories_per_s": None, "tokens_per_s": None, "trainer_idle_share": None, "wall_seconds": None, "held_out": None,
}  # fmt: skip


class FakeLog:
    """A LOG's entries without a store; the lineage is the real one."""

    def __init__(self, entries):
        self._entries = entries
        self.lineage = Lineage()
        for entry in entries:
            self.lineage.extend(entry)

    def entries(self):
        return self._entries


def version(number, epoch, base, depth, **changes):
    values = dict(
        number=number, prev="p", write_id=f"w{number}", at=float(number), epoch=epoch, base=base, base_digest="d", depth=depth,
        skipped=(), representation="delta", codec="c", folder="f", manifest_digest="m", layout_digest="l", model_digest="x",
        density=0.5, wire_bytes=100, model_bytes=800, step=depth, batch_cursor=1, checkpoint=None, probe=None,
        encode_seconds=0.1, upload_seconds=0.2, verify_seconds=0.3,
    )  # fmt: skip
    return VersionEntry(**(values | changes))


def opened(number, base, depth):
    return OpenEntry(
        number=number,
        prev="p",
        write_id=f"o{number}",
        at=0.0,
        base=base,
        base_digest="d",
        depth=depth,
        batch_cursor=0,
        checkpoint=None,
    )


def batch(epoch, depth, rewards, least):
    rows = tuple(BatchRow(depth * 10 + i, 0, 1, b"", reward, least, 6) for i, reward in enumerate(rewards))
    return BatchRecord(writer="b/1", epoch=epoch, for_depth=depth, rows=rows, at=0.0)


def evaluation(version, depth, mean):
    rows = () if mean is None else (EvalRow(900 + version, 0, 1, b"", mean),)
    return EvalRecord(writer="b/1", version=version, depth=depth, wanted=1, rows=rows, mean=mean)


@pytest.fixture
def log():
    """Epoch 1 reaches depth 2 (entries 2 and 3); epoch 4 forks at entry 2 (depth 1) and reaches depth 3 in one step of two."""
    base = BaseEntry(
        number=0, prev=None, write_id="w0", at=0.0, source="s", revision=None, anchor="a", layout_digest="l", model_digest="x"
    )
    return FakeLog(
        [
            base, opened(1, 0, 0), version(2, 1, 0, 1), version(3, 1, 2, 2),
            opened(4, 2, 1), version(5, 4, 2, 3, wire_bytes=200, density=0.7),
            version(6, 4, 5, 4, representation="full", wire_bytes=800, density=1.0),
        ]
    )  # fmt: skip


@pytest.fixture
def control():
    fold = ControlFold()
    for record in (
        evaluation(0, 0, 0.2), batch(1, 0, [0.1], 0), batch(1, 1, [0.9, 0.9], 0), batch(4, 1, [0.3], 1),
        batch(4, 2, [0.4, 0.6], 0), batch(4, 3, [0.5], 3), evaluation(6, 4, 0.8),
    ):  # fmt: skip
        fold.add(record)
    return fold


@pytest.fixture
def book(tmp_path):
    book = FigureBook(tmp_path / "f.json")
    worker = {"trajectories": 50, "tokens": 300, "activations": 4, "prepare_seconds": 2.0, "pause_seconds": 0.4}
    for name, pid, figures in (
        ("rollout_worker", 1, worker), ("rollout_worker", 2, worker), ("trainer", 3, {"idle_seconds": 2.5}),
        ("publisher", 4, {"committed": 4, "verify_seconds": 1.0, "commit_seconds": 0.6}),
    ):  # fmt: skip
        book.update([Status(name, str(pid), pid, 0, True, "", 1.0, figures)])
    book.wall_seconds = 10.0
    return book


def report():
    counts = Counts(admitted=12, trained=5, evaluated=2, dropped={"stale": 3, "end_of_run": 1}, open=1)
    return AuditReport("r", True, 4, 4, 4, counts, 7, 0, {}, 0, 2, [])


def test_the_keys_are_exactly_the_promised_ones(log, control, book):
    found = summarise("r", log, control, report(), book).plain()
    assert set(found) == set(KEYS)
    for key, inner in KEYS.items():
        assert inner is None or set(found[key]) == inner
    msgspec.json.encode(found)


def test_it_counts_the_lineages_batches_alone(log, control, book):
    found = summarise("r", log, control, report(), book)
    # depths 0..3 come from batches (1,0), (4,1), (4,2), (4,3): staleness 0, 0, 2, 2, 0; (1,1) is off the line
    assert (found.staleness.mean, found.staleness.max) == (pytest.approx(0.8), 2)
    assert (found.steps, found.versions_committed) == (4, 4)
    assert (found.reward_first, found.reward_last) == (0.2, 0.8)


def test_deltas_are_those_that_were_committed_as_deltas(log, control, book):
    delta = summarise("r", log, control, report(), book).delta
    assert delta.wire_bytes_mean == pytest.approx((100 + 100 + 200) / 3)
    assert delta.density_mean == pytest.approx((0.5 + 0.5 + 0.7) / 3)
    assert delta.ratio_mean == pytest.approx((8 + 8 + 4) / 3)


def test_times_are_means_and_rates_are_over_the_whole_run(log, control, book):
    found = summarise("r", log, control, report(), book)
    phases = found.phase_seconds
    assert (phases.encode, phases.upload) == (pytest.approx(0.1), pytest.approx(0.2))
    assert (phases.commit, phases.prepare, phases.pause) == (pytest.approx(0.4), pytest.approx(0.5), pytest.approx(0.1))
    assert (found.trajectories_per_s, found.tokens_per_s, found.trainer_idle_share) == (10.0, 60.0, 0.25)


def test_samples_are_the_audits(log, control, book):
    assert summarise("r", log, control, report(), book).samples == {
        "admitted": 12, "trained": 5, "evaluated": 2, "dropped": {"end_of_run": 1, "stale": 3}, "open": 1,
    }  # fmt: skip


def test_without_evaluations_the_batches_means_are_the_reward(log, book, control):
    control.evals.clear()
    found = summarise("r", log, control, report(), book)
    assert (found.reward_first, found.reward_last) == (pytest.approx(0.1), pytest.approx(0.5))
    assert not found.held_out


@pytest.mark.parametrize(("evaluated", "label"), [(True, "reward, held-out"), (False, "reward, train")])
def test_the_last_words_say_whose_reward_it_is(log, book, control, tmp_path, evaluated, label):
    if not evaluated:
        control.evals.clear()
    console = Console(file=io.StringIO(), width=200)
    print_outcome(console, Finished(summarise("r", log, control, report(), book), report()), RunDirectory(tmp_path))
    lines = console.file.getvalue().splitlines()
    assert [line for line in lines if line.startswith("reward")] == [
        f"{label:18}{'0.200 -> 0.800' if evaluated else '0.100 -> 0.500'}"
    ]


def test_a_run_that_never_trained_has_a_summary_too(book):
    base = BaseEntry(
        number=0, prev=None, write_id="w0", at=0.0, source="s", revision=None, anchor="a", layout_digest="l", model_digest="x"
    )
    found = summarise("r", FakeLog([base]), ControlFold(), report(), book)
    assert (found.steps, found.reward_first, found.staleness.max, found.delta.ratio_mean) == (0, None, 0, 0.0)
