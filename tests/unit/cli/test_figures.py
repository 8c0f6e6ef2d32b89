"""Figures over restarts, and the progress made of them."""

from __future__ import annotations

import json

import pytest
from rich.console import Console

from towline.local.live import View, services_line
from towline.report.figures import FigureBook, Status, decode_statuses
from towline.report.progress import progress_line, progress_of, size


def status(service, pid, *, replica="0", at=1.0, **figures):
    return Status(service, replica, pid, 1, True, "", at, figures)


def test_a_total_counts_every_process_once(tmp_path):
    book = FigureBook(tmp_path / "figures.json")
    book.update([status("rollout_worker", 10, trajectories=5), status("rollout_worker", 11, replica="1", trajectories=7)])
    book.update([status("rollout_worker", 10, trajectories=9)])
    book.update([status("rollout_worker", 12, trajectories=1), status("trainer", 12, trajectories=100)])
    assert book.total("rollout_worker", "trajectories") == 9 + 7 + 1
    assert book.total("rollout_worker", "nothing") == 0


def test_what_is_sampled_counts_the_sessions_that_gateways_finish():
    book = FigureBook()
    for second in range(3):
        book.update(
            [
                status("rollout_worker", 1, trajectories=10 * second, tokens=60 * second),
                status("gateway", 2, trajectories=5 * second, tokens=20 * second),
                status("trainer", 3, tokens=1000 * second),
            ],
            now=float(second),
        )
    assert (book.sampled("trajectories"), book.sampled("tokens")) == (30, 160)
    assert (book.rate("trajectories"), book.rate("tokens")) == (15, 80)


def test_totals_go_on_over_another_up(tmp_path):
    path = tmp_path / "figures.json"
    book = FigureBook(path)
    book.update([status("trainer", 10, idle_seconds=2.0)])
    book.wall_seconds, book.restarts = 5.0, 3
    book.save()
    again = FigureBook(path)
    again.update([status("trainer", 20, idle_seconds=1.5)])
    assert (again.total("trainer", "idle_seconds"), again.wall_seconds, again.restarts) == (3.5, 5.0, 3)


def test_rates_are_of_the_last_seconds(tmp_path):
    book = FigureBook(tmp_path / "f.json")
    for second in range(31):
        count = 100 * min(second, 20)  # stands still from second 20 on
        book.update([status("rollout_worker", 1, trajectories=count, tokens=6 * count)], now=float(second))
        if second == 15:
            assert book.rate("trajectories") == pytest.approx(100)
            assert book.rate("tokens") == pytest.approx(600)
    assert book.rate("trajectories") == 0


def test_a_restart_doesnt_make_a_rate_negative(tmp_path):
    book = FigureBook(tmp_path / "f.json")
    book.update([status("rollout_worker", 1, trajectories=50)], now=0.0)
    book.update([status("rollout_worker", 2, trajectories=1)], now=1.0)
    assert book.rate("trajectories") == 1.0


@pytest.fixture
def book(tmp_path):
    book = FigureBook(tmp_path / "f.json")
    evals = [[0, 0, 0.21], [12, 10, 0.5], [25, 20, None]]
    book.update(
        [
            status("buffer", 1, depth=21, evals=evals, staleness={"mean": 1.25, "p99": 2, "max": 2}, open=96, finished=False),
            status("trainer", 2, step=42, batches=21, reward_mean=0.61, versions=4, wire_bytes=8000, density=0.7),
            status("publisher", 3, head=26),
            status("rollout_worker", 4, version=25, trajectories=1),
        ]
    )
    return book


def test_progress_is_the_newest_of_everything(book):
    progress = progress_of(book, steps=130, max_staleness=2)
    assert (progress.depth, progress.version, progress.reward_train, progress.delta_bytes) == (21, 26, 0.61, 2000)
    assert (progress.reward_held_out, progress.held_out_depth) == (0.5, 10), "an evaluation without a mean is no reward"
    line = progress_line(progress)
    for part in ("step 21/130", "0.610 train", "held-out 0.500 (at step 10)", "version 26", "1.25 (max 2 of 2)", "delta 2.0 kB"):
        assert part in line


def test_progress_before_anyone_has_spoken_is_empty(tmp_path):
    progress = progress_of(FigureBook(tmp_path / "f.json"), steps=3, max_staleness=0)
    assert (progress.depth, progress.version, progress.reward_train, progress.finished) == (0, None, None, False)
    assert "held-out -" in progress_line(progress)


def test_elsewhere_than_on_a_terminal_a_line_comes_every_few_seconds(book):
    clock = [0.0]
    console = Console(record=True, width=300, force_terminal=False)
    with View(console, "title", {}, clock=lambda: clock[0]) as view:
        for second in range(11):
            clock[0] = float(second)
            book.update([status("buffer", 1, depth=second)], now=float(second))
            view.show(progress_of(book, steps=130, max_staleness=2), book)
    lines = console.export_text().strip().splitlines()
    assert [line.split("step ")[1].split("/")[0] for line in lines] == ["0", "5", "10"]


def test_on_a_terminal_the_table_shows_the_same(book):
    console = Console(record=True, width=120, force_terminal=True)
    view = View(console, "towline demo", {"buffer": 1})
    console.print(view._table(progress_of(book, steps=130, max_staleness=2), book))
    text = console.export_text()
    for part in (
        "21 of 130",
        "0.500",
        "policy version",
        "26",
        "1.25 mean",
        "2.0 kB a version, 70% of the weights changed",
        "buffer",
    ):
        assert part in text


def test_every_service_that_the_run_is_to_have_or_that_speaks_is_shown(tmp_path):
    book = FigureBook(tmp_path / "f.json")
    expected = {"buffer": 1, "rollout_worker": 3, "gateway": 2}
    assert services_line(expected, book, 0).plain == "buffer  rollout_worker 0/3  gateway 0/2  restarts 0"
    book.update([status("gateway", 1), status("bridge", 2)])
    assert services_line(expected, book, 1).plain == "buffer  rollout_worker 0/3  gateway 1/2  bridge  restarts 1"


def test_bytes_are_written_for_people():
    assert [size(value) for value in (None, 12, 34_100, 1_200_000, 3.4e9)] == ["-", "12 B", "34.1 kB", "1.2 MB", "3.4 GB"]


def test_a_status_entry_is_read_as_the_services_write_it():
    entry = {
        "service": "buffer",
        "replica": "0",
        "pid": 3,
        "port": 80,
        "ready": False,
        "reason": "bus_full",
        "at": 2.5,
        "figures": {"depth": 1},
    }
    (found,) = decode_statuses({"buffer.0": json.dumps(entry).encode()})
    assert found == Status("buffer", "0", 3, 80, False, "bus_full", 2.5, {"depth": 1})


def test_a_trainer_that_has_trained_nothing_since_its_start_has_no_reward_to_tell(book):
    book.update([status("trainer", 9, step=42, batches=0, reward_mean=0.0)], now=1e9)
    assert progress_of(book, steps=130, max_staleness=2).reward_train is None
