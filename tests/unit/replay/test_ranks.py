"""Replays by several ranks, without ranks: how the line is cut into stretches, what is reported, how settings are changed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from towline.bundle.line import Step
from towline.config import Settings, StoreSettings
from towline.errors import CorruptError, UnavailableError, UsageError
from towline.learner import fingerprint
from towline.replay.again import FolderFiles, Opened, Taken, changed
from towline.replay.ranks import Event, _Events, last_words
from towline.replay.report import VerifyReport, VersionResult
from towline.replay.verify import Job, Stretch, stretches
from towline.store.objects import open_store
from unit.store.entries import version

SETTINGS = Settings.model_validate(
    {
        "run": {"name": "small"}, "model": {"source": "m"}, "prompts": {"source": "m:p"}, "sampling": {"max_tokens": 4},
        "reward": {"function": "m:r"},
    }
)  # fmt: skip


def with_layouts(tmp_path: Path, **epochs: dict[str, Any]) -> Any:
    """A source whose epochs 1, 2… recorded these trainer settings."""
    objects = open_store(StoreSettings(url=tmp_path.as_uri()))
    for number, trainer in enumerate(epochs.values(), 1):
        own = SETTINGS.model_copy(update={"trainer": SETTINGS.trainer.model_copy(update=trainer)})
        found = fingerprint.Fingerprint(
            epoch=number, environment={}, seed=0, world=own.trainer.ranks, layout_digest="d",
            settings={"trainer": own.trainer.model_dump(mode="json")},
        )  # fmt: skip
        fingerprint.record(objects, "small", found)
    return SimpleNamespace(settings=SETTINGS, objects=objects)


def planned(*epochs: int) -> list[Step]:
    return [Step(version(10 + place, epoch, 9 + place, place + 1), (), ()) for place, epoch in enumerate(epochs)]


def test_versions_of_as_many_ranks_are_one_stretch(tmp_path: Path) -> None:
    source = with_layouts(tmp_path, a={"dp": 2}, b={"backend": "megatron", "tp": 2}, c={"threads": 3}, d={"dp": 2, "threads": 2})
    steps = planned(1, 1, 2, 3, 4)
    found = stretches(source, steps, {})
    assert [(each.ranks, [step.entry.number for step in each.steps]) for each in found] == [
        (2, [10, 11, 12]), (1, [13]), (2, [14]),
    ]  # fmt: skip
    assert [each.threads for each in found] == [1, 3, 2]
    assert [each.ranks for each in stretches(source, steps, {}, one_process=True)] == [1]
    # What a person changes is changed in every epoch.
    assert [each.ranks for each in stretches(source, planned(1, 4), {"trainer.dp": 4})] == [4]
    with pytest.raises(UsageError, match="tp and pp need backend = 'megatron'"):
        stretches(source, steps, {"trainer.backend": "torch"})


def test_a_setting_that_is_none_is_refused() -> None:
    assert changed(SETTINGS, {"trainer.dp": 3}).trainer.ranks == 3
    for name in ("trainer.nothing", "nothing.dp", "trainer"):
        with pytest.raises(UsageError, match=f"--set {name}: there is no such setting"):
            changed(SETTINGS, {name: 1})
    with pytest.raises(UsageError, match="--set: "):
        changed(SETTINGS, {"trainer.dp": 0})


def result(number: int, equal: bool) -> VersionResult:
    return VersionResult(
        version=number, depth=number, epoch=1, batches=(number,), equal=equal, recorded_digest="a", replayed_digest="b",
        notes=("said",),
    )  # fmt: skip


@pytest.fixture
def job(tmp_path: Path) -> Job:
    report = VerifyReport(run="small", start=0, end=2, planned=2)
    told: list[VersionResult] = []
    return Job(Stretch(2, 1, ()), report, {}, False, tmp_path, None, None, told.append)


def written(path: Path, *events: Event) -> None:
    with path.open("ab") as file:
        for event in events:
            file.write(msgspec.json.encode(event) + b"\n")


def test_what_rank_0_reports_is_taken_in_once_and_whole_lines_alone(job: Job, tmp_path: Path) -> None:
    path = tmp_path / "events"
    events = _Events(path, job)
    events.read()  # nothing was written yet
    opened = Opened(epoch=1, differences={"threads": ("1", "2")})
    written(path, Event(taken=Taken(result=result(1, True), opened=opened)))
    line = msgspec.json.encode(Event(taken=Taken(result=result(2, False), opened=None), done=True)) + b"\n"
    with path.open("ab") as file:
        file.write(line[:20])
    events.read()
    events.read()
    assert [found.version for found in job.report.results] == [1]
    assert job.report.environments == {1: {"threads": ("1", "2")}}
    with path.open("ab") as file:
        file.write(line[20:])
    events.read()
    assert [(found.version, found.equal, found.notes) for found in job.report.results] == [
        (1, True, ("said",)), (2, False, ("said",)),
    ]  # fmt: skip
    events.check(0, tmp_path / "output")


def test_an_error_of_the_ranks_is_the_replays(job: Job, tmp_path: Path) -> None:
    written(tmp_path / "events", Event(error=("CorruptError", "base_state", "not those of version 3")))
    events = _Events(tmp_path / "events", job)
    events.read()
    with pytest.raises(CorruptError, match="not those of version 3") as raised:
        events.check(1, tmp_path / "output")
    assert raised.value.code == "base_state"


def test_ranks_that_end_without_a_word_are_an_error_with_their_last_words(job: Job, tmp_path: Path) -> None:
    events = _Events(tmp_path / "events", job)
    (tmp_path / "output").write_text("rank 1: usage: no such thing\n=======\n")
    with pytest.raises(UnavailableError, match=r"2 ranks ended early \(exit code 1\): rank 1: usage: no such thing"):
        events.check(1, tmp_path / "output")


def test_last_words() -> None:
    assert last_words("  traceback : Signal 9 (SIGKILL) received by PID 7\n=====\n") == "Signal 9 (SIGKILL) received by PID 7"
    assert last_words("noise\nValueError: bad\n  host : x\n=====") == "ValueError: bad"
    assert last_words("noise\n\n") == "noise"
    assert last_words("====\n") == "they said nothing"


def test_files_of_a_folder_are_read_when_asked_for(tmp_path: Path) -> None:
    (tmp_path / "b").write_bytes(b"2")
    (tmp_path / "a").write_bytes(b"1")
    files = FolderFiles(tmp_path)
    assert (list(files), len(files), files["b"], files.get("c")) == (["a", "b"], 2, b"2", None)
